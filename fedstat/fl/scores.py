"""Accuracy and loss of stacked models on clients' samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import batches, nets
from fedstat.fl.batches import Rows
from fedstat.fl.chunks import each_chunk
from fedstat.fl.job import Job
from fedstat.fl.nets import Params

_SCORES = ("accuracy", "loss")


def measured(job: Job, clients: np.ndarray, models: Callable[[slice], Params]) -> dict[str, np.ndarray]:
    """Return scores (client,) of one model for each of some clients, in their order; NaN for the other clients.

    Scores are accuracy and loss on the test samples and, if there are validation samples, ``validation_accuracy`` and
    ``validation_loss``.
    """
    return {name: values[:, 0] for name, values in table(job, clients, lambda span: (models(span),), 1).items()}


def table(job: Job, clients: np.ndarray, models: Callable[[slice], Iterable[Params]], n: int) -> dict[str, np.ndarray]:
    """Return scores (client, n) of n models for each client, see :func:`measured`."""
    subsets = {"": job.test} | ({} if job.validation is None else {"validation_": job.validation})
    columns = {f"{of}{name}": np.full((job.clients, n), np.nan, np.float32) for of in subsets for name in _SCORES}

    def work(span: slice) -> None:
        for i, params in enumerate(models(span)):
            for of, rows in subsets.items():
                for name, values in zip(_SCORES, scores(job, params, rows, clients[span]), strict=True):
                    columns[of + name][clients[span], i] = values

    each_chunk(job, len(clients), work)
    return columns


def require_finite(job: Job, metrics: Mapping[str, np.ndarray], clients: np.ndarray, number: int) -> None:
    """Raise FloatingPointError, naming a client, if a mean loss is not finite."""
    for name, losses in metrics.items():
        if name.endswith("loss") and (bad := ~np.isfinite(losses[clients])).any():
            what = f"the {name.removesuffix('loss').replace('_', ' ') or 'test '}loss"
            raise diverged(what, bad, job.ids(clients), number)


def diverged(what: str, bad: np.ndarray, ids: np.ndarray, number: int) -> FloatingPointError:
    """Return the error for values that are not finite in some clients."""
    return FloatingPointError(
        f"training diverged in round {number}: {what} of client {int(ids[bad].min())} is not finite ({int(bad.sum())} "
        f"of {len(ids)} clients). Lower the learning rate, or scale the inputs."
    )


def scores(job: Job, params: Params, data: Rows, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return accuracy and mean loss (client,) of stacked models on the clients' samples in ``data``."""
    data, clients = batches.load_clients(data, clients)
    sizes = torch.from_numpy(data.sizes[clients])
    right, total = torch.zeros(len(clients)), torch.zeros(len(clients))
    first, most = torch.from_numpy(data.start[clients]), int(sizes.max()) if len(clients) else 0
    for block in nets.sample_blocks(most):
        index = torch.arange(block.start, block.stop)
        real = (index < sizes[:, None]).to(job.device)
        rows = (first[:, None] + torch.minimum(index, sizes[:, None] - 1)).to(job.device)
        half = job.compute.precision == "bfloat16"
        with torch.no_grad(), torch.autocast(job.device.type, torch.bfloat16, enabled=half):
            out = job.net.apply(params, batches.take_rows(data.x, rows)).float()
            y = data.y[rows]
            right += ((job.loss.predict(out) == y) & real).sum(1).cpu()
            total += (job.loss.value(out, y) * real).sum(1).cpu()
    return (right / sizes).numpy(), (total / sizes).numpy()


def losses_of(
    job: Job,
    models: Params,
    clients: np.ndarray,
    which: np.ndarray | None = None,
    lacking: Params | None = None,
) -> torch.Tensor:
    """Return the mean loss (client, model) of models (model, ...) on the validation samples of some clients.

    Every pass evaluates one model per client, for all clients in a chunk together.

    Parameters
    ----------
    job : Job
    models : Params (model, ...)
    clients : int array (client,)
    which : int array (client, k), optional
        The models that each client evaluates; all by default.
    lacking : Params (client, ...), optional
        The clients' parameters that the models lack.
    """
    validation = job.validation
    if validation is None:
        raise ValueError(
            f"{job.algorithm.name} evaluates models on validation samples, but the data have none. Add some "
            "(validation=0.1)."
        )
    number = len(next(iter(models.values()))) if which is None else which.shape[1]
    losses = torch.empty(len(clients), number, device=job.device)

    def model_of(span: slice, i: int) -> Params:
        if which is None:
            return {name: p[i : i + 1].expand(len(clients[span]), *p.shape[1:]) for name, p in models.items()}
        return {name: p[which[span, i]] for name, p in models.items()}

    def work(span: slice) -> None:
        local = {name: p[span] for name, p in (lacking or {}).items()}
        for i in range(number):
            params = model_of(span, i) | local
            losses[span, i] = torch.from_numpy(scores(job, params, validation, clients[span])[1]).to(losses)

    each_chunk(job, len(clients), work)
    return losses
