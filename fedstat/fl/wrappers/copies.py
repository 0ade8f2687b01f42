"""Several copies of a network as one network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstat.fl import nets
from fedstat.fl.nets import Net, Params


def part(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of one copy, by their names in the network."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def join(parts: Iterable[Mapping[str, Any]], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the values of all copies, by their names with the prefix of the copy."""
    pairs = zip(prefixes, parts, strict=True)
    return {prefix + name: value for prefix, values in pairs for name, value in values.items()}


def copies(net: Net, prefixes: Sequence[str], more: Mapping[str, tuple[int, ...]] | None = None, **fields: Any) -> Net:
    """Make a network of several copies of a network, whose parameters have the prefix of their copy.

    Parameters
    ----------
    net : Net
    prefixes : sequence of str
        One for each copy; no prefix begins with another.
    more : mapping from name to tuple of int, optional
        Shapes of parameters that belong to no copy; they come first.
    **fields
        ``init``, ``apply``, ``accumulate`` and ``base`` of the new network, and other fields that differ from those of
        one copy.
    """
    more = more or {}

    def every(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for prefix in prefixes for name in names)

    def whole(params: Params) -> Params:
        weights = [nets.whole(net, part(params, prefix)) for prefix in prefixes]
        return {name: params[name] for name in more} | join(weights, prefixes)

    made = net._replace(
        shapes={**more, **join([net.shapes] * len(prefixes), prefixes)},
        buffers=every(net.buffers),
        unshared=every(net.unshared),
        features=None,
        head=None,
        heads=every(nets.head_layers(net)),
        undivided=every(net.undivided),
        whole=whole if net.whole else None,
        thin=every(net.thin),
        constants=None,
        pieces={},
    )
    return made._replace(**fields)
