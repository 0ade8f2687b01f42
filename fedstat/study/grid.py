"""Grids of runs: cells of a file of settings, trained in any order or process, resumed and never repeated."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from fedstat import store
from fedstat._utils import check, guard
from fedstat._utils.lazy import xr
from fedstat._utils.parallel import as_done, shown
from fedstat._utils.settings import read_toml, table, tables
from fedstat.fl import custom
from fedstat.fl.algorithms import settings_of
from fedstat.fl.job import ComputeConfig
from fedstat.store import Group, Target, Writer, origin
from fedstat.study import experiment
from fedstat.study.collect import Grid
from fedstat.study.experiment import Settings


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
    begin : callable (Target, ComputeConfig) -> Make
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
    machine : ComputeConfig
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


def cells(path: str | Path, *, scale: str | None = None, study: str | None = None) -> list[Settings]:
    """Settings of every run of a grid.

    Parameters
    ----------
    path : path
        A TOML file with the keys that :func:`fedstat.study.experiment.keys` lists: at the top, settings of all runs,
        among them ``seeds``; ``[[dataset]]`` and ``[[method]]`` tables, which are crossed; ``[scale.NAME]`` tables,
        which override all of these. The table of a data set or a method may hold a table of that name too, which
        overrides the scale. ``[tune]`` is for :func:`tuning`. Settings of single
        methods may stand anywhere; a method skips those that it does not take, or that have no effect with its other
        settings, unless they are in its own table. A data set can list the ``methods`` it is for, by name. Data sets
        and methods may both list ``studies``: those of no common study are not crossed, so that one file can hold the
        sweeps and ablations of several tables. A method's ``sweep``, a table of lists, stands for all combinations.
        ``algorithm = "file.py:name"`` takes a function of a file, by its path from the grid's file.
    scale : str, optional
        NAME of a ``[scale.NAME]`` table.
    study : str, optional
        Only the runs of this study.

    Returns
    -------
    list of Settings
        Seed by seed, so that an unfinished grid is balanced.

    Raises
    ------
    ValueError
        If the file cannot be read, has an unknown key (the nearest are given) or an empty ``[[method]]``, or holds no
        run or one twice.
    """
    path = Path(path)
    read = _read(path)
    scales, sets = table(read, "scale", path), tables(read, "dataset", path)
    of_scale = {} if scale is None else table(scales, check.choice("scale", scale, list(scales)), f"{path}, [scale]")
    common = {k: v for k, v in read.items() if k not in ("scale", "tune", "dataset", "method")} | of_scale
    seeds = _seeds(common.pop("seeds", [common.get("seed", 0)]), path)
    every = [_at_scale(method, scale, scales, path) for method in tables(read, "method", path)]
    swept = sum(prod(map(len, _sweep(method, path).values())) for method in every)
    guard.size(path, len(sets) * swept * len(seeds), "its grid", share=guard.RUN, unit="runs")
    methods = [one for method in every for one in _swept(method, path)]
    if study is not None:
        check.choice("study", study, list(dict.fromkeys(s for one in (*sets, *methods) for s in _studies(one, path))))
    found = []
    for seed in seeds:
        for dataset in sets:
            named = {k: v for k, v in dataset.items() if k not in scales and k not in ("methods", "studies")}
            scaled = {} if scale is None else table(dataset, scale, f"{path}, [[dataset]]")
            settings = common | named | of_scale | scaled | {"seed": seed}
            settings.pop("seeds", None)
            chosen = [m for m in _chosen(methods, dataset, settings, path) if _common(dataset, m, study, path)]
            found += [_cell(settings, {k: v for k, v in m.items() if k != "studies"}, str(path)) for m in chosen]
    if not found:
        raise ValueError(f"{path} holds no run: no [[dataset]] or no [[method]]")
    require_distinct(found, str(path))
    return found


def _read(path: Path) -> dict[str, Any]:
    """The file, its keys known and the files of its algorithms with whole paths."""
    read = read_toml(path)
    if "method" in read and not all(tables(read, "method", path)):
        raise ValueError(
            f"{path} has an empty [[method]], which would run {Settings.algorithm}. Name one, such as "
            'algorithm = "fedavg", or leave the heading out.'
        )
    places = [*_tables(read, path)]
    for _, _, one in places:
        _resolve(one, path.parent)
    known = experiment.names([name for _, _, one in places for name in _several(one.get("algorithm"))])
    scales = table(read, "scale", path)
    for where, kind, one in places:
        experiment.require(one, kind, [*known, *(scales if kind in _SCALED else ())], where)
    return read


_SCALED = ("dataset", "method", "tune")
"""Tables that may hold a table for a scale."""


def _tables(read: dict[str, Any], path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place (for messages), kind (as in :attr:`fedstat.study.experiment.Key.tables`) and content of all tables."""
    scales = table(read, "scale", path)
    yield str(path), "", read
    for name in scales:
        yield f"{path}, [scale.{name}]", "scale.NAME", table(scales, name, f"{path}, [scale]")
    scaled = [(f"{path}, [tune]", "tune", table(read, "tune", path))]
    scaled += [(f"{path}, [[{kind}]]", kind, one) for kind in ("dataset", "method") for one in tables(read, kind, path)]
    for where, kind, one in scaled:
        parts = [(where, one)] + [(f"{where}, {name}", part) for name, part in one.items() if name in scales]
        for place, part in parts:
            if isinstance(part, dict):
                yield place, kind, part
                if kind == "method" and isinstance(part.get("sweep"), dict):
                    yield f"{place}, sweep", "method.sweep", part["sweep"]


