"""Selected settings of a tuned folder: the file that tells final runs from candidates, and who reads it.

``python -m fedstat.fl --tuned`` writes the file. Comparisons and reports of the folder use its final runs alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import store
from fedstat._utils import check, guard
from fedstat.fl import custom
from fedstat.results.tables import count
from fedstat.study import outcomes

FILE = "tuned.json"
"""Name of the file in the folder of a tuned grid."""
_LAYOUT = 1
_ADVICE = "Delete it and repeat --tuned, which writes it again; without it, candidates are compared, too."


class Selected(NamedTuple):
    """Selected settings of a method in a scenario, and its stores.

    Attributes
    ----------
    scenario, algorithm : str
    settings : mapping from str to str, or None
        Tuned settings and their selected values, as text; {} for a method that was not tuned, None for a method of
        which a run of every candidate failed.
    final : tuple of str
        Names of the stores of runs with the selected settings.
    candidates : tuple of str
        Names of the stores of other runs that were made for tuning.
    """

    scenario: str
    algorithm: str
    settings: Mapping[str, str] | None
    final: tuple[str, ...]
    candidates: tuple[str, ...]


class Final(NamedTuple):
    """Runs of a folder that are compared and reported: of a tuned folder its final runs, else all.

    Attributes
    ----------
    paths : list of Path
        Stores to compare; failed runs may have none.
    selected : tuple of Selected
        Content of the file; () without a file.
    n_candidates : int
        Number of candidates in the folder, which are left out.
    unknown : tuple of str
        Names of stores that the file does not know, which are left out, too.
    missing : tuple of str
        Names of final runs that the folder lacks.
    """

    paths: list[Path]
    selected: tuple[Selected, ...] = ()
    n_candidates: int = 0
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Names of the tuned settings."""
        return frozenset(name for entry in self.selected for name in entry.settings or ())

    def words(self) -> list[str]:
        """Return the selected settings and the number of candidates in sentences; [] if the folder is not tuned."""
        if not self.selected:
            return []
        left_out = [f"Left out: {count(self.n_candidates, 'candidate run')}."] if self.n_candidates else []
        return [f"Selected on validation samples: {words(self.selected)}.", *left_out]

    def warnings(self) -> list[str]:
        """Return sentences on runs that the file does not know, and on final runs that the folder lacks."""
        sentences = []
        if self.unknown:
            runs, noun = count(len(self.unknown), "run"), "it" if len(self.unknown) == 1 else "them"
            sentences.append(
                f"{runs} of the folder left out, because {FILE} does not know {noun}: {_names(self.unknown)}. Compare "
                "stores by their paths, or use a folder for each grid"
            )
        if self.missing:
            runs, noun = count(len(self.missing), "final run"), "it" if len(self.missing) == 1 else "each"
            sentences.append(
                f"{runs} of {FILE} missing, because {noun} was not made or was deleted: {_names(self.missing)}"
            )
        return sentences


def words(selected: Iterable[Selected]) -> str:
    """List the selected settings of tuned methods.

    Examples
    --------
    >>> entries = [Selected(name, "fedavg", {"lr": lr}, (), ()) for name, lr in (("a", "0.1"), ("b", "0.01"))]
    >>> words(entries), words(entries[:1])
    ('fedavg: lr = 0.1 (a), 0.01 (b)', 'fedavg: lr = 0.1')
    """
    of_method: dict[str, dict[str, list[str]]] = {}
    for entry in selected:
        values = "none, all failed" if entry.settings is None else _listed(entry.settings)
        if values:
            of_method.setdefault(custom.short(entry.algorithm), {}).setdefault(values, []).append(entry.scenario)
    parts = []
    for method, scenarios in of_method.items():
        prefix = _common_name(scenarios)
        texts = [values.removeprefix(prefix) for values in scenarios]
        places = [f" ({', '.join(names)})" if len(scenarios) > 1 else "" for names in scenarios.values()]
        parts.append(f"{method}: {prefix}{', '.join(map(str.__add__, texts, places))}")
    return guard.printable("; ".join(parts)) or "nothing"


