"""One run of one algorithm, from a data set to a labelled store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import xarray as xr
from threadpoolctl import threadpool_limits

from fedstat import _check, store
from fedstat.fl import batches, engine, masks, nets, record
from fedstat.fl.aggregate import Aggregator, weighted_mean
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.batches import Rows
from fedstat.fl.evaluate import timed_step
from fedstat.fl.job import Job, Machine, Participation, Precision, Training
from fedstat.fl.nets import Net
from fedstat.fl.optim import Optimizer
from fedstat.fl.prepare import optimizer_named, prepare, require_classes
from fedstat.fl.probes import Probe
from fedstat.fl.probes.ablation import probe as ablation_probe
from fedstat.fl.probes.drift import probe as drift_probe
from fedstat.fl.probes.measures import probe as measures_probe
from fedstat.fl.probes.new_clients import probe as new_clients_probe
from fedstat.fl.probes.on_halves import probe as halves_probe
from fedstat.fl.probes.readouts import jobs as readout_jobs
from fedstat.fl.probes.readouts import probe as readouts_probe
from fedstat.fl.state import State
from fedstat.store import Writer

COMMAND = "fedstat.fl"
PROBES = ("halves", "drift", "uploads")
_COMMIT_SECONDS = 1.0
_SAVE_SECONDS = 20.0
# Nor is more than this share of a run's time spent on saving its state.
_SAVE_SHARE = 0.02


def train(
    data: xr.Dataset,
    net: Net,
    algorithm: Algorithm,
    *,
    rounds: int,
    participation: Participation = 1.0,
    local_epochs: int = 1,
    batch_size: int | None = None,
    optimizer: str | Optimizer = "sgd",
    lr: float = 0.1,
    server_lr: float = 1.0,
    aggregator: Aggregator | None = None,
    optimizer_state: Literal["reset", "keep"] = "reset",
    seed: int = 0,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    precision: Precision = "float32",
    out: str | Path | None = None,
    resume: bool = False,
    checkpoints: Sequence[int] = (),
    keep_weights: Sequence[str] | None = None,
    evaluate_every: int = 1,
    new: xr.Dataset | None = None,
    ablation: int = 0,
    probe: str | Sequence[str] | None = None,
    readouts: Mapping[str, Callable[[Algorithm], Algorithm]] | None = None,
    progress: Callable[[int], object] | None = None,
    about: Mapping[str, Any] | None = None,
) -> xr.DataTree:
    """Train a federated network and keep what a statistician needs of it.

    Parameters
    ----------
    data : Dataset
        Dense, x (client, sample, ...) and y (client, sample), or sample-major with a coordinate ``client``; the
        coordinate ``split`` (sample) says "train", "test" or, if there is such a split, "validation".
    net : Net
        Such as ``fedstat.fl.nets.mlp([100, 200, 1])``.
    algorithm : Algorithm
        Such as ``fedstat.fl.algorithms.fedfac(["fc1"], kappa=0.85, tau=0.5)``.
    rounds : int
        Communication rounds T.
    participation : float or (float, float), default 1
        Share of the clients that is active in a round, or the range from which it is drawn for every round.
    local_epochs : int, default 1
        G, epochs of local training in a round.
    batch_size : int, optional
        B; None takes a client's samples as one batch.
    optimizer : {"sgd", "adam"} or Optimizer, default "sgd"
    lr : float, default 0.1
        η_l, local learning rate, where the optimiser is given by name.
    server_lr : float, default 1
        η_g: W ← W + η_g Σ n_k Δ_k / Σ n_k.
    aggregator : Aggregator, optional
        What the server makes of the entries that clients send: their weighted mean by default, see
        :mod:`fedstat.fl.aggregate`.
    optimizer_state : {"reset", "keep"}, default "reset"
        Whether a client's momentum or Adam moments start anew in every round.
    seed : int, default 0
        Every draw comes from a stream named by seed, purpose, client and round.
    device : str, default "cpu"
    client_chunk : int, optional
        Clients trained as one tensor; chosen from their size otherwise.
    threads : int, optional
        Chunks trained side by side on the CPU; all cores otherwise.
    precision : {"float32", "tf32", "bfloat16"}, default "float32"
        Of products in training and evaluation; parameters and updates are float32. "tf32" needs CUDA.
    out : path, optional
        Store to write, a zarr folder; without it the run is kept in memory.
    resume : bool
        Go on with the run at ``out``, if there is one; the numbers are those of an uninterrupted run. Finished or not,
        it may get more ``rounds``, all else equal, and ``checkpoints`` among these: see :func:`record.extend`.
    checkpoints : sequence of int
        Rounds after which the clients' weights are stored, beside the last.
    keep_weights : sequence of str, optional
        Layers whose weights are stored; all by default.
    evaluate_every : int, default 1
        Evaluate the models after every so many rounds, and after the last.
    new : Dataset, optional
        Clients that do not train, with splits "train" and "test", evaluated after the last round.
    ablation : int, default 0
        Draws of random values that replace, after the last round, the shared or the personal units' parameters.
    probe : {"halves", "drift", "uploads"} or sequence of these, optional
        "halves": before every round that is evaluated, train the active clients on either half of their samples, too:
        how much of what clients differ by is their own, beyond noise (:func:`fedstat.fl.profile`). "drift": how far
        every round takes clients from what the server makes of it. "uploads": weights before aggregation, at the
        checkpoints.
    readouts : mapping from str to callable (Algorithm) -> Algorithm, optional
        Other ways to predict from the models after the last round, such as ``{"fedavg+": algorithms.finetuned}``: the
        scores that the run of that algorithm would have had.
    progress : callable (int), optional
        Called with 1 after every round.
    about : mapping, optional
        What else to note among the run's settings: names of the data set and the partition, say.

    Returns
    -------
    DataTree
        ``/metrics`` (round, client): accuracy, loss on the test samples, of every client's personal model after
        aggregation, validation_accuracy, validation_loss, NaN in rounds without evaluation; accuracy_before,
        train_loss of the active clients, see :func:`fedstat.fl.evaluate.timed_step`; bytes_up, bytes_down, seconds
        (round);
        ``/weights/<layer>``: w (checkpoint, client, unit, weight), b (checkpoint, client, unit);
        ``/split/<layer>``: shared, communality, icc (round, unit), n_factors, n_iter, converged (round);
        ``/new``: accuracy (rule, client), see :func:`fedstat.fl.probes.new_clients.accuracy`;
        ``/ablation``: accuracy (part, draw, client), see :func:`fedstat.fl.probes.ablation.ablated_accuracy`;
        ``/choice``: step, finetuning (round, ...), what a method chose, see :class:`fedstat.fl.choice.Chosen`;
        ``/probe``: between, within (round, client, layer), see :func:`fedstat.fl.halves.parts`;
        ``/drift``: distance (round, client, layer), see :func:`fedstat.fl.probes.drift.probe`;
        ``/uploads/<layer>``: w, b as in ``/weights``, before aggregation, NaN for clients that were not active;
        ``/measures``: what a method measures; ``/mixing``: weight (round, client, other), where its server mixes;
        ``/readouts``: accuracy, loss (readout, client), step (readout, client, layer).

    Raises
    ------
    ValueError
        If a setting is out of range, or ``resume`` meets a run with other settings, or one that cannot go on.
    FloatingPointError
        If a client diverges; the rounds before stay in the store.

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
    _check.integer("rounds", rounds)
    _check.integer("evaluate_every", evaluate_every)
    _check.integer("ablation", ablation, low=0)
    for checkpoint in checkpoints:
        _check.integer("checkpoints", checkpoint, high=rounds)
    training = Training(
        optimizer=optimizer_named(optimizer, lr),
        participation=participation,
        local_epochs=local_epochs,
        batch_size=batch_size,
        server_lr=server_lr,
        aggregator=aggregator or weighted_mean(),
        optimizer_state=optimizer_state,
        seed=seed,
    )
    if not isinstance(training.aggregator, Aggregator):
        raise ValueError(
            f"aggregator must be one of fedstat.fl.aggregate, such as weighted_mean(), but got {aggregator!r}"
        )
    machine = Machine(device=device, client_chunk=client_chunk, threads=threads, precision=precision)
    job = prepare(data, net, algorithm, training, machine, track=True)
    asked = _asked(probe)
    kept = [*nets.layers(job.net)] if keep_weights is None else [masks.require_layer(job.net, n) for n in keep_weights]
    at = record.Checkpoints(sorted({*checkpoints, rounds}), kept, uploads="uploads" in asked)
    others, unseen = readout_jobs(job, readouts or {}), _unseen(job, new)
    probes = [measures_probe(job, rounds)]
    probes += [halves_probe(job, rounds)] if "halves" in asked else []
    probes += [drift_probe(job, rounds)] if "drift" in asked else []
    probes += [new_clients_probe(*unseen)] if unseen else []
    probes += [ablation_probe(job, ablation)] if ablation else []
    probes += [readouts_probe(job, others)] if others else []
    config = {
        **(about or {}),
        "algorithm": algorithm.name,
        "algorithm_settings": dict(algorithm.settings),
        "shapes": {name: list(shape) for name, shape in net.shapes.items()},
        "clients": job.clients,
        "data_digest": batches.digest(*job.subsets.values(), *unseen),
        "rounds": rounds,
        "checkpoints": at.rounds,
        "keep_weights": at.layers,
        "evaluate_every": evaluate_every,
        "ablation": ablation,
        "probe": asked,
        "readouts": {name: dict(one.algorithm.settings) for name, one in others.items()},
        "precision": precision,
        "lr": lr,
        **vars(training),
        "optimizer": optimizer if isinstance(optimizer, str) else optimizer.name,
        "aggregator": training.aggregator.name,
    }
    title = f"{algorithm.name}, {rounds} rounds"
    attrs = store.provenance(title, config, command=COMMAND, device=str(job.device), own=(algorithm, aggregator))
    attrs |= {"about": store.to_json(about or {}), "layout": record.LAYOUT}  # about as given: config has what was found
    plan = _Plan(rounds, at, evaluate_every, probes, progress or (lambda _: None))
    return store.run_at(out, lambda path: _make(job, plan, config, attrs, path, resume), resume=resume)


