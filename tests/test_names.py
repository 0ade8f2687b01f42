"""Names: no function hides the module that it stands in."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import fedstat

# One file a method or a network, of its name: the package is the table of them.
TABLES = ("fedstat.fl.algorithms", "fedstat.fl.nets")


def test_no_name_of_a_package_hides_one_of_its_modules():
    hidden = []
    for found in pkgutil.walk_packages(fedstat.__path__, "fedstat."):
        parent, _, name = found.name.rpartition(".")
        if name != "__main__" and parent not in TABLES and (find_spec("flwr") or ".flower" not in found.name):
            import_module(found.name)
            if not isinstance(getattr(import_module(parent), name), ModuleType):
                hidden.append(found.name)
    assert hidden == []
