"""What a grid adds to each of its runs: judging it, its line, its place in the comparison."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from pathlib import Path

from fedstat.fl.__main__ import main
from fedstat.study import experiment, grid

RUNS = 20
GRID = f"""
clients = 4
max_samples = 20
rounds = 1
local_epochs = 1
partition = "iid"
seeds = {list(range(RUNS // 2))}
[[dataset]]
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedprox"
"""


def test_runs_of_a_grid_and_alone(benchmark, tmp_path: Path):
    """CPU time of tiny runs by the command of a grid against the same runs alone; and of finished runs."""
    file = tmp_path / "grid.toml"
    file.write_text(GRID, encoding="utf-8")

    def cpu(work) -> float:
        begun = time.process_time()
        work()
        return (time.process_time() - begun) / RUNS

    def by_command(out: Path) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return cpu(lambda: main(["--config", str(file), "--out", str(out), "--quiet", "--threads", "1"]))

    def alone(out: Path) -> float:
        runs = grid.cells(file)
        return cpu(lambda: [experiment.run(run, out=out / f"{i}.zarr", threads=1) for i, run in enumerate(runs)])

    by_command(tmp_path / "warm")
    pairs = [(by_command(tmp_path / f"grid{i}"), alone(tmp_path / f"alone{i}")) for i in range(5)]
    again = statistics.median(by_command(tmp_path / "grid0") for _ in range(3))
    ratio = statistics.median(a / b for a, b in pairs)
    benchmark.extra_info |= {"ratio": ratio}
    fresh, single = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"\na run by a grid {fresh:.0f} ms, alone {single:.0f} ms, ratio {ratio:.2f}; finished {1000 * again:.0f} ms")
    benchmark.pedantic(lambda: None, rounds=1)
