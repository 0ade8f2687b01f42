"""A user's module as a function of the parameters of all clients, computed one by one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedstat.fl.nets.base import Gradient, Params, Piece
from fedstat.fl.nets.conv import channels_last, conv2d
from fedstat.fl.nets.module_checks import require_seeds
from fedstat.fl.nets.module_dropout import SEEDS, Draws, draws_of, seed_of, seeded
from fedstat.fl.nets.module_layers import is_count
from fedstat.fl.nets.module_trial import Pick, copied, named_tensors


class _Place(NamedTuple):
    """A place of a tensor in a module: an entry of a dict or list that is an attribute of the part at ``path``."""

    path: str
    attribute: str
    key: Any


class _OfThread(NamedTuple):
    """A copy of the module that one thread fills with the tensors of one client after the other.

    Attributes
    ----------
    module : torch.nn.Module
    draws : Draws
    entries : dict from name to list of (dict or list, key)
        Entries of the module that hold a tensor.
    """

    module: nn.Module
    draws: Draws
    entries: dict[str, list[tuple[Any, Any]]]


class SafeConvolutions(TorchFunctionMode):
    """Compute convolutions of images by :func:`fedstat.fl.nets.conv.conv2d` instead of torch's function."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (conv2d if function is torch.conv2d else function)(*args, **kwargs or {})


