"""Dask's executor on two processes of this machine, for one module of tests."""

from __future__ import annotations

import children
import pytest

from fedstat._cli import dask_executor


@pytest.fixture(scope="module")
def two_processes():
    """Executor of a local Dask cluster, as ``--jobs 2`` makes it, of processes that start fast."""
    pytest.importorskip("distributed", reason="Dask is not installed: pip install -c constraints.txt -e '.[sweep]'")
    import dask

    children.parent()
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}), dask_executor("", 2) as executor:
        yield executor
