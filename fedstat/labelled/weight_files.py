"""Reader of per-client state_dicts (.pt, .safetensors, .npz), which executes no content of the files."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._utils import check, guard
from fedstat._utils.check import few
from fedstat._utils.lazy import torch, xr
from fedstat._utils.loops import track
from fedstat.labelled import states
from fedstat.labelled.layer_names import find_skipped_layers, is_pattern, match_names, require_names, stem
from fedstat.labelled.states import Head, Stack, State, Unread, is_module

Source = str | Path | State | Any
"""A file, a state_dict or a torch module."""

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip
_NO_CLIENT = re.compile(
    r"(?<![a-z])(server|global|avg|averaged?|mean|aggregated?|init|initial|pretrained)(?![a-z])", re.IGNORECASE
)
"""Names of models that belong to no client."""
_INDEX = ".index.json"
"""End of the name of an index, which names the files of a model that is saved in several files."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")
_MOST_DIMS = 64  # of NumPy
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@check.named_options()
def read_weights(
    sources: Iterable[Source],
    *,
    layers: Sequence[str] | None = None,
    clients: Sequence[Any] | None = None,
    unit_axis: int | Mapping[str, int] | None = None,
    progress: bool | None = None,
) -> xr.DataTree:
    """Read weights of clients from files, state_dicts or modules, and stack them by layer.

    Parameters
    ----------
    sources : iterable of paths, state_dicts or torch modules
        One per client: a file (.pt, .pth, .ckpt or .bin of torch.save, .safetensors, .npz), the index of a model in
        several files of one folder (.index.json), a mapping of names to arrays or tensors, or a module. Mappings may be
        nested: the name of a layer is its path, without the name of a model ("state_dict", "model_state_dict", "model"
        or "net"). States of optimizers are skipped. Names with and without the wrappers "module." and "_orig_mod." are
        matched; layers have the names of the first client.
    layers : sequence of str, optional
        Layers to read, "fc1" or "fc1.weight", or patterns such as "conv*". By default all layers whose weight has at
        least 2 dims.
    clients : sequence, optional
        Labels of the clients. By default file names without suffix or, if these repeat, the innermost folders that
        differ; positions of other sources.
    unit_axis : int or mapping from layer, or pattern of layers, to int, optional
        Axis of the stored weights that holds units, if module, names and shapes do not determine it, or are wrong. 0 if
        rows are units. Gates of recurrent layers and projections of fused attention along this axis are still combined.
    progress : bool or None
        Show how many clients are done; see :func:`fedstat.fl.train`.

    Returns
    -------
    xarray.DataTree
        One child per layer, with ``w`` (client, unit, weight...): dims weight, weight_1, weight_2 in the order of the
        layer. Pass the tree, or a layer such as ``tree["fc1"]["w"]``, to :func:`fedstat.split`. ``attrs["left_out"]``
        lists entries of at least 2 dims that are no weights, with the reason.

    Raises
    ------
    ValueError
        - If a file does not fit its suffix, or holds Python objects, several clients, or a part of a model whose
          index exists; if an index names a file of another folder, or an entry that its file lacks.
        - If a layer is missing (existing layers are listed), clients differ in their layers or shapes (both are named),
          or two weights have one layer name.
        - If the axis of the units is ambiguous: without a bias, only names of torch's parameters, embeddings and LoRA's
          factors have a known axis.
        - If a tensor is not dense, floating-point and non-empty, or holds codes of a quantized model.
        - If a file is passed twice, there are no sources, or a single source or layer is not in a list.
        - If a file, its unzipped content or the layers of a client need more than 4 GiB (environment variable
          FEDSTAT_MAX_BYTES), or a file holds more than 8,192 entries or a name of more than 200 characters.
    FileNotFoundError
        If there is no such file.

    Notes
    -----
    Units are rows, except in transposed convolutions, embeddings, recurrent layers, fused attention, and layers of
    Keras, Flax and Haiku. :doc:`/background/statistics` says which axis is read, and how it is recognized. A
    UserWarning names layers with too many units, with a doubtful axis, or of a low-rank update (LoRA), whose units
    cannot be compared; and sources that are no clients by their names: "server", "global", "avg", "mean", "init".

    No content of a file is executed: torch.load reads with ``weights_only=True``, numpy.load without pickle.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> states = [{"fc1.weight": rng.normal(size=(4, 9)), "fc1.bias": np.zeros(4)} for client in range(3)]
    >>> read_weights(states)["fc1"]["w"].sizes
    Frozen({'client': 3, 'unit': 4, 'weight': 9})
    """
    return read_layers(sources, layers, clients, unit_axis=unit_axis, progress=progress)[0]


