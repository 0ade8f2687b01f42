"""Runs of a folder against the file of their grid: which seeds are complete, and what the others lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import store
from fedstat._utils.lazy import pd
from fedstat._utils.settings import read_toml
from fedstat.study import experiment, grid
from fedstat.study.collect import Grid
from fedstat.study.experiment import Settings


class Planned(NamedTuple):
    """Runs of the seeds that are complete.

    Attributes
    ----------
    grid : Grid
        Finished runs of ``seeds``, and no others.
    scale : str
        Name of their ``[scale.NAME]`` table.
    labels : tuple of str
        Labels of the settings, in the order of the file.
    seeds : tuple of int
        Seeds for which every run of the file is finished.
    notes : tuple of str
        Which seeds were left out, and how many runs of the folder are not in the file.
    """

    grid: Grid
    scale: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]


def planned(runs: Grid, file: str | Path) -> Planned:
    """Keep the seeds for which all runs of a grid's file are finished.

    Parameters
    ----------
    runs : Grid
        From :func:`fedstat.study.collect.collect`.
    file : path
        Read by :func:`fedstat.study.grid.cells`.

    Returns
    -------
    Planned

    Raises
    ------
    ValueError
        If no run of the folder is in the file, runs have several of its scales, one is there twice, or no seed is
        complete.
    """
    scales: list[str | None] = [*read_toml(Path(file)).get("scale", {})] or [None]
    cells = {name: grid.cells(file, scale=name) for name in scales}
    noted = [experiment.settings_of(path) for path in runs.table["path"]]
    found = {name: _places(noted, of_scale) for name, of_scale in cells.items()}
    there = [name for name in scales if any(place is not None for place in found[name])]
    if not there:
        raise ValueError(
            f"none of the {len(noted)} finished runs is in {file}. Make them with python -m fedstat.fl --config "
            f"{file} --scale ... and name their folder"
        )
    if len(there) > 1:
        raise ValueError(f"there are runs of several scales of {file}: {', '.join(map(str, there))}. Keep each apart.")
    scale = there[0]
    places = found[scale]
    paths = defaultdict(list)
    for place, path in zip(places, runs.table["path"], strict=True):
        if place is not None:
            paths[place].append(str(path))
    if twice := [group for group in paths.values() if len(group) > 1]:
        raise ValueError(f"one run of {file} is there twice: {', '.join(twice[0])}. Remove one.")
    wanted = pd.DataFrame({"seed": [one.seed for one in cells[scale]]})
    wanted["there"] = [number in paths for number in range(len(wanted))]
    counts = wanted.groupby("seed", sort=False)["there"].agg(["sum", "size"])
    seeds = tuple(int(seed) for seed in counts.index[counts["sum"] == counts["size"]])
    partial, absent = counts[counts["sum"].between(1, counts["size"] - 1)], counts[counts["sum"] == 0]
    lacking = [f"{seed} ({have} of {of} runs)" for seed, (have, of) in partial.iterrows()]
    if not seeds:
        raise ValueError(f"no seed of {file} is complete in every setting; incomplete are {', '.join(lacking)}")
    used = [place is not None and cells[scale][place].seed in seeds for place in places]
    of_file = f"{Path(file).name}{f', scale {scale}' if scale else ''}"
    notes = [f"complete seeds: {', '.join(map(str, seeds))} (of {of_file})"]
    notes += [f"seeds left out as incomplete: {', '.join(lacking)}"] if lacking else []
    notes += [f"seeds without a finished run: {', '.join(map(str, absent.index))}"] if len(absent) else []
    if foreign := sum(place is None for place in places):
        notes.append(f"finished runs of the folder that are not in {file}, left out: {foreign}")
    labels = tuple(dict.fromkeys(one.name for one in cells[scale]))
    complete = runs._replace(table=runs.table[used].reset_index(drop=True))
    return Planned(complete, scale or "", labels, seeds, tuple(notes))


def _places(noted: list[dict[str, Any]], cells: list[Settings]) -> list[int | None]:
    """Which cell each run is, by all its noted settings; None for a run that is none of them."""
    alike: dict[tuple[Any, ...], list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for number, cell in enumerate(cells):
        alike[cell.name, cell.algorithm, cell.seed].append((number, _plain(asdict(cell))))
    found: list[int | None] = []
    for settings in noted:
        key = settings.get("label"), settings.get("algorithm"), settings.get("seed")
        own = _plain({name: getattr(Settings, name) for name in experiment.LATER} | settings)
        at = [number for number, cell in alike.get(key, []) if all(own[k] == cell[k] for k in own if k != "label")]
        found.append(at[0] if at else None)
    return found


def _plain(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text, the same from a file and from a store."""
    return {name: store.to_json(value) for name, value in settings.items()}
