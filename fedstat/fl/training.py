"""One run of one algorithm, from a data set to a labelled store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from threadpoolctl import threadpool_limits

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat._utils.parallel import shown
from fedstat.fl import accountant, batches, disk_rows, loop, masks, nets, ranks, record, stored
from fedstat.fl.aggregate import Aggregator
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.chunks import require_disk
from fedstat.fl.cohort import fewest
from fedstat.fl.job import ComputeConfig, Job, Participation, Precision, Sampling, TrainConfig, of_rank, tf32
from fedstat.fl.loop import Ledger, start
from fedstat.fl.nets import Net
from fedstat.fl.optim import Optimizer
from fedstat.fl.prepare import aggregator_named, optimizer_named, prepare, unseen
from fedstat.fl.prepare import group as dataset_group
from fedstat.fl.probes import Observer, metrics
from fedstat.fl.probes.measures import drift_probe, halves_probe, measures_probe
from fedstat.fl.probes.variants import ablation_probe, new_clients_probe, readout_jobs, readouts_probe
from fedstat.fl.ranks import Relay
from fedstat.fl.state import State
from fedstat.store import Group, Writer

COMMAND = "fedstat.fl"
PROBES: dict[str, Callable[[Job, int], Observer] | None] = {
    "halves": halves_probe,
    "drift": drift_probe,
    "uploads": None,
    "parameters": None,
}
"""Probes by name: from a job and its number of rounds to an observer; None stores more at the checkpoints instead."""
_OF_ALL = ("measures", "mixing", "probe")  # groups whose values every process has for all clients


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
    seed: int = 0,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    precision: Precision = "float32",
    memory: str | int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoints: Sequence[int] = (),
    keep_weights: Sequence[str] | None = None,
    evaluate_every: int = 1,
    new: xr.Dataset | None = None,
    ablation: int = 0,
    probe: str | Sequence[str] | None = None,
    readouts: Mapping[str, Callable[[Algorithm], Algorithm]] | None = None,
    progress: bool | Callable[[int], object] | None = None,
    about: Mapping[str, Any] | None = None,
) -> xr.DataTree:
    """Train a federated network and store what a statistician needs.

    Parameters
    ----------
    data : Dataset
        Dense, x (client, sample, ...) and y (client, sample), or sample-major with a coordinate ``client``; the
        coordinate ``split`` (sample) says "train", "test" or, optionally, "validation". If a coordinate ``y_true`` says
        that clients number their classes differently, as by :func:`fedstat.data.partition.permute_labels` or
        ``domains``, no method may share an output layer: wrap it in ``algorithms.private_head``.
    net : Net
        For example ``fedstat.fl.nets.mlp([100, 200, 1])``.
    algorithm : Algorithm
        For example ``fedstat.fl.algorithms.fedfac(["fc1"], kappa=0.85, tau=0.5)``.
    rounds : int
        Communication rounds T.
    participation : float or (float, float), default 1
        Share of the clients active in a round, or the range from which it is drawn for every round.
    sampling : {"fixed", "poisson"}, default "fixed"
        Whether that share is always active, or each client with that probability, independently of the others: a round
        may then have no clients, and leaves everything as it is, but for noise.
    local_epochs : int, default 5
        G, epochs of local training in a round.
    batch_size : int or None, default 32
        B; None takes a client's samples as one batch.
    optimizer : {"sgd", "adam"} or Optimizer, default "sgd"
    lr : float, default 0.1
        η_l, local learning rate, if the optimiser is given by name.
    server_lr : float, default 1
        η_g: W ← W + η_g Σ n_k Δ_k / Σ n_k.
    aggregator : str or Aggregator, default "mean"
        How the server combines the entries that clients send: a name of ``fedstat.fl.prepare.AGGREGATORS``, such as
        "median" or "trimmed-mean:0.1", or an aggregator, such as the differentially private
        :func:`~fedstat.fl.aggregate.private`. "mean" weights clients by their numbers of training samples.
    optimizer_state : {"reset", "keep"}, default "reset"
        Whether a client's momentum or Adam moments start anew in every round.
    seed : int, default 0
        Every draw comes from a stream named by seed, purpose, client and round.
    device : str, default "cpu"
    client_chunk : int, optional
        Clients trained as one tensor; by default chosen from their size.
    threads : int, optional
        Chunks trained in parallel on the CPU; by default all cores.
    precision : {"float32", "tf32", "bfloat16"}, default "float32"
        Of matrix products in training and evaluation; parameters and updates are float32. "tf32" needs CUDA. "bfloat16"
        pays on GPUs and on CPUs with AVX-512-BF16 or AMX, for convolutions and batches of 50 samples or more.
    memory : str or int, optional
        Most memory that the run should take: "2GiB", "500MB" or bytes, of the process or, on a GPU, there. Beyond it,
        rows of clients (their own entries, optimiser states, memory) are kept in files in the store, and samples that
        a zarr store or a memory map holds stay there; both are read and written for active clients only. The numbers
        are the same.
    out : path, optional
        Store to write, a zarr folder; without it the run stays in memory.
    resume : bool
        Continue the run at ``out``, if there is one; the numbers are those of an uninterrupted run. Finished or not,
        it may get more ``rounds``, and ``checkpoints`` among these, all else equal: see :func:`record.extend`.
    checkpoints : sequence of int
        Rounds after which the clients' weights are stored, in addition to the last.
    keep_weights : sequence of str, optional
        Layers whose weights are stored; all by default.
    evaluate_every : int, default 1
        Rounds between evaluations of the models; the last round is always evaluated.
    new : Dataset, optional
        New clients, which do not train, with subsets "train" and "test"; evaluated after the last round.
    ablation : int, default 0
        Number of draws of random values that replace the shared or the personal units' parameters after the last round.
    probe : {"halves", "drift", "uploads", "parameters"} or sequence of these, optional
        "halves": before every evaluated round, train the active clients also on each half of their samples, to tell
        how much of the differences between clients is their own and not noise (:func:`fedstat.fl.profile`). "drift":
        distance of clients from the server's aggregate, in every round. "uploads": weights before aggregation, at the
        checkpoints. "parameters": the factors of composed weights, before and after aggregation, at the checkpoints.
    readouts : mapping from str to callable (Algorithm) -> Algorithm, optional
        Other ways to predict from the models after the last round, such as ``{"fedavg+": algorithms.finetuned}``:
        the scores that a run of that algorithm would have had.
    progress : bool or callable (int)
        True shows a bar or, without a terminal, a line every half minute; a callable is called with 1 after each round.
    about : mapping, optional
        Further settings to note in the run, such as the names of the data set and the partition.

    Returns
    -------
    DataTree
        ``/metrics`` (round, client): accuracy, loss on the test samples, of every client's personal model after
        aggregation, validation_accuracy, validation_loss, NaN in rounds without evaluation; accuracy_before,
        train_loss of the active clients; bytes_up, bytes_down, seconds
        (round); epsilon (round) if the aggregator is private;
        ``/clients``: n_train (client, class); label (client, class), domain (client), see
        :func:`fedstat.fl.prepare.group`;
        ``/weights/<layer>``: w (checkpoint, client, unit, weight), b (checkpoint, client, unit);
        ``/split/<layer>``: shared, communality, icc, and of a test decided (round, unit), n_factors, n_iter, converged
        (round);
        ``/new``: accuracy (rule, client), see :func:`fedstat.fl.probes.variants.accuracy`;
        ``/ablation``: accuracy (part, draw, client), see :func:`fedstat.fl.probes.variants.ablated_accuracy`;
        ``/choice``: step, finetuning (round, ...), what a method chose, see :class:`fedstat.fl.evaluate.Chosen`;
        ``/probe``: between, within (round, client, layer), see :func:`fedstat.fl.split_halves.parts`;
        ``/drift``: distance (round, client, layer), see :func:`fedstat.fl.probes.measures.drift_probe`;
        ``/uploads/<layer>``: w, b as in ``/weights``, before aggregation, NaN for clients that were not active;
        ``/parameters/<layer>``: the parameters of a composed network by their own names (``weight`` as w), dims
        (checkpoint, stage, client, ...) with the stages "trained" (before aggregation, NaN for clients that were not
        active) and "aggregated"; ``/weights`` and ``/uploads`` hold the weights composed of them, and other networks
        have no such group (:func:`fedstat.fl.client_weights` reads all of these);
        ``/measures``: what a method measures; ``/mixing``: weight (round, client, other), where its server mixes;
        ``/readouts``: accuracy, loss (readout, client), step (readout, client, layer).

    Raises
    ------
    ValueError
        If a setting is out of range, an output layer is shared by clients that number their classes differently, or
        ``resume`` finds a run with other settings, or one that cannot continue.
    FloatingPointError
        If a client diverges; earlier rounds stay in the store.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from fedstat.fl import algorithms, nets
    >>> x = np.random.default_rng(0).normal(size=(4, 30, 5))
    >>> data = xr.Dataset(
    ...     {"x": (("client", "sample", "feature"), x), "y": (("client", "sample"), (x[..., 0] > 0).astype(int))},
    ...     coords={"split": ("sample", ["train"] * 20 + ["test"] * 10)},
    ... )
    >>> run = train(data, nets.mlp([5, 8, 1]), algorithms.fedfac(["fc1"]), rounds=3, batch_size=5)
    >>> run["split/fc1/shared"].sum("unit").values
    array([4, 4, 4])
    """
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
    machine = ComputeConfig(
        device=device, client_chunk=client_chunk, threads=threads, precision=precision, memory=memory
    )
    job = prepare(data, net, algorithm, training, machine, track=True, new=new)
    asked = _asked(probe)
    at = _checkpoints(job, {*checkpoints, rounds}, keep_weights, asked)
    others, added = readout_jobs(job, readouts or {}), unseen(job, new)
    probes = _probes(job, rounds, asked, added, ablation, others)
    config = {
        **(about or {}),
        "algorithm": algorithm.name,
        "algorithm_settings": dict(algorithm.settings),
        "shapes": {name: list(shape) for name, shape in net.shapes.items()},
        "clients": job.clients,
        "data_digest": batches.digest(*job.subsets.values(), *added),
        "rounds": rounds,
        "checkpoints": at.rounds,
        "keep_weights": at.layers,
        "evaluate_every": evaluate_every,
        "ablation": ablation,
        "probe": asked,
        "readouts": {name: dict(one.algorithm.settings) for name, one in others.items()},
        "precision": precision,
        "lr": lr,
        **{name: value for name, value in vars(training).items() if (name, value) != ("sampling", "fixed")},
        **accountant.noted(job),
        "optimizer": optimizer if isinstance(optimizer, str) else optimizer.name,
        "aggregator": training.aggregator.name,
    }
    title = f"{algorithm.name}, {rounds} rounds"
    attrs = store.provenance(
        title, config, command=COMMAND, device=str(job.device), own=(algorithm, training.aggregator)
    )
    attrs |= {"about": store.to_json(about or {}), "layout": record.LAYOUT}  # as given; config holds the final values
    attrs |= {stored.PIECES: store.to_json(net.pieces)} if net.pieces else {}
    groups = record.run_layout(job, rounds, at) | {"clients": dataset_group(data, job.train, nets.n_outputs(job.net))}
    for one in probes:
        groups |= one.groups
    processes = _processes(job, attrs, out, memory)
    local = of_rank(job, processes)
    del job  # of all clients
    with shown(rounds, "round", show=progress is True and not processes.rank) as bar:
        tick = progress if callable(progress) else bar.update
        plan = _Plan(config, attrs, groups, at, probes, tick, resume)
        return store.run_at(out, lambda path: _make(local, plan, path), resume=resume)


class _Plan(NamedTuple):
    """Settings, layout and observers of a run."""

    config: Mapping[str, Any]
    attrs: Mapping[str, Any]
    groups: Mapping[str, Group]
    checkpoints: record.Checkpoints
    probes: Sequence[Observer]
    tick: Callable[[int], object]
    resume: bool

    @property
    def by_client(self) -> frozenset[str]:
        """Arrays (round, client, ...) of which each process measures its own clients' part."""
        parts = {name: group for name, group in self.groups.items() if name not in _OF_ALL}
        return frozenset(
            f"{name}/{one}" for name, group in parts.items() for one, v in group.variables.items() if "client" in v.dims
        )


