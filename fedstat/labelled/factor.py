"""Factor analysis of a layer: the verb ``fa``, and the options of all verbs that fit factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import LayerSums, correlation_matrix, labels, numpy_of, row_sums, standard, sums, values_of
from fedstat.labelled.inputs import by_layer, subtract_baseline
from fedstat.results import ConvergenceWarning, FactorResult, Rotation
from fedstat.stats import eigenvalues, entropy, factor, split
from fedstat.stats.moments import correlation, require_memory


class _FitOptions(TypedDict, total=False):
    """Arguments of :func:`fedstat.fa` that every verb which repeats its analysis takes.

    Attributes
    ----------
    n_factors : int, optional
        A given number of factors instead of the κ rule.
    start : {"pc", "smc"} or array (unit,)
        Communalities to start from.
    max_iter : int, optional
        Cap on the eigendecompositions.
    tol : float, optional
        Stop when no communality changes by more than this.
    """

    n_factors: int | None
    start: factor.Start
    max_iter: int | None
    tol: float | None


class ReplicateOptions(_FitOptions, total=False):
    """Further arguments of :func:`fedstat.bootstrap` and :func:`fedstat.permutation_test`.

    Attributes
    ----------
    method : {"pa", "minres", "pc", "leverage"}
        Estimator of the communalities.
    heywood : {"allow", "bound"}
        Communalities above 1 are kept and flagged, or clipped to 1 in every step.
    """

    method: factor.Method
    heywood: Literal["allow", "bound"]


class SplitOptions(_FitOptions, total=False):
    """Further arguments of :func:`fedstat.split`.

    Attributes
    ----------
    method : {"pa", "minres", "pc", "leverage", "icc"}
        Estimator of the communalities, or agreement between clients.
    rotation : {"varimax", "promax", "oblimin"}, optional
        Rotation of the loadings.
    n_starts, seed : int
        Random starts, and their seed.
    heywood : {"allow", "bound", "error"}
        Communalities above 1 are kept and flagged, clipped to 1 in every step, or an error that names the units.
    fdr, margin : float in (0, 1)
        With ``tau="test"``: false discovery rate, and the personal share from which on a unit is personal.
    undecided : {"shared", "personal"}
        With ``tau="test"``: what becomes of units that are not shown to be either.
    covariate : array (client,)
        With ``tau="test"``: what clients are adjusted for, see :func:`fedstat.variance_components`.
    """

    method: split.Method
    rotation: Rotation | None
    n_starts: int
    seed: int
    heywood: Heywood
    fdr: float
    margin: float
    undecided: Literal["shared", "personal"]
    covariate: Any


class EntropyOptions(TypedDict, total=False):
    """Further arguments of :func:`fedstat.knn_entropy`.

    Attributes
    ----------
    ties : {"error", "atoms", "jitter"}
        What to do where more than k samples share one value.
    resolution : float, optional
        Step of the grid the values were rounded to; required by "jitter".
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
    "start": "pc", "n_starts": 1, "seed": 0, "heywood": "allow", "max_iter": None, "tol": None,
}  # fmt: skip
CHOICES: dict[str, Any] = {"n_factors": None, "method": "pa", "rotation": None}
_OF_ITERATION = ("start", "n_starts", "heywood", "max_iter", "tol")
KAPPA = 0.85


def _check(*, method: str, n_factors: int | None, kappa: float, **options: Any) -> None:
    require_effect(method, n_factors, kappa, options)


