"""Factor analysis of a layer: the verb ``fa``, and the options of all verbs that fit factors, shown in signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few, numpy_of
from fedstat.labelled.inputs import by_layer
from fedstat.labelled.layer import UNLIKE, Form, Layer
from fedstat.labelled.runs import AUTO, Stage
from fedstat.labelled.sums import LayerSums, correlation_matrix, row_sums, standard, sums
from fedstat.results import ConvergenceWarning, FactorResult, Rotation
from fedstat.results.tables import count
from fedstat.stats import Claim, eigenvalues, entropy, factor, split
from fedstat.stats.moments import correlation, require_memory

F = TypeVar("F", bound=Callable[..., Any])


def show_options(options: type, *sources: Callable[..., Any]) -> Callable[[F], F]:
    """Show the keys of a TypedDict as keyword parameters in the signature of a function that takes them as ``**``.

    Type checkers read ``**options: Unpack[Options]``, but IPython and ``help`` read the signature, whose options the
    function offers for misspelled ones. The options are declared once, in the TypedDict, and their defaults once, in
    the functions that use them.

    Parameters
    ----------
    options : TypedDict
        Names and types of the options.
    *sources : callable
        Functions whose signatures have the defaults; the first that has an option counts.

    Examples
    --------
    >>> from typing import TypedDict
    >>> Options = TypedDict("Options", {"kappa": float})
    >>> def fit(x, *, kappa=0.85): ...
    >>> @show_options(Options, fit)
    ... def split(weights, *, tau=0.5, **options): ...
    >>> inspect.signature(split)
    <Signature (weights, *, tau=0.5, kappa: float = 0.85)>
    """
    defaults = {name: p.default for f in reversed(sources) for name, p in inspect.signature(f).parameters.items()}

    def show(function: F) -> F:
        signature = inspect.signature(function)
        explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=_text(annotation)
            )
            for name, annotation in options.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        return check.named_options()(function)

    return show


def _text(annotation: Any) -> Any:
    """Return the text of a postponed annotation, as functions have it; other annotations are unchanged."""
    return getattr(annotation, "__forward_arg__", annotation)


class _FitOptions(TypedDict, total=False):
    """Arguments of :func:`fedstat.fa` that all verbs with factor analyses take.

    Attributes
    ----------
    n_factors : int, optional
        Number of factors, instead of the κ rule.
    init : {"pc", "smc"} or array (unit,)
        Initial communalities.
    max_iter : int, optional
        Maximum number of eigendecompositions.
    tol : float, optional
        Stop when no communality changes by more than this.
    """

    n_factors: int | None
    init: factor.Init
    max_iter: int | None
    tol: float | None


class ReplicateOptions(_FitOptions, total=False):
    """Further arguments of :func:`fedstat.bootstrap`, :func:`fedstat.jackknife` and :func:`fedstat.permutation_test`.

    Attributes
    ----------
    method : {"pa", "minres", "pc", "leverage"}
        Method that estimates the communalities.
    heywood : {"allow", "bound"}
        Communalities above 1: allow and flag them, or clip them to 1 in every iteration.
    """

    method: factor.Method
    heywood: Literal["allow", "bound"]


class SplitOptions(_FitOptions, total=False):
    """Further arguments of :func:`fedstat.split`.

    Attributes
    ----------
    method : {"pa", "minres", "pc", "leverage", "icc"}
        Method that estimates the communalities; "icc": agreement between clients decides.
    rotation : {"varimax", "promax", "oblimin"}, optional
        Rotation of the loadings.
    n_starts, seed : int
        Number of initial values, all but the first random, and their seed.
    heywood : {"allow", "bound", "error"}
        Communalities above 1: allow and flag them, clip them to 1 in every iteration, or raise an error that names the
        units.
    fdr, margin : float in (0, 1)
        With ``tau="test"``: false discovery rate, and the reliability above which a unit is personal. ``margin`` with
        ``tau="posterior"``: the ICC2 above which a unit is shared.
    prob : float in (0, 1)
        With ``tau="posterior"``: least posterior probability of a shared unit.
    inconclusive : {"shared", "personal"}
        With ``tau="test"``: group of the inconclusive units.
    covariate : array (client,)
        With ``tau="test"``: property that clients are adjusted for, see :func:`fedstat.variance_components`.
    groups : array (client,) or mapping
        With ``tau="test"``: groups of clients, within which clients are compared.
    claim : {"these groups", "new groups"}
        With ``groups``: what the tests hold for.
    """

    method: split.Method
    rotation: Rotation | None
    n_starts: int
    seed: int
    heywood: Heywood
    fdr: float
    margin: float
    prob: float
    inconclusive: Literal["shared", "personal"]
    covariate: Any
    groups: Any
    claim: Claim | None


class EntropyOptions(TypedDict, total=False):
    """Further arguments of :func:`fedstat.knn_entropy`.

    Attributes
    ----------
    ties : {"error", "atoms", "jitter"}
        How to treat values that more than k samples share.
    resolution : float, optional
        Step of the grid that values were rounded to; required by "jitter".
    seed : int
        Seed of the jitter.
    axis, feature_axis : int
        Axes of the samples and of their coordinates, in an array or tensor.
    """

    ties: entropy.Ties
    resolution: float | None
    seed: int
    axis: int
    feature_axis: int | None


Heywood = Literal["allow", "bound", "error"]
DEFAULTS: dict[str, Any] = {
    "init": "pc", "n_starts": 1, "seed": 0, "heywood": "allow", "max_iter": None, "tol": None,
}  # fmt: skip
CHOICES: dict[str, Any] = {"n_factors": None, "method": "pa", "rotation": None}
_ITERATION_OPTIONS = ("init", "n_starts", "heywood", "max_iter", "tol")
KAPPA = 0.85


def _check(*, method: str, n_factors: int | None, kappa: float, corr: bool, n_obs: int | None, **options: Any) -> None:
    require_effect(method, n_factors, kappa, options)
    if n_obs is not None and not corr:
        raise ValueError(f"n_obs has no effect on raw rows, which are counted, but got {n_obs!r}. Remove it.")


def matrix_form(*, corr: bool, **_: object) -> Form:
    """Return the form of weights of the verbs that also take a matrix."""
    return "correlation" if corr else "rows"


@by_layer(checks=_check, form=matrix_form)
def fa(
    z: Any,
    *,
    kappa: float = 0.85,
    n_factors: int | None = None,
    method: factor.Method = "pa",
    rotation: Rotation | None = None,
    corr: bool = False,
    n_obs: int | None = None,
    init: factor.Init = "pc",
    n_starts: int = 1,
    seed: int = 0,
    heywood: Heywood = "allow",
    max_iter: int | None = None,
    tol: float | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    baseline: Any = AUTO,
    progress: bool | None = None,
) -> FactorResult:
    """Fit a factor analysis to a layer's hidden units (FedFac §4.1).

    The factors explain a unit's weights by those of the other units, with clients stacked as rows. The communality ν of
    a unit is the proportion of its variance that the factors explain. It is not agreement (:func:`fedstat.icc`).

    Parameters
    ----------
    z : array, tensor, DataFrame or DataArray (row, unit), or weights
        Weights in any form that :func:`fedstat.split` takes, such as (client, unit, weight...); the result then has
        agreement, too. Or rows: the output of :func:`layer_matrix`, a DataFrame whose columns are units, a DataArray
        with a dim ``unit``, or a Dask array. Or a correlation matrix (unit, unit) with ``corr=True``.
    kappa, n_factors : float in (0, 1]; int, optional
        κ, the proportion of the eigenvalue sum that the smallest number of factors must reach; or the number itself.
    method : {"pa", "minres", "pc", "leverage"}
        Method that estimates the communalities, see :func:`fedstat.stats.factor.fit`.
    rotation : {"varimax", "promax", "oblimin"}, optional
        Rotation of the loadings; the communalities do not depend on it.
    corr : bool
        True if ``z`` is a correlation matrix. A unit whose row is NaN is constant.
    n_obs : int, optional
        Number of rows behind a correlation matrix; the fit indices need it.
    init : {"pc", "smc"}, or array, Series, DataArray (unit,) or mapping from unit
        Initial communalities: of principal components (the paper), squared multiple correlations, or these values.
    n_starts, seed : int
        Number of initial values, all but the first random, and their seed.
    heywood : {"allow", "bound", "error"}
        Communalities above 1 (at 1 for "minres", which bounds them): allow and flag, clip in every step, or refuse.
    max_iter, tol : optional
        Maximum number of iterations (50 for "pa", 1000 for "minres"); largest last change (1e-3 and 1e-6).
    layer, checkpoint, stage, baseline, progress
        Layers and round to analyze, initial parameters to subtract, and the progress bar: as in :func:`fedstat.split`.

    Returns
    -------
    FactorResult
        Communalities, loadings and fit. With several layers, a :class:`fedstat.results.LayerResults`.

    Raises
    ------
    ValueError
        If ``z`` is not a matrix, holds NaN or infinite values (the units are named), or is no correlation matrix with
        ``corr=True``. If an argument is out of range, or was changed and has no effect.

    Notes
    -----
    A ConvergenceWarning is usual for "pa" at κ = 0.85. White noise has a high communality, too: the print has its
    median for as many independent rows, a lower reference for dependent rows. More: :doc:`/background/statistics`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = np.outer(rng.normal(size=2000), [1, 1, 1, 0]) + rng.normal(size=(2000, 4))
    >>> fa(z, n_factors=1)
    Factor analysis (pa): 4 units, 2000 rows
    1 factor (given); converged in 7 iterations (last change 0.0009)
    Communality: median 0.48, range 0.00 to 0.55; 0 Heywood cases, 0 constant
      White noise of this shape: median 0.00
      highest: 2 (0.55), 0 (0.50), 1 (0.47), 3 (0.00)
      lowest:  3 (0.00), 1 (0.47), 0 (0.50), 2 (0.55)
    """
    options = {"init": init, "n_starts": n_starts, "seed": seed, "heywood": heywood, "max_iter": max_iter, "tol": tol}
    fitting: dict[str, Any] = {
        "kappa": kappa, "n_factors": n_factors, "method": method, "rotation": rotation, "options": options
    }  # fmt: skip
    if "client" in z.labels:
        return analyze_weights(z, **fitting)
    if z.baseline is not None:
        raise ValueError(
            "baseline is subtracted from weights (client, unit, ...), but z is a matrix. Pass weights, or subtract it."
        )
    require_fit_in_memory(z.data, len(z.units), method, n_factors, init)
    if corr:
        return analyze_correlation(correlation_matrix(z.data, z.units), z.units, n_obs, None, **fitting)
    m, exponent = row_sums(z.data, z.units)
    result = analyze_correlation(correlation(m), z.units, int(m.n), None, **fitting)
    return replace(result, **standard(m, exponent))


def analyze_weights(weights: Layer, **fitting: Any) -> FactorResult:
    """Fit a factor analysis to clients' weights minus their baseline; add their agreement."""
    n_factors, init = fitting["n_factors"], fitting["options"]["init"]
    require_fit_in_memory(weights.data, len(weights.units), fitting["method"], n_factors, init)
    layer_sums = compared(weights, sums(weights))
    warn_if_single_client(layer_sums.n_clients)
    return analyze_sums(layer_sums, baseline_subtracted=weights.baseline is not None, **fitting)


