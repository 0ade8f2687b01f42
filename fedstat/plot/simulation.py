"""Plots of the simulation study and of recovery over κ.

Markers and line styles differ as well as colours, so that every figure can be read in grey.
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

from fedstat._utils import check
from fedstat.plot._figure import PERSONAL as _PERSONAL
from fedstat.plot._figure import SHARED as _SHARED
from fedstat.plot._figure import given, interval, look, looks, ordered, refusal
from fedstat.plot.factor import variants
from fedstat.results import StabilityResult
from fedstat.sim import experiment

SYMBOL = {"p": "$p$", "alpha": r"$\alpha$", "kappa": r"$\kappa$"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_AGREEMENT = "icc"
_REFERENCE: dict[str, Any] = {"color": "0.6", "linewidth": 0.8, "zorder": 0}


def recovery(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """AUC for the true label against κ, one line per estimator of ν, bars of one standard error.

    Agreement between clients (``"icc"``), which has no κ, is a horizontal line with a band of one standard error.

    Parameters
    ----------
    result : xarray.Dataset
        ``auc`` (kappa, estimator, replicate), with p and alpha selected (or of length 1), as
        :func:`fedstat.sim.recover` gives it.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If more than one p or alpha is left.
    """
    require(result, "recovery", "auc", "fedstat.sim.recover")
    setting, ax = one_setting(result, "p", "alpha"), given(ax)
    of_nu = result["auc"].sel(estimator=result["estimator"] != _AGREEMENT)
    names, data = list(of_nu["estimator"].values), _long(of_nu)
    ax.axhline(0.5, **_REFERENCE)
    if names:
        sns.lineplot(
            data, x="kappa", y="auc", hue="estimator", style="estimator", hue_order=names, style_order=names, ax=ax,
            palette=_palette(len(names)), markers=_markers(len(names)), errorbar="se", err_style="bars", markersize=5,
            err_kws={"capsize": 2, "elinewidth": 1},
        )  # fmt: skip
    if _AGREEMENT in result["estimator"].values:
        auc = result["auc"].sel(estimator=_AGREEMENT).isel(kappa=0)
        mean, n = float(auc.mean()), auc.size
        se = float(auc.std(ddof=1)) / n**0.5 if n > 1 else 0.0
        ax.axhspan(mean - se, mean + se, color="0.85", linewidth=0, zorder=0)
        ax.axhline(mean, color="0.1", linestyle=(0, (7, 2, 1, 2)), linewidth=1.2, zorder=1, label=r"icc (no $\kappa$)")
    ax.set(xlabel=SYMBOL["kappa"], ylabel="AUC for “shared”", title=setting, xlim=(0, 1.02), ylim=(-0.03, 1.03))
    ax.legend(title="estimator", frameon=False)
    return ax


def recovery_grid(result: xr.Dataset) -> Figure:
    """Panels of :func:`recovery`: columns p, rows alpha, one legend.

    Parameters
    ----------
    result : xarray.Dataset
        What :func:`fedstat.sim.recover` returns.

    Returns
    -------
    matplotlib Figure
    """
    require(result, "recovery_grid", "auc", "fedstat.sim.recover")
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
    figure.legend(handles, labels, title="estimator", frameon=False, loc="outside right center")
    return figure


def accuracy(result: xr.Dataset | xr.DataTree, *, relative_to: str | None = None, ax: Axes | None = None) -> Axes:
    """Test accuracy of the ways to split, side by side for every p or α (FedFac Fig. 6).

    Parameters
    ----------
    result : xarray.Dataset, or a run of fedstat.sim.study
        ``accuracy`` (p, alpha, method, replicate), where p or alpha has length 1: the other is the x axis.
    relative_to : str, optional
        A method, for example "true": draw the differences from it within replicates. Replicates differ more than
        methods do, so the bars of plain accuracies say little about how methods compare; these do.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Points are means over replicates, bars Student's 95 % intervals; methods stand in the order of all figures.

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
        # as a dict: the keyword ``method`` of sel is the way to fill gaps, not a dimension
        values = values - values.sel({"method": relative_to}, drop=True)
        label = f"difference from “{relative_to}”"
    ax, styles = given(ax), [*looks(names).values()]
    sns.pointplot(
        _long(values.rename("accuracy")), x=x, y="accuracy", hue="method", hue_order=names, errorbar=interval,
        palette=[own.colour for own in styles], markers=[own.marker for own in styles], linestyle="none", markersize=5,
        dodge=0.8 * (1 - 1 / max(len(names), 2)), err_kws={"linewidth": 1.1}, ax=ax,
    )  # fmt: skip
    for boundary in range(1, result.sizes.get(x, 1)):
        ax.axvline(boundary - 0.5, **_REFERENCE)
    if relative_to is not None:
        ax.axhline(0, **_REFERENCE)
    ax.set(xlabel=SYMBOL[x], ylabel=label, title=setting)
    ax.legend(title="split", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def stability(result: xr.Dataset | xr.DataTree | StabilityResult, *, ax: Axes | None = None) -> Axes:
    """Share of neurons that keep their state from one round to the next, dynamic FedFac (FedFac Fig. 7).

    Of what :func:`fedstat.stability` returns: how like the reference the split is under every other choice.

    Parameters
    ----------
    result : xarray.Dataset, a run of fedstat.sim.study, or StabilityResult
        ``same_state`` (p, alpha, replicate, round): one line per p and alpha.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Lines are means over replicates, bands Student's 95 % intervals, cut off at 1. Of a StabilityResult, points are
        adjusted Rand indices with the reference, diamonds the share of units of the same state; at 1 the choice makes
        no difference.
    """
    if isinstance(result, StabilityResult):
        return variants(result, ax=ax)
    result = _of_study(result, "stability", "same_state")
    ax = given(ax)
    varying = [name for name in ("p", "alpha") if result.sizes.get(name, 1) > 1]
    fixed = [name for name in ("p", "alpha") if name not in varying]
    data = _long(result["same_state"])
    data["setting"] = [", ".join(f"{SYMBOL[n]} = {row[n]:g}" for n in varying) for row in data.to_dict("records")]
    names = list(dict.fromkeys(data["setting"]))
    ax.axhline(1, **_REFERENCE)
    sns.lineplot(
        data, x="round", y="same_state", hue="setting", style="setting", hue_order=names, style_order=names,
        palette=[look("dynamic").colour] if len(names) == 1 else sns.color_palette("plasma", len(names) + 1)[:-1],
        errorbar=interval, ax=ax,
        legend="full" if varying else False, err_kws={"alpha": 0.15, "linewidth": 0},
    )  # fmt: skip
    ax.set_ylim(None, 1 + 0.03 * (1 - ax.get_ylim()[0]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(
        xlabel="round",
        ylabel="share of neurons that keep their state",
        title=f"dynamic FedFac, {one_setting(result, *fixed)}".rstrip(", "),
    )
    if varying:
        ax.legend(frameon=False, loc="lower right")
    return ax


def study_dataset(run: xr.DataTree) -> xr.Dataset:
    """What the figures of a study need: accuracy (p, alpha, method, replicate) and, of dynamic FedFac, same_state."""
    result = xr.Dataset({"accuracy": experiment.accuracy(run)})
    if "dynamic" in result["method"].values:
        result["same_state"] = experiment.same_state(run).sel({"method": "dynamic"}, drop=True)
    return result


def _of_study(result: object, figure: str, name: str) -> xr.Dataset:
    """What the figures of a study need, from it or from its run."""
    if isinstance(result, xr.DataTree) and is_study(result):
        result = study_dataset(result)
    if not isinstance(result, xr.Dataset):
        takes = "a run of fedstat.sim.study" + (" or the result of fedstat.stability" if name == "same_state" else "")
        raise refusal(
            figure, takes, result, "Of a run of fedstat.fl, see plot.rounds, plot.clients and plot.client_lines."
        )
    return require(result, figure, name, "plot.study_dataset")


def is_study(run: object) -> bool:
    """Whether it is a run of fedstat.sim.study."""
    return isinstance(run, xr.DataTree) and "metrics" in run.children and "rounds_done" in run["metrics"]


def require(result: object, figure: str, name: str, source: str) -> xr.Dataset:
    """The Dataset, or an error that says where it comes from."""
    if not isinstance(result, xr.Dataset):
        raise refusal(figure, f"what {source} returns", result)
    if name not in result:
        raise ValueError(f"plot.{figure} needs the variable {name!r}, but the Dataset has {list(map(str, result))}")
    return result


def _long(values: xr.DataArray) -> pd.DataFrame:
    return values.to_dataframe().reset_index()


def _palette(n: int) -> Any:
    """Colours that a colour-blind reader keeps apart and that fall in lightness, so that grey keeps them apart too."""
    return sns.color_palette("viridis", n + 1)[:n]


def _markers(n: int) -> list[str]:
    return [_MARKERS[i % len(_MARKERS)] for i in range(n)]


def one_setting(result: xr.Dataset, *names: str) -> str:
    """Return "p = ..., α = ..." for a title; ValueError if there is more than one of either."""
    for name in names:
        if result.sizes.get(name, 1) > 1:
            raise ValueError(
                f"this figure shows one {name}, but got {name} = {result[name].values.tolist()}. "
                f"Select one, for example with .sel({name}={result[name].values[0]:g})."
            )
    return ", ".join(f"{SYMBOL[name]} = {result[name].item():g}" for name in names if name in result.coords)


CUTS = (0.3, 0.75, 0.85, 0.99)
FOUND = 0.95

# An eigenvector that holds less of the eigenvalues' sum is not counted in the figure.
_COUNTED = 1e-3
# Eigenvalues of R are 1 in the mean: what is below this holds next to nothing.
_FLOOR = 0.1
_BY_SHARE = LinearSegmentedColormap.from_list("personal to shared", [_PERSONAL, _SHARED])
_CUT: dict[str, Any] = {"color": "0.2", "linewidth": 0.9, "linestyle": (0, (4, 2))}
_WINDOW: dict[str, Any] = {"color": "0.9", "linewidth": 0, "zorder": 0}
_NOTE = (
    "A bar is an eigenvector of $R$, as wide as its share of the eigenvalues' sum, "
    "coloured by the neurons on which its squared loadings lie.\n"
    r"1  What the personal neurons of a client have in common, their mean $\mu_c$. "
    r"$\kappa$ takes it first, and it brings $\nu$ of personal neurons to ½ at once."
    "\n"
    r"2  The shared neurons. They differ in all $\alpha d$ shared covariates and need many factors: "
    r"each adds a little to their $\nu$, which passes ½ late."
    "\n"
    r"3  What each personal neuron has for itself. No other neuron resembles it, yet as $\kappa$ nears 1 "
    "all of these become factors and bring\n"
    r"    $\nu$ of personal neurons to 1, past the shared ones: "
    "what is left of those, such as their small weights on personal covariates, has the smallest eigenvalues.\n"
)


def spectrum(result: xr.Dataset, *, cuts: Sequence[float] = CUTS, ax: Axes | None = None) -> Axes:
    """Eigenvalues of R in the order in which κ takes them, coloured by the neurons that load on them.

    Parameters
    ----------
    result : xarray.Dataset
        What :func:`fedstat.sim.spectrum` returns, with p and alpha selected (or of length 1).
    cuts : sequence of float
        Values of κ to mark; the number of factors G stands above each.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        One bar per eigenvector: as wide as its share of the eigenvalues' sum, so that the bars left of κ are the
        factors that κ takes; as high as its eigenvalue (logarithmic). 1, 2 and 3 stand at the personal neurons'
        eigenvectors with eigenvalues above 1, the shared neurons', and the personal neurons' other ones, with the
        number of those that hold at least a thousandth of the sum.

    Raises
    ------
    ValueError
        If more than one p or alpha is left.
    """
    require(result, "spectrum", "eigenvalue", "fedstat.sim.spectrum")
    title, ax, one = one_setting(result, "p", "alpha"), given(ax), _one(result)
    gamma, share, end = (one[name].values for name in ("eigenvalue", "shared_share", "cumulative_share"))
    width = np.diff(end, prepend=0.0)
    counted, drawn = width >= _COUNTED, gamma > _FLOOR
    ax.bar(
        (end - width)[drawn], gamma[drawn] - _FLOOR, width[drawn], bottom=_FLOOR, align="edge",
        color=_BY_SHARE(share[drawn]), edgecolor="white", linewidth=np.where(width[drawn] > 0.005, 0.4, 0.0),
    )  # fmt: skip
    groups = ((share < 0.5) & (gamma > 1), share >= 0.5, (share < 0.5) & (gamma <= 1))
    for number, group in enumerate(groups, start=1):
        if (some := group & counted).any():
            at = np.average((end - width / 2)[some], weights=width[some])
            text = f"$\\bf{{{number}}}$\n×{some.sum()}"
            ax.annotate(text, (at, 0), (0, 7), xycoords=("data", "axes fraction"), textcoords="offset points",
                        ha="center", fontsize="small", color="white" if number == 2 else "black",
                        bbox={"color": _SHARED if number == 2 else _PERSONAL, "pad": 1})  # fmt: skip
    counts = {k: f"{1 + (end < k - 1e-12).sum()}" for k in cuts}
    _cut(ax, "$G$", counts)
    ax.set(yscale="log", ylim=(_FLOOR, None), ylabel="eigenvalue of $R$")
    ax.set_title(title, pad=16)
    return ax


def kappa_window(result: xr.Dataset, *, cuts: Sequence[float] = CUTS, ax: Axes | None = None) -> Axes:
    """Communality of shared and personal neurons against κ: medians, and bands from the least to the greatest.

    Parameters
    ----------
    result : xarray.Dataset
        What :func:`fedstat.sim.spectrum` returns, with p and alpha selected (or of length 1).
    cuts : sequence of float
        Values of κ to mark; the AUC of ν for the true label stands above each that is in ``result``.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Grey where the AUC is 0.95 or more.

    Raises
    ------
    ValueError
        If more than one p or alpha is left.
    """
    require(result, "kappa_window", "eigenvalue", "fedstat.sim.spectrum")
    one_setting(result, "p", "alpha")
    ax, one = given(ax), _one(result)
    kappa, auc, shared = one["kappa"].values, one["auc"].values, one["unit_shared"].values
    ax.fill_between(kappa, 0, 1, where=auc >= FOUND, transform=ax.get_xaxis_transform(), **_WINDOW)
    for of, color, style in ((~shared, _PERSONAL, "-"), (shared, _SHARED, (0, (6, 1)))):
        nu = one["communality"].values[:, of]
        ax.fill_between(kappa, nu.min(axis=1), nu.max(axis=1), color=color, alpha=0.35, linewidth=0)
        ax.plot(kappa, np.median(nu, axis=1), color=color, linestyle=style, linewidth=1.8)
    _cut(ax, "AUC", {k: f"{auc[kappa == k][0]:.2f}" if k in kappa else "" for k in cuts})
    ax.set(xlabel=SYMBOL["kappa"], ylabel=r"communality $\nu$", ylim=(0, None))
    return ax


def spectrum_grid(result: xr.Dataset, *, cuts: Sequence[float] = CUTS) -> Figure:
    """Panels of :func:`spectrum` above those of :func:`kappa_window`, one column for every p and alpha, with a key.

    Parameters
    ----------
    result : xarray.Dataset
        What :func:`fedstat.sim.spectrum` returns.
    cuts : sequence of float
        Values of κ to mark.

    Returns
    -------
    matplotlib Figure
    """
    require(result, "spectrum_grid", "eigenvalue", "fedstat.sim.spectrum")
    settings = [(i, j) for i in range(result.sizes["p"]) for j in range(result.sizes["alpha"])]
    figure, axes = plt.subplots(
        2, len(settings), figsize=(max(4.1 * len(settings), 9.5), 6.6), sharex=True, sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (i, j), (top, bottom) in zip(settings, axes.T, strict=True):
        spectrum(result.isel(p=[i], alpha=[j]), cuts=cuts, ax=top).label_outer()
        kappa_window(result.isel(p=[i], alpha=[j]), cuts=cuts, ax=bottom).label_outer()
    key = [
        Patch(color=_PERSONAL, label="personal neurons"),
        Patch(color=_SHARED, label="shared neurons"),
        Patch(color=_WINDOW["color"], label=rf"split found: AUC of $\nu$ ≥ {FOUND:g}"),
        Line2D([], [], **_CUT, label=r"$\kappa$: eigenvectors on its left are the $G$ factors"),
    ]
    figure.legend(handles=key, loc="outside upper center", ncols=4 if len(settings) > 2 else 2, frameon=False)
    figure.supxlabel(_note(result), fontsize="small", ha="left", x=0.02, linespacing=1.4)
    return figure


def _cut(ax: Axes, name: str, labels: dict[float, str]) -> None:
    """Lines at values of κ, and what stands above them."""
    above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": "small"}
    for k, text in labels.items():
        ax.axvline(k, **_CUT)
        ax.annotate(text, (k, 1), (0, 3), ha="center", **above)
    ax.annotate(name, (0, 1), (0, 3), ha="left", **above)
    ax.set(xlim=(0, 1.005))
    ax.set_xticks([0, *labels], [f"{k:g}" for k in (0, *labels)])


def _one(result: xr.Dataset) -> xr.Dataset:
    return result.squeeze([dim for dim in ("p", "alpha") if dim in result.dims])


def _note(result: xr.Dataset) -> str:
    config = json.loads(result.attrs["config"])
    origin = (
        f"Model (8), true weights, C = {config['clients']}, d = {config['d']}, m = {config['m']}, one draw, seed "
        f"{config['seed']}; ν by “{config['estimator']}”, median and range over neurons; × counts eigenvectors with "
        f"{100 * _COUNTED:g} % of the sum or more."
    )
    return _NOTE + origin
