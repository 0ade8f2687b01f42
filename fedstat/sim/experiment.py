"""The simulation study of FedFac §4.3: settings, repeated runs, and their table in words."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat import store
from fedstat._utils.lazy import pd, xr
from fedstat._utils.settings import check_fields, setting
from fedstat.fl import algorithms, nets, optim, record
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.job import ComputeConfig, Job, TrainConfig
from fedstat.fl.loop import Buffer, observed_round, start
from fedstat.fl.prepare import prepare
from fedstat.fl.probes import metrics
from fedstat.results.base import columns, wrapped
from fedstat.results.tables import count, interval, number
from fedstat.sim.model8 import SOURCE, Means, Model8, generate, replicate_seed
from fedstat.sim.recovery.accuracy import correlation
from fedstat.stats import factor, resampling, split
from fedstat.store import Group, Target
from fedstat.study import grid
from fedstat.study.grid import Cell, Make

_ROUNDING = 2.0**-22
"""Means of float32 accuracies that differ by this are equal."""

LAST = 5
"""Rounds at the end over which the share of stable units is averaged."""


def accuracy(run: xr.DataTree) -> xr.DataArray:
    """Mean over clients of the test accuracy after the last round: (p, alpha, method, replicate)."""
    return xr.DataArray(run["metrics/accuracy"]).isel(round=-1).mean("client")


def same_state(run: xr.DataTree) -> xr.DataArray:
    """Share of units that keep their state since the round before (FedFac Fig. 7).

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
    same = (shared == shared.shift(round=1, fill_value=False)).mean("unit").isel(round=slice(1, None))
    return same.where(same["round"] <= done).rename("same_state")


def summary(run: xr.DataTree) -> pd.DataFrame:
    """One row per p, alpha and method.

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
    values, stable, done = accuracy(run), same_state(run).isel(round=slice(-LAST, None)).mean("round"), _complete(run)
    rows = []
    for p in values["p"].values:
        for alpha in values["alpha"].values:
            here = {"p": p, "alpha": alpha}
            recovered = _oracle(run, here)
            reference = _select(values, done, here, "true") if "true" in values["method"].values else None
            for method in values["method"].values:
                x = _select(values, done, here, method)
                row = {"p": p, "alpha": alpha, "method": str(method), "replicates": int(np.isfinite(x).sum())}
                own = _mean(x)
                row |= {"accuracy": own.mean, "std_error": own.std_error}
                difference = _mean(x - reference if reference is not None else np.full_like(x, np.nan))
                row |= {"difference": difference.mean, "difference_low": difference.low}
                row |= {"difference_high": difference.high, "equal": difference.equal}
                row["stable"] = _mean(_select(stable, done, here, method)).mean
                rows.append(row | recovered)
    return pd.DataFrame(rows)


def report(run: xr.DataTree) -> str:
    """Return the tables of :func:`summary` as text, in at most 80 columns."""
    config = json.loads(run.attrs["config"])
    n = config["replicates"]
    counts = {"clients": "client", "d": "covariate", "m": "unit", "n_train": "training sample", "rounds": "round"}
    clients, covariates, units, samples, rounds = (count(config[name], noun) for name, noun in counts.items())
    training = f"{count(config['local_epochs'], 'local epoch')}, SGD {config['lr']:g}"
    analysis = f"{config['estimator']}, kappa = {config['kappa']:g}"
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
    return row["method"], f"{number(row['accuracy'], 3)}{error}", difference, number(row["stable"], 3)


def from_true(row: Mapping[Any, Any], *, digits: int = 4) -> str:
    """Return a row's difference from the true split with its interval, or why there is none."""
    limits = row["difference"], row["difference_low"], row["difference_high"]
    return interval(*limits, digits, equal="replicates" if row["equal"] else "")


def _complete(run: xr.DataTree) -> xr.DataArray:
    accuracy, rounds_done = xr.DataArray(run["metrics/accuracy"]), xr.DataArray(run["metrics/rounds_done"])
    return rounds_done == accuracy.sizes["round"]


def _select(values: xr.DataArray, done: xr.DataArray, here: dict[str, float], method: str) -> NDArray[np.float64]:
    # As a dict: the keyword ``method`` of sel is the way to fill gaps, not a dimension.
    at = {**here, "method": method}
    return np.asarray(values.sel(at).where(done.sel(at)), dtype=np.float64)


def _mean(x: NDArray[np.float64]) -> resampling.Mean:
    """Mean over the replicates that are complete."""
    return resampling.mean(x[np.isfinite(x)], rounding=_ROUNDING)


