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
from fedstat.fl import cohort, masks, metrics, nets
from fedstat.fl.algorithm import Algorithm, InitContext, Mask, Phase
from fedstat.fl.batches import Rows, pad_rows
from fedstat.fl.chunks import each_chunk
from fedstat.fl.client_rows import StackedRows
from fedstat.fl.evaluate import dims, evaluate, require_choice, score_of_means, scores
from fedstat.fl.job import Job
from fedstat.fl.local_training import diverged, train_chunk
from fedstat.fl.nets import Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.state import AlgorithmRows, Download, State

PARTS = ("none", "shared", "personal", "shared, N(0, 1)", "personal, N(0, 1)")


def ablation_probe(job: Job, draws: int) -> Observer:
    """Return the probe of group ``ablation``: score (part, draw, client), see :func:`ablated_scores`."""
    coords = {"part": [*PARTS], "draw": draws, "client": job.clients}
    group = store.group(coords, **{job.score.name: ("part draw client", "float32", job.score.long_name)})
    return Observer(
        {"ablation": group},
        on_end=lambda job, state: {f"ablation/{job.score.name}": ablated_scores(job, state, draws=draws)},
    )


def ablated_scores(job: Job, state: State, *, draws: int) -> np.ndarray:
    """Return test scores (part, draw, client) with random values in place of one part of the split layers.

    Parameters
    ----------
    job, state
        A run; its client models are evaluated without further training.
    draws : int
        Number of draws of random values, separate for each client.

    Returns
    -------
    array (part, draw, client)
        Parts are ``PARTS``: no replacement; parameters of shared or personal units replaced by normal values with the
        standard deviation of the client's parameter; or replaced by standard normal values, as in the published code.
        Without a split layer all parts are equal.
    """
    result = np.full((len(PARTS), draws, job.clients), np.nan, np.float32)
    split = [n for n, mask in state.mask.shared.items() if bool(mask.any()) and not bool(mask.all())]
    split = [name for name in split if name not in job.net.buffers]
    clients = cohort.of_local(job, np.arange(job.clients)).local

    def work(span: slice) -> None:
        chunk = clients[span]
        params = Download(job, state).models(chunk)
        result[0, :, chunk] = scores(job, params, job.test, chunk)[0][:, None]
        for draw in range(draws):
            noise = _draw_noise(job, split, params, chunk, draw)
            for i, part in enumerate(PARTS[1:], 1):
                is_shared = part.startswith("shared")
                fixed_sd = 1.0 if part.endswith("N(0, 1)") else None
                changed = dict(params)
                for name in split:
                    p = params[name]
                    sd = fixed_sd or p.flatten(1).std(1, correction=0).view(-1, *(1,) * (p.ndim - 1))
                    shared = masks.of_clients(state.mask.shared[name], p.ndim - 1, chunk)
                    changed[name] = torch.where(shared == is_shared, noise[name] * sd, p)
                result[i, draw, chunk] = scores(job, changed, job.test, chunk)[0]

    each_chunk(job, job.clients, work)
    return job.process_group.of_all(result.T).T


def _draw_noise(job: Job, names: list[str], params: Params, clients: np.ndarray, draw: int) -> Params:
    """Draw standard normal values in the shape of some parameters, each client's from a separate stream."""
    noise = {name: torch.empty_like(params[name]) for name in names}
    for i, c in enumerate(clients):
        rng = streams.generator(job.seed, "masking", draw, int(job.train.ids[c]))
        for name in names:
            noise[name][i] = torch.from_numpy(rng.standard_normal(job.net.shapes[name], dtype=np.float32))
    return noise


