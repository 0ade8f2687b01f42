"""Axes, labels, captions and inputs that all plots share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator
from numpy.typing import ArrayLike

from fedstat._utils import check
from fedstat.results import (
    BootstrapResult,
    JackknifeResult,
    LayerResults,
    PermutationResult,
    SensitivityResult,
    SplitResult,
)
from fedstat.stats import resampling
from fedstat.store import is_store, open_run, results
from fedstat.study import run_table

SHARED, PERSONAL, CONSTANT = "#1f4e8c", "#f0a43a", "#d9d9d9"
"""Dark and light, so that they differ in grayscale, too."""

RunOrPath = xr.DataTree | str | PathLike[str]
"""A run, or the path of its store."""
ResultPath = str | PathLike[str]
"""Path of a saved result, or of the store of a study."""

Prepared = TypeVar("Prepared")

_LONGEST = 28
_SMALLEST = 6.0  # size of text, in points


def get_axes(ax: Axes | None, size: tuple[float, float] = (6.4, 4.8)) -> Axes:
    """Return the axes; without any, create a figure of this width and height in inches."""
    return plt.figure(figsize=size, layout="constrained").subplots() if ax is None else ax


def gray(level: float) -> tuple[float, float, float]:
    """Return a gray of the current style: 0 is the color of its text, 1 that of the background of its axes.

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> with plt.style.context("default"):
    ...     light = gray(0.9)
    >>> with plt.style.context("dark_background"):
    ...     dark = gray(0.9)
    >>> round(light[0], 3), round(dark[0], 3)
    (0.9, 0.1)
    """
    page = plt.rcParams["axes.facecolor"]
    text, page = to_rgb(plt.rcParams["text.color"]), to_rgb("white" if page == "none" else page)
    red, green, blue = ((1 - level) * a + level * b for a, b in zip(text, page, strict=True))
    return red, green, blue


def sequential_colors(palette: str, n: int) -> list[tuple[float, float, float]]:
    """Return n colors of a sequential palette, without the end that is hard to see on the page of the style."""
    colors = sns.color_palette(palette, n + 1)
    is_dark, is_rising = np.mean(gray(1)) < 0.5, sum(colors[-1]) > sum(colors[0])
    return colors[1:] if is_dark == is_rising else colors[:-1]


class _Legible(Locator):
    """Positions of names on an axis; every k-th, where they would overlap after the layout.

    ``extent`` is the length of a name along the axis, in sizes of its text. The text has the size that fits when the
    names are set, but is legible and not larger than other text.
    """

    def __init__(self, axis: Axis, positions: Sequence[float], extent: float) -> None:
        self._ax, self._index, self._extent = axis.axes, int(axis is axis.axes.yaxis), extent
        self._positions = np.asarray(positions, dtype=float)
        fitting = self.fitting()
        self.size = min(fitting * max(1, math.ceil(_SMALLEST / fitting)), plt.rcParams["font.size"])

    def __call__(self) -> Any:
        """Return the positions of the names that are shown."""
        return self._positions[:: max(1, math.ceil(self.size / self.fitting() - 0.01))]

    def fitting(self) -> float:
        """Return the size of text in points that fits between all names; infinity if there is one name."""
        pixels = self._ax.transData.transform(np.column_stack([self._positions] * 2))[:, self._index]
        return 72 * float(np.abs(np.diff(pixels)).min(initial=np.inf)) / self._ax.figure.dpi / self._extent


def name_ticks(axis: Axis, positions: Sequence[float], names: Iterable[object]) -> None:
    """Name rows or columns in text that fits between them; where that would be too small, name every k-th.

    Parameters
    ----------
    axis : matplotlib Axis
        ``ax.yaxis`` for rows; ``ax.xaxis`` for columns, whose names are turned if they are wider than the columns. Its
        limits must be set.
    positions : sequence of float
        Position of each row or column on the axis.
    names : iterable
        Name of each; long names end in an ellipsis.
    """
    shown = dict(zip(map(float, positions), map(plain, names), strict=True))
    level = _Legible(axis, list(shown), 0.7 + 0.65 * max(map(len, shown.values()), default=0))
    is_turned = axis is axis.axes.xaxis and level.fitting() < 1.3 * plt.rcParams["font.size"]
    locator = _Legible(axis, list(shown), 1.25) if is_turned or axis is axis.axes.yaxis else level
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda position, _: shown.get(float(position), "")))
    axis.set_tick_params(labelsize=locator.size, labelrotation=90 * is_turned)


def plain(name: object) -> str:
    """Return a name as text, not as a formula, and shorten it so that the figure keeps its width."""
    text = " ".join(str(name).split())
    half = _LONGEST // 2
    return literal(text if len(text) <= _LONGEST else f"{text[:half]}…{text[1 - half :]}")


def literal(name: object) -> str:
    """Escape a name for Matplotlib: $ starts no formula, and a leading _ does not hide it from legends."""
    text = str(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def fill(text: str, ax: Axes) -> str:
    """Wrap each line of a label below the axes to their width."""
    width = int(_LETTERS * ax.bbox.width / ax.figure.dpi)
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


_LETTERS = 17  # letters of a caption per inch; a label, in larger text, may be wider than its axes


def caption(figure: Figure, *notes: str) -> None:
    """Write notes below a figure, wrapped to its width.

    Parameters
    ----------
    figure : matplotlib Figure
        Figure with ``layout="constrained"``, so that its axes make room.
    *notes : str
        Each note starts on a new line; empty notes are skipped.

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> figure = plt.figure(figsize=(3, 2), layout="constrained")
    >>> caption(figure, "Bars: 95% t intervals of the mean over replicates", "seed 0")
    >>> print(figure.get_supxlabel())
    Bars: 95% t intervals of the mean over
    replicates
    seed 0
    >>> plt.close(figure)
    """
    width = int(_LETTERS * figure.get_figwidth())
    lines = [line for note in notes if note for line in textwrap.wrap(note, width)]
    figure.supxlabel("\n".join(lines), fontsize="x-small", color=gray(0.35), linespacing=1.3)


def interval(values: ArrayLike, *, lowest: float = -np.inf, highest: float = np.inf) -> tuple[float, float]:
    """Return the 95% t interval of the mean, in the form of seaborn's ``errorbar``.

    The limits are cut off at the lowest and the highest possible value, and NaN if there is one value, or if all values
    are equal.

    Examples
    --------
    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0, np.nan])]
    [-0.484, 4.484]
    >>> [round(x, 3) for x in interval_of_proportion([0.9, 1.0])]
    [0.315, 1.0]
    """
    x = np.asarray(values, dtype=np.float64)
    estimate = resampling.mean(x[np.isfinite(x)])
    low, high = np.clip([estimate.low, estimate.high], lowest, highest)
    return float(low), float(high)


interval_of_proportion = partial(interval, lowest=0.0, highest=1.0)


def one_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Replace the legends of the axes by one legend above the figure that shows each name once."""
    handles: dict[str, Any] = {}
    for ax in axes:
        if (legend := ax.get_legend()) is not None:
            names = [text.get_text() for text in legend.get_texts()]
            handles |= {name: h for name, h in zip(names, legend.legend_handles, strict=True) if name not in handles}
            legend.remove()
    if handles:
        columns = columns_of_legend(handles, figure.get_figwidth())
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, frameon=False)


