"""Comparison of methods and runs within seeds: means, differences with intervals, and the verb ``compare_runs``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedstat import store
from fedstat._utils import check, guard
from fedstat._utils.lazy import pd, xr
from fedstat.labelled import compare
from fedstat.results import ComparisonResult
from fedstat.results.base import Caution, aligned, caution_of_few, wrapped
from fedstat.results.origin import recorded
from fedstat.results.ranks import difference
from fedstat.results.tables import NONE, count, megabytes, number, plus_minus
from fedstat.study import outcomes, selection
from fedstat.study.collect import OF_METHOD, Grid, ordered, origin
from fedstat.study.run_metrics import is_error, measured, reason_undefined, title_of
from fedstat.study.run_table import choose, config_of, row, short_runs, words


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


@dataclass(frozen=True, eq=False, repr=False)
class RunsResult(ComparisonResult):
    """Runs compared within seeds, as :func:`fedstat.study.compare_runs` returns it.

    ``table`` and the other fields of :class:`fedstat.results.ComparisonResult` are over all scenarios: differences
    are means over scenarios within each seed, and ``n`` is the number of seeds that all scenarios have.

    Attributes
    ----------
    accuracy : str
        What is compared, in words.
    scenarios : mapping from str to ComparisonResult
        The comparison in each scenario, within seeds.
    costs : DataFrame
        One row per scenario and method, means over seeds: ``scenario``, ``method``, ``n`` (seeds); ``q10``, accuracy
        that a tenth of the clients stay below (error that a tenth exceed); ``bytes_up``, ``bytes_down``, sums over all
        rounds and clients;
        ``seconds``, median time of a round.
    measure : str
        Name of the measure that is compared; other measures replace accuracy in this description.
    missing : tuple of str
        Runs that are not compared, with the reason: failed, diverged or unfinished.
    selected : tuple of str
        Sentences on tuned folders: the selected settings, and the number of candidates that are left out.
    left_out : tuple of str
        Sentences on other runs of tuned folders that are left out, or missing.
    """

    accuracy: str
    scenarios: Mapping[str, ComparisonResult]
    costs: pd.DataFrame
    measure: str = "accuracy"
    missing: tuple[str, ...] = ()
    selected: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        side = "exceed" if is_error(self.measure) else "stay below"
        head = (
            f"{self._title}, {self.accuracy}: mean ± standard error over seeds;",
            f"difference from {self.reference} within seeds [{100 * self.level:g} %, rows of a block together];",
            f"{self._worst}: {self._noun} that a tenth of the clients {side};",
            "sent: up and down, in all rounds",
            *self.selected,
        )
        parts = ["\n".join(map(wrapped, head)), *(self._block(name) for name in self.scenarios)]
        if len(self.scenarios) > 1 and self.table["difference"].notna().any():
            rows = [
                {
                    "": x["method"],
                    "difference": _difference(x, self.reference, self._digits),
                    "seeds": str(x["n"] or ""),
                }
                for x in map(self._divided, self.table.to_dict("records"))
            ]
            parts.append(f"all scenarios (means within each seed)\n{aligned(pd.DataFrame(rows))}")
        cautions = "\n".join(wrapped(str(caution)) for caution in self.cautions())
        return "\n\n".join(filter(None, [*parts, cautions]))

    @property
    def _title(self) -> str:
        title = title_of(self.measure)
        return title[0].upper() + title[1:] + self._divisor + " (smaller is better)" * is_error(self.measure)

    @property
    def _noun(self) -> str:
        return {"accuracy": "accuracy", "rmse": "RMSE"}.get(self.measure, "value")

    @property
    def _worst(self) -> str:
        return "10 % above" if is_error(self.measure) else "10 % below"

    @property
    def _column(self) -> str:
        if self.measure.partition("_")[0] in ("accuracy", "class"):
            return "accuracy"
        return title_of(self.measure).removeprefix("test ") + self._divisor

    def cautions(self) -> list[Caution]:
        """Return cautions on runs that are missing, on few seeds, and on runs of tuned folders that are left out."""
        cautions = [Caution("Missing runs", caution_of_missing(self.missing), severe=True)] if self.missing else []
        seeds = [int(comparison.table["n_values"].max()) for comparison in self.scenarios.values()]
        text = "differences between methods of one seed have no interval, and may be chance"
        few = [Caution("One seed", text)] if max(seeds) == 1 else caution_of_few(min(seeds), "seed")
        return [*cautions, *few, *(Caution("Left out", sentence) for sentence in self.left_out)]

    def _caption(self) -> list[str]:
        seeds = sorted({int(n) for comparison in self.scenarios.values() for n in comparison.table["n_values"]})
        n_seeds = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))
        return [
            f"{self._title}, {self.accuracy}: mean ± standard error over seeds (n = {n_seeds})",
            f"Difference from {self.reference} within seeds, [{self._ci}] simultaneous over methods",
        ]

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        blocks = [self._rows(name, digits) for name in self.scenarios]
        if len(blocks) > 1:
            for name, block in zip(self.scenarios, blocks, strict=True):
                block.insert(0, "scenario", name)
        return pd.concat(blocks, ignore_index=True).fillna(NONE).rename(columns={"": "method"})

    def _block(self, scenario: str) -> str:
        """Return the print of one scenario."""
        seeds = dict.fromkeys(self.scenarios[scenario].table["n_values"])
        head = "\nmethods lack seeds: each difference is over the seeds of both"
        head = head if len(seeds) > 1 else f" ({count(next(iter(seeds)), 'seed')})"
        return f"{scenario}{head}\n{aligned(self._rows(scenario))}"

    @property
    def _largest(self) -> float:
        """Largest mean of an error, which has units; 1 for other measures."""
        means = [float(np.nanmax(comparison.table["mean"].abs())) for comparison in self.scenarios.values()]
        return max(means) or 1.0 if is_error(self.measure) else 1.0

    @property
    def _power(self) -> int:
        """Power of ten by which the print divides errors: 0 for errors of ordinary size, else a multiple of 3."""
        return 0 if 0.01 <= self._largest < 10_000 else 3 * int(np.floor(np.log10(self._largest) / 3))

    @property
    def _divisor(self) -> str:
        return f" / 1e{self._power}" if self._power else ""

    @property
    def _digits(self) -> int:
        """Decimals of the print: four; of errors, such that the largest has four digits."""
        return int(4 if not is_error(self.measure) else 3 - np.floor(np.log10(self._largest)) + self._power)

    def _rows(self, scenario: str, digits: int | None = None) -> pd.DataFrame:
        """Return accuracies, differences and costs in one scenario, and numbers of seeds if they differ."""
        costs: dict[Any, Any] = self.costs[self.costs["scenario"] == scenario].set_index("method").to_dict("index")
        table, digits = self.scenarios[scenario].table, self._digits if digits is None else digits
        has_seeds, most = table["n_values"].nunique() > 1, table["n_values"].max()
        rows = [
            {
                "": x["method"],
                self._column: plus_minus(x["mean"], x["std_error_mean"], digits),
                "difference": _difference(x, self.reference, digits),
                self._worst: number(costs[x["method"]]["q10"] / 10.0**self._power, digits),
                "sent": megabytes(costs[x["method"]]["bytes_up"] + costs[x["method"]]["bytes_down"]),
                "s/round": number(costs[x["method"]]["seconds"], 3),
            }
            | ({"seeds": f"{x['n_values']} of {most}"} if has_seeds else {})
            for x in map(self._divided, table.to_dict("records"))
        ]
        return pd.DataFrame(rows)

    def _divided(self, row: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a row of a table with the values that have units divided by the power of ten of the print."""
        names = ("mean", "std_error_mean", "difference", "sim_conf_low", "sim_conf_high")
        return {**row, **{name: row[name] / 10.0**self._power for name in names if name in row}}

    def summary(self) -> str:
        """Return the comparison, notes on skipped runs, and the origin of the numbers."""
        notes = [wrapped(f"  {note}") for note in self.notes]
        return "\n".join([repr(self), "", *notes])


