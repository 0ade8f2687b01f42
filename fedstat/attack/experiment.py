"""The attack on stored runs: leakage of images by round and client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedstat import _cli, store
from fedstat._utils import check, streams
from fedstat._utils.lazy import torch, xr
from fedstat._utils.settings import check_fields, setting
from fedstat.attack.matching import Observed, Recovered, by_sign, matched, observe, recover
from fedstat.fl import batches, nets
from fedstat.fl.chunks import each_chunk
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import ComputeConfig, Job
from fedstat.fl.loop import observed_round, start
from fedstat.fl.prepare import prepare
from fedstat.fl.state import State
from fedstat.fl.training import COMMAND
from fedstat.results.leakage import LeakageResult, psnr
from fedstat.study import experiment
from fedstat.study.experiment import Settings
from fedstat.study.federation import TEXTS, network, source_of

if TYPE_CHECKING:
    from torch import Tensor


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
    job = prepare(fed, network(s, fed), s.make_algorithm(), s.training(), machine)
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
                check.warn(
                    f"{run.name} trained again has other losses after round {number} than its store: the code or the "
                    "device differs. The attack is on the run as it is made now."
                )
        yield number, state


ROUNDS = (10, 20, 30, 40, 50)
LABELS = ("given", "inferred")
Labels = Literal["given", "inferred", "both"]


@dataclass(frozen=True)
class Attack:
    """Settings of an attack.

    Parameters
    ----------
    clients : int, optional
        Number of victims, drawn by the seed; all by default.
    images : int
        Training images of each victim, drawn by the seed: the same for every run and round.
    labels : {"given", "inferred", "both"}
        Whether the attacker knows the classes.
    iterations : int
    restarts : int
        Starts from noise; the nearest gradient wins.
    seed : int
    """

    clients: int | None = setting(
        None, "method", "victims, drawn by the seed (default: all clients)", low=1, aliases=("--victims",)
    )
    images: int = setting(5, "method", "training images of each victim", low=1)
    labels: Labels = setting("both", "method", "whether the attacker knows the classes, or infers them")
    iterations: int = setting(200, "method", "steps of Adam", low=1)
    restarts: int = setting(1, "method", "starts from noise; the nearest wins", low=1)
    seed: int = setting(0, "method", "seed of victims, images and starts", low=0)

    def __post_init__(self) -> None:
        check_fields(self)


def leakage(
    runs: str | Path | Sequence[str | Path],
    *,
    rounds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: Callable[[int], object] | None = None,
    **attack: Any,
) -> LeakageResult:
    """Attack finished runs by deep leakage from gradients (Zhu, Liu and Han 2019; FedDecomp §4.6, FedCP Appendix B).

    Each victim client takes one local step, as its method trains, on one image at a time. The attacker knows the
    network, the server's copy of every entry, and what is sent; for parts that are never sent she uses the common
    start. She looks for the image whose gradient at the entries that are sent is nearest: :func:`recover`.

    Parameters
    ----------
    runs : path or sequence of path
        Stores of ``python -m fedstat.fl`` with the same data and partition. A run is trained again to have its states.
        Runs of one method with several seeds are judged together, with seeds as the sample.
    rounds : sequence of int, optional
        Rounds done before the attacked step, 0 being the common start. By default those of 10, 20, 30, 40 and 50 that
        all runs have, or the last.
    data_dir, device, client_chunk, threads
        See :func:`fedstat.study.experiment.run`.
    progress : callable (int), optional
        Called with 1 after every run, round and way to have the labels.
    **attack
        See :class:`fedstat.attack.experiment.Attack`.

    Returns
    -------
    LeakageResult

    Raises
    ------
    ValueError
        If a run is not one of images with its settings, lacks a round, or sends nothing; if runs differ in their data,
        or a client has fewer images than asked for.
    """
    chosen = Attack(**attack)
    given = [runs] if isinstance(runs, str | Path) else list(runs)
    if not given:
        raise ValueError("runs must name at least one run, but got none")
    found = [read(path) for path in given]
    _require_alike(found)
    at = rounds_of(rounds, [(one.name, one.settings.rounds) for one in found])
    machine = ComputeConfig(device=device, client_chunk=client_chunk, threads=threads)
    parts = []
    for one in found:
        job, fed = job_of(one, data_dir, replace(machine, precision=one.settings.precision))
        scale = fed.x.attrs["mean"], fed.x.attrs["sd"]
        parts.append(leaks(job, states(one, job, at), chosen, scale=scale, progress=progress))
    methods, seeds = [one.name for one in found], [one.settings.seed for one in found]
    several = len(set(seeds)) > 1
    names = [f"{name}, seed {seed}" if several else name for name, seed in zip(methods, seeds, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} {i}" for i, name in enumerate(names, 1)]
    data = _joined(parts, "run", np.array(names, object))
    return LeakageResult(data.assign_coords(method=("run", np.array(methods, object)), seed=("run", seeds)))


def leakage_of(
    job: Job, *, rounds: Sequence[int], scale: tuple[Sequence[float], Sequence[float]] = ((0.0,), (1.0,)), **attack: Any
) -> LeakageResult:
    """As :func:`leakage`, for a job of any algorithm, network and images; ``scale`` is their mean and sd by channel.

    ``attack`` takes the settings of :class:`Attack`.
    """
    chosen = Attack(**attack)
    found = leaks(job, _states(job, rounds), chosen, scale=scale)
    data = _joined([found], "run", np.array([job.algorithm.name], object))
    return LeakageResult(
        data.assign_coords(method=("run", np.array([job.algorithm.name], object)), seed=("run", [job.seed]))
    )


def _joined(parts: Sequence[xr.Dataset], dim: str, values: np.ndarray) -> xr.Dataset:
    """Parts along a new dim; originals depend on the run alone."""
    names = [name for name in parts[0] if dim == "run" or name != "original"]
    return xr.concat(
        parts, xr.Variable(dim, values), data_vars=names, coords=["sample"] if dim == "run" else "minimal",
        compat="override", join="override",
    )  # fmt: skip


def _states(job: Job, rounds: Iterable[int]) -> Iterable[tuple[int, State]]:
    state = start(job)
    for number in sorted(rounds):
        while state.round < number:
            state, _ = observed_round(job, state, ())
        yield number, state


def modes_of(labels: str) -> list[str]:
    """Ways to have the labels."""
    return list(LABELS) if labels == "both" else [labels]


def rounds_of(rounds: Sequence[int] | None, runs: Sequence[tuple[str, int]]) -> list[int]:
    """Rounds to attack; ValueError, naming the run, if one has no such round."""
    last = min(n for _, n in runs)
    if rounds is None:
        return [n for n in ROUNDS if n <= last] or [last]
    if not rounds:
        raise ValueError("rounds must name at least one round, but got none")
    for number in rounds:
        check.integer("rounds", number, low=0)
        for name, n in runs:
            if number > n:
                raise ValueError(f"round {number} is attacked, but {name} has {n} rounds")
    return sorted(set(rounds))


def _require_alike(found: Sequence[Stored]) -> None:
    names = ("data", "partition", "clients", "samples", "min_size", "test", "validation", "new_share")
    first = found[0]
    for one in found[1:]:
        for name in names:
            ours, theirs = getattr(first.settings, name), getattr(one.settings, name)
            if ours != theirs:
                raise ValueError(
                    f"runs must have the same images at the same clients, but {name} is {ours} of {first.name} and "
                    f"{theirs} of {one.name}"
                )


def leaks(
    job: Job,
    states: Iterable[tuple[int, State]],
    attack: Attack,
    *,
    scale: tuple[Sequence[float], Sequence[float]],
    progress: Callable[[int], object] | None = None,
) -> xr.Dataset:
    """What one run leaks, over the dims of :class:`LeakageResult` but ``run``."""
    first = job.train.x[:1]
    if first.ndim != 4 or not first.is_floating_point():
        raise ValueError(
            f"inputs must be images (channel, row, column), but samples have shape {tuple(first.shape[1:])} and "
            f"type {first.dtype}"
        )
    clients, rows = _victims(job, attack)
    mean, sd = (torch.tensor(v, dtype=torch.float32, device=job.device).view(-1, 1, 1) for v in scale)

    def image(x: Tensor) -> np.ndarray:
        return (x * sd + mean).clamp(0, 1).cpu().numpy()

    x, y = job.train.x[rows], job.train.y[rows]  # (client, image, ...)
    original, box = image(x), ((0 - mean) / sd, (1 - mean) / sd)
    start = torch.stack([_noise(attack, job, c, x[0, 0]) for c in clients])  # (client, image, restart, ...)
    modes = modes_of(attack.labels)
    guess = _Guess(job)
    numbers, found = [], []
    for number, state in states:
        matched(job, state)
        seen = [observe(job, state, clients, x[:, i], y[:, i]) for i in range(attack.images)]
        of_modes, got = [], None
        known: Tensor | None = None
        for mode in modes:
            before, known = known, y if mode == "given" else _inferred(job, seen)
            if got is None or before is None or known is None or not torch.equal(before, known):
                got = _attacked(job, seen, start, box, attack.iterations, known)
            of_modes.append(_scored(image(got.x), original, got, y, image(guess.without(x, y, got.y))))
            if progress:
                progress(1)
        numbers.append(number)
        found.append(_joined(of_modes, "labels", np.array(modes, object)))
    data = _joined(found, "round", np.array(numbers))
    data["original"] = ("client", "image", "channel", "row", "column"), original
    return data.assign_coords(
        client=job.ids(clients), sample=(("client", "image"), rows - job.train.start[clients][:, None])
    )


def _victims(job: Job, attack: Attack) -> tuple[np.ndarray, np.ndarray]:
    """Victim clients (client,), ascending, and rows (client, image) of their images."""
    n = job.clients if attack.clients is None else attack.clients
    if n > job.clients:
        raise ValueError(f"{n} clients are to be attacked, but the run has {job.clients}")
    clients = np.sort(streams.generator(attack.seed, "victims").permutation(job.clients)[:n])
    few = [int(c) for c in clients if job.train.sizes[c] < attack.images]
    if few:
        raise ValueError(
            f"{attack.images} images of each client are to be attacked, but client {few[0]} has "
            f"{job.train.sizes[few[0]]}. Ask for fewer images, or train with a larger min_size."
        )
    rows = [
        job.train.start[c]
        + streams.generator(attack.seed, "images", int(job.train.ids[c])).permutation(job.train.sizes[c])[
            : attack.images
        ]
        for c in clients
    ]
    return clients, np.stack(rows)


def _noise(attack: Attack, job: Job, client: int, like: Tensor) -> Tensor:
    """Standard normal images (image, restart, ...) to start from, of a client's own stream."""
    rng = streams.generator(attack.seed, "attack", int(job.train.ids[client]))
    shape = (attack.images, attack.restarts, *like.shape)
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(like)


