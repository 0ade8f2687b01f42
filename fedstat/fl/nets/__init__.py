"""Networks of stacked clients, whose parameters have a leading client dimension, and the table of their names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedstat._utils import check
from fedstat.fl.nets.base import (
    Gradient,
    Net,
    Params,
    Piece,
    accumulate_by_autograd,
    apply_arguments,
    base_of,
    derive,
    forward,
    head_layers,
    head_parameters,
    in_training,
    layer_of,
    layers,
    n_features,
    n_outputs,
    normalisation,
    output_layer,
    require_net,
    require_uncomposed,
    sample_blocks,
    started,
    whole,
)
from fedstat.fl.nets.conv import cnn, lenet, resnet8, resnet10, resnet18, scaled, vgg16
from fedstat.fl.nets.dense import mlp
from fedstat.fl.nets.text import fasttext, lstm, transformer

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
    "derive",
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
    "output_layer",
    "require_net",
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


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "from_module":  # its module loads torch
            from fedstat.fl.nets.module import from_module

            return from_module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _mlp(sample: Sequence[int], outputs: int, *, hidden: int | Sequence[int] = (200,), width: float = 1.0) -> Net:
    sizes = [check.integer("hidden", n) for n in (hidden if isinstance(hidden, list | tuple) else [hidden])]
    return mlp([math.prod(sample), *(scaled(size, width) for size in sizes), outputs])


NETS: dict[str, Callable[..., Net]] = {
    "mlp": _mlp,
    "lenet": lenet,
    "cnn": cnn,
    "resnet8": resnet8,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "vgg16": vgg16,
    "lstm": lstm,
    "fasttext": fasttext,
    "transformer": transformer,
}
"""Networks by the names that command lines and grids use."""


def named(name: str, sample: Sequence[int], outputs: int, /, **options: Any) -> Net:
    """Construct a network by its name, for samples of a given shape.

    Parameters
    ----------
    name : str
        A key of ``NETS``.
    sample : sequence of int
        Shape of one sample: (channel, row, column) of an image, (character,) of a text, any for "mlp".
    outputs : int
        Classes; 1 for a binary classifier.
    **options
        Arguments of the network, such as ``width`` and ``norm``.

    Raises
    ------
    ValueError
        If the name or an option is unknown (the message gives the nearest), or if the samples do not fit the network.

    Examples
    --------
    >>> list(named("lenet", (1, 28, 28), 62, width=2).shapes.items())[0]
    ('conv1.weight', (12, 1, 5, 5))
    """
    make = NETS[check.choice("net", name, NETS)]
    names = _options(make)
    for option in options:
        check.choice(f"an option of {name}", option, names)
    return make(tuple(sample), outputs, **options)


def takes_text(name: str) -> bool:
    """Return True if a network of the table takes token numbers.

    Examples
    --------
    >>> takes_text("lstm"), takes_text("cnn")
    (True, False)
    """
    return "vocabulary" in inspect.signature(NETS[name]).parameters


def _options(make: Callable[..., Net]) -> list[str]:
    """Return the names of a constructor's keyword arguments, including arguments that it passes on."""
    parameters = inspect.signature(make).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return names + (["convolution", "statistics"] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [])
