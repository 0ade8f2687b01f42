"""Parallel gradient descent of network (4) against a plain loop over clients with autograd."""

import itertools

import numpy as np
import pytest
import torch

from fedstat.ntk import descent as module
from fedstat.ntk import gram
from fedstat.ntk.descent import METHODS, Network, descent, factor_rule, network, predict

C, N, D, M = 3, 5, 4, 8


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(C, N, D))
    return x / np.linalg.norm(x, axis=-1, keepdims=True), rng.choice([-1.0, 1.0], size=(C, N))


def loop(x, y, net, *, lr, server_lr, local_steps, rounds, mean):
    """The paper's §3.2, one client at a time: autograd of the local loss, simple average of the shared updates."""
    weights = [torch.tensor(w) for w in net.weights]
    output, shared = torch.tensor(net.output), torch.tensor(net.shared)
    losses = []
    for _ in range(rounds + 1):
        residuals = [torch.relu(torch.tensor(x[c]) @ w.T) @ output - torch.tensor(y[c]) for c, w in enumerate(weights)]
        losses.append(sum(float(r @ r) for r in residuals))
        updates = []
        for c in range(len(weights)):
            w = weights[c].clone().requires_grad_()
            for _ in range(local_steps):
                r = torch.relu(torch.tensor(x[c]) @ w.T) @ output - torch.tensor(y[c])
                loss = (r @ r) / 2 / (len(r) if mean else 1)
                (grad,) = torch.autograd.grad(loss, w)
                w = (w - lr * grad).detach().requires_grad_()
            updates.append(w.detach() - weights[c])
        average = sum(updates) / len(updates)
        weights = [
            torch.where(shared[:, None], w + server_lr * average, w + u) for w, u in zip(weights, updates, strict=True)
        ]
    return losses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mean", [False, True])
def test_batched_descent_equals_the_loop_over_clients(method, mean):
    x, y = data()
    net = network(method, clients=C, features=D, width=M, seed=1)
    steps = gram.Steps(0.3, 1.3, 3, C, float(N) if mean else 1.0)
    found = [float((r.residual**2).sum()) for r in descent(x, y, net, steps, rounds=6)]
    expected = loop(x, y, net, lr=0.3, server_lr=1.3, local_steps=3, rounds=6, mean=mean)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_clients_of_unequal_size_are_padded_without_effect():
    x, y = data()
    net = network("fedsplit", clients=C, features=D, width=M, seed=1)
    sizes = [5, 2, 3]
    px, py = x.copy(), y.copy()
    for c, n in enumerate(sizes):
        px[c, n:], py[c, n:] = 0, 0
    steps = gram.Steps(0.3, 1.0, 2, C, 5.0)
    runs = descent(px, py, net, steps, rounds=4, divisors=np.array(sizes, dtype=float))
    found = [float((r.residual**2).sum()) for r in runs]
    ragged = [x[c, :n] for c, n in enumerate(sizes)], [y[c, :n] for c, n in enumerate(sizes)]
    expected = loop(*ragged, net, lr=0.3, server_lr=1.0, local_steps=2, rounds=4, mean=True)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_torch_and_numpy_descend_alike():
    x, y = data()
    net = network("fedsplit", clients=C, features=D, width=M, seed=2)
    steps = gram.Steps(0.2, 1.0, 2, C)
    tensors = Network(*(torch.from_numpy(a) for a in net))
    torch_runs = descent(torch.from_numpy(x), torch.from_numpy(y), tensors, steps, rounds=5)
    for a, b in zip(descent(x, y, net, steps, rounds=5), torch_runs, strict=True):
        np.testing.assert_allclose(b.start.numpy(), a.start, rtol=1e-12)


def test_shared_units_stay_equal_over_clients_and_personal_ones_do_not():
    x, y = data()
    net = network("fedsplit", clients=C, features=D, width=M, seed=3)
    *_, last = descent(x, y, net, gram.Steps(0.2, 1.0, 2, C), rounds=3)
    assert np.ptp(last.start[:, net.shared], axis=0).max() == 0
    assert np.ptp(last.start[:, ~net.shared], axis=0).max() > 0.1


