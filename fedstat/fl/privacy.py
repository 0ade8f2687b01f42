"""Differential privacy of clients: clipped sums with Gaussian noise, of updates and of moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_torch_array

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.nets import Params
from fedstat.stats.moments import Moments

Stream = Callable[[str], np.random.Generator]
"""The random stream of the noise on one parameter, or on one layer's moments."""

# Variances below this fraction of the layer's mean variance are raised to it, so that every unit has a correlation.
_FLOOR = 1e-6


class Privacy(NamedTuple):
    """Settings of the noised releases about clients; see :func:`fedstat.fl.aggregate.private`."""

    clip: float
    noise_multiplier: float
    delta: float
    clip_moments: float
    noise_multiplier_moments: float

    def checked(self) -> Privacy:
        """Return the record itself; ValueError if a number is out of range."""
        for name in ("clip", "noise_multiplier", "clip_moments", "noise_multiplier_moments"):
            check.real(name, getattr(self, name), low=0, open_low=True)
        hint = "It is the probability with which ε may fail: well below 1 / (number of clients), such as 1e-5."
        check.real("delta", self.delta, low=0, open_low=True, high=1, open_high=True, hint=hint)
        return self


def mean_update(updates: Params, privacy: Privacy, expected: float, stream: Stream) -> Params:
    """Return Σ_c Δ_c min(1, clip / ‖Δ_c‖) with noise, divided by the expected number of clients.

    Parameters
    ----------
    updates : Params (selected, ...)
        Clients' updates Δ_c, 0 where nothing is released. Their norm is over all parameters together.
    privacy : Privacy
    expected : float
        Expected number of clients.
    stream : Stream

    Returns
    -------
    Params (...)
        Each entry's noise has the standard deviation ``noise_multiplier * clip / expected``.
    """
    means: Params = {}
    if not updates:
        return means
    square = torch.stack([p.flatten(1).square().sum(1, dtype=torch.float64) for p in updates.values()]).sum(0)
    factor = (privacy.clip / square.sqrt().clamp(min=privacy.clip)).float()
    for name, p in updates.items():
        noise = stream(name).standard_normal(p.shape[1:], dtype=np.float32)
        total = torch.tensordot(factor, p, 1)
        scale = privacy.noise_multiplier * privacy.clip
        means[name] = total.add_(torch.from_numpy(np.asarray(noise)).to(p), alpha=scale).div_(expected)
    return means


def noised_moments(
    clients: Iterable[Mapping[str, Any]],
    server: Mapping[str, Moments],
    privacy: Privacy,
    expected: float,
    stream: Stream,
) -> dict[str, Moments]:
    """Add up clients' moments, each client's clipped in one norm across layers, with noise.

    For a layer a client contributes the means over its rows of z and of z zᵀ. z are its weights in units of the root
    mean square of the global model's weights. This scale is already released, and a layer's part of the norm is then
    the part of its correlations, whatever its size. The norm is the Euclidean norm of all means and (Frobenius) second
    moments together; its limit is ``clip_moments`` times the norm of the global model's moments. The number of rows is
    public.

    The rest is post-processing of the noised sums Ŝ₁ and Ŝ₂, and costs no privacy:

    - The covariance is Ŝ₂ − Ŝ₁ Ŝ₁ᵀ + v I. v, the variance of the noise on Ŝ₁, corrects for the noise in Ŝ₁ Ŝ₁ᵀ.
    - Its negative eigenvalues, which no covariance has, become 0 (the nearest positive semidefinite matrix: Higham
      1988, Linear Algebra Appl. 103, 103-118).
    - A variance is at least a millionth of the layer's mean, so that all units, also constant ones, have correlations.

    Parameters
    ----------
    clients : iterable of mapping from layer to Moments
        Moments of one client each.
    server : mapping from layer to Moments
        Moments of the global model, as if it were a client's.
    privacy : Privacy
    expected : float
        Expected number of clients.
    stream : Stream

    Returns
    -------
    mapping from layer to Moments
        Moments of weights on their original scale.
    """
    scales = {layer: _scale(m) for layer, m in server.items()}
    limit = privacy.clip_moments * _norm({layer: _standardize(m, scales[layer]) for layer, m in server.items()})
    sums = {layer: (np.zeros(len(s)), np.zeros((len(s), len(s)))) for layer, s in scales.items()}
    for moments in clients:
        parts = {layer: _standardize(m, scales[layer]) for layer, m in moments.items()}
        factor = limit / max(_norm(parts), limit)
        for layer, (mean, second) in parts.items():
            sums[layer][0].__iadd__(factor * mean)
            sums[layer][1].__iadd__(factor * second)
    deviation = privacy.noise_multiplier_moments * limit
    noised = {}
    for layer, (mean, second) in sums.items():
        rng, d = stream(layer), len(mean)
        mean = (mean + deviation * rng.standard_normal(d)) / expected
        noise = rng.standard_normal((d, d))
        second = (second + deviation * (noise + noise.T) / 2) / expected  # standard normal in the Frobenius norm
        cov = _nearest_covariance(second - np.outer(mean, mean) + (deviation / expected) ** 2 * np.eye(d))
        rows, s = expected * float(server[layer].n), scales[layer]
        noised[layer] = _make_like(server[layer], np.asarray(rows), mean * s, rows * cov * s[:, None] * s)
    return noised


def _scale(m: Moments) -> np.ndarray:
    """Return the root mean square (unit,) of a layer's weights; the layer's mean for zero units, 1 if all are zero."""
    square = _to_numpy(m.cross).diagonal() / float(m.n) + _to_numpy(m.mean) ** 2
    typical = math.sqrt(square.mean()) or 1.0
    return np.where(square > 0, np.sqrt(square), typical)


def _standardize(m: Moments, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of z and of z zᵀ over the rows of a client, in units of ``scale``."""
    mean = _to_numpy(m.mean)
    second = _to_numpy(m.cross) / float(m.n) + np.outer(mean, mean)
    return mean / scale, second / scale[:, None] / scale


def _norm(parts: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> float:
    return math.sqrt(sum(float((p**2).sum()) for both in parts.values() for p in both))


def _nearest_covariance(cov: np.ndarray) -> np.ndarray:
    """Return the nearest positive semidefinite matrix, with a floor on its diagonal."""
    values, vectors = np.linalg.eigh(cov)
    if values[0] < 0:
        cov = (vectors * values.clip(min=0)) @ vectors.T
        cov = (cov + cov.T) / 2
    variance = cov.diagonal()
    floor = _FLOOR * max(float(variance.mean()), np.finfo(float).tiny)
    return cov + np.diag((floor - variance).clip(min=0))


def _to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.cpu() if is_torch_array(x) else x, dtype=np.float64)


def _make_like(reference: Moments, *parts: np.ndarray) -> Moments:
    """Return moments of the array type, and on the device, of a reference."""
    if is_torch_array(reference.mean):
        return Moments(*(torch.from_numpy(part).to(reference.mean.device) for part in parts))
    return Moments(*parts)
