"""Checks of what a method's functions return: in a trial before the first round, and in every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat import _check
from fedstat._later import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Mask, Memory, Phase, Sharing, Uploads
from fedstat.fl.job import Job
from fedstat.fl.nets import Net, Params
from fedstat.fl.optim import Optimizer
from fedstat.fl.wrappers.private_head import private_name

if TYPE_CHECKING:
    from torch import Tensor


def entries(found: Any, expected: Params, where: str) -> None:
    """ValueError unless ``found`` holds tensors of some of the expected names, in their shapes."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} must return a dict of tensors by name, but got {type(found).__name__}")
    for name, value in found.items():
        if name not in expected:
            hint = _check.did_you_mean(name, expected)
            raise ValueError(f"{where} returns {name!r}, but may only return {list(expected)}.{hint}")
        shape = tuple(expected[name].shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            seen = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{where} must return {name!r} as a Tensor of shape {shape}, but got {seen}")
        kind, got = ((p.dtype, p.device.type) for p in (expected[name], value))
        if kind != got:
            raise ValueError(
                f"{where} must return {name!r}, of shape {shape}, as {_said(*kind)}, but got {_said(*got)}"
            )


def _said(dtype: torch.dtype, device: str) -> str:
    return f"{dtype} on {device}"


def every_entry(found: Any, expected: Params, where: str) -> None:
    """ValueError unless ``found`` holds tensors of all of the expected names, in their shapes."""
    entries(found, expected, where)
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"{where} must return every one of {list(expected)}, but lacks {missing}")


def asked(function: Callable[[Uploads], Any], uploads: Uploads, where: str) -> Any:
    """What a function of the method makes of the uploads; ValueError if it changes in place what it was given."""
    given = {"after": uploads.after, "server": uploads.server, "memory.server": uploads.memory.server}
    tensors = [(part, name, p, p._version) for part, of in given.items() for name, p in of.items()]
    clients = uploads.clients.copy()
    found = function(uploads)
    changed = [f"{part}[{name!r}], of shape {tuple(p.shape)}," for part, name, p, was in tensors if p._version != was]
    if (uploads.clients != clients).any():
        changed.append("clients")
    if changed:
        raise ValueError(
            f"{where} changes uploads.{changed[0]} in place. Return new values: what is given is the run's own."
        )
    return found


def sharing(found: Any, job: Job, function: str) -> Sharing:
    """A method's sharing, if it is one, with a mask that fits for every parameter."""
    if not isinstance(found, Sharing):
        raise ValueError(
            f"method {job.algorithm.name!r}: {function} must return a Sharing, such as Sharing(mask), but got "
            f"{type(found).__name__}"
        )
    masks.require(job.net, found.shared, len(job.sizes), job.algorithm.name)
    if job.ranks.several and any(m.ndim > len(job.net.shapes[n]) and len(m) > 1 for n, m in found.shared.items()):
        raise ValueError(
            f"method {job.algorithm.name!r} has masks that differ between clients, which several processes do not "
            "share out. Run it in one."
        )
    if job.own_labels:
        _require_private_heads(job, found, function)
    return found


def _require_private_heads(job: Job, found: Sharing, function: str) -> None:
    shared = [name for name in nets.head_parameters(job.net) if bool(found.shared[name].any())]
    if shared:
        method = job.algorithm.name
        raise ValueError(
            f"method {method!r}: {function} shares entries of {shared[0]!r}, of an output layer, but clients number "
            "their classes differently (permuted labels, domains), so that output layers cannot be averaged. Take "
            f"private_head(algorithm), by name {private_name(method)!r}."
        )


def mixture(found: Any, clients: int, device: torch.device, method: str) -> Tensor:
    """A mixing matrix (active, active), or ValueError."""
    where = f"method {method!r}: mix(uploads)"
    every_entry({"matrix": found}, {"matrix": torch.empty(clients, clients, device=device)}, where)
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"{where} must return finite weights, but row(s) of the matrix are not")
    return found


def sent(found: Any, uploads: Uploads, sharing: Sharing, method: str) -> Params:
    """What ``send`` returned; ValueError unless it has all active clients, and only parameters with shared entries."""
    where = f"method {method!r}: send(uploads)"
    entries(found, uploads.after, where)
    for name in found:
        if not bool(sharing.shared[name].any()):
            shape = tuple(uploads.server[name].shape)
            raise ValueError(
                f"{where} returns {name!r}, of shape {shape}, but no entry of it is shared: nobody would receive it. "
                "Share it, or leave it out."
            )
    return dict(found)


