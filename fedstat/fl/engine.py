"""The round: local steps on client-stacked parameters, aggregation by mask. Pure functions of a job and a state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstat import _random
from fedstat.fl import batches, masks, nets
from fedstat.fl.algorithm import Algorithm, Phase, Split, Start, Uploads
from fedstat.fl.batches import Rows
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Gradient, Net, Params
from fedstat.fl.optim import Optimizer

# A chunk's parameters and one batch with its activations should stay in a core's cache between forward and backward.
_CHUNK_BYTES = 3.5e6
_EVALUATION_BLOCK = 256


@dataclass(frozen=True)
class Job:
    """Everything that decides a run; see :func:`fedstat.fl.train` for what the settings mean."""

    train: Rows
    test: Rows
    net: Net
    algorithm: Algorithm
    loss: Loss
    optimizer: Optimizer
    participation: float = 1.0
    local_epochs: int = 1
    batch_size: int | None = None
    server_lr: float = 1.0
    optimizer_state: Literal["reset", "keep"] = "reset"
    seed: int = 0
    client_chunk: int | None = None
    threads: int = 1

    @property
    def device(self) -> torch.device:
        """Where the data are, and so where everything is computed."""
        return self.train.x.device

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train.start) - 1


class State(NamedTuple):
    """A run between two rounds.

    Attributes
    ----------
    round : int
        Rounds done.
    params : Params (client, ...)
        Every client's own copy; shared entries of clients that were inactive are behind until they download.
    server : Params (...)
        The server's copy of every entry, shared or not.
    split : Split
    optimizer : Params (client, ...)
        Clients' optimiser state; empty unless it is kept between rounds.
    """

    round: int
    params: Params
    server: Params
    split: Split
    optimizer: Params


def start(job: Job) -> State:
    """State before the first round: one start for all clients."""
    server = {name: p.to(job.device) for name, p in job.net.init(_random.generator(job.seed, "start")).items()}
    params = {name: p.expand(job.clients, *p.shape).clone() for name, p in server.items()}

    def pretrain(epochs: int | None) -> Params:
        alone = State(-1, params, server, Split(masks.nothing(job.net, job.device)), {})
        order = _by_size(job, np.arange(job.clients))
        return {name: p[np.argsort(order)] for name, p in _local(job, alone, order, (Phase(epochs),))[0].items()}

    split = job.algorithm.split(Start(job.net, job.train.sizes, job.seed, job.device, pretrain))
    kept = job.optimizer.init(params) if job.optimizer_state == "keep" else {}
    return State(0, params, server, split, kept)


def step(job: Job, state: State) -> State:
    """One communication round: download, local training, split, aggregation (FedFac Alg. 1 and 2).

    Raises
    ------
    FloatingPointError
        If a client's parameters are no longer finite after local training.
    """
    algorithm = job.algorithm
    clients = _by_size(job, active(job, state.round))
    after, optimizer = _local(job, state, clients, algorithm.phases)
    sizes = torch.from_numpy(job.train.sizes[clients]).to(job.device, torch.float32)
    weights = sizes / sizes.sum()
    mean = {name: torch.mv(p.flatten(1).T, weights).view(p.shape[1:]) for name, p in after.items()}
    _require_finite(mean, after, clients, state.round)

    uploads = Uploads(
        job.net, state.round, job.seed, clients, weights, lambda: _personal(job, state, clients), after, state.split
    )
    split = algorithm.resplit(uploads) if algorithm.resplit else state.split
    if algorithm.mix:
        mixture = algorithm.mix(uploads)
        for name, p in after.items():
            after[name] = torch.where(split.shared[name], torch.tensordot(mixture, p, 1), p)
    server = {name: _server_step(job, state, split.shared[name], name, mean[name]) for name in mean}
    params = after
    if len(clients) < job.clients or (clients[1:] < clients[:-1]).any():
        at = torch.from_numpy(clients).to(job.device)
        params = {name: state.params[name].index_copy(0, at, p) for name, p in after.items()}
    return State(state.round + 1, params, server, split, optimizer)


def evaluate(job: Job, state: State) -> dict[str, np.ndarray]:
    """Test accuracy and mean test loss of every client's personal model, inactive clients caught up: (client,)."""
    data, loss = job.test, job.loss
    accuracy, losses = torch.zeros(job.clients), torch.zeros(job.clients)
    clients = _by_size(job, np.arange(job.clients))

    def work(span: slice) -> None:
        chunk = clients[span]
        params = _personal(job, state, chunk)
        sizes = torch.from_numpy(data.sizes[chunk])
        first = torch.from_numpy(data.start[chunk])
        right, total = torch.zeros(len(chunk)), torch.zeros(len(chunk))
        for low in range(0, int(sizes.max()), _EVALUATION_BLOCK):
            at = torch.arange(low, min(low + _EVALUATION_BLOCK, int(sizes.max())))
            real = (at < sizes[:, None]).to(job.device)
            rows = (first[:, None] + torch.minimum(at, sizes[:, None] - 1)).to(job.device)
            with torch.no_grad():
                out = job.net.apply(params, data.x[rows])
                y = data.y[rows]
                right += ((loss.predict(out) == y) & real).sum(1).cpu()
                total += (loss.value(out, y) * real).sum(1).cpu()
        accuracy[chunk], losses[chunk] = right / sizes, total / sizes

    _each_chunk(job, state.server, len(clients), work)
    return {"accuracy": accuracy.numpy(), "loss": losses.numpy()}


