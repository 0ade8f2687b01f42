"""FedCP: its loss, its policy network, the variants of its tables, its limits, and what it runs on."""

from __future__ import annotations

import math

import algorithm_jobs as jobs
import numpy as np
import plain_fedcp
import plain_loop
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_clients_near, assert_near, image_job, job, models, optimizer_pair, run
from small_runs import NET, SETTINGS, dense, three_splits
from torch import nn

from fedstat.fl import algorithms, evaluate, nets, train
from fedstat.fl.algorithms.fedcp import Parts, Policy, cut, mean_share, mmd_gradient, separated

TABLE_1 = {
    "FedCP": {},
    "w.o. cs": {"context": "sample"},
    "w.o. ss": {"context": "client"},
    "w.o. cs & ss": {"context": "random"},
    "w.o. GFM": {"align": False},
    "w.o. CPN": {"policy": False},
    "w.o. CPN & GFM": {"policy": False, "align": False},
    "w.o. CPN & GH": {"policy": False, "global_head": False},
    "w.o. CPN & GFM & GH": {"policy": False, "align": False, "global_head": False},
}
TABLE_10 = [
    *({"policy_layers": n} for n in (2, 3, 4)),
    *({"policy_norm": norm} for norm in ("batch", "group", "none")),
    *({"policy_activation": act} for act in ("tanh", "sigmoid")),
]


# --- the distance between features


def test_the_gradient_of_the_mmd_is_that_of_a_double_loop():
    rng = np.random.default_rng(0)
    h, g = (torch.from_numpy(rng.normal(size=(2, 5, 3)) * 3) for _ in range(2))
    h.requires_grad_()
    live = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).double()  # the second client's batch is padded
    w = live / live.sum(1, keepdim=True)

    def k(a, b):
        return sum(torch.exp(-((a - b) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50))

    total = torch.zeros((), dtype=torch.float64)
    for c, n in enumerate((5, 3)):
        for i in range(n):
            for j in range(n):
                total = total + (k(h[c, i], h[c, j]) + k(g[c, i], g[c, j]) - 2 * k(h[c, i], g[c, j])) / n**2
    assert total > 0
    (by_loop,) = torch.autograd.grad(total, h)
    found = mmd_gradient(h.detach(), g, w)
    torch.testing.assert_close(found, by_loop, atol=1e-12, rtol=1e-10)
    assert not found[1, 3:].any(), "padding has no features to move"


# --- the policy network


def test_the_policys_parameters_are_as_many_as_in_the_paper():
    sizes = [sum(math.prod(s) for s in Policy(n).shapes(512).values()) for n in (1, 2, 3, 4)]
    assert sizes == [527_360, 790_016, 1_052_672, 1_315_328]  # §6.1 and Appendix C: 0.527M, 0.790M, 1.052M, 1.315M
    cnn = nets.named("cnn", (3, 64, 64), 200)
    assert sum(math.prod(s) for s in cnn.shapes.values()) == 5_694_600  # 5.695M
    more = {n: s for n, s in separated(cnn, Parts()).shapes.items() if n not in cnn.shapes}
    assert sum(math.prod(s) for s in more.values()) == 527_360 + 200 * 513 + 2 * 512  # global head; vector, shares


@pytest.mark.parametrize("norm", ["layer", "batch", "group", "none"])
@pytest.mark.parametrize(("layers", "activation"), [(1, "relu"), (3, "tanh"), (2, "sigmoid")])
def test_the_policy_is_what_torchs_modules_make(norm, layers, activation):
    k = 6
    parts, act = [], {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}[activation]
    for _ in range(layers - 1):
        parts += [nn.Linear(k, k), act()]
    made = {"layer": lambda: nn.LayerNorm(2 * k), "batch": lambda: nn.BatchNorm1d(2 * k)}
    made |= {"group": lambda: nn.GroupNorm(2, 2 * k), "none": nn.Identity}
    module = nn.Sequential(*parts, nn.Linear(k, 2 * k), made[norm](), act())
    design = Policy(layers, norm, activation)
    rng, c = np.random.default_rng(0), torch.randn(1, 9, k, generator=torch.Generator().manual_seed(0))
    params = {n: p.unsqueeze(0) for n, p in design.start(rng, k).items()}
    if norm != "none":  # so that scale and shift matter
        params[f"{design.last}.scale"] = torch.linspace(0.5, 2, 2 * k).unsqueeze(0)
        params[f"{design.last}.shift"] = torch.linspace(-1, 1, 2 * k).unsqueeze(0)
    kinds = {"scale": "weight", "shift": "bias"}
    state = {}
    for name, p in params.items():
        layer, kind = name.split(".")
        at = 2 * (int(layer.removeprefix("policy")) - 1) + (kind not in ("weight", "bias"))
        state[f"{at}.{kinds.get(kind, kind)}"] = p[0]
    module.load_state_dict(state, strict=False)
    for training in (True, False):
        module.train(training)
        a = module(c[0])
        found = design.difference(params, c, torch.ones(1, 9, dtype=torch.bool) if training else None)
        torch.testing.assert_close(found[0], a[:, :k] - a[:, k:], atol=1e-5, rtol=1e-5)


def test_the_codes_policy_is_drawn_in_training_and_its_mean_taken_in_evaluation():
    draws = 40_000
    rng = np.random.default_rng(0)
    noise = {"policy": torch.from_numpy(rng.random((1, 7, SIZES[1]))).float()}
    net = separated(nets.mlp(SIZES), Parts(sampled=True))
    params = {n: p.unsqueeze(0) for n, p in net.init(np.random.default_rng(0)).items()}
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(1, 7, SIZES[0]))).float()
    mean = cut(net, net.apply(params, x))
    drawn = cut(net, net.apply(params, x, noise=noise)).share
    assert not torch.isclose(drawn, mean.share).any()
    for d in (-4.0, 0.0, 1e-3, 0.5, 30.0):
        gumbel = -np.log(-np.log(rng.random((2, draws))))
        share = 1 / (1 + np.exp(-(d + gumbel[0] - gumbel[1])))  # softmax of (d, 0) with Gumbel noise, temperature 1
        assert abs(float(mean_share(torch.tensor(d))) - share.mean()) < 4 * share.std() / math.sqrt(draws) + 1e-9