def _oracle(run: xr.DataTree, here: dict[str, float]) -> dict[str, float]:
    truth = run["truth/unit_shared"].sel(p=here["p"]).to_numpy()
    nu = run["truth/communality"].sel(here).to_numpy()
    nu = nu[np.isfinite(nu).any(-1)]
    share = float(truth.mean())
    if not len(nu) or share in (0.0, 1.0):
        return {"auc": math.nan, "ari": math.nan}
    found = split.shared(nu, tau=1 - share)
    return {
        "auc": float(np.mean(split.auc(nu, truth))),
        "ari": float(split.adjusted_rand(found, truth).mean()),
    }


METHODS = ("true", "oracle", "static", "dynamic", "random", "random-redrawn", "fedavg", "local")
LAYER = "fc1"
COMMAND = "fedstat.sim"
_COMMIT_SECONDS = 0.5


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
        Settings of the data, see :func:`fedstat.sim.generate`.
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
        The first draws data, start and batches from ``seed``, each other one from a seed of its own
        (:meth:`replicate_seed`): the same for every method, so that methods are compared within replicates.
    seed : int
    replicate_seeds : {"named", "consecutive"}
        How replicates get their seeds. "consecutive" is what studies of earlier versions did, seed + r, so that
        studies with neighbouring seeds share replicates; such a study is resumed as it was begun.
    """

    p: tuple[float, ...] = setting((0.5,), "data", "shared shares of the neurons", low=0, high=1, distinct=True)
    alpha: tuple[float, ...] = setting((0.4,), "data", "shared shares of the covariates", low=0, high=1, distinct=True)
    methods: tuple[str, ...] = setting(METHODS, "method", "ways to split", choices=METHODS, distinct=True)
    clients: int = setting(100, "data", "clients C", low=1)
    d: int = setting(100, "data", "covariates", low=1)
    m: int = setting(200, "data", "hidden neurons", low=1)
    n_train: int = setting(100, "data", "training samples per client", low=1)
    n_test: int = setting(100, "data", "test samples per client", low=1)
    sigma: float = setting(1.0, "data", "standard deviation of the noise before the labels", low=0)
    means: Means = setting(
        "independent", "data", "means of covariates and personal weights: independent, or shared as the paper writes"
    )
    rounds: int = setting(30, "training", "communication rounds", low=1)
    local_epochs: int = setting(5, "training", "epochs of local training in a round", low=1)
    batch_size: int = setting(10, "training", "samples in a batch, 0 for all", low=0)
    lr: float = setting(0.05, "training", "learning rate of local SGD", above=0)
    participation: float = setting(1.0, "training", "share of the clients active in a round", above=0, high=1)
    kappa: float = setting(
        0.85, "method", "share of the eigenvalues' sum that decides the number of factors", above=0, high=1
    )
    tau: float | None = setting(
        None,
        "method",
        "quantile of the communalities from which neurons are shared; the true share by default",
        above=0,
        below=1,
        infinite=True,
    )
    estimator: factor.Method = setting("pa", "method", f"estimator of the communality, of {', '.join(factor.METHODS)}")
    replicates: int = setting(
        5, "training", "replicates: the first has --seed, each other one a seed of its own", low=1
    )
    seed: int = setting(0, "training", "seed of the study", low=0)
    replicate_seeds: Literal["named", "consecutive"] = setting(
        "named", "training", "how replicates get their seeds: named, or consecutive as studies of earlier versions did"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def replicate_seed(self, replicate: int) -> int:
        """Seed of a replicate, as :func:`fedstat.sim.generate` takes it."""
        return self.seed + replicate if self.replicate_seeds == "consecutive" else replicate_seed(self.seed, replicate)

    @property
    def config(self) -> dict[str, Any]:
        """What a store notes: of consecutive seeds what earlier versions noted, nothing."""
        noted = asdict(self)
        return noted if self.replicate_seeds == "named" else {k: noted[k] for k in noted if k != "replicate_seeds"}

    def model(self, p: float, alpha: float, replicate: int) -> Model8:
        """Model (8) of one cell of the grid."""
        return Model8(self.clients, self.d, self.m, p, alpha, self.means, self.replicate_seed(replicate))

    def training(self, replicate: int) -> TrainConfig:
        """Settings of training in one replicate."""
        return TrainConfig(
            optimizer=optim.sgd(self.lr),
            participation=self.participation,
            local_epochs=self.local_epochs,
            batch_size=self.batch_size or None,
            seed=self.replicate_seed(replicate),
        )


def study(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    client_chunk: int | None = None,
    threads: int | None = None,
    progress: bool = False,
    executor: Executor | None = None,
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
    executor : Executor, optional
        Makes the runs side by side, by its workers: any :class:`concurrent.futures.Executor`, such as Dask's
        ``Client.get_executor(pure=False)``; this process alone writes to ``out``. Runs that are not complete when the
        study is cut off begin again. Give ``threads=1``, or as many as a worker has cores.
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
    if resume and out is not None and store.command_of(Path(out)) == COMMAND:
        settings = {"replicate_seeds": store.config_of(out).get("replicate_seeds", "consecutive")} | settings
    chosen = Settings(**settings)
    machine = ComputeConfig(device=device, client_chunk=client_chunk, threads=threads)
    made = grid.Study(
        title="Simulation study on model (8)",
        command=COMMAND,
        references=SOURCE,
        config=chosen.config,
        layout=partial(_layout, chosen),
        cells=list(_cells(chosen)),
        begin=partial(_begin, chosen),
        done="metrics/rounds_done",
        steps=chosen.rounds,
        unit="round",
        grows=("replicates", "p", "alpha", "methods"),
    )
    return grid.make(made, machine, out=out, resume=resume, progress=progress, executor=executor)


def _cells(settings: Settings) -> Iterator[Cell]:
    """All runs; the methods of one replicate follow one another, on the same data."""
    sizes = (len(settings.p), len(settings.alpha), settings.replicates, len(settings.methods))
    for i, j, r, k in np.ndindex(*sizes):
        name = f"p={settings.p[i]:g} alpha={settings.alpha[j]:g} replicate={r} {settings.methods[k]}"
        yield Cell(name, {"p": i, "alpha": j, "method": k, "replicate": r})


def _begin(settings: Settings, writer: Target, machine: ComputeConfig) -> Make:
    """How one run is made, the data being drawn once for all methods of a replicate that follow one another."""
    noted: set[tuple[int, int, int]] = set()

    def make(cell: Cell, tick: Callable[[], object]) -> None:
        p, alpha, method, replicate = cell.where
        data, oracle = _draw(settings, p, alpha, replicate)
        if (p, alpha, replicate) not in noted:
            _note(writer, (p, alpha, replicate), data, oracle)
            noted.add((p, alpha, replicate))
        job = prepare(
            data,
            nets.mlp([settings.d, settings.m, 1]),
            _algorithm(settings, settings.methods[method], data["unit_shared"].to_numpy(), oracle),
            settings.training(replicate),
            machine,
        )
        _run(job, settings.rounds, cell.where, writer, tick)

    return make


@lru_cache(maxsize=1)
def _draw(settings: Settings, i: int, j: int, replicate: int) -> tuple[xr.Dataset, factor.Fit]:
    """Data of a replicate and the factor analysis of its true weights."""
    model = settings.model(settings.p[i], settings.alpha[j], replicate)
    sizes = {name: getattr(settings, name) for name in ("n_train", "n_test", "sigma")}
    data = generate(**asdict(model), **sizes)
    return data, factor.fit(correlation(model), kappa=settings.kappa, method=settings.estimator)


def _note(writer: Target, where: tuple[int, int, int], data: xr.Dataset, oracle: factor.Fit) -> None:
    """Write what is known of the data to the store."""
    writer.write("truth/majority_share", where, data.attrs["majority_share"])
    for name in ("communality", "n_factors", "converged"):
        writer.write(f"truth/{name}", where, np.asarray(getattr(oracle, name)))


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


def _run(job: Job, rounds: int, where: tuple[int, ...], writer: Target, tick: Callable[[], Any]) -> None:
    """One run to its last round; finished rounds are committed about twice a second, and at an interrupt."""
    state, buffer, observers = start(job), Buffer(writer, where), [metrics.scores(), metrics.split([LAYER])]
    committed = time.monotonic()

    def commit() -> None:
        buffer.flush()
        writer.write("metrics/rounds_done", where, state.round)
        writer.commit()

    try:
        while state.round < rounds:
            new, values = observed_round(job, state, observers)
            buffer.add(new.round, values)
            state = new
            tick()
            if time.monotonic() - committed > _COMMIT_SECONDS:
                commit()
                committed = time.monotonic()
    finally:
        if state.round:
            commit()


def _layout(settings: Settings) -> dict[str, Group]:
    lead = {
        "p": ("p", np.array(settings.p), {"long_name": "p"}),
        "alpha": ("alpha", np.array(settings.alpha), {"long_name": "α"}),
        "method": [*settings.methods],
        "replicate": settings.replicates,
    }
    chunk, of_truth = dict.fromkeys(lead, 1), ("p", "alpha", "replicate")
    groups = record.layout(lead, settings.rounds, settings.clients, {LAYER: settings.m})
    groups["metrics"] |= store.group({}, chunk, rounds_done=(tuple(lead), "int64"))
    shared = np.stack([settings.model(value, settings.alpha[0], 0).unit_shared for value in settings.p])
    groups["truth"] = store.group(
        lead | {"unit": settings.m},
        chunk,
        unit_shared=("p unit", shared),
        majority_share=(of_truth, "float64", "mean share of a client's commoner label"),
        communality=((*of_truth, "unit"), "float64", "communality of the true weights"),
        n_factors=(of_truth, "int64"),
        converged=(of_truth, "bool"),
    )
    return groups
