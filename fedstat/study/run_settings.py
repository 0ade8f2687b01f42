"""Settings of a run: options of ``python -m fedstat.fl``, keys of grid files, arguments of ``Settings.of``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import Parameter
from typing import Any, Literal

from fedstat import data as datasets
from fedstat._utils import check
from fedstat._utils.settings import check_fields, setting
from fedstat.data import arrays
from fedstat.data.targets import Task
from fedstat.fl import algorithms, custom, masks, nets, prepare
from fedstat.fl.aggregate import Aggregator, private
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.cohort import checked
from fedstat.fl.job import ComputeConfig, Participation, Precision, Sampling, TrainConfig
from fedstat.fl.metrics import ERRORS, METRICS
from fedstat.fl.prepare import AGGREGATORS, aggregator_named, optimizer_named
from fedstat.fl.training import PROBES
from fedstat.study import federation
from fedstat.study.federation import like, make, own_options
from fedstat.study.grid_keys import STRUCTURE


def named() -> list[str]:
    """Return the names of algorithms whose settings all have defaults; FedSplit needs a split and is not among them."""
    settings_by_name = {name: algorithms.settings_of(name).values() for name in algorithms.ALGORITHMS}
    return [
        name
        for name, settings in settings_by_name.items()
        if all(declared.default is not Parameter.empty for declared in settings)
    ]


def default_name(data: str, partition: str) -> str:
    """Return the name of a scenario without a name of its own."""
    return f"{custom.short(data)}, {partition}"


OF_COMMAND = (
    "config", "scale", "study", "tune", "tuned", "dry_run", "seconds", "repeat", "accept", "retry", "data_dir",
    "device", "client_chunk", "threads", "memory_budget", "jobs", "dask", "out", "resume", "quiet", "log", "help",
)  # fmt: skip
"""Names of the options of ``python -m fedstat.fl`` that are no settings of a run."""


def require_free_names(algorithm: str) -> None:
    """Raise ValueError if an algorithm has a setting with the name of a setting of runs, a key or an option.

    Its value would go to the run, without a word to the algorithm.
    """
    kinds = {
        "a setting of the run": [field.name for field in fields(Settings)],
        "a key of grid files": [key.name for key in STRUCTURE],
        "an option of python -m fedstat.fl": OF_COMMAND,
    }
    for name in algorithms.settings_of(algorithm):
        for kind, reserved in kinds.items():
            if name in reserved:
                function = re.match(r"\w+", algorithm.rpartition(":")[2])
                raise ValueError(
                    f"{custom.short(algorithm)} has a setting {name}, which is {kind}. Rename it, for example "
                    f"{function[0] if function else 'own'}_{name}."
                )


OF_PRIVACY = ("clip", "noise_multiplier", "delta", "clip_moments", "noise_multiplier_moments")
"""Settings of :func:`fedstat.fl.aggregate.private`."""

OF_AGGREGATOR = (*OF_PRIVACY, "aggregator")
"""Settings of :meth:`Settings.make_aggregator`."""


@dataclass(frozen=True)
class Settings:
    """Settings of one run; :meth:`of` also takes the settings of its algorithm by name.

    Parameters
    ----------
    scenario : str, optional
        Name of the scenario in tables; data set and partition by default.
    data, partition : str
        ``data``: a name of ``fedstat.data.SOURCES``, or the path of the user's arrays
        (:func:`fedstat.data.arrays.load`); "cifar-100:test" takes the published test samples only. ``partition``: one
        of ``fedstat.study.federation.PARTITIONS``.
    clients : int
        Number of clients; the partition "natural" sets it.
    task : {"classification", "regression"}, optional
        By default regression if the targets of the user's file are real numbers, else classification. Targets that are
        whole numbers of a floating-point type need it.
    target, client_column : tuple of str, str, optional
        Columns of a .csv file, see :func:`fedstat.data.from_table`.
    standardize : bool
        Scale features and real-valued targets by mean and standard deviation of the training samples.
    loss : {"cross-entropy", "squared", "absolute", "huber"}, optional
        See :func:`fedstat.fl.train`.
    max_samples : int, optional
        Largest number of samples per client, over all subsets.
    min_samples : int
        Smallest number of samples per client. Smaller clients get more samples (Dirichlet) or are removed (natural).
        If the user's file has ``split``, a client gets at least this number, times the proportion of training samples
        in the file, of training samples.
    test_fraction, validation_fraction : float
        Fractions of each client's samples, drawn at random. Where the data divide the samples (``split`` of the user's
        file, LEAF's data with the partition natural), this division is kept, and setting the fraction of a subset of
        the user's file is an error. Subsets that the data lack are drawn from each client's training samples. The
        partition then deals the training samples, and the other samples in the same class proportions.
    unseen_fraction : float
        Fraction of unseen clients, which never train and are evaluated after the last round (FedFac, Table 3).
    stratify : bool
        Draw test and validation samples in the class proportions of each client, as nearly as rounding allows.
    class_labels : {"common", "permuted"}
        "permuted": every client numbers the classes in a different order, see
        :func:`fedstat.data.partition.permute_labels`; its output layer must then be personal.
    domains : tuple of str
        Domains of the partition "domains": names of :data:`fedstat.data.partition.CIFAR100_DOMAINS`, by default all
        five, or of superclasses, with equal numbers of classes. Clients are divided evenly among the domains.
    net : str
        A name of ``fedstat.fl.nets.NETS``, or "path/to/file.py:name": a function of a sample's shape and the number of
        outputs, which makes a :class:`fedstat.fl.nets.Net` or a ``torch.nn.Module``.
    width : float
        Factor that multiplies the network's channels and hidden units.
    norm : {"group", "batch"}, optional
        Normalization layers of the network.
    net_options : tuple of str
        Further arguments of the network, such as "hidden=32".
    algorithm : str
        A name of ``fedstat.fl.algorithms.ALGORITHMS``, or "path/to/file.py:name": a function that makes an
        :class:`fedstat.fl.algorithm.Algorithm`, whose arguments are its settings. Either may end in one of
        ``fedstat.fl.algorithms.WRAPPERS``.
    options : tuple of str
        Settings of the algorithm, such as "components=2", in the order of :func:`fedstat.fl.algorithms.settings_of`;
        other settings have the algorithm's defaults.
    rounds, participation, local_epochs, batch_size, optimizer, lr, server_lr, seed, evaluate_every, ablation, probe,
    precision
        See :func:`fedstat.fl.train`. ``batch_size`` 0 takes all samples as one batch; two numbers are a range of
        participation rates. The partition uses the seed, too.
    sampling : {"fixed", "poisson"}
        See :func:`fedstat.fl.train`.
    aggregator : str
        A name of ``fedstat.fl.prepare.AGGREGATORS``, such as "median" or "trimmed-mean:0.1".
    clip, noise_multiplier, delta, clip_moments, noise_multiplier_moments : float, optional
        Settings of differential privacy, see :func:`fedstat.fl.aggregate.private`. A private run needs the first two;
        the others have the defaults of that function. Without ``clip``, setting another is an error.
    prediction_rules : tuple of str
        Other prediction rules for the final models: the algorithm's name followed by one of
        ``fedstat.fl.algorithms.PREDICTION_RULES`` and its settings, such as "fedavg-shrunken by=layer".
    keep_weights : tuple of str
        Layers whose weights are stored; "all" or "none" stands alone.
    metrics : tuple of str
        Names of ``fedstat.fl.metrics.METRICS``, which evaluations measure beside accuracy; their order has no effect.
    store_predictions : bool
        Store each client's predictions of its test samples after the last round.
    """

    scenario: str | None = setting(None, "data", "name of the scenario in tables (default: data set and partition)")
    data: str = setting(
        "digits",
        "data",
        f"data set: {', '.join(datasets.SOURCES)}, or the path of your arrays, own.npz, with {arrays.ARRAYS}, or of "
        "your table, own.csv, with the columns y and, if you like, client and split, all others features; a name that "
        "ends in :train or :test takes only these published samples",
    )
    partition: str = setting(
        "dirichlet:0.1", "data", f"partition of samples among clients: {', '.join(federation.PARTITIONS)}"
    )
    clients: int = setting(20, "data", "number of clients C; the partition natural sets it", low=1)
    task: Task | None = setting(
        None, "data", "what to predict (default: regression if targets are real numbers, else classification)"
    )
    target: tuple[str, ...] = setting(
        (), "data", "of a .csv file, column of the target (default y); several are several real-valued targets"
    )
    client_column: str | None = setting(None, "data", "of a .csv file, column of the clients (default client)")
    standardize: bool = setting(
        False,
        "data",
        "scale features and real-valued targets to mean 0 and SD 1 over the training samples; errors are reported in "
        "the units of the target",
    )
    max_samples: int | None = setting(None, "data", "largest number of samples per client", low=1)
    min_samples: int = setting(10, "data", "smallest number of samples per client", low=1)
    test_fraction: float = setting(
        federation.TEST_FRACTION,
        "data",
        "fraction of each client's samples for testing, unless the data say which samples are",
        above=0,
        below=1,
    )
    validation_fraction: float = setting(
        0.0, "data", "fraction of each client's samples for validation, unless the data say which samples are"
    )
    unseen_fraction: float = setting(
        0.0,
        "data",
        "fraction of unseen clients, which never train and are evaluated after the last round",
        low=0,
        below=1,
    )
    net: str = setting(
        "mlp",
        "method",
        f"network: {', '.join(nets.NETS)}; or path/to/file.py:name, a function of the shape of a sample and the number "
        "of outputs that makes a Net or a torch.nn.Module",
    )
    width: float = setting(1.0, "method", "factor that multiplies the network's channels and hidden units", above=0)
    norm: Literal["group", "batch"] | None = setting(None, "method", "normalization layers of the network")
    net_options: tuple[str, ...] = setting(
        (), "method", "further arguments of the network, such as hidden=32 or hidden=64,32"
    )
    algorithm: str = setting(
        "fedfac-dynamic",
        "method",
        f"algorithm: {', '.join(named())}; a suffix modifies it: + (fine-tuned), -shrunken, -low-rank or "
        "-personal-head, which + or -shrunken may follow; or path/to/file.py:name, a function that makes an Algorithm "
        "and whose arguments become options",
    )
    options: tuple[str, ...] = setting((), "method", "settings of the algorithm and of its suffix, such as by=client")
    rounds: int = setting(20, "training", "number of communication rounds T", low=1)
    participation: Participation = setting(
        TrainConfig.participation,
        "training",
        "participation rate: fraction of clients selected per round, or a range from which it is drawn in every round",
    )
    local_epochs: int = setting(TrainConfig.local_epochs, "training", "epochs of local training per round", low=1)
    batch_size: int = setting(TrainConfig.batch_size, "training", "samples per batch; 0 takes all as one batch", low=0)
    loss: Literal["cross-entropy", "squared", "absolute", "huber"] | None = setting(
        None, "training", "loss; squared (the default), absolute or huber for real-valued targets"
    )
    optimizer: Literal["sgd", "adam"] = setting("sgd", "training", "local optimizer")
    lr: float = setting(0.1, "training", "local learning rate", above=0)
    server_lr: float = setting(TrainConfig.server_lr, "training", "server learning rate", above=0)
    seed: int = setting(
        TrainConfig.seed, "training", "seed of partition, initial parameters, selected clients and batches", low=0
    )
    evaluate_every: int = setting(1, "measurements", "number of rounds between evaluations", low=1)
    ablation: int = setting(
        0,
        "measurements",
        "number of draws of random values that replace shared or personal units after the last round",
        low=0,
    )
    probe: tuple[str, ...] = setting(
        (),
        "measurements",
        "split-half: training of selected clients on each half of their samples, for the reliability of client "
        "differences; drift: distance of clients from the global model; trained-weights: of a private run, weights "
        "before aggregation, which noise does not protect (other runs always store them); parameters: factors of "
        "composed weights",
        choices=tuple(PROBES),
    )
    prediction_rules: tuple[str, ...] = setting(
        (),
        "measurements",
        "other prediction rules for the final models, such as fedavg+ or 'fedavg-shrunken by=layer'",
    )
    precision: Precision = setting(
        ComputeConfig.precision, "training", "precision of matrix products in training and evaluation"
    )
    stratify: bool = setting(False, "data", "draw test and validation samples in the class proportions of each client")
    class_labels: Literal["common", "permuted"] = setting(
        "common", "data", "permuted: every client numbers the classes in a different order"
    )
    domains: tuple[str, ...] = setting(
        (),
        "data",
        f"domains, or superclasses, of the partition domains (default {', '.join(map(repr, federation.DOMAINS))}); "
        "clients are divided evenly among them",
    )
    sampling: Sampling = setting(
        TrainConfig.sampling,
        "training",
        "fixed: the same number of clients in every round; poisson: each client independently, with the participation "
        "rate as its probability",
    )
    aggregator: str = setting(
        "mean",
        "training",
        f"combines each parameter over clients: {', '.join(AGGREGATORS)} (0.1 drops a tenth of the values at each end)",
    )
    clip: float | None = setting(
        None,
        "privacy",
        "largest norm of a client's update; makes the run differentially private (needs --noise-multiplier)",
        above=0,
    )
    noise_multiplier: float | None = setting(
        None, "privacy", "SD of the noise on the sum of updates, divided by --clip", above=0
    )
    delta: float | None = setting(
        None, "privacy", "probability δ with which the bound ε may fail, at most 1 / clients (default 1e-5)"
    )
    clip_moments: float | None = setting(
        None,
        "privacy",
        "largest norm of a client's moments for FedFac's split, divided by the norm of the global model's moments "
        "(default 1)",
        above=0,
    )
    noise_multiplier_moments: float | None = setting(
        None, "privacy", "noise multiplier of FedFac's moments (default: --noise-multiplier)", above=0
    )
    keep_weights: tuple[str, ...] = setting(
        ("all",), "measurements", "layers whose weights are stored; or all, or none"
    )
    metrics: tuple[str, ...] = setting(
        (),
        "measurements",
        f"metrics of each client's test samples, measured in evaluations beside accuracy: {', '.join(METRICS)}",
        choices=(*METRICS, *ERRORS),
    )
    store_predictions: bool = setting(
        False, "measurements", "store the predictions of all test samples after the last round"
    )

    def __post_init__(self) -> None:
        # Checks that need no data; other settings are checked by the functions that take them.
        for name in (
            "options", "net_options", "prediction_rules", "probe", "domains", "keep_weights", "metrics", "target"
        ):  # fmt: skip
            object.__setattr__(self, name, federation.strings(name, getattr(self, name)))
        object.__setattr__(self, "keep_weights", self.keep_weights or Settings.keep_weights)
        if not custom.is_in_file(self.net):
            check.choice("net", self.net, [*nets.NETS, "FILE.py:FUNCTION"])
        check_fields(self)
        object.__setattr__(self, "metrics", tuple(name for name in (*METRICS, *ERRORS) if name in self.metrics))
        for name in ("data", "algorithm", "net"):
            object.__setattr__(self, name, custom.within(getattr(self, name), "."))
        require_free_names(self.algorithm)
        object.__setattr__(self, "options", _canonical(self.algorithm, self.options))
        federation.source_of(self.data)
        kind, _ = federation.partition_of(self.partition)
        federation.require_domains(kind, self.domains, self.clients)
        object.__setattr__(self, "participation", checked(self.participation))
        check.real("validation_fraction", self.validation_fraction, low=0, high=1 - self.test_fraction, open_high=True)
        aggregator = self.make_aggregator()
        if ":" in self.aggregator:  # equal numbers get equal text: "trimmed-mean:.10" becomes "trimmed-mean:0.1"
            object.__setattr__(self, "aggregator", aggregator.name)
        algorithm = self.make_algorithm()
        prepare.require_weights(algorithm, aggregator)
        for wrap in self.make_prediction_rules().values():
            wrap(algorithm)
        self._check_network(algorithm)

    def _check_network(self, algorithm: Algorithm) -> None:
        """Check the network, and layers in the settings; a user's network is made when the data are there."""
        sample, outputs, vocabulary = like(self)
        if custom.is_in_file(self.net):
            own_options(self, vocabulary)
            return
        net = make(self, sample, outputs, vocabulary)
        if "layers" in algorithm.settings:
            masks.resolve(net, algorithm.settings["layers"])
        for layer in self.layers_kept or ():
            keywords = ["all", "none"] if len(self.keep_weights) == 1 else []
            check.choice("keep_weights", layer, [*nets.layers(net), *keywords])
        for name in {"personal_layers", "global_layers"} & set(algorithm.settings):
            masks.last_layers(net, name, algorithm.settings[name], all_too=name == "global_layers")

    @property
    def name(self) -> str:
        """Name of the scenario: the setting, or data set and partition."""
        permuted = ", permuted labels" if self.class_labels == "permuted" else ""
        return self.scenario or default_name(self.data, self.partition) + permuted

    @property
    def layers_kept(self) -> tuple[str, ...] | None:
        """Layers whose weights are stored; None for all."""
        named: dict[tuple[str, ...], tuple[str, ...] | None] = {("all",): None, ("none",): ()}
        return named.get(self.keep_weights, self.keep_weights)

    @property
    def given(self) -> dict[str, Any]:
        """Settings passed to the algorithm, by name."""
        return federation.network_options("options", self.options)

    @classmethod
    def of(cls, **settings: Any) -> Settings:
        """Make the settings of a run and its algorithm from names.

        Raises
        ------
        ValueError
            If a setting is unknown (the message has the nearest names), or is passed by name and among the options.

        Examples
        --------
        >>> Settings.of(algorithm="fedprox", mu=0.3).options
        ('mu=0.3',)
        """
        return cls(**_as_fields(settings, settings.get("options", ()), settings.get("algorithm", cls.algorithm)))

    def but(self, **settings: Any) -> Settings:
        """Return a copy with settings replaced by name; None restores the algorithm's default.

        Examples
        --------
        >>> Settings.of(kappa=0.75, tau=0.5).but(rounds=3, tau=0.25).options
        ('kappa=0.75', 'tau=0.25')
        """
        unchanged = tuple(option for option in self.options if option.partition("=")[0] not in settings)
        algorithm = settings.get("algorithm", self.algorithm)
        return replace(self, **_as_fields(settings, settings.get("options", unchanged), algorithm))

    def make_algorithm(self) -> Algorithm:
        """Make the algorithm with its settings."""
        return algorithms.named(self.algorithm, **self.given)

    def training(self) -> TrainConfig:
        """Return the settings of training, with the optimizer and the aggregator made from their names."""
        return TrainConfig(
            optimizer=optimizer_named(self.optimizer, self.lr),
            participation=self.participation,
            sampling=self.sampling,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size or None,
            server_lr=self.server_lr,
            aggregator=self.make_aggregator(),
            seed=self.seed,
        )

    def make_aggregator(self) -> Aggregator:
        """Return the private aggregator if ``clip`` is set, else the aggregator by name."""
        privacy = {name: value for name in OF_PRIVACY if (value := getattr(self, name)) is not None}
        if not privacy:
            return aggregator_named(self.aggregator)
        if self.clip is None:
            name = next(iter(privacy))
            raise ValueError(f"{name} has no effect without clip, which makes a run private, but got {privacy[name]!r}")
        if self.aggregator != Settings.aggregator:
            raise ValueError(
                f"clip={self.clip:g} makes a run private by noise on a sum over clients, but aggregator "
                f"{self.aggregator!r} takes no sum. Remove clip, or use aggregator 'mean'."
            )
        if self.noise_multiplier is None:
            raise ValueError(
                f"clip={self.clip:g} makes a run private, but noise_multiplier is missing. Set it, to 1.0 for example."
            )
        return private(**privacy)

    def make_prediction_rules(self) -> dict[str, Callable[[Algorithm], Algorithm]]:
        """Return the wrappers of the algorithm that make its other prediction rules, by their texts."""
        wrappers: dict[str, Callable[[Algorithm], Algorithm]] = {}
        for text in self.prediction_rules:
            if self.algorithm.endswith(algorithms.PREDICTION_RULES):
                raise ValueError(
                    "prediction_rules are for algorithms without a prediction rule in their name, but got "
                    f"{self.algorithm}. Use the plain name, such as algorithm fedavg with prediction_rules fedavg+."
                )
            name, *options = text.split() or [""]
            suffix = name.removeprefix(self.algorithm)
            if not name.startswith(self.algorithm) or suffix not in algorithms.PREDICTION_RULES:
                rules = ", ".join(self.algorithm + suffix for suffix in algorithms.PREDICTION_RULES)
                raise ValueError(
                    f"prediction_rules of {self.algorithm} must begin with one of {rules}, but got {text!r:.200}"
                )
            settings = federation.network_options("prediction_rules", tuple(options))
            algorithms.require_settings(name, settings)
            wrappers[text] = partial(algorithms.WRAPPERS[suffix], **settings)
        return wrappers


