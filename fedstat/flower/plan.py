"""Plan of a training with Flower, and records that parties and server exchange."""

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
"""Parts of a layer's moments: rows, their sum, and the upper triangle of their products."""


def record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Arrays or tensors as Flower sends them."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def arrays_in(content: RecordDict, name: str) -> Arrays:
    """Arrays of one record of a message, in their order."""
    return {key: array.numpy() for key, array in content.array_records[name].items()}


def tensors_in(content: RecordDict, name: str) -> Params:
    """The same as tensors of their own."""
    return {key: torch.from_numpy(array.copy()) for key, array in arrays_in(content, name).items()}


def packed(params: Mapping[str, Tensor], mask: Mask) -> Params:
    """Entries that a mask picks, as one vector a parameter; parameters without any are left out."""
    return {name: p[mask[name].expand(p.shape)] for name, p in params.items() if bool(mask[name].any())}


def unpacked(vectors: Mapping[str, Tensor], mask: Mask, like: Mapping[str, Tensor]) -> Params:
    """Parameters that have the vectors' entries where the mask picks them, and zeros elsewhere."""
    found = {}
    for name, vector in vectors.items():
        found[name] = torch.zeros_like(like[name])
        found[name][mask[name].expand(found[name].shape)] = vector.to(found[name].dtype)
    return found


def raw_sums(moments: Mapping[str, Moments]) -> Arrays:
    """Sums that add up over clients, without means: float64 arrays "layer/n", "layer/total" and "layer/square".

    The products of units i <= j are a vector, row by row, so that a layer takes (units² + 3 units)/2 + 1 numbers.

    Examples
    --------
    >>> from fedstat.stats.moments import moments
    >>> z = np.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]])
    >>> a, b = (raw_sums({"fc1": moments(part)}) for part in (z[:1], z[1:]))
    >>> {name: (a[name] + b[name]).tolist() for name in a}
    {'fc1/n': [3.0], 'fc1/total': [8.0, 11.0], 'fc1/square': [26.0, 33.0, 45.0]}
    >>> whole = moments_of({name: a[name] + b[name] for name in a})["fc1"]
    >>> np.allclose(whole.cross, moments(z).cross)
    True
    """
    found: Arrays = {}
    for layer, m in moments.items():
        n, mean, cross = (np.asarray(torch.as_tensor(part).cpu(), np.float64) for part in m)
        square = cross + n * np.outer(mean, mean)
        found |= {f"{layer}/n": n.reshape(1), f"{layer}/total": n * mean}
        found[f"{layer}/square"] = square[np.triu_indices(len(mean))]
    return found


def moments_of(sums: Mapping[str, np.ndarray]) -> dict[str, Moments]:
    """Moments of every layer, from sums over clients (:func:`raw_sums`); n is a whole number of rows."""
    found = {}
    for layer in dict.fromkeys(name.rpartition("/")[0] for name in sums):
        n, total, upper = (sums[f"{layer}/{part}"] for part in PARTS)
        rows, mean = np.rint(n[0]), total / np.rint(n[0])
        square = np.zeros((len(mean), len(mean)))
        square[np.triu_indices(len(mean))] = upper
        square += np.triu(square, 1).T
        found[layer] = Moments(np.asarray(rows), mean, square - rows * np.outer(mean, mean))
    return found


