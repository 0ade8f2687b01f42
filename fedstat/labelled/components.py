"""How much of the differences between clients is their own, beyond noise: the verb ``variance_components``."""

from __future__ import annotations

from collections.abc import Iterator
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
from fedstat.results.variance_components import ComponentsResult
from fedstat.stats import reml
from fedstat.stats import variance_components as by_moments
from fedstat.stats.icc import agreement
from fedstat.stats.icc import sums as icc_sums
from fedstat.stats.variance_components import BadWeightsError, Components, NoNoiseError

_BLOCK = 2**26  # bytes read at once
_DIMS = ("client", "replicate", "unit")


def variance_components(
    weights: Weights,
    *,
    covariate: Any = None,
    sizes: Any = None,
    method: Literal["moments", "reml"] = "moments",
    level: float = 0.95,
) -> ComponentsResult:
    """How much of the differences between clients is their own, and how much is sampling noise?

    Every client is trained twice or more from the same download, on disjoint parts of its data (replicates). The part
    of its difference from the others that recurs in all of them is its own; the rest is noise. For client c, replicate
    r and weight i of a unit, w_cri = m_i + x_c' γ_i + b_ci + e_cri with Var b = σ_b² and the mean of Var e = σ_e². The
    result is the **personal share** σ_b² / (σ_b² + σ_e²/R) of each unit and of the layer: of the differences between
    clients, each trained on all its data, the share that is not noise.

    - It is the reliability of clients' differences: the correlation of two halves, stepped up by Spearman and Brown
      [1]_ [2]_, the way the reliability of a test is found from its halves.
    - A client's own weights are nearer to its true ones than the mean over clients if and only if it is above 1/2.
    - It is the factor that best shrinks a client's own difference towards the mean (BLUP [3]_, empirical Bayes [4]_).

    This is the opposite of :func:`fedstat.icc`: there a high value means that clients *agree* on the pattern of a
    unit's weights; here it means that they really *differ*.

    Parameters
    ----------
    weights : DataArray with dims client, replicate, unit, weight..., in any order; or array or tensor in that order
        At least 3 clients, 4 with a covariate, and 2 replicates. Of a lazy DataArray a block of units is in memory at a
        time.
    covariate : array, Series, DataArray (client,) or mapping from client, optional
        What clients are adjusted for first, such as the number of training samples: a client with more samples makes
        more steps from the common start, a difference that is not knowledge of its own.
    sizes : array, Series, DataFrame or DataArray (client,) or (client, replicate), or mapping from client, optional
        Training samples, for "reml" alone; equal if not given.
    method : {"moments", "reml"}
        "moments" is unbiased however unequal the noise of clients is, and its estimates are sometimes negative. "reml"
        is restricted maximum likelihood for noise that falls as 1 / samples; where that holds and sizes are unequal it
        is more precise; where it does not, it is biased.
    level : float in (0, 1)
        Of the intervals and verdicts.

    Returns
    -------
    ComponentsResult

    Raises
    ------
    ValueError
        If there are too few clients or replicates; weights are NaN or infinite, or have equal replicates in all
        clients (unit and client are named); a covariate or sizes do not fit the clients.

    Notes
    -----
    Clients are the sample: tests and intervals come from leaving out one at a time, since the weights of a unit are not
    independent. :func:`fedstat.stats.variance_components.components` has the formulas and how often the intervals hold.
    They hold less often where weights are heavy-tailed (Student's t with 3 degrees of freedom: 0.84 to 0.93) and where
    clients are unlike in their noise (standard deviations log-normal, σ = 0.7: 0.85 to 0.90); with the latter, some
    unit that differs by noise alone is called a client's own in up to a quarter of layers.

    A covariate that itself belongs to what clients know (a class that only large clients have) takes that out, too.

    The share of a replicate is stepped up on the assumption that noise falls as 1 / samples. Noise common to a client's
    replicates (the same order of batches, say, if it is fixed by the client) counts as the client's own.

    References
    ----------
    .. [1] Spearman (1910). Correlation calculated from faulty data. British Journal of Psychology 3, 271-295.
    .. [2] Brown (1910). Some experimental results in the correlation of mental abilities. Brit. J. Psychol. 3, 296-322.
    .. [3] Robinson (1991). That BLUP is a good thing: the estimation of random effects. Statistical Science 6, 15-32.
    .. [4] Efron, Morris (1973). Stein's estimation rule and its competitors. JASA 68, 117-130.
    .. [5] Searle, Casella, McCulloch (1992). Variance Components. Wiley.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> own = rng.normal(size=(20, 1, 4, 50)) * np.array([0, 0, 1, 3])[:, None]
    >>> variance_components(own + rng.normal(size=(20, 2, 4, 50)))  # shares 0, 0, 2/3 and 18/19
    Reliability of client differences: 4 units, 50 weights per unit
    20 clients x 2 replicates; method of moments
    Layer: reliability = 0.83, 95% CI [0.82, 0.85] (jackknife over clients)
      Above 0.5: a client's weights estimate its true weights with lower expected
        squared error than the average over clients does
    Units: median 0.33; 2 of 4 differ beyond training noise (one-sided, FDR 0.05)
      95% CIs for these 20 clients (unadjusted): 2 above 0.5, 2 below, 0 include it
      highest: 3 (0.95), 2 (0.62), 0 (0.04), 1 (0.02)
      lowest:  1 (0.02), 0 (0.04), 2 (0.62), 3 (0.95)
    """
    check.choice("method", method, ("moments", "reml"))
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    if sizes is not None and method == "moments":
        raise ValueError('sizes belong to method="reml"; the method of moments needs none, but got sizes')
    weights = _dense(_labels.labelled(weights, stack=("client", "replicate")))
    units, clients = labels(weights, "unit", 2), labels(weights, "client", 0)
    of = {"client": clients, "replicate": labels(weights, "replicate", 1)}
    x = None if covariate is None else _labels.matched("covariate", covariate, {"client": clients})
    n = None if sizes is None else _labels.matched("sizes", sizes, of)
    estimate: Any = reml.components if method == "reml" else by_moments.components
    found: list[Components] = []
    pooled: list[Any] = []
    alike: list[NDArray[np.float64]] = []
    equal: Any = True
    for at, w in _unit_blocks(weights):
        with _naming(units[at], clients):
            sums = reml.gram(w, n, x) if method == "reml" else by_moments.parts(w, x)
            found.append(estimate(sums, level=level))
        pooled.append(sums.pooled())
        equal = equal & numpy_of((w[:, :1] == w[:, 1:]).reshape(len(clients), -1).all(axis=1))
        alike.append(agreement(icc_sums(w.mean(1))))
        n_replicates, n_weights = w.shape[1], w.shape[3]
    if equal.any() and not equal.all():
        check.warn(
            f"the replicates of client(s) {few(clients[equal])} are identical bit for bit, as if without noise: the "
            "personal share comes out too high. Were they trained on different samples? Leave these clients out."
        )
    return ComponentsResult(
        components=_joined(found),
        layer_components=estimate(reduce(add, pooled), level=level),
        units=units,
        n_clients=len(clients),
        n_replicates=n_replicates,
        n_weights=n_weights,
        method=method,
        agreement=np.concatenate(alike),
        adjusted=covariate is not None,
    )


