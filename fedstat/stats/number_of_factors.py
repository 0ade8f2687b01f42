"""Number of factors by six rules; fit indices and sampling adequacy, defined as in R's psych.

Arguments are NumPy arrays: a correlation matrix without constant units, or its eigenvalues.

Likelihood indices assume independent rows. The rows of a layer, (client, weight) pairs, are dependent, because a
client's weights come from one training. The indices therefore describe the fit; for inference resample clients
(:mod:`fedstat.stats.resampling`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats.factor import count_factors, fit
from fedstat.stats.moments import safe_blas

Floats = NDArray[np.float64]


def kaiser(eigenvalues: Floats) -> int:
    """Count the eigenvalues of R above 1, the mean eigenvalue (Kaiser 1960)."""
    return int(np.sum(eigenvalues > 1))


def elbow(eigenvalues: Floats) -> int:
    """Count the eigenvalues before the scree's sharpest bend, its largest second difference (Raîche et al. 2013)."""
    return int(np.argmax(np.diff(eigenvalues, 2))) + 1 if len(eigenvalues) > 2 else 1


def minimum_average_partial(r: Floats) -> Floats:
    """Return mean squared partial correlations after m = 0, 1, ... components (Velicer 1976, Psychometrika 41).

    Parameters
    ----------
    r : array (unit, unit)
        Correlations.

    Returns
    -------
    array (m,)
        Its argmin is the number of components; m stops before the residual variance of a unit is 0.
    """
    d = len(r)
    values, vectors = np.linalg.eigh(r)
    components = vectors[:, ::-1] * np.sqrt(np.clip(values[::-1], 0, None))
    residual, mean_squares = r.copy(), []
    for m in range(d):
        variance = np.diagonal(residual)
        if variance.min() < 1e-10:
            break
        partial = residual / np.sqrt(np.outer(variance, variance))
        mean_squares.append((np.sum(partial**2) - d) / (d * (d - 1)))
        residual = residual - np.outer(components[:, m], components[:, m])
    return np.array(mean_squares)


def squared_multiple_correlations(r: Floats) -> Floats:
    """Return the proportion of each unit's variance that others explain linearly (unit,); near 1 for singular R."""
    values, vectors = np.linalg.eigh(r)
    return np.asarray(np.clip(1 - 1 / np.sum(vectors**2 / np.clip(values, 1e-12, None), axis=1), 0, None))


def reduced_eigenvalues(r: Floats) -> Floats:
    """Return the eigenvalues, descending, of R with squared multiple correlations on its diagonal."""
    reduced = r.copy()
    np.fill_diagonal(reduced, squared_multiple_correlations(r))
    return np.asarray(np.linalg.eigvalsh(reduced)[::-1], dtype=np.float64)


def noise_correlation(rng: np.random.Generator, d: int, n_obs: int) -> Floats:
    """Draw the correlation matrix of ``n_obs`` independent normal rows of ``d`` independent units.

    It is drawn from the Wishart distribution by Bartlett's decomposition, whose cost does not depend on ``n_obs``. If
    ``n_obs`` is at most ``d``, the rows are drawn.
    """
    if n_obs <= d:
        return np.asarray(np.corrcoef(rng.standard_normal((n_obs, d)), rowvar=False))
    a = np.tril(rng.standard_normal((d, d)), -1)
    np.fill_diagonal(a, np.sqrt(rng.chisquare(n_obs - 1 - np.arange(d))))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    with safe_blas(d):
        return np.asarray(a @ a.T)


# Most units, and least rows, of simulated noise: the communality depends on their ratio, and little on their numbers.
_NOISE_UNITS, _NOISE_UNITS_SLOW, _NOISE_ROWS = 128, 64, 20
_NOISE_DRAWS, _NOISE_STEPS = 3, 1000


