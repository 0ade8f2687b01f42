"""Memory of the machine, of the control group and of this process in bytes, as reported by Linux."""

from __future__ import annotations

import math
import sys
from pathlib import Path


def of_machine() -> dict[str, int]:
    """Return the entries of /proc/meminfo, such as MemTotal and MemAvailable; empty if the file does not exist."""
    lines = _text("/proc/meminfo").splitlines()
    return {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def limit() -> float:
    """Return the memory limit of the control group (such as a container); infinity if there is no limit."""
    text = _text("/sys/fs/cgroup/memory.max").strip()
    return float(text) if text.isdigit() else math.inf


def available() -> float:
    """Return the memory that the process can still take; infinity on systems other than Linux."""
    used = _text("/sys/fs/cgroup/memory.current").strip()
    free = limit() - int(used) if used.isdigit() else math.inf
    return min(of_machine().get("MemAvailable", math.inf), free)


def peak() -> int:
    """Return the largest memory that the process has held."""
    import resource  # Windows has none

    for line in _text("/proc/self/status").splitlines():  # getrusage counts the parent before exec, too
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def held() -> int:
    """Return the memory of the process; on systems other than Linux, its maximum so far."""
    import resource  # Windows has none

    if pages := _text("/proc/self/statm").split():
        return int(pages[1]) * resource.getpagesize()
    return peak()


def _text(path: str) -> str:
    """Return the content of a system file, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
