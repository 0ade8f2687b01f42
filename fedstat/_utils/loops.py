"""Loops over long work: in any ``concurrent.futures.Executor``, on threads or in place, with their progress.

Progress is a bar in terminals and notebooks, and plain lines elsewhere; an interrupt names what to do.

Nothing else in fedstat shows progress. Functions take ``progress``: True shows it, False does not, and None shows a bar
in a terminal or notebook if the work takes longer than two seconds.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from traceback import walk_tb
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

from threadpoolctl import threadpool_info, threadpool_limits

from fedstat._utils import shell

Item = TypeVar("Item")
Result = TypeVar("Result")
_PLACES = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_LIBRARIES = ("<frozen ", str(Path(__file__).parents[1]), *_PLACES)
"""Prefixes of the names of files of libraries and this package."""
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


_SCREEN = {"ncols": 80, "nrows": 24}
_CELL = {"ncols": 72, "nrows": 24}
"""Size of a bar in a notebook: JupyterLab breaks lines of 78 columns if its window is 1,050 pixels wide."""


class Bar(Protocol):
    """Progress of one loop, a context."""

    def update(self, n: int = 1) -> object:
        """Count ``n`` more items."""

    def set_description(self, label: str) -> object:
        """Set the label of the current work."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def progress_bar(total: int, unit: str, progress: bool | None, *, label: str = "", resumed: bool = False) -> Bar:
    """Return the progress of a loop; a bar within another bar disappears at its end.

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
    resumed : bool
        True if the first update counts the items that an earlier process finished, whose time is not known.

    Raises
    ------
    ValueError
        If ``progress`` is something else.
    """
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress must be True, False or None, but got {progress!r}")
    place = None if progress is False else _place()
    if place is None or (place == "pipe" and progress is None):
        return _Silent()
    if place == "pipe":
        return _Lines(total, unit, label, resumed=resumed)
    delay = 0.0 if progress else DELAY
    return _Tqdm(total, unit, label, delay=delay, resumed=resumed, notebook=place == "notebook")


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
    tqdm = sys.modules["tqdm"].tqdm if "tqdm" in sys.modules else None
    if tqdm is not None and any(map(_is_shown, tqdm._instances)):
        tqdm.write(text, file=sys.stdout)
    else:
        sys.stdout.write(f"{text}\n")
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


def _place() -> Literal["notebook", "terminal", "pipe"]:
    if (running := shell()) is not None and "IPKernelApp" in running.config:
        return "notebook"
    return "terminal" if sys.stderr is not None and sys.stderr.isatty() else "pipe"


