"""Small runs on the digits: by name, by command, and one round at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
import trainer

from fedstat.fl import __main__ as cli
from fedstat.fl import batches, losses, nets, optim
from fedstat.fl.job import Job
from fedstat.study import experiment
from fedstat.study.run_settings import Settings

SMALL = Settings(
    clients=8, participation=0.5, rounds=3, max_samples=40, local_epochs=1, batch_size=10, optimizer="adam", lr=1e-3
)


def job(algorithm, samples=40, **options):
    fed, new = experiment.federated(replace(SMALL, unseen_fraction=0.25, partition="iid", max_samples=samples))
    settings = {"participation": 1.0, "local_epochs": 2, "batch_size": 10, "optimizer": optim.adam(0.01)} | options
    rows = {name: rows_of(fed, name) for name in ("train", "test")}
    made = Job(
        **rows,
        net=nets.mlp([64, 12, 10]),
        algorithm=algorithm,
        loss=losses.cross_entropy,
        **trainer.settings(**settings),
    )
    return made, tuple(rows_of(new, name) for name in ("train", "test"))


def rows_of(fed, split):
    return batches.rows_of(fed, split, torch.device("cpu"))


def logits(params, c, x):
    h = torch.relu(x.flatten(1) @ params["fc1.weight"][c].T + params["fc1.bias"][c])
    return h @ params["fc2.weight"][c].T + params["fc2.bias"][c]


def command(*args):
    return cli.main([*map(str, args), "--quiet"])