_CROWD = 3
_SINGLE = {
    "mixing_weights": "mixes single clients' entries",
    "encode": "sends what it makes of all active clients' models",
    "init_state": "keeps a state",
    "update_state": "keeps a state",
    "on_download": "combines copies before training",
    "choice": "chooses by the held-out samples of all clients",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run between separate parties, equal at all of them; they compare it before the first round.

    Parameters
    ----------
    net : Net
    algorithm : Algorithm
        One whose server needs no more than sums over clients: masks, phases and penalties of any kind, FedFac, and
        fine-tuning. ``estimator="icc"`` is excluded, whose sums are a client's weights if there is one client.
    training : TrainConfig
        Optimiser, participation, batch size, seed and the like.
    clients : int
        Number of parties.
    secure : bool
        Whether the server sees sums alone (SecAgg+). A party whose plan says so answers nothing else.
    headroom : float
        With ``secure``: how much larger than the server's copy a weight may be, see :mod:`fedstat.flower.secure`.

    Raises
    ------
    ValueError
        If a setting is out of range, or the algorithm needs to see single clients.
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
        if self.secure and least < _CROWD:
            raise ValueError(
                f"a secure sum hides no party among fewer than {_CROWD}, but as few as {least} of {self.clients} take "
                "part in a round. Raise participation, or find more parties."
            )
        check.real("headroom", self.headroom, low=1)
        method = f"method {self.algorithm.name!r}"
        for name, does in _SINGLE.items():
            if getattr(self.algorithm, name):
                raise ValueError(
                    f"{method} cannot run between separate parties: it {does}, and a server of separate parties sees "
                    "sums alone. Use fedstat.fl.train, or a method of masks, penalties and phases, or FedFac."
                )
        if self.algorithm.settings.get("estimator") == "icc":
            raise ValueError(
                f"{method} with estimator='icc' cannot run between separate parties: its sums hold every weight of a "
                "client. Use an estimator of the communality, such as 'pa', whose sums are moments of units."
            )
        if self.training.sampling != "fixed":
            raise ValueError(
                f"sampling must be 'fixed' between separate parties, but got {self.training.sampling!r}: a round of no "
                "party, or of one, has no sum to hide it in."
            )
        if self.training.aggregator.name != weighted_mean().name:
            raise ValueError(
                f"aggregator must be weighted_mean() between separate parties, but got {self.training.aggregator.name}"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that parties must agree on, as plain values."""
        found = {
            "algorithm": self.algorithm.name,
            **{f"algorithm.{name}": value for name, value in self.algorithm.settings.items()},
            "shapes": {name: list(shape) for name, shape in self.net.shapes.items()},
            "clients": self.clients,
            "secure": self.secure,
            **vars(self.training),
            "optimizer": self.training.optimizer.name,
            "aggregator": self.training.aggregator.name,
        }
        return dict(json.loads(store.to_json(found)))

    def require_same(self, other: Mapping[str, Any]) -> None:
        """ValueError, naming the settings, if the server's differ."""
        own = self.settings
        if differs := [name for name in {**own, **other} if own.get(name) != other.get(name)]:
            name = differs[0]
            raise ValueError(
                f"this party's settings differ from the server's in {', '.join(differs)}: {name} is "
                f"{own.get(name)!r} here, but {other.get(name)!r} there. Give all parties one plan."
            )

    def of_client(self, data: xr.Dataset, number: int) -> Job:
        """The job of one party, in which its draws are those of client ``number`` in a run of all.

        Raises
        ------
        ValueError
            If the number is not among the plan's, or the data are not of one client or do not fit the network.
        """
        check.integer("a party's number", number, low=0, high=self.clients - 1)
        whole = replace(self.training, participation=1.0)
        job = prepare(data, self.net, self.algorithm, whole, ComputeConfig(threads=1))
        if job.clients != 1:
            raise ValueError(f"a party holds the data of one client, but got {job.clients}. Give each its own.")
        train = job.train._replace(numbers=np.array([number]))
        return replace(job, train=train, everyone=self.clients, participation=self.training.participation)

    def of_server(self, sizes: np.ndarray, *, own_labels: bool) -> Job:
        """The job of all clients as the server knows it: numbers of training samples, but no sample."""
        start = np.concatenate([[0], np.cumsum(sizes)])
        unseen = Rows(torch.empty(0), torch.empty(0, dtype=torch.int64), start)
        return assembled((unseen, unseen, None), self.net, self.algorithm, self.training, own_labels=own_labels)
