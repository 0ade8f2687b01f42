"""Which rows a forest plot has: estimates with intervals of every result that has them."""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedstat.ntk.results import ExtremeEigenvalues
from fedstat.plot._axes import literal
from fedstat.plot._inputs import refusal
from fedstat.results import (
    BootstrapResult,
    ComparisonResult,
    ComponentsResult,
    EffectiveRankResult,
    EntropyResult,
    IccResult,
    LeakageResult,
    SplitResult,
)
from fedstat.results.leakage import RECOVERED
from fedstat.stats.icc import Type

TAKES = (
    "the result of icc, variance_components, bootstrap, compare, effective_rank, knn_entropy, attack.leakage or "
    "ntk.extreme_eigenvalues, a split by agreement, or a table with the columns estimate, conf_low and conf_high"
)
_NAMES = ("term", "unit", "method", "layer", "label", "run", "client")


class Rows(NamedTuple):
    """Rows of a forest plot.

    Attributes
    ----------
    table : DataFrame
        name, value, low, high and filled (bool) of each row.
    label : str
        Of the axis: what the values and intervals are.
    lines : tuple of float
        Where the values have a meaning.
    filled, empty : str
        What filled and empty points say; empty if they do not differ.
    kind : str
        What the rows are.
    ordered : bool
        Whether to draw rows from high to low.
    whole : DataFrame or None
        value, low and high of the layer.
    log : bool
        Whether the axis is logarithmic.
    """

    table: pd.DataFrame
    label: str
    lines: tuple[float, ...] = ()
    filled: str = ""
    empty: str = ""
    kind: str = "unit"
    ordered: bool = True
    whole: pd.DataFrame | None = None
    log: bool = False


@singledispatch
def rows(result: object, type: Type) -> Rows:  # noqa: A002, ARG001
    """Rows of a result; TypeError for one without intervals."""
    raise refusal("forest", TAKES, result)


@rows.register(IccResult)
def _of_icc(result: IccResult, type: Type) -> Rows:  # noqa: A002
    drawn = result.replicates is not None
    low, high = ("boot_low", "boot_high") if drawn else ("conf_low", "conf_high")
    names = {"icc": "value", low: "low", high: "high"}
    table, layer = (t[t["type"] == type].reset_index(drop=True) for t in (result.tidy(), result.layer))
    units = table.rename(columns={"unit": "name", **names})[["name", *names.values()]]
    level = 1 - result.level
    tested = bool(table["p_adjusted"].notna().any())
    by = "bootstrap over clients" if drawn else "F" if result.inference == "F" else "jackknife over clients"
    return Rows(
        units.assign(filled=table["p_adjusted"] <= level + 1e-12),
        f"{type}, {100 * result.level:g}% CI ({by})" if table[low].notna().any() else type,
        (0,),
        result.finding if tested else "",
        "no evidence",
        whole=layer.rename(columns=names)[[*names.values()]],
    )


@rows.register(ComponentsResult)
def _of_components(result: ComponentsResult, type: Type) -> Rows:  # noqa: A002, ARG001
    names = {"personal": "value", "conf_low": "low", "conf_high": "high"}
    table, layer = (t.assign(conf_low=t["conf_low"].clip(lower=-1)) for t in (result.tidy(), result.layer))
    table.loc[table["personal"] < -1, "personal"] = -1.0
    level = 1 - result.level
    return Rows(
        table.rename(columns={"unit": "name", **names})[["name", *names.values()]].assign(
            filled=result.p_adjusted <= level + 1e-12
        ),
        f"personal share, {_percent(result.level)} interval",
        (0, 0.5),
        f"beyond noise at a false discovery rate of {level:.2g}",
        "not shown to be",
        whole=layer.rename(columns=names)[[*names.values()]],
    )


@rows.register(SplitResult)
def _of_split(result: SplitResult, type: Type) -> Rows:  # noqa: A002
    if result.fit.statistic_name == "nu":
        raise refusal(
            "forest", TAKES, result, "A split by factor analysis has no intervals: draw fedstat.bootstrap(weights)."
        )
    found = rows(result.fit, type)
    if result.outcome is not None:
        table = found.table.assign(filled=np.isin(result.outcome, ("shared", "personal")))
        against = f"shown to be on its side of {result.threshold:.4g} (false discovery rate {result.fdr:.2g})"
        return found._replace(table=table, lines=(0, result.threshold), filled=against, empty="undecided")
    at = (result.threshold,) if np.isfinite(result.threshold) else ()
    table = found.table.assign(filled=result.shared)
    return found._replace(table=table, lines=(*found.lines, *at), filled="shared", empty="personal")