def weights(found: Any, clients: int, device: torch.device, method: str) -> Tensor:
    """Weights (active,) of the mean as a float32 Tensor; ValueError if they are none."""
    where = f"method {method!r}: weights(sizes, active, clients)"
    try:
        given = torch.as_tensor(found, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{where} must return numbers, but got {found!r}") from None
    if tuple(given.shape) != (clients,):
        raise ValueError(f"{where} must have shape ({clients},), one for each active client, but got {(*given.shape,)}")
    low, total = float(given.min()), float(given.sum(dtype=torch.float64))
    if not low >= 0 or not total <= 1 + 1e-5:  # also true for NaN
        raise ValueError(
            f"{where} must be at least 0 and sum to at most 1 (the server's copy gets the rest), but the smallest is "
            f"{low:g} and the sum {total:g}"
        )
    return given


def downloads(found: Any, clients: int, method: str) -> np.ndarray:
    """Numbers (active,) of models that clients download; ValueError if they are none."""
    given = np.asarray(found)
    if given.shape != (clients,) or given.dtype.kind not in "iu" or (given < 0).any():
        raise ValueError(
            f"method {method!r}: downloads(uploads) must return an integer >= 0 for each of {clients} active clients, "
            f"but got {found!r}"
        )
    return given


def memory(found: Memory, clients: int, method: str) -> None:
    """ValueError unless it is a memory of tensors, and the first axis of the clients' memory is the clients."""
    _require_memory(found, f"method {method!r}: memory(start)")
    for name, value in found.server.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"method {method!r}: memory(start) must give the server's {name!r} as a Tensor, but got "
                f"{type(value).__name__}"
            )
    for name, value in found.clients.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != clients:
            seen = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"method {method!r}: memory(start) must give clients' {name!r} as a Tensor whose first axis is the "
                f"{clients} clients, but got {seen}"
            )


def _require_memory(found: Any, where: str) -> None:
    if not isinstance(found, Memory):
        raise ValueError(f"{where} must return a Memory(clients, server), but got {type(found).__name__}")


def remembered(found: Memory, before: Memory, method: str) -> None:
    """ValueError unless a new memory has the names and shapes of the one before."""
    _require_memory(found, f"method {method!r}: remember(uploads)")
    for part in ("clients", "server"):
        new, old = getattr(found, part), getattr(before, part)
        where = f"method {method!r}: remember(uploads), {part}"
        entries(new, old, where)
        if missing := [name for name in old if name not in new]:
            raise ValueError(f"{where}, lacks {missing}: return all that is to be remembered, changed or not")


def measured(found: Any, shape: tuple[int, ...], name: str, method: str) -> None:
    """ValueError unless a measure has the shape of its dims."""
    seen = tuple(getattr(found, "shape", ()))
    if seen != shape:
        raise ValueError(f"method {method!r}: its measure {name!r} must have shape {shape}, but got {seen}")


def known(function: Callable[..., Any], *given: Any, net: Net, where: str) -> Any:
    """What a function of the method returns; ValueError if it asks for a parameter or layer that there is not."""
    try:
        return function(*given)
    except KeyError as error:
        name = error.args[0] if error.args else None
        names = [*net.shapes, *nets.layers(net)]
        if not isinstance(name, str) or name in names:
            raise
        hint = _check.did_you_mean(name, names)
        raise ValueError(f"{where} asks for {name!r}, but the network has {list(net.shapes)}.{hint}") from error


def added(found: Any, params: Params, where: str) -> bool:
    """Whether a penalty returned a loss, not gradients; ValueError if it is neither."""
    if isinstance(found, torch.Tensor):
        clients = len(next(iter(params.values())))
        if tuple(found.shape) not in ((), (clients,)) or not found.is_floating_point():
            raise ValueError(
                f"{where} must return a loss, one number for each client, of shape ({clients},), or their sum, of "
                f"shape (), or a dict of gradients, but got a Tensor of shape {tuple(found.shape)}, {found.dtype}"
            )
        return True
    entries(found, params, where)
    return False


