"""Work handed to any ``concurrent.futures.Executor``, or a plain loop, and its progress on stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Self, TypeVar

from threadpoolctl import threadpool_limits
from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")
# Items on their way at once: enough for a cluster, and no more matrices in memory than clients often have.
_AHEAD = 64


def as_done(
    executor: Executor | None, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Callable[[], Result]]]:
    """Yield each item with a callable that returns what the work made of it, or raises, as the items are finished.

    Parameters
    ----------
    executor : Executor, optional
        Without one, the callable does the work itself: a plain loop, in the order of the items.
    work : callable (item)
        Can be pickled, and so can items and results, if the executor needs that.
    items : iterable

    Notes
    -----
    What has not begun when the loop is left is cancelled.

    Examples
    --------
    >>> [result() for _, result in as_done(None, abs, [-1, 2])]
    [1, 2]
    """
    if executor is None:
        for item in items:
            yield item, partial(work, item)
        return
    futures = {executor.submit(_beside_others, work, item): item for item in items}
    try:
        for future in as_completed(list(futures)):
            yield futures.pop(future), future.result
    finally:
        for future in futures:
            future.cancel()


def in_order(executor: Executor | None, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``map(work, items)`` by an executor, if there is one, a bounded number of items ahead.

    With an executor, work and items are made on one BLAS thread each, so that results are the same to the bit whatever
    the executor and its workers: several threads change the last digits of eigenvectors of 300 units and more.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(in_order(pool, abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    if executor is None:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    try:
        with one_blas_thread():
            for item in items:
                waiting.append(executor.submit(_beside_others, work, item))
                if len(waiting) == _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _beside_others(work: Callable[[Item], Result], item: Item) -> Result:
    with one_blas_thread():
        return work(item)


class _OneThread:
    """How many threads of this process want BLAS on one thread now, and the limit that the first of them set."""

    lock = Lock()
    users = 0
    limit: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on one thread, until all threads of this process that ask for it at the same time have ended."""
    with _OneThread.lock:
        _OneThread.users += 1
        if _OneThread.users == 1:
            _OneThread.limit = threadpool_limits(1, user_api="blas")
    try:
        yield
    finally:
        with _OneThread.lock:
            _OneThread.users -= 1
            if not _OneThread.users:
                _OneThread.limit.restore_original_limits()


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
