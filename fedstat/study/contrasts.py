"""Differences of methods within seeds: over settings, by setting, and between two computations of the same runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedstat import store
from fedstat._utils.lazy import pd
from fedstat.study import readouts
from fedstat.study.collect import Grid
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
