"""Weights as other programs name and shape them, beside what these programs compute from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor
from torch import nn

RNG = np.random.default_rng(0)


class Layer(NamedTuple):
    """A layer of a program: its entry among others, and its units' outputs (unit,) for that entry."""

    state: Mapping[str, Any]
    key: str
    outputs: Callable[[np.ndarray], np.ndarray]
    module: Callable[[Mapping[str, Any]], Any] = dict  # what is read: the entries, or a module of them


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def dense(w: np.ndarray) -> np.ndarray:
    """Of Keras, Flax, Haiku and scikit-learn's networks: x @ w."""
    return np.linspace(1, 2, len(w)) @ w


def convolution(w: np.ndarray) -> np.ndarray:
    """Of Keras, Flax and Haiku at one place: (row, column, in, out)."""
    return np.einsum("hwi,hwio->o", np.linspace(1, 2, w[..., 0].size).reshape(w.shape[:-1]), w)


def transposed_convolution(w: np.ndarray) -> np.ndarray:
    """Of Keras and Haiku, from one place: (row, column, out, in); summed over the places that it reaches."""
    return np.einsum("i,hwoi->o", np.linspace(1, 2, w.shape[-1]), w)


def depthwise(w: np.ndarray) -> np.ndarray:
    """Of Keras at one place: (row, column, in, multiplier)."""
    return np.einsum("hwi,hwim->im", np.linspace(1, 2, w[..., 0].size).reshape(w.shape[:-1]), w).ravel()


def torch_dense(w: np.ndarray) -> np.ndarray:
    return nn.functional.linear(torch.linspace(1, 2, w.shape[1]), torch.tensor(w)).numpy()


def torch_convolution(w: np.ndarray) -> np.ndarray:
    x = torch.linspace(1, 2, w[0].size).reshape(1, *w.shape[1:])
    return nn.functional.conv2d(x, torch.tensor(w)).flatten().numpy()


LSTM = {"lstm/lstm_cell/kernel:0": drawn(3, 20), "lstm/lstm_cell/recurrent_kernel:0": drawn(5, 20)}
GRU = {"gru/gru_cell/kernel:0": drawn(3, 15), "gru/gru_cell/recurrent_kernel:0": drawn(5, 15)}


STATE = "lstm/lstm_cell/recurrent_kernel:0"


def keras_lstm(key: str) -> Callable[[np.ndarray], np.ndarray]:
    """One step of Keras: gates input, forget, cell, output side by side in columns."""

    def outputs(w: np.ndarray) -> np.ndarray:
        kernel, recurrent = (LSTM | {key: w}).values()
        i, f, c, o = np.split((np.array([1.0, 2, 3]) @ kernel + np.linspace(0.1, 0.5, 5) @ recurrent) / 300, 4)
        return sigmoid(o) * np.tanh(sigmoid(f) * 0.7 + sigmoid(i) * np.tanh(c))

    return outputs


def keras_gru(w: np.ndarray) -> np.ndarray:
    """One step of Keras with reset_after: gates update, reset, candidate side by side in columns."""
    h = np.linspace(0.1, 0.5, 5)
    z, r, n = np.split(np.array([1.0, 2, 3]) @ w / 300, 3)
    uz, ur, un = np.split(h @ GRU["gru/gru_cell/recurrent_kernel:0"], 3)
    return sigmoid(z + uz) * h + (1 - sigmoid(z + uz)) * np.tanh(n + sigmoid(r + ur) * un)


def regressor(coefs: list[np.ndarray]) -> np.ndarray:
    """Outputs of scikit-learn's own network, with other coefficients."""
    x = RNG.normal(size=(20, coefs[0].shape[0]))
    made = MLPRegressor(hidden_layer_sizes=(coefs[0].shape[1],), activation="identity", max_iter=1)
    made.partial_fit(x, RNG.normal(size=(20, coefs[1].shape[1])))
    made.coefs_, made.intercepts_ = list(coefs), [np.zeros(len(c.T)) for c in coefs]
    return made.predict(np.linspace(1, 2, len(coefs[0]))[None])[0]


def linear_regression(w: np.ndarray) -> np.ndarray:
    made = LinearRegression()
    made.coef_, made.intercept_ = w, np.zeros(len(w))
    return made.predict(np.linspace(1, 2, w.shape[1])[None])[0]


class Conv1D(nn.Module):
    """As in transformers: a dense layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Block(nn.Module):
    """The dense layers of a block of GPT-2; ``q_attn`` is that of cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": Conv1D(12, 4), "c_proj": Conv1D(4, 4), "q_attn": Conv1D(4, 4)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(16, 4), "c_proj": Conv1D(4, 16)})


