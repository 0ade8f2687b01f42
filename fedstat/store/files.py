"""Zarr stores of regular files of bounded size. Import it only when needed: zarr takes half a second to import."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr
from xarray import Dataset, open_dataset
from xarray.backends import ZarrStore
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core.indexing import LazilyIndexedArray, VectorizedIndexer
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.store.journal import FOLDER, METADATA, DamageError, Journal

CODED = {"compressors": (ZstdCodec(), Crc32cCodec())}
"""Encoding of every array."""
_SMALL = 2**16
"""Bytes up to which a file is read or written in this thread: passing it to another thread takes longer."""
_CHUNK = 2**12
"""Bytes of the limit that each chunk of an array accounts for: at most 1,048,576 chunks are read."""


class Direct(LocalStore):
    """zarr's store of local files, which reads and writes small files in this thread."""

    def _size(self, key: str) -> int:
        """Return the bytes of a file; 0 for a missing one, to zarr a chunk that was never written."""
        info = guard.status(self.root / key)
        return info.st_size if info else 0

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read a file asynchronously, as zarr does."""
        if self._size(key) <= _SMALL:
            return super().get_sync(key, prototype=prototype, byte_range=byte_range)
        return await super().get(key, prototype, byte_range)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file asynchronously, as zarr does."""
        if len(value) <= _SMALL:
            self.set_sync(key, value)
        else:
            await asyncio.to_thread(self.set_sync, key, value)


class Guarded(Direct):
    """zarr's store of local files, restricted to regular files of bounded size.

    Attributes
    ----------
    described : set of str
        Groups and arrays whose metadata were read.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self.described: set[str] = set()

    def _metadata(self, key: str, prototype: BufferPrototype | None) -> Buffer | None:
        try:
            raw = guard.content(self.root / key, share=guard.HEAD)
        except FileNotFoundError:
            return None
        self.described.add(key.rpartition("/")[0])
        return (prototype or default_buffer_prototype()).buffer.from_bytes(raw)

    def _size(self, key: str) -> int:
        try:
            return guard.regular(self.root / key).stat().st_size
        except FileNotFoundError:
            return 0

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read a file, as zarr does."""
        if key.endswith(METADATA):
            return self._metadata(key, prototype)
        self._size(key)  # raises unless it is a regular file within the limit
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read a file asynchronously, as zarr does."""
        if key.endswith(METADATA):
            return self._metadata(key, prototype)
        return await super().get(key, prototype, byte_range)


class Journaled(Guarded):
    """Zarr store whose writes go through the journal."""

    def __init__(self, files: Journal, *, read_only: bool = False) -> None:
        super().__init__(files.root, read_only=read_only)
        self._files = files

    def with_read_only(self, read_only: bool = False) -> Journaled:
        """Return a store of its files, read-only or not, as zarr does."""
        return Journaled(self._files, read_only=read_only)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Stage the file; the next commit puts it into its place."""
        with self._files.stage(key) as file:
            file.write(value.as_buffer_like())

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Stage the file, as :meth:`set` does."""
        await self.set(key, value)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read the newest content of the file, staged or committed."""
        return super().get_sync(self._key(key), prototype=prototype, byte_range=byte_range)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read the newest content of the file asynchronously, staged or committed."""
        return await super().get(self._key(key), prototype, byte_range)

    def _key(self, key: str) -> str:
        return self._files.path(key).relative_to(self._files.root).as_posix()


class _Array(ZarrArrayWrapper):
    """Array of a store: one access reads at most the limit, and errors name the array.

    zarr fills chunks that are missing. An access therefore fails if the array was deleted since the store was opened.
    """

    __slots__ = ("_metadata", "_place")

    def __init__(self, array: Any, root: Path) -> None:
        super().__init__(array)
        self._place = f"{root}: {array.path}"
        guard.size(self._place, self._bytes(array.chunks), "a chunk of it")
        guard.size(self._place, array.nchunks, "its shape", share=_CHUNK, unit="chunks")
        self._metadata = root / array.path / METADATA

    def _bytes(self, sizes: Iterable[int]) -> int:
        return prod(map(int, sizes)) * self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        if self._bytes(self.shape) > guard.limit():
            axes = zip(key.tuple, self.shape, strict=True)
            sizes = [len(range(n)[k]) if isinstance(k, slice) else np.size(k) for k, n in axes]
            size = max(sizes) if isinstance(key, VectorizedIndexer) else prod(sizes)
            guard.size(self._place, size * self.dtype.itemsize, "one access to it")
        try:
            values = super().__getitem__(key)
        except guard.LimitError:
            raise
        except Exception as error:  # damaged chunks make zarr raise errors of many types
            raise DamageError(
                f"{self._place} is damaged ({guard.reason(error)}). Compare the files with their checksums by "
                "fedstat.open_run(path, verify=True), or: python -m fedstat verify PATH"
            ) from error
        if guard.status(self._metadata) is None:
            raise FileNotFoundError(
                f"{self._place} was deleted or moved since the run was opened, so its data are gone. Put the run back, "
                "or open it where it is now: fedstat.open_run(path)."
            )
        return values


@functools.lru_cache(maxsize=1024)
def encode_array(
    dims: tuple[str, ...], shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, attrs: str
) -> Mapping[str, Buffer]:
    """Return the files of an array without values; ``attrs`` is JSON.

    They are cached: zarr takes a millisecond for each array, and the arrays of a run, and of the runs of a grid, are
    alike.
    """
    files: dict[str, Buffer] = {}
    zarr.create_array(
        MemoryStore(files),
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=fill_value(np.dtype(dtype)),
        dimension_names=dims,
        attributes=json.loads(attrs),
        # All chunks are in one folder, which exists from the start.
        chunk_key_encoding={"name": "default", "separator": "."},
        compressors=CODED["compressors"],
    )
    return files


def fill_value(dtype: np.dtype[Any]) -> float:
    """Return what values that are not written read as: NaN, −1 in integers of one or two bytes, else 0 or False."""
    if dtype.kind == "f":
        return np.nan
    return -1 if dtype.kind == "i" and dtype.itemsize < 4 else 0


def encode_group(variables: Dataset) -> Mapping[str, Buffer]:
    """Return the files of a group that holds the variables of a dataset, from a cache if they are small and plain."""
    texts = {name: v.astype(object) for name, v in variables.variables.items() if v.dtype.kind == "T"}  # of a store
    variables = variables.assign_coords({name: v for name, v in texts.items() if name in variables.coords})
    variables = variables.assign({name: v for name, v in texts.items() if name not in variables.coords})
    if variables.nbytes > _SMALL:
        return _encode_group(variables)
    parts = [
        (name, name in variables.coords, v.dims, v.dtype.str, v.values.tolist(), v.attrs)
        for name, v in variables.variables.items()
    ]
    try:
        content = json.dumps(parts)
    except TypeError:  # such as dates
        return _encode_group(variables)
    return _encode_small_group(content)


@functools.lru_cache(maxsize=256)
def _encode_small_group(content: str) -> Mapping[str, Buffer]:
    variables: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for name, is_coordinate, dims, dtype, values, attrs in json.loads(content):
        variables[is_coordinate][name] = (dims, np.array(values, dtype), attrs)
    return _encode_group(Dataset(variables[False], variables[True]))


def _encode_group(variables: Dataset) -> Mapping[str, Buffer]:
    files: dict[str, Buffer] = {}
    encoding: Any = dict.fromkeys(variables.variables, CODED)
    variables.to_zarr(MemoryStore(files), mode="a", consolidated=False, zarr_format=3, encoding=encoding)
    return files


class _Store(ZarrStore):
    """xarray's view of a group, with guarded arrays."""

    __slots__ = ("_nodes",)
    _nodes: dict[str, Any]

    @classmethod
    def of(cls, group: zarr.Group, members: dict[str, Any]) -> Self:
        """Return the view of a group whose members are known, which xarray would read again."""
        store = cls(group, "r", use_zarr_fill_value_as_mask=False, cache_members=False)
        store._nodes = members
        return store

    @property
    def members(self) -> dict[str, Any]:
        return self._nodes

    def open_store_variable(self, name: str) -> xr.Variable:
        variable = super().open_store_variable(name)
        array = _Array(self.members[name], self.zarr_group.store.root)
        return xr.Variable(variable.dims, LazilyIndexedArray(array), variable.attrs, variable.encoding)


