"""Tables with one value per method and block: what must hold before they are compared.

Tables in and out, no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedstat._utils import check

if TYPE_CHECKING:
    import pandas as pd


def told(data: pd.DataFrame, value: str, *labels: str) -> pd.DataFrame:
    """Return these columns; ValueError unless every row is labelled and its value is finite or NaN."""
    import pandas as pd

    for column in (value, *labels):
        if column not in data.columns:
            check.choice("a column of data", column, [str(c) for c in data.columns])
    data = data[[value, *labels]].reset_index(drop=True)
    for column in labels:
        if (hole := data[column].isna()).any():
            raise ValueError(
                f"every row must have its {column!r}, but it is missing in {hole.sum()} of {len(data)}, "
                f"first in the row with {_where(data[hole], labels)}. Fill in or leave out these rows."
            )
    for column in data.columns:
        if np.iscomplexobj(data[column]) and column == value:
            raise ValueError(f"{column!r} must hold numbers, but got dtype {data[column].dtype}")
        numeric = pd.api.types.is_numeric_dtype(data[column])
        if numeric and (out := np.isinf(data[column].astype(float))).any():
            raise ValueError(
                f"{column!r} must be finite or NaN, but got {data.loc[out, column].iloc[0]} in the row with "
                f"{_where(data[out], labels)}. Enter NaN for a diverged run."
            )
    return data


def require_one_each(data: pd.DataFrame, method: str, block: list[str]) -> None:
    """Raise ValueError if a method has two values in a block, naming it and where."""
    twice = data.duplicated([method, *block])
    if twice.any():
        raise ValueError(
            f"a method must have one value in a block, but got {data.loc[twice, method].iloc[0]!r} twice at "
            f"{_where(data[twice], block)}. Add what else varies to block, or select one value of it."
        )


def wide(data: pd.DataFrame, value: str, method: str, block: list[str]) -> pd.DataFrame:
    """Blocks by methods, both in order of appearance; NaN where there is no value."""
    by_method = data.set_index([*block, method])[value].astype(float)
    table = by_method.unstack()
    order = by_method.reset_index(level=-1)
    return table.reindex(index=list(dict.fromkeys(order.index)), columns=list(dict.fromkeys(order[method])))


def _where(rows: pd.DataFrame, labels: Sequence[str]) -> str:
    return ", ".join(f"{label} = {rows[label].iloc[0]}" for label in labels)
