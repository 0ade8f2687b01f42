"""Result of the delete-a-group jackknife of communalities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import Caution, Result
from fedstat.results.exports import Headings
from fedstat.results.split import SplitResult
from fedstat.results.tables import join_columns
from fedstat.results.uncertainty import MIN_SEPARATION, separate
from fedstat.stats import resampling
from fedstat.stats.factor import gap

Floats = NDArray[np.float64]
_MIN_DF = 0.15  # least degrees of freedom per group; clients alike have about 0.35, a client that dominates 1 in all


@dataclass(frozen=True, eq=False, repr=False)
class JackknifeResult(Result):
    """A split and the communalities without each group of clients, as :func:`fedstat.jackknife` returns it.

    Attributes
    ----------
    split : SplitResult
        Observed split, of all clients.
    client_groups : int array (client,)
        Number of each client's group: 0, 1, ...
    communality : array (client group, unit)
        Communality ν without each group.
    n_factors : int array (client group,)
        Number of factors without each group.
    converged : bool array (client group,)
        True if the fit without the group converged.
    gap : array (client group,)
        Difference of the eigenvalues of R at the cut, the last factor's and the next; see
        :func:`fedstat.stats.factor.gap`.
    """

    split: SplitResult
    client_groups: NDArray[np.int64]
    communality: Floats
    n_factors: NDArray[np.int64]
    converged: NDArray[np.bool_]
    gap: Floats
    _figure: ClassVar[str] = "communality"
    _by: ClassVar[str | None] = "estimate"
    _headings: ClassVar[Headings] = {
        "unit": "term", "group": "group", "communality": "estimate", "SE": "std_error", "df": "df"
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, -1)

    @property
    def std_error(self) -> Floats:
        """Jackknife standard error of the communality; array (unit,), NaN if a unit is constant without some group."""
        return self._errors(self.communality)[0]

    @property
    def df(self) -> Floats:
        """Degrees of freedom of the standard error; array (unit,), near 1 if one group contributes all the variance."""
        return np.where(np.isnan(self.std_error), np.nan, self._errors(self.communality)[1])

    @property
    def separation(self) -> float:
        """Mean communality of shared minus personal units, in mean standard errors of a unit."""
        return separate(self.split, self.std_error)

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            term (the unit); group in the observed split; estimate (communality ν), std_error and its df.
        """
        columns = {"estimate": self.split.communality, "std_error": self.std_error, "df": self.df}
        return pd.DataFrame({"term": self.split.fit.units, "group": self.split.group} | columns)

    def augment(self, data: Any = None) -> Any:
        """Add the columns of :meth:`tidy` to data about the units, as :meth:`SplitResult.augment` does."""
        return join_columns(self.tidy().rename(columns={"term": "unit"}), data)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the fits without each group.

        Returns
        -------
        DataFrame (1,)
            n_groups (of clients), n_clients; std_error and df (medians over units); separation (of shared and personal
            units, in standard errors); n_factors_low and n_factors_high (fewest and most factors); eigenvalue_gap (at
            the cut, in standard errors); converged (proportion of the fits).
        """
        row = {
            "n_groups": len(self.communality),
            "n_clients": len(self.client_groups),
            "std_error": float(np.nanmedian(self.std_error)),
            "df": float(np.nanmedian(self.df)),
            "separation": self.separation,
            "n_factors_low": int(self.n_factors.min()),
            "n_factors_high": int(self.n_factors.max()),
            "eigenvalue_gap": self._measure_gap(),
            "converged": float(self.converged.mean()),
        }
        return pd.DataFrame([row])

    def _errors(self, estimates: Floats) -> tuple[Floats, Floats]:
        return resampling.jackknife(estimates, len(estimates) - 1)

    def _measure_gap(self) -> float:
        """Return the gap of the eigenvalues at the cut, in standard errors; NaN if it is unknown."""
        factors, std_error = self.split.factors, float(self._errors(self.gap)[0])
        return float(gap(factors.eigenvalues, np.asarray(factors.n_factors))) / std_error if std_error > 0 else np.nan

    def _lines(self) -> list[str]:
        x, group, error = self.glance().iloc[0], self.split.group, self.std_error
        sizes = np.unique(np.bincount(self.client_groups))
        low, high = int(sizes[0]), int(sizes[-1])
        clients = "1 client" if high == 1 else f"{high} clients" if low == high else f"{low} to {high} clients"
        units = ", ".join(f"{int((group == name).sum())} {name}" for name in ("shared", "personal"))
        return [
            f"Jackknife ({x['n_groups']:.0f} groups of {clients}) of a split: {units}",
            (
                f"SE of the communality: median {x['std_error']:.3f}, range {np.nanmin(error):.3f} to "
                f"{np.nanmax(error):.3f} (median df {x['df']:.1f})"
            ),
            f"Factors: {x['n_factors_low']:.0f} to {x['n_factors_high']:.0f}; converged: {100 * x['converged']:.0f}%",
            f"SEs: communality in samples of {x['n_clients']:.0f} clients, not the population's",
        ]

    def cautions(self) -> list[Caution]:
        """Return cautions on dependent clients, factors not identified, a dominating group, and fits not converged."""
        is_clustered = (self.origin or {}).get("arguments", {}).get("clusters") is not None
        cautions, x = [] if is_clustered else super().cautions(), self.glance().iloc[0]
        if x["eigenvalue_gap"] < MIN_SEPARATION:
            text = (
                f"eigenvalues at the cut are {x['eigenvalue_gap']:.1f} SE apart: factors are not identified, and SEs "
                "can be several times too large. Compare fedstat.bootstrap."
            )
            cautions.append(Caution("Factors not identified", text))
        if x["df"] < max(_MIN_DF * x["n_groups"], 1.2):
            text = f"few clients contribute most of the variance (median df {x['df']:.1f}): SEs are imprecise"
            cautions.append(Caution("Few clients dominate", text))
        if (stopped := 1 - x["converged"]) > 0:
            text = f"{100 * stopped:.0f}% of the refits had not converged: SEs are those of this many steps"
            cautions.append(Caution("Refits not converged", text))
        return cautions
