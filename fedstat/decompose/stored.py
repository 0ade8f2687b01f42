"""Splits of weights as stored, and in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat.labelled.layer_names import is_pattern, match_names, require_names
from fedstat.results import BootstrapResult, LayerResults, SplitResult
from fedstat.results.exports import latex as to_latex
from fedstat.results.tables import texts
from fedstat.store.results import DECOMPOSE as COMMAND
from fedstat.store.results import KINDS, Kind, read_layers

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
    path.write_text(f"% fedstat.decompose: needs \\usepackage{{booktabs}}\n{to_latex(texts(shown))}", encoding="utf-8")


@overload
def read_split(path: str | Path, layer: str, *, kind: Kind = "split") -> Any: ...
@overload
def read_split(path: str | Path, layer: None = None, *, kind: Kind = "split") -> LayerResults[Any]: ...
@check.named_options()
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
    >>> import numpy as np
    >>> from fedstat.decompose.__main__ import main
    >>> rng = np.random.default_rng(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for client in "abc":
    ...         np.savez(f"{folder}/{client}.npz", **{"fc1.weight": rng.normal(size=(6, 9))})
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
    if layer is None:
        return read_layers(run, path, kind)
    by_layer = read_layers(run, path, kind, lambda names: match_names([layer], names, str(path)))
    return by_layer if is_pattern(layer) else next(iter(by_layer.values()))
