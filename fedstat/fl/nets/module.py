"""Conversion of a ``torch.nn.Module`` to a network of stacked clients."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedstat._utils import check
from fedstat.fl.nets.base import Net, Params, Piece, is_statistic, layer_of
from fedstat.fl.nets.conv import channels_last, conv2d
from fedstat.fl.nets.module_checks import (
    CONVOLUTIONS,
    NORMS,
    conversion_hint,
    describe,
    direct_tensors,
    require_complete,
    require_supported,
)

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_CELLS = {nn.LSTMCell: "lstm", nn.GRUCell: "gru", nn.RNNCell: "rnn"}


class _FreshWeights(nn.Module):
    """Mixin of recurrent layers, which also list their weights: ``forward`` renews the list from the attributes."""

    def forward(self, *inputs: Any) -> Any:
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]  # type: ignore[union-attr]
        return super().forward(*inputs)


class _LSTM(_FreshWeights, nn.LSTM): ...


class _GRU(_FreshWeights, nn.GRU): ...


class _RNN(_FreshWeights, nn.RNN): ...


_LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: _LSTM, nn.GRU: _GRU, nn.RNN: _RNN}
_PART_KINDS: dict[type[nn.Module], str] = {_LSTM: "lstm", _GRU: "gru", _RNN: "rnn", **_CELLS}


class Draws:
    """Uniform draws of all dropouts of a module, in the order of their calls.

    Attributes
    ----------
    queue : iterator of Tensor (sample, ...), optional
        Uniform draws; None: nothing is dropped.
    shapes : list of tuple of int, optional
        If it is a list, every call appends the shape of its draws, samples first.
    """

    def __init__(self) -> None:
        self.queue: Iterator[Tensor] | None = None
        self.shapes: list[tuple[int, ...]] | None = None


class Dropout(nn.Module):
    """Dropout that retains entries whose draw is at least p."""

    def __init__(self, p: float, by_channel: bool, draws: Draws) -> None:
        super().__init__()
        self.p, self.by_channel, self.draws = p, by_channel, draws

    def forward(self, x: Tensor) -> Tensor:
        """Multiply retained entries by 1/(1 − p), as torch does; in evaluation, return ``x``."""
        if self.draws.shapes is not None:
            shape = tuple(x.shape)
            self.draws.shapes.append((*shape[:2], *(1,) * (len(shape) - 2)) if self.by_channel else shape)
        if self.draws.queue is None:
            return x
        is_retained = next(self.draws.queue) >= self.p
        return x * is_retained * (1 / (1 - self.p) if self.p < 1 else 0.0)


def adapt(module: nn.Module) -> Draws:
    """Replace recurrent layers and dropouts of a module by this module's classes, in place; return the draws.

    Raises
    ------
    ValueError
        If a recurrent layer has two directions, projections or dropout.
    """
    draws = Draws()
    for path, part in [*module.named_modules()]:
        description = describe(path, part)
        if isinstance(part, nn.RNNBase):
            if type(part) not in _LAYERS:
                raise ValueError(f"{description} must be nn.LSTM, nn.GRU or nn.RNN, not a class derived from these")
            if part.bidirectional or part.proj_size or part.dropout:
                raise ValueError(
                    f"{description} must have bidirectional=False, proj_size=0 and dropout=0, but does not. For "
                    "dropout between layers, write two layers with an nn.Dropout between them."
                )
            part.__class__ = _LAYERS[type(part)]  # type: ignore[assignment]
        elif type(part) in DROPOUTS:
            if not path:
                raise ValueError("the module is only a dropout, which has no parameters to train")
            module.set_submodule(path, Dropout(part.p, not isinstance(part, nn.Dropout), draws))
    return draws


def is_recurrent(part: nn.Module) -> bool:
    """Return True for recurrent modules, which :func:`recurrent_pieces` takes."""
    return type(part) in _PART_KINDS


def recurrent_pieces(part: nn.Module, number: int) -> dict[str, Piece]:
    """Assign the tensors of a recurrent module to the layers "lstm1", "lstm2", ..., counted from ``number``.

    One row of a layer's weight (unit, gate, input + unit) and bias (unit, gate, 2) holds all entries of a unit, so that
    one boolean covers its gates. The last axis of the bias holds torch's two biases.
    """
    kind = _PART_KINDS[type(part)]
    pieces: dict[str, Piece] = {}
    hidden, layers = part.hidden_size, getattr(part, "num_layers", 1)
    for i in range(layers):
        suffix, n_in = (f"_l{i}" if isinstance(part, nn.RNNBase) else ""), hidden if i else part.input_size
        weight, bias = (f"{kind}{number + i}.{name}" for name in ("weight", "bias"))
        pieces |= {
            f"weight_ih{suffix}": Piece(weight, "gates", 0, n_in),  # type: ignore[arg-type]
            f"weight_hh{suffix}": Piece(weight, "gates", n_in, n_in + hidden),  # type: ignore[operator, arg-type]
        }
        if part.bias:
            pieces |= {f"bias_ih{suffix}": Piece(bias, "gates", 0), f"bias_hh{suffix}": Piece(bias, "gates", 1)}
    return pieces


def kind_of(part: nn.Module) -> str:
    """Return the name of a recurrent module's layers, without number."""
    return _PART_KINDS[type(part)]


