"""Stored runs as the verbs take them: weights at a stage of the round, what the run tells of units, its splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.layer_names import find_skipped_layers, match_names
from fedstat.results.tables import count

Stage = Literal["trained", "aggregated"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""After local training, only of the clients selected in that round; and as clients predict, after aggregation."""
_GROUP_BY_STAGE = {"trained": "uploads", "aggregated": "weights"}
REASONS, COMMON_START = "unit_reasons", "common_start"
"""Attributes of weights: why a unit may be identical in all clients, and True if clients have common initial
parameters; see :class:`fedstat.results.IccResult`."""


class RunLayers(NamedTuple):
    """Layers of a run, by default without embeddings and the output layer.

    Attributes
    ----------
    run : DataTree
    names : list of str
    skipped_layers : dict from layer to reason
    """

    run: xr.DataTree
    names: list[str]
    skipped_layers: dict[str, str]


def run_of(tree: xr.DataTree) -> xr.DataTree:
    """Return the run whose weights a tree holds: the tree, or its parent if it is a group of weights or a layer."""
    node = tree
    if node.parent is not None and "w" in node.data_vars:
        node = node.parent
    return node.parent if node.parent is not None and node.name in _GROUP_BY_STAGE.values() else node


def settings_of(run: xr.DataTree) -> dict[str, Any]:
    """Return the stored settings of a run; none if it has none."""
    settings = json.loads(run.attrs.get("config", "{}"))
    return settings if isinstance(settings, dict) else {}


def layers_of_run(run: xr.DataTree) -> dict[str, xr.DataArray]:
    """Return the weights of a run's layers, in the order of the network."""
    group = run.children.get("weights", run)
    return {str(name): node.dataset["w"] for name, node in group.children.items() if "w" in node.data_vars}


def group_of(tree: xr.DataTree, stage: Stage | None) -> xr.DataTree:
    """Return the group with the layers' weights at a stage.

    Parameters
    ----------
    tree : DataTree
        A run, one of its groups ``weights`` and ``uploads``, a layer of these, or weights of other origin.
    stage : {"trained", "aggregated"} or None
        None: the stage of the group, and of a run the weights after aggregation.

    Raises
    ------
    ValueError
        If the run has no weights of this stage, or the group is of another stage.
    """
    group = tree.parent if tree.parent is not None and "w" in tree.data_vars else tree
    run = run_of(tree)
    if stage is None:
        return group if group.name == "uploads" else run.children.get("weights", group)
    if group.name == "uploads" and stage != "trained":
        raise ValueError(f"stage must be 'trained' for weights before aggregation, but got {stage!r}. Pass the run.")
    if (name := _GROUP_BY_STAGE[stage]) not in run.children:
        groups = few(sorted(map(str, run.children)), 8) or "nothing"
        hint = (
            "Train it with probe='trained-weights' (--probe trained-weights), or set stage='aggregated' (--stage "
            "aggregated)."
        )
        if stage == "aggregated":
            hint = "Remove stage: it selects weights of a run of fedstat.fl."
        raise ValueError(f"the run holds no weights at stage {stage!r}, only {groups}. {hint}")
    return run.children[name]


def drop_unselected(weights: xr.DataArray) -> xr.DataArray:
    """Drop clients whose weights are all NaN: they were not selected, and have no weights before aggregation."""
    is_selected = weights.notnull().any([dim for dim in weights.dims if dim != "client"])
    return weights.isel(client=np.flatnonzero(is_selected.to_numpy()))


def shared_by_round(run: xr.DataTree, layer: str) -> xr.DataArray | None:
    """Return the shared units of a layer, bool (round, unit); None if the tree does not tell."""
    layers = run.children["split"].children if "split" in run.children else {}
    shared = layers[layer].data_vars.get("shared") if layer in layers else None
    return shared if shared is not None and {*shared.dims} == {"round", "unit"} and "round" in shared.coords else None


def shared_units(run: xr.DataTree, layer: str, weights: xr.DataArray) -> NDArray[np.bool_] | None:
    """Return the units that are shared at the checkpoint of weights, bool (unit,); None if the run does not tell."""
    shared = shared_by_round(run, layer)
    checkpoint = weights.coords.get("checkpoint")
    if shared is None or checkpoint is None or checkpoint.ndim or checkpoint.item() not in shared["round"].values:
        return None
    return shared.sel(round=checkpoint.item()).to_numpy().astype(bool)


def require_unshared(run: xr.DataTree, shared: dict[str, NDArray[np.bool_]]) -> None:
    """Raise ValueError if layers have shared units, whose weights after aggregation are equal in all clients.

    Parameters
    ----------
    run : DataTree
    shared : dict from layer to bool array (unit,)
    """
    averaged = {layer: units for layer, units in shared.items() if units.any()}
    if not averaged:
        return
    numbers = [f"{units.sum()} of {count(len(units), 'unit')} of {layer}" for layer, units in averaged.items()]
    is_stored = "uploads" in run.children
    before = "this run holds them" if is_stored else "train again with probe='trained-weights', which stores them"
    rest = [layer for layer in shared if layer not in averaged]
    hint = f", or select layers without shared units: layer={rest!r}" if rest else ""
    raise ValueError(
        f"the run's weights are averaged over clients: shared units are equal in all clients by construction, here "
        f"{few(numbers, 4)}. Analyze the weights before averaging by stage='trained' ({before}), or these averaged "
        f"weights nevertheless by stage='aggregated' (--stage in commands){hint}."
    )


