"""Weights of state_dicts, by layer, and their stacks over clients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check, guard
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import torch
from fedstat.labelled.layer_names import LORA, Layout, UnitsLast, layout, missing, stem

State = Mapping[str, Any]

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz")
"""Suffixes of files that can be read."""

_LONGEST = 200  # characters of a name
_MODELS = ("state_dict", "model_state_dict", "model", "net")
_BIAS = re.compile(r"(^|[._/])bias(es)?(_\w)?(:\d+)?$")
_VECTOR = re.compile(r"(^|[._/])(b|offset|scale|gamma|beta)(:\d+)?$")
_WEIGHT = re.compile(r"(^|[._/])(q?weights?|kernel)(_packed)?(:\d+)?$")
_SCALES = re.compile(
    r"((?:.+\.)?)(weight_(scale(_inv)?|zero_point)|SCB|weight\.(absmax|quant_.+)|weight_fake_quant\..+)"
)
_MARKS = re.compile(r"parametrizations\.|_(orig|g)$|weight_(scale|zero_point|fake)|SCB$|weight\.(absmax|quant)")
_WRAPPER = re.compile(r"^(module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")
_PARAMETRIZED = re.compile(r"(?:(.+)\.)?parametrizations\.([^.]+)\.(.+)")


class Head(NamedTuple):
    """Shape and type of an array in a file; ``read`` reads the array while the file is open."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], NDArray[Any]]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize


class Unread(NamedTuple):
    """A weight that cannot be read.

    Attributes
    ----------
    reason : str
        The predicate of a sentence, such as "holds F4 numbers.".
    shape : tuple of int
        Shape of the tensor; () if unknown.
    ndim : int
        Number of axes.
    """

    reason: str
    shape: tuple[int, ...] = ()
    ndim: int = 2


class Composed(NamedTuple):
    """A weight that a network computes from stored factors; the first factor has its shape."""

    compute: Callable[..., NDArray[Any]]
    factors: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.factors[0].shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return int(self.factors[0].itemsize)


def is_module(source: object) -> bool:
    """Return True if a source is a torch module."""
    return hasattr(source, "state_dict") and hasattr(source, "get_submodule")


def state_of(content: Any, where: str) -> State:
    """Return the weights, biases and counts of one client by name.

    Parameters
    ----------
    content : mapping or torch module
        Mappings may be nested: the name of an entry is its path, without the name of a model ("state_dict", "model",
        ...). States of optimizers are skipped. Factors of torch's pruning and parametrizations are composed.
    where : str
        Object that holds the content, for messages.

    Raises
    ------
    ValueError
        If there are no names with arrays or tensors, or several state_dicts with equal layers.
    """
    if is_module(content):
        return _composed(content.state_dict(), content)
    if isinstance(content, Mapping):
        named = _flatten(content, where, {})
        if (longest := max(named, key=len, default="")) and len(longest) > _LONGEST:
            raise ValueError(
                f"{where} holds {longest[:50]!r}..., a name of {len(longest):,} characters, but at most {_LONGEST} "
                "are read. Rename it."
            )
        if any(hasattr(value, "ndim") for value in named.values()):
            return _composed(named)
    kind = type(content).__name__
    if isinstance(content, list | tuple) and any(isinstance(entry, Mapping) for entry in content):
        raise _several(where, range(len(content)), "entries", "loaded")
    raise ValueError(f"{where} must hold a state_dict, names with arrays or tensors, but got {kind} without any")


