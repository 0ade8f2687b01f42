"""Factorized-FL: networks of factors against plain loops, the limits of its settings, matching, bytes, and its code."""

from __future__ import annotations

from functools import partial

import algorithm_jobs as jobs
import numpy as np
import plain_factorized
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_equal, dataset, image_job, job, make, models, optimizer_pair, run

from fedstat import fl
from fedstat.fl import algorithms, evaluate, nets, optim
from fedstat.fl.algorithms import named
from fedstat.fl.hooks import Hooks
from fedstat.fl.probes import measures

alpha, beta = (partial(named, f"factorized-fl-{which}") for which in ("alpha", "beta"))
# Normalisation makes the derivative at a shortcut's u zero but for rounding, which a small eps would scale to a step.
OPTIMIZERS = {"sgd": optimizer_pair("sgd", 0.1), "adam": optimizer_pair("adam", 0.01, eps=1e-3)}
of_images = partial(image_job, sizes=[7, 4, 6, 6])
LENET, RESNET = nets.lenet((1, 16, 16), 3, width=0.3), nets.resnet8((1, 16, 16), 3, width=0.25)
PLAIN = {
    "cnn": (LENET, plain_factorized.Cnn, "fc1", "fc2", {}),
    "cnn, rank 2": (LENET, partial(plain_factorized.Cnn, rank=2), "fc1", "fc2", {"rank": 2}),
    "cnn, mixed": (LENET, partial(plain_factorized.Cnn, kernels="mixed"), "fc1", "fc2", {"kernels": "mixed"}),
    "cnn, without μ": (LENET, partial(plain_factorized.Cnn, mu=False), "fc1", "fc2", {"mu": False}),
    "resnet8": (RESNET, plain_factorized.ResNet8, "conv7", "fc1", {}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", PLAIN)
def test_images_train_and_match_as_in_the_plain_loop(case, optimizer):
    net, module, compared, head, settings = PLAIN[case]
    stacked, one = OPTIMIZERS[optimizer]
    rounds = 1 if net is RESNET else 2  # rounding grows in the deeper network: 4e-6 after one round, 8e-4 after two
    rule = {"epsilon": 3.0, "tau": 0.3} | ({} if "mu" in settings else {"sparsity": 0.01})
    j = of_images(beta(**settings, **rule), net, optimizer=stacked, client_chunk=3, local_epochs=1)
    theirs, _, matrix = plain_factorized.run(
        j, module, one, rounds=rounds, beta=True, compared=compared, head=head, **{"sparsity": 0} | rule
    )
    state, done = trainer.run(j, run(j, rounds - 1))
    order = done.cohort.local
    np.testing.assert_allclose(done.mixing, matrix[np.ix_(order, order)], atol=1e-5)
    jobs.assert_clients_near(j, state, theirs, atol=5e-5)


# --- limits


def without_matching(algorithm):
    """Each client by itself on the same network, with the same steps."""
    return algorithms.local()._replace(wrap=algorithm.wrap, phases=algorithm.phases)


@pytest.mark.parametrize("make", [alpha, beta])
def test_weights_that_follow_similarity_alone_are_local_training(make):
    algorithm = make(epsilon=1e12)
    assert_equal(models(job(algorithm)), models(job(without_matching(algorithm))))


@pytest.mark.parametrize("make", [alpha, beta])
def test_a_single_client_trains_alone(make):
    assert_equal(models(job(make(), sizes=[20])), models(job(without_matching(make()), sizes=[20])))


@pytest.mark.parametrize("settings", [{"epsilon": 0.0, "tau": -1.0}, {"matching": "none"}])
def test_equal_weights_are_fedper_on_the_factorised_network(settings):
    algorithm, sizes = beta(**settings), [8] * 5
    fedper = algorithms.fedper()._replace(wrap=algorithm.wrap, phases=algorithm.phases)
    mine, theirs = (models(job(method, sizes=sizes)) for method in (algorithm, fedper))
    for name, p in theirs.items():
        torch.testing.assert_close(mine[name], p, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [optim.sgd(0.1), optim.adam(0.01)])
def test_a_large_penalty_is_the_network_without_mu(optimizer):
    kept, gone = (models(job(beta(**s), optimizer=optimizer)) for s in ({"sparsity": 1e9}, {"mu": False}))
    assert set(kept) - set(gone) == {"fc1.mu", "fc2.mu"}
    assert not kept["fc1.mu"].any()
    assert not kept["fc2.mu"].any()
    for name, p in gone.items():
        torch.testing.assert_close(kept[name], p, atol=1e-6, rtol=1e-5)


def test_the_penalty_leaves_exact_zeros():
    share = [float((models(job(beta(sparsity=s)))["fc1.mu"] == 0).float().mean()) for s in (0.0, 0.03, 0.3)]
    assert share[0] < share[1] < share[2]


# --- matching


def last_round(method, rounds=2, **options):
    j = job(method, **options)
    return trainer.run(j, run(j, rounds - 1))[1]


def test_dissimilar_clients_are_left_out_unless_so_many_are_wanted():
    limit = float(np.median(similarities(last_round(alpha()))))
    some, three = (last_round(alpha(tau=limit, **s)) for s in ({}, {"at_least": 3}))
    vectors = [v.flatten().double().numpy() for v in some.trained.params["fc1.v"]]
    for done, at_least in ((some, 1), (three, 3)):
        expected = plain_factorized.weights_of(vectors, epsilon=1.0, tau=limit, at_least=at_least)
        np.testing.assert_allclose(done.mixing, expected, atol=1e-6)
        assert ((done.mixing > 0).sum(1) >= at_least).all()
    assert (some.mixing == 0).any()
    assert ((some.mixing > 0).sum(1) < 3).any(), "a weak test"


def similarities(done):
    return alpha().measures["similarity"].value(done.context)


@pytest.mark.parametrize("matching", ["random", "worst"])
def test_three_others_are_matched(matching):
    done = last_round(beta(matching=matching, epsilon=2.0))
    similarity, weight = similarities(done).numpy(), done.mixing.double().numpy()
    for i in range(len(weight)):
        taken = np.flatnonzero(weight[i])
        others = np.setdiff1d(taken, i)
        assert i in taken
        assert len(others) == 3
        if matching == "worst":
            assert set(others) == set(np.argsort(similarity[i])[:3])
        e = np.exp(2 * similarity[i, taken])
        np.testing.assert_allclose(weight[i, taken], e / e.sum(), atol=1e-6)
    if matching == "random":
        again, later = (last_round(beta(matching=matching, epsilon=2.0), rounds).mixing > 0 for rounds in (2, 3))
        assert torch.equal(again, done.mixing > 0)
        assert not torch.equal(again, later)


def test_similarities_and_the_mixing_matrix_are_in_the_store():
    kept = fl.train(dataset(SAMPLES), nets.mlp(SIZES), alpha(), rounds=2, batch_size=5, participation=0.5)
    similarity, weight = kept["measures/similarity"].to_numpy(), kept["mixing/weight"].to_numpy()
    assert similarity.shape == weight.shape == (2, 6, 6)
    seen = ~np.isnan(similarity)
    np.testing.assert_array_equal(seen, ~np.isnan(weight))
    e = np.where(seen & (similarity >= 0), np.exp(similarity), 0)
    np.testing.assert_allclose(weight[seen], (e / np.maximum(e.sum(-1, keepdims=True), 1))[seen], atol=1e-6)
    assert (kept["measures/similarity_u"].to_numpy()[seen] <= 1).all()


# --- the published code


def test_the_codes_server_replaces_one_model_after_the_other():
    j = job(beta(variant="code", tau=-1.0, epsilon=2.0))
    done = trainer.run(j, run(j, 1))[1]
    up, n = done.context, len(done.cohort.local)
    weights = plain_factorized.weights_of([v.flatten().double().numpy() for v in up.after["fc1.v"]], epsilon=2, tau=-1)
    found = done.mixing.double().numpy()
    # Whoever is replaced first has the plain weights; then each has those of what is there by then.
    now, left = np.eye(n), list(range(n))
    while left:
        first = min(left, key=lambda i: np.abs(weights[i] @ now - found[i]).max())
        now[first] = weights[first] @ now
        np.testing.assert_allclose(found[first], now[first], atol=1e-5)
        left.remove(first)
    assert np.abs(found - weights).max() > 0.01


def test_the_codes_network_reshapes_kernels_as_they_lie_in_memory():
    net = alpha(variant="code").wrap(LENET)
    params = {name: torch.stack([p, p + 0.1]) for name, p in net.init(np.random.default_rng(0)).items()}
    plain = plain_factorized.Cnn(kernels="code")
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 3, 1, 16, 16))).float()
    for c, out in enumerate(net.apply(params, x)):
        plain.load_state_dict({name: p[c] for name, p in params.items()})
        torch.testing.assert_close(out, plain(x[c]), atol=1e-6, rtol=1e-5)
    start = net.init(np.random.default_rng(0))
    assert start["fc1.mu"].abs().max() <= np.sqrt(6 / (36 + 5))
    assert not start["conv1.mu"].any()
    assert start["fc1.mu"].all()


