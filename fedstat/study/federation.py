"""Data, clients and network of a run, from its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np

from fedstat import data as datasets
from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.data import arrays, partition
from fedstat.data._clients import draw_subset
from fedstat.data._dealing import apportion
from fedstat.data._files import Remembered
from fedstat.fl import custom, nets
from fedstat.fl.nets import Net, own


def strings(name: str, values: Any) -> tuple[str, ...]:
    """Convert a string or integer, or a list of them, to strings: ``[1, "fc2"]`` to ("1", "fc2")."""
    items = values if isinstance(values, list | tuple) else [values]
    if not all(isinstance(item, str | Integral) and not isinstance(item, bool) for item in items):
        raise ValueError(f"{name} must be a string or a list of strings, but got {values!r:.200}")
    return tuple(map(str, items))


def network_options(name: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Parse options: ``("components=2",)`` to {"components": 2}."""
    value_by_name = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or ("," in text and "" in text.split(",")):
            raise ValueError(f"{name} must look like NAME=VALUE, but got {option!r:.200}")
        if key in value_by_name:
            raise ValueError(f"{name} must name each setting once, but got {key!r:.200} twice")
        value_by_name[key] = value(text)
    return value_by_name


def value(text: str) -> Any:
    """Parse a value: ``"3"`` to 3, ``"true"`` to True, ``"64,32"`` to (64, 32); return other text unchanged."""
    if "," in text:
        return tuple(map(value, text.split(",")))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def text(name: str, value: Any) -> str:
    """Format a value for :func:`value`: 3 to ``"3"``, True to ``"true"``, (64, 32) to ``"64,32"``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Real):
        return str(value)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | Real) for item in value):
        raise ValueError(f"{name} must be a string, a number, true, false or a list of these, but got {value!r:.200}")
    if not value:
        raise ValueError(f"{name} must hold at least one value, but got {value!r:.200}")
    return ",".join(text(name, item) for item in value)


TEXTS = ("ag-news", "shakespeare", "shakespeare-leaf")
"""Published data sets of texts; all others are images."""


def network(settings: Any, fed: xr.Dataset) -> Net:
    """Make the network for the samples and classes of a data set, from :class:`fedstat.study.Settings`."""
    return make(settings, *of_samples(fed))


def of_samples(fed: xr.Dataset) -> tuple[tuple[int, ...], int, int | None]:
    """Return the shape of a sample, the number of classes or targets, and the vocabulary size (None for images)."""
    text = fed.x.dtype.kind in "iu" and "scale" not in fed.x.attrs
    names = fed.y.attrs.get("names")
    # For characters, the vocabulary is the list of classes; for words, the loader lists it.
    vocabulary = len(fed.x.attrs.get("vocabulary", names)) if text else None
    if fed.y.dtype.kind == "f":
        outputs = math.prod(fed.y.shape[1:])
    else:
        outputs = len(names) if names is not None else int(fed.y.max()) + 1
    return tuple(fed.x.shape[1:]), outputs, vocabulary


_describe_arrays = Remembered(lambda path, options: of_samples(datasets.load(path, **dict(options))), size=8)


def like(settings: Any) -> tuple[tuple[int, ...], int, int | None]:
    """Return the typical sample shape, outputs and vocabulary of a data set, to check networks before reading it."""
    (data, _), options = source_of(settings.data), file_options(settings)
    if arrays.is_arrays(data):
        return _describe_arrays(data, options)
    side = 8 if data == "digits" else 28
    return ((80,), 80, 80) if data in TEXTS else ((1, side, side), 10, None)


def file_options(settings: Any) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of :func:`fedstat.data.load` for the user's file: columns of a .csv file, and the task.

    Raises
    ------
    ValueError
        If a setting has no effect with the data set.
    """
    data, _ = source_of(settings.data)
    if not data.endswith(".csv"):
        for name, default in (("target", ()), ("client_column", None)):
            reason = f"with data {settings.data}, which has no columns"
            check.require_default(name, getattr(settings, name), default, reason)
    if not arrays.is_arrays(data):
        if settings.task == "regression":
            raise ValueError(
                f"task='regression' needs real-valued targets, but {data} has classes. Use your own file, such as "
                "own.csv, or task='classification'."
            )
        return ()
    target = settings.target[0] if len(settings.target) == 1 else settings.target
    options = {"y": target or None, "client": settings.client_column, "task": settings.task}
    return tuple((name, value) for name, value in options.items() if value is not None)


