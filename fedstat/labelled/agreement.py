"""Agreement of clients on a layer's units: the verb ``icc``."""

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
from fedstat._utils.progress import progress_bar
from fedstat.labelled.arrays import (
    Weights,
    bad_weights,
    baseline_of,
    group_blocks,
    labels,
    numpy_of,
    refuse_replicates,
    require_related,
)
from fedstat.labelled.inputs import by_layer
from fedstat.labelled.runs import COMMON_START, REASONS, Stage
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
    stage: Stage | None = None,
    progress: bool | None = None,
) -> IccResult:
    """Estimate each unit's agreement: its intraclass correlation over clients, ICC2 = ICC(A,1).

    Agreement is the proportion of the variance of a unit's weights that all clients have in common. FedFac's
    communality (:func:`fedstat.fa`) answers another question: how well do the *other units* explain a unit?

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`fedstat.split`: at least 2 clients and 2 weights per unit.
    baseline : array, tensor or DataArray (unit, weight...), path or state_dict, optional
        Initial parameters common to all clients. Agreement is then that of the changes, weights − baseline.
    inference : {"sign-flip", "permutation", "F"}
        Basis of the p values. "sign-flip" flips the signs of whole clients. "permutation" permutes units within clients
        and assumes that all units have equal covariances. "F" assumes independent, normal weights, as R's psych does.
    level : float in (0, 1)
        Confidence level of the intervals: the jackknife over clients, or with "F" those of psych.
    n_boot : int
        Bootstrap samples of clients; 0: no bootstrap.
    seed : int
        Seed of the bootstrap, of sign flips with more than 13 clients, and of random permutations.
    layer, checkpoint, stage, progress
        Layers and round to analyze, and the bar of layers and clients that are read: as in :func:`fedstat.split`.

    Returns
    -------
    IccResult
        Coefficients of each unit and of the layer, whose targets are all weights of all units together. A constant unit
        is NaN. With several layers, a :class:`fedstat.results.LayerResults`.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients (3 with ``n_boot``) or 2 weights in a unit. If weights are NaN or infinite
        (client and units are named). If ``baseline`` has another shape, or is not correlated with the weights.

    Notes
    -----
    Weights that were averaged over clients agree by construction: their ICC2 is 1. The coefficients are those of Shrout
    and Fleiss [1]_; ICC(A,1) is ICC2 in [2]_. Assumptions and simulations: :doc:`/background/statistics`.

    References
    ----------
    .. [1] Shrout, Fleiss (1979). Intraclass correlations: uses in assessing rater reliability. Psychol. Bull. 86.
    .. [2] McGraw, Wong (1996). Forming inferences about some intraclass correlation coefficients. Psychol. Methods 1.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 2, 50)) + 0.5 * rng.normal(size=(10, 2, 50))  # ICC = 1 / (1 + 0.25)
    >>> icc(np.concatenate([alike, rng.normal(size=(10, 2, 50))], axis=1))
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
    boot_samples: tuple[Any, Any] = (None, None)
    names: list[Any] = []
    blocks: Callable[[], Iterable[Any]] = list
    if (n_boot or inference == "permutation") and isinstance(weights, xr.DataArray):
        _require_memory(weights)
    n_passes = 1 if inference == "F" else 2
    with progress_bar(n_passes * len(labels(weights, "client", 0)), "client", progress) as bar:
        for clients, w in group_blocks(weights, at_once=n_boot > 0):
            w = w.detach() if is_torch_array(w) else w  # sums need no autograd graph
            blocks = partial(_client_blocks, w if total is None else weights, bar.update)
            if baseline is not None and total is None:
                origin = baseline_of(baseline, weights, w)
                require_related(origin, w)
            names += clients.tolist()
            block_sums = _icc.sums(w, origin)
            _require_finite(block_sums, w, units, clients)
            total = block_sums if total is None else total + block_sums
            if n_boot and len(clients) > 1:  # icc_sums raises for a single client
                boot_samples = icc_resampling.bootstrap(w, origin, replicates=n_boot, seed=seed)
            bar.update(len(clients))
        sums = cast(_icc.Sums, total)
        result = icc_sums(sums, units, level=level)
        if inference != "F":
            test = partial(_TESTS[inference], seed=seed)
            by_clients = over_clients(blocks, sums, test, origin, level=level)
            result = replace(
                result, coefficients=by_clients.units, layer_coefficients=by_clients.layer, inference=inference,
                test=by_clients.test, influence=by_clients.influence, clients=np.array(names),
            )  # fmt: skip
    attrs = weights.attrs if isinstance(weights, xr.DataArray) else {}
    return replace(
        result, baseline_subtracted=baseline is not None, replicates=boot_samples[0], layer_replicates=boot_samples[1],
        reasons=attrs.get(REASONS), common_start=attrs.get(COMMON_START, False),
    )  # fmt: skip


def _client_blocks(weights: Weights, tick: Callable[[int], object]) -> Iterator[Any]:
    """Iterate over blocks of clients again."""
    for clients, w in group_blocks(weights):
        yield w
        tick(len(clients))


def icc_sums(total: _icc.Sums, units: NDArray[Any], *, level: float = 0.95) -> IccResult:
    """Estimate agreement from sums over clients (:func:`fedstat.stats.icc.sums`), as a server has them; F tests."""
    unit_squares, layer_squares = _on_host(_icc.mean_squares(total)), _on_host(_icc.layer_mean_squares(total))
    return IccResult(
        coefficients=_icc.coefficients(unit_squares, level=level),
        layer_coefficients=_icc.coefficients(layer_squares, level=level),
        mean_squares=unit_squares,
        units=units,
        level=level,
    )


def _on_host(ms: _icc.MeanSquares) -> _icc.MeanSquares:
    b, j, e, exponent = (numpy_of(x) for x in (ms.weights, ms.clients, ms.residual, ms.exponent))
    return _icc.MeanSquares(b, j, e, ms.n_weights, ms.n_clients, exponent)


def _require_finite(s: _icc.Sums, w: Any, units: NDArray[Any], clients: NDArray[Any]) -> None:
    if np.isfinite(numpy_of(s.units.residual)).all():
        return
    for client, client_weights in zip(clients, w, strict=True):
        finite = np.isfinite(numpy_of(client_weights)).all(axis=1)
        if not finite.all():
            raise bad_weights(units[~finite], client)
    raise bad_weights(units[~np.isfinite(numpy_of(s.units.residual))])


def _require_memory(weights: xr.DataArray) -> None:
    if not weights.variable._in_memory and weights.nbytes > (free := memory.available()):
        raise ValueError(
            f"Bootstrap and permutations need all weights in memory, {weights.nbytes / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} GiB are available. Select units, or use n_boot=0 and inference='sign-flip'."
        )