def _names(stores: Sequence[str]) -> str:
    """List the names of at most ten stores, and the number of others."""
    return guard.printable(check.few(stores, 10))


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


def _common_name(texts: Iterable[str]) -> str:
    """Return the beginning "lr = " if each text is a value of one and the same setting."""
    names = {text.partition(" = ")[0] for text in texts if text.count(" = ") == 1}
    return f"{names.pop()} = " if len(names) == 1 and all(text.count(" = ") == 1 for text in texts) else ""


def write(folder: Path, selected: Sequence[Selected]) -> None:
    """Write the file of a tuned folder; entries of other methods and scenarios that it holds stay.

    Final runs of an earlier selection become candidates, unless their settings are selected again.
    """
    earlier = {(entry.scenario, entry.algorithm): entry for entry in read(folder)}
    for entry in selected:
        key = entry.scenario, entry.algorithm
        earlier[key] = _merge(earlier[key], entry) if key in earlier else entry
    content = {"layout": _LAYOUT, "selected": [entry._asdict() for entry in earlier.values()]}
    folder.mkdir(parents=True, exist_ok=True)
    with guard.replace_file(folder / FILE) as draft:
        draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _merge(before: Selected, now: Selected) -> Selected:
    is_same = before.settings == now.settings
    final = dict.fromkeys((*now.final, *(before.final if is_same else ())))
    runs = dict.fromkeys((*now.candidates, *before.candidates, *before.final))
    return now._replace(final=tuple(final), candidates=tuple(name for name in runs if name not in final))


def read(folder: Path) -> tuple[Selected, ...]:
    """Read the file of a tuned folder; () without a file.

    Raises
    ------
    ValueError
        If the file is damaged, or was not written by fedstat; the message names it.
    """
    path = folder / FILE
    if guard.status(path) is None:
        return ()
    with guard.wrap_errors(path, _ADVICE, what="cannot be read"):
        content = guard.parsed(path, guard.content(path, share=guard.HEAD))
        if not isinstance(content, dict) or content.get("layout") != _LAYOUT:
            raise ValueError(f"it must have the layout {_LAYOUT} of this fedstat")
        return tuple(map(_entry, _of_type(content, "selected", list)))


def _entry(content: Any) -> Selected:
    """Check an entry of the file."""
    if not isinstance(content, dict) or set(content) != set(Selected._fields):
        raise ValueError(f"an entry of selected must have {', '.join(Selected._fields)}, but is {content!r:.100}")
    settings = content["settings"]
    if settings is not None:
        pairs = _of_type(content, "settings", dict).items()
        settings = {_text("settings", name): _text("settings", value) for name, value in pairs}
    runs = {name: tuple(_text(name, run) for run in _of_type(content, name, list)) for name in ("final", "candidates")}
    return Selected(_of_type(content, "scenario", str), _of_type(content, "algorithm", str), settings, **runs)


def _of_type(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, but is {value!r:.100}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must hold texts, but holds {value!r:.100}")
    return value


def final_runs(folder: str | Path) -> Final:
    """Return the stores of a folder that are compared: of a tuned folder its final runs, else all.

    Raises
    ------
    FileNotFoundError
        If the folder has no store, or none of its final runs.
    ValueError
        See :func:`read`.
    """
    folder = Path(folder)
    stores = outcomes.stores(folder)
    selected = () if store.is_store(folder) else read(folder)
    if not selected:
        return Final(stores)
    final = [name for entry in selected for name in entry.final]
    candidates = {name for entry in selected for name in entry.candidates} - set(final)
    paths = {path.name: path for path in stores}
    present = [path for name, path in paths.items() if name in set(final)]
    if not present:
        raise FileNotFoundError(
            f"{folder} has none of the {count(len(final), 'final run')} that {FILE} names, but {len(paths)} others. "
            "Repeat --tuned, or pass the paths of runs."
        )
    return Final(
        present,
        selected,
        n_candidates=len(candidates & paths.keys()),
        unknown=tuple(name for name in paths if name not in candidates and name not in set(final)),
        missing=tuple(name for name in final if name not in paths),
    )
