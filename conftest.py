"""What pytest leaves out where an optional extra is not installed, and what keeps all tests from waiting."""

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [
    *([] if find_spec("flwr") else ["fedstat/flower/*"]),
    *([] if find_spec("cosmic_ray") else ["tests/mutation/*"]),
]


def pytest_collection_finish() -> None:
    """Half a million objects are here to stay: garbage collection need not look through them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """A worker of pytest-xdist that dies ends the run, whose other tests would wait for its file for good."""
    pytest.exit(f"a worker died in {crashitem}", returncode=1)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Nobody cuts the power of this process; the tests of power cuts have processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_collection_by_statsmodels() -> Iterator[None]:
    """Holm's p values of statsmodels collect garbage: a tenth of a second for each comparison, late in a session."""
    plain = gc.collect

    def collect(*generation: int) -> int:
        called_by = sys._getframe(1).f_globals["__name__"]
        return 0 if called_by == "statsmodels.stats.multitest" else plain(*generation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", collect)
        yield
