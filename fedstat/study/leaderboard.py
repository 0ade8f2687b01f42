"""Leaderboard of all methods, contrasts within seeds, scores of prediction rules, and the planned comparison.

A run is judged in the round with the best validation accuracy: nothing is chosen on test data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstat import store
from fedstat._utils.lazy import pd, xr
from fedstat._utils.settings import read_toml
from fedstat.fl.stored import profile
from fedstat.stats.ranking import Friedman, friedman
from fedstat.store import open_run
from fedstat.study import experiment, grid, summary
from fedstat.study.collect import Grid, about, ordered
from fedstat.study.compare import against_zero
from fedstat.study.experiment import Settings
from fedstat.study.summary import config_of, weighted

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
        one, two = (scores(store.open_run(p)).set_index("method") for p in (path, run["path"]))
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


class Planned(NamedTuple):
    """Runs of the seeds that are complete.

    Attributes
    ----------
    grid : Grid
        Finished runs of ``seeds``, and no others.
    scale : str
        Name of their ``[scale.NAME]`` table.
    labels : tuple of str
        Labels of the settings, in the order of the file.
    seeds : tuple of int
        Seeds for which every run of the file is finished.
    notes : tuple of str
        Which seeds were left out, and how many runs of the folder are not in the file.
    """

    grid: Grid
    scale: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]


def planned(runs: Grid, file: str | Path) -> Planned:
    """Keep the seeds for which all runs of a grid's file are finished.

    Parameters
    ----------
    runs : Grid
        From :func:`fedstat.study.collect.collect`.
    file : path
        Read by :func:`fedstat.study.grid.cells`.

    Returns
    -------
    Planned

    Raises
    ------
    ValueError
        If no run of the folder is in the file, runs have several of its scales, one is there twice, or no seed is
        complete.
    """
    scales: list[str | None] = [*read_toml(Path(file)).get("scale", {})] or [None]
    cells = {name: grid.cells(file, scale=name) for name in scales}
    noted = [experiment.settings_of(path) for path in runs.table["path"]]
    found = {name: _places(noted, of_scale) for name, of_scale in cells.items()}
    there = [name for name in scales if any(place is not None for place in found[name])]
    if not there:
        raise ValueError(
            f"none of the {len(noted)} finished runs is in {file}. Make them with python -m fedstat.fl --config "
            f"{file} --scale ... and name their folder"
        )
    if len(there) > 1:
        raise ValueError(f"there are runs of several scales of {file}: {', '.join(map(str, there))}. Keep each apart.")
    scale = there[0]
    places = found[scale]
    paths = defaultdict(list)
    for place, path in zip(places, runs.table["path"], strict=True):
        if place is not None:
            paths[place].append(str(path))
    if twice := [group for group in paths.values() if len(group) > 1]:
        raise ValueError(f"one run of {file} is there twice: {', '.join(twice[0])}. Remove one.")
    wanted = pd.DataFrame({"seed": [one.seed for one in cells[scale]]})
    wanted["there"] = [number in paths for number in range(len(wanted))]
    counts = wanted.groupby("seed", sort=False)["there"].agg(["sum", "size"])
    seeds = tuple(int(seed) for seed in counts.index[counts["sum"] == counts["size"]])
    partial, absent = counts[counts["sum"].between(1, counts["size"] - 1)], counts[counts["sum"] == 0]
    lacking = [f"{seed} ({have} of {of} runs)" for seed, (have, of) in partial.iterrows()]
    if not seeds:
        raise ValueError(f"no seed of {file} is complete in every setting; incomplete are {', '.join(lacking)}")
    used = [place is not None and cells[scale][place].seed in seeds for place in places]
    of_file = f"{Path(file).name}{f', scale {scale}' if scale else ''}"
    notes = [f"complete seeds: {', '.join(map(str, seeds))} (of {of_file})"]
    notes += [f"seeds left out as incomplete: {', '.join(lacking)}"] if lacking else []
    notes += [f"seeds without a finished run: {', '.join(map(str, absent.index))}"] if len(absent) else []
    if foreign := sum(place is None for place in places):
        notes.append(f"finished runs of the folder that are not in {file}, left out: {foreign}")
    labels = tuple(dict.fromkeys(one.name for one in cells[scale]))
    complete = runs._replace(table=runs.table[used].reset_index(drop=True))
    return Planned(complete, scale or "", labels, seeds, tuple(notes))


def _places(noted: list[dict[str, Any]], cells: list[Settings]) -> list[int | None]:
    """Which cell each run is, by all its noted settings; None for a run that is none of them."""
    alike: dict[tuple[Any, ...], list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for number, cell in enumerate(cells):
        alike[cell.name, cell.algorithm, cell.seed].append((number, _plain(asdict(cell))))
    found: list[int | None] = []
    for settings in noted:
        key = settings.get("label"), settings.get("algorithm"), settings.get("seed")
        own = _plain({name: getattr(Settings, name) for name in experiment.LATER} | settings)
        at = [number for number, cell in alike.get(key, []) if all(own[k] == cell[k] for k in own if k != "label")]
        found.append(at[0] if at else None)
    return found


def _plain(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text, the same from a file and from a store."""
    return {name: store.to_json(value) for name, value in settings.items()}


