"""The motivating study: one MLP for each client, and how its hidden neurons differ between clients (FedFac §1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstat import data, store
from fedstat._utils import check
from fedstat._utils.lazy import torch, xr
from fedstat._utils.settings import check_fields, setting
from fedstat._utils.streams import generator
from fedstat.fl import algorithms, batches, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import ComputeConfig, Job
from fedstat.fl.loop import observed_round, start
from fedstat.fl.nets import Net, Params
from fedstat.fl.state import Download
from fedstat.motivation import statistics
from fedstat.store import Group, Target
from fedstat.study import grid
from fedstat.study.grid import Cell, Make

SOURCE = (
    "Wang, Tang, Li: Factor-assisted federated learning for personalized optimization with heterogeneous data, "
    "section 1, Figs. 1 and 2"
)
PARTITIONS: dict[str, Callable[..., xr.Dataset]] = {"iid": data.partition.iid, "one-class": data.partition.one_class}
OUTPUTS = ("own", "common")
COMMAND = "fedstat.motivation"


class Samples(NamedTuple):
    """Inputs x (sample, ...) and classes y (sample,)."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Settings:
    """Settings of the study; the paper gives the data, clients and hidden units, its published code the training.

    Parameters
    ----------
    data : str
        Name of an image data set of :func:`fedstat.data.load`; its training split is divided among the clients.
    cases : tuple of {"iid", "one-class"}
        Partitions: samples at random, or every class cut into equal shards, one per client.
    clients, hidden : int
        C, and the ReLU units of the one hidden layer.
    local_epochs, batch_size, lr
        Training of every client by Adam.
    mean, sd : float
        Inputs are (pixel / largest pixel − mean) / sd.
    common_samples : int
        Samples of the common evaluation set, drawn from the test split, or from all samples where there is none.
    k : int
        Neighbour of the entropy estimate.
    kappa : float
        Share of the eigenvalues' sum that decides the number of factors.
    replicates : int
        Half-samples of the clients behind the intervals of the rank correlations.
    seed : int
        Seed of the partition, the start, the batches and the half-samples.
    """

    data: str = setting("digits", "data", f"image data set, of {', '.join(data.SOURCES)}", choices=tuple(data.SOURCES))
    cases: tuple[str, ...] = setting(
        tuple(PARTITIONS), "data", "partitions among the clients", choices=tuple(PARTITIONS), distinct=True
    )
    clients: int = setting(100, "data", "clients C", low=1)
    hidden: int = setting(200, "method", "hidden units", low=1)
    local_epochs: int = setting(5, "training", "epochs of training", low=1)
    batch_size: int = setting(16, "training", "samples in a batch", low=1)
    lr: float = setting(1e-3, "training", "learning rate of Adam", above=0)
    mean: float = setting(0.0, "data", "subtracted from the inputs in [0, 1]")
    sd: float = setting(1.0, "data", "divisor of the inputs, after the mean is subtracted", above=0)
    common_samples: int = setting(2000, "data", "samples of the common evaluation set", low=1)
    k: int = setting(3, "method", "neighbour of the entropy estimate", low=1)
    kappa: float = setting(
        0.75,
        "method",
        "share of the eigenvalues' sum that decides the number of factors; pa takes at most 50 steps, and many factors "
        "need more",
        above=0,
        high=1,
    )
    replicates: int = setting(100, "method", "half-samples of the clients behind intervals", low=2)
    seed: int = setting(0, "training", "seed of every draw", low=0)

    def __post_init__(self) -> None:
        check_fields(self)
        # Half of the clients must hold more than k, or their entropy is undefined.
        check.integer("clients", self.clients, low=2 * (self.k + 1))


