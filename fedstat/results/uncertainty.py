"""Results on the uncertainty of a split (bootstrap, permutation test, sensitivity) and on the number of factors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import NOT_INDEPENDENT, Caution, Result, aligned, listing
from fedstat.results.exports import Headings
from fedstat.results.split import SplitResult
from fedstat.results.tables import count, join_columns, p_equals
from fedstat.stats import LEAST_FOR_PERCENTILES, Claim
from fedstat.stats import split as _split
from fedstat.stats.factor import gap
from fedstat.stats.resampling import expanded_percentiles

Floats = NDArray[np.float64]
_LEVEL = 0.05
SAMPLED = {None: "clients", "new groups": "groups", "these groups": "clients of these groups"}
"""Sampling units by the claim about groups."""
MIN_SEPARATION = 2.0  # standard errors between groups, or between eigenvalues at the cut


@dataclass(frozen=True, eq=False, repr=False)
class BootstrapResult(Result):
    """A split and its refits on bootstrap samples of clients, as :func:`fedstat.bootstrap` returns it.

    Attributes
    ----------
    split : SplitResult
        Observed split, of all clients.
    communality : array (bootstrap sample, unit)
        Communality ν in each bootstrap sample.
    shared : bool array (bootstrap sample, unit)
        True where a bootstrap sample shares a unit.
    n_factors : int array (bootstrap sample,)
        Number of factors.
    converged : bool array (bootstrap sample,)
        True if the fit converged.
    level : float
        Confidence level of the intervals.
    gap : array (bootstrap sample,)
        Difference of the eigenvalues of R at the cut, the last factor's and the next; see
        :func:`fedstat.stats.factor.gap`.
    half_samples : array (half, unit)
        Communality in random halves of the clients. No rows for fewer than 4 clients, or with groups.
    claim : {"these groups", "new groups"} or None
        With groups of clients, what samples consist of: clients of these groups, or whole groups.
    group_sizes : int array (group,) or None
        Number of clients of each group.
    """

    split: SplitResult
    communality: Floats
    shared: NDArray[np.bool_]
    n_factors: NDArray[np.int64]
    converged: NDArray[np.bool_]
    level: float
    gap: Floats = field(default_factory=lambda: np.empty(0))
    half_samples: Floats = field(default_factory=lambda: np.empty((0, 0)))
    claim: Claim | None = None
    group_sizes: NDArray[np.int64] | None = None
    _figure: ClassVar[str] = "forest"
    _by: ClassVar[str | None] = "estimate"
    _headings: ClassVar[Headings] = {
        "unit": "term", "group": "group", "communality": "estimate", "CI": ("conf_low", "conf_high"), "SE": "std_error",
        "shared in": "prop_shared",
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, -1)

    @property
    def prop_shared(self) -> Floats:
        """Selection frequency: proportion of the bootstrap samples that share a unit; array (unit,).

        It is not the probability that the unit is shared in the population. In simulations, it was near that
        probability or below it if groups were at least 3 standard errors of a unit apart (:attr:`separation`).
        """
        return np.asarray(self.shared.mean(0))

    @property
    def ari(self) -> Floats:
        """Adjusted Rand index of each bootstrap sample's split with the observed split; array (bootstrap sample,)."""
        return np.asarray(_split.adjusted_rand(self.shared, self.split.shared[None]))

    @property
    def std_error(self) -> Floats:
        """Standard deviation of the communality over bootstrap samples; array (unit,), NaN for a constant unit."""
        return np.where(
            self._constant, np.nan, np.nanstd(np.where(self._constant, 0, self.communality), axis=0, ddof=1)
        )

    @property
    def half_sample(self) -> Floats:
        """Mean communality in random halves of the clients; array (unit,), NaN for fewer than 4 clients."""
        if not len(self.half_samples):
            return np.full(len(self._constant), np.nan)
        return np.where(self._constant, np.nan, np.nanmean(np.where(self._constant, 0, self.half_samples), axis=0))

    @property
    def separation(self) -> float:
        """Mean communality of shared minus personal units, in mean standard errors of a unit."""
        return separate(self.split, self.std_error)

    @property
    def interval_label(self) -> str:
        """Description of the intervals and their level, or the reason why there are none."""
        if not self._has_intervals:
            least = LEAST_FOR_PERCENTILES - 1 if self.claim == "these groups" else LEAST_FOR_PERCENTILES
            beyond = " more than groups" if self.claim == "these groups" else ""
            return f"no CIs: they need at least {least} {SAMPLED[self.claim]}{beyond}"
        size = f"{self._n_sampled} {SAMPLED[self.claim]}"
        return f"{100 * self.level:g}% CIs: expected communality in samples of {size}, not the population's"

    @property
    def _n_sampled(self) -> int:
        """Number of clients or groups of a sample."""
        if self.claim == "new groups" and self.group_sizes is not None:
            return len(self.group_sizes)
        return self.split.fit.n_clients or 0

    @property
    def _df(self) -> int:
        """Number of clients or groups of a sample, minus the number of means."""
        n_means = 1 if self.claim != "these groups" or self.group_sizes is None else len(self.group_sizes)
        return self._n_sampled - n_means

    @property
    def _has_intervals(self) -> bool:
        return self._df >= LEAST_FOR_PERCENTILES - 1

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            term (the unit); group in the observed split; estimate (communality ν), conf_low, conf_high and std_error;
            prop_shared (selection frequency); half_sample (mean communality in random halves of the clients).

        Notes
        -----
        The intervals are expanded percentiles (:func:`fedstat.stats.resampling.expanded_percentiles`). They are for the
        expected communality in samples of as many clients, not for the population's. NaN for fewer than 8 clients, 8
        whole groups, or 7 clients of these groups more than groups.
        """
        nu, n = np.where(self._constant, 0, self.communality), self._n_sampled
        if self.claim == "these groups" and self.group_sizes is not None:
            n = int(self.group_sizes.min())
        ends = expanded_percentiles(nu, max(n, 2), level=self.level, df=max(self._df, 1))
        low, high = (np.where(self._constant | (not self._has_intervals), np.nan, end) for end in ends)
        columns = {"estimate": self.split.communality, "conf_low": low, "conf_high": high, "std_error": self.std_error}
        return pd.DataFrame(
            {"term": self.split.fit.units, "group": self.split.group}
            | columns
            | {"prop_shared": self.prop_shared, "half_sample": self.half_sample}
        )

    @property
    def _constant(self) -> NDArray[np.bool_]:
        """Constant units; bool array (unit,)."""
        return np.asarray(np.isnan(self.communality).all(0))

    def augment(self, data: Any = None) -> Any:
        """Add the columns of :meth:`tidy` to data about the units, as :meth:`SplitResult.augment` does."""
        return join_columns(self.tidy().rename(columns={"term": "unit"}), data)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the bootstrap samples.

        Returns
        -------
        DataFrame (1,)
            n_boot (bootstrap samples), n_clients; claim (None without groups); ari and ari_low (mean and 5%
            quantile of the adjusted Rand index with the observed split); n_doubtful (units with prop_shared between 0.1
            and 0.9); separation (of the groups, in standard errors); n_factors_low and n_factors_high (fewest and most
            factors); eigenvalue_gap (at the cut, in standard errors); converged (proportion of the fits).
        """
        p, ari = self.prop_shared, self.ari
        row = {
            "n_boot": len(self.shared),
            "n_clients": self.split.fit.n_clients,
            "claim": self.claim,
            "ari": float(ari.mean()),
            "ari_low": float(np.quantile(ari, 0.05)),
            "n_doubtful": int(((p > 0.1) & (p < 0.9)).sum()),
            "separation": self.separation,
            "n_factors_low": int(self.n_factors.min()),
            "n_factors_high": int(self.n_factors.max()),
            "eigenvalue_gap": self._measure_gap(),
            "converged": float(self.converged.mean()),
        }
        return pd.DataFrame([row])

    def _measure_gap(self) -> float:
        """Return the gap of the eigenvalues at the cut, in standard errors; NaN if it is unknown."""
        factors = self.split.factors
        gaps = self.gap[np.isfinite(self.gap)]
        std_error = float(gaps.std(ddof=1)) if len(gaps) > 1 else 0.0
        observed = float(gap(factors.eigenvalues, np.asarray(factors.n_factors)))
        return observed / std_error if std_error > 0 else np.nan

    def _lines(self) -> list[str]:
        x, p = self.glance().iloc[0], self.prop_shared
        fit, split, samples = self.split.fit, self.split, count(int(x["n_boot"]), "sample")
        by_frequency = np.argsort(np.abs(p - 0.5))[: int(x["n_doubtful"])]
        doubtful = [f"{fit.units[j]} ({p[j]:.2f})" for j in by_frequency]
        sizes = ", ".join(f"{int((split.group == name).sum())} {name}" for name in ("shared", "personal"))
        means = [
            f"{name} {split.communality[is_member].mean():.2f} ({self.half_sample[is_member].mean():.2f})"
            for name in ("shared", "personal")
            if (is_member := split.group == name).any() and len(self.half_samples)
        ]
        changes = f"{len(doubtful)} of {count(len(p), 'unit')} change group often (shared in 10% to 90% of the samples)"
        return [
            f"Bootstrap ({samples} of {self._n_sampled} {SAMPLED[self.claim]}) of a split: {sizes}",
            f"ARI with the observed split: mean {x['ari']:.2f}, 5% quantile {x['ari_low']:.2f}",
            changes,
            *[listing(" ", doubtful)] * bool(doubtful),
            f"Factors: {x['n_factors_low']:.0f} to {x['n_factors_high']:.0f}; converged: {100 * x['converged']:.0f}%",
            *[f"Mean communality (in random halves): {', '.join(means)}"] * bool(means),
            self.interval_label[:1].upper() + self.interval_label[1:],
        ]

    def cautions(self) -> list[Caution]:
        """Return cautions on dependent clients, eigenvalues or groups near each other, and fits not converged."""
        cautions, gap = over_samples(super().cautions(), self.claim), self._measure_gap()
        if gap < MIN_SEPARATION:
            text = f"eigenvalues at the cut are {gap:.1f} SE apart: factors are not identified"
            cautions.append(Caution("Factors not identified", text))
        if self.separation < MIN_SEPARATION:
            text = f"groups are {self.separation:.1f} SE apart: a group that recurs often may still be wrong"
            cautions.append(Caution("Groups near each other", text))
        if (stopped := 1 - float(self.converged.mean())) > 0:
            text = (
                f"{100 * stopped:.0f}% of the refits had not converged: they stopped as the split itself does, and "
                "their spread is that of this many steps"
            )
            cautions.append(Caution("Refits not converged", text))
        return cautions


