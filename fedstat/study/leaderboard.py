"""Leaderboard of all methods, contrasts within seeds, scores of prediction rules, and the planned comparison.

The score of a run (accuracy, or RMSE of real-valued targets) is its test score in the round with the best validation
score. Test data select nothing.
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
from fedstat.study import experiment, grid, run_metrics, run_table
from fedstat.study.collect import Grid, about, ordered
from fedstat.study.compare import against_zero
from fedstat.study.run_metrics import score_in, weighted
from fedstat.study.run_settings import Settings
from fedstat.study.run_table import config_of

_NOT_OF_TRAINING = ("prediction_rules", "probe", "ablation", "checkpoints", "keep_weights")


def over_settings(data: pd.DataFrame, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Compare pairs of methods: difference per seed, first minus second, mean over settings.

    Parameters
    ----------
    data : DataFrame
        ``scenario``, ``seed``, ``method``, ``accuracy`` (or ``rmse``), one row for every combination.
    pairs : iterable of (str, str)
        Names of the methods.

    Returns
    -------
    DataFrame
        One row per pair: ``comparison``, the two names joined by " − ", and the columns of
        :func:`fedstat.study.compare.against_zero`. ``conf_low`` and ``conf_high`` are unadjusted; ``sim_conf_low`` and
        ``sim_conf_high`` are simultaneous over all pairs (Bonferroni).
    """
    value = score_in(data).name
    wide = data.pivot(index="seed", columns=["scenario", "method"], values=value).T.groupby("method").mean().T
    parts = [_subtract(wide, a, b).assign(comparison=f"{a} − {b}", scenario="all") for a, b in pairs]
    return against_zero(pd.concat(parts, ignore_index=True), "comparison", "difference")