def compared(weights: Layer, layer_sums: LayerSums) -> LayerSums:
    """Return the sums without agreement, if units changed over unlike numbers of rounds: splits would compare them."""
    return layer_sums._replace(agreement=None) if weights.attrs.get(UNLIKE) else layer_sums


def analyze_sums(layer_sums: LayerSums, *, baseline_subtracted: bool, **fitting: Any) -> FactorResult:
    """Fit a factor analysis to a layer's sums over clients; add their agreement."""
    m = layer_sums.total
    result = analyze_correlation(correlation(m), layer_sums.units, int(m.n), layer_sums.n_clients, **fitting)
    return replace(
        result,
        agreement=layer_sums.agreement,
        baseline_subtracted=baseline_subtracted,
        **standard(m, layer_sums.exponent),
    )


def align_init(init: Any, units: NDArray[Any]) -> Any:
    """Return initial communalities in the order of the units, if they have labels."""
    return _labels.matched("init", init, {"unit": units}, gaps=True) if _labels.has_labels(init) else init


def warn_if_single_client(n_clients: int) -> None:
    """Warn that a single client has no agreement."""
    if n_clients == 1:
        check.warn("Agreement needs at least 2 clients, but got 1. Pass more clients.")


def is_changed(value: Any, default: Any) -> bool:
    """Return True if an argument differs from its default."""
    return value is not default and (not np.isscalar(value) or value != default)


