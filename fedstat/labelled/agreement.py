"""Do clients agree on a layer's units: the verb ``icc``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat import _check
from fedstat._later import xr
from fedstat.labelled.coerce import Weights, bad_weights, group_blocks, labels, numpy_of, refuse_replicates
from fedstat.labelled.inputs import each, over_layers
from fedstat.labelled.start import require_related, start_of
from fedstat.results.icc import INFERENCE, IccResult, Inference
from fedstat.stats import icc as _icc
from fedstat.stats import icc_bootstrap
from fedstat.stats.icc_clients import over_clients
from fedstat.stats.wide import available_memory


@over_layers
def icc(
    weights: Weights,
    *,
    start: Any = None,
    inference: Inference = "clients",
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
        As in :func:`fedstat.split`: at least 2 clients and 2 weights per unit. A lazy DataArray of more than 64 MB is
        read two or three times, for ``inference="F"`` once; only sums over clients are kept.
    start : array, tensor or DataArray (unit, weight...), path or state_dict, optional
        Weights that all clients started from. Agreement is then that of the changes, weights − start: clients that
        have hardly left a common start agree on their weights for that reason alone.
    inference : {"clients", "F"}
        What p values and intervals take for the sample. "clients": units are exchanged within clients, and clients left
        out one at a time. "F": the weights of a unit, as if they were independent; these are the numbers of R's psych.
    level : float in (0, 1)
        Confidence level of the intervals.
    replicates : int
        Bootstrap samples of clients; 0: none. The bootstrap holds the weights of all clients in memory, in their own
        type.
    seed : int
        Seed of the exchanges and of the bootstrap.
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
    Two questions have two answers. *Does this unit agree?* The p value: the hypothesis is that every client could have
    named its units in any order, and a small value says that clients agree on this unit more than on units paired at
    random. What units have in common, such as a profile of the layer, is taken off where there are 16 units or more,
    and rows are brought to norm 1: the test is about the direction of what distinguishes a unit, and not about size,
    which the coefficient has in it. The p value of the layer is of all units together, a test of labels. *How large is
    agreement?* The interval, by the jackknife over clients whose weights spread around the common profile as these
    clients' do; whatever they have in common counts. :func:`fedstat.stats.icc_clients.over_clients` has the steps.

    In simulations with 2 to 100 clients (white, smooth and heavy-tailed weights, clients and units of unlike sizes, a
    common profile, a start subtracted) the test rejects in .05 where nothing agrees, and intervals of 95 % cover in
    .97 to 1.00. Where half of the units are smooth and half are white noise, .07 to .09 are called at .05, some unit of
    a layer in up to .29. Where three quarters of the units are shared and the others have a common profile, that counts
    as agreement. Where spreads of clients are unlike (log-normal, σ = 0.7), or tails are long, and other clients are
    meant, with other spreads again, intervals cover in .81 to 1.00. Of d units in C clients hardly any can be called
    where d^(C − 1) is below 20: two clients need 20 units and more, three need 5.

    F takes weights as independent and normal. They are neither: of 12 independent clients with smooth weights some unit
    is called at a false discovery rate of .05 in 99 of 100 layers. The bootstrap takes the weights as they are and
    clients as independent: coverage 0.90 to 0.95 with 5 to 30 clients, above 0.98 at an ICC of 0, and 0.66 to 0.88
    where clients are unlike and others are meant. ``simulations/inference/agreement.py`` has the table.

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
      layer: ICC2 0.43, 95 % from 0.40 to 0.45 (jackknife, for clients that vary as these do)
             test of labels: p = 0.001 by 1000 exchanges of units, taken to be alike but for their size
      units: ICC2 median 0.41, 0 dead
             clients agree more than on units paired at random: on 2, at a false discovery rate of 0.05
      highest: 1 0.81, 0 0.79, 2 0.03, 3 -0.04
      lowest:  3 -0.04, 2 0.03, 0 0.79, 1 0.81
    """
    _check.choice("inference", inference, INFERENCE)
    _check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    _check.integer("replicates", replicates, low=0)
    how = {"inference": inference, "level": level, "replicates": replicates, "seed": seed}
    return each(weights, icc_of, layer=layer, checkpoint=checkpoint, minus=start, **how)


def icc_of(
    weights: Weights,
    start: Any = None,
    *,
    inference: Inference = "clients",
    level: float = 0.95,
    replicates: int = 0,
    seed: int = 0,
) -> IccResult:
    """As :func:`icc`, of one layer."""
    refuse_replicates(weights)
    units, total, origin = labels(weights, "unit", 1), None, None
    drawn: tuple[Any, Any] = (None, None)
    blocks: Callable[[], Iterable[Any]] = list
    if replicates and isinstance(weights, xr.DataArray):
        _require_memory(weights)
    for clients, w in group_blocks(weights, whole=replicates > 0):
        w = w.detach() if is_torch_array(w) else w  # no graph of what is summed
        blocks = partial(_again, w if total is None else weights)
        if start is not None and total is None:
            origin = start_of(start, weights, w)
            require_related(origin, w)
        found = _icc.sums(w, origin)
        _require_finite(found, w, units, clients)
        total = found if total is None else total + found
        if replicates and len(clients) > 1:  # one client is refused below
            drawn = icc_bootstrap.bootstrap(w, origin, replicates=replicates, seed=seed)
    sums = cast(_icc.Sums, total)
    result = icc_sums(sums, units, level=level)
    if inference == "clients":
        of_units, of_layer, n = over_clients(blocks, sums, origin, level=level, seed=seed)
        result = replace(result, coefficients=of_units, layer_coefficients=of_layer, inference=inference, n_exchanges=n)
    return replace(result, of_change=start is not None, replicates=drawn[0], layer_replicates=drawn[1])


def _again(weights: Weights) -> Iterator[Any]:
    """Groups of clients once more."""
    for _, w in group_blocks(weights):
        yield w


def icc_sums(total: _icc.Sums, units: NDArray[Any], *, level: float = 0.95) -> IccResult:
    """As :func:`icc` with ``inference="F"``, from sums over clients (:func:`fedstat.stats.icc.sums`) of a server."""
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
