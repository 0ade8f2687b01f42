"""Comparison of methods, and effective rank of weights: the verbs ``compare`` and ``effective_rank``."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few, numpy_of
from fedstat._utils.lazy import pd, xr
from fedstat.labelled.inputs import holds_layers, layers_of
from fedstat.labelled.layer import labels, less_mean, precision, read_layer
from fedstat.labelled.runs import layers_of_run, require_done
from fedstat.results.origin import recorded
from fedstat.results.ranks import ComparisonResult, EffectiveRankResult
from fedstat.stats import moments
from fedstat.stats.eigenvalues import effective_rank as rank_of
from fedstat.stats.ranking import LEAST_PAIRS, paired_test
from fedstat.store import is_store, open_run


@check.named_options()
@recorded
def compare(
    data: pd.DataFrame,
    *,
    reference: str,
    value: str = "accuracy",
    method: str = "method",
    block: str | Sequence[str] = "seed",
    sample: str | None = None,
    level: float = 0.95,
) -> ComparisonResult:
    """Compare methods with a reference, paired within blocks such as seeds: differences, intervals, p values.

    Parameters
    ----------
    data : DataFrame
        One row per method and block. Missing rows and NaN are excluded from the method's pairs, and named.
    reference : str
        Method that the other methods are compared with.
    value, method : str
        Columns of the value and of the method.
    block : str or sequence of str
        Columns that define the pairs, outer columns first: seeds, or data sets and seeds.
    sample : str, optional
        With several columns in ``block``, the column whose values are independent. Differences are first averaged
        within each of its values. With ``sample="seed"`` conclusions are about these data sets, and a seed must have a
        pair in each of them. With the data set as sample, conclusions are about other data sets with these seeds.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    ComparisonResult
        One row per method.

    Raises
    ------
    ValueError
        If a column or the reference is missing, a row lacks its method or block, a value is infinite, or a method has
        two values in a block. If a value is no number (the row is named), or a column of ``block`` holds 0 and "0". If
        ``block`` has several columns and ``sample`` is none of them.

    Notes
    -----
    Tests are paired t tests: pairs that share a seed or a data set are not independent. ``p_holm`` is Holm's step-down
    adjustment [1]_; ``sim_conf_low`` and ``sim_conf_high`` are Bonferroni's t intervals, which hold simultaneously.
    ``p_sign_flip`` is exact, H0: differences are symmetric about 0 [2]_; with n blocks it is at least 2¹⁻ⁿ.
    :doc:`/background/statistics` says how ties and unequal variances are treated.

    References
    ----------
    .. [1] Holm (1979). A simple sequentially rejective multiple test procedure. Scandinavian Journal of Statistics 6.
    .. [2] Fisher (1935). The design of experiments, §21.

    Examples
    --------
    >>> data = pd.DataFrame({"method": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "accuracy": [5, 6, 7, 9, 5, 8.0]})
    >>> compare(data, reference="a")
    accuracy: 1 method compared with a, paired by seed (3 pairs)
      method  mean (SE)      difference [95% CI]      p (Holm)
      a       5.667 (0.667)  reference
      b       7.667 (0.882)  +2.000 [-0.484, +4.484]     0.074
    Paired t tests; CIs simultaneous over 1 comparison (Bonferroni).
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    if not isinstance(data, pd.DataFrame):
        raise TypeError(
            "compare takes a DataFrame with one row per method and block, such as a table of accuracies, but got "
            f"{check.kind(data)}. Compare stored runs with fedstat.study.compare_runs."
        )
    within = [block] if isinstance(block, str) else list(block)
    data = complete_rows(data, value, method, *within)
    _require_one_type(data, within)
    data[method] = data[method].astype(str)
    exponent = float(moments.exponent(data[value].abs().max(skipna=True)))
    data[value] *= 2.0**-exponent  # so that squares neither overflow nor vanish
    check.choice("reference", reference, list(dict.fromkeys(data[method])))
    require_single_values(data, method, within)
    by_method = _wide(data, value, method, within)
    sample = _sample(within, sample)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in map(str, by_method.columns):
        values = by_method[name].dropna()
        std_error = _means(values, [sample]).sem()
        row = {"method": name, "n_values": len(values), "mean": values.mean(), "std_error_mean": std_error}
        if name != reference:
            difference, exclusions = _difference(by_method, name, reference, within, sample, level)
            row, notes = row | difference, [*notes, *exclusions]
        rows.append(row)
    if few_pairs := [row["method"] for row in rows if 0 < row.get("n", 0) < LEAST_PAIRS and not _equal(row)]:
        notes.append(f"fewer than {LEAST_PAIRS} pairs, so no interval and no test: {', '.join(few_pairs)}")
    table = pd.DataFrame(rows).reindex(columns=_COLUMNS)
    counts = ["n", "n_pairs"]
    table[counts] = table[counts].fillna(0).astype(int)
    table = _adjusted(table, level)
    table[_IN_UNITS] *= 2.0**exponent
    return ComparisonResult(table, reference, level, tuple(notes), value, tuple(within), sample)


