"""Settings and summary of one stored run, as records that print as tables."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.fl.stored import from_stored
from fedstat.fl.training import COMMAND
from fedstat.results.base import TERMINAL
from fedstat.results.tables import count, megabytes
from fedstat.store.encoding import algorithm_of
from fedstat.study import run_table
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
        title = algorithm_of(str(run.attrs.get("title") or run.name or "run"))
        return Record(f"Settings of {title}", _config(run))
    return Record(f"Settings of {run}", _by_todays_names(store.config_of(run), store.attributes(Path(run))))


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
        and planned), ``accuracy`` (test accuracy after the last evaluated round, mean over clients weighted by test
        samples), ``layers``, ``weights`` (rounds after which they are stored), ``size``. Of other runs: ``made by``,
        ``state``, ``dims``, ``size``.

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
      size      2.9 kB in memory
    """
    run = run if isinstance(run, xr.DataTree) else store.open_run(run)
    config = _config(run)
    is_training = run.attrs.get("command") == COMMAND and "metrics" in run.children
    parts = _of_training(run, config) if is_training else _of_other(run)
    title = algorithm_of(str(run.attrs.get("title") or "run"))
    return Record(title, parts | {"size": f"{megabytes(run.nbytes)} in memory"})


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
    return _by_todays_names(dict(guard.parsed("config", run.attrs["config"].encode(), finite=False)), run.attrs)


def _by_todays_names(config: dict[str, Any], attrs: Mapping[Any, Any]) -> dict[str, Any]:
    return from_stored(config) if attrs.get("command") == COMMAND else config


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
    evaluated = metrics["accuracy"].dropna("round", how="all")["round"].to_numpy()
    accuracy = "no round was evaluated"
    if not math.isnan(row["final"]):
        accuracy = f"{row['final']:.3f} (test, after round {evaluated[-1]}; mean over clients, weighted by samples)"
    parts = {
        "method": f"{title_of(row['method'])}, seed {row['seed']}",
        "data": f"{scenario}: {data}" if scenario else data,
        "rounds": f"{n_done}, finished" if is_finished else f"{n_done} of {config['rounds']}, not finished",
        "accuracy": accuracy,
    }
    return parts | _layers(run, config, n_done)


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
