"""Comparison of methods and runs within seeds: means, differences with intervals, and the verb ``compare_runs``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedstat import store
from fedstat._utils import check, guard
from fedstat._utils.lazy import pd, xr
from fedstat.labelled import compare
from fedstat.results import ComparisonResult
from fedstat.results.origin import recorded
from fedstat.results.tables import count
from fedstat.study import outcomes, selection
from fedstat.study.collect import OF_METHOD, Grid, ordered, origin
from fedstat.study.run_metrics import measured, reason_undefined, title_of
from fedstat.study.run_table import choose, config_of, row, short_runs, words
from fedstat.study.runs_result import RunsResult, caution_of_missing


def against_zero(data: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """Test the mean of each name's values, over scenarios within seeds, against 0; adjust over all names.

    Parameters
    ----------
    data : DataFrame
        Differences within seeds: ``scenario``, ``seed``, and columns of their names and values.
    name, value : str
        Those columns.

    Returns
    -------
    DataFrame
        One row per name: the name, ``n``, ``difference`` and the rest of :func:`fedstat.compare`.
    """
    zero = data[["scenario", "seed"]].drop_duplicates()
    zero[name], zero[value] = "zero", 0.0
    table = compare(
        pd.concat([zero, data]), reference="zero", value=value, method=name, block=["scenario", "seed"], sample="seed"
    ).table.iloc[1:]
    return table.drop(columns=["mean", "std_error_mean", "n_values"]).rename(columns={"method": name})


def against(rows: pd.DataFrame, value: str, reference: str, *, level: float = 0.95) -> ComparisonResult:
    """Compare methods within seeds of one scenario; without the reference, return means alone."""
    if reference in set(rows["method"]):
        return compare(rows, reference=reference, value=value, level=level)
    alone = compare(rows, reference=str(rows["method"].iloc[0]), value=value, level=level)
    table = alone.table[["method", "n_values", "mean", "std_error_mean"]].reindex(columns=alone.table.columns)
    notes = (f"{reference} was not run, so nothing is compared with it",)
    return replace(alone, table=table.assign(n=0, n_pairs=0), reference=reference, notes=notes)


OF_TRAINING = (
    "net", "width", "norm", "net_options", "rounds", "participation", "sampling", "local_epochs", "batch_size",
    "optimizer", *OF_METHOD, "optimizer_state", "precision",
)  # fmt: skip
"""Settings besides a method's own by which its runs on the same data are told apart."""

_OF_METHOD_ALONE = ("algorithm", "algorithm_settings", "algorithm_file", "net_file", "data_digest")

COSTS = ("q10", "bytes_up", "bytes_down", "seconds")
"""Columns of :func:`fedstat.study.run_table.row` that stand beside the accuracy, means over seeds."""

Runs: TypeAlias = "str | Path | xr.DataTree | Iterable[str | Path | xr.DataTree]"


