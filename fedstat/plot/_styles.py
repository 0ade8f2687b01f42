"""Titles, colors, markers, line styles and order of methods, equal in all figures.

Most hues are Okabe and Ito's (2008), which color-blind readers can tell apart, and some are Tol's (2021). Methods of
later papers have hues far from these in CIELAB. Markers and line styles distinguish methods with similar hues.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import to_hex, to_rgb

from fedstat.plot._figure import gray, literal
from fedstat.sim import experiment
from fedstat.study import collect


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
_TITLES = experiment.TITLES | {"fedavg-matched": "FedAvg, kernel of equal trace"}
_NAMES = {title: _SPLITS.get(name, name) for name, title in (_TITLES | collect.METHODS).items()} | _SPLITS
_OTHERS = ("#b2182b", "#e7298a", "#4d9221", "#762a83")
_MARKERS, _DASHES = "os^DvPX<>phHd8*", ((), _DASHED, _DOTTED, _DASHDOT, _LONG)


def title_of(method: str) -> str:
    """Return the name of a method in legends and on axes: its title in tables; of a user's method, its name.

    Examples
    --------
    >>> title_of("fedfac-dynamic"), title_of("static"), title_of("fedprox, mu=0.1"), title_of("mine")
    ('FedFac dynamic', 'FedFac static', 'FedProx, mu=0.1', 'mine')
    """
    return literal(_TITLES.get(method) or collect.title_of(method))


def style_of(method: str) -> Style:
    """Return the plotting style of a method.

    The style is equal in all figures, unless a figure shows two methods outside the table that would look alike. On a
    dark page, dark colors are lighter, and black is the color of text.

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
    return _on_page(next(_candidates(method)))


def _on_page(style: Style) -> Style:
    """Return the style with a color that is visible on a dark page: black as the color of text, dark colors lighter."""
    color = np.array(to_rgb(style.colour))
    lacking = 0.35 - color @ (0.2126, 0.7152, 0.0722)
    if np.mean(gray(1)) > 0.5 or lacking <= 0:
        return style
    visible = color + lacking * (1 - color) if color.any() else gray(0)
    return style._replace(colour=to_hex(visible))


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
        styles[name] = next(distinct, free[0] if free else next(_candidates(name)))
    return {name: _on_page(styles[name]) for name in names}


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
