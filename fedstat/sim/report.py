"""What the simulation study says: one table of ways to split, paired within replicates."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._later import pd, xr
from fedstat.results.numbers import interval, number
from fedstat.stats import resampling, split

_ROUNDING = 2.0**-22
"""Means of float32 accuracies that differ by this are equal."""

LAST = 5
"""Rounds at the end over which the share of stable units is averaged."""


def accuracy(run: xr.DataTree) -> xr.DataArray:
    """Mean over clients of the test accuracy after the last round: (p, alpha, method, replicate)."""
    return xr.DataArray(run["metrics/accuracy"]).isel(round=-1).mean("client")


def same_state(run: xr.DataTree) -> xr.DataArray:
    """Share of units that keep their state since the round before (FedFac Fig. 7).

    Parameters
    ----------
    run : DataTree
        A study, finished or not.

    Returns
    -------
    DataArray (p, alpha, method, replicate, round)
        From round 2 on; NaN for rounds that are not done.
    """
    shared, done = run["split/fc1/shared"], run["metrics/rounds_done"]
    same = (shared == shared.shift(round=1, fill_value=False)).mean("unit").isel(round=slice(1, None))
    return same.where(same["round"] <= done).rename("same_state")


def summary(run: xr.DataTree) -> pd.DataFrame:
    """One row per p, alpha and method.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.sim.study` returns.

    Returns
    -------
    DataFrame
        ``accuracy`` and ``std_error``: mean over replicates of the clients' mean test accuracy after the last round,
        and its standard error over replicates. ``difference``, ``difference_low``, ``difference_high``: mean of the
        paired differences from ``true`` within replicates, with a 95 % t interval. ``equal``: whether all of these
        differences are equal, so that their spread is unknown and there is no interval. ``stable``: share of units that
        keep their state, mean over the last 5 rounds. Of the oracle's split, in every row of a setting: ``auc`` of ν
        for the true label, ``ari``, adjusted Rand index against the true split. ``replicates``: complete ones.
    """
    if "metrics" not in run.children or "rounds_done" not in run["metrics"].data_vars:
        raise ValueError(
            f"run must be a simulation study, as fedstat.sim.study and python -m fedstat.sim write it, but got a run "
            f"with the groups {list(run.children)}. Of a run of fl.train, read run['metrics'] itself."
        )
    values, stable, done = accuracy(run), same_state(run).isel(round=slice(-LAST, None)).mean("round"), _complete(run)
    rows = []
    for p in values["p"].values:
        for alpha in values["alpha"].values:
            here = {"p": p, "alpha": alpha}
            recovered = _oracle(run, here)
            reference = _select(values, done, here, "true") if "true" in values["method"].values else None
            for method in values["method"].values:
                x = _select(values, done, here, method)
                row = {"p": p, "alpha": alpha, "method": str(method), "replicates": int(np.isfinite(x).sum())}
                own = _mean(x)
                row |= {"accuracy": own.mean, "std_error": own.std_error}
                difference = _mean(x - reference if reference is not None else np.full_like(x, np.nan))
                row |= {"difference": difference.mean, "difference_low": difference.low}
                row |= {"difference_high": difference.high, "equal": difference.equal}
                row["stable"] = _mean(_select(stable, done, here, method)).mean
                rows.append(row | recovered)
    return pd.DataFrame(rows)


def report(run: xr.DataTree) -> str:
    """Tables of :func:`summary` as text that fits 100 columns."""
    table = summary(run)
    config = json.loads(run.attrs["config"])
    n = config["replicates"]
    head = (
        f"Model (8): C = {config['clients']} clients, d = {config['d']} covariates, m = {config['m']} neurons, "
        f"{config['n_train']} training samples each;\n"
        f"{config['rounds']} rounds, {config['local_epochs']} local epochs, SGD {config['lr']:g}, "
        f"batch {config['batch_size'] or 'full'}; ν by {config['estimator']}, κ = {config['kappa']:g};\n"
        f"{n} replicate" + ("s" if n > 1 else "")
    )
    parts = [head]
    for (p, alpha), block in table.groupby(["p", "alpha"], sort=False):
        lines = [
            f"p = {p:g}, α = {alpha:g}",
            "split            accuracy ± se      difference from true [95 % CI]      stable",
        ]
        lines += [_line(row) for row in block.to_dict("records")]
        first = block.iloc[0]
        lines.append(f"oracle split: AUC {number(first['auc'], 3)}, adjusted Rand index {number(first['ari'], 3)}")
        if (block["replicates"] < n).any():
            lines.append(f"not complete: {int(block['replicates'].min())} to {int(block['replicates'].max())} of {n}")
        parts.append("\n".join(lines))
    parts.append(
        "accuracy: clients' mean test accuracy after the last round; se: standard error over replicates.\n"
        "Differences are paired within replicates. stable: share of neurons that keep their state, mean\n"
        f"over the last {LAST} rounds. oracle split: factor analysis of the true weights."
    )
    return "\n\n".join(parts)


def _line(row: Any) -> str:
    mean = f"{number(row['accuracy'], 4)} ± {number(row['std_error'], 4)}"
    difference = "–" if row["method"] == "true" else from_true(row)
    return f"{row['method']:<16} {mean:<18} {difference:<34} {number(row['stable'], 3):>6}"


def from_true(row: Any) -> str:
    """Difference from the true split, of a row of :func:`summary`, with its interval or why there is none."""
    limits = row["difference"], row["difference_low"], row["difference_high"]
    return interval(*limits, equal="replicates" if row["equal"] else "")


def _complete(run: xr.DataTree) -> xr.DataArray:
    accuracy, rounds_done = xr.DataArray(run["metrics/accuracy"]), xr.DataArray(run["metrics/rounds_done"])
    return rounds_done == accuracy.sizes["round"]


def _select(values: xr.DataArray, done: xr.DataArray, here: dict[str, float], method: str) -> NDArray[np.float64]:
    # As a dict: the keyword ``method`` of sel is the way to fill gaps, not a dimension.
    at = {**here, "method": method}
    return np.asarray(values.sel(at).where(done.sel(at)), dtype=np.float64)


def _mean(x: NDArray[np.float64]) -> resampling.Mean:
    """Mean over the replicates that are complete."""
    return resampling.mean(x[np.isfinite(x)], rounding=_ROUNDING)


def _oracle(run: xr.DataTree, here: dict[str, float]) -> dict[str, float]:
    truth = run["truth/unit_shared"].sel(p=here["p"]).to_numpy()
    nu = run["truth/communality"].sel(here).to_numpy()
    nu = nu[np.isfinite(nu).any(-1)]
    share = float(truth.mean())
    if not len(nu) or share in (0.0, 1.0):
        return {"auc": math.nan, "ari": math.nan}
    found = split.shared(nu, tau=1 - share)
    return {
        "auc": float(np.mean(split.auc(nu, truth))),
        "ari": float(split.adjusted_rand(found, truth).mean()),
    }
