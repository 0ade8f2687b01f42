"""Result on the agreement of clients on a layer's units, in the terms of R's psych."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import pd
from fedstat.results.base import (
    Caution,
    Result,
    count_constant,
    describe_constant,
    extremes,
    listing,
)
from fedstat.results.exports import Headings
from fedstat.results.pooling import ShrunkenResult
from fedstat.results.split import SplitResult
from fedstat.results.tables import coefficient, count, join_columns, median_and_ends, p_equals
from fedstat.stats import LEAST_VARYING
from fedstat.stats import split as _split
from fedstat.stats.clustering import equal_objects, separate_groups
from fedstat.stats.icc import TYPES, Coefficients, MeanSquares, Type, fdr
from fedstat.stats.icc_resampling import Errors, Influence, describe_samples
from fedstat.stats.icc_tests import MOST_ENUMERATED, AgreementTest
from fedstat.stats.pooling import pool

Floats = NDArray[np.float64]
Inference = Literal["sign-flip", "permutation", "F"]
INFERENCE: tuple[Inference, ...] = get_args(Inference)
"""Tests of agreement: by flipped signs of clients, by permuted units within clients, or F tests over weights."""
HEADLINE: Type = "ICC2"
"""Absolute agreement of single clients, McGraw and Wong's ICC(A,1); :func:`fedstat.icc` explains the choice."""
# Sizes matter if the effective number of clients is below the first proportion of the actual number, and the layer's
# ICC2 at least the second; intervals of smaller ICC2 cover whatever the sizes. See simulations/inference/agreement.
_UNEQUAL, _AFFECTED = 0.7, 0.2
# An ICC2 from here on suggests common initial parameters; below the other, known ones explain next to nothing.
_NEAR_1, _LITTLE = 0.9, 0.1
_WIDEST = 0.5  # largest interval of an estimated unit, as a proportion of the range of ICC2
ONE_DIRECTION, NO_EVIDENCE, NOT_TESTED = "one direction", "no evidence", "not tested"
_CALLED = f"most clients deviate in {ONE_DIRECTION}"
_PATTERNS = {"sign-flip": "flips", "permutation": "permutations"}
_REASONS = {
    "averaged": "averaged",
    "never averaged": "never averaged; training did not move clients apart",
    "local training": "before averaging; local training did not move clients apart",
    "never trained": "never trained, equal to the initial parameters",
    "": "averaged, or never trained",
}
_CLASSES = (
    "units are classes: the many clients without samples of a class move its unit one way, the few with samples far "
    "the other way, so that most deviate in one direction even without agreement on average, and CIs may be too short"
)
NOT_TRAINED = "not trained"
"""Reason why a unit is constant: no client changed it since the baseline."""


