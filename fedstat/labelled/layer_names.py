"""Layers by name or pattern, and the layout of their units.

A unit of a dense layer or a convolution is a row of torch's weights. In grouped convolutions, the row holds the inputs
of the unit's group. Units are columns in transposed convolutions, embeddings and GPT-2's ``Conv1D``, whose rows are
inputs or tokens. Keras, Flax and Haiku put units last. Recurrent layers and fused attention stack several matrices: a
unit has a row in each matrix. Weights with names of no known program have the axis that their bias shows, or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import did_you_mean, few

RECURRENT = re.compile(r"weight_(ih|hh)(_l\d+)?(_reverse)?$")
EMBEDDING = re.compile(r"embedding|(^|[._])emb(ed\w*|s)?\d*($|[._])|(^|\.)(wte|wpe|position)$", re.IGNORECASE)
LORA = re.compile(r"(^|[._])lora[_.]?(embedding_)?(A|B|down|up)($|\.)")
_OUTPUT = re.compile(r"(^|\.)(outputs?|out|head|heads|classifier|logits|lm_head|fc_out|readout)$", re.IGNORECASE)


def stem(key: str) -> str:
    """Return the layer of a parameter: ``"fc1"`` for ``"fc1.weight"`` and ``"fc1"``, with dots for slashes."""
    return key.removesuffix(".weight").replace("/", ".")


def is_pattern(name: str) -> bool:
    """Return True if a name has the characters of a pattern, ``*``, ``?`` or ``[``."""
    return any(mark in name for mark in "*?[")


def require_names(argument: str, names: Iterable[object]) -> None:
    """Raise ValueError unless all names of layers are strings."""
    if bad := [name for name in names if not isinstance(name, str)]:
        raise ValueError(
            f"{argument} must be names, such as 'fc1', or patterns, such as 'conv*', but got {bad[0]!r:.100}"
        )


def match_names(requested: Sequence[str], names: Sequence[str], owner: str) -> list[str]:
    """Return the requested names, in the order of the request; matches of a pattern in the order of ``names``.

    Parameters
    ----------
    requested : sequence of str
        Names, or patterns such as ``"conv*"``.
    names : sequence of str
        Existing names.
    owner : str
        Object that has the names, for the message.

    Raises
    ------
    ValueError
        If a name does not exist, or no name matches a pattern; the message suggests the most similar name.

    Examples
    --------
    >>> match_names(["fc*", "conv1.weight"], ["conv1", "fc1", "fc2"], "the run")
    ['fc1', 'fc2', 'conv1']
    >>> match_names(["fcl"], ["conv1", "fc1"], "the run")
    Traceback (most recent call last):
    ValueError: the run has no layer 'fcl', only conv1, fc1. Did you mean 'fc1'?
    """
    matches: list[str] = []
    for request in requested:
        exact = next((x for x in (request, stem(request)) if x in names), None)
        by_pattern = [x for x in names if is_pattern(request) and fnmatchcase(x, request)]
        if exact is None and not by_pattern:
            raise missing(request, names, owner)
        matches += by_pattern if exact is None else [exact]
    return list(dict.fromkeys(matches))


def missing(name: str, names: Sequence[str], owner: str) -> ValueError:
    """Return the error for a layer, or a pattern of layers, that does not exist."""
    layer = f"layer that matches {name!r}" if is_pattern(name) else f"layer {name!r}"
    return ValueError(f"{owner} has no {layer}, only {few(names, 8)}.{did_you_mean(name, names, cutoff=0.6)}")


def find_skipped_layers(shapes: Mapping[str, tuple[int, ...]], output: str | None = None) -> dict[str, str]:
    """Find layers that are analyzed only if named, since their units are not hidden units.

    Parameters
    ----------
    shapes : mapping from layer to shape
        Shapes of one client's weights, units first, in the order of the network.
    output : str, optional
        The output layer, if it is known. By default it is the only dense layer with a name such as "head" or
        "classifier", or else the last dense layer.

    Returns
    -------
    dict from layer to reason
        Embeddings, learned tokens and positions, by their names, and the output layer, which is never a factor of a
        low-rank update. At least one layer is not skipped.

    Examples
    --------
    >>> find_skipped_layers({"conv1": (6, 1, 3, 3), "fc1": (20, 54), "fc2": (10, 20)})
    {'fc2': 'the last dense layer, taken for the output'}
    >>> find_skipped_layers({"fc1": (20, 54)})
    {}
    """
    patterns = {2: EMBEDDING, 3: _TOKEN}
    by_pattern = {name: patterns.get(len(shape)) for name, shape in shapes.items()}
    skipped = {name: "embedding" for name, pattern in by_pattern.items() if pattern and pattern.search(name)}
    skipped = skipped if len(skipped) < len(shapes) else {}
    rest = [name for name in shapes if name not in skipped]
    if len(rest) == 1:
        return skipped
    if output in rest:
        return {**skipped, str(output): "output layer"}
    dense = [name for name in rest if len(shapes[name]) == 2 and not (RECURRENT.search(name) or LORA.search(name))]
    named = [name for name in dense if _OUTPUT.search(name)]
    if len(named) == 1:
        return {**skipped, named[0]: "output layer, by its name"}
    return {**skipped, dense[-1]: "the last dense layer, taken for the output"} if dense else skipped


State = Mapping[str, Any]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_TRANSPOSED = re.compile(r"conv_?trans|transpose|deconv|tconv|convt\d*($|[._])", re.IGNORECASE)
_PERHAPS_TRANSPOSED = re.compile(r"(^|[._])up_?conv\d*$", re.IGNORECASE)
_LAST = re.compile(
    r"(^|[./_])kernel(:\d+)?$|[./][wW](_\w+)?(:\d+)?$|(^|[./_])coefs?_?\.?\d*$|(^|[./_])arr_\d+$|/weights$|:\d+$"
)
"""Names of Keras, TensorFlow, Flax, Haiku, scikit-learn and np.savez, whose units may come last."""
_TORCH = re.compile(r"(^|[./])weight(_[a-z]\w*)?$|(^|[._])(in|q|k|v)_proj_weight$")
"""Names of torch's parameters, whose units are rows."""
_TOKEN = re.compile(r"(^|[._])((cls|class|dist|mask|reg(ister)?)_?tokens?|pos_?\w*emb\w*)$", re.IGNORECASE)
"""Names of learned tokens and positions, (1, token, feature)."""
_PRODUCT = re.compile(r"MatMul|ReadVariableOp|kernel", re.IGNORECASE)
_WORD = re.compile(r"(?<![a-zA-Z])(weights?|kernel|coefs?|w|W)(?![a-zA-Z])")
_BIASES = {"weights": "biases", "coef": "intercept", "coefs": "intercepts", "w": "b", "W": "b"}
_FUSED = re.compile(r"(^|[._])(in_proj_weight|qkv|c_attn)$")
_PERHAPS_FUSED = re.compile(r"qkv|query_?key_?value|(^|[._])in_proj$", re.IGNORECASE)


class _AmbiguousError(Exception):
    """Ambiguity about the numbers of a unit: names and shapes do not determine them; ``axis`` is likely."""

    def __init__(self, reason: str, axis: int = 0) -> None:
        super().__init__(reason)
        self.axis = axis


class Layout(NamedTuple):
    """Layout of a stored weight.

    Attributes
    ----------
    axis : int
        Axis of the units.
    parts : int
        Number of matrices that are stacked along this axis: gates; query, key and value.
    part : str
        Name of the dim of these matrices: "gate" or "projection".
    groups : int
        Groups of a transposed convolution, whose weight is (in, out / groups, ...).
    """

    axis: int = 0
    parts: int = 1
    part: str = "gate"
    groups: int = 1

    def __str__(self) -> str:
        parts = f", {self.parts} below each other" if self.parts > 1 else ""
        return f"units along axis {self.axis}{parts}" + (f", {self.groups} groups" if self.groups > 1 else "")

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the weight of one client as (unit, weight...), or (unit, part, weight)."""
        if self.groups > 1:
            by_group = array.reshape(self.groups, -1, *array.shape[1:]).swapaxes(1, 2)
            return by_group.reshape(-1, *by_group.shape[2:])
        array = np.moveaxis(array, self.axis, 0)
        return array.reshape(self.parts, -1, *array.shape[1:]).swapaxes(0, 1) if self.parts > 1 else array

    def dims(self, ndim: int) -> list[str]:
        """Return the names of the dims of an array that :meth:`of` returns."""
        first = ["unit", self.part] if self.parts > 1 else ["unit"]
        rest = ndim - len(first)
        return [*first, *["weight", *(f"weight_{i}" for i in range(1, rest))][:rest]]


UnitsLast = dict[bool, set[str]]
"""Last names of layers by whether their units come last."""

ROWS = Layout()
_COLUMNS = Layout(axis=1)


def layout(
    key: str,
    name: str,
    state: State,
    *,
    module: Any = None,
    unit_axis: int | Mapping[str, int] | None = None,
    units_last: dict[bool, UnitsLast] | None = None,
) -> Layout:
    """Find the layout of a stored weight.

    Parameters
    ----------
    key, name : str
        Key of the weight in the state_dict, and name of its layer.
    state : mapping from key to array or tensor
        State_dict of one client.
    module : torch.nn.Module, optional
        Module of the state_dict.
    unit_axis : int or mapping from layer, or pattern of layers, to int, optional
        The user's choice; it takes precedence. Gates and projections along this axis are still combined.
    units_last : dict, optional
        Cache of the evidence from the state's other layers; share it among the layers of one state.

    Raises
    ------
    ValueError
        If names and shapes do not determine the layout, and neither module nor user do.
    """
    shape = tuple(state[key].shape)
    requested = _requested_axis(unit_axis, name)
    try:
        of_module = None if module is None else _of_module(module, key)
        stored = of_module or _of_names(key, name, shape, state, {} if units_last is None else units_last)
        stored = _fuse(stored, name, shape)
        if requested is None:
            if of_module is None and stored.axis == 0:
                _warn_if_unlike(key, shape, state)
            return stored
    except _AmbiguousError as error:
        if requested is None:
            raise _ambiguous(key, name, error, has_module=module is not None) from None
        stored = None
    axis = check.integer("unit_axis", requested, low=-len(shape), high=len(shape) - 1) % len(shape)
    if stored is not None and stored.axis == axis:  # with its gates, projections or groups
        return stored
    transposed = axis == 1 and len(shape) > 2
    return Layout(axis, groups=max(1, _groups(shape, _bias(key, state))) if transposed else 1)


def _ambiguous(key: str, name: str, error: _AmbiguousError, *, has_module: bool) -> ValueError:
    """Return the error for a weight whose axis of units is ambiguous."""
    hint = ""
    if _TORCH.search(key) and not has_module:
        hint = "Pass modules instead of state_dicts, or the axis. "
    elif not (_TORCH.search(key) or _LAST.search(key)):
        hint = f"If rows are units, rename it to '{key}.weight', or pass the axis. "
    return ValueError(
        f"the axis of the units of {key!r} is ambiguous: {error}. {hint}Pass it as "
        f"fedstat.read_weights(sources, unit_axis={{{name!r}: {error.axis}}}): 0 if rows are units, -1 for the "
        "last axis."
    )


def is_table(key: str, state: State) -> bool:
    """Return True if a weight is an embedding's table (token, feature) by its name; a bias would exclude it."""
    return len(state[key].shape) == 2 and _bias(key, state) is None and bool(EMBEDDING.search(stem(key)))


def is_token(key: str, shape: tuple[int, ...]) -> bool:
    """Return True if a parameter holds learned tokens or positions (1, token, feature) by its name."""
    return len(shape) == 3 and shape[0] == 1 and bool(_TOKEN.search(key))


def _requested_axis(unit_axis: int | Mapping[str, int] | None, name: str) -> int | None:
    if not isinstance(unit_axis, Mapping):
        return unit_axis
    return next((axis for key, axis in unit_axis.items() if stem(key) == name or fnmatchcase(name, key)), None)


def _of_module(module: Any, key: str) -> Layout | None:
    """Find the layout by the class of the module that holds the weight; None if the class is unknown."""
    from torch import nn

    path, _, parameter = key.rpartition(".")
    try:
        part = module.get_submodule(path)
    except AttributeError:  # the module is another client's, with other layers
        return None
    if isinstance(part, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return Layout(axis=1, groups=part.groups)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) or (type(part).__name__ == "Conv1D" and hasattr(part, "nf")):
        return _COLUMNS  # Conv1D of transformers is a dense layer (in, out)
    if isinstance(part, nn.RNNBase | nn.RNNCellBase) and RECURRENT.search(parameter):
        kind = part.mode if isinstance(part, nn.RNNBase) else type(part).__name__
        return Layout(parts=next(n for start, n in _GATES.items() if kind.startswith(start)))
    classes = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, nn.RNNBase)
    return ROWS if isinstance(part, classes) else None


