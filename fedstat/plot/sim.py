"""Panels of the simulation study on model (8): recovery over κ, Fig. 6 and Fig. 7 of the FedFac paper.

Markers and line styles differ as well as colours, so that every figure can be read in grey.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstat import _check
from fedstat.plot._axes import given
from fedstat.plot._figure import interval
from fedstat.plot._inputs import refusal
from fedstat.plot._looks import look, looks, ordered
from fedstat.plot.choices import variants
from fedstat.results import StabilityResult
from fedstat.sim import report

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
        _check.choice("relative_to", relative_to, names)
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
    result = xr.Dataset({"accuracy": report.accuracy(run)})
    if "dynamic" in result["method"].values:
        result["same_state"] = report.same_state(run).sel({"method": "dynamic"}, drop=True)
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
