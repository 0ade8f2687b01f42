"""The verbs users call: arrays, torch tensors or xarray objects in, result objects out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import xarray as xr
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat.results import ConvergenceWarning, FactorResult, SplitResult, Tau
from fedstat.stats import entropy, factor

Weights = Any
"""(client, unit, weight...): NumPy array, torch tensor, or DataArray with dims ``client`` and ``unit``."""


def layer_matrix(weights: Weights) -> Any:
    """Input of the factor analysis of one layer: the clients' weights with one column a unit (FedFac §4.1).

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...)
        A layer's weights as torch stores them: (client, out, in) for a dense layer, (client, out, in, height, width)
        for a convolution. In a DataArray every dim besides ``client`` and ``unit`` is a weight dim, in any order.

    Returns
    -------
    array, tensor or DataArray (row, unit)
        Rows are (client, weight) pairs, client by client; the kind is that of ``weights``.

    Examples
    --------
    >>> import numpy as np
    >>> layer_matrix(np.zeros((10, 8, 3, 5, 5))).shape
    (750, 8)
    """
    if isinstance(weights, xr.DataArray):
        _need_dims(weights, "client", "unit")
        others = [d for d in weights.dims if d not in ("client", "unit")]
        return weights.stack(row=["client", *others]).transpose("row", "unit")
    flat = _flat(weights)
    swapped = flat.transpose(1, 2) if is_torch_array(flat) else flat.swapaxes(1, 2)
    return swapped.reshape(-1, flat.shape[1])


def fa(
    z: Any,
    *,
    kappa: float = 0.85,
    n_factors: int | None = None,
    method: factor.Method = "pa",
    corr: bool = False,
    n_obs: int | None = None,
    max_iter: int = 50,
    tol: float = 1e-3,
) -> FactorResult:
    """Factor analysis of a layer's hidden units (FedFac §4.1).

    Parameters
    ----------
    z : array, tensor or DataArray (row, unit)
        Output of :func:`layer_matrix`, or a correlation matrix (unit, unit) if ``corr``. In a DataArray the columns
        are the dim ``unit``.
    kappa : float in (0, 1]
        The number of factors is the smallest whose eigenvalues hold this share of their sum.
    n_factors : int, optional
        A given number of factors instead of the κ rule.
    method : {"pa", "pc", "leverage"}
        Estimator of the communalities, see :func:`fedstat.stats.factor.fit`.
    corr : bool
        ``z`` is a correlation matrix; a unit whose row is NaN is dead.
    n_obs : int, optional
        Rows behind a given correlation matrix; the fit indices need it.
    max_iter : int
        Cap on the eigendecompositions of ``"pa"``.
    tol : float
        ``"pa"`` stops when no communality changes by more than this.

    Returns
    -------
    FactorResult

    Raises
    ------
    ValueError
        If ``z`` is no matrix, holds NaN or infinite values (the units are named), is no correlation matrix although
        ``corr``, or an argument is out of range.

    Warns
    -----
    ConvergenceWarning
        If the cap was reached first. Usual for κ >= 0.85, where communalities run to 1 and past it.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = np.outer(rng.normal(size=2000), [1, 1, 1, 0]) + rng.normal(size=(2000, 4))
    >>> result = fa(z, n_factors=1)
    >>> abs(result.communality).round(1)
    array([0.5, 0.5, 0.5, 0. ])
    """
    units = _labels(z, "unit", -1)
    z = _values(z, last="unit")
    if z.ndim != 2:
        raise ValueError(
            f"z must have two dims (row, unit), but got shape {tuple(z.shape)}. "
            "Use fedstat.layer_matrix(weights), or select one round or layer first."
        )
    if corr:
        r = _correlation_matrix(z)
    else:
        n_obs = int(z.shape[0])
        r = factor.correlation(_name_bad(factor.moments(z), units))
    return _result(r, units, n_obs, kappa=kappa, n_factors=n_factors, method=method, max_iter=max_iter, tol=tol)


def split(
    weights: Weights,
    *,
    kappa: float = 0.85,
    tau: Tau = 0.5,
    n_factors: int | None = None,
    method: factor.Method = "pa",
    max_iter: int = 50,
    tol: float = 1e-3,
) -> SplitResult:
    """Split a layer's units into shared and client-specific ones (FedFac §4.1).

    The correlation matrix is summed client by client: the stacked matrix is never built.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...)
        As in :func:`layer_matrix`.
    kappa, n_factors, method, max_iter, tol
        As in :func:`fa`.
    tau : float in (0, 1), inf, -inf or Absolute
        Quantile of the communalities at which units begin to be shared; ``Absolute(x)`` for a value; ``inf``: the
        whole layer is personal (FedPer, LG-FedAvg); ``-inf``: the whole layer is shared (FedAvg).

    Returns
    -------
    SplitResult

    Raises
    ------
    ValueError
        As :func:`fa`; NaN or infinite weights are named by client and unit.

    Warns
    -----
    ConvergenceWarning
        As :func:`fa`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))  # 4 units follow one pattern
    >>> own = rng.normal(size=(10, 2, 20))  # 2 units are each client's own
    >>> split(np.concatenate([alike, own], axis=1), n_factors=1, tau=1 / 3).shared.tolist()
    [True, True, True, True, False, False]
    """
    units = _labels(weights, "unit", 1)
    sums = (_name_bad(factor.moments(block), units, client) for client, block in _client_blocks(weights))
    m = reduce(add, sums)
    options = {"kappa": kappa, "n_factors": n_factors, "method": method, "max_iter": max_iter, "tol": tol}
    return _result(factor.correlation(m), units, int(m.n), **options).split(tau=tau)


def _result(r: Any, units: NDArray[Any], n_obs: int | None, **options: Any) -> FactorResult:
    fit = factor.fit(r, **options)
    live = ~np.isnan(_numpy(fit.communality))
    g = int(fit.n_factors)
    if not bool(fit.converged):
        warnings.warn(
            f"principal axis was still moving by more than tol = {options['tol']:g} after {int(fit.n_iter)} steps with "
            f"{g} factors for {int(live.sum())} units. Lower kappa or n_factors, raise max_iter, or see "
            "fedstat.stats.split.iteration_stability for whether the split moves too.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return FactorResult(
        communality=_numpy(fit.communality),
        loadings=np.where(live[:, None], _numpy(fit.loadings)[:, :g], np.nan),
        eigenvalues=_numpy(fit.eigenvalues),
        n_factors=g,
        n_iter=int(fit.n_iter),
        converged=bool(fit.converged),
        heywood=_numpy(fit.heywood),
        correlation=_numpy(r),
        units=units,
        n_obs=n_obs,
        kappa=options["kappa"] if options["n_factors"] is None else None,
        method=options["method"],
    )


def _client_blocks(weights: Weights) -> Iterator[tuple[Any, Any]]:
    """Yield (label, (weight, unit)) client by client; a lazy DataArray is read one client at a time."""
    if isinstance(weights, xr.DataArray):
        _need_dims(weights, "client", "unit")
        if 0 in weights.shape:
            raise ValueError(f"weights must hold at least one client, unit and weight, but got {dict(weights.sizes)}")
        for label, i in zip(_labels(weights, "client", 0), range(weights.sizes["client"]), strict=True):
            one = weights.isel(client=i).transpose("unit", ...)
            yield label, np.asarray(one.data).reshape(one.sizes["unit"], -1).T
    else:
        for i, block in enumerate(_flat(weights)):
            yield i, block.T


def _flat(weights: Any) -> Any:
    weights = weights if is_torch_array(weights) else np.asarray(weights)
    if weights.ndim < 3 or 0 in weights.shape:
        raise ValueError(
            f"weights must be (client, unit, weight...) with at least one of each, but got shape {tuple(weights.shape)}"
        )
    return weights.reshape(weights.shape[0], weights.shape[1], -1)


def _values(z: Any, *, last: str) -> Any:
    if isinstance(z, xr.DataArray):
        if z.dims != (last, last):  # a correlation matrix may repeat its dim
            _need_dims(z, last)
            z = z.transpose(..., last)
        return z.to_numpy()
    return z if is_torch_array(z) else np.asarray(z)


def _labels(values: Any, dim: str, axis: int) -> NDArray[Any]:
    if isinstance(values, xr.DataArray) and dim in values.coords:
        return np.asarray(values[dim].to_numpy())
    if isinstance(values, xr.DataArray):
        return np.arange(values.sizes.get(dim, 0))
    shape = np.shape(values)
    return np.arange(shape[axis] if len(shape) > abs(axis) - (axis < 0) else 0)


def _need_dims(values: xr.DataArray, *dims: str) -> None:
    if missing := [d for d in dims if d not in values.dims]:
        raise ValueError(f"the DataArray must have dim(s) {missing}, but got {values.dims}. Rename with .rename(...).")


def _name_bad(m: factor.Moments, units: NDArray[Any], client: Any = None) -> factor.Moments:
    if bad := factor.broken_units(m):
        whose = "the weights" if client is None else f"the weights of client {client!s}"
        raise ValueError(
            f"{whose} hold NaN or infinite values, first in unit(s) {_few(units[bad])}. "
            "A diverged client is the usual cause: leave it out or lower its learning rate."
        )
    return m


def _correlation_matrix(r: Any) -> Any:
    """Check a given correlation matrix; NaN rows mark dead units."""
    a = _numpy(r).astype(float)
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"a correlation matrix must be square, but got shape {a.shape}. Pass corr=False for raw rows.")
    live = ~np.isnan(np.diagonal(a))
    core = a[np.ix_(live, live)]
    if not np.isfinite(core).all():
        raise ValueError("a correlation matrix must be finite between live units, but got NaN or infinite values")
    if (worst := float(np.abs(core - core.T).max(initial=0))) > 1e-8:
        raise ValueError(f"a correlation matrix must be symmetric, but got |R - R'| up to {worst:.3g}")
    if (worst := float(np.abs(np.diagonal(core) - 1).max(initial=0))) > 1e-8:
        where = int(np.flatnonzero(live)[np.abs(np.diagonal(core) - 1).argmax()])
        raise ValueError(
            f"a correlation matrix must have a unit diagonal, but got R[{where}, {where}] = {a[where, where]:g}. "
            "Pass raw rows with corr=False to have them standardised; mark dead units by NaN rows."
        )
    smallest = float(np.linalg.eigvalsh(core)[0]) if core.size else 0.0
    if smallest < -1e-8 * max(1, len(core)):
        raise ValueError(
            f"a correlation matrix must be positive semi-definite, but got smallest eigenvalue {smallest:.3g}. "
            "Pairwise deletion of missing values is the usual cause: compute R from complete rows."
        )
    return r if is_torch_array(r) else np.asarray(r, dtype=float)


def _numpy(a: Any) -> NDArray[Any]:
    return a.detach().cpu().numpy() if is_torch_array(a) else np.asarray(a)


def _few(labels: Iterable[Any], most: int = 3) -> str:
    labels = [str(x) for x in labels]
    return ", ".join(labels[:most]) + (f" and {len(labels) - most} more" if len(labels) > most else "")


def knn_entropy(x: Any, *, k: int = 3, dim: str = "client", feature_dim: str | None = None, **options: Any) -> Any:
    """Kozachenko–Leonenko estimate of differential entropy over one dim, in nats (FedFac §1, Fig. 2).

    Parameters
    ----------
    x : DataArray, array or tensor
        Samples along ``dim``; other dims are a batch. In an array or tensor the samples are on axis 0, or on the axis
        given by ``axis=...``, see :func:`fedstat.stats.entropy.knn_entropy`.
    k : int
        Number of the neighbour.
    dim : str
        Dim of the samples of a DataArray: the clients, for Fig. 2.
    feature_dim : str, optional
        Dim of the coordinates of one sample of a DataArray; None: every number is a sample of its own.
    **options
        ``ties``, ``resolution``, ``seed``, as in :func:`fedstat.stats.entropy.knn_entropy`.

    Returns
    -------
    Dataset, or Entropy for arrays and tensors
        entropy, std_error, n (...); atom_value (..., atom) or (..., atom, ``feature_dim``) and atom_mass (..., atom)
        of values that more than k samples share, if ``ties="atoms"``.

    Raises
    ------
    ValueError
        If a dim is not there, a value is not finite, there are no more than k samples, or there are ties and
        ``ties`` does not provide for them.

    Examples
    --------
    >>> import numpy as np
    >>> outputs = xr.DataArray(np.random.default_rng(0).normal(size=(100, 5)), dims=("client", "unit"))
    >>> knn_entropy(outputs).std_error.round(1).values
    array([0.1, 0.1, 0.1, 0.1, 0.1])
    """
    if not isinstance(x, xr.DataArray):
        if dim != "client" or feature_dim is not None:
            raise ValueError(
                f"dim and feature_dim name dims of a DataArray, but got {type(x).__name__}. Use axis and feature_axis."
            )
        return entropy.knn_entropy(x, k=k, **options)
    if taken := sorted({"axis", "feature_axis"} & set(options)):
        raise ValueError(f"a DataArray has dims, but got {taken[0]}. Use dim and feature_dim.")
    core = [dim] if feature_dim is None else [dim, feature_dim]
    _need_dims(x, *core)
    axes: dict[str, Any] = {"axis": -1} if feature_dim is None else {"axis": -2, "feature_axis": -1}
    by_atom = ["atom"] if feature_dim is None else ["atom", feature_dim]

    def estimate(values: Any) -> tuple[Any, ...]:
        found = entropy.knn_entropy(values, k=k, **axes, **options)
        value = found.atom_value
        if value.ndim < found.atom_mass.ndim + len(by_atom) - 1:  # one coordinate is no axis to the array function
            value = value[..., None]
        return (*found[:3], value, found.atom_mass)

    parts = xr.apply_ufunc(
        estimate, x, input_core_dims=[core], output_core_dims=[[], [], [], by_atom, ["atom"]],
        exclude_dims=set(core),
    )  # fmt: skip
    result = xr.Dataset(dict(zip(("entropy", "std_error", "n", "atom_value", "atom_mass"), parts, strict=True)))
    if feature_dim is not None and feature_dim in x.coords:
        result = result.assign_coords({feature_dim: x[feature_dim]})
    result["entropy"].attrs["units"] = result["std_error"].attrs["units"] = "nats"
    return result