def names(more: Iterable[Any] = ()) -> list[str]:
    """Return the names of all settings: fields of :class:`Settings`, and settings of all algorithms.

    ``more`` names users' algorithms; other names in it are ignored.
    """
    all_algorithms = [*algorithms.ALGORITHMS, *(name for name in more if custom.is_in_file(name))]
    special = [name for algorithm in all_algorithms for name in algorithms.settings_of(algorithm)]
    return list(dict.fromkeys([*(field.name for field in fields(Settings)), *special]))


def without_effect(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of settings that have no effect with the others; see :meth:`Settings.of`."""
    declared = algorithms.settings_of(settings.get("algorithm", Settings.algorithm))
    options = federation.network_options("options", federation.strings("options", settings.get("options", ())))
    values = {name: setting.default for name, setting in declared.items()} | options | dict(settings)
    names = {name for name, d in declared.items() if d.effect and not d.effect.holds(values[d.effect.other])}
    names |= set(OF_PRIVACY) if settings.get("clip") is None else set()
    return names if str(settings.get("partition")).startswith("domains") else names | {"domains"}


def _as_fields(settings: Mapping[str, Any], options: Any, algorithm: Any) -> dict[str, Any]:
    """Return fields of :class:`Settings`; move settings of the algorithm to the options."""
    common = {field.name for field in fields(Settings)}
    options = federation.strings("options", options)
    if special_names := [name for name in settings if name not in common]:
        all_names = names([algorithm])
        for name in special_names:
            check.require_setting(name, all_names)
    if duplicates := {option.partition("=")[0] for option in options} & (settings.keys() - common):
        raise ValueError(
            f"{min(duplicates)} is given twice, by name and among the options {list(options)}. Remove one of them."
        )
    special = [f"{k}={federation.text(k, v)}" for k, v in settings.items() if k not in common and v is not None]
    return {k: v for k, v in settings.items() if k in common} | {"options": (*options, *special)}


def _canonical(algorithm: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return options in the order of the algorithm's settings, with floats in one form: "mu=1" becomes "mu=1.0"."""
    values = federation.network_options("options", options)
    algorithms.require_settings(algorithm, values)
    canonical = []
    for name, declared in algorithms.settings_of(algorithm).items():
        if name in values:
            value = values[name]
            if isinstance(value, tuple) and not declared.several:
                raise ValueError(f"{name} must be one value, but got {value!s:.200}")
            if declared.number and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            canonical.append(f"{name}={federation.text(name, value)}")
    return tuple(canonical)
