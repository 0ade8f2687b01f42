"""Settings of a run by name, and the run that they describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedstat import data as datasets
from fedstat import store
from fedstat._utils import check, guard
from fedstat._utils.lazy import xr
from fedstat._utils.settings import check_fields, setting
from fedstat.data import arrays
from fedstat.data._files import folder
from fedstat.fl import algorithms, custom, masks, nets, prepare
from fedstat.fl.aggregate import Aggregator, private
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.cohort import checked
from fedstat.fl.job import ComputeConfig, Participation, Precision, Sampling, TrainConfig
from fedstat.fl.prepare import AGGREGATORS, aggregator_named, optimizer_named
from fedstat.fl.training import PROBES, train
from fedstat.study import federation
from fedstat.study.federation import Federation, like, make, network


def named() -> list[str]:
    """Algorithms that a command line can make; FedSplit is not one, as it needs a split."""
    every = ((name, algorithms.settings_of(name).values()) for name in algorithms.ALGORITHMS)
    return [name for name, settings in every if all(one.default is not Parameter.empty for one in settings)]


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
    found += [Key(one.name, ANYWHERE, one.metadata["help"], one.default) for one in fields(Settings)]
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


OF_PRIVACY = ("clip", "noise_multiplier", "delta", "clip_moments", "noise_multiplier_moments")
"""Settings of :func:`fedstat.fl.aggregate.private`."""

OF_AGGREGATOR = (*OF_PRIVACY, "aggregator")
"""Settings of :meth:`Settings.make_aggregator`."""

LATER = ("labels", "domains", "sampling", "keep_weights", *OF_AGGREGATOR)
"""Settings that older runs do not have: at their defaults they are not noted, so that these keep names and settings."""


@dataclass(frozen=True)
class Settings:
    """Settings of one run; :meth:`of` also takes those of its algorithm by name.

    Parameters
    ----------
    label : str, optional
        Name of the setting in tables; data set and partition by default.
    data, partition : str
        A name of ``fedstat.data.SOURCES``, of which "cifar-100:test" takes the published test samples alone, or the
        path of one's own arrays (:func:`fedstat.data.arrays.load`), and one of
        ``fedstat.study.federation.PARTITIONS``.
    clients : int
        Number of clients; the partition "natural" has its own.
    samples : int, optional
        Largest number of samples of a client, over all subsets.
    min_size : int
        Smallest number of samples of a client: smaller ones are topped up (Dirichlet) or left out (natural).
    test, validation : float
        Shares of each client's samples. A natural partition of data with published test samples uses these, and takes
        the last of the training samples for validation.
    new_share : float
        Share of new clients, which do not train and are evaluated at the end (Table 3).
    labels : {"common", "permuted"}
        "permuted": every client numbers the classes in an order of its own, see
        :func:`fedstat.data.partition.permute_labels`; its output layer must then be its own.
    domains : tuple of str
        Of the partition "domains": names of :data:`fedstat.data.partition.CIFAR100_DOMAINS`, by default all five, or of
        superclasses, all with the same number of classes. Clients are dealt to them evenly.
    net : str
        A name of ``fedstat.fl.nets.NETS``.
    width : float
        Multiplies the network's channels and hidden units.
    norm : {"group", "batch"}, optional
    net_options : tuple of str
        Further arguments of the network, such as "hidden=32".
    algorithm : str
        A name of ``fedstat.fl.algorithms.ALGORITHMS``, or "path/to/file.py:name": a function that makes an
        :class:`fedstat.fl.algorithm.Algorithm`, whose arguments are its settings. Either may end in one of
        ``fedstat.fl.algorithms.WRAPPERS``.
    options : tuple of str
        Settings of the algorithm, such as "components=2", in the order of :func:`fedstat.fl.algorithms.settings_of`;
        the others have its defaults.
    rounds, participation, local_epochs, batch_size, optimizer, lr, server_lr, seed, evaluate_every, ablation, probe,
    precision
        See :func:`fedstat.fl.train`; ``batch_size`` 0 takes all samples, two numbers are a range of participation. The
        seed is also that of the partition.
    sampling : {"fixed", "poisson"}
        See :func:`fedstat.fl.train`.
    aggregator : str
        A name of ``fedstat.fl.prepare.AGGREGATORS``, such as "median" or "trimmed-mean:0.1".
    clip, noise_multiplier, delta, clip_moments, noise_multiplier_moments : float, optional
        Make the run differentially private, see :func:`fedstat.fl.aggregate.private`: the first two do, the others have
        its defaults. Without ``clip`` the others have no effect.
    readouts : tuple of str
        Other ways to predict after the last round: the algorithm's name followed by one of
        ``fedstat.fl.algorithms.READOUTS`` and its settings, such as "fedavg-shrunken by=layer".
    keep_weights : tuple of str
        Layers whose weights are stored, or "all" or "none" alone.
    """

    label: str | None = setting(None, "data", "name of this setting in tables")
    data: str = setting(
        "digits",
        "data",
        f"data set: {', '.join(datasets.SOURCES)}, or the path of one's own arrays, own.npz, with {arrays.ARRAYS}; "
        "with :train or :test, only its published part",
    )
    partition: str = setting("dirichlet:0.1", "data", f"how samples go to clients: {', '.join(federation.PARTITIONS)}")
    clients: int = setting(20, "data", "number of clients C; the partition natural has its own", low=1)
    samples: int | None = setting(None, "data", "largest number of samples per client", low=1)
    min_size: int = setting(10, "data", "smallest number of samples per client", low=1)
    test: float = setting(0.2, "data", "share of a client's samples for test", above=0, below=1)
    validation: float = setting(0.0, "data", "share of a client's samples for validation")
    new_share: float = setting(
        0.0, "data", "share of new clients, which do not train and are evaluated at the end", low=0, below=1
    )
    net: str = setting("mlp", "method", f"network: {', '.join(nets.NETS)}", choices=tuple(nets.NETS))
    width: float = setting(1.0, "method", "factor of the network's channels and hidden units", above=0)
    norm: Literal["group", "batch"] | None = setting(None, "method", "normalisation of the network's layers")
    net_options: tuple[str, ...] = setting(
        (), "method", "further arguments of the network, such as hidden=32 or hidden=64,32"
    )
    algorithm: str = setting(
        "fedfac-dynamic",
        "method",
        f"algorithm: {', '.join(named())}; with + (fine-tuned), -shrunken, -low-rank or -private-head at the end, or "
        "the last followed by + or -shrunken; or path/to/file.py:name, a function that makes an Algorithm, whose "
        "arguments are options too",
    )
    options: tuple[str, ...] = setting((), "method", "settings of the algorithm and of its suffix, such as by=client")
    rounds: int = setting(20, "training", "communication rounds T", low=1)
    participation: Participation = setting(
        TrainConfig.participation,
        "training",
        "share of the clients active in a round, or a range from which it is drawn in every round",
    )
    local_epochs: int = setting(TrainConfig.local_epochs, "training", "epochs of local training in a round", low=1)
    batch_size: int = setting(TrainConfig.batch_size, "training", "samples in a batch, 0 for all", low=0)
    optimizer: Literal["sgd", "adam"] = setting("sgd", "training", "local optimiser")
    lr: float = setting(0.1, "training", "local learning rate", above=0)
    server_lr: float = setting(TrainConfig.server_lr, "training", "learning rate of the server", above=0)
    seed: int = setting(TrainConfig.seed, "training", "seed of partition, start, participation and batches", low=0)
    evaluate_every: int = setting(1, "what is measured", "rounds between evaluations", low=1)
    ablation: int = setting(
        0,
        "what is measured",
        "number of draws of random values that replace shared or personal units at the end",
        low=0,
    )
    probe: tuple[str, ...] = setting(
        (),
        "what is measured",
        "halves: also train active clients on each half of their samples, to tell what is their own from noise; "
        "drift: distance of clients from the server's aggregate; uploads: weights before aggregation; "
        "parameters: factors of composed weights",
        choices=tuple(PROBES),
    )
    readouts: tuple[str, ...] = setting(
        (),
        "what is measured",
        "other ways to predict after the last round, such as fedavg+ or 'fedavg-shrunken by=layer'",
    )
    precision: Precision = setting(ComputeConfig.precision, "training", "precision of matrix products in training")
    labels: Literal["common", "permuted"] = setting(
        "common", "data", "permuted: every client numbers the classes in an order of its own"
    )
    domains: tuple[str, ...] = setting(
        (),
        "data",
        f"domains of the partition domains, or superclasses (default {', '.join(map(repr, federation.DOMAINS))}); "
        "clients are dealt to them evenly",
    )
    sampling: Sampling = setting(
        TrainConfig.sampling,
        "training",
        "fixed: that share is active in every round; poisson: each client with that probability",
    )
    aggregator: str = setting(
        "mean",
        "training",
        f"how the server combines each parameter over clients: {', '.join(AGGREGATORS)} (0.1 drops a tenth of the "
        "values at each end)",
    )
    clip: float | None = setting(
        None,
        "privacy",
        "make the run differentially private: largest norm of a client's update (needs --noise-multiplier)",
        above=0,
    )
    noise_multiplier: float | None = setting(
        None, "privacy", "standard deviation of the noise on the sum of updates, over --clip", above=0
    )
    delta: float | None = setting(None, "privacy", "δ of --clip: probability with which ε may fail (default 1e-5)")
    clip_moments: float | None = setting(
        None,
        "privacy",
        "largest norm of what a client tells of its weights for FedFac's split, in units of that of the server's copy "
        "(default 1)",
        above=0,
    )
    noise_multiplier_moments: float | None = setting(
        None, "privacy", "--noise-multiplier of FedFac's moments (default the same)", above=0
    )
    keep_weights: tuple[str, ...] = setting(
        ("all",), "what is measured", "layers whose weights are stored, or all, or none"
    )

    def __post_init__(self) -> None:
        # What can be checked before the data are read; the rest is checked where it is used.
        for name in ("options", "net_options", "readouts", "probe", "domains", "keep_weights"):
            object.__setattr__(self, name, federation.strings(name, getattr(self, name)))
        object.__setattr__(self, "keep_weights", self.keep_weights or Settings.keep_weights)
        check_fields(self)
        for name in ("data", "algorithm"):
            object.__setattr__(self, name, custom.within(getattr(self, name), "."))
        object.__setattr__(self, "options", _canonical(self.algorithm, self.options))
        federation.source_of(self.data)
        kind, _ = federation.partition_of(self.partition)
        federation.require_domains(kind, self.domains, self.clients)
        object.__setattr__(self, "participation", checked(self.participation))
        check.real("validation", self.validation, low=0, high=1 - self.test, open_high=True)
        aggregator = self.make_aggregator()
        if ":" in self.aggregator:  # one form of its number: "trimmed-mean:.10" to "trimmed-mean:0.1"
            object.__setattr__(self, "aggregator", aggregator.name)
        prepare.require_weights(self.make_algorithm(), aggregator)
        for read in self.make_readouts().values():
            read(self.make_algorithm())
        known, net = self.make_algorithm().settings, make(self, *like(federation.source_of(self.data)[0]))
        if "layers" in known:
            masks.resolve(net, known["layers"])
        for layer in self.layers_kept or ():
            alone = ["all", "none"] if len(self.keep_weights) == 1 else []
            check.choice("keep_weights", layer, [*nets.layers(net), *alone])
        for name in {"personal_layers", "global_layers"} & set(known):
            masks.last_layers(net, name, known[name], all_too=name == "global_layers")

    @property
    def name(self) -> str:
        """Label, or data set and partition."""
        permuted = ", permuted labels" if self.labels == "permuted" else ""
        return self.label or f"{custom.short(self.data)}, {self.partition}{permuted}"

    @property
    def layers_kept(self) -> tuple[str, ...] | None:
        """Layers whose weights are stored; None for all."""
        named: dict[tuple[str, ...], tuple[str, ...] | None] = {("all",): None, ("none",): ()}
        return named.get(self.keep_weights, self.keep_weights)

    @property
    def given(self) -> dict[str, Any]:
        """Settings given to the algorithm, by name."""
        return federation.network_options("options", self.options)

    @classmethod
    def of(cls, **settings: Any) -> Settings:
        """Settings of a run and its algorithm, by name.

        Raises
        ------
        ValueError
            If there is no such setting (the nearest names are given), or one is given by name and among the options.

        Examples
        --------
        >>> Settings.of(algorithm="fedprox", mu=0.3).options
        ('mu=0.3',)
        """
        return cls(**_divided(settings, settings.get("options", ()), settings.get("algorithm", cls.algorithm)))

    def but(self, **settings: Any) -> Settings:
        """A copy with some settings replaced, by name; None restores the algorithm's default.

        Examples
        --------
        >>> Settings.of(kappa=0.75, tau=0.5).but(rounds=3, tau=0.25).options
        ('kappa=0.75', 'tau=0.25')
        """
        others = () if "options" in settings else tuple(o for o in self.options if o.partition("=")[0] not in settings)
        algorithm = settings.get("algorithm", self.algorithm)
        return replace(self, **_divided(settings, settings.get("options", others), algorithm))

    def make_algorithm(self) -> Algorithm:
        """The algorithm with its given settings."""
        return algorithms.named(self.algorithm, **self.given)

    def training(self) -> TrainConfig:
        """Settings of training, with the optimiser and the aggregator that are named."""
        return TrainConfig(
            optimizer=optimizer_named(self.optimizer, self.lr),
            participation=self.participation,
            sampling=self.sampling,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size or None,
            server_lr=self.server_lr,
            aggregator=self.make_aggregator(),
            seed=self.seed,
        )

    def make_aggregator(self) -> Aggregator:
        """Return the private aggregator if ``clip`` is given, else the named one."""
        given = {name: value for name in OF_PRIVACY if (value := getattr(self, name)) is not None}
        if not given:
            return aggregator_named(self.aggregator)
        if self.clip is None:
            name = next(iter(given))
            raise check.NoEffectError(name, f"without clip, which makes a run private, but got {given[name]!r}")
        if self.aggregator != Settings.aggregator:
            raise ValueError(
                f"clip={self.clip:g} makes a run private by noise on a sum over clients, but aggregator "
                f"{self.aggregator!r} takes no sum. Remove clip, or use aggregator 'mean'."
            )
        if self.noise_multiplier is None:
            raise ValueError(f"clip={self.clip:g} makes a run private: give noise_multiplier too, such as 1.0")
        return private(**given)

    def make_readouts(self) -> dict[str, Callable[[Algorithm], Algorithm]]:
        """The readouts, as wrappers of the algorithm."""
        made: dict[str, Callable[[Algorithm], Algorithm]] = {}
        for text in self.readouts:
            if self.algorithm.endswith(algorithms.READOUTS):
                raise ValueError(
                    f"{self.algorithm} already predicts in its own way: give readouts to the plain method, such as "
                    "algorithm fedavg with readouts fedavg+"
                )
            name, *options = text.split() or [""]
            end = name.removeprefix(self.algorithm)
            if not name.startswith(self.algorithm) or end not in algorithms.READOUTS:
                ways = ", ".join(self.algorithm + end for end in algorithms.READOUTS)
                raise ValueError(f"readouts of {self.algorithm} must begin with one of {ways}, but got {text!r:.200}")
            chosen = federation.network_options("readouts", tuple(options))
            algorithms.require_settings(name, chosen)
            made[text] = partial(algorithms.WRAPPERS[end], **chosen)
        return made


def names(more: Iterable[Any] = ()) -> list[str]:
    """Names of all settings: fields of :class:`Settings`, and settings of the algorithms, ``more`` among them."""
    every = [*algorithms.ALGORITHMS, *(name for name in more if custom.is_own(name))]
    of_methods = [setting for algorithm in every for setting in algorithms.settings_of(algorithm)]
    return list(dict.fromkeys([*(field.name for field in fields(Settings)), *of_methods]))


def _divided(settings: Mapping[str, Any], options: Any, algorithm: Any) -> dict[str, Any]:
    """Fields of :class:`Settings`, settings of the algorithm being put among the options."""
    common = {field.name for field in fields(Settings)}
    chosen = {k: v for k, v in settings.items() if k in common}
    known, options = names([algorithm]), federation.strings("options", options)
    for name in settings:
        check.choice("a setting", name, known)
    if twice := {option.partition("=")[0] for option in options} & (settings.keys() - common):
        raise ValueError(f"{min(twice)} is given twice, by name and among the options {list(options)}")
    more = [f"{k}={federation.text(k, v)}" for k, v in settings.items() if k not in common and v is not None]
    return chosen | {"options": (*options, *more)}


def _canonical(algorithm: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """Options in the order of the algorithm's settings, with numbers in one form: "mu=1" to "mu=1.0"."""
    takes, given = algorithms.settings_of(algorithm), federation.network_options("options", options)
    algorithms.require_settings(algorithm, given)
    found = []
    for name, taken in takes.items():
        if name in given:
            value = given[name]
            if isinstance(value, tuple) and not taken.several:
                raise ValueError(f"{name} must be one value, but got {value!s:.200}")
            if taken.number and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            found.append(f"{name}={federation.text(name, value)}")
    return tuple(found)


