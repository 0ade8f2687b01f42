"""A ``torch.nn.Module`` as a network of stacked clients."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedstat._utils import check
from fedstat.fl.nets.base import Net, Params, Piece, is_statistic, layer_of
from fedstat.fl.nets.conv import channels_last

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_CELLS = {nn.LSTMCell: "lstm", nn.GRUCell: "gru", nn.RNNCell: "rnn"}


class _Anew(nn.Module):
    """Mixin of recurrent layers, which hold their weights in a list too: it is made anew from what is in place."""

    def forward(self, *given: Any) -> Any:
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]  # type: ignore[union-attr]
        return super().forward(*given)


class _LSTM(_Anew, nn.LSTM): ...


class _GRU(_Anew, nn.GRU): ...


class _RNN(_Anew, nn.RNN): ...


_LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: _LSTM, nn.GRU: _GRU, nn.RNN: _RNN}
_PART_KINDS: dict[type[nn.Module], str] = {_LSTM: "lstm", _GRU: "gru", _RNN: "rnn", **_CELLS}


class Draws:
    """Where the dropouts of one module find their draws, in the order of their calls.

    Attributes
    ----------
    queue : iterator of Tensor (sample, ...), optional
        Uniform draws; None: nothing is dropped.
    seen : list of tuple of int, optional
        Where every call notes the shape that it would need, with its samples.
    """

    def __init__(self) -> None:
        self.queue: Iterator[Tensor] | None = None
        self.seen: list[tuple[int, ...]] | None = None


class Dropout(nn.Module):
    """Dropout that keeps what has a draw of at least p."""

    def __init__(self, p: float, by_channel: bool, draws: Draws) -> None:
        super().__init__()
        self.p, self.by_channel, self.draws = p, by_channel, draws

    def forward(self, x: Tensor) -> Tensor:
        """Multiply what is kept by 1/(1 − p), as torch does; in evaluation, return ``x``."""
        if self.draws.seen is not None:
            shape = tuple(x.shape)
            self.draws.seen.append((*shape[:2], *(1,) * (len(shape) - 2)) if self.by_channel else shape)
        if self.draws.queue is None:
            return x
        kept = next(self.draws.queue) >= self.p
        return x * kept * (1 / (1 - self.p) if self.p < 1 else 0.0)


def adapted(module: nn.Module) -> Draws:
    """Give recurrent layers and dropouts of a module their other form, in place; return the draws of its dropouts.

    Raises
    ------
    ValueError
        If a recurrent layer has two directions, projections or dropout of its own.
    """
    draws = Draws()
    for path, part in [*module.named_modules()]:
        what = f"{path or 'the module itself'} ({type(part).__name__})"
        if isinstance(part, nn.RNNBase):
            if type(part) not in _LAYERS:
                raise ValueError(f"{what} must be an nn.LSTM, nn.GRU or nn.RNN itself, not a class made from it")
            if part.bidirectional or part.proj_size or part.dropout:
                raise ValueError(
                    f"{what} must have bidirectional=False, proj_size=0 and dropout=0, but does not. Dropout between "
                    "layers: write two layers with an nn.Dropout between them."
                )
            part.__class__ = _LAYERS[type(part)]  # type: ignore[assignment]
        elif type(part) in DROPOUTS:
            own = Dropout(part.p, not isinstance(part, nn.Dropout), draws)
            if not path:
                raise ValueError("the module is a dropout alone and has no parameters to train")
            module.set_submodule(path, own)
    return draws


def is_recurrent(part: nn.Module) -> bool:
    """Whether a module is one of the recurrent ones that :func:`recurrent_pieces` takes."""
    return type(part) in _PART_KINDS


def recurrent_pieces(part: nn.Module, number: int) -> dict[str, Piece]:
    """Tensors of a recurrent module, in layers of their own: "lstm1", "lstm2", ... from ``number``.

    A layer's weight (unit, gate, input + unit) and bias (unit, gate, 2) hold all of one unit in a row, so that one
    boolean covers its gates; the bias has torch's two in its last axis.
    """
    kind = _PART_KINDS[type(part)]
    found: dict[str, Piece] = {}
    hidden, layers = part.hidden_size, getattr(part, "num_layers", 1)
    for i in range(layers):
        end, n_in = (f"_l{i}" if isinstance(part, nn.RNNBase) else ""), hidden if i else part.input_size
        weight, bias = (f"{kind}{number + i}.{name}" for name in ("weight", "bias"))
        found |= {
            f"weight_ih{end}": Piece(weight, "gates", 0, n_in),  # type: ignore[arg-type]
            f"weight_hh{end}": Piece(weight, "gates", n_in, n_in + hidden),  # type: ignore[operator, arg-type]
        }
        if part.bias:
            found |= {f"bias_ih{end}": Piece(bias, "gates", 0), f"bias_hh{end}": Piece(bias, "gates", 1)}
    return found


def kind_of(part: nn.Module) -> str:
    """Name of a recurrent module's layers, without number."""
    return _PART_KINDS[type(part)]


