"""Forest plots: one estimate and interval a row."""

from __future__ import annotations

from functools import partial, singledispatch
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat.ntk.results import ExtremeEigenvalues
from fedstat.plot._figure import draw_layers, fill, get_axes, gray, name_ticks, opened, refusal, sole
from fedstat.plot._styles import title_of
from fedstat.results import (
    BootstrapResult,
    ComparisonResult,
    ComponentsResult,
    EffectiveRankResult,
    EntropyResult,
    GroupIccResult,
    IccResult,
    LeakageResult,
    SplitResult,
)
from fedstat.results.icc import HEADLINE, NO_EVIDENCE, NOT_TESTED, ONE_DIRECTION
from fedstat.results.leakage import RECOVERED
from fedstat.results.tables import count
from fedstat.stats.icc import TYPES, Type
from fedstat.study import collect

TAKES = (
    "the result of icc, variance_components, bootstrap, compare, effective_rank, knn_entropy, attack.leakage or "
    "ntk.extreme_eigenvalues, a split by agreement, or a table with the columns estimate, conf_low and conf_high"
)
_NAMES = ("term", "unit", "method", "layer", "scenario", "run", "client")


class Rows(NamedTuple):
    """Rows of a forest plot.

    Attributes
    ----------
    table : DataFrame
        name, value, low, high and filled (bool) of each row.
    label : str
        Label of the axis: values and intervals.
    lines : tuple of float
        Reference values, such as 0 for no difference.
    filled, empty : str
        Meaning of filled and of empty points; ``filled`` is an empty string if all points have one meaning.
    kind : str
        Noun for a row, such as "unit".
    ordered : bool
        If True, rows are drawn from high to low.
    layer : DataFrame or None
        value, low and high of the whole layer.
    log : bool
        If True, the axis is logarithmic.
    note : str
        Note on rows without a bar, for the title.
    """

    table: pd.DataFrame
    label: str
    lines: tuple[float, ...] = ()
    filled: str = ""
    empty: str = ""
    kind: str = "unit"
    ordered: bool = True
    layer: pd.DataFrame | None = None
    log: bool = False
    note: str = ""


@singledispatch
def rows(result: object, type: Type) -> Rows:  # noqa: A002, ARG001
    """Return the rows of a result; raise TypeError for a result without intervals."""
    raise refusal("forest", TAKES, result)


@rows.register(IccResult)
def _of_icc(result: IccResult, type: Type) -> Rows:  # noqa: A002
    has_bootstrap = result.replicates is not None
    low, high = ("boot_low", "boot_high") if has_bootstrap else ("conf_low", "conf_high")
    names = {"icc": "value", low: "low", high: "high"}
    table, layer = (t[t["type"] == type].reset_index(drop=True) for t in (result.tidy(), result.layer))
    is_shown, is_tested = table["estimated"], table["conclusion"] != NOT_TESTED
    n_missing = int((~is_shown & table["icc"].notna()).sum())
    table[[low, high]] = table[[low, high]].where(is_shown)
    table["filled"] = is_shown & (table["conclusion"] == ONE_DIRECTION)
    method = "bootstrap over clients" if has_bootstrap else "F" if result.inference == "F" else "jackknife over clients"
    return Rows(
        table.rename(columns={"unit": "name", **names}),
        f"{type}, {100 * result.level:g}% CI ({method})" if is_shown.any() else type,
        (0,),
        result.finding if is_tested.any() else "",
        NO_EVIDENCE + " or not estimated" * bool(n_missing),
        layer=layer.rename(columns=names)[[*names.values()]],
        note=f"not estimated, without bar: {n_missing}" * bool(n_missing),
    )


@rows.register(GroupIccResult)
def _of_groups(result: GroupIccResult, type: Type) -> Rows:  # noqa: A002, ARG001
    by_group = result.by_group
    sizes = [count(n, "client") for n in by_group["n_clients"].tolist()]
    within = [f"within {name} ({size})" for name, size in zip(by_group["group"], sizes, strict=True)]
    table = pd.concat([result.layer.iloc[::-1].assign(group=lambda x: x["pairs"]), by_group.assign(group=within)])
    parts = "groups" if result.claim == "new groups" else "clients"
    label = (
        f"{HEADLINE} of the layer, {_percent(result.level)} CI\n(jackknife over {parts}; of one group, over clients)"
    )
    table = table.rename(columns={"icc": "estimate"}).reset_index(drop=True)
    return Rows(_to_rows(table, "group"), label, (0,), kind="", ordered=False)


