"""Private training: algorithms whose server learns only noised sums over clients, and the ε that a run has spent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import masks
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import Algorithm, InitContext, RoundContext, SharedMask
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.nets import Net, Params
from fedstat.fl.privacy import Privacy, noised_moments
from fedstat.fl.probes import Observer, Values
from fedstat.stats.moments import Moments

_SEALED_AT_START = ("sizes", "pretrain", "halves")
_SEALED_IN_ROUND = ("clients", "weights", "before", "after", "state", "evaluate")
_REFUSED = {
    "mixing_weights": "its server mixes models of single clients",
    "encode": "it sends other values than trained parameters",
    "update_state": "its state is made from single clients' models",
    "downloads": "it counts the models that single clients download",
    "measures": "it measures single clients' models",
    "weights": "it weights the mean of clients, which is uniform here",
}


def sealed(algorithm: Algorithm, privacy: Privacy, expected: float) -> Algorithm:
    """Return the algorithm, with hooks that get only noised sums over clients.

    The hooks ``init_mask``, ``update_mask`` and ``init_state`` get sums over clients by
    :func:`fedstat.fl.privacy.noised_moments`. Other values of single clients raise ValueError if a hook reads them.

    Parameters
    ----------
    algorithm : Algorithm
    privacy : Privacy
    expected : float
        Mean number of clients selected in a round.

    Raises
    ------
    ValueError
        If the algorithm needs models of single clients.
    """
    method = f"method {algorithm.name!r} cannot be made private:"
    for name, reason in _REFUSED.items():
        if getattr(algorithm, name) not in (None, {}, uniform):
            raise ValueError(f"{method} {reason} ({name}), which private(...) does not protect. {_INSTEAD}")
    if algorithm.choice is not None and algorithm.choice.by != "client":
        raise ValueError(
            f"{method} it selects by={algorithm.choice.by!r} from clients' held-out losses or models, which "
            "private(...) does not protect. Use by='client'."
        )
    release = _Release(algorithm, privacy, expected)

    def init_mask(context: InitContext) -> SharedMask:
        return _refuse_statistics(context.net, masks.initial(algorithm, release.start(context, "init_mask(context)")))

    def update_mask(context: RoundContext) -> SharedMask:
        return _refuse_statistics(context.net, algorithm.update_mask(release.context(context)))  # type: ignore[misc]

    return algorithm._replace(
        init_mask=init_mask,
        update_mask=update_mask if algorithm.update_mask else None,
        init_state=(lambda context: algorithm.init_state(release.start(context, "init_state(context)")))  # type: ignore[misc]
        if algorithm.init_state
        else None,
    )


def _refuse_statistics(net: Net, mask: SharedMask) -> SharedMask:
    """Return the mask; ValueError if it shares running statistics: noise could make a variance negative."""
    if shared := [name for name in net.buffers if bool(mask.shared[name].any())]:
        raise ValueError(
            f"private(...) does not average running statistics, such as {shared[0]!r}: noise can make a variance "
            "negative. Use norm='group', or keep statistics personal with statistics='local'."
        )
    return mask


_INSTEAD = "Use a method that needs only sums over clients, such as fedavg, fedper or fedfac."


class _Release(NamedTuple):
    """Contexts of an algorithm's hooks under privacy."""

    algorithm: Algorithm
    privacy: Privacy
    expected: float

    def start(self, context: InitContext, function: str) -> InitContext:
        """Return the initial context, with noised moments of all clients and no values of single clients."""

        def moments(epochs: int | None) -> Mapping[str, Any]:
            if self.algorithm.update_mask:
                raise ValueError(
                    f"method {self.algorithm.name!r} cannot be made private: it reads sums over clients before the "
                    "first round and in every round, but the accountant counts only one of both."
                )
            server = {name: p[0] for name, p in context.pretrain(0).items()}
            server_moments = self._server_moments(context.net, server)
            models = context.pretrain(epochs)
            clients = len(next(iter(models.values())))
            before = {name: p.expand(clients, *p.shape) for name, p in server.items()}
            by_client = self._client_moments(context.net, before, models, clients)
            return self._add_noise(by_client, server_moments, clients, context.seed, "start")

        fields = {name: part for name, part in context._asdict().items() if name not in _SEALED_AT_START}
        where = f"method {self.algorithm.name!r}: {function}"
        return cast(InitContext, _SealedInitContext(**fields | {"moments": moments, "where": where}))

    def context(self, context: RoundContext) -> RoundContext:
        """Return the context of a round, with noised moments of selected clients, no values of single clients."""

        def moments() -> Mapping[str, Any]:
            server_moments = self._server_moments(context.net, context.global_params)
            before = context.before if len(context.clients) else {}
            by_client = self._client_moments(context.net, before, context.after, len(context.clients))
            return self._add_noise(by_client, server_moments, self.expected, context.seed, context.round)

        where = f"method {self.algorithm.name!r}: update_mask(context)"
        return context.with_parts(
            {"moments": moments} | {name: _make_refusal(name, where) for name in _SEALED_IN_ROUND}
        )

    def _server_moments(self, net: Net, server: Params) -> dict[str, Moments]:
        """Return moments of the global model as if it were a client's model, trained from 0."""
        params = {name: p[None] for name, p in server.items()}
        moments = self._moments(net, {name: torch.zeros_like(p) for name, p in params.items()}, params)
        for layer, part in moments.items():
            if not isinstance(part, Moments):
                raise ValueError(
                    f"method {self.algorithm.name!r} cannot be made private: of layer {layer!r} it needs "
                    f"{type(part).__module__}.{type(part).__name__}, but only sums of weights and of their products "
                    "(fedstat.stats.moments.Moments) are clipped and noised. With FedFac use an estimator of the "
                    "communality, such as 'pa', in place of 'icc'."
                )
        return moments

    def _add_noise(
        self,
        clients: Iterable[Mapping[str, Moments]],
        server_moments: Mapping[str, Moments],
        expected: float,
        seed: int,
        number: int | str,
    ) -> dict[str, Moments]:
        def stream(layer: str) -> np.random.Generator:
            return streams.generator(seed, "privacy", "moments", number, layer)

        return noised_moments(clients, server_moments, self.privacy, expected, stream)

    def _client_moments(self, net: Net, before: Params, after: Params, clients: int) -> Iterator[Mapping[str, Moments]]:
        for c in range(clients):
            old, new = ({name: p[c : c + 1] for name, p in of.items()} for of in (before, after))
            yield self._moments(net, old, new)

    def _moments(self, net: Net, before: Params, after: Params) -> dict[str, Any]:
        hook = self.algorithm.moments
        return dict(hook(net, lambda: before, after)) if hook else {}