def to_params(pieces: dict[str, Piece], module: nn.Module) -> Params:
    """Join the tensors of a module to the parameters of one client."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    parts: dict[str, list[Tensor]] = {}
    for tensor_name, piece in pieces.items():
        tensor = tensors[tensor_name].detach()
        if piece.way == "gates":
            tensor = tensor.unflatten(0, (GATES[layer_of(piece.name).rstrip("0123456789")], -1)).transpose(0, 1)
            tensor = tensor.unsqueeze(-1) if piece.high is None else tensor
        parts.setdefault(piece.name, []).append(tensor.mT if piece.way == "transposed" else tensor)
    return {name: (torch.cat(p, -1) if len(p) > 1 else p[0]).float().clone() for name, p in parts.items()}


_KINDS = {"weight": "scale", "bias": "shift"}


def from_module(
    module: nn.Module,
    sample: Tensor | Sequence[int],
    *,
    start: Literal["present", "random"] = "present",
    statistics: Literal["shared", "local"] = "shared",
) -> Net:
    """Convert a user's torch module to a network.

    The module may be of any class. Its parameters, all float32, must belong to convolutions, Linear, Embedding, LSTM,
    GRU, RNN and their cells, or batch, group or layer normalization. Its ``forward`` must be a function of its input
    and these parameters alone. ``nn.Dropout`` (1d, 2d, 3d) is allowed: it draws from the run's named streams,
    separately for each client, and is off in evaluation. Clients are computed one by one, so the networks of
    :mod:`fedstat.fl.nets` are faster for many small clients.

    Parameters
    ----------
    module : torch.nn.Module
        Takes (sample, ...) and returns (sample, output). It is copied, so later changes to it have no effect.
    sample : Tensor or sequence of int
        One sample, or its shape if its values are real. Pass token ids as a tensor of integers.
    start : {"present", "random"}, default "present"
        "present": every run starts from the module's current parameters. "random": from draws of its layers'
        ``reset_parameters``, different for every seed and every component of :func:`fedstat.fl.algorithms.fedem`.
    statistics : {"shared", "local"}, default "shared"
        Running statistics of batch normalization are averaged by the server, or stay with their client.

    Returns
    -------
    Net
        Layers are named conv1, conv2, …, fc1, …, embedding1, … in the order in which ``forward`` uses them. A
        normalization belongs to the layer before it (``"conv2.scale"``) if their sizes are equal; otherwise it is a
        separate layer norm1, …. An embedding's units are its dimensions, so its weight is stored transposed,
        (dimension, word). Recurrent layers are lstm1, … (gru1, rnn1), with a weight (unit, gate, input + unit) and a
        bias (unit, gate, 2), whose rows hold all entries of a unit. Parameters that do not require a gradient are not
        trained. :func:`fedstat.fl.state_dict` returns the module's names and shapes.

    Raises
    ------
    ValueError
        If the module has parts that cannot be stacked (other random parts, tied or unused parameters, pruned or
        normalized weights, wrappers such as nn.DataParallel), lacks parameters before its first forward pass (lazy
        layers), does not take the sample, or does not return one row of outputs per sample.

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
    module = copy.deepcopy(module)
    draws = adapt(module)
    sample = sample if isinstance(sample, Tensor) else torch.zeros(tuple(sample))
    order, outputs = _trial(module, sample)
    pieces, noise = _assign_pieces(order), _noise_shapes(module, sample, draws)

    def init(rng: np.random.Generator) -> Params:
        return to_params(pieces, _redraw(module, rng) if start == "random" else module)

    shapes = {name: tuple(p.shape) for name, p in to_params(pieces, module).items()}
    last = next(reversed(shapes))
    path = next(tensor for tensor, piece in pieces.items() if piece.name == last).rpartition(".")[0]
    _require_last(last, path, shapes[last][0], outputs)
    running, duplicate = tuple(filter(is_statistic, shapes)), _refuses_single(module, sample)
    net = Net(
        shapes,
        init,
        _Stacked(module, pieces, tuple(noise), duplicate),
        buffers=(*running, *_frozen(module, pieces)),
        unshared=running if statistics == "local" else (),
        noise=noise,
        pieces=pieces | _counts(module, order),
    )
    body = _body(module, path, sample, noise)
    if body is None:
        return net
    of_head = [name for name in shapes if layer_of(name) == layer_of(last)]
    of_body = {tensor: piece for tensor, piece in pieces.items() if piece.name not in of_head}
    return net._replace(features=_Stacked(body, of_body, tuple(noise), duplicate), head=partial(_linear, of_head))


