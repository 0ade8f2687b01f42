"""Outcomes of the runs of a grid, and the records of failed and accepted runs, which lie beside their stores."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.loops import user_frames
from fedstat.fl import custom
from fedstat.results.base import wrapped
from fedstat.results.tables import count
from fedstat.study import experiment
from fedstat.study.run_settings import Settings

State: TypeAlias = Literal["made", "finished", "accepted", "outdated", "failed", "diverged"]
FAILED, ACCEPTED = ".failed.json", ".accepted.json"
"""Endings of the records of a run, in place of the ending of its store."""
_LONGEST = 20_000  # characters of a message or a traceback in a record
_SHOWN = 300  # characters of a message in prints


class Failure(NamedTuple):
    """Failure of a run.

    Attributes
    ----------
    run : str
        Scenario, algorithm and seed.
    error : str
        Type and message of the exception.
    place : str
        File and line of the user's code at which it was raised; "" if only fedstat and libraries were running.
    traceback : str
    time : str
        UTC, ISO 8601.
    code : mapping from str to str
        Digests, see :func:`code_of`.
    diverged : bool
        True if training diverged.
    lasting : bool
        True if the run would fail again: it diverged, or the user's code raised the error. False if the disk, memory,
        the network or a lost process may be the cause.
    """

    run: str
    error: str
    place: str
    traceback: str
    time: str
    code: Mapping[str, str]
    diverged: bool = False
    lasting: bool = False

    @property
    def state(self) -> Literal["failed", "diverged"]:
        """State of the run."""
        return "diverged" if self.diverged else "failed"

    def __str__(self) -> str:
        """Return what happened in one line: "failed, ZeroDivisionError: division by zero (own.py, line 7)"."""
        error = guard.printable(" ".join(self.error[: 2 * _SHOWN].split()))
        error = error if len(error) <= _SHOWN else f"{error[:_SHOWN]} …"
        if self.diverged:
            return error.removeprefix(f"{FloatingPointError.__name__}: ")
        return f"failed, {error}{f' ({self.place})' if self.place else ''}"


class Outcome(NamedTuple):
    """Outcome of a run of a grid.

    Attributes
    ----------
    settings : Settings
    path : Path
        Store of the run. A failed run may have none, or an unfinished one.
    state : str
        "made": trained by this call. "finished": before. "outdated": finished by other code or with other data, and
        left out of comparisons. "accepted": outdated, but accepted for comparisons. "failed" or "diverged": ended by an
        exception.
    changed : tuple of str
        What an outdated or accepted run was made with in another version: "fedstat", or names of the user's files.
    failure : Failure or None
        Of failed and diverged runs.
    repeated : bool
        False for a failed run that this call did not try again.
    """

    settings: Settings
    path: Path
    state: State
    changed: tuple[str, ...] = ()
    failure: Failure | None = None
    repeated: bool = True

    @property
    def name(self) -> str:
        """Scenario, algorithm and seed of the run."""
        return describe(self.settings)

    @property
    def made(self) -> bool:
        """True if the run was trained by this call."""
        return self.state == "made"

    @property
    def is_compared(self) -> bool:
        """True if the run is finished, and current or accepted."""
        return self.state in ("made", "finished", "accepted")


class OutdatedRunError(ValueError):
    """Error of tuning if a candidate was made by other code or with other data."""


class FailedRunsError(RuntimeError):
    """Error after the last run of a grid of which runs failed.

    Attributes
    ----------
    failures : tuple of Failure
    """

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        super().__init__("\n".join(f"{failure.run}: {failure}" for failure in failures))
        self.failures = failures


def describe(settings: Settings) -> str:
    """Return scenario, algorithm with its settings, learning rate if it is not the default, and seed of a run.

    Examples
    --------
    >>> describe(Settings.of(algorithm="fedprox", mu=0.1, lr=0.01, seed=3))
    'digits, dirichlet:0.1, fedprox, mu=0.1, lr=0.01, seed 3'
    """
    return _describe(settings.name, vars(settings))


def _describe(scenario: str, settings: Mapping[str, Any]) -> str:
    rate = settings.get("lr", Settings.lr)
    rates = [f"lr={rate:g}"] if isinstance(rate, float | int) and rate != Settings.lr else []
    algorithm = custom.short(str(settings.get("algorithm")))
    return ", ".join([scenario, algorithm, *settings.get("options", ()), *rates, f"seed {settings.get('seed')}"])


def is_finished(path: Path) -> bool:
    """Return True if a run is complete and undamaged. Resuming repairs a damaged run."""
    return path.exists() and "ended" in store.attributes(path) and not store.damage(path, checksums=True)


def code_of(settings: Settings) -> dict[str, str]:
    """Return digests of what makes the numbers of a run: "fedstat", the user's algorithm, and files in the settings."""
    return _digests(store.code(settings.make_algorithm()), experiment.files(settings))


