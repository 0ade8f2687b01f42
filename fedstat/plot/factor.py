"""Plots of factor analyses and splits."""

from __future__ import annotations

from functools import partial
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

from fedstat.labelled import split_map as _split_map
from fedstat.plot._figure import (
    CONSTANT,
    PERSONAL,
    SHARED,
    draw_layers,
    fill,
    get_axes,
    gray,
    legend_above,
    name_ticks,
    opened,
    plain,
    refusal,
    sole,
    split_behind,
    split_of_run,
)
from fedstat.results import (
    BootstrapResult,
    FactorResult,
    IccResult,
    JackknifeResult,
    LayerResults,
    NFactorsResult,
    PermutationResult,
    SensitivityResult,
    SplitMapResult,
    StoredSplitResult,
)
from fedstat.results.base import Result

_COLOURS = {"shared": SHARED, "inconclusive": "0.75", "personal": PERSONAL, "units": "0.5"}
_LABELS = {
    "nu": r"communality $\nu$",
    "ICC2": "agreement of clients, ICC2",
    "reliability": "reliability of client differences",
    "probability": "posterior probability that a unit is shared",
}


def scree(result: Any, *, ax: Axes | None = None, most: int = 60) -> Axes:
    """Draw the eigenvalues of R with the number of factors by each rule.

    Parameters
    ----------
    result : FactorResult, NFactorsResult, or SplitResult, BootstrapResult, JackknifeResult, PermutationResult or
        SensitivityResult
        An NFactorsResult adds parallel analysis (dashed: eigenvalues of random data) and the numbers by all rules. A
        split, or a result about its uncertainty, stands for its factor analysis.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.
    most : int
        Number of leading eigenvalues to draw; more if a rule takes more factors.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If ``result`` is of another type.
    ValueError
        If the split is by agreement, which has no eigenvalues.
    """
    if isinstance(result := sole(opened(result)), NFactorsResult):
        values, marks = result.curves["eigenvalues"], result.numbers_by_name()
    else:
        fit = _factors(result, "scree", "NFactorsResult, ")
        values, marks = fit.eigenvalues, {_rule(fit): fit.n_factors}
    has_rules = isinstance(result, NFactorsResult)
    ax = get_axes(ax)
    shown = min(len(values), max(most, 2 + max(marks.values())))
    rank = np.arange(1, shown + 1)
    ax.plot(rank, values[:shown], color=gray(0.2), marker=".", linewidth=1, label="eigenvalues of R")
    if isinstance(result, NFactorsResult):
        noise = result.curves["noise_pc"][:shown]
        ax.plot(rank, noise, color=gray(0.5), linestyle="--", linewidth=1, label="random data")
    ax.axhline(1, color=gray(0.7), linewidth=0.8, zorder=0)
    by_number: dict[int, list[str]] = {}
    for rule, g in marks.items():
        by_number.setdefault(g, []).append(rule)
    for i, (g, rules) in enumerate(sorted(by_number.items())):
        style = ("-", ":", "-.", "--")[i % 4]
        colour = sns.color_palette("colorblind")[i % 10]
        ax.axvline(g + 0.5, color=colour, linestyle=style, linewidth=1.2, label=f"{'; '.join(rules)}: {g}")
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue of R")
    title = "number of factors by rule" if has_rules else "number of factors"
    ax.legend(fontsize="small", title=title, edgecolor="none", framealpha=0.9)  # hides the lines behind it
    return ax


class _Units(NamedTuple):
    """Value and group of each unit, the name of the values, and the threshold or NaN."""

    table: pd.DataFrame
    label: str
    threshold: float = np.nan


def communality(result: Any, *, ax: Axes | None = None, bins: int = 30, layer: str | None = None) -> Axes:
    """Draw a histogram of the communality by group, with the threshold of the split.

    The histogram of a split by agreement shows the ICC. That of a split by a test shows the reliability of client
    differences (values below -1 as -1), with inconclusive units as a third group. The threshold is an edge of a bin.

    Parameters
    ----------
    result : SplitResult, BootstrapResult, JackknifeResult, PermutationResult, SensitivityResult, FactorResult,
        IccResult, or a run
        A bootstrap adds the interval of each unit above, a jackknife one standard error either side; a permutation
        test adds the histogram expected under H0, scaled to the number of units. A run, or its node
        ``run["split/fc1"]``, stands for its last round with a split; a StoredSplitResult for its round. Results of
        several layers are drawn side by side on one scale.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure. None for several layers.
    bins : int
        Number of bins; a threshold between two edges may add one.
    layer : str, optional
        Layer of a run; required if the run splits several layers.

    Returns
    -------
    matplotlib Axes
        Of several layers the first, whose ``.figure.axes`` are all.

    Raises
    ------
    TypeError
        If ``result`` is of another type.
    ValueError
        If a run has no split, or has several split layers and ``layer`` is None; or if ``ax`` is given for several
        layers.
    """

    def prepare(of_layer: object) -> tuple[object, _Units]:
        return of_layer, _units(of_layer, layer)

    draw = partial(_draw_histogram, bins=bins)
    return draw_layers("communality", sole(opened(result)), prepare, draw, lambda _: 4.0, ax)


