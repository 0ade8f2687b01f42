"""Who takes part, which numbers networks draw, and what a method measures: as a plain per-client loop has them."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import SAMPLES, SIZES, dataset, job
from fl_runs import command
from plain_seams import LR
from toy_methods import HALF, MEASURES, soft, toy

from fedstat._utils import streams
from fedstat.fl import algorithms, batches, nets, optim, train
from fedstat.fl.algorithm import Phase
from fedstat.fl.cohort import fewest, of_all
from fedstat.fl.local_training import train_locally
from fedstat.fl.probes import measures
from fedstat.fl.state import Download

# --- who takes part, and which numbers are drawn


def test_a_share_of_clients_that_is_drawn_in_every_round():
    j = job(toy(), participation=(0.3, 0.9))
    numbers = [len(trainer.active(j, number)) for number in range(60)]
    shares = [streams.generator(j.seed, "participation", number).uniform(0.3, 0.9) for number in range(60)]
    assert numbers == [round(share * j.clients) for share in shares]
    assert set(numbers) == {2, 3, 4, 5}
    assert fewest((0.3, 0.9), 6) == 2


def test_a_number_of_clients_far_from_the_rate_is_said_once(tmp_path, capsys):
    says = "participation=0.2 selects 1 of 3 clients per round (0.33 instead of 0.2). Set such a rate, or"
    with pytest.warns(UserWarning, match=re.escape(says)) as told:
        done = train(dataset([6, 6, 6]), nets.mlp(SIZES), toy(), rounds=2, participation=0.2)
    assert len(told) == 1
    assert np.isfinite(done["metrics/train_loss"]).sum("client").values.tolist() == [1, 1]
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'clients = 3\nparticipation = 0.2\nmax_samples = 20\nrounds = 1\nseeds = [0, 1]\nalgorithm = "fedavg"\n'
    )
    assert command("--config", grid, "--out", tmp_path / "runs") == 0
    assert capsys.readouterr().err.count(says) == 1
    with pytest.raises(ValueError, match=r"participation=0.1 selects none of 3 clients"):
        train(dataset([6, 6, 6]), nets.mlp(SIZES), toy(), rounds=1, participation=0.1)


@pytest.mark.parametrize(("participation", "clients", "says"), [
    (0.1, 20, ""), (0.1, 90, ""), (0.25, 18, ""), (0.5, 5, ""), (1.0, 3, ""), ((0.3, 0.9), 6, ""),
    (0.1, 8, "selects 1 of 8 clients per round (0.12 instead of 0.1)"),
    (0.5, 3, "selects 2 of 3 clients per round (0.67 instead of 0.5)"),
    ((0.2, 0.5), 3, "selects 1 of 3 clients per round (0.33 instead of 0.2) and 2 of 3 clients per round (0.67"),
    ((0.5, 0.9), 3, "selects 2 of 3 clients per round (0.67 instead of 0.5)."),
])  # fmt: skip
def test_ends_of_a_rate_that_are_far_from_the_numbers_of_clients(participation, clients, says):
    with pytest.warns(UserWarning, match=re.escape(says)) if says else nullcontext():
        train(dataset([4] * clients), nets.mlp(SIZES), toy(), rounds=1, participation=participation)
    train(dataset([4] * clients), nets.mlp(SIZES), toy(), rounds=1, participation=participation, sampling="poisson")


def test_a_part_of_the_clients_draws_the_numbers_of_the_whole():
    j, some = job(algorithms.local(), participation=0.7, local_epochs=2), np.array([1, 3, 4])
    part = replace(j, train=batches.part(j.train, some), test=batches.part(j.test, some), everyone=j.clients)
    for number in range(4):
        whole = trainer.active(j, number)
        assert some[trainer.active(part, number)].tolist() == np.intersect1d(whole, some).tolist()
    everyone, few = (
        train_locally(one, Download(one, trainer.start(one)), of_all(one).local, one.phases).params for one in (j, part)
    )
    order = np.argsort(-j.train.sizes, kind="stable")
    at = [int(np.flatnonzero(order == c)[0]) for c in some[np.argsort(-part.train.sizes, kind="stable")]]
    for name, p in few.items():
        torch.testing.assert_close(p, everyone[name][at], atol=1e-6, rtol=1e-6)


# --- what is measured


def test_what_a_method_measures_and_its_mixing_matrix_are_in_the_store():
    kept = []

    def mixing_weights(up):
        kept.append((up.clients, torch.softmax(torch.arange(len(up.clients)) - up.weights[:, None], 1)))
        return kept[-1][1]

    done = train(
        dataset(SAMPLES),
        nets.mlp(SIZES),
        toy(mixing_weights=mixing_weights, measures=MEASURES),
        rounds=3,
        participation=0.5,
        probe="drift",
    )
    for number, (clients, matrix) in enumerate(kept):
        weight = done["mixing/weight"].isel(round=number).to_numpy()
        np.testing.assert_array_equal(weight[np.ix_(clients, clients)], matrix)
        assert np.isnan(weight).sum() == 36 - len(clients) ** 2
        far = done["measures/far"].isel(round=number)
        assert far.dims == ("client", "other")
        assert int(np.isfinite(done["measures/norm"].isel(round=number)).sum()) == len(clients)


def test_drift_and_weights_before_aggregation_are_those_of_the_round():
    done = train(
        dataset(SAMPLES), nets.mlp(SIZES), toy(), rounds=2, participation=0.5, probe=("drift", "trained-weights"),
        seed=4, optimizer=optim.sgd(LR), batch_size=5,
    )  # fmt: skip
    before = done["trained/fc2/w"].isel(checkpoint=-1).to_numpy()
    clients = np.flatnonzero(np.isfinite(before).all((1, 2)))
    assert 0 < len(clients) < 6
    sizes = np.array(SAMPLES)[clients]
    after = done["weights/fc2/w"].isel(checkpoint=-1).to_numpy()
    np.testing.assert_allclose(after[0], np.tensordot(sizes / sizes.sum(), before[clients], 1), atol=1e-6)
    bias = done["trained/fc2/b"].isel(checkpoint=-1).to_numpy()[clients]
    centre = done["weights/fc2/b"].isel(checkpoint=-1).to_numpy()[0]
    by_hand = np.sqrt(((before[clients] - after[0]) ** 2).sum((1, 2)) + ((bias - centre) ** 2).sum(1))
    drift = done["drift/distance"].isel(round=-1).sel(layer="fc2").to_numpy()
    np.testing.assert_allclose(drift[clients], by_hand, rtol=1e-5)
    assert np.isnan(np.delete(drift, clients)).all()


def test_bytes_of_sparse_parameters_are_counted_from_their_values():
    method = toy(phases=(Phase(post_step=soft(2.0)),), sparse=lambda name: name == "fc1.weight")
    j = job(method, track=True, **HALF)
    before = trainer.start(j)
    state, done = trainer.run(j, before)
    k, rest = len(done.cohort.local), 10 + 33  # entries that are not sparse
    up, down = measures.of_round(j, done)
    sent, received = (
        int((p != 0).sum()) for p in (done.trained.params["fc1.weight"], state.global_params["fc1.weight"])
    )
    assert 0 < sent < k * 60
    assert (up, down) == (4 * (sent + k * rest) + k * 8, k * (4 * (received + rest) + 8))
