"""Forest plots: one estimate and interval a row."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat.ntk.results import ExtremeEigenvalues
from fedstat.plot._figure import given, literal, name_rows, refusal
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
from fedstat.results.icc import HEADLINE
from fedstat.results.leakage import RECOVERED
from fedstat.stats.icc import TYPES, Type

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


_ROW = 0.19  # inches
_LINE = 60  # characters below the axis


def forest(
    result: Any,
    *,
    type: Type = HEADLINE,  # noqa: A002
    units: int = 40,
    ax: Axes | None = None,
) -> Axes:
    """Forest plot: the estimate of every unit, method, layer or run with its interval, and the layer below.

    Parameters
    ----------
    result : result with intervals, or DataFrame
        Of :func:`fedstat.icc` (with replicates the intervals are those of the bootstrap),
        of :func:`fedstat.variance_components` (personal shares), of :func:`fedstat.bootstrap` (communalities), of
        :func:`fedstat.compare` (differences, simultaneous intervals), ``effective_rank``, ``knn_entropy``,
        ``attack.leakage`` (gain over the mean image) or ``ntk.extreme_eigenvalues``; a split by agreement; or a table
        with the columns estimate, conf_low and conf_high, and term, unit, method, layer or run for the names.
    type : {"ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k"}
        Which coefficient of an IccResult.
    units : int
        Largest number to draw; of more units the two ends are kept. Dead units are left out and counted.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure, high enough for the names.

    Returns
    -------
    matplotlib Axes
        Units from high to low, named on the left; methods, layers and runs in their own order. What filled points and
        lines mean is said below the axis. Personal shares have a line at 1/2, from which on own weights beat the mean
        over clients; what lies below -1 is cut off.

    Raises
    ------
    TypeError
        If the result has no intervals, such as a split by factor analysis.
    """
    found = rows(result, check.choice("type", type, TYPES))
    check.integer("units", units)
    drawn, y, note = _places(found, units)
    bottom = (y[-1] if len(y) else 0.0) + 1.5
    ax = given(ax, (6.4, 1.3 + _ROW * (bottom + 1.6)))
    for at in found.lines:
        ax.axvline(at, color="0.7", linewidth=0.8, zorder=0)
    ax.hlines(y, drawn["low"], drawn["high"], color="0.5", linewidth=1)
    color = np.where(drawn["filled"].to_numpy(dtype=bool), "0.1", "white")
    ax.scatter(drawn["value"], y, s=16, color=color, edgecolor="0.1", linewidth=0.8, zorder=3)
    names, places = list(drawn["name"]), list(y)
    if found.whole is not None:
        ax.hlines(bottom, found.whole["low"], found.whole["high"], color="0.1", linewidth=1.6)
        ax.scatter(found.whole["value"], [bottom], s=36, marker="D", color="0.1", zorder=3)
        names, places = [*names, "layer"], [*places, bottom]
    else:
        bottom -= 1.5
    if len(gaps := np.flatnonzero(np.diff(y) > 1.5)):
        ax.axhline(y[gaps[0]] + 1, color="0.8", linewidth=0.8, linestyle=":")
    apart = "\n" if len(found.filled + found.empty) > _LINE else "   "
    key = f"\n● {found.filled}{apart}○ {found.empty}" if found.filled else ""
    ax.set(xlabel=found.label + key, ylabel=found.kind, ylim=(bottom + 0.8, -0.8))
    ax.set_title("; ".join(note), fontsize="medium")
    if found.log:
        ax.set_xscale("log")
    name_rows(ax, places, names, height=bottom + 1.6)
    return ax


def _places(found: Rows, most: int) -> tuple[pd.DataFrame, NDArray[np.float64], list[str]]:
    """Rows to draw, where, with a gap between two ends, and what was left out."""
    table = found.table[np.isfinite(found.table["value"])]
    if found.ordered:
        table = table.sort_values("value", ascending=False, kind="stable")
    left_out = len(found.table) - len(table)
    note = [f"undefined units left out: {left_out}"] if left_out else []
    n, y = len(table), np.arange(len(table), dtype=float)
    if n > most:
        ends = ("highest", "lowest") if found.ordered else ("first", "last")
        note.insert(0, f"{most - most // 2} {ends[0]} and {most // 2} {ends[1]} of {n} {found.kind or 'row'}s")
        kept = np.r_[0 : most - most // 2, n - most // 2 : n]
        table = table.iloc[kept]
        y = np.arange(most) + np.where(kept >= most - most // 2, 1.0, 0.0)
    return table, y, note
