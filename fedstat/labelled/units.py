"""Which rows, columns or blocks of a stored weight belong to one hidden unit: by the kind of its module, or by names.

A unit of a dense layer or a convolution is a row of its weight, grouped convolutions included, whose rows hold the
inputs of the unit's own group. Transposed convolutions keep inputs first, embeddings tokens, GPT-2's ``Conv1D`` inputs:
their units are columns. Recurrent layers and fused attention keep several matrices one below the other: a unit has a
row in each.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat import _check
from fedstat.labelled.choose import EMBEDDING, RECURRENT, stem

State = Mapping[str, Any]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_TRANSPOSED = re.compile(r"conv_?trans|transpose|deconv|tconv|convt\d*($|[._])", re.IGNORECASE)
_PERHAPS_TRANSPOSED = re.compile(r"(^|[._])up_?conv\d*$", re.IGNORECASE)
_FUSED = re.compile(r"(^|[._])(in_proj_weight|qkv|c_attn)$")
_FUSED_SOMEHOW = re.compile(r"qkv|query_?key_?value", re.IGNORECASE)


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


ROWS = Layout()
_COLUMNS = Layout(axis=1)
_QUERY_KEY_VALUE = Layout(parts=3, part="projection")


def layout(
    key: str, name: str, state: State, *, module: Any = None, unit_axis: int | Mapping[str, int] | None = None
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

    Raises
    ------
    ValueError
        If names and shapes leave it open, and nobody says.
    """
    shape = tuple(state[key].shape)
    if (axis := _asked(unit_axis, name)) is not None:
        axis = _check.integer("unit_axis", axis, low=-len(shape), high=len(shape) - 1) % len(shape)
        transposed = axis == 1 and len(shape) > 2
        return Layout(axis, groups=max(1, _groups(shape, _size(state, key))) if transposed else 1)
    return (None if module is None else _of_module(module, key)) or _of_names(key, name, shape, state)


def _asked(unit_axis: int | Mapping[str, int] | None, name: str) -> int | None:
    if not isinstance(unit_axis, Mapping):
        return unit_axis
    return next((axis for asked, axis in unit_axis.items() if stem(asked) == name or fnmatchcase(name, asked)), None)


def _of_module(module: Any, key: str) -> Layout | None:
    """By the class of the module that holds the weight; None of another class."""
    from torch import nn

    path, _, own = key.rpartition(".")
    part = module.get_submodule(path)
    if isinstance(part, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return Layout(axis=1, groups=part.groups)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        return _COLUMNS
    if isinstance(part, nn.RNNBase | nn.RNNCellBase) and RECURRENT.search(own):
        kind = part.mode if isinstance(part, nn.RNNBase) else type(part).__name__
        return Layout(parts=next(n for start, n in _GATES.items() if kind.startswith(start)))
    if isinstance(part, nn.MultiheadAttention) and own == "in_proj_weight":
        return _QUERY_KEY_VALUE
    known = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, nn.RNNBase)
    return ROWS if isinstance(part, known) else None


def _of_names(key: str, name: str, shape: tuple[int, ...], state: State) -> Layout:
    """By the names of the weight and its layer, its shape, and those of its bias and of its fellows."""
    if re.search(r"(^|[./])kernel$", key):
        raise ValueError(
            f"{key!r} is named as the kernels of Flax and Keras are, whose units come last, but fedstat takes units "
            f"first, as torch has them. Say the axis of the units, -1 or 0: fedstat.read_weights(sources, "
            f"unit_axis={{{name!r}: -1}})."
        )
    if len(shape) == 2 and (recurrent := RECURRENT.search(key)):
        return _gates(key, name, shape, state, recurrent)
    out = _size(state, key)
    if len(shape) == 2 and out is None and EMBEDDING.search(name):
        return _COLUMNS
    found = _by_bias(key, name, shape, state)
    units, inputs = shape[found.axis], shape[1 - found.axis] if len(shape) == 2 else 0
    if units == 3 * inputs:
        if _FUSED.search(name):
            return found._replace(parts=3, part="projection")
        if _FUSED_SOMEHOW.search(name):
            raise _open(key, name, f"shape {shape} is that of query, key and value, in blocks or head by head")
    return found


