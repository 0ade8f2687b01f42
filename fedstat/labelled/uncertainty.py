"""How certain is a split, how many factors? ``bootstrap``, ``permutation_test``, ``sensitivity``, ``n_factors``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Unpack

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat._utils.streams import generator
from fedstat.labelled.arrays import LayerSums, Weights, client_sums, numpy_of
from fedstat.labelled.factor import ReplicateOptions, fa, say_if_alone, start_by_unit
from fedstat.labelled.inputs import by_layer, subtract_baseline
from fedstat.labelled.splitting import say_if_contradicted, split_sums
from fedstat.results import ConvergenceWarning, SplitResult
from fedstat.results.uncertainty import (
    BootstrapResult,
    NFactorsResult,
    PermutationResult,
    SensitivityResult,
)
from fedstat.stats import factor, number_of_factors, resampling
from fedstat.stats import split as _split
from fedstat.stats.moments import correlation
from fedstat.stats.split import Tau

_N_STARTS = 5
_FEW_CLIENTS = 4  # whose halves can be fitted
_OF_FITS = ("n_factors", "method", "start", "max_iter", "tol", "heywood")


def _check_repeats(verb: str, **arguments: Any) -> None:
    """Raise TypeError for an option that repeated fits do not take, listing those that they do."""
    options = arguments.pop("options")
    if unknown := sorted(set(options) - set(_OF_FITS)):
        known = ", ".join([*arguments, *_OF_FITS])
        raise TypeError(f"{verb} takes {known} after the weights, but got {', '.join(unknown)}")
    _refuse_agreement(verb, options.get("method"))
    check.real("level", arguments.get("level", 0.5), low=0, high=1, open_low=True, open_high=True)


def _refuse_agreement(verb: str, method: object, **_: object) -> None:
    if method == "icc":
        raise ValueError(
            f"{verb} repeats factor analyses, and agreement is not one, but got method='icc'. "
            "fedstat.icc(weights, n_boot=B) resamples clients for agreement; split its result by .split(tau=...)."
        )


@by_layer(checks=partial(_check_repeats, "bootstrap"))
def bootstrap(
    weights: Weights,
    *,
    tau: Tau = 0.5,
    n_boot: int = 200,
    level: float = 0.95,
    seed: int = 0,
    kappa: float = 0.85,
    executor: Executor | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    baseline: Any = None,
    **options: Unpack[ReplicateOptions],
) -> BootstrapResult:
    """Standard errors and intervals of communalities, and how often each unit is shared, by resampling clients.

    The bootstrap of Efron (1979), "Bootstrap methods: another look at the jackknife", Ann. Statist. 7, 1-26, with
    clients as the sample.

    ν depends on the number of clients: with all κ of the eigenvalues' sum to reach, a sample's shared units have less
    of it, and its personal units more, than the population's. Intervals are therefore of ν that samples of as many
    clients give on average. The result's column ``half_sample`` shows how far ν still moves. There are no intervals of
    the population's ν: of those that were tried, none covered it where it was given.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or what holds layers
        As in :func:`fedstat.split`; at least 2 clients.
    tau, kappa
        As in :func:`fedstat.split`; a quantile is taken anew in every replicate.
    n_boot : int
    level : float in (0, 1)
        Confidence level of the intervals.
    seed : int
    executor : Executor, optional
        Any :class:`concurrent.futures.Executor` (of threads, processes, loky, mpi4py, or Dask's
        ``Client.get_executor()``), whose workers analyse the replicates, each on one BLAS thread. The numbers are the
        same whatever the executor and its workers; they are those without one where BLAS has one thread
        (``OMP_NUM_THREADS=1``), and differ from them by rounding where it has several and units are 300 or more.
    layer, checkpoint, baseline
        Which weights, where there are several layers or rounds, and what is taken off them: as in
        :func:`fedstat.split`.
    **options
        n_factors, method, start, max_iter, tol and heywood ("allow" or "bound") of :func:`fedstat.fa`, as
        :class:`fedstat.labelled.factor.ReplicateOptions` lists them.

    Returns
    -------
    BootstrapResult
        A :class:`fedstat.results.ByLayer` of them where layers are several.

    Raises
    ------
    ValueError
        If there are fewer than 2 clients, or as :func:`fedstat.split`.
    TypeError
        If an argument is none of these; the message lists them.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    >>> result = bootstrap(np.concatenate([alike, rng.normal(size=(10, 4, 20))], axis=1), n_factors=1, n_boot=50)
    >>> result.p_shared.tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    found, at_hand, fitting = _at_hand(weights, baseline, tau=tau, kappa=kappa, **options)
    say_if_contradicted(at_hand)
    m, fitting = found.moments, {"seed": seed, "executor": executor, **fitting}
    drawn = resampling.bootstrap(m, tau=tau, replicates=n_boot, **fitting)
    fields = {name: numpy_of(field) for name, field in drawn._asdict().items()}
    if len(m.n) >= _FEW_CLIENTS:
        fields["half_samples"] = numpy_of(resampling.half_samples(m, **fitting))
    return BootstrapResult(split=at_hand, level=level, **fields)


