"""How certain is a split, how many factors? Results of the bootstrap, the permutation test, stability, n_factors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import TERMINAL, Caution, Result, columns, listing
from fedstat.results.split import SplitResult
from fedstat.results.tables import beside, coefficient, count, p_equals
from fedstat.stats import split as _split
from fedstat.stats.factor import gap
from fedstat.stats.resampling import expanded_percentiles

Floats = NDArray[np.float64]
_LEVEL = 0.05
_LEAST_CLIENTS = 8  # from here on intervals were shown to hold, see the table of simulations
_APART = 2.0  # standard errors between groups, or between eigenvalues at the cut


@dataclass(frozen=True, eq=False, repr=False)
class BootstrapResult(Result):
    """A split and its refits on resampled clients, as :func:`fedstat.bootstrap` returns it.

    Attributes
    ----------
    split : SplitResult
        The split of the clients at hand.
    communality : array (replicate, unit)
    shared : bool array (replicate, unit)
    n_factors : int array (replicate,)
    converged : bool array (replicate,)
    level : float
        Confidence level of the intervals.
    gap : array (replicate,)
        Eigenvalues of R at the cut, see :func:`fedstat.stats.factor.gap`.
    half_samples : array (half, unit)
        ν of random halves of the clients; without rows where clients are fewer than 4.
    """

    split: SplitResult
    communality: Floats
    shared: NDArray[np.bool_]
    n_factors: NDArray[np.int64]
    converged: NDArray[np.bool_]
    level: float
    gap: Floats = field(default_factory=lambda: np.empty(0))
    half_samples: Floats = field(default_factory=lambda: np.empty((0, 0)))
    _figure: ClassVar[str] = "forest"

    @property
    def p_shared(self) -> Floats:
        """Share of the replicates in which each unit is shared, array (unit,): how often a label repeats.

        It is not the probability that the label is the population's, but was close to it or below it where the groups
        lie 3 standard errors of a unit apart and more (:attr:`separation`).
        """
        return np.asarray(self.shared.mean(0))

    @property
    def adjusted_rand(self) -> Floats:
        """Agreement of each replicate's split with the split at hand, array (replicate,)."""
        return np.asarray(_split.adjusted_rand(self.shared, self.split.shared[None]))

    @property
    def std_error(self) -> Floats:
        """Standard deviation of ν over the replicates, array (unit,); NaN for a dead unit."""
        return np.where(self._dead, np.nan, np.nanstd(np.where(self._dead, 0, self.communality), axis=0, ddof=1))

    @property
    def half_sample(self) -> Floats:
        """Mean ν of random halves of the clients, array (unit,); NaN where they are fewer than 4."""
        if not len(self.half_samples):
            return np.full(len(self._dead), np.nan)
        return np.where(self._dead, np.nan, np.nanmean(np.where(self._dead, 0, self.half_samples), axis=0))

    @property
    def separation(self) -> float:
        """Mean ν of the shared units less that of the personal ones, in mean standard errors of a unit."""
        nu, group = self.split.communality, self.split.group
        if not all((group == name).any() for name in ("shared", "personal")):
            return np.nan
        return float((nu[group == "shared"].mean() - nu[group == "personal"].mean()) / np.nanmean(self.std_error))

    @property
    def interval_label(self) -> str:
        """What the intervals are of, or why there are none."""
        n = self.split.fit.n_clients or 0
        if n < _LEAST_CLIENTS:
            return f"no CIs: they need at least {_LEAST_CLIENTS} clients"
        return f"{100 * self.level:g}% CIs: expected communality in samples of {n} clients, not the population's"

    def tidy(self) -> pd.DataFrame:
        """One row per unit: term, estimate (ν), std_error, conf_low, conf_high, half_sample, p_shared, group.

        Intervals are expanded percentiles (:func:`fedstat.stats.resampling.expanded_percentiles`), of ν that samples of
        as many clients give on average; NaN for fewer than 8 clients.
        """
        nu, n = np.where(self._dead, 0, self.communality), self.split.fit.n_clients or 0
        ends = expanded_percentiles(nu, max(n, 2), level=self.level)
        low, high = (np.where(self._dead | (n < _LEAST_CLIENTS), np.nan, end) for end in ends)
        columns = {"std_error": self.std_error, "conf_low": low, "conf_high": high, "half_sample": self.half_sample}
        return pd.DataFrame(
            {"term": self.split.fit.units, "estimate": self.split.communality}
            | columns
            | {"p_shared": self.p_shared, "group": self.split.group}
        )

    @property
    def _dead(self) -> NDArray[np.bool_]:
        return np.asarray(np.isnan(self.communality).all(0))

    def augment(self, data: Any = None) -> Any:
        """Columns of :meth:`tidy` beside what you know of the units, as :meth:`SplitResult.augment` does."""
        return beside(self.tidy().rename(columns={"term": "unit"}), data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy(), "estimate"

    def glance(self) -> pd.DataFrame:
        """One row: replicates, clients, how like the split at hand replicates are.

        ``adjusted_rand`` is the mean over replicates, ``adjusted_rand_low`` their 5 % quantile; ``n_doubtful`` counts
        units with p_shared in 0.1–0.9; ``separation`` of the groups, and ``eigenvalue_gap`` at the cut, are in standard
        errors; ``n_factors_low`` and ``n_factors_high`` are the least and most factors, ``converged`` a share.
        """
        p, ari = self.p_shared, self.adjusted_rand
        row = {
            "replicates": len(self.shared),
            "n_clients": self.split.fit.n_clients,
            "adjusted_rand": float(ari.mean()),
            "adjusted_rand_low": float(np.quantile(ari, 0.05)),
            "n_doubtful": int(((p > 0.1) & (p < 0.9)).sum()),
            "separation": self.separation,
            "n_factors_low": int(self.n_factors.min()),
            "n_factors_high": int(self.n_factors.max()),
            "eigenvalue_gap": self._eigenvalue_gap(),
            "converged": float(self.converged.mean()),
        }
        return pd.DataFrame([row])

    def _eigenvalue_gap(self) -> float:
        """Gap of the eigenvalues at the cut, in standard errors; NaN where it is not known."""
        factors = self.split.factors
        known = self.gap[np.isfinite(self.gap)]
        spread = float(known.std(ddof=1)) if len(known) > 1 else 0.0
        at_hand = float(gap(factors.eigenvalues, np.asarray(factors.n_factors)))
        return at_hand / spread if spread > 0 else np.nan

    def _lines(self) -> list[str]:
        x, p = self.glance().iloc[0], self.p_shared
        fit, split, n = self.split.fit, self.split, int(x["n_clients"])
        by_doubt = np.argsort(np.abs(p - 0.5))[: int(x["n_doubtful"])]
        doubtful = [f"{fit.units[j]} ({p[j]:.2f})" for j in by_doubt]
        sizes = ", ".join(f"{int((split.group == name).sum())} {name}" for name in ("shared", "personal"))
        means = [
            f"{name} {split.communality[of].mean():.2f} ({self.half_sample[of].mean():.2f})"
            for name in ("shared", "personal")
            if (of := split.group == name).any() and len(self.half_samples)
        ]
        often = f"{len(doubtful)} of {count(len(p), 'unit')} change group often (shared in 10% to 90% of the samples)"
        return [
            f"Bootstrap ({x['replicates']:.0f} samples of {n} clients) of a split: {sizes}",
            f"ARI with the observed split: mean {x['adjusted_rand']:.2f}, 5% quantile {x['adjusted_rand_low']:.2f}",
            often,
            *[listing(" ", doubtful, TERMINAL)] * bool(doubtful),
            f"Factors: {x['n_factors_low']:.0f} to {x['n_factors_high']:.0f}; converged: {100 * x['converged']:.0f}%",
            *[f"Mean communality (in random halves): {', '.join(means)}"] * bool(means),
            self.interval_label[:1].upper() + self.interval_label[1:],
        ]

    def cautions(self) -> list[Caution]:
        """Return where groups that recur may still be wrong, and whether refits stopped early; mostly nothing."""
        found, gap = [], self._eigenvalue_gap()
        if gap < _APART:
            text = f"eigenvalues at the cut are {gap:.1f} SE apart: factors are not identified"
            found.append(Caution("Factors not identified", text))
        if self.separation < _APART:
            text = f"groups are {self.separation:.1f} SE apart: a group that recurs often may still be wrong"
            found.append(Caution("Groups near each other", text))
        if (stopped := 1 - float(self.converged.mean())) > 0:
            text = (
                f"{100 * stopped:.0f}% of the refits had not converged: they stopped as the split itself does, and "
                "their spread is that of this many steps"
            )
            found.append(Caution("Refits not converged", text))
        return found


@dataclass(frozen=True, eq=False, repr=False)
class PermutationResult(Result):
    """Test by the spread of ν that units carry no identity, as :func:`fedstat.permutation_test` returns it.

    It sees an identity only in what other units explain: where clients agree on each unit but units explain one another
    as they would by chance, it finds nothing (:func:`fedstat.icc` asks about agreement).

    The test of all units together is two-sided. Those of single units are one-sided: a small p-value says that factors
    explain more of the unit than of shuffled ones; ``p_adjusted`` holds the false discovery rate over all units
    (Benjamini and Hochberg).

    Attributes
    ----------
    split : SplitResult
        The split of the clients at hand.
    communality : array (replicate, unit)
        ν after shuffling the units within each client.
    """

    split: SplitResult
    communality: Floats
    _figure: ClassVar[str] = "communality"

    @property
    def statistic(self) -> float:
        """Standard deviation of ν over units: how much units differ in the share that factors explain."""
        return float(np.nanstd(self.split.communality))

    @property
    def p_value(self) -> float:
        """Two-sided: twice the share of the shuffles, the data among them, whose statistic is as far out."""
        null = np.nanstd(self.communality, axis=1)
        above, below = np.sum(null >= self.statistic), np.sum(null <= self.statistic)
        return min(1.0, 2 * (1 + float(min(above, below))) / (1 + len(null)))

    def tidy(self) -> pd.DataFrame:
        """One row per unit: term, estimate (ν), p_value (one-sided, upper tail of shuffled ν), p_adjusted, group."""
        from statsmodels.stats.multitest import multipletests  # half a second to import

        null = np.sort(self.communality[~np.isnan(self.communality)])
        at_least = len(null) - np.searchsorted(null, self.split.communality)
        p = np.where(self.split.fit.dead, np.nan, (1 + at_least) / (1 + len(null)))
        adjusted, live = p.copy(), np.isfinite(p)
        adjusted[live] = multipletests(p[live], method="fdr_bh")[1]
        columns = {"estimate": self.split.communality, "p_value": p, "p_adjusted": adjusted, "group": self.split.group}
        return pd.DataFrame({"term": self.split.fit.units} | columns)

    def augment(self, data: Any = None) -> Any:
        """Columns of :meth:`tidy` beside what you know of the units, as :meth:`SplitResult.augment` does."""
        return beside(self.tidy().rename(columns={"term": "unit"}), data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy(), "estimate"

    def glance(self) -> pd.DataFrame:
        """One row: statistic, its mean under the null hypothesis, p_value, replicates, n_units (p_adjusted <= 0.05)."""
        null = float(np.nanstd(self.communality, axis=1).mean())
        row = {"statistic": self.statistic, "null_mean": null, "p_value": self.p_value}
        found = int((self.tidy()["p_adjusted"] <= _LEVEL).sum())
        return pd.DataFrame([row | {"replicates": len(self.communality), "n_units": found}])

    def verdict(self) -> str:
        """Return what the test concludes at 5%, in a sentence."""
        if 2 / (1 + len(self.communality)) > _LEVEL:
            return "too few permutations for a conclusion at 5%"
        if self.p_value > _LEVEL:
            return "no evidence against H0, which does not show exchangeability (for agreement see fedstat.icc)"
        return f"H0 is rejected at {_LEVEL:.0%}"

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        least, size = p_equals(2 / (1 + x["replicates"])), len(self.split.shared)
        return [
            f"Permutation test of communalities ({x['replicates']:.0f} permutations of units within clients)",
            "H0: units are exchangeable within clients",
            (
                f"SD of communality over {count(size, 'unit')}: {x['statistic']:.3f} observed, "
                f"{x['null_mean']:.3f} expected under H0"
            ),
            f"  {p_equals(x['p_value'])} (two-sided; smallest possible {least}): {self.verdict()}",
            f"Units: {x['n_units']:.0f} of {size} have a higher communality than under H0 (one-sided, FDR {_LEVEL:g})",
        ]


@dataclass(frozen=True, eq=False, repr=False)
class SensitivityResult(Result):
    """The split under other choices of the analyst, as :func:`fedstat.sensitivity` returns it.

    Attributes
    ----------
    reference : SplitResult
    table : DataFrame
        One row per variant: varied, value, adjusted_rand and same_state with the reference, n_factors, converged,
        n_heywood.
    """

    reference: SplitResult
    table: pd.DataFrame
    _figure: ClassVar[str] = "sensitivity"

    def tidy(self) -> pd.DataFrame:
        """One row per variant of the analysis."""
        return self.table.copy()

    def glance(self) -> pd.DataFrame:
        """One row: the smallest adjusted Rand index for each thing varied."""
        return self.table.groupby("varied", sort=False)["adjusted_rand"].min().to_frame().T.reset_index(drop=True)

    def _lines(self) -> list[str]:
        split, factors = self.reference, self.reference.factors
        counts = ", ".join(f"{int((split.group == name).sum())} {name}" for name in ("shared", "personal"))
        kappa = "" if factors.kappa is None else f"kappa = {factors.kappa:g}, "
        settings = f"{factors.method}, {kappa}tau = {split.tau}, {count(factors.n_factors, 'factor')}"
        rows = [("setting", "value", "ARI", "unchanged", "factors", "converged", "Heywood")]
        rows += [
            (
                x["varied"], str(x["value"]), coefficient(x["adjusted_rand"]), coefficient(x["same_state"]),
                str(x["n_factors"]), "yes" if x["converged"] else "no", str(x["n_heywood"]),
            )
            for x in self.table.to_dict("records")
        ]  # fmt: skip
        return [
            "Sensitivity of the split to analysis choices, changed one at a time",
            f"Reference: {counts} ({settings})",
            *columns(rows, n_right=6),
            (
                "ARI with the reference: 1 identical, 0 chance. unchanged: proportion of units in the same group "
                "(ARI = 1, unchanged = 0: groups swapped)."
            ),
        ]


@dataclass(frozen=True, eq=False, repr=False)
class NFactorsResult(Result):
    """Numbers of factors that different rules advise, as :func:`fedstat.n_factors` returns it.

    Attributes
    ----------
    numbers : dict of int
        Rule to number of factors: kappa, kaiser, parallel_pc, parallel_fa, map, scree.
    curves : dict of arrays
        eigenvalues, reduced, noise_pc, noise_fa (unit,), map (m,).
    kappa : float
    n_obs : int
        Rows that parallel analysis assumed.
    """

    numbers: dict[str, int]
    curves: dict[str, Floats]
    kappa: float
    n_obs: int
    _figure: ClassVar[str] = "scree"

    def tidy(self) -> pd.DataFrame:
        """One row per rule: term, n_factors, share of the eigenvalues' sum that they hold, what the rule says."""
        says = {
            "kappa": f"proportion of the eigenvalue sum >= {self.kappa:g}",
            "kaiser": "eigenvalue > 1",
            "parallel_pc": "eigenvalue above random data",
            "parallel_fa": "eigenvalue above random data, SMCs on diagonal",
            "map": "minimum mean squared partial correlation",
            "scree": "sharpest bend of the eigenvalues",
        }
        share = np.concatenate([[0.0], np.cumsum(self.curves["eigenvalues"]) / np.sum(self.curves["eigenvalues"])])
        rows = [
            {"term": rule, "n_factors": g, "share": share[g], "criterion": says[rule]}
            for rule, g in self.numbers.items()
        ]
        return pd.DataFrame(rows)

    def glance(self) -> pd.DataFrame:
        """One row: units, rows, and the number of factors by each rule."""
        row: dict[str, Any] = {"d": len(self.curves["eigenvalues"]), "n_obs": self.n_obs}
        return pd.DataFrame([row | self.numbers])

    def _lines(self) -> list[str]:
        names = {
            "kappa": f"kappa = {self.kappa:g}",
            "kaiser": "Kaiser",
            "parallel_pc": "parallel analysis, PC",
            "parallel_fa": "parallel analysis, FA",
            "map": "MAP",
        }
        size = f"{count(len(self.curves['eigenvalues']), 'unit')}, {self.n_obs} rows"
        numbers, says = self.numbers, self.tidy()["criterion"]
        width = max(len(names.get(rule, rule)) for rule in numbers)
        return [
            f"Number of factors ({size}): the rules range from {min(numbers.values())} to {max(numbers.values())}",
            *(
                f"  {names.get(rule, rule):<{width}}  {n:>4}  {criterion}"
                for (rule, n), criterion in zip(numbers.items(), says, strict=True)
            ),
        ]
