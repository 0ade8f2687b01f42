"""Layout of stores (groups and variables), and labelled arrays written into it region by region, or in one go.

Every array is laid out before the first round, so that what is not computed yet reads as NaN (or False, 0).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Self

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import xr, zarr
from fedstat.store import journal, origin
from fedstat.store.journal import Journal
from fedstat.store.origin import code, now, revision, to_json
from fedstat.store.read import GROUPS, Damage, config_of, damage, describe, open_run


class Variable(NamedTuple):
    """Layout of one array.

    Attributes
    ----------
    dims : tuple of str
    dtype : str
        float arrays start as NaN, others as 0 or False.
    chunk : mapping from dim to int
        Chunk sizes; dims that are not named are not cut.
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
        out the coordinate of a dim that no variable has: several groups can take the same mapping.
    chunk : mapping from dim to int
        Chunk sizes of all arrays that have the dim.
    **variables : tuple
        (dims, dtype[, attrs[, chunk]]) of an array that the run writes, or (dims, values[, attrs]) of a known array.
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
    every = {name: _variable(*parts) for name, parts in variables.items()}
    known = {name: v for name, v in every.items() if isinstance(v, xr.Variable)}
    arrays = {name: v._replace(chunk={**chunk, **v.chunk}) for name, v in every.items() if isinstance(v, Variable)}
    used = {dim for v in every.values() for dim in v.dims}
    axes = {name: _coordinate(name, values) for name, values in coords.items()}
    return Group(xr.Dataset(known, {n: axis for n, axis in axes.items() if n in used or n not in axis.dims}), arrays)


def _variable(
    dims: str | Sequence[str], values: Any, attrs: str | Mapping[str, Any] = {}, chunk: Mapping[str, int] = {}
) -> Variable | xr.Variable:
    """Return the layout of an array, whose ``values`` are a dtype, or the variable of a known array."""
    names = tuple(dims.split() if isinstance(dims, str) else dims)
    texts = {"long_name": attrs} if isinstance(attrs, str) else attrs
    if isinstance(values, str):
        return Variable(names, values, chunk, texts)
    if chunk:
        raise ValueError(f"a known array is written whole, but got the chunk {dict(chunk)}. Leave the chunk out.")
    return xr.Variable(names, values, texts)


def _coordinate(name: str, values: Any) -> xr.Variable:
    """Return the variable of a coordinate; strings become objects, since zarr warns of strings of fixed width."""
    dims, content, *attrs = values if isinstance(values, tuple) else (name, values)
    array = np.arange(content) if isinstance(content, int | np.integer) else np.asarray(content)
    return xr.Variable(dims, array.astype(object) if array.dtype.kind == "U" else array, *attrs)


Taken = Callable[[str, "xr.DataArray"], "xr.DataArray | None"]
"""Chooses, by name, what the new store takes over of an array of the old one; None for nothing."""


