"""Displays in IPython and Jupyter of objects that other packages define."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def show_trees(to_html: Callable[[Any], str]) -> None:
    """Have notebooks show a DataTree by a function of this package; nothing happens outside of IPython.

    Runs stay plain DataTrees: a subclass is not equal to its parent class for ``xarray.testing``, and half of its
    methods return the parent class.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        # By name, because xarray is imported when it is needed.
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.for_type_by_name("xarray.core.datatree", "DataTree", to_html)
