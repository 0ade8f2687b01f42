"""Train small federated runs and store all their arrays: FOLDER [--base] [NAME ...].

The runs use the public API of whichever fedstat is on the path, so that two revisions can be compared to the bit
(``compare_revisions.py``). Every run passes all settings: a changed default changes no run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
import zarr

import fedstat
from fedstat.fl import aggregate, algorithms, chunks, nets, train

# Where the API of the base differs: a setting (its name, or a value that is a string) here -> in the base.
BASE_SETTINGS: dict[str, str] = {"unseen_clients": "new"}
# Keyword arguments of train that the base lacks; their values here are the defaults.
NEW_OPTIONS: tuple[str, ...] = ("task", "loss")
# Arrays that were renamed since the base: a regular expression -> its replacement, as re.sub takes them.
RENAMED_ARRAYS: dict[str, str] = {
    r"/new/": "/unseen_clients/",
    r"/readouts/readout$": "/prediction_rules/rule",
    r"/readouts/": "/prediction_rules/",
    r"^(state[^/]*)/params/": r"\1/client_params/",
    r"^(state[^/]*)/own/": r"\1/personal_units/",
    r"^(state[^/]*)/server/": r"\1/global_params/",
    r"^(state[^/]*)/sharing/": r"\1/mask/",
    r"^(state[^/]*)/memory/": r"\1/algorithm_state/",
    r"^(state[^/]*)/common/": r"\1/common_params/",
}
# Arrays that the base lacks: regular expressions.
NEW_ARRAYS: tuple[str, ...] = ()
# Runs that the base cannot make.
NEW_RUNS: set[str] = set()

WALL_CLOCK = {"seconds"}
SIZES = [23, 7, 30, 4, 16, 16, 11, 9]
FINETUNED = {"epochs": 2, "rate": 1.0, "by": "pooled", "held_out": None}
SHRUNKEN = {"by": "pooled", "grid": (0.0, 0.3, 1.0), "held_out": "halves", "epochs": 2}
FACTORIZED = {
    "epsilon": 3.0, "tau": 0.9, "at_least": 1, "sparsity": 0.03, "rank": 1, "mu": True, "matching": "similarity",
    "kernels": "base", "variant": "paper",
}  # fmt: skip
FEDFAC = {"layers": ("fc1",), "kappa": 0.7, "tau": 0.5, "estimator": "pa", "variant": "paper", "fdr": None}

# All settings of every algorithm. Each has a run of its name.
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedavg+": FINETUNED,
    "fedavg-shrunken": SHRUNKEN,
    "fedprox": {"mu": 0.7},
    "fedprox+": {"mu": 0.7} | FINETUNED,
    "per-fedavg": {"alpha": 0.3, "finetune_steps": 4},
    "per-fedavg-hf": {"alpha": 0.3, "finetune_steps": 1, "difference": 0.02},
    "pfedme": {"lam": 2.0, "eta": 0.2, "inner_steps": 3, "variant": "paper"},
    "ditto": {"lam": 0.7, "own_epochs": 3},
    "fedper": {"personal_layers": 1},
    "lg-fedavg": {"global_layers": 1},
    "fedbn": {},
    "fedrep": {"personal_layers": 1, "head_epochs": 3, "body_epochs": 1},
    "fedrod": {},
    "fedphp": {"mu": 0.9, "horizon": 3, "lam": 0.3, "transfer": "mmd"},
    "pfedsd": {"lam": 0.7, "temperature": 2.0},
    "fedem": {"components": 3},
    "clustered-fl": {"eps1": 0.5, "eps2": 0.1, "gamma": 0.0, "max_clusters": None, "variant": "paper"},
    "fedamp": {"lam": 0.5, "alpha": 0.5, "sigma": 3.0, "attention": "distance", "self_weight": 0.1},
    "fedfomo": {"downloads": 3, "epsilon": 0.3, "decay": 0.05},
    "fedcac": {"tau": 0.5, "beta": 3},
    "pfedgate": {"sparsity": 0.5, "blocks": 5, "gate_rate": 1.0},
    "pfedpara": {"gamma": 0.5},
    "fedsplit": {"shared": {"fc1": (True, False, False, True, False, False, True, False, False, True)}},
    "random": {"layers": ("fc1",), "shared_fraction": 0.4, "tau": None},
    "random-redrawn": {"layers": ("fc1",), "shared_fraction": 0.4, "tau": None},
    "fedfac-static": FEDFAC | {"pretrain_epochs": 2},
    "fedfac-dynamic": FEDFAC | {"on": "weights", "warm_start": True},
    "factorized-fl-alpha": FACTORIZED,
    "factorized-fl-beta": FACTORIZED,
    "feddecomp": {
        "rank_linear": 0.3, "rank_conv": 0.3, "lora_epochs": 1, "global_epochs": 1, "alternating": True,
        "reverse": False, "mean": "all", "variant": "paper",
    },
    "fedcp": {
        "lam": 5.0, "context": "both", "policy": True, "align": True, "global_head": True, "policy_layers": 1,
        "policy_norm": "layer", "policy_activation": "relu", "variant": "paper",
    },
}  # fmt: skip

# All keyword arguments of train but out, resume and progress.
OPTIONS: dict[str, Any] = {
    "rounds": 3, "participation": 0.6, "sampling": "fixed", "local_epochs": 2, "batch_size": 5, "optimizer": "sgd",
    "lr": 0.1, "server_lr": 1.0, "aggregator": "mean", "optimizer_state": "reset", "seed": 4, "device": "cpu",
    "client_chunk": 8, "threads": 1, "precision": "float32", "memory_budget": None, "checkpoints": (2,),
    "keep_weights": None, "evaluate_every": 1, "unseen_clients": None, "ablation": 0, "probe": None,
    "prediction_rules": {}, "metrics": (), "store_predictions": False, "about": {}, "task": None, "loss": None,
}  # fmt: skip
KEPT = {"optimizer": "adam", "lr": 0.01, "optimizer_state": "keep", "rounds": 4}
SEVERAL = {"epochs": (0, 1, 3), "rate": 1.0, "by": "pooled", "held_out": "halves"}
MEASURED = {
    "participation": 1.0, "evaluate_every": 2, "probe": ("split-half", "drift", "trained-weights", "parameters"),
    "ablation": 2, "unseen_clients": [9, 5, 12],
}  # fmt: skip
PREDICTED = {
    "fine-tuned": ("finetuned", FINETUNED),
    "early, halves": ("finetuned", SEVERAL),
    "early, validation, client": ("finetuned", SEVERAL | {"by": "client", "held_out": "validation"}),
    "shrunken": ("shrunken", SHRUNKEN),
}
BY_LAYER = {"by": "layer", "grid": None, "held_out": None, "epochs": 2}
EMPTY = {"sampling": "poisson", "participation": 0.3, "rounds": 4, "seed": 1}  # 3, 3, 0 and 2 clients


class Run(NamedTuple):
    """A run: an algorithm with the settings and options that differ from the tables, and how the run is made."""

    algorithm: str
    settings: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    net: str = "mlp"
    validation: bool = False
    on_disk: bool = False
    interrupted: int = 0
    """Round after which a first training is interrupted; a second one resumes."""
    extended: int = 0
    """Rounds of a first training that ends; a second one makes the run longer."""
    processes: int = 1


RUNS: dict[str, Run] = {name: Run(name) for name in SETTINGS} | {
    "fedbn": Run("fedbn", net="batch norm"),
    "fedfomo": Run("fedfomo", validation=True),
    "optimizer kept": Run("fedavg", {}, KEPT | {"server_lr": 0.5, "participation": (0.3, 1.0), "checkpoints": (1, 3)}),
    "cnn": Run("fedavg", net="cnn", options={"rounds": 2}),
    "updates": Run("fedfac-dynamic", {"on": "updates", "warm_start": False}, {"server_lr": 0.5}),
    "agreement": Run("fedfac-dynamic", {"estimator": "icc", "kappa": 0.85, "on": "updates"}),
    "published code": Run("fedfac-dynamic", {"estimator": "leverage", "tau": "mean", "variant": "code"}),
    "test": Run("fedfac-static", {"estimator": "icc", "kappa": 0.85, "tau": "test", "fdr": 0.05}),
    "chunks": Run("fedper", {}, {"client_chunk": 3}),
    "threads": Run("fedfac-dynamic", {}, {"client_chunk": 2, "threads": 2, "participation": 1.0}),
    "choice on halves": Run("fedavg+", SEVERAL),
    "choice by clients": Run("fedavg-shrunken", {"by": "client", "held_out": "validation"}, validation=True),
    "choice by layer": Run("fedavg-shrunken", BY_LAYER, {"participation": 1.0}),
    "private": Run("fedfac-dynamic", {}, EMPTY | {"aggregator": "private"}),
    "private, static": Run("fedfac-static", {}, EMPTY | {"aggregator": "private", "optimizer_state": "keep"}),
    "empty rounds": Run("fedfac-dynamic", {}, EMPTY),
    "empty rounds, mixing": Run("fedcac", {}, EMPTY | {"server_lr": 0.5}),
    "median": Run("fedper", {}, {"aggregator": "median"}),
    "server momentum": Run("fedper", {}, {"aggregator": "momentum"}),
    "measured": Run("fedfac-dynamic", {}, MEASURED | {"prediction_rules": PREDICTED}, validation=True),
    "measured, composed": Run("feddecomp", {}, MEASURED | {"prediction_rules": PREDICTED}, validation=True),
    "measured, mixing": Run("fedcac", {}, MEASURED, validation=True),
    "resumed": Run("fedphp", {}, KEPT, interrupted=2),
    "extended": Run("fedfac-dynamic", {}, KEPT, extended=2),
    "on disk": Run("fedphp", {}, KEPT, on_disk=True),
    "on disk, resumed": Run("fedper", {}, KEPT, on_disk=True, interrupted=2),
}
RUNS |= {
    f"{name}, two processes": RUNS[name]._replace(processes=2)
    for name in (
        "fedavg", "fedfac-dynamic", "test", "fedamp", "fedcp", "factorized-fl-beta", "fedem", "choice by layer",
        "median", "measured", "extended",
    )
}  # fmt: skip


def samples(sizes: list[int], seed: int, net: str, subsets: dict[str, int | None]) -> xr.Dataset:
    """Samples of clients: for each subset a number of every client, or None for the given sizes."""
    rng = np.random.default_rng(seed)
    numbers = {subset: sizes if n is None else [n] * len(sizes) for subset, n in subsets.items()}
    client = np.concatenate([np.repeat(np.arange(len(sizes)), n) for n in numbers.values()])
    x = rng.normal(size=(len(client), 6) if net == "mlp" else (len(client), 1, 16, 16)).astype(np.float32)
    flat = x.reshape(len(x), -1)
    own = rng.normal(size=len(sizes))[client]
    y = (flat[:, 0] + own * flat[:, 1] > 0).astype(int) + (flat[:, 2] + rng.normal(size=len(x)) > 0.5)
    dims = ("sample", "feature") if net == "mlp" else ("sample", "channel", "row", "column")
    split = np.repeat(np.array([*numbers], object), [sum(n) for n in numbers.values()])
    return xr.Dataset({"x": (dims, x), "y": ("sample", y)}, {"client": ("sample", client), "split": ("sample", split)})


def network(name: str) -> nets.Net:
    """Make the network of a run."""
    if name == "mlp":
        return nets.mlp([6, 10, 3])
    norm, convolution = {"cnn": ("group", "unfold"), "batch norm": ("batch", "grouped")}[name]
    return nets.lenet((1, 16, 16), 3, width=0.5, norm=norm, convolution=convolution, statistics="shared")


def no_momentum(server: nets.Params) -> nets.Params:
    return {name: torch.zeros_like(p) for name, p in server.items()}


def momentum(sent: aggregate.Sent, state: nets.Params) -> tuple[aggregate.Sent, nets.Params]:
    """Add the server's momentum, which is a state of the aggregator."""
    new = {name: 0.5 * state[name] + (p - sent.server[name]) for name, p in sent.values.items()}
    return sent._replace(values={name: sent.server[name] + p for name, p in new.items()}), state | new


