"""Shared and client-specific units of a layer: the verbs ``split`` and ``update``."""

from __future__ import annotations

import warnings
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from fedstat import _check
from fedstat.labelled.agreement import icc
from fedstat.labelled.coerce import Weights, correlation_of, labels, sums
from fedstat.labelled.components import variance_components
from fedstat.labelled.factor import CHOICES, DEFAULTS, KAPPA, analyse, changed, require_effect, require_room
from fedstat.labelled.options import SplitOptions
from fedstat.results import AgreementWarning, ComponentsResult, FactorResult, IccResult, SplitResult, Tau
from fedstat.results.numbers import coefficient
from fedstat.stats import split as _split
from fedstat.stats.moments import Moments, correlation


def split(
    weights: Weights, *, kappa: float = 0.85, tau: Tau | Literal["test"] = 0.5, **options: Unpack[SplitOptions]
) -> SplitResult:
    """Split a layer's units into shared and client-specific ones: by default those that the other units explain.

    *Shared* means one of two things. By factor analysis (``method`` "pa", "minres", "pc" or "leverage"; FedFac §4.1) it
    means *explained by the other units*: communality ν at or above the threshold. By ``method="icc"`` it means *clients
    agree*: ICC2, the share of the variance of a unit's weights that all clients have in common (:func:`icc`), at or
    above the threshold. A unit that is the same in all clients but resembles no other unit has ν near 0 and ICC 1.
    Whichever decides, the result shows the ICC of every unit beside it.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...)
        As in :func:`layer_matrix`; at least 2 clients and 2 weights per unit for ``method="icc"``.
    kappa : float in (0, 1]
        The number of factors is the smallest whose eigenvalues hold this share of their sum.
    tau : float in (0, 1), inf, -inf, Absolute or "test"
        Quantile of ν, or of the ICC, at which units begin to be shared; ``Absolute(x)`` for a value; ``inf``: the whole
        layer is personal (FedPer, LG-FedAvg); ``-inf``: the whole layer is shared (FedAvg). Units that tie with the
        threshold are all shared: if 12 of 16 units are equal in all clients (ICC 1), ``tau=0.5`` shares these 12. A
        unit that has one value throughout (dead) has neither ν nor ICC and is shared by ``-inf`` alone. ``"test"``,
        with ``method="icc"`` and weights that have a dim ``replicate`` (:func:`variance_components`), shares the units
        on which clients differ no more than their replicates explain; their number is not fixed in advance.
    **options
        Those of :class:`fedstat.labelled.options.SplitOptions`. ``method``: "pa" (default), "minres", "pc", "leverage"
        or "icc"; for factor analysis n_factors, rotation, start, n_starts, seed, heywood, max_iter and tol of
        :func:`fa`; for ``tau="test"`` fdr, the false discovery rate (0.05), and covariate (clients' numbers of samples,
        say), as in :func:`variance_components`.

    Returns
    -------
    SplitResult

    Raises
    ------
    ValueError
        As :func:`fa`, or :func:`icc`; NaN or infinite weights are named by client and unit; an option, ``kappa``
        among them, that was changed and has no effect with ``method="icc"``.

    Warns
    -----
    ConvergenceWarning
        As :func:`fa`.
    AgreementWarning
        If clients agree less on the shared units than on the personal ones: of a shared and a personal unit the shared
        one has the higher ICC in fewer than a third of the pairs, two-sided p < .01 by Mann and Whitney. Of
        simulated layers whose 16 to 64 units were all each client's own, or all equally alike, at most 1 in 100 raised
        it (κ = 0.3 and 0.75, 200 or 400 layers of each kind).
    UserWarning
        If there is one client only.

    Notes
    -----
    By factor analysis the correlation matrix is summed client by client: the stacked matrix is never built. Agreement
    needs no unit × unit matrix: for d units with n weights it takes Σ_c w and the sums of squares of the weights and of
    the clients' means, all additive over clients (:func:`fedstat.stats.icc.sums`). A server that gets sums alone, as in
    secure aggregation, needs d·n + 2d + 1 numbers from every client: its weights, one sum of squares and one squared
    mean a unit, and the squared mean of the layer. That is no less than the d·n weights themselves; the gain is that
    the server sees no single client's. The moments for factor analysis are d(d + 3)/2 + 1 numbers, fewer where d < 2n:
    in float64 2.06 MB against 1.05 MB for 512 units × 500 weights, whose weights are 1.02 MB in float32.
    ``stats.icc.Sums`` holds d·n + 5d + 6 numbers, its sums taken about means to keep their digits.

    Examples
    --------
    >>> import numpy as np
    >>> from fedstat import Absolute
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))  # 4 units follow one pattern
    >>> own = rng.normal(size=(10, 2, 20))  # 2 units are each client's own
    >>> split(np.concatenate([alike, own], axis=1), n_factors=1, tau=1 / 3).shared.tolist()
    [True, True, True, True, False, False]
    >>> unlike = np.repeat(rng.normal(size=(1, 4, 20)), 10, axis=0)  # equal in all clients, resembling no other unit
    >>> split(np.concatenate([unlike, own], axis=1), method="icc", tau=Absolute(0.5)).shared.tolist()
    [True, True, True, True, False, False]
    """
    given: dict[str, Any] = {**options}
    method = _check.choice("method", given.get("method", CHOICES["method"]), _split.METHODS)
    tested = {name: given.pop(name) for name in ("fdr", "covariate") if name in given}
    if method == "icc":
        _require_none_of_factors(kappa, given)
        if tau == "test":
            found = variance_components(weights, covariate=tested.get("covariate"))
            return found.split(fdr=tested.get("fdr", 0.05))
    for name, value in tested.items():
        raise ValueError(f"{name} has no effect without method='icc' and tau='test', but got {value!r}. Leave it out.")
    if tau == "test":
        raise ValueError(
            "tau='test' asks whether clients differ more than replicates explain, which is not a question for "
            f"method={method!r}. Use method='icc', with weights that have a dim replicate."
        )
    if method == "icc":
        return icc(weights).split(tau=tau)
    fitting = DEFAULTS | CHOICES | given
    n_units = len(labels(weights, "unit", 1))
    require_room(weights, n_units, fitting["method"], fitting["n_factors"], fitting["start"])
    m, units, n_clients, agreement = sums(weights)
    say_if_alone(n_clients)
    result = _split_correlation(correlation(m), units, int(m.n), n_clients, agreement, kappa, tau, given)
    say_if_contradicted(result)
    return result


