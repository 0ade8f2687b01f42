"""What all plots have in common: axes, labels, colors, inputs and saved figures.

Hues are Okabe and Ito's (2008), which colour-blind readers keep apart, for other methods some of Tol's (2021), and for
those of later papers hues far from these in CIELAB; markers and line styles tell apart what they leave alike.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from fedstat._utils import check
from fedstat.results import BootstrapResult, ByLayer, PermutationResult, SplitResult, StabilityResult
from fedstat.stats import resampling
from fedstat.study import summary
from fedstat.study.collect import METHODS

SHARED, PERSONAL, DEAD = "#1f4e8c", "#f0a43a", "#d9d9d9"
"""Dark and light, so that grey keeps them apart."""

_LONGEST = 28
_LEGIBLE = 5.0  # points


def given(ax: Axes | None, size: tuple[float, float] = (6.4, 4.8)) -> Axes:
    """Return the axes or, without them, those of a new figure of this width and height in inches."""
    return plt.figure(figsize=size, layout="constrained").subplots() if ax is None else ax


def name_rows(ax: Axes, at: Sequence[float], names: Iterable[object], *, height: float) -> None:
    """Name the rows on the left, small where they are narrow, and only every so many where they are too narrow.

    Parameters
    ----------
    ax : matplotlib Axes
    at : sequence of float
        Where the rows are.
    names : iterable
        Long ones are cut off visibly.
    height : float
        Of all rows, in the units of ``at``.
    """
    points = 72 * ax.bbox.height / ax.figure.dpi / height
    step = int(np.ceil(_LEGIBLE / max(points, 1e-9)))
    shown = [plain(name) for name in names]
    size = float(np.clip(0.8 * points * step, _LEGIBLE, plt.rcParams["font.size"]))
    ax.set_yticks(list(at)[::step], shown[::step], fontsize=size)


def plain(name: object) -> str:
    """Name as text, not as a formula, and cut to a length that leaves room for the figure."""
    text = " ".join(str(name).split())
    return literal(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def literal(name: object) -> str:
    """Name as Matplotlib shows it unchanged: $ is no mathematics, and a leading _ does not hide it from legends."""
    text = str(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


_LETTERS = 17  # of a caption, in an inch


def caption(figure: Figure, *notes: str) -> None:
    """Write notes below a figure, wrapped to its width.

    Parameters
    ----------
    figure : matplotlib Figure
        Laid out by ``layout="constrained"``, so that its axes make room.
    *notes : str
        Every one begins a line; empty ones are left out.

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> figure = plt.figure(figsize=(3, 2), layout="constrained")
    >>> caption(figure, "bars: 95 % intervals over replicates, by Student's t", "seed 0")
    >>> print(figure.get_supxlabel())
    bars: 95 % intervals over replicates, by
    Student's t
    seed 0
    >>> plt.close(figure)
    """
    width = int(_LETTERS * figure.get_figwidth())
    lines = [line for note in notes if note for line in textwrap.wrap(note, width)]
    figure.supxlabel("\n".join(lines), fontsize="x-small", color="0.35", linespacing=1.3)


def interval(values: ArrayLike) -> tuple[float, float]:
    """Student's 95 % interval of a mean, as seaborn's ``errorbar`` takes it; NaN of one value, or of equal ones.

    Examples
    --------
    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0, np.nan])]
    [-0.484, 4.484]
    """
    x = np.asarray(values, dtype=np.float64)
    found = resampling.mean(x[np.isfinite(x)])
    return found.low, found.high


def one_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend above a figure, without a title, in place of those of these axes, which show the same."""
    found: dict[str, Any] = {}
    for ax in axes:
        if (legend := ax.get_legend()) is not None:
            names = [text.get_text() for text in legend.get_texts()]
            found |= {name: h for name, h in zip(names, legend.legend_handles, strict=True) if name not in found}
            legend.remove()
    if found:
        room = 0.75 * _LETTERS * figure.get_figwidth()
        one_row = sum(len(name) + 6 for name in found) <= room
        columns = len(found) if one_row else max(1, int(room / (max(map(len, found)) + 6)))
        figure.legend(found.values(), found, loc="outside upper center", ncols=columns, frameon=False)


def refusal(figure: str, takes: str, got: object, way_out: str = "") -> TypeError:
    """Error for what a figure cannot mean."""
    if isinstance(got, ByLayer):
        way_out = f"Choose one of the layers {', '.join(got)}, as plot.{figure}(result[{next(iter(got))!r}])."
    end = f" {way_out}" if way_out else ""
    return TypeError(f"plot.{figure} takes {takes}, but got {type(got).__name__}.{end}")


