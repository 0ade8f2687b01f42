"""One run of one algorithm, from a data set to a labeled store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat._utils.loops import on_interrupt, progress_bar
from fedstat.data._clients import LEFT_OUT
from fedstat.data.targets import Task
from fedstat.fl import (
    batches,
    custom,
    disk_rows,
    logs,
    loop,
    masks,
    naming,
    nets,
    private_training,
    ranks,
    record,
    round_metrics,
    stored,
)
from fedstat.fl.aggregate import Aggregator
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.checkpoints import Checkpoints, WeightsWriter, need_common_rows, require_disk
from fedstat.fl.cohort import fewest
from fedstat.fl.ending import COMMAND, end_at
from fedstat.fl.job import ComputeConfig, Job, Participation, Precision, Sampling, TrainConfig, of_rank, tf32
from fedstat.fl.ledger import Ledger
from fedstat.fl.loop import start
from fedstat.fl.metrics import names_of as metrics_named
from fedstat.fl.metrics import of_run as metrics_of_run
from fedstat.fl.metrics import require_memory as require_metrics_memory
from fedstat.fl.nets import Net
from fedstat.fl.optim import Optimizer
from fedstat.fl.prepare import aggregator_named, optimizer_named, prepare, unseen_rows
from fedstat.fl.prepare import group as dataset_group
from fedstat.fl.probes import Observer, measures
from fedstat.fl.probes.measures import drift_probe, halves_probe, measures_probe
from fedstat.fl.probes.predictions import predictions_probe
from fedstat.fl.probes.variants import (
    UNSEEN,
    ablation_probe,
    new_clients_probe,
    prediction_jobs,
    prediction_rules_probe,
)
from fedstat.fl.ranks import Relay
from fedstat.fl.state import State
from fedstat.fl.watch import OnRoundEnd, Watch
from fedstat.results.tables import count
from fedstat.store import Group, Writer

PROBES: dict[str, Callable[[Job, int], Observer] | None] = {
    "split-half": halves_probe,
    "drift": drift_probe,
    "trained-weights": None,
    "parameters": None,
}
"""Functions of a job and its number of rounds that make the observer of a probe; None: the probe stores checkpoints."""
_ALL_CLIENTS = ("measures", "mixing", "probe")  # groups in which every rank has the values of all clients


@check.named_options()
def train(
    data: xr.Dataset,
    net: Net,
    algorithm: Algorithm,
    *,
    rounds: int,
    participation: Participation = 1.0,
    sampling: Sampling = "fixed",
    local_epochs: int = 5,
    batch_size: int | None = 32,
    optimizer: str | Optimizer = "sgd",
    lr: float = 0.1,
    server_lr: float = 1.0,
    aggregator: str | Aggregator = "mean",
    optimizer_state: Literal["reset", "keep"] = "reset",
    task: Task | None = None,
    loss: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    precision: Precision = "float32",
    memory_budget: str | int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoints: Sequence[int] = (),
    keep_weights: Sequence[str] | None = None,
    evaluate_every: int = 1,
    unseen_clients: xr.Dataset | None = None,
    ablation: int = 0,
    probe: str | Sequence[str] | None = None,
    prediction_rules: Mapping[str, Callable[[Algorithm], Algorithm]] | None = None,
    metrics: str | Sequence[str] = (),
    store_predictions: bool = False,
    progress: bool | Callable[[int], object] | None = None,
    on_round_end: OnRoundEnd | None = None,
    log: str | Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> xr.DataTree:
    """Train a federated network and return the run: scores, weights and splits with named dimensions.

    Parameters
    ----------
    data : Dataset
        x (client, sample, ...) and y (client, sample), or sample-major with a coordinate ``client``. The coordinate
        ``split`` (sample) says "train", "test" or "validation"; ``y_true``, if clients number classes differently. y
        may be texts, or real numbers (client, sample[, target]). The run keeps names of clients and classes.
    net, algorithm : Net, Algorithm
        Such as ``fedstat.fl.nets.mlp([100, 200, 1])`` and ``fedstat.fl.algorithms.fedfac(["fc1"], kappa=0.85)``.
    rounds, local_epochs, batch_size : int
        Communication rounds T; epochs of local training G; samples per batch B, or None for one batch per client.
    participation, sampling : float or (float, float), {"fixed", "poisson"}
        Fraction of clients selected per round, or its range. "poisson" selects each client independently.
    optimizer, lr, optimizer_state : {"sgd", "adam"} or Optimizer, float, {"reset", "keep"}
        Local optimizer; its learning rate η_l, if it is a name; "reset" clears its moments in every round.
    server_lr, aggregator : float, str or Aggregator
        η_g in W ← W + η_g Σ n_k Δ_k / Σ n_k, with the "mean" of updates Δ; or "median", "trimmed-mean:0.1", ...
    task, loss : {"classification", "regression"}, {"cross-entropy", "squared", "absolute", "huber"}, optional
        By default regression with squared error for y of real numbers, else classification with cross-entropy.
    seed : int
        Every draw comes from a stream keyed by seed, purpose, client and round.
    device, client_chunk, threads, precision, memory_budget : str, int, int, {"float32", "tf32", "bfloat16"}, str or int
        Device of PyTorch, clients trained as one tensor, parallel chunks, precision of matrix products, and bytes of
        memory ("2GiB"), beyond which client rows are kept in the store.
    out, resume, checkpoints, keep_weights : path, bool, sequence of int, sequence of str
        Store to write; continue the run there, also with more ``rounds`` and ``checkpoints``; rounds after which
        weights are stored, besides the last; layers whose weights are stored.
    evaluate_every, unseen_clients, ablation : int, Dataset, int
        Rounds between evaluations; unseen clients, evaluated after training; draws of values that replace units.
    probe : {"split-half", "drift", "trained-weights", "parameters"} or sequence of these, optional
        Measurements that do not change training.
    prediction_rules : mapping from str to callable (Algorithm) -> Algorithm, optional
        Further rules for the final models, such as ``{"fedavg+": algorithms.finetuned}``.
    metrics, store_predictions : {"class_accuracy", "balanced_accuracy", "macro_f1", "auc"} or sequence of these, bool
        Metrics of test samples that evaluations measure beside accuracy; store predicted labels after the last round.
    progress, on_round_end, log, about : bool or callable (int), callable (RoundEnd), str or sequence of str, mapping
        True shows a bar, None after 2 s, False none; a callable gets rounds done. Called after each round; "stop" ends
        the run. Logs "csv", "tensorboard", "wandb", "mlflow": :doc:`/howto/watch-runs`. Further settings to store.

    Returns
    -------
    DataTree
        ``/metrics``: accuracy, or rmse, (round, client), ...; ``/weights/<layer>``: w (checkpoint, client, unit,
        weight), b; ``/split/<layer>``: shared (round, unit), .... All groups: :doc:`/howto/train`.

    Raises
    ------
    ValueError
        If a setting is out of range, or ``resume`` finds a run with other settings.
    FloatingPointError
        If a client diverges; earlier rounds stay in the store.

    Examples
    --------
    >>> from fedstat import fl, sim
    >>> data = sim.generate(clients=4, d=5, m=8, n_train=20, n_test=10)
    >>> run = train(data, fl.nets.mlp([5, 8, 1]), fl.algorithms.fedfac(["fc1"]), rounds=3, batch_size=5)
    >>> run["split/fc1/shared"].sum("unit").values
    array([4, 4, 4])
    """
    log_names = _log_names(log, out)
    if on_round_end is not None and not callable(on_round_end):
        raise ValueError(
            f"on_round_end must be a callable, but got {on_round_end!r:.200}. Pass a function of one argument."
        )
    check.integer("rounds", rounds)
    check.integer("evaluate_every", evaluate_every)
    check.integer("ablation", ablation, low=0)
    for checkpoint in checkpoints:
        check.integer("checkpoints", checkpoint, high=rounds)
    training = TrainConfig(
        optimizer=optimizer_named(optimizer, lr),
        participation=participation,
        sampling=sampling,
        local_epochs=local_epochs,
        batch_size=batch_size,
        server_lr=server_lr,
        aggregator=aggregator_named(aggregator),
        optimizer_state=optimizer_state,
        seed=seed,
    )
    compute = ComputeConfig(
        device=device, client_chunk=client_chunk, threads=threads, precision=precision, memory_budget=memory_budget
    )
    if task != "regression":
        data, unseen_clients = naming.coded(data, unseen_clients)
    job = prepare(
        data, net, algorithm, training, compute, task=task, loss=loss, track=True, unseen_clients=unseen_clients
    )
    names = metrics_named(metrics, job.loss.task)
    probe_names = _probe_names(probe)
    weights = _stored_weights(job, {*checkpoints, rounds}, keep_weights, probe_names)
    samples = {"train": job.train} | ({"test": job.test} if "class_accuracy" in names else {})
    clients = dataset_group(data, samples, nets.n_outputs(job.net), job.scaling)
    measured = metrics_of_run(names, clients, own_labels=job.own_labels)
    job = replace(job, metrics=measured, common_rows=weights.trained and need_common_rows(job))
    require_metrics_memory(job, store_predictions=store_predictions)
    rule_jobs, unseen = prediction_jobs(job, prediction_rules or {}), unseen_rows(job, unseen_clients)
    unseen_labels = None if unseen_clients is None else naming.client_labels(unseen_clients)
    measurements = _Measurements(
        rounds, evaluate_every, weights, probe_names, ablation, rule_jobs, unseen, unseen_labels, store_predictions
    )
    optimizer_name = optimizer if isinstance(optimizer, str) else optimizer.name
    described = dict(about or {})
    if "net" in described:  # a network of a file is known by the file's name and content, wherever it lies
        described["net"] = custom.short(described["net"])
    config = described | _config(job, net, algorithm, training, measurements, optimizer_name, lr)
    config |= naming.noted(job.client_labels, measured.classes)
    if job.loss.task == "regression":
        config |= {"task": job.loss.task, "loss": loss or "squared"}
    attrs = _attributes(job, net, algorithm, config, about or {}, data)
    probes = _probes(job, measurements)
    groups = record.run_layout(job, rounds, weights)
    groups |= {"clients": clients}
    for observer in probes:
        groups |= observer.groups
    groups = {
        name: naming.named(group, None if name == UNSEEN else job.client_labels) for name, group in groups.items()
    }
    process_group = _process_group(job, attrs, out, memory_budget)
    local_job = of_rank(job, process_group)
    watch = Watch(
        process_group,
        round_metrics.of_layout(groups),
        on_round_end,
        log_names,
        path=None if out is None else Path(out),
        settings=config,
        hint=lambda: _resume_hint(out),
    )
    del job  # frees the samples of other ranks' clients
    show = False if callable(progress) or process_group.rank else progress
    label = f"{config.get('scenario', '')} {algorithm.name}, seed {seed}".lstrip()
    shown = progress_bar(rounds, "round", show, label=label)
    with on_interrupt(lambda: _resume_hint(out)), shown as bar:
        tick = progress if callable(progress) else bar.update
        plan = _Plan(config, attrs, groups, weights, probes, tick, watch, resume)
        return store.run_at(out, lambda path: _run_at(local_job, plan, path), resume=resume)


def _log_names(log: str | Sequence[str], out: str | Path | None) -> tuple[str, ...]:
    """Return the names of the requested logs; raise ValueError if one is unknown or cannot be written."""
    names = logs.names_of(log)
    if names and out is None:
        raise ValueError(f"log={names[0]!r} writes beside the store of a run, but out is missing. Pass out=...")
    return names


def _resume_hint(out: str | Path | None) -> str:
    if out is None:
        return "Nothing is stored. Pass out=... to keep finished rounds."
    if not Path(out).exists():
        return "No round was finished, so nothing is stored."
    return (
        f"The finished rounds are in {str(out)!r}. To resume, repeat the call with resume=True. To end the run there: "
        f"fedstat.fl.finish({str(out)!r})."
    )


class _Measurements(NamedTuple):
    """Measurements of a run: rounds, evaluations, weights, probes, prediction rules, unseen clients, predictions."""

    rounds: int
    evaluate_every: int
    weights: Checkpoints
    probe_names: Sequence[str]
    ablation: int
    rule_jobs: Mapping[str, Job]
    unseen_clients: Sequence[batches.Rows]
    unseen_labels: np.ndarray | None
    store_predictions: bool


def _config(
    job: Job,
    net: Net,
    algorithm: Algorithm,
    training: TrainConfig,
    measurements: _Measurements,
    optimizer_name: str,
    lr: float,
) -> dict[str, Any]:
    """Return the settings of a run by name."""
    return {
        "algorithm": algorithm.name,
        "algorithm_settings": dict(algorithm.settings),
        "shapes": {name: list(shape) for name, shape in net.shapes.items()},
        "clients": job.clients,
        "data_digest": batches.digest(*job.subsets.values(), *measurements.unseen_clients),
        "rounds": measurements.rounds,
        "checkpoints": measurements.weights.rounds,
        "keep_weights": measurements.weights.layers,
        "evaluate_every": measurements.evaluate_every,
        "ablation": measurements.ablation,
        "probe": measurements.probe_names,
        "prediction_rules": {
            name: dict(rule_job.algorithm.settings) for name, rule_job in measurements.rule_jobs.items()
        },
        "metrics": job.metrics.names,
        "store_predictions": measurements.store_predictions,
        "precision": job.compute.precision,
        "lr": lr,
        **vars(training),
        **private_training.noted(job),
        "optimizer": optimizer_name,
        "aggregator": training.aggregator.name,
    }


def _attributes(
    job: Job,
    net: Net,
    algorithm: Algorithm,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    data: xr.Dataset,
) -> dict[str, Any]:
    """Return the root attributes of a run's store; ``about`` holds the user's values, ``config`` the final ones."""
    title, components = f"{algorithm.name}, {count(config['rounds'], 'round')}", (algorithm, job.aggregator)
    attrs = store.provenance(title, config, command=COMMAND, device=str(job.device), user_code=components)
    attrs |= {"about": store.to_json(about)}
    if n_equal := batches.count_equal(job.train, job.test):
        attrs[stored.EQUAL_SAMPLES] = n_equal
    if LEFT_OUT in data.attrs:
        attrs[LEFT_OUT] = str(data.attrs[LEFT_OUT])
    return attrs | ({stored.PIECES: store.to_json(net.pieces)} if net.pieces else {})


class _Plan(NamedTuple):
    """Settings, layout and observers of a run."""

    config: Mapping[str, Any]
    attrs: Mapping[str, Any]
    groups: Mapping[str, Group]
    weights: Checkpoints
    probes: Sequence[Observer]
    tick: Callable[[int], object]
    watch: Watch
    resume: bool

    @property
    def by_client(self) -> frozenset[str]:
        """Names of arrays (round, client, ...) to which each rank adds the values of its clients."""
        groups = {name: group for name, group in self.groups.items() if name not in _ALL_CLIENTS}
        return frozenset(
            f"{name}/{array}"
            for name, group in groups.items()
            for array, variable in group.variables.items()
            if "client" in variable.dims
        )


def _probe_names(probe: str | Sequence[str] | None) -> list[str]:
    """Return the names of the requested probes without duplicates, in the order of ``PROBES``."""
    requested = [] if probe is None else [probe] if isinstance(probe, str) else list(probe)
    for name in requested:
        check.choice("probe", name, PROBES)
    return [name for name in PROBES if name in requested]


def _stored_weights(
    job: Job, rounds: set[int], keep_weights: Sequence[str] | None, probe_names: Sequence[str]
) -> Checkpoints:
    """Return the rounds and layers whose weights are stored, and at which stages.

    A private run stores weights before aggregation, which its noise does not protect, only if a probe asks for them.
    """
    all_layers = list(nets.layers(job.net))
    layers = all_layers if keep_weights is None else {masks.require_layer(job.net, name) for name in keep_weights}
    return Checkpoints(
        sorted(rounds),
        [layer for layer in all_layers if layer in layers],
        trained=bool(layers) and (not job.aggregator.privacy or "trained-weights" in probe_names),
        replicates="split-half" in probe_names and not job.hooks.downloads_differ,
        parameters="parameters" in probe_names,
    )


def _probes(job: Job, measurements: _Measurements) -> list[Observer]:
    """Return the observers that add groups to the store, and the observer of the privacy budget."""
    rounds, ablation = measurements.rounds, measurements.ablation
    probes = [measures_probe(job, rounds)]
    probes += [private_training.probe()] if job.aggregator.privacy else []
    probes += [make(job, rounds) for name in measurements.probe_names if (make := PROBES[name])]
    if measurements.unseen_clients:
        train_rows, test_rows = measurements.unseen_clients
        probes += [new_clients_probe(job, train_rows, test_rows, measurements.unseen_labels)]
    probes += [ablation_probe(job, ablation)] if ablation else []
    probes += [prediction_rules_probe(job, measurements.rule_jobs)] if measurements.rule_jobs else []
    probes += [predictions_probe(job)] if measurements.store_predictions else []
    return probes


def _process_group(job: Job, attrs: Mapping[str, Any], out: object, memory_budget: object) -> ranks.ProcessGroup:
    """Return the process group of the run; raise ValueError if a setting does not allow several ranks."""
    group = ranks.begin(job.sizes, fewest(job.participation, job.clients), job.device, json.loads(attrs["config"]))
    if group.several and out is None:
        raise ValueError(f"out is required with {group.number} ranks, which write one store. Pass the same out to all.")
    if group.several and memory_budget is not None:
        raise ValueError(
            "memory_budget is not supported with several ranks, which already divide the clients. Remove it."
        )
    if group.several and job.aggregator.privacy:
        raise ValueError(
            f"private(...) is not supported with several ranks, but got {group.number}. Start one process."
        )
    return group


def _run_at(job: Job, plan: _Plan, path: Path) -> None:
    """Make the run at ``path``, or continue it."""
    components = (job.algorithm, job.aggregator)
    if job.room is not None:
        job = replace(job, rows_folder=path / store.JOURNAL / disk_rows.FOLDER)

    def open_writer() -> Writer:
        store.settle(path)
        if plan.resume and path.exists():
            record.extend(path, plan.config, plan.groups, plan.attrs)
            return store.resume(path, plan.config, command=COMMAND, user_code=components)
        return store.create(path, plan.groups, plan.attrs)

    writer = job.process_group.first(open_writer)
    # BLAS threads do not speed up matrices of a few hundred units, and slow down a busy machine.
    precision, blas_threads = tf32(job.compute.precision == "tf32"), threadpool_limits(1, user_api="blas")
    with writer or nullcontext(), precision, blas_threads, job.process_group.watched():
        out = Relay(job.process_group, writer)
        if out.finished():
            return
        weights = WeightsWriter(out, plan.weights)
        observers = [*measures.observers(list(nets.layers(job.net))), *plan.probes, weights.observer]
        ledger = Ledger(out, job, plan.by_client, weights)
        with plan.watch:
            # No variable may hold the initial state: it would keep the rows of all clients in memory.
            n_done = loop.run(
                job,
                _load_state(job, plan, out, path, weights),
                observers,
                ledger,
                rounds=plan.config["rounds"],
                evaluate_every=plan.config["evaluate_every"],
                tick=plan.tick,
                watch=plan.watch,
            )
        if n_done == plan.config["rounds"]:
            out.finish()
            return
        out.commit()
    job.process_group.first(lambda: end_at(path, n_done))


def _load_state(job: Job, plan: _Plan, out: Relay, path: Path, weights: WeightsWriter) -> State:
    """Return the last stored state, or the initial state; raise an error if the disk is too small for the run."""
    state = record.load_state(out.states(), job) or start(job)
    require_disk(job, state, plan.weights, path)
    if not state.round:
        weights.write_initial(job)
    return state
