"""Uncertainty of a split: ``bootstrap``, ``jackknife``, ``permutation_test``, ``sensitivity`` and ``n_factors``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import numpy_of
from fedstat._utils.lazy import pd
from fedstat._utils.loops import progress_bar, track
from fedstat._utils.streams import generator
from fedstat.labelled.factor import (
    ReplicateOptions,
    align_init,
    compared,
    fa,
    matrix_form,
    show_options,
    warn_if_single_client,
)
from fedstat.labelled.groups import client_groups, require_effect_of_claim
from fedstat.labelled.inputs import by_layer
from fedstat.labelled.layer import Layer, Weights
from fedstat.labelled.runs import AUTO, Stage
from fedstat.labelled.splitting import split_sums, warn_if_contradicted
from fedstat.labelled.sums import LayerSums, client_sums
from fedstat.results import ConvergenceWarning, SplitResult
from fedstat.results.jackknife import JackknifeResult
from fedstat.results.uncertainty import (
    BootstrapResult,
    NFactorsResult,
    PermutationResult,
    SensitivityResult,
)
from fedstat.stats import LEAST_FOR_HALVES, Claim, factor, number_of_factors, resampling
from fedstat.stats import split as _split
from fedstat.stats.moments import correlation
from fedstat.stats.split import Tau

_N_STARTS = 5
_MOST_BLOCKS = 50  # of clients, by default: more make a standard error hardly more precise


def _check_repeats(verb: str, **arguments: Any) -> None:
    """Check the arguments of repeated fits that differ between verbs."""
    _refuse_agreement(verb, arguments.get("method"))
    require_effect_of_claim(arguments["groups"], arguments.get("claim"))
    check.real("level", arguments.get("level", 0.5), low=0, high=1, open_low=True, open_high=True)
    for name in {"n_boot", "n_permutations"} & arguments.keys():
        check.integer(name, arguments[name])


def _refuse_agreement(verb: str, method: object, **_: object) -> None:
    if method == "icc":
        raise ValueError(
            f"{verb} needs a method of factor analysis, but got method='icc'. To resample clients for agreement, use "
            "fedstat.icc(weights, n_boot=B); to split by it, use .split(tau=...) of the result."
        )


@show_options(ReplicateOptions, fa)
@by_layer(checks=partial(_check_repeats, "bootstrap"), over_clients=True)
def bootstrap(
    weights: Weights,
    *,
    groups: Any = None,
    claim: Claim | None = None,
    tau: Tau = 0.5,
    n_boot: int = 200,
    level: float = 0.95,
    seed: int = 0,
    kappa: float = 0.85,
    executor: Executor | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
    **options: Unpack[ReplicateOptions],
) -> BootstrapResult:
    """Bootstrap a split over clients: selection frequencies of units, standard errors and CIs of communalities.

    The bootstrap is Efron's [1]_, with clients as the sampling units: each bootstrap sample draws clients with
    replacement, and repeats the factor analysis and the split.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`fedstat.split`; at least 2 clients.
    groups, claim
        Known groups of clients, and what conclusions hold for, as in :func:`fedstat.icc`: for new groups, samples
        consist of whole groups; for these groups, clients are drawn within each group.
    tau, kappa
        As in :func:`fedstat.split`; a quantile is computed separately in every bootstrap sample.
    n_boot : int
        Number of bootstrap samples.
    level : float in (0, 1)
        Confidence level of the intervals.
    seed : int
        Seed of the bootstrap samples.
    executor : Executor, optional
        Any :class:`concurrent.futures.Executor`, as of loky, mpi4py or Dask. Its workers analyze the bootstrap samples,
        each on one BLAS thread; by default, NumPy arrays of at least 100 units are analyzed in ``OMP_NUM_THREADS``
        threads. Results do not depend on the executor.
    layer, checkpoint, stage, baseline
        Layers and round to analyze, and initial parameters to subtract: as in :func:`fedstat.split`.
    progress : bool or None
        Show how many layers and fits are done; see :func:`fedstat.fl.train`.
    n_factors, method, init, max_iter, tol, heywood
        Settings of the factor analysis, as in :func:`fedstat.fa`; ``heywood`` is "allow" or "bound".

    Returns
    -------
    BootstrapResult
        Bootstrap samples of communalities and groups; with several layers, a :class:`fedstat.results.LayerResults`.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients, a claim has too few groups or clients, or as :func:`fedstat.split`.
    TypeError
        If an option does not exist; the message lists the possible options.

    Notes
    -----
    Intervals refer to the expected ν in samples of as many clients, not to the population's ν. The selection frequency
    of a unit is not the probability that the unit is shared: a group that recurs often may still be wrong.
    :func:`jackknife` gives standard errors alone, in a fraction of the time. More: :doc:`/background/statistics`.

    References
    ----------
    .. [1] Efron (1979). Bootstrap methods: another look at the jackknife. Annals of Statistics 7, 1-26.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    >>> result = bootstrap(np.concatenate([alike, rng.normal(size=(10, 4, 20))], axis=1), n_factors=1, n_boot=50)
    >>> result.prop_shared.tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    grouping = None if groups is None else client_groups(groups, weights.clients, claim)
    layer_sums, observed, fitting = _observed_split(weights, tau=tau, kappa=kappa, **options)
    warn_if_contradicted(observed)
    m, fitting = layer_sums.moments, {"seed": seed, "executor": executor, **fitting}
    with progress_bar(n_boot, "sample", progress) as bar:
        draws_groups = grouping is not None and grouping.claim == "new groups"
        samples = resampling.bootstrap(
            m, tau=tau, replicates=n_boot, groups=None if grouping is None else grouping.codes,
            whole_groups=draws_groups, tick=bar.update, **fitting,
        )  # fmt: skip
    fields: dict[str, Any] = {name: numpy_of(field) for name, field in samples._asdict().items()}
    if grouping is not None:
        fields |= {"claim": grouping.claim, "group_sizes": grouping.sizes}
    elif len(m.n) >= LEAST_FOR_HALVES:
        fields["half_samples"] = numpy_of(resampling.half_samples(m, **fitting))
    return BootstrapResult(split=observed, level=level, **fields)


