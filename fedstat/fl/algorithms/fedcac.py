"""FedCAC: a client's critical entries are averaged over similar clients, other entries over all clients."""

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
    tau: Annotated[float, "τ, proportion of critical entries in every parameter"] = 0.5,
    beta: Annotated[int, "β, round after which critical entries are personal"] = 100,
) -> Algorithm:
    """Average critical entries over clients with similar critical entries, and other entries over all clients.

    Wu, Liu, Niu, Zhu and Tang (2023), "Bold but cautious: Unlocking the potential of personalized federated learning
    through cautiously aggressive collaboration", ICCV, arXiv:2309.11103, §3 and Algorithm 1. After local training from
    θ to θ', the sensitivity of an entry is abs(θ' (θ' − θ)). In every parameter, the proportion τ of entries with the
    largest sensitivity is critical: the mask M. The overlap of clients i and j is
    O_ij = 1 − ‖M_i − M_j‖₁ / (‖M_i‖₁ + ‖M_j‖₁). In round t, from 1, clients with O_ij ≥ mean + (t/β) (max − mean) are
    partners, with mean and maximum over all pairs. In the entries M_i, client i's next model is the mean of itself and
    its partners; in the other entries it is the mean of all clients.

    Upload: all entries, and M_i (one bit per entry, not counted). Download: all entries. A client that is not selected
    keeps M_i and its values of these entries.

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
    As in the published code, the mean of partners is unweighted, and the mean of all clients is weighted by numbers of
    samples. Entries that did not change are not critical, even if they are more than a proportion of 1 − τ. Running
    statistics of batch normalization are never critical; here they get the partners' mean. M_i and M_j have equally
    many entries unless some did not change; the published code then divides by 2 ‖M_i‖₁, which is not symmetric. With
    partial participation, overlaps are between the round's selected clients. ``mixing/weight`` of a store holds every
    round's partners.
    """
    check.real("tau", tau, low=0, high=1)
    check.integer("beta", beta)

    def critical(context: RoundContext) -> Params:
        return critical_entries(context.net, context.before, context.after, tau)

    def init_state(context: InitContext) -> AlgorithmState:
        net, clients, device = context.net, len(context.sizes), context.device
        names = _trained_parameters(net)
        return AlgorithmState({n: torch.zeros(clients, *net.shapes[n], dtype=torch.bool, device=device) for n in names})

    return Algorithm(
        "fedcac",
        settings={"tau": tau, "beta": beta},
        mixing_weights=lambda context: partners(overlap(critical(context)), (context.round + 1) / beta),
        init_state=init_state,
        update_state=lambda context: AlgorithmState(critical(context)),
        on_download=_on_download,
        about=ABOUT,
    )


def critical_entries(net: Net, before: Params, after: Params, tau: float) -> Params:
    """Find the entries of largest abs(θ' (θ' − θ)) in every parameter that can train: bool (client, *shape)."""
    critical: Params = {}
    for name in _trained_parameters(net):
        p = after[name]
        s = (p * (p - before[name])).abs_().flatten(1)
        number = int(tau * s.shape[1] + 1e-9)  # 0.29·100 is 28.999...
        threshold = s.kthvalue(s.shape[1] - number + 1, 1, keepdim=True).values if number else torch.inf
        critical[name] = ((s >= threshold) & (s > 0)).view(p.shape)
    return critical


def overlap(critical: Params) -> Tensor:
    """Return the overlap O (client, client), float64: 1 for equal critical entries, 0 for disjoint ones.

    Examples
    --------
    >>> overlap({"fc1.weight": torch.tensor([[True, True, False], [False, True, True]])})
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    flat = (mask.flatten(1).float() for mask in critical.values())
    n_both: Tensor = sum(mask @ mask.T for mask in flat)  # type: ignore[assignment]
    n_both = n_both.double()
    n_critical = n_both.diagonal()
    total = n_critical[:, None] + n_critical
    return 1 - (total - 2 * n_both) / total.clamp(min=1)


def partners(overlaps: Tensor, share: float) -> Tensor:
    """Return the mixing matrix (client, client): equal weights of a client and its partners.

    Parameters
    ----------
    overlaps : Tensor (client, client)
    share : float
        t/β, the position of the threshold of overlap between the mean over pairs (0) and the maximum (1).

    Examples
    --------
    >>> o = torch.tensor([[1.0, 0.6, 0.1], [0.6, 1.0, 0.2], [0.1, 0.2, 1.0]])
    >>> partners(o, 0.5), partners(o, 1.01).equal(torch.eye(3))
    (tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 1.0000]]), True)
    """
    identity = torch.eye(len(overlaps), dtype=torch.bool, device=overlaps.device)
    if len(overlaps) == 1:
        return identity.float()
    pairs = overlaps[~identity]
    threshold = torch.lerp(pairs.mean(), pairs.max(), share)  # exact at 1
    matched = (identity | (overlaps >= threshold)).float()
    return matched / matched.sum(1, keepdim=True)


def _trained_parameters(net: Net) -> list[str]:
    return [name for name in net.shapes if name not in net.buffers]


def _on_download(context: DownloadContext) -> Params:
    """Return the partners' mean in critical entries, the global model in other shared entries."""
    client_params, global_params, shared = context.client_params, context.global_params, context.shared
    return {
        n: torch.where(mask | ~shared[n], client_params[n], global_params[n])
        for n, mask in context.state.clients.items()
    }