def by_setting(data: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    """Compare two methods in each setting: first minus second; CIs are simultaneous over all settings.

    Parameters
    ----------
    data : DataFrame
        Columns as in :func:`over_settings`.
    pair : (str, str)
        Names of the methods.

    Returns
    -------
    DataFrame
        One row per setting, in order of appearance: ``scenario``, and the columns of
        :func:`fedstat.study.compare.against_zero`.
    """
    parts = []
    for scenario, rows in data.groupby("scenario", sort=False):
        wide = rows.pivot(index="seed", columns="method", values=score_in(data).name)
        parts.append(_subtract(wide, *pair).assign(scenario=scenario, setting=scenario))
    table = against_zero(pd.concat(parts, ignore_index=True), "setting", "difference")
    return table.rename(columns={"setting": "scenario"})


def repeated(grid: Grid, again: Grid) -> pd.DataFrame:
    """Compute differences in score between two computations of equal runs, such as with other client chunks.

    Parameters
    ----------
    grid, again : Grid
        Runs to compare. They are matched by all settings that affect training.

    Returns
    -------
    DataFrame
        ``scenario``, ``seed``, ``method`` (name of the algorithm, or of a prediction rule of both runs) and
        ``difference``, second minus first.

    Raises
    ------
    ValueError
        If a run of ``again`` has no match in ``grid``, or is a copy of its match.
    """
    first = {_training_settings(path): path for path in grid.table["path"]}
    rows = []
    for run in again.table.to_dict("records"):
        if (path := first.get(_training_settings(run["path"]))) is None:
            raise ValueError(f"{run['path']} must repeat a run of the grid, but none has its settings")
        if _run_id(path) == _run_id(run["path"]):
            raise ValueError(f"{run['path']} is a copy of {path}. Pass runs that were trained again.")
        before, after = (scores(store.open_run(p)).set_index("method") for p in (path, run["path"]))
        difference = (after - before).iloc[:, 0].dropna()
        rows += [
            {"scenario": run["scenario"], "seed": run["seed"], "method": name, "difference": x}
            for name, x in difference.items()
        ]
    return pd.DataFrame(rows)


def _subtract(wide: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    return (wide[first] - wide[second]).rename("difference").reset_index()


def _training_settings(path: str) -> str:
    """Return all settings that affect the training of a run, as text."""
    config = store.config_of(path)
    return store.to_json({k: v for k, v in sorted(config.items()) if k not in _NOT_OF_TRAINING})


def _run_id(path: str) -> str:
    """Return the identifier of a computation; copies of a store have equal identifiers."""
    return str(store.attributes(Path(path))["run"])


TENTH = 0.1


def chosen_rates(grid: Grid, seeds: Sequence[int]) -> Grid:
    """Select, for each setting and method, the runs with the best learning rate by mean validation score.

    Parameters
    ----------
    grid : Grid
        Runs collected with ``differ=("lr",)``.
    seeds : sequence of int
        Tuning seeds. Only learning rates with a finished run for each of them are candidates.

    Returns
    -------
    Grid

    Raises
    ------
    ValueError
        If no method has a candidate.
    """
    selected = []
    for _, runs in grid.table.groupby(["scenario", "method"], sort=False):
        tuning_runs = runs[runs["seed"].isin(seeds)]
        is_complete = tuning_runs.groupby("lr")["seed"].nunique() == len(set(seeds))
        candidates = tuning_runs[tuning_runs["lr"].isin(is_complete.index[is_complete])]
        if len(candidates):
            rate = run_table.chosen(candidates, "lr", {})
            selected.append(runs[runs["lr"] == rate])
    if not selected:
        raise ValueError(f"no method has finished runs for all tuning seeds: {', '.join(map(str, seeds))}. Run them.")
    return grid._replace(table=pd.concat(selected, ignore_index=True))


def measured(path: str | Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Measure the score and cost of a run, and both over rounds.

    Parameters
    ----------
    path : path
        Store of a finished run.

    Returns
    -------
    dict
        - ``chosen_round``: round with the best validation score.
        - ``accuracy`` (or ``rmse``): test score in that round, mean over clients weighted by test samples.
        - ``worst``: 10% quantile of the test accuracy (90% of RMSE) over clients in that round.
        - ``optimism``: by how much the best test score of all rounds is better.
        - ``unseen``: score on unseen clients by the first prediction rule of the method that was measured
          (``unseen_rule``); NaN without unseen clients.
        - ``seconds``: median time of a round.
        - ``kept``: bytes of the state of clients and server, as stored to resume the run.
    DataFrame
        One row per evaluated round: ``round``, ``accuracy`` (or ``rmse``), and, cumulated over rounds, ``bytes``
        (upload and download of all clients) and ``elapsed`` (seconds of training).

    Raises
    ------
    ValueError
        If the run has no validation score.
    """
    with store.reading(path):
        return _measure_run(path, store.open_run(path))


def state_bytes(path: str | Path) -> int:
    """Return the bytes of the state to resume a run from: of clients and server, rows of clients on disk included."""
    folder = Path(path) / store.JOURNAL
    rows = (file for rows in folder.glob("*/") for file in rows.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in (*folder.glob("state*"), *rows))


def _measure_run(path: str | Path, run: xr.DataTree) -> tuple[dict[str, Any], pd.DataFrame]:
    config, metrics = run_table.config_of(run), run["metrics"].to_dataset()
    score = run_metrics.score_of(run)
    test, validation = score.name, f"validation_{score.name}"
    course = run_table.curve(run, test).merge(run_table.curve(run, validation), on="round")
    if course.empty:
        raise ValueError(
            f"{path} has no validation {score.title}, which selects the round. Run with validation_fraction > 0."
        )
    best = course.iloc[score.best(course[validation])]
    by_client = metrics[test].sel(round=int(best["round"])).to_numpy().astype(float)
    measures = {
        test: float(best[test]),
        "chosen_round": int(best["round"]),
        "worst": float(np.quantile(by_client[np.isfinite(by_client)], 1 - TENTH if score.is_error else TENTH)),
        "optimism": abs(float(course[test].iloc[score.best(course[test])] - best[test])),
        "seconds": float(np.nanmedian(metrics["seconds"])),
        "kept": float(state_bytes(path)) or math.nan,
        **_measure_unseen(run, str(config["algorithm"])),
    }
    sums = {
        "bytes": (metrics["bytes_up"] + metrics["bytes_down"]).cumsum("round"),
        "elapsed": metrics["seconds"].cumsum("round"),
    }
    numbers = course["round"].to_numpy()
    course = course.assign(**{name: total.sel(round=numbers).to_numpy() for name, total in sums.items()})
    return measures, course.drop(columns=validation)


def _measure_unseen(run: xr.DataTree, method: str) -> dict[str, Any]:
    """Return the score on unseen clients by the first prediction rule of the method that was measured."""
    if "unseen_clients" not in run.children:
        return {"unseen": math.nan, "unseen_rule": ""}
    by_rule = run_table.unseen_clients(run)
    rule = next((rule for rule in about(method).unseen_clients if rule in by_rule["rule"].values), "")
    return {"unseen": float(by_rule.sel(rule=rule)) if rule else math.nan, "unseen_rule": rule}


def of_clients(path: str | Path, number: int) -> pd.DataFrame:
    """Return the test score of every client in a round: ``client``, ``accuracy`` (or ``rmse``)."""
    run = store.open_run(path)
    name = run_metrics.score_of(run).name
    values = run[f"metrics/{name}"].sel(round=number).astype(float)
    return pd.DataFrame({"client": values["client"].values, name: values.values}).dropna()


def measure(grid: Grid) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Apply :func:`measured` to all runs; add scenario, method, seed, lr and path, in the order of tables."""
    rows, courses = [], []
    order = ordered(grid.table["method"])
    runs = grid.table.assign(order=grid.table["method"].map(order.index)).sort_values(["scenario", "order", "seed"])
    for run in runs.to_dict("records"):
        names = {name: run[name] for name in ("scenario", "method", "seed", "lr", "path")}
        measures, course = measured(run["path"])
        rows.append(names | measures)
        courses.append(course.assign(**names))
    return pd.DataFrame(rows), pd.concat(courses, ignore_index=True)


def to_reach(courses: pd.DataFrame, targets: Mapping[str, float], name: str = "bytes") -> pd.DataFrame:
    """Compute the cost at which a method first reaches the target score of its setting.

    Parameters
    ----------
    courses : DataFrame
        ``scenario``, ``method``, ``seed``, ``round``, ``accuracy`` (or ``rmse``) and the cost up to each round.
    targets : mapping from scenario to float
        Target scores.
    name : str
        Column of the cost.

    Returns
    -------
    DataFrame
        ``scenario``, ``method``, ``seeds`` (number of runs), ``reached`` (number that reach the target), and the mean
        cost over seeds. The cost is NaN unless all runs reach the target: a mean over successful runs would favor
        methods that often fail.

    Examples
    --------
    >>> import pandas as pd
    >>> rows = {"scenario": "a", "method": "m", "seed": [0, 0, 1, 1], "round": [1, 2] * 2, "bytes": [5, 9] * 2}
    >>> to_reach(pd.DataFrame(rows | {"accuracy": [0.4, 0.8, 0.6, 0.9]}), {"a": 0.5}).to_dict("records")
    [{'scenario': 'a', 'method': 'm', 'seeds': 2, 'reached': 2, 'bytes': 7.0}]
    """
    rows, score = [], score_in(courses)
    for (scenario, method), runs in courses.groupby(["scenario", "method"], sort=False):
        values, target = runs[score.name], targets[str(scenario)]
        is_reached = values <= target if score.is_error else values >= target
        first = runs[is_reached].sort_values("round").groupby("seed")[name].first()
        seeds = runs["seed"].nunique()
        cost = first.mean() if len(first) == seeds else math.nan
        rows.append({"scenario": scenario, "method": method, "seeds": seeds, "reached": len(first), name: cost})
    return pd.DataFrame(rows)


def ranked(scores: pd.DataFrame) -> tuple[pd.DataFrame, Friedman | None, list[str]]:
    """Rank methods by their score over settings, after averaging over seeds.

    Parameters
    ----------
    scores : DataFrame
        ``scenario``, ``method``, ``seed``, ``accuracy`` (or ``rmse``, of which the smallest is best).

    Returns
    -------
    DataFrame (scenario, method)
        Mean score of each method that has a run in every setting, to six digits.
    Friedman or None
        Friedman test with settings as blocks. Seeds are not blocks, because all seeds of a setting use its data. None
        with fewer than 2 settings or 3 methods.
    list of str
        Methods that lack a setting, which are excluded.
    """
    score = score_in(scores)
    wide = scores.groupby(["scenario", "method"], sort=False)[score.name].mean().unstack("method")
    absent = [str(name) for name in wide.columns[wide.isna().any()]]
    wide = wide[[name for name in ordered(wide.columns) if name not in absent]]
    wide = wide.map(lambda mean: float(f"{mean:.6g}"))  # runs store float32, whose rounding would break ties
    is_testable = wide.shape[0] > 1 and wide.shape[1] > 2
    values = -wide.to_numpy() if score.is_error else wide.to_numpy()
    return wide, friedman(values) if is_testable else None, absent


class Planned(NamedTuple):
    """Runs of the complete seeds of a grid file.

    Attributes
    ----------
    grid : Grid
        Finished runs of ``seeds``.
    scale : str
        Name of the ``[scale.NAME]`` table of the runs.
    scenarios : tuple of str
        Labels of the settings, in the order of the file.
    seeds : tuple of int
        Seeds for which all runs of the file are finished.
    notes : tuple of str
        Excluded seeds, and the number of runs in the folder that are not in the file.
    """

    grid: Grid
    scale: str
    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]


def planned(runs: Grid, file: str | Path) -> Planned:
    """Select the seeds for which all runs of a grid file are finished.

    Parameters
    ----------
    runs : Grid
        Runs from :func:`fedstat.study.collect.collect`.
    file : path
        Grid file, read by :func:`fedstat.study.grid.cells`.

    Returns
    -------
    Planned

    Raises
    ------
    ValueError
        If no run of the folder is in the file, runs have several scales, a run is stored twice, or no seed is
        complete.
    """
    scales: list[str | None] = [*read_toml(Path(file)).get("scale", {})] or [None]
    cells = {name: grid.cells(file, scale=name) for name in scales}
    stored = [experiment.settings_of(path) for path in runs.table["path"]]
    cells_by_scale = {name: _match_cells(stored, scale_cells) for name, scale_cells in cells.items()}
    matched = [name for name in scales if any(number is not None for number in cells_by_scale[name])]
    if not matched:
        raise ValueError(
            f"none of the {len(stored)} finished runs belongs to {file}. Train its runs with python -m fedstat.fl "
            f"--config {file} --scale ..., and pass their folder."
        )
    if len(matched) > 1:
        raise ValueError(
            f"runs must have one scale of {file}, but got {', '.join(map(str, matched))}. Use one folder per scale."
        )
    scale = matched[0]
    cell_numbers = cells_by_scale[scale]
    paths = defaultdict(list)
    for number, path in zip(cell_numbers, runs.table["path"], strict=True):
        if number is not None:
            paths[number].append(str(path))
    if duplicates := [group for group in paths.values() if len(group) > 1]:
        raise ValueError(f"a run of {file} is stored twice: {', '.join(duplicates[0])}. Remove one store.")
    finished = pd.DataFrame({"seed": [cell.seed for cell in cells[scale]]})
    finished["finished"] = [number in paths for number in range(len(finished))]
    counts = finished.groupby("seed", sort=False)["finished"].agg(["sum", "size"])
    seeds = tuple(int(seed) for seed in counts.index[counts["sum"] == counts["size"]])
    partial, absent = counts[counts["sum"].between(1, counts["size"] - 1)], counts[counts["sum"] == 0]
    incomplete = [f"{seed} ({n} of {total} runs)" for seed, (n, total) in partial.iterrows()]
    if not seeds:
        raise ValueError(
            f"at least one seed of {file} must have all runs finished, but the folder has {', '.join(incomplete)}. "
            "Train the missing runs."
        )
    is_complete = [number is not None and cells[scale][number].seed in seeds for number in cell_numbers]
    source = f"{Path(file).name}{f', scale {scale}' if scale else ''}"
    notes = [f"complete seeds: {', '.join(map(str, seeds))} (of {source})"]
    notes += [f"incomplete seeds, excluded: {', '.join(incomplete)}"] if incomplete else []
    notes += [f"seeds without a finished run: {', '.join(map(str, absent.index))}"] if len(absent) else []
    if n_foreign := sum(number is None for number in cell_numbers):
        notes.append(f"finished runs of the folder that are not in {file}, excluded: {n_foreign}")
    scenarios = tuple(dict.fromkeys(cell.name for cell in cells[scale]))
    complete = runs._replace(table=runs.table[is_complete].reset_index(drop=True))
    return Planned(complete, scale or "", scenarios, seeds, tuple(notes))


def _match_cells(stored: list[dict[str, Any]], cells: list[Settings]) -> list[int | None]:
    """Match the stored settings of each run to the number of its cell; None for a run without a cell."""
    candidates: dict[tuple[Any, ...], list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for number, cell in enumerate(cells):
        candidates[cell.name, cell.algorithm, cell.seed].append((number, _to_text(asdict(cell))))
    numbers: list[int | None] = []
    for settings in stored:
        key = settings.get("scenario"), settings.get("algorithm"), settings.get("seed")
        run = _to_text(settings)
        equal = [n for n, cell in candidates.get(key, []) if all(run[k] == cell[k] for k in run if k != "scenario")]
        numbers.append(equal[0] if equal else None)
    return numbers


def _to_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Convert settings to text that is equal for a file and a store."""
    return {name: store.to_json(value) for name, value in settings.items()}


def gather(grid: Grid, *of_run: Callable[[xr.DataTree], pd.DataFrame]) -> list[pd.DataFrame]:
    """Concatenate tables of single runs, with ``scenario``, ``seed`` and ``estimator`` of each run.

    Parameters
    ----------
    grid : Grid
        Runs; each is opened once.
    *of_run : callable (run) -> DataFrame
        Functions such as :func:`scores`, :func:`steps` and :func:`shares`.

    Returns
    -------
    list of DataFrame
        One table per function in ``of_run``.
    """
    parts: list[list[pd.DataFrame]] = [[] for _ in of_run]
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        names = {name: run[name] for name in ("scenario", "seed", "estimator")}
        for tables, make_table in zip(parts, of_run, strict=True):
            tables.append(make_table(tree).assign(**names))
    return [pd.concat([part for part in tables if len(part)] or tables[:1], ignore_index=True) for tables in parts]


def scores(run: xr.DataTree) -> pd.DataFrame:
    """Compute the test score after the last round, mean over clients weighted by test samples.

    Returns
    -------
    DataFrame
        ``method``, name of the algorithm or of another prediction rule; ``accuracy`` (or ``rmse``).
    """
    names = [str(config_of(run)["algorithm"])]
    metrics, score = run["metrics"].to_dataset(), run_metrics.score_of(run).name
    values = [metrics[score].isel(round=[-1]).transpose("round", "client").to_numpy()]
    if "prediction_rules" in run.children:
        by_rule = run["prediction_rules"].to_dataset()[score]
        names += map(str, by_rule["rule"].values)
        values.append(by_rule.transpose("rule", "client").to_numpy())
    means = weighted(np.concatenate(values).astype(np.float64), metrics["n_test"].to_numpy().astype(np.float64))
    return pd.DataFrame({"method": names, score: means})


def steps(run: xr.DataTree) -> pd.DataFrame:
    """Compute the step B of prediction rules, mean over clients: ``rule``, ``layer``, ``step``."""
    names = ["rule", "layer", "step"]
    if "prediction_rules" not in run.children:
        return pd.DataFrame(columns=names)
    step = run["prediction_rules"].to_dataset()["step"].astype(float).mean("client")
    return step.to_dataframe().reset_index()[names]


def shares(run: xr.DataTree) -> pd.DataFrame:
    """Compute the reliability of client differences by layer, for a run with a split-half probe.

    Returns
    -------
    DataFrame
        ``layer``, ``place`` (0 for the first layer of the network), ``reliability`` (pooled over the last ten
        rounds), ``first`` and ``last`` (in the first and last probed rounds), ``first_round`` and ``last_round``. Empty
        for a run without a probe.
    """
    names = ["layer", "place", "reliability", "first", "last", "first_round", "last_round"]
    if "probe" not in run.children:
        return pd.DataFrame(columns=names)
    table = profile(run, window=10)[["layer", "reliability"]]
    by_round = profile(run).set_index("layer")
    for name, number in (("first", by_round["round"].min()), ("last", by_round["round"].max())):
        table[name] = by_round.loc[by_round["round"] == number, "reliability"].reindex(table["layer"]).to_numpy()
        table[f"{name}_round"] = int(number)
    return table.assign(place=np.arange(len(table)))[names]
