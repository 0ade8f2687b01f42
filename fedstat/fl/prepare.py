"""The job of a run: data, network, algorithm, aggregator and settings, checked against each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import torch, xr
from fedstat.data import partition
from fedstat.data.targets import Task, task_of
from fedstat.fl import batches, checks, chunks, evaluate, losses, naming, nets, private_training
from fedstat.fl.aggregate import Aggregator, median, trimmed_mean, uniform, weighted_mean
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import checked, expected, far_from_rate, fewest
from fedstat.fl.hooks import Hooks
from fedstat.fl.job import ComputeConfig, Job, TrainConfig, device_named
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net
from fedstat.fl.optim import OPTIMIZERS, Optimizer
from fedstat.fl.privacy import Privacy
from fedstat.fl.private_training import sealed
from fedstat.store import Group

Scaling = tuple[np.ndarray, np.ndarray]
"""Mean and standard deviation (target,) of real-valued targets before they were standardized."""

AGGREGATORS: dict[str, Callable[..., Aggregator]] = {
    "mean": weighted_mean,
    "median": median,
    "trimmed-mean:PROPORTION": trimmed_mean,
}
"""Aggregators of command lines and grids. A function whose key has a colon takes a number, and names its aggregator by
the text that users write."""


def aggregator_named(aggregator: str | Aggregator) -> Aggregator:
    """Return the aggregator of a name in ``AGGREGATORS``; return an Aggregator unchanged.

    Raises
    ------
    ValueError
        If there is no such name, or its number is missing, superfluous or out of range.

    Examples
    --------
    >>> aggregator_named("trimmed-mean:0.1").name
    'trimmed-mean:0.1'
    """
    if isinstance(aggregator, Aggregator):
        return aggregator
    name, colon, number = str(aggregator).partition(":")
    makers = {form.partition(":")[:2]: make for form, make in AGGREGATORS.items()}
    try:
        make, numbers = makers[name, colon], [float(number)] if colon else []
    except (KeyError, ValueError):
        raise ValueError(
            f"aggregator must be one of {', '.join(AGGREGATORS)} (for example trimmed-mean:0.1), but got "
            f"{aggregator!r:.200}.{check.did_you_mean(aggregator, AGGREGATORS)}"
        ) from None
    return make(*numbers)


def labels_differ(*data: xr.Dataset | None) -> bool:
    """Return True if a label stands for several classes, or a class has several labels, over all clients.

    Parameters
    ----------
    *data : Dataset or None
        Data sets with the label y and the coordinate y_true, the class; without y_true the label is the class.
    """
    data_sets = [d for d in data if isinstance(d, xr.Dataset) and "y" in d]
    if not any("y_true" in d.coords for d in data_sets):
        return False
    pairs = [np.stack([np.ravel(d[n]) for n in ("y_true" if "y_true" in d.coords else "y", "y")]) for d in data_sets]
    classes, labels = np.unique(np.concatenate(pairs, axis=1), axis=1)
    return len(classes) > min(len(np.unique(classes)), len(np.unique(labels)))


def group(data: xr.Dataset, subsets: Mapping[str, Rows], outputs: int, scaling: Scaling | None = None) -> Group:
    """Describe the clients' data: ``n_train`` (client, class), and ``label`` and ``domain`` where data have them.

    Classes have the names of the data; clients are numbered. In regression there are no classes, but ``n_train``
    (client), and mean and standard deviation of the training targets, ``target_mean`` and ``target_sd``
    (client, target), in the units of the target.

    Parameters
    ----------
    data : Dataset
        Data of :func:`fedstat.fl.train`. If they have the coordinate y_true (sample), its values are the classes, and
        ``label`` (client, class) holds the label that a client gives a class, −1 if it has no sample of the class. The
        coordinate domain (sample) becomes ``domain`` (client), if all samples of a client have one domain.
    subsets : mapping from name to Rows
        "train", and "test" for ``n_test`` (client, class).
    outputs : int
        Number of outputs of the network.
    scaling : (array (target,), array (target,)), optional
        Mean and standard deviation by which real-valued targets were standardized.
    """
    per_sample = {name for name in data.coords if data[name].dims == ("sample",)}
    if subsets["train"].y.ndim > 1:
        return _targets_group(data["y"], subsets["train"], scaling, _domains(data, per_sample))
    counts = {name: _count_labels(rows, max(outputs, 2)) for name, rows in subsets.items()}
    n_clients, n_labels = next(iter(counts.values())).shape
    classes, named, variables = np.arange(n_labels), data["y"], {}
    if {"client", "y_true"} <= per_sample:
        table = partition.label_table(data)
        label, named = table.to_numpy(), data["y_true"]
        counts = {
            name: np.where(label < 0, 0, np.take_along_axis(count, np.maximum(label, 0), 1))
            for name, count in counts.items()
        }
        classes = table["class"].to_numpy()
        variables["label"] = ("client class", label, table.attrs | {"missing": "-1: no sample"})
    texts = {"train": "training samples of a class", "test": "test samples of a class"}
    variables |= {f"n_{name}": ("client class", count, {"long_name": texts[name]}) for name, count in counts.items()}
    variables |= _domains(data, per_sample)
    return store.group({"client": n_clients, "class": naming.class_labels(named, classes)}, **variables)


def _domains(data: xr.Dataset, per_sample: Collection[Hashable]) -> dict[str, Any]:
    """Return the variable ``domain`` (client), if all samples of each client have one domain."""
    if not {"client", "domain"} <= set(per_sample):
        return {}
    client, values = data["client"].to_numpy(), data["domain"].to_numpy()
    _, first, which = np.unique(client, return_index=True, return_inverse=True)
    if (values != values[first][which]).any():
        return {}
    names = data["domain"].attrs.get("names")
    domains = values[first] if names is None else np.array(names, object)[values[first]]
    return {"domain": ("client", domains, {"long_name": "domain of a client's classes"})}


def _targets_group(y: xr.DataArray, train: Rows, scaling: Scaling | None, domains: Mapping[str, Any]) -> Group:
    """Describe real-valued targets of the training samples of each client, in the units of the target."""
    mean, sd = (0.0, 1.0) if scaling is None else scaling
    values, bounds = train.y.double().cpu().numpy() * sd + mean, zip(train.start[:-1], train.start[1:], strict=True)
    parts = [values[low:high] for low, high in bounds]
    labels = next((y[dim].to_numpy() for dim in y.dims if dim not in ("client", "sample") and dim in y.coords), None)
    texts = {"mean": "mean of the training targets", "sd": "SD of the training targets (n in the denominator)"}
    variables: dict[str, Any] = {"n_train": ("client", train.sizes, {"long_name": "training samples"})}
    for name, rows in (("mean", [p.mean(0) for p in parts]), ("sd", [p.std(0) for p in parts])):
        variables[f"target_{name}"] = ("client target", np.array(rows), {"long_name": texts[name]})
    targets = values.shape[1] if labels is None else labels
    return store.group({"client": len(parts), "target": targets}, **variables, **domains)


def _count_labels(rows: Rows, n_labels: int) -> np.ndarray:
    """Return each client's number of samples of each label (client, label)."""
    count = np.zeros((len(rows.sizes), n_labels), dtype=np.int64)
    np.add.at(count, (np.repeat(np.arange(len(count)), rows.sizes), rows.y.cpu().numpy()), 1)
    return count


