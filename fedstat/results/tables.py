"""Numbers and tables in print: estimates with errors, LaTeX, Markdown, HTML, and the join behind ``augment``."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import pd, xr

NONE = "–"
"""Printed where there is no number."""


def number(x: float | None, digits: int = 4) -> str:
    """Print a number, or a dash if it is missing; a number that rounds to 0 has no sign.

    Examples
    --------
    >>> number(0.5), number(None), number(math.nan), number(-math.inf, 2), number(-0.001, 2)
    ('0.5000', '–', '–', '-inf', '0.00')
    """
    return NONE if x is None or math.isnan(x) else f"{x:z.{digits}f}"


def coefficient(x: float) -> str:
    """Print a correlation, a proportion or another number of about 1 to two places."""
    return number(x, 2)


def median_and_ends(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return median, minimum and maximum of the values without missing ones; NaN if all are missing."""
    values = values[~np.isnan(values)]
    least, median, most = np.quantile(values, [0, 0.5, 1]) if len(values) else [np.nan] * 3
    return float(median), float(least), float(most)


def plus_minus(mean: float, error: float, digits: int = 4) -> str:
    """Print mean ± standard error; without an error, the mean alone.

    Examples
    --------
    >>> plus_minus(0.5, 0.0123, 3), plus_minus(0.5, math.nan), plus_minus(math.nan, math.nan)
    ('0.500 ± 0.012', '0.5000', '–')
    """
    text = number(mean, digits)
    return f"{text} ± {error:.{digits}f}" if math.isfinite(error) and math.isfinite(mean) else text


def interval(middle: float, low: float, high: float, digits: int = 4, *, sign: bool = True, equal: str = "") -> str:
    """Print an estimate with its interval; without an interval, the estimate alone or the reason.

    Parameters
    ----------
    middle, low, high : float
    digits : int
    sign : bool
    equal : str
        Sampling unit ("replicates", "clients") if all values are equal, so that there is no interval.

    Examples
    --------
    >>> interval(0.01, -0.02, 0.04), interval(0.01, math.nan, math.nan), interval(0.5, 0.4, 0.6, 2, sign=False)
    ('+0.0100 [-0.0200, +0.0400]', '+0.0100', '0.50 [0.40, 0.60]')
    >>> interval(0.0, math.nan, math.nan, equal="replicates")
    '+0.0000, equal in all replicates'
    """
    if not math.isfinite(middle):
        return NONE
    form = f"{'+' if sign else ''}.{digits}f"
    around = f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) else f", equal in all {equal}" if equal else ""
    return f"{middle:{form}}{around}"


def p_value(p: float) -> str:
    """Print a p-value to four places.

    Examples
    --------
    >>> p_value(0.01234), p_value(1e-6), p_value(math.nan)
    ('0.0123', '<0.0001', '–')
    """
    return NONE if not math.isfinite(p) else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def p_equals(p: float) -> str:
    """Print a p value as in text: three decimals below 0.1, two above.

    Examples
    --------
    >>> p_equals(0.00004), p_equals(0.0061), p_equals(0.01), p_equals(0.2), p_equals(math.nan)
    ('p < 0.001', 'p = 0.006', 'p = 0.01', 'p = 0.20', 'p –')
    """
    if not math.isfinite(p):
        return f"p {NONE}"
    return "p < 0.001" if p < 1e-3 else f"p = {p:.2f}" if p >= 0.1 else f"p = {f'{p:.3f}'.rstrip('0')}"


def decimals(errors: Iterable[float]) -> int:
    """Return the decimal places that show two digits of the smallest standard error, at least 3.

    Examples
    --------
    >>> decimals([0.011, math.nan]), decimals([2e-6, 3e-5]), decimals([])
    (3, 7, 3)
    """
    errors = [x for x in errors if math.isfinite(x) and x > 0]
    return max(3, 1 - math.floor(math.log10(min(errors)))) if errors else 3


