"""Dask as the executor of a command: the scheduler at an address, or a cluster of processes on this machine."""

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

# Seconds in which a scheduler must answer.
_PATIENCE = 5


@contextmanager
def dask_executor(address: str, workers: int | None) -> Iterator[Executor]:
    """Executor of a Dask cluster.

    Parameters
    ----------
    address : str
        Of a scheduler, such as "tcp://10.0.0.1:8786"; "" for a cluster of processes on this machine, which ends with
        the context.
    workers : int, optional
        Number of these processes, by default that of the cores; each computes on one thread.

    Raises
    ------
    ValueError
        If Dask is not installed, no scheduler answers at the address, or its workers lack fedstat.
    ConnectionError
        If the scheduler is lost, or some work is given up because it has ended several workers.
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
            which = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            raise ConnectionError(
                f"a part of the work{which} was given up after {error.allowed_failures + 1} workers that had it were "
                "lost; too little memory is the usual cause"
            ) from error
        except CancelledError as error:
            raise ConnectionError(f"the scheduler at {client.scheduler.address} was lost") from error


@contextmanager
def _client(distributed: Any, address: str, workers: int | None) -> Iterator[Any]:
    if not address:
        with _processes(distributed, workers) as client:
            yield client
        return
    try:
        asyncio.run(_reach(address))
    except Exception as error:  # whatever else listens at the address
        raise ValueError(f"--dask {address}: no Dask scheduler answers there ({error})") from None
    with distributed.Client(address, timeout=_PATIENCE) as client:
        _require_fedstat(client, address)
        yield client


@contextmanager
def _processes(distributed: Any, number: int | None) -> Iterator[Any]:
    """Client of a cluster of processes on this machine."""
    import dask

    class Background(distributed.WorkerPlugin):
        """Leaves Ctrl-C, which a terminal sends to all processes, to the command, and what to say of it."""

        def setup(self, worker: Any) -> None:  # noqa: ARG002
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            logging.getLogger("distributed").setLevel(logging.ERROR)

    # As in one process: without a limit on memory, which would end workers that the machine has room for; without
    # giving every freed block back to the system (MALLOC_TRIM_THRESHOLD_), which costs training a third more CPU time;
    # and without Dask's profiler, whose dashboard nobody sees here.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), 1)
    plain = {"distributed.nanny.pre-spawn-environ": threads, "distributed.worker.profile.enabled": False}
    try:
        with (
            dask.config.set(plain),
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
                logging.disable(logging.WARNING)  # of processes that are ended in the middle of their work
    finally:
        logging.disable(logging.NOTSET)


async def _reach(address: str) -> None:
    """Raise what keeps a scheduler from being reached; a failed Client would still speak when it is collected."""
    from distributed.comm import connect

    comm = await connect(address if "://" in address else f"tcp://{address}", timeout=_PATIENCE)
    await comm.close()


def _require_fedstat(client: Any, address: str) -> None:
    """ValueError if a worker has no fedstat, or another; a note if there is no worker yet."""
    from fedstat.store import code

    theirs = client.run(_code, on_error="return")
    if not theirs:
        check.warn(f"the scheduler at {address} has no workers yet: waiting for them")
    for worker, found in theirs.items():
        if found != code():
            what = found if isinstance(found, Exception) else f"its code is {found}, and here it is {code()}"
            raise ValueError(f"--dask {address}: the worker {worker} needs the fedstat that is here ({what})")


def _code() -> str:
    from fedstat.store import code

    return code()
