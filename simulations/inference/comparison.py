"""Comparisons of methods: t tests within seeds, simultaneous intervals, sign flips, a mixed model, rank correlation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from analysis import _claims as claims
from analysis import _mixed
from fedstat.labelled import compare
from simulations.inference import pools
from simulations.inference.table import Case, Claim


def accuracies(kind: str, seeds: int, methods: int, rng: np.random.Generator) -> pd.DataFrame:
    """Accuracies of methods without a difference, in long form.

    Parameters
    ----------
    kind : {"normal", "t3", "skewed", "one varies 20 times", "trained networks"}
        Normal errors beside a common effect of the seed; errors of Student's t with 3 degrees of freedom; exponential
        ones; one method with 20 times the standard deviation; networks drawn from a pool of clients of two classes.
    seeds, methods : int
    rng : Generator
    """
    shape = (seeds, methods)
    errors = {
        "t3": lambda: rng.standard_t(3, shape), "skewed": lambda: rng.exponential(size=shape),
        "trained networks": lambda: rng.choice(pools.accuracies("two classes", 60), shape),
    }  # fmt: skip
    e = errors.get(kind, lambda: rng.normal(size=shape))()
    if kind == "one varies 20 times":
        e *= np.where(np.arange(methods) == 1, 20, 1)
    e = e + rng.normal(size=(seeds, 1)) * (kind != "trained networks")
    names = [f"m{i}" for i in range(methods)]
    return pd.DataFrame(e, columns=names).rename_axis("seed").reset_index().melt("seed", names, "method", "accuracy")


def in_settings(seeds: int, methods: int, sample: str, rng: np.random.Generator, settings: int = 4) -> pd.DataFrame:
    """Draw accuracies in settings that methods suit differently, with seeds that suit methods alike in all settings.

    Methods have the same mean over these settings, if the seed is the sample; if the setting is, over all settings that
    could be drawn with these seeds; if it is "setting, other seeds", with all seeds that could be drawn.
    """
    parts = [accuracies("normal", seeds, methods, rng).assign(setting=i) for i in range(settings)]
    data = pd.concat(parts, ignore_index=True)
    of_settings, of_seeds = rng.normal(size=(settings, methods)), rng.normal(scale=0.5, size=(seeds, methods))
    if sample == "seed":
        of_settings -= of_settings.mean(axis=0)
    elif sample == "setting":
        of_seeds -= of_seeds.mean(axis=0)
    number = data["method"].str[1:].astype(int)
    effects = of_settings[data["setting"], number] + of_seeds[data["seed"], number]
    return data.assign(accuracy=data["accuracy"] + effects)


_SAMPLES = {
    "these settings": "seed",
    "other settings, these seeds": "setting",
    "other settings, other seeds": "setting, other seeds",
}
"""Sample by the settings and seeds of which claims are made."""
_SEEDS = "print: claims are of other settings with these seeds"


def paired(kind: str, seeds: int, methods: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Errors of each rule: single tests, any by Holm, any simultaneous interval, sign flips."""
    if sample := _SAMPLES.get(kind):
        data, block = in_settings(seeds, methods, sample, rng), ["setting", "seed"]
        sample = sample.split(",")[0]
    else:
        data, block = accuracies(kind, seeds, methods, rng), ["seed"]
    table = compare(data, reference="m0", block=block, sample=sample).table.query("method != 'm0'")
    own = (table["sim_conf_low"] > 0) | (table["sim_conf_high"] < 0)
    flips = np.where(table["p_sign_flip"].isna(), np.nan, table["p_sign_flip"] <= 0.05)
    if table["p_value"].isna().all():
        return [np.array([np.nan])] * 3 + [flips]
    return [table["p_value"] <= 0.05, np.array([(table["p_holm"] <= 0.05).any()]), np.array([own.any()]), flips]


def mixed(kind: str, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Rejections of the mixed model's effects of method, of which there are none."""
    rows = [(f"m{m}", f"h{h}", s) for m in range(3) for h in range(2) for s in range(groups)]
    data = pd.DataFrame(rows, columns=["method", "heterogeneity", "seed"])
    e = rng.standard_t(3, len(data)) if kind == "t3" else rng.normal(size=len(data))
    if kind == "one varies 20 times":
        e *= np.where(data["method"] == "m1", 20, 1)
    data["accuracy"] = e + rng.normal(size=groups)[data["seed"]]
    table = _mixed.mixed(data).table
    return np.asarray(table[table["term"].str.startswith("method")]["p_value"] <= 0.05)


def spearman(n: int, ties: bool, rng: np.random.Generator) -> float:
    """Rejections of a rank correlation of 0."""
    x, y = rng.normal(size=(2, n))
    p = claims.rank_correlation(x, np.round(y) if ties else y).p_value
    return float(p <= 0.05) if np.isfinite(p) else np.nan


RULES = ("t test, one method", "Holm, any method", "simultaneous intervals, any", "sign flip")
CLAIMS = {
    "compare, m methods with a reference": Claim(
        "level",
        (
            "fedstat.stats.ranking.paired_test", "fedstat.labelled.comparison._adjusted",
            "fedstat.stats.ranking.sign_flip",
        ),
        tuple(
            f"{result}.{name}"
            for result in ("ComparisonResult", "RunsResult")
            for name in ("p_value", "p_holm", "p_sign_flip", "conf_low", "conf_high", "sim_conf_low", "sim_conf_high")
        ),
        {
            f"{kind}, {seeds} seeds, {methods} methods": Case(
                partial(paired, kind, seeds, methods), kind.endswith(("normal", "these settings", "these seeds")),
                250 if methods > 5 else 1000, _SEEDS if kind.endswith("other seeds") else "", RULES,
                kind == "trained networks",
            )
            for kind in ("normal", "t3", "skewed", "one varies 20 times", "trained networks", *_SAMPLES)
            for seeds, methods in ((2, 5), (3, 5), (3, 30), (10, 5))
        },
    ),
    "compare.mixed, effects of methods": Claim(
        "level",
        ("analysis._mixed.mixed",),
        (),
        {
            f"{kind}, {groups} seeds": Case(
                partial(mixed, kind, groups), kind == "normal", 500,
                "help of compare.mixed says that methods share a variance" if kind == "one varies 20 times" else "",
            )
            for kind in ("normal", "t3", "one varies 20 times")
            for groups in (3, 10)
        },
    ),
    "claims.rank_correlation": Claim(
        "level",
        ("analysis._claims.rank_correlation",),
        (),
        {
            f"{n} pairs{', ties' if ties else ''}": Case(partial(spearman, n, ties), replicates=1000)
            for n in (4, 8)
            for ties in (False, True)
        },
    ),
}  # fmt: skip