def split_sums(
    each: Moments,
    units: NDArray[Any],
    agreement: NDArray[np.float64],
    *,
    kappa: float = 0.85,
    tau: Tau = 0.5,
    **options: Any,
) -> SplitResult:
    """As :func:`split` by factor analysis, from the moments of each client stacked along the client dim."""
    r, n_obs = correlation_of(each), int(each.n.sum())
    return _split_correlation(r, units, n_obs, len(each.n), agreement, kappa, tau, options)


def _split_correlation(
    r: Any,
    units: NDArray[Any],
    n_obs: int,
    n_clients: int,
    agreement: NDArray[np.float64],
    kappa: float,
    tau: Tau,
    options: dict[str, Any],
) -> SplitResult:
    _require_known(options)
    choices = {k: options.get(k, v) for k, v in CHOICES.items()}
    fitting = {k: options.get(k, v) for k, v in DEFAULTS.items()}
    n_factors, method, rotation = choices.values()
    require_effect(method, n_factors, kappa, fitting)
    found = analyse(r, units, n_obs, n_clients, kappa, n_factors, method, rotation, fitting)
    return replace(found, agreement=agreement).split(tau=tau)


def update(previous: FactorResult | SplitResult, weights: Weights) -> Any:
    """Repeat an analysis on the next round's weights, starting from the last communalities.

    Parameters
    ----------
    previous : FactorResult or SplitResult
        Its arguments are used again.
    weights : array, tensor or DataArray (client, unit, weight...)

    Returns
    -------
    FactorResult or SplitResult
        Of the kind of ``previous``. Where the solution is unique it is that of a fresh start, in fewer steps; in the
        Heywood regime (κ >= 0.85) it may be another, nearer to the last one.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> first = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 6, 20))
    >>> before = split(first, n_factors=1)
    >>> after = update(before, first + 0.01 * rng.normal(size=first.shape))
    >>> after.fit.n_iter < before.fit.n_iter
    True
    """
    fit = previous.fit if isinstance(previous, SplitResult) else previous
    n_units = len(labels(weights, "unit", 1))
    if n_units != len(fit.units):
        raise ValueError(f"weights must have the {len(fit.units)} units of the previous result, but got {n_units}")
    if not isinstance(fit, FactorResult):
        return _updated_agreement(previous, fit, weights)
    m, units, n_clients, agreement = sums(weights)
    say_if_alone(n_clients)
    options = {**fit.options, "start": fit.communality, "n_starts": 1}
    n_factors = fit.n_factors if fit.kappa is None else None
    r, n_obs = correlation(m), int(m.n)
    kappa = 0.85 if fit.kappa is None else fit.kappa
    result = analyse(r, units, n_obs, n_clients, kappa, n_factors, fit.method, fit.rotation, options)
    result = replace(result, agreement=agreement)
    if not isinstance(previous, SplitResult):
        return result
    again = result.split(tau=cast(Tau, previous.tau))
    say_if_contradicted(again)
    return again


