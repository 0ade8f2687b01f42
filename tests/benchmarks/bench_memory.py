"""What idle clients cost: time of a round and peak resident memory of 10³, 10⁴ and 10⁵ clients, 100 active.

Each in a process of its own, MLP 784-200-10 with all of its first layer clients' own, samples in a memory map (and of
10³ in a zarr store), 2 GiB. About 4 GB of disk and, for 10⁵, minutes: all clients are evaluated once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
CASES = [(1_000, "map"), (1_000, "zarr"), (10_000, "map"), (100_000, "map")]


@pytest.mark.parametrize(("clients", "kind"), CASES)
def bench_idle_clients(benchmark, capsys, tmp_path, clients, kind):
    command = [sys.executable, SUPPORT / "many_clients.py", clients, 20, "lg-fedavg", kind, "2GiB", tmp_path]
    env = os.environ | {"PYTHONPATH": str(SUPPORT.parents[1]), "OMP_NUM_THREADS": "1"}

    def run() -> dict[str, float]:
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info |= found
    with capsys.disabled():
        print(
            f"\n{clients} clients, {kind}: {found['round']:.3g} s a round ({found['cpu']:.3g} s of CPU), peak resident "
            f"{found['peak'] / 2**30:.3g} GiB, rows on disk {found['rows_on_disk'] / 2**30:.3g} GiB; "
            f"{found['before']:.3g} s before the first round, {found['last']:.3g} s for the last and its evaluation"
        )
    assert found["peak"] < 2 * 2**30