@check.named_options()
@recorded
def compare_runs(
    runs: Runs | Mapping[str, Runs],
    *,
    reference: str | None = None,
    rule: str | None = None,
    measure: str | None = None,
    level: float = 0.95,
) -> RunsResult:
    """Compare runs within seeds: scores, their differences from a reference, the worst-off clients, and costs.

    Parameters
    ----------
    runs : path, DataTree, a sequence of these, or a mapping from label to any of these
        A folder of runs, such as a grid's (of a tuned one, its final runs alone); stores; or results of
        :func:`fedstat.fl.train`. Without labels a run has that of its method, with the settings in which runs of the
        method on the same data differ: "fedprox, mu=0.1".
    reference : str, optional
        Label that the others are compared with; by default "fedavg" if it is there, else the first.
    rule : {"last10", "final", "best10", "validated"}, optional
        Rounds whose score is compared, see :data:`fedstat.study.run_table.RULES`. By default last10, which chooses
        nothing; final if a run has fewer than ten rounds.
    measure : str, optional
        Metric that all runs measured (:data:`fedstat.fl.metrics.METRICS`, ``ERRORS``): "balanced_accuracy", "macro_f1",
        "auc", "class_accuracy_3" for the accuracy on class 3; "mae", "r2". By default "accuracy", or "rmse" of
        real-valued targets.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    RunsResult
        Accuracies are means over clients, weighted by their test samples (of the class, if the measure is of one).
        Means leave out clients for which the measure is undefined; ``notes`` say how many. Intervals and p-values of
        differences are those of :func:`fedstat.compare`. Failed, diverged and unfinished runs of a grid are left out,
        and named in ``missing``. Of a folder with final runs of tuning (:mod:`fedstat.study.selection`), candidates are
        left out; ``selected`` has the selected settings.

    Raises
    ------
    FileNotFoundError
        If there is no run.
    ValueError
        If none is finished, two have the same label, scenario and seed, or runs of one scenario and seed have different
        data; if the reference is not among the labels; if a run lacks the measure, or it is undefined for all clients.

    Examples
    --------
    >>> import fedstat
    >>> from fedstat.fl import algorithms, nets
    >>> data = fedstat.sim.generate(clients=6, d=8, m=10, n_train=20, n_test=10)
    >>> how = {"rounds": 3, "lr": 0.5, "batch_size": 10}
    >>> methods = [algorithms.fedprox(mu=0.1), algorithms.fedprox(mu=1.0)]
    >>> seeds = range(3)
    >>> runs = [fedstat.fl.train(data, nets.mlp([8, 10, 1]), m, seed=s, **how) for m in methods for s in seeds]
    >>> compare_runs(runs).table[["method", "n"]].to_dict("list")
    {'method': ['fedprox, mu=0.1', 'fedprox, mu=1.0'], 'n': [0, 3]}
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    tuned: list[selection.Final] = []
    finished, missing, outdated = _read(runs, measure, tuned)
    _require_same_data(finished)
    names = _label_runs(finished)
    if not isinstance(runs, Mapping) or isinstance(runs, xr.DataTree):
        names = _sort_labels(finished, names)
    labels = list(dict.fromkeys(names.values()))
    if reference is None:
        reference = "fedavg" if "fedavg" in labels else labels[0]
    check.choice("reference", reference, labels)
    table = pd.DataFrame([run.row | {"method": names[i]} for i, run in enumerate(finished)])
    measure = _common_measure(table)
    table = table.iloc[sorted(range(len(table)), key=lambda i: (labels.index(names[i]), finished[i].seed))]
    _require_distinct(table)
    rule = choose(table, rule or ("final" if short_runs(table) else "last10"))
    by_scenario = {
        str(scenario): against(rows, rule, reference, level=level)
        for scenario, rows in table.groupby("scenario", sort=False)
    }
    if len(by_scenario) == 1:
        over = next(iter(by_scenario.values()))
    else:
        within, sample = ["scenario", "seed"], "seed"
        over = compare(table, reference=reference, value=rule, block=within, sample=sample, level=level)
    configs = {name: next(run.config for run in finished if run.scenario == name) for name in by_scenario}
    notes = [f"{name}: {note}" for name, comparison in by_scenario.items() for note in comparison.notes]
    notes += _undefined(finished, measure)
    table_fields = {field.name: getattr(over, field.name) for field in fields(over)}
    return RunsResult(
        **table_fields | {"notes": (*notes, *origin(Grid(table, configs=configs)))},
        accuracy=words(rule, table) or rule,
        scenarios=by_scenario,
        costs=_costs(table),
        measure=measure,
        missing=tuple(missing),
        outdated=tuple(outdated),
        selected=tuple(sentence for folder in tuned for sentence in folder.words()),
        left_out=tuple(sentence for folder in tuned for sentence in folder.warnings()),
    )


def _common_measure(table: pd.DataFrame) -> str:
    """Return the measure of all runs; raise ValueError if some have classes and others real-valued targets."""
    if table["measure"].nunique() > 1:
        kinds = "; ".join(
            f"{title_of(str(name))}: {', '.join(map(str, dict.fromkeys(rows['scenario'])))}"
            for name, rows in table.groupby("measure", sort=False)
        )
        raise ValueError(
            f"runs must have one score, but classes and real-valued targets differ ({kinds}). Compare them apart."
        )
    return str(table["measure"].iloc[0])


def _undefined(runs: list[_Run], measure: str) -> list[str]:
    """Return a note on clients without a value of the measure, for each scenario that has them."""
    notes = []
    for scenario in dict.fromkeys(run.scenario for run in runs):
        numbers = [run.undefined for run in runs if run.scenario == scenario]
        if most := max(numbers):
            least = "" if min(numbers) == most else f"{min(numbers)} to "
            notes.append(
                f"{scenario}: {title_of(measure)} is undefined for {least}{count(most, 'client')} of a run, because "
                f"test samples {reason_undefined(measure)}; means are over the other clients"
            )
    return notes


class _Run(NamedTuple):
    """Finished run: the user's label, its place, its row and its settings."""

    label: str | None
    where: str
    row: dict[str, Any]
    config: dict[str, Any]
    undefined: int
    """Clients without a value of the measure."""

    @property
    def scenario(self) -> str:
        return str(self.row["scenario"])

    @property
    def seed(self) -> int:
        return int(self.row["seed"])


