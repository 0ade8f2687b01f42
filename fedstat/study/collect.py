"""Table of the stored runs of a study, with names, order and origin for printing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.fl import algorithms, custom
from fedstat.fl.algorithm import About
from fedstat.store import DamageError, open_run, reading, require_sound
from fedstat.study import outcomes, run_table
from fedstat.study.run_settings import OF_AGGREGATOR


def origin(grid: Grid) -> list[str]:
    """Return notes for a table or caption: scale, seeds, commits, and missing runs."""
    notes = []
    for scenario in scenarios(grid):
        seeds = sorted(grid.table.loc[grid.table["scenario"] == scenario, "seed"].unique().tolist())
        notes.append(f"{scenario}: {scale(_summarize_config(grid, scenario))}; {list_seeds(seeds)}")
    # A run continued by another version of the code names both.
    runs = grid.table.assign(**{name: grid.table[name].str.split(", ") for name in ("code", "revision")})
    runs = runs.explode("code")
    of_package = runs.assign(code=runs["code"].str.partition("+")[0]).groupby("scenario")["code"].nunique()
    of_method = runs.groupby(["scenario", "method"])["code"].nunique().groupby("scenario").max()  # includes user code
    versions = of_package.where(of_package >= of_method, of_method)
    if (versions > 1).any():
        mixed = "; ".join(f"{scenario} by {n}" for scenario, n in versions[versions > 1].items())
        notes.append(f"runs of one setting were made by several versions of the code: {mixed}")
    if short := run_table.short_runs(grid.table):
        notes.append(
            f"fewer than {run_table.WINDOW} rounds, so that averages over the last {run_table.WINDOW} rounds are "
            f"values of the last round, and best10, last10 and optimism are missing: {short}"
        )
    commits = sorted({r for names in runs["revision"] for r in names if r})
    notes.append(
        f"commit {', '.join(commits)}" if commits else f"code with digest {', '.join(sorted({*runs['code']}))}"
    )
    if grid.unfinished:
        reasons = [outcomes.missing(Path(path)) or f"{Path(path).name}: unfinished" for path in grid.unfinished]
        notes.append(f"excluded runs: {'; '.join(reasons)}")
    return notes


def caption(grid: Grid, width: int = 150) -> list[str]:
    """Return the lines of :func:`origin` for a figure; scenarios of equal scale have one line."""
    names: dict[str, list[str]] = {}
    for scenario in scenarios(grid):
        seeds = sorted(grid.table.loc[grid.table["scenario"] == scenario, "seed"].unique().tolist())
        size = scale({k: v for k, v in _summarize_config(grid, scenario).items() if k != "partition"})
        names.setdefault(f"{size}; {list_seeds(seeds)}", []).append(scenario)
    lines = [f"{' | '.join(group)}: {size}" for size, group in names.items()]
    return [part for line in (*lines, *origin(grid)[len(scenarios(grid)) :]) for part in textwrap.wrap(line, width)]


def list_seeds(seeds: Sequence[object]) -> str:
    """List seeds.

    Examples
    --------
    >>> list_seeds([0]), list_seeds([0, 1])
    ('seed 0', 'seeds 0, 1')
    """
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _summarize_config(grid: Grid, scenario: str) -> dict[str, Any]:
    """Return the settings of a scenario, with the most frequent learning rate and the exceptions in brackets."""
    if "lr" not in grid.table:
        return dict(grid.configs[scenario])
    rates = grid.table[grid.table["scenario"] == scenario].groupby("lr")["method"].unique()
    config = {name: value for name, value in grid.configs[scenario].items() if name != "lr"}
    if rates.empty:
        return config
    first, *rare = sorted(rates.index, key=lambda lr: -len(rates[lr]))
    exceptions = "; ".join(f"{', '.join(map(title_of, ordered(rates[lr])))}: {lr:g}" for lr in rare)
    return config | {"lr": f"{first:g} ({exceptions})" if exceptions else f"{first:g}"}


def scale(config: Mapping[str, Any]) -> str:
    """Describe the size of a run in one line.

    Examples
    --------
    >>> scale({"clients": 20, "net": "lenet", "width": 0.5, "rounds": 30, "evaluate_every": 5, "local_epochs": 1})
    '20 clients, net lenet × 0.5, 30 rounds, evaluated every 5, local epochs 1'
    """
    width = f" × {config['width']:g}" if config.get("width") not in (None, 1) else ""
    norm = f" with {config['norm']} norm" if config.get("norm") else ""
    every = f", evaluated every {config['evaluate_every']}" if config.get("evaluate_every", 1) > 1 else ""
    parts = {
        "partition": "{}", "class_labels": "labels {}", "clients": "{} clients",
        "max_samples": "at most {} samples each", "net": "net {}" + width + norm,
        "rounds": "{} rounds" + every, "participation": "participation {}", "sampling": "sampling {}",
        "local_epochs": "local epochs {}", "batch_size": "batch {}", "optimizer": "{}", "lr": "lr {}",
    }  # fmt: skip
    return ", ".join(form.format(config[key]) for key, form in parts.items() if config.get(key) is not None)


METHODS = {name: algorithms.about(name).title for name in algorithms.ALGORITHMS}
"""Titles of the methods in tables and figures, in order."""

SETTINGS = {"layers": "Λ", "kappa": "κ", "tau": "τ", "estimator": "estimator"}
"""Symbols in tables of the settings of methods that split layers, in order."""


def ordered(names: Iterable[str]) -> list[str]:
    """Sort methods in the order of ``METHODS``; a modified method follows its base, unknown methods come last.

    Examples
    --------
    >>> ordered(["mine", "fedper", "fedavg-personal-head", "fedavg"])
    ['fedavg', 'fedavg-personal-head', 'fedper', 'mine']
    """
    order = list(METHODS)

    def position(name: str) -> tuple[int, str]:
        base = name if name in order else max((m for m in order if name.startswith(m)), key=len, default="")
        return order.index(base) if base else len(order), name

    return sorted(dict.fromkeys(names), key=position)


def title_of(method: str) -> str:
    """Return the title of a method or of a variant.

    Examples
    --------
    >>> title_of("fedavg-personal-head"), title_of("fedprox, mu=0.1"), title_of("mine")
    ('FedAvg, personal head', 'FedProx, mu=0.1', 'mine')
    """
    name, _, variant = method.partition(", ")
    return about(name).title + (f", {variant}" if variant else "")


def in_order(grid: Grid) -> pd.DataFrame:
    """Sort the runs of a grid by scenario, method, ``SETTINGS`` and seed, as in tables."""
    methods = ordered(grid.table["method"])

    def key(run: Mapping[Any, Any]) -> tuple[Any, ...]:
        config = grid.configs.get(run["scenario"], {})
        settings = [run_table.place(name, run[name], config) for name in SETTINGS]
        return run["scenario"], methods.index(run["method"]), *settings, run["seed"]

    keys = [key(run) for run in grid.table.to_dict("records")]
    return grid.table.iloc[sorted(range(len(keys)), key=keys.__getitem__)]


def varying(table: pd.DataFrame) -> list[str]:
    """Return the names in ``SETTINGS`` that have several values for one method and scenario."""
    varies = table.groupby(["scenario", "method"])[list(SETTINGS)].nunique(dropna=False).max() > 1
    return [name for name in SETTINGS if varies[name]]


def design(run: Mapping[Any, Any], names: Iterable[str]) -> str:
    """Return the title of the method of a run, with its values of the named settings.

    Examples
    --------
    >>> run = {"method": "random", "layers": "fc1", "kappa": float("nan"), "tau": 0.5}
    >>> design(run, ["layers", "kappa", "tau"])
    'random split, Λ = fc1, τ = 0.5'
    """
    values = {SETTINGS[name]: setting(run[name]) for name in names}
    return ", ".join([about(run["method"]).title, *(f"{k} = {v}" for k, v in values.items() if v != "–")])


def about(method: str) -> About:
    """Return the description of a method; one that is unknown, or a user's file, which is not run, has its name only.

    Examples
    --------
    >>> about("fedper+").title, about("mine").title
    ('FedPer+', 'mine')
    """
    if custom.is_in_file(method):  # a stored run names it, and reading must execute nothing
        return About(custom.short(method))
    try:
        return algorithms.about(method)
    except ValueError:
        return About(method)


def setting(value: Any) -> str:
    """Format a value of ``SETTINGS``; a dash if the method lacks the setting or has its default."""
    return "–" if value == "" or pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


SCALE = (
    "data", "partition", "clients", "max_samples", "min_samples", "test_fraction", "validation_fraction",
    "unseen_fraction", "net", "net_file", "width", "norm", "net_options", "rounds", "participation", "local_epochs",
    "batch_size", "optimizer", "evaluate_every", "precision", "stratify", "class_labels", "domains", "sampling",
)  # fmt: skip
"""Settings that must be equal for all runs of a scenario."""

OF_METHOD = ("lr", "server_lr", *OF_AGGREGATOR)
"""Settings that must be equal for all runs of a method and scenario; methods may be tuned separately."""


class Grid(NamedTuple):
    """Runs of a study, in a table.

    Attributes
    ----------
    table : DataFrame
        One row of :func:`fedstat.study.run_table.row` per finished run, and ``path``, the path of its store.
    unfinished : tuple of str
        Paths of unfinished and failed runs, which are not in the table; failed runs may have no store.
    configs : mapping from scenario to dict
        Settings of the first run of each scenario; settings in ``SCALE`` are equal for all runs of the scenario.
    """

    table: pd.DataFrame
    unfinished: tuple[str, ...] = ()
    configs: Mapping[str, dict[str, Any]] = {}


def collect(runs: str | Path | Iterable[str | Path], *, differ: Iterable[str] = ()) -> Grid:
    """Read stored runs into a table.

    Parameters
    ----------
    runs : path or sequence of paths
        A folder of stores (``*.zarr``), or paths of stores. Of a tuned folder, candidates are read, too;
        :func:`fedstat.study.selection.final_runs` has the paths of its final runs.
    differ : iterable of str
        Settings that may differ between runs of a method. Most tables would mix such runs.

    Returns
    -------
    Grid
        Finished runs, and the paths of unfinished and failed runs.

    Raises
    ------
    FileNotFoundError
        If there are no runs.
    ValueError
        If runs of one scenario have different scales (the message names the settings), or a run cannot be read.
    """
    paths = stores(runs)
    rows, configs, unfinished = [], [], []
    for path in paths:
        if outcomes.missing(path):
            unfinished.append(str(path))
            continue
        run = open_run(path)
        if "ended" not in run.attrs:
            unfinished.append(str(path))
            continue
        try:
            with reading(path):
                rows.append(run_table.row(run) | {"path": str(path)})
                configs.append(run_table.config_of(run))
        except ValueError as error:
            require_sound(path, checksums=True)  # damage explains more than this error
            if isinstance(error, DamageError):
                raise
            raise ValueError(f"{path}: {error}") from error
    table = pd.DataFrame(rows)
    scenarios = [r["scenario"] for r in rows]
    same_scale(configs, scenarios, differ=differ)
    first = {scenario: configs[scenarios.index(scenario)] for scenario in dict.fromkeys(scenarios)}
    return Grid(table, tuple(unfinished), first)


def stores(runs: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the sorted paths of the runs in a folder, or of a list of stores; failed runs may have no store."""
    if isinstance(runs, str | Path):
        return outcomes.stores(runs)
    if not (paths := sorted(map(Path, runs))):
        raise FileNotFoundError("runs must name at least one store, but got none")
    return paths