def make(settings: Any, sample: tuple[int, ...], outputs: int, vocabulary: int | None) -> Net:
    """Make the network that the settings name; raise ValueError if it does not fit the samples."""
    if custom.is_in_file(settings.net):
        options = own_options(settings, vocabulary)
        return own.make(settings.net, sample, outputs, options, tokens=vocabulary is not None, seed=settings.seed)
    text = vocabulary is not None
    if nets.takes_text(settings.net) != text:
        suitable = [name for name in nets.NETS if nets.takes_text(name) == text]
        hint = ""
        if text and ".npz" in settings.data:
            hint = " Integers are read as tokens of texts; convert features to float32 with data.to_float(data)."
        is_table = not text and len(sample) == 1
        suitable = ["mlp"] if is_table else suitable
        raise ValueError(
            f"net {settings.net!r} takes {'images' if text else 'texts'}, but {settings.data} holds "
            f"{'texts' if text else 'features' if is_table else 'images'}. Choose {', '.join(suitable)}.{hint}"
        )
    options = {"width": settings.width} | _read_net_options(settings)
    if settings.norm is not None:
        options["norm"] = settings.norm
    if text:
        options["vocabulary"] = vocabulary
    return nets.named(settings.net, sample, outputs, **options)


def own_options(settings: Any, vocabulary: int | None) -> dict[str, Any]:
    """Return the keyword arguments of the network in a user's file; ValueError if it does not take the settings.

    It gets ``width``, ``norm`` and, for texts, ``vocabulary`` if it has arguments of these names.
    """
    options = _read_net_options(settings)
    takes = own.options(settings.net)
    common: dict[str, Any] = {"width": (settings.width, 1.0), "norm": (settings.norm, None)}
    for name, (value, default) in common.items():
        if name not in takes:
            reason = f"on {custom.short(settings.net)}, which has no argument {name}"
            check.require_default(name, value, default, reason, hint=". Remove it.")
        elif value != default:
            options = {name: value} | options
    if vocabulary is not None and "vocabulary" in takes:
        options["vocabulary"] = vocabulary
    own.require_options(settings.net, options)
    return options


def _read_net_options(settings: Any) -> dict[str, Any]:
    """Return the further arguments of the network; ValueError for one that is set elsewhere."""
    options = network_options("net_options", settings.net_options)
    for name in ("width", "norm"):
        if name in options:
            raise ValueError(f"net_options must not hold {name}, which is a setting of the run. Set {name} itself.")
    if "vocabulary" in options:
        raise ValueError("net_options must not hold vocabulary, which comes from the data. Remove it.")
    return options


PARTITIONS = ("iid", "one-class", "pathological:S", "dirichlet:A", "dirichlet-equal:A", "natural", "domains")
"""Partitions of the samples over clients: S classes per client, concentration A of the Dirichlet distribution."""


DOMAINS = tuple(partition.CIFAR100_DOMAINS)
"""Default domains of the partition "domains"."""


TEST_FRACTION = 0.2
"""Default of the setting test_fraction."""


_BLOCK = 1024  # samples whose squares are in memory at once


class Federation(NamedTuple):
    """Settings of clients and samples; see :class:`fedstat.study.run_settings.Settings`."""

    data: str
    partition: str
    clients: int
    max_samples: int | None
    min_samples: int
    test_fraction: float
    validation_fraction: float
    unseen_fraction: float
    stratify: bool
    seed: int
    class_labels: str
    domains: tuple[str, ...]
    task: str | None
    target: tuple[str, ...]
    client_column: str | None
    standardize: bool


