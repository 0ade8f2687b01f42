"""Tuning as a procedure: one setting of a method after the other, each by its score on validation samples.

FedFac's authors tune Λ, then τ, then κ by hand and do not say on which samples (§5.3, §6); here test samples are never
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from fedstat import store
from fedstat._utils import check as checks
from fedstat._utils.check import named_options
from fedstat._utils.lazy import pd
from fedstat.fl.job import ComputeConfig
from fedstat.results.base import Caution
from fedstat.study import candidates as numeric
from fedstat.study import experiment, federation, grid, run_table
from fedstat.study import search as searches
from fedstat.study.candidates import shown, takes_of, value_of
from fedstat.study.collect import OF_METHOD
from fedstat.study.run_settings import Settings
from fedstat.study.step import Step, completed, near, rows_of, runs_of, table_of

_COLUMNS = ("layers", "kappa", "tau", "estimator", "lr")
"""Settings that the table of runs holds, in the order of which equal candidates are taken."""

__all__ = ["Step", "check", "first_runs", "tunable_runs", "tune", "tuning_groups", "with_selected"]


def check(
    settings: Settings,
    candidates: Mapping[str, Any],
    *,
    extend: bool = False,
    search: str | None = None,
    budget: int | None = None,
) -> None:
    """Raise the errors of :func:`tune`, before any run."""
    if not settings.validation_fraction and not federation.has_validation(settings):
        raise ValueError("tuning needs validation samples, but got validation_fraction=0. Use 0.1, for example.")
    if not candidates:
        raise ValueError(f"tuning needs candidates for a setting of {settings.algorithm}, but got none")
    _check_procedure(extend, search, budget)
    takes = takes_of(settings.algorithm)
    for name, values in candidates.items():
        if name not in takes:
            raise ValueError(f"{settings.algorithm} does not take {name}, but {', '.join(takes)}")
        if search is not None and isinstance(values, Mapping):
            searches.check_range(settings, name, values)
        else:
            _check_list(settings, name, values)


def _check_procedure(extend: bool, search: str | None, budget: int | None) -> None:
    """Check how candidates are tried; a search needs its package and a budget, which others do not take."""
    if not isinstance(extend, bool):
        raise ValueError(f"extend must be true or false, but got {extend!r:.200}")
    if search is None:
        if budget is not None:
            raise ValueError(f"budget={budget!r:.200} is for a search. Add search = 'optuna', or remove budget.")
        return
    checks.choice("search", search, searches.SEARCHES)
    if extend:
        raise ValueError(f"extend is for lists of candidates, but search={search!r} draws them. Remove one of the two.")
    if budget is None:
        raise ValueError(f"search={search!r} needs a budget, the number of trials per method. Add budget = 20.")
    checks.integer("budget", budget, low=1)
    searches.optuna()


def _check_list(settings: Settings, name: str, values: Any) -> None:
    if isinstance(values, Mapping):
        raise ValueError(f"{name} has a range of candidates, {dict(values)!r:.200}, which needs search = 'optuna'")
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ValueError(f"every step of tuning needs a list of candidates, but {name} has {values!r:.200}")
    grid.require_distinct([settings.but(**{name: value}) for value in values], f"tuning of {name}")


@named_options(grid.run_all, experiment.run, ComputeConfig)
def tune(
    settings: Settings | Sequence[Settings],
    candidates: Mapping[str, Any],
    folder: str | Path,
    *,
    seeds: Sequence[int] = (0,),
    extend: bool = False,
    search: str | None = None,
    budget: int | None = None,
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
        candidate, too: its runs are there from the step before. For a search, also ranges, see
        :func:`fedstat.study.search.trials`.
    folder : path
        Where the runs are stored; finished ones are not repeated.
    seeds : sequence of int
        Every candidate is run with every seed.
    extend : bool
        If the best candidate is the smallest or largest number of its step, try the next number beyond it, until the
        best one is interior or at the bound of what the setting takes, the next one diverged, or as many were added as
        there were candidates. On a log scale (:func:`fedstat.study.candidates.is_geometric`) the next number has the
        ratio of the two outermost, else their difference.
    search : {"optuna"}, optional
        Tune all settings together by this package, with ``budget`` trials, in one step.
    budget : int, optional
        Number of trials of a search; each is one run per data set and seed.
    progress, executor, **where
        See :func:`fedstat.study.grid.run_all`.

    Yields
    ------
    Step

    Raises
    ------
    ValueError
        If validation samples are missing, or a step is unknown, has no candidates or one twice; if a range is wrong, or
        the package or the budget of a search is missing.
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
        check(base, candidates, extend=extend, search=search, budget=budget)
    run_all = partial(grid.run_all, folder=folder, progress=progress, executor=executor, **where)
    if search is not None and budget is not None:
        yield searches.trials(begun, candidates, seeds, budget, run_all)
        return
    for number, (name, values) in enumerate(candidates.items()):
        tried = [tuple(base.but(**{name: value}) for base in begun) for value in values]
        if number and begun not in tried:
            tried.append(begun)
        step = _select(name, tried, seeds, run_all, n_more=len(values) if extend else 0)
        begun = step.settings
        yield step


def _select(name: str, tried: list[tuple[Settings, ...]], seeds: Sequence[int], run_all: Any, *, n_more: int) -> Step:
    """Run candidates of a setting, and at most ``n_more`` beyond the edge at which the best one lies."""
    n_first, paths, to_run = len(tried), dict[Settings, Path](), runs_of(tried, seeds)
    first = [x for candidate in tried if (x := numeric.number(name, candidate[0])) is not None]
    while True:
        new_paths, error = completed(run_all(to_run))
        paths |= new_paths
        rows = rows_of(tried, seeds, paths)
        if error is not None and rows.empty:
            raise error
        chosen = _choose(name, tried, rows, paths)
        edge, beyond = _look_beyond(name, tried, chosen, first)
        n_added = len(tried) - n_first
        if beyond is None or n_added == n_more:
            break
        tried.append(beyond)
        to_run = runs_of([beyond], seeds)
    values = [shown(name, candidate[0]) for candidate in tried]
    labels = pd.DataFrame({"value": values, "added": [i >= n_first for i in range(len(tried))]})
    at_edge = {name: edge} if edge is not None and beyond is not None else {}
    return Step(
        name,
        table_of(rows, labels, chosen),
        tried[chosen],
        values={name: values[chosen]},
        edge=at_edge,
        near=tuple(values[i] for i in near(rows, chosen)),
        cautions=tuple(_caution(name, values[chosen], side, n_added) for side in at_edge.values()),
        runs=tuple(runs_of(tried, seeds)),
    )


def _choose(
    name: str, tried: Sequence[tuple[Settings, ...]], rows: pd.DataFrame, paths: Mapping[Settings, Path]
) -> int:
    """Return the position of the candidate with the best validation score."""
    rows = rows.assign(value=[shown(name, tried[i][0]) for i in rows["candidate"]])
    by = name if name in _COLUMNS else "value"
    best = run_table.chosen(rows, by, store.config_of(next(iter(paths.values()))))
    return int(rows.loc[rows[by] == best, "candidate"].iloc[0])


def _look_beyond(
    name: str, tried: Sequence[tuple[Settings, ...]], chosen: int, first: Sequence[numeric.Number]
) -> tuple[numeric.Edge | None, tuple[Settings, ...] | None]:
    """Return the edge at which the chosen candidate lies, and the next candidate beyond it if that is valid."""
    numbers = [numeric.number(name, candidate[0]) for candidate in tried]
    tried_numbers = [x for x in numbers if x is not None]
    edge = numeric.edge_of(numbers[chosen], tried_numbers)
    if edge is None:
        return None, None
    geometric = numeric.is_geometric(first)
    return edge, numeric.further(tried[chosen], name, tried_numbers, edge, geometric=geometric)


def _caution(name: str, value: str, edge: numeric.Edge, n_added: int) -> Caution:
    side = "larger" if edge == "largest" else "smaller"
    after, way = (f" after {n_added} were added", "") if n_added else ("", ", or set extend = true")
    return Caution(
        "Edge of the candidates",
        f"{name} = {value} is the {edge} candidate{after}: {side} values may do better; add some{way}",
    )


def first_runs(
    begun: Iterable[Sequence[Settings]], candidates: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[Settings]:
    """Return the runs of the first step of tuning several methods; they do not depend on each other."""
    name, values = next(iter(candidates.items()))
    return runs_of(([base.but(**{name: value}) for base in settings] for settings in begun for value in values), seeds)


def tunable_runs(runs: Iterable[Settings], candidates: Mapping[str, Any], **procedure: Any) -> list[Settings]:
    """Return the runs of a grid whose algorithm takes all settings to tune.

    Parameters
    ----------
    runs : iterable of Settings
    candidates : mapping
    **procedure
        ``extend``, ``search`` and ``budget`` of :func:`tune`.

    Raises
    ------
    ValueError
        If no algorithm takes them, or :func:`tune` would raise it.
    """
    tunable = [run for run in runs if all(name in takes_of(run.algorithm) for name in candidates)]
    if not tunable:
        raise ValueError(
            f"no method of the grid takes {', '.join(candidates)} as settings to tune. Settings of algorithms can be "
            f"tuned, and {', '.join(OF_METHOD)}. Tune others, or add a method that takes them."
        )
    for run in tunable:
        check(run, candidates, **procedure)
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
        Settings with the selected values; None if all candidates failed, which leaves these runs out. Runs of other
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
