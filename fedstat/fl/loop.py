"""The initial state, training before the first round, and the loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedstat._utils import streams
from fedstat.fl import chunks, client_rows, cohort, masks, split_halves
from fedstat.fl.algorithm import InitContext, Phase, SharedMask
from fedstat.fl.cohort import of_round
from fedstat.fl.communication_round import round_context, run_round
from fedstat.fl.hooks import aggregator_state
from fedstat.fl.job import Job
from fedstat.fl.ledger import Ledger
from fedstat.fl.local_training import train_locally
from fedstat.fl.nets import Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.probes.measures import measure_scores
from fedstat.fl.ranks import joined
from fedstat.fl.state import AlgorithmRows, Download, State
from fedstat.fl.watch import Watch


def start(job: Job) -> State:
    """Return the state before the first round, in which all clients have equal parameters.

    Raises
    ------
    ValueError
        If a parameter has no bool mask that broadcasts against (client, *shape), or the result of a hook does not fit.
    """
    params = {name: p.to(job.device) for name, p in job.net.init(streams.generator(job.seed, "start")).items()}
    context = InitContext(job.net, job.sizes, job.seed, job.device, *_pretraining_functions(job, params))
    mask = job.hooks.init_mask(context)
    personal_units = job.hooks.personal_params(mask)
    personal = {name: params[name] if units is None else params[name][units] for name, units in personal_units.items()}
    optimizer: Params = {}
    if job.optimizer_state == "keep":
        optimizer = job.optimizer.init({name: p.unsqueeze(0) for name, p in params.items()})
        optimizer = {name: p[0] for name, p in optimizer.items()}
    algorithm_state = job.hooks.init_state(context)
    if job.process_group.several:
        local = {name: p[job.train.ids] for name, p in algorithm_state.clients.items()}
        algorithm_state = algorithm_state._replace(clients=local)
    aggregator = aggregator_state(job.aggregator, params)
    common = personal if job.common_rows else {}
    parts = {"client_params": personal, "common_params": common, "optimizer": optimizer}
    initial = {name: _expand(part, job.clients) for name, part in parts.items()}
    rows = client_rows.create(job, {**initial, "algorithm_state": algorithm_state.clients})
    algorithm_rows = AlgorithmRows(rows.pop("algorithm_state"), algorithm_state.server)
    state = State(0, personal_units=personal_units, global_params=params, mask=mask, aggregator=aggregator,
                  algorithm_state=algorithm_rows, **rows)  # fmt: skip
    _try_out(job, state)
    return state


def pretrain(job: Job, params: Params, epochs: int | None, clients: np.ndarray | None = None) -> Params:
    """Train clients, by default all, from the server's parameters with nothing shared; return Params (client, ...)."""
    selected = cohort.of_local(job, np.arange(job.clients) if clients is None else clients)
    trained = train_locally(*_isolate(job, params), selected.local, (Phase(epochs),)).params
    return {name: p[np.argsort(selected.local)] for name, p in trained.items()}


def _pretraining_functions(job: Job, params: Params) -> tuple[Any, Any, Any]:
    """Return the functions ``pretrain``, ``halves`` and ``moments`` of :class:`~fedstat.fl.algorithm.InitContext`."""

    def models(epochs: int | None) -> Params:
        chunks.require_for_all(job)
        return job.process_group.clients(pretrain(job, params, epochs))

    def halves(epochs: int | None) -> tuple[Params, np.ndarray | None]:
        chunks.require_for_all(job)
        return split_halves.trained(*_isolate(job, params), cohort.of_all(job).at_least(2), (Phase(epochs),))

    def moments(epochs: int | None) -> Mapping[str, Any]:
        def before(span: slice) -> Params:
            return _expand(params, span.stop - span.start)

        sums = (
            chunks.over_clients(job, before, pretrain(job, params, epochs, clients)) for clients in chunks.blocks(job)
        )
        return cohort.of_all(job).join(joined(sums), job.device)

    return models, halves, moments


