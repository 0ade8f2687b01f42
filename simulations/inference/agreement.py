"""Agreement of clients: exchanges of units, the jackknife, the bootstrap and F, on weights like real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd

import fedstat
from simulations.inference.table import Case, Claim
from simulations.inference.weights import KINDS, UNITS, WEIGHTS, Noise, noise, smooth

Kind = Literal[Noise, "unlike sizes", "common profile", "start subtracted", "half smooth"]


def unlike(kind: Kind, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Weights (client, unit, weight) of clients that agree on no unit more than on others.

    Parameters
    ----------
    kind : str
        As in :func:`noise`; or smooth weights with standard deviations of clients and of units that are log-normal
        (σ = .7), with half of their variance in a profile that all units of all clients have, or as they are; or half
        of the units smooth and half of them white.
    clients : int
    rng : Generator
    """
    if kind in KINDS:
        return noise(kind, clients, rng)[:, 0]
    w = noise("smooth", clients, rng)[:, 0]
    if kind == "unlike sizes":
        w *= np.exp(0.7 * rng.normal(size=(clients, 1, 1))) * np.exp(0.7 * rng.normal(size=(UNITS, 1)))
    if kind == "common profile":
        w += smooth(rng.normal(size=(1, WEIGHTS)))
    if kind == "half smooth":
        w[:, ::2] = noise("white", clients, rng)[:, 0, ::2]
    return w


def tested(kind: Kind, w: np.ndarray, rng: np.random.Generator) -> tuple[pd.DataFrame, float]:
    """Rows of ICC2, a unit each, and the p value of the layer; from a start that is subtracted again."""
    start = 3 * smooth(rng.normal(size=w.shape[1:])) if kind == "start subtracted" else None
    found = fedstat.icc(w if start is None else w + start, start=start, seed=int(rng.integers(2**31)))
    return found.tidy().query("type == 'ICC2'"), found.glance()["layer_p_value"][0]


