"""Any method with the output layer kept by its client."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_clients_near, assert_equal, job, models, run

from fedstat.fl import algorithms, masks, nets
from fedstat.fl.algorithms import named, personal_head
from fedstat.fl.probes import measures
from fedstat.stats import factor, split


def test_fedavg_with_a_personal_head_is_fedper_to_the_bit():
    mine, theirs = job(personal_head(algorithms.fedavg())), job(algorithms.fedper())
    assert_equal(models(mine), models(theirs))
    assert (
        run(mine).client_params.saved().keys() == run(theirs).client_params.saved().keys() == {"fc2.weight", "fc2.bias"}
    )


def of_layers(flags):
    return {"fc1.weight": flags[..., None], "fc1.bias": flags, "fc2.weight": np.False_, "fc2.bias": np.False_}


def analysed(trained, _):
    z = np.concatenate([w.T for w in trained["fc1.weight"].astype(float)])
    return of_layers(split.shared(factor.fit(np.corrcoef(z, rowvar=False), kappa=0.7).communality))


def half_square(now, anchor):
    return sum(0.35 * (now[n] - anchor[n]).square().sum() for n in now)


PLAIN = {
    "fedprox-personal-head": (
        {"mu": 0.7},
        lambda *_: of_layers(np.ones(10, bool)),
        {"phases": ({"penalty": half_square},)},
    ),
    "fedfac-dynamic-personal-head": ({"layers": ["fc1"], "kappa": 0.7, "warm_start": False}, analysed, {}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_method_with_a_personal_head_equals_the_plain_loop(name):
    settings, shared, options = PLAIN[name]
    j = job(named(name, **settings), participation=0.7, client_chunk=4)
    assert j.algorithm.name == name
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    theirs, _ = plain_loop.run(j, SIZES, sgd, rounds=4, shared=shared, before=of_layers(np.ones(10, bool)), **options)
    assert_clients_near(j, run(j, 4), theirs)


@pytest.mark.parametrize("components", [1, 2])
def test_a_personal_head_is_never_sent_and_of_a_mixture_no_components_is(components):
    inner = algorithms.fedem(components=components) if components > 1 else algorithms.fedfac(["fc1"])
    j = job(personal_head(inner))
    state = run(j)
    heads = [name for name in j.net.shapes if nets.layer_of(name) in nets.head_layers(j.net)]
    assert len(heads) == 2 * components
    sent = j.algorithm.upload_mask(j.net, state.mask) if j.algorithm.upload_mask else state.mask.shared
    assert not any(bool(mask[name].any()) for mask in (sent, state.mask.shared) for name in heads)
    assert bool(sent[next(n for n in sent if n.endswith("fc1.weight"))].all())
    one = np.array([0])
    up, _ = measures.in_bytes(j.hooks, j.hooks.upload_mask(state.mask), state.mask, state.mask, one)
    assert up == 4 * components * (10 * 6 + 10)


def test_a_server_that_mixes_leaves_personal_heads_alone():
    half = lambda up: torch.full((len(up.clients),) * 2, 1 / len(up.clients))  # noqa: E731
    j = job(personal_head(algorithms.fedavg()._replace(mixing_weights=half)))
    state = trainer.start(j)
    trained = trainer.run(j, state)[1]
    after = trainer.models(j, trainer.step(j, state), trained.cohort.local)
    assert torch.equal(after["fc2.weight"], trained.trained.params["fc2.weight"])
    assert torch.equal(after["fc1.bias"], after["fc1.bias"][:1].expand_as(after["fc1.bias"]))


def test_a_network_of_one_layer_has_no_head_to_keep():
    with pytest.raises(ValueError, match=r"only layer is 'fc1': a personal head leaves no layer to share"):
        trainer.start(job(personal_head(algorithms.fedavg()), net=nets.mlp([6, 3])))
    assert masks.last_layers(nets.mlp(SIZES), "personal_layers", 1) == nets.head_layers(nets.mlp(SIZES))
