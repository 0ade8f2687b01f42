"""A communication round (FedFac, Algorithms 1 and 2): pure functions of a job, a state and the round's clients.

- ``State.client_params`` (``state.py``) holds the parameters that clients keep, in memory (``client_rows.py``) or on
  disk (``disk_rows.py``).
- The observer in ``probes/measures.py`` counts bytes: those of ``Upload.entries``, and of downloads.
- Aggregators are rows of ``AGGREGATORS`` in ``prepare.py``, probes rows of ``PROBES`` in ``training.py``. A probe is an
  observer; observers get the :class:`Outcome` of a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import chunks, masks
from fedstat.fl.aggregate import Sent
from fedstat.fl.algorithm import AlgorithmState, Mask, RoundContext, SharedMask
from fedstat.fl.cohort import Cohort, expected
from fedstat.fl.evaluate import losses_of
from fedstat.fl.hooks import Hooks, aggregated
from fedstat.fl.job import Job
from fedstat.fl.local_training import Trained, train_locally
from fedstat.fl.nets import Params
from fedstat.fl.state import Download, State

if TYPE_CHECKING:
    from torch import Tensor


class Upload(NamedTuple):
    """The message of clients to the server after local training.

    Attributes
    ----------
    visible : Cohort
        ``values`` has one row for each of these clients, see :func:`visible_clients`.
    values : Params (client, ...)
        The server averages or mixes these values where entries are shared, and ignores the others.
    mask : SharedMask
        The mask after the round. The server averages the entries that it marks.
    entries : Mask
        Clients send these entries, and their bytes are counted. Dynamic FedFac and Factorized-FL send more entries than
        the server averages.
    """

    visible: Cohort
    values: Params
    mask: SharedMask
    entries: Mask


class Outcome(NamedTuple):
    """The result of a round, which observers get.

    Attributes
    ----------
    before, state : State
        State before and after the round.
    cohort : Cohort
    trained : Trained
        Has rows only for the clients that this process trains.
    context : RoundContext
    upload : Upload
    mixing : Tensor (client, client) or None
        The mixing matrix, if the algorithm mixes.
    """

    before: State
    state: State
    cohort: Cohort
    trained: Trained
    context: RoundContext
    upload: Upload
    mixing: Tensor | None


def run_round(job: Job, state: State, cohort: Cohort) -> Outcome:
    """Run one communication round: download, local training, upload, aggregation.

    Raises
    ------
    ValueError
        If the new mask omits a parameter, or makes an entry personal that ``client_params`` lacks; if the result of a
        hook has a wrong type, name or shape.
    FloatingPointError
        If a client's loss or parameters are no longer finite after local training.
    """
    hooks = job.hooks if len(cohort) else job.hooks.of_empty_round()
    download = Download(job, state)
    trained = train_locally(job, download, cohort.local, job.phases)
    trained.require_finite(job, cohort.local, state.round + 1)
    context = round_context(job, download, cohort, trained.params)
    mask = hooks.update_mask(context, state.personal_units)
    upload = encode(hooks, context, mask, visible_clients(job, cohort))
    means, aggregator = aggregate(job, hooks, state, cohort, upload)
    global_params = update_global(state.global_params, means, state.mask, mask, job.server_lr)
    mixing = hooks.mixing_weights(context)
    models = trained.params if mixing is None else mix(download, cohort, trained.params, upload, mixing)
    server = {"global_params": global_params, "mask": mask, "aggregator": aggregator}
    new = state.after(cohort, models, trained.optimizer, hooks.update_state(context), **server)
    context.free("before")  # evaluation, which follows, needs the memory
    return Outcome(state, new, cohort, trained._replace(optimizer={}), context, upload, mixing)


def needs_clients(job: Job) -> bool:
    """Return True if a hook or the aggregator looks at single clients, as in all algorithms that mix."""
    return job.hooks.looks_at_clients or job.aggregator.needs == "clients"


def visible_clients(job: Job, cohort: Cohort) -> Cohort:
    """Return the selected clients whose rows hooks get: of all processes if needed, else of this process."""
    return cohort if needs_clients(job) else cohort.of_this_process()


def round_context(job: Job, download: Download, cohort: Cohort, after: Params) -> RoundContext:
    """Return the context that hooks read; ``after`` (local, ...) holds this process's models after local training."""
    state, visible = download.state, visible_clients(job, cohort)

    def weights() -> Tensor:
        sizes, total = (torch.as_tensor(n, dtype=torch.float32) for n in (visible.sizes, cohort.sizes.sum()))
        return (sizes / total).to(job.device)

    def algorithm_state() -> AlgorithmState:
        local = download.algorithm_state(cohort.local)
        return local._replace(clients=visible.gather(local.clients))

    def evaluate(models: Params, client_ids: np.ndarray, which: np.ndarray | None = None) -> Tensor:
        """Evaluate in each process on its clients, and gather the losses; see ``RoundContext.evaluate``."""
        client_ids = np.asarray(client_ids)
        position = {int(c): i for i, c in enumerate(cohort.local_ids)}
        held = visible.held(client_ids)  # positions of the clients that this process holds
        index = np.array([position[int(c)] for c in client_ids[held]], int)
        lacking = {name: p[index] for name, p in after.items() if name not in models}
        losses = losses_of(job, models, cohort.local[index], which if which is None else which[held], lacking)
        return visible.gather({"loss": losses}, client_ids)["loss"]

    def moments() -> Any:
        local = chunks.over_clients(job, lambda span: download.models(cohort.local[span]), after)
        return cohort.join(local, job.device)

    parts = {
        "clients": lambda: visible.ids,
        "weights": weights,
        "before": lambda: visible.gather(download.models(cohort.local)),
        "after": lambda: visible.gather(after),
        "state": algorithm_state,
        "evaluate": lambda: evaluate,
        "moments": moments,
    }
    return RoundContext(job.net, state.round, job.seed, state.mask, state.global_params, job.server_lr, parts)


