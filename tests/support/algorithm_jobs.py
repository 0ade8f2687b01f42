"""Small jobs on which all algorithms are tested."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import trainer
import xarray as xr
from torch import nn

from fedstat.fl import evaluate, losses, nets, optim
from fedstat.fl.algorithms import named
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job
from fedstat.fl.nets import from_module

SIZES = [6, 10, 3]
SAMPLES = [23, 7, 30, 1, 16, 16]
FLAGS = np.arange(10) % 3 == 0
CPU = torch.device("cpu")

NORMALISED = from_module(
    nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 3)), [6], start="random"
)

# What a method is made with here, besides its name.
SETTINGS = {
    "fedprox": {"mu": 0.7},
    "fedavg+": {"epochs": 1},
    "fedprox+": {"mu": 0.7, "epochs": 3},
    "per-fedavg": {"alpha": 0.3, "finetune_steps": 4},
    "per-fedavg-hf": {"alpha": 0.3, "finetune_steps": 1, "difference": 0.02},
    "pfedme": {"lam": 2.0, "eta": 0.2, "inner_steps": 3},
    "ditto": {"lam": 0.7, "own_epochs": 3},
    "fedrep": {"head_epochs": 3},
    "clustered-fl": {"eps1": 0.5, "eps2": 0.1},
    "fedamp": {"lam": 0.5, "alpha": 0.5, "sigma": 3.0},
    "fedfomo": {"downloads": 5},
    "feddecomp": {"rank_linear": 0.3, "lora_epochs": 1, "global_epochs": 1},
    "fedphp": {"horizon": 3, "lam": 0.3},
    "pfedsd": {"lam": 0.7, "temperature": 2.0},
    "fedcac": {"beta": 3},
    "fedsplit": {"shared": {1: FLAGS}},
    "fedfac-static": {"kappa": 0.7},
    "fedfac-dynamic": {"kappa": 0.7, "warm_start": False},
    "factorized-fl-alpha": {"epsilon": 3.0, "tau": 0.9, "sparsity": 0.03},
    "factorized-fl-beta": {"epsilon": 3.0, "tau": 0.9, "sparsity": 0.03},
}

# Methods with the state and the messages of a method besides: FedAvg, FedPer, Ditto, FedPHP, FedFac, Factorized-FL-β.
ALIKE = (
    "fedprox", "fedavg+", "fedprox+", "per-fedavg", "per-fedavg-hf", "pfedme", "lg-fedavg", "fedrep", "feddecomp",
    "fedbn", "fedrod", "pfedsd", "pfedpara", "fedsplit", "random", "factorized-fl-alpha",
)  # fmt: skip

VALIDATED = ("fedfomo",)  # methods that evaluate models on validation samples

# Networks of methods for which the MLP of SIZES lacks something.
NETS = {"fedbn": NORMALISED}


def seldom(names):
    """The names for pytest.mark.parametrize, those of ALIKE only in `make test-slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in names]


def optimizer_pair(name, lr, **options):
    """The package's optimizer, and PyTorch's as a function of parameters."""
    theirs = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    return getattr(optim, name)(lr, **options), lambda parameters: theirs(parameters, lr=lr, **options)


def net_of(name):
    return NETS.get(name.removesuffix("-personal-head"), nets.mlp(SIZES))


def make(name):
    return named(name, **SETTINGS.get(name, {}))


def rows(sizes, seed, *, classes=3, features=6):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), features))
    y = (x[:, 0] + rng.normal(size=len(x)) > 0) + (x[:, 1] > 0.5).astype(int) if classes > 2 else x[:, 0] > 0
    return Rows(torch.from_numpy(x).float(), torch.from_numpy(y.astype(int)), np.concatenate([[0], np.cumsum(sizes)]))


def dataset(sizes, seed=0, *, method="", validation=False):
    """Samples of clients; with validation samples if asked for, or if the method needs them."""
    parts = {"train": rows(sizes, seed), "test": rows([5] * len(sizes), seed + 1)}
    if validation or method.startswith(VALIDATED):
        parts["validation"] = rows([8] * len(sizes), seed + 2)
    client = np.concatenate([np.repeat(np.arange(len(sizes)), np.diff(d.start)) for d in parts.values()])
    return xr.Dataset(
        {
            "x": (("sample", "feature"), torch.cat([d.x for d in parts.values()]).numpy()),
            "y": ("sample", torch.cat([d.y for d in parts.values()]).numpy()),
        },
        {"client": ("sample", client), "split": ("sample", [of for of, d in parts.items() for _ in d.y])},
    )


def job(algorithm, *, net=None, data=None, sizes=SAMPLES, **options):
    net = net_of(algorithm.name) if net is None else net
    loss = losses.for_outputs(nets.n_outputs(net))
    net = algorithm.wrap(net) if algorithm.wrap else net
    settings = {"local_epochs": 2, "batch_size": 5, "seed": 4, "optimizer": optim.sgd(0.1)} | options
    if algorithm.name.startswith(VALIDATED):
        settings.setdefault("validation", rows([8] * len(sizes), 2) if data is None else data)
    return Job(
        rows(sizes, 0) if data is None else data,
        rows([12] * len(sizes), 1),
        net,
        algorithm,
        algorithm.loss(loss, net) if algorithm.loss else loss,
        **trainer.settings(**settings),
    )


def image_job(algorithm, net, sizes, *, side=16, **options):
    """A job of images, with four test samples a client."""
    j = job(algorithm, net=net, data=images(sizes, side), sizes=sizes, **options)
    return replace(j, test=images([4] * len(sizes), side, 1))


def run(j, rounds=3):
    state = trainer.start(j)
    for _ in range(rounds):
        state = trainer.step(j, state)
    return state


def models(j, rounds=3):
    return trainer.models(j, run(j, rounds))


def distance(a, b):
    """Euclidean distance of two sets of parameters."""
    return float(torch.cat([(p.double() - b[name]).flatten() for name, p in a.items()]).norm())


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name, p in a.items():
        assert torch.equal(p, b[name]), name


def assert_near(mine, theirs, atol=2e-5, rtol=2e-5):
    assert mine.keys() == theirs.keys()
    for name, p in theirs.items():
        torch.testing.assert_close(mine[name], p, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def assert_clients_near(j, state, theirs, accuracy=None, atol=2e-5, rtol=2e-5):
    """A plain loop's clients, one dict of parameters each, have the run's models (and accuracies)."""
    mine = trainer.models(j, state)
    for c, model in enumerate(theirs):
        assert_near({name: p[c] for name, p in mine.items() if name != "client.share"}, model, atol, rtol)
    if accuracy is not None:
        np.testing.assert_allclose(evaluate.evaluate(j, state)["accuracy"], accuracy, atol=1e-6)


def assert_same_states(j, a, b):
    """Models, masks, and all that is kept of clients and of the server are equal to the bit."""
    clients = np.arange(j.clients)
    for state in ("client_params", "optimizer"):
        assert_equal(*(dict(getattr(one, state).read(clients)) for one in (a, b)))
    assert_equal(*(dict(one.algorithm_state.clients.read(clients)) for one in (a, b)))
    assert_equal(*(dict(one.algorithm_state.server) for one in (a, b)))
    assert_equal(*(dict(one.mask.shared) for one in (a, b)))
    assert_equal(a.global_params, b.global_params)
    assert_equal(trainer.models(j, a), trainer.models(j, b))


def images(sizes, side=16, seed=0):
    """Random gray images of clients, of three classes."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), 1, side, side))).float()
    return Rows(x, torch.from_numpy(rng.integers(0, 3, len(x))), np.concatenate([[0], np.cumsum(sizes)]))
