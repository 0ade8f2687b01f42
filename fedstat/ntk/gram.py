"""Neural tangent kernels of two-layer ReLU networks, and their Gram matrices.

FedFac §3.3, Definitions 1 and 2. Arrays are NumPy or torch (CPU or CUDA); everything is float64.

Samples are ordered by client ("client-major"). H^s∞ is a matrix over the samples of all clients. H^p∞ is the list of
its diagonal blocks, one per client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from fedstat._utils import check
from fedstat.stats.eigenvalues import Extremes, extreme_eigenvalues

__all__ = [
    "Extremes",
    "Steps",
    "Violations",
    "complexity",
    "confidence",
    "contraction",
    "extreme_eigenvalues",
    "gram",
    "kernel",
    "largest_informative_clients",
    "least_width",
    "limit_map",
    "shared_gram",
    "theorem_lr",
    "violations",
]


Array = Any

# Tile sides: on a CPU the temporaries of a tile must fit the cache of a core; on a GPU launches cost more than memory.
_TILE_CPU, _TILE_GPU = 128, 4096
# acos loses more than 1e-13 of the angle for cosines this close to 1 or −1, so the chord gives those angles.
NEAR = 1e-6


def kernel(x: Array) -> Array:
    """Compute the kernel of infinite width: H^s∞, or the diagonal blocks of H^p∞ (FedFac Definition 1).

    H_ij = x_iᵀx_j (π − θ_ij) / (2π), θ_ij the angle between x_i and x_j; the diagonal is ‖x_i‖²/2 exactly.

    Parameters
    ----------
    x : array (..., sample, feature)
        Samples. If one axis holds the samples of all clients, the result is H^s∞. With a leading ``client`` axis, the
        result is the stack of the blocks of H^p∞. H^p∞ is 0 between clients, so it is never formed as one matrix.

    Returns
    -------
    array (..., sample, sample)
        float64, symmetric. A zero sample has a zero row and column.

    Notes
    -----
    Only tiles of the lower triangle are computed, then mirrored; this halves the arc cosines, which dominate the cost.
    The angle of a nearly parallel or antiparallel pair comes from the chord ‖u_i ∓ u_j‖. This keeps the digits of the
    smallest eigenvalue of nearly repeated samples, which is about θ/(2π).

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
    """Yield tiles that cover the lower triangle of the cosine matrix of unit vectors: rows, columns, cosines.

    The diagonal is 0 instead of 1, so that no angle is computed for it.
    """
    xp = array_namespace(unit)
    n, side = unit.shape[-2], _TILE_CPU if str(device_of(unit)) == "cpu" else _TILE_GPU
    for i in range(0, n, side):
        rows = slice(i, min(i + side, n))
        # One product per strip of rows: BLAS is slow on small products.
        strip = unit[..., rows, :] @ xp.matrix_transpose(unit[..., : rows.stop, :])
        diagonal = xp.arange(rows.stop - i, device=device_of(unit))
        strip[..., diagonal, i + diagonal] = 0.0
        for j in range(0, i + 1, side):
            columns = slice(j, min(j + side, n))
            yield rows, columns, strip[..., :, columns]


def _supplement_times_cosine(xp: Any, unit: Array, rows: slice, columns: slice, cosine: Array) -> Array:
    """Compute (π − θ) cos θ for every pair of a tile."""
    cosine = xp.clip(cosine, min=-1.0, max=1.0)
    supplement = xp.acos(-cosine)
    for sign in (1.0, -1.0):
        if float(xp.max(sign * cosine)) > 1 - NEAR:
            index = xp.nonzero(sign * cosine > 1 - NEAR)
            u, v = unit[..., rows, :], unit[..., columns, :]
            chord = chord_angle(u[index[:-1]], v[(*index[:-2], index[-1])], sign)
            supplement[index] = math.pi - chord if sign > 0 else chord
    supplement *= cosine
    return supplement


