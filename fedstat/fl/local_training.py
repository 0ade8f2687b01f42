"""Local training: the steps between download and upload, on client-stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import batches
from fedstat.fl.algorithm import AlgorithmState, Mask, Phase, Samples
from fedstat.fl.batches import Schedule
from fedstat.fl.chunks import each_chunk
from fedstat.fl.job import Job
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Params, accumulate_by_autograd, apply_arguments, in_training
from fedstat.fl.optim import Optimizer
from fedstat.fl.state import Download

if TYPE_CHECKING:
    from torch import Tensor


class Trained(NamedTuple):
    """Clients after local training.

    Attributes
    ----------
    params : Params (client, ...)
    optimizer : Params (client, ...)
        Optimizer state; empty if it does not last.
    loss : Tensor (client,)
        Mean loss of a client's batches, each before its step; 0 unless the job tracks losses.
    finite : bool array (client,)
        False for all clients of a chunk that has a parameter that is not finite.
    """

    params: Params
    optimizer: Params
    loss: Tensor
    finite: np.ndarray

    def require_finite(self, job: Job, clients: np.ndarray, number: int) -> None:
        """Raise FloatingPointError, naming the client, if a parameter or a loss is not finite after a round."""
        for name, p in self.params.items() if not self.finite.all() else ():
            if (bad := ~torch.isfinite(p.flatten(1)).all(1).cpu().numpy()).any():
                raise diverged(job, name, bad, clients, number)
        if not bool(torch.isfinite(self.loss).all()):
            raise diverged(job, "the loss", ~torch.isfinite(self.loss).cpu().numpy(), clients, number)


def train_locally(job: Job, download: Download, clients: np.ndarray, phases: tuple[Phase, ...]) -> Trained:
    """Train clients from the models that they download.

    Parameters
    ----------
    job : Job
    download : Download
    clients : int array (client,)
        Rows in the job's data, in any order; chunks waste least if clients of like sizes are neighbors.
    phases : tuple of Phase
    """
    state = download.state
    after = {name: p.new_empty(len(clients), *p.shape) for name, p in state.global_params.items()}
    optimizer = state.optimizer.read(clients)
    loss = torch.zeros(len(clients), device=job.device)
    finite = np.ones(len(clients), bool)

    def work(span: slice) -> None:
        params = download.models(clients[span], {name: p[span] for name, p in after.items()})
        moments = {name: p[span] for name, p in optimizer.items()}
        loss[span] = train_chunk(
            job, params, clients[span], phases, key=("batches", state.round), optimizer=moments,
            state=download.algorithm_state(clients[span]),
        )  # fmt: skip
        ends = torch.stack([end for p in params.values() for end in torch.aminmax(p)])  # while they are in cache
        finite[span] = bool(torch.isfinite(ends).all())

    each_chunk(job, len(clients), work)
    return Trained(after, optimizer, loss, finite)


def diverged(job: Job, what: str, bad: np.ndarray, clients: np.ndarray, number: int) -> FloatingPointError:
    """Return the error for values that are not finite in some clients."""
    first = clients[bad][job.ids(clients[bad]).argmin()]
    return FloatingPointError(
        f"training diverged in round {number}: {what} of client {job.labels(first)} is not finite ({int(bad.sum())} "
        f"of {len(clients)} clients). Lower the learning rate, or scale the inputs."
    )


def finetune(job: Job, download: Download, params: Params, clients: np.ndarray, phases: tuple[Phase, ...]) -> None:
    """Fine-tune one chunk of clients in place, to the models they predict with."""
    if phases:
        key = ("finetune", download.state.round)
        train_chunk(job, params, clients, phases, key=key, state=download.algorithm_state(clients))


class _Chunk(NamedTuple):
    """Some clients in local training.

    Attributes
    ----------
    params, optimizer, download : Params (client, ...)
        Current parameters, optimizer state, and parameters before training (empty if no phase needs them).
    clients : int array (client,)
    state : AlgorithmState
    held : mapping from name to (bool Tensor, Tensor (client, ...))
        Masks of entries that do not move, and their values.
    loss : Tensor (client,)
        Sum of batch losses.
    """

    params: Params
    optimizer: Params
    download: Params
    clients: np.ndarray
    state: AlgorithmState
    held: dict[str, tuple[Tensor, Tensor]]
    loss: Tensor


def train_chunk(
    job: Job,
    params: Params,
    clients: np.ndarray,
    phases: tuple[Phase, ...],
    *,
    key: tuple[int | str, ...],
    optimizer: Params | None = None,
    frozen: Mask | None = None,
    state: AlgorithmState = AlgorithmState(),  # noqa: B008
) -> Tensor:
    """Train one chunk of clients in place; return the mean loss of their batches (client,), if tracked.

    Parameters
    ----------
    job : Job
    params : Params (client, ...)
    clients : int array (client,)
        Rows in the job's data, in any order.
    phases : tuple of Phase
    key : tuple
        Names the random stream of the batches.
    optimizer : Params, optional
        Optimizer state to continue from; changed in place.
    frozen : Mask, optional
        Entries that do not move; without rows of clients.
    state : AlgorithmState
        State of these clients and the server.
    """
    train, clients = batches.load_clients(job.train, clients)
    job = job if train is job.train else replace(job, train=train)
    largest_first = np.argsort(-train.sizes[clients], kind="stable")
    if (np.diff(largest_first) != 1).any():
        return _train_reordered(
            job, params, clients, phases, largest_first, key=key, optimizer=optimizer, frozen=frozen, state=state
        )
    has_anchor = any(phase.anchor != "phase" for phase in phases)
    chunk = _Chunk(
        params,
        optimizer or job.optimizer.init(params),
        _copy(params) if has_anchor else {},
        clients,
        state,
        {name: (mask, params[name].clone()) for name, mask in (frozen or {}).items() if bool(mask.any())},
        torch.zeros(len(clients), device=job.device),
    )
    n_batches = np.zeros(len(clients))
    for position, phase in enumerate(phases):
        n_batches += _run_phase(job, phase, chunk, (*key, position))
    return chunk.loss / torch.from_numpy(np.maximum(n_batches, 1)).to(chunk.loss)


def _train_reordered(
    job: Job,
    params: Params,
    clients: np.ndarray,
    phases: tuple[Phase, ...],
    order: np.ndarray,
    *,
    optimizer: Params | None,
    state: AlgorithmState,
    **options: Any,
) -> Tensor:
    """Train a copy of the chunk with its clients in another order, see :func:`train_chunk`."""
    rows = torch.from_numpy(order).to(job.device)
    copies = {name: p[rows] for name, p in params.items()}
    moments = None if optimizer is None else {name: p[rows] for name, p in optimizer.items()}
    state = state._replace(clients={name: p[rows] for name, p in state.clients.items()})
    loss = train_chunk(job, copies, clients[order], phases, optimizer=moments, state=state, **options)
    for into, trained in ((params, copies), (optimizer or {}, moments or {})):
        for name, p in into.items():
            p[rows] = trained[name]
    return loss[torch.argsort(rows)]


def _run_phase(job: Job, phase: Phase, chunk: _Chunk, key: tuple[int | str, ...]) -> np.ndarray:
    """Run one phase; return the number of batches (client,)."""
    train, clients = job.train, chunk.clients
    sample_weights = _start_phase(job, phase, chunk)
    epochs, trained = phase.length(job.local_epochs), phase.moves(job.net)
    if not trained or (epochs == 0 and phase.steps is None):
        return np.zeros(len(clients))
    all_clients = _Step.of_chunk(job, phase, chunk, trained)
    schedule = batches.schedule(
        train, clients, epochs=epochs, batch_size=job.batch_size, seed=job.seed, key=key, steps=phase.steps
    )
    y, noise, first = train.y[schedule.rows], _noise(job, schedule, clients, key), train.start[clients]

    def batch_of(number: int, k: int) -> _Batch:
        rows = schedule.rows[number, :k]
        extra = () if sample_weights is None else (_take_values(sample_weights[:k], rows, first[:k]),)
        draws = {name: p[number, :k] for name, p in noise.items()} if noise else {}
        return _Batch(batches.take_rows(train.x, rows), y[number, :k], schedule.weight[number, :k], extra, draws)

    step, live = all_clients, 0
    for number, k in enumerate(schedule.live):
        if k != live:  # the first k clients still have batches; new views of them when k decreases
            step, live = all_clients.of_first(k), k
        batch = batch_of(number, k)
        for repeat in range(phase.repeats):
            step.take(batch, number * phase.repeats + repeat, step.loss if repeat == 0 else None)
    return (schedule.live > np.arange(len(clients))[:, None]).sum(1)


class _Batch(NamedTuple):
    """One batch (client, sample, ...): inputs, targets, weights, results of ``sample_weights``, random draws."""

    x: Tensor
    y: Tensor
    weight: Tensor
    extra: tuple[Tensor, ...]
    noise: Params

    def part(self, first: int, of: int) -> _Batch:
        """Return every ``of``-th sample, with weights that sum to 1; another sample for a client that has none."""
        n = (self.weight > 0).sum(1, keepdim=True)
        positions = torch.arange(first, max(self.weight.shape[1], first + 1), of, device=n.device).expand(len(n), -1)
        positions = torch.where(positions[:, :1] < n, positions.clamp(max=self.weight.shape[1] - 1), first % n)
        weight = self.weight.gather(1, positions)
        weight[:, 1:] *= first < n
        weight /= weight.sum(1, keepdim=True)
        rows = torch.arange(len(n), device=n.device)[:, None], positions
        extra, noise = tuple(e[rows] for e in self.extra), {name: p[rows] for name, p in self.noise.items()}
        return _Batch(self.x[rows], self.y[rows], weight, extra, noise)


class _Step(NamedTuple):
    """Tensors that the steps of a phase read and change, of the clients of a chunk that still have batches.

    Attributes
    ----------
    job : Job
    phase : Phase
    rule : Optimizer
    lr : float, optional
        Learning rate of steps that the network takes while it differentiates, without a gradient in memory.
    params, inputs, anchor, moments : Params (client, ...)
        Current parameters; parameters with the network's constants; the phase's anchor; optimizer state.
    into : Params (client, ...)
        Gradients of the trained parameters; with ``lr`` the trained parameters themselves.
    held : mapping from name to (bool Tensor, Tensor (client, ...))
    loss : Tensor (client,), optional
        As in :class:`_Chunk`, if losses are tracked.
    """

    job: Job
    phase: Phase
    rule: Optimizer
    lr: float | None
    params: Params
    inputs: Params
    anchor: Params
    moments: Params
    into: Params
    held: Mapping[str, tuple[Tensor, Tensor]]
    loss: Tensor | None

    @classmethod
    def of_chunk(cls, job: Job, phase: Phase, chunk: _Chunk, trained: Sequence[str]) -> _Step:
        """Return the step of all clients of a chunk."""
        params, rule = chunk.params, _scale_lr(phase.optimizer or job.optimizer, phase.lr)
        lr = None if phase.penalty or phase.gradient else rule.plain_lr
        into = {name: params[name] if lr is not None else torch.zeros_like(params[name]) for name in trained}
        moments = rule.init({name: params[name] for name in trained}) if phase.optimizer else chunk.optimizer
        # ``post_step`` may also change parameters that do not train.
        constants = job.net.constants(params, trained) if job.net.constants and not phase.post_step else {}
        inputs, anchor, loss = {**params, **constants}, _anchor(phase, chunk), chunk.loss if job.track else None
        return cls(job, phase, rule, lr, params, inputs, anchor, moments, into, chunk.held, loss)

    def of_first(self, k: int) -> _Step:
        """Return the step of the first k clients, with views of the tensors."""
        inputs, anchor, moments = _first_rows(self.inputs, k), _first_rows(self.anchor, k), _first_rows(self.moments, k)
        params = {name: inputs[name] for name in self.params}
        into = _first_rows(self.into, k) if self.lr is None else {name: inputs[name] for name in self.into}
        held = {name: (mask, fixed[:k]) for name, (mask, fixed) in self.held.items()}
        loss = None if self.loss is None else self.loss[:k]
        return _Step(self.job, self.phase, self.rule, self.lr, params, inputs, anchor, moments, into, held, loss)

    def take(self, batch: _Batch, number: int, loss: Tensor | None) -> None:
        """Take one step, in place; add the batch's mean loss to ``loss`` (client,), if given."""
        if self.lr is not None:
            _accumulate(self.job, self.inputs, batch, self.into, 1.0, -self.lr, loss)
        else:
            self._differentiate(batch, loss)
            self.rule.step(self.params, self.into, self.moments)
        if self.held:
            self._hold()
        if self.phase.post_step:
            self.phase.post_step(self.params, self.anchor, _learning_rate(self.rule), number)
            self._hold()

    def _differentiate(self, batch: _Batch, loss: Tensor | None) -> None:
        """Set ``into`` to the optimizer's gradient: of the loss, or by the phase's hook, plus the penalty's."""
        if self.phase.gradient is None:
            _accumulate(self.job, self.inputs, batch, self.into, 0.0, 1.0, loss)
        else:
            if loss is not None:
                loss += _loss(self.job, self.params, batch)
            grads = self.phase.gradient(partial(self._gradient, batch), self.params, _learning_rate(self.rule))
            for name, p in grads.items():
                self.into[name].copy_(p)
        if self.phase.penalty:
            gradients: Any = self.phase.penalty(self.params, self.anchor)  # no loss: see Hooks.phases
            for name, p in gradients.items():
                if name in self.into:
                    self.into[name].add_(p)

    def _gradient(self, batch: _Batch, params: Params, part: int = 0, of: int = 1) -> Params:
        """Return the gradient of the loss at any parameters, on every ``of``-th sample of a batch."""
        gradients = {name: torch.zeros_like(p) for name, p in self.into.items()}
        _accumulate(self.job, params, batch.part(part, of) if of > 1 else batch, gradients, 0.0, 1.0, None)
        return gradients

    def _hold(self) -> None:
        """Put back the entries that do not move."""
        for name, (mask, fixed) in self.held.items():
            torch.where(mask, fixed, self.params[name], out=self.params[name])


