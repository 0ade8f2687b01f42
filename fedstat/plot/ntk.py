"""Figures of the neural-tangent-kernel theory: bound against observation. Pure: a result in, Axes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import seaborn as sns
import xarray as xr
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedstat._utils import check
from fedstat.ntk.results import ConvergenceResult, GeneralizationResult
from fedstat.plot._figure import given, interval, looks, ordered, refusal
from fedstat.study.collect import title_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_NAMES = {"fedavg-matched": "FedAvg, kernel of equal trace", "dynamic": "dynamic FedFac"}  # of the theory alone


def _lines(table: pd.DataFrame, names: Mapping[str, str], x: str, *, ax: Axes) -> None:
    """A line for each column that ``names`` labels, both axes in logs, ticks at the values that were run.

    Two values are not joined: what lies between them was not seen. The legend, without a title, stands below the axes.
    """
    table = table.rename(columns=dict(names))
    long = table.melt(id_vars=x, value_vars=list(names.values()), var_name="of", value_name="y")
    joined = table[x].nunique() > 2
    sns.lineplot(
        long, x=x, y="y", hue="of", style="of", markers=["o", "X", "s", "P", "D"], dashes=joined, markersize=6,
        palette="colorblind", linestyle="-" if joined else "none", ax=ax,
    )  # fmt: skip
    ax.set(xscale="log", yscale="log")
    ticks = sorted(set(table[x]))
    ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
    ax.set_xticks([], minor=True)
    if not joined:
        ax.margins(x=0.3)
    sns.move_legend(
        ax, "upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, title=None, frameon=False, fontsize="small"
    )


def convergence(result: ConvergenceResult | xr.DataTree, *, width: int | None = None, ax: Axes | None = None) -> Axes:
    """‖y − h(t)‖² relative to its start, by round: mean over replicates, their range, and Theorem 1's bound.

    Parameters
    ----------
    result : ConvergenceResult, or the DataTree of a store of one
    width : int, optional
        Default: the largest at which a method was run.
    ax : matplotlib Axes, optional

    Returns
    -------
    Axes

    Raises
    ------
    ValueError
        If nothing was run at this width.
    """
    table = _convergence(result, "convergence").tidy().dropna(subset="loss")
    if width is not None:
        check.choice("width", width, sorted(set(table["width"])))
    ax = given(ax, (5, 4))
    relative = table.groupby(["method", "width", "replicate"])[["loss", "bound"]].transform(lambda v: v / v.iloc[0])
    table = table.assign(loss=relative["loss"], bound=relative["bound"])
    several = table["replicate"].nunique() > 1
    styles = looks(table["method"])
    for method in ordered(table["method"]):
        own, color = table[table["method"] == method], styles[method].colour
        own = own[own["width"] == (own["width"].max() if width is None else width)]
        sns.lineplot(
            own,
            x="round",
            y="loss",
            color=color,
            errorbar=("pi", 100),
            label=_NAMES.get(method, title_of(method)),
            ax=ax,
        )
        if own["bound"].notna().any():
            sns.lineplot(own, x="round", y="bound", color=color, linestyle="--", errorbar=None, ax=ax)
    ax.set(yscale="log", xlabel="round t", ylabel="‖y − h(t)‖² / ‖y − h(0)‖²")
    handles, labels = ax.get_legend_handles_labels()
    key: dict[str, Line2D | Patch] = {"Theorem 1: the loss stays below": Line2D([], [], color="0.4", linestyle="--")}
    key |= {"range over replicates": Patch(color="0.6", alpha=0.4)} if several else {}
    ax.legend(
        [*handles, *key.values()], [*labels, *key], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2,
        frameon=False, fontsize="small",
    )  # fmt: skip
    return ax


def freezing(result: ConvergenceResult | xr.DataTree, *, ax: Axes | None = None) -> Axes:
    """How far FedSplit's kernels and activation patterns are from standing still, by width.

    Parameters
    ----------
    result : ConvergenceResult, or the DataTree of a store of one
    ax : matplotlib Axes, optional

    Returns
    -------
    Axes
    """
    result = _convergence(result, "freezing")
    ax = given(ax, (5, 4))
    names = {
        "gap_shared": "‖H(0)ˢ − H∞ˢ‖ / ‖H∞ˢ‖",
        "gap_personal": "‖H(0)ᵖ − H∞ᵖ‖ / ‖H∞ᵖ‖",
        "drift_shared": "max ‖H(t)ˢ − H(0)ˢ‖ / ‖H∞ˢ‖",
        "drift_personal": "max ‖H(t)ᵖ − H(0)ᵖ‖ / ‖H∞ᵖ‖",
        "flipped": "activation patterns flipped",
    }
    _lines(result.by_setting().query("method == 'fedsplit'"), names, "width", ax=ax)
    ax.set(xlabel="width m1 = m2", ylabel="relative change")
    return ax


def generalization(result: GeneralizationResult | xr.DataTree, *, x: str = "clients", ax: Axes | None = None) -> Axes:
    """Theorem 2's bound, its complexity term and the observed test loss; above 1 (grey) the bound says nothing.

    Parameters
    ----------
    result : GeneralizationResult, or the DataTree of a store of one
    x : {"clients", "n"}
    ax : matplotlib Axes, optional

    Returns
    -------
    Axes
        The networks' test loss has Student's 95 % intervals over replicates.

    Raises
    ------
    ValueError
        If ``x`` is neither.
    """
    label = {"clients": "clients C", "n": "samples per client n"}[check.choice("x", x, ("clients", "n"))]
    if isinstance(result, xr.DataTree):
        result = GeneralizationResult.from_datatree(result)
    if not isinstance(result, GeneralizationResult):
        raise refusal("generalization", "the result of fedstat.ntk.generalization, or a store of it", result)
    ax = given(ax, (5, 4))
    names = {
        "bound": "bound",
        "complexity": "complexity term",
        "test": "test loss, network",
        "test_limit": "test loss, infinite width",
        "zero": "test loss of predicting 0",
    }
    table = result.by_setting()
    _lines(table, names, x, ax=ax)
    tests = result.data["test"].transpose("setting", "replicate").to_numpy()
    low, high = np.transpose([interval(values) if np.isfinite(values).all() else (np.nan, np.nan) for values in tests])
    ax.vlines(table[x], low, high, color=ax.get_lines()[list(names).index("test")].get_color(), linewidth=2, alpha=0.5)
    bottom, top = ax.get_ylim()
    ax.axhspan(1, top, color="0.94", linewidth=0, zorder=0)
    ax.set_ylim(bottom, top)
    ax.text(0.98, 1.06, "above 1 a bound says nothing", transform=ax.get_yaxis_transform(), ha="right", va="bottom",
            fontsize="small", color="0.35")  # fmt: skip
    ax.set(xlabel=label, ylabel="loss min(|h − y|, 1), and its bound")
    return ax


def _convergence(result: object, figure: str) -> ConvergenceResult:
    found = ConvergenceResult.from_datatree(result) if isinstance(result, xr.DataTree) else result
    if not isinstance(found, ConvergenceResult):
        raise refusal(figure, "the result of fedstat.ntk.convergence, or a store of it", result)
    return found
