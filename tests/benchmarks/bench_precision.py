"""Rounds with products of bfloat16 against those of float32.

The CPU needs instructions for them; what it has is printed. Rounding the factors takes as long as multiplying small
batches saves: 784-200-10 is slower in batches of 10, a little faster in batches of 50.
"""

from __future__ import annotations

import pytest
import torch
import training_rounds

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.job import ComputeConfig

CLIENTS, SAMPLES = 20, 600
RULES = {"sgd": optim.sgd(0.01), "adam": optim.adam(1e-3)}
NETS = {"mlp": (lambda: nets.mlp([784, 200, 10]), (784,)), "cnn": (lambda: nets.cnn((1, 28, 28), 10), (1, 28, 28))}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def rounds(net, rule, batch, precision):
    make, shape = NETS[net]
    job = training_rounds.job(
        algorithms.fedavg(), make(), training_rounds.rows(CLIENTS, SAMPLES, shape, 10), optimizer=RULES[rule],
        participation=0.5, local_epochs=1, batch_size=batch, compute=ComputeConfig(threads=1, precision=precision),
    )  # fmt: skip
    return training_rounds.stacked(job)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("net", "batch"), [("mlp", 10), ("mlp", 50), ("mlp", 200), ("mlp", 600), ("cnn", 50)])
def bench_bfloat16_against_float32(compare, net, rule, batch):
    can = [name for name in ("avx512_bf16", "amx_tile") if getattr(torch.cpu, f"_is_{name}_supported")()]
    compare(
        f"bfloat16 round of {net}, batch {batch}, {rule}, 1 thread, CPU with {' and '.join(can) or 'neither'}",
        rounds(net, rule, batch, "bfloat16"), rounds(net, rule, batch, "float32"), "float32",
    )  # fmt: skip