def _several(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _resolve(one: dict[str, Any], folder: Path) -> None:
    """Make paths of data and of algorithms' files whole, in place."""
    for key in ("data", "algorithm", "methods"):
        if key in one:
            found = [custom.within(name, folder) for name in _several(one[key])]
            one[key] = found if isinstance(one[key], list) else found[0]


class Tuning(NamedTuple):
    """What a grid's file says on tuning.

    Attributes
    ----------
    candidates : mapping from setting to list
        For :func:`fedstat.study.tuning.tune`.
    seeds : list of int, optional
        By default those of the grid.
    together : bool
        Choose over all data sets together, not for each.
    """

    candidates: Mapping[str, Any]
    seeds: list[int] | None
    together: bool


def tuning(path: str | Path, *, scale: str | None = None) -> Tuning:
    """What is to be tuned: ``[tune]`` of a grid's file, updated by ``[tune.SCALE]``."""
    found = table(_read(Path(path)), "tune", path)
    if not found:
        raise ValueError(f"--tune needs a table [tune] of candidates, but there is none in {path}")
    of_scale = {} if scale is None else table(found, scale, f"{path}, [tune]")
    found = {k: v for k, v in {**found, **of_scale}.items() if not isinstance(v, dict)}
    seeds, together = found.pop("seeds", None), found.pop("together", False)
    if not isinstance(together, bool):
        raise ValueError(f"together of [tune] in {path} must be true or false, but got {together!r:.200}")
    return Tuning(found, None if seeds is None else _seeds(seeds, path), together)


def _seeds(given: Any, where: Path | str) -> list[int]:
    if not isinstance(given, list) or not given or any(isinstance(s, bool) or not isinstance(s, int) for s in given):
        raise ValueError(f"seeds in {where} must be a list of integers, such as [0, 1, 2], but got {given!r:.200}")
    return given


def require_distinct(runs: Sequence[Settings], where: str) -> None:
    """ValueError, naming the run, if one is there twice."""
    twice = [one for one, number in Counter(runs).items() if number > 1]
    if twice:
        raise ValueError(f"{where} holds the run {_which(twice[0])} twice. Let its tables differ in a setting.")


def _studies(one: Mapping[str, Any], where: Path) -> list[str]:
    studies = one.get("studies", [])
    if not isinstance(studies, list) or not all(isinstance(study, str) for study in studies):
        raise ValueError(f"studies in {where} must be a list of names, but got {studies!r:.200}")
    return studies


def _common(dataset: Mapping[str, Any], method: Mapping[str, Any], study: str | None, where: Path) -> bool:
    """Whether a data set and a method are crossed: for a study, or for any; without studies a table is for all."""
    both = [set(studies) for one in (dataset, method) if (studies := _studies(one, where))]
    return not both or (bool(set.intersection(*both)) if study is None else all(study in custom for custom in both))


def _at_scale(method: Mapping[str, Any], scale: str | None, scales: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A method with its settings for a scale."""
    plain = {k: v for k, v in method.items() if k not in scales}
    return plain if scale is None else plain | table(method, scale, f"{where}, [[method]]")


def _sweep(method: Mapping[str, Any], where: Path) -> dict[str, list[Any]]:
    """Lists of values in a method's ``sweep``, {} without one."""
    sweep = table(method, "sweep", f"{where}, [[method]]") if "sweep" in method else {}
    for name, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} in a sweep of {where} must be a list of values, but got {values!r:.200}")
    return sweep


def _swept(method: Mapping[str, Any], where: Path) -> Iterator[dict[str, Any]]:
    """A method with every combination of the values in its ``sweep``; itself without one."""
    sweep = _sweep(method, where)
    for values in product(*sweep.values()):
        yield {k: v for k, v in method.items() if k != "sweep"} | dict(zip(sweep, values, strict=True))


def _chosen(
    methods: Sequence[Mapping[str, Any]], dataset: Mapping[str, Any], settings: Mapping[str, Any], where: Path
) -> list[Mapping[str, Any]]:
    """Methods that a data set is for."""
    names = [method.get("algorithm", settings.get("algorithm", Settings.algorithm)) for method in methods]
    if "methods" not in dataset:
        return list(methods)
    wanted = dataset["methods"]
    if not isinstance(wanted, list) or not wanted:
        raise ValueError(f"methods of a data set in {where} must be a list of algorithms, but got {wanted!r:.200}")
    for name in wanted:
        check.choice(f"methods of a data set in {where}", name, names)
    return [method for method, name in zip(methods, names, strict=True) if name in wanted]


def _cell(settings: Mapping[str, Any], method: Mapping[str, Any], where: str) -> Settings:
    algorithm = method.get("algorithm", settings.get("algorithm", Settings.algorithm))
    label, said = settings.get("label", settings.get("data", Settings.data)), custom.short(algorithm)
    where = f"{where}, data set {label!r:.200}, method {said!r:.200}"
    common = {field.name for field in fields(Settings)}
    try:
        takes = settings_of(algorithm)
        used = {k: v for k, v in settings.items() if k in common or k in takes}
        while True:
            try:
                chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in {**used, **method}.items()}
                return Settings.of(**chosen)
            except check.NoEffectError as error:
                if error.name in method or used.pop(error.name, None) is None:
                    raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