def optimizer_named(optimizer: str | Optimizer, lr: float) -> Optimizer:
    """Return the optimizer of a name in ``OPTIMIZERS``; return an Optimizer unchanged."""
    return OPTIMIZERS[check.choice("optimizer", optimizer, OPTIMIZERS)](lr) if isinstance(optimizer, str) else optimizer


def prepare(
    data: xr.Dataset,
    net: Net,
    algorithm: Algorithm,
    training: TrainConfig,
    machine: ComputeConfig = ComputeConfig(),  # noqa: B008
    *,
    task: Task | None = None,
    loss: str | None = None,
    track: bool = False,
    unseen_clients: xr.Dataset | None = None,
) -> Job:
    """Check the settings of a run and move the data to the device; arguments as in :func:`fedstat.fl.train`."""
    if not isinstance(data, xr.Dataset):
        raise ValueError(f"data must be an xarray.Dataset with variables x and y, but got {type(data).__name__}")
    if not isinstance(net, Net):
        raise ValueError(
            f"net must be a network of fedstat.fl.nets, but got {type(net).__name__}. "
            "Convert a torch module with nets.from_module(module, sample)."
        )
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"algorithm must be one of fedstat.fl.algorithms, such as algorithms.fedavg(), but got {algorithm!r}"
        )
    device = device_named(machine.device)
    task = task_of("y", data["y"].to_numpy(), task) if "y" in data else "classification"
    read = partial(
        batches.rows_of, data, device=device, stored=chunks.samples_stay(data, machine.memory_budget), task=task
    )
    train_rows, test_rows = read("train"), read("test")
    subset_names = data["split"].to_numpy() if "split" in data.coords else ()
    validation = read("validation") if "validation" in subset_names else None
    if len(train_rows.start) != len(test_rows.start):
        raise ValueError(
            f"every client needs train and test samples, but {len(train_rows.start) - 1} clients have train "
            f"and {len(test_rows.start) - 1} test samples"
        )
    _require_samples_fit(net, train_rows)
    rows, labels = (train_rows, test_rows, validation), naming.client_labels(data)
    for name, subset in zip(("train", "test", "validation"), rows, strict=True):
        if subset is not None:
            require_targets(subset, nets.n_outputs(net), name)
    job = assembled(
        rows,
        net,
        algorithm,
        training,
        machine,
        loss=losses.loss_named(loss, task, nets.n_outputs(net)),
        own_labels=labels_differ(data, unseen_clients),
        track=track,
        client_labels=labels,
    )
    return replace(job, scaling=_scaling(data["y"])) if task == "regression" else job