@lru_cache(maxsize=256)
def noise_communality(units: int, n_obs: int, **fitting: Any) -> float:
    """Simulate the median communality of white noise: independent normal rows of independent units.

    Parameters
    ----------
    units, n_obs : int
        Numbers of units and rows; at least 2 and 3.
    **fitting
        Hashable arguments of :func:`fedstat.stats.factor.fit`.

    Returns
    -------
    float
        Mean over 3 draws; 1 draw for more than 64 units, and for fits of many steps (``"minres"``, or ``max_iter``
        above 50, of which at most 1000 count). NaN for ``n_factors`` of more units than are simulated.

    Notes
    -----
    At most 128 units are simulated, 64 for fits of many steps, with the ratio of rows to units, but at least 20 rows.
    For 200 units, the result was within 0.1 of simulations of all units.

    Rows of one client are dependent, so that they tell less than as many independent rows. Noise of fewer rows has a
    higher communality: this median is a lower reference, and no test. At high κ, ``"pa"`` may stop before it converges;
    with more than about 20 rows per unit, its communality then rises with the number of rows.

    Examples
    --------
    >>> round(noise_communality(64, 20, kappa=0.85), 1), round(noise_communality(64, 1000, kappa=0.5), 1)
    (0.8, 0.2)
    """
    method, steps = fitting.get("method", "pa"), fitting.get("max_iter")
    is_slow = method == "minres" or (method == "pa" and steps is not None and steps > 50)
    if is_slow:
        fitting = fitting | {"max_iter": min(steps or _NOISE_STEPS, _NOISE_STEPS)}
    d = min(units, _NOISE_UNITS_SLOW if is_slow else _NOISE_UNITS)
    if fitting.get("n_factors") is not None and d < units:
        return math.nan
    n = max(round(n_obs * d / units), min(n_obs, _NOISE_ROWS))
    rng = generator(0, "noise communality")
    draws = 1 if is_slow or d > _NOISE_UNITS // 2 else _NOISE_DRAWS
    fits = [fit(noise_correlation(rng, d, n), loadings=False, **fitting) for _ in range(draws)]
    return float(np.mean([np.median(one_fit.communality) for one_fit in fits]))


def parallel_analysis(
    r: Floats, n_obs: int, *, draws: int = 100, quantile: float = 0.95, seed: int = 0
) -> tuple[Floats, Floats]:
    """Simulate quantiles of the eigenvalues of random data (Horn 1965, Psychometrika 30, 179-185).

    Parameters
    ----------
    r : array (unit, unit)
        Correlations, of which only the size is used.
    n_obs : int
        Number of rows of R. Rows of a client are dependent, so that clients times weights is an upper bound.
    draws : int
        Number of simulated correlation matrices.
    quantile : float
    seed : int

    Returns
    -------
    components : array (unit,)
        Quantiles for eigenvalues of R.
    factors : array (unit,)
        Quantiles for eigenvalues of R with squared multiple correlations on its diagonal (Humphreys and Montanelli
        1975).
    """
    check.integer("n_obs", n_obs, low=3)
    check.real("quantile", quantile, low=0, high=1, open_low=True, open_high=True)
    rng = generator(seed, "parallel analysis")
    noise = [noise_correlation(rng, len(r), n_obs) for _ in range(check.integer("draws", draws))]
    components = np.quantile([np.linalg.eigvalsh(x)[::-1] for x in noise], quantile, axis=0)
    factors = np.quantile([reduced_eigenvalues(x) for x in noise], quantile, axis=0)
    return np.asarray(components), np.asarray(factors)


def above(eigenvalues: Floats, noise: Floats) -> int:
    """Count the leading eigenvalues above the quantiles of random data."""
    return int(np.argmin(np.append(eigenvalues > noise, False)))


