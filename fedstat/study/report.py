"""Print of one run: its size, accuracy, costs and split."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from fedstat._utils.lazy import pd, xr
from fedstat.fl import split_halves
from fedstat.fl.aggregate import weighted_mean
from fedstat.fl.stored import profile
from fedstat.results import base
from fedstat.results.tables import count, megabytes, number, p_equals
from fedstat.store.encoding import algorithm_of
from fedstat.study import run_table
from fedstat.study.collect import title_of

MEAN = weighted_mean().name


def line(run: xr.DataTree) -> str:
    """Summarize a run in half a line, for the log of a grid."""
    row = run_table.row(run)
    if not math.isfinite(row["last10"]):
        return f"test accuracy {row['final']:.4f} (last round), {row['seconds']:.2f} s per round"
    best = f", best 10 rounds {row['best10']:.4f}" if math.isfinite(row["best10"]) else ""
    return f"test accuracy {row['last10']:.4f} (last 10 rounds{best}), {row['seconds']:.2f} s per round"


def report(run: xr.DataTree) -> str:
    """Return the print of a run, in at most 80 columns.

    It holds sizes, accuracy over clients, communication, the groups of units in every split layer, and the results of
    probes.
    """
    row = run_table.row(run)
    lines = [*_sizes(run, row), *_accuracies(run, row), *_costs(row), *_splits(run, int(row["rounds"]))]
    blocks = {
        "choice": _choice,
        "probe": _reliability,
        "readouts": _prediction_rules,
        "new": _unseen_clients,
        "ablation": _ablation,
    }
    lines += [text for group, block in blocks.items() if group in run.children for text in block(run)]
    return "\n".join(map(base.wrapped, lines))


def _sizes(run: xr.DataTree, row: Mapping[str, Any]) -> list[str]:
    config, metrics = run_table.config_of(run), run["metrics"].to_dataset()
    scenario = re.sub(
        r"\bdirichlet:([\d.]+)", r"Dirichlet(\1)", str(config.get("scenario") or config.get("data") or "")
    )
    sizes = f"{count(row['rounds'], 'round')}, {count(row['clients'], 'client')}, seed {row['seed']}"
    subsets = ((_span(metrics[f"n_{name}"].to_numpy()), name) for name in ("train", "test") if f"n_{name}" in metrics)
    samples = ", ".join(f"{span} {'training' if name == 'train' else name}" for span, name in subsets)
    return [
        f"{title_of(row['method'])}{f' on {scenario}' if scenario else ''}: {sizes}",
        f"Per client: {samples} samples; {_participation(config)}",
        *_aggregation(config, metrics),
    ]


def _span(n: np.ndarray) -> str:
    low, high = int(n.min()), int(n.max())
    return str(low) if low == high else f"{low} to {high}"


def _participation(config: Mapping[str, Any]) -> str:
    rate = config["participation"]
    if isinstance(rate, list):
        return f"{100 * rate[0]:.4g}% to {100 * rate[1]:.4g}% of clients per round"
    selected = "all clients" if rate == 1 else f"{100 * rate:.4g}% of clients"
    return f"{selected} per round{' on average' if config.get('sampling') == 'poisson' else ''}"


def _aggregation(config: Mapping[str, Any], metrics: xr.Dataset) -> list[str]:
    """Name the aggregator, unless it is the weighted mean; of a private run return ε after the last round."""
    if "privacy" not in config:
        name = config.get("aggregator", MEAN)
        return [] if name == MEAN else [f"Aggregator: {name}"]
    epsilon = metrics["epsilon"].to_numpy()[int(np.isfinite(metrics["epsilon"]).sum()) - 1]
    return [f"Client-level differential privacy: ε = {epsilon:.4g} at δ = {config['privacy']['delta']:g}"]


def _accuracies(run: xr.DataTree, row: Mapping[str, Any]) -> list[str]:
    rounds, n_averaged = int(row["rounds"]), run_table.span(int(row["rounds"]))
    window = f"rounds {rounds - n_averaged + 1} to {rounds}" if n_averaged > 1 else f"round {rounds}"
    mean = f"mean of {window}" if n_averaged > 1 else window
    evaluated = run["metrics/accuracy"].dropna("round", how="all")["round"].to_numpy()
    rules = {
        "last10": mean,
        "final": f"round {evaluated[-1]}" if len(evaluated) else "",
        "best10": "best mean of 10 consecutive rounds (chosen on test data: optimistic)",
        "validated": f"round {row['validated_round']:.0f} (chosen on validation data)",
        "before": f"selected clients before aggregation, {mean}",
    }
    over_clients = f"mean {row['unweighted']:.3f}, SD {number(row['spread'], 3)}, 10% quantile {row['q10']:.3f}"
    few = f"Means are over evaluated rounds only: {row['evaluated']} of the last {run_table.WINDOW}"
    return [
        "Test accuracy of client models, weighted by test samples",
        *(f"  {row[name]:.3f}  {text}" for name, text in rules.items() if not math.isnan(row[name])),
        *([few] if n_averaged > row["evaluated"] else []),
        f"Over clients, {window}: {over_clients}",
        "One seed: compare methods over several seeds.",
    ]


def _costs(row: Mapping[str, Any]) -> list[str]:
    bytes_sent = f"{megabytes(row['bytes_up'])} uploaded, {megabytes(row['bytes_down'])} downloaded"
    excluded = ["  Neither includes the training before round 1."] if row["method"] == "fedfac-static" else []
    return [
        f"Communication: {bytes_sent} (all clients and rounds)",
        f"Time: {row['seconds']:.2f} s per round (median, without evaluation)",
        *excluded,
    ]


def _splits(run: xr.DataTree, rounds: int) -> list[str]:
    """Return a row for every split layer."""
    states = run_table.states(run)
    if states.empty:
        return []
    cells = [
        (f"  {layer}", f"{shared}/{units}", number(factors, 0), number(stable, 3), number(converged, 2))
        for layer, shared, units, factors, stable, converged in states[
            ["layer", "shared", "units", "n_factors", "stable", "converged"]
        ].itertuples(index=False)
    ]
    last = f"last {min(run_table.WINDOW, rounds)}"
    return [
        *base.columns([("Split", "shared", "factors", "unchanged", "converged"), *cells], n_right=4, indent=""),
        f"unchanged: proportion of units in the same group one round later ({last})",
        *(
            f"{layer}: all communalities are equal, so they rank no units. Lower kappa."
            for layer in states.loc[states["flat"], "layer"]
        ),
    ]


def _choice(run: xr.DataTree) -> list[str]:
    """Describe the fine-tuning that was selected in the last evaluated round."""
    selected = run["choice"].to_dataset().dropna("round", how="all").isel(round=-1)
    lines = [f"Fine-tuning selected in round {selected['round'].item()}"]
    if "step" in selected:
        lines.append(f"  B in W + B (W' − W), where W' is fine-tuned from W: {_steps(selected['step'])}")
    if "finetuning" in selected:
        candidates = _finetunings(json.loads(run.attrs["config"])["algorithm_settings"])
        numbers, counts = np.unique(selected["finetuning"], return_counts=True)
        clients = [f" ({count(n, 'client')})" if selected["finetuning"].ndim else "" for n in counts]
        names = [f"{candidates[int(i)]}{who}" for i, who in zip(numbers, clients, strict=True)]
        lines.append(f"  W', of {len(candidates)} candidates: {'; '.join(names)}")
    return lines


def _steps(step: xr.DataArray) -> str:
    if step.dims == ("layer",):
        return ", ".join(f"{layer.item()} {value.item():.2f}" for layer, value in zip(step["layer"], step, strict=True))
    if step.dims == ("client",):
        low, high = np.quantile(step, [0.25, 0.75])
        return f"mean over clients {step.mean().item():.2f}, quartiles {low:.2f} and {high:.2f}"
    return f"{step.item():.2f}"


def _finetunings(settings: Mapping[str, Any]) -> list[str]:
    """Name the candidates of :func:`fedstat.fl.algorithms.finetuned`, in its order."""
    epochs, rates = (x if isinstance(x, list) else [x] for x in (settings["finetune_epochs"], settings["rate"]))
    candidates = dict.fromkeys((n, rate) if n != 0 else (0, 1.0) for n, rate in product(epochs, rates))
    return [
        "none" if n == 0 else f"{'local epochs' if n is None else count(n, 'epoch')} at {rate:g} × lr"
        for n, rate in candidates
    ]


def _reliability(run: xr.DataTree) -> list[str]:
    """Return the reliability of client differences by layer, over the last rounds."""
    probe, metrics = run["probe"].to_dataset(), run["metrics"]
    last = min(run_table.WINDOW, metrics.sizes["round"])
    if not np.isfinite(probe["between"]).any():
        return ["Split-half training: no estimate, because clients share no parameters"]
    table = profile(run, window=run_table.WINDOW)
    columns = ["layer", "reliability", "conf_low", "conf_high", "p_value"]
    is_probed = np.isfinite(probe["between"].transpose("round", "client", "layer").to_numpy()).any(axis=2)
    n_samples = [probe["n_train"].to_numpy()[clients] for clients in is_probed if clients.any()]
    n_weights = int(probe["n_weights"].sum())
    up, down = np.sum([split_halves.bytes_sent(n_weights, len(table), n) for n in n_samples], axis=0)
    bytes_sent = f"{megabytes(up)} uploaded, {megabytes(down)} downloaded"
    n_excluded = int((probe["n_train"] < 2).sum())
    return [
        f"Reliability of client differences (split-half training, last {count(last, 'round')})",
        *(
            f"  {layer}: not estimated (each client continues from its own parameters)"
            if math.isnan(reliability)
            else f"  {layer}: {reliability:.2f}, 95% CI [{low:.2f}, {high:.2f}], {p_equals(p)}"
            for layer, reliability, low, high, p in table[columns].itertuples(index=False)
        ),
        *_above_half(table.dropna(subset="reliability")),
        f"  Communication of {count(len(n_samples), 'probed round')}: {bytes_sent}",
        *([f"  {count(n_excluded, 'client')} excluded: only one training sample"] if n_excluded else []),
    ]


def _above_half(table: pd.DataFrame) -> list[str]:
    """Name the layer from which on reliability is above 0.5, testing from the last layer."""
    if table.empty:
        return []
    is_above = ((table["conf_low"] > 0.5) & (table["p_value"] <= 0.05)).to_numpy()
    n = int(np.logical_and.accumulate(is_above[::-1]).sum())
    if not n:
        return [f"  {table['layer'].iloc[-1]}: no evidence of reliability above 0.5; earlier layers are not tested"]
    return [f"  Above 0.5 from {table['layer'].iloc[-n]} on (tested from the last layer)"]


def _prediction_rules(run: xr.DataTree) -> list[str]:
    readouts = run["readouts"].to_dataset()
    accuracy = readouts["accuracy"].weighted(run["metrics"].to_dataset()["n_test"]).mean("client")
    return [
        "Other prediction rules, test accuracy after the last round",
        *(
            f"  {x.item():.3f}  {algorithm_of(x['readout'].item())} "
            f"(B: {_step_of(readouts['step'].sel(readout=x['readout']))})"
            for x in accuracy
        ),
    ]


def _step_of(step: xr.DataArray) -> str:
    """Return B of all clients and layers, as briefly as it can be said."""
    by_layer, values = step.isel(client=0), np.unique(step)
    if len(values) == 1:
        return f"{values[0]:.2g}"
    return _steps(by_layer) if (step == by_layer).all() else f"mean over clients {step.mean().item():.2f}"


def _unseen_clients(run: xr.DataTree) -> list[str]:
    by_rule = run_table.new_clients(run)
    accuracies = ", ".join(f"{x['rule'].item().replace('_', ' ')} {x.item():.3f}" for x in by_rule)
    comment = run["new/accuracy"].attrs.get("comment")
    clients = count(run["new"].sizes["client"], "unseen client")
    return [f"Test accuracy on {clients}: {accuracies}{f' ({comment})' if comment else ''}"]


def _ablation(run: xr.DataTree) -> list[str]:
    by_part = run_table.ablated(run).transpose("part", "draw")
    parts, accuracy = by_part["part"].to_numpy(), by_part.to_numpy()
    if np.ptp(accuracy) == 0:
        return ["Random values replaced no unit: no layer has both shared and personal units"]
    n = accuracy.shape[1]
    errors = np.std(accuracy, axis=1, ddof=1) / math.sqrt(n) if n > 1 else np.full(len(accuracy), math.nan)
    cells = [
        (f"  {part}", f"{mean:.3f} ({number(error, 3)})" if n > 1 else f"{mean:.3f}")
        for part, mean, error in zip(parts, accuracy.mean(axis=1), errors, strict=True)
    ]
    head = f"mean (SE, {n} draws)" if n > 1 else "1 draw"
    return [f"Test accuracy, units replaced by random values: {head}", *base.columns(cells, n_right=1, indent="")]