def _updated_agreement(previous: Any, fit: IccResult | ComponentsResult, weights: Weights) -> SplitResult:
    if isinstance(fit, ComponentsResult) or fit.of_change or not isinstance(previous, SplitResult):
        raise ValueError(
            "update repeats factor analyses and splits by them; agreement, changes from a start and tests have nothing "
            "to carry over. Use fedstat.icc(weights, start=...) or fedstat.variance_components(weights), then "
            ".split(...)."
        )
    return icc(weights, level=fit.level).split(tau=cast(Tau, previous.tau))


def say_if_alone(n_clients: int) -> None:
    """Warn that one client alone cannot agree with another."""
    if n_clients == 1:
        warnings.warn(
            "the weights are of one client, so that agreement between clients cannot enter: the split says which units "
            "of that client go together. Give the weights of several clients.",
            UserWarning,
            stacklevel=3,
        )


def say_if_contradicted(result: SplitResult) -> None:
    """Warn where the labels of a split and agreement between clients contradict each other."""
    if result.contradicted:
        shared, personal = (coefficient(result.median_icc(g)) for g in ("shared", "personal"))
        warnings.warn(
            f"clients agree less on the shared units (median ICC2 {shared}) than on the personal ones "
            f"({personal}): here shared means explained by the other units, not alike over clients. "
            "Use method='icc' to share units on which clients agree, or try another kappa: the labels depend on it.",
            AgreementWarning,
            stacklevel=3,
        )


def _require_known(options: dict[str, Any]) -> None:
    if unknown := set(options) - set(CHOICES) - set(DEFAULTS):
        near = get_close_matches(min(unknown), [*CHOICES, *DEFAULTS, "fdr", "covariate"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"got unexpected arguments {sorted(unknown)}; fedstat.fa names the possible ones.{hint}")


def _require_none_of_factors(kappa: float, options: dict[str, Any]) -> None:
    """ValueError for an argument of factor analysis that was changed from its default."""
    _require_known(options)
    defaults = {"kappa": KAPPA, "n_factors": None, "rotation": None} | DEFAULTS
    for name, value in {"kappa": kappa, **options}.items():
        if name != "method" and changed(value, defaults[name]):
            raise ValueError(
                f"{name} has no effect with method='icc', which makes no factor analysis, but got {value!r}. "
                "Leave it out, or split by 'pa', 'minres', 'pc' or 'leverage'."
            )
