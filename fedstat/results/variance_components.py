"""Result on variance components: reliability of client differences, by unit and by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results.base import Caution, Result, describe_constant, extremes, wrapped
from fedstat.results.exports import Headings
from fedstat.results.pooling import ShrunkenResult
from fedstat.results.split import SplitResult
from fedstat.results.tables import coefficient, count, join_columns, median_and_ends, p_equals
from fedstat.stats import LEAST_VARYING, Claim
from fedstat.stats.icc import fdr as adjusted
from fedstat.stats.nested import GroupComponents
from fedstat.stats.pooling import pool
from fedstat.stats.variance_components import Components, classify_units

# Lines of prints.
_ABOVE_HALF = (
    "Above 0.5: a client's weights estimate its true weights with lower expected squared error than the average over "
    "clients does"
)
_BEST = "Best, if above 0: average + reliability x (client's weights - average)"
_CONCLUSIONS = {
    "average": "below 0.5",
    "inconclusive": "inconclusive: the CI includes 0.5",
    "no difference shown beyond noise": "no evidence of differences beyond training noise",
    "undefined": "undefined: there is no CI",
}

# Variation of clients' noise from which tests of 0 err; simulations/inference/shares has how often it is exceeded.
_UNEQUAL = 0.7

Conclusion = Literal["client", "average", "inconclusive", "no difference shown beyond noise", "undefined"]
COLUMNS = ("layer", "reliability", "conf_low", "conf_high", "p_value")
"""Columns that :func:`personal_from` reads of a table of layers."""


def conclude(
    reliability: float, conf_low: float, conf_high: float, p_value: float, *, level: float = 0.95
) -> Conclusion:
    """Return a keyword for the better estimate of a client's true weights: its weights or the mean over clients.

    Parameters
    ----------
    reliability, conf_low, conf_high : float
        Reliability of client differences, with its confidence interval.
    p_value : float
        P value of the test of no variance between clients.
    level : float in (0, 1)
        Confidence level; the test rejects at 1 − ``level``.

    Returns
    -------
    str
        "no difference shown beyond noise" if the test does not reject, which is no evidence of equality. Otherwise
        "client" if the interval is above 1/2, "average" if it is below, and "inconclusive" if it includes 1/2.
        "undefined" for weights that are identical in all models.

    Notes
    -----
    Let σ_b² be the variance between C clients and σ_e² the training noise of one of R replicates. The weights of a
    client, trained on all its data, have expected squared error σ_e²/R. The mean over clients has expected squared
    error σ_b² (1 − 1/C) + σ_e²/(R C). The first is smaller if and only if σ_b² > σ_e²/R, that is, if the reliability is
    above 1/2. Shrinking a client's weights towards the mean by the factor ``reliability`` is better than either [1]_
    [2]_.

    References
    ----------
    .. [1] Robinson (1991). That BLUP is a good thing: the estimation of random effects. Statistical Science 6, 15-32.
    .. [2] Efron, Morris (1973). Stein's estimation rule and its competitors: an empirical Bayes approach. JASA 68.

    Examples
    --------
    >>> conclude(0.7, 0.6, 0.8, 1e-4), conclude(0.2, 0.1, 0.3, 1e-3), conclude(0.4, -0.9, 0.8, 0.2)
    ('client', 'average', 'no difference shown beyond noise')
    """
    if np.isnan([reliability, conf_low, conf_high, p_value]).any():
        return "undefined"
    if p_value > 1 - level:
        return "no difference shown beyond noise"
    if conf_low > 0.5:
        return "client"
    return "average" if conf_high < 0.5 else "inconclusive"


@check.named_options()
def personal_from(results: pd.DataFrame | Mapping[str, ComponentsResult], *, level: float = 0.95) -> str:
    """Find the layer from which on the reliability of client differences is above 1/2.

    From this layer on, a client's weights estimate its true weights better than the mean over clients does.

    Parameters
    ----------
    results : DataFrame, or mapping of layer to ComponentsResult
        One row per layer, in order of depth, with columns layer, reliability, conf_low, conf_high and
        p_value.
    level : float in (0, 1)
        Confidence level of the intervals in a table. Results have a level, which takes precedence.

    Returns
    -------
    str
        Report of at most 80 columns: the first layer from which on all layers are "client" (:func:`conclude`), with
        reliability and intervals, and the layer before it. If there is none, the last layer and its conclusion.

    Raises
    ------
    ValueError
        If there is no layer, a layer has several rows, a column is missing, or results have different levels.

    Notes
    -----
    Layers are tested from the last to the first, up to the first layer that is not "client". The order is fixed in
    advance, so the intervals need no adjustment for the number of layers: the probability of naming a layer too early
    is at most the probability that one interval is too high (Westfall and Krishen 2001, J. Statistical Planning and
    Inference 99, 25-40).

    Examples
    --------
    >>> layers = pd.DataFrame({"layer": ["conv1", "fc1", "fc2"], "reliability": [0.1, 0.7, 0.8],
    ...                        "conf_low": [0.0, 0.6, 0.7], "conf_high": [0.2, 0.8, 0.9], "p_value": [0.04, 0, 0]})
    >>> print(personal_from(layers))
    Reliability of client differences is above 0.5 from layer fc1 on
      fc1 0.70 [0.60, 0.80], fc2 0.80 [0.70, 0.90]
      Layer before: conv1 0.10 [0.00, 0.20], below 0.5
      95% CIs; layers are tested from the last to the first
    Above 0.5: a client's weights estimate its true weights with lower expected
      squared error than the average over clients does
    Best, if above 0: average + reliability x (client's weights - average)
    """
    if not isinstance(results, pd.DataFrame):
        if not isinstance(results, Mapping) or not all(isinstance(r, ComponentsResult) for r in results.values()):
            raise ValueError(
                "results must be a table with one row per layer, or results of fedstat.variance_components by layer, "
                f"but got {type(results).__name__}. Of a run, pass fedstat.variance_components(run) or "
                "fedstat.fl.profile(run)."
            )
        if len(levels := {r.level for r in results.values()}) > 1:
            raise ValueError(f"results must have intervals of one level, but got {sorted(levels)}. Use one level.")
        level = next(iter(levels), level)
        rows = [r.layer.assign(layer=name) for name, r in results.items()]
        results = pd.concat(rows) if rows else pd.DataFrame(columns=list(COLUMNS))
    if missing := [c for c in COLUMNS if c not in results.columns]:
        raise ValueError(f"results must have columns {', '.join(COLUMNS)}, but lacks {', '.join(missing)}")
    if results.empty:
        raise ValueError("results must have at least one row, but is empty")
    names = [str(x) for x in results["layer"]]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"results must have one row per layer, but has {names.count(duplicates[0])} for {duplicates[0]!r}. Select "
            "one round, or pool rounds: fedstat.fl.profile(run, window=10)."
        )
    values = results[list(COLUMNS[1:])].to_numpy(dtype=float)
    conclusions = [conclude(*row, level=level) for row in values]
    estimates = [f"{name} {v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" for name, v in zip(names, values, strict=True)]
    first = len(names)
    while first and conclusions[first - 1] == "client":
        first -= 1
    lines = ["No evidence that reliability is above 0.5 in the last layer"]
    if first < len(names):
        lines = [f"Reliability of client differences is above 0.5 from layer {names[first]} on"]
        lines.append(f"  {', '.join(estimates[first:])}")
    if first:
        position = "Layer before" if first < len(names) else "Last layer"
        lines.append(f"  {position}: {estimates[first - 1]}, {_CONCLUSIONS[conclusions[first - 1]]}")
    if earlier := [text for text, v in zip(estimates[:first], conclusions[:first], strict=True) if v == "client"]:
        lines.append(f"  Before it, but above 0.5: {', '.join(earlier)}")
    lines += [f"  {100 * level:g}% CIs; layers are tested from the last to the first", _ABOVE_HALF, _BEST]
    return "\n".join(map(wrapped, lines))


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class ComponentsResult(Result):
    """Variance of weights between clients and training noise, as :func:`fedstat.variance_components` returns it.

    Attributes
    ----------
    components : Components
        Arrays (unit,). NaN for a unit that is identical in all clients.
    layer_components : Components
        Arrays (1,) for the layer, in which the weights of all units count as the weights of one unit.
    units : array (unit,)
        Names of the units.
    n_clients, n_replicates, n_weights : int
        Number of clients, of replicates per client, and of weights per unit.
    method : {"moments", "reml"}
        Method of moments, or restricted maximum likelihood.
    agreement : array (unit,)
        Agreement of clients on each unit: ICC2 of the clients' means over replicates.
    adjusted : bool
        True if clients were adjusted for a covariate.
    group_components, layer_group_components : GroupComponents or None
        With groups of clients: variance between groups, of units and of the layer. ``components`` are then those of
        clients within groups.
    groups, group_sizes : array (group,) or None
        Names and numbers of clients of the groups.
    claim : {"these groups", "new groups"} or None
        What the intervals hold for: further clients of these groups, or further groups.
    noise_cv : float
        Coefficient of variation over clients of the variance of a unit's training noise, median over units: 0 for equal
        noise. With "reml" and sizes, of the noise times the number of samples.
    """

    statistic_name: ClassVar[str] = "reliability"
    _figure: ClassVar[str] = "forest"
    _by: ClassVar[str | None] = "reliability"
    _headings: ClassVar[Headings] = {
        "unit": "unit", "reliability": "reliability", "CI": ("conf_low", "conf_high"), "p (FDR)": "p_adjusted"
    }  # fmt: skip

    components: Components
    layer_components: Components
    units: NDArray[Any]
    n_clients: int
    n_replicates: int
    n_weights: int
    method: str
    agreement: Floats
    adjusted: bool = False
    group_components: GroupComponents | None = None
    layer_group_components: GroupComponents | None = None
    groups: NDArray[Any] | None = None
    group_sizes: NDArray[np.int64] | None = None
    claim: Claim | None = None
    noise_cv: float = np.nan

    @property
    def level(self) -> float:
        """Confidence level of the intervals."""
        return self.components.level

    @property
    def reliability(self) -> Floats:
        """Reliability of client differences, σ_b²/(σ_b² + σ_e²/R); array (unit,).

        σ_b² is the variance between clients, σ_e² the training noise of one of R replicates.
        """
        return self.components.reliability

    @property
    def untrained(self) -> NDArray[np.bool_]:
        """No unit: replicates that did not change are constant; bool array (unit,)."""
        return np.zeros(len(self.units), bool)

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Constant units: all weights of all clients and replicates are equal; bool array (unit,)."""
        return np.isnan(self.agreement) & np.isnan(self.reliability)

    @property
    def identical(self) -> NDArray[np.bool_]:
        """Units that are identical in all clients, as after averaging, but not constant; bool array (unit,)."""
        return np.isnan(self.reliability) & ~self.constant

    @cached_property
    def p_adjusted(self) -> Floats:
        """P values adjusted over units for the false discovery rate (Benjamini and Hochberg); array (unit,)."""
        return adjusted(self.components.p_value[:, None])[:, 0]

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: :attr:`reliability`."""
        return self.reliability

    def split(
        self, *, fdr: float = 0.05, margin: float = 0.5, inconclusive: Literal["shared", "personal"] = "shared"
    ) -> SplitResult:
        """Split by two-sided tests of each unit's reliability against a margin.

        A unit is shared if its reliability is below the margin, and personal if it is above. A unit whose test does not
        reject is inconclusive, which is no evidence of either. A unit that is identical in all clients is shared.

        Parameters
        ----------
        fdr : float in (0, 1)
            False discovery rate: expected proportion of wrong units among the units concluded to be shared or personal
            (Benjamini and Hochberg 1995).
        margin : float in (0, 1)
            Reliability that separates shared from personal units. Above 1/2, a client's weights estimate its true
            weights with lower expected squared error than the mean over clients does.
        inconclusive : {"shared", "personal"}
            Group of inconclusive units.

        Returns
        -------
        SplitResult
            ``conclusion`` holds the conclusion of each unit's test, and ``group`` the split.

        Notes
        -----
        The tests refer to the differences of these clients, not to other clients. They were simulated with trained
        networks of 4 to 20 clients and margins of 0.3 to 0.9 (``simulations/inference/shares.py``). On average at most
        0.01 of the conclusions were wrong. In at most 0.15 of layers, some conclusion was wrong. In synthetic layers
        whose units all lie on the margin, at most 0.06 of layers had a unit with a conclusion. This also held with long
        tails and with clients of unequal noise.

        Examples
        --------
        >>> from fedstat import variance_components
        >>> rng = np.random.default_rng(0)
        >>> sd = np.array([0, 0.7, 1, 3])[:, None]  # between clients: reliability 0, 1/2, 2/3, 18/19
        >>> client_weights = sd * rng.normal(size=(20, 1, 4, 50))
        >>> variance_components(client_weights + rng.normal(size=(20, 2, 4, 50))).split().conclusion.tolist()
        ['shared', 'inconclusive', 'personal', 'personal']
        """
        check.choice("inconclusive", inconclusive, ("shared", "personal"))
        conclusion = classify_units(self.components, margin=margin, fdr=fdr)
        conclusion = np.where(self.identical, "shared", conclusion)
        shared = (conclusion == "shared") | ((conclusion == "inconclusive") & (inconclusive == "shared"))
        return SplitResult(np.full(len(shared), np.nan), shared, margin, "test", self, conclusion, fdr)

    def shrunken(self, *, margin: float = 0.5) -> ShrunkenResult:
        """Draw the reliability of units towards their layer by empirical Bayes, with the probability to be shared.

        Parameters
        ----------
        margin : float in (0, 1)
            A unit is shared if its reliability is below ``margin``, as in :meth:`split`.

        Returns
        -------
        ShrunkenResult
            On the scale −log(1 − reliability) of the intervals, for the differences of these clients.

        Raises
        ------
        ValueError
            On the conditions of :func:`fedstat.stats.pooling.pool`: at least 10 units, which differ at least as much as
            their errors.
        """
        check.real("margin", margin, low=0, high=1, open_low=True, open_high=True)
        c = self.components
        df = np.full(len(self.units), float(c.df)) if c.df_interval is None else c.df_interval
        return ShrunkenResult(self, pool(-np.log1p(-c.reliability), c.std_error, df, most=c.df), margin)

    def by_unit(self) -> pd.DataFrame:
        """Return the table of :meth:`tidy` with ``term`` for ``unit``, and with icc, to begin a split's table."""
        return self.tidy().rename(columns={"unit": "term"}).assign(icc=self.agreement)

    @property
    def layer(self) -> pd.DataFrame:
        """Table of the layer, one row: columns of :meth:`tidy`, without unit and adjusted p values."""
        return _make_table(self.layer_components, self.layer_group_components)

    @property
    def conclusion(self) -> Conclusion:
        """Conclusion on the layer, a keyword of :func:`conclude`."""
        return _list_conclusions(self.layer_components)[0]

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            unit; reliability, with conf_low and conf_high; p_adjusted (false discovery rate over units) and p_value
            (one-sided, H0: no variance between clients); between (variance of a weight between clients); within
            (training noise: variance of a weight between replicates of a client). With groups of clients, these are of
            clients within groups, and there are further columns: groups_between (variance of a weight between groups);
            groups_proportion (of the variance of clients: groups, clients within groups and training noise), with
            groups_low and groups_high; groups_p_adjusted and groups_p_value (permutation test, H0: the clients of all
            groups have one distribution).
        """
        table = _make_table(self.components, self.group_components)
        table.insert(0, "unit", self.units)
        table.insert(4, "p_adjusted", self.p_adjusted)
        if self.group_components is not None:
            p_adjusted = adjusted(self.group_components.p_value[:, None])[:, 0]
            table.insert(table.shape[1] - 1, "groups_p_adjusted", p_adjusted)
        return table

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes layer and units.

        Returns
        -------
        DataFrame (1,)
            n_units, n_clients, n_replicates, n_weights (per unit), method, adjusted (for a covariate);
            layer_between, layer_within, layer_reliability, layer_low, layer_high and layer_p_value, as in
            :meth:`tidy`; conclusion (on the layer); reliability_median, reliability_min and reliability_max over units.
            Then counts of units: n_beyond_noise (p_adjusted of at most 1 − level), n_above_half and n_below_half
            (interval above and below 1/2), n_constant, n_identical (in all clients); df of the test; level; the
            field noise_cv. With groups of clients also n_groups, claim, the columns of groups of :meth:`tidy` for the
            layer, with the prefix ``layer_``, and n_groups_differ (units with groups_p_adjusted of at most 1 − level).
        """
        layer = self.layer.iloc[0]
        median, least, most = median_and_ends(self.reliability)
        row = {
            "n_units": len(self.units),
            "n_clients": self.n_clients,
            "n_replicates": self.n_replicates,
            "n_weights": self.n_weights,
            "method": self.method,
            "adjusted": self.adjusted,
            "layer_between": float(layer["between"]),
            "layer_within": float(layer["within"]),
            "layer_reliability": float(layer["reliability"]),
            "layer_low": float(layer["conf_low"]),
            "layer_high": float(layer["conf_high"]),
            "layer_p_value": float(layer["p_value"]),
            "conclusion": self.conclusion,
            "reliability_median": median,
            "reliability_min": least,
            "reliability_max": most,
            "n_beyond_noise": self._n_beyond_noise,
            "n_above_half": int((self.components.conf_low > 0.5).sum()),
            "n_below_half": int((self.components.conf_high < 0.5).sum()),
            "n_constant": int(self.constant.sum()),
            "n_identical": int(self.identical.sum()),
            "df": self.components.df,
            "level": self.level,
            "noise_cv": self.noise_cv,
        }
        if self.groups is not None:
            of_groups = {f"layer_{name}": float(x) for name, x in layer.items() if str(name).startswith("groups_")}
            differ = int((self.tidy()["groups_p_adjusted"] <= 1 - self.level + 1e-12).sum())
            row |= {"n_groups": len(self.groups), "claim": self.claim, **of_groups, "n_groups_differ": differ}
        return pd.DataFrame([row])

    def cautions(self) -> list[Caution]:
        """Return cautions on dependent clients, clients of unequal training noise, and groups of clients."""
        cautions = super().cautions()
        if self.noise_cv > _UNEQUAL:
            size = f"training noise varies between clients (CV of its variance {self.noise_cv:.1f}, median over units)"
            effect = "so that tests of no differences reject too often, and CIs may be too short"
            hint = "tests against 0.5, as by split(tau='test'), allow for it"
            cautions.append(Caution("Unequal training noise", f"{size}, {effect}; {hint}"))
        return cautions + self._cautions_on_groups()

    def augment(self, data: Any = None) -> Any:
        """Return the table of :meth:`tidy` with further columns.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            Data to which the columns are added, as by :meth:`SplitResult.augment`.

        Returns
        -------
        DataFrame (unit) or Dataset
            The columns of :meth:`tidy`; reliability_replicate (reliability of a model trained on the data of one
            replicate); shrink (factor that moves a client's difference from the mean nearest to the true difference:
            reliability, clipped to 0 to 1); statistic (t of the test); conclusion (conclusion on the unit, not adjusted
            for the number of units); constant (True for a constant unit).
        """
        c = self.components
        table = self.tidy().assign(
            reliability_replicate=c.reliability_replicate,
            shrink=np.clip(c.reliability, 0, 1),
            statistic=c.statistic,
            conclusion=_list_conclusions(c),
            constant=self.constant,
        )
        return join_columns(table, data)

    def summary(self, *, rows: int = 12) -> str:
        """Return a report on the layer, then on the units.

        Parameters
        ----------
        rows : int
            Number of units to print, in descending order of reliability.
        """
        return f"{self!r}\n\n{self._details(rows)}"

    def _details(self, rows: int = 12) -> str:
        layer = self.layer.to_string(index=False, float_format="%.3g")
        return f"Layer\n{layer}\n\n{self._list_units('Units by reliability', self.reliability, rows)}"

    @property
    def _n_beyond_noise(self) -> int:
        """Number of units whose test rejects H0 at a false discovery rate of 1 − level."""
        return int((self.p_adjusted <= 1 - self.level + 1e-12).sum())

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        reliability, low, high = (coefficient(float(x[f"layer_{name}"])) for name in ("reliability", "low", "high"))
        method = "restricted maximum likelihood" if self.method == "reml" else "method of moments"
        n_tested = int((~np.isnan(self.p_adjusted)).sum())
        test = f"one-sided, FDR {1 - self.level:.2g}"
        differing = f"{x['n_beyond_noise']} of {n_tested} differ beyond training noise ({test})"
        ci = f", {100 * self.level:g}% CI [{low}, {high}] (jackknife over {self._left_out})"
        ci = "; no CI" if np.isnan(x["layer_low"]) else ci
        in_groups = "" if self.groups is None else f" in {len(self.groups)} groups"
        n_include = int(((self.components.conf_low <= 0.5) & (self.components.conf_high >= 0.5)).sum())
        sides = f"{x['n_above_half']} above 0.5, {x['n_below_half']} below, {n_include} include it"
        within = "" if self.groups is None else " within groups"
        sizes = f"{count(len(self.units), 'unit')}, {self.n_weights} weights per unit"
        lines = [
            f"Reliability of client differences{within}: {sizes}",
            f"{self.n_clients} clients{in_groups} x {self.n_replicates} replicates; {method}",
            *["Clients are adjusted for a covariate"] * self.adjusted,
            f"Layer: reliability = {reliability}{ci}",
            f"  {self._describe_conclusion()}",
            *self._describe_groups(x),
            f"Units: median {coefficient(float(x['reliability_median']))}; {differing}",
            f"  {self._ci}s for {self._scope} (unadjusted): {sides}",
            *extremes(self.reliability, self.units),
        ]
        if n := int(self.identical.sum()):
            where = "clients" if self.groups is None else "clients of a group"
            lines.append(f"{count(n, 'unit')} {'is' if n == 1 else 'are'} identical in all {where}: no differences")
        return lines + describe_constant(self.units, self.constant)

    def _caption(self) -> list[str]:
        intervals = f"{self._ci}: jackknife over {self._left_out}, for {self._scope}"
        return [*self._lines()[:2], intervals, "p: one-sided, H0: no differences beyond training noise"]

    @property
    def _left_out(self) -> str:
        """Parts that the jackknife leaves out."""
        return {None: "clients", "these groups": "clients of each group", "new groups": "groups"}[self.claim]

    @property
    def _scope(self) -> str:
        """Clients or groups for which intervals of units hold."""
        n = self.n_clients if self.groups is None else len(self.groups)
        return {None: f"these {n} clients", "these groups": f"these {n} groups", "new groups": "new groups"}[self.claim]

    def _describe_groups(self, x: pd.Series) -> list[str]:
        """Return the lines of a print on the groups of clients, from the row of :meth:`glance`."""
        g = self.layer_group_components
        if g is None:
            return []
        of_groups, low, high = (float(x[f"layer_groups_{name}"]) for name in ("proportion", "low", "high"))
        noise = (1 - of_groups) * (1 - float(x["layer_reliability"]))
        ci = "" if np.isnan(low) else f" ({self._ci} [{coefficient(low)}, {coefficient(high)}])"
        n_tested = int((~np.isnan(self.tidy()["groups_p_value"])).sum())
        rest = f"clients within groups {coefficient(1 - of_groups - noise)}, training noise {coefficient(noise)}"
        test = f"{p_equals(float(g.p_value[0]))} ({'all' if g.exact else 'random'} permutations: {g.n_permutations})"
        differ = f"{x['n_groups_differ']} of {n_tested} units differ (FDR {1 - self.level:.2g})"
        return [
            f"  Proportions of the variance of clients: groups {coefficient(of_groups)}{ci}, {rest}",
            f"  Permutation test of groups, H0: the clients of all groups have one distribution: {test}; {differ}",
        ]

    def _cautions_on_groups(self) -> list[Caution]:
        """Return cautions on what the groups of clients do not show."""
        cautions: list[Caution] = []
        if self.groups is None or self.group_sizes is None or self.layer_group_components is None:
            return cautions
        if (n := int((self.group_sizes == 1).sum())) > 0:
            text = (
                f"{count(n, 'group')} of one client: without part in the test of groups and in the reliability within "
                "groups; for the variance between groups, the client counts as varying as others do"
            )
            cautions.append(Caution("Groups of one client", text))
        if (least := self.layer_group_components.least) > 0.05:
            text = (
                f"the permutation test of groups cannot give p <= 0.05 with groups of {check.few(self.group_sizes)} "
                f"clients, but {least:.2g} at best: a large p says nothing about groups"
            )
            cautions.append(Caution("Few permutations of groups", text))
        return cautions

    def _describe_conclusion(self) -> str:
        """Return the conclusion on the layer in a sentence."""
        p = p_equals(float(self.layer_components.p_value[0]))
        are_identical = bool(np.isnan(self.reliability).all())
        is_nested = self.groups is not None
        average = "the average over clients" if self.groups is None else "the average over its group"
        return {
            "client": _ABOVE_HALF.replace("the average over clients", average),
            "average": f"Below 0.5: {average} estimates a client's true weights with lower expected "
            "squared error than its own weights do",
            "inconclusive": "Inconclusive: the CI includes 0.5",
            "no difference shown beyond noise": f"No evidence of differences beyond training noise ({p})",
            "undefined": f"No differences: all units are identical in all clients{' of a group' * is_nested}"
            if are_identical
            else f"No conclusion: a CI needs {LEAST_VARYING} groups of at least 2 clients"
            if self.claim == "new groups"
            else f"No conclusion: a CI needs weights that vary in {min(self.n_clients, LEAST_VARYING)} clients",
        }[self.conclusion]


def _make_table(c: Components, g: GroupComponents | None) -> pd.DataFrame:
    """Return the columns of components that tables of units and of the layer have in common."""
    names = ("reliability", "conf_low", "conf_high", "p_value", "between", "within")
    table = pd.DataFrame({name: getattr(c, name) for name in names})
    if g is None:
        return table
    columns = {"between": g.between, "proportion": g.proportion, "low": g.conf_low, "high": g.conf_high}
    return table.assign(**{f"groups_{name}": x for name, x in (columns | {"p_value": g.p_value}).items()})


def _list_conclusions(c: Components) -> list[Conclusion]:
    """Return the conclusion on each unit."""
    rows = zip(c.reliability, c.conf_low, c.conf_high, c.p_value, strict=True)
    return [conclude(*row, level=c.level) for row in rows]
