"""What cannot run between separate parties is refused in one line, before training where it can be known."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flower_parties import InProcess, data, own_data, parties, plan, run
from scripts import ROOT, load

from fedstat.fl import aggregate, algorithms, optim
from fedstat.fl.algorithm import Algorithm, SharedMask
from fedstat.fl.masks import share_all
from fedstat.flower import Strategy, client_app


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("factorized-fl-beta", "averages the entries with weights for each client"),
        ("fedcp", "models of all selected clients"),
        ("fedavg-shrunken", "held-out samples of all clients"),
    ],
)
def test_methods_that_need_single_clients(name, why):
    with pytest.raises(ValueError, match=rf"{name}.* cannot run on separate clients: it .*{why}"):
        plan(name)


def test_agreement_whose_sums_are_weights():
    with pytest.raises(ValueError, match="estimator='icc' cannot run on separate clients"):
        plan(algorithms.fedfac(estimator="icc"))


def test_other_aggregators():
    halved = aggregate.stateless("halved", lambda sent: sent.values)
    with pytest.raises(ValueError, match=r"aggregator must be weighted_mean\(\) on separate clients, .*halved"):
        plan("fedavg", aggregator=halved)


def test_secure_sums_of_so_few_that_they_hide_nobody():
    with pytest.raises(
        ValueError, match="secure=True needs at least 3 selected clients in every round, but a round may select 2 of 4"
    ):
        plan("fedavg", secure=True, participation=0.5)


@pytest.mark.parametrize("headroom", [0.5, float("nan")])
def test_headroom_below_one(headroom):
    with pytest.raises(ValueError, match="headroom"):
        plan("fedavg", secure=True, headroom=headroom)


def test_parties_with_other_settings_than_the_server():
    strategy, grid = parties(plan("fedavg"))
    grid.app = client_app(lambda _: plan("fedavg", seed=4), own_data)
    with pytest.raises(
        RuntimeError,
        match=r"client 0: .*settings differ from the server's in seed: seed is 4 on the client, 3 on the server",
    ):
        strategy.start(grid, num_rounds=1)


def test_a_party_that_wants_secure_sums_answers_no_open_message():
    strategy, grid = parties(plan("fedavg"))
    grid.app = client_app(lambda _: plan("fedavg", secure=True), own_data)
    with pytest.raises(RuntimeError, match="settings differ from the server's in secure"):
        strategy.start(grid, num_rounds=1)
    wants = plan("fedavg", secure=True)
    object.__setattr__(wants, "require_same", lambda _: None)  # a party that does not compare
    grid.app = client_app(lambda _: wants, own_data)
    with pytest.raises(RuntimeError, match="the client's plan has secure=True, but it got a request for open sums"):
        strategy.start(grid, num_rounds=1)


def test_numbers_given_twice():
    strategy, grid = parties(plan("fedavg"), numbers=[0, 1, 1, 2])
    with pytest.raises(ValueError, match=r"numbers 0 to 3, each once, but have \[0, 1, 1, 2\]"):
        strategy.start(grid, num_rounds=1)


@pytest.mark.parametrize(("clients", "seen"), [(5, "5 clients, but 4"), (3, "3 clients, but 4")])
def test_another_number_of_parties_than_planned(clients, seen):
    strategy, grid = parties(plan("fedavg", clients=clients))
    with pytest.raises(RuntimeError, match=f"the plan needs {seen} connected within 0.1 s.*num-supernodes"):
        strategy.start(grid, num_rounds=1)


def test_a_party_with_the_data_of_several_clients():
    chosen = plan("fedavg")
    grid = InProcess(client_app(lambda _: chosen, lambda _: data()))
    with pytest.raises(RuntimeError, match="client 0: data must be of one client, but are of 4"):
        Strategy(chosen).start(grid, num_rounds=1)


def test_a_party_whose_training_diverges():
    with pytest.raises(RuntimeError, match=r"client \d: training diverged in round 1: .*Lower the learning rate"):
        run(plan("fedavg", optimizer=optim.sgd(1e30), local_epochs=3), rounds=1)


def test_a_party_that_fails_or_is_silent():
    strategy, grid = parties(plan("fedavg"))

    def own(_):
        raise KeyError("no such file")

    grid.app = client_app(lambda _: strategy.plan, own)
    with pytest.raises(RuntimeError, match=r"node 100 failed: KeyError: 'no such file'"):
        strategy.start(grid, num_rounds=1)
    strategy, grid = parties(plan("fedavg"))
    grid.send_and_receive = lambda messages, **_: [grid._answered(m) for m in list(messages)[:3]]
    with pytest.raises(RuntimeError, match="1 of 4 clients gave no answer within 7 s, first node 97"):
        strategy.start(grid, num_rounds=1, timeout=7)


def test_a_method_of_ones_own_that_looks_at_single_clients():
    def update_mask(context):
        return SharedMask({name: context.after[name].std(0) < 1 for name in context.net.shapes})

    own = Algorithm("mine", lambda start: SharedMask(share_all(start.net, start.device)), update_mask)
    with pytest.raises(ValueError, match="'mine' reads models of single clients, but the server of separate clients"):
        run(plan(own), rounds=1)


def test_moments_of_ones_own_that_are_none():
    own = algorithms.fedavg()._replace(moments=lambda _, __, after: {"fc1": after["fc1.weight"].sum(0)})
    with pytest.raises(
        ValueError, match=r"must return fedstat\.stats\.moments\.Moments, but returned Tensor for layer 'fc1'"
    ):
        run(plan(own), rounds=1)


def test_a_start_that_does_not_fit_the_network():
    strategy, grid = parties(plan("fedavg"))
    given = strategy.initial_arrays()
    del given["fc1.bias"]
    with pytest.raises(ValueError, match=r"initial_arrays must return every one of .* but lacks \['fc1.bias'\]"):
        strategy.start(grid, given, num_rounds=1)


def test_output_layers_of_parties_that_number_classes_differently():
    def permuted(context):
        own = own_data(context)
        y = own["y"].to_numpy()
        shift = context.node_config["partition-id"]
        return own.assign(y=("sample", (y + shift) % 10)).assign_coords(y_true=("sample", y))

    for name in ("fedavg", "fedavg-personal-head"):
        strategy, grid = parties(plan(name))
        grid.app = client_app(lambda _, chosen=strategy.plan: chosen, permuted)
        if name == "fedavg":
            with pytest.raises(ValueError, match="number their classes differently"):
                strategy.start(grid, num_rounds=1)
        else:
            strategy.start(grid, num_rounds=1)
            assert np.isfinite(strategy.scores[0]["loss"]).all()
            assert torch.isfinite(strategy.rounds[0].global_params["fc1.weight"]).all()


@pytest.mark.parametrize("setting", [{"metrics": "auc"}, {"store_predictions": True}, {"probe": "drift"}])
def test_measurements_that_parties_do_not_send(setting):
    folder = ROOT / "simulations" / "flower"
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    with pytest.raises(ValueError, match=rf"{next(iter(setting))}=.* is not supported on separate clients"):
        load(folder / "parties" / "app.py").plan(SimpleNamespace(run_config=config | setting))
