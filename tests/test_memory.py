"""Memory of the machine: what Linux says, and what is said where it says nothing."""

from __future__ import annotations

import math

import numpy as np

from fedstat._utils import memory


def test_entries_are_bytes_and_fit_each_other() -> None:
    size = memory.of_machine()
    assert 2**26 < size["MemAvailable"] <= size["MemTotal"]
    assert 0 < memory.available() <= size["MemTotal"]


def test_what_the_process_holds_grows_with_an_array() -> None:
    before = memory.held()
    filled = np.ones(2**22)
    assert memory.held() - before > 0.9 * filled.nbytes


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
