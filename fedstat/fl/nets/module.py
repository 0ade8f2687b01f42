"""Conversion of a ``torch.nn.Module`` to a network of stacked clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from fedstat._utils import check
from fedstat.fl.nets.base import Net, Params, Piece, apply_arguments, layer_of
from fedstat.fl.nets.module_checks import computed_attributes, describe, direct_tensors, require_supported
from fedstat.fl.nets.module_dropout import SEEDS, adapt, draws_alike, noise_shapes
from fedstat.fl.nets.module_layers import is_count, name_tensors, owner_of, to_params
from fedstat.fl.nets.module_stacked import Stacked
from fedstat.fl.nets.module_trial import (
    Pick,
    Trial,
    copied,
    named_tensors,
    picker,
    refuses_single,
    require_computed_anew,
    try_module,
)


def from_module(
    module: nn.Module,
    sample: Tensor | Sequence[int],
    *,
    select: int | str | Callable[[Any], Any] | None = None,
    start: Literal["present", "random"] = "present",
    statistics: Literal["shared", "local"] = "shared",
) -> Net:
    """Convert a user's torch module to a network.

    The module may be of any class whose ``forward`` is a function of its input, its parameters and buffers, all
    float32, and torch's random numbers. It runs client by client, so the networks of :mod:`fedstat.fl.nets` are faster
    for many small clients.

    Random numbers come from the run's named streams, separately for each client, and do not depend on other clients.
    They are off in evaluation. If ``nn.Dropout`` (1d, 2d, 3d) on inputs with samples first is all that draws, every
    dropout has its own stream. Else (functional dropout, dropout of attention and between recurrent layers), each step
    of a client draws from a seed of its own; threads then take turns in the forward pass.

    Parameters
    ----------
    module : torch.nn.Module
        Takes (sample, ...) and returns (sample, output). It is copied, so later changes to it have no effect.
    sample : Tensor or sequence of int
        One sample, or its shape if its values are real. Pass token ids as a tensor of integers.
    select : int, str or callable, optional
        The outputs among what the module returns: position in a tuple, key of a mapping or attribute of an object; or a
        function of what it returns, such as ``lambda out: out[:, -1]`` for the last token's.
    start : {"present", "random"}, default "present"
        "present": every run starts from the module's current parameters. "random": from draws of its layers'
        ``reset_parameters``, different for every seed and every component of :func:`fedstat.fl.algorithms.fedem`.
    statistics : {"shared", "local"}, default "shared"
        Running statistics, such as those of batch normalization, are averaged by the server, or stay with their client.

    Returns
    -------
    Net
        Layers are named conv1, conv2, …, fc1, …, embedding1, … in the order in which ``forward`` uses them, the output
        layer last. A normalization belongs to the layer before it (``"conv2.scale"``) if their sizes are equal;
        otherwise it is a separate layer norm1, …. So does ``nn.PReLU`` (``"conv2.slope"``, or prelu1, …).

        An embedding's units are its dimensions, so its weight is stored transposed, (dimension, word). Recurrent layers
        are lstm1, … (gru1, rnn1), with a weight (unit, gate, input + unit) and a bias (unit, gate, 2), whose rows hold
        all entries of a unit; the other direction is lstm1_reverse. Attention is attention1, … with a weight
        (unit, 3, input) for query, key and value, and project1, … for its outputs. Transposed convolutions are deconv1,
        …, with output channels first. Tensors that give a weight together, as in weight normalization, are
        ``"fc1.weight"`` (directions) and ``"fc1.weight_g"`` (lengths).

        A parameter of a user's class is a layer with its path as name, such as ``"encoder_pos_embed"``: its ``weight``
        if names or shapes tell the axis of units with several weights, else its ``value``. Masks by unit do not divide
        a matrix whose units are unknown. A parameter with several names exists once. An embedding whose weight is the
        output layer's, too, is the output layer. Buffers that training changes are running statistics, other buffers
        constants. Parameters that do not require a gradient are not trained. :func:`fedstat.fl.state_dict` returns the
        module's names and shapes.

    Raises
    ------
    ValueError
        If the module draws random numbers in evaluation or not by torch, has unused parameters, is compiled or wrapped
        (nn.DataParallel), lacks parameters before its first forward pass (lazy layers), does not take the sample, or
        does not return one row of outputs per sample. The message names the part and what to do.

    Examples
    --------
    >>> module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    >>> list(from_module(module, (1, 8, 8)).shapes)
    ['conv1.weight', 'conv1.bias', 'conv1.scale', 'conv1.shift', 'fc1.weight', 'fc1.bias']
    """
    check.choice("start", start, ("present", "random"))
    check.choice("statistics", statistics, ("shared", "local"))
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, but got {type(module).__name__}")
    require_supported(module)
    pick = picker(select)
    if not isinstance(sample, Tensor | Sequence):
        raise ValueError(f"sample must be one sample, or its shape, such as (1, 28, 28), but got {sample!r:.200}")
    sample = sample if isinstance(sample, Tensor) else torch.zeros(tuple(sample))
    original, (module, trial, noise) = module, _controlled(module, sample, pick)
    require_computed_anew(original, sample)
    naming = name_tensors(module, trial)
    if start == "random":
        _require_resettable(original)

    def init(rng: np.random.Generator) -> Params:
        return to_params(naming, _redraw(module, rng) if start == "random" else module)

    shapes = {name: tuple(p.shape) for name, p in to_params(naming, module).items()}
    changed = {piece.name for tensor, piece in naming.pieces.items() if tensor in trial.statistics}
    running = tuple(filter(changed.__contains__, shapes))
    buffers = (*running, *_frozen(module, naming.pieces))
    pieces, duplicate = _all_pieces(module, naming.pieces), refuses_single(module, sample)
    stacked = Stacked(module, naming.pieces, running, pick, tuple(noise), duplicate)
    net = Net(
        shapes,
        init,
        stacked,
        stacked.accumulate,
        buffers=buffers,
        unshared=running if statistics == "local" else (),
        activations=trial.activations,
        noise=noise,
        undivided=naming.undivided,
        pieces=pieces,
        inputs=sample.numel() if sample.is_floating_point() else None,
        by_batch=SEEDS in noise or (trial.by_batch and not buffers),
        fixed=_constants(module, pieces),
    )
    _require_equal(net, to_params(naming, module), module, sample, pick)
    body = _body(module, naming.output, sample, pick, noise)
    if body is None:
        return net
    last = layer_of(next(reversed(shapes)))
    of_head = [name for name in shapes if layer_of(name) == last]
    of_body = {tensor: piece for tensor, piece in naming.pieces.items() if piece.name not in of_head}
    features = Stacked(body, of_body, running, pick, tuple(noise), duplicate)
    return net._replace(features=features, head=partial(_linear, of_head))


def _controlled(module: nn.Module, sample: Tensor, pick: Pick) -> tuple[nn.Module, Trial, dict[str, tuple[int, ...]]]:
    """Copy a module so that the run controls its random numbers; return the copy, its trial and its noise."""
    adapted = copied(module)
    adapt(adapted)
    trial = try_module(adapted, sample, pick)
    if not trial.draws and (noise := noise_shapes(adapted, sample)) is not None:
        return adapted, trial, noise
    return copied(module), try_module(module, sample, pick), {SEEDS: (2,)}


def _frozen(module: nn.Module, pieces: Mapping[str, Piece]) -> tuple[str, ...]:
    """Return the parameters that are not trained; raise ValueError if only some tensors of a parameter are trained."""
    fixed = {tensor for tensor, p in module.named_parameters() if not p.requires_grad}
    frozen = tuple(dict.fromkeys(piece.name for tensor, piece in pieces.items() if tensor in fixed))
    trained = (tensor for tensor, p in module.named_parameters() if p.requires_grad)
    if partly := [tensor for tensor in trained if pieces[tensor].name in frozen]:
        raise ValueError(
            f"{partly[0]} requires a gradient, but other tensors of {pieces[partly[0]].name!r} do not. Set "
            "requires_grad to one value for all weights, and for all biases, of a layer."
        )
    return frozen


def _all_pieces(module: nn.Module, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Return the pieces of tensors by all their names in the module's state_dict, and of counts."""
    by_id = {id(tensor): name for name, tensor in named_tensors(module).items()}
    names = {
        name: by_id[id(tensor)] for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) in by_id
    }
    counts = {name: Piece("") for name in names if is_count(name)}
    return {name: pieces[first] for name, first in names.items() if first in pieces} | counts


