"""Aggregators: records of pure functions that can be chained.

An aggregator is a pair ``init``, ``apply``, like optax's gradient transformations: each takes the result of its
predecessor. Clipping clients' updates, a mean, noise on it and a server's optimizer all have this form. A mean without
large updates:

>>> def clip(sent):
...     moves = {name: p - sent.server[name] for name, p in sent.values.items()}
...     return {name: sent.server[name] + p.clamp(-0.1, 0.1) for name, p in moves.items()}
>>> chain(stateless("clip", clip, needs="sum"), weighted_mean()).name
'clip, weighted mean'
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedstat._utils import check, streams
from fedstat._utils.lazy import torch
from fedstat.fl.algorithm import Mask, RoundContext
from fedstat.fl.nets import Params
from fedstat.fl.privacy import Privacy, mean_update

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Aggregator", "Sent", "chain", "median", "private", "stateless", "trimmed_mean", "uniform", "weighted_mean"]


def __dir__() -> list[str]:
    return __all__


class Sent(NamedTuple):
    """Values that the selected clients sent in a round, or the result of an aggregator.

    Attributes
    ----------
    values : Params
        Parameters with shared entries: (selected, ...) as sent, (...) once averaged. Entries that are not shared may
        hold anything; results for them are ignored.
    server : Params (...)
        These parameters of the global model before the round.
    shared : Mask
        True where an entry is shared; broadcasts against (...).
    sizes : Tensor (selected,)
        Numbers of training samples.
    weights : Tensor (selected,) or None
        Weights that the algorithm defines; if their sum is below 1, the global model gets the rest.
    clients : int array (selected,)
        Numbers that name the clients' random streams.
    round : int
        From 0.
    seed : int
    expected : float
        Mean number of clients selected in a round.
    total : callable (Params) -> Params
        Sums over the processes of a run, if each process has the values of its clients only (``needs="sum"``).
    """

    values: Params
    server: Params
    shared: Mask
    sizes: Tensor
    weights: Tensor | None
    clients: np.ndarray
    round: int
    seed: int
    expected: float
    total: Callable[[Params], Params] = lambda values: values


Needs = Literal["sum", "clients"]


class Aggregator(NamedTuple):
    """An aggregator.

    Attributes
    ----------
    init : callable (Params) -> state
        State before the first round, from the global model: tensors, in dicts or tuples, which are saved and resumed.
    apply : callable (Sent, state) -> (Sent, state)
        One round. After the last aggregator of a chain ``values`` have no client dimension.
    name : str
        Name in the settings of a run.
    privacy : Privacy, optional
        The aggregator's releases about clients, if it and the algorithm learn nothing else about them.
    needs : {"clients", "sum"}
        Values that each of several processes needs. "clients": the values of all selected clients, which every process
        then holds. "sum": the values of this process's clients, and sums over processes (``Sent.total``).
    weighted : bool
        False if all clients count alike. Runs then refuse algorithms whose ``weights`` differ, and algorithms with
        ``mixing_weights``.
    """

    init: Callable[[Params], Any]
    apply: Callable[[Sent, Any], tuple[Sent, Any]]
    name: str
    privacy: Privacy | None = None
    needs: Needs = "clients"
    weighted: bool = True


def stateless(name: str, values: Callable[[Sent], Params], *, needs: Needs = "clients") -> Aggregator:
    """Make an aggregator without state from a function that returns the new values.

    Examples
    --------
    >>> largest = stateless("largest", lambda sent: {name: p.max(0).values for name, p in sent.values.items()})
    >>> largest.needs
    'clients'
    """
    return Aggregator(lambda _: (), lambda sent, state: (sent._replace(values=values(sent)), state), name, needs=needs)


def uniform(_: np.ndarray, client_ids: np.ndarray, __: int) -> np.ndarray:
    """Return equal weights (selected,) of all selected clients, for ``Algorithm.weights``."""
    return np.full(len(client_ids), 1 / len(client_ids))


def weighted_mean() -> Aggregator:
    """Average with weights n_k / Σ n_k, or with the weights of the algorithm (FedAvg; FedFac Alg. 1).

    n_k is the number of training samples of client k.
    """

    def mean(sent: Sent) -> Params:
        weights = sent.weights
        if weights is None:
            samples = sent.total({"n": sent.sizes.sum()})["n"]
            if not samples:  # Poisson sampling may select no client
                return sent.server
            weights = sent.sizes / samples
        means = {name: torch.mv(p.flatten(1).T, weights).view(p.shape[1:]) for name, p in sent.values.items()}
        means = sent.total(means)
        rest = 0.0
        if sent.weights is not None:
            rest = max(0.0, 1 - float(sent.total({"w": weights.sum(dtype=torch.float64)})["w"]))
        return {name: p.add_(sent.server[name], alpha=rest) for name, p in means.items()} if rest > 1e-6 else means

    return stateless("weighted mean", mean, needs="sum")


def median() -> Aggregator:
    """Take the median of every entry over clients; of an even number, the mean of the two middle values.

    All selected clients count alike, whatever their numbers of samples. Fewer than half of the clients cannot move an
    entry beyond the range of the other clients' values. This limits their effect on the global model alone: FedFac's
    split, and the means of other clients that FedAMP and Clustered-FL use, remain sums over clients. A client whose
    parameters are not finite ends a run under every aggregator.

    Values (selected, ...) give (...). A round without clients leaves the global model as it is. If masks differ between
    clients, the median is over all selected clients, as the mean is.

    Raises
    ------
    ValueError
        Before training: if the algorithm has ``weights`` that differ between clients, or ``mixing_weights``.

    References
    ----------
    Yin, Chen, Ramchandran, Bartlett (2018). Byzantine-robust distributed learning: towards optimal statistical rates.
    ICML, arXiv:1803.01498, Definition 1, which takes the median of gradients. The median of parameters is the global
    model plus the median of updates.

    Examples
    --------
    >>> median().name
    'median'
    """
    return _middle_mean("median", lambda n: (n - 1) // 2)


def trimmed_mean(proportion: float) -> Aggregator:
    """Average every entry over n clients, without its ⌊βn⌋ smallest and its ⌊βn⌋ largest values.

    Up to ⌊βn⌋ clients cannot move an entry beyond the range of the other clients' values. Otherwise it behaves as
    :func:`median` does.

    Parameters
    ----------
    proportion : float in [0, 0.5)
        β. With 0 the result is the unweighted mean.

    Raises
    ------
    ValueError
        If ``proportion`` is out of range; before training as :func:`median`.

    Warns
    -----
    UserWarning
        If a round has fewer than 1/β clients, so that no values are dropped.

    References
    ----------
    Yin et al. (2018), see :func:`median`, Definition 2, where βn is an integer.

    Examples
    --------
    >>> trimmed_mean(0.1).name
    'trimmed-mean:0.1'
    """
    check.real("the proportion of a trimmed mean", proportion, low=0, high=0.5, open_high=True)
    name = f"trimmed-mean:{float(proportion)}"

    def dropped(n: int) -> int:
        k = int(proportion * n + _ROUNDING)
        if proportion and not k:
            check.warn(
                f"A round has fewer than {math.ceil(1 / proportion - _ROUNDING)} clients, so that {name} drops no "
                "values and is the unweighted mean. Raise participation or the proportion."
            )
        return k

    return _middle_mean(name, dropped)


_ROUNDING = 1e-9  # 0.29 * 100 is less than 29 in floating point


def _middle_mean(name: str, dropped: Callable[[int], int]) -> Aggregator:
    """Average every entry over n clients, without its ``dropped(n)`` smallest and largest values."""

    def mean(p: Tensor, server: Tensor) -> Tensor:
        if not len(p):  # Poisson sampling may select no client
            return server
        k = dropped(len(p))
        return p.sort(0).values[k : len(p) - k].mean(0)

    aggregator = stateless(name, lambda sent: {n: mean(p, sent.server[n]) for n, p in sent.values.items()})
    return aggregator._replace(weighted=False)


def private(
    clip: float,
    noise_multiplier: float,
    *,
    delta: float = 1e-5,
    clip_moments: float = 1.0,
    noise_multiplier_moments: float | None = None,
) -> Aggregator:
    """Add up clipped updates with Gaussian noise: differential privacy of whole clients (DP-FedAvg).

    The global model moves by Σ_c Δ_c min(1, clip / ‖Δ_c‖) + noise, divided by the *expected* number of selected
    clients. Δ_c is the upload of client c minus the global model; the norm is over all shared entries of all layers
    together. All clients count alike: weights by numbers of samples would reveal these numbers. If fewer clients take
    part than expected, the update becomes smaller, not the denominator. A round without clients is noise alone.

    FedFac decides its split from moments of the clients' weights. These are a separate release in every round (static
    FedFac: once, of all clients), see :func:`fedstat.fl.privacy.noised_moments`. The algorithm learns nothing else
    about clients: one that needs more is refused before the first round. Later aggregators of a :func:`chain`, such as
    a server's optimizer, work on the released values, as do ``server_lr`` and the split.

    Clients send their moments first, and clip their updates once they know the split. A run stores ε after every round
    in ``/metrics``, see :func:`fedstat.fl.private_training.epsilon`. ε holds for neighbors that differ by one client,
    if the server is trusted to add the noise; the number of clients is public. Everything else that a run stores
    (accuracies, losses, clients' weights, probes) is for the researcher and not private. Neither is the work before
    training, such as inputs standardized, or settings tuned, on all clients' data.

    Parameters
    ----------
    clip : float
        Largest norm of a client's update.
    noise_multiplier : float
        Standard deviation of the noise on each entry of the sum, over ``clip``.
    delta : float in (0, 1)
        Probability with which ε may fail, at most 1 / (number of clients), and better well below.
    clip_moments : float
        Largest norm of a client's moments, in units of the norm of the global model's moments. Updates
        (``on="updates"``) are much smaller than weights, and so are their moments: choose it accordingly.
    noise_multiplier_moments : float, optional
        Noise multiplier of the moments, by default ``noise_multiplier``.

    Raises
    ------
    ValueError
        If a number is out of range. Before training: if clients are neither sampled as the accountant assumes nor all
        selected; if the algorithm, or the network's running statistics, would release more.

    Notes
    -----
    For research, not for deployment: noise comes from named streams, so that runs repeat, and anybody who knows the
    seed can remove it. Gaussian noise in floating point is not exactly Gaussian (Mironov 2012, CCS).

    References
    ----------
    McMahan, Ramage, Talwar, Zhang (2018). Learning differentially private recurrent language models. ICLR,
    arXiv:1710.06963, Algorithm 1 with the fixed-denominator estimator.

    Examples
    --------
    >>> private(0.5, 1.2).name
    'private(clip=0.5, noise_multiplier=1.2, delta=1e-05, clip_moments=1.0, noise_multiplier_moments=1.2)'
    """
    moments_multiplier = noise_multiplier if noise_multiplier_moments is None else noise_multiplier_moments
    privacy = Privacy(clip, noise_multiplier, delta, clip_moments, moments_multiplier).checked()

    def apply(sent: Sent, state: Any) -> tuple[Sent, Any]:
        updates = {name: (p - sent.server[name]) * sent.shared[name] for name, p in sent.values.items()}

        def stream(name: str) -> np.random.Generator:
            return streams.generator(sent.seed, "privacy", "updates", sent.round, name)

        mean = mean_update(updates, privacy, sent.expected, stream)
        values = {name: sent.server[name] + p for name, p in mean.items()}
        # Later aggregators get the released values alone, without sizes and numbers of clients.
        return sent._replace(values=values, sizes=sent.sizes[:0], weights=None, clients=sent.clients[:0]), state

    settings = ", ".join(f"{name}={value}" for name, value in privacy._asdict().items())
    return Aggregator(lambda _: (), apply, f"private({settings})", privacy)


def chain(*aggregators: Aggregator) -> Aggregator:
    """Apply one aggregator after the other; :func:`private` may only be the first.

    A chain needs all clients if one of its parts does: declare ``needs="sum"`` for parts that come after the mean.

    Raises
    ------
    ValueError
        If :func:`private` is not the first aggregator.

    Examples
    --------
    >>> halved = stateless("halved", lambda sent: {name: p / 2 for name, p in sent.values.items()}, needs="sum")
    >>> chain(weighted_mean(), halved).name
    'weighted mean, halved'
    """
    if late := [aggregator.name for aggregator in aggregators[1:] if aggregator.privacy]:
        raise ValueError(f"{late[0]} must come first in a chain: an aggregator before it would see single clients")

    def init(server: Params) -> tuple[Any, ...]:
        return tuple(aggregator.init(server) for aggregator in aggregators)

    def apply(sent: Sent, states: tuple[Any, ...]) -> tuple[Sent, tuple[Any, ...]]:
        after = []
        for aggregator, state in zip(aggregators, states, strict=True):
            sent, state = aggregator.apply(sent, state)
            after.append(state)
        return sent, tuple(after)

    name = ", ".join(aggregator.name for aggregator in aggregators)
    needs: Needs = "clients" if any(aggregator.needs == "clients" for aggregator in aggregators) else "sum"
    weighted = all(aggregator.weighted for aggregator in aggregators)
    return Aggregator(init, apply, name, aggregators[0].privacy if aggregators else None, needs, weighted)


def shared_part(context: RoundContext, params: Params, *, statistics: bool = False) -> Params:
    """Return parameters with shared entries; running statistics only if ``statistics``."""
    shared = {name: p for name, p in params.items() if bool(context.mask.shared[name].any())}
    return {name: p for name, p in shared.items() if statistics or name not in context.net.buffers}


def products(params: Params) -> Tensor:
    """Return inner products (client, client), in float64, of clients' parameters (client, ...) as one vector each.

    Examples
    --------
    >>> import torch
    >>> products({"w": torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "b": torch.tensor([[3.0], [0.0]])})
    tensor([[14.,  2.],
            [ 2.,  1.]], dtype=torch.float64)
    """
    rows = (p.flatten(1).double() for p in params.values())
    return torch.stack([x @ x.T for x in rows]).sum(0)


def squared_distances(params: Params) -> Tensor:
    """Return squared Euclidean distances (client, client), in float64."""
    inner = products(params)
    square = inner.diagonal()
    return (square[:, None] + square - 2 * inner).clamp(min=0).fill_diagonal_(0)


def cosines(params: Params) -> Tensor:
    """Return cosine similarities (client, client), in float64: 0 with a vector of zeros, 1 on the diagonal."""
    inner = products(params)
    norm = inner.diagonal().sqrt()
    floor = torch.finfo(norm.dtype).tiny
    return (inner / (norm[:, None] * norm).clamp(min=floor)).clamp(-1, 1).fill_diagonal_(1)
