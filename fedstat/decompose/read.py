"""Per-client state_dicts (.pt, .safetensors, .npz), read without executing anything they hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

State = Mapping[str, Any]
Source = str | Path | State

_NESTED = ("state_dict", "model_state_dict", "model", "net")
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "?",
}  # fmt: skip


def read_weights(
    sources: Iterable[Source], *, layers: Sequence[str] | None = None, clients: Sequence[Any] | None = None
) -> xr.DataTree:
    """Stack the clients' weights, layer by layer.

    Parameters
    ----------
    sources : iterable of paths or state_dicts
        One a client: a file (.pt or .pth of torch.save, .safetensors, .npz) or a mapping from name to array or tensor.
        A dict that holds the state_dict under "state_dict", "model_state_dict", "model" or "net" is looked into.
    layers : sequence of str, optional
        Layers to keep, "fc1" or "fc1.weight"; all whose weight has at least 2 dims if not given.
    clients : sequence, optional
        Labels of the clients; file names without suffix, or positions, if not given.

    Returns
    -------
    xarray.DataTree
        One child a layer, with ``w`` (client, unit, weight...): dims weight, weight_1, weight_2 in the layer's
        own order. ``fedstat.split(tree["fc1"]["w"])`` takes it.

    Raises
    ------
    ValueError
        If a file is not what its suffix says, a layer is missing (what there is, is listed), two weights would be one
        layer, shapes differ between clients (both are named), a tensor is not dense, there are no sources, or a
        single source or layer is given bare. Nothing in a file is executed: torch files are read with
        ``weights_only``, NumPy files without pickle.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> states = [{"fc1.weight": rng.normal(size=(4, 9)), "fc1.bias": np.zeros(4)} for client in range(3)]
    >>> read_weights(states)["fc1"]["w"].sizes
    Frozen({'client': 3, 'unit': 4, 'weight': 9})
    """
    _no_single("sources", sources, (str, Path, Mapping))
    _no_single("layers", layers, (str,))
    given = list(sources)
    if not given:
        raise ValueError("at least one file or state_dict must be given, one a client, but got none")
    names = _names(given, clients)
    states = [_read(Path(s)) if isinstance(s, str | Path) else _state(s, "the state_dict") for s in given]
    wanted = _layers(states[0]) if layers is None else [(_stem(layer), layer) for layer in layers]
    if not wanted:
        raise ValueError(f"{names[0]} holds no weight of at least 2 dims, only {_few(states[0])}")
    if bad := [stem for stem, n in Counter(stem for stem, _ in wanted).items() if n > 1 or stem in ("", ".", "..")]:
        keys = [key for stem, key in wanted if stem == bad[0]]
        raise ValueError(f"every weight needs a layer name of its own, but got {_few(map(repr, keys))}. Rename them.")
    tree = xr.DataTree()
    for stem, layer in wanted:
        tree[stem] = xr.DataTree(_stack(states, names, stem, layer))
    return tree


def _no_single(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if isinstance(value, kinds):
        one = type(value).__name__
        raise ValueError(f"{name} must be a list, but got one {one}. Put it in brackets: {name}=[...].")


def _stack(states: list[State], names: list[Any], stem: str, layer: str) -> xr.Dataset:
    arrays: list[NDArray[Any]] = []
    for name, state in zip(names, states, strict=True):
        key = next((k for k in (layer, f"{stem}.weight", stem) if k in state), None)
        if key is None:
            raise ValueError(f"{name} has no layer {layer!r}, only {_few(s for s, _ in _layers(state))}")
        array = _array(state[key], f"layer {layer!r} of {name}")
        if array.ndim < 2:
            raise ValueError(f"layer {layer!r} of {name} must have dims (unit, weight...), but got shape {array.shape}")
        if arrays and array.shape != arrays[0].shape:
            raise ValueError(
                f"layer {layer!r} must have one shape for all clients, but got {arrays[0].shape} in {names[0]} and "
                f"{array.shape} in {name}. Split clients of one architecture together."
            )
        arrays.append(array)
    weight = ["weight", *(f"weight_{i}" for i in range(1, arrays[0].ndim - 1))]
    data = xr.DataArray(np.stack(arrays), dims=["client", "unit", *weight], coords={"client": names})
    return xr.Dataset({"w": data})


def _layers(state: State) -> list[tuple[str, str]]:
    """(name of the layer, key) of every weight with units and incoming weights."""
    return [
        (_stem(k), k)
        for k, v in state.items()
        if getattr(v, "ndim", 0) >= 2 and not k.endswith("bias") and _is_float(v)
    ]


def _stem(key: str) -> str:
    return key.removesuffix(".weight").replace("/", ".")


def _names(given: list[Source], clients: Sequence[Any] | None) -> list[Any]:
    if clients is not None:
        if len(clients) != len(given) or len(set(clients)) != len(given):
            raise ValueError(f"clients must be {len(given)} distinct labels, but got {list(clients)!r}")
        return list(clients)
    stems = [Path(s).stem if isinstance(s, str | Path) else i for i, s in enumerate(given)]
    if len(set(stems)) == len(stems):
        return stems
    return [str(s) if isinstance(s, str | Path) else i for i, s in enumerate(given)]


def _read(path: Path) -> State:
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    suffix = path.suffix.lower()
    readers = {".pt": _torch, ".pth": _torch, ".safetensors": _safetensors, ".npz": _npz}
    if suffix not in readers:
        raise ValueError(f"{path} must end in {', '.join(readers)}, but got {suffix!r}")
    return _state(readers[suffix](path), str(path))


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a malformed file makes the parser raise is not documented
        raise ValueError(
            f"{path} could not be read as plain tensors: {_reason(error)}. "
            "Save the state_dict alone: torch.save(model.state_dict(), path)."
        ) from error


def _npz(path: Path) -> State:
    try:
        data = np.load(path, allow_pickle=False)
        if not isinstance(data, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name. Save with np.savez(path, **state_dict)")
        with data:
            return {name: data[name] for name in data.files}
    except Exception as error:
        raise ValueError(f"{path} could not be read as plain arrays: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """First line of the message; the kind of error where there is none."""
    return f"{type(error).__name__}: {error}".removesuffix(": ").removeprefix("ValueError: ").splitlines()[0]


def _safetensors(path: Path) -> State:
    """Read a .safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    try:
        if size > len(raw) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(raw)}")
        header = json.loads(raw[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a {type(header).__name__}, not an object")
        data = memoryview(raw)[8 + size :]
        return {name: _tensor(data, entry) for name, entry in header.items() if name != "__metadata__"}
    except Exception as error:
        raise ValueError(f"{path} could not be read as safetensors: {_reason(error)}") from error


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not among {', '.join(_DTYPES)}")
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"]
    if not 0 <= begin <= end <= len(data) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {begin}:{end} do not hold {shape} of {entry['dtype']}")
    array = np.frombuffer(data[begin:end], dtype).reshape(shape)
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _state(content: Any, where: str) -> State:
    if isinstance(content, Mapping):
        inner = next((content[k] for k in _NESTED if isinstance(content.get(k), Mapping)), content)
        named = {k: v for k, v in inner.items() if isinstance(k, str)}
        if any(hasattr(v, "ndim") for v in named.values()):
            return named
    kind = type(content).__name__
    raise ValueError(f"{where} must hold a state_dict, names with arrays or tensors, but got {kind} without any")


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else np.asarray(value).dtype.kind == "f"


def _array(value: Any, where: str) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.layout != torch.strided or value.is_quantized:
        raise ValueError(
            f"{where} must be a dense tensor, but got {value.dtype}, {value.layout}. "
            "Save it with .to_dense() or .dequantize()."
        )
    value = value.detach().cpu()
    known = (torch.float64, torch.float32, torch.float16)
    return (value.float() if value.is_floating_point() and value.dtype not in known else value).numpy()


def _few(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
