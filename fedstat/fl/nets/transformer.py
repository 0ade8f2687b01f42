"""A small Transformer encoder for texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl.nets import dense, text
from fedstat.fl.nets.base import Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def transformer(
    sample: Sequence[int],
    outputs: int,
    *,
    vocabulary: int | None,
    width: float = 1.0,
    embedding: int = 32,
    heads: int = 4,
    feedforward: int = 64,
    blocks: int = 2,
    padding: int | None = 0,
) -> Net:
    """Build token and position embeddings, pre-norm encoder blocks, a mean over the text and a dense layer.

    Vaswani et al. (2017), "Attention is all you need". Normalization precedes each part, as in
    ``torch.nn.TransformerEncoderLayer(norm_first=True)``, and follows the last block. Activations are ReLU; there is no
    dropout.

    Parameters
    ----------
    sample : sequence of int
        (length,), number of tokens in a text, with padding.
    outputs : int
        Number of classes.
    vocabulary : int
        Number of different tokens, including padding.
    width : float, default 1
        Multiplies ``embedding`` and ``feedforward``.
    embedding, heads, feedforward, blocks : int
        Size of a token's vector, a multiple of ``heads``; attention heads; hidden units of a block's dense part;
        number of blocks.
    padding : int or None, default 0
        Token that fills short texts; attention and the mean exclude it. None: no padding.

    Returns
    -------
    Net
        Layers ``embedding`` (weight: (dimension, token)), ``position`` (dimension, place), for block b
        ``attention<b>`` (weight: (unit, 3, in): a unit's query, key and value), ``project<b>``, ``up<b>``,
        ``down<b>``, and ``out``. A LayerNorm's ``scale`` and ``shift`` belong to the layer whose sum it normalizes:
        before attention1 to ``embedding``, before up1 to ``project1``, after block 1 to ``down1``. Initial parameters
        are as in torch.nn.

    Raises
    ------
    ValueError
        If an argument is out of range; when applied, if x holds tokens outside the vocabulary.

    Examples
    --------
    >>> list(transformer((80,), 80, vocabulary=80, blocks=1).shapes)[:4]
    ['embedding.weight', 'embedding.scale', 'embedding.shift', 'position.weight']
    """
    length, outputs, vocabulary = text.check(sample, outputs, vocabulary)
    padding = text.check_padding(padding, vocabulary)
    if check.integer("embedding", embedding) % check.integer("heads", heads):
        raise ValueError(f"embedding must be a multiple of heads={heads}, but got {embedding}")
    dim = text.scaled("embedding", embedding, width, multiple=heads)
    hidden, numbers = text.scaled("feedforward", feedforward, width), range(1, check.integer("blocks", blocks) + 1)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (dim, vocabulary), **dense.norm_shapes("embedding", dim)}
    shapes["position.weight"] = (dim, length)
    dense_of = {}
    for b in numbers:
        dense_of[b] = dense.shapes(f"project{b}", dim, dim) | dense.norm_shapes(f"project{b}", dim)
        dense_of[b] |= dense.shapes(f"up{b}", dim, hidden)
        dense_of[b] |= dense.shapes(f"down{b}", hidden, dim) | dense.norm_shapes(f"down{b}", dim)
        shapes |= {f"attention{b}.weight": (dim, 3, dim), f"attention{b}.bias": (dim, 3), **dense_of[b]}
    shapes |= dense.shapes("out", dim, outputs)

    def init(rng: np.random.Generator) -> Params:
        params = {name: torch.full(shape, float(name.endswith(".scale"))) for name, shape in shapes.items()}
        for name in ("embedding.weight", "position.weight"):
            params[name] = text.normal(rng, shapes[name])
        for b in numbers:
            # Xavier's bound for one matrix of queries, keys and values, as in torch.
            weight = f"attention{b}.weight"
            params |= dense.uniform(rng, {weight: shapes[weight]}, math.sqrt(6 / (3 * dim + dim)))
            params |= dense.draw_parameters(dense_of[b], rng) | {f"project{b}.bias": torch.zeros(dim)}
        return params | dense.draw_parameters(dense.shapes("out", dim, outputs), rng)

    def features(params: Params, x: Tensor) -> Tensor:
        if x.shape[2] != length:
            raise ValueError(f"the network takes texts of {length} tokens, but got {x.shape[2]}")
        real = text.is_real(x, padding)
        # A text of padding alone attends to its padding, because attention to no token is NaN; its mean is still 0.
        attended = (real | ~real.any(-1, keepdim=True)).view(-1, 1, 1, length)
        h = functional.embedding(text.rows(x, vocabulary), params["embedding.weight"].mT.flatten(0, 1))
        h = (h + params["position.weight"].mT.unsqueeze(1)).flatten(1, 2)
        for b in numbers:
            h = _block(params, b, h, attended, heads)
        h = dense.layer_norm(params, f"down{numbers[-1]}", h).view(*x.shape, dim)
        return (text.mean_weights(real, h.dtype).unsqueeze(2) @ h).squeeze(2)

    inner = [f"{kind}{b}" for b in numbers for kind in ("project", "up", "down")]
    return dense.with_head(shapes, init, features, *inner, "out")


def _block(params: Params, b: int, h: Tensor, attended: Tensor, heads: int) -> Tensor:
    """Add attention, then two dense layers, each of the normalized h, to h (client, text and token, unit): block b."""
    normalized = dense.layer_norm(params, f"down{b - 1}" if b > 1 else "embedding", h)
    h = h + dense.linear(params, f"project{b}", _attention(params, f"attention{b}", normalized, attended, heads))
    up = dense.linear(params, f"up{b}", dense.layer_norm(params, f"project{b}", h))
    return h + dense.linear(params, f"down{b}", torch.relu(up))


def _attention(params: Params, layer: str, h: Tensor, attended: Tensor, heads: int) -> Tensor:
    """Return the attention of h (client, text and token, unit) to tokens with ``attended`` (text, 1, 1, token)."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
    clients, units, length = h.shape[0], h.shape[2], attended.shape[-1]
    by_kind = weight.transpose(1, 2).flatten(1, 2), bias.transpose(1, 2).flatten(1)
    qkv = torch.baddbmm(by_kind[1].unsqueeze(1), h, by_kind[0].mT)
    q, k, v = qkv.view(-1, length, 3, heads, units // heads).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=attended)
    return mixed.transpose(1, 2).reshape(clients, -1, units)