def _fuse(stored: Layout, name: str, shape: tuple[int, ...]) -> Layout:
    """Combine query, key and value of a feature if their matrices are stored as one."""
    if stored.axis > 1 or stored.parts > 1 or LORA.search(name):
        return stored
    is_fused = bool(_FUSED.search(name))
    if not (is_fused or _PERHAPS_FUSED.search(name)):
        return stored
    rows, columns = shape[stored.axis], shape[1 - stored.axis]
    if rows == 3 * columns and is_fused:
        return stored._replace(parts=3, part="projection")
    if rows == 3 * columns:
        raise _AmbiguousError(f"shape {shape} is that of query, key and value, in blocks or head by head")
    if len(shape) == 2 and columns == 3 * rows:
        other = 1 - stored.axis
        raise _AmbiguousError(f"shape {shape} is that of query, key and value along axis {other}", other)
    if len(shape) == 2 and rows % 3 == 0:
        raise _AmbiguousError(f"shape {shape} may be that of query, key and value, of {rows // 3} units each")
    return stored


def _of_names(key: str, name: str, shape: tuple[int, ...], state: State, units_last: dict[bool, UnitsLast]) -> Layout:
    """Find the layout by the names of weight and layer, the shapes of weight and bias, and the other layers."""
    if check.has_dims(state[key]) and "unit" in state[key].dims:
        return Layout(state[key].dims.index("unit"))
    if len(shape) == 2 and (recurrent := RECURRENT.search(key)):
        return _gates(key, shape, state, recurrent)
    if kernel := re.search(r"(recurrent_)?kernel((:\d+)?)$", key):  # of Keras: (in, gate · unit)
        recurrent_kernel: Any = state.get(f"{key[: kernel.start()]}recurrent_kernel{kernel[2]}")
        if getattr(recurrent_kernel, "ndim", 0) > 1:
            return Layout(len(shape) - 1, _number_of_gates(shape[-1], recurrent_kernel.shape[-2], "columns"))
    if is_table(key, state):
        return _COLUMNS
    if is_token(key, shape):
        return Layout(axis=2)
    last, has_torch_name = bool(_LAST.search(key)), bool(_TORCH.search(key) or LORA.search(key))
    if last and re.search(r"(lstm|gru)[^a-z].*[./]w(_\w+)?$", key, re.IGNORECASE):
        raise _AmbiguousError(f"its {shape[-1]} columns may be those of several gates, one after the other", -1)
    if (bias := _bias(key, state)) is None:
        return _without_bias(key, name, shape, state, last=last, has_torch_name=has_torch_name)
    fits = _fits(shape, bias)
    if -1 in fits:
        raise _AmbiguousError(f"its shape is {shape}, that of its bias {bias}")
    end = len(shape) - 1
    if last and {end - 1, end} <= fits and end > 1 and _TRANSPOSED.search(name):
        raise _AmbiguousError(f"its name fits a transposed convolution, and its shape, {shape}, either kind", -2)
    if {0, end} <= fits and (last or end == 1):
        if last not in units_last:
            units_last[last] = _find_units_last(state, last=last)
        return _by_other_layers(key, shape, units_last[last], has_torch_name=has_torch_name and not last)
    if last:
        return _last_by_bias(shape, bias, fits)
    return _by_bias(name, shape, bias, fits) if has_torch_name else _only_by_bias(shape, bias, fits)


