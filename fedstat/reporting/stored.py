"""The runs that a report is about, sound, unfinished or damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr

from fedstat import store
from fedstat._utils import guard
from fedstat.reporting.document import Caution, listed, shown

Run = str | Path | xr.DataTree


class Stored(NamedTuple):
    """A run, and what is wrong with it.

    Attributes
    ----------
    name : str
        Of its store; its title where it has none.
    attrs : mapping
        Attributes of the store.
    config : mapping
        Settings; {} where they cannot be read.
    tree : DataTree or None
        None where it cannot be opened.
    damaged : tuple of str
        Files that are not as they were written.
    """

    name: str
    attrs: Mapping[str, Any]
    config: Mapping[str, Any]
    tree: xr.DataTree | None
    damaged: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Command that made it."""
        return str(self.attrs.get("command", ""))

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        return shown(self.attrs.get("title", "") or self.name)

    @property
    def finished(self) -> bool:
        """Whether it says that it ended."""
        return "ended" in self.attrs

    def attempt(self, makes: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[Caution]]:
        """Make what can be made of a run, whose files may hold anything.

        Returns
        -------
        made : dict
            By name, without what is None.
        lost : list of Caution
            Names what could not be made.
        """
        found, lost = {}, []
        for name, make in makes.items():
            try:
                made = make()
            except Exception as error:  # what damaged and foreign files make the parts raise is of many types
                lost.append(f"{name} ({shown(error)})")
                continue
            if made is not None:
                found[name] = made
        why = "the damage to the files" if self.damaged else "settings or values that fedstat does not write"
        text = f"{why} left out: {'; '.join(lost)}"
        return found, [Caution("Not in this report", text, grave=True)] if lost else []


def read(runs: Run | Iterable[Run]) -> list[Stored]:
    """Open runs, whatever state they are in.

    Parameters
    ----------
    runs : path, DataTree, or several
        Stores, folders of stores, and runs opened by :func:`fedstat.open_run`.

    Raises
    ------
    FileNotFoundError
        If there is no store at a path, and none in the folder there.
    """
    given: list[Run] = [runs] if isinstance(runs, str | Path | xr.DataTree) else list(runs)
    found: list[Stored] = []
    for one in given:
        found += [_of_tree(one)] if isinstance(one, xr.DataTree) else map(_of_path, store.stores(one))
    if not found:
        raise ValueError("a report needs at least one run, but got none")
    return found


def damage_of(stored: Stored) -> list[Caution]:
    """What is to be said of a run's files."""
    if not stored.damaged:
        return []
    text = f"not as they were written: {listed(stored.damaged, most=8)}. Resume the run to compute again what can be"
    return [Caution("Damaged files", text, grave=True)]


def _of_tree(tree: xr.DataTree) -> Stored:
    attrs = {str(name): value for name, value in tree.attrs.items()}
    config, wrong = _config(attrs)
    return Stored(shown(attrs.get("title") or tree.name or "run"), attrs, config, tree, wrong)


def _of_path(path: Path) -> Stored:
    name = shown(path.name.removesuffix(".zarr"))
    try:
        attrs = store.attributes(path)
        config, wrong = _config(attrs)
        wrong += tuple(map(str, store.damage(path, checksums=True)))
    except (ValueError, FileNotFoundError) as error:
        return Stored(name, {}, {}, None, (str(error),))
    try:
        return Stored(name, attrs, config, store.open_run(path, verify=False), wrong)
    except ValueError as error:
        return Stored(name, attrs, config, None, wrong or (str(error),))


def _config(attrs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings in a store's attributes, and what is wrong with them."""
    if "config" not in attrs:
        return {}, ()
    try:
        return dict(guard.parsed("config", attrs["config"].encode(), finite=False)), ()
    except (ValueError, TypeError, AttributeError):
        return {}, ("its settings cannot be read",)
