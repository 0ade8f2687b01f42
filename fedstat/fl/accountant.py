"""How much a private run has released: ε at δ, by Opacus' accountant of Rényi differential privacy."""

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
    """ε at the job's δ after so many rounds, everything released so far composed.

    A round releases a sum of updates with noise multiplier σ_u and, if the algorithm decides from moments in every
    round, a sum of moments with σ_m, both of the same clients: together one Gaussian release with
    σ = (σ_u⁻² + σ_m⁻²)^(-1/2) (McMahan et al. 2018, arXiv:1812.06210, §3), of clients drawn by Poisson sampling. If it
    decides once, before the first round, these moments are one Gaussian release of all clients, without sampling. Rényi
    divergences of all releases add up (Mironov, Talwar and Zhang 2019, arXiv:1908.10530), and ε is the least that they
    imply (Balle et al. 2020, arXiv:1905.09982): an upper bound, whatever the clients' data. Neighbours differ by one
    client, added or removed.

    Raises
    ------
    ValueError
        If the extra ``privacy`` is not installed.
    """
    privacy = job.aggregator.privacy
    assert privacy is not None  # noqa: S101
    asks, of_round = job.algorithm.moments is not None, privacy.noise_multiplier
    if asks and job.algorithm.update_mask:
        of_round = (of_round**-2 + privacy.noise_multiplier_moments**-2) ** -0.5
    assert isinstance(job.participation, float | int)  # noqa: S101
    total = rounds * _renyi(float(job.participation), of_round)
    if asks and not job.algorithm.update_mask:
        total = total + _renyi(1.0, privacy.noise_multiplier_moments)
    return at_delta(total, privacy.delta)


def at_delta(renyi: np.ndarray, delta: float) -> float:
    """ε from Rényi divergences at :func:`orders`."""
    if not renyi.any():
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another order might give less: it is a bound all the same
        found, _ = _rdp().get_privacy_spent(orders=orders(), rdp=renyi, delta=delta)
    return max(0.0, float(found))


def orders() -> list[float]:
    """Orders of the Rényi divergences: dense where ε is of ordinary size, and up to where it is tiny."""
    return [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [80, 128, 256, 512, 1024]


@cache
def _renyi(share: float, noise_multiplier: float) -> np.ndarray:
    """Rényi divergences of one release of clients who each take part with the given probability."""
    found = _rdp().compute_rdp(q=share, noise_multiplier=noise_multiplier, steps=1, orders=orders())
    return np.asarray(found, dtype=float)


def require(job: Job) -> None:
    """Check that a private job can be accounted for.

    Raises
    ------
    ValueError
        If the accountant does not cover how clients are sampled, or the extra ``privacy`` is not installed.
    """
    if isinstance(job.participation, tuple):
        raise ValueError(
            f"private(...) needs one share of clients, as the accountant assumes, but got the range {job.participation}"
        )
    if job.sampling != "poisson" and job.participation != 1:
        raise ValueError(
            f"private(...) needs Poisson sampling, as the accountant assumes, or all clients in every round, but "
            f"sampling={job.sampling!r} takes {job.participation:g} of them. Give sampling='poisson'."
        )
    _rdp()


def _rdp() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ModuleNotFoundError as error:
        raise ValueError(f"ε is accounted for by Opacus, which is not installed: {INSTALL}") from error
    return rdp


def probe() -> Observer:
    """``/metrics`` epsilon (round), whose layout is that of the run."""

    def spent(job: Job, outcome: Outcome) -> Values:
        return {"metrics/epsilon": np.asarray(epsilon(job, outcome.state.round))}

    return Observer(on_round_end=spent)


def noted(job: Job) -> dict[str, Any]:
    """What a run's settings note of privacy; empty if it is not private."""
    privacy = job.aggregator.privacy
    return {} if privacy is None else {"privacy": privacy._asdict() | {"accountant": "RDP, Opacus"}}
