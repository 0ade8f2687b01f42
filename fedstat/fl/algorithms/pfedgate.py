"""pFedGate: every client's gating layer selects a sparse model from the shared parameters."""

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
    sparsity: Annotated[float, "s, largest proportion of entries in a client's sparse model"] = 0.5,
    blocks: Annotated[int, "number of blocks of every parameter"] = 5,
    gate_rate: Annotated[float, "learning rate of the gating layer, as a multiple of the local one"] = 1.0,
) -> Algorithm:
    """Train client models θ ⊙ g, in which a personal gating layer opens blocks of the shared θ within a budget.

    Chen, Yao, Gao, Ding and Li (2023), "Efficient personalized federated learning via sparse model-adaptation", ICML,
    arXiv:2305.02776, §4 and Algorithm 1. For a batch, the gating layer gives every block a weight in (0, 1). A knapsack
    of s times all entries selects blocks by weight; the other blocks are 0. θ and the gating layer are trained in the
    same steps; the gating layer's gradient passes straight through the selection. See
    :func:`fedstat.fl.algorithms.pfedgate.gated`.

    Shared (upload and download): θ, averaged with weights by numbers of samples. Personal: the gating layer. The paper
    counts the bytes of open blocks only. Here all of θ is counted, because batches open different blocks.

    Parameters
    ----------
    sparsity : float in (0, 1]
        s; 1 opens all blocks, each times its weight.
    blocks : int >= 1
        5 in the published commands.
    gate_rate : float > 0
        Multiplies the gating layer's gradients: with SGD, a separate learning rate; with Adam, it has no effect.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, if the network's number of inputs is unknown, or if the
        first blocks of all parameters, which are always open, exceed the proportion s of all entries.

    Notes
    -----
    Choices:

    - Both normalizations of the gating layer are layer normalization, which is defined for the inputs of any network.
      The paper's switchable normalization combines it with normalization by channel and by batch; the published code
      normalizes the outputs by batch.
    - The greedy selection compares weights over all parameters; the code treats dense and other layers separately.
    - The first block of every parameter is always open, as in the code.
    - Closed blocks also receive the straight-through gradient, so that they can open; the code omits it.
    - A client predicts with the gates of all its training samples after local training. Gates of the samples to predict
      would make a prediction depend on other samples. Before its first training, a client predicts with θ.
      ``gate.open`` holds these gates, 0 for closed blocks.
    """
    check.real("sparsity", sparsity, low=0, high=1, open_low=True)
    check.integer("blocks", blocks)
    check.real("gate_rate", gate_rate, low=0, open_low=True)

    def faster(gradient: BatchGradient, params: Params, _: float) -> Params:
        gradients = gradient(params)
        return {name: p.mul_(gate_rate) if nets.layer_of(name) == GATE else p for name, p in gradients.items()}

    def set_gates(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> None:
        with torch.no_grad():
            params[OPEN].copy_(gates_of_client(net, params, samples.x, samples.live, sparsity, blocks))

    return Algorithm(
        "pfedgate",
        masks.keep_layers(lambda _: [GATE]),
        phases=(Phase(gradient=None if gate_rate == 1 else faster), Phase(0, on_phase_start=set_gates)),
        settings={"sparsity": sparsity, "blocks": blocks, "gate_rate": gate_rate},
        wrap=lambda net: gated(net, sparsity, blocks),
        about=ABOUT,
    )


GATE = "gate"
OPEN = f"{GATE}.open"
_TOKENS = "embedding.weight"


class Blocks(NamedTuple):
    """Division of a parameter's entries, in the order of memory, into blocks.

    Attributes
    ----------
    first, number : int
        Index of the parameter's first block among the blocks of all parameters; number of its blocks.
    size : int
        Entries of each block; the last may have fewer.
    entries : int
        Entries of the parameter.
    """

    first: int
    number: int
    size: int
    entries: int

    @property
    def of(self) -> slice:
        """Indices of the parameter's blocks among all blocks."""
        return slice(self.first, self.first + self.number)

    @property
    def sizes(self) -> list[int]:
        """Entries of each block."""
        return [self.size] * (self.number - 1) + [self.entries - self.size * (self.number - 1)]

    def times(self, p: Tensor, g: Tensor) -> Tensor:
        """Multiply the parameter p (client, ...) by its gates g (client, number)."""
        if self.size * self.number == self.entries:
            return (p.view(len(p), self.number, self.size) * g.unsqueeze(-1)).view(p.shape)
        return p * g.repeat_interleave(self.size, 1)[:, : self.entries].view(p.shape)

    def sums(self, p: Tensor) -> Tensor:
        """Sum the entries of p (client, ...) in each block: (client, number)."""
        flat = functional.pad(p.flatten(1), (0, self.size * self.number - self.entries))
        return flat.view(len(p), self.number, self.size).sum(-1)


def cut(shapes: Mapping[str, tuple[int, ...]], number: int) -> dict[str, Blocks]:
    """Divide every parameter into ``number`` blocks, or into fewer if it has fewer entries.

    Examples
    --------
    >>> cut({"fc1.weight": (5, 5), "fc1.bias": (5,)}, 10)["fc1.weight"].sizes
    [3, 3, 3, 3, 3, 3, 3, 3, 1]
    """
    parts: dict[str, Blocks] = {}
    first = 0
    for name, shape in shapes.items():
        entries = int(np.prod(shape))
        size = -(-entries // min(number, entries))
        parts[name] = Blocks(first, -(-entries // size), size, entries)
        first += parts[name].number
    return parts


def select_blocks(scores: Tensor, blocks: Mapping[str, Blocks], sparsity: float) -> Tensor:
    """Select open blocks, a bool (client, block): every parameter's first, then by descending score while they fit.

    This is the greedy solution of the knapsack problem: maximize the sum of scores of open blocks, which may have at
    most the proportion ``sparsity`` of all entries.

    Raises
    ------
    ValueError
        If the first blocks alone exceed this proportion.
    """
    if sparsity == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    sizes = torch.tensor([n for b in blocks.values() for n in b.sizes], device=scores.device)
    is_first = torch.zeros(len(sizes), dtype=torch.bool, device=scores.device)
    is_first[[b.first for b in blocks.values()]] = True
    budget = int(sparsity * int(sizes.sum()) + 1e-9) - int(sizes[is_first].sum())
    if budget < 0:
        minimum = int(sizes[is_first].sum()) / int(sizes.sum())
        raise ValueError(
            f"sparsity must be at least {minimum:.3g} (the first blocks, always open), but got {sparsity:g}. Raise "
            "sparsity or blocks."
        )
    candidates = (~is_first).nonzero().squeeze(1)
    order = candidates[scores[:, candidates].argsort(dim=1, descending=True, stable=True)]
    remaining = torch.full((len(scores),), budget, device=scores.device)
    fits = []
    for size in sizes[order].unbind(1):
        fits.append(size <= remaining)
        remaining = remaining - size * fits[-1]
    is_open = is_first.repeat(len(scores), 1)
    return is_open.scatter_(1, order, torch.stack(fits, 1)) if fits else is_open


def gated(net: Net, sparsity: float, blocks: int) -> Net:
    """Multiply the parameters θ of a network by gates g, one for every block of θ.

    In training the gates follow from the batch: g = m for open blocks (:func:`select_blocks`), else 0. Here m is the
    mean of sigmoid(LayerNorm(A LayerNorm(x) + b)) over the samples x; a text enters as the mean of its tokens' vectors.
    With g = m k and k 0 or 1, derivatives pass straight through the selection: dk/dm = 1, hence dg/dm = k + m. In
    evaluation the gates are the buffer ``gate.open``, which the algorithm sets.

    Parameters
    ----------
    net : Net
    sparsity : float in (0, 1]
    blocks : int

    Returns
    -------
    Net
        Has a further layer ``gate``, whose units are the blocks: A, b, scale and shift of the second normalization, and
        ``gate.open``, which starts at 1.

    Raises
    ------
    ValueError
        If the number of inputs is unknown, the network is composed of factors, or ``sparsity`` is too small.
    """
    nets.require_uncomposed(net, "pfedgate")
    inputs = net.shapes[_TOKENS][0] if net.inputs is None and _TOKENS in net.shapes else net.inputs
    if inputs is None:
        raise ValueError(
            "pfedgate needs the network's number of inputs, which is unknown. Set it, as in net._replace(inputs=784) "
            "for samples of 784 numbers."
        )
    parts = cut({n: s for n, s in net.shapes.items() if n not in net.buffers}, blocks)
    functions = _Gated(net, sparsity, parts, inputs)
    select_blocks(torch.zeros(1, functions.number), parts, sparsity)  # raises if sparsity is too small
    return nets.derive(
        net,
        shapes=functions.shapes(),
        init=functions.init,
        apply=functions.apply,
        accumulate=functions.accumulate if net.accumulate else None,
        buffers=(*net.buffers, OPEN),
        inputs=inputs,
    )


def gates_of_client(net: Net, params: Params, x: Tensor, live: Tensor, sparsity: float, blocks: int) -> Tensor:
    """Return the gates (client, block) of all samples of each client, for a gated network's ``gate.open``."""
    base = {n: s for n, s in net.shapes.items() if nets.layer_of(n) != GATE and n not in net.buffers}
    sample_blocks = nets.sample_blocks(x.shape[1])
    total = sum((_scores(params, x[:, block]) * live[:, block, None]).sum(1) for block in sample_blocks)
    m = total / live.sum(1, keepdim=True)
    return m * select_blocks(m, cut(base, blocks), sparsity)


def _scores(params: Params, x: Tensor) -> Tensor:
    """Return the sigmoid of the gating layer (client, sample, block)."""
    if not x.is_floating_point():
        tables = params[_TOKENS].detach().mT
        x = torch.stack([table[tokens].flatten(1, -2).mean(1) for table, tokens in zip(tables, x.long(), strict=True)])
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
        """Return the shapes of the gating layer's parameters."""
        return dense.shapes(GATE, self.inputs, self.number) | dense.norm_shapes(GATE, self.number)

    def init(self, rng: np.random.Generator) -> Params:
        """Draw one client's initial parameters: of the network, then of the gating layer."""
        start = {**self.net.init(rng), **dense.draw_parameters(self.of_gate(), rng), OPEN: torch.ones(self.number)}
        return {name: start[name] for name in self.shapes()}

    def gates(self, params: Params, x: Tensor, live: Tensor) -> Tensor:
        """Return the gates (client, block) of a batch, with straight-through derivatives."""
        m = (_scores(params, x) * live.unsqueeze(-1)).sum(1) / live.sum(1, keepdim=True)
        is_open = select_blocks(m.detach(), self.blocks, self.sparsity).to(m)
        return m * (is_open + m - m.detach())

    def weights(self, params: Params, gates: Tensor) -> Params:
        """Multiply the network's parameters by their gates."""
        base = {name: params[name] for name in self.net.shapes}
        return base | {name: b.times(params[name], gates[:, b.of]) for name, b in self.blocks.items()}

    def apply(
        self, params: Params, x: Tensor, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the outputs; in evaluation the gates are ``gate.open``."""
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
        """Set into ← beta·into + alpha·∂loss, from the network's derivative at θ ⊙ g."""
        of_gate = [name for name in into if nets.layer_of(name) == GATE]
        leaves = {name: p.data.requires_grad_(name in of_gate) for name, p in params.items()}
        with torch.enable_grad():
            gates = self.gates(leaves, x, live)
        g = gates.detach()
        names = self.blocks if of_gate else [name for name in into if name in self.blocks]
        derivatives = {name: torch.zeros_like(params[name]) for name in names}
        arguments = nets.apply_arguments(self.net, live, noise)
        self.net.accumulate(  # type: ignore[misc]
            self.weights(params, g), x, gradient, derivatives, 1.0, alpha, **arguments
        )
        grads: Params = {}
        if of_gate:
            sums = [self.blocks[name].sums(derivatives[name] * params[name]) for name in self.blocks]
            gate_grads = torch.autograd.grad(gates, [leaves[name] for name in of_gate], torch.cat(sums, 1))
            grads = dict(zip(of_gate, gate_grads, strict=True))
        for name, p in into.items():
            is_gate = name in grads
            grad = grads[name] if is_gate else self.blocks[name].times(derivatives[name], g[:, self.blocks[name].of])
            p.mul_(beta).add_(grad)
