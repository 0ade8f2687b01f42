"""Weights that are made of factors."""

from __future__ import annotations

import math

import torch

from fedstat.fl.wrappers.composed import Part, composed

RANK = 2


def low_rank(shape, scale=0.3):
    """W = σ + BA, with σ the weight itself; a kernel's rows are its channels."""
    rows, columns = shape[0], math.prod(shape[1:])
    start = lambda rng, size: torch.from_numpy(rng.normal(0, scale, size)).float()  # noqa: E731
    return Part(
        {"weight": shape, "b": (rows, RANK), "a": (RANK, columns)},
        lambda rng, w: {"weight": w, "b": torch.zeros(rows, RANK), "a": start(rng, (RANK, columns))},
        lambda f: f["weight"] + (f["b"] @ f["a"]).view(f["weight"].shape),
        {
            "weight": lambda _, d: d,
            "b": lambda f, d: d.flatten(2) @ f["a"].mT,
            "a": lambda f, d: f["b"].mT @ d.flatten(2),
        },
        by_unit=("b",),
    )


def outer(shape):
    """W = u vᵀ + μ."""
    return Part(
        {"u": shape[:1], "v": (math.prod(shape[1:]),), "mu": shape},
        lambda _, w: {"u": torch.ones(shape[0]), "v": torch.zeros(math.prod(shape[1:])), "mu": w},
        lambda f: (f["u"][:, :, None] * f["v"][:, None]).view(f["mu"].shape) + f["mu"],
        {
            "u": lambda f, d: torch.einsum("cij,cj->ci", d.flatten(2), f["v"]),
            "v": lambda f, d: torch.einsum("cij,ci->cj", d.flatten(2), f["u"]),
            "mu": lambda _, d: d,
        },
        by_unit=("u", "mu"),
    )


def hadamard(shape):
    """W = X1Y1 ∘ X2Y2, differentiated by autograd."""
    each = {"x1": (shape[0], RANK), "y1": (RANK, shape[1]), "x2": (shape[0], RANK), "y2": (RANK, shape[1])}
    return Part(
        each,
        lambda rng, _: {n: torch.from_numpy(rng.normal(size=s)).float() for n, s in each.items()},
        lambda f: (f["x1"] @ f["y1"]) * (f["x2"] @ f["y2"]),
        by_unit=("x1", "x2"),
    )


def everywhere(make, net):
    return composed(net, {name: make(shape) for name, shape in net.shapes.items() if name.endswith(".weight")})