def require_effect(method: str, n_factors: int | None, kappa: float, options: dict[str, Any]) -> None:
    """Raise ValueError for an argument that was changed from its default and has no effect."""
    if method == "icc":
        raise ValueError(
            "method must be a factor analysis, but got 'icc'. Use fedstat.split(weights, method='icc') to split by "
            "agreement, or fedstat.icc(weights) for the agreement of units."
        )
    check.choice("method", method, factor.METHODS)
    if method not in factor.ITERATE:
        for name in _ITERATION_OPTIONS:
            value = options[name]
            if is_changed(value, DEFAULTS[name]):
                raise ValueError(
                    f"{name} has no effect with method={method!r}, which does not iterate, but got {value!r}. "
                    "Remove it, or use method='pa' or 'minres'."
                )
    if n_factors is not None and kappa != KAPPA:
        raise ValueError(
            f"kappa has no effect with a given n_factors, but got kappa={kappa!r} and n_factors={n_factors!r}. "
            "Remove one of them."
        )


def require_fit_in_memory(data: Any, units: int, method: str, n_factors: int | None, init: Any) -> None:
    """Raise ValueError if the analysis of this many units does not fit into the machine's memory."""
    if is_torch_array(data) and data.device.type != "cpu":
        return  # torch raises if a device lacks memory
    few_pairs = isinstance(n_factors, int) and eigenvalues.pays(units, n_factors) and method != "minres"
    require_memory(units, all_pairs=not few_pairs or (isinstance(init, str) and init == "smc"))