def loaded(state: Mapping[str, Any]) -> nn.Module:
    block = Block()
    block.load_state_dict({key: torch.tensor(value) for key, value in state.items()})
    return block


def of_conv1d(w: np.ndarray) -> np.ndarray:
    module = Conv1D(w.shape[1], w.shape[0])
    module.weight.data = torch.tensor(w)
    return module(torch.linspace(1, 2, len(w))[None])[0].detach().numpy()


def attention(w: np.ndarray) -> np.ndarray:
    """Query, key and value of each feature, in GPT-2's order."""
    query, key, value = np.split(of_conv1d(w), 3)
    return query + 2 * key + 3 * value


class Personal(nn.Module):
    """As PFLlib's BaseHeadSplit, which is saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Sequential(nn.Conv2d(3, 5, 2), nn.ReLU()), nn.Flatten())
        self.head = nn.Linear(20, 4)


def personal(state: Mapping[str, Any]) -> nn.Module:
    module = Personal()
    module.load_state_dict({key: torch.tensor(value) for key, value in state.items()})
    return module


BLOCK = {key: value.numpy().copy() for key, value in Block().state_dict().items()}
PERSONAL = {key: value.numpy().copy() for key, value in Personal().state_dict().items()}
KERAS = {
    "conv2d/kernel:0": drawn(3, 3, 2, 6), "conv2d/bias:0": drawn(6),
    "conv2d_1/kernel:0": drawn(3, 3, 6, 6), "conv2d_1/bias:0": drawn(6),
    "conv2d_transpose/kernel:0": drawn(2, 2, 5, 6), "conv2d_transpose/bias:0": drawn(5),
    "depthwise_conv2d/kernel:0": drawn(3, 3, 7, 1), "depthwise_conv2d/bias:0": drawn(7),
    "batch_normalization/gamma:0": drawn(6), "batch_normalization/beta:0": drawn(6),
    "dense/kernel:0": drawn(8, 4), "dense/bias:0": drawn(4),
    "dense_1/kernel:0": drawn(4, 4), "dense_1/bias:0": drawn(4),
}  # fmt: skip
FLAX = {
    "params": {
        "Conv_0": {"kernel": drawn(3, 3, 2, 6), "bias": drawn(6)},
        "Dense_0": {"kernel": drawn(6, 4), "bias": drawn(4)},
    }
}
HAIKU = {
    "net/~/conv2_d": {"w": drawn(3, 3, 2, 6), "b": drawn(6)},
    "net/~/conv2_d_transpose": {"w": drawn(2, 2, 5, 6), "b": drawn(5)},
    "net/~/linear": {"w": drawn(8, 4), "b": drawn(4)},
    "net/~/batch_norm": {"scale": drawn(1, 1, 1, 6), "offset": drawn(1, 1, 1, 6)},
}
SKLEARN = {"coefs_0": drawn(6, 4), "intercepts_0": drawn(4), "coefs_1": drawn(4, 4), "intercepts_1": drawn(4)}
FLOWER = {"arr_0": drawn(8, 5), "arr_1": drawn(5), "arr_2": drawn(5, 3), "arr_3": drawn(3)}  # of Keras
TORCH = {"arr_0": drawn(6, 2, 3, 3), "arr_1": drawn(6), "arr_2": drawn(3, 6), "arr_3": drawn(3)}

BERT = {
    "embeddings.word_embeddings.weight": drawn(9, 4), "embeddings.LayerNorm.weight": drawn(4),
    "encoder.layer.0.attention.self.query.weight": drawn(4, 4), "encoder.layer.0.attention.self.query.bias": drawn(4),
}  # fmt: skip

LAYERS: dict[str, Layer] = {
    "Keras dense": Layer(KERAS, "dense/kernel:0", dense),
    "Keras dense, square": Layer(KERAS, "dense_1/kernel:0", dense),
    "Keras convolution": Layer(KERAS, "conv2d/kernel:0", convolution),
    "Keras convolution, square": Layer(KERAS, "conv2d_1/kernel:0", convolution),
    "Keras transposed convolution": Layer(KERAS, "conv2d_transpose/kernel:0", transposed_convolution),
    "Keras depthwise convolution": Layer(KERAS, "depthwise_conv2d/kernel:0", depthwise),
    "Keras LSTM": Layer(LSTM, "lstm/lstm_cell/kernel:0", keras_lstm("lstm/lstm_cell/kernel:0")),
    "Keras LSTM, state": Layer(LSTM, STATE, keras_lstm(STATE)),
    "Keras GRU": Layer(GRU, "gru/gru_cell/kernel:0", keras_gru),
    "Keras embedding": Layer({"embedding/embeddings:0": drawn(9, 4)}, "embedding/embeddings:0", lambda w: w.sum(0)),
    "TensorFlow 1 dense": Layer({"h/weights": drawn(8, 4), "h/biases": drawn(4)}, "h/weights", dense),
    "Flax dense": Layer(FLAX, "params.Dense_0.kernel", dense),
    "Flax convolution": Layer(FLAX, "params.Conv_0.kernel", convolution),
    "Flax embedding": Layer({"Embed_0": {"embedding": drawn(9, 4)}}, "Embed_0.embedding", lambda w: w.sum(0)),
    "Haiku dense": Layer(HAIKU, "net/~/linear.w", dense),
    "Haiku convolution": Layer(HAIKU, "net/~/conv2_d.w", convolution),
    "Haiku transposed convolution": Layer(HAIKU, "net/~/conv2_d_transpose.w", transposed_convolution),
    "scikit-learn network": Layer(SKLEARN, "coefs_0", lambda w: regressor([w, np.eye(4)])),
    "scikit-learn network, square": Layer(SKLEARN, "coefs_1", lambda w: regressor([SKLEARN["coefs_0"], w])),
    "scikit-learn regression": Layer({"coef_": drawn(3, 5), "intercept_": drawn(3)}, "coef_", linear_regression),
    "np.savez of Keras arrays": Layer(FLOWER, "arr_0", dense),
    "np.savez of torch arrays": Layer(TORCH, "arr_2", torch_dense),
    "np.savez of torch arrays, convolution": Layer(TORCH, "arr_0", torch_convolution),
    "bias with axes of size 1": Layer({"fc.weight": drawn(5, 3), "fc.bias": drawn(1, 1, 5)}, "fc.weight", torch_dense),
    "columns of a matrix by its bias": Layer({"W1": drawn(6, 4), "b1": drawn(4)}, "W1", dense),
    "GPT-2": Layer(BLOCK, "mlp.c_fc.weight", of_conv1d),
    "GPT-2, square": Layer(BLOCK, "attn.c_proj.weight", of_conv1d),
    "GPT-2, attention": Layer(BLOCK, "attn.c_attn.weight", attention),
    "GPT-2 module": Layer(BLOCK, "mlp.c_fc.weight", of_conv1d, loaded),
    "GPT-2 module, square": Layer(BLOCK, "attn.q_attn.weight", of_conv1d, loaded),
    "GPT-2 module, attention": Layer(BLOCK, "attn.c_attn.weight", attention, loaded),
    "PFLlib": Layer(PERSONAL, "head.weight", torch_dense),
    "PFLlib, convolution": Layer(PERSONAL, "base.0.0.weight", torch_convolution),
    "PFLlib module": Layer(PERSONAL, "head.weight", torch_dense, personal),
    "LLaMA": Layer({"layers.0.mlp.up_proj.weight": drawn(6, 4)}, "layers.0.mlp.up_proj.weight", torch_dense),
    "LLaMA, embedding": Layer({"embed_tokens.weight": drawn(6, 4)}, "embed_tokens.weight", lambda w: w.sum(0)),
    "BERT": Layer(BERT, "encoder.layer.0.attention.self.query.weight", torch_dense),
    "BERT, embedding": Layer(BERT, "embeddings.word_embeddings.weight", lambda w: w.sum(0)),
}  # fmt: skip
"""Layers whose units are known: by name, by bias, or by module."""


def save_safetensors(path: Path, state: Mapping[str, Any]) -> None:
    """As the package of that name writes them: length of the header, header, bytes."""
    kinds = {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2", "int64": "I64", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
        "uint64": "U64", "complex64": "C64", "bool": "BOOL",
    }  # fmt: skip
    header, raw = {}, b""
    for name, value in state.items():
        tensor = torch.as_tensor(value).contiguous()
        begin, raw = len(raw), raw + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = kinds[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, len(raw)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw)


def save_torch(path: Path, state: Mapping[str, Any]) -> None:
    torch.save({name: torch.as_tensor(value) for name, value in state.items()}, path)


SAVE: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    ".pt": save_torch,
    ".pth": save_torch,
    ".ckpt": save_torch,
    ".bin": save_torch,
    ".safetensors": save_safetensors,
    ".npz": lambda path, state: np.savez(path, **{name: np.asarray(value) for name, value in state.items()}),
}
"""A writer for each suffix that is read."""