def _inferred(job: Job, seen: Sequence[Observed]) -> Tensor | None:
    """Classes (client, image) where signs tell them, else None."""
    found = [y for one in seen if (y := by_sign(job.net, one)) is not None]
    return torch.stack(found, 1) if len(found) == len(seen) else None


def _attacked(
    job: Job, seen: Sequence[Observed], start: Tensor, box: tuple[Tensor, Tensor], iterations: int, y: Tensor | None
) -> Recovered:
    """The nearest of the restarts for every client and image, (client, image, ...)."""
    n, images, restarts = start.shape[:3]
    total = n * images * restarts
    x, classes = torch.empty(total, *start.shape[3:]), torch.empty(total, dtype=torch.long)
    distance = torch.empty(total)
    flat = start.transpose(0, 1).flatten(0, 2)  # image by image, as they were observed
    order = np.repeat(np.arange(n), restarts)
    known = None if y is None else y.T.repeat_interleave(restarts, 1).flatten()

    def work(span: slice) -> None:
        at = np.arange(span.start, span.stop)
        for i in np.unique(at // len(order)):
            own = at[at // len(order) == i]
            got = recover(
                job.net, job.loss, seen[i].part(order[own % len(order)]), flat[own], box=box, iterations=iterations,
                y=None if known is None else known[own],
            )  # fmt: skip
            x[own], classes[own], distance[own] = got.x.cpu(), got.y.cpu(), got.distance.cpu()

    each_chunk(replace(job, batch_size=1), total, work)
    by = distance.view(images, n, restarts).transpose(0, 1)
    best = by.argmin(2, keepdim=True)

    def chosen(p: Tensor) -> Tensor:
        p = p.view(images, n, restarts, *p.shape[1:]).transpose(0, 1)
        index = best.view(*best.shape, *(1,) * (p.ndim - 3)).expand(-1, -1, -1, *p.shape[3:])
        return p.gather(2, index).squeeze(2).to(start.device)

    return Recovered(chosen(x), chosen(classes), chosen(distance))


class _Guess:
    """What an attacker can guess who knows the class and the training images, and uses no gradient."""

    def __init__(self, job: Job) -> None:
        x, y = job.train.x[:].double(), job.train.y
        classes = max(nets.n_outputs(job.net), 2)
        self._sum = x.new_zeros(classes, *x.shape[1:]).index_add_(0, y, x)
        self._n = torch.bincount(y, minlength=classes)

    def without(self, x: Tensor, y: Tensor, known: Tensor) -> Tensor:
        """Mean image of the classes ``known`` (client, image) without the images x of classes y themselves.

        The mean of all classes where a class has no other image.
        """
        own = known == y
        n = self._n[known] - own.long()
        of_class = self._sum[known] - x * own.view(*own.shape, 1, 1, 1)
        of_all = (self._sum.sum(0) - x) / (self._n.sum() - 1)
        alone = (n == 0).view(*n.shape, 1, 1, 1)
        return torch.where(alone, of_all, of_class / n.clamp(min=1).view(*n.shape, 1, 1, 1)).float()


def _scored(recovered: np.ndarray, original: np.ndarray, got: Recovered, y: Tensor, guess: np.ndarray) -> xr.Dataset:
    """PSNR of the images, of the guess, and of images recovered from other clients' gradients for the same class."""
    n, images = original.shape[:2]
    classes, other = got.y.cpu().numpy(), np.full((n, images), np.nan)
    for c, i in np.ndindex(n, images):
        rest = recovered[(classes == classes[c, i]) & (np.arange(n) != c)[:, None]]
        if len(rest):
            other[c, i] = psnr(rest, original[c, i]).mean()
    dims = ("client", "image")
    return xr.Dataset(
        {
            "psnr": (dims, psnr(recovered, original)),
            "other": (dims, other),
            "guess": (dims, psnr(guess, original)),
            "distance": (dims, got.distance.cpu().numpy()),
            "label_right": (dims, (got.y == y).cpu().numpy()),
            "recovered": ((*dims, "channel", "row", "column"), recovered),
        }
    )
