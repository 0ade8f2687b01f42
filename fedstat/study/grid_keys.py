"""Keys of grid files that combine settings to runs, and the tables that may hold a key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedstat._utils import check


class Key(NamedTuple):
    """Key of a grid's file.

    Attributes
    ----------
    name : str
    tables : tuple of str
        Tables that may hold it: "" for the top of the file, "scale.NAME", "dataset", "method", "method.sweep", "tune".
    meaning : str
    default : object
        None if it has no default.
    methods : tuple of str
        Algorithms that take it; () if it is for all runs.
    """

    name: str
    tables: tuple[str, ...]
    meaning: str
    default: Any = None
    methods: tuple[str, ...] = ()


ANYWHERE = ("", "scale.NAME", "dataset", "method", "method.sweep", "tune")
STRUCTURE = (
    Key("seeds", ("", "scale.NAME", "tune"), "seeds: every data set and method is run with each seed; in [tune], the "
        "seeds for tuning", [0]),
    Key("dataset", ("",), "[[dataset]], one table per scenario; crossed with every [[method]]"),
    Key("method", ("",), "[[method]], one table per method, with at least one key"),
    Key("scale", ("",), "[scale.NAME], settings that override the others with --scale NAME; a data set or a method may "
        "hold its own table NAME"),
    Key("tune", ("",), "[tune], lists of candidates, which --tune tries in this order; [tune.NAME] for a scale"),
    Key("methods", ("dataset",), "names of the algorithms that run on the data set; all by default"),
    Key("studies", ("dataset", "method"), "studies of the table: data sets and methods without a common study are not "
        "crossed, and --study NAME makes the runs of one study"),
    Key("sweep", ("method",), "[method.sweep], lists of values: one run for every combination"),
    Key("together", ("tune",), "tune on all data sets together, not on each", False),
    Key("extend", ("tune",), "try numbers beyond the smallest or largest candidate while it is the best", False),
    Key("search", ("tune",), "optuna: draw the settings of every trial together, from lists and ranges"),
    Key("budget", ("tune",), "number of trials of a search, for every method"),
)  # fmt: skip
"""Keys that combine data sets, methods and seeds to runs."""


def require_keys(content: Mapping[str, Any], table: str, settings: Iterable[str], where: str) -> None:
    """Raise ValueError with the nearest names if a table of a grid's file has a key that it cannot hold.

    Parameters
    ----------
    content : mapping
        Content of the table.
    table : str
        Kind of the table, one of ``ANYWHERE``.
    settings : iterable of str
        Names of the settings and nested tables that the table may hold.
    where : str
        Name of the table in the message.
    """
    names = [*settings, *(key.name for key in STRUCTURE if table in key.tables)]
    for name in content:
        if name not in names:
            hint = check.did_you_mean(name, names, cutoff=0.5)
            elsewhere = next((f" It belongs in {_heading(key.tables)}." for key in STRUCTURE if key.name == name), "")
            raise ValueError(f"{where} cannot hold the key {name!r:.200}.{elsewhere or hint}")


def _heading(tables: tuple[str, ...]) -> str:
    heads = {"": "the top of the file", "dataset": "[[dataset]]", "method": "[[method]]"}
    return " or ".join(heads.get(table, f"[{table}]") for table in tables)
