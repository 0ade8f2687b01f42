"""Comparison of methods: paired differences of two, and ranks of several over data sets (Friedman's test, Nemenyi).

NumPy arrays. Larger values rank first: rank 1 is best.
"""

from __future__ import annotations

import itertools
import math
import re
from itertools import permutations
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from fedstat._utils import check
from fedstat._utils.streams import generator

SIGN_FLIP_BLOCKS = 16
"""Largest number of blocks whose 2ⁿ sign patterns are enumerated."""

LEAST_PAIRS = 3
"""Smallest number of pairs with a test and an interval: the t distribution of two pairs has no mean and variance."""


def sign_flip(x: NDArray[np.float64]) -> float:
    """Return the exact two-sided p value of the mean under sign flips; NaN for 0 values or more than 16.

    H0: values are symmetric about 0. Skewed values with mean 0 make H0 false.

    Examples
    --------
    >>> sign_flip(np.array([1.0, 2.0, 4.0, -0.5]))
    0.25
    """
    if not np.isfinite(x).all():
        raise ValueError("the sign flip needs finite differences, but got NaN or infinite values. Leave them out.")
    if not 0 < len(x) <= SIGN_FLIP_BLOCKS:
        return math.nan
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(x))))
    sums = np.abs(signs @ x)
    return float((sums >= sums[0] - 1e-12 * np.abs(x).sum()).mean())


def paired_test(d: NDArray[np.float64], level: float, rounding: float) -> dict[str, float]:
    """Return the mean difference of pairs, its paired t test and its interval.

    Differences that vary by rounding alone have no interval, and p = 1 if their mean is 0.

    Parameters
    ----------
    d : array (pair,)
        Finite differences.
    level : float in (0, 1)
    rounding : float
        Rounding error of the values: differences with a standard error up to this are equal.

    Returns
    -------
    dict
        ``n``, ``difference``, ``std_error``, ``df``, ``p_sign_flip``; for at least :data:`LEAST_PAIRS` pairs also
        ``statistic``, ``p_value``, ``conf_low`` and ``conf_high``.

    Examples
    --------
    >>> row = paired_test(np.array([1.0, 2.0, 3.0]), 0.95, 0.0)
    >>> row["difference"], round(row["p_value"], 3), row["p_sign_flip"]
    (2.0, 0.074, 0.25)
    """
    row: dict[str, float] = {"n": len(d), "difference": float(d.mean()) if len(d) else math.nan}
    row |= {"std_error": _std_error(d), "df": len(d) - 1 if len(d) > 1 else math.nan, "p_sign_flip": sign_flip(d)}
    if len(d) < 2:
        return row
    if row["std_error"] <= rounding:
        # Their spread is unknown, not 0, so that there is no interval.
        unknown = {"std_error": math.nan, "df": math.nan}
        return row | unknown | ({"difference": 0.0, "p_value": 1.0} if abs(row["difference"]) <= rounding else {})
    if len(d) < LEAST_PAIRS:
        return row
    from statsmodels.stats.weightstats import DescrStatsW

    sample = DescrStatsW(d)
    statistic, p_value, _ = sample.ttest_mean()
    low, high = sample.tconfint_mean(alpha=1 - level)
    return row | {
        "statistic": float(statistic), "p_value": float(p_value), "conf_low": float(low), "conf_high": float(high)
    }  # fmt: skip


def _std_error(x: NDArray[np.float64]) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


_MOST_SUMS = 300_000  # largest number of rank-sum vectors in a step of the enumeration: a tenth of a second
_DRAWS = 9_999


class Friedman(NamedTuple):
    """Friedman's test over blocks.

    Attributes
    ----------
    ranks : array (block, method)
        Ranks within blocks: 1 is best, ties share their mean.
    mean_ranks : array (method,)
    statistic : float
        χ²_F, corrected for ties; NaN if all methods tie in every block.
    df : int
        Degrees of freedom of the χ² approximation.
    f : float
        Iman and Davenport's F; infinite if all blocks rank the methods equally.
    f_df : int
        Degrees of freedom of F's denominator; its numerator has ``df``.
    p_value : float
        Proportion of the permutations of ranks within blocks with a statistic at least as large. It is the p value of
        χ² and of F, because F is an increasing function of χ².
    exact : bool
        True if all permutations were enumerated; False for the data and 9,999 random permutations, equal in every call.
    """

    ranks: NDArray[np.float64]
    mean_ranks: NDArray[np.float64]
    statistic: float
    df: int
    f: float
    f_df: int
    p_value: float
    exact: bool


