"""Each seam of the engine, used by a method of its own, does what a plain per-client loop does."""

from __future__ import annotations

from functools import partial

import numpy as np
import plain_seams
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, assert_near, dataset, job, rows, run
from plain_seams import LR, descent, gradient
from small_runs import interrupted_and_resumed, same
from toy_methods import HALF, MEASURES, REMEMBERS, by_loss, momentum, soft, toy

from fedstat._utils import streams
from fedstat.fl import aggregate, algorithms, batches, nets, train
from fedstat.fl.algorithm import Phase


def local(j, **options):
    return lambda c, model, number: descent(SIZES, j, c, model, number, **options)


# --- what is sent, and how it is averaged


def half_of_the_head(up):
    before = up.before
    return {name: (p + before[name]) / 2 for name, p in up.after.items() if name.startswith("fc2")}


def test_what_is_sent_in_place_of_what_was_trained():
    j = job(toy(encode=half_of_the_head), **HALF)

    def trained(c, model, number):
        after = descent(SIZES, j, c, model, number)
        return {n: (p + model[n]) / 2 if n.startswith("fc2") else p for n, p in after.items()}

    assert_near(run(j, 4).global_params, plain_seams.run(j, 4, local=trained))


def test_weights_of_the_mean_and_what_is_missing_to_one_stays_with_the_server():
    j = job(toy(weights=lambda _, active, clients: np.full(len(active), 1 / clients)), **HALF)

    def server(old, sent, *_):
        share = len(sent) / len(SAMPLES)
        new = plain_seams.mean(sent, [1 / len(SAMPLES)] * len(sent))
        return {name: p + (1 - share) * old[name] for name, p in new.items()}

    assert_near(run(j, 4).global_params, plain_seams.run(j, 4, local=local(j), server=server))
    even = job(toy(weights=lambda _, active, __: np.full(len(active), 1 / len(active))), server_lr=0.5, **HALF)
    assert_near(run(even, 1).global_params, run(j, 1).global_params)  # half of the clients take part


def clip(radius):
    """Clients' updates scaled to a norm at most, over shared entries alone."""

    def values(sent):
        away = {name: (p - sent.server[name]) * sent.shared[name] for name, p in sent.values.items()}
        norm = sum(p.flatten(1).square().sum(1) for p in away.values()).sqrt()
        factor = (radius / norm).clamp(max=1)
        return {n: sent.server[n] + p * factor.view(-1, *(1,) * (p.ndim - 1)) for n, p in away.items()}

    return aggregate.stateless(f"clip({radius})", values)


def test_aggregators_are_chained():
    chained = aggregate.chain(clip(0.05), aggregate.weighted_mean(), momentum(0.5))
    assert chained.name == "clip(0.05), weighted mean, momentum(0.5)"
    j = job(toy(), aggregator=chained, **HALF)
    speed = {}

    def server(old, sent, weights, *_):
        away = [{n: p - old[n] for n, p in model.items()} for model in sent]
        norms = [sum(float(p.square().sum()) for p in one.values()) ** 0.5 for one in away]
        cut = [{n: p * min(1, 0.05 / norm) for n, p in one.items()} for one, norm in zip(away, norms, strict=True)]
        for name, p in plain_seams.mean(cut, weights).items():
            speed[name] = 0.5 * speed.get(name, 0) + p
        return {n: old[n] + speed[n] for n in old}

    assert_near(run(j, 4).global_params, plain_seams.run(j, 4, local=local(j), server=server))


def test_an_aggregator_gets_what_is_shared_and_nothing_else():
    seen = []

    def values(sent):
        seen.append(sent)
        return {name: p[0] for name, p in sent.values.items()}

    j = job(algorithms.fedper(), aggregator=aggregate.stateless("first", values), **HALF)
    state = run(j, 2)
    assert [set(one.values) for one in seen] == [{"fc1.weight", "fc1.bias"}] * 2
    assert seen[1].clients.tolist() == trainer.run(j, run(j, 1))[1].cohort.local.tolist()
    assert torch.equal(state.global_params["fc1.bias"], seen[1].values["fc1.bias"][0])


def test_a_sum_over_parts_of_the_clients_is_the_mean():
    """As over machines: each part sums its own, with its own sizes, and the sums are added."""

    def values(sent):
        parts = [slice(0, 1), slice(1, None)]
        total = sum(sent.sizes[part].sum() for part in parts)
        return {n: sum(torch.tensordot(sent.sizes[c], p[c], 1) for c in parts) / total for n, p in sent.values.items()}

    a, b = (job(toy(), **HALF, **more) for more in ({}, {"aggregator": aggregate.stateless("sums", values)}))
    assert_near(run(b, 3).global_params, run(a, 3).global_params)


# --- steps of their own


def test_a_proximal_step_after_every_step_and_several_steps_a_batch():
    j = job(toy(phases=(Phase(post_step=soft(0.05), repeats=2),)), **HALF)

    def step(params, x, y):
        for _ in range(2):
            params = {n: params[n] - LR * g for n, g in gradient(SIZES, params, x, y).items()}
            w = params["fc1.weight"]
            params["fc1.weight"] = w.sign() * (w.abs() - 0.05 * LR).clamp(min=0)
        return params

    mine = run(j, 3)
    assert_near(mine.global_params, plain_seams.run(j, 3, local=local(j, step=step)))
    trained = trainer.run(j, mine)[1].trained.params["fc1.weight"]
    assert 0 < float((trained == 0).float().mean()) < 1  # exact zeros