def read_layers(
    sources: Iterable[Source],
    layers: Sequence[str] | None,
    clients: Sequence[Any] | None,
    *,
    unit_axis: int | Mapping[str, int] | None = None,
    hidden: bool = False,
    progress: bool | None = False,
) -> tuple[xr.DataTree, dict[str, str]]:
    """Read weights as :func:`read_weights` does; return also the skipped layers, with the reason.

    With ``hidden`` and without ``layers``, the layers of :func:`find_skipped_layers` are skipped.
    """
    _no_single("sources", sources, (str, Path, Mapping))
    if is_module(sources) or not isinstance(sources, Iterable):
        raise ValueError(
            f"sources must be a list, but got {check.kind(sources)}. Pass one file, state_dict or module per client."
        )
    _no_single("layers", layers, (str,))
    require_names("layers", layers or ())
    sources = list(sources)
    if not sources:
        raise ValueError("sources must hold one file or state_dict per client, but are empty. Pass at least one.")
    _require_distinct_files(sources)
    names = _names(sources, clients)
    _warn_about_names(sources, names)
    module = next((s for s in sources if is_module(s)), None)
    stacks: dict[str, Stack] = {}
    with track(sources, "client", progress) as tracked:
        for c, (source, client) in enumerate(zip(tracked, names, strict=True)):
            with ExitStack() as opened:  # closed before the next file is read
                state = _state_of(source, client, opened)
                if c == 0:
                    keys, present, ignored = set(state), _compared(state, layers), states.ignored_in(state)
                    selected, skipped = _select(state, client, layers, hidden=hidden)
                    if isinstance(unit_axis, Mapping):
                        match_names(list(unit_axis), [name for name, _ in selected], "the selection of layers")
                elif (state := states.named_alike(state, keys)).keys() != keys:
                    states.require_equal_layers(present, _compared(state, layers), skipped, (names[0], client))
                selected_keys = [key for pair in selected if (key := states.key_of(state, *pair)) is not None]
                declared = sum(states.size_of(state[key]) for key in selected_keys)
                guard.size(source if isinstance(source, str | Path) else client, declared, "the selected layers")
                states.fill(stacks, selected, state, c, names, module, unit_axis)
                del state
    states.warn_about_layers(stacks)
    kinds = {} if module is None else states.indexed_modules(module, stacks)
    arrays = {name: _labelled(stack, names, kinds.get(name)) for name, stack in stacks.items()}
    tree = xr.DataTree.from_dict({name: xr.Dataset({"w": w}) for name, w in arrays.items()})
    tree.attrs = {"left_out": ignored} if ignored else {}
    return tree, skipped


def _labelled(stack: Stack, clients: Sequence[Any], module: str | None) -> xr.DataArray:
    dims = ["client", *stack.layout.dims(stack.w.ndim - 1)]
    attrs = {"layout": str(stack.layout)} | ({"module": module} if module else {})
    return xr.DataArray(stack.w, {"client": clients}, dims, attrs=attrs)


def _compared(state: State, layers: Sequence[str] | None) -> list[str]:
    """Return the layers that all clients must have: all, or all matches of patterns; names are checked later."""
    names = [name for name, _ in states.layers_in(state)] if layers is None or any(map(is_pattern, layers)) else []
    return [name for name in names if layers is None or any(fnmatchcase(name, layer) for layer in layers)]


def _state_of(source: Any, client: Any, opened: ExitStack) -> State:
    if isinstance(source, str | Path):
        return _read(Path(source), opened)
    return states.state_of(source, f"the state_dict of client {client!r}")


