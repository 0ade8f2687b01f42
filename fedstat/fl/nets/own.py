"""Networks that functions of users' files make, by names such as "path/to/file.py:small_cnn"."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedstat._utils import check, streams
from fedstat._utils.lazy import torch
from fedstat.fl import custom
from fedstat.fl.nets.base import Net, n_outputs, output_layer, require_net

_DRAWING = threading.Lock()  # torch's generator is one for all threads


def _is_network(thing: object) -> bool:
    return isinstance(thing, Net | torch.nn.Module)


KIND = custom.Kind("net", "a fedstat.fl.nets.Net or a torch.nn.Module", _is_network)


def options(name: str) -> dict[str, inspect.Parameter]:
    """Return the function's arguments after the shape of a sample and the number of outputs, by name.

    Raises
    ------
    ValueError
        If there is no such function, or if it does not take the shape and the number of outputs.
    """
    parameters = list(inspect.signature(_function(name)).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < 2 or any(p.kind not in positional for p in parameters[:2]):
        raise ValueError(
            f"{custom.short(name)} must take the shape of a sample and the number of outputs, as in "
            f"def {name.rpartition(':')[2]}(sample, outputs), but takes ({', '.join(map(str, parameters))})"
        )
    return {p.name: p for p in parameters[2:]}


def require_options(name: str, settings: Collection[str]) -> None:
    """Raise ValueError, with the nearest names, unless the function takes these arguments and needs no others."""
    parameters = options(name)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [n for n, p in parameters.items() if p.kind not in variable]
    takes_others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for option in settings:
        if option not in names and not takes_others:
            takes = ", ".join(names) or "no options"
            raise ValueError(
                f"{custom.short(name)} takes {takes}, but got {option!r:.200}.{check.did_you_mean(option, names)}"
            )
    for option in names:
        if option not in settings and parameters[option].default is inspect.Parameter.empty:
            hint = " Only texts have one." if option == "vocabulary" else f" Set it: --net-options {option}=VALUE."
            raise ValueError(f"{custom.short(name)} needs {option}, but got none.{hint}")


def make(
    name: str, sample: Sequence[int], outputs: int, settings: Mapping[str, Any], *, tokens: bool, seed: int
) -> Net:
    """Call the function of a user's file, and convert its module to a network.

    Parameters
    ----------
    name : str
        Such as "path/to/file.py:small_cnn".
    sample : sequence of int
        Shape of one sample.
    outputs : int
        Number of outputs that the data need. For two classes, the network may also have one output.
    settings : mapping from str to object
        Arguments of the function, see :func:`options`.
    tokens : bool
        True if samples are token numbers.
    seed : int
        Seed of the run. The function draws from torch's generator, which is seeded by a stream of its own and has its
        present state afterwards.

    Raises
    ------
    ValueError
        If the function fails or returns something else, or if its network does not fit the samples.
    """
    construct = _function(name)
    with _drawing_from(streams.seed_of(seed, "network in a file")):
        try:
            network = construct(tuple(sample), outputs, **settings)
        except ValueError as error:
            is_named = custom.short(name) in str(error)
            raise error if is_named else ValueError(f"{custom.short(name)} failed: {error}") from error
    try:
        net = network if isinstance(network, Net) else _convert(network, sample, tokens=tokens)
        require_net(net)
    except ValueError as error:
        raise ValueError(f"{custom.short(name)} made a network that cannot be trained: {error}") from error
    if n_outputs(net) != outputs and (n_outputs(net), outputs) != (1, 2):
        raise ValueError(
            f"{custom.short(name)} must make a network of {outputs} outputs, its second argument, but its output layer "
            f"{output_layer(net)!r} has {n_outputs(net)}"
        )
    return net


def _function(name: str) -> Callable[..., Any]:
    """Return the function of the file, whose first use executes the file; what the file draws then is always equal."""
    with _drawing_from(streams.seed_of(0, "file of a network")):
        return custom.constructor(name, KIND)


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU within the context, and restore its state afterwards."""
    with _DRAWING:
        generator = torch.default_generator
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


def _convert(module: torch.nn.Module, sample: Sequence[int], *, tokens: bool) -> Net:
    from fedstat.fl.nets.module import from_module  # loads torch

    return from_module(module, torch.zeros(tuple(sample), dtype=torch.int64) if tokens else tuple(sample))
