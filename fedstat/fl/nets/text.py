"""Networks for text: fastText, LSTM, and a small Transformer encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedstat._utils import check as _check
from fedstat._utils.lazy import functional, torch
from fedstat.fl.nets import dense
from fedstat.fl.nets.base import Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def check(sample: Sequence[int], outputs: int, vocabulary: int | None) -> tuple[int, int, int]:
    """Return length of a text, number of outputs and number of different tokens; raise ValueError if not valid."""
    if len(sample) != 1:
        raise ValueError(
            f"sample must be the shape of one text, (length,), but got {tuple(sample)}. For images, use another net."
        )
    if vocabulary is None:
        raise ValueError(
            "vocabulary must be the number of different tokens, but got None. Use 80 for Shakespeare by character, and "
            "len(data.x.attrs['vocabulary']) for words."
        )
    length = _check.integer("sample", sample[0])
    return length, _check.integer("outputs", outputs), _check.integer("vocabulary", vocabulary)


def check_padding(padding: int | None, vocabulary: int) -> int | None:
    """Return the number of the padding token, or raise ValueError if it is not in the vocabulary."""
    return None if padding is None else _check.integer("padding", padding, low=0, high=vocabulary - 1)


def is_real(x: Tensor, padding: int | None) -> Tensor:
    """Return True for tokens that are not padding: a bool of x's shape."""
    return torch.ones_like(x, dtype=torch.bool) if padding is None else x != padding


