"""Names of layers, by name or pattern, and of their units.

A unit of a dense layer or a convolution is a row of its weight, grouped convolutions included, whose rows hold the
inputs of the unit's own group. Transposed convolutions keep inputs first, embeddings tokens, GPT-2's ``Conv1D`` inputs:
their units are columns. Keras, Flax and Haiku keep units last. Recurrent layers and fused attention keep several
matrices one below the other: a unit has a row in each.
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
    """Layer that a parameter belongs to: ``"fc1.weight"`` and ``"fc1"`` to ``"fc1"``, slashes to dots."""
    return key.removesuffix(".weight").replace("/", ".")


def is_pattern(name: str) -> bool:
    """Whether a name has the marks of a pattern, ``*``, ``?`` or ``[``."""
    return any(mark in name for mark in "*?[")


def require_names(what: str, asked: Iterable[object]) -> None:
    """Raise ValueError unless all layers that are asked for are named by text."""
    if bad := [one for one in asked if not isinstance(one, str)]:
        raise ValueError(f"{what} must be names, such as 'fc1', or patterns, such as 'conv*', but got {bad[0]!r:.100}")


def matching(asked: Sequence[str], there: Sequence[str], where: str) -> list[str]:
    """Names that are asked for, in the order of the request, those of a pattern in their own.

    Parameters
    ----------
    asked : sequence of str
        Names, or patterns such as ``"conv*"``.
    there : sequence of str
    where : str
        What holds them, for the message.

    Raises
    ------
    ValueError
        If a name is not there, or nothing matches a pattern; the message names the nearest.

    Examples
    --------
    >>> matching(["fc*", "conv1.weight"], ["conv1", "fc1", "fc2"], "the run")
    ['fc1', 'fc2', 'conv1']
    >>> matching(["fcl"], ["conv1", "fc1"], "the run")
    Traceback (most recent call last):
    ValueError: the run has no layer 'fcl', only conv1, fc1. Did you mean 'fc1'?
    """
    found: list[str] = []
    for name in asked:
        one = next((x for x in (name, stem(name)) if x in there), None)
        several = [one] if one is not None else [x for x in there if is_pattern(name) and fnmatchcase(x, name)]
        if not several:
            raise missing(name, there, where)
        found += several
    return list(dict.fromkeys(found))


def missing(name: str, there: Sequence[str], where: str) -> ValueError:
    """Error for a layer, or a pattern of layers, that is not there."""
    what = f"layer that matches {name!r}" if is_pattern(name) else f"layer {name!r}"
    return ValueError(f"{where} has no {what}, only {few(there, 8)}.{did_you_mean(name, there, cutoff=0.6)}")


def left_out(shapes: Mapping[str, tuple[int, ...]], output: str | None = None) -> dict[str, str]:
    """Layers that are not analysed unless named, with the reason: their units are not hidden units.

    Parameters
    ----------
    shapes : mapping from layer to shape
        Of one client's weights, units first, in the order of the network.
    output : str, optional
        The output layer, where it is known. Otherwise it is the dense layer that is named as one ("head", "classifier",
        ...), or else the last dense layer.

    Returns
    -------
    dict from layer to reason
        Embeddings, by their names, and the output layer, which no factor of a low-rank update is; never all layers.

    Examples
    --------
    >>> left_out({"conv1": (6, 1, 3, 3), "fc1": (20, 54), "fc2": (10, 20)})
    {'fc2': 'the last dense layer, taken for the output'}
    >>> left_out({"fc1": (20, 54)})
    {}
    """
    found = {name: "embedding" for name, shape in shapes.items() if len(shape) == 2 and EMBEDDING.search(name)}
    found = found if len(found) < len(shapes) else {}
    rest = [name for name in shapes if name not in found]
    if len(rest) == 1:
        return found
    if output in rest:
        return {**found, str(output): "output layer"}
    dense = [name for name in rest if len(shapes[name]) == 2 and not (RECURRENT.search(name) or LORA.search(name))]
    named = [name for name in dense if _OUTPUT.search(name)]
    if len(named) == 1:
        return {**found, named[0]: "output layer, by its name"}
    return {**found, dense[-1]: "the last dense layer, taken for the output"} if dense else found


State = Mapping[str, Any]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_TRANSPOSED = re.compile(r"conv_?trans|transpose|deconv|tconv|convt\d*($|[._])", re.IGNORECASE)
_PERHAPS_TRANSPOSED = re.compile(r"(^|[._])up_?conv\d*$", re.IGNORECASE)
_LAST = re.compile(
    r"(^|[./_])kernel(:\d+)?$|[./][wW](_\w+)?(:\d+)?$|(^|[./_])coefs?_?\.?\d*$|(^|[./_])arr_\d+$|/weights$|:\d+$"
)
"""Names of Keras, TensorFlow, Flax, Haiku, scikit-learn and np.savez, which do not say that units come first."""
_WORD = re.compile(r"(?<![a-zA-Z])(weights?|kernel|coefs?|w|W)(?![a-zA-Z])")
_BIASES = {"weights": "biases", "coef": "intercept", "coefs": "intercepts", "w": "b", "W": "b"}
_FUSED = re.compile(r"(^|[._])(in_proj_weight|qkv|c_attn)$")
_FUSED_SOMEHOW = re.compile(r"qkv|query_?key_?value", re.IGNORECASE)


class _OpenError(Exception):
    """Names and shapes leave it open which numbers belong to a unit; ``axis`` is the likely one."""

    def __init__(self, why: str, axis: int = 0) -> None:
        super().__init__(why)
        self.axis = axis


class Layout(NamedTuple):
    """How a weight is stored.

    Attributes
    ----------
    axis : int
        That of the units.
    parts : int
        Matrices one below the other along that axis: gates; query, key and value.
    part : str
        What they are.
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
        """Weight of one client as (unit, weight...), or (unit, part, weight)."""
        if self.groups > 1:
            by_group = array.reshape(self.groups, -1, *array.shape[1:]).swapaxes(1, 2)
            return by_group.reshape(-1, *by_group.shape[2:])
        array = np.moveaxis(array, self.axis, 0)
        return array.reshape(self.parts, -1, *array.shape[1:]).swapaxes(0, 1) if self.parts > 1 else array

    def dims(self, ndim: int) -> list[str]:
        """Names of the dims of what :meth:`of` returns."""
        first = ["unit", self.part] if self.parts > 1 else ["unit"]
        rest = ndim - len(first)
        return [*first, *["weight", *(f"weight_{i}" for i in range(1, rest))][:rest]]


Fellows = dict[bool, set[str]]
"""Layers' own names by whether their units come last."""

ROWS = Layout()
_COLUMNS = Layout(axis=1)


def layout(
    key: str,
    name: str,
    state: State,
    *,
    module: Any = None,
    unit_axis: int | Mapping[str, int] | None = None,
    fellows: dict[bool, Fellows] | None = None,
) -> Layout:
    """Find how a weight is stored.

    Parameters
    ----------
    key, name : str
        Of the weight in the state_dict, and of its layer.
    state : mapping from key to array or tensor
        Of one client.
    module : torch.nn.Module, optional
        Whose state_dict it is.
    unit_axis : int or mapping from layer, or pattern of layers, to int, optional
        What the user says; it goes before anything else.
    fellows : dict, optional
        What the state's other layers say, filled when it is first needed; share it among layers of one state.

    Raises
    ------
    ValueError
        If names and shapes leave it open, and nobody says.
    """
    shape = tuple(state[key].shape)
    if (axis := _asked(unit_axis, name)) is not None:
        axis = check.integer("unit_axis", axis, low=-len(shape), high=len(shape) - 1) % len(shape)
        transposed = axis == 1 and len(shape) > 2
        return Layout(axis, groups=max(1, _groups(shape, _bias(key, state))) if transposed else 1)
    try:
        found = None if module is None else _of_module(module, key)
        return _joined(found or _of_names(key, name, shape, state, {} if fellows is None else fellows), name, shape)
    except _OpenError as error:
        modules = "" if module is not None or _LAST.search(key) else "Give modules in place of state_dicts. "
        raise ValueError(
            f"which numbers of {key!r} belong to one unit is open: {error}. {modules}Say the axis of the units: "
            f"fedstat.read_weights(sources, unit_axis={{{name!r}: {error.axis}}}). 0 takes each row for a unit, -1 the "
            "last axis."
        ) from None


def is_table(key: str, state: State) -> bool:
    """Return True if a weight is an embedding's (token, feature), by its name; a bias would decide otherwise."""
    return len(state[key].shape) == 2 and _bias(key, state) is None and bool(EMBEDDING.search(stem(key)))


def _asked(unit_axis: int | Mapping[str, int] | None, name: str) -> int | None:
    if not isinstance(unit_axis, Mapping):
        return unit_axis
    return next((axis for asked, axis in unit_axis.items() if stem(asked) == name or fnmatchcase(name, asked)), None)


def _of_module(module: Any, key: str) -> Layout | None:
    """By the class of the module that holds the weight; None of another class."""
    from torch import nn

    path, _, own = key.rpartition(".")
    try:
        part = module.get_submodule(path)
    except AttributeError:  # another client is the module
        return None
    if isinstance(part, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return Layout(axis=1, groups=part.groups)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) or (type(part).__name__ == "Conv1D" and hasattr(part, "nf")):
        return _COLUMNS  # Conv1D: of transformers, a dense layer (in, out)
    if isinstance(part, nn.RNNBase | nn.RNNCellBase) and RECURRENT.search(own):
        kind = part.mode if isinstance(part, nn.RNNBase) else type(part).__name__
        return Layout(parts=next(n for start, n in _GATES.items() if kind.startswith(start)))
    known = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, nn.RNNBase)
    return ROWS if isinstance(part, known) else None


