"""Motivating study of FedFac (§1): one MLP per client, and differences of its hidden units between clients."""

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
from fedstat.study import cells
from fedstat.study.cells import Cell, Make

SOURCE = (
    "Wang, Tang, Li: Factor-assisted federated learning for personalized optimization with heterogeneous data, "
    "section 1, Figs. 1 and 2"
)
PARTITIONS: dict[str, Callable[..., xr.Dataset]] = {"iid": data.partition.iid, "one-class": data.partition.one_class}
OUTPUTS = ("own", "common")
COMMAND = "fedstat.motivation"


class Samples(NamedTuple):
    """Samples with inputs x (sample, ...) and classes y (sample,)."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Settings:
    """Settings of the study: data, clients and hidden units from the paper, training from its published code.

    Parameters
    ----------
    data : str
        Name of an image data set of :func:`fedstat.data.load`; its training samples are divided among the clients.
    cases : tuple of {"iid", "one-class"}
        Partitions. "iid" draws samples at random; "one-class" cuts every class into equal shards, one per client.
    clients, hidden : int
        Number of clients C, and of ReLU units in the single hidden layer.
    local_epochs, batch_size, lr
        Settings of every client's training by Adam.
    mean, sd : float
        Inputs are (pixel / largest pixel − mean) / sd.
    common_samples : int
        Number of samples in the common evaluation set, drawn from the test samples, or from all samples if a data set
        has no test samples.
    k : int
        Number k of the nearest neighbor in the entropy estimate.
    kappa : float
        Proportion of the eigenvalue sum that the factors must reach.
    replicates : int
        Number of random halves of the clients, for the CIs of the rank correlations.
    seed : int
        Seed of the partition, the initial parameters, the batches and the random halves.
    """

    data: str = setting("digits", "data", f"image data set: {', '.join(data.SOURCES)}", choices=tuple(data.SOURCES))
    cases: tuple[str, ...] = setting(
        tuple(PARTITIONS), "data", "partitions of samples among clients", choices=tuple(PARTITIONS), nonempty=True
    )
    clients: int = setting(100, "data", "number of clients C", low=1)
    hidden: int = setting(200, "method", "number of hidden units", low=1)
    local_epochs: int = setting(5, "training", "epochs of training", low=1)
    batch_size: int = setting(16, "training", "samples per batch", low=1)
    lr: float = setting(1e-3, "training", "learning rate of Adam", above=0)
    mean: float = setting(0.0, "data", "mean, subtracted from the inputs in [0, 1]")
    sd: float = setting(1.0, "data", "SD, by which the inputs are divided after the mean is subtracted", above=0)
    common_samples: int = setting(2000, "data", "samples in the common evaluation set", low=1)
    k: int = setting(3, "method", "k of the k-nearest-neighbor entropy estimate", low=1)
    kappa: float = setting(
        0.75,
        "method",
        "proportion of the eigenvalue sum that the factors must reach; pa stops after 50 iterations, and many factors "
        "need more",
        above=0,
        high=1,
    )
    replicates: int = setting(100, "method", "random halves of the clients, for the CIs of the correlations", low=2)
    seed: int = setting(0, "training", "seed of every draw", low=0)

    def __post_init__(self) -> None:
        check_fields(self)
        # The entropy of half of the clients is undefined unless they are more than k.
        check.integer("clients", self.clients, low=2 * (self.k + 1))


@check.named_options(Settings)
def study(
    *,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> xr.DataTree:
    """Train one MLP per client from common initial parameters, and measure how hidden units differ between clients.

    Repeats FedFac §1, Figs. 1 and 2.

    Parameters
    ----------
    data_dir : path, optional
        Folder of the data set's files, as in :func:`fedstat.data.load`; not needed for the digits.
    out : path, optional
        Store to write, a zarr folder; without it the study stays in memory.
    resume : bool
        If True, continue the study at ``out``, if there is one; complete cases are not repeated.
    device, client_chunk, threads
        See :func:`fedstat.fl.train`; they change no draw, and results only by float32 rounding.
    progress : bool or None
        Show how many cases are done; see :func:`fedstat.fl.train`.
    **settings
        See :class:`fedstat.motivation.Settings`.

    Returns
    -------
    DataTree
        ``/outputs``: mean_output (case, outputs, client, unit), mean activation of a hidden unit over a client's
        training samples or over the common evaluation set; accuracy (case, outputs, client) on these samples; label
        (case, client), the client's most frequent class.
        ``/dispersion`` (case, outputs, unit), of the outputs over clients: entropy, std_error in nats, without atoms
        (tied outputs); n, number of clients in the entropy; atom_share, proportion of clients in atoms; zero_share,
        proportion of clients with output 0; spread, the SD.
        ``/split``: communality (case, on, method, unit) of the clients' weights or updates, and n_factors,
        converged (case, on, method).
        ``/relation``: spearman (case, outputs, on, method), rank correlation of entropy and communality over units,
        and spearman_half (…, replicate) on random halves of the clients.
        ``/weights/<layer>``: w, b (case, client, unit, …), and the initial parameters start_w, start_b.

    Raises
    ------
    ValueError
        If a setting is out of range, the data are not images, or ``resume`` finds a study with other settings.
    FileNotFoundError
        If files of the data set are missing.

    Examples
    --------
    >>> run = study(clients=10, hidden=8, local_epochs=1, replicates=2)
    >>> run["dispersion/entropy"].sizes
    Frozen({'case': 2, 'outputs': 2, 'unit': 8})
    """
    config = Settings(**settings)
    compute = ComputeConfig(device=device, client_chunk=client_chunk, threads=threads)
    read_images = cache(partial(_read_images, config, data_dir))  # a complete study needs no images
    motivating_study = cells.Study(
        title="Motivating study",
        command=COMMAND,
        references=SOURCE,
        config=asdict(config),
        layout=lambda: _check_and_layout(config, read_images()),
        cells=[Cell(case, {"case": i}) for i, case in enumerate(config.cases)],
        begin=lambda writer, compute: _begin(config, read_images(), writer, compute),
        done="outputs/done",
        unit="case",
    )
    return cells.make(motivating_study, compute, out=out, resume=resume, progress=progress)


def _read_images(settings: Settings, data_dir: str | Path | None) -> xr.Dataset:
    return data.to_float(data.load(settings.data, data_dir), mean=settings.mean, sd=settings.sd)


def _require_partitions(settings: Settings, images: xr.Dataset) -> None:
    """Partition the labels in all cases, so that an impossible partition is an error before training begins."""
    labels = _training_samples(images)
    labels = labels.drop_vars("x").assign(x=("sample", np.zeros(labels.sizes["sample"], np.uint8)))
    for case in settings.cases:
        PARTITIONS[case](labels, clients=settings.clients, seed=settings.seed)


def _check_and_layout(settings: Settings, images: xr.Dataset) -> dict[str, Group]:
    """Return the layout of a new store; raise ValueError if a partition is impossible."""
    _require_partitions(settings, images)
    return _layout(settings, _net(settings, images))


def _training_samples(images: xr.Dataset) -> xr.Dataset:
    return images.isel(sample=np.flatnonzero(images["split"].to_numpy() == "train"))


def _begin(settings: Settings, images: xr.Dataset, writer: Target, compute: ComputeConfig) -> Make:
    """Return the function that trains one case and writes its results."""
    common_samples = Samples(*(tensor.to(compute.device) for tensor in _draw_common_samples(settings, images)))
    train, net = _training_samples(images), _net(settings, images)

    def make(cell: Cell, tick: Callable[[], object]) -> None:
        (i,) = cell.where
        fed = PARTITIONS[settings.cases[i]](train, clients=settings.clients, seed=settings.seed)
        job = _job(settings, net, batches.rows_of(fed, "train", common_samples.x.device), compute)
        before = start(job)
        after, _ = observed_round(job, before, ())
        models = Download(job, after).models()
        _write_case(settings, writer, i, job, models, before.global_params, common_samples)
        writer.write("outputs/done", (i,), True)
        writer.commit()
        tick()

    return make


def _net(settings: Settings, images: xr.Dataset) -> Net:
    inputs = int(np.prod(images["x"].shape[1:]))
    return nets.mlp([inputs, settings.hidden, int(images["y"].max()) + 1])


def _job(settings: Settings, net: Net, rows: Rows, compute: ComputeConfig) -> Job:
    return Job(
        rows, rows, net, algorithms.local(), losses.for_outputs(nets.n_outputs(net)),
        optimizer=optim.adam(settings.lr), local_epochs=settings.local_epochs, batch_size=settings.batch_size,
        seed=settings.seed, compute=compute,
    )  # fmt: skip


def _draw_common_samples(settings: Settings, images: xr.Dataset) -> Samples:
    subset = images["split"].to_numpy()
    rows = np.flatnonzero(subset == "test") if (subset == "test").any() else np.arange(len(subset))
    n = min(settings.common_samples, len(rows))
    rows = np.sort(generator(settings.seed, "motivation", "common").choice(rows, n, replace=False))
    return Samples(torch.from_numpy(images["x"].to_numpy()[rows]), torch.from_numpy(images["y"].to_numpy()[rows]))


def mean_outputs(net: Net, params: Params, samples: Callable[[int], Samples]) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean activations of the first layer's ReLU units, and the accuracy, for each client.

    Parameters
    ----------
    net : Net
        Network of :func:`fedstat.fl.nets.mlp`.
    params : Params (client, ...)
        Parameters of the client models.
    samples : callable (client) -> Samples
        Returns the samples on which a client's model is evaluated.

    Returns
    -------
    mean_output : array (client, unit)
    accuracy : array (client,)
        Proportion of correct predictions.
    """
    weight, bias = params["fc1.weight"], params["fc1.bias"]
    mean, accuracy = np.empty(weight.shape[:2]), np.empty(len(weight))
    for c in range(len(weight)):
        x, y = samples(c)
        hidden = torch.relu(torch.addmm(bias[c], x.flatten(1), weight[c].T))
        mean[c] = hidden.double().mean(0).cpu().numpy()
        prediction = net.apply({name: p[c : c + 1] for name, p in params.items()}, x[None])[0].argmax(-1)
        accuracy[c] = float((prediction == y).double().mean())
    return mean, accuracy


