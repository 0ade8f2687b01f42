"""Sums that a server gets without single parties' values: masks, refusals, and the grid of parties.

Flower's own protocol (``SecAggPlusWorkflow`` and ``secaggplus_mod``; Bell et al. 2020, ACM CCS, 1253-1269) masks
integers modulo 2³². In Flower 1.41 it belongs to the older strategies, which average all parameters weighted by numbers
of samples; the grid and the mod here carry sums of any arrays through it, between the messages of today's strategies.

A value is divided by a range that the server names for its array, a power of two R, and rounded at random to one of the
two nearest multiples of 2R/T, so that a sum over K parties is off by less than K · 2R/T, see :func:`error_bound`;
T = 2^j is the largest with K T < 2³² (and T <= 2³⁰). Ranges follow the values: of weights, ``headroom`` times the
largest of the server's copy, or at least 1, times the largest n_k / Σ n_k; of moments, ``headroom²`` times a client's
mean share of the last total, at first of the common start's. A value out of range ends the run.

What it protects from is a server that follows the protocol. Flower derives every mask from a seed of 32 bits, which a
determined server could search; and the sum of two parties is no secret to either.
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
from fedstat.flower.plan import Arrays, Plan, arrays_in, record
from fedstat.stats.moments import Moments


class Answering(Grid):
    """A grid whose every party answers: messages that fail or are late are one error.

    Parameters
    ----------
    grid : Grid
        What carries the messages.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def run(self) -> Any:
        """The run that messages belong to."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A new message."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Nodes that are connected."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers that have come to messages of these ids."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all answers.

        Raises
        ------
        RuntimeError
            If a party fails, with its reason, or does not answer in time.
        """
        messages = list(messages)
        answers = list(self._grid.send_and_receive(messages, timeout=timeout)) if messages else []
        for answer in answers:
            if answer.has_error():
                raise RuntimeError(_reason(answer))
        asked, came = ([m.metadata.dst_node_id for m in messages], {a.metadata.src_node_id for a in answers})
        if silent := [node for node in asked if node not in came]:
            raise RuntimeError(
                f"{len(silent)} of {len(asked)} parties gave no answer within {timeout:g} s, first node {silent[0]}. "
                "See its log, or give parties more time (timeout)."
            )
        return answers


def _reason(answer: Message) -> str:
    """One line that says why a party failed."""
    lines = [line.strip() for line in (answer.error.reason or "").splitlines() if line.strip(" '>")]
    last = lines[-1].removeprefix("Exception ClientAppException occurred. Message: ") if lines else "no reason given"
    return last if last.startswith("party ") else f"node {answer.metadata.src_node_id} failed: {last}"


def moments_alone(found: Mapping[str, Any], method: str) -> dict[str, Moments]:
    """The method's sums, if they are moments; else ValueError."""
    for layer, sums in found.items():
        if not isinstance(sums, Moments):
            raise ValueError(
                f"method {method!r}: between separate parties moments must be fedstat.stats.moments.Moments, but those "
                f"of {layer!r} are {type(sums).__name__}"
            )
    return dict(found)


def require_unsolvable(job: Job, mask: SharedMask, moments: Mapping[str, Moments]) -> None:
    """ValueError if open moments and shared entries of one party determine its personal weights.

    Products of a personal unit's n weights with n known vectors, the shared units' weights and ones, are a linear
    system that has one solution.
    """
    for layer in moments:
        flags = masks.shared_units(job.net, mask.shared, layer)
        known, n = int(flags.sum()) + 1, sum(_inputs(job, name) for name in masks.incoming(job.net, layer))
        if known >= n and not bool(flags.all()):
            raise ValueError(
                f"layer {layer!r}: from a party's moments and its {known - 1} shared units a server could compute the "
                f"personal ones, which have {n} weights each. Use secure sums (secure=True), or share fewer units."
            )


def _inputs(job: Job, name: str) -> int:
    shape = job.net.shapes[name]
    return int(np.prod(shape[1:], dtype=np.int64))


class Unseen(dict[str, torch.Tensor]):
    """Parameters that a server of separate parties does not see."""

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __missing__(self, name: str) -> NoReturn:
        self._refuse(name)


def refusal(method: str) -> Callable[..., NoReturn]:
    """A function that raises ValueError, in place of one that shows single clients to the method."""

    def refuse(*_: Any) -> NoReturn:
        raise ValueError(
            f"method {method!r} asks for single clients' models, but a server of separate parties sees sums alone. "
            "Give the method moments, or use fedstat.fl.train."
        )

    return refuse


Call = Callable[[Message, Context], Message]

RANGES = "ranges"
"""Record of a message that names the range of every array of the answer, in its order."""

_MODULUS = 2**32  # Flower's largest
_STEPS = 2**30  # what fits the int32 to which Flower rounds
_SHARES = 2 / 3  # of the parties, whose answers open the masks


def steps(parties: int) -> int:
    """T, number of steps from -R to R, such that sums over so many parties do not overflow.

    Examples
    --------
    >>> [steps(k).bit_length() - 1 for k in (2, 3, 4, 100)]
    [30, 30, 29, 25]
    """
    return min(_STEPS, 2 ** (math.ceil(32 - math.log2(parties)) - 1))