_HIGHER = {"accuracy", "acc", "auc", "auroc", "auprc", "f1", "precision", "recall", "r2"}
_LOWER = {"loss", "error", "err", "rmse", "mse", "mae", "nll", "perplexity", "ppl"}


def is_higher_better(value: str, higher_is_better: bool | None = None) -> bool:
    """Return True if higher values rank first, by the user's choice or else by the name of the values.

    Raises
    ------
    ValueError
        If there is no choice, and the name has no word of a known measure, or words of both kinds.

    Examples
    --------
    >>> is_higher_better("test_accuracy"), is_higher_better("validation loss"), is_higher_better("score", True)
    (True, False, True)
    """
    if higher_is_better is not None:
        return check.choice("higher_is_better", higher_is_better, (True, False))
    words = set(re.split(r"[^a-z0-9]+", value.lower()))
    higher, lower = bool(words & _HIGHER), bool(words & _LOWER)
    if higher == lower:
        raise ValueError(
            f"higher_is_better is required, since the name {value!r} does not tell which values are better. Pass "
            "higher_is_better=True, or False as for a loss."
        )
    return higher


def friedman(values: ArrayLike) -> Friedman:
    """Test H0: all methods have equal distributions of ranks (Friedman [1]_, with Iman and Davenport's F [2]_).

    Parameters
    ----------
    values : array (block, method)
        Finite values, such as accuracies of methods (columns) on data sets (rows); at least 2 blocks and 3 methods.
        The largest value has rank 1: pass ``-values`` of losses.

    Returns
    -------
    Friedman

    Raises
    ------
    ValueError
        If there are too few blocks or methods, or a value is not finite.

    Notes
    -----
    The distributions of χ² and F are approximations for many blocks. An F test at .05 rejects a true H0 in .167 (2
    blocks × 3 methods), .194 (3 × 3), .069 (4 × 3), .075 (3 × 4) and .067 (2 × 5) of all rankings. This p value uses
    neither approximation: under H0, all orders of the ranks within a block are equally likely. H0 is that methods do
    not differ in any respect; it is false, too, if a method varies more than the others.

    References
    ----------
    .. [1] Friedman (1937), "The use of ranks to avoid the assumption of normality implicit in the analysis of
       variance", J. Amer. Statist. Assoc. 32, 675-701.
    .. [2] Iman, Davenport (1980), "Approximations of the critical region of the Friedman statistic", Commun. Statist.
       A 9, 571-595.

    Examples
    --------
    >>> result = friedman([[0.9, 0.8, 0.7], [0.6, 0.5, 0.5], [0.9, 0.7, 0.8], [0.8, 0.7, 0.6]])
    >>> result.mean_ranks, round(result.statistic, 3), round(result.p_value, 3)
    (array([1.   , 2.375, 2.625]), 6.533, 0.037)
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 2 or x.shape[0] < 2 or x.shape[1] < 3:
        raise ValueError(
            f"values must be a table of 2 blocks (rows) and 3 methods (columns) or more, but got the shape {x.shape}"
        )
    if not np.isfinite(x).all():
        i, j = np.argwhere(~np.isfinite(x))[0]
        raise ValueError(
            f"values must be finite, but got {x[i, j]} in block {i}, method {j}. Leave out the block or the method: "
            "ranks need every method in every block."
        )
    ranks = scipy.stats.rankdata(-x, axis=1)
    n, k = x.shape
    mean = ranks.mean(axis=0)
    # Ties reduce the sum of squares of all ranks about (k + 1)/2, which corrects the statistic for ties.
    total = float(np.square(ranks - (k + 1) / 2).sum())
    between = n * float(np.square(mean - (k + 1) / 2).sum())
    df = (n - 1) * (k - 1)
    if total == 0:
        return Friedman(ranks, mean, math.nan, k - 1, math.nan, df, math.nan, True)
    statistic = n * (k - 1) * between / total
    within = n * (k - 1) - statistic
    f = (n - 1) * statistic / within if within > 1e-9 * statistic else math.inf
    return Friedman(ranks, mean, statistic, k - 1, f, df, *_permutation_p_value(ranks))


def _permutation_p_value(ranks: NDArray[np.float64]) -> tuple[float, bool]:
    """Return the p value, the proportion of permutations with at least the observed statistic, and True if exact."""
    doubled = np.rint(2 * ranks).astype(np.int64) - (ranks.shape[1] + 1)  # integers, whose sum over methods is 0
    observed = np.square(doubled.sum(axis=0)).sum()
    if (distribution := _rank_sums(doubled)) is not None:
        sums, probability = distribution
        return float(probability[np.square(sums).sum(axis=1) >= observed].sum()), True
    rng = generator(0, "friedman")
    rank_sums = sum(rng.permuted(np.tile(block, (_DRAWS, 1)), axis=1) for block in doubled)
    return (1 + int((np.square(rank_sums).sum(axis=1) >= observed).sum())) / (1 + _DRAWS), False


def _rank_sums(blocks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Return the sorted rank sums (vector, method) of permutations within blocks, and their probabilities.

    None if there are too many. Sorting is valid, because all permutations of the next block are equally likely.
    """
    k = blocks.shape[1]
    sums: NDArray[np.int64] = np.sort(blocks[:1])
    probability: NDArray[np.float64] = np.ones(1)
    if math.factorial(k) > _MOST_SUMS:
        return None
    base = 2 * int(np.abs(blocks).max(axis=1).sum()) + 1
    if k * math.log2(base) >= 63:
        return None
    powers = base ** np.arange(k, dtype=np.int64)
    for block in blocks[1:]:
        orders = np.unique(list(permutations(block.tolist())), axis=0)
        if len(sums) * len(orders) > _MOST_SUMS:
            return None
        new_sums = np.sort((sums[:, None] + orders).reshape(-1, k))
        _, first, inverse = np.unique(new_sums @ powers, return_index=True, return_inverse=True)
        sums = new_sums[first]
        probability = np.bincount(inverse, np.repeat(probability / len(orders), len(orders))).astype(np.float64)
    return sums, probability