def _asked(probe: str | Sequence[str] | None) -> list[str]:
    """Names of the probes asked for, each once, in the order of ``PROBES``."""
    given = [] if probe is None else [probe] if isinstance(probe, str) else list(probe)
    for name in given:
        check.choice("probe", name, PROBES)
    return [name for name in PROBES if name in given]


def _checkpoints(
    job: Job, rounds: set[int], keep_weights: Sequence[str] | None, asked: Sequence[str]
) -> record.Checkpoints:
    """Return when and of which layers weights are stored."""
    every = list(nets.layers(job.net))
    named = every if keep_weights is None else {masks.require_layer(job.net, layer) for layer in keep_weights}
    more = {name: name in asked for name in ("uploads", "parameters")}
    return record.Checkpoints(sorted(rounds), [layer for layer in every if layer in named], **more)


def _probes(
    job: Job, rounds: int, asked: Sequence[str], new: Sequence[batches.Rows], ablation: int, readouts: Mapping[str, Job]
) -> list[Observer]:
    """Return the observers that have groups of their own, and that of the privacy spent."""
    probes = [measures_probe(job, rounds)]
    probes += [accountant.probe()] if job.aggregator.privacy else []
    probes += [make(job, rounds) for name in asked if (make := PROBES[name])]
    probes += [new_clients_probe(job, *new)] if new else []
    probes += [ablation_probe(job, ablation)] if ablation else []
    probes += [readouts_probe(job, readouts)] if readouts else []
    return probes


