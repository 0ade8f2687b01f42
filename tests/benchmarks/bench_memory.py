"""What idle clients cost: time of a round and peak resident memory of 10³, 10⁴ and 10⁵ clients, 100 active.

Each in a process of its own, MLP 784-200-10 with all of its first layer clients' own, samples in a memory map (and of
10³ in a zarr store), 2 GiB. About 4 GB of disk and, for 10⁵, minutes: all clients are evaluated once.

And the peak of an ordinary command, whose images stay bytes until they are used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_data import require_real_data
from training_rounds import peak_memory

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


@pytest.mark.parametrize("images", ["bytes", "float32"])
def bench_memory_of_a_command(benchmark, capsys, tmp_path, images):
    """Peak resident memory of ``python -m fedstat.fl``, FedAvg on MNIST; against images made float32 before the run."""
    given = ["--data", "mnist", "--data-dir", require_real_data(), "--clients", 100, "--net", "mlp", "--rounds", 3]
    given += ["--algorithm", "fedavg", "--out", tmp_path / "run.zarr", "--quiet"]
    first = (
        "from fedstat import data; from fedstat.study import experiment; made = experiment.federated; "
        "experiment.federated = lambda *of: tuple(one and data.to_float(one) for one in made(*of)); "
    )
    call = f"from fedstat.fl.__main__ import main; main({list(map(str, given))})"
    peak = benchmark.pedantic(peak_memory, ((first if images == "float32" else "") + call,), rounds=1)
    benchmark.extra_info["peak_MB"] = peak
    with capsys.disabled():
        print(f"\nFedAvg on MNIST by its command, 100 clients, MLP, images as {images}: peak {peak:.0f} MB")
