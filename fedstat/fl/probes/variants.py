"""Probes of other models: with units masked, under other prediction rules, and of unseen clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np

from fedstat import store
from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import cohort, masks, nets
from fedstat.fl.algorithm import Algorithm, InitContext, Mask, Phase
from fedstat.fl.batches import Rows, whole
from fedstat.fl.chunks import each_chunk
from fedstat.fl.client_rows import StackedRows
from fedstat.fl.evaluate import dims, evaluate
from fedstat.fl.evaluate import require as require_choice
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_chunk
from fedstat.fl.nets import Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.scores import diverged, scores
from fedstat.fl.state import AlgorithmRows, Download, State

PARTS = ("none", "shared", "personal", "shared, N(0, 1)", "personal, N(0, 1)")


def ablation_probe(job: Job, draws: int) -> Observer:
    """Group ``ablation``: accuracy (part, draw, client), see :func:`ablated_accuracy`."""
    coords = {"part": [*PARTS], "draw": draws, "client": job.clients}
    return Observer(
        {"ablation": store.group(coords, accuracy=("part draw client", "float32", "test accuracy"))},
        on_end=lambda job, state: {"ablation/accuracy": ablated_accuracy(job, state, draws=draws)},
    )


def ablated_accuracy(job: Job, state: State, *, draws: int) -> np.ndarray:
    """Test accuracy (part, draw, client) with random values in place of one part of the split layers.

    Parameters
    ----------
    job, state
        A run; its personal models are evaluated without further training.
    draws : int
        Number of draws of random values, separate for each client.

    Returns
    -------
    array (part, draw, client)
        By ``PARTS``: nothing replaced; the shared or the personal units' parameters replaced by normal values with the
        standard deviation of that client's parameter; the same with standard normal values, as in the published code.
        Without a split layer all parts are equal.
    """
    found = np.full((len(PARTS), draws, job.clients), np.nan, np.float32)
    split = [n for n, mask in state.mask.shared.items() if bool(mask.any()) and not bool(mask.all())]
    split = [name for name in split if name not in job.net.buffers]
    clients = cohort.of_local(job, np.arange(job.clients)).local

    def work(span: slice) -> None:
        chunk = clients[span]
        params = Download(job, state).models(chunk)
        found[0, :, chunk] = scores(job, params, job.test, chunk)[0][:, None]
        for draw in range(draws):
            noise = _noise(job, split, params, chunk, draw)
            for i, part in enumerate(PARTS[1:], 1):
                wanted = part.startswith("shared")
                own = 1.0 if part.endswith("N(0, 1)") else None
                changed = dict(params)
                for name in split:
                    p = params[name]
                    sd = own or p.flatten(1).std(1, correction=0).view(-1, *(1,) * (p.ndim - 1))
                    shared = masks.of_clients(state.mask.shared[name], p.ndim - 1, chunk)
                    changed[name] = torch.where(shared == wanted, noise[name] * sd, p)
                found[i, draw, chunk] = scores(job, changed, job.test, chunk)[0]

    each_chunk(job, job.clients, work)
    return job.process_group.of_all(found.T).T


def _noise(job: Job, names: list[str], params: Params, clients: np.ndarray, draw: int) -> Params:
    """Standard normal values in the shape of some parameters, each client's from its own stream."""
    noise = {name: torch.empty_like(params[name]) for name in names}
    for i, c in enumerate(clients):
        rng = streams.generator(job.seed, "masking", draw, int(job.train.ids[c]))
        for name in names:
            noise[name][i] = torch.from_numpy(rng.standard_normal(job.net.shapes[name], dtype=np.float32))
    return noise


def readout_jobs(job: Job, readouts: Mapping[str, Callable[[Algorithm], Algorithm]]) -> dict[str, Job]:
    """The job with the algorithm of each readout; ValueError if the data do not allow the choice of one."""
    found = {name: replace(job, algorithm=make(job.algorithm)) for name, make in readouts.items()}
    for one in found.values():
        require_choice(one)
    return found


def readouts_probe(job: Job, readouts: Mapping[str, Job]) -> Observer:
    """Group ``readouts``: accuracy, loss (readout, client), step (readout, client, layer)."""
    group = store.group(
        {"readout": [*readouts], "client": job.clients, "layer": [*nets.layers(job.net)]},
        accuracy=("readout client", "float32", "test accuracy"),
        loss=("readout client", "float32", "mean test loss"),
        step=("readout client layer", "float32", "B of W + B (W' − W)"),
    )

    def last(job: Job, state: State) -> Values:
        found: dict[str, list[np.ndarray]] = {name: [] for name in group.variables}
        for other in readouts.values():
            one = replace(job, algorithm=other.algorithm)
            scores = evaluate(one, state)
            step = np.asarray(scores.get("choice/step", 1.0 if one.algorithm.finetune else 0.0))
            step = step[:, None] if dims(one).get("step") == ("client",) else step
            found["step"].append(np.broadcast_to(step, (one.clients, len(nets.layers(one.net)))))
            for name in ("accuracy", "loss"):
                found[name].append(scores[name])
        return {
            f"readouts/{name}": job.process_group.of_all(np.stack(values, 1)).swapaxes(0, 1)
            for name, values in found.items()
        }

    return Observer({"readouts": group}, on_end=last)


RULES = ("global", "finetuned", "local_train", "ensemble")


