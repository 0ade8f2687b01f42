"""pFedGate: every client's gating layer makes a sparse model of the shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, BatchGradient, Phase, Samples
from fedstat.fl.nets import Gradient, Net, Params, dense

if TYPE_CHECKING:
    from torch import Tensor


ABOUT = About(
    "pFedGate",
    ("chen2023",),
    "everything that is gated",
    "a gating layer, and the blocks of the shared parameters that it opens",
    ("local_train",),
)


def pfedgate(
    *,
    sparsity: Annotated[float, "s, largest share of entries that a client's sparse model may have"] = 0.5,
    blocks: Annotated[int, "blocks into which every parameter is cut"] = 5,
    gate_rate: Annotated[float, "learning rate of the gating layer, as a multiple of the local one"] = 1.0,
) -> Algorithm:
    """A client's model is θ ⊙ g: its own gating layer opens blocks of the shared θ, as many as its resources allow.

    Chen, Yao, Gao, Ding and Li (2023), "Efficient personalized federated learning via sparse model-adaptation", ICML,
    arXiv:2305.02776, §4 and Algorithm 1. For a batch, the gating layer gives every block a weight in (0, 1); blocks are
    chosen by these as in a knapsack of s times all entries, and the others are 0. θ and the gating layer are trained at
    once, the latter straight through the choice. See :func:`fedstat.fl.algorithms.pfedgate.gated`.

    Up and down: θ, averaged with weights by numbers of samples. Private: the gating layer. The paper counts the
    bytes of open blocks alone; here all of θ is counted, as every batch opens blocks of its own.

    Parameters
    ----------
    sparsity : float in (0, 1]
        s; 1 opens all blocks, each times its weight.
    blocks : int >= 1
        The published commands take 5.
    gate_rate : float > 0
        Multiplies the gating layer's gradients, which for SGD is a learning rate of its own; Adam does not see it.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, if the network's number of inputs is not known, or the
        first blocks of all parameters, which always stay, have more than the share s of all entries.

    Notes
    -----
    Choices: both normalisations of the gating layer are layer normalisation, which any network's inputs have (the
    paper's switchable normalisation mixes it with those by channel and by batch; the published code normalises the
    outputs by batch); the greedy choice goes by weight over all parameters, as the code's, which takes dense and other
    layers separately; of every parameter the first block stays, as there; blocks that are closed receive the straight
    gradient too, so that they may open, which the code leaves out. A client predicts with the gates of all its training
    samples after local training, not of the samples to predict, so that a prediction does not depend on others; before
    it has trained, with θ. ``gate.open`` has these gates, and where they are 0.
    """
    check.real("sparsity", sparsity, low=0, high=1, open_low=True)
    check.integer("blocks", blocks)
    check.real("gate_rate", gate_rate, low=0, open_low=True)

    def faster(gradient: BatchGradient, params: Params, _: float) -> Params:
        found = gradient(params)
        return {name: p.mul_(gate_rate) if nets.layer_of(name) == GATE else p for name, p in found.items()}

    def renew(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> Tensor:
        with torch.no_grad():
            params[OPEN].copy_(renewed(net, params, samples.x, samples.live, sparsity, blocks))
        return samples.y

    return Algorithm(
        "pfedgate",
        masks.keep_layers(lambda _: [GATE]),
        phases=(Phase(gradient=None if gate_rate == 1 else faster), Phase(0, sample_weights=renew)),
        settings={"sparsity": sparsity, "blocks": blocks, "gate_rate": gate_rate},
        wrap=lambda net: gated(net, sparsity, blocks),
        about=ABOUT,
    )


GATE = "gate"
OPEN = f"{GATE}.open"
_TOKENS = "embedding.weight"


class Blocks(NamedTuple):
    """How a parameter's entries, in the order of memory, are cut into blocks.

    Attributes
    ----------
    first, number : int
        Among the blocks of all parameters, the place of its first one, and how many it has.
    size : int
        Entries of each but the last, which may have fewer.
    entries : int
    """

    first: int
    number: int
    size: int
    entries: int

    @property
    def of(self) -> slice:
        """Its blocks among all."""
        return slice(self.first, self.first + self.number)

    @property
    def sizes(self) -> list[int]:
        """Entries of each block."""
        return [self.size] * (self.number - 1) + [self.entries - self.size * (self.number - 1)]

    def times(self, p: Tensor, g: Tensor) -> Tensor:
        """The parameter (client, ...) times its gates (client, number)."""
        if self.size * self.number == self.entries:
            return (p.view(len(p), self.number, self.size) * g.unsqueeze(-1)).view(p.shape)
        return p * g.repeat_interleave(self.size, 1)[:, : self.entries].view(p.shape)

    def sums(self, p: Tensor) -> Tensor:
        """Sums (client, number) of its entries in each block."""
        flat = functional.pad(p.flatten(1), (0, self.size * self.number - self.entries))
        return flat.view(len(p), self.number, self.size).sum(-1)


def cut(shapes: Mapping[str, tuple[int, ...]], number: int) -> dict[str, Blocks]:
    """Blocks of every parameter: as many as ``number``, or fewer if it has fewer entries.

    Examples
    --------
    >>> cut({"fc1.weight": (5, 5), "fc1.bias": (5,)}, 10)["fc1.weight"].sizes
    [3, 3, 3, 3, 3, 3, 3, 3, 1]
    """
    found: dict[str, Blocks] = {}
    first = 0
    for name, shape in shapes.items():
        entries = int(np.prod(shape))
        size = -(-entries // min(number, entries))
        found[name] = Blocks(first, -(-entries // size), size, entries)
        first += found[name].number
    return found


def kept(scores: Tensor, blocks: Mapping[str, Blocks], sparsity: float) -> Tensor:
    """Which blocks (client, block) stay: the first of every parameter, then by descending score those that still fit.

    The greedy solution of the knapsack problem: the largest sum of scores of blocks that together have no more than
    the share ``sparsity`` of all entries.

    Raises
    ------
    ValueError
        If the first blocks alone have more.
    """
    if sparsity == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    sizes = torch.tensor([n for b in blocks.values() for n in b.sizes], device=scores.device)
    always = torch.zeros(len(sizes), dtype=torch.bool, device=scores.device)
    always[[b.first for b in blocks.values()]] = True
    left = int(sparsity * int(sizes.sum()) + 1e-9) - int(sizes[always].sum())
    if left < 0:
        least = int(sizes[always].sum()) / int(sizes.sum())
        raise ValueError(
            f"sparsity={sparsity:g} is too small: the first block of every parameter always stays, and these have "
            f"{least:.3g} of all entries. Raise it, or take more blocks."
        )
    others = (~always).nonzero().squeeze(1)
    order = others[scores[:, others].argsort(dim=1, descending=True, stable=True)]
    room = torch.full((len(scores),), left, device=scores.device)
    fits = []
    for size in sizes[order].unbind(1):
        fits.append(size <= room)
        room = room - size * fits[-1]
    found = always.repeat(len(scores), 1)
    return found.scatter_(1, order, torch.stack(fits, 1)) if fits else found


def gated(net: Net, sparsity: float, blocks: int) -> Net:
    """Network of parameters θ ⊙ g, with one gate for every block of θ.

    In training the gates follow from the batch: g = m if the block stays (:func:`kept`), else 0, where m is the mean of
    sigmoid(LayerNorm(A LayerNorm(x) + b)) over its samples x; texts enter by the mean of their tokens' vectors. With
    g = m k, k being 0 or 1, derivatives pass straight through the choice: dk/dm = 1 and so dg/dm = k + m. In evaluation
    the gates are the buffer ``gate.open``, which the method sets.

    Parameters
    ----------
    net : Net
    sparsity : float in (0, 1]
    blocks : int

    Returns
    -------
    Net
        With a further layer ``gate``, whose units are the blocks: A, b, scale and shift of the second normalisation,
        and ``gate.open``, 1 at the start.

    Raises
    ------
    ValueError
        If the number of inputs is not known, the network is composed of factors, or the sparsity cannot be reached.
    """
    nets.require_uncomposed(net, "pfedgate")
    inputs = net.shapes[_TOKENS][0] if net.inputs is None and _TOKENS in net.shapes else net.inputs
    if inputs is None:
        raise ValueError(
            "pfedgate gates a network by its inputs, but how many it has is not known. Say it: "
            "net._replace(inputs=784) for samples of 784 numbers."
        )
    made = _Gated(net, sparsity, cut({n: s for n, s in net.shapes.items() if n not in net.buffers}, blocks), inputs)
    kept(torch.zeros(1, made.number), made.blocks, sparsity)  # raises
    return nets.derive(
        net,
        shapes=made.shapes(),
        init=made.init,
        apply=made.apply,
        accumulate=made.accumulate if net.accumulate else None,
        buffers=(*net.buffers, OPEN),
        inputs=inputs,
    )


def renewed(net: Net, params: Params, x: Tensor, live: Tensor, sparsity: float, blocks: int) -> Tensor:
    """The gates (client, block) of all samples together, for a gated network's ``gate.open``."""
    base = {n: s for n, s in net.shapes.items() if nets.layer_of(n) != GATE and n not in net.buffers}
    blocks_of_x = nets.sample_blocks(x.shape[1])
    total = sum((_scores(params, x[:, at]) * live[:, at, None]).sum(1) for at in blocks_of_x)
    m = total / live.sum(1, keepdim=True)
    return m * kept(m, cut(base, blocks), sparsity)


