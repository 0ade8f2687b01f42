"""Result of replicated training: variance components, reliability, and the layer from which personal weights pay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results.base import Result, constant, extremes
from fedstat.results.split import SplitResult
from fedstat.results.tables import beside, coefficient, count, median_and_ends, p_equals
from fedstat.stats.icc import fdr as adjusted
from fedstat.stats.variance_components import Components, outcomes

Verdict = Literal["own", "mean", "undecided", "no difference shown beyond noise", "undefined"]
COLUMNS = ("layer", "personal", "conf_low", "conf_high", "p_value")
"""Columns that :func:`personal_from` reads of a table of layers."""


def verdict(personal: float, conf_low: float, conf_high: float, p_value: float, *, level: float = 0.95) -> Verdict:
    """Which weights are nearer to a client's true ones, its own or the mean over clients, as a keyword.

    A client's own weights, trained on all its data, miss its true ones by the noise, σ_e²/R; the mean over clients
    misses them by σ_b² (1 − 1/C) + σ_e²/(R C). Own is nearer, in expected squared error, if and only if σ_b² > σ_e²/R,
    that is personal > 1/2. Better than either are own weights shrunk towards the mean by the factor ``personal`` [1]_
    [2]_.

    Returns
    -------
    str
        "no difference shown beyond noise" where the test at 1 − ``level`` does not reject, which does not say that
        there is none; else "own" if the interval lies above 1/2, "mean" if below it, "undecided" if it holds 1/2;
        "undefined" for weights that are the same in all models.

    References
    ----------
    .. [1] Robinson (1991). That BLUP is a good thing: the estimation of random effects. Statistical Science 6, 15-32.
    .. [2] Efron, Morris (1973). Stein's estimation rule and its competitors: an empirical Bayes approach. JASA 68.

    Examples
    --------
    >>> verdict(0.7, 0.6, 0.8, 1e-4), verdict(0.2, 0.1, 0.3, 1e-3), verdict(0.4, -0.9, 0.8, 0.2)
    ('own', 'mean', 'no difference shown beyond noise')
    """
    if np.isnan([personal, conf_low, conf_high, p_value]).any():
        return "undefined"
    if p_value > 1 - level:
        return "no difference shown beyond noise"
    if conf_low > 0.5:
        return "own"
    return "mean" if conf_high < 0.5 else "undecided"


def personal_from(results: pd.DataFrame | Mapping[str, ComponentsResult], *, level: float = 0.95) -> str:
    """From which layer on is a client's own model nearer to its true weights than the mean over clients is?

    Parameters
    ----------
    results : DataFrame, or mapping of layer to ComponentsResult
        One row per layer, in order of depth, with columns layer, personal, conf_low, conf_high and p_value.
    level : float in (0, 1)
        Confidence level of the intervals in a table; results carry their own.

    Returns
    -------
    str
        The first layer from which on all are "own" (:func:`verdict`), with shares and intervals; or, if there is none,
        the layer that prevents it.

    Raises
    ------
    ValueError
        If there is no layer, a column is missing, or results have different levels.

    Notes
    -----
    Layers are tested from the last backwards, in an order fixed in advance, up to the first that is not "own". The
    intervals therefore need no correction for the number of layers: the chance of naming too early a layer is at most
    the chance that a single interval lies too high (Westfall and Krishen 2001, J. Statistical Planning and Inference
    99, 25-40).

    Examples
    --------
    >>> layers = pd.DataFrame({"layer": ["conv1", "fc1", "fc2"], "personal": [0.1, 0.7, 0.8],
    ...                        "conf_low": [0.0, 0.6, 0.7], "conf_high": [0.2, 0.8, 0.9], "p_value": [0.04, 0, 0]})
    >>> print(personal_from(layers))
    A client's own weights beat the mean over clients from layer fc1 on: personal share fc1 0.70 [0.60, 0.80], fc2 0.80
    [0.70, 0.90]; before it, for conv1 0.10 [0.00, 0.20] the mean beats a client's own.
    Own beats the mean, in squared error of weights, where the share is above 1/2; where it is above 0, the best lies in
    between: the mean of the trained models, moved by that share towards a client's own.
    """
    if not isinstance(results, pd.DataFrame | Mapping):
        raise ValueError(
            "results must be a table with one row per layer, or a mapping such as {'fc1': result}, but got "
            f"{type(results).__name__}"
        )
    if not isinstance(results, pd.DataFrame):
        if len(levels := {r.level for r in results.values()}) > 1:
            raise ValueError(f"layers must have intervals of one level, but got {sorted(levels)}")
        level = next(iter(levels), level)
        rows = [r.layer.assign(layer=name) for name, r in results.items()]
        results = pd.concat(rows) if rows else pd.DataFrame(columns=list(COLUMNS))
    if missing := [c for c in COLUMNS if c not in results.columns]:
        raise ValueError(f"the table of layers must have columns {', '.join(COLUMNS)}, but lacks {', '.join(missing)}")
    if results.empty:
        raise ValueError("the table of layers must have at least one row, but is empty")
    names = [str(x) for x in results["layer"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"the table must have one row per layer, but has {names.count(twice[0])} for {twice[0]!r}. Select "
            "one round, or take several together: fedstat.fl.profile(run, window=10)."
        )
    values = results[list(COLUMNS[1:])].to_numpy(dtype=float)
    verdicts = [verdict(*row, level=level) for row in values]
    shares = [f"{name} {v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" for name, v in zip(names, values, strict=True)]
    first = len(names)
    while first and verdicts[first - 1] == "own":
        first -= 1
    why = (
        "Own beats the mean, in squared error of weights, where the share is above 1/2; where it is above 0, the best "
        "lies in between: the mean of the trained models, moved by that share towards a client's own."
    )
    says = {
        "mean": "for {} the mean beats a client's own", "undecided": "{} is undecided",
        "no difference shown beyond noise": "{} shows no difference beyond noise", "undefined": "{} is undefined",
    }  # fmt: skip
    against = says[verdicts[first - 1]].format(shares[first - 1]) if first else ""
    earlier = [share for share, v in zip(shares[:first], verdicts[:first], strict=True) if v == "own"]
    if earlier:
        against += f" ({', '.join(earlier)} is own, but comes before it)"
    if first == len(names):
        found = f"No layer is shown from which on a client's own weights beat the mean: the last, {against}."
    else:
        found = f"A client's own weights beat the mean over clients from layer {names[first]} on: personal share "
        found += ", ".join(shares[first:]) + (f"; before it, {against}." if first else ", in all layers.")
    return "\n".join(line for text in (found, why) for line in wrap(text, 120, break_long_words=False))


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class ComponentsResult(Result):
    """Variance of a layer's weights between clients and of noise, as :func:`fedstat.variance_components` returns it.

    Attributes
    ----------
    components : Components
        Arrays (unit,), NaN for a unit that is identical in all clients.
    layer_components : Components
        Arrays (1,): all weights of all units as those of one unit.
    units : array (unit,)
        Labels.
    n_clients, n_replicates, n_weights : int
        Weights are those of a unit.
    method : {"moments", "reml"}
    agreement : array (unit,)
        ICC2 of the clients' means over replicates: on which units they agree.
    adjusted : bool
        Whether clients were adjusted for a covariate.
    """

    statistic_name: ClassVar[str] = "personal share"
    _figure: ClassVar[str] = "forest"

    components: Components
    layer_components: Components
    units: NDArray[Any]
    n_clients: int
    n_replicates: int
    n_weights: int
    method: str
    agreement: Floats
    adjusted: bool = False

    @property
    def level(self) -> float:
        """Confidence level of the intervals."""
        return self.components.level

    @property
    def personal(self) -> Floats:
        """Share of the differences between clients that is their own, array (unit,)."""
        return self.components.personal

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Units that have one value throughout, array (unit,)."""
        return np.isnan(self.agreement) & np.isnan(self.personal)

    @property
    def identical(self) -> NDArray[np.bool_]:
        """Units that all clients have alike, as averaging leaves them, and that are not dead; array (unit,)."""
        return np.isnan(self.personal) & ~self.dead

    @cached_property
    def p_adjusted(self) -> Floats:
        """P values adjusted over units to control the false discovery rate (Benjamini and Hochberg), array (unit,)."""
        return adjusted(self.components.p_value[:, None])[:, 0]

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: :attr:`personal`."""
        return self.personal

    def split(
        self, *, fdr: float = 0.05, margin: float = 0.5, undecided: Literal["shared", "personal"] = "shared"
    ) -> SplitResult:
        """Units shown to be shared, shown to be personal, and undecided, of which ``undecided`` says what becomes.

        A unit is shown to be personal where its personal share is above the margin, shared where it is below, by
        two-sided tests of the share at the margin. What they do not decide is no evidence of either.

        Parameters
        ----------
        fdr : float in (0, 1)
            Expected share, among the units that are called shared or personal, of those that are the other (Benjamini
            and Hochberg 1995).
        margin : float in (0, 1)
            Personal share from which on a unit is personal: 1/2, where a client's own weights begin to be nearer to its
            true ones than the mean over clients is.
        undecided : {"shared", "personal"}
            What the split does with undecided units.

        Returns
        -------
        SplitResult
            Its ``outcome`` keeps the three apart.

        Notes
        -----
        The tests are about these clients: whether the share of their differences, as they are, lies above the margin.
        In simulations with trained networks (4 to 20 clients, margins .3 to .9) on average at most .01 of the decided
        units were on the other side, and some unit was in at most .15 of layers (``simulations/inference/shares.py``).
        Where all units of a synthetic layer lie on the margin, some unit is called in at most .06 of layers, also with
        long tails or clients of unlike noise. A unit that is identical in all clients is shared.

        Examples
        --------
        >>> from fedstat import variance_components
        >>> rng = np.random.default_rng(0)
        >>> own = rng.normal(size=(20, 1, 4, 50)) * np.array([0, 0.7, 1, 3])[:, None]  # shares 0, 1/2, 2/3, 18/19
        >>> variance_components(own + rng.normal(size=(20, 2, 4, 50))).split().outcome.tolist()
        ['shared', 'undecided', 'personal', 'personal']
        """
        check.choice("undecided", undecided, ("shared", "personal"))
        outcome = outcomes(self.components, margin=margin, fdr=fdr)
        outcome = np.where(self.identical, "shared", outcome)
        shared = (outcome == "shared") | ((outcome == "undecided") & (undecided == "shared"))
        return SplitResult(np.full(len(shared), np.nan), shared, margin, "test", self, outcome, fdr)

    def by_unit(self) -> pd.DataFrame:
        """As :meth:`tidy`, with the units under ``term`` and their ``icc``: what a split's table begins with."""
        return self.tidy().rename(columns={"unit": "term"}).assign(icc=self.agreement)

    @property
    def layer(self) -> pd.DataFrame:
        """One row for the layer: the columns of :meth:`tidy`, without unit and p_adjusted."""
        return _table(self.layer_components)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the layer, see :func:`verdict`."""
        return _verdicts(self.layer_components)[0]

    def tidy(self) -> pd.DataFrame:
        """One row per unit.

        Returns
        -------
        DataFrame (unit)
            unit; between and within, variances of a weight between clients and of the noise of one replicate;
            personal, with conf_low and conf_high; p_value of the one-sided test of no variance between clients;
            p_adjusted, over units.
        """
        table = _table(self.components)
        table.insert(0, "unit", self.units)
        return table.assign(p_adjusted=self.p_adjusted)

    def glance(self) -> pd.DataFrame:
        """One row: sizes; the layer's components and verdict; personal over units (median, least, most) and counts."""
        layer = self.layer.iloc[0]
        median, least, most = median_and_ends(self.personal)
        row = {
            "d": len(self.units),
            "n_clients": self.n_clients,
            "n_replicates": self.n_replicates,
            "n_weights": self.n_weights,
            "method": self.method,
            "adjusted": self.adjusted,
            "layer_between": float(layer["between"]),
            "layer_within": float(layer["within"]),
            "layer_personal": float(layer["personal"]),
            "layer_low": float(layer["conf_low"]),
            "layer_high": float(layer["conf_high"]),
            "layer_p_value": float(layer["p_value"]),
            "verdict": self.verdict,
            "personal_median": median,
            "personal_min": least,
            "personal_max": most,
            "n_beyond_noise": self._beyond_noise,
            "n_own": int((self.components.conf_low > 0.5).sum()),
            "n_mean_better": int((self.components.conf_high < 0.5).sum()),
            "n_dead": int(self.dead.sum()),
            "n_identical": int(self.identical.sum()),
            "df": self.components.df,
            "level": self.level,
        }
        return pd.DataFrame([row])

    def augment(self, data: Any = None) -> Any:
        """:meth:`tidy` with columns derived from it.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            To put these columns beside, as :meth:`SplitResult.augment` does.

        Returns
        -------
        DataFrame (unit) or Dataset
            Besides: personal_replicate, the share for models trained on one replicate's data; shrink, the factor that
            brings a client's own difference from the mean nearest to the true one (personal, cut to 0 to 1); statistic
            (t, of the test); verdict, unit by unit, not corrected for their number; dead.
        """
        c = self.components
        table = self.tidy().assign(
            personal_replicate=c.personal_replicate,
            shrink=np.clip(c.personal, 0, 1),
            statistic=c.statistic,
            verdict=_verdicts(c),
            dead=self.dead,
        )
        return beside(table, data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy(), "personal"

    def summary(self, *, rows: int = 12) -> str:
        """Report: the layer in words, then the units.

        Parameters
        ----------
        rows : int
            Number of units to print, by descending personal share.
        """
        return f"{self!r}\n\n{self._details(rows)}"

    def _details(self, rows: int = 12) -> str:
        cut = "" if rows >= len(self.units) else f" (the {rows} highest of {len(self.units)})"
        units = self.tidy().sort_values("personal", ascending=False, kind="stable").head(rows)
        return "\n".join(
            [
                "Layer",
                self.layer.to_string(index=False, float_format="%.3g"), "",
                f"Units by personal share{cut}",
                units.to_string(index=False, float_format="%.3g"),
            ]
        )  # fmt: skip

    @property
    def _beyond_noise(self) -> int:
        """Units whose test rejects at a false discovery rate of 1 − level."""
        return int((self.p_adjusted <= 1 - self.level + 1e-12).sum())

    def _lines(self) -> list[str]:
        x = self.glance().iloc[0]
        share, low, high = (coefficient(float(x[f"layer_{name}"])) for name in ("personal", "low", "high"))
        by = "restricted maximum likelihood" if self.method == "reml" else "method of moments"
        tested = int((~np.isnan(self.p_adjusted)).sum())
        beyond = f"{x['n_beyond_noise']} of {tested} differ beyond training noise (one-sided, FDR {1 - self.level:.2g})"
        include = int(((self.components.conf_low <= 0.5) & (self.components.conf_high >= 0.5)).sum())
        sides = f"{x['n_own']} above 0.5, {x['n_mean_better']} below, {include} include it"
        lines = [
            f"Reliability of client differences: {count(len(self.units), 'unit')}, {self.n_weights} weights per unit",
            f"{self.n_clients} clients x {self.n_replicates} replicates; {by}",
            *["Clients are adjusted for a covariate"] * self.adjusted,
            f"Layer: reliability = {share}, {100 * self.level:g}% CI [{low}, {high}] (jackknife over clients)",
            f"  {self._conclusion()}",
            f"Units: median {coefficient(float(x['personal_median']))}; {beyond}",
            f"  {100 * self.level:g}% CIs for these {self.n_clients} clients (unadjusted): {sides}",
            *extremes(self.personal, self.units),
        ]
        if n := int(self.identical.sum()):
            lines.append(f"{count(n, 'unit')} {'is' if n == 1 else 'are'} identical in all clients: no differences")
        return lines + constant(self.units, self.dead)

    def _conclusion(self) -> str:
        """What the interval of the layer says, in a sentence."""
        own = "a client's weights estimate its true weights with lower expected squared error than the average over"
        p = p_equals(float(self.layer_components.p_value[0]))
        return {
            "own": f"Above 0.5: {own} clients does",
            "mean": "Below 0.5: the average over clients estimates a client's true weights with lower expected squared "
            "error than its own weights do",
            "undecided": "Inconclusive: the CI includes 0.5",
            "no difference shown beyond noise": f"No evidence of differences beyond training noise ({p})",
            "undefined": "No differences: all units are identical in all clients",
        }[self.verdict]


def _table(c: Components) -> pd.DataFrame:
    names = ("between", "within", "personal", "conf_low", "conf_high", "p_value")
    return pd.DataFrame({name: getattr(c, name) for name in names})


def _verdicts(c: Components) -> list[Verdict]:
    rows = zip(c.personal, c.conf_low, c.conf_high, c.p_value, strict=True)
    return [verdict(*row, level=c.level) for row in rows]
