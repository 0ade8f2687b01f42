"""Stored runs as the verbs take them: weights at a stage of the round, what clients had in common, stored splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.layer import KNOWN, UNLIKE
from fedstat.labelled.layer_names import find_skipped_layers, match_names
from fedstat.results.tables import count

Stage = Literal["trained", "aggregated"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""After local training, only of the clients selected in that round; and as clients predict, after aggregation."""
Common = Literal["common", "download", "initial"]
COMMON: tuple[Common, ...] = get_args(Common)
"""Baselines that a run holds: the last common values, the values with which clients began the round, initial values."""
GROUPS: dict[Stage, str] = {"trained": "trained", "aggregated": "weights"}
"""Group of a run by stage."""
REASONS, COMMON_START, CLASSES, SOURCE = "unit_reasons", "common_start", "skewed_classes", "fedstat_source"
"""Attributes of weights: why a unit may be identical in all clients; how a common start may make clients agree, and
whether units are classes that some clients lack, see :class:`fedstat.results.IccResult`; and the run's weights in words
of a print, see :meth:`Source.described`."""


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
    return node.parent if node.parent is not None and node.name in GROUPS.values() else node


_DESIGN = ("p", "alpha", "method", "replicate")
"""Dims of a simulation study, a run each; weights are those of the first replicate."""
OF_STUDY = "of_study"
"""Attribute of a run: its place in a simulation study."""


def run_of_study(tree: xr.DataTree) -> xr.DataTree:
    """Return the selected run of a simulation study as a run; return other trees unchanged.

    Raises
    ------
    ValueError
        If several runs are selected, or another replicate than the first, or the study holds no weights of the run.
    """
    if tree.attrs.get("command") != "fedstat.sim":
        return tree
    design = {dim: values for node in tree.subtree for dim, values in node.coords.items() if dim in _DESIGN}
    if several := [dim for dim in _DESIGN[:-1] if dim in design and design[dim].size > 1]:
        numbers = " and ".join(f"{design[dim].size} values of {dim}" for dim in several)
        choice = {dim: design[dim].values.tolist()[-1] for dim in several}
        raise ValueError(f"weights must be of one run, but the study has {numbers}. Pass one, as study.sel({choice})")
    where = {dim: design[dim].values.ravel().tolist()[0] for dim in _DESIGN if dim in design}
    run = tree.isel(dict.fromkeys(_DESIGN, 0), missing_dims="ignore")
    if where["replicate"]:
        run = run.filter(lambda node: not {*node.path.split("/")} & {*GROUPS.values(), "common"})
    config = json.dumps(settings_of(tree) | {"algorithm": where["method"]})
    run.attrs = {
        "command": "fedstat.fl", "config": config, OF_STUDY: ", ".join(f"{dim} {x}" for dim, x in where.items()),
    }  # fmt: skip
    return run


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
        A run, one of its groups ``weights`` and ``trained``, a layer of these, or weights of other origin.
    stage : {"trained", "aggregated"} or None
        None: the stage of the group, and of a run "trained" if it holds such weights, else "aggregated".

    Raises
    ------
    ValueError
        If the run has no weights of this stage, or the group is of another stage.
    """
    group = tree.parent if tree.parent is not None and "w" in tree.data_vars else tree
    run = run_of(tree)
    if stage is None:
        stored = (run.children[name] for name in GROUPS.values() if name in run.children)
        return group if group.name in GROUPS.values() else next(stored, group)
    if group.name == "trained" and stage != "trained":
        raise ValueError(f"stage must be 'trained' for weights before aggregation, but got {stage!r}. Pass the run.")
    if (name := GROUPS[stage]) not in run.children:
        groups = few(sorted(map(str, run.children)), 8) or "nothing"
        hint = f"{why_not_trained(run)} Set stage='aggregated' (--stage aggregated) for the weights after averaging."
        if stage == "aggregated":
            hint = "Remove stage, or pass a run of fedstat.fl, which holds weights of both stages."
        raise ValueError(f"the run holds no weights at stage {stage!r}, only {groups}. {hint}")
    return run.children[name]


def why_not_trained(run: xr.DataTree) -> str:
    """Return the reason why a run holds no weights before averaging, and what to do."""
    if "privacy" in settings_of(run):
        return (
            "A private run stores them only with probe='trained-weights' (--probe trained-weights), as noise does not "
            "protect them."
        )
    if run.attrs.get("command") == "fedstat.flower":
        return "In a federation with Flower they do not leave the clients."
    return "Train again without keep_weights=[] (--keep-weights none)."


def replicates_of(tree: xr.DataTree) -> xr.DataTree:
    """Return the group with the layers' weights of split-half training, (checkpoint, client, replicate, unit, weight).

    Raises
    ------
    ValueError
        If the run has none.
    """
    run = run_of(tree)
    if "replicates" not in run.children:
        differ = "common" in run.children and not any(
            bool(node["downloaded"].any()) for node in run["common"].children.values()
        )
        hint = (
            "Its algorithm has no shared entries that all clients download alike, so that halves of a client's samples "
            "show no training noise."
            if differ and "split-half" in str(settings_of(run).get("probe"))
            else "Train it with probe='split-half' (--probe split-half)."
        )
        raise ValueError(f"the run holds no replicates, two trainings of each client. {hint}")
    return run.children["replicates"]


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
    before = "Analyze the weights before averaging: pass the run, or stage='trained'"
    before = before if "trained" in run.children else f"It holds no weights before averaging. {why_not_trained(run)}"
    rest = [layer for layer in shared if layer not in averaged]
    hint = f", or select layers without shared units: layer={rest!r}" if rest else ""
    raise ValueError(
        f"the run's weights are averaged over clients: shared units are equal in all clients by construction, here "
        f"{few(numbers, 4)}. {before.rstrip('.')}. Or analyze these averaged weights nevertheless by "
        f"stage='aggregated' (--stage in commands){hint}."
    )


def describe_units(run: xr.DataTree, layer: str, weights: xr.DataArray, *, trained: bool) -> xr.DataArray:
    """Add the reasons why units may be identical in all clients as an attribute, if known.

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
    return weights.assign_attrs({REASONS: reasons, COMMON_START: "initial"})


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
    return weights.assign_attrs({REASONS: np.where(is_initial, "never trained", ""), COMMON_START: "initial"})


