"""Search of settings by Optuna: trials of all settings together, drawn from ranges and lists of candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results.base import Caution
from fedstat.study import candidates as numeric
from fedstat.study import run_metrics
from fedstat.study.candidates import DIGITS, Edge, Number, shown
from fedstat.study.outcomes import Outcome
from fedstat.study.run_settings import Settings
from fedstat.study.step import Step, completed, near, rows_of, runs_of, table_of

SEARCHES = ("optuna",)
"""Packages that search."""
INSTALL = "pip install 'fedstat[optuna]'"
_SEED = 0  # of the sampler; equal for all methods
_AT_RANDOM = 10  # first trials, which do not depend on each other
_EDGE = 0.05  # of a range

RunAll = Callable[[list[Settings]], Iterator[Outcome]]


class Range(NamedTuple):
    """Range of a setting.

    Attributes
    ----------
    low, high : float or int
        Both ends belong to it. The range of a setting that takes integers, or that takes both kinds of numbers and has
        two integers here, holds integers.
    log : bool
        Draw on a log scale.
    step : float or int, optional
        Difference of neighboring values.
    """

    low: Number
    high: Number
    log: bool = False
    step: Number | None = None


def optuna() -> Any:
    """Import Optuna; raise ValueError with the command that installs it if it is missing."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError(f"search = 'optuna' needs Optuna, which is not installed ({error}): {INSTALL}") from None
    return optuna


def check_range(settings: Settings, name: str, content: Mapping[str, Any]) -> Range:
    """Return a range of candidates; raise ValueError if a key or a value of it is wrong, or the setting cannot take it.

    Examples
    --------
    >>> check_range(Settings(), "lr", {"low": 0.001, "high": 1, "log": True})
    Range(low=0.001, high=1.0, log=True, step=None)
    """
    where = f"the range of {name}"
    for key in content:
        if key not in Range._fields:
            near_names = check.did_you_mean(key, Range._fields)
            raise ValueError(f"{where} cannot hold the key {key!r:.200}, but {', '.join(Range._fields)}.{near_names}")
    for key in ("low", "high"):
        if key not in content:
            raise ValueError(f"{where} needs {key}, such as {name} = {{ low = 0.001, high = 1.0, log = true }}")
        check.real(f"{key} of {where}", content[key])
    of = Range(**content)
    if not isinstance(of.log, bool):
        raise ValueError(f"log of {where} must be true or false, but got {of.log!r:.200}")
    if of.step is not None:
        check.real(f"step of {where}", of.step, low=0, open_low=True)
    if not of.low < of.high:
        raise ValueError(f"low of {where} must be less than high, but got {of.low} and {of.high}")
    if of.log and of.low <= 0:
        raise ValueError(f"a log scale has positive values, but low of {where} is {of.low}. Raise low, or remove log.")
    if of.log and of.step is not None:
        raise ValueError(f"{where} has log and step, which exclude each other. Remove one of them.")
    if of.step is not None and not _is_multiple(of.high - of.low, of.step):
        raise ValueError(f"high of {where} must be low plus a multiple of step, but got {of}")
    if numeric.is_real(name, settings.algorithm):
        of = of._replace(low=float(of.low), high=float(of.high))
    for end in (of.low, of.high):
        settings.but(**{name: end})
    return of


def _is_multiple(length: Number, step: Number) -> bool:
    steps = length / step
    return math.isfinite(steps) and math.isclose(steps, round(steps), rel_tol=1e-9)


def trials(
    begun: Sequence[Settings],
    candidates: Mapping[str, Any],
    seeds: Sequence[int],
    budget: int,
    run_all: RunAll,
) -> Step:
    """Search settings together by Optuna's TPE sampler, by their score on validation samples.

    Parameters
    ----------
    begun : sequence of Settings
        Of each data set; other settings stay as they are.
    candidates : mapping from setting to sequence or mapping
        A list of candidates, whose order has no meaning, or a range: a mapping with ``low``, ``high`` and, optionally,
        ``log`` (True: draw on a log scale) or ``step``. Numbers from ranges have three significant digits.
    seeds : sequence of int
        Every trial is run with every seed.
    budget : int
        Number of trials. Trials with equal settings count, and have the same runs.
    run_all : callable (runs)
        :func:`fedstat.study.grid.run_all` with a folder and options.

    Returns
    -------
    Step

    Raises
    ------
    ValueError
        If the settings that a trial draws exclude each other.
    FailedRunsError
        If a run of every trial failed or diverged.

    Notes
    -----
    The sampler has a seed, and trials are drawn and scored in their order: first ten at random, which may train at
    once, then one by one. A repeated search therefore draws the same trials, and finds the runs that are finished, as
    long as the versions of Optuna and NumPy are the same. A trial of which a run diverged is reported to Optuna as
    failed.
    """
    package = optuna()
    ranges = {name: check_range(begun[0], name, v) for name, v in candidates.items() if isinstance(v, Mapping)}
    draw_from = {
        name: _distribution(package, ranges[name]) if name in ranges else _choices(package, len(values))
        for name, values in candidates.items()
    }
    tried: list[tuple[Settings, ...]] = []
    parts: list[pd.DataFrame] = []
    error = None
    with _quiet(package):
        sampler = package.samplers.TPESampler(n_startup_trials=_AT_RANDOM, seed=_SEED)
        study = package.create_study(direction="maximize", sampler=sampler)
        while len(tried) < budget:
            new = [study.ask(draw_from) for _ in range(1 if tried else min(_AT_RANDOM, budget))]
            drawn = [_make(begun, candidates, ranges, trial.params, trial.number) for trial in new]
            paths, failure = completed(run_all(list(dict.fromkeys(runs_of(drawn, seeds)))))
            error = failure or error
            parts.append(rows_of(drawn, seeds, paths, first=len(tried)))
            tried += drawn
            scores = _scores(parts[-1])
            for trial in new:
                if trial.number in scores:
                    study.tell(trial, scores[trial.number])
                else:
                    study.tell(trial, state=package.trial.TrialState.FAIL)
    complete = [rows for rows in parts if not rows.empty]
    if error is not None and not complete:
        raise error
    rows = pd.concat(complete, ignore_index=True)
    scores = _scores(rows)
    return _step(tried, candidates, ranges, rows, max(scores, key=lambda i: scores[i]), seeds)


