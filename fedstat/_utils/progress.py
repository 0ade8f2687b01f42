"""Progress on stderr: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from tqdm import tqdm

EVERY = 30.0
"""Seconds between two lines, and before the first: what is done sooner says nothing."""


class Lines:
    """Progress for a log file, with the methods of a bar that are used here.

    Parameters
    ----------
    total : int
    unit : str
        What is counted, as "round".
    """

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done, self.label = total, unit, 0, ""
        self._begun = self._said = time.monotonic()
        self._before: int | None = None

    def update(self, n: float | None = 1) -> None:
        """Count ``n`` more; the first call counts what was done before, by an earlier process."""
        self.done += int(n or 0)
        if self._before is None:
            self._before = self.done
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            spent, made = now - self._begun, self.done - self._before
            left = f", about {_time(spent / made * (self.total - self.done))} left" if made > 0 else ""
            name = f"{self.label}: " if self.label else ""
            sys.stderr.write(f"{name}{self.done} of {self.total} {self.unit}s, {_time(spent)}{left}\n")
            sys.stderr.flush()

    def set_description(self, desc: str | None = None) -> None:
        """Name what is under way."""
        self.label = desc or ""

    def close(self) -> None:
        """Do nothing: there is no bar to remove."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def shown(total: int, unit: str, *, label: str = "", show: bool = True, leave: bool = True) -> Any:
    """A bar where stderr is a terminal, else :class:`Lines`; nothing unless ``show``."""
    if show and not sys.stderr.isatty():
        lines = Lines(total, unit)
        lines.set_description(label)
        return lines
    return tqdm(total=total, unit=unit, desc=label or None, leave=leave, disable=not show)