def split_behind(result: object) -> SplitResult | None:
    """The split that a result is, or that it tells how certain is; else None."""
    if isinstance(result, BootstrapResult | PermutationResult):
        return result.split
    if isinstance(result, StabilityResult):
        return result.reference
    return result if isinstance(result, SplitResult) else None


def split_of_run(run: xr.DataTree, layer: str | None) -> xr.Dataset:
    """Node ``/split/<layer>`` of a run, of the layer that was split unless one is named; or the node itself."""
    if "split" not in run.children:
        if "shared" in run.data_vars:
            return run.to_dataset()
        raise ValueError("the run has no group 'split': nothing in it was split. Use a method such as fedfac.")
    layers = {name: node.to_dataset() for name, node in run["split"].children.items()}
    if layer is not None:
        return layers[check.choice("layer", layer, list(layers))]
    split = [name for name, data in layers.items() if "communality" in data and data["communality"].notnull().any()]
    split = split or [name for name, data in layers.items() if data["shared"].any() and not data["shared"].all()]
    if len(split) != 1:
        raise ValueError(f"layer must be one of {split or list(layers)}, but none was named")
    return layers[split[0]]


def measure_of_run(run: xr.DataTree, dims: set[str]) -> xr.DataArray:
    """The one array of a run, outside of its metrics, that has these dims."""
    found = {
        f"{node.path.lstrip('/')}/{name}": data
        for node in run.subtree
        for name, data in node.data_vars.items()
        if set(data.dims) == dims and node.path != "/metrics"
    }
    if len(found) != 1:
        which = f"{len(found)}: {', '.join(found)}. Pass one of them, run[name]" if found else "none"
        raise ValueError(f"the run must have one array over {', '.join(sorted(dims))}, but has {which}")
    return next(iter(found.values()))


def over_runs(data: object, table: Callable[[xr.DataTree], pd.DataFrame]) -> pd.DataFrame | None:
    """Tables of a run, of several, or of runs by their names, one under another, with method and seed; else None."""
    runs: list[tuple[str | None, Any]]
    if isinstance(data, Mapping) and not isinstance(data, xr.DataTree | pd.DataFrame | xr.Dataset):
        runs = [(str(name), run) for name, run in data.items()]
    else:
        runs = [(None, run) for run in (data if isinstance(data, Sequence) else [data])]
    if not runs or not all(isinstance(run, xr.DataTree) for _, run in runs):
        return None
    parts = []
    for name, run in runs:
        config = summary.config_of(run)
        method = name or str(config.get("algorithm", run.attrs.get("title", "run")))
        parts.append(table(run).assign(method=method, seed=config.get("seed", run.attrs.get("seed", 0))))
    return pd.concat(parts, ignore_index=True)


