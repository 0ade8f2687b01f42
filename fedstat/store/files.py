"""Zarr stores of regular files of bounded size; a module of its own, since zarr takes half a second to import."""

from __future__ import annotations

import asyncio
import gzip
import io
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr
from xarray import Dataset, open_dataset
from xarray.backends import ZarrStore
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core.indexing import LazilyIndexedArray, VectorizedIndexer
from zarr.abc.store import ByteRequest
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import register_pipeline
from zarr.storage import LocalStore

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.store.journal import DamageError, Journal

CODED = {"compressors": (ZstdCodec(), Crc32cCodec())}
"""Encoding of every array."""
_PLAIN, _PACKED = {"bytes", "vlen-utf8", "transpose", "crc32c"}, {"zstd", "blosc", "gzip"}
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
_CHUNK = 2**12
"""Bytes set aside for each chunk of an array (1,048,576 of them)."""


class Guarded(LocalStore):
    """zarr's store of local files, which opens regular files of bounded size alone."""

    def _metadata(self, key: str, prototype: BufferPrototype | None) -> Buffer | None:
        """A file of metadata, read at once: it is small, and handing it to a thread takes longer."""
        try:
            raw = guard.content(self.root / key, share=guard.HEAD)
        except FileNotFoundError:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(raw)

    def _require(self, key: str) -> None:
        with suppress(FileNotFoundError):  # which zarr takes for a chunk that was never written
            guard.regular(self.root / key)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As zarr's."""
        if key.endswith(_METADATA):
            return self._metadata(key, prototype)
        self._require(key)
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As zarr's."""
        if key.endswith(_METADATA):
            return self._metadata(key, prototype)
        self._require(key)
        return await super().get(key, prototype, byte_range)


