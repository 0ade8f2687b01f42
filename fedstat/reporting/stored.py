"""Stores that are reported, their origin, and the parts that reports have in common."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr

from fedstat import store
from fedstat._utils import check, guard
from fedstat._utils.loops import track
from fedstat.reporting.document import PARAGRAPH, PRINTED, Part, Section, Table, listed, shown
from fedstat.results.base import Caution, LayerResults
from fedstat.study import selection

_HIDDEN = ("shapes", "data_digest", "algorithm_settings", "out", "overwrite", "quiet")


def command_line(command: str, settings: Mapping[str, Any], *, positional: tuple[str, ...] = ()) -> str:
    """Write a command with its settings, for a shell.

    Examples
    --------
    >>> command_line("fedstat.sim", {"p": [0.2, 0.5], "batch_size": 10, "tau": None, "quiet": False})
    'python -m fedstat.sim --p 0.2 0.5 --batch-size 10'
    """
    words = ["python", "-m", command]
    for name in positional:
        words += [str(value) for value in settings.get(name) or ()]
    for name, value in settings.items():
        if name in positional or value is None or value is False or value == [] or value == ():
            continue
        option = f"--{name.replace('_', '-')}"
        texts = [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
        if value is True:
            words.append(option)
        elif len(texts) == 1 and texts[0].startswith("-"):
            words.append(f"{option}={texts[0]}")
        else:
            words += [option, *texts]
    return shlex.join(words)


def origin(stored: Stored) -> dict[str, str]:
    """By which code, when, and where a run was made."""
    attrs = stored.attrs
    version = f"revision {attrs['revision']}" if attrs.get("revision") else f"digest {attrs.get('code', 'not known')}"
    ended = f" to {attrs['ended']}" if stored.finished else ", not finished"
    rows = {
        "code": f"{attrs.get('source', 'fedstat, version not known')}, {version}",
        "time (UTC)": f"{attrs['started']}{ended}" if "started" in attrs else "",
        "device": attrs.get("device", ""),
    }
    return {name: shown(value) for name, value in rows.items() if value}


def details(stored: Stored) -> list[Table]:
    """All settings of a run, and the versions behind it."""
    rows = {shown(k): _value(v) for k, v in stored.config.items() if k not in _HIDDEN and v is not None}
    rows |= {f"algorithm: {shown(k)}": _value(v) for k, v in settings_of_method(stored).items() if v is not None}
    if isinstance(shapes := stored.config.get("shapes"), Mapping) and (n := n_parameters(shapes)):
        rows["network"] = f"{n:,} parameters in {len(shapes)} arrays"
    if digest := stored.config.get("data_digest"):
        rows["digest of the data"] = shown(digest)
    tables = [Table.pairs(f"Settings of {stored.name}", rows)]
    return [*tables, Table.pairs("Versions", versions(stored) | identity(stored))]


def settings_of_method(stored: Stored) -> dict[str, Any]:
    """Return the settings of a run's algorithm."""
    settings = stored.config.get("algorithm_settings")
    return dict(settings) if isinstance(settings, Mapping) else {}


def versions(stored: Stored) -> dict[str, str]:
    """Versions of Python and packages that a run was made with."""
    try:
        packages = json.loads(stored.attrs.get("versions", "{}"))
        return {shown(name): shown(version) for name, version in dict(packages).items()}
    except (ValueError, TypeError):
        return {"versions": "cannot be read"}


def identity(stored: Stored) -> dict[str, str]:
    """Return the identity of a run."""
    names = {"code": "digest of the code", "run": "identity of the run"}
    return {label: shown(stored.attrs[name]) for name, label in names.items() if name in stored.attrs}


def n_parameters(shapes: Mapping[str, Any]) -> int:
    """Return the number of parameters of a network, 0 if shapes are not lists of numbers."""
    try:
        return sum(math.prod(map(int, shape)) for shape in shapes.values())
    except (AttributeError, TypeError, ValueError):
        return 0


def cautions(stored: Stored) -> list[Caution]:
    """Return cautions on the origin of a run."""
    notes = []
    if str(stored.attrs.get("revision", "")).endswith("-dirty"):
        notes.append(
            Caution(
                "Changed code",
                f"the repository of fedstat had changes without a commit ({shown(stored.attrs['revision'])})",
            )
        )
    if ", " in str(stored.attrs.get("code", "")):
        notes.append(Caution("Several versions of the code", "one version began the run, another continued it"))
    return notes


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return shown("; ".join(f"{k}: {v}" for k, v in value.items()) or "none")
    if isinstance(value, list | tuple):
        return shown(", ".join(map(str, value)) or "none")
    return shown(value)


_CHECKS, _SUMMARY = "the other warnings", "what was found"


