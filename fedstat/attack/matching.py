"""Gradient inversion by gradient matching (DLG), and the gradients that a server observes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets, optim
from fedstat.fl.algorithm import Mask, Phase
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import of_local
from fedstat.fl.communication_round import Upload, encode, round_context
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_chunk
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params
from fedstat.fl.privacy import mean_update
from fedstat.fl.state import Download, State

if TYPE_CHECKING:
    from torch import Tensor


RATE, BETAS = 0.3, (0.9, 0.999)


class Recovered(NamedTuple):
    """Images and classes that the attacker recovers.

    Attributes
    ----------
    x : Tensor (victim, ...)
        Images.
    y : int64 Tensor (victim,)
        Classes.
    distance : Tensor (victim,)
        Squared distance to the observed gradient, divided by its squared norm.
    """

    x: Tensor
    y: Tensor
    distance: Tensor


def recover(
    net: Net,
    loss: Loss,
    observed: Observed,
    init: Tensor,
    *,
    box: tuple[Tensor, Tensor],
    iterations: int,
    y: Tensor | None = None,
) -> Recovered:
    """Find an image for each victim whose gradient is close to the observed one (Zhu, Liu and Han 2019, Algorithm 1).

    Zhu et al. minimize the squared distance by L-BFGS. Here Adam minimizes it: the learning rate decays from 0.3 to 0
    along a cosine, and images are clipped to the box. With ReLU and max pooling the distance is only piecewise smooth.
    There, line searches take five evaluations per step without reaching a smaller distance. Victims do not influence
    each other.

    Parameters
    ----------
    net : Net
    loss : Loss
    observed : Observed
    init : Tensor (victim, ...)
        Initial images.
    box : pair of Tensor
        Smallest and largest pixel values, which broadcast against an image.
    iterations : int
    y : int64 Tensor (victim,), optional
        Classes, if the attacker knows them or :func:`by_sign` returns them. None optimizes soft labels with the images.
    """
    classes = max(nets.n_outputs(net), 2)
    images_and_labels = [init.clone()] + ([] if y is not None else [init.new_zeros(len(init), classes)])
    norm = _sum_squares(observed.gradient.values()).clamp(min=torch.finfo(init.dtype).tiny)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in images_and_labels]
    best, smallest = [p.clone() for p in images_and_labels], torch.full_like(norm, math.inf)
    for k in range(iterations + 1):
        distance, grads = _measure_distance(net, loss, observed, images_and_labels, y, norm)
        is_smaller = distance < smallest
        smallest = torch.where(is_smaller, distance, smallest)
        for best_p, p in zip(best, images_and_labels, strict=True):
            best_p[is_smaller] = p[is_smaller]
        if k < iterations:
            _step_adam(images_and_labels, grads, moments, k, iterations)
            torch.clamp(images_and_labels[0], *box, out=images_and_labels[0])
    return Recovered(best[0], best[1].argmax(1) if y is None else y, smallest)


def by_sign(net: Net, observed: Observed) -> Tensor | None:
    """Infer classes from the signs of the gradient of the output bias; None if it is not observed.

    The gradient is negative only for the true class (Zhao, Mopuri and Bilen 2020, "iDLG", arXiv:2001.02610).
    """
    heads = nets.head_layers(net)
    bias = observed.gradient.get(f"{heads[0]}.bias")
    if len(heads) > 1 or bias is None or bias.ndim != 2 or not bool(observed.mask[f"{heads[0]}.bias"].all()):
        return None
    return bias.argmin(1) if bias.shape[1] > 1 else (bias[:, 0] < 0).long()


def _measure_distance(
    net: Net, loss: Loss, observed: Observed, images_and_labels: Sequence[Tensor], y: Tensor | None, norm: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the relative squared distance (victim,) of the gradients and its derivatives in the variables."""
    leaves = {name: p.clone() if name in net.buffers else p.detach() for name, p in observed.model.items()}
    params = [leaves[name].requires_grad_() for name in observed.gradient]
    x, *soft = (p.detach().requires_grad_() for p in images_and_labels)
    out = net.apply(leaves, x.unsqueeze(1), **nets.in_training(net, torch.ones_like(x[:, :1].flatten(1)[:, :1])))
    if y is not None:
        value = loss.value(out, y.unsqueeze(1)).sum()
    else:
        probabilities = torch.softmax(soft[0], 1)
        all_classes = torch.arange(probabilities.shape[1], device=x.device).expand_as(probabilities)
        value = (loss.value(out.expand(-1, probabilities.shape[1], -1), all_classes) * probabilities).sum()
    grads = torch.autograd.grad(value, params, create_graph=True, materialize_grads=True)
    # The derivative of the distance in the gradients is twice the difference; this needs no graph of squares and sums.
    difference = {n: grad.detach() - observed.gradient[n] for n, grad in zip(observed.gradient, grads, strict=True)}
    for name, p in difference.items():
        if not bool(observed.mask[name].all()):
            p.mul_(observed.mask[name])
    distance = _sum_squares(difference.values()) / norm
    pairs = [(g, d) for g, d in zip(grads, difference.values(), strict=True) if g.requires_grad]
    derivatives = torch.autograd.grad([g for g, _ in pairs], [x, *soft], [d for _, d in pairs], materialize_grads=True)
    for p in derivatives:  # scaling images is cheaper than scaling all gradients
        p.mul_((2 / norm).view(-1, *(1,) * (p.ndim - 1)))
    return distance, derivatives


