"""Shared and personal units of a layer: the verbs ``split``, ``update`` and ``split_map``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import numpy_of
from fedstat._utils.lazy import pd, xr
from fedstat._utils.loops import track
from fedstat.labelled.agreement import icc, variance_components
from fedstat.labelled.factor import (
    CHOICES,
    DEFAULTS,
    KAPPA,
    SplitOptions,
    analyze_sums,
    analyze_weights,
    compared,
    fa,
    is_changed,
    require_effect,
    show_options,
    warn_if_single_client,
)
from fedstat.labelled.inputs import LayerWeights, by_layer, layers_of, parts, single_layer
from fedstat.labelled.layer import Weights, labels, read_layer
from fedstat.labelled.runs import AUTO, Stage, settings_of, split_at
from fedstat.labelled.sums import LayerSums, sums
from fedstat.results import (
    AgreementWarning,
    ConvergenceWarning,
    FactorResult,
    IccResult,
    LayerResults,
    ShrunkenResult,
    SplitMapResult,
    SplitResult,
    StoredSplitResult,
)
from fedstat.results.base import Result
from fedstat.results.tables import coefficient
from fedstat.results.variance_components import ComponentsResult
from fedstat.stats import split as _split
from fedstat.stats.moments import correlation
from fedstat.stats.split import Tau

_COMPONENT_OPTIONS = ("covariate", "groups", "claim")
_TAU_OPTIONS = {"test": ("fdr", "margin", "inconclusive", *_COMPONENT_OPTIONS), "posterior": ("margin", "prob")}


def _analysis(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`split` that ask for an analysis in place of the split that a run stored."""
    defaults = {"kappa": KAPPA, "tau": 0.5, "checkpoint": None, "baseline": AUTO} | CHOICES | DEFAULTS
    arguments = {name: x for name, x in settings.items() if name not in ("round", "progress", "layer", "stage")}
    return {name: x for name, x in arguments.items() if name not in defaults or is_changed(x, defaults[name])}


def _stored_split(run: xr.DataTree, name: str, *, round: int | None, **_: Any) -> StoredSplitResult:  # noqa: A002
    """Return the split of a layer that a run stored."""
    data, settings = split_at(run, name, round), settings_of(run)
    statistics = {
        field: data[field].to_numpy() if field in data else np.full(data.sizes["unit"], np.nan)
        for field in ("communality", "icc")
    }
    return StoredSplitResult(
        shared=data["shared"].to_numpy().astype(bool),
        **statistics,
        units=labels(data["shared"], "unit", 0),
        layer=name,
        round=int(data["round"]),
        algorithm=str(settings.get("algorithm", "another program")),
        settings=settings.get("algorithm_settings", {}),
        n_factors=int(data.get("n_factors", 0)),
        n_iter=int(data.get("n_iter", 0)),
        converged=bool(data.get("converged", True)),
        decided=data["decided"].to_numpy().astype(bool) if "decided" in data else None,
    )


