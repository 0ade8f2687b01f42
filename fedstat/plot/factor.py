"""Plots of factor analyses and splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstat._utils import labels
from fedstat.labelled import split_map as _computed
from fedstat.plot._figure import DEAD, PERSONAL, SHARED, given, name_rows, plain, refusal, split_behind, split_of_run
from fedstat.results import (
    BootstrapResult,
    ByLayer,
    FactorResult,
    IccResult,
    NFactorsResult,
    PermutationResult,
    SplitMapResult,
    StabilityResult,
)
from fedstat.results.base import Result
from fedstat.stats import split as _split

_COLOURS = {"shared": SHARED, "undecided": "0.75", "personal": PERSONAL, "units": "0.5"}
_LABELS = {
    "nu": r"communality $\nu$",
    "ICC2": "agreement between clients, ICC2",
    "personal share": "personal share of the differences between clients",
}


def scree(result: Any, *, ax: Axes | None = None, most: int = 60) -> Axes:
    """Eigenvalues of R with the number of factors that each rule takes.

    Parameters
    ----------
    result : FactorResult, NFactorsResult, or SplitResult, BootstrapResult, PermutationResult or StabilityResult
        An NFactorsResult adds parallel analysis (dashed, noise eigenvalues) and the marks of all rules; of a split and
        of what tells how certain it is, the factor analysis behind it is drawn.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.
    most : int
        Leading eigenvalues to draw, more where a rule takes more.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If ``result`` is something else.
    ValueError
        If the split is by agreement, which has no eigenvalues.
    """
    if isinstance(result, NFactorsResult):
        values, marks = result.curves["eigenvalues"], result.numbers
    else:
        fit = _factors(result, "scree", "NFactorsResult, ")
        values, marks = fit.eigenvalues, {_rule(fit): fit.n_factors}
    many = isinstance(result, NFactorsResult)
    ax = given(ax)
    shown = min(len(values), max(most, 2 + max(marks.values())))
    rank = np.arange(1, shown + 1)
    ax.plot(rank, values[:shown], color="0.2", marker=".", linewidth=1, label="eigenvalues of R")
    if isinstance(result, NFactorsResult):
        noise = result.curves["noise_pc"][:shown]
        ax.plot(rank, noise, color="0.5", linestyle="--", linewidth=1, label="of noise of this size")
    ax.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    by_number: dict[int, list[str]] = {}
    for rule, g in marks.items():
        by_number.setdefault(g, []).append(rule)
    for i, (g, rules) in enumerate(sorted(by_number.items())):
        style = ("-", ":", "-.", "--")[i % 4]
        colour = sns.color_palette("colorblind")[i % 10]
        ax.axvline(g + 0.5, color=colour, linestyle=style, linewidth=1.2, label=f"{', '.join(rules)}: {g}")
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue of R")
    ax.legend(frameon=False, fontsize="small", title="number of factors by rule" if many else "number of factors")
    return ax


class _Units(NamedTuple):
    """What a histogram of units counts: value and group of each unit, their name, and the threshold or NaN."""

    table: pd.DataFrame
    label: str
    threshold: float = np.nan


def communality(result: Any, *, ax: Axes | None = None, bins: int = 30, layer: str | None = None) -> Axes:
    """Histogram of the communalities, shared and personal units apart, with the threshold, at which a bin begins.

    Of a split by agreement it is the histogram of the ICC, of one by a test that of the personal shares (-1 at least),
    in which undecided units stand apart.

    Parameters
    ----------
    result : SplitResult, BootstrapResult, PermutationResult, StabilityResult, FactorResult, IccResult, or a run
        A bootstrap adds the interval of every unit above; a permutation test the histogram that shuffled units have, on
        the same scale. Of a run, or its node ``run["split/fc1"]``, the last round with a split is drawn.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.
    bins : int
    layer : str, optional
        Layer of a run that splits several.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If ``result`` is something else.
    ValueError
        If a run has no split, or several layers and none was named.
    """
    units = _units(result, layer)
    ax = given(ax)
    table = units.table.dropna(subset="value")
    groups = [g for g in _COLOURS if (table["group"] == g).any()]
    null = result.communality[~np.isnan(result.communality)] if isinstance(result, PermutationResult) else None
    drawn = table["value"].to_numpy() if null is None else np.concatenate([table["value"], null])
    edges = bin_edges(drawn, units.threshold, bins)
    if groups:  # else all units are dead
        sns.histplot(
            table, x="value", hue="group", hue_order=groups, bins=edges.tolist(), multiple="stack", ax=ax, alpha=1,
            palette=[_COLOURS[g] for g in groups], edgecolor="white", linewidth=0.3, legend=groups != ["units"],
        )  # fmt: skip
    if legend := ax.get_legend():
        legend.set(title=None, frame_on=False)
    if null is not None:
        expected = np.histogram(null, edges)[0] * len(table) / len(null)
        outline = ax.stairs(expected, edges, color="black", linewidth=1.2)
        handles = [*(h for h in (legend.legend_handles if legend else []) if h is not None), outline]
        names = [*(t.get_text() for t in legend.get_texts())] if legend else []
        ax.legend(
            handles, [*names, "expected if units are shuffled within clients"], frameon=False, loc="lower left",
            bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=3, columnspacing=1,
        )  # fmt: skip
    if np.isfinite(units.threshold):
        ax.axvline(units.threshold, color="black", linestyle="--", linewidth=1)
        ax.annotate(
            " threshold", (units.threshold, 0.99), xycoords=("data", "axes fraction"), va="top", annotation_clip=False
        )
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    label = units.label
    if isinstance(result, BootstrapResult):
        _intervals(ax, result)
        label += f"\n{result.interval_label}"
    ax.set(xlabel=label, ylabel="units")
    return ax


def bin_edges(values: NDArray[Any], threshold: float, bins: int = 30) -> NDArray[Any]:
    """Edges of a histogram's bins of equal width, moved so that the threshold, if it is among them, is an edge.

    Examples
    --------
    >>> bin_edges(np.array([0.0, 1.0]), 0.3, 2).tolist()
    [-0.2, 0.3, 0.8, 1.3]
    """
    edges = np.histogram_bin_edges(values, bins)
    if not edges[0] < threshold <= edges[-1]:
        return edges
    width = edges[1] - edges[0]
    below, above = (int(np.ceil(reach / width)) for reach in (threshold - edges[0], edges[-1] - threshold))
    return threshold + width * np.arange(-below, max(above, 1) + 1)


def _intervals(ax: Axes, result: BootstrapResult) -> None:
    """Interval of every unit above a histogram, from low to high."""
    table = result.tidy().query("group != 'dead'").sort_values("estimate")
    base = ax.get_ylim()[1]
    height = base * (1.05 + 0.6 * np.arange(len(table)) / len(table))
    ax.hlines(height, table["conf_low"], table["conf_high"], color="0.6", linewidth=0.6)
    ax.plot(table["estimate"], height, ".", color="black", markersize=2)
    ax.set_ylim(0, 1.7 * base)
    ax.set_yticks([t for t in ax.get_yticks() if 0 <= t <= base])


def _units(result: object, layer: str | None) -> _Units:
    if isinstance(result, xr.DataTree | xr.Dataset):
        return _last_split(result, layer)
    if isinstance(result, FactorResult | IccResult):
        return _Units(pd.DataFrame({"value": result.statistic, "group": "units"}), _LABELS[result.statistic_name])
    split = split_behind(result)
    if split is None:
        takes = "a SplitResult, BootstrapResult, PermutationResult, StabilityResult, FactorResult, IccResult or a run"
        raise refusal("communality", takes, result, "fedstat.split(weights) gives the first of these.")
    table = pd.DataFrame({"value": split.statistic, "group": split.group})
    if split.outcome is not None:
        table = table.assign(value=table["value"].clip(lower=-1), group=split.outcome)
    return _Units(table, _LABELS[split.fit.statistic_name], split.threshold)


def _last_split(run: xr.DataTree | xr.Dataset, layer: str | None) -> _Units:
    data = split_of_run(run, layer) if isinstance(run, xr.DataTree) else run
    if missing := [name for name in ("communality", "shared") if name not in data]:
        raise ValueError(f"the run's split must hold communality and shared, but lacks {', '.join(missing)}")
    name, label = "communality", _LABELS["nu"]
    if not data["communality"].notnull().any() and "icc" in data:
        name, label = "icc", _LABELS["ICC2"]
    if "round" in data.dims and set(data[name].dims) == {"round", "unit"}:
        done = np.flatnonzero(data[name].notnull().any("unit"))
        data = data.isel(round=int(done[-1]) if len(done) else -1)
        label += f" in round {int(data['round'])}"
    if data[name].dims != ("unit",):
        raise ValueError(f"the split must have the dims round and unit, but got {data[name].dims}. Select one setting.")
    group = np.where(data["shared"], "shared", "personal")
    if "decided" in data:
        group = np.where(data["decided"], group, "undecided")
    return _Units(pd.DataFrame({"value": data[name].to_numpy(), "group": group}), label)


def loadings(result: Any, *, ax: Axes | None = None, units: int = 60, factors: int = 20) -> Axes:
    """Heat map of the loadings, units from high to low communality.

    Parameters
    ----------
    result : FactorResult, or SplitResult, BootstrapResult, PermutationResult or StabilityResult
        Of a split, and of what tells how certain it is, the factor analysis behind it is drawn.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.
    units, factors : int
        Largest numbers to draw; of more units the two ends are kept, of more factors the first.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If ``result`` is something else.
    ValueError
        If the split is by agreement, which has no loadings.
    """
    fit = _factors(result, "loadings")
    order = np.argsort(-np.where(fit.dead, -np.inf, fit.communality), kind="stable")[: int((~fit.dead).sum())]
    note = ""
    if len(order) > units:
        note = f"{units // 2} highest and {units - units // 2} lowest of {len(order)} units"
        order = np.concatenate([order[: units // 2], order[-(units - units // 2) :]])
    g = min(factors, fit.n_factors)
    table = pd.DataFrame(fit.loadings[order, :g], index=fit.units[order], columns=range(1, g + 1))
    limit = float(np.abs(table.to_numpy()).max())
    ax = given(ax, (min(2.8 + 0.3 * g, 9.0), float(np.clip(1.2 + 0.16 * len(table), 3.0, 12.0))))
    sns.heatmap(
        table, ax=ax, cmap="vlag", vmin=-limit, vmax=limit, cbar_kws={"label": "loading"}, yticklabels=False
    )  # fmt: skip
    name_rows(ax, (np.arange(len(table)) + 0.5).tolist(), table.index, height=len(table))
    more = f"; first {g} of {fit.n_factors} factors" if g < fit.n_factors else ""
    ax.set(xlabel="factor", ylabel="unit, by descending communality", title=(note + more).lstrip("; "))
    return ax


def rounds(shared: Any, *, ax: Axes | None = None, layer: str | None = None) -> Axes:
    """Agreement of the splits of consecutive rounds (FedFac Fig. 7) and with the last one.

    Parameters
    ----------
    shared : bool array or DataFrame (round, unit), DataArray with these dims, or a run
        Or a run's node ``run["split/fc1"]``.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.
    layer : str, optional
        Layer of a run that splits several.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If there are no splits of at least 2 rounds.
    """
    splits, at = _splits(shared, layer)
    ax = given(ax)
    same = _split.same_state(splits[1:], splits[:-1])
    ari = _split.adjusted_rand(splits[1:], np.broadcast_to(splits[-1], splits[1:].shape))
    ax.plot(at[1:], same, color="0.2", marker=".", label="units that keep their state")
    ax.plot(
        at[1:], ari, color="0.5", linestyle="--", marker="^", markersize=3,
        label="adjusted Rand index with the last split",
    )  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="round", ylabel="agreement", ylim=(min(0.0, float(ari.min())) - 0.03, 1.03))
    ax.legend(frameon=False)
    return ax


def _splits(shared: Any, layer: str | None) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Splits (round, unit) and the numbers of the rounds."""
    if isinstance(shared, Result | ByLayer):
        raise refusal("rounds", "splits (round, unit) of bool, or a run with such splits", shared)
    shared = labels.labelled(shared, ("round", "unit"))
    if isinstance(shared, xr.DataTree):
        shared = split_of_run(shared, layer)
    if isinstance(shared, xr.Dataset) and "shared" in shared:
        shared = shared["shared"]
    at = None
    if isinstance(shared, xr.DataArray):
        if set(shared.dims) == {"round", "unit"}:
            shared = shared.transpose("round", "unit")
        at = shared["round"].to_numpy() if "round" in shared.coords else None
    splits = np.asarray(shared)
    if splits.ndim != 2 or len(splits) < 2:
        raise ValueError(f"shared must have shape (round, unit) with at least 2 rounds, but got {splits.shape}")
    return splits.astype(bool), np.arange(1, len(splits) + 1) if at is None else at