def aggregator(name: str) -> aggregate.Aggregator:
    """Make the aggregator of a run."""
    if name == "private":
        return aggregate.private(0.5, 1.1, delta=1e-5, clip_moments=1.0, noise_multiplier_moments=1.3)
    if name == "median":
        return aggregate.stateless("median", lambda sent: {name: p.median(0).values for name, p in sent.values.items()})
    mean = aggregate.weighted_mean()
    if name == "mean":
        return mean
    return aggregate.chain(mean, aggregate.Aggregator(no_momentum, momentum, "momentum"))


def in_base(value: Any) -> Any:
    """Replace settings, and strings among their values, by their names in the base."""
    if isinstance(value, dict):
        return {in_base(name): in_base(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(in_base, value))
    return BASE_SETTINGS.get(value, value) if isinstance(value, str) else value


def renamed(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give arrays of the base the names that they have here."""
    names = {name: name for name in found}
    for old, new in RENAMED_ARRAYS.items():
        names = {name: re.sub(old, new, now) for name, now in names.items()}
    return {now: found[name] for name, now in names.items()}


class InterruptedRun(Exception):  # noqa: N818
    """The end of a first training."""


def make(run: Run, out: Path, *, base: bool) -> xr.DataTree:
    """Train a run into a store."""
    settings, options = SETTINGS[run.algorithm] | run.settings, OPTIONS | run.options
    rules, budget, unseen = "prediction_rules", "memory_budget", "unseen_clients"
    if base:
        settings, options, rules, budget, unseen = map(in_base, (settings, options, rules, budget, unseen))
        options = {name: value for name, value in options.items() if name not in NEW_OPTIONS}
    subsets: dict[str, int | None] = {"train": None, "test": 5} | ({"validation": 6} if run.validation else {})
    options["aggregator"] = aggregator(options["aggregator"])
    options[rules] = {
        name: partial(getattr(algorithms, wrapper), **given) for name, (wrapper, given) in options[rules].items()
    }
    if options[unseen]:
        options[unseen] = samples(options[unseen], 1, run.net, {"train": None, "test": 5})
    if run.on_disk:
        options[budget] = "64GiB"
    seen: list[int] = []

    def interrupt(done: int) -> None:
        seen.append(done)
        if sum(seen) == run.interrupted:
            raise InterruptedRun

    def trained(**changed: Any) -> xr.DataTree:
        data, algorithm = samples(SIZES, 0, run.net, subsets), algorithms.named(run.algorithm, **settings)
        return train(
            data, network(run.net), algorithm, out=out, **{"resume": False, "progress": None} | options | changed
        )

    if run.interrupted:
        try:
            trained(progress=interrupt)
        except InterruptedRun:
            return trained(resume=True)
        raise RuntimeError("the run ended before it was interrupted")
    if run.extended:
        trained(rounds=run.extended)
    return trained(resume=bool(run.extended))


def arrays(run: Run, out: Path, result: xr.DataTree) -> dict[str, np.ndarray]:
    """All arrays of a run but wall-clock times: of its result, of its store, and of the state to resume from."""
    found = {}
    for group in result.groups:
        found |= {
            f"result{group}/{name}": v.values for name, v in result[group].to_dataset(inherit=False).variables.items()
        }
    for name, array in zarr.open_group(out, mode="r").members(max_depth=None):
        if isinstance(array, zarr.Array):
            found[f"store/{name}"] = np.asarray(array[...])
    states = sorted((out / "journal").glob("state*"))
    if len(states) != run.processes:
        raise RuntimeError(f"{run.processes} process(es) must leave as many states, but there are {states}")
    for path in states:
        found |= leaves(torch.load(path, weights_only=True), path.name)
    if bool(list(out.rglob("*.npy"))) != run.on_disk:
        raise RuntimeError("rows of clients are on disk if, and only if, the run keeps them there")
    strings = {name: np.array(values.tolist(), str) for name, values in found.items() if values.dtype.kind in "OT"}
    return {name: v for name, v in (found | strings).items() if name.rpartition("/")[2] not in WALL_CLOCK}


def leaves(value: Any, name: str) -> dict[str, np.ndarray]:
    """Arrays of a nested state by their paths; an empty mapping or sequence has none."""
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: array for key, part in parts for path, array in leaves(part, f"{name}/{key}").items()}
    return {name: np.array("None") if value is None else np.asarray(value)}


def make_all(folder: Path, names: list[str], *, base: bool) -> None:
    """Make runs, and store the arrays of each in one file."""
    remaining, first = chunks.remaining_bytes, not dist.is_initialized() or not dist.get_rank()
    for name in names:
        run, out = RUNS[name], folder / f"{name}.zarr"
        chunks.remaining_bytes = (lambda *_: 0) if run.on_disk else remaining
        try:
            result = make(run, out, base=base)
            if first:
                found = arrays(run, out, result)
                np.savez(folder / f"{name}.npz", **(renamed(found) if base else found))
        except Exception as error:
            error.add_note(f"in the run {name!r}")
            raise


def process(rank: int, folder: Path, names: list[str], *, base: bool) -> None:
    """Make runs together with another process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/processes", rank=rank, world_size=2)
    make_all(folder, names, base=base)
    dist.destroy_process_group()


def main() -> None:
    """Make the runs of two processes, then those of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", action="store_true", help="the fedstat on the path is the base")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs, by default all")
    given = parser.parse_args()
    if unknown := set(given.names) - RUNS.keys():
        parser.error(f"there are no runs {sorted(unknown)}. Choose among {list(RUNS)}.")
    if (found := Path(fedstat.__file__).parents[1]) != Path.cwd():
        sys.exit(f"fedstat was imported from {found}, not from {Path.cwd()}. Set PYTHONPATH to this folder.")
    names = [name for name in given.names or RUNS if not (given.base and name in NEW_RUNS)]
    together = [name for name in names if RUNS[name].processes == 2]
    os.fsync = lambda _: None  # nobody cuts the power
    fork = multiprocessing.get_context("fork")  # before the first run: nothing has been opened, no thread begun
    shared = partial(process, folder=given.folder.resolve(), names=together, base=given.base)
    children = [fork.Process(target=shared, args=(rank,)) for rank in range(2) if together]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        sys.exit("a run of two processes failed")
    make_all(given.folder, [name for name in names if name not in together], base=given.base)


if __name__ == "__main__":
    main()
