"""Results of splits of a layer into shared and personal units: one split, and splits under several specifications."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import Caution, Result, UnitStatistics, count_constant, listing
from fedstat.results.exports import Headings, columns_of
from fedstat.results.tables import coefficient, count, join_columns
from fedstat.stats import split as _split

Floats = NDArray[np.float64]
# Words of prints, and columns of tables, for names of statistics.
_STATISTICS = {"nu": "communality", "ICC2": "agreement", "reliability": "reliability", "probability": "probability"}
_COLUMNS = {"nu": "communality", "probability": "probability", "ICC2": "icc", "reliability": "reliability"}
POSTERIOR: Literal["posterior"] = "posterior"
"""Threshold of a split by the posterior probability that a unit is shared."""
WRONG_SIDE = (0.01, 0.15)
"""Errors of a split by test at a false discovery rate of 0.05 in trained networks (``simulations/inference``): largest
proportion of wrong units among units called shared or personal, and of layers with at least one wrong unit."""
WRONG_WITHIN_GROUPS = (0.02, 0.15)
"""Upper bounds of both errors for clients within groups."""
_ENDS = ("conf_low", "conf_high")
_MIN_AGREEMENT = 0.05  # median ICC2 below which clients have next to nothing in common


class AgreementWarning(UserWarning):
    """Warning that clients agree less on the shared units of a split than on its personal units."""


@dataclass(frozen=True, eq=False, repr=False)
class SplitResult(Result):
    """Split of a layer into shared and personal units, as :func:`fedstat.split` returns it.

    "Shared" depends on the analysis in ``fit``:

    - :class:`FactorResult`: the other units explain the unit, so that its communality ν reaches the threshold;
    - :class:`IccResult`: clients agree on the unit, so that its ICC2 reaches the threshold;
    - :class:`ComponentsResult`: a test concludes that the reliability of client differences is below the threshold. By
      default the split shares inconclusive units, too;
    - :class:`ShrunkenResult`: the posterior probability that the unit is shared reaches the threshold.

    Attributes
    ----------
    communality : array (unit,)
        Communality ν. NaN for a constant unit, and for all units if the split is not by communality.
    shared : bool array (unit,)
        ζ: True for a shared unit.
    threshold : float
        Value of :attr:`statistic` that separates shared from personal units.
    tau : float, Absolute, "test" or "posterior"
        Threshold τ as the user set it: a quantile, ±inf, a value, a test, or a posterior probability.
    fit : FactorResult, IccResult, ComponentsResult or ShrunkenResult
        Analysis behind the split.
    conclusion : str array (unit,) or None
        Conclusion of the test of each unit: "shared", "personal", "inconclusive", or "constant" (constant
        unit). None for a split without a test.
    fdr : float or None
        False discovery rate of the test. None for a split without a test.
    """

    communality: Floats
    shared: NDArray[np.bool_]
    threshold: float
    tau: _split.Tau | Literal["test", "posterior"]
    fit: UnitStatistics
    conclusion: NDArray[np.str_] | None = None
    fdr: float | None = None
    _figure: ClassVar[str] = "communality"

    @property
    def _headings(self) -> Headings:  # type: ignore[override]
        column = _COLUMNS[self.fit.statistic_name]
        columns: Headings = {"unit": "term", "group": "group", "conclusion": "conclusion"}
        statistic: Headings = {"ICC2" if column == "icc" else column: column, "CI": getattr(self.fit, "_ends", _ENDS)}
        p_value: Headings = {"p (FDR)": "p_adjusted"} if self.conclusion is None else {}  # of another H0
        return {**columns, **statistic, **p_value, "ICC2": "icc", "margin": "margin"}

    def _caption(self) -> list[str]:
        return [*self._lines()[:2], *self.fit._caption()]

    @property
    def icc(self) -> Floats | None:
        """Agreement of clients: ICC2 of each unit, array (unit,); None for an analysis without clients."""
        return self.fit.agreement

    @property
    def factors(self) -> Any:  # a FactorResult, which imports this class
        """The :class:`~fedstat.results.FactorResult` behind ν; ValueError if the split is not by communality."""
        if self.fit.statistic_name != "nu":
            raise ValueError(
                f"the split is by {_STATISTICS[self.fit.statistic_name]}, which has no factors, loadings or "
                "eigenvalues. Split by method='pa', 'minres', 'pc' or 'leverage'."
            )
        return self.fit

    @property
    def statistic(self) -> Floats:
        """Statistic of ``fit`` that is compared with the threshold, such as ν or ICC2; array (unit,)."""
        return self.fit.statistic

    @property
    def group(self) -> NDArray[np.str_]:
        """Group of each unit: "shared", "personal" or "constant"; array (unit,).

        tau = −inf shares constant units, too.
        """
        not_shared = np.where(self.fit.constant, "constant", "personal")
        return np.where(self.shared, "shared", not_shared)

    @property
    def margin(self) -> Floats:
        """Difference of each unit's :attr:`statistic` from the threshold; array (unit,)."""
        return self.statistic - self.threshold

    @property
    def contradicted(self) -> bool:
        """True if clients agree much less on shared than on personal units, and not by chance.

        See :func:`fedstat.stats.split.contradicted`.
        """
        if self.icc is None:
            return False
        is_decided = self._conclusions != "inconclusive"
        return _split.contradicted(self.shared[is_decided], self.icc[is_decided], self.fit.n_clients or 0)

    @property
    def _conclusions(self) -> NDArray[np.str_]:
        """Outcome of the test of each unit; without a test, its group."""
        return self.group if self.conclusion is None else self.conclusion

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit: the split, then the other columns of the analysis.

        Returns
        -------
        DataFrame (unit)
            term (the unit); group (shared, personal, or constant); conclusion, for a split by test; the statistic:
            communality, icc (agreement), reliability or probability; its interval and p_adjusted, if it has any; icc,
            if there are clients; margin (statistic minus threshold); then the other columns of ``fit.by_unit()``, such
            as loadings. Of probabilities, the interval is that of the pooled estimate.
        """
        table = self.fit.by_unit().assign(group=self.group, margin=self.margin)
        table = table if self.conclusion is None else table.assign(conclusion=self.conclusion)
        return table[[*dict.fromkeys(name for name in [*columns_of(self._headings), *table] if name in table)]]

    def augment(self, data: Any = None) -> Any:
        """Add group, statistics and margin of each unit to data about the units, like broom's ``augment`` in R.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            A DataFrame with a column ``unit``, with the units as its index, or with one row per unit in their order. A
            unit may have several rows. Or the weights, such as the Dataset ``run["weights/fc1"]``.

        Returns
        -------
        DataFrame (unit) or Dataset
            The rows and columns of ``data`` in their order, then group; conclusion, for a split by test; communality
            (ν), for a split by communality; icc (agreement), if there are clients; reliability, for a split
            by test; margin (statistic minus threshold). For weights a Dataset, which holds these columns as variables
            over ``unit``. Without data, unit and these columns.

        Raises
        ------
        ValueError
            If ``data`` has units that the split lacks, or a column with one of these names.

        Examples
        --------
        >>> from fedstat import icc
        >>> rng = np.random.default_rng(0)
        >>> weights = rng.normal(size=(1, 3, 20)) + np.array([0.1, 0.2, 3])[:, None] * rng.normal(size=(8, 3, 20))
        >>> notes = pd.DataFrame({"unit": [2, 0], "note": ["edges", "stripes"]})
        >>> icc(weights).split(tau=0.5).augment(notes)[["unit", "note", "group"]]
           unit     note     group
        0     2    edges  personal
        1     0  stripes    shared
        """
        table = self.tidy()
        statistics = [name for name in ("conclusion", *_COLUMNS.values()) if name in table]
        return join_columns(table[["term", "group", *statistics, "margin"]].rename(columns={"term": "unit"}), data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        table = self.tidy()
        loadings = [name for name in table if str(name).startswith("factor_")]
        return table.drop(columns=loadings), _COLUMNS[self.fit.statistic_name]

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the split.

        Returns
        -------
        DataFrame (1,)
            tau, threshold; n_shared and n_personal (units); for a split by test, n_shown_shared, n_shown_personal and
            n_inconclusive (units that the test concludes to be shared or personal, and inconclusive units); icc_shared
            and icc_personal (median ICC2); then the row of ``fit.glance()``.
        """
        row: dict[str, Any] = {"tau": str(self.tau), "threshold": self.threshold}
        row |= {f"n_{name}": int((self.group == name).sum()) for name in ("shared", "personal")}
        row |= self._count_conclusions()
        row |= {f"icc_{name}": self.median_icc(name) for name in ("shared", "personal")}
        return pd.concat([pd.DataFrame([row]), self.fit.glance()], axis=1)

    def summary(self) -> str:
        """Return the split, then the summary of the analysis behind it."""
        return f"{self!r}\n\n{self.fit._details()}"

    def median_icc(self, group: str) -> float:
        """Return the median ICC2 of the units of a group or, for a split by test, of a conclusion.

        Parameters
        ----------
        group : str
            A value of :attr:`group`, such as "shared"; for a split by test, a value of ``conclusion``.

        Returns
        -------
        float
            NaN if no unit of the group has an ICC2.
        """
        if self.icc is None:
            return np.nan
        values = self.icc[(self._conclusions == group) & ~np.isnan(self.icc)]
        return float(np.median(values)) if len(values) else np.nan

    def _count_conclusions(self) -> dict[str, int]:
        """Count the units by conclusion of the test; empty for a split without a test."""
        if self.conclusion is None:
            return {}
        groups = {"n_shown_shared": "shared", "n_shown_personal": "personal", "n_inconclusive": "inconclusive"}
        return {column: int((self.conclusion == group).sum()) for column, group in groups.items()}

    @property
    def _is_nested(self) -> bool:
        """True if clients were compared within groups of clients."""
        return getattr(self.fit, "groups", None) is not None

    def _describe_rule(self) -> str:
        """Return the line on the rule by which units are shared."""
        if self.conclusion is not None:
            group = "shared" if self.shared[self.conclusion == "inconclusive"].all() else "personal"
            within = " of clients within groups" if self._is_nested else ""
            tests = f"reliability{within} tested against {self.threshold:.4g} (two-sided, FDR {self.fdr:.2g})"
            return f"Rule: {tests}: below, shared; above, personal; inconclusive units are treated as {group}"
        if self.tau == POSTERIOR:
            event = getattr(self.fit, "event")  # noqa: B009 - of a ShrunkenResult
            return f"Rule: shared if P({event}) >= {self.threshold:.4g} (empirical Bayes); other units are personal"
        name = _STATISTICS[self.fit.statistic_name]
        if np.isinf(self.threshold):
            return f"Rule: all units are {'shared' if self.threshold < 0 else 'personal'} (tau = {self.tau})"
        quantile = ""
        if not isinstance(self.tau, _split.Absolute):
            quantile = f", a quantile: {100 * (1 - float(self.tau)):g}% are shared"
        return f"Rule: shared if {name} >= {self.threshold:.3g} (tau = {self.tau}{quantile})"

    def _lines(self) -> list[str]:
        groups, (n_shared, n_personal, _) = self.group, self._counts
        is_constant = groups == "constant"
        constant = count_constant(is_constant, is_constant & self.fit.untrained)
        rule = "test" if self.conclusion is not None else _STATISTICS[self.fit.statistic_name]
        head = f"{n_shared} shared, {n_personal} personal"
        if self.conclusion is not None:
            n = {name: int((self.conclusion == name).sum()) for name in ("shared", "personal", "inconclusive")}
            head = f"{n['shared']} shared, {n['personal']} personal, {n['inconclusive']} inconclusive"
        lines = [
            f"Split of {count(len(groups), 'unit')} by {rule}: {head}, {constant}",
            self._describe_rule(),
        ]
        if np.isfinite(self.threshold) and self.conclusion is None:
            by_margin = np.argsort(np.where(np.isnan(self.margin), np.inf, np.abs(self.margin)))
            close = [f"{self.fit.units[j]} ({self.margin[j]:+.3f})" for j in by_margin[:6] if not self.fit.constant[j]]
            lines.append(listing("Nearest to the threshold:", close))
        median = {name: self.median_icc(name) for name in ("shared", "personal", "inconclusive")}
        if medians := [f"{coefficient(x)} on {k}" for k, x in median.items() if np.isfinite(x)]:
            lines.append(f"Agreement (median ICC2): {', '.join(medians)} units")
        elif self.icc is None and self.fit.n_clients:
            lines.append("Agreement: not compared, since units changed over unlike numbers of rounds")
        if self.fdr is not None and self.fdr <= 0.05:
            rates = WRONG_WITHIN_GROUPS if self._is_nested else WRONG_SIDE
            of_units, of_layers = (f"{100 * rate:.0f}%" for rate in rates)
            lines.append(
                f"In simulations with trained networks, at most {of_units} of such conclusions were wrong, and some "
                f"conclusion was wrong in up to {of_layers} of layers"
            )
        return [*lines, *self.fit._lines()]

    def cautions(self) -> list[Caution]:
        """Return cautions on low agreement on shared units, then the cautions of the analysis behind the split."""
        cautions = super().cautions()
        if self.contradicted:
            text = "clients agree less on shared than on personal units"
            meaning = ": shared means explained by other units, not alike over clients"
            is_by_communality = self.fit.statistic_name == "nu"
            caution = Caution("Clients agree less on shared units", text + meaning * is_by_communality, severe=True)
            cautions.append(caution)
        if self.conclusion is not None and self.median_icc("shared") < _MIN_AGREEMENT:
            text = (
                "clients hardly agree on shared units; there the average over clients has the lower expected error, "
                "but it may hold nothing that they have in common"
            )
            cautions.append(Caution("Clients hardly agree", text))
        return [*cautions, *(caution for caution in self.fit.cautions() if caution not in cautions)]

    @property
    def _counts(self) -> list[int]:
        """Numbers of shared, personal and constant units."""
        return [int((self.group == name).sum()) for name in ("shared", "personal", "constant")]