def _scaling(y: xr.DataArray) -> Scaling | None:
    """Return ``attrs["mean"]`` and ``attrs["sd"]`` of standardized targets, as arrays (target,); None without."""
    if not {"mean", "sd"} <= y.attrs.keys():
        return None
    mean, sd = (np.atleast_1d(np.asarray(y.attrs[name], np.float64)) for name in ("mean", "sd"))
    return mean, sd


def assembled(
    subsets: tuple[Rows, Rows, Rows | None],
    net: Net,
    algorithm: Algorithm,
    training: TrainConfig,
    machine: ComputeConfig = ComputeConfig(),  # noqa: B008
    *,
    loss: Loss | None = None,
    own_labels: bool = False,
    track: bool = False,
    client_labels: np.ndarray | None = None,
) -> Job:
    """Make the job from training, test and validation samples that fit the network; validate its settings."""
    train, test, validation = subsets
    loss, clients = loss or losses.for_outputs(nets.n_outputs(net)), len(train.start) - 1
    checked = _validate_training(training, clients)
    require_weights(algorithm, training.aggregator)
    net = nets.require_net(Hooks(algorithm, net, clients).wrap())
    machine.warn_if_slow()
    job = Job(
        train,
        test,
        net,
        algorithm,
        Hooks(algorithm, net, clients).loss(loss),
        validation,
        own_labels=own_labels,
        compute=machine,
        track=track,
        client_labels=client_labels,
        **vars(checked),
    )
    checks.phases(algorithm, net, job.local_epochs)
    evaluate.require_choice(job)
    if machine.memory_budget is not None:
        job = replace(job, room=chunks.remaining_bytes(job, machine.memory_budget))
    return job if job.aggregator.privacy is None else _make_private(job, job.aggregator.privacy)


def require_weights(algorithm: Algorithm, aggregator: Aggregator) -> None:
    """Raise ValueError if an algorithm weights clients, but the aggregator counts all alike."""
    hook = "mixing_weights" if algorithm.mixing_weights else None
    if algorithm.weights not in (None, uniform):
        hook = "weights"
    if hook and not aggregator.weighted:
        raise ValueError(
            f"aggregator {aggregator.name!r} counts all clients alike, but algorithm {algorithm.name!r} weights them "
            f"({hook}). Use aggregator 'mean', or another algorithm, such as fedavg, fedper or fedfac-dynamic."
        )


