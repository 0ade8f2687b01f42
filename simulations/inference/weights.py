"""Weights like those of real networks."""

from __future__ import annotations

from typing import Literal

import numpy as np

UNITS, WEIGHTS = 32, 64
Noise = Literal["white", "smooth", "t3", "unlike clients"]
KINDS: tuple[Noise, ...] = ("white", "smooth", "t3", "unlike clients")
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


def noise(kind: Noise, clients: int, rng: np.random.Generator, *, replicates: int = 1) -> np.ndarray:
    """Independent weights (client, replicate, unit, weight) of variance 1.

    Parameters
    ----------
    kind : {"white", "smooth", "t3", "unlike clients"}
        Normal; the same, smooth over weights; Student's t with 3 degrees of freedom; clients' standard deviations
        log-normal (σ = .7, mean square 1).
    clients : int
    rng : Generator
    replicates : int
    """
    shape = (clients, replicates, UNITS, WEIGHTS)
    if kind == "t3":
        return rng.standard_t(3, shape) / np.sqrt(3)
    w = rng.normal(size=shape)
    if kind == "unlike clients":
        sd = np.exp(0.7 * rng.normal(size=(clients, 1, 1, 1)))
        w *= sd / np.sqrt(np.exp(2 * 0.7**2))
    return smooth(w) if kind == "smooth" else w
