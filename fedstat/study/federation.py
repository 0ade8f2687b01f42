"""Data, clients and network of a run, from the words of its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np

from fedstat import data as datasets
from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.data import arrays, partition
from fedstat.data._files import Remembered
from fedstat.fl import nets
from fedstat.fl.nets import Net


def strings(name: str, given: Any) -> tuple[str, ...]:
    """A string or integer, or a list of these, as strings: ``[1, "fc2"]`` to ("1", "fc2")."""
    several = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(one, str | Integral) and not isinstance(one, bool) for one in several):
        raise ValueError(f"{name} must be a string or a list of strings, but got {given!r:.200}")
    return tuple(map(str, several))


def network_options(name: str, given: tuple[str, ...]) -> dict[str, Any]:
    """``("components=2",)`` to {"components": 2}."""
    found = {}
    for option in given:
        key, equals, text = option.partition("=")
        if not equals or ("," in text and "" in text.split(",")):
            raise ValueError(f"{name} must look like NAME=VALUE, but got {option!r:.200}")
        if key in found:
            raise ValueError(f"{name} must name each setting once, but got {key!r:.200} twice")
        found[key] = value(text)
    return found


def value(text: str) -> Any:
    """``"3"`` to 3, ``"true"`` to True, ``"64,32"`` to (64, 32); other text stays."""
    if "," in text:
        return tuple(map(value, text.split(",")))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def text(name: str, given: Any) -> str:
    """3 to ``"3"``, True to ``"true"``, (64, 32) to ``"64,32"``: what :func:`value` reads."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str | Real):
        return str(given)
    if not isinstance(given, list | tuple) or not all(isinstance(one, str | Real) for one in given):
        raise ValueError(f"{name} must be a string, a number, true, false or a list of these, but got {given!r:.200}")
    if not given:
        raise ValueError(f"{name} must hold at least one value, but got {given!r:.200}")
    return ",".join(text(name, one) for one in given)


TEXTS = ("ag-news", "shakespeare", "shakespeare-leaf")
"""Published data sets of texts; the others are images."""


def network(settings: Any, fed: xr.Dataset) -> Net:
    """The network for a data set's samples and classes; ``settings`` are :class:`fedstat.study.Settings`."""
    return make(settings, *of_samples(fed))


def of_samples(fed: xr.Dataset) -> tuple[tuple[int, ...], int, int | None]:
    """Shape of a sample, number of classes, and size of the vocabulary of texts."""
    text = fed.x.dtype.kind in "iu" and "scale" not in fed.x.attrs
    names = fed.y.attrs.get("names")
    # For characters the vocabulary is the classes; for words the loader lists it.
    vocabulary = len(fed.x.attrs.get("vocabulary", names)) if text else None
    outputs = len(names) if names is not None else int(fed.y.max()) + 1
    return tuple(fed.x.shape[1:]), outputs, vocabulary


_of_arrays = Remembered(lambda path: of_samples(datasets.load(path)), size=8)


def like(data: str) -> tuple[tuple[int, ...], int, int | None]:
    """Typical sample shape, classes and vocabulary of a data set, to check networks before it is read."""
    if arrays.is_arrays(data):
        return _of_arrays(data)
    side = 8 if data == "digits" else 28
    return ((80,), 80, 80) if data in TEXTS else ((1, side, side), 10, None)


def make(settings: Any, sample: tuple[int, ...], outputs: int, vocabulary: int | None) -> Net:
    """The network that the settings name, for such samples; ValueError if it does not take them."""
    text = vocabulary is not None
    if nets.takes_text(settings.net) != text:
        fitting = [name for name in nets.NETS if nets.takes_text(name) == text]
        hint = ""
        if text and ".npz" in settings.data:
            hint = (
                " Whole numbers are tokens of texts: save features as float32, which data.to_float(data) makes of them."
            )
        raise ValueError(
            f"net {settings.net!r} takes {'images' if text else 'texts'}, but {settings.data} holds "
            f"{'texts' if text else 'images'}. Choose {', '.join(fitting)}.{hint}"
        )
    options: dict[str, Any] = {"width": settings.width} | network_options("net_options", settings.net_options)
    if settings.norm is not None:
        options["norm"] = settings.norm
    if text:
        options["vocabulary"] = vocabulary
    return nets.named(settings.net, sample, outputs, **options)


PARTITIONS = ("iid", "one-class", "pathological:S", "dirichlet:A", "dirichlet-equal:A", "natural", "domains")
"""Ways to deal the samples: S classes per client, concentration A of the Dirichlet distribution."""


DOMAINS = tuple(partition.CIFAR100_DOMAINS)
"""Domains of the partition "domains", unless others are named."""


_BLOCK = 1024  # samples whose squares are in memory at a time


