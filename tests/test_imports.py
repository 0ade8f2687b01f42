"""Imports go one way: no circle, also not through functions or for types, and nobody imports a command."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedstat

PACKAGE = Path(fedstat.__file__).parent
FILES = {
    ".".join(("fedstat", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it; by name, too, if a call says it in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{one.name}") in FILES else node.module for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return found & FILES.keys()


def test_no_circle() -> None:
    graph = {name: imported(path) - {name, "fedstat"} for name, path in FILES.items() if name != "fedstat"}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # CycleError names a circle


def test_nobody_imports_a_command() -> None:
    asked = {name: imported(path) for name, path in FILES.items()}
    assert {name for name, found in asked.items() if any(one.endswith("__main__") for one in found)} == set()


@pytest.mark.parametrize("module", ["fedstat", "fedstat.fl", "fedstat.data", "fedstat.plot", "fedstat.sim"])
def test_a_package_lists_public_names_only(module: str) -> None:
    package = __import__(module, fromlist=["x"])
    assert [name for name in dir(package) if name.startswith("_")] == []
    assert all(getattr(package, name) is not None for name in dir(package))