class _SafeConvolutions(TorchFunctionMode):
    """Compute convolutions of images by :func:`fedstat.fl.nets.conv.conv2d` instead of torch's function."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (conv2d if function is torch.conv2d else function)(*args, **kwargs or {})


class _Stacked:
    """A module as a function of the parameters of all clients, computed one by one.

    Parameters
    ----------
    module : torch.nn.Module
        It is copied.
    pieces : mapping from str to Piece
        Parameters of the module's tensors.
    noise : sequence of str
        Names of the draws of its dropouts, in the order of their calls.
    duplicate : bool
        True: a single sample is duplicated in training.
    """

    def __init__(self, module: nn.Module, pieces: dict[str, Piece], noise: Sequence[str], duplicate: bool) -> None:
        self._empty = copy.deepcopy(module).to("meta")
        self._pieces, self._noise, self._duplicate = pieces, noise, duplicate
        self._names = dict.fromkeys(piece.name for piece in pieces.values())
        self._of_thread = threading.local()
        convolutions = (part for part in module.modules() if isinstance(part, nn.Conv2d))
        is_strided = any(c.kernel_size == (1, 1) and max(c.stride) > 1 for c in convolutions)
        self._context = _SafeConvolutions if is_strided else nullcontext

    def __call__(
        self, params: Params, x: Tensor, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        # functional_call puts tensors into the module while it runs, so every thread needs a separate module.
        if not hasattr(self._of_thread, "module"):
            self._of_thread.module = copy.deepcopy(self._empty)
        module = self._of_thread.module
        module.train(live is not None)
        parts = {name: _by_client(name, params[name]) for name in self._names}

        def of_client(c: int) -> Tensor:
            tensors = {tensor: piece.of(parts[piece.name][c]) for tensor, piece in self._pieces.items()}
            real = None if live is None or bool(live[c].all()) else live[c]
            draws = [] if noise is None else [noise[name][c] for name in self._noise]
            duplicate = self._duplicate and live is not None
            return _forward(module, tensors, x[c], real, duplicate=duplicate, noise=draws)

        with self._context():
            return torch.stack([of_client(c) for c in range(len(x))])


def _linear(names: Sequence[str], params: Params, h: Tensor) -> Tensor:
    """Return the outputs (client, sample, output) of a Linear; ``names`` are its weight and, if any, its bias."""
    clients = zip(h.unbind(), *(params[name].unbind() for name in names), strict=True)
    return torch.stack([functional.linear(*arguments) for arguments in clients])


def _require_last(name: str, path: str, units: int, outputs: int) -> None:
    """Raise ValueError unless the last layer has the units of the outputs."""
    if units != outputs:
        raise ValueError(
            f"the last layer that the module uses must be its output layer, but it returns {outputs} outputs and "
            f"{layer_of(name)} ({path}) has {units} units"
        )


def _body(module: nn.Module, path: str, sample: Tensor, noise: Mapping[str, tuple[int, ...]]) -> nn.Module | None:
    """Return the module without its last layer, or None unless that is a Linear that only maps the body's outputs."""
    last = module.get_submodule(path)
    if not path or not isinstance(last, nn.Linear):
        return None
    body, complete = copy.deepcopy(module).eval(), copy.deepcopy(module).eval()
    body.set_submodule(path, nn.Identity())
    x = torch.stack([sample, sample])
    with torch.no_grad():
        expected = complete(x)
        try:
            features = body(x)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return None  # forward reads attributes of the last layer
    fits = isinstance(features, Tensor) and features.shape == (2, last.in_features)
    if not fits or not torch.equal(last(features), expected):
        return None
    return body if _noise_shapes(body, sample, _draws(body)) == noise else None  # no dropout after the last layer