def timed_step(job: Job, state: State) -> tuple[State, dict[str, np.ndarray]]:
    """A round and its evaluation: the new state, and accuracy, loss (client,) with the wall time of the round."""
    begun = time.perf_counter()
    state = step(job, state)
    seconds = time.perf_counter() - begun
    return state, evaluate(job, state) | {"seconds": np.asarray(seconds)}


def personal(job: Job, state: State) -> Params:
    """Every client's model as it would predict with it now: parameters (client, ...)."""
    return _personal(job, state, np.arange(job.clients))


def active(job: Job, number: int) -> np.ndarray:
    """Clients that take part in round ``number``, rising: the ⌈participation·C⌋ with the smallest draws."""
    k = max(1, round(job.participation * job.clients))
    if k == job.clients:
        return np.arange(k)
    draws = [_random.generator(job.seed, "participation", number, c).random() for c in range(job.clients)]
    return np.sort(np.argsort(draws, kind="stable")[:k])


def _local(job: Job, state: State, clients: np.ndarray, phases: tuple[Phase, ...]) -> tuple[Params, Params]:
    """Download and train the given clients: their parameters (active, ...) and all clients' optimiser state."""
    after = {name: p.new_empty(len(clients), *p.shape) for name, p in state.server.items()}
    optimizer = {name: p.clone() for name, p in state.optimizer.items()}

    def work(span: slice) -> None:
        chunk = _personal(job, state, clients[span], {name: p[span] for name, p in after.items()})
        kept = {name: p[clients[span]] for name, p in optimizer.items()}
        _train(job, chunk, clients[span], state.round, phases, kept)
        for name, p in kept.items():
            optimizer[name][clients[span]] = p

    _each_chunk(job, state.server, len(clients), work)
    return after, optimizer


def _train(job: Job, params: Params, clients: np.ndarray, number: int, phases: tuple[Phase, ...], kept: Params) -> None:
    """Local training of one chunk of clients, in place."""
    state = kept or job.optimizer.init(params)
    accumulate = job.net.accumulate or partial(_autograd, job.net)
    for position, phase in enumerate(phases):
        trained = [name for name in params if phase.trains(name)]
        anchor = {name: p.clone() for name, p in params.items()} if phase.penalty else {}
        lr = None if phase.penalty else job.optimizer.plain_lr
        grads = {name: torch.zeros_like(params[name]) for name in trained} if lr is None else {}
        plan = batches.plan(
            job.train,
            clients,
            epochs=job.local_epochs if phase.epochs is None else phase.epochs,
            batch_size=job.batch_size,
            seed=job.seed,
            key=("batches", number, position),
        )
        y, live = job.train.y[plan.rows], 0
        for s, k in enumerate(plan.live):
            if k != live:  # the first k clients still have batches; views of them, made anew when k falls
                live, now = k, _first(params, k)
                into, before, optimizer = _first(grads, k), _first(anchor, k), _first(state, k)
                if lr is not None:
                    into = {name: now[name] for name in trained}
            rows = plan.rows[s, :k]
            x = job.train.x.index_select(0, rows.flatten()).view(*rows.shape, *job.train.x.shape[1:])
            gradient = partial(job.loss.gradient, y=y[s, :k], weight=plan.weight[s, :k])
            if lr is not None:
                accumulate(now, x, gradient, into, 1.0, -lr)
                continue
            accumulate(now, x, gradient, into, 0.0, 1.0)
            if phase.penalty:
                for name, extra in phase.penalty(now, before).items():
                    if name in into:
                        into[name].add_(extra)
            job.optimizer.step(now, into, optimizer)