class Stacked:
    """A module as a function of the parameters of all clients.

    ``torch.func.functional_call`` would find the places of all tensors anew in each call, and miss the lists of weights
    that recurrent layers hold.

    Parameters
    ----------
    module : torch.nn.Module
        It is copied.
    pieces : mapping from str to Piece
        Parameters of the module's tensors.
    statistics : collection of str
        Parameters that training changes without a gradient.
    pick : callable
        From what the module returns to its outputs.
    noise : sequence of str
        Names of the draws of its dropouts, in the order of their calls, or only ``SEEDS``.
    duplicate : bool
        True: a single sample is duplicated in training.
    """

    def __init__(
        self,
        module: nn.Module,
        pieces: Mapping[str, Piece],
        statistics: Sequence[str],
        pick: Pick,
        noise: Sequence[str],
        duplicate: bool,
    ) -> None:
        self._empty, self._pieces, self._pick = copied(module).to("meta"), dict(pieces), pick
        self._names = tuple(dict.fromkeys(piece.name for piece in pieces.values()))
        self._statistics = frozenset(statistics)
        self._changed = [name for name, piece in pieces.items() if piece.name in self._statistics]
        self._noise = () if SEEDS in noise else tuple(noise)
        self._is_seeded, self._duplicate = SEEDS in noise, duplicate
        self._places = _places(module)
        tensors = named_tensors(module)
        self._constants = {n: t for n, t in tensors.items() if n not in pieces and not is_count(n)}
        self._of_threads = threading.local()
        convolutions = (part for part in module.modules() if isinstance(part, nn.Conv2d))
        is_strided = any(c.kernel_size == (1, 1) and max(c.stride) > 1 for c in convolutions)
        self._context = SafeConvolutions if is_strided else nullcontext

    def __call__(
        self, params: Params, x: Tensor, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return outputs (client, sample, output), see ``Net.apply``."""
        return torch.stack(self._outputs(self._tensors(params), x, live, noise))

    def accumulate(
        self,
        params: Params,
        x: Tensor,
        gradient: Gradient,
        into: Params,
        beta: float,
        alpha: float,
        live: Tensor | None = None,
        noise: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Set into ← beta·into + alpha·∂loss, see ``Net.accumulate``, with separate leaves for each client."""
        with torch.no_grad():
            tensors = self._tensors({name: params[name].data for name in self._names})
        names = [name for name, piece in self._pieces.items() if piece.name in into]
        for name in names:
            for tensor in tensors[name]:
                tensor.requires_grad_()
        outputs = self._outputs(tensors, x, live, noise)
        at_outputs = gradient(torch.stack([out.detach() for out in outputs]).float()).to(outputs[0])
        targets = [(self._pieces[name], into[self._pieces[name].name].unbind()) for name in names]
        for c, out in enumerate(outputs):
            grads: Sequence[Tensor | None] = [None] * len(names)
            if out.requires_grad:
                leaves = [tensors[name][c] for name in names]
                grads = torch.autograd.grad(out, leaves, at_outputs[c], allow_unused=True)
            for p in into.values() if beta != 1 else ():
                p[c].mul_(beta)
            for (piece, rows), grad in zip(targets, grads, strict=True):
                if grad is not None:
                    piece.entries(rows[c]).add_(piece.part(grad), alpha=alpha)

    def _tensors(self, params: Params) -> dict[str, Sequence[Tensor]]:
        """Return the module's tensors by name, one for each client.

        A statistic's tensors have separate version counts (``.data``), so that an update of one client's statistic does
        not count as a change of the others'.
        """
        tensors: dict[str, Sequence[Tensor]] = {}
        for name, piece in self._pieces.items():
            rows = piece.of(params[piece.name], 1).unbind()
            tensors[name] = [client.data for client in rows] if piece.name in self._statistics else rows
        return tensors

    def _outputs(
        self,
        tensors: Mapping[str, Sequence[Tensor]],
        x: Tensor,
        live: Tensor | None,
        noise: Mapping[str, Tensor] | None,
    ) -> list[Tensor]:
        """Return the outputs (sample, output) of each client."""
        first = next(iter(tensors.values()))[0]
        thread = self._thread(first.device, first.dtype)
        seeds = noise[SEEDS][:, 0].tolist() if noise and self._is_seeded else None
        training = live is not None and (seeds is not None or not self._is_seeded)  # without seeds, it must not draw
        if thread.module.training != training:
            thread.module.train(training)
        x = x.to(first.dtype) if x.is_floating_point() else x
        n_real = None if live is None else live.sum(1).tolist()
        places = [(tensors[name], entries) for name, entries in thread.entries.items()]
        changed = [(tensors[name], thread.entries[name][0]) for name in self._changed]
        outputs = []
        try:
            with self._context():
                for c in range(len(x)):
                    for values, entries in places:
                        for container, key in entries:
                            container[key] = values[c]
                    real = None if live is None or n_real[c] == live.shape[1] else live[c]  # type: ignore[index]
                    draws = [noise[name][c] for name in self._noise] if noise else []
                    context = nullcontext() if seeds is None else seeded(seed_of(seeds[c]), x.device)
                    outputs.append(self._of_client(thread, x[c], real, draws, context))
                    for values, (container, key) in changed:
                        if (new := container[key]) is not values[c]:  # forward assigned another tensor
                            values[c].copy_(new.detach())
        finally:
            for _, entries in places:
                for container, key in entries:
                    container[key] = None
        return outputs

    def _of_client(
        self,
        thread: _OfThread,
        x: Tensor,
        live: Tensor | None,
        draws: Sequence[Tensor],
        context: AbstractContextManager[None],
    ) -> Tensor:
        """Return the outputs of one client, 0 for padding (``live`` False)."""
        duplicate = self._duplicate and thread.module.training
        x = channels_last(x) if x.ndim == 4 and x.is_floating_point() else x

        def real_rows(rows: Tensor) -> Tensor:
            real = rows if live is None else rows[live]
            return torch.cat([real, real]) if duplicate and len(real) == 1 else real

        real = real_rows(x)
        thread.draws.queue = iter([real_rows(u) for u in draws]) if draws else None
        try:
            with context:
                out: Tensor = self._pick(thread.module(real))
        finally:
            thread.draws.queue = None
        n_real = len(x) if live is None else int(live.sum())
        out = out[:n_real] if len(out) > n_real else out
        return out if live is None else out.new_zeros(len(x), *out.shape[1:]).index_put((live.nonzero()[:, 0],), out)

    def _thread(self, device: torch.device, dtype: torch.dtype) -> _OfThread:
        """Return this thread's copy of the module, whose constants are on the device."""
        threads = self._of_threads.__dict__.setdefault("by_kind", {})
        if (device, dtype) not in threads:
            if self._is_seeded:
                require_seeds(self._empty, device)
            module = copy.deepcopy(self._empty).eval()
            entries: dict[str, list[tuple[Any, Any]]] = {}
            for name, places in self._places.items():
                entries[name] = [(vars(module.get_submodule(p.path))[p.attribute], p.key) for p in places]
            for name, constant in self._constants.items():
                value = constant.to(device, dtype if constant.is_floating_point() else constant.dtype)
                for container, key in entries[name]:
                    container[key] = value
            threads[device, dtype] = _OfThread(module, draws_of(module), {name: entries[name] for name in self._pieces})
        thread: _OfThread = threads[device, dtype]
        return thread


def _places(module: nn.Module) -> dict[str, list[_Place]]:
    """Return the places of parameters and buffers by name: all entries of a part's dicts and lists that hold them."""
    tensors = named_tensors(module)
    names, places = {id(tensor): name for name, tensor in tensors.items()}, {name: [] for name in tensors}  # type: ignore[var-annotated]
    for path, part in module.named_modules():
        for attribute, values in vars(part).items():
            entries = (
                values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
            )
            for key, value in entries:
                if isinstance(value, Tensor) and id(value) in names:
                    places[names[id(value)]].append(_Place(path, attribute, key))
    return places
