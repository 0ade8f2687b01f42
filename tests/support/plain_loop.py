"""The readable twin of the stacked engine: one torch.nn module per client, torch.optim, Python loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
import trainer
from torch import nn

from fedstat._utils import streams
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job
from fedstat.stats import factor, split


def module(sizes: list[int]) -> nn.Sequential:
    parts: list[tuple[str, nn.Module]] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes), 1):
        parts += [(f"fc{i}", nn.Linear(n_in, n_out)), (f"relu{i}", nn.ReLU())]
    net = nn.Sequential()
    for name, part in parts[:-1]:
        net.add_module(name, part)
    return net


def samples(data: Rows, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's x and y."""
    rows = slice(data.start[client], data.start[client + 1])
    return data.x[rows], data.y[rows]


def shuffled(n: int, batch_size: int | None, epochs: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Rows of batches, epoch by epoch."""
    size = min(batch_size or n, n)
    for order in rng.permuted(np.tile(np.arange(n), (epochs, 1)), axis=1):
        for low in range(0, n, size):
            yield torch.from_numpy(order[low : low + size])


def batches(job: Job, client: int, *key: str | int, epochs: int | None = None) -> Iterator[torch.Tensor]:
    """Rows of a client's batches, drawn from its stream."""
    n, rng = int(job.train.sizes[client]), streams.generator(job.seed, *key, int(client))
    return shuffled(n, job.batch_size, job.local_epochs if epochs is None else epochs, rng)


def of_units(flags: np.ndarray) -> dict[str, np.ndarray | bool]:
    """The split that shares units of the first of two layers."""
    return {"fc1.weight": flags[:, None], "fc1.bias": flags, "fc2.weight": np.True_, "fc2.bias": np.True_}


def by_communality(weights: np.ndarray) -> np.ndarray:
    """Flags of the units that a factor analysis of weights (client, unit, input) shares."""
    r = np.corrcoef(np.concatenate([w.astype(float).T for w in weights]), rowvar=False)
    return split.shared(factor.fit(r, kappa=0.7).communality)


def mean(models: Sequence[dict[str, torch.Tensor]], weights: Iterable[float]) -> dict[str, torch.Tensor]:
    weights = [*weights]
    return {name: sum(w * m[name] for w, m in zip(weights, models, strict=True)) for name in models[0]}


def mean_by_samples(
    job: Job, clients: Iterable[int], models: Sequence[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    n = torch.tensor([float(job.train.sizes[c]) for c in clients])
    return mean(models, n / n.sum())


def accuracy(out: torch.Tensor, y: torch.Tensor) -> float:
    guess = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(1)
    return (guess == y).float().mean().item()


def accuracies(job: Job, predict: Callable[[int, torch.Tensor], torch.Tensor]) -> np.ndarray:
    """Test accuracy (client,) of what ``predict(client, x)`` gives."""
    each = (samples(job.test, c) for c in range(job.clients))
    return np.array([accuracy(predict(c, x), y) for c, (x, y) in enumerate(each)])


def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if out.shape[1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float())
    return nn.functional.cross_entropy(out, y)


def descend(optimizer: torch.optim.Optimizer, value: torch.Tensor) -> None:
    """Take a step down the gradient of a loss."""
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def train_client(
    net, x, y, make_optimizer, *, epochs, batch_size, rng,
    penalty=None, is_trainable=None, memory=None, held=None, after=None,
) -> None:  # fmt: skip
    """Plain local training: shuffled batches, mean loss, one optimiser over the parameters that train.

    ``memory``, a dict, keeps the optimiser's state from call to call; entries where ``held`` is True do not move.
    ``after`` changes the parameters, by name, after every step.
    """
    named = dict(net.named_parameters())
    for name, p in named.items():
        p.requires_grad_(is_trainable is None or is_trainable(name))
    optimizer = make_optimizer([p for p in named.values() if p.requires_grad])
    if memory:
        optimizer.load_state_dict(memory["optimizer"])
    anchor = {name: p.detach().clone() for name, p in named.items()}
    for rows in shuffled(len(x), batch_size, epochs, rng):
        value = loss(net(x[rows]), y[rows])
        descend(optimizer, value if penalty is None else value + penalty(named, anchor))
        for name, mask in (held or {}).items():
            named[name].data[mask] = anchor[name][mask]
        if after is not None:
            after(named)
    if memory is not None:
        memory["optimizer"] = optimizer.state_dict()


def loaded(net: nn.Module, params: dict[str, torch.Tensor]) -> nn.Module:
    net.load_state_dict(params)
    return net


def scores(job: Job, make: Callable[[], nn.Module], models: Sequence[dict[str, torch.Tensor]]) -> np.ndarray:
    """Test accuracy (client,) of modules that hold the clients' parameters."""
    return accuracies(job, lambda c, x: loaded(make(), models[c])(x))


def trained(
    job: Job,
    net: nn.Module,
    params: dict[str, torch.Tensor],
    client: int,
    make_optimizer: Callable,
    *key: str | int,
    data: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options,
) -> dict[str, torch.Tensor]:
    """A client's parameters after local training of a module, with batches from the stream of the key."""
    x, y = samples(job.train, client) if data is None else data
    options = {"epochs": job.local_epochs, "rng": streams.generator(job.seed, *key, int(client))} | options
    train_client(loaded(net, params), x, y, make_optimizer, batch_size=job.batch_size, **options)
    return {name: p.detach().clone() for name, p in net.state_dict().items()}


def trained_alone(job: Job, sizes: list[int], make_optimizer: Callable) -> np.ndarray:
    """The first layer's weights (client, unit, input) of clients that trained by themselves before the first round."""
    start = job.net.init(streams.generator(job.seed, "start"))
    models = [trained(job, module(sizes), start, c, make_optimizer, "batches", -1, 0) for c in range(job.clients)]
    return np.stack([model["fc1.weight"].numpy() for model in models])


def run(
    job: Job,
    sizes: list[int] | Callable[[], nn.Module],
    make_optimizer: Callable,
    *,
    rounds: int,
    shared: Callable[[dict[str, np.ndarray], int], dict[str, np.ndarray | bool]],
    phases: tuple[dict, ...] = ({},),
    finetune: tuple[dict, ...] = (),
    before: dict[str, np.ndarray | bool] | None = None,
    mix: np.ndarray | None = None,
) -> tuple[list[dict[str, torch.Tensor]], np.ndarray]:
    """Train every client by itself and average entry by entry; returns client models and their test accuracies.

    ``sizes`` are those of an MLP's layers, or make a client's module.
    ``shared(weights, round)`` gets the active clients' trained parameters, stacked, and returns the split, which
    broadcasts against (client, ...); ``before`` is the split before the first round, by default all is shared.
    ``finetune`` are the phases that turn a downloaded model into the one that is evaluated.
    ``mix`` (client, client) holds what a client averages the active clients with, rows that sum to 1 or not.
    """
    clients = range(job.clients)
    server = job.net.init(streams.generator(job.seed, "start"))
    own = [{name: p.clone() for name, p in server.items()} for _ in clients]
    memory: list[dict | None] = [{} if job.optimizer_state == "keep" else None for _ in clients]

    def each(split: dict[str, np.ndarray | bool]) -> list[dict[str, torch.Tensor]]:
        whole = {name: np.broadcast_to(m, (job.clients, *server[name].shape)) for name, m in split.items()}
        return [{name: torch.tensor(m[c]) for name, m in whole.items()} for c in clients]

    masks = each(dict.fromkeys(server, np.True_) if before is None else before)

    def download(c: int) -> dict[str, torch.Tensor]:
        if mix is not None:
            return own[c]
        return {name: torch.where(masks[c][name], server[name], own[c][name]) for name in server}

    def train(c: int, key: tuple[str, int], phases: tuple[dict, ...], memory: dict | None = None) -> nn.Module:
        net = loaded(sizes() if callable(sizes) else module(sizes), download(c))
        for position, phase in enumerate(phases):
            trained(job, net, net.state_dict(), c, make_optimizer, *key, position, memory=memory, **phase)
        return net

    for number in range(rounds):
        active = trainer.active(job, number)
        for c in active:
            net = train(c, ("batches", number), phases, memory[c])
            own[c] = {name: p.detach().clone() for name, p in net.state_dict().items()}
        sent = {name: np.stack([own[c][name].numpy() for c in active]) for name in server}
        new = each(shared(sent, number))
        n = torch.tensor([float(job.train.sizes[c]) for c in active])
        for name in server:
            mean = sum(w * own[c][name] for w, c in zip(n / n.sum(), active, strict=True))
            was, shared_by_some = (sum(m[c][name].int() for c in clients) > 0 for m in (masks, new))
            moved = torch.where(was, server[name] + job.server_lr * (mean - server[name]), mean)
            server[name] = torch.where(shared_by_some, moved, server[name])
        if mix is not None:
            for i in active:
                weights = mix[i, active] / mix[i, active].sum()
                for name, all_ in sent.items():
                    mixed = torch.from_numpy(np.tensordot(weights, all_, 1)).float()
                    own[i][name] = torch.where(new[i][name], mixed, own[i][name])
        masks = new
    return [download(c) for c in clients], accuracies(job, lambda c, x: train(c, ("finetune", rounds), finetune)(x))


def run_fedem(
    job: Job, sizes: list[int], make_optimizer: Callable, *, rounds: int, components: int
) -> tuple[list[dict[str, torch.Tensor]], np.ndarray]:
    """FedEM, Marfoq et al. (2021), Algorithm 1: as :func:`run`, each client with K modules and mixture weights π."""
    drawn = job.net.init(streams.generator(job.seed, "start"))
    names = [f"component{k}_" for k in range(1, components + 1)]
    server = [{n.removeprefix(name): p for n, p in drawn.items() if n.startswith(name)} for name in names]
    pi = {c: np.full(components, 1 / components) for c in range(job.clients)}

    def downloaded() -> list[nn.Sequential]:
        return [loaded(module(sizes), state) for state in server]

    def probability(net: nn.Module, x: torch.Tensor) -> np.ndarray:
        return torch.softmax(net(x).double(), 1).detach().numpy()

    for number in range(rounds):
        trained, active = [], trainer.active(job, number)
        for c in active:
            nets, (x, y) = downloaded(), samples(job.train, c)
            joint = np.stack(
                [w * probability(net, x)[np.arange(len(y)), y] for w, net in zip(pi[c], nets, strict=True)]
            )
            r = torch.from_numpy(joint / joint.sum(0)).float()
            pi[c] = r.double().mean(1).numpy()
            for net, weight in zip(nets, r, strict=True):
                optimizer = make_optimizer(net.parameters())
                for rows in batches(job, c, "batches", number, 0):
                    each = nn.functional.cross_entropy(net(x[rows]), y[rows], reduction="none")
                    descend(optimizer, (weight[rows] * each).mean())
            trained.append(nets)
        server = [mean_by_samples(job, active, [nets[k].state_dict() for nets in trained]) for k in range(components)]
    shared = {name + n: p for name, state in zip(names, server, strict=True) for n, p in state.items()}

    def mixture(c: int, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(sum(w * probability(net, x) for w, net in zip(pi[c], downloaded(), strict=True)))

    models = [shared | {"mixture.weight": torch.from_numpy(pi[c]).float()} for c in range(job.clients)]
    return models, accuracies(job, mixture)


def run_shrunken(
    job: Job, sizes: list[int], make_optimizer: Callable, *, rounds: int, grid: list[float], by: str = "pooled"
) -> tuple[list[dict[str, torch.Tensor]], np.ndarray, np.ndarray]:
    """FedAvg's models, the accuracies of W + B (W' − W), and B of each client.

    B is chosen on the validation samples, or, if the job has none, across two halves of the training samples.
    """
    models, _ = run(job, sizes, make_optimizer, rounds=rounds, shared=lambda w, _: dict.fromkeys(w, np.True_))

    def finetuned(c: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return trained(job, module(sizes), models[c], c, make_optimizer, "finetune", rounds, 0, data=(x, y))

    def between(c: int, tuned: dict[str, torch.Tensor], step: float, x: torch.Tensor) -> torch.Tensor:
        return loaded(module(sizes), {name: p + step * (tuned[name] - p) for name, p in models[c].items()})(x).detach()

    def held_out_loss(c: int, step: float) -> float:
        x, y = samples(job.train, c)
        if job.validation is not None:
            folds = [((x, y), samples(job.validation, c))]
        else:
            order = streams.generator(job.seed, "halves", rounds, int(c)).permutation(len(x))
            first, second = order[: (len(x) + 1) // 2], order[(len(x) + 1) // 2 :]
            folds = [((x[a], y[a]), (x[b], y[b])) for a, b in ((first, second), (second, first))]
        out = [(between(c, finetuned(c, *own), step, held[0]), held[1]) for own, held in folds]
        return sum(nn.functional.cross_entropy(guess, y, reduction="sum").item() for guess, y in out)

    voters = [c for c in trainer.active(job, rounds - 1) if job.validation is not None or job.train.sizes[c] > 1]
    if by == "pooled":
        pooled = [sum(held_out_loss(c, step) for c in voters) for step in grid]
        steps = np.full(job.clients, grid[int(np.argmin(pooled))])
    else:
        steps = np.array([grid[int(np.argmin([held_out_loss(c, step) for step in grid]))] for c in range(job.clients)])
    found = accuracies(job, lambda c, x: between(c, finetuned(c, *samples(job.train, c)), steps[c], x))
    return models, found, steps
