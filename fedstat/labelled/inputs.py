"""Users' weights (arrays, runs, files, state_dicts) by layer, and the baseline of each layer."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from fedstat._utils import check, streams
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat._utils.loops import track
from fedstat.labelled import runs
from fedstat.labelled.dependent_clients import describe_dependence
from fedstat.labelled.layer import Form, Layer, load_small, read_layer
from fedstat.labelled.layer_names import is_pattern, require_names
from fedstat.labelled.runs import Stage
from fedstat.labelled.states import SUFFIXES
from fedstat.results import LayerResults
from fedstat.results.base import DEPENDENCE, Result
from fedstat.results.origin import origin_of, with_origin
from fedstat.store import is_store, open_run

_PATHS = (str, PathLike)
MEAN = "mean"
"""Baseline of :func:`fedstat.client_clusters`: the mean over clients."""

Several: TypeAlias = "xr.DataTree | Mapping[Any, Any] | str | PathLike[str] | Sequence[Any]"
"""Objects that may hold layers: a run or other DataTree, a path, {client: file, state_dict or module}, or a list."""

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Verb(Protocol[P, R]):
    @overload
    def __call__(self, weights: Several, /, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def __call__(self, weights: Any, /, *args: P.args, **kwargs: P.kwargs) -> R: ...


class LayerWeights(NamedTuple):
    """Weights of the selected layers, as the statistics take them.

    Attributes
    ----------
    layers : dict from layer to array, tensor or DataArray (client, unit, weight...)
        The layer of a bare array has the name "".
    several : bool
        True for a result per layer, False for the result of a single layer.
    skipped_layers : dict from layer to reason
        Layers that are not analyzed by default.
    source : Source, optional
        Run that gave the weights.
    """

    layers: dict[str, Any]
    several: bool
    skipped_layers: dict[str, str]
    source: runs.Source | None = None


class Part(NamedTuple):
    """Units of a layer that are analyzed together: their weights, and the baseline."""

    weights: Any
    baseline: Any = None


def _never(**_: object) -> bool:
    return False


def _weights(**_: object) -> Form:
    return "weights"


def by_layer(
    *,
    checks: Callable[..., object] | None = None,
    stored: Callable[..., Any] | None = None,
    analyzes: Callable[..., bool] = _never,
    apart: Callable[..., bool] = _never,
    form: Callable[..., Form] = _weights,
    over_clients: bool = False,
) -> Callable[[Callable[Concatenate[Any, P], R]], _Verb[P, R]]:
    """Extend a verb that is written for one layer to weights in any form that :func:`fedstat.split` takes.

    The verb's body gets a :class:`~fedstat.labelled.layer.Layer`: the checked weights of one layer, and the baseline
    of this layer, or None. It passes the record on to other verbs. It declares ``layer``, ``checkpoint``, ``stage`` and
    ``baseline`` for its signature, and for other verbs: the decorator uses them. For several layers the result is a
    :class:`LayerResults`, and ``progress`` shows how many layers are done; the body shows its loops. Warnings name the
    layer, and so do errors if there are several layers. Weights that a run averaged over clients need a ``stage``, see
    :func:`layers_of`.

    Parameters
    ----------
    checks : callable (**arguments), optional
        Checks the verb's other arguments, defaults included, before weights are read.
    stored : callable (run, layer, **arguments), optional
        Returns the result of a layer that a run holds, in place of an analysis, if there is no ``stage``.
    analyzes : callable (**arguments) -> bool
        Returns True if the arguments ask for an analysis in place of the stored result.
    apart : callable (**arguments) -> bool
        Returns True if the verb compares units, so that shared and personal units of a run that changed over unlike
        numbers of rounds have separate results.
    form : callable (**arguments) -> Form
        Returns the form of the weights. "replicates" takes the replicates of a run.
    over_clients : bool
        True if intervals assume independent clients, and the result does not look for groups of clients, as
        :class:`fedstat.results.IccResult` does. Verbs that take replicates need no True.
    """

    def over_layers(verb: Callable[Concatenate[Any, P], R]) -> _Verb[P, R]:
        signature, one_layer = inspect.signature(verb), cast("Callable[..., R]", verb)

        @wraps(verb)
        def over(*args: Any, **settings: Any) -> Any:
            try:
                call = signature.bind(*args, **settings)
            except TypeError:
                if not settings.keys() <= signature.parameters.keys():
                    raise check.unknown_option(verb.__name__, settings, signature.parameters) from None
                return one_layer(*args, **settings)  # raises the TypeError of the verb's signature
            call.apply_defaults()
            (weights,), settings = call.args, call.kwargs
            if checks is not None:
                checks(**settings)
            arguments, form_of_layer = dict(call.arguments), form(**settings)

            def analyze(layer: Layer) -> R:
                result = one_layer(layer, **settings)
                origin = origin_of(verb, arguments, layer.data)
                if source := layer.attrs.get(runs.SOURCE):
                    origin |= {"weights": source}
                has_groups = arguments.get("groups") is not None
                groups = (over_clients or form_of_layer == "replicates") and not has_groups
                if texts := describe_dependence(layer, groups=groups):
                    origin |= {DEPENDENCE: texts}
                return cast("R", with_origin(cast("Result", result), origin))

            if isinstance(weights, Layer):  # of another verb
                arguments |= {next(iter(arguments)): weights.data}
                return analyze(weights)
            weights, layer, stage = open_if_run(weights), settings["layer"], settings["stage"]
            progress = settings["progress"]
            if stored is not None and stage is None and not analyzes(**settings):
                held = runs.split_layers(weights, _parse_layer(layer))
                if held is not None:
                    origin = origin_of(verb, arguments, None)
                    read = {
                        name: lambda name=name: with_origin(stored(held.run, name, **settings), origin)
                        for name in held.names
                    }
                    return _collect(read, held.skipped_layers, several=_is_several(weights, layer), progress=False)
            selected = layers_of(
                weights, layer, settings["checkpoint"], stage, replicates=form_of_layer == "replicates",
                frame=("client", "value") if form_of_layer == "vectors" else ("row", "unit"), progress=progress,
            )  # fmt: skip
            of_layers = parts(selected, settings.get("baseline"), apart=apart(**settings))
            analyses = {
                name: lambda part=part: analyze(read_layer(load_small(part.weights), part.baseline, form_of_layer))
                for name, part in of_layers.items()
            }
            several, modules = selected.several or len(of_layers) > 1, _modules(selected.layers)
            return _collect(analyses, selected.skipped_layers, modules, several=several, progress=progress)

        return cast("_Verb[P, R]", over)

    return over_layers


def _collect(
    analyses: Mapping[str, Callable[[], Any]],
    skipped_layers: dict[str, str],
    modules: Mapping[str, str] = MappingProxyType({}),
    *,
    several: bool,
    progress: bool | None,
) -> Any:
    """Analyze every layer; return a :class:`LayerResults`, or the result of a single layer."""
    if not several:
        (analyze,) = analyses.values()
        return analyze()
    is_named = len(analyses) > 1
    with track(analyses, "layer", progress) as tracked:
        results = {layer: _name_layer(layer, analyses[layer], in_errors=is_named) for layer in tracked}
    return LayerResults(results, skipped_layers, dict(modules))


def holds_layers(weights: Any) -> bool:
    """Return True for objects that may hold several layers: runs, other trees, mappings, paths, lists of sources."""
    if isinstance(weights, xr.DataTree) and "w" in weights.data_vars:
        return False
    return isinstance(weights, _PATHS) or _is_mapping(weights) or _is_list(weights)


def single_layer(verb: str, weights: Any, stage: Stage | None = None) -> LayerWeights:
    """Return the weights of one layer at the last checkpoint; raise ValueError if an object holds several layers."""
    selected = layers_of(weights, stage=stage)
    layers = selected.layers
    if len(layers) != 1:
        raise ValueError(
            f"{verb} takes the weights of one layer, (client, unit, weight...), but got {check.kind(weights)} "
            f"with the layers {few(layers, 8)}. Choose one: fedstat.fl.client_weights(run, {next(iter(layers))!r}), or "
            f"fedstat.read_weights(...)[{next(iter(layers))!r}]['w']."
        )
    return selected


def layers_of(
    weights: Any,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    *,
    replicates: bool = False,
    frame: tuple[str, str] = ("row", "unit"),
    progress: bool | None = False,
) -> LayerWeights:
    """Select layers of a user's weights at a checkpoint and a stage; arguments as in :func:`fedstat.split`.

    ``replicates`` selects the replicates of a run, and ``frame`` has the dims of the rows and columns of a DataFrame.

    Raises
    ------
    ValueError
        If a layer, checkpoint or stage does not exist. If there is no ``stage`` and a run holds only weights that it
        averaged over clients: shared units are then equal in all clients by construction.
    """
    requested = _parse_layer(layer)
    if stage is not None:
        check.choice("stage", stage, runs.STAGES)
    weights, several = open_if_run(weights), _is_several(weights, layer)
    is_layer = isinstance(weights, xr.Dataset | xr.DataTree) and "w" in weights.data_vars
    if isinstance(weights, xr.DataTree) and not (is_layer and requested):
        several = several and not is_layer
        return _of_tree(weights, requested, checkpoint, stage, replicates=replicates, several=several)
    if stage is not None and not isinstance(weights, xr.DataTree):
        raise ValueError(
            f"stage selects weights of a run, but got stage={stage!r} with {check.kind(weights)}, which does not "
            "tell its stage. Remove it, or pass the run."
        )
    if is_layer and not requested:
        return LayerWeights({"": runs.compare_initial(_at(weights["w"], checkpoint, ""), weights)}, False, {})
    if _is_mapping(weights):
        layers, skipped = _of_files(list(weights.values()), requested, list(weights), progress)
    elif _is_list(weights):
        layers, skipped = _of_files(weights, requested, None, progress)
    elif requested is not None:
        raise ValueError(
            f"layer selects from a run, files or state_dicts, but got layer={layer!r} with one "
            f"{type(weights).__name__}, which is one layer. Remove it."
        )
    elif hasattr(weights, "state_dict"):
        raise ValueError(
            f"weights must be of several clients, but got one {type(weights).__name__}. Pass {{client: model}}."
        )
    else:
        layers, skipped, several = {"": _labels.labelled(weights, frame)}, {}, False
    return LayerWeights({name: _at(w, checkpoint, name) for name, w in layers.items()}, several, skipped)


def _parse_layer(layer: str | Sequence[str] | None) -> list[str] | None:
    """Return the requested names and patterns of layers, None for all hidden layers."""
    if not (layer is None or isinstance(layer, str) or (isinstance(layer, Sequence) and layer)):
        raise ValueError(f"layer must be a name, a pattern such as 'conv*', or a list of these, but got {layer!r}")
    requested = [layer] if isinstance(layer, str) else layer if layer is None else list(layer)
    require_names("layer", requested or ())
    return requested


def _is_several(weights: Any, layer: str | Sequence[str] | None) -> bool:
    """Return True for a result per layer, even if there is only one layer."""
    is_layer = isinstance(weights, xr.Dataset | xr.DataTree) and "w" in weights.data_vars
    return not is_layer and (not isinstance(layer, str) or is_pattern(layer))


def _of_tree(
    tree: xr.DataTree,
    requested: Sequence[str] | None,
    checkpoint: int | None,
    stage: Stage | None,
    *,
    replicates: bool,
    several: bool,
) -> LayerWeights:
    """Select layers of a run or of another tree, at a checkpoint and a stage."""
    run = runs.run_of(tree)
    is_run = run.attrs.get("command") in runs.COMMANDS
    group = runs.replicates_of(run) if replicates and is_run and stage is None else runs.group_of(tree, stage)
    layers = {str(name): node.to_dataset() for name, node in group.children.items() if "w" in node.data_vars}
    skipped: dict[str, str] = {}
    is_layer = "w" in tree.data_vars
    if is_layer:
        layers = {name: data for name, data in layers.items() if name == tree.name} or {"": tree.to_dataset()}
    elif not layers:
        hint = "Pass a run that stored weights, or the result of fedstat.read_weights."
        if runs.OF_STUDY in tree.attrs:
            hint = "A study keeps those of its first replicate, unless it has keep_weights='none'."
        elif is_run:
            hint = runs.why_not_trained(run)
        elif "split" in tree.children:
            hint = "It holds splits, which fedstat.load(path) reads."
        raise ValueError(f"the run must hold weights, but has {few(sorted(tree.children), 8) or 'nothing'}. {hint}")
    else:
        lead = ("checkpoint", "client", "replicate")
        shapes = {name: tuple(n for d, n in x["w"].sizes.items() if d not in lead) for name, x in layers.items()}
        _, names, skipped = runs.hidden_layers(run, shapes, requested)
        layers = {name: layers[name] for name in names}
    source = runs.Source(run, str(group.name)) if is_run else None
    selected: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, data in layers.items():
        weights = runs.compare_initial(_at(data["w"], checkpoint, "" if is_layer else name), data)
        runs.require_done(run, weights)
        if group.name == "weights" and stage is None and (units := runs.shared_units(run, name, weights)) is not None:
            shared[name] = units
        weights = runs.describe_units(run, name, weights, trained=group.name == "trained")
        selected["" if is_layer else name] = source.select(name, weights) if source is not None else weights
    runs.require_unshared(run, shared)
    return LayerWeights(selected, several, skipped, source)


def _of_files(
    sources: Sequence[Any],
    requested: Sequence[str] | None,
    clients: Sequence[Any] | None,
    progress: bool | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    from fedstat.labelled.weight_files import read_layers

    if wrong := [x for x in sources if not _is_source(x) or isinstance(x, xr.Dataset)]:
        raise ValueError(
            "a mapping or list of weights must hold a state_dict, a module or a file for each client, but got "
            f"{check.kind(wrong[0])}. Pass {{client: state_dict}}, or for one layer an array (client, unit, "
            "weight...)."
        )
    sources = [Path(x) if isinstance(x, PathLike) else x for x in sources]
    tree, skipped = read_layers(sources, requested, clients, hidden=True, progress=progress)
    return {str(name): node["w"] for name, node in tree.children.items()}, skipped


def _is_source(x: object) -> bool:
    """Return True if an object may be a client's file, state_dict or module."""
    return isinstance(x, (*_PATHS, Mapping)) or hasattr(x, "state_dict")


