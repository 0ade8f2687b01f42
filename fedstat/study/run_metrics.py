"""Metrics of a run: the score that judges its client models, its other measures, and their weights and titles."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat.fl import metrics as fl_metrics
from fedstat.fl.losses import SCORES, Score, score_among
from fedstat.fl.round_metrics import weighted as weighted  # the one mean over clients, also of tables
from fedstat.stats.ranking import is_higher_better


def score_of(run: xr.DataTree) -> Score:
    """Return the score by which the client models of a run are judged: accuracy, or RMSE of real-valued targets."""
    return score_among(list(map(str, metrics_of(run))))


def score_in(table: pd.DataFrame) -> Score:
    """Return the score that a table of runs, rounds or clients holds.

    Raises
    ------
    ValueError
        If it holds accuracies and RMSEs, which cannot be compared.
    """
    names = [score.name for score in SCORES.values() if score.name in table]
    if len(names) > 1:
        raise ValueError(
            f"runs must have one score, but the table holds {' and '.join(names)}: of classes and of real-valued "
            "targets. Take runs of one task."
        )
    return score_among(table)


def is_error(measure: str) -> bool:
    """Return True if smaller values of a measure are better.

    Examples
    --------
    >>> is_error("mae"), is_error("r2")
    (True, False)
    """
    return not is_higher_better(measure)


def is_of_numbers(measure: str) -> bool:
    """Return True for measures of real-valued targets."""
    return measure == "rmse" or measure in fl_metrics.ERRORS


def reason_undefined(measure: str) -> str:
    """Say what test samples are like for which a measure is undefined."""
    return "have constant targets" if is_of_numbers(measure) else "lack a class"


def measures(run: xr.DataTree) -> dict[str, tuple[xr.DataArray, xr.DataArray]]:
    """Return the measures of a run that have one value per client: values (round, client) and weights (client,).

    They are the run's score, ``accuracy`` or ``rmse``, and its metrics (:data:`fedstat.fl.metrics.METRICS`,
    ``ERRORS``), among them ``class_accuracy_3`` for class 3. Weights are the client's test samples, of the class if the
    measure is of one.
    """
    metrics = metrics_of(run)
    weight = xr.DataArray(sizes_of(metrics, "n_test"), dims="client")
    names = (score_of(run).name, *fl_metrics.TITLES)
    by_name = {name: (metrics[name], weight) for name in names if name in metrics}
    if "class_accuracy" in metrics:
        values, n_test = metrics["class_accuracy"], run["clients"].to_dataset()["n_test"]
        for i, label in enumerate(metrics["class"].values):
            by_name[f"class_accuracy_{label}"] = values.isel({"class": i}), n_test.isel({"class": i})
    return by_name


def measured(run: xr.DataTree, measure: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values (round, client) and weights (client,) of a measure by its name in :func:`measures`.

    Raises
    ------
    ValueError
        If there is no such measure (the message has the nearest names), or the run did not measure it.
    """
    by_name, name = measures(run), re.sub(r"^(class_accuracy)_.*", r"\1", measure)
    if score_of(run) is SCORES["regression"] and name in (*fl_metrics.METRICS, "accuracy"):
        raise ValueError(f"{name!r} is of classes, but the targets are real numbers. Measures: {', '.join(by_name)}.")
    if name in fl_metrics.METRICS and not any(other.startswith(name) for other in by_name):
        raise ValueError(
            f"the run did not measure {name!r}, but {', '.join(by_name)}. Train with metrics=[{name!r}] "
            f"(--metrics {name})."
        )
    values, weight = by_name[check.choice("measure", measure, list(by_name))]
    return values.transpose("round", "client").to_numpy().astype(np.float64), weight.to_numpy().astype(np.float64)


def title_of(measure: str) -> str:
    """Return a measure in words.

    Examples
    --------
    >>> title_of("accuracy"), title_of("macro_f1"), title_of("class_accuracy_3")
    ('test accuracy', 'macro F1', 'accuracy on class 3')
    """
    for score in SCORES.values():
        if measure == score.name:
            return score.long_name
    return fl_metrics.TITLES.get(measure, f"accuracy on class {measure.removeprefix('class_accuracy_')}")


def metrics_of(run: xr.DataTree) -> xr.Dataset:
    """Return the metrics of a run by round and client; raise ValueError if it is not a run of the trainer."""
    metrics = run["metrics"].to_dataset() if "metrics" in run.children else xr.Dataset()
    score = metrics.get("rmse", metrics.get("accuracy", xr.DataArray()))
    if not {"round", "client"} <= set(score.dims):
        raise ValueError(
            "must be a run that fedstat.fl.train or python -m fedstat.fl wrote, with metrics/accuracy or metrics/rmse "
            f"(round, client), but got a tree with the groups {list(run.children)} and the metrics "
            f"{list(metrics.data_vars)}"
        )
    return metrics


def values_of(metrics: xr.Dataset, name: str) -> NDArray[np.float64]:
    """Return a metric's values (round, client); NaN if the run did not measure it."""
    if name not in metrics:
        return np.full((metrics.sizes["round"], metrics.sizes["client"]), np.nan)
    return metrics[name].transpose("round", "client").to_numpy().astype(np.float64)


def sizes_of(metrics: xr.Dataset, name: str) -> NDArray[np.float64]:
    """Return each client's number of samples; 1 if the run does not store it."""
    return metrics[name].to_numpy().astype(np.float64) if name in metrics else np.ones(metrics.sizes["client"])