def _factors(result: object, figure: str, others: str = "") -> FactorResult:
    """The factor analysis that a result is, or that stands behind its split."""
    if isinstance(result, FactorResult):
        return result
    split = split_behind(result)
    if split is None:
        takes = f"a FactorResult, {others}SplitResult, BootstrapResult, PermutationResult or StabilityResult"
        raise refusal(figure, takes, result, "fedstat.fa(rows) and fedstat.split(weights) give the first of these.")
    return split.factors


def _rule(result: FactorResult) -> str:
    return "given" if result.kappa is None else rf"$\kappa$ = {result.kappa:g}"


def split_map(result: Any, *, ax: Axes | None = None, **options: Any) -> Axes:
    """Heat map of the labels shared and personal: units against analyses, κ by κ within each estimator.

    Parameters
    ----------
    result : SplitMapResult, or weights
        What :func:`fedstat.split_map` returns of one layer, or weights that it takes.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.
    **options
        With weights: arguments of :func:`fedstat.split_map`, such as ``kappas`` or, of a run, ``layer``.

    Returns
    -------
    matplotlib Axes
        Units that more analyses share stand above; those that are the same colour throughout do not depend on the
        analyst. A star marks an analysis that did not converge.

    Raises
    ------
    TypeError
        If the result is another one, or of several layers; or there are options with a result.
    """
    if not isinstance(result, SplitMapResult):
        if not isinstance(result, Result | pd.DataFrame | ByLayer):
            result = _computed(result, **options)
        if not isinstance(result, SplitMapResult):
            raise refusal("split_map", "the result of split_map, or weights of one layer", result)
    elif options:
        raise TypeError(f"{', '.join(options)} can be chosen with weights only: fedstat.split_map(weights, ...)")
    state = np.where(result.shared, 2, np.where(result.dead, 0, 1))
    order = np.lexsort((*~result.shared[::-1], -result.p_shared, result.dead))  # equal rows together
    n_units, n = len(order), len(state)
    ax = given(ax, (min(2.6 + 0.36 * n, 14.0), float(np.clip(1.9 + 0.17 * n_units, 3.2, 13.0))))
    colours = [DEAD, PERSONAL, SHARED]
    ax.imshow(state[:, order].T, cmap=ListedColormap(colours), vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    table = result.analyses
    star = np.where(table["converged"], "", "*")
    ticks = [f"{k:g}{s}" if np.isfinite(k) else "–" for k, s in zip(table["kappa"], star, strict=True)]
    ax.set_xticks(range(n), ticks, rotation=90 if n > 8 else 0, fontsize="small")
    ends = np.flatnonzero((table["method"] != table["method"].shift()).to_numpy())
    for start, end in zip(ends, [*ends[1:], n], strict=True):
        if start:
            ax.axvline(start - 0.5, color="white", linewidth=4)
        ax.annotate(
            table["method"].iloc[start], ((start + end - 1) / 2, 1), (0, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", fontsize="medium",
        )  # fmt: skip
    for edge in range(1, n_units if n_units <= 60 else 0):
        ax.axhline(edge - 0.5, color="white", linewidth=0.6)
    name_rows(ax, range(n_units), result.units[order], height=n_units)
    seen = [(2, "shared"), (1, "personal"), (0, "dead: no variance")]
    ax.legend(
        handles=[Patch(color=colours[i], label=name) for i, name in seen if (state == i).any()], frameon=False,
        loc="center left", bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip
    star_note = "" if table["converged"].all() else "; * not converged"
    ax.set(xlabel=rf"$\kappa$ ($\tau$ = {plain(result.tau)}){star_note}", ylabel="unit")
    return ax


def variants(result: StabilityResult, *, ax: Axes | None = None) -> Axes:
    """How like the reference the split is under every other choice: adjusted Rand index, and units of the same state.

    Parameters
    ----------
    result : StabilityResult
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        At 1 a choice makes no difference; an adjusted Rand index of 0 is what two random splits have. It does not ask
        which half is called shared: a high index with few units that keep their state is the split turned around.
    """
    table = result.tidy()
    new = (table["varied"] != table["varied"].shift()).to_numpy()
    y = np.arange(len(table)) + 0.6 * (np.cumsum(new) - 1)
    ax = given(ax, (6.4, 1.5 + 0.22 * (y[-1] + 1)))
    for at in (0, 1):
        ax.axvline(at, color="0.7", linewidth=0.8, zorder=0)
    ax.hlines(y, table[["adjusted_rand", "same_state"]].min(axis=1), 1, color="0.88", linewidth=1, zorder=1)
    ax.scatter(
        table["same_state"], y, s=34, marker="D", facecolor="white", edgecolor=PERSONAL, linewidth=1.6, zorder=3,
        label="share of units that keep their state",
    )  # fmt: skip
    ax.scatter(table["adjusted_rand"], y, s=22, color=SHARED, zorder=4, label="adjusted Rand index")
    star = np.where(table["converged"], "", " *")
    names = [f"{x.varied} {x.value}{s}" for x, s in zip(table.itertuples(), star, strict=True)]
    low = min(0.0, float(table["adjusted_rand"].min()))
    split = result.reference
    kappa = rf", $\kappa$ = {split.factors.kappa:g}" if split.factors.kappa is not None else ""
    about = rf"{split.fit.method}{kappa}, $\tau$ = {plain(split.tau)}"
    note = "" if table["converged"].all() else "; * not converged"
    ax.set(xlabel=f"agreement with the reference ({about}){note}", xlim=(low - 0.05, 1.05))
    ax.set_ylim(y[-1] + 0.8, -0.8)
    name_rows(ax, list(y), names, height=y[-1] + 1.6)
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return ax