class Journaled(Guarded):
    """A store whose writes go through the journal."""

    def __init__(self, files: Journal, *, read_only: bool = False) -> None:
        super().__init__(files.root, read_only=read_only)
        self._files = files

    def with_read_only(self, read_only: bool = False) -> Journaled:
        """As zarr's."""
        return Journaled(self._files, read_only=read_only)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Stage the file, which counts from the next commit on."""
        with self._files.stage(key) as file:
            file.write(value.as_buffer_like())

    async def _set(self, key: str, value: Buffer, exclusive: bool = False) -> None:  # noqa: ARG002
        await asyncio.to_thread(self.set_sync, key, value)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The file as last staged."""
        return super().get_sync(self._key(key), prototype=prototype, byte_range=byte_range)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The file as last staged."""
        return await super().get(self._key(key), prototype, byte_range)

    def _key(self, key: str) -> str:
        return self._files.path(key).relative_to(self._files.root).as_posix()


class Bounded(BatchedCodecPipeline):
    """zarr's decoding of chunks, by known codecs, of which none unpacks to more bytes than the chunk's shape takes."""

    packer = ""

    @classmethod
    def from_codecs(cls, codecs: Iterable[Any], **options: Any) -> Self:
        """As zarr's; ValueError if a codec is unknown, as one of zarr 2 runs code, or two of them compress."""
        made = super().from_codecs(codecs, **options)
        names = [name for codec in made for name in _names(codec)]
        if unknown := [name for name in names if name not in _PLAIN | _PACKED]:
            raise ValueError(f"its codec {unknown[0]!r:.100} is not one of {', '.join(sorted(_PLAIN | _PACKED))}")
        if len(packed := [name for name in names if name in _PACKED]) > 1:
            raise ValueError(f"it is compressed more than once, by {' and '.join(packed[:8])}")
        object.__setattr__(made, "packer", "".join(packed))
        return made

    async def decode_batch(self, chunk_bytes_and_specs: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
        """As zarr's; ValueError if a chunk would unpack to more than its shape takes."""
        pairs = list(chunk_bytes_and_specs)
        for raw, spec in pairs:
            if raw is not None and self.packer:
                dtype = spec.dtype.to_native_dtype()
                most = prod(spec.shape) * dtype.itemsize if dtype.kind in "biufc" else guard.limit()
                if _unpacked(raw.as_numpy_array().view("u1"), self.packer, most) > most:
                    raise ValueError(f"a chunk would unpack to more than the {most:,} bytes that its shape takes")
        return await super().decode_batch(pairs)


register_pipeline(Bounded)


def _names(codec: Any) -> Iterable[str]:
    """Names of a codec, or of the several that one of zarr 2 consists of."""
    parts = [*(codec.filters or ()), codec.compressor] if hasattr(codec, "filters") else [codec]
    return [str(getattr(one, "codec_id", None) or one.to_dict()["name"]) for one in parts if one is not None]


def _unpacked(raw: np.ndarray, packer: str, most: int) -> float:
    """Bytes that a chunk unpacks to, as its head says; infinity where it does not say."""
    head = raw[:18].tobytes()
    if packer == "blosc":
        return int.from_bytes(head[4:8], "little")
    if packer == "gzip":
        with gzip.GzipFile(fileobj=io.BytesIO(raw.tobytes())) as stream:
            return len(stream.read(most + 1))
    if len(head) < 6 or not head.startswith(b"\x28\xb5\x2f\xfd"):
        return 0  # no zstd, as the decoder will say
    single, width = head[4] >> 5 & 1, 1 << (head[4] >> 6)  # RFC 8878, section 3.1.1.1
    if width == 1 and not single:
        return np.inf
    at = 6 - single + (0, 1, 2, 4)[head[4] & 3]
    return int.from_bytes(head[at : at + width], "little") + 256 * (width == 2)


class _Array(ZarrArrayWrapper):
    """Array of a store, of which no more than the limit is read at once, and which errors name."""

    __slots__ = ("_place",)

    def __init__(self, array: Any, root: Path) -> None:
        super().__init__(array)
        self._place = f"{root}: {array.path}"
        guard.size(self._place, self._bytes(array.chunks), "a chunk of it")
        guard.size(self._place, array.nchunks, "its shape", share=_CHUNK, unit="chunks")

    def _bytes(self, sizes: Iterable[int]) -> int:
        return prod(map(int, sizes)) * self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        if self._bytes(self.shape) > guard.limit():
            each = zip(key.tuple, self.shape, strict=True)
            sizes = [len(range(n)[k]) if isinstance(k, slice) else np.size(k) for k, n in each]
            size = max(sizes) if isinstance(key, VectorizedIndexer) else prod(sizes)
            guard.size(self._place, size * self.dtype.itemsize, "what is read of it at once")
        try:
            return super().__getitem__(key)
        except guard.LimitError:
            raise
        except Exception as error:  # what damaged chunks make zarr raise is of many types
            raise DamageError(
                f"{self._place} is damaged ({guard.reason(error)}). Compare the files with their checksums by "
                "fedstat.open_run(path, verify=True), or: python -m fedstat verify PATH"
            ) from error


class _Store(ZarrStore):
    """xarray's view of a group, of guarded arrays."""

    __slots__ = ()

    def open_store_variable(self, name: str) -> xr.Variable:
        found = super().open_store_variable(name)
        array = _Array(self.members[name], self.zarr_group.store.root)
        return xr.Variable(found.dims, LazilyIndexedArray(array), found.attrs, found.encoding)


def _guarded() -> Any:
    """Context in which zarr makes arrays whose chunks are decoded by :class:`Bounded`."""
    return zarr.config.set({"codec_pipeline.path": f"{Bounded.__module__}.{Bounded.__qualname__}"})


def groups(path: Path) -> dict[str, Dataset]:
    """Open the groups of a store, by their paths; arrays are read when they are used."""
    with _guarded():
        found = _Store.open_store(Guarded(path, read_only=True), group="/", consolidated=False)
        return {name: open_dataset(store, engine="store") for name, store in found.items()}


def root_group(path: Path) -> Dataset:
    """Open the group at the top of a store."""
    with _guarded():
        return open_dataset(_Store.open_group(Guarded(path, read_only=True), consolidated=False), engine="store")


def labels(path: Path, at: Iterable[int]) -> list[Any]:
    """Some values of a coordinate."""
    with _guarded():
        array = zarr.open_array(Guarded(path, read_only=True), mode="r")
        return [array[i] for i in at]
