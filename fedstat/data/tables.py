"""Tables of users: a row is a sample, and columns are features, targets, the client and the subset."""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, guard, labels
from fedstat._utils.check import few
from fedstat._utils.lazy import pd, xr
from fedstat.data._files import note
from fedstat.data._samples import build_samples
from fedstat.data.targets import Task

_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # numbers that are equal to their texts


_wrap = partial(guard.wrap_errors, advice="Save it as UTF-8 with commas.", what="could not be read as a table")


@check.named_options()
def from_table(
    frame: pd.DataFrame | str | os.PathLike[str],
    *,
    y: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    task: Task | None = None,
) -> xr.Dataset:
    """Build a data set from a table, whose rows are samples.

    Parameters
    ----------
    frame : pandas.DataFrame or path of a .csv file
        All columns but those below are features, in their order: numbers or truth values.
    y : str or sequence of str
        Column of the classes or targets; several columns are several targets of a regression.
    client : str, optional
        Column of the client of each row; labels stay as they are. ``partition.natural`` makes clients of it.
    split : str, optional
        Column of the subset of each row: "train", "test" or "validation". By default, all rows are "train".
    task : {"classification", "regression"}, optional
        By default, real numbers in ``y`` are targets of a regression, and integers and texts are classes. Whole numbers
        of a floating-point type need a task.

    Returns
    -------
    xarray.Dataset
        x (sample, feature) float64, with the names of the columns as coordinate ``feature``; y (sample): int64 classes,
        whose ``attrs["names"]`` are the values of the table, or float64 targets (sample) or (sample, target);
        coordinates split (sample) and, with ``client``, user (sample).

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If a column is missing, occurs twice or lacks a value; if a feature holds texts, or values that are not finite;
        if there is only one class. The message names the column and the row (in a file, the line).

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [31, 47, 52], "dose": [0.5, 1.0, 1.5], "ill": ["no", "yes", "yes"],
    ...                       "hospital": [205, 100, 205]})
    >>> data = from_table(frame, y="ill", client="hospital")
    >>> data.feature.values.tolist(), data.y.values.tolist(), data.user.values.tolist()
    (['age', 'dose'], [0, 1, 1], [205, 100, 205])
    """
    if isinstance(frame, str | os.PathLike):
        path = Path(frame).expanduser()
        header = _read_header(path)
        table = _read(path, client)
        return _build(table, y, client, split, task, where=str(path), row=_row_word(table), names=header)
    if not hasattr(frame, "iloc") or frame.ndim != 2:
        raise ValueError(f"frame must be a pandas DataFrame or the path of a .csv file, but got {check.kind(frame)}.")
    if frame.columns.nlevels > 1:
        raise ValueError("frame must have one level of column names, but has several. Join them to one name each.")
    return _build(frame, y, client, split, task, where="frame", row="row", names=[*frame.columns])


def read_table(
    path: Path, *, y: str | Sequence[str] | None = None, client: str | None = None, task: Task | None = None
) -> xr.Dataset:
    """Read a table with the columns ``y`` and, if they exist, ``client`` and ``split``; see :func:`from_table`."""
    header = _read_header(path)
    client = client or ("client" if "client" in header else None)
    targets = "y" if y is None else y
    if isinstance(targets, str) and targets not in header and "," in targets:
        targets = [name.strip() for name in targets.split(",")]
    split = "split" if "split" in header else None
    table = _read(path, client)
    return _build(table, targets, client, split, task, where=str(path), row=_row_word(table), names=header)


