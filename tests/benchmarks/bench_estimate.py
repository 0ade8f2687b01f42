"""The estimate of ``--dry-run`` against what the same grids then take: time, memory and disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

GRIDS = {
    "dense, digits": """
data = "digits"
partition = "dirichlet:0.3"
clients = 20
rounds = 60
seeds = [0, 1, 2]
[[dataset]]
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedprox"
[[method]]
algorithm = "fedfac-dynamic"
""",
    "convolutions, MNIST": """
data = "mnist"
partition = "iid"
max_samples = 100
clients = 10
net = "cnn"
rounds = 20
evaluate_every = 5
seeds = [0, 1]
[[dataset]]
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
""",
    "many clients, dense": """
data = "digits"
partition = "iid"
clients = 100
participation = 0.2
rounds = 150
evaluate_every = 10
seeds = [0, 1]
[[dataset]]
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedper"
""",
}


def fedstat(*arguments: object) -> str:
    command = [sys.executable, "-m", "fedstat.fl", *map(str, arguments), "--quiet"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def seconds(text: str) -> float:
    """Seconds of a printed duration."""
    number, unit = text.split()
    return float(number) * {"s": 1, "minutes": 60, "hours": 3600}[unit]


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("jobs", [1, 2])
def test_estimates_and_truth(benchmark, name: str, jobs: int, tmp_path: Path):
    """Within 30 % of the truth, on an idle machine; jobs of one thread each."""
    file, out = tmp_path / "grid.toml", tmp_path / "runs"
    file.write_text(GRIDS[name], encoding="utf-8")
    how = ["--config", file, "--out", out, "--threads", max(1, (os.cpu_count() or 1) // jobs)]
    how += ["--jobs", jobs] if jobs > 1 else []
    said = fedstat(*how, "--dry-run")
    total, disk = re.search(r"about (.*?), .* of memory, (.*) of disk", said).groups()
    begun = time.perf_counter()
    fedstat(*how)
    truth = time.perf_counter() - begun
    stored = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6
    ratio = seconds(total) / truth
    benchmark.extra_info |= {"ratio": ratio}
    print(f"\n{name}, {jobs} at once: estimated {total}, took {truth:.1f} s (ratio {ratio:.2f}); "
          f"estimated {disk}, stored {stored:.1f} MB")  # fmt: skip
    benchmark.pedantic(lambda: None, rounds=1)
