"""A run that keeps rows of clients on disk, saves its state after every round, and is killed after one of them.

Arguments: store, round.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from small_runs import NET, SETTINGS, dense

from fedstat.fl import algorithms, chunks, loop, train


def main() -> None:
    out, last, seen = Path(sys.argv[1]), int(sys.argv[2]), []

    def progress(done: int) -> None:
        seen.append(done)
        if sum(seen) == last:  # trained, its rows written, and not committed
            os.kill(os.getpid(), signal.SIGKILL)

    chunks.remaining_bytes = lambda *_: 0
    loop._SAVE_SECONDS, loop._SAVE_FRACTION = 0.0, 1e9
    train(dense(), NET, algorithms.fedrep(), rounds=6, out=out, memory_budget="1GiB", progress=progress, **SETTINGS)


if __name__ == "__main__":
    main()