def _constants(module: nn.Module, pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """Return the tensors of a module's state_dict that are no pieces: buffers that training does not change."""
    state = module.state_dict()
    return {
        name: state[name] for name, _ in module.named_buffers(remove_duplicate=False) if name in state.keys() - pieces
    }


def _require_resettable(module: nn.Module) -> None:
    """Raise ValueError if ``reset_parameters`` of a part does not draw its parameters."""
    for path, part in module.named_modules():
        is_computed = bool(computed_attributes(part))
        is_trained = any(p.requires_grad for p in part.parameters(recurse=False))
        if parametrize.is_parametrized(part) or (is_trained and (is_computed or _reset_of(part) is None)):
            raise ValueError(
                f"start='random' needs a method reset_parameters that draws the parameters of {describe(path, part)}, "
                "which has none. Write it, or use start='present'."
            )


def _reset_of(part: nn.Module) -> Callable[[], object] | None:
    return getattr(part, "_reset_parameters" if isinstance(part, nn.MultiheadAttention) else "reset_parameters", None)


def _redraw(module: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Copy a module and draw new parameters, except parameters that do not require a gradient."""
    drawn = copied(module)
    with torch.random.fork_rng(devices=[]):  # reset_parameters draws from the global generator
        torch.manual_seed(int(rng.integers(2**62)))
        # Attention also resets its last layer, which is a part of its own.
        for part in sorted(drawn.modules(), key=lambda part: isinstance(part, nn.MultiheadAttention)):
            if direct_tensors(part) and (reset := _reset_of(part)):
                reset()
    for name, p in module.named_parameters():
        if not p.requires_grad:
            drawn.get_parameter(name).data.copy_(p)
    return drawn


def _require_equal(net: Net, params: Params, module: nn.Module, sample: Tensor, pick: Pick) -> None:
    """Raise ValueError unless the network is the module's function at its parameters, and can be differentiated."""
    params = {name: p.unsqueeze(0) for name, p in params.items()}
    sample = sample.float() if sample.is_floating_point() else sample
    x, live = torch.stack([sample, sample]), torch.ones(1, 2, dtype=torch.bool)
    noise = {name: torch.full((1, 2, *shape), 0.5) for name, shape in net.noise.items()}
    into = {name: torch.zeros_like(p) for name, p in params.items() if name not in net.buffers}
    with torch.no_grad():
        expected, outputs = pick(copied(module).float().eval()(x)), net.apply(params, x[None])[0]
    if not torch.allclose(outputs, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ValueError(
            "the module holds parameters outside of its attributes, so that other parameters cannot be put in their "
            "place. Use self.NAME in forward, and no copies of it."
        )
    try:
        net.accumulate(params, x[None], torch.ones_like, into, 0.0, 1.0, **apply_arguments(net, live, noise))  # type: ignore[misc]
    except RuntimeError as error:
        raise ValueError(
            f"the derivative of the module cannot be computed: {error} Remove torch.utils.checkpoint, if it uses it."
        ) from None


def _linear(names: Sequence[str], params: Params, h: Tensor) -> Tensor:
    """Return the outputs (client, sample, output) of a Linear; ``names`` are its weight and, if any, its bias."""
    clients = zip(h.unbind(), *(params[name].unbind() for name in names), strict=True)
    return torch.stack([functional.linear(*arguments) for arguments in clients])


def _body(
    module: nn.Module, output: str, sample: Tensor, pick: Pick, noise: Mapping[str, tuple[int, ...]]
) -> nn.Module | None:
    """Return the module without its last layer, or None unless that is a Linear that only maps the body's outputs."""
    path, _ = owner_of(output)
    last = module.get_submodule(path)
    if not path or not isinstance(last, nn.Linear) or output != f"{path}.weight":
        return None
    body, complete = copied(module).eval(), copied(module).eval()
    body.set_submodule(path, nn.Identity())
    x = torch.stack([sample, sample])
    with torch.no_grad():
        expected = pick(complete(x))
        try:
            features = pick(body(x))
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return None  # forward reads attributes of the last layer, or another layer has its weight
    fits = isinstance(features, Tensor) and features.shape == (2, last.in_features)
    if not fits or not torch.equal(last(features), expected):
        return None
    if SEEDS in noise:
        return body if draws_alike(body, complete, x) else None
    return body if noise_shapes(body, sample) == noise else None  # no dropout after the last layer
