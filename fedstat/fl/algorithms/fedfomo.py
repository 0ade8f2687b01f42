"""FedFomo: every client mixes models of others by how much they lower the loss on its validation samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from fedstat._utils import check, streams
from fedstat._utils.lazy import torch
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, InitContext, RoundContext
from fedstat.fl.nets import Params
from fedstat.fl.similarity import shared_part

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedFomo",
    ("zhang2021",),
    "everything, as each client's own mixture of other clients' models",
    "the weights of the mixture",
    ("finetuned", "ensemble"),
)


def fedfomo(
    *,
    downloads: Annotated[int, "M, models of other clients that a client downloads in a round"] = 4,
    epsilon: Annotated[float, "ε, probability that one of these is drawn at random"] = 0.3,
    decay: Annotated[float, "what ε loses in every round"] = 0.05,
) -> Algorithm:
    """First-order model optimisation: a client's model becomes a mixture of the models that lower its validation loss.

    Zhang, Sapra, Fidler, Yeung and Alvarez (2021), "Personalized federated learning with first order model
    optimization", ICLR, arXiv:2012.08565, §3. With θ_i the model from which client i trained, and θ_n' the trained
    models it gets, its own among them, w_n = (L_i(θ_i) − L_i(θ_n')) / ‖θ_n' − θ_i‖ on its validation samples, and
    θ_i ← θ_i + Σ_n w_n⁺ (θ_n' − θ_i) / Σ_n w_n⁺. Which models it gets: those of highest affinity, the sum of all w_n so
    far, and with probability ε, for each of the M, a random one instead.

    Up: the model. Down: M whole models, as the client itself weighs them. Private: the mixture. Needs validation
    samples (``validation=0.1``). Where no model lowers the loss the client goes on with the one it trained, as in
    PFLlib; the equation would return it to θ_i. The text's θ_i can be read as the model before or after the last local
    training; the published code's commands take it from before, and so does this.

    Parameters
    ----------
    downloads : int
        M. The paper's five and ten models, with the client's own, are 4 and 9. At most all active clients.
    epsilon, decay : float
        ε − decay · round, at least 0, as the published code's commands have them. Equal affinities are ordered at
        random, as all are in the first round.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, if there are no validation samples.

    Notes
    -----
    Clients get the models of those that are active in the same round, at its end. Where a part of the model is private,
    a client evaluates others' shared part with its own private part. Running statistics are mixed, but not part of the
    distances. Affinities are a matrix (client, client).
    """
    check.integer("downloads", downloads)
    check.real("epsilon", epsilon, low=0, high=1)
    check.real("decay", decay, low=0)
    rule = _Rule(downloads, epsilon, decay)
    return Algorithm(
        "fedfomo",
        settings=rule._asdict(),
        mixing_weights=lambda context: _mixture(context.once(rule.gains)),
        downloads=rule.numbers,
        init_state=_no_affinity,
        update_state=lambda context: _affinity(context, context.once(rule.gains)),
        about=ABOUT,
    )


class _Rule(NamedTuple):
    """Which models a client downloads, and what it makes of them."""

    downloads: int
    epsilon: float
    decay: float

    def numbers(self, context: RoundContext) -> np.ndarray:
        """How many models each active client downloads."""
        return np.full(len(context.clients), min(self.downloads, len(context.clients) - 1))

    def received(self, context: RoundContext) -> np.ndarray:
        """Rows (active, 1 + M) of the models that each client weighs, its own first."""
        affinity = context.state.clients["affinity"][:, torch.from_numpy(context.clients)].cpu().numpy()
        explores = max(0.0, self.epsilon - self.decay * context.round)
        n, found = len(context.clients), []
        for i, (client, most) in enumerate(zip(context.clients, self.numbers(context), strict=True)):
            rng = streams.generator(context.seed, "downloads", context.round, int(client))
            others = rng.permutation(np.delete(np.arange(n), i))
            random = int((rng.random(most) < explores).sum())
            rest = others[random:]
            best = rest[np.argsort(-affinity[i, rest], kind="stable")[: most - random]]
            found.append([i, *sorted([*others[:random], *best])])
        return np.array(found)

    def gains(self, context: RoundContext) -> Tensor:
        """What a model lowers a client's validation loss by, per distance: w (active, active), 0 if not downloaded."""
        which, before = self.received(context), context.before
        each = np.arange(len(which))[:, None]
        was = context.evaluate(before, context.clients, each)
        lowered = was - context.evaluate(shared_part(context, context.after, statistics=True), context.clients, which)
        distance = _distances(shared_part(context, context.after), before, which)
        gain = torch.where(distance > 0, lowered / distance, torch.zeros_like(lowered))
        columns = torch.from_numpy(which).to(gain.device)
        return gain.new_zeros(len(which), len(which)).scatter_(1, columns, gain)


def _distances(models: Params, own: Params, which: np.ndarray) -> Tensor:
    """Euclidean distances (client, k) of models, by row, from clients' own."""
    square = [
        torch.stack([(p[which[:, k]] - own[name]).flatten(1).square().sum(1) for name, p in models.items()]).sum(0)
        for k in range(which.shape[1])
    ]
    return torch.stack(square, 1).sqrt()


def _mixture(gains: Tensor) -> Tensor:
    """Positive gains over their sum; the own model where none is positive."""
    positive = gains.clamp(min=0)
    total = positive.sum(1, keepdim=True)
    return torch.where(total > 0, positive / total, torch.eye(len(gains), device=gains.device))


def _no_affinity(context: InitContext) -> AlgorithmState:
    n = len(context.sizes)
    return AlgorithmState({"affinity": torch.zeros(n, n, device=context.device)})


def _affinity(context: RoundContext, gains: Tensor) -> AlgorithmState:
    columns = torch.from_numpy(context.clients).to(gains.device)
    return AlgorithmState({"affinity": context.state.clients["affinity"].index_add(1, columns, gains)})