class _Plan(NamedTuple):
    """What a run does beside the rounds."""

    rounds: int
    checkpoints: record.Checkpoints
    evaluate_every: int
    probes: Sequence[Probe]
    progress: Callable[[int], object]


def _asked(probe: str | Sequence[str] | None) -> list[str]:
    """Names of probes, each once, in their order."""
    given = [] if probe is None else [probe] if isinstance(probe, str) else list(probe)
    for name in given:
        _check.choice("probe", name, PROBES)
    return [name for name in PROBES if name in given]


def _unseen(job: Job, new: xr.Dataset | None) -> tuple[Rows, ...]:
    """Training and test samples of new clients, () if there are none; ValueError if the network does not take them."""
    found = () if new is None else tuple(batches.rows_of(new, s, job.device) for s in ("train", "test"))
    for rows in found:
        require_classes(rows, nets.n_outputs(job.net), "new clients'")
        if rows.x.shape[1:] != job.train.x.shape[1:]:
            theirs, ours = (tuple(one.x.shape[1:]) for one in (rows, job.train))
            raise ValueError(f"new clients must have samples of shape {ours}, as the others have, but got {theirs}")
    return found


def _make(job: Job, plan: _Plan, config: Mapping[str, Any], attrs: Mapping[str, Any], path: Path, resume: bool) -> None:
    """Make the run at ``path``, or go on with it."""
    groups = record.run_layout(job, plan.rounds, plan.checkpoints)
    for probe in plan.probes:
        groups |= probe.groups
    own = (job.algorithm, job.aggregator)
    store.settle(path)
    if resume and path.exists():
        record.extend(path, config, groups, attrs)
        writer = store.resume(path, config, command=COMMAND, own=own)
    else:
        writer = store.create(path, groups, attrs)
    # Matrices of a few hundred units gain nothing from BLAS threads, and on a busy machine lose much by them.
    with writer, _tf32(job.precision == "tf32"), threadpool_limits(1, user_api="blas"):
        if not writer.finished:
            _run(job, record.load_state(writer, job) or engine.start(job), plan, writer)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Whether CUDA's products and convolutions (which PyTorch lets by default) may round their factors to TF32."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in settings]
    try:
        for one in settings:
            one.allow_tf32 = allowed
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.allow_tf32 = value


