"""Gradient inversion on stored runs: leakage of images by round and client."""

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
from fedstat._utils.loops import progress_bar
from fedstat._utils.settings import check_fields, setting
from fedstat.attack.matching import Observed, Recovered, by_sign, matched, observe, recover
from fedstat.fl import batches, custom, nets
from fedstat.fl.chunks import each_chunk
from fedstat.fl.ending import COMMAND
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import ComputeConfig, Job
from fedstat.fl.loop import observed_round, start
from fedstat.fl.prepare import prepare
from fedstat.fl.state import State
from fedstat.results.leakage import LeakageResult, psnr
from fedstat.results.origin import recorded
from fedstat.study import experiment
from fedstat.study.federation import TEXTS, network, source_of
from fedstat.study.run_settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


_SAME = 1e-3  # largest relative difference of a loss by rounding


class Stored(NamedTuple):
    """A finished run: its name, store and settings."""

    name: str
    tree: xr.DataTree
    settings: Settings


def read_run(path: str | Path) -> Stored:
    """Open a finished run of ``python -m fedstat.fl`` on images.

    Raises
    ------
    ValueError
        If it is not such a run, is not finished, or was trained on texts, or with an algorithm or a network of a user's
        file, which is not executed because a store names it.
    """
    path = Path(path)
    tree = _cli.open_store(path, COMMAND)
    noted = experiment.settings_of(path)
    if "data" not in noted:
        raise ValueError(
            f"{path} does not say on which data it was trained: only runs of python -m fedstat.fl, or "
            "fedstat.study.run, can be attacked from their store. For others use fedstat.attack.leakage_of."
        )
    if "rmse" in tree["metrics"]:
        raise ValueError(
            f"{path} was trained on real-valued targets, but gradient inversion recovers images and their classes. "
            "Pass a run of a classifier."
        )
    if source_of(noted["data"])[0] in TEXTS:
        raise ValueError(f"{path} was trained on {noted['data']}: texts are token numbers, which have no gradient")
    for key in ("algorithm", "net"):
        if custom.is_in_file(name := noted.get(key)):
            raise ValueError(
                f"{path} was trained with the {key} {custom.short(str(name))}: repeating the run would execute a "
                "file that the store names. For such runs use fedstat.attack.leakage_of."
            )
    with store.reading(path):
        return Stored(noted["algorithm"], tree, Settings(**noted))


