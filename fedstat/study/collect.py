"""Stored runs of a study: collected in a table, named and ordered for print, with their origin."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.fl import algorithms, custom
from fedstat.fl.algorithm import About
from fedstat.store import DamageError, open_run, reading, require_sound
from fedstat.study import summary
from fedstat.study.experiment import OF_AGGREGATOR


def origin(grid: Grid) -> list[str]:
    """Notes for a table or caption: scale, seeds, commits, and unfinished runs."""
    notes = []
    for label in labels(grid):
        seeds = sorted(grid.table.loc[grid.table["label"] == label, "seed"].unique().tolist())
        notes.append(f"{label}: {scale(_config(grid, label))}; seeds {', '.join(map(str, seeds))}")
    # A run that other code continued names both.
    made = grid.table.assign(**{name: grid.table[name].str.split(", ") for name in ("code", "revision")})
    made = made.explode("code")
    of_package = made.assign(code=made["code"].str.partition("+")[0]).groupby("label")["code"].nunique()
    of_method = made.groupby(["label", "method"])["code"].nunique().groupby("label").max()  # with user code
    versions = of_package.where(of_package >= of_method, of_method)
    if (versions > 1).any():
        mixed = "; ".join(f"{label} by {n}" for label, n in versions[versions > 1].items())
        notes.append(f"runs of one setting were made by several versions of the code: {mixed}")
    if few := summary.few(grid.table):
        notes.append(
            f"fewer than {summary.WINDOW} rounds: what averages the last {summary.WINDOW} is that of the last one, "
            f"and best10, last10 and optimism are left out: {few}"
        )
    commits = sorted({r for names in made["revision"] for r in names if r})
    notes.append(f"commit {', '.join(commits)}" if commits else "commit not known")
    if grid.unfinished:
        notes.append(f"not finished and left out: {', '.join(Path(p).name for p in grid.unfinished)}")
    return notes


def caption(grid: Grid, width: int = 150) -> list[str]:
    """Lines of :func:`origin` for under a figure, with settings of one scale in one line."""
    names: dict[str, list[str]] = {}
    for label in labels(grid):
        seeds = sorted(grid.table.loc[grid.table["label"] == label, "seed"].unique().tolist())
        what = scale({k: v for k, v in _config(grid, label).items() if k != "partition"})
        names.setdefault(f"{what}; seeds {', '.join(map(str, seeds))}", []).append(label)
    lines = [f"{' | '.join(own)}: {what}" for what, own in names.items()]
    return [part for line in (*lines, *origin(grid)[len(labels(grid)) :]) for part in textwrap.wrap(line, width)]


def _config(grid: Grid, label: str) -> dict[str, Any]:
    """Settings of a label's runs; of learning rates the most frequent, and the methods with others in brackets."""
    if "lr" not in grid.table:
        return dict(grid.configs[label])
    rates = grid.table[grid.table["label"] == label].groupby("lr")["method"].unique()
    config = {name: value for name, value in grid.configs[label].items() if name != "lr"}
    if rates.empty:
        return config
    first, *others = sorted(rates.index, key=lambda lr: -len(rates[lr]))
    other = "; ".join(f"{', '.join(map(title_of, ordered(rates[lr])))}: {lr:g}" for lr in others)
    return config | {"lr": f"{first:g} ({other})" if other else f"{first:g}"}


def scale(config: Mapping[str, Any]) -> str:
    """Size of a run in one line.

    Examples
    --------
    >>> scale({"clients": 20, "net": "lenet", "width": 0.5, "rounds": 30, "evaluate_every": 5, "local_epochs": 1})
    '20 clients, net lenet × 0.5, 30 rounds, evaluated every 5, local epochs 1'
    """
    width = f" × {config['width']:g}" if config.get("width") not in (None, 1) else ""
    norm = f" with {config['norm']} norm" if config.get("norm") else ""
    every = f", evaluated every {config['evaluate_every']}" if config.get("evaluate_every", 1) > 1 else ""
    parts = {
        "partition": "{}", "labels": "labels {}", "clients": "{} clients", "samples": "at most {} samples each",
        "net": "net {}" + width + norm, "rounds": "{} rounds" + every, "participation": "participation {}",
        "sampling": "sampling {}",
        "local_epochs": "local epochs {}", "batch_size": "batch {}", "optimizer": "{}", "lr": "lr {}",
    }  # fmt: skip
    return ", ".join(form.format(config[key]) for key, form in parts.items() if config.get(key) is not None)


