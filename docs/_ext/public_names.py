"""The public names of fedstat, from the packages themselves: what the reference shows and ``tests/docs`` checks."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import fedstat

PACKAGES = {
    "fedstat": "From weights to a split, and its uncertainty",
    "fedstat.results": "Classes of results",
    "fedstat.plot": "Figures of results and runs",
    "fedstat.plot.papers": "Figures of the studies of FedFac",
    "fedstat.data": "Data sets, published and your own",
    "fedstat.data.partition": "Partitions of data among clients",
    "fedstat.sim": "The simulation study on model (8)",
    "fedstat.sim.recovery": "Recovery of the true split over κ",
    "fedstat.motivation": "Outputs of units over clients",
    "fedstat.ntk": "FedFac's theorems, checked on data",
    "fedstat.attack": "Gradient inversion",
    "fedstat.decompose": "Weights from other programs",
    "fedstat.fl": "The trainer",
    "fedstat.fl.algorithms": "The algorithms",
    "fedstat.fl.nets": "Networks of stacked clients",
    "fedstat.fl.algorithm": "Hooks and phases of an algorithm",
    "fedstat.fl.masks": "Shared masks",
    "fedstat.fl.wrappers.composed": "Weights composed of factors",
    "fedstat.fl.aggregate": "Aggregation on the server",
    "fedstat.fl.optim": "Local optimizers",
    "fedstat.study": "Grids of runs, tuning and comparisons",
    "fedstat.reporting": "Reports of runs and studies",
    "fedstat.flower": "Training of separate organizations with Flower",
}
"""Packages and modules whose names are public, in the order of the reference, and what each is for."""

UNLISTED = {"fedstat": ["Absolute"]}
"""Public names that ``dir`` of a package does not list."""

INTERNAL = {"labelled", "stats", "store"}
"""Packages behind the public ones: what of them is for users is shown where users import it from."""


class Name(NamedTuple):
    """One public name.

    Attributes
    ----------
    package, name : str
    value : object
    kind : {"function", "class", "data"}
    """

    package: str
    name: str
    value: Any
    kind: Literal["function", "class", "data"]

    @property
    def path(self) -> str:
        """Where users import it from."""
        return f"{self.package}.{self.name}"


def names(package: str) -> list[Name]:
    """Public names of a package: ``__all__``, or what a module without it defines itself; no modules."""
    module = import_module(package)
    listed = (
        getattr(module, "__all__", None)
        or ([*dir(module), *UNLISTED.get(package, ())] if "__getattr__" in vars(module) else None)
        or [
            key
            for key, value in vars(module).items()
            if key[0] != "_" and getattr(value, "__module__", None) == package
        ]
    )
    found = ((name, getattr(module, name)) for name in sorted(listed, key=str.lower))
    return [Name(package, name, value, _kind(value)) for name, value in found if not isinstance(value, ModuleType)]


def every_name() -> list[Name]:
    """All public names, each object once: where it is first public."""
    seen: set[int] = set()
    found = []
    for name in (one for package in PACKAGES for one in names(package)):
        if name.kind == "data" or id(name.value) not in seen:
            found.append(name)
            seen.add(id(name.value))
    return found


def forgotten() -> list[str]:
    """Packages that are neither in ``PACKAGES`` nor internal, and modules among public names that no page shows."""
    top = {found.name for found in pkgutil.iter_modules(fedstat.__path__) if found.name[0] != "_"}
    absent = [f"fedstat.{name}" for name in sorted(top - INTERNAL) if f"fedstat.{name}" not in PACKAGES]
    for package in PACKAGES:
        module = import_module(package)
        listed = ((name, getattr(module, name)) for name in getattr(module, "__all__", ()))
        absent += [m.__name__ for _, m in listed if isinstance(m, ModuleType) and m.__name__ not in PACKAGES]
    return absent


def docstring(name: Name) -> str:
    """Docstring; of a constant, the string that follows its definition anywhere in its package."""
    if name.kind != "data":
        return inspect.getdoc(name.value) or ""
    file = Path(inspect.getfile(import_module(name.package)))
    files = [file, *sorted(file.parent.glob("*.py"))]
    return next((text for one in files for text in _after(one, name.name)), "")


def methods(name: Name) -> list[str]:
    """Public methods and properties of a class of fedstat, its bases' of fedstat too, in order of definition."""
    bases = [base for base in name.value.__mro__ if base.__module__.startswith("fedstat")]
    found = {
        key: None
        for base in reversed(bases)
        for key, value in vars(base).items()
        if key[0] != "_" and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    }
    return list(found)


def _kind(value: Any) -> Literal["function", "class", "data"]:
    if inspect.isclass(value):
        return "class"
    return "function" if inspect.isfunction(value) else "data"


def _after(file: Path, name: str) -> Iterator[str]:
    """Strings that stand behind a definition of that name."""
    for one, following in pairwise(_body(file)):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        defines = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if defines and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            yield inspect.cleandoc(str(following.value.value))


@cache
def _body(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body