@rows.register(ComponentsResult)
def _of_components(result: ComponentsResult, type: Type) -> Rows:  # noqa: A002, ARG001
    names = {"reliability": "value", "conf_low": "low", "conf_high": "high"}
    table, layer = (t.assign(conf_low=t["conf_low"].clip(lower=-1)) for t in (result.tidy(), result.layer))
    table.loc[table["reliability"] < -1, "reliability"] = -1.0
    level = 1 - result.level
    return Rows(
        table.rename(columns={"unit": "name", **names})[["name", *names.values()]].assign(
            filled=result.p_adjusted <= level + 1e-12
        ),
        f"reliability, {_percent(result.level)} CI",
        (0, 0.5),
        f"differ beyond training noise (FDR {level:.2g})",
        "no evidence",
        layer=layer.rename(columns=names)[[*names.values()]],
    )


@rows.register(SplitResult)
def _of_split(result: SplitResult, type: Type) -> Rows:  # noqa: A002
    if result.fit.statistic_name == "nu":
        raise refusal(
            "forest", TAKES, result, "A split by factor analysis has no intervals: draw fedstat.bootstrap(weights)."
        )
    of_fit = rows(result.fit, type)
    if result.conclusion is not None:
        table = of_fit.table.assign(filled=np.isin(result.conclusion, ("shared", "personal")))
        filled = f"above or below {result.threshold:.4g} (FDR {result.fdr:.2g})"
        return of_fit._replace(table=table, lines=(0, result.threshold), filled=filled, empty="inconclusive")
    threshold = (result.threshold,) if np.isfinite(result.threshold) else ()
    table = of_fit.table.assign(filled=result.shared)
    return of_fit._replace(table=table, lines=(*of_fit.lines, *threshold), filled="shared", empty="personal")


@rows.register(BootstrapResult)
def _of_bootstrap(result: BootstrapResult, type: Type) -> Rows:  # noqa: A002, ARG001
    split = result.split
    return Rows(
        _to_rows(result.tidy(), "term").assign(filled=split.shared),
        f"communality $\\nu$\n{result.interval_label}",
        (split.threshold,) if np.isfinite(split.threshold) else (),
        "shared",
        "personal",
    )


@rows.register(ComparisonResult)
def _of_comparison(result: ComparisonResult, type: Type) -> Rows:  # noqa: A002, ARG001
    tidy = result.tidy()
    table = pd.DataFrame(
        {
            "name": tidy["term"].map(collect.title_of),
            "value": tidy["estimate"],
            "low": tidy["sim_conf_low"],
            "high": tidy["sim_conf_high"],
        }
    )
    level = 1 - result.level
    return Rows(
        table.assign(filled=tidy["p_holm"] <= level + 1e-12),
        f"difference from {title_of(result.reference)}, simultaneous {_percent(result.level)} CI",
        (0,),
        f"p ≤ {level:.2g} (Holm)",
        "no evidence",
        kind="method",
        ordered=False,
    )


@rows.register(EffectiveRankResult)
def _of_ranks(result: EffectiveRankResult, type: Type) -> Rows:  # noqa: A002, ARG001
    table = result.tidy()
    rounds = [f", round {r}" for r in table["checkpoint"]] if "checkpoint" in table else [""] * len(table)
    names = [f"{x.term}{r} (of {x.largest:.0f})" for x, r in zip(table.itertuples(), rounds, strict=True)]
    label = f"effective rank, mean over clients, {_percent(result.level)} CI\nin brackets: the maximum"
    return Rows(_to_rows(table.assign(name=names), "name"), label, kind="layer", ordered=False)


