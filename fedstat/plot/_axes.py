"""Where a figure is drawn that was given no axes."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def given(ax: Axes | None) -> Axes:
    """Return the axes or, without them, the current ones; those of a new figure if the current ones are in use."""
    if ax is not None:
        return ax
    current = plt.gca()
    return plt.figure().gca() if current.has_data() else current
