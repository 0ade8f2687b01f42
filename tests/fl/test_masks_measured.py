"""What is measured under a mask of any shape: units, bytes, new clients, the ablation; and masks that are refused."""

from __future__ import annotations

import math

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import assert_equal, image_job, rows, run
from masked_jobs import CLIENTS, SHAPES, SIZES, SPECS, algorithm, job, mask, whole

from fedstat._utils import streams
from fedstat.fl import communication_round, masks, nets
from fedstat.fl.algorithm import Algorithm, SharedMask
from fedstat.fl.probes import variants

LAYERS = {"fc1": 6, "fc2": 3}
HALF = {"participation": 0.5, "client_chunk": 2}


@pytest.mark.parametrize("spec", SPECS)
def test_a_unit_is_shared_if_every_client_shares_all_its_incoming_weights(spec):
    for given in (mask(spec), mask(spec, share=0.98)):
        for layer, units in LAYERS.items():
            entries = whole(given)[f"{layer}.weight"].numpy()
            by_hand = [all(entries[c, u, i] for c in range(CLIENTS) for i in range(6)) for u in range(units)]
            assert masks.shared_units(nets.mlp(SIZES), given, layer).tolist() == by_hand


def bytes_by_hand(spec, new, old, clients):
    """Up and down, client by client; ``new`` and ``old`` are masks as given."""
    up = down = 0
    for c in clients:
        own, was = ({name: m[c].numpy() for name, m in whole(given).items()} for given in (new, old))
        up += 4 * sum(int(m.numpy().max(0).sum()) for m in whole(new).values())
        down += 4 * sum(int(m.sum()) for m in own.values())
        for layer, units in LAYERS.items():
            names = [f"{layer}.weight", f"{layer}.bias"]
            if any((own[name] != was[name]).any() for name in names):
                bits = sum(new[name].numel() for name in names)
                if spec.startswith("client"):
                    bits //= CLIENTS
                down += math.ceil((bits if "column" in spec else units) / 8)
    return up, down


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_a_count_client_by_client(spec):
    method = algorithm(
        mask(spec), update_mask=lambda up: SharedMask(mask(spec, 1 + up.round // 2))
    )  # moves every other round
    j = job(method, track=True, **HALF)
    state = trainer.start(j)
    for number in range(4):
        clients = trainer.active(j, number)
        old, (state, metrics) = state, trainer.measured(j, state)
        by_hand = bytes_by_hand(spec, state.mask.shared, old.mask.shared, clients)
        assert (int(metrics["bytes_up"]), int(metrics["bytes_down"])) == by_hand


def test_what_a_method_says_it_uploads_is_counted_by_client():
    given = mask("client,unit,column")
    j = job(algorithm(given, upload_mask=lambda *_: given), track=True, **HALF)
    metrics = trainer.measured(j, trainer.start(j))[1]
    by_hand = 4 * sum(int(m[trainer.active(j, 0)].sum()) for m in whole(given).values())
    assert int(metrics["bytes_up"]) == by_hand


def accuracy(params, data, c):
    net = plain_loop.module(SIZES)
    net.load_state_dict(params)
    x, y = plain_loop.samples(data, c)
    return plain_loop.accuracy(net(x), y), net


@pytest.mark.parametrize("n_new", [4, CLIENTS])
@pytest.mark.parametrize("spec", SPECS)
def test_new_clients_hold_what_all_clients_share(spec, n_new):
    j = job(algorithm(mask(spec)), **HALF)
    state = run(j, 2)
    train, test = rows([7, 12, 3, 9, 5, 8][:n_new], 2), rows([40] * n_new, 3)
    found = variants.unseen_scores(j, state, train, test)
    models = [{name: p[k] for name, p in trainer.models(j, state).items()} for k in range(CLIENTS)]
    for c in range(n_new):
        (x, y), plain = plain_loop.samples(train, c), {}
        for rule, held in (
            ("finetuned", {}),
            ("local_train", {name: torch.from_numpy(m.numpy().min(0)) for name, m in whole(mask(spec)).items()}),
        ):
            plain["global"], net = accuracy(state.global_params, test, c)
            options = {"epochs": 2, "batch_size": 5, "rng": streams.generator(j.seed, "new", 2, 0, c), "held": held}
            plain_loop.train_client(net, x, y, lambda p: torch.optim.SGD(p, lr=0.1), **options)
            plain[rule], _ = accuracy(net.state_dict(), test, c)
        x, y = plain_loop.samples(test, c)
        votes = sum(torch.softmax(accuracy(model, test, c)[1](x), 1) for model in models)
        plain["ensemble"] = float((votes.argmax(1) == y).float().mean())
        assert {rule: float(values[c]) for rule, values in found.items()} == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_the_ablation_replaces_every_clients_own_part(spec):
    j = job(algorithm(mask(spec)), **HALF)
    state = run(j, 2)
    found = variants.ablated_scores(j, state, draws=2)
    mine, shared = trainer.models(j, state), whole(mask(spec))
    split = [name for name, m in shared.items() if 0 < int(m.sum()) < m.numel()]
    for c in range(CLIENTS):
        own = {name: p[c] for name, p in mine.items()}
        for draw in range(2):
            rng = streams.generator(j.seed, "masking", draw, c)
            noise = {name: torch.from_numpy(rng.standard_normal(SHAPES[name], dtype=np.float32)) for name in split}
            for part, said in enumerate(variants.PARTS):
                changed = {name: p.clone() for name, p in own.items()}
                for name in split if part else ():
                    at = shared[name][c] == said.startswith("shared")
                    sd = 1.0 if "N(0, 1)" in said else own[name].std(correction=0)
                    changed[name][at] = (noise[name] * sd)[at]
                assert found[part, draw, c] == pytest.approx(accuracy(changed, j.test, c)[0], abs=1e-6)


def test_the_ablation_replaces_no_running_statistics():
    net = nets.lenet((1, 16, 16), 3, norm="batch", width=0.5)
    shared = {name: torch.tensor(True) for name in net.shapes} | {
        "conv1.running_var": torch.tensor([True, False, True])
    }
    j = image_job(Algorithm("statistics", lambda _: SharedMask(shared)), net, [6] * 4)
    found = variants.ablated_scores(j, run(j, 1), draws=1)
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))


