"""Partial pooling of units by empirical Bayes: intervals, probabilities, refusals, and power beside the FDR rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import fedstat
from fedstat.results import ComponentsResult, IccResult, ShrunkenResult
from simulations.inference.agreement import has_caution_on_clients
from simulations.inference.layers import POPULATIONS
from simulations.inference.pools import Kind
from simulations.inference.shares import _ALIKE, _PLACES, trained
from simulations.inference.table import Case, Claim
from simulations.inference.weights import WEIGHTS, smooth


class Fit(NamedTuple):
    """An analysis of units, and their true values.

    Attributes
    ----------
    result : IccResult or ComponentsResult
    units : array (unit,)
        True ICC2 or reliability of each unit.
    """

    result: IccResult | ComponentsResult
    units: np.ndarray

    def margin(self, unshared: float = 0.5) -> float:
        """Margin beyond which all but a proportion ``unshared`` of the units is shared, within 0.01 and 0.99."""
        of_agreement = isinstance(self.result, IccResult)
        return float(np.clip(np.nanquantile(self.units, unshared if of_agreement else 1 - unshared), 0.01, 0.99))

    @property
    def shared(self) -> np.ndarray:
        """Units that are truly shared beyond the margin, bool array (unit,)."""
        of_agreement = isinstance(self.result, IccResult)
        return np.asarray(self.units > self.margin() if of_agreement else self.units < self.margin())

    def pooled(self, unshared: float = 0.5) -> ShrunkenResult | None:
        """Pool the units; None if this is refused, or if there is a caution on the clients."""
        if isinstance(self.result, IccResult) and has_caution_on_clients(self.result):
            return None
        try:
            return self.result.shrunken(margin=self.margin(unshared))
        except ValueError as error:
            if not str(error).startswith("pooling needs"):
                raise
            return None


Draw = Callable[[np.random.Generator], Fit]


def of_population(name: str, clients: int, rng: np.random.Generator) -> Fit:
    """Agreement of clients of a population of ``layers``."""
    sample = POPULATIONS[name].draw(clients, rng)
    return Fit(fedstat.icc(sample.weights), sample.units)


def of_replicates(kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator) -> Fit:
    """Reliability of differences of trained clients."""
    drawn = trained(kind, steps, layer, clients, rng)
    return Fit(fedstat.variance_components(drawn.weights), drawn.units)


SHARES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "half of the units": lambda n, rng: np.where(rng.random(n) < 0.5, 0.6, 0.0),
    "one unit in ten": lambda n, rng: np.where(rng.random(n) < 0.1, 0.6, 0.0),
    "logistic shares": lambda n, rng: 1 / (1 + np.exp(1 - rng.normal(size=n))),
    "alike shares": lambda n, rng: 1 / (1 + np.exp(1 - 0.3 * rng.normal(size=n))),
}
"""Proportions of the variance of units (unit,) that clients have in common."""


def of_shares(shares: str, units: int, clients: int, event: str, rng: np.random.Generator) -> Fit:
    """Agreement on smooth units; a fifth of the units is constant, or one client diverged, if ``event`` says so."""
    common = SHARES[shares](units, rng)[:, None]
    profile = np.sqrt(common) * smooth(rng.normal(size=(units, WEIGHTS)))
    w = profile + np.sqrt(1 - common) * smooth(rng.normal(size=(clients, units, WEIGHTS)))
    size = profile.var(axis=1, ddof=1)
    truth = size / (size + 1 - common[:, 0])
    if event == "a fifth constant":
        w[:, ::5], truth[::5] = 0, np.nan
    if event == "one diverged":
        w[0] *= 10
    return Fit(fedstat.icc(w), truth)


def coverage(draw: Draw, rng: np.random.Generator) -> list[Any]:
    """Whether pooled intervals cover: all units, the tenth with the highest probability, and units called shared.

    Coverage of called units is 1 minus the false coverage rate (Benjamini and Yekutieli 2005, JASA 100, 71-81): of the
    called units, and 1 if none is called. The margin is the median of the true values, or such that 15 % are shared.
    """
    fit = draw(rng)
    if (pooled := fit.pooled()) is None:
        return [np.nan] * 4
    table, rates = pooled.tidy(), []
    covers = (table["conf_low"] <= fit.units) & (fit.units <= table["conf_high"])
    hits = np.where(np.isfinite(table["conf_low"]) & np.isfinite(fit.units), covers, np.nan)
    order = np.argsort(-np.where(np.isnan(hits), -1, pooled.probability), kind="stable")
    for result in (pooled, fit.pooled(0.85)):
        called = np.zeros(len(hits), bool) if result is None else result.split().shared
        rates.append(1 - (hits[called] == 0).sum() / max(1, called.sum()))
    return [hits, hits[order[: max(1, len(order) // 10)]], *rates]


def wrongly_called(draw: Draw, rng: np.random.Generator) -> float:
    """Proportion of units on the other side of the margin among the units called shared."""
    fit = draw(rng)
    if (pooled := fit.pooled()) is None:
        return np.nan
    called = pooled.split().shared & np.isfinite(fit.units)
    return float((called & ~fit.shared).sum() / max(1, called.sum()))


def gains(draw: Draw, rng: np.random.Generator) -> list[Any]:
    """Whether pooling is refused, or clients have a caution; units that it brings nearer, whose intervals it shortens.

    Nearer to the true value on the scale −log(1 − x), and shorter than without pooling.
    """
    fit = draw(rng)
    if (pooled := fit.pooled()) is None:
        return [1.0, np.nan, np.nan]
    table, single = pooled.tidy(), fit.result.by_unit()
    is_known = np.isfinite(table["conf_low"]) & np.isfinite(fit.units)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = [np.abs(np.log1p(-x) - np.log1p(-fit.units)) for x in (pooled.estimate, fit.result.statistic)]
    widths = [one["conf_high"] - one["conf_low"] for one in (table, single)]
    return [0.0, *(np.where(is_known, first < second, np.nan) for first, second in (errors, widths))]


def power(draw: Draw, rng: np.random.Generator) -> list[float]:
    """Truly shared units that are called: by probability and by the FDR rule, as they are and at equal error.

    Replicates are tested at the same margin. At equal error, each rule calls as many units as it can with at most a
    twentieth of them wrong. Then the proportions of wrong calls of both rules.
    """
    fit = draw(rng)
    if (pooled := fit.pooled()) is None or not fit.shared.any() or not isinstance(fit.result, ComponentsResult):
        return [np.nan] * 6
    called = [pooled.split().shared, np.asarray(fit.result.split(margin=fit.margin()).conclusion == "shared")]
    c = fit.result.components
    t = (-np.log1p(-c.reliability) + np.log1p(-fit.margin())) / c.std_error
    scores = [pooled.probability, -t]
    return [
        *(float(one[fit.shared].mean()) for one in called),
        *(_at_equal_error(score, fit.shared) for score in scores),
        *(float((one & ~fit.shared).sum() / max(1, one.sum())) for one in called),
    ]


def _at_equal_error(score: np.ndarray, shared: np.ndarray) -> float:
    """Proportion of truly shared units among the first by score of which at most a twentieth is wrong."""
    right = shared[np.argsort(-np.where(np.isnan(score), -np.inf, score), kind="stable")].cumsum()
    n = np.arange(1, len(right) + 1)
    return float(np.max(right, where=n - right <= n / 20, initial=0) / shared.sum())


_POPULATIONS = (
    "changes, iid, 60 steps, layer 1", "changes, iid, 60 steps, layer 1, sizes log-normal .7",
    "changes, random labels, 60 steps, layer 1", "changes, five classes, 60 steps, layer 1",
    "changes, two classes, 6 steps, layer 1", "changes, two classes, 60 steps, layer 2",
    "changes, Dirichlet .1, SGD, 60 steps, layer 1", "weights, common start, 60 steps, layer 1",
)  # fmt: skip
_TRAINED = {
    f"{name}, {clients} clients": partial(of_population, name, clients)
    for name in _POPULATIONS
    for clients in (5, 10, 30)
}
_REPLICATES = {
    f"reliability, {kind}, {steps} steps, layer {layer}, {clients} clients": partial(
        of_replicates, kind, steps, layer, clients
    )
    for kind, steps, layer in (*_PLACES, *_ALIKE)
    for clients in (4, 10, 20)
}
_SYNTHETIC = {
    f"{shares}, {units} units, {clients} clients": partial(of_shares, shares, units, clients, "")
    for shares in SHARES
    for units, clients in ((10, 5), (32, 5), (32, 30), (512, 10))
} | {
    f"logistic shares, 32 units, {event}, {clients} clients": partial(of_shares, "logistic shares", 32, clients, event)
    for event in ("a fifth constant", "one diverged")
    for clients in (5, 30)
}
_FEW = "docs/background/statistics.md: few called units, and few that stand out, are covered less"
_SIZES = "a caution is given where clients of unlike size are seen"
_SOURCES = (
    "fedstat.stats.pooling.pool", "fedstat.stats.pooling._pool_variances", "fedstat.stats.pooling.Pooled.ends",
    "fedstat.stats.pooling.Pooled.above",
    "fedstat.stats.icc_resampling._errors",
)  # fmt: skip


def _cases(
    hits: Callable[..., Any], draws: Mapping[str, Draw], parts: tuple[str, ...] = ("",), replicates: int = 200
) -> dict[str, Case]:
    return {
        name: Case(
            partial(hits, draw), not any(text in name for text in ("log-normal", "diverged", "one unit in ten")),
            30 if "512" in name else min(replicates, 100) if name in _SYNTHETIC else replicates,
            _SIZES if "log-normal" in name or "diverged" in name else _FEW, parts, name not in _SYNTHETIC,
        )
        for name, draw in draws.items()
    }  # fmt: skip


_ALL: dict[str, Draw] = {**_TRAINED, **_REPLICATES, **_SYNTHETIC}
CLAIMS = {
    "shrunken, intervals of units": Claim(
        "coverage", _SOURCES, ("ShrunkenResult.conf_low", "ShrunkenResult.conf_high"),
        _cases(coverage, _ALL, ("units", "most probable tenth", "called, half shared", "called, 15% shared")),
    ),
    "shrunken, units wrongly called shared, of those called": Claim(
        "level", _SOURCES, ("ShrunkenResult.probability", "SplitResult.probability"), _cases(wrongly_called, _ALL)
    ),
    "shrunken, refused; units nearer to the truth, intervals shorter than without pooling": Claim(
        "rate", _SOURCES, (), _cases(gains, _ALL, ("refused", "nearer", "shorter"), replicates=100)
    ),
    "shrunken, sensitivity beside the FDR rule": Claim(
        "rate", _SOURCES, (),
        _cases(
            power,
            _REPLICATES,
            ("probability 0.95", "FDR 0.05", "probability, equal error", "FDR, equal error", "wrong, probability",
             "wrong, FDR"),
            replicates=100,
        ),
    ),
}  # fmt: skip