def _joined(found: Layout, name: str, shape: tuple[int, ...]) -> Layout:
    """Put query, key and value of a feature together, where their matrices are stored as one."""
    if len(shape) == 2 and found.parts == 1 and shape[found.axis] == 3 * shape[1 - found.axis]:
        if _FUSED.search(name):
            return found._replace(parts=3, part="projection")
        if _FUSED_SOMEHOW.search(name):
            raise _OpenError(f"shape {shape} is that of query, key and value, in blocks or head by head")
    return found


def _of_names(key: str, name: str, shape: tuple[int, ...], state: State, fellows: dict[bool, Fellows]) -> Layout:
    """By the names of the weight and its layer, its shape, and those of its bias and of its fellows."""
    if len(shape) == 2 and (recurrent := RECURRENT.search(key)):
        return _gates(key, shape, state, recurrent)
    if kernel := re.search(r"(recurrent_)?kernel((:\d+)?)$", key):  # of Keras: (in, gate · unit)
        of_state: Any = state.get(f"{key[: kernel.start()]}recurrent_kernel{kernel[2]}")
        if getattr(of_state, "ndim", 0) > 1:
            return Layout(len(shape) - 1, _number_of_gates(shape[-1], of_state.shape[-2], "columns"))
    if is_table(key, state):
        return _COLUMNS
    last = bool(_LAST.search(key))
    if last and re.search(r"(lstm|gru)[^a-z].*[./]w(_\w+)?$", key, re.IGNORECASE):
        raise _OpenError(f"its {shape[-1]} columns may be those of several gates, one after the other", -1)
    if (bias := _bias(key, state)) is None:
        return _without_bias(key, name, shape, state, last=last)
    fits = _fits(shape, bias)
    if -1 in fits:
        raise _OpenError(f"its shape is {shape}, that of its bias {bias}")
    end = len(shape) - 1
    if last and {end - 1, end} <= fits and end > 1 and _TRANSPOSED.search(name):
        raise _OpenError(f"its name fits a transposed convolution, and its shape, {shape}, either kind", -2)
    if {0, end} <= fits and (last or end == 1):
        if last not in fellows:
            fellows[last] = _fellows(state, last=last)
        return _of_fellows(key, shape, fellows[last], last=last)
    return _last_by_bias(shape, bias, fits) if last else _by_bias(name, shape, bias, fits)


