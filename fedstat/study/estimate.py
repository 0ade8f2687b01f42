"""Estimate of what the runs of a grid will cost: time, memory and disk, from short trials in processes of their own."""

from __future__ import annotations

import heapq
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstat import store
from fedstat._utils import memory
from fedstat._utils.lazy import pd
from fedstat._utils.loops import ONE_THREAD, progress_bar
from fedstat.fl.ending import count_rounds
from fedstat.results.base import aligned, wrapped
from fedstat.results.tables import count, megabytes
from fedstat.study import experiment, outcomes, report
from fedstat.study.outcomes import Failure, Outcome
from fedstat.study.run_settings import Settings

_MOST_ROUNDS = 12  # of a trial, after its first round


class Trial(NamedTuple):
    """Measurements of a trial of one kind of run: equal settings but seed and learning rates.

    Attributes
    ----------
    settings : Settings
        Of the first run of the kind.
    fixed : float
        Seconds of a run besides its rounds: data, initial state, measurements after the last round, files.
    evaluated, plain : float
        Seconds of a round with and without evaluation.
    start : float
        Seconds that a process needs before its first run is as fast as the others.
    peak_memory : int
        Of the process, bytes.
    disk : int
        Bytes of the store of a run.
    failure : Failure or None
        If the trial ended in an error; the other measurements are then 0.
    late : bool
        True if no round ended in the given seconds; the other measurements are then 0.
    """

    settings: Settings
    fixed: float = 0.0
    evaluated: float = 0.0
    plain: float = 0.0
    start: float = 0.0
    peak_memory: int = 0
    disk: int = 0
    failure: Failure | None = None
    late: bool = False

    def seconds(self, rounds: int | None = None) -> float:
        """Return the seconds of a run, or of its last ``rounds`` rounds."""
        of_run, every = self.settings.rounds, self.settings.evaluate_every
        rounds = of_run if rounds is None else rounds
        n_evaluated = (of_run // every - (of_run - rounds) // every) + (of_run % every != 0)
        return self.fixed + n_evaluated * self.evaluated + (rounds - n_evaluated) * self.plain


def kinds(runs: Iterable[Settings]) -> dict[Settings, list[Settings]]:
    """Group runs that differ in seeds and learning rates alone, by the settings of the first."""
    groups: dict[Settings, list[Settings]] = {}
    for run in runs:
        groups.setdefault(run.but(seed=0, lr=Settings.lr, server_lr=Settings.server_lr), []).append(run)
    return {group[0]: group for group in groups.values()}


def measure(
    runs: Sequence[Settings],
    *,
    seconds: float,
    jobs: int = 1,
    progress: bool | None = None,
    **options: Any,
) -> list[Trial]:
    """Try one run of each kind for a few rounds, each in a process of its own, of which ``jobs`` work at once.

    Parameters
    ----------
    runs : sequence of Settings
        Of different kinds, see :func:`kinds`.
    seconds : float
        Longest time of a trial.
    jobs : int
        Processes that work at once, as they will in the grid: they slow each other down.
    progress : bool or None
        See :func:`fedstat.fl.train`.
    **options
        See :func:`fedstat.study.grid.run_all`.
    """
    tried = [*runs, *runs[: -len(runs) % jobs]]  # the last ones have company, too
    environment = _environment(ONE_THREAD if jobs > 1 else {})
    with environment, ThreadPoolExecutor(jobs) as pool, progress_bar(len(runs), "trial", progress) as bar:
        futures = [pool.submit(_measure_apart, run, seconds, options) for run in tried]
        trials = []
        for future in futures[: len(runs)]:
            trials.append(future.result())
            bar.update()
    return trials


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, which processes that start in this context inherit."""
    earlier = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _measure_apart(settings: Settings, seconds: float, options: Mapping[str, Any]) -> Trial:
    """Measure in a new process, which is ended when its time is over; return the last that it sent."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    begun = time.perf_counter()
    arguments = (settings, seconds, dict(options), sender, time.time())
    process = context.Process(target=_measure_here, args=arguments, daemon=True)
    process.start()
    sender.close()
    trial: Trial | None = None
    try:
        while receiver.poll(max(0.0, begun + seconds - time.perf_counter())):
            trial = receiver.recv()
    except EOFError:  # it has ended
        pass
    finally:
        process.kill()
        process.join()
    if trial is not None:
        return trial
    if time.perf_counter() - begun >= seconds:
        return Trial(settings, late=True)
    error = MemoryError(f"the process ended with exit status {process.exitcode}; often memory does not suffice")
    return Trial(settings, failure=outcomes.failure_of(error, settings))


def _measure_here(
    settings: Settings, seconds: float, options: Mapping[str, Any], sender: Connection, begun_at: float
) -> None:
    """Send a trial from one round and, if there is time, one from several rounds of a second run."""
    begun, imported = time.perf_counter(), time.time() - begun_at
    try:
        with tempfile.TemporaryDirectory() as folder:
            first = _try(settings.but(rounds=1), Path(folder) / "first.zarr", options)
            sender.send(_trial_of(settings, first, start=imported))
            remaining = seconds - (time.perf_counter() - begun)
            if remaining < first.total:
                return
            n = min(_MOST_ROUNDS, int((remaining - first.total) / max(first.intervals[-1], 1e-3)), settings.rounds - 1)
            every = min(settings.evaluate_every, 2)
            trial = settings.but(rounds=1 + max(n, 0), evaluate_every=every)
            second = _try(trial, Path(folder) / "second.zarr", options)
            start = imported + max(0.0, first.total - second.total + sum(second.intervals[1:]))
            sender.send(_trial_of(settings, second, start=start))
    except Exception as error:
        sender.send(Trial(settings, failure=outcomes.failure_of(error, settings)))
    finally:
        sender.close()


class _Times(NamedTuple):
    """Times of a run: all seconds, seconds of each round, which of them were evaluated; and its store."""

    total: float
    intervals: list[float]
    is_evaluated: list[bool]
    disk: dict[bool, int]


def _try(settings: Settings, path: Path, options: Mapping[str, Any]) -> _Times:
    ticks: list[float] = []
    begun = time.perf_counter()
    experiment.run(settings, out=path, progress=lambda _: ticks.append(time.perf_counter()), **options)
    report.line(store.open_run(path))  # as a grid does
    total = time.perf_counter() - begun
    rounds = range(1, settings.rounds + 1)
    is_evaluated = [number % settings.evaluate_every == 0 or number == settings.rounds for number in rounds]
    times = _Times(total, np.diff(ticks).tolist(), is_evaluated, _bytes(path))
    shutil.rmtree(path)
    return times


def _bytes(path: Path) -> dict[bool, int]:
    """Return the bytes of a store's arrays that have a round dim (True), and of everything else (False)."""
    files = [file for file in path.rglob("*") if file.is_file()]
    sizes = {True: 0, False: sum(file.stat().st_size for file in files)}
    for group in store.open_run(path).subtree:
        for name, variable in group.to_dataset(inherit=False).variables.items():
            folder = path / group.path.strip("/") / str(name)
            if "round" in variable.dims and folder.is_dir():
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                sizes[True] += size
                sizes[False] -= size
    return sizes


def _trial_of(settings: Settings, times: _Times, *, start: float) -> Trial:
    """Return the measurements of a run; its first round, which may be slower, counts only if it is alone."""
    pairs = [*zip(times.intervals, times.is_evaluated, strict=True)]
    later = pairs[1:] or pairs
    means = {flag: np.mean([seconds for seconds, is_evaluated in later if is_evaluated == flag] or [np.nan])
             for flag in (True, False)}  # fmt: skip
    evaluated, plain = (float(means[flag] if np.isfinite(means[flag]) else means[not flag]) for flag in (True, False))
    return Trial(
        settings,
        fixed=max(0.0, times.total - sum(evaluated if flag else plain for _, flag in pairs)),
        evaluated=evaluated,
        plain=plain,
        start=start,
        peak_memory=memory.peak(),
        disk=round(times.disk[False] + times.disk[True] * settings.rounds / len(pairs)),
    )


def summarize(
    trials: Sequence[Trial], planned: Sequence[Outcome], *, jobs: int = 1, folder: str | Path = "."
) -> list[str]:
    """Return the lines that say what a grid will cost.

    Parameters
    ----------
    trials : sequence of Trial
        Of all kinds of runs to make.
    planned : sequence of Outcome
        See :func:`fedstat.study.grid.plan`.
    jobs : int
        Runs made at once.
    folder : path
        Folder of the stores, whose disk must hold them.
    """
    groups = kinds(outcome.settings for outcome in planned if outcome.made)
    rounds_left = {outcome.settings: _rounds_left(outcome) for outcome in planned}
    durations: dict[Settings, float] = {}
    table, failed = [], []
    for trial, group in zip(trials, groups.values(), strict=True):
        name = outcomes.describe(trial.settings).rpartition(", seed ")[0]
        if trial.failure is not None or trial.late:
            failed.append(
                wrapped(f"  {name}: {trial.failure or 'no round ended in the time of a trial: raise --seconds'}")
            )
            continue
        durations |= {run: trial.seconds(rounds_left[run]) for run in group}
        table.append({"runs": str(len(group)), "": name, "a run": duration(trial.seconds()),
                      "a round": f"{trial.evaluated:.3g} s", "memory": megabytes(trial.peak_memory),
                      "a store": megabytes(trial.disk)})  # fmt: skip
    lines = [aligned(pd.DataFrame(table))] if table else []
    if failed:
        lines += ["", "Not estimated:", *failed]
    if not durations:
        return lines
    measured = [trial for trial in trials if trial.failure is None and not trial.late]
    start = max(trial.start for trial in measured)
    total = start + span([durations[o.settings] for o in planned if o.settings in durations], jobs)
    peak = sum(sorted((trial.peak_memory for trial in measured for _ in range(jobs)), reverse=True)[:jobs])
    disk = sum(trial.disk * len(groups[trial.settings]) for trial in measured)
    at_once = f", {jobs} at once" if jobs > 1 else ""
    sizes = f"{megabytes(peak)} of memory, {megabytes(disk)} of disk"
    lines += ["", f"{count(len(durations), 'run')}{at_once}: about {duration(total)}, {sizes}"]
    if peak > memory.available():
        lines.append(wrapped(f"  Caution: this process can take {megabytes(memory.available())} of memory."))
    if disk > (free := _free(Path(folder))):
        lines.append(wrapped(f"  Caution: the disk of {folder} has {megabytes(free)} free."))
    return lines


def _rounds_left(outcome: Outcome) -> int:
    """Return the rounds that a run still has to make."""
    settings, path = outcome.settings, outcome.path
    if outcome.changed or not path.exists() or not outcomes.can_continue(settings, path):
        return settings.rounds
    return max(settings.rounds - count_rounds(store.open_run(path)), 0)


def _free(folder: Path) -> int:
    """Return the free bytes on the disk of a folder that may not exist yet."""
    places = (folder.absolute(), *folder.absolute().parents)
    return shutil.disk_usage(next(place for place in places if place.exists())).free


def duration(seconds: float) -> str:
    """Print a duration with two digits: seconds, minutes or hours.

    Examples
    --------
    >>> duration(4.24), duration(90), duration(9000)
    ('4.2 s', '1.5 minutes', '2.5 hours')
    """
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s"


def span(seconds: Iterable[float], jobs: int) -> float:
    """Return the time until the last of the runs ends, if the next free process takes the next run.

    Examples
    --------
    >>> span([3.0, 1.0, 1.0, 1.0], 2)
    3.0
    """
    ends = [0.0] * jobs
    for of_run in seconds:
        heapq.heapreplace(ends, ends[0] + of_run)
    return max(ends)