def _run(job: Job, state: State, plan: _Plan, writer: Writer) -> None:
    """Train to the last round, committing finished rounds about once a second, and at times a state to resume from."""
    buffer = record.Buffer(writer, list(nets.layers(job.net)))
    committed = saved = time.monotonic()
    patience = _SAVE_SECONDS
    plan.progress(state.round)

    def commit(*, with_state: bool) -> None:
        buffer.flush()
        if with_state:
            record.save_state(writer, state)
        writer.commit()

    try:
        while state.round < plan.rounds:
            due = (state.round + 1) % plan.evaluate_every == 0 or state.round + 1 == plan.rounds
            new, metrics, done = _round(job, state, plan, full=due)
            buffer.add(job, new, metrics)
            record.write_checkpoint(writer, job, new, done, plan.checkpoints)
            state = new  # only now: a run that stops before this does the round once more
            plan.progress(1)
            now = time.monotonic()
            if now - committed > _COMMIT_SECONDS:
                commit(with_state=now - saved > patience)
                committed = time.monotonic()
                if now - saved > patience:
                    saved, patience = committed, max(_SAVE_SECONDS, (committed - now) / _SAVE_SHARE)
        buffer.flush()
        for probe in plan.probes:
            for name, values in probe.last(job, state).items() if probe.last else ():
                writer.write(name, (), values)
        record.save_state(writer, state)  # so that the run can be made longer
    except BaseException:
        if state.round:
            commit(with_state=True)
        raise
    writer.finish()


def _round(job: Job, state: State, plan: _Plan, *, full: bool) -> tuple[State, dict[str, Any], engine.Round]:
    """A round and all that is measured of it."""
    metrics: dict[str, Any] = {}
    for probe in plan.probes:
        if full and probe.before:
            metrics |= probe.before(job, state)
    new, measured, done = timed_step(job, state, full=full)
    metrics |= measured
    for probe in plan.probes:
        if probe.after:
            metrics |= probe.after(job, done, new)
    return new, metrics, done