def over_samples(cautions: list[Caution], claim: Claim | None) -> list[Caution]:
    """Return cautions; if whole groups were sampled, without those on dependent clients."""
    return [caution for caution in cautions if claim != "new groups" or caution.title != NOT_INDEPENDENT]


def separate(split: SplitResult, std_error: Floats) -> float:
    """Return the mean communality of shared minus personal units, in mean standard errors.

    NaN without both groups, or with standard errors of 0, as of equal clients.
    """
    nu, group = split.communality, split.group
    if not all((group == name).any() for name in ("shared", "personal")):
        return np.nan
    difference, error = nu[group == "shared"].mean() - nu[group == "personal"].mean(), np.nanmean(std_error)
    return float(difference / error) if error > 0 else np.nan


@dataclass(frozen=True, eq=False, repr=False)
class PermutationResult(Result):
    """Permutation test of communalities, as :func:`fedstat.permutation_test` returns it.

    H0: units are exchangeable within clients. With common initial parameters or a common pruning mask, H0 is false by
    construction.

    The test of all units together is two-sided, on the standard deviation of ν over units. It detects only differences
    in how far other units explain a unit. It does not detect agreement of clients, see :func:`fedstat.icc`.

    Tests of single units are one-sided: a small p value is evidence that the factors explain more of the unit than of
    permuted units. ``p_adjusted`` controls the false discovery rate over all units (Benjamini and Hochberg).

    Attributes
    ----------
    split : SplitResult
        Observed split.
    communality : array (permutation, unit)
        Communality ν after a permutation of the units within each client.
    n_groups : int or None
        Number of groups of clients, whose units are permuted alike; None without groups.
    """

    split: SplitResult
    communality: Floats
    n_groups: int | None = None
    _figure: ClassVar[str] = "communality"
    _by: ClassVar[str | None] = "estimate"
    _headings: ClassVar[Headings] = {
        "unit": "term", "group": "group", "communality": "estimate", "p (FDR)": "p_adjusted"
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, 1, -1)

    @property
    def statistic(self) -> float:
        """Standard deviation of the communality over units."""
        return float(np.nanstd(self.split.communality))

    @property
    def p_value(self) -> float:
        """Two-sided p value: twice the proportion of permutations, with the data, whose statistic is as extreme."""
        null = np.nanstd(self.communality, axis=1)
        above, below = np.sum(null >= self.statistic), np.sum(null <= self.statistic)
        return min(1.0, 2 * (1 + float(min(above, below))) / (1 + len(null)))

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            term (the unit); group in the observed split; estimate (communality ν); p_adjusted (false discovery rate
            over units); p_value (one-sided, upper tail of the communalities of permuted units).
        """
        from statsmodels.stats.multitest import multipletests  # half a second to import

        null = np.sort(self.communality[~np.isnan(self.communality)])
        at_least = len(null) - np.searchsorted(null, self.split.communality)
        p = np.where(self.split.fit.constant, np.nan, (1 + at_least) / (1 + len(null)))
        adjusted, is_tested = p.copy(), np.isfinite(p)
        adjusted[is_tested] = multipletests(p[is_tested], method="fdr_bh")[1]
        columns = {"group": self.split.group, "estimate": self.split.communality, "p_adjusted": adjusted, "p_value": p}
        return pd.DataFrame({"term": self.split.fit.units} | columns)

    def augment(self, data: Any = None) -> Any:
        """Add the columns of :meth:`tidy` to data about the units, as :meth:`SplitResult.augment` does."""
        return join_columns(self.tidy().rename(columns={"term": "unit"}), data)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the test.

        Returns
        -------
        DataFrame (1,)
            statistic (standard deviation of the communality over units); null_mean (its mean under H0); p_value;
            n_permutations; n_significant (units with p_adjusted <= 0.05).
        """
        null = float(np.nanstd(self.communality, axis=1).mean())
        row = {"statistic": self.statistic, "null_mean": null, "p_value": self.p_value}
        n_significant = int((self.tidy()["p_adjusted"] <= _LEVEL).sum())
        return pd.DataFrame([row | {"n_permutations": len(self.communality), "n_significant": n_significant}])

    def conclude(self) -> str:
        """Return the conclusion of the test at 5%, in words."""
        if 2 / (1 + len(self.communality)) > _LEVEL:
            return "too few permutations for a conclusion at 5%"
        if self.p_value > _LEVEL:
            return "no evidence against H0, which does not show exchangeability (for agreement see fedstat.icc)"
        return f"H0 is rejected at {_LEVEL:.0%}"

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        least, size, n = p_equals(2 / (1 + x["n_permutations"])), len(self.split.shared), x["n_significant"]
        permutations = count(int(x["n_permutations"]), "permutation")
        parts = "clients" if self.n_groups is None else f"{self.n_groups} groups of clients"
        return [
            f"Permutation test of communalities ({permutations} of units within {parts})",
            f"H0: units are exchangeable within {parts}",
            (
                f"SD of communality over {count(size, 'unit')}: {x['statistic']:.3f} observed, "
                f"{x['null_mean']:.3f} expected under H0"
            ),
            f"  {p_equals(x['p_value'])} (two-sided; smallest possible {least}): {self.conclude()}",
            f"Units: {n:.0f} of {size} have a higher communality than under H0 (one-sided, FDR {_LEVEL:g})",
        ]


