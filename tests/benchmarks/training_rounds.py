"""What the benchmarks of training share: data, jobs, rounds of a job, rounds of a plain loop, peak memory."""

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

from fedstat.fl import losses, nets
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job


def rows(clients: int, samples: int, shape: Sequence[int], classes: int, seed: int = 0) -> Rows:
    """Standard normal inputs and random labels, equally many for each client."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((clients * samples, *shape), dtype=np.float32))
    return Rows(x, torch.from_numpy(rng.integers(0, classes, len(x))), np.arange(clients + 1) * samples)


def job(algorithm: Algorithm, net: nets.Net, train: Rows, test: Rows | None = None, **settings: Any) -> Job:
    """Job whose network and loss the algorithm wraps; without test samples it takes those of training."""
    loss = losses.for_outputs(nets.n_outputs(net))
    net = algorithm.wrap(net) if algorithm.wrap else net
    loss = algorithm.loss(loss, net) if algorithm.loss else loss
    return Job(train, train if test is None else test, net, algorithm, loss, **settings)


def stacked(job: Job) -> Callable[[], None]:
    """Rounds of the stacked engine, one after the other."""
    state = trainer.start(job)

    def one_round() -> None:
        nonlocal state
        state = trainer.step(job, state)

    return one_round


def plain(
    module: Callable[[], nn.Module], train: Rows, *, threads: int = 1, participation: float = 1.0, **training: Any
) -> Callable[[], None]:
    """FedAvg rounds of one torch module for each selected client, one after the other; ``training``: `train_client`."""
    server, rng, clients = module().state_dict(), np.random.default_rng(0), len(train.sizes)

    def one_round() -> None:
        nonlocal server
        torch.set_num_threads(threads)
        trained = []
        for c in rng.choice(clients, round(participation * clients), replace=False):
            net = module()
            net.load_state_dict(server)
            plain_loop.train_client(net, *plain_loop.samples(train, c), rng=rng, **training)
            trained.append(net.state_dict())
        server = {name: torch.stack([state[name] for state in trained]).mean(0) for name in server}
        torch.set_num_threads(1)

    return one_round


def peak_memory(source: str) -> float:
    """Largest resident memory, in MB, of a process that runs the source."""
    # Not getrusage: its maximum starts from that of the process that forked this one.
    show = "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) / 1024)"
    source = f"import sys; sys.path[:0] = ['tests/support', 'tests/benchmarks']; {source}; {show}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])  # after what the source prints
