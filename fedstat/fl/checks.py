"""Validation of what users' functions return: tensors by name, and results of an algorithm's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.algorithm import (
    Algorithm,
    AlgorithmState,
    BatchGradient,
    DownloadContext,
    InitContext,
    Measure,
    Phase,
    RoundContext,
    Samples,
    SharedMask,
)
from fedstat.fl.nets import Net, Params
from fedstat.fl.optim import Optimizer

if TYPE_CHECKING:
    from torch import Tensor


def entries(tensors: Any, expected: Params, where: str) -> None:
    """Raise ValueError unless ``tensors`` holds tensors of some expected names, with their shapes."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{where} must return a dict of tensors by name, but got {type(tensors).__name__}")
    for name, value in tensors.items():
        if name not in expected:
            hint = check.did_you_mean(name, expected)
            raise ValueError(f"{where} returns {name!r}, but may only return {list(expected)}.{hint}")
        shape = tuple(expected[name].shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            actual = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{where} must return {name!r} as a Tensor of shape {shape}, but got {actual}")
        kind, actual_kind = ((p.dtype, p.device.type) for p in (expected[name], value))
        if kind != actual_kind:
            raise ValueError(
                f"{where} must return {name!r}, of shape {shape}, as {_describe_tensor(*kind)}, but got "
                f"{_describe_tensor(*actual_kind)}"
            )


def _describe_tensor(dtype: torch.dtype, device: str) -> str:
    return f"{dtype} on {device}"


def every_entry(tensors: Any, expected: Params, where: str) -> None:
    """Raise ValueError unless ``tensors`` holds tensors of all expected names, with their shapes."""
    entries(tensors, expected, where)
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{where} must return every one of {list(expected)}, but lacks {missing}")


@contextmanager
def unchanged(argument: Any, where: str) -> Iterator[None]:
    """Raise ValueError if a hook changes its argument in place, which belongs to the run."""
    parts: list[tuple[str, Mapping[str, Tensor]]] = []
    if isinstance(argument, RoundContext):
        parts = [("context.after[{!r}]", argument.after), ("context.global_params[{!r}]", argument.global_params)]
        parts.append(("context.state.server[{!r}]", argument.state.server))
    elif isinstance(argument, DownloadContext):
        parts = [("the server's {!r}", argument.global_params), ("the server's {!r}", argument.state.server)]
    tensors = [(text.format(name), p, p._version) for text, of in parts for name, p in of.items()]
    clients = argument.clients.copy() if isinstance(argument, RoundContext) else None
    yield
    if isinstance(argument, RoundContext):  # the hook may have made it
        before = vars(argument).get("before", {})
        tensors += [(f"context.before[{name!r}]", p, argument._versions[name]) for name, p in before.items()]
    changed = [f"{name}, of shape {tuple(p.shape)}," for name, p, version in tensors if p._version != version]
    if clients is not None and (argument.clients != clients).any():
        changed.append("context.clients")
    if changed:
        raise ValueError(f"{where} changes {changed[0]} in place. Return new values: the arguments belong to the run.")


@contextmanager
def name_errors(net: Net, where: str) -> Iterator[None]:
    """Raise ValueError in place of the KeyError of an unknown parameter or layer."""
    try:
        yield
    except KeyError as error:
        name = error.args[0] if error.args else None
        names = [*net.shapes, *nets.layers(net)]
        if not isinstance(name, str) or name in names:
            raise
        hint = check.did_you_mean(name, names)
        raise ValueError(f"{where} asks for {name!r}, but the network has {list(net.shapes)}.{hint}") from error


def savable(state: Any, name: str) -> None:
    """Raise ValueError unless the state of an aggregator can be saved and read again."""
    if type(state) in (tuple, list, dict):
        for part in state.values() if isinstance(state, dict) else state:
            savable(part, name)
    elif not isinstance(state, torch.Tensor):
        raise ValueError(
            f"the state of the aggregator {name!r} must be tensors, in dicts or plain tuples, which can be saved and "
            f"resumed, but holds {type(state).__name__}"
        )


# --- results of hooks: each function takes (result, where, *arguments), and returns the result or raises ValueError


def instance(kind: type, result: Any, where: str, *_: Any, hint: str = "") -> Any:
    """Require an instance of a class."""
    if not isinstance(result, kind):
        article = "an" if kind.__name__.startswith("A") else "a"
        raise ValueError(f"{where} must return {article} {kind.__name__}{hint}, but got {type(result).__name__}")
    return result


def parameter_names(names: Any, where: str, net: Net) -> Sequence[str]:
    """Require names of parameters."""
    if unknown := [name for name in names if name not in net.shapes]:
        raise ValueError(
            f"{where} names {unknown}, but the names are {[*net.shapes]}.{check.did_you_mean(unknown[0], net.shapes)}"
        )
    return names


def mixing_matrix(matrix: Any, where: str, context: RoundContext) -> Tensor:
    """Require a finite matrix (selected, selected)."""
    n = len(context.clients)
    every_entry({"matrix": matrix}, {"matrix": torch.empty(n, n, device=context.weights.device)}, where)
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{where} must return finite weights, but row(s) of the matrix are not")
    return matrix


def encoded(params: Any, where: str, context: RoundContext, *, mask: SharedMask) -> Params:
    """Require values of all selected clients, and only of parameters with shared entries."""
    entries(params, context.after, where)
    for name in params:
        if not bool(mask.shared[name].any()):
            raise ValueError(
                f"{where} returns {name!r}, of shape {tuple(context.global_params[name].shape)}, but no entry of it is "
                "shared: no client would receive it. Share it, or leave it out."
            )
    return params


def weights(
    result: Any, where: str, _: np.ndarray, client_ids: np.ndarray, __: int, *, device: torch.device | str
) -> Tensor:
    """Require weights (selected,) of a mean, and return them as a float32 Tensor."""
    try:
        tensor = torch.as_tensor(result, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{where} must return numbers, but got {result!r}") from None
    if tuple(tensor.shape) != (len(client_ids),):
        raise ValueError(
            f"{where} must have shape ({len(client_ids)},), one for each selected client, but got {(*tensor.shape,)}"
        )
    low, total = float(tensor.min()), float(tensor.sum(dtype=torch.float64))
    if not low >= 0 or not total <= 1 + 1e-5:  # also true for NaN
        raise ValueError(
            f"{where} must be at least 0 and sum to at most 1 (the global model gets the rest), but the smallest is "
            f"{low:g} and the sum {total:g}"
        )
    return tensor


def initial_state(state: Any, where: str, context: InitContext) -> AlgorithmState:
    """Require a state of tensors; the first axis of clients' tensors is the clients."""
    instance(AlgorithmState, state, where, hint="(clients, server)")
    for name, value in state.server.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{where} must give the server's {name!r} as a Tensor, but got {type(value).__name__}")
    for name, value in state.clients.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != len(context.sizes):
            actual = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"{where} must give clients' {name!r} as a Tensor whose first axis is the {len(context.sizes)} "
                f"clients, but got {actual}"
            )
    return state


def updated_state(state: Any, where: str, context: RoundContext) -> AlgorithmState:
    """Require a state with the names and shapes of the previous state."""
    instance(AlgorithmState, state, where, hint="(clients, server)")
    for part in ("clients", "server"):
        new, old = getattr(state, part), getattr(context.state, part)
        entries(new, old, f"{where}, {part}")
        if missing := [name for name in old if name not in new]:
            raise ValueError(
                f"{where} must return the whole method state, but lacks {missing} of {part}. Return "
                "unchanged entries, too."
            )
    return state


def downloaded(params: Any, where: str, context: DownloadContext) -> Params:
    """Require parameters of the clients that download."""
    entries(params, context.client_params, where)
    return params


def same_entries(params: Any, where: str, expected: Params) -> Params:
    """Require some of the expected parameters."""
    entries(params, expected, where)
    return params


def measured(values: Any, where: str, context: RoundContext, *, measure: Measure) -> Any:
    """Require a measure in the shape of its dims."""
    of_clients = dict.fromkeys(("client", "other"), len(context.clients))
    sizes = {"layer": len(nets.layers(context.net)), **measure.sizes, **of_clients}
    shape, actual = tuple(sizes[dim] for dim in measure.dims), tuple(getattr(values, "shape", ()))
    if actual != shape:
        raise ValueError(f"{where} must have shape {shape}, but got {actual}")
    return values


def downloads(result: Any, where: str, context: RoundContext) -> np.ndarray:
    """Require numbers (selected,) of models, and return them as an array."""
    numbers, n = np.asarray(result), len(context.clients)
    if numbers.shape != (n,) or numbers.dtype.kind not in "iu" or (numbers < 0).any():
        raise ValueError(f"{where} must return an integer >= 0 for each of {n} selected clients, but got {result!r}")
    return numbers


# --- phases


def phases_checked(phases: Sequence[Phase], net: Net, method: str) -> tuple[Phase, ...]:
    """Return the phases of a method with functions that validate their results, by :data:`PHASE_CHECKS`.

    Penalties return gradients.
    """
    return tuple(_wrap_phase(phase, net, f"method {method!r}: a phase's") for phase in phases)


def _wrap_phase(phase: Phase, net: Net, where: str) -> Phase:
    hooks = {name: hook for name in PHASE_CHECKS if callable(hook := getattr(phase, name))}
    moves = phase.moves(net) if hooks else []
    checked: Any = {name: partial(PHASE_CHECKS[name], hook, f"{where} {name}", moves) for name, hook in hooks.items()}
    return phase._replace(**checked)


def phases(algorithm: Algorithm, net: Net, local_epochs: int) -> None:
    """Raise ValueError unless all phases of an algorithm are Phase records with valid settings."""
    tuples = {"phases": algorithm.phases, "finetune": algorithm.finetune}
    if algorithm.choice is not None:
        tuples |= {f"choice.finetunings[{i}]": finetuning for i, finetuning in enumerate(algorithm.choice.finetunings)}
    for field, phase_tuple in tuples.items():
        where = f"method {algorithm.name!r}: {field}"
        if isinstance(phase_tuple, Phase) or not all(isinstance(phase, Phase) for phase in phase_tuple):
            raise ValueError(f"{where} must be a tuple of Phase, such as (Phase(),), but got {phase_tuple!r}")
        for i, phase in enumerate(phase_tuple):
            _require_phase(phase, net, local_epochs, f"{where}[{i}]")


def _require_phase(phase: Phase, net: Net, local_epochs: int, where: str) -> None:
    least = {"epochs": (phase.length(local_epochs), 0), "steps": (phase.steps, 1), "repeats": (phase.repeats, 1)}
    for name, (value, low) in least.items():
        if value is not None:
            check.integer(f"{where}.{name}", value, low=low)
    check.real(f"{where}.lr", phase.lr, low=0, open_low=True)
    if phase.optimizer is not None and not isinstance(phase.optimizer, Optimizer):
        raise ValueError(f"{where}.optimizer must be an Optimizer, such as optim.sgd(0.1), but got {phase.optimizer!r}")
    if not callable(phase.anchor):
        check.choice(f"{where}.anchor", phase.anchor, ("phase", "download"))
    for layer in phase.layers(net) if phase.layers else ():
        check.choice(f"a layer of {where}", layer, list(nets.layers(net)))


# --- calls of functions of phases: (function, where, parameters that move, *arguments) -> result, or ValueError


def _call_penalty(
    penalty: Callable[[Params, Params], Any], where: str, moves: Sequence[str], params: Params, anchor: Params
) -> Params:
    """Return the gradients of a penalty; if it returns a loss, the gradients of the loss summed over clients."""
    result = penalty(params, anchor)
    if not is_loss(result, params, where):
        return result
    leaves = {name: p.data.requires_grad_(name in moves) for name, p in params.items()}  # as in local training
    with torch.enable_grad():
        loss = penalty(leaves, anchor).sum()
    if not loss.requires_grad:
        raise ValueError(f"{where} returns a loss that does not depend on trained parameters, {list(moves)}")
    moving = [leaves[name] for name in moves]
    return dict(zip(moves, torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True), strict=True))