def open_groups(path: Path) -> dict[str, Dataset]:
    """Open the groups of a store, by their paths, without the mark of the journal; arrays are read on access."""
    store = Guarded(path.absolute(), read_only=True)  # lazy arrays are read after a change of folder, too
    root = zarr.open_group(store, mode="r", use_consolidated=False, zarr_format=3)
    groups: dict[str, zarr.Group] = {"": root}
    members: dict[str, dict[str, Any]] = {"": {}}
    for name, node in root.members(max_depth=None):
        parent, _, key = name.rpartition("/")
        members[parent][key] = node
        if isinstance(node, zarr.Group):
            groups[name], members[name] = node, {}
    # zarr leaves out members whose metadata lack a name that it needs.
    listed = {f"{group}/{name}".strip("/") for group in groups for name in ("", *members[group])}
    if lost := sorted(store.described - listed):
        raise DamageError(f"the run at {path} is damaged: the metadata of {lost[0]!r} describe no group or array")
    if isinstance(members[""].get(FOLDER), zarr.Array):
        del members[""][FOLDER]
    stores = {f"/{name}": _Store.of(group, members[name]) for name, group in groups.items()}
    return {path: open_dataset(store, engine="store") for path, store in stores.items()}


def open_root_group(path: Path) -> Dataset:
    """Open the group at the top of a store."""
    group = zarr.open_group(Guarded(path, read_only=True), mode="r", use_consolidated=False, zarr_format=3)
    return open_dataset(_Store.of(group, dict(group.members())), engine="store")


def read_labels(path: Path, positions: Iterable[int]) -> list[Any]:
    """Read the values of a coordinate at some positions."""
    array = zarr.open_array(Guarded(path, read_only=True), mode="r", zarr_format=3)
    return [array[position] for position in positions]
