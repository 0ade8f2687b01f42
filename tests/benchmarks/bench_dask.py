"""A study by Dask's workers against the same in one process: wall time, and what a cell costs beside its own work."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

CELLS = 40  # eight methods × five replicates, the default of the command
ROUNDS = os.environ.get("BENCH_DASK_ROUNDS", "30")


def seconds(*flags: str) -> tuple[float, float]:
    """Wall and CPU seconds of the command, those of its workers with it."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "fedstat.sim", "--quiet", "--rounds", ROUNDS, *flags]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_forty_cells_on_two_workers(benchmark, tmp_path: Path):
    """At least 1.7 times as fast as one process with one thread; at most 0.5 CPU seconds a cell more. Two idle cores.

    The start of the cluster, and of fedstat in its workers, is part of both.
    """
    pytest.importorskip("distributed")
    alone, alone_cpu = seconds("--threads", "1", "--out", str(tmp_path / "alone.zarr"))
    apart, apart_cpu = seconds("--jobs", "2", "--threads", "1", "--out", str(tmp_path / "apart.zarr"))
    more = (apart_cpu - alone_cpu) / CELLS
    benchmark.extra_info |= {"ratio": alone / apart, "cpu_seconds_a_cell": more}
    print(f"\n{CELLS} cells of {ROUNDS} rounds: one process {alone:.1f} s, two Dask workers {apart:.1f} s")
    print(f"ratio {alone / apart:.2f}; {alone_cpu:.1f} and {apart_cpu:.1f} CPU seconds, {more:.2f} a cell more")
    benchmark.pedantic(lambda: None, rounds=1)
