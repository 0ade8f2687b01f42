"""Weights like those of real networks."""

from __future__ import annotations

import numpy as np

_WIDTH = 3.0


def smooth(w: np.ndarray, *, width: float = _WIDTH) -> np.ndarray:
    """Make weights (..., weight) smooth over their order, as pixels make them; a weight's variance stays.

    Parameters
    ----------
    w : array (..., weight)
        Independent over the last axis.
    width : float
        Standard deviation of the Gaussian kernel, in weights.
    """
    at = np.arange(w.shape[-1])
    kernel = np.exp(-0.5 * ((at[:, None] - at) / width) ** 2)
    return np.asarray(w @ (kernel / np.sqrt(np.square(kernel).sum(axis=0))))
