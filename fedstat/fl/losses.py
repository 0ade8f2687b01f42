"""Losses of stacked outputs: value per sample, and derivative with respect to the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fedstat._utils.lazy import functional, torch

if TYPE_CHECKING:
    from torch import Tensor


class Loss(NamedTuple):
    """A loss as pure functions of outputs (client, sample, output) and targets y (client, sample).

    Attributes
    ----------
    value : callable (outputs, y) -> Tensor (client, sample)
    gradient : callable (outputs, y, weight) -> Tensor (client, sample, output)
        Derivative of Σ weight·value; may overwrite ``outputs``.
    predict : callable (outputs) -> int Tensor (client, sample)
    probability : callable (outputs) -> Tensor (client, sample, class)
    """

    value: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[..., Tensor]
    predict: Callable[[Tensor], Tensor]
    probability: Callable[[Tensor], Tensor]


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


def loss_of_part(inner: Loss, part: Callable[[Tensor], Tensor], gradient: Callable[..., Tensor]) -> Loss:
    """Make the loss of a part of the outputs; ``gradient`` is the derivative with respect to all outputs."""
    return Loss(
        lambda out, y: inner.value(part(out), y),
        gradient,
        lambda out: inner.predict(part(out)),
        lambda out: inner.probability(part(out)),
    )


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
    """Add to a loss, in training, the distance of predictions from a teacher's predictions.

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