def critical_difference(methods: int, blocks: int, *, level: float = 0.95) -> float:
    """Return Nemenyi's critical difference of mean ranks [1]_, adjusted for all pairs of methods [2]_.

    Smaller differences of mean ranks are no evidence of a difference.

    Parameters
    ----------
    methods, blocks : int
    level : float in (0, 1)

    Raises
    ------
    ValueError
        If there are fewer than 2 methods or no blocks.

    References
    ----------
    .. [1] Nemenyi (1963), Distribution-free multiple comparisons, thesis, Princeton.
    .. [2] Demšar (2006), "Statistical comparisons of classifiers over multiple data sets", JMLR 7, 1-30.

    Examples
    --------
    >>> round(critical_difference(4, 14), 2)  # Demšar's example
    1.25
    """
    k, n = check.integer("methods", methods, low=2), check.integer("blocks", blocks)
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    q = float(scipy.stats.studentized_range.ppf(level, k, np.inf))
    return q * _error(k, n)


def nemenyi(mean_ranks: ArrayLike, blocks: int) -> NDArray[np.float64]:
    """Return p values (method, method) of differences of mean ranks, adjusted for all pairs (Nemenyi); diagonal 1.

    Parameters
    ----------
    mean_ranks : array (method,)
    blocks : int

    Examples
    --------
    >>> nemenyi([3.143, 2.0, 2.893, 1.964], 14)[0].round(3)
    array([1.   , 0.089, 0.956, 0.074])
    """
    rank = np.asarray(mean_ranks, dtype=np.float64)
    k = check.integer("methods", len(rank), low=2)
    differences = np.abs(rank[:, None] - rank) / _error(k, check.integer("blocks", blocks))
    statistic, inverse = np.unique(differences, return_inverse=True)
    return np.asarray(scipy.stats.studentized_range.sf(statistic, k, np.inf))[inverse].reshape(k, k)


def groups(mean_ranks: ArrayLike, difference: float) -> list[tuple[int, ...]]:
    """Return the largest groups of methods whose mean ranks differ by at most the critical difference.

    Parameters
    ----------
    mean_ranks : array (method,)
    difference : float

    Returns
    -------
    list of tuple of int
        Positions of the methods, best first, in groups of at least two.

    Examples
    --------
    >>> groups([3.143, 2.0, 2.893, 1.964], 1.0)
    [(3, 1, 2), (2, 0)]
    """
    rank = np.asarray(mean_ranks, dtype=np.float64)
    order = np.argsort(rank, kind="stable")
    ends = [int(np.searchsorted(rank[order], rank[i] + difference, side="right")) for i in order]
    first = [i for i, end in enumerate(ends) if end > i + 1 and (i == 0 or end > ends[i - 1])]
    return [tuple(int(method) for method in order[i : ends[i]]) for i in first]


def _error(k: int, n: int) -> float:
    """Return the scale of mean ranks for the studentized range, √(k(k + 1)/12n)."""
    return math.sqrt(k * (k + 1) / (12 * n))