@dataclass(frozen=True, eq=False, repr=False)
class SensitivityResult(Result):
    """Sensitivity of a split to analysis choices, as :func:`fedstat.sensitivity` returns it.

    Attributes
    ----------
    reference : SplitResult
        Split that the variants are compared with.
    table : DataFrame (variant)
        varied and value (the changed setting and its value); ari (adjusted Rand index with the reference);
        prop_unchanged (proportion of units in the same group as in the reference); n_factors; converged; n_heywood
        (number of Heywood cases).
    """

    reference: SplitResult
    table: pd.DataFrame
    _figure: ClassVar[str] = "sensitivity"
    _headings: ClassVar[Headings] = {
        "setting": "varied", "value": "value", "ARI": "ari", "unchanged": "prop_unchanged", "factors": "n_factors",
        "converged": "converged", "Heywood": "n_heywood",
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, 1, -1)

    def tidy(self) -> pd.DataFrame:
        """Return one row per variant of the analysis, with the columns of :attr:`table`."""
        return self.table.copy()

    def glance(self) -> pd.DataFrame:
        """Return one row with a column per varied setting: its smallest adjusted Rand index with the reference."""
        return self.table.groupby("varied", sort=False)["ari"].min().to_frame().T.reset_index(drop=True)

    def _lines(self) -> list[str]:
        split, factors = self.reference, self.reference.factors
        counts = ", ".join(f"{int((split.group == name).sum())} {name}" for name in ("shared", "personal"))
        kappa = "" if factors.kappa is None else f"kappa = {factors.kappa:g}, "
        settings = f"{factors.method}, {kappa}tau = {split.tau}, {count(factors.n_factors, 'factor')}"
        return [
            "Sensitivity of the split to analysis choices, changed one at a time",
            f"Reference: {counts} ({settings})",
            *aligned(self._printed(2), indent="  ").splitlines(),
            (
                "ARI with the reference: 1 identical, 0 chance. unchanged: proportion of units in the same group "
                "(ARI = 1, unchanged = 0: groups swapped)."
            ),
        ]


