"""Methods and ranks compared: the verbs ``compare`` and ``effective_rank``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import pd, xr
from fedstat.labelled.arrays import labels, less_mean, need_dims, numpy_of, precision, refuse_replicates
from fedstat.labelled.inputs import layers_of_run
from fedstat.results.ranks import ComparisonResult, EffectiveRankResult
from fedstat.stats.compare import paired
from fedstat.stats.eigenvalues import effective_rank as rank_of


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
    """Compare methods with a reference within blocks, such as seeds: differences, intervals and p-values.

    Parameters
    ----------
    data : DataFrame
        One row per method and block. Missing rows and NaN are left out of their method's pairs, and named.
    reference : str
        The method that the others are compared with.
    value, method : str
        Columns.
    block : str or sequence of str
        Columns within whose values methods are paired, outer ones first: seeds, or data sets and seeds.
    sample : str, optional
        Of several columns, the one whose values are independent; differences are first averaged within each of them.
        With ``sample="seed"`` claims are of these data sets, and a seed must have a pair in all of them; with the data
        set, claims are of other data sets with these seeds.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    ComparisonResult

    Raises
    ------
    ValueError
        If a column or the reference is missing, a row lacks its method or block, a value is infinite, a method has two
        values in a block, or block has several columns and sample is none of them.

    Notes
    -----
    :func:`fedstat.stats.compare.paired` documents the columns and their methods: paired t tests, adjusted by Holm [1]_.

    References
    ----------
    .. [1] Holm (1979). A simple sequentially rejective multiple test procedure. Scandinavian Journal of Statistics 6.

    Examples
    --------
    >>> data = pd.DataFrame({"method": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "accuracy": [5, 6, 7, 9, 5, 8.0]})
    >>> compare(data, reference="a")
    accuracy: 1 method compared with a, paired by seed
      method  mean (SE)      difference [95% CI]      p (Holm)  pairs
      a       5.667 (0.667)  reference
      b       7.667 (0.882)  +2.000 [-0.484, +4.484]     0.074      3
    Paired t tests; CIs simultaneous over 1 comparison (Bonferroni).
    """
    found = paired(data, reference=reference, value=value, method=method, block=block, sample=sample, level=level)
    return ComparisonResult(*found)


def effective_rank(weights: Any, *, minus: Any = "mean", level: float = 0.95) -> EffectiveRankResult:
    """Effective rank of what is personal in every client's weights, by layer, client and checkpoint.

    The effective rank, exp of the entropy of the normalised singular values [1]_, is 1 if one direction holds all of a
    matrix, and the smaller of its sides if all directions hold the same; it is at most the rank. Weights are taken as
    matrices (unit, weight); a kernel's other dims are flattened.

    Parameters
    ----------
    weights : DataTree, or array, tensor or DataArray (client, unit, weight...)
        A run: all layers and checkpoints of its ``/weights``. Or one layer's weights, where a DataArray may have a dim
        ``checkpoint``.
    minus : {"mean"}, or str, or None
        What is taken off the weights, so that the personal part is left. "mean": the mean over clients, for any
        method; where units are split, shared ones are equal in all clients, and what is left are the personal units.
        The name of a shared factor of a run with ``probe="parameters"``: "weight" (σ of W = σ + BA) leaves BA, "mu"
        leaves u vᵀ. None: nothing.
    level : float in (0, 1)
        Of the intervals, of Student's t, of the mean over clients.

    Returns
    -------
    EffectiveRankResult
        NaN where nothing is personal: the part is zero.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients, weights are NaN or infinite (the clients are named), or the run does not
        hold the factor.

    Notes
    -----
    Intervals take clients as independent. Those of one run share a server, so they speak of clients as in this run,
    not of other runs. Where clients are of two kinds, few do not show both: with one in five of few directions, the
    intervals of 3 clients hold the mean in 0.48, of 10 in 0.88. A part within the rounding
    error of the numbers (of float32, 2e-7 of the weights' size) counts as zero; one little larger is largely rounding
    noise, which has full rank.

    References
    ----------
    .. [1] Roy, Vetterli (2007). The effective rank: a measure of effective dimensionality. EUSIPCO, 606-610.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> own = rng.normal(size=(10, 20, 2)) @ rng.normal(size=(10, 2, 30))  # of rank 2
    >>> effective_rank(own, minus=None)
    Effective rank of the weights: mean over 10 clients [95 % interval]
      weights: 1.96 [1.94, 1.99] of at most 20
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    if isinstance(weights, xr.DataTree):
        layers = _of_run(weights, minus)
    elif minus is None or (isinstance(minus, str) and minus == "mean"):
        layers = {"weights": _one(weights)}
    else:
        raise ValueError(f"minus={minus!r} needs a run, which holds that factor; of weights it is 'mean' or None")
    parts = [_ranks(w, name, mean=minus == "mean") for name, w in layers.items()]
    rank = xr.concat([one for one, _ in parts], xr.Variable("layer", np.array(list(layers), object)))
    found = xr.Dataset({"rank": rank, "largest": ("layer", [most for _, most in parts])})
    return EffectiveRankResult(found, "nothing" if minus is None else minus, level)


def _of_run(run: xr.DataTree, minus: Any) -> dict[str, xr.DataArray]:
    """Weights of the layers, without the factor that is taken off."""
    if "weights" not in run.children:
        raise ValueError(f"the run must hold weights, but has the groups {', '.join(run.children)}")
    layers = layers_of_run(run)
    if minus is None or minus == "mean":
        return layers
    factors = run["parameters"].children if "parameters" in run.children else {}
    name = "w" if minus == "weight" else minus
    there = [layer for layer in layers if layer in factors and name in factors[layer].data_vars]
    if not there:
        raise ValueError(
            f"no layer of the run holds a factor {minus!r} to take off. Factors of composed weights are kept by "
            "training with probe='parameters'; for other methods take off the mean over clients, minus='mean'."
        )
    found = {}
    for layer in there:
        shared = factors[layer][name].sel(stage="aggregated", drop=True)
        if set(shared.dims) != set(layers[layer].dims):
            raise ValueError(
                f"the factor {minus!r} of layer {layer!r} must have the dims {layers[layer].dims} of the weights to be "
                f"taken off them, but has {shared.dims}"
            )
        found[layer] = layers[layer].astype(float) - shared
    return found


def _one(weights: Any) -> xr.DataArray:
    """A layer's weights with labels."""
    weights = check.numbers("weights", _labels.labelled(weights))
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        refuse_replicates(weights)
        return weights
    values = numpy_of(weights)
    if values.ndim < 3:
        raise ValueError(f"weights must be (client, unit, weight...), but got shape {values.shape}")
    return xr.DataArray(values.reshape(*values.shape[:2], -1), dims=("client", "unit", "weight"))


def _ranks(weights: xr.DataArray, layer: str, *, mean: bool) -> tuple[xr.DataArray, int]:
    """Ranks ([checkpoint,] client), and the largest possible; one checkpoint is in memory at a time."""
    lead = [d for d in ("checkpoint",) if d in weights.dims]
    ordered = weights.transpose(*lead, "client", "unit", ...)
    ordered = ordered if lead else ordered.expand_dims("checkpoint")
    clients, units, rest = *ordered.shape[1:3], int(np.prod(ordered.shape[3:]))
    if clients < 2:
        raise ValueError(f"there must be at least 2 clients, but got {clients}")
    found = np.empty(ordered.shape[:2])
    for i in range(len(found)):
        x = ordered[i].to_numpy().reshape(clients, units, rest).astype(float)
        if (bad := ~np.isfinite(x).all((1, 2))).any():
            raise ValueError(
                f"the weights of client(s) {few(labels(weights, 'client', 0)[bad])} in layer {layer!r} hold NaN or "
                'infinite values. Clients that were not active are NaN: leave them out, as .dropna("client") does.'
            )
        found[i] = rank_of(less_mean(x, precision(weights)) if mean else x)
    coords = {d: weights[d] for d in (*lead, "client") if d in weights.coords}
    dims = (*lead, "client")
    return xr.DataArray(found if lead else found[0], coords, dims), min(units, rest)
