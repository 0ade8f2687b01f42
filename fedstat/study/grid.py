"""Grids of runs: they train in any order or process, can resume, and are not repeated."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.loops import as_done, on_interrupt, progress_bar
from fedstat._utils.settings import read_toml
from fedstat.fl import custom, ranks
from fedstat.store import origin
from fedstat.study import experiment, outcomes
from fedstat.study.collect import Grid
from fedstat.study.grid_file import Tuning, cells, require_distinct, tuning
from fedstat.study.outcomes import FailedRunsError, Failure, Outcome
from fedstat.study.run_settings import Settings

__all__ = [
    "Tuning",
    "cells",
    "judge_again",
    "name_of",
    "of_study",
    "plan",
    "require_distinct",
    "run_all",
    "tuning",
    "variants",
]


def plan(
    runs: Sequence[Settings], folder: str | Path, *, repeat: bool = False, accept: bool = False, retry: bool = False
) -> list[Outcome]:
    """Return the outcomes that :func:`run_all` would have if no run failed; it changes nothing.

    The state "made" says that a run would be trained.
    """
    choices = _Choices(repeat, accept, retry)
    return [_judge(choices, task) for task in _tasks(runs, Path(folder), choices)]


def run_all(
    runs: Sequence[Settings],
    folder: str | Path,
    *,
    repeat: bool = False,
    accept: bool = False,
    retry: bool = False,
    progress: bool | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Iterator[Outcome]:
    """Train the runs that are not finished, each in one store; a run that fails does not stop the others.

    Parameters
    ----------
    runs : sequence of Settings
    folder : path
        Folder of the stores, which are named by their settings. A finished run with equal settings is not repeated. An
        unfinished run is continued; if another version of fedstat began it, its store names both. If another version
        of the user's files began it, a new store replaces it when it is finished.
    repeat : bool
        Repeat outdated runs: finished by other code of fedstat, of an algorithm or of a network, or with another
        content of a user's data file. The new store replaces the old store when it is finished.
    accept : bool
        Accept outdated runs as they are, and record this beside their stores.
    retry : bool
        Try failed runs again. Without it, only those are tried whose code or files have changed since, or whose cause
        may lie elsewhere (:attr:`fedstat.study.outcomes.Failure.lasting`).
    progress : bool or None
        Show how many runs are done and, without an executor, the rounds of the present run; see
        :func:`fedstat.fl.train`.
    executor : Executor, optional
        Any :class:`concurrent.futures.Executor`, such as Dask's ``Client.get_executor(pure=False)``, that trains runs
        in parallel. Its workers must share the folder. If a worker is lost, another worker continues its run. Pass
        ``threads=1``, or the number of cores of a worker.
    **options
        data_dir, device, client_chunk, threads, memory_budget; log, of every run.

    Yields
    ------
    Outcome
        Of every run, in their order; with an executor, in the order in which they end.

    Raises
    ------
    FailedRunsError
        After the last run, if runs failed or diverged, or other processes write to them. A record beside the store of
        a failed run, ``NAME.failed.json``, holds the traceback.
    ValueError
        If a run occurs twice, or ``repeat`` and ``accept`` are both True.
    NotADirectoryError
        If ``folder`` is a file or a single run.
    FileNotFoundError
        If files of a data set are missing (raised before the first run), or if a worker stored a run in a folder that
        this process does not see.
    OSError
        If the disk is full.
    """
    folder, choices = Path(folder), _Choices(repeat, accept, retry)
    tasks = _tasks(runs, folder, choices)
    experiment.read_data([task.settings for task in tasks if not guard.status(task.path)], options.get("data_dir"))
    if executor is not None:  # its workers may have another working directory
        tasks = [task._replace(path=task.path.absolute()) for task in tasks]
        if options.get("data_dir") is not None:
            options["data_dir"] = Path(options["data_dir"]).absolute()
    failures: list[Failure] = []
    options["progress"] = progress if executor is None else False
    work = partial(_run_task, choices, options)
    with progress_bar(len(tasks), "run", progress) as bar, on_interrupt(lambda: _resume_hint(folder)):
        for task, get_outcome in as_done(executor, work, tasks):
            try:
                outcome = get_outcome()
            except (OSError, CancelledError, BrokenExecutor):
                raise
            except Exception as error:  # the work catches its own errors
                lost = ChildProcessError(f"the processes that made it ended, often for lack of memory ({error!s:.200})")
                outcome = _record(lost, task)
            bar.update()
            if outcome.failure is not None:
                failures.append(outcome.failure)
            elif not task.path.exists():
                raise FileNotFoundError(
                    f"a worker stored {task.path}, but this process does not see it. Share the folder among workers."
                )
            yield outcome
    if failures:
        raise FailedRunsError(tuple(failures))


def _resume_hint(folder: Path) -> str:
    return f"Finished runs and rounds are in {str(folder)!r}. To resume, repeat the call."


class _Task(NamedTuple):
    """Run to train: settings, and path of the store."""

    settings: Settings
    path: Path


class _Choices(NamedTuple):
    """Treatment of outdated and failed runs, see :func:`run_all`."""

    repeat: bool
    accept: bool
    retry: bool


def _tasks(runs: Sequence[Settings], folder: Path, choices: _Choices) -> list[_Task]:
    """Return the tasks of distinct runs, or raise the errors of :func:`run_all`."""
    require_distinct(runs, "the grid")
    if choices.repeat and choices.accept:
        raise ValueError("repeat and accept exclude each other: outdated runs are made again, or compared as they are.")
    if guard.status(folder) and (not folder.is_dir() or guard.status(folder / "zarr.json")):
        raise NotADirectoryError(f"{folder} must be a folder of runs, but is a file or a single run. Choose another.")
    return [_Task(run, folder / f"{name_of(run)}.zarr") for run in runs]


def _run_task(choices: _Choices, options: Mapping[str, Any], task: _Task) -> Outcome:
    """Train a run, unless it is finished or failed before; record its failure."""
    try:
        outcome = _judge(choices, task)
        if outcome.made:
            _train(task, options)
        elif choices.accept and outcome.changed:
            outcomes.record_acceptance(task.path, task.settings, outcome.changed)
    except (Exception, SystemExit) as error:
        if _stops_all(error):
            raise
        return _record(error, task)
    if outcome.state in ("made", "finished"):
        outcomes.forget_failure(task.path)
    return outcome


def _judge(choices: _Choices, task: _Task) -> Outcome:
    """Return the outcome of a run before training; "made" if it is to be trained."""
    if not outcomes.is_finished(task.path):
        return _judge_failed(choices, task) or Outcome(*task, "made")
    changed = outcomes.changes(*task)
    if not changed:
        return Outcome(*task, "finished")
    if choices.repeat:
        return _judge_failed(choices, task) or Outcome(*task, "made", changed)
    is_accepted = choices.accept or outcomes.is_accepted(task.path, task.settings)
    return Outcome(*task, "accepted" if is_accepted else "outdated", changed)


def _judge_failed(choices: _Choices, task: _Task) -> Outcome | None:
    """Return the outcome of a run that failed with the present code and files, and is not tried again."""
    failure = None
    if not choices.retry:
        with suppress(ValueError):  # a damaged record does not keep the run from being made
            failure = outcomes.recorded_failure(task.path)
    if failure is None or not failure.lasting or failure.code != outcomes.code_of(task.settings):
        return None
    return Outcome(*task, failure.state, failure=failure, repeated=False)


def _train(task: _Task, options: Mapping[str, Any]) -> None:
    """Train a run, or continue it; replace a store of other code or data when its successor is complete."""
    settings, path = task
    draft = path.with_suffix(origin.REPEATED)
    is_replaced = path.exists() and (outcomes.is_finished(path) or not outcomes.can_continue(settings, path))
    if draft.exists() and (not is_replaced or outcomes.changes(settings, draft)):
        store.remove(draft)
    experiment.run(settings, out=draft if is_replaced else path, resume=True, **options)
    if is_replaced:
        store.replace(draft, path)


def judge_again(outcome: Outcome) -> Outcome:
    """Return the outcome of a run at the end of its grid: outdated if the user has changed a file since."""
    if outcome.state not in ("made", "finished") or not experiment.files(outcome.settings):
        return outcome
    changed = outcomes.changed_files(store.attributes(outcome.path))
    return outcome._replace(state="outdated", changed=changed) if changed else outcome


def _stops_all(error: BaseException) -> bool:
    """Return True if no other run should begin after an error: the disk is full, or several ranks train together."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return ranks.are_started() and not isinstance(error, FloatingPointError)


