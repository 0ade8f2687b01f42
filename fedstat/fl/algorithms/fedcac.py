"""FedCAC: entries that a client is sensitive to are averaged over similar clients, the others over all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, DownloadContext, InitContext, RoundContext
from fedstat.fl.nets import Net, Params

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedCAC",
    ("wu2023",),
    "uncritical entries with all clients, critical ones with clients that have similar ones",
    "critical entries, once no client is similar enough",
    ("global", "finetuned"),
)


def fedcac(
    *,
    tau: Annotated[float, "τ, share of critical entries in every parameter"] = 0.5,
    beta: Annotated[int, "β, round after which clients keep their critical entries to themselves"] = 100,
) -> Algorithm:
    """Clients take critical entries from clients whose critical entries lie in the same places, the others from all.

    Wu, Liu, Niu, Zhu and Tang (2023), "Bold but cautious: Unlocking the potential of personalized federated learning
    through cautiously aggressive collaboration", ICCV, arXiv:2309.11103, §3 and Algorithm 1. After local training from
    θ to θ', an entry's sensitivity is the size of θ' (θ' − θ); in every parameter the share τ of entries with the
    largest is critical. The overlap of clients i and j is O_ij = 1 − ‖M_i − M_j‖₁ / (‖M_i‖₁ + ‖M_j‖₁) for their
    critical entries M. In round t, from 1, clients with O_ij ≥ mean + (t/β) (max − mean), mean and maximum over all
    pairs, are partners. A client's next model has the mean of itself and its partners where M_i, the mean of all
    clients elsewhere.

    Up: all entries, and M_i (one bit per entry, which is not counted). Down: all entries. A client that is not active
    keeps its M_i and its copy of these entries.

    Parameters
    ----------
    tau : float in [0, 1]
        0 is FedAvg. The number of critical entries of a parameter is rounded down.
    beta : int >= 1
        From round β + 1 no client has partners. The published settings are τ = 0.5, β = 100 on CIFAR-10 and τ = 0.4,
        β = 170 on CIFAR-100, with 300 rounds.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Notes
    -----
    Choices, as in the published code: the mean of partners is unweighted, that of all clients weighted by numbers of
    samples; entries that did not change are not critical (if there are more than 1 − τ of them); running statistics of
    batch normalisation are not critical: here they follow the partners' mean. M_i and M_j have equal numbers of entries
    unless some did not change; the published code then divides by 2 ‖M_i‖₁, which is not symmetric. With partial
    participation, overlaps are those of the round's active clients.
    ``mixing/weight`` of a store has every round's partners.
    """
    check.real("tau", tau, low=0, high=1)
    check.integer("beta", beta)

    def critical(context: RoundContext) -> Params:
        return critical_entries(context.net, context.before, context.after, tau)

    def init_state(context: InitContext) -> AlgorithmState:
        net, clients = context.net, len(context.sizes)
        none = {n: torch.zeros(clients, *net.shapes[n], dtype=torch.bool, device=context.device) for n in _judged(net)}
        return AlgorithmState(none)

    return Algorithm(
        "fedcac",
        settings={"tau": tau, "beta": beta},
        mixing_weights=lambda context: partners(overlap(critical(context)), (context.round + 1) / beta),
        init_state=init_state,
        update_state=lambda context: AlgorithmState(critical(context)),
        on_download=_receive,
        about=ABOUT,
    )


def critical_entries(net: Net, before: Params, after: Params, tau: float) -> Params:
    """Where a parameter's largest |θ' (θ' − θ)| are: bool (client, *shape), for every parameter that can train."""
    found: Params = {}
    for name in _judged(net):
        p = after[name]
        s = (p * (p - before[name])).abs_().flatten(1)
        number = int(tau * s.shape[1] + 1e-9)  # 0.29·100 is 28.999...
        least = s.kthvalue(s.shape[1] - number + 1, 1, keepdim=True).values if number else torch.inf
        found[name] = ((s >= least) & (s > 0)).view(p.shape)
    return found


def overlap(critical: Params) -> Tensor:
    """O (client, client), float64: 1 for the same critical entries, 0 for none in common.

    Examples
    --------
    >>> overlap({"fc1.weight": torch.tensor([[True, True, False], [False, True, True]])})
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    both: Tensor = sum((one := m.flatten(1).float()) @ one.T for m in critical.values())  # type: ignore[assignment]
    both = both.double()
    own = both.diagonal()
    total = own[:, None] + own
    return 1 - (total - 2 * both) / total.clamp(min=1)


def partners(overlaps: Tensor, share: float) -> Tensor:
    """Mixing matrix (client, client) of clients with themselves and those whose overlap reaches the threshold.

    Parameters
    ----------
    overlaps : Tensor (client, client)
    share : float
        t/β: where the threshold lies between the mean of pairs, 0, and their maximum, 1.

    Examples
    --------
    >>> o = torch.tensor([[1.0, 0.6, 0.1], [0.6, 1.0, 0.2], [0.1, 0.2, 1.0]])
    >>> partners(o, 0.5), partners(o, 1.01).equal(torch.eye(3))
    (tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 1.0000]]), True)
    """
    itself = torch.eye(len(overlaps), dtype=torch.bool, device=overlaps.device)
    if len(overlaps) == 1:
        return itself.float()
    pairs = overlaps[~itself]
    least = torch.lerp(pairs.mean(), pairs.max(), share)  # exact at 1
    together = (itself | (overlaps >= least)).float()
    return together / together.sum(1, keepdim=True)


def _judged(net: Net) -> list[str]:
    return [name for name in net.shapes if name not in net.buffers]


def _receive(context: DownloadContext) -> Params:
    """The partners' mean where entries are critical, the server's elsewhere."""
    own, server, shared = context.client_params, context.global_params, context.shared
    return {n: torch.where(m | ~shared[n], own[n], server[n]) for n, m in context.state.clients.items()}