@dataclass(frozen=True, eq=False, repr=False)
class IccResult(Result):
    """Intraclass correlations of a layer's units over clients, as :func:`fedstat.icc` returns them.

    The test concludes that most clients deviate in one direction; ICC2 and its interval say how far clients agree.

    Attributes
    ----------
    coefficients : Coefficients
        Arrays (unit, type) for the types ICC1, ICC2, ICC3, ICC1k, ICC2k, ICC3k. NaN for a constant unit.
    layer_coefficients : Coefficients
        Arrays (type,) for the layer, in which the weights of all units are the targets.
    mean_squares : MeanSquares
        Arrays (unit,) of the analysis of variance behind the coefficients.
    units : array (unit,)
        Names of the units.
    level : float
        Confidence level of the intervals.
    inference : {"sign-flip", "permutation", "F"}
        Test behind the p values; see :func:`fedstat.icc`.
    test : AgreementTest or None
        Result of the test over clients, with the common profile of the units. None for F.
    influence : Influence or None
        Contribution of each client. None for F.
    clients : array (client,) or None
        Names of the clients.
    baseline_subtracted : bool
        True if a baseline was subtracted from the weights.
    replicates : array (bootstrap sample, unit, type) or None
        Coefficients of bootstrap samples of clients. NaN for a sample of one client, drawn repeatedly.
    layer_replicates : array (bootstrap sample, type) or None
        Coefficients of the layer in the bootstrap samples.
    reasons : str array (unit,) or None
        Reason why a unit would be identical in all clients, as the run tells: "averaged" (the unit is shared), "never
        averaged" (clients uploaded nothing), "local training" (the weights are those before averaging), "never
        trained" (the unit equals the stored initial parameters), "" (unknown). None if the weights are of no run.
    common_start : {"", "initial", "rounds"} or None
        What a common start does to the weights: "" nothing, as they are changes over one round since values that
        clients had in common; "initial": clients started from initial parameters that are part of the weights;
        "rounds": the weights are changes over several rounds of local training since common values. None: unknown.
    skewed_classes : bool
        True if units are classes, as in the output layer of a run, of which some clients have no training samples.
    errors : Errors or None
        Standard errors of −log(1 − ICC2) with degrees of freedom, arrays (unit,). None for F and for two clients.
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
    baseline_subtracted: bool = False
    replicates: Floats | None = None
    layer_replicates: Floats | None = None
    reasons: NDArray[np.str_] | None = None
    common_start: str | None = None
    skewed_classes: bool = False
    errors: Errors | None = None
    method: ClassVar[str] = "icc"
    statistic_name: ClassVar[str] = "ICC2"
    _figure: ClassVar[str] = "forest"

    @property
    def n_clients(self) -> int:
        """Number of clients, the raters."""
        return self.mean_squares.n_clients

    @property
    def n_weights(self) -> int:
        """Number of weights of a unit, the targets."""
        return self.mean_squares.n_weights

    @property
    def agreement(self) -> Floats:
        """ICC2 of each unit, which measures how far clients agree; array (unit,)."""
        return self.of_type(HEADLINE)

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: :attr:`agreement`."""
        return self.agreement

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Constant units: all weights of all clients are equal, so that ICC2 is undefined; bool array (unit,)."""
        ms = self.mean_squares
        return np.asarray((ms.weights == 0) & (ms.clients == 0) & (ms.residual == 0))

    @property
    def untrained(self) -> NDArray[np.bool_]:
        """Constant units that no client changed since the baseline; bool array (unit,)."""
        reasons = np.full(len(self.units), "") if self.reasons is None else self.reasons
        return np.asarray(self.constant & (reasons == NOT_TRAINED))

    @cached_property
    def p_adjusted(self) -> Floats:
        """P values adjusted over units for the false discovery rate, separately by type; array (unit, type)."""
        return fdr(self.coefficients.p_value)

    @property
    def conclusion(self) -> NDArray[np.str_]:
        """Conclusion of the test of each unit: "one direction", "no evidence" or "not tested"; array (unit,).

        "one direction": most clients deviate from the common profile in one direction. How far clients agree on
        average, the few clients that deviate in other directions included, is what ICC2 and its interval say.
        """
        return self._conclusions[:, TYPES.index(HEADLINE)]

    @property
    def _conclusions(self) -> NDArray[np.str_]:
        """Conclusions by type; array (unit, type)."""
        p = self.p_adjusted
        return np.where(np.isnan(p), NOT_TESTED, np.where(p <= 1 - self.level + 1e-12, ONE_DIRECTION, NO_EVIDENCE))

    @property
    def estimated(self) -> NDArray[np.bool_]:
        """True for units whose interval spans at most half of [−1/(n − 1), 1], the range of ICC2; bool array (unit,).

        n is the number of clients. The interval is that of the bootstrap, if there are bootstrap samples.
        """
        return self._estimated[:, TYPES.index(HEADLINE)]

    @property
    def _estimated(self) -> NDArray[np.bool_]:
        """True where a unit is estimated; types with k follow the types without; bool array (unit, type)."""
        low, high = self._limits
        single = high[:, :3] - low[:, :3] <= _WIDEST * (1 + 1 / (self.n_clients - 1))
        return np.tile(single, 2)

    @cached_property
    def _limits(self) -> tuple[Floats, Floats]:
        """Intervals that are printed and drawn: of the bootstrap, if there are samples; arrays (unit, type)."""
        if self.replicates is None:
            return self.coefficients.conf_low, self.coefficients.conf_high
        samples = describe_samples(self.replicates, self.level)
        return samples["boot_low"], samples["boot_high"]

    @property
    def layer(self) -> pd.DataFrame:
        """Coefficients of the layer, one row per type, with the columns of :meth:`tidy` that describe no unit."""
        return self._make_table(self.layer_coefficients, self.layer_replicates)

    def of_type(self, type: Type) -> Floats:  # noqa: A002  (the name in psych)
        """Return one type of coefficient, such as "ICC2", of each unit; array (unit,)."""
        return self.coefficients.icc[:, TYPES.index(check.choice("type", type, TYPES))]

    def split(self, *, tau: _split.Tau = 0.5) -> SplitResult:
        """Share the units on which clients agree: ICC2 at or above a threshold.

        Parameters
        ----------
        tau : float in (0, 1), inf, -inf or Absolute
            Threshold τ, as in :func:`fedstat.split`.

        Returns
        -------
        SplitResult
            If a baseline was subtracted, the split is by agreement on the differences from it.
        """
        return SplitResult(
            communality=np.full(len(self.units), np.nan),
            shared=_split.shared(self.agreement, tau=tau),
            threshold=float(_split.threshold(self.agreement, tau)),
            tau=tau,
            fit=self,
        )

    def shrunken(self, *, margin: float = 0.5) -> ShrunkenResult:
        """Draw the ICC2 of units towards their layer by empirical Bayes, with the probability of agreement.

        Parameters
        ----------
        margin : float in [0, 1)
            A unit is shared if its ICC2 is above ``margin``. Above 1/2, most of the variance of the unit's weights is
            common to all clients.

        Returns
        -------
        ShrunkenResult
            On the scale −log(1 − ICC2) of the intervals, with the standard errors of the jackknife over clients.

        Raises
        ------
        ValueError
            If there are no intervals over clients, or on the conditions of :func:`fedstat.stats.pooling.pool`: at least
            10 units, which differ at least as much as their errors.

        Examples
        --------
        >>> from fedstat import icc
        >>> rng = np.random.default_rng(0)
        >>> client_weights = np.linspace(0, 2, 12)[:, None] * rng.normal(size=(12, 50)) + rng.normal(size=(6, 12, 50))
        >>> icc(client_weights).shrunken().tidy()[["unit", "estimate", "probability"]].round(2).iloc[[0, 6, 11]]
            unit  estimate  probability
        0      0      0.06         0.00
        6      6      0.55         0.82
        11    11      0.72         1.00
        """
        check.real("margin", margin, low=0, high=1, open_high=True)
        if self.errors is None:
            why = "F tests have none" if self.inference == "F" else f"{self.n_clients} clients have none"
            raise ValueError(
                f"pooling needs standard errors over clients, but {why}. Use at least 3 clients, and "
                "inference='sign-flip'."
            )
        with np.errstate(divide="ignore"):
            estimate = -np.log1p(-self.agreement)
        return ShrunkenResult(self, pool(estimate, *self.errors, most=self.n_clients - 1), margin)

    def by_unit(self) -> pd.DataFrame:
        """Return the table of :meth:`augment` with the column ``term`` for ``unit``, to begin a split's table."""
        table: pd.DataFrame = self.augment()
        return table.drop(columns="conclusion").rename(columns={"unit": "term"})

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit and type of coefficient.

        Returns
        -------
        DataFrame (unit × type)
            unit; type; conclusion (of the test, see :attr:`conclusion`); icc (the coefficient); conf_low and conf_high;
            p_adjusted (over units, false discovery rate); estimated (see :attr:`estimated`); statistic and p_value of
            the test over clients, which are equal for all types. F tests have a statistic and p_value for each type,
            with df1 and df2 between them. With bootstrap samples, boot_low and boot_high (percentiles of the
            coefficient over the samples) follow icc, and std_error (their standard deviation) is last. Types with k
            have no std_error if a sample's coefficient is minus infinity.
        """
        table = self._make_table(self.coefficients, self.replicates).assign(
            unit=np.repeat(self.units, len(TYPES)), conclusion=self._conclusions.ravel(),
            p_adjusted=self.p_adjusted.ravel(), estimated=self._estimated.ravel(),
        )  # fmt: skip
        first = ["unit", "type", "conclusion", "icc", *self._ends, "conf_low", "conf_high", "p_adjusted", "estimated"]
        return table[[*dict.fromkeys([*first, *table])]]

    @property
    def _ends(self) -> tuple[str, str]:
        """Columns of the intervals that are printed and drawn."""
        return ("conf_low", "conf_high") if self.replicates is None else ("boot_low", "boot_high")

    @property
    def _headings(self) -> Headings:  # type: ignore[override]
        columns: Headings = {"unit": "unit", "conclusion": "conclusion", HEADLINE: "icc"}
        return {**columns, "CI": self._ends, "p (FDR)": "p_adjusted"}

    def _caption(self) -> list[str]:
        is_tested = (self.conclusion != NOT_TESTED).any()
        tested = f"{ONE_DIRECTION.capitalize()}: {self.finding}"
        intervals = [f"{self._ci}: {self._interval_method}"] * bool(self.estimated.any())
        return [self._lines()[0], *intervals, tested if is_tested else "No test of units", *self._describe_wide()]

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes units and layer.

        Returns
        -------
        DataFrame (1,)
            n_units, n_clients, n_weights (per unit); baseline_subtracted (True if a baseline was subtracted); type
            (ICC2); icc_median, icc_min and icc_max over units; inference (the test); n_permutations (sign flips or
            permutations behind layer_p_value); n_one_direction (units with p_adjusted of at most 1 − level)
            and n_including_0 (those whose interval includes 0); n_not_estimated (units with ICC2 that are not
            :attr:`estimated`), n_undefined (units without ICC2), n_constant (constant units); layer_icc with layer_low,
            layer_high and layer_p_value; profile_proportion (proportion of the squared weights in the common profile of
            the units) with profile_p_value; n_effective_clients (1 / Σ s² for the clients' proportions s of the squared
            deviations); level; n_boot (bootstrap samples).
        """
        icc, t = self.agreement, TYPES.index(HEADLINE)
        median, least, most = median_and_ends(icc)
        low, high = (limit[:, t] for limit in self._limits)
        row = {
            "n_units": len(self.units),
            "n_clients": self.n_clients,
            "n_weights": self.n_weights,
            "baseline_subtracted": self.baseline_subtracted,
            "type": HEADLINE,
            "icc_median": median,
            "icc_min": least,
            "icc_max": most,
            "inference": self.inference,
            "n_permutations": 0 if self.test is None else self.test.n_patterns,
            "n_one_direction": self.n_one_direction,
            "n_including_0": int(((self.conclusion == ONE_DIRECTION) & (low <= 0) & (high >= 0)).sum()),
            "n_not_estimated": int((~self.estimated & ~np.isnan(icc)).sum()),
            "n_undefined": int(np.isnan(icc).sum()),
            "n_constant": int(self.constant.sum()),
            "layer_icc": float(self.layer_coefficients.icc[t]),
            "layer_low": float(self.layer_coefficients.conf_low[t]),
            "layer_high": float(self.layer_coefficients.conf_high[t]),
            "layer_p_value": float(self.layer_coefficients.p_value[t]),
            "profile_proportion": np.nan if self.test is None else self.test.profile_proportion,
            "profile_p_value": np.nan if self.test is None else self.test.profile_p_value,
            "n_effective_clients": np.nan if self.influence is None else self.influence.n_effective,
            "level": self.level,
            "n_boot": 0 if self.replicates is None else len(self.replicates),
        }
        return pd.DataFrame([row])

    def augment(self, data: Any = None) -> Any:
        """Return one row per unit: ICC2 with its interval, and the components of variance of the weights.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            Data to which the columns are added, as by :meth:`SplitResult.augment`.

        Returns
        -------
        DataFrame (unit) or Dataset
            The columns of :meth:`tidy` but type, for ICC2; mean squares ms_weights, ms_clients and ms_residual;
            components of variance by the method of moments: var_weights (common to all clients), var_clients (offsets
            of clients) and var_residual, of which the first two may be negative; constant (True for a constant unit).
        """
        ms, table = self.mean_squares, self.tidy()
        power = (2 * ms.exponent).astype(int)
        squares = {"weights": ms.weights, "clients": ms.clients, "residual": ms.residual}
        components = {
            "weights": (ms.weights - ms.residual) / ms.n_clients,
            "clients": (ms.clients - ms.residual) / ms.n_weights,
            "residual": ms.residual,
        }
        table = table[table["type"] == HEADLINE].drop(columns="type").reset_index(drop=True).assign(
            **{f"ms_{name}": _scale(values, power) for name, values in squares.items()},
            **{f"var_{name}": _scale(values, power) for name, values in components.items()},
            constant=self.constant,
        )  # fmt: skip
        return join_columns(table, data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.augment(), "icc"

    def summary(self, *, rows: int = 12) -> str:
        """Return a report in the terms of R's psych: the six coefficients of the layer, then the units.

        Parameters
        ----------
        rows : int
            Number of units to print, in descending order of ICC2.
        """
        return f"{self!r}\n\n{self._details(rows)}"

    def _details(self, rows: int = 12) -> str:
        n = len(self.units) * self.n_weights
        layer = self.layer.to_string(index=False, float_format="%.3g")
        units = self._list_units("Units", self.agreement, rows, f" by {HEADLINE}")
        return f"Layer: targets are its {n} weights, raters {self.n_clients} clients\n{layer}\n\n{units}"

    @property
    def n_one_direction(self) -> int:
        """Number of units on which most clients deviate in one direction, at a false discovery rate of 1 − level."""
        return int((self.conclusion == ONE_DIRECTION).sum())

    @property
    def finding(self) -> str:
        """Conclusion for units whose H0 is rejected: the direction of most clients, with the test."""
        return f"{_CALLED} ({self.inference} test, FDR {1 - self.level:.2g})"

    def cautions(self) -> list[Caution]:
        """Return cautions on clients of unequal size, dependent clients, common initial parameters, and classes."""
        is_checked = self.influence is not None and self.test is not None and self.n_clients >= 3
        cautions = super().cautions()
        if is_checked:
            icc, influence = float(self.layer_coefficients.icc[TYPES.index(HEADLINE)]), cast(Influence, self.influence)
            sizes = describe_sizes(influence, self._names, icc, is_change=self.baseline_subtracted)
            cautions += [Caution("Clients of unlike size", text) for text in sizes]
            dependent = [Caution("Clients not independent", text) for text in self._describe_dependence()]
            cautions += [caution for caution in dependent if caution not in cautions]
        if text := self._describe_start():
            cautions.append(Caution("Common initial parameters", text))
        is_called = self.n_one_direction or self.layer_coefficients.p_value[TYPES.index(HEADLINE)] <= 1 - self.level
        if self.skewed_classes and is_called:
            cautions.append(Caution("Units are classes", _CLASSES))
        return cautions

    def _describe_start(self) -> str:
        """Return a caution if common initial parameters are known, or likely by the data; "" if not."""
        differs = ~self._identical & ~np.isnan(self.agreement)
        if not differs.any():
            return ""
        if self.common_start == "rounds" and self.n_one_direction:
            return (
                "units changed over several rounds of local training; common initial parameters shape where training "
                "goes, and alone make clients agree on some units"
            )
        if self.baseline_subtracted or self.common_start == "":
            return ""
        if (top := float(self.agreement[differs].max())) < (_LITTLE if self.common_start else _NEAR_1):
            return ""
        if self.common_start:
            start = "clients started from common initial parameters"
            return f"{start}, which alone may make them agree; baseline= subtracts them"
        size = f"{HEADLINE} of up to {coefficient(top)} on units that differ between clients"
        return f"{size} may come from common initial parameters; baseline= subtracts them"

    def _describe_dependence(self) -> Iterator[str]:
        """Yield a caution if clients are copies of each other, or else if they fall into groups."""
        similarity, but = cast(AgreementTest, self.test).similarity, "but CIs and tests assume independent clients"
        if len(similarity) < self.n_clients or np.isnan(similarity).any():
            return
        if len(copies := equal_objects(similarity)):
            a, b = self._names[copies[0]]
            pairs = f"{len(copies)} pairs of clients ({a} and {b}, ...)"
            yield f"{f'clients {a} and {b}' if len(copies) == 1 else pairs} have equal weights, {but}"
        elif text := describe_groups(similarity, self._names):
            yield text

    @property
    def _names(self) -> NDArray[Any]:
        """Names of the clients; by default their positions."""
        return np.arange(self.n_clients) if self.clients is None else self.clients

    @property
    def _identical(self) -> NDArray[np.bool_]:
        """Units that are equal in all clients, but not constant; bool array (unit,)."""
        ms = self.mean_squares
        return np.asarray((ms.clients == 0) & (ms.residual == 0) & ~self.constant)

    def _lines(self) -> list[str]:
        x, icc = self.glance().iloc[0], self.agreement
        size = f"{count(len(icc), 'unit')} ({HEADLINE} = ICC(A,1)), {self.n_weights} weights per unit"
        median, least, most = (coefficient(x[f"icc_{name}"]) for name in ("median", "min", "max"))
        lines = [
            f"Agreement of {self.n_clients} clients on {size}",
            *["Weights minus the given baseline"] * (self.baseline_subtracted and self.source is None),
        ]
        constant = describe_constant(self.units, self.constant, self.untrained)
        if self.constant.all():
            return [*lines, f"No unit varies: {self._count_not_tested()}", *constant]
        lines += [
            f"Layer: {HEADLINE} = {coefficient(float(x['layer_icc']))}{self._format_interval()}",
            *self._format_layer_test(),
            f"Units: {HEADLINE} median {median}, range {least} to {most}; {self._count_not_tested()}",
            *(f"  {text}" for text in self._format_unit_tests()),
            *(f"  {text}" for text in self._describe_wide()),
            *(extremes(np.where(self.estimated, icc, np.nan), self.units) if self.estimated.any() else ()),
        ]
        lines += self._describe_identical()
        lines += constant
        if (unclear := np.isnan(icc) & ~self.constant).any():
            head = "  undefined (clients differ in means only):"
            lines.append(listing(head, map(str, self.units[unclear])))
        return lines

    def _describe_wide(self) -> Iterator[str]:
        """Yield the numbers of units without an estimate, and of units whose test and interval differ."""
        x = self.glance().iloc[0]
        n, why = x["n_not_estimated"], f"CI missing or wider than half of [{-1 / (self.n_clients - 1):.2f}, 1]"
        if n:
            units = f"{n} of {count(len(self.units), 'unit')} not" if self.estimated.any() else "No unit"
            yield f"{units} estimated ({why})"
        if x["n_including_0"]:
            n = count(x["n_one_direction"], "unit")
            yield f"CI includes 0 on {x['n_including_0']} of the {n} with one direction: agreement not shown"

    def _describe_identical(self) -> Iterator[str]:
        """Yield a line for each reason why units are identical in all clients."""
        reasons = np.full(len(self.units), "") if self.reasons is None else self.reasons
        for reason, text in _REASONS.items():
            if n := int((self._identical & (reasons == reason)).sum()):
                units = f"{count(n, 'unit')} {'is' if n == 1 else 'are'}"
                yield f"{units} identical in all clients ({text}): {HEADLINE} = 1"

    def _format_interval(self) -> str:
        """Return the interval of the layer's ICC2 with its method, or the reason why there is none."""
        low, high = self.layer.iloc[TYPES.index(HEADLINE)][[*self._ends]].astype(float)
        if np.isnan(low):
            return "; no CI: the jackknife needs at least 3 clients" if self.n_clients < 3 else ""
        return f", {100 * self.level:g}% CI [{low:.2f}, {high:.2f}] ({self._interval_method})"

    @property
    def _interval_method(self) -> str:
        """Method of the intervals."""
        if self.replicates is not None:
            return f"{len(self.replicates)} bootstrap samples of clients"
        return "F; assumes independent weights" if self.inference == "F" else "jackknife over clients"

    def _format_layer_test(self) -> list[str]:
        """Return lines on the tests of the layer and of the common profile of its units."""
        p, t = float(self.layer_coefficients.p_value[TYPES.index(HEADLINE)]), self.test
        if t is None or np.isnan(p):
            return []
        least = 1 / (1 + t.n_patterns)
        if self.inference == "permutation":
            size = f"{count(t.n_patterns, 'permutation')}; smallest possible {p_equals(least)}"
            h0 = "units are exchangeable within clients (assumes equal covariances)"
            return [f"  Permutation test, H0: {h0}: {p_equals(p)} ({size})"]
        if least > 1 - self.level:
            return [f"  {self.n_clients} clients: the smallest possible p of the layer is {least:.3f}: no conclusion"]
        flips = f"{t.n_patterns} flips" if self.n_clients > MOST_ENUMERATED else f"all {t.n_patterns} flips"
        has_profile = not np.isnan(t.profile_proportion)
        h0 = f"deviations of clients are symmetric about {'the common profile' if has_profile else '0'}"
        lines = [f"  Sign-flip test over clients, H0: {h0}: {p_equals(p)} ({flips})"]
        if has_profile:
            size = f"{max(0, 100 * t.profile_proportion):.0f}% of the variance"
            lines.append(f"  Common profile of the units: {size}, {p_equals(t.profile_p_value)} (same test)")
        return lines

    def _format_unit_tests(self) -> list[str]:
        """Return lines on the conclusions and the test of units, or the reason why no unit is tested."""
        n_tested = int((self.conclusion != NOT_TESTED).sum())
        if not n_tested:
            if self.inference == "permutation":
                return ["no test: in at least 2 clients, 2 units must vary beyond the common profile"]
            which = " that vary on a unit beyond the common profile" if self.n_clients >= LEAST_VARYING else ""
            return [f"no test: it needs at least {LEAST_VARYING} clients{which}"]
        n = self.n_one_direction
        patterns = _PATTERNS.get(self.inference)
        pooled = f"; p values of units: {patterns} pooled over units" if patterns else ""
        test = f"{self.inference.capitalize()} test, FDR {1 - self.level:.2g}{pooled}"
        return [f"{n} of {n_tested}: {_CALLED}; {n_tested - n}: {NO_EVIDENCE}", test]

    def _count_not_tested(self) -> str:
        """Return the number of constant units and, if any unit is tested, the number of other units without a test."""
        is_tested = self.conclusion != NOT_TESTED
        not_tested = f", {(~is_tested & ~self.constant).sum()} not tested" if is_tested.any() else ""
        return f"{count_constant(self.constant, self.untrained)}{not_tested}"

    def _make_table(self, c: Coefficients, replicates: Floats | None) -> pd.DataFrame:
        """Return one row per coefficient: type, statistics, and percentiles if there are bootstrap samples."""
        shape = c.icc.shape
        columns: dict[str, Any] = {"type": np.broadcast_to(np.array(TYPES, dtype=object), shape)}
        statistics = {name: value for name, value in c._asdict().items() if value is not None}
        columns |= {name: np.broadcast_to(value, shape) for name, value in statistics.items()}
        if replicates is not None:
            columns |= describe_samples(replicates, self.level)
        return pd.DataFrame({name: np.ravel(value) for name, value in columns.items()})


def describe_sizes(influence: Influence, clients: NDArray[Any], icc: float, *, is_change: bool) -> Iterator[str]:
    """Yield a caution if clients differ much in size, and agree enough for sizes to matter."""
    (share, without), n = influence, influence.n_effective
    if n < _UNEQUAL * len(clients) and icc >= _AFFECTED:
        top = int(np.argmax(share))
        largest = f"client {clients[top]} holds {100 * share[top]:.0f}% of the squared deviations"
        effect = f"(effective number {n:.1f} of {len(clients)}), so that CIs may be too short"
        without_it = f" (without it, {HEADLINE} = {coefficient(without[top])})" if np.isfinite(without).any() else ""
        yield f"{'changes' if is_change else 'weights'} of clients vary in size {effect}; {largest}{without_it}"


def describe_groups(similarity: Floats, names: NDArray[Any]) -> str:
    """Return a sentence that names the groups into which clients fall by their similarity; "" if there are none.

    Examples
    --------
    >>> describe_groups(np.kron(np.eye(2), np.ones((3, 3))), np.array(list("abcdef")))
    'clients fall into 2 groups (a, b, c; d, e, f), but CIs and tests assume independent clients; pass groups that you
    know as groups='
    """
    if (groups := separate_groups(similarity)) is None:
        return ""
    members = "; ".join(few(names[groups == g], 4) for g in range(groups.max() + 1))
    clients = f"clients fall into {groups.max() + 1} groups ({members})"
    return f"{clients}, but CIs and tests assume independent clients; pass groups that you know as groups="


def _scale(values: Floats, power: NDArray[np.int_]) -> Floats:
    """Multiply by a power of 2; values beyond float64 become infinite."""
    with np.errstate(over="ignore"):
        return np.ldexp(values, power)