def _without_bias(
    key: str, name: str, shape: tuple[int, ...], state: State, *, last: bool, has_torch_name: bool
) -> Layout:
    """Find the layout without a bias: rows if names are torch's; transposed convolutions by name."""
    if last:
        programs = "Keras, Flax, Haiku or scikit-learn, whose units come last"
        raise _AmbiguousError(f"its name may be from {programs}, and no bias shows their axis", -1)
    if not has_torch_name:
        likely = -1 if _PRODUCT.search(key) else 0
        raise _AmbiguousError("its name is that of no known program, and no bias shows their axis", likely)
    if len(shape) > 2 and _PERHAPS_TRANSPOSED.search(name):
        raise _AmbiguousError("its name fits a convolution after upsampling and a transposed one")
    if len(shape) > 2 and _TRANSPOSED.search(name):
        return _COLUMNS
    return ROWS


def _only_by_bias(shape: tuple[int, ...], bias: tuple[int, ...], fits: set[int]) -> Layout:
    """Find the layout of a weight with the name of no known program: the single axis that the bias fits."""
    if len(fits) == 1:
        return Layout(axis=min(fits))
    raise _AmbiguousError(f"its shape is {shape}, and its bias has {prod(bias)} numbers")


def _by_bias(name: str, shape: tuple[int, ...], bias: tuple[int, ...], fits: set[int]) -> Layout:
    """Find the layout by the axes that the bias fits, if names are torch's: 0, or 1 in transposed convolutions."""
    deep, groups = len(shape) > 2, _groups(shape, bias)
    named = deep and bool(_TRANSPOSED.search(name))
    if 0 in fits:
        if named and groups == 1:
            return _COLUMNS
        if (named or (deep and _PERHAPS_TRANSPOSED.search(name))) and groups and shape[1] > 1:
            raise _AmbiguousError(f"its name fits a transposed convolution, and its shape, {shape}, either kind")
        return ROWS
    ends = len(shape) - 1 in fits
    if groups == 1 or (groups and deep and (named or not ends)):
        return Layout(axis=1, groups=groups)
    if ends and not groups:
        return Layout(axis=len(shape) - 1)
    raise _AmbiguousError(f"its shape is {shape}, its bias has {prod(bias)} numbers")


