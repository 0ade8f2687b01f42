"""Leaderboard of all methods, and contrasts of methods within seeds.

A run is judged in the round with the best validation accuracy: nothing is chosen on test data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils.lazy import pd, xr
from fedstat.stats.ranking import Friedman, friedman
from fedstat.study import readouts, summary
from fedstat.study.collect import Grid, about, ordered
from fedstat.study.compare import against_zero

_NOT_OF_TRAINING = ("readouts", "probe", "ablation", "checkpoints", "keep_weights")


def over_settings(data: pd.DataFrame, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """First minus second method, mean over settings: one number per seed.

    Parameters
    ----------
    data : DataFrame
        ``label``, ``seed``, ``method``, ``accuracy``, one row for every combination.
    pairs : iterable of (str, str)
        Methods.

    Returns
    -------
    DataFrame
        A row for every pair: ``comparison``, the two names joined by " − ", and the columns of
        :func:`fedstat.study.compare.against_zero`: ``conf_low``, ``conf_high`` for each pair by itself,
        ``sim_conf_low``, ``sim_conf_high`` for all pairs together (Bonferroni).
    """
    wide = data.pivot(index="seed", columns=["label", "method"], values="accuracy").T.groupby("method").mean().T
    parts = [_less(wide, a, b).assign(comparison=f"{a} − {b}", label="all") for a, b in pairs]
    return against_zero(pd.concat(parts, ignore_index=True), "comparison", "difference")


def by_setting(data: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    """First minus second method in each setting; ``sim_conf_low``, ``sim_conf_high`` hold for all settings together.

    Parameters
    ----------
    data : DataFrame
        As of :func:`over_settings`.
    pair : (str, str)
        Methods.

    Returns
    -------
    DataFrame
        A row for every setting, in order of appearance: ``label``, and the columns of
        :func:`fedstat.study.compare.against_zero`.
    """
    parts = []
    for label, rows in data.groupby("label", sort=False):
        wide = rows.pivot(index="seed", columns="method", values="accuracy")
        parts.append(_less(wide, *pair).assign(label=label, setting=label))
    found = against_zero(pd.concat(parts, ignore_index=True), "setting", "difference")
    return found.rename(columns={"setting": "label"})


def repeated(grid: Grid, again: Grid) -> pd.DataFrame:
    """Differences in accuracy between two computations of the same runs, such as with other chunks of clients.

    Parameters
    ----------
    grid, again : Grid
        Runs of ``again`` are matched with those of ``grid`` by all settings of their training.

    Returns
    -------
    DataFrame
        ``label``, ``seed``, ``method`` (the algorithm's name, or that of a readout in both) and ``difference``, second
        minus first.

    Raises
    ------
    ValueError
        If a run of ``again`` has no match, or is the same computation.
    """
    first = {_training(path): path for path in grid.table["path"]}
    rows = []
    for run in again.table.to_dict("records"):
        if (path := first.get(_training(run["path"]))) is None:
            raise ValueError(f"{run['path']} repeats no run of the grid: none has the same settings")
        if _identity(path) == _identity(run["path"]):
            raise ValueError(f"{run['path']} is not another computation of {path}, but the same one")
        one, two = (readouts.scores(store.open_run(p)).set_index("method") for p in (path, run["path"]))
        difference = (two - one)["accuracy"].dropna()
        rows += [
            {"label": run["label"], "seed": run["seed"], "method": name, "difference": x}
            for name, x in difference.items()
        ]
    return pd.DataFrame(rows)


def _less(wide: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    return (wide[first] - wide[second]).rename("difference").reset_index()


def _training(path: str) -> str:
    """All settings on which a run's training depends, as text."""
    config = store.config_of(path)
    return store.to_json({k: v for k, v in sorted(config.items()) if k not in _NOT_OF_TRAINING})


def _identity(path: str) -> str:
    """Identifier of a computation, which copies of its store share."""
    return str(store.attributes(Path(path))["run"])


TENTH = 0.1


def chosen_rates(grid: Grid, seeds: Sequence[int]) -> Grid:
    """Runs with the learning rate that has the best mean validation accuracy, for each setting and method.

    Parameters
    ----------
    grid : Grid
        Collected with ``differ=("lr",)``.
    seeds : sequence of int
        Those on which rates were tuned; only rates that have a finished run with each of them are candidates.

    Returns
    -------
    Grid

    Raises
    ------
    ValueError
        If no method has a candidate.
    """
    kept = []
    for _, runs in grid.table.groupby(["label", "method"], sort=False):
        tried = runs[runs["seed"].isin(seeds)]
        whole = tried.groupby("lr")["seed"].nunique() == len(set(seeds))
        candidates = tried[tried["lr"].isin(whole.index[whole])]
        if len(candidates):
            rate = summary.chosen(candidates, "lr", {})
            kept.append(runs[runs["lr"] == rate])
    if not kept:
        raise ValueError(f"no method has finished runs with all seeds of tuning, {', '.join(map(str, seeds))}")
    return grid._replace(table=pd.concat(kept, ignore_index=True))


def measured(path: str | Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """What a run is judged by, and its course.

    Parameters
    ----------
    path : path
        Store of a finished run.

    Returns
    -------
    dict
        ``accuracy``, mean over clients, weighted by their test samples, in the round with the best validation accuracy
        (``chosen_round``); ``worst``, accuracy that a tenth of the clients stay below in that round; ``optimism``, the
        best test accuracy of any round less ``accuracy``; ``new``, accuracy of new clients by the first of the method's
        own rules (``new_rule``), NaN without new clients; ``seconds``, median of a round; ``kept``, bytes of what
        clients and server keep from round to round, as stored to resume the run.
    DataFrame
        ``round``, ``accuracy``, and, summed up to that round, ``bytes`` (sent up and down by all clients) and
        ``elapsed`` (seconds of training): a row for every round that was evaluated.

    Raises
    ------
    ValueError
        If the run has no validation accuracy.
    """
    with store.reading(path):
        return _measured(path, store.open_run(path))


def _measured(path: str | Path, run: xr.DataTree) -> tuple[dict[str, Any], pd.DataFrame]:
    config, metrics = summary.config_of(run), run["metrics"].to_dataset()
    course = summary.curve(run, "accuracy").merge(summary.curve(run, "validation_accuracy"), on="round")
    if course.empty:
        raise ValueError(f"{path} has no validation accuracy, by which its round is chosen. Run with validation > 0.")
    best = course.iloc[int(course["validation_accuracy"].to_numpy().argmax())]
    at = metrics["accuracy"].sel(round=int(best["round"])).to_numpy().astype(float)
    one = {
        "accuracy": float(best["accuracy"]),
        "chosen_round": int(best["round"]),
        "worst": float(np.quantile(at[np.isfinite(at)], TENTH)),
        "optimism": float(course["accuracy"].max() - best["accuracy"]),
        "seconds": float(np.nanmedian(metrics["seconds"])),
        "kept": float(sum(file.stat().st_size for file in (Path(path) / store.JOURNAL).glob("state*"))) or math.nan,
        **_new(run, str(config["algorithm"])),
    }
    sums = {
        "bytes": (metrics["bytes_up"] + metrics["bytes_down"]).cumsum("round"),
        "elapsed": metrics["seconds"].cumsum("round"),
    }
    numbers = course["round"].to_numpy()
    course = course.assign(**{name: total.sel(round=numbers).to_numpy() for name, total in sums.items()})
    return one, course.drop(columns="validation_accuracy")


def _new(run: xr.DataTree, method: str) -> dict[str, Any]:
    """Accuracy of new clients by the first of the method's rules that was measured."""
    if "new" not in run.children:
        return {"new": math.nan, "new_rule": ""}
    found = summary.new_clients(run)
    rule = next((rule for rule in about(method).new_clients if rule in found["rule"].values), "")
    return {"new": float(found.sel(rule=rule)) if rule else math.nan, "new_rule": rule}


def of_clients(path: str | Path, number: int) -> pd.DataFrame:
    """Test accuracy of every client in a round: ``client``, ``accuracy``."""
    accuracy = store.open_run(path)["metrics/accuracy"].sel(round=number).astype(float)
    return pd.DataFrame({"client": accuracy["client"].values, "accuracy": accuracy.values}).dropna()


def measure(grid: Grid) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What :func:`measured` says of every run, with its label, method, seed, lr and path, in the order of tables."""
    rows, courses = [], []
    places = ordered(grid.table["method"])
    runs = grid.table.assign(place=grid.table["method"].map(places.index)).sort_values(["label", "place", "seed"])
    for run in runs.to_dict("records"):
        which = {name: run[name] for name in ("label", "method", "seed", "lr", "path")}
        one, course = measured(run["path"])
        rows.append(which | one)
        courses.append(course.assign(**which))
    return pd.DataFrame(rows), pd.concat(courses, ignore_index=True)


def to_reach(courses: pd.DataFrame, targets: Mapping[str, float], name: str = "bytes") -> pd.DataFrame:
    """What a method spends until it first has the target accuracy of its setting.

    Parameters
    ----------
    courses : DataFrame
        ``label``, ``method``, ``seed``, ``round``, ``accuracy`` and the cost up to each round.
    targets : mapping from label to float
        Accuracies.
    name : str
        Column of the cost.

    Returns
    -------
    DataFrame
        ``label``, ``method``; ``reached`` of ``seeds`` runs; the cost, mean over seeds, NaN unless all reach it: a mean
        over those that do would favour methods that often fail.

    Examples
    --------
    >>> import pandas as pd
    >>> rows = {"label": "a", "method": "m", "seed": [0, 0, 1, 1], "round": [1, 2] * 2, "bytes": [5, 9] * 2}
    >>> to_reach(pd.DataFrame(rows | {"accuracy": [0.4, 0.8, 0.6, 0.9]}), {"a": 0.5}).to_dict("records")
    [{'label': 'a', 'method': 'm', 'seeds': 2, 'reached': 2, 'bytes': 7.0}]
    """
    rows = []
    for (label, method), runs in courses.groupby(["label", "method"], sort=False):
        enough = runs[runs["accuracy"] >= targets[str(label)]]
        first = enough.sort_values("round").groupby("seed")[name].first()
        seeds = runs["seed"].nunique()
        cost = first.mean() if len(first) == seeds else math.nan
        rows.append({"label": label, "method": method, "seeds": seeds, "reached": len(first), name: cost})
    return pd.DataFrame(rows)


def ranked(found: pd.DataFrame) -> tuple[pd.DataFrame, Friedman | None, list[str]]:
    """Ranks of methods by accuracy over settings, means over seeds.

    Parameters
    ----------
    found : DataFrame
        ``label``, ``method``, ``seed``, ``accuracy``.

    Returns
    -------
    DataFrame (label, method)
        Mean accuracies of methods that have a run in every setting.
    Friedman or None
        Blocks are settings: seeds of one setting share its data and are no further data sets. None where there are too
        few settings or methods for a test.
    list of str
        Methods that lack a setting, which are left out.
    """
    wide = found.groupby(["label", "method"], sort=False)["accuracy"].mean().unstack("method")
    absent = [str(name) for name in wide.columns[wide.isna().any()]]
    wide = wide[[name for name in ordered(wide.columns) if name not in absent]]
    enough = wide.shape[0] > 1 and wide.shape[1] > 2
    return wide, friedman(wide.to_numpy()) if enough else None, absent