def test_the_code_predicts_without_small_entries_and_trains_with_them():
    j = job(alpha(variant="code", sparsity=0.2))
    state = run(j)
    before = trainer.models(j, state)
    scores = evaluate.evaluate(j, state)
    pruned = {n: torch.where(p.abs() < 0.2, 0, p) if n.endswith(".mu") else p for n, p in before.items()}
    out = j.net.apply(pruned, j.test.x.view(j.clients, 12, 6))
    losses = torch.nn.functional.cross_entropy(out.mT, j.test.y.view(j.clients, 12), reduction="none").mean(1)
    np.testing.assert_allclose(scores["loss"], losses, atol=1e-5)
    small = (before["fc1.mu"].abs() < 0.2) & (before["fc1.mu"] != 0)
    assert small.any(), "they are still there"
    norms = run(of_images(alpha(variant="code"), RESNET), 0).mask.shared
    assert {n for n, mask in norms.items() if mask.all()} == {
        n for n in norms if not n.startswith("fc1") and not n.endswith((".v", ".mu"))
    }


# --- bytes


def test_bytes_of_the_four_layer_cnn_are_those_of_a_count_by_hand():
    """α: u of 25, 25 and 1024 numbers, up also v of 512; β: also v of 32, 32·64 and 512, biases, and μ."""
    one, counts = np.array([0]), {}
    for method in (alpha(), alpha(matching="none"), algorithms.fedavg()):
        net = nets.named("cnn", (1, 28, 28), 10)
        net = method.wrap(net) if method.wrap else net
        hooks = Hooks(method, net, 1)
        shared = hooks.init_mask(engine_start(net))
        uploaded = hooks.upload_mask(shared)
        counts[method.name, method.mixing_weights is None] = measures.in_bytes(hooks, uploaded, shared, shared, one)
    u = 25 + 25 + 1024
    assert counts["factorized-fl-alpha", False] == (4 * (u + 512), 4 * u)
    assert counts["factorized-fl-alpha", True] == (4 * u, 4 * u)
    assert counts["fedavg", True] == (4 * 582_026,) * 2
    up, down = counts["factorized-fl-alpha", False]
    assert (up + down) / sum(counts["fedavg", True]) == pytest.approx(0.002285, abs=1e-6)