def mean_weights(real: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (..., token) of a mean over tokens that are not padding; 0 in a text of padding alone."""
    return real.to(dtype) / real.sum(-1, keepdim=True).clamp(min=1)


def scaled(name: str, size: int, width: float, *, multiple: int = 1) -> int:
    """Return the number of hidden units times ``width``, rounded to a positive multiple of ``multiple``."""
    _check.real("width", width, low=0, open_low=True)
    return multiple * max(1, round(_check.integer(name, size) * width / multiple))


def tokens(x: Tensor, vocabulary: int) -> Tensor:
    """Return token numbers as int64, in x's shape; raise ValueError unless they are integers of the vocabulary."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"x must hold token numbers, which are integers, but is {str(x.dtype).split('.')[-1]}")
    low, high = (int(end) for end in torch.aminmax(x))
    if low < 0 or high >= vocabulary:
        hint = f"Make the network with vocabulary={high + 1}."
        if low < 0:
            hint = f"Number the tokens from 0: padding of number {low} needs a token, too, such as 0 with padding=0."
        raise ValueError(
            f"tokens must lie in 0, ..., {vocabulary - 1} for vocabulary={vocabulary}, but got {low} to {high}. {hint}"
        )
    return x.long()


def rows(x: Tensor, vocabulary: int) -> Tensor:
    """Return the rows of tokens (client, ...) in the stacked tables of all clients: token + client·vocabulary."""
    clients = torch.arange(x.shape[0], device=x.device).view(-1, *(1,) * (x.ndim - 1))
    return tokens(x, vocabulary) + vocabulary * clients


def normal(rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    """Draw initial parameters as in ``torch.nn.Embedding``: N(0, 1)."""
    return torch.from_numpy(rng.normal(size=shape)).float()


def fasttext(
    sample: Sequence[int],
    outputs: int,
    *,
    vocabulary: int | None,
    width: float = 1.0,
    embedding: int = 32,
    padding: int | None = 0,
) -> Net:
    """Build fastText: mean of a text's word vectors, a dense layer of equal size, a dense output layer.

    Joulin et al. (2017), "Bag of tricks for efficient text classification", in the form that FedCP trains on AG News
    (Zhang et al. 2023, §5.1), with a linear layer between the mean and the classifier. There are no activations.

    Parameters
    ----------
    sample : sequence of int
        (length,), number of words in a text, with padding.
    outputs : int
        Number of classes.
    vocabulary : int
        Number of different words, including padding.
    width : float, default 1
        Multiplies ``embedding``.
    embedding : int, default 32
        Size of a word's vector.
    padding : int or None, default 0
        Word that fills short texts and is excluded from the mean; a text of padding alone has mean 0. None: no padding.

    Returns
    -------
    Net
        Layers ``embedding`` (weight: (dimension, word)), ``fc1`` and ``fc2``; initial parameters as in torch.nn.

    Raises
    ------
    ValueError
        If an argument is out of range; when applied, if x holds words outside the vocabulary.

    Examples
    --------
    >>> fasttext((200,), 4, vocabulary=5000).shapes["fc2.weight"]
    (4, 32)
    """
    _, outputs, vocabulary = check(sample, outputs, vocabulary)
    padding = check_padding(padding, vocabulary)
    dim = scaled("embedding", embedding, width)
    layers = dense.shapes("fc1", dim, dim) | dense.shapes("fc2", dim, outputs)

    def init(rng: np.random.Generator) -> Params:
        return {"embedding.weight": normal(rng, (dim, vocabulary))} | dense.draw_parameters(layers, rng)

    def features(params: Params, x: Tensor) -> Tensor:
        table = params["embedding.weight"].mT.flatten(0, 1)
        weights = mean_weights(is_real(x, padding), table.dtype)
        words = rows(x, vocabulary).flatten(0, 1)
        h = functional.embedding_bag(words, table, mode="sum", per_sample_weights=weights.flatten(0, 1))
        return dense.linear(params, "fc1", h.view(*x.shape[:2], dim))

    return dense.with_head({"embedding.weight": (dim, vocabulary)} | layers, init, features, "fc1", "fc2")


Cell = Literal["fused", "stacked"]


def lstm(
    sample: Sequence[int],
    outputs: int,
    *,
    vocabulary: int | None,
    width: float = 1.0,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    fc: int = 128,
    cell: Cell | None = None,
) -> Net:
    """Build an embedding, ``layers`` LSTM layers and, on the last state, two dense layers with ReLU between.

    This is FedFac's Shakespeare network (Wang, Tang and Li, Table 1: "2-layer LSTM + 2-layer FC"). The embedding of 8
    and the 256 hidden units are LEAF's (Caldas et al. 2018, arXiv:1812.01097). LEAF does not give the size of the first
    dense layer; 128 is our choice.

    Parameters
    ----------
    sample : sequence of int
        (length,), number of characters in a text.
    outputs : int
        Number of classes; the size of the vocabulary, to predict the next character.
    vocabulary : int
        Number of different tokens; x holds 0, ..., vocabulary − 1.
    width : float, default 1
        Multiplies ``hidden`` and ``fc``.
    embedding, hidden, layers, fc : int
        Size of a character's vector, size and number of the LSTM layers, size of the first dense layer.
    cell : {"fused", "stacked"}, optional
        Computation of the recurrence. "fused": torch's LSTM kernel (oneDNN on the CPU, cuDNN on a GPU), client by
        client. "stacked": one batched matrix product per step for all clients. The default is "fused" on the CPU, where
        it took 0.34 to 0.6 times as long as "stacked" at 32 to 128 hidden units, and "stacked" on a GPU.

    Returns
    -------
    Net
        Layers ``embedding`` (weight: (dimension, token)), ``lstm1``, …, ``fc1``, ``fc2``. ``lstm1.weight`` is
        (unit, gate, input + unit) and ``lstm1.bias`` (unit, gate), with gates input, forget, cell, output as in torch.
        A row holds all entries of a unit, so that one boolean covers its gates. Weights and biases start as in
        torch.nn; the LSTM's single bias is the sum of the two in ``torch.nn.LSTM``.

    Raises
    ------
    ValueError
        If an argument is out of range; when applied, if x holds tokens outside the vocabulary.

    Examples
    --------
    >>> lstm((80,), 80, vocabulary=80, hidden=32).shapes["lstm2.weight"]
    (32, 4, 64)
    """
    _, outputs, vocabulary = check(sample, outputs, vocabulary)
    embedding, layers = _check.integer("embedding", embedding), _check.integer("layers", layers)
    hidden, fc = scaled("hidden", hidden, width), scaled("fc", fc, width)
    if cell is not None:
        _check.choice("cell", cell, ("fused", "stacked"))
    names = [f"lstm{i}" for i in range(1, layers + 1)]
    inputs = [embedding] + [hidden] * (layers - 1)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (embedding, vocabulary)}
    for name, n_in in zip(names, inputs, strict=True):
        shapes |= {f"{name}.weight": (hidden, 4, n_in + hidden), f"{name}.bias": (hidden, 4)}
    after = dense.shapes("fc1", hidden, fc) | dense.shapes("fc2", fc, outputs)

    def init(rng: np.random.Generator) -> Params:
        params = {"embedding.weight": normal(rng, shapes["embedding.weight"])}
        for name in names:
            of_layer = {n: shapes[n] for n in (f"{name}.weight", f"{name}.bias")}
            params |= dense.uniform(rng, of_layer, 1 / math.sqrt(hidden))
            params[f"{name}.bias"] += dense.uniform(rng, {"": (hidden, 4)}, 1 / math.sqrt(hidden))[""]
        return params | dense.draw_parameters(after, rng)

    def features(params: Params, x: Tensor) -> Tensor:
        table = params["embedding.weight"].mT.flatten(0, 1)
        gates = [
            _by_gate(params[f"{n}.weight"], params[f"{n}.bias"], n_in) for n, n_in in zip(names, inputs, strict=True)
        ]
        h = functional.embedding(rows(x, vocabulary), table)
        fused = cell == "fused" or (cell is None and not x.is_cuda)
        h = _fused(h, gates) if fused else _stacked(h, gates)
        return torch.relu(dense.linear(params, "fc1", h))

    return dense.with_head(shapes | after, init, features, "fc1", "fc2")


Gates = tuple["Tensor", "Tensor", "Tensor"]
"""A layer's weights for the input (client, gate and unit, in) and the state (client, gate and unit, unit), and bias."""


def _by_gate(weight: Tensor, bias: Tensor, n_in: int) -> Gates:
    """Reorder rows of units into torch's order, in which all units of the input gate come first."""
    by_gate = weight.transpose(1, 2)
    return (
        by_gate[..., :n_in].flatten(1, 2),
        by_gate[..., n_in:].flatten(1, 2),
        bias.transpose(1, 2).flatten(1),
    )


def _fused(h: Tensor, layers: list[Gates]) -> Tensor:
    """Return the last layer's last state (client, sample, unit) for h (client, sample, character, in), by client."""
    hidden = layers[0][1].shape[2]
    start = h.new_zeros(len(layers), h.shape[1], hidden)
    zeros = h.new_zeros(4 * hidden)  # torch adds a second bias
    clients = zip(h.unbind(), *(zip(*(part.unbind() for part in layer), strict=True) for layer in layers), strict=True)
    last = []
    for x, *client_layers in clients:
        flat = [part for w_in, w_state, bias in client_layers for part in (w_in, w_state, bias, zeros)]
        last.append(
            torch.lstm(x.transpose(0, 1), (start, start), flat, True, len(layers), 0.0, False, False, False)[1][-1]
        )
    return torch.stack(last)


def _stacked(h: Tensor, layers: list[Gates]) -> Tensor:
    """Return the state of :func:`_fused` by one batched product per step for all clients.

    The inputs of all steps are multiplied at once.
    """
    clients, samples, steps, _ = h.shape
    inputs = h.transpose(1, 2)
    for w_in, w_state, bias in layers:
        by_step = torch.baddbmm(bias.unsqueeze(1), inputs.flatten(1, 2), w_in.mT).view(clients, steps, samples, -1)
        recurrent = w_state.mT.contiguous()
        state = memory = h.new_zeros(clients, samples, w_state.shape[2])
        states = []
        for from_input in by_step.unbind(1):
            i, f, g, o = torch.baddbmm(from_input, state, recurrent).chunk(4, -1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
            states.append(state)
        inputs = torch.stack(states, 1)
    return state


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
    length, outputs, vocabulary = check(sample, outputs, vocabulary)
    padding = check_padding(padding, vocabulary)
    if _check.integer("embedding", embedding) % _check.integer("heads", heads):
        raise ValueError(f"embedding must be a multiple of heads={heads}, but got {embedding}")
    dim = scaled("embedding", embedding, width, multiple=heads)
    hidden, numbers = scaled("feedforward", feedforward, width), range(1, _check.integer("blocks", blocks) + 1)
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
            params[name] = normal(rng, shapes[name])
        for b in numbers:
            # Xavier's bound for one matrix of queries, keys and values, as in torch.
            weight = f"attention{b}.weight"
            params |= dense.uniform(rng, {weight: shapes[weight]}, math.sqrt(6 / (3 * dim + dim)))
            params |= dense.draw_parameters(dense_of[b], rng) | {f"project{b}.bias": torch.zeros(dim)}
        return params | dense.draw_parameters(dense.shapes("out", dim, outputs), rng)

    def features(params: Params, x: Tensor) -> Tensor:
        if x.shape[2] != length:
            raise ValueError(f"the network takes texts of {length} tokens, but got {x.shape[2]}")
        real = is_real(x, padding)
        # A text of padding alone attends to its padding, because attention to no token is NaN; its mean is still 0.
        attended = (real | ~real.any(-1, keepdim=True)).view(-1, 1, 1, length)
        h = functional.embedding(rows(x, vocabulary), params["embedding.weight"].mT.flatten(0, 1))
        h = (h + params["position.weight"].mT.unsqueeze(1)).flatten(1, 2)
        for b in numbers:
            h = _block(params, b, h, attended, heads)
        h = dense.layer_norm(params, f"down{numbers[-1]}", h).view(*x.shape, dim)
        return (mean_weights(real, h.dtype).unsqueeze(2) @ h).squeeze(2)

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
