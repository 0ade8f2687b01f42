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
    sample: str | None = None,
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
        Columns within whose values methods are paired, outer ones first: seeds, or data sets and seeds.
    sample : str, optional
        Of several columns, the one whose values are independent; differences are first averaged within each of them.
        With ``sample="seed"`` claims are of these data sets, and a seed must have a pair in all of them; with the data
        set, claims are of other data sets with these seeds.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    ComparisonResult

    Raises
    ------
    ValueError
        If a column or the reference is missing, a row lacks its method or block, a value is infinite, a method has two
        values in a block, or block has several columns and sample is none of them.

    Notes
    -----
    :func:`fedstat.stats.compare.paired` documents the columns and their methods: paired t tests, adjusted by Holm [1]_.

    References
    ----------
    .. [1] Holm (1979). A simple sequentially rejective multiple test procedure. Scandinavian Journal of Statistics 6.

    Examples
    --------
    >>> data = pd.DataFrame({"method": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "accuracy": [5, 6, 7, 9, 5, 8.0]})
    >>> compare(data, reference="a")
    accuracy: 1 method compared with a, paired by seed
      method  mean (SE)      difference [95% CI]      p (Holm)  pairs
      a       5.667 (0.667)  reference
      b       7.667 (0.882)  +2.000 [-0.484, +4.484]     0.074      3
    Paired t tests; CIs simultaneous over 1 comparison (Bonferroni).
    """
    found = paired(data, reference=reference, value=value, method=method, block=block, sample=sample, level=level)
    return ComparisonResult(*found)