def study(
    *,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: bool = False,
    **settings: Any,
) -> xr.DataTree:
    """Train one MLP for each client from one start, and measure how its hidden neurons differ between clients.

    FedFac §1, Figs. 1 and 2.

    Parameters
    ----------
    data_dir : path, optional
        Folder of the data set's files, as in :func:`fedstat.data.load`; not needed for the digits.
    out : path, optional
        Store to write, a zarr folder; without it the study is kept in memory.
    resume : bool
        Go on with the study at ``out``, if there is one: cases that are complete stay.
    device, client_chunk, threads
        As in :func:`fedstat.fl.train`; they change no draw, and results only by float32 rounding.
    progress : bool
        Show a progress bar on stderr.
    **settings
        See :class:`fedstat.motivation.Settings`.

    Returns
    -------
    DataTree
        ``/outputs``: mean_output (case, outputs, client, unit), the mean activation of a hidden neuron over a client's
        own training samples or over the common set; accuracy (case, outputs, client) on them; label (case, client),
        the client's commonest class.
        ``/dispersion``: entropy, std_error (case, outputs, unit) in nats, of the outputs over clients less atoms; n,
        the clients it rests on; atom_share, the share of the clients in atoms; zero_share; spread, the standard
        deviation.
        ``/split``: communality (case, on, estimator, unit) of the clients' weights or updates, and n_factors,
        converged (case, on, estimator).
        ``/relation``: spearman (case, outputs, on, estimator), the rank correlation of entropy and communality over
        neurons, and spearman_half (…, replicate) on random halves of the clients.
        ``/weights/<layer>``: w, b (case, client, unit, …) and start_w, start_b.

    Raises
    ------
    ValueError
        If a setting is out of range, the data are not images, or ``resume`` meets a study with other settings.
    FileNotFoundError
        If the data set's files are not there.

    Examples
    --------
    >>> run = study(clients=10, hidden=8, local_epochs=1, replicates=2)
    >>> run["dispersion/entropy"].sizes
    Frozen({'case': 2, 'outputs': 2, 'unit': 8})
    """
    chosen = Settings(**settings)
    machine = ComputeConfig(device=device, client_chunk=client_chunk, threads=threads)
    images = cache(partial(_images, chosen, data_dir))  # not read for a study that is complete
    made = grid.Study(
        title="Motivating study",
        command=COMMAND,
        references=SOURCE,
        config=asdict(chosen),
        layout=lambda: _layout_of(chosen, images()),
        cells=[Cell(case, {"case": i}) for i, case in enumerate(chosen.cases)],
        begin=lambda writer, where: _begin(chosen, images(), writer, where),
        done="outputs/done",
        unit="case",
    )
    return grid.make(made, machine, out=out, resume=resume, progress=progress)


def _images(settings: Settings, data_dir: str | Path | None) -> xr.Dataset:
    return data.to_float(data.load(settings.data, data_dir), mean=settings.mean, sd=settings.sd)


def _require_dealt(settings: Settings, images: xr.Dataset) -> None:
    """Deal the labels alone in all cases, so that what cannot be dealt is said before the first is trained."""
    labels = _training(images)
    labels = labels.drop_vars("x").assign(x=("sample", np.zeros(labels.sizes["sample"], np.uint8)))
    for case in settings.cases:
        PARTITIONS[case](labels, clients=settings.clients, seed=settings.seed)


def _layout_of(settings: Settings, images: xr.Dataset) -> dict[str, Group]:
    """Layout of a new store, after the look at what cannot be dealt."""
    _require_dealt(settings, images)
    return _layout(settings, _net(settings, images))


def _training(images: xr.Dataset) -> xr.Dataset:
    return images.isel(sample=np.flatnonzero(images["split"].to_numpy() == "train"))


def _begin(settings: Settings, images: xr.Dataset, writer: Target, machine: ComputeConfig) -> Make:
    """How one case is made."""
    common = Samples(*(part.to(machine.device) for part in _common(settings, images)))
    train, net = _training(images), _net(settings, images)

    def make(cell: Cell, tick: Callable[[], object]) -> None:
        (i,) = cell.where
        fed = PARTITIONS[settings.cases[i]](train, clients=settings.clients, seed=settings.seed)
        job = _job(settings, net, batches.rows_of(fed, "train", common.x.device), machine)
        before = start(job)
        after, _ = observed_round(job, before, ())
        models = Download(job, after).models()
        _write_case(settings, writer, i, job, models, before.global_params, common)
        writer.write("outputs/done", (i,), True)
        writer.commit()
        tick()

    return make


def _net(settings: Settings, images: xr.Dataset) -> Net:
    inputs = int(np.prod(images["x"].shape[1:]))
    return nets.mlp([inputs, settings.hidden, int(images["y"].max()) + 1])


def _job(settings: Settings, net: Net, rows: Rows, machine: ComputeConfig) -> Job:
    return Job(
        rows, rows, net, algorithms.local(), losses.for_outputs(nets.n_outputs(net)),
        optimizer=optim.adam(settings.lr), local_epochs=settings.local_epochs, batch_size=settings.batch_size,
        seed=settings.seed, compute=machine,
    )  # fmt: skip


def _common(settings: Settings, images: xr.Dataset) -> Samples:
    split = images["split"].to_numpy()
    at = np.flatnonzero(split == "test") if (split == "test").any() else np.arange(len(split))
    n = min(settings.common_samples, len(at))
    at = np.sort(generator(settings.seed, "motivation", "common").choice(at, n, replace=False))
    return Samples(torch.from_numpy(images["x"].to_numpy()[at]), torch.from_numpy(images["y"].to_numpy()[at]))