def _scores(params: Params, x: Tensor) -> Tensor:
    """Sigmoid of the gating layer (client, sample, block)."""
    if not x.is_floating_point():
        table = params[_TOKENS].detach().mT
        x = torch.stack([t[own].flatten(1, -2).mean(1) for t, own in zip(table, x.long(), strict=True)])
    x = x.flatten(2).to(params[f"{GATE}.weight"].dtype)
    z = dense.linear_autograd(params, GATE, functional.layer_norm(x, x.shape[-1:]))
    return dense.layer_norm(params, GATE, z).sigmoid()


class _Gated(NamedTuple):
    """A network, its sparsity, the blocks of its parameters, and its number of inputs."""

    net: Net
    sparsity: float
    blocks: Mapping[str, Blocks]
    inputs: int

    @property
    def number(self) -> int:
        return sum(b.number for b in self.blocks.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.of_gate() | {OPEN: (self.number,)} | dict(self.net.shapes)

    def of_gate(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the gating layer's parameters."""
        return dense.shapes(GATE, self.inputs, self.number) | dense.norm_shapes(GATE, self.number)

    def init(self, rng: np.random.Generator) -> Params:
        """One client's start: that of the network, then the gating layer's."""
        start = {**self.net.init(rng), **dense.draw_parameters(self.of_gate(), rng), OPEN: torch.ones(self.number)}
        return {name: start[name] for name in self.shapes()}

    def gates(self, params: Params, x: Tensor, live: Tensor) -> Tensor:
        """Gates (client, block) of a batch, straight through what stays."""
        m = (_scores(params, x) * live.unsqueeze(-1)).sum(1) / live.sum(1, keepdim=True)
        stays = kept(m.detach(), self.blocks, self.sparsity).to(m)
        return m * (stays + m - m.detach())

    def weights(self, params: Params, gates: Tensor) -> Params:
        """The network's parameters times their gates."""
        found = {name: params[name] for name in self.net.shapes}
        return found | {name: b.times(params[name], gates[:, b.of]) for name, b in self.blocks.items()}

    def apply(
        self, params: Params, x: Tensor, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Outputs, in evaluation by the gates that were set."""
        gates = params[OPEN] if live is None else self.gates(params, x, live)
        return self.net.apply(self.weights(params, gates), x, **nets.apply_arguments(self.net, live, noise))

    def accumulate(
        self,
        params: Params,
        x: Tensor,
        gradient: Gradient,
        into: Params,
        beta: float,
        alpha: float,
        live: Tensor,
        noise: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Into ← beta·into + alpha·∂loss, through the network's own derivative at θ ⊙ g."""
        own = [name for name in into if nets.layer_of(name) == GATE]
        leaves = {name: p.data.requires_grad_(name in own) for name, p in params.items()}
        with torch.enable_grad():
            gates = self.gates(leaves, x, live)
        g = gates.detach()
        wanted = self.blocks if own else [name for name in into if name in self.blocks]
        at = {name: torch.zeros_like(params[name]) for name in wanted}
        given = nets.apply_arguments(self.net, live, noise)
        self.net.accumulate(self.weights(params, g), x, gradient, at, 1.0, alpha, **given)  # type: ignore[misc]
        grads: Params = {}
        if own:
            at_gates = torch.cat([self.blocks[name].sums(at[name] * params[name]) for name in self.blocks], 1)
            found = torch.autograd.grad(gates, [leaves[name] for name in own], at_gates)
            grads = dict(zip(own, found, strict=True))
        for name, p in into.items():
            grad = grads[name] if name in grads else self.blocks[name].times(at[name], g[:, self.blocks[name].of])
            p.mul_(beta).add_(grad)