def extend(
    path: str | Path,
    groups: Mapping[str, Group],
    attrs: Mapping[str, Any],
    growth: Mapping[str, tuple[Any, Any]],
    *,
    taken: Taken = lambda _, array: array,
) -> None:
    """Lay a run out anew, with its content, the state to go on from, and room for more.

    The new store is written beside the old one and then takes its place: after any interruption one of the two is in
    place, or will be put back.

    Parameters
    ----------
    path : str or Path
        A sound run, finished or not.
    groups : mapping from group name to Group
        Layout of the new store. Cells are taken over by the labels of their coordinates.
    attrs : mapping
        Attributes that change, ``config`` among them. The others stay, except ``ended``; ``history`` gains a line.
    growth : mapping from name to (there, now)
        Settings that differ from the old ones, as :func:`changed` found them.
    taken : callable (name, DataArray), optional
        See :data:`Taken`; all by default.

    Raises
    ------
    BlockingIOError
        If another process is writing to the run, or has changed its settings in the meantime.
    ValueError
        If the run is damaged, or has no journal.
    """
    path = Path(path).resolve()
    require_journal(path)
    with closing(Journal(path)) as files:
        if found := damage(path, checksums=True):
            raise journal.DamageError(
                f"the run at {path} is damaged: {describe(found)}. First resume it with its own settings, which "
                "computes again what can be; then make it longer."
            )
        if changed(path, json.loads(attrs["config"])) != growth:
            raise BlockingIOError(f"{path} was changed by another process in the meantime. Try again.")
        longer = ", ".join(f"{name} from {there} to {here}" for name, (there, here) in growth.items())
        before = origin.attributes(path)
        before.pop("ended", None)
        history = [*before.get("history", "").splitlines(), f"{now()} extended: {longer}"]
        with origin.draft(path) as (folder, lock):
            lay_out(folder, groups, {**before, **attrs, "history": "\n".join(history)})
            journal.start(folder)
            writer = Writer(folder, Journal(folder, lock=lock))
            _take_over(path, groups, writer, taken)
            for name in states(files):
                with files.path(name).open("rb") as old, writer.journal.stage(name) as new:
                    shutil.copyfileobj(old, new)
            for own in (path / journal.FOLDER).glob("*/"):  # rows that the state names: the same files
                shutil.copytree(own, folder / journal.FOLDER / own.name, copy_function=os.link)
                journal.sync(folder / journal.FOLDER / own.name)
            writer.journal.finish()
            origin.replace(folder, path)
            files.close()
            lock.release()


def _take_over(path: Path, groups: Mapping[str, Group], writer: Writer, taken: Taken) -> None:
    """Write the content of an old store to the cells with the same labels in a new one."""
    with closing(open_run(path, verify=False)) as run:
        for group, (coords, variables) in groups.items():
            here = run[group].data_vars if f"/{group}" in run.groups else {}
            for name, layout in variables.items():
                array = taken(f"{group}/{name}", here[name]) if name in here else None
                if array is None:
                    continue
                spans = [
                    list(_spans(array.indexes[d].tolist(), coords.indexes[d].tolist(), layout.chunk.get(d)))
                    for d in layout.dims
                ]
                for block in product(*spans):
                    values = array[tuple(old for old, _ in block)].to_numpy()
                    if not (np.isnan(values).all() if values.dtype.kind == "f" else not values.any()):
                        writer.write(f"{group}/{name}", tuple(new for _, new in block), values)


def _spans(old: list[Any], new: list[Any], step: int | None) -> Iterator[tuple[slice, slice]]:
    """Where labels stand in the old store and in the new one, at most ``step`` at a time."""
    if new[: len(old)] == old:
        step = step or len(old)
        for low in range(0, len(old), step):
            span = slice(low, min(low + step, len(old)))
            yield span, span
        return
    for i, label in enumerate(old):
        if label in new:
            j = new.index(label)
            yield slice(i, i + 1), slice(j, j + 1)


STATE = f"{journal.FOLDER}/state"


class Target(Protocol):
    """What takes the arrays of a run: a :class:`Writer`, or who passes them on to one."""

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """Write a region of the array ``"group/variable"``."""

    def commit(self) -> None:
        """Let what was written count."""


def states(files: Journal) -> list[str]:
    """Names of the files that hold a run's state: the first, then any parts of other processes."""
    names = itertools.chain([STATE], (f"{STATE}-{i}" for i in itertools.count(1)))
    return list(itertools.takewhile(files.files.__contains__, names))