def _write_case(
    settings: Settings,
    writer: Target,
    i: int,
    job: Job,
    params: Params,
    initial_params: Params,
    common_samples: Samples,
) -> None:
    """Write outputs, their entropy, the weights' communality, and their correlation, for case number i."""
    first = job.train.start

    def client_samples(c: int) -> Samples:
        return Samples(job.train.x[first[c] : first[c + 1]], job.train.y[first[c] : first[c + 1]])

    for name, p in params.items():
        layer, kind = nets.layer_of(name), {"weight": "w", "bias": "b"}[name.rpartition(".")[2]]
        writer.write(f"weights/{layer}/{kind}", (i,), p.cpu().numpy())
        writer.write(f"weights/{layer}/start_{kind}", (), initial_params[name].cpu().numpy())
    label = np.array([np.bincount(client_samples(c).y.cpu().numpy()).argmax() for c in range(job.clients)])
    writer.write("outputs/label", (i,), label)
    outputs = [mean_outputs(job.net, params, samples) for samples in (client_samples, lambda _: common_samples)]
    for j, (mean, accuracy) in enumerate(outputs):
        writer.write("outputs/mean_output", (i, j), mean)
        writer.write("outputs/accuracy", (i, j), accuracy)
        for name, values in statistics.dispersion(mean, k=settings.k).items():
            writer.write(f"dispersion/{name}", (i, j), values)
    weights = params["fc1.weight"].cpu().numpy()
    initial_weights = initial_params["fc1.weight"].cpu().numpy()
    strata = statistics.strata_of(settings.cases[i], label)
    relation = statistics.relation(
        np.stack([mean for mean, _ in outputs]), np.stack([weights, weights - initial_weights]),
        statistics.halves(strata, settings.replicates, seed=settings.seed), k=settings.k, kappa=settings.kappa,
    )  # fmt: skip
    for name, values in relation.items():
        writer.write(name, (i,), values)


