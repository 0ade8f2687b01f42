"""What figures share: captions that stay inside them, 95 % intervals, one legend for several axes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from fedstat.stats import resampling

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
