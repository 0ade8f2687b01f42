"""One run in words: its settings and summary, its size, accuracy, costs and split."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.lazy import pd, xr
from fedstat.data._clients import LEFT_OUT
from fedstat.fl import split_halves
from fedstat.fl.aggregate import weighted_mean
from fedstat.fl.ending import COMMAND
from fedstat.fl.losses import Score
from fedstat.fl.stored import EQUAL_SAMPLES, profile
from fedstat.results import base
from fedstat.results.base import TERMINAL
from fedstat.results.tables import NONE, count, megabytes, number, p_equals
from fedstat.study import run_metrics, run_table
from fedstat.study.collect import title_of


class Record(Mapping[str, Any]):
    """Values by name, which print as a table in terminals and notebooks.

    Parameters
    ----------
    title : str
        First line of the print.
    values : mapping
    """

    def __init__(self, title: str, values: Mapping[str, Any]) -> None:
        self.title, self._values = title, dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0) + 4
        lines = [
            textwrap.fill(
                _text(value), max(TERMINAL, width + 20), initial_indent=f"  {name}".ljust(width),
                subsequent_indent=" " * width, break_on_hyphens=False,
            )
            for name, value in self.items()
        ]  # fmt: skip
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        cell = '<td style="text-align: left{}">'
        name_cell, value_cell = cell.format(""), cell.format("; overflow-wrap: anywhere")
        rows = "".join(
            f"<tr>{name_cell}{html.escape(name)}</td>{value_cell}{html.escape(_text(value))}</td></tr>"
            for name, value in self.items()
        )
        return f"<p>{html.escape(self.title)}</p><table><tbody>{rows}</tbody></table>"


def _text(value: Any) -> str:
    """Return a value as text."""
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_text(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return "none" if value is None else str(value)


def settings(run: str | Path | xr.DataTree) -> Record:
    """Return the settings of a stored run of any kind.

    Parameters
    ----------
    run : path or DataTree
        A store that a fedstat command or function wrote, or what :func:`fedstat.open_run` returned.

    Returns
    -------
    Record
        Mapping from name to value, as the run stores them; it prints as a table.

    Raises
    ------
    FileNotFoundError
        If there is no run at the path.
    ValueError
        If the store holds no settings, or they cannot be read.

    Examples
    --------
    >>> import fedstat
    >>> small = {"clients": 4, "d": 6, "m": 8, "n_train": 10, "rounds": 1, "threads": 1}
    >>> run = fedstat.sim.study(p=0.5, methods=["true", "fedavg"], **small)
    >>> found = settings(run)
    >>> found["methods"], found["rounds"]
    (['true', 'fedavg'], 1)
    >>> print(str(found)[:43])
    Settings of Simulation study on model (8)
    """
    if isinstance(run, xr.DataTree):
        return Record(f"Settings of {run.attrs.get('title') or run.name or 'run'}", _config(run))
    return Record(f"Settings of {run}", store.config_of(run))


def summary(run: str | Path | xr.DataTree) -> Record:
    """Say what a stored run is: method, data, rounds, accuracy, layers and size.

    Parameters
    ----------
    run : path or DataTree
        A store that a fedstat command or function wrote, or what :func:`fedstat.open_run` or
        :func:`fedstat.fl.train` returned.

    Returns
    -------
    Record
        Mapping from name to text, which prints as a table. Of a training run: ``method``, ``data``, ``rounds`` (done
        and planned), ``accuracy`` (or ``rmse``; on test samples after the last evaluated round, mean over clients
        weighted by test samples), ``metrics`` (their means, if the run measured any), ``layers``, ``weights`` (rounds
        after which they are stored), ``size``; and ``caution``, if test samples equal training samples in x. Of other
        runs: ``made by``, ``state``, ``dims``, ``size``.

    Raises
    ------
    FileNotFoundError
        If there is no run at the path.
    ValueError
        If the store holds no settings, or is damaged.

    Examples
    --------
    >>> import fedstat
    >>> from fedstat.fl import algorithms, nets
    >>> data = fedstat.sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)
    >>> summary(fedstat.fl.train(data, nets.mlp([8, 10, 1]), algorithms.fedper(), rounds=2))
    fedper, 2 rounds
      method    FedPer, seed 0
      data      4 clients, 80 training and 40 test samples
      rounds    2, finished
      accuracy  0.875 (test, after round 2; mean over clients, weighted by samples)
      layers    fc1 (10 units), fc2 (1 unit); 101 parameters
      weights   after round 2
      size      5.9 kB in memory
    """
    run = run if isinstance(run, xr.DataTree) else store.open_run(run)
    config = _config(run)
    is_training = run.attrs.get("command") == COMMAND and "metrics" in run.children
    parts = _of_training(run, config) if is_training else _of_other(run)
    return Record(str(run.attrs.get("title") or "run"), parts | {"size": f"{megabytes(run.nbytes)} in memory"})


def tree_html(tree: xr.DataTree) -> str:
    """Return what notebooks show of a DataTree: of a run of fedstat, first its :func:`summary`."""
    html_parts = [tree._repr_html_()]
    if str(tree.attrs.get("command", "")).startswith("fedstat"):
        with suppress(Exception):  # of a damaged run, show what xarray shows
            html_parts.insert(0, summary(tree)._repr_html_())
    return "".join(html_parts)


def _config(run: xr.DataTree) -> dict[str, Any]:
    """Return the settings in the attributes of a run."""
    if "config" not in run.attrs:
        raise ValueError("the object is not a run of fedstat: its attributes hold no settings. Pass a run or its path.")
    return dict(guard.parsed("config", run.attrs["config"].encode(), finite=False))


def _of_training(run: xr.DataTree, config: Mapping[str, Any]) -> dict[str, str]:
    row, metrics = run_table.row(run), run["metrics"].to_dataset()
    samples = [
        f"{int(metrics[f'n_{name}'].sum()):,} {text}"
        for name, text in {"train": "training", "validation": "validation", "test": "test"}.items()
        if f"n_{name}" in metrics
    ]
    scenario = str(config.get("scenario") or config.get("data") or "")
    data = f"{count(row['clients'], 'client')}, {', '.join(samples[:-1])} and {samples[-1]} samples"
    n_done = int(np.isfinite(metrics["seconds"].to_numpy()).sum())
    is_finished = "ended" in run.attrs
    score, evaluated = run_metrics.score_of(run), _evaluated_rounds(run)
    value = "no round was evaluated"
    if not math.isnan(row["final"]):
        shown = score_text(row["final"], score)
        value = f"{shown} (test, after round {evaluated[-1]}; mean over clients, weighted by samples)"
    parts = {
        "method": f"{title_of(row['method'])}, seed {row['seed']}",
        "data": f"{scenario}: {data}" if scenario else data,
        **({"caution": caution} if (caution := _equal_samples(run)) else {}),
        "rounds": f"{n_done}, finished" if is_finished else f"{n_done} of {config['rounds']}, not finished",
        score.name: value,
    }
    if metrics_text := _metrics_in_words(run_table.further(run), "final", row["clients"]):
        parts["metrics"] = metrics_text
    return parts | _layers(run, config, n_done)


def score_text(value: float, score: Score) -> str:
    """Return a score as text: proportions with three decimals, errors with four digits."""
    return NONE if math.isnan(value) else f"{value:.4g}" if score.is_error else f"{value:.3f}"


def _evaluated_rounds(run: xr.DataTree) -> np.ndarray:
    return np.asarray(run[f"metrics/{run_metrics.score_of(run).name}"].dropna("round", how="all")["round"].to_numpy())


def _equal_samples(run: xr.DataTree) -> str:
    """Say how many test samples equal a training sample; "" if there are none, or an older run did not count them."""
    n_equal, n_test = run.attrs.get(EQUAL_SAMPLES, 0), int(run["metrics/n_test"].sum())
    score = run_metrics.score_of(run)
    if not n_equal:
        return ""
    return (
        f"{n_equal:,} of {n_test:,} test samples equal{'s' if n_equal == 1 else ''} a training sample of some client, "
        f"so that {score.long_name} may be too {'low' if score.is_error else 'high'}. Remove duplicates from the data."
    )


def _metrics_in_words(further: pd.DataFrame, column: str, n_clients: int) -> str:
    """List means of metrics, and of accuracies by class the range; "" without metrics."""
    is_class = further["measure"].str.startswith("class_accuracy")
    texts = []
    for x in further[~is_class].to_dict("records"):
        exclusions = (
            f" ({x['clients']} of {n_clients} clients; others {run_metrics.reason_undefined(x['measure'])})"
            if x["clients"] < n_clients
            else ""
        )
        value = f"{x[column]:.4g}" if run_metrics.is_error(x["measure"]) else number(x[column], 3)
        texts.append(f"{run_metrics.title_of(x['measure'])} {value}{exclusions}")
    if len(classes := further[is_class].dropna(subset=column)):
        low, high = classes.sort_values(column, kind="stable").iloc[[0, -1]].to_dict("records")
        ends = (f"{x[column]:.3f} ({x['measure'].removeprefix('class_accuracy_')})" for x in (low, high))
        texts.append(f"accuracy by class {' to '.join(ends)}")
    return ", ".join(texts)


def _layers(run: xr.DataTree, config: Mapping[str, Any], n_done: int) -> dict[str, str]:
    shapes = config.get("shapes", {})
    units = {name.rpartition(".")[0]: shape[0] for name, shape in reversed(shapes.items()) if shape}
    n_parameters = sum(math.prod(shape) for shape in shapes.values())
    layers = ", ".join(f"{layer} ({count(n, 'unit')})" for layer, n in reversed(units.items()))
    nodes = run.children["weights"].children.values() if "weights" in run.children else ()
    stored = sorted({n for node in nodes for n in node["checkpoint"].to_numpy().tolist() if n <= n_done})
    rounds = f"after round{'s' if len(stored) > 1 else ''} {', '.join(map(str, stored))}"
    return {"layers": f"{layers}; {n_parameters:,} parameters", "weights": rounds if stored else "not stored"}


def _of_other(run: xr.DataTree) -> dict[str, str]:
    sizes = {str(dim): n for node in run.subtree for dim, n in node.sizes.items()}
    return {
        "made by": str(run.attrs.get("command", "an unknown command")),
        "state": f"finished {run.attrs['ended']}" if "ended" in run.attrs else "not finished",
        "dims": ", ".join(f"{dim} {n}" for dim, n in sizes.items()),
    }


MEAN = weighted_mean().name


def line(run: xr.DataTree) -> str:
    """Summarize a run in half a line, for the log of a grid."""
    row, title = run_table.row(run), run_metrics.score_of(run).long_name
    shown = "{:.4g}" if run_metrics.is_error(row["measure"]) else "{:.4f}"
    final, last, best = (shown.format(row[name]) for name in ("final", "last10", "best10"))
    if not math.isfinite(row["last10"]):
        return f"{title} {final} (last round), {row['seconds']:.2f} s per round"
    best = f", best 10 rounds {best}" if math.isfinite(row["best10"]) else ""
    return f"{title} {last} (last 10 rounds{best}), {row['seconds']:.2f} s per round"


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
        "prediction_rules": _prediction_rules,
        "unseen_clients": _unseen_clients,
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
        *([f"Caution: {caution}"] if (caution := _equal_samples(run)) else []),
        *([f"Caution: {run.attrs[LEFT_OUT]}"] if LEFT_OUT in run.attrs else []),
        *_aggregation(config, metrics, unprotected="trained" in run.children),
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


def _aggregation(config: Mapping[str, Any], metrics: xr.Dataset, *, unprotected: bool) -> list[str]:
    """Name the aggregator, unless it is the weighted mean; of a private run return ε after the last round.

    ``unprotected`` weights before averaging are stored beside it.
    """
    if "privacy" not in config:
        name = config.get("aggregator", MEAN)
        return [] if name == MEAN else [f"Aggregator: {name}"]
    epsilon = metrics["epsilon"].to_numpy()[int(np.isfinite(metrics["epsilon"]).sum()) - 1]
    stored = "  It does not protect the weights before averaging, which this run stores."
    return [
        f"Client-level differential privacy: ε = {epsilon:.4g} at δ = {config['privacy']['delta']:g}",
        *[stored] * unprotected,
    ]


def _accuracies(run: xr.DataTree, row: Mapping[str, Any]) -> list[str]:
    rounds, n_averaged = int(row["rounds"]), run_table.span(int(row["rounds"]))
    window = f"rounds {rounds - n_averaged + 1} to {rounds}" if n_averaged > 1 else f"round {rounds}"
    mean = f"mean of {window}" if n_averaged > 1 else window
    score, evaluated = run_metrics.score_of(run), _evaluated_rounds(run)
    rules = {
        "last10": mean,
        "final": f"round {evaluated[-1]}" if len(evaluated) else "",
        "best10": "best mean of 10 consecutive rounds (chosen on test data: optimistic)",
        "validated": f"round {row['validated_round']:.0f} (chosen on validation data)",
        "before": f"selected clients before aggregation, {mean}",
    }
    mean_text, sd, worst = (score_text(row[name], score) for name in ("unweighted", "spread", "q10"))
    over_clients = f"mean {mean_text}, SD {sd}, {90 if score.is_error else 10}% quantile {worst}"
    metrics_text = _metrics_in_words(run_table.further(run), "mean", row["clients"])
    few = f"Means are over evaluated rounds only: {row['evaluated']} of the last {run_table.WINDOW}"
    return [
        f"Test {score.title} of client models, weighted by test samples",
        *(f"  {score_text(row[name], score)}  {text}" for name, text in rules.items() if not math.isnan(row[name])),
        *([few] if n_averaged > row["evaluated"] else []),
        f"Over clients, {window}: {over_clients}",
        *([f"Other metrics, {mean}: {metrics_text}"] if metrics_text else []),
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
    rules, score = run["prediction_rules"].to_dataset(), run_metrics.score_of(run)
    values = rules[score.name].weighted(run["metrics"].to_dataset()["n_test"]).mean("client")
    texts = [f"  {score_text(x.item(), score)}  {x['rule'].item()}" for x in values]
    steps = [_step_of(rules["step"].sel(rule=x["rule"])) for x in values]
    return [
        f"Other prediction rules, {score.long_name} after the last round",
        *(f"{text} (B: {step})" for text, step in zip(texts, steps, strict=True)),
    ]


def _step_of(step: xr.DataArray) -> str:
    """Return B of all clients and layers, as briefly as it can be said."""
    by_layer, values = step.isel(client=0), np.unique(step)
    if len(values) == 1:
        return f"{values[0]:.2g}"
    return _steps(by_layer) if (step == by_layer).all() else f"mean over clients {step.mean().item():.2f}"


def _unseen_clients(run: xr.DataTree) -> list[str]:
    by_rule, score = run_table.unseen_clients(run), run_metrics.score_of(run)
    scores = ", ".join(f"{x['rule'].item().replace('_', ' ')} {score_text(x.item(), score)}" for x in by_rule)
    comment = run[f"unseen_clients/{score.name}"].attrs.get("comment")
    clients = count(run["unseen_clients"].sizes["client"], "unseen client")
    return [f"Test {score.title} on {clients}: {scores}{f' ({comment})' if comment else ''}"]


def _ablation(run: xr.DataTree) -> list[str]:
    by_part, score = run_table.ablated(run).transpose("part", "draw"), run_metrics.score_of(run)
    parts, scores = by_part["part"].to_numpy(), by_part.to_numpy()
    if np.ptp(scores) == 0:
        return ["Random values replaced no unit: no layer has both shared and personal units"]
    n = scores.shape[1]
    errors = np.std(scores, axis=1, ddof=1) / math.sqrt(n) if n > 1 else np.full(len(scores), math.nan)
    cells = [
        (f"  {part}", score_text(mean, score) + (f" ({score_text(error, score)})" if n > 1 else ""))
        for part, mean, error in zip(parts, scores.mean(axis=1), errors, strict=True)
    ]
    head = f"mean (SE, {n} draws)" if n > 1 else "1 draw"
    return [f"Test {score.title}, units replaced by random values: {head}", *base.columns(cells, n_right=1, indent="")]
