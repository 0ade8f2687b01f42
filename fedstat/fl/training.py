"""One run of one algorithm, from a data set to a labelled store."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xarray as xr
from threadpoolctl import threadpool_limits

from fedstat import _check, store
from fedstat.fl import batches, choice, engine, masks, nets, record
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.batches import Rows
from fedstat.fl.evaluate import evaluate, timed_step
from fedstat.fl.job import Job, Precision, Probe, State
from fedstat.fl.masking import masked_accuracy
from fedstat.fl.nets import Net
from fedstat.fl.newcomers import RULES, newcomers
from fedstat.fl.optim import Optimizer
from fedstat.fl.prepare import prepare, require_classes
from fedstat.store import Group, Writer

COMMAND = "fedstat.fl"
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
    participation: float = 1.0,
    local_epochs: int = 1,
    batch_size: int | None = None,
    optimizer: str | Optimizer = "sgd",
    lr: float = 0.1,
    server_lr: float = 1.0,
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
    masking: int = 0,
    probe: Probe | None = None,
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
    participation : float, default 1
        Share of the clients that is active in a round.
    local_epochs : int, default 1
        G, epochs of local training in a round.
    batch_size : int, optional
        B; None takes a client's samples as one batch.
    optimizer : {"sgd", "adam"} or Optimizer, default "sgd"
    lr : float, default 0.1
        η_l, local learning rate, where the optimiser is given by name.
    server_lr : float, default 1
        η_g: W ← W + η_g Σ n_k Δ_k / Σ n_k.
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
    masking : int, default 0
        Draws of random values that replace, after the last round, the shared or the personal units' parameters.
    probe : {"halves"}, optional
        Before every round that is evaluated, train the active clients on either half of their samples, too: how much
        of what clients differ by is their own, beyond noise (:func:`fedstat.fl.profile`).
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
        ``/new``: accuracy (rule, client), see :func:`fedstat.fl.newcomers.newcomers`;
        ``/masking``: accuracy (part, draw, client), see :func:`fedstat.fl.masking.masked_accuracy`;
        ``/choice``: step, finetuning (round, ...), what a method chose, see :class:`fedstat.fl.choice.Chosen`;
        ``/probe``: between, within (round, client, layer), see :func:`fedstat.fl.halves.parts`;
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
    settings: dict[str, Any] = {
        "participation": participation,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "lr": lr,
        "server_lr": server_lr,
        "optimizer_state": optimizer_state,
        "seed": seed,
    }
    where: dict[str, Any] = {
        "device": device, "client_chunk": client_chunk, "threads": threads, "precision": precision
    }  # fmt: skip
    _check.integer("rounds", rounds)
    _check.integer("evaluate_every", evaluate_every)
    _check.integer("masking", masking, low=0)
    for checkpoint in checkpoints:
        _check.integer("checkpoints", checkpoint, high=rounds)
    if out is None:
        if resume:
            raise ValueError("resume needs the path of the run to go on with: pass out=...")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.zarr"
            options: dict[str, Any] = {
                "rounds": rounds, "checkpoints": checkpoints, "keep_weights": keep_weights, "new": new,
                "evaluate_every": evaluate_every, "masking": masking, "progress": progress, "about": about,
                "probe": probe, "readouts": readouts,
                **settings, **where,
            }  # fmt: skip
            return train(data, net, algorithm, out=path, **options).load()
    job = prepare(data, net, algorithm, **settings, **where, track=True, probe=probe)
    plan = _Plan(
        rounds,
        sorted({*checkpoints, rounds}),
        [*nets.layers(job.net)] if keep_weights is None else [masks.require_layer(job.net, n) for n in keep_weights],
        evaluate_every,
        None if new is None else tuple(batches.rows_of(new, s, job.device) for s in ("train", "test")),
        masking,
        {name: replace(job, algorithm=make(algorithm)) for name, make in (readouts or {}).items()},
        progress or (lambda _: None),
    )
    for one in plan.readouts.values():
        choice.require(one)
    for rows in plan.new or ():
        require_classes(rows, nets.n_outputs(net), "new clients'")
        if rows.x.shape[1:] != job.train.x.shape[1:]:
            theirs, ours = (tuple(one.x.shape[1:]) for one in (rows, job.train))
            raise ValueError(f"new clients must have samples of shape {ours}, as the others have, but got {theirs}")
    config = {
        **(about or {}),
        "algorithm": algorithm.name,
        "algorithm_settings": dict(algorithm.settings),
        "shapes": {name: list(shape) for name, shape in net.shapes.items()},
        "clients": job.clients,
        "data_digest": batches.digest(*job.splits.values(), *(plan.new or ())),
        "rounds": rounds,
        "checkpoints": plan.checkpoints,
        "keep_weights": plan.layers,
        "evaluate_every": evaluate_every,
        "masking": masking,
        **({"probe": probe} if probe else {}),
        **({"readouts": {n: dict(j.algorithm.settings) for n, j in plan.readouts.items()}} if plan.readouts else {}),
        "precision": precision,
        **settings,
        "optimizer": optimizer if isinstance(optimizer, str) else optimizer.name,
    }
    out, groups, title = Path(out), _groups(job, plan), f"{algorithm.name}, {rounds} rounds"
    attrs = store.provenance(title, config, command=COMMAND, device=str(job.device), own=algorithm)
    attrs["about"] = store.to_json(about or {})  # as given: in config what was found, such as clients, replaces it
    store.settle(out)
    if resume and out.exists():
        record.extend(out, config, groups, attrs)
        writer = store.resume(out, config, command=COMMAND, own=algorithm)
    else:
        writer = store.create(out, groups, attrs)
    # Matrices of a few hundred units gain nothing from BLAS threads, and on a busy machine lose much by them.
    with writer, _tf32(precision == "tf32"), threadpool_limits(1, user_api="blas"):
        if not writer.finished:
            _run(job, record.load_state(writer, job) or engine.start(job), plan, writer)
    return store.open_run(out)


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


class _Plan(NamedTuple):
    """What a run does beside the rounds."""

    rounds: int
    checkpoints: list[int]
    layers: list[str]
    evaluate_every: int
    new: tuple[Rows, ...] | None
    masking: int
    readouts: dict[str, Job]
    progress: Callable[[int], object]


def _groups(job: Job, plan: _Plan) -> dict[str, Group]:
    groups = record.run_layout(job, plan.rounds, plan.checkpoints, plan.layers)
    if plan.new is not None:
        groups["new"] = record.new_layout(plan.new[0].sizes, plan.new[1].sizes)
    if plan.masking:
        groups["masking"] = record.masking_layout(plan.masking, job.clients)
    if plan.readouts:
        groups["readouts"] = record.readouts_layout([*plan.readouts], job)
    return groups


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
            new, metrics = timed_step(job, state, full=due)
            buffer.add(job, new, metrics)
            if new.round in plan.checkpoints:
                record.write_weights(writer, job, new, plan.checkpoints.index(new.round), plan.layers)
            state = new  # only now: a run that stops before this does the round once more
            plan.progress(1)
            now = time.monotonic()
            if now - committed > _COMMIT_SECONDS:
                commit(with_state=now - saved > patience)
                committed = time.monotonic()
                if now - saved > patience:
                    saved, patience = committed, max(_SAVE_SECONDS, (committed - now) / _SAVE_SHARE)
        buffer.flush()
        _after(job, state, plan, writer)
        record.save_state(writer, state)  # so that the run can be made longer
    except BaseException:
        if state.round:
            commit(with_state=True)
        raise
    writer.finish()


def _after(job: Job, state: State, plan: _Plan, writer: Writer) -> None:
    """What is measured once, after the last round."""
    if plan.new is not None:
        found = newcomers(job, state, *plan.new)
        writer.write("new/accuracy", (), np.stack([found[rule] for rule in RULES]))
    if plan.masking:
        writer.write("masking/accuracy", (), masked_accuracy(job, state, draws=plan.masking))
    for i, one in enumerate(plan.readouts.values()):
        scores = evaluate(one, state)
        step = np.asarray(scores.get("choice/step", 1.0 if one.algorithm.finetune else 0.0))
        step = step[:, None] if choice.dims(one).get("step") == ("client",) else step
        writer.write("readouts/step", (i,), np.broadcast_to(step, (job.clients, len(nets.layers(job.net)))))
        for name in ("accuracy", "loss"):
            writer.write(f"readouts/{name}", (i,), scores[name])
