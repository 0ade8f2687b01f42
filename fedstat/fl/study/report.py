"""What one run says, in words and a few tables."""

from __future__ import annotations

import json
import math

import numpy as np
import xarray as xr

from fedstat.fl.study import summary


def line(run: xr.DataTree) -> str:
    """A run in half a line."""
    row = summary.row(run)
    return f"accuracy {row['last10']:.4f} (best {row['best10']:.4f}), {row['seconds']:.2f} s a round"


def report(run: xr.DataTree) -> str:
    """A run as text: who trained, accuracy over clients, what was sent, and the split of every layer that is split."""
    config, row, metrics = json.loads(run.attrs["config"]), summary.row(run), run["metrics"].to_dataset()
    n = metrics["n_train"].to_numpy()
    who = (
        f"{row['label']}: {row['method']}, {row['rounds']} rounds, {row['clients']} clients "
        f"({n.min()} to {n.max()} training samples), {config['participation']:g} of them active in a round"
    )
    cost = (
        f"sent: {row['bytes_up'] / 1e6:.1f} MB up, {row['bytes_down'] / 1e6:.1f} MB down, over all rounds and clients\n"
        f"time: {row['seconds']:.2f} s a round (median, without evaluation)"
    )
    parts = [who, _accuracies(row), cost]
    layers = list(run["split"].children) if "split" in run.children else []
    if splits := [text for layer in layers if (text := _split(run, layer))]:
        head = "layer          shared   factors   kept their state (last 10 rounds)   converged"
        parts.append("\n".join([head, *splits]))
    if "new" in run.children:
        parts.append(_new(run["new"].to_dataset()))
    if "masking" in run.children:
        parts.append(_masking(run["masking"].to_dataset(), metrics))
    return "\n\n".join(parts)


def _accuracies(row: dict[str, float]) -> str:
    what = {
        "last10": "mean of the last 10 rounds",
        "best10": "best mean of 10 consecutive rounds (chosen on test data, so optimistic)",
        "validated": "round chosen on validation data",
        "before": "active clients, as they leave local training",
    }
    lines = [f"  {row[name]:.4f}   {text}" for name, text in what.items() if not math.isnan(row[name])]
    over = (
        f"  over clients: mean {row['unweighted']:.4f}, standard deviation {row['spread']:.4f}, "
        f"10 % quantile {row['q10']:.4f}"
    )
    return "\n".join(["test accuracy of the clients' models, weighted by their test samples", *lines, over])


def _split(run: xr.DataTree, layer: str) -> str:
    split = run[f"split/{layer}"].to_dataset()
    shared = split["shared"].to_numpy()
    if shared.all() or not shared.any():
        return ""
    kept = (shared[1:] == shared[:-1]).mean(1)[-10:]
    factors, converged = split["n_factors"].to_numpy(), split["converged"].to_numpy()
    analysed = factors > 0
    text = f"{layer:12}   {shared[-1].sum():>3}/{shared.shape[1]:<4}"
    text += f"{factors[-1]:>7}   " if analysed.any() else "      –   "
    text += f"{kept.mean():>12.3f}" if len(kept) else "           –"
    return text + (f"{int(converged[analysed].sum()):>25} of {int(analysed.sum())} rounds" if analysed.any() else "")


def _new(new: xr.Dataset) -> str:
    mean = new["accuracy"].weighted(new["n_test"]).mean("client")
    found = ", ".join(f"{rule} {float(mean.sel(rule=rule)):.4f}" for rule in new["rule"].values)
    return f"accuracy on {new.sizes['client']} clients that did not train: {found}"


def _masking(masking: xr.Dataset, metrics: xr.Dataset) -> str:
    mean = masking["accuracy"].weighted(metrics["n_test"]).mean("client")
    lines = [
        f"  {part:20} {float(mean.sel(part=part).mean()):.4f} ± {_std_error(mean.sel(part=part).to_numpy()):.4f}"
        for part in masking["part"].values
    ]
    return "\n".join([f"accuracy with random values in place of units ({masking.sizes['draw']} draws)", *lines])


def _std_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