@rows.register(EntropyResult)
def _of_entropy(result: EntropyResult, type: Type) -> Rows:  # noqa: A002, ARG001
    table, dims = result.tidy(), [str(d) for d in result.to_dataset()["entropy"].dims]
    name = table[dims].astype(str).agg(", ".join, axis=1) if dims else pd.Series("all samples", table.index)
    label = f"entropy in nats, {_percent(result.level)} CI widened for bias"
    return Rows(_to_rows(table.assign(name=name), "name"), label, kind=", ".join(dims))


@rows.register(LeakageResult)
def _of_leakage(result: LeakageResult, type: Type) -> Rows:  # noqa: A002, ARG001
    augmented = result.augment()
    has_modes = augmented["labels"].nunique() > 1
    table = pd.DataFrame(
        {
            "name": augmented["run"].map(collect.title_of) + (", labels " + augmented["labels"] if has_modes else ""),
            "value": augmented["gain"], "low": augmented["gain_low"], "high": augmented["gain_high"],
            "filled": augmented["conclusion"] == RECOVERED,
        }
    )  # fmt: skip
    label = f"PSNR minus PSNR of the class-mean image (dB), {_percent(result.level)} CI"
    return Rows(table, label, (0,), "images recovered", "no evidence", kind="run", ordered=False)


@rows.register(ExtremeEigenvalues)
def _of_eigenvalues(result: ExtremeEigenvalues, type: Type) -> Rows:  # noqa: A002, ARG001
    table = result.tidy()
    log = result.lambda_min > 0
    floor = min(result.lambda_min, result.resolution) / 10 if log else -np.inf
    limits = {
        "conf_low": (table["estimate"] - table["error"]).clip(lower=floor),
        "conf_high": table["estimate"] + table["error"],
    }
    label = "eigenvalue of the kernel ± numerical error\nline: smallest value that float64 resolves"
    eigenvalues = _to_rows(table.assign(name=["smallest", "largest"], **limits), "name")
    return Rows(eigenvalues, label, (result.resolution,), kind="", ordered=False, log=log)


@rows.register(pd.DataFrame)
def _of_table(result: pd.DataFrame, type: Type) -> Rows:  # noqa: A002, ARG001
    name = next((n for n in _NAMES if n in result), None)
    if missing := [c for c in ("estimate", "conf_low", "conf_high") if c not in result]:
        raise ValueError(f"the table must have the columns estimate, conf_low and conf_high, but lacks {missing}.")
    table = result if name else result.assign(name=result.index)
    return Rows(_to_rows(table, name or "name"), "estimate with its interval", kind=name or "", ordered=False)


