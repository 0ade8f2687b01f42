"""Metrics of client models on test samples besides score and loss, by scikit-learn's definitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.data.targets import Task
from fedstat.fl.chunks import format_bytes
from fedstat.fl.job import Job, Metrics
from fedstat.fl.nets import n_outputs
from fedstat.store import Group

if TYPE_CHECKING:
    from torch import Tensor

METRICS = {
    "class_accuracy": "test accuracy on a class, NaN if the client has no test sample of it",
    "balanced_accuracy": "mean of the accuracies on the classes of the client's test samples",
    "macro_f1": "mean of F1 over the classes of the client's test samples and predictions",
    "auc": "area under the ROC curve, mean over classes against the others, NaN if the client's test samples lack one",
}
"""Metrics of classification by name. In scikit-learn they are ``recall_score(average=None)``,
``balanced_accuracy_score``, ``f1_score(average="macro")`` and ``roc_auc_score(multi_class="ovr")``."""

ERRORS = {
    "mae": "mean absolute error, mean over targets",
    "r2": "R², proportion of the variance of a client's test targets that predictions explain, mean over targets, NaN "
    "if one does not vary",
}
"""Metrics of regression, which every run measures: ``mean_absolute_error`` and ``r2_score`` of scikit-learn."""

TITLES = {"balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1", "auc": "AUC", "mae": "MAE", "r2": "R²"}
"""Metrics with one value per client, in the words of prints."""

PREDICTION = "prediction"
"""Predictions (client, sample) or (client, sample, target), which tallies return like a metric."""


def names_of(metrics: str | Iterable[str], task: Task = "classification") -> tuple[str, ...]:
    """Return names of metrics without duplicates, in the order of ``METRICS``; in regression, of all ``ERRORS``.

    Raises
    ------
    ValueError
        If there is no such metric of the task; the message has the nearest names.

    Examples
    --------
    >>> names_of(["auc", "balanced_accuracy", "auc"])
    ('balanced_accuracy', 'auc')
    >>> names_of((), "regression")
    ('mae', 'r2')
    """
    names, of_task = [metrics] if isinstance(metrics, str) else list(metrics), METRICS
    if task == "regression":
        of_task = ERRORS
        if classes := [name for name in names if name in METRICS]:
            raise ValueError(
                f"metrics must be of regression, {' and '.join(ERRORS)}, which are always measured, but got "
                f"{classes[0]!r}. Leave it out."
            )
    for name in names:
        check.choice("metrics", name, of_task)
    return tuple(name for name in of_task if name in names or task == "regression")


def of_run(names: tuple[str, ...], clients: Group, *, own_labels: bool) -> Metrics:
    """Return the metrics of a run, from the group ``clients`` of its store.

    Raises
    ------
    ValueError
        If accuracies by class are requested, but clients number classes differently and the group has no labels.
    """
    if "class" not in clients.coords.coords:
        return Metrics(names)
    labels = clients.coords["label"].to_numpy() if "label" in clients.coords.variables else None
    if "class_accuracy" in names and own_labels and labels is None:
        raise ValueError(
            "class_accuracy needs each sample's class, as clients number classes differently, but y_true has the dims "
            "of x. Pass sample-major data, with coordinates client and y_true (sample)."
        )
    return Metrics(names, clients.coords["class"].to_numpy(), labels)


def layout(metrics: Metrics, dims: tuple[str, ...], chunk: Mapping[str, Any] = {}) -> dict[str, tuple[Any, ...]]:
    """Return the arrays of metrics for :func:`fedstat.store.group`, with the dims of accuracy, and class."""
    by_name = {name: (*dims, "class") if name == "class_accuracy" else dims for name in metrics.names}
    texts = METRICS | ERRORS
    return {name: (by_name[name], "float32", texts[name], chunk) for name in metrics.names}


def shape(job: Job, name: str) -> tuple[int, ...]:
    """Return the shape of a metric of one client."""
    targets = tuple(job.test.y.shape[1:])
    shapes = {"class_accuracy": (len(job.metrics.classes),), PREDICTION: (int(job.test.sizes.max()), *targets)}
    return shapes.get(name, ())


def require_memory(job: Job, *, store_predictions: bool) -> None:
    """Raise ValueError if metrics or predictions of all clients exceed the rest of the memory budget."""
    for name in (*job.metrics.names, *[PREDICTION] * store_predictions):
        needed = 4 * job.clients * math.prod(shape(job, name))
        if job.room is not None and needed > job.room:
            setting = "store_predictions" if name == PREDICTION else f"metrics={name!r}"
            raise ValueError(
                f"{setting} holds {format_bytes(needed)} of {job.clients} clients, but memory_budget leaves "
                f"{format_bytes(max(job.room, 0))}. Raise memory_budget, or leave out {setting}."
            )


class Tally:
    """Counts of right and predicted labels of some clients, and the scores of their test samples, block by block.

    Parameters
    ----------
    job : Job
        Its ``metrics`` name what to return.
    clients : int array (client,)
    """

    def __init__(self, job: Job, clients: np.ndarray) -> None:
        self._job, self._clients, n_labels = job, clients, max(n_outputs(job.net), 2)
        self._counts = torch.zeros(3, len(clients), n_labels, dtype=torch.int64, device=job.device)
        self._blocks: dict[str, list[Tensor]] = {"predicted": [], "scores": [], "y": [], "real": []}

    def add(self, out: Tensor, y: Tensor, real: Tensor) -> None:
        """Add a block: outputs (client, sample, output), labels (client, sample) and True for samples."""
        predicted = self._job.loss.predict(out)
        parts = ((y, (predicted == y) & real), (y, real), (predicted, real))
        for count, (label, which) in zip(self._counts, parts, strict=True):
            count.scatter_add_(1, label, which.long())
        block = {"y": y, "real": real}
        if PREDICTION in self._job.metrics.names:
            block["predicted"] = predicted
        if "auc" in self._job.metrics.names:
            block["scores"] = self._job.loss.probability(out.double())  # in float32, probabilities near 1 are ties
        for name, part in block.items():
            self._blocks[name].append(part)

    def values(self) -> dict[str, np.ndarray]:
        """Return the metrics (client, ...) by name."""
        right, true, predicted = self._counts.double()
        recall = right / true  # NaN for classes without samples
        values: dict[str, Any] = {
            "class_accuracy": lambda: self._by_class(recall),
            "balanced_accuracy": lambda: recall.nanmean(1),
            "macro_f1": lambda: (2 * right / (true + predicted)).nanmean(1),
            "auc": lambda: auc(*(torch.cat(self._blocks[name], 1) for name in ("scores", "y", "real"))),
            PREDICTION: self._padded,
        }
        return {name: values[name]().cpu().numpy() for name in self._job.metrics.names}

    def _by_class(self, recall: Tensor) -> Tensor:
        """Return values (client, class) of values (client, label)."""
        if (labels := self._job.metrics.labels) is None:
            return recall
        label = torch.from_numpy(labels[self._job.ids(self._clients)]).to(recall.device)
        return recall.gather(1, label.clamp(min=0)).masked_fill(label < 0, torch.nan)

    def _padded(self) -> Tensor:
        return _pad(self._job, *(torch.cat(self._blocks[name], 1) for name in ("predicted", "real")))


def _pad(job: Job, predicted: Tensor, real: Tensor) -> Tensor:
    """Return predictions (client, sample, ...) as float32, NaN behind each client's last sample."""
    padded = predicted.new_full((len(predicted), *shape(job, PREDICTION)), torch.nan, dtype=torch.float32)
    is_real = real.view(*real.shape, *(1,) * (predicted.ndim - 2))
    padded[:, : predicted.shape[1]] = predicted.float().masked_fill(~is_real, torch.nan)
    return padded