def run(
    settings: Settings,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    progress: Callable[[int], object] | None = None,
    **where: Any,
) -> xr.DataTree:
    """Make the data, the network and the algorithm that the settings name, and train.

    Parameters
    ----------
    settings : Settings
    out, resume, progress
        See :func:`fedstat.fl.train`.
    data_dir : path, optional
        See :func:`fedstat.data.load`.
    **where
        device, client_chunk, threads and memory, see :func:`fedstat.fl.train`.

    Returns
    -------
    DataTree
        See :func:`fedstat.fl.train`; its ``config`` holds all settings.

    Examples
    --------
    >>> done = run(Settings.of(clients=10, rounds=2, participation=0.5, tau=0.5))
    >>> done["metrics/accuracy"].sizes
    Frozen({'round': 2, 'client': 10})
    """
    fed, new = federated(settings, data_dir)
    return train(
        fed,
        network(settings, fed),
        settings.make_algorithm(),
        **vars(settings.training()) | {"optimizer": settings.optimizer},  # by name, as the run notes it
        lr=settings.lr,
        rounds=settings.rounds,
        precision=settings.precision,
        out=out,
        resume=resume,
        keep_weights=settings.layers_kept,
        evaluate_every=settings.evaluate_every,
        new=new,
        ablation=settings.ablation,
        probe=settings.probe,
        readouts=settings.make_readouts(),
        progress=progress,
        about=about(settings) | files(settings),
        **where,
    )