_COLUMNS = [
    "method", "n_values", "mean", "std_error_mean", "n", "n_pairs", "difference", "std_error", "statistic", "df",
    "p_value", "conf_low", "conf_high", "p_holm", "sim_conf_low", "sim_conf_high", "p_sign_flip",
]  # fmt: skip


_IN_UNITS = [
    "mean", "std_error_mean", "difference", "std_error", "conf_low", "conf_high", "sim_conf_low", "sim_conf_high"
]  # fmt: skip


def complete_rows(data: pd.DataFrame, value: str, *labels: str) -> pd.DataFrame:
    """Return the named columns, values as floats; raise ValueError for rows without labels or with infinite values."""
    for column in (value, *labels):
        if column not in data.columns:
            check.choice("a column of data", column, [str(c) for c in data.columns])
    data = data[[value, *labels]].reset_index(drop=True)
    for column in labels:
        if (missing := data[column].isna()).any():
            raise ValueError(
                f"{column!r} is missing in {missing.sum()} of {len(data)} rows, first in the row with "
                f"{_place(data[missing], labels)}. Fill in or drop these rows."
            )
    data[value] = _floats(data, value, labels)
    for column in data.columns:
        numeric = pd.api.types.is_numeric_dtype(data[column])
        if numeric and (infinite := np.isinf(data[column].astype(float))).any():
            raise ValueError(
                f"{column!r} must be finite or NaN, but got {data.loc[infinite, column].iloc[0]} in the row with "
                f"{_place(data[infinite], labels)}. Enter NaN for a diverged run."
            )
    return data


def _floats(data: pd.DataFrame, value: str, labels: Sequence[str]) -> pd.Series[float]:
    """Return the column of values as floats; raise ValueError that names the row of a value that is no number."""
    column = data[value]
    if column.dtype.kind in "cmM":
        raise ValueError(f"{value!r} must hold numbers, but got dtype {column.dtype}")
    if column.dtype.kind in "iufb":
        return column.astype(float)
    numbers = np.full(len(column), np.nan)
    for i, x in enumerate(column.where(column.notna(), math.nan)):
        try:
            numbers[i] = float(x)
        except (TypeError, ValueError):
            text = str(x).strip()
            hint = "Enter NaN for a missing value, or leave out the row."
            hint = "Divide percentages by 100, and drop the sign." if text.endswith("%") else hint
            hint = "Write a decimal point, as pandas.read_csv(..., decimal=',') does." if "," in text else hint
            raise ValueError(
                f"{value!r} must hold numbers, but got {x!r:.200} in the row with {_place(data.iloc[i:], labels)}. "
                f"{hint}"
            ) from None
    return pd.Series(numbers, column.index)


