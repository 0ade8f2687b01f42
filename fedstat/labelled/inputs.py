"""Weights as users hold them (arrays, runs, files, state_dicts), and their initial parameters."""

from __future__ import annotations

import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import Weights, labels, need_dims, numpy_of
from fedstat.labelled.layer_names import is_pattern, left_out, matching, require_names
from fedstat.labelled.states import SUFFIXES
from fedstat.results import ByLayer
from fedstat.store import is_store, open_run

_FEW = 8  # clients whose mean is compared with the baseline
_APART = 3.0  # standard errors


def subtract_baseline(weights: Weights, baseline: Any) -> Weights:
    """Subtract the baseline, if there is one."""
    if baseline is None:
        return weights
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        one = weights.isel(client=0, drop=True).transpose("unit", ...)
        origin = baseline_of(baseline, weights, np.empty(0)).reshape(one.shape)
        require_related(origin, weights.isel(client=slice(_FEW)).transpose("client", *one.dims).to_numpy())
        return weights.astype(float) - xr.DataArray(origin, dims=one.dims)
    weights = check.numbers("weights", weights)
    origin = baseline_of(baseline, weights, weights).reshape(weights.shape[1:])
    require_related(origin, weights)
    return weights.double() - origin.double() if is_torch_array(weights) else weights.astype(float) - origin


def baseline_of(baseline: Any, weights: Weights, w: Any) -> Any:
    """Return the baseline as an array (unit, weight) of the kind of ``w``."""
    baseline = check.numbers("baseline", baseline)
    baseline = baseline.detach() if is_torch_array(baseline) else baseline
    shape = tuple(np.shape(weights))[1:]
    if isinstance(weights, xr.DataArray):
        one = weights.isel(client=0, drop=True).transpose("unit", ...)
        shape = one.shape
        if isinstance(baseline, xr.DataArray):
            baseline = _aligned(baseline, one)
    if isinstance(baseline, xr.DataArray):
        need_dims(baseline, "unit")
        baseline = baseline.transpose("unit", ...).to_numpy()
    if tuple(baseline.shape) != tuple(shape):
        raise ValueError(
            f"baseline must have the shape of one client's weights, {tuple(shape)}, but got {tuple(baseline.shape)}. "
            "It is common to all clients; subtract client-specific baselines from the weights."
        )
    baseline = baseline.reshape(shape[0], -1)
    if is_torch_array(w):
        baseline = array_namespace(w).asarray(baseline, device=device_of(w))
    else:
        baseline = numpy_of(baseline)
    if not (finite := np.isfinite(numpy_of(baseline)).all(axis=1)).all():
        raise ValueError(
            f"baseline holds NaN or infinite values, first in unit(s) {few(labels(weights, 'unit', 1)[~finite])}"
        )
    return baseline


def require_related(baseline: Any, w: Any) -> None:
    """Refuse a baseline that has nothing to do with the weights: what is subtracted from all clients, all agree on.

    With weights that it was drawn without, a baseline of independent entries has a correlation of variance 1 over their
    number, however alike neighbouring weights are. Of a baseline without variance nothing is asked.

    Parameters
    ----------
    baseline : array (unit, weight)
    w : array (client, unit, weight)
        Of some clients; the mean of up to eight is looked at.

    Raises
    ------
    ValueError
        If the correlation with this mean is not three standard errors above 0.
    """
    origin, mean = numpy_of(baseline).astype(float).ravel(), numpy_of(w[:_FEW]).astype(float).mean(axis=0).ravel()
    if np.ptp(origin) == 0 or not np.isfinite(mean).all() or np.ptp(mean) == 0:
        return
    r = float(np.corrcoef(origin / np.abs(origin).max(), mean / np.abs(mean).max())[0, 1])
    if r * math.sqrt(len(mean)) < _APART:
        raise ValueError(
            f"baseline has a correlation of {r:.2f} with the weights: clients did not start there, or have left it. "
            "Subtracting it would make them agree. Use the parameters that training started from, or leave it out."
        )