def _is_list(weights: object) -> bool:
    """Return True for a list of clients' files, state_dicts or modules."""
    return isinstance(weights, list | tuple) and bool(weights) and all(_is_source(x) for x in weights)


def _is_mapping(weights: object) -> bool:
    """Return True for a mapping from client to file, state_dict or module, or from layer to group."""
    return isinstance(weights, Mapping) and not isinstance(weights, xr.Dataset | LayerResults)


def open_if_run(weights: Any) -> Any:
    """Open the run at a path, and list the files of other paths; return other weights as they are."""
    if isinstance(weights, xr.DataTree):
        return runs.run_of_study(weights)
    sources = [weights] if isinstance(weights, _PATHS) else weights
    if not (isinstance(sources, list | tuple) and sources and all(isinstance(x, _PATHS) for x in sources)):
        return weights
    paths = [path for source in sources for path in _expand(fspath(source))]
    stores = [path for path in paths if is_store(path)]
    if not stores:
        return paths
    if len(paths) > 1:
        raise ValueError(
            f"{stores[0]} is a run, which holds all its clients, but got {len(paths)} paths. Pass one run, or files of "
            "clients."
        )
    return runs.run_of_study(open_run(stores[0]))


def _expand(name: str) -> list[Path]:
    """Return the clients' files or the store of a path: itself, a folder's files, or the matches of a pattern."""
    path = Path(name)
    if not name:
        raise ValueError("a path must name files of clients or a run, but got ''")
    if is_store(path) or path.is_file() or (os.path.lexists(path) and not path.is_dir()):
        return [path]  # the reader raises for special files such as pipes
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        if files:
            return files
        stores = sorted(entry.name for entry in path.iterdir() if is_store(entry))
        hint = f" It holds the runs {few(stores)}: pass one of them." if stores else ""
        raise ValueError(f"the folder {path} holds no files of clients ({', '.join(SUFFIXES)}).{hint}")
    if is_pattern(name):
        if not (files := sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))):
            raise FileNotFoundError(f"no file matches the pattern {name!r}. Check it, and the folder {Path.cwd()}.")
        return files
    siblings = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise FileNotFoundError(
        f"there is no file {name}, and no folder or run of that name.{check.did_you_mean(path, siblings, cutoff=0.6)}"
    )


