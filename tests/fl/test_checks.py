"""What a method must not do is named, with its name and the entry; what its functions leave out has a default."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, dataset, job, run
from toy_methods import HALF, REMEMBERS, by_loss, toy

from fedstat.fl import aggregate, algorithms, communication_round, masks, nets, train
from fedstat.fl.algorithm import AlgorithmState, Measure, Phase, SharedMask
from fedstat.fl.local_training import train_chunk


def zeroed(of):
    def change(given):
        for p in of(given).values():
            p.zero_()
        return {}

    return change


def shares(mask):
    return toy()._replace(init_mask=lambda start: SharedMask(mask(start)))


CHANGES_DOWNLOAD = toy(on_download=zeroed(lambda r: r.global_params))
UNSHARED = toy()._replace(init_mask=lambda s: masks.share_all(s.net, s.device))
UNKNOWN = toy(update_mask=lambda up: up.mask, personal_params=lambda _: ["fc9"])
WRONG = [
    (toy(encode=zeroed(lambda up: up.global_params)),
     r"'toy': encode\(context\) changes context.global_params\['fc1"),
    (toy(encode=lambda up: up.clients.sort() or {}), "encode.*changes context.clients in place"),
    (toy(encode=lambda up: {"fc2.bias": up.after["fc2.bias"].double()}), "'fc2.bias'.*float64"),
    (CHANGES_DOWNLOAD, r"on_download\(context\) changes the server's 'fc1"),
    (toy(weights=lambda *_: None), "weights.*must return numbers, but got None"),
    (toy(init_state=lambda _: None), r"init_state\(context\) must return an AlgorithmState.*NoneType"),
    (toy(init_state=lambda _: AlgorithmState({}, {"a": np.zeros(2)})), "the server's 'a' as a Tensor.*ndarray"),
    (UNSHARED, "must return a SharedMask.*dict"),
    (UNKNOWN, r"personal_params\(net\) names \['fc9'\]"),
    (toy(encode=lambda up: {"fc2.bias": up.after["fc2.bias"][:, :2]}),
     r"'toy'.*encode.*'fc2.bias'.*\(2, 3\).*\(2, 2\)"),
    (toy(encode=lambda up: {"fc9": up.after["fc2.bias"]}), r"encode\(context\) returns 'fc9'.*\['fc1.weight'"),
    (algorithms.fedper()._replace(encode=lambda up: {"fc2.bias": up.after["fc2.bias"]}),
     r"'fedper'.*'fc2.bias', of shape \(3,\), but no entry of it is shared"),
    (toy(encode=lambda up: up.after["fc2.bias"]), "must return a dict of tensors by name, but got Tensor"),
    (toy(weights=lambda _, a, __: 0.5 - np.arange(len(a))),
     r"weights\(sizes, active, clients\).*smallest is -0.5"),
    (toy(weights=lambda n, *_: n / 9), "sum to at most 1.*the sum"),
    (toy(weights=lambda n, *_: n * np.nan), "must be at least 0.*nan"),
    (toy(weights=lambda *_: np.ones(7) / 7), r"shape \(2,\), one for each selected client, but got \(7,\)"),
    (toy(init_state=lambda _: AlgorithmState({"mean": torch.zeros(10, 6)})),
     r"'toy': init_state\(context\).*'mean' as a Tensor whose first axis is the 6 clients, but got \(10, 6\)"),
    (REMEMBERS._replace(update_state=lambda up: AlgorithmState({}, up.state.server)),
     r"whole method state, but lacks \['fc1.weight'.* of clients"),
    (REMEMBERS._replace(update_state=lambda up: up.state._replace(server={"rounds": torch.zeros(2)})),
     r"update_state\(context\), server must return 'rounds' as a Tensor of shape \(\), but got \(2,\)"),
    (toy(on_download=lambda r: {"fc1.bias": r.global_params["fc1.bias"]}),
     r"on_download\(context\) must return 'fc1.bias' as a Tensor of shape \(2, 10\), but got \(10,\)"),
    (toy(on_download=lambda r: {"fc2.biass": r.client_params["fc2.bias"]}),
     "returns 'fc2.biass'.*Did you mean 'fc2.bias'"),
    (shares(lambda s: masks.share_all_but(s.net, ["fc3"], s.device)), "'fc3'.*Did you mean 'fc"),
    (shares(lambda _: {"fc1.wieght": torch.tensor(True)}), "masks of .'fc1.wieght'.*Did you mean 'fc1.weight'"),
    (shares(lambda _: {"fc1.weight": torch.tensor(True)}),
     r"no mask of 'fc1.bias', of shape \(10,\) \(nor of 'fc2.weight', 'fc2.bias'\).*Begin with masks.share_all"),
    (toy(phases=(Phase(penalty=lambda p, _: {"fc1.wieght": p["fc1.weight"]}),)),
     r"penalty\(params, anchor\) of phase 1 returns 'fc1.wieght'.*Did you mean 'fc1.weight'"),
    (toy(phases=(Phase(penalty=lambda p, _: p["fc1.wieght"].sum()),)),
     r"penalty.* asks for 'fc1.wieght', but the network has .*Did you mean 'fc1.weight'"),
    (toy(phases=(Phase(penalty=lambda p, _: p["fc1.weight"]),)), r"one number for each client, of shape \(2,\)"),
    (toy(measures={"x": Measure(lambda _: np.ones(9))}), r"measure 'x' must have shape \(2,\), but got \(9,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "message"), WRONG)
def test_what_is_no_answer_or_changes_the_run_in_place_is_named_before_the_first_round(method, message, monkeypatch):
    monkeypatch.setattr(communication_round, "train_locally", None)
    with pytest.raises(ValueError, match=message):
        trainer.start(job(method, **HALF))


IN_ROUND = [
    (toy(mixing_weights=lambda _: torch.eye(6)),
     r"mixing_weights\(context\) must return 'matrix'.*\(3, 3\), but got \(6, 6\)"),
    (toy(mixing_weights=lambda up: torch.eye(len(up.clients)) * np.nan), "must return finite weights"),
    (toy(mixing_weights=zeroed(lambda up: up.after)), r"mixing_weights\(context\) changes context.after\['fc1"),
    (toy(phases=(Phase(gradient=lambda g, p, _: {"fc1.bias": g(p)["fc1.bias"]}),)), "gradient.*lacks"),
    (toy(phases=(Phase(penalty=lambda p, _: {"fc1.bias": p["fc1.bias"][0]}),)), "penalty.*'fc1.bias'"),
    (toy(phases=(Phase(penalty=lambda p, _: torch.zeros(len(p["fc1.weight"]))),)), "not depend on trained parameters"),
    (toy(phases=(Phase(anchor=lambda *_: None, penalty=lambda *_: {}),)), "anchor must return a dict"),
    (toy(phases=(Phase(sample_weights=lambda *_: torch.ones(2, 1)),)), "_weights must return a Tensor"),
    (toy(mixing_weights=by_loss), r"samples, but the data have none\. Set validation_fraction=0\.1 \(--val"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "message"), IN_ROUND)
def test_what_does_not_fit_in_a_round_is_named_in_the_first(method, message):
    with pytest.raises(ValueError, match=message):
        run(job(method, **HALF | {"client_chunk": None}), 1)


def counted(n):
    return Measure(lambda _: 0, ("k",), {"k": n})


@pytest.mark.parametrize(("method", "participation", "message"), [
    (toy(phases=(Phase(steps=0),)), 1, r"phases\[0\].steps"),
    (toy(phases=(Phase(repeats=0),)), 1, r"phases\[0\].repeats"),
    (toy(phases=(Phase(epochs=-1),)), 1, r"phases\[0\].epochs"),
    (toy(phases=(Phase(optimizer="sgd"),)), 1,
     r"phases\[0\].optimizer must be an Optimizer, such as optim.sgd\(0.1\), but got 'sgd'"),
    (toy(phases=(Phase(anchor="downlaod"),)), 1, "Did you mean 'download'"),
    (toy(phases=(Phase(layers=lambda _: ["fc9"]),)), 1, "a layer of"),
    (toy(phases=Phase()), 1, "must be a tuple of Phase"),
    (toy(measures={"x": Measure(lambda _: np.ones(3), ("k",))}), 1, "'k' must have a size"),
    (toy(measures={"x": counted(3), "y": counted(4)}), 1, "'k' must have a"),
    (toy(measures={"client": Measure(lambda _: 0)}), 1, "cannot be called 'client'"),
    (toy(), (0.9, 0.3), "a range"),
    (toy(), (0.3, 0.5, 0.7), "a range"),
    (toy(), (0.0, 0.5), "participation"),
    (toy(), (0.01, 1.0), "selects none of "),
])  # fmt: skip
def test_phases_measures_and_ranges_that_are_none_are_named(method, participation, message):
    with pytest.raises(ValueError, match=message):
        train(dataset(SAMPLES), nets.mlp(SIZES), method, rounds=1, participation=participation)


def test_an_aggregator_that_leaves_out_entries_or_whose_state_cannot_be_saved_is_named():
    nothing = aggregate.stateless("nothing", lambda _: {})
    with pytest.raises(ValueError, match="the aggregator 'nothing' must return every one of"):
        run(job(toy(), aggregator=nothing, **HALF), 1)
    numbers = nothing._replace(init=lambda _: np.zeros(3))
    with pytest.raises(ValueError, match=r"state of the aggregator 'nothing' must be tensors.*ndarray"):
        trainer.start(job(toy(), aggregator=numbers, **HALF))


def test_parameters_that_are_not_received_are_the_servers_where_shared():
    a, b = (run(job(toy(**more), **HALF), 3) for more in ({"on_download": lambda _: {}}, {}))
    assert_equal(a.global_params, b.global_params)


def test_entries_that_new_clients_hold_stay_whatever_comes_after_a_step():
    j = job(toy(phases=(Phase(post_step=lambda params, *_: [p.mul_(0.5) for p in params.values()]),)), **HALF)
    params = {name: p.expand(2, *p.shape).clone() for name, p in trainer.start(j).global_params.items()}
    start, everything = {name: p.clone() for name, p in params.items()}, masks.share_all(j.net, j.device)
    train_chunk(j, params, np.array([0, 1]), j.phases, key=("new", 0), frozen=everything)
    assert_equal(params, start)


def test_new_clients_receive_under_what_all_clients_share():
    def init_mask(start):
        own = torch.arange(len(start.sizes)) > 0
        return SharedMask({n: own.view(-1, *(1,) * len(s)) for n, s in start.net.shapes.items()})

    seen = []

    def on_download(r):
        seen.append({name: tuple(mask.shape) for name, mask in r.shared.items()})
        return {}

    method = toy(on_download=on_download)._replace(init_mask=init_mask)
    train(
        dataset(SAMPLES), nets.mlp(SIZES), method, rounds=1, unseen_clients=dataset(SAMPLES * 2)
    )  # more than have masks
    assert {"fc1.weight": (1, 1), "fc1.bias": (1,), "fc2.weight": (1, 1), "fc2.bias": (1,)} in seen  # no row is theirs


def test_personal_heads_are_neither_sent_nor_received():
    def average(r):
        return {name: (p + r.global_params[name]) / 2 for name, p in r.client_params.items()}

    made = [
        algorithms.personal_head(toy(on_download=average, encode=lambda up: {n: p / 2 for n, p in up.after.items()}))
    ]
    made.append(algorithms.fedper())
    (mixed, plain) = (run(job(one, **HALF), 1) for one in made)
    for name in ("fc2.weight", "fc2.bias"):
        assert torch.equal(mixed.client_params.saved()[name], plain.client_params.saved()[name])
    head = trainer.models(job(made[0], **HALF), mixed)
    assert torch.equal(head["fc2.weight"], mixed.client_params.saved()["fc2.weight"])