def _require_one_type(data: pd.DataFrame, block: list[str]) -> None:
    """Raise ValueError if a column of block holds labels that look equal and differ, as 0 and "0"."""
    for column in block:
        by_text: dict[str, Any] = {}
        for label in data[column].unique():
            is_whole = isinstance(label, float) and label.is_integer()
            text = str(int(label) if is_whole else label).strip()
            if repr(by_text.setdefault(text, label)) != repr(label):
                raise ValueError(
                    f"{column!r} holds {by_text[text]!r} and {label!r}, which are different blocks, so that their rows "
                    f"have no pair. Convert the column to one type, as data[{column!r}].astype(int) does for seeds."
                )


def require_single_values(data: pd.DataFrame, method: str, block: list[str]) -> None:
    """Raise ValueError that names method and block if a method has two values in a block."""
    duplicated = data.duplicated([method, *block])
    if duplicated.any():
        raise ValueError(
            f"a method must have one value per block, but got {data.loc[duplicated, method].iloc[0]!r} twice at "
            f"{_place(data[duplicated], block)}. Add the column that varies to block, or select one of its values."
        )


def _place(rows: pd.DataFrame, labels: Sequence[str]) -> str:
    return ", ".join(f"{label} = {rows[label].iloc[0]}" for label in labels)


def _wide(data: pd.DataFrame, value: str, method: str, block: list[str]) -> pd.DataFrame:
    """Return a table of blocks by methods, both in order of appearance, with NaN for missing values."""
    by_method = data.set_index([*block, method])[value].astype(float)
    table = by_method.unstack()
    order = by_method.reset_index(level=-1)
    return table.reindex(index=list(dict.fromkeys(order.index)), columns=list(dict.fromkeys(order[method])))


def _sample(block: list[str], sample: str | None) -> str:
    """Return the column whose values are the sample."""
    if sample is None and len(block) == 1:
        return block[0]
    if sample not in block:
        raise ValueError(
            f"sample must be one of the columns of block, {', '.join(map(repr, block))}, but got {sample!r}. Pairs "
            "that share a value are not independent: name the column with independent values, such as sample='seed'."
        )
    return sample


_ROUNDING = 2.0**-23  # of float32


def _difference(
    by_method: pd.DataFrame, name: str, reference: str, within: list[str], sample: str, level: float
) -> tuple[dict[str, float], list[str]]:
    """Test the difference of a method from the reference; return it and notes on exclusions and limits."""
    pairs, notes = by_method[[reference, name]].dropna(), []
    if lacking := [_name(i) for i in by_method.index if i not in pairs.index]:
        notes.append(f"{name}: no pair with {reference} in {', '.join(lacking)}; left out")
    differences, partial = _averaged(pairs[name] - pairs[reference], within, sample)
    if partial:
        outer = " and ".join(within[: within.index(sample)])
        notes.append(f"{name}: {', '.join(partial)} has pairs in some values of {outer} only; left out")
    rounding = _ROUNDING * float(pairs.abs().to_numpy().max()) if len(pairs) else 0.0
    test = paired_test(differences, level, rounding)
    if _equal(test):
        rest = "interval" if test["difference"] == 0 else "interval or test"
        notes.append(f"{name}: the same difference in every pair, so no standard error and no {rest}")
    return test | {"n_pairs": len(pairs)}, notes


def _equal(row: Mapping[str, Any]) -> bool:
    """Return True if all differences are equal."""
    return row["n"] > 1 and not math.isfinite(row["std_error"])


def _averaged(differences: pd.Series[float], block: list[str], sample: str) -> tuple[NDArray[np.float64], list[str]]:
    """Return the mean difference of each value of the sample, and the names of values that lack a pair.

    Every value of the columns before the sample is needed, since differences depend on it. Columns after the sample
    may lack values.
    """
    outer = block[: block.index(sample)]
    means = _means(differences, [*outer, sample])
    if not outer:
        return np.asarray(means, np.float64), []
    table = means.unstack(outer)
    complete = table.notna().all(axis=1)
    incomplete = [f"{sample} {name}" for name in table.index[~complete]]
    return np.asarray(table[complete].mean(axis=1), np.float64), incomplete