class Writer:
    """A run store, open for writing: a context that releases it at its end.

    A new run that ends by an exception before anything is committed leaves nothing.

    Parameters
    ----------
    path : Path
    files : Journal or None
        None for a finished run, which is not written any more.
    damaged : sequence of Damage
        What was found damaged and now reads as not written.
    new : bool
        Whether the store holds nothing but its layout.
    folders : sequence of Path
        Folders made for a new run, the innermost first, which go with it.
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
            with suppress(OSError):  # others may have written there
                for folder in self._folders:
                    folder.rmdir()

    @property
    def journal(self) -> Journal:
        """The files of the store."""
        if self._files is None:
            raise ValueError(f"{self.path} is complete: nothing can be added to it")
        return self._files

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """Write a region of the array ``"group/variable"``; it counts from the next commit on."""
        if name not in self._arrays:
            # A chunk that is not on the disk was never written.
            with zarr.config.set({"array.write_empty_chunks": True}):
                self._arrays[name] = self._root[name]
        self._arrays[name][where] = values

    @contextmanager
    def write_state(self) -> Iterator[IO[bytes]]:
        """File for a state to resume from; it belongs to what is committed with it."""
        with self.journal.stage(STATE) as file:
            yield file

    def adopt_state(self, number: int, draft: Path, size: int, crc: int) -> None:
        """Add a part of the state that another process has written."""
        self.journal.adopt(f"{STATE}-{number}", draft, size, crc)

    @property
    def states(self) -> list[Path]:
        """Files of the state that was committed last: the first, then any parts of other processes."""
        return [self.journal.path(key) for key in states(self.journal)]

    def commit(self) -> None:
        """Bring what was written to the disk, all or nothing of it."""
        self.journal.commit()
        self._new = False

    def read(self, name: str) -> np.ndarray:
        """Read an array whole."""
        return np.asarray(self._root[name])

    def finish(self) -> None:
        """Say in the run's attributes that it is complete, after all that was written is on the disk.

        A state that was written stays, for :func:`extend` to go on from.
        """
        self.commit()
        self._root.attrs.update({"ended": now()})
        self.journal.finish()
        self.journal.close()
        self._files = None

    def note_code(self, *own: object) -> None:
        """Add the code that goes on with an unfinished run to what the run says of the code that made it."""
        attrs, present = dict(self._root.attrs), code(*own)
        if attrs.get("code") != present:
            for name, now_ in (("code", present), ("revision", revision())):
                names = dict.fromkeys([*str(attrs.get(name, "")).split(", "), now_])
                self._root.attrs.update({name: ", ".join(names)})

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
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
        If something is there already.
    """
    path = Path(path)
    origin.claim(path, attrs["command"])
    folders = [parent for parent in path.absolute().parents if not parent.exists()]
    with origin.draft(path) as (folder, lock):
        lay_out(folder, groups, attrs)
        journal.start(folder)
        origin.put(folder, path)
    return Writer(path, Journal(path, lock=lock), new=True, folders=folders)