def engine_start(net):
    return fl.algorithm.InitContext(
        net, np.array([1]), 0, torch.device("cpu"), lambda _: {}, lambda _: ({}, None), lambda _: {}
    )


def test_bytes_of_beta_are_its_numbers_that_are_not_zero():
    j = of_images(beta(sparsity=0.02), LENET)
    old = run(j, 1)
    new, done = trainer.run(j, old)
    dense, entries = 25 + 25 + 5 + (2 + 10 + 36) + (2 + 5 + 36), (50, 250, 180)  # u, v, biases; of μ
    bits = sum(-(-n // 8) for n in entries)

    def by_hand(params):
        kept = [params[f"{layer}.mu"] for layer in ("conv1", "conv2", "fc1")]
        return sum(int((p != 0).sum()) for p in kept) * 4 + j.clients * (4 * dense + bits), kept

    sent, kept = by_hand(done.trained.params)
    received, _ = by_hand(trainer.models(j, new))
    assert measures.of_round(j, done) == (sent, received)
    assert any(bool((p == 0).any()) for p in kept)


# --- networks


@pytest.mark.parametrize("name", nets.NETS)
def test_every_network_is_factorised_but_for_what_is_no_dense_layer_or_convolution(name):
    sample, options = ((7,), {"vocabulary": 11}) if nets.takes_text(name) else ((1, 16, 16), {"width": 0.1})
    base = nets.named(name, sample, 3, **options)
    net = alpha().wrap(base)
    left = {n for n in base.shapes if n.endswith(".weight") and n in net.shapes}
    assert left == {n for n in base.shapes if n.startswith(("embedding.w", "position.w", "lstm", "attention"))} & {
        n for n in base.shapes if n.endswith(".weight")
    }
    params = {n: torch.stack([p, p]) for n, p in net.init(np.random.default_rng(0)).items()}
    x = torch.zeros(2, 4, *sample, dtype=torch.long if nets.takes_text(name) else torch.float32)
    assert torch.equal(net.apply(params, x), base.apply(nets.whole(net, params), x))
    shared = alpha().init_mask(engine_start(net)).shared
    below = [n for n in net.shapes if nets.layer_of(n) not in nets.head_layers(net)]
    assert [n for n, mask in shared.items() if mask.all()] == [n for n in below if n.endswith(".u")]


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (nets.mlp([6, 3]), r"layers below the classifier, but of the layers \['fc1'\]"),
        (nets.mlp(SIZES)._replace(features=None, head=None), "needs a network with features and one dense output"),
    ],
)
def test_a_network_without_what_is_shared_is_named_before_the_first_round(net, says):
    with pytest.raises(ValueError, match=says):
        job(make("factorized-fl-alpha"), net=net)