@rows.register(BootstrapResult)
def _of_bootstrap(result: BootstrapResult, type: Type) -> Rows:  # noqa: A002, ARG001
    split = result.split
    return Rows(
        _named(result.tidy(), "term").assign(filled=split.shared),
        f"communality $\\nu$\n{result.interval_label}",
        (split.threshold,) if np.isfinite(split.threshold) else (),
        "shared",
        "personal",
    )


@rows.register(ComparisonResult)
def _of_comparison(result: ComparisonResult, type: Type) -> Rows:  # noqa: A002, ARG001
    found = result.tidy()
    table = pd.DataFrame(
        {
            "name": found["term"],
            "value": found["estimate"],
            "low": found["sim_conf_low"],
            "high": found["sim_conf_high"],
        }
    )
    level = 1 - result.level
    return Rows(
        table.assign(filled=found["p_holm"] <= level + 1e-12),
        f"difference from {literal(result.reference)}, simultaneous {_percent(result.level)} intervals",
        (0,),
        f"differs, p ≤ {level:.2g} by Holm",
        "not shown to",
        kind="method",
        ordered=False,
    )


@rows.register(EffectiveRankResult)
def _of_ranks(result: EffectiveRankResult, type: Type) -> Rows:  # noqa: A002, ARG001
    table = result.tidy()
    when = [f", round {at}" for at in table["checkpoint"]] if "checkpoint" in table else [""] * len(table)
    names = [f"{x.term}{at} (of {x.largest:.0f})" for x, at in zip(table.itertuples(), when, strict=True)]
    label = f"effective rank, mean over clients, {_percent(result.level)} interval\nin brackets: the largest possible"
    return Rows(_named(table.assign(name=names), "name"), label, kind="layer", ordered=False)


@rows.register(EntropyResult)
def _of_entropy(result: EntropyResult, type: Type) -> Rows:  # noqa: A002, ARG001
    table, dims = result.tidy(), [str(d) for d in result.to_dataset()["entropy"].dims]
    name = table[dims].astype(str).agg(", ".join, axis=1) if dims else pd.Series("all samples", table.index)
    label = f"entropy in nats, {_percent(result.level)} interval with an allowance for the bias"
    return Rows(_named(table.assign(name=name), "name"), label, kind=", ".join(dims))


@rows.register(LeakageResult)
def _of_leakage(result: LeakageResult, type: Type) -> Rows:  # noqa: A002, ARG001
    found = result.augment()
    several = found["labels"].nunique() > 1
    table = pd.DataFrame(
        {
            "name": found["run"] + (", labels " + found["labels"] if several else ""),
            "value": found["gain"], "low": found["gain_low"], "high": found["gain_high"],
            "filled": found["verdict"] == RECOVERED,
        }
    )  # fmt: skip
    label = f"PSNR less that of the guess without a gradient (dB), {_percent(result.level)} interval"
    return Rows(table, label, (0,), "images recovered", "not shown to be", kind="run", ordered=False)


@rows.register(ExtremeEigenvalues)
def _of_eigenvalues(result: ExtremeEigenvalues, type: Type) -> Rows:  # noqa: A002, ARG001
    table = result.tidy()
    log = result.lambda_min > 0
    floor = min(result.lambda_min, result.resolution) / 10 if log else -np.inf
    limits = {
        "conf_low": (table["estimate"] - table["error"]).clip(lower=floor),
        "conf_high": table["estimate"] + table["error"],
    }
    label = "eigenvalue of the kernel, with its numerical error\nline: the least that float64 resolves"
    units = _named(table.assign(name=["least", "largest"], **limits), "name")
    return Rows(units, label, (result.resolution,), kind="", ordered=False, log=log)


@rows.register(pd.DataFrame)
def _of_table(result: pd.DataFrame, type: Type) -> Rows:  # noqa: A002, ARG001
    name = next((n for n in _NAMES if n in result), None)
    if missing := [c for c in ("estimate", "conf_low", "conf_high") if c not in result]:
        raise ValueError(f"the table must have the columns estimate, conf_low and conf_high, but lacks {missing}")
    table = result if name else result.assign(name=result.index)
    return Rows(_named(table, name or "name"), "estimate with its interval", kind=name or "", ordered=False)


def _named(table: pd.DataFrame, name: str) -> pd.DataFrame:
    columns = {name: "name", "estimate": "value", "conf_low": "low", "conf_high": "high"}
    return table[[*columns]].rename(columns=columns).assign(filled=True)


def _percent(level: float) -> str:
    return f"{100 * level:g} %"
