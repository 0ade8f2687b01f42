"""A finished round in plain numbers: means over clients, weighted by their samples, and sums of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat.store import Group


class RoundEnd(NamedTuple):
    """A finished round, for the callable ``on_round_end`` of :func:`fedstat.fl.train`.

    Attributes
    ----------
    round : int
        Number of the round, from 1.
    metrics : mapping from str to float
        Metrics of the round by name. ``accuracy`` (``rmse``), ``loss``, ``validation_accuracy``, ``train_loss`` and the
        like are means over clients, as tables of runs have them; ``class_accuracy_3`` is the accuracy on class 3.
        ``bytes_up`` and ``bytes_down`` are sums over clients, ``seconds`` is the time of the round. Scores are there
        only in evaluated rounds.
    path : Path or None
        Store of the run, to which finished rounds are committed about once a second; None if the run is in memory.
    """

    round: int
    metrics: Mapping[str, float]
    path: Path | None


def weighted(values: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over clients with weights, (round, client) to (round,); ignore missing values; NaN if all are missing."""
    is_finite = np.isfinite(values)
    total = (is_finite * weight).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(is_finite, values * weight, 0).sum(axis=-1) / np.where(total > 0, total, np.nan))


class RoundMetric(NamedTuple):
    """A metric of a run's rounds.

    Attributes
    ----------
    array : str
        Its array in group ``metrics``.
    weight : float array (client,) or None
        Numbers of samples that weight clients; None for a metric of the round, such as ``seconds``.
    position : int or None
        Position of the class, if the array has classes.
    """

    array: str
    weight: NDArray[np.float64] | None = None
    position: int | None = None

    def mean(self, value: Any) -> float:
        """Return the mean of an array (), (client,) or (client, class); NaN if all values are missing."""
        of_clients = np.asarray(value, np.float64)
        if self.position is not None:
            of_clients = of_clients[:, self.position]
        return float(of_clients if self.weight is None else weighted(of_clients, self.weight))


def of_layout(groups: Mapping[str, Group]) -> dict[str, RoundMetric]:
    """Return the metrics of a run by name, from the groups ``metrics`` and ``clients`` of its layout, of all clients.

    Clients are weighted by test samples in scores and the test loss, by validation samples in ``validation_...``, by
    training samples in ``train_loss``, and by test samples of the class in ``class_accuracy_...``.
    """
    layout, metrics = groups["metrics"], dict[str, RoundMetric]()
    for array, variable in layout.variables.items():
        if "class" in variable.dims:
            counts = groups["clients"].coords["n_test"].to_numpy().astype(np.float64)
            for position, label in enumerate(layout.coords["class"].to_numpy()):
                metrics[f"{array}_{label}"] = RoundMetric(array, counts[:, position], position)
        elif "client" in variable.dims:
            metrics[array] = RoundMetric(array, layout.coords[_sizes_of(array)].to_numpy().astype(np.float64))
        else:
            metrics[array] = RoundMetric(array)
    return metrics


def means(metrics: Mapping[str, RoundMetric], values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a round that have a value, from values of all clients by "metrics/array"."""
    round_means = {
        name: metric.mean(values[f"metrics/{metric.array}"])
        for name, metric in metrics.items()
        if f"metrics/{metric.array}" in values
    }
    return {name: mean for name, mean in round_means.items() if math.isfinite(mean)}


def _sizes_of(array: str) -> str:
    """Return the name of the numbers of samples that weight clients in an array."""
    return "n_train" if array == "train_loss" else "n_validation" if array.startswith("validation_") else "n_test"