def _without_bias(key: str, name: str, shape: tuple[int, ...], state: State, *, last: bool) -> Layout:
    """Rows, if names are torch's; transposed convolutions by name."""
    if last:
        programs = "Keras, Flax, Haiku or scikit-learn, whose units come last"
        raise _OpenError(f"its name may be that of {programs}, and no bias shows where they are", -1)
    if len(shape) > 2 and _PERHAPS_TRANSPOSED.search(name):
        raise _OpenError("its name fits a convolution after upsampling and a transposed one")
    if len(shape) > 2 and _TRANSPOSED.search(name):
        return _COLUMNS
    _warn_if_unlike(key, shape, state)
    return ROWS


def _by_bias(name: str, shape: tuple[int, ...], bias: tuple[int, ...], fits: set[int]) -> Layout:
    """By the axes that the bias fits, where names are torch's: units first, or second in transposed convolutions."""
    deep, groups = len(shape) > 2, _groups(shape, bias)
    named = deep and bool(_TRANSPOSED.search(name))
    if 0 in fits:
        if named and groups == 1:
            return _COLUMNS
        if (named or (deep and _PERHAPS_TRANSPOSED.search(name))) and groups and shape[1] > 1:
            raise _OpenError(f"its name fits a transposed convolution, and its shape, {shape}, either kind")
        return ROWS
    ends = len(shape) - 1 in fits
    if groups == 1 or (groups and deep and (named or not ends)):
        return Layout(axis=1, groups=groups)
    if ends and not groups:
        return Layout(axis=len(shape) - 1)
    raise _OpenError(f"its shape is {shape}, its bias has {prod(bias)} numbers")


def _last_by_bias(shape: tuple[int, ...], bias: tuple[int, ...], fits: set[int]) -> Layout:
    """By the axes that the bias fits, where units may come last, or last but one in transposed convolutions."""
    end = len(shape) - 1
    for axis in (end, end - 1, 0):
        if axis in fits:
            return Layout(axis)
    raise _OpenError(f"its shape is {shape}, its bias has {prod(bias)} numbers", -1)


