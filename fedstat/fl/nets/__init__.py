"""Networks written for stacked clients: every parameter has a leading client dimension."""

from fedstat.fl.nets.base import Gradient, Net, Params, layer_of, layers
from fedstat.fl.nets.fasttext import fasttext
from fedstat.fl.nets.lstm import lstm
from fedstat.fl.nets.mlp import mlp
from fedstat.fl.nets.transformer import transformer

__all__ = ["Gradient", "Net", "Params", "fasttext", "layer_of", "layers", "lstm", "mlp", "transformer"]