def _select(
    state: State, client: Any, layers: Sequence[str] | None, *, hidden: bool
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return (name, key) of the layers to read from the first client's state_dict, and the skipped layers."""
    key_by_name, skipped = dict(states.layers_in(state)), dict[str, str]()
    if layers is None:
        selected = states.layers_in(state)
        if not selected:
            raise ValueError(f"{client} holds no weight of at least 2 dims, only {few(state, 8)}")
    else:
        selected = []
        for layer in layers:
            if states.key_of(state, stem(layer), layer) is not None or not is_pattern(layer):
                selected.append((stem(layer), layer))
            else:
                matches = match_names([layer], list(key_by_name), str(client))
                selected += [(name, key_by_name[name]) for name in matches if name not in dict(selected)]
    if bad := [name for name, n in Counter(name for name, _ in selected).items() if n > 1 or name in ("", ".", "..")]:
        keys = [key for name, key in selected if name == bad[0]]
        raise ValueError(f"every weight needs a distinct layer name, but got {few(map(repr, keys), 8)}. Rename them.")
    if layers is None and hidden:
        skipped = find_skipped_layers({name: tuple(state[key].shape) for name, key in selected})
        selected = [pair for pair in selected if pair[0] not in skipped]
    return selected, skipped


def _require_distinct_files(sources: list[Source]) -> None:
    """Raise ValueError if two sources are one file, also by another name or link."""
    path_by_file: dict[tuple[int, int], Path] = {}
    for path in (guard.regular(Path(s)) for s in sources if isinstance(s, str | Path)):
        status = path.stat()
        first = path_by_file.setdefault((status.st_dev, status.st_ino), path)
        if first is not path:
            raise ValueError(f"{first} and {path} are one file, but every client needs a separate file. Drop one.")


def _warn_about_names(sources: list[Source], names: list[Any]) -> None:
    """Warn about sources that are models of no client by their names, if most sources have other names."""
    titles = [Path(s).stem if isinstance(s, str | Path) else "" for s in sources]
    indices = [i for i, title in enumerate(titles) if _NO_CLIENT.search(title) or _NO_CLIENT.search(str(names[i]))]
    if 0 < 2 * len(indices) < len(sources):
        check.warn(
            f"{few(str(sources[i]) if titles[i] else repr(names[i]) for i in indices)}: by name no model of a client, "
            "but of a server, a mean or initial values. Every source is read as a client, and statistics assume "
            "independent clients. Leave out other models."
        )


def _no_single(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if isinstance(value, kinds):
        kind = type(value).__name__
        raise ValueError(f"{name} must be a list, but got one {kind}. Put it in brackets: {name}=[...].")


def _names(sources: list[Source], clients: Sequence[Any] | None) -> list[Any]:
    if clients is not None:
        if len(clients) != len(sources) or len(set(map(str, clients))) != len(sources):
            raise ValueError(f"clients must be {len(sources)} distinct labels, but got {list(clients)!r}")
        return list(clients)
    stems = [_stem(Path(s)) if isinstance(s, str | Path) else i for i, s in enumerate(sources)]
    if len(set(stems)) == len(stems):
        return stems
    paths = [Path(s) for s in sources if isinstance(s, str | Path)]
    depth = max(len(path.parts) for path in paths)
    for level in range(1, depth if len(paths) == len(sources) else 0):  # the innermost folder that differs
        folders = [path.parts[-1 - level] if level < len(path.parts) else "" for path in paths]
        if len(set(folders)) == len(folders):
            return folders
    return [str(s) if isinstance(s, str | Path) else i for i, s in enumerate(sources)]


def _stem(path: Path) -> str:
    """Return a file's name without suffix; of the index of a model in several files, the model's name."""
    return path.name.split(".")[0] if path.name.endswith(_INDEX) else path.stem


def _read(path: Path, opened: ExitStack) -> State:
    if path.name.endswith(_INDEX):
        return _indexed(path, opened)
    if (shard := _SHARD.search(path.name)) and (indexes := sorted(path.parent.glob(f"*{_INDEX}"))):
        raise ValueError(
            f"{path} is a part of a model that is saved in several files. Pass its index {indexes[0]} instead."
        )
    if shard and int(shard[1]) <= int(shard[2]) and int(shard[2]) > 1:
        check.warn(
            f"{path} is by its name part {int(shard[1])} of {int(shard[2])} of a model, and its folder has no index of "
            f"the parts (*{_INDEX}). It is read alone: layers of other parts are missing."
        )
    return states.state_of(_content(path, opened), str(path))


def _content(path: Path, opened: ExitStack) -> Any:
    """Read a single file by its suffix."""
    suffix = path.suffix.lower()
    if suffix not in states.SUFFIXES:
        raise ValueError(
            f"{path} must end in {', '.join(states.SUFFIXES)}, but got {suffix!r}. Convert other files to arrays by "
            "name: numpy.savez(path, **arrays)."
        )
    if suffix == ".npz":
        return _npz(path, opened)
    return (_safetensors if suffix == ".safetensors" else _torch)(path)


def _indexed(path: Path, opened: ExitStack) -> State:
    """Read the entries of a model in several files by its index, which names the file of each entry."""
    text = guard.content(path)
    with guard.wrap_errors(path, "Save the model again."):
        content = guard.parsed(path, text)
    file_by_name = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_by_name, dict) or not file_by_name:
        raise ValueError(
            f"{path} must hold the file of each entry in 'weight_map', but has none. Save the model again."
        )
    files = list(dict.fromkeys(file_by_name.values()))
    if wrong := [x for x in files if not isinstance(x, str) or Path(x).name != x or not x.endswith(states.SUFFIXES)]:
        raise ValueError(
            f"{path} must name files of its own folder ({', '.join(states.SUFFIXES)}), but names {wrong[0]!r:.100}."
        )
    merged: dict[str, Any] = {}
    declared = 0
    for file in files:
        part = guard.regular(path.parent / file)
        declared += part.stat().st_size
        guard.size(path, declared, "its files")
        state = _content(part, opened)
        names = [name for name, of in file_by_name.items() if of == file]
        if lost := [name for name in names if not isinstance(state, Mapping) or name not in state]:
            raise ValueError(f"{path} names {lost[0]!r:.100} in {file}, which lacks it. Save the model again.")
        merged |= {name: state[name] for name in names}
    return states.state_of(merged, str(path))


def _torch(path: Path) -> Any:
    """Read a file of torch.save; tensors take memory only when they are used, since the file is mapped."""
    is_mapped = zipfile.is_zipfile(guard.regular(path))  # files before torch 1.6 are none
    try:
        if is_mapped:
            with zipfile.ZipFile(path) as file:
                guard.require_members(path, file.infolist())
                # torch maps compressed members as if they were numbers.
                is_mapped = all(member.compress_type == zipfile.ZIP_STORED for member in file.infolist())
        return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)
    except guard.LimitError:
        raise
    except Exception as error:  # torch does not document its errors for malformed files
        text = str(error).rpartition("WeightsUnpickler error: ")[2].partition(". In PyTorch")[0].strip()
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            reason = (
                f"it holds a Python object of {ascii(name[1][:200])[1:-1]}, and loading it may run code. If you trust "
                "the file, load it by torch.load(path, weights_only=False), and pass the module or its state_dict"
            )
        else:
            what = guard.reason(ValueError(text) if text else error)
            reason = f"{what}. Save only the state_dict: torch.save(model.state_dict(), path)"
        raise ValueError(f"{path} could not be read as plain tensors: {reason}.") from error


