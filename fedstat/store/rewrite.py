"""Stores with another layout in place of old ones: longer runs, and runs that end earlier than planned."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._utils.lazy import xr
from fedstat.store import journal, origin
from fedstat.store.journal import Journal
from fedstat.store.origin import now
from fedstat.store.read import GROUPS, damage, describe, open_run
from fedstat.store.write import Group, Variable, Writer, changed, lay_out, require_journal, states

Select = Callable[[str, "xr.DataArray"], "xr.DataArray | None"]
"""Function that selects, by name, the values of an old array that the new store copies; None copies nothing."""


def extend(
    path: str | Path,
    groups: Mapping[str, Group],
    attrs: Mapping[str, Any],
    growth: Mapping[str, tuple[Any, Any]],
    *,
    select: Select = lambda _, array: array,
) -> None:
    """Extend the layout of a run; keep its content and the state to resume from.

    The new store is written beside the old store and then replaces it. After any interruption, one of the two stores is
    in place or can be restored.

    Parameters
    ----------
    path : str or Path
        A sound run, finished or not.
    groups : mapping from group name to Group
        Layout of the new store. Cells are copied by the labels of their coordinates.
    attrs : mapping
        Attributes that change, ``config`` among them. Others stay, except ``ended``; ``history`` gains a line.
    growth : mapping from name to (stored, new)
        Settings that change, as :func:`changed` returns them.
    select : callable (name, DataArray), optional
        See :data:`Select`; by default, all values are copied.

    Raises
    ------
    BlockingIOError
        If another process is writing to the run, or has changed its settings in the meantime.
    ValueError
        If the run is damaged, or has no journal.
    """
    path = Path(path).resolve()
    with _open_sound(path, "which recomputes damaged arrays; then extend it") as files:
        if changed(path, json.loads(attrs["config"])) != growth:
            raise BlockingIOError(f"{path} was changed by another process in the meantime. Try again.")
        change = ", ".join(f"{name} from {old_value} to {new_value}" for name, (old_value, new_value) in growth.items())
        old_attrs = origin.attributes(path)
        old_attrs.pop("ended", None)
        history = _add_line(old_attrs, f"extended: {change}")
        with _new_store(path, files, groups, {**old_attrs, **attrs, "history": history}) as writer:
            _copy_content(path, groups, writer, select)


def shorten(
    path: str | Path,
    labels: Callable[[str], Mapping[str, Sequence[int]]],
    attrs: Mapping[str, Any],
    *,
    event: str,
    skipped: Sequence[str] = (),
    added: Mapping[str, tuple[tuple[int, ...], np.ndarray]] = {},
) -> None:
    """Rewrite an unfinished run with other labels of some dims, and record that it is finished; keep its state.

    As :func:`extend`, it writes a new store, which then replaces the old store.

    Parameters
    ----------
    path : str or Path
        A sound run.
    labels : callable (group name) -> mapping from dim to labels
        Labels of these dims in the new store. Values of other labels are dropped, and so are groups without any label
        of a dim.
    attrs : mapping
        Attributes that change.
    event : str
        Line for ``history``.
    skipped : sequence of str
        Groups at the top of the store that are dropped.
    added : mapping from "group/variable" to (index, array)
        Further values.

    Raises
    ------
    BlockingIOError
        If another process is writing to the run.
    ValueError
        If the run is damaged, or has no journal.
    """
    path = Path(path).resolve()
    with _open_sound(path, "which recomputes damaged arrays") as files:
        old_attrs = origin.attributes(path)
        names = [name for name in json.loads(old_attrs[GROUPS]) if name.partition("/")[0] not in skipped]
        with closing(open_run(path, verify=False)) as run:
            nodes = {node.path[1:]: node.to_dataset(inherit=False) for node in run.subtree}
            groups = {name: _group_with(nodes[name], labels(name)) for name in names}
        groups = {name: group for name, group in groups.items() if all(group.coords.sizes.values())}
        changing = {**attrs, "history": _add_line(old_attrs, event), "ended": now()}
        with _new_store(path, files, groups, {**old_attrs, **changing}) as writer:
            _copy_content(path, groups, writer, lambda _, array: array)
            for name, (index, values) in added.items():
                writer.write(name, index, values)


def _group_with(data: xr.Dataset, labels: Mapping[str, Sequence[int]]) -> Group:
    """Return the layout of a stored group with other labels; arrays without a relabelled dim are unchanged."""
    labels = {dim: values for dim, values in labels.items() if dim in data.dims}
    variables = {}
    for name, array in data.data_vars.items():
        if labels.keys() & set(array.dims):
            dims = tuple(map(str, array.dims))
            chunks = {d: n for d, n in zip(dims, array.encoding["chunks"], strict=True) if n < array.sizes[d]}
            variables[str(name)] = Variable(dims, str(array.dtype), chunks, array.attrs)
    coords = {dim: (dim, list(values), data[dim].attrs) for dim, values in labels.items()}
    return Group(data.drop_dims(labels).drop_encoding().assign_coords(coords), variables)


@contextmanager
def _open_sound(path: Path, repair: str) -> Iterator[Journal]:
    """Open the journal of a store; raise DamageError if the store is damaged."""
    require_journal(path)
    with closing(Journal(path)) as files:
        if damages := damage(path, checksums=True):
            raise journal.DamageError(
                f"the run at {path} is damaged: {describe(damages)}. First resume it with its stored "
                f"settings, {repair}."
            )
        yield files


def _add_line(attrs: Mapping[str, Any], event: str) -> str:
    return "\n".join([*attrs.get("history", "").splitlines(), f"{now()} {event}"])


@contextmanager
def _new_store(path: Path, files: Journal, groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> Iterator[Writer]:
    """Lay out a store beside an old one, with its state; at the end of the context, replace the old one."""
    with origin.draft(path) as (folder, lock):
        lay_out(folder, groups, attrs)
        journal.start(folder)
        writer = Writer(folder, Journal(folder, lock=lock))
        yield writer
        for name in states(files):
            with files.path(name).open("rb") as old, writer.journal.stage(name) as new:
                shutil.copyfileobj(old, new)
        for rows in (path / journal.FOLDER).glob("*/"):  # rows that the state names
            shutil.copytree(rows, folder / journal.FOLDER / rows.name, copy_function=os.link)
            journal.sync(folder / journal.FOLDER / rows.name)
        writer.journal.finish()
        origin.replace(folder, path)
        files.close()
        lock.release()


def _copy_content(path: Path, groups: Mapping[str, Group], writer: Writer, select: Select) -> None:
    """Copy the content of an old store to the cells of a new store that have equal labels."""
    from fedstat.store.files import fill_value

    with closing(open_run(path, verify=False)) as run:
        for group, (coords, variables) in groups.items():
            existing = run[group].data_vars if f"/{group}" in run.groups else {}
            for name, layout in variables.items():
                array = select(f"{group}/{name}", existing[name]) if name in existing else None
                if array is None:
                    continue
                spans = [
                    list(_match_spans(array.indexes[d].tolist(), coords.indexes[d].tolist(), layout.chunk.get(d)))
                    for d in layout.dims
                ]
                for block in product(*spans):
                    values = array[tuple(old for old, _ in block)].to_numpy()
                    if not (np.isnan(values) if values.dtype.kind == "f" else values == fill_value(values.dtype)).all():
                        writer.write(f"{group}/{name}", tuple(new for _, new in block), values)


def _match_spans(old: list[Any], new: list[Any], step: int | None) -> Iterator[tuple[slice, slice]]:
    """Iterate over the spans of equal labels in the old and the new store, at most ``step`` labels each."""
    n = min(len(old), len(new))
    if new[:n] == old[:n]:
        step = step or n
        for low in range(0, n, step):
            span = slice(low, min(low + step, n))
            yield span, span
        return
    for i, label in enumerate(old):
        if label in new:
            j = new.index(label)
            yield slice(i, i + 1), slice(j, j + 1)
