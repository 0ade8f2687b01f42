"""The networks by name, for command lines and grids of settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from fedstat._utils import check
from fedstat.fl.nets import conv
from fedstat.fl.nets.base import Net
from fedstat.fl.nets.mlp import mlp
from fedstat.fl.nets.text import fasttext, lstm
from fedstat.fl.nets.transformer import transformer


def _mlp(sample: Sequence[int], outputs: int, *, hidden: int | Sequence[int] = (200,), width: float = 1.0) -> Net:
    sizes = [hidden] if isinstance(hidden, int) else hidden
    sizes = [check.integer("hidden", size) for size in sizes]
    return mlp([math.prod(sample), *(conv.scaled(size, width) for size in sizes), outputs])


NETS: dict[str, Callable[..., Net]] = {
    "mlp": _mlp,
    "lenet": conv.lenet,
    "cnn": conv.cnn,
    "resnet8": conv.resnet8,
    "resnet10": conv.resnet10,
    "resnet18": conv.resnet18,
    "vgg16": conv.vgg16,
    "lstm": lstm,
    "fasttext": fasttext,
    "transformer": transformer,
}
"""Networks by the names that command lines and grids use."""


def named(name: str, sample: Sequence[int], outputs: int, **options: Any) -> Net:
    """Network of that name for samples of that shape.

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
        If the name or an option is unknown (the nearest are given), or the network does not take such samples.

    Examples
    --------
    >>> list(named("lenet", (1, 28, 28), 62, width=2).shapes.items())[0]
    ('conv1.weight', (12, 1, 5, 5))
    """
    make = NETS[check.choice("net", name, NETS)]
    known = _options(make)
    for option in options:
        check.choice(f"an option of {name}", option, known)
    return make(tuple(sample), outputs, **options)


def takes_text(name: str) -> bool:
    """Whether a network of the table takes token numbers.

    Examples
    --------
    >>> takes_text("lstm"), takes_text("cnn")
    (True, False)
    """
    return "vocabulary" in inspect.signature(NETS[name]).parameters


def _options(make: Callable[..., Net]) -> list[str]:
    """Names of a constructor's keyword arguments, including those that it passes on."""
    kinds = inspect.signature(make).parameters.values()
    own = [p.name for p in kinds if p.kind is p.KEYWORD_ONLY]
    return own + (["convolution", "statistics"] if any(p.kind is p.VAR_KEYWORD for p in kinds) else [])
