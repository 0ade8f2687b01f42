"""Result of partial pooling: units drawn towards their layer, and the probability that each is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results.base import Caution, Result, UnitStatistics, describe_constant
from fedstat.results.exports import Headings
from fedstat.results.split import POSTERIOR, SplitResult
from fedstat.results.tables import coefficient, count, join_columns, median_and_ends
from fedstat.stats.pooling import Pooled

Floats = NDArray[np.float64]
LIKELY = 0.95
"""Probability from which prints and plots call a unit likely to be shared; default of a split."""


@dataclass(frozen=True, eq=False, repr=False)
class ShrunkenResult(Result):
    """Units drawn towards their layer by empirical Bayes, as ``shrunken`` of an analysis returns them.

    Attributes
    ----------
    fit : IccResult or ComponentsResult
        Analysis of the units, each by itself.
    pooled : Pooled
        Estimates (unit,) on the scale −log(1 − x) of x, ICC2 or reliability; see :func:`fedstat.stats.pooling.pool`.
    margin : float
        A unit is shared if its ICC2 is above, or its reliability below, the margin.
    """

    fit: UnitStatistics
    pooled: Pooled
    margin: float
    statistic_name: ClassVar[str] = "probability"
    _figure: ClassVar[str] = "forest"
    _by: ClassVar[str | None] = "estimate"
    _ends: ClassVar[tuple[str, ...]] = ("estimate", "conf_low", "conf_high")

    @property
    def units(self) -> NDArray[Any]:
        """Names of the units; array (unit,)."""
        return self.fit.units

    @property
    def level(self) -> float:
        """Level of the intervals, that of ``fit``."""
        return float(getattr(self.fit, "level"))  # noqa: B009 - both analyses have one

    @property
    def method(self) -> str:
        """Method of ``fit``."""
        return self.fit.method

    @property
    def n_clients(self) -> int | None:
        """Number of clients."""
        return self.fit.n_clients

    @property
    def agreement(self) -> Floats | None:
        """ICC2 of each unit, not pooled; array (unit,)."""
        return self.fit.agreement

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Constant units of ``fit``; bool array (unit,)."""
        return self.fit.constant

    @property
    def untrained(self) -> NDArray[np.bool_]:
        """Constant units that no client changed since the baseline; bool array (unit,)."""
        return self.fit.untrained

    @property
    def estimate(self) -> Floats:
        """Pooled ICC2 or reliability; array (unit,), NaN for a unit without an interval."""
        return -np.expm1(-self.pooled.estimate)

    @property
    def probability(self) -> Floats:
        """Posterior probability that a unit is shared: ICC2 above, or reliability below, the margin; array (unit,).

        1 for a unit that is identical in all clients, NaN for other units without an interval.
        """
        above = self.pooled.above(-np.log1p(-self.margin))
        values = self.fit.statistic
        identical = values == 1 if self._is_agreement else np.isnan(values)
        return np.where(identical & ~self.constant, 1.0, above if self._is_agreement else 1 - above)

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: :attr:`probability`."""
        return self.probability

    @property
    def event(self) -> str:
        """Event of the probability, such as "ICC2 > 0.5"."""
        return f"{self.fit.statistic_name} {'>' if self._is_agreement else '<'} {self.margin:.4g}"

    @property
    def _is_agreement(self) -> bool:
        return self.fit.statistic_name == "ICC2"

    def split(self, *, prob: float = LIKELY) -> SplitResult:
        """Share the units that are shared with at least a probability.

        Parameters
        ----------
        prob : float in (0, 1)
            Least posterior probability of a shared unit. Other units are personal, which is no evidence that clients
            differ.

        Returns
        -------
        SplitResult
        """
        check.real("prob", prob, low=0, high=1, open_low=True, open_high=True)
        with np.errstate(invalid="ignore"):
            shared = self.probability >= prob
        return SplitResult(np.full(len(shared), np.nan), shared, prob, POSTERIOR, self)

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            unit; estimate (pooled ICC2 or reliability) with conf_low and conf_high; probability (that the unit is
            shared, see :attr:`probability`); icc or reliability (without pooling); shrinkage (B, factor that draws the
            unit's difference from the layer towards 0); limited (True for a unit that moved by half a standard error,
            and no further).
        """
        low, high = (-np.expm1(-end) for end in self.pooled.ends(self.level))
        return pd.DataFrame(
            {
                "unit": self.units,
                "estimate": self.estimate,
                "conf_low": low,
                "conf_high": high,
                "probability": self.probability,
                self._column: self.fit.statistic,
                "shrinkage": self.pooled.shrinkage,
                "limited": self.pooled.is_limited,
            }
        )

    @property
    def _column(self) -> str:
        """Column of the statistic without pooling."""
        return "icc" if self._is_agreement else "reliability"

    def by_unit(self) -> pd.DataFrame:
        """Return the table of :meth:`tidy` with ``term`` for ``unit``, and with icc, to begin a split's table."""
        return self.tidy().rename(columns={"unit": "term"}).assign(icc=self.agreement)

    def augment(self, data: Any = None) -> Any:
        """Add the columns of :meth:`tidy` to data about the units, as :meth:`SplitResult.augment` does."""
        return join_columns(self.tidy(), data)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes prior and units.

        Returns
        -------
        DataFrame (1,)
            n_units, n_pooled (units with an estimate), n_clients; statistic ("ICC2" or "reliability"), margin;
            prior_mean (of the statistic); prior_sd and noise_sd (standard deviation of the units, and root mean squared
            standard error, both of −log(1 − statistic)); shrinkage_median, n_limited (units that moved by half a
            standard error, and no further); n_likely and n_unlikely (units with a probability of at least 0.95, and of
            at most 0.05); level.
        """
        p = self.pooled
        row = {
            "n_units": len(self.units),
            "n_pooled": int((~np.isnan(p.estimate)).sum()),
            "n_clients": self.n_clients,
            "statistic": self.fit.statistic_name,
            "margin": self.margin,
            "prior_mean": float(-np.expm1(-p.prior_mean)),
            "prior_sd": float(np.sqrt(p.prior_variance)),
            "noise_sd": float(np.sqrt(p.noise)),
            "shrinkage_median": float(np.nanmedian(p.shrinkage)),
            "n_limited": int(p.is_limited.sum()),
            "n_likely": int((self.probability >= LIKELY).sum()),
            "n_unlikely": int((self.probability <= 1 - LIKELY).sum()),
            "level": self.level,
        }
        return pd.DataFrame([row])

    def cautions(self) -> list[Caution]:
        """Return the cautions of the analysis."""
        return self.fit.cautions()

    def summary(self, *, rows: int = 12) -> str:
        """Return a report: the print, then the units.

        Parameters
        ----------
        rows : int
            Number of units to print, in descending order of the estimate.
        """
        return f"{self!r}\n\n{self._details(rows)}"

    def _details(self, rows: int = 12) -> str:
        return self._list_units("Units by estimate", self.estimate, rows)

    @property
    def _headings(self) -> Headings:  # type: ignore[override]
        name = self.fit.statistic_name
        return {"unit": "unit", f"pooled {name}": "estimate", "CI": self._ends[1:], f"P({self.event})": "probability",
                "not pooled": self._column}  # fmt: skip

    def _caption(self) -> list[str]:
        return [self._lines()[0], f"{self._ci}: empirical Bayes", "Not pooled: each unit by itself"]

    def _lines(self) -> list[str]:
        x, name = self.glance().iloc[0], self.fit.statistic_name
        head = "Agreement of {} clients on" if self._is_agreement else "Reliability of {} clients' differences on"
        median, least, most = (coefficient(value) for value in median_and_ends(self.estimate))
        low, high = self.pooled.ends(self.level)
        shrinkage, width = x["shrinkage_median"], float(np.nanmedian(np.exp(-low) - np.exp(-high)))
        likely, unlikely = x["n_likely"], x["n_unlikely"]
        between = int((~np.isnan(self.probability)).sum()) - likely - unlikely
        numbers = f">= {LIKELY:g} on {count(likely, 'unit')}, <= {1 - LIKELY:.2g} on {unlikely}, between on {between}"
        lines = [
            f"{head.format(self.n_clients)} {count(len(self.units), 'unit')}, drawn towards their layer",
            f"Prior, by empirical Bayes: mean {name} = {coefficient(x['prior_mean'])}",
            f"  On the scale of -log(1 - {name}): SD of units {x['prior_sd']:.2f}, SE of a unit {x['noise_sd']:.2f}",
            f"Units: pooled {name} median {median}, range {least} to {most}; median shrinkage {shrinkage:.2f}",
            f"  {100 * self.level:g}% CIs: median width {width:.2f}; {x['n_limited']} moved by half an SE, the limit",
            f"P({self.event}): {numbers}",
        ]
        if n := len(self.units) - x["n_pooled"] - int(self.constant.sum()):
            lines.append(f"  not pooled, without an interval: {count(n, 'unit')}")
        return lines + describe_constant(self.units, self.constant, self.untrained)
