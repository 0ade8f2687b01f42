"""Privacy budget that a run has spent: ε at δ, by Opacus' accountant of Rényi differential privacy."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.probes import Observer, Values

INSTALL = "pip install 'fedstat[privacy]'"


def epsilon(job: Job, rounds: int) -> float:
    """Return ε at the job's δ after ``rounds`` rounds, composed over all releases so far.

    A round releases a sum of clients' updates with noise multiplier σ_u. If the algorithm decides from moments in every
    round, the round also releases a sum of moments of these clients with σ_m. Both together are one Gaussian release
    with σ = (σ_u⁻² + σ_m⁻²)^(-1/2) (McMahan et al. 2018, arXiv:1812.06210, §3), of clients drawn by Poisson sampling.
    If the algorithm decides once, before the first round, the moments are one Gaussian release of all clients, without
    sampling.

    Rényi divergences of all releases add up (Mironov, Talwar and Zhang 2019, arXiv:1908.10530). ε is the least that
    they imply (Balle et al. 2020, arXiv:1905.09982): an upper bound, whatever the clients' data. Neighbors differ by
    one client, added or removed.

    Raises
    ------
    ValueError
        If the extra ``privacy`` is not installed.
    """
    privacy = job.aggregator.privacy
    assert privacy is not None  # noqa: S101
    has_moments, noise_multiplier = job.algorithm.moments is not None, privacy.noise_multiplier
    if has_moments and job.algorithm.update_mask:
        noise_multiplier = (noise_multiplier**-2 + privacy.noise_multiplier_moments**-2) ** -0.5
    assert isinstance(job.participation, float | int)  # noqa: S101
    total = rounds * _renyi(float(job.participation), noise_multiplier)
    if has_moments and not job.algorithm.update_mask:
        total = total + _renyi(1.0, privacy.noise_multiplier_moments)
    return at_delta(total, privacy.delta)


def at_delta(renyi: np.ndarray, delta: float) -> float:
    """Return ε at δ from Rényi divergences at :func:`orders`."""
    if not renyi.any():
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that another order might give less; ε is a bound all the same
        epsilon_at_delta, _ = _rdp().get_privacy_spent(orders=orders(), rdp=renyi, delta=delta)
    return max(0.0, float(epsilon_at_delta))


def orders() -> list[float]:
    """Return orders of the Rényi divergences: dense for usual values of ε, and large ones for tiny values."""
    return [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [80, 128, 256, 512, 1024]


@cache
def _renyi(rate: float, noise_multiplier: float) -> np.ndarray:
    """Return Rényi divergences of one release, in which each client takes part with probability ``rate``."""
    divergences = _rdp().compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=orders())
    return np.asarray(divergences, dtype=float)


def require(job: Job) -> None:
    """Require that the accountant covers a private job.

    Raises
    ------
    ValueError
        If the accountant does not cover the sampling of clients, or the extra ``privacy`` is not installed.
    """
    if isinstance(job.participation, tuple):
        raise ValueError(
            f"private(...) needs a fixed participation rate, but got {job.participation}. Pass one number."
        )
    if job.sampling != "poisson" and job.participation != 1:
        raise ValueError(
            f"private(...) needs Poisson sampling, as the accountant assumes, or all clients in every round, but "
            f"sampling={job.sampling!r} takes {job.participation:g} of them. Pass sampling='poisson'."
        )
    _rdp()


def _rdp() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ModuleNotFoundError as error:
        raise ValueError(f"ε needs Opacus, which is not installed: {INSTALL}") from error
    return rdp


def probe() -> Observer:
    """Return the observer of ``epsilon`` (round) in ``/metrics``, which the layout of a private run holds."""

    def measure(job: Job, outcome: Outcome) -> Values:
        return {"metrics/epsilon": np.asarray(epsilon(job, outcome.state.round))}

    return Observer(on_round_end=measure)


def noted(job: Job) -> dict[str, Any]:
    """Return the privacy settings that a run stores; none if it is not private."""
    privacy = job.aggregator.privacy
    return {} if privacy is None else {"privacy": privacy._asdict() | {"accountant": "RDP, Opacus"}}
