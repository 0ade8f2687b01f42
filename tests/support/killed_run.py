"""Runs that are killed: each function is the work of a child process, which ends itself after so many rounds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from small_runs import NET, SETTINGS, dense

from fedstat.fl import algorithms, chunks, ledger, train


def _killed_after(rounds: int) -> Callable[[int], None]:
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        if sum(seen) == rounds:  # trained, its rows written, and not committed
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def with_rows_on_disk(out: Path) -> None:
    """Keep rows of clients on disk, and save the state after every round."""
    chunks.remaining_bytes = lambda *_: 0
    ledger._SAVE_SECONDS, ledger._SAVE_FRACTION = 0.0, 1e9
    options = SETTINGS | {"rounds": 6, "memory_budget": "1GiB", "progress": _killed_after(4)}
    train(dense(), NET, algorithms.fedrep(), out=out, **options)


def without_a_state(out: Path) -> None:
    """Commit every round, and save no state."""
    ledger._COMMIT_SECONDS, ledger._SAVE_SECONDS = -1.0, 1e9
    options = SETTINGS | {"rounds": 9, "checkpoints": [2], "progress": _killed_after(5)}
    train(dense(), NET, algorithms.fedavg(), out=out, **options)


def with_a_csv_log(out: Path) -> None:
    """Save the state after every round, and log the rounds."""
    ledger._COMMIT_SECONDS, ledger._SAVE_SECONDS, ledger._SAVE_FRACTION = -1.0, 0.0, 1e9
    options = SETTINGS | {"rounds": 4, "evaluate_every": 2, "log": "csv", "progress": _killed_after(4)}
    train(dense(), NET, algorithms.fedavg(), out=out, **options)