AUTO = "auto"
"""Default of ``baseline``: the last common values for the weights of a run before averaging, if it holds them; else
nothing."""
COMMANDS = ("fedstat.fl", "fedstat.flower")
"""Commands that write runs."""
_LAYER, _OF = "layer", "of_clients"
"""Attributes of a run's weights: their layer, and the number of all clients."""


class Source(NamedTuple):
    """Run that gave weights, and its group that holds them: trained, weights or replicates."""

    run: xr.DataTree
    group: str

    @property
    def stage(self) -> Stage:
        """Stage of the weights."""
        return "aggregated" if self.group == "weights" else "trained"

    def select(self, layer: str, weights: xr.DataArray) -> xr.DataArray:
        """Drop clients that were not selected and, of replicates, personal units; note the layer and all clients.

        Raises
        ------
        ValueError
            If no client was selected, or no unit was shared.
        """
        attrs = {_LAYER: layer, _OF: weights.sizes["client"], CLASSES: has_skewed_classes(self.run, layer)}
        weights = weights.assign_attrs(attrs)
        if self.group == "weights":
            return weights
        weights, number = drop_unselected(weights), int(weights["checkpoint"])
        if not weights.sizes["client"]:
            raise ValueError(f"no client was selected in round {number}. Choose another checkpoint.")
        if self.group == "replicates":
            downloaded = self.run["common"][layer].to_dataset()["downloaded"].sel(checkpoint=number).to_numpy()
            if not downloaded.any():
                raise ValueError(
                    f"layer {layer!r} has no shared units in round {number}. Replicates of a personal unit start from "
                    "what the client learned before, including noise. Choose other layers."
                )
            weights = weights.isel(unit=np.flatnonzero(downloaded))
        return weights

    def change(self, weights: xr.DataArray, baseline: str) -> Change | None:
        """Return a baseline that the run holds; None for "auto" if the run holds none."""
        layer, checkpoint = weights.attrs[_LAYER], weights.coords.get("checkpoint")
        groups = self.run["common"].children if "common" in self.run.children else {}
        rounds = groups[layer]["checkpoint"].to_numpy() if layer in groups else ()
        is_held = checkpoint is not None and checkpoint.item() in rounds
        if baseline == AUTO and (self.group != "trained" or not is_held):
            return None
        if not is_held:
            raise ValueError(
                f"the run holds no values of layer {layer!r} that clients had in common, but got "
                f"baseline={baseline!r}. {why_not_trained(self.run)} Or pass the initial parameters, or baseline=None."
            )
        return change_since(self.run, layer, weights, "common" if baseline == AUTO else baseline)  # type: ignore[arg-type]

    def described(self, weights: xr.DataArray, change: Change | None = None, *, given: bool = False) -> xr.DataArray:
        """Add a clause of a print as an attribute: stage of the weights, round, clients, and what is subtracted."""
        stages = {"trained": "before averaging", "weights": "after averaging", "replicates": "of split-half training"}
        n, of = weights.sizes["client"], weights.attrs[_OF]
        clients = count(n, "client") if n == of else f"{n} of {count(of, 'client')}"
        parts = [stages[self.group], f"round {int(weights['checkpoint'])}", clients]
        parts += [self.run.attrs[OF_STUDY]] if OF_STUDY in self.run.attrs else []
        if self.group != "weights" and "privacy" in settings_of(self.run):
            parts.append("which differential privacy does not protect")
        n_units = self.run[self.group][weights.attrs[_LAYER]].sizes["unit"]
        if self.group == "replicates" and weights.sizes["unit"] < n_units:
            parts.append(f"the {count(weights.sizes['unit'], 'unit')} that clients share")
        if given:
            parts.append("minus the given baseline")
        if change is not None:
            parts.append(f"minus {change.describe()}")
        return weights.assign_attrs({SOURCE: ", ".join(parts)})


