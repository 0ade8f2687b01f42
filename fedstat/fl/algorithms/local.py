"""Local training."""

from __future__ import annotations

from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm, Sharing

ABOUT = About("Local", shared="nothing", own="everything", new_clients=("ensemble",))


def local() -> Algorithm:
    """Nothing is shared, and nothing goes up or down: every client trains alone from the common start."""
    return Algorithm("local", lambda start: Sharing(masks.nothing(start.net, start.device)), about=ABOUT)
