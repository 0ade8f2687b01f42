"""Factorized-FL: weights are u vᵀ + μ, and every client averages with clients of similar v."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

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
_OF_MATCHING = check.EffectIf("matching", lambda matching: matching != "none")
_OF_SIMILARITY = check.EffectIf("matching", lambda matching: matching == "similarity")
_N_PARTNERS = 3  # with matching="random" or "worst"


@check.effective
def factorized_fl(
    *,
    beta: bool,
    epsilon: Annotated[float, "ε, factor of similarity in the weights of the mean", _OF_MATCHING] = 1.0,
    tau: Annotated[float, "τ, similarity below which clients are not matched", _OF_SIMILARITY] = 0.0,
    at_least: Annotated[int, "clients that are matched for any τ, including the client itself", _OF_SIMILARITY] = 1,
    sparsity: Annotated[float, "λ, weight of the L1 norm of μ", check.EffectIf("mu", bool)] = 5e-4,
    rank: Annotated[int, "γ, rank of the product in U Vᵀ + μ"] = 1,
    mu: Annotated[bool, "add the part μ to weights"] = True,
    matching: Annotated[Matching, "clients to average with: similarity, random, worst or none"] = "similarity",
    kernels: Annotated[
        Literal["base", "mixed"], "a kernel's factors: base (F·F by I·O numbers) or mixed (I·F by O·F)"
    ] = "base",
    variant: Variant = "paper",
) -> Algorithm:
    """Factor weights as u vᵀ + μ and average factors over clients with weights softmax(ε σ), σ their similarity.

    Jeong and Hwang (2022), "Factorized-FL: personalized federated learning with parameter factorization and similarity
    matching", NeurIPS, arXiv:2202.00270, §4:

    - A dense layer has u ∈ R^I and v ∈ R^O; a convolution has u ∈ R^{F·F} and v ∈ R^{I·O}; μ starts from zero
      (equations 1–3).
    - σ_i is the cosine similarity of v in the last factored layer before the classifier (4).
    - A client averages with the clients of σ_i >= τ, with weights exp(ε σ_i); for itself σ = 1 (5).
    - The loss has the term λ‖μ‖₁ (6). Every step ends with its proximal operator, ``|μ| − ηλ`` or zero, with the
      learning rate η of any optimizer.

    α shares u below the classifier; clients also upload the v that is compared. Personal: v, μ, biases, normalization
    (the text does not mention the latter two) and the classifier. β shares all parameters below the classifier,
    including biases and normalization; of μ the non-zero entries are sent. Personal: the classifier. Weights of
    embeddings, recurrent layers and attention are not factored, and are treated as biases.

    Parameters
    ----------
    beta : bool
        True: Factorized-FL β; False: α.
    epsilon, tau, sparsity : float
        The text gives no values. Defaults are the code's for permuted labels; for domains it uses ε = 20, τ = 0.95.
        Clients below τ are excluded, as in (4); the sentence after (4) would give them the weight e⁰.
    at_least : int
        Number of most similar clients that are matched even below τ. Of 20 clients, the code uses 4 (domains), 10
        (permuted labels) and 20.
    rank : int
        1, except in Fig. 7 (h).
    mu : bool
        False: Fig. 7 (g), without μ.
    matching : {"similarity", "random", "worst", "none"}
        "random" and "worst" (Fig. 7 (g)): the client averages with itself and three others, drawn in every round or
        least similar, in place of clients above τ. "none": all clients get the mean with weights n_k / Σ n_k (with β:
        Factorized-FedAvg).
    kernels : {"base", "mixed"}
        "mixed" (Fig. 7 (k)): u ∈ R^{I·F} and v ∈ R^{O·F} of a convolution.
    variant : {"paper", "code"}
        ``"code"`` does what the authors' published code does:

        - λ has no gradient. Clients predict without entries of ``|μ| < λ``, but train and send them.
        - μ of dense layers starts from Xavier's initial values.
        - The F·F × I·O numbers of a kernel become O × I × F × F in the order of memory, so that u scales blocks of
          output channels.
        - The server replaces models one after the other, in the round's random order. Later clients therefore get
          mixed models of earlier clients.
        - α shares all parameters below the classifier except v and μ.

        Not offered: a classifier that starts anew in every round unless labels are permuted. The code's running
        statistics, which stay with the client, are the network's ``statistics="local"``.

    Raises
    ------
    ValueError
        If an argument is out of range, or was changed and has no effect; before the first round, if the network has no
        single output layer, no layer with factors below it, or a weight with a side shorter than ``rank``.

    Notes
    -----
    u and v start as in the code, from Xavier's uniform distribution; the text does not say how.
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
    numbers = {"epsilon": epsilon, "tau": tau, "at_least": at_least, "sparsity": sparsity}
    rule = _Rule(matching, epsilon, tau, at_least, in_place=code)
    is_sparse = mu and sparsity > 0

    def is_shared(name: str) -> bool:
        kind = name.rpartition(".")[2]
        return beta or (kind not in ("v", "mu") if code else kind == "u")

    def init_mask(context: InitContext) -> SharedMask:
        below = masks.share_all_but(context.net, nets.head_layers(context.net), context.device)
        return SharedMask({name: mask if is_shared(name) else torch.zeros_like(mask) for name, mask in below.items()})

    def upload_mask(net: Net, mask: SharedMask) -> Mask:
        compared = f"{_compared_layer(net)}.v"
        return {
            name: torch.ones_like(entries) if name == compared else entries for name, entries in mask.shared.items()
        }

    return Algorithm(
        f"factorized-fl-{'beta' if beta else 'alpha'}",
        init_mask,
        phases=(Phase(post_step=_shrink(sparsity) if is_sparse and not code else None),),
        finetune=(Phase(0, on_phase_start=_prune(sparsity)),) if is_sparse and code else (),
        settings=numbers | {"rank": rank, "mu": mu, "matching": matching, "kernels": kernels, "variant": variant},
        wrap=lambda net: _with_factors(net, rank, mu, kernels, code),
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


# --- factored weights


def _with_factors(net: Net, rank: int, mu: bool, kernels: str, code: bool) -> Net:
    """Return the network with factors in place of the weights of its dense layers and convolutions."""
    nets.n_features(net)  # raises without a single output layer
    names = [name for name, shape in net.shapes.items() if _has_factors(name, shape)]
    if all(nets.layer_of(name) in nets.head_layers(net) for name in names):
        raise ValueError(
            f"Factorized-FL shares factors of layers below the classifier, but of the layers {[*nets.layers(net)]} "
            f"only the weights {names} can be factored. Use local()."
        )
    parts = {name: _part(net.shapes[name], rank, mu, kernels == "mixed", code) for name in names}
    for name, part in parts.items():
        maximum = min(part.shapes["u"][0], part.shapes["v"][0])
        if rank > maximum:
            raise ValueError(
                f"rank must be at most {maximum}, the shorter side of {name!r} as a matrix, of shape "
                f"{net.shapes[name]}, but got {rank}"
            )
    return composed(net, parts)


def _has_factors(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) in (2, 4) and not name.startswith(("embedding", "position"))


def _part(shape: tuple[int, ...], rank: int, mu: bool, mixed: bool, code: bool) -> Part:
    """Return the factors of a dense weight (output, input) or a kernel (output, input, row, column)."""
    outputs, inputs, *window = shape
    mixed, u_first = mixed and bool(window), code and bool(window) and not mixed
    if mixed:
        rows, columns = outputs * window[0], inputs * window[1]
    else:
        rows, columns = outputs * inputs if window else outputs, math.prod(window) if window else inputs
    # The weight is a matrix of v's rows and u's columns; the published code transposes a kernel's matrix.
    of_rows, of_columns = ("u", "v") if u_first else ("v", "u")
    size = (columns, rows) if u_first else (rows, columns)

    def matrix(w: Tensor) -> Tensor:
        return (w.transpose(2, 3) if mixed else w).reshape(len(w), *size)

    def weight(m: Tensor) -> Tensor:
        return m.view(-1, outputs, window[0], inputs, window[1]).transpose(2, 3) if mixed else m.view(-1, *shape)

    def value(f: Params) -> Tensor:
        sides = f[of_rows], f[of_columns].mT
        return weight(torch.baddbmm(matrix(f["mu"]), *sides) if mu else torch.bmm(*sides))

    def init(rng: np.random.Generator, _: Tensor) -> Params:
        drawn = {kind: _xavier(rng, size) for kind, size in shapes.items() if kind != "mu" or (code and not window)}
        return drawn | ({"mu": torch.zeros(shape)} if mu and "mu" not in drawn else {})

    shapes = {"u": (columns, rank), "v": (rows, rank)} | ({"mu": shape} if mu else {})
    pullback = {of_rows: lambda f, d: matrix(d) @ f[of_columns], of_columns: lambda f, d: matrix(d).mT @ f[of_rows]}
    return Part(shapes, init, value, pullback | ({"mu": lambda _, d: d} if mu else {}), by_unit=("mu",) if mu else ())


def _xavier(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return dense.uniform(rng, {"w": shape}, math.sqrt(6 / sum(shape)))["w"]


def _shrink(sparsity: float) -> Callable[[Params, Params, float, int], None]:
    """Return the proximal operator of λ‖μ‖₁ as a ``post_step``; it gives exact zeros."""

    def post_step(params: Params, _: Params, lr: float, __: int) -> None:
        for name, p in params.items():
            if name.endswith(".mu"):
                torch.ops.aten.softshrink.out(p, lr * sparsity, out=p)

    return post_step


def _prune(sparsity: float) -> Callable[[Net, Params, Samples, AlgorithmState], None]:
    """Return an ``on_phase_start`` hook that sets the small entries of μ to zero."""

    def on_phase_start(_: Net, params: Params, __: Samples, ___: AlgorithmState) -> None:
        for name, p in params.items():
            if name.endswith(".mu"):
                p.masked_fill_(p.abs() < sparsity, 0)

    return on_phase_start


# --- matching


class _Rule(NamedTuple):
    """Rule by which clients are matched, and the weights of their means."""

    matching: str
    epsilon: float
    tau: float
    at_least: int
    in_place: bool

    def mixing_weights(self, context: RoundContext) -> Tensor:
        """Return the mixing matrix of equations (4) and (5): row i holds client i's weights (client, client)."""
        similarity = _similarity(context)
        matched = self.matched(context, similarity).fill_diagonal_(True)
        weights = torch.where(matched, self.epsilon * similarity, -math.inf).softmax(1)
        if self.in_place:
            order = streams.generator(context.seed, "order of the server", context.round).permutation(
                np.sort(context.clients)
            )
            weights = _mix_in_place(weights, [context.clients.tolist().index(c) for c in order])
        return weights.float()

    def matched(self, context: RoundContext, similarity: Tensor) -> Tensor:
        """Return the partners of each client as a bool (client, client); a client's own entry has no meaning."""
        if self.matching == "similarity":
            rank = similarity.argsort(1, descending=True).argsort(1)
            return (similarity >= self.tau) | (rank < self.at_least)
        if self.matching == "worst":
            return similarity.argsort(1).argsort(1) < _N_PARTNERS
        drawn = torch.zeros_like(similarity, dtype=torch.bool)
        for i, c in enumerate(context.clients):
            candidates = np.sort(np.delete(context.clients, i))
            rng = streams.generator(context.seed, "matching", context.round, int(c))
            partners = rng.permutation(candidates)[:_N_PARTNERS]
            drawn[i] = torch.from_numpy(np.isin(context.clients, partners))
        return drawn


def _mix_in_place(weights: Tensor, order: list[int]) -> Tensor:
    """Return the mixing matrix of a server that replaces one model after the other, in this order.

    A client's weights then apply to the new models y of the clients before it and to the old models x of the others:
    y = L y + U x with L the weights of the clients before, hence y = (1 − L)⁻¹ U x.
    """
    ordered = weights[order][:, order]
    before, rest = ordered.tril(-1), ordered.triu()
    mixed = torch.linalg.solve_triangular(torch.eye(len(order)).to(before) - before, rest, upper=False)
    mixing = torch.empty_like(mixed)
    mixing[np.ix_(order, order)] = mixed
    return mixing


def _similarity(context: RoundContext, kind: str = "v") -> Tensor:
    """Return the cosine similarity (client, client) of the selected clients' v (or u) before the classifier."""
    unit_vectors = functional.normalize(context.after[f"{_compared_layer(context.net)}.{kind}"].flatten(1).double())
    return (unit_vectors @ unit_vectors.T).clamp(-1, 1).fill_diagonal_(1)


def _compared_layer(net: Net) -> str:
    """Return the last layer with factors before the classifier."""
    below = [layers[0] for layers in masks.by_depth(net) if layers[0] not in nets.head_layers(net)]
    return [layer for layer in below if f"{layer}.v" in net.shapes][-1]
