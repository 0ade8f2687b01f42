"""Results of the last round's models of many runs: accuracies by method and readout, steps B, personal shares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedstat._utils.lazy import pd, xr
from fedstat.fl.stored import profile
from fedstat.store import open_run
from fedstat.study.collect import Grid
from fedstat.study.summary import config_of, weighted


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