def _anchor(phase: Phase, chunk: _Chunk) -> Params:
    if not (phase.penalty or phase.post_step):
        return {}
    if phase.anchor == "phase":
        return _copy(chunk.params)
    if phase.anchor == "download":
        return chunk.download
    return phase.anchor(chunk.download, chunk.state)


def _learning_rate(rule: Optimizer) -> float:
    if rule.lr is None:
        raise ValueError(
            f"a phase of the method needs the learning rate, but the optimizer {rule.name!r} has no 'lr'. Add it, or "
            "use optim.sgd or optim.adam."
        )
    return rule.lr


def _scale_lr(optimizer: Optimizer, factor: float) -> Optimizer:
    if factor == 1:
        return optimizer
    if optimizer.scaled is None:
        raise ValueError(
            f"a phase of the method trains at {factor:g} times the learning rate, but the optimizer {optimizer.name!r} "
            "has no 'scaled'. Add it, or use optim.sgd or optim.adam."
        )
    return optimizer.scaled(factor)


def _noise(job: Job, schedule: Schedule, clients: np.ndarray, key: tuple[int | str, ...]) -> Params:
    """Draw U(0, 1) noise (step, client, batch, ...) for a network with noise, each client's from a separate stream."""
    noise: Params = {}
    steps, _, size = schedule.rows.shape
    for name, shape in job.net.noise.items():
        draws = np.zeros((steps, len(clients), size, *shape), np.float32)
        for i, c in enumerate(job.train.ids[clients]):
            n_steps = int((schedule.live > i).sum())
            width = int((schedule.weight[0, i] > 0).sum())  # no batch is larger than the first
            rng = streams.generator(job.seed, "noise", name, *key, int(c))
            draws[:n_steps, i, :width] = rng.random((n_steps, width, *shape), dtype=np.float32)
        noise[name] = torch.from_numpy(draws).to(job.device)
    return noise


