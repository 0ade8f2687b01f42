"""Signatures that show every option: what editors complete, and ``help`` prints, of functions with ``**options``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def show_options(options: type, *sources: Callable[..., Any]) -> Callable[[F], F]:
    """Show the keys of a TypedDict as keyword parameters in the signature of a function that takes them as ``**``.

    Type checkers read ``**options: Unpack[Options]``, but IPython and ``help`` read the signature. The options are
    declared once, in the TypedDict, and their defaults once, in the functions that use them.

    Parameters
    ----------
    options : TypedDict
        Names and types of the options.
    *sources : callable
        Functions whose signatures have the defaults; the first that has an option counts.

    Examples
    --------
    >>> from typing import TypedDict
    >>> Options = TypedDict("Options", {"kappa": float})
    >>> def fit(x, *, kappa=0.85): ...
    >>> @show_options(Options, fit)
    ... def split(weights, *, tau=0.5, **options): ...
    >>> inspect.signature(split)
    <Signature (weights, *, tau=0.5, kappa: float = 0.85)>
    """
    defaults = {name: p.default for f in reversed(sources) for name, p in inspect.signature(f).parameters.items()}

    def show(function: F) -> F:
        signature = inspect.signature(function)
        explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=_text(annotation)
            )
            for name, annotation in options.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        return function

    return show


def _text(annotation: Any) -> Any:
    """Return the text of a postponed annotation, as functions have it; other annotations are unchanged."""
    return getattr(annotation, "__forward_arg__", annotation)
