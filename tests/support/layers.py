"""Weights of a layer of which six units are shared and two are not."""

from __future__ import annotations

import numpy as np

import fedstat.labelled as fs
from fedstat.stats.moments import correlation, moments


def weights(seed: int = 0, clients: int = 6, shape: tuple[int, ...] = (30,)) -> np.ndarray:
    """Six units follow two patterns that all clients have, two units are each client's own."""
    rng = np.random.default_rng(seed)
    loadings = np.array([[1, 0], [1, 0], [1, 0.2], [0, 1], [0, -1], [0.2, 1]])
    alike = np.tensordot(loadings, rng.normal(size=(2, *shape)), 1) + 0.6 * rng.normal(size=(clients, 6, *shape))
    return np.concatenate([alike, rng.normal(size=(clients, 2, *shape))], axis=1)


R8: np.ndarray = correlation(moments(fs.layer_matrix(weights())))