def _loss_gradient(loss: Loss, batch: _Batch, total: Tensor | None, out: Tensor) -> Tensor:
    """Return the derivative at the outputs; add the batch's mean loss to ``total`` (client,), if given."""
    if total is not None:
        total += (loss.value(out, batch.y) * batch.weight).sum(1)
    return loss.gradient(out, batch.y, batch.weight, *batch.extra)


def _loss(job: Job, params: Params, batch: _Batch) -> Tensor:
    """Return the mean loss (client,) of a batch."""
    net = job.net
    options = in_training(net, batch.weight, batch.noise) if net.by_batch else apply_arguments(net, None, batch.noise)
    if net.by_batch:  # in training, which also changes buffers
        params = {**params, **{name: params[name].clone() for name in net.buffers}}
    with torch.no_grad():
        out = net.apply(params, batch.x, **options)
        return (job.loss.value(out.float(), batch.y) * batch.weight).sum(1)


def _start_phase(job: Job, phase: Phase, chunk: _Chunk) -> Tensor | None:
    """Call ``on_phase_start``, and return the result of ``sample_weights``, on complete training sets, padded."""
    if not phase.on_phase_start and not phase.sample_weights:
        return None
    rows, live = batches.pad_rows(job.train, chunk.clients)
    arguments = job.net, chunk.params, Samples(job.train.x[rows], job.train.y[rows], live), chunk.state
    if phase.on_phase_start:
        phase.on_phase_start(*arguments)
    return phase.sample_weights(*arguments) if phase.sample_weights else None


