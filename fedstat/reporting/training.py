"""Report of a run of the trainer, with its cautions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from statsmodels.stats.proportion import proportion_confint

from fedstat.data._clients import LEFT_OUT
from fedstat.fl import custom
from fedstat.fl.losses import Score
from fedstat.fl.stored import profile
from fedstat.labelled import icc
from fedstat.plot import client_lines, communality, forest
from fedstat.plot import profile as draw_profile
from fedstat.plot import rounds as draw_rounds
from fedstat.reporting import document, prose
from fedstat.reporting import stored as stores
from fedstat.reporting.document import COMMAND, Part, Printed, Section, Table, Text, listed, shown
from fedstat.reporting.stored import Stored, assemble, command_line, n_parameters, settings_of_method
from fedstat.results.base import Caution
from fedstat.results.tables import count, interval, number
from fedstat.study import experiment, run_metrics, run_settings, run_table
from fedstat.study.report import report as printed

_IMPROPER = 1e-6
_FEW_SAMPLES = 30


def rounds_done(stored: Stored) -> int:
    """Return the number of rounds with stored metrics, 0 if they cannot be read."""
    if stored.tree is None or "metrics" not in stored.tree.children:
        return 0
    metrics = stored.tree["metrics"].to_dataset()
    for name in ("seconds", "train_loss", "loss"):
        if name in metrics:
            try:
                values = metrics[name].to_numpy()
            except FileNotFoundError:  # the run was deleted or moved since it was opened
                raise
            except Exception:  # noqa: S112 - a damaged array, which is named elsewhere: the next one knows, too
                continue
            is_done = np.isfinite(values.reshape(len(values), -1).astype(float)).any(axis=1)
            return int(np.flatnonzero(is_done)[-1]) + 1 if is_done.any() else 0
    return 0


def of_run(stored: Stored, done: int) -> list[Caution]:
    """Warnings of one run."""
    cautions = []
    requested = stored.config.get("rounds")
    if not stored.finished or (isinstance(requested, int) and done < requested):
        text = f"{done} of {shown(requested)} rounds are done, and the report is of these. Continue with --resume"
        cautions.append(Caution("Not finished", text, severe=True))
    if stored.tree is None or not done:
        return cautions
    run = stored.tree.isel(round=slice(done), missing_dims="ignore")
    return [*cautions, *_of_clients(run), *_of_metrics(run), *_of_split(run), *_of_scale(run)]


def one_seed(stored: Stored) -> Caution:
    """Return the caution on a run of one seed."""
    return Caution(
        "One seed",
        f"a single run, of seed {shown(stored.config.get('seed'))}, has no interval over seeds. Intervals in this "
        "report are over clients or test samples",
    )


def _of_clients(run: xr.DataTree) -> Iterator[Caution]:
    if LEFT_OUT in run.attrs:
        yield Caution("Clients left out", shown(run.attrs[LEFT_OUT]))


def _of_metrics(run: xr.DataTree) -> Iterator[Caution]:
    metrics = run["metrics"].to_dataset()
    for name, what in (("loss", "test loss"), ("train_loss", "training loss")):
        if name in metrics:
            values = metrics[name].transpose("round", "client").to_numpy()
            wrong = np.isinf(values)
            if name == "loss":  # evaluated, and without a loss; idle clients have no training loss
                score = metrics[run_metrics.score_of(run).name].transpose("round", "client").to_numpy()
                wrong |= np.isnan(values) & np.isfinite(score)
            if wrong.any():
                rounds = metrics["round"].to_numpy()[wrong.any(axis=1)]
                n = int(wrong.any(axis=0).sum())
                text = f"the {what} of {n} client{'s' if n > 1 else ''} is not finite, first in round {rounds[0]}"
                yield Caution("Diverged", text, severe=True)
    if "train_loss" in metrics:
        losses = metrics["train_loss"].transpose("round", "client").to_numpy().astype(float)
        mean = run_metrics.weighted(losses, np.ones(losses.shape[1]))
        if len(mean) > 1 and np.isfinite(mean[[0, -1]]).all() and mean[-1] > mean[0]:
            yield Caution(
                "Training loss rose",
                f"from {mean[0]:.4g} in the first round to {mean[-1]:.4g} in the last (mean over selected clients)",
            )
        never = ~np.isfinite(losses).any(axis=0)
        if never.any():
            yield Caution(
                "Clients that never trained",
                f"{int(never.sum())} of {len(never)} clients were selected in no round "
                f"({listed(metrics['client'].to_numpy()[never])}), but count in means over clients",
            )


def _of_split(run: xr.DataTree) -> Iterator[Caution]:
    states = run_table.states(run).set_index("layer")
    for layer, node in (run["split"].children if "split" in run.children else {}).items():
        data = node.to_dataset()
        if "communality" not in data or layer not in states.index:
            continue
        nu = data["communality"].transpose("round", "unit").to_numpy()
        is_analyzed = np.isfinite(nu).any(axis=1)
        if is_analyzed.any():
            yield from factors(shown(layer), nu[is_analyzed], data["converged"].to_numpy()[is_analyzed], "rounds")
        if states.loc[layer, "flat"]:
            text = (
                f"layer {shown(layer)}: all communalities of the last round are equal, so the split is arbitrary. "
                "Lower kappa"
            )
            yield Caution("Uninformative split", text, severe=True)


def factors(layer: str, nu: np.ndarray, converged: np.ndarray, unit: str) -> Iterator[Caution]:
    """Warnings of many factor analyses of one layer: communalities (analysis, unit), and which converged."""
    n = len(nu)
    if failed := int((~converged.astype(bool)).sum()):
        yield Caution(
            "Factor analysis not converged",
            f"layer {layer}: in {failed} of {n} {unit} the communalities still moved when the iteration stopped, and "
            "the split rests on the last iterate",
        )
    heywood = nu > 1 + _IMPROPER
    if heywood.any():
        yield Caution(
            "Heywood cases",
            f"layer {layer}: communalities above 1 in {int(heywood.any(axis=1).sum())} of {n} {unit} "
            f"(up to {int(heywood.sum(axis=1).max())} of {count(nu.shape[1], 'unit')}). The factor model is improper "
            "there: their order, and so the split, depends on where the iteration stops",
        )
    dead = int(np.isnan(nu[-1]).sum())
    if dead:
        yield Caution(
            "Constant units",
            f"layer {layer}: {dead} of {count(nu.shape[1], 'unit')} with constant weights, and so without communality, "
            f"in the last of the {unit}",
        )


def _of_scale(run: xr.DataTree) -> Iterator[Caution]:
    metrics = run["metrics"].to_dataset()
    if "n_test" in metrics and (median := float(np.median(metrics["n_test"]))) < _FEW_SAMPLES:
        if run_metrics.score_of(run).is_error:
            effect = "The RMSE of such a client is uncertain"
        else:
            reach = 196 * (0.25 / max(1.0, median)) ** 0.5
            effect = (
                f"The 95% CI of such a client's accuracy reaches up to {reach:.0f} percentage points to either side"
            )
        yield Caution("Few test samples", f"half of the clients have at most {median:.0f}. {effect}")


_MANY = 40  # clients that a table lists one by one
_LARGEST = 2**28  # bytes of weights that a report analyzes


def part(stored: Stored) -> Part:
    """Report of one run, as far as it got."""
    done = rounds_done(stored)
    run = stored.tree.isel(round=slice(done), missing_dims="ignore") if stored.tree is not None and done else None
    results: dict[str, Callable[[xr.DataTree], Section | None]] = {
        "learning curves": _learning,
        "scores by client": _clients,
        "the split over rounds": _split,
        "agreement of clients": partial(_agreement, done),
        "reliability by layer": _probed,
    }
    title = _joined(_setting(stored.config), stored.title)
    return assemble(
        stored, ran(stored, done), results if done else {}, run=run, title=title,
        checks=lambda _: [*of_run(stored, done), one_seed(stored)],
        summary=lambda run: printed(run) if done else "", methods=prose.of_training([stored]),
    )  # fmt: skip


def ran(stored: Stored, done: int) -> Table:
    """Tabulate the run: command, data, network, algorithm, scale, seed, code."""
    c = stored.config
    rounds = f"{done} of {c.get('rounds')}" if done != c.get("rounds") else str(done)
    every = f", evaluated every {c['evaluate_every']}" if c.get("evaluate_every", 1) != 1 else ""
    settings = ", ".join(f"{k} = {v}" for k, v in settings_of_method(stored).items() if v is not None)
    samples = _samples(stored)
    rows = {
        "command": command(stored),
        "data": _setting(c),
        "clients": f"{c.get('clients', '')}{samples}",
        "network": _joined(c.get("net"), _width(c), f"{n_parameters(c.get('shapes') or {}):,} parameters"),
        "algorithm": f"{c.get('algorithm', '')}{f' ({settings})' if settings else ''}",
        "rounds": f"{rounds}{every}",
        "participation": prose.participation(c.get("participation")),
        "local training": prose.local_training(c),
        "seed": str(c.get("seed", "")),
    } | stores.origin(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items() if value})


def command(stored: Stored) -> str:
    """Command line that makes the run again; the call in Python where its data have no name."""
    try:
        noted = experiment.noted(stored.attrs)
    except (ValueError, TypeError):
        noted = {}
    if "data" not in noted:
        return "fedstat.fl.train(...) in Python, with the data of the user"
    defaults = run_settings.Settings()
    always = ("data", "partition", "net", "algorithm", "clients", "rounds", "seed")
    options = {k: v for k, v in noted.items() if k in always or _plain(v) != _plain(getattr(defaults, k))}
    if noted.get("scenario") == run_settings.default_name(str(noted["data"]), str(noted["partition"])):
        options.pop("scenario", None)
    return command_line("fedstat.fl", options)


def _learning(run: xr.DataTree) -> Section | None:
    score = run_metrics.score_of(run)
    names = {
        score.name: (f"{score.long_name} of a client", f"Test {score.title} of client models after aggregation"),
        "train_loss": ("training loss of a client", "Training loss of the selected clients"),
    }
    blocks = []
    for name, (label, what) in names.items():
        if name in run["metrics"] and bool(np.isfinite(run["metrics"][name]).any()):
            values = run["metrics"][name].assign_attrs(long_name=label, units="")
            caption = (
                f"{what}. Thin lines: clients. Thick line: their median. Band: the middle half of the clients, not an "
                "interval."
            )
            blocks.append(document.figure(partial(client_lines, values), caption))
    return Section("Learning curves", blocks) if blocks else None


def _clients(run: xr.DataTree) -> Section | None:
    metrics, score = run["metrics"].to_dataset(), run_metrics.score_of(run)
    values = metrics[score.name].transpose("round", "client").to_numpy().astype(float)
    evaluated = np.flatnonzero(np.isfinite(values).any(axis=1))
    if not len(evaluated):
        return None
    last = evaluated[-1]
    names = [shown(name) for name in metrics["client"].to_numpy()]
    sizes = {k: metrics[k].to_numpy() if k in metrics else np.full(len(names), np.nan) for k in ("n_train", "n_test")}
    table = pd.DataFrame({"client": names, **sizes, "score": values[last]}).dropna(subset="score")
    if table["n_test"].isna().any() or not len(table):
        return None
    n, scores = table["n_test"].to_numpy(), table["score"].to_numpy()
    when, bars = f"after round {int(metrics['round'][last])}", f"From {_span(n)} test samples each."
    low = high = np.full(len(n), np.nan)
    if not score.is_error:
        low, high = proportion_confint(np.round(scores * n), n, method="wilson")
        bars = f"Bars: Wilson's 95% CI of the client's accuracy from its {_span(n)} test samples."
    table, mean = table.assign(low=low, high=high), float(np.average(scores, weights=n))
    caption = (
        f"Test {score.title} of every client model {when}. {bars} Dashed line: mean weighted by test samples, "
        f"{number(mean)}."
    )
    draw = partial(document.sorted_clients, scores, low, high, mean, score.long_name)
    title = f"{score.title[0].upper()}{score.title[1:]} by client"
    return Section(title, [document.figure(draw, caption), _client_table(table, when, score)])


def _client_table(table: pd.DataFrame, when: str, score: Score) -> Table:
    """All clients in ascending order of their scores or, of many, quantiles."""
    if len(table) <= _MANY:
        rows = [
            [r["client"], f"{r['n_train']:.0f}", f"{r['n_test']:.0f}",
             number(r["score"], 4) if score.is_error else interval(r["score"], r["low"], r["high"], 3, sign=False)]
            for r in table.sort_values("score").to_dict("records")
        ]  # fmt: skip
        columns = ["client", "training samples", "test samples", score.long_name + " [95% CI]" * (not score.is_error)]
        return Table(f"Clients {when}, in ascending order of {score.title}", columns, rows)
    points = {"minimum": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "maximum": 1.0}
    rows = [[name, number(float(table["score"].quantile(q)), 3)] for name, q in points.items()]
    return Table(f"Quantiles over {len(table)} clients {when}", ["quantile", score.long_name], rows)


_STATISTICS = {"communality": "communality", "icc": "agreement of clients (ICC2)"}
"""Statistics of units by which a run may split a layer."""


def _split(run: xr.DataTree) -> Section | None:
    states = run_table.states(run)
    if not len(states):
        return None
    blocks: list[Any] = [_state_table(states)]
    for layer in states["layer"]:
        node = run["split"][layer].to_dataset()
        shared = node["shared"].transpose("round", "unit").to_numpy().astype(bool)
        name = shown(layer)
        if len(shared) > 1:
            blocks += [
                document.figure(
                    partial(document.split_map, shared),
                    f"{name}: shared units (dark) in each round, units that are shared most often on top.",
                ),
                document.figure(
                    partial(draw_rounds, shared),
                    f"{name}: proportion of units in the same group one round later, and adjusted Rand index of each "
                    "round's split with the last one (1 identical, 0 chance).",
                ),
            ]
        statistics = [text for name, text in _STATISTICS.items() if name in node and node[name][-1].notnull().any()]
        if statistics:
            caption = f"{name}: {statistics[0]} of the units in the last round, by group."
            blocks.append(document.figure(partial(communality, node), caption))
    blocks.append(
        Text(
            "Stability over rounds is not certainty over clients: a run does not store how often a unit would be "
            "shared if other clients had taken part. fedstat.bootstrap(run) estimates this from the clients' weights "
            "before averaging."
        )
    )
    return Section("The split over rounds", blocks)


def _agreement(done: int, run: xr.DataTree) -> Section | None:
    """Agreement of clients on units at the last checkpoint that was reached, as ``fedstat.icc(run)`` estimates it."""
    layers = run["trained"].children if "trained" in run.children else {}
    weights = [node.to_dataset()["w"] for node in layers.values()]
    rounds = [n for w in weights for n in w["checkpoint"].to_numpy().tolist() if n <= done]
    if not rounds:
        return None
    if sum(w[-1].nbytes for w in weights) > _LARGEST:
        text = Text("The run is large: fedstat.icc(run) estimates the agreement of its clients on every unit.")
        return Section("Agreement of clients", [text])
    try:
        agreement = icc(run, checkpoint=max(rounds), progress=False)
    except ValueError as error:
        return Section("Agreement of clients", [Text(f"Agreement was not estimated: {error}")])
    caption = (
        "Agreement of clients on units, ICC2, with 95% CIs over clients; of more than 40 units, the highest and the "
        "lowest. Filled: most clients deviate in one direction (FDR 0.05). Empty without a bar: not estimated."
    )
    canvas: Any = forest(agreement).figure
    drawn = document.image(canvas, caption, wide=len(agreement) > 1)
    return Section("Agreement of clients", [Printed(repr(agreement)), drawn])


def _state_table(states: pd.DataFrame) -> Table:
    """Tabulate the split of every layer, with columns of factor analyses if there were any."""
    rows = [
        {
            "layer": shown(s["layer"]),
            "shared": f"{s['shared']} of {s['units']}",
            "factors": number(s["n_factors"], 0),
            "unchanged": number(s["stable"], 3),
            "ARI half-way": number(s["agreement"], 3),
            "converged": number(s["converged"], 3),
        }
        for s in states.to_dict("records")
    ]
    caption = (
        "After the last round. Unchanged: proportion of units in the same group one round later, mean over the last "
        f"{run_table.WINDOW} rounds, or all if there are fewer. ARI half-way: adjusted Rand index of the split "
        "half-way and the last one."
    )
    table = pd.DataFrame(rows)
    if states["converged"].isna().all():
        return Table.of(caption, table.drop(columns=["factors", "converged"]))
    return Table.of(f"{caption} Converged: proportion of the rounds' factor analyses.", table)


def _probed(run: xr.DataTree) -> Section | None:
    if "probe" not in run.children or not np.isfinite(run["probe"].to_dataset()["between"]).any():
        return None
    table = profile(run, window=run_table.WINDOW).dropna(subset="reliability")
    if not len(table):
        return None
    rows = [
        [
            shown(r["layer"]),
            interval(r["reliability"], r["conf_low"], r["conf_high"], 2, sign=False),
            f"{r['p_value']:.2g}",
        ]
        for r in table.to_dict("records")
    ]
    caption = (
        "Reliability of client differences, with 95% CIs; p tests whether it exceeds 0. Above 0.5, a client's weights "
        "estimate its true weights with lower expected squared error than the average over clients does."
    )
    drawn = document.figure(lambda ax: draw_profile(table.assign(layer=table["layer"].map(shown)), ax=ax), caption)
    return Section("Reliability by layer", [drawn, Table("", ["layer", "reliability [95% CI]", "p"], rows)])


def _samples(stored: Stored) -> str:
    if stored.tree is None or "metrics" not in stored.tree.children or "n_train" not in stored.tree["metrics"]:
        return ""
    try:
        n = stored.tree["metrics/n_train"].to_numpy()
    except FileNotFoundError:
        raise
    except Exception:  # damage, which is named elsewhere
        return ""
    return f", {_span(n)} training samples each"


def _span(n: NDArray[Any]) -> str:
    low, high = int(n.min()), int(n.max())
    return str(low) if low == high else f"{low} to {high}"


def _setting(config: Mapping[str, Any]) -> str:
    """Return data set and partition, after the name of the scenario."""
    data = config.get("data")
    plain = _joined(custom.short(data) if isinstance(data, str) else data, config.get("partition"))
    scenario = str(config.get("scenario") or "")
    return scenario if scenario.startswith(plain) else _joined(scenario, plain)


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _width(config: Mapping[str, Any]) -> str:
    return f"width × {config['width']:g}" if isinstance(config.get("width"), float) and config["width"] != 1 else ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
