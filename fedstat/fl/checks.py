"""Checks of what functions of users return: tensors by name, and the results of an algorithm's hooks."""

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


def entries(found: Any, expected: Params, where: str) -> None:
    """ValueError unless ``found`` holds tensors of some of the expected names, in their shapes."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} must return a dict of tensors by name, but got {type(found).__name__}")
    for name, value in found.items():
        if name not in expected:
            hint = check.did_you_mean(name, expected)
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


@contextmanager
def unchanged(given: Any, where: str) -> Iterator[None]:
    """Raise ValueError if a hook changes in place what it gets, which is the run's own."""
    parts: list[tuple[str, Mapping[str, Tensor]]] = []
    if isinstance(given, RoundContext):
        parts = [("context.after[{!r}]", given.after), ("context.global_params[{!r}]", given.global_params)]
        parts.append(("context.state.server[{!r}]", given.state.server))
    elif isinstance(given, DownloadContext):
        parts = [("the server's {!r}", given.global_params), ("the server's {!r}", given.state.server)]
    tensors = [(text.format(name), p, p._version) for text, of in parts for name, p in of.items()]
    clients = given.clients.copy() if isinstance(given, RoundContext) else None
    yield
    if isinstance(given, RoundContext):  # made by this hook, perhaps
        before = vars(given).get("before", {})
        tensors += [(f"context.before[{name!r}]", p, given._versions[name]) for name, p in before.items()]
    changed = [f"{name}, of shape {tuple(p.shape)}," for name, p, was in tensors if p._version != was]
    if clients is not None and (given.clients != clients).any():
        changed.append("context.clients")
    if changed:
        raise ValueError(f"{where} changes {changed[0]} in place. Return new values: what is given is the run's own.")


@contextmanager
def known(net: Net, where: str) -> Iterator[None]:
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


# --- what hooks may return: (found, where, *given) -> found, or ValueError


def instance(kind: type, found: Any, where: str, *_: Any, hint: str = "") -> Any:
    """Require an instance of a class."""
    if not isinstance(found, kind):
        article = "an" if kind.__name__.startswith("A") else "a"
        raise ValueError(f"{where} must return {article} {kind.__name__}{hint}, but got {type(found).__name__}")
    return found


def parameter_names(found: Any, where: str, net: Net) -> Sequence[str]:
    """Require names of parameters."""
    if unknown := [name for name in found if name not in net.shapes]:
        raise ValueError(
            f"{where} names {unknown}, but the names are {[*net.shapes]}.{check.did_you_mean(unknown[0], net.shapes)}"
        )
    return found


def mixing_matrix(found: Any, where: str, context: RoundContext) -> Tensor:
    """Require a finite matrix (active, active)."""
    n = len(context.clients)
    every_entry({"matrix": found}, {"matrix": torch.empty(n, n, device=context.weights.device)}, where)
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"{where} must return finite weights, but row(s) of the matrix are not")
    return found


def encoded(found: Any, where: str, context: RoundContext, *, mask: SharedMask) -> Params:
    """Require values of all active clients, and only of parameters with shared entries."""
    entries(found, context.after, where)
    for name in found:
        if not bool(mask.shared[name].any()):
            raise ValueError(
                f"{where} returns {name!r}, of shape {tuple(context.global_params[name].shape)}, but no entry of it is "
                "shared: nobody would receive it. Share it, or leave it out."
            )
    return found


def weights(
    found: Any, where: str, _: np.ndarray, active: np.ndarray, __: int, *, device: torch.device | str
) -> Tensor:
    """Require weights (active,) of a mean, and return them as a float32 Tensor."""
    try:
        given = torch.as_tensor(found, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{where} must return numbers, but got {found!r}") from None
    if tuple(given.shape) != (len(active),):
        raise ValueError(
            f"{where} must have shape ({len(active)},), one for each active client, but got {(*given.shape,)}"
        )
    low, total = float(given.min()), float(given.sum(dtype=torch.float64))
    if not low >= 0 or not total <= 1 + 1e-5:  # also true for NaN
        raise ValueError(
            f"{where} must be at least 0 and sum to at most 1 (the server's copy gets the rest), but the smallest is "
            f"{low:g} and the sum {total:g}"
        )
    return given


def initial_state(found: Any, where: str, context: InitContext) -> AlgorithmState:
    """Require a state of tensors; the first axis of the clients' part is the clients."""
    instance(AlgorithmState, found, where, hint="(clients, server)")
    for name, value in found.server.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{where} must give the server's {name!r} as a Tensor, but got {type(value).__name__}")
    for name, value in found.clients.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != len(context.sizes):
            seen = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"{where} must give clients' {name!r} as a Tensor whose first axis is the {len(context.sizes)} "
                f"clients, but got {seen}"
            )
    return found


def updated_state(found: Any, where: str, context: RoundContext) -> AlgorithmState:
    """Require a state with the names and shapes of the one before."""
    instance(AlgorithmState, found, where, hint="(clients, server)")
    for part in ("clients", "server"):
        new, old = getattr(found, part), getattr(context.state, part)
        entries(new, old, f"{where}, {part}")
        if missing := [name for name in old if name not in new]:
            raise ValueError(f"{where}, {part}, lacks {missing}: return all of the state, changed or not")
    return found


def downloaded(found: Any, where: str, context: DownloadContext) -> Params:
    """Require parameters of the clients that download."""
    entries(found, context.client_params, where)
    return found


