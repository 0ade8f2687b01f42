"""Random numbers of a user's module in training: uniform draws of its dropouts, or a seed for each client and step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
SEEDS = "module"
"""Noise from which the seeds of a module's random numbers are made, two numbers in (0, 1) of 24 bits each."""
_LOCK = threading.Lock()


class Draws:
    """Uniform draws of all dropouts of a module, in the order of their calls.

    Attributes
    ----------
    queue : iterator of Tensor (sample, ...), optional
        Uniform draws; None: nothing is dropped.
    shapes : list of tuple of int, optional
        If it is a list, every call appends the shape of its draws, samples first; () if p is 0, which needs no draws.
    """

    def __init__(self) -> None:
        self.queue: Iterator[Tensor] | None = None
        self.shapes: list[tuple[int, ...]] | None = None


class Dropout(nn.Module):
    """Dropout that retains entries whose draw is at least p."""

    def __init__(self, p: float, by_channel: bool, draws: Draws) -> None:
        super().__init__()
        self.p, self.by_channel, self.draws = p, by_channel, draws

    def forward(self, x: Tensor) -> Tensor:
        """Multiply retained entries by 1/(1 − p), as torch does; in evaluation, return ``x``."""
        if self.draws.shapes is not None:
            shape = tuple(x.shape)
            shape = (*shape[:2], *(1,) * (len(shape) - 2)) if self.by_channel else shape
            self.draws.shapes.append(shape if self.p else ())
        if self.draws.queue is None or not self.p:
            return x
        is_retained = next(self.draws.queue) >= self.p
        return x * is_retained * (1 / (1 - self.p) if self.p < 1 else 0.0)


def adapt(module: nn.Module) -> None:
    """Replace the dropouts of a module by this file's class, in place."""
    draws = Draws()
    for path, part in [*module.named_modules()]:
        if type(part) in DROPOUTS:
            if not path:
                raise ValueError("the module is only a dropout, which has no parameters to train")
            module.set_submodule(path, Dropout(part.p, not isinstance(part, nn.Dropout), draws))


def draws_of(module: nn.Module) -> Draws:
    """Return the draws of a module's dropouts; new, unused draws if the module has no dropouts."""
    return next((part.draws for part in module.modules() if isinstance(part, Dropout)), Draws())


def noise_shapes(module: nn.Module, sample: Tensor) -> dict[str, tuple[int, ...]] | None:
    """Return names and one sample's shapes of the dropouts' draws, in the order of their calls.

    None: the first axis of a dropout's input is not the samples, or other axes change.
    """
    draws, shapes = draws_of(module), []
    for n in (2, 3):
        draws.shapes = []
        with torch.no_grad():
            module.eval()(torch.stack([sample] * n))
        shapes.append(draws.shapes)
    draws.shapes = None
    if any((a[:1], b[:1]) != ((2,), (3,)) or a[1:] != b[1:] for a, b in zip(*shapes, strict=True) if a):
        return None
    return {f"dropout{i}": shape[1:] or (1,) for i, shape in enumerate(shapes[0], 1) if shape}


def seed_of(numbers: Sequence[float]) -> int:
    """Return the seed that two numbers in (0, 1) make."""
    first, second = (int(u * 2**24) for u in numbers)
    return first << 24 | second


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch draw from a seed, on the CPU and the device; other threads that do so wait, then go on as if alone."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(
            torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        )
    with _LOCK:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def draws_alike(module: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Return True if two modules draw equally many of torch's random numbers in training."""
    states = []
    for network in (module, other):
        with seeded(0, x.device), torch.no_grad():
            copy.deepcopy(network).train()(x)
            states.append(torch.default_generator.get_state())
    return torch.equal(*states)
