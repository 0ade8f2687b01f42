"""Splits of weights as stored, and in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from fedstat import results, store
from fedstat._utils import check, guard
from fedstat._utils.lazy import pd, xr
from fedstat.labelled.layer_names import is_pattern, match_names, require_names
from fedstat.results import Absolute, BootstrapResult, LayerResults, SplitResult, tables
from fedstat.stats.icc import Coefficients, MeanSquares
from fedstat.stats.icc_resampling import Influence
from fedstat.stats.icc_tests import AgreementTest
from fedstat.stats.variance_components import Components

_BESIDE = {"bootstrap": ("std_error", "conf_low", "conf_high", "prop_shared"), "permutation": ("p_value", "p_adjusted")}


def to_dataset(split: SplitResult, bootstrap: BootstrapResult | None = None) -> xr.Dataset:
    """Communalities, agreement between clients, groups and loadings of a split over the dims unit and factor.

    Parameters
    ----------
    split : SplitResult
    bootstrap : BootstrapResult, optional
        Adds std_error, conf_low, conf_high and prop_shared, and the attributes ``intervals``, what these are of, and
        ``replicates_converged``, a share.

    Returns
    -------
    xarray.Dataset
        ``icc`` holds ICC2 where there are clients. A split by agreement has no loadings, eigenvalues and Heywood cases,
        and its communality is NaN. Attributes hold tau, kappa, method and the row of ``split.glance()`` as JSON.
    """
    data = xr.Dataset(
        {
            "communality": ("unit", split.communality, {"long_name": "communality nu"}),
            "shared": ("unit", split.shared),
            "group": ("unit", split.group.astype(object)),
            "margin": ("unit", split.margin),
        },
        coords={"unit": split.fit.units},
        attrs={
            "tau": str(split.tau),
            "threshold": split.threshold,
            "method": split.fit.method,
            "glance": json.dumps(split.to_dict()["glance"]),
        },
    )
    if split.icc is not None:
        data["icc"] = ("unit", split.icc, {"long_name": "agreement between clients, ICC2"})
    if split.fit.method != "icc":
        data["heywood"] = ("unit", split.factors.heywood)
        data["loadings"] = (("unit", "factor"), split.factors.loadings)
        data["eigenvalues"] = ("component", split.factors.eigenvalues)
    if bootstrap is not None:
        table = bootstrap.tidy()
        data.attrs["intervals"] = bootstrap.interval_label
        data.attrs["replicates_converged"] = float(bootstrap.converged.mean())
        for name in _BESIDE["bootstrap"]:
            data[name] = ("unit", table[name].to_numpy())
    return data


def table(results_by_kind: Mapping[str, LayerResults[Any]]) -> pd.DataFrame:
    """One row per layer and unit: the split's table, with standard errors, intervals and p values where they are known.

    Parameters
    ----------
    results_by_kind : mapping from kind to results by layer
        "split", and "bootstrap" and "permutation" where there are any.
    """
    parts = [results_by_kind["split"].tidy()]
    for kind, columns in _BESIDE.items():
        if kind in results_by_kind:
            parts.append(results_by_kind[kind].tidy()[list(columns)])
    return pd.concat(parts, axis=1)


def write_table(path: Path, rows: pd.DataFrame, *, latex: bool) -> None:
    """Write a table as CSV with all digits; or as LaTeX with three, without loadings and what follows from them."""
    if not latex:
        rows.to_csv(path, index=False)
        return
    flags = [name for name in ("heywood", "constant") if name in rows and not rows[name].any()]
    loadings = [name for name in rows if str(name).startswith("factor_")]
    shown = rows.drop(columns=[*flags, *loadings, "uniqueness", "complexity"], errors="ignore").dropna(
        axis=1, how="all"
    )
    tabular = tables.latex(shown, digits=3, caption=None, label=None)
    path.write_text(f"% fedstat.decompose: needs \\usepackage{{booktabs}}\n{tabular}", encoding="utf-8")


Kind = Literal["split", "bootstrap", "permutation", "sensitivity"]
KINDS: tuple[Kind, ...] = ("split", "bootstrap", "permutation", "sensitivity")
COMMAND = "fedstat.decompose"
_GROUP = "result"

_STORED_SETTINGS = {
    "minus": "baseline", "bootstrap": "n_boot", "permutation": "n_permutations", "stability": "sensitivity",
    "start": "init",
}  # fmt: skip
_STORED_KINDS = {"sensitivity": "stability"}
_STORED_FIELDS = {
    "of_change": "baseline_subtracted", "outcome": "conclusion", "personal": "reliability",
    "personal_replicate": "reliability_replicate", "adjusted_rand": "ari", "same_state": "prop_unchanged",
}  # fmt: skip
_STORED_VALUES = {"undecided": "inconclusive", "dead": "constant"}
"""Names of earlier versions."""


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a store's settings by today's names, whichever version wrote it."""
    return {_STORED_SETTINGS.get(name, name): value for name, value in config.items()}