def _first(params: Params, k: int) -> Params:
    return {name: p[:k] for name, p in params.items()}


def _autograd(net: Net, params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float) -> None:
    """``Net.accumulate`` for networks that only know how to go forward."""
    # .data, not detach(): chunks are views of one tensor, and another thread's step is no change here.
    leaves = {name: p.data.requires_grad_(name in into) for name, p in params.items()}
    out = net.apply(leaves, x)
    grads = torch.autograd.grad(out, [leaves[name] for name in into], gradient(out.detach().clone()))
    for total, grad in zip(into.values(), grads, strict=True):
        total.mul_(beta).add_(grad, alpha=alpha)


def _personal(job: Job, state: State, clients: np.ndarray, into: Params | None = None) -> Params:
    """Download: the server's copy where an entry is shared, the client's own elsewhere."""
    if into is None:
        into = {name: p.new_empty(len(clients), *p.shape) for name, p in state.server.items()}
    for name, p in into.items():
        own, shared = _take(state.params[name], clients), state.split.shared[name]
        if job.algorithm.mix:  # such a server sends every client its own mixture, which is in place already
            p.copy_(own)
        else:
            torch.where(shared, state.server[name], own, out=p)
    return into


def _take(p: Tensor, clients: np.ndarray) -> Tensor:
    """Rows of some clients; a view where they follow one another."""
    if len(clients) == clients[-1] - clients[0] + 1 and (np.diff(clients) == 1).all():
        return p[clients[0] : clients[-1] + 1]
    return p[clients]


def _server_step(job: Job, state: State, shared: Tensor, name: str, mean: Tensor) -> Tensor:
    """W ← W + η_g (mean − W) where an entry stays shared, the mean where it turns shared, the old copy elsewhere.

    A mask that differs between clients moves the server's copy wherever some client shares the entry.
    """
    old, was = state.server[name], state.split.shared[name]
    if shared.ndim > mean.ndim:
        shared = shared.any(0)
    if was.ndim > mean.ndim:
        was = was.any(0)
    moved = torch.where(was, torch.lerp(old, mean, job.server_lr), mean)
    return torch.where(shared, moved, old)


def _by_size(job: Job, clients: np.ndarray) -> np.ndarray:
    """Order clients by falling number of training samples, so that those still at work are always the first ones."""
    return clients[np.argsort(-job.train.sizes[clients], kind="stable")]


def _each_chunk(job: Job, server: Params, n: int, work: Callable[[slice], None]) -> None:
    """Do the work for every chunk of n clients, one chunk a thread on the CPU."""
    spans = list(chunks(job, server, n))
    if job.device.type != "cpu" or job.threads == 1 or len(spans) == 1:
        for span in spans:
            work(span)
        return
    with ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(work, spans))


def chunks(job: Job, server: Params, n: int) -> Iterator[slice]:
    """Cut n clients into chunks: ``client_chunk`` if given, else as many as fit a core's cache (CPU) or all (GPU)."""
    size = job.client_chunk or n
    if job.client_chunk is None and job.device.type == "cpu":
        batch = min(job.batch_size or np.inf, job.train.sizes.max()) * (
            job.train.x[0].numel() + sum(nets.layers(job.net).values())
        )
        bytes_each = 4 * (sum(p.numel() for p in server.values()) + batch)
        cuts = math.ceil(n / max(1.0, _CHUNK_BYTES / bytes_each) / job.threads) * job.threads
        size = math.ceil(n / min(n, cuts))
    return (slice(low, min(low + size, n)) for low in range(0, n, size))


def _require_finite(mean: Params, after: Params, clients: np.ndarray, number: int) -> None:
    for name, total in mean.items():
        if not bool(torch.isfinite(total).all()):
            bad = ~torch.isfinite(after[name].flatten(1)).all(1).cpu().numpy()
            raise FloatingPointError(
                f"training diverged in round {number}: {name} of client {int(clients[bad].min())} is not finite "
                f"({int(bad.sum())} of {len(clients)} active clients). Lower the learning rate, or scale the inputs."
            )