def _by_bias(key: str, name: str, shape: tuple[int, ...], state: State) -> Layout:
    """By the size of the bias, which has one number a unit; of transposed convolutions without one by name."""
    out = _size(state, key)
    named = len(shape) > 2 and bool(_TRANSPOSED.search(name))
    perhaps = len(shape) > 2 and bool(_PERHAPS_TRANSPOSED.search(name))
    if out is None:
        if perhaps:
            raise _open(key, name, "its name fits a convolution after upsampling and a transposed one")
        if not named:
            _warn_if_unlike(key, shape, state)
        return _COLUMNS if named else ROWS
    groups = _groups(shape, out)
    if out == shape[0]:
        if named and groups == 1:
            return _COLUMNS
        if (named or perhaps) and groups and shape[1] > 1:
            raise _open(key, name, f"its name fits a transposed convolution, and its shape, {shape}, either kind")
        if len(shape) == 2 and shape[0] == shape[1] and _some_columns(state):
            raise _open(key, name, f"its shape, {shape}, is square, and other layers here have their units last")
        return ROWS
    if groups == 1 or (groups > 1 and len(shape) > 2):
        return Layout(axis=1, groups=groups)
    if tuple(state[_bias(key)].shape) == shape:  # scale and shift of every number, as of a LayerNorm
        return ROWS
    raise _open(key, name, f"its shape is {shape}, its bias has {out} numbers")


def _warn_if_unlike(key: str, shape: tuple[int, ...], state: State) -> None:
    """Warn where the normalisation after a convolution without bias has the size that a transposed one would have."""
    keys = list(state)
    layer = stem(key)
    parent = layer.rpartition(".")[0]
    after = next((k for k in keys[keys.index(key) + 1 :] if stem(k).rpartition(".")[0] == parent), key)
    size = tuple(getattr(state[after], "shape", ()))
    if len(shape) > 2 and after.endswith("weight") and size == shape[1:2] != shape[:1]:
        warnings.warn(
            f"{key!r} is read as the weight of a convolution, {shape[0]} units first, but the normalisation after it, "
            f"{after!r}, has {size[0]} numbers, as after a transposed one. If it is one, give modules in place of "
            f"state_dicts, or fedstat.read_weights(sources, unit_axis={{{layer!r}: 1}}).",
            UserWarning,
            stacklevel=7,
        )


def _groups(shape: tuple[int, ...], out: int | None) -> int:
    """Groups of a transposed convolution with this shape and number of output channels; 0 if there is none."""
    if out is None or len(shape) < 2 or out % shape[1]:
        return 0
    groups = out // shape[1]
    return groups if groups and shape[0] % groups == 0 else 0


def _some_columns(state: State) -> bool:
    """Whether a dense layer is surely stored with units last, as GPT-2's are in transformers."""
    dense = [key for key, value in state.items() if key.endswith("weight") and len(getattr(value, "shape", ())) == 2]
    return any(_size(state, key) == state[key].shape[1] != state[key].shape[0] for key in dense)


def _gates(key: str, name: str, shape: tuple[int, ...], state: State, found: re.Match[str]) -> Layout:
    """Rows of an LSTM, GRU or plain recurrent layer, by the number of hidden units that its other matrices have."""
    before, after = key[: found.start(1)], key[found.end(1) :]
    matrices: Any = (state.get(before + which + after) for which in ("hr", "hh"))  # hr: of an LSTM with projections
    hidden = next((m.shape[1] for m in matrices if getattr(m, "ndim", 0) == 2), 0)
    gates, rest = divmod(shape[0], hidden) if hidden else (0, 0)
    if rest or gates not in _GATES.values():
        raise _open(key, name, f"its {shape[0]} rows may be those of several gates, one after the other")
    return Layout(parts=gates)


def _bias(key: str) -> str:
    return re.sub(r"(weight|kernel)$", "bias", key)


def _size(state: State, key: str) -> int | None:
    """Numbers of a weight's bias; None without one."""
    bias = state.get(_bias(key)) if _bias(key) != key else None
    return None if bias is None or not getattr(bias, "ndim", 0) else prod(bias.shape)


def _open(key: str, name: str, why: str) -> ValueError:
    return ValueError(
        f"which numbers of {key!r} belong to one unit is open: {why}. Give modules in place of state_dicts, or say "
        f"the axis of the units: fedstat.read_weights(sources, unit_axis={{{name!r}: 0}}); 0 takes each row for a unit."
    )