def _npz(path: Path, opened: ExitStack) -> State:
    """Read shapes and types of the arrays in an .npz file, which stays open for reading them."""
    file = opened.enter_context(guard.arrays(path))
    return {
        name: Head(*guard.array_head(path, file, name), partial(guard.array, path, file, name)) for name in file.files
    }


def _safetensors(path: Path) -> State:
    """Read a .safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    raw = guard.content(path)
    size = int.from_bytes(raw[:8], "little")
    with guard.wrap_errors(path, "Save it again.", what="could not be read as safetensors"):
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


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> Any:
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in entry]:
        raise ValueError(f"a tensor without {missing[0]}")
    begin, end = entry["data_offsets"]
    if bad := [n for n in (begin, end, *entry["shape"]) if type(n) is not int or n < 0]:
        raise ValueError(f"shape and offsets must be whole numbers from 0, but got {bad[0]!r}")
    if len(entry["shape"]) > _MOST_DIMS:
        raise ValueError(f"a tensor of {len(entry['shape']):,} dims, but at most {_MOST_DIMS} are possible")
    if entry["dtype"] not in _DTYPES:
        reason = f"holds {entry['dtype']!s:.20} numbers. Convert it to float32 first."
        return Unread(reason, tuple(entry["shape"]), len(entry["shape"]))
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"]
    if not 0 <= begin <= end <= len(data) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {begin}:{end} do not hold {shape} of {entry['dtype']}")
    array = np.frombuffer(data[begin:end], dtype).reshape(shape)
    if entry["dtype"] in _FLOAT8:
        return torch.from_numpy(array.copy()).view(getattr(torch, _FLOAT8[entry["dtype"]]))
    # bfloat16 is the upper half of a float32
    return (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array
