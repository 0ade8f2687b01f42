"""What the last round's models of many runs gave: accuracies by method and readout, steps B, personal shares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedstat.fl.study.profile import profile
from fedstat.fl.study.summary import Grid, weighted
from fedstat.store import open_run


def outcomes(grid: Grid) -> pd.DataFrame:
    """Test accuracy after the last round, of every run and of all that was read out of it.

    Parameters
    ----------
    grid : Grid

    Returns
    -------
    DataFrame
        ``label``, ``seed``; ``method``, the algorithm's or the readout's name; ``estimator``, "" if it has none;
        ``accuracy``, weighted by the clients' test samples.
    """
    rows = []
    for run in grid.table.to_dict("records"):
        same = {"label": run["label"], "seed": run["seed"], "estimator": run["estimator"]}
        tree = open_run(run["path"])
        rows += [same | {"method": name, "accuracy": value} for name, value in scores(tree).items()]
    return pd.DataFrame(rows, columns=["label", "seed", "method", "estimator", "accuracy"])


def scores(run: xr.DataTree) -> pd.Series:
    """Test accuracy after the last round, by name: the algorithm's own, and every readout's."""
    metrics = run["metrics"].to_dataset()
    own = metrics["accuracy"].isel(round=-1).expand_dims(readout=[_algorithm(run)])
    parts = [own.drop_vars("round")]
    if "readouts" in run.children:
        parts.append(run["readouts"].to_dataset()["accuracy"])
    names = [str(name) for part in parts for name in part["readout"].values]
    values = np.concatenate([part.transpose("readout", "client").to_numpy().astype(np.float64) for part in parts])
    return pd.Series(weighted(values, metrics["n_test"].to_numpy().astype(np.float64)), index=names)


def steps(grid: Grid, names: list[str]) -> pd.DataFrame:
    """Steps B of some readouts, means over clients: ``label``, ``seed``, ``readout``, ``layer``, ``step``."""
    parts = []
    for run, tree in _holding(grid, "readouts"):
        step = tree["readouts"].to_dataset()["step"]
        asked = [i for i, name in enumerate(step["readout"].values) if str(name) in names]
        mean = step.isel(readout=asked).astype(float).mean("client")
        parts.append(mean.to_dataframe().reset_index().assign(label=run["label"], seed=run["seed"]))
    columns = ["label", "seed", "readout", "layer", "step"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def profiles(grid: Grid, *, window: int = 10) -> pd.DataFrame:
    """Personal share of each layer in every probed run.

    Parameters
    ----------
    grid : Grid
    window : int
        Rounds at the end whose probes are taken together; of a shorter run all.

    Returns
    -------
    DataFrame
        ``label``, ``seed``, ``layer``, ``place`` (0 for the first layer of the network); ``personal``, over the window;
        ``first`` and ``last``, in the first and the last round that was probed, ``first_round`` and ``last_round``.
    """
    parts = []
    for run, tree in _holding(grid, "probe"):
        rounds = tree["metrics"].sizes["round"]
        whole = profile(tree, window=min(window, rounds))[["layer", "personal"]]
        each = profile(tree).set_index("layer")
        ends = {"first": each["round"].min(), "last": each["round"].max()}
        for name, number in ends.items():
            whole[name] = each.loc[each["round"] == number, "personal"].reindex(whole["layer"]).to_numpy()
            whole[f"{name}_round"] = int(number)
        parts.append(whole.assign(label=run["label"], seed=run["seed"], place=np.arange(len(whole))))
    columns = ["label", "seed", "layer", "place", "personal", "first", "last", "first_round", "last_round"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _holding(grid: Grid, group: str) -> Iterator[tuple[dict[Any, Any], xr.DataTree]]:
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        if group in tree.children:
            yield run, tree


def _algorithm(run: xr.DataTree) -> str:
    return str(json.loads(run.attrs["config"])["algorithm"])
