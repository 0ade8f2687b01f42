"""Axes, labels, colors, captions and inputs that all plots share.

Most hues are Okabe and Ito's (2008), which color-blind readers can tell apart, and some are Tol's (2021). Methods of
later papers have hues far from these in CIELAB. Markers and line styles distinguish methods with similar hues.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
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
from fedstat.study.collect import METHODS

SHARED, PERSONAL, DEAD = "#1f4e8c", "#f0a43a", "#d9d9d9"
"""Dark and light, so that they differ in grayscale, too."""

RunOrPath = xr.DataTree | str | PathLike[str]
"""A run, or the path of its store."""
ResultPath = str | PathLike[str]
"""Path of a saved result, or of the store of a study."""

_LONGEST = 28
_LEGIBLE = 5.0  # points


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


def name_rows(ax: Axes, positions: Sequence[float], names: Iterable[object], *, height: float) -> None:
    """Name the rows on the left; where rows are too narrow for legible text, name every k-th row.

    Parameters
    ----------
    ax : matplotlib Axes
    positions : sequence of float
        Position of each row on the y axis.
    names : iterable
        Name of each row; long names end in an ellipsis.
    height : float
        Height of all rows together, in the units of ``positions``.
    """
    points = 72 * ax.bbox.height / ax.figure.dpi / height
    step = int(np.ceil(_LEGIBLE / max(points, 1e-9)))
    shown = [plain(name) for name in names]
    size = float(np.clip(0.8 * points * step, _LEGIBLE, plt.rcParams["font.size"]))
    ax.set_yticks(list(positions)[::step], shown[::step], fontsize=size)


def plain(name: object) -> str:
    """Return a name as text, not as a formula, and shorten it so that the figure keeps its width."""
    text = " ".join(str(name).split())
    return literal(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def literal(name: object) -> str:
    """Escape a name for Matplotlib: $ starts no formula, and a leading _ does not hide it from legends."""
    text = str(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


_LETTERS = 17  # letters of a caption per inch


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


def interval(values: ArrayLike) -> tuple[float, float]:
    """Return the 95% t interval of the mean, in the form of seaborn's ``errorbar``.

    The limits are NaN if there is one value, or if all values are equal.

    Examples
    --------
    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0, np.nan])]
    [-0.484, 4.484]
    """
    x = np.asarray(values, dtype=np.float64)
    estimate = resampling.mean(x[np.isfinite(x)])
    return estimate.low, estimate.high


def one_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Replace the legends of the axes by one legend above the figure that shows each name once."""
    handles: dict[str, Any] = {}
    for ax in axes:
        if (legend := ax.get_legend()) is not None:
            names = [text.get_text() for text in legend.get_texts()]
            handles |= {name: h for name, h in zip(names, legend.legend_handles, strict=True) if name not in handles}
            legend.remove()
    if handles:
        width = 0.75 * _LETTERS * figure.get_figwidth()
        is_one_row = sum(len(name) + 6 for name in handles) <= width
        columns = len(handles) if is_one_row else max(1, int(width / (max(map(len, handles)) + 6)))
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, frameon=False)


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


class Style(NamedTuple):
    """Color, marker and dashes of a method.

    Attributes
    ----------
    colour : str
        Hexadecimal color.
    marker : str
        Filled marker of Matplotlib.
    dashes : tuple of float
        Lengths of dash and gap, in line widths; empty for a solid line.
    """

    colour: str
    marker: str
    dashes: tuple[float, ...] = ()

    @property
    def linestyle(self) -> Any:
        """Line style for Matplotlib."""
        return (0, self.dashes) if self.dashes else "-"


_DASHED, _DOTTED, _DASHDOT, _LONG = (4.0, 1.5), (1.0, 1.0), (3.0, 1.25, 1.5, 1.25), (7.0, 2.0)

STYLES = {
    "local": Style("#707070", "<", _DOTTED),
    "fedavg": Style("#0072b2", "X"),
    "fedavg-matched": Style("#56b4e9", "P", _DASHDOT),
    "fedavg+": Style("#00426b", "P", _DASHED),
    "fedavg-shrunken": Style("#6fa8dc", "h", _DASHDOT),
    "fedprox": Style("#44aa99", "v"),
    "fedprox+": Style("#1b5e53", "^", _DASHED),
    "per-fedavg": Style("#2e5305", "d", _DASHED),
    "per-fedavg-hf": Style("#8a9f6a", "d", _DOTTED),
    "pfedme": Style("#389632", "p"),
    "ditto": Style("#ed5d51", "D", _DASHED),
    "fedper": Style("#882255", "p", _LONG),
    "lg-fedavg": Style("#aa4499", ">", _DASHDOT),
    "fedbn": Style("#c1966e", "<"),
    "fedrep": Style("#cc6677", "h", _DASHED),
    "fedrod": Style("#ae0e3d", ">"),
    "fedphp": Style("#de468f", "H"),
    "pfedsd": Style("#a12c0d", "h"),
    "fedem": Style("#999933", "*"),
    "clustered-fl": Style("#108ea3", "8"),
    "fedamp": Style("#0896fe", "*", _DASHED),
    "fedfomo": Style("#7f6998", "X", _DASHED),
    "fedcac": Style("#d682eb", "s"),
    "pfedgate": Style("#58441a", "v", _DASHED),
    "pfedpara": Style("#e89048", "p", _DASHDOT),
    "fedsplit": Style("#000000", "o"),
    "oracle": Style("#56b4e9", "s", _DASHED),
    "random": Style("#009e73", "v", _DASHDOT),
    "random-redrawn": Style("#cc79a7", "P", _DOTTED),
    "fedfac-static": Style("#d55e00", "^", _DASHED),
    "fedfac-dynamic": Style("#e69f00", "D"),
    "factorized-fl-alpha": Style("#332288", "d"),
    "factorized-fl-beta": Style("#7766cc", "H", _DASHED),
    "feddecomp": Style("#8c510a", "8", _DASHDOT),
    "fedcp": Style("#661100", "s", _LONG),
}
"""Style of every method; legends and axes of all figures follow the order of this table."""

