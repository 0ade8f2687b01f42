"""A method whose server learns noised sums over clients, and nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import masks
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import Algorithm, InitContext, RoundContext, SharedMask
from fedstat.fl.nets import Net, Params
from fedstat.fl.privacy import Privacy, noised_moments
from fedstat.stats.moments import Moments

_OF_START = ("sizes", "pretrain", "halves")
_OF_CONTEXT = ("clients", "weights", "before", "after", "state", "evaluate")
_REFUSED = {
    "mixing_weights": "its server makes each client a mixture of single clients' models",
    "encode": "it sends something other than what was trained",
    "update_state": "its state is made from single clients' models",
    "downloads": "it counts the models that single clients download",
    "measures": "it measures single clients' models",
    "weights": "it weights the mean of clients, which is uniform here",
}


def sealed(algorithm: Algorithm, privacy: Privacy, expected: float) -> Algorithm:
    """The method, deciding from noised sums over clients.

    Its functions ``init_mask``, ``update_mask`` and ``init_state`` get sums over clients by
    :func:`fedstat.fl.privacy.noised_moments`; what else is known of single clients raises if they ask for it.

    Parameters
    ----------
    algorithm : Algorithm
    privacy : Privacy
    expected : float
        Mean number of clients active in a round.

    Raises
    ------
    ValueError
        If the method can do nothing without single clients' models.
    """
    method = f"method {algorithm.name!r} cannot be made private:"
    for name, why in _REFUSED.items():
        if getattr(algorithm, name) not in (None, {}, uniform):
            raise ValueError(f"{method} {why} ({name}), which the budget does not cover. {_INSTEAD}")
    if algorithm.choice is not None and algorithm.choice.by != "client":
        raise ValueError(
            f"{method} it chooses by={algorithm.choice.by!r} from clients' held-out losses or models, which the budget "
            "does not cover. Choose by='client'."
        )
    release = _Release(algorithm, privacy, expected)

    def init_mask(context: InitContext) -> SharedMask:
        return _without_statistics(context.net, masks.initial(algorithm, release.start(context, "init_mask(context)")))

    def update_mask(context: RoundContext) -> SharedMask:
        return _without_statistics(context.net, algorithm.update_mask(release.context(context)))  # type: ignore[misc]

    return algorithm._replace(
        init_mask=init_mask,
        update_mask=update_mask if algorithm.update_mask else None,
        init_state=(lambda context: algorithm.init_state(release.start(context, "init_state(context)")))  # type: ignore[misc]
        if algorithm.init_state
        else None,
    )


def _without_statistics(net: Net, found: SharedMask) -> SharedMask:
    """Return the mask; ValueError if it shares running statistics, of which noise could make a variance negative."""
    if shared := [name for name in net.buffers if bool(found.shared[name].any())]:
        raise ValueError(
            f"private(...) does not average running statistics, such as {shared[0]!r}: noise can make a variance "
            "negative. Take norm='group', or keep them with the client by statistics='local'."
        )
    return found


_INSTEAD = "Take a method that decides from sums over clients, such as fedavg, fedper or fedfac."


class _Release(NamedTuple):
    """What a method's functions see under privacy."""

    algorithm: Algorithm
    privacy: Privacy
    expected: float

    def start(self, context: InitContext, function: str) -> InitContext:
        """What is known before the first round, with noised moments of all clients."""

        def moments(epochs: int | None) -> Mapping[str, Any]:
            if self.algorithm.update_mask:
                raise ValueError(
                    f"method {self.algorithm.name!r} cannot be made private: it asks for sums over clients before the "
                    "first round and in every round, and the accountant counts one of these."
                )
            server = {name: p[0] for name, p in context.pretrain(0).items()}
            own = self._server(context.net, server)
            models = context.pretrain(epochs)
            clients = len(next(iter(models.values())))
            before = {name: p.expand(clients, *p.shape) for name, p in server.items()}
            each = self._each(context.net, before, models, clients)
            return self._noised(each, own, clients, context.seed, "start")

        known = {name: part for name, part in context._asdict().items() if name not in _OF_START}
        where = f"method {self.algorithm.name!r}: {function}"
        return cast(InitContext, _KnownAtStart(**known | {"moments": moments, "where": where}))

    def context(self, context: RoundContext) -> RoundContext:
        """Return what is known after a round's local training, with noised moments of the selected clients."""

        def moments() -> Mapping[str, Any]:
            own = self._server(context.net, context.global_params)
            before = context.before if len(context.clients) else {}
            each = self._each(context.net, before, context.after, len(context.clients))
            return self._noised(each, own, self.expected, context.seed, context.round)

        where = f"method {self.algorithm.name!r}: update_mask(context)"
        return context.with_parts({"moments": moments} | {name: _refusal(name, where) for name in _OF_CONTEXT})

    def _server(self, net: Net, server: Params) -> dict[str, Moments]:
        """Moments of the server's copy as if it were a client's, and its change from 0."""
        one = {name: p[None] for name, p in server.items()}
        own = self._of(net, {name: torch.zeros_like(p) for name, p in one.items()}, one)
        for layer, found in own.items():
            if not isinstance(found, Moments):
                raise ValueError(
                    f"method {self.algorithm.name!r} cannot be made private: of layer {layer!r} it asks for "
                    f"{type(found).__module__}.{type(found).__name__}, and only sums of weights and of their products "
                    "(fedstat.stats.moments.Moments) are clipped and noised. With FedFac take an estimator of the "
                    "communality, such as 'pa', in place of 'icc'."
                )
        return own

    def _noised(
        self,
        clients: Iterable[Mapping[str, Moments]],
        own: Mapping[str, Moments],
        expected: float,
        seed: int,
        number: int | str,
    ) -> dict[str, Moments]:
        def stream(layer: str) -> np.random.Generator:
            return streams.generator(seed, "privacy", "moments", number, layer)

        return noised_moments(clients, own, self.privacy, expected, stream)

    def _each(self, net: Net, before: Params, after: Params, clients: int) -> Iterator[Mapping[str, Moments]]:
        for c in range(clients):
            old, new = ({name: p[c : c + 1] for name, p in of.items()} for of in (before, after))
            yield self._of(net, old, new)

    def _of(self, net: Net, before: Params, after: Params) -> dict[str, Any]:
        of = self.algorithm.moments
        return dict(of(net, lambda: before, after)) if of else {}


class _KnownAtStart(SimpleNamespace):
    """What an :class:`InitContext` knows that is not of single clients; its other fields raise when they are read."""

    def __getattr__(self, name: str) -> NoReturn:
        if name in _OF_START:
            _refusal(name, self.where)()
        raise AttributeError(name)


def _refusal(name: str, where: str) -> Callable[..., NoReturn]:
    """Return a function that raises ValueError in place of giving what is not released."""

    def refuse(*_: object) -> NoReturn:
        raise ValueError(
            f"{where} reads {name!r}, of single clients, which the budget of private(...) does not cover. {_INSTEAD}"
        )

    return refuse