def analyze_correlation(
    r: Any,
    units: NDArray[Any],
    n_obs: int | None,
    n_clients: int | None,
    kappa: float,
    n_factors: int | None,
    method: Any,
    rotation: Any,
    options: dict[str, Any],
) -> FactorResult:
    """Fit a factor analysis to a correlation matrix; warn if its communalities are degenerate or not final."""
    heywood = check.choice("heywood", options["heywood"], ("allow", "bound", "error"))
    n_starts = check.integer("n_starts", options["n_starts"])
    options = options | {"init": align_init(options["init"], units)}
    arguments = {k: options[k] for k in ("init", "max_iter", "tol")}
    arguments |= {"kappa": kappa, "n_factors": n_factors, "method": method}
    arguments["heywood"] = "bound" if heywood == "bound" else "allow"
    if n_starts > 1:
        fit, n_minima = factor.starts(r, n_starts - 1, seed=options["seed"], **arguments)
    else:
        fit, n_minima = factor.fit(r, **arguments), 1
    loadings = numpy_of(fit.loadings)
    loadings = loadings * np.where(loadings.sum(0) < 0, -1.0, 1.0)  # eigenvectors have arbitrary signs
    result = FactorResult(
        communality=numpy_of(fit.communality),
        loadings=np.where(np.isnan(numpy_of(fit.communality))[:, None], np.nan, loadings),
        correlation=numpy_of(r),
        n_factors=int(fit.n_factors),
        n_iter=int(fit.n_iter),
        converged=bool(fit.converged),
        residual=float(fit.residual),
        heywood=numpy_of(fit.heywood),
        units=units,
        n_obs=n_obs,
        n_clients=n_clients,
        kappa=kappa if n_factors is None else None,
        method=method,
        options=options,
        n_starts=n_starts,
        n_minima=n_minima,
    )
    if heywood == "error" and result.heywood.any():
        is_bounded, lower = method == "minres", "kappa" if n_factors is None else "n_factors"
        hint = "heywood='allow', which flags these units" if is_bounded else "heywood='bound' or 'allow'"
        raise ValueError(
            f"communality {'at the bound of' if is_bounded else 'above'} 1 (Heywood case) in unit(s) "
            f"{few(units[result.heywood])}. Lower {lower}, or pass {hint}."
        )
    _warn_if_improper(result, numpy_of(fit.eigenvalues))
    return result.rotate(rotation) if rotation is not None else result


def _warn_if_improper(result: FactorResult, eigenvalues: NDArray[Any]) -> None:
    """Warn if all communalities are 1 by construction, or the iterations did not converge."""
    live = int((~result.constant).sum())
    if result.method != "leverage" and (rank := _exhausted(eigenvalues[: result.n_factors], live)):
        check.warn(
            f"n_factors reaches the rank of R, {rank}: every communality is 1 by construction. Lower kappa or "
            "n_factors."
        )
    if not result.converged:
        remedy = "Set max_iter=1000" if result.n_iter < 1000 else "Raise max_iter"
        check.warn(
            f"{result.method} did not converge in {count(result.n_iter, 'iteration')} (last change "
            f"{result.residual:.2g}). {remedy} or lower {'kappa' if result.kappa else 'n_factors'}; check with "
            "fedstat.sensitivity.",
            ConvergenceWarning,
        )


def _exhausted(leading: NDArray[Any], live: int) -> int | None:
    """Return the rank of R if its leading eigenvalues add up to its trace, else None."""
    return None if leading.sum() < live * (1 - 1e-9) else int(np.sum(leading > 1e-10 * leading[0]))