@Remembered
def federated(settings: Federation, data_dir: str) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the clients that train, and unseen clients or None; cache the last result until a data file changes."""
    source = _load(settings.data, data_dir, file_options(settings))
    if keeps_subsets(settings, source):
        fed = _keep_subsets(settings, source)
    else:
        fed = _partition_samples(settings, source, settings.max_samples)
        if settings.max_samples is not None:
            fed = partition.limit(fed, samples=settings.max_samples, seed=settings.seed)
        fractions: dict[str, Any] = {"test": settings.test_fraction, "validation": settings.validation_fraction}
        fed = partition.train_test(fed, **fractions, stratify=settings.stratify, seed=settings.seed)
    fed = _sort_samples(fed)
    if "scale" in fed.x.attrs:
        fed = _standardize_images(fed)
    if settings.class_labels == "permuted":
        if fed.y.dtype.kind == "f":
            raise ValueError("class_labels='permuted' needs classes, but the targets are real numbers. Remove it.")
        fed = partition.permute_labels(fed, seed=settings.seed)
    unseen = None
    if settings.unseen_fraction:
        fed, unseen = partition.hold_out(fed, fraction=settings.unseen_fraction, seed=settings.seed)
    return _standardize_numbers(fed, unseen) if settings.standardize else (fed, unseen)


def read_data(runs: Iterable[Any], data_dir: str) -> None:
    """Read the data sets of runs in reverse order, so that the first stays cached.

    Raises
    ------
    FileNotFoundError, ValueError
        As :func:`fedstat.data.load`, and if a setting of a run contradicts the subsets of its data.
    """
    runs = list(runs)
    for name, options in reversed(list(dict.fromkeys((run.data, file_options(run)) for run in runs))):
        source = _load(name, data_dir, options)
        for run in runs:
            if (run.data, file_options(run)) == (name, options):
                keeps_subsets(run, source)


def forget_files() -> None:
    """Clear the cached data set; a run needs only its partitioned samples."""
    _load.forget()


@Remembered  # reading files takes longer than partitioning the samples for another seed
def _load(data: str, data_dir: str, options: tuple[tuple[str, Any], ...]) -> xr.Dataset:
    name, split = source_of(data)
    return datasets.load(name, data_dir, split=split, **dict(options))


def source_of(data: str) -> tuple[str, Literal["train", "test"] | None]:
    """Split ``"cifar-100:test"`` into ("cifar-100", "test"), a data set and its published subset, or None for all.

    A data set may also be a path that ends in ".npz" or ".csv".

    Raises
    ------
    ValueError
        If there is no such data set (the message lists similar names) or subset.
    """
    name, colon, split = data.partition(":")
    if not arrays.is_arrays(name):
        check.choice("data", name, [*datasets.SOURCES, "PATH.npz", "PATH.csv"])
    if colon:
        check.choice(f"what follows {name}: in data", split, ("train", "test"))
    return name, split or None  # type: ignore[return-value]


def _partition_samples(settings: Federation, source: xr.Dataset, max_samples: int | None) -> xr.Dataset:
    """Assign samples to clients, of whom dirichlet-equal gives each ``max_samples``, if it is set."""
    if settings.partition == "natural" and "user" not in source.coords:
        hint = " Add an array client (sample,) to the file." if arrays.is_arrays(source_of(settings.data)[0]) else ""
        raise ValueError(
            f"partition 'natural' needs samples that belong to users, but samples of {settings.data} do not.{hint}"
        )
    kind, number = partition_of(settings.partition)
    common: dict[str, Any] = {"clients": settings.clients, "seed": settings.seed}
    partitions: dict[str, Callable[[], xr.Dataset]] = {
        "iid": lambda: partition.iid(source, **common),
        "one-class": lambda: partition.one_class(source, **common),
        "pathological": lambda: partition.pathological(source, classes_per_client=int(number), **common),
        "dirichlet": lambda: partition.dirichlet(
            source, concentration=number, min_samples=settings.min_samples, below="move", **common
        ),
        "dirichlet-equal": lambda: partition.dirichlet_equal(
            source.assign_coords(split=("sample", np.full(source.sizes["sample"], "train", dtype=object))),
            concentration=number, n_train=max_samples or source.sizes["sample"] // settings.clients, n_test=0,
            **common,
        ),
        "natural": lambda: partition.natural(source, min_samples=settings.min_samples),
        "domains": lambda: _partition_by_domain(source, settings),
    }  # fmt: skip
    return partitions[kind]()


def _partition_by_domain(source: xr.Dataset, settings: Federation) -> xr.Dataset:
    """Divide the samples into domains with equal numbers of classes."""
    if "coarse" not in source.variables:
        raise ValueError(
            f"partition 'domains' needs classes that form superclasses, as in cifar-100, but classes of "
            f"{settings.data} do not. Choose another partition."
        )
    superclasses = {name: (name,) for name in source.coarse.attrs["names"]}
    choices = superclasses | partition.CIFAR100_DOMAINS
    groups = {check.choice("domains", name, choices): choices[name] for name in settings.domains or DOMAINS}
    per = settings.clients // len(groups)
    fed = partition.domains(source, groups=groups, clients_per_domain=per, seed=settings.seed)
    classes = partition.label_table(fed).to_numpy().max(1)[::per] + 1
    if len(set(classes)) > 1:
        counts = ", ".join(f"{name} {n}" for name, n in zip(groups, classes, strict=True))
        raise ValueError(
            f"domains must have equal numbers of classes, because all clients have one network, but got {counts}. "
            f"Choose among {', '.join(map(repr, DOMAINS))}, or among the superclasses."
        )
    return fed


def require_domains(kind: str, domains: tuple[str, ...], clients: int) -> None:
    """Raise ValueError unless clients divide evenly over the domains of partition "domains"."""
    if kind != "domains":
        if domains:
            raise ValueError(f"domains has no effect but with partition domains, but got {domains} with {kind}")
        return
    number = len(check.distinct("domains", domains or DOMAINS))
    if clients % number:
        raise ValueError(
            f"clients must be a multiple of {number}, the number of domains, but got {clients}. Use "
            f"{max(1, clients // number) * number}."
        )


def partition_of(text: str) -> tuple[str, float]:
    """Parse ``"dirichlet:0.1"`` to ("dirichlet", 0.1); raise ValueError if it is not one of ``PARTITIONS``."""
    kind, colon, number = text.partition(":")
    kinds = {form.partition(":")[0]: ":" in form for form in PARTITIONS}
    check.choice("partition", kind, kinds)
    if kinds[kind] != bool(colon):
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}, but got {text!r:.200}")
    if not colon:
        return kind, math.nan
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"partition must end in a number, as in {kind}:0.5, but got {text!r:.200}") from None
    check.real("the number in partition", value, low=0, open_low=True)
    if kind == "pathological":
        check.integer("the classes of a client in partition", int(value) if value.is_integer() else value)
    return kind, value


def keeps_subsets(settings: Any, source: xr.Dataset) -> bool:
    """Return True if a run keeps the training and other samples as its data set divides them.

    A user's file is kept with every partition, a published data set with the partition natural. Otherwise all samples
    are dealt, and each client's are divided by ``test_fraction`` and ``validation_fraction``.

    Raises
    ------
    ValueError
        If a user's file has no training samples, or divides the samples, so that a setting of the run has no effect.
        Grids of published data sets may set ``test_fraction`` for all of them.
    """
    subsets = set(np.unique(source["split"].to_numpy()))
    (name, selected), (kind, _) = source_of(settings.data), partition_of(settings.partition)
    is_file = arrays.is_arrays(name)
    if is_file and "train" not in subsets and selected != "test":
        raise ValueError(
            f"{name} has no training samples: its split says {' and '.join(sorted(subsets))}. Add training samples, or "
            f"use data {name}:test, which divides the test samples of each client."
        )
    if "train" not in subsets or len(subsets) == 1 or not (is_file or kind == "natural"):
        return False
    if not is_file:
        return True
    reason = f"because {settings.data} itself says which samples are for"
    hint = f". Remove it, or use data {settings.data}:train, which divides the training samples of each client."
    if "test" in subsets and not _limits_by_fraction(settings, subsets):
        check.require_default("test_fraction", settings.test_fraction, TEST_FRACTION, f"{reason} testing", hint=hint)
    if "validation" in subsets:
        check.require_default("validation_fraction", settings.validation_fraction, 0, f"{reason} validation", hint=hint)
    if "test" in subsets and not settings.validation_fraction:
        reason = f"{reason} testing and no validation samples are drawn"
        check.require_default("stratify", settings.stratify, False, reason, hint=hint)
    return True


def has_validation(settings: Any) -> bool:
    """Return True if a user's file has validation samples."""
    name, subset = source_of(settings.data)
    return subset is None and arrays.is_arrays(name) and "validation" in _list_subsets(name, file_options(settings))


