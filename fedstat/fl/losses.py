"""Losses of stacked outputs, value and derivative for each sample, and the score of each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.data.targets import Task

if TYPE_CHECKING:
    from torch import Tensor


class Loss(NamedTuple):
    """A loss as pure functions of outputs (client, sample, output) and targets y.

    In classification y (client, sample) holds class numbers; in regression y (client, sample, target) is float32.

    Attributes
    ----------
    value : callable (outputs, y) -> Tensor (client, sample)
    gradient : callable (outputs, y, weight) -> Tensor (client, sample, output)
        Derivative of Σ weight·value; may overwrite ``outputs``.
    predict : callable (outputs) -> Tensor
        Class numbers (client, sample); in regression, the targets (client, sample, target).
    probability : callable (outputs) -> Tensor (client, sample, class)
        What an ensemble averages; in regression, the predicted targets.
    task : {"classification", "regression"}
    """

    value: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[..., Tensor]
    predict: Callable[[Tensor], Tensor]
    probability: Callable[[Tensor], Tensor]
    task: Task = "classification"


def _logistic_gradient(z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return z.sigmoid_().sub_(y.to(z.dtype).unsqueeze(-1)).mul_(weight.unsqueeze(-1))


def _cross_entropy_gradient(z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    p = torch.softmax(z, -1)
    p.scatter_add_(-1, y.unsqueeze(-1), p.new_full((1, 1, 1), -1.0).expand(*y.shape, 1))
    return p.mul_(weight.unsqueeze(-1))


logistic = Loss(
    lambda z, y: functional.binary_cross_entropy_with_logits(z[..., 0], y.to(z.dtype), reduction="none"),
    _logistic_gradient,
    lambda z: (z[..., 0] > 0).long(),
    lambda z: torch.cat([torch.sigmoid(-z), torch.sigmoid(z)], -1),
)
"""Binary cross-entropy of one logit; y is 0 or 1."""

cross_entropy = Loss(
    lambda z, y: functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape),
    _cross_entropy_gradient,
    lambda z: z.argmax(-1),
    lambda z: torch.softmax(z, -1),
)
"""Cross-entropy of softmax outputs; y is a class index."""


def _of_errors(value: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]) -> Loss:
    """Make a loss of regression: the mean over targets of a function of the errors, outputs less targets."""

    def gradient(z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return derivative(z.sub_(y)).mul_(weight.unsqueeze(-1) / y.shape[-1])

    return Loss(lambda z, y: value(z - y).mean(-1), gradient, lambda z: z, lambda z: z, "regression")


CROSS_ENTROPY = "cross-entropy"
"""Name of the loss of classes."""

LOSSES: dict[str, Loss] = {
    "squared": _of_errors(lambda e: e.square(), lambda e: e.mul_(2)),
    "absolute": _of_errors(lambda e: e.abs(), lambda e: e.sign_()),
    "huber": _of_errors(
        lambda e: functional.huber_loss(e, torch.zeros_like(e), reduction="none"), lambda e: e.clamp_(-1, 1)
    ),
}
"""Losses of regression by name: the mean over targets of the squared, absolute or Huber error (δ = 1), as in PyTorch's
``MSELoss``, ``L1Loss`` and ``HuberLoss``."""


class Score(NamedTuple):
    """Score by which models are judged in a task.

    Attributes
    ----------
    name : str
        Name of the array in stores and tables.
    title : str
        Its words in prints.
    is_error : bool
        True if smaller values are better.
    """

    name: str
    title: str
    is_error: bool = False

    @property
    def highest(self) -> float:
        """Largest possible value."""
        return math.inf if self.is_error else 1.0

    @property
    def long_name(self) -> str:
        """Words for the score on test samples."""
        return f"test {self.title}"

    def best(self, values: Any) -> int:
        """Return the position of the best value; the first if several are equal, ignoring NaN."""
        return int(np.nanargmin(values) if self.is_error else np.nanargmax(values))


SCORES: dict[Task, Score] = {
    "classification": Score("accuracy", "accuracy"),
    "regression": Score("rmse", "RMSE", is_error=True),
}
"""Score of each task: the proportion of right predictions; the root of the mean squared error, mean over targets."""


def score_among(names: Container[str]) -> Score:
    """Return the score whose name is among the names of a run's metrics or a table's columns; accuracy if none is."""
    return next((score for score in reversed(SCORES.values()) if score.name in names), SCORES["classification"])


def loss_of_part(inner: Loss, part: Callable[[Tensor], Tensor], gradient: Callable[..., Tensor]) -> Loss:
    """Make the loss of a part of the outputs; ``gradient`` is the derivative with respect to all outputs."""
    return Loss(
        lambda out, y: inner.value(part(out), y),
        gradient,
        lambda out: inner.predict(part(out)),
        lambda out: inner.probability(part(out)),
        inner.task,
    )


def require_classes(loss: Loss, method: str, reason: str) -> Loss:
    """Return the loss, or raise ValueError, naming the algorithm and the reason, if the targets are real numbers."""
    if loss.task == "regression":
        raise ValueError(
            f"{method} needs classes, {reason}, but the targets are real numbers. Use another algorithm, such as "
            "fedavg, fedper, ditto or fedfac-dynamic."
        )
    return loss


def softened(out: Tensor, temperature: float) -> Tensor:
    """Return class probabilities (client, sample, class) at a temperature; for a single output, of classes 0 and 1.

    Examples
    --------
    >>> softened(torch.tensor([[[2.0]]]), 2.0)
    tensor([[[0.2689, 0.7311]]])
    """
    z = out / temperature
    return torch.softmax(z, -1) if z.shape[-1] > 1 else torch.cat([torch.sigmoid(-z), torch.sigmoid(z)], -1)


def distilled(inner: Loss, lam: float, *, temperature: float = 1.0, of_loss: float = 1.0) -> Loss:
    """Add to a loss of classes, in training, the distance of predictions from a teacher's predictions.

    Hinton, Vinyals and Dean (2015), "Distilling the knowledge in a neural network", arXiv:1503.02531, §2.

    Parameters
    ----------
    inner : Loss
    lam : float
        Weight of −Σ_c q_c log p_c, with p = softmax(outputs / temperature); its derivative is that of KL(q ‖ p).
    temperature : float
    of_loss : float
        Weight of the inner loss.

    Returns
    -------
    Loss
        The gradient's fourth argument is q (client, sample, class); rows of 0 have no teacher. Without this argument,
        and in ``value``, the loss is the inner loss.
    """

    def gradient(out: Tensor, y: Tensor, weight: Tensor, teacher: Tensor | None = None) -> Tensor:
        if teacher is None:
            return inner.gradient(out, y, weight)
        difference = softened(out, temperature).mul_(teacher.sum(-1, keepdim=True)).sub_(teacher)[..., -out.shape[-1] :]
        difference.mul_(lam / temperature * weight.unsqueeze(-1))
        return inner.gradient(out, y, weight).mul_(of_loss).add_(difference)

    return inner._replace(gradient=gradient)


def for_outputs(n_outputs: int) -> Loss:
    """Return the loss for a classifier's number of outputs: logistic for one, cross-entropy for more."""
    return logistic if n_outputs == 1 else cross_entropy


def loss_named(name: str | None, task: Task, n_outputs: int) -> Loss:
    """Return a loss by name.

    Parameters
    ----------
    name : str, optional
        In regression one of ``LOSSES``, by default "squared"; in classification "cross-entropy", the default, which is
        the logistic loss for one output.
    task : {"classification", "regression"}
    n_outputs : int
        Number of outputs of the network.

    Raises
    ------
    ValueError
        If the task has no such loss.

    Examples
    --------
    >>> loss_named("huber", "regression", 1).value(torch.tensor([[[3.0]]]), torch.tensor([[[0.5]]]))
    tensor([[2.]])
    """
    if task == "regression":
        return LOSSES[check.choice("loss for real-valued targets", name or "squared", LOSSES)]
    check.choice("loss for classes", name or CROSS_ENTROPY, [CROSS_ENTROPY])
    return for_outputs(n_outputs)
