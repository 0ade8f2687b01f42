"""FedFomo: every client mixes other clients' models with weights that grow with the decrease of its validation loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from fedstat._utils import check, streams
from fedstat._utils.lazy import torch
from fedstat.fl.aggregate import shared_part
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, InitContext, RoundContext
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedFomo",
    ("zhang2021",),
    "everything, in a mixture of other clients' models for each client",
    "the weights of the mixture",
    ("finetuned", "ensemble"),
)


def fedfomo(
    *,
    downloads: Annotated[int, "M, models of other clients that a client downloads in a round"] = 4,
    epsilon: Annotated[float, "ε, probability that a downloaded model is drawn at random"] = 0.3,
    decay: Annotated[float, "decrease of ε per round"] = 0.05,
) -> Algorithm:
    """Replace each client's model by a mixture of the models that lower its validation loss.

    Zhang, Sapra, Fidler, Yeung and Alvarez (2021), "Personalized federated learning with first order model
    optimization", ICLR, arXiv:2012.08565, §3. Client i trained from θ_i; the trained models θ_n' are M downloads and
    the one that it trained. On its validation samples, w_n = (L_i(θ_i) − L_i(θ_n')) / ‖θ_n' − θ_i‖, and
    θ_i ← θ_i + Σ_n w_n⁺ (θ_n' − θ_i) / Σ_n w_n⁺. The affinity of a model is the sum of its w_n over rounds. The client
    downloads the M models of highest affinity; each is replaced by a random model with probability ε.

    Upload: the model. Download: M complete models, which the client itself weighs. Personal: the mixture. Validation
    samples are required: the setting ``validation_fraction``, or ``train_test(..., validation=0.1)``. If no model
    lowers the loss, the client continues with the model that it trained, as in PFLlib; the equation would return it to
    θ_i. In the text, θ_i may be the model before or after the last local training; as in the published code's commands,
    it is the model before.

    Parameters
    ----------
    downloads : int
        M. The paper's five and ten models include the client's model: M is 4 and 9. At most all selected clients
        but one.
    epsilon, decay : float
        ε − decay · round, at least 0, as in the published code's commands. Equal affinities, as in the first round, are
        ordered at random.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, if there are no validation samples.

    Notes
    -----
    At the end of a round, clients download models of the round's selected clients. If a part of the model is personal,
    a client evaluates another client's shared part together with its own personal part. Running statistics are mixed,
    but are not part of the distances. Affinities are a matrix (client, client).
    """
    check.integer("downloads", downloads)
    check.real("epsilon", epsilon, low=0, high=1)
    check.real("decay", decay, low=0)
    rule = _Rule(downloads, epsilon, decay)
    return Algorithm(
        "fedfomo",
        settings=rule._asdict(),
        mixing_weights=lambda context: _mixture(context.once(rule.gains)),
        downloads=rule.n_downloads,
        init_state=_init_affinity,
        update_state=lambda context: _update_affinity(context, context.once(rule.gains)),
        about=ABOUT,
    )


class _Rule(NamedTuple):
    """Rule by which clients select and weigh models."""

    downloads: int
    epsilon: float
    decay: float

    def n_downloads(self, context: RoundContext) -> np.ndarray:
        """Return the number of models that each selected client downloads (client,)."""
        return np.full(len(context.clients), min(self.downloads, len(context.clients) - 1))

    def select(self, context: RoundContext) -> np.ndarray:
        """Return the rows (client, 1 + M) of the models that each selected client weighs, its own model first."""
        affinity = context.state.clients["affinity"][:, torch.from_numpy(context.clients)].cpu().numpy()
        p_random = max(0.0, self.epsilon - self.decay * context.round)
        n, rows = len(context.clients), []
        for i, (client, m) in enumerate(zip(context.clients, self.n_downloads(context), strict=True)):
            rng = streams.generator(context.seed, "downloads", context.round, int(client))
            candidates = rng.permutation(np.delete(np.arange(n), i))
            n_random = int((rng.random(m) < p_random).sum())
            rest = candidates[n_random:]
            best = rest[np.argsort(-affinity[i, rest], kind="stable")[: m - n_random]]
            rows.append([i, *sorted([*candidates[:n_random], *best])])
        return np.array(rows)

    def gains(self, context: RoundContext) -> Tensor:
        """Return w (client, client): decrease of the validation loss per distance, 0 for models not downloaded."""
        rows, before = self.select(context), context.before
        diagonal = np.arange(len(rows))[:, None]
        old_loss = context.evaluate(before, context.clients, diagonal)
        new_loss = context.evaluate(shared_part(context, context.after, statistics=True), context.clients, rows)
        decrease = old_loss - new_loss
        distance = _distances(shared_part(context, context.after), before, rows)
        gain = torch.where(distance > 0, decrease / distance, torch.zeros_like(decrease))
        columns = torch.from_numpy(rows).to(gain.device)
        return gain.new_zeros(len(rows), len(rows)).scatter_(1, columns, gain)


def _distances(models: Params, before: Params, rows: np.ndarray) -> Tensor:
    """Return Euclidean distances (client, k) between models, given by row, and the client's parameters ``before``."""
    squares = [
        torch.stack([(p[rows[:, k]] - before[name]).flatten(1).square().sum(1) for name, p in models.items()]).sum(0)
        for k in range(rows.shape[1])
    ]
    return torch.stack(squares, 1).sqrt()


def _mixture(gains: Tensor) -> Tensor:
    """Return positive gains over their sum (client, client); the identity's row if no gain is positive."""
    positive = gains.clamp(min=0)
    total = positive.sum(1, keepdim=True)
    return torch.where(total > 0, positive / total, torch.eye(len(gains), device=gains.device))


def _init_affinity(context: InitContext) -> AlgorithmState:
    n = len(context.sizes)
    return AlgorithmState({"affinity": torch.zeros(n, n, device=context.device)})


def _update_affinity(context: RoundContext, gains: Tensor) -> AlgorithmState:
    columns = torch.from_numpy(context.clients).to(gains.device)
    return AlgorithmState({"affinity": context.state.clients["affinity"].index_add(1, columns, gains)})
