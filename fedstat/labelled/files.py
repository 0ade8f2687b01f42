"""Per-client state_dicts (.pt, .safetensors, .npz), read without executing anything they hold."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat import _archives, _guard
from fedstat._check import few
from fedstat._later import xr
from fedstat.labelled import torch_files
from fedstat.labelled.choose import is_pattern, left_out, matching, missing, require_names, stem
from fedstat.labelled.units import layout

State = Mapping[str, Any]
Source = str | Path | State | Any
"""A file, a state_dict or a torch module."""

_NESTED = ("state_dict", "model_state_dict", "model", "net")
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "?",
}  # fmt: skip


def read_weights(
    sources: Iterable[Source],
    *,
    layers: Sequence[str] | None = None,
    clients: Sequence[Any] | None = None,
    unit_axis: int | Mapping[str, int] | None = None,
) -> xr.DataTree:
    """Stack the clients' weights, layer by layer.

    Parameters
    ----------
    sources : iterable of paths, state_dicts or torch modules
        One per client: a file (.pt or .pth of torch.save, .safetensors, .npz), a mapping of names to arrays or tensors,
        or a module. A dict that holds the state_dict under "state_dict", "model_state_dict", "model" or "net" is looked
        into.
    layers : sequence of str, optional
        Layers to keep, "fc1" or "fc1.weight", or patterns such as "conv*"; all whose weight has at least 2 dims if not
        given.
    clients : sequence, optional
        Labels of the clients; file names without suffix, or positions, if not given.
    unit_axis : int or mapping from layer, or pattern of layers, to int, optional
        Which axis of the stored weights holds units, where their module, names and shapes do not say, or say wrong.
        0 takes each row for a unit.

    Returns
    -------
    xarray.DataTree
        One child a layer, with ``w`` (client, unit, weight...): dims weight, weight_1, weight_2 in the layer's
        own order. ``fedstat.split(tree["fc1"]["w"])`` takes it. Units are rows, but for these:

        - Transposed convolutions, (in, out / groups, ...): output channels.
        - Embeddings, (token, feature), and dense layers stored as (in, out): columns.
        - torch's LSTM and GRU keep their gates one below the other: those of one hidden unit are put together, as
          (client, unit, gate, weight).
        - Fused attention likewise: query, key and value of one feature, as (client, unit, projection, weight).

        Units of grouped convolutions have the weights of their own group's inputs.

    Notes
    -----
    Of a module its class decides. Of a state_dict the bias decides, which has one number a unit; recurrent layers,
    embeddings without bias and fused attention (``in_proj_weight``, ``qkv``, ``c_attn``) are known by their names, and
    transposed convolutions where the bias leaves it open.

    Raises
    ------
    ValueError
        If a file is not what its suffix says, a layer is missing (those present are listed), two weights would be one
        layer, which numbers belong to a unit is open (a kernel of Flax or Keras, whose units come last, among these),
        shapes differ between clients (both are named), a tensor is not dense, real and non-empty, one file is given
        twice, there are no sources, or a single source or layer is given bare; or if a file, its unzipped content or
        the layers of a client would take more than 4 GiB (the environment variable FEDSTAT_MAX_BYTES sets another
        limit), or a file holds more than 8,192 tensors. Nothing in a file is executed: torch files are read without
        torch, NumPy files without pickle, and of these only the layers asked for.
    FileNotFoundError
        If there is no such file.

    Warns
    -----
    UserWarning
        If a layer has so many units that their correlations would pass that limit, or a convolution without bias is
        followed by a normalisation of the size that would follow a transposed one.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> states = [{"fc1.weight": rng.normal(size=(4, 9)), "fc1.bias": np.zeros(4)} for client in range(3)]
    >>> read_weights(states)["fc1"]["w"].sizes
    Frozen({'client': 3, 'unit': 4, 'weight': 9})
    """
    return read_layers(sources, layers, clients, unit_axis=unit_axis)[0]


def read_layers(
    sources: Iterable[Source],
    layers: Sequence[str] | None,
    clients: Sequence[Any] | None,
    *,
    unit_axis: int | Mapping[str, int] | None = None,
    hidden: bool = False,
) -> tuple[xr.DataTree, dict[str, str]]:
    """As :func:`read_weights`; with ``hidden`` and no ``layers``, without those that :func:`left_out` also names."""
    _no_single("sources", sources, (str, Path, Mapping))
    if is_module(sources):
        raise ValueError(f"sources must be a list, but got one {type(sources).__name__}. Give one module per client.")
    _no_single("layers", layers, (str,))
    require_names("layers", layers or ())
    given = list(sources)
    if not given:
        raise ValueError("at least one file or state_dict must be given, one per client, but got none")
    _no_file_twice(given)
    names = _names(given, clients)
    states = [_state_of(s, name) for s, name in zip(given, names, strict=True)]
    module = next((s for s in given if is_module(s)), None)
    wanted, without = _wanted(states[0], names[0], layers, hidden=hidden)
    for source, name, state in zip(given, names, states, strict=True):
        declared = sum(_bytes(state[key]) for key in (_key(state, *pair) for pair in wanted) if key is not None)
        _guard.size(source if isinstance(source, str | Path) else name, declared, "the layers that are read")
    states = [_filled(source, state, wanted) for source, state in zip(given, states, strict=True)]
    if isinstance(unit_axis, Mapping):
        matching(list(unit_axis), [name for name, _ in wanted], "what is read")
    tree = xr.DataTree()
    for name, layer in wanted:
        tree[name] = xr.DataTree(_stack(states, names, name, layer, module, unit_axis))
    return tree, without


def is_module(source: object) -> bool:
    """Whether a source is a torch module."""
    return hasattr(source, "state_dict") and hasattr(source, "get_submodule")


def _state_of(source: Any, client: Any) -> State:
    if isinstance(source, str | Path):
        return _read(Path(source))
    content = source.state_dict() if is_module(source) else source
    return _state(content, f"the state_dict of client {client!r}")


def _wanted(
    state: State, client: Any, layers: Sequence[str] | None, *, hidden: bool
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(name of the layer, key) of the layers to read, by the first client's state_dict; and what is left out."""
    there, without = dict(_layers(state)), {}
    if layers is None:
        found = _layers(state)
        if not found:
            raise ValueError(f"{client} holds no weight of at least 2 dims, only {few(state, 8)}")
    else:
        found = []
        for layer in layers:
            known = _key(state, stem(layer), layer) is not None or not is_pattern(layer)
            several = [stem(layer)] if known else matching([layer], list(there), str(client))
            found += [(name, layer if known else there[name]) for name in several if known or name not in dict(found)]
    if bad := [name for name, n in Counter(name for name, _ in found).items() if n > 1 or name in ("", ".", "..")]:
        keys = [key for name, key in found if name == bad[0]]
        raise ValueError(f"every weight needs a layer name of its own, but got {few(map(repr, keys), 8)}. Rename them.")
    if layers is None and hidden:
        without = left_out({name: tuple(state[key].shape) for name, key in found})
        found = [pair for pair in found if pair[0] not in without]
    return found, without


