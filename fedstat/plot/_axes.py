"""Where a figure is drawn that was given no axes, and how rows are named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

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