# --- the method


class Image(nn.Module):
    """A small convolutional extractor with the package's names."""

    def __init__(self, width):
        super().__init__()
        net = nets.cnn((1, 16, 16), 3, width=width)
        (a, c, *_), (b, *_), (hidden, left) = (net.shapes[f"{n}.weight"] for n in ("conv1", "conv2", "fc1"))
        self.conv1, self.conv2, self.fc1 = nn.Conv2d(c, a, 5), nn.Conv2d(a, b, 5), nn.Linear(left, hidden)

    def forward(self, x):
        h = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        h = nn.functional.max_pool2d(self.conv2(h).relu(), 2)
        return self.fc1(h.flatten(1)).relu()


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    "optimizer", [optimizer_pair("sgd", 0.1), optimizer_pair("adam", 0.01, eps=1e-5)], ids=["sgd", "adam"]
)
def test_a_round_of_an_image_network_is_that_of_a_plain_loop(optimizer, chunk):
    ours, theirs = optimizer
    net = nets.cnn((1, 16, 16), 3, width=0.1)
    j = image_job(algorithms.fedcp(lam=2), net, [9, 14, 6], optimizer=ours, client_chunk=chunk)
    assert_clients_near(j, run(j, 2), *plain_fedcp.run(j, lambda: Image(0.1), theirs, rounds=2, lam=2)[:2], atol=3e-5)


