"""Digests of functions by their syntax, which stay where a function is moved, renamed or documented."""

from __future__ import annotations

import ast
import builtins
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
# Names and methods that say what is computed; others are those of the author.
_LIBRARIES = {"np", "xp", "scipy", "math", "pd", "torch", "functools", "itertools"}
_METHODS = set(dir(np.ndarray)) | {"eigh", "linalg", "stats", "special"}


def digest(sources: Iterable[str], root: Path = ROOT) -> str:
    """Digest of functions given by dotted names, such as "fedstat.stats.icc.fdr" or "module.Class.method".

    Names of the author, docstrings, annotations and messages of errors do not count; constants, operators, and names of
    NumPy, SciPy and Python's builtins do.

    Raises
    ------
    LookupError
        If there is no such function.
    """
    text = "\n".join(ast.dump(_Plain().visit(function(source, root))) for source in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def function(source: str, root: Path = ROOT) -> ast.FunctionDef:
    """Syntax tree of the function of a dotted name."""
    parts = source.split(".")
    for n in range(len(parts) - 1, 0, -1):
        path = root.joinpath(*parts[:n])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            found: ast.AST | None = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None
            for name in parts[n:]:
                found = next((x for x in getattr(found, "body", ()) if getattr(x, "name", None) == name), None)
            if isinstance(found, ast.FunctionDef):
                return found
    raise LookupError(f"there is no function {source}")


class _Plain(ast.NodeTransformer):
    """A tree without what does not change numbers."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.name, node.returns = "", None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:  # noqa: ARG002
        return ast.arg(arg="")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant("")
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = node.id in _LIBRARIES or hasattr(builtins, node.id)
        return ast.Name(node.id if known else "", node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in _LIBRARIES) and node.attr not in _METHODS:
            node.attr = ""
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        node.arg = node.arg if node.arg in ("axis", "ddof", "side", "method") else None if node.arg is None else ""
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:  # noqa: ARG002
        return ast.Pass()
