"""The package without its extra."""

from __future__ import annotations

import sys

import pytest


def test_without_flower_the_import_says_which_pip_command_helps(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fedstat.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ImportError, match=r"pip install -c constraints.txt 'fedstat\[flower\]'"):
        import fedstat.flower  # noqa: F401