def _make_private(job: Job, privacy: Privacy) -> Job:
    """Return the job with an algorithm that learns only released values, if the accountant covers the run."""
    private_training.require_private(job)
    return replace(job, algorithm=sealed(job.algorithm, privacy, expected(job)))


def _validate_training(training: TrainConfig, clients: int) -> TrainConfig:
    """Return the settings, validated in the order in which they are documented."""
    rate = checked(training.participation)
    check.choice("sampling", training.sampling, ("fixed", "poisson"))
    if training.sampling == "fixed" and fewest(rate, clients) < 1:
        raise ValueError(f"participation={rate} selects none of {clients} clients. Use at least {1 / clients:.2g}.")
    if training.sampling == "fixed" and (numbers := far_from_rate(rate, clients)):
        selected = " and ".join(
            f"{k} of {clients} clients per round ({k / clients:.2g} instead of {end:g})" for end, k in numbers.items()
        )
        check.warn(f"participation={rate} selects {selected}. Set such a rate, or change the number of clients.")
    check.integer("local_epochs", training.local_epochs)
    if training.batch_size is not None:
        check.integer("batch_size", training.batch_size)
    check.real("server_lr", training.server_lr, low=0, open_low=True)
    check.choice("optimizer_state", training.optimizer_state, ("reset", "keep"))
    check.integer("seed", training.seed, low=0)
    return replace(training, participation=rate)


def _require_samples_fit(net: Net, rows: Rows) -> None:
    first, shape = rows.x[:1], tuple(rows.x.shape[1:])
    if (len(shape) > 1 and first.dtype == torch.uint8) or (len(shape) > 2 and not first.is_floating_point()):
        raise ValueError(
            f"x must be floating point, but is {str(first.dtype).removeprefix('torch.')} of shape {shape}. Scale it "
            "with fedstat.data.to_float(data)."
        )
    zeros = {name: torch.zeros(1, *dims, device=rows.x.device) for name, dims in net.shapes.items()}
    try:
        net.apply(zeros, first.unsqueeze(0))
    except RuntimeError as error:
        name, size = next(iter(net.shapes.items()))
        hint = "" if first.is_floating_point() else " If x is no text, make it float32: fedstat.data.to_float(data)"
        raise ValueError(
            f"the network does not take samples of shape {shape}: its first parameter, {name!r}, has shape {size}. "
            f"Make the network for samples of that shape.{hint}"
        ) from error


def require_targets(rows: Rows, outputs: int, name: str) -> None:
    """Raise ValueError if a subset holds classes, or numbers of targets, for which the network has no output."""
    if rows.y.ndim > 1:
        if rows.y.shape[1] != outputs:
            raise ValueError(
                f"the network must have {rows.y.shape[1]} output(s), one per real-valued target of the {name} samples, "
                f"but has {outputs}. Make it with as many outputs."
            )
        return
    low, top, classes = int(rows.y.min()), int(rows.y.max()), max(outputs, 2)
    if low < 0 or top >= classes:
        raise ValueError(
            f"y must lie in 0, ..., {classes - 1} for {outputs} output(s), but the {name} samples have {low} to {top}. "
            "Number the classes from 0, or give the network more outputs; if y holds counts or grades, set "
            "task='regression'."
        )


def unseen_rows(job: Job, data: xr.Dataset | None) -> tuple[Rows, ...]:
    """Return training and test samples of unseen clients, () without; ValueError if they do not fit the network."""
    task, names = job.loss.task, ("train", "test")
    subsets = () if data is None else tuple(batches.rows_of(data, s, job.device, task=task) for s in names)
    for rows in subsets:
        require_targets(rows, nets.n_outputs(job.net), "unseen clients'")
        if rows.x.shape[1:] != job.train.x.shape[1:]:
            actual, shape = (tuple(samples.x.shape[1:]) for samples in (rows, job.train))
            raise ValueError(f"unseen clients must have samples of shape {shape}, as in training, but got {actual}")
    return subsets
