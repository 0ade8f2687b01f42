"""Layout of stores (groups and variables), and writers of labelled arrays, region by region or in one call.

Every array is laid out before the first round, so that values not computed yet read as NaN (or False, 0).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol, Self

import numpy as np

from fedstat._utils import check, guard
from fedstat._utils.lazy import xr, zarr
from fedstat.store import journal, origin
from fedstat.store.journal import Journal
from fedstat.store.origin import code, get_revision, now, to_json
from fedstat.store.read import GROUPS, Damage, config_of, damage, describe


class Variable(NamedTuple):
    """Layout of one array.

    Attributes
    ----------
    dims : tuple of str
    dtype : str
        Values that are not written are NaN in float arrays, −1 in int8 and int16 arrays, 0 or False in others.
    chunk : mapping from dim to int
        Chunk sizes; an unnamed dim is one chunk.
    attrs : mapping
        ``long_name``, ``units`` and the like.
    """

    dims: tuple[str, ...]
    dtype: str
    chunk: Mapping[str, int] = {}
    attrs: Mapping[str, Any] = {}


class Group(NamedTuple):
    """Layout of one group: its coordinates (which give the sizes) and its variables."""

    coords: xr.Dataset
    variables: Mapping[str, Variable]

    def __or__(self, other: Group) -> Group:
        """Return the layout of one group with the coordinates and the variables of both."""
        return Group(self.coords.merge(other.coords), {**self.variables, **other.variables})


def group(coords: Mapping[str, Any], chunk: Mapping[str, int] = {}, /, **variables: tuple[Any, ...]) -> Group:
    """Lay out a group.

    Parameters
    ----------
    coords : mapping from name to int, list, range, array or tuple
        n stands for the integers from 0 to n − 1. A tuple is (dims, values[, attrs]), as in xarray. The group leaves
        out the coordinate of a dim that no variable has, so several groups can share one mapping.
    chunk : mapping from dim to int
        Chunk sizes of all arrays that have the dim.
    **variables : tuple
        (dims, dtype[, attrs[, chunk]]) of an array that the run writes, or (dims, values[, attrs]) of a constant array.
        ``dims`` is a tuple, or a string such as ``"round client"``; ``attrs`` is a mapping, or the ``long_name``;
        ``chunk`` adds chunk sizes of this array to those of the group.

    Examples
    --------
    >>> metrics = group({"round": range(1, 4), "client": 2}, accuracy=("round client", "float32", "test accuracy"))
    >>> metrics.coords.sizes
    Frozen({'round': 3, 'client': 2})
    >>> metrics.variables["accuracy"].attrs
    {'long_name': 'test accuracy'}
    """
    layouts = {name: _build_variable(*parts) for name, parts in variables.items()}
    constants = {name: v for name, v in layouts.items() if isinstance(v, xr.Variable)}
    arrays = {name: v._replace(chunk={**chunk, **v.chunk}) for name, v in layouts.items() if isinstance(v, Variable)}
    used = {dim for v in layouts.values() for dim in v.dims}
    axes = {name: _build_coordinate(name, values) for name, values in coords.items()}
    return Group(
        xr.Dataset(constants, {n: axis for n, axis in axes.items() if n in used or n not in axis.dims}), arrays
    )


def _build_variable(
    dims: str | Sequence[str], values: Any, attrs: str | Mapping[str, Any] = {}, chunk: Mapping[str, int] = {}
) -> Variable | xr.Variable:
    """Return the layout of an array, whose ``values`` are a dtype, or the variable of a constant array."""
    names = tuple(dims.split() if isinstance(dims, str) else dims)
    texts = {"long_name": attrs} if isinstance(attrs, str) else attrs
    if isinstance(values, str):
        return Variable(names, values, chunk, texts)
    if chunk:
        raise ValueError(f"an array of values must be one chunk, but got chunk={dict(chunk)}. Remove chunk.")
    return xr.Variable(names, values, texts)


def _build_coordinate(name: str, values: Any) -> xr.Variable:
    """Return the variable of a coordinate; strings become objects, since zarr warns of strings of fixed width."""
    dims, content, *attrs = values if isinstance(values, tuple) else (name, values)
    if isinstance(content, int | np.integer | range):
        n = len(content) if isinstance(content, range) else int(content)
        if n * 8 > guard.limit():
            raise ValueError(
                f"{n:,} {name}s are too many: their numbers alone take {n * 8:,} bytes of memory, but a run may use at "
                f"most {guard.limit():,} bytes for them. Pass fewer {name}s."
            )
    array = np.arange(content) if isinstance(content, int | np.integer) else np.asarray(content)
    return xr.Variable(dims, array.astype(object) if array.dtype.kind == "U" else array, *attrs)


STATE = f"{journal.FOLDER}/state"


class Target(Protocol):
    """Receiver of the arrays of a run: a :class:`Writer`, or an object that passes them to a writer."""

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """Write a region of the array ``"group/variable"``."""

    def commit(self) -> None:
        """Commit all regions that were written."""


def states(files: Journal) -> list[str]:
    """Return the names of the files of a run's state: the first, then any parts of other processes."""
    names = itertools.chain([STATE], (f"{STATE}-{i}" for i in itertools.count(1)))
    return list(itertools.takewhile(files.files.__contains__, names))


