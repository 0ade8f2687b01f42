"""How methods, their settings and numbers are shown in tables and figures, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from fedstat.fl import algorithms
from fedstat.fl.algorithm import About
from fedstat.study import summary
from fedstat.study.collect import Grid

METHODS = {name: algorithms.about(name).title for name in algorithms.ALGORITHMS}
"""Names of the methods as tables and figures show them, in their order."""

SETTINGS = {"layers": "Λ", "kappa": "κ", "tau": "τ", "estimator": "estimator"}
"""Settings of the methods that split layers, as tables show them, in their order."""


def ordered(names: Iterable[str]) -> list[str]:
    """Methods in the order of ``METHODS``, others after them.

    Examples
    --------
    >>> ordered(["mine", "fedper", "fedavg"])
    ['fedavg', 'fedper', 'mine']
    """
    places = list(METHODS)
    return sorted(dict.fromkeys(names), key=lambda n: (places.index(n) if n in places else len(places), n))


def in_order(grid: Grid) -> pd.DataFrame:
    """Runs of a grid in the order of tables: by label, method, ``SETTINGS`` and seed."""
    methods = ordered(grid.table["method"])

    def key(run: Mapping[Any, Any]) -> tuple[Any, ...]:
        config = grid.configs.get(run["label"], {})
        settings = [summary.place(name, run[name], config) for name in SETTINGS]
        return run["label"], methods.index(run["method"]), *settings, run["seed"]

    keys = [key(run) for run in grid.table.to_dict("records")]
    return grid.table.iloc[sorted(range(len(keys)), key=keys.__getitem__)]


def varying(table: pd.DataFrame) -> list[str]:
    """Those of ``SETTINGS`` that a method was run with several values of, under one label."""
    several = table.groupby(["label", "method"])[list(SETTINGS)].nunique(dropna=False).max() > 1
    return [name for name in SETTINGS if several[name]]


def design(run: Mapping[Any, Any], names: Iterable[str]) -> str:
    """Method of a run, with its values of the settings that are named.

    Examples
    --------
    >>> run = {"method": "random", "layers": "fc1", "kappa": float("nan"), "tau": 0.5}
    >>> design(run, ["layers", "kappa", "tau"])
    'random split, Λ = fc1, τ = 0.5'
    """
    values = {SETTINGS[name]: setting(run[name]) for name in names}
    return ", ".join([about(run["method"]).title, *(f"{k} = {v}" for k, v in values.items() if v != "–")])


def about(method: str) -> About:
    """Row of a method; of one that is not known here, its name.

    Examples
    --------
    >>> about("fedper+").title, about("mine").title
    ('FedPer+', 'mine')
    """
    try:
        return algorithms.about(method)
    except ValueError:
        return About(method)


def setting(value: Any) -> str:
    """Print one of ``SETTINGS``; a dash where the method has none, or its own default."""
    return "–" if value == "" or pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)
