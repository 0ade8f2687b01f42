"""pFedGate: every client's gating layer makes a sparse model of the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fedstat import _check
from fedstat._later import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, BatchGradient, Phase, Samples
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.gated import GATE, OPEN, gated, renewed

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "pFedGate",
    "Chen et al. (2023), arXiv:2305.02776",
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
    once, the latter straight through the choice. See :func:`fedstat.fl.wrappers.gated.gated`.

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
    _check.real("sparsity", sparsity, low=0, high=1, open_low=True)
    _check.integer("blocks", blocks)
    _check.real("gate_rate", gate_rate, low=0, open_low=True)

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