def _processes(job: Job, attrs: Mapping[str, Any], out: object, memory: object) -> ranks.ProcessGroup:
    """Return the processes of the run; ValueError if several cannot share it."""
    settings = json.loads(attrs["config"])
    share = ranks.begin(job.sizes, fewest(job.participation, job.clients), job.device, settings)
    if share.several and out is None:
        raise ValueError(f"{share.number} processes write to one store. Name it: out=PATH, the same in all of them.")
    if share.several and memory is not None:
        raise ValueError("memory is for a run of one process: several hold a part of the clients each. Leave it out.")
    if share.several and job.aggregator.privacy:
        raise ValueError(f"private(...) sums clients in one process, but there are {share.number}. Start one.")
    return share


def _make(job: Job, plan: _Plan, path: Path) -> None:
    """Make the run at ``path``, or continue it."""
    own = (job.algorithm, job.aggregator)
    if job.room is not None:
        job = replace(job, rows_folder=path / store.JOURNAL / disk_rows.FOLDER)

    def opened() -> Writer:
        store.settle(path)
        if plan.resume and path.exists():
            record.extend(path, plan.config, plan.groups, plan.attrs)
            return store.resume(path, plan.config, command=COMMAND, own=own)
        return store.create(path, plan.groups, plan.attrs)

    writer = job.process_group.first(opened)
    # With matrices of a few hundred units BLAS threads gain nothing, and on a busy machine cost much.
    calm = (tf32(job.compute.precision == "tf32"), threadpool_limits(1, user_api="blas"))
    with writer or nullcontext(), calm[0], calm[1], job.process_group.watched():
        out = Relay(job.process_group, writer)
        if out.finished():
            return
        observers = [
            *metrics.observers(list(nets.layers(job.net))), *plan.probes,
            record.checkpoint_writer(out, plan.checkpoints),
        ]  # fmt: skip
        ledger = Ledger(out, job, plan.by_client)
        rounds, every, tick = plan.config["rounds"], plan.config["evaluate_every"], plan.tick
        # The first state has no name here, which would hold the rows of all clients.
        loop.run(job, _begun(job, plan, out, path), observers, ledger, rounds=rounds, evaluate_every=every, tick=tick)
        out.finish()


def _begun(job: Job, plan: _Plan, out: Relay, path: Path) -> State:
    """Return the state to go on from."""
    state = record.load_state(out.states(), job) or start(job)
    require_disk(job, state, plan.checkpoints.rounds, plan.checkpoints.layers, path)
    return state