class Federation(NamedTuple):
    """Settings of the clients and their samples, see :class:`fedstat.study.experiment.Settings`."""

    data: str
    partition: str
    clients: int
    samples: int | None
    min_size: int
    test: float
    validation: float
    new_share: float
    seed: int
    labels: str
    domains: tuple[str, ...]


@Remembered
def federated(settings: Federation, data_dir: str) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Clients that train, and new clients or None; the last result is kept until a file of the data changes."""
    fed = _dealt(settings, data_dir)
    kind, _ = partition_of(settings.partition)
    if kind == "natural" and {"train", "test"} <= set(np.unique(fed["split"].to_numpy())):
        fed = _published_subsets(fed, settings)
    else:
        if settings.samples is not None:
            fed = partition.limit(fed, samples=settings.samples, seed=settings.seed)
        shares: dict[str, Any] = {"test": settings.test, "validation": settings.validation}
        fed = partition.train_test(fed, **shares, seed=settings.seed)
    fed = _in_order(fed)
    if "scale" in fed.x.attrs:
        fed = _standardised(fed)
    if settings.labels == "permuted":
        fed = partition.permute_labels(fed, seed=settings.seed)
    if not settings.new_share:
        return fed, None
    return partition.hold_out(fed, fraction=settings.new_share, seed=settings.seed)


def read(names: Iterable[str], data_dir: str) -> None:
    """Read some data sets, the first one last so that it stays cached; raises as :func:`fedstat.data.load`."""
    for name in reversed(list(dict.fromkeys(names))):
        _loaded(name, data_dir)


def forget_files() -> None:
    """Let go of the data set that was read: one run needs only what it was dealt."""
    _loaded.forget()


@Remembered  # reading the files takes longer than dealing the samples again for another seed
def _loaded(data: str, data_dir: str) -> xr.Dataset:
    name, split = source_of(data)
    return datasets.load(name, data_dir, split=split)


def source_of(data: str) -> tuple[str, Literal["train", "test"] | None]:
    """``"cifar-100:test"`` to ("cifar-100", "test"): a data set, or only its published training or test samples.

    A path that ends in ".npz" is a data set, too.

    Raises
    ------
    ValueError
        If there is no such data set (the nearest are given) or part.
    """
    name, colon, split = data.partition(":")
    if not arrays.is_arrays(name):
        check.choice("data", name, [*datasets.SOURCES, "PATH.npz"])
    if colon:
        check.choice(f"what follows {name}: in data", split, ("train", "test"))
    return name, split or None  # type: ignore[return-value]


def _dealt(settings: Federation, data_dir: str) -> xr.Dataset:
    source = _loaded(settings.data, data_dir)
    if settings.partition == "natural" and "user" not in source.coords:
        hint = " Add an array client (sample,) to the file." if arrays.is_arrays(source_of(settings.data)[0]) else ""
        raise ValueError(
            f"partition 'natural' needs samples that belong to users, but those of {settings.data} do not.{hint}"
        )
    kind, number = partition_of(settings.partition)
    common: dict[str, Any] = {"clients": settings.clients, "seed": settings.seed}
    ways: dict[str, Callable[[], xr.Dataset]] = {
        "iid": lambda: partition.iid(source, **common),
        "one-class": lambda: partition.one_class(source, **common),
        "pathological": lambda: partition.pathological(source, classes_per_client=int(number), **common),
        "dirichlet": lambda: partition.dirichlet(
            source, concentration=number, min_size=settings.min_size, below="move", **common
        ),
        "dirichlet-equal": lambda: partition.dirichlet_equal(
            source.assign_coords(split=("sample", np.full(source.sizes["sample"], "train", dtype=object))),
            concentration=number, n_train=settings.samples or source.sizes["sample"] // settings.clients, n_test=0,
            **common,
        ),
        "natural": lambda: partition.natural(source, min_size=settings.min_size),
        "domains": lambda: _domains(source, settings),
    }  # fmt: skip
    return ways[kind]()


def _domains(source: xr.Dataset, settings: Federation) -> xr.Dataset:
    """Clients of the domains, whose classes are as many in each."""
    if "coarse" not in source.variables:
        raise ValueError(
            f"partition 'domains' needs classes that form superclasses, as those of cifar-100 do, but those of "
            f"{settings.data} do not"
        )
    superclasses = {name: (name,) for name in source.coarse.attrs["names"]}
    known = superclasses | partition.CIFAR100_DOMAINS
    groups = {check.choice("domains", name, known): known[name] for name in settings.domains or DOMAINS}
    per = settings.clients // len(groups)
    fed = partition.domains(source, groups=groups, clients_per_domain=per, seed=settings.seed)
    classes = partition.label_table(fed).to_numpy().max(1)[::per] + 1
    if len(set(classes)) > 1:
        found = ", ".join(f"{name} {n}" for name, n in zip(groups, classes, strict=True))
        raise ValueError(
            f"domains must have equal numbers of classes, for all clients' networks have the same outputs, but got "
            f"{found}. Choose among {', '.join(map(repr, DOMAINS))}, or among the superclasses."
        )
    return fed


def require_domains(kind: str, domains: tuple[str, ...], clients: int) -> None:
    """ValueError unless the clients divide evenly over the domains, if that is how they are dealt."""
    if kind != "domains":
        if domains:
            raise check.NoEffectError("domains", f"but with partition domains, but got {domains} with {kind}")
        return
    number = len(check.distinct("domains", domains or DOMAINS))
    if clients % number:
        raise ValueError(
            f"clients must be a multiple of the {number} domains, to which they are dealt evenly, but got {clients}"
        )


def partition_of(text: str) -> tuple[str, float]:
    """``"dirichlet:0.1"`` to ("dirichlet", 0.1); ValueError if it is not one of ``PARTITIONS``."""
    kind, colon, number = text.partition(":")
    kinds = {known.partition(":")[0]: ":" in known for known in PARTITIONS}
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


def _published_subsets(fed: xr.Dataset, settings: Federation) -> xr.Dataset:
    """The published subsets, limited in proportion; validation gets the last of the training samples."""
    _require_both(fed, settings.data)
    subset, parts = fed["split"].to_numpy(), []
    for name, share in (("train", 1 - settings.test), ("test", settings.test)):
        part = fed.isel(sample=np.flatnonzero(subset == name))
        if settings.samples is not None:
            part = partition.limit(part, samples=max(1, round(share * settings.samples)), seed=settings.seed)
        parts.append(part)
    fed = xr.concat(parts, "sample")
    subset, client = fed["split"].to_numpy().astype(object), fed["client"].to_numpy()
    for c in np.unique(client) if settings.validation else ():
        rows = np.flatnonzero((client == c) & (subset == "train"))
        subset[rows[len(rows) - max(1, round(settings.validation * len(rows))) :]] = "validation"
    return fed.assign_coords(split=("sample", subset))


def _require_both(fed: xr.Dataset, data: str) -> None:
    """ValueError unless all clients have training and test samples."""
    client, subset = fed["client"].to_numpy(), fed["split"].to_numpy()
    train, test = (np.unique(client[subset == name]) for name in ("train", "test"))
    if not len(np.intersect1d(train, test)):
        raise ValueError(
            f"test users of {data} are other users than its training users, so that no client has samples of both. "
            f"Take data {data}:train, of which each user's samples are divided. The test users can be unseen clients "
            "of fedstat.fl.train: load(..., split='test'), dealt by partition.natural and train_test, as new=."
        )
    names = np.asarray(fed["client"].attrs["names"], object)
    if len(lone := np.setxor1d(train, test)):
        lacking = [f"{names[c]} ({'test' if c in train else 'training'})" for c in lone]
        raise ValueError(
            f"every client must have training and test samples, but samples are lacking for {few(lacking)}. Take data "
            f"{data}:train, of which each client's samples are divided, or leave these clients out of the files."
        )


def _in_order(fed: xr.Dataset) -> xr.Dataset:
    """The samples by subset and client, so that a trainer takes those of a subset as they lie, without a copy."""
    subset, client = (np.unique(fed[name].to_numpy(), return_inverse=True)[1] for name in ("split", "client"))
    return fed.isel(sample=np.lexsort((client, subset)))


def _standardised(fed: xr.Dataset) -> xr.Dataset:
    """Images that are standardised, each channel to mean 0 and standard deviation 1 over the training samples.

    ``x.attrs`` keeps both: x·sd + mean is the image on [0, 1]. Bytes stay bytes, which a trainer scales when it uses
    them, see :func:`fedstat.data.to_float`.
    """
    places, scale = np.flatnonzero(fed["split"].to_numpy() == "train"), float(fed.x.attrs["scale"])
    x, total, square = fed.x.values, np.zeros(fed.x.shape[1]), np.zeros(fed.x.shape[1])
    for block in np.array_split(places, -(-len(places) // _BLOCK)):  # sums of whole numbers: exact in any order
        some = x[block].astype(np.float32)
        total += some.sum((0, 2, 3), dtype=np.float64)
        square += np.square(some, out=some).sum((0, 2, 3), dtype=np.float64)
    n = len(places) * x[0, 0].size
    mean = total / n / scale
    sd = np.sqrt(square / n / scale**2 - mean**2)
    found = fed.assign(x=fed.x.assign_attrs(mean=mean.tolist(), sd=sd.tolist()))
    return found if x.dtype == np.uint8 else datasets.to_float(found)