def is_loss(result: Any, params: Params, where: str) -> bool:
    """Return True if a penalty returned a loss, False if gradients; raise ValueError if neither."""
    if isinstance(result, torch.Tensor):
        clients = len(next(iter(params.values())))
        if tuple(result.shape) not in ((), (clients,)) or not result.is_floating_point():
            raise ValueError(
                f"{where} must return a loss, one number for each client, of shape ({clients},), or their sum, of "
                f"shape (), or a dict of gradients, but got a Tensor of shape {tuple(result.shape)}, {result.dtype}"
            )
        return True
    entries(result, params, where)
    return False


def _call_sample_weights(
    hook: Callable[..., Any],
    where: str,
    _: Sequence[str],
    net: Net,
    params: Params,
    samples: Samples,
    state: AlgorithmState,
) -> Tensor:
    result = hook(net, params, samples, state)
    if not isinstance(result, torch.Tensor) or result.shape[:2] != samples.live.shape:
        actual = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        shape = f"{(*samples.live.shape, ...)}".replace("Ellipsis", "...")
        raise ValueError(f"{where} must return a Tensor (client, sample, ...) = {shape}, but got {actual}")
    return result


def _call_anchor(
    hook: Callable[..., Any], where: str, _: Sequence[str], download: Params, state: AlgorithmState
) -> Params:
    result: Params = hook(download, state)
    clients = len(next(iter(download.values())))
    if not isinstance(result, Mapping) or any(len(p) != clients for p in result.values()):
        is_dict = isinstance(result, Mapping)
        actual = {n: tuple(p.shape) for n, p in result.items()} if is_dict else type(result).__name__
        raise ValueError(
            f"{where} must return a dict of tensors whose first axis is the {clients} clients, but got {actual}"
        )
    return result


def _call_gradient(
    hook: Callable[..., Any], where: str, moves: Sequence[str], gradient: BatchGradient, params: Params, lr: float
) -> Params:
    result = hook(gradient, params, lr)
    every_entry(result, {name: params[name] for name in moves}, where)
    return result


PHASE_CHECKS: dict[str, Callable[..., Any]] = {
    "penalty": _call_penalty,
    "sample_weights": _call_sample_weights,
    "anchor": _call_anchor,
    "gradient": _call_gradient,
}
"""For these fields of a phase: the function that calls the field and validates the result."""
PHASE_UNCHECKED = (
    "epochs", "is_trainable", "on_phase_start", "layers", "lr", "post_step", "steps", "repeats", "optimizer"
)  # fmt: skip
"""Fields of a phase that are no functions, return nothing, or are validated elsewhere."""
