"""What ``/parameters/<layer>`` of a store holds: the factors of composed weights, before and after aggregation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from fedstat import store
from fedstat.fl import nets
from fedstat.fl.nets import Net, Params
from fedstat.store import Group

GROUP = "parameters"
STAGES = ("trained", "aggregated")
"""As local training left them, NaN for clients that were not active; and as a client predicts with them."""


def layout(net: Net, layers: Sequence[str], rounds: Sequence[int], clients: int, at_once: int) -> dict[str, Group]:
    """Groups ``parameters/<layer>``; none where the network is not composed, whose parameters are its weights.

    Parameters
    ----------
    net : Net
    layers : sequence of str
        Layers that are kept.
    rounds : sequence of int
        Checkpoints.
    clients, at_once : int
        Clients, and how many of them make a chunk.

    Raises
    ------
    ValueError
        If a factor has the name of a dim, or of the composed weight in the store.
    """
    groups: dict[str, Group] = {}
    for layer in layers if net.whole is not None else ():
        coords: dict[str, Any] = {
            "checkpoint": ("checkpoint", rounds, {"long_name": "round after which parameters were kept"}),
            "stage": ("stage", [*STAGES], {"long_name": "before or after aggregation"}),
            "client": clients,
        }
        lead, chunk = tuple(coords), {"checkpoint": 1, "stage": 1, "client": at_once}
        variables: dict[str, tuple[Any, ...]] = {}
        for name in _of(net, layer):
            sizes = _dims(net, name)
            coords |= sizes
            _require(name, variables)
            variables[variable(name)] = ((*lead, *sizes), "float32", {"shape": list(net.shapes[name])})
        groups[f"{GROUP}/{layer}"] = store.group(coords, chunk, **variables)
    return groups


def values(net: Net, params: Params, layers: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Every variable of the groups with its values, array (client, ...)."""
    for layer in layers if net.whole is not None else ():
        for name in _of(net, layer):
            p = params[name]
            yield f"{GROUP}/{layer}/{variable(name)}", (p.flatten(2) if p.ndim > 2 else p).cpu().numpy()


def variable(name: str) -> str:
    """``"fc1.u"`` to ``"u"``, and ``"fc1.weight"`` to ``"w"``, as ``weight`` is a dim."""
    kind = name.rpartition(".")[2]
    return "w" if kind == "weight" else kind


def _of(net: Net, layer: str) -> list[str]:
    return [name for name in net.shapes if nets.layer_of(name) == layer]


def _dims(net: Net, name: str) -> dict[str, int]:
    """Dims of one client's values: (unit, weight) where they are those of the layer's weights, else their own."""
    layer, shape, kind = nets.layer_of(name), net.shapes[name], variable(name)
    by_unit = name not in net.undivided
    dims = {"unit" if by_unit else f"{kind}_row": shape[0]}
    if len(shape) > 1:
        base, columns = nets.base_of(net), int(np.prod(shape[1:]))
        widest = max(int(np.prod(base.shapes[n][1:])) for n in _of(base, layer))
        dims["weight" if by_unit and columns == widest else f"{kind}_column"] = columns
    return dims


def _require(name: str, others: Collection[str]) -> None:
    """ValueError if a factor's variable would have the name of another, or of a dim."""
    if variable(name) in {*others, "checkpoint", "stage", "client", "unit"}:
        raise ValueError(
            f"the factor {name!r} cannot be stored as {variable(name)!r}, which names a dim or another factor of the "
            "layer. Give it another name in its Part."
        )