def _at(w: Any, checkpoint: int | None, layer: str) -> Any:
    """Select the weights at a checkpoint, by default the last."""
    if isinstance(w, xr.DataArray) and {"checkpoint", "client"} <= {*w.dims}:
        if checkpoint is None:
            return w.isel(checkpoint=-1)
        rounds = w["checkpoint"].values.tolist()
        return w.sel(checkpoint=check.choice("checkpoint", checkpoint, rounds))
    if checkpoint is not None and not (isinstance(w, xr.DataArray) and w.coords.get("checkpoint") == checkpoint):
        name = f"layer {layer!r}" if layer else "the array"
        raise ValueError(f"{name} has no dim checkpoint, but got checkpoint={checkpoint!r}. Remove it.")
    return w


def parts(selected: LayerWeights, baseline: Any, *, apart: bool = False) -> dict[str, Part]:
    """Return what is analyzed: layers or, ``apart``, units that changed over like numbers of rounds, with baselines."""
    layers, source = selected.layers, selected.source
    is_held = isinstance(baseline, str) and baseline in (runs.AUTO, *runs.COMMON)
    if source is None and is_held and baseline != runs.AUTO:
        raise ValueError(f"baseline={baseline!r} names values that a run of fedstat.fl holds. Pass the run as weights.")
    baselines = dict.fromkeys(layers) if is_held else _baselines(baseline, selected)
    if source is None:
        return {name: Part(w, baselines[name]) for name, w in layers.items()}
    analyzed: dict[str, Part] = {}
    for name, w in layers.items():
        change = source.change(w, baseline) if is_held else None
        if change is None:
            is_given = baselines[name] is not None and not _is_mean(baseline)
            analyzed[name] = Part(source.described(w, given=is_given), baselines[name])
            continue
        for units_name, units in (change.apart() if apart else {"": slice(None)}).items():
            title = ", ".join(text for text in (name, units_name) if text)
            part, reasons = change.of_units(units), {runs.REASONS: w.attrs[runs.REASONS][units]}
            weights = w.isel(unit=units).assign_attrs(part.attrs | reasons)
            analyzed[title] = Part(source.described(weights, part), part.baseline)
    return analyzed


