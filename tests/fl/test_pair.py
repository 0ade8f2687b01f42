"""Per-FedAvg, pFedMe and Ditto: limits, what they cannot take, and the network of two copies that two of them train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plain_loop
import plain_two_models
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_equal, job, models, rows, run
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedstat.fl import aggregate, algorithms, evaluate, losses, nets, optim
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import Phase
from fedstat.fl.algorithms import ditto, fedavg, local, per_fedavg, pfedme
from fedstat.fl.local_training import _Batch
from fedstat.fl.private_training import sealed
from fedstat.fl.probes import variants
from fedstat.fl.wrappers.pair import is_personal, pair, pair_loss

EVEN = [16] * 6


def of(prefix, params):
    return {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}


def scores(j, state):
    return evaluate.evaluate(j, state)["accuracy"]


# --- limits


@pytest.mark.parametrize("lam", [0.0, 2.5])
def test_dittos_global_model_is_fedavgs_whatever_lambda(lam):
    mine, theirs = (models(job(method, participation=0.7)) for method in (ditto(lam=lam), fedavg()))
    assert_equal(of("global_", mine), theirs)


def test_without_a_pull_dittos_own_models_are_trained_alone():
    """As Local's, on the batches of a second stretch of training, which Ditto's own models draw."""
    alone = local()._replace(phases=(Phase(is_trainable=lambda _: False), Phase()))
    a, b = (job(method, participation=0.7) for method in (ditto(lam=0), alone))
    one, other = run(a), run(b)
    assert_equal(of("own_", trainer.models(a, one)), trainer.models(b, other))
    np.testing.assert_array_equal(scores(a, one), scores(b, other))


def test_a_strong_pull_holds_dittos_own_models_at_the_global_one():
    def far(lam):
        j = job(ditto(lam=lam), optimizer=optim.sgd(0.01))
        up = trainer.run(j, run(j, 2))[1].context
        own, towards = of("own_", up.after), of("global_", up.global_params)
        return max(float((p - towards[name]).abs().max()) for name, p in own.items())

    distances = [far(lam) for lam in (1, 10, 90)]
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < distances[0] / 5


def test_pfedme_whose_global_model_jumps_to_one_step_of_the_clients_own_is_fedavg():
    """With K = 1 and η λ = 1 θ starts every step at w, where the penalty is 0, and w follows it to the end."""
    for lam in (0.5, 8.0):
        method = pfedme(lam=lam, eta=1 / lam, inner_steps=1, variant="code")
        mine, theirs = (models(job(m, participation=0.7, optimizer=optim.adam(0.01))) for m in (method, fedavg()))
        assert_equal(of("global_", mine), theirs)


def test_pfedme_tends_to_fedavg_as_lambda_grows():
    """With the step 1/λ, λ (w − θ) is the gradient at a point that tends to w; so η is FedAvg's learning rate."""

    fed = models(job(fedavg(), sizes=EVEN, optimizer=optim.sgd(0.002)), 2)
    gaps = []
    for lam in (5.0, 50.0, 500.0):
        mine = models(job(pfedme(lam=lam, eta=0.002, inner_steps=1), sizes=EVEN, optimizer=optim.sgd(1 / lam)), 2)
        gaps.append(max(float((p - fed[n]).abs().max()) for n, p in of("global_", mine).items()))
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2]


def test_pfedmes_own_model_is_the_minimum_that_scipy_finds():
    """Of f(θ) + λ/2 ‖θ − w‖², w as downloaded, for a multinomial regression on all samples of a client."""
    lam = 0.5
    j = job(
        pfedme(lam=lam, eta=1e-9, inner_steps=400), net=nets.mlp([6, 3]), sizes=EVEN, batch_size=None, local_epochs=1
    )
    state = run(j, 1)
    start = trainer.start(j).global_params
    w = np.column_stack([start["global_fc1.weight"], start["global_fc1.bias"]]).astype(float)
    for c in range(2):
        x, y = (part[16 * c : 16 * (c + 1)].numpy() for part in (j.train.x, j.train.y))
        x = np.column_stack([x.astype(float), np.ones(16)])

        def objective(theta, x=x, y=y):
            theta = theta.reshape(3, 7)
            log_p = log_softmax(x @ theta.T, axis=1)
            error = (np.exp(log_p) - np.eye(3)[y]) / 16
            value = -log_p[np.arange(16), y].mean() + lam / 2 * ((theta - w) ** 2).sum()
            return value, (error.T @ x + lam * (theta - w)).ravel()

        found = minimize(objective, w.ravel(), jac=True, options={"gtol": 1e-9}).x.reshape(3, 7)
        mine = of_client(trainer.models(j, state), c)
        np.testing.assert_allclose(np.column_stack([mine["own_fc1.weight"], mine["own_fc1.bias"]]), found, atol=1e-5)


def of_client(params, c):
    return {name: p[c] for name, p in params.items()}