def _no_file_twice(given: list[Source]) -> None:
    """Raise ValueError where two sources are one file, by whatever names and links."""
    seen: dict[tuple[int, int], Path] = {}
    for path in (_guard.regular(Path(s)) for s in given if isinstance(s, str | Path)):
        status = path.stat()
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first is not path:
            raise ValueError(f"{first} and {path} are one file, but every client must have its own. Leave one out.")


def _no_single(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if isinstance(value, kinds):
        one = type(value).__name__
        raise ValueError(f"{name} must be a list, but got one {one}. Put it in brackets: {name}=[...].")


def _stack(
    states: list[State],
    names: list[Any],
    its_name: str,
    layer: str,
    module: Any,
    unit_axis: int | Mapping[str, int] | None,
) -> xr.Dataset:
    arrays: list[NDArray[Any]] = []
    for name, state in zip(names, states, strict=True):
        key = _key(state, its_name, layer)
        if key is None:
            raise missing(layer, [s for s, _ in _layers(state)], str(name))
        array = _array(state[key], f"layer {layer!r} of {name}")
        if array.ndim < 2:
            raise ValueError(f"layer {layer!r} of {name} must have dims (unit, weight...), but got shape {array.shape}")
        if array.size == 0:
            raise ValueError(f"layer {layer!r} of {name} is without numbers, of shape {array.shape}. Leave it out.")
        if arrays and array.shape != arrays[0].shape:
            raise ValueError(
                f"layer {layer!r} must have one shape for all clients, but got {arrays[0].shape} in {names[0]} and "
                f"{array.shape} in {name}. Split clients of one architecture together."
            )
        arrays.append(array)
    key = str(_key(states[0], its_name, layer))
    stored = layout(key, its_name, states[0], module=module, unit_axis=unit_axis)
    arrays = [stored.of(array) for array in arrays]
    units = len(arrays[0])
    if units * units * 8 > _guard.limit():
        warnings.warn(
            f"layer {layer!r} has {units:,} units: their correlations alone take {units * units * 8 / 1e9:,.0f} GB "
            "when it is split. Leave it out by layers=[...], or split a part of its units.",
            UserWarning,
            stacklevel=3,
        )
    dims = ["client", *stored.dims(arrays[0].ndim)]
    coords, attrs = {"client": names}, {"layout": str(stored)}
    return xr.Dataset({"w": xr.DataArray(np.stack(arrays), dims=dims, coords=coords, attrs=attrs)})


def _key(state: State, name: str, layer: str) -> str | None:
    return next((k for k in (layer, f"{name}.weight", name) if k in state), None)


def _bytes(value: Any) -> int:
    """Bytes of the numbers that an array or tensor claims; an expanded one stores fewer."""
    if is_torch_array(value) and value.is_nested:
        return 0
    if isinstance(value, _archives.Head):
        return value.nbytes
    return prod(getattr(value, "shape", ())) * getattr(value, "itemsize", 1)


def _layers(state: State) -> list[tuple[str, str]]:
    """(name of the layer, key) of every weight with units and incoming weights."""
    return [
        (stem(k), k)
        for k, v in state.items()
        if getattr(v, "ndim", 0) >= 2 and not re.search(r"bias(_\w)?$", k) and _is_weight(v)
    ]


def _names(given: list[Source], clients: Sequence[Any] | None) -> list[Any]:
    if clients is not None:
        if len(clients) != len(given) or len(set(map(str, clients))) != len(given):
            raise ValueError(f"clients must be {len(given)} distinct labels, but got {list(clients)!r}")
        return list(clients)
    stems = [Path(s).stem if isinstance(s, str | Path) else i for i, s in enumerate(given)]
    if len(set(stems)) == len(stems):
        return stems
    return [str(s) if isinstance(s, str | Path) else i for i, s in enumerate(given)]


def _read(path: Path) -> State:
    suffix = path.suffix.lower()
    readers = {".pt": _torch, ".pth": _torch, ".safetensors": _safetensors, ".npz": _npz}
    if suffix not in readers:
        raise ValueError(f"{path} must end in {', '.join(readers)}, but got {suffix!r}")
    return _state(readers[suffix](path), str(path))


def _torch(path: Path) -> Any:
    try:
        return torch_files.read(path)
    except _guard.LimitError:
        raise
    except Exception as error:  # what a malformed file makes the parser raise is not documented
        raise ValueError(
            f"{path} could not be read as plain tensors: {_guard.reason(error)}. "
            "Save the state_dict alone: torch.save(model.state_dict(), path)."
        ) from error


def _npz(path: Path) -> State:
    with _archives.arrays(path) as file:
        return {name: file.head(name) for name in file.names}


def _filled(source: Source, state: State, wanted: list[tuple[str, str]]) -> State:
    """State with the numbers of the layers that are read, where the file gave their shapes alone."""
    keys = [key for pair in wanted if (key := _key(state, *pair)) is not None]
    unread = [key for key in keys if isinstance(state[key], _archives.Head)]
    if not unread:
        return state
    with _archives.arrays(Path(str(source))) as file:
        return {**state, **{key: file.read(key) for key in unread}}


def _safetensors(path: Path) -> State:
    """Read a .safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    raw = _guard.content(path)
    size = int.from_bytes(raw[:8], "little")
    try:
        if size > len(raw) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(raw)}")
        _guard.size(path, size, "its header", share=_guard.HEAD)
        header = _guard.parsed(path, raw[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a {type(header).__name__}, not an object")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        _guard.size(path, len(entries), "its header", share=_guard.TENSOR, unit="tensors")
        data = memoryview(raw)[8 + size :]
        arrays = {name: _tensor(data, entry) for name, entry in entries.items()}
        ends = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        if any(end != begin for (_, end), (begin, _) in pairwise([(0, 0), *ends, (len(data), len(data))])):
            raise ValueError("tensors that overlap or leave a part of the file unused")
        return arrays
    except _guard.LimitError:
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be read as safetensors: {_guard.reason(error)}. Save it again.") from error


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> NDArray[Any]:
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in entry]:
        raise ValueError(f"a tensor without {missing[0]}")
    begin, end = entry["data_offsets"]
    if bad := [n for n in (begin, end, *entry["shape"]) if type(n) is not int or n < 0]:
        raise ValueError(f"shape and offsets must be whole numbers from 0, but got {bad[0]!r}")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not among {', '.join(_DTYPES)}")
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"]
    if not 0 <= begin <= end <= len(data) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {begin}:{end} do not hold {shape} of {entry['dtype']}")
    array = np.frombuffer(data[begin:end], dtype).reshape(shape)
    return torch_files.widened(array) if entry["dtype"] == "BF16" else array


def _state(content: Any, where: str) -> State:
    if isinstance(content, Mapping):
        inner = next((content[k] for k in _NESTED if isinstance(content.get(k), Mapping)), content)
        named = {k: v for k, v in inner.items() if isinstance(k, str)}
        if any(hasattr(v, "ndim") for v in named.values()):
            _guard.size(where, len(named), "its state_dict", share=_guard.TENSOR, unit="tensors")
            return named
    kind = type(content).__name__
    raise ValueError(f"{where} must hold a state_dict, names with arrays or tensors, but got {kind} without any")


def _is_weight(value: Any) -> bool:
    """Whether an array or tensor holds no mere counts: what else of it cannot be read is an error, not passed over."""
    if isinstance(value, torch_files.Unread):
        return True
    if is_torch_array(value):
        return value.is_floating_point() or value.is_complex() or value.is_quantized
    return (value if isinstance(value, _archives.Head) else np.asarray(value)).dtype.kind in "fc"


def _array(value: Any, where: str) -> NDArray[Any]:
    if not hasattr(value, "ndim"):
        raise ValueError(f"{where} must be an array or a tensor, but got {type(value).__name__}")
    if isinstance(value, torch_files.Unread):
        raise ValueError(f"{where} {value.why}")
    if not is_torch_array(value):
        array = np.asarray(value)
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{where} must hold real numbers, but got {array.dtype}. Leave it out by layers=[...].")
        return array
    if value.is_nested or str(value.layout) != "torch.strided" or value.is_quantized:
        raise ValueError(
            f"{where} must be a dense tensor, but got {value.dtype}, {value.layout}{', nested' * value.is_nested}. "
            "Save it with .to_dense() or .dequantize()."
        )
    if value.is_meta:
        raise ValueError(f'{where} holds no numbers, only a shape (device="meta"). Save the model once it has weights.')
    if value.is_complex() or str(value.dtype) == "torch.bool":
        raise ValueError(f"{where} must hold real numbers, but got {value.dtype}. Leave it out by layers=[...].")
    import torch

    value = value.detach().cpu().resolve_neg()
    known = (torch.float64, torch.float32, torch.float16)
    return (value.float() if value.is_floating_point() and value.dtype not in known else value).numpy()