def assembled(named: dict[str, Piece], module: nn.Module) -> Params:
    """Parameters of one client from the tensors of a module."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    parts: dict[str, list[Tensor]] = {}
    for theirs, piece in named.items():
        tensor = tensors[theirs].detach()
        if piece.way == "gates":
            tensor = tensor.unflatten(0, (GATES[layer_of(piece.name).rstrip("0123456789")], -1)).transpose(0, 1)
            tensor = tensor.unsqueeze(-1) if piece.high is None else tensor
        parts.setdefault(piece.name, []).append(tensor.mT if piece.way == "transposed" else tensor)
    return {name: (torch.cat(own, -1) if len(own) > 1 else own[0]).float().clone() for name, own in parts.items()}


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)
_STACKED = (*_CONVOLUTIONS, *_NORMS, nn.Linear, nn.Embedding, nn.RNNBase, nn.RNNCellBase)
_RANDOM = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
_KINDS = {"weight": "scale", "bias": "shift"}


def from_module(
    module: nn.Module,
    sample: Tensor | Sequence[int],
    *,
    start: Literal["present", "random"] = "present",
    statistics: Literal["shared", "local"] = "shared",
) -> Net:
    """Convert a user's torch module to a network.

    The module may be of any class, but its parameters must belong to convolutions, Linear, Embedding, LSTM, GRU, RNN
    and their cells, or batch, group or layer normalisation, and its ``forward`` must be a function of its input and
    these alone, but for ``nn.Dropout`` (1d, 2d, 3d), which draws from the run's named streams, for each client its own,
    and is off in evaluation. Clients are computed one by one, so the networks of :mod:`fedstat.fl.nets` are faster for
    many small clients.

    Parameters
    ----------
    module : torch.nn.Module
        Takes (sample, ...) and returns (sample, output). It is copied, so later changes to it have no effect.
    sample : Tensor or sequence of int
        One sample, or its shape if its values are real. Give token ids as a tensor of integers.
    start : {"present", "random"}, default "present"
        Whether every run starts from the module's present parameters, or from draws of its layers'
        ``reset_parameters``, different for every seed and every component of :func:`fedstat.fl.algorithms.fedem`.
    statistics : {"shared", "local"}, default "shared"
        Whether running statistics of batch normalisation are averaged by the server or stay with their client.

    Returns
    -------
    Net
        Layers are named conv1, conv2, …, fc1, …, embedding1, … in the order in which ``forward`` uses them. A
        normalisation belongs to the layer before it (``"conv2.scale"``) if that has the same size; otherwise it is a
        layer of its own, norm1, …. An embedding's units are its dimensions, so its weight is stored transposed,
        (dimension, word). Recurrent layers are lstm1, … (gru1, rnn1), with a weight (unit, gate, input + unit) and a
        bias (unit, gate, 2): a row holds all of one unit. Parameters that do not require a gradient are not trained.
        :func:`fedstat.fl.state_dict` gives the module's own names and shapes back.

    Raises
    ------
    ValueError
        If the module holds something that cannot be stacked (other random parts, tied or unused parameters),
        does not take the sample, or does not return one row of outputs per sample.

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
    _require_known(module)
    module = copy.deepcopy(module)
    draws = adapted(module)
    one = sample if isinstance(sample, Tensor) else torch.zeros(tuple(sample))
    order, outputs = _trial(module, one)
    pieces, noise = _names(order), _dropped(module, one, draws)

    def init(rng: np.random.Generator) -> Params:
        return assembled(pieces, _redrawn(module, rng) if start == "random" else module)

    shapes = {name: tuple(p.shape) for name, p in assembled(pieces, module).items()}
    last = next(reversed(shapes))
    path = next(theirs for theirs, piece in pieces.items() if piece.name == last).rpartition(".")[0]
    _require_last(last, path, shapes[last][0], outputs)
    running, twice = tuple(filter(is_statistic, shapes)), _refuses_one(module, one)
    net = Net(
        shapes,
        init,
        _Stacked(module, pieces, tuple(noise), twice),
        buffers=(*running, *_frozen(module, pieces)),
        unshared=running if statistics == "local" else (),
        noise=noise,
        pieces=pieces | _counts(module, order),
    )
    body = _body(module, path, one, noise)
    if body is None:
        return net
    of_head = [name for name in shapes if layer_of(name) == layer_of(last)]
    of_body = {theirs: piece for theirs, piece in pieces.items() if piece.name not in of_head}
    return net._replace(features=_Stacked(body, of_body, tuple(noise), twice), head=partial(_linear, of_head))