def compare(
    r: Floats, n_obs: int, *, kappa: float = 0.85, draws: int = 100, quantile: float = 0.95, seed: int = 0
) -> tuple[dict[str, int], dict[str, Floats]]:
    """Return the number of factors by every rule, and the curves that determine them.

    Parameters
    ----------
    r : array (unit, unit)
        Correlations without constant units.
    n_obs, draws, quantile, seed
        As in :func:`parallel_analysis`.
    kappa : float
        Proportion of the eigenvalue sum that the factors must reach.

    Returns
    -------
    numbers : dict
        kappa, kaiser, parallel_pc, parallel_fa, map, scree.
    curves : dict of arrays
        eigenvalues, reduced, noise_pc, noise_fa (unit,) and map (m,).

    Examples
    --------
    >>> import numpy as np
    >>> loadings = np.kron(np.eye(2), np.full((6, 1), 0.8))
    >>> r = loadings @ loadings.T + 0.36 * np.eye(12)
    >>> compare(r, 300)[0]
    {'kappa': 7, 'kaiser': 2, 'parallel_pc': 2, 'parallel_fa': 2, 'map': 2, 'scree': 2}
    """
    values = np.asarray(np.linalg.eigvalsh(r)[::-1], dtype=np.float64)
    noise_pc, noise_fa = parallel_analysis(r, n_obs, draws=draws, quantile=quantile, seed=seed)
    curves = {
        "eigenvalues": values,
        "reduced": reduced_eigenvalues(r),
        "noise_pc": noise_pc,
        "noise_fa": noise_fa,
        "map": minimum_average_partial(r),
    }
    numbers = {
        "kappa": int(count_factors(values, kappa=kappa)),
        "kaiser": kaiser(values),
        "parallel_pc": above(values, noise_pc),
        "parallel_fa": above(curves["reduced"], np.clip(noise_fa, 0, None)),  # below 0 there is no common variance
        "map": int(np.argmin(curves["map"])),
        "scree": elbow(values),
    }
    return numbers, curves


_NAN = float("nan")


def degrees_of_freedom(d: int, g: int) -> int:
    """Return correlations minus free parameters of d units and g factors, ½((d − g)² − d − g); may be negative."""
    return ((d - g) ** 2 - d - g) // 2