def _read(
    runs: Runs | Mapping[str, Runs], measure: str | None, tuned: list[selection.Final]
) -> tuple[list[_Run], list[str], list[str]]:
    """Read finished runs; return also texts on missing and on outdated runs; extend ``tuned``."""
    labelled = isinstance(runs, Mapping) and not isinstance(runs, xr.DataTree)
    groups: Iterable[tuple[Any, Any]] = runs.items() if labelled else [(None, runs)]  # type: ignore[union-attr]
    finished, missing, outdated = [], [], []
    for label, group in groups:
        for number_, source in enumerate(_iterate_runs(group, tuned), 1):
            is_path = isinstance(source, str | Path)
            where = str(source) if is_path else f"run {number_}{f' of {label!r}' if label else ''}"
            if is_path and (reason := outcomes.missing(Path(source))):
                missing.append(reason)
                continue
            run = source if isinstance(source, xr.DataTree) else store.open_run(source)
            if "config" in run.attrs and "ended" not in run.attrs:
                missing.append(f"{where}: unfinished")
                continue
            if is_path and (changed := outcomes.changed_files(run.attrs)):
                outdated.append(f"{outcomes.name_of_store(Path(source))} ({', '.join(changed)})")
            try:
                with store.reading(where):
                    numbers, config = row(run, measure), config_of(run)
                    undefined = 0 if measure is None else _count_undefined(run, measure)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            finished.append(_Run(None if label is None else str(label), where, numbers, config, undefined))
    if not finished:
        raise ValueError(f"there is no finished run{f': {caution_of_missing(missing)}' if missing else ''}")
    return finished, missing, outdated


def _count_undefined(run: xr.DataTree, measure: str) -> int:
    """Return the number of clients without a value of a measure; raise ValueError if no client has a value."""
    values, _ = measured(run, measure)
    is_undefined = np.asarray(np.isnan(values).all(axis=0))
    if is_undefined.all():
        raise ValueError(
            f"{measure} is undefined for all {count(len(is_undefined), 'client')}, because test samples "
            f"{reason_undefined(measure)}. Compare another measure, or give clients other test samples."
        )
    return int(is_undefined.sum())


def _iterate_runs(group: Any, tuned: list[selection.Final]) -> Iterator[str | Path | xr.DataTree]:
    """Yield runs one by one; runs in a folder are sorted by name. Append tuned folders to ``tuned``."""
    if isinstance(group, xr.DataTree):
        yield group
    elif isinstance(group, str | Path):
        if guard.status(Path(group) / "zarr.json") or not guard.status(group):
            yield group
        else:
            folder = selection.final_runs(group)
            tuned += [folder] if folder.selected else []
            yield from folder.paths
    elif isinstance(group, Iterable) and not isinstance(group, Mapping | xr.Dataset):
        for member in group:
            yield from _iterate_runs(member, tuned)
    else:
        raise ValueError(f"runs must be paths or what fedstat.fl.train returned, but got {type(group).__name__}")


