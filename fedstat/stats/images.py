"""How near an image is to another: peak signal-to-noise ratio."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

FLOOR = float(np.finfo(np.float32).eps) ** 2
"""Least mean squared error: images that agree to float32 rounding have no more than 138.5 dB."""


def psnr(x: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
    """Peak signal-to-noise ratio of images on [0, 1] in dB: −10 log10 of the mean squared error over all pixels.

    Parameters
    ----------
    x, target : array (..., channel, row, column)
        They broadcast against each other.

    Notes
    -----
    FedDecomp §4.6 divides the sum of squares by rows and columns only, which is :func:`without_channels` lower.

    Examples
    --------
    >>> float(psnr(np.full((3, 4, 4), 0.6), np.full((3, 4, 4), 0.5)).round(6))
    20.0
    """
    away = np.asarray(x, dtype=np.float64) - np.asarray(target, dtype=np.float64)
    return -10 * np.log10(np.maximum(np.square(away).mean((-3, -2, -1)), FLOOR))


def without_channels(channels: int) -> float:
    """Decibels by which PSNR falls if channels are added up and not averaged.

    Examples
    --------
    >>> round(without_channels(3), 2), without_channels(1)
    (4.77, 0.0)
    """
    return 10 * math.log10(channels)
