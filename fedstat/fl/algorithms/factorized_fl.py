"""Factorized-FL: weights are u vᵀ + μ, and every client averages with those whose v is similar to its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from fedstat._utils import check, streams
from fedstat._utils.lazy import functional, torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import (
    About,
    Algorithm,
    AlgorithmState,
    InitContext,
    Mask,
    Measure,
    Phase,
    RoundContext,
    Samples,
    SharedMask,
    Variant,
)
from fedstat.fl.nets import Net, Params, dense
from fedstat.fl.wrappers.composed import Part, composed

if TYPE_CHECKING:
    from torch import Tensor

ALPHA = About(
    "Factorized-FL α",
    ("jeong2022",),
    "u of weights u vᵀ + μ, each client's mean over clients of similar v",
    "v, μ, biases and the output layer",
)
BETA = ALPHA._replace(
    title="Factorized-FL β",
    shared="u, v and sparse μ of weights u vᵀ + μ, each client's mean over clients of similar v",
    personal="the output layer",
)

Matching = Literal["similarity", "random", "worst", "none"]
_DEFAULTS = {"epsilon": 1.0, "tau": 0.0, "at_least": 1, "sparsity": 5e-4}
_OTHERS = 3  # clients that are matched at random, or because they are the worst


def factorized_fl(
    *,
    beta: bool,
    epsilon: Annotated[float, "ε, how much a client's weights follow similarity"] = 1.0,
    tau: Annotated[float, "τ, similarity below which clients are not matched"] = 0.0,
    at_least: Annotated[int, "clients that are matched whatever τ, with the client itself"] = 1,
    sparsity: Annotated[float, "λ, weight of the L1 norm of μ"] = 5e-4,
    rank: Annotated[int, "γ, rank of the product in U Vᵀ + μ"] = 1,
    mu: Annotated[bool, "whether weights have the part μ"] = True,
    matching: Annotated[Matching, "with whom a client averages: similarity, random, worst or none"] = "similarity",
    kernels: Annotated[
        Literal["base", "mixed"], "a kernel's factors: base (F·F by I·O numbers) or mixed (I·F by O·F)"
    ] = "base",
    variant: Variant = "paper",
) -> Algorithm:
    """Weights W = u vᵀ + μ, of which α shares u and β all, averaged with weights softmax(ε σ) of similar clients.

    Jeong and Hwang (2022), "Factorized-FL: personalized federated learning with parameter factorization and similarity
    matching", NeurIPS, arXiv:2202.00270, §4: u ∈ R^I and v ∈ R^O of a dense layer, u ∈ R^{F·F} and v ∈ R^{I·O} of a
    convolution, μ from zero (equations 1–3); σ_i, the cosine similarity of v in the last factorised layer before the
    classifier (4); weights exp(ε σ_i) of clients with σ_i >= τ, own σ = 1 (5); the loss plus λ‖μ‖₁ (6), of which every
    step ends with the proximal operator, ``|μ| − ηλ`` or zero, at the learning rate η of any optimiser.

    α: up, u below the classifier and the one v that is compared; down, u. Private: v, μ, biases, normalisation (of
    these the text says nothing), the classifier. β: up and down, all below the classifier, biases and normalisation
    too, μ as its non-zero entries. Private: the classifier. Other weights than those of dense layers and
    two-dimensional convolutions (embeddings, recurrent layers, attention) are not factorised, and go with the biases.

    Parameters
    ----------
    beta : bool
    epsilon, tau, sparsity : float
        The text has no values. Defaults are the code's for permuted labels; for domains it takes ε = 20, τ = 0.95.
        Clients below τ are left out, as in (4); the sentence after it would give them the weight e⁰.
    at_least : int
        The most similar clients are matched even below τ. The code takes 4 of 20 (domains), 10 (permuted labels), 20.
    rank : int
        1, except in Fig. 7 (h).
    mu : bool
        Fig. 7 (g), without μ.
    matching : {"similarity", "random", "worst", "none"}
        Fig. 7 (g): oneself and three others, drawn in every round or least similar, in place of those above τ.
        ``"none"``: the server's mean with weights n_k / Σ n_k (with β: Factorized-FedAvg).
    kernels : {"base", "mixed"}
        Fig. 7 (k): u ∈ R^{I·F}, v ∈ R^{O·F} in place of the text's own.
    variant : {"paper", "code"}
        ``"code"``: λ has no gradient; clients predict without the entries of ``|μ| < λ``, but train and send them; μ of
        dense layers starts as Xavier does; the F·F × I·O numbers of a kernel become O × I × F × F as they lie in
        memory, so that u scales blocks of output channels; the server mixes in place, one client after the other in
        the round's random order, so that later ones get mixed models of earlier ones; α shares all below the classifier
        but v and μ. Not offered: the classifier that starts anew in every round unless labels are permuted.
        Running statistics that stay with the client are the network's ``statistics="local"``.

    Raises
    ------
    ValueError
        If an argument is out of range, or was changed and has no effect; before the first round, if the network has no
        output layer of its own, no layer with factors below it, or a weight with a side shorter than ``rank``.

    Notes
    -----
    u and v start as in the code, uniform after Xavier; the text says nothing.
    """
    check.choice("matching", matching, ("similarity", "random", "worst", "none"))
    check.choice("kernels", kernels, ("base", "mixed"))
    code = check.choice("variant", variant, ("paper", "code")) == "code"
    check.real("epsilon", epsilon, low=0)
    check.real("tau", tau, low=-1, high=1)
    check.real("sparsity", sparsity, low=0)
    check.integer("at_least", at_least)
    check.integer("rank", rank)
    check.choice("mu", mu, (True, False))
    given = {"epsilon": epsilon, "tau": tau, "at_least": at_least, "sparsity": sparsity}
    _require_effect(given, matching, mu)
    rule = _Rule(matching, epsilon, tau, at_least, in_place=code)
    keeps_mu = mu and sparsity > 0

    def shared(name: str) -> bool:
        kind = name.rpartition(".")[2]
        return beta or (kind not in ("v", "mu") if code else kind == "u")

    def init_mask(context: InitContext) -> SharedMask:
        below = masks.private_layers(context.net, nets.head_layers(context.net), context.device)
        return SharedMask({name: mask if shared(name) else torch.zeros_like(mask) for name, mask in below.items()})

    def upload_mask(net: Net, mask: SharedMask) -> Mask:
        compared = f"{_compared(net)}.v"
        return {
            name: torch.ones_like(entries) if name == compared else entries for name, entries in mask.shared.items()
        }

    return Algorithm(
        f"factorized-fl-{'beta' if beta else 'alpha'}",
        init_mask,
        phases=(Phase(post_step=_shrink(sparsity) if keeps_mu and not code else None),),
        finetune=(Phase(0, sample_weights=_prune(sparsity)),) if keeps_mu and code else (),
        settings=given | {"rank": rank, "mu": mu, "matching": matching, "kernels": kernels, "variant": variant},
        wrap=lambda net: _factorised(net, rank, mu, kernels, code),
        mixing_weights=None if matching == "none" else rule.mixing_weights,
        upload_mask=None if matching == "none" else upload_mask,
        measures={
            "similarity": Measure(_similarity, ("client", "other"), long_name="cosine similarity of v"),
            "similarity_u": Measure(
                lambda context: _similarity(context, "u"), ("client", "other"), {}, "the same of u"
            ),
        },
        sparse=(lambda name: name.endswith(".mu")) if beta and mu else None,
        about=BETA if beta else ALPHA,
    )


def _require_effect(given: dict[str, Any], matching: str, mu: bool) -> None:
    of_matching = {"similarity": (), "none": ("epsilon", "tau", "at_least")}.get(matching, ("tau", "at_least"))
    unused = dict.fromkeys(of_matching, f"with matching={matching!r}") | ({} if mu else {"sparsity": "without mu"})
    for name, why in unused.items():
        if given[name] != _DEFAULTS[name]:
            raise check.NoEffectError(name, f"{why}, but got {name}={given[name]!r}")


# --- factorised weights


def _factorised(net: Net, rank: int, mu: bool, kernels: str, code: bool) -> Net:
    """The network with factors in place of the weights of its dense layers and convolutions."""
    nets.n_features(net)  # has an output layer of its own
    with_factors = [name for name, shape in net.shapes.items() if _has_factors(name, shape)]
    if all(nets.layer_of(name) in nets.head_layers(net) for name in with_factors):
        raise ValueError(
            f"Factorized-FL shares factors of layers below the classifier, but the layers are {[*nets.layers(net)]}, "
            f"and {with_factors} can be factorised. Use local()."
        )
    parts = {name: _part(net.shapes[name], rank, mu, kernels == "mixed", code) for name in with_factors}
    for name, part in parts.items():
        most = min(part.shapes["u"][0], part.shapes["v"][0])
        if rank > most:
            raise ValueError(
                f"rank must be at most {most}, the shorter side of {name!r} as a matrix, of shape {net.shapes[name]}, "
                f"but got {rank}"
            )
    return composed(net, parts)


def _has_factors(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) in (2, 4) and not name.startswith(("embedding", "position"))


def _part(shape: tuple[int, ...], rank: int, mu: bool, mixed: bool, code: bool) -> Part:
    """Factors of a dense weight (output, input) or a kernel (output, input, row, column)."""
    outputs, inputs, *window = shape
    mixed, u_first = mixed and bool(window), code and bool(window) and not mixed
    if mixed:
        rows, columns = outputs * window[0], inputs * window[1]
    else:
        rows, columns = outputs * inputs if window else outputs, math.prod(window) if window else inputs
    # The weight as a matrix of v's rows and u's columns; in the code a kernel's is turned.
    left, right = ("u", "v") if u_first else ("v", "u")
    size = (columns, rows) if u_first else (rows, columns)

    def matrix(w: Tensor) -> Tensor:
        return (w.transpose(2, 3) if mixed else w).reshape(len(w), *size)

    def weight(m: Tensor) -> Tensor:
        return m.view(-1, outputs, window[0], inputs, window[1]).transpose(2, 3) if mixed else m.view(-1, *shape)

    def value(f: Params) -> Tensor:
        sides = f[left], f[right].mT
        return weight(torch.baddbmm(matrix(f["mu"]), *sides) if mu else torch.bmm(*sides))

    def start(rng: np.random.Generator, _: Tensor) -> Params:
        drawn = {kind: _xavier(rng, size) for kind, size in shapes.items() if kind != "mu" or (code and not window)}
        return drawn | ({"mu": torch.zeros(shape)} if mu and "mu" not in drawn else {})

    shapes = {"u": (columns, rank), "v": (rows, rank)} | ({"mu": shape} if mu else {})
    pulled = {left: lambda f, d: matrix(d) @ f[right], right: lambda f, d: matrix(d).mT @ f[left]}
    return Part(shapes, start, value, pulled | ({"mu": lambda _, d: d} if mu else {}), by_unit=("mu",) if mu else ())


def _xavier(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return dense.uniform(rng, {"w": shape}, math.sqrt(6 / sum(shape)))["w"]


def _shrink(sparsity: float) -> Callable[[Params, Params, float, int], None]:
    """The proximal operator of λ‖μ‖₁: exact zeros."""

    def after(params: Params, _: Params, lr: float, __: int) -> None:
        for name, p in params.items():
            if name.endswith(".mu"):
                torch.ops.aten.softshrink.out(p, lr * sparsity, out=p)

    return after


def _prune(sparsity: float) -> Callable[[Net, Params, Samples, AlgorithmState], Tensor]:
    """Set the small entries of μ to zero."""

    def weigh(_: Net, params: Params, samples: Samples, __: AlgorithmState) -> Tensor:
        for name, p in params.items():
            if name.endswith(".mu"):
                p.masked_fill_(p.abs() < sparsity, 0)
        return samples.live

    return weigh


# --- matching


class _Rule(NamedTuple):
    """With whom a client averages, and how much."""

    matching: str
    epsilon: float
    tau: float
    at_least: int
    in_place: bool

    def mixing_weights(self, context: RoundContext) -> Tensor:
        """Row i holds client i's weights (active, active); equations (4) and (5)."""
        similarity = _similarity(context)
        matched = self.matched(context, similarity).fill_diagonal_(True)
        weights = torch.where(matched, self.epsilon * similarity, -math.inf).softmax(1)
        if self.in_place:
            order = streams.generator(context.seed, "order of the server", context.round).permutation(
                np.sort(context.clients)
            )
            weights = _one_after_the_other(weights, [context.clients.tolist().index(c) for c in order])
        return weights.float()

    def matched(self, context: RoundContext, similarity: Tensor) -> Tensor:
        """Whom a client averages with besides itself: bool (active, active)."""
        if self.matching == "similarity":
            nth = similarity.argsort(1, descending=True).argsort(1)
            return (similarity >= self.tau) | (nth < self.at_least)
        if self.matching == "worst":
            return similarity.argsort(1).argsort(1) < _OTHERS
        drawn = torch.zeros_like(similarity, dtype=torch.bool)
        for i, c in enumerate(context.clients):
            others = np.sort(np.delete(context.clients, i))
            three = streams.generator(context.seed, "matching", context.round, int(c)).permutation(others)[:_OTHERS]
            drawn[i] = torch.from_numpy(np.isin(context.clients, three))
        return drawn


def _one_after_the_other(weights: Tensor, order: list[int]) -> Tensor:
    """The mixing matrix of a server that replaces models in this order, each by its weights of those then there.

    y = L y + U x, with L the weights of those before a client: y = (1 − L)⁻¹ U x.
    """
    ordered = weights[order][:, order]
    before, rest = ordered.tril(-1), ordered.triu()
    mixed = torch.linalg.solve_triangular(torch.eye(len(order)).to(before) - before, rest, upper=False)
    found = torch.empty_like(mixed)
    found[np.ix_(order, order)] = mixed
    return found


def _similarity(context: RoundContext, kind: str = "v") -> Tensor:
    """Cosine similarity (active, active) of the active clients' v (or u) before the classifier."""
    own = functional.normalize(context.after[f"{_compared(context.net)}.{kind}"].flatten(1).double())
    return (own @ own.T).clamp(-1, 1).fill_diagonal_(1)


def _compared(net: Net) -> str:
    """The last layer with factors before the classifier."""
    below = [beside[0] for beside in masks.by_depth(net) if beside[0] not in nets.head_layers(net)]
    return [layer for layer in below if f"{layer}.v" in net.shapes][-1]