_SPLITS = {"true": "fedsplit", "static": "fedfac-static", "dynamic": "fedfac-dynamic"}
_NAMES = {title: name for name, title in METHODS.items()} | _SPLITS
_OTHERS = ("#b2182b", "#e7298a", "#4d9221", "#762a83")
_MARKERS, _DASHES = "os^DvPX<>phHd8*", ((), _DASHED, _DOTTED, _DASHDOT, _LONG)


def style_of(method: str) -> Style:
    """Return the plotting style of a method.

    The style is equal in all figures, unless a figure shows two methods outside the table that would look alike.

    Parameters
    ----------
    method : str
        Name of a method of :mod:`fedstat.fl.algorithms`, its title in tables, or a splitting rule of
        :func:`fedstat.sim.study`, whose ``true`` is FedSplit. A variant (``"fedprox, mu=0.1"``, ``"fedavg-low-rank"``)
        has the color of its method, but another marker and line style. The style of any other name follows from a
        checksum of its letters.

    Returns
    -------
    Style
        ``colour``, ``marker``, ``dashes`` (lengths in line widths), ``linestyle``.

    Examples
    --------
    >>> style_of("fedfac-dynamic")
    Style(colour='#e69f00', marker='D', dashes=())
    >>> style_of("FedFac dynamic") == style_of("dynamic")
    True
    >>> style_of("fedprox, mu=0.1").colour == style_of("fedprox").colour
    True
    """
    return next(_candidates(method))


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """Return styles of a figure's methods: no two share color and marker, nor, if possible, color and line.

    Parameters
    ----------
    methods : iterable of str
        Methods of the figure; their order does not change the styles.

    Returns
    -------
    dict from str to Style
        The styles of :func:`style_of`. Of two names outside the table that would look alike, the second in the
        alphabet gets another style.

    Examples
    --------
    >>> style_of("ours")[:2] == style_of("gpfl")[:2]
    True
    >>> len({style[:2] for style in styles_of(["ours", "gpfl"]).values()})
    2
    """
    names = list(dict.fromkeys(methods))
    styles: dict[str, Style] = {}
    for name in sorted(names, key=lambda name: (_NAMES.get(name, name) not in STYLES, name)):
        points = {(style.colour, style.marker) for style in styles.values()}
        lines = {(style.colour, style.dashes) for style in styles.values()}
        free = [style for style in _candidates(name) if (style.colour, style.marker) not in points]
        distinct = (style for style in free if (style.colour, style.dashes) not in lines)
        styles[name] = next(distinct, free[0] if free else style_of(name))
    return {name: styles[name] for name in names}


def _candidates(method: str) -> Iterator[Style]:
    """Iterate over the styles that a method may have, the preferred one first; methods of the table have only one."""
    base = _base(method)
    if base and base == _NAMES.get(method, method):
        yield STYLES[base]
        return
    code = zlib.crc32(method.encode())
    colours = (STYLES[base].colour,) if base else _OTHERS
    for i in range(len(colours) * len(_MARKERS)):
        marker, dashes = _MARKERS[(code // 7 + i) % len(_MARKERS)], _DASHES[(code // 131 + i) % len(_DASHES)]
        yield Style(colours[(code + i) % len(colours)], marker, dashes)


def ordered(methods: Iterable[str]) -> list[str]:
    """Return the methods in the order of all figures: by the table of styles, variants after their method, others last.

    Parameters
    ----------
    methods : iterable of str

    Returns
    -------
    list of str

    Examples
    --------
    >>> ordered(["mine", "dynamic", "true", "fedavg, lr=0.1", "fedavg", "local"])
    ['local', 'fedavg', 'fedavg, lr=0.1', 'true', 'dynamic', 'mine']
    """
    table = list(STYLES)

    def index(method: str) -> int:
        base = _base(method)
        return table.index(base) if base else len(table)

    names = list(dict.fromkeys(methods))
    return sorted(names, key=lambda m: (index(m), m not in STYLES and m not in _NAMES))


def _base(method: str) -> str:
    """Return the method of the table whose name or variant this is; an empty string if there is none."""
    name = _NAMES.get(method, method)
    if name in STYLES:
        return name
    bases = {**{n: n for n in STYLES}, **_NAMES}
    prefixes = [n for n in bases if name.startswith(n) and name[len(n)] in "-+, "]
    return bases[max(prefixes, key=len)] if prefixes else ""
