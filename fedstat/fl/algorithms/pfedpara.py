"""pFedPara: every weight is the Hadamard product of a shared and a personal low-rank part."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.composed import Part, composed, is_kernel, matrices

if TYPE_CHECKING:
    from torch import Tensor


ABOUT = About(
    "pFedPara",
    ("hyeonwoo2022",),
    "W₁ of weights W₁ ⊙ (W₂ + 1), both of low rank, and all other parameters",
    "W₂",
    ("local_train",),
)


def pfedpara(
    *,
    gamma: Annotated[
        float, "γ, position of the rank between the smallest that does not limit weights, 0, and the largest, 1"
    ] = 0.5,
) -> Algorithm:
    """Factor weights as W = W₁ ⊙ (W₂ + 1), share W₁, keep W₂ personal, and train both at once.

    Hyeon-Woo, Ye-Bin and Oh (2022), "FedPara: Low-rank Hadamard product for communication-efficient federated
    learning", ICLR, arXiv:2108.06098, §2.3 (pFedPara). :func:`fedstat.fl.algorithms.pfedpara.hadamard` describes
    weights, ranks and initial parameters. Shared (upload and download): the factors of W₁, biases and normalization;
    the text does not mention the latter two. Personal: the factors of W₂. The mean is weighted by numbers of samples,
    as in FedAvg, on which the paper builds.

    Parameters
    ----------
    gamma : float in [0, 1]
        γ. With 0.5, as in the paper, an MLP of 784, 256 and 10 units sends about 3.4 times fewer values than FedAvg.

    Raises
    ------
    ValueError
        If γ is not in [0, 1].
    """
    check.real("gamma", gamma, low=0, high=1)

    return Algorithm(
        "pfedpara",
        masks.keep_parameters(is_personal),
        settings={"gamma": gamma},
        wrap=lambda net: hadamard(net, gamma),
        about=ABOUT,
    )


def is_personal(name: str) -> bool:
    """Return True if a parameter belongs to W₂."""
    return name.rpartition(".")[2] in SECOND


FIRST, SECOND = ("x1", "y1", "t1"), ("x2", "y2", "t2")
"""Names of the factors of both parts."""


def hadamard(net: Net, gamma: float) -> Net:
    """Compose the weights of a network as W = W₁ ⊙ (W₂ + 1), where W₁ = X₁Y₁ᵀ and W₂ = X₂Y₂ᵀ have low rank R.

    Hyeon-Woo, Ye-Bin and Oh (2022), "FedPara", arXiv:2108.06098, §2 and pFedPara's §2.3. W has rank up to R², which is
    no limit if R² is at least the number of rows or columns. Kernels (O, I, k, l) are
    W = (T₁ ×₁ X₁ ×₂ Y₁) ⊙ (T₂ ×₁ X₂ ×₂ Y₂ + 1) with T (R, R, k, l) (Proposition 3). The rank is
    R = ⌊(1 − γ) r_min + γ r_max⌋. Here r_min is the smallest R that does not limit the rank of W, and r_max the largest
    R for which the factors have no more entries than W. If r_max < r_min, as in small layers, R is r_min, and the
    factors have more entries than W.

    In this package's order of axes, "x1" and "x2" (units, ..., R) belong to the layer's units, "y1" and "y2"
    (inputs, R) to its inputs. An LSTM's gates, and queries, keys and values of attention, count as outputs. Embeddings
    of words and positions are not factored. Entries start from N(0, 2/n), with n the rows of X and Y, and R·k·l for T,
    as in the published code for FedPara; there is no code for pFedPara.

    Parameters
    ----------
    net : Net
    gamma : float in [0, 1]
        γ.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> hadamard(nets.mlp([784, 256]), 0.5).shapes
    {'fc1.x1': (256, 56), 'fc1.y1': (784, 56), 'fc1.x2': (256, 56), 'fc1.y2': (784, 56), 'fc1.bias': (256,)}
    """
    check.real("gamma", gamma, low=0, high=1)
    return composed(net, {name: _part(net.shapes[name], gamma, is_kernel(name)) for name in matrices(net)})


def inner_rank(outputs: int, inputs: int, window: int, gamma: float, *, kernel: bool = False) -> int:
    """Return R of a weight with these numbers of outputs, inputs and entries of its window (1 unless a kernel).

    Examples
    --------
    >>> [inner_rank(256, 784, 1, gamma) for gamma in (0, 0.5, 1)], inner_rank(64, 32, 25, 0.5, kernel=True)
    ([16, 56, 96], 19)
    """
    # A kernel's unfoldings by outputs and by inputs both have ranks up to R².
    r_min = math.isqrt((max if kernel else min)(outputs, inputs) - 1) + 1
    sides, core = outputs + inputs, window if kernel else 0
    r_max = 0
    while 2 * (r_max + 1) * (sides + core * (r_max + 1)) <= outputs * inputs * window:
        r_max += 1
    return max(r_min, math.floor((1 - gamma) * r_min + gamma * r_max + 1e-9))


def _part(shape: tuple[int, ...], gamma: float, kernel: bool) -> Part:
    """Return the part that replaces one weight (O, I, k, l) or (O, ..., I)."""
    units, inputs, *window = shape if kernel else (shape[0], shape[-1])
    middle = () if kernel else shape[1:-1]
    r = inner_rank(units * math.prod(middle), inputs, math.prod(window), gamma, kernel=kernel)
    sizes = {"x": (units, *middle, r), "y": (inputs, r)} | ({"t": (r, r, *window)} if kernel else {})
    shapes = {f"{kind}{i}": size for i in (1, 2) for kind, size in sizes.items()}
    fan = {"x": units * math.prod(middle), "y": inputs, "t": r * math.prod(window)}

    def init(rng: np.random.Generator, _: Tensor) -> Params:
        return {n: torch.from_numpy(rng.normal(0, math.sqrt(2 / fan[n[0]]), s)).float() for n, s in shapes.items()}

    def low(factors: Params, i: int) -> Tensor:
        x, y = factors[f"x{i}"], factors[f"y{i}"]
        if kernel:
            return torch.einsum("cabkl,coa,cib->coikl", factors[f"t{i}"], x, y)
        return torch.bmm(x.flatten(1, -2), y.mT).view(-1, *shape)

    def value(factors: Params) -> Tensor:
        first = low(factors, 1)
        return torch.addcmul(first, first, low(factors, 2))

    def pullback(factors: Params, derivative: Tensor, kinds: Collection[str]) -> Params:
        gradients: Params = {}
        multipliers = {1: low(factors, 2).add_(1), 2: low(factors, 1)}
        for i, multiplier in multipliers.items():
            d = multiplier.mul_(derivative).view(len(derivative), -1, inputs)
            x, y = factors[f"x{i}"], factors[f"y{i}"]
            gradients |= {f"x{i}": torch.bmm(d, y).view_as(x), f"y{i}": torch.bmm(d.mT, x.flatten(1, -2))}
        return {kind: gradients[kind] for kind in kinds}

    return Part(shapes, init, value, None if kernel else pullback, by_unit=("x1", "x2"))