def _record(error: BaseException, task: _Task) -> Outcome:
    failure = outcomes.failure_of(error, task.settings)
    if not isinstance(error, BlockingIOError):  # another process makes this run
        outcomes.record_failure(task.path, failure)
    return Outcome(*task, failure.state, failure=failure)


def name_of(settings: Settings) -> str:
    """Return a readable file name of a run, unique to its settings."""
    method = custom.short(settings.algorithm)
    data = custom.short(settings.data)
    about = experiment.about(settings) | {"algorithm": method, "data": data, "net": custom.short(settings.net)}
    # The name does not depend on the folder of the user's files.
    digest = hashlib.sha256(store.to_json(about).encode()).hexdigest()[:8]
    readable = "-".join([data, settings.partition, method, f"seed{settings.seed}"])
    return f"{re.sub(r'[^a-z0-9.+]+', '-', readable.lower())}-{digest}"


def of_study(grid: Grid, file: str | Path, study: str) -> Grid:
    """Select the runs of a study of a grid file, and name variants of a method by their settings.

    Parameters
    ----------
    grid : Grid
    file : path
        Grid file, see :func:`fedstat.study.grid.cells`. File names identify the settings of runs.
    study : str

    Returns
    -------
    Grid
        Runs of the study; a method is named "fedavg" or "fedprox, mu=0.1", by the settings that differ.

    Raises
    ------
    ValueError
        If the grid has no run of the study.
    """
    scales = read_toml(Path(file)).get("scale", {}) or {None: {}}
    run_by_name = {name_of(run): run for scale in scales for run in cells(file, scale=scale, study=study)}
    table = grid.table[[Path(path).stem in run_by_name for path in grid.table["path"]]].reset_index(drop=True)
    if table.empty:
        raise ValueError(
            f"the folder must have runs of the study {study!r}, but has none. Train them with: python -m fedstat.fl "
            f"--config {file} --study {study}{_format_scale_option(scales)}"
        )
    runs = [run_by_name[Path(path).stem] for path in table["path"]]
    table["method"] = variants(runs)
    return grid._replace(table=table, configs={k: v for k, v in grid.configs.items() if k in set(table["scenario"])})


def _format_scale_option(scales: Iterable[str | None]) -> str:
    first, *rest = (f" --scale {name}" if name else "" for name in scales)
    return first + (f" (or{','.join(rest)})" if rest else "")


def variants(runs: Iterable[Any]) -> list[str]:
    """Name the method of every run, with the settings that differ between runs of the method.

    A user's algorithm has the name of its file without folders, unless two files have this name. Of :class:`Settings`,
    only ``algorithm`` and ``options`` are read.

    Examples
    --------
    >>> runs = [Settings.of(algorithm="fedprox", mu=mu) for mu in (0.1, 1.0)]
    >>> variants(runs), variants(runs[:1])
    (['fedprox, mu=0.1', 'fedprox, mu=1.0'], ['fedprox'])
    """
    runs = list(runs)
    common = {
        run.algorithm: set.intersection(*(set(r.options) for r in runs if r.algorithm == run.algorithm)) for run in runs
    }
    short = {name: custom.short(name) for name in common}
    names = {name: text if [*short.values()].count(text) == 1 else name for name, text in short.items()}
    return [", ".join([names[r.algorithm], *(o for o in r.options if o not in common[r.algorithm])]) for r in runs]
