"""Stores laid out as the trainer's, with made-up numbers, to test what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fedstat import store
from fedstat.fl.probes.variants import PARTS
from fedstat.store import Group, Variable

GAIN = {"fedavg": 0.0, "fedfac-dynamic": 0.06, "fedfac-static": 0.05, "random": 0.02, "fedper": 0.03, "fedem": -0.1}
RULES = ("global", "finetuned", "local_train", "ensemble")


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "scenario": "CIFAR-10, π = 0.1", "data": "cifar-10", "partition": "dirichlet:0.1", "clients": 6,
        "max_samples": None,
        "net": "lenet", "width": 0.2, "norm": None, "algorithm": "fedavg", "layers": None, "kappa": None, "tau": None,
        "estimator": None, "rounds": 24, "participation": 0.5, "local_epochs": 1, "batch_size": 10,
        "optimizer": "adam", "lr": 0.001, "seed": 0, "validation_fraction": 0.2, "unseen_fraction": 0.0,
        "evaluate_every": 1,
    }  # fmt: skip
    return base | changes


def write(
    path: Path,
    *,
    new: bool = False,
    ablation: bool = False,
    weights: bool = False,
    finish: bool = True,
    gain: float = 0.0,
    **changes: Any,
) -> Path:
    """Write a run of made-up numbers: accuracies rise, differ by method, and share a level by seed."""
    c = config(**changes)
    clients, rounds = c["clients"], c["rounds"]
    rng = np.random.default_rng([c["seed"], sum(map(ord, c["algorithm"] + str(c["tau"]) + str(c["layers"]))), rounds])
    common = np.random.default_rng([c["seed"], sum(map(ord, c["scenario"]))])
    level = 0.6 + 0.05 * common.normal() + GAIN.get(c["algorithm"], 0.0) + gain
    rise = level - 0.3 * np.exp(-np.arange(rounds) / 4)
    accuracy = np.clip(rise[:, None] + common.normal(0, 0.08, clients) + rng.normal(0, 0.01, (rounds, clients)), 0, 1)
    accuracy[(np.arange(1, rounds + 1) % c["evaluate_every"]) != 0] = np.nan
    active = np.array([rng.permutation(clients) < clients // 2 for _ in range(rounds)])
    metrics = {
        "accuracy": accuracy,
        "loss": 1 - accuracy,
        "validation_accuracy": accuracy + rng.normal(0, 0.02, accuracy.shape),
        "accuracy_before": np.where(active, accuracy - 0.02, np.nan),
        "train_loss": np.where(
            active, 2.3 * np.exp(-np.arange(rounds) / 8)[:, None] - GAIN.get(c["algorithm"], 0), np.nan
        ),
    }
    if not c["validation_fraction"]:
        del metrics["validation_accuracy"]
    groups = {
        "metrics": _group(
            {"round": np.arange(1, rounds + 1), "client": np.arange(clients)},
            {name: (("round", "client"), x) for name, x in metrics.items()}
            | {"seconds": (("round",), rng.uniform(1, 1.1, rounds) * (1.2 if "fedfac" in c["algorithm"] else 1))}
            | {name: (("round",), np.full(rounds, 1000.0)) for name in ("bytes_up", "bytes_down")}
            | {
                "n_train": (("client",), 80.0 + 10 * np.arange(clients)),
                "n_test": (("client",), 20.0 + np.arange(clients)),
            },
        )
    }
    if new:
        groups["unseen_clients"] = _group(
            {"rule": list(RULES), "client": np.arange(3)},
            {
                "accuracy": (
                    ("rule", "client"),
                    level - 0.1 + 0.02 * np.arange(4)[:, None] + rng.normal(0, 0.01, (4, 3)),
                ),
                "n_test": (("client",), [20.0, 30.0, 40.0]),
            },
        )
    if ablation:
        lost = np.array([0, 0.05, 0.2, 0.3, 0.4])[:, None, None]
        groups["ablation"] = _group(
            {"part": list(PARTS), "draw": np.arange(2), "client": np.arange(clients)},
            {"accuracy": (("part", "draw", "client"), level - lost + rng.normal(0, 0.05, (len(PARTS), 2, clients)))},
        )
    if weights or ablation:
        groups |= _convolutions(c, rng)
    values = {f"{g}/{v}": x for g, (_, variables) in groups.items() for v, (_, x) in variables.items()}
    layout = {
        g: Group(coords, {v: Variable(dims, str(np.asarray(x).dtype)) for v, (dims, x) in variables.items()})
        for g, (coords, variables) in groups.items()
    }
    with store.create(path, layout, store.provenance("made up", c, command="fedstat.fl")) as writer:
        for name, x in values.items():
            writer.write(name, (), np.asarray(x))
        writer.commit()
        if finish:
            writer.finish()
    return path


def _group(coords: dict[str, Any], variables: dict[str, Any]) -> tuple[xr.Dataset, dict[str, Any]]:
    arrays = {name: np.array(x, dtype=object if isinstance(x[0], str) else None) for name, x in coords.items()}
    return xr.Dataset(coords={name: (name, x) for name, x in arrays.items()}), variables


def _convolutions(c: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """One convolution whose even units are alike over clients, and its split, which settles after three rounds.

    At τ = 0.75 every fourth unit is alike.
    """
    clients, rounds, units = c["clients"], c["rounds"], 8
    alike = np.arange(units) % (4 if c["tau"] == "0.75" else 2) == 0
    w = rng.normal(size=(1, clients, units, 75))
    w[:, :, alike] = rng.normal(size=(1, 1, alike.sum(), 75)) * 0.5
    w[:, :, alike] += rng.normal(size=(1, clients, alike.sum(), 75)) * 0.1
    found = {
        "weights/conv1": _group(
            {"checkpoint": [rounds], "client": np.arange(clients), "unit": np.arange(units), "weight": np.arange(75)},
            {
                "w": (("checkpoint", "client", "unit", "weight"), w.astype(np.float32)),
                "b": (("checkpoint", "client", "unit"), np.zeros((1, clients, units), np.float32)),
            },
        )
    }
    shared = np.tile(alike, (rounds, 1))
    shared[:3] = ~shared[:3]
    split = np.ones_like(shared) if c["algorithm"] == "fedavg" else shared
    return found | {
        "split/conv1": _group(
            {"round": np.arange(1, rounds + 1), "unit": np.arange(units)},
            {
                "shared": (("round", "unit"), split),
                "communality": (("round", "unit"), np.where(shared, 0.8, 0.4) + rng.normal(0, 0.02, shared.shape)),
                "n_factors": (("round",), np.full(rounds, 3)),
                "n_iter": (("round",), np.full(rounds, 12)),
                "converged": (("round",), np.arange(rounds) > 0),
            },
        )
    }


def grid(folder: Path, *, seeds: int = 3, methods: tuple[str, ...] = tuple(GAIN), **options: Any) -> Path:
    """Write a grid: two settings, some methods, some seeds."""
    for label, partition in {"CIFAR-10, π = 0.1": "dirichlet:0.1", "CIFAR-10, π = 0.5": "dirichlet:0.5"}.items():
        for method in methods:
            for seed in range(seeds):
                path = folder / f"{partition.replace(':', '-')}-{method}-{seed}.zarr"
                split = {"layers": ["conv1"], "kappa": 0.85, "tau": "0.5", "estimator": "pa"}
                settings = split if "fac" in method or method == "random" else {}
                ablation = options.get("ablation", False) and "fedfac" in method
                write(
                    path, scenario=label, partition=partition, algorithm=method, seed=seed,
                    **(settings | options | {"ablation": ablation}),
                )  # fmt: skip
    return folder
