"""Agreement of clients on a layer's units, reported in psych's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedstat import _check
from fedstat._later import pd
from fedstat.results.base import Result, line, listing, number
from fedstat.results.joined import beside
from fedstat.results.numbers import coefficient
from fedstat.results.split import SplitResult
from fedstat.stats import split as _split
from fedstat.stats.icc import TYPES, Coefficients, MeanSquares, Type, fdr

Floats = NDArray[np.float64]
Inference = Literal["clients", "F"]
INFERENCE: tuple[Inference, ...] = get_args(Inference)
"""What p values and intervals of agreement take for the sample: clients, or, by F, the weights of a unit."""
HEADLINE: Type = "ICC2"
"""Absolute agreement of single clients, McGraw and Wong's ICC(A,1); :func:`fedstat.icc` says why."""


@dataclass(frozen=True, eq=False, repr=False)
class IccResult(Result):
    """Intraclass correlations of a layer's units over clients, as :func:`fedstat.icc` returns them.

    Attributes
    ----------
    coefficients : Coefficients
        Arrays (unit, type), types ICC1, ICC2, ICC3, ICC1k, ICC2k, ICC3k; NaN for a dead unit.
    layer_coefficients : Coefficients
        Arrays (type,): all weights of all units as targets.
    mean_squares : MeanSquares
        Arrays (unit,): the analysis of variance behind them.
    units : array (unit,)
        Labels of the units.
    level : float
        Confidence level of the intervals.
    inference : {"clients", "F"}
        Behind p values and intervals; :func:`fedstat.icc` says what they mean.
    n_exchanges : int
        Exchanges of units within clients; 0 for F.
    of_change : bool
        Whether a common start was subtracted from the weights.
    replicates : array (replicate, unit, type) or None
        Coefficients of resampled clients; NaN where a replicate drew one client alone.
    layer_replicates : array (replicate, type) or None
    """

    coefficients: Coefficients
    layer_coefficients: Coefficients
    mean_squares: MeanSquares
    units: NDArray[Any]
    level: float
    inference: Inference = "F"
    n_exchanges: int = 0
    of_change: bool = False
    replicates: Floats | None = None
    layer_replicates: Floats | None = None
    method: ClassVar[str] = "icc"
    statistic_name: ClassVar[str] = "ICC2"
    _figure: ClassVar[str] = "forest"

    @property
    def n_clients(self) -> int:
        """Raters."""
        return self.mean_squares.n_clients

    @property
    def n_weights(self) -> int:
        """Targets: weights of a unit."""
        return self.mean_squares.n_weights

    @property
    def agreement(self) -> Floats:
        """ICC2 of each unit, the coefficient that says whether clients agree; array (unit,)."""
        return self.of_type(HEADLINE)

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: :attr:`agreement`."""
        return self.agreement

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Units that have one value throughout, on which nobody can agree or differ; bool array (unit,)."""
        ms = self.mean_squares
        return np.asarray((ms.weights == 0) & (ms.clients == 0) & (ms.residual == 0))

    @cached_property
    def p_fdr(self) -> Floats:
        """P values adjusted over units, type by type, for the false discovery rate; array (unit, type)."""
        return fdr(self.coefficients.p_value)

    @property
    def layer(self) -> pd.DataFrame:
        """The layer as a whole, one row per type; the columns of :meth:`tidy` that are not about units."""
        return self._table(self.layer_coefficients, self.layer_replicates)

    def of_type(self, type: Type) -> Floats:  # noqa: A002  (the word of psych)
        """One coefficient of each unit, array (unit,)."""
        return self.coefficients.icc[:, TYPES.index(_check.choice("type", type, TYPES))]

    def split(self, *, tau: _split.Tau = 0.5) -> SplitResult:
        """Shared units, those on which clients agree: ICC2 at or above the threshold.

        Parameters
        ----------
        tau : float in (0, 1), inf, -inf or Absolute
            As in :func:`fedstat.split`.

        Returns
        -------
        SplitResult
            By agreement on the changes, if a common start was subtracted from the weights.
        """
        return SplitResult(
            communality=np.full(len(self.units), np.nan),
            shared=_split.shared(self.agreement, tau=tau),
            threshold=float(_split.threshold(self.agreement, tau)),
            tau=tau,
            fit=self,
        )

    def by_unit(self) -> pd.DataFrame:
        """As :meth:`augment`, with the units under ``term``: what a split's table begins with."""
        table: pd.DataFrame = self.augment()
        return table.rename(columns={"unit": "term"})

    def tidy(self) -> pd.DataFrame:
        """One row per unit and type: unit, type, icc, correlation, p_value, conf_low, conf_high, p_fdr.

        ``correlation`` is the mean correlation of the unit's weights over pairs of clients, which the test is about;
        F has ``statistic``, ``df1`` and ``df2`` instead. P values are the same for all types, where they are not by F.
        With replicates also std_error, boot_low and boot_high: standard deviation and percentiles of the coefficient
        over resampled clients. Forms with k have no std_error where a replicate is minus infinity.
        """
        table = self._table(self.coefficients, self.replicates)
        table.insert(0, "unit", np.repeat(self.units, len(TYPES)))
        table.insert(list(table.columns).index("conf_high") + 1, "p_fdr", self.p_fdr.ravel())
        return table

    def glance(self) -> pd.DataFrame:
        """One row: sizes, ICC2 over units (median, least, most), counts; ICC2 of the layer, its interval and p value.

        ``n_agreeing`` counts the units whose adjusted p value is at most 1 − level.
        """
        icc, t = self.agreement, TYPES.index(HEADLINE)
        known = icc[~np.isnan(icc)]
        least, median, most = np.quantile(known, [0, 0.5, 1]) if len(known) else [np.nan] * 3
        row = {
            "d": len(self.units),
            "n_clients": self.n_clients,
            "n_weights": self.n_weights,
            "of_change": self.of_change,
            "type": HEADLINE,
            "icc_median": float(median),
            "icc_min": float(least),
            "icc_max": float(most),
            "inference": self.inference,
            "n_exchanges": self.n_exchanges,
            "n_agreeing": self.n_agreeing,
            "n_undefined": int(np.isnan(icc).sum()),
            "n_dead": int(self.dead.sum()),
            "layer_icc": float(self.layer_coefficients.icc[t]),
            "layer_low": float(self.layer_coefficients.conf_low[t]),
            "layer_high": float(self.layer_coefficients.conf_high[t]),
            "layer_p_value": float(self.layer_coefficients.p_value[t]),
            "level": self.level,
            "replicates": 0 if self.replicates is None else len(self.replicates),
        }
        return pd.DataFrame([row])

    def augment(self, data: Any = None) -> Any:
        """One row per unit: its ICC2 with interval, and where the variance of its weights lies.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            To put these columns beside, as :meth:`SplitResult.augment` does.

        Returns
        -------
        DataFrame (unit) or Dataset
            unit, icc, conf_low, conf_high, p_fdr; mean squares ms_weights, ms_clients and ms_residual; the components
            of variance that they estimate by the method of moments, var_weights (common to all clients), var_clients
            (offsets of whole clients) and var_residual (the first two may be negative); dead.
        """
        c, ms, t = self.coefficients, self.mean_squares, TYPES.index(HEADLINE)
        by = (2 * ms.exponent).astype(int)  # what float64 cannot hold is infinite
        squares = {"weights": ms.weights, "clients": ms.clients, "residual": ms.residual}
        components = {
            "weights": (ms.weights - ms.residual) / ms.n_clients,
            "clients": (ms.clients - ms.residual) / ms.n_weights,
            "residual": ms.residual,
        }
        columns = {"icc": c.icc, "conf_low": c.conf_low, "conf_high": c.conf_high, "p_fdr": self.p_fdr}
        table = pd.DataFrame(
            {"unit": self.units}
            | {name: values[:, t] for name, values in columns.items()}
            | {f"ms_{name}": _times(values, by) for name, values in squares.items()}
            | {f"var_{name}": _times(values, by) for name, values in components.items()}
            | {"dead": self.dead}
        )
        return beside(table, data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.augment()[["unit", "icc", "conf_low", "conf_high", "p_fdr", "dead"]], "icc"

    def summary(self, *, rows: int = 12) -> str:
        """Report in the words of R's psych: the six coefficients of the layer, then the units.

        Parameters
        ----------
        rows : int
            Number of units to print, by descending ICC2.
        """
        n = len(self.units) * self.n_weights
        cut = "" if rows >= len(self.units) else f" (the {rows} highest of {len(self.units)} by {HEADLINE})"
        units = self.augment().sort_values("icc", ascending=False).head(rows).drop(columns="dead")
        return "\n".join(
            [
                repr(self), "",
                f"Layer: targets are its {n} weights, raters {self.n_clients} clients",
                self.layer.to_string(index=False, float_format="%.3g"), "",
                f"Units{cut}",
                units.to_string(index=False, float_format="%.3g"),
            ]
        )  # fmt: skip

    @property
    def n_agreeing(self) -> int:
        """Units whose test rejects at a false discovery rate of 1 − level."""
        return int((self.p_fdr[:, TYPES.index(HEADLINE)] <= 1 - self.level + 1e-12).sum())

    @property
    def finding(self) -> str:
        """Words for what the test says of a unit: "clients agree more than on units paired at random", say."""
        by_f = "agreement is above 0 by F"
        return "clients agree more than on units paired at random" if self.inference == "clients" else by_f

    def __repr__(self) -> str:
        x, icc = self.glance().iloc[0], self.agreement
        of = "changes from the start" if self.of_change else "weights"
        order = np.argsort(-icc, kind="stable")[: int((~np.isnan(icc)).sum())]
        named = [f"{self.units[j]} {coefficient(icc[j])}" for j in order]
        lines = [
            f"Agreement of {self.n_clients} clients on the {of} of {len(icc)} units, {self.n_weights} weights per unit",
            f"  layer: {HEADLINE} {number(float(x['layer_icc']), 2)}{self._interval()}",
            *self._labels(float(x["layer_p_value"])),
            f"  units: {HEADLINE} median {number(float(x['icc_median']), 2)}, {self._left_out()}",
            f"         {self._found()}",
            listing("  highest:", named[:8]),
            listing("  lowest: ", named[: -min(9, len(named) + 1) : -1]),
        ]
        ms = self.mean_squares
        if n_equal := int(((ms.clients == 0) & (ms.residual == 0) & ~self.dead).sum()):
            lines.append(
                f"  {n_equal} units are equal in all clients, as averaging leaves them: no evidence of agreement"
            )
        if self.dead.any():
            lines.append(listing("  dead:", (str(u) for u in self.units[self.dead])))
        if (unclear := np.isnan(icc) & ~self.dead).any():
            lines.append(listing("  undefined (no variance but between clients):", map(str, self.units[unclear])))
        return "\n".join(map(line, lines))

    def _interval(self) -> str:
        """Interval of the layer's coefficient, and what it rests on."""
        drawn = self.replicates is not None
        row = self.layer.iloc[TYPES.index(HEADLINE)]
        low, high = (float(row[f"{'boot' if drawn else 'conf'}_{end}"]) for end in ("low", "high"))
        if np.isnan(low):
            return "; no interval: it leaves out a client, of at least 3" if self.n_clients < 3 else ""
        by = (
            "F, as if weights were independent"
            if self.inference == "F"
            else "jackknife, for clients that vary as these do"
        )
        by = f"{len(self.replicates)} bootstrap samples of clients" if self.replicates is not None else by
        return f", {100 * self.level:g} % from {low:.2f} to {high:.2f} ({by})"

    def _labels(self, p: float) -> list[str]:
        if self.inference == "F" or np.isnan(p):
            return []
        by = f"{self.n_exchanges} exchanges of units, taken to be alike but for their size"
        return [f"         test of labels: p = {p:.2g} by {by}"]

    def _found(self) -> str:
        if np.isnan(self.p_fdr[:, TYPES.index(HEADLINE)]).all():
            return "no test: it needs 2 units that vary in 2 clients"
        return f"{self.finding}: on {self.n_agreeing}, at a false discovery rate of {1 - self.level:.2g}"

    def _left_out(self) -> str:
        """How many units are dead, and how many others have no p value."""
        untested = int((np.isnan(self.p_fdr[:, TYPES.index(HEADLINE)]) & ~self.dead).sum())
        return f"{self.dead.sum()} dead" + (f", {untested} not tested" if untested else "")

    def _table(self, c: Coefficients, replicates: Floats | None) -> pd.DataFrame:
        shape = c.icc.shape
        columns: dict[str, Any] = {"type": np.broadcast_to(np.array(TYPES, dtype=object), shape)}
        known = {name: value for name, value in c._asdict().items() if value is not None}
        columns |= {name: np.broadcast_to(value, shape) for name, value in known.items()}
        if replicates is not None:
            columns |= _percentiles(replicates, self.level)
        table = pd.DataFrame({name: np.ravel(value) for name, value in columns.items()})
        return table if self.inference == "F" else table.rename(columns={"statistic": "correlation"})


def _times(values: Floats, power: NDArray[np.int_]) -> Floats:
    with np.errstate(over="ignore"):
        return np.ldexp(values, power)


def _percentiles(replicates: Floats, level: float) -> dict[str, Floats]:
    """Standard deviation and percentiles over the replicates that have a pair of clients."""
    drawn = replicates[~np.isnan(replicates).all(axis=tuple(range(1, replicates.ndim)))]
    empty = np.isnan(drawn).any(axis=0)  # nothing varies: NaN throughout
    filled = np.where(empty, 0, drawn)
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(filled, tails, axis=0, method="inverted_cdf")  # a replicate may be minus infinity
    with np.errstate(invalid="ignore"):
        spread = filled.std(axis=0, ddof=1)
    named = {"std_error": spread, "boot_low": low, "boot_high": high}
    return {name: np.where(empty, np.nan, value) for name, value in named.items()}