@by_layer(checks=partial(_check_repeats, "permutation_test"))
def permutation_test(
    weights: Weights,
    *,
    n_permutations: int = 199,
    seed: int = 0,
    kappa: float = 0.85,
    executor: Executor | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    baseline: Any = None,
    **options: Unpack[ReplicateOptions],
) -> PermutationResult:
    """Do units carry an identity across clients? Shuffle the units within each client and compare.

    A permutation test in the sense of Fisher (1935), "The design of experiments", whose null hypothesis is that the
    units of a client could be named in any order. What is compared is the spread of ν over units: agreement of clients
    on units that do not explain one another leaves it as it is, and is found by :func:`icc`. Clients that share initial
    parameters, or a mask that prunes them, have units that differ from each other: the hypothesis is then false by
    construction, and a small p-value says no more than that.

    Parameters
    ----------
    weights, kappa, executor, layer, checkpoint, baseline, **options
        As in :func:`bootstrap`.
    n_permutations : int
        Shuffles.
    seed : int

    Returns
    -------
    PermutationResult
        A small p-value says that what factors explain differs between units by more, or by less, than it would if
        each client had named its units in an order of its own. A :class:`fedstat.results.ByLayer` of results where
        layers are several.

    Examples
    --------
    >>> import numpy as np
    >>> own = np.random.default_rng(0).normal(size=(8, 6, 30))
    >>> permutation_test(own, n_factors=1, n_permutations=99).p_value > 0.05
    True
    """
    found, at_hand, fitting = _at_hand(weights, baseline, tau=0.5, kappa=kappa, **options)
    drawn = resampling.permutation(found.moments, replicates=n_permutations, seed=seed, executor=executor, **fitting)
    return PermutationResult(at_hand, numpy_of(drawn.communality))