def _last_by_bias(shape: tuple[int, ...], bias: tuple[int, ...], fits: set[int]) -> Layout:
    """Find the layout by the axes that the bias fits, if units may come last, or last but one if transposed."""
    end = len(shape) - 1
    for axis in (end, end - 1, 0):
        if axis in fits:
            return Layout(axis)
    raise _AmbiguousError(f"its shape is {shape}, its bias has {prod(bias)} numbers", -1)


def _find_units_last(state: State, *, last: bool) -> UnitsLast:
    """Find layers whose biases fit only the first axis (False), or only the last (True)."""
    ends: UnitsLast = {True: set(), False: set()}
    for other, value in state.items():
        size = tuple(getattr(value, "shape", ()))
        if len(size) > 1 and bool(_LAST.search(other)) == last and (bias := _bias(other, state)) is not None:
            fits = _fits(size, bias)
            if fits in ({0}, {len(size) - 1}) and (last or len(size) == 2):
                ends[0 not in fits].add(stem(other).rpartition(".")[2])
    return ends


def _by_other_layers(key: str, shape: tuple[int, ...], ends: UnitsLast, *, has_torch_name: bool) -> Layout:
    """Find the layout of a weight whose first and last axes both fit its bias, by layers whose biases fit one axis."""
    name = stem(key).rpartition(".")[2]
    if not has_torch_name and len(sure := [end for end in ends if ends[end]]) == 1:
        return Layout(axis=len(shape) - 1 if sure[0] else 0)
    if not has_torch_name:
        raise _AmbiguousError(f"its shape is {shape}, and its bias has {shape[0]} numbers", -1)
    if name in ends[True] - ends[False]:  # such as GPT-2's square layers
        return _COLUMNS
    if ends[True]:
        raise _AmbiguousError(f"its shape, {shape}, is square, and other layers have their units last", 1)
    return ROWS


