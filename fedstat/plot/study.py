"""Figures of a whole simulation study: Fig. 6 of the FedFac paper, and accuracy, differences and stability together."""

from __future__ import annotations

import json
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import MaxNLocator

from fedstat.plot._figure import caption, one_legend, refusal
from fedstat.plot.simulation import accuracy, is_study, one_setting, stability, study_dataset

_REFERENCE = "true"
_BARS = "Bars and bands: Student's 95 % intervals over replicates"
_DIFFERENCES = (
    "Right: differences in accuracy within replicates, which differ from one another more than the ways to split do; "
    "what lies far off stands below, on its own scale."
)


def accuracy_grid(*runs: xr.DataTree) -> Figure:
    """Accuracy, and paired differences from ``true``, of every run: FedFac Fig. 6 for one's own p and α.

    Parameters
    ----------
    *runs : DataTree
        What :func:`fedstat.sim.study` returns. A run where both p and α vary has a row for every α.

    Returns
    -------
    matplotlib Figure
        Left the accuracies, right their differences within replicates; methods that lie far from the others are
        drawn below them, on a scale of their own.
    """
    return _grid(runs, moving=False)


def study_grid(run: xr.DataTree) -> Figure:
    """Accuracy, paired difference from ``true`` and stability of dynamic FedFac: one row for every α.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.sim.study` returns. Where only α varies, it is the x axis of a single row.

    Returns
    -------
    matplotlib Figure
    """
    return _grid([run], moving=True)


def stability_grid(*runs: xr.DataTree) -> Figure:
    """Stability of dynamic FedFac, one panel for every p and α (FedFac Fig. 7).

    Parameters
    ----------
    *runs : DataTree
        What :func:`fedstat.sim.study` returns, with dynamic FedFac among the methods.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        If dynamic FedFac was not run.
    """
    for run in runs:
        if not is_study(run):
            raise refusal("stability_grid", "runs of fedstat.sim.study", run)
    results = [study_dataset(run) for run in runs]
    if not all("same_state" in result for result in results):
        raise ValueError("stability is that of dynamic FedFac: add `dynamic` to the methods of the study")
    rows = [row for result in results for row in _rows(result)]
    columns = max(row.sizes["p"] * row.sizes["alpha"] for row in rows)
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(max(2 * columns, 5), 2.1 * len(rows) + 0.9), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, row in zip(axes, rows, strict=True):
        parts = [row.isel(p=[i], alpha=[j]) for i in range(row.sizes["p"]) for j in range(row.sizes["alpha"])]
        for ax, part in zip(line, parts, strict=False):
            stability(part, ax=ax).set_title(one_setting(part, "p", "alpha"), fontsize="medium")
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            ax.set_ylabel("share that keeps its state" if ax is line[0] else "")
        for ax in line[len(parts) :]:
            ax.remove()
    lowest = min(float(ax.dataLim.y0) for ax in figure.axes if np.isfinite(ax.dataLim.y0))
    axes[0, 0].set_ylim(lowest, 1 + 0.03 * (1 - lowest))
    caption(
        figure,
        *dict.fromkeys(map(origin, runs)),
        "Neurons of dynamic FedFac that are shared, or personal, as in the round before. Bands are cut off at 1, "
        "which no share exceeds.",
    )
    return figure


def origin(run: xr.DataTree) -> str:
    """Scale and origin of a study in one line, to be set under a figure made from it."""
    config, attrs = json.loads(run.attrs["config"]), run.attrs
    scale = f"C = {config['clients']}, d = {config['d']}, m = {config['m']}, n = {config['n_train']} a client"
    replicates = f"{config['replicates']} replicate" + "s" * (config["replicates"] > 1)
    runs = f"{config['rounds']} rounds, {replicates}, seed {config['seed']}"
    return f"{_BARS}; {scale}; {runs}; {attrs['source']} {attrs['revision']}".strip()


def _grid(runs: Sequence[xr.DataTree], *, moving: bool) -> Figure:
    """Rows of panels, with one legend above and one caption below."""
    for run in runs:
        if not is_study(run):
            raise refusal("study_grid" if moving else "accuracy_grid", "runs of fedstat.sim.study", run)
    rows = [row for run in runs for row in _rows(study_dataset(run))]
    paired = any(_REFERENCE in row["method"].values for row in rows)
    moving = moving and any("same_state" in row for row in rows)
    columns = 1 + paired + moving
    figure = plt.figure(figsize=(5 * columns, 3.3 * len(rows) + 1.1), layout="constrained")
    grid, panels = figure.add_gridspec(len(rows), columns), []
    for i, row in enumerate(rows):
        panels.append(accuracy(row, ax=figure.add_subplot(grid[i, 0])))
        if _REFERENCE in row["method"].values:
            panels += _differences(figure, grid[i, 1], row)
        if moving and "same_state" in row:
            stability(row, ax=figure.add_subplot(grid[i, columns - 1]))
    one_legend(figure, panels)
    caption(figure, _DIFFERENCES * paired, *dict.fromkeys(map(origin, runs)))
    return figure


def _differences(figure: Figure, place: SubplotSpec, result: xr.Dataset) -> list[Axes]:
    """Paired differences in one panel, or in two where a few methods would squeeze all others to a line."""
    far = _far(result)
    if not far:
        return [accuracy(result, relative_to=_REFERENCE, ax=figure.add_subplot(place))]
    parts = place.subgridspec(2, 1, height_ratios=(2.4, 1), hspace=0.05)
    top = figure.add_subplot(parts[0])
    bottom = figure.add_subplot(parts[1], sharex=top)
    below = result["method"].isin(far)
    accuracy(result.where(~below), relative_to=_REFERENCE, ax=top)
    accuracy(result.where(below | (result["method"] == _REFERENCE)), relative_to=_REFERENCE, ax=bottom)
    top.tick_params(labelbottom=False)
    top.set_xlabel("")
    bottom.set(title="", ylabel="\n".join(far))
    return [top, bottom]


def _far(result: xr.Dataset) -> list[str]:
    """Methods beside which the differences of all others are small; none where these are not a few."""
    values = result["accuracy"]
    others = values.sel({"method": values["method"] != _REFERENCE})
    mean = (others - values.sel({"method": _REFERENCE}, drop=True)).mean("replicate")
    reach = abs(mean).max([dim for dim in mean.dims if dim != "method"])
    far = [str(name) for name in reach["method"].values[(reach > reach.max() / 3).values]]
    return far if 2 * len(far) < reach.size else []


def _rows(result: xr.Dataset) -> list[xr.Dataset]:
    if result.sizes["p"] == 1:
        return [result]
    return [result.isel(alpha=[i]) for i in range(result.sizes["alpha"])]
