"""Agreement of clients on a layer's units, and what it consists of: the verbs ``icc`` and ``variance_components``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, memory
from fedstat._utils import labels as _labels
from fedstat._utils.check import few, numpy_of
from fedstat._utils.loops import progress_bar
from fedstat.labelled.groups import ClientGroups, client_groups, require_effect_of_claim
from fedstat.labelled.inputs import by_layer
from fedstat.labelled.layer import Layer, Weights
from fedstat.labelled.runs import AUTO, CLASSES, COMMON_START, REASONS, Stage
from fedstat.labelled.sums import sum_groups
from fedstat.results.group_icc import GroupIccResult
from fedstat.results.icc import INFERENCE, NOT_TRAINED, IccResult, Inference
from fedstat.results.variance_components import ComponentsResult
from fedstat.stats import Claim, icc_resampling, icc_tests, nested, reml
from fedstat.stats import icc as _icc
from fedstat.stats import variance_components as by_moments
from fedstat.stats.group_icc import over_groups
from fedstat.stats.variance_components import BadWeightsError, Components, NoNoiseError

_TESTS = {"sign-flip": icc_tests.sign_flips, "permutation": icc_tests.permutations}


def _check(*, inference: Inference, level: float, n_boot: int, groups: Any, claim: Claim | None, **_: object) -> None:
    check.choice("inference", inference, INFERENCE)
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    check.integer("n_boot", n_boot, low=0)
    require_effect_of_claim(groups, claim)
    for name, value, default in (("inference", inference, "sign-flip"), ("n_boot", n_boot, 0)):
        if groups is not None and value != default:
            raise ValueError(f"{name} has no effect with groups, but got {value!r}. Remove it.")


@by_layer(checks=_check, apart=lambda **_: True)
def icc(
    weights: Weights,
    *,
    baseline: Any = AUTO,
    groups: Any = None,
    claim: Claim | None = None,
    inference: Inference = "sign-flip",
    level: float = 0.95,
    n_boot: int = 0,
    seed: int = 0,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    progress: bool | None = None,
) -> IccResult | GroupIccResult:
    """Estimate each unit's agreement: its intraclass correlation over clients, ICC2 = ICC(A,1).

    Agreement is the proportion of the variance of a unit's weights that all clients have in common. Communality
    (:func:`fedstat.fa`) answers another question: how well do the *other units* explain a unit?

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`fedstat.split`: at least 2 clients and 2 weights per unit.
    baseline : {"auto", "common", "download", "initial"}, array (unit, weight...), Net, state_dict, path, run or None
        Values to subtract, as in :func:`fedstat.split`. Of a run: by default the last common values of its clients.
    groups : array, Series, DataArray (client,), mapping from client to group, or ClientClustersResult, optional
        Known groups of clients, such as hospitals. The result has agreement within and between groups.
    claim : {"new groups", "these groups"}, optional
        With groups: conclusions hold for further groups (the default; at least 5), or further clients of these groups.
    inference : {"sign-flip", "permutation", "F"}
        Basis of the p values: flipped signs of clients (H0: deviations of clients are symmetric about the common
        profile), permuted units within clients (assumes equal covariances), or F tests (independent, normal weights).
    level : float in (0, 1)
        Confidence level of the intervals: the jackknife over clients, or with "F" those of psych.
    n_boot, seed : int
        Bootstrap samples of clients; seed of these, of sign flips with more than 13 clients, and of permutations.
    layer, checkpoint, stage, progress
        Layers and round to analyze, and the bar of layers and clients that are read: as in :func:`fedstat.split`.

    Returns
    -------
    IccResult, with groups GroupIccResult
        Coefficients of each unit (NaN if it is constant) and of the layer: of all weights of its units together. With
        several layers, or units that changed over unlike numbers of rounds, a :class:`fedstat.results.LayerResults`.

    Raises
    ------
    ValueError
        If groups do not fit the clients or the claim. If there are fewer than 2 clients (3 with ``n_boot``) or 2
        weights in a unit, or weights are NaN or infinite. If ``baseline`` has another shape or is not correlated.

    Notes
    -----
    A small p value says that *most clients deviate in one direction*; ICC2 and its interval, how far all clients agree.
    Averaged weights agree by construction: their ICC2 is 1. The coefficients are those of Shrout and Fleiss [1]_;
    ICC(A,1) is ICC2 in [2]_. Assumptions, weights with long tails, simulations: :doc:`/background/statistics`.

    References
    ----------
    .. [1] Shrout, Fleiss (1979). Intraclass correlations: uses in assessing rater reliability. Psychol. Bull. 86.
    .. [2] McGraw, Wong (1996). Forming inferences about some intraclass correlation coefficients. Psychol. Methods 1.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 2, 50)) + 0.5 * rng.normal(size=(10, 2, 50))  # ICC = 1 / (1 + 0.25)
    >>> icc(np.concatenate([alike, rng.normal(size=(10, 2, 50))], axis=1))  # doctest: +ELLIPSIS
    Agreement of 10 clients on 4 units (ICC2 = ICC(A,1)), 50 weights per unit
    Layer: ICC2 = 0.43, 95% CI [0.39, 0.46] (jackknife over clients)
      Sign-flip test over clients, H0: deviations of clients are symmetric about the
        common profile: p = 0.002 (all 511 flips)
      ...
      2 of 4: most clients deviate in one direction; 2: no evidence
      ...
    """
    if n_boot or inference == "permutation":
        _require_memory(weights)
        weights = weights.load()
    common, units, attrs = weights.common_baseline, weights.units, weights.attrs
    grouping = None if groups is None else client_groups(groups, weights.clients, claim)
    n_passes = 1 if inference == "F" else 2
    with progress_bar(n_passes * len(weights.clients), "client", progress) as bar:
        group_sums = sum_groups(weights, None if grouping is None else grouping.codes, bar.update)
        sums = reduce(add, group_sums)
        result = replace(
            icc_sums(sums, units, level=level), baseline_subtracted=weights.baseline is not None,
            reasons=_reasons(attrs.get(REASONS), sums, weights.baseline), common_start=attrs.get(COMMON_START),
            skewed_classes=attrs.get(CLASSES, False),
        )  # fmt: skip
        read_again = partial(weights.unlabeled_blocks, bar.update)
        if grouping is not None:
            agreement = over_groups(
                read_again, group_sums, grouping.codes, common,
                new_groups=grouping.claim == "new groups", level=level, seed=seed,
            )  # fmt: skip
            return GroupIccResult(
                agreement, units, result.constant, result.untrained, weights.clients, *grouping, result.n_weights,
                level, result.baseline_subtracted,
            )  # fmt: skip
        if n_boot:
            (w,) = weights.unlabeled_blocks()
            units_boot, layer_boot = icc_resampling.bootstrap(w, common, replicates=n_boot, seed=seed)
            result = replace(result, replicates=units_boot, layer_replicates=layer_boot)
        if inference == "F":
            return result
        test = partial(_TESTS[inference], seed=seed)
        by_clients = icc_resampling.over_clients(read_again, sums, test, common, level=level)
    return replace(
        result, coefficients=by_clients.units, layer_coefficients=by_clients.layer, inference=inference,
        test=by_clients.test, influence=by_clients.influence, errors=by_clients.errors, clients=weights.clients,
    )  # fmt: skip


def _reasons(reasons: NDArray[np.str_] | None, sums: _icc.Sums, baseline: Any) -> NDArray[np.str_] | None:
    """Return the reasons why units are identical in all clients: without any change, a unit was not trained."""
    if baseline is None:
        return reasons
    values = (sums.units.mean[:, None], sums.units.profile, sums.units.clients[:, None], sums.units.residual[:, None])
    is_trained = np.any([numpy_of((part != 0).any(axis=1)) for part in values], axis=0)
    return np.where(is_trained, "" if reasons is None else reasons, NOT_TRAINED)


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


def _require_memory(weights: Layer) -> None:
    if weights.is_lazy and weights.data.nbytes > (free := memory.available()):
        raise ValueError(
            f"Bootstrap and permutations need all weights in memory, {weights.data.nbytes / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} GiB are available. Select units, or use n_boot=0 and inference='sign-flip'."
        )


_BLOCK = 2**26  # bytes read at once


def _check_components(*, method: str, level: float, sizes: Any, **_: object) -> None:
    check.choice("method", method, ("moments", "reml"))
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    if sizes is not None and method == "moments":
        raise ValueError("sizes has no effect with method='moments'. Leave it out, or use method='reml'.")


@by_layer(checks=_check_components, form=lambda **_: "replicates")
def variance_components(
    weights: Weights,
    *,
    covariate: Any = None,
    sizes: Any = None,
    groups: Any = None,
    claim: Claim | None = None,
    method: Literal["moments", "reml"] = "moments",
    level: float = 0.95,
    seed: int = 0,
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
        At least 3 clients, 4 with a covariate, and 2 replicates. Or a run with ``probe="split-half"``, or layers.
    covariate : array, Series, DataArray (client,) or mapping from client, optional
        Property that clients are adjusted for first, such as the number of training samples.
    sizes : array, Series, DataFrame or DataArray (client,) or (client, replicate), or mapping from client, optional
        Number of training samples, for "reml" only; equal by default.
    groups, claim
        Known groups of clients, and what conclusions hold for: as in :func:`fedstat.icc`. Differences between groups
        are then a third component, and reliability is that of clients within groups.
    method : {"moments", "reml"}
        "moments" is unbiased even if clients have unequal noise; its estimates are sometimes negative. "reml" is
        restricted maximum likelihood [3]_ for noise that falls as 1 / samples: more precise if this holds, else biased.
    level : float in (0, 1)
        Confidence level of intervals and conclusions.
    seed : int
        Seed of the permutations of clients among groups.
    layer, checkpoint, stage, progress
        Layers and round to analyze, if there are several, and the progress bar: as in :func:`fedstat.split`.

    Returns
    -------
    ComponentsResult
        Variances, reliability, intervals and tests of each unit and of the layer; a :class:`LayerResults` of several.
        All but the variances are independent of the scale of the weights; variances beyond float64 are 0 or infinite.

    Raises
    ------
    ValueError
        If there are too few clients or replicates, or a covariate, sizes or groups do not fit the clients. If weights
        are NaN or infinite, or have equal replicates in all clients (unit and client are named).

    Notes
    -----
    If and only if reliability is above 0.5, a client's weights estimate its true weights better than the average over
    clients. High agreement (:func:`fedstat.icc`) means that clients have weights in common, high reliability that they
    *differ*. A warning names clients with identical replicates, which bias reliability. The test of groups errs if the
    smallest have the largest variances: in .12 of units for 1 : 8. See :doc:`/background/statistics`.

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
    units, clients = weights.units, weights.clients
    models = {dim: weights.labels[dim] for dim in ("client", "replicate")}
    x = None if covariate is None else _labels.matched("covariate", covariate, {"client": clients})
    n = None if sizes is None else _labels.matched("sizes", sizes, models)
    of_groups = _groups(groups, clients, claim, seed, covariate=covariate, sizes=sizes)
    gram = partial(reml.gram, sizes=n, covariate=x)
    estimate: Any = reml.components if method == "reml" else by_moments.components
    sums_of: Any = gram if method == "reml" or of_groups is not None else partial(by_moments.parts, covariate=x)
    if of_groups is not None:
        estimate = partial(nested.components, codes=of_groups.codes, method=method, claim=of_groups.claim, seed=seed)
    estimates: list[tuple[Any, ...]] = []
    pooled: list[tuple[Any, float]] = []
    agreements: list[NDArray[np.float64]] = []
    ratios: list[NDArray[np.float64]] = []
    equal: Any = True
    for block, w in _unit_blocks(weights, 0 if of_groups is None else 4 * len(clients) ** 2):
        with _name_units(units[block], clients):
            sums, exponent = by_moments.at_any_scale(sums_of, w)
            estimates.append(_rescaled(estimate(sums, level=level), exponent))
        pooled.append((sums.rescaled(exponent - exponent.max()).pooled(), float(exponent.max())))
        equal = equal & numpy_of((w[:, :1] == w[:, 1:]).reshape(len(clients), -1).all(axis=1))
        agreements.append(_icc.agreement(_icc.sums(w.mean(1))))
        ratios.append(by_moments.noise_ratios(w, n))
        n_replicates, n_weights = w.shape[1], w.shape[3]
    if equal.any() and not equal.all():
        check.warn(
            f"Replicates of client(s) {few(clients[equal])} are identical, which biases reliability upwards. Drop "
            "these clients, or train on other samples."
        )
    top = max(exponent for _, exponent in pooled)
    layer_sums = reduce(add, (sums.rescaled(np.array([exponent - top])) for sums, exponent in pooled))
    of_layer = _rescaled(estimate(layer_sums, level=level), np.array([top]))
    of_units = [_concatenate(blocks) for blocks in zip(*estimates, strict=True)]
    result = ComponentsResult(
        components=of_units[0],
        layer_components=of_layer[0],
        units=units,
        n_clients=len(clients),
        n_replicates=n_replicates,
        n_weights=n_weights,
        method=method,
        agreement=np.concatenate(agreements),
        adjusted=covariate is not None,
        noise_cv=by_moments.noise_cv(np.concatenate(ratios)),
    )
    if of_groups is None:
        return result
    return replace(
        result, group_components=of_units[1], layer_group_components=of_layer[1], groups=of_groups.names,
        group_sizes=of_groups.sizes, claim=of_groups.claim,
    )  # fmt: skip


def _groups(
    groups: Any, clients: NDArray[Any], claim: Claim | None, seed: int, *, covariate: Any, sizes: Any
) -> ClientGroups | None:
    """Return the groups of clients; raise ValueError for settings that do not go with groups, or without them."""
    if groups is not None:
        for name, value in (("covariate", covariate), ("sizes", sizes)):
            if value is not None:
                raise ValueError(f"{name} is not supported with groups. Leave out one of them.")
        return client_groups(groups, clients, claim)
    require_effect_of_claim(groups, claim)
    if seed:
        raise ValueError(f"seed has no effect without groups, but got {seed!r}. Remove it, or pass groups.")
    return None


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


def _unit_blocks(weights: Layer, n_sums: int) -> Iterator[tuple[slice, Any]]:
    """Yield (slice of units, (client, replicate, unit, weight)): all units if they and their sums fit into memory.

    A unit has ``n_sums`` numbers of sums in memory.
    """
    d = len(weights.units)
    step = max(1, _BLOCK * d // weights.data.nbytes) if weights.is_lazy else max(1, _BLOCK // n_sums) if n_sums else d
    for start in range(0, d, step):
        block = slice(start, start + step)
        yield block, weights.of_units(block)


def _rescaled(estimates: Any, exponent: NDArray[np.float64]) -> tuple[Any, ...]:
    """Return estimates for weights multiplied by 2 to the power of ``exponent``; variances may become 0 or inf."""
    power = (2 * exponent).astype(int)
    records = (estimates,) if isinstance(estimates, Components) else estimates
    names = [[name for name in ("between", "within") if name in c._fields] for c in records]
    with np.errstate(over="ignore"):
        scaled = [{n: np.ldexp(getattr(c, n), power) for n in of} for c, of in zip(records, names, strict=True)]
    return tuple(c._replace(**fields) for c, fields in zip(records, scaled, strict=True))


def _concatenate(blocks: Sequence[Any]) -> Any:
    fields = [np.concatenate(f) if isinstance(f[0], np.ndarray) else f[0] for f in zip(*blocks, strict=True)]
    return type(blocks[0])._make(fields)
