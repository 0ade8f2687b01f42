"""An algorithm's functions as the trainer calls them: every one has a default, and a check of what it returns."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import assert_equal, job, run
from toy_methods import HALF, toy

from fedstat.fl import aggregate, algorithms, batches, checks, hooks, loop, masks, optim
from fedstat.fl.algorithm import Algorithm, AlgorithmState, DownloadContext, InitContext, Phase, Samples, SharedMask
from fedstat.fl.hooks import Hooks

PARAMS = {name: torch.ones(2, *shape) for name, shape in job(toy()).net.shapes.items()}


def context_of(j):
    state, clients = trainer.start(replace(j, algorithm=toy())), np.array([1, 0])
    return trainer.context(j, state, clients)


def start_of(j):
    return InitContext(j.net, j.sizes, j.seed, j.device, None, None, None)


def received_of(j):
    up = context_of(j)
    return DownloadContext(j.net, up.after, up.global_params, up.mask.shared, AlgorithmState())


def shared(j):
    return SharedMask(masks.share_all(j.net, j.device))


# How the trainer calls the hook of that name.
CALLS = {
    "init_mask": lambda j: j.hooks.init_mask(start_of(j)),
    "update_mask": lambda j: j.hooks.update_mask(context_of(j), j.net.shapes),
    "wrap": lambda j: j.hooks.wrap(),
    "mixing_weights": lambda j: j.hooks.mixing_weights(context_of(j)),
    "loss": lambda j: j.hooks.loss(j.loss),
    "personal_params": lambda j: replace(
        j, algorithm=j.algorithm._replace(update_mask=lambda up: up.mask)
    ).hooks.personal_params(shared(j)),
    "upload_mask": lambda j: j.hooks.upload_mask(shared(j)),
    "encode": lambda j: j.hooks.encode(context_of(j), shared(j)),
    "weights": lambda j: j.hooks.weights(np.array([2, 0]), lambda: (j.sizes[:3], np.arange(3), 6)),
    "init_state": lambda j: j.hooks.init_state(start_of(j)),
    "update_state": lambda j: j.hooks.update_state(context_of(j)),
    "on_download": lambda j: j.hooks.on_download(lambda: received_of(j)),
    "moments": lambda j: j.hooks.moments(dict, {}),
    "downloads": lambda j: j.hooks.downloads(context_of(j), np.array([0])),
    "common_params": lambda j: j.hooks.common_params(PARAMS),
}
WRONG = {"personal_params": ["fc9"]}  # in place of what is no result of any hook
PHASE_CALLS = {
    "penalty": (PARAMS, PARAMS),
    "sample_weights": (
        None,
        PARAMS,
        Samples(torch.zeros(2, 5), torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool)),
        AlgorithmState(),
    ),
    "anchor": (PARAMS, AlgorithmState()),
    "gradient": (None, PARAMS, 0.1),
}


@pytest.mark.parametrize(
    ("record", "checked", "unchecked"),
    [(Algorithm, hooks.CHECKS, hooks.UNCHECKED), (Phase, checks.PHASE_CHECKS, checks.PHASE_UNCHECKED)],
)
def test_every_field_has_a_check_or_is_listed_as_having_none(record, checked, unchecked):
    assert sorted((*checked, *unchecked)) == sorted(record._fields)


@pytest.mark.parametrize("name", hooks.CHECKS)
def test_what_a_hook_must_not_return_is_named(name):
    j = job(toy(), **HALF)
    wrong = WRONG.get(name, object())
    method = j.algorithm._replace(**{name: lambda *_: wrong})
    said = rf"^method 'toy'(: {name}\({hooks.CHECKS[name][0]}\))? "
    with pytest.raises(ValueError, match=said):
        CALLS[name](replace(j, algorithm=method))


@pytest.mark.parametrize(
    "name", [name for name, (given, _) in hooks.CHECKS.items() if given == "context" and not name.startswith("init")]
)
def test_a_hook_that_changes_what_it_was_given_is_named(name):
    def change(given):
        given.global_params["fc2.bias"].add_(1)

    method = toy()._replace(**{name: change})
    with pytest.raises(
        ValueError, match=rf"^method 'toy': {name}\(.*\) changes .*'fc2.bias'.*, of shape \(3,\), in place"
    ):
        CALLS[name](job(method, **HALF))


def test_models_before_training_are_the_runs_own_too():
    j = job(toy(update_mask=lambda up: up.before["fc2.bias"].zero_() is None or up.mask), **HALF)
    with pytest.raises(ValueError, match=r"update_mask\(context\) changes context.before\['fc2.bias'\], .* in place"):
        j.hooks.update_mask(context_of(j), j.net.shapes)


def test_a_round_context_is_for_reading_and_makes_again_what_it_gave_up():
    up = context_of(job(toy(), **HALF))
    with pytest.raises(AttributeError, match="for reading: 'after' cannot be set"):
        up.after = {}
    with pytest.raises(AttributeError, match="no attribute 'server'"):
        _ = up.server
    first = up.before
    assert up.before is first
    up.free("before")
    assert up.before is not first
    assert_equal(up.before, first)


def test_a_round_holds_no_models_that_observers_do_not_read():
    made = toy(update_mask=lambda up: up.mask if up.before else None)
    j = job(made, optimizer=optim.adam(0.1), optimizer_state="keep")
    state, outcome = trainer.run(j, trainer.start(j))
    assert state.optimizer.saved()
    assert outcome.trained.optimizer == {}
    assert "before" not in vars(outcome.context)


def test_a_round_of_some_clients_is_refused():
    j = job(toy(), **HALF)
    part = replace(j, train=batches.part(j.train, np.array([1, 3])), everyone=j.clients)
    with pytest.raises(ValueError, match="a round needs the data of all 6 clients, but the job has 2"):
        loop.observed_round(part, trainer.start(part), ())


def test_what_a_hook_lacks_has_a_default():
    j = job(toy(), **HALF)
    found = {
        name: CALLS[name](j)
        for name in hooks.CHECKS
        if name not in ("init_mask", "personal_params", "update_mask", "encode")
    }
    every = dict.fromkeys(j.net.shapes, True)
    assert {name: bool(mask.all()) for name, mask in found.pop("upload_mask").items()} == every
    assert found.pop("wrap") is j.net
    assert found.pop("loss") is j.loss
    assert found.pop("downloads").tolist() == [1]
    assert (found.pop("init_state"), found.pop("moments")) == (AlgorithmState(), {})
    assert found.pop("common_params") == PARAMS
    assert found == dict.fromkeys(("mixing_weights", "weights", "update_state", "on_download"))
    up = context_of(j)
    assert j.hooks.update_mask(up, ()) is up.mask
    sent = j.hooks.encode(up, up.mask)
    assert all(sent[name] is up.after[name] for name in j.net.shapes)
    assert list(CALLS["personal_params"](j)) == list(j.net.shapes)  # as update_mask may make any entry personal
    assert j.hooks.personal_params(shared(j)) == {}


def test_weights_are_picked_by_the_numbers_of_clients():
    j = job(toy(weights=lambda _, active, n: active / n / 3), **HALF)
    found = j.hooks.weights(np.array([1, 4]), lambda: (j.sizes[[4, 2, 1]], np.array([4, 2, 1]), 6))
    torch.testing.assert_close(found, torch.tensor([4 / 18, 1 / 18]))


@pytest.mark.parametrize("name", checks.PHASE_CHECKS)
def test_what_a_phase_must_not_return_is_named(name):
    method = toy(phases=(Phase(**{name: lambda *_: object()}),))
    with pytest.raises(ValueError, match=rf"^method 'toy': a phase's {name} must return"):
        getattr(job(method).hooks.phases[0], name)(*PHASE_CALLS[name])


def test_the_loss_of_a_penalty_becomes_the_gradients_of_what_trains():
    def half_squares(params, anchor):
        return sum(((p - anchor[name]) ** 2).flatten(1).sum(1) for name, p in params.items()) / 2

    phase = Phase(penalty=half_squares, is_trainable=lambda name: name.startswith("fc2"))
    j = job(toy(phases=(phase,), finetune=(phase, Phase())))
    params, anchor = ({name: torch.randn(2, *shape) for name, shape in j.net.shapes.items()} for _ in range(2))
    for wrapped in (j.hooks.phases[0], j.hooks.finetune[0], j.hooks.finetunings[0][0]):
        found = wrapped.penalty(params, anchor)
        assert list(found) == ["fc2.weight", "fc2.bias"]
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, params[name] - anchor[name])
    assert j.hooks.finetune[1] == Phase()


def test_phases_that_do_nothing_are_dropped_and_the_others_stay_in_order():
    phases = (Phase(epochs=0), Phase(lr=2), Phase(epochs=0, on_phase_start=lambda *_: None), Phase(lr=3))
    found = job(toy(phases=phases)).phases
    assert [phase.lr for phase in found] == [2, 1, 3]
    assert found[1].on_phase_start is not None


def test_hooks_hold_neither_job_nor_data():
    j = job(toy(phases=(Phase(penalty=lambda p, _: p),)), **HALF)
    run(j, 1)
    found, kept = j.hooks, [weakref.ref(thing) for thing in (j, j.train.x, j.test.x)]
    gc.collect()
    gc.disable()
    try:
        del j
        assert [ref() for ref in kept] == [None] * 3  # by counts of references alone: job and hooks are no cycle
    finally:
        gc.enable()
    assert found.phases[0].penalty(PARAMS, PARAMS) is PARAMS


def test_a_job_with_another_algorithm_has_its_own_hooks():
    j = job(toy(), **HALF)
    assert j.hooks is j.hooks
    assert replace(j, algorithm=algorithms.fedper()).hooks.algorithm.name == "fedper"


@pytest.mark.parametrize("private", [False, True])
def test_a_round_without_clients_asks_for_the_sharing_alone_and_only_if_noise_is_released(private):
    def never(*_):
        raise AssertionError

    asked = dict.fromkeys(("encode", "weights", "mixing_weights", "update_state"), never)
    method = toy(**asked, update_mask=lambda _: shared(j))
    aggregator = aggregate.private(1.0, 1.0) if private else aggregate.weighted_mean()
    j = job(method, aggregator=aggregator, **HALF)
    empty, up = j.hooks.of_empty_round(), context_of(j)
    assert (empty.update_mask(up, j.net.shapes) is up.mask) is not private
    assert [empty.weights(up.clients, never), empty.mixing_weights(up), empty.update_state(up)] == [None] * 3
    assert list(empty.encode(up, up.mask)) == list(j.net.shapes)


LOOKS = {
    "nothing": ({}, (False, False)),
    "sums alone": ({"update_mask": lambda up: up.mask, "moments": lambda *_: {}}, (False, False)),
    "models to split by": ({"update_mask": lambda up: up.mask}, (True, False)),
    "mixing_weights": ({"mixing_weights": lambda up: torch.eye(len(up.clients))}, (True, True)),
    "on_download": ({"on_download": lambda _: {}}, (False, True)),
    **{name: ({name: lambda _: None}, (True, False)) for name in ("encode", "update_state", "downloads")},
    "measures": ({"measures": {"x": None}}, (True, False)),
}


@pytest.mark.parametrize("what", LOOKS)
def test_which_algorithms_look_at_clients_and_whose_downloads_differ(what):
    parts, expected = LOOKS[what]
    found = Hooks(toy(**parts), job(toy()).net, clients=6)
    assert (found.looks_at_clients, found.downloads_differ) == expected