def _flatten(content: Mapping[Any, Any], where: str, visited: dict[int, bool], depth: int = 0) -> dict[str, Any]:
    """Return entries by name; entries of nested mappings that hold weights, by path.

    ``visited`` records for each visited mapping if it holds weights.
    """
    if visited.get(id(content)):
        raise ValueError(f"{where} holds one state_dict under two names. Load it, and pass the state_dict itself.")
    if id(content) in visited:  # without weights, or nested in itself
        return {}
    if depth > guard.DEPTH:
        raise ValueError(
            f"{where} is nested too deeply: at most {guard.DEPTH} levels are read. Pass the state_dict itself."
        )
    visited[id(content)] = False
    nested = {str(k): v for k, v in content.items() if isinstance(v, Mapping) and "param_groups" not in v}
    inner = {k: state for k, v in nested.items() if _holds_weights(state := _flatten(v, where, visited, depth + 1))}
    models = [name for name in _MODELS if name in inner]
    if len(inner) > 1 and not models and all(map(_is_flat, (nested[name] for name in inner))):
        shapes = [{key: shape_of(value) for key, value in state.items()} for state in inner.values()]
        if all(state_shapes == shapes[0] for state_shapes in shapes):
            raise _several(where, inner, "state_dicts with equal layers", "loaded.values(), clients=list(loaded)")
    named = {k: v for k, v in content.items() if isinstance(k, str) and not isinstance(v, Mapping)}
    model = inner.pop(models[0]) if len(models) == 1 else {}
    parts = {f"{name}.{key}": value for name, state in inner.items() for key, value in state.items()}
    if model.keys() & (named.keys() | parts.keys()):
        model = {f"{models[0]}.{key}": value for key, value in model.items()}
    flat = named | model | parts
    if len(flat) < len(named) + len(model) + sum(map(len, inner.values())):
        raise ValueError(f"{where} has two entries with one path, such as 'a.b' and 'b' in 'a'. Rename one.")
    if _holds_weights(flat):
        guard.size(where, len(flat), "its state_dict", share=guard.TENSOR, unit="entries")
        visited[id(content)] = True
    return flat


def _is_flat(state: Mapping[Any, Any]) -> bool:
    """Return True if names are paths, as in a state_dict, and not names of a nested tree of layers."""
    return any(re.search(r"[./]|^weight$", str(name)) for name in state)


def _holds_weights(state: State) -> bool:
    return any(is_weight(key, value) for key, value in state.items())


def _several(where: str, names: Collection[Any], content: str, sources: str) -> ValueError:
    return ValueError(
        f"{where} holds {len(names)} {content} ({few(map(repr, names))}), but a source is one client. Load it, and "
        f"pass one source per client, fedstat.read_weights({sources}), or a single state_dict."
    )


def is_weight(key: str, value: Any) -> bool:
    """Return True if an entry may be a layer's weight: at least 2 dims, and no bias, scale, mask or count."""
    if getattr(value, "ndim", 0) < 2 or _is_bias(key, value):
        return False
    if isinstance(value, Unread | Composed) or _WEIGHT.search(key):
        return True
    if is_torch_array(value):
        return value.is_floating_point() or value.is_complex() or value.is_quantized
    return (value if isinstance(value, Head) else np.asarray(value)).dtype.kind in "fcV"


def _is_bias(key: str, value: Any) -> bool:
    return bool(_BIAS.search(key) or (_VECTOR.search(key) and sum(size != 1 for size in shape_of(value)) < 2))


def layers_in(state: State) -> list[tuple[str, str]]:
    """Return (name of the layer, key) for every weight with units and incoming weights."""
    return [(stem(key), key) for key, value in state.items() if is_weight(key, value)]


