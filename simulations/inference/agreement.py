"""Agreement of clients on synthetic and trained layers: sign flips, permutations, jackknife, bootstrap and F."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

import fedstat
from simulations.inference.layers import ASYMMETRIC, NULLS, POPULATIONS, Null, Sample, agreeing
from simulations.inference.table import Case, Claim
from simulations.inference.weights import KINDS, UNITS, Noise, smooth


def icc2(w: np.ndarray, inference: str) -> tuple[pd.DataFrame, pd.Series]:
    """Rows of ICC2, a unit each, and the row of the layer."""
    found = fedstat.icc(w, inference=inference)
    return found.tidy().query("type == 'ICC2'"), found.glance().iloc[0]


def rejections(null: str, inference: str, clients: int, rng: np.random.Generator) -> list[Any]:
    """Rejections where clients agree on no unit: single units, any at FDR .05, the layer, the common profile."""
    about = (NULLS | ASYMMETRIC)[null]
    table, layer = icc2(about.draw(clients, rng), inference)
    units, p, profile = table["p_value"].dropna(), layer["layer_p_value"], layer["profile_p_value"]
    return [
        units <= 0.05 if len(units) else np.nan,
        table["p_adjusted"].min() <= 0.05 if len(units) else np.nan,
        p <= 0.05 if np.isfinite(p) else np.nan,
        np.nan if about.profile or np.isnan(profile) else profile <= 0.05,
    ]


def _some(null: str, inference: str, clients: int, shared: int, rng: np.random.Generator) -> pd.DataFrame:
    """Rows of ICC2 where three tenths of the variance of the first units is a profile of their own."""
    w = NULLS[null].draw(clients, rng)
    profile = rng.normal(size=(shared, w.shape[2]))
    profile = profile if null == "white weights" else smooth(profile)
    w[:, :shared] += np.sqrt(0.3 / 0.7) * w[:, :shared].std(axis=(0, 2), keepdims=True) * profile
    return icc2(w, inference)[0]


def beside_shared(null: str, inference: str, clients: int, shared: int, rng: np.random.Generator) -> list[Any]:
    """Beside units on which clients agree: rejections of the others, and their share of those called at FDR .05."""
    table = _some(null, inference, clients, shared, rng)
    called = table["p_adjusted"].to_numpy() <= 0.05
    return [table["p_value"][shared:] <= 0.05, called[shared:].sum() / max(1, called.sum())]


def power(null: str, inference: str, clients: int, shared: int, rng: np.random.Generator) -> np.ndarray:
    """Whether units on which clients agree are called at FDR .05."""
    return np.asarray(_some(null, inference, clients, shared, rng)["p_adjusted"][:shared] <= 0.05)


def identical(null: str, clients: int, shared: int, rng: np.random.Generator) -> np.ndarray:
    """Whether units that are equal in all clients are called at FDR .05, among 512 others."""
    w = np.concatenate([NULLS[null].draw(clients, rng) for _ in range(512 // UNITS)], axis=1)
    w[:, :shared] = w[:1, :shared]
    return np.asarray(icc2(w, "sign-flip")[0]["p_adjusted"][:shared] <= 0.05)


def covered(population: str, clients: int, rng: np.random.Generator) -> list[Any]:
    """Whether intervals of ICC2 cover, units and layer; nothing is claimed with a caution on the clients."""
    return coverage(POPULATIONS[population].draw(clients, rng))


def coverage(sample: Sample) -> list[Any]:
    """Whether intervals of ICC2 hold the true values of a sample, units and layer; NaN with a caution on clients."""
    found = fedstat.icc(sample.weights)
    return [np.nan, np.nan] if has_caution_on_clients(found) else _covers(found, sample)


def _covers(found: fedstat.results.IccResult, sample: Sample) -> list[Any]:
    tables = [t.query("type == 'ICC2'")[["conf_low", "conf_high"]].to_numpy().T for t in (found.tidy(), found.layer)]
    return [
        np.where(np.isnan(low) | np.isnan(truth), np.nan, (low <= truth) & (truth <= high))
        for (low, high), truth in zip(tables, (sample.units, np.full(1, sample.layer)), strict=True)
    ]


def contains_0(null: str, clients: int, rng: np.random.Generator) -> list[Any]:
    """Whether intervals of ICC2 hold 0 where clients do not agree on average, though most deviate in one direction."""
    w = ASYMMETRIC[null].draw(clients, rng)
    return coverage(Sample(w, np.zeros(w.shape[1]), 0.0))


def covered_with_caution(population: str, clients: int, rng: np.random.Generator) -> list[Any]:
    """As :func:`covered`, with or without a caution, where clients are not sound."""
    sample = POPULATIONS[population].draw(clients, rng)
    return [np.nan, np.nan] if sample.sound else _covers(fedstat.icc(sample.weights), sample)


def has_caution_on_clients(found: fedstat.results.IccResult | fedstat.results.ComponentsResult) -> bool:
    """Return True if a result has a caution on clients of unlike size or on dependent clients."""
    return any(one.title in ("Clients of unlike size", "Clients not independent") for one in found.cautions())


def cautioned(population: str, clients: int, sound: bool, rng: np.random.Generator) -> float:
    """Whether a caution on the clients is given, where they are sound or where they are not."""
    sample = POPULATIONS[population].draw(clients, rng)
    if sample.sound != sound:
        return np.nan
    return float(has_caution_on_clients(fedstat.icc(sample.weights)))


def replicated(population: str, clients: int, sound: bool, rng: np.random.Generator) -> float:
    """As :func:`cautioned`, by variance_components: two replicates with noise of half a client's standard deviation."""
    sample = POPULATIONS[population].draw(clients, rng)
    if sample.sound != sound:
        return np.nan
    w = sample.weights[:, None]
    return float(
        has_caution_on_clients(
            fedstat.variance_components(w + 0.5 * w.std() * rng.normal(size=(clients, 2, *w.shape[2:])))
        )
    )


