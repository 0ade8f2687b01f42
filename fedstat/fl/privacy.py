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

# Variances below this share of the layer's mean variance are raised to it, so that every unit has a correlation.
_FLOOR = 1e-6


class Privacy(NamedTuple):
    """What is released of clients, and with how much noise; see :func:`fedstat.fl.aggregate.private`."""

    clip: float
    noise_multiplier: float
    delta: float
    clip_moments: float
    noise_multiplier_moments: float

    def checked(self) -> Privacy:
        """The same; ValueError if a number is out of range."""
        for name in ("clip", "noise_multiplier", "clip_moments", "noise_multiplier_moments"):
            check.real(name, getattr(self, name), low=0, open_low=True)
        hint = "It is the probability with which ε may fail: well below 1 / (number of clients), such as 1e-5."
        check.real("delta", self.delta, low=0, open_low=True, high=1, open_high=True, hint=hint)
        return self


def mean_update(away: Params, privacy: Privacy, expected: float, stream: Stream) -> Params:
    """Σ_c Δ_c min(1, clip / ‖Δ_c‖) with noise, over the expected number of clients.

    Parameters
    ----------
    away : Params (active, ...)
        Clients' updates Δ_c, 0 where nothing is released. Their norm is over all parameters together.
    privacy : Privacy
    expected : float
    stream : Stream

    Returns
    -------
    Params (...)
        Each entry's noise has the standard deviation ``noise_multiplier * clip / expected``.
    """
    found: Params = {}
    if not away:
        return found
    square = torch.stack([p.flatten(1).square().sum(1, dtype=torch.float64) for p in away.values()]).sum(0)
    factor = (privacy.clip / square.sqrt().clamp(min=privacy.clip)).float()
    for name, p in away.items():
        noise = stream(name).standard_normal(p.shape[1:], dtype=np.float32)
        total = torch.tensordot(factor, p, 1)
        scale = privacy.noise_multiplier * privacy.clip
        found[name] = total.add_(torch.from_numpy(np.asarray(noise)).to(p), alpha=scale).div_(expected)
    return found


def noised_moments(
    clients: Iterable[Mapping[str, Any]],
    server: Mapping[str, Moments],
    privacy: Privacy,
    expected: float,
    stream: Stream,
) -> dict[str, Moments]:
    """Moments over clients, each client's clipped in one norm across layers, with noise.

    What a client contributes of a layer are the means over its rows of z and of z zᵀ, where z are its weights in units
    of the root mean square of the server's own copy: what was released before sets the scale, so that a layer's part of
    the norm is that of its correlations, whatever its size. The norm is the Euclidean one of all means and (Frobenius)
    second moments together; its limit is ``clip_moments`` times that of the server's copy. The number of rows is
    public.

    The rest is post-processing of the noised sums Ŝ₁ and Ŝ₂, and costs no privacy: the covariance Ŝ₂ − Ŝ₁ Ŝ₁ᵀ + v I,
    where v, the variance of the noise on Ŝ₁, makes up for what Ŝ₁ Ŝ₁ᵀ has of it; its negative eigenvalues, which no
    covariance has, become 0 (the nearest positive semidefinite matrix: Higham 1988, Linear Algebra Appl. 103, 103-118);
    and a variance is at least a millionth of the layer's mean, so that all units, dead ones too, have correlations.

    Parameters
    ----------
    clients : iterable of mapping from layer to Moments
        Of one client each.
    server : mapping from layer to Moments
        Of the server's copy, as if it were a client.
    privacy : Privacy
    expected : float
        Expected number of clients.
    stream : Stream

    Returns
    -------
    mapping from layer to Moments
        Of weights in their own units.
    """
    scales = {layer: _scale(m) for layer, m in server.items()}
    limit = privacy.clip_moments * _norm({layer: _standard(m, scales[layer]) for layer, m in server.items()})
    sums = {layer: (np.zeros(len(s)), np.zeros((len(s), len(s)))) for layer, s in scales.items()}
    for one in clients:
        parts = {layer: _standard(m, scales[layer]) for layer, m in one.items()}
        factor = limit / max(_norm(parts), limit)
        for layer, (mean, second) in parts.items():
            sums[layer][0].__iadd__(factor * mean)
            sums[layer][1].__iadd__(factor * second)
    deviation = privacy.noise_multiplier_moments * limit
    found = {}
    for layer, (mean, second) in sums.items():
        rng, d = stream(layer), len(mean)
        mean = (mean + deviation * rng.standard_normal(d)) / expected
        noise = rng.standard_normal((d, d))
        second = (second + deviation * (noise + noise.T) / 2) / expected  # standard normal in the Frobenius norm
        cov = _valid(second - np.outer(mean, mean) + (deviation / expected) ** 2 * np.eye(d))
        rows, s = expected * float(server[layer].n), scales[layer]
        found[layer] = _like(server[layer], np.asarray(rows), mean * s, rows * cov * s[:, None] * s)
    return found


def _scale(m: Moments) -> np.ndarray:
    """Root mean square (unit,) of a layer's weights; the layer's own for units that are 0, and 1 if all are."""
    square = _numpy(m.cross).diagonal() / float(m.n) + _numpy(m.mean) ** 2
    typical = math.sqrt(square.mean()) or 1.0
    return np.where(square > 0, np.sqrt(square), typical)


def _standard(m: Moments, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of z and of z zᵀ over the rows of a client, in units of ``scale``."""
    mean = _numpy(m.mean)
    second = _numpy(m.cross) / float(m.n) + np.outer(mean, mean)
    return mean / scale, second / scale[:, None] / scale


def _norm(parts: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> float:
    return math.sqrt(sum(float((p**2).sum()) for both in parts.values() for p in both))


def _valid(cov: np.ndarray) -> np.ndarray:
    """The nearest positive semidefinite matrix, with a floor on its diagonal."""
    values, vectors = np.linalg.eigh(cov)
    if values[0] < 0:
        cov = (vectors * values.clip(min=0)) @ vectors.T
        cov = (cov + cov.T) / 2
    variance = cov.diagonal()
    floor = _FLOOR * max(float(variance.mean()), np.finfo(float).tiny)
    return cov + np.diag((floor - variance).clip(min=0))


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x.cpu() if is_torch_array(x) else x, dtype=np.float64)


def _like(given: Moments, *parts: np.ndarray) -> Moments:
    """Moments of the kind, and on the device, of others."""
    if is_torch_array(given.mean):
        return Moments(*(torch.from_numpy(part).to(given.mean.device) for part in parts))
    return Moments(*parts)
