"""How many factors: the κ rule, Kaiser, parallel analysis, Velicer's MAP and the scree, side by side.

NumPy in, NumPy out: one correlation matrix or its eigenvalues.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstat import _check
from fedstat._random import generator
from fedstat.stats.factor import count_factors
from fedstat.stats.wide import safe_blas

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
    _check.integer("n_obs", n_obs, low=3)
    _check.real("quantile", quantile, low=0, high=1, open_low=True, open_high=True)
    rng = generator(seed, "parallel analysis")
    noise = [noise_correlation(rng, len(r), n_obs) for _ in range(_check.integer("draws", draws))]
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
