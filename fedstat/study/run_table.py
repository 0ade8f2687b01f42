"""Table of runs: the row of each run, the rules that choose its rounds, and curves and clients of single runs."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat import _cli
from fedstat._utils import check
from fedstat._utils.guard import replace_file
from fedstat._utils.lazy import pd, xr
from fedstat.fl import metrics as fl_metrics
from fedstat.fl import nets
from fedstat.fl.losses import SCORES, Score, score_among
from fedstat.results.base import TERMINAL, aligned
from fedstat.stats.ranking import is_higher_better
from fedstat.stats.split import adjusted_rand, prop_unchanged

WINDOW = 10
"""Consecutive rounds over which scores are averaged (FedFac §5.2)."""

RULES = {
    "best10": "best mean over 10 consecutive rounds{}, chosen on the test data that it reports",
    "last10": "mean over the last 10 rounds{}",
    "final": "the last evaluated round",
    "validated": "the round with the best accuracy on validation data",
}
"""Ways to choose the rounds that a run is judged by, in words."""


def span(rounds: int) -> int:
    """Return the number of rounds to average at the end of a run: 10, or 1 if the run is shorter.

    A longer mean over a short run would include its first rounds, before anything is learned.
    """
    return WINDOW if rounds >= WINDOW else 1


def best_window(mean: NDArray[np.float64], window: int = WINDOW) -> tuple[float, float]:
    """Return the best mean over consecutive rounds, and the last of these rounds (from 1).

    NaN if nothing was evaluated or the run is shorter than the window. Windows with fewer evaluated rounds than others
    are left out, unless the difference is one, as happens when only every few rounds are evaluated.

    Examples
    --------
    >>> best_window(np.array([0.1, 0.5, 0.9, 0.1]), window=2)
    (0.7, 3.0)
    """
    if len(mean) < window or not np.isfinite(mean).any():
        return math.nan, math.nan
    windows = np.lib.stride_tricks.sliding_window_view(mean, window)
    n = np.isfinite(windows).sum(axis=1)
    enough = n >= max(1, n.max() - 1)
    means = np.where(enough, np.nansum(windows, axis=1) / np.maximum(n, 1), -np.inf)
    index = int(means.argmax())
    return float(means[index]), float(index + window)


def choose(table: pd.DataFrame, rule: str | None = None) -> str:
    """Return the rule for the runs of a table.

    Parameters
    ----------
    table : DataFrame
        ``scenario`` and ``rounds`` of every run.
    rule : str, optional
        One of ``RULES``. By default best10, as papers report it; final if a run has fewer than 10 rounds.

    Raises
    ------
    ValueError
        If the rule averages ten rounds and a run has fewer.
    """
    short = short_runs(table)
    if rule is None:
        return "final" if short else "best10"
    check.choice("rule", rule, list(RULES))
    if rule.endswith("10") and short:
        raise ValueError(f"{rule} averages {WINDOW} rounds, but there are fewer: {short}. Use final or validated.")
    return rule


def short_runs(table: pd.DataFrame) -> str:
    """Name scenarios with runs of fewer than ten rounds, and their rounds; "" if there are none."""
    short = table[table["rounds"] < WINDOW].groupby("scenario", sort=False)["rounds"].min()
    return "; ".join(f"{scenario}: {rounds} rounds" for scenario, rounds in short.items())


def words(rule: str, table: pd.DataFrame) -> str:
    """Describe a rule for the runs of a table, with the number of evaluated rounds if it is below ten."""
    n_evaluated = sorted(table.loc[table["rounds"] >= WINDOW, "evaluated"].unique())
    sparse = n_evaluated and n_evaluated[0] < WINDOW
    counts = (
        str(n_evaluated[0])
        if len(n_evaluated) == 1
        else f"{n_evaluated[0]} to {n_evaluated[-1]}"
        if n_evaluated
        else ""
    )
    text = RULES[rule].format(f" (of which {counts} were evaluated)" if sparse else "")
    return (
        text.replace("accuracy", "RMSE")
        if "measure" in table and is_of_numbers(str(table["measure"].iloc[0]))
        else text
    )


class Table(NamedTuple):
    """Table of runs.

    Attributes
    ----------
    title : str
    values : DataFrame
        All numbers, one row per line of the table.
    blocks : mapping from heading to DataFrame of str
        What the text and Markdown show.
    notes : tuple of str
        What the columns mean, what was not run, where the numbers come from.
    """

    title: str
    values: pd.DataFrame
    blocks: Mapping[str, pd.DataFrame]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return the table as text for a terminal."""
        parts = [self.title]
        parts += [f"{heading}\n{aligned(block)}" for heading, block in self.blocks.items()]
        notes = [textwrap.fill(note, TERMINAL, subsequent_indent="  ") for note in self.notes]
        return "\n\n".join([*parts, "\n".join(notes)])

    def write(self, name: Path) -> None:
        """Write all numbers to ``name.csv``, and the table to ``name.md``."""
        require_writable(name)
        name.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(Path(f"{name}.csv")) as csv, replace_file(Path(f"{name}.md")) as markdown:
            self.values.to_csv(csv, index=False, float_format="%.6g")
            markdown.write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """Return the table as Markdown."""
        parts = [f"## {self.title}"]
        parts += [f"### {heading}\n\n{_pipes(block)}" for heading, block in self.blocks.items()]
        return "\n\n".join([*parts, "\n".join(f"- {note}" for note in self.notes)]) + "\n"


