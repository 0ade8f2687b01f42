"""Do methods differ: the verb ``compare``."""

from __future__ import annotations

from collections.abc import Sequence

from fedstat._later import pd
from fedstat.results.comparison import ComparisonResult
from fedstat.stats.compare import paired


def compare(
    data: pd.DataFrame,
    *,
    reference: str,
    value: str = "accuracy",
    method: str = "method",
    block: str | Sequence[str] = "seed",
    level: float = 0.95,
) -> ComparisonResult:
    """Compare methods with a reference within blocks, such as seeds: differences, intervals and p-values.

    Parameters
    ----------
    data : DataFrame
        One row per method and block. Missing rows and NaN are left out of their method's pairs, and named.
    reference : str
        The method that the others are compared with.
    value, method : str
        Columns.
    block : str or sequence of str
        Columns that make a block: seeds, or settings and seeds.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    ComparisonResult

    Raises
    ------
    ValueError
        If a column or the reference is missing, a row lacks its method or block, a value is infinite, or a method has
        two values in a block.

    Notes
    -----
    :func:`fedstat.stats.compare.paired` documents the columns and their methods.

    Examples
    --------
    >>> data = pd.DataFrame({"method": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "accuracy": [5, 6, 7, 9, 5, 8.0]})
    >>> compare(data, reference="a")
    1 methods against a, within blocks: mean ± standard error, difference
    with simultaneous 95 % intervals (Bonferroni), p by Holm
      a  5.6667 ± 0.6667
      b  7.6667 ± 0.8819  +2.0000 [-0.4841, +4.4841]  p 0.0742, n 3
    """
    return ComparisonResult(*paired(data, reference=reference, value=value, method=method, block=block, level=level))
