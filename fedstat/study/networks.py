"""The network of a run, from its settings and data."""

from __future__ import annotations

from typing import Any

from fedstat import data as datasets
from fedstat._later import xr
from fedstat.data import arrays
from fedstat.data._files import Remembered
from fedstat.fl import nets
from fedstat.fl.nets import Net
from fedstat.study import words

TEXTS = ("ag-news", "shakespeare", "shakespeare-leaf")
"""Published data sets of texts; the others are images."""


def network(settings: Any, fed: xr.Dataset) -> Net:
    """The network for a data set's samples and classes; ``settings`` are :class:`fedstat.study.Settings`."""
    return make(settings, *of_samples(fed))


def of_samples(fed: xr.Dataset) -> tuple[tuple[int, ...], int, int | None]:
    """Shape of a sample, number of classes, and size of the vocabulary of texts."""
    text = fed.x.dtype.kind in "iu" and "scale" not in fed.x.attrs
    names = fed.y.attrs.get("names")
    # For characters the vocabulary is the classes; for words the loader lists it.
    vocabulary = len(fed.x.attrs.get("vocabulary", names)) if text else None
    outputs = len(names) if names is not None else int(fed.y.max()) + 1
    return tuple(fed.x.shape[1:]), outputs, vocabulary


_of_arrays = Remembered(lambda path: of_samples(datasets.load(path)), size=8)


def like(data: str) -> tuple[tuple[int, ...], int, int | None]:
    """Typical sample shape, classes and vocabulary of a data set, to check networks before it is read."""
    if arrays.is_arrays(data):
        return _of_arrays(data)
    side = 8 if data == "digits" else 28
    return ((80,), 80, 80) if data in TEXTS else ((1, side, side), 10, None)


def make(settings: Any, sample: tuple[int, ...], outputs: int, vocabulary: int | None) -> Net:
    """The network that the settings name, for such samples; ValueError if it does not take them."""
    text = vocabulary is not None
    if nets.takes_text(settings.net) != text:
        fitting = [name for name in nets.NETS if nets.takes_text(name) == text]
        hint = ""
        if text and ".npz" in settings.data:
            hint = (
                " Whole numbers are tokens of texts: save features as float32, which data.to_float(data) makes of them."
            )
        raise ValueError(
            f"net {settings.net!r} takes {'images' if text else 'texts'}, but {settings.data} holds "
            f"{'texts' if text else 'images'}. Choose {', '.join(fitting)}.{hint}"
        )
    options: dict[str, Any] = {"width": settings.width} | words.options("net_options", settings.net_options)
    if settings.norm is not None:
        options["norm"] = settings.norm
    if text:
        options["vocabulary"] = vocabulary
    return nets.named(settings.net, sample, outputs, **options)