_TUPLES = {kind.__name__: kind for kind in (AgreementTest, Coefficients, Components, Influence, MeanSquares)}
_CLASSES: dict[str, Any] = _TUPLES | {
    name: getattr(results, name)
    for name in (
        "SplitResult", "BootstrapResult", "PermutationResult", "SensitivityResult", "FactorResult", "IccResult",
        "ComponentsResult",
    )
} | {"StabilityResult": results.SensitivityResult}  # fmt: skip


@overload
def read_split(path: str | Path, layer: str, *, kind: Kind = "split") -> Any: ...
@overload
def read_split(path: str | Path, layer: None = None, *, kind: Kind = "split") -> LayerResults[Any]: ...
def read_split(path: str | Path, layer: str | None = None, *, kind: Kind = "split") -> Any:
    """Results that ``python -m fedstat.decompose --out`` stored, as they were.

    Parameters
    ----------
    path : str or Path
        The store, such as ``"split.zarr"``.
    layer : str, optional
        One layer; all by default.
    kind : {"split", "bootstrap", "permutation", "sensitivity"}
        What to read of what the command was asked for.

    Returns
    -------
    SplitResult, BootstrapResult, PermutationResult or SensitivityResult
        Equal to what was stored, to the bit, with labels and settings. A :class:`fedstat.results.LayerResults` of them
        without ``layer``.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    ValueError
        If it holds no split (but weights, say), or not of this layer or kind: the message says what there is.

    Examples
    --------
    >>> import tempfile
    >>> from fedstat.decompose.__main__ import main
    >>> rng = np.random.default_rng(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for client in "abc":
    ...         np.savez(f"{folder}/{client}.npz", fc1=rng.normal(size=(6, 9)))
    ...     status = main([folder, "--n-factors", "1", "--out", f"{folder}/split.zarr"])
    ...     again = read_split(f"{folder}/split.zarr", "fc1")
    fc1: Split of 6 units by communality: 3 shared, 3 personal, 0 constant
    ...
    >>> again.shared.sum(), again.factors.n_factors
    (np.int64(3), 1)
    """
    check.choice("kind", kind, KINDS)
    require_names("layer", () if layer is None else (layer,))
    run = store.open_run(path)
    command = run.attrs.get("command", "another program")
    if command != COMMAND:
        raise ValueError(
            f"{path} holds no split: it was made by {command}. If it is a run with weights, "
            f"fedstat.split({str(path)!r}) splits them."
        )
    if _GROUP not in run.children:
        raise ValueError(
            f"{path} was written by an earlier version, which kept tables and not the result. Split again with "
            "--overwrite, or read the tables by fedstat.open_run."
        )
    with store.reading(path):
        return _read(run, path, layer, kind)


def _read(run: xr.DataTree, path: str | Path, layer: str | None, kind: Kind) -> Any:
    layers, attrs = run[_GROUP].children, run[_GROUP].attrs
    order = guard.parsed("layers", attrs["layers"].encode())  # that of the network, which folders have not
    names = order if layer is None else match_names([layer], order, str(path))
    nodes = {name: _node(layers[name], kind) for name in names}
    if lacking := [name for name, node in nodes.items() if node is None]:
        has = ", ".join(other for other in KINDS if _node(layers[lacking[0]], other) is not None)
        raise ValueError(f"{path} holds no {kind} of layer {lacking[0]!r}, only: {has}. Ask for it when splitting.")
    by_layer = {name: from_dataset(node.to_dataset(inherit=False)) for name, node in nodes.items() if node is not None}
    if layer is not None and not is_pattern(layer):
        return by_layer[names[0]]
    return LayerResults(by_layer, guard.parsed("left_out", attrs["left_out"].encode()))


def layer_results(run: xr.DataTree, layer: str) -> dict[str, Any]:
    """Return all results that a store holds of a layer, by kind; none if it was written by an earlier version."""
    if _GROUP not in run.children:
        return {}
    nodes = {kind: _node(run[_GROUP].children[layer], kind) for kind in KINDS}
    return {kind: from_dataset(node.to_dataset(inherit=False)) for kind, node in nodes.items() if node is not None}