def describe_units(run: xr.DataTree, layer: str, weights: xr.DataArray, *, trained: bool) -> xr.DataArray:
    """Add attributes: reasons why units may be identical in all clients, and common initial parameters, if known.

    Parameters
    ----------
    run : DataTree
    layer : str
    weights : DataArray
        At one checkpoint.
    trained : bool
        True for weights before aggregation.
    """
    shared = shared_units(run, layer, weights)
    if shared is None or run.attrs.get("command") != "fedstat.fl":
        return weights
    if trained:
        reasons = np.full(len(shared), "local training")
    else:
        last = weights["checkpoint"].item()
        reasons = np.where(shared, "averaged", "never averaged" if _sent_nothing(run, last) else "")
    return weights.assign_attrs({REASONS: reasons, COMMON_START: True})


def _sent_nothing(run: xr.DataTree, last: int) -> bool:
    """Return True if no client uploaded anything until a round, so that no entry of any unit was averaged."""
    metrics = run.children.get("metrics")
    if metrics is None or "bytes_up" not in metrics.data_vars:
        return False
    return not metrics.to_dataset()["bytes_up"].sel(round=slice(None, last)).to_numpy().any()


def compare_initial(weights: xr.DataArray, layer: xr.Dataset) -> xr.DataArray:
    """Add attributes that name units equal to the initial parameters, if the group of the layer holds them.

    Parameters
    ----------
    weights : DataArray
        Weights of the layer at one checkpoint.
    layer : Dataset
        Group of the layer; ``start_w`` (unit, weight...), the common initial parameters, is optional.
    """
    if "start_w" not in layer.data_vars or "client" in layer["start_w"].dims or "unit" not in weights.dims:
        return weights
    is_initial = (weights == layer["start_w"]).all([dim for dim in weights.dims if dim != "unit"]).to_numpy()
    return weights.assign_attrs({REASONS: np.where(is_initial, "never trained", ""), COMMON_START: True})


def hidden_layers(run: xr.DataTree, layers: dict[str, tuple[int, ...]], requested: Sequence[str] | None) -> RunLayers:
    """Select layers of a run, by default all but embeddings and the output layer.

    Parameters
    ----------
    run : DataTree
    layers : dict from layer to tuple of int
        Shapes of the weights of one client.
    requested : sequence of str or None
        Names and patterns.
    """
    if requested is not None:
        return RunLayers(run, match_names(requested, list(layers), "the run"), {})
    last = next((name.rpartition(".")[0] for name in reversed(settings_of(run).get("shapes", {}))), None)
    skipped = find_skipped_layers(layers, last)
    return RunLayers(run, [name for name in layers if name not in skipped], skipped)


def split_layers(tree: Any, requested: Sequence[str] | None) -> RunLayers | None:
    """Return the layers of a run that holds a split of some of them; None for other weights.

    A run holds a split if an algorithm analyzed a layer or shares units of it, in some round. Local training does not.
    """
    if not isinstance(tree, xr.DataTree) or "uploads" in (tree.name, getattr(tree.parent, "name", None)):
        return None
    run = run_of(tree)
    shapes = settings_of(run).get("shapes", {})
    names = list(run.children["split"].children) if "split" in run.children else []
    groups = {name: run.children["split"].children[name] for name in names if shared_by_round(run, name) is not None}
    if not groups:
        return None
    if "w" in tree.data_vars:  # a layer
        is_stored = tree.name in groups and requested is None
        selected = RunLayers(run, [str(tree.name)] if is_stored else [], {})
    else:
        by_layer = {
            name: next((tuple(shape) for key, shape in shapes.items() if key.rpartition(".")[0] == name), ())
            for name in groups
        }
        selected = hidden_layers(run, by_layer, requested)
    is_split = any(bool(groups[name]["shared"].any()) or _is_analyzed(groups[name]) for name in selected.names)
    return selected if is_split else None


def _is_analyzed(group: xr.DataTree) -> bool:
    return any(bool(group[name].notnull().any()) for name in ("communality", "icc") if name in group.data_vars)


def finished_rounds(run: xr.DataTree, layer: str) -> list[int]:
    """Return the rounds of a run that are done and whose split is stored."""
    shared = shared_by_round(run, layer)
    rounds: list[int] = [] if shared is None else shared["round"].values.tolist()
    done = _rounds_done(run)
    return rounds if done is None else [r for r in rounds if r in done]


def _rounds_done(run: xr.DataTree) -> list[int] | None:
    """Return the rounds that are done; None if the run does not tell."""
    metrics = run.children.get("metrics")
    if metrics is None or "seconds" not in metrics.data_vars:
        return None
    seconds = metrics.to_dataset()["seconds"]
    return list(seconds["round"].values[seconds.notnull().to_numpy()])


def require_done(run: xr.DataTree, weights: xr.DataArray) -> None:
    """Raise ValueError if a run has not finished the round at whose end the weights are stored: they are NaN."""
    done, checkpoint = _rounds_done(run), weights.coords.get("checkpoint")
    if "ended" in run.attrs or done is None or checkpoint is None or checkpoint.item() in done:
        return
    raise ValueError(
        f"the run is not finished: it lacks the weights of round {checkpoint.item()}. Continue it with resume=True "
        "(--resume), or select a checkpoint that is done."
    )


def split_at(run: xr.DataTree, layer: str, round: int | None) -> xr.Dataset:  # noqa: A002 - the dim
    """Return the split (unit,) of a layer that a run stored in a round, by default the last one.

    Raises
    ------
    ValueError
        If the round does not exist or is not done.
    """
    rounds = finished_rounds(run, layer)
    if not rounds:
        raise ValueError("the run must have a finished round, but has none. Continue it with resume=True (--resume).")
    number = rounds[-1] if round is None else check.choice("round", round, rounds)
    return run["split"][layer].to_dataset().sel(round=number).load()