def same_scale(configs: Sequence[dict[str, Any]], scenarios: Sequence[str], *, differ: Iterable[str] = ()) -> None:
    """Raise ValueError that names the settings if runs of a scenario have different scales.

    Examples
    --------
    >>> same_scale([{"rounds": 10}, {"rounds": 20}], ["a", "a"])
    Traceback (most recent call last):
    ValueError: runs of 'a' cannot stand in one table: they differ in rounds (10, 20). Keep each scale in ...
    """
    of_method = [name for name in OF_METHOD if name not in differ]
    for scenario in dict.fromkeys(scenarios):
        scenario_configs = [c for c, name in zip(configs, scenarios, strict=True) if name == scenario]
        _require_equal(scenario_configs, SCALE, f"runs of {scenario!r}")
        for method in dict.fromkeys(c.get("algorithm") for c in scenario_configs):
            method_configs = [c for c in scenario_configs if c.get("algorithm") == method]
            _require_equal(method_configs, of_method, f"runs of {method}, {scenario!r},")


def _require_equal(configs: Sequence[dict[str, Any]], names: Iterable[str], runs: str) -> None:
    values_by_name = {name: list(dict.fromkeys(json.dumps(c.get(name)) for c in configs)) for name in names}
    differ = [f"{name} ({', '.join(values)})" for name, values in values_by_name.items() if len(values) > 1]
    if differ:
        raise ValueError(
            f"{runs} cannot stand in one table: they differ in {'; '.join(differ)}. Keep each scale in its own folder."
        )


def select(grid: Grid, conditions: Iterable[str]) -> Grid:
    """Select the runs that meet conditions such as "tau=0.5"; keep runs without the setting.

    Raises
    ------
    ValueError
        If there is no such column, or no finished run meets the conditions.
    """
    table = grid.table
    for condition in conditions if len(table) else ():
        key, _, value = condition.partition("=")
        column = table[check.choice("the key of a selection", key, [str(c) for c in table.columns])]
        is_empty = column.isna() | (column.astype(str) == "")
        table = table[is_empty | column.map(lambda x, value=value: _equals(x, value))]
    if not len(table):
        raise ValueError(
            f"no finished run meets {list(conditions)}; the study has {len(grid.table)} finished and "
            f"{len(grid.unfinished)} unfinished runs. Remove a condition, or finish the runs."
        )
    return grid._replace(table=table.reset_index(drop=True))


def scenarios(grid: Grid) -> list[str]:
    """Return the scenarios of a grid, sorted."""
    return sorted(dict.fromkeys(grid.table["scenario"]))


def _equals(x: Any, value: str) -> bool:
    try:
        return float(x) == float(value)
    except (TypeError, ValueError):
        return str(x) == value
