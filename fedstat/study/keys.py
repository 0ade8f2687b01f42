"""Every key of a grid's file and every setting of a run: what it means, where it may stand, and its default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import Parameter
from typing import Any, NamedTuple

from fedstat import data as datasets
from fedstat._utils import check
from fedstat.data import arrays
from fedstat.fl import algorithms, nets
from fedstat.fl.aggregators import AGGREGATORS
from fedstat.study import federation
from fedstat.study.experiment import Settings


def named() -> list[str]:
    """Algorithms that a command line can make; FedSplit is not one, as it needs a split."""
    every = ((name, algorithms.settings_of(name).values()) for name in algorithms.ALGORITHMS)
    return [name for name, settings in every if all(one.default is not Parameter.empty for one in settings)]


MEANINGS: dict[str, str] = {
    "label": "name of this setting in tables",
    "data": f"data set: {', '.join(datasets.SOURCES)}, or the path of one's own arrays, own.npz, with {arrays.ARRAYS}; "
    "with :train or :test, only its published part",
    "partition": f"how samples go to clients: {', '.join(federation.PARTITIONS)}",
    "clients": "number of clients C; the partition natural has its own",
    "samples": "largest number of samples per client",
    "min_size": "smallest number of samples per client",
    "test": "share of a client's samples for test",
    "validation": "share of a client's samples for validation",
    "new_share": "share of new clients, which do not train and are evaluated at the end",
    "labels": "permuted: every client numbers the classes in an order of its own",
    "domains": "domains of the partition domains, or superclasses (default "
    f"{', '.join(map(repr, federation.DOMAINS))}); clients are dealt to them evenly",
    "net": f"network: {', '.join(nets.NETS)}",
    "width": "factor of the network's channels and hidden units",
    "norm": "normalisation of the network's layers",
    "net_options": "further arguments of the network, such as hidden=32 or hidden=64,32",
    "algorithm": f"algorithm: {', '.join(named())}; with + (fine-tuned), -shrunken, -low-rank or -private-head at the "
    "end, or the last followed by + or -shrunken; or path/to/file.py:name, a function that makes an Algorithm, whose "
    "arguments are options too",
    "options": "settings of the algorithm and of its suffix, such as by=client",
    "rounds": "communication rounds T",
    "participation": "share of the clients active in a round, or a range from which it is drawn in every round",
    "sampling": "fixed: that share is active in every round; poisson: each client with that probability",
    "aggregator": f"how the server combines each parameter over clients: {', '.join(AGGREGATORS)} (0.1 drops a "
    "tenth of the values at each end)",
    "clip": "make the run differentially private: largest norm of a client's update (needs --noise-multiplier)",
    "noise_multiplier": "standard deviation of the noise on the sum of updates, over --clip",
    "delta": "δ of --clip: probability with which ε may fail (default 1e-5)",
    "clip_moments": "largest norm of what a client tells of its weights for FedFac's split, in units of that of the "
    "server's copy (default 1)",
    "noise_multiplier_moments": "--noise-multiplier of FedFac's moments (default the same)",
    "local_epochs": "epochs of local training in a round",
    "batch_size": "samples in a batch, 0 for all",
    "optimizer": "local optimiser",
    "lr": "local learning rate",
    "server_lr": "learning rate of the server",
    "seed": "seed of partition, start, participation and batches",
    "evaluate_every": "rounds between evaluations",
    "ablation": "number of draws of random values that replace shared or personal units at the end",
    "probe": "halves: also train active clients on each half of their samples, to tell what is their own from noise; "
    "drift: distance of clients from the server's aggregate; uploads: weights before aggregation; "
    "parameters: factors of composed weights",
    "keep_weights": "layers whose weights are stored, or all, or none",
    "readouts": "other ways to predict after the last round, such as fedavg+ or 'fedavg-shrunken by=layer'",
    "precision": "precision of matrix products in training",
}
"""What the settings of a run mean, in a line for command lines and documentation."""


class Key(NamedTuple):
    """A key of a grid's file.

    Attributes
    ----------
    name : str
    tables : tuple of str
        Where it may stand: "" for the top of the file, "scale.NAME", "dataset", "method", "method.sweep", "tune".
    meaning : str
    default : object
        None where there is none.
    methods : tuple of str
        Algorithms that take it; none where it is for all runs.
    """

    name: str
    tables: tuple[str, ...]
    meaning: str
    default: Any = None
    methods: tuple[str, ...] = ()


ANYWHERE = ("", "scale.NAME", "dataset", "method", "method.sweep", "tune")
STRUCTURE = (
    Key("seeds", ("", "scale.NAME", "tune"), "seeds: every data set and method is run with each; in [tune], the seeds "
        "to tune on", [0]),
    Key("dataset", ("",), "[[dataset]], one table for each setting of the data; crossed with every [[method]]"),
    Key("method", ("",), "[[method]], one table for each method, with at least one key"),
    Key("scale", ("",), "[scale.NAME], settings that --scale NAME takes in place of the others; a data set or a method "
        "may hold a table NAME of its own"),
    Key("tune", ("",), "[tune], lists of candidates, which --tune tries in this order; [tune.NAME] for a scale"),
    Key("methods", ("dataset",), "algorithms that the data set is for, by name; all by default"),
    Key("studies", ("dataset", "method"), "studies that the table is for: data sets and methods of no common study are "
        "not crossed, and --study NAME makes one study's runs"),
    Key("sweep", ("method",), "[method.sweep], lists of values: a run for every combination"),
    Key("together", ("tune",), "choose over all data sets together, not for each", False),
)  # fmt: skip
"""Keys that say how runs are put together."""


def keys(algorithms_too: Iterable[str] = ()) -> list[Key]:
    """Every key of a grid's file, with its meaning and default: structure, settings of runs, settings of methods.

    Parameters
    ----------
    algorithms_too : iterable of str
        Algorithms in users' files, such as "mine.py:ditto", whose settings are keys too.

    Examples
    --------
    >>> next(key for key in keys() if key.name == "mu")[2:]
    ("μ, strength of the penalty on distance from the server's model", 0.01, ('fedprox', 'fedprox+'))
    """
    found = [*STRUCTURE]
    found += [Key(one.name, ANYWHERE, MEANINGS[one.name], one.default) for one in fields(Settings)]
    takers: dict[tuple[str, str, Any], list[str]] = {}
    for method in (*algorithms.ALGORITHMS, *algorithms_too):
        for name, one in algorithms.settings_of(method).items():
            default = None if one.default is Parameter.empty else one.default
            takers.setdefault((name, one.help, _plain(default)), []).append(method)
    of_methods = sorted(takers.items(), key=lambda item: item[0][0])
    return found + [Key(name, ANYWHERE, said, default, tuple(who)) for (name, said, default), who in of_methods]


def _plain(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


def require(found: Mapping[str, Any], table: str, known: Iterable[str], where: str) -> None:
    """ValueError, with the nearest names, if a table of a grid's file has a key that it cannot have.

    Parameters
    ----------
    found : mapping
        The table.
    table : str
        One of ``ANYWHERE``.
    known : iterable of str
        Names of settings, and of tables that may stand there.
    where : str
        For the message.
    """
    names = [*known, *(key.name for key in STRUCTURE if table in key.tables)]
    for name in found:
        if name not in names:
            hint = check.did_you_mean(name, names, cutoff=0.5)
            elsewhere = next((f" It belongs in {_heading(key.tables)}." for key in STRUCTURE if key.name == name), "")
            raise ValueError(f"{where} cannot hold the key {name!r:.200}.{elsewhere or hint}")


def _heading(tables: tuple[str, ...]) -> str:
    heads = {"": "the top of the file", "dataset": "[[dataset]]", "method": "[[method]]"}
    return " or ".join(heads.get(table, f"[{table}]") for table in tables)
