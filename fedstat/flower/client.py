"""Flower client, which keeps its data and its personal entries."""

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
from fedstat.flower.plan import Arrays, Plan, pack, raw_sums, tensors_in, to_record, unpack
from fedstat.flower.secure import Call, secure_mod

_ONLY_CLIENT = np.array([0])
_FAILED = 1  # error code of an application


def partition_id(context: Context) -> int:
    """Return the number of a client, which is ``partition-id`` in the configuration of its SuperNode."""
    if "partition-id" not in context.node_config:
        raise ValueError("partition-id is missing. Start the SuperNode with --node-config 'partition-id=0'.")
    return int(context.node_config["partition-id"])


def client_app(
    plan: Callable[[Context], Plan],
    data: Callable[[Context], xr.Dataset],
    number: Callable[[Context], int] = partition_id,
) -> ClientApp:
    """Create the ClientApp of one client, the counterpart of :class:`fedstat.flower.Strategy`.

    The client sends:

    - shared entries times n_k / Σ n_k;
    - raw sums of its moments, for FedFac;
    - scores on its test samples;
    - the number of its training samples.

    Its samples, its personal entries and a lasting optimizer state stay in the context that Flower stores for it.

    Parameters
    ----------
    plan : callable (Context) -> Plan
        Returns the plan, which must be equal on all clients.
    data : callable (Context) -> Dataset
        Returns the client's samples, as a data set of :func:`fedstat.fl.train` with one client. Called for every
        message.
    number : callable (Context) -> int
        Returns the client's number, from 0, which names its random streams.
    """
    app = ClientApp(mods=[_report_errors(number), secure_mod(plan)])

    def client_job(context: Context) -> Job:
        return plan(context).of_client(data(context), number(context))

    @app.query()
    def begin(message: Message, context: Context) -> Message:
        plan(context).require_same(_server_settings(message))
        job, samples = client_job(context), data(context)
        start = tensors_in(message.content, "start")
        _save_client(job, context, start, job.optimizer.init({n: p[None] for n, p in start.items()}))
        differs = "y_true" in samples.coords and bool((samples["y_true"] != samples["y"]).any())
        about = {"number": number(context), "samples": int(job.train.sizes[0]), "own_labels": differs}
        return Message(RecordDict({"about": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sums = _train_and_sum(client_job(context), message.content, context)
        return Message(RecordDict({"sums": to_record(sums)}), reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        scores = evaluate(client_job(context), _client_state(message.content, context))
        record = MetricRecord({"client": number(context), **{name: float(v[0]) for name, v in scores.items()}})
        return Message(RecordDict({"scores": record}), reply_to=message)

    return app


def _report_errors(number: Callable[[Context], int]) -> Callable[[Message, Context, Call], Message]:
    """Return a mod that answers with the message of an error, without its traceback."""

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        try:
            return call_next(message, context)
        except (ValueError, FloatingPointError, OSError) as error:
            return Message(Error(_FAILED, f"client {number(context)}: {error}"), reply_to=message)

    return mod


def _server_settings(message: Message) -> dict[str, object]:
    """Return the settings of the server's plan."""
    return dict(json.loads(str(message.content.config_records["plan"]["settings"])))


def _train_and_sum(job: Job, content: RecordDict, context: Context) -> Arrays:
    """Train if the message asks for it, and return the client's moments or its shared entries."""
    ask = content.config_records["ask"]
    if "pretrain" in ask:
        start, _ = _load_client(context)
        epochs = int(ask["pretrain"])
        after = pretrain(job, start, None if epochs < 0 else epochs)
        return _moments(job, {n: start[n].expand_as(p) for n, p in after.items()}, after)
    if "down" in content.array_records:
        download = Download(job, _client_state(content, context))
        trained = train_locally(job, download, _ONLY_CLIENT, job.phases)
        trained.require_finite(job.train.ids, download.state.round + 1)
        if ask["moments"]:
            sums = _moments(job, download.models(_ONLY_CLIENT), trained.params)
        _save_client(job, context, {n: p[0] for n, p in trained.params.items()}, trained.optimizer)
        if ask["moments"]:
            return sums
    entries = pack(_load_client(context)[0], tensors_in(content, "up"))
    return {name: (float(ask["weight"]) * p.double()).float().numpy() for name, p in entries.items()}


def _moments(job: Job, before: Params, after: Params) -> Arrays:
    """Return the raw sums of the moments that the method computes from parameters before and after training."""
    return raw_sums(job.hooks.moments(lambda: before, after))


def _client_state(content: RecordDict, context: Context) -> State:
    """Return the state of the run as far as the client knows it: its download and its parameters."""
    params, optimizer = _load_client(context)
    mask: Mask = tensors_in(content, "mask")
    server = unpack(tensors_in(content, "down"), mask, params)
    server = {name: server.get(name, torch.zeros_like(p)) for name, p in params.items()}
    number = int(content.config_records["ask"]["round"])
    rows = StackedRows({name: p[None] for name, p in params.items()})
    return State(number, rows, dict.fromkeys(params), server, SharedMask(mask), StackedRows(optimizer))


def _save_client(job: Job, context: Context, params: Params, optimizer: Params) -> None:
    """Save the client's parameters and, if it lasts, its optimizer state in the context."""
    context.state["own"] = to_record(params)
    context.state["optimizer"] = to_record(optimizer if job.optimizer_state == "keep" else {})


def _load_client(context: Context) -> tuple[Params, Params]:
    """Return the client's parameters (all entries) and its optimizer state (1, ...)."""
    if "own" not in context.state.array_records:
        raise ValueError("the client has no parameters, as it was not there when the run began. Start the run again.")
    return tensors_in(context.state, "own"), tensors_in(context.state, "optimizer")
