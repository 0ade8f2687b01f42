"""Layers wide enough to crash OpenBLAS, or to need more memory than there is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from threadpoolctl import threadpool_limits

# On several threads OpenBLAS 0.3.31 crashes in symmetric products and Cholesky factors of 15,500 units, not of 14,000.
_WIDE = 8192
# Matrices (unit, unit) that a fit holds at its peak, measured as 4.3 and 7.2: leading eigenpairs alone, or all.
_LEADING, _ALL = 5, 8
_SMALL = 2**30


def safe_blas(units: int) -> AbstractContextManager[object]:
    """Context in which BLAS may work on symmetric matrices of this size: on one thread if it is large."""
    return threadpool_limits(1, user_api="blas") if units > _WIDE else nullcontext()


def require_memory(units: int, *, all_pairs: bool, clients: int = 0) -> None:
    """Raise ValueError if the matrices of a fit do not fit into memory.

    Parameters
    ----------
    units : int
    all_pairs : bool
        Whether the fit takes all eigenpairs, or the leading ones.
    clients : int
        Clients whose own matrices are held as well, twice while they are stacked.
    """
    need = 8 * units**2 * ((_ALL if all_pairs else _LEADING) + 2 * clients)
    if need > _SMALL and need > (free := available_memory()):
        of = f"{units} units of {clients} clients" if clients else f"{units} units"
        way_out = "fewer clients or units" if clients else "fewer units"
        if all_pairs:
            way_out += ", n_factors of at most a fifth of the units with method='pa' or 'pc'"
        raise ValueError(
            f"matrices (unit, unit) for {of} need about {need / 2**30:.1f} GiB of memory, but "
            f"{free / 2**30:.1f} GiB are available. Take {way_out}, or a machine with more memory."
        )


def available_memory() -> float:
    """Bytes of memory that the process may still get; infinity where the system does not say (other than Linux)."""
    return min(_unused(), _allowed())


def _unused() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")), float("inf"))


def _allowed() -> float:
    """Memory that the control group, a container's say, leaves to its processes."""
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        return float(most) - float(used)
    except (OSError, ValueError):  # no group, or "max"
        return float("inf")
