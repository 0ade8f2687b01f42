"""Published values, read from a file: a reference, never results.

The file is TOML: ``source``, in words; for every setting of every published table a table ``[NAME."SETTING"]`` from
method to value, or to a list of value and standard deviation; ``percent`` lists the tables that are in percent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedstat._utils.settings import read_toml, table
from fedstat.study.collect import METHODS, Grid, labels, ordered, origin


class Reference(NamedTuple):
    """Published values.

    Attributes
    ----------
    tables : mapping from table to setting to method to float
        Means; those in percent are divided by 100.
    source : str
        Who published them, and where.
    """

    tables: Mapping[str, Mapping[str, Mapping[str, float]]] = {}
    source: str = ""

    def of(self, table: str, label: str) -> dict[str, float]:
        """Values of a setting, {} if there are none; labels match regardless of spaces, hyphens, commas and case.

        Examples
        --------
        >>> Reference({"table1": {"CIFAR-10, π = 0.1": {"fedavg": 0.25}}}).of("table1", "cifar10 π=0.1")
        {'fedavg': 0.25}
        """
        found = {plain(name): values for name, values in self.tables.get(table, {}).items()}
        return dict(found.get(plain(label), {}))

    def notes(self, grid: Grid) -> list[str]:
        """Where the published values and the runs come from."""
        return [f"paper: reference values at the paper's own scale, {self.source}", *origin(grid)]

    def not_run(self, grid: Grid, table: str) -> list[str]:
        """Methods and settings of a published table that were not run."""
        notes, theirs = [], self.tables.get(table, {})
        wanted = ordered(m for values in theirs.values() for m in values)
        for label in labels(grid):
            run = set(grid.table.loc[grid.table["label"] == label, "method"])
            if missing := [METHODS.get(m, m) for m in wanted if m not in run]:
                notes.append(f"{label}: not run: {', '.join(missing)}")
        ours = {plain(label) for label in labels(grid)}
        if absent := [label for label in theirs if plain(label) not in ours]:
            notes.append(f"the paper's settings that were not run: {'; '.join(absent)}")
        return notes


def read(path: str | Path) -> Reference:
    """Read published values from a file.

    Raises
    ------
    ValueError
        If it cannot be read, or a value is not a number.
    """
    found = read_toml(Path(path))
    source, percent = str(found.pop("source", "")), found.pop("percent", [])
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for name in found:
        settings, size = table(found, name, path), 100 if name in percent else 1
        tables[name] = {}
        for label in settings:
            where = f"{path}, [{name}], {label!r:.200}"
            values = table(settings, label, f"{path}, [{name}]")
            tables[name][label] = {method: _mean(x, f"{where}, {method}") / size for method, x in values.items()}
    return Reference(tables, source)


def _mean(value: Any, where: str) -> float:
    mean = value[0] if isinstance(value, list) and value else value
    if isinstance(mean, bool) or not isinstance(mean, int | float):
        raise ValueError(f"{where} must be a number or a list of mean and standard deviation, but got {value!r:.200}")
    return mean


def plain(label: str) -> str:
    """Label in lower case, without spaces, hyphens, underscores and commas."""
    return re.sub(r"[\s\-_,]", "", label).lower()
