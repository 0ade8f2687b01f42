"""Trial runs of a user's module, which show what it uses, changes, returns and draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedstat.fl.nets.module_checks import (
    computed_attributes,
    conversion_hint,
    describe,
    require_complete,
    require_recomputed,
)
from fedstat.fl.nets.module_dropout import seeded

Pick = Callable[[Any], Any]
"""From what a module returns to its outputs (sample, output)."""
_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


class Trial(NamedTuple):
    """Observations of a module that ran on two copies of a sample.

    Attributes
    ----------
    outputs : int
    first, last : dict from name to int
        Positions of the first and the last use of parameters and buffers, among all uses.
    reached : set of str
        Parameters on which the outputs depend.
    statistics : set of str
        Buffers that a forward pass in training changes.
    draws : bool
        True: draws torch's random numbers in training.
    by_batch : bool
        True: outputs in training differ from those in evaluation, or depend on other samples.
    activations : int
        Number of values that one sample's forward pass stores for the backward pass.
    """

    outputs: int
    first: dict[str, int]
    last: dict[str, int]
    reached: set[str]
    statistics: set[str]
    draws: bool
    by_batch: bool
    activations: int


def copied(module: nn.Module) -> nn.Module:
    """Copy a module; tensors that its hooks compute from parameters become constants until they are computed anew."""
    computed = [value for part in module.modules() for value in computed_attributes(part).values()]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in computed})


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a tensor of several names has the first."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class _Uses(TorchFunctionMode):
    """Record the positions of the first and the last use of tensors by torch's functions."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self._count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # a shape or a type is no use
            for leaf in tree_leaves((args, kwargs)):
                if (name := self._names.get(id(leaf))) is not None:
                    self._count += 1
                    self.first.setdefault(name, self._count)
                    self.last[name] = self._count
        return result


def try_module(module: nn.Module, sample: Tensor, pick: Pick) -> Trial:
    """Run a module in training and evaluation on two copies of a sample.

    Raises
    ------
    ValueError
        If it does not take the sample, returns no (sample, output), leaves parameters unused, or draws random numbers
        that cannot be repeated.
    """
    x = torch.stack([sample, sample])
    if x.is_floating_point():
        x = x + torch.linspace(0, 1, x.numel()).view(x.shape).to(x)  # random parts may have no effect on zeros
    runner, again, quiet = (_differentiable(module).train(mode) for mode in (True, True, False))
    before = {name: b.clone() for name, b in runner.named_buffers()}
    uses = _Uses({id(tensor): name for name, tensor in named_tensors(runner).items()})
    stored = _Stored(runner)
    try:
        with uses, saved_tensors_hooks(stored.note, lambda tensor: tensor):
            first, draws = _run(runner, x)
        second, _ = _run(again, x)
        in_evaluation, draws_in_evaluation = _run(quiet, x)
    except _ERRORS as error:
        reason = conversion_hint(module, sample) or error
        raise ValueError(f"the module does not take samples of shape {tuple(sample.shape)}: {reason}") from None
    require_complete(module, runner)
    first, second, in_evaluation = _require_outputs(pick(first)), pick(second), pick(in_evaluation)
    _require_repeatable(module, x, is_repeated=torch.equal(first, second), draws_in_evaluation=draws_in_evaluation)
    parameters = dict(runner.named_parameters())
    if unused := [name for name in parameters if name not in uses.first]:
        raise ValueError(f"the module does not use {unused[0]} on such samples. Remove it.")
    if not parameters:
        raise ValueError("the module has no parameters to train. Pass a module with layers, such as nn.Linear.")
    changed = {name for name, b in runner.named_buffers() if not torch.equal(b, before[name])}
    by_batch = not torch.equal(second, in_evaluation) or _mixes(quiet, x, in_evaluation, pick)
    reached = _reached(first, parameters)
    return Trial(first.shape[1], uses.first, uses.last, reached, changed, draws, by_batch, stored.values // len(x))


class _Stored:
    """Counts the values that a forward pass stores, besides the module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._of_module = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._sizes: dict[int, int] = {}

    def note(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._of_module:
            self._sizes[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    @property
    def values(self) -> int:
        """Number of values of four bytes."""
        return sum(self._sizes.values())


def _mixes(module: nn.Module, x: Tensor, out: Tensor, pick: Pick) -> bool:
    """Return True if the outputs of a sample depend on the other sample."""
    try:
        alone = pick(_run(module, x[:1])[0])
    except _ERRORS:
        return True
    return not torch.allclose(alone, out[:1], rtol=1e-3, atol=1e-5, equal_nan=True)


def _differentiable(module: nn.Module) -> nn.Module:
    """Copy a module, and let all its parameters require a gradient."""
    copied_module = copied(module)
    for p in copied_module.parameters():
        p.requires_grad_(p.is_floating_point())
    return copied_module


def _run(module: nn.Module, x: Tensor) -> tuple[Any, bool]:
    """Return what a module returns from one seed, and True if it draws torch's random numbers."""
    with seeded(0, x.device):
        start = torch.default_generator.get_state()
        return module(x), not torch.equal(start, torch.default_generator.get_state())


def _require_repeatable(module: nn.Module, x: Tensor, *, is_repeated: bool, draws_in_evaluation: bool) -> None:
    """Raise ValueError, naming the part, if random numbers are not torch's, or are drawn in evaluation, too."""
    if draws_in_evaluation:
        name = _first_difference(module, x, (0, 1), training=False)
        raise ValueError(
            f"{name} draws random numbers in evaluation, too. Write dropout as F.dropout(x, p, self.training)."
        )
    if not is_repeated:
        raise ValueError(
            "the module must be a function of its input and of torch's random numbers, but "
            f"{_first_difference(module, x, (0, 0), training=True)} gave two outputs for one input. Let it draw by "
            "torch's functions, not by NumPy, Python or a generator of its own."
        )


def _require_outputs(out: Any) -> Tensor:
    """Return outputs, or raise ValueError unless they are (sample, output) for two samples."""
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
        actual = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"the module must return (sample, output), but returned {actual} for 2 samples. select= may pick them."
        )
    return out