class _Stacked:
    """A module as a function of the parameters of all clients, computed one by one.

    Parameters
    ----------
    module : torch.nn.Module
        It is copied.
    pieces : mapping from str to Piece
        Where the module's tensors stand.
    noise : sequence of str
        Names of the draws of its dropouts, in the order of their calls.
    twice : bool
        Whether a single sample is duplicated in training.
    """

    def __init__(self, module: nn.Module, pieces: dict[str, Piece], noise: Sequence[str], twice: bool) -> None:
        self._empty = copy.deepcopy(module).to("meta")
        self._pieces, self._noise, self._twice = pieces, noise, twice
        self._names = dict.fromkeys(piece.name for piece in pieces.values())
        self._of_thread = threading.local()

    def __call__(
        self, params: Params, x: Tensor, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        # functional_call puts tensors into the module while it runs, so every thread needs its own module.
        if not hasattr(self._of_thread, "module"):
            self._of_thread.module = copy.deepcopy(self._empty)
        module = self._of_thread.module
        module.train(live is not None)
        parts = {name: _by_client(name, params[name]) for name in self._names}

        def of_client(c: int) -> Tensor:
            tensors = {theirs: piece.of(parts[piece.name][c]) for theirs, piece in self._pieces.items()}
            real = None if live is None or bool(live[c].all()) else live[c]
            draws = [] if noise is None else [noise[name][c] for name in self._noise]
            return _forward(module, tensors, x[c], real, twice=self._twice and live is not None, noise=draws)

        return torch.stack([of_client(c) for c in range(len(x))])


def _linear(names: Sequence[str], params: Params, h: Tensor) -> Tensor:
    """Outputs (client, sample, output) of a Linear whose weight, and perhaps bias, have these names."""
    clients = zip(h.unbind(), *(params[name].unbind() for name in names), strict=True)
    return torch.stack([functional.linear(*own) for own in clients])


def _require_last(name: str, path: str, units: int, outputs: int) -> None:
    """ValueError unless the last layer gives the outputs."""
    if units != outputs:
        raise ValueError(
            f"the last layer that the module uses must be its output layer, but it returns {outputs} outputs and "
            f"{layer_of(name)} ({path}) has {units} units"
        )


def _body(module: nn.Module, path: str, sample: Tensor, noise: Mapping[str, tuple[int, ...]]) -> nn.Module | None:
    """The module without its last layer, if that is a Linear whose only input is what the rest returns; else None."""
    last = module.get_submodule(path)
    if not path or not isinstance(last, nn.Linear):
        return None
    body, whole = copy.deepcopy(module).eval(), copy.deepcopy(module).eval()
    body.set_submodule(path, nn.Identity())
    x = torch.stack([sample, sample])
    with torch.no_grad():
        expected = whole(x)
        try:
            features = body(x)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return None  # its forward reads the layer itself
    fits = isinstance(features, Tensor) and features.shape == (2, last.in_features)
    if not fits or not torch.equal(last(features), expected):
        return None
    return body if _dropped(body, sample, _draws(body)) == noise else None  # no dropout after the last layer


def _redrawn(module: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Copy of a module with newly drawn parameters, except those that do not require a gradient."""
    drawn = copy.deepcopy(module)
    with torch.random.fork_rng(devices=[]):  # reset_parameters draws from the global generator
        torch.manual_seed(int(rng.integers(2**62)))
        for part in drawn.modules():
            if _own(part):
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
    twice: bool,
    noise: Sequence[Tensor],
) -> Tensor:
    """Outputs of one client; if ``live`` is given, 0 for padding. ``twice``: a single sample is duplicated."""
    if x.is_floating_point():
        x = x.to(next(iter(tensors.values())).dtype)
    if x.ndim == 4 and x.is_floating_point():
        x = channels_last(x)

    def taken(of: Tensor) -> Tensor:
        real = of if live is None else of[live]
        return torch.cat([real, real]) if twice and len(real) == 1 else real

    real = taken(x)
    if noise:
        _draws(module).queue = iter([taken(u) for u in noise])
    try:
        out = functional_call(module, tensors, (real,))[: len(x) if live is None else int(live.sum())]
    finally:
        if noise:
            _draws(module).queue = None
    return out if live is None else out.new_zeros(len(x), *out.shape[1:]).index_put((live.nonzero()[:, 0],), out)


def _by_client(name: str, p: Tensor) -> Sequence[Tensor]:
    """Every client's part of a parameter.

    That of a statistic has a version count of its own: an update of another client's must not count as a change.
    """
    return [own.data for own in p.unbind()] if is_statistic(name) else p.unbind()


def _require_known(module: nn.Module) -> None:
    """Refuse what cannot be a function of stacked parameters, naming it."""
    owner: dict[int, str] = {}
    for path, part in module.named_modules():
        what = f"{path or 'the module itself'} ({type(part).__name__})"
        if isinstance(part, _RANDOM):
            raise ValueError(f"{what} draws random numbers outside the run's named streams. Remove it.")
        if isinstance(part, _BATCH_NORMS) and (not part.track_running_stats or part.momentum is None):
            raise ValueError(f"{what} must have track_running_stats=True and a momentum, but does not")
        if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.sparse):
            raise ValueError(f"{what} must have max_norm=None and sparse=False, but does not")
        tensors = _own(part)
        if tensors and not isinstance(part, _STACKED):
            raise ValueError(
                f"{what} holds {next(iter(tensors))} itself, and its units are unknown. Parameters and buffers must "
                "belong to Conv, Linear, Embedding, LSTM, GRU, RNN, BatchNorm, GroupNorm or LayerNorm modules; write "
                "it with these."
            )
        for name, tensor in tensors.items():
            if id(tensor) in owner:
                raise ValueError(f"{what} shares its {name} with {owner[id(tensor)]}. Give each its own.")
            owner[id(tensor)] = path


def _own(part: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a module holds itself."""
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def _trial(module: nn.Module, sample: Tensor) -> tuple[list[tuple[str, nn.Module]], int]:
    """Modules with parameters, in the order in which they run on two copies of the sample; number of outputs."""
    runner = copy.deepcopy(module).train()
    holders = {
        path: part for path, part in runner.named_modules() if next(part.parameters(recurse=False), None) is not None
    }
    order: list[tuple[str, nn.Module]] = []

    def note(path: str, part: nn.Module) -> None:
        if all(seen != path for seen, _ in order):
            order.append((path, part))

    hooks = [
        part.register_forward_pre_hook(lambda part, _, path=path: note(path, part)) for path, part in holders.items()
    ]
    x = torch.stack([sample, sample])
    if x.is_floating_point():
        x = x + torch.linspace(0, 1, x.numel()).view(x.shape)  # not all zero, or random parts would not show
    try:
        with torch.no_grad():
            first, second = runner(x), runner(x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(f"the module does not take samples of shape {tuple(sample.shape)}: {error}") from None
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(first, Tensor) or first.ndim != 2 or len(first) != 2:
        seen = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(f"the module must return (sample, output), but for 2 samples got {seen}")
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


def _refuses_one(module: nn.Module, sample: Tensor) -> bool:
    """Whether one sample gives batch normalisation a single value per channel, which torch refuses."""
    try:
        with torch.no_grad():
            copy.deepcopy(module).train()(sample.unsqueeze(0))
    except ValueError:
        return True
    return False


def _names(order: list[tuple[str, nn.Module]]) -> dict[str, Piece]:
    """Where the tensors of the module stand, by its names."""
    found: dict[str, Piece] = {}
    count: Counter[str] = Counter()
    before = ""  # the last layer whose outputs are not yet normalised
    units = 0
    for path, part in order:
        own = {n: t for n, t in _own(part).items() if n != "num_batches_tracked"}
        size = next(iter(own.values())).shape[0]
        if is_recurrent(part):
            kind = kind_of(part)
            here = recurrent_pieces(part, count[kind] + 1)
            count[kind] += len({layer_of(piece.name) for piece in here.values()})
            before, units = f"{kind}{count[kind]}", int(part.hidden_size)  # type: ignore[arg-type]
        elif isinstance(part, _NORMS):
            layer = before if before and size == units else _next(count, "norm")
            here, before = {n: Piece(f"{layer}.{_KINDS.get(n, n)}") for n in own}, ""
        else:
            embedding = isinstance(part, nn.Embedding)
            layer = _next(count, "embedding" if embedding else "conv" if isinstance(part, _CONVOLUTIONS) else "fc")
            units = part.embedding_dim if isinstance(part, nn.Embedding) else size
            here, before = {n: Piece(f"{layer}.{n}", "transposed" if embedding else "") for n in own}, layer
        found |= {f"{path}.{n}" if path else n: piece for n, piece in here.items()}
    return found


def _counts(module: nn.Module, order: list[tuple[str, nn.Module]]) -> dict[str, Piece]:
    """Counts of batches, which normalisation with a momentum does not use."""
    there = {name for name, _ in module.named_buffers()}
    names = (f"{path}.num_batches_tracked" if path else "num_batches_tracked" for path, _ in order)
    return {name: Piece("") for name in names if name in there}


def _frozen(module: nn.Module, named: dict[str, Piece]) -> tuple[str, ...]:
    """Parameters that are not trained; ValueError if only a part of one is not."""
    fixed = {theirs for theirs, p in module.named_parameters() if not p.requires_grad}
    found = tuple(dict.fromkeys(piece.name for theirs, piece in named.items() if theirs in fixed))
    for theirs, piece in named.items():
        if piece.name in found and theirs not in fixed:
            raise ValueError(
                f"{theirs} requires a gradient, but other tensors of {piece.name!r} do not: a recurrent layer's "
                "weights, and its biases, are trained together or not at all"
            )
    return found


def _draws(module: nn.Module) -> Draws:
    """The draws of a module's dropouts; of no use if it has none."""
    return next((part.draws for part in module.modules() if isinstance(part, Dropout)), Draws())


def _dropped(module: nn.Module, sample: Tensor, draws: Draws) -> dict[str, tuple[int, ...]]:
    """Names and one sample's shapes of the draws that the dropouts need, in the order of their calls."""
    found = []
    for n in (2, 3):
        draws.seen = []
        with torch.no_grad():
            module.eval()(torch.stack([sample] * n))
        found.append(draws.seen)
    draws.seen = None
    if any((a[0], b[0]) != (2, 3) or a[1:] != b[1:] for a, b in zip(*found, strict=True)):
        raise ValueError(
            f"a dropout of the module gets inputs of shapes {found[0]} for 2 samples and {found[1]} for 3: their first "
            "axis must be the samples, and the others must not change"
        )
    return {f"dropout{i}": shape[1:] or (1,) for i, shape in enumerate(found[0], 1)}


def _next(count: Counter[str], kind: str) -> str:
    count[kind] += 1
    return f"{kind}{count[kind]}"