def test_the_paper_weighs_pfedmes_clients_equally_and_its_code_by_samples():
    for variant in ("paper", "code"):
        j = job(pfedme(lam=2, eta=0.2, inner_steps=2, variant=variant), server_lr=1.5, participation=0.7)
        theirs, accuracy = plain_two_models.pfedme(
            j, lambda p: torch.optim.SGD(p, lr=0.1), 2, lam=2, eta=0.2, inner_steps=2, variant=variant
        )
        state = run(j, 2)
        for name, p in of_client(trainer.models(j, state), 0).items():
            torch.testing.assert_close(p, theirs[0][name], atol=2e-5, rtol=2e-5)
        np.testing.assert_allclose(scores(j, state), accuracy, atol=1e-6)


@pytest.mark.parametrize("hessian_free", [False, True])
def test_per_fedavg_that_looks_nowhere_ahead_is_fedavg(hessian_free):
    a, b = (job(m, sizes=EVEN, participation=0.7) for m in (per_fedavg(alpha=0, hessian_free=hessian_free), fedavg()))
    one, other = run(a), run(b)
    assert_equal(trainer.models(a, one), trainer.models(b, other))
    np.testing.assert_array_equal(scores(a, one), scores(b, other))


def test_per_fedavg_that_looks_hardly_ahead_is_fedavg_on_halves_of_its_batches():
    halves = fedavg()._replace(phases=(Phase(gradient=lambda gradient, p, _: gradient(p, 1, 2)),), weights=uniform)
    mine, theirs = (models(job(m)) for m in (per_fedavg(alpha=1e-8), halves))
    for name, p in theirs.items():
        torch.testing.assert_close(mine[name], p, atol=1e-6, rtol=0)