def _take_values(values: Tensor, rows: Tensor, first: np.ndarray) -> Tensor:
    """Return entries (client, batch, ...) of ``values`` (client, sample, ...) for rows of the data."""
    positions = (rows - torch.from_numpy(first).to(rows.device)[:, None]).clamp_(min=0)
    return values[torch.arange(len(values), device=rows.device)[:, None], positions.clamp_(max=values.shape[1] - 1)]


def _first_rows(params: Params, k: int) -> Params:
    return {name: p[:k] for name, p in params.items()}


def _copy(params: Params) -> Params:
    return {name: p.clone() for name, p in params.items()}


def _accumulate(
    job: Job, params: Params, batch: _Batch, into: Params, beta: float, alpha: float, total: Tensor | None
) -> None:
    """Set ``into`` to beta·into + alpha·∂loss, by the network's derivative or by autograd."""
    net, gradient = job.net, partial(_loss_gradient, job.loss, batch, total)
    options = in_training(net, batch.weight, batch.noise)
    # A context that changes nothing would take microseconds of every step.
    reduced: AbstractContextManager[object] = nullcontext()
    at_outputs: Callable[[Tensor], Tensor] = gradient
    if job.compute.precision == "bfloat16":
        reduced = torch.autocast(job.device.type, torch.bfloat16)

        def at_outputs(out: Tensor) -> Tensor:
            with torch.autocast(job.device.type, enabled=False):  # losses may compute products, too
                return gradient(out.float())

    if net.accumulate:
        with reduced:
            net.accumulate(params, batch.x, at_outputs, into, beta, alpha, **options)
        return

    def apply(leaves: Params, x: Tensor, **options: Any) -> Tensor:
        with reduced:
            return net.apply(leaves, x, **options)

    accumulate_by_autograd(apply, params, batch.x, gradient, into, beta, alpha, **options)