METHODS = {name: algorithms.about(name).title for name in algorithms.ALGORITHMS}
"""Names of the methods in tables and figures, in order."""

SETTINGS = {"layers": "Λ", "kappa": "κ", "tau": "τ", "estimator": "estimator"}
"""Settings of methods that split layers, with their symbols in tables, in order."""


def ordered(names: Iterable[str]) -> list[str]:
    """Methods in the order of ``METHODS``, wrapped ones after their method, then any others.

    Examples
    --------
    >>> ordered(["mine", "fedper", "fedavg-private-head", "fedavg"])
    ['fedavg', 'fedavg-private-head', 'fedper', 'mine']
    """
    places = list(METHODS)

    def place(name: str) -> tuple[int, str]:
        base = name if name in places else max((p for p in places if name.startswith(p)), key=len, default="")
        return places.index(base) if base else len(places), name

    return sorted(dict.fromkeys(names), key=place)


def title_of(method: str) -> str:
    """Title of a method or of a variant of it.

    Examples
    --------
    >>> title_of("fedavg-private-head"), title_of("fedprox, mu=0.1"), title_of("mine")
    ('FedAvg, private head', 'FedProx, mu=0.1', 'mine')
    """
    name, _, way = method.partition(", ")
    return about(name).title + (f", {way}" if way else "")


def in_order(grid: Grid) -> pd.DataFrame:
    """Runs of a grid in the order of tables: by label, method, ``SETTINGS`` and seed."""
    methods = ordered(grid.table["method"])

    def key(run: Mapping[Any, Any]) -> tuple[Any, ...]:
        config = grid.configs.get(run["label"], {})
        settings = [summary.place(name, run[name], config) for name in SETTINGS]
        return run["label"], methods.index(run["method"]), *settings, run["seed"]

    keys = [key(run) for run in grid.table.to_dict("records")]
    return grid.table.iloc[sorted(range(len(keys)), key=keys.__getitem__)]


def varying(table: pd.DataFrame) -> list[str]:
    """Those of ``SETTINGS`` that have several values for one method and label."""
    several = table.groupby(["label", "method"])[list(SETTINGS)].nunique(dropna=False).max() > 1
    return [name for name in SETTINGS if several[name]]


def design(run: Mapping[Any, Any], names: Iterable[str]) -> str:
    """Method of a run, with its values of the named settings.

    Examples
    --------
    >>> run = {"method": "random", "layers": "fc1", "kappa": float("nan"), "tau": 0.5}
    >>> design(run, ["layers", "kappa", "tau"])
    'random split, Λ = fc1, τ = 0.5'
    """
    values = {SETTINGS[name]: setting(run[name]) for name in names}
    return ", ".join([about(run["method"]).title, *(f"{k} = {v}" for k, v in values.items() if v != "–")])


def about(method: str) -> About:
    """Return the row of a method; of an unknown one, or one in a user's file, which is not run, the name alone.

    Examples
    --------
    >>> about("fedper+").title, about("mine").title
    ('FedPer+', 'mine')
    """
    if custom.is_own(method):  # a stored run names it, and reading must execute nothing
        return About(custom.short(method))
    try:
        return algorithms.about(method)
    except ValueError:
        return About(method)


def setting(value: Any) -> str:
    """Value of one of ``SETTINGS`` as text; a dash if the method lacks it or has its default."""
    return "–" if value == "" or pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


SCALE = (
    "data", "partition", "clients", "samples", "min_size", "test", "validation", "new_share", "net", "width",
    "norm", "net_options", "rounds", "participation", "local_epochs", "batch_size", "optimizer", "evaluate_every",
    "precision", "labels", "domains", "sampling",
)  # fmt: skip
"""Settings that runs of one label must have in common to be compared."""

OF_METHOD = ("lr", "server_lr", *OF_AGGREGATOR)
"""Settings that the runs of a method have in common, for one label: methods may be tuned apart."""


class Grid(NamedTuple):
    """Runs that belong together.

    Attributes
    ----------
    table : DataFrame
        One row per finished run, as :func:`fedstat.study.summary.row` makes it, with the path of its store: ``path``.
    unfinished : tuple of str
        Paths of unfinished runs, which are left out.
    configs : mapping from label to dict
        Settings of the first run of each label; those of its scale hold for all.
    """

    table: pd.DataFrame
    unfinished: tuple[str, ...] = ()
    configs: Mapping[str, dict[str, Any]] = {}


