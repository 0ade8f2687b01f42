"""Number of factors by five rules; fit indices and sampling adequacy, defined as in R's psych.

NumPy in, NumPy out: one correlation matrix without dead units, or its eigenvalues.

Likelihood indices take rows as independent. The rows of a layer, (client, weight) pairs, are not: a client's weights
come from one training run. The indices therefore describe the fit; for inference resample clients
(:mod:`fedstat.stats.resampling`).
"""

from __future__ import annotations

import math

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats.factor import count_factors
from fedstat.stats.moments import safe_blas

Floats = NDArray[np.float64]


def kaiser(eigenvalues: Floats) -> int:
    """Number of eigenvalues of R above 1, the mean eigenvalue (Kaiser 1960)."""
    return int(np.sum(eigenvalues > 1))


def elbow(eigenvalues: Floats) -> int:
    """Number of eigenvalues before the scree's sharpest bend, its largest second difference (Raîche et al. 2013)."""
    return int(np.argmax(np.diff(eigenvalues, 2))) + 1 if len(eigenvalues) > 2 else 1


def minimum_average_partial(r: Floats) -> Floats:
    """Mean squared partial correlation after m components, m = 0, 1, ... (Velicer 1976, Psychometrika 41, 321-327).

    Parameters
    ----------
    r : array (unit, unit)
        Correlations.

    Returns
    -------
    array (m,)
        Its argmin is the number of components; m stops before a unit has no variance left.
    """
    d = len(r)
    values, vectors = np.linalg.eigh(r)
    components = vectors[:, ::-1] * np.sqrt(np.clip(values[::-1], 0, None))
    left, out = r.copy(), []
    for m in range(d):
        variance = np.diagonal(left)
        if variance.min() < 1e-10:
            break
        partial = left / np.sqrt(np.outer(variance, variance))
        out.append((np.sum(partial**2) - d) / (d * (d - 1)))
        left = left - np.outer(components[:, m], components[:, m])
    return np.array(out)


def squared_multiple_correlations(r: Floats) -> Floats:
    """Share of each unit's variance that the others explain linearly; towards 1 where R is singular. Array (unit,)."""
    values, vectors = np.linalg.eigh(r)
    return np.asarray(np.clip(1 - 1 / np.sum(vectors**2 / np.clip(values, 1e-12, None), axis=1), 0, None))


def reduced_eigenvalues(r: Floats) -> Floats:
    """Eigenvalues, descending, of R with squared multiple correlations on its diagonal."""
    reduced = r.copy()
    np.fill_diagonal(reduced, squared_multiple_correlations(r))
    return np.asarray(np.linalg.eigvalsh(reduced)[::-1], dtype=np.float64)


def noise_correlation(rng: np.random.Generator, d: int, n_obs: int) -> Floats:
    """Correlation matrix of ``n_obs`` independent normal rows of ``d`` independent units.

    Drawn from the Wishart distribution by Bartlett's decomposition, so that the cost does not depend on ``n_obs``;
    with fewer rows than units the rows themselves are drawn.
    """
    if n_obs <= d:
        return np.asarray(np.corrcoef(rng.standard_normal((n_obs, d)), rowvar=False))
    a = np.tril(rng.standard_normal((d, d)), -1)
    np.fill_diagonal(a, np.sqrt(rng.chisquare(n_obs - 1 - np.arange(d))))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    with safe_blas(d):
        return np.asarray(a @ a.T)


def parallel_analysis(
    r: Floats, n_obs: int, *, draws: int = 100, quantile: float = 0.95, seed: int = 0
) -> tuple[Floats, Floats]:
    """Quantiles of the eigenvalues that pure noise gives (Horn 1965, Psychometrika 30, 179-185).

    Parameters
    ----------
    r : array (unit, unit)
        Only its size counts.
    n_obs : int
        Rows behind R. Rows of one client are alike, so the number of clients times weights is an upper bound.
    draws : int
    quantile : float
    seed : int

    Returns
    -------
    components : array (unit,)
        For eigenvalues of R.
    factors : array (unit,)
        For eigenvalues of R with squared multiple correlations on its diagonal (Humphreys and Montanelli 1975).
    """
    check.integer("n_obs", n_obs, low=3)
    check.real("quantile", quantile, low=0, high=1, open_low=True, open_high=True)
    rng = generator(seed, "parallel analysis")
    noise = [noise_correlation(rng, len(r), n_obs) for _ in range(check.integer("draws", draws))]
    components = np.quantile([np.linalg.eigvalsh(x)[::-1] for x in noise], quantile, axis=0)
    factors = np.quantile([reduced_eigenvalues(x) for x in noise], quantile, axis=0)
    return np.asarray(components), np.asarray(factors)


def above(eigenvalues: Floats, noise: Floats) -> int:
    """Number of leading eigenvalues above those of noise."""
    return int(np.argmin(np.append(eigenvalues > noise, False)))


