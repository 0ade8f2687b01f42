"""Ctrl-C while a command is still loading, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def leave_while_loading() -> None:
    """Let Ctrl-C end this process with one line and exit status 130, until :func:`raise_again`.

    An exception would be lost where it rises in a callback of the import system. A process that ignores the signal, as
    jobs in the background do, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as usual, where it ended the process while loading."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: Any) -> None:
    sys.stderr.write("fedstat: interrupted.\n")
    sys.stderr.flush()
    os._exit(130)  # at once: what is loading has nothing to tidy up