def error_bound(parties: int, largest: float = 1.0) -> float:
    """Bound of the error of a sum over parties whose values have the range ``largest``: K · 2R/T.

    Examples
    --------
    >>> error_bound(4), error_bound(100)
    (1.4901161193847656e-08, 5.9604644775390625e-06)
    """
    return 2 * parties * largest / steps(parties)


def entry_ranges(server: Params, names: Iterable[str], share: float, headroom: float) -> dict[str, float]:
    """Ranges of n_k / Σ n_k times weights, where the largest such share is given."""
    return {n: share * _power(max(1.0, headroom * float(server[n].abs().max()))) for n in names}


def moment_ranges(one: Mapping[str, np.ndarray], headroom: float) -> dict[str, float]:
    """Ranges of a layer's raw sums, from those of one client or of a mean client."""
    found = {}
    for name in one:
        layer, _, part = name.rpartition("/")
        n, square = float(one[f"{layer}/n"][0]), float(np.abs(one[f"{layer}/square"]).max())
        square = max(1.0, headroom**2 * square)
        found[name] = _power({"n": n, "total": math.sqrt(n * square), "square": square}[part])
    return found


def _power(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(x))


class SecureGrid(Answering):
    """A grid on which messages that train are answered once, by the sum of all parties' arrays "sums".

    Parameters
    ----------
    grid : Grid
        What carries the messages.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._plain = Answering(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As the plain grid does, but training messages are answered by one message, with the sum.

        Raises
        ------
        RuntimeError
            If a party fails or does not answer in time.
        """
        messages = list(messages)
        if not messages or any(m.metadata.message_type != MessageType.TRAIN for m in messages):
            return super().send_and_receive(messages, timeout=timeout)
        total = _Total(messages)
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
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=total, client_manager=total)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 0})
        context.state.array_records[MAIN_PARAMS_RECORD] = record({})
        workflow(self._plain, context)
        return [Message(RecordDict({"sums": record(total.sums())}), reply_to=messages[0])]


class _Workflow(SecAggPlusWorkflow):
    """Flower's workflow, whose parties get the contents of given messages as instructions."""

    contents: dict[int, RecordDict]

    def collect_masked_vectors_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """Ask for masked values."""
        state.nid_to_fitins = self.contents
        return bool(super().collect_masked_vectors_stage(grid, context, state))


class _Total:
    """What the workflow asks of an older strategy and its clients: whom to ask, and where the mean goes."""

    def __init__(self, messages: list[Message]) -> None:
        self._nodes = [m.metadata.dst_node_id for m in messages]
        self._ranges = dict(messages[0].content.config_records[RANGES])
        self._sums: Arrays | None = None

    def num_available(self) -> int:
        """Number of parties."""
        return len(self._nodes)

    def configure_fit(self, *_: Any) -> list[tuple[Any, Any]]:
        """Parties to ask; what they are asked is in the workflow's contents."""
        nothing = FitIns(Parameters([], "numpy.ndarray"), {})
        return [(_Node(node), nothing) for node in self._nodes]

    def aggregate_fit(self, _: int, results: list[Any], __: list[Any]) -> tuple[None, dict[str, Any]]:
        """Keep the sum: the mean over parties, which all have weight 1, times their number and the ranges."""
        means = parameters_to_ndarrays(results[0][1].parameters)
        by = [len(results) * r for r in self._ranges.values()]
        self._sums = {name: mean * b for name, mean, b in zip(self._ranges, means, by, strict=True)}
        return None, {}

    def sums(self) -> Arrays:
        """The sums; RuntimeError if the protocol has stopped before its end."""
        if self._sums is None:
            raise RuntimeError("the secure sum stopped before its end, see Flower's log above. Start the run again.")
        return self._sums


class _Node:
    """A party by its node's number."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


def secured(plan: Callable[[Context], Plan]) -> Callable[[Message, Context, Call], Message]:
    """Mod of a ClientApp: where the party's plan is secure, what trains is answered masked or not at all."""

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        secure, masked = plan(context).secure, RECORD_KEY_CONFIGS in message.content.config_records
        if secure != masked:
            wants, asked = ("secure sums", "its own values") if secure else ("open sums", "masked ones")
            raise ValueError(f"this party's plan is of {wants}, but it was asked for {asked}. Give all one plan.")
        if not secure:
            return call_next(message, context)
        return secaggplus_mod(message, context, partial(_fixed_point, call_next))

    return mod


def _fixed_point(call_next: Call, message: Message, context: Context) -> Message:
    """The answer's sums by their ranges, as Flower's mod takes values to mask."""
    ranges = message.content.config_records[RANGES]
    sums = arrays_in(call_next(message, context).content, "sums")
    scaled = []
    for name, r in ranges.items():
        values = sums[name].astype(np.float64) / float(r)
        if not (np.abs(values) <= 1).all():
            raise ValueError(
                f"a value of {name!r} lies outside ±{r:g}, the range of this secure sum. Raise headroom in the plan of "
                "all parties, or lower the learning rate."
            )
        scaled.append(values)
    fitted = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(scaled), 1, {})
    return Message(fitres_to_recorddict(fitted, True), reply_to=message)
