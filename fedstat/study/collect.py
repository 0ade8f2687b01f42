"""Runs that belong together: read from a folder, checked for one scale, and selected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import _check, store
from fedstat._later import pd
from fedstat.store import DamageError, open_run, reading, require_sound
from fedstat.study import summary
from fedstat.study.experiment import OF_AGGREGATOR

SCALE = (
    "data", "partition", "clients", "samples", "min_size", "test", "validation", "new_share", "net", "width",
    "norm", "net_options", "rounds", "participation", "local_epochs", "batch_size", "optimizer", "evaluate_every",
    "precision", "labels", "domains", "sampling",
)  # fmt: skip
"""Settings that runs of one label must have in common to be compared."""

OF_METHOD = ("lr", "server_lr", *OF_AGGREGATOR)
"""Settings that the runs of a method have in common, for one label: methods may be tuned apart."""


class Grid(NamedTuple):
    """Runs that belong together.

    Attributes
    ----------
    table : DataFrame
        One row per finished run, as :func:`fedstat.study.summary.row` makes it, with the path of its store: ``path``.
    unfinished : tuple of str
        Paths of unfinished runs, which are left out.
    configs : mapping from label to dict
        Settings of the first run of each label; those of its scale hold for all.
    """

    table: pd.DataFrame
    unfinished: tuple[str, ...] = ()
    configs: Mapping[str, dict[str, Any]] = {}


def collect(runs: str | Path | Iterable[str | Path], *, differ: Iterable[str] = ()) -> Grid:
    """Read many runs.

    Parameters
    ----------
    runs : path or sequence of paths
        A folder of stores (``*.zarr``), or the stores.
    differ : iterable of str
        Settings in which runs of a method may differ, though most tables would mix them up.

    Returns
    -------
    Grid
        Without unfinished runs, which it names.

    Raises
    ------
    FileNotFoundError
        If there are no runs.
    ValueError
        If runs of one label have different scales (the message names the settings), or a run cannot be read.
    """
    paths = stores(runs)
    rows, configs, unfinished = [], [], []
    for path in paths:
        run = open_run(path)
        if "ended" not in run.attrs:
            unfinished.append(str(path))
            continue
        try:
            with reading(path):
                rows.append(summary.row(run) | {"path": str(path)})
                configs.append(summary.config_of(run))
        except ValueError as error:
            require_sound(path, checksums=True)  # damage, which says more
            if isinstance(error, DamageError):
                raise
            raise ValueError(f"{path}: {error}") from error
    table = pd.DataFrame(rows)
    labels = [r["label"] for r in rows]
    same_scale(configs, labels, differ=differ)
    first = {label: configs[labels.index(label)] for label in dict.fromkeys(labels)}
    return Grid(table, tuple(unfinished), first)


def stores(runs: str | Path | Iterable[str | Path]) -> list[Path]:
    """Paths of the stores in a folder, or those given, sorted."""
    if isinstance(runs, str | Path):
        return store.stores(runs)
    if not (paths := sorted(map(Path, runs))):
        raise FileNotFoundError("there must be at least one run, but got none")
    return paths


def same_scale(configs: Sequence[dict[str, Any]], labels: Sequence[str], *, differ: Iterable[str] = ()) -> None:
    """Raise ValueError, naming the settings, if runs of one label were made at different scales.

    Examples
    --------
    >>> same_scale([{"rounds": 10}, {"rounds": 20}], ["a", "a"])
    Traceback (most recent call last):
    ValueError: runs of 'a' cannot stand in one table: they differ in rounds (10, 20). Keep each scale in ...
    """
    of_method = [name for name in OF_METHOD if name not in differ]
    for label in dict.fromkeys(labels):
        here = [c for c, name in zip(configs, labels, strict=True) if name == label]
        _require_same(here, SCALE, f"runs of {label!r}")
        for method in dict.fromkeys(c.get("algorithm") for c in here):
            own = [c for c in here if c.get("algorithm") == method]
            _require_same(own, of_method, f"runs of {method}, {label!r},")


def _require_same(configs: Sequence[dict[str, Any]], names: Iterable[str], which: str) -> None:
    seen = {name: list(dict.fromkeys(json.dumps(c.get(name)) for c in configs)) for name in names}
    differ = [f"{name} ({', '.join(values)})" for name, values in seen.items() if len(values) > 1]
    if differ:
        raise ValueError(
            f"{which} cannot stand in one table: they differ in {'; '.join(differ)}. Keep each scale in its own folder."
        )


def select(grid: Grid, conditions: Iterable[str]) -> Grid:
    """Keep the runs of a grid that meet conditions such as "tau=0.5"; runs without the setting stay.

    Raises
    ------
    ValueError
        If there is no such column, or no finished run is left.
    """
    table = grid.table
    for condition in conditions if len(table) else ():
        key, _, value = condition.partition("=")
        column = table[_check.choice("the key of a selection", key, [str(c) for c in table.columns])]
        empty = column.isna() | (column.astype(str) == "")
        table = table[empty | column.map(lambda x, value=value: _same(x, value))]
    if not len(table):
        raise ValueError(
            f"no finished run is left after {list(conditions)}: there were {len(grid.table)} finished and "
            f"{len(grid.unfinished)} unfinished runs"
        )
    return grid._replace(table=table.reset_index(drop=True))


def labels(grid: Grid) -> list[str]:
    """Labels of a grid, sorted."""
    return sorted(dict.fromkeys(grid.table["label"]))


def _same(x: Any, value: str) -> bool:
    try:
        return float(x) == float(value)
    except (TypeError, ValueError):
        return str(x) == value