def test_local_weights_of_a_round_are_those_before_its_last_update():
    x, y = data()
    net = network("fedsplit", clients=C, features=D, width=M, seed=3)
    one = next(descent(x, y, net, gram.Steps(0.2, 1.0, 1, C), rounds=2))
    np.testing.assert_array_equal(one.local, one.start)
    three = next(descent(x, y, net, gram.Steps(0.2, 1.0, 3, C), rounds=2))
    r = y - predict(x, net.weights, net.output)
    active = x @ net.weights.transpose(0, 2, 1) >= 0
    first = net.weights + 0.2 * np.einsum("cn,cnm,m,cnd->cmd", r, active, net.output, x)
    second = next(descent(x, y, net._replace(weights=first), gram.Steps(0.2, 1.0, 2, C), rounds=2))
    np.testing.assert_allclose(three.local, second.local, rtol=1e-12)


@pytest.mark.parametrize(("tau", "like"), [(-np.inf, "fedavg-matched"), (np.inf, None)])
def test_limits_of_dynamic_fedfac_are_fedavg_and_local_training(tau, like):
    x, y = data()
    net = network("dynamic", clients=C, features=D, width=M, seed=4)
    steps = gram.Steps(0.3, 1.0, 2, C)
    *_, dynamic = descent(x, y, net, steps, rounds=4, rule=factor_rule(kappa=0.75, tau=tau))
    if like is None:
        *_, other = descent(x, y, net._replace(shared=np.zeros(2 * M, dtype=bool)), steps, rounds=4)
    else:
        *_, other = descent(x, y, network(like, clients=C, features=D, width=M, seed=4), steps, rounds=4)
    np.testing.assert_allclose(dynamic.start, other.start, rtol=1e-12)


def test_a_unit_that_turns_shared_adopts_the_mean_and_one_that_turns_personal_keeps_its_values():
    rng = np.random.default_rng(5)
    start, local = rng.normal(size=(2, C, 3, D))
    start[:, 0] = start[0, 0]
    shared, new_shared = np.array([True, False, True]), np.array([True, True, False])
    new = module._aggregate(np, start, local, shared, new_shared, 0.5)
    np.testing.assert_allclose(new[1, 0], start[0, 0] + 0.5 * (local[:, 0].mean(0) - start[0, 0]))
    np.testing.assert_allclose(new[2, 1], local[:, 1].mean(0))
    np.testing.assert_array_equal(new[:, 2], local[:, 2])


def test_fedavg_and_fedsplit_share_their_draws():
    split, avg = (network(m, clients=C, features=D, width=M, seed=6) for m in ("fedsplit", "fedavg"))
    np.testing.assert_array_equal(split.weights[0], avg.weights[0])
    np.testing.assert_allclose(split.output, np.sqrt(2) * avg.output)
    other = network("fedsplit", clients=C, features=D, width=M, seed=6, replicate=1)
    assert not np.array_equal(split.weights, other.weights)


def linear_descent(features_s, features_p, residual, steps, sizes, rounds):
    """The same descent of a model linear in its parameters, in parameter space: what infinite width does."""
    shared = np.zeros(features_s.shape[1])
    cuts = np.cumsum([0, *sizes])
    own = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    personal = [np.zeros(features_p.shape[1]) for _ in sizes]
    losses = []
    for _ in range(rounds + 1):
        r = np.concatenate([residual[o] - features_s[o] @ shared - features_p[o] @ p for o, p in zip(own, personal)])  # noqa: B905
        losses.append(r @ r)
        moves = []
        for c, o in enumerate(own):
            s, p = shared.copy(), personal[c].copy()
            for _ in range(steps.local_steps):
                left = residual[o] - features_s[o] @ s - features_p[o] @ p
                s, p = s + steps.lr * features_s[o].T @ left, p + steps.lr * features_p[o].T @ left
            moves.append(s - shared)
            personal[c] = p
        shared = shared + steps.server_lr * sum(moves) / len(sizes)
    return losses


def test_limit_map_is_the_descent_of_the_linearised_model():
    rng = np.random.default_rng(7)
    sizes = [2, 4, 3]
    features_s, features_p = rng.normal(size=(2, 9, 20)) / 5
    steps = gram.Steps(0.2, 1.4, 4, 3)
    residual = rng.normal(size=9)
    cuts = np.cumsum([0, *sizes])
    whole = features_p @ features_p.T
    blocks = [whole[a:b, a:b] for a, b in itertools.pairwise(cuts)]
    step = gram.limit_map(features_s @ features_s.T, blocks, steps)
    losses, r = [], residual
    for _ in range(8):
        losses.append(r @ r)
        r = step @ r
    np.testing.assert_allclose(losses, linear_descent(features_s, features_p, residual, steps, sizes, 7), rtol=1e-10)
