"""Flower apps: clients, which keep their data and personal entries, and the server, which adds sums of clients.

The server updates the shared mask from these sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedstat import store
from fedstat._utils import streams
from fedstat.fl import checks, masks, naming, nets, record
from fedstat.fl.algorithm import AlgorithmState, InitContext, Mask, RoundContext, SharedMask
from fedstat.fl.client_rows import StackedRows
from fedstat.fl.cohort import of_round
from fedstat.fl.communication_round import update_global
from fedstat.fl.evaluate import evaluate
from fedstat.fl.hooks import Hooks
from fedstat.fl.job import Job
from fedstat.fl.ledger import Buffer
from fedstat.fl.local_training import train_locally
from fedstat.fl.loop import pretrain
from fedstat.fl.losses import score_among
from fedstat.fl.nets import Params
from fedstat.fl.probes import measures
from fedstat.fl.state import Download, State
from fedstat.flower import secure
from fedstat.flower.plan import Arrays, Plan, arrays_in, moments_of, pack, raw_sums, tensors_in, to_record, unpack
from fedstat.flower.secure import (
    Call,
    HiddenParams,
    StrictGrid,
    make_refusal,
    require_moments,
    require_unsolvable,
    secure_mod,
)
from fedstat.stats.moments import Moments

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
    - the number of its training samples, and the label of ``client`` in its data, if it is not 0.

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
        if (label := naming.client_labels(samples)) is not None:
            about["label"] = label.tolist()[0]
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
        trained.require_finite(job, _ONLY_CLIENT, download.state.round + 1)
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
    context.state["client_params"] = to_record(params)
    context.state["optimizer"] = to_record(optimizer if job.optimizer_state == "keep" else {})


def _load_client(context: Context) -> tuple[Params, Params]:
    """Return the client's parameters (all entries) and its optimizer state (1, ...)."""
    if "client_params" not in context.state.array_records:
        raise ValueError("the client has no parameters, as it was not there when the run began. Start the run again.")
    return tensors_in(context.state, "client_params"), tensors_in(context.state, "optimizer")


COMMAND = "fedstat.flower"