def mean_outputs(net: Net, params: Params, samples: Callable[[int], Samples]) -> tuple[np.ndarray, np.ndarray]:
    """Mean activations of the first layer's ReLU units, and the share of right predictions, client by client.

    Parameters
    ----------
    net : Net
        As :func:`fedstat.fl.nets.mlp` makes it.
    params : Params (client, ...)
    samples : callable (client) -> Samples
        Samples on which a client's model is evaluated.

    Returns
    -------
    mean_output : array (client, unit)
    accuracy : array (client,)
    """
    weight, bias = params["fc1.weight"], params["fc1.bias"]
    mean, accuracy = np.empty(weight.shape[:2]), np.empty(len(weight))
    for c in range(len(weight)):
        x, y = samples(c)
        hidden = torch.relu(torch.addmm(bias[c], x.flatten(1), weight[c].T))
        mean[c] = hidden.double().mean(0).cpu().numpy()
        guess = net.apply({name: p[c : c + 1] for name, p in params.items()}, x[None])[0].argmax(-1)
        accuracy[c] = float((guess == y).double().mean())
    return mean, accuracy


def _write_case(
    settings: Settings, writer: Target, i: int, job: Job, params: Params, server: Params, common: Samples
) -> None:
    """Outputs, their entropy, the weights' communality, and the relation of the two, of case number i."""
    first = job.train.start

    def own(c: int) -> Samples:
        return Samples(job.train.x[first[c] : first[c + 1]], job.train.y[first[c] : first[c + 1]])

    for name, p in params.items():
        layer, kind = nets.layer_of(name), {"weight": "w", "bias": "b"}[name.rpartition(".")[2]]
        writer.write(f"weights/{layer}/{kind}", (i,), p.cpu().numpy())
        writer.write(f"weights/{layer}/start_{kind}", (), server[name].cpu().numpy())
    label = np.array([np.bincount(own(c).y.cpu().numpy()).argmax() for c in range(job.clients)])
    writer.write("outputs/label", (i,), label)
    seen = [mean_outputs(job.net, params, samples) for samples in (own, lambda _: common)]
    for j, (mean, accuracy) in enumerate(seen):
        writer.write("outputs/mean_output", (i, j), mean)
        writer.write("outputs/accuracy", (i, j), accuracy)
        for name, values in statistics.dispersion(mean, k=settings.k).items():
            writer.write(f"dispersion/{name}", (i, j), values)
    weights = params["fc1.weight"].cpu().numpy()
    start = server["fc1.weight"].cpu().numpy()
    strata = statistics.strata_of(settings.cases[i], label)
    found = statistics.relation(
        np.stack([mean for mean, _ in seen]), np.stack([weights, weights - start]),
        statistics.halves(strata, settings.replicates, seed=settings.seed), k=settings.k, kappa=settings.kappa,
    )  # fmt: skip
    for name, values in found.items():
        writer.write(name, (i,), values)


def _layout(settings: Settings, net: Net) -> dict[str, Group]:
    axes = {
        "case": [*settings.cases],
        "outputs": [*OUTPUTS],
        "on": [*statistics.ON],
        "estimator": [*statistics.ESTIMATORS],
        "client": settings.clients,
        "unit": settings.hidden,
        "replicate": settings.replicates,
    }
    by_unit, chunk = "case outputs unit", {"case": 1}
    group = partial(store.group, axes, chunk)
    groups = {
        "outputs": group(
            mean_output=("case outputs client unit", "float64", {}, {"outputs": 1}),
            accuracy=("case outputs client", "float64"),
            label=("case client", "int64", "commonest class of the client"),
            done=("case", "bool"),
        ),
        "dispersion": group(
            entropy=(by_unit, "float64", {"long_name": "entropy over clients", "units": "nats"}),
            std_error=(by_unit, "float64", {"units": "nats"}),
            n=(by_unit, "int64", "clients the entropy rests on"),
            atom_share=(by_unit, "float64", "share of clients with tied outputs"),
            zero_share=(by_unit, "float64", "share of clients with output 0"),
            spread=(by_unit, "float64", "standard deviation over clients"),
        ),
        "split": group(
            communality=("case on estimator unit", "float64"),
            n_factors=("case on estimator", "int64"),
            converged=("case on estimator", "bool"),
        ),
        "relation": group(
            spearman=("case outputs on estimator", "float64"),
            spearman_half=("case outputs on estimator replicate", "float64"),
        ),
    }
    for layer, units in nets.layers(net).items():
        groups[f"weights/{layer}"] = store.group(
            axes | {"unit": units, "weight": net.shapes[f"{layer}.weight"][1]},
            chunk,
            w=("case client unit weight", "float32", {}, {"client": 10}),
            b=("case client unit", "float32"),
            start_w=("unit weight", "float32"),
            start_b=("unit", "float32"),
        )
    return groups
