"""Agreement of clients on a layer's units, reported in psych's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results.base import TERMINAL, Caution, Result, constant, extremes, listing
from fedstat.results.split import SplitResult
from fedstat.results.tables import beside, coefficient, count, median_and_ends, p_equals
from fedstat.stats import split as _split
from fedstat.stats.clustering import equal_objects, separate_groups
from fedstat.stats.icc import TYPES, Coefficients, MeanSquares, Type, fdr
from fedstat.stats.icc_resampling import Influence
from fedstat.stats.icc_tests import MOST_ENUMERATED, AgreementTest
from fedstat.stats.resampling import LEAST_CLIENTS

Floats = NDArray[np.float64]
Inference = Literal["sign-flip", "permutation", "F"]
INFERENCE: tuple[Inference, ...] = get_args(Inference)
"""Tests of agreement: of clients, by flipping their signs or permuting their units; F takes weights for the sample."""
HEADLINE: Type = "ICC2"
"""Absolute agreement of single clients, McGraw and Wong's ICC(A,1); :func:`fedstat.icc` says why."""
# Clients vary in size where they count for fewer than this proportion of their number; simulations/inference/agreement.
_UNEQUAL = 0.7
_NEAR_1 = 0.9  # from here on a common initialization is likely


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
    inference : {"sign-flip", "permutation", "F"}
        Behind p values; :func:`fedstat.icc` explains them.
    test : AgreementTest or None
        The test over clients, with the common profile of the units; None for F.
    influence : Influence or None
        What single clients contribute; None for F.
    clients : array (client,) or None
        Labels of the clients.
    of_change : bool
        Whether a baseline was subtracted from the weights.
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
    test: AgreementTest | None = None
    influence: Influence | None = None
    clients: NDArray[Any] | None = None
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
    def p_adjusted(self) -> Floats:
        """P values adjusted over units, type by type, for the false discovery rate; array (unit, type)."""
        return fdr(self.coefficients.p_value)

    @property
    def layer(self) -> pd.DataFrame:
        """The layer as a whole, one row per type; the columns of :meth:`tidy` that are not about units."""
        return self._table(self.layer_coefficients, self.layer_replicates)

    def of_type(self, type: Type) -> Floats:  # noqa: A002  (the word of psych)
        """One coefficient of each unit, array (unit,)."""
        return self.coefficients.icc[:, TYPES.index(check.choice("type", type, TYPES))]

    def split(self, *, tau: _split.Tau = 0.5) -> SplitResult:
        """Shared units, those on which clients agree: ICC2 at or above the threshold.

        Parameters
        ----------
        tau : float in (0, 1), inf, -inf or Absolute
            As in :func:`fedstat.split`.

        Returns
        -------
        SplitResult
            By agreement on the changes, if a baseline was subtracted from the weights.
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
        """One row per unit and type: unit, type, icc, statistic, p_value, conf_low, conf_high, p_adjusted.

        ``statistic`` and ``p_value`` are those of the test over clients, the same for all types; for F they differ by
        type, and ``df1`` and ``df2`` stand between them. With replicates also std_error, boot_low and boot_high:
        standard deviation and percentiles of the coefficient over resampled clients. Forms with k have no std_error
        where a replicate is minus infinity.
        """
        table = self._table(self.coefficients, self.replicates)
        table.insert(0, "unit", np.repeat(self.units, len(TYPES)))
        table.insert(list(table.columns).index("conf_high") + 1, "p_adjusted", self.p_adjusted.ravel())
        return table

    def glance(self) -> pd.DataFrame:
        """One row: sizes, ICC2 over units (median, least, most), counts; ICC2 of the layer, its interval and p value.

        ``n_agreeing`` counts the units whose adjusted p value is at most 1 − level. ``n_permutations`` are the sign
        flips or permutations behind ``layer_p_value``. ``profile_proportion`` is the proportion of the squared weights
        that all units have in common, and ``n_effective_clients`` is 1 / Σ s² of the clients' shares s of the squared
        deviations.
        """
        icc, t = self.agreement, TYPES.index(HEADLINE)
        median, least, most = median_and_ends(icc)
        row = {
            "d": len(self.units),
            "n_clients": self.n_clients,
            "n_weights": self.n_weights,
            "of_change": self.of_change,
            "type": HEADLINE,
            "icc_median": median,
            "icc_min": least,
            "icc_max": most,
            "inference": self.inference,
            "n_permutations": 0 if self.test is None else self.test.n_patterns,
            "n_agreeing": self.n_agreeing,
            "n_undefined": int(np.isnan(icc).sum()),
            "n_dead": int(self.dead.sum()),
            "layer_icc": float(self.layer_coefficients.icc[t]),
            "layer_low": float(self.layer_coefficients.conf_low[t]),
            "layer_high": float(self.layer_coefficients.conf_high[t]),
            "layer_p_value": float(self.layer_coefficients.p_value[t]),
            "profile_proportion": np.nan if self.test is None else self.test.profile_proportion,
            "profile_p_value": np.nan if self.test is None else self.test.profile_p_value,
            "n_effective_clients": np.nan if self.influence is None else self.influence.n_effective,
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
            unit, icc, conf_low, conf_high, p_adjusted; mean squares ms_weights, ms_clients and ms_residual; the
            components of variance that they estimate by the method of moments, var_weights (common to all clients),
            var_clients (offsets of whole clients) and var_residual (the first two may be negative); dead.
        """
        c, ms, t = self.coefficients, self.mean_squares, TYPES.index(HEADLINE)
        by = (2 * ms.exponent).astype(int)  # what float64 cannot hold is infinite
        squares = {"weights": ms.weights, "clients": ms.clients, "residual": ms.residual}
        components = {
            "weights": (ms.weights - ms.residual) / ms.n_clients,
            "clients": (ms.clients - ms.residual) / ms.n_weights,
            "residual": ms.residual,
        }
        columns = {"icc": c.icc, "conf_low": c.conf_low, "conf_high": c.conf_high, "p_adjusted": self.p_adjusted}
        table = pd.DataFrame(
            {"unit": self.units}
            | {name: values[:, t] for name, values in columns.items()}
            | {f"ms_{name}": _times(values, by) for name, values in squares.items()}
            | {f"var_{name}": _times(values, by) for name, values in components.items()}
            | {"dead": self.dead}
        )
        return beside(table, data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.augment()[["unit", "icc", "conf_low", "conf_high", "p_adjusted", "dead"]], "icc"

    def summary(self, *, rows: int = 12) -> str:
        """Report in the words of R's psych: the six coefficients of the layer, then the units.

        Parameters
        ----------
        rows : int
            Number of units to print, by descending ICC2.
        """
        return f"{self!r}\n\n{self._details(rows)}"

    def _details(self, rows: int = 12) -> str:
        n = len(self.units) * self.n_weights
        cut = "" if rows >= len(self.units) else f" (the {rows} highest of {len(self.units)} by {HEADLINE})"
        shown = ["unit", "icc", "conf_low", "conf_high", "p_adjusted"]
        units = self.augment().sort_values("icc", ascending=False).head(rows)[shown]
        return "\n".join(
            [
                f"Layer: targets are its {n} weights, raters {self.n_clients} clients",
                self.layer.to_string(index=False, float_format="%.3g"), "",
                f"Units{cut}",
                units.to_string(index=False, float_format="%.3g"),
            ]
        )  # fmt: skip

    @property
    def n_agreeing(self) -> int:
        """Units whose test rejects at a false discovery rate of 1 − level."""
        return int((self.p_adjusted[:, TYPES.index(HEADLINE)] <= 1 - self.level + 1e-12).sum())

    @property
    def finding(self) -> str:
        """What a rejected hypothesis of a unit says: "clients agree (sign-flip test, FDR 0.05)", say."""
        return f"clients agree ({self.inference} test, FDR {1 - self.level:.2g})"

    def cautions(self) -> list[Caution]:
        """Return what the intervals and tests of these clients do not allow for; mostly nothing."""
        few = self.influence is None or self.test is None or self.n_clients < 3
        found = []
        if not few:
            found += [Caution("Clients of unlike size", text) for text in self._of_sizes()]
            found += [Caution("Clients not independent", text) for text in self._of_likeness()]
        apart = self.agreement[~self._identical & ~np.isnan(self.agreement)]
        if not self.of_change and len(apart) and np.median(apart) >= _NEAR_1:
            text = f"{HEADLINE} near 1 may come from common initial parameters; baseline= subtracts them"
            found.append(Caution("Common initial parameters", text))
        return found

    def _of_sizes(self) -> Iterator[str]:
        """Caution on clients of unlike size."""
        share, without = cast(Influence, self.influence)
        top, n = int(np.argmax(share)), cast(Influence, self.influence).n_effective
        if n < _UNEQUAL * self.n_clients:
            one = f"client {self._names[top]} holds {100 * share[top]:.0f}% of the squared deviations"
            sizes = f"clients vary in size (effective number {n:.1f} of {self.n_clients}), so that CIs may be too short"
            yield f"{sizes}; {one} (without it, {HEADLINE} = {coefficient(without[top])})"

    def _of_likeness(self) -> Iterator[str]:
        """Caution on clients that are copies of each other, or fall into groups."""
        similarity, but = cast(AgreementTest, self.test).similarity, "but CIs and tests assume independent clients"
        if len(similarity) < self.n_clients or np.isnan(similarity).any():
            return
        if len(copies := equal_objects(similarity)):
            a, b = self._names[copies[0]]
            pairs = f"{len(copies)} pairs of clients ({a} and {b}, ...)"
            yield f"{f'clients {a} and {b}' if len(copies) == 1 else pairs} have equal weights, {but}"
        elif (groups := separate_groups(similarity)) is not None:
            sizes = ", ".join(map(str, sorted(np.bincount(groups).tolist(), reverse=True)))
            yield f"clients fall into {groups.max() + 1} groups (sizes {sizes}), {but}; see fedstat.client_clusters"

    @property
    def _names(self) -> NDArray[Any]:
        return np.arange(self.n_clients) if self.clients is None else self.clients

    @property
    def _identical(self) -> NDArray[np.bool_]:
        """Units that are equal in all clients, and not constant."""
        ms = self.mean_squares
        return np.asarray((ms.clients == 0) & (ms.residual == 0) & ~self.dead)

    def _lines(self) -> list[str]:
        x, icc = self.glance().iloc[0], self.agreement
        size = f"{count(len(icc), 'unit')} ({HEADLINE} = ICC(A,1)), {self.n_weights} weights per unit"
        median, least, most = (coefficient(x[f"icc_{name}"]) for name in ("median", "min", "max"))
        lines = [
            f"Agreement of {self.n_clients} clients on {size}",
            *["Weights minus the common initial parameters"] * self.of_change,
            f"Layer: {HEADLINE} = {coefficient(float(x['layer_icc']))}{self._interval()}",
            *self._of_layer(),
            f"Units: {HEADLINE} median {median}, range {least} to {most}; {self.dead.sum()} constant{self._untested()}",
            f"  {self._found()}",
            *extremes(icc, self.units),
        ]
        if n := int(self._identical.sum()):
            units = f"{count(n, 'unit')} {'is' if n == 1 else 'are'}"
            lines.append(f"{units} identical in all clients (averaged, or never trained): {HEADLINE} = 1")
        lines += constant(self.units, self.dead)
        if (unclear := np.isnan(icc) & ~self.dead).any():
            why = "clients differ in means only"
            lines.append(listing(f"  undefined ({why}):", map(str, self.units[unclear]), TERMINAL))
        return lines

    def _interval(self) -> str:
        """Interval of the layer's coefficient, and what it rests on."""
        drawn = self.replicates is not None
        row = self.layer.iloc[TYPES.index(HEADLINE)]
        low, high = (float(row[f"{'boot' if drawn else 'conf'}_{end}"]) for end in ("low", "high"))
        if np.isnan(low):
            return "; no CI: the jackknife needs at least 3 clients" if self.n_clients < 3 else ""
        by = "F; assumes independent weights" if self.inference == "F" else "jackknife over clients"
        by = f"{len(self.replicates)} bootstrap samples of clients" if self.replicates is not None else by
        return f", {100 * self.level:g}% CI [{low:.2f}, {high:.2f}] ({by})"

    def _of_layer(self) -> list[str]:
        """Test of the layer, and of the profile that its units have in common."""
        p, t = float(self.layer_coefficients.p_value[TYPES.index(HEADLINE)]), self.test
        if t is None or np.isnan(p):
            return []
        least = 1 / (1 + t.n_patterns)
        if self.inference == "permutation":
            by = f"{t.n_patterns} permutations; smallest possible {p_equals(least)}"
            h0 = "units are exchangeable within clients (assumes equal covariances)"
            return [f"  Permutation test, H0: {h0}: {p_equals(p)} ({by})"]
        if least > 1 - self.level:
            return [f"  {self.n_clients} clients: the smallest possible p of the layer is {least:.3f}: no conclusion"]
        flips = f"{t.n_patterns} flips" if self.n_clients > MOST_ENUMERATED else f"all {t.n_patterns} flips"
        profile = not np.isnan(t.profile_proportion)
        beyond = " beyond the profile that all units have in common" if profile else ""
        lines = [f"  Sign-flip test over clients, H0: no agreement on units{beyond}: {p_equals(p)} ({flips})"]
        if profile:
            size = f"{max(0, 100 * t.profile_proportion):.0f}% of the variance"
            lines.append(f"  Common profile of the units: {size}, {p_equals(t.profile_p_value)} (same test)")
        return lines

    def _found(self) -> str:
        tested = int((~np.isnan(self.p_adjusted[:, TYPES.index(HEADLINE)])).sum())
        if not tested:
            why = "2 units that vary in 2 clients" if self.inference == "permutation" else f"{LEAST_CLIENTS} clients"
            return f"no test: it needs at least {why}"
        n = self.n_agreeing
        return f"{n} of {tested}: {self.finding}; {tested - n}: no evidence"

    def _untested(self) -> str:
        tested = ~np.isnan(self.p_adjusted[:, TYPES.index(HEADLINE)])
        return f", {(~tested & ~self.dead).sum()} not tested" if tested.any() else ""

    def _table(self, c: Coefficients, replicates: Floats | None) -> pd.DataFrame:
        shape = c.icc.shape
        columns: dict[str, Any] = {"type": np.broadcast_to(np.array(TYPES, dtype=object), shape)}
        known = {name: value for name, value in c._asdict().items() if value is not None}
        columns |= {name: np.broadcast_to(value, shape) for name, value in known.items()}
        if replicates is not None:
            columns |= _percentiles(replicates, self.level)
        return pd.DataFrame({name: np.ravel(value) for name, value in columns.items()})


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