class Strategy(FlowerStrategy):
    """Strategy of a run on separate clients; equals :func:`fedstat.fl.train` up to float32 rounding.

    A round has these steps:

    1. The selected clients download the shared entries and train.
    2. If the method updates the shared mask, clients upload moments, and the server sends the new mask.
    3. Clients upload the entries that the mask shares.

    The server has no personal entries beyond their initial values, which all clients have in common.

    Moments take (units² + 3 units)/2 + 1 float64 numbers per layer. They are uploaded even if the layer has fewer
    weights, because sums of weights do not determine sums of products, and the weights of single clients stay secret.

    Parameters
    ----------
    plan : Plan
    patience : float
        Seconds to wait for all clients to connect.

    Attributes
    ----------
    rounds : list of State
        State of the server after each round, without parameters of single clients.
    scores : list of dict from name to array (client,)
        Test scores of the client models after each round.
    """

    def __init__(self, plan: Plan, *, patience: float = 60.0) -> None:
        self.plan, self.patience = plan, patience
        self.rounds: list[State] = []
        self.scores: list[dict[str, np.ndarray]] = []
        self._nodes: list[int] = []
        self._labels: np.ndarray | None = None
        self._last_sums: Arrays = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        **more: Any,
    ) -> Result:
        """Run all rounds.

        Parameters
        ----------
        grid : Grid
        initial_arrays : ArrayRecord, optional
            Initial parameters, by the network's names; by default those of :func:`fedstat.fl.train` with the plan's
            seed.
        num_rounds : int
            Number of rounds.
        timeout : float
            Seconds to wait for answers.
        **more
            Arguments of Flower's ``Strategy.start``.

        Raises
        ------
        RuntimeError
            If a client fails or answers too late, or the number of connected clients is not that of the plan.
        ValueError
            If two clients have one number, or the method reads values of single clients.
        """
        grid = secure.SecureGrid(grid) if self.plan.secure else StrictGrid(grid)
        self._timeout = timeout
        arrays = self.initial_arrays() if initial_arrays is None else initial_arrays
        self._begin(grid, {name: torch.from_numpy(a.numpy().copy()) for name, a in arrays.items()})
        return super().start(grid, arrays, num_rounds, timeout, **more)

    def initial_arrays(self) -> ArrayRecord:
        """Return the initial parameters of :func:`fedstat.fl.train` with the plan's seed."""
        net = Hooks(self.plan.algorithm, self.plan.net, self.plan.clients).wrap()
        return to_record(net.init(streams.generator(self.plan.training.seed, "start")))

    def summary(self) -> None:
        """Print nothing; the plan holds the settings."""

    # --- before the first round

    def _begin(self, grid: Grid, server: Params) -> None:
        """Send plan and initial parameters to all clients, and compute the first shared mask."""
        nodes = self._wait_for_nodes(grid)
        content = {"start": to_record(server), "plan": ConfigRecord({"settings": json.dumps(self.plan.settings)})}
        queries = [Message(RecordDict(dict(content)), n, MessageType.QUERY) for n in nodes]
        about = {
            m.metadata.src_node_id: m.content["about"] for m in grid.send_and_receive(queries, timeout=self._timeout)
        }
        numbers = {node: int(client["number"]) for node, client in about.items()}
        if sorted(numbers.values()) != list(range(self.plan.clients)):
            raise ValueError(
                f"clients must have the numbers 0 to {self.plan.clients - 1}, each once, but have "
                f"{sorted(numbers.values())}. Correct partition-id in the configuration of each SuperNode."
            )
        self._nodes = sorted(numbers, key=numbers.__getitem__)
        labels = [about[node].get("label", numbers[node]) for node in self._nodes]
        self._labels = naming.distinct(np.array(labels, dtype=object))
        sizes = np.array([int(about[node]["samples"]) for node in self._nodes])
        self._job = self.plan.of_server(sizes, own_labels=any(client["own_labels"] for client in about.values()))
        job, method = self._job, self.plan.algorithm.name
        checks.every_entry(server, {n: torch.empty(shape) for n, shape in job.net.shapes.items()}, "initial_arrays")
        self._state = State(
            0, StackedRows(), {}, server, SharedMask(masks.share_none(job.net, job.device)), StackedRows()
        )
        initial = {name: p[None] for name, p in server.items()}
        zeros = {name: torch.zeros_like(p) for name, p in initial.items()}
        self._last_sums = raw_sums(require_moments(job.hooks.moments(lambda: zeros, initial), method))

        def moments(epochs: int | None) -> Mapping[str, Any]:
            tasks = [_task(pretrain=-1 if epochs is None else epochs) for _ in self._nodes]
            return self._moments(grid, np.arange(job.clients), tasks)

        refuse = make_refusal(method)
        start = InitContext(job.net, sizes, job.seed, job.device, refuse, refuse, moments)
        self._state = self._state._replace(mask=job.hooks.init_mask(start))

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """Wait until all clients are connected, and return their nodes."""
        end = time.monotonic() + self.patience
        while len(nodes := list(grid.get_node_ids())) < self.plan.clients and time.monotonic() < end:
            time.sleep(0.1)
        if len(nodes) != self.plan.clients:
            raise RuntimeError(
                f"the plan needs {self.plan.clients} clients, but {len(nodes)} connected within {self.patience:g} s. "
                "Start one SuperNode per client (in simulations, set num-supernodes)."
            )
        return nodes

    # --- a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Update the shared mask, and ask for the entries that it shares."""
        job, state = self._job, self._state
        clients = of_round(job, state.round).local
        weights = self._weights(clients)
        down = [self._download(int(c)) for c in clients]

        computed: list[dict[str, Moments]] = []

        def moments() -> Mapping[str, Any]:
            if not computed:
                tasks = [_task(state.round, moments=True) | content for content in down]
                computed.append(self._moments(grid, clients, tasks))
            return computed[0]

        self._mask = job.hooks.update_mask(self._context(clients, weights, moments), job.net.shapes)
        if computed:  # clients have trained
            down = [{} for _ in clients]
            if not self.plan.secure:
                require_unsolvable(job, self._mask, computed[0])
        self._upload = {name: masks.by_some(m, len(job.net.shapes[name])) for name, m in self._mask.shared.items()}
        names = [name for name, mask in self._upload.items() if bool(mask.any())]
        self._rest = max(0.0, 1 - float(weights.sum()))
        ranges = secure.entry_ranges(state.global_params, names, float(weights.max()), self.plan.headroom)
        contents = [
            _task(state.round, weight=w) | content | {"up": to_record(self._upload)}
            for w, content in zip(weights.tolist(), down, strict=True)
        ]
        return self._messages(clients, contents, ranges)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, None]:
        """Update the global model from sums of n_k / Σ n_k times shared entries, and return it."""
        state = self._state
        sums = {name: torch.from_numpy(a) for name, a in _total(replies).items()}
        means = unpack(sums, self._upload, {name: p.double() for name, p in state.global_params.items()})
        if self._rest > 1e-6:
            means = {name: p + self._rest * state.global_params[name] for name, p in means.items()}
        means = {name: p.to(state.global_params[name].dtype) for name, p in means.items()}
        server = update_global(state.global_params, means, state.mask, self._mask, self._job.server_lr)
        self._state = State(state.round + 1, StackedRows(), {}, server, self._mask, StackedRows())
        self.rounds.append(self._state)
        return to_record(server), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client for the scores of its model."""
        contents = [_task(self._state.round) | self._download(c) for c in range(self.plan.clients)]
        return self._messages(np.arange(self.plan.clients), contents, {}, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Return the scores by client."""
        scores = sorted((dict(reply.content["scores"]) for reply in replies), key=lambda client: client["client"])
        by_name = {name: [client[name] for client in scores] for name in scores[0] if name != "client"}
        self.scores.append({name: np.array(values, np.float32) for name, values in by_name.items()})
        return MetricRecord(by_name)

    def _weights(self, clients: np.ndarray) -> torch.Tensor:
        """Return the weights (selected,) of the mean over clients, in float64."""
        sizes = self._job.train.sizes[clients]
        weights = self._job.hooks.weights(clients, lambda: (sizes, clients, self._job.clients))
        return torch.from_numpy(sizes / sizes.sum()) if weights is None else weights.double()

    def _context(
        self, clients: np.ndarray, weights: torch.Tensor, moments: Callable[[], Mapping[str, Any]]
    ) -> RoundContext:
        """Build the round context from sums over clients only."""
        job, state, refuse = self._job, self._state, make_refusal(self._job.algorithm.name)
        parts: dict[str, Callable[[], Any]] = {
            "clients": lambda: clients,
            "weights": weights.float,
            "before": refuse,
            "after": lambda: HiddenParams(refuse),
            "state": AlgorithmState,
            "evaluate": lambda: refuse,
            "moments": moments,
        }
        fixed = job.net, state.round, job.seed, state.mask, state.global_params, job.server_lr
        return RoundContext(*fixed, parts)

    def _moments(self, grid: Grid, clients: np.ndarray, contents: list[dict[str, Any]]) -> dict[str, Moments]:
        """Ask clients for moments, and return the moments over all of them."""
        ranges = secure.moment_ranges(self._last_sums, self.plan.headroom)
        messages = self._messages(clients, contents, ranges)
        total = _total(grid.send_and_receive(messages, timeout=self._timeout))
        self._last_sums = {name: a / len(clients) for name, a in total.items()}
        return moments_of(total)

    def _download(self, client: int) -> dict[str, Any]:
        """Return the download of a client: its shared mask and the shared entries."""
        state, client_ids = self._state, np.array([client])
        mask = {}
        for name, p in state.global_params.items():
            rows = masks.of_clients(state.mask.shared[name], p.ndim, client_ids)
            mask[name] = rows[0] if rows.ndim > p.ndim else rows
        return {"down": to_record(pack(state.global_params, mask)), "mask": to_record(mask)}

    def _messages(
        self,
        clients: np.ndarray,
        contents: Iterable[Mapping[str, Any]],
        ranges: Mapping[str, float],
        kind: str = MessageType.TRAIN,
    ) -> list[Message]:
        """Return one message per client, with the ranges of its answer if sums are secure."""
        with_ranges = {secure.RANGES: ConfigRecord(dict(ranges))} if self.plan.secure else {}
        group = str(self._state.round + 1)
        pairs = zip(clients, contents, strict=True)
        return [
            Message(RecordDict({**content, **with_ranges}), self._nodes[int(c)], kind, group_id=group)
            for c, content in pairs
        ]

    # --- after the last round

    def save(self, path: str | Path, title: str = "") -> None:
        """Write scores and splits of all rounds to a store, under the names of :func:`fedstat.fl.train`.

        Raises
        ------
        FileExistsError
            If the path exists.
        """
        job, rounds = self._job, len(self.rounds)
        layers = nets.layers(job.net)
        score = score_among(self.scores[0])
        metric_names = {name: name.replace("_", " ") for name in self.scores[0] if name not in (score.name, "loss")}
        groups = record.layout({}, rounds, self.plan.clients, layers, metric_names, score=score)
        groups = {name: naming.named(group, self._labels) for name, group in groups.items()}
        config = self.plan.settings | {"rounds": rounds}
        title = title or f"{job.algorithm.name} on {self.plan.clients} separate clients, {rounds} rounds"
        attrs = store.provenance(title, config, command=COMMAND, user_code=(job.algorithm,))
        with store.create(path, groups, attrs) as writer:
            buffer = Buffer(writer)
            for state, scores in zip(self.rounds, self.scores, strict=True):
                values = {f"metrics/{name}": value for name, value in scores.items()}
                buffer.add(state.round, values | measures.of_sharing(job.net, state.mask, list(layers)))
            buffer.flush()
            writer.finish()


def server_app(
    plan: Callable[[Context], Plan], rounds: Callable[[Context], int], out: Callable[[Context], str]
) -> ServerApp:
    """Create a ServerApp that runs a plan and writes its store.

    Parameters
    ----------
    plan : callable (Context) -> Plan
        Returns the plan.
    rounds : callable (Context) -> int
        Returns the number of rounds.
    out : callable (Context) -> path
        Returns the path of the store, see :meth:`Strategy.save`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Strategy(plan(context))
        strategy.start(grid, num_rounds=rounds(context))
        strategy.save(out(context))

    return app


def _task(number: int = -1, **more: Any) -> dict[str, Any]:
    """Return the record with a client's task: by default no ``moments``, and ``weight`` 1."""
    return {"ask": ConfigRecord({"round": number, "moments": False, "weight": 1.0, **more})}


def _total(replies: Iterable[Message]) -> Arrays:
    """Return the sum of the clients' arrays in float64, added in the order of their nodes."""
    total: Arrays = {}
    for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
        for name, a in arrays_in(reply.content, "sums").items():
            total[name] = total.get(name, 0) + a.astype(np.float64)
    return total