def _warn_if_unlike(key: str, shape: tuple[int, ...], state: State) -> None:
    """Warn if the normalization after a convolution without bias has the size expected after a transposed one."""
    if len(shape) < 3 or _bias(key, state) is not None:
        return
    keys, layer = list(state), stem(key)
    parent = layer.rpartition(".")[0]
    after = next((k for k in keys[keys.index(key) + 1 :] if stem(k).rpartition(".")[0] == parent), key)
    size = tuple(getattr(state[after], "shape", ()))
    if after.endswith("weight") and size == shape[1:2] != shape[:1]:
        check.warn(
            f"{key!r} is read as a convolution with {shape[0]} units on axis 0, but the normalization after it, "
            f"{after!r}, has {size[0]} numbers, as after a transposed convolution. If it is transposed, pass modules "
            f"instead of state_dicts, or use fedstat.read_weights(sources, unit_axis={{{layer!r}: 1}})."
        )


def _fits(shape: tuple[int, ...], bias: tuple[int, ...]) -> set[int]:
    """Return the axes of a weight along which its bias has one number per entry.

    0 also stands for the first axes together, as in a LayerNorm's weight, and -1 for any other set of axes.
    """
    fits = set()
    for sizes in {bias, tuple(n for n in bias if n != 1) or (1,)}:
        for axes in combinations(range(len(shape)), len(sizes)):
            if tuple(shape[axis] for axis in axes) == sizes:
                fits.add(axes[0] if len(axes) == 1 else 0 if axes[-1] == len(axes) - 1 else -1)
    return fits


