"""Figures of a factor analysis: scree, communalities with the threshold, loadings, stability over rounds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from fedstat.plot._axes import given
from fedstat.results import BootstrapResult, FactorResult, NFactorsResult, SplitResult
from fedstat.stats import split as _split

_SHADES = {"shared": "0.25", "personal": "0.75"}


def scree(result: FactorResult | NFactorsResult, *, ax: Axes | None = None, most: int = 60) -> Axes:
    """Eigenvalues of R with the number of factors that each rule takes.

    Parameters
    ----------
    result : FactorResult or NFactorsResult
        The latter adds parallel analysis (dashed, noise eigenvalues) and the marks of all rules.
    ax : matplotlib Axes, optional
        Where to draw; the current axes if not given.
    most : int
        Leading eigenvalues to draw, more where a rule takes more.

    Returns
    -------
    matplotlib Axes
    """
    ax = given(ax)
    many = isinstance(result, NFactorsResult)
    values = result.curves["eigenvalues"] if isinstance(result, NFactorsResult) else result.eigenvalues
    marks = result.numbers if isinstance(result, NFactorsResult) else {_rule(result): result.n_factors}
    shown = min(len(values), max(most, 2 + max(marks.values())))
    rank = np.arange(1, shown + 1)
    ax.plot(rank, values[:shown], color="0.2", marker=".", linewidth=1, label="eigenvalues of R")
    if isinstance(result, NFactorsResult):
        ax.plot(rank, result.curves["noise_pc"][:shown], color="0.5", linestyle="--", linewidth=1, label="noise")
    ax.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    by_number: dict[int, list[str]] = {}
    for rule, g in marks.items():
        by_number.setdefault(g, []).append(rule)
    for i, (g, rules) in enumerate(sorted(by_number.items())):
        style = ("-", ":", "-.", "--")[i % 4]
        colour = sns.color_palette("colorblind")[i % 10]
        ax.axvline(g + 0.5, color=colour, linestyle=style, linewidth=1.2, label=f"{', '.join(rules)}: {g}")
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue of R")
    ax.legend(frameon=False, fontsize="small", title="number of factors" if many else None)
    return ax


def communality(result: SplitResult | BootstrapResult, *, ax: Axes | None = None, bins: int = 30) -> Axes:
    """Histogram of the communalities with the threshold τ; with a bootstrap, its interval per unit above.

    Of a split by agreement it is the histogram of the ICC.

    Parameters
    ----------
    result : SplitResult or BootstrapResult
    ax : matplotlib Axes, optional
        Where to draw; the current axes if not given.
    bins : int

    Returns
    -------
    matplotlib Axes
    """
    ax = given(ax)
    split = result.split if isinstance(result, BootstrapResult) else result
    by_agreement = split.fit.method == "icc"
    table = split.tidy().query("not dead")
    groups = [g for g in _SHADES if (table["group"] == g).any()]
    sns.histplot(
        table, x="icc" if by_agreement else "h2", hue="group", hue_order=groups, bins=bins, multiple="stack", ax=ax,
        palette=[_SHADES[g] for g in groups], edgecolor="white", linewidth=0.3,
    )  # fmt: skip
    if np.isfinite(split.threshold):
        ax.axvline(split.threshold, color="black", linestyle="--", linewidth=1)
        ax.annotate(
            r" $\tau$", (split.threshold, 0.99), xycoords=("data", "axes fraction"), va="top", annotation_clip=False
        )
    if isinstance(result, BootstrapResult):
        intervals = result.tidy().query("group != 'dead'").sort_values("estimate")
        base = ax.get_ylim()[1]
        height = base * (1.05 + 0.6 * np.arange(len(intervals)) / len(intervals))
        ax.hlines(height, intervals["conf_low"], intervals["conf_high"], color="0.6", linewidth=0.6)
        ax.plot(intervals["estimate"], height, ".", color="black", markersize=2)
        ax.set_ylim(0, 1.7 * base)
    ax.set(xlabel="agreement between clients, ICC2" if by_agreement else r"communality $\nu$", ylabel="units")
    return ax


def loadings(result: FactorResult | SplitResult, *, ax: Axes | None = None, units: int = 60, factors: int = 20) -> Axes:
    """Heat map of the loadings, units from high to low communality.

    Parameters
    ----------
    result : FactorResult or SplitResult
    ax : matplotlib Axes, optional
        Where to draw; the current axes if not given.
    units, factors : int
        Largest numbers to draw; of more units the two ends are kept, of more factors the first.

    Returns
    -------
    matplotlib Axes
    """
    ax = given(ax)
    fit = result.factors if isinstance(result, SplitResult) else result
    order = np.argsort(-np.where(fit.dead, -np.inf, fit.communality), kind="stable")[: int((~fit.dead).sum())]
    note = ""
    if len(order) > units:
        note = f"{units // 2} highest and {units - units // 2} lowest of {len(order)} units"
        order = np.concatenate([order[: units // 2], order[-(units - units // 2) :]])
    g = min(factors, fit.n_factors)
    table = pd.DataFrame(fit.loadings[order, :g], index=fit.units[order], columns=range(1, g + 1))
    limit = float(np.abs(table.to_numpy()).max())
    sns.heatmap(table, ax=ax, cmap="vlag", vmin=-limit, vmax=limit, cbar_kws={"label": "loading"})
    ax.set(xlabel="factor", ylabel="unit, by descending communality", title=note)
    return ax


def rounds(shared: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Agreement of the splits of consecutive rounds (FedFac Fig. 7) and with the last one.

    Parameters
    ----------
    shared : bool array (round, unit)
        Or a DataArray with these dims in this order.
    ax : matplotlib Axes, optional
        Where to draw; the current axes if not given.

    Returns
    -------
    matplotlib Axes
    """
    ax = given(ax)
    splits = np.asarray(shared, dtype=bool)
    if splits.ndim != 2 or len(splits) < 2:
        raise ValueError(f"shared must have shape (round, unit) with at least 2 rounds, but got {splits.shape}")
    t = np.arange(2, len(splits) + 1)
    same = _split.same_state(splits[1:], splits[:-1])
    ari = _split.adjusted_rand(splits[1:], np.broadcast_to(splits[-1], splits[1:].shape))
    ax.plot(t, same, color="0.2", marker=".", label="units that keep their state")
    ax.plot(
        t, ari, color="0.5", linestyle="--", marker="^", markersize=3, label="adjusted Rand index with the last split"
    )
    ax.set(xlabel="round", ylabel="agreement", ylim=(min(0.0, float(ari.min())) - 0.03, 1.03))
    ax.legend(frameon=False)
    return ax


def _rule(result: FactorResult) -> str:
    return "given" if result.kappa is None else rf"$\kappa$ = {result.kappa:g}"
