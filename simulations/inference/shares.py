"""Shares of the personal: moments, REML and the test of a split; effective ranks, and profiles over rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

import fedstat
from fedstat.stats import variance_components
from simulations.inference import pools
from simulations.inference.pools import Kind
from simulations.inference.table import Case, Claim
from simulations.inference.weights import KINDS, WEIGHTS, Noise, noise


def personal(
    kind: Noise, clients: int, share: float, method: Literal["moments", "reml"], sizes: bool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Whether intervals of the reliability cover, units and layer; with a share of 0, whether tests reject."""
    spread = noise(kind, clients, rng, replicates=2)
    options: dict[str, Any] = {}
    if sizes:  # the share is that of a client with the harmonic mean of the samples
        n = np.where(np.arange(clients) % 2, 20.0, 40.0)
        spread *= np.sqrt(clients / (1 / n).sum() / n)[:, None, None, None]
        options["sizes"] = n
    own = noise("smooth" if kind == "smooth" else "white", clients, rng)
    w = np.sqrt(share / (1 - share) / 2) * own + spread  # noise of variance ½ is left in the mean of two
    found = fedstat.variance_components(w, method=method, **options)
    if share == 0:
        return _rejections(found)
    return [(t["conf_low"] <= share) & (share <= t["conf_high"]) for t in (found.tidy(), found.layer)]


def _rejections(found: fedstat.results.ComponentsResult) -> list[np.ndarray]:
    """Whether tests of 0 reject: units, any unit, layer."""
    units = np.where(np.isfinite(found.components.p_value), found.components.p_value <= 0.05, np.nan)
    return [units, np.array([(found.p_adjusted <= 0.05).any()]), np.asarray(found.layer["p_value"] <= 0.05)]