Progress = Callable[[Settings, int, int], Callable[[int], object]]


def run_all(
    runs: Sequence[Settings],
    folder: str | Path,
    *,
    repeat: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
    **where: Any,
) -> Iterator[tuple[Settings, Path, bool]]:
    """Make the runs that are not finished yet, one store each.

    Parameters
    ----------
    runs : sequence of Settings
    folder : path
        A run's store is named by its settings. A finished run with the same settings is not repeated; an unfinished one
        is continued, and if other code began it, its store names both.
    repeat : bool
        Repeat runs that other code finished, or that were made from another content of a file of one's own data; the
        new store takes the old one's place once it is finished.
    progress : callable (settings, number, of), optional
        Returns the callable that :func:`fedstat.study.experiment.run` calls after every round; not with an executor.
    executor : Executor, optional
        Makes the runs side by side, by its workers: any :class:`concurrent.futures.Executor`, such as Dask's
        ``Client.get_executor(pure=False)``, whose workers see the same folder. A run that a lost worker has left is
        continued by whoever gets it next. Give ``threads=1``, or as many as a worker has cores.
    **where
        data_dir, device, client_chunk, threads, memory.

    Yields
    ------
    settings, path, made
        ``made`` is False if a finished run was there. In the order of the runs, with an executor as they are finished.

    Raises
    ------
    ValueError
        If a run cannot be made with its settings, is there twice, or was finished when its file of data had other
        content; the message names it.
    NotADirectoryError
        If ``folder`` is a file or a single run.
    FileNotFoundError
        Before the first run, if the files of a data set are missing; if an executor's worker has stored a run where it
        cannot be seen from here.
    BlockingIOError
        If another process is writing to a run; with an executor, after all other runs.
    FloatingPointError
        After all other runs, if some diverged; the message names them.
    """
    folder = Path(folder)
    require_distinct(runs, "the grid")
    if guard.status(folder) and (not folder.is_dir() or guard.status(folder / "zarr.json")):
        raise NotADirectoryError(f"{folder} must be a folder of runs, but is a file or a single run. Choose another.")
    parts = [_Part(one, folder / f"{name_of(one)}.zarr", number, len(runs)) for number, one in enumerate(runs)]
    experiment.read_data([part.settings for part in parts if not guard.status(part.path)], where.get("data_dir"))
    if executor is not None:  # whose workers may stand in other folders
        parts, progress = [part._replace(path=part.path.absolute()) for part in parts], None
        if where.get("data_dir") is not None:
            where["data_dir"] = Path(where["data_dir"]).absolute()
    failed: list[tuple[type[Exception], str]] = []
    for part, made in as_done(executor, partial(_make, repeat, progress, where), parts):
        try:
            new = made()
        except Exception as error:
            failed.append(_failure(error, part, alone=executor is None))
            continue
        if not part.path.exists():
            raise FileNotFoundError(
                f"a worker has stored {part.path}, which is not there: workers must share the folder"
            )
        yield part.settings, part.path, new
    if failed:
        failed.sort(key=lambda one: one[0] is not FloatingPointError)
        raise failed[0][0]("\n".join(message for _, message in failed))


