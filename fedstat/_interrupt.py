"""Ctrl-C while a command is still loading, which takes seconds."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leave with one line and exit status 130 where nobody caught Ctrl-C; show other errors as usual."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("fedstat: interrupted.\n")
    sys.stderr.flush()
    os._exit(130)  # Python's own way out after this hook is to die of the signal