class ErrorTally:
    """Predictions and targets of some clients, block by block, for the metrics of regression; as :class:`Tally`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._blocks: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, out: Tensor, y: Tensor, real: Tensor) -> None:
        """Add a block: outputs (client, sample, output), targets (client, sample, target) and True for samples."""
        self._blocks.append((self._job.loss.predict(out), y, real))

    def values(self) -> dict[str, np.ndarray]:
        """Return the metrics (client,) by name, in the units of the targets; predictions as networks give them."""
        predicted, y, real = (torch.cat(parts, 1) for parts in zip(*self._blocks, strict=True))
        weight = real.double().unsqueeze(-1)
        weight /= weight.sum(1, keepdim=True)
        _, sd = self._job.target_scale(y.device)
        first = y[:, :1].double()  # near the targets, so that sums of squares lose no digits
        error, deviation = predicted.double() - y.double(), y.double() - first
        center = (deviation * weight).sum(1, keepdim=True)
        variance = ((deviation - center).square() * weight).sum(1)
        varies = ((y != y[:, :1]) & real.unsqueeze(-1)).any(1)
        values = {
            "mae": lambda: (error.abs() * sd * weight).sum(1).mean(1),
            "r2": lambda: torch.where(varies, 1 - (error.square() * weight).sum(1) / variance, torch.nan).mean(1),
            PREDICTION: lambda: _pad(self._job, predicted, real),
        }
        return {name: values[name]().cpu().numpy() for name in self._job.metrics.names}


def tally_of(job: Job, clients: np.ndarray) -> Tally | ErrorTally:
    """Return an empty tally of some clients for the job's task."""
    return Tally(job, clients) if job.loss.task == "classification" else ErrorTally(job)


def auc(scores: Tensor, y: Tensor, real: Tensor) -> Tensor:
    """Return the area under the ROC curve (client,): mean over classes, each against the others.

    The area is the probability that a sample of the class has a higher score than another sample, plus half the
    probability of a tie (Hanley and McNeil 1982, Radiology 143, 29): a sum of ranks. Of two classes the second counts
    alone.

    Parameters
    ----------
    scores : float64 Tensor (client, sample, class)
        Class probabilities.
    y : int64 Tensor (client, sample)
    real : bool Tensor (client, sample)
        False for padding.

    Returns
    -------
    float64 Tensor (client,)
        NaN for a client whose samples lack a class.

    Examples
    --------
    >>> p = torch.tensor([[0.1, 0.4, 0.35, 0.8]], dtype=torch.float64)
    >>> auc(torch.stack([1 - p, p], -1), torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4, dtype=torch.bool))
    tensor([0.7500], dtype=torch.float64)
    """
    classes = torch.arange(1 if scores.shape[2] == 2 else 0, scores.shape[2], device=scores.device)
    by_class = scores[:, :, classes].mT.masked_fill(~real[:, None], torch.inf).contiguous()  # padding comes last
    in_order = by_class.sort(-1).values
    below, up_to = (torch.searchsorted(in_order, by_class, right=right) for right in (False, True))
    positive = (y[:, None] == classes[:, None]) & real[:, None]
    n_positive = positive.sum(-1).double()
    n_negative = real.sum(-1)[:, None] - n_positive
    ranks = ((below + up_to + 1).double() / 2 * positive).sum(-1)  # ties have their mean rank
    return ((ranks - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)).mean(1)