class _SealedInitContext(SimpleNamespace):
    """Fields of an :class:`InitContext` that tell nothing about single clients; reading another field raises."""

    def __getattr__(self, name: str) -> NoReturn:
        if name in _SEALED_AT_START:
            _make_refusal(name, self.where)()
        raise AttributeError(name)


def _make_refusal(name: str, where: str) -> Callable[..., NoReturn]:
    """Return a function that raises ValueError, in place of a value that is not released."""

    def refuse(*_: object) -> NoReturn:
        raise ValueError(f"{where} uses {name!r} of single clients, which private(...) does not protect. {_INSTEAD}")

    return refuse


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


def require_private(job: Job) -> None:
    """Require that the accountant covers a private job.

    Raises
    ------
    ValueError
        If the accountant does not cover the sampling of clients, δ exceeds 1 / clients, or the extra ``privacy`` is not
        installed.
    """
    delta = job.aggregator.privacy.delta if job.aggregator.privacy else 0
    if delta * job.clients > 1:
        raise ValueError(
            f"delta must be at most 1 / clients, {1 / job.clients:.2g} for {job.clients} clients, but got {delta:g}: a "
            "method that publishes all data of one random client has such a δ, so that ε would protect nobody. Use a "
            "delta well below, such as 1e-5."
        )
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