def assemble(
    stored: Stored,
    ran: Table,
    sections: Mapping[str, Callable[[xr.DataTree], Section | None]],
    *,
    run: xr.DataTree | None = None,
    title: str = "",
    checks: Callable[[xr.DataTree], Iterable[Caution]] = lambda _: (),
    summary: Callable[[xr.DataTree], str] = lambda _: "",
    methods: tuple[str, list[str]] = ("", []),
) -> Part:
    """Part on one store: what can be read of it, with the warnings that its files and its origin give.

    Parameters
    ----------
    stored : Stored
    ran : Table
        What was run.
    sections : mapping from title to callable (run) -> Section or None
        Results; None is left out.
    run : DataTree, optional
        What is reported; by default all that is stored.
    title : str
        By default that of the store.
    checks, summary : callable (run)
        Further warnings, and what was found, as the command prints it.
    methods : (str, list of str)
        Paragraph for a paper, and the keys of the entries that it cites.
    """
    parts: dict[str, Any] = {}
    lost: list[Caution] = []
    if (tree := stored.tree if run is None else run) is not None:
        makes = {_CHECKS: lambda run: list(checks(run)), _SUMMARY: summary, **sections}
        parts, lost = stored.attempt({name: partial(make, tree) for name, make in makes.items()})
    warned = [*damage_of(stored), *lost, *parts.pop(_CHECKS, []), *cautions(stored)]
    text = parts.pop(_SUMMARY, "")
    return Part(
        shown(title) or stored.title,
        ran,
        warned,
        shown(text, PRINTED),
        list(parts.values()),
        shown(methods[0], PARAGRAPH),
        methods[1],
        details(stored),
    )


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
        """Command that made the run."""
        return str(self.attrs.get("command", ""))

    @property
    def title(self) -> str:
        """Title of the run."""
        return shown(self.attrs.get("title") or self.name)

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return "ended" in self.attrs

    def attempt(self, makes: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[Caution]]:
        """Make all parts of a run that can be made; its files may hold anything.

        Returns
        -------
        parts : dict
            By name, without what is None.
        lost : list of Caution
            Names what could not be made.
        """
        parts, lost = {}, []
        for name, make in makes.items():
            try:
                part = make()
            except FileNotFoundError:  # the run was deleted or moved since it was opened
                raise
            except Exception as error:  # what damaged and foreign files make the parts raise is of many types
                lost.append(f"{shown(name)} ({shown(error)})")
                continue
            if part is not None:
                parts[name] = part
        why = "of damaged files" if self.damaged else "of settings or values that fedstat does not write"
        text = f"because {why}, the report lacks {'; '.join(lost)}"
        return parts, [Caution("Not in this report", text, severe=True)] if lost else []


def read_runs(
    runs: Run | Iterable[Run], progress: bool | None = False, folders: list[selection.Final] | None = None
) -> list[Stored]:
    """Open runs, whatever state they are in; of tuned folders their final runs.

    Parameters
    ----------
    runs : path, DataTree, or several
        Stores, folders of stores, and runs opened by :func:`fedstat.open_run`.
    progress : bool or None
        Show how many stores are read.
    folders : list, optional
        The runs of each path are appended to it, failed ones without a store, too.

    Raises
    ------
    FileNotFoundError
        If there is no store at a path, and none in the folder there.
    ValueError
        If there is no run, or an object that is none; if a run is named twice.
    """
    runs = [runs] if isinstance(runs, str | Path | xr.DataTree) else runs
    if not isinstance(runs, Iterable) or isinstance(runs, LayerResults):
        raise ValueError(
            f"run must be a path, a DataTree, or a list of these, but got {check.kind(runs)}. A result has its own "
            "report: result.summary()."
        )
    sources: list[Path | xr.DataTree] = []
    runs = list(runs)
    store.distinct_stores(run for run in runs if not isinstance(run, xr.DataTree))
    if len({id(run) for run in runs}) < len(runs):
        raise ValueError("an opened run is named twice. Name it once.")
    for run in runs:
        if isinstance(run, xr.DataTree):
            sources.append(run)
            continue
        folder = selection.final_runs(run)
        sources += [path for path in folder.paths if path.exists()]
        if folders is not None:
            folders.append(folder)
    with track(sources, "run", progress) as tracked:
        stored_runs = [_of_tree(source) if isinstance(source, xr.DataTree) else _of_path(source) for source in tracked]
    if not stored_runs:
        raise ValueError("a report needs at least one run, but got none")
    return stored_runs


def damage_of(stored: Stored) -> list[Caution]:
    """Describe damage to a run's files."""
    if not stored.damaged:
        return []
    text = f"{listed(stored.damaged, most=8)}. Resume the run to recompute them"
    return [Caution("Damaged files", text, severe=True)]


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
    except store.VersionError:
        raise
    except (ValueError, FileNotFoundError) as error:
        return Stored(name, {}, {}, None, (str(error),))
    try:
        return Stored(name, attrs, config, store.open_run(path, verify=False), wrong)
    except ValueError as error:
        return Stored(name, attrs, config, None, wrong or (str(error),))


def _config(attrs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read the settings in a store's attributes; return also their problems."""
    if "config" not in attrs:
        return {}, ()
    try:
        return dict(guard.parsed("config", attrs["config"].encode(), finite=False)), ()
    except (ValueError, TypeError, AttributeError):
        return {}, ("its settings cannot be read",)