def f_tests(kind: Noise, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rejections by F where clients agree on nothing: single units, any unit at FDR .05, the layer's interval."""
    found = fedstat.icc(agreeing(kind, 0.0, clients, rng).weights, inference="F")
    table = found.tidy().query("type == 'ICC2'")
    low, high = found.layer.query("type == 'ICC2'")[["conf_low", "conf_high"]].to_numpy()[0]
    return [table["p_value"] <= 0.05, np.array([table["p_adjusted"].min() <= 0.05]), np.array([low > 0 or high < 0])]


def intervals(kind: Noise, clients: int, share: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether intervals of ICC2 cover: units by F and by the bootstrap, the layer by each.

    F takes weights for a sample, so that the truth is ``share``; the bootstrap takes them as given, so that it is the
    share of this profile's own variance.
    """
    sample = agreeing(kind, share, clients, rng)
    found = fedstat.icc(sample.weights, inference="F", n_boot=200, seed=int(rng.integers(2**31)))
    tables = (t.query("type == 'ICC2'") for t in (found.tidy(), found.layer))
    truths = [(np.full(len(np.atleast_1d(own)), share), own) for own in (sample.units, sample.layer)]
    return [
        (t[f"{by}_low"] <= truth) & (truth <= t[f"{by}_high"])
        for t, of in zip(tables, truths, strict=True)
        for by, truth in zip(("conf", "boot"), of, strict=True)
    ]


def contradicted(null: str, clients: int, kappa: float, rng: np.random.Generator) -> np.ndarray:
    """Whether a split is said to contradict agreement where clients agree alike on all units."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.array([fedstat.split(NULLS[null].draw(clients, rng), kappa=kappa).contradicted])


_F = "F takes weights for independent: help and print say so; the default is over clients"
_ALIKE = "the print of permutation tests says that they assume equal covariances"
_FEW = "help of fedstat.icc: with many shared units of few the common profile is not told from theirs"
_SIZES = "a caution is given where clients of unlike size or groups of clients are seen"
_DIRECTION = "prints and help say that most clients deviate in one direction, not that they agree on average"
_MINORITY = "docs/background/statistics.md: clients that deviate far in another direction may be missing among few"
_OF_CLASSES = ("two classes, Adam, 60 steps, layer 3",)  # the output layer, whose units are classes
_HEAVY = "help of fedstat.icc names weights with long tails"
_ICC = (
    "fedstat.stats.icc.coefficients",
    "fedstat.stats.icc.fdr",
    "fedstat.stats.icc._limits",
    "fedstat.stats.icc._limits_agreement",
)
_FLIPS = (
    "fedstat.stats.icc.fdr",
    *(f"fedstat.stats.icc_tests.{name}" for name in ("sign_flips", "_subtract_profile", "_standardize", "_patterns")),
    *(f"fedstat.stats.icc_tests.{name}" for name in ("_pooled_p_values", "_sum_p_value")),
)
_PERMUTATIONS = (
    "fedstat.stats.icc.fdr",
    *(f"fedstat.stats.icc_tests.{name}" for name in ("permutations", "_shifts", "_unit_rows", "_permute")),
)
_JACKKNIFE = ("fedstat.stats.icc_resampling.jackknife_coefficients", "fedstat.stats.icc_resampling._leave_out_clients")
_CAUTIONS = (
    "fedstat.results.icc.describe_sizes",
    "fedstat.results.icc.IccResult._describe_dependence",
    "fedstat.stats.clustering.separate_groups",
    "fedstat.stats.clustering.equal_objects",
)
_GROUPS = (
    "fedstat.labelled.dependent_clients._describe_groups",
    "fedstat.results.icc.describe_groups",
    "fedstat.stats.clustering.separate_groups",
)
_LEVELS = ("units", "any unit at FDR .05", "layer", "common profile")
_P_VALUES = tuple(
    f"{of}.{p}"
    for of in ("IccResult", "SplitResult")
    for p in ("p_value", "p_adjusted", "layer_p_value", "profile_p_value")
)
_INTERVALS = tuple(f"IccResult.{of}_{end}" for of in ("conf", "layer") for end in ("low", "high"))


def _of_nulls(
    inference: str, clients: Iterable[int], replicates: int, nulls: Mapping[str, Null] = NULLS
) -> dict[str, Case]:
    every = list(clients)
    return {
        f"{name}, {n} clients": Case(
            partial(rejections, name, inference, n), null.symmetric and (inference == "sign-flip" or null.alike),
            replicates // 4 if n == max(every) else replicates,
            _DIRECTION if not null.symmetric else "" if inference == "sign-flip" or null.alike else _ALIKE,
            _LEVELS, null.trained,
        )
        for name, null in nulls.items()
        for n in every
        if n <= null.most
    }  # fmt: skip


_SHARED = (
    ("white weights", 8), ("smooth weights", 8), ("units and clients of unlike sizes", 8), ("a common profile", 8),
    ("smooth weights", 24), ("a common profile", 24), ("iid, 60 steps, layer 1, signs at random", 8),
    ("two classes, 60 steps, layer 2, signs at random", 8),
)  # fmt: skip


def _beside(
    hits: Callable[..., Any], inference: str, parts: tuple[str, ...], clients: tuple[int, ...] = (6, 8, 12, 30, 100)
) -> dict[str, Case]:
    return {
        f"{null}, {shared} of {UNITS} units shared, {n} clients": Case(
            partial(hits, null, inference, n, shared), (null, shared) != ("a common profile", 24), 400, _FEW,
            parts, NULLS[null].trained,
        )
        for null, shared in _SHARED
        for n in clients
    }  # fmt: skip


def _of_populations() -> dict[str, Case]:
    return {
        f"{name}, {clients} clients": Case(
            partial(covered, name, clients),
            True in population.sound and not any(text in name for text in ("t3", *_OF_CLASSES)), population.replicates,
            _HEAVY if "t3" in name else _MINORITY if any(text in name for text in _OF_CLASSES) else _SIZES,
            ("units", "layer"), population.trained,
        )
        for name, population in POPULATIONS.items()
        for clients in population.clients
    }  # fmt: skip


def _of_asymmetric() -> dict[str, Case]:
    return {
        f"{name}, {clients} clients": Case(
            partial(contains_0, name, clients), False, 200, _MINORITY, ("units", "layer"), null.trained
        )
        for name, null in ASYMMETRIC.items()
        if not null.trained or "output" in name
        for clients in (6, 12, 30)
    }


def _of_unsound() -> dict[str, Case]:
    return {
        f"{name}, {clients} clients": Case(
            partial(covered_with_caution, name, clients), False, 100, _SIZES, ("units", "layer"), population.trained
        )
        for name, population in POPULATIONS.items()
        if False in population.sound
        for clients in population.clients
    }


def _of_cautions(*, sound: bool) -> dict[str, Case]:
    return {
        f"{name}, {clients} clients": Case(
            partial(cautioned, name, clients, sound),
            "t3" not in name,
            population.replicates,
            _HEAVY,
            trained=population.trained,
        )
        for name, population in POPULATIONS.items()
        if sound in population.sound
        for clients in population.clients
    }


def _of_replicates(populations: Iterable[str], *, sound: bool) -> dict[str, Case]:
    return {
        f"{name}, {clients} clients": Case(
            partial(replicated, name, clients, sound), replicates=100, trained=POPULATIONS[name].trained
        )
        for name in populations
        for clients in (6, 10, 30)
    }


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


CLAIMS = {
    "icc, sign-flip tests": Claim(
        "level", _FLIPS, _P_VALUES,
        _of_nulls("sign-flip", (3, 5, 6, 12, 30, 100), 1000) | _of_nulls("sign-flip", (6, 12, 30), 400, ASYMMETRIC),
    ),
    "icc, sign-flip tests beside shared units": Claim(
        "level", _FLIPS, _P_VALUES, _beside(beside_shared, "sign-flip", ("other units", "false among those called"))
    ),
    "icc, power of sign-flip tests at FDR .05": Claim("rate", _FLIPS, _P_VALUES, _beside(power, "sign-flip", ("",))),
    "icc, identical units among 512 called by sign-flip tests": Claim(
        "rate", _FLIPS, _P_VALUES,
        {f"{null}, {n} identical, 10 clients": Case(partial(identical, null, 10, n), replicates=200,
                                                    trained=NULLS[null].trained)
         for null in ("white weights", "two classes, 60 steps, layer 2, signs at random") for n in (1, 2)},
    ),
    "icc, permutation tests": Claim("level", _PERMUTATIONS, _P_VALUES, _of_nulls("permutation", (2, 3, 12), 400)),
    "icc, power of permutation tests at FDR .05": Claim(
        "rate", _PERMUTATIONS, _P_VALUES, _beside(power, "permutation", ("",), clients=(6, 12, 30))
    ),
    "icc, intervals over clients": Claim(
        "coverage", (*_JACKKNIFE, *_CAUTIONS), _INTERVALS, _of_populations() | _of_asymmetric()
    ),
    "icc, cautions where clients are independent and alike": Claim("level", _CAUTIONS, (), _of_cautions(sound=True)),
    "icc, intervals where they are not, with or without a caution": Claim("rate", _JACKKNIFE, (), _of_unsound()),
    "icc, cautions where they are not": Claim("rate", _CAUTIONS, (), _of_cautions(sound=False)),
    "variance_components, cautions where clients are independent": Claim(
        "level", _GROUPS, (),
        _of_replicates(
            (
                "white weights, ICC2 0.3", "changes, two classes, 60 steps, layer 1",
                "changes, Dirichlet .1, SGD, 60 steps, layer 1",
            ),
            sound=True,
        ),
    ),
    "variance_components, cautions where clients form groups": Claim(
        "rate", _GROUPS, (),
        _of_replicates(
            (
                *(f"2 groups of similarity {similarity}, equally many of each" for similarity in (0.67, 0.33)),
                "changes, two domains, Adam, 60 steps, layer 1, equally many of each",
                "weights, two starts, SGD, 60 steps, layer 1, equally many of each",
            ),
            sound=False,
        ),
    ),
    "split, AgreementWarning": Claim(
        "level",
        ("fedstat.stats.split.contradicted",),
        (),
        {
            f"{name}, kappa {kappa}, {clients} clients": Case(
                partial(contradicted, name, clients, kappa), replicates=400, trained=null.trained
            )
            for name, null in NULLS.items()
            for kappa in (0.3, 0.75)
            for clients in (3, 6, 12)
        },
    ),
    "icc, F tests of 0": Claim(
        "level", _ICC, tuple(f"{of}Result.p_{p}" for of in ("Icc", "Split") for p in ("value", "adjusted")), _of_f()
    ),
    "icc, intervals by F and bootstrap": Claim(
        "coverage",
        (*_ICC, "fedstat.stats.icc_resampling.describe_samples"),
        tuple(f"IccResult.{of}_{end}" for of in ("conf", "boot", "layer") for end in ("low", "high")),
        _of_intervals(),
    ),
}  # fmt: skip
