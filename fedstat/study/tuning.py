"""Tuning as a procedure: one setting of a method after the other, each by its score on validation samples.

FedFac's authors tune Λ, then τ, then κ by hand and do not say on which samples (§5.3, §6); here test samples are never
used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import store
from fedstat._utils.check import named_options
from fedstat._utils.lazy import pd
from fedstat.fl.algorithms import settings_of
from fedstat.fl.job import ComputeConfig
from fedstat.study import experiment, federation, grid, run_table
from fedstat.study.collect import OF_METHOD
from fedstat.study.outcomes import FailedRunsError, Outcome
from fedstat.study.run_settings import Settings


class Step(NamedTuple):
    """Step of tuning.

    Attributes
    ----------
    name : str
        The setting that was tuned.
    table : DataFrame
        One row per candidate: ``value``; ``validation``, mean over data sets and seeds of the best validation score of
        any round, and its ``std_error`` over seeds; ``accuracy`` (or ``rmse``), test score in the same rounds, which is
        shown but not used; ``chosen``. NaN for a candidate of which a run failed or diverged: it is not chosen.
    settings : tuple of Settings
        Of each data set, with the candidate that :func:`fedstat.study.run_table.chosen` selects.
    """

    name: str
    table: pd.DataFrame
    settings: tuple[Settings, ...]


def check(settings: Settings, candidates: Mapping[str, Sequence[Any]]) -> None:
    """Raise the errors of :func:`tune`, before any run."""
    if not settings.validation_fraction and not federation.has_validation(settings):
        raise ValueError("tuning needs validation samples, but got validation_fraction=0. Use 0.1, for example.")
    if not candidates:
        raise ValueError(f"tuning needs candidates for a setting of {settings.algorithm}, but got none")
    takes = takes_of(settings.algorithm)
    for name, values in candidates.items():
        if name not in takes:
            raise ValueError(f"{settings.algorithm} does not take {name}, but {', '.join(takes)}")
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise ValueError(f"every step of tuning needs a list of candidates, but {name} has {values!r:.200}")
        tried = [settings.but(**{name: value}) for value in values]
        grid.require_distinct(tried, f"tuning of {name}")


def takes_of(algorithm: str) -> tuple[str, ...]:
    """Return the settings that can be tuned: the algorithm's settings and learning rates."""
    return (*settings_of(algorithm), *OF_METHOD)


@named_options(grid.run_all, experiment.run, ComputeConfig)
def tune(
    settings: Settings | Sequence[Settings],
    candidates: Mapping[str, Sequence[Any]],
    folder: str | Path,
    *,
    seeds: Sequence[int] = (0,),
    progress: bool | None = None,
    executor: Executor | None = None,
    **where: Any,
) -> Iterator[Step]:
    """Select settings of a method one after the other, with the other settings at their last selected values.

    Parameters
    ----------
    settings : Settings or sequence of Settings
        Starting point; needs ``validation_fraction`` > 0 and an algorithm that takes the settings to tune. Several, of
        different data sets, get the same values: those that are best on average.
    candidates : mapping from step to sequence
        Values to try of every setting, in the order of tuning. From the second step on, the value to begin with is a
        candidate, too: its runs are there from the step before.
    folder : path
        Where the runs are stored; finished ones are not repeated.
    seeds : sequence of int
        Every candidate is run with every seed.
    progress, executor, **where
        See :func:`fedstat.study.grid.run_all`.

    Yields
    ------
    Step

    Raises
    ------
    ValueError
        If validation samples are missing, or a step is unknown, has no candidates or one twice.
    FailedRunsError
        If of every candidate of a step a run failed or diverged.

    Examples
    --------
    >>> import tempfile
    >>> start = Settings(clients=10, rounds=2, participation=0.5, validation_fraction=0.2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     steps = list(tune(start, {"tau": [0.25, 0.75]}, folder))
    >>> steps[0].table["value"].tolist(), steps[0].settings[0].given["tau"] in (0.25, 0.75)
    (['0.25', '0.75'], True)
    """
    begun = (settings,) if isinstance(settings, Settings) else tuple(settings)
    for base in begun:
        check(base, candidates)
    for number, name in enumerate(candidates):
        tried = [tuple(base.but(**{name: value}) for base in begun) for value in candidates[name]]
        if number and begun not in tried:
            tried.append(begun)
        runs = runs_of(tried, seeds)
        paths: dict[Settings, Path] = {}
        try:
            for outcome in grid.run_all(runs, folder, progress=progress, executor=executor, **where):
                _require_current(outcome)
                if outcome.is_compared:
                    paths[outcome.settings] = outcome.path
        except FailedRunsError:
            if not any(all(run in paths for run in runs_of([candidate], seeds)) for candidate in tried):
                raise
        table = _table(name, tried, seeds, paths)
        begun = tried[int(table["chosen"].to_numpy().argmax())]
        yield Step(name, table, begun)


