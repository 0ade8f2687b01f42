"""What a report says of a split of hidden units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from fedstat.reporting import document, prose
from fedstat.reporting import stored as stores
from fedstat.reporting.document import COMMAND, Block, Part, Section, Table, Text, listed, shown
from fedstat.reporting.stored import Stored, assemble
from fedstat.results.base import Caution
from fedstat.results.tables import interval, number
from fedstat.stats import split as splitting

_WRITES = ("overwrite", "out", "plot", "summary", "csv", "latex")  # options that no number depends on
_ENDS = 10  # units listed from either end


def part(stored: Stored) -> Part:
    """Report of the splits in a store."""
    layers = stored.tree["split"].children if stored.tree is not None and "split" in stored.tree.children else {}
    sections: dict[str, Callable[[], Section | None]] = {
        f"layer {shown(layer)}": partial(_layer, shown(layer), node.to_dataset()) for layer, node in layers.items()
    }
    nodes = {shown(layer): node.to_dataset() for layer, node in layers.items()}
    return assemble(
        stored, _ran(stored, nodes), sections,
        checks=lambda: (one for layer, data in nodes.items() for one in _cautions(layer, data)),
        brief=lambda: [text for layer, data in nodes.items() for text in _findings(layer, data)],
        methods=_methods(stored, _n_clients(nodes)),
    )  # fmt: skip


def _n_clients(nodes: Mapping[str, xr.Dataset]) -> int | None:
    """Number of clients whose weights were split, None if it cannot be read."""
    found = next((_glance(data).get("n_clients") for data in nodes.values()), None)
    return found if isinstance(found, int) else None


def _ran(stored: Stored, nodes: Mapping[str, xr.Dataset]) -> Table:
    c, n = stored.config, _n_clients(nodes)
    options = {name: value for name, value in c.items() if name not in _WRITES}
    rows = {
        "command": stores.command_line("fedstat.decompose", options, positional=("files",)),
        "weights": f"of {'clients' if n is None else f'{n} clients'}, from {listed(c.get('files') or (), most=4)}",
        "common start": f"{c['minus']}, subtracted from every client's weights" if c.get("minus") else "not subtracted",
        "layers": str(len(nodes)),
        "method": f"agreement between clients, τ = {c.get('tau')}" if c.get("method") == "icc"
        else f"{c.get('method')}, {_size(c)}, τ = {c.get('tau')}",
        "resampled": f"clients, {c['bootstrap']} times, seed {c.get('seed')}" if c.get("bootstrap") else "not",
    } | stores.made(stored)  # fmt: skip
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items()})


def _size(c: Mapping[str, Any]) -> str:
    """What sets the number of factors."""
    return f"{c['n_factors']} factors" if c.get("n_factors") else f"κ = {c.get('kappa')}"


def _glance(data: xr.Dataset) -> dict[str, Any]:
    """The row of ``split.glance()``, {} if it cannot be read."""
    try:
        return dict(json.loads(data.attrs.get("glance", "{}")).items())
    except (ValueError, TypeError, AttributeError):
        return {}


def _cautions(layer: str, data: xr.Dataset) -> Iterator[Caution]:
    glance = _glance(data)
    if glance.get("converged") is False:
        text = (
            f"layer {layer}: the communalities still moved after {shown(glance.get('n_iter'))} steps; raise --max-iter"
        )
        yield Caution("Factor analysis not converged", text)
    if (failed := 1 - float(data.attrs.get("replicates_converged", 1))) > 0:
        text = (
            f"layer {layer}: {100 * failed:.0f} % of the factor analyses of resampled clients had not converged. They "
            "stopped by the rule of the split itself, so that their spread is that of this many steps"
        )
        yield Caution("Resamples not converged", text)
    if "heywood" in data and (n := int(data["heywood"].sum())):
        text = (
            f"layer {layer}: communalities of {n} of {data.sizes['unit']} units exceed 1. The factor model is improper "
            "there: their order, and so the split, depends on where the iteration stops"
        )
        yield Caution("Heywood cases", text)
    groups = _groups(data)
    if n := int((groups == "dead").sum()):
        names = data["unit"].to_numpy()[groups == "dead"]
        yield Caution(
            "Dead units", f"layer {layer}: {n} of {len(groups)} units have constant weights ({listed(names)})"
        )
    n_clients = _glance(data).get("n_clients", 0)
    if "icc" in data and splitting.contradicted(data["shared"].to_numpy(), data["icc"].to_numpy(), n_clients):
        text = (
            f"layer {layer}: median ICC2 is {number(_median(data, shared=True), 2)} on shared and "
            f"{number(_median(data, shared=False), 2)} on personal units. Shared here means explained by other "
            "units, not alike over clients"
        )
        yield Caution("Clients agree less on shared units", text, grave=True)
    if "p_shared" not in data:
        how = "fedstat.icc(weights, replicates=500)" if data.attrs.get("method") == "icc" else "--bootstrap 500"
        text = f"layer {layer}: clients were not resampled, so nothing is said of certainty; {how} does that"
        yield Caution("Certainty not estimated", text)
    elif doubtful := _doubtful(data):
        text = (
            f"layer {layer}: {doubtful} of {len(groups)} units are shared in 10 to 90 % of the resamples of "
            "clients, so that their label is uncertain"
        )
        yield Caution("Doubtful units", text)


def _groups(data: xr.Dataset) -> NDArray[np.str_]:
    """Group of every unit; zarr's strings are of a type that cannot be cast."""
    return np.array([str(group) for group in data["group"].to_numpy()])


def _median(data: xr.Dataset, *, shared: bool) -> float:
    values = data["icc"].to_numpy()[data["shared"].to_numpy() == shared]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _doubtful(data: xr.Dataset) -> int:
    p = data["p_shared"].to_numpy()
    return int(((p >= 0.1) & (p <= 0.9)).sum())


