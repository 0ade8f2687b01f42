"""One client after another into one array a layer, so that no client's file stays in memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import guard
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat.labelled import states
from fedstat.labelled.layer_names import LORA, missing, stem
from fedstat.labelled.states import State
from fedstat.labelled.unit_names import Fellows, Layout, layout


class Stack(NamedTuple):
    """Weights of one layer.

    Attributes
    ----------
    shape : tuple of int
        Of one client's weight, as it is stored.
    layout : Layout
    labels : list of (dim, labels)
        Of the first client's weight, where it is a DataArray or DataFrame; all others must have the same.
    w : array (client, unit, weight...)
        Filled client by client, so that no file stays in memory.
    """

    shape: tuple[int, ...]
    layout: Layout
    labels: list[tuple[str, list[Any]]]
    w: NDArray[Any]


def fill(
    stacks: dict[str, Stack],
    wanted: list[tuple[str, str]],
    state: State,
    c: int,
    names: list[Any],
    module: Any,
    unit_axis: int | Mapping[str, int] | None,
) -> None:
    """Put the weights of client ``c`` into the stacks, which the first client makes."""
    fellows: dict[bool, Fellows] = {}
    for name, layer in wanted:
        key = key_of(state, name, layer)
        if key is None:
            raise missing(layer, [s for s, _ in states.layers_in(state)], str(names[c]))
        array = states.numbers_of(state[key], f"layer {layer!r} of {names[c]}")
        if array.ndim < 2:
            raise ValueError(
                f"layer {layer!r} of {names[c]} must have dims (unit, weight...), but got shape {array.shape}"
            )
        if array.size == 0:
            raise ValueError(f"layer {layer!r} of {names[c]} is without numbers, of shape {array.shape}. Leave it out.")
        if c == 0:
            stored = layout(key, name, state, module=module, unit_axis=unit_axis, fellows=fellows)
            shape = (len(names), *stored.of(array).shape)
            stacks[name] = Stack(
                array.shape, stored, _labels.axes(state[key]), np.empty(shape, array.dtype.newbyteorder("="))
            )
        stack = stacks[name]
        if array.shape != stack.shape:
            raise ValueError(
                f"layer {layer!r} must have one shape for all clients, but got {stack.shape} in {names[0]} and "
                f"{array.shape} in {names[c]}. Split clients of one architecture together."
            )
        if _labels.axes(state[key]) != stack.labels:
            raise ValueError(
                f"layer {layer!r} must have the same labels in one order for all clients, but those of {names[c]} are "
                f"not those of {names[0]}. Reorder them, or give arrays without labels."
            )
        if (dtype := np.result_type(stack.w, array)) != stack.w.dtype:
            stacks[name] = stack = stack._replace(w=stack.w.astype(dtype))
        stack.w[c] = stack.layout.of(array)


def warn_of(stacks: dict[str, Stack]) -> None:
    """Warn of layers too wide for their correlations, and of factors that have no units."""
    for name, stack in stacks.items():
        if (size := stack.w.shape[1] ** 2 * 8) > guard.limit():
            warnings.warn(
                f"layer {name!r} has {stack.w.shape[1]:,} units: their correlations alone take {size / 1e9:,.0f} GB "
                "when it is split. Leave it out by layers=[...], or split a part of its units.",
                UserWarning,
                stacklevel=4,
            )
    if factors := [name for name in stacks if LORA.search(name)]:
        warnings.warn(
            f"{few(factors)}: factors of low-rank updates BA. Units of one factor cannot be compared over clients, as "
            "(BG)(inverse of G)A is the same update for every G. Give the products BA, or merged weights. Base weights "
            "beside the factors are without the update.",
            UserWarning,
            stacklevel=4,
        )


def require_same(first: Collection[str], here: Collection[str], without: Collection[str], one: Any, other: Any) -> None:
    """Raise ValueError if another client has other layers than the first, but for those that are left out."""
    lost, more = ([x for x in a if x not in b and x not in without] for a, b in ((first, here), (here, first)))
    if lost or more:
        has, lacks = (one, other) if lost else (other, one)
        raise ValueError(
            f"clients must have the same layers, but {has} has {few(lost or more)} and {lacks} has not. Name layers "
            "that all clients have."
        )


def key_of(state: State, name: str, layer: str) -> str | None:
    """Key of a layer, by its name or as it was asked for; None if there is none."""
    direct = next((key for key in (layer, f"{name}.weight", name) if key in state), None)
    return direct or next((key for key in state if stem(key) == name), None)
