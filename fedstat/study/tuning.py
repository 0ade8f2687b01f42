"""Tuning as a procedure: Λ, then τ, then κ, each by accuracy on validation samples (FedFac §5.3, §6).

The paper tunes by hand and does not say on which samples; here test samples are never used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedstat import _check, store
from fedstat.fl.algorithms import settings_of
from fedstat.study import grid, summary, words
from fedstat.study.experiment import Settings

STEPS = ("layers", "tau", "kappa")
"""What is tuned, in this order; the paper finds Λ to matter most, then τ, then κ."""


class Step(NamedTuple):
    """One step of the procedure.

    Attributes
    ----------
    name : str
        One of ``STEPS``.
    table : DataFrame
        One row per candidate: ``value``; ``validation``, mean over seeds of the best validation accuracy of any round,
        and its ``std_error``; ``accuracy``, test accuracy in the same rounds, which is shown but not used; ``chosen``.
    settings : Settings
        With the candidate that :func:`fedstat.study.summary.chosen` selects.
    """

    name: str
    table: pd.DataFrame
    settings: Settings


def check(settings: Settings, candidates: Mapping[str, Sequence[Any]]) -> None:
    """Raise what :func:`tune` raises, before any run."""
    if not settings.validation:
        raise ValueError("tuning needs validation samples, but got validation=0. Use 0.1, for example.")
    if not candidates:
        raise ValueError(f"tuning needs candidates for at least one of {', '.join(STEPS)}, but got none")
    for name, values in candidates.items():
        _check.choice("a step of tuning", name, STEPS)
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise ValueError(f"every step of tuning needs a list of candidates, but {name} has {values!r}")
        if name not in settings_of(settings.algorithm):
            raise ValueError(f"{settings.algorithm} does not take {name}: tune fedfac-dynamic, for example")
        tried = [settings.but(**{name: value}) for value in values]
        grid.require_distinct(tried, f"tuning of {name}")


def tune(
    settings: Settings,
    candidates: Mapping[str, Sequence[Any]],
    folder: str | Path,
    *,
    seeds: Sequence[int] = (0,),
    progress: Callable[[Settings, int, int], Callable[[int], object]] | None = None,
    **where: Any,
) -> Iterator[Step]:
    """Choose Λ, τ and κ one after the other, each with the others at their last choice.

    Parameters
    ----------
    settings : Settings
        Starting point; needs ``validation`` > 0 and an algorithm that takes the settings to tune.
    candidates : mapping from step to sequence
        ``layers``: sequences of layers; ``tau``; ``kappa``. Missing steps are skipped. From the second step on the
        starting value is also a candidate, as its runs exist from the step before.
    folder : path
        Where the runs are stored; finished ones are not repeated.
    seeds : sequence of int
        Every candidate is run with every seed.
    progress, **where
        See :func:`fedstat.study.grid.run_all`.

    Yields
    ------
    Step

    Raises
    ------
    ValueError
        If validation samples are missing, or a step is unknown, has no candidates or one twice.

    Examples
    --------
    >>> import tempfile
    >>> start = Settings(clients=10, rounds=2, participation=0.5, validation=0.2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     steps = list(tune(start, {"tau": [0.25, 0.75]}, folder))
    >>> steps[0].table["value"].tolist(), steps[0].settings.given["tau"] in (0.25, 0.75)
    (['0.25', '0.75'], True)
    """
    check(settings, candidates)
    steps = [step for step in STEPS if step in candidates]
    for name in steps:
        tried = [settings.but(**{name: value}) for value in candidates[name]]
        if name != steps[0] and settings not in tried:
            tried.append(settings)
        runs = [one.but(seed=seed) for one in tried for seed in seeds]
        made = [store.open_run(path) for _, path, _ in grid.run_all(runs, folder, progress=progress, **where)]
        rows = pd.DataFrame(map(summary.row, made))
        chosen = rows[name] == summary.chosen(rows, name, json.loads(made[0].attrs["config"]))
        rows = rows.assign(value=[_shown(name, one) for one in runs], chosen=chosen)
        table = rows.groupby("value", sort=False).agg(
            validation=("validation", "mean"),
            std_error=("validation", "sem"),
            accuracy=("validated", "mean"),
            chosen=("chosen", "all"),
        )
        settings = tried[int(table["chosen"].to_numpy().argmax())]
        yield Step(name, table.reset_index(), settings)


def _shown(name: str, settings: Settings) -> str:
    return words.text(name, settings.given[name]) if name in settings.given else "None"
