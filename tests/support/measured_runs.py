"""Runs in which everything is measured that trains clients on samples other than the round's."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import xarray as xr
from algorithm_jobs import dataset, make, net_of

from fedstat.fl import algorithms, train
from fedstat.fl.metrics import METRICS

TIES = [7, 8, 11, 12, 15, 16]
"""Samples of clients whose halves are ordered otherwise than the whole, in batches of three."""

EARLY = {"epochs": (0, 1, 3)}
"""Candidates of early stopping."""

READOUTS = {
    "plus": algorithms.finetuned,
    "early": partial(algorithms.finetuned, **EARLY, held_out="validation"),
    "early, halves": partial(algorithms.finetuned, **EARLY, held_out="halves"),
    "early, client": partial(algorithms.finetuned, **EARLY, by="client", held_out="halves"),
    "shrunken": partial(algorithms.shrunken, held_out="validation"),
    "shrunken, halves": partial(algorithms.shrunken, held_out="halves"),
    "shrunken, client": partial(algorithms.shrunken, by="client", held_out="halves"),
    "shrunken, layer": partial(algorithms.shrunken, by="layer"),
}


MEASURED = ("plus", "early", "early, client", "shrunken, halves", "shrunken, layer")
"""Rules that between them have every kind of choice, of its scope and of samples held out."""


def prediction_rules(name: str) -> dict[str, Any]:
    """Every choice that the method allows."""
    method = make(name)
    if method.finetune or method.choice:
        return {}
    mixes = method.mixing_weights or method.on_download  # clients download nothing in common, by layer
    return {one: wrap for one, wrap in READOUTS.items() if not (mixes and one.endswith("layer"))}


def takes_new(name: str) -> bool:
    """Whether the method's memory does without training of all clients."""
    return bool(make(name).about.unseen_clients)


def measured_run(name: str, sizes: list[int], *, batch_size: int, **options: Any) -> xr.DataTree:
    """A run of two rounds with all probes, every kind of choice, and new clients."""
    rules = {one: wrap for one, wrap in prediction_rules(name).items() if one in MEASURED}
    new = {"unseen_clients": dataset(sizes[::-1], seed=7)} if takes_new(name) else {}
    settings = {"rounds": 2, "local_epochs": 2, "lr": 0.1, "seed": 4, "threads": 1, "evaluate_every": 2, "ablation": 1}
    probe = ("split-half", "drift", "trained-weights")
    return train(
        dataset(sizes, validation=True), net_of(name), make(name), batch_size=batch_size, probe=probe,
        prediction_rules=rules, metrics=[*METRICS], store_predictions=True, **new, **settings, **options,
    )  # fmt: skip


@cache
def measured_alone(name: str) -> xr.DataTree:
    """The run of TIES in one process, all clients at a time, in memory."""
    return measured_run(name, TIES, batch_size=3)