def test_the_hessian_free_direction_is_the_gradient_of_the_meta_loss():
    """That is autograd's of f(w − α ∇f(w)), all parts of the batch being the same; the first-order one is not."""
    alpha, x, y = 0.3, torch.randn(9, 6, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    j = job(per_fedavg(alpha=alpha, difference=0.02, hessian_free=True))
    params = {name: p.double() for name, p in j.net.init(np.random.default_rng(0)).items()}

    def f(p):
        h = torch.tanh(x.double() @ p["fc1.weight"].T + p["fc1.bias"])
        return torch.nn.functional.cross_entropy(h @ p["fc2.weight"].T + p["fc2.bias"], y)

    gradient = torch.func.grad(f)
    direction = j.phases[0].gradient(lambda p, *_: {n: g.clone() for n, g in gradient(p).items()}, params, 0.1)
    exact = torch.func.grad(lambda p: f({n: p[n] - alpha * g for n, g in gradient(p).items()}))(params)
    for name, g in exact.items():
        torch.testing.assert_close(direction[name], g, atol=1e-5, rtol=1e-4)
    first = algorithms.per_fedavg(alpha=alpha).phases[0].gradient(lambda p, *_: gradient(p), params, 0.1)
    assert max(float((first[n] - g).abs().max()) for n, g in exact.items()) > 1e-3


def test_the_copy_to_predict_with_takes_plain_steps_whatever_the_optimizer():
    j = job(per_fedavg(alpha=0.3), batch_size=None, optimizer=optim.adam(0.01))
    state = run(j, 2)
    seen = evaluate.evaluate(j, state)["loss"]
    for c in range(j.clients):
        net = plain_two_models.module(state.global_params)
        step = plain_two_models.gradient(net, *plain_loop.samples(j.train, c))
        x, y = plain_loop.samples(j.test, c)
        here, there = (
            torch.nn.functional.cross_entropy(model(x), y).item()
            for model in (net, plain_two_models.away(net, step, -0.3))
        )
        assert seen[c] == pytest.approx(there, abs=1e-5)
        assert seen[c] != pytest.approx(here, abs=1e-3)


@pytest.mark.parametrize("method", [per_fedavg(alpha=0.1), pfedme(lam=2, eta=0.2)], ids=["per-fedavg", "pfedme"])
def test_a_mean_with_equal_weights_can_be_made_private(method):
    private = aggregate.private(clip=0.5, noise_multiplier=0.5, delta=1e-3)
    assert sealed(method, private.privacy, 3.0).weights is method.weights
    one, other = (models(job(m, aggregator=private)) for m in (method, method._replace(weights=None)))
    assert_equal(one, other)


# --- batches in parts


def test_a_batch_is_cut_into_parts_that_have_all_its_samples_and_none_is_empty():
    sizes = torch.tensor([7, 3, 2, 1])
    live = torch.arange(7) < sizes[:, None]
    rows = torch.arange(7).expand(4, -1) + 10 * torch.arange(4)[:, None]
    batch = _Batch(rows.unsqueeze(-1), rows, live / sizes[:, None], (rows,), {"n": rows})
    parts = [batch.part(first, 3) for first in range(3)]
    taken = [[part.y[c][part.weight[c] > 0].tolist() for part in parts] for c in range(4)]
    assert taken == [[[0, 3, 6], [1, 4], [2, 5]], [[10], [11], [12]], [[20], [21], [20]], [[30], [30], [30]]]
    for part in parts:
        torch.testing.assert_close(part.weight.sum(1), torch.ones(4))
        assert torch.equal(part.x[..., 0], part.y)
        assert torch.equal(part.extra[0], part.y)
        assert torch.equal(part.noise["n"], part.y)


@pytest.mark.parametrize("net", [nets.mlp(SIZES), nets.named("cnn", (1, 16, 16), 3, width=0.1)], ids=["mlp", "cnn"])
def test_clients_of_one_sample_alone_are_trained_all_the_same(net):
    shape = (16, 16) if "conv1.weight" in net.shapes else (6,)
    data = rows([1, 1], 0)
    data = data._replace(x=torch.randn(2, *((1, *shape) if len(shape) > 1 else shape)))
    j = job(per_fedavg(alpha=0.1, hessian_free=True), net=net, data=data, sizes=[1, 1])
    state = trainer.start(j)
    trained = trainer.run(j, state)[1].trained.params
    assert all((p != state.global_params[name]).any() for name, p in trained.items())


# --- the network of two copies


def test_a_network_without_gradients_of_its_own_trains_as_one_with_them():
    both = [nets.mlp(SIZES), nets.mlp(SIZES)._replace(accumulate=None)]
    for method in (ditto(lam=0.7), pfedme(lam=2, eta=0.2)):
        mine, theirs = (models(job(method, net=net)) for net in both)
        for name, p in mine.items():
            torch.testing.assert_close(theirs[name], p, atol=2e-6, rtol=1e-5)


def test_outputs_of_both_copies_stand_side_by_side_and_the_own_one_predicts():
    net = nets.mlp(SIZES)
    two, x = pair(net), torch.randn(2, 5, 6)
    params = {name: torch.randn(2, *shape) for name, shape in two.shapes.items()}
    out = two.apply(params, x)
    assert torch.equal(out[..., :3], net.apply(of("global_", params), x))
    assert torch.equal(out[..., 3:], net.apply(of("own_", params), x))
    inner, loss = losses.for_outputs(3), pair_loss(losses.for_outputs(3), net)
    assert torch.equal(loss.predict(out), inner.predict(out[..., 3:]))
    assert torch.equal(loss.probability(out), inner.probability(out[..., 3:]))
    y = torch.tensor([[0, 1, 2, 0, 1]] * 2)
    assert torch.equal(loss.value(out, y), inner.value(out[..., 3:], y))
    start = two.init(np.random.default_rng(3))
    assert_equal(of("own_", start), of("global_", start))
    assert_equal(of("own_", start), net.init(np.random.default_rng(3)))


@pytest.mark.parametrize("name", ["ditto", "pfedme"])
def test_only_the_global_copy_is_sent_and_only_the_own_one_kept(name):
    j = job(algorithms.named(name))
    state = run(j, 2)
    assert {n for n, p in state.mask.shared.items() if bool(p.all())} == {n for n in j.net.shapes if not is_personal(n)}
    assert set(state.client_params.saved()) == {n for n in j.net.shapes if is_personal(n)}


@pytest.mark.parametrize("end", ["+", "-low-rank", "-personal-head", "-shrunken"])
@pytest.mark.parametrize("name", ["ditto", "pfedme"])
def test_wrapped_methods_with_two_models_run(name, end):
    j = job(algorithms.named(f"{name}{end}"), optimizer=optim.sgd(0.02))
    assert np.isfinite(evaluate.evaluate(j, run(j, 2))["loss"]).all()


def test_a_new_client_trains_its_own_model_near_the_global_one_which_stays():
    j = job(pfedme(lam=2, eta=0.2, inner_steps=3))
    state = run(j, 2)
    data, held = rows([8, 5], 7), rows([40, 40], 8)
    found = variants.unseen_scores(j, state, data, held)
    server = of("global_", state.global_params)
    for c in range(2):
        net = plain_two_models.module(server)
        x, y = plain_loop.samples(data, c)
        new = replace(j, train=data)
        drawn = plain_loop.batches(new, c, "new", state.round, 0)
        sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        plain_two_models.moreau(net, server, x, y, sgd, drawn, lam=2, eta=0, inner_steps=3)
        theirs = plain_loop.samples(held, c)
        assert found["local_train"][c] == pytest.approx(plain_loop.accuracy(net(theirs[0]), theirs[1]))


# --- what they cannot take


def test_a_learning_rate_beyond_two_over_lambda_diverges_and_is_named():
    with pytest.raises(FloatingPointError, match=r"diverged in round 1.*Lower the learning rate"):
        run(job(pfedme(lam=900, eta=0.001, inner_steps=40), optimizer=optim.sgd(0.1)), 1)


def test_a_phase_may_have_an_optimizer_of_its_own():
    def method(rule):
        return fedavg()._replace(phases=(Phase(optimizer=rule),))

    mine = models(job(method(optim.sgd(0.05)), optimizer=optim.adam(0.01)))
    assert_equal(mine, models(job(fedavg(), optimizer=optim.sgd(0.05))))
    with_momentum = models(job(method(optim.sgd(0.05, momentum=0.5)), optimizer=optim.adam(0.01)))
    assert_equal(with_momentum, models(job(fedavg(), optimizer=optim.sgd(0.05, momentum=0.5))))