def count(n: int, noun: str) -> str:
    """Print a count with its noun.

    Examples
    --------
    >>> count(1, "unit"), count(2, "unit")
    ('1 unit', '2 units')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def megabytes(n: float) -> str:
    """Print bytes in MB; in kB below 0.1 MB.

    Examples
    --------
    >>> megabytes(1_794_000), megabytes(7_848), megabytes(0)
    ('1.8 MB', '7.8 kB', '0.0 MB')
    """
    return f"{n / 1e3:.1f} kB" if 0 < n < 1e5 else f"{n / 1e6:.1f} MB"


def cell(value: Any, digits: int = 3) -> str:
    """Print a value of a table: in scientific form if it would round to 0.000, as a dash if it is missing.

    Examples
    --------
    >>> cell(0.12345), cell(2.5e-7), cell(0.0), cell(float("nan")), cell("fc1"), cell(7), cell(True)
    ('0.123', '2.5e-07', '0.000', '–', 'fc1', '7', 'yes')
    """
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if not isinstance(value, float | np.floating):
        return NONE if value is None or value is pd.NA else str(value)
    text = number(float(value), digits)
    return f"{value:.1e}" if value != 0 and text.strip("-0.") == "" else text


def p_cell(p: float) -> str:
    """Print a p value as :func:`p_equals` does, without the letter.

    Examples
    --------
    >>> p_cell(0.00004), p_cell(0.0061), p_cell(0.2), p_cell(math.nan)
    ('< 0.001', '0.006', '0.20', '–')
    """
    return p_equals(p).removeprefix("p ").removeprefix("= ")


def texts(table: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """Print every value of a table by :func:`cell`, and of columns ``p_...`` by :func:`p_cell`."""
    shown = {
        str(name): [p_cell(x) for x in values] if str(name).startswith("p_") else [cell(x, digits) for x in values]
        for name, values in table.items()
    }
    return pd.DataFrame(shown, dtype=object)


def ends(
    table: pd.DataFrame, *, by: str | None = None, most: int = 10, shown: pd.DataFrame | None = None
) -> list[list[str]]:
    """Return the rows with the highest and the lowest values of a column, as text.

    Parameters
    ----------
    table : DataFrame
    by : str, optional
        Column to sort by, from high to low, missing values last. By default rows keep their order.
    most : int
        Largest number of rows of a full table; a longer table is cut to its two ends.
    shown : DataFrame, optional
        Texts to return in place of the values, row by row.

    Returns
    -------
    list of list of str
        Between the two ends, a row of one cell has the number of omitted rows.
    """
    order, n_known = np.arange(len(table)), len(table)
    if by is not None:
        order = np.argsort(-table[by].to_numpy(dtype=float), kind="stable")  # NaN stands last
        n_known = int(table[by].notna().sum())
    rows = (texts(table) if shown is None else shown).to_numpy()[order].tolist()
    if len(rows) <= most:
        return rows
    top, bottom = min(most // 2, n_known), max(most // 2, n_known - most // 2)
    more = f"{len(rows) - top - (n_known - bottom)} more" + (f", in the order of {by}" if by is not None else "")
    if len(rows) > n_known:
        more += f"; {len(rows) - n_known} of them without a value"
    return [*rows[:top], [f"… {more} …"], *rows[bottom:n_known]]


def ends_html(table: pd.DataFrame, *, by: str | None = None, shown: pd.DataFrame | None = None) -> str:
    """Format :func:`ends` as HTML, with names and values escaped."""
    names = list(map(str, table if shown is None else shown))
    gap = f'<td colspan="{len(names)}" style="text-align: center">'
    rows = [
        "".join(f"{gap if len(row) < len(names) else '<td>'}{html.escape(text)}</td>" for text in row)
        for row in ends(table, by=by, shown=shown)
    ]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody><tr>{'</tr><tr>'.join(rows)}</tr></tbody></table>"


def folded_html(main: pd.DataFrame, table: pd.DataFrame, *, by: str | None = None) -> str:
    """Format a printed table as HTML, and the complete table behind a click if it has more columns.

    Colors are those of the page, so that the table follows light and dark themes. A table that is wider than the page
    scrolls. With ``by``, both tables have the same rows.
    """
    text = _SCROLL.format(ends_html(main if by is None else table, by=by, shown=main))
    if main.shape[1] >= table.shape[1]:
        return text
    summary = f"<summary>All {table.shape[1]} columns</summary>"
    return f"{text}<details>{summary}{_SCROLL.format(ends_html(table, by=by))}</details>"


_PRINT = (
    "margin: 0 0 0.5em; padding: 0; white-space: pre; word-break: normal; overflow-x: auto; "
    "font-size: clamp(9px, 2.05cqi, var(--jp-code-font-size, 1em))"
)
"""80 columns of a monospaced font, each about 0.6 of its size, take the width of the cell; no letter is under 9 px."""


def print_html(text: str) -> str:
    """Format a print as HTML whose lines do not break: in a narrow cell, its letters are smaller."""
    return f'<div style="container-type: inline-size"><pre style="{_PRINT}">{html.escape(text)}</pre></div>'


_SCROLL = '<div style="overflow-x: auto; color: var(--jp-content-font-color1, inherit)">{}</div>'


def join_columns(table: pd.DataFrame, data: Any, *, key: str = "unit") -> Any:
    """Add the columns of a result's table to the user's data, row by row.

    Parameters
    ----------
    table : DataFrame
        One row per unit (or client), with its name in the column ``key``.
    data : DataFrame, Dataset, DataArray, array, tensor or None
        A DataFrame is matched by its column ``key`` or ``term``, else by its index if that holds the names, else row
        by row if it has equally many rows; names may repeat. A Dataset or DataArray needs the dim ``key``; its rows are
        matched by its coordinate, if it has one. An array or tensor holds weights (client, unit, weight...).
    key : str

    Returns
    -------
    DataFrame or Dataset
        A DataFrame for a DataFrame, with its rows, order and index; else a Dataset. Without data, the table.

    Raises
    ------
    ValueError
        If names are not those of the result, or a column exists already.
    TypeError
        If ``data`` is of another type.
    """
    if data is None:
        return table
    if isinstance(data, pd.DataFrame):
        return _with_columns(table, data, key)
    if isinstance(data, xr.DataTree):
        data = data.to_dataset()
    if isinstance(data, np.ndarray) or is_torch_array(data):
        data = _named(data)
    if isinstance(data, xr.DataArray):
        data = data.to_dataset(name=data.name or "weights")
    if not isinstance(data, xr.Dataset):
        raise TypeError(
            f"data must be a DataFrame with a column {key!r}, a Dataset or DataArray with the dim {key!r}, or weights "
            f"(client, unit, weight...), but got {type(data).__name__}"
        )
    if key not in data.dims:
        raise ValueError(f"data must have the dim {key!r}, but got {dict(data.sizes)}")
    labels = data[key].to_numpy() if key in data.coords else None
    rows = _rows(table, labels, data.sizes[key], key)
    _require_new(rows, [str(name) for name in data.variables])
    return data.assign({name: (key, rows[name].to_numpy()) for name in rows})


def _with_columns(table: pd.DataFrame, data: pd.DataFrame, key: str) -> pd.DataFrame:
    labels: Any = next((data[name] for name in (key, "term") if name in data), None)
    if labels is None and not isinstance(data.index, pd.RangeIndex):
        labels = data.index
    rows = _rows(table, None if labels is None else np.asarray(labels), len(data), key)
    _require_new(rows, [str(name) for name in data])
    return pd.concat([data, rows.set_axis(data.index)], axis=1)


def _rows(table: pd.DataFrame, labels: np.ndarray | None, n: int, key: str) -> pd.DataFrame:
    """Select the table's rows by names; row by row without names, or if the table's names are positions."""
    names = table[key].to_numpy()
    is_positions = np.array_equal(names, np.arange(len(names)))
    if labels is not None and is_positions and n == len(names) and not np.isin(labels, names).any():
        labels = None
    rows = table.drop(columns=key)
    if labels is None:
        if n != len(names):
            raise ValueError(
                f"data must name its {key}s, in a column or coordinate {key!r}, or have a row for each of the "
                f"{len(names)}, but got {n} rows"
            )
        return rows
    existing = set(names.tolist())
    if unknown := list(dict.fromkeys(x for x in labels.tolist() if x not in existing)):
        raise ValueError(
            f"the {key}s of data must be those of the result, {few(map(repr, names.tolist()))}, but got "
            f"{few(map(repr, unknown))}"
        )
    return rows.set_index(names).loc[labels]


def _require_new(rows: pd.DataFrame, existing: list[str]) -> None:
    if twice := [name for name in rows if name in existing]:
        raise ValueError(f"data must not have the names that are added, but has {', '.join(twice)}. Rename them.")


def _named(weights: Any) -> xr.DataArray:
    """Convert weights to a DataArray with dims client, unit and weight, weight_1, ..."""
    values = check.numpy_of(weights)
    if values.ndim < 2:
        raise ValueError(f"weights must be (client, unit, weight...), but got shape {values.shape}")
    weight_dims = ["weight"] if values.ndim == 3 else [f"weight_{i + 1}" for i in range(values.ndim - 2)]
    return xr.DataArray(values, dims=("client", "unit", *weight_dims), name="weights")
