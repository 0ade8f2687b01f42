"""Dask's executor on two processes of this machine, for one module of tests."""

from __future__ import annotations

import pytest

from fedstat._cli.dask import dask_executor


@pytest.fixture(scope="module")
def two_processes():
    """Executor of a local Dask cluster, as ``--dask --threads 2`` makes it."""
    pytest.importorskip("distributed", reason="Dask is not installed: pip install -c constraints.txt -e '.[sweep]'")
    with dask_executor("", 2) as executor:
        yield executor
