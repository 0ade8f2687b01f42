"""Scripts outside the package, loaded as modules."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(path: str | Path) -> ModuleType:
    """A script as a module, which finds its siblings as under ``python path``, and leaves none of them behind."""
    path = ROOT / path
    folder, before = str(path.parent), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        spec = util.spec_from_file_location(path.stem, path)
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]
    return module
