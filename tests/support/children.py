"""Child processes of tests, forked from one that has imported everything and opened nothing."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["children", "jobs", "algorithm_jobs", "distributed"])


def parent() -> None:
    """Start the process that children are forked from, unless it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def together(n: int, work: Callable[..., None], *arguments: Any, folder: Path) -> tuple[list[int | None], list[str]]:
    """Exit codes and output of n processes that do the same work, with the variables that torchrun gives them."""
    parent()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"process{rank}.txt" for rank in range(n)]
    ours = [CHILDREN.Process(target=_one, args=(r, n, port, files[r], work, arguments)) for r in range(n)]
    for child in ours:
        child.start()
    for child in ours:
        child.join(300)
    return [child.exitcode for child in ours], [file.read_text(encoding="utf-8") for file in files]


def _one(rank: int, n: int, port: int, file: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.fsync = lambda _: None  # nobody cuts the power of these processes
    with file.open("w", encoding="utf-8") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            work(*arguments)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