def collect(runs: str | Path | Iterable[str | Path], *, differ: Iterable[str] = ()) -> Grid:
    """Read many runs.

    Parameters
    ----------
    runs : path or sequence of paths
        A folder of stores (``*.zarr``), or the stores.
    differ : iterable of str
        Settings in which runs of a method may differ, though most tables would mix them up.

    Returns
    -------
    Grid
        Without unfinished runs, which it names.

    Raises
    ------
    FileNotFoundError
        If there are no runs.
    ValueError
        If runs of one label have different scales (the message names the settings), or a run cannot be read.
    """
    paths = stores(runs)
    rows, configs, unfinished = [], [], []
    for path in paths:
        run = open_run(path)
        if "ended" not in run.attrs:
            unfinished.append(str(path))
            continue
        try:
            with reading(path):
                rows.append(summary.row(run) | {"path": str(path)})
                configs.append(summary.config_of(run))
        except ValueError as error:
            require_sound(path, checksums=True)  # damage, which says more
            if isinstance(error, DamageError):
                raise
            raise ValueError(f"{path}: {error}") from error
    table = pd.DataFrame(rows)
    labels = [r["label"] for r in rows]
    same_scale(configs, labels, differ=differ)
    first = {label: configs[labels.index(label)] for label in dict.fromkeys(labels)}
    return Grid(table, tuple(unfinished), first)


def stores(runs: str | Path | Iterable[str | Path]) -> list[Path]:
    """Paths of the stores in a folder, or those given, sorted."""
    if isinstance(runs, str | Path):
        return store.stores(runs)
    if not (paths := sorted(map(Path, runs))):
        raise FileNotFoundError("there must be at least one run, but got none")
    return paths


def same_scale(configs: Sequence[dict[str, Any]], labels: Sequence[str], *, differ: Iterable[str] = ()) -> None:
    """Raise ValueError, naming the settings, if runs of one label were made at different scales.

    Examples
    --------
    >>> same_scale([{"rounds": 10}, {"rounds": 20}], ["a", "a"])
    Traceback (most recent call last):
    ValueError: runs of 'a' cannot stand in one table: they differ in rounds (10, 20). Keep each scale in ...
    """
    of_method = [name for name in OF_METHOD if name not in differ]
    for label in dict.fromkeys(labels):
        here = [c for c, name in zip(configs, labels, strict=True) if name == label]
        _require_same(here, SCALE, f"runs of {label!r}")
        for method in dict.fromkeys(c.get("algorithm") for c in here):
            own = [c for c in here if c.get("algorithm") == method]
            _require_same(own, of_method, f"runs of {method}, {label!r},")


def _require_same(configs: Sequence[dict[str, Any]], names: Iterable[str], which: str) -> None:
    seen = {name: list(dict.fromkeys(json.dumps(c.get(name)) for c in configs)) for name in names}
    differ = [f"{name} ({', '.join(values)})" for name, values in seen.items() if len(values) > 1]
    if differ:
        raise ValueError(
            f"{which} cannot stand in one table: they differ in {'; '.join(differ)}. Keep each scale in its own folder."
        )


def select(grid: Grid, conditions: Iterable[str]) -> Grid:
    """Keep the runs of a grid that meet conditions such as "tau=0.5"; runs without the setting stay.

    Raises
    ------
    ValueError
        If there is no such column, or no finished run is left.
    """
    table = grid.table
    for condition in conditions if len(table) else ():
        key, _, value = condition.partition("=")
        column = table[check.choice("the key of a selection", key, [str(c) for c in table.columns])]
        empty = column.isna() | (column.astype(str) == "")
        table = table[empty | column.map(lambda x, value=value: _same(x, value))]
    if not len(table):
        raise ValueError(
            f"no finished run is left after {list(conditions)}: there were {len(grid.table)} finished and "
            f"{len(grid.unfinished)} unfinished runs"
        )
    return grid._replace(table=table.reset_index(drop=True))


def labels(grid: Grid) -> list[str]:
    """Labels of a grid, sorted."""
    return sorted(dict.fromkeys(grid.table["label"]))


def _same(x: Any, value: str) -> bool:
    try:
        return float(x) == float(value)
    except (TypeError, ValueError):
        return str(x) == value