def require_writable(name: Path) -> None:
    """Raise ValueError, before any work, if the table's files cannot be written; their folder need not exist."""
    for file in (Path(f"{name}.csv"), Path(f"{name}.md")):
        if not file.parent.exists():
            file = next(parent for parent in file.absolute().parents if parent.parent.exists())
        _cli.require_file("--out", file)


def make(builds: Mapping[str, Callable[[], Table]], out: str | Path | None = None) -> str:
    """Build tables, write them if asked, and return them as text.

    Parameters
    ----------
    builds : mapping from suffix to callable () -> Table
        The suffix is added to the files' names. A table that cannot be made is reported, not raised.
    out : path, optional
        Name of the files without extension, see :meth:`Table.write`.

    Raises
    ------
    ValueError
        If no table can be made.
    """
    tables, missing = {}, []
    for suffix, build in builds.items():
        try:
            tables[suffix] = build()
        except ValueError as error:
            missing.append(f"not made: {error}")
    if not tables:
        raise ValueError("; ".join(missing))
    for suffix, table in tables.items() if out is not None else ():
        table.write(Path(f"{out}{suffix}"))
    return "\n\n\n".join([*(table.text() for table in tables.values()), *missing])


def _pipes(block: pd.DataFrame) -> str:
    rule = ["---", *["---:"] * (block.shape[1] - 1)]
    cells = [list(map(str, block.columns)), rule, *block.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def score_of(run: xr.DataTree) -> Score:
    """Return the score by which the client models of a run are judged: accuracy, or RMSE of real-valued targets."""
    return score_among(list(map(str, _metrics(run))))


def score_in(table: pd.DataFrame) -> Score:
    """Return the score that a table of runs, rounds or clients holds.

    Raises
    ------
    ValueError
        If it holds accuracies and RMSEs, which cannot be compared.
    """
    names = [score.name for score in SCORES.values() if score.name in table]
    if len(names) > 1:
        raise ValueError(
            f"runs must have one score, but the table holds {' and '.join(names)}: of classes and of real-valued "
            "targets. Take runs of one task."
        )
    return score_among(table)


def is_error(measure: str) -> bool:
    """Return True if smaller values of a measure are better.

    Examples
    --------
    >>> is_error("mae"), is_error("r2")
    (True, False)
    """
    return not is_higher_better(measure)


def is_of_numbers(measure: str) -> bool:
    """Return True for measures of real-valued targets."""
    return measure == "rmse" or measure in fl_metrics.ERRORS


def reason_undefined(measure: str) -> str:
    """Say what test samples are like for which a measure is undefined."""
    return "have constant targets" if is_of_numbers(measure) else "lack a class"


def measures(run: xr.DataTree) -> dict[str, tuple[xr.DataArray, xr.DataArray]]:
    """Return the measures of a run that have one value per client: values (round, client) and weights (client,).

    They are the run's score, ``accuracy`` or ``rmse``, and its metrics (:data:`fedstat.fl.metrics.METRICS`,
    ``ERRORS``), among them ``class_accuracy_3`` for class 3. Weights are the client's test samples, of the class if the
    measure is of one.
    """
    metrics = _metrics(run)
    weight = xr.DataArray(_sizes(metrics, "n_test"), dims="client")
    names = (score_of(run).name, *fl_metrics.TITLES)
    by_name = {name: (metrics[name], weight) for name in names if name in metrics}
    if "class_accuracy" in metrics:
        values, n_test = metrics["class_accuracy"], run["clients"].to_dataset()["n_test"]
        for i, label in enumerate(metrics["class"].values):
            by_name[f"class_accuracy_{label}"] = values.isel({"class": i}), n_test.isel({"class": i})
    return by_name


def measured(run: xr.DataTree, measure: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values (round, client) and weights (client,) of a measure by its name in :func:`measures`.

    Raises
    ------
    ValueError
        If there is no such measure (the message has the nearest names), or the run did not measure it.
    """
    by_name, name = measures(run), re.sub(r"^(class_accuracy)_.*", r"\1", measure)
    if score_of(run) is SCORES["regression"] and name in (*fl_metrics.METRICS, "accuracy"):
        raise ValueError(f"{name!r} is of classes, but the targets are real numbers. Measures: {', '.join(by_name)}.")
    if name in fl_metrics.METRICS and not any(other.startswith(name) for other in by_name):
        raise ValueError(
            f"the run did not measure {name!r}, but {', '.join(by_name)}. Train with metrics=[{name!r}] "
            f"(--metrics {name})."
        )
    values, weight = by_name[check.choice("measure", measure, list(by_name))]
    return values.transpose("round", "client").to_numpy().astype(np.float64), weight.to_numpy().astype(np.float64)


def title_of(measure: str) -> str:
    """Return a measure in words.

    Examples
    --------
    >>> title_of("accuracy"), title_of("macro_f1"), title_of("class_accuracy_3")
    ('test accuracy', 'macro F1', 'accuracy on class 3')
    """
    for score in SCORES.values():
        if measure == score.name:
            return score.long_name
    return fl_metrics.TITLES.get(measure, f"accuracy on class {measure.removeprefix('class_accuracy_')}")


def further(run: xr.DataTree) -> pd.DataFrame:
    """Return means of the run's metrics over clients, weighted as :func:`measures` says.

    Returns
    -------
    DataFrame
        ``measure``; ``mean`` over evaluated rounds of the last 10 (the last round of a run with fewer); ``final``, in
        the last evaluated round; ``clients``, number of clients with a value. A client without test samples of a class
        has no AUC, and no accuracy on the class.
    """
    rows = []
    for name in measures(run):
        if name != score_of(run).name:
            values, weight = measured(run, name)
            mean = weighted(values, weight)
            rounds = np.flatnonzero(np.isfinite(mean))
            n_clients = int(np.isfinite(values).any(axis=0).sum())
            last, final = _nanmean(mean[-span(len(mean)) :]), mean[rounds[-1]] if len(rounds) else math.nan
            rows.append({"measure": name, "mean": last, "final": final, "clients": n_clients})
    return pd.DataFrame(rows, columns=["measure", "mean", "final", "clients"])


def row(run: xr.DataTree, measure: str | None = None) -> dict[str, Any]:
    """Summarize a run in one row.

    Parameters
    ----------
    run : DataTree
        Result of :func:`fedstat.fl.train`.
    measure : str, optional
        One of :func:`measures`, by default the run's score.

    Returns
    -------
    dict
        ``scenario``, ``method``, ``seed``, ``layers`` (names joined by a comma), ``kappa``, ``tau``, ``estimator``,
        ``lr``, ``clients``, ``rounds``, ``revision``, ``code`` (digest of the trainer's), ``measure``. Test accuracy
        (or another measure; the best error is the smallest), weighted by the clients' test samples: ``best10``, best
        mean over 10 consecutive rounds, and ``best10_round``, the last of these; ``last10``, mean over the last 10
        (``evaluated``: how many were evaluated); ``final``, last evaluated round; ``validated``, round with the best
        validation score, with ``validated_round`` and that score, ``validation``; ``optimism``, by how much best10 is
        better than the 10 rounds that are best on validation data.
        Over the last 10 rounds: ``before``, weighted accuracy of the active clients' models as they leave local
        training; ``unweighted`` mean over clients, their ``spread`` (standard deviation) and ``q10`` (10 % quantile, of
        errors 90 %).
        ``bytes_up``, ``bytes_down``: sums over all rounds; ``seconds``: median over rounds. NaN for what the run lacks;
        with fewer than 10 rounds there are no best10, last10 and optimism, and the last round stands for the last 10.
        A run with ``metrics`` adds their means by name, see :func:`further`. The round of ``validated`` is that of the
        best validation accuracy for every measure.

    Raises
    ------
    ValueError
        If it is not a run of the trainer, or lacks the measure.

    Notes
    -----
    best10 chooses rounds on the test data that it reports (as do FedFac Table 2 and all its peers) and so is too high;
    ``optimism`` says by how much. If only some rounds are evaluated, windows average those.
    """
    config, metrics, score = config_of(run), _metrics(run), score_of(run)
    measure = measure or score.name
    test, weight = measured(run, measure)
    over_clients = clients(run, measure)[measure].dropna()
    before = weighted(_values(metrics, f"{score.name}_before"), weight)
    values = {
        "scenario": config.get("scenario") or config.get("data") or "run",
        "method": config["algorithm"],
        "seed": config["seed"],
        "layers": _layers(config),
        **{name: _number(_setting(config, name)) for name in ("kappa", "tau")},
        "estimator": _setting(config, "estimator") or "",
        "lr": config.get("lr", math.nan),
        "clients": test.shape[1],
        "rounds": len(test),
        "revision": run.attrs.get("revision", ""),
        "code": run.attrs.get("code", ""),
        "measure": measure,
        **_by_rules(metrics, weighted(test, weight), measure, score),
        "before": _nanmean(before[-span(len(test)) :]) if measure == score.name else math.nan,
        "unweighted": over_clients.mean(),
        "spread": over_clients.std(),
        "q10": over_clients.quantile(0.9 if is_error(measure) else 0.1),
        "bytes_up": _total(metrics, "bytes_up"),
        "bytes_down": _total(metrics, "bytes_down"),
        "seconds": float(np.nanmedian(metrics["seconds"])) if "seconds" in metrics else math.nan,
        **{x["measure"]: x["mean"] for x in further(run).to_dict("records")},
    }
    return {name: well_formed(value) if isinstance(value, str) else value for name, value in values.items()}


def well_formed(text: str) -> str:
    """Replace half pairs of UTF-16, which settings of a store may hold, but tables of PyArrow cannot."""
    return text.encode("utf-8", "replace").decode()


def _by_rules(metrics: xr.Dataset, mean: NDArray[np.float64], measure: str, score: Score) -> dict[str, Any]:
    """Return a measure of a run by every rule, from its mean over clients (round,)."""
    sign = -1 if is_error(measure) else 1
    best, best_round = best_window(sign * mean)
    size = "n_validation" if "n_validation" in metrics else "n_train"
    validation = weighted(_values(metrics, f"validation_{score.name}"), _sizes(metrics, size))
    ends = np.flatnonzero(np.isfinite(mean))
    n_evaluated = int(np.isfinite(mean[-WINDOW:]).sum())
    accuracies = {"best10": sign * best, "best10_round": best_round, "evaluated": n_evaluated}
    accuracies["last10"] = _nanmean(mean[-WINDOW:]) if len(mean) >= WINDOW else math.nan
    accuracies["final"] = mean[ends[-1]] if len(ends) else math.nan
    accuracies |= dict.fromkeys(("validated", "validated_round", "validation", "optimism"), math.nan)
    if np.isfinite(validation + mean).any():
        validation = np.where(np.isfinite(mean), validation, np.nan)
        index = score.best(validation)
        accuracies |= {"validated": mean[index], "validated_round": index + 1, "validation": validation[index]}
        _, last = best_window(-validation if score.is_error else validation)
        if math.isfinite(last):
            accuracies["optimism"] = best - sign * _nanmean(mean[int(last) - WINDOW : int(last)])
    return accuracies


def clients(run: xr.DataTree, measure: str | None = None) -> pd.DataFrame:
    """Return every client's numbers of samples, and its score (or another of :func:`measures`).

    The score is the mean over evaluated rounds of the last 10; for a run with fewer rounds, that of the last round.

    Returns
    -------
    DataFrame
        ``client``, the measure by name, ``n_train``, ``n_test``.
    """
    measure = measure or score_of(run).name
    metrics, (values, _) = _metrics(run), measured(run, measure)
    last = xr.DataArray(values[-span(len(values)) :], dims=("round", "client")).mean("round", skipna=True)
    sizes = {name: _sizes(metrics, name) for name in ("n_train", "n_test")}
    return pd.DataFrame({"client": metrics["client"].values, measure: last.values, **sizes})


def curve(run: xr.DataTree, name: str = "train_loss") -> pd.DataFrame:
    """Return the mean over clients of a metric by round, weighted by training samples (test samples for scores).

    Returns
    -------
    DataFrame
        ``round`` and the metric; rounds without a value are left out.
    """
    metrics = _metrics(run)
    weight = _sizes(metrics, "n_train" if name == "train_loss" or name.startswith("validation_") else "n_test")
    values = weighted(_values(metrics, name), weight)
    return pd.DataFrame({"round": metrics["round"].values, name: values}).dropna()


_FLAT = 1e-9


def states(run: xr.DataTree) -> pd.DataFrame:
    """Describe how stable the split of a run is, in one row per layer that was analyzed or is split at the end.

    Returns
    -------
    DataFrame
        ``layer``; ``shared``, number of its ``units`` that are shared after the last round; ``stable``, proportion of
        units that keep their state from one round to the next, mean over the last 10; ``agreement``, adjusted Rand
        index of the split half-way and the last one; ``n_factors`` in the last round, NaN without analysis; ``flat``,
        whether that round's communalities were all equal;
        ``converged``, proportion of the rounds' analyses that converged, NaN if there were none.
    """
    rows, config = [], config_of(run)
    split = run["split"].children if "split" in run.children else {}
    for layer, node in sorted(split.items(), key=lambda item: place("layers", str(item[0]), config)):
        shared = node["shared"].to_numpy()
        communality = node["communality"].to_numpy()
        is_analyzed = np.isfinite(communality).any(axis=-1)
        decided = is_analyzed.any() or ("icc" in node and np.isfinite(node["icc"].to_numpy()).any())
        if not decided and shared[-1].all() == shared[-1].any():
            continue
        rows.append(
            {
                "layer": layer,
                "shared": int(shared[-1].sum()),
                "units": shared.shape[1],
                "stable": prop_unchanged(shared[1:], shared[:-1])[-WINDOW:].mean() if len(shared) > 1 else math.nan,
                "agreement": float(adjusted_rand(shared[len(shared) // 2], shared[-1])),
                "n_factors": int(node["n_factors"].to_numpy()[-1]) if is_analyzed[-1] else math.nan,
                "flat": bool(is_analyzed[-1] and np.ptp(communality[-1][np.isfinite(communality[-1])]) < _FLAT),
                "converged": node["converged"].to_numpy()[is_analyzed].mean() if is_analyzed.any() else math.nan,
            }
        )
    names = ["layer", "shared", "units", "stable", "agreement", "n_factors", "flat", "converged"]
    return pd.DataFrame(rows, columns=names)


def unseen_clients(run: xr.DataTree) -> xr.DataArray:
    """Return the score (rule,) of unseen clients, weighted by their test samples."""
    unseen = run["unseen_clients"].to_dataset()
    return unseen[score_of(run).name].weighted(unseen["n_test"]).mean("client")


def ablated(run: xr.DataTree) -> xr.DataArray:
    """Return the score (part, draw) with a part of the split layers replaced, weighted by test samples."""
    return run["ablation"].to_dataset()[score_of(run).name].weighted(_metrics(run)["n_test"]).mean("client")


def place(name: str, value: Any, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sorting key of a setting's value: Λ by the network's layers, numbers as numbers, words after them.

    Examples
    --------
    >>> config = {"shapes": {"conv1.weight": [8, 3, 5, 5], "fc1.weight": [9, 8], "fc10.weight": [2, 9]}}
    >>> sorted(["fc10", "fc1", "conv1,fc1", "conv1"], key=lambda x: place("layers", x, config))
    ['conv1', 'conv1,fc1', 'fc1', 'fc10']
    >>> sorted(["10", "2", "1"], key=lambda x: place("layers", x, config))
    ['1', '2', '10']
    """
    if name != "layers":
        return (2, value) if isinstance(value, str) else (0,) if math.isnan(value) else (1, value)
    layers = list(dict.fromkeys(map(nets.layer_of, config.get("shapes", {}))))
    return tuple(
        (int(part), "") if part.isdigit() else (layers.index(part) if part in layers else len(layers), part)
        for part in value.split(",")
    )


def chosen(rows: pd.DataFrame, name: str, config: Mapping[str, Any]) -> Any:
    """Return the value of a setting with the best mean validation score; ties go to the first by :func:`place`.

    Raises
    ------
    ValueError
        If no run has validation data; nothing is chosen on test data.
    """
    if rows["validation"].isna().all():
        raise ValueError(
            f"{name} is chosen on validation data, but these runs have none. Run with validation_fraction > 0; test "
            "data are not used for tuning."
        )
    means = rows.groupby(name)["validation"].mean()
    best = min if "measure" in rows and is_error(str(rows["measure"].iloc[0])) else max
    return best(sorted(means.index, key=lambda value: place(name, value, config)), key=lambda value: means[value])


def weighted(values: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over clients with weights, (round, client) to (round,); ignore missing values; NaN if all are missing."""
    is_finite = np.isfinite(values)
    total = (is_finite * weight).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(is_finite, values * weight, 0).sum(axis=-1) / np.where(total > 0, total, np.nan))


def config_of(run: xr.DataTree) -> dict[str, Any]:
    """Read the settings of a run from its store; raise ValueError if it is not a run of the trainer."""
    try:
        config = json.loads(run.attrs["config"])
    except KeyError:
        config = {}
    if "algorithm" not in config or "metrics" not in run.children:
        raise ValueError(
            "must be a run that fedstat.fl.train or python -m fedstat.fl wrote, but got a tree with the groups "
            f"{list(run.children)}"
        )
    return config


def _metrics(run: xr.DataTree) -> xr.Dataset:
    metrics = run["metrics"].to_dataset() if "metrics" in run.children else xr.Dataset()
    score = metrics.get("rmse", metrics.get("accuracy", xr.DataArray()))
    if not {"round", "client"} <= set(score.dims):
        raise ValueError(
            "must be a run that fedstat.fl.train or python -m fedstat.fl wrote, with metrics/accuracy or metrics/rmse "
            f"(round, client), but got a tree with the groups {list(run.children)} and the metrics "
            f"{list(metrics.data_vars)}"
        )
    return metrics


def _values(metrics: xr.Dataset, name: str) -> NDArray[np.float64]:
    if name not in metrics:
        return np.full((metrics.sizes["round"], metrics.sizes["client"]), np.nan)
    return metrics[name].transpose("round", "client").to_numpy().astype(np.float64)


def _sizes(metrics: xr.Dataset, name: str) -> NDArray[np.float64]:
    """Return each client's number of samples; 1 if the run does not store it."""
    return metrics[name].to_numpy().astype(np.float64) if name in metrics else np.ones(metrics.sizes["client"])


def _total(metrics: xr.Dataset, name: str) -> float:
    return float(metrics[name].sum()) if name in metrics else math.nan


def _nanmean(x: NDArray[np.float64]) -> float:
    return float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else math.nan


def _setting(config: dict[str, Any], name: str) -> Any:
    """Return a setting of the method, from either place of a run's settings."""
    value = config.get(name)
    return config.get("algorithm_settings", {}).get(name) if value is None else value


def _layers(config: dict[str, Any]) -> str:
    layers = _setting(config, "layers") or []
    return layers if isinstance(layers, str) else ",".join(map(str, layers))


def _number(value: Any) -> float | str:
    """Convert a number that may be stored as text ("0.5", "inf"); return other text unchanged."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return str(value)
