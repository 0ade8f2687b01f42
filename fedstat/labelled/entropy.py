"""Entropy of labelled samples."""

from __future__ import annotations

import warnings
from typing import Any, Unpack

from fedstat import _check, _labels
from fedstat._later import xr
from fedstat.labelled.coerce import need_dims
from fedstat.labelled.options import EntropyOptions
from fedstat.results.entropy import FIELDS, IN_NATS, EntropyResult
from fedstat.stats import entropy


def knn_entropy(
    x: Any,
    *,
    k: int = 3,
    level: float = 0.95,
    dim: str = "client",
    feature_dim: str | None = None,
    **options: Unpack[EntropyOptions],
) -> EntropyResult:
    """Kozachenko–Leonenko estimate of differential entropy over one dim, in nats (FedFac §1, Fig. 2).

    Parameters
    ----------
    x : DataArray, DataFrame, array or tensor (client, ...)
        Samples along ``dim``, the rows of a DataFrame; other dims are a batch. In an array or tensor the samples are on
        axis 0, or on the axis given by ``axis=...``, see :func:`fedstat.stats.entropy.knn_entropy`.
    k : int
        Number of the neighbour.
    level : float
        Confidence level of the intervals, which allow for the estimate's bias.
    dim : str
        Dim of the samples of a DataArray: the clients, for Fig. 2.
    feature_dim : str, optional
        Dim of the coordinates of one sample of a DataArray; None: every number is a sample of its own.
    **options
        Those of :class:`fedstat.labelled.options.EntropyOptions`: ``ties``, ``resolution``, ``seed``, as in
        :func:`fedstat.stats.entropy.knn_entropy`.

    Returns
    -------
    EntropyResult
        Its fields are DataArrays, arrays or tensors, as ``x`` is: entropy, std_error, n, n_tied, conf_low, conf_high,
        clustered (...); atom_value (..., atom) or (..., atom, ``feature_dim``) and atom_mass (..., atom) of values that
        more than k samples share, if ``ties="atoms"``. ``result["entropy"]`` is ``result.entropy``;
        :meth:`~EntropyResult.to_dataset` holds all.

    Raises
    ------
    ValueError
        If a dim is not there, a value is not finite, there are no more than k samples, more than k samples are equal
        and ``ties`` does not provide for them, or a coordinate is a linear function of others.

    Warns
    -----
    UserWarning
        If samples have exact copies, k of them or fewer: the entropy is too low. If samples lie in narrow groups too
        small for k: the entropy is too high. No standard error and no interval are given there.

    Examples
    --------
    >>> import numpy as np
    >>> outputs = xr.DataArray(np.random.default_rng(0).normal(size=(100, 5)), dims=("client", "unit"))
    >>> knn_entropy(outputs).std_error.round(1).values
    array([0.1, 0.1, 0.1, 0.1, 0.1])
    >>> knn_entropy(outputs).tidy()[["estimate", "conf_low", "conf_high"]].round(2).iloc[0].tolist()
    [1.28, 0.99, 1.54]
    """
    x = _labels.labelled(x, (dim, feature_dim or "unit"))
    if not isinstance(x, xr.DataArray):
        if dim != "client" or feature_dim is not None:
            raise ValueError(
                f"dim and feature_dim name dims of a DataArray, but got {type(x).__name__}. Use axis and feature_axis."
            )
        found = entropy.knn_entropy(x, k=k, level=level, **options)
        return _with_warning(EntropyResult(*found, k=k, level=level))
    if taken := sorted({"axis", "feature_axis"} & set(options)):
        raise ValueError(f"a DataArray has dims, but got {taken[0]}. Use dim and feature_dim.")
    core = [dim] if feature_dim is None else [dim, feature_dim]
    need_dims(x, *core)
    _check.numbers("x", x)
    axes: dict[str, Any] = {"axis": -1} if feature_dim is None else {"axis": -2, "feature_axis": -1}
    by_atom = ["atom"] if feature_dim is None else ["atom", feature_dim]

    axes |= options

    def estimate(values: Any) -> tuple[Any, ...]:
        found = entropy.knn_entropy(values, k=k, level=level, **axes)
        value = found.atom_value
        if value.ndim < found.atom_mass.ndim + len(by_atom) - 1:  # one coordinate is no axis to the array function
            value = value[..., None]
        return tuple(found._replace(atom_value=value))

    parts = xr.apply_ufunc(
        estimate, x, input_core_dims=[core], output_core_dims=[[], [], [], by_atom, ["atom"], *[[]] * 4],
        exclude_dims=set(core),
    )  # fmt: skip
    data = xr.Dataset(dict(zip(FIELDS, parts, strict=True)))
    if feature_dim is not None and feature_dim in x.coords:
        data = data.assign_coords({feature_dim: x[feature_dim]})
    for name in IN_NATS:
        data[name].attrs["units"] = "nats"
    return _with_warning(EntropyResult(**{name: data[name] for name in FIELDS}, k=k, level=level))


def _with_warning(result: EntropyResult) -> EntropyResult:
    """The result, after a warning if samples have exact copies or lie in narrow groups."""
    data = result.to_dataset()
    n, n_tied, clustered = (data[name].to_numpy().ravel() for name in ("n", "n_tied", "clustered"))
    if (n_tied > 0).any():
        most, some = n_tied.argmax(), (n_tied > 0).sum()
        of = f" in the series with most ties; {some} of {len(n)} series have some" if len(n) > 1 else ""
        warnings.warn(
            f"{n_tied[most]} of {n[most]} samples have an exact copy{of}. Copies shorten the distance to "
            f"neighbor {result.k}: the entropy is too low, and no interval is given. If values were rounded, use "
            "ties='jitter' with their resolution; if a value has a mass of its own, ties='atoms' and a smaller k; if "
            "samples came twice, drop the copies. A larger k lessens the error.",
            UserWarning,
            stacklevel=3,
        )
    if clustered.any():
        of = f" in {clustered.sum()} of {len(n)} series" if len(n) > 1 else ""
        warnings.warn(
            f"samples lie in narrow groups{of}, and many groups are too small for neighbor {result.k}: the entropy is "
            "too high, and no interval is given. Use a smaller k or more samples, or take the entropy of each group.",
            UserWarning,
            stacklevel=3,
        )
    return result