def trial(job: Job, uploads: Uploads, sharing: Sharing) -> None:
    """Call the algorithm's functions once before the first round, so that errors show at once."""
    algorithm, clients = job.algorithm, uploads.clients
    method = f"method {algorithm.name!r}:"
    for i, phase in enumerate((*algorithm.phases, *algorithm.finetune)):
        if phase.penalty and not callable(phase.anchor):
            params, anchor = ({n: p.clone() for n, p in uploads.after.items()} for _ in range(2))
            where = f"{method} penalty(params, anchor) of phase {i + 1}"
            found = known(phase.penalty, params, anchor, net=job.net, where=where)
            added(found, params, where)
    if algorithm.send:
        sent(asked(algorithm.send, uploads, f"{method} send(uploads)"), uploads, sharing, algorithm.name)
    if algorithm.weights:
        found = algorithm.weights(job.train.sizes[clients], job.ids(clients), job.everyone or job.clients)
        weights(found, len(clients), job.device, algorithm.name)
    if algorithm.remember:
        found = asked(algorithm.remember, uploads, f"{method} remember(uploads)")
        remembered(found, uploads.memory, algorithm.name)
    for name, measure in algorithm.measures.items():
        of = {"client": len(clients), "other": len(clients), "layer": len(nets.layers(job.net))} | dict(measure.sizes)
        value = asked(measure.value, uploads, f"{method} its measure {name!r}")
        measured(value, tuple(of[dim] for dim in measure.dims), name, algorithm.name)
    if algorithm.reshare and job.aggregator.privacy:  # it may ask for what is not released
        asked(algorithm.reshare, uploads, f"{method} reshare(uploads)")
    if algorithm.uploads:
        masks.require(job.net, algorithm.uploads(job.net, sharing), len(job.sizes), f"{algorithm.name}, uploads")


def aggregated(found: Any, expected: Params, name: str) -> None:
    """ValueError unless an aggregator's values are of every entry that was sent, without clients."""
    values = getattr(found, "values", found)
    every_entry(values, expected, f"the aggregator {name!r}")


def agreed(job: Job, values: Params, shared: Mask) -> None:
    """ValueError unless all processes of a run have aggregated the same shared entries, up to rounding."""
    if not job.ranks.several or not values:
        return
    parts = [(p * shared[name]).double() for name, p in values.items()]
    every = np.array(job.ranks.each([(float(p.sum()), float(p.norm())) for p in parts]))  # (rank, parameter, 2)
    apart = np.abs(every - every[0]).max(axis=2) > 1e-4 * every[0, :, 1]
    if apart.any():
        rank, at = np.argwhere(apart)[0]
        raise ValueError(
            f"the aggregator {job.aggregator.name!r} says that it needs only sums over clients, but processes 0 and "
            f"{rank} have different values of {list(values)[at]!r}. Add what is summed over clients by Sent.total, or "
            "make it with needs='clients'."
        )


def savable(state: Any, name: str) -> None:
    """ValueError unless the state of an aggregator can be saved and read again."""
    if type(state) in (tuple, list, dict):
        for part in state.values() if isinstance(state, dict) else state:
            savable(part, name)
    elif not isinstance(state, torch.Tensor):
        raise ValueError(
            f"the state of the aggregator {name!r} must be tensors, in dicts or plain tuples, which can be saved and "
            f"resumed, but holds {type(state).__name__}"
        )


def phases(job: Job) -> None:
    """ValueError unless every stretch of training that the algorithm has is one."""
    algorithm = job.algorithm
    several = {"phases": algorithm.phases, "finetune": algorithm.finetune}
    if algorithm.choice is not None:
        several |= {f"choice.finetunings[{i}]": one for i, one in enumerate(algorithm.choice.finetunings)}
    for of, given in several.items():
        where = f"method {algorithm.name!r}: {of}"
        if isinstance(given, Phase) or not all(isinstance(phase, Phase) for phase in given):
            raise ValueError(f"{where} must be a tuple of Phase, such as (Phase(),), but got {given!r}")
        for i, phase in enumerate(given):
            _phase(job, phase, f"{where}[{i}]")


def _phase(job: Job, phase: Phase, where: str) -> None:
    for name, value, low in (
        ("epochs", phase.length(job.local_epochs), 0),
        ("steps", phase.steps, 1),
        ("repeats", phase.repeats, 1),
    ):
        if value is not None:
            _check.integer(f"{where}.{name}", value, low=low)
    _check.real(f"{where}.lr", phase.lr, low=0, open_low=True)
    if phase.optimizer is not None and not isinstance(phase.optimizer, Optimizer):
        raise ValueError(f"{where}.optimizer must be an Optimizer, such as optim.sgd(0.1), but got {phase.optimizer!r}")
    if not callable(phase.anchor):
        _check.choice(f"{where}.anchor", phase.anchor, ("phase", "download"))
    for layer in phase.layers(job.net) if phase.layers else ():
        _check.choice(f"a layer of {where}", layer, list(nets.layers(job.net)))