def ignored_in(state: State) -> dict[str, str]:
    """Return the entries of at least 2 dims that are no weights, with the reason."""
    return {
        key: "bias or scale" if _is_bias(key, value) else f"{value.dtype}, no weight"
        for key, value in state.items()
        if getattr(value, "ndim", 0) > 1 and not is_weight(key, value)
    }


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or tensor; () for other objects and nested tensors."""
    return () if getattr(value, "is_nested", False) else tuple(getattr(value, "shape", ()))


def size_of(value: Any) -> int:
    """Return the size in bytes of an array or tensor when expanded; it may store fewer."""
    return prod(shape_of(value)) * getattr(value, "itemsize", 1)


def numbers_of(value: Any, where: str) -> NDArray[Any]:
    """Return a weight as a NumPy array of floating-point numbers, or raise ValueError."""
    if isinstance(value, Composed):
        return value.compute(*(_array(factor, where) for factor in value.factors))
    array = _array(value, where)
    if array.dtype.kind in "iu":
        raise ValueError(
            f"{where} must hold floating-point weights, but got {array.dtype}: codes of a quantized model, or counts. "
            "Pass the dequantized weights, or exclude it by layers=[...]."
        )
    if array.dtype.kind != "f":
        raise ValueError(f"{where} must hold real numbers, but got {array.dtype}. Exclude it by layers=[...].")
    return array


def _array(value: Any, where: str) -> NDArray[Any]:
    if not hasattr(value, "ndim"):
        raise ValueError(f"{where} must be an array or a tensor, but got {type(value).__name__}")
    if isinstance(value, Unread):
        raise ValueError(f"{where} {value.reason}")
    if isinstance(value, Head):
        return value.read()
    if not is_torch_array(value):
        check.unmasked(where, value)
        return np.asarray(value)
    if value.is_nested or str(value.layout) != "torch.strided" or value.is_quantized:
        raise ValueError(
            f"{where} must be a dense tensor, but got {value.dtype}, {value.layout}{', nested' * value.is_nested}. "
            "Save it with .to_dense() or .dequantize()."
        )
    if value.is_meta:
        raise ValueError(f'{where} holds no numbers, only a shape (device="meta"). Save the model once it has weights.')
    array: NDArray[Any] = check.numpy_of(value)
    return array


def _composed(state: State, module: Any = None) -> State:
    """Replace factors by the weight that the network computes from them, and mark weights that have scales."""
    if not any(map(_MARKS.search, state)):
        return state
    arrays = [key for key, value in state.items() if hasattr(value, "ndim")]
    owner = {key: weight for key in arrays if (weight := _composed_name(key, state)) is not None}
    coded = {f"{match[1]}weight": key for key in arrays if (match := _SCALES.fullmatch(key))}
    result: dict[str, Any] = {}
    for key, value in state.items():
        name = owner.get(key, key)
        if key in owner and name not in result:
            result[name] = _weight([k for k in owner if owner[k] == name], state, module)
        elif name in coded:
            reason = f"is stored as codes that {coded[name]!r} scales to weights. Pass the dequantized weights."
            result[name] = Unread(reason, shape_of(value), getattr(value, "ndim", 0))
        elif key not in owner:
            result[name] = value
    return result


def _composed_name(key: str, state: State) -> str | None:
    """Return the name of the tensor that an entry is a factor of, in torch's pruning, norms and parametrizations."""
    if match := _PARAMETRIZED.fullmatch(key):
        return f"{match[1]}.{match[2]}" if match[1] else match[2]
    name, _, part = key.rpartition("_")
    if part not in ("orig", "mask", "g", "v", "u"):
        return None
    has = {other for other in ("orig", "mask", "g", "v", "u") if f"{name}_{other}" in state}
    normed = {"g", "v"} <= has and re.search(r"weight\w*$", name)
    return name if {"orig", "mask"} <= has or {"orig", "u"} <= has or normed else None


def _weight(keys: list[str], state: State, module: Any) -> Any:
    """Return the tensor that the network computes from factors; a module computes it by its parametrization."""
    if module is not None and (match := _PARAMETRIZED.fullmatch(keys[0])):
        with torch.no_grad():
            return copy.deepcopy(module.get_submodule(match[1] or "").parametrizations[match[2]]).eval()()
    renamed = {"original": "orig", "original0": "g", "original1": "v", "0._u": "u", "0._v": "v"}
    kinds = {}
    for key in keys:
        match = _PARAMETRIZED.fullmatch(key)
        kinds[renamed.get(match[3], match[3]) if match else key.rpartition("_")[2]] = state[key]
    for names, compute in _COMPUTE.items():
        factors = tuple(kinds[name] for name in names if name in kinds)
        if kinds.keys() == set(names) and (compute is _spectral or _broadcast(*map(shape_of, factors))):
            return Composed(compute, factors)
    shape = max((shape_of(state[key]) for key in keys), key=len)
    reason = (
        f"is computed from {few(map(repr, keys))} by an unknown rule. Pass modules, or let torch compute the weight "
        "first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')."
    )
    return Unread(reason, shape, len(shape))


