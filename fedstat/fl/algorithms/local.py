"""Local training."""

from __future__ import annotations

from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm, SharedMask

ABOUT = About("Local", shared="nothing", personal="everything", new_clients=("ensemble",))


def local() -> Algorithm:
    """Nothing is shared, and nothing goes up or down: every client trains alone from the common start."""
    return Algorithm("local", lambda context: SharedMask(masks.share_none(context.net, context.device)), about=ABOUT)