@dataclass(frozen=True, eq=False, repr=False)
class SplitMapResult(Result):
    """Splits of a layer under several specifications, as :func:`fedstat.split_map` returns it.

    A specification is an analysis with a method and, for methods with factors, a κ.

    Attributes
    ----------
    analyses : DataFrame (specification)
        method; kappa (NaN for "icc", which has no κ); n_factors; converged; n_shared (number of shared units).
    shared : bool array (specification, unit)
        True where a specification shares a unit.
    constant : bool array (unit,)
        True for a constant unit.
    units : array (unit,)
        Names of the units.
    tau : str
        Threshold τ as the user set it.
    """

    analyses: pd.DataFrame
    shared: NDArray[np.bool_]
    constant: NDArray[np.bool_]
    units: NDArray[Any]
    tau: str
    _figure: ClassVar[str] = "split_map"
    _by: ClassVar[str | None] = "prop_shared"
    _headings: ClassVar[Headings] = {
        "unit": "term", "conclusion": "conclusion", "shared in": "n_shared", "proportion": "prop_shared"
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, 1)

    @property
    def prop_shared(self) -> NDArray[np.float64]:
        """Proportion of the specifications that share each unit; array (unit,)."""
        return np.asarray(self.shared.mean(0))

    @property
    def conclusion(self) -> NDArray[np.str_]:
        """Group of each unit under all specifications: "shared", "personal", "depends" if they differ, or "constant".

        Array (unit,); "constant" is a constant unit.
        """
        p = self.prop_shared
        groups = np.where(p == 1, "shared", np.where(p == 0, "personal", "depends"))
        return np.where(self.constant, "constant", groups)

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            term (the unit); conclusion (see :attr:`conclusion`); n_shared and prop_shared (number and proportion of the
            specifications that share it).
        """
        return pd.DataFrame(
            {
                "term": self.units,
                "conclusion": self.conclusion,
                "n_shared": self.shared.sum(0),
                "prop_shared": self.prop_shared,
            }
        )

    def augment(self) -> pd.DataFrame:
        """Return one row per specification and unit: method, kappa, unit, group ("constant" for a constant unit)."""
        rows = self.analyses[["method", "kappa"]].loc[np.repeat(self.analyses.index, len(self.units))]
        group = np.where(self.shared, "shared", np.where(self.constant, "constant", "personal"))
        n = len(self.shared)
        return rows.reset_index(drop=True).assign(unit=np.tile(self.units, n), group=group.ravel())

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes all specifications.

        Returns
        -------
        DataFrame (1,)
            n_units, n_analyses (specifications), tau, n_not_converged; n_shared and n_personal (units with
            this group under all specifications), n_depends (units whose group varies), n_constant (constant units);
            ari_median and ari_min over pairs of specifications.
        """
        pairs = self._compare_pairs()
        row: dict[str, Any] = {"n_units": len(self.units), "n_analyses": len(self.shared), "tau": self.tau}
        row |= {"n_not_converged": int((~self.analyses["converged"]).sum())}
        row |= {
            f"n_{name}": int((self.conclusion == name).sum()) for name in ("shared", "personal", "depends", "constant")
        }
        row |= {"ari_median": float(np.median(pairs)) if len(pairs) else np.nan}
        row |= {"ari_min": float(np.min(pairs)) if len(pairs) else np.nan}
        return pd.DataFrame([row])

    def _compare_pairs(self) -> NDArray[np.float64]:
        """Return the adjusted Rand index of every pair of specifications."""
        first, second = np.array([*combinations(range(len(self.shared)), 2)], dtype=int).reshape(-1, 2).T
        return np.asarray(_split.adjusted_rand(self.shared[first], self.shared[second]))

    def _lines(self) -> list[str]:
        x, p = self.glance().to_dict("records")[0], self.prop_shared
        n = x["n_analyses"]
        with_factors = self.analyses[self.analyses["kappa"].notna()]
        methods = [] if with_factors.empty else [", ".join(dict.fromkeys(with_factors["method"]))]
        kappas = ", ".join(f"{k:g}" for k in dict.fromkeys(with_factors["kappa"]))
        methods = [f"{names} at kappa {kappas}" for names in methods]
        methods += ["icc"] if self.analyses["kappa"].isna().any() else []
        by_variation = np.argsort(np.abs(p - 0.5), kind="stable")[: x["n_depends"]]
        varying = [f"{self.units[j]} ({self.shared[:, j].sum()})" for j in by_variation]
        least, median = (coefficient(x[f"ari_{end}"]) for end in ("min", "median"))
        return [
            f"Split of {count(x['n_units'], 'unit')} under {count(n, 'specification')} (tau = {self.tau})",
            f"  {'; '.join(methods)}",
            (
                f"{count(x['n_shared'], 'unit')} shared in all, {x['n_personal']} personal in all, "
                f"{x['n_depends']} vary, {x['n_constant']} constant"
            ),
            f"ARI between two specifications: median {median}, minimum {least}",
            *[listing(f"Most variable (shared in x of {n}):", varying)] * bool(varying),
        ]

    def cautions(self) -> list[Caution]:
        """Return a caution if some specifications did not converge."""
        n = int((~self.analyses["converged"]).sum())
        text = f"{count(n, 'specification')} did not converge: fedstat.split(..., max_iter=1000) usually does"
        return super().cautions() + [Caution("Specifications not converged", text)] * bool(n)