def _at_hand(
    weights: Weights, baseline: Any, *, tau: Tau, **fitting: Any
) -> tuple[LayerSums, SplitResult, dict[str, Any]]:
    """Sums of each client, the split by their total, and the arguments of the fits that repeat it."""
    found = client_sums(subtract_baseline(weights, baseline))
    if "start" in fitting:
        fitting["start"] = start_by_unit(fitting["start"], found.units)
    return found, split_sums(found, tau=tau, of_change=baseline is not None, **fitting), fitting


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
    baseline: Any = None,
) -> SensitivityResult:
    """Does the split depend on what the analyst chose: estimator, κ, start, iterations, τ?

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or what holds layers
        As in :func:`fedstat.split`.
    tau, kappa, method
        Settings of the reference split.
    kappas, taus
        Values to compare, one at a time.
    n_starts : int
        Random starts to compare, for ``"pa"`` and ``"minres"``.
    seed : int
        Seed of the random starts.
    layer, checkpoint, baseline
        As in :func:`fedstat.split`.

    Returns
    -------
    SensitivityResult
        Non-convergence is a column of its table, not a warning for each variant; each variant stops by the rule of the
        reference, but for the one of ``tol``. A :class:`fedstat.results.ByLayer` of results where layers are several.
    """
    found = client_sums(subtract_baseline(weights, baseline))
    say_if_alone(found.n_clients)
    r = correlation(found.total)
    n_starts = check.integer("n_starts", n_starts, low=0)
    if check.choice("method", method, factor.METHODS) not in factor.ITERATE:
        if n_starts not in (0, _N_STARTS):
            raise ValueError(f"n_starts has no effect with method={method!r}, which has no start, but got {n_starts}.")
        n_starts = 0
    rng = generator(seed, "stability")
    variants: list[tuple[str, str, dict[str, Any]]] = [
        *(("method", name, {"method": name}) for name in factor.METHODS if name != method),
        *(("kappa", f"{k:g}", {"kappa": k}) for k in kappas if k != kappa),
        *(("start", "smc", {"start": "smc"}) for _ in range(min(1, n_starts))),
        *(("start", f"random {i + 1}", {"start": rng.uniform(size=len(found.units))}) for i in range(n_starts)),
        *(("max_iter", "1000", {"max_iter": 1000}) for _ in range(method == "pa")),
        *(("tol", "1e-06", {"max_iter": 1000, "tol": 1e-6}) for _ in range(method == "pa")),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reference = split_sums(found, tau=tau, kappa=kappa, of_change=baseline is not None, method=method)
        rows = []
        warnings.simplefilter("ignore", UserWarning)  # of variants: what they end in are columns
        for varied, value, changes in variants:
            fit = fa(r, corr=True, **({"kappa": kappa, "method": method} | changes))
            rows.append(_row(varied, value, reference, fit.split(tau=tau)))
    say_if_contradicted(reference)
    rows += [_row("tau", str(t), reference, reference.factors.split(tau=t)) for t in taus if t != tau]
    return SensitivityResult(reference, pd.DataFrame(rows))


@by_layer()
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
    baseline: Any = None,
) -> NFactorsResult:
    """How many factors: the κ rule beside Kaiser's, parallel analysis, Velicer's MAP and the scree.

    FedFac §4.1 (κ); Kaiser (1960); Horn (1965), "A rationale and test for the number of factors in factor analysis",
    Psychometrika 30, 179-185; Velicer (1976), "Determining the number of components from the matrix of partial
    correlations", Psychometrika 41, 321-327; Cattell (1966) for the scree.

    Parameters
    ----------
    z : array, tensor or DataArray (row, unit), or weights
        As in :func:`fedstat.fa`; dead units are left out.
    kappa : float
        Threshold of the κ rule.
    corr, n_obs
        As in :func:`fedstat.fa`; parallel analysis needs ``n_obs`` with a correlation matrix. Rows of one client are
        alike, so a smaller number than that of the rows is the cautious choice.
    draws : int
        Noise matrices of parallel analysis.
    quantile : float
        Quantile of their eigenvalues.
    seed : int
    layer, checkpoint, baseline
        As in :func:`fedstat.fa`.

    Returns
    -------
    NFactorsResult
        A :class:`fedstat.results.ByLayer` of them where layers are several.

    Raises
    ------
    ValueError
        If ``corr`` and no ``n_obs``, or as :func:`fedstat.fa`.

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
        raise ValueError("n_obs must be given with a correlation matrix: parallel analysis needs it, but got None")
    live = fit.correlation[np.ix_(~fit.dead, ~fit.dead)]
    numbers, curves = number_of_factors.compare(live, fit.n_obs, kappa=kappa, draws=draws, quantile=quantile, seed=seed)
    return NFactorsResult(numbers, curves, kappa, fit.n_obs)


def _row(varied: str, value: str, reference: SplitResult, other: SplitResult) -> dict[str, Any]:
    return {
        "varied": varied,
        "value": value,
        "adjusted_rand": float(_split.adjusted_rand(reference.shared, other.shared)),
        "same_state": float(_split.same_state(reference.shared, other.shared)),
        "n_factors": other.factors.n_factors,
        "converged": other.factors.converged,
        "n_heywood": int(other.factors.heywood.sum()),
    }
