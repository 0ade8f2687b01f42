"""Neural-tangent-kernel theory of FedSplit (FedFac §3.3) on arrays: kernels, Assumption 1, Theorems 1 and 2.

Samples of all clients are stacked client by client ("client-major"): H^s∞ is a matrix over all of them, H^p∞ the list
of its diagonal blocks, one per client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from fedstat import _check
from fedstat.stats.extreme_eigenvalues import Extremes, extreme_eigenvalues
from fedstat.stats.kernel import NEAR, chord_angle, cosine_tiles, directions, gram, kernel, shared_gram

__all__ = [
    "Extremes", "Steps", "Violations", "complexity", "confidence", "contraction", "extreme_eigenvalues", "gram",
    "kernel", "largest_informative_clients", "least_width", "limit_map", "shared_gram", "theorem_lr", "violations",
]  # fmt: skip

Array = Any


class Violations(NamedTuple):
    """Samples that break Assumption 1 of FedFac §3.3.

    Attributes
    ----------
    long : tuple of int
        Rows with ‖x‖ > 1.
    zero : tuple of int
        Rows with x = 0: parallel to everything, and H has a zero row.
    parallel : tuple of (int, int)
        Pairs i < j that point in the same direction: their rows of H are proportional, so λ_min(H) = 0.
    """

    long: tuple[int, ...]
    zero: tuple[int, ...]
    parallel: tuple[tuple[int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.long or self.zero or self.parallel)


def violations(x: Array, *, angle: float = 1e-7) -> Violations:
    """Name the samples that break Assumption 1: ‖x‖ ≤ 1, no two parallel.

    Parameters
    ----------
    x : array (sample, feature)
    angle : float
        Radians up to which two directions count as one. Antiparallel pairs are not named: x and −x do not make H
        singular (their entry is 0).

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
        1 for ``reduction="sum"``; n for ``"mean"``. The paper's loss is a mean over the client's n samples, but its
        accumulated updates, and so ρ1 and ρ2, carry no 1/n.
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
    """Factor per round that Theorem 1 gives for ‖y − h(t)‖²: 1 − ½(ρ1 λ^s + ρ2 λ^p).

    With ``lambda_p=0`` it is the paper's rate of FedAvg, 1 − ½ ρ1 λ^s. Negative if the steps are so large that the
    theorem cannot apply.

    Examples
    --------
    >>> contraction(Steps(0.1, 1.0, 5, 4), lambda_s=0.1, lambda_p=0.12)
    0.96375
    """
    return 1 - (steps.rho1 * lambda_s + steps.rho2 * lambda_p) / 2


def theorem_lr(lambda_s: float, gamma_s: float, lambda_p: float, gamma_p: float, *, local_steps: int, n: int) -> float:
    """Local step of Theorem 1 with constant 1: (λ^s + λ^p) / (γ^s γ^p G N²), N the number of all samples."""
    return (lambda_s + lambda_p) / (gamma_s * gamma_p * local_steps * n**2)


def least_width(lambda_s: float, *, n: int, delta: float = 0.05) -> float:
    """Shared units that Theorem 1 asks for, with constant 1: m2 = N⁴ log(N/δ) / (λ^s)⁴, N the number of all samples.

    For the personal units it asks for no more, as λ^p >= λ^s.

    Examples
    --------
    >>> f"{least_width(0.1, n=36):.1e}"
    '1.1e+11'
    """
    return n**4 * math.log(n / delta) / lambda_s**4