def chord_angle(u: Array, v: Array, sign: float = 1.0) -> Array:
    """Compute the angle between unit vectors u and sign·v (..., feature), accurately for small angles."""
    xp = array_namespace(u)
    return 2 * xp.asin(xp.clip(xp.linalg.vector_norm(u - sign * v, axis=-1) / 2, max=1.0))


def gram(x: Array, w_start: Array, w_local: Array) -> Array:
    """Compute the Gram matrix of finite width at (t, g, c) (FedFac Definition 2).

    H(t, g, c)_ij = x_iᵀx_j · (1/m) Σ_r 1{w_r(t)ᵀx_i ≥ 0} 1{w_{c,g,r}(t)ᵀx_j ≥ 0}.

    Parameters
    ----------
    x : array (..., sample, feature)
        Samples. With a leading ``client`` axis, the result holds the personal blocks of all clients.
    w_start : array (..., unit, feature)
        Weights at the start of round t.
    w_local : array (..., unit, feature)
        Weights of the client after g local steps. At g = 0 they equal ``w_start``, and the matrix is symmetric.

    Returns
    -------
    array (..., sample, sample)
    """
    xp = array_namespace(x, w_start, w_local)
    return (x @ xp.matrix_transpose(x)) * _both_active(xp, _is_active(xp, x, w_start), _is_active(xp, x, w_local))


def shared_gram(x: Array, w_start: Array, w_local: Array) -> Array:
    """Compute H(t, g)^s, which joins the columns S_c of H(t, g, c)^s over clients c (FedFac Definition 2).

    Parameters
    ----------
    x : array (client, sample, feature)
    w_start : array (unit, feature)
        Shared weights at the start of the round.
    w_local : array (client, unit, feature)
        Shared weights of each client after g local steps.

    Returns
    -------
    array (client·sample, client·sample)
        Client-major; not symmetric if the weights differ between clients.
    """
    xp = array_namespace(x, w_start, w_local)
    rows = xp.reshape(x, (-1, x.shape[-1]))
    start = _is_active(xp, rows, w_start)
    local = xp.reshape(_is_active(xp, x, w_local), start.shape)
    return (rows @ xp.matrix_transpose(rows)) * _both_active(xp, start, local)


def _is_active(xp: Any, x: Array, w: Array) -> Array:
    return xp.astype(x @ xp.matrix_transpose(w) >= 0, xp.float64)


def _both_active(xp: Any, start: Array, local: Array) -> Array:
    """Return the proportion of units that are active for both samples of each pair."""
    return (start @ xp.matrix_transpose(local)) / start.shape[-1]


