"""Work in any ``concurrent.futures.Executor`` or in a plain loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from threadpoolctl import threadpool_info, threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")
# Submitted items at a time: enough for a cluster, and few enough for matrices of as many clients in memory.
_AHEAD = 64


def as_done(
    executor: Executor | None, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Callable[[], Result]]]:
    """Yield each finished item with a callable that returns the result of the work, or raises its error.

    Parameters
    ----------
    executor : Executor, optional
        If None, the callable does the work: a plain loop, in the order of the items.
    work : callable (item)
        If the executor pickles, then work, items and results must be picklable.
    items : iterable

    Notes
    -----
    When the caller leaves the loop, work that has not begun is canceled.

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


def in_order(
    executor: Executor | None, work: Callable[[Item], Result], items: Iterable[Item], *, ahead: int | None = None
) -> Iterator[Result]:
    """Yield ``map(work, items)``, in an executor if there is one, with at most ``ahead`` items submitted (64).

    With an executor, items are drawn and processed on one BLAS thread each. Results are then equal to the bit for all
    executors and numbers of workers: several threads change the last digits of eigenvectors of 300 units or more.

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
                if len(waiting) == (_AHEAD if ahead is None else ahead):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _beside_others(work: Callable[[Item], Result], item: Item) -> Result:
    with one_blas_thread():
        return work(item)


def threads_of_blas(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``map(work, items)`` in as many threads as BLAS has, each with one BLAS thread, and few items in memory.

    Decompositions of hundreds of units gain little from several BLAS threads, and results depend on their number.
    Here they do not.
    """
    n = max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
    if n == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(n) as pool:
        yield from in_order(pool, work, items, ahead=2 * n)


class _OneThread:
    """Number of threads of this process that now need BLAS on one thread, and the limit that the first of them set."""

    lock = Lock()
    users = 0
    limit: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run BLAS on one thread until all threads of this process have left this context."""
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
