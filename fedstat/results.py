"""Results that print themselves, turn into tables and never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedstat.stats import split as _split

Tau = _split.Tau
Absolute = _split.Absolute


class ConvergenceWarning(UserWarning):
    """An iteration stopped at its cap; the message says what to do next."""


@dataclass(frozen=True, eq=False)
class FactorResult:
    """Factor analysis of a layer's units, as :func:`fedstat.fa` returns it.

    Attributes
    ----------
    communality : array (unit,)
        ν: share of a unit's variance that the common factors explain; NaN for a dead unit (zero variance).
    loadings : array (unit, factor)
        Columns by falling eigenvalue; NaN rows for dead units.
    eigenvalues : array (unit,)
        Eigenvalues of the correlation matrix, falling; one 0 for each dead unit.
    n_factors, n_iter : int
        Number of factors G; number of eigendecompositions, the first of R itself, as R's psych counts.
    converged : bool
        Whether the estimator reached its tolerance before its cap.
    heywood : bool array (unit,)
        Communality above 1, an improper solution.
    correlation : array (unit, unit)
        R; NaN rows and columns for dead units.
    units : array (unit,)
        Labels of the units.
    n_obs : int or None
        Rows (client, weight) behind R; None if R was given without it.
    kappa : float or None
        Eigenvalue share that chose ``n_factors``; None if the number was given.
    method : str
        Estimator of ν.
    """

    communality: NDArray[np.float64]
    loadings: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    n_factors: int
    n_iter: int
    converged: bool
    heywood: NDArray[np.bool_]
    correlation: NDArray[np.float64]
    units: NDArray[Any]
    n_obs: int | None
    kappa: float | None
    method: str

    @property
    def uniqueness(self) -> NDArray[np.float64]:
        """Share of a unit's variance that is its own: 1 − ν, array (unit,)."""
        return 1 - self.communality

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Units with zero variance: no communality, never silently shared; bool array (unit,)."""
        return np.isnan(self.communality)

    def split(self, *, tau: Tau = 0.5) -> SplitResult:
        """Shared and client-specific units at threshold ``tau`` (FedFac §4.1); see :func:`fedstat.split`."""
        cut = float(_split.threshold(self.communality, tau))
        return SplitResult(
            communality=self.communality,
            shared=_split.shared(self.communality, tau=tau),
            threshold=cut,
            tau=tau,
            fit=self,
        )

    def tidy(self) -> pd.DataFrame:
        """One row a unit: term, loadings, h2 (communality), u2 (uniqueness), heywood, dead."""
        table = pd.DataFrame({"term": self.units})
        for m in range(self.loadings.shape[1]):
            table[f"factor_{m + 1}"] = self.loadings[:, m]
        return table.assign(h2=self.communality, u2=self.uniqueness, heywood=self.heywood, dead=self.dead)


@dataclass(frozen=True, eq=False)
class SplitResult:
    """Shared and client-specific units of a layer, as :func:`fedstat.split` returns it.

    Attributes
    ----------
    communality : array (unit,)
        ν; NaN for a dead unit.
    shared : bool array (unit,)
        ζ: True for a unit that all clients share.
    threshold : float
        Value that ν had to reach.
    tau : float or Absolute
        The threshold as it was asked for: a quantile, ±inf or a value.
    fit : FactorResult
        The factor analysis behind ν.
    """

    communality: NDArray[np.float64]
    shared: NDArray[np.bool_]
    threshold: float
    tau: Tau
    fit: FactorResult

    @property
    def group(self) -> NDArray[np.str_]:
        """``"shared"``, ``"personal"`` or ``"dead"``, array (unit,); with tau = −inf dead units are shared too."""
        rest = np.where(self.fit.dead, "dead", "personal")
        return np.where(self.shared, "shared", rest)

    def tidy(self) -> pd.DataFrame:
        """One row a unit: the columns of the factor analysis, then group and margin (ν − threshold)."""
        return self.fit.tidy().assign(group=self.group, margin=self.communality - self.threshold)
