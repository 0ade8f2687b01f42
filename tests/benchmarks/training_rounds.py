"""What the benchmarks of training share: rounds of a job, rounds of a plain loop, the memory that they take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plain_loop
import torch
import trainer
from torch import nn

from fedstat.fl.job import Job


def stacked(job: Job) -> Callable[[], None]:
    """Rounds of the stacked engine, one after the other."""
    state = trainer.start(job)

    def one_round() -> None:
        nonlocal state
        state = trainer.step(job, state)

    return one_round


def plain(
    models: Sequence[nn.Module],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    threads: int,
    rng: np.random.Generator,
    **training: Any,
) -> Callable[[], None]:
    """FedAvg rounds of one torch module per client, on x, y (client, sample, ...); ``training`` as ``train_client``."""

    def one_round() -> None:
        torch.set_num_threads(threads)
        for c, net in enumerate(models):
            plain_loop.train_client(net, x[c], y[c], rng=rng, **training)
        mean = {
            name: torch.stack([net.state_dict()[name] for net in models]).mean(0) for name in models[0].state_dict()
        }
        for net in models:
            net.load_state_dict(mean)
        torch.set_num_threads(1)

    return one_round


def peak_memory(source: str) -> float:
    """Largest resident memory, in MB, of a process that runs the source."""
    # Not getrusage: its maximum starts from that of the process that forked this one.
    show = "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) / 1024)"
    source = f"import sys; sys.path[:0] = ['tests/support', 'tests/benchmarks']; {source}; {show}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])  # after what the source prints