def _choices(package: Any, n: int) -> Any:
    """Return the distribution of the positions of candidates, which may be lists themselves."""
    return package.distributions.CategoricalDistribution(range(n))


def _distribution(package: Any, of: Range) -> Any:
    if _is_of_integers(of):
        return package.distributions.IntDistribution(of.low, of.high, log=of.log, step=of.step or 1)
    return package.distributions.FloatDistribution(of.low, of.high, log=of.log, step=of.step)


def _is_of_integers(of: Range) -> bool:
    return all(isinstance(x, int) for x in (of.low, of.high, of.step or 1))


def _make(
    begun: Sequence[Settings],
    candidates: Mapping[str, Any],
    ranges: Mapping[str, Range],
    drawn: Mapping[str, Any],
    trial: int,
) -> tuple[Settings, ...]:
    """Return the settings of a trial."""
    values = {
        name: _rounded(drawn[name], ranges[name]) if name in ranges else candidates[name][drawn[name]] for name in drawn
    }
    try:
        return tuple(base.but(**values) for base in begun)
    except ValueError as error:
        settings = ", ".join(f"{name}={value}" for name, value in values.items())
        raise ValueError(
            f"trial {trial} of the search combines {settings}, which exclude each other: {error}. Tune them apart."
        ) from None


def _rounded(value: Number, of: Range) -> Number:
    """Round a number to three significant digits, within its range; a number of a grid, to its digits."""
    if isinstance(value, int):
        return value
    digits = DIGITS if of.step is None else 12
    return min(max(float(f"{value:.{digits}g}"), of.low), of.high)


def _scores(rows: pd.DataFrame) -> dict[int, float]:
    """Return the mean validation score of each complete trial, larger is better."""
    if rows.empty:
        return {}
    sign = -1 if run_metrics.is_error(str(rows["measure"].iloc[0])) else 1
    means = rows.groupby(["candidate", "seed"])["validation"].mean().groupby("candidate").mean()
    return {int(i): sign * float(means[i]) for i in means.index if math.isfinite(means[i])}


def _step(
    tried: Sequence[tuple[Settings, ...]],
    candidates: Mapping[str, Any],
    ranges: Mapping[str, Range],
    rows: pd.DataFrame,
    best: int,
    seeds: Sequence[int],
) -> Step:
    """Return the step of a search, with cautions for numbers at the edge of their range or list."""
    texts = {name: [shown(name, trial[0]) for trial in tried] for name in candidates}
    values = {name: column[best] for name, column in texts.items()}
    edge, cautions = dict[str, Edge](), []
    for name in candidates:
        side = _find_edge(name, tried[best], ranges.get(name), candidates[name])
        if side is not None:
            edge[name] = side
            cautions.append(_caution(name, values[name], side, ranges.get(name)))
    labels = pd.DataFrame({"trial": range(len(tried)), **texts, "added": False})
    return Step(
        ", ".join(candidates),
        table_of(rows, labels, best),
        tried[best],
        values=values,
        edge=edge,
        near=tuple(map(str, near(rows, best))),
        cautions=tuple(cautions),
        runs=tuple(dict.fromkeys(runs_of(tried, seeds))),
    )


def _find_edge(name: str, chosen: Sequence[Settings], of: Range | None, values: Any) -> Edge | None:
    """Return the end of its range, or the edge of its list, near which a chosen number lies, if it can go beyond."""
    value = numeric.number(name, chosen[0])
    if of is None:
        listed = [numeric.number(name, chosen[0].but(**{name: candidate})) for candidate in values]
        numbers = [x for x in listed if x is not None]
        edge, geometric = numeric.edge_of(value, numbers), len(set(numbers)) > 1 and numeric.is_geometric(numbers)
    else:
        numbers, geometric = [of.low, of.high], of.log
        edge = None if value is None else _end(value, of)
    if edge is None or numeric.further(chosen, name, numbers, edge, geometric=geometric) is None:
        return None
    return edge


def _end(value: Number, of: Range) -> Edge | None:
    """Return the end within 5 % of the range of a value, on the scale on which it is drawn."""
    low, high, x = (math.log(v) if of.log else v for v in (of.low, of.high, value))
    position = (x - low) / (high - low)
    return "smallest" if position <= _EDGE else "largest" if position >= 1 - _EDGE else None


def _caution(name: str, value: str, edge: Edge, of: Range | None) -> Caution:
    side = "larger" if edge == "largest" else "smaller"
    if of is None:
        text = f"{name} = {value} is the {edge} candidate: {side} values may do better; add some"
    else:
        end = "high" if edge == "largest" else "low"
        way = f"raise {end}" if edge == "largest" else f"lower {end}"
        limit = of.high if edge == "largest" else of.low
        text = f"{name} = {value} lies within 5 % of the {end} end of its range, {limit}: {side} values may do better; "
        text += way
    return Caution("Edge of the candidates", text)


@contextmanager
def _quiet(package: Any) -> Iterator[None]:
    """Keep Optuna from logging its trials."""
    before = package.logging.get_verbosity()
    package.logging.set_verbosity(package.logging.ERROR)
    try:
        yield
    finally:
        package.logging.set_verbosity(before)