def encode(hooks: Hooks, context: RoundContext, mask: SharedMask, visible: Cohort) -> Upload:
    """Return the message of the clients of ``context`` under the new mask."""
    return Upload(visible, hooks.encode(context, mask), mask, hooks.upload_mask(mask))


def aggregate(job: Job, hooks: Hooks, state: State, cohort: Cohort, upload: Upload) -> tuple[Params, Any]:
    """Aggregate every parameter that has a shared entry; return the means and the aggregator's new state."""
    shared = {name: masks.by_some(upload.mask.shared[name], p.ndim) for name, p in state.global_params.items()}
    values = {name: p for name, p in upload.values.items() if bool(shared[name].any())}
    visible = upload.visible
    sent = Sent(
        values,
        server={name: state.global_params[name] for name in values},
        shared={name: shared[name] for name in values},
        sizes=torch.from_numpy(visible.sizes).to(job.device, torch.float32),
        weights=hooks.weights(visible.ids, lambda: (cohort.sizes, cohort.ids, job.everyone or job.clients)),
        clients=visible.ids,
        round=state.round,
        seed=job.seed,
        expected=expected(job),
    )
    if not needs_clients(job):  # the aggregator adds up over processes
        sent = sent._replace(total=cohort.sum)
    return aggregated(job.aggregator, sent, state.aggregator, job.process_group)


def update_global(params: Params, means: Params, before: SharedMask, after: SharedMask, lr: float) -> Params:
    """Return the global model after a round: move it from its old parameters W to the clients' means.

    An entry that stays shared becomes W + η_g (mean − W). An entry that becomes shared becomes the mean. Any other
    entry keeps W. If masks differ between clients, one client that shares an entry suffices. The mean is over all
    selected clients, including clients that keep the entry.

    Parameters
    ----------
    params : Params (...)
    means : Params (...)
        Means of parameters with shared entries. Entries that are not shared are ignored.
    before, after : SharedMask
        The mask before and after the round.
    lr : float
        η_g.
    """
    updated = dict(params)
    for name, new in means.items():
        was, now = (masks.by_some(mask.shared[name], new.ndim) for mask in (before, after))
        updated[name] = torch.where(now, torch.where(was, torch.lerp(params[name], new, lr), new), params[name])
    return updated


def mix(download: Download, cohort: Cohort, after: Params, upload: Upload, mixing: Tensor) -> Params:
    """Return models (local, ...) of a mixing server.

    Where entries are shared, each client takes a step of length η_g from its download to its weighted mean of all
    uploads. Elsewhere it keeps its trained entries.
    """
    models, lr = dict(after), download.job.server_lr
    before = download.models(cohort.local) if lr != 1 else {}
    weights = cohort.local_rows({"weights": mixing})["weights"]
    for name, p in upload.values.items():
        mask = upload.mask.shared[name]
        if not bool(mask.any()):
            continue
        new = torch.tensordot(weights, p, 1)
        if before:
            new = torch.lerp(before[name], new, lr)
        models[name] = torch.where(masks.of_clients(mask, p.ndim - 1, cohort.local), new, after[name])
    return models