def _means(values: pd.Series[float], by: list[str]) -> pd.Series[float]:
    """Average by these columns of a block; return the values unchanged if a block has one column."""
    return values if values.index.nlevels == 1 else values.groupby(level=by, sort=False).mean()


def _adjusted(table: pd.DataFrame, level: float) -> pd.DataFrame:
    """Add Holm's p values and Bonferroni's intervals; methods with too few pairs are not in the family."""
    from statsmodels.stats.multitest import multipletests

    tested = table["p_value"].notna()
    family = tested | (table["n"] >= LEAST_PAIRS)
    if m := int(family.sum()):
        p_holm = multipletests(table.loc[family, "p_value"].fillna(1.0), method="holm")[1]
        table.loc[family, "p_holm"] = p_holm
        table.loc[~tested, "p_holm"] = np.nan
        half = scipy.stats.t.ppf(1 - (1 - level) / (2 * m), table["df"]) * table["std_error"]
        table["sim_conf_low"], table["sim_conf_high"] = table["difference"] - half, table["difference"] + half
    return table


def _name(block: Hashable) -> str:
    return ", ".join(map(str, block)) if isinstance(block, tuple) else f"block {block}"


@check.named_options()
@recorded
def effective_rank(weights: Any, *, baseline: Any = "mean", level: float = 0.95) -> EffectiveRankResult:
    """Compute the effective rank of the personal part of clients' weights, by layer, client and checkpoint.

    The effective rank is exp of the entropy of the normalized singular values [1]_. It is 1 if a matrix has one
    direction, and the smaller of its sides if all singular values are equal. It is at most the rank. Weights are
    matrices (unit, weight); other dims of a kernel are flattened.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`fedstat.split`, but of all layers; of a run, all checkpoints as clients predict, after aggregation:
        the personal part is what averaging leaves. A DataArray may have a dim ``checkpoint``.
    baseline : {"mean"}, or str, or None
        Shared part, subtracted first so that the personal part remains:

        - "mean", for any algorithm: the mean over clients. After a split, shared units are equal in all clients, so
          the personal units remain.
        - The name of a shared factor of a run with ``probe="parameters"``: "weight" (σ of W = σ + BA) leaves BA, "mu"
          leaves u vᵀ.
        - None: nothing is subtracted.
    level : float in (0, 1)
        Confidence level of the t intervals of the mean over clients.

    Returns
    -------
    EffectiveRankResult
        Ranks (layer, [checkpoint,] client); NaN if the personal part is zero.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients, weights are NaN or infinite (the clients are named), or the run does not
        hold the factor.

    Notes
    -----
    Intervals assume independent clients. Clients of one run share a server, so intervals refer to clients of this run,
    not of other runs. A few clients may not represent clients of two kinds: if one in five clients has few directions,
    intervals from 3 clients contain the mean with probability 0.48, from 10 clients 0.88.

    A personal part within rounding error counts as zero: in float32, 2e-7 of the weights' size. A part slightly larger
    is mostly rounding noise, which has full rank.

    References
    ----------
    .. [1] Roy, Vetterli (2007). The effective rank: a measure of effective dimensionality. EUSIPCO, 606-610.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> weights = rng.normal(size=(10, 20, 2)) @ rng.normal(size=(10, 2, 30))  # of rank 2
    >>> effective_rank(weights, baseline=None)
    Effective rank of client weights (mean over 10 clients)
      weights  1.96, 95% CI [1.94, 1.99] (t); maximum 20
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    if isinstance(weights, str | PathLike) and is_store(Path(weights)):
        weights = open_run(Path(weights))
    if isinstance(weights, xr.DataTree) and "weights" in weights.children:
        layers = _of_run(weights, baseline)
    elif baseline is None or (isinstance(baseline, str) and baseline == "mean"):
        layers = layers_of(weights, "*").layers if holds_layers(weights) else {"weights": _labelled_layer(weights)}
    else:
        raise ValueError(f"baseline={baseline!r:.80} needs a run, but got weights. Use baseline='mean' or None.")
    ranks, most = zip(*(_ranks(w, name, mean=baseline == "mean") for name, w in layers.items()), strict=True)
    rank = xr.concat(ranks, xr.Variable("layer", np.array(list(layers), object)))
    data = xr.Dataset({"rank": rank, "largest": ("layer", list(most))})
    return EffectiveRankResult(data, "nothing" if baseline is None else baseline, level)


def _of_run(run: xr.DataTree, baseline: Any) -> dict[str, xr.DataArray]:
    """Return the layers' weights minus the shared factor; the mean over clients is subtracted later."""
    layers = layers_of_run(run)
    for weights in layers.values():
        require_done(run, weights.isel(checkpoint=-1) if "checkpoint" in weights.dims else weights)
    if baseline is None or baseline == "mean":
        return layers
    factors = run["parameters"].children if "parameters" in run.children else {}
    name = "w" if baseline == "weight" else baseline
    factored = [layer for layer in layers if layer in factors and name in factors[layer].data_vars]
    if not factored:
        raise ValueError(
            f"baseline={baseline!r} needs a factor of this name, but no layer of the run holds one. Train with "
            "probe='parameters', which stores the factors of composed weights, or use baseline='mean'."
        )
    personal = {}
    for layer in factored:
        shared = factors[layer][name].sel(stage="aggregated", drop=True)
        if set(shared.dims) != set(layers[layer].dims):
            raise ValueError(
                f"the factor {baseline!r} of layer {layer!r} must have the dims {layers[layer].dims} of the weights, "
                f"but has {shared.dims}. Use baseline='mean'."
            )
        personal[layer] = layers[layer].astype(float) - shared
    return personal