def _broadcast(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if the other shape has no axis, or every axis has the size of the first shape or 1."""
    return not other or (len(other) == len(shape) and all(b in (1, a) for a, b in zip(shape, other, strict=True)))


def _pruned(weight: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    return weight * mask.astype(weight.dtype)


def _normed(direction: NDArray[Any], length: NDArray[Any]) -> NDArray[Any]:
    """Scale directions, direction/‖direction‖, by lengths, with a norm for each entry of ``length``."""
    axes = tuple(axis for axis in range(direction.ndim) if length.ndim == 0 or length.shape[axis] == 1)
    norm = np.sqrt(np.square(direction, dtype=float).sum(axes, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN in the network, too
        return direction * (length / norm).astype(direction.dtype)


def _spectral(weight: NDArray[Any], u: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """Return weight/σ with σ = uᵀ W v, where W is the weight as a matrix with units first."""
    best: tuple[float, Any] = (-1.0, None)
    for axis in (axis for axis, size in enumerate(weight.shape) if size == u.size and u.size * v.size == weight.size):
        image = np.moveaxis(weight, axis, 0).reshape(u.size, -1) @ v
        cosine = float(abs(u @ image) / max(np.linalg.norm(image) * np.linalg.norm(u), np.finfo(float).tiny))
        if (score := float(np.nan_to_num(cosine))) > best[0]:  # u and Wv are parallel along the axis of the units
            best = score, u @ image
    if best[1] is None or (best[0] < 0.9 and weight.shape.count(u.size) > 1):
        raise ValueError(
            f"spectral_norm stores u of {u.size} and v of {v.size} numbers for a weight of shape {weight.shape}: the "
            "axis of the units is ambiguous. Compute the weight first: torch.nn.utils.remove_spectral_norm(module)."
        )
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN in the network, too
        return weight / best[1]


_COMPUTE: dict[tuple[str, ...], Callable[..., NDArray[Any]]] = {
    ("orig", "mask"): _pruned,
    ("v", "g"): _normed,
    ("orig", "u", "v"): _spectral,
}
"""Functions that compute weights of torch's pruning, weight_norm and spectral_norm, by names of factors."""


class Stack(NamedTuple):
    """Weights of one layer, stacked over clients.

    Attributes
    ----------
    shape : tuple of int
        Shape of one client's weight, as it is stored.
    layout : Layout
        Layout of the stored weight.
    labels : list of (dim, labels)
        Labels of the first client's weight, if it is a DataArray or DataFrame; all clients must have equal labels.
    w : array (client, unit, weight...)
        Filled client by client, so that no file stays in memory.
    """

    shape: tuple[int, ...]
    layout: Layout
    labels: list[tuple[str, list[Any]]]
    w: NDArray[Any]


def fill(
    stacks: dict[str, Stack],
    selected: list[tuple[str, str]],
    state: State,
    c: int,
    names: list[Any],
    module: Any,
    unit_axis: int | Mapping[str, int] | None,
) -> None:
    """Write the weights of client ``c`` into the stacks; the first client creates the stacks."""
    units_last: dict[bool, UnitsLast] = {}
    for name, layer in selected:
        key = key_of(state, name, layer)
        if key is None:
            raise missing(layer, [s for s, _ in layers_in(state)], str(names[c]))
        array = numbers_of(state[key], f"layer {layer!r} of {names[c]}")
        if array.ndim < 2:
            raise ValueError(
                f"layer {layer!r} of {names[c]} must have dims (unit, weight...), but got shape {array.shape}"
            )
        if array.size == 0:
            raise ValueError(
                f"layer {layer!r} of {names[c]} is empty, of shape {array.shape}. Exclude it by layers=[...]."
            )
        if c == 0:
            stored = layout(key, name, state, module=module, unit_axis=unit_axis, units_last=units_last)
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
                f"layer {layer!r} must have equal labels in one order for all clients, but {names[c]} and {names[0]} "
                "differ. Reorder them, or pass arrays without labels."
            )
        if (dtype := np.result_type(stack.w, array)) != stack.w.dtype:
            w = np.empty(stack.w.shape, dtype)
            w[:c] = stack.w[:c]  # the rest is not set yet: a cast of it may warn
            stacks[name] = stack = stack._replace(w=w)
        stack.w[c] = stack.layout.of(array)


