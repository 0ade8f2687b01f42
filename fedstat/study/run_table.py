"""Table of runs: the row of each run, the rules that choose its rounds, and curves and clients of single runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat.fl import nets
from fedstat.fl.losses import Score
from fedstat.stats.split import adjusted_rand, prop_unchanged
from fedstat.study.run_metrics import (
    is_error,
    is_of_numbers,
    measured,
    measures,
    metrics_of,
    score_of,
    sizes_of,
    values_of,
    weighted,
)

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


def further(run: xr.DataTree) -> pd.DataFrame:
    """Return means of the run's metrics over clients, weighted as :func:`~fedstat.study.run_metrics.measures` says.

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
        One of :func:`~fedstat.study.run_metrics.measures`, by default the run's score.

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
    config, metrics, score = config_of(run), metrics_of(run), score_of(run)
    measure = measure or score.name
    test, weight = measured(run, measure)
    over_clients = clients(run, measure)[measure].dropna()
    before = weighted(values_of(metrics, f"{score.name}_before"), weight)
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
    validation = weighted(values_of(metrics, f"validation_{score.name}"), sizes_of(metrics, size))
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
    """Return every client's numbers of samples, and its score or another of its measures.

    The score is the mean over evaluated rounds of the last 10; for a run with fewer rounds, that of the last round.

    Returns
    -------
    DataFrame
        ``client``, the measure by name, ``n_train``, ``n_test``.
    """
    measure = measure or score_of(run).name
    metrics, (values, _) = metrics_of(run), measured(run, measure)
    last = xr.DataArray(values[-span(len(values)) :], dims=("round", "client")).mean("round", skipna=True)
    sizes = {name: sizes_of(metrics, name) for name in ("n_train", "n_test")}
    return pd.DataFrame({"client": metrics["client"].values, measure: last.values, **sizes})


def curve(run: xr.DataTree, name: str = "train_loss") -> pd.DataFrame:
    """Return the mean over clients of a metric by round, weighted by training samples (test samples for scores).

    Returns
    -------
    DataFrame
        ``round`` and the metric; rounds without a value are left out.
    """
    metrics = metrics_of(run)
    weight = sizes_of(metrics, "n_train" if name == "train_loss" or name.startswith("validation_") else "n_test")
    values = weighted(values_of(metrics, name), weight)
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
    return run["ablation"].to_dataset()[score_of(run).name].weighted(metrics_of(run)["n_test"]).mean("client")


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
