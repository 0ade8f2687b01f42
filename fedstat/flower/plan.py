"""Plan of a run with Flower, and the records that clients and server exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fedstat import store
from fedstat._utils import check
from fedstat.fl.aggregate import weighted_mean
from fedstat.fl.algorithm import Algorithm, Mask
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import checked, fewest
from fedstat.fl.job import ComputeConfig, Job, TrainConfig
from fedstat.fl.nets import Net, Params
from fedstat.fl.prepare import assembled, prepare
from fedstat.stats.moments import Moments

Arrays = dict[str, np.ndarray]
PARTS = ("n", "total", "square")
"""Raw sums of a layer: number of rows, sum of the rows, and upper triangle of their products."""


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Convert arrays or tensors to a record of Flower."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def arrays_in(content: RecordDict, name: str) -> Arrays:
    """Return the arrays of one record of a message, in their order."""
    return {key: array.numpy() for key, array in content.array_records[name].items()}


def tensors_in(content: RecordDict, name: str) -> Params:
    """Copy the arrays of one record of a message into tensors."""
    return {key: torch.from_numpy(array.copy()) for key, array in arrays_in(content, name).items()}


def pack(params: Mapping[str, Tensor], mask: Mask) -> Params:
    """Return the entries inside a mask as one vector per parameter; skip parameters without such entries."""
    return {name: p[mask[name].expand(p.shape)] for name, p in params.items() if bool(mask[name].any())}


def unpack(vectors: Mapping[str, Tensor], mask: Mask, like: Mapping[str, Tensor]) -> Params:
    """Return parameters with the vectors' entries inside the mask, and zeros outside."""
    params = {}
    for name, vector in vectors.items():
        params[name] = torch.zeros_like(like[name])
        params[name][mask[name].expand(params[name].shape)] = vector.to(params[name].dtype)
    return params


def raw_sums(moments: Mapping[str, Moments]) -> Arrays:
    """Convert moments to sums that add up over clients: float64 "layer/n", "layer/total" and "layer/square".

    The products of units i <= j are a vector, row by row, so that a layer takes (units² + 3 units)/2 + 1 numbers.

    Examples
    --------
    >>> from fedstat.stats.moments import moments
    >>> z = np.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]])
    >>> a, b = (raw_sums({"fc1": moments(part)}) for part in (z[:1], z[1:]))
    >>> {name: (a[name] + b[name]).tolist() for name in a}
    {'fc1/n': [3.0], 'fc1/total': [8.0, 11.0], 'fc1/square': [26.0, 33.0, 45.0]}
    >>> total = moments_of({name: a[name] + b[name] for name in a})["fc1"]
    >>> np.allclose(total.cross, moments(z).cross)
    True
    """
    sums: Arrays = {}
    for layer, m in moments.items():
        n, mean, cross = (np.asarray(torch.as_tensor(part).cpu(), np.float64) for part in m)
        square = cross + n * np.outer(mean, mean)
        sums |= {f"{layer}/n": n.reshape(1), f"{layer}/total": n * mean}
        sums[f"{layer}/square"] = square[np.triu_indices(len(mean))]
    return sums


def moments_of(sums: Mapping[str, np.ndarray]) -> dict[str, Moments]:
    """Return the moments of every layer from sums over clients (:func:`raw_sums`), with n rounded to an integer."""
    moments = {}
    for layer in dict.fromkeys(name.rpartition("/")[0] for name in sums):
        n, total, upper = (sums[f"{layer}/{part}"] for part in PARTS)
        rows, mean = np.rint(n[0]), total / np.rint(n[0])
        square = np.zeros((len(mean), len(mean)))
        square[np.triu_indices(len(mean))] = upper
        square += np.triu(square, 1).T
        moments[layer] = Moments(np.asarray(rows), mean, square - rows * np.outer(mean, mean))
    return moments


