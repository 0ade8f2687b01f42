"""Do clients agree on a layer's units: the verb ``icc``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat import _check
from fedstat._later import xr
from fedstat.labelled.coerce import Weights, bad_weights, group_blocks, labels, numpy_of, refuse_replicates
from fedstat.labelled.inputs import each, over_layers
from fedstat.labelled.start import require_related, start_of
from fedstat.results.icc import IccResult
from fedstat.stats import icc as _icc
from fedstat.stats import icc_bootstrap
from fedstat.stats.wide import available_memory


@over_layers
def icc(
    weights: Weights,
    *,
    start: Any = None,
    level: float = 0.95,
    replicates: int = 0,
    seed: int = 0,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
) -> IccResult:
    """How far clients agree on each unit: the share of the variance of its weights that all clients have in common.

    That is *agreement*: one unit of one client beside the same unit of the others. FedFac's communality ν
    (:func:`fedstat.fa`) is something else, how well *other units* explain a unit: a unit that is the same in every
    client but resembles no other unit has ν near 0 and agreement 1.

    The weights of a unit are the targets, the clients the raters of a two-way layout, and the six coefficients are
    those of Shrout and Fleiss [1]_ under the names of R's ``psych::ICC``. Which one answers "do clients agree on this
    unit?" follows from their three questions. Every client has every weight of the unit, so clients are crossed with
    weights and not nested in them: not ICC1. Clients stand for others that were not sampled, and a unit whose weights
    one client has shifted computes something else, so that differences between clients' means are disagreement: not
    ICC3, which removes them. And the clients' own models are used, not the mean of all of them: not the forms with k,
    which say how reliable the *average* model is and come near 1 with many clients. What is left is **ICC2**, in McGraw
    and Wong's [2]_ notation ICC(A,1), and it is what the result prints and draws unless another is asked for.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or what holds layers
        As in :func:`fedstat.split`: at least 2 clients and 2 weights per unit. Of a lazy DataArray every stored chunk
        is read once; only sums over clients are kept.
    start : array, tensor or DataArray (unit, weight...), path or state_dict, optional
        Weights that all clients started from. Agreement is then that of the changes, weights − start: clients that
        have hardly left a common start agree on their weights for that reason alone.
    level : float in (0, 1)
        Confidence level of the intervals.
    replicates : int
        Bootstrap samples of clients; 0: none. The bootstrap holds the weights of all clients in memory, in their own
        type.
    seed : int
        Seed of the bootstrap.
    layer, checkpoint
        Which weights, where there are several layers or rounds: as in :func:`fedstat.split`.

    Returns
    -------
    IccResult
        A :class:`fedstat.ByLayer` of them where layers are several.
        For each unit, and for the layer, whose targets are all weights of all units together: there, differences
        between the units' means count as agreement. A unit that has one value throughout (a dead unit) is NaN, counted
        and named.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients (3 with ``replicates``) or weights in a unit, weights are NaN or infinite (the
        client and the units are named), or ``start`` does not have the shape of one client's weights or is not
        correlated with them: subtracted from all, it would make clients agree.

    Notes
    -----
    F tests (of a coefficient of 0) and intervals take targets as independent and normal. The weights of a unit are
    neither, and thousands of them make any agreement significant: read the coefficient before the p value. The
    bootstrap takes the weights as given and clients as independent. Measured coverage of its 95 % intervals of ICC2, 5
    to 30 clients: 0.90 to 0.95 (above 0.98 at an ICC of 0, where it is cautious); where clients differ much in their
    noise (log-normal, σ = 0.5), 0.66 to 0.83 with 5 and 0.86 to 0.88 with 30 clients. The coverage of F intervals there
    is 0.55 to 0.81 and 0.87 to 0.89.

    References
    ----------
    .. [1] Shrout, Fleiss (1979). Intraclass correlations: uses in assessing rater reliability. Psychol. Bull. 86.
    .. [2] McGraw, Wong (1996). Forming inferences about some intraclass correlation coefficients. Psychol. Methods 1.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 2, 50)) + 0.5 * rng.normal(size=(10, 2, 50))  # ICC = 1 / (1 + 0.25)
    >>> own = rng.normal(size=(10, 2, 50))
    >>> icc(np.concatenate([alike, own], axis=1))
    Agreement of 10 clients on the weights of 4 units, 50 weights per unit
      layer: ICC2 0.43, 95 % from 0.37 to 0.49
      units: ICC2 median 0.41, 2 above 0 at a false discovery rate of 0.05, 0 dead
      highest: 1 0.81, 0 0.79, 2 0.03, 3 -0.04
      lowest:  3 -0.04, 2 0.03, 0 0.79, 1 0.81
    """
    _check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    _check.integer("replicates", replicates, low=0)
    how = {"level": level, "replicates": replicates, "seed": seed}
    return each(weights, icc_of, layer=layer, checkpoint=checkpoint, minus=start, **how)


def icc_of(
    weights: Weights, start: Any = None, *, level: float = 0.95, replicates: int = 0, seed: int = 0
) -> IccResult:
    """As :func:`icc`, of one layer."""
    refuse_replicates(weights)
    units, total = labels(weights, "unit", 1), None
    drawn: tuple[Any, Any] = (None, None)
    if replicates and isinstance(weights, xr.DataArray):
        _require_memory(weights)
    for clients, w in group_blocks(weights, whole=replicates > 0):
        w = w.detach() if is_torch_array(w) else w  # no graph of what is summed
        origin = None if start is None else start_of(start, weights, w)
        if origin is not None and total is None:
            require_related(origin, w)
        found = _icc.sums(w, origin)
        _require_finite(found, w, units, clients)
        total = found if total is None else total + found
        if replicates and len(clients) > 1:  # one client is refused below
            drawn = icc_bootstrap.bootstrap(w, origin, replicates=replicates, seed=seed)
    result = icc_sums(cast(_icc.Sums, total), units, level=level)
    return replace(result, of_change=start is not None, replicates=drawn[0], layer_replicates=drawn[1])


def icc_sums(total: _icc.Sums, units: NDArray[Any], *, level: float = 0.95) -> IccResult:
    """As :func:`icc`, from sums over clients (:func:`fedstat.stats.icc.sums`), which a server can add up."""
    of_units, of_layer = _on_host(_icc.mean_squares(total)), _on_host(_icc.layer_mean_squares(total))
    return IccResult(
        coefficients=_icc.coefficients(of_units, level=level),
        layer_coefficients=_icc.coefficients(of_layer, level=level),
        mean_squares=of_units,
        units=units,
        level=level,
    )


def _on_host(ms: _icc.MeanSquares) -> _icc.MeanSquares:
    b, j, e, exponent = (numpy_of(x) for x in (ms.weights, ms.clients, ms.residual, ms.exponent))
    return _icc.MeanSquares(b, j, e, ms.n_weights, ms.n_clients, exponent)


def _require_finite(s: _icc.Sums, w: Any, units: NDArray[Any], clients: NDArray[Any]) -> None:
    if np.isfinite(numpy_of(s.units.residual)).all():
        return
    for client, one in zip(clients, w, strict=True):
        finite = np.isfinite(numpy_of(one)).all(axis=1)
        if not finite.all():
            raise bad_weights(units[~finite], client)
    raise bad_weights(units[~np.isfinite(numpy_of(s.units.residual))])


def _require_memory(weights: xr.DataArray) -> None:
    if not weights.variable._in_memory and weights.nbytes > (free := available_memory()):
        raise ValueError(
            f"resampling clients needs all weights, {weights.nbytes / 2**30:.1f} GiB, in memory, but "
            f"{free / 2**30:.1f} GiB are available. Select units, or use replicates=0."
        )