def _node(layer: xr.DataTree, kind: Kind) -> xr.DataTree | None:
    """Return what a store holds of a kind for a layer, under its name or that of earlier versions; None if nothing."""
    names = [name for name in (kind, _STORED_KINDS.get(kind, kind)) if name in layer.children]
    return layer.children[names[0]] if names else None


def result_groups(results_by_kind: Mapping[str, LayerResults[Any]]) -> dict[str, xr.Dataset]:
    """Return the groups of a store that :func:`read_split` reads, from results by kind."""
    attrs = {
        "layers": json.dumps(list(results_by_kind["split"])),
        "left_out": json.dumps(results_by_kind["split"].skipped_layers),
    }
    groups = {f"/{_GROUP}": xr.Dataset(attrs=attrs)}
    for kind, by_layer in results_by_kind.items():
        groups |= {f"/{_GROUP}/{layer}/{kind}": as_dataset(result) for layer, result in by_layer.items()}
    return groups


def as_dataset(result: Any) -> xr.Dataset:
    """Convert a result to arrays, with its other fields as JSON."""
    arrays: dict[str, NDArray[Any]] = {}
    rest = _encode(result, "", arrays)
    variables = {name: ([f"axis{i}_{n}" for i, n in enumerate(a.shape)], a) for name, a in arrays.items()}
    return xr.Dataset(variables, attrs={"result": json.dumps(rest)})


def from_dataset(data: xr.Dataset) -> Any:
    """Rebuild a result from :func:`as_dataset`; nothing in the data is executed."""
    return _decode(guard.parsed("the result", data.attrs["result"].encode()), data)


def _encode(value: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Absolute):
        return {"absolute": value.value}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return {"list": [_encode(x, f"{path}.{i}", arrays) for i, x in enumerate(value)]}
    if isinstance(value, pd.DataFrame):
        return {"table": {str(k): _encode(list(v), f"{path}.{k}", arrays) for k, v in value.items()}}
    if isinstance(value, Mapping):
        return {"dict": {str(k): _encode(v, f"{path}.{k}", arrays) for k, v in value.items()}}
    if (kind := type(value).__name__) in _CLASSES:
        names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
        return {"of": kind, "with": {x: _encode(getattr(value, x), f"{path}.{x}", arrays) for x in names}}
    array = np.asarray(value)
    if array.dtype.kind == "O":  # labels of mixed kinds
        return {"labels": _encode(array.tolist(), path, arrays)}
    name = path.removeprefix(".")
    arrays[name] = array.astype(object) if array.dtype.kind == "U" else array
    return {"array": name, "dtype": array.dtype.str}


def _rename_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Rename the fields of a stored result of any version to their current names."""
    values.pop("interval_of", None)
    if values.pop("n_exchanges", 0):
        values["inference"] = "permutation"
    if values.get("outcome") is not None:
        outcome = np.asarray(values["outcome"], dtype=object)
        for earlier, today in _STORED_VALUES.items():
            outcome[outcome == earlier] = today
        values["outcome"] = outcome.astype(str)
    if "options" in values:
        values["options"] = settings_of(values["options"])
    if isinstance(table := values.get("table"), pd.DataFrame) and "varied" in table:
        values["table"] = table.rename(columns=_STORED_FIELDS).assign(varied=table["varied"].replace(_STORED_SETTINGS))
    return {_STORED_FIELDS.get(name, name): value for name, value in values.items()}


def _decode(rest: Any, data: xr.Dataset) -> Any:
    if not isinstance(rest, dict):
        return rest
    if "of" in rest:
        check.choice("the kind of a stored result", rest["of"], list(_CLASSES))
        return _CLASSES[rest["of"]](**_rename_fields({name: _decode(x, data) for name, x in rest["with"].items()}))
    ((kind, value),) = ((k, v) for k, v in rest.items() if k != "dtype")
    if kind == "float":
        return float(value)
    if kind == "absolute":
        return Absolute(value)
    if kind == "list":
        return [_decode(x, data) for x in value]
    if kind == "labels":
        return np.array(_decode(value, data), dtype=object)
    if kind == "array":
        dtype = np.dtype(rest["dtype"])
        guard.size("the result", data[value].size * dtype.itemsize, f"{value} as {dtype}")
        return data[value].to_numpy().astype(dtype)
    entries = {name: _decode(x, data) for name, x in value.items()}
    return pd.DataFrame(entries) if kind == "table" else entries
