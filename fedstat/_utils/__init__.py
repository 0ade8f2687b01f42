"""Tools of all subpackages: argument checks, labels, untrusted files, random streams, long loops, settings.

Defined here: the shell of IPython and Jupyter, and how it shows objects that other packages define.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def shell() -> Any:
    """Return the shell of IPython in which this process runs, or None; IPython is not imported for this."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def show_trees(to_html: Callable[[Any], str]) -> None:
    """Have notebooks show a DataTree by a function of this package; nothing happens outside of IPython.

    Runs stay plain DataTrees: a subclass is not equal to its parent class for ``xarray.testing``, and half of its
    methods return the parent class.
    """
    if (running := shell()) is not None:
        # By name, because xarray is imported when it is needed.
        formatter = running.display_formatter.formatters["text/html"]
        formatter.for_type_by_name("xarray.core.datatree", "DataTree", to_html)