def _read_header(path: Path) -> list[str]:
    """Return the names of the columns of a .csv file."""
    try:
        stream = guard.opened(note(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no file {path}. It must be a table with a header: columns of numbers, the features; y, the "
            "classes or targets; optional client and split (train, test or validation)."
        ) from None
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text, _wrap(path):
        header = next(csv.reader(text), [])
    if unnamed := [i for i, name in enumerate(header, start=1) if not name.strip()]:
        raise ValueError(
            f"columns of {path} must have names, but column {unnamed[0]} has none. If pandas wrote its index there, "
            "save the table by to_csv(path, index=False)."
        )
    return header


def _read(path: Path, client: str | None) -> pd.DataFrame:
    """Read a .csv file; its rows are labeled by their lines, and clients are texts, as 007 and 7 are two."""
    with guard.opened(path) as stream, _wrap(path), warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # rows that are longer than the header
        types = {} if client is None else {client: str}
        frame = pd.read_csv(stream, dtype=types, index_col=False, low_memory=False, encoding="utf-8-sig")
    with guard.opened(path) as stream:
        n_lines = sum(1 for _ in stream)
    # Blank lines, and values with line breaks, have rows and lines differ.
    frame.index = pd.RangeIndex(2, len(frame) + 2) if n_lines == len(frame) + 1 else pd.RangeIndex(1, len(frame) + 1)
    return frame


def _build(
    frame: pd.DataFrame,
    y: str | Sequence[str],
    client: str | None,
    split: str | None,
    task: Task | None,
    *,
    where: str,
    row: str,
    names: Sequence[Any],
) -> xr.Dataset:
    several = isinstance(y, Sequence) and not isinstance(y, str)
    targets: list[Any] = [*y] if several else [y]
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(
            f"columns of {where} must have different names, but {twice[0]!r:.200} occurs twice. Rename one."
        )
    if not len(frame):
        raise ValueError(f"{where} must hold samples, but has no rows.")
    roles = [*targets, *(name for name in (client, split) if name is not None)]
    for name in roles:
        if name not in frame.columns:
            hint = check.did_you_mean(name, map(str, names))
            separated = " Columns are separated by commas." if len(names) == 1 else ""
            raise ValueError(f"{where} must have a column {name!r:.200}, but has {few(names, 8)}.{hint}{separated}")
    check.distinct("the columns of y, client and split", roles)
    features = [name for name in frame.columns if name not in roles]
    if not features:
        raise ValueError(f"{where} must have at least one column of features, but has only {few(names, 8)}.")
    column = {name: labels.complete(_name(name, where), frame[name], row, frame.index.to_numpy()) for name in roles}
    for name in targets:
        _require_one_kind(frame[name], name, where, row)
    return build_samples(
        where,
        np.column_stack([_numbers(frame[name], name, where, row) for name in features]),
        np.column_stack([column[name] for name in targets]) if several else column[targets[0]],
        task=task or ("regression" if several else None),
        client=None if client is None else _integers(column[client]),
        split=None if split is None else column[split],
        features=[str(name) for name in features],
        targets=[str(name) for name in targets] if several else None,
    )


def _row_word(table: pd.DataFrame) -> str:
    """Return what the labels of rows count: lines of the file from 1, or rows from 1 below the header."""
    return "line" if len(table) and table.index[0] == 2 else "row"


def _integers(client: NDArray[Any]) -> NDArray[Any]:
    """Return texts as integers if all are written as integers."""
    is_whole = client.dtype.kind == "U" and all(_WHOLE.fullmatch(text) for text in client)
    return client.astype(np.int64) if is_whole else client


def _name(name: Any, where: str) -> str:
    return f"column {str(name)!r:.200} of {where}"


def _require_one_kind(column: pd.Series, name: Any, where: str, row: str) -> None:
    """Raise ValueError if most values of a target are numbers, with decimals, but some are texts that are none."""
    if column.dtype.kind in "iufb":
        return
    numbers = pd.to_numeric(column.astype(object), errors="coerce").to_numpy(np.float64)
    is_number = np.isfinite(numbers)
    if 0.5 <= is_number.mean() < 1 and (numbers[is_number] % 1 != 0).any():
        i = int(np.argmin(is_number))
        raise ValueError(
            f"{_name(name, where)} must hold numbers only, or classes, but most values are real numbers and {row} "
            f"{column.index[i]} has {column.iloc[i]!r:.80}. Correct it, or leave the {row} out."
        )


def _numbers(column: pd.Series, name: Any, where: str, row: str) -> NDArray[np.float64]:
    """Return a feature as numbers; raise ValueError if it holds texts, or values that are missing or not finite."""
    if column.dtype.kind not in "iufb":
        plain = column.astype(object)
        is_text = pd.to_numeric(plain, errors="coerce").isna() & plain.notna()
        i = int(np.argmax(is_text)) if len(column) else 0
        raise ValueError(
            f"{_name(name, where)} must hold numbers, as every feature, but is {column.dtype} with "
            f"{plain.iloc[i]!r:.80} in {row} {column.index[i]}. Leave it out, or turn categories into columns of 0 and "
            f"1: pandas.get_dummies(frame, columns=[{str(name)!r:.200}], dtype=float)."
        )
    labels.complete(_name(name, where), column, row, column.index.to_numpy())
    numbers = column.to_numpy(np.float64)
    if (wrong := np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max))).size:
        raise ValueError(
            f"{_name(name, where)} must be finite as float32, but is {column.iloc[wrong[0]]} in {row} "
            f"{column.index[wrong[0]]}. Correct it, or leave the {row} out."
        )
    return numbers