def gather(grid: Grid, *of_run: Callable[[xr.DataTree], pd.DataFrame]) -> list[pd.DataFrame]:
    """Tables of single runs, concatenated, with ``label``, ``seed`` and ``estimator`` of each run.

    Parameters
    ----------
    grid : Grid
        Each run is opened once.
    *of_run : callable (run) -> DataFrame
        For example :func:`scores`, :func:`steps` and :func:`shares`.

    Returns
    -------
    list of DataFrame
        One for each function in ``of_run``.
    """
    parts: list[list[pd.DataFrame]] = [[] for _ in of_run]
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        same = {name: run[name] for name in ("label", "seed", "estimator")}
        for found, table in zip(parts, of_run, strict=True):
            found.append(table(tree).assign(**same))
    return [pd.concat([part for part in found if len(part)] or found[:1], ignore_index=True) for found in parts]


def scores(run: xr.DataTree) -> pd.DataFrame:
    """Test accuracy after the last round, weighted by the clients' test samples.

    Returns
    -------
    DataFrame
        ``method``, the algorithm's name and those of its readouts; ``accuracy``.
    """
    names = [str(config_of(run)["algorithm"])]
    metrics = run["metrics"].to_dataset()
    values = [metrics["accuracy"].isel(round=[-1]).transpose("round", "client").to_numpy()]
    if "readouts" in run.children:
        found = run["readouts"].to_dataset()["accuracy"]
        names += [str(name) for name in found["readout"].values]
        values.append(found.transpose("readout", "client").to_numpy())
    accuracy = weighted(np.concatenate(values).astype(np.float64), metrics["n_test"].to_numpy().astype(np.float64))
    return pd.DataFrame({"method": names, "accuracy": accuracy})


def steps(run: xr.DataTree) -> pd.DataFrame:
    """Steps B of the readouts, mean over clients: ``readout``, ``layer``, ``step``."""
    names = ["readout", "layer", "step"]
    if "readouts" not in run.children:
        return pd.DataFrame(columns=names)
    return run["readouts"].to_dataset()["step"].astype(float).mean("client").to_dataframe().reset_index()[names]


def shares(run: xr.DataTree) -> pd.DataFrame:
    """Personal share of each layer, for a run that was probed.

    Returns
    -------
    DataFrame
        ``layer``, ``place`` (0 for the network's first layer); ``personal``, pooled over the last ten rounds; ``first``
        and ``last``, in the first and the last probed round, ``first_round`` and ``last_round``. Empty for a run that
        was not probed.
    """
    names = ["layer", "place", "personal", "first", "last", "first_round", "last_round"]
    if "probe" not in run.children:
        return pd.DataFrame(columns=names)
    found = profile(run, window=10)[["layer", "personal"]]
    each = profile(run).set_index("layer")
    for name, number in (("first", each["round"].min()), ("last", each["round"].max())):
        found[name] = each.loc[each["round"] == number, "personal"].reindex(found["layer"]).to_numpy()
        found[f"{name}_round"] = int(number)
    return found.assign(place=np.arange(len(found)))[names]
