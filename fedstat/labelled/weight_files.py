"""Per-client state_dicts (.pt, .safetensors, .npz), read without executing anything they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._utils import guard
from fedstat._utils.check import few
from fedstat._utils.guard import ObjectError
from fedstat._utils.lazy import xr
from fedstat.labelled import states, torch_files
from fedstat.labelled.layer_names import is_pattern, left_out, matching, require_names, stem
from fedstat.labelled.states import Stack, State, is_module
from fedstat.labelled.torch_files import Unread

Source = str | Path | State | Any
"""A file, a state_dict or a torch module."""

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip
_MOST_DIMS = 64  # of NumPy
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


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
        One per client: a file (.pt, .pth, .ckpt or .bin of torch.save, .safetensors, .npz), a mapping of names to
        arrays or tensors, or a module. Mappings may be nested: the name of a layer is its path, without that of a
        model ("state_dict", "model_state_dict", "model" or "net"). States of optimizers are left out.
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
        - Layers of Keras, Flax and Haiku: the last axis; of their transposed convolutions the last but one.
        - LSTM and GRU keep their gates one beside the other: those of one hidden unit are put together, as
          (client, unit, gate, weight).
        - Fused attention likewise: query, key and value of one feature, as (client, unit, projection, weight).

        Units of grouped convolutions have the weights of their own group's inputs. ``attrs["left_out"]`` lists
        entries of at least 2 dims that are no weights, with the reason.

    Notes
    -----
    Of a module its class decides. Of a state_dict the bias decides, which has one number a unit: its axes are matched
    with those of the weight. Recurrent layers, embeddings without bias and fused attention (``in_proj_weight``,
    ``qkv``, ``c_attn``) are known by their names, and transposed convolutions where the bias leaves it open.

    Factors of torch's pruning, weight_norm and spectral_norm become the weight that the network uses.

    Raises
    ------
    ValueError
        If a file is not what its suffix says, or holds Python objects, several clients or a part of a model; if a
        layer is missing (those present are listed), clients differ in their layers or shapes (both are named), two
        weights would be one layer, or which numbers belong to a unit is open (a kernel without bias, among these); if
        a tensor is not dense, floating-point and non-empty, or holds codes of a quantized model; if one file is given
        twice, there are no sources, or a single source or layer is given bare; or if a file, its unzipped content or
        the layers of a client would take more than 4 GiB (the environment variable FEDSTAT_MAX_BYTES sets another
        limit), or a file holds more than 8,192 entries or a name of more than 200 characters. Nothing in a file is
        executed: torch files are read without torch, NumPy files without pickle, and of these only the layers asked
        for.
    FileNotFoundError
        If there is no such file.

    Warns
    -----
    UserWarning
        If a layer has so many units that their correlations would pass that limit, a convolution without bias is
        followed by a normalisation of the size that would follow a transposed one, or a layer is a factor of a low-rank
        update (LoRA), whose units cannot be compared.

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
    module = next((s for s in given if is_module(s)), None)
    filled: dict[str, Stack] = {}
    for c, (source, client) in enumerate(zip(given, names, strict=True)):
        with ExitStack() as opened:  # closed before the next file is read
            state = _state_of(source, client, opened)
            if c == 0:
                keys, present, ignored = set(state), _compared(state, layers), states.ignored_in(state)
                wanted, without = _wanted(state, client, layers, hidden=hidden)
                if isinstance(unit_axis, Mapping):
                    matching(list(unit_axis), [name for name, _ in wanted], "what is read")
            elif state.keys() != keys:
                states.require_same(present, _compared(state, layers), without, names[0], client)
            read = [key for pair in wanted if (key := states.key_of(state, *pair)) is not None]
            declared = sum(states.size_of(state[key]) for key in read)
            guard.size(source if isinstance(source, str | Path) else client, declared, "the layers that are read")
            states.fill(filled, wanted, state, c, names, module, unit_axis)
            del state
    states.warn_of(filled)
    tree = xr.DataTree.from_dict({name: xr.Dataset({"w": _labelled(stack, names)}) for name, stack in filled.items()})
    tree.attrs = {"left_out": ignored} if ignored else {}
    return tree, without


def _labelled(stack: Stack, clients: Sequence[Any]) -> xr.DataArray:
    dims = ["client", *stack.layout.dims(stack.w.ndim - 1)]
    return xr.DataArray(stack.w, {"client": clients}, dims, attrs={"layout": str(stack.layout)})


def _compared(state: State, layers: Sequence[str] | None) -> list[str]:
    """Layers that all clients must have: all, or those that match a pattern. A missing name is an error of its own."""
    names = [name for name, _ in states.layers_in(state)] if layers is None or any(map(is_pattern, layers)) else []
    return [name for name in names if layers is None or any(fnmatchcase(name, layer) for layer in layers)]


def _state_of(source: Any, client: Any, opened: ExitStack) -> State:
    if isinstance(source, str | Path):
        return _read(Path(source), opened)
    return states.state_of(source, f"the state_dict of client {client!r}")


def _wanted(
    state: State, client: Any, layers: Sequence[str] | None, *, hidden: bool
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(name of the layer, key) of the layers to read, by the first client's state_dict; and what is left out."""
    there, without = dict(states.layers_in(state)), {}
    if layers is None:
        found = states.layers_in(state)
        if not found:
            raise ValueError(f"{client} holds no weight of at least 2 dims, only {few(state, 8)}")
    else:
        found = []
        for layer in layers:
            known = states.key_of(state, stem(layer), layer) is not None or not is_pattern(layer)
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
    for path in (guard.regular(Path(s)) for s in given if isinstance(s, str | Path)):
        status = path.stat()
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first is not path:
            raise ValueError(f"{first} and {path} are one file, but every client must have its own. Leave one out.")