def _reached(out: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters on which the outputs depend; raise ValueError if there are none."""
    grads: tuple[Tensor | None, ...] = ()
    if out.requires_grad:
        grads = torch.autograd.grad(out.sum(), list(parameters.values()), allow_unused=True)
    reached = {name for name, grad in zip(parameters, grads, strict=False) if grad is not None}
    if not reached:
        raise ValueError(
            "the outputs of the module have no gradient with respect to its parameters. Return what the layers "
            "compute, without detach() and torch.no_grad()."
        )
    return reached


def _first_difference(module: nn.Module, x: Tensor, seeds: tuple[int, int], *, training: bool) -> str:
    """Describe the first part of a module whose results differ between two runs from these seeds."""
    results: list[list[tuple[str, list[Any]]]] = []
    for seed in seeds:
        runner, of_run = copied(module).train(training), []  # type: ignore[var-annotated]
        for path, part in runner.named_modules():

            def note(part: nn.Module, _: Any, out: Any, path: str = path, of_run: list[Any] = of_run) -> None:
                of_run.append((describe(path, part), [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]))

            part.register_forward_hook(note)
        with seeded(seed, x.device), torch.no_grad():
            runner(x)
        results.append(of_run)
    for (name, a), (_, b) in zip(*results, strict=False):
        if not all(map(torch.equal, a, b)):
            return name
    return "the module"


def require_computed_anew(module: nn.Module, sample: Tensor) -> None:
    """Raise ValueError if an attribute was computed from parameters, and the forward pass does not compute it anew."""
    runner = copied(module)
    before = [value for part in runner.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    with torch.no_grad(), seeded(0, sample.device):
        runner(torch.stack([sample, sample]))
    require_recomputed(module, runner, before)


def refuses_single(module: nn.Module, sample: Tensor) -> bool:
    """Return True if torch refuses a single sample in training, as batch normalization of one value per channel."""
    try:
        with torch.no_grad(), seeded(0, sample.device):
            copied(module).train()(sample.unsqueeze(0))
    except ValueError:
        return True
    return False


def picker(select: int | str | Callable[[Any], Any] | None) -> Pick:
    """Return the function that picks the outputs of what a module returns.

    Raises
    ------
    ValueError
        If ``select`` is no position, name or function; the picker raises it if a module does not return such a part.
    """
    if callable(select):
        return select
    if isinstance(select, bool) or not isinstance(select, int | str | None):
        raise ValueError(f"select must be an int, a name or a function, but got {select!r}")

    def pick(out: Any) -> Any:
        if select is None and isinstance(out, Tensor):
            return out
        choices = _choices(out)
        if select not in choices:
            parts = f", with {', '.join(map(repr, choices))}" if choices else ""
            advice = "Pass select=, the one that holds the outputs." if choices else "Leave select out."
            requested = "" if select is None else f", but select is {select!r}"
            raise ValueError(f"the module returns {type(out).__name__}{parts}{requested}. {advice}")
        return choices[select]

    return pick


def _choices(out: Any) -> dict[Any, Any]:
    """Return the parts of what a module returns by position, key or attribute."""
    if isinstance(out, Mapping):
        return dict(out)
    if isinstance(out, Tensor):
        return {}
    named = (
        {name: value for name, value in vars(out).items() if isinstance(value, Tensor)}
        if hasattr(out, "__dict__")
        else {}
    )
    if isinstance(out, tuple | list):
        fields = getattr(out, "_fields", ())
        return dict(enumerate(out)) | dict(zip(fields, out, strict=False)) | named
    return named
