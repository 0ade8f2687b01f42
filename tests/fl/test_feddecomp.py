"""FedDecomp against plain modules of weights σ + τ, its limits, and what it is made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import algorithm_jobs as jobs
import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, dataset, image_job, job, optimizer_pair, rows, run
from low_rank_modules import RANKS, Cnn, Mlp, ResNet8, is_personal

from fedstat import fl
from fedstat._utils import streams
from fedstat.fl import algorithms, evaluate, nets
from fedstat.fl.algorithms import named
from fedstat.fl.wrappers.composed import decomposed

OPTIMIZERS = {
    "sgd": optimizer_pair("sgd", 0.1),
    "decayed": optimizer_pair("sgd", 0.1, momentum=0.9, weight_decay=0.01),
    # Adam divides by gradients near 0, where rounding counts, and by eps.
    "adam": optimizer_pair("adam", 0.01, eps=1e-3),
}
NETS = {
    "cnn": (nets.cnn((1, 28, 28), 3, width=0.1), Cnn, 28),
    "resnet8": (nets.resnet8((1, 8, 8), 3, width=0.25), ResNet8, 8),
}
EPOCHS = {"lora_epochs": 2, "global_epochs": 1}


def of_images(algorithm, name, **options):
    net, _, side = NETS[name]
    return image_job(algorithm, net, [7, 4, 6], side=side, client_chunk=2, **options)


def plain(j, module, one, rounds, *, alternating=True, reverse=False, shared=None):
    personal = (lambda n: not is_personal(n)) if reverse else is_personal
    two = ({"epochs": 2, "is_trainable": personal}, {"epochs": 1, "is_trainable": lambda n: not personal(n)})
    split = {n: np.asarray(shared(n) if shared else not personal(n)) for n in j.net.shapes}
    phases = two if alternating else ({"epochs": 3},)
    return plain_loop.run(j, module, one, rounds=rounds, shared=lambda *_: split, before=split, phases=phases)


def assert_close(j, state, theirs, accuracy=None, atol=2e-5):
    jobs.assert_clients_near(j, state, theirs, accuracy, atol)
    assert trainer.models(j, state)["fc1.right"].abs().max() > 1e-3, "the factors never moved: a weak test"


@pytest.mark.parametrize("way", [{}, {"alternating": False}, {"reverse": True}], ids=["in turn", "together", "reverse"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_equal_a_plain_loop_of_modules(optimizer, way):
    stacked, one = OPTIMIZERS[optimizer]
    made = algorithms.feddecomp(**RANKS, **EPOCHS, **way)
    j = job(made, optimizer=stacked, client_chunk=4, participation=0.7, batch_size=8)
    assert_close(j, run(j, 3), *plain(j, Mlp, one, 3, **way))


@pytest.mark.parametrize("way", [{}, {"alternating": False}, {"reverse": True}], ids=["in turn", "together", "reverse"])
@pytest.mark.parametrize("name", NETS)
def test_convolutions_equal_a_plain_loop_of_modules(name, way):
    # At a learning rate of 0.1, initial parameters that differ by 1e-6 lead to models that differ by up to 0.2, and
    # rounding differs between processors; at 0.01 and 0.02 by up to 2e-4 (six draws each).
    stacked, one = optimizer_pair("sgd", 0.02 if way.get("reverse") else 0.01)
    j = of_images(algorithms.feddecomp(**RANKS, **EPOCHS, **way), name, optimizer=stacked)
    theirs, _ = plain(j, NETS[name][1], one, 2, **way)
    assert_close(j, run(j, 2), theirs, atol=5e-5)


@pytest.mark.parametrize("share", [True, False])
def test_low_rank_under_other_methods_trains_both_parts_at_once(share):
    j = job(named(f"{'fedavg' if share else 'local'}-low-rank", **RANKS), local_epochs=3)
    theirs, _ = plain(j, Mlp, OPTIMIZERS["sgd"][1], 3, alternating=False, shared=lambda _: share)
    assert_close(j, run(j, 3), theirs)


def test_every_method_takes_a_low_rank_part():
    for name in ("fedem", "fedprox", "fedrep", "random"):
        settings = (
            {"shared_fraction": 1.0} if name == "random" else {}
        )  # its factor of the inputs has no units to split
        assert run(job(named(f"{name}-low-rank", **settings)), 1).round == 1


# --- limits


def sigma(j, state):
    return {n: p for n, p in trainer.models(j, state).items() if not is_personal(n)}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["mlp", *NETS])
def test_without_epochs_of_the_low_rank_part_it_is_fedavg_to_the_bit(name, optimizer):
    options = {"participation": 0.7, "optimizer": OPTIMIZERS[optimizer][0], "local_epochs": 1}
    make = job if name == "mlp" else partial(of_images, name=name)
    mine = make(algorithms.feddecomp(lora_epochs=0, global_epochs=1), **options)
    theirs = make(algorithms.fedavg(), **options)
    a, b = run(mine, 3), run(theirs, 3)
    assert_equal(sigma(mine, a), trainer.models(theirs, b))
    whole = nets.whole(mine.net, trainer.models(mine, a))
    assert list(whole) == list(theirs.net.shapes)
    assert_equal(whole, trainer.models(theirs, b))
    start = trainer.models(mine, trainer.start(mine))
    for n, p in trainer.models(mine, a).items():
        assert not n.endswith(".right") or not p.any(), "τ stays 0"
        assert not is_personal(n) or torch.equal(p, start[n])
    for kind, values in evaluate.evaluate(mine, a).items():
        np.testing.assert_array_equal(values, evaluate.evaluate(theirs, b)[kind])


def test_without_epochs_of_the_full_part_nothing_is_learnt_together():
    j = job(algorithms.feddecomp(lora_epochs=2, global_epochs=0))
    first, last = trainer.start(j), run(j, 2)
    for name, p in last.global_params.items():
        torch.testing.assert_close(p, first.global_params[name], atol=1e-7, rtol=1e-6)  # a mean of equals rounds
    assert nets.whole(j.net, trainer.models(j, last))["fc1.weight"].unique(dim=0).shape[0] == j.clients


# --- epochs


@pytest.mark.parametrize(
    ("settings", "run_epochs", "expected"),
    [
        ({}, 5, [2, 3]),
        ({}, 1, [1]),
        ({}, 2, [1, 1]),
        ({}, 10, [4, 6]),
        ({"variant": "code"}, 5, [2, 3]),
        ({"lora_epochs": 4}, 5, [4, 1]),
        ({"global_epochs": 1}, 5, [4, 1]),
        ({"lora_epochs": 0}, 5, [5]),
        ({"global_epochs": 0}, 5, [5]),
        ({"lora_epochs": 7, "global_epochs": 2}, 5, [7, 2]),
        ({"alternating": False}, 5, [5]),
        ({"alternating": False, "lora_epochs": 7, "global_epochs": 2}, 5, [9]),
    ],
)
def test_a_round_has_the_runs_epochs_unless_both_are_given(settings, run_epochs, expected):
    j = job(algorithms.feddecomp(**settings), local_epochs=run_epochs)
    assert [phase.length(run_epochs) for phase in j.phases] == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"variant": "code"}, "local_epochs between its two parts, but 1 are too few. Raise"),
        ({"lora_epochs": 2}, "1 are too few for lora_epochs=2"),
        ({"global_epochs": 3}, "1 are too few for global_epochs=3"),
    ],
)
def test_too_few_epochs_are_named_before_the_first_round(settings, says):
    with pytest.raises(ValueError, match=says):
        fl.train(dataset(SAMPLES), nets.mlp(SIZES), algorithms.feddecomp(**settings), rounds=1, local_epochs=1)


# --- means and the code's variant


@pytest.mark.parametrize("mean", ["uniform", "all"])
def test_weights_of_the_mean(mean):
    j = job(algorithms.feddecomp(**EPOCHS, mean=mean), participation=0.5)
    first = trainer.start(j)
    new, done = trainer.run(j, first)
    after, n = done.trained.params["fc1.weight"], len(done.cohort.local)
    expected = after.mean(0)
    if mean == "all":
        assert 0 < n < j.clients
        expected = (after.sum(0) + (j.clients - n) * first.global_params["fc1.weight"]) / j.clients
    torch.testing.assert_close(new.global_params["fc1.weight"], expected, atol=1e-6, rtol=1e-5)


def test_the_codes_variant():
    made = algorithms.feddecomp(rank_linear=0.4, rank_conv=0.4, variant="code")
    net = made.wrap(nets.lenet((1, 16, 16), 3))  # conv2: 16 × 6 × 5 × 5
    assert net.shapes["conv2.left"] == (16, 5, 6 * 5)
    assert net.shapes["conv2.right"] == (30, 6 * 5)
    start = net.init(np.random.default_rng(0))
    assert not start["conv2.left"].any()
    assert not start["fc1.left"].any()
    for layer, n in (("conv2", 30), ("fc1", 16)):
        drawn = start[f"{layer}.right"].abs().max()
        assert 0.9 / np.sqrt(n) < drawn <= 1 / np.sqrt(n)
    params = {n: torch.rand(2, *s, generator=torch.Generator().manual_seed(0)) for n, s in net.shapes.items()}
    tau = nets.whole(net, params)["conv2.weight"] - params["conv2.weight"]
    product = params["conv2.left"].reshape(2, 80, 30) @ params["conv2.right"]
    torch.testing.assert_close(tau, product.reshape(2, 16, 6, 5, 5) / 6, atol=1e-5, rtol=1e-5)
    j = job(algorithms.feddecomp(variant="code"), participation=0.5, local_epochs=3)
    assert made.weights(np.ones(3), np.arange(3), 6).tolist() == [1 / 6] * 3
    assert run(j, 2).round == 2


def test_the_papers_start_moves_a_weight_as_far_as_its_full_part_would():
    net = decomposed(nets.mlp([400, 300, 3]), 0.5, 0.5)
    left = net.init(np.random.default_rng(0))["fc1.left"]
    assert left.shape == (300, 150)
    assert abs(float(left.square().sum(1).mean()) - 1) < 0.02  # E[left leftᵀ] = I
    assert abs(float(left.mean())) < 0.001


def test_which_weights_are_decomposed():
    text = decomposed(nets.transformer((7,), 3, vocabulary=11, embedding=8, blocks=1), 0.5, 0.5)
    factored = [n.removesuffix(".left") for n in text.shapes if n.endswith(".left")]
    assert factored == ["attention1", "project1", "up1", "down1", "out"]
    assert text.shapes["attention1.left"] == (8, 3, 4)
    assert decomposed(nets.mlp([100, 100, 3]), 0.29, 1).shapes["fc1.right"] == (29, 100)
    assert decomposed(nets.mlp([4, 4, 3]), 0.1, 1).shapes["fc1.right"] == (1, 4)


# --- how it is computed


@pytest.mark.parametrize("rows_", [2, 200])
@pytest.mark.parametrize("name", ["mlp", "cnn", "fasttext"])
def test_thin_factors_give_what_the_composed_weight_gives(name, rows_):
    base = {"mlp": nets.mlp([30, 20, 3]), "fasttext": nets.fasttext((6,), 3, vocabulary=9)}.get(name, NETS["cnn"][0])
    net, rng = decomposed(base, 0.5, 0.5), np.random.default_rng(0)
    params = {n: torch.from_numpy(rng.normal(0, 0.2, (2, *s))).float() for n, s in net.shapes.items()}
    x = {"mlp": lambda: rng.normal(size=(2, rows_, 30)), "fasttext": lambda: rng.integers(0, 9, (2, rows_, 6))}
    x = torch.from_numpy(x.get(name, lambda: rng.normal(size=(2, rows_, 1, 28, 28)))())
    x = x.float() if x.is_floating_point() else x
    expected = base.apply(nets.whole(net, params), x)
    fixed = net.constants(params, [n for n in net.shapes if not is_personal(n)])
    assert set(fixed) == {f"{n}:value" for n in net.shapes if n.endswith(".weight") and "embedding" not in n}
    assert not net.constants(params, net.shapes)
    for given in (params, params | fixed):
        torch.testing.assert_close(net.apply(given, x), expected, atol=1e-5, rtol=1e-5)
    if net.accumulate is None:
        return
    for part in (list(net.shapes), ["fc1.left"], ["fc2.right", "fc1.bias"], ["fc1.weight", "fc2.weight"]):
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        grads = torch.autograd.grad(base.apply(nets.whole(net, leaves), x).sin().sum(), [leaves[n] for n in part])
        for given in (params, params | fixed) if not any(map(is_personal, part)) else (params,):
            into = {n: params[n].clone() for n in part}
            net.accumulate(given, x, torch.cos, into, 0.5, -2.0)
            for n, grad in zip(part, grads, strict=True):
                scale = grad.abs().max()
                torch.testing.assert_close((into[n] - 0.5 * params[n]) / scale, -2 * grad / scale, atol=3e-6, rtol=1e-5)


def test_what_does_not_move_is_composed_once_a_phase():
    j = job(algorithms.feddecomp(**EPOCHS))
    asked = []
    constants = j.net.constants
    j = replace(j, net=j.net._replace(constants=lambda p, moving: asked.append(moving) or constants(p, moving)))
    run(j, 1)
    assert [is_personal(moving[0]) for moving in asked] == [True, False]


# --- what studies measure


def test_drift_and_trained_weights_are_of_the_full_parts():
    made = algorithms.feddecomp(**RANKS, **EPOCHS)
    done = fl.train(
        dataset(SAMPLES), nets.mlp(SIZES), made, rounds=2, batch_size=5, seed=4, participation=0.7,
        probe=["drift", "trained-weights"],
    )  # fmt: skip
    train_rows = rows(SAMPLES, 0)
    j = job(made, data=train_rows, local_epochs=1, participation=0.7)
    state, last = trainer.run(j, trainer.step(j, trainer.start(j)))
    after = last.trained.params
    away = sum((after[n] - state.global_params[n]).flatten(1).square().sum(1) for n in ("fc1.weight", "fc1.bias"))
    mine = done["drift/distance"].isel(round=-1).sel(layer="fc1", client=last.cohort.local)
    np.testing.assert_allclose(mine, away.sqrt(), rtol=1e-4)
    whole = nets.whole(j.net, after)["fc1.weight"]
    np.testing.assert_allclose(done["trained/fc1/w"].isel(checkpoint=-1, client=last.cohort.local), whole, atol=1e-5)


def test_a_run_starts_from_weights_of_another():
    options = {"rounds": 1, "batch_size": 5, "lr": 0.1}
    net, names = NETS["cnn"][0], {"weight": "w", "bias": "b"}
    other = streams.generator(7, "start")
    given = {n: p for n, p in net.init(other).items() if nets.layer_of(n) != "fc2"}
    j = of_images(algorithms.feddecomp(**EPOCHS), "cnn")
    j = replace(j, net=j.algorithm.wrap(nets.started(net, given)))
    first = trainer.start(j).global_params
    assert_equal(given, {n: first[n] for n in given})
    plain_start = trainer.start(of_images(algorithms.fedavg(), "cnn")).global_params
    assert torch.equal(first["fc2.weight"], plain_start["fc2.weight"])
    mlp = nets.mlp(SIZES)
    stored = fl.train(dataset(SAMPLES), mlp, algorithms.fedavg(), **options)
    kept = {
        n: stored[f"weights/{nets.layer_of(n)}/{names[n.rpartition('.')[2]]}"].isel(checkpoint=-1, client=0)
        for n in mlp.shapes
    }
    again = nets.started(mlp, kept).init(np.random.default_rng(0))
    np.testing.assert_array_equal(again["fc1.weight"], kept["fc1.weight"])
    flat = nets.started(net, {"conv2.weight": np.arange(450.0).reshape(6, 75)}).init(np.random.default_rng(0))
    assert flat["conv2.weight"][1, 0, 0].tolist() == [75, 76, 77, 78, 79]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"fc9.weight": 0}, "start from must be one of"),
        ({"fc1.weight": np.ones((6, 10))}, r"\(10, 6\), but got \(6, 10"),
    ],
)
def test_a_start_that_does_not_fit_is_named(weights, says):
    with pytest.raises(ValueError, match=says):
        nets.started(nets.mlp(SIZES), weights)