class Writer:
    """Context that opens a run store for writing and releases it at the end.

    A new run that raises an exception before its first commit is deleted.

    Parameters
    ----------
    path : Path
    files : Journal or None
        None for a finished run, which is not written again.
    damaged : sequence of Damage
        Damaged files, which now read as not written.
    new : bool
        True if the store holds only its layout.
    folders : sequence of Path
        Folders created for a new run, the innermost first; they are deleted with it.
    """

    def __init__(
        self,
        path: Path,
        files: Journal | None,
        *,
        damaged: Sequence[Damage] = (),
        new: bool = False,
        folders: Sequence[Path] = (),
    ) -> None:
        self.path, self.damaged = path, damaged
        self._files, self._new, self._folders = files, new, folders
        from fedstat.store.files import Guarded, Journaled

        self._root: Any = zarr.open_group(Guarded(path) if files is None else Journaled(files), mode="r+")
        self._arrays: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._files is None:
            return
        if kind is not None and self._new:
            origin.discard(self.path)
        self._files.close()
        if kind is not None and self._new:
            with suppress(OSError):  # other processes may have written files to them
                for folder in self._folders:
                    folder.rmdir()

    @property
    def journal(self) -> Journal:
        """Journal of the store; ValueError if the run is finished."""
        if self._files is None:
            raise ValueError(f"{self.path} is finished: nothing can be added to it")
        return self._files

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """Write a region of the array ``"group/variable"``, for the next commit."""
        if name not in self._arrays:
            # Write chunks of fill values, too: a missing chunk counts as never written.
            with zarr.config.set({"array.write_empty_chunks": True}):
                self._arrays[name] = self._root[name]
        self._arrays[name][where] = values

    @contextmanager
    def write_state(self) -> Iterator[IO[bytes]]:
        """Open a file for the state to resume from, which belongs to the next commit."""
        with self.journal.stage(STATE) as file:
            yield file

    def adopt_state(self, number: int, draft: Path, size: int, crc: int) -> None:
        """Add a part of the state that another process has written."""
        self.journal.adopt(f"{STATE}-{number}", draft, size, crc)

    @property
    def states(self) -> list[Path]:
        """Files of the last committed state: the first, then any parts of other processes."""
        return [self.journal.path(key) for key in states(self.journal)]

    def commit(self) -> None:
        """Commit all regions that were written, all or none of them."""
        self.journal.commit()
        self._new = False

    def read(self, name: str) -> np.ndarray:
        """Read an entire array."""
        return np.asarray(self._root[name])

    def finish(self) -> None:
        """Commit, and record in the attributes of the run that it is finished.

        A stored state stays, so that :func:`extend` can continue from it.
        """
        self.commit()
        self._root.attrs.update({"ended": now()})
        self.journal.finish()
        self.journal.close()
        self._files = None

    def note_code(self, *functions: object) -> None:
        """Add the digest and revision of the current code to the attributes of the run."""
        attrs, digest = dict(self._root.attrs), code(*functions)
        if attrs.get("code") != digest:
            for name, value in (("code", digest), ("revision", get_revision())):
                names = dict.fromkeys([*str(attrs.get(name, "")).split(", "), value])
                self._root.attrs.update({name: ", ".join(names)})

    @property
    def finished(self) -> bool:
        """True if the run is finished."""
        return "ended" in self._root.attrs


