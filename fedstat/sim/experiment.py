"""The simulation study of FedFac §4.3: settings, repeated runs, and their table in words."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat import store
from fedstat._utils.check import named_options
from fedstat._utils.lazy import pd, xr
from fedstat._utils.settings import check_fields, setting
from fedstat.fl import algorithms, checkpoints, nets, optim, record
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.job import ComputeConfig, Job, TrainConfig
from fedstat.fl.ledger import Buffer
from fedstat.fl.loop import observed_round, start
from fedstat.fl.prepare import prepare
from fedstat.fl.probes import Observer, measures
from fedstat.fl.ranks import Relay
from fedstat.results.base import columns, wrapped
from fedstat.results.tables import count, interval, number
from fedstat.sim.model8 import SOURCE, Means, Model8, generate, replicate_seed
from fedstat.sim.recovery.accuracy import correlation
from fedstat.stats import factor, resampling, split
from fedstat.store import Group, Target
from fedstat.study import cells
from fedstat.study.cells import Cell, Make

_ROUNDING = 2.0**-22
"""Means of float32 accuracies that differ by this are equal."""

LAST = 5
"""Rounds at the end over which the share of stable units is averaged."""


def accuracy(run: xr.DataTree) -> xr.DataArray:
    """Return the test accuracy after the last round, mean over clients: (p, alpha, method, replicate)."""
    return xr.DataArray(run["metrics/accuracy"]).isel(round=-1).mean("client")


def prop_unchanged(run: xr.DataTree) -> xr.DataArray:
    """Return the proportion of units whose group is unchanged since the round before (FedFac Fig. 7).

    Parameters
    ----------
    run : DataTree
        A study, finished or not.

    Returns
    -------
    DataArray (p, alpha, method, replicate, round)
        From round 2 on; NaN for rounds that are not done.
    """
    shared, done = run["split/fc1/shared"], run["metrics/rounds_done"]
    unchanged = (shared == shared.shift(round=1, fill_value=False)).mean("unit").isel(round=slice(1, None))
    return unchanged.where(unchanged["round"] <= done).rename("prop_unchanged")


def summary(run: xr.DataTree) -> pd.DataFrame:
    """Summarize a study in one row per p, alpha and method.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.sim.study` returns.

    Returns
    -------
    DataFrame
        ``accuracy`` and ``std_error``: mean over replicates of the clients' mean test accuracy after the last round,
        and its standard error over replicates. ``difference``, ``difference_low``, ``difference_high``: mean of the
        paired differences from ``true`` within replicates, with a 95 % t interval. ``equal``: whether all of these
        differences are equal, so that their spread is unknown and there is no interval. ``stable``: share of units that
        keep their state, mean over the last 5 rounds. Of the oracle's split, in every row of a setting: ``auc`` of ν
        for the true label, ``ari``, adjusted Rand index against the true split. ``replicates``: complete ones.
    """
    if "metrics" not in run.children or "rounds_done" not in run["metrics"].data_vars:
        raise ValueError(
            f"run must be a simulation study, as fedstat.sim.study and python -m fedstat.sim write it, but got a run "
            f"with the groups {list(run.children)}. Of a run of fl.train, read run['metrics'] itself."
        )
    require_replicates(run)
    values, stable, done = (
        accuracy(run),
        prop_unchanged(run).isel(round=slice(-LAST, None)).mean("round"),
        _complete(run),
    )
    rows = []
    for p in values["p"].values:
        for alpha in values["alpha"].values:
            cell = {"p": p, "alpha": alpha}
            recovered = _oracle(run, cell)
            reference = _select(values, done, cell, "true") if "true" in values["method"].values else None
            for method in values["method"].values:
                x = _select(values, done, cell, method)
                row = {"p": p, "alpha": alpha, "method": str(method), "replicates": int(np.isfinite(x).sum())}
                estimate = _mean(x)
                row |= {"accuracy": estimate.mean, "std_error": estimate.std_error}
                difference = _mean(x - reference if reference is not None else np.full_like(x, np.nan))
                row |= {"difference": difference.mean, "difference_low": difference.low}
                row |= {"difference_high": difference.high, "equal": difference.equal}
                row["stable"] = _mean(_select(stable, done, cell, method)).mean
                rows.append(row | recovered)
    return pd.DataFrame(rows)


def report(run: xr.DataTree) -> str:
    """Return the tables of :func:`summary` as text, in at most 80 columns."""
    config = json.loads(run.attrs["config"])
    n = config["replicates"]
    counts = {"clients": "client", "d": "covariate", "m": "unit", "n_train": "training sample", "rounds": "round"}
    clients, covariates, units, samples, rounds = (count(config[name], noun) for name, noun in counts.items())
    training = f"{count(config['local_epochs'], 'local epoch')}, SGD {config['lr']:g}"
    analysis = f"{config['method']}, kappa = {config['kappa']:g}"
    lines = [
        f"Model (8): {clients}, {covariates}, {units}, {samples} per client",
        f"{rounds}, {training}, batch {config['batch_size'] or 'full'}; {analysis}; {count(n, 'replicate')}",
    ]
    for (p, alpha), block in summary(run).groupby(["p", "alpha"], sort=False):
        heads = ("split", "accuracy (SE)", "difference from true [95% CI]", "unchanged")
        auc, ari, finished = block["auc"].iloc[0], block["ari"].iloc[0], block["replicates"]
        lines += [
            f"p = {p:g}, alpha = {alpha:g}",
            *columns([heads, *map(_cells_of, block.to_dict("records"))], n_right=1),
            f"Oracle (split from the true weights): AUC {number(auc, 3)}, ARI {number(ari, 3)}",
        ]
        if (finished < n).any():
            n_finished = " to ".join(dict.fromkeys([str(finished.min()), str(finished.max())]))
            lines.append(f"Incomplete: {n_finished} of {count(n, 'replicate')} finished")
    paired = f"Paired t intervals over {n} replicates, unadjusted for multiple comparisons."
    lines += [
        paired if n > 1 else "One replicate: no standard errors and no intervals.",
        "accuracy: test accuracy after the last round, mean over clients",
        f"unchanged: proportion of units in the same group one round later (last {LAST})",
    ]
    return "\n".join(map(wrapped, lines))


def _cells_of(row: Mapping[Any, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a split in the table."""
    error = f" ({row['std_error']:.3f})" if math.isfinite(row["std_error"]) else ""
    difference = "reference" if row["method"] == "true" else from_true(row, digits=3)
    return TITLES[row["method"]], f"{number(row['accuracy'], 3)}{error}", difference, number(row["stable"], 3)


def from_true(row: Mapping[Any, Any], *, digits: int = 4) -> str:
    """Return a row's difference from the true split with its interval, or why there is none."""
    limits = row["difference"], row["difference_low"], row["difference_high"]
    return interval(*limits, digits, equal="replicates" if row["equal"] else "")


def require_replicates(run: xr.DataTree) -> None:
    """Raise ValueError if no run of a study is done."""
    if not bool(_complete(run).any()):
        raise ValueError("the study is not finished: no run is done. Continue it with resume=True (--resume).")


def _complete(run: xr.DataTree) -> xr.DataArray:
    accuracy, rounds_done = xr.DataArray(run["metrics/accuracy"]), xr.DataArray(run["metrics/rounds_done"])
    return rounds_done == accuracy.sizes["round"]


def _select(values: xr.DataArray, done: xr.DataArray, cell: dict[str, float], method: str) -> NDArray[np.float64]:
    # As a dict: the keyword ``method`` of sel is the way to fill gaps, not a dimension.
    index = {**cell, "method": method}
    return np.asarray(values.sel(index).where(done.sel(index)), dtype=np.float64)


def _mean(x: NDArray[np.float64]) -> resampling.Mean:
    """Mean over the replicates that are complete."""
    return resampling.mean(x[np.isfinite(x)], rounding=_ROUNDING)


def _oracle(run: xr.DataTree, cell: dict[str, float]) -> dict[str, float]:
    truth = run["truth/unit_shared"].sel(p=cell["p"]).to_numpy()
    nu = run["truth/communality"].sel(cell).to_numpy()
    nu = nu[np.isfinite(nu).any(-1)]
    share = float(truth.mean())
    if not len(nu) or share in (0.0, 1.0):
        return {"auc": math.nan, "ari": math.nan}
    shared = split.shared(nu, tau=1 - share)
    return {
        "auc": float(np.mean(split.auc(nu, truth))),
        "ari": float(split.adjusted_rand(shared, truth).mean()),
    }


TITLES = {"true": "true split", "oracle": "oracle split"} | {
    name: algorithms.about(f"fedfac-{name}" if name in ("static", "dynamic") else name).title
    for name in ("static", "dynamic", "random", "random-redrawn", "fedavg", "local")
}
"""Names of the splits in tables and figures, as those of the algorithms."""
METHODS = tuple(TITLES)
LAYER = "fc1"
COMMAND = "fedstat.sim"
_COMMIT_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """Settings of the study; settings that the paper leaves open have defaults, too.

    Parameters
    ----------
    p, alpha : tuple of float
        Fractions of units, and of covariates, that are shared; every pair is run.
    methods : tuple of str
        Splits to compare. ``true``: the true split; ``oracle``: factor analysis of the true weights; ``static``,
        ``dynamic``: FedFac; ``random``: a fixed random split with the true number of shared units;
        ``random-redrawn``: such a split drawn again in every round; ``fedavg``: all shared; ``local``: none shared.
    clients, d, m, n_train, n_test, sigma, means
        Settings of the data, see :func:`fedstat.sim.generate`.
    rounds, local_epochs, batch_size, lr
        T, G, B (0 takes all samples as one batch) and η_l of the training by SGD.
    participation : float
        Participation rate: fraction of clients selected per round.
    kappa : float
        Proportion of the eigenvalue sum that the factors must reach.
    tau : float or None
        Quantile of the communality ν from which units are shared. None takes 1 − p, so that every split shares the
        true number of units.
    method : {"pa", "minres", "pc", "leverage"}
        Factoring method, see :func:`fedstat.stats.factor.fit`.
    replicates : int
        Number of replicates. The first draws data, initial parameters and batches from ``seed``, every further
        replicate from its seed (:meth:`replicate_seed`). All methods get equal draws, so that they are compared within
        replicates.
    seed : int
        Seed of the study.
    keep_weights : {"first", "none"}
        Replicates whose clients' weights are stored, before the last averaging.
    """

    p: tuple[float, ...] = setting((0.5,), "data", "fractions of units that are shared", low=0, high=1, nonempty=True)
    alpha: tuple[float, ...] = setting(
        (0.4,), "data", "fractions of covariates that are shared", low=0, high=1, nonempty=True
    )
    methods: tuple[str, ...] = setting(METHODS, "method", "splits to compare", choices=METHODS, nonempty=True)
    clients: int = setting(100, "data", "number of clients C", low=1)
    d: int = setting(100, "data", "number of covariates", low=1)
    m: int = setting(200, "data", "number of hidden units", low=1)
    n_train: int = setting(100, "data", "training samples per client", low=1)
    n_test: int = setting(100, "data", "test samples per client", low=1)
    sigma: float = setting(1.0, "data", "SD of the noise ε; a label is 1 if h + ε > 0", low=0)
    means: Means = setting(
        "independent", "data", "means of covariates and of personal weights: independent, or shared as in the paper"
    )
    rounds: int = setting(30, "training", "number of communication rounds", low=1)
    local_epochs: int = setting(5, "training", "epochs of local training per round", low=1)
    batch_size: int = setting(10, "training", "samples per batch; 0 takes all as one batch", low=0)
    lr: float = setting(0.05, "training", "local learning rate of SGD", above=0)
    participation: float = setting(
        1.0, "training", "participation rate: fraction of clients selected per round", above=0, high=1
    )
    kappa: float = setting(
        0.85, "method", "proportion of the eigenvalue sum that the factors must reach", above=0, high=1
    )
    tau: float | None = setting(
        None,
        "method",
        "quantile of the communality from which units are shared (default: 1 - p, the true number of shared units)",
        above=0,
        below=1,
        infinite=True,
    )
    method: factor.Method = setting("pa", "method", f"factoring method: {', '.join(factor.METHODS)}")
    replicates: int = setting(5, "training", "number of replicates; the first has --seed", low=1)
    seed: int = setting(0, "training", "seed of the study", low=0)
    keep_weights: Literal["first", "none"] = setting(
        "first", "training", "replicates whose clients' weights are stored, before the last averaging: first or none"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def replicate_seed(self, replicate: int) -> int:
        """Return the seed of a replicate, for :func:`fedstat.sim.generate`."""
        return replicate_seed(self.seed, replicate)

    def model(self, p: float, alpha: float, replicate: int) -> Model8:
        """Return model (8) of one replicate."""
        return Model8(self.clients, self.d, self.m, p, alpha, self.means, self.replicate_seed(replicate))

    def training(self, replicate: int) -> TrainConfig:
        """Return the settings of training in one replicate."""
        return TrainConfig(
            optimizer=optim.sgd(self.lr),
            participation=self.participation,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size or None,
            seed=self.replicate_seed(replicate),
        )


@named_options(Settings)
def study(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    executor: Executor | None = None,
    **settings: Any,
) -> xr.DataTree:
    """Run the simulation study of FedFac §4.3.

    Parameters
    ----------
    out : path, optional
        Store to write, a zarr folder; without it the study stays in memory.
    resume : bool
        If True, continue the study at ``out``, if there is one. Complete runs are not repeated, an interrupted run
        starts again, and the results equal the results of an uninterrupted study. The study may be extended by
        ``replicates``, ``p``, ``alpha`` and ``methods``, with all other settings equal. It cannot be extended by
        rounds, because it stores no states of its runs.
    device, client_chunk, threads
        See :func:`fedstat.fl.train`; they change no draw, and results only by float32 rounding.
    progress : bool or None
        Show how many rounds of all runs are done; see :func:`fedstat.fl.train`.
    executor : Executor, optional
        Trains the runs in parallel: any :class:`concurrent.futures.Executor`, such as Dask's
        ``Client.get_executor(pure=False)``. Only this process writes to ``out``. Runs that are incomplete when the
        study is interrupted start again. Pass ``threads=1``, or the number of cores of a worker.
    **settings
        See :class:`fedstat.sim.Settings`.

    Returns
    -------
    DataTree
        ``/metrics``: accuracy, loss (p, alpha, method, replicate, round, client) of client models on test samples, NaN
        for runs that are still missing; ``rounds_done`` (p, alpha, method, replicate).
        ``/split/fc1``: shared (…, round, unit); for splits by factor analysis also communality (…, round, unit) and
        n_factors, n_iter, converged (…, round).
        ``/truth``: unit_shared (p, unit); communality (p, alpha, replicate, unit), n_factors and converged
        (p, alpha, replicate) of the oracle's factor analysis; majority_share (p, alpha, replicate) of the labels.
        ``/trained/fc1``, ``/common/fc1``: of the first replicate, the clients' weights before the last averaging and
        their last common values, as in runs of :func:`fedstat.fl.train`. Verbs take one run of the study:
        ``fedstat.icc(study.sel({"method": "local"}))``.

    Raises
    ------
    ValueError
        If a setting is out of range, or ``resume`` finds a study with other settings.

    Examples
    --------
    >>> run = study(p=0.5, methods=["true", "fedavg"], clients=4, d=8, m=10, n_train=20, rounds=2, replicates=1)
    >>> run["metrics/accuracy"].sizes["round"]
    2
    """
    design = Settings(**settings)
    compute = ComputeConfig(device=device, client_chunk=client_chunk, threads=threads)
    simulation = cells.Study(
        title="Simulation study on model (8)",
        command=COMMAND,
        references=SOURCE,
        config=asdict(design),
        layout=partial(_layout, design),
        cells=list(_cells(design)),
        begin=partial(_begin, design),
        done="metrics/rounds_done",
        steps=design.rounds,
        unit="round",
        grows=("replicates", "p", "alpha", "methods"),
    )
    return cells.make(simulation, compute, out=out, resume=resume, progress=progress, executor=executor)


def _cells(settings: Settings) -> Iterator[Cell]:
    """Yield all runs; the methods of a replicate, which share its data, are consecutive."""
    sizes = (len(settings.p), len(settings.alpha), settings.replicates, len(settings.methods))
    for i, j, r, k in np.ndindex(*sizes):
        name = f"p={settings.p[i]:g} alpha={settings.alpha[j]:g} replicate={r} {settings.methods[k]}"
        yield Cell(name, {"p": i, "alpha": j, "method": k, "replicate": r})


def _begin(settings: Settings, writer: Target, compute: ComputeConfig) -> Make:
    """Return the function that makes one run and writes it; consecutive methods of a replicate share its data."""
    written: set[tuple[int, int, int]] = set()

    def make(cell: Cell, tick: Callable[[], object]) -> None:
        p, alpha, method, replicate = cell.where
        data, oracle = _draw(settings, p, alpha, replicate)
        if (p, alpha, replicate) not in written:
            _write_truth(writer, (p, alpha, replicate), data, oracle)
            written.add((p, alpha, replicate))
        job = prepare(
            data,
            nets.mlp([settings.d, settings.m, 1]),
            _algorithm(settings, settings.methods[method], data["unit_shared"].to_numpy(), oracle),
            settings.training(replicate),
            compute,
        )
        keeps = replicate == 0 and settings.keep_weights == "first"
        job = replace(job, common_rows=keeps and checkpoints.need_common_rows(job))
        observers = [_weights(job, settings, cell.where[:-1], writer)] if keeps else []
        _run(job, settings.rounds, cell.where, writer, observers, tick)

    return make


@lru_cache(maxsize=1)
def _draw(settings: Settings, i: int, j: int, replicate: int) -> tuple[xr.Dataset, factor.Fit]:
    """Draw the data of a replicate, and return them with the factor analysis of its true weights."""
    model = settings.model(settings.p[i], settings.alpha[j], replicate)
    sizes = {name: getattr(settings, name) for name in ("n_train", "n_test", "sigma")}
    data = generate(**asdict(model), **sizes)
    return data, factor.fit(correlation(model), kappa=settings.kappa, method=settings.method)


def _write_truth(writer: Target, index: tuple[int, int, int], data: xr.Dataset, oracle: factor.Fit) -> None:
    """Write the class balance of the data and the oracle's factor analysis to the store."""
    writer.write("truth/majority_share", index, data.attrs["majority_share"])
    for name in ("communality", "n_factors", "converged"):
        writer.write(f"truth/{name}", index, np.asarray(getattr(oracle, name)))


def _algorithm(settings: Settings, method: str, truth: np.ndarray, oracle: factor.Fit) -> Algorithm:
    fraction = float(truth.mean())
    tau = settings.tau
    if tau is None:
        tau = -math.inf if fraction == 1 else math.inf if fraction == 0 else 1 - fraction
    analysis: dict[str, Any] = {"kappa": settings.kappa, "tau": tau, "estimator": settings.method}
    makers: dict[str, Callable[[], Algorithm]] = {
        "true": lambda: algorithms.fedsplit({LAYER: truth}),
        "oracle": lambda: algorithms.fedsplit({LAYER: split.shared(oracle.communality, tau=tau)}),
        "static": lambda: algorithms.fedfac([LAYER], dynamic=False, **analysis),
        "dynamic": lambda: algorithms.fedfac([LAYER], **analysis),
        "random": lambda: algorithms.random_split([LAYER], shared_fraction=fraction),
        "random-redrawn": lambda: algorithms.random_split([LAYER], shared_fraction=fraction, redrawn=True),
        "fedavg": algorithms.fedavg,
        "local": algorithms.local,
    }
    return makers[method]()


def _weights(job: Job, settings: Settings, index: tuple[int, ...], writer: Target) -> Observer:
    """Return the observer that writes the weights of the last round's clients before averaging."""
    part: Any = _WeightsOfRun(writer, index, _clients_of_common(settings))
    stored = checkpoints.Checkpoints([settings.rounds], [LAYER], trained=True)
    weights = checkpoints.WeightsWriter(Relay(job.process_group, part), stored)
    weights.write_initial(job)
    return weights.observer


class _WeightsOfRun(NamedTuple):
    """Part of a store that holds the weights of one run of the study, but not those after averaging."""

    writer: Target
    where: tuple[int, ...]
    clients_of_common: int | None

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        if name in (f"common/{LAYER}/w", f"common/{LAYER}/b") and self.clients_of_common and len(where) == 1:
            values = np.broadcast_to(values, (self.clients_of_common, *values.shape))
        if not name.startswith("weights/"):
            self.writer.write(name, (*self.where, *where), values)


def _clients_of_common(settings: Settings) -> int | None:
    """Return the number of clients where some of a study's methods have common values that differ between clients."""
    return settings.clients if settings.participation < 1 else None


def _run(
    job: Job, rounds: int, index: tuple[int, ...], writer: Target, observers: list[Observer], tick: Callable[[], Any]
) -> None:
    """Run all rounds; commit the finished rounds about twice a second, and after an interrupt."""
    state, buffer = start(job), Buffer(writer, index)
    observers = [measures.scores(), measures.split([LAYER]), *observers]
    last_commit = time.monotonic()

    def commit() -> None:
        buffer.flush()
        writer.write("metrics/rounds_done", index, state.round)
        writer.commit()

    try:
        while state.round < rounds:
            next_state, values = observed_round(job, state, observers)
            buffer.add(next_state.round, values)
            state = next_state
            tick()
            if time.monotonic() - last_commit > _COMMIT_SECONDS:
                commit()
                last_commit = time.monotonic()
    finally:
        if state.round:
            commit()


def _layout(settings: Settings) -> dict[str, Group]:
    run_dims = {
        "p": ("p", np.array(settings.p), {"long_name": "p"}),
        "alpha": ("alpha", np.array(settings.alpha), {"long_name": "α"}),
        "method": [*settings.methods],
        "replicate": settings.replicates,
    }
    chunk, truth_dims = dict.fromkeys(run_dims, 1), ("p", "alpha", "replicate")
    groups = record.layout(run_dims, settings.rounds, settings.clients, {LAYER: settings.m})
    groups["metrics"] |= store.group({}, chunk, rounds_done=(tuple(run_dims), "int64"))
    shared = np.stack([settings.model(value, settings.alpha[0], 0).unit_shared for value in settings.p])
    groups["truth"] = store.group(
        run_dims | {"unit": settings.m},
        chunk,
        unit_shared=("p unit", shared),
        majority_share=(truth_dims, "float64", "mean share of a client's commoner label"),
        communality=((*truth_dims, "unit"), "float64", "communality of the true weights"),
        n_factors=(truth_dims, "int64"),
        converged=(truth_dims, "bool"),
    )
    return groups | (_weights_layout(settings, run_dims) if settings.keep_weights == "first" else {})


def _weights_layout(settings: Settings, run_dims: Mapping[str, Any]) -> dict[str, Group]:
    """Return the groups of a study that hold weights, with the dims of all but replicates."""
    design = [name for name in run_dims if name != "replicate"]
    coords = {name: run_dims[name] for name in design} | {
        "checkpoint": ("checkpoint", [settings.rounds], {"long_name": "round after which weights were stored"})
    }
    layer = {"unit": settings.m, "weight": settings.d}
    kinds = {"w": (("unit", "weight"), [settings.m, settings.d]), "b": (("unit",), [settings.m])}
    groups = {}
    for group, clients in (("trained", settings.clients), ("common", _clients_of_common(settings))):
        lead = [*coords, *(["client"] if clients else [])]
        arrays: dict[str, tuple[Any, ...]] = {
            name: ((*lead, *dims), "float32", {"shape": shape}) for name, (dims, shape) in kinds.items()
        }
        if group == "common":
            arrays |= {
                f"{checkpoints.INITIAL}{name}": ((*design, *dims), "float32", {"long_name": "initial value"})
                for name, (dims, _) in kinds.items()
            }
            arrays["downloaded"] = ((*coords, "unit"), "bool", "clients downloaded the unit's weights in this round")
        sizes = coords | ({"client": clients} if clients else {}) | layer
        groups[f"{group}/{LAYER}"] = store.group(sizes, dict.fromkeys(coords, 1), **arrays)
    return groups