def _groups(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> int:
    """Return the groups of a transposed convolution with these shapes of weight and bias; 0 if none is possible."""
    channels = 0 if bias is None else prod(bias)
    if not channels or len(shape) < 2 or channels % shape[1]:
        return 0
    groups = channels // shape[1]
    return groups if shape[0] % groups == 0 else 0


def _gates(key: str, shape: tuple[int, ...], state: State, match: re.Match[str]) -> Layout:
    """Find the gates of an LSTM, GRU or plain recurrent layer by the number of hidden units of its other matrices."""
    before, after = key[: match.start(1)], key[match.end(1) :]
    matrices: Any = (state.get(before + kind + after) for kind in ("hr", "hh"))  # hr: of an LSTM with projections
    hidden = next((m.shape[1] for m in matrices if getattr(m, "ndim", 0) == 2), 0)
    return Layout(parts=_number_of_gates(shape[0], hidden, "rows"))


def _number_of_gates(size: int, hidden: int, lines: str) -> int:
    gates, rest = divmod(size, hidden) if hidden else (0, 0)
    if rest or gates not in _GATES.values():
        raise _AmbiguousError(f"its {size} {lines} may be those of several gates, one after the other")
    return gates


def _bias(key: str, state: State) -> tuple[int, ...] | None:
    """Return the shape of a weight's bias, whose name differs by one word; None if there is none."""
    if numbered := re.fullmatch(r"(.*arr_)(\d+)", key):  # of np.savez without names: the next array
        names = [f"{numbered[1]}{int(numbered[2]) + 1}"]
    elif words := list(_WORD.finditer(key)):
        names = [key[: words[-1].start()] + _BIASES.get(words[-1][0], "bias") + key[words[-1].end() :]]
    else:
        names = [f"{key}.bias", f"{key}_bias"]
    shape = next((tuple(state[name].shape) for name in names if getattr(state.get(name), "ndim", 0)), None)
    return None if shape and numbered and sum(n != 1 for n in shape) > 1 else shape