def _aligned(baseline: xr.DataArray, one: xr.DataArray) -> xr.DataArray:
    """The baseline with the dims and labels of one client's weights, in their order."""
    if set(baseline.dims) != set(one.dims):
        raise ValueError(
            f"baseline must have the dims of one client's weights, {one.dims}, but got {baseline.dims}. "
            "Select one checkpoint first; the baseline is common to all clients."
        )
    own = [d for d in map(str, one.dims) if d in baseline.coords]  # the labels of what has none are positions
    at = {d: _labels.order("baseline", d, *(x[d].to_numpy().tolist() for x in (baseline, one))) for d in own}
    return baseline.isel(at).transpose(*one.dims)


_PATHS = (str, PathLike)

Several: TypeAlias = "xr.DataTree | Mapping[Any, Any] | str | PathLike[str] | Sequence[Any]"
"""What may hold layers: a run or other DataTree, a path, {client: file, state_dict or module}, a list of these."""

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Verb(Protocol[P, R]):
    @overload
    def __call__(self, weights: Several, /, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def __call__(self, weights: Any, /, *args: P.args, **kwargs: P.kwargs) -> R: ...


class Given(NamedTuple):
    """Weights as the statistics take them.

    Attributes
    ----------
    layers : dict from layer to array, tensor or DataArray (client, unit, weight...)
        One without a name, "", for an array.
    several : bool
        Whether the result is one a layer, rather than that of a single one.
    left_out : dict from layer to reason
    """

    layers: dict[str, Any]
    several: bool
    left_out: dict[str, str]


def by_layer(
    *, checks: Callable[..., object] | None = None
) -> Callable[[Callable[Concatenate[Any, P], R]], _Verb[P, R]]:
    """Let a verb that is written for one layer take weights in any form that :func:`fedstat.split` takes.

    The verb's body gets the weights of one layer, (client, unit, weight...), and as its baseline what the clients of
    this layer started from, None without one. It declares ``layer`` and ``checkpoint`` for its signature alone: they
    are used here. Of several layers the result is a :class:`ByLayer`; warnings, and errors of one of several layers,
    name the layer.

    Parameters
    ----------
    checks : callable (**arguments), optional
        Of the verb's other arguments, defaults included; called once, before weights are read.
    """

    def over_layers(verb: Callable[Concatenate[Any, P], R]) -> _Verb[P, R]:
        signature, one_layer = inspect.signature(verb), cast("Callable[..., R]", verb)

        @wraps(verb)
        def over(*args: Any, **settings: Any) -> Any:
            try:
                call = signature.bind(*args, **settings)
            except TypeError:
                return one_layer(*args, **settings)  # which says what is wrong with the call
            call.apply_defaults()
            if checks is not None:
                _, *others = call.arguments
                checks(**{name: call.arguments[name] for name in others})
            (weights,), settings = call.args, call.kwargs
            given = layers_of(weights, settings.pop("layer"), settings.pop("checkpoint"))
            baselines = _baselines(settings.pop("baseline"), given)

            def analyse(layer: str) -> R:
                return one_layer(given.layers[layer], baseline=baselines[layer], **settings)

            if not given.several:
                return analyse(*given.layers)
            several = len(given.layers) > 1
            results = {layer: _naming(layer, partial(analyse, layer), several=several) for layer in given.layers}
            return ByLayer(results, given.left_out)

        return cast("_Verb[P, R]", over)

    return over_layers


def layers_of(weights: Any, layer: str | Sequence[str] | None = None, checkpoint: int | None = None) -> Given:
    """Find the layers that are meant in what a user holds, at a checkpoint; arguments as in :func:`fedstat.split`."""
    if not (layer is None or isinstance(layer, str) or (isinstance(layer, Sequence) and layer)):
        raise ValueError(f"layer must be a name, a pattern such as 'conv*', or a list of these, but got {layer!r}")
    asked = [layer] if isinstance(layer, str) else layer if layer is None else list(layer)
    require_names("layer", asked or ())
    several = not isinstance(layer, str) or is_pattern(layer)
    if isinstance(weights, xr.Dataset | xr.DataTree) and "w" in weights.data_vars:  # a layer of a run
        weights = weights["w"]
    if isinstance(weights, xr.DataTree):
        found, without = _of_tree(weights, asked)
    elif isinstance(weights, Mapping) and not isinstance(weights, xr.Dataset):
        found, without = _of_files(list(weights.values()), asked, list(weights))
    elif isinstance(weights, _PATHS):
        found, without = _of_paths([weights], asked)
    elif isinstance(weights, list | tuple) and weights and all(_is_source(x) for x in weights):
        every = all(isinstance(x, _PATHS) for x in weights)
        found, without = _of_paths(weights, asked) if every else _of_files(weights, asked, None)
    elif asked is not None:
        raise ValueError(
            f"layer chooses from a run, files or state_dicts, but got layer={layer!r} with one "
            f"{type(weights).__name__}, which is one layer. Leave it out."
        )
    elif hasattr(weights, "state_dict"):
        raise ValueError(
            f"weights must be those of several clients, but got one {type(weights).__name__}. Pass {{client: model}}."
        )
    else:
        found, without, several = {"": _labels.labelled(weights, ("row", "unit"))}, {}, False
    return Given({name: _at(w, checkpoint, name) for name, w in found.items()}, several, without)


def layers_of_run(run: xr.DataTree) -> dict[str, xr.DataArray]:
    """Weights of a run's layers, in the order of the network."""
    held = run.children.get("weights", run)
    return {str(name): node.dataset["w"] for name, node in held.children.items() if "w" in node.data_vars}


def _settings(run: xr.DataTree) -> dict[str, Any]:
    found = json.loads(run.root.attrs.get("config", "{}"))
    return found if isinstance(found, dict) else {}


def _of_tree(tree: xr.DataTree, asked: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    there = layers_of_run(tree)
    if not there:
        way_out = "Give a run that kept weights, or what fedstat.read_weights returns."
        if "split" in tree.children:
            way_out = "It holds splits, which fedstat.read_split(path) reads."
        raise ValueError(f"the run must hold weights, but has {few(sorted(tree.children), 8) or 'nothing'}. {way_out}")
    if asked is not None:
        return {name: there[name] for name in matching(asked, list(there), "the run")}, {}
    lead = ("checkpoint", "client")
    shapes = {name: tuple(n for d, n in w.sizes.items() if d not in lead) for name, w in there.items()}
    last = next((name.rpartition(".")[0] for name in reversed(_settings(tree).get("shapes", {}))), None)
    without = left_out(shapes, last)
    return {name: w for name, w in there.items() if name not in without}, without


def _of_files(
    sources: Sequence[Any], asked: Sequence[str] | None, clients: Sequence[Any] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    from fedstat.labelled.weight_files import read_layers

    if wrong := [x for x in sources if not _is_source(x) or isinstance(x, xr.Dataset)]:
        raise ValueError(
            "a mapping or list of weights must hold a state_dict, a module or a file for each client, but got a "
            f"{type(wrong[0]).__name__}. Pass {{client: state_dict}}; of one layer pass an array (client, unit, "
            "weight...)."
        )
    named = [Path(x) if isinstance(x, PathLike) else x for x in sources]
    tree, without = read_layers(named, asked, clients, hidden=True)
    return {str(name): node["w"] for name, node in tree.children.items()}, without


def _is_source(x: object) -> bool:
    """Whether this may be a client's file, state_dict or module."""
    return isinstance(x, (*_PATHS, Mapping)) or hasattr(x, "state_dict")


def _of_paths(given: Sequence[Any], asked: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    paths = [path for one in given for path in _expanded(fspath(one))]
    stores = [path for path in paths if is_store(path)]
    if not stores:
        return _of_files(paths, asked, None)
    if len(paths) > 1:
        raise ValueError(
            f"{stores[0]} is a run, which holds all its clients, but got {len(paths)} paths. Give one run, or files of "
            "clients."
        )
    return _of_tree(open_run(stores[0]), asked)


def _expanded(path: str) -> list[Path]:
    """Files of clients, or a store, that a path means: itself, the files of a folder, or the matches of a pattern."""
    at = Path(path)
    if not path:
        raise ValueError("a path must name files of clients or a run, but got ''")
    if is_store(at) or at.is_file() or (os.path.lexists(at) and not at.is_dir()):
        return [at]  # what is no regular file is named when it is read
    if at.is_dir():
        files = sorted(one for one in at.iterdir() if one.suffix.lower() in SUFFIXES)
        if files:
            return files
        stores = sorted(one.name for one in at.iterdir() if is_store(one))
        hint = f" It holds the runs {few(stores)}: give one of them." if stores else ""
        raise ValueError(f"the folder {at} holds no files of clients ({', '.join(SUFFIXES)}).{hint}")
    if is_pattern(path):
        if not (found := sorted(Path(at.anchor).glob(str(at.relative_to(at.anchor))))):
            raise FileNotFoundError(f"no file matches the pattern {path!r}. Check it, and the folder {Path.cwd()}.")
        return found
    siblings = [str(at.parent / one.name) for one in at.parent.iterdir()] if at.parent.is_dir() else []
    raise FileNotFoundError(
        f"there is no file {path}, and no folder or run of that name.{check.did_you_mean(at, siblings, cutoff=0.6)}"
    )


def _at(w: Any, checkpoint: int | None, layer: str) -> Any:
    """Weights at a checkpoint, the last if none is named."""
    if isinstance(w, xr.DataArray) and {"checkpoint", "client"} <= {*w.dims}:
        if checkpoint is None:
            return w.isel(checkpoint=-1)
        rounds = w["checkpoint"].values.tolist()
        return w.sel(checkpoint=check.choice("checkpoint", checkpoint, rounds))
    if checkpoint is not None and not (isinstance(w, xr.DataArray) and w.coords.get("checkpoint") == checkpoint):
        what = f"layer {layer!r}" if layer else "the array"
        raise ValueError(f"{what} has no dim checkpoint, but got checkpoint={checkpoint!r}. Leave it out.")
    return w


def _baselines(baseline: Any, given: Given) -> dict[str, Any]:
    """What clients started from, for every layer."""
    if baseline is None:
        return dict.fromkeys(given.layers)
    module = hasattr(baseline, "state_dict")
    if not (module or isinstance(baseline, (xr.DataTree, Mapping, *_PATHS))) or isinstance(baseline, xr.Dataset):
        if len(given.layers) > 1:
            raise ValueError(
                f"there must be a baseline for each of the layers {few(given.layers, 8)}, but got one "
                f"{type(baseline).__name__}. Pass a file or state_dict of the model that all clients started from, or "
                "choose one layer."
            )
        return dict.fromkeys(given.layers, _labels.labelled(baseline))
    if "" in given.layers:
        raise ValueError(
            "baseline of one array of weights must be an array (unit, weight...), but got "
            f"{type(baseline).__name__}. Choose the layer's array from it."
        )
    alone = module or (isinstance(baseline, Mapping) and not isinstance(baseline, xr.DataTree))
    found = layers_of([baseline] if alone else baseline, list(given.layers)).layers
    for name, w in found.items():
        known = w.attrs.get("layout"), getattr(given.layers[name], "attrs", {}).get("layout")
        if None not in known and known[0] != known[1]:
            raise ValueError(
                f"layer {name!r} of the baseline and of the weights are not read alike: of a module its class says "
                "which numbers belong to a unit, of a state_dict names and shapes. Give both as modules, or both as "
                "state_dicts."
            )
    return {name: _common(w, name) for name, w in found.items()}


def _common(w: xr.DataArray, layer: str) -> Any:
    """Weights (unit, weight...) of the one client that there is, or of any if all have the same."""
    if "client" not in w.dims:
        return w.to_numpy()
    values = w.transpose("client", "unit", ...).to_numpy()
    if not (values == values[:1]).all():
        raise ValueError(
            f"baseline is common to all clients, but layer {layer!r} of it differs between {len(values)} clients. "
            "Give one model, or subtract each client's baseline from its weights."
        )
    return values[0]


def _naming(layer: str, analyse: Callable[[], R], *, several: bool) -> R:
    """Analyse a layer; its warnings name it, and its plain errors too where there are several."""
    with warnings.catch_warnings(record=True) as said:
        try:
            result = analyse()
        except ValueError as error:
            if type(error) is ValueError and several:
                raise ValueError(f"layer {layer!r}: {error}") from error
            raise
    for one in said:
        check.warn(f"{layer}: {one.message}", one.category)
    return result
