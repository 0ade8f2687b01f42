"""How near clients' models or updates are to each other, over all their parameters together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat._later import torch
from fedstat.fl.algorithm import RoundContext
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor


def shared_part(context: RoundContext, params: Params, *, statistics: bool = False) -> Params:
    """Parameters with shared entries, with running statistics only if asked for."""
    shared = {name: p for name, p in params.items() if bool(context.mask.shared[name].any())}
    return {name: p for name, p in shared.items() if statistics or name not in context.net.buffers}


def products(params: Params) -> Tensor:
    """Inner products (client, client), in float64, of clients' parameters (client, ...) as one vector each.

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
    """Squared Euclidean distances (client, client), in float64."""
    inner = products(params)
    square = inner.diagonal()
    return (square[:, None] + square - 2 * inner).clamp(min=0).fill_diagonal_(0)


def cosines(params: Params) -> Tensor:
    """Cosine similarities (client, client), in float64; 0 with a vector of zeros, 1 of every vector with itself."""
    inner = products(params)
    norm = inner.diagonal().sqrt()
    floor = torch.finfo(norm.dtype).tiny
    return (inner / (norm[:, None] * norm).clamp(min=floor)).clamp(-1, 1).fill_diagonal_(1)
