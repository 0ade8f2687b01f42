"""The stacked engine does for every client what a plain per-client loop does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import algorithm_jobs as jobs
import numpy as np
import plain_loop
import pytest
import torch
import trainer
from fl_runs import command
from small_runs import NET, dense, three_splits

from fedstat.fl import algorithms, evaluate, losses, masks, nets, optim, train
from fedstat.fl.algorithm import Algorithm, Phase
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job
from fedstat.stats import factor, split

SIZES = [8, 12, 3]
UNEQUAL = [23, 7, 40, 1, 16, 16, 31]


def rows(sizes, n_features=8, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = torch.from_numpy(rng.normal(size=(n, n_features))).float()
    return Rows(x, torch.from_numpy(rng.integers(0, classes, n)), np.concatenate([[0], np.cumsum(sizes)]))


def job(algorithm, *, sizes=UNEQUAL, layers=SIZES, **options):
    net = nets.mlp(layers)
    classes = max(layers[-1], 2)
    settings = {"optimizer": optim.sgd(0.1), "local_epochs": 2, "batch_size": 5, "seed": 3} | options
    return Job(
        rows(sizes, layers[0], classes),
        rows([9] * len(sizes), layers[0], classes, seed=1),
        net,
        algorithm,
        losses.for_outputs(layers[-1]),
        **trainer.settings(**settings),
    )


def run(j, rounds=3):
    state = trainer.start(j)
    for _ in range(rounds):
        state = trainer.step(j, state)
    return state


def assert_same_models(j, state, models, accuracy, tol=1e-5):
    mine = trainer.models(j, state)
    for c, model in enumerate(models):
        assert set(model) == set(mine)
        for name, p in model.items():
            torch.testing.assert_close(mine[name][c], p, atol=tol, rtol=tol)
    np.testing.assert_allclose(evaluate.evaluate(j, state)["accuracy"], accuracy, atol=1e-6)


def everywhere(value):
    return lambda trained, _: dict.fromkeys(trained, np.asarray(value))


OPTIMIZERS = {
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with momentum and decay": (
        optim.sgd(0.05, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "adam": (optim.adam(0.01, weight_decay=0.01), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize("layers", [[8, 12, 3], [8, 6, 5, 1]])
def test_fedavg_equals_the_plain_loop(optimizer, batch_size, layers):
    stacked, plain = OPTIMIZERS[optimizer]
    j = job(algorithms.fedavg(), layers=layers, optimizer=stacked, batch_size=batch_size)
    assert_same_models(j, run(j), *plain_loop.run(j, layers, plain, rounds=3, shared=everywhere(True)))


@pytest.mark.parametrize("on", ["weights", "updates"])
def test_dynamic_fedfac_equals_the_plain_loop(on):
    j = job(algorithms.fedfac(["fc1"], kappa=0.7, on=on, warm_start=False), participation=0.7, server_lr=0.7)
    before = []

    def analyse(trained, number):
        w = trained["fc1.weight"]
        if on == "updates":
            state = run(j, number)
            w = w - trainer.models(j, state)["fc1.weight"].numpy()[trainer.active(j, number)]
        z = np.concatenate([client.T for client in w.astype(float)])
        flags = split.shared(factor.fit(np.corrcoef(z, rowvar=False), kappa=0.7).communality)
        before.append(flags)
        return {"fc1.weight": flags[:, None], "fc1.bias": flags, "fc2.weight": np.True_, "fc2.bias": np.True_}

    plain = plain_loop.run(j, SIZES, lambda p: torch.optim.SGD(p, lr=0.1), rounds=4, shared=analyse)
    state = run(j, 4)
    assert_same_models(j, state, *plain)
    assert (masks.shared_units(j.net, state.mask.shared, "fc1").numpy() == before[-1]).all()
    assert any((a != b).any() for a, b in pairwise(before)), "the split never moved: a weak test"


@pytest.mark.parametrize("moving", ["fc1", "fc"])
def test_a_penalty_for_a_parameter_that_there_is_not_is_named(moving):
    def penalty(params, anchor):
        return {"fc1.wieght": params["fc1.weight"] - anchor["fc1.weight"]}

    phase = Phase(penalty=penalty, is_trainable=lambda name: name.startswith(moving))
    j = job(Algorithm("mine", algorithms.fedavg().init_mask, phases=(phase,)))
    with pytest.raises(ValueError, match=r"penalty.*returns 'fc1.wieght'.*Did you mean 'fc1.weight'"):
        trainer.step(j, trainer.start(j))


def test_only_what_may_be_personal_is_kept_of_every_client():
    flags = np.arange(12) % 3 == 0
    assert run(job(algorithms.fedavg())).client_params.saved() == {}
    kept = run(job(algorithms.fedsplit({"fc1": flags}))).client_params.saved()
    assert {name: p.shape for name, p in kept.items()} == {"fc1.weight": (7, 8, 8), "fc1.bias": (7, 8)}


def test_a_clients_batches_do_not_depend_on_who_else_takes_part():
    j = job(algorithms.local(), participation=0.5)
    full = replace(j, participation=1.0)
    some, all_ = (trainer.step(one, trainer.start(one)).client_params.saved() for one in (j, full))
    took_part = trainer.active(j, 0)
    assert 0 < len(took_part) < j.clients
    torch.testing.assert_close(some["fc1.weight"][took_part], all_["fc1.weight"][took_part], atol=1e-6, rtol=1e-5)


def test_kept_adam_state_differs_from_reset_and_equals_one_long_round():
    options = {"optimizer": optim.adam(0.01), "batch_size": None}
    kept = run(job(algorithms.local(), optimizer_state="keep", local_epochs=1, **options), 3)
    reset = run(job(algorithms.local(), local_epochs=1, **options), 3)
    long = run(job(algorithms.local(), local_epochs=3, **options), 1)
    kept, reset, long = (state.client_params.saved()["fc1.weight"] for state in (kept, reset, long))
    torch.testing.assert_close(kept, long, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(kept, reset, atol=1e-4)


def test_random_split_keeps_its_size_and_redraws_only_when_told():
    fixed = job(algorithms.random_split(["fc1"], shared_fraction=0.25))
    moving = job(algorithms.random_split(["fc1"], shared_fraction=0.25, redrawn=True))
    a = [masks.shared_units(fixed.net, run(fixed, t).mask.shared, "fc1") for t in range(4)]
    b = [masks.shared_units(moving.net, run(moving, t).mask.shared, "fc1") for t in range(4)]
    assert all(int(s.sum()) == 3 for s in a + b)
    assert all(torch.equal(s, a[0]) for s in a)
    assert any(not torch.equal(s, b[0]) for s in b)


def test_divergence_names_round_and_client():
    j = job(algorithms.fedavg(), optimizer=optim.sgd(1e30))
    with pytest.raises(FloatingPointError, match=r"diverged in round \d+: fc\d.*client \d+"):
        run(j, 20)


def test_divergence_names_the_first_parameter_that_is_not_finite():
    j = job(algorithms.fedavg())
    trained = trainer.run(j, trainer.start(j))[1].trained
    trained.params["fc2.bias"][3, 1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"diverged in round 2: fc2\.bias of client 3 .*\(1 of 7 clients\)"):
        trained._replace(finite=np.zeros(j.clients, bool)).require_finite(np.arange(j.clients), 2)


def test_rounds_count_from_one_in_messages_as_in_stores():
    j = job(algorithms.fedavg())
    state = trainer.start(j)._replace(round=4)
    state.global_params["fc1.weight"].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="diverged in round 5: fc1"):
        trainer.step(j, state)


def test_a_split_of_another_number_of_units_is_named():
    with pytest.raises(ValueError, match="has 12 units, but the split has 5"):
        run(job(algorithms.fedsplit({"fc1": np.ones(5, bool)})), 1)


OUTPUTS = r"diverged in round 1: the test loss of client 0 is not finite \(5 of 5 clients\)\. Lower the learning rate"


@pytest.mark.parametrize(
    "name", ["local", "fedavg", "fedavg+", "fedavg-shrunken", "fedper", "fedprox", "fedem", "fedrep"]
)
@pytest.mark.parametrize("validation", [None, jobs.rows([8] * 6, 2)])
def test_outputs_that_are_not_finite_are_a_divergence(name, validation):
    """After one step of 1e22 weights are finite; a plain network with them has outputs that are not."""
    once = {"optimizer": optim.sgd(1e22), "local_epochs": 1, "batch_size": None}
    j = jobs.job(algorithms.named(name), validation=validation, **once)
    with pytest.raises(FloatingPointError, match=r"diverged in round 1: .* of client \d is not finite"):
        trainer.measured(j, trainer.start(j))
    if name != "fedavg":
        return
    after = trainer.run(j, trainer.start(j))[0].global_params
    assert all(bool(torch.isfinite(p).all()) for p in after.values())
    h = torch.relu(j.test.x.flatten(1) @ after["fc1.weight"].T + after["fc1.bias"])
    assert not bool(torch.isfinite(h @ after["fc2.weight"].T + after["fc2.bias"]).all())


def test_other_ways_to_predict_must_have_finite_outputs_too():
    usual = {"rounds": 1, "lr": 0.1}
    wild = {"fedavg+": lambda a: algorithms.finetuned(a, rate=1e22)}
    with pytest.raises(FloatingPointError, match=OUTPUTS):
        train(dense(), NET, algorithms.fedavg(), prediction_rules=wild, **usual)
    far = dense(clients=5)
    far["x"] = far["x"] * 1e22
    with pytest.raises(FloatingPointError, match="the test loss by 'finetuned' of client 0 is not finite"):
        train(dense(), NET, algorithms.fedavg(), new=far, **usual)


def test_a_candidate_without_finite_outputs_is_not_chosen():
    both, one = (
        {"prediction_rules": {"fedavg+": lambda a, r=r: algorithms.finetuned(a, rate=r)}} for r in ((1e22, 1.0), 1.0)
    )
    usual = {"rounds": 1, "lr": 0.1}
    found, want = (train(three_splits(), NET, algorithms.fedavg(), **usual, **how)["readouts"] for how in (both, one))
    np.testing.assert_array_equal(found["loss"], want["loss"])


def test_the_command_of_a_run_without_finite_outputs_fails(tmp_path, capsys):
    where = ("--algorithm", "fedavg", "--clients", 5, "--participation", 1, "--rounds", 1, "--local-epochs", 1)
    assert command(*where, "--batch-size", 0, "--optimizer", "sgd", "--lr", 1e22, "--out", tmp_path / "run.zarr") == 1
    assert "training diverged in round 1: the test loss of client 0 is not finite" in capsys.readouterr().err