def _redraw(module: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Copy a module and draw new parameters, except parameters that do not require a gradient."""
    drawn = copy.deepcopy(module)
    with torch.random.fork_rng(devices=[]):  # reset_parameters draws from the global generator
        torch.manual_seed(int(rng.integers(2**62)))
        for part in drawn.modules():
            if direct_tensors(part):
                part.reset_parameters()  # type: ignore[operator]
    for name, p in module.named_parameters():
        if not p.requires_grad:
            drawn.get_parameter(name).data.copy_(p)
    return drawn


def _forward(
    module: nn.Module,
    tensors: dict[str, Tensor],
    x: Tensor,
    live: Tensor | None,
    *,
    duplicate: bool,
    noise: Sequence[Tensor],
) -> Tensor:
    """Return the outputs of one client, 0 for padding (``live`` False); ``duplicate`` repeats a single sample."""
    if x.is_floating_point():
        x = x.to(next(iter(tensors.values())).dtype)
    if x.ndim == 4 and x.is_floating_point():
        x = channels_last(x)

    def real_rows(rows: Tensor) -> Tensor:
        real = rows if live is None else rows[live]
        return torch.cat([real, real]) if duplicate and len(real) == 1 else real

    real = real_rows(x)
    if noise:
        _draws(module).queue = iter([real_rows(u) for u in noise])
    try:
        out = functional_call(module, tensors, (real,))[: len(x) if live is None else int(live.sum())]
    finally:
        if noise:
            _draws(module).queue = None
    return out if live is None else out.new_zeros(len(x), *out.shape[1:]).index_put((live.nonzero()[:, 0],), out)


def _by_client(name: str, p: Tensor) -> Sequence[Tensor]:
    """Return every client's part of a parameter.

    A statistic's parts have separate version counts (``.data``), so that an update of one client's statistic does not
    count as a change of the others'.
    """
    return [client.data for client in p.unbind()] if is_statistic(name) else p.unbind()


def _trial(module: nn.Module, sample: Tensor) -> tuple[list[tuple[str, nn.Module]], int]:
    """Run a module on two copies of the sample; return the parts with parameters in call order, and the outputs."""
    runner = copy.deepcopy(module).train()
    holders = {
        path: part for path, part in runner.named_modules() if next(part.parameters(recurse=False), None) is not None
    }
    order: list[tuple[str, nn.Module]] = []

    def note(path: str, part: nn.Module) -> None:
        if all(path != earlier for earlier, _ in order):
            order.append((path, part))

    hooks = [
        part.register_forward_pre_hook(lambda part, _, path=path: note(path, part)) for path, part in holders.items()
    ]
    x = torch.stack([sample, sample])
    if x.is_floating_point():
        x = x + torch.linspace(0, 1, x.numel()).view(x.shape).to(x)  # random parts may have no effect on zeros
    try:
        with torch.no_grad():
            first, second = runner(x), runner(x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = conversion_hint(module, sample) or error
        raise ValueError(f"the module does not take samples of shape {tuple(sample.shape)}: {reason}") from None
    finally:
        for hook in hooks:
            hook.remove()
    require_complete(module, runner)
    if not isinstance(first, Tensor) or first.ndim != 2 or len(first) != 2:
        actual = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(f"the module must return (sample, output), but returned {actual} for 2 samples")
    if not torch.equal(first, second):
        raise ValueError(
            "the module must be a function of its input, but it gave two outputs for one input. "
            "Write functional dropout as nn.Dropout modules, and remove other random parts of its forward."
        )
    if unused := sorted(set(holders) - {path for path, _ in order}):
        raise ValueError(f"the module does not use {unused[0]} on such samples. Remove it.")
    if not order:
        raise ValueError("the module has no parameters to train")
    return order, first.shape[1]


def _refuses_single(module: nn.Module, sample: Tensor) -> bool:
    """Return True if torch refuses a single sample in training, as batch normalization of one value per channel."""
    try:
        with torch.no_grad():
            copy.deepcopy(module).train()(sample.unsqueeze(0))
    except ValueError:
        return True
    return False


def _assign_pieces(order: list[tuple[str, nn.Module]]) -> dict[str, Piece]:
    """Assign the tensors of the module, by their names in it, to parameters of layers."""
    pieces: dict[str, Piece] = {}
    count: Counter[str] = Counter()
    previous = ""  # the last layer, unless its outputs are normalized already
    units = 0
    for path, part in order:
        tensors = {n: t for n, t in direct_tensors(part).items() if n != "num_batches_tracked"}
        size = next(iter(tensors.values())).shape[0]
        if is_recurrent(part):
            kind = kind_of(part)
            of_part = recurrent_pieces(part, count[kind] + 1)
            count[kind] += len({layer_of(piece.name) for piece in of_part.values()})
            previous, units = f"{kind}{count[kind]}", int(part.hidden_size)  # type: ignore[arg-type]
        elif isinstance(part, NORMS):
            layer = previous if previous and size == units else _next(count, "norm")
            of_part, previous = {n: Piece(f"{layer}.{_KINDS.get(n, n)}") for n in tensors}, ""
        else:
            embedding = isinstance(part, nn.Embedding)
            layer = _next(count, "embedding" if embedding else "conv" if isinstance(part, CONVOLUTIONS) else "fc")
            units = part.embedding_dim if isinstance(part, nn.Embedding) else size
            of_part, previous = {n: Piece(f"{layer}.{n}", "transposed" if embedding else "") for n in tensors}, layer
        pieces |= {f"{path}.{n}" if path else n: piece for n, piece in of_part.items()}
    return pieces


def _counts(module: nn.Module, order: list[tuple[str, nn.Module]]) -> dict[str, Piece]:
    """Return the counts of batches, which normalization with a momentum does not use."""
    buffers = {name for name, _ in module.named_buffers()}
    names = (f"{path}.num_batches_tracked" if path else "num_batches_tracked" for path, _ in order)
    return {name: Piece("") for name in names if name in buffers}


def _frozen(module: nn.Module, pieces: dict[str, Piece]) -> tuple[str, ...]:
    """Return the parameters that are not trained; raise ValueError if only some tensors of a parameter are trained."""
    fixed = {tensor for tensor, p in module.named_parameters() if not p.requires_grad}
    frozen = tuple(dict.fromkeys(piece.name for tensor, piece in pieces.items() if tensor in fixed))
    for tensor, piece in pieces.items():
        if piece.name in frozen and tensor not in fixed:
            raise ValueError(
                f"{tensor} requires a gradient, but other tensors of {piece.name!r} do not. Set requires_grad to one "
                "value for all weights, and for all biases, of a recurrent layer."
            )
    return frozen


def _draws(module: nn.Module) -> Draws:
    """Return the draws of a module's dropouts; new, unused draws if the module has no dropouts."""
    return next((part.draws for part in module.modules() if isinstance(part, Dropout)), Draws())


def _noise_shapes(module: nn.Module, sample: Tensor, draws: Draws) -> dict[str, tuple[int, ...]]:
    """Return names and one sample's shapes of the dropouts' draws, in the order of their calls."""
    shapes = []
    for n in (2, 3):
        draws.shapes = []
        with torch.no_grad():
            module.eval()(torch.stack([sample] * n))
        shapes.append(draws.shapes)
    draws.shapes = None
    if any((a[0], b[0]) != (2, 3) or a[1:] != b[1:] for a, b in zip(*shapes, strict=True)):
        raise ValueError(
            f"a dropout of the module gets inputs of shapes {shapes[0]} for 2 samples and {shapes[1]} for 3. Their "
            "first axis must be the samples, and the other axes must not change."
        )
    return {f"dropout{i}": shape[1:] or (1,) for i, shape in enumerate(shapes[0], 1)}


def _next(count: Counter[str], kind: str) -> str:
    count[kind] += 1
    return f"{kind}{count[kind]}"