@show_options(ReplicateOptions, fa)
@by_layer(checks=partial(_check_repeats, "jackknife"), over_clients=True)
def jackknife(
    weights: Weights,
    *,
    n_blocks: int | None = None,
    groups: Any = None,
    claim: Claim | None = None,
    tau: Tau = 0.5,
    seed: int = 0,
    kappa: float = 0.85,
    executor: Executor | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
    **options: Unpack[ReplicateOptions],
) -> JackknifeResult:
    """Compute standard errors of communalities by the delete-a-group jackknife over clients.

    Clients are divided into blocks, and the factor analysis is repeated without each block [1]_. This takes one fit per
    block, a fraction of the time of :func:`bootstrap`.

    Parameters
    ----------
    weights, tau, kappa, executor, layer, checkpoint, stage, baseline, progress
        As in :func:`bootstrap`.
    n_factors, method, init, max_iter, tol, heywood
        As in :func:`bootstrap`.
    n_blocks : int, optional
        Number of random blocks of clients, from 2 to the number of clients. By default each client is a block; more
        than 50 clients have 50 blocks. Fewer blocks take less time, and standard errors are less precise.
    groups, claim
        Known groups of clients, and what standard errors refer to, as in :func:`fedstat.icc`: for new groups, blocks
        are the groups, which must be independent and of similar size; for these groups, parts of each group.
    seed : int
        Seed of the random blocks.

    Returns
    -------
    JackknifeResult
        Standard errors and the communalities without each block; with several layers, a
        :class:`fedstat.results.LayerResults` of these results.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients or blocks; if a claim has too few groups or clients; if ``n_blocks`` is set
        for new groups; or as :func:`fedstat.split`.
    TypeError
        If an option does not exist; the message lists the possible options.

    Notes
    -----
    Standard errors refer to ν in samples of as many clients. They are valid if ν changes smoothly as clients change:
    the factors are identified (eigenvalues at the cut differ by several standard errors) and their number is fixed, or
    equal in all refits. Clients, or groups, must be independent. Cautions of the result name factors that are not
    identified and a client that dominates. Simulations of these cases: :doc:`/background/statistics`.

    The jackknife gives no selection frequencies and no intervals: use :func:`bootstrap`.

    References
    ----------
    .. [1] Kott (2001). The delete-a-group jackknife. Journal of Official Statistics 17, 521-526.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    >>> result = jackknife(np.concatenate([alike, rng.normal(size=(10, 4, 20))], axis=1), n_factors=1)
    >>> result.std_error.round(3)
    array([0.037, 0.031, 0.029, 0.024, 0.009, 0.003, 0.006, 0.008])
    """
    blocks, fields = _client_blocks(weights.clients, n_blocks, groups, claim, seed)
    fixed = fields["block_groups"][blocks] if "block_groups" in fields else None
    layer_sums, observed, fitting = _observed_split(weights, tau=tau, kappa=kappa, **options)
    warn_if_contradicted(observed)
    with progress_bar(int(blocks.max()) + 1, "block", progress) as bar:
        replicates = resampling.delete_blocks(
            layer_sums.moments, blocks, groups=fixed, tau=tau, executor=executor, tick=bar.update, **fitting
        )
    fields |= {name: numpy_of(getattr(replicates, name)) for name in ("communality", "n_factors", "converged", "gap")}
    return JackknifeResult(observed, blocks, **fields)


