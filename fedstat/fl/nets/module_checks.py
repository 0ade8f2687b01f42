"""Checks of a ``torch.nn.Module`` before it becomes a network of stacked clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def describe(path: str, part: nn.Module) -> str:
    """Return the path and the class of a part of the module, for messages."""
    return f"{path or 'the module itself'} ({type(part).__name__})"


def require_supported(module: nn.Module) -> None:
    """Raise ValueError if a part of the module cannot be a function of parameters that belong to one client."""
    for path, part in module.named_modules():
        description, place = describe(path, part), f"module.{path}".rstrip(".")
        if isinstance(part, _WRAPPERS):
            raise ValueError(
                f"{description} wraps a module for other training. Pass the module inside it, {place}.module."
            )
        if isinstance(part, torch.jit.ScriptModule) or hasattr(part, "_orig_mod"):
            raise ValueError(f"{description} is compiled. Pass the module that it was compiled from.")
        if lazy := [name for name, tensor in direct_tensors(part).items() if is_lazy(tensor)]:
            raise ValueError(
                f"{description} has no {lazy[0]} before its first forward pass, which would draw it from torch's "
                "global seed. Run the module on a batch first, module(torch.zeros(2, ...)), or write the layer with "
                "its sizes."
            )
        if isinstance(part, _BATCH_NORMS) and (not part.track_running_stats or part.momentum is None):
            raise ValueError(f"{description} must have track_running_stats=True and a momentum, but does not")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (part.max_norm is not None or part.sparse):
            raise ValueError(f"{description} must have max_norm=None and sparse=False, but does not")


def direct_tensors(part: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, without its submodules'."""
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def require_recomputed(module: nn.Module, runner: nn.Module, before: Sequence[Tensor]) -> None:
    """Raise ValueError if a tensor was computed from parameters, and a forward pass does not compute it anew.

    Parameters
    ----------
    module, runner : torch.nn.Module
        The module, and its copy after a forward pass.
    before : sequence of Tensor
        The copy's tensors before the forward pass.
    """
    for path, part in module.named_modules():
        for name in computed_attributes(part):
            if any(vars(runner.get_submodule(path))[name] is earlier for earlier in before):
                place = f"module.get_submodule({path!r})" if path else "module"
                raise ValueError(
                    f"{describe(path, part)} computes {name} from other tensors, but not in its forward pass, so that "
                    f"it would not follow them in training. Pass the module after {place}.{name} = "
                    f"{place}.{name}.detach()."
                )


def require_seeds(module: nn.Module, device: torch.device) -> None:
    """Raise ValueError if a part draws by cuDNN, whose random numbers in recurrent layers cannot be seeded anew."""
    for path, part in module.named_modules() if device.type == "cuda" else ():
        if isinstance(part, nn.RNNBase) and part.dropout and part.num_layers > 1:
            raise ValueError(
                f"{describe(path, part)} has dropout between its layers, which draws outside the run's streams on a "
                "GPU. Write single layers with an nn.Dropout between them, or train on the CPU."
            )


def computed_attributes(part: nn.Module) -> dict[str, Tensor]:
    """Return the tensors among the attributes of a part that are computed from parameters."""
    return {name: value for name, value in vars(part).items() if isinstance(value, Tensor) and not value.is_leaf}


def require_complete(before: nn.Module, after: nn.Module) -> None:
    """Raise ValueError if a forward pass made parameters or buffers, which would come from torch's global seed."""
    earlier = set(_names(before))
    if later := [name for name in _names(after) if name not in earlier]:
        raise ValueError(
            f"the module makes {later[0]} in its first forward pass, which would draw it from torch's global seed. "
            "Make all parameters and buffers in __init__, or run the module on a batch first."
        )


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def conversion_hint(module: nn.Module, sample: Tensor) -> str:
    """Say what to pass instead if numbers of the module or the sample are not float32 on the CPU; "" if they are."""
    tensors = [*module.parameters(), *module.buffers()]
    for name, values in (("module", tensors), ("sample", [sample])):
        for tensor in values:
            if tensor.is_meta:
                return f"the {name} holds no numbers (device meta). Pass it once it has some."
            if tensor.device.type != "cpu":
                return f"the {name} is on device {tensor.device}. Pass {name}.cpu(); training moves it (device=...)."
            if tensor.is_complex():
                return f"the {name} holds complex numbers, but clients train float32. Write it with real numbers."
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                return f"the {name} is {tensor.dtype}, but clients train float32. Pass {name}.float()."
    return ""
