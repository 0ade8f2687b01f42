"""Loops over long work: in any ``concurrent.futures.Executor``, on threads or in place, with their progress.

Progress is a bar in terminals and notebooks, and plain lines elsewhere; an interrupt names what to do.

Nothing else in fedstat shows progress. Functions take ``progress``: True shows it, False does not, and None shows a bar
in a terminal or notebook if the work takes longer than two seconds.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Lock
from traceback import walk_tb
from types import FrameType
from typing import Any, ClassVar, Literal, Self, TypeVar

from threadpoolctl import threadpool_info, threadpool_limits
from tqdm import tqdm

from fedstat._utils import shell

Item = TypeVar("Item")
Result = TypeVar("Result")
_PLACES = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_LIBRARIES = ("<frozen ", str(Path(__file__).parents[1]), *_PLACES)
"""Prefixes of the names of files of libraries and this package."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment of a process that works beside others, whose libraries would each take all cores."""
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


DELAY = 2.0
"""Seconds after which a bar appears that was not requested."""
LINE_SECONDS = 5.0
"""Seconds before the first line and between two lines, without terminal and notebook; up to 60 in long work."""
_CELL = 72
"""Columns of a bar in a notebook: JupyterLab breaks lines of 78 columns if its window is 1,050 pixels wide."""
_BAR = 8
"""Columns that remain for the bar itself."""


class Bar:
    """Progress of one loop, a context; this class shows nothing."""

    def update(self, n: int = 1) -> object:
        """Count ``n`` more items."""

    def set_description(self, label: str) -> None:
        """Set the label of the current work."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def progress_bar(total: int, unit: str, progress: bool | None, *, label: str = "") -> Bar:
    """Return the progress of a loop; of nested loops, one bar shows the innermost, after the counts of the others.

    Parameters
    ----------
    total : int
        Number of items.
    unit : str
        Name of an item, such as "round".
    progress : bool or None
        True shows progress; without terminal and notebook, as a few lines on stderr. False shows nothing. None shows a
        bar in a terminal or notebook, after two seconds.
    label : str
        Name of the work.

    Raises
    ------
    ValueError
        If ``progress`` is something else.
    """
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress must be True, False or None, but got {progress!r}")
    place = None if progress is False else _place()
    if place is None or (place == "pipe" and progress is None):
        return Bar()
    return _Shown(total, unit, label, place=place, delay=0.0 if progress else DELAY)


@contextmanager
def track(
    items: Iterable[Item], unit: str, progress: bool | None, *, total: int | None = None
) -> Iterator[Iterator[Item]]:
    """Show how many items are done: a context with their iterator, whose bar ends with it, also after an error.

    ``total`` is the number of items, if they have no length.

    Examples
    --------
    >>> with track("ab", "letter", False) as letters:
    ...     list(letters)
    ['a', 'b']
    """
    if total is None:
        items = items if isinstance(items, Collection) else list(items)
        total = len(items)
    with progress_bar(total, unit, progress) as shown:
        yield _counted(items, shown)


def _counted(items: Iterable[Item], shown: Bar) -> Iterator[Item]:
    for item in items:
        yield item
        shown.update()


def say(text: str) -> None:
    """Print a line on stdout, above any bar."""
    _Shown.write(text, file=sys.stdout)
    sys.stdout.flush()


@contextmanager
def on_interrupt(hint: Callable[[], str]) -> Iterator[None]:
    """Add to a KeyboardInterrupt what is stored and how to resume; of nested contexts, the outermost says it.

    IPython and Jupyter then show the lines of the user and this hint; Python shows all lines.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        error.__notes__ = [hint()]
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_locals is not frame.f_globals:
                frame.f_locals["__tracebackhide__"] = True
        raise


def user_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the user's code, with their lines, through which an error and its causes passed.

    The last frame is the one nearest to the first cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in walk_tb(cause.__traceback__):
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                yield frame, line
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _place() -> Literal["notebook", "terminal", "pipe"]:
    if (running := shell()) is not None and "IPKernelApp" in running.config:
        return "notebook"
    return "terminal" if sys.stderr is not None and sys.stderr.isatty() else "pipe"


class _Shown(tqdm):
    """Bar of tqdm in a terminal; one output of a notebook, where widgets break without a kernel; lines elsewhere."""

    _open: ClassVar[list[_Shown]] = []
    _output: ClassVar[Any] = None  # of the notebook

    def __init__(self, total: int, unit: str, label: str, *, place: str, delay: float) -> None:
        counts = f"{{n_fmt}}/{{total_fmt}} {unit}s [{{elapsed}}<{{remaining}}]"
        bar = "" if place == "pipe" else "{percentage:3.0f}%|{bar}| "
        columns = _CELL if place == "notebook" else shutil.get_terminal_size().columns
        options = {} if place == "terminal" else {"file": StringIO(), "ascii": False}
        self._place = place
        self._most = max(1, columns - _BAR - len(f": 100%|| {total}/{total} {unit}s [0:00:00<0:00:00]"))
        self._unit = unit  # tqdm has none if TQDM_DISABLE is set
        self._outer = [f"{bar.n}/{bar.total} {bar._unit}s" for bar in self._open]
        super().__init__(
            total=total, unit=unit, ncols=columns, nrows=24, leave=not self._open, position=0, miniters=1,
            delay=delay or sys.float_info.min,  # with 0, tqdm shows the bar before it is open
            mininterval=LINE_SECONDS if place == "pipe" else 0.1,
            bar_format=f"{{desc}}: {bar}{counts}", **options,
        )  # fmt: skip
        self.set_description(label)

    def set_description(self, label: str) -> None:
        text = ", ".join(filter(None, [*self._outer, label]))
        short = text if len(text) <= self._most or self._place == "pipe" else f"…{text[1 - self._most :]}"
        self.set_description_str(short, refresh=False)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the bar, or clear it if ``msg`` is empty; ``pos`` is 0 when the bar closes."""
        elapsed, innermost = time.time() - self.start_t, self._open[-1] if self._open else None
        if msg is None and (self is not innermost or elapsed < self.delay):
            return False
        line = str(self) if msg is None else msg
        if self._place == "terminal":
            return bool(super().display(line, 0))
        if self._place == "pipe" and line and self.n and (pos == 0 or self.n < self.total):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            self.mininterval = LINE_SECONDS * min(12, max(1, elapsed / 50))
        elif self._place == "notebook" and line and self._output is None:
            from IPython.display import display

            _Shown._output = display({"text/plain": line}, raw=True, display_id=True)
        elif self._place == "notebook" and line:
            self._output.update({"text/plain": line}, raw=True)
        return True

    def __enter__(self) -> Self:
        self._open.append(self)
        if self._place != "pipe":
            self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._open[:] = [bar for bar in self._open if bar is not self]  # tqdm's bars of one position are equal
        if not self._outer:
            _Shown._output = None