def of_share(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Weights (client, replicate, unit, weight) whose units have one reliability."""
    own = np.sqrt(share / (1 - share) / 2) * noise("smooth" if kind == "smooth" else "white", clients, rng)
    return own + noise(kind, clients, rng, replicates=2)


def outcomes(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Whether ``tau="test"`` calls any unit the other; on the margin, 1/2, either is wrong."""
    found = fedstat.split(of_share(kind, clients, share, rng), method="icc", tau="test").conclusion
    wrong = [name for name, false in (("personal", share <= 0.5), ("shared", share >= 0.5)) if false]
    return np.array([np.isin(found, wrong).any()])


def decided(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Which units ``tau="test"`` calls shared or personal."""
    found = fedstat.split(of_share(kind, clients, share, rng), method="icc", tau="test").conclusion
    return np.asarray(found != "inconclusive")


def conclusions(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Whether the conclusion on the layer is the wrong one; on the margin, 1/2, either is."""
    found = fedstat.variance_components(of_share(kind, clients, share, rng)).conclusion
    return np.array([(found == "own" and share <= 0.5) or (found == "mean" and share >= 0.5)])


def profile(clients: int, rounds: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The test of ``fl.profile`` over a window: one layer, the same clients in all rounds, differences noise alone."""
    parts = [variance_components.parts(noise("smooth", clients, rng, replicates=2)[:, :, :1]) for _ in range(rounds)]
    basis = np.kron(np.eye(rounds), parts[0].design)
    joined = variance_components.SumsOfSquares(
        *(np.concatenate([p[i] for p in parts]) for i in (0, 1)), basis, WEIGHTS, 2
    )
    found = variance_components.components(joined, cluster=np.tile(np.arange(clients), rounds))
    return np.array([float(found.p_value[0]) <= 0.05])


def effective_rank(kind: Noise, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Whether the interval of the mean effective rank covers the mean over clients of the same distribution."""
    found = fedstat.effective_rank(_of_unlike_rank(kind, clients, rng), baseline=None).tidy()
    truth = _mean_rank(kind)
    return np.asarray((found["conf_low"] <= truth) & (truth <= found["conf_high"]))


def _of_unlike_rank(kind: Noise, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Weights (client, unit, weight); of unlike clients one in five has few directions."""
    w = noise(kind, clients, rng)[:, 0]
    few = (rng.random((clients, 1, 1)) < 0.2) & (kind == "unlike clients")
    return w * np.where(few, np.geomspace(1, 1e-3, WEIGHTS), 1.0)


@cache
def _mean_rank(kind: Noise) -> float:
    """Mean effective rank of 4,000 clients."""
    found = fedstat.effective_rank(_of_unlike_rank(kind, 4000, np.random.default_rng(0)), baseline=None)
    return float(found.tidy()["estimate"].iloc[0])


class Trained(NamedTuple):
    """Two replicates of some trained clients, and what their shares are.

    Attributes
    ----------
    weights : array (client, 2, unit, weight)
    units : array (unit,)
        Personal share among these clients, from their other replicates; NaN for a unit without noise.
    layer, population : float
        Of the layer among these clients, and among all of the pool.
    """

    weights: np.ndarray
    units: np.ndarray
    layer: float
    population: float


def trained(kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator) -> Trained:
    """Draw clients and two of their replicates."""
    w = pools.replicates(kind, steps, layer)
    chosen = w[rng.choice(len(w), clients, replace=False)][:, rng.permutation(w.shape[1])].astype(float)
    units, whole = _shares(chosen[:, 2:])
    return Trained(chosen[:, :2], units, whole, _of_pool(kind, steps, layer))


@cache
def _of_pool(kind: Kind, steps: int, layer: int) -> float:
    return _shares(pools.replicates(kind, steps, layer).astype(float))[1]


def _shares(w: np.ndarray) -> tuple[np.ndarray, float]:
    """Share (unit,) of personal variance in differences of means over two replicates, and that of the layer."""
    noise = w.var(axis=1, ddof=1).mean(axis=0).sum(axis=-1)
    between = w.mean(axis=1).var(axis=0, ddof=1).sum(axis=-1) - noise / w.shape[1]
    with np.errstate(invalid="ignore"):
        return between / (between + noise / 2), float(between.sum() / (between.sum() + noise.sum() / 2))


def covered(kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether intervals of trained networks cover."""
    drawn = trained(kind, steps, layer, clients, rng)
    found = fedstat.variance_components(drawn.weights)
    units = _covers(found.tidy(), drawn.units)
    return [units, _covers(found.layer, drawn.layer), _covers(found.layer, drawn.population)]


def _covers(table: pd.DataFrame, truth: Any) -> np.ndarray:
    known = np.isfinite(table["conf_low"]) & np.isfinite(truth)
    return np.where(known, (table["conf_low"] <= truth) & (truth <= table["conf_high"]), np.nan)


def rejected(kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether tests of 0 reject in trained networks whose clients have samples of one distribution."""
    found = fedstat.variance_components(trained(kind, steps, layer, clients, rng).weights)
    return _rejections(found)


def noise_alone(
    kind: Kind, steps: int, layer: int, clients: int, n_replicates: int, rng: np.random.Generator
) -> np.ndarray:
    """Training noise of clients (client, replicate, unit, weight): scaled differences of two of their replicates."""
    w = pools.replicates(kind, steps, layer)
    w = w[rng.choice(len(w), clients, replace=False)].astype(float)
    w = np.stack([one[rng.permutation(len(one))] for one in w])
    return ((w[:, ::2] - w[:, 1::2]) / np.sqrt(2))[:, :n_replicates]


def rejected_alone(*where: Any) -> list[np.ndarray]:
    """Whether tests of 0 reject in training noise alone."""
    return _rejections(fedstat.variance_components(noise_alone(*where)))


def cautioned(draw: Callable[..., np.ndarray], *where: Any) -> float:
    """Whether the noise of clients is said to be unequal."""
    found = fedstat.variance_components(draw(*where))
    return float(any(one.title == "Unequal training noise" for one in found.cautions()))


def synthetic_noise(kind: Noise, clients: int, n_replicates: int, rng: np.random.Generator) -> np.ndarray:
    """Noise of weights, without differences between clients."""
    return noise(kind, clients, rng, replicates=n_replicates)


MARGINS = (0.3, 0.5, 0.7, 0.9)


def called(
    kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator
) -> list[tuple[float, float, float]]:
    """Units of trained networks called at each margin: proportion that is wrong; some wrong; proportion decided."""
    drawn = trained(kind, steps, layer, clients, rng)
    found = fedstat.variance_components(drawn.weights)
    rates = []
    for margin in MARGINS:
        outcome = found.split(margin=margin).conclusion
        decided = np.isin(outcome, ("shared", "personal"))
        wrong = decided & np.where(outcome == "shared", drawn.units > margin, drawn.units < margin)
        rates.append((wrong.sum() / max(1, decided.sum()), float(wrong.any()), decided.mean()))
    return rates


def of_called(rate: int, *where: Any) -> list[float]:
    """One of the rates of :func:`called`, at each margin."""
    *names, rng = where
    return [one[rate] for one in called(*names, rng)]


def conclusions_of_trained(kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """As :func:`conclusions`, of trained networks."""
    drawn = trained(kind, steps, layer, clients, rng)
    found = fedstat.variance_components(drawn.weights).conclusion
    return np.array([(found == "own" and drawn.layer < 0.5) or (found == "mean" and drawn.layer > 0.5)])


_TOLD = "help of fedstat.variance_components names heavy tails, and clients of unlike noise"
_KINDS = "help of fedstat.effective_rank says how few clients of two kinds mislead"
_TESTS = ("units", "any unit at FDR .05", "layer")
_OUTPUT = "docs/which-test.md says how often, in output layers"
_UNEQUAL = "a caution is given where unequal noise of clients is seen"
_UNLIKE = dict.fromkeys(KINDS, "") | {"t3": _TOLD, "unlike clients": _TOLD}


def _of_shares() -> dict[str, Case]:
    return {
        f"{kind} weights, share {share}, {method}{', sizes 1 : 2' if sizes else ''}, {clients} clients": Case(
            partial(personal, kind, clients, share, method, sizes), kind in ("white", "smooth"), 500, _UNLIKE[kind],
            ("units", "layer"),
        )
        for kind in KINDS
        for share in (0.3, 0.8)
        for method, sizes in (("moments", False), ("reml", True))
        for clients in (6, 20)
    }  # fmt: skip


def _of_share_tests() -> dict[str, Case]:
    return {
        f"{kind} weights, {method}{', sizes 1 : 2' if sizes else ''}, {clients} clients": Case(
            partial(personal, kind, clients, 0.0, method, sizes), kind in ("white", "smooth"), 500, _UNLIKE[kind],
            _TESTS,
        )
        for kind in KINDS
        for method, sizes in (("moments", False), ("reml", True))
        for clients in (6, 20)
    }  # fmt: skip


def _of_outcomes(hits: Callable[..., Any], shares: tuple[float, ...]) -> dict[str, Case]:
    return {
        f"{kind} weights, share {share}, {clients} clients": Case(
            partial(hits, kind, clients, share), kind in ("white", "smooth"), 600, _UNLIKE[kind]
        )
        for kind in KINDS
        for share in shares
        for clients in (4, 6, 20)
    }


_PLACES: tuple[tuple[Kind, int, int], ...] = (
    ("five classes", 6, 1), ("five classes", 60, 2),
    ("two classes", 6, 1), ("two classes", 60, 1), ("two classes", 60, 2), ("two classes", 60, 3),
)  # fmt: skip
_ALIKE: tuple[tuple[Kind, int, int], ...] = (
    ("iid", 6, 1),
    ("iid", 60, 2),
    ("random labels", 60, 1),
    ("random labels", 60, 2),
)


def _of_trained(
    hits: Callable[..., Any], parts: tuple[str, ...], places: tuple[tuple[Kind, int, int], ...] = _PLACES
) -> dict[str, Case]:
    return {
        f"{kind}, {steps} steps, layer {layer}, {clients} clients": Case(
            partial(hits, kind, steps, layer, clients), replicates=400, parts=parts, trained=True
        )
        for kind, steps, layer in places
        for clients in (4, 6, 10, 20)
    }


_ALONE: dict[tuple[Kind, int, int], str] = {
    ("iid", 60, 1): "", ("iid", 60, 3): _OUTPUT, ("random labels", 60, 2): "",
    **{(kind, 60, layer): _UNEQUAL for kind in ("two classes", "Dirichlet .1") for layer in (1, 2, 3)},
}  # fmt: skip
"""Places of trained noise, and what is said where tests err."""
_SIZES = ((6, 2), (10, 2), (10, 5), (20, 2))


def _of_noise_alone() -> dict[str, Case]:
    return {
        f"noise alone, {kind}, {steps} steps, layer {layer}, {clients} clients x {n} replicates": Case(
            partial(rejected_alone, kind, steps, layer, clients, n), note != _UNEQUAL, 200, note, _TESTS, True
        )
        for (kind, steps, layer), note in _ALONE.items()
        for clients, n in _SIZES
    }


def _of_cautions(*, equal: bool) -> dict[str, Case]:
    kinds = [kind for kind in KINDS if (kind != "unlike clients") == equal]
    return {
        f"{kind} weights, {clients} clients x {n} replicates": Case(
            partial(cautioned, synthetic_noise, kind, clients, n), replicates=100
        )
        for kind in kinds
        for clients, n in ((3, 2), *_SIZES, (30, 2))
    } | {
        f"noise alone, {kind}, {steps} steps, layer {layer}, {clients} clients x {n} replicates": Case(
            partial(cautioned, noise_alone, kind, steps, layer, clients, n), replicates=100, trained=True
        )
        for (kind, steps, layer), note in _ALONE.items()
        if (note != _UNEQUAL) == equal
        for clients, n in ((3, 2), *_SIZES, (30, 2))
    }


_AT = tuple(f"margin {margin}" for margin in MARGINS)
CLAIMS = {
    "variance_components, tests of a share of 0": Claim(
        "level",
        ("fedstat.stats.variance_components.components", "fedstat.stats.reml.components", "fedstat.stats.icc.fdr"),
        ("ComponentsResult.p_value", "ComponentsResult.p_adjusted", "ComponentsResult.layer_p_value"),
        _of_share_tests() | _of_trained(rejected, _TESTS, _ALIKE) | _of_noise_alone(),
    ),
    "variance_components, caution where noise of clients is equal": Claim(
        "level", ("fedstat.stats.variance_components.noise_ratios",), (), _of_cautions(equal=True)
    ),
    "variance_components, caution where it is not": Claim(
        "rate", ("fedstat.stats.variance_components.noise_ratios",), (), _of_cautions(equal=False)
    ),
    "variance_components, intervals of the share": Claim(
        "coverage",
        ("fedstat.stats.variance_components.components", "fedstat.stats.reml.components"),
        tuple(f"ComponentsResult.{of}_{end}" for of in ("conf", "layer") for end in ("low", "high")),
        _of_shares() | _of_trained(covered, ("units", "layer", "layer, new clients")),
    ),
    "variance_components, conclusion on the layer": Claim(
        "level",
        ("fedstat.stats.variance_components.components",),
        ("ComponentsResult.conclusion",),
        _of_outcomes(conclusions, (0.3, 0.5, 0.7)) | _of_trained(conclusions_of_trained, ("",)),
    ),
    'split(tau="test"), any unit called the other': Claim(
        "level",
        ("fedstat.stats.variance_components.classify_units", "fedstat.stats.icc.fdr"),
        ("SplitResult.conclusion",),
        _of_outcomes(outcomes, (0.0, 0.3, 0.5, 0.7)),
    ),
    'split(tau="test"), units called the other, of those called': Claim(
        "level",
        ("fedstat.stats.variance_components.classify_units", "fedstat.stats.icc.fdr"),
        ("SplitResult.conclusion",),
        _of_trained(partial(of_called, 0), _AT),
    ),
    'split(tau="test"), layers with some unit called the other': Claim(
        "rate",
        ("fedstat.stats.variance_components.classify_units", "fedstat.stats.icc.fdr"),
        ("SplitResult.conclusion",),
        _of_trained(partial(of_called, 1), _AT),
    ),
    'split(tau="test"), units decided': Claim(
        "rate",
        ("fedstat.stats.variance_components.classify_units", "fedstat.stats.icc.fdr"),
        ("SplitResult.conclusion",),
        _of_outcomes(decided, (0.0, 0.3, 0.7, 0.9)) | _of_trained(partial(of_called, 2), _AT),
    ),
    "fl.profile, test over a window of rounds": Claim(
        "level",
        ("fedstat.fl.stored._profile_rows",),
        (),
        {f"{n} clients, {rounds} rounds": Case(partial(profile, n, rounds), replicates=1000)
         for n in (6, 20) for rounds in (1, 5)},
    ),
    "effective_rank, interval of the mean over clients": Claim(
        "coverage",
        ("fedstat.results.ranks.EffectiveRankResult.tidy",),
        ("EffectiveRankResult.conf_low", "EffectiveRankResult.conf_high"),
        {f"{kind}, {n} clients": Case(partial(effective_rank, kind, n), kind == "white", 1000, _KINDS)
         for kind in ("white", "unlike clients") for n in (3, 10)},
    ),
}  # fmt: skip
