"""Results of splits: shared and personal units of a layer, and their map over estimators and κ."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import TERMINAL, Caution, Result, UnitStatistics, listing
from fedstat.results.tables import beside, coefficient, count
from fedstat.stats import split as _split

Floats = NDArray[np.float64]
# Names of statistics, and of outcomes, in prints.
_NAMES = {"nu": "communality", "ICC2": "agreement", "personal share": "reliability"}
_SAYS = {"undecided": "inconclusive"}
WRONG_SIDE = (0.01, 0.15)
"""Of a split by test at a false discovery rate of 0.05 in trained networks, at most (``simulations/inference``):
proportion of the units called shared or personal that are the other, and of layers with some such unit."""
_HARDLY = 0.05  # median ICC2 below which clients have next to nothing in common


class AgreementWarning(UserWarning):
    """Clients agree less on the units that a split calls shared than on those it calls personal."""


@dataclass(frozen=True, eq=False, repr=False)
class SplitResult(Result):
    """Shared and client-specific units of a layer, as :func:`fedstat.split` returns it.

    A shared unit is one that the other units explain (communality ν at or above the threshold) where ``fit`` is a
    factor analysis; one on which clients agree (ICC2 at or above the threshold) where it is an :class:`IccResult`; and
    one whose personal share is shown to be below the threshold, or, by default, undecided, where it is a
    :class:`ComponentsResult`.

    Attributes
    ----------
    communality : array (unit,)
        ν; NaN for a dead unit, and throughout where the split is by agreement.
    shared : bool array (unit,)
        ζ: True for a unit that all clients share.
    threshold : float
        Value that :attr:`statistic` had to reach.
    tau : float, Absolute or "test"
        The threshold as it was asked for: a quantile, ±inf, a value, or a test.
    fit : FactorResult, IccResult or ComponentsResult
        Analysis that the split rests on.
    outcome : str array (unit,) or None
        Of a test: "shared" or "personal" where that is shown, else "undecided"; "dead".
    fdr : float or None
        False discovery rate of the test.
    """

    communality: Floats
    shared: NDArray[np.bool_]
    threshold: float
    tau: _split.Tau | Literal["test"]
    fit: UnitStatistics
    outcome: NDArray[np.str_] | None = None
    fdr: float | None = None
    _figure: ClassVar[str] = "communality"

    @property
    def icc(self) -> Floats | None:
        """Do clients agree: ICC2 of each unit, array (unit,); None where the split was made without clients."""
        return self.fit.agreement

    @property
    def factors(self) -> Any:  # a FactorResult, which imports this class
        """The :class:`~fedstat.results.FactorResult` behind ν; ValueError where the split is by agreement."""
        if self.fit.statistic_name != "nu":
            raise ValueError(
                "the split is by agreement between clients (method='icc'), which has no factors, loadings or "
                "eigenvalues. Split by 'pa', 'minres', 'pc' or 'leverage' for these."
            )
        return self.fit

    @property
    def statistic(self) -> Floats:
        """Statistic that the threshold applies to: ν, ICC2 or the personal share, as ``fit`` has it; array (unit,)."""
        return self.fit.statistic

    @property
    def group(self) -> NDArray[np.str_]:
        """``"shared"``, ``"personal"`` or ``"dead"``, array (unit,); with tau = −inf dead units are shared too."""
        rest = np.where(self.fit.dead, "dead", "personal")
        return np.where(self.shared, "shared", rest)

    @property
    def margin(self) -> Floats:
        """How far each unit's :attr:`statistic` is from the threshold; array (unit,)."""
        return self.statistic - self.threshold

    @property
    def contradicted(self) -> bool:
        """Whether clients agree less on shared units than on personal ones, grossly and not by chance.

        See :func:`fedstat.stats.split.contradicted`.
        """
        if self.icc is None:
            return False
        known = self._labels != "undecided"
        return _split.contradicted(self.shared[known], self.icc[known], self.fit.n_clients or 0)

    @property
    def _labels(self) -> NDArray[np.str_]:
        """Labels that units have evidence for: outcomes of a test, else groups."""
        return self.group if self.outcome is None else self.outcome

    def tidy(self) -> pd.DataFrame:
        """One row per unit: the columns of the factor analysis, agreement or test, then group and margin.

        The column ``h2`` holds the communality, ``icc`` the agreement between clients, where there are any. Of a test
        ``outcome`` stands beside ``group``, the split that was applied.
        """
        table = self.fit.by_unit().assign(group=self.group)
        return (table if self.outcome is None else table.assign(outcome=self.outcome)).assign(margin=self.margin)

    def augment(self, data: Any = None) -> Any:
        """Group, statistics and margin of every unit, beside what you know of the units: broom's ``augment``.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            A DataFrame with a column ``unit`` (or the units as its index, or a row for each in their order), which may
            name a unit in several rows; or the weights, such as the Dataset ``run["weights/fc1"]``.

        Returns
        -------
        DataFrame (unit) or Dataset
            Your columns, in your order, then group; h2 (communality ν) where there are factors; icc where there are
            clients; personal and outcome where the split is by a test; margin. Of weights a Dataset, in which these
            are variables over ``unit``. Without data, unit and these columns.

        Raises
        ------
        ValueError
            If ``data`` has other units than the split, or a column of one of these names.

        Examples
        --------
        >>> from fedstat import icc
        >>> rng = np.random.default_rng(0)
        >>> weights = rng.normal(size=(1, 3, 20)) + np.array([0.1, 0.2, 3])[:, None] * rng.normal(size=(8, 3, 20))
        >>> mine = pd.DataFrame({"unit": [2, 0], "note": ["edges", "stripes"]})
        >>> icc(weights).split(tau=0.5).augment(mine)[["unit", "note", "group"]]
           unit     note     group
        0     2    edges  personal
        1     0  stripes    shared
        """
        table = self.tidy()
        known = [name for name in ("outcome", "h2", "icc", "personal") if name in table]
        return beside(table[["term", "group", *known, "margin"]].rename(columns={"term": "unit"}), data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        order = {"nu": "h2", "ICC2": "icc", "personal share": "personal"}
        return self.augment(), order[self.fit.statistic_name]

    def glance(self) -> pd.DataFrame:
        """One row: tau, threshold, n_shared, n_personal, their median ICC2 (icc_shared, icc_personal), fit's row.

        Of a test also n_shown_shared, n_shown_personal and n_undecided.
        """
        row: dict[str, Any] = {"tau": str(self.tau), "threshold": self.threshold}
        row |= {f"n_{name}": int((self.group == name).sum()) for name in ("shared", "personal")}
        row |= {f"n_{name.replace(' ', '_')}": n for name, n in self._outcomes().items()}
        row |= {f"icc_{name}": self.median_icc(name) for name in ("shared", "personal")}
        return pd.concat([pd.DataFrame([row]), self.fit.glance()], axis=1)

    def summary(self) -> str:
        """Return the split, then the summary of the analysis behind it."""
        return f"{self!r}\n\n{self.fit._details()}"

    def median_icc(self, group: str) -> float:
        """Median ICC2 over the units of a :attr:`group`, of a test over those of an outcome; NaN where none has any."""
        if self.icc is None:
            return np.nan
        known = self.icc[(self._labels == group) & ~np.isnan(self.icc)]
        return float(np.median(known)) if len(known) else np.nan

    def _outcomes(self) -> dict[str, int]:
        """How many units a test shows to be shared, to be personal, and leaves undecided; nothing of other splits."""
        if self.outcome is None:
            return {}
        names = {"shown shared": "shared", "shown personal": "personal", "undecided": "undecided"}
        return {says: int((self.outcome == name).sum()) for says, name in names.items()}

    def _rule(self) -> str:
        if self.outcome is not None:
            given = "shared" if self.shared[self.outcome == "undecided"].all() else "personal"
            tests = f"reliability tested against {self.threshold:.4g} (two-sided, FDR {self.fdr:.2g})"
            return f"Rule: {tests}: below, shared; above, personal; inconclusive units are treated as {given}"
        name = _NAMES[self.fit.statistic_name]
        if np.isinf(self.threshold):
            return f"Rule: all units are {'shared' if self.threshold < 0 else 'personal'} (tau = {self.tau})"
        share = (
            ""
            if isinstance(self.tau, _split.Absolute)
            else f", a quantile: {100 * (1 - float(self.tau)):g}% are shared"
        )
        return f"Rule: shared if {name} >= {self.threshold:.3g} (tau = {self.tau}{share})"

    def _lines(self) -> list[str]:
        groups, (n_shared, n_personal, n_dead) = self.group, self._counts
        by = "test" if self.outcome is not None else _NAMES[self.fit.statistic_name]
        head = f"{n_shared} shared, {n_personal} personal"
        if self.outcome is not None:
            n = {name: int((self.outcome == name).sum()) for name in ("shared", "personal", "undecided")}
            head = f"{n['shared']} shared, {n['personal']} personal, {n['undecided']} inconclusive"
        lines = [f"Split of {count(len(groups), 'unit')} by {by}: {head}, {n_dead} constant", self._rule()]
        if np.isfinite(self.threshold) and self.outcome is None:
            by_margin = np.argsort(np.where(np.isnan(self.margin), np.inf, np.abs(self.margin)))
            close = [f"{self.fit.units[j]} ({self.margin[j]:+.3f})" for j in by_margin[:6] if not self.fit.dead[j]]
            lines.append(listing("Nearest to the threshold:", close, TERMINAL))
        median = {name: self.median_icc(name) for name in ("shared", "personal", "undecided")}
        if known := [f"{coefficient(x)} on {_SAYS.get(k, k)}" for k, x in median.items() if np.isfinite(x)]:
            lines.append(f"Agreement (median ICC2): {', '.join(known)} units")
        if self.fdr is not None and self.fdr <= 0.05:
            wrong, some = (f"{100 * rate:.0f}%" for rate in WRONG_SIDE)
            lines.append(
                f"In simulations with trained networks, at most {wrong} of such conclusions were wrong, and some "
                f"conclusion was wrong in up to {some} of layers"
            )
        return [*lines, *self.fit._lines()]

    def cautions(self) -> list[Caution]:
        """Return cautions on what clients have in common, then those of the analysis behind the split."""
        found = []
        if self.contradicted:
            text = "clients agree less on shared than on personal units"
            means = ": shared means explained by other units, not alike over clients"
            of_factors = self.fit.statistic_name == "nu"
            found.append(Caution("Clients agree less on shared units", text + means * of_factors, grave=True))
        if self.outcome is not None and self.median_icc("shared") < _HARDLY:
            text = (
                "clients hardly agree on shared units; there the average over clients has the lower expected error, "
                "but it may hold nothing that they have in common"
            )
            found.append(Caution("Clients hardly agree", text))
        return [*found, *self.fit.cautions()]

    @property
    def _counts(self) -> list[int]:
        return [int((self.group == name).sum()) for name in ("shared", "personal", "dead")]


@dataclass(frozen=True, eq=False, repr=False)
class SplitMapResult(Result):
    """Splits of one layer by several analyses, as :func:`fedstat.split_map` returns it.

    Attributes
    ----------
    analyses : DataFrame (analysis)
        method, kappa (NaN for "icc", which has none), n_factors, converged, n_shared.
    shared : bool array (analysis, unit)
    dead : bool array (unit,)
        Units without variance.
    units : array (unit,)
        Labels.
    tau : str
        The threshold as it was asked for.
    """

    analyses: pd.DataFrame
    shared: NDArray[np.bool_]
    dead: NDArray[np.bool_]
    units: NDArray[Any]
    tau: str
    _figure: ClassVar[str] = "split_map"

    @property
    def p_shared(self) -> NDArray[np.float64]:
        """Share of the analyses in which each unit is shared, array (unit,)."""
        return np.asarray(self.shared.mean(0))

    @property
    def verdict(self) -> NDArray[np.str_]:
        """What all analyses say: "shared", "personal", "depends" if they differ, or "dead"; array (unit,)."""
        p = self.p_shared
        found = np.where(p == 1, "shared", np.where(p == 0, "personal", "depends"))
        return np.where(self.dead, "dead", found)

    def tidy(self) -> pd.DataFrame:
        """One row per unit: term, n_shared (analyses that share it), p_shared (their share), verdict."""
        return pd.DataFrame(
            {"term": self.units, "n_shared": self.shared.sum(0), "p_shared": self.p_shared, "verdict": self.verdict}
        )

    def augment(self) -> pd.DataFrame:
        """One row per analysis and unit: method, kappa, unit, group."""
        each = self.analyses[["method", "kappa"]].loc[np.repeat(self.analyses.index, len(self.units))]
        group = np.where(self.shared, "shared", np.where(self.dead, "dead", "personal"))
        n = len(self.shared)
        return each.reset_index(drop=True).assign(unit=np.tile(self.units, n), group=group.ravel())

    def glance(self) -> pd.DataFrame:
        """One row: analyses, not converged; units shared or personal in all, depending, dead; adjusted Rand indices."""
        pairs = self._pairs()
        row: dict[str, Any] = {"d": len(self.units), "n_analyses": len(self.shared), "tau": self.tau}
        row |= {"n_not_converged": int((~self.analyses["converged"]).sum())}
        row |= {f"n_{name}": int((self.verdict == name).sum()) for name in ("shared", "personal", "depends", "dead")}
        row |= {"adjusted_rand_median": float(np.median(pairs)) if len(pairs) else np.nan}
        row |= {"adjusted_rand_min": float(np.min(pairs)) if len(pairs) else np.nan}
        return pd.DataFrame([row])

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy(), "p_shared"

    def _pairs(self) -> NDArray[np.float64]:
        """Adjusted Rand index of every pair of analyses."""
        first, second = np.array([*combinations(range(len(self.shared)), 2)], dtype=int).reshape(-1, 2).T
        return np.asarray(_split.adjusted_rand(self.shared[first], self.shared[second]))

    def _lines(self) -> list[str]:
        x, p = self.glance().to_dict("records")[0], self.p_shared
        n = x["n_analyses"]
        of_nu = self.analyses[self.analyses["kappa"].notna()]
        by = [] if of_nu.empty else [", ".join(dict.fromkeys(of_nu["method"]))]
        by = [f"{names} at kappa {', '.join(f'{k:g}' for k in dict.fromkeys(of_nu['kappa']))}" for names in by]
        by += ["icc"] if self.analyses["kappa"].isna().any() else []
        varying = np.argsort(np.abs(p - 0.5), kind="stable")[: x["n_depends"]]
        named = [f"{self.units[j]} ({self.shared[:, j].sum()})" for j in varying]
        least, median = (coefficient(x[f"adjusted_rand_{end}"]) for end in ("min", "median"))
        return [
            f"Split of {count(x['d'], 'unit')} under {count(n, 'specification')} (tau = {self.tau})",
            f"  {'; '.join(by)}",
            (
                f"{count(x['n_shared'], 'unit')} shared in all, {x['n_personal']} personal in all, "
                f"{x['n_depends']} vary, {x['n_dead']} constant"
            ),
            f"ARI between two specifications: median {median}, minimum {least}",
            *[listing(f"Most variable (shared in x of {n}):", named, TERMINAL)] * bool(named),
        ]

    def cautions(self) -> list[Caution]:
        """Return how many specifications did not converge; mostly nothing."""
        n = int((~self.analyses["converged"]).sum())
        text = f"{count(n, 'specification')} did not converge: fedstat.split(..., max_iter=1000) usually does"
        return [Caution("Specifications not converged", text)] * bool(n)