def _require_current(outcome: Outcome) -> None:
    if outcome.state == "outdated":
        raise ValueError(
            f"{outcome.name} was made with another version of {', '.join(outcome.changed)}. Repeat outdated runs "
            "(--repeat, repeat=True), or accept them as they are (--accept, accept=True)."
        )


def runs_of(tried: Iterable[Iterable[Settings]], seeds: Sequence[int]) -> list[Settings]:
    """Return the runs of candidates, each of which has settings for every data set."""
    return [settings.but(seed=seed) for candidate in tried for settings in candidate for seed in seeds]


def first_runs(
    begun: Iterable[Sequence[Settings]], candidates: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[Settings]:
    """Return the runs of the first step of tuning several methods; they do not depend on each other."""
    name, values = next(iter(candidates.items()))
    return runs_of(([base.but(**{name: value}) for base in settings] for settings in begun for value in values), seeds)


def tunable_runs(runs: Iterable[Settings], candidates: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Return the runs of a grid whose algorithm takes all settings to tune.

    Raises
    ------
    ValueError
        If no algorithm takes them, or :func:`tune` would raise it.
    """
    tunable = [run for run in runs if all(name in takes_of(run.algorithm) for name in candidates)]
    if not tunable:
        raise ValueError(
            f"no method of the grid takes {', '.join(candidates)}. Tune other settings, or add a method that takes "
            "them, such as fedfac-dynamic."
        )
    for run in tunable:
        check(run, candidates)
    return tunable


def tuning_groups(runs: Iterable[Settings], *, together: bool = False) -> dict[tuple[str, str], list[Settings]]:
    """Group the runs of a grid that are tuned at once: runs of an algorithm in a scenario.

    Parameters
    ----------
    runs : iterable of Settings
    together : bool
        Group the scenarios of an algorithm: one value is selected for all data sets.

    Returns
    -------
    dict from (scenario, algorithm) to list of Settings
        The first run of each scenario, to begin tuning with.
    """
    first_by_key: dict[tuple[str, str], Settings] = {}
    for run in runs:
        first_by_key.setdefault((run.name, run.algorithm), run)
    groups: dict[tuple[str, str], list[Settings]] = {}
    for (scenario, algorithm), run in first_by_key.items():
        groups.setdefault(("all data sets" if together else scenario, algorithm), []).append(run)
    return groups


def with_selected(
    runs: Iterable[Settings], selected: Mapping[tuple[str, str], Settings | None], names: Iterable[str]
) -> list[Settings]:
    """Return the runs of a grid with tuned values.

    Parameters
    ----------
    runs : iterable of Settings
    selected : mapping from (scenario, algorithm) to Settings or None
        Settings with the selected values; None if all candidates diverged, which leaves these runs out. Runs of other
        algorithms stay as they are.
    names : iterable of str
        The settings that were tuned.
    """
    names, tuned = list(names), []
    for run in runs:
        settings = selected.get((run.name, run.algorithm), run)
        if settings is not None:
            tuned.append(run.but(**{name: value_of(name, settings) for name in names}) if settings is not run else run)
    return tuned


def _table(
    name: str, tried: Sequence[tuple[Settings, ...]], seeds: Sequence[int], paths: Mapping[Settings, Path]
) -> pd.DataFrame:
    """Return the table of :class:`Step`; candidates with a missing run have no values."""
    complete = [candidate for candidate in tried if all(run in paths for run in runs_of([candidate], seeds))]
    runs = runs_of(complete, seeds)
    trees = [store.open_run(paths[run]) for run in runs]
    rows = pd.DataFrame(map(run_table.row, trees)).assign(value=[_shown(name, run) for run in runs])
    by = name if name in rows else "value"
    rows["chosen"] = rows[by] == run_table.chosen(rows, by, json.loads(trees[0].attrs["config"]))
    means = rows.groupby(["value", "seed"], sort=False)[["validation", "validated", "chosen"]].mean()
    columns = {
        "validation": ("validation", "mean"),
        "std_error": ("validation", "sem"),
        rows["measure"].iloc[0]: ("validated", "mean"),
        "chosen": ("chosen", "all"),
    }
    table = means.groupby("value", sort=False).agg(**columns)
    if len(complete) < len(tried):
        table = table.reindex([_shown(name, candidate[0]) for candidate in tried]).rename_axis("value")
        table["chosen"] = table["chosen"].eq(True)
    return table.reset_index()


def value_of(name: str, settings: Settings) -> Any:
    """Return the value of a setting that can be tuned; None for the method's default."""
    return getattr(settings, name) if name in OF_METHOD else settings.given.get(name)


def _shown(name: str, settings: Settings) -> str:
    value = value_of(name, settings)
    return "None" if value is None else federation.text(name, value)
