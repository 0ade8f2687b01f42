"""One table of how methods look in every figure: their order, colour, marker and line style.

Hues are Okabe and Ito's (2008), which colour-blind readers keep apart, for other methods some of Tol's (2021), and for
those of later papers hues far from these in CIELAB; markers and line styles tell apart what they leave alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fedstat.study.show import METHODS


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