class Change(NamedTuple):
    """Baseline of the weights of a run's layer.

    Attributes
    ----------
    baseline : DataArray (unit, weight...) or (client, unit, weight...)
    text : str
        Name of the baseline in prints.
    rounds : int array (unit,)
        Number of rounds, the last one included, over which each unit changed since the baseline. An upper bound if
        clients missed rounds.
    shared : bool array (unit,)
        True for units that all clients downloaded alike in the last round.
    """

    baseline: xr.DataArray
    text: str
    rounds: NDArray[np.int64]
    shared: NDArray[np.bool_]

    @property
    def is_mixed(self) -> bool:
        """True if shared and personal units changed over unlike numbers of rounds."""
        return bool(self.shared.any()) and bool(self.rounds.min() < self.rounds.max())

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the weights."""
        return {COMMON_START: "rounds" if self.rounds.max() > 1 else "", UNLIKE: self.is_mixed}

    def apart(self) -> dict[str, Any]:
        """Return the units that changed over like numbers of rounds, by name; "" for all units."""
        if not self.is_mixed:
            return {"": slice(None)}
        return {"shared": np.flatnonzero(self.shared), "personal": np.flatnonzero(~self.shared)}

    def of_units(self, units: Any) -> Change:
        """Return the change of some units."""
        return Change(self.baseline.isel(unit=units), self.text, self.rounds[units], self.shared[units])

    def describe(self) -> str:
        """Return the name of the baseline, with the numbers of rounds."""
        if not self.is_mixed:
            return f"{self.text} (change over {_count_rounds(self.rounds)})"
        shared, personal = (_count_rounds(self.rounds[units]) for units in (self.shared, ~self.shared))
        return f"{self.text} (change over {shared} in shared units, over {personal} in personal units)"


def _count_rounds(rounds: NDArray[np.int64]) -> str:
    low, high = int(rounds.min()), int(rounds.max())
    return count(high, "round") if low == high else f"{low} to {count(high, 'round')}"


def change_since(run: xr.DataTree, layer: str, weights: xr.DataArray, baseline: Common) -> Change:
    """Return one of the baselines that a run holds for the weights of a layer.

    Parameters
    ----------
    run : DataTree
    layer : str
    weights : DataArray
        At one checkpoint.
    baseline : {"common", "download", "initial"}
        The last common value of each entry: its value when the client last downloaded it while it was shared, or its
        initial value. Or the values with which the client began the round. Or the initial parameters.

    Raises
    ------
    ValueError
        If ``baseline`` is "download", and the run does not hold the personal weights of the previous round.
    """
    number = int(weights["checkpoint"])
    stored = run["common"][layer].to_dataset().sel(checkpoint=number).load()
    downloaded = stored["downloaded"].to_numpy().astype(bool)

    def change(values: xr.DataArray, text: str, rounds: Any) -> Change:
        return Change(values.assign_attrs({KNOWN: True}), text, np.broadcast_to(rounds, downloaded.shape), downloaded)

    if baseline == "initial":
        return change(stored["initial_w"], "the initial parameters", number)
    common = stored["w"].sel(client=weights["client"]) if "client" in stored["w"].dims else stored["w"]
    if baseline == "common":
        text = "the initial parameters" if bool((common == stored["initial_w"]).all()) else "the last common value"
        return change(common, text, np.where(downloaded, 1, _rounds_as_personal(run, layer, number, len(downloaded))))
    text = "the values that clients downloaded in this round"
    if number == 1 or downloaded.all():
        return change(common, text, 1)
    earlier = run["weights"][layer].to_dataset()["w"] if "weights" in run.children else None
    rounds = [] if earlier is None else earlier["checkpoint"].to_numpy().tolist()
    if earlier is None or number - 1 not in rounds:
        raise ValueError(
            f"baseline='download' needs the personal weights with which clients began round {number}, but the run "
            f"stores weights after round(s) {few(rounds) or 'none'}. Train it with checkpoints=[{number - 1}], or use "
            "baseline='common'."
        )
    return change(earlier.sel(checkpoint=number - 1, client=weights["client"]).load(), text, 1)


def _rounds_as_personal(run: xr.DataTree, layer: str, number: int, n_units: int) -> NDArray[np.int64]:
    """Return the number of rounds (unit,) since a unit was last downloaded as shared, until a round inclusive.

    Units whose sharing never changed are personal from the start.
    """
    shared = shared_by_round(run, layer)
    history = np.zeros((0, n_units), bool) if shared is None else shared.sel(round=slice(None, number - 1)).to_numpy()
    changes = (history != history[:1]).any(axis=0) & history.any(axis=0)
    last = np.where(changes, len(history) - np.argmax(history[::-1], axis=0) if len(history) else 0, 0)
    # The mask after round r is that of the download in round r + 1.
    return np.asarray(number - last, int)


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
    skipped = find_skipped_layers(layers, output_layer(run))
    return RunLayers(run, [name for name in layers if name not in skipped], skipped)


def output_layer(run: xr.DataTree) -> str | None:
    """Return the name of a run's last layer; None if the run does not tell."""
    return next((name.rpartition(".")[0] for name in reversed(settings_of(run).get("shapes", {}))), None)


def has_skewed_classes(run: xr.DataTree, layer: str) -> bool:
    """Return True if a layer is a run's output layer, and some clients have no training samples of some class."""
    clients = run.children.get("clients")
    if layer != output_layer(run) or clients is None or "n_train" not in clients.data_vars:
        return False
    return "class" in clients["n_train"].dims and bool((clients["n_train"] == 0).any())


def split_layers(tree: Any, requested: Sequence[str] | None) -> RunLayers | None:
    """Return the layers of a run that holds a split of some of them; None for other weights.

    A run holds a split if an algorithm analyzed a layer or shares units of it, in some round. Local training does not.
    """
    if not isinstance(tree, xr.DataTree) or "trained" in (tree.name, getattr(tree.parent, "name", None)):
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