def _labelled_layer(weights: Any) -> xr.DataArray:
    """Return a layer's weights as a DataArray."""
    if isinstance(weights, xr.Dataset | xr.DataTree) and "w" in weights.data_vars:
        weights = weights["w"]
    layer = read_layer(_labels.labelled(weights))
    if isinstance(layer.data, xr.DataArray):
        return layer.data
    return xr.DataArray(numpy_of(layer.weights), dims=("client", "unit", "weight"))


def _ranks(weights: xr.DataArray, layer: str, *, mean: bool) -> tuple[xr.DataArray, int]:
    """Return ranks ([checkpoint,] client) and the largest possible rank, reading one checkpoint at a time."""
    lead = [d for d in ("checkpoint",) if d in weights.dims]
    ordered = weights.transpose(*lead, "client", "unit", ...)
    ordered = ordered if lead else ordered.expand_dims("checkpoint")
    clients, units, rest = *ordered.shape[1:3], int(np.prod(ordered.shape[3:]))
    if clients < 2:
        raise ValueError(f"there must be at least 2 clients, but got {clients}")
    ranks = np.empty(ordered.shape[:2])
    for i in range(len(ranks)):
        x = ordered[i].to_numpy().reshape(clients, units, rest).astype(float)
        if (bad := ~np.isfinite(x).all((1, 2))).any():
            raise ValueError(
                f"the weights of client(s) {few(labels(weights, 'client', 0)[bad])} in layer {layer!r} hold NaN or "
                'infinite values. Clients that were not selected are NaN: drop them by .dropna("client").'
            )
        ranks[i] = rank_of(less_mean(x, precision(weights)) if mean else x)
    coords = {d: weights[d] for d in (*lead, "client") if d in weights.coords}
    dims = (*lead, "client")
    return xr.DataArray(ranks if lead else ranks[0], coords, dims), min(units, rest)