def compare(
    r: Floats, n_obs: int, *, kappa: float = 0.85, draws: int = 100, quantile: float = 0.95, seed: int = 0
) -> tuple[dict[str, int], dict[str, Floats]]:
    """Every rule's number of factors, and the curves behind them.

    Parameters
    ----------
    r : array (unit, unit)
        Correlations without dead units.
    n_obs, draws, quantile, seed
        As in :func:`parallel_analysis`.
    kappa : float
        Threshold of the κ rule.

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
    """Correlations less free parameters of d units and g factors, ½((d − g)² − d − g); may be negative."""
    return ((d - g) ** 2 - d - g) // 2


def complexity(loadings: Floats) -> Floats:
    """Hofmann's complexity of each unit, (Σ a²)² / Σ a⁴: the number of factors it takes to explain it."""
    square = np.sum(loadings**2, axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(square**2 / np.sum(loadings**4, axis=1))


def discrepancy(r: Floats, model: Floats, log_r: float) -> float:
    """Maximum-likelihood discrepancy tr(M⁻¹R) − log|M| + log|R| − d; NaN if a matrix is not positive definite.

    ``log_r`` is log|R|.
    """
    log_ratio = _log_determinant(model) - log_r
    return _NAN if math.isnan(log_ratio) else float(np.trace(np.linalg.solve(model, r))) + log_ratio - len(r)


def _log_determinant(r: Floats) -> float:
    """log|R| of a matrix with unit diagonal; NaN if its smallest eigenvalue is not above what rounding makes of 0."""
    try:
        with safe_blas(len(r)):
            np.linalg.cholesky(r - 4 * len(r) * np.finfo(float).eps * np.eye(len(r)))
            return 2 * float(np.sum(np.log(np.diagonal(np.linalg.cholesky(r)))))
    except np.linalg.LinAlgError:
        return _NAN


def fit_indices(r: Floats, common: Floats, g: int, n_obs: int | None) -> dict[str, float]:
    """How well a factor model reproduces R.

    Parameters
    ----------
    r : array (unit, unit)
        Correlations.
    common : array (unit, unit)
        ÂΦÂᵀ, whose diagonal holds the communalities.
    g : int
        Number of factors.
    n_obs : int or None
        Rows behind R. Without it the indices that need it are NaN.

    Returns
    -------
    dict
        rmsr, rmsr_corrected (per degree of freedom), fit_off (1 − share of squared off-diagonal correlation left),
        df, chi2, p_value, null_chi2, null_df, tli, rmsea, rmsea_low, rmsea_high (90 % interval), bic, sabic.
        With df <= 0 or a singular matrix the likelihood indices are undefined, hence NaN. χ² is for many independent
        rows: a true model of 12 units is rejected at 0.05 in about 0.07 of samples of 100 rows, and always in samples
        of 1000 whose rows come ten alike. The interval of RMSEA, as in R's psych, covers in 0.91 of samples of 200 rows
        and 0.87 of 1000 where a factor of loadings 0.2 is left out, in 0.84 and 0.83 where its loadings are 0.5.
    """
    d = len(r)
    df, null_df = degrees_of_freedom(d, g), d * (d - 1) // 2
    residual = r - common
    np.fill_diagonal(residual, 0)
    left, whole = float(np.sum(residual**2)), float(np.sum(r**2)) - d
    model = common.copy()
    np.fill_diagonal(model, 1)
    out = {
        "rmsr": math.sqrt(left / (d * (d - 1))) if d > 1 else _NAN,
        "rmsr_corrected": math.sqrt(left / (2 * df)) if df > 0 else _NAN,
        "fit_off": 1 - left / whole if whole > 0 else _NAN,
        "df": df,
        "null_df": null_df,
    }
    if n_obs is None:
        return out | _likelihood(_NAN, _NAN, df, null_df, d, g, 2)
    log_r = _log_determinant(r)  # of the null model, M = I, the discrepancy is −log|R|
    return out | _likelihood(discrepancy(r, model, log_r), -log_r, df, null_df, d, g, n_obs)


def _likelihood(f: float, f0: float, df: int, null_df: int, d: int, g: int, n: int) -> dict[str, float]:
    scale = n - 1 - (2 * d + 5) / 6 - 2 * g / 3  # Bartlett's correction
    stat = max(f * scale, 0.0) if not math.isnan(f) else _NAN
    ok = df > 0 and not math.isnan(stat)
    per_null = f0 / null_df if null_df else _NAN
    rmsea = math.sqrt(max(stat / (df * n) - 1 / (n - 1), 0)) if ok else _NAN
    low, high = _rmsea_interval(stat, df, n) if ok else (_NAN, _NAN)
    return {
        "chi2": stat,
        "p_value": float(scipy.special.chdtrc(df, stat)) if ok else _NAN,
        "null_chi2": f0 * (n - 1 - (2 * d + 5) / 6),
        "tli": (per_null - f / df) / (per_null - 1 / scale) if ok else _NAN,
        "rmsea": rmsea,
        "rmsea_low": low,
        "rmsea_high": high,
        "bic": stat - df * math.log(n) if ok else _NAN,
        "sabic": stat - df * math.log((n + 2) / 24) if ok else _NAN,
    }


def _rmsea_interval(stat: float, df: int, n: int, *, tail: float = 0.05) -> tuple[float, float]:
    """Ends of the 90 % interval: non-centralities at which ``stat`` is the 95 % and the 5 % quantile."""

    def end(level: float) -> float:
        if scipy.special.chdtr(df, stat) <= level:
            return 0.0
        ncp = scipy.optimize.brentq(lambda x: scipy.special.chndtr(stat, df, x) - level, 1e-12, 2 * stat + 2 * n)
        return math.sqrt(ncp / (n - 1) / df)

    return end(1 - tail), end(tail)


def kmo(r: Floats) -> tuple[float, Floats]:
    """Kaiser-Meyer-Olkin measure of sampling adequacy, overall and per unit; NaN if R is singular.

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
    """Bartlett's test of sphericity, −(n − 1 − (2d + 5)/6) log|R|: statistic, degrees of freedom, p-value.

    Statistic and p-value are NaN if R is singular, as that of no more rows than units is.
    """
    d = len(r)
    df = d * (d - 1) // 2
    stat = -(n_obs - 1 - (2 * d + 5) / 6) * _log_determinant(r)
    return stat, df, float(scipy.special.chdtrc(df, stat))
