"""Rounds of two processes by torchrun against those of one process with two threads; and what each process holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).with_name("ranks_rounds.py")


def rounds(processes: int, net: str, method: str, clients: int, samples: int = 200) -> list[dict[str, float]]:
    """What each process says of its rounds."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launch, str(ROUNDS), net, method, str(2 // processes), str(clients), str(samples)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}  # tests/support, too
    done = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("net", ["cnn", "mlp"])
def test_two_processes(net, benchmark):
    """At least 0.9 times as fast, on two idle cores: FedFac deciding in every round, by turns, the faster of three."""
    turns = [(rounds(1, net, "fedfac-dynamic", 20), rounds(2, net, "fedfac-dynamic", 20)) for _ in range(3)]
    one, two = (min(max(p["seconds"] for p in turn[side]) for turn in turns) for side in (0, 1))
    benchmark.extra_info |= {"ratio": one / two}
    print(f"\n{net}: two threads {one:.3f} s a round, two processes {two:.3f} s: ratio {one / two:.2f}")
    benchmark.pedantic(lambda: None, rounds=1)


def test_what_each_process_holds(benchmark):
    """About half of what grows with clients: the first layer is each client's own. Resident after the last round."""
    held = {n: [[p["mb"] for p in rounds(n, "mlp", "lg-fedavg", clients, 20)] for clients in (4, 400)] for n in (1, 2)}
    grown = {n: max(many) - max(few) for n, (few, many) in held.items()}
    benchmark.extra_info |= {"mb": grown}
    print(f"\n396 clients more take {grown[1]:.0f} MB in one process, {grown[2]:.0f} MB in each of two")
    benchmark.pedantic(lambda: None, rounds=1)