_list_subsets = Remembered(
    lambda path, options: frozenset(np.unique(datasets.load(path, **dict(options))["split"].to_numpy())), size=8
)


def _limits_by_fraction(settings: Any, subsets: set[str]) -> bool:
    """Return True if ``test_fraction`` divides ``max_samples`` among training and test samples."""
    is_natural = partition_of(settings.partition)[0] == "natural"
    return settings.max_samples is not None and is_natural and subsets == {"train", "test"}


def _keep_subsets(settings: Federation, source: xr.Dataset) -> xr.Dataset:
    """Deal the training samples, and the others in the same class proportions; draw the subsets that are missing."""
    subset = source["split"].to_numpy()
    size = {name: int((subset == name).sum()) for name in arrays.SUBSETS if name in subset}
    most: dict[str, int | None] = dict.fromkeys(size)
    if settings.max_samples is not None:
        proportions = np.array([*size.values()]) / len(subset)
        if _limits_by_fraction(settings, {*size}):
            proportions = np.array([1 - settings.test_fraction, settings.test_fraction])
        counts = apportion(np.array([settings.max_samples]), proportions[None])[0]
        most = {name: max(1, int(n)) for name, n in zip(size, counts, strict=True)}
    is_natural = partition_of(settings.partition)[0] == "natural"
    dealt = _partition_samples(settings, source, None) if is_natural else source
    parts = {name: dealt.isel(sample=np.flatnonzero(dealt["split"].to_numpy() == name)) for name in size}
    if not is_natural:
        min_samples = -(-settings.min_samples * size["train"] // len(subset))
        train = _partition_samples(settings._replace(min_samples=min_samples), parts.pop("train"), most["train"])
        parts = {name: partition.deal_like(part, train, seed=settings.seed) for name, part in parts.items()}
        parts = {"train": train} | parts
    limited = [
        part if (n := most[name]) is None else partition.limit(part, samples=n, seed=settings.seed)
        for name, part in parts.items()
    ]
    fed = xr.concat(limited, "sample")
    _require_all_subsets(fed, [*size], settings.data, is_natural=is_natural)
    for name, fraction in (("test", settings.test_fraction), ("validation", settings.validation_fraction)):
        if name not in size and fraction:
            fed = draw_subset(fed, name, fraction=fraction, stratify=settings.stratify, seed=settings.seed)  # type: ignore[arg-type]
    return fed


_ADJECTIVES = {"train": "training", "test": "test", "validation": "validation"}


def _require_all_subsets(fed: xr.Dataset, subsets: Sequence[str], data: str, *, is_natural: bool) -> None:
    """Raise ValueError unless all clients have samples of each subset of the data."""
    client, subset = fed["client"].to_numpy(), fed["split"].to_numpy()
    clients = np.unique(client)
    held = {name: np.isin(clients, client[subset == name]) for name in subsets}
    if is_natural and "test" in held and not (held["train"] & held["test"]).any():
        raise ValueError(
            f"{data} has different users for training and test, so that no client has both. Use data {data}:train, "
            "which divides the samples of each user. The test users can be unseen clients of fedstat.fl.train: pass "
            "load(..., split='test'), divided by partition.natural and train_test, as unseen_clients=."
        )
    names = fed["client"].attrs.get("names", [f"client {c}" for c in clients])
    missing = [
        f"{names[c]} ({_ADJECTIVES[name]})" for i, c in enumerate(clients) for name in subsets if not held[name][i]
    ]
    if missing:
        required = " and ".join(_ADJECTIVES[name] for name in subsets)
        instead = "remove these clients from the files" if is_natural else "use fewer clients"
        raise ValueError(
            f"every client must have {required} samples, but these lack samples: {few(missing)}. Use data "
            f"{data}:train, which divides the samples of each client, or {instead}."
        )


def _sort_samples(fed: xr.Dataset) -> xr.Dataset:
    """Sort samples by subset and client, so that a trainer can take a subset without copying."""
    subset, client = (np.unique(fed[name].to_numpy(), return_inverse=True)[1] for name in ("split", "client"))
    return fed.isel(sample=np.lexsort((client, subset)))


def _standardize_images(fed: xr.Dataset) -> xr.Dataset:
    """Standardize the channels of images to mean 0 and standard deviation 1 over the training samples.

    ``x.attrs`` stores both: x·sd + mean is the image on [0, 1]. Bytes remain bytes, which a trainer scales when it uses
    them; see :func:`fedstat.data.to_float`.
    """
    rows, scale = np.flatnonzero(fed["split"].to_numpy() == "train"), float(fed.x.attrs["scale"])
    x, total, square = fed.x.values, np.zeros(fed.x.shape[1]), np.zeros(fed.x.shape[1])
    for block in np.array_split(rows, -(-len(rows) // _BLOCK)):  # sums of integers are exact in any order
        images = x[block].astype(np.float32)
        total += images.sum((0, 2, 3), dtype=np.float64)
        square += np.square(images, out=images).sum((0, 2, 3), dtype=np.float64)
    n = len(rows) * x[0, 0].size
    mean = total / n / scale
    sd = np.sqrt(square / n / scale**2 - mean**2)
    fed = fed.assign(x=fed.x.assign_attrs(mean=mean.tolist(), sd=sd.tolist()))
    return fed if x.dtype == np.uint8 else datasets.to_float(fed)


def _standardize_numbers(fed: xr.Dataset, unseen: xr.Dataset | None) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Standardize features and real-valued targets to mean 0 and standard deviation 1 over the training samples.

    The training samples are those of the clients that train. Values that do not vary become 0. ``attrs`` store both:
    value·sd + mean is the value in its units.
    """
    rows, scaling = np.flatnonzero(fed["split"].to_numpy() == "train"), {}
    for name in ("x", "y"):
        if (name == "x" and "scale" in fed.x.attrs) or fed[name].dtype.kind != "f" or "mean" in fed[name].attrs:
            continue
        values = fed[name].to_numpy()[rows].astype(np.float64)
        varies = values.min(0) < values.max(0)
        mean, sd = np.where(varies, values.mean(0), values[0]), np.where(varies, values.std(0), 1.0)
        scaling[name] = mean, sd
    if not scaling:
        raise ValueError(
            "standardize has no effect: the data hold neither features that are real numbers nor real-valued targets "
            "(images are always standardized). Remove it."
        )
    return _scale(fed, scaling), None if unseen is None else _scale(unseen, scaling)


def _scale(fed: xr.Dataset, scaling: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> xr.Dataset:
    scaled = {}
    for name, (mean, sd) in scaling.items():
        values, attrs = fed[name].to_numpy(), {"mean": mean.tolist(), "sd": sd.tolist()}
        scaled[name] = fed[name].copy(data=((values - mean) / sd).astype(values.dtype)).assign_attrs(attrs)
    return fed.assign(scaled)