def _baselines(baseline: Any, selected: LayerWeights) -> dict[str, Any]:
    """Return the baseline of every layer that a user gives; the name "mean" stays as it is."""
    layers = selected.layers
    if baseline is None or _is_mean(baseline):
        return dict.fromkeys(layers, baseline)
    if callable(getattr(baseline, "init", None)) and hasattr(baseline, "shapes"):
        return {name: _initial(baseline, selected.source, name) for name in layers}
    module = hasattr(baseline, "state_dict")
    if not (module or isinstance(baseline, (xr.DataTree, Mapping, *_PATHS))) or isinstance(baseline, xr.Dataset):
        if len(layers) > 1:
            raise ValueError(
                f"there must be a baseline for each of the layers {few(layers, 8)}, but got one "
                f"{type(baseline).__name__}. Pass a file or state_dict of the initial model of all clients, or select "
                "one layer."
            )
        return dict.fromkeys(layers, _labels.labelled(baseline))
    is_missing = isinstance(baseline, str) and not is_pattern(baseline) and not os.path.lexists(baseline)
    if "" in layers and not is_missing:
        raise ValueError(
            "baseline of one array of weights must be an array (unit, weight...), but got "
            f"{type(baseline).__name__}. Pass the array of this layer."
        )
    if is_missing:
        raise ValueError(
            f"baseline must be {', '.join(map(repr, (*runs.COMMON, None)))}, an array, a Net, a state_dict or a path "
            f"that exists, but got {baseline!r}.{check.did_you_mean(baseline, [*runs.COMMON, 'none'])}"
        )
    is_single = module or (isinstance(baseline, Mapping) and not isinstance(baseline, xr.DataTree))
    baseline = [baseline] if is_single else open_if_run(baseline)
    is_run = isinstance(baseline, xr.DataTree) and baseline.attrs.get("command") in runs.COMMANDS
    arrays = layers_of(baseline, list(layers), stage="aggregated" if is_run else None).layers
    for name, w in arrays.items():
        layouts = w.attrs.get("layout"), getattr(layers[name], "attrs", {}).get("layout")
        if None not in layouts and layouts[0] != layouts[1]:
            raise ValueError(
                f"layer {name!r} has different layouts of units in baseline and weights: a module's class determines "
                "them, or a state_dict's names and shapes. Pass both as modules, or both as state_dicts."
            )
    return {name: _common(w, name) for name, w in arrays.items()}