def _require_same_data(runs: list[_Run]) -> None:
    """Raise ValueError, with the differing settings, if runs of one scenario and seed have different samples."""
    first: dict[tuple[str, int], _Run] = {}
    for run in runs:
        other = first.setdefault((run.scenario, run.seed), run)
        if run.config.get("data_digest") != other.config.get("data_digest"):
            noted = {**other.config, **run.config}
            of_data = [k for k in noted if k not in (*_OF_METHOD_ALONE, *OF_TRAINING)]
            differ = [k for k in of_data if run.config.get(k) != other.config.get(k)]
            raise ValueError(
                f"{other.where} and {run.where} have the seed {run.seed} but other samples (they differ in "
                f"{', '.join(differ) or 'no setting that is noted'}), so that differences within seeds would not be "
                "those of the methods. Compare runs of the same data, or give each data set another scenario."
            )


def _label_runs(runs: list[_Run]) -> dict[int, str]:
    """Label every run by the user's label, or its method and the settings that differ between runs on equal data."""
    alone = [run for run in runs if run.label is None]
    methods = {str(run.row["method"]) for run in runs}
    differ = {method: _find_differing([run for run in alone if run.row["method"] == method]) for method in methods}
    names = {}
    for i, run in enumerate(runs):
        settings, method = _settings(run), str(run.row["method"])
        more = [f"{name}={_shown(settings[name])}" for name in differ[method] if settings.get(name) is not None]
        names[i] = run.label or ", ".join([method, *more])
    return names


def _find_differing(runs: list[_Run]) -> list[str]:
    """Return settings of a method that have several values in one scenario."""
    values_by_name: dict[tuple[str, str], set[str]] = {}
    names = list(dict.fromkeys(name for run in runs for name in _settings(run)))
    for run in runs:
        for name in names:
            values_by_name.setdefault((run.scenario, name), set()).add(json.dumps(_settings(run).get(name)))
    return [n for n in names if any(len(values) > 1 for (_, name), values in values_by_name.items() if name == n)]


def _settings(run: _Run) -> dict[str, Any]:
    """Return the settings of the method and of its training."""
    file = run.config.get("net_file")  # two files may have one name
    digest = {"net_file": str(file.get("sha256"))[:8]} if isinstance(file, dict) else {}
    training = {name: run.config[name] for name in OF_TRAINING if name in run.config}
    return dict(run.config.get("algorithm_settings", {})) | training | digest


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _sort_labels(runs: list[_Run], names: dict[int, str]) -> dict[int, str]:
    """Sort labels as in tables: by method, then by the values of its settings."""
    methods = ordered(run.row["method"] for run in runs)

    def key(i: int) -> tuple[Any, ...]:
        settings = _settings(runs[i])
        values = (settings.get(n) for part in names[i].split(", ")[1:] if (n := part.partition("=")[0]) in settings)
        return methods.index(runs[i].row["method"]), [
            (0, v, "") if isinstance(v, int | float) else (1, 0.0, str(v)) for v in values
        ]

    return {i: names[i] for i in sorted(names, key=key)}


def _require_distinct(table: pd.DataFrame) -> None:
    twice = table[table.duplicated(["scenario", "method", "seed"])]
    if len(twice):
        run = twice.iloc[0]
        raise ValueError(
            f"there are several runs of {run['method']}, {run['scenario']}, seed {run['seed']}, whose settings do not "
            "tell them apart. Give them labels: compare_runs({label: run, ...})"
        )


def _costs(table: pd.DataFrame) -> pd.DataFrame:
    by = table.groupby(["scenario", "method"], sort=False)
    costs = by[list(COSTS)].mean()
    costs.insert(0, "n", by.size())
    return costs.reset_index()