@show_options(SplitOptions, fa, ComponentsResult.split, ShrunkenResult.split, variance_components)
@by_layer(
    stored=_stored_split,
    analyzes=lambda **settings: bool(_analysis(settings)),
    form=lambda tau, **_: "replicates" if tau == "test" else "weights",
    apart=lambda method=None, **_: method == "icc",
)
def split(
    weights: Weights,
    *,
    kappa: float = 0.85,
    tau: Tau | Literal["test", "posterior"] = 0.5,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    round: int | None = None,  # noqa: A002 - the dim of the stored split
    baseline: Any = AUTO,
    progress: bool | None = None,
    **options: Unpack[SplitOptions],
) -> SplitResult:
    """Split a layer's units into shared and personal units, by communality, agreement or a test.

    - By factor analysis ("pa", "minres", "pc", "leverage"; FedFac §4.1) a unit is shared if *other units* explain it.
    - By "icc" a unit is shared if *clients agree* on it (:func:`icc`).
    - By "icc" with ``tau="test"`` a unit is personal if its clients truly differ (:func:`variance_components`).
    - By "icc" with ``tau="posterior"`` a unit is shared if clients probably agree on it (:meth:`IccResult.shrunken`).

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        One layer as in :func:`layer_matrix`. Or several: a run or its path, a DataTree of :func:`fedstat.read_weights`,
        files of clients (a list, a folder, "client*.pt"), state_dicts or modules, or a mapping from client to these.
    kappa : float in (0, 1]
        κ, the proportion of the eigenvalue sum that factors must reach; see :func:`fa`.
    tau : float in (0, 1), inf, -inf, Absolute, "test" or "posterior"
        Threshold of ν or of the ICC from which a unit is shared: this quantile; with ``Absolute(x)``, x; with inf, all
        units are personal; with -inf, all are shared. "test" and "posterior" need "icc", "test" a dim ``replicate``.
    layer : str or sequence of str, optional
        Names, or patterns such as ``"conv*"``. By default all layers but embeddings and the output layer.
    checkpoint : int, optional
        Round of a run, or of a DataArray with a dim ``checkpoint``, whose weights are analyzed; by default the last.
    stage : {"trained", "aggregated"}, optional
        Weights of a run before averaging, the default if it holds them, or after it, as clients predict.
    round : int, optional
        Without arguments of an analysis, a run that used a split returns it: of this round, by default the last.
    baseline : {"auto", "common", "download", "initial"}, array (unit, weight...), Net, state_dict, path, run or None
        Values to subtract. "common" ("auto", for weights of a run before averaging): the value of each entry when the
        client last downloaded it while it was shared, or its initial value. "download": the values with which clients
        began the round. "initial", or what you pass: parameters common to all clients.
    progress : bool or None
        Show how many layers are done; see :func:`fedstat.fl.train`.
    method, n_factors, rotation, init, n_starts, seed, heywood, max_iter, tol
        Statistic of a unit, see above; settings of the factor analysis, as in :func:`fa`.
    fdr, margin, prob, inconclusive, covariate, groups, claim
        Settings of "posterior": ``margin`` and ``prob`` (:meth:`ShrunkenResult.split`); all but ``prob`` of "test"
        (:meth:`ComponentsResult.split`, :func:`variance_components`; with groups, clients differ within groups).

    Returns
    -------
    SplitResult
        Groups of units, and the analysis behind them; several layers: :class:`fedstat.results.LayerResults`; the split
        that a run stored: :class:`fedstat.results.StoredSplitResult`.

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        As :func:`fa` or :func:`icc`. If an option, layer, stage, round or file does not exist, or has no effect.

    Notes
    -----
    Warnings: ConvergenceWarning as :func:`fa`; AgreementWarning if clients agree less on shared than on personal units.
    Check a split with :func:`sensitivity` and :func:`bootstrap`. More: :doc:`/background/statistics`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))  # 4 units follow one pattern
    >>> weights = np.concatenate([alike, rng.normal(size=(10, 2, 20))], axis=1)  # 2 units differ between clients
    >>> split(weights, n_factors=1, tau=1 / 3).shared.tolist()
    [True, True, True, True, False, False]
    """
    if round is not None:
        raise ValueError(
            f"round has no effect on an analysis of weights, but got {round}. It selects a split that a run stored: "
            "pass a run that holds one, without stage. To select weights, use checkpoint."
        )
    factor_options: dict[str, Any] = {**options}
    method = check.choice("method", factor_options.get("method", CHOICES["method"]), _split.METHODS)
    tau_options = {name: factor_options.pop(name) for name in options if name in {*chain(*_TAU_OPTIONS.values())}}
    rule = tau if method == "icc" and isinstance(tau, str) else ""
    for name, value in tau_options.items():
        if name not in _TAU_OPTIONS.get(rule, ()):
            rules = " or ".join(f"tau={other!r}" for other, names in _TAU_OPTIONS.items() if name in names)
            raise ValueError(f"{name} has no effect without method='icc' and {rules}, but got {value!r}. Remove it.")
    if method == "icc":
        _require_no_factor_options(kappa, factor_options)
        if tau == "test":
            if weights.baseline is not None:
                raise ValueError(
                    "baseline has no effect with tau='test', which compares replicates with common initial parameters. "
                    "Remove it."
                )
            of_components = {name: tau_options.pop(name) for name in _COMPONENT_OPTIONS if name in tau_options}
            return variance_components(weights, **of_components).split(**tau_options)
        agreement = icc(weights, baseline=baseline, progress=progress)
        if tau == "posterior":
            prob = {"prob": tau_options.pop("prob")} if "prob" in tau_options else {}
            return agreement.shrunken(**tau_options).split(**prob)
        return agreement.split(tau=tau)
    if tau == "test":
        raise ValueError(
            "tau='test' tests client differences against training noise and needs method='icc', but got "
            f"method={method!r}. Use method='icc', with weights that have a dim replicate."
        )
    if tau == "posterior":
        raise ValueError(
            "tau='posterior' is by agreement of clients and needs method='icc', but got "
            f"method={method!r}. Use method='icc'."
        )
    fitting = _fitting(kappa, factor_options)
    result = analyze_weights(weights, **fitting).split(tau=tau)
    warn_if_contradicted(result)
    return result


