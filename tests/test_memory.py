"""Memory of the machine: what Linux says, and what is said where it says nothing."""

from __future__ import annotations

import math
import mmap

from fedstat._utils import memory


def test_entries_are_bytes_and_fit_each_other() -> None:
    size = memory.of_machine()
    assert 2**26 < size["MemAvailable"] <= size["MemTotal"]
    assert 0 < memory.available() <= size["MemTotal"]


def test_what_the_process_holds_grows_with_what_it_writes_to_new_pages() -> None:
    """A new map: an array may lie in pages that the process holds already."""
    with mmap.mmap(-1, 2**25) as pages:
        before = memory.held()
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
        assert memory.held() - before > 0.9 * len(pages)


def test_a_group_leaves_its_limit_less_what_it_uses(monkeypatch) -> None:
    text = {"/proc/meminfo": "MemTotal: 4 kB\nMemAvailable: 3 kB\nHugePages_Total: 0\n"}
    monkeypatch.setattr(memory, "_text", lambda path: text.get(path, ""))
    assert memory.available() == 3 * 1024
    assert memory.limit() == math.inf
    text |= {"/sys/fs/cgroup/memory.max": "2000\n", "/sys/fs/cgroup/memory.current": "500\n"}
    assert memory.available() == 1500
    assert memory.limit() == 2000
    text |= {"/sys/fs/cgroup/memory.max": "max\n"}
    assert memory.available() == 3 * 1024


def test_a_system_that_says_nothing_has_no_limit(monkeypatch) -> None:
    monkeypatch.setattr(memory, "_text", lambda _: "")
    assert memory.available() == math.inf
    assert memory.of_machine() == {}
    assert memory.held() > 2**20
