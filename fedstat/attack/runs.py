"""A finished run made again from its settings, to have its state at any round."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstat import _cli, store
from fedstat._later import xr
from fedstat.fl import batches
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import ComputeConfig, Job, TrainConfig
from fedstat.fl.loop import observed_round
from fedstat.fl.prepare import optimizer_named, prepare
from fedstat.fl.start import start
from fedstat.fl.state import State
from fedstat.fl.training import COMMAND
from fedstat.study import experiment
from fedstat.study.experiment import Settings
from fedstat.study.federation import source_of
from fedstat.study.networks import TEXTS, network

_SAME = 1e-3  # largest relative difference of a loss by rounding


class Stored(NamedTuple):
    """A finished run: its name, store and settings."""

    name: str
    tree: xr.DataTree
    settings: Settings


def read(path: str | Path) -> Stored:
    """A finished run of ``python -m fedstat.fl`` on images.

    Raises
    ------
    ValueError
        If it is no such run, not finished, or trained on texts or data of its own.
    """
    path = Path(path)
    tree = _cli.open_store(path, COMMAND)
    noted = experiment.settings_of(path)
    if "data" not in noted:
        raise ValueError(
            f"{path} does not say on which data it was trained: only runs of python -m fedstat.fl, or "
            "fedstat.study.run, can be attacked from their store. For others use fedstat.attack.leakage_of."
        )
    if source_of(noted["data"])[0] in TEXTS:
        raise ValueError(f"{path} was trained on {noted['data']}: texts are token numbers, which have no gradient")
    if "ended" not in tree.attrs:
        raise ValueError(f"{path} is not finished: continue it with python -m fedstat.fl --out {path} --resume")
    with store.reading(path):
        return Stored(noted["algorithm"], tree, Settings(**noted))


def job_of(run: Stored, data_dir: str | Path | None, machine: ComputeConfig) -> tuple[Job, xr.Dataset]:
    """The run's job and clients' data, made again.

    Raises
    ------
    ValueError
        If the data are not those of the run.
    """
    s = run.settings
    fed, new = experiment.federated(s, data_dir)
    training = TrainConfig(
        optimizer=optimizer_named(s.optimizer, s.lr),
        participation=s.participation,
        sampling=s.sampling,
        local_epochs=s.local_epochs,
        batch_size=s.batch_size or None,
        server_lr=s.server_lr,
        aggregator=s.make_aggregator(),
        seed=s.seed,
    )
    job = prepare(fed, network(s, fed), s.make_algorithm(), training, machine)
    unseen = [] if new is None else [batches.rows_of(new, part, job.device) for part in ("train", "test")]
    if batches.digest(*job.subsets.values(), *unseen) != json.loads(run.tree.attrs["config"])["data_digest"]:
        raise ValueError(
            f"the data of {run.name} are not those of the run: other files, or dealt by other code. Train it again."
        )
    return job, fed


def states(run: Stored, job: Job, rounds: Sequence[int]) -> Iterator[tuple[int, State]]:
    """The run's states after some rounds, 0 being the start: trained again, as runs repeat to the bit.

    Warns
    -----
    UserWarning
        If clients' losses are not those stored, as after training by another version or on another device.
    """
    state = start(job)
    for number in sorted(rounds):
        while state.round < number:
            state, _ = observed_round(job, state, ())
        if number:
            kept = run.tree["metrics/loss"].sel(round=number).to_numpy()
            again = evaluate(job, state)["loss"] if np.isfinite(kept).any() else kept
            if not np.allclose(again, kept, rtol=_SAME, equal_nan=True):
                warnings.warn(
                    f"{run.name} trained again has other losses after round {number} than its store: the code or the "
                    "device differs. The attack is on the run as it is made now.",
                    stacklevel=2,
                )
        yield number, state