def limit_map(
    h_shared: Array, h_personal: Sequence[Array], steps: Steps, *, divisors: Sequence[float] | None = None
) -> Array:
    """Linear map from y − h(t) to y − h(t+1) of a network so wide that its kernels do not change.

    I − η_l(η_g/C · H^s + H^p)·S, S the block diagonal of Σ_{g<G} (I − η_l K_c)^g, K_c the client's block of H^s + H^p:
    what the parallel gradient descent does exactly, G local steps included, while Theorem 1 keeps λ_min only.

    Parameters
    ----------
    h_shared : array (sample, sample)
        H^s∞, client-major.
    h_personal : sequence of arrays (sample_c, sample_c)
        Blocks of H^p∞; zeros where nothing is personal (FedAvg).
    steps : Steps
    divisors : sequence of C floats, optional
        Each client's divisor, if they differ.

    Returns
    -------
    array (sample, sample)
    """
    xp = array_namespace(h_shared)
    result = xp.zeros_like(h_shared)
    stop = 0
    for c, personal in enumerate(h_personal):
        own = slice(stop, stop := stop + personal.shape[-1])
        lr = steps.lr / (steps.divisor if divisors is None else divisors[c])
        block = h_shared[own, own] + personal
        column = h_shared[:, own] * (lr * steps.server_lr / steps.clients)
        column[own, :] += lr * personal
        eye = xp.eye(personal.shape[-1], dtype=xp.float64, device=device_of(h_shared))
        power, total = eye, eye
        for _ in range(steps.local_steps - 1):
            power = power - lr * (block @ power)
            total = total + power
        result[:, own] = -column @ total
        result[own, own] += eye
    return result


def complexity(h_shared: Array, h_personal: Sequence[Array], y: Array) -> float:
    """First term of Theorem 2: 2 √((C/n) yᵀ(H^s∞ + H^p∞)⁻¹ y), by a Cholesky factor and one triangular solve.

    Parameters
    ----------
    h_shared : array (sample, sample)
        H^s∞, client-major.
    h_personal : sequence of C arrays (sample_c, sample_c)
        Blocks of H^p∞. For clients of unequal size n is their mean size.
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
        own = slice(stop, stop := stop + block.shape[-1])
        total[own, own] += block
    try:
        factor = xp.linalg.cholesky(total)
    except Exception as error:  # NumPy and torch raise different LinAlgErrors
        raise ValueError(
            "H^s + H^p is not positive definite, so Theorem 2 has no bound. "
            "Are two samples of one client parallel? fedstat.ntk.violations(x) names them."
        ) from error
    half = _triangular_solve(factor, y)
    clients = len(h_personal)
    return 2 * math.sqrt(clients**2 / stop * float(half @ half))


def _triangular_solve(factor: Array, y: Array) -> Array:
    xp = array_namespace(factor)
    if hasattr(factor, "is_cuda"):
        return xp.linalg.solve_triangular(factor, y[:, None], upper=False)[:, 0]
    from scipy.linalg import solve_triangular

    return solve_triangular(factor, y, lower=True)


def confidence(n: int, lambda_min: float, *, delta: float = 0.05, constant: float = 1.0) -> float:
    """Second term of Theorem 2: constant · √(log(N/(λδ)) / (2N)); the paper gives its order only.

    Parameters
    ----------
    n : int
        N, samples of all clients.
    lambda_min : float
        λ, smallest eigenvalue of H^s∞ + H^p∞.
    delta : float
        Failure probability, 0 < delta < 1.
    constant : float
        The unknown constant of the O().
    """
    _check.real("delta", delta, low=0, high=1, open_low=True, open_high=True)
    _check.real("constant", constant, low=0)
    _check.real("lambda_min", lambda_min, low=0, open_low=True, hint="Theorem 2 needs λ_min(H^s + H^p) > 0.")
    return constant * math.sqrt(math.log(n / (lambda_min * delta)) / (2 * n))


def largest_informative_clients(n_total: int) -> int:
    """Largest number of clients for which Theorem 2 says anything about labels ±1 on unit-norm samples.

    yᵀH⁻¹y ≥ ‖y‖²/λ_max(H) and λ_max(H^s∞ + H^p∞) ≤ N/2 + N/(2C), so the complexity term is at least
    2C √(2 / (1 + 1/C) / N): at or above 1, the largest value of the loss, unless 8C²/(1 + 1/C) < N. This follows from
    the statement of Theorem 2 and holds whatever the labels.

    Examples
    --------
    >>> largest_informative_clients(1000)
    11
    """
    _check.integer("n_total", n_total)
    clients = 0
    while 8 * (clients + 1) ** 3 < n_total * (clients + 2):
        clients += 1
    return clients