def _sum_squares(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(p.flatten(1), dim=1).square() for p in tensors]).sum(0)


def _step_adam(
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    k: int,
    iterations: int,
) -> None:
    """Take step k of Adam in place; the learning rate decays to 0 along a cosine."""
    rate = RATE * (1 + math.cos(math.pi * k / iterations)) / 2
    for p, grad, (mean, square) in zip(tensors, grads, moments, strict=True):
        mean.lerp_(grad, 1 - BETAS[0])
        square.lerp_(grad.square(), 1 - BETAS[1])
        root = (square / (1 - BETAS[1] ** (k + 1))).sqrt_().add_(torch.finfo(p.dtype).tiny ** 0.5)
        p.addcdiv_(mean, root, value=-rate / (1 - BETAS[0] ** (k + 1)))


class Observed(NamedTuple):
    """Models and gradients that the attacker observes; a victim is a client with one image.

    Attributes
    ----------
    model : Params (victim, ...)
        All parameters, as the server knows them. Entries that the client uploads have their value before the step. The
        others have the value of the global model, which is the initial value for entries that are never shared.
    gradient : Params (victim, ...)
        Uploaded minus previous parameters, divided by minus the learning rate; 0 where ``mask`` is False.
    mask : mapping from name to bool Tensor (victim, ...)
        True for entries that are both uploaded and trained, so that they depend on the image. It broadcasts against
        the gradient.
    """

    model: Params
    gradient: Params
    mask: Mask

    def part(self, victims: slice | np.ndarray) -> Observed:
        """Select victims."""
        model, gradient = ({name: p[victims] for name, p in params.items()} for params in (self.model, self.gradient))
        rows = {
            name: m[victims] if m.ndim == self.model[name].ndim and len(m) > 1 else m for name, m in self.mask.items()
        }
        return Observed(model, gradient, rows)


def matched(job: Job, state: State) -> Mask:
    """Return masks of the entries that clients both upload and train.

    Parameters without such entries are omitted. Masks have shape (client, *shape) or broadcast against it.

    Raises
    ------
    ValueError
        If no parameter has such entries.
    """
    uploaded, rates = job.hooks.upload_mask(state.mask), _sum_rates(job)
    masks_by_name = {name: uploaded[name] for name in job.net.shapes if name in rates and bool(uploaded[name].any())}
    if not masks_by_name:
        raise ValueError(
            f"the attack needs parameters that clients train and upload, but {job.algorithm.name} has none. Attack an "
            "algorithm that shares parameters."
        )
    return masks_by_name