@contextmanager
def _naming(units: NDArray[Any], clients: NDArray[Any]) -> Iterator[None]:
    """Let errors of the statistics, which know positions, name units and clients."""
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
        w = w.detach() if is_torch_array(w) else w  # no graph of what is summed
        if w.ndim < 4 or 0 in w.shape:
            raise ValueError(
                "weights must be (client, replicate, unit, weight...) with at least one of each, but got shape "
                f"{tuple(w.shape)}. Biases are one weight per unit: w[..., None]."
            )
        yield slice(None), w.reshape(*w.shape[:3], -1)
        return
    need_dims(weights, *_DIMS)
    check.numbers("weights", weights)
    if 0 in weights.shape:
        raise ValueError(f"weights must hold at least one of each dim, but got {dict(weights.sizes)}")
    d = weights.sizes["unit"]
    step = d if weights.variable._in_memory else max(1, _BLOCK * d // weights.nbytes)
    for start in range(0, d, step):
        at = slice(start, start + step)
        block = weights.isel(unit=at).load().transpose(*_DIMS, ...).to_numpy()
        yield at, block.reshape(*block.shape[:3], -1)


def _dense(weights: Any) -> Any:
    """Nested lists as an array; ValueError naming the client whose replicates have another shape."""
    if not isinstance(weights, list | tuple):
        return weights
    shapes = [[np.shape(w) for w in client] for client in weights]
    for c, of_client in enumerate(shapes):
        for r, shape in enumerate(of_client):
            if shape != shapes[0][0] or len(of_client) != len(shapes[0]):
                raise ValueError(
                    f"all clients need equally many replicates, of one shape: client 0 has {len(shapes[0])} of shape "
                    f"{shapes[0][0]}, but client {c} has {len(of_client)}, number {r} of shape {shape}"
                )
    return np.array([[np.asarray(w) for w in client] for client in weights])


def _joined(found: list[Components]) -> Components:
    fields: list[Any] = [np.concatenate(f) if isinstance(f[0], np.ndarray) else f[0] for f in zip(*found, strict=True)]
    return Components(*fields)
