"""Equality to the bit of results and of all that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr


def require_equal(a: Any, b: Any) -> None:
    """Equal to the bit, in type, and in all that they hold; NaN is one value."""
    assert type(a) is type(b), (a, b)
    if is_dataclass(a):
        for field in fields(a):
            require_equal(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray) and a.dtype.kind != "O":
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind == "f":
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            a, b = (np.where(np.isnan(x), 0, x).astype(x.dtype) for x in (a, b))
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, np.ndarray):
        assert a.shape == b.shape
        require_equal(a.ravel().tolist(), b.ravel().tolist())
    elif isinstance(a, torch.Tensor):
        require_equal(a.numpy(), b.numpy())
    elif isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
        assert [x.dtype for _, x in a.items()] == [x.dtype for _, x in b.items()]
    elif isinstance(a, xr.DataArray | xr.Dataset):
        xr.testing.assert_identical(a, b)
        a, b = (x if isinstance(x, xr.Dataset) else x.to_dataset(name="_") for x in (a, b))
        for part in ("data_vars", "coords"):
            values = [{name: x[name].values for name in getattr(x, part)} for x in (a, b)]
            require_equal(*values)
    elif isinstance(a, Mapping):
        assert list(a) == list(b)
        for key in a:
            require_equal(a[key], b[key])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            require_equal(x, y)
    else:
        assert a == b or (a != a and b != b)