def _is_mean(baseline: Any) -> bool:
    return isinstance(baseline, str) and baseline == MEAN


def _initial(net: Any, source: runs.Source | None, layer: str) -> Any:
    """Draw the initial weights (unit, weight) of a layer of a ``fedstat.fl.nets.Net``, with the seed of the run."""
    if source is None:
        raise ValueError(
            "baseline is a Net, whose initial parameters depend on the seed of a run, but the weights are of no run. "
            "Pass net.init(numpy.random.default_rng(seed)), or the state_dict of the initial model."
        )
    params = net.init(streams.generator(int(runs.settings_of(source.run)["seed"]), "start"))
    if (name := f"{layer}.weight") not in params:
        raise ValueError(
            f"the Net of baseline has no layer {layer!r}, but {few(sorted(params), 8)}. Use baseline='initial', the "
            "initial parameters that the run holds."
        )
    return params[name].flatten(1).numpy()


def _common(w: xr.DataArray, layer: str) -> Any:
    """Return the common weights (unit, weight...); raise ValueError if clients differ."""
    if "client" not in w.dims:
        return w.to_numpy()
    values = w.transpose("client", "unit", ...).to_numpy()
    if not (values == values[:1]).all():
        raise ValueError(
            f"baseline must be common to all clients, but its layer {layer!r} differs between {len(values)} clients. "
            "Pass one model, or subtract each client's baseline from its weights."
        )
    return values[0]


def _modules(layers: Mapping[str, Any]) -> dict[str, str]:
    """Return class and shape of the layers that are torch modules with an index for a name."""
    kinds = {name: getattr(w, "attrs", {}).get("module") for name, w in layers.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, str)}


def _name_layer(layer: str, analyze: Callable[[], R], *, in_errors: bool) -> R:
    """Analyze a layer; name it in warnings, and in plain ValueErrors if ``in_errors``."""
    with warnings.catch_warnings(record=True) as messages:
        try:
            result = analyze()
        except ValueError as error:
            if type(error) is ValueError and in_errors:
                raise ValueError(f"layer {layer!r}: {error}") from error
            raise
    for message in messages:
        check.warn(f"{layer}: {message.message}", message.category)
    return result
