"""Plots of the simulation study and of recovery over κ.

Markers and line styles differ as well as colors, so that every figure can be read in grayscale.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from fedstat._utils import check
from fedstat.plot._figure import PERSONAL as _PERSONAL
from fedstat.plot._figure import SHARED as _SHARED
from fedstat.plot._figure import (
    RunOrPath,
    get_axes,
    gray,
    interval,
    interval_of_proportion,
    opened,
    refusal,
    sequential_colors,
)
from fedstat.plot._styles import ordered, style_of, styles_of, title_of
from fedstat.sim import experiment
from fedstat.stats import resampling

SYMBOL = {"p": "$p$", "alpha": r"$\alpha$", "kappa": r"$\kappa$"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_AGREEMENT = "icc"
_REFERENCE: dict[str, Any] = {"color": "0.6", "linewidth": 0.8, "zorder": 0}


def recovery(result: xr.Dataset | RunOrPath, *, ax: Axes | None = None) -> Axes:
    """Draw the AUC of communality for shared units against κ, one line per method.

    Agreement of clients (``"icc"``), which has no κ, is a horizontal line. Bars and the band are ± one standard error
    over replicates, cut off at 0 and 1.

    Parameters
    ----------
    result : xarray.Dataset
        Result of :func:`fedstat.sim.recover` with ``auc`` (kappa, method, replicate), and with p and alpha selected
        (or of length 1).
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If the result has more than one p or alpha.
    """
    result = require_figure(result, "recovery", "auc", "fedstat.sim.recover")
    setting, ax = one_setting(result, "p", "alpha"), get_axes(ax)
    of_nu = result["auc"].sel({"method": result["method"] != _AGREEMENT})
    names, data = list(of_nu["method"].values), _long(of_nu)
    ax.axhline(0.5, **_REFERENCE)
    if names:
        sns.lineplot(
            data, x="kappa", y="auc", hue="method", style="method", hue_order=names, style_order=names, ax=ax,
            palette=sequential_colors("viridis", len(names)), markers=_markers(len(names)), markersize=5,
            errorbar=_within_one_se, err_style="bars", err_kws={"capsize": 2, "elinewidth": 1},
        )  # fmt: skip
    if _AGREEMENT in result["method"].values:
        auc = result["auc"].sel({"method": _AGREEMENT}).isel(kappa=0).to_numpy().ravel()
        if np.isfinite(band := _within_one_se(auc)).all():
            ax.axhspan(*band, color=gray(0.85), linewidth=0, zorder=0)
        ax.axhline(
            auc.mean(), color=gray(0.1), linestyle=(0, (7, 2, 1, 2)), linewidth=1.2, zorder=1,
            label=r"icc (no $\kappa$)",
        )  # fmt: skip
    ax.set(xlabel=SYMBOL["kappa"], ylabel="AUC for shared units", title=setting, xlim=(0, 1.02), ylim=(-0.03, 1.03))
    ax.legend(title="method", frameon=False)
    return ax


def _within_one_se(auc: ArrayLike) -> tuple[float, float]:
    """Return the mean minus and plus one standard error, cut off at 0 and 1; NaN if the values are equal."""
    estimate = resampling.mean(auc)
    low, high = np.clip(estimate.mean + estimate.std_error * np.array([-1, 1]), 0, 1)
    return float(low), float(high)


def recovery_grid(result: xr.Dataset | RunOrPath) -> Figure:
    """Draw :func:`recovery` for every p (columns) and alpha (rows), with one legend.

    Parameters
    ----------
    result : xarray.Dataset, or path of its store
        Result of :func:`fedstat.sim.recover`.

    Returns
    -------
    matplotlib Figure
    """
    result = require_figure(result, "recovery_grid", "auc", "fedstat.sim.recover")
    rows, columns = result.sizes["alpha"], result.sizes["p"]
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.6 * columns + 0.6, 3.2 * rows), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for i in range(rows):
        for j in range(columns):
            recovery(result.isel(alpha=[i], p=[j]), ax=axes[i, j]).label_outer()
            axes[i, j].get_legend().remove()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="method", frameon=False, loc="outside right center")
    return figure


def accuracy(result: xr.Dataset | RunOrPath, *, relative_to: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the test accuracy under each splitting rule, side by side for every p or α (FedFac Fig. 6).

    Parameters
    ----------
    result : xarray.Dataset, or a run of fedstat.sim.study, or its path
        ``accuracy`` (p, alpha, method, replicate), where p or alpha has length 1; the other is on the x axis.
    relative_to : str, optional
        Reference method, for example "true": draw the differences from it within replicates. Accuracy varies more
        between replicates than between methods, so intervals of differences compare methods, intervals of accuracies do
        not.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Points are means over replicates, bars 95% t intervals of the mean, cut off at 0 and 1 unless they are of
        differences; methods keep the order of all figures.

    Raises
    ------
    ValueError
        If both p and alpha vary, or ``relative_to`` is not among the methods.
    """
    result = _of_study(result, "accuracy", "accuracy")
    x, fixed = ("alpha", "p") if result.sizes.get("alpha", 1) > 1 else ("p", "alpha")
    setting = one_setting(result, fixed)
    names, values, label = ordered(result["method"].values), result["accuracy"], "test accuracy"
    if relative_to is not None:
        check.choice("relative_to", relative_to, names)
        # A dict, because the keyword ``method`` of sel names an interpolation, not a dimension.
        values = values - values.sel({"method": relative_to}, drop=True)
        label = f"difference from {title_of(relative_to)}"
    ax, styles = get_axes(ax), [*styles_of(names).values()]
    sns.pointplot(
        _long(values.rename("accuracy")), x=x, y="accuracy", hue="method", hue_order=names,
        errorbar=interval_of_proportion if relative_to is None else interval,
        palette=[style.colour for style in styles], markers=[style.marker for style in styles], linestyle="none",
        markersize=5, dodge=0.8 * (1 - 1 / max(len(names), 2)), err_kws={"linewidth": 1.1}, ax=ax,
    )  # fmt: skip
    for boundary in range(1, result.sizes.get(x, 1)):
        ax.axvline(boundary - 0.5, **_REFERENCE)
    if relative_to is not None:
        ax.axhline(0, **_REFERENCE)
    ax.set(xlabel=SYMBOL[x], ylabel=label, title=setting)
    handles, _ = ax.get_legend_handles_labels()
    titles = [title_of(name) for name in names]
    ax.legend(handles, titles, title="split", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def stability(result: xr.Dataset | RunOrPath, *, ax: Axes | None = None) -> Axes:
    """Draw the proportion of units whose group is unchanged one round later, under dynamic FedFac (FedFac Fig. 7).

    Parameters
    ----------
    result : xarray.Dataset, or a run of fedstat.sim.study, or its path
        ``prop_unchanged`` (p, alpha, replicate, round): one line per p and alpha.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Lines are means over replicates, bands 95% t intervals of the mean, cut off at 0 and 1. Rounds in which all
        replicates are equal have no band.

    Raises
    ------
    ValueError
        If the study has no ``prop_unchanged``, because dynamic FedFac was not run, or no second round.
    """
    result = _of_study(result, "stability", "prop_unchanged")
    data = _long(result["prop_unchanged"]).dropna(subset="prop_unchanged")
    if data.empty:
        raise ValueError("stability compares rounds, but the study has no second round. Run it with more rounds.")
    ax = get_axes(ax)
    varying = [name for name in ("p", "alpha") if result.sizes.get(name, 1) > 1]
    fixed = [name for name in ("p", "alpha") if name not in varying]
    data["setting"] = [", ".join(f"{SYMBOL[n]} = {row[n]:g}" for n in varying) for row in data.to_dict("records")]
    names = list(dict.fromkeys(data["setting"]))
    ax.axhline(1, **_REFERENCE)
    sns.lineplot(
        data, x="round", y="prop_unchanged", hue="setting", style="setting", hue_order=names, style_order=names,
        palette=[style_of("dynamic").colour] if len(names) == 1 else sequential_colors("plasma", len(names)),
        errorbar=interval_of_proportion, ax=ax,
        legend="full" if varying else False, err_kws={"alpha": 0.15, "linewidth": 0},
    )  # fmt: skip
    ax.set_ylim(None, 1 + 0.06 * (1 - ax.get_ylim()[0]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(
        xlabel="round",
        ylabel="proportion of units in the same group",
        title=f"{title_of('dynamic')}, {one_setting(result, *fixed)}".rstrip(", "),
    )
    if varying:
        ax.legend(frameon=False, loc="lower right")
    return ax


def study_dataset(run: RunOrPath) -> xr.Dataset:
    """Return the accuracy (p, alpha, method, replicate) of a study and, for dynamic FedFac, its prop_unchanged."""
    study = opened(run)
    experiment.require_replicates(study)
    result = xr.Dataset({"accuracy": experiment.accuracy(study)})
    if "dynamic" in result["method"].values:
        result["prop_unchanged"] = experiment.prop_unchanged(study).sel({"method": "dynamic"}, drop=True)
    return result


def _of_study(result: object, figure: str, name: str) -> xr.Dataset:
    """Return the Dataset of :func:`study_dataset`, from itself or from a run; raise an error without ``name``."""
    result = opened(result)
    if isinstance(result, xr.DataTree) and is_study(result):
        result = study_dataset(result)
    if not isinstance(result, xr.Dataset):
        takes = "a run of fedstat.sim.study"
        hint = "Draw a run of fedstat.fl with plot.rounds, plot.client_boxplot or plot.client_lines."
        raise refusal(f"papers.{figure}", takes, result, hint)
    return require_figure(result, figure, name, "fedstat.plot.simulation.study_dataset")


def is_study(run: object) -> bool:
    """Return True for a run of fedstat.sim.study."""
    return isinstance(run, xr.DataTree) and "metrics" in run.children and "rounds_done" in run["metrics"]


def require_figure(result: object, figure: str, name: str, source: str) -> xr.Dataset:
    """Return the Dataset, or that of a store; raise an error that names its source if it lacks the variable."""
    result = opened(result)
    if isinstance(result, xr.DataTree) and name in result.data_vars:
        result = result.to_dataset()
    if not isinstance(result, xr.Dataset):
        raise refusal(f"papers.{figure}", f"the result of {source}", result)
    if name not in result:
        got = list(map(str, result))
        raise ValueError(f"plot.papers.{figure} needs the variable {name!r} of {source}, but the Dataset has {got}.")
    return result


def _long(values: xr.DataArray) -> pd.DataFrame:
    return values.to_dataframe().reset_index()


def _markers(n: int) -> list[str]:
    return [_MARKERS[i % len(_MARKERS)] for i in range(n)]


def one_setting(result: xr.Dataset, *names: str) -> str:
    """Return "p = ..., α = ..." for a title; raise ValueError if there are several p or α."""
    for name in names:
        if result.sizes.get(name, 1) > 1:
            raise ValueError(
                f"this figure shows one {name}, but got {name} = {result[name].values.tolist()}. "
                f"Select one of them, for example with .sel({name}={result[name].values[0]:g})."
            )
    return ", ".join(f"{SYMBOL[name]} = {result[name].item():g}" for name in names if name in result.coords)


CUTS = (0.3, 0.75, 0.85, 0.99)
FOUND = 0.95

# Smallest proportion of the eigenvalue sum of an eigenvector that the figure counts.
_COUNTED = 1e-3
# The mean eigenvalue of R is 1, so that smaller eigenvalues than this add little to the sum.
_FLOOR = 0.1
_COLORMAP = LinearSegmentedColormap.from_list("personal to shared", [_PERSONAL, _SHARED])
_CUT: dict[str, Any] = {"color": "0.2", "linewidth": 0.9, "linestyle": (0, (4, 2))}
_WINDOW: dict[str, Any] = {"color": "0.9", "linewidth": 0, "zorder": 0}
_NOTE = (
    "A bar is an eigenvector of $R$. Its width is the proportion of the eigenvalue sum, "
    "its color the proportion of squared loadings on shared units.\n"
    r"1  The mean $\mu_c$ that the personal units of a client have in common. "
    r"$\kappa$ takes this factor first, and it raises $\nu$ of personal units to ½ at once."
    "\n"
    r"2  The shared units. They differ in all $\alpha d$ shared covariates and need many factors. "
    r"Each factor adds a little to their $\nu$, which passes ½ late."
    "\n"
    r"3  The specific part of each personal unit. No other unit resembles it, but as $\kappa$ approaches 1, "
    "all these parts become factors.\n"
    r"    They raise $\nu$ of personal units to 1, above that of shared units, "
    "whose small weights on personal covariates have the smallest eigenvalues.\n"
)


def spectrum(result: xr.Dataset, *, cuts: Sequence[float] = CUTS, ax: Axes | None = None) -> Axes:
    """Draw the eigenvalues of R in descending order, colored by the groups of units that load on them.

    Parameters
    ----------
    result : xarray.Dataset
        Result of :func:`fedstat.sim.spectrum`, with p and alpha selected (or of length 1).
    cuts : sequence of float
        Values of κ to mark; the number of factors G stands above each.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        One bar per eigenvector. Its width is its proportion of the eigenvalue sum, so that the bars left of κ are the
        factors that κ takes; its height is the eigenvalue (logarithmic). The marks 1, 2 and 3 stand at:

        1. eigenvectors of personal units with eigenvalues above 1;
        2. eigenvectors of shared units;
        3. the other eigenvectors of personal units.

        Each mark counts its eigenvectors with at least a thousandth of the eigenvalue sum.

    Raises
    ------
    ValueError
        If the result has more than one p or alpha.
    """
    result = require_figure(result, "spectrum", "eigenvalue", "fedstat.sim.spectrum")
    title, ax, result = one_setting(result, "p", "alpha"), get_axes(ax), _squeeze(result)
    gamma, on_shared, end = (result[name].values for name in ("eigenvalue", "shared_share", "cumulative_share"))
    width = np.diff(end, prepend=0.0)
    is_counted, is_high = width >= _COUNTED, gamma > _FLOOR
    ax.bar(
        (end - width)[is_high], gamma[is_high] - _FLOOR, width[is_high], bottom=_FLOOR, align="edge",
        color=_COLORMAP(on_shared[is_high]), edgecolor="white", linewidth=np.where(width[is_high] > 0.005, 0.4, 0.0),
    )  # fmt: skip
    groups = ((on_shared < 0.5) & (gamma > 1), on_shared >= 0.5, (on_shared < 0.5) & (gamma <= 1))
    for number, group in enumerate(groups, start=1):
        if (members := group & is_counted).any():
            center = np.average((end - width / 2)[members], weights=width[members])
            text = f"$\\bf{{{number}}}$\n×{members.sum()}"
            ax.annotate(text, (center, 0), (0, 7), xycoords=("data", "axes fraction"), textcoords="offset points",
                        ha="center", fontsize="small", color="white" if number == 2 else "black",
                        bbox={"color": _SHARED if number == 2 else _PERSONAL, "pad": 1})  # fmt: skip
    counts = {k: f"{1 + (end < k - 1e-12).sum()}" for k in cuts}
    _mark_kappas(ax, "$G$", counts)
    ax.set(yscale="log", ylim=(_FLOOR, None), ylabel="eigenvalue of $R$")
    ax.set_title(title, pad=16)
    return ax


def kappa_window(result: xr.Dataset, *, cuts: Sequence[float] = CUTS, ax: Axes | None = None) -> Axes:
    """Draw the communality of shared and of personal units against κ: medians, and bands from minimum to maximum.

    Parameters
    ----------
    result : xarray.Dataset
        Result of :func:`fedstat.sim.spectrum`, with p and alpha selected (or of length 1).
    cuts : sequence of float
        Values of κ to mark; the AUC of communality for shared units stands above each value that is in ``result``.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        The background is gray where the AUC is at least 0.95.

    Raises
    ------
    ValueError
        If the result has more than one p or alpha.
    """
    result = require_figure(result, "kappa_window", "eigenvalue", "fedstat.sim.spectrum")
    one_setting(result, "p", "alpha")
    ax, result = get_axes(ax), _squeeze(result)
    kappa, auc, shared = result["kappa"].values, result["auc"].values, result["unit_shared"].values
    ax.fill_between(kappa, 0, 1, where=auc >= FOUND, transform=ax.get_xaxis_transform(), **_WINDOW)
    for group, color, style in ((~shared, _PERSONAL, "-"), (shared, _SHARED, (0, (6, 1)))):
        nu = result["communality"].values[:, group]
        ax.fill_between(kappa, nu.min(axis=1), nu.max(axis=1), color=color, alpha=0.35, linewidth=0)
        ax.plot(kappa, np.median(nu, axis=1), color=color, linestyle=style, linewidth=1.8)
    _mark_kappas(ax, "AUC", {k: f"{auc[kappa == k][0]:.2f}" if k in kappa else "" for k in cuts})
    ax.set(xlabel=SYMBOL["kappa"], ylabel=r"communality $\nu$", ylim=(0, None))
    return ax


def spectrum_grid(result: xr.Dataset, *, cuts: Sequence[float] = CUTS) -> Figure:
    """Draw :func:`spectrum` above :func:`kappa_window`, one column for every p and alpha, with a key.

    Parameters
    ----------
    result : xarray.Dataset
        Result of :func:`fedstat.sim.spectrum`.
    cuts : sequence of float
        Values of κ to mark.

    Returns
    -------
    matplotlib Figure
    """
    result = require_figure(result, "spectrum_grid", "eigenvalue", "fedstat.sim.spectrum")
    settings = [(i, j) for i in range(result.sizes["p"]) for j in range(result.sizes["alpha"])]
    figure, axes = plt.subplots(
        2, len(settings), figsize=(max(4.1 * len(settings), 9.5), 6.6), sharex=True, sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (i, j), (top, bottom) in zip(settings, axes.T, strict=True):
        spectrum(result.isel(p=[i], alpha=[j]), cuts=cuts, ax=top).label_outer()
        kappa_window(result.isel(p=[i], alpha=[j]), cuts=cuts, ax=bottom).label_outer()
    key = [
        Patch(color=_PERSONAL, label="personal units"),
        Patch(color=_SHARED, label="shared units"),
        Patch(color=_WINDOW["color"], label=rf"AUC of $\nu$ ≥ {FOUND:g}"),
        Line2D([], [], **_CUT, label=r"$\kappa$: the $G$ factors are on its left"),
    ]
    figure.legend(handles=key, loc="outside upper center", ncols=4 if len(settings) > 2 else 2, frameon=False)
    figure.supxlabel(_note(result), fontsize="small", ha="left", x=0.02, linespacing=1.4)
    return figure


def _mark_kappas(ax: Axes, name: str, labels: dict[float, str]) -> None:
    """Draw lines at values of κ, with labels above them."""
    above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": "small"}
    for k, text in labels.items():
        ax.axvline(k, **_CUT)
        ax.annotate(text, (k, 1), (0, 3), ha="center", **above)
    ax.annotate(name, (0, 1), (0, 3), ha="left", **above)
    ax.set(xlim=(0, 1.005))
    ax.set_xticks([0, *labels], [f"{k:g}" for k in (0, *labels)])


def _squeeze(result: xr.Dataset) -> xr.Dataset:
    """Drop the dimensions p and alpha."""
    return result.squeeze([dim for dim in ("p", "alpha") if dim in result.dims])


def _note(result: xr.Dataset) -> str:
    """Return the key to the marks, and the settings of the draw."""
    config = json.loads(result.attrs["config"])
    origin = (
        f"Model (8), true weights, C = {config['clients']}, d = {config['d']}, m = {config['m']}, one draw, seed "
        f"{config['seed']}.\nν by “{config['method']}”, median and range over units; × counts eigenvectors with at "
        f"least {100 * _COUNTED:g}% of the eigenvalue sum."
    )
    return _NOTE + origin