def measured(found: Any, where: str, context: RoundContext, *, measure: Measure) -> Any:
    """Require a measure in the shape of its dims."""
    of_clients = dict.fromkeys(("client", "other"), len(context.clients))
    sizes = {"layer": len(nets.layers(context.net)), **measure.sizes, **of_clients}
    shape, seen = tuple(sizes[dim] for dim in measure.dims), tuple(getattr(found, "shape", ()))
    if seen != shape:
        raise ValueError(f"{where} must have shape {shape}, but got {seen}")
    return found


def downloads(found: Any, where: str, context: RoundContext) -> np.ndarray:
    """Require numbers (active,) of models, and return them as an array."""
    given, n = np.asarray(found), len(context.clients)
    if given.shape != (n,) or given.dtype.kind not in "iu" or (given < 0).any():
        raise ValueError(f"{where} must return an integer >= 0 for each of {n} active clients, but got {found!r}")
    return given


# --- phases


def phases_checked(phases: Sequence[Phase], net: Net, method: str) -> tuple[Phase, ...]:
    """Return the phases of a method with checks of what their functions return, by :data:`PHASE_CHECKS`.

    Penalties return gradients.
    """
    return tuple(_checked(phase, net, f"method {method!r}: a phase's") for phase in phases)


def _checked(phase: Phase, net: Net, where: str) -> Phase:
    hooks = {name: hook for name in PHASE_CHECKS if callable(hook := getattr(phase, name))}
    moves = phase.moves(net) if hooks else []
    checked: Any = {name: partial(PHASE_CHECKS[name], hook, f"{where} {name}", moves) for name, hook in hooks.items()}
    return phase._replace(**checked)


def phases(algorithm: Algorithm, net: Net, local_epochs: int) -> None:
    """ValueError unless every stretch of training that the algorithm has is one."""
    several = {"phases": algorithm.phases, "finetune": algorithm.finetune}
    if algorithm.choice is not None:
        several |= {f"choice.finetunings[{i}]": one for i, one in enumerate(algorithm.choice.finetunings)}
    for of, given in several.items():
        where = f"method {algorithm.name!r}: {of}"
        if isinstance(given, Phase) or not all(isinstance(phase, Phase) for phase in given):
            raise ValueError(f"{where} must be a tuple of Phase, such as (Phase(),), but got {given!r}")
        for i, phase in enumerate(given):
            _phase(phase, net, local_epochs, f"{where}[{i}]")


def _phase(phase: Phase, net: Net, local_epochs: int, where: str) -> None:
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


# --- what functions of phases may return: (function, where, what moves, *given) -> found, or ValueError


def _gradients(
    penalty: Callable[[Params, Params], Any], where: str, moves: Sequence[str], now: Params, anchor: Params
) -> Params:
    """Return the gradients of a penalty; if it returns a loss, the gradients of the loss summed over clients."""
    found = penalty(now, anchor)
    if not is_loss(found, now, where):
        return found
    leaves = {name: p.data.requires_grad_(name in moves) for name, p in now.items()}  # as in local training
    with torch.enable_grad():
        loss = penalty(leaves, anchor).sum()
    if not loss.requires_grad:
        raise ValueError(f"{where} returns a loss that does not depend on what trains, {list(moves)}")
    moving = [leaves[name] for name in moves]
    return dict(zip(moves, torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True), strict=True))


def is_loss(found: Any, params: Params, where: str) -> bool:
    """Return True if a penalty returned a loss, False if gradients; raise ValueError if neither."""
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


def _weighted(
    hook: Callable[..., Any],
    where: str,
    _: Sequence[str],
    net: Net,
    params: Params,
    given: Samples,
    state: AlgorithmState,
) -> Tensor | None:
    found = hook(net, params, given, state)
    if found is not None and (not isinstance(found, torch.Tensor) or found.shape[:2] != given.live.shape):
        seen = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        shape = f"{(*given.live.shape, ...)}".replace("Ellipsis", "...")
        raise ValueError(f"{where} must return a Tensor (client, sample, ...) = {shape}, but got {seen}")
    return found


def _anchored(
    hook: Callable[..., Any], where: str, _: Sequence[str], download: Params, state: AlgorithmState
) -> Params:
    found: Params = hook(download, state)
    clients = len(next(iter(download.values())))
    if not isinstance(found, Mapping) or any(len(p) != clients for p in found.values()):
        seen = {n: tuple(p.shape) for n, p in found.items()} if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(
            f"{where} must return a dict of tensors whose first axis is the {clients} clients, but got {seen}"
        )
    return found


def _gradient(
    hook: Callable[..., Any], where: str, moves: Sequence[str], gradient: BatchGradient, params: Params, lr: float
) -> Params:
    found = hook(gradient, params, lr)
    every_entry(found, {name: params[name] for name in moves}, where)
    return found


PHASE_CHECKS: dict[str, Callable[..., Any]] = {
    "penalty": _gradients,
    "sample_weights": _weighted,
    "anchor": _anchored,
    "gradient": _gradient,
}
"""For each such field of a phase: the function that calls it and checks the result."""
PHASE_UNCHECKED = ("epochs", "is_trainable", "layers", "lr", "post_step", "steps", "repeats", "optimizer")
"""Fields of a phase that are no functions, or whose results are checked elsewhere or are none."""
