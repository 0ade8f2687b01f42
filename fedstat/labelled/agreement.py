"""Do clients agree on a layer's units: the verb ``icc``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check, memory
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import Weights, bad_weights, group_blocks, labels, numpy_of, refuse_replicates
from fedstat.labelled.inputs import baseline_of, by_layer, require_related
from fedstat.results.icc import INFERENCE, IccResult, Inference
from fedstat.stats import icc as _icc
from fedstat.stats import icc_resampling, icc_tests
from fedstat.stats.icc_resampling import over_clients

_TESTS = {"sign-flip": icc_tests.sign_flips, "permutation": icc_tests.permutations}


def _check(*, inference: Inference, level: float, n_boot: int, **_: object) -> None:
    check.choice("inference", inference, INFERENCE)
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    check.integer("n_boot", n_boot, low=0)


@by_layer(checks=_check)
def icc(
    weights: Weights,
    *,
    baseline: Any = None,
    inference: Inference = "sign-flip",
    level: float = 0.95,
    n_boot: int = 0,
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
        read twice, for ``inference="F"`` once; of up to 1 GiB a copy in float32 is held, larger ones are read again for
        some units at a time.
    baseline : array, tensor or DataArray (unit, weight...), path or state_dict, optional
        Initial parameters that all clients share. Agreement is then that of the changes, weights − baseline: clients
        that have hardly left a common initialization agree on their weights for that reason alone.
    inference : {"sign-flip", "permutation", "F"}
        What p values rest on. "sign-flip": signs of whole clients are flipped. "permutation": units are permuted within
        clients, which assumes that all units have equal covariances. "F": weights are independent and normal; these are
        the numbers of R's psych, intervals included. Otherwise intervals are the jackknife over clients.
    level : float in (0, 1)
        Confidence level of the intervals.
    n_boot : int
        Bootstrap samples of clients; 0: none. The bootstrap holds the weights of all clients in memory, in their own
        type.
    seed : int
        Seed of the bootstrap, of sign flips with more than 13 clients, and of drawn permutations.
    layer, checkpoint
        Which weights, where there are several layers or rounds: as in :func:`fedstat.split`.

    Returns
    -------
    IccResult
        A :class:`fedstat.results.ByLayer` of them where layers are several.
        For each unit, and for the layer, whose targets are all weights of all units together: there, differences
        between the units' means count as agreement. A unit that has one value throughout (a dead unit) is NaN, counted
        and named.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients (3 with ``n_boot``) or weights in a unit, weights are NaN or infinite (the
        client and the units are named), or ``baseline`` does not have the shape of one client's weights or is not
        correlated with them: subtracted from all, it would make clients agree.

    Notes
    -----
    **Does a unit agree?** H0 of a unit's p value: clients do not agree on it beyond the profile that all units have in
    common; their deviations from it are independent and symmetric about 0. The layer's p value is of all units
    together, and the common profile is tested on its own line. Each client's layer is scaled to norm 1.
    :func:`fedstat.stats.icc_tests.sign_flips` has the steps.

    What cannot be decided is NaN, or has no conclusion: a unit is tested if it varies in 5 clients at least; the
    layer's p is at least 2^(1 − C) for C clients (0.06 for 5, 0.03 for 6), and so is a unit's if no other unit is
    pooled with it. The permutation test says something with 2 clients also, but only where units are alike.

    **How large is agreement?** Intervals refer to other clients that are drawn as these were. They are the jackknife
    over clients (:func:`fedstat.stats.icc_resampling.over_clients`), and are given for a unit that varies in 5 clients,
    or in all of 3 or 4. The result's ``cautions()`` name clients of unlike size, groups and copies of clients, where
    intervals are too short.

    **In simulations** (``simulations/inference/agreement.py`` has the table), with synthetic layers and with trained
    networks, the sign-flip test rejects in .04 to .06 of units where nothing agrees, and some unit of a layer is called
    at a false discovery rate of .05 in .00 to .07. Permuting units of trained layers rejects in .05 to .3 of units. F
    tests call some unit in nearly all layers of smooth weights.

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
    Agreement of 10 clients on 4 units (ICC2 = ICC(A,1)), 50 weights per unit
    Layer: ICC2 = 0.43, 95% CI [0.39, 0.46] (jackknife over clients)
      Sign-flip test over clients, H0: no agreement on units beyond the profile that
        all units have in common: p = 0.002 (all 511 flips)
      Common profile of the units: 0% of the variance, p = 0.64 (same test)
    Units: ICC2 median 0.41, range -0.04 to 0.81; 0 constant, 0 not tested
      2 of 4: clients agree (sign-flip test, FDR 0.05); 2: no evidence
      highest: 1 (0.81), 0 (0.79), 2 (0.03), 3 (-0.04)
      lowest:  3 (-0.04), 2 (0.03), 0 (0.79), 1 (0.81)
    """
    refuse_replicates(weights)
    units, total, origin = labels(weights, "unit", 1), None, None
    drawn: tuple[Any, Any] = (None, None)
    names: list[Any] = []
    blocks: Callable[[], Iterable[Any]] = list
    if (n_boot or inference == "permutation") and isinstance(weights, xr.DataArray):
        _require_memory(weights)
    for clients, w in group_blocks(weights, whole=n_boot > 0):
        w = w.detach() if is_torch_array(w) else w  # no graph of what is summed
        blocks = partial(_again, w if total is None else weights)
        if baseline is not None and total is None:
            origin = baseline_of(baseline, weights, w)
            require_related(origin, w)
        names += clients.tolist()
        found = _icc.sums(w, origin)
        _require_finite(found, w, units, clients)
        total = found if total is None else total + found
        if n_boot and len(clients) > 1:  # one client is refused below
            drawn = icc_resampling.bootstrap(w, origin, replicates=n_boot, seed=seed)
    sums = cast(_icc.Sums, total)
    result = icc_sums(sums, units, level=level)
    if inference != "F":
        test = partial(_TESTS[inference], seed=seed)
        by_clients = over_clients(blocks, sums, test, origin, level=level)
        result = replace(
            result, coefficients=by_clients.units, layer_coefficients=by_clients.layer, inference=inference,
            test=by_clients.test, influence=by_clients.influence, clients=np.array(names),
        )  # fmt: skip
    return replace(result, of_change=baseline is not None, replicates=drawn[0], layer_replicates=drawn[1])


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
    if not weights.variable._in_memory and weights.nbytes > (free := memory.available()):
        raise ValueError(
            f"the bootstrap and permutations need all weights, {weights.nbytes / 2**30:.1f} GiB, in memory, but "
            f"{free / 2**30:.1f} GiB are available. Select units, or use n_boot=0 and inference='sign-flip'."
        )
