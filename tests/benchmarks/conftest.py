"""Ratios against a named peer, taken turn by turn in one process and printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from threadpoolctl import threadpool_limits
from training_rounds import peak_memory


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> None:
    """Here it is measured: the fixture of all other tests does nothing."""


@pytest.fixture
def one_thread_an_operation() -> Iterator[None]:
    """One thread in torch's and BLAS's operations: chunks run side by side instead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1, user_api="blas"):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def compare(benchmark, capsys):
    """Time ``ours`` against ``peer`` by turns; print and record the ratio of the medians. Returns what both return."""

    def run(name: str, ours: Callable[[], object], peer: Callable[[], object], peer_name: str, *, rounds: int = 5):
        results = ours(), peer()
        pairs = [(seconds(peer), seconds(ours)) for _ in range(rounds)]
        theirs, mine = (statistics.median(side) for side in zip(*pairs, strict=True))
        timed = {"peer_seconds": theirs, "ours_seconds": mine, "ratio": theirs / mine}
        benchmark.extra_info |= {"peer": peer_name, **timed}
        benchmark.pedantic(ours, rounds=1)
        with capsys.disabled():
            print(f"\n{name}: {mine:.4g} s; {peer_name}: {theirs:.4g} s; ratio {theirs / mine:.3g}")
        return results

    return run


@pytest.fixture
def compare_memory(benchmark, capsys):
    """Measure the peak memory of processes that run ``ours`` and its peers, sources by name; print and record it."""

    def run(name: str, ours: str, **peers: str):
        peaks = {"ours": benchmark.pedantic(peak_memory, (ours,), rounds=1)}
        peaks |= {peer: peak_memory(source) for peer, source in peers.items()}
        benchmark.extra_info |= {f"{peer}_MB": peak for peer, peak in peaks.items()}
        with capsys.disabled():
            print(f"\npeak memory, {name}: " + ", ".join(f"{peer} {peak:.0f} MB" for peer, peak in peaks.items()))

    return run