def columns_of_legend(names: Collection[str], width: float) -> int:
    """Return the number of columns of a legend of this width in inches."""
    letters = 0.75 * _LETTERS * width
    is_one_row = sum(len(name) + 6 for name in names) <= letters
    return len(names) if is_one_row else max(1, int(letters / (max(map(len, names)) + 6)))


def legend_above(ax: Axes, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Draw a legend above the axes, where it hides nothing, in as many columns as fit their width."""
    ax.legend(
        handles, names, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), borderaxespad=0.2, columnspacing=1,
        ncols=columns_of_legend(names, 1.2 * ax.bbox.width / ax.figure.dpi),
    )  # fmt: skip


def panel_grid(lengths: Sequence[int], size: tuple[float, float], **share: Any) -> tuple[Figure, list[Axes]]:
    """Create rows of panels, each of this width and height in inches, and return them row by row.

    Shared x axes have ticks and label below the last panel of each column, where a row below is shorter, too.

    Parameters
    ----------
    lengths : sequence of int
        Number of panels in each row.
    size : tuple of float
        Width and height of a panel in inches.
    **share
        ``sharex``, ``sharey`` of :func:`matplotlib.pyplot.subplots`.

    Returns
    -------
    matplotlib Figure
    list of matplotlib Axes
    """
    shape = len(lengths), max(lengths)
    figure, axes = plt.subplots(
        *shape, figsize=(size[0] * shape[1], size[1] * shape[0]), squeeze=False, layout="constrained", **share
    )
    is_used = np.arange(shape[1]) < np.reshape(lengths, (-1, 1))
    has_panel_below = np.vstack([is_used[1:], np.zeros(shape[1], bool)])
    for ax in axes[~is_used]:
        ax.remove()
    if share.get("sharex"):
        for ax in axes[is_used & has_panel_below]:
            ax.xaxis.label.set_visible(False)
        for ax in axes[is_used & ~has_panel_below]:
            ax.tick_params(labelbottom=True)
    return figure, list(axes[is_used])


def wrap_panels(n: int, columns: int) -> list[int]:
    """Return the lengths of the rows of n panels, at most so many side by side.

    Examples
    --------
    >>> wrap_panels(5, 3), wrap_panels(2, 3)
    ([3, 2], [2])
    """
    return [min(columns, n - start) for start in range(0, n, columns)]


def draw_layers(
    figure: str,
    result: Any,
    prepare: Callable[[Any], Prepared],
    draw: Callable[[Prepared, Axes | None], Axes],
    height: Callable[[Prepared], float],
    ax: Axes | None,
) -> Axes:
    """Draw a result; of several layers each in a panel below its name, with one x axis. Return the first panel."""
    if not isinstance(result, LayerResults):
        return draw(prepare(result), ax)
    if ax is not None:
        choice = f"Remove ax, or choose a layer, as plot.{figure}(result[{next(iter(result))!r}], ax=ax)."
        raise ValueError(f"ax must be None for several layers, each of which has a panel, but got one. {choice}")
    layers = {layer: prepare(of_layer) for layer, of_layer in result.items()}
    size = (4.8, max(map(height, layers.values())))
    canvas, panels = panel_grid(wrap_panels(len(layers), 3), size, sharex=True)
    for panel, (layer, prepared) in zip(panels, layers.items(), strict=True):
        draw(prepared, panel)
        panel.set_title("\n".join([literal(layer), panel.get_title()]).strip(), fontsize="medium")
    one_legend(canvas, panels)
    return panels[0]


def refusal(figure: str, takes: str, got: object, hint: str = "") -> TypeError:
    """Return the error for an argument of a type that a figure does not take."""
    if isinstance(got, LayerResults):
        hint = f"Choose one of the layers {', '.join(got)}, as plot.{figure}(result[{next(iter(got))!r}])."
    end = f" {hint}" if hint else ""
    return TypeError(f"plot.{figure} takes {takes}, but got {type(got).__name__}.{end}")


def sole(result: Any) -> Any:
    """Return the result of the only layer of a LayerResults; return everything else unchanged."""
    return next(iter(result.values())) if isinstance(result, LayerResults) and len(result) == 1 else result


def opened(data: Any, *, or_weights: bool = False) -> Any:
    """Return the run, or the saved result, at a path; return everything else unchanged.

    With ``or_weights``, paths of other files, such as those of clients' weights, are unchanged, too.
    """
    if not isinstance(data, str | PathLike):
        return data
    path = Path(data)
    if path.suffix.lower() == ".json":
        return results.load(path)
    if or_weights and not is_store(path):
        return data
    run = open_run(path)
    return results.load(path) if run.attrs.get("command") in (results.COMMAND, results.DECOMPOSE) else run


def split_behind(result: object) -> SplitResult | None:
    """Return the split of a result: itself, or the split whose uncertainty it measures; else None."""
    if isinstance(result, BootstrapResult | JackknifeResult | PermutationResult):
        return result.split
    if isinstance(result, SensitivityResult):
        return result.reference
    return result if isinstance(result, SplitResult) else None


def split_of_run(run: xr.DataTree, layer: str | None) -> xr.Dataset:
    """Return the node ``/split/<layer>`` of a run, or the node itself; by default that of the only split layer."""
    if "split" not in run.children:
        if "shared" in run.data_vars:
            return run.to_dataset()
        raise ValueError("the run has no group 'split', as its algorithm splits no layer. Use one such as fedfac.")
    layers = {name: node.to_dataset() for name, node in run["split"].children.items()}
    if layer is not None:
        return layers[check.choice("layer", layer, list(layers))]
    split = [name for name, data in layers.items() if "communality" in data and data["communality"].notnull().any()]
    split = split or [name for name, data in layers.items() if data["shared"].any() and not data["shared"].all()]
    if len(split) != 1:
        raise ValueError(f"layer must be one of {split or list(layers)}, but got None. Pass one as layer=.")
    return layers[split[0]]


def measure_of_run(run: xr.DataTree, dims: set[str]) -> xr.DataArray:
    """Return the only array of a run, outside of its metrics, that has these dims."""
    arrays = {
        f"{node.path.lstrip('/')}/{name}": data
        for node in run.subtree
        for name, data in node.data_vars.items()
        if set(data.dims) == dims and node.path != "/metrics"
    }
    if len(arrays) != 1:
        number = f"{len(arrays)}: {', '.join(arrays)}. Pass one of them, as run[name]" if arrays else "none"
        raise ValueError(f"the run must have one array over {', '.join(sorted(dims))}, but has {number}.")
    return next(iter(arrays.values()))


def concat_runs(data: Any, table: Callable[[xr.DataTree], pd.DataFrame]) -> pd.DataFrame | None:
    """Concatenate the tables of one run or path, a list or a dict of them, with method and seed; else return None."""
    runs: list[tuple[str | None, Any]]
    if isinstance(data, Mapping) and not isinstance(data, xr.DataTree | pd.DataFrame | xr.Dataset):
        runs = [(str(name), opened(run)) for name, run in data.items()]
    else:
        is_list = isinstance(data, Sequence) and not isinstance(data, str)
        runs = [(None, opened(run)) for run in (data if is_list else [data])]
    if not runs or not all(isinstance(run, xr.DataTree) for _, run in runs):
        return None
    parts = []
    for name, run in runs:
        config = run_table.config_of(run)
        method = name or str(config.get("algorithm", run.attrs.get("title", "run")))
        parts.append(table(run).assign(method=method, seed=config.get("seed", run.attrs.get("seed", 0))))
    return pd.concat(parts, ignore_index=True)
