"""Samples that clients train on bring their own order: halves, choices and probes equal a loop over single clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plain_halves
import pytest
import torch
import trainer
from algorithm_jobs import job, make, rows, run, seldom
from measured_runs import TIES, measured_alone, measured_run, prediction_rules
from small_runs import near

from fedstat.fl import evaluate, nets, optim, split_halves
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import of_all
from fedstat.fl.local_training import train_chunk
from fedstat.fl.probes import measures
from fedstat.fl.state import Download

HALVED = [7, 8, 11, 12, 2]
"""Samples of clients whose halves are ordered otherwise than the whole in batches of three, but for the last."""
CHUNKS = (None, 2)  # all clients; pairs and one alone


def clients_of(sizes, name, **options):
    validation = rows([3 + n % 5 for n in sizes], 2)
    return job(make(name), sizes=sizes, validation=validation, batch_size=3, **options)


@pytest.mark.parametrize("name", seldom(ALGORITHMS))
def test_halves_equal_a_loop_over_clients(name):
    j = clients_of(HALVED, name)
    state = run(j, 1)
    every = of_all(j)
    plain = plain_halves.components(j, state, np.arange(j.clients), j.phases)
    for chunk in CHUNKS:
        found = split_halves.parts(trainer.in_chunks(j, chunk), Download(j, state), every, j.phases)
        assert j.algorithm.mixing_weights or j.algorithm.on_download or set(found) == set(plain)
        for layer, part in found.items():
            for mine, theirs in zip((part.between, part.within), plain[layer], strict=True):
                np.testing.assert_allclose(mine[:, 0], theirs, rtol=2e-3, atol=1e-7, err_msg=f"{layer}, {chunk}")


def test_halves_compare_trained_parameters_and_no_running_statistics():
    net = nets.lenet((1, 16, 16), 3, norm="batch", width=0.5)
    images = torch.randn(24, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    j = job(make("fedavg"), net=net, data=Rows(images, torch.arange(24) % 3, np.arange(0, 25, 6)), sizes=[6] * 4)
    models, _ = split_halves.trained(j, Download(j, trainer.start(j)), of_all(j), j.phases)
    assert not any("running" in name for name in models)
    by_layer = dict.fromkeys(nets.layers(net), 0)
    for name, p in models.items():
        by_layer[nets.layer_of(name)] += p[0, 0].numel()
    assert split_halves.n_weights(net) == list(by_layer.values())
    assert by_layer["conv1"] == 3 * 25 + 2 * 3  # kernels; scale and shift


CHOOSERS = ["early", "early, halves", "early, client", "shrunken", "shrunken, halves", "shrunken, client"]
CHOOSES = [name for name in ALGORITHMS if prediction_rules(name)]


@pytest.mark.parametrize("name", seldom(CHOOSES))
def test_choices_equal_a_loop_over_clients(name):
    """Two choices of every method, which differ from those of its neighbors in the table."""
    j = clients_of(HALVED, name)
    state, first = run(j, 1), CHOOSES.index(name)
    for way in (CHOOSERS[first % 6], CHOOSERS[(first + 3) % 6]):
        chooses = replace(j, algorithm=prediction_rules(name)[way](j.algorithm))
        (accuracy, loss), best = plain_halves.choose(chooses, state)
        ways = len(chooses.algorithm.choice.steps)
        for chunk in CHUNKS:
            found = evaluate.evaluate(trainer.in_chunks(chooses, chunk), state)
            np.testing.assert_allclose(found["loss"], loss, rtol=2e-3, atol=1e-5)
            np.testing.assert_allclose(found["accuracy"], accuracy, atol=1e-6)
            if "choice/step" in found:
                chosen = np.asarray(chooses.algorithm.choice.steps)[best % ways]
                np.testing.assert_array_equal(np.broadcast_to(found["choice/step"], j.clients), chosen)


# One of every kind of server, of download, and of state of clients.
OFTEN = ("fedper", "ditto", "fedfac-dynamic", "fedem", "fedcp", "fedphp", "fedamp", "clustered-fl")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS])
def test_runs_that_measure_everything_do_not_depend_on_chunks(name):
    near(measured_run(name, TIES, batch_size=3, client_chunk=5), measured_alone(name))


@pytest.mark.parametrize("name", ["ditto", "fedfac-dynamic"])
def test_nor_on_where_clients_rows_lie(name, tmp_path):
    on_disk = measured_run(name, TIES, batch_size=3, memory_budget="2GiB", out=tmp_path / "run.zarr")
    near(on_disk, measured_alone(name))


@pytest.mark.parametrize("name", seldom(ALGORITHMS))
def test_a_chunk_trains_clients_in_any_order(name):
    """Adam's state, a client's memory and losses come back in the caller's order."""
    j = clients_of(TIES, name, optimizer=optim.adam(0.01), track=True)
    state = run(j, 1)

    def trained(clients):
        params = trainer.models(j, state, clients)
        moments = j.optimizer.init(params)
        memory = Download(j, state).algorithm_state(clients)
        loss = train_chunk(j, params, clients, j.phases, key=("batches", 1), optimizer=moments, state=memory)
        return params | {f"moment of {n}": p for n, p in moments.items()} | {"loss": loss}

    clients = np.array([3, 0, 5, 4, 1, 2])
    ascending, found = trained(np.arange(6)), trained(clients)
    for key, p in ascending.items():
        torch.testing.assert_close(found[key], p[clients], atol=1e-5, rtol=1e-4)


def test_the_probe_of_halves_measures_clients_of_two_samples_and_leaves_out_those_of_one():
    j = job(make("fedavg"), sizes=[2, 9, 8, 7, 1])
    values = measures.halves_probe(j, 1).on_round_start(j, trainer.start(j), of_all(j))
    for name in ("between", "within"):
        assert np.isfinite(values[f"probe/{name}"]).all(axis=1).tolist() == [True] * 4 + [False]


def test_two_samples_of_a_client_suffice_for_halves():
    split_halves.require_halves(job(make("fedavg"), sizes=[2, 2, 3]), "a test", 3)
    with pytest.raises(ValueError, match="1 of the 3 clients have only one training sample"):
        split_halves.require_halves(job(make("fedavg"), sizes=[1, 2, 3]), "a test", 3)
