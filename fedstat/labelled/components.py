"""Reliability of client differences, from replicates: the verb ``variance_components``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import Weights, labels, need_dims, numpy_of
from fedstat.labelled.inputs import by_layer
from fedstat.labelled.runs import Stage
from fedstat.results.variance_components import ComponentsResult
from fedstat.stats import reml
from fedstat.stats import variance_components as by_moments
from fedstat.stats.icc import agreement
from fedstat.stats.icc import sums as icc_sums
from fedstat.stats.variance_components import BadWeightsError, Components, NoNoiseError

_BLOCK = 2**26  # bytes read at once
_DIMS = ("client", "replicate", "unit")


@by_layer(initial=False)
def variance_components(
    weights: Weights,
    *,
    covariate: Any = None,
    sizes: Any = None,
    method: Literal["moments", "reml"] = "moments",
    level: float = 0.95,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    progress: bool | None = None,
) -> ComponentsResult:
    """Estimate between-client variance and training noise from replicates, and the reliability of client differences.

    Every client is trained at least twice from one download, on disjoint parts of its data: these are its replicates.
    For client c, replicate r and weight i of a unit, w_cri = m_i + x_c' γ_i + b_ci + e_cri with Var b = σ_b² and mean
    of Var e = σ_e². The result is the **reliability** σ_b² / (σ_b² + σ_e²/R) of each unit and of the layer [1]_ [2]_:
    the proportion of between-client variance in the differences of clients that are each trained on all their data.

    Parameters
    ----------
    weights : DataArray with dims client, replicate, unit, weight..., in any order; or array or tensor in that order
        At least 3 clients, 4 with a covariate, and 2 replicates. Or an object that holds such layers.
    covariate : array, Series, DataArray (client,) or mapping from client, optional
        Property that clients are adjusted for first, such as the number of training samples.
    sizes : array, Series, DataFrame or DataArray (client,) or (client, replicate), or mapping from client, optional
        Number of training samples, for "reml" only; equal by default.
    method : {"moments", "reml"}
        "moments" is unbiased even if clients have unequal noise; its estimates are sometimes negative. "reml" is
        restricted maximum likelihood [3]_ for noise that falls as 1 / samples: more precise if this holds, else biased.
    level : float in (0, 1)
        Confidence level of intervals and conclusions.
    layer, checkpoint, stage, progress
        Layers and round to analyze, if there are several, and the progress bar: as in :func:`fedstat.split`.

    Returns
    -------
    ComponentsResult
        Variances, reliability, intervals and tests of each unit and of the layer. With several layers, a
        :class:`fedstat.results.LayerResults`.

    Raises
    ------
    ValueError
        If there are too few clients or replicates, or a covariate or sizes do not fit the clients. If weights are NaN
        or infinite, or have equal replicates in all clients (unit and client are named).

    Warns
    -----
    UserWarning
        If the replicates of some clients are identical: reliability is then biased upwards.

    Notes
    -----
    If and only if reliability is above 0.5, a client's weights estimate its true weights better than the average over
    clients. High agreement (:func:`fedstat.icc`) means that clients have a unit's weights in common, high reliability
    that they truly *differ*. Formulas: :func:`fedstat.stats.variance_components.components`. Assumptions and coverage
    of the intervals: :doc:`/background/statistics`.

    References
    ----------
    .. [1] Spearman (1910). Correlation calculated from faulty data. British Journal of Psychology 3, 271-295.
    .. [2] Brown (1910). Some experimental results in the correlation of mental abilities. Brit. J. Psychol. 3, 296-322.
    .. [3] Searle, Casella, McCulloch (1992). Variance Components. Wiley.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> differences = rng.normal(size=(20, 1, 4, 50)) * np.array([0, 0, 1, 3])[:, None]
    >>> result = variance_components(differences + rng.normal(size=(20, 2, 4, 50)))
    >>> result.reliability.round(2).tolist()  # true values 0, 0, 2/3 and 18/19
    [0.04, 0.02, 0.62, 0.95]
    """
    check.choice("method", method, ("moments", "reml"))
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    if sizes is not None and method == "moments":
        raise ValueError("sizes has no effect with method='moments'. Leave it out, or use method='reml'.")
    weights = _dense(_labels.labelled(weights, stack=("client", "replicate")))
    units, clients = labels(weights, "unit", 2), labels(weights, "client", 0)
    models = {"client": clients, "replicate": labels(weights, "replicate", 1)}
    x = None if covariate is None else _labels.matched("covariate", covariate, {"client": clients})
    n = None if sizes is None else _labels.matched("sizes", sizes, models)
    estimate: Any = reml.components if method == "reml" else by_moments.components
    components: list[Components] = []
    pooled: list[Any] = []
    agreements: list[NDArray[np.float64]] = []
    equal: Any = True
    for block, w in _unit_blocks(weights):
        with _name_units(units[block], clients):
            sums = reml.gram(w, n, x) if method == "reml" else by_moments.parts(w, x)
            components.append(estimate(sums, level=level))
        pooled.append(sums.pooled())
        equal = equal & numpy_of((w[:, :1] == w[:, 1:]).reshape(len(clients), -1).all(axis=1))
        agreements.append(agreement(icc_sums(w.mean(1))))
        n_replicates, n_weights = w.shape[1], w.shape[3]
    if equal.any() and not equal.all():
        check.warn(
            f"Replicates of client(s) {few(clients[equal])} are identical, which biases reliability upwards. Drop "
            "these clients, or train on other samples."
        )
    return ComponentsResult(
        components=_concatenate(components),
        layer_components=estimate(reduce(add, pooled), level=level),
        units=units,
        n_clients=len(clients),
        n_replicates=n_replicates,
        n_weights=n_weights,
        method=method,
        agreement=np.concatenate(agreements),
        adjusted=covariate is not None,
    )


@contextmanager
def _name_units(units: NDArray[Any], clients: NDArray[Any]) -> Iterator[None]:
    """Translate positions in errors of the statistics to labels of units and clients."""
    try:
        yield
    except BadWeightsError as error:
        client = None if error.client is None else clients[error.client]
        raise BadWeightsError(units[error.unit], client) from None
    except NoNoiseError as error:
        raise NoNoiseError(units[error.units]) from None


def _unit_blocks(weights: Weights) -> Iterator[tuple[slice, Any]]:
    """Yield (slice of units, (client, replicate, unit, weight)): all units if in memory."""
    if not isinstance(weights, xr.DataArray):
        w = check.numbers("weights", weights)
        w = w.detach() if is_torch_array(w) else w  # sums need no autograd graph
        if w.ndim < 4 or 0 in w.shape:
            raise ValueError(
                "weights must be (client, replicate, unit, weight...) with at least one of each, but got shape "
                f"{tuple(w.shape)}. Pass biases as one weight per unit: w[..., None]."
            )
        yield slice(None), w.reshape(*w.shape[:3], -1)
        return
    if "replicate" not in weights.dims:
        raise ValueError(
            "weights must have a dim replicate, of several models of every client, but got the dims "
            f"{', '.join(map(str, weights.dims))}. Train every client twice, on halves of its data, and join the "
            "weights by xarray.concat([a, b], 'replicate')."
        )
    need_dims(weights, *_DIMS)
    check.numbers("weights", weights)
    if 0 in weights.shape:
        raise ValueError(f"weights must hold at least one of each dim, but got {dict(weights.sizes)}")
    d = weights.sizes["unit"]
    step = d if weights.variable._in_memory else max(1, _BLOCK * d // weights.nbytes)
    for start in range(0, d, step):
        block = slice(start, start + step)
        w = weights.isel(unit=block).load().transpose(*_DIMS, ...).to_numpy()
        yield block, w.reshape(*w.shape[:3], -1)


def _dense(weights: Any) -> Any:
    """Return nested lists as an array; raise ValueError that names a client whose replicates have another shape."""
    if not isinstance(weights, list | tuple):
        return weights
    shapes = [[np.shape(w) for w in client] for client in weights]
    for c, client_shapes in enumerate(shapes):
        for r, shape in enumerate(client_shapes):
            if shape != shapes[0][0] or len(client_shapes) != len(shapes[0]):
                raise ValueError(
                    f"clients must have equally many replicates, all of one shape: client 0 has {len(shapes[0])} of "
                    f"shape {shapes[0][0]}, but client {c} has {len(client_shapes)}, and replicate {r} has {shape}"
                )
    return np.array([[np.asarray(w) for w in client] for client in weights])


def _concatenate(blocks: list[Components]) -> Components:
    fields: list[Any] = [np.concatenate(f) if isinstance(f[0], np.ndarray) else f[0] for f in zip(*blocks, strict=True)]
    return Components(*fields)
