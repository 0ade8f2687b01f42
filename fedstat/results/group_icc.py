"""Result on the agreement of clients that form groups: within groups and between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import Caution, Result, count_constant, describe_constant
from fedstat.results.exports import Headings
from fedstat.results.icc import HEADLINE, NO_EVIDENCE, NOT_TESTED, ONE_DIRECTION, describe_sizes
from fedstat.results.tables import coefficient, count, join_columns, median_and_ends, p_equals
from fedstat.stats import Claim
from fedstat.stats.group_icc import Agreement, GroupAgreement
from fedstat.stats.icc import fdr

Floats = NDArray[np.float64]
PAIRS = ("within groups", "between groups")
"""Pairs of clients: of one group, of two groups."""
VARIANCES = ("common", "group", "offset", "residual")
"""Parts of the variance of a weight, in the order of :attr:`fedstat.stats.group_icc.GroupAgreement.variances`."""
AGREE = "agree"
_ESTIMATES = ("icc", "conf_low", "conf_high")


@dataclass(frozen=True, eq=False, repr=False)
class GroupIccResult(Result):
    """Agreement of clients within and between groups, as :func:`fedstat.icc` returns it with ``groups=``.

    Attributes
    ----------
    agreement : GroupAgreement
        Arrays (unit + 1,) of the units and, as the last, of the layer.
    units : array (unit,)
        Names of the units.
    constant, untrained : bool array (unit,)
        Constant units, and those of them that no client changed since the baseline.
    clients : array (client,)
        Names of the clients.
    group_names : array (group,)
        Names of the groups.
    group_codes : int array (client,)
        Position of each client's group in ``group_names``.
    claim : {"these groups", "new groups"}
        Scope of conclusions: other clients of these groups, or clients of new groups.
    n_weights : int
        Number of weights of a unit.
    level : float
        Confidence level of the intervals.
    baseline_subtracted : bool
        True if a baseline was subtracted from the weights.
    """

    agreement: GroupAgreement
    units: NDArray[Any]
    constant: NDArray[np.bool_]
    untrained: NDArray[np.bool_]
    clients: NDArray[Any]
    group_names: NDArray[Any]
    group_codes: NDArray[np.int64]
    claim: Claim
    n_weights: int
    level: float
    baseline_subtracted: bool = False
    _figure: ClassVar[str] = "forest"

    @property
    def _headings(self) -> Headings:  # type: ignore[override]
        columns: Headings = {"unit": "unit", "pairs": "pairs", "conclusion": "conclusion", HEADLINE: "icc"}
        return {**columns, "CI": ("conf_low", "conf_high"), "p (FDR)": "p_adjusted"}

    @property
    def _pairs(self) -> tuple[Agreement, Agreement]:
        return self.agreement.within, self.agreement.between

    @cached_property
    def p_adjusted(self) -> Floats:
        """P values within and between groups, each adjusted over units for the false discovery rate; (unit, 2)."""
        return fdr(np.stack([pairs.p_value[:-1] for pairs in self._pairs], axis=1))

    @property
    def conclusion(self) -> NDArray[np.str_]:
        """Conclusions of the tests of each unit within and between groups; array (unit, 2).

        "one direction": most clients of a group, or most groups, deviate in one direction (sign-flip tests). "agree":
        these groups agree (t test). Units without such a conclusion have "no evidence" or "not tested".
        """
        p, called = self.p_adjusted, np.array([ONE_DIRECTION, ONE_DIRECTION if self.claim == "new groups" else AGREE])
        return np.where(np.isnan(p), NOT_TESTED, np.where(p <= 1 - self.level + 1e-12, called, NO_EVIDENCE))

    @property
    def layer(self) -> pd.DataFrame:
        """Agreement of the layer, one row within and one between groups, with the columns of :meth:`tidy`."""
        rows = [{"pairs": name} | self._row(of, -1) for name, of in zip(PAIRS, self._pairs, strict=True)]
        return pd.DataFrame(rows)

    @property
    def by_group(self) -> pd.DataFrame:
        """Agreement of the layer within each group: group, n_clients, icc, conf_low and conf_high."""
        sizes = np.bincount(self.group_codes)
        columns = dict(zip(_ESTIMATES, self.agreement.by_group, strict=True))
        return pd.DataFrame({"group": self.group_names, "n_clients": sizes} | columns)

    def tidy(self) -> pd.DataFrame:
        """Return two rows per unit, within and between groups.

        Returns
        -------
        DataFrame (unit × 2)
            unit; pairs ("within groups" or "between groups"); conclusion of the test; icc (ICC2), conf_low and
            conf_high; p_adjusted (false discovery rate over units), statistic and p_value of the test.
        """
        parts = []
        for i, (name, of) in enumerate(zip(PAIRS, self._pairs, strict=True)):
            columns = {"unit": self.units, "pairs": name, "conclusion": self.conclusion[:, i]}
            columns |= {column: getattr(of, column)[:-1] for column in _ESTIMATES}
            columns |= {"p_adjusted": self.p_adjusted[:, i], "statistic": of.statistic[:-1], "p_value": of.p_value[:-1]}
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts).sort_index(kind="stable", ignore_index=True)

    def augment(self, data: Any = None) -> Any:
        """Return one row per unit: agreement within and between groups, and proportions of the variance.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            Data to which the columns are added, as by :meth:`SplitResult.augment`.

        Returns
        -------
        DataFrame (unit) or Dataset
            unit; conclusion_within, icc_within, conclusion_between and icc_between; proportions of the variance of a
            weight: prop_common (all clients have it in common), prop_group (the clients of a group have it in common
            beyond this), prop_offset (means of clients) and prop_residual, of which the first two may be negative;
            constant.
        """
        columns: dict[str, Any] = {"unit": self.units}
        for i, (name, of) in enumerate(zip(("within", "between"), self._pairs, strict=True)):
            columns |= {f"conclusion_{name}": self.conclusion[:, i], f"icc_{name}": of.icc[:-1]}
        props = {f"prop_{name}": x[:-1] for name, x in zip(VARIANCES, self.agreement.variances, strict=True)}
        return join_columns(pd.DataFrame(columns | props | {"constant": self.constant}), data)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes units and layer.

        Returns
        -------
        DataFrame (1,)
            n_units, n_clients, n_groups, n_weights (per unit); claim; baseline_subtracted; of the layer within_icc,
            within_low, within_high and within_p_value, the same of between, and prop_common, prop_group, prop_offset
            and prop_residual; n_rejected_within and n_rejected_between (units with p_adjusted of at most 1 − level);
            n_constant; n_effective_clients (1 / Σ s² for the clients' proportions s of the squared deviations within
            groups); level.
        """
        row: dict[str, Any] = {
            "n_units": len(self.units), "n_clients": len(self.clients), "n_groups": len(self.group_names),
            "n_weights": self.n_weights, "claim": self.claim, "baseline_subtracted": self.baseline_subtracted,
        }  # fmt: skip
        for name, of in zip(("within", "between"), self._pairs, strict=True):
            fields = {"icc": "icc", "low": "conf_low", "high": "conf_high", "p_value": "p_value"}
            row |= {f"{name}_{short}": float(getattr(of, field)[-1]) for short, field in fields.items()}
        row |= {f"prop_{name}": float(x[-1]) for name, x in zip(VARIANCES, self.agreement.variances, strict=True)}
        within, between = (self.p_adjusted <= 1 - self.level + 1e-12).sum(axis=0)
        row |= {"n_rejected_within": int(within), "n_rejected_between": int(between)}
        row |= {"n_constant": int(self.constant.sum()), "n_effective_clients": self.agreement.influence.n_effective}
        return pd.DataFrame([row | {"level": self.level}])

    def cautions(self) -> list[Caution]:
        """Return cautions on dependent clients, clients of unlike size, and groups that were found in weights."""
        influence, icc = self.agreement.influence, float(self.agreement.within.icc[-1])
        sizes = describe_sizes(influence, self.clients, icc, is_change=self.baseline_subtracted)
        cautions = [Caution("Clients of unlike size", text) for text in sizes]
        if (single := np.bincount(self.group_codes) == 1).any():
            n = int(single.sum())
            text = f"{count(n, 'group')} of one client count{'s' * (n == 1)} for agreement between groups only"
            cautions.append(Caution("Groups of one client", text))
        return super().cautions() + cautions

    def _row(self, of: Agreement, i: int) -> dict[str, float]:
        return {name: float(getattr(of, name)[i]) for name in (*_ESTIMATES, "statistic", "p_value")}

    def _lines(self) -> list[str]:
        n_clients, n_groups, sizes = len(self.clients), len(self.group_names), np.bincount(self.group_codes)
        size = f"{count(len(self.units), 'unit')} ({HEADLINE} = ICC(A,1)), {self.n_weights} weights per unit"
        listed = ", ".join(f"{name} ({n})" for name, n in zip(self.group_names, sizes, strict=True))
        size_range = f"{sizes.min()} to {sizes.max()} clients"
        held = "further groups" if self.claim == "new groups" else "further clients of these groups"
        lines = [
            f"Agreement of {n_clients} clients in {n_groups} groups on {size}",
            *["Weights minus the given baseline"] * (self.baseline_subtracted and self.source is None),
            f"Groups: {listed if len(listed) < 60 else size_range}; conclusions hold for {held}",
        ]
        constant = describe_constant(self.units, self.constant, self.untrained)
        if self.constant.all():
            return [*lines, f"No unit varies: {count_constant(self.constant, self.untrained)}", *constant]
        for i, (name, of) in enumerate(zip(PAIRS, self._pairs, strict=True)):
            lines += [f"{name.capitalize()}: layer {HEADLINE} = {self._describe_estimate(of)}", self._describe_test(i)]
            median, low, high = (coefficient(x) for x in median_and_ends(of.icc[:-1]))
            lines += [f"  Units: median {median}, range {low} to {high}", f"  {self._describe_units(i)}"]
        common, group, *rest = self.agreement.variances[:, -1]
        parts = zip((common, group, sum(rest)), ("of all clients", "of a group's clients", "clients' own"), strict=True)
        lines.append(f"Variance of the layer: {', '.join(f'{round(100 * x) + 0}% {name}' for x, name in parts)}")
        return [*lines, *([count_constant(self.constant, self.untrained)] if self.constant.any() else []), *constant]

    def _describe_estimate(self, of: Agreement) -> str:
        estimate, low, high = (x[-1] for x in (of.icc, of.conf_low, of.conf_high))
        parts = "groups" if self.claim == "new groups" else "clients"
        interval = f", {self._ci} [{low:.2f}, {high:.2f}] (jackknife over {parts})"
        return f"{coefficient(float(estimate))}{interval if np.isfinite(low) else '; no CI'}"

    def _describe_test(self, i: int) -> str:
        """Return the line on the layer's test within (0) or between groups."""
        of, by_flips = self._pairs[i], i == 0 or self.claim == "new groups"
        p, parts = float(of.p_value[-1]), "groups" if i else "clients"
        if of.least_p > 1 - self.level:
            return f"  The smallest possible p of the layer is {of.least_p:.2g}: no conclusion"
        if np.isnan(p):
            return "  No test of the layer"
        if by_flips:
            h0 = "deviations from the common profile are symmetric"
            return f"  Sign-flip test over {parts}, H0: {h0}: {p_equals(p)}"
        return f"  t test of the jackknife, H0: no agreement between these groups: {p_equals(p)}"

    def _describe_units(self, i: int) -> str:
        conclusion = self.conclusion[:, i]
        n_tested, n_rest = int((conclusion != NOT_TESTED).sum()), int((conclusion == NO_EVIDENCE).sum())
        if not n_tested:
            return "no test of units"
        called, test = f"most {'groups' if i else 'clients of a group'} deviate in one direction", "sign-flip"
        if i and self.claim == "these groups":
            called, test = "these groups agree", "t"
        n = f"{n_tested - n_rest} of {n_tested}"
        return f"{n}: {called} ({test} test, FDR {1 - self.level:.2g}); {n_rest}: {NO_EVIDENCE}"