def _statistic(data: xr.Dataset) -> tuple[str, str]:
    """Name and label of what the threshold applies to."""
    by_agreement = data.attrs.get("method") == "icc"
    return ("icc", "agreement between clients, ICC2") if by_agreement else ("communality", "communality ν")


def _findings(layer: str, data: xr.Dataset) -> Iterator[str]:
    groups = _groups(data)
    count = {name: int((groups == name).sum()) for name in ("shared", "personal", "dead")}
    _, label = _statistic(data)
    dead = f", {count['dead']} dead" if count["dead"] else ""
    yield (
        f"Layer {layer}: {count['shared']} units shared ({label} at or above {number(_threshold(data), 3)}), "
        f"{count['personal']} a client's own{dead}. How many follows from τ = {shown(data.attrs.get('tau'))}; "
        "which ones, from the data."
    )
    if "p_shared" in data:
        p = data["p_shared"].to_numpy()
        yield (
            f"Layer {layer}: when clients are resampled, {int((p > 0.9).sum())} units are shared and "
            f"{int((p < 0.1).sum())} a client's own in more than 90 % of the samples; {_doubtful(data)} lie between."
        )
    if "icc" in data:
        shared, own = (number(_median(data, shared=flag), 2) for flag in (True, False))
        yield f"Layer {layer}: clients agree on shared units with a median ICC2 of {shared}, on the others with {own}."


def _threshold(data: xr.Dataset) -> float:
    try:
        return float(data.attrs.get("threshold", math.nan))
    except (TypeError, ValueError):
        return math.nan


def _layer(layer: str, data: xr.Dataset) -> Section:
    name, label = _statistic(data)
    shared, threshold = data["shared"].to_numpy().astype(bool), _threshold(data)
    values = data[name].to_numpy().astype(float)
    draw = partial(document.split_histogram, values, shared, threshold, label)
    blocks: list[Block] = [document.figure(draw, f"{layer}: {label} of the units, and the threshold.")]
    if "conf_low" in data:
        table = pd.DataFrame({"estimate": values, "low": data["conf_low"], "high": data["conf_high"], "shared": shared})
        table = table.dropna()
        about = data.attrs.get("intervals", "95 % intervals")  # stores of earlier versions do not say
        caption = f"{layer}: {label} of every unit, clients resampled; {about}."
        intervals = partial(document.units_interval, table, threshold, label)
        blocks.append(document.figure(intervals, caption) if len(table) else Text(caption))
    return Section(f"Layer {layer}", [*blocks, *_units(data, name, label)])


def _units(data: xr.Dataset, name: str, label: str) -> list[Block]:
    """Units from the highest to the lowest statistic; of many, both ends and those nearest to the threshold."""
    order = np.argsort(-np.nan_to_num(data[name].to_numpy().astype(float), nan=-np.inf), kind="stable")
    more = len(order) - 2 * _ENDS
    kept = order if more <= 5 else np.concatenate([order[:_ENDS], order[-_ENDS:]])
    bounds = "conf_low" in data and bool(data["conf_low"].notnull().any())
    columns = ["unit", "group", f"{label}{' [95 %]' if bounds else ''}"]
    columns += ["shared in resamples"] if "p_shared" in data else []
    columns += ["ICC2"] if "icc" in data and name != "icc" else []
    rows = []
    for i in kept:
        one = data.isel(unit=int(i))
        low, high = (float(one[k]) if bounds else math.nan for k in ("conf_low", "conf_high"))
        row = [
            shown(one["unit"].item()),
            shown(one["group"].item()),
            interval(float(one[name]), low, high, 3, sign=False),
        ]
        row += [f"{100 * float(one['p_shared']):.0f} %"] if "p_shared" in data else []
        row += [number(float(one["icc"]), 2)] if "icc" in data and name != "icc" else []
        rows.append(row)
    caption = "Units from the highest to the lowest" + (
        f"; {more} between the two ends are left out" if more > 5 else ""
    )
    found: list[Block] = [Table(caption, columns, rows)]
    return (
        [*found, Text(f'All units are in the store: fedstat.open_run(...)["split"], variable {name!r}.')]
        if more > 5
        else found
    )


def _methods(stored: Stored, n_clients: int | None) -> tuple[str, list[str]]:
    c = stored.config
    keys = ["wang2023"]
    if c.get("method") == "icc":
        how = (
            f"the agreement between clients on each unit, the intraclass correlation ICC2 ({prose.cited('shrout1979')})"
        )
        keys.append("shrout1979")
    else:
        given = _size(c) if c.get("n_factors") else f"the number of factors by {_size(c)}"
        how = (
            f"the communality of each unit, from {prose.estimator(c.get('method'))} ({prose.cited('harman1976')}) of "
            f"the clients' stacked weights with {given}"
        )
        keys.append("harman1976")
    tau = str(c.get("tau"))
    at = f"τ, its {tau} quantile," if tau.replace(".", "", 1).isdigit() else f"τ = {shown(tau)}"
    whose = "the clients' networks" if n_clients is None else f"{n_clients} clients' networks"
    start = " The weights that all clients started from had been subtracted." if c.get("minus") else ""
    text = (
        f"Hidden units of {whose} were split into shared and client-specific ones ({prose.cited('wang2023')}) by "
        f"{how}; units at or above the threshold {at} were called shared.{start}"
    )
    if c.get("bootstrap"):
        keys.append("efron1979")
        text += (
            f" Certainty was estimated by resampling clients {c['bootstrap']} times with replacement "
            f"({prose.cited('efron1979')})."
        )
    return f"{text} {prose.software([stored])}", keys
