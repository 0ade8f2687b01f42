"""Networks written for stacked clients: every parameter has a leading client dimension."""

from typing import TYPE_CHECKING, Any

from fedstat.fl.nets.base import (
    Gradient,
    Net,
    Params,
    Piece,
    accumulate_by_autograd,
    apply_arguments,
    base_of,
    forward,
    head_layers,
    head_parameters,
    in_training,
    layer_of,
    layers,
    n_features,
    n_outputs,
    normalisation,
    require,
    require_uncomposed,
    sample_blocks,
    started,
    whole,
)
from fedstat.fl.nets.conv import cnn, lenet, resnet8, resnet10, resnet18, vgg16
from fedstat.fl.nets.mlp import mlp
from fedstat.fl.nets.table import NETS, named, takes_text
from fedstat.fl.nets.text import fasttext, lstm
from fedstat.fl.nets.transformer import transformer

if TYPE_CHECKING:
    from fedstat.fl.nets.module import from_module

__all__ = [
    "NETS",
    "Gradient",
    "Net",
    "Params",
    "Piece",
    "accumulate_by_autograd",
    "apply_arguments",
    "base_of",
    "cnn",
    "fasttext",
    "forward",
    "from_module",
    "head_layers",
    "head_parameters",
    "in_training",
    "layer_of",
    "layers",
    "lenet",
    "lstm",
    "mlp",
    "n_features",
    "n_outputs",
    "named",
    "normalisation",
    "require",
    "require_uncomposed",
    "resnet8",
    "resnet10",
    "resnet18",
    "sample_blocks",
    "started",
    "takes_text",
    "transformer",
    "vgg16",
    "whole",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "from_module":  # lists torch's own layers, and with them loads torch
            from fedstat.fl.nets.module import from_module

            return from_module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