def files(settings: Settings) -> dict[str, dict[str, str]]:
    """Names and digests of a user's own files, for a run's settings: no other files continue the run."""
    found = {"algorithm_file": custom.noted(settings.algorithm)} if custom.is_own(settings.algorithm) else {}
    data, _ = federation.source_of(settings.data)
    if arrays.is_arrays(data):
        found[DATA_FILE] = {"name": custom.short(data), "sha256": arrays.digest(data)}
    return found


DATA_FILE = "data_file"


def about(settings: Settings) -> dict[str, Any]:
    """All settings, as noted in a run's store; those of ``LATER`` only if they are not the default."""
    noted = {k: v for k, v in asdict(settings).items() if k not in LATER or v != getattr(Settings, k)}
    return noted | {"label": settings.name}


def settings_of(path: str | Path) -> dict[str, Any]:
    """Settings that the run at ``path`` was made with, see :func:`noted`."""
    return noted(store.attributes(Path(path)))


def noted(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in a run's attributes; those of older runs are not kept, and {}."""
    found = guard.parsed("the attribute about", attrs.get("about", "{}").encode(), finite=False)
    return {field.name: found[field.name] for field in fields(Settings) if field.name in found}


def federated(settings: Settings, data_dir: str | Path | None = None) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Clients that train, and new clients or None."""
    # Runs that differ only in the method use the same data.
    dealt = Federation(*(getattr(settings, name) for name in Federation._fields))
    return federation.federated(dealt, _place(data_dir))


def _place(data_dir: str | Path | None) -> str:
    """Folder of data wherever it is named, so that a place stands for one folder."""
    return str(folder(data_dir).absolute())


def read_data(runs: Iterable[Settings], data_dir: str | Path | None = None) -> None:
    """Read the data sets of some runs, the first run's last to stay cached; raises as :func:`fedstat.data.load`."""
    federation.read((one.data for one in runs), _place(data_dir))
