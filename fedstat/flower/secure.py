"""Secure sums, which show the server no values of single clients, and checks of methods that need such values.

The protocol is Flower's (``SecAggPlusWorkflow`` and ``secaggplus_mod``; Bell et al. 2020, ACM CCS, 1253-1269). It masks
integers modulo 2³². In Flower 1.41 it belongs to the legacy strategies, which average all parameters weighted by
numbers of samples. The grid and the mod of this module carry sums of arbitrary arrays through it, between the messages
of today's strategies.

The server names a range R for every array. A client divides each value by R and rounds it at random to one of the two
nearest multiples of 2/T. T = 2^j is the largest such number with K T < 2³² and T <= 2³⁰. The error of a sum over K
clients is then below K · 2R/T, see :func:`error_bound`. A value out of range ends the run. The ranges are:

- for weights, ``headroom`` times the largest weight of the global model, at least 1, rounded up to a power of two; all
  this times the largest n_k / Σ n_k;
- for moments, ``headroom²`` times the mean over clients of the last sums, rounded up to a power of two. The first
  ranges follow from the moments of the initial parameters.

The protocol protects against a server that follows it. Flower derives every mask from a seed of 32 bits, which a
determined server could search. If two clients take part, each can compute the other's values from the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid

from fedstat.fl import masks
from fedstat.fl.algorithm import SharedMask
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.flower.plan import Arrays, Plan, arrays_in, to_record
from fedstat.stats.moments import Moments


class StrictGrid(Grid):
    """Grid that raises an error if a client fails or answers too late.

    Parameters
    ----------
    grid : Grid
        Grid that carries the messages.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def run(self) -> Any:
        """Run that messages belong to."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that have arrived to messages with these ids."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all answers.

        Raises
        ------
        RuntimeError
            If a client fails, with its message, or does not answer in time.
        """
        messages = list(messages)
        answers = list(self._grid.send_and_receive(messages, timeout=timeout)) if messages else []
        for answer in answers:
            if answer.has_error():
                raise RuntimeError(_reason(answer))
        nodes, answering = [m.metadata.dst_node_id for m in messages], {a.metadata.src_node_id for a in answers}
        if silent := [node for node in nodes if node not in answering]:
            raise RuntimeError(
                f"{len(silent)} of {len(nodes)} clients gave no answer within {timeout:g} s, first node {silent[0]}. "
                "See its log, or raise timeout."
            )
        return answers


def _reason(answer: Message) -> str:
    """Return in one line why a client failed."""
    lines = [line.strip() for line in (answer.error.reason or "").splitlines() if line.strip(" '>")]
    last = lines[-1].removeprefix("Exception ClientAppException occurred. Message: ") if lines else "no reason given"
    return last if last.startswith("client ") else f"node {answer.metadata.src_node_id} failed: {last}"


def require_moments(sums: Mapping[str, Any], method: str) -> dict[str, Moments]:
    """Return the sums of a method by layer; raise ValueError unless they are moments."""
    for layer, moments in sums.items():
        if not isinstance(moments, Moments):
            raise ValueError(
                f"method {method!r}: on separate clients, moments must return fedstat.stats.moments.Moments, but "
                f"returned {type(moments).__name__} for layer {layer!r}."
            )
    return dict(sums)


def require_unsolvable(job: Job, mask: SharedMask, moments: Mapping[str, Moments]) -> None:
    """Raise ValueError if open moments and shared entries of one client determine its personal weights.

    The server knows the products of a personal unit's n weights with the weights of all shared units and with a vector
    of ones. If these are at least n vectors, the products are a linear system with a single solution.
    """
    for layer in moments:
        flags = masks.shared_units(job.net, mask.shared, layer)
        n_shared, n = int(flags.sum()), sum(_count_inputs(job, name) for name in masks.incoming(job.net, layer))
        if n_shared + 1 >= n and not bool(flags.all()):
            raise ValueError(
                f"layer {layer!r}: from a client's moments and its {n_shared} shared units, a server could compute its "
                f"personal units, which have {n} weights each. Use secure sums (secure=True), or share fewer units."
            )


def _count_inputs(job: Job, name: str) -> int:
    """Return the number of weights of a unit in one parameter."""
    shape = job.net.shapes[name]
    return int(np.prod(shape[1:], dtype=np.int64))


class HiddenParams(dict[str, torch.Tensor]):
    """Parameters of single clients, which the server does not see: reading one raises an error."""

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __missing__(self, name: str) -> NoReturn:
        self._refuse(name)


def make_refusal(method: str) -> Callable[..., NoReturn]:
    """Return a function that raises ValueError, in place of one that shows single clients to the method."""

    def refuse(*_: Any) -> NoReturn:
        raise ValueError(
            f"method {method!r} reads models of single clients, but the server of separate clients sees only sums. "
            "Give the method moments, or use fedstat.fl.train."
        )

    return refuse


Call = Callable[[Message, Context], Message]

RANGES = "ranges"
"""Name of the record with the range of every array of the answer, in order."""

_MODULUS = 2**32  # Flower's maximum
_STEPS = 2**30  # maximum for the int32 values to which Flower rounds
_SHARES = 2 / 3  # proportion of clients whose shares recover a mask


def steps(parties: int) -> int:
    """Return T, the number of steps from -R to R, such that sums over this number of clients do not overflow.

    Examples
    --------
    >>> [steps(k).bit_length() - 1 for k in (2, 3, 4, 100)]
    [30, 30, 29, 25]
    """
    return min(_STEPS, 2 ** (math.ceil(32 - math.log2(parties)) - 1))


