"""A mask of any shape that broadcasts against (client, *shape) does what a plain per-client loop does with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import assert_clients_near, assert_equal, dataset, run
from masked_jobs import CLIENTS, SAMPLES, SIZES, SPECS, algorithm, arrays, job, mask
from small_runs import interrupted_and_resumed, same

from fedstat.fl import masks, nets, optim, train
from fedstat.fl.algorithm import Phase, SharedMask
from fedstat.fl.batches import Rows

SGD = (optim.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1))
ADAM = (optim.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01))
MIX = np.random.default_rng(0).random((CLIENTS, CLIENTS)) + np.eye(CLIENTS)
HALF = {"participation": 0.5, "client_chunk": 2}

# Options of the job, parts of the algorithm, and words for the plain loop.
SETTINGS = {
    "all clients at once": ({}, ()),
    "chunks": ({"client_chunk": 2, "threads": 2}, ()),
    "half of the clients": ({"participation": 0.5}, ()),
    "chunks of half": (HALF, ()),
    "half a server step": (HALF | {"server_lr": 0.5}, ()),
    "adam": ({"optimizer": ADAM, "batch_size": None}, ()),
    "kept adam": (HALF | {"optimizer": ADAM, "optimizer_state": "keep"}, ()),
    "mixing_weights": ({}, ("mixing_weights",)),
    "mixing, chunks of half": (HALF, ("mixing_weights",)),
    "moving": ({}, ("update_mask",)),
    "moving, half a server step": (HALF | {"server_lr": 0.5}, ("update_mask",)),
    "moving, mixing": (HALF, ("update_mask", "mixing_weights")),
    "fine-tuned": (HALF, ("finetune",)),
    "two phases": (HALF, ("phases",)),
}


def mixture(up):
    weights = MIX[np.ix_(up.clients, up.clients)]
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)).float()


def head(name):
    return name.startswith("fc2")


def both(spec, setting, rounds=3):
    """The stacked run, and models and accuracies of the plain loop."""
    options, with_ = SETTINGS[setting]
    stacked, one = options.get("optimizer", SGD)
    parts = {
        "mixing_weights": {"mixing_weights": mixture},
        "update_mask": {"update_mask": lambda up: SharedMask(mask(spec, 1 + up.round))},
        "finetune": {"finetune": (Phase(1),)},
        "phases": {"phases": (Phase(is_trainable=head), Phase(1))},
    }
    words = {
        "mixing_weights": {"mix": MIX},
        "update_mask": {"shared": lambda _, number: arrays(mask(spec, 1 + number))},
        "finetune": {"finetune": ({"epochs": 1},)},
        "phases": {"phases": ({"is_trainable": head}, {"epochs": 1})},
    }
    chosen = {name: value for part in with_ for name, value in parts[part].items()}
    j = job(algorithm(mask(spec), **chosen), **options | {"optimizer": stacked})
    state = run(j, rounds)
    said = {"shared": lambda *_: arrays(mask(spec))}
    said |= {name: value for part in with_ for name, value in words[part].items()}
    theirs, accuracy = plain_loop.run(j, SIZES, one, rounds=rounds, before=arrays(mask(spec)), **said)
    return j, state, theirs, accuracy


def is_often(spec, setting):
    """True for four settings of every shape, and so for four shapes of every setting."""
    return (SPECS.index(spec) - [*SETTINGS].index(setting)) % len(SPECS) % 4 == 0


PAIRS = [pytest.param(*pair, marks=() if is_often(*pair) else pytest.mark.slow) for pair in product(SPECS, SETTINGS)]


@pytest.mark.parametrize(("spec", "setting"), PAIRS)
def test_masks_of_every_shape_equal_the_plain_loop(spec, setting):
    assert_clients_near(*both(spec, setting))


def test_a_run_under_masks_of_single_clients_is_recorded_and_goes_on_where_it_was_killed(tmp_path):
    spec = "client,unit,column"
    made = algorithm(mask(spec, share=0.98), update_mask=lambda up: SharedMask(mask(spec, 1 + up.round, share=0.98)))
    options = {"rounds": 4, "participation": 0.5, "seed": 4, "threads": 1, "ablation": 1}
    go = partial(train, dataset(SAMPLES), nets.mlp(SIZES), made, unseen_clients=dataset(SAMPLES[:4], 2), **options)
    again = interrupted_and_resumed(go, tmp_path / "run.zarr", after=2)
    same(go(), again)
    units = [mask(spec, 1 + t, share=0.98)["fc1.weight"].numpy().all((0, 2)) for t in range(4)]
    assert 0 < np.mean(units) < 1
    np.testing.assert_array_equal(again["split/fc1/shared"], units)


def test_units_are_given_as_a_list_or_as_an_array():
    net, flags = nets.mlp(SIZES), [True, False, True, True, False, True]
    listed, array = (masks.units(net, {"fc1": f}, torch.device("cpu")) for f in (flags, np.array(flags)))
    assert_equal(listed, array)
    assert listed["fc1.bias"].tolist() == flags


def test_a_layer_of_several_weights_has_them_all_as_incoming_weights():
    names = ["gru.weight_input", "gru.weight_state", "gru.bias", "out.gru.weight"]
    net = nets.mlp(SIZES)._replace(shapes=dict.fromkeys(names, (3, 2)))
    assert masks.incoming(net, "gru") == ["gru.weight_input", "gru.weight_state"]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [{}, {"mixing_weights": lambda up: mixture(up).to(up.weights.device)}])
@pytest.mark.parametrize("spec", SPECS)
def test_a_gpu_gives_what_the_cpu_gives(spec, parts):
    here = job(algorithm(mask(spec), **parts), participation=0.5)
    moved = {name: m.cuda() for name, m in mask(spec).items()}
    rows = {name: Rows(r.x.cuda(), r.y.cuda(), r.start) for name, r in here.subsets.items()}
    there = replace(here, algorithm=algorithm(moved, **parts), **rows)
    a, b = (trainer.models(one, run(one)) for one in (here, there))
    for key, p in a.items():
        torch.testing.assert_close(b[key].cpu(), p, atol=1e-4, rtol=1e-4)
