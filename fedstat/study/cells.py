"""Many cells in one store: finished cells stay; missing or damaged ones are made, in turn or by an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from fedstat import store
from fedstat._utils.lazy import xr
from fedstat._utils.parallel import as_done
from fedstat._utils.progress import shown
from fedstat.fl.job import ComputeConfig
from fedstat.store import Group, Target, Writer


class Cell(NamedTuple):
    """One part of a study, made as a whole.

    Attributes
    ----------
    name : str
        For the progress bar.
    at : mapping from dim to int
        Its indices in the study's arrays, in the order of the dims of :attr:`Study.done`.
    """

    name: str
    at: Mapping[str, int]

    @property
    def where(self) -> tuple[int, ...]:
        """The indices alone."""
        return tuple(self.at.values())


Make = Callable[[Cell, Callable[[], object]], None]
"""Makes one cell, and calls its second argument after every step. Commits what it writes, together with the number of
steps done, in the array :attr:`Study.done`."""


@dataclass(frozen=True)
class Study:
    """A study of many cells in one store, and how it is made.

    Parameters
    ----------
    title, command, references
        As in :func:`fedstat.store.provenance`.
    config : mapping
        Settings, which are noted in the store; a store with other settings is not continued.
    layout : callable () -> groups
        Layout of the store; called only for a new or extended one.
    cells : sequence of Cell
        In the order of making.
    begin : callable (Target, Machine) -> Make
        Called once, unless the study is complete; with an executor, by its workers, once for every cell.
    done : str
        Array of the layout with the steps done, one dim for each dim of a cell.
    steps : int
        Steps per cell.
    unit : str
        Name of a step, for the progress bar.
    grows : tuple of str
        Settings that can get more values later.
    """

    title: str
    command: str
    references: str
    config: Mapping[str, Any]
    layout: Callable[[], Mapping[str, Group]]
    cells: Sequence[Cell]
    begin: Callable[[Target, ComputeConfig], Make]
    done: str
    steps: int = 1
    unit: str = "cell"
    grows: tuple[str, ...] = ()


def make(
    study: Study,
    machine: ComputeConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    executor: Executor | None = None,
) -> xr.DataTree:
    """Make the cells of a study that are missing or damaged.

    Parameters
    ----------
    study : Study
    machine : Machine
    out : path, optional
        Store to stream to, a zarr folder; without it the study stays in memory.
    resume : bool
        Continue the study at ``out``, if there is one.
    progress : bool
        Show a progress bar on stderr.
    executor : Executor, optional
        Makes the cells side by side, by its workers, while this process alone writes to the store. Then
        ``study.begin`` must be something that the executor can pickle.

    Returns
    -------
    DataTree
        Loaded, if it stays in memory.

    Raises
    ------
    FileExistsError
        If something is at ``out`` and ``resume`` is not set.
    ValueError
        If ``resume`` has no path, or the settings do more than add to those of the study there.
    """

    def write(path: Path) -> None:
        with _open(study, path, resume, machine.device) as writer:
            if not writer.finished:
                _go_on(study, machine, writer, progress, executor)

    return store.run_at(out, write, resume=resume, kind="study")


def _open(study: Study, out: Path, resume: bool, device: str) -> Writer:
    """The existing store, extended if need be, or a new one."""
    store.settle(out)
    if resume and out.exists():
        _extend(study, out)
        return store.resume(out, study.config, command=study.command)
    groups = study.layout()
    attrs = store.provenance(
        study.title, study.config, command=study.command, device=device, references=study.references
    )
    return store.create(out, groups, attrs)


def _extend(study: Study, out: Path) -> None:
    """Extend the store if the settings only add values to those that may grow."""
    if not study.grows:
        return
    store.claim(out, study.command, resume=True)
    growth = store.changed(out, study.config)
    if growth.keys() == {"rounds"}:
        raise ValueError(
            f"{out} has runs of {growth['rounds'][0]} rounds, and a study stores no states to continue from: it can "
            f"get more {', '.join(study.grows)}, but not rounds={growth['rounds'][1]}. Choose another path."
        )
    if growth and growth.keys() <= set(study.grows) and all(_adds(*values) for values in growth.values()):
        store.extend(out, study.layout(), {"config": store.to_json(study.config)}, growth)


def _adds(there: Any, here: Any) -> bool:
    return bool(set(there) <= set(here) if isinstance(there, list) else there < here)


def _go_on(study: Study, machine: ComputeConfig, writer: Writer, progress: bool, executor: Executor | None) -> None:
    done = writer.read(study.done)
    missing = [
        cell
        for cell in study.cells
        if done[cell.where] != study.steps or any(one.hits(**cell.at) for one in writer.damaged)
    ]
    # With matrices of a few hundred units, BLAS threads only wait for each other.
    with threadpool_limits(1, user_api="blas"), shown(len(study.cells) * study.steps, study.unit, show=progress) as bar:
        bar.update((len(study.cells) - len(missing)) * study.steps)
        if executor is None:
            make_one = study.begin(writer, machine)
            for cell in missing:
                bar.set_description(cell.name)
                make_one(cell, bar.update)
        else:
            for cell, made in as_done(executor, partial(_elsewhere, study.begin, machine), missing):
                for name, where, values in made():
                    writer.write(name, where, values)
                writer.commit()
                bar.set_description(cell.name)
                bar.update(study.steps)
    writer.finish()


_Region = tuple[str, tuple[int | slice, ...], Any]
"""What :meth:`Writer.write` takes."""


class _Kept:
    """Takes the place of a store's writer in another process: keeps what is to be written."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        self.regions.append((name, where, np.array(values)))

    def commit(self) -> None:
        pass


def _elsewhere(begin: Callable[[Target, ComputeConfig], Make], machine: ComputeConfig, cell: Cell) -> list[_Region]:
    """What is to be written of a cell, made by this process for the one that has the store."""
    kept = _Kept()
    begin(kept, machine)(cell, lambda: None)
    return kept.regions
