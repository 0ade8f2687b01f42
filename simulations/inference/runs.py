"""Agreement of runs: changes of clients since the last values they had in common, as ``fedstat.icc(run)`` takes them.

A pool is a run of 200 clients; clients that are drawn from it have the agreement of the pool. Less their mean over the
pool, the changes have no agreement: what clients have in common is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import xarray as xr

import fedstat
from fedstat._utils.streams import generator
from fedstat.data import partition
from fedstat.fl import algorithms, nets
from simulations.inference.agreement import coverage, icc2
from simulations.inference.layers import Sample
from simulations.inference.pools import WIDTHS, mnist
from simulations.inference.table import Case, Claim

CLIENTS, SAMPLES, BATCH, ROUNDS = 200, 60, 10, 3
LAYER = "fc2"
PARTITIONS: Mapping[str, Any] = {
    "iid": partial(partition.iid, clients=CLIENTS),
    "two classes": partial(partition.pathological, clients=CLIENTS, classes_per_client=2),
    "Dirichlet .1": partial(partition.dirichlet_equal, clients=CLIENTS, concentration=0.1, n_train=SAMPLES, n_test=0),
    "Dirichlet 1": partial(partition.dirichlet_equal, clients=CLIENTS, concentration=1.0, n_train=SAMPLES, n_test=0),
    "random labels": partial(partition.iid, clients=CLIENTS),
}
SETTINGS = ((0.01, 600), (0.1, 60), (0.3, 600))
"""Learning rates, and local steps in a round."""
FIVE = ("fedavg", "fedper", "fedfac-dynamic", "local", "fedamp")
OTHERS = tuple(name for name in algorithms.ALGORITHMS if name not in (*FIVE, "fedsplit", "fedem", "fedcp"))
"""FedSplit needs a split; FedEM's and FedCP's layers have other names."""


@cache
def run(name: str, kind: str, lr: float, steps: int) -> xr.DataTree:
    """Train 200 clients with MLPs 196-32-32-10 on MNIST at 14 x 14 pixels, with all clients in every round."""
    rng = generator(0, "runs of agreement", kind)
    x, y = mnist()
    chosen = rng.permutation(len(y))[: CLIENTS * SAMPLES]
    labels = rng.integers(10, size=len(chosen)) if kind == "random labels" else y[chosen]
    split = ("sample", np.full(len(chosen), "train"))
    data = xr.Dataset({"x": (("sample", "pixel"), x[chosen]), "y": ("sample", labels)}, {"split": split})
    data = PARTITIONS[kind](data).drop_vars("split", errors="ignore")
    data = partition.train_test(data, test=1 / SAMPLES, **({"validation": 1 / 6} if name == "fedfomo" else {}))
    return fedstat.fl.train(
        data, nets.mlp(list(WIDTHS)), algorithms.named(name), rounds=ROUNDS, local_epochs=steps * BATCH // SAMPLES,
        batch_size=BATCH, lr=lr, evaluate_every=ROUNDS, progress=False,
    )  # fmt: skip


@cache
def changes(name: str, kind: str, lr: float, steps: int, part: str) -> np.ndarray:
    """Return the changes (client, unit, weight) of the units that the last round shares or not, or of all units."""
    trained = run(name, kind, lr, steps)
    layer = next(x for x in trained["trained"].children if x.endswith(LAYER) and not x.startswith("global"))
    common = trained[f"common/{layer}"].to_dataset().isel(checkpoint=-1)
    weights = trained[f"trained/{layer}/w"].isel(checkpoint=-1)
    w = (weights.astype(float) - common["w"]).transpose("client", "unit", "weight").to_numpy()
    is_shared = common["downloaded"].to_numpy()
    return w[:, {"shared": is_shared, "personal": ~is_shared, "": slice(None)}[part]]


def rejections(pool: tuple[Any, ...], clients: int, rng: np.random.Generator) -> list[Any]:
    """Rejections for clients of a pool less the pool's mean: single units, any at FDR .05, the layer."""
    w = changes(*pool)
    w = (w - w.mean(axis=0))[rng.choice(len(w), clients, replace=False)]
    table, layer = icc2(w, "sign-flip")
    units, p = table["p_value"].dropna(), layer["layer_p_value"]
    return [
        units <= 0.05 if len(units) else np.nan,
        table["p_adjusted"].min() <= 0.05 if len(units) else np.nan,
        p <= 0.05 if np.isfinite(p) else np.nan,
    ]


def called(pool: tuple[Any, ...], clients: int, rng: np.random.Generator) -> list[Any]:
    """Proportion of units that are called, and the median ICC2 of units, for clients of a pool."""
    w = changes(*pool)
    found = fedstat.icc(w[rng.choice(len(w), clients, replace=False)])
    return [np.asarray(found.p_adjusted[:, 1] <= 0.05), np.nanmedian(found.agreement)]


@cache
def _whole(pool: tuple[Any, ...]) -> Sample:
    found = fedstat.icc(changes(*pool), inference="F")
    return Sample(changes(*pool), found.agreement, float(found.layer_coefficients.icc[1]))


def covered(pool: tuple[Any, ...], clients: int, rng: np.random.Generator) -> list[Any]:
    """Whether intervals of ICC2 cover, units and layer; nothing is claimed with a caution on the clients."""
    whole = _whole(pool)
    return coverage(whole._replace(weights=whole.weights[rng.choice(len(whole.weights), clients, replace=False)]))


def pools() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name and the arguments of each pool."""
    for name in FIVE:
        parts = ("shared", "personal") if name == "fedfac-dynamic" else ("",)
        for kind in PARTITIONS:
            for lr, steps in SETTINGS:
                for part in parts:
                    yield (
                        f"{name}{f', {part}' * bool(part)}, {kind}, lr {lr}, {steps} steps",
                        (name, kind, lr, steps, part),
                    )
    for name in OTHERS:
        yield f"{name}, two classes, lr 0.1, 60 steps", (name, "two classes", 0.1, 60, "")


_NOTE = "docs/which-test.md: the test assumes symmetric deviations of clients, which trained networks need not have"
_FEW = "docs/which-test.md: intervals are too short where the changes of clients are very unequal in size"
_SOURCES = (
    "fedstat.labelled.runs.change_since",
    "fedstat.labelled.runs._rounds_as_personal",
    "fedstat.fl.checkpoints.common_params",
)


def _cases(hits: Any, parts: tuple[str, ...], note: str = "") -> dict[str, Case]:
    return {
        f"{title}, 12 clients": Case(partial(hits, pool, 12), True, 200, note, parts, True) for title, pool in pools()
    }


CLAIMS = {
    "icc of runs, sign-flip tests of changes less their mean": Claim(
        "level", _SOURCES, (), _cases(rejections, ("units", "any unit at FDR .05", "layer"), _NOTE)
    ),
    "icc of runs, intervals over clients": Claim("coverage", _SOURCES, (), _cases(covered, ("units", "layer"), _FEW)),
    "icc of runs, proportion of units called, and median ICC2": Claim(
        "rate", _SOURCES, (), _cases(called, ("called", "median ICC2"))
    ),
}