def job_of(run: Stored, data_dir: str | Path | None, machine: ComputeConfig) -> tuple[Job, xr.Dataset]:
    """Rebuild the job and the clients' data of a run.

    Raises
    ------
    ValueError
        If the data differ from those of the run.
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
    """Yield the states of a run after given rounds (0: initial state), by repeating its training.

    Warns
    -----
    UserWarning
        If clients' losses differ from the stored ones: the version or the device differs.
    """
    state = start(job)
    for number in sorted(rounds):
        while state.round < number:
            state, _ = observed_round(job, state, ())
        if number:
            stored = run.tree["metrics/loss"].sel(round=number).to_numpy()
            losses = evaluate(job, state)["loss"] if np.isfinite(stored).any() else stored
            if not np.allclose(losses, stored, rtol=_SAME, equal_nan=True):
                check.warn(
                    f"{run.name}: repeated training has other losses after round {number} than the store, because the "
                    "code or the device differs. The attack uses the repeated training."
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
        Training images of each victim, drawn by the seed, equal for all runs and rounds.
    labels : {"given", "inferred", "both"}
        "given" if the attacker knows the classes.
    iterations : int
    restarts : int
        Number of random initial images; the one with the nearest gradient is kept.
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


@check.named_options(Attack)
@recorded
def leakage(
    runs: str | Path | Sequence[str | Path],
    *,
    rounds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    **attack: Any,
) -> LeakageResult:
    """Attack finished runs by gradient inversion (DLG; Zhu, Liu and Han 2019; FedDecomp §4.6, FedCP Appendix B).

    Each victim client takes one local step, as its method trains, on one image at a time. The attacker knows the
    network, the global model and the upload; for parameters that are never uploaded, the attacker uses the common
    initial parameters. :func:`recover` searches the image with the nearest gradient at the uploaded entries.

    Parameters
    ----------
    runs : path or sequence of path
        Stores of ``python -m fedstat.fl`` with equal data and partition. Training is repeated to get the states. For a
        method with runs of several seeds, conclusions also take seeds as the sample.
    rounds : sequence of int, optional
        Rounds before the attacked step; 0: initial parameters. By default rounds 10, 20, 30, 40 and 50, if all runs
        have them, or the last round.
    data_dir, device, client_chunk, threads
        See :func:`fedstat.study.experiment.run`.
    progress : bool or None
        Show how many attacks (run, round and value of ``labels``) are done; see :func:`fedstat.fl.train`.
    **attack
        See :class:`fedstat.attack.experiment.Attack`.

    Returns
    -------
    LeakageResult

    Raises
    ------
    ValueError
        If a run is not on images, lacks settings or a round, or uploads nothing; if runs differ in their data, or a
        client has too few images.
    """
    chosen = Attack(**attack)
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    if not paths:
        raise ValueError("runs must name at least one run, but got none")
    check.distinct("runs", [str(Path(path).resolve()) for path in paths])
    stored = [read_run(path) for path in paths]
    _require_equal_data(stored)
    numbers = rounds_of(rounds, [(run.name, run.settings.rounds) for run in stored])
    machine = ComputeConfig(device=device, client_chunk=client_chunk, threads=threads)
    parts = []
    with progress_bar(len(stored) * len(numbers) * len(modes_of(chosen.labels)), "attack", progress) as bar:
        for run in stored:
            job, fed = job_of(run, data_dir, replace(machine, precision=run.settings.precision))
            scale = fed.x.attrs["mean"], fed.x.attrs["sd"]
            parts.append(leaks(job, states(run, job, numbers), chosen, scale=scale, tick=bar.update))
    methods, seeds = [run.name for run in stored], [run.settings.seed for run in stored]
    has_seeds = len(set(seeds)) > 1
    names = [f"{name}, seed {seed}" if has_seeds else name for name, seed in zip(methods, seeds, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} {i}" for i, name in enumerate(names, 1)]
    data = _joined(parts, "run", np.array(names, object))
    return LeakageResult(data.assign_coords(method=("run", np.array(methods, object)), seed=("run", seeds)))


@recorded
def leakage_of(
    job: Job, *, rounds: Sequence[int], scale: tuple[Sequence[float], Sequence[float]] = ((0.0,), (1.0,)), **attack: Any
) -> LeakageResult:
    """Attack a job of any algorithm, network and images; ``scale`` is their mean and SD by channel.

    ``attack`` takes the settings of :class:`Attack`; see :func:`leakage`.
    """
    chosen = Attack(**attack)
    part = leaks(job, _states(job, rounds), chosen, scale=scale)
    data = _joined([part], "run", np.array([job.algorithm.name], object))
    return LeakageResult(
        data.assign_coords(method=("run", np.array([job.algorithm.name], object)), seed=("run", [job.seed]))
    )


def _joined(parts: Sequence[xr.Dataset], dim: str, values: np.ndarray) -> xr.Dataset:
    """Concatenate parts along a new dim; originals depend on the run alone."""
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
    """Return the values of ``labels`` that a setting stands for."""
    return list(LABELS) if labels == "both" else [labels]


def rounds_of(rounds: Sequence[int] | None, runs: Sequence[tuple[str, int]]) -> list[int]:
    """Return the rounds to attack; raise ValueError, naming the run, if a run lacks one."""
    last = min(n for _, n in runs)
    if rounds is None:
        return [n for n in ROUNDS if n <= last] or [last]
    if not rounds:
        raise ValueError("rounds must name at least one round, but got none")
    for number in check.distinct("rounds", list(rounds)):
        check.integer("rounds", number, low=0)
        for name, n in runs:
            if number > n:
                raise ValueError(f"round {number} is attacked, but {name} has {n} rounds")
    return sorted(rounds)


def _require_equal_data(runs: Sequence[Stored]) -> None:
    names = (
        "data",
        "partition",
        "clients",
        "max_samples",
        "min_samples",
        "test_fraction",
        "validation_fraction",
        "unseen_fraction",
        "stratify",
    )
    first = runs[0]
    for run in runs[1:]:
        for name in names:
            expected, value = getattr(first.settings, name), getattr(run.settings, name)
            if value != expected:
                raise ValueError(
                    f"runs must have the same images at the same clients, but {name} is {expected} of {first.name} and "
                    f"{value} of {run.name}"
                )


def leaks(
    job: Job,
    states: Iterable[tuple[int, State]],
    attack: Attack,
    *,
    scale: tuple[Sequence[float], Sequence[float]],
    tick: Callable[[int], object] = lambda _: None,
) -> xr.Dataset:
    """Attack one run and return the data of :class:`LeakageResult` without the dim ``run``."""
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
    class_means = _ClassMeans(job)
    numbers, by_round = [], []
    for number, state in states:
        matched(job, state)
        observed = [observe(job, state, clients, x[:, i], y[:, i]) for i in range(attack.images)]
        by_mode, recovered = [], None
        labels: Tensor | None = None
        for mode in modes:
            before, labels = labels, y if mode == "given" else _inferred(job, observed)
            if recovered is None or before is None or labels is None or not torch.equal(before, labels):
                recovered = _attacked(job, observed, start, box, attack.iterations, labels)
            by_mode.append(
                _scored(image(recovered.x), original, recovered, y, image(class_means.without(x, y, recovered.y)))
            )
            tick(1)
        numbers.append(number)
        by_round.append(_joined(by_mode, "labels", np.array(modes, object)))
    data = _joined(by_round, "round", np.array(numbers))
    data["original"] = ("client", "image", "channel", "row", "column"), original
    return data.assign_coords(
        client=job.labels(clients), sample=(("client", "image"), rows - job.train.start[clients][:, None])
    )


def _victims(job: Job, attack: Attack) -> tuple[np.ndarray, np.ndarray]:
    """Return victim clients (client,), ascending, and rows (client, image) of their images."""
    n = job.clients if attack.clients is None else attack.clients
    if n > job.clients:
        raise ValueError(f"{n} clients are to be attacked, but the run has {job.clients}")
    clients = np.sort(streams.generator(attack.seed, "victims").permutation(job.clients)[:n])
    few = [c for c in clients if job.train.sizes[c] < attack.images]
    if few:
        raise ValueError(
            f"{attack.images} images of each client are to be attacked, but client {job.labels(few[0])} has "
            f"{job.train.sizes[few[0]]}. Ask for fewer images, or train with a larger min_samples."
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
    """Draw standard normal initial images (image, restart, ...) from the client's random stream."""
    rng = streams.generator(attack.seed, "attack", int(job.train.ids[client]))
    shape = (attack.images, attack.restarts, *like.shape)
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(like)


