"""What FedCAC, pFedPara and pFedGate promise beyond the table of all methods."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_clients_near, assert_equal, job, models, run
from plain_sparse import Hadamard, HadamardMlp
from scipy.spatial import distance

from fedstat.fl import algorithms, evaluate, nets, optim
from fedstat.fl.algorithm import Phase
from fedstat.fl.algorithms.fedcac import critical_entries, overlap, partners
from fedstat.fl.algorithms.pfedgate import cut, select_blocks
from fedstat.fl.algorithms.pfedpara import hadamard, inner_rank, is_personal
from fedstat.fl.batches import Rows
from fedstat.fl.state import Download

sgd = partial(torch.optim.SGD, lr=0.1)

# --- FedCAC


def test_overlap_is_one_less_dices_dissimilarity():
    rng = np.random.default_rng(0)
    m = rng.random((5, 40)) < 0.4
    found = overlap({"a": torch.from_numpy(m[:, :30]).view(5, 6, 5), "b": torch.from_numpy(m[:, 30:])})
    np.testing.assert_allclose(found, 1 - distance.squareform(distance.pdist(m, "dice")), rtol=1e-12)


def test_critical_are_the_most_sensitive_entries_that_moved():
    net = nets.mlp([4, 5])
    before = {"fc1.weight": torch.randn(3, 5, 4), "fc1.bias": torch.randn(3, 5)}
    after = {name: p + torch.randn_like(p) for name, p in before.items()}
    after["fc1.bias"][0, 1:] = before["fc1.bias"][0, 1:]
    found = critical_entries(net, before, after, 0.6)
    assert found["fc1.bias"].sum(1).tolist() == [1, 3, 3], "only one entry of the first client moved"
    s = (after["fc1.weight"] * (after["fc1.weight"] - before["fc1.weight"])).abs().flatten(1)
    for row, mask in zip(s, found["fc1.weight"].flatten(1), strict=True):
        assert set(row.topk(12).indices.tolist()) == set(mask.nonzero().flatten().tolist())


def test_collaboration_narrows_to_the_most_similar_pair_and_ends_after_round_beta():
    rng = np.random.default_rng(1)
    o = torch.from_numpy(rng.random((6, 6)))
    o = (o + o.T) / 2
    number = [int((partners(o, t / 4) > 0).sum()) for t in range(1, 6)]
    assert sorted(number, reverse=True) == number
    assert number[0] > 8
    assert number[3:] == [8, 6]


def test_after_round_beta_critical_entries_are_the_clients_own_and_the_others_the_servers():
    j = job(algorithms.fedcac(beta=1), participation=0.7)
    before = run(j, 3)
    state, done = trainer.run(j, before)
    clients = done.cohort.local
    now, trained = trainer.models(j, state, clients), done.trained.params
    for name, mask in Download(j, state).algorithm_state(clients).clients.items():
        assert 0 < int(mask.sum()) < mask.numel()
        assert torch.equal(now[name], torch.where(mask, trained[name], state.global_params[name]))


def test_one_client_of_fedcac_trains_alone():
    assert_equal(*(models(job(m(), sizes=[9])) for m in (algorithms.fedcac, algorithms.local)))


# --- pFedPara


def products(factors, kernel):
    """The two low-rank parts, by the definition of mode products."""
    for i in (1, 2):
        x, y = (factors[f"{kind}{i}"].numpy() for kind in "xy")
        if not kernel:
            yield x @ y.T
            continue
        t = np.tensordot(x, factors[f"t{i}"].numpy(), (1, 0))  # ×₁
        yield np.moveaxis(np.tensordot(y, t, (1, 1)), 0, 1)  # ×₂


@pytest.mark.parametrize("weight", ["fc2.weight", "conv2.weight"])
def test_weights_are_hadamard_products_of_two_low_rank_parts(weight):
    net = hadamard(nets.cnn((1, 28, 28), 7, width=0.3), 0.5)
    params = net.init(np.random.default_rng(0))
    layer = weight.partition(".")[0]
    factors = {name.removeprefix(f"{layer}."): p for name, p in params.items() if name.startswith(f"{layer}.")}
    first, second = products(factors, layer.startswith("conv"))
    whole = nets.whole(net, {name: p.unsqueeze(0) for name, p in params.items()})
    np.testing.assert_allclose(whole[weight][0], first * (second + 1), rtol=1e-5, atol=1e-6)


def test_weights_have_full_rank_at_the_least_inner_rank_and_the_low_rank_parts_have_not():
    net = hadamard(nets.mlp([120, 64]), 0)
    params = {name: p.double() for name, p in net.init(np.random.default_rng(0)).items()}
    first, second = products({name.removeprefix("fc1."): p for name, p in params.items()}, kernel=False)
    ranks = [np.linalg.matrix_rank(w) for w in (first, second, first * (second + 1))]
    assert ranks == [8, 8, 64]


def test_every_weight_is_a_product_if_the_inner_rank_is_that_of_the_weight():
    net = hadamard(nets.mlp([9, 2]), 0.5)
    w = torch.randn(2, 9)
    params = {name: torch.zeros(1, *shape) for name, shape in net.shapes.items()}
    params |= {"fc1.x1": torch.eye(2)[None], "fc1.y1": w.T[None]}
    torch.testing.assert_close(nets.whole(net, params)["fc1.weight"][0], w)


@pytest.mark.parametrize(("o", "i", "window"), [(256, 784, 1), (64, 32, 25), (3, 10, 1), (2, 200, 1)])
def test_the_inner_rank_goes_from_the_least_that_does_not_limit_to_as_many_entries_as_the_weight(o, i, window):
    def entries(r):
        return 2 * r * (o + i) + (2 * r * r * window if window > 1 else 0)

    least, most = (inner_rank(o, i, window, gamma, kernel=window > 1) for gamma in (0, 1))
    assert (least - 1) ** 2 < (max if window > 1 else min)(o, i) <= least**2
    assert entries(most) <= o * i * window < entries(most + 1) or most == least


def test_pfedpara_sends_the_papers_share_of_fedavgs_numbers():
    net = hadamard(nets.mlp([784, 256, 10]), 0.5)
    sent = sum(np.prod(shape) for name, shape in net.shapes.items() if not is_personal(name))
    assert pytest.approx((784 * 256 + 256 * 10 + 266) / sent, abs=0.1) == 3.4


def test_without_its_personal_part_pfedpara_is_fedavg_on_a_low_rank_network():
    method = algorithms.pfedpara()
    j = job(method._replace(phases=(Phase(is_trainable=lambda name: not is_personal(name)),)), participation=0.7)
    zeros = {name: np.zeros(shape) for name, shape in j.net.shapes.items() if is_personal(name)}
    j = replace(j, net=nets.started(j.net, zeros))

    class LowRank(Hadamard):
        def forward(self, h):
            return h @ self.y1 @ self.x1.T + self.bias

    def made():
        net = HadamardMlp()
        net.fc1, net.fc2 = LowRank(6, 10, 3), LowRank(10, 3, 2)
        return net

    every = lambda *_: dict.fromkeys(j.net.shapes, np.True_)  # noqa: E731
    assert_clients_near(j, run(j), *plain_loop.run(j, made, sgd, rounds=3, shared=every), atol=1e-5)


# --- pFedGate


def solved(scores, sizes, room):
    """The greedy knapsack in plain words."""
    is_open = np.zeros(len(sizes), bool)
    for i in np.argsort(-scores, kind="stable"):
        if sizes[i] <= room:
            is_open[i], room = True, room - sizes[i]
    return is_open


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9, 1])
def test_open_blocks_are_the_best_that_fit_and_every_parameter_has_one(sparsity):
    shapes = {"fc1.weight": (20, 7), "fc1.bias": (20,), "fc2.weight": (3, 20), "fc2.bias": (3,)}
    blocks = cut(shapes, 5)
    sizes = np.concatenate([b.sizes for b in blocks.values()])
    scores = np.random.default_rng(0).random((40, len(sizes)))
    found = select_blocks(torch.from_numpy(scores), blocks, sparsity).numpy()
    assert (found @ sizes <= sparsity * sizes.sum()).all()
    first = [b.first for b in blocks.values()]
    assert found[:, first].all()
    others = np.setdiff1d(np.arange(len(sizes)), first)
    room = int(sparsity * sizes.sum()) - sizes[first].sum()
    for row, mask in zip(scores, found, strict=True):
        np.testing.assert_array_equal(mask[others], solved(row[others], sizes[others], room))


def open_wide(j):
    """The job with gates that are open, 1 whatever the input."""
    still = {name: np.zeros(j.net.shapes[name]) for name in ("gate.weight", "gate.bias", "gate.scale")}
    return replace(j, net=nets.started(j.net, still | {"gate.shift": np.full(j.net.shapes["gate.shift"], 100)}))


def test_with_all_gates_open_pfedgate_is_fedavg():
    a = open_wide(job(algorithms.pfedgate(sparsity=1), participation=0.7))
    mine, theirs = models(a), models(job(algorithms.fedavg(), participation=0.7))
    for name, p in theirs.items():
        torch.testing.assert_close(mine[name], p, atol=1e-6, rtol=1e-5)


def test_models_have_no_more_entries_than_the_sparsity_and_differ_between_clients():
    j = job(algorithms.pfedgate(sparsity=0.4), optimizer=optim.sgd(0.5))
    gates = models(j)["gate.open"]
    sizes = torch.tensor([n for b in cut(nets.mlp(SIZES).shapes, 5).values() for n in b.sizes]).float()
    share = ((gates > 0).float() @ sizes) / sizes.sum()
    assert bool(((share > 0.25) & (share <= 0.4)).all())
    assert len((gates > 0).unique(dim=0)) > 1


def test_the_written_gradient_is_autograds():
    j = job(algorithms.pfedgate())
    auto = replace(j, net=j.net._replace(accumulate=None))
    mine, theirs = models(j), models(auto)
    for name, p in theirs.items():
        torch.testing.assert_close(mine[name], p, atol=1e-6, rtol=1e-5)


def test_the_gating_layer_has_a_learning_rate_of_its_own():
    def moved(rate):
        j = job(algorithms.pfedgate(gate_rate=rate), batch_size=None, local_epochs=1)
        before = trainer.start(j).global_params
        after = models(j, 1)
        return {name: after[name] - before[name] for name in ("gate.shift", "fc2.bias")}

    one, three = moved(1), moved(3)
    torch.testing.assert_close(three["gate.shift"], 3 * one["gate.shift"], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(three["fc2.bias"], one["fc2.bias"])


def test_predictions_do_not_depend_on_the_samples_beside_them():
    j = job(algorithms.pfedgate())
    params, x = models(j), torch.randn(j.clients, 8, 6)
    whole = j.net.apply(params, x)
    torch.testing.assert_close(whole[:, 2:3], j.net.apply(params, x[:, 2:3]))


@pytest.mark.parametrize(("net", "tokens"), [("cnn", False), ("resnet8", False), ("fasttext", True), ("lstm", True)])
def test_images_and_texts_are_gated(net, tokens):
    options = {"vocabulary": 9} if tokens else {"norm": "batch"} if net == "resnet8" else {}
    shape = (7,) if tokens else (1, 20, 20)
    made = nets.named(net, shape, 3, width=0.1, **options)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (23, *shape)) if tokens else rng.normal(size=(23, *shape)).astype(np.float32)
    data = Rows(torch.from_numpy(x), torch.from_numpy(rng.integers(0, 3, 23)), np.array([0, 9, 16, 23]))
    j = replace(job(algorithms.pfedgate(), net=made, data=data, sizes=[9, 7, 7]), test=data)
    state = run(j, 1)
    assert np.isfinite(evaluate.evaluate(j, state)["loss"]).all()
    shut = trainer.models(j, state)["gate.open"] == 0
    assert 0.2 < shut.float().mean() < 0.8


def test_what_cannot_be_gated_is_named():
    with pytest.raises(
        ValueError, match=r"number of inputs, which is unknown. Set it, as in net._replace\(inputs=784\)"
    ):
        job(algorithms.pfedgate(), net=nets.mlp(SIZES)._replace(inputs=None))
    with pytest.raises(ValueError, match=r"sparsity must be at least 0.204 .*, but got 0.1. Raise"):
        job(algorithms.pfedgate(sparsity=0.1))
    with pytest.raises(ValueError, match="this network composes its weights"):
        job(algorithms.named("pfedgate-low-rank"))