# --- what is kept of the clients


def test_only_personal_units_are_kept_where_a_mask_is_by_unit():
    rows = {spec: run(job(algorithm(mask(spec))), 0).client_params.saved() for spec in ("unit,1", "1,column")}
    kept = {spec: params["fc1.weight"].shape for spec, params in rows.items()}
    assert kept == {"unit,1": (6, int((~mask("unit,1")["fc1.weight"]).sum()), 6), "1,column": (6, 6, 6)}


def test_mixtures_are_kept_of_every_parameter_whatever_else_is():
    def mixing_weights(up):
        return torch.eye(len(up.clients))

    parts = {"mixing_weights": mixing_weights, "update_mask": lambda up: up.mask}
    j, few = (job(algorithm(mask(""), **parts, **more)) for more in ({}, {"personal_params": lambda _: ["fc1.weight"]}))
    assert_equal(trainer.models(few, run(few)), trainer.models(j, run(j)))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_parameter_that_turns_personal_has_to_be_among_those_kept(first):
    def split(number):
        turned = {"fc1.weight": torch.ones(CLIENTS, 6, 1, dtype=torch.bool)}
        turned["fc1.weight"][4, 2] = number < first
        return SharedMask(dict.fromkeys(SHAPES, torch.tensor(True)) | turned)

    method = algorithm(
        split(0).shared, update_mask=lambda up: split(up.round + 1), personal_params=lambda _: ["fc2.bias"]
    )
    with pytest.raises(ValueError, match=r"'masked' makes entries of 'fc1.weight' personal.*only \['fc2.bias'\]"):
        run(job(method), first)


# --- masks that are refused


TRUE = torch.tensor(True)
BAD = {
    "missing": ({"fc2.bias": None}, r"'masked' has no mask of 'fc2.bias', of shape \(3,\).*torch.tensor\(True\)"),
    "unknown": ({"fc3.bias": TRUE}, r"'masked' has masks of \['fc3.bias'\], but the network has \['fc1.weight'"),
    "numbers": ({"fc1.bias": torch.ones(6)}, "'masked': the mask of 'fc1.bias' must be a bool Tensor.*torch.float32"),
    "numpy": ({"fc1.bias": np.ones(6, bool)}, "'fc1.bias' must be a bool Tensor, but got ndarray"),
    "units without a dim for columns": (
        {"fc2.weight": TRUE.expand(3)},
        r"'masked': the mask of 'fc2.weight' must broadcast against .* = \(6, 3, 6\), but has shape \(3,\).*\(3, 1\)",
    ),
    "active clients only": ({"fc1.bias": TRUE.expand(3, 6)}, r"= \(6, 6\), but has shape \(3, 6\)"),
    "too many dims": ({"fc1.bias": TRUE.expand(1, 1, 6)}, r"= \(6, 6\), but has shape \(1, 1, 6\)"),
    "larger than the parameter": ({"fc2.bias": TRUE.expand(6)}, r"= \(6, 3\), but has shape \(6,\)"),
}


def broken(change):
    return {name: m for name, m in (dict.fromkeys(SHAPES, TRUE) | change).items() if m is not None}


@pytest.mark.parametrize("bad", BAD)
def test_a_mask_that_does_not_fit_is_named_before_the_first_round(bad, monkeypatch):
    change, message = BAD[bad]
    monkeypatch.setattr(communication_round, "train_locally", None)
    with pytest.raises(ValueError, match=message):
        trainer.start(job(algorithm(broken(change))))
    with pytest.raises(ValueError, match=message.replace("'masked'", r"'masked': upload_mask\(net, mask\)")):
        trainer.start(job(algorithm(broken({}), upload_mask=lambda *_: broken(change))))


@pytest.mark.parametrize("bad", BAD)
def test_a_mask_that_stops_fitting_is_named_in_its_round(bad):
    change, message = BAD[bad]
    method = algorithm(broken({}), update_mask=lambda up: SharedMask(broken(change if up.round else {})))
    assert run(job(method), 1).round == 1
    with pytest.raises(ValueError, match=message):
        run(job(method), 2)