def _draw_histogram(prepared: tuple[object, _Units], ax: Axes | None, *, bins: int) -> Axes:
    """Draw the histogram of one layer, and above it what its result says of each unit."""
    result, units = prepared
    ax = get_axes(ax)
    table = units.table.dropna(subset="value")
    groups = [g for g in _COLOURS if (table["group"] == g).any()]
    null = result.communality[~np.isnan(result.communality)] if isinstance(result, PermutationResult) else None
    values = table["value"].to_numpy() if null is None else np.concatenate([table["value"], null])
    edges = bin_edges(values, units.threshold, bins)
    if groups:  # else all units are constant
        sns.histplot(
            table, x="value", hue="group", hue_order=groups, bins=edges.tolist(), multiple="stack", ax=ax, alpha=1,
            palette=[_COLOURS[g] for g in groups], edgecolor=gray(1), linewidth=0.3, legend=groups != ["units"],
        )  # fmt: skip
    legend = ax.get_legend()
    handles = [handle for handle in (legend.legend_handles if legend else []) if handle is not None]
    names = [text.get_text() for text in legend.get_texts()] if legend else []
    if null is not None:
        expected = np.histogram(null, edges)[0] * len(table) / len(null)
        handles.append(ax.stairs(expected, edges, color=gray(0), linewidth=1.2))
        names.append("units permuted within clients")
    if handles:
        legend_above(ax, handles, names)
    if np.isfinite(units.threshold):
        ax.axvline(units.threshold, color=gray(0), linestyle="--", linewidth=1)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    label = units.label
    if isinstance(result, BootstrapResult):
        _draw_above(ax, result.tidy())
        label += f"\n{result.interval_label}"
    if isinstance(result, JackknifeResult):
        table = result.tidy()
        limits = {
            "conf_low": table["estimate"] - table["std_error"],
            "conf_high": table["estimate"] + table["std_error"],
        }
        _draw_above(ax, table.assign(**limits))
        label += "\nlines: one standard error either side (jackknife over clients)"
    if np.isfinite(units.threshold):
        low, high = ax.get_xlim()
        is_left = units.threshold < 0.75 * low + 0.25 * high  # the name, else left of the line, would cross the frame
        ax.annotate(
            "threshold", (units.threshold, 0.99), (4 if is_left else -4, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="left" if is_left else "right", va="top", annotation_clip=False,
        )  # fmt: skip
    ax.set(xlabel=fill(label, ax), ylabel="units")
    return ax


def bin_edges(values: NDArray[Any], threshold: float, bins: int = 30) -> NDArray[Any]:
    """Return edges of bins of equal width; a threshold within their range is an edge.

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


def _draw_above(ax: Axes, table: pd.DataFrame) -> None:
    """Draw a line from ``conf_low`` to ``conf_high`` of each unit above the histogram, units by ascending estimate."""
    table = table.query("group != 'constant'").sort_values("estimate")
    base = ax.get_ylim()[1]
    height = base * (1.05 + 0.6 * np.arange(len(table)) / len(table))
    ax.hlines(height, table["conf_low"], table["conf_high"], color=gray(0.6), linewidth=0.6)
    ax.plot(table["estimate"], height, ".", color=gray(0), markersize=2)
    ax.set_ylim(0, 1.7 * base)
    ax.set_yticks([t for t in ax.get_yticks() if 0 <= t <= base])


def _units(result: object, layer: str | None) -> _Units:
    """Return the units of a result, or of the last split of a run."""
    if isinstance(result, xr.DataTree | xr.Dataset):
        return _last_split(result, layer)
    if isinstance(result, FactorResult | IccResult):
        return _Units(pd.DataFrame({"value": result.statistic, "group": "units"}), _LABELS[result.statistic_name])
    if isinstance(result, StoredSplitResult):
        if result.statistic_name is None:
            raise ValueError(f"the split must rest on communality or agreement, but {result.algorithm} set it.")
        group = result.group if result.conclusion is None else result.conclusion
        label = f"{_LABELS[result.statistic_name]} in round {result.round}"
        return _Units(pd.DataFrame({"value": result.statistic, "group": group}), label)
    split = split_behind(result)
    if split is None:
        takes = (
            "a SplitResult, BootstrapResult, JackknifeResult, PermutationResult, SensitivityResult, FactorResult, "
            "IccResult or a run"
        )
        raise refusal("communality", takes, result, "Pass fedstat.split(weights), for example.")
    table = pd.DataFrame({"value": split.statistic, "group": split.group})
    if split.conclusion is not None:
        table = table.assign(value=table["value"].clip(lower=-1), group=split.conclusion)
    return _Units(table, _LABELS[split.fit.statistic_name], split.threshold)


def _last_split(run: xr.DataTree | xr.Dataset, layer: str | None) -> _Units:
    """Return the units of the last split of a run."""
    data = split_of_run(run, layer) if isinstance(run, xr.DataTree) else run
    if missing := [name for name in ("communality", "shared") if name not in data]:
        raise ValueError(f"the run's split must hold communality and shared, but lacks {', '.join(missing)}.")
    name, label = "communality", _LABELS["nu"]
    if not data["communality"].notnull().any() and "icc" in data:
        name, label = "icc", _LABELS["ICC2"]
    if "round" in data.dims and set(data[name].dims) == {"round", "unit"}:
        with_split = np.flatnonzero(data[name].notnull().any("unit"))
        data = data.isel(round=int(with_split[-1]) if len(with_split) else -1)
        label += f" in round {int(data['round'])}"
    if data[name].dims != ("unit",):
        raise ValueError(f"the split must have the dims round and unit, but got {data[name].dims}. Select one setting.")
    group = np.where(data["shared"], "shared", "personal")
    if "decided" in data:
        group = np.where(data["decided"], group, "inconclusive")
    return _Units(pd.DataFrame({"value": data[name].to_numpy(), "group": group}), label)


def loadings(result: Any, *, ax: Axes | None = None, units: int = 60, factors: int = 20) -> Axes:
    """Draw a heat map of the loadings, units from high to low communality.

    Parameters
    ----------
    result : FactorResult, or SplitResult, BootstrapResult, JackknifeResult, PermutationResult or SensitivityResult
        A split, or a result about its uncertainty, stands for its factor analysis.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.
    units, factors : int
        Largest numbers to draw. Of more units, the highest and lowest communalities are drawn; of more factors, the
        first.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    TypeError
        If ``result`` is of another type.
    ValueError
        If the split is by agreement, which has no loadings.
    """
    fit = _factors(result, "loadings")
    order = np.argsort(-np.where(fit.constant, -np.inf, fit.communality), kind="stable")[: int((~fit.constant).sum())]
    note = ""
    if len(order) > units:
        note = f"{units // 2} highest and {units - units // 2} lowest of {len(order)} units"
        order = np.concatenate([order[: units // 2], order[-(units - units // 2) :]])
    g = min(factors, fit.n_factors)
    table = pd.DataFrame(fit.loadings[order, :g], index=fit.units[order], columns=range(1, g + 1))
    limit = float(np.abs(table.to_numpy()).max())
    ax = get_axes(ax, (min(2.8 + 0.3 * g, 9.0), float(np.clip(1.2 + 0.16 * len(table), 3.0, 12.0))))
    sns.heatmap(
        table, ax=ax, cmap="vlag", vmin=-limit, vmax=limit, cbar_kws={"label": "loading"}, xticklabels=False,
        yticklabels=False,
    )  # fmt: skip
    name_ticks(ax.xaxis, (np.arange(g) + 0.5).tolist(), table.columns)
    name_ticks(ax.yaxis, (np.arange(len(table)) + 0.5).tolist(), table.index)
    factor_note = f"; first {g} of {fit.n_factors} factors" if g < fit.n_factors else ""
    ax.set(xlabel="factor", ylabel="unit, by descending communality", title=(note + factor_note).lstrip("; "))
    return ax


def _factors(result: object, figure: str, also: str = "") -> FactorResult:
    """Return the factor analysis of a result or of its split; ``also`` names further types that the figure takes."""
    result = sole(opened(result))
    if isinstance(result, FactorResult):
        return result
    split = split_behind(result)
    if split is None:
        takes = (
            f"a FactorResult, {also}SplitResult, BootstrapResult, JackknifeResult, PermutationResult or "
            "SensitivityResult"
        )
        raise refusal(figure, takes, result, "Pass fedstat.split(weights), for example.")
    return split.factors


def _rule(result: FactorResult) -> str:
    """Return the name of the rule that set the number of factors."""
    return "n_factors" if result.kappa is None else rf"$\kappa$ = {result.kappa:g}"


def split_map(result: Any, *, ax: Axes | None = None, **options: Any) -> Axes:
    """Draw the groups of units under several specifications: methods, and κ within each method.

    Parameters
    ----------
    result : SplitMapResult, or weights
        Result of :func:`fedstat.split_map` for one layer, or the weights of a layer.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.
    **options
        Arguments of :func:`fedstat.split_map`, if ``result`` holds weights; such as ``kappas`` or, for a run,
        ``layer`` and ``stage``.

    Returns
    -------
    matplotlib Axes
        Units shared in more specifications stand above. A unit whose row has one color is in the same group in all
        specifications. A star marks a specification that did not converge.

    Raises
    ------
    TypeError
        If ``result`` is another result or one of several layers, or a result comes with options.
    """
    if not isinstance(result := sole(opened(result, or_weights=True)), SplitMapResult):
        if not isinstance(result, Result | pd.DataFrame | LayerResults):
            result = sole(_split_map(result, **options))
        if not isinstance(result, SplitMapResult):
            raise refusal("split_map", "the result of split_map, or weights of one layer", result)
    elif options:
        raise TypeError(f"options {', '.join(options)} need weights, but got a result. Pass them to fedstat.split_map.")
    group = np.where(result.shared, 2, np.where(result.constant, 0, 1))
    order = np.lexsort((*~result.shared[::-1], -result.prop_shared, result.constant))  # equal rows together
    n_units, n = len(order), len(group)
    ax = get_axes(ax, (min(2.6 + 0.36 * n, 14.0), float(np.clip(1.9 + 0.17 * n_units, 3.2, 13.0))))
    colours = [CONSTANT, PERSONAL, SHARED]
    ax.imshow(group[:, order].T, cmap=ListedColormap(colours), vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    table = result.analyses
    star = np.where(table["converged"], "", "*")
    ticks = [f"{k:g}{s}" if np.isfinite(k) else "–" for k, s in zip(table["kappa"], star, strict=True)]
    name_ticks(ax.xaxis, range(n), ticks)
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
    name_ticks(ax.yaxis, range(n_units), result.units[order])
    names = [(2, "shared"), (1, "personal"), (0, "constant")]
    ax.legend(
        handles=[Patch(color=colours[i], label=name) for i, name in names if (group == i).any()], frameon=False,
        loc="center left", bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip
    star_note = "" if table["converged"].all() else "; * not converged"
    ax.set(xlabel=rf"$\kappa$ ($\tau$ = {plain(result.tau)}){star_note}", ylabel="unit")
    return ax


def sensitivity(result: SensitivityResult, *, ax: Axes | None = None) -> Axes:
    """Draw the similarity of splits under other analysis choices to the reference split.

    Parameters
    ----------
    result : SensitivityResult
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Diamonds are the proportion of units in the same group, points the adjusted Rand index: 1 if the splits are
        identical, 0 by chance. The index ignores the names of the groups: if it is 1 and the proportion 0, the groups
        are swapped.

    Raises
    ------
    TypeError
        If ``result`` is something else.
    """
    if not isinstance(result := sole(opened(result)), SensitivityResult):
        raise refusal("sensitivity", "the result of fedstat.sensitivity", result)
    table = result.tidy()
    new = (table["varied"] != table["varied"].shift()).to_numpy()
    y = np.arange(len(table)) + 0.6 * (np.cumsum(new) - 1)
    ax = get_axes(ax, (6.4, 1.5 + 0.22 * (y[-1] + 1)))
    for x in (0, 1):
        ax.axvline(x, color=gray(0.7), linewidth=0.8, zorder=0)
    ax.hlines(y, table[["ari", "prop_unchanged"]].min(axis=1), 1, color=gray(0.88), linewidth=1, zorder=1)
    ax.scatter(
        table["prop_unchanged"], y, s=34, marker="D", facecolor=gray(1), edgecolor=PERSONAL, linewidth=1.6, zorder=3,
        label="proportion of units in the same group",
    )  # fmt: skip
    ax.scatter(table["ari"], y, s=22, color=SHARED, zorder=4, label="adjusted Rand index")
    star = np.where(table["converged"], "", " *")
    names = [f"{x.varied} {x.value}{s}" for x, s in zip(table.itertuples(), star, strict=True)]
    low = min(0.0, float(table["ari"].min()))
    split = result.reference
    kappa = rf", $\kappa$ = {split.factors.kappa:g}" if split.factors.kappa is not None else ""
    reference = rf"{split.fit.method}{kappa}, $\tau$ = {plain(split.tau)}"
    note = "" if table["converged"].all() else "; * not converged"
    ax.set(xlabel=f"similarity to the reference split\n{reference}{note}", xlim=(low - 0.05, 1.05))
    ax.set_ylim(y[-1] + 0.8, -0.8)
    name_ticks(ax.yaxis, y.tolist(), names)
    legend_above(ax, *ax.get_legend_handles_labels())
    return ax