def split_sums(
    layer_sums: LayerSums, *, kappa: float = 0.85, tau: Tau = 0.5, baseline_subtracted: bool = False, **options: Any
) -> SplitResult:
    """Split a layer by factor analysis as :func:`split` does, from its sums over clients."""
    return analyze_sums(layer_sums, baseline_subtracted=baseline_subtracted, **_fitting(kappa, options)).split(tau=tau)


def _fitting(kappa: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """Check and complete the arguments of a factor analysis."""
    choices = {k: arguments.get(k, v) for k, v in CHOICES.items()}
    options = {k: arguments.get(k, v) for k, v in DEFAULTS.items()}
    require_effect(choices["method"], choices["n_factors"], kappa, options)
    return {"kappa": kappa, **choices, "options": options}


@check.named_options()
def update(
    previous: FactorResult | SplitResult | LayerResults[Any], weights: Weights, *, stage: Stage | None = None
) -> Any:
    """Repeat an analysis on the next round's weights, with the previous communalities as initial values.

    Parameters
    ----------
    previous : FactorResult, SplitResult or LayerResults of these
        Result whose arguments are used again.
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        Weights of the next round, as in :func:`split`. If ``previous`` is of weights minus a baseline, the last common
        values of a run are subtracted; subtract the baseline from other weights.
    stage : {"trained", "aggregated"}, optional
        Weights of a run to analyze, as in :func:`split`.

    Returns
    -------
    FactorResult, SplitResult or LayerResults
        Result of the type of ``previous``.

    Raises
    ------
    ValueError
        If the number of units differs, or ``previous`` is a test, agreement minus a baseline, or an IccResult.

    Notes
    -----
    A unique solution is also the solution from other initial values, in fewer iterations. With Heywood cases, usual for
    κ >= 0.85, the result may be another solution, nearer to the previous one.

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
    if not isinstance(previous, Result | LayerResults):
        raise ValueError(
            f"previous must be a result of fedstat.fa or fedstat.split, but got {check.kind(previous)}. Call "
            "update(result, weights)."
        )
    if isinstance(previous, LayerResults):
        layers = layers_of(weights, list(previous), stage=stage)
        results = {layer: _updated(result, layers, layer) for layer, result in previous.items()}
        return LayerResults(results, previous.skipped_layers, previous.modules)
    layers = single_layer("update", weights, stage)
    return _updated(previous, layers, next(iter(layers.layers)))


def _updated(previous: Any, layers: LayerWeights, layer: str) -> Any:
    """Repeat the analysis of a layer on its next weights."""
    fit = previous.fit if isinstance(previous, SplitResult) else previous
    baseline = AUTO if isinstance(fit, FactorResult) and fit.baseline_subtracted else None
    weights = read_layer(*parts(layers._replace(layers={layer: layers.layers[layer]}), baseline)[layer])
    units = weights.units
    if len(units) != len(fit.units):
        raise ValueError(f"weights must have the {len(fit.units)} units of the previous result, but got {len(units)}")
    if not isinstance(fit, FactorResult):
        return _updated_agreement(previous, fit, weights)
    layer_sums = compared(weights, sums(weights))
    warn_if_single_client(layer_sums.n_clients)
    fitting: dict[str, Any] = {
        "kappa": KAPPA if fit.kappa is None else fit.kappa,
        "n_factors": fit.n_factors if fit.kappa is None else None,
        "method": fit.method,
        "rotation": fit.rotation,
        "options": {
            **fit.options,
            "init": _labels.by_label("the previous result", fit.communality, fit.units, units, "unit"),
            "n_starts": 1,
        },
    }
    result = analyze_sums(layer_sums, baseline_subtracted=fit.baseline_subtracted, **fitting)
    if not isinstance(previous, SplitResult):
        return result
    updated = result.split(tau=cast(Tau, previous.tau))
    warn_if_contradicted(updated)
    return updated


def _updated_agreement(previous: Any, fit: object, weights: Any) -> SplitResult:
    if not isinstance(fit, IccResult) or fit.baseline_subtracted or not isinstance(previous, SplitResult):
        raise ValueError(
            "update needs a factor analysis or a split without a test; agreement must be split, and without baseline. "
            "Use fedstat.icc(weights, baseline=...) or fedstat.variance_components(weights), then .split(...)."
        )
    return icc(weights, level=fit.level).split(tau=cast(Tau, previous.tau))


def warn_if_contradicted(result: SplitResult) -> None:
    """Warn if clients agree less on the shared than on the personal units of a split."""
    if result.contradicted:
        shared, personal = (coefficient(result.median_icc(g)) for g in ("shared", "personal"))
        check.warn(
            f"Clients agree less on shared (ICC2 {shared}) than on personal units ({personal}): communality is not "
            "agreement. Use method='icc', or another kappa.",
            AgreementWarning,
        )


def _require_no_factor_options(kappa: float, options: dict[str, Any]) -> None:
    """Raise ValueError for an argument of factor analysis that was changed from its default."""
    defaults = {"kappa": KAPPA, "n_factors": None, "rotation": None} | DEFAULTS
    for name, value in {"kappa": kappa, **options}.items():
        if name != "method" and is_changed(value, defaults[name]):
            raise ValueError(
                f"{name} has no effect with method='icc', which fits no factors, but got {value!r}. "
                "Remove it, or use method 'pa', 'minres', 'pc' or 'leverage'."
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
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
) -> SplitMapResult:
    """Split a layer under every method and κ, to see which units depend on these choices.

    :func:`sensitivity` varies one choice at a time and reports how similar the split remains. This function varies
    method and κ together and reports which units change groups, as a multiverse analysis [1]_ does. It does not measure
    sampling error: use :func:`bootstrap`.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`split`.
    kappas : sequence of float in (0, 1]
        Values of κ, the proportion of the eigenvalue sum that factors must reach.
    methods : sequence of {"pa", "minres", "pc", "leverage", "icc"}
        Methods that estimate the communality; "icc", agreement between clients, has no κ and is one analysis.
    tau : float in (0, 1), inf, -inf or Absolute
        As in :func:`split`; a quantile is computed separately in every analysis.
    layer, checkpoint, stage, baseline
        As in :func:`split`.
    progress : bool or None
        Show how many layers and fits are done; see :func:`fedstat.fl.train`.

    Returns
    -------
    SplitMapResult
        One row per analysis; convergence is a column of its table, not a warning. With several layers, a
        :class:`fedstat.results.LayerResults` of these results.

    Raises
    ------
    ValueError
        As :func:`split`. If a method or κ is repeated. With "icc", if there are fewer than 2 clients or 2 weights per
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
    m, _, units, n_clients, agreement = sums(weights)
    agreement = cast(NDArray[np.float64], agreement)
    warn_if_single_client(n_clients)
    if "icc" in methods and np.isnan(agreement).all():
        raise ValueError("'icc' of methods needs at least 2 clients and 2 weights per unit. Remove it.")
    r = correlation(m)
    rows, shared = [], []
    choices = [(method, kappa) for method in methods for kappa in ((np.nan,) if method == "icc" else kappas)]
    with warnings.catch_warnings(), track(choices, "fit", progress) as tracked:
        warnings.simplefilter("ignore", ConvergenceWarning)
        for method, kappa in tracked:
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
    constant = np.isnan(np.diagonal(numpy_of(r)))
    return SplitMapResult(pd.DataFrame(rows), np.stack(shared), constant, units, str(tau))