def _client_blocks(
    clients: NDArray[Any], n_blocks: int | None, groups: Any, claim: Claim | None, seed: int
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the number of each client's block, and the fields of the result on groups."""
    n = min(len(clients), _MOST_BLOCKS) if n_blocks is None else n_blocks
    if groups is None:
        return resampling.divide_clients(len(clients), n, seed=seed), {}
    grouping = client_groups(groups, clients, claim)
    if grouping.claim == "new groups":
        if n_blocks is not None:
            raise ValueError(
                f"n_blocks has no effect with groups, which are the blocks, but got {n_blocks}. Remove it."
            )
        return grouping.codes, {"claim": grouping.claim}
    blocks = resampling.divide_clients(len(clients), n, groups=grouping.codes, seed=seed)
    return blocks, {"claim": grouping.claim, "block_groups": grouping.codes[np.unique(blocks, return_index=True)[1]]}


@show_options(ReplicateOptions, fa)
@by_layer(checks=partial(_check_repeats, "permutation_test"))
def permutation_test(
    weights: Weights,
    *,
    groups: Any = None,
    n_permutations: int = 199,
    seed: int = 0,
    kappa: float = 0.85,
    executor: Executor | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
    **options: Unpack[ReplicateOptions],
) -> PermutationResult:
    """Test if units are exchangeable within clients, by permuting the units of each client.

    The test statistic is the standard deviation of the communality ν over units. H0: the units of each client are
    exchangeable, so that every client could list its units in any order. It is a permutation test in the sense of
    Fisher [1]_.

    Parameters
    ----------
    weights, kappa, executor, layer, checkpoint, stage, baseline, progress
        As in :func:`bootstrap`.
    n_factors, method, init, max_iter, tol, heywood
        As in :func:`bootstrap`.
    groups : array, Series, DataArray (client,), mapping from client to group, or ClientClustersResult, optional
        Known groups of clients, whose units are permuted alike. H0 is then: each group could list its units in any
        order, the same for all its clients.
    n_permutations : int
        Number of permutations.
    seed : int
        Seed of the permutations.

    Returns
    -------
    PermutationResult
        Observed communalities and communalities under H0; with several layers, a
        :class:`fedstat.results.LayerResults` of these results. A small p value means that ν differs between units by
        more, or by less, than if each client listed its units in a separate order.

    Raises
    ------
    ValueError, TypeError
        As :func:`bootstrap`.

    Notes
    -----
    Common initial parameters, or a common pruning mask, make units differ from each other. H0 is then false by
    construction, and a small p value shows only this. A large p value does not show exchangeability.

    The test does not detect agreement of clients on units that do not explain one another, since this leaves the
    standard deviation of ν unchanged. Use :func:`icc` for agreement.

    References
    ----------
    .. [1] Fisher (1935). The design of experiments. Oliver and Boyd.

    Examples
    --------
    >>> import numpy as np
    >>> weights = np.random.default_rng(0).normal(size=(8, 6, 30))
    >>> permutation_test(weights, n_factors=1, n_permutations=99).p_value > 0.05
    True
    """
    grouping = None if groups is None else client_groups(groups, weights.clients, any_size=True)
    layer_sums, observed, fitting = _observed_split(weights, tau=0.5, kappa=kappa, **options)
    fitting |= {"seed": seed, "executor": executor, "groups": None if grouping is None else grouping.codes}
    with progress_bar(n_permutations, "permutation", progress) as bar:
        permuted = resampling.permutation(layer_sums.moments, replicates=n_permutations, tick=bar.update, **fitting)
    return PermutationResult(
        observed, numpy_of(permuted.communality), None if grouping is None else len(grouping.names)
    )


def _observed_split(weights: Layer, *, tau: Tau, **fitting: Any) -> tuple[LayerSums, SplitResult, dict[str, Any]]:
    """Return the sums of each client, the split of all clients, and the arguments of repeated fits."""
    layer_sums, is_change = compared(weights, client_sums(weights)), weights.baseline is not None
    if "init" in fitting:
        fitting["init"] = align_init(fitting["init"], layer_sums.units)
    return layer_sums, split_sums(layer_sums, tau=tau, baseline_subtracted=is_change, **fitting), fitting


@by_layer(checks=partial(_refuse_agreement, "sensitivity"))
def sensitivity(
    weights: Weights,
    *,
    tau: Tau = 0.5,
    kappa: float = 0.85,
    method: factor.Method = "pa",
    kappas: Sequence[float] = (0.5, 0.75, 0.85, 0.9, 0.95),
    taus: Sequence[Tau] = (0.25, 0.75),
    n_starts: int = _N_STARTS,
    seed: int = 0,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
) -> SensitivityResult:
    """Compare a split with splits under other analysis choices, changed one at a time.

    The choices are the method, κ, initial values, number of iterations and τ. A low adjusted Rand index (ARI) means
    that this choice changes the split. It does not measure sampling error: use :func:`bootstrap`. To vary method and κ
    together, use :func:`split_map`.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`fedstat.split`.
    tau, kappa, method
        Settings of the reference split, as in :func:`fedstat.split`; not "icc".
    kappas, taus
        Values to compare with the reference, one at a time.
    n_starts : int
        Number of random initial values to compare, for ``"pa"`` and ``"minres"``.
    seed : int
        Seed of the random initial values.
    layer, checkpoint, stage, baseline
        As in :func:`fedstat.split`.
    progress : bool or None
        Show how many layers and choices are done; see :func:`fedstat.fl.train`.

    Returns
    -------
    SensitivityResult
        One row per changed choice; convergence is a column of its table, not a warning. All fits stop by the default
        rule of their method, except the variants of ``max_iter`` and ``tol``. With several layers, a
        :class:`fedstat.results.LayerResults` of these results.

    Raises
    ------
    ValueError
        As :func:`fedstat.split`; if ``method`` is "icc"; if ``n_starts`` is set for a method that does not iterate.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    >>> weights = np.concatenate([alike, rng.normal(size=(10, 4, 20))], axis=1)
    >>> table = sensitivity(weights, kappa=0.3, kappas=(0.5,), n_starts=0).tidy()
    >>> table[["varied", "value", "ari"]].round(2).head(4).values.tolist()
    [['method', 'minres', 1.0], ['method', 'pc', 1.0], ['method', 'leverage', 0.0], ['kappa', '0.5', 1.0]]
    """
    layer_sums = compared(weights, client_sums(weights))
    warn_if_single_client(layer_sums.n_clients)
    r = correlation(layer_sums.total)
    n_starts = check.integer("n_starts", n_starts, low=0)
    if check.choice("method", method, factor.METHODS) not in factor.ITERATE:
        if n_starts not in (0, _N_STARTS):
            raise ValueError(
                f"n_starts has no effect with method={method!r}, which does not iterate, but got {n_starts}."
            )
        n_starts = 0
    rng = generator(seed, "stability")
    variants: list[tuple[str, str, dict[str, Any]]] = [
        *(("method", name, {"method": name}) for name in factor.METHODS if name != method),
        *(("kappa", f"{k:g}", {"kappa": k}) for k in kappas if k != kappa),
        *(("init", "smc", {"init": "smc"}) for _ in range(min(1, n_starts))),
        *(("init", f"random {i + 1}", {"init": rng.uniform(size=len(layer_sums.units))}) for i in range(n_starts)),
        *(("max_iter", "1000", {"max_iter": 1000}) for _ in range(method == "pa")),
        *(("tol", "1e-06", {"max_iter": 1000, "tol": 1e-6}) for _ in range(method == "pa")),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reference = split_sums(
            layer_sums, tau=tau, kappa=kappa, baseline_subtracted=weights.baseline is not None, method=method
        )
        rows = []
        warnings.simplefilter("ignore", UserWarning)  # columns report Heywood cases and convergence
        with track(variants, "choice", progress) as tracked:
            for varied, value, changes in tracked:
                fit = fa(r, corr=True, **({"kappa": kappa, "method": method} | changes))
                rows.append(_row(varied, value, reference, fit.split(tau=tau)))
    warn_if_contradicted(reference)
    rows += [_row("tau", str(t), reference, reference.factors.split(tau=t)) for t in taus if t != tau]
    return SensitivityResult(reference, pd.DataFrame(rows))


@by_layer(form=matrix_form)
def n_factors(
    z: Any,
    *,
    kappa: float = 0.85,
    corr: bool = False,
    n_obs: int | None = None,
    draws: int = 100,
    quantile: float = 0.95,
    seed: int = 0,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
) -> NFactorsResult:
    """Estimate the number of factors by six rules.

    The rules are the κ rule (FedFac §4.1), Kaiser's [1]_, parallel analysis [2]_ of principal components and of
    factors, Velicer's MAP [3]_ and the scree [4]_.

    Parameters
    ----------
    z : array, tensor or DataArray (row, unit), or weights
        As in :func:`fedstat.fa`; constant units are excluded.
    kappa : float
        κ, the proportion of the eigenvalue sum that factors must reach in the κ rule.
    corr, n_obs
        As in :func:`fedstat.fa`; parallel analysis needs ``n_obs`` with a correlation matrix. Rows of one client are
        dependent: an ``n_obs`` below the number of rows is the conservative choice.
    draws : int
        Number of random data sets for parallel analysis.
    quantile : float
        Quantile of their eigenvalues.
    seed : int
        Seed of the random data sets.
    layer, checkpoint, stage, baseline, progress
        As in :func:`fedstat.fa`.

    Returns
    -------
    NFactorsResult
        Number of factors by each rule, and their curves; with several layers, a :class:`fedstat.results.LayerResults`
        of these results.

    Raises
    ------
    ValueError
        As :func:`fedstat.fa`. If ``corr`` is True and ``n_obs`` is missing.

    References
    ----------
    .. [1] Kaiser (1960). The application of electronic computers to factor analysis. Educ. Psychol. Meas. 20, 141-151.
    .. [2] Horn (1965). A rationale and test for the number of factors in factor analysis. Psychometrika 30, 179-185.
    .. [3] Velicer (1976). Determining the number of components from the matrix of partial correlations. Psychometrika
       41, 321-327.
    .. [4] Cattell (1966). The scree test for the number of factors. Multivariate Behavioral Research 1, 245-276.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(400, 2)) @ rng.normal(size=(2, 10)) + rng.normal(size=(400, 10))
    >>> n_factors(z).numbers["parallel_fa"]
    2
    """
    fit = fa(z, corr=corr, n_obs=n_obs, n_factors=1, method="pc", baseline=baseline)
    if fit.n_obs is None:
        raise ValueError(
            "n_obs must be given with a correlation matrix, since parallel analysis needs it. Pass the number of rows."
        )
    live = fit.correlation[np.ix_(~fit.constant, ~fit.constant)]
    numbers, curves = number_of_factors.compare(live, fit.n_obs, kappa=kappa, draws=draws, quantile=quantile, seed=seed)
    return NFactorsResult(numbers, curves, kappa, fit.n_obs, draws, quantile)


def _row(varied: str, value: str, reference: SplitResult, other: SplitResult) -> dict[str, Any]:
    return {
        "varied": varied,
        "value": value,
        "ari": float(_split.adjusted_rand(reference.shared, other.shared)),
        "prop_unchanged": float(_split.prop_unchanged(reference.shared, other.shared)),
        "n_factors": other.factors.n_factors,
        "converged": other.factors.converged,
        "n_heywood": int(other.factors.heywood.sum()),
    }
