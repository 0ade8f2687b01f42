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
        Metrics of the round by name: ``accuracy`` (``rmse``), ``loss``, ``validation_accuracy``, ``train_loss``, ... are
        means over clients, as tables of runs have them; ``class_accuracy_3`` is the accuracy on class 3; ``bytes_up``
        and ``bytes_down`` are sums over clients; ``seconds`` is the time of the round. Scores are there only in
        evaluated rounds.
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


class RoundMetrics(NamedTuple):
    """Metrics of a run's rounds, and the weights of their means over clients.

    Attributes
    ----------
    weights : mapping from str to float array (client,) or None
        Numbers of the clients' samples by the name of the metric: of test samples for scores and the test loss, of
        validation samples for ``validation_...``, of training samples for ``train_loss``, of test samples of a class
        for ``class_accuracy_...``. None for a metric of the round, such as ``seconds``.
    arrays : mapping from str to (str, int or None)
        The array of each metric in group ``metrics``, and the position of its class.
    """

    weights: Mapping[str, NDArray[np.float64] | None]
    arrays: Mapping[str, tuple[str, int | None]]

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order of the store."""
        return list(self.weights)

    def means(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of a round that have a value.

        Parameters
        ----------
        values : mapping from str to array (), (client,) or (client, class)
            Values of all clients, by "metrics/array"; other values are ignored.
        """
        means = {}
        for name, (array, position) in self.arrays.items():
            if f"metrics/{array}" not in values:
                continue
            value = np.asarray(values[f"metrics/{array}"], np.float64)
            weight = self.weights[name]
            mean = float(value if weight is None else weighted(value if position is None else value[:, position], weight))
            if math.isfinite(mean):
                means[name] = mean
        return means


def of_layout(groups: Mapping[str, Group]) -> RoundMetrics:
    """Return the metrics of a run from the groups ``metrics`` and ``clients`` of its layout, with all clients."""
    layout, weights, arrays = groups["metrics"], {}, {}
    for array, variable in layout.variables.items():
        if "class" in variable.dims:
            counts = groups["clients"].coords["n_test"].to_numpy().astype(np.float64)
            for position, label in enumerate(layout.coords["class"].to_numpy()):
                name = f"{array}_{label}"
                weights[name], arrays[name] = counts[:, position], (array, position)
        else:
            sizes = layout.coords[_sizes_of(array)].to_numpy().astype(np.float64)
            weights[array] = sizes if "client" in variable.dims else None
            arrays[array] = array, None
    return RoundMetrics(weights, arrays)


def _sizes_of(array: str) -> str:
    """Return the name of the numbers of samples that weight a metric's clients."""
    return "n_train" if array == "train_loss" else "n_validation" if array.startswith("validation_") else "n_test"
