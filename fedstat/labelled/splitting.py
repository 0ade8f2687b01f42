"""Shared and personal units of a layer: the verbs ``split``, ``update`` and ``split_map``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, Unpack, cast

import numpy as np

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.lazy import pd
from fedstat.labelled.agreement import icc
from fedstat.labelled.arrays import LayerSums, Weights, labels, numpy_of, sums
from fedstat.labelled.components import variance_components
from fedstat.labelled.factor import (
    CHOICES,
    DEFAULTS,
    KAPPA,
    SplitOptions,
    changed,
    fa,
    of_sums,
    of_weights,
    require_effect,
    say_if_alone,
)
from fedstat.labelled.inputs import by_layer, subtract_baseline
from fedstat.results import (
    AgreementWarning,
    ConvergenceWarning,
    FactorResult,
    IccResult,
    SplitMapResult,
    SplitResult,
)
from fedstat.results.tables import coefficient
from fedstat.stats import split as _split
from fedstat.stats.moments import correlation
from fedstat.stats.split import Tau

_OF_TEST = ("fdr", "margin", "undecided", "covariate")


@by_layer()
def split(
    weights: Weights,
    *,
    kappa: float = 0.85,
    tau: Tau | Literal["test"] = 0.5,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    baseline: Any = None,
    **options: Unpack[SplitOptions],
) -> SplitResult:
    """Split a layer's units into shared and client-specific ones: by default those that the other units explain.

    *Shared* means one of two things. By factor analysis (``method`` "pa", "minres", "pc" or "leverage"; FedFac §4.1) it
    means *explained by the other units*: communality ν at or above the threshold. By ``method="icc"`` it means *clients
    agree*: ICC2, the share of the variance of a unit's weights that all clients have in common (:func:`icc`), at or
    above the threshold. A unit that is the same in all clients but resembles no other unit has ν near 0 and ICC 1.
    Whichever decides, the result shows the ICC of every unit beside it.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or what holds layers
        One layer as in :func:`layer_matrix`; at least 2 clients and 2 weights per unit for ``method="icc"``. Or several
        layers: a run (of :func:`fedstat.open_run` or its path), the DataTree of :func:`fedstat.read_weights`, files of
        clients (a list, a folder, a pattern such as ``"runs/client*.pt"``), a mapping from client to state_dict or
        torch module.
    kappa : float in (0, 1]
        The number of factors is the smallest whose eigenvalues hold this share of their sum.
    tau : float in (0, 1), inf, -inf, Absolute or "test"
        Quantile of ν, or of the ICC, at which units begin to be shared; ``Absolute(x)`` for a value; ``inf``: the whole
        layer is personal (FedPer, LG-FedAvg); ``-inf``: the whole layer is shared (FedAvg). Units that tie with the
        threshold are all shared: if 12 of 16 units are equal in all clients (ICC 1), ``tau=0.5`` shares these 12. A
        unit that has one value throughout (dead) has neither ν nor ICC and is shared by ``-inf`` alone. ``"test"``,
        with ``method="icc"`` and weights that have a dim ``replicate`` (:func:`variance_components`), asks of every
        unit whether its personal share is shown to be below a margin (shared), above it (personal), or neither
        (undecided); how many are what is not fixed in advance.
    layer : str or sequence of str, optional
        Layers, where ``weights`` hold several: a name, or names and patterns such as ``"conv*"``. By default all but
        embeddings and the output layer, whose units are not hidden units; the result says which these are.
    checkpoint : int, optional
        Round of a run (or of a DataArray with a dim ``checkpoint``) after which its weights were kept; by default the
        last.
    baseline : array, tensor or DataArray (unit, weight...), path, state_dict or module, optional
        Initial parameters that all clients share, which are subtracted, so that what training changed is analysed:
        clients that have hardly left a common initialization agree on their weights for that reason alone.
    **options
        Those of :class:`fedstat.labelled.factor.SplitOptions`. ``method``: "pa" (default), "minres", "pc", "leverage"
        or "icc"; for factor analysis n_factors, rotation, start, n_starts, seed, heywood, max_iter and tol of
        :func:`fa`; for ``tau="test"`` fdr, the false discovery rate (0.05), margin (1/2), undecided ("shared"), as in
        :meth:`ComponentsResult.split`, and covariate (clients' numbers of samples, say), as in
        :func:`variance_components`.

    Returns
    -------
    SplitResult
        Of a run, files or state_dicts a :class:`fedstat.results.ByLayer` of them, unless ``layer`` is the name of one.

    Raises
    ------
    ValueError
        As :func:`fa`, or :func:`icc`; NaN or infinite weights are named by client and unit; an option, ``kappa``
        among them, that was changed and has no effect with ``method="icc"``; a layer or checkpoint that is not there.
    FileNotFoundError
        If there is no such file, folder or run.

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
    method = check.choice("method", given.get("method", CHOICES["method"]), _split.METHODS)
    tested = {name: given.pop(name) for name in _OF_TEST if name in given}
    if method == "icc":
        _require_none_of_factors(kappa, given)
        if tau == "test":
            if baseline is not None:
                raise ValueError(
                    "tau='test' compares replicates of clients, which have one initialization. Leave out baseline."
                )
            found = variance_components(weights, covariate=tested.pop("covariate", None))
            return found.split(**tested)
    for name, value in tested.items():
        raise ValueError(f"{name} has no effect without method='icc' and tau='test', but got {value!r}. Leave it out.")
    if tau == "test":
        raise ValueError(
            "tau='test' asks whether clients differ more than replicates explain, which is not a question for "
            f"method={method!r}. Use method='icc', with weights that have a dim replicate."
        )
    if method == "icc":
        return icc(weights, baseline=baseline).split(tau=tau)
    fitting = _fitting(kappa, given)
    result = of_weights(weights, baseline, **fitting).split(tau=tau)
    say_if_contradicted(result)
    return result


def split_sums(
    found: LayerSums, *, kappa: float = 0.85, tau: Tau = 0.5, of_change: bool = False, **options: Any
) -> SplitResult:
    """As :func:`split` by factor analysis, from what clients' weights add up to."""
    return of_sums(found, of_change=of_change, **_fitting(kappa, options)).split(tau=tau)


def _fitting(kappa: float, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a factor analysis, checked."""
    _require_known(given)
    choices = {k: given.get(k, v) for k, v in CHOICES.items()}
    options = {k: given.get(k, v) for k, v in DEFAULTS.items()}
    require_effect(choices["method"], choices["n_factors"], kappa, options)
    return {"kappa": kappa, **choices, "options": options}


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
        Heywood regime (κ >= 0.85) it may be another, nearer to the last one. If ``previous`` is of changes from a
        start, the weights must be, too.

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
    weights = _labels.labelled(weights)
    units = labels(weights, "unit", 1)
    if len(units) != len(fit.units):
        raise ValueError(f"weights must have the {len(fit.units)} units of the previous result, but got {len(units)}")
    if not isinstance(fit, FactorResult):
        return _updated_agreement(previous, fit, weights)
    found = sums(weights)
    say_if_alone(found.n_clients)
    fitting: dict[str, Any] = {
        "kappa": KAPPA if fit.kappa is None else fit.kappa,
        "n_factors": fit.n_factors if fit.kappa is None else None,
        "method": fit.method,
        "rotation": fit.rotation,
        "options": {
            **fit.options,
            "start": _labels.by_label("the previous result", fit.communality, fit.units, units, "unit"),
            "n_starts": 1,
        },
    }
    result = of_sums(found, of_change=fit.of_change, **fitting)
    if not isinstance(previous, SplitResult):
        return result
    again = result.split(tau=cast(Tau, previous.tau))
    say_if_contradicted(again)
    return again


def _updated_agreement(previous: Any, fit: object, weights: Weights) -> SplitResult:
    if not isinstance(fit, IccResult) or fit.of_change or not isinstance(previous, SplitResult):
        raise ValueError(
            "update repeats factor analyses and splits by them; agreement, weights minus a baseline and tests have "
            "nothing to carry over. Use fedstat.icc(weights, baseline=...) or fedstat.variance_components(weights), "
            "then .split(...)."
        )
    return icc(weights, level=fit.level).split(tau=cast(Tau, previous.tau))


def say_if_contradicted(result: SplitResult) -> None:
    """Warn where the labels of a split and agreement between clients contradict each other."""
    if result.contradicted:
        shared, personal = (coefficient(result.median_icc(g)) for g in ("shared", "personal"))
        check.warn(
            f"clients agree less on the shared units (median ICC2 {shared}) than on the personal ones "
            f"({personal}): here shared means explained by the other units, not alike over clients. "
            "Use method='icc' to share units on which clients agree, or try another kappa: the labels depend on it.",
            AgreementWarning,
        )


def _require_known(options: dict[str, Any]) -> None:
    if unknown := set(options) - set(CHOICES) - set(DEFAULTS):
        hint = check.did_you_mean(min(unknown), [*CHOICES, *DEFAULTS, *_OF_TEST], cutoff=0.6)
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


def _check_map(*, methods: Sequence[str], kappas: Sequence[float], **_: object) -> None:
    for method in check.distinct("methods", list(methods)):
        check.choice("method", method, _split.METHODS)
    check.distinct("kappas", list(kappas))


@by_layer(checks=_check_map)
def split_map(
    weights: Weights,
    *,
    kappas: Sequence[float] = (0.5, 0.75, 0.85, 0.9, 0.95),
    methods: Sequence[_split.Method] = _split.METHODS,
    tau: _split.Tau = 0.5,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    baseline: Any = None,
) -> SplitMapResult:
    """Which units are shared by every estimator and at every κ, and which depend on the analyst?

    :func:`sensitivity` varies one choice at a time and says how like the split remains; this varies both together and
    says which units change sides, as a multiverse analysis does [1]_.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or what holds layers
        As in :func:`split`.
    kappas : sequence of float in (0, 1]
        Shares of the eigenvalues' sum that choose the number of factors.
    methods : sequence of {"pa", "minres", "pc", "leverage", "icc"}
        Estimators of the communality; "icc", agreement between clients, has no κ and is one analysis.
    tau : float in (0, 1), inf, -inf or Absolute
        As in :func:`split`; a quantile is taken anew in every analysis.
    layer, checkpoint, baseline
        As in :func:`split`.

    Returns
    -------
    SplitMapResult
        Non-convergence is a column of its table, not a warning for each analysis. A :class:`fedstat.results.ByLayer` of
        results where layers are several.

    Raises
    ------
    ValueError
        As :func:`split`; if a method or κ is given twice; with "icc", if there are fewer than 2 clients or weights a
        unit.

    References
    ----------
    .. [1] Steegen, Tuerlinckx, Gelman, Vanpaemel (2016). Increasing transparency through a multiverse analysis.
       Perspectives on Psychological Science 11, 702-712.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    >>> weights = np.concatenate([alike, rng.normal(size=(10, 4, 20))], axis=1)
    >>> split_map(weights, kappas=(0.3, 0.5), methods=("pc", "icc"))
    Split of 8 units under 3 specifications (tau = 0.5)
      pc at kappa 0.3, 0.5; icc
    4 units shared in all, 4 personal in all, 0 vary, 0 constant
    ARI between two specifications: median 1.00, minimum 1.00
    """
    m, _, units, n_clients, agreement = sums(subtract_baseline(weights, baseline))
    say_if_alone(n_clients)
    if "icc" in methods and np.isnan(agreement).all():
        raise ValueError("method 'icc' needs at least 2 clients and 2 weights per unit. Leave it out of methods.")
    r = correlation(m)
    rows, shared = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for method in methods:
            for kappa in (np.nan,) if method == "icc" else kappas:
                fit = None if method == "icc" else fa(r, corr=True, kappa=kappa, method=method)
                shared.append(_split.shared(agreement if fit is None else fit.communality, tau=tau))
                rows.append(
                    {
                        "method": method,
                        "kappa": float(kappa),
                        "n_factors": 0 if fit is None else fit.n_factors,
                        "converged": fit is None or fit.converged,
                        "n_shared": int(shared[-1].sum()),
                    }
                )
    dead = np.isnan(np.diagonal(numpy_of(r)))
    return SplitMapResult(pd.DataFrame(rows), np.stack(shared), dead, units, str(tau))
