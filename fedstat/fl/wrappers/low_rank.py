"""Networks whose weights are sums of a full and a low-rank part, and algorithms on them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.algorithm import Algorithm, Variant
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.composed import Part, composed

if TYPE_CHECKING:
    from torch import Tensor

LinearRank = Annotated[float, "rank R_l of the low-rank part of dense layers, as a proportion of their smaller side"]
ConvRank = Annotated[
    float, "rank R_c of the low-rank part of convolutions, as a proportion of their smaller number of channels"
]
FACTORS = ("left", "right")
_TABLES = ("embedding", "position")
_KERNELS = ("conv", "shortcut")


def low_rank(algorithm: Algorithm, *, rank_linear: LinearRank = 0.6, rank_conv: ConvRank = 0.6) -> Algorithm:
    """Add a low-rank part to every weight of the network, and train both parts at once.

    Wu, Liu, Niu, Wang, Tang, Zhu and Su (2024), "Decoupling general and personalized knowledge in federated learning
    via additive and low-rank decomposition", ACM MM, Table 4 ("w/ Low-Rank"), the control of FedDecomp's capacity.
    Both parts of a weight are shared or personal, uploaded and downloaded, as the weight in ``algorithm``.

    Raises
    ------
    ValueError
        If a rank is not in (0, 1].

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedavg
    >>> low_rank(fedavg()).name
    'fedavg-low-rank'
    """
    ranks = require_ranks(rank_linear, rank_conv)
    title = f"{algorithm.about.title or algorithm.name}, low rank"

    def wrap(net: Net) -> Net:
        net = decomposed(net, *ranks)
        return algorithm.wrap(net) if algorithm.wrap else net

    return algorithm._replace(
        name=f"{algorithm.name}-low-rank",
        wrap=wrap,
        settings={**algorithm.settings, "rank_linear": rank_linear, "rank_conv": rank_conv},
        about=algorithm.about.citing("wu2024")._replace(title=title),
    )


def require_ranks(rank_linear: float, rank_conv: float) -> tuple[float, float]:
    """Return both ranks, or raise ValueError unless they are in (0, 1]."""
    check.real("rank_linear", rank_linear, low=0, high=1, open_low=True)
    check.real("rank_conv", rank_conv, low=0, high=1, open_low=True)
    return rank_linear, rank_conv


def decomposed(net: Net, rank_linear: float, rank_conv: float, variant: Variant = "paper") -> Net:
    """Decompose the weights of a network as σ + τ, τ of low rank; σ starts as the weight and τ as 0.

    Wu et al. (2024), §3.3. τ = BA of a dense layer with I inputs and O outputs has rank max(1, ⌊R_l·min(I, O)⌋). A
    convolution with K×K kernels is an (I·K) × (O·K) matrix with entries ((i, k), (o, l)) = W[o, i, k, l]; its τ has
    rank max(1, ⌊R_c·min(I, O)⌋)·K. In this package's order of axes the factors are "left" = Aᵀ (O, ..., r), whose axis
    0 is the layer's units, and "right" = Bᵀ (r, I·K). An LSTM's gates, and queries, keys and values of attention, count
    as outputs. Embeddings of words and positions are not decomposed (appendix B).

    The text does not give the standard deviation of A. Here it is 1/√r, so that E[AᵀA] = I: a first small step of B
    then changes W as much as an equal step of σ.

    Parameters
    ----------
    net : Net
    rank_linear, rank_conv : float
        R_l and R_c, in (0, 1].
    variant : {"paper", "code"}, default "paper"
        "code", as in the published code: the factor at the inputs is drawn from U(−1/√n, 1/√n) with n its number of
        columns; the factor at the outputs is zero; τ is divided by its rank (without K). A convolution has rank
        max(1, ⌊R_c·O⌋)·K, and its matrix (O·K, I·K) is cut into kernels in the order of memory.
    """
    parts = {
        name: _part(net.shapes[name], rank_conv if is_kernel(name) else rank_linear, is_kernel(name), variant)
        for name in matrices(net)
    }
    return composed(net, parts)


def matrices(net: Net) -> list[str]:
    """Return the weights that can be factored: all but embeddings of words and positions."""
    return [
        name
        for name, shape in net.shapes.items()
        if name.rpartition(".")[2] == "weight"
        and name not in net.buffers
        and len(shape) > 1
        and not _has(name, _TABLES)
    ]


def is_kernel(weight: str) -> bool:
    """Return True for the weight of a convolution."""
    return _has(weight, _KERNELS)


def _has(weight: str, kinds: tuple[str, ...]) -> bool:
    """Return True if a weight's layer, or the layer of a mixture's component, is of one of these kinds."""
    return nets.layer_of(weight).rpartition("_")[2].startswith(kinds)


def _part(shape: tuple[int, ...], share: float, kernel: bool, variant: Variant) -> Part:
    """Return the part that replaces one weight (O, I, k, l), (O, I) or (O, gate, I)."""
    units, inputs, *window = shape if kernel else (shape[0], shape[-1])
    middle = tuple(window[1:] if kernel else shape[1:-1])  # axes of "left" between units and rank
    side = units if kernel and variant == "code" else min(inputs, units * (1 if kernel else math.prod(middle)))
    base_rank = max(1, math.floor(share * side + 1e-9))  # 0.29·100 is 28.999...
    rank, columns = base_rank * (window[0] if kernel else 1), inputs * (window[0] if kernel else 1)
    shapes = {"weight": shape, "left": (units, *middle, rank), "right": (rank, columns)}

    def init(rng: np.random.Generator, weight: Tensor) -> Params:
        if variant == "code":
            drawn, values = "right", rng.uniform(-1, 1, shapes["right"]) / math.sqrt(columns)
        else:
            drawn, values = "left", rng.normal(0, 1 / math.sqrt(rank), shapes["left"])
        zeros = {kind: torch.zeros(shapes[kind]) for kind in FACTORS}
        return zeros | {"weight": weight, drawn: torch.from_numpy(values).float()}

    return Part(
        shapes,
        init,
        partial(
            _product,
            shape=shape,
            in_memory=variant == "code" or not kernel,
            scale=1 / base_rank if variant == "code" else 1.0,
        ),
        by_unit=("left",),
        plus="weight",
        thin=variant == "paper" and len(shape) == 2,
    )


def _product(factors: Params, *, shape: tuple[int, ...], in_memory: bool, scale: float) -> Tensor:
    """Return scale·left·right (client, *shape), of a product in the order of memory or with axes ((o, l), (i, k))."""
    product = torch.bmm(factors["left"].flatten(1, -2), factors["right"])
    if scale != 1:
        product = product * scale
    if in_memory:
        return product.view(-1, *shape)
    outputs, inputs, rows, *columns = shape
    return product.view(-1, outputs, math.prod(columns), inputs, rows).permute(0, 1, 3, 4, 2).reshape(-1, *shape)