class _Part(NamedTuple):
    """One run of a grid: its settings, its store, and its number among all."""

    settings: Settings
    path: Path
    number: int
    of: int


def _failure(error: Exception, part: _Part, *, alone: bool) -> tuple[type[Exception], str]:
    """Return kind and message of an error after which other runs can be made; raise any other, naming the run."""
    name = _which(part.settings)
    if isinstance(error, FloatingPointError):
        return FloatingPointError, f"{name} ({part.path.name}): {error}"
    if isinstance(error, BlockingIOError) and not alone:
        return BlockingIOError, f"{name}: {error}"
    if isinstance(error, ValueError | BlockingIOError):
        raise type(error)(f"{name}: {error}") from error
    error.add_note(name)
    raise error


def _make(repeat: bool, progress: Progress | None, where: Mapping[str, Any], part: _Part) -> bool:
    """Make a run, unless it is finished; whether it was made."""
    settings, path, number, of = part
    again = path.exists() and _finished(path)
    if again and not repeat and not _of_these_data(settings, path):
        raise ValueError(
            f"{path} was made when {custom.short(settings.data)} had other content. Choose another folder, or repeat "
            "the runs that differ (--repeat, repeat=True)."
        )
    if again and (not repeat or _as_now(settings, path)):
        return False
    out = _draft(settings, path) if again else path
    tick = progress(settings, number, of) if progress else None
    experiment.run(settings, out=out, resume=True, progress=tick, **where)
    if again:
        store.replace(out, path)
    return True


