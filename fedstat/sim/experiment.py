"""The simulation study on model (8): ways to split, side by side and paired (FedFac §4.3, Figs. 6 and 7)."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from fedstat import _check, store
from fedstat.fl import algorithms, engine, evaluate, nets, record
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.job import Job, device_named
from fedstat.fl.prepare import prepare
from fedstat.sim.model8 import SOURCE, Means, Model8, generate
from fedstat.sim.recovery import correlation
from fedstat.stats import factor, split
from fedstat.store import Group, Variable, Writer

METHODS = ("true", "oracle", "static", "dynamic", "random", "random-redrawn", "fedavg", "local")
LAYER = "fc1"
COMMAND = "fedstat.sim"
_COMMIT_SECONDS = 0.5
_GROWING = ("replicates", "p", "alpha", "methods")


@dataclass(frozen=True)
class Settings:
    """Settings of the study; what the paper does not give is an argument with a default.

    Parameters
    ----------
    p, alpha : tuple of float
        Shared shares of neurons and of covariates; every pair is run.
    methods : tuple of str
        ``true``: the given truth; ``oracle``: factor analysis of the true weights; ``static``, ``dynamic``: FedFac;
        ``random``: a random split of the true size that stays; ``random-redrawn``: one drawn anew in every round;
        ``fedavg``: all shared; ``local``: nothing shared.
    clients, d, m, n_train, n_test, sigma, means
        Of the data, see :func:`fedstat.sim.generate`.
    rounds, local_epochs, batch_size, lr
        T, G, B (0: all samples as one batch) and η_l of the training by SGD.
    participation : float
        Share of clients active in a round.
    kappa : float
        Share of the eigenvalues' sum that decides the number of factors.
    tau : float or None
        Quantile of ν from which units are shared; None takes 1 − p, so that every split has the true size.
    estimator : {"pa", "pc", "leverage"}
        Estimator of ν, see :func:`fedstat.stats.factor.fit`.
    replicates : int
        Replicate r draws data, start and batches from seed + r: the same for every method, so that methods are
        compared within replicates.
    seed : int
    """

    p: tuple[float, ...] = (0.5,)
    alpha: tuple[float, ...] = (0.4,)
    methods: tuple[str, ...] = METHODS
    clients: int = 100
    d: int = 100
    m: int = 200
    n_train: int = 100
    n_test: int = 100
    sigma: float = 1.0
    means: Means = "independent"
    rounds: int = 30
    local_epochs: int = 5
    batch_size: int = 10
    lr: float = 0.05
    participation: float = 1.0
    kappa: float = 0.85
    tau: float | None = None
    estimator: factor.Method = "pa"
    replicates: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("p", "alpha", "methods"):
            values = getattr(self, name)
            values = (values,) if isinstance(values, str) or np.ndim(values) == 0 else tuple(values)
            if not values or len({repr(value) for value in values}) < len(values):
                raise ValueError(f"{name} must hold at least one value and none twice, but got {values!r}")
            object.__setattr__(self, name, values)
        for method in self.methods:
            _check.choice("methods", method, METHODS)
        for name in ("rounds", "local_epochs", "n_train", "n_test", "replicates"):
            _check.integer(name, getattr(self, name))
        _check.integer("batch_size", self.batch_size, low=0)
        for p, alpha in product(self.p, self.alpha):
            self.model(p, alpha, 0)
        _check.real("sigma", self.sigma, low=0)
        _check.real("lr", self.lr, low=0, open_low=True)
        _check.real("participation", self.participation, low=0, open_low=True, high=1)
        _check.real("kappa", self.kappa, low=0, open_low=True, high=1)
        if self.tau is not None and not (isinstance(self.tau, float) and math.isinf(self.tau)):
            _check.real("tau", self.tau, low=0, open_low=True, high=1, open_high=True)
        _check.choice("estimator", self.estimator, factor.METHODS)

    def model(self, p: float, alpha: float, replicate: int) -> Model8:
        """Model (8) of one cell of the grid."""
        seed = _check.integer("seed", self.seed, low=0) + replicate
        return Model8(self.clients, self.d, self.m, p, alpha, self.means, seed)


class Cell(NamedTuple):
    """One run of the study, and where it stands in the arrays (p, alpha, method, replicate)."""

    p: float
    alpha: float
    method: str
    replicate: int
    where: tuple[int, int, int, int]


def study(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: bool = False,
    **settings: Any,
) -> xr.DataTree:
    """Run the simulation study of FedFac §4.3.

    Parameters
    ----------
    out : path, optional
        Store to stream to, a zarr folder; without it the study is kept in memory.
    resume : bool
        Go on with the study at ``out``, if there is one: runs that are complete stay, the one that was cut off
        starts again, and the numbers are those of an uninterrupted study. Finished or not, it may get more
        ``replicates``, ``p``, ``alpha`` and ``methods``, all else equal; not more rounds, as no state of its runs is
        kept.
    device, client_chunk, threads
        As in :func:`fedstat.fl.train`; they change no draw, and results only by float32 rounding.
    progress : bool
        Show a progress bar on stderr.
    **settings
        See :class:`fedstat.sim.Settings`.

    Returns
    -------
    DataTree
        ``/metrics``: accuracy, loss (p, alpha, method, replicate, round, client) on test samples, of every client's
        personal model, NaN where not run yet; ``rounds_done`` (p, alpha, method, replicate).
        ``/split/fc1``: shared (…, round, unit); communality (…, round, unit) where factor analysis made the split, with
        n_factors, n_iter, converged (…, round).
        ``/truth``: unit_shared (p, unit); of the oracle's analysis communality (p, alpha, replicate, unit) and
        n_factors, converged; majority_share (p, alpha, replicate) of the labels.

    Examples
    --------
    >>> run = study(p=0.5, methods=["true", "fedavg"], clients=4, d=8, m=10, n_train=20, rounds=2, replicates=1)
    >>> run["metrics/accuracy"].sizes["round"]
    2
    """
    chosen = Settings(**settings)
    device_named(device)
    for name, value in (("client_chunk", client_chunk), ("threads", threads)):
        if value is not None:
            _check.integer(name, value)
    where = {"device": device, "client_chunk": client_chunk, "threads": threads}
    if out is None:
        if resume:
            raise ValueError("resume needs the path of the study to go on with: pass out=...")
        with tempfile.TemporaryDirectory() as folder:
            _study(chosen, Path(folder) / "study.zarr", False, progress, where)
            return store.open_run(Path(folder) / "study.zarr").load()
    _study(chosen, Path(out), resume, progress, where)
    return store.open_run(out)


def _study(settings: Settings, out: Path, resume: bool, progress: bool, where: dict[str, Any]) -> None:
    config = asdict(settings)
    store.settle(out)
    if resume and out.exists():
        _extend(settings, out)
        writer = store.resume(out, config, command=COMMAND)
    else:
        attrs = store.provenance(
            "Simulation study on model (8)", config, command=COMMAND, device=where["device"], references=SOURCE
        )
        writer = store.create(out, _layout(settings), attrs)
    with writer:
        if not writer.finished:
            _go_on(settings, writer, progress, where)


def _extend(settings: Settings, out: Path) -> None:
    """Make the store longer where the settings only add to its replicates, p, alpha or methods."""
    store.claim(out, COMMAND, resume=True)
    growth = store.changed(out, asdict(settings))
    if growth.keys() == {"rounds"}:
        raise ValueError(
            f"{out} has runs of {growth['rounds'][0]} rounds, and a study keeps no states to go on from: it can get "
            f"more {', '.join(_GROWING)}, but not rounds={growth['rounds'][1]}. Choose another path."
        )
    if growth and growth.keys() <= set(_GROWING) and all(_adds(*values) for values in growth.values()):
        store.extend(out, _layout(settings), {"config": store.to_json(asdict(settings))}, growth)


def _adds(there: Any, here: Any) -> bool:
    return bool(set(there) <= set(here) if isinstance(there, list) else there < here)


def _go_on(settings: Settings, writer: Writer, progress: bool, where: dict[str, Any]) -> None:
    """Run the cells that are not done, or damaged."""
    done = writer.read("metrics/rounds_done")
    cells = list(_cells(settings))
    for cell in cells:
        at = dict(zip(("p", "alpha", "method", "replicate"), cell.where, strict=True))
        if any(one.hits(**at) for one in writer.damaged):
            done[cell.where] = 0
    # One BLAS thread, as in fl.train.
    with (
        threadpool_limits(1, user_api="blas"),
        tqdm(total=len(cells) * settings.rounds, unit="round", disable=not progress) as bar,
    ):
        bar.update(int(done[done == settings.rounds].sum()))
        drawn: tuple[Any, Any, Any] = (None, None, None)
        for cell in cells:
            if done[cell.where] == settings.rounds:
                continue
            key = (cell.p, cell.alpha, cell.replicate)
            if drawn[0] != key:
                drawn = (key, *_draw(settings, cell, writer))
            bar.set_description(f"p={cell.p:g} alpha={cell.alpha:g} replicate={cell.replicate} {cell.method}")
            job = prepare(
                drawn[1],
                nets.mlp([settings.d, settings.m, 1]),
                _algorithm(settings, cell.method, drawn[1]["unit_shared"].to_numpy(), drawn[2]),
                participation=settings.participation,
                local_epochs=settings.local_epochs,
                batch_size=settings.batch_size or None,
                optimizer="sgd",
                lr=settings.lr,
                server_lr=1.0,
                optimizer_state="reset",
                seed=settings.seed + cell.replicate,
                **where,
            )
            _run(job, settings.rounds, cell.where, writer, bar.update)
    writer.finish()


def _cells(settings: Settings) -> Iterator[Cell]:
    """All runs; the methods of one replicate follow one another, on the same data."""
    sizes = (len(settings.p), len(settings.alpha), settings.replicates, len(settings.methods))
    for i, j, r, k in np.ndindex(*sizes):
        yield Cell(settings.p[i], settings.alpha[j], settings.methods[k], r, (i, j, k, r))


def _draw(settings: Settings, cell: Cell, writer: Writer) -> tuple[xr.Dataset, factor.Fit]:
    """Data of a replicate and the factor analysis of its true weights, both noted in the store."""
    model = settings.model(cell.p, cell.alpha, cell.replicate)
    sizes = {name: getattr(settings, name) for name in ("n_train", "n_test", "sigma")}
    data = generate(**asdict(model), **sizes)
    oracle = factor.fit(correlation(model), kappa=settings.kappa, method=settings.estimator)
    i, j, _, r = cell.where
    writer.write("truth/majority_share", (i, j, r), data.attrs["majority_share"])
    for name in ("communality", "n_factors", "converged"):
        writer.write(f"truth/{name}", (i, j, r), np.asarray(getattr(oracle, name)))
    return data, oracle


def _algorithm(settings: Settings, method: str, truth: np.ndarray, oracle: factor.Fit) -> Algorithm:
    share = float(truth.mean())
    tau = settings.tau
    if tau is None:
        tau = -math.inf if share == 1 else math.inf if share == 0 else 1 - share
    analysis: dict[str, Any] = {"kappa": settings.kappa, "tau": tau, "estimator": settings.estimator}
    table: dict[str, Callable[[], Algorithm]] = {
        "true": lambda: algorithms.fedsplit({LAYER: truth}),
        "oracle": lambda: algorithms.fedsplit({LAYER: split.shared(oracle.communality, tau=tau)}),
        "static": lambda: algorithms.fedfac([LAYER], dynamic=False, **analysis),
        "dynamic": lambda: algorithms.fedfac([LAYER], **analysis),
        "random": lambda: algorithms.random_split([LAYER], share=share),
        "random-redrawn": lambda: algorithms.random_split([LAYER], share=share, redrawn=True),
        "fedavg": algorithms.fedavg,
        "local": algorithms.local,
    }
    return table[method]()


def _run(job: Job, rounds: int, where: tuple[int, ...], writer: Writer, tick: Callable[[], Any]) -> None:
    """One run to its last round; finished rounds are committed about twice a second, and at an interrupt."""
    state, buffer = engine.start(job), record.Buffer(writer, [LAYER], where)
    committed = time.monotonic()

    def commit() -> None:
        buffer.flush()
        writer.write("metrics/rounds_done", where, state.round)
        writer.commit()

    try:
        while state.round < rounds:
            state, metrics = evaluate.timed_step(job, state)
            buffer.add(job, state, metrics)
            tick()
            if time.monotonic() - committed > _COMMIT_SECONDS:
                commit()
                committed = time.monotonic()
    finally:
        if state.round:
            commit()


def _layout(settings: Settings) -> dict[str, Group]:
    p, alpha = ("p", np.array(settings.p), {"long_name": "p"}), ("alpha", np.array(settings.alpha), {"long_name": "α"})
    replicate = ("replicate", np.arange(settings.replicates))
    # Object strings: fixed-width ones make zarr warn.
    lead = {"p": p, "alpha": alpha, "method": ("method", np.array(settings.methods, object)), "replicate": replicate}
    groups = record.layout(lead, settings.rounds, settings.clients, {LAYER: settings.m})
    metrics = groups["metrics"]
    rounds_done = Variable(tuple(lead), "int64", dict.fromkeys(lead, 1))
    groups["metrics"] = metrics._replace(variables={**metrics.variables, "rounds_done": rounds_done})
    shared = np.stack([settings.model(value, settings.alpha[0], 0).unit_shared for value in settings.p])
    coords = xr.Dataset(
        {"unit_shared": (("p", "unit"), shared)},
        {"p": p, "alpha": alpha, "replicate": replicate, "unit": np.arange(settings.m)},
    )
    dims = ("p", "alpha", "replicate")
    one = dict.fromkeys(dims, 1)
    groups["truth"] = Group(
        coords,
        {
            "majority_share": Variable(dims, "float64", one, {"long_name": "mean share of a client's commoner label"}),
            "communality": Variable((*dims, "unit"), "float64", one, {"long_name": "communality of the true weights"}),
            "n_factors": Variable(dims, "int64", one),
            "converged": Variable(dims, "bool", one),
        },
    )
    return groups
