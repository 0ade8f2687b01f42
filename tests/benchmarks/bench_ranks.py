"""Rounds of two processes by torchrun against those of one process with two threads; and what each process holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).with_name("ranks_rounds.py")


def rounds(processes: int, net: str) -> list[dict[str, float]]:
    """What each process says of its rounds."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launch, str(ROUNDS), net, str(2 // processes)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=env, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("net", ["cnn", "mlp"])
def test_two_processes(net, benchmark):
    """At least 0.9 times as fast, on two idle cores: taken by turns, the faster of three each."""
    turns = [(rounds(1, net), rounds(2, net)) for _ in range(3)]
    one, two = (min(max(p["seconds"] for p in turn[side]) for turn in turns) for side in (0, 1))
    held = [[round(p["peak"]) for p in side] for side in turns[0]]
    benchmark.extra_info |= {"ratio": one / two, "peak_mb": held}
    print(f"\n{net}: two threads {one:.3f} s a round, two processes {two:.3f} s: ratio {one / two:.2f}; peak MB {held}")
    benchmark.pedantic(lambda: None, rounds=1)
