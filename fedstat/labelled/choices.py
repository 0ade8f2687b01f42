"""The split under several estimators and κ at once: the verb ``split_map``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstat import _check
from fedstat._later import pd
from fedstat.labelled.coerce import Weights, numpy_of, sums
from fedstat.labelled.factor import fa, say_if_alone
from fedstat.labelled.inputs import each, over_layers
from fedstat.labelled.start import change
from fedstat.results import ConvergenceWarning, SplitMapResult
from fedstat.stats import split as _split
from fedstat.stats.moments import correlation


@over_layers
def split_map(
    weights: Weights,
    *,
    kappas: Sequence[float] = (0.5, 0.75, 0.85, 0.9, 0.95),
    methods: Sequence[_split.Method] = _split.METHODS,
    tau: _split.Tau = 0.5,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    minus: Any = None,
) -> SplitMapResult:
    """Which units are shared by every estimator and at every κ, and which depend on the analyst?

    :func:`stability` varies one choice at a time and says how like the split remains; this varies both together and
    says which units change sides, as a multiverse analysis does [1]_.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or what holds layers
        As in :func:`split`.
    kappas : sequence of float in (0, 1]
        Shares of the eigenvalues' sum that choose the number of factors.
    methods : sequence of {"pa", "minres", "pc", "leverage", "icc"}
        Estimators of the communality; "icc", agreement between clients, has no κ and is one analysis.
    tau : float in (0, 1), inf, -inf or Absolute
        As in :func:`split`; a quantile is taken anew in every analysis.
    layer, checkpoint, minus
        As in :func:`split`.

    Returns
    -------
    SplitMapResult
        Non-convergence is a column of its table, not a warning for each analysis. A :class:`fedstat.ByLayer` of results
        where layers are several.

    Raises
    ------
    ValueError
        As :func:`split`; if a method or κ is given twice; with "icc", if there are fewer than 2 clients or weights a
        unit.

    References
    ----------
    .. [1] Steegen, Tuerlinckx, Gelman, Vanpaemel (2016). Increasing transparency through a multiverse analysis.
       Perspectives on Psychological Science 11, 702-712.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    >>> weights = np.concatenate([alike, rng.normal(size=(10, 4, 20))], axis=1)
    >>> split_map(weights, kappas=(0.3, 0.5), methods=("pc", "icc"))
    Split of 8 units in 3 analyses, tau 0.5
      pc at kappa 0.3, 0.5; icc
      4 shared in all, 4 personal in all, 0 depend on the analysis, 0 dead
      adjusted Rand index of two analyses: median 1.00, least 1.00
    """
    for method in _check.distinct("methods", list(methods)):
        _check.choice("method", method, _split.METHODS)
    _check.distinct("kappas", list(kappas))
    which: dict[str, Any] = {"layer": layer, "checkpoint": checkpoint, "minus": minus}
    return each(weights, _map_layer, **which, kappas=kappas, methods=methods, tau=tau)


def _map_layer(
    weights: Weights, start: Any, *, kappas: Sequence[float], methods: Sequence[_split.Method], tau: _split.Tau
) -> SplitMapResult:
    m, _, units, n_clients, agreement = sums(change(weights, start))
    say_if_alone(n_clients)
    if "icc" in methods and np.isnan(agreement).all():
        raise ValueError("method 'icc' needs at least 2 clients and 2 weights per unit. Leave it out of methods.")
    r = correlation(m)
    rows, shared = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for method in methods:
            for kappa in (np.nan,) if method == "icc" else kappas:
                fit = None if method == "icc" else fa(r, corr=True, kappa=kappa, method=method)
                shared.append(_split.shared(agreement if fit is None else fit.communality, tau=tau))
                rows.append(
                    {
                        "method": method,
                        "kappa": float(kappa),
                        "n_factors": 0 if fit is None else fit.n_factors,
                        "converged": fit is None or fit.converged,
                        "n_shared": int(shared[-1].sum()),
                    }
                )
    dead = np.isnan(np.diagonal(numpy_of(r)))
    return SplitMapResult(pd.DataFrame(rows), np.stack(shared), dead, units, str(tau))