def _layout(settings: Settings, net: Net) -> dict[str, Group]:
    axes = {
        "case": [*settings.cases],
        "outputs": [*OUTPUTS],
        "on": [*statistics.ON],
        "method": [*statistics.ESTIMATORS],
        "client": settings.clients,
        "unit": settings.hidden,
        "replicate": settings.replicates,
    }
    by_unit, chunk = "case outputs unit", {"case": 1}
    make_group = partial(store.group, axes, chunk)
    groups = {
        "outputs": make_group(
            mean_output=("case outputs client unit", "float64", {}, {"outputs": 1}),
            accuracy=("case outputs client", "float64"),
            label=("case client", "int64", "commonest class of the client"),
            done=("case", "bool"),
        ),
        "dispersion": make_group(
            entropy=(by_unit, "float64", {"long_name": "entropy over clients", "units": "nats"}),
            std_error=(by_unit, "float64", {"units": "nats"}),
            n=(by_unit, "int64", "clients the entropy rests on"),
            atom_share=(by_unit, "float64", "share of clients with tied outputs"),
            zero_share=(by_unit, "float64", "share of clients with output 0"),
            spread=(by_unit, "float64", "standard deviation over clients"),
        ),
        "split": make_group(
            communality=("case on method unit", "float64"),
            n_factors=("case on method", "int64"),
            converged=("case on method", "bool"),
        ),
        "relation": make_group(
            spearman=("case outputs on method", "float64"),
            spearman_half=("case outputs on method replicate", "float64"),
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