def prediction_jobs(job: Job, rules: Mapping[str, Callable[[Algorithm], Algorithm]]) -> dict[str, Job]:
    """Return the job with the algorithm of each prediction rule; ValueError if the data do not allow its choice."""
    if not isinstance(rules, Mapping):
        raise ValueError(
            "prediction_rules must map names to functions, such as {'fedavg+': algorithms.finetuned}, but got "
            f"{rules!r:.200}"
        )
    jobs = {name: replace(job, algorithm=make(job.algorithm)) for name, make in rules.items()}
    for variant in jobs.values():
        require_choice(variant)
    return jobs


def prediction_rules_probe(job: Job, rules: Mapping[str, Job]) -> Observer:
    """Return the probe of group ``prediction_rules``: scores (rule, client, ...), step (rule, client, layer)."""
    coords = {"rule": [*rules], "client": job.clients, "layer": [*nets.layers(job.net)]}
    group = store.group(
        coords | {"class": job.metrics.classes},
        **{job.score.name: ("rule client", "float32", job.score.long_name)},
        loss=("rule client", "float32", "mean test loss"),
        step=("rule client layer", "float32", "B of W + B (W' − W)"),
        **metrics.layout(job.metrics, ("rule", "client")),
    )

    def measure(job: Job, state: State) -> Values:
        columns: dict[str, list[np.ndarray]] = {name: [] for name in group.variables}
        for other in rules.values():
            variant = replace(job, algorithm=other.algorithm)
            scores = evaluate(variant, state)
            step = np.asarray(scores.get("choice/step", 1.0 if variant.algorithm.finetune else 0.0))
            step = step[:, None] if dims(variant).get("step") == ("client",) else step
            columns["step"].append(np.broadcast_to(step, (variant.clients, len(nets.layers(variant.net)))))
            for name in (job.score.name, "loss", *job.metrics.names):
                columns[name].append(scores[name])
        return {
            f"prediction_rules/{name}": job.process_group.of_all(np.stack(values, 1)).swapaxes(0, 1)
            for name, values in columns.items()
        }

    return Observer({"prediction_rules": group}, on_end=measure)


RULES = ("global", "finetuned", "local_train", "ensemble")


def rules(job: Job) -> tuple[str, ...]:
    """Return the prediction rules that apply: clients that number classes differently need their output layers."""
    return ("finetuned", "local_train") if job.own_labels else RULES


UNSEEN = "unseen_clients"


def new_clients_probe(job: Job, train: Rows, test: Rows, labels: np.ndarray | None = None) -> Observer:
    """Return the probe of group ``unseen_clients``: score (rule, client), see :func:`unseen_scores`.

    ``labels`` (client,) are the labels of the unseen clients; None for the numbers from 0.
    """
    attrs, name = {"long_name": job.score.long_name}, job.score.name
    if skipped := [rule for rule in RULES if rule not in rules(job)]:
        attrs["comment"] = f"{' and '.join(skipped)} left out: clients number their classes differently"
    coords = {"rule": [*rules(job)], "client": len(test.sizes) if labels is None else labels}
    sizes = {"n_train": ("client", train.sizes), "n_test": ("client", test.sizes)}
    group = store.group(coords, **sizes, **{name: ("rule client", "float32", attrs)})

    def measure(job: Job, state: State) -> dict[str, np.ndarray]:
        by_rule = unseen_scores(replace(job, client_labels=labels), state, train, test)
        return {f"{UNSEEN}/{name}": np.stack([by_rule[rule] for rule in rules(job)])}

    return Observer({UNSEEN: group}, on_end=measure)


