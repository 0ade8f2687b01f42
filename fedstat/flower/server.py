"""The server: it adds what parties send, and decides the mask from sums."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedstat import store
from fedstat._utils import streams
from fedstat.fl import checks, masks, nets, record
from fedstat.fl.algorithm import AlgorithmState, InitContext, RoundContext, SharedMask
from fedstat.fl.client_rows import StackedRows
from fedstat.fl.cohort import of_round
from fedstat.fl.communication_round import update_global
from fedstat.fl.hooks import Hooks
from fedstat.fl.loop import Buffer
from fedstat.fl.nets import Params
from fedstat.fl.probes import metrics
from fedstat.fl.state import State
from fedstat.flower import secure
from fedstat.flower.plan import Arrays, Plan, arrays_in, moments_of, packed, raw_sums, unpacked
from fedstat.flower.plan import record as to_record
from fedstat.flower.secure import Answering, Unseen, moments_alone, refusal, require_unsolvable
from fedstat.stats.moments import Moments

COMMAND = "fedstat.flower"


class Strategy(FlowerStrategy):
    """A run between separate parties, equal to :func:`fedstat.fl.train` of all of them to float32 rounding.

    A round: the parties that take part download what is shared and train; where the method decides the mask anew,
    they answer with moments, and the server sends the new mask; they answer with the entries that it shares. Of a
    personal entry the server never has more than the start that is common to all.

    Moments take (units² + 3 units)/2 + 1 float64 numbers a layer. They are sent even where a layer's weights would be
    fewer: sums of weights do not determine sums of products, and one party's weights are what must not be sent.

    Parameters
    ----------
    plan : Plan
    patience : float
        Seconds to wait for all parties to connect.

    Attributes
    ----------
    rounds : list of State
        The server's state after each round; it holds no party's own copy.
    scores : list of dict from name to array (client,)
        Test scores of every party's model after each round.
    """

    def __init__(self, plan: Plan, *, patience: float = 60.0) -> None:
        self.plan, self.patience = plan, patience
        self.rounds: list[State] = []
        self.scores: list[dict[str, np.ndarray]] = []
        self._nodes: list[int] = []
        self._last: Arrays = {}

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
            The common start, by the network's names; by default that of :func:`fedstat.fl.train` with the plan's seed.
        num_rounds : int
        timeout : float
            Seconds to wait for answers.
        **more
            As of Flower's ``Strategy.start``.

        Raises
        ------
        RuntimeError
            If a party fails or is late, or not as many connect as the plan says.
        ValueError
            If parties have equal numbers, or the method asks for what a server of separate parties does not see.
        """
        sums = secure.SecureGrid(grid) if self.plan.secure else Answering(grid)
        self._timeout = timeout
        arrays = self.initial_arrays() if initial_arrays is None else initial_arrays
        self._begin(sums, {name: torch.from_numpy(a.numpy().copy()) for name, a in arrays.items()})
        return super().start(sums, arrays, num_rounds, timeout, **more)

    def initial_arrays(self) -> ArrayRecord:
        """The common start of :func:`fedstat.fl.train` with the plan's seed."""
        net = Hooks(self.plan.algorithm, self.plan.net, self.plan.clients).wrap()
        return to_record(net.init(streams.generator(self.plan.training.seed, "start")))

    def summary(self) -> None:
        """Nothing: the plan says what is run."""

    # --- before the first round

    def _begin(self, grid: Grid, server: Params) -> None:
        nodes = self._connected(grid)
        content = {"start": to_record(server), "plan": ConfigRecord({"settings": json.dumps(self.plan.settings)})}
        asked = [Message(RecordDict(dict(content)), n, MessageType.QUERY) for n in nodes]
        about = {
            m.metadata.src_node_id: m.content["about"] for m in grid.send_and_receive(asked, timeout=self._timeout)
        }
        numbers = {node: int(one["number"]) for node, one in about.items()}
        if sorted(numbers.values()) != list(range(self.plan.clients)):
            raise ValueError(
                f"parties must have the numbers 0 to {self.plan.clients - 1}, each once, but have "
                f"{sorted(numbers.values())}. See partition-id in the configuration of each SuperNode."
            )
        self._nodes = sorted(numbers, key=numbers.__getitem__)
        sizes = np.array([int(about[node]["samples"]) for node in self._nodes])
        self._job = self.plan.of_server(sizes, own_labels=any(one["own_labels"] for one in about.values()))
        job, method = self._job, self.plan.algorithm.name
        checks.every_entry(server, {n: torch.empty(shape) for n, shape in job.net.shapes.items()}, "initial_arrays")
        self._state = State(
            0, StackedRows(), {}, server, SharedMask(masks.share_none(job.net, job.device)), StackedRows()
        )
        one = {name: p[None] for name, p in server.items()}
        zeros = {name: torch.zeros_like(p) for name, p in one.items()}
        self._last = raw_sums(moments_alone(job.hooks.moments(lambda: zeros, one), method))

        def moments(epochs: int | None) -> Mapping[str, Any]:
            asked = [_ask(pretrain=-1 if epochs is None else epochs) for _ in self._nodes]
            return self._moments(grid, np.arange(job.clients), asked)

        unseen = refusal(method)
        start = InitContext(job.net, sizes, job.seed, job.device, unseen, unseen, moments)
        self._state = self._state._replace(mask=job.hooks.init_mask(start))

    def _connected(self, grid: Grid) -> list[int]:
        """Nodes of all parties."""
        end = time.monotonic() + self.patience
        while len(nodes := list(grid.get_node_ids())) < self.plan.clients and time.monotonic() < end:
            time.sleep(0.1)
        if len(nodes) != self.plan.clients:
            raise RuntimeError(
                f"the plan is of {self.plan.clients} parties, but {len(nodes)} have connected within "
                f"{self.patience:g} s. Start one SuperNode per party (in simulations: num-supernodes)."
            )
        return nodes

    # --- a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Decide the new mask, and ask for the entries that it shares."""
        job, state = self._job, self._state
        clients = of_round(job, state.round).local
        weights = self._weights(clients)
        down = [self._download(int(c)) for c in clients]

        found: list[dict[str, Moments]] = []

        def moments() -> Mapping[str, Any]:
            if not found:
                found.append(self._moments(grid, clients, [_ask(state.round, moments=True) | one for one in down]))
            return found[0]

        self._mask = job.hooks.update_mask(self._context(clients, weights, moments), job.net.shapes)
        if found:  # the parties have trained
            down = [{} for _ in clients]
            if not self.plan.secure:
                require_unsolvable(job, self._mask, found[0])
        self._up = {name: masks.by_some(m, len(job.net.shapes[name])) for name, m in self._mask.shared.items()}
        named = [name for name, mask in self._up.items() if bool(mask.any())]
        self._rest = max(0.0, 1 - float(weights.sum()))
        ranges = secure.entry_ranges(state.global_params, named, float(weights.max()), self.plan.headroom)
        contents = [
            _ask(state.round, weight=w) | content | {"up": to_record(self._up)}
            for w, content in zip(weights.tolist(), down, strict=True)
        ]
        return self._messages(clients, contents, ranges)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, None]:
        """The server's copy after the round, from sums of n_k / Σ n_k times shared entries."""
        state = self._state
        sums = {name: torch.from_numpy(a) for name, a in _total(replies).items()}
        means = unpacked(sums, self._up, {name: p.double() for name, p in state.global_params.items()})
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
        """Ask every party for the scores of its model."""
        contents = [_ask(self._state.round) | self._download(c) for c in range(self.plan.clients)]
        return self._messages(np.arange(self.plan.clients), contents, {}, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Scores by client."""
        found = sorted((dict(reply.content["scores"]) for reply in replies), key=lambda one: one["client"])
        by_name = {name: [one[name] for one in found] for name in found[0] if name != "client"}
        self.scores.append({name: np.array(values, np.float32) for name, values in by_name.items()})
        return MetricRecord(by_name)

    def _weights(self, clients: np.ndarray) -> torch.Tensor:
        """Weights (active,) of the mean, in float64."""
        sizes = self._job.train.sizes[clients]
        found = self._job.hooks.weights(clients, lambda: (sizes, clients, self._job.clients))
        return torch.from_numpy(sizes / sizes.sum()) if found is None else found.double()

    def _context(
        self, clients: np.ndarray, weights: torch.Tensor, moments: Callable[[], Mapping[str, Any]]
    ) -> RoundContext:
        """Return what a method's functions learn: of single parties nothing."""
        job, state, unseen = self._job, self._state, refusal(self._job.algorithm.name)
        parts: dict[str, Callable[[], Any]] = {
            "clients": lambda: clients,
            "weights": weights.float,
            "before": unseen,
            "after": lambda: Unseen(unseen),
            "state": AlgorithmState,
            "evaluate": lambda: unseen,
            "moments": moments,
        }
        fixed = job.net, state.round, job.seed, state.mask, state.global_params, job.server_lr
        return RoundContext(*fixed, parts)

    def _moments(self, grid: Grid, clients: np.ndarray, contents: list[dict[str, Any]]) -> dict[str, Moments]:
        """Moments over some clients."""
        ranges = secure.moment_ranges(self._last, self.plan.headroom)
        messages = self._messages(clients, contents, ranges)
        total = _total(grid.send_and_receive(messages, timeout=self._timeout))
        self._last = {name: a / len(clients) for name, a in total.items()}
        return moments_of(total)

    def _download(self, client: int) -> dict[str, Any]:
        """What a client downloads: the entries that are shared for it, and the mask that says which."""
        state, who = self._state, np.array([client])
        mask = {}
        for name, p in state.global_params.items():
            own = masks.of_clients(state.mask.shared[name], p.ndim, who)
            mask[name] = own[0] if own.ndim > p.ndim else own
        return {"down": to_record(packed(state.global_params, mask)), "mask": to_record(mask)}

    def _messages(
        self,
        clients: np.ndarray,
        contents: Iterable[Mapping[str, Any]],
        ranges: Mapping[str, float],
        kind: str = MessageType.TRAIN,
    ) -> list[Message]:
        with_ranges = {secure.RANGES: ConfigRecord(dict(ranges))} if self.plan.secure else {}
        group = str(self._state.round + 1)
        pairs = zip(clients, contents, strict=True)
        return [
            Message(RecordDict({**content, **with_ranges}), self._nodes[int(c)], kind, group_id=group)
            for c, content in pairs
        ]

    # --- afterwards

    def save(self, path: str | Path, title: str = "") -> None:
        """Write scores and splits of all rounds as a store, with the names of :func:`fedstat.fl.train`'s.

        Raises
        ------
        FileExistsError
            If something is there already.
        """
        job, rounds = self._job, len(self.rounds)
        layers = nets.layers(job.net)
        also = {name: name.replace("_", " ") for name in self.scores[0] if name not in ("accuracy", "loss")}
        groups = record.layout({}, rounds, self.plan.clients, layers, also)
        config = self.plan.settings | {"rounds": rounds}
        named = title or f"{job.algorithm.name} between {self.plan.clients} parties, {rounds} rounds"
        attrs = store.provenance(named, config, command=COMMAND, own=(job.algorithm,))
        with store.create(path, groups, attrs) as writer:
            buffer = Buffer(writer)
            for state, scores in zip(self.rounds, self.scores, strict=True):
                values = {f"metrics/{name}": value for name, value in scores.items()}
                buffer.add(state.round, values | metrics.of_sharing(job.net, state.mask, list(layers)))
            buffer.flush()
            writer.finish()


def server_app(
    plan: Callable[[Context], Plan], rounds: Callable[[Context], int], out: Callable[[Context], str]
) -> ServerApp:
    """ServerApp that runs the plan and writes its store; each argument is read from Flower's context.

    Parameters
    ----------
    plan : callable (Context) -> Plan
    rounds : callable (Context) -> int
    out : callable (Context) -> path
        Store to write, see :meth:`Strategy.save`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Strategy(plan(context))
        strategy.start(grid, num_rounds=rounds(context))
        strategy.save(out(context))

    return app


def _ask(number: int = -1, **more: Any) -> dict[str, Any]:
    """The record that says what a party is to do; ``moments`` and ``weight`` if not given: False and 1."""
    return {"ask": ConfigRecord({"round": number, "moments": False, "weight": 1.0, **more})}


def _total(replies: Iterable[Message]) -> Arrays:
    """Sum of what parties sent, in float64, in the order of their nodes' messages."""
    total: Arrays = {}
    for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
        for name, a in arrays_in(reply.content, "sums").items():
            total[name] = total.get(name, 0) + a.astype(np.float64)
    return total
