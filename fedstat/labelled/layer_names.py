"""Which layers are meant: by name, by pattern, or all whose units are hidden units."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from fedstat._utils.check import did_you_mean, few

RECURRENT = re.compile(r"weight_(ih|hh)(_l\d+)?(_reverse)?$")
EMBEDDING = re.compile(r"embedding|(^|[._])emb(ed\w*|s)?\d*($|[._])|(^|\.)(wte|wpe|position)$", re.IGNORECASE)
LORA = re.compile(r"(^|[._])lora[_.]?(embedding_)?(A|B|down|up)($|\.)")
_OUTPUT = re.compile(r"(^|\.)(outputs?|out|head|heads|classifier|logits|lm_head|fc_out|readout)$", re.IGNORECASE)


def stem(key: str) -> str:
    """Layer that a parameter belongs to: ``"fc1.weight"`` and ``"fc1"`` to ``"fc1"``, slashes to dots."""
    return key.removesuffix(".weight").replace("/", ".")


def is_pattern(name: str) -> bool:
    """Whether a name has the marks of a pattern, ``*``, ``?`` or ``[``."""
    return any(mark in name for mark in "*?[")


def require_names(what: str, asked: Iterable[object]) -> None:
    """Raise ValueError unless all layers that are asked for are named by text."""
    if bad := [one for one in asked if not isinstance(one, str)]:
        raise ValueError(f"{what} must be names, such as 'fc1', or patterns, such as 'conv*', but got {bad[0]!r:.100}")


def matching(asked: Sequence[str], there: Sequence[str], where: str) -> list[str]:
    """Names that are asked for, in the order of the request, those of a pattern in their own.

    Parameters
    ----------
    asked : sequence of str
        Names, or patterns such as ``"conv*"``.
    there : sequence of str
    where : str
        What holds them, for the message.

    Raises
    ------
    ValueError
        If a name is not there, or nothing matches a pattern; the message names the nearest.

    Examples
    --------
    >>> matching(["fc*", "conv1.weight"], ["conv1", "fc1", "fc2"], "the run")
    ['fc1', 'fc2', 'conv1']
    >>> matching(["fcl"], ["conv1", "fc1"], "the run")
    Traceback (most recent call last):
    ValueError: the run has no layer 'fcl', only conv1, fc1. Did you mean 'fc1'?
    """
    found: list[str] = []
    for name in asked:
        one = next((x for x in (name, stem(name)) if x in there), None)
        several = [one] if one is not None else [x for x in there if is_pattern(name) and fnmatchcase(x, name)]
        if not several:
            raise missing(name, there, where)
        found += several
    return list(dict.fromkeys(found))


def missing(name: str, there: Sequence[str], where: str) -> ValueError:
    """Error for a layer, or a pattern of layers, that is not there."""
    what = f"layer that matches {name!r}" if is_pattern(name) else f"layer {name!r}"
    return ValueError(f"{where} has no {what}, only {few(there, 8)}.{did_you_mean(name, there, cutoff=0.6)}")


def left_out(shapes: Mapping[str, tuple[int, ...]], output: str | None = None) -> dict[str, str]:
    """Layers that are not analysed unless named, with the reason: their units are not hidden units.

    Parameters
    ----------
    shapes : mapping from layer to shape
        Of one client's weights, units first, in the order of the network.
    output : str, optional
        The output layer, where it is known. Otherwise it is the dense layer that is named as one ("head", "classifier",
        ...), or else the last dense layer.

    Returns
    -------
    dict from layer to reason
        Embeddings, by their names, and the output layer, which no factor of a low-rank update is; never all layers.

    Examples
    --------
    >>> left_out({"conv1": (6, 1, 3, 3), "fc1": (20, 54), "fc2": (10, 20)})
    {'fc2': 'the last dense layer, taken for the output'}
    >>> left_out({"fc1": (20, 54)})
    {}
    """
    found = {name: "embedding" for name, shape in shapes.items() if len(shape) == 2 and EMBEDDING.search(name)}
    found = found if len(found) < len(shapes) else {}
    rest = [name for name in shapes if name not in found]
    if len(rest) == 1:
        return found
    if output in rest:
        return {**found, str(output): "output layer"}
    dense = [name for name in rest if len(shapes[name]) == 2 and not (RECURRENT.search(name) or LORA.search(name))]
    named = [name for name in dense if _OUTPUT.search(name)]
    if len(named) == 1:
        return {**found, named[0]: "output layer, by its name"}
    return {**found, dense[-1]: "the last dense layer, taken for the output"} if dense else found