class Look(NamedTuple):
    """How a method is drawn.

    Attributes
    ----------
    colour : str
    marker : str
        Of Matplotlib; filled.
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

LOOKS = {
    "local": Look("#707070", "<", _DOTTED),
    "fedavg": Look("#0072b2", "X"),
    "fedavg-matched": Look("#56b4e9", "P", _DASHDOT),
    "fedavg+": Look("#00426b", "P", _DASHED),
    "fedavg-shrunken": Look("#6fa8dc", "h", _DASHDOT),
    "fedprox": Look("#44aa99", "v"),
    "fedprox+": Look("#1b5e53", "^", _DASHED),
    "per-fedavg": Look("#2e5305", "d", _DASHED),
    "per-fedavg-hf": Look("#8a9f6a", "d", _DOTTED),
    "pfedme": Look("#389632", "p"),
    "ditto": Look("#ed5d51", "D", _DASHED),
    "fedper": Look("#882255", "p", _LONG),
    "lg-fedavg": Look("#aa4499", ">", _DASHDOT),
    "fedbn": Look("#c1966e", "<"),
    "fedrep": Look("#cc6677", "h", _DASHED),
    "fedrod": Look("#ae0e3d", ">"),
    "fedphp": Look("#de468f", "H"),
    "pfedsd": Look("#a12c0d", "h"),
    "fedem": Look("#999933", "*"),
    "clustered-fl": Look("#108ea3", "8"),
    "fedamp": Look("#0896fe", "*", _DASHED),
    "fedfomo": Look("#7f6998", "X", _DASHED),
    "fedcac": Look("#d682eb", "s"),
    "pfedgate": Look("#58441a", "v", _DASHED),
    "pfedpara": Look("#e89048", "p", _DASHDOT),
    "fedsplit": Look("#000000", "o"),
    "oracle": Look("#56b4e9", "s", _DASHED),
    "random": Look("#009e73", "v", _DASHDOT),
    "random-redrawn": Look("#cc79a7", "P", _DOTTED),
    "fedfac-static": Look("#d55e00", "^", _DASHED),
    "fedfac-dynamic": Look("#e69f00", "D"),
    "factorized-fl-alpha": Look("#332288", "d"),
    "factorized-fl-beta": Look("#7766cc", "H", _DASHED),
    "feddecomp": Look("#8c510a", "8", _DASHDOT),
    "fedcp": Look("#661100", "s", _LONG),
}
"""How every method looks; the order of this table is that of legends and axes, in all figures."""

_SPLITS = {"true": "fedsplit", "static": "fedfac-static", "dynamic": "fedfac-dynamic"}
_NAMES = {title: name for name, title in METHODS.items()} | _SPLITS
_OWN = ("#b2182b", "#e7298a", "#4d9221", "#762a83")
_MARKERS, _STYLES = "os^DvPX<>phHd8*", ((), _DASHED, _DOTTED, _DASHDOT, _LONG)


def look(method: str) -> Look:
    """Return the look of a method: the same in every figure, unless another method of one's own has it.

    Parameters
    ----------
    method : str
        Name of a method of :mod:`fedstat.fl.algorithms`, its title in tables, or a way to split of
        :func:`fedstat.sim.study`, whose ``true`` is FedSplit. A variant (``"fedprox, mu=0.1"``, ``"fedavg-low-rank"``)
        has the colour of its method and a marker and line style of its own; any other name has a look by its letters.

    Returns
    -------
    Look
        ``colour``, ``marker``, ``dashes`` (lengths in line widths), ``linestyle``.

    Examples
    --------
    >>> look("fedfac-dynamic")
    Look(colour='#e69f00', marker='D', dashes=())
    >>> look("FedFac dynamic") == look("dynamic"), look("fedprox, mu=0.1").colour == look("fedprox").colour
    (True, True)
    """
    return next(_candidates(method))


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """Return the looks of a figure's methods: no two share color and marker, nor, if possible, color and line.

    Parameters
    ----------
    methods : iterable of str
        Of the figure, in any order, on which nothing depends.

    Returns
    -------
    dict from str to Look
        As :func:`look`; of names that are in no table, and would look alike, the later one by alphabet has another.

    Examples
    --------
    >>> look("ours")[:2] == look("gpfl")[:2], len({one[:2] for one in looks(["ours", "gpfl"]).values()})
    (True, 2)
    """
    names = list(dict.fromkeys(methods))
    found: dict[str, Look] = {}
    for name in sorted(names, key=lambda name: (_NAMES.get(name, name) not in LOOKS, name)):
        points = {(one.colour, one.marker) for one in found.values()}
        lines = {(one.colour, one.dashes) for one in found.values()}
        free = [one for one in _candidates(name) if (one.colour, one.marker) not in points]
        apart = (one for one in free if (one.colour, one.dashes) not in lines)
        found[name] = next(apart, free[0] if free else look(name))
    return {name: found[name] for name in names}


def _candidates(method: str) -> Iterator[Look]:
    """The look of a method of the table; else one by its letters, and others with each colour and marker."""
    base = _base(method)
    if base and base == _NAMES.get(method, method):
        yield LOOKS[base]
        return
    code = zlib.crc32(method.encode())
    colours = (LOOKS[base].colour,) if base else _OWN
    for i in range(len(colours) * len(_MARKERS)):
        marker, dashes = _MARKERS[(code // 7 + i) % len(_MARKERS)], _STYLES[(code // 131 + i) % len(_STYLES)]
        yield Look(colours[(code + i) % len(colours)], marker, dashes)


def ordered(methods: Iterable[str]) -> list[str]:
    """Methods in the order of all figures: that of the table of looks, variants after their method, others last.

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
    places = list(LOOKS)

    def place(method: str) -> int:
        base = _base(method)
        return places.index(base) if base else len(places)

    names = list(dict.fromkeys(methods))
    return sorted(names, key=lambda m: (place(m), m not in LOOKS and m not in _NAMES))


def _base(method: str) -> str:
    """The method in the table that this one is or is a variant of; empty if there is none."""
    name = _NAMES.get(method, method)
    if name in LOOKS:
        return name
    known = {**{n: n for n in LOOKS}, **_NAMES}
    starts = [n for n in known if name.startswith(n) and name[len(n)] in "-+, "]
    return known[max(starts, key=len)] if starts else ""
