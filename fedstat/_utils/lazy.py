"""Lazy imports of packages and names at their first use.

``from fedstat._utils.lazy import torch`` replaces ``import torch``, which takes a second. From Python 3.15 on,
``lazy import`` (PEP 810) replaces this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["attach", "dist", "functional", "pd", "torch", "xr", "zarr"]


class _Lazy(ModuleType):
    """Module that is imported when an attribute is first read, and then stores the attribute."""

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


def attach(
    package: str, modules: Mapping[str, str], *, unlisted: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose names are imported at their first use.

    Parameters
    ----------
    package : str
        ``__name__`` of the package.
    modules : mapping from str to str
        Module that defines each public name; for a subpackage or module, its full name.
    unlisted : collection of str
        Public names that ``dir``, and so Tab, does not list.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: [name for name in modules if name not in unlisted]
