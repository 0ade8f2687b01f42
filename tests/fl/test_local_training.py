"""The stacked engine does for every client what a plain per-client loop does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import FLAGS, assert_clients_near, assert_equal, job, optimizer_pair, rows, run
from fl_runs import command
from small_runs import NET, dense, three_splits

from fedstat.fl import algorithms, nets, optim, train

OPTIMIZERS = {
    "sgd": optimizer_pair("sgd", 0.1),
    "sgd with momentum": optimizer_pair("sgd", 0.05, momentum=0.9),
    "sgd with decay": optimizer_pair("sgd", 0.05, weight_decay=0.1),
    "adam": optimizer_pair("adam", 0.01, weight_decay=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize("layers", [[6, 12, 3], [6, 6, 5, 1]])
def test_fedavg_equals_the_plain_loop(optimizer, batch_size, layers):
    stacked, plain = OPTIMIZERS[optimizer]
    sizes = [23, 7, 40, 1, 16, 16, 31]
    data = rows(sizes, 0, classes=layers[-1])
    j = job(algorithms.fedavg(), net=nets.mlp(layers), data=data, sizes=sizes, optimizer=stacked, batch_size=batch_size)
    j = replace(j, test=rows([9] * len(sizes), 1, classes=layers[-1]))
    theirs = plain_loop.run(j, layers, plain, rounds=2, shared=lambda trained, _: dict.fromkeys(trained, np.True_))
    assert_clients_near(j, run(j, 2), *theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (optim.sgd, {"lr": 0}), (optim.sgd, {"weight_decay": -0.1}), (optim.sgd, {"momentum": -0.1}),
        (optim.sgd, {"momentum": 1}), (optim.adam, {"lr": 0}), (optim.adam, {"weight_decay": -0.1}),
        (optim.adam, {"eps": 0}), (optim.adam, {"betas": (0.9, 1)}), (optim.adam, {"betas": (-0.1, 0.9)}),
    ],
)  # fmt: skip
def test_settings_of_an_optimizer_have_their_range(make, wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be a finite number"):
        make(**{"lr": 0.1} | wrong)


@pytest.mark.parametrize("make", [algorithms.fedper, algorithms.local])
def test_a_single_client_has_the_model_of_fedavg_whatever_is_personal(make):
    alone = [job(algorithm(), sizes=[16]) for algorithm in (algorithms.fedavg, make)]
    assert_equal(*(trainer.models(one, run(one, 2)) for one in alone))


def test_only_what_may_be_personal_is_kept_of_every_client():
    assert run(job(algorithms.fedavg()), 1).client_params.saved() == {}
    kept = run(job(algorithms.fedsplit({"fc1": FLAGS})), 1).client_params.saved()
    assert {name: p.shape for name, p in kept.items()} == {"fc1.weight": (6, 6, 6), "fc1.bias": (6, 6)}


def test_kept_adam_state_differs_from_reset_and_equals_one_long_round():
    options = {"optimizer": optim.adam(0.01), "batch_size": None}
    kept = run(job(algorithms.local(), optimizer_state="keep", local_epochs=1, **options), 3)
    reset = run(job(algorithms.local(), local_epochs=1, **options), 3)
    long = run(job(algorithms.local(), local_epochs=3, **options), 1)
    kept, reset, long = (state.client_params.saved()["fc1.weight"] for state in (kept, reset, long))
    torch.testing.assert_close(kept, long, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(kept, reset, atol=1e-4)


def test_divergence_names_the_first_parameter_that_is_not_finite():
    j = job(algorithms.fedavg())
    trained = trainer.run(j, trainer.start(j))[1].trained
    trained.params["fc2.bias"][3, 1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"diverged in round 2: fc2\.bias of client 3 .*\(1 of 6 clients\)"):
        trained._replace(finite=np.zeros(j.clients, bool)).require_finite(j, np.arange(j.clients), 2)


def test_rounds_count_from_one_in_messages_as_in_stores():
    j = job(algorithms.fedavg())
    state = trainer.start(j)._replace(round=4)
    state.global_params["fc1.weight"].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"diverged in round 5: fc1.* of client \d"):
        trainer.step(j, state)


def test_a_split_of_another_number_of_units_is_named():
    with pytest.raises(ValueError, match="has 10 units, but the split has 5"):
        run(job(algorithms.fedsplit({"fc1": np.ones(5, bool)})), 1)


OUTPUTS = r"diverged in round 1: the test loss of client 0 is not finite \(5 of 5 clients\)\. Lower the learning rate"


@pytest.mark.parametrize(
    "name", ["local", "fedavg", "fedavg+", "fedavg-shrunken", "fedper", "fedprox", "fedem", "fedrep"]
)
@pytest.mark.parametrize("validation", [None, rows([8] * 6, 2)])
def test_outputs_that_are_not_finite_are_a_divergence(name, validation):
    """After one step of 1e22 weights are finite; a plain network with them has outputs that are not."""
    once = {"optimizer": optim.sgd(1e22), "local_epochs": 1, "batch_size": None}
    j = job(algorithms.named(name), validation=validation, **once)
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
        train(dense(), NET, algorithms.fedavg(), unseen_clients=far, **usual)


def test_a_candidate_without_finite_outputs_is_not_chosen():
    rules = {"one": partial(algorithms.finetuned, rate=1.0), "both": partial(algorithms.finetuned, rate=(1e22, 1.0))}
    done = train(three_splits(), NET, algorithms.fedavg(), rounds=1, lr=0.1, prediction_rules=rules)
    np.testing.assert_array_equal(*done["prediction_rules/loss"])


def test_the_command_of_a_run_without_finite_outputs_fails(tmp_path, capsys):
    where = ("--algorithm", "fedavg", "--clients", 5, "--participation", 1, "--rounds", 1, "--local-epochs", 1)
    assert command(*where, "--batch-size", 0, "--optimizer", "sgd", "--lr", 1e22, "--out", tmp_path / "run.zarr") == 1
    assert "training diverged in round 1: the test loss of client 0 is not finite" in capsys.readouterr().err
