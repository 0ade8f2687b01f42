"""Report of a split of hidden units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import xarray as xr

from fedstat.reporting import document, prose
from fedstat.reporting import stored as stores
from fedstat.reporting.document import COMMAND, Block, Part, Section, Table, Text, listed, shown
from fedstat.reporting.stored import Stored, assemble
from fedstat.results import LayerResults, SplitResult
from fedstat.results.base import Caution, Result
from fedstat.results.tables import count
from fedstat.store.encoding import settings_of
from fedstat.store.results import layer_results

_WRITES = ("overwrite", "out", "plot", "summary", "csv", "latex")  # options that no number depends on
_CAPTIONS = {
    "split": "units by what the split rests on, and the threshold",
    "bootstrap": "communality of every unit with its interval, clients resampled",
    "permutation": "communalities, and those that are expected if units are shuffled within clients",
    "sensitivity": "the split under other choices, compared with the reference",
}
_COLUMNS = {
    "split": "communality: ν; icc: agreement between clients, ICC2; margin: distance from the threshold",
    "bootstrap": "estimate: communality ν; half_sample: its mean in random halves of the clients; prop_shared: "
    "proportion of bootstrap samples that share the unit",
    "permutation": "estimate: communality ν; p_value: one-sided; p_adjusted: false discovery rate",
    "sensitivity": "prop_unchanged: proportion of units in the same group as in the reference",
}
_EARLIER = "The store was written by an earlier version of fedstat, which kept tables and not the result."

Kinds = Mapping[str, Result]
"""Results of a layer: "split", and "bootstrap", "permutation" and "sensitivity" where they were asked for."""


def part(stored: Stored) -> Part:
    """Report of the splits in a store."""
    tree = xr.DataTree() if stored.tree is None else stored.tree
    layers = tree["split"].children if "split" in tree.children else {}
    kinds_by_layer, lost = stored.attempt({layer: partial(layer_results, tree, layer) for layer in layers})
    sections: dict[str, Callable[[xr.DataTree], Section | None]] = {
        f"layer {shown(layer)}": partial(_layer, layer, kinds) for layer, kinds in kinds_by_layer.items()
    }
    n_clients = _n_clients(kinds_by_layer)
    return assemble(
        stored, _ran(stored, len(layers), n_clients), sections, checks=lambda _: [*lost, *_cautions(kinds_by_layer)],
        summary=lambda _: _summary(kinds_by_layer),
        methods=_methods(stored, n_clients),
    )  # fmt: skip


def _summary(kinds_by_layer: Mapping[str, Kinds]) -> str:
    """Return the prints of all results."""
    return "\n".join(f"{layer}: {result!r}" for layer, kinds in kinds_by_layer.items() for result in kinds.values())


def _n_clients(kinds_by_layer: Mapping[str, Kinds]) -> int | None:
    """Return the number of clients whose weights were split, None if it cannot be read."""
    splits = (kinds["split"] for kinds in kinds_by_layer.values() if "split" in kinds)
    return next((split.fit.n_clients for split in splits if isinstance(split, SplitResult)), None)


def _ran(stored: Stored, n_layers: int, n_clients: int | None) -> Table:
    c = settings_of(stored.config)
    options = {name: value for name, value in c.items() if name not in _WRITES}
    whose = "clients" if n_clients is None else count(n_clients, "client")
    rows = {
        "command": stores.command_line("fedstat.decompose", options, positional=("files",)),
        "weights": f"of {whose}, from {listed(c.get('files') or (), most=4)}",
        "baseline": f"{c['baseline']}, subtracted from every client's weights" if c.get("baseline") else "none",
        "layers": str(n_layers),
        "method": f"agreement between clients, τ = {c.get('tau')}" if c.get("method") == "icc"
        else f"{c.get('method')}, {_size(c)}, τ = {c.get('tau')}",
        "resampled": f"clients, {c['n_boot']} times, seed {c.get('seed')}" if c.get("n_boot") else "not",
    } | stores.origin(stored)  # fmt: skip
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items()})


def _size(c: Mapping[str, Any]) -> str:
    """Describe the rule for the number of factors."""
    return count(c["n_factors"], "factor") if c.get("n_factors") else f"κ = {c.get('kappa')}"


def _cautions(kinds_by_layer: Mapping[str, Kinds]) -> Iterator[Caution]:
    """Cautions of all results, and of splits without any that says how certain they are."""
    for layer, kinds in kinds_by_layer.items():
        for result in kinds.values():
            yield from LayerResults({shown(layer): result}).cautions()
        split = kinds.get("split")
        if isinstance(split, SplitResult) and "bootstrap" not in kinds:
            how = "fedstat.icc(weights, n_boot=500)" if split.fit.method == "icc" else "--n-boot 500"
            text = f"layer {shown(layer)}: clients were not resampled, so nothing is said of certainty; {how} does that"
            yield Caution("Certainty not estimated", text)


def _layer(layer: str, kinds: Kinds, run: xr.DataTree) -> Section:
    """Figure and table of each result of a layer; of an earlier version, which stored none, the table."""
    name = shown(layer)
    blocks: list[Block] = []
    for kind, result in kinds.items():
        blocks.append(document.figure(result.plot, f"{name}: {_CAPTIONS[kind]}."))
        blocks.append(Table.ends(f"{name}, {kind}. {_COLUMNS[kind]}", *result._by_row()))
    if not kinds:
        data = run["split"][layer].to_dataset()
        units = data[[variable for variable, values in data.data_vars.items() if values.dims == ("unit",)]]
        by = "icc" if data.attrs.get("method") == "icc" else "communality"
        blocks += [
            Text(_EARLIER),
            Table.ends(f"{name}, split. {_COLUMNS['split']}", units.to_dataframe().reset_index(), by),
        ]
    return Section(f"Layer {name}", blocks)


def _methods(stored: Stored, n_clients: int | None) -> tuple[str, list[str]]:
    c = settings_of(stored.config)
    keys = ["wang2023"]
    if c.get("method") == "icc":
        how = (
            f"the agreement between clients on each unit, the intraclass correlation ICC2 ({prose.cited('shrout1979')})"
        )
        keys.append("shrout1979")
    else:
        n_factors = _size(c) if c.get("n_factors") else f"the number of factors by {_size(c)}"
        how = (
            f"the communality of each unit, from {prose.estimator(c.get('method'))} ({prose.cited('harman1976')}) of "
            f"the clients' stacked weights with {n_factors}"
        )
        keys.append("harman1976")
    tau = str(c.get("tau"))
    threshold = f"τ, its {tau} quantile," if tau.replace(".", "", 1).isdigit() else f"τ = {shown(tau)}"
    few = {None: "the clients' networks", 1: "one client's network"}
    whose = few.get(n_clients, f"{n_clients} clients' networks")
    start = " The weights that all clients started from had been subtracted." if c.get("baseline") else ""
    text = (
        f"Hidden units of {whose} were split into shared and client-specific ones ({prose.cited('wang2023')}) by "
        f"{how}; units at or above the threshold {threshold} were called shared.{start}"
    )
    if c.get("n_boot"):
        keys.append("efron1979")
        text += (
            f" Certainty was estimated by resampling clients {c['n_boot']} times with replacement "
            f"({prose.cited('efron1979')})."
        )
    return f"{text} {prose.software([stored])}", keys
