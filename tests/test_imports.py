"""Imports go one way: no circle, also not through functions or for types, and nobody imports a command."""

from __future__ import annotations

import ast
from collections.abc import Set
from functools import cache
from graphlib import TopologicalSorter

from package_sources import called, trees


@cache
def imports() -> dict[str, set[str]]:
    """Modules of the package that each imports, anywhere in it; by name, too, if a call says it in full."""
    return {name: imported(tree, trees().keys()) for name, tree in trees().items()}


def imported(tree: ast.Module, modules: Set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{one.name}") in modules else node.module for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return found & modules


def test_no_circle() -> None:
    graph = {name: modules - {name, "fedstat"} for name, modules in imports().items() if name != "fedstat"}
    graph["fedstat.results.base"] -= {"fedstat.plot", "fedstat.store.results"}  # by its methods plot and save
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # CycleError names a circle


def test_nobody_imports_a_command_but_the_leaderboard_that_trains_a_grid_as_the_command_does() -> None:
    commands = {name: [one for one in modules if one.endswith("__main__")] for name, modules in imports().items()}
    assert {name: found for name, found in commands.items() if found} == {
        "fedstat.reporting.leaderboard": ["fedstat.fl.__main__"]
    }
