"""Neural tangent kernels of a two-layer ReLU network in closed form, and its Gram matrices at finite width.

FedFac §3.3, Definitions 1 and 2. Arrays are NumPy or torch (CPU or CUDA); everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from array_api_compat import array_namespace
from array_api_compat import device as device_of

Array = Any

# Side of a tile whose few temporaries stay in a core's cache; on a GPU launches cost more than memory.
_TILE_CPU, _TILE_GPU = 128, 4096
# Cosines within this of 1 or −1 lose more than 1e-13 of the angle; such angles are taken from the chord instead.
NEAR = 1e-6


def kernel(x: Array) -> Array:
    """Kernel of infinite width: H^s∞ of all samples, or the diagonal blocks of H^p∞ (FedFac Definition 1).

    H_ij = x_iᵀx_j (π − θ_ij) / (2π), θ_ij the angle between x_i and x_j; the diagonal is ‖x_i‖²/2 exactly.

    Parameters
    ----------
    x : array (..., sample, feature)
        Samples. With all clients' samples in one axis the result is H^s∞; with a leading ``client`` axis it is the
        stack of the blocks of H^p∞, which is zero between clients and never formed as one matrix.

    Returns
    -------
    array (..., sample, sample)
        float64, symmetric. A zero sample has a zero row and column.

    Notes
    -----
    Tiles of the lower triangle are computed and mirrored, which halves the arc cosines that dominate the cost. Nearly
    parallel and nearly antiparallel pairs take the angle from the chord ‖u_i ∓ u_j‖, so that the smallest eigenvalue
    of nearly repeated samples, about θ/(2π), keeps its digits.

    Examples
    --------
    >>> import numpy as np
    >>> kernel(np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])) + 0.0
    array([[0.5, 0. , 0. ],
           [0. , 0.5, 0. ],
           [0. , 0. , 0.5]])
    """
    xp = array_namespace(x)
    unit, norm = directions(x)
    n = x.shape[-2]
    h = xp.empty((*x.shape[:-1], n), dtype=xp.float64, device=device_of(x))
    scale = norm / math.sqrt(2 * math.pi)
    for rows, columns, cosine in cosine_tiles(unit):
        block = _supplement_times_cosine(xp, unit, rows, columns, cosine)
        block *= scale[..., rows, None]
        block *= scale[..., None, columns]
        mirror = xp.matrix_transpose(block)
        if rows == columns:
            h[..., rows, rows] = (block + mirror) / 2
        else:
            h[..., rows, columns], h[..., columns, rows] = block, mirror
    diagonal = xp.arange(n, device=device_of(x))
    h[..., diagonal, diagonal] = norm**2 / 2
    return h


def directions(x: Array) -> tuple[Array, Array]:
    """Return unit vectors (zero for a zero sample) and norms of the samples, in float64."""
    xp = array_namespace(x)
    x = xp.astype(x, xp.float64)
    norm = xp.linalg.vector_norm(x, axis=-1)
    return x / xp.where(norm > 0, norm, xp.ones_like(norm))[..., None], norm


def cosine_tiles(unit: Array) -> Iterator[tuple[slice, slice, Array]]:
    """Tiles of the cosine matrix of unit vectors that cover its lower triangle: rows, columns, cosines.

    The cosine of a sample with itself is given as 0: no angle is to be taken there.
    """
    xp = array_namespace(unit)
    n, side = unit.shape[-2], _TILE_CPU if str(device_of(unit)) == "cpu" else _TILE_GPU
    for i in range(0, n, side):
        rows = slice(i, min(i + side, n))
        # One product for a whole strip of rows: small products run far below a BLAS's speed.
        strip = unit[..., rows, :] @ xp.matrix_transpose(unit[..., : rows.stop, :])
        own = xp.arange(rows.stop - i, device=device_of(unit))
        strip[..., own, i + own] = 0.0
        for j in range(0, i + 1, side):
            columns = slice(j, min(j + side, n))
            yield rows, columns, strip[..., :, columns]


def _supplement_times_cosine(xp: Any, unit: Array, rows: slice, columns: slice, cosine: Array) -> Array:
    """(π − θ) cos θ of every pair of a tile."""
    cosine = xp.clip(cosine, min=-1.0, max=1.0)
    supplement = xp.acos(-cosine)
    for sign in (1.0, -1.0):
        if float(xp.max(sign * cosine)) > 1 - NEAR:
            at = xp.nonzero(sign * cosine > 1 - NEAR)
            u, v = unit[..., rows, :], unit[..., columns, :]
            chord = chord_angle(u[at[:-1]], v[(*at[:-2], at[-1])], sign)
            supplement[at] = math.pi - chord if sign > 0 else chord
    supplement *= cosine
    return supplement


def chord_angle(u: Array, v: Array, sign: float = 1.0) -> Array:
    """Angle between unit vectors u and sign·v (..., feature), accurate where it is small."""
    xp = array_namespace(u)
    return 2 * xp.asin(xp.clip(xp.linalg.vector_norm(u - sign * v, axis=-1) / 2, max=1.0))


def gram(x: Array, w_start: Array, w_local: Array) -> Array:
    """Gram matrix of finite width at (t, g, c) (FedFac Definition 2).

    H(t, g, c)_ij = x_iᵀx_j · (1/m) Σ_r 1{w_r(t)ᵀx_i ≥ 0} 1{w_{c,g,r}(t)ᵀx_j ≥ 0}.

    Parameters
    ----------
    x : array (..., sample, feature)
        With a leading ``client`` axis, the personal blocks of all clients at once.
    w_start : array (..., unit, feature)
        Weights at the start of the round t.
    w_local : array (..., unit, feature)
        Weights of the client after g local steps. Equal to ``w_start`` at g = 0: the matrix is then symmetric.

    Returns
    -------
    array (..., sample, sample)
    """
    xp = array_namespace(x, w_start, w_local)
    return (x @ xp.matrix_transpose(x)) * _agreement(xp, _active(xp, x, w_start), _active(xp, x, w_local))


def shared_gram(x: Array, w_start: Array, w_local: Array) -> Array:
    """H(t, g)^s: for every client c, the columns S_c of its shared Gram matrix H(t, g, c)^s (FedFac Definition 2).

    Parameters
    ----------
    x : array (client, sample, feature)
    w_start : array (unit, feature)
        Shared weights at the start of the round.
    w_local : array (client, unit, feature)
        Each client's copy after g local steps.

    Returns
    -------
    array (client·sample, client·sample)
        Client-major; not symmetric once the clients' copies differ.
    """
    xp = array_namespace(x, w_start, w_local)
    rows = xp.reshape(x, (-1, x.shape[-1]))
    start = _active(xp, rows, w_start)
    local = xp.reshape(_active(xp, x, w_local), start.shape)
    return (rows @ xp.matrix_transpose(rows)) * _agreement(xp, start, local)


def _active(xp: Any, x: Array, w: Array) -> Array:
    return xp.astype(x @ xp.matrix_transpose(w) >= 0, xp.float64)


def _agreement(xp: Any, start: Array, local: Array) -> Array:
    return (start @ xp.matrix_transpose(local)) / start.shape[-1]
