"""Rounds that a run is judged by: which rules there are, what each means, and which one a grid allows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedstat import _check

WINDOW = 10
"""Consecutive rounds over which accuracies are averaged (FedFac §5.2)."""

RULES = {
    "best10": "best mean over 10 consecutive rounds{}, chosen on the test data that it reports",
    "last10": "mean over the last 10 rounds{}",
    "final": "the last evaluated round",
    "validated": "the round with the best accuracy on validation data",
}
"""Ways to pick the rounds that a run is judged by, in words."""


def span(rounds: int) -> int:
    """Rounds at the end of a run that are averaged: 10, or the last one alone of a run that is shorter.

    The mean of a short run would hold its first rounds, in which nothing is learned yet.
    """
    return WINDOW if rounds >= WINDOW else 1


def best_window(mean: NDArray[np.float64], window: int = WINDOW) -> tuple[float, float]:
    """Best mean over consecutive rounds, and the last of these rounds (from 1).

    NaN if nothing was evaluated or the run is shorter than the window. Windows in which fewer rounds were evaluated
    than in others are left out, but for a difference of one, which comes from evaluating every few rounds.

    Examples
    --------
    >>> best_window(np.array([0.1, 0.5, 0.9, 0.1]), window=2)
    (0.7, 3.0)
    """
    if len(mean) < window or not np.isfinite(mean).any():
        return math.nan, math.nan
    windows = np.lib.stride_tricks.sliding_window_view(mean, window)
    n = np.isfinite(windows).sum(axis=1)
    enough = n >= max(1, n.max() - 1)
    means = np.where(enough, np.nansum(windows, axis=1) / np.maximum(n, 1), -np.inf)
    at = int(means.argmax())
    return float(means[at]), float(at + window)


def choose(table: pd.DataFrame, asked: str | None = None) -> str:
    """Rule for the runs of a table.

    Parameters
    ----------
    table : DataFrame
        ``label`` and ``rounds`` of every run.
    asked : str, optional
        One of ``RULES``. By default best10, as papers report it; final where a run has fewer than 10 rounds.

    Raises
    ------
    ValueError
        If ten rounds are to be averaged where there are fewer.
    """
    short = few(table)
    if asked is None:
        return "final" if short else "best10"
    _check.choice("rule", asked, list(RULES))
    if asked.endswith("10") and short:
        raise ValueError(f"{asked} averages {WINDOW} rounds, but there are fewer: {short}. Use final or validated.")
    return asked


def few(table: pd.DataFrame) -> str:
    """Labels whose runs are too short for ten rounds, with their numbers of rounds; "" if there is none."""
    short = table[table["rounds"] < WINDOW].groupby("label", sort=False)["rounds"].min()
    return "; ".join(f"{label}: {rounds} rounds" for label, rounds in short.items())


def words(rule: str, table: pd.DataFrame) -> str:
    """What a rule means for the runs of a table: where rounds are left out, how many of the ten were evaluated."""
    made = sorted(table.loc[table["rounds"] >= WINDOW, "evaluated"].unique())
    sparse = made and made[0] < WINDOW
    counts = str(made[0]) if len(made) == 1 else f"{made[0]} to {made[-1]}" if made else ""
    return RULES[rule].format(f" (of which {counts} were evaluated)" if sparse else "")