@by_layer(checks=_check)
def fa(
    z: Any,
    *,
    kappa: float = 0.85,
    n_factors: int | None = None,
    method: factor.Method = "pa",
    rotation: Rotation | None = None,
    corr: bool = False,
    n_obs: int | None = None,
    start: factor.Start = "pc",
    n_starts: int = 1,
    seed: int = 0,
    heywood: Heywood = "allow",
    max_iter: int | None = None,
    tol: float | None = None,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    baseline: Any = None,
) -> FactorResult:
    """Factor analysis of a layer's hidden units (FedFac §4.1).

    Parameters
    ----------
    z : array, tensor, DataFrame or DataArray (row, unit)
        Output of :func:`layer_matrix`, or a correlation matrix (unit, unit) if ``corr``. Columns of a DataFrame are
        units and name them. In a DataArray the columns are the dim ``unit``, whatever the other dim is called; one that
        Dask holds is summed chunk by chunk. Or weights
        in any form that :func:`fedstat.split` takes, (client, unit, weight...), a run, files: its rows are then those
        of :func:`layer_matrix`, and the result also has clients' agreement.
    kappa : float in (0, 1]
        The number of factors is the smallest whose eigenvalues hold this share of their sum.
    n_factors : int, optional
        A given number of factors instead of the κ rule.
    method : {"pa", "minres", "pc", "leverage"}
        Estimator of the communalities, see :func:`fedstat.stats.factor.fit`.
    rotation : {"varimax", "promax", "oblimin"}, optional
        Rotation of the loadings; the communalities do not depend on it.
    corr : bool
        ``z`` is a correlation matrix; a unit whose row is NaN is dead.
    n_obs : int, optional
        Rows behind a given correlation matrix; the fit indices need it.
    start : {"pc", "smc"}, or array, Series, DataArray (unit,) or mapping from unit
        Communalities to start from: principal components (the paper), squared multiple correlations, given ones.
    n_starts : int
        With more than one, random starts are tried too and the number of distinct solutions is reported.
    seed : int
        Seed of the random starts.
    heywood : {"allow", "bound", "error"}
        Communalities above 1 are kept and flagged, clipped to 1 in every step, or an error that names the units.
    max_iter : int, optional
        Cap on the eigendecompositions: 50 for ``"pa"``, 1000 for ``"minres"``.
    tol : float, optional
        Stop when no communality changes by more than this: 1e-3 for ``"pa"``, 1e-6 for ``"minres"``.
    layer, checkpoint, baseline
        Which weights, where ``z`` holds several layers or rounds, and what is taken off them: as in
        :func:`fedstat.split`.

    Returns
    -------
    FactorResult
        A :class:`fedstat.results.ByLayer` of them where layers are several.

    Raises
    ------
    ValueError
        If ``z`` is not a matrix, holds NaN or infinite values (the units are named), is not a correlation matrix
        although ``corr``, or an argument is out of range or has no effect: ``kappa`` with ``n_factors``, ``n_obs`` with
        raw rows, and ``start``, ``n_starts``, ``heywood``, ``max_iter`` and ``tol`` with ``"pc"`` and ``"leverage"``.

    Warns
    -----
    ConvergenceWarning
        If the cap was reached first, as is usual for ``"pa"``: of 20 hidden layers trained on MNIST and CIFAR-10 (20
        clients, 10 rounds) 1 converged within 50 steps at κ = 0.85, 5 at 0.75 and 15 at 0.5; within 1000 steps 19, 19
        and 20 did. No κ is a cure, so the default is the paper's; a higher ``max_iter`` usually is one.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = np.outer(rng.normal(size=2000), [1, 1, 1, 0]) + rng.normal(size=(2000, 4))
    >>> fa(z, n_factors=1)
    Factor analysis (pa): 4 units, 2000 rows
    1 factor (given); converged in 7 iterations (last change 0.0009)
    Communality: median 0.48, range 0.00 to 0.55; 0 Heywood cases, 0 constant
      highest: 2 (0.55), 0 (0.50), 1 (0.47), 3 (0.00)
      lowest:  3 (0.00), 1 (0.47), 0 (0.50), 2 (0.55)
    """
    options = {"start": start, "n_starts": n_starts, "seed": seed, "heywood": heywood, "max_iter": max_iter, "tol": tol}
    fitting: dict[str, Any] = {
        "kappa": kappa, "n_factors": n_factors, "method": method, "rotation": rotation, "options": options
    }  # fmt: skip
    if n_obs is not None and not corr:
        raise ValueError(f"n_obs has no effect on raw rows, which are counted, but got {n_obs!r}. Leave it out.")
    if not corr and _is_weights(z):
        return of_weights(z, baseline, **fitting)
    if baseline is not None:
        raise ValueError(
            "baseline is subtracted from weights (client, unit, ...), but z is a matrix. Subtract it first."
        )
    units = labels(z, "unit", -1)
    if corr and isinstance(z, xr.DataArray):
        z = _rows_as_columns(z)
    z = values_of(z, last="unit", lazy=not corr)
    if z.ndim != 2:
        raise ValueError(
            f"z must have two dims (row, unit), but got shape {tuple(z.shape)}. "
            "Use fedstat.layer_matrix(weights), or select one round or layer first."
        )
    require_room(z, len(units), method, n_factors, start)
    if corr:
        return analyse(correlation_matrix(z), units, n_obs, None, **fitting)
    m, exponent = row_sums(z, units)
    return replace(analyse(correlation(m), units, int(m.n), None, **fitting), **standard(m, exponent))


def _rows_as_columns(r: xr.DataArray) -> xr.DataArray:
    """A correlation matrix with its rows in the order of its columns, where both have labels."""
    rows = next((d for d in r.dims if d != "unit" and d in r.coords), None)
    own = [] if rows is None else r[rows].to_numpy().tolist()
    if "unit" not in r.coords or own == [*range(len(own))]:
        return r
    return r.isel(
        {rows: _labels.order("each row of the correlation matrix", "unit", own, r["unit"].to_numpy().tolist())}
    )


def _is_weights(z: Any) -> bool:
    if isinstance(z, xr.DataArray):
        return z.ndim > 2 and {"client", "unit"} <= {*z.dims}
    return np.ndim(z) > 2


def of_weights(weights: Any, start: Any, **fitting: Any) -> FactorResult:
    """Factor analysis of clients' weights (client, unit, weight...), less a start, with their agreement."""
    weights = subtract_baseline(weights, start)
    n_units = len(labels(weights, "unit", 1))
    require_room(weights, n_units, fitting["method"], fitting["n_factors"], fitting["options"]["start"])
    found = sums(weights)
    say_if_alone(found.n_clients)
    return of_sums(found, of_change=start is not None, **fitting)


