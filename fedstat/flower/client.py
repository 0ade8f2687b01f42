"""A party: its data and its personal entries stay here."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
import xarray as xr
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedstat.fl.algorithm import Mask, SharedMask
from fedstat.fl.client_rows import StackedRows
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_locally
from fedstat.fl.loop import pretrain
from fedstat.fl.nets import Params
from fedstat.fl.state import Download, State
from fedstat.flower.plan import Arrays, Plan, packed, raw_sums, record, tensors_in, unpacked
from fedstat.flower.secure import Call, secured

_ME = np.array([0])
_FAILED = 1  # an error code of an application


def partition_id(context: Context) -> int:
    """A party's number among the clients, from its node's configuration ``partition-id``."""
    if "partition-id" not in context.node_config:
        raise ValueError("a party needs its number: start its SuperNode with --node-config 'partition-id=0'")
    return int(context.node_config["partition-id"])


def client_app(
    plan: Callable[[Context], Plan],
    data: Callable[[Context], xr.Dataset],
    number: Callable[[Context], int] = partition_id,
) -> ClientApp:
    """ClientApp of one party; :class:`fedstat.flower.Strategy` is its counterpart.

    What leaves the party: entries that are shared, times n_k / Σ n_k; for FedFac the raw sums of its moments; scores on
    its test samples; the number of its training samples. What stays, in the context that Flower keeps for it: samples,
    personal entries, and the optimiser's state, if it lasts.

    Parameters
    ----------
    plan : callable (Context) -> Plan
        What all parties agreed on, as this party has it.
    data : callable (Context) -> Dataset
        The party's own samples, as those of one client of :func:`fedstat.fl.train`. Called with every message.
    number : callable (Context) -> int
        Its number among the clients, from 0, which names its random streams.
    """
    app = ClientApp(mods=[_in_one_line(number), secured(plan)])

    def job(context: Context) -> Job:
        return plan(context).of_client(data(context), number(context))

    @app.query()
    def begin(message: Message, context: Context) -> Message:
        own = plan(context)
        own.require_same(_settings(message))
        mine, found = job(context), data(context)
        start = tensors_in(message.content, "start")
        _keep(mine, context, start, mine.optimizer.init({n: p[None] for n, p in start.items()}))
        differs = "y_true" in found.coords and bool((found["y_true"] != found["y"]).any())
        about = {"number": number(context), "samples": int(mine.train.sizes[0]), "own_labels": differs}
        return Message(RecordDict({"about": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"sums": record(_sums(job(context), message.content, context))}), reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        mine = job(context)
        found = evaluate(mine, _state(message.content, context))
        scores = MetricRecord({"client": number(context), **{name: float(v[0]) for name, v in found.items()}})
        return Message(RecordDict({"scores": scores}), reply_to=message)

    return app


def _in_one_line(number: Callable[[Context], int]) -> Callable[[Message, Context, Call], Message]:
    """Mod that answers what a party refuses, or cannot do, by one line without a trace."""

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        try:
            return call_next(message, context)
        except (ValueError, FloatingPointError, OSError) as error:
            return Message(Error(_FAILED, f"party {number(context)}: {error}"), reply_to=message)

    return mod


def _settings(message: Message) -> dict[str, object]:
    """The server's settings."""
    return dict(json.loads(str(message.content.config_records["plan"]["settings"])))


def _sums(job: Job, content: RecordDict, context: Context) -> Arrays:
    """What the party adds to the server's sums: moments, or shared entries; before that it trains, if asked to."""
    ask = content.config_records["ask"]
    if "pretrain" in ask:
        start, _ = _kept(context)
        epochs = int(ask["pretrain"])
        after = pretrain(job, start, None if epochs < 0 else epochs)
        return _moments(job, {n: start[n].expand_as(p) for n, p in after.items()}, after)
    if "down" in content.array_records:
        download = Download(job, _state(content, context))
        trained = train_locally(job, download, _ME, job.phases)
        trained.require_finite(job.train.ids, download.state.round + 1)
        if ask["moments"]:
            found = _moments(job, download.models(_ME), trained.params)
        _keep(job, context, {n: p[0] for n, p in trained.params.items()}, trained.optimizer)
        if ask["moments"]:
            return found
    entries = packed(_kept(context)[0], tensors_in(content, "up"))
    return {name: (float(ask["weight"]) * p.double()).float().numpy() for name, p in entries.items()}


def _moments(job: Job, before: Params, after: Params) -> Arrays:
    return raw_sums(job.hooks.moments(lambda: before, after))


def _state(content: RecordDict, context: Context) -> State:
    """The run as this party knows it: what it has downloaded, and its own copy."""
    own, optimizer = _kept(context)
    mask: Mask = tensors_in(content, "mask")
    server = unpacked(tensors_in(content, "down"), mask, own)
    server = {name: server.get(name, torch.zeros_like(p)) for name, p in own.items()}
    number = int(content.config_records["ask"]["round"])
    copies = {name: p[None] for name, p in own.items()}
    return State(number, StackedRows(copies), dict.fromkeys(own), server, SharedMask(mask), StackedRows(optimizer))


def _keep(job: Job, context: Context, own: Params, optimizer: Params) -> None:
    context.state["own"] = record(own)
    context.state["optimizer"] = record(optimizer if job.optimizer_state == "keep" else {})


def _kept(context: Context) -> tuple[Params, Params]:
    """The party's own copy of every entry, and its optimiser's state (1, ...)."""
    if "own" not in context.state.array_records:
        raise ValueError("this party was asked to train before a run began with it. Start the run again.")
    return tensors_in(context.state, "own"), tensors_in(context.state, "optimizer")
