"""Packages and names that are imported when first used, as ``lazy import`` (PEP 810) does from Python 3.15 on.

``from fedstat._utils.lazy import torch`` stands for ``import torch``, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["attach", "dist", "functional", "pd", "torch", "xr", "zarr"]


class _Lazy(ModuleType):
    """A module that is imported when an attribute is first read; the attribute is then kept here."""

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(import_module(self.__name__), name)
        return value


if TYPE_CHECKING:
    import pandas as pd
    import torch
    import torch.distributed as dist
    import xarray as xr
    import zarr
    from torch.nn import functional
else:
    dist, functional, pd, torch, xr, zarr = map(
        _Lazy, ("torch.distributed", "torch.nn.functional", "pandas", "torch", "xarray", "zarr")
    )


def attach(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` of a package whose names are imported when first used.

    Parameters
    ----------
    package : str
        ``__name__`` of the package.
    modules : mapping from str to str
        For each public name the module that defines it; for a subpackage or module, its own full name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: list(modules)


figures: Callable[[], ModuleType]
"""Import ``fedstat.plot``. The package sets this function, since results, below plot, draw themselves by it."""
