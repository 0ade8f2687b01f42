"""Scores of prediction rules, and the planned comparison of a study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstat import store
from fedstat._utils.lazy import pd, xr
from fedstat._utils.settings import read_toml
from fedstat.fl.stored import profile
from fedstat.store import open_run
from fedstat.study import experiment, grid
from fedstat.study.collect import Grid
from fedstat.study.experiment import Settings
from fedstat.study.summary import config_of, weighted


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


def gather(grid: Grid, *of_run: Callable[[xr.DataTree], pd.DataFrame]) -> list[pd.DataFrame]:
    """Tables of single runs, concatenated, with ``label``, ``seed`` and ``estimator`` of each run.

    Parameters
    ----------
    grid : Grid
        Each run is opened once.
    *of_run : callable (run) -> DataFrame
        For example :func:`scores`, :func:`steps` and :func:`shares`.

    Returns
    -------
    list of DataFrame
        One for each function in ``of_run``.
    """
    parts: list[list[pd.DataFrame]] = [[] for _ in of_run]
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        same = {name: run[name] for name in ("label", "seed", "estimator")}
        for found, table in zip(parts, of_run, strict=True):
            found.append(table(tree).assign(**same))
    return [pd.concat([part for part in found if len(part)] or found[:1], ignore_index=True) for found in parts]


def scores(run: xr.DataTree) -> pd.DataFrame:
    """Test accuracy after the last round, weighted by the clients' test samples.

    Returns
    -------
    DataFrame
        ``method``, the algorithm's name and those of its readouts; ``accuracy``.
    """
    names = [str(config_of(run)["algorithm"])]
    metrics = run["metrics"].to_dataset()
    values = [metrics["accuracy"].isel(round=[-1]).transpose("round", "client").to_numpy()]
    if "readouts" in run.children:
        found = run["readouts"].to_dataset()["accuracy"]
        names += [str(name) for name in found["readout"].values]
        values.append(found.transpose("readout", "client").to_numpy())
    accuracy = weighted(np.concatenate(values).astype(np.float64), metrics["n_test"].to_numpy().astype(np.float64))
    return pd.DataFrame({"method": names, "accuracy": accuracy})


def steps(run: xr.DataTree) -> pd.DataFrame:
    """Steps B of the readouts, mean over clients: ``readout``, ``layer``, ``step``."""
    names = ["readout", "layer", "step"]
    if "readouts" not in run.children:
        return pd.DataFrame(columns=names)
    return run["readouts"].to_dataset()["step"].astype(float).mean("client").to_dataframe().reset_index()[names]


def shares(run: xr.DataTree) -> pd.DataFrame:
    """Personal share of each layer, for a run that was probed.

    Returns
    -------
    DataFrame
        ``layer``, ``place`` (0 for the network's first layer); ``personal``, pooled over the last ten rounds; ``first``
        and ``last``, in the first and the last probed round, ``first_round`` and ``last_round``. Empty for a run that
        was not probed.
    """
    names = ["layer", "place", "personal", "first", "last", "first_round", "last_round"]
    if "probe" not in run.children:
        return pd.DataFrame(columns=names)
    found = profile(run, window=10)[["layer", "personal"]]
    each = profile(run).set_index("layer")
    for name, number in (("first", each["round"].min()), ("last", each["round"].max())):
        found[name] = each.loc[each["round"] == number, "personal"].reindex(found["layer"]).to_numpy()
        found[f"{name}_round"] = int(number)
    return found.assign(place=np.arange(len(found)))[names]