def error_bound(parties: int, largest: float = 1.0) -> float:
    """Return K · 2R/T, which bounds the error of a secure sum.

    Parameters
    ----------
    parties : int
        Number of clients K.
    largest : float
        Range R of the values.

    Examples
    --------
    >>> error_bound(4), error_bound(100)
    (1.4901161193847656e-08, 5.9604644775390625e-06)
    """
    return 2 * parties * largest / steps(parties)


def entry_ranges(server: Params, names: Iterable[str], weight: float, headroom: float) -> dict[str, float]:
    """Return the ranges of n_k / Σ n_k times weights of the network; ``weight`` is the largest n_k / Σ n_k."""
    return {n: weight * _power_of_2(max(1.0, headroom * float(server[n].abs().max()))) for n in names}


def moment_ranges(sums: Mapping[str, np.ndarray], headroom: float) -> dict[str, float]:
    """Return the ranges of raw sums, from the raw sums of one client or their mean over clients."""
    ranges = {}
    for name in sums:
        layer, _, part = name.rpartition("/")
        n, square = float(sums[f"{layer}/n"][0]), float(np.abs(sums[f"{layer}/square"]).max())
        square = max(1.0, headroom**2 * square)
        ranges[name] = _power_of_2({"n": n, "total": math.sqrt(n * square), "square": square}[part])
    return ranges


def _power_of_2(x: float) -> float:
    """Return the smallest power of 2 that is at least x."""
    return 2.0 ** math.ceil(math.log2(x))


class SecureGrid(StrictGrid):
    """Grid that answers training messages by one message, with the sum of the arrays "sums" over clients.

    Parameters
    ----------
    grid : Grid
        Grid that carries the messages.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._plain = StrictGrid(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all answers; to training messages, return one answer, with the sum.

        Raises
        ------
        RuntimeError
            If a client fails or does not answer in time.
        """
        messages = list(messages)
        if not messages or any(m.metadata.message_type != MessageType.TRAIN for m in messages):
            return super().send_and_receive(messages, timeout=timeout)
        strategy = _SumStrategy(messages)
        workflow = _Workflow(
            1.0,
            _SHARES,
            max_weight=1.0,
            clipping_range=1.0,
            quantization_range=steps(len(messages)),
            modulus_range=_MODULUS,
            timeout=timeout,
        )
        workflow.contents = {m.metadata.dst_node_id: m.content for m in messages}
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=strategy, client_manager=strategy)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 0})
        context.state.array_records[MAIN_PARAMS_RECORD] = to_record({})
        workflow(self._plain, context)
        return [Message(RecordDict({"sums": to_record(strategy.sums())}), reply_to=messages[0])]


class _Workflow(SecAggPlusWorkflow):
    """Flower's workflow, with the contents of fedstat's messages as instructions for clients."""

    contents: dict[int, RecordDict]

    def collect_masked_vectors_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """Ask for masked values."""
        state.nid_to_fitins = self.contents
        return bool(super().collect_masked_vectors_stage(grid, context, state))


class _SumStrategy:
    """Legacy strategy and client manager of the workflow: clients to ask, and the sum of their answers."""

    def __init__(self, messages: list[Message]) -> None:
        self._nodes = [m.metadata.dst_node_id for m in messages]
        self._ranges = dict(messages[0].content.config_records[RANGES])
        self._sums: Arrays | None = None

    def num_available(self) -> int:
        """Return the number of clients."""
        return len(self._nodes)

    def configure_fit(self, *_: Any) -> list[tuple[Any, Any]]:
        """Return the clients to ask, with empty instructions, which the workflow replaces."""
        empty = FitIns(Parameters([], "numpy.ndarray"), {})
        return [(_Node(node), empty) for node in self._nodes]

    def aggregate_fit(self, _: int, results: list[Any], __: list[Any]) -> tuple[None, dict[str, Any]]:
        """Store the sum: the mean over clients, which all have weight 1, times their number and the ranges."""
        means = parameters_to_ndarrays(results[0][1].parameters)
        factors = [len(results) * r for r in self._ranges.values()]
        self._sums = {name: mean * factor for name, mean, factor in zip(self._ranges, means, factors, strict=True)}
        return None, {}

    def sums(self) -> Arrays:
        """Return the sums; raise RuntimeError if the protocol stopped before its end."""
        if self._sums is None:
            raise RuntimeError("the secure sum stopped before its end, see Flower's log above. Start the run again.")
        return self._sums


class _Node:
    """Client with the id of its node."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


def secure_mod(plan: Callable[[Context], Plan]) -> Callable[[Message, Context, Call], Message]:
    """Return a mod of a ClientApp that masks the answers to training messages if the client's plan is secure."""

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        secure, masked = plan(context).secure, RECORD_KEY_CONFIGS in message.content.config_records
        if secure != masked:
            kind = "masked" if masked else "open"
            raise ValueError(
                f"the client's plan has secure={secure}, but it got a request for {kind} sums. Use one plan."
            )
        if not secure:
            return call_next(message, context)
        return secaggplus_mod(message, context, partial(_scale_sums, call_next))

    return mod


def _scale_sums(call_next: Call, message: Message, context: Context) -> Message:
    """Divide the answer's sums by their ranges, and return them in the form that Flower's mod masks."""
    ranges = message.content.config_records[RANGES]
    sums = arrays_in(call_next(message, context).content, "sums")
    scaled = []
    for name, r in ranges.items():
        values = sums[name].astype(np.float64) / float(r)
        if not (np.abs(values) <= 1).all():
            raise ValueError(
                f"a value of {name!r} lies outside ±{r:g}, the range of this secure sum. Raise headroom in the plan of "
                "all clients, or lower the learning rate."
            )
        scaled.append(values)
    fitted = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(scaled), 1, {})
    return Message(fitres_to_recorddict(fitted, True), reply_to=message)