def create(path: str | Path, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> Writer:
    """Lay out a new run.

    Parameters
    ----------
    path : str or Path
        Must not exist.
    groups : mapping from group name to Group
        Names are paths such as ``"metrics"`` or ``"split/fc1"``.
    attrs : mapping
        Attributes of the run; see :func:`provenance`.

    Raises
    ------
    FileExistsError
        If the path exists.
    """
    path = Path(path)
    origin.require_available(path, attrs["command"])
    folders = [parent for parent in path.absolute().parents if not parent.exists()]
    with origin.draft(path) as (folder, lock):
        lay_out(folder, groups, attrs)
        journal.start(folder)
        origin.put(folder, path)
    return Writer(path, Journal(path, lock=lock), new=True, folders=folders)


def save(path: str | Path, result: xr.DataTree, attrs: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a finished result in one call, all or nothing.

    Parameters
    ----------
    path : str or Path
    result : DataTree
    attrs : mapping
        Attributes of the store; see :func:`provenance`.
    overwrite : bool
        Replace a store of the same command; the old store stays until the new store is complete.

    Raises
    ------
    FileExistsError
        If the path exists and may not be replaced.
    """
    from fedstat.store.files import CODED, Direct

    path = Path(path).resolve()
    origin.require_available(path, attrs["command"], overwrite=overwrite, hint="Pass overwrite=True")
    with origin.draft(path) as (folder, lock):
        store = Direct(folder)
        _create_root(store)
        names = {node.path: list(node.to_dataset(inherit=node is result).variables) for node in result.subtree}
        encoding: Any = {group: dict.fromkeys(variables, CODED) for group, variables in names.items()}
        result.to_zarr(store, mode="a", consolidated=False, zarr_format=3, encoding=encoding, write_empty_chunks=True)
        order = json.dumps([path[1:] for path in names if path != "/"])
        zarr.open_group(store, mode="r+").attrs.update(
            {**attrs, "layout": origin.LAYOUT, GROUPS: order, "ended": now()}
        )
        journal.start(folder)
        if path.exists():
            origin.replace(folder, path)
        else:
            origin.put(folder, path)
        (path / journal.FOLDER / "lock").unlink(missing_ok=True)
        lock.release()


def lay_out(folder: Path, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    """Create the groups and the empty arrays of a new run."""
    from fedstat.store.files import Direct, encode_array, encode_group

    store = Direct(folder)
    _create_root(store).attrs.update({**attrs, "layout": origin.LAYOUT, GROUPS: json.dumps([*groups])})
    parents = sorted({str(parent) for name in groups for parent in PurePosixPath(name).parents} - {"."})
    for name, group in {**dict.fromkeys(parents, Group(xr.Dataset(), {})), **groups}.items():
        files = {**encode_group(group.coords)}
        for variable, layout in group.variables.items():
            shape = tuple(group.coords.sizes[dim] for dim in layout.dims)
            chunks = tuple(layout.chunk.get(dim, n) for dim, n in zip(layout.dims, shape, strict=True))
            encoded = encode_array(layout.dims, shape, chunks, layout.dtype, json.dumps(dict(layout.attrs)))
            files |= {f"{variable}/{key}": content for key, content in encoded.items()}
        for key, content in files.items():
            store.set_sync(f"{name}/{key}", content)


def _create_root(store: Any) -> Any:
    """Create the root group of a new store; zarr takes the journal for an array, in which it seeks no members."""
    root = zarr.open_group(store, mode="a", zarr_format=3)
    root.create_array(journal.FOLDER, shape=(), dtype="bool", attributes={"long_name": "files of this store"})
    return root


def resume(
    path: str | Path,
    config: Mapping[str, Any],
    *,
    command: str,
    user_code: Sequence[object] = (),
) -> Writer:
    """Open a run to continue it; a warning names damaged parts, which then read as not written.

    Parameters
    ----------
    path : str or Path
    config : mapping
        Settings; they must equal the settings that the run was started with.
    command, user_code
        As in :func:`provenance`.

    Raises
    ------
    FileNotFoundError
        If there is no run.
    FileExistsError
        If another command wrote the run.
    BlockingIOError
        If another process is writing to the run.
    ValueError
        If the run was started with other settings, or has damage that cannot be recomputed; the message names it.
    """
    path = Path(path)
    origin.require_available(path, command, resume=True)
    ended = "ended" in origin.attributes(path)
    require_journal(path)
    if ended and not journal.find_leftovers(path) and not damage(path, checksums=True):
        _require_same_settings(path, config)
        return Writer(path, None)
    files = Journal(path)
    try:
        damages = damage(path, checksums=True)
        if fixed := [item for item in damages if item.fixed]:
            raise journal.DamageError(f"the run at {path} is damaged: {describe(fixed)}. {origin.AGAIN}")
        _require_same_settings(path, config)
        if ended and not damages:  # except for the last steps of `finish`
            files.finish()
            files.close()
            return Writer(path, None)
        if damages:
            check.warn(f"the run at {path} is damaged: {describe(damages)}. Damaged parts are computed again.")
            files.forget(item.file for item in damages)
        writer = Writer(path, files, damaged=damages)
        if ended:
            del writer._root.attrs["ended"]
        writer.note_code(*user_code)
        writer.commit()
    except BaseException:
        files.close()
        raise
    return writer


GROWS = ("rounds", "checkpoints", "replicates")
"""Settings that may differ in a longer run; an error names them only if no other setting differs."""


def changed(path: str | Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the settings of a stored run, by name: (stored, new)."""
    stored, new = config_of(path), json.loads(to_json(config))
    return {k: (stored.get(k), new.get(k)) for k in sorted({*new, *stored}) if new.get(k) != stored.get(k)}


def state_file(path: str | Path) -> Path:
    """Return the path of the state of a run."""
    return Path(path) / STATE


def has_state(path: str | Path) -> bool:
    """Return True if a run has a state to continue from."""
    return state_file(path).is_file()


def require_journal(path: Path) -> None:
    """Raise ValueError if a store has no journal."""
    if not (path / journal.FOLDER / "log").exists():
        raise ValueError(f"{path} has no journal: it can be read but not continued. Choose another path.")


def _require_same_settings(path: Path, config: Mapping[str, Any]) -> None:
    if changes := changed(path, config):
        changes = {k: v for k, v in changes.items() if k not in GROWS} or changes
        text = "; ".join(f"{k}: {stored!r} stored, {new!r} now" for k, (stored, new) in list(changes.items())[:5])
        raise ValueError(
            f"{path} was started with other settings ({text}). Resume with stored settings, or choose another path."
        )