def rules(job: Job) -> tuple[str, ...]:
    """Those of ``RULES`` that mean something: clients with labels of their own cannot use others' output layers."""
    return ("finetuned", "local_train") if job.own_labels else RULES


def new_clients_probe(job: Job, train: Rows, test: Rows) -> Observer:
    """Group ``new``: accuracy (rule, client), see :func:`accuracy`."""
    attrs = {"long_name": "test accuracy"}
    if left_out := [rule for rule in RULES if rule not in rules(job)]:
        attrs["comment"] = f"{' and '.join(left_out)} left out: clients number their classes differently"
    coords = {"rule": [*rules(job)], "client": len(test.sizes)}
    sizes = {"n_train": ("client", train.sizes), "n_test": ("client", test.sizes)}
    group = store.group(coords, **sizes, accuracy=("rule client", "float32", attrs))

    def last(job: Job, state: State) -> dict[str, np.ndarray]:
        found = accuracy(job, state, train, test)
        return {"new/accuracy": np.stack([found[rule] for rule in rules(job)])}

    return Observer({"new": group}, on_end=last)


def accuracy(job: Job, state: State, train: Rows, test: Rows) -> dict[str, np.ndarray]:
    """Test accuracy of new clients (client,), by rule.

    Parameters
    ----------
    job, state
        A run.
    train, test : Rows
        Samples of the new clients.

    Returns
    -------
    dict of array (client,)
        ``global``: the server's model as it is (FedAvg, FedProx); entries that a method never shares are as at the
        start.
        ``finetuned``: that model after one round of the method's local training (FedAvg+, FedProx+); if a method
        chooses among fine-tunings, the last of them, in full.
        ``local_train``: shared entries downloaded and fixed, personal ones trained for one round (FedFac §3.2; also
        FedRep's head and FedEM's mixture weights). A new client has no mask of its own: if masks differ between
        clients, entries that all of them share are fixed.
        ``ensemble``: mean of the class probabilities of all existing clients' models (FedFac §3.2; LG-FedAvg).
        If clients number their classes differently, ``global`` and ``ensemble`` are left out, which predict with
        output layers that no new client has trained.
    """
    new = replace(job, train=train, test=test, validation=None, optimizer_state="reset")
    download = Download(new, _state(new, state))
    clients = cohort.of_local(new, np.arange(new.clients)).local
    found = {rule: np.full(len(clients), np.nan, np.float32) for rule in rules(job)}
    # Fine-tuning that trains nothing exchanges the download for a model that no new client has.
    trains = any(phase.length(job.local_epochs) or phase.steps for phase in job.algorithm.finetune)
    trained = job.hooks.finetune if trains else job.phases
    held = download.state.mask.shared
    ways: dict[str, tuple[tuple[Phase, ...], Mask | None]] = {
        "global": ((), None),
        "finetuned": (trained, None),
        "local_train": (job.phases, held),
    }

    ways = {rule: way for rule, way in ways.items() if rule in found}

    def work(span: slice) -> None:
        chunk = clients[span]
        for rule, (phases, frozen) in ways.items():
            params, own = download.models(chunk), download.algorithm_state(chunk)
            train_chunk(new, params, chunk, phases, key=("new", state.round), frozen=frozen, state=own)
            found[rule][chunk], loss = scores(new, params, test, chunk)
            if (bad := ~np.isfinite(loss)).any():
                raise diverged(f"the test loss by {rule!r}", bad, chunk, state.round)

    each_chunk(new, len(clients), work)
    if "ensemble" in found:
        found["ensemble"] = _ensemble(job, state, test)
    return found


def _state(new: Job, state: State) -> State:
    """State of the new clients beside that of the run: personal parameters and the algorithm's state are initial."""

    def none(_: int | None) -> Params:
        raise ValueError(f"{new.algorithm.name} trains clients to make its state, so it takes no new clients")

    trained = none, lambda epochs: (none(epochs), None), none
    context = InitContext(new.net, new.train.sizes, new.seed, new.device, *trained)
    rows = StackedRows(new.hooks.init_state(context).clients)
    algorithm_state = AlgorithmRows(rows, state.algorithm_state.server)
    held = {name: masks.by_all(mask, state.global_params[name].ndim) for name, mask in state.mask.shared.items()}
    mask = state.mask._replace(shared=held)
    return State(state.round, StackedRows(), {}, state.global_params, mask, StackedRows(), algorithm_state)


def _ensemble(job: Job, state: State, test: Rows) -> np.ndarray:
    """Accuracy (client,) of the mean of the existing clients' class probabilities."""
    rows, live = whole(test, np.arange(len(test.start) - 1))
    x, y = test.x[rows[live]], test.y[rows[live]]
    parts: dict[int, torch.Tensor] = {}

    def work(span: slice) -> None:
        params = Download(job, state).models(np.arange(job.clients)[span])
        k = span.stop - span.start
        with torch.no_grad():
            blocks = (x[block].expand(k, *x[block].shape) for block in nets.sample_blocks(len(x)))
            sums = [job.loss.probability(job.net.apply(params, block)).sum(0) for block in blocks]
        parts[span.start] = torch.cat(sums)

    each_chunk(job, job.clients, work)
    right = torch.zeros_like(live, dtype=torch.float32)
    total = job.process_group.total({"": reduce(add, (parts[start] for start in sorted(parts)))})[""]
    right[live] = (total.argmax(-1) == y).float()
    return (right.sum(1) / live.sum(1)).cpu().numpy()
