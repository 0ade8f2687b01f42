"""What masks promise whatever their dims: a mask is what it broadcasts to, in every network and setting."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import plain_loop
import torch
import trainer
from algorithm_jobs import job, rows, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedstat.fl import nets
from fedstat.fl.algorithm import Algorithm, SharedMask
from fedstat.fl.batches import Rows

SAMPLES = [5, 9, 2, 9, 1]
CLIENTS = len(SAMPLES)


def convolutions():
    parts = {"conv1": nn.Conv2d(1, 4, 3, 2), "relu": nn.ReLU(), "flat": nn.Flatten(), "fc1": nn.Linear(16, 3)}
    return nn.Sequential(OrderedDict(parts))


MLP = ("mlp", nets.mlp([5, 5, 3]), (5,), [5, 5, 3])
CONVOLUTIONS = ("module", nets.from_module(convolutions(), (1, 6, 6), start="random"), (1, 6, 6), convolutions)
TEXT = ("lstm", nets.lstm((4,), 3, vocabulary=7, embedding=3, hidden=4, fc=5), (4,), None)


@st.composite
def masks_of(draw, net):
    """For every parameter any subset of (client, *shape), with or without the dims of 1 in front."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = {}
    for name, shape in net.shapes.items():
        varies = draw(st.tuples(*[st.booleans()] * (len(shape) + 1)))
        size = [n if of_them else 1 for n, of_them in zip((CLIENTS, *shape), varies, strict=True)]
        ones = next((i for i, n in enumerate(size) if n > 1), len(size))
        found[name] = torch.from_numpy(np.asarray(rng.random(size[draw(st.integers(0, ones)) :]) < 0.5))
    return found


@st.composite
def runs(draw, *kinds):
    """A job under masks that may move, and its masks by round from -1."""
    _, net, sample, module = draw(st.sampled_from(kinds))
    split = [draw(masks_of(net)) for _ in range(draw(st.sampled_from([1, 3])))]
    data = [rows(SAMPLES, seed, features=int(np.prod(sample))) for seed in (0, 1)]
    if module is None:
        data = [Rows((d.x.abs() * 2).clamp(max=6).to(torch.uint8), *d[1:]) for d in data]
    train, test = (Rows(d.x.view(-1, *sample), *d[1:]) for d in data)
    options = {
        "participation": draw(st.sampled_from([1.0, 0.6])),
        "client_chunk": draw(st.sampled_from([1, 2, None])),
        "server_lr": draw(st.sampled_from([1.0, 0.5])),
        "batch_size": draw(st.sampled_from([None, 3])),
    }
    j = replace(job(method(split), net=net, data=train, sizes=SAMPLES, **options), test=test)
    return j, split, module


def method(split):
    moves = {"update_mask": lambda up: SharedMask(split[up.round + 1])} if len(split) > 1 else {}
    return Algorithm("masked", lambda start: SharedMask(split[0]), **moves)  # noqa: ARG005


@settings(max_examples=12, deadline=None)
@given(runs(MLP, CONVOLUTIONS))
def test_any_mask_equals_the_plain_loop(drawn):
    j, split, module = drawn
    arrays = [{name: m.numpy() for name, m in given.items()} for given in split]
    mine = trainer.models(j, run(j, 2))
    theirs, _ = plain_loop.run(
        j, module, lambda p: torch.optim.SGD(p, lr=0.1), rounds=2, before=arrays[0],
        shared=lambda _, number: arrays[min(number + 1, len(arrays) - 1)],
    )  # fmt: skip
    for c, model in enumerate(theirs):
        for name, p in model.items():
            torch.testing.assert_close(mine[name][c], p, atol=2e-5, rtol=2e-5)


@settings(max_examples=12, deadline=None)
@given(runs(MLP, CONVOLUTIONS, TEXT))
def test_a_mask_is_what_it_broadcasts_to_to_the_bit(drawn):
    j, split, _ = drawn
    whole = [{name: m.expand(CLIENTS, *j.net.shapes[name]) for name, m in given.items()} for given in split]
    written_out = replace(j, algorithm=method(whole))
    a, b = (trainer.models(one, run(one, 2)) for one in (j, written_out))
    for name, p in a.items():
        assert torch.equal(p, b[name])