def _inferred(job: Job, observed: Sequence[Observed]) -> Tensor | None:
    """Return classes (client, image) if signs of gradients determine all of them, else None."""
    labels = [y for image in observed if (y := by_sign(job.net, image)) is not None]
    return torch.stack(labels, 1) if len(labels) == len(observed) else None


def _attacked(
    job: Job, observed: Sequence[Observed], start: Tensor, box: tuple[Tensor, Tensor], iterations: int, y: Tensor | None
) -> Recovered:
    """Attack all images and return the nearest restart of every client and image, (client, image, ...)."""
    n, images, restarts = start.shape[:3]
    total = n * images * restarts
    x, classes = torch.empty(total, *start.shape[3:]), torch.empty(total, dtype=torch.long)
    distance = torch.empty(total)
    flat = start.transpose(0, 1).flatten(0, 2)  # image by image, as they were observed
    order = np.repeat(np.arange(n), restarts)
    labels = None if y is None else y.T.repeat_interleave(restarts, 1).flatten()

    def work(span: slice) -> None:
        positions = np.arange(span.start, span.stop)
        for i in np.unique(positions // len(order)):
            rows = positions[positions // len(order) == i]
            recovered = recover(
                job.net, job.loss, observed[i].part(order[rows % len(order)]), flat[rows], box=box,
                iterations=iterations, y=None if labels is None else labels[rows],
            )  # fmt: skip
            x[rows], classes[rows], distance[rows] = recovered.x.cpu(), recovered.y.cpu(), recovered.distance.cpu()

    each_chunk(replace(job, batch_size=1), total, work)
    by = distance.view(images, n, restarts).transpose(0, 1)
    best = by.argmin(2, keepdim=True)

    def chosen(p: Tensor) -> Tensor:
        p = p.view(images, n, restarts, *p.shape[1:]).transpose(0, 1)
        index = best.view(*best.shape, *(1,) * (p.ndim - 3)).expand(-1, -1, -1, *p.shape[3:])
        return p.gather(2, index).squeeze(2).to(start.device)

    return Recovered(chosen(x), chosen(classes), chosen(distance))


class _ClassMeans:
    """Class-mean images: they need the class and the training images, but no gradients."""

    def __init__(self, job: Job) -> None:
        x, y = job.train.x[:].double(), job.train.y
        classes = max(nets.n_outputs(job.net), 2)
        self._sum = x.new_zeros(classes, *x.shape[1:]).index_add_(0, y, x)
        self._n = torch.bincount(y, minlength=classes)

    def without(self, x: Tensor, y: Tensor, classes: Tensor) -> Tensor:
        """Return mean images of classes (client, image), without the images x of classes y.

        For a class without other images, it is the mean over all classes.
        """
        is_same = classes == y
        n = self._n[classes] - is_same.long()
        of_class = self._sum[classes] - x * is_same.view(*is_same.shape, 1, 1, 1)
        of_all = (self._sum.sum(0) - x) / (self._n.sum() - 1)
        alone = (n == 0).view(*n.shape, 1, 1, 1)
        return torch.where(alone, of_all, of_class / n.clamp(min=1).view(*n.shape, 1, 1, 1)).float()


def _scored(recovered: np.ndarray, original: np.ndarray, got: Recovered, y: Tensor, guess: np.ndarray) -> xr.Dataset:
    """Return the PSNR of recovered images, class-mean images, and images of the class from other clients' gradients."""
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
            "class_mean_psnr": (dims, psnr(guess, original)),
            "distance": (dims, got.distance.cpu().numpy()),
            "label_right": (dims, (got.y == y).cpu().numpy()),
            "recovered": ((*dims, "channel", "row", "column"), recovered),
        }
    )