def _fellows(state: State, *, last: bool) -> Fellows:
    """Layers whose biases fit the first axis or the last alone."""
    ends: Fellows = {True: set(), False: set()}
    for other, value in state.items():
        size = tuple(getattr(value, "shape", ()))
        if len(size) > 1 and bool(_LAST.search(other)) == last and (bias := _bias(other, state)) is not None:
            fits = _fits(size, bias)
            if fits in ({0}, {len(size) - 1}) and (last or len(size) == 2):
                ends[0 not in fits].add(stem(other).rpartition(".")[2])
    return ends


def _of_fellows(key: str, shape: tuple[int, ...], ends: Fellows, *, last: bool) -> Layout:
    """Of a weight whose first and last axes both fit its bias, by other layers, whose biases fit one of them."""
    own = stem(key).rpartition(".")[2]
    if last and len(sure := [end for end in ends if ends[end]]) == 1:
        return Layout(axis=len(shape) - 1 if sure[0] else 0)
    if last:
        raise _OpenError(f"its shape is {shape}, and its bias has {shape[0]} numbers", -1)
    if own in ends[True] - ends[False]:  # as GPT-2's square layers
        return _COLUMNS
    if ends[True]:
        raise _OpenError(f"its shape, {shape}, is square, and other layers here have their units last", 1)
    return ROWS


def _warn_if_unlike(key: str, shape: tuple[int, ...], state: State) -> None:
    """Warn where the normalisation after a convolution without bias has the size that a transposed one would have."""
    keys = list(state)
    layer = stem(key)
    parent = layer.rpartition(".")[0]
    after = next((k for k in keys[keys.index(key) + 1 :] if stem(k).rpartition(".")[0] == parent), key)
    size = tuple(getattr(state[after], "shape", ()))
    if len(shape) > 2 and after.endswith("weight") and size == shape[1:2] != shape[:1]:
        check.warn(
            f"{key!r} is read as the weight of a convolution, {shape[0]} units first, but the normalisation after it, "
            f"{after!r}, has {size[0]} numbers, as after a transposed one. If it is one, give modules in place of "
            f"state_dicts, or fedstat.read_weights(sources, unit_axis={{{layer!r}: 1}})."
        )


def _fits(shape: tuple[int, ...], bias: tuple[int, ...]) -> set[int]:
    """Axes of a weight that its bias has one number for each entry of.

    0 also stands for the first axes together, as of a LayerNorm's weight, and -1 for any other several axes.
    """
    found = set()
    for sizes in {bias, tuple(n for n in bias if n != 1) or (1,)}:
        for axes in combinations(range(len(shape)), len(sizes)):
            if tuple(shape[axis] for axis in axes) == sizes:
                found.add(axes[0] if len(axes) == 1 else 0 if axes[-1] == len(axes) - 1 else -1)
    return found


def _groups(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> int:
    """Groups of a transposed convolution with this shape and number of output channels; 0 if there is none."""
    out = 0 if bias is None else prod(bias)
    if not out or len(shape) < 2 or out % shape[1]:
        return 0
    groups = out // shape[1]
    return groups if shape[0] % groups == 0 else 0


def _gates(key: str, shape: tuple[int, ...], state: State, found: re.Match[str]) -> Layout:
    """Rows of an LSTM, GRU or plain recurrent layer, by the number of hidden units that its other matrices have."""
    before, after = key[: found.start(1)], key[found.end(1) :]
    matrices: Any = (state.get(before + which + after) for which in ("hr", "hh"))  # hr: of an LSTM with projections
    hidden = next((m.shape[1] for m in matrices if getattr(m, "ndim", 0) == 2), 0)
    return Layout(parts=_number_of_gates(shape[0], hidden, "rows"))


def _number_of_gates(size: int, hidden: int, lines: str) -> int:
    gates, rest = divmod(size, hidden) if hidden else (0, 0)
    if rest or gates not in _GATES.values():
        raise _OpenError(f"its {size} {lines} may be those of several gates, one after the other")
    return gates


def _bias(key: str, state: State) -> tuple[int, ...] | None:
    """Shape of a weight's bias, which has the weight's name with another word; None without one."""
    if numbered := re.fullmatch(r"(.*arr_)(\d+)", key):  # of np.savez without names: the next array
        names = [f"{numbered[1]}{int(numbered[2]) + 1}"]
    elif words := list(_WORD.finditer(key)):
        names = [key[: words[-1].start()] + _BIASES.get(words[-1][0], "bias") + key[words[-1].end() :]]
    else:
        names = [f"{key}.bias", f"{key}_bias"]
    shape = next((tuple(state[name].shape) for name in names if getattr(state.get(name), "ndim", 0)), None)
    return None if shape and numbered and sum(n != 1 for n in shape) > 1 else shape
