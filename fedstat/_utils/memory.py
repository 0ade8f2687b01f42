"""Memory of the machine, of the control group and of this process, in bytes, as Linux tells it."""

from __future__ import annotations

import math
import sys
from pathlib import Path


def of_machine() -> dict[str, int]:
    """Entries of /proc/meminfo, such as MemTotal and MemAvailable; empty where the system has none."""
    lines = _text("/proc/meminfo").splitlines()
    return {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def limit() -> float:
    """What the control group, a container's say, allows its processes; infinity if there is no limit."""
    text = _text("/sys/fs/cgroup/memory.max").strip()
    return float(text) if text.isdigit() else math.inf


def available() -> float:
    """What the process may still get; infinity where the system does not say (other than Linux)."""
    used = _text("/sys/fs/cgroup/memory.current").strip()
    left = limit() - int(used) if used.isdigit() else math.inf
    return min(of_machine().get("MemAvailable", math.inf), left)


def held() -> int:
    """What the process holds; other than on Linux, the most so far."""
    import resource  # Windows has none

    if pages := _text("/proc/self/statm").split():
        return int(pages[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _text(path: str) -> str:
    """Content of a file of the system, "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