def save(path: str | Path, result: xr.DataTree, attrs: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a finished result in one go; it takes its place whole.

    Parameters
    ----------
    path : str or Path
    result : DataTree
    attrs : mapping
        Attributes of the store; see :func:`provenance`.
    overwrite : bool
        Replace a store that the same command made; until the new one is whole the old one stands.

    Raises
    ------
    FileExistsError
        If something is there that is not to be replaced.
    """
    from fedstat.store.files import CODED

    path = Path(path).resolve()
    origin.claim(path, attrs["command"], overwrite=overwrite, hint="Pass overwrite=True")
    with origin.draft(path) as (folder, lock):
        _journal_node(folder)
        names = {node.path: list(node.to_dataset(inherit=node is result).variables) for node in result.subtree}
        encoding: Any = {group: dict.fromkeys(variables, CODED) for group, variables in names.items()}
        result.to_zarr(folder, mode="a", consolidated=False, zarr_format=3, encoding=encoding, write_empty_chunks=True)
        order = json.dumps([path[1:] for path in names if path != "/"])
        zarr.open_group(folder, mode="r+").attrs.update({**attrs, GROUPS: order, "ended": now()})
        journal.start(folder)
        if path.exists():
            origin.replace(folder, path)
        else:
            origin.put(folder, path)
        (path / journal.FOLDER / "lock").unlink(missing_ok=True)
        lock.release()


def lay_out(folder: Path, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    """Make the groups and the arrays of a new run, in which nothing is written yet."""
    from fedstat.store.files import CODED

    _journal_node(folder).attrs.update({**attrs, GROUPS: json.dumps([*groups])})
    for name, group in groups.items():
        encoding: Any = dict.fromkeys(group.coords.variables, CODED)
        group.coords.to_zarr(folder, group=name, mode="a", consolidated=False, zarr_format=3, encoding=encoding)
        target = zarr.open_group(folder, path=name, mode="r+")
        for variable, layout in group.variables.items():
            shape = tuple(group.coords.sizes[d] for d in layout.dims)
            floating = np.issubdtype(np.dtype(layout.dtype), np.floating)
            target.create_array(
                variable,
                shape=shape,
                chunks=tuple(layout.chunk.get(d, n) for d, n in zip(layout.dims, shape, strict=True)),
                dtype=layout.dtype,
                fill_value=np.nan if floating else 0,
                dimension_names=layout.dims,
                attributes=dict(layout.attrs),
                # All chunks in one folder, which is there from the start.
                chunk_key_encoding={"name": "default", "separator": "."},
                compressors=CODED["compressors"],
            )


def _journal_node(folder: Path) -> Any:
    """Root group of a new store; its journal is an array to zarr, which looks for no members in it."""
    root = zarr.open_group(folder, mode="a", zarr_format=3)
    root.create_array(journal.FOLDER, shape=(), dtype="bool", attributes={"long_name": "files of this store"})
    return root


def resume(path: str | Path, config: Mapping[str, Any], *, command: str, own: Sequence[object] = ()) -> Writer:
    """Open a run to go on with it; damaged parts are named in a warning and read as not written.

    Parameters
    ----------
    path : str or Path
    config : mapping
        Settings, which must be those that the run was started with.
    command, own
        As in :func:`provenance`.

    Raises
    ------
    FileNotFoundError
        If there is no run.
    FileExistsError
        If another command made it.
    BlockingIOError
        If another process is writing to it.
    ValueError
        If it was started with other settings, or is damaged where it cannot be computed again; the message says which.
    """
    path = Path(path)
    origin.claim(path, command, resume=True)
    ended = "ended" in origin.attributes(path)
    require_journal(path)
    if ended and not journal.left_over(path) and not damage(path, checksums=True):
        _require_same(path, config)
        return Writer(path, None)
    files = Journal(path)
    try:
        found = damage(path, checksums=True)
        if fixed := [one for one in found if one.fixed]:
            raise journal.DamageError(f"the run at {path} is damaged: {describe(fixed)}. {origin.AGAIN}")
        _require_same(path, config)
        if ended and not found:  # except for the last steps of finishing it
            files.finish()
            files.close()
            return Writer(path, None)
        if found:
            check.warn(f"the run at {path} is damaged: {describe(found)}. That is computed again.")
            files.forget(one.file for one in found)
        writer = Writer(path, files, damaged=found)
        if ended:
            del writer._root.attrs["ended"]
        writer.note_code(*own)
        writer.commit()
    except BaseException:
        files.close()
        raise
    return writer


GROWS = ("rounds", "checkpoints", "replicates")
"""Settings that a longer run may differ in, all else equal: named only where nothing else differs."""


def changed(path: str | Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not those that a run was started with, by name: (there, now)."""
    theirs, mine = config_of(path), json.loads(to_json(config))
    return {k: (theirs.get(k), mine.get(k)) for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)}


def has_state(path: str | Path) -> bool:
    """Whether a run has a state to go on from; those that older versions finished have none."""
    return (Path(path) / STATE).is_file()


def require_journal(path: Path) -> None:
    """ValueError if a store has no journal."""
    if not (path / journal.FOLDER / "log").exists():
        raise ValueError(f"{path} has no journal: it can be read but not continued. Choose another path.")


def _require_same(path: Path, config: Mapping[str, Any]) -> None:
    if differ := changed(path, config):
        differ = {k: v for k, v in differ.items() if k not in GROWS} or differ
        shown = "; ".join(f"{k}: {there!r} there, {now_!r} now" for k, (there, now_) in list(differ.items())[:5])
        raise ValueError(
            f"{path} was started with other settings ({shown}). Resume with those, or choose another path."
        )