def unseen_scores(job: Job, state: State, train: Rows, test: Rows) -> dict[str, np.ndarray]:
    """Return test scores (client,) of unseen clients, by prediction rule.

    Parameters
    ----------
    job, state
        A run.
    train, test : Rows
        Samples of the unseen clients.

    Returns
    -------
    dict of array (client,)
        ``global``: the global model (FedAvg, FedProx); entries that a method never shares have their initial values.
        ``finetuned``: the global model after one round of the method's local training (FedAvg+, FedProx+); if a method
        selects among fine-tunings, the last of these, in full.
        ``local_train``: shared entries downloaded and fixed, personal entries trained for one round (FedFac §3.2; also
        FedRep's head and FedEM's mixture weights). An unseen client has no mask: if masks differ between clients,
        entries that all clients share are fixed.
        ``ensemble``: mean of the class probabilities (in regression, of the predictions) of all clients' models (FedFac
        §3.2; LG-FedAvg).
        If clients number their classes differently, ``global`` and ``ensemble`` are omitted: they predict with output
        layers that no unseen client has trained.
    """
    new = replace(job, train=train, test=test, validation=None, optimizer_state="reset")
    download = Download(new, _make_state(new, state))
    clients = cohort.of_local(new, np.arange(new.clients)).local
    by_rule = {rule: np.full(len(clients), np.nan, np.float32) for rule in rules(job)}
    # Fine-tuning that trains nothing replaces the download by a model that no unseen client has.
    trains = any(phase.length(job.local_epochs) or phase.steps for phase in job.algorithm.finetune)
    trained = job.hooks.finetune if trains else job.phases
    shared = download.state.mask.shared
    phases_by_rule: dict[str, tuple[tuple[Phase, ...], Mask | None]] = {
        "global": ((), None),
        "finetuned": (trained, None),
        "local_train": (job.phases, shared),
    }

    phases_by_rule = {rule: settings for rule, settings in phases_by_rule.items() if rule in by_rule}

    def work(span: slice) -> None:
        chunk = clients[span]
        for rule, (phases, frozen) in phases_by_rule.items():
            params, algorithm_state = download.models(chunk), download.algorithm_state(chunk)
            train_chunk(new, params, chunk, phases, key=("new", state.round), frozen=frozen, state=algorithm_state)
            by_rule[rule][chunk], loss = scores(new, params, test, chunk)
            if (bad := ~np.isfinite(loss)).any():
                raise diverged(new, f"the test loss by {rule!r}", bad, chunk, state.round)

    each_chunk(new, len(clients), work)
    if "ensemble" in by_rule:
        by_rule["ensemble"] = _score_ensemble(job, state, test)
    return by_rule


def _make_state(new: Job, state: State) -> State:
    """Return a state for unseen clients: personal parameters and the algorithm's state have initial values."""

    def refuse(_: int | None) -> Params:
        raise ValueError(f"{new.algorithm.name} trains clients to make its state, so that it takes no unseen clients")

    pretraining = refuse, lambda epochs: (refuse(epochs), None), refuse
    context = InitContext(new.net, new.train.sizes, new.seed, new.device, *pretraining)
    rows = StackedRows(new.hooks.init_state(context).clients)
    algorithm_state = AlgorithmRows(rows, state.algorithm_state.server)
    shared = {name: masks.by_all(mask, state.global_params[name].ndim) for name, mask in state.mask.shared.items()}
    mask = state.mask._replace(shared=shared)
    no_rows = StackedRows()
    return State(state.round, no_rows, {}, state.global_params, mask, no_rows, algorithm_state=algorithm_state)


def _score_ensemble(job: Job, state: State, test: Rows) -> np.ndarray:
    """Return scores (client,) of the mean of the class probabilities, or predictions, of all clients' models."""
    rows, live = pad_rows(test, np.arange(len(test.start) - 1))
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
    total = job.process_group.total({"": reduce(add, (parts[start] for start in sorted(parts)))})[""]
    if job.loss.task == "classification":
        right = torch.zeros_like(live, dtype=torch.float32)
        right[live] = (total.argmax(-1) == y).float()
        return (right.sum(1) / live.sum(1)).cpu().numpy()
    square = torch.zeros(*live.shape, y.shape[-1], device=y.device)
    square[live] = (total / len(job.sizes) - y).square()
    return score_of_means(job, (square.sum(1) / live.sum(1, keepdim=True)).cpu()).numpy()
