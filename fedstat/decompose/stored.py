"""Tables of splits, as the command writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstat._utils.lazy import pd, xr
from fedstat.results import BootstrapResult, LayerResults, SplitResult
from fedstat.results.exports import latex as to_latex
from fedstat.results.tables import texts

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