def exchanges(kind: Kind, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rejections where clients agree on no unit more than on others: single units, any at FDR .05, the layer."""
    table, layer = tested(kind, unlike(kind, clients, rng), rng)
    return [table["p_value"] <= 0.05, np.array([table["p_fdr"].min() <= 0.05]), np.array([layer <= 0.05])]


def _some(kind: Kind, clients: int, shared: int, rng: np.random.Generator) -> pd.DataFrame:
    """Rows of ICC2 where three tenths of the variance of the first units is a profile of their own."""
    w = unlike(kind, clients, rng)
    profile = rng.normal(size=(shared, WEIGHTS))
    profile = profile if kind == "white" else smooth(profile)
    w[:, :shared] += np.sqrt(0.3 / 0.7) * w[:, :shared].std(axis=(0, 2), keepdims=True) * profile
    return tested(kind, w, rng)[0]


def beside_shared(kind: Kind, clients: int, shared: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Beside units on which clients agree: rejections of the others, and their share of those called at FDR .05."""
    table = _some(kind, clients, shared, rng)
    called = table["p_fdr"].to_numpy() <= 0.05
    return [table["p_value"][shared:] <= 0.05, np.array([called[shared:].sum() / max(1, called.sum())])]


def power(kind: Kind, clients: int, shared: int, rng: np.random.Generator) -> np.ndarray:
    """Whether units on which clients agree are called at FDR .05."""
    return np.asarray(_some(kind, clients, shared, rng)["p_fdr"][:shared] <= 0.05)


def jackknife(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether intervals of ICC2 cover, units and layer: of clients of these spreads, and of others.

    The profile is as it is. Spreads of clients are as they are, or those of the distribution, 1 − ``share``.
    """
    w, profile = agreeing(kind, clients, share, rng)
    found = fedstat.icc(w, seed=int(rng.integers(2**31)))
    tables = [t.query("type == 'ICC2'")[["conf_low", "conf_high"]].to_numpy().T for t in (found.tidy(), found.layer)]
    spread = np.square(w - profile).mean(axis=(0, 2))
    of_profile = profile.var(axis=1, ddof=1), np.full(1, profile.var(ddof=1))
    return [
        (low <= s / (s + rest)) & (s / (s + rest) <= high)
        for of in ((spread, spread.mean()), (1 - share, 1 - share))
        for (low, high), s, rest in zip(tables, of_profile, of, strict=True)
    ]


def agreeing(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Weights (client, unit, weight) with ICC2 ``share``, and the profile (unit, weight) that all clients have."""
    profile = np.sqrt(share) * noise("smooth" if kind == "smooth" else "white", 1, rng)[0, 0]
    return profile + np.sqrt(1 - share) * noise(kind, clients, rng)[:, 0], profile


def f_tests(kind: Noise, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rejections by F where clients agree on nothing: single units, any unit at FDR .05, the layer's interval."""
    found = fedstat.icc(agreeing(kind, clients, 0.0, rng)[0], inference="F")
    table = found.tidy().query("type == 'ICC2'")
    low, high = found.layer.query("type == 'ICC2'")[["conf_low", "conf_high"]].to_numpy()[0]
    return [table["p_value"] <= 0.05, np.array([table["p_fdr"].min() <= 0.05]), np.array([low > 0 or high < 0])]


def intervals(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether intervals of ICC2 cover: units by F and by the bootstrap, the layer by each.

    F takes weights for a sample, so that the truth is ``share``; the bootstrap takes them as given, so that it is the
    share of this profile's own variance.
    """
    w, profile = agreeing(kind, clients, share, rng)
    found = fedstat.icc(w, inference="F", replicates=200, seed=int(rng.integers(2**31)))
    found_units, layer = (t.query("type == 'ICC2'") for t in (found.tidy(), found.layer))
    of_profile = profile.var(axis=1, ddof=1), np.full(1, profile.var(ddof=1))
    truths = [(np.full(len(s), share), s / (s + 1 - share)) for s in of_profile]
    return [
        (t[f"{by}_low"] <= truth) & (truth <= t[f"{by}_high"])
        for t, of in zip((found_units, layer), truths, strict=True)
        for by, truth in zip(("conf", "boot"), of, strict=True)
    ]


def contradicted(kind: Kind, clients: int, kappa: float, rng: np.random.Generator) -> np.ndarray:
    """Whether a split is said to contradict agreement where clients agree alike on all units."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.array([fedstat.split(unlike(kind, clients, rng), kappa=kappa).contradicted])


_F = "F takes weights for independent: help and print say so; the default is over clients"
_ALIKE = "help of fedstat.icc says that units unlike in more than size break the test"
_BESIDE = "help of fedstat.icc says that beside many shared units a common profile counts as agreement"
_SPREADS = "help of fedstat.icc: intervals are of clients of these spreads; of others they cover less"
_ICC = (
    "fedstat.stats.icc.coefficients",
    "fedstat.stats.icc.fdr",
    "fedstat.stats.icc._limits",
    "fedstat.stats.icc._limits_agreement",
)


def _of_f() -> dict[str, Case]:
    return {
        f"{kind} weights, {clients} clients": Case(
            partial(f_tests, kind, clients), kind == "white", 1000, "" if kind == "white" else _F,
            ("units", "any unit at FDR .05", "the layer's interval leaves out 0"),
        )
        for kind in KINDS
        for clients in (3, 12)
    }  # fmt: skip


def _of_intervals() -> dict[str, Case]:
    return {
        f"{kind} weights, ICC2 {share}, {clients} clients": Case(
            partial(intervals, kind, clients, share), kind == "white", 500, _F,
            ("units, F", "units, bootstrap", "layer, F", "layer, bootstrap"),
        )
        for kind in KINDS
        for share in (0.0, 0.3)
        for clients in (5, 30)
    }  # fmt: skip


def _of_exchanges() -> dict[str, Case]:
    return {
        f"{kind} weights, {clients} clients": Case(
            partial(exchanges, kind, clients), kind != "half smooth", 600 if clients == 100 else 3000,
            _ALIKE if kind == "half smooth" else "", ("units", "any unit at FDR .05", "layer"),
        )
        for kind in _ALL_KINDS
        for clients in (2, 3, 12, 100)
    }  # fmt: skip


def _of_jackknife() -> dict[str, Case]:
    parts = tuple(f"{of}{whose}" for whose in ("", ", other clients") for of in ("units", "layer"))
    return {
        f"{kind} weights, ICC2 {share}, {clients} clients": Case(
            partial(jackknife, kind, clients, share), kind in ("white", "smooth"), 1000,
            "" if kind in ("white", "smooth") else _SPREADS, parts,
        )
        for kind in KINDS
        for share in (0.0, 0.3, 0.9)
        for clients in (3, 5, 30)
    }  # fmt: skip


def _beside(hits: Callable[..., Any], parts: tuple[str, ...]) -> dict[str, Case]:
    most = [("smooth", 24), ("common profile", 24)]
    return {
        f"{kind} weights, {shared} of {UNITS} units shared, {clients} clients": Case(
            partial(hits, kind, clients, shared), kind != "half smooth" and (kind, shared) != most[1], 600,
            {"half smooth": _ALIKE, "common profile": _BESIDE}.get(kind, ""), parts,
        )
        for kind, shared in [*((kind, 8) for kind in _ALL_KINDS), *most]
        for clients in (3, 6, 12, 30)
    }  # fmt: skip


_ALL_KINDS: tuple[Kind, ...] = (*KINDS, "unlike sizes", "common profile", "start subtracted", "half smooth")
_P_VALUES = tuple(f"{of}.{p}" for of in ("IccResult", "SplitResult") for p in ("p_value", "p_fdr", "layer_p_value"))
_INTERVALS = tuple(f"IccResult.{of}_{end}" for of in ("conf", "layer") for end in ("low", "high"))
CLAIMS = {
    "icc, tests over clients": Claim(
        "level", ("fedstat.stats.icc_clients._p_values", "fedstat.stats.icc.fdr"), _P_VALUES, _of_exchanges()
    ),
    "icc, tests over clients beside shared units": Claim(
        "level",
        ("fedstat.stats.icc_clients._p_values", "fedstat.stats.icc.fdr"),
        _P_VALUES,
        _beside(beside_shared, ("other units", "false among those called")),
    ),
    "icc, power of the tests over clients at FDR .05": Claim(
        "rate", ("fedstat.stats.icc_clients._p_values", "fedstat.stats.icc.fdr"), _P_VALUES, _beside(power, ("",))
    ),
    "icc, intervals over clients": Claim(
        "coverage", ("fedstat.stats.icc_clients._coefficients",), _INTERVALS, _of_jackknife()
    ),
    "split, AgreementWarning": Claim(
        "level",
        ("fedstat.stats.split.contradicted",),
        (),
        {
            f"{kind} weights, kappa {kappa}, {clients} clients": Case(
                partial(contradicted, kind, clients, kappa), kind != "half smooth", 400
            )
            for kind in _ALL_KINDS
            if kind != "start subtracted"
            for kappa in (0.3, 0.75)
            for clients in (6, 20)
        },
    ),
    "icc, F tests of 0": Claim(
        "level", _ICC, ("IccResult.p_value", "IccResult.p_fdr", "SplitResult.p_value", "SplitResult.p_fdr"), _of_f()
    ),
    "icc, intervals": Claim(
        "coverage",
        (*_ICC, "fedstat.results.icc._percentiles"),
        tuple(f"IccResult.{of}_{end}" for of in ("conf", "boot", "layer") for end in ("low", "high")),
        _of_intervals(),
    ),
}
