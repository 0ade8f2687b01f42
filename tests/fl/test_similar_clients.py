"""FedAMP, FedFomo and Clustered-FL: whom a client learns with, what that costs, and that groups are found."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import plain_loop
import plain_servers
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, assert_clients_near, assert_equal, dataset, job, models, rows, run
from scipy.spatial import distance
from sklearn.cluster import AgglomerativeClustering

from fedstat.fl import aggregate, algorithms, communication_round, evaluate, masks, nets, optim, train
from fedstat.fl.algorithm import Algorithm, Phase, SharedMask
from fedstat.fl.algorithms import fedfomo, named, personal_head
from fedstat.fl.algorithms.clustered_fl import _Rule
from fedstat.fl.probes import variants

NAMES = ("clustered-fl", "fedamp", "fedfomo")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_models_are_compared_by_shared_parameters_without_running_statistics():
    net = nets.lenet((1, 16, 16), 3, norm="batch", width=0.5)
    mask = SharedMask(masks.share_all_but(net, ["fc2"], torch.device("cpu")))
    context = SimpleNamespace(mask=mask, net=net)
    models = {name: torch.zeros(2, *shape) for name, shape in net.shapes.items()}
    shared = {name for name in net.shapes if nets.layer_of(name) != "fc2"}
    assert aggregate.shared_part(context, models, statistics=True).keys() == shared
    assert aggregate.shared_part(context, models).keys() == {name for name in shared if "running" not in name}


# --- equal to the plain loop under other settings than the table's

CASES = {
    "fedamp, cosine": ("fedamp", {"attention": "cosine", "sigma": 5.0, "self_weight": 0.3}, {}),
    "fedamp, too large a step": ("fedamp", {"alpha": 4.0, "sigma": 2.0, "lam": 2.0}, {}),
    "fedfomo, some models": ("fedfomo", {"downloads": 2, "epsilon": 0.6, "decay": 0.1}, {}),
    "fedfomo, always at random": ("fedfomo", {"downloads": 1, "epsilon": 1.0, "decay": 0.0}, {}),
    "clustered-fl, two at most": ("clustered-fl", {"eps1": 0.5, "eps2": 0.1, "max_clusters": 2}, {"server_lr": 0.5}),
    "clustered-fl, far apart": ("clustered-fl", {"eps1": 0.5, "eps2": 0.1, "gamma": 0.55}, {"participation": 0.9}),
}
LOOPS = {"fedamp": plain_servers.fedamp, "fedfomo": plain_servers.fedfomo, "clustered-fl": plain_servers.clustered}


@pytest.mark.parametrize("case", CASES)
def test_other_settings_equal_the_plain_loop(case):
    name, settings, options = CASES[case]
    j = job(named(name, **settings), client_chunk=2, **{"participation": 0.7} | options)
    assert_clients_near(j, run(j, 4), LOOPS[name](j, sgd, 4, **settings)[0])


def test_the_cases_split_clusters_and_keep_others_together():
    for case, least, most in (("two at most", 2, 2), ("far apart", 2, 5)):
        _, settings, options = CASES[f"clustered-fl, {case}"]
        history = []
        j = job(named("clustered-fl", **settings), **{"participation": 0.7} | options)
        plain_servers.clustered(j, sgd, 4, history=history, **settings)
        assert least <= len(history[-1]) <= most


# --- what they measure and cost is in the store


def test_fedfomo_counts_every_model_that_is_downloaded_and_sends_one():
    seen, settings = [], {"downloads": 2, "epsilon": 0.5}
    j = job(fedfomo(**settings), participation=0.7, track=True)
    state = trainer.start(j)
    plain_servers.fedfomo(j, sgd, 3, seen=seen, **settings)
    for number in range(3):
        metrics = trainer.measured(j, state)[1]
        assert (metrics["bytes_up"], metrics["bytes_down"]) == (4 * 412, 4 * 2 * 412)
        state, done = trainer.run(j, state)
        clients = done.context.clients
        for i, own in zip(clients, done.mixing.numpy(), strict=True):
            (others,) = [models for at, client, models in seen if (at, client) == (number, i)]
            assert len(others) == 2
            assert set(clients[own > 0]) <= {i, *others}
            assert own.sum() == pytest.approx(1)


def test_one_active_client_downloads_nothing_and_trains_alone():
    j = job(fedfomo(), participation=1 / 6, track=True)
    assert_equal(models(j, 4), models(job(algorithms.local(), participation=1 / 6), 4))
    assert trainer.measured(j, trainer.start(j))[1]["bytes_down"] == 0


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_attention_is_measured_and_its_rows_sum_to_one(attention):
    j = job(algorithms.fedamp(attention=attention), participation=0.5)
    found = j.algorithm.measures["attention"].value(trainer.run(j, run(j, 1))[1].context)
    assert found.shape == (3, 3)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


def test_clustered_fl_stores_norms_before_and_clusters_after_a_round():
    made, options = algorithms.clustered_fl(eps1=0.5, eps2=0.1), {"rounds": 3, "batch_size": 5, "seed": 4}
    found = train(dataset(SAMPLES), nets.mlp(SIZES), made, local_epochs=2, **options)["measures"]
    history = []
    plain_servers.clustered(job(made), sgd, 3, eps1=0.5, eps2=0.1, history=history)
    for number, clusters in enumerate(history):
        own = found["cluster"].isel(round=number).to_numpy()
        assert sorted(np.flatnonzero(own == k).tolist() for k in np.unique(own)) == sorted(clusters)
    assert (found["mean_update"] <= found["update"].max("client") + 1e-6).all()


# --- limits


def test_fedamp_that_attends_only_to_itself_is_local_training_held_back():
    """A proximal point method: every client stays near the model that it had before the round."""

    def penalty(params, anchor):
        return {name: (p - anchor[name]).mul_(0.5) for name, p in params.items()}

    local = Algorithm(
        "local",
        lambda s: SharedMask(masks.share_none(s.net, s.device)),
        phases=(Phase(penalty=penalty, anchor="download"),),
    )
    alone = algorithms.fedamp(attention="cosine", self_weight=1.0, lam=1.0, alpha=2.0)
    assert_equal(*(models(job(made, participation=0.7)) for made in (alone, local)))


def test_the_published_codes_clustered_fl_is_the_unweighted_mean_before_its_first_split():
    code = algorithms.clustered_fl(eps1=9, eps2=0, variant="code")
    uniform = algorithms.fedavg()._replace(weights=lambda sizes, *_: np.full(len(sizes), 1 / len(sizes)))
    a, b = (job(made, batch_size=None, local_epochs=1) for made in (code, uniform))
    one, other = run(a, 20), run(b, 20)
    assert_equal(trainer.models(a, one), trainer.models(b, other))
    assert int(trainer.step(a, one).algorithm_state.server["number of clusters"]) == 2


# --- who is alike


def test_similarities_are_scipys():
    rng = np.random.default_rng(0)
    params = {"w": torch.from_numpy(rng.normal(size=(5, 3, 4))), "b": torch.from_numpy(rng.normal(size=(5, 2)))}
    flat = np.concatenate([p.flatten(1).numpy() for p in params.values()], 1)
    squares = distance.squareform(distance.pdist(flat, "sqeuclidean"))
    np.testing.assert_allclose(aggregate.squared_distances(params), squares, atol=1e-12)
    np.testing.assert_allclose(
        1 - aggregate.cosines(params), distance.squareform(distance.pdist(flat, "cosine")), atol=1e-12
    )
    nothing = {"w": torch.zeros(2, 3)}
    np.testing.assert_array_equal(aggregate.cosines(nothing), np.eye(2))


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_the_optimal_bipartition_or_the_published_codes(seed):
    updates = {"w": torch.from_numpy(np.random.default_rng(seed).normal(size=(7, 4)))}
    alike = aggregate.cosines(updates).numpy()
    across, part = plain_servers.bipartition(alike)
    second = _Rule(0, 0, 0, None, code=False).second_part(updates).numpy()
    assert alike[np.ix_(second, ~second)].max() == across
    assert part in (np.flatnonzero(second).tolist(), np.flatnonzero(~second).tolist())
    assert _Rule(0, 0, float(np.sqrt((1 - across) / 2)), None, code=False).second_part(updates) is None
    labels = AgglomerativeClustering(metric="precomputed", linkage="complete").fit(-alike).labels_.astype(bool)
    second = _Rule(0, 0, 0, None, code=True).second_part(updates).numpy()
    assert set(map(frozenset, (np.flatnonzero(second), np.flatnonzero(~second)))) == set(
        map(frozenset, (np.flatnonzero(labels), np.flatnonzero(~labels)))
    )


def two_groups():
    """Six clients whose classes are the same function of x, but with two classes exchanged for the last three."""
    sizes = [60] * 6
    parts = {name: rows(sizes, seed) for name, seed in (("data", 0), ("validation", 5))}
    for data in parts.values():
        data.y[180:] = torch.tensor([1, 0, 2])[data.y[180:]]
    return parts | {"sizes": sizes, "optimizer": optim.sgd(0.2), "local_epochs": 5, "batch_size": 10}


@pytest.mark.parametrize("name", NAMES)
def test_clients_that_disagree_are_told_apart(name):
    settings = {
        "clustered-fl": {"eps1": 9.0, "eps2": 0.0, "max_clusters": 2},
        "fedamp": {"lam": 0.1, "sigma": 0.05},
    }.get(name, {})
    given = two_groups()
    validation = given.pop("validation")
    j = job(named(name, **settings), validation=validation, **given)
    state, done = trainer.run(j, run(j, 4))
    same = np.equal.outer(np.arange(6) < 3, np.arange(6) < 3)
    if name == "clustered-fl":
        own = state.algorithm_state.clients.saved()["cluster"].numpy()
        np.testing.assert_array_equal(np.equal.outer(own, own), same)
        return
    order = np.argsort(done.context.clients)
    matrix = done.mixing if name == "fedfomo" else j.algorithm.measures["attention"].value(done.context)
    matrix = matrix.numpy()[np.ix_(order, order)]
    others = ~np.eye(6, dtype=bool)
    assert matrix[same & others].mean() > 3 * matrix[~same].mean()


# --- evaluation of others' models


def test_chosen_models_and_own_parts_are_evaluated_as_one_by_one():
    j = job(fedfomo(), client_chunk=4)
    state, clients = run(j, 2), np.array([4, 0, 2])
    up = trainer.context(j, state, clients)
    which = np.array([[0, 2], [1, 1], [2, 0]])
    chosen = up.evaluate(up.after, clients, which)
    torch.testing.assert_close(chosen, up.evaluate(up.after, clients).gather(1, torch.from_numpy(which)))
    body = {name: p for name, p in up.after.items() if name.startswith("fc1")}
    mixed = up.evaluate(body, clients[::-1], which)
    for i, k in itertools.product(range(3), range(2)):
        own = 2 - i
        parts = {n: p[which[i, k]] if n in body else p[own] for n, p in up.after.items()}
        one = evaluate.scores(j, {n: p[None] for n, p in parts.items()}, j.validation, clients[own : own + 1])[1]
        assert mixed[i, k] == pytest.approx(float(one[0]), abs=1e-6)


def test_with_personal_heads_others_models_are_weighed_with_the_own_head():
    j = job(personal_head(fedfomo(downloads=5)))
    state, done = trainer.run(j, run(j, 2))
    up, before = done.context, done.context.before
    for i, c in enumerate(up.clients):
        gains, held_out = [], plain_loop.samples(j.validation, c)
        for n in range(len(up.clients)):
            model = {name: p[n if name.startswith("fc1") else i] for name, p in up.after.items()}
            was = plain_servers.loss_of(j, {name: p[i] for name, p in before.items()}, *held_out)
            far = sum(
                float((up.after[f"fc1.{k}"][n] - before[f"fc1.{k}"][i]).square().sum()) for k in ("weight", "bias")
            )
            gains.append(max(0.0, (was - plain_servers.loss_of(j, model, *held_out)) / far**0.5))
        np.testing.assert_allclose(done.mixing[i], np.array(gains) / sum(gains), atol=1e-4)
    own = trainer.models(j, state)
    assert own["fc2.weight"].unique(dim=0).shape[0] == 6


# --- new clients, memory on disk, mistakes


@pytest.mark.parametrize("name", NAMES)
def test_new_clients_have_the_rules_of_the_method(name):
    settings = {"eps1": 0.5, "eps2": 0.1} if name == "clustered-fl" else {}
    j = job(named(name, **settings))
    found = variants.accuracy(j, run(j, 2), rows([9, 5], 3), rows([20, 20], 4))
    assert all(np.isfinite(accuracy).all() for accuracy in found.values())
    assert set(algorithms.about(name).unseen_clients) <= found.keys()


def test_no_validation_samples_are_named_before_the_first_round(monkeypatch):
    monkeypatch.setattr(communication_round, "train_locally", None)
    with pytest.raises(ValueError, match=r"fedfomo evaluates models on validation samples.*validation=0\.1"):
        trainer.start(job(fedfomo(), validation=None))


@pytest.mark.parametrize("wrong", [np.ones(6), [1, 2], np.full(6, -1)])
def test_numbers_of_downloads_that_are_none_are_named(wrong):
    made = fedfomo()._replace(downloads=lambda _: wrong)
    with pytest.raises(ValueError, match=r"'fedfomo': downloads\(context\) must return an integer >= 0 for each of 6"):
        trainer.measured(job(made, track=True), trainer.start(job(made)))
