"""Images as bytes, and as the numbers that networks take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._later import xr


class Scaling(NamedTuple):
    """Map from stored values to inputs of networks: x · factor − shift, both float32 (), or broadcast over channels."""

    factor: NDArray[np.float32]
    shift: NDArray[np.float32]


def scaling(
    x: xr.DataArray | xr.Variable,
    mean: float | Sequence[float] | None = None,
    sd: float | Sequence[float] | None = None,
) -> Scaling:
    """Scaling to (x / scale − mean) / sd; by default with the mean and sd of ``x.attrs``, or else 0 and 1.

    Raises
    ------
    ValueError
        If x has no scale, a mean is not finite or an ``sd`` not positive, or there are more or fewer than channels.
    """
    if "scale" not in x.attrs and not (x.dtype == np.uint8 and x.ndim > 2):
        raise ValueError(
            "x must be images with attrs['scale'], the stored value that becomes 1, but got none: it is text, or it "
            "was scaled before. Set x.attrs['scale'] for others, such as 1 for whole numbers that are features."
        )
    mean = x.attrs.get("mean", 0.0) if mean is None else mean
    sd = x.attrs.get("sd", 1.0) if sd is None else sd
    centre, spread = (np.asarray(v, dtype=np.float32) for v in (mean, sd))
    if not np.all(spread > 0):
        raise ValueError(f"sd must be > 0, but got {sd!r}")
    if not np.isfinite(centre).all():
        raise ValueError(f"mean must be finite, but got {mean!r}")
    axis = x.dims.index("channel") if "channel" in x.dims else x.ndim - 3
    channels = x.shape[axis] if x.ndim > 3 else 1
    if not {centre.size, spread.size} <= {1, channels}:
        raise ValueError(f"mean and sd must be one number, or {channels} by channel, but got {mean!r} and {sd!r}")
    factor = np.asarray(1 / (np.float32(x.attrs.get("scale", 255)) * spread), dtype=np.float32)
    shift = np.asarray(centre / spread, dtype=np.float32)
    ones = (1,) * (x.ndim - 1 - axis)
    return Scaling(*(v.reshape(-1, *ones) if v.size > 1 else v.reshape(()) for v in (factor, shift)))


def to_float(
    data: xr.Dataset, *, mean: float | Sequence[float] | None = None, sd: float | Sequence[float] | None = None
) -> xr.Dataset:
    """Images as float32, scaled to [0, 1] by the largest stored value and standardised.

    Parameters
    ----------
    data : xarray.Dataset
        With x (sample, channel, row, column) as ``load`` gives it, or with a dim ``channel`` elsewhere:
        ``x.attrs["scale"]`` is the largest value; without it, uint8 images have 255. Whole numbers that are features
        have the scale 1.
    mean, sd : float or one per channel, optional
        x becomes (x / scale − mean) / sd. By default those in ``x.attrs``, or else 0 and 1.

    Returns
    -------
    xarray.Dataset
        The same, with x float32; attrs keep a mean and sd that were taken from there.

    Raises
    ------
    ValueError
        If x has no scale (it is text, or was scaled before), a mean is not finite or an ``sd`` not positive, or there
        are more or fewer than channels.

    Examples
    --------
    >>> from fedstat.data import load
    >>> float(to_float(load("digits")).x.max())
    1.0
    """
    factor, shift = scaling(data.x, mean, sd)
    x = data.x.values * factor
    x -= shift
    kept = {name: data.x.attrs[name] for name in ("mean", "sd") if name in data.x.attrs and mean is None and sd is None}
    return data.assign(x=(data.x.dims, x.astype(np.float32, copy=False), kept))