def caution_of_missing(missing: Sequence[str]) -> str:
    """Name runs that are not compared, at most five.

    Examples
    --------
    >>> caution_of_missing(["a, fedavg, seed 0: diverged"])
    '1 run is not compared: a, fedavg, seed 0: diverged'
    """
    named = "; ".join(missing[:_MOST_NAMED])
    more = f"; and {len(missing) - _MOST_NAMED} more, listed in .missing" if len(missing) > _MOST_NAMED else ""
    return f"{count(len(missing), 'run')} {'is' if len(missing) == 1 else 'are'} not compared: {named}{more}"


_MOST_NAMED = 5


def _difference(row: Mapping[Any, Any], reference: str, digits: int) -> str:
    return "reference" if row["method"] == reference else difference(row, digits=digits)


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
    finished, missing, accepted = _read(runs, measure, tuned)
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
    notes += [*_undefined(finished, measure), *accepted]
    table_fields = {field.name: getattr(over, field.name) for field in fields(over)}
    return RunsResult(
        **table_fields | {"notes": (*notes, *origin(Grid(table, configs=configs)))},
        accuracy=words(rule, table) or rule,
        scenarios=by_scenario,
        costs=_costs(table),
        measure=measure,
        missing=tuple(missing),
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
    """Read finished runs; return also texts that name missing runs, and notes on accepted ones; extend ``tuned``."""
    labelled = isinstance(runs, Mapping) and not isinstance(runs, xr.DataTree)
    groups: Iterable[tuple[Any, Any]] = runs.items() if labelled else [(None, runs)]  # type: ignore[union-attr]
    finished, missing, accepted = [], [], []
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
            if is_path and (changed := outcomes.accepted_changes(Path(source))):
                accepted.append(f"{where} was made with another version of {', '.join(changed)}, and accepted as it is")
            try:
                with store.reading(where):
                    numbers, config = row(run, measure), config_of(run)
                    undefined = 0 if measure is None else _count_undefined(run, measure)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            finished.append(_Run(None if label is None else str(label), where, numbers, config, undefined))
    if not finished:
        raise ValueError(f"there is no finished run{f': {caution_of_missing(missing)}' if missing else ''}")
    return finished, missing, accepted


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
