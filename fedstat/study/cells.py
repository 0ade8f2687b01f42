"""A study of many cells in one store: cells are computed in any process, resumed, and never repeated."""

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
from fedstat._utils.loops import as_done, on_interrupt, progress_bar
from fedstat.fl.job import ComputeConfig
from fedstat.store import Group, Target, Writer


class Cell(NamedTuple):
    """Part of a study that is computed as a unit.

    Attributes
    ----------
    name : str
        Name in the progress bar.
    indices : mapping from dim to int
        Indices of the cell in the arrays of the study, in the order of the dims of :attr:`Study.done`.
    """

    name: str
    indices: Mapping[str, int]

    @property
    def where(self) -> tuple[int, ...]:
        """Indices of the cell as a tuple."""
        return tuple(self.indices.values())


Make = Callable[[Cell, Callable[[], object]], None]
"""Computes a cell and calls its second argument after every step. It commits its arrays together with the number of
completed steps in the array :attr:`Study.done`."""


@dataclass(frozen=True)
class Study:
    """Study of many cells in one store.

    Parameters
    ----------
    title, command, references
        Arguments of :func:`fedstat.store.provenance`.
    config : mapping
        Settings, which are stored; a store with other settings is not continued.
    layout : callable () -> groups
        Returns the layout of the store; called only if the store is created or extended.
    cells : sequence of Cell
        Cells in the order of computation.
    begin : callable (Target, ComputeConfig) -> Make
        Called once, unless the study is complete. With an executor, its workers call it once per cell.
    done : str
        Name of the array that counts completed steps, with one dim per dim of a cell.
    steps : int
        Steps per cell.
    unit : str
        Name of a step, for the progress bar.
    grows : tuple of str
        Settings that may get more values later.
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
    progress: bool | None = None,
    executor: Executor | None = None,
) -> xr.DataTree:
    """Compute the cells of a study that are missing or damaged.

    Parameters
    ----------
    study : Study
    machine : ComputeConfig
    out : path, optional
        Path of the zarr store to write. None keeps the study in memory.
    resume : bool
        Continue the study at ``out``, if it exists.
    progress : bool or None
        Show how many steps are done; see :func:`fedstat.fl.train`.
    executor : Executor, optional
        Computes cells in parallel; only this process writes to the store. The executor must be able to pickle
        ``study.begin``.

    Returns
    -------
    DataTree
        The study, loaded if it is in memory.

    Raises
    ------
    FileExistsError
        If ``out`` exists and ``resume`` is False.
    ValueError
        If ``resume`` has no path, or settings differ from the stored settings by more than added values.
    """

    def write(path: Path) -> None:
        with _open(study, path, resume, machine.device) as writer:
            if not writer.finished:
                _run_cells(study, machine, writer, progress, executor)

    with on_interrupt(lambda: _resume_hint(out)):
        return store.run_at(out, write, resume=resume, kind="study")


def _resume_hint(out: str | Path | None) -> str:
    if out is None or not Path(out).exists():
        return "Nothing is stored. Pass out=... to keep finished parts."
    return f"Finished parts are in {str(out)!r}. To resume, repeat the call with resume=True."


def _open(study: Study, out: Path, resume: bool, device: str) -> Writer:
    """Open the existing store, extended if necessary, or create one."""
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
    """Extend the store if the settings only add values to settings that may grow."""
    if not study.grows:
        return
    store.require_available(out, study.command, resume=True)
    growth = store.changed(out, study.config)
    if growth.keys() == {"rounds"}:
        raise ValueError(
            f"{out} has runs of {growth['rounds'][0]} rounds, and a study stores no states to continue from. It can "
            f"get more {', '.join(study.grows)}, but not rounds={growth['rounds'][1]}. Choose another path."
        )
    if growth and growth.keys() <= set(study.grows) and all(_is_extension(*values) for values in growth.values()):
        store.extend(out, study.layout(), {"config": store.to_json(study.config)}, growth)


def _is_extension(stored: Any, requested: Any) -> bool:
    return bool(set(stored) <= set(requested) if isinstance(stored, list) else stored < requested)


def _run_cells(
    study: Study, machine: ComputeConfig, writer: Writer, progress: bool | None, executor: Executor | None
) -> None:
    done = writer.read(study.done)
    missing = [
        cell
        for cell in study.cells
        if done[cell.where] != study.steps or any(damage.hits(**cell.indices) for damage in writer.damaged)
    ]
    # BLAS threads slow down matrices of a few hundred units.
    total = len(study.cells) * study.steps
    with threadpool_limits(1, user_api="blas"), progress_bar(total, study.unit, progress) as bar:
        bar.update((len(study.cells) - len(missing)) * study.steps)
        if executor is None:
            make_cell = study.begin(writer, machine)
            for cell in missing:
                bar.set_description(cell.name)
                make_cell(cell, bar.update)
        else:
            for cell, get_regions in as_done(executor, partial(_compute_regions, study.begin, machine), missing):
                for name, index, values in get_regions():
                    writer.write(name, index, values)
                writer.commit()
                bar.set_description(cell.name)
                bar.update(study.steps)
    writer.finish()


_Region = tuple[str, tuple[int | slice, ...], Any]
"""Arguments of :meth:`Writer.write`."""


class _Buffer:
    """Writer in another process, which keeps regions in memory instead of writing them."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []

    def write(self, name: str, index: tuple[int | slice, ...], values: Any) -> None:
        self.regions.append((name, index, np.array(values)))

    def commit(self) -> None:
        pass


def _compute_regions(
    begin: Callable[[Target, ComputeConfig], Make], machine: ComputeConfig, cell: Cell
) -> list[_Region]:
    """Compute a cell and return its regions, for the process that writes the store."""
    buffer = _Buffer()
    begin(buffer, machine)(cell, lambda: None)
    return buffer.regions