def complexity(loadings: Floats) -> Floats:
    """Return Hofmann's complexity of each unit, (Σ a²)² / Σ a⁴: the number of factors that explain the unit."""
    square = np.sum(loadings**2, axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(square**2 / np.sum(loadings**4, axis=1))


def discrepancy(r: Floats, model: Floats, log_r: float) -> float:
    """Return the maximum-likelihood discrepancy tr(M⁻¹R) − log|M| + log|R| − d, with ``log_r`` = log|R|.

    NaN if a matrix is not positive definite.
    """
    log_ratio = _log_determinant(model) - log_r
    return _NAN if math.isnan(log_ratio) else float(np.trace(np.linalg.solve(model, r))) + log_ratio - len(r)


def _log_determinant(r: Floats) -> float:
    """Return log|R| of a matrix with diagonal 1; NaN if its smallest eigenvalue is within rounding of 0."""
    try:
        with safe_blas(len(r)):
            np.linalg.cholesky(r - 4 * len(r) * np.finfo(float).eps * np.eye(len(r)))
            return 2 * float(np.sum(np.log(np.diagonal(np.linalg.cholesky(r)))))
    except np.linalg.LinAlgError:
        return _NAN


def fit_indices(r: Floats, common: Floats, g: int, n_obs: int | None) -> dict[str, float]:
    """Compute indices of the fit of a factor model to R.

    Parameters
    ----------
    r : array (unit, unit)
        Correlations.
    common : array (unit, unit)
        ÂΦÂᵀ, whose diagonal holds the communalities.
    g : int
        Number of factors.
    n_obs : int or None
        Number of rows of R. Without it the likelihood indices are NaN.

    Returns
    -------
    dict
        rmsr, rmsr_corrected (per degree of freedom), fit_off (1 − proportion of squared off-diagonal correlation in the
        residual), df, chi2, p_value, null_chi2, null_df, tli, rmsea, rmsea_low, rmsea_high (90% interval), bic, sabic.
        With df <= 0 or a singular matrix, likelihood indices are NaN.

    Notes
    -----
    χ² assumes many independent rows. A true model of 12 units is rejected at 0.05 in about 0.07 of samples of 100 rows.
    It is always rejected in samples of 1000 rows that consist of groups of ten equal rows. The coverage of the RMSEA
    interval, as in R's psych, is 0.91 for 200 rows and 0.87 for 1000 if a factor with loadings 0.2 is omitted. If its
    loadings are 0.5, the coverage is 0.84 and 0.83.
    """
    d = len(r)
    df, null_df = degrees_of_freedom(d, g), d * (d - 1) // 2
    residual = r - common
    np.fill_diagonal(residual, 0)
    residual_squares, total_squares = float(np.sum(residual**2)), float(np.sum(r**2)) - d
    model = common.copy()
    np.fill_diagonal(model, 1)
    indices = {
        "rmsr": math.sqrt(residual_squares / (d * (d - 1))) if d > 1 else _NAN,
        "rmsr_corrected": math.sqrt(residual_squares / (2 * df)) if df > 0 else _NAN,
        "fit_off": 1 - residual_squares / total_squares if total_squares > 0 else _NAN,
        "df": df,
        "null_df": null_df,
    }
    if n_obs is None:
        return indices | _likelihood(_NAN, _NAN, df, null_df, d, g, 2)
    log_r = _log_determinant(r)  # the discrepancy of the null model, M = I, is −log|R|
    return indices | _likelihood(discrepancy(r, model, log_r), -log_r, df, null_df, d, g, n_obs)


def _likelihood(f: float, f0: float, df: int, null_df: int, d: int, g: int, n: int) -> dict[str, float]:
    scale = n - 1 - (2 * d + 5) / 6 - 2 * g / 3  # Bartlett's correction
    stat = max(f * scale, 0.0) if not math.isnan(f) else _NAN
    is_defined = df > 0 and not math.isnan(stat)
    per_null = f0 / null_df if null_df else _NAN
    rmsea = math.sqrt(max(stat / (df * n) - 1 / (n - 1), 0)) if is_defined else _NAN
    low, high = _rmsea_interval(stat, df, n) if is_defined else (_NAN, _NAN)
    return {
        "chi2": stat,
        "p_value": float(scipy.special.chdtrc(df, stat)) if is_defined else _NAN,
        "null_chi2": f0 * (n - 1 - (2 * d + 5) / 6),
        "tli": (per_null - f / df) / (per_null - 1 / scale) if is_defined else _NAN,
        "rmsea": rmsea,
        "rmsea_low": low,
        "rmsea_high": high,
        "bic": stat - df * math.log(n) if is_defined else _NAN,
        "sabic": stat - df * math.log((n + 2) / 24) if is_defined else _NAN,
    }


def _rmsea_interval(stat: float, df: int, n: int, *, tail: float = 0.05) -> tuple[float, float]:
    """Return the 90% interval, from the noncentralities at which ``stat`` is the 95% and the 5% quantile."""

    def end(level: float) -> float:
        if scipy.special.chdtr(df, stat) <= level:
            return 0.0
        ncp = scipy.optimize.brentq(lambda x: scipy.special.chndtr(stat, df, x) - level, 1e-12, 2 * stat + 2 * n)
        return math.sqrt(ncp / (n - 1) / df)

    return end(1 - tail), end(tail)


def kmo(r: Floats) -> tuple[float, Floats]:
    """Return the Kaiser-Meyer-Olkin measure of sampling adequacy, overall and per unit; NaN if R is singular.

    Parameters
    ----------
    r : array (unit, unit)
        Correlations.
    """
    values = np.linalg.eigvalsh(r)
    if values[0] < 1e-10 * values[-1]:
        return _NAN, np.full(len(r), _NAN)
    q = np.linalg.inv(r)
    scale = 1 / np.sqrt(np.diagonal(q))
    partial, plain = (q * np.outer(scale, scale)) ** 2, r**2
    np.fill_diagonal(partial, 0)
    plain = plain - np.eye(len(r))
    units = plain.sum(0) / (plain.sum(0) + partial.sum(0))
    return float(plain.sum() / (plain.sum() + partial.sum())), units


def bartlett(r: Floats, n_obs: int) -> tuple[float, int, float]:
    """Test sphericity by Bartlett's statistic −(n − 1 − (2d + 5)/6) log|R|; return statistic, df and p value.

    Statistic and p value are NaN if R is singular, for example if there are at most as many rows as units.
    """
    d = len(r)
    df = d * (d - 1) // 2
    stat = -(n_obs - 1 - (2 * d + 5) / 6) * _log_determinant(r)
    return stat, df, float(scipy.special.chdtrc(df, stat))
