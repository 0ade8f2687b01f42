"""Similarity of clients' models, and kernels of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat._utils.lazy import torch
from fedstat.fl.algorithm import RoundContext
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor


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


WIDTHS = (10.0, 15.0, 20.0, 50.0)


def mmd_gradient(h: Tensor, fixed: Tensor, weight: Tensor) -> Tensor:
    """Return the derivative at h of the squared maximum mean discrepancy between two samples of features.

    MMD² = Σ_ij w_i w_j [k(h_i, h_j) + k(g_i, g_j) − 2 k(h_i, g_j)], with w that sums to 1 the biased V-statistic of
    Gretton, Borgwardt, Rasch, Schölkopf and Smola (2012), "A kernel two-sample test", JMLR 13, eq. (5), and
    k(a, b) = Σ_σ exp(−‖a − b‖² / 2σ), σ = 10, 15, 20, 50.

    Parameters
    ----------
    h, fixed : Tensor (client, sample, feature)
    weight : Tensor (client, sample)
        w; 0 for padding.

    Returns
    -------
    Tensor (client, sample, feature)

    Examples
    --------
    >>> h, g, w = torch.tensor([[[1.0], [2.0]]]), torch.zeros(1, 2, 1), torch.full((1, 2), 0.5)
    >>> mmd_gradient(h, g, w).flatten()  # towards g: a descent step lowers h
    tensor([0.3423, 0.2953])
    >>> mmd_gradient(g, g, w).abs().max()
    tensor(0.)
    """
    both = torch.cat([h, fixed], 1)
    norms = both.square().sum(-1)
    square = torch.baddbmm(norms.unsqueeze(1), h, both.mT, alpha=-2).add_(norms[:, : h.shape[1], None]).clamp_(min=0)
    pull = sum((square * (-0.5 / width)).exp_().mul_(1 / width) for width in WIDTHS)
    pull = pull * torch.cat([weight, -weight], 1).unsqueeze(1)  # of sample j on sample i, away from where it is
    towards = torch.baddbmm(h * pull.sum(-1, keepdim=True), pull, both, beta=-1)
    return towards.mul_(2 * weight.unsqueeze(-1))