def pull(params, anchor):
    return {name: 0.7 * (p - anchor[name]) for name, p in params.items()}


@pytest.mark.parametrize("anchor", ["phase", "download", lambda download, _: {n: 0 * p for n, p in download.items()}])
def test_a_penalty_is_towards_the_anchor_that_is_named(anchor):
    j = job(toy(phases=(Phase(1), Phase(1, penalty=pull, anchor=anchor))), **HALF)

    def trained(c, model, number):
        between = descent(SIZES, j, c, model, number, epochs=1)
        towards = {"phase": between, "download": model}[anchor] if isinstance(anchor, str) else None

        def step(params, x, y):
            grads = gradient(SIZES, params, x, y)
            return {n: p - LR * (grads[n] + 0.7 * (p - (towards[n] if towards else 0))) for n, p in params.items()}

        return descent(SIZES, j, c, between, number, step=step, epochs=1, position=1)

    assert_near(run(j, 3).global_params, plain_seams.run(j, 3, local=trained))


def test_so_many_batches_instead_of_epochs():
    j = job(toy(phases=(Phase(steps=7),)), **HALF)

    def trained(c, model, number):
        left = [7]

        def step(params, x, y):
            if not left[0]:
                return params
            left[0] -= 1
            return {n: params[n] - LR * g for n, g in gradient(SIZES, params, x, y).items()}

        epochs = -(-7 // -(-SAMPLES[c] // min(5, SAMPLES[c])))
        return descent(SIZES, j, c, model, number, step=step, epochs=epochs)

    assert_near(run(j, 3).global_params, plain_seams.run(j, 3, local=trained))


def test_a_phase_of_no_epochs_changes_no_batch_of_the_next():
    assert_equal(run(job(toy(phases=(Phase(0), Phase())))).global_params, run(job(toy())).global_params)


def test_a_parameter_that_the_loss_does_not_reach_stays():
    plain = nets.mlp(SIZES)
    spare = plain._replace(
        shapes={"spare.weight": (2, 3), **plain.shapes},
        init=lambda rng: plain.init(rng) | {"spare.weight": torch.ones(2, 3)},
        accumulate=None,
    )
    found = run(job(toy(), net=spare))
    assert_near(found.global_params, run(job(toy(), net=plain)).global_params | {"spare.weight": torch.ones(2, 3)})


# --- memory and receiving


def test_memory_lasts_and_decides_what_a_client_begins_with():
    j = job(REMEMBERS, **HALF)
    memory = {c: {n: torch.ones(s) / 10 for n, s in j.net.shapes.items()} for c in range(j.clients)}

    def download(server, c, number):
        return {n: p / (1 + number) + number / (1 + number) * memory[c][n] for n, p in server.items()}

    def trained(c, model, number):
        after = descent(SIZES, j, c, model, number)
        memory[c] = {n: (memory[c][n] + p) / 2 for n, p in after.items()}
        return after

    state, server = run(j, 4), plain_seams.run(j, 4, local=trained, download=download)
    assert_near(state.global_params, server)
    mine = trainer.models(j, state)
    for c in range(j.clients):
        assert_near({n: p[c] for n, p in mine.items()}, download(server, c, 4))
        assert_near({n: p[c] for n, p in state.algorithm_state.clients.saved().items()}, memory[c])


def test_a_killed_run_goes_on_with_its_memory_and_the_aggregators(tmp_path):
    method = REMEMBERS._replace(measures=MEASURES)
    chained = aggregate.chain(aggregate.weighted_mean(), momentum(0.5))
    options = {
        "rounds": 4,
        "participation": (0.3, 0.9),
        "seed": 4,
        "aggregator": chained,
        "unseen_clients": dataset([9, 5]),
    }
    go = partial(train, dataset(SAMPLES), nets.mlp(SIZES), method, probe=["drift", "trained-weights"], **options)
    same(whole := go(), interrupted_and_resumed(go, tmp_path / "run.zarr", after=2))
    assert np.isfinite(whole["unseen_clients/accuracy"]).all()


# --- models of others


def test_clients_are_mixed_by_the_losses_of_the_others_models_on_their_own_samples():
    j = job(toy(mixing_weights=by_loss), server_lr=0.5, validation=rows([4, 9, 2, 7, 3, 5], 5), **HALF)
    own = {c: j.net.init(streams.generator(j.seed, "start")) for c in range(j.clients)}
    for number in range(3):
        clients = trainer.active(j, number)
        after = {c: descent(SIZES, j, c, own[c], number) for c in clients}
        new = {}
        for i in clients:
            x, y = batches.part(j.validation, np.array([i]))[:2]
            losses = [float(torch.nn.functional.cross_entropy(_forward(after[k], x), y)) for k in clients]
            weights = torch.softmax(-5 * torch.tensor(losses), 0)
            mixed = plain_seams.mean([after[k] for k in clients], weights)
            new[i] = {n: (p + mixed[n]) / 2 for n, p in own[i].items()}
        own |= new
    mine = trainer.models(j, run(j, 3))
    for c, model in own.items():
        assert_near({n: p[c] for n, p in mine.items()}, model)


def _forward(params, x):
    h = torch.relu(x @ params["fc1.weight"].T + params["fc1.bias"])
    return h @ params["fc2.weight"].T + params["fc2.bias"]
