"""Masks of every shape, on clients, units and inputs of one number, so that no number of entries tells them apart."""

from __future__ import annotations

import numpy as np
import torch
from algorithm_jobs import job as make_job

from fedstat.fl import nets
from fedstat.fl.algorithm import Algorithm, SharedMask

SIZES = [6, 6, 3]
SAMPLES = [9, 4, 14, 1, 11, 4]
CLIENTS = len(SAMPLES)
SHAPES = nets.mlp(SIZES).shapes

# The last dims of (client, unit, column); biases have no column.
SPECS = [
    "", "column", "1", "unit,1", "1,column", "1,1", "unit,column", "1,1,1", "1,unit,1", "1,unit,column", "client,1,1",
    "client,unit,1", "client,1,column", "client,unit,column",
]  # fmt: skip


def mask(spec, seed=0, share=0.5):
    """A random mask whose dims are 1 where the spec says so."""
    rng = np.random.default_rng([seed, SPECS.index(spec)])
    found = {}
    for name, shape in SHAPES.items():
        whole = (CLIENTS, *shape)
        given = [part for part in spec.split(",") if part]
        given = given[: len(given) - (3 - len(whole))] if given else []
        sizes = [1 if part == "1" else size for part, size in zip(given[::-1], whole[::-1], strict=False)]
        found[name] = torch.from_numpy(np.asarray(rng.random(sizes[::-1]) < share))
    return found


def whole(given):
    """The mask with every dim written out: bool (client, *shape)."""
    return {name: m.expand(CLIENTS, *SHAPES[name]) for name, m in given.items()}


def arrays(given):
    return {name: m.numpy() for name, m in given.items()}


def algorithm(given, **parts):
    return Algorithm("masked", lambda start: SharedMask(given), **parts)  # noqa: ARG005


def job(method, **options):
    return make_job(method, net=nets.mlp(SIZES), sizes=SAMPLES, **options)
