"""Sources of the package, parsed once for all tests of a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import fedstat

PACKAGE = Path(fedstat.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax trees of the modules of the package, by name."""
    paths = {path: path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        ".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text(encoding="utf-8"))
        for path, name in paths.items()
    }


def called(node: ast.Call) -> str:
    """Return the name of what is called, without what stands before its last dot."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))