def test_the_personalisation_ratio_is_the_mean_share_before_training():
    j = job(algorithms.fedcp(), participation=0.7)
    state = run(j, 2)
    after = trainer.run(j, state)[1].context
    found = j.algorithm.measures["personalisation"].value(after)
    sgd = optimizer_pair("sgd", 0.1)[1]
    _, _, plain = plain_fedcp.run(j, lambda: plain_loop.module(SIZES)[:2], sgd, rounds=3)
    np.testing.assert_allclose(found, plain[after.clients], atol=1e-5)
    assert np.isnan(plain).sum() == j.clients - len(after.clients)


def test_without_policy_alignment_and_global_head_it_is_fedper():
    a = models(job(algorithms.fedcp(**TABLE_1["w.o. CPN & GFM & GH"]), participation=0.7))
    b = models(job(algorithms.fedper(), participation=0.7))
    assert_near(a, b, atol=1e-6)


def test_no_weight_on_the_distance_is_no_alignment():
    a, b = (models(job(algorithms.fedcp(**given))) for given in ({"lam": 0}, {"align": False}))
    assert all(torch.equal(p, b[name]) for name, p in a.items())


def test_the_variants_differ_and_share_what_they_say():
    found = {name: job(algorithms.fedcp(**given)) for name, given in TABLE_1.items()}
    weights = {name: models(j)["fc1.weight"] for name, j in found.items()}
    names = list(weights)
    assert not any(torch.equal(weights[a], weights[b]) for i, a in enumerate(names) for b in names[:i])
    for name, j in found.items():
        shared = {nets.layer_of(n) for n, mask in run(j, 0).mask.shared.items() if mask.all()}
        absent = {"policy1": "CPN", "global": "GH"}
        assert shared == {"fc1"} | {layer for layer, module in absent.items() if module not in name}


def test_a_random_context_stays_and_a_clients_own_follows_its_head():
    start, after = (run(job(algorithms.fedcp(context="random")), n) for n in (0, 2))
    assert torch.equal(*(state.client_params.saved()["client.context"] for state in (start, after)))
    for variant, when in (("paper", 1), ("code", 2)):
        j = job(algorithms.fedcp(variant=variant))
        head, two = models(j, when)["fc2.weight"].sum(1), models(j, 2)["client.context"]
        torch.testing.assert_close(two, head / head.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("given", TABLE_10, ids=str)
def test_other_policy_networks_train(given):
    j = job(algorithms.fedcp(**given))
    start, end = (run(j, n) for n in (0, 2))
    moved = [
        n for n, p in end.global_params.items() if n.startswith("policy") and not torch.equal(p, start.global_params[n])
    ]
    assert set(moved) == {n for n in j.net.shapes if n.startswith("policy")}
    assert np.isfinite(evaluate.evaluate(j, end)["loss"]).all()


def test_bfloat16_changes_a_policy_with_batch_normalisation_by_its_rounding():
    method = algorithms.fedcp(policy_norm="batch")
    exact, rounded = (job(method, precision=kind) for kind in ("float32", "bfloat16"))
    a, b = models(exact, 1), models(rounded, 1)
    assert jobs.distance(a, b) < 0.02 * jobs.distance(a, models(exact, 0))
    assert not torch.equal(a["policy1.weight"], b["policy1.weight"])


def test_a_labelled_run_with_everything():
    run = train(
        three_splits(), NET, algorithms.fedcp(variant="code"), rounds=1,
        unseen_clients=dense(clients=2, seed=3), probe=["split-half", "drift", "trained-weights"], **SETTINGS,
    )  # fmt: skip
    assert np.isfinite(run["metrics/validation_accuracy"]).all()
    ratio = run["measures/personalisation"]
    assert ((ratio > 0) & (ratio < 1) | ratio.isnull()).all()
    share = run["weights/client/share"].isel(checkpoint=-1)
    last = ratio.isel(round=-1)
    np.testing.assert_allclose(share.mean("unit").where(last.notnull()), last, atol=1e-6)
    assert np.isfinite(run["unseen_clients/accuracy"].sel(rule="local_train")).all()