@dataclass(frozen=True, eq=False, repr=False)
class NFactorsResult(Result):
    """Number of factors by different rules, as :func:`fedstat.n_factors` returns it.

    Attributes
    ----------
    numbers : dict of int
        Number of factors by rule: kappa, kaiser, parallel_pc, parallel_fa, map, scree.
    curves : dict of arrays
        eigenvalues of R; reduced (eigenvalues of R with squared multiple correlations on the diagonal); noise_pc and
        noise_fa (quantiles of the eigenvalues of random data, to compare with these two). Arrays (unit,). map (the MAP
        criterion by number of factors), array (m,).
    kappa : float
        κ, the proportion of the eigenvalue sum that the factors must reach.
    n_obs : int
        Number of rows that parallel analysis assumed.
    draws : int or None
        Number of random data sets of parallel analysis; None if unknown.
    quantile : float or None
        Quantile of their eigenvalues.
    """

    numbers: dict[str, int]
    curves: dict[str, Floats]
    kappa: float
    n_obs: int
    draws: int | None = None
    quantile: float | None = None
    _figure: ClassVar[str] = "scree"
    _headings: ClassVar[Headings] = {
        "rule": "term", "factors": "n_factors", "proportion": "share", "criterion": "criterion"
    }  # fmt: skip

    def tidy(self) -> pd.DataFrame:
        """Return one row per rule.

        Returns
        -------
        DataFrame (rule)
            term (the rule); n_factors; share (proportion of the eigenvalue sum that the factors reach); criterion, in
            words.
        """
        criteria = {
            "kappa": f"proportion of the eigenvalue sum >= {self.kappa:g}",
            "kaiser": "eigenvalue > 1",
            "parallel_pc": "eigenvalue above random data",
            "parallel_fa": "eigenvalue above random data, SMCs on diagonal",
            "map": "minimum mean squared partial correlation",
            "scree": "sharpest bend of the eigenvalues",
        }
        eigenvalues = self.curves["eigenvalues"]
        proportion = np.concatenate([[0.0], np.cumsum(eigenvalues) / np.sum(eigenvalues)])
        rows = [
            {"term": rule, "n_factors": g, "share": proportion[g], "criterion": criteria[rule]}
            for rule, g in self.numbers.items()
        ]
        return pd.DataFrame(rows)

    def glance(self) -> pd.DataFrame:
        """Return one row: n_units, n_obs (rows), draws, quantile, and the number of factors by each rule."""
        row: dict[str, Any] = {"n_units": len(self.curves["eigenvalues"]), "n_obs": self.n_obs}
        row |= {"draws": self.draws, "quantile": self.quantile}
        return pd.DataFrame([row | self.numbers])

    def numbers_by_name(self) -> dict[str, int]:
        """Return the numbers by the names of the rules in prints and figures."""
        names = {
            "kappa": f"kappa = {self.kappa:g}",
            "kaiser": "Kaiser",
            "parallel_pc": "parallel analysis, PC",
            "parallel_fa": "parallel analysis, FA",
            "map": "MAP",
        }
        return {names.get(rule, rule): g for rule, g in self.numbers.items()}

    def _lines(self) -> list[str]:
        size = f"{count(len(self.curves['eigenvalues']), 'unit')}, {self.n_obs} rows"
        numbers, criteria = self.numbers_by_name(), self.tidy()["criterion"]
        width = max(map(len, numbers))
        return [
            f"Number of factors ({size}): the rules range from {min(numbers.values())} to {max(numbers.values())}",
            *(
                f"  {name:<{width}}  {n:>4}  {criterion}"
                for (name, n), criterion in zip(numbers.items(), criteria, strict=True)
            ),
            *self._describe_draws(),
        ]

    def _describe_draws(self) -> list[str]:
        """Return the line on the random data of parallel analysis."""
        if self.draws is None or self.quantile is None:
            return []
        noise = f"{count(self.draws, 'draw')} of {self.n_obs} independent rows"
        return [f"Random data: {100 * self.quantile:g}% quantile of {noise}"]
