"""Runs made longer: a store with more rounds, replicates or other labels replaces the one it continues."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._later import xr
from fedstat.store import journal, place
from fedstat.store.journal import Journal
from fedstat.store.layout import Group
from fedstat.store.origin import now
from fedstat.store.read import damage, describe, open_run
from fedstat.store.write import Writer, changed, lay_out, require_journal, states

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
        before = place.attributes(path)
        before.pop("ended", None)
        history = [*before.get("history", "").splitlines(), f"{now()} extended: {longer}"]
        with place.draft(path) as (folder, lock):
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
            place.replace(folder, path)
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