def _digests(code: str, files: Mapping[str, Any]) -> dict[str, str]:
    package, _, of_user = code.partition("+")
    digests = {name: str(files[name]["sha256"]) for name in experiment.FILES if isinstance(files.get(name), dict)}
    return {"fedstat": package, **({"algorithm": of_user} if of_user else {}), **digests}


def changes(settings: Settings, path: Path) -> tuple[str, ...]:
    """Return what a stored run was made with in another version: "fedstat", or names of the user's files."""
    stored, current = _digests(store.attributes(path)["code"], store.config_of(path)), code_of(settings)
    if experiment.DATA_FILE not in stored:  # the data have no file, or are of an earlier version
        current.pop(experiment.DATA_FILE, None)
    return _differing(stored, current, vars(settings))


def changed_files(attrs: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the names of the user's files that differ from those in a run's attributes; missing files do not count.

    No file is executed.
    """
    config = guard.parsed("the attribute config", attrs.get("config", "{}").encode(), finite=False)
    stored = _digests("", config if isinstance(config, dict) else {})
    settings, current = experiment.noted(attrs) if len(stored) > 1 else {}, dict(stored)
    for key, name in _SETTINGS.items():
        if key in stored and name in settings:
            nothing = {"algorithm": "", "net": "", "data": Settings.data}
            with suppress(ValueError, OSError):
                current |= _digests("", experiment.files(SimpleNamespace(**nothing | {name: settings[name]})))
    return _differing(stored, current, settings)


_SETTINGS = dict(zip(experiment.FILES, ("algorithm", "net", "data"), strict=True))
"""Settings that name the user's files."""


def _differing(stored: Mapping[str, str], current: Mapping[str, str], settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what has other digests: "fedstat", or files of the user."""
    keys = [key for key in dict.fromkeys((*stored, *current)) if stored.get(key) != current.get(key)]
    names = {key: custom.short(str(settings.get(_SETTINGS.get(key, key), key))) for key in keys}
    return tuple(dict.fromkeys(re.sub(r"(\.py):.*", r"\1", name) for name in names.values()))


def can_continue(settings: Settings, path: Path) -> bool:
    """Return True if an unfinished run was begun with the present files of the user; fedstat may differ."""
    return set(changes(settings, path)) <= {"fedstat"}


def failure_of(error: BaseException, settings: Settings) -> Failure:
    """Describe an exception of a run."""
    places = [f"{Path(frame.f_code.co_filename).name}, line {line}" for frame, line in user_frames(error)]
    text = "".join(traceback.format_exception(error))
    return Failure(
        run=describe(settings),
        error=f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST],
        place=places[-1] if places else "",
        traceback=text[-_LONGEST:],
        time=store.now(),
        code=code_of(settings),
        diverged=isinstance(error, FloatingPointError),
        lasting=isinstance(error, FloatingPointError) or bool(places and not isinstance(error, OSError | MemoryError)),
    )


def record_failure(path: Path, failure: Failure) -> None:
    """Write the record of a failed run beside its store."""
    _write(path.with_suffix(FAILED), failure._asdict())


def forget_failure(path: Path) -> None:
    """Remove the record of a failed run, if there is one."""
    path.with_suffix(FAILED).unlink(missing_ok=True)


def recorded_failure(path: Path) -> Failure | None:
    """Read the record of a failed run; None if there is none.

    Raises
    ------
    ValueError
        If the record cannot be read, or is not one that fedstat wrote.
    """
    file = path.with_suffix(FAILED)
    if (content := _read(file)) is None:
        return None
    texts = {name: content.get(name) for name in ("run", "error", "place", "traceback", "time")}
    code = content.get("code")
    if not isinstance(code, dict) or not all(isinstance(text, str) for text in (*texts.values(), *code.values())):
        raise ValueError(f"{file} is no record of a failed run: it lacks texts. Remove it.")
    flags = {name: content.get(name) is True for name in ("diverged", "lasting")}
    return Failure(**texts, code=code, **flags)  # type: ignore[arg-type]


def record_acceptance(path: Path, settings: Settings, changed: tuple[str, ...]) -> None:
    """Record beside its store that an outdated run is compared as it is."""
    content = {"run": store.attributes(path)["run"], "changed": changed, "code": code_of(settings), "time": store.now()}
    _write(path.with_suffix(ACCEPTED), content)


def is_accepted(path: Path, settings: Settings) -> bool:
    """Return True if an outdated run was accepted with the present code and files; False if its record is damaged."""
    content = None
    with suppress(ValueError):
        content = _read(path.with_suffix(ACCEPTED))
    return content is not None and (content.get("run"), content.get("code")) == (
        store.attributes(path)["run"],
        code_of(settings),
    )


def stores(folder: str | Path) -> list[Path]:
    """Return the sorted paths of the runs in a folder; failed runs may have no store.

    Raises
    ------
    FileNotFoundError
        If there is no run.
    """
    guard.status(folder)  # names a path that no file can have
    failed = [file.with_name(file.name.removesuffix(FAILED) + ".zarr") for file in Path(folder).glob(f"*{FAILED}")]
    try:
        paths = store.stores(folder)
    except FileNotFoundError:
        if not failed:
            raise
        paths = []
    return sorted({*paths, *failed})


def missing(path: Path) -> str:
    """Return which run of a grid is missing at a path, and why; "" if it is finished, or no grid made it."""
    attrs = {} if guard.status(path) is None else store.attributes(path)
    if failure := recorded_failure(path):
        again = " when it was repeated" if "ended" in attrs else ""
        return f"{failure.run}: {'diverged' if failure.diverged else failure}{again}"
    return f"{name_of_store(path)}: unfinished" if "config" in attrs and "ended" not in attrs else ""


def name_of_store(path: Path) -> str:
    """Return the name of a stored run as :func:`describe`, or of its store if the run has no settings of a grid."""
    settings = experiment.settings_of(path)
    return _describe(str(settings["scenario"]), settings) if "scenario" in settings else path.name


def failed_runs(paths: Iterable[Path]) -> list[str]:
    """Name the runs among paths that failed or diverged, and say what happened."""
    failures = (recorded_failure(path) for path in paths)
    return [f"{failure.run}: {failure}" for failure in failures if failure]


def summarize(outcomes: Sequence[Outcome], folder: Path, *, new: str = "new") -> list[str]:
    """Return the lines that say what became of the runs of a grid: counts, then failed and outdated runs by name.

    ``new`` describes the runs in the state "made".
    """
    states = [outcome.state for outcome in outcomes]
    named: tuple[State, ...] = ("finished", "failed", "diverged", "accepted", "outdated")
    numbers = [f", {states.count(state)} {state}" for state in named]
    shown = "".join(text for text in numbers if not text.startswith(", 0"))
    lines = [f"{count(len(outcomes), 'run')} in {folder}, {states.count('made')} {new}{shown}"]
    if failed := [outcome for outcome in outcomes if outcome.failure]:
        lines += ["", "Failed or diverged:"]
        lines += [
            wrapped(f"  {outcome.name}: {outcome.failure}{_AGAIN * (not outcome.repeated)}") for outcome in failed
        ]
        lines.append(wrapped(f"Tracebacks: *{FAILED} in the folder. The command tries failed runs again when their "
                             "code or files have changed or the cause lay elsewhere, or with --retry."))  # fmt: skip
    for state, meaning in _MEANINGS.items():
        if of_state := [outcome for outcome in outcomes if outcome.state == state]:
            lines += ["", *_list_changed(of_state, len(outcomes)), wrapped(meaning)]
    return lines


_AGAIN = " (failed before, not tried again)"
_MEANINGS = {
    "outdated": "They are left out of the comparison: --repeat makes them again, --accept compares them as they are.",
    "accepted": "They are compared as they are, by --accept.",
}


def _list_changed(outcomes: Sequence[Outcome], n_all: int) -> list[str]:
    """Return lines that name runs by what they were made with in another version."""
    lines = []
    for changed in dict.fromkeys(outcome.changed for outcome in outcomes):
        names = [wrapped(f"  {outcome.name}") for outcome in outcomes if outcome.changed == changed]
        lines.append(f"Made with another version of {', '.join(changed)}:")
        lines += [f"  all {count(n_all, 'run')}"] if 1 < len(names) == n_all else names
    return lines


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with guard.replace_file(file) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any] | None:
    if guard.status(file) is None:
        return None
    text = guard.content(file, share=guard.SETTINGS)
    with guard.wrap_errors(file, "Remove it.", what="is no record of a run"):
        return dict(guard.parsed(file, text, finite=False))
