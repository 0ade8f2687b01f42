"""Targets of samples: classes, or real numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, labels
from fedstat._utils.lazy import xr

Task = Literal["classification", "regression"]
TASKS: tuple[Task, ...] = ("classification", "regression")


def task_of(name: str, y: NDArray[Any], task: Task | None = None) -> Task:
    """Return the task of targets: the ``task`` that the user set, else regression for floats and classification else.

    Parameters
    ----------
    name : str
        Name of the targets in messages.
    y : array (sample, ...)
    task : {"classification", "regression"}, optional

    Raises
    ------
    ValueError
        If the targets do not fit the task, or without a task, if they are whole numbers of a floating-point type, which
        may be classes, counts or grades.

    Examples
    --------
    >>> task_of("y", np.array([0.3, 1.0])), task_of("y", np.array(["cat", "dog"]))
    ('regression', 'classification')
    >>> task_of("y", np.array([1.0, 3.0]))
    Traceback (most recent call last):
    ValueError: y holds whole numbers as float64, such as 1.0, which may be classes, counts or grades. Set
    task='classification' or task='regression'.
    """
    if task is not None:
        check.choice("task", task, TASKS)
    if y.dtype.kind == "O":  # numbers of any type
        y = np.array(y.tolist())
    is_float = y.dtype.kind == "f"
    is_whole = is_float and bool((np.isfinite(y) & (y == np.round(y))).all())
    if task is None and is_whole and y.size:
        raise ValueError(
            f"{name} holds whole numbers as {y.dtype}, such as {y.flat[0]}, which may be classes, counts or grades. "
            "Set task='classification' or task='regression'."
        )
    if task == "regression" and y.dtype.kind not in "iuf":
        raise ValueError(
            f"{name} must hold real numbers for task='regression', but has {y.flat[0]!r}. Convert them, or set "
            "task='classification'."
        )
    if task == "classification" and is_float and not is_whole:
        raise ValueError(
            f"{name} must hold classes for task='classification', but has {y[y != np.round(y)].flat[0]:g}. Group the "
            "values into classes, for example by numpy.digitize, or set task='regression'."
        )
    return task or ("regression" if is_float else "classification")


def read_targets(
    name: str, y: Any, task: Task | None = None, *, names: Sequence[Any] | None = None
) -> tuple[NDArray[Any], dict[str, Any]]:
    """Return targets as a data set holds them, and the attributes of y.

    Parameters
    ----------
    name : str
        Name of the targets in messages, such as "y in own.npz".
    y : array (sample,) or, in regression, (sample, target)
    task : {"classification", "regression"}, optional
        By default, see :func:`task_of`.
    names : sequence, optional
        Classes in the order of their numbers, if y holds class numbers already; by default the sorted values of y.

    Returns
    -------
    array
        float64 real numbers, or int64 classes, numbered from 0.
    dict
        In classification ``names``, the classes as texts.

    Raises
    ------
    ValueError
        If a target is missing or not finite, or the targets do not fit the task.

    Examples
    --------
    >>> read_targets("y", np.array(["b", "a", "b"]))
    (array([1, 0, 1]), {'names': ['a', 'b']})
    >>> read_targets("y", np.array([0.5, 2.0]))
    (array([0.5, 2. ]), {})
    """
    y = labels.complete(name, y, "sample")
    if task_of(name, y, task) == "regression":
        y = y.astype(np.float64)
        if not np.isfinite(y).all():
            bad = int(np.flatnonzero(~np.isfinite(y).reshape(len(y), -1).all(1))[0])
            raise ValueError(f"{name} must be finite, but is {y[bad]} in sample {bad}. Remove the sample.")
        return y, {}
    if y.ndim != 1:
        raise ValueError(
            f"{name} must hold one class for each sample, but has shape {y.shape}. For one-hot classes pass "
            "y.argmax(1); for several real numbers set task='regression'."
        )
    if names is not None:
        return y.astype(np.int64), {"names": [str(c) for c in names]}
    classes, numbers = np.unique(labels.classes(name, y), return_inverse=True)
    return numbers.astype(np.int64), {"names": [_class_name(c) for c in classes]}


QUANTILES = 10
"""Number of strata into which real-valued targets are cut."""


def strata(y: xr.DataArray, like: xr.DataArray | None = None) -> NDArray[Any]:
    """Return the class of each sample; in regression, the decile of its target, as a number from 0.

    Partitions divide samples by these strata. Real numbers with at most 10 values are strata by their value. Of several
    targets of a sample the first counts.

    Parameters
    ----------
    y : DataArray (sample,) or (sample, target)
    like : DataArray, optional
        Targets whose deciles are used; by default those of ``y``.

    Raises
    ------
    ValueError
        If y has other dims, a target is not finite, or only one of both has real numbers.

    Examples
    --------
    >>> strata(xr.DataArray([0.3, 2.5, 1.0, 0.3], dims="sample")).tolist()
    [0, 2, 1, 0]
    """
    if like is not None and (like.dtype.kind == "f") != (y.dtype.kind == "f") and not _is_whole(y, like):
        raise ValueError(
            f"y of both data sets must be classes, or both real numbers, but have the types {like.dtype} and "
            f"{y.dtype}. Pass data sets of one task."
        )
    if y.dtype.kind != "f":
        return labels.classes("y", y)
    values, reference = (_first_target(v) for v in (y, y if like is None else like))
    if len(levels := np.unique(reference)) > QUANTILES:
        levels = np.unique(np.quantile(reference, np.arange(1, QUANTILES) / QUANTILES))
        return np.searchsorted(levels, values, side="right")
    return np.searchsorted(levels, values)


def _is_whole(*arrays: xr.DataArray) -> bool:
    return all(a.dtype.kind in "iub" or (a.dtype.kind == "f" and bool((a == a.round()).all())) for a in arrays)


def _first_target(y: xr.DataArray) -> NDArray[Any]:
    if "sample" not in y.dims or y.ndim > 2:
        raise ValueError(f"y must have the dims sample, or sample and one for several targets, but has {y.dims}")
    values = y.transpose("sample", ...).to_numpy()
    values = values if values.ndim == 1 else values[:, 0]
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"y must be finite, but in sample {bad} it is not. Remove the sample.")
    return values


def _class_name(value: Any) -> str:
    """Return a class as text; whole numbers of a floating-point type without decimals."""
    return str(int(value)) if isinstance(value, np.floating) else str(value)