def observe(job: Job, state: State, clients: np.ndarray, x: Tensor, y: Tensor) -> Observed:
    """Return what the server observes if each client takes one local step on one image.

    The step has all phases of the algorithm with one batch each, its losses, penalties, weights, extra steps and
    encoding. It is a plain gradient step with the learning rate of the run, because the first step of Adam reveals
    little but signs. Uploads of a private run reach only the trusted server. For such a run, the result is what the
    released mean reveals to an attacker who knows all other uploads: the victim's update, clipped, with the noise of
    the sum.

    Parameters
    ----------
    job : Job
    state : State
        State that the clients download.
    clients : int array (victim,)
        Distinct clients.
    x, y : Tensor (victim, ...) and (victim,)
        Images and classes of the clients.

    Returns
    -------
    Observed
        Victims in the order of ``clients``.
    """
    cohort, download = of_local(job, clients), Download(job, state)
    order = cohort.local
    rows = torch.from_numpy(np.argsort(clients)[np.searchsorted(np.sort(clients), order)])
    lr = job.optimizer.lr
    if lr is None:
        raise ValueError(f"optimizer must have 'lr', but {job.optimizer.name!r} has none. Use optim.sgd or optim.adam.")
    single_job = replace(
        job,
        train=Rows(x[rows], y[rows], np.arange(len(order) + 1), job.train.ids[order]),
        batch_size=1,
        optimizer=optim.sgd(lr),
        track=False,
    )
    before = download.models(order)
    after = {name: p.clone() for name, p in before.items()}
    phases = tuple(_limit_to_one_step(phase, job.local_epochs) for phase in job.phases)
    train_chunk(
        single_job, after, np.arange(len(order)), phases, key=("attack",), state=download.algorithm_state(order)
    )
    upload = encode(job.hooks, round_context(job, download, cohort, after), state.mask, cohort)
    uploaded = dict(upload.values)
    if job.aggregator.privacy:
        uploaded |= _add_privacy(job, state, order, before, upload)
    inverse = torch.argsort(rows)
    attacked = matched(job, state)
    model, gradient, mask, rates = {}, {}, {}, _sum_rates(job)
    for name, p in state.global_params.items():
        is_uploaded = masks.of_clients(upload.entries[name], p.ndim, clients)
        model[name] = torch.where(is_uploaded, before[name][inverse], p)
        if name in attacked:
            mask[name] = is_uploaded
            slope = (before[name] - uploaded[name])[inverse] / (lr * rates[name])
            gradient[name] = torch.where(is_uploaded, slope, 0.0)
    return Observed(model, gradient, mask)


def _add_privacy(job: Job, state: State, clients: np.ndarray, before: Params, upload: Upload) -> Params:
    """Return the uploads of single clients (victim,) after clipping and noise; ``before`` has one row per client."""
    assert job.aggregator.privacy is not None  # noqa: S101
    entries = upload.entries.items()
    shared = {name: masks.of_clients(mask, before[name].ndim - 1, clients) for name, mask in entries}
    updates = {name: (upload.values[name] - before[name]) * mask for name, mask in shared.items() if bool(mask.any())}
    released = []
    for i, client in enumerate(job.train.ids[clients].tolist()):
        stream = partial(streams.generator, job.seed, "attack", "privacy", state.round, client)
        client_update = {name: p[i : i + 1] for name, p in updates.items()}
        released.append(mean_update(client_update, job.aggregator.privacy, 1.0, stream))
    return {name: before[name] + torch.stack([update[name] for update in released]) for name in updates}


def _limit_to_one_step(phase: Phase, local_epochs: int) -> Phase:
    """Limit a phase to one batch. A phase of 0 epochs, which only weights samples, keeps none."""
    return phase._replace(epochs=1, steps=1) if phase.length(local_epochs) else phase._replace(epochs=0)


def _sum_rates(job: Job) -> dict[str, float]:
    """Sum the learning rates of all steps for each parameter that is trained, as multiples of the run's rate."""
    rates: dict[str, float] = {}
    for phase in job.phases:
        for name in phase.moves(job.net) if phase.length(job.local_epochs) else ():
            rates[name] = rates.get(name, 0.0) + phase.lr * phase.repeats
    return rates
