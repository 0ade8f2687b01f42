"""One run in words and a few tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstat._utils.lazy import pd, xr
from fedstat.fl import split_halves
from fedstat.fl.aggregate import weighted_mean
from fedstat.fl.stored import profile
from fedstat.results.base import aligned
from fedstat.results.tables import megabytes, number, plus_minus
from fedstat.results.variance_components import personal_from
from fedstat.stats import resampling
from fedstat.study import summary

MEAN = weighted_mean().name


def line(run: xr.DataTree) -> str:
    """A run in half a line."""
    row = summary.row(run)
    what = f"best {row['best10']:.4f}" if math.isfinite(row["best10"]) else "last round"
    accuracy = row["last10"] if math.isfinite(row["last10"]) else row["final"]
    return f"accuracy {accuracy:.4f} ({what}), {row['seconds']:.2f} s a round"


def report(run: xr.DataTree) -> str:
    """A run as text: who trained, accuracy over clients, communication, and the split of every split layer."""
    config, row, metrics = summary.config_of(run), summary.row(run), run["metrics"].to_dataset()
    n = metrics["n_train"].to_numpy()
    who = (
        f"{row['label']}: {row['method']}, {row['rounds']} rounds, {row['clients']} clients "
        f"({n.min()} to {n.max()} training samples), {_share(config['participation'])} active in a round"
        f"{_aggregator(config, metrics)}"
    )
    first = ", except its training before round 1" if row["method"] == "fedfac-static" else ""
    cost = (
        f"sent: {megabytes(row['bytes_up'])} up, {megabytes(row['bytes_down'])} down, over all rounds and clients"
        f"{first}\ntime: {row['seconds']:.2f} s a round (median, without evaluation{first})"
    )
    parts = [who, _accuracies(row, summary.clients(run)["accuracy"].dropna()), cost]
    if len(states := summary.states(run)):
        last = min(summary.WINDOW, int(row["rounds"]))
        rows = [_split(state, last) for state in states.to_dict("records")]
        flat = [f"{layer}: all communalities are equal and uninformative: lower κ" for layer in
                states.loc[states["flat"], "layer"]]  # fmt: skip
        parts.append("\n".join([aligned(pd.DataFrame(rows)), *flat]))
    if "choice" in run.children:
        parts.append(_choice(run))
    if "probe" in run.children:
        parts.append(_probe(run, int(row["rounds"])))
    if "readouts" in run.children:
        parts.append(_readouts(run))
    if "new" in run.children:
        parts.append(_new(run))
    if "ablation" in run.children:
        parts.append(_ablation(run))
    return "\n\n".join(parts)


def _aggregator(config: Mapping[str, Any], metrics: xr.Dataset) -> str:
    """Name the aggregator, unless it is the weighted mean; for a private run return ε after the last round."""
    if "privacy" not in config:
        name = config.get("aggregator", MEAN)
        return "" if name == MEAN else f"\naggregator: {name}"
    done = metrics["epsilon"].to_numpy()[int(np.isfinite(metrics["epsilon"]).sum()) - 1]
    return f"\ndifferentially private for clients: ε = {done:.4g} at δ = {config['privacy']['delta']:g}"


def _share(participation: float | list[float]) -> str:
    if isinstance(participation, list):
        return f"{100 * participation[0]:.4g} to {100 * participation[1]:.4g} % of the clients"
    return "all clients" if participation == 1 else f"{100 * participation:.4g} % of the clients"


def _accuracies(row: dict[str, float], clients: pd.Series) -> str:
    last = "last 10 rounds" if summary.span(int(row["rounds"])) > 1 else "last round"
    means = f" (over the {row['evaluated']} that were evaluated)" if row["evaluated"] < summary.WINDOW else ""
    what = {
        "last10": f"mean of the last 10 rounds{means}",
        "final": "last evaluated round",
        "best10": f"best mean of 10 consecutive rounds{means}, chosen on test data, so optimistic",
        "validated": "round chosen on validation data",
        "before": f"active clients, as they leave local training, {last}",
    }
    lines = [f"  {row[name]:.4f}   {text}" for name, text in what.items() if not math.isnan(row[name])]
    over_clients = resampling.mean(clients)
    limits = f", 95 % CI [{over_clients.low:.4f}, {over_clients.high:.4f}]" if np.isfinite(over_clients.low) else ""
    over = (
        f"  over clients, {last}: mean {row['unweighted']:.4f}{limits}, standard deviation {row['spread']:.4f}, "
        f"10 % quantile {row['q10']:.4f}"
    )
    return "\n".join(["test accuracy of the clients' models, weighted by their test samples", *lines, over])


def _split(state: Mapping[Any, Any], last: int) -> dict[str, str]:
    return {
        "layer": state["layer"],
        "shared": f"{state['shared']}/{state['units']}",
        "factors": number(state["n_factors"], 0),
        f"kept their state (last {last} rounds)": number(state["stable"], 3),
        "converged": number(state["converged"], 2),
    }


def _new(run: xr.DataTree) -> str:
    found = ", ".join(f"{x['rule'].item()} {x.item():.4f}" for x in summary.new_clients(run))
    comment = run["new/accuracy"].attrs.get("comment")
    note = f" ({comment})" if comment else ""
    return f"accuracy on {run['new'].sizes['client']} clients that did not train: {found}{note}"


def _ablation(run: xr.DataTree) -> str:
    accuracy = summary.ablated(run)
    if np.ptp(accuracy.to_numpy()) == 0:
        return "no layer has both shared and personal units, so nothing was replaced"
    draws = pd.DataFrame(accuracy.transpose("draw", "part").values, columns=accuracy["part"].values)
    lines = [f"  {part:20} {plus_minus(m, e)}" for part, m, e in zip(draws, draws.mean(), draws.sem(), strict=True)]
    return "\n".join([f"accuracy with random values in place of units ({len(draws)} draws)", *lines])


def _choice(run: xr.DataTree) -> str:
    """What was chosen in the last evaluated round."""
    chosen = run["choice"].to_dataset().dropna("round", how="all").isel(round=-1)
    lines = []
    if "step" in chosen:
        step = chosen["step"]
        if step.dims == ("layer",):
            text = "by layer: " + ", ".join(f"{x['layer'].item()} {x.item():.2f}" for x in step)
        elif step.dims == ("client",):
            text = f"by client: mean {step.mean().item():.2f}, quartiles " + " and ".join(
                f"{step.quantile(q).item():.2f}" for q in (0.25, 0.75)
            )
        else:
            text = f"for all clients: {step.item():.2f}"
        lines.append(f"B of W + B (W' − W), W' fine-tuned, chosen {text} (0: as downloaded, 1: as fine-tuned)")
    if "finetuning" in chosen:
        config = json.loads(run.attrs["config"])["algorithm_settings"]
        given = ((name, config.get(name)) for name in ("finetune_epochs", "rate"))
        several = [f"{name} {values}" for name, values in given if isinstance(values, list)]
        numbers, counts = np.unique(chosen["finetuning"], return_counts=True)
        which = ", ".join(f"number {int(n) + 1} ({c} clients)" if chosen["finetuning"].ndim else f"number {int(n) + 1}"
                          for n, c in zip(numbers, counts, strict=True))  # fmt: skip
        lines.append(f"fine-tuning chosen among {' × '.join(several) or 'those of the method'}: {which}")
    return "\n".join(lines)


def _probe(run: xr.DataTree, rounds: int) -> str:
    """How personal each layer is, over the last rounds."""
    if not np.isfinite(run["probe"].to_dataset()["between"]).any():
        return "nothing was probed: clients download nothing in common in which to compare halves"
    table = profile(run, window=summary.WINDOW)
    last = min(summary.WINDOW, rounds)
    head = f"share of the differences between clients that is their own, beyond noise (last {last} rounds)"
    own = "  {:12} – (a client's own: it starts from earlier rounds, so halves say nothing)"
    lines = [
        own.format(layer) if math.isnan(share) else f"  {layer:12} {share:.2f} [{low:.2f}, {high:.2f}]   p {p:.2g}"
        for layer, share, low, high, p in table[["layer", "personal", "conf_low", "conf_high", "p_value"]].to_numpy()
    ]
    tested = table.dropna(subset="personal")
    probe = run["probe"].to_dataset()
    seen = np.isfinite(probe["between"].transpose("round", "client", "layer").to_numpy()).any(axis=2)
    sizes = [probe["n_train"].to_numpy()[row] for row in seen if row.any()]
    weights = int(probe["n_weights"].sum())
    up, down = np.sum([split_halves.bytes_sent(weights, len(table), n) for n in sizes], axis=0)
    sent = f"sent for it, in {len(sizes)} probed rounds: {megabytes(up)} up, {megabytes(down)} down"
    lone = int((probe["n_train"] < 2).sum())
    left_out = [f"{lone} clients took no part: they have only one training sample"] if lone else []
    return "\n".join([head, *lines, *([personal_from(tested)] if len(tested) else []), sent, *left_out])


def _steps(step: xr.DataArray) -> str:
    """B of all clients and layers, in a few words."""
    by_layer, values = step.isel(client=0), np.unique(step)
    if len(values) == 1:
        return f"{values[0]:.2g}"
    if (step == by_layer).all():
        return ", ".join(f"{x['layer'].item()} {x.item():.2f}" for x in by_layer)
    return f"{step.mean().item():.2f}, mean over clients"


def _readouts(run: xr.DataTree) -> str:
    weight = run["metrics"].to_dataset()["n_test"]
    accuracy = run["readouts"].to_dataset()["accuracy"].weighted(weight).mean("client")
    step = run["readouts"].to_dataset()["step"]
    lines = [f"  {x.item():.4f}   {x['readout'].item()} (B {_steps(step.sel(readout=x['readout']))})" for x in accuracy]
    return "\n".join(["accuracy after the last round with other ways to predict, weighted by test samples", *lines])
