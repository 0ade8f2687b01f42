"""Factors of composed weights in a store: trained and aggregated, resumable, and read in one call."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, dataset, job
from composed_parts import everywhere, low_rank, outer
from small_runs import interrupted_and_resumed, same

import fedstat
from fedstat import store
from fedstat.fl import algorithms, checkpoints, client_weights, nets, optim, train
from fedstat.fl.algorithm import Algorithm, Phase, SharedMask
from fedstat.fl.wrappers.composed import Part

OPTIONS = {"batch_size": 5, "local_epochs": 2, "seed": 4, "participation": 0.5, "optimizer": optim.sgd(0.1)}


def additive(part=low_rank, personal=(".a", ".b")):
    """Personal factors for two epochs, then the shared ones."""
    own = lambda name: name.endswith(personal)  # noqa: E731
    return Algorithm(
        "additive",
        lambda start: SharedMask({name: torch.tensor(not own(name)) for name in start.net.shapes}),
        phases=(Phase(is_trainable=own), Phase(is_trainable=lambda name: not own(name))),
        wrap=partial(everywhere, part),
    )


def go(method=None, rounds=3, probe=("trained-weights", "parameters"), **options):
    return train(
        dataset(SAMPLES), nets.mlp(SIZES), method or additive(), rounds=rounds, probe=probe, **OPTIONS | options
    )


@pytest.fixture(scope="module")
def run():
    return go(checkpoints=[2])


def test_factors_are_those_of_the_engine(run):
    j = job(additive(), **OPTIONS)
    state = trainer.start(j)
    for number in (1, 2, 3):
        state, done = trainer.run(j, state)
        if number == 1:
            continue
        here = run["parameters/fc1"].sel(checkpoint=number)
        for name, p in done.trained.params.items():
            if name.startswith("fc1"):
                kept = here[{"weight": "w"}.get(name[4:], name[4:])].sel(stage="trained")
                np.testing.assert_allclose(kept[done.cohort.local], p, rtol=1e-6, atol=1e-7)
                assert np.isnan(np.delete(kept.to_numpy(), done.cohort.local, axis=0)).all()
        mine = trainer.models(j, state)["fc1.b"]
        np.testing.assert_allclose(here["b"].sel(stage="aggregated"), mine, rtol=1e-6, atol=1e-7)


def test_clients_are_written_a_chunk_at_a_time(run, monkeypatch):
    written, write = [], store.Writer.write
    monkeypatch.setattr(store.Writer, "write", lambda self, *given: written.append(given[:2]) or write(self, *given))
    monkeypatch.setattr(checkpoints, "_clients_at_once", lambda _: 4)
    same(run, go(checkpoints=[2]))
    kept = [(name, str(where)) for name, where in written if name.startswith(("weights/", "trained/", "parameters/"))]
    assert len(kept) == len({*kept})
    assert len([name for name, _ in kept if name == "weights/fc1/w"]) == 2 * 2  # checkpoints and chunks
    chunks = {int(c) // 4 for c in client_weights(run, "fc1", stage="trained", checkpoint=2)["client"]}
    chunks_last = {int(c) // 4 for c in client_weights(run, "fc1", stage="trained")["client"]}
    assert len([name for name, _ in kept if name == "trained/fc1/w"]) == len(chunks) + len(chunks_last)


def test_what_clients_trained_is_the_shared_factor_before_its_mean(run):
    sigma = client_weights(run, "fc1", "weight", stage="trained")
    after = client_weights(run, "fc1", "weight")
    assert (sigma.dims, sigma.sizes["client"], after.sizes["client"]) == (("client", "unit", "weight"), 3, 6)
    sizes = np.array(SAMPLES)[sigma["client"].to_numpy()]
    mean = np.tensordot(sizes / sizes.sum(), sigma.to_numpy(), 1)
    np.testing.assert_allclose(after.to_numpy(), np.broadcast_to(mean, after.shape), atol=1e-6)
    assert sigma.std("client").mean() > 1e-3
    # what clients predicted with, before aggregation and after it, is composed of the factors of that stage
    for stage, group in (("trained", "trained"), ("aggregated", "weights")):
        w, b, a = (client_weights(run, "fc1", name, stage=stage).to_numpy() for name in ("weight", "b", "a"))
        whole = client_weights(run, "fc1", stage=stage).to_numpy()
        np.testing.assert_allclose(whole, w + b @ a, atol=1e-6)
        assert group in run.children
    early = client_weights(run, "fc1", "b", checkpoint=2)
    assert not np.array_equal(early, client_weights(run, "fc1", "b"))


def test_the_factor_analysis_takes_weights_and_factors_as_they_come(run):
    sigma = client_weights(run, "fc1", "weight", stage="trained")
    found = fedstat.fa(fedstat.layer_matrix(sigma), n_factors=1, max_iter=1000)
    by_hand = fedstat.fa(np.concatenate([w.T for w in sigma.to_numpy()]), n_factors=1, max_iter=1000)
    np.testing.assert_allclose(found.communality, by_hand.communality, atol=1e-9)
    assert fedstat.split(client_weights(run, "fc1"), n_factors=1, max_iter=1000).shared.shape == (10,)
    both = go(additive(outer, (".v", ".mu")), rounds=1, probe="parameters")
    u = client_weights(both, "fc1", "u", stage="trained")
    assert u.dims == ("client", "unit")
    assert fedstat.fa(u, n_factors=1, method="pc").communality.shape == (10,)
    np.testing.assert_array_equal(fedstat.layer_matrix(u).to_numpy(), u.to_numpy())


def test_a_killed_run_goes_on_and_a_longer_one_is_whole(run, tmp_path):
    out = tmp_path / "run.zarr"
    same(run, interrupted_and_resumed(partial(go, checkpoints=[2]), out, after=2))
    longer = go(rounds=4, checkpoints=[2], out=out, resume=True)
    same(go(rounds=4, checkpoints=[2]), longer)
    assert longer["parameters/fc1"].coords["checkpoint"].values.tolist() == [2, 4]
    assert longer["parameters/fc1"].coords["stage"].values.tolist() == ["trained", "aggregated"]


def test_plain_networks_have_their_weights_and_no_group_more():
    plain = go(algorithms.fedavg(), rounds=1, probe="parameters")
    assert "parameters" not in plain.children
    np.testing.assert_array_equal(client_weights(plain, "fc2", "bias"), plain["weights/fc2/b"][-1])
    assert client_weights(plain, "fc1", stage="trained").sizes["client"] == 3
    bare = plain.drop_nodes("trained")
    with pytest.raises(ValueError, match=r"holds no weights of 'fc1' before aggregation"):
        client_weights(bare, "fc1", stage="trained")


def test_factors_are_kept_of_the_layers_and_by_the_probe_that_are_asked_for():
    few = go(keep_weights=["fc2"], rounds=1, probe="parameters")
    assert list(few["parameters"].children) == ["fc2"]
    bare = go(rounds=1, probe="trained-weights")
    assert "parameters" not in bare.children
    with pytest.raises(ValueError, match=r"parameters bias, weight, but got 'a'\. Factors .* probe='parameters'"):
        client_weights(bare, "fc1", "a")


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("fc9",), {}, "layer must be one of 'fc1', 'fc2', but got 'fc9'"),
        (("fc1", "u"), {}, "has the parameters a, b, bias, weight, but got 'u'"),
        (("fc1",), {"stage": "sent"}, "stage must be one of 'trained', 'aggregated', but got 'sent'"),
        (("fc1",), {"checkpoint": 1}, "checkpoint must be one of 2, 3, but got 1"),
    ],
)
def test_what_is_not_in_the_store_is_named(run, arguments, options, says):
    with pytest.raises(ValueError, match=says):
        client_weights(run, *arguments, **options)


def test_factors_with_the_name_of_a_dim_are_refused():
    def clash(shape):
        return Part({"client": shape}, lambda _, w: {"client": w}, lambda f: f["client"])

    with pytest.raises(ValueError, match=r"the factor 'fc1.client' cannot be stored as 'client'"):
        go(additive(clash, ("x",)), probe="parameters")