def _to_rows(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rename the columns of a tidy table as ``Rows`` has them; all points are filled."""
    columns = {name: "name", "estimate": "value", "conf_low": "low", "conf_high": "high"}
    return table[[*columns]].rename(columns=columns).assign(filled=True)


def _percent(level: float) -> str:
    return f"{100 * level:g}%"


_ROW = 0.19  # inches


def forest(
    result: Any,
    *,
    type: Type = HEADLINE,  # noqa: A002
    units: int = 40,
    ax: Axes | None = None,
) -> Axes:
    """Draw a forest plot: the estimate and interval of each unit, method, layer or run.

    Parameters
    ----------
    result : result with intervals, path of a saved one, or DataFrame
        One of these:

        - the result of :func:`fedstat.icc` (with bootstrap samples, the intervals are those of the bootstrap;
          with groups the layer's agreement between and within groups and within each group),
          :func:`fedstat.variance_components` (reliability), :func:`fedstat.bootstrap` (communality),
          :func:`fedstat.compare` (differences with simultaneous CIs), ``effective_rank``, ``knn_entropy``,
          ``attack.leakage`` (PSNR minus PSNR of the class-mean image) or ``ntk.extreme_eigenvalues``;
        - a split by agreement or by a test;
        - results of several layers, which are drawn side by side on one scale;
        - a table with the columns estimate, conf_low and conf_high, and a column term, unit, method, layer, scenario,
          run or client for the names.
    type : {"ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k"}
        Coefficient of an IccResult.
    units : int
        Largest number of rows of a layer. Of more units, the highest and the lowest are drawn. Constant units have no
        estimate; the title counts them.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure, high enough for the names. None for several layers.

    Returns
    -------
    matplotlib Axes
        Of several layers the first, whose ``.figure.axes`` are all. Units stand from high to low, and the estimate of
        the layer below them; methods, layers and runs keep the order of the result. The label of the axis explains
        filled and empty points. A unit that an IccResult does not count as ``estimated`` has an empty point without a
        bar. Above the line at 0.5, a client's weights estimate its true weights with lower expected squared error than
        the average over clients does. Reliability below -1 is cut off.

    Raises
    ------
    TypeError
        If the result has no intervals, such as a split by factor analysis.
    ValueError
        If ``ax`` is given for several layers.
    """
    check.choice("type", type, TYPES)
    check.integer("units", units)
    draw = partial(_draw_rows, most=units)
    return draw_layers("forest", sole(opened(result)), partial(rows, type=type), draw, partial(_height, most=units), ax)


def _height(forest_rows: Rows, most: int) -> float:
    """Return the height in inches of axes with legible names."""
    n = int(np.isfinite(forest_rows.table["value"]).sum())
    return 1.3 + _ROW * (min(n, most + 1) + 2.1)


def _draw_rows(forest_rows: Rows, ax: Axes | None, *, most: int) -> Axes:
    """Draw the rows of one result."""
    table, y, notes = _select_rows(forest_rows, most)
    bottom = (y[-1] if len(y) else 0.0) + 1.5
    ax = get_axes(ax, (6.4, _height(forest_rows, most)))
    for x in forest_rows.lines:
        ax.axvline(x, color=gray(0.7), linewidth=0.8, zorder=0)
    ax.hlines(y, table["low"], table["high"], color=gray(0.5), linewidth=1)
    color = [gray(0.1) if is_filled else gray(1) for is_filled in table["filled"]]
    ax.scatter(table["value"], y, s=16, color=color, edgecolor=gray(0.1), linewidth=0.8, zorder=3)
    names, positions, layer = list(table["name"]), list(y), forest_rows.layer
    if layer is not None:
        ax.hlines(bottom, layer["low"], layer["high"], color=gray(0.1), linewidth=1.6)
        ax.scatter(layer["value"], [bottom], s=36, marker="D", color=gray(0.1), zorder=3)
        names, positions = [*names, "layer"], [*positions, bottom]
    else:
        bottom -= 1.5
    if len(gaps := np.flatnonzero(np.diff(y) > 1.5)):
        ax.axhline(y[gaps[0]] + 1, color=gray(0.8), linewidth=0.8, linestyle=":")
    key = f"● {forest_rows.filled}   ○ {forest_rows.empty}"
    key = key if fill(key, ax) == key else key.replace("   ", "\n")
    label = f"{forest_rows.label}\n{key}" if forest_rows.filled else forest_rows.label
    ax.set(xlabel=fill(label, ax), ylabel=forest_rows.kind, ylim=(bottom + 0.8, -0.8))
    ax.set_title("\n".join(fill(note, ax) for note in notes), fontsize="medium")
    if forest_rows.log:
        ax.set_xscale("log")
    name_ticks(ax.yaxis, positions, names)
    return ax


def _select_rows(forest_rows: Rows, most: int) -> tuple[pd.DataFrame, NDArray[np.float64], list[str]]:
    """Return at most ``most`` rows, their positions with a gap between the two ends, and notes on omitted rows."""
    table = forest_rows.table[np.isfinite(forest_rows.table["value"])]
    if forest_rows.ordered:
        table = table.sort_values("value", ascending=False, kind="stable")
    n_undefined = len(forest_rows.table) - len(table)
    notes = [f"undefined units left out: {n_undefined}"] * bool(n_undefined) + [forest_rows.note] * bool(
        forest_rows.note
    )
    n, y = len(table), np.arange(len(table), dtype=float)
    if n > most:
        ends = ("highest", "lowest") if forest_rows.ordered else ("first", "last")
        notes.insert(0, f"{most - most // 2} {ends[0]} and {most // 2} {ends[1]} of {n} {forest_rows.kind or 'row'}s")
        rank = np.r_[0 : most - most // 2, n - most // 2 : n]
        table = table.iloc[rank]
        y = np.arange(most) + np.where(rank >= most - most // 2, 1.0, 0.0)
    return table, y, notes
