"""Dask executor of a command: a scheduler at an address, or a cluster of local processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from typing import Any

from fedstat._utils import check

# Seconds that a scheduler has to answer.
_PATIENCE = 5


@contextmanager
def dask_executor(address: str, workers: int | None) -> Iterator[Executor]:
    """Yield the executor of a Dask cluster.

    Parameters
    ----------
    address : str
        Address of a scheduler, such as "tcp://10.0.0.1:8786"; "" for a cluster of local processes, which ends with the
        context.
    workers : int, optional
        Number of local processes, by default the number of cores; each computes on one thread.

    Raises
    ------
    ValueError
        If Dask is not installed, no scheduler answers at the address, or its workers lack this version of fedstat.
    ConnectionError
        If the scheduler is lost, or Dask gives a task up because several workers were lost while running it.
    """
    try:
        import distributed
    except ImportError as error:
        raise ValueError(
            f"--dask needs Dask, which is not installed ({error}): pip install 'fedstat[sweep]', or in a clone of the "
            "repository pip install -c constraints.txt -e '.[sweep]'"
        ) from None
    with _client(distributed, address, workers) as client:
        try:
            yield client.get_executor(pure=False)
        except distributed.KilledWorker as error:
            name = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            raise ConnectionError(
                f"Dask gave up a task{name} after {error.allowed_failures + 1} workers were lost while running it; "
                "often they lack memory: use fewer workers, or machines with more memory"
            ) from error
        except CancelledError as error:
            raise ConnectionError(f"the scheduler at {client.scheduler.address} was lost") from error


@contextmanager
def _client(distributed: Any, address: str, workers: int | None) -> Iterator[Any]:
    """Yield a client of the scheduler at the address, or of a local cluster."""
    if not address:
        with _processes(distributed, workers) as client:
            yield client
        return
    try:
        asyncio.run(_reach(address))
    except Exception as error:  # another program may listen at the address
        raise ValueError(
            f"--dask must be the address of a Dask scheduler, but {address} does not answer: {error}"
        ) from None
    with distributed.Client(address, timeout=_PATIENCE) as client:
        _require_fedstat(client, address)
        yield client


@contextmanager
def _processes(distributed: Any, number: int | None) -> Iterator[Any]:
    """Yield a client of a cluster of local processes."""
    import dask

    class Background(distributed.WorkerPlugin):
        """Plugin that leaves Ctrl-C, which a terminal sends to all processes, and its message to the command."""

        def setup(self, worker: Any) -> None:  # noqa: ARG002
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            logging.getLogger("distributed").setLevel(logging.ERROR)

    # Three defaults of Dask are off: its memory limit, which ends workers although the machine has free memory; its
    # MALLOC_TRIM_THRESHOLD_, which returns every freed block to the system and costs training a third more CPU time;
    # and its profiler, as there is no dashboard.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), 1)
    settings = {"distributed.nanny.pre-spawn-environ": threads, "distributed.worker.profile.enabled": False}
    try:
        with (
            dask.config.set(settings),
            distributed.LocalCluster(
                n_workers=number or os.cpu_count() or 1, threads_per_worker=1, processes=True, memory_limit=None,
                dashboard_address=None,
            ) as cluster,
            distributed.Client(cluster) as client,
        ):  # fmt: skip
            client.register_plugin(Background())
            try:
                yield client
            finally:
                logging.disable(logging.WARNING)  # from workers that end during a task
    finally:
        logging.disable(logging.NOTSET)


async def _reach(address: str) -> None:
    """Connect to the scheduler or raise the error; a failed Client would log again when it is collected."""
    from distributed.comm import connect

    comm = await connect(address if "://" in address else f"tcp://{address}", timeout=_PATIENCE)
    await comm.close()


def _require_fedstat(client: Any, address: str) -> None:
    """Raise ValueError if a worker lacks this version of fedstat; warn if there is no worker yet."""
    from fedstat.store import code

    versions = client.run(_code, on_error="return")
    if not versions:
        check.warn(f"The scheduler at {address} has no workers yet; waiting.")
    for worker, version in versions.items():
        if version != code():
            raise ValueError(f"--dask {address}: worker {worker} must have fedstat {code()}, but has {version!s}.")


def _code() -> str:
    """Return the version of fedstat's code; runs on a worker."""
    from fedstat.store import code

    return code()
