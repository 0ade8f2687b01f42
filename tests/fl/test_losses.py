"""FedRoD, FedPHP, pFedSD and FedBN: their losses, their limits, what they run on, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import algorithm_jobs as jobs
import numpy as np
import plain_heads
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, job, make, models, rows, run
from small_runs import dense
from torch import nn

from fedstat.fl import algorithms, evaluate, losses, nets, train
from fedstat.fl.algorithm import AlgorithmState, Samples
from fedstat.fl.algorithms.fedrod import _log_prior, two_heads, two_heads_loss
from fedstat.fl.batches import Rows
from fedstat.fl.probes import variants

SGD = partial(torch.optim.SGD, lr=0.1)


def same_as(j, plain):
    """The stacked run is the plain one."""
    jobs.assert_clients_near(j, run(j, 4), *plain)


# --- losses


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_distance_from_a_teacher_is_that_of_torchs_kl(outputs):
    torch.manual_seed(0)
    out, teacher = (torch.randn(2, 5, outputs, dtype=torch.float64) for _ in range(2))
    y, weight = torch.randint(0, 2, (2, 5)), torch.rand(2, 5, dtype=torch.float64)

    def two(z):
        return torch.cat([torch.zeros_like(z), z], -1) if outputs == 1 else z

    leaf = out.clone().requires_grad_()
    far = nn.functional.kl_div(
        two(leaf / 3).log_softmax(-1), two(teacher / 3).log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    inner = losses.for_outputs(outputs)
    ((0.4 * inner.value(leaf, y) + 0.7 * far) * weight).sum().backward()
    both = losses.distilled(inner, 0.7, temperature=3.0, of_loss=0.4)
    q = losses.softened(teacher, 3.0)
    torch.testing.assert_close(both.gradient(out.clone(), y, weight, q), leaf.grad)
    none = losses.distilled(inner, 0.7, temperature=3.0).gradient(out.clone(), y, weight, torch.zeros_like(q))
    torch.testing.assert_close(none, inner.gradient(out.clone(), y, weight))


def test_the_prior_counts_a_clients_real_samples():
    y, live = torch.tensor([[0, 2, 2, 1], [1, 1, 0, 0]]), torch.tensor([[True] * 4, [True, True, False, False]])
    samples = Samples(torch.zeros(2, 4, 6), y, live)
    found = _log_prior(two_heads(nets.mlp(SIZES)), {}, samples, AlgorithmState())
    np.testing.assert_allclose(found.exp()[:, 3], [[1, 1, 2], [0, 2, 0]])
    one = _log_prior(two_heads(nets.mlp([6, 10, 1])), {}, samples._replace(y=y.clamp(max=1)), AlgorithmState())
    np.testing.assert_allclose(one[:, 0, 0].exp(), [3, np.inf])


def test_without_a_prior_both_heads_have_the_derivative_of_the_loss_of_their_sum():
    out, y = torch.randn(1, 4, 6, requires_grad=True), torch.tensor([[0, 1, 2, 0]])
    weight, loss = torch.full((1, 4), 0.25), two_heads_loss(losses.cross_entropy)
    (loss.value(out, y) * weight).sum().backward()
    torch.testing.assert_close(loss.gradient(out.detach().clone(), y, weight), out.grad)


# --- plain loops of other settings, networks and outputs


def test_fedphp_with_predictions_is_a_plain_loop():
    j = job(algorithms.fedphp(horizon=3, lam=0.3, transfer="kd"), participation=0.7)
    same_as(j, plain_heads.fedphp(j, SGD, 4, transfer="kd"))


@pytest.mark.parametrize("name", ["fedrod", "pfedsd"])
def test_two_classes_by_one_output_are_a_plain_loop(name):
    data = rows(SAMPLES, 0, classes=2)
    data.y[SAMPLES[0] : SAMPLES[0] + SAMPLES[1]] = 1  # a client that lacks a class
    held = rows([12] * 6, 1, classes=2)
    j = job(make(name), net=nets.mlp([6, 10, 1]), data=data, participation=0.7)
    j = replace(j, test=held)
    same_as(j, plain_heads.PLAIN[name](j, SGD, 4, lambda: plain_loop.module([6, 10, 1])))


def test_statistics_of_batch_normalisation_stay_with_the_client_whatever_the_network_says():
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    sizes = [20, 10, 15]
    net = nets.from_module(module, [6], statistics="shared")
    j = job(algorithms.fedbn(), net=net, data=rows(sizes, 0), sizes=sizes, participation=0.7)
    same_as(j, plain_heads.fedbn(j, SGD, 4, batch=True))
    assert set(nets.normalisation(j.net)) == {f"fc1.{n}" for n in ("scale", "shift", "running_mean", "running_var")}


# --- limits


@pytest.mark.parametrize("method", [algorithms.pfedsd(lam=0), algorithms.fedphp(lam=0, mu=0, transfer="kd")])
def test_no_weight_on_the_teacher_trains_as_fedavg_and_predicts_with_what_was_trained(method):
    a, b = job(method), job(algorithms.fedavg())
    state, done = trainer.run(a, run(a, 2))
    assert_equal(trainer.models(a, state), models(b, 3))
    kept = evaluate.evaluate(a, state)["accuracy"]
    after = done.trained.params
    expected = [
        plain_loop.accuracy(a.net.apply({n: p[[i]] for n, p in after.items()}, x.unsqueeze(0))[0], y)
        for i, c in enumerate(done.cohort.local)
        for x, y in [plain_loop.samples(a.test, c)]
    ]
    np.testing.assert_allclose(kept[done.cohort.local], expected, atol=1e-6)


def test_fedphp_without_past_keeps_the_model_that_was_trained_last_and_with_it_an_average():
    for mu, horizon, share in ((0, 1, 0), (0.9, 1, 0.9), (0.9, 4, 0.9 * 2 / 4)):
        j = job(algorithms.fedphp(mu=mu, horizon=horizon))
        before = run(j, 2)
        after, done = trainer.run(j, before)
        at = done.cohort.local
        for name, p in done.trained.params.items():
            mixed = share * before.algorithm_state.clients.saved()[name][at] + (1 - share) * p
            torch.testing.assert_close(after.algorithm_state.clients.saved()[name][at], mixed)


@pytest.mark.parametrize("name", ["fedphp", "pfedsd"])
def test_who_has_never_been_active_predicts_with_the_download(name):
    j = job(make(name), participation=0.34)
    state = trainer.step(j, trainer.start(j))
    found, download = evaluate.evaluate(j, state)["loss"], trainer.models(j, state)
    x, y = (one.view(j.clients, -1, *one.shape[1:]) for one in (j.test.x, j.test.y))
    of_download = j.loss.value(j.net.apply(download, x), y).mean(1).numpy()
    idle = np.setdiff1d(np.arange(j.clients), trainer.active(j, 0))
    np.testing.assert_allclose(found[idle], of_download[idle], rtol=1e-5)
    assert (found != of_download)[trainer.active(j, 0)].all()


def test_with_balanced_classes_the_generic_part_of_fedrod_is_fedavg():
    data = rows([6] * 6, 0)
    data.y.copy_(torch.arange(36) % 3)  # a constant is added to every output, which no softmax sees
    given = {"data": data, "sizes": [6] * 6, "participation": 0.7}
    generic, fedavg = models(job(algorithms.fedrod(), **given)), models(job(algorithms.fedavg(), **given))
    for name, p in fedavg.items():
        torch.testing.assert_close(generic[name], p, atol=1e-6, rtol=1e-5)


def test_no_gradient_of_the_personal_head_reaches_what_is_shared():
    j = job(algorithms.fedrod())
    held = j.algorithm._replace(
        phases=(j.algorithm.phases[0]._replace(is_trainable=lambda n: not n.startswith("personal")),)
    )
    one, other = models(j), models(job(held))
    for name, p in one.items():
        assert torch.equal(p, other[name]) != name.startswith("personal")


def test_fedbn_without_normalisation_warns_and_is_fedavg():
    with pytest.warns(UserWarning, match="the network has none, so that this is FedAvg.*norm='group'"):
        one = models(job(algorithms.fedbn(), net=nets.mlp(SIZES)))
    assert_equal(one, models(job(algorithms.fedavg())))


def several_norms():
    # Batch normalisation takes a bias before it away, so that it would learn from rounding alone.
    convolution = (nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*convolution, nn.Linear(4 * 36, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Linear(6, 3))


NETWORKS = {
    "users' module": (
        nets.from_module(several_norms(), [1, 8, 8]),
        [f"conv1.{n}" for n in ("scale", "shift", "running_mean", "running_var")]
        + [f"{layer}.{n}" for layer in ("fc1", "norm1") for n in ("scale", "shift")],
    ),
    "group": (nets.lenet((1, 16, 16), 3, norm="group"), [f"conv{i}.{n}" for i in (1, 2) for n in ("scale", "shift")]),
    "transformer": (
        nets.transformer((5,), 3, vocabulary=9, embedding=8, blocks=1),
        [f"{layer}.{n}" for layer in ("embedding", "project1", "down1") for n in ("scale", "shift")],
    ),
    "none": (nets.mlp(SIZES), []),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_normalisation_of_a_network_follows_from_it(network):
    net, expected = NETWORKS[network]
    assert nets.normalisation(net) == expected


# --- what they run on


@pytest.mark.parametrize("name", ["fedcp", "fedrod", "fedphp", "pfedsd"])
@pytest.mark.parametrize("kind", ["fasttext", "lstm", "module"])
def test_texts_and_users_modules(name, kind):
    """Images have a test with all methods."""
    data = rows(SAMPLES, 0, features=64)
    if kind != "module":
        rng = np.random.default_rng(0)
        net, x = (
            nets.named(kind, (6,), 3, vocabulary=11, width=0.25),
            torch.from_numpy(rng.integers(1, 11, (len(data.x), 6))),
        )
    else:
        net, x = nets.from_module(several_norms(), [1, 8, 8]), data.x.view(-1, 1, 8, 8)
    j = job(make(name), net=net, data=Rows(x, *data[1:]), batch_size=None, participation=0.5)
    state = run(j, 2)
    before, shared = run(j, 0).global_params, state.mask.shared
    assert all(not torch.equal(p, before[n]) for n, p in state.global_params.items() if shared[n].any())
    assert all(bool(p.isfinite().all()) for p in trainer.models(j, state).values())


@pytest.mark.parametrize("name", ["fedphp", "pfedsd"])
def test_a_new_client_predicts_with_the_servers_model_or_trains_it_as_in_a_round(name):
    j, train_on, test_on = job(make(name)), rows([30, 40], 5), rows([50, 50], 6)
    state = run(j, 3)
    found = variants.unseen_scores(j, state, train_on, test_on)
    bare = job(j.algorithm._replace(finetune=()))
    bare = variants.unseen_scores(bare, state, train_on, test_on)
    np.testing.assert_array_equal(found["finetuned"], bare["finetuned"])
    assert (found["finetuned"] != found["global"]).any()


def test_fine_tuning_fedrod_lowers_the_loss_of_the_sum():
    bare = job(make("fedrod"))
    bare = replace(bare, test=bare.train)
    tuned, state = replace(bare, algorithm=algorithms.named("fedrod+", epochs=5)), run(bare, 2)
    assert (evaluate.evaluate(tuned, state)["loss"] < evaluate.evaluate(bare, state)["loss"]).all()


# --- errors


@pytest.mark.parametrize("name", ["fedcp", "fedrod", "fedphp"])
def test_networks_without_a_head_are_refused_before_the_first_round(name):
    net = nets.mlp(SIZES)._replace(features=None)
    with pytest.raises(ValueError, match="needs a network with features and one dense output layer"):
        train(dense(), net, make(name), rounds=1)
    with pytest.raises(ValueError, match="whose weights are its parameters, but this network composes its weights"):
        train(dense(), nets.mlp(SIZES), algorithms.named(f"{name}-low-rank"), rounds=1)


def test_predictions_are_transferred_on_networks_without_features():
    net = nets.mlp(SIZES)._replace(features=None, head=None)
    a, b = (models(job(algorithms.fedphp(transfer="kd"), net=one)) for one in (net, nets.mlp(SIZES)))
    assert_equal(a, b)