class Violations(NamedTuple):
    """Samples that break Assumption 1 of FedFac §3.3.

    Attributes
    ----------
    long : tuple of int
        Rows with ‖x‖ > 1.
    zero : tuple of int
        Rows with x = 0: parallel to every sample, and H has a zero row.
    parallel : tuple of (int, int)
        Pairs i < j of equal direction: their rows of H are proportional, so λ_min(H) = 0.
    """

    long: tuple[int, ...]
    zero: tuple[int, ...]
    parallel: tuple[tuple[int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.long or self.zero or self.parallel)


def violations(x: Array, *, angle: float = 1e-7) -> Violations:
    """Find the samples that break Assumption 1: ‖x‖ ≤ 1, no two parallel.

    Parameters
    ----------
    x : array (sample, feature)
    angle : float
        Angle in radians up to which two directions count as equal. Antiparallel pairs are not reported: x and −x do
        not make H singular (their entry is 0).

    Examples
    --------
    >>> import numpy as np
    >>> violations(np.array([[1.0, 0.0], [0.0, 2.0], [0.5, 0.0], [-1.0, 0.0]]))
    Violations(long=(1,), zero=(), parallel=((0, 2),))
    """
    xp = array_namespace(x)
    unit, norm = directions(x)
    pairs = []
    for rows, columns, cosine in cosine_tiles(unit):
        for a, b in zip(*(k.tolist() for k in xp.nonzero(cosine > 1 - NEAR)), strict=True):
            i, j = rows.start + a, columns.start + b
            if j < i and float(chord_angle(unit[i, :], unit[j, :])) <= angle:
                pairs.append((j, i))
    long, zero = (tuple(xp.nonzero(mask)[0].tolist()) for mask in (norm > 1 + 1e-12, norm == 0))
    return Violations(long, zero, tuple(sorted(pairs)))


class Steps(NamedTuple):
    """Step sizes of the parallel gradient descent (FedFac §3.2).

    Attributes
    ----------
    lr, server_lr : float
        η_l and η_g.
    local_steps : int
        G.
    clients : int
        C.
    divisor : float
        1 for ``reduction="sum"``; n for ``"mean"``. The paper's loss is a mean over the client's n samples. But its
        accumulated updates, and therefore ρ1 and ρ2, have no factor 1/n.
    """

    lr: float
    server_lr: float
    local_steps: int
    clients: int
    divisor: float = 1.0

    @property
    def rho1(self) -> float:
        """ρ1 = η_g η_l G / C, divided by n under ``"mean"``."""
        return self.server_lr * self.rho2 / self.clients

    @property
    def rho2(self) -> float:
        """ρ2 = η_l G, divided by n under ``"mean"``."""
        return self.lr * self.local_steps / self.divisor


def contraction(steps: Steps, *, lambda_s: float, lambda_p: float = 0.0) -> float:
    """Return the factor per round by which Theorem 1 bounds ‖y − h(t)‖²: 1 − ½(ρ1 λ^s + ρ2 λ^p).

    With ``lambda_p=0`` it is the paper's rate of FedAvg, 1 − ½ ρ1 λ^s. It is negative if the steps are too large for
    the theorem to apply.

    Examples
    --------
    >>> contraction(Steps(0.1, 1.0, 5, 4), lambda_s=0.1, lambda_p=0.12)
    0.96375
    """
    return 1 - (steps.rho1 * lambda_s + steps.rho2 * lambda_p) / 2


def theorem_lr(lambda_s: float, gamma_s: float, lambda_p: float, gamma_p: float, *, local_steps: int, n: int) -> float:
    """Return the local step size of Theorem 1 with constant 1: (λ^s + λ^p) / (γ^s γ^p G N²), N samples in all."""
    return (lambda_s + lambda_p) / (gamma_s * gamma_p * local_steps * n**2)


def least_width(lambda_s: float, *, n: int, delta: float = 0.05) -> float:
    """Return the number of shared units of Theorem 1 with constant 1: m2 = N⁴ log(N/δ) / (λ^s)⁴, N samples in all.

    The theorem needs no more personal units than that, because λ^p >= λ^s.

    Examples
    --------
    >>> f"{least_width(0.1, n=36):.1e}"
    '1.1e+11'
    """
    return n**4 * math.log(n / delta) / lambda_s**4


def limit_map(
    h_shared: Array, h_personal: Sequence[Array], steps: Steps, *, divisors: Sequence[float] | None = None
) -> Array:
    """Compute the linear map from y − h(t) to y − h(t+1) for a network so wide that its kernels do not change.

    The map is I − η_l(η_g/C · H^s + H^p)·S. S is the block diagonal of Σ_{g<G} (I − η_l K_c)^g, and K_c is the client's
    block of H^s + H^p. It describes parallel gradient descent exactly, including the G local steps; Theorem 1 uses
    only λ_min.

    Parameters
    ----------
    h_shared : array (sample, sample)
        H^s∞, client-major.
    h_personal : sequence of arrays (sample_c, sample_c)
        Blocks of H^p∞; zeros if no unit is personal (FedAvg).
    steps : Steps
    divisors : sequence of C floats, optional
        Divisor of each client, if they differ.

    Returns
    -------
    array (sample, sample)
    """
    xp = array_namespace(h_shared)
    result = xp.zeros_like(h_shared)
    stop = 0
    for c, personal in enumerate(h_personal):
        rows = slice(stop, stop := stop + personal.shape[-1])
        lr = steps.lr / (steps.divisor if divisors is None else divisors[c])
        block = h_shared[rows, rows] + personal
        column = h_shared[:, rows] * (lr * steps.server_lr / steps.clients)
        column[rows, :] += lr * personal
        eye = xp.eye(personal.shape[-1], dtype=xp.float64, device=device_of(h_shared))
        power, total = eye, eye
        for _ in range(steps.local_steps - 1):
            power = power - lr * (block @ power)
            total = total + power
        result[:, rows] = -column @ total
        result[rows, rows] += eye
    return result


def complexity(h_shared: Array, h_personal: Sequence[Array], y: Array) -> float:
    """Compute the first term of Theorem 2: 2 √((C/n) yᵀ(H^s∞ + H^p∞)⁻¹ y).

    This takes one Cholesky factorization and one triangular solve.

    Parameters
    ----------
    h_shared : array (sample, sample)
        H^s∞, client-major.
    h_personal : sequence of C arrays (sample_c, sample_c)
        Blocks of H^p∞. If client sizes differ, n is their mean.
    y : array (sample,)

    Raises
    ------
    ValueError
        If H^s∞ + H^p∞ has no Cholesky factor.

    Examples
    --------
    >>> import numpy as np
    >>> h = kernel(np.eye(4))
    >>> complexity(h, [h[:2, :2], h[2:, 2:]], np.ones(4))
    4.0
    """
    xp = array_namespace(h_shared)
    total = h_shared + 0.0
    stop = 0
    for block in h_personal:
        rows = slice(stop, stop := stop + block.shape[-1])
        total[rows, rows] += block
    try:
        factor = xp.linalg.cholesky(total)
    except Exception as error:  # NumPy and torch raise different LinAlgErrors
        raise ValueError(
            "H^s + H^p must be positive definite for the bound of Theorem 2, but is not. "
            "Drop parallel samples of a client, which fedstat.ntk.violations(x) finds."
        ) from error
    half = _solve_triangular(factor, y)
    clients = len(h_personal)
    return 2 * math.sqrt(clients**2 / stop * float(half @ half))


def _solve_triangular(factor: Array, y: Array) -> Array:
    xp = array_namespace(factor)
    if hasattr(factor, "is_cuda"):
        return xp.linalg.solve_triangular(factor, y[:, None], upper=False)[:, 0]
    from scipy.linalg import solve_triangular

    return solve_triangular(factor, y, lower=True)


def confidence(n: int, lambda_min: float, *, delta: float = 0.05, constant: float = 1.0) -> float:
    """Compute the second term of Theorem 2: constant · √(log(N/(λδ)) / (2N)); the paper gives its order only.

    Parameters
    ----------
    n : int
        N, number of samples of all clients.
    lambda_min : float
        λ, smallest eigenvalue of H^s∞ + H^p∞.
    delta : float
        Failure probability, 0 < delta < 1.
    constant : float
        Unknown constant of the paper's O().
    """
    check.real("delta", delta, low=0, high=1, open_low=True, open_high=True)
    check.real("constant", constant, low=0)
    check.real("lambda_min", lambda_min, low=0, open_low=True, hint="Theorem 2 needs λ_min(H^s + H^p) > 0.")
    return constant * math.sqrt(math.log(n / (lambda_min * delta)) / (2 * n))


def largest_informative_clients(n_total: int) -> int:
    """Return the largest number of clients at which Theorem 2 can be informative, for y = ±1 and ‖x‖ = 1.

    yᵀH⁻¹y ≥ ‖y‖²/λ_max(H) and λ_max(H^s∞ + H^p∞) ≤ N/2 + N/(2C), so the complexity term is at least
    2C √(2 / (1 + 1/C) / N). Unless 8C²/(1 + 1/C) < N, this is at least 1, the largest value of the loss. The result
    follows from the statement of Theorem 2 and holds for all labels.

    Examples
    --------
    >>> largest_informative_clients(1000)
    11
    """
    check.integer("n_total", n_total)
    clients = 0
    while 8 * (clients + 1) ** 3 < n_total * (clients + 2):
        clients += 1
    return clients