def of_sums(found: LayerSums, *, of_change: bool, **fitting: Any) -> FactorResult:
    """Factor analysis of what clients' weights add up to, with their agreement."""
    m = found.total
    result = analyse(correlation(m), found.units, int(m.n), found.n_clients, **fitting)
    return replace(result, agreement=found.agreement, of_change=of_change, **standard(m, found.exponent))


def start_by_unit(start: Any, units: NDArray[Any]) -> Any:
    """Communalities to start from in the order of the units, where they have labels."""
    return _labels.matched("start", start, {"unit": units}, gaps=True) if _labels.has_labels(start) else start


def say_if_alone(n_clients: int) -> None:
    """Warn that one client alone cannot agree with another."""
    if n_clients == 1:
        check.warn(
            "the weights are of one client, so that agreement between clients cannot enter: the split says which units "
            "of that client go together. Give the weights of several clients."
        )


def changed(value: Any, default: Any) -> bool:
    """Whether an argument is not its default."""
    return value is not default and (not np.isscalar(value) or value != default)


def require_effect(method: str, n_factors: int | None, kappa: float, options: dict[str, Any]) -> None:
    """ValueError for an argument that was changed from its default and has no effect."""
    if method == "icc":
        raise ValueError(
            "agreement is not a factor analysis, but got method='icc'. Use fedstat.split(weights, method='icc') to "
            "split by it, or fedstat.icc(weights) for the correlations themselves."
        )
    check.choice("method", method, factor.METHODS)
    if method not in factor.ITERATE:
        for name in _OF_ITERATION:
            value = options[name]
            if changed(value, DEFAULTS[name]):
                raise ValueError(
                    f"{name} has no effect with method={method!r}, which does not iterate, but got {value!r}. "
                    "Leave it out, or use method='pa' or 'minres'."
                )
    if n_factors is not None and kappa != KAPPA:
        raise ValueError(
            f"kappa has no effect with a given n_factors, but got kappa={kappa!r} and n_factors={n_factors!r}. "
            "Leave one of them out."
        )


def require_room(data: Any, units: int, method: str, n_factors: int | None, start: Any) -> None:
    """ValueError if the analysis of this many units does not fit into the machine's memory."""
    if is_torch_array(data) and data.device.type != "cpu":
        return  # torch says itself what a device lacks
    few_pairs = isinstance(n_factors, int) and eigenvalues.pays(units, n_factors) and method != "minres"
    require_memory(units, all_pairs=not few_pairs or (isinstance(start, str) and start == "smc"))


def analyse(
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
    """Factor analysis of a correlation matrix, with its warnings."""
    heywood = check.choice("heywood", options["heywood"], ("allow", "bound", "error"))
    n_starts = check.integer("n_starts", options["n_starts"])
    options = options | {"start": start_by_unit(options["start"], units)}
    arguments = {k: options[k] for k in ("start", "max_iter", "tol")}
    arguments |= {"kappa": kappa, "n_factors": n_factors, "method": method}
    arguments["heywood"] = "bound" if heywood == "bound" else "allow"
    if n_starts > 1:
        fit, n_minima = factor.starts(r, n_starts - 1, seed=options["seed"], **arguments)
    else:
        fit, n_minima = factor.fit(r, **arguments), 1
    loadings = numpy_of(fit.loadings)
    loadings = loadings * np.where(loadings.sum(0) < 0, -1.0, 1.0)  # eigenvectors have no sign of their own
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
        raise ValueError(
            f"communality above 1 (Heywood case) in unit(s) {few(units[result.heywood])}. "
            "Lower kappa or n_factors, or pass heywood='bound' or method='minres'."
        )
    _say_if_improper(result, numpy_of(fit.eigenvalues))
    return result.rotate(rotation) if rotation is not None else result


def _say_if_improper(result: FactorResult, eigenvalues: NDArray[Any]) -> None:
    """Warn where communalities say nothing, or were still moving."""
    live = int((~result.dead).sum())
    if result.method != "leverage" and (rank := _exhausted(eigenvalues[: result.n_factors], live)):
        check.warn(
            f"there are as many factors as the rank of the correlations, {rank} for {live} live units: "
            "every communality is 1 and says nothing. Lower kappa or n_factors, or use more rows."
        )
    if not result.converged:
        check.warn(
            f"{result.method} was still moving by {result.residual:.2g} after {result.n_iter} steps with "
            f"{result.n_factors} factors for {live} units. Raise max_iter (1000 is usually enough), lower kappa or "
            "n_factors, use method='minres', or see fedstat.sensitivity for whether the split moves too.",
            ConvergenceWarning,
        )


def _exhausted(leading: NDArray[Any], live: int) -> int | None:
    """Rank of R if its leading eigenvalues add up to its trace, so that no variance is left; else None."""
    return None if leading.sum() < live * (1 - 1e-9) else int(np.sum(leading > 1e-10 * leading[0]))