def _of_these_data(settings: Settings, path: Path) -> bool:
    """True if a run was made from a user's file of data as it is now; always for published data."""
    now, noted = experiment.files(settings), store.config_of(path)
    return now.get(experiment.DATA_FILE) == noted.get(experiment.DATA_FILE, now.get(experiment.DATA_FILE))


def _as_now(settings: Settings, path: Path) -> bool:
    return by_this_code(settings, path) and _of_these_data(settings, path)


def by_this_code(settings: Settings, path: Path) -> bool:
    """Whether a run was made by the code that would make it now: fedstat's, and that of a user's algorithm."""
    return bool(store.attributes(path)["code"] == store.code(settings.make_algorithm()))


def _draft(settings: Settings, path: Path) -> Path:
    """Return the path at which to repeat a run, beside the old one; remove a draft of other code or data."""
    draft = path.with_suffix(origin.REPEATED)
    if draft.exists() and not _as_now(settings, draft):
        store.remove(draft)
    return draft


def _which(settings: Settings) -> str:
    return f"{settings.name}, {custom.short(settings.algorithm)}, seed {settings.seed}"


def name_of(settings: Settings) -> str:
    """File name of a run: readable, and different for different settings."""
    method = custom.short(settings.algorithm)
    data = custom.short(settings.data)
    about = experiment.about(settings) | {"algorithm": method, "data": data}  # the same wherever its files lie
    digest = hashlib.sha256(store.to_json(about).encode()).hexdigest()[:8]
    readable = "-".join([data, settings.partition, method, f"seed{settings.seed}"])
    return f"{re.sub(r'[^a-z0-9.+]+', '-', readable.lower())}-{digest}"


def _finished(path: Path) -> bool:
    """Whether a run is complete and undamaged; a damaged one is resumed, which repairs it."""
    return "ended" in store.attributes(path) and not store.damage(path, checksums=True)


def of_study(grid: Grid, file: str | Path, study: str) -> Grid:
    """Runs that belong to a study of a grid's file, with variants of a method told apart by their settings.

    Parameters
    ----------
    grid : Grid
    file : path
        See :func:`fedstat.study.grid.cells`; runs are recognised by their names, which identify all settings.
    study : str

    Returns
    -------
    Grid
        Methods are named as "fedavg" or "fedprox, mu=0.1", by the settings that differ within the study.

    Raises
    ------
    ValueError
        If none of the study's runs is there.
    """
    scales = read_toml(Path(file)).get("scale", {}) or {None: {}}
    wanted = {name_of(run): run for scale in scales for run in cells(file, scale=scale, study=study)}
    table = grid.table[[Path(path).stem in wanted for path in grid.table["path"]]].reset_index(drop=True)
    if table.empty:
        raise ValueError(
            f"no run of the study {study!r} is here. Make them with: python -m fedstat.fl --config {file} "
            f"--study {study}{_of_one(scales)}"
        )
    runs = [wanted[Path(path).stem] for path in table["path"]]
    table["method"] = variants(runs)
    return grid._replace(table=table, configs={k: v for k, v in grid.configs.items() if k in set(table["label"])})


def _of_one(scales: Iterable[str | None]) -> str:
    first, *others = (f" --scale {name}" if name else "" for name in scales)
    return first + (f" (or{','.join(others)})" if others else "")


def variants(runs: Iterable[Settings]) -> list[str]:
    """Name of every run's method, with those of its settings in which runs of the method differ.

    Examples
    --------
    >>> runs = [Settings.of(algorithm="fedprox", mu=mu) for mu in (0.1, 1.0)]
    >>> variants(runs), variants(runs[:1])
    (['fedprox, mu=0.1', 'fedprox, mu=1.0'], ['fedprox'])
    """
    runs = list(runs)
    common = {
        one.algorithm: set.intersection(*(set(r.options) for r in runs if r.algorithm == one.algorithm)) for one in runs
    }
    return [", ".join([one.algorithm, *(o for o in one.options if o not in common[one.algorithm])]) for one in runs]
