"""Last common values that runs store, against a record of what clients downloaded in every round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithm_jobs import SAMPLES, dataset, make, net_of

from fedstat.fl import checkpoints, communication_round, masks, nets, train
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.fl.wrappers.pair import counterpart, is_personal

ROUNDS = 7
NOTHING_IN_COMMON = {"clustered-fl", "fedamp", "fedcac", "fedfomo", "factorized-fl-alpha", "factorized-fl-beta"}


class Record:
    """Last common values (client, ...) by name, kept by looking at every download and at nothing else."""

    def __init__(self):
        self.values, self.downloaded, self.trained, self.job = {}, {}, {}, None

    def watch(self, monkeypatch):
        train_locally = communication_round.train_locally

        def spy(job, download, clients, phases):
            models = download.models(clients)
            before = {name: p.clone() for name, p in models.items()}
            trained = train_locally(job, download, clients, phases)
            self.look(job, download.state, clients, before)
            self.trained = {"clients": clients, "params": {n: p.clone() for n, p in trained.params.items()}}
            return trained

        monkeypatch.setattr(communication_round, "train_locally", spy)

    def look(self, job, state, clients, models):
        self.job = job
        if not self.values:
            self.values = {
                n: p.repeat(job.clients, *[1] * (p.ndim - 1)) for n, p in checkpoints.initial_params(job).items()
            }
        for name, p in models.items():
            if job.algorithm.name in NOTHING_IN_COMMON:
                continue
            start, shared = p, masks.of_clients(state.mask.shared[name], p.ndim - 1, clients)
            if job.algorithm.name == "pfedme" and is_personal(name):  # θ starts from w
                start, shared = models[counterpart(name)], torch.tensor(True)
            self.values[name][clients] = torch.where(shared, start, self.values[name][clients])
            self.downloaded[name] = shared.expand(p.shape).all(0)


def by_layer(net, params, layers):
    whole = nets.whole(net, params)
    return {n: (p.flatten(2) if p.ndim > 2 else p).numpy() for n, p in whole.items() if nets.layer_of(n) in layers}


@pytest.mark.parametrize("participation", [0.34, 1.0])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_last_common_values_are_what_clients_last_downloaded_alike(name, participation, monkeypatch):
    record = Record()
    record.watch(monkeypatch)
    run = train(
        dataset(SAMPLES, method=name), net_of(name), make(name), rounds=ROUNDS, participation=participation,
        local_epochs=1, batch_size=5, lr=0.3, seed=4, progress=False,
    )  # fmt: skip
    job, clients = record.job, np.sort(record.trained["clients"])
    order = np.argsort(record.trained["clients"])
    layers = list(run["trained"].children)
    assert layers == list(nets.layers(job.net))
    common = by_layer(job.net, {n: p[clients] for n, p in record.values.items()}, layers)
    trained = by_layer(job.net, {n: p[order] for n, p in record.trained["params"].items()}, layers)
    initial = by_layer(job.net, checkpoints.initial_params(job), layers)
    for name_, values in common.items():
        layer, of = nets.layer_of(name_), checkpoints.variable(name_)
        stored = run[f"common/{layer}"].to_dataset()
        at = stored[of].isel(checkpoint=0)
        at = at.sel(client=clients).values if "client" in at.dims else np.broadcast_to(at.values, values.shape)
        np.testing.assert_array_equal(at, values, err_msg=name_)
        np.testing.assert_array_equal(
            run[f"trained/{layer}"][of].isel(checkpoint=0).sel(client=clients), trained[name_]
        )
        np.testing.assert_array_equal(stored[f"initial_{of}"], initial[name_][0])
        if of == "w" and job.net.whole is None:
            alike = record.downloaded.get(name_, torch.zeros(stored.sizes["unit"], 1, dtype=torch.bool))
            np.testing.assert_array_equal(stored["downloaded"].isel(checkpoint=0), alike.reshape(len(alike), -1).all(1))
    others = np.setdiff1d(np.arange(len(SAMPLES)), clients)
    for layer in layers:
        assert all(np.isnan(values.sel(client=others)).all() for values in run[f"trained/{layer}"].data_vars.values())
