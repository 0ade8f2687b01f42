"""Checks of a ``torch.nn.Module`` before it becomes a network of stacked clients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)
_STACKED = (*CONVOLUTIONS, *NORMS, nn.Linear, nn.Embedding, nn.RNNBase, nn.RNNCellBase)
_RANDOM = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_UNDO = {
    "_mask": "torch.nn.utils.prune.remove",
    "_g": "torch.nn.utils.remove_weight_norm",
    "_u": "torch.nn.utils.remove_spectral_norm",
}
"""Functions that undo how a tensor is computed, by the suffix of a tensor that it is computed from."""


def describe(path: str, part: nn.Module) -> str:
    """Return the path and the class of a part of the module, for messages."""
    return f"{path or 'the module itself'} ({type(part).__name__})"


def require_supported(module: nn.Module) -> None:
    """Raise ValueError if a part of the module is not a function of stacked parameters."""
    owner: dict[int, str] = {}
    for path, part in module.named_modules():
        description = describe(path, part)
        if isinstance(part, _WRAPPERS):
            place = f"module.{path}.module" if path else "module.module"
            raise ValueError(f"{description} wraps a module for other training. Pass the module inside it, {place}.")
        _require_plain(path, part)
        if isinstance(part, _RANDOM):
            raise ValueError(f"{description} draws random numbers outside the run's named streams. Remove it.")
        if isinstance(part, _BATCH_NORMS) and (not part.track_running_stats or part.momentum is None):
            raise ValueError(f"{description} must have track_running_stats=True and a momentum, but does not")
        if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.sparse):
            raise ValueError(f"{description} must have max_norm=None and sparse=False, but does not")
        tensors = direct_tensors(part)
        if tensors and not isinstance(part, _STACKED):
            raise ValueError(
                f"{description} holds {next(iter(tensors))} itself, and its units are unknown. Parameters and buffers "
                "must belong to Conv, Linear, Embedding, LSTM, GRU, RNN, BatchNorm, GroupNorm or LayerNorm modules. "
                "Write it with these."
            )
        for name, tensor in tensors.items():
            if id(tensor) in owner:
                raise ValueError(
                    f"{description} shares its {name} with {owner[id(tensor)]}. Use a separate tensor for each."
                )
            owner[id(tensor)] = path


def direct_tensors(part: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, without its submodules'."""
    return {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}


def _require_plain(path: str, part: nn.Module) -> None:
    """Raise ValueError if tensors of a part do not exist yet, or are computed from other tensors."""
    description, tensors = describe(path, part), direct_tensors(part)
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        raise ValueError(
            f"{description} has no {lazy[0]} before its first forward pass, which would draw it from torch's global "
            "seed. Run the module on a batch first, module(torch.zeros(2, ...)), or write the layer with its sizes."
        )
    place = f"module.get_submodule({path!r})" if path else "module"
    if parametrize.is_parametrized(part):
        computed = next(iter(part.parametrizations))  # type: ignore[arg-type]
        undo = f"torch.nn.utils.parametrize.remove_parametrizations({place}, {computed!r})"
        raise _computed_error(description, str(computed), undo)
    for name, value in vars(part).items():
        suffix = next((end for end in _UNDO if f"{name}{end}" in tensors), None)
        if isinstance(value, Tensor) and suffix:
            raise _computed_error(description, name, f"{_UNDO[suffix]}({place}, {name!r})")
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise _computed_error(description, name, f"{place}.{name} = {place}.{name}.detach()")


def _computed_error(description: str, name: str, undo: str) -> ValueError:
    return ValueError(
        f"{description} computes {name} from other tensors, but clients train {name} itself. Pass the module after "
        f"{undo}."
    )


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