_LEAST_CLIENTS = 3  # whose sum hides each of them
_SINGLE = {
    "mixing_weights": "averages the entries with weights for each client",
    "encode": "encodes the models of all selected clients together",
    "init_state": "has a method state",
    "update_state": "has a method state",
    "on_download": "combines client models before training",
    "choice": "selects by the held-out samples of all clients",
}
"""Hooks that need single clients, and what they do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a run on separate clients, which they compare with the server's before round 1.

    Parameters
    ----------
    net : Net
    algorithm : Algorithm
        Algorithm whose server needs only sums over clients: masks, phases and penalties of any kind, FedFac, and
        fine-tuning. ``estimator="icc"`` is excluded, because its sums contain the weights of single clients.
    training : TrainConfig
        Settings of training, such as optimizer, participation, batch size and seed.
    clients : int
        Number of clients.
    secure : bool
        If True, the server sees only sums over clients (SecAgg+), and clients answer no other request to train.
    headroom : float
        Largest ratio of a weight to the global model's largest weight, if ``secure``; see :mod:`fedstat.flower.secure`.

    Raises
    ------
    ValueError
        If a setting is out of range, or the algorithm needs single clients.
    """

    net: Net
    algorithm: Algorithm
    training: TrainConfig
    clients: int
    secure: bool = False
    headroom: float = 4.0

    def __post_init__(self) -> None:
        check.integer("clients", self.clients)
        least = fewest(checked(self.training.participation), self.clients)
        if self.secure and least < _LEAST_CLIENTS:
            raise ValueError(
                f"secure=True needs at least {_LEAST_CLIENTS} selected clients in every round, but a round may select "
                f"{least} of {self.clients}. Raise participation or clients."
            )
        check.real("headroom", self.headroom, low=1)
        method = f"method {self.algorithm.name!r}"
        for name, reason in _SINGLE.items():
            if getattr(self.algorithm, name):
                raise ValueError(
                    f"{method} cannot run on separate clients: it {reason}, but the server sees only sums over "
                    "clients. Use fedstat.fl.train, or FedFac, or a method of masks, penalties and phases."
                )
        if self.algorithm.settings.get("estimator") == "icc":
            raise ValueError(
                f"{method} with estimator='icc' cannot run on separate clients: its sums contain the weights of single "
                "clients. Use an estimator of communality, such as 'pa', whose sums are moments of units."
            )
        if self.training.sampling != "fixed":
            raise ValueError(
                f"sampling must be 'fixed' on separate clients, but is {self.training.sampling!r}, which may select no "
                "client or one, whose values no sum would hide."
            )
        if self.training.aggregator.name != weighted_mean().name:
            raise ValueError(
                f"aggregator must be weighted_mean() on separate clients, but is {self.training.aggregator.name}."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all clients, as plain values."""
        settings = {
            "algorithm": self.algorithm.name,
            **{f"algorithm.{name}": value for name, value in self.algorithm.settings.items()},
            "shapes": {name: list(shape) for name, shape in self.net.shapes.items()},
            "clients": self.clients,
            "secure": self.secure,
            **vars(self.training),
            "optimizer": self.training.optimizer.name,
            "aggregator": self.training.aggregator.name,
        }
        return dict(json.loads(store.to_json(settings)))

    def require_same(self, other: Mapping[str, Any]) -> None:
        """Raise ValueError with the names of settings that differ from the server's."""
        settings = self.settings
        if differs := [name for name in {**settings, **other} if settings.get(name) != other.get(name)]:
            name = differs[0]
            raise ValueError(
                f"the client's settings differ from the server's in {', '.join(differs)}: {name} is "
                f"{settings.get(name)!r} on the client, {other.get(name)!r} on the server. Use one plan for all."
            )

    def of_client(self, data: xr.Dataset, number: int) -> Job:
        """Return the job of one client, with the random streams of client ``number`` in a run of all clients.

        Raises
        ------
        ValueError
            If the plan has no client of this number, or the data are not of one client or do not fit the network.
        """
        check.integer("the number of a client", number, low=0, high=self.clients - 1)
        training = replace(self.training, participation=1.0)
        job = prepare(data, self.net, self.algorithm, training, ComputeConfig(threads=1))
        if job.clients != 1:
            raise ValueError(f"data must be of one client, but are of {job.clients}. Pass only the client's samples.")
        train = job.train._replace(numbers=np.array([number]))
        rate = self.training.participation
        return replace(job, train=train, client_labels=None, everyone=self.clients, participation=rate)

    def of_server(self, sizes: np.ndarray, *, own_labels: bool) -> Job:
        """Return the job of all clients for the server, with numbers of training samples, but no samples."""
        start = np.concatenate([[0], np.cumsum(sizes)])
        no_samples = Rows(torch.empty(0), torch.empty(0, dtype=torch.int64), start)
        return assembled((no_samples, no_samples, None), self.net, self.algorithm, self.training, own_labels=own_labels)
