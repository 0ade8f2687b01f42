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
from fedstat.results.uncertainty import MIN_SEPARATION, SAMPLED, over_samples, separate
from fedstat.stats import Claim, resampling
from fedstat.stats.factor import gap

Floats = NDArray[np.float64]
_MIN_DF = 0.15  # least degrees of freedom per block; clients alike have about 0.35, a client that dominates 1 in all


@dataclass(frozen=True, eq=False, repr=False)
class JackknifeResult(Result):
    """A split and the communalities without each block of clients, as :func:`fedstat.jackknife` returns it.

    Attributes
    ----------
    split : SplitResult
        Observed split, of all clients.
    client_blocks : int array (client,)
        Number of each client's block: 0, 1, ... With groups of clients, a block is a group or a part of one.
    communality : array (block, unit)
        Communality ν without each block.
    n_factors : int array (block,)
        Number of factors without each block.
    converged : bool array (block,)
        True if the fit without the block converged.
    gap : array (block,)
        Difference of the eigenvalues of R at the cut, the last factor's and the next; see
        :func:`fedstat.stats.factor.gap`.
    claim : {"these groups", "new groups"} or None
        With groups of clients, what standard errors refer to: further clients of these groups, or further groups.
    block_groups : int array (block,) or None
        Group of each block, for a claim about these groups.
    """

    split: SplitResult
    client_blocks: NDArray[np.int64]
    communality: Floats
    n_factors: NDArray[np.int64]
    converged: NDArray[np.bool_]
    gap: Floats
    claim: Claim | None = None
    block_groups: NDArray[np.int64] | None = None
    _figure: ClassVar[str] = "communality"
    _by: ClassVar[str | None] = "estimate"
    _headings: ClassVar[Headings] = {
        "unit": "term", "group": "group", "communality": "estimate", "SE": "std_error", "df": "df"
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, -1)

    @property
    def std_error(self) -> Floats:
        """Jackknife standard error of the communality; array (unit,), NaN if a unit is constant without some block."""
        return self._errors(self.communality)[0]

    @property
    def df(self) -> Floats:
        """Degrees of freedom of the standard error; array (unit,), near 1 if one block contributes all the variance."""
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
        """Return one row that summarizes the fits without each block of clients.

        Returns
        -------
        DataFrame (1,)
            n_blocks (of clients), n_clients; claim (None without groups); std_error and df (medians over units);
            separation (of shared and personal units, in standard errors); n_factors_low and n_factors_high (fewest and
            most factors); eigenvalue_gap (at the cut, in standard errors); converged (proportion of the fits).
        """
        row = {
            "n_blocks": len(self.communality),
            "n_clients": len(self.client_blocks),
            "claim": self.claim,
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
        n_means = 1 if self.block_groups is None else int(self.block_groups.max()) + 1
        return resampling.jackknife(estimates, len(estimates) - n_means, self.block_groups)

    def _measure_gap(self) -> float:
        """Return the gap of the eigenvalues at the cut, in standard errors; NaN if it is unknown."""
        factors, std_error = self.split.factors, float(self._errors(self.gap)[0])
        return float(gap(factors.eigenvalues, np.asarray(factors.n_factors))) / std_error if std_error > 0 else np.nan

    def _lines(self) -> list[str]:
        x, group, error = self.glance().iloc[0], self.split.group, self.std_error
        sizes = np.unique(np.bincount(self.client_blocks))
        low, high = int(sizes[0]), int(sizes[-1])
        clients = "1 client" if high == 1 else f"{high} clients" if low == high else f"{low} to {high} clients"
        blocks = "groups" if self.claim == "new groups" else "blocks"
        samples = f"{x['n_blocks'] if self.claim == 'new groups' else x['n_clients']:.0f} {SAMPLED[self.claim]}"
        units = ", ".join(f"{int((group == name).sum())} {name}" for name in ("shared", "personal"))
        return [
            f"Jackknife ({x['n_blocks']:.0f} {blocks} of {clients}) of a split: {units}",
            (
                f"SE of the communality: median {x['std_error']:.3f}, range {np.nanmin(error):.3f} to "
                f"{np.nanmax(error):.3f} (median df {x['df']:.1f})"
            ),
            f"Factors: {x['n_factors_low']:.0f} to {x['n_factors_high']:.0f}; converged: {100 * x['converged']:.0f}%",
            f"SEs: communality in samples of {samples}, not the population's",
        ]

    def cautions(self) -> list[Caution]:
        """Return cautions on dependent clients, factors not identified, a dominating block, and fits not converged."""
        cautions, x = over_samples(super().cautions(), self.claim), self.glance().iloc[0]
        if x["eigenvalue_gap"] < MIN_SEPARATION:
            text = (
                f"eigenvalues at the cut are {x['eigenvalue_gap']:.1f} SE apart: factors are not identified, and SEs "
                "can be several times too large. Compare fedstat.bootstrap."
            )
            cautions.append(Caution("Factors not identified", text))
        if x["df"] < max(_MIN_DF * x["n_blocks"], 1.2):
            text = f"few clients contribute most of the variance (median df {x['df']:.1f}): SEs are imprecise"
            cautions.append(Caution("Few clients dominate", text))
        if (stopped := 1 - x["converged"]) > 0:
            text = f"{100 * stopped:.0f}% of the refits had not converged: SEs are those of this many steps"
            cautions.append(Caution("Refits not converged", text))
        return cautions