def _no_single(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if isinstance(value, kinds):
        one = type(value).__name__
        raise ValueError(f"{name} must be a list, but got one {one}. Put it in brackets: {name}=[...].")


def _names(given: list[Source], clients: Sequence[Any] | None) -> list[Any]:
    if clients is not None:
        if len(clients) != len(given) or len(set(map(str, clients))) != len(given):
            raise ValueError(f"clients must be {len(given)} distinct labels, but got {list(clients)!r}")
        return list(clients)
    stems = [Path(s).stem if isinstance(s, str | Path) else i for i, s in enumerate(given)]
    if len(set(stems)) == len(stems):
        return stems
    return [str(s) if isinstance(s, str | Path) else i for i, s in enumerate(given)]


def _read(path: Path, opened: ExitStack) -> State:
    suffix = path.suffix.lower()
    shard = re.search(r"-\d{5}-of-\d{5}\.\w+$", path.name) and any(path.parent.glob("*.index.json"))
    if shard or path.name.endswith(".index.json"):
        raise ValueError(
            f"{path} belongs to a model that is saved in several files. Load the model, and give it as a module, or "
            "give one state_dict with all its layers."
        )
    if suffix not in states.SUFFIXES:
        raise ValueError(
            f"{path} must end in {', '.join(states.SUFFIXES)}, but got {suffix!r}. Convert other files to arrays by "
            "name: numpy.savez(path, **arrays)."
        )
    if suffix == ".npz":
        return states.state_of(_npz(path, opened), str(path))
    return states.state_of((_safetensors if suffix == ".safetensors" else _torch)(path), str(path))


def _torch(path: Path) -> Any:
    try:
        return torch_files.read(path)
    except guard.LimitError:
        raise
    except Exception as error:  # what a malformed file makes the parser raise is not documented
        if isinstance(error, ObjectError):
            why = (
                f"it holds a Python object of {error.name}, and loading it may run code. If you trust the file, load "
                "it by torch.load(path, weights_only=False), and give the module or its state_dict"
            )
        else:
            why = f"{guard.reason(error)}. Save the state_dict alone: torch.save(model.state_dict(), path)"
        raise ValueError(f"{path} could not be read as plain tensors: {why}.") from error


def _npz(path: Path, opened: ExitStack) -> State:
    """Shapes and types of the arrays in an .npz file, which stays open for those that are read."""
    file = opened.enter_context(guard.arrays(path))
    return {name: file.head(name) for name in file.names}


def _safetensors(path: Path) -> State:
    """Read a .safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    raw = guard.content(path)
    size = int.from_bytes(raw[:8], "little")
    try:
        if size > len(raw) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(raw)}")
        guard.size(path, size, "its header", share=guard.HEAD)
        header = guard.parsed(path, raw[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError(f"a header that is a {type(header).__name__}, not an object")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        guard.size(path, len(entries), "its header", share=guard.TENSOR, unit="tensors")
        data = memoryview(raw)[8 + size :]
        arrays = {name: _tensor(data, entry) for name, entry in entries.items()}
        ends = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        if any(end != begin for (_, end), (begin, _) in pairwise([(0, 0), *ends, (len(data), len(data))])):
            raise ValueError("tensors that overlap or leave a part of the file unused")
        return arrays
    except guard.LimitError:
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be read as safetensors: {guard.reason(error)}. Save it again.") from error


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> Any:
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in entry]:
        raise ValueError(f"a tensor without {missing[0]}")
    begin, end = entry["data_offsets"]
    if bad := [n for n in (begin, end, *entry["shape"]) if type(n) is not int or n < 0]:
        raise ValueError(f"shape and offsets must be whole numbers from 0, but got {bad[0]!r}")
    if len(entry["shape"]) > _MOST_DIMS:
        raise ValueError(f"a tensor of {len(entry['shape']):,} dims, but at most {_MOST_DIMS} are read")
    if entry["dtype"] not in _DTYPES:
        why = f"holds {entry['dtype']!s:.20} numbers. Convert it to float32 first."
        return Unread(why, tuple(entry["shape"]), len(entry["shape"]))
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"]
    if not 0 <= begin <= end <= len(data) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {begin}:{end} do not hold {shape} of {entry['dtype']}")
    array = np.frombuffer(data[begin:end], dtype).reshape(shape)
    if entry["dtype"] in _FLOAT8:
        return torch_files.small_floats(array, _FLOAT8[entry["dtype"]])
    return torch_files.widened(array) if entry["dtype"] == "BF16" else array