class _Silent:
    """Progress that is not shown."""

    def update(self, n: int = 1) -> None:
        pass

    def set_description(self, label: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_BAR = 8
"""Columns that remain for the bar itself."""


def fit(label: str, total: int, unit: str, columns: int) -> tuple[str, str | None]:
    """Return the label of a bar and tqdm's format with which the time left fits in.

    If the columns do not suffice, the rate is left out, and then the beginning of the label.

    Examples
    --------
    >>> fit("fedavg, seed 0", 10, "round", 72)
    ('fedavg, seed 0', None)
    >>> fit("p=0.5 alpha=0.4 replicate=0 dynamic", 1000, "round", 72)
    ('…pha=0.4 replicate=0 dynamic', '{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]')
    """
    most = max(1, columns - _BAR - len(f": 100%|| {total}/{total} [0:00:00<0:00:00]"))
    if len(label) <= most - len(f", 1000.00s/{unit}"):
        return label, None
    short = label if len(label) <= most else f"…{label[len(label) - most + 1 :]}"
    return short, "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


class _Tqdm:
    """Bar of tqdm, a line of text: widgets would leave broken icons in a notebook whose kernel is gone."""

    def __init__(self, total: int, unit: str, label: str, *, delay: float, resumed: bool, notebook: bool) -> None:
        from tqdm import tqdm

        self._line = _NotebookLine() if notebook else None
        place: dict[str, Any] = _screen() if self._line is None else _CELL | {"file": self._line}
        self._fit = partial(fit, total=total, unit=unit, columns=place["ncols"])
        label, layout = self._fit(label or f"{unit}s")
        self._bar = tqdm(total=total, unit=unit, desc=label, bar_format=layout, delay=delay, **place)
        self._delay, self._resumed = delay, resumed
        self._bar.leave = not self._bar.pos

    def update(self, n: int = 1) -> None:
        if self._resumed:
            self._resumed, self._bar.n, self._bar.last_print_n, self._bar.initial = False, n, n, n
            return
        if self._bar.pos:
            self._show_outer()
        self._bar.update(n)

    def _show_outer(self) -> None:
        """Show the outer bars before this one, though none of their items is done."""
        now = time.time()
        if now < self._bar.start_t + self._delay:
            return
        for other in sorted(self._bar._instances, key=lambda other: abs(other.pos)):
            if abs(other.pos) < abs(self._bar.pos) and not _is_shown(other) and other.start_t + other.delay <= now:
                other.refresh()
                other.last_print_t = now

    def set_description(self, label: str) -> None:
        label, self._bar.bar_format = self._fit(label)
        self._bar.set_description(label, refresh=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._line is not None:
            self._line.close(is_inner=not self._bar.leave)


def _screen() -> dict[str, int]:
    """Return the size of the terminal; in a terminal of unknown size, tqdm would show nothing."""
    with suppress(OSError, ValueError, AttributeError):
        size = os.get_terminal_size(sys.stderr.fileno())
        return {"ncols": size.columns, "nrows": size.lines} if size.columns and size.lines else _SCREEN
    return _SCREEN


def _is_shown(bar: Any) -> bool:
    """Return True if a bar of tqdm was shown, after its delay."""
    return bool(bar.last_print_t >= bar.start_t + bar.delay)


class _NotebookLine:
    """File whose last line is an output of a notebook; stderr would be red, and stdout cannot hold two bars."""

    encoding = "utf-8"
    _empty: ClassVar[list[Any]] = []  # outputs of inner bars that are gone, for the next ones

    def __init__(self) -> None:
        self._output: Any = None

    def write(self, text: str) -> None:
        start, _, line = text.rpartition("\r")
        if start == line == "" or "\x1b" in text or not (line.strip() or text.startswith("\r")):
            return  # movements between the lines of a terminal
        content = {"text/plain": line.rstrip()}
        if self._output is None and self._empty and line.strip():
            self._output = self._empty.pop()
        if self._output is not None:
            self._output.update(content, raw=True)
        elif line.strip():
            from IPython.display import display

            self._output = display(content, raw=True, display_id=True)

    def close(self, *, is_inner: bool) -> None:
        """Leave the output of an inner bar, now empty, to the next one; only the outermost bar stays."""
        if not is_inner:
            self._empty.clear()
        elif self._output is not None:
            self._empty.append(self._output)

    def flush(self) -> None:
        pass


class _Lines:
    """Progress for a log file: lines on stderr, the last when the work is done, others seldom.

    Of short work within other work there are none.
    """

    _n_open: ClassVar[int] = 0  # loops that show lines now

    def __init__(self, total: int, unit: str, label: str, *, resumed: bool) -> None:
        self._total, self._unit, self._label, self._resumed = total, unit, label, resumed
        self._done = self._n_before = 0
        self._start, self._last_line = time.monotonic(), 0.0
        self._is_inner = _Lines._n_open > 0

    def update(self, n: int = 1) -> None:
        self._done += n
        if self._resumed:
            self._resumed, self._n_before = False, n
            return
        spent = time.monotonic() - self._start
        if not self._is_due(spent):
            return
        self._last_line = spent
        n_left = self._total - self._done
        remaining = (
            f", about {_seconds(spent / (self._done - self._n_before) * n_left)} left"
            if self._done < self._total
            else ""
        )
        name = f"{self._label}: " if self._label else ""
        sys.stderr.write(f"{name}{self._done} of {self._total} {self._unit}s, {_seconds(spent)}{remaining}\n")
        sys.stderr.flush()

    def _is_due(self, spent: float) -> bool:
        if self._done >= self._total and (not self._is_inner or spent >= LINE_SECONDS):
            return True
        return spent - self._last_line >= LINE_SECONDS * min(12, max(1, spent / 50))

    def set_description(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> Self:
        _Lines._n_open += 1
        return self

    def __exit__(self, *_: object) -> None:
        _Lines._n_open -= 1


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