def warn_about_layers(stacks: dict[str, Stack]) -> None:
    """Warn about layers too wide for their correlations, and low-rank factors, whose units are not comparable."""
    for name, stack in stacks.items():
        if (size := stack.w.shape[1] ** 2 * 8) > guard.limit():
            check.warn(
                f"layer {name!r} has {stack.w.shape[1]:,} units: a split needs {size / 1e9:,.0f} GB for their "
                "correlations alone. Exclude it by layers=[...], or split a part of its units."
            )
    if factors := [name for name in stacks if LORA.search(name)]:
        check.warn(
            f"{few(factors)}: factors of low-rank updates BA. Units of a factor cannot be compared over clients, since "
            "(BG)(inverse of G)A equals BA for every G. Pass the products BA, or merged weights. Base weights stored "
            "with the factors do not include the update."
        )


def require_equal_layers(
    first: Collection[str], second: Collection[str], skipped: Collection[str], clients: tuple[Any, Any]
) -> None:
    """Raise ValueError if two clients differ in layers that are not skipped."""
    lost, more = ([x for x in a if x not in b and x not in skipped] for a, b in ((first, second), (second, first)))
    if lost or more:
        has, lacks = clients if lost else clients[::-1]
        raise ValueError(
            f"clients must have equal layers, but {has} has {few(lost or more)} and {lacks} does not. Name layers "
            "that all clients have."
        )


def key_of(state: State, name: str, layer: str) -> str | None:
    """Return the key of a layer, by its name or the requested name; None if it does not exist."""
    direct = next((key for key in (layer, f"{name}.weight", name) if key in state), None)
    return direct or next((key for key in state if stem(key) == name), None)


def named_alike(state: State, keys: Collection[str]) -> State:
    """Rename the entries of a state_dict to the keys of the first client if they differ by wrappers alone.

    Wrappers are torch's DataParallel ("module.") and torch.compile ("_orig_mod.").

    Examples
    --------
    >>> named_alike({"module.fc.weight": 1, "module.fc.bias": 2}, {"fc.weight", "fc.bias"})
    {'fc.weight': 1, 'fc.bias': 2}
    """
    if state.keys() == keys:
        return state
    key_by_plain = {_WRAPPER.sub("", key): key for key in keys}
    renamed = {key_by_plain.get(_WRAPPER.sub("", key), key): value for key, value in state.items()}
    return renamed if len(renamed) == len(state) and len(key_by_plain) == len(keys) else state


def indexed_modules(module: Any, layers: Iterable[str]) -> dict[str, str]:
    """Return class and shape of the weight of layers whose name ends in an index, as in a torch Sequential.

    Examples
    --------
    >>> from torch import nn
    >>> indexed_modules(nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU()), ["0"])
    {'0': 'Conv2d 16×1×5×5'}
    """
    kinds = {}
    for layer in layers:
        if layer.rpartition(".")[2].isdigit():
            matches = [m for name, m in module.named_modules() if name == layer or name.endswith(f".{layer}")]
            if len(matches) == 1 and hasattr(matches[0], "weight"):
                kinds[layer] = f"{type(matches[0]).__name__} {'×'.join(map(str, matches[0].weight.shape))}"
    return kinds
