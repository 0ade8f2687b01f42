"""Plots of FedFac's motivating study (Figs. 1 and 2) and theorems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from sklearn.cluster import KMeans

from fedstat._utils import check
from fedstat.ntk.results import ConvergenceResult, GeneralizationResult
from fedstat.plot._figure import caption, given, interval, looks, one_legend, ordered, refusal
from fedstat.results import EntropyResult
from fedstat.study.collect import title_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


CASE = {"iid": "IID", "one-class": "non-IID (one class a client)"}
_COLOUR = {"iid": "#0072b2", "one-class": "#d55e00"}
_ESTIMATOR = {"pa": "#0072b2", "pc": "#e69f00", "leverage": "#009e73"}


def neuron_order(outputs: xr.DataArray) -> np.ndarray:
    """Order of the neurons in the heat map: two 2-means clusters, the larger outputs first, descending within each.

    Parameters
    ----------
    outputs : DataArray (client, unit)

    Returns
    -------
    int array (unit,)

    Examples
    --------
    >>> neuron_order(xr.DataArray([[0.0, 3.0, 0.1, 4.0], [0.2, 3.0, 0.0, 5.0]], dims=("client", "unit")))
    array([3, 1, 0, 2])
    """
    return _clustered(outputs)[0]


def _clustered(outputs: xr.DataArray) -> tuple[np.ndarray, int]:
    """Order of the neurons, and the number of those in the first cluster."""
    x = outputs.transpose("unit", "client").to_numpy()
    cluster = KMeans(2, n_init=10, random_state=0).fit_predict(x)
    mean = x.mean(axis=1)
    larger = cluster == np.argmax([mean[cluster == c].mean() for c in (0, 1)])
    return np.lexsort((-mean, ~larger)), int(larger.sum())


def heatmap(
    outputs: xr.DataArray, *, label: xr.DataArray | None = None, vmax: float | None = None, ax: Axes | None = None
) -> Axes:
    """Outputs of every neuron for every client (FedFac Fig. 1); rows are neurons, as in the paper.

    Parameters
    ----------
    outputs : DataArray (client, unit)
        ``mean_output`` of one case and one kind of output.
    label : DataArray (client,), optional
        Class of each client; where clients are ordered by class, the classes are marked under the columns.
    vmax : float, optional
        Top of the colour scale, for figures that share one; the largest output by default.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        Two marks beside the rows and a white line part the clusters.
    """
    if not isinstance(outputs, xr.DataArray):
        raise refusal(
            "heatmap", "a DataArray (client, unit)", outputs, "Of a run of fedstat.motivation, see plot.fig1."
        )
    ax = given(ax)
    order, first = _clustered(outputs)
    x = outputs.transpose("unit", "client").to_numpy()[order]
    picture = ax.imshow(
        x, aspect="auto", cmap="viridis", vmin=0, vmax=vmax, interpolation="nearest", extent=(0, x.shape[1], len(x), 0)
    )
    over = vmax is not None and x.max() > vmax
    ax.figure.colorbar(picture, ax=ax, label="mean output", extend="max" if over else "neither", pad=0.02)
    ax.set(xlabel="client", ylabel="neuron, by 2-means cluster")
    ax.axhline(first, color="white", linewidth=1.4)
    for x0, end in ((0.0, "right"), (1.0, "left")):
        ax.annotate("◂" if end == "left" else "▸", (x0, first), xycoords=("axes fraction", "data"), ha=end, va="center",
                    fontsize="small", annotation_clip=False)  # fmt: skip
    classes = None if label is None else label.to_numpy()
    if classes is not None and (np.diff(classes) >= 0).all():
        edges = np.concatenate([[0], np.flatnonzero(np.diff(classes)) + 1, [len(classes)]])
        ax.set_xticks((edges[:-1] + edges[1:]) / 2, [str(c) for c in classes[edges[:-1]]])
        ax.vlines(edges[1:-1], 0, len(x), color="white", linewidth=0.4)
        ax.set_xlabel("clients, by class")
    return ax


def entropies(
    entropy: xr.Dataset | xr.DataTree | EntropyResult, *, outputs: str = "own", ax: Axes | None = None
) -> Axes:
    """Histograms of the neurons' entropies, one for each case (FedFac Fig. 2), and the error of one of them.

    Parameters
    ----------
    entropy : Dataset, run of fedstat.motivation.study, or EntropyResult
        ``entropy`` and ``std_error`` (case, unit), for one kind of output. Of an EntropyResult the histogram is that
        of all its series.
    outputs : {"own", "common"}
        Kind of output of a run.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        The bars over the histograms are ± the median standard error of one neuron's entropy: how much the histograms
        are blurred by estimating.
    """
    alone = isinstance(entropy, EntropyResult)
    data = _entropies(entropy, outputs).dropna(subset="entropy")
    cases = list(dict.fromkeys(map(str, data["case"])))
    names = [CASE.get(c, c) for c in cases]
    data["case"] = data["case"].map(lambda c: CASE.get(c, c))
    ax = given(ax)
    colours = [_COLOUR.get(c, "0.4") for c in cases]
    sns.histplot(
        data, x="entropy", hue="case", hue_order=names, palette=colours, binwidth=0.1, element="step", alpha=0.3, ax=ax
    )
    for hatched in ax.collections[:1]:  # drawn last first
        hatched.set_hatch("////")
    top = ax.get_ylim()[1]
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        here = data[data["case"] == name]
        ax.errorbar(
            here["entropy"].median(), top * (1.04 + 0.05 * i), xerr=here["std_error"].median(), color=colour,
            capsize=3, marker="|",
        )  # fmt: skip
    error = "; bar: ± its median standard error" if data["std_error"].notna().any() else ""
    of = f"entropy (nats){error}" if alone else "entropy over clients (nats)"
    ax.set(xlabel=of, ylabel="series" if alone else "neurons", ylim=(0, top * (1.06 + 0.05 * len(cases))))
    ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    words = "median ± standard error of one neuron's entropy"
    bar = Line2D([], [], color="0.3", marker="|", markersize=8)
    drawn = legend.legend_handles if (legend := ax.get_legend()) is not None else []
    handles = [*(handle for handle in drawn if handle is not None), bar]
    if not alone:
        ax.legend(handles, [*names, words], frameon=False)
    elif legend is not None:
        legend.remove()
    return ax


def _entropies(entropy: object, outputs: str) -> pd.DataFrame:
    """Columns case, entropy and std_error, one row per neuron."""
    if isinstance(entropy, EntropyResult):
        return entropy.tidy().rename(columns={"estimate": "entropy"}).assign(case="all")
    if isinstance(entropy, xr.DataTree) and "dispersion" in entropy.children:
        found = entropy["dispersion"].to_dataset()
        known = found["outputs"].to_numpy().tolist()
        entropy = found.sel(outputs=check.choice("outputs", outputs, known))
    if not isinstance(entropy, xr.Dataset):
        raise refusal("entropies", "the result of knn_entropy, a run of fedstat.motivation, or its dispersion", entropy)
    return entropy[["entropy", "std_error"]].to_dataframe().reset_index()


def relation(run: xr.DataTree, *, case: str, outputs: str = "own", on: str = "weights", ax: Axes | None = None) -> Axes:
    """Rank of every neuron's communality against its entropy, one colour per estimator, and their rank correlations.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.motivation.study` returns.
    case, outputs, on : str
        Which partition; outputs over "own" or "common" samples; communality of "weights" or "updates".
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
    """
    _require_run(run, "relation")
    entropy, nu, rho = (run[name].to_dataset() for name in ("dispersion", "split", "relation"))
    check.choice("case", case, entropy["case"].to_numpy().tolist())
    check.choice("outputs", outputs, entropy["outputs"].to_numpy().tolist())
    check.choice("on", on, nu["on"].to_numpy().tolist())
    ax = given(ax)
    at = {"case": case, "on": on}
    data = nu["communality"].sel(at).to_dataframe().reset_index()
    data["rank"] = data.groupby("estimator")["communality"].rank(pct=True)
    data["entropy"] = entropy["entropy"].sel(case=case, outputs=outputs).to_numpy()[data["unit"]]
    found = rho["spearman"].sel({**at, "outputs": outputs}).to_series()
    names = {e: f"{e}, rank correlation {value:+.2f}" for e, value in found.items()}
    data["estimator"] = data["estimator"].map(names)
    sns.scatterplot(
        data.dropna(), x="entropy", y="rank", hue="estimator", style="estimator", s=18, linewidth=0, alpha=0.7,
        palette={name: _ESTIMATOR.get(str(e), "0.4") for e, name in names.items()}, ax=ax,
    )  # fmt: skip
    ax.set(xlabel="entropy over clients (nats)", ylabel=rf"rank of communality $\nu$ of the {on}", title=CASE[case])
    ax.legend(frameon=False, fontsize="small", title=None, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return ax


def fig1(run: xr.DataTree, *, outputs: str = "own") -> Figure:
    """Heat maps of all cases side by side, in one scale of colours, with a caption (FedFac Fig. 1).

    Parameters
    ----------
    run : DataTree
    outputs : {"own", "common"}

    Returns
    -------
    matplotlib Figure
    """
    _require_run(run, "fig1")
    seen = run["outputs"].to_dataset().sel(outputs=check.choice("outputs", outputs, ("own", "common")))
    n = seen.sizes["case"]
    figure, axes = plt.subplots(1, n, figsize=(5 * n, 5), squeeze=False, layout="constrained")
    for ax, case in zip(axes[0], seen["case"].values, strict=True):
        part = seen.sel(case=case)
        heatmap(part["mean_output"], label=part["label"], vmax=_top(seen), ax=ax).set_title(CASE[case])
    over = "the client's own training samples" if outputs == "own" else "an evaluation set that all clients share"
    caption(
        figure,
        f"Output: a neuron's mean over {over}. Rows: neurons in two 2-means clusters, the one with the larger outputs "
        "above, in each the larger means first; arrows and a white line mark the border.",
        "Columns: clients; where they hold one class each, white lines part the classes. Both panels have one scale, "
        "whose top is the 99.5 % quantile; a pointed end: some outputs exceed it.",
        motivation_origin(run),
    )
    return figure


def fig2(run: xr.DataTree) -> Figure:
    """Histograms of entropies over own and over common samples, with a caption (FedFac Fig. 2).

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.motivation.study` returns.

    Returns
    -------
    matplotlib Figure
        Left as in the paper, a neuron's output being its mean over the client's own samples; right over a common
        evaluation set.
    """
    _require_run(run, "fig2")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    where = {"own": "each client's own samples", "common": "a common evaluation set"}
    for ax, (outputs, title) in zip(axes, where.items(), strict=True):
        entropies(run["dispersion"].to_dataset().sel(outputs=outputs), ax=ax).set_title(f"outputs over {title}")
    one_legend(figure, axes)
    caption(
        figure,
        "Each neuron has one entropy, that of its mean outputs over clients; below 0 it is more concentrated than a "
        "uniform distribution of width 1.",
        "The bars above: median entropy ± the median standard error of one neuron's entropy; peaks closer than this "
        "can be estimation error.",
        motivation_origin(run),
    )
    return figure


def motivation_grid(run: xr.DataTree, *, outputs: str = "own") -> Figure:
    """Heat maps, histograms of entropies, and communality against entropy, in one figure.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.motivation.study` returns.
    outputs : {"own", "common"}

    Returns
    -------
    matplotlib Figure
    """
    _require_run(run, "motivation_grid")
    seen = run["outputs"].to_dataset().sel(outputs=check.choice("outputs", outputs, ("own", "common")))
    cases = seen["case"].values
    figure, axes = plt.subplots(
        3, len(cases), figsize=(5.4 * len(cases), 13), squeeze=False, layout="constrained", height_ratios=(1.3, 1, 1)
    )
    grid = axes[1, 0].get_gridspec()
    for ax in axes[1]:
        ax.remove()
    entropies(run["dispersion"].to_dataset().sel(outputs=outputs), ax=figure.add_subplot(grid[1, :]))
    for i, case in enumerate(cases):
        part = seen.sel(case=case)
        heatmap(part["mean_output"], label=part["label"], vmax=_top(seen), ax=axes[0, i]).set_title(CASE[case])
        relation(run, case=case, outputs=outputs, on="updates", ax=axes[2, i])
    return figure


def motivation_origin(run: xr.DataTree) -> str:
    """Scale and origin of a study in one line, to be set under a figure made from it."""
    config: dict[str, Any] = json.loads(run.attrs["config"])
    scale = f"{config['data']}, C = {config['clients']}, {config['hidden']} hidden units"
    training = f"{config['local_epochs']} epochs, batch {config['batch_size']}, Adam {config['lr']:g}"
    attrs = run.attrs
    return f"{scale}; {training}, seed {config['seed']}; {attrs['source']} {attrs['revision']}".strip()


def _top(seen: xr.Dataset) -> float:
    """Top of a colour scale that the cases share and that a few large outputs do not stretch."""
    return float(np.quantile(seen["mean_output"], 0.995))


def _require_run(run: object, figure: str) -> None:
    if not isinstance(run, xr.DataTree) or not {"outputs", "dispersion"} <= set(run.children):
        raise refusal(figure, "a run of fedstat.motivation", run)


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