def _expand(params: Params, n_clients: int) -> Params:
    return {name: p.expand(n_clients, *p.shape) for name, p in params.items()}


def _isolate(job: Job, params: Params) -> tuple[Job, Download]:
    """Return the job in which every client trains alone, and its download."""
    isolated = replace(job, optimizer_state="reset", algorithm=job.algorithm._replace(on_download=None))
    no_rows = client_rows.StackedRows()
    state = State(-1, no_rows, {}, params, SharedMask(masks.share_none(job.net, job.device)), no_rows)
    return isolated, Download(isolated, state)


def _try_out(job: Job, state: State) -> None:
    """Call the hooks of a round with two clients of this process that have not trained, so that errors show at once."""
    selected = cohort.of_round(job, 0).local
    two = cohort.of_local(job, (selected if len(selected) else np.arange(job.clients))[:2])
    download = Download(job, state)
    context = round_context(job, download, two, download.models(two.local))
    job.hooks.try_out(context, state.mask, (two.sizes, two.ids, job.everyone or job.clients))


def run(
    job: Job,
    state: State,
    observers: Sequence[Observer],
    ledger: Ledger,
    *,
    rounds: int,
    evaluate_every: int,
    tick: Callable[[int], object],
    watch: Watch,
) -> int:
    """Train to the last round, or until ``watch`` ends the run; record what observers return.

    Parameters
    ----------
    job : Job
    state : State
        The first state. No caller should hold it, as it holds the rows of all clients.
    observers : sequence of Observer
    ledger : Ledger
    rounds : int
        Number of the last planned round.
    evaluate_every : int
        Rounds between evaluations; the last round is always evaluated.
    tick : callable (int)
        Called with the number of rounds already done, and with 1 after each round.
    watch : Watch
        Called after each round.

    Returns
    -------
    int
        Number of the last round.
    """
    tick(state.round)
    watch.open_logs(state.round)
    is_stopped = False
    try:
        while state.round < rounds and not is_stopped:
            number = state.round + 1
            evaluated = number % evaluate_every == 0 or number == rounds
            new, values = observed_round(job, state, observers, evaluated=evaluated)
            values = ledger.add(number, values)
            state = new  # only now: a run that stops earlier repeats the round
            del new
            try:
                is_stopped = watch.is_stopped(number, values)
                if is_stopped and not evaluated:
                    values |= ledger.add(number, measure_scores(job, state))
            finally:  # the round is finished, whatever the callback does
                watch.write_logs(number, values)
            tick(1)
            ledger.commit_if_due(state)
        last = [observer.on_end(job, state) for observer in observers if observer.on_end]
        values = {name: value for values in last for name, value in values.items()}
        ledger.finish(state, values, early=state.round < rounds)
    except BaseException:
        ledger.interrupt(state)
        raise
    return state.round


def observed_round(
    job: Job, state: State, observers: Sequence[Observer], *, evaluated: bool = True
) -> tuple[State, Values]:
    """Run a round with its selected clients; return the values of observers, and ``metrics/seconds``.

    The seconds are the wall time of the round itself.
    """
    if job.everyone is not None and not job.process_group.several:
        raise ValueError(
            f"a round needs the data of all {job.everyone} clients, but the job has {job.clients}. Use the whole job."
        )
    cohort, values = of_round(job, state.round), Values()
    watching = [observer for observer in observers if evaluated or not observer.only_evaluated]
    for observer in watching:
        if observer.on_round_start:
            values |= observer.on_round_start(job, state, cohort)
    started = time.perf_counter()
    outcome = run_round(job, state, cohort)
    values["metrics/seconds"] = np.asarray(time.perf_counter() - started)
    for observer in watching:
        if observer.on_round_end:
            values |= observer.on_round_end(job, outcome)
    return outcome.state, values
