"""One run of many clients in a process of its own; prints times of rounds and peak resident memory as JSON.

Arguments: clients, rounds, algorithm, map or zarr, memory, folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import xarray as xr
import zarr

from fedstat.fl import algorithms, nets, train

SIZES, SAMPLES, TEST, ACTIVE = [784, 200, 10], 12, 2, 100
DIMS = ("client", "sample", "feature")
_BLOCK = 1000


def write(path: Path, clients: int, kind: str) -> None:
    """Samples x (client, sample, feature), a block of clients at a time."""
    shape = (clients, SAMPLES, SIZES[0])
    if kind == "map":
        x = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    else:
        how = {"chunks": (1, *shape[1:]), "compressors": None, "dimension_names": DIMS}
        x = zarr.open_group(path, mode="w").create_array("x", shape=shape, dtype="f4", **how)
    rng = np.random.default_rng(0)
    for low in range(0, clients, _BLOCK):
        high = min(low + _BLOCK, clients)
        x[low:high] = rng.standard_normal((high - low, *shape[1:]), np.float32)


def opened(path: Path, kind: str) -> xr.DataArray:
    """What :func:`write` wrote, unread."""
    if kind == "map":
        return xr.DataArray(np.load(path, mmap_mode="r"), dims=DIMS)
    return xr.open_zarr(path, consolidated=False, chunks=None)["x"]


def peak() -> int:
    """Largest resident memory of this process so far, in bytes, pages of mapped files among it."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main() -> None:
    clients, rounds, algorithm, kind, memory, folder = (*sys.argv[1:],)
    n, path = int(clients), Path(folder) / f"x.{kind}"
    if not (pid := os.fork()):  # made elsewhere, so that the peak is that of training
        write(path, n, kind)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    data = opened(path, kind)
    y = np.random.default_rng(1).integers(0, SIZES[-1], (n, SAMPLES))
    split = np.repeat(np.array(["train", "test"], object), [SAMPLES - TEST, TEST])
    fed = xr.Dataset({"x": data, "y": (("client", "sample"), y)}, coords={"split": ("sample", split)})
    ends, cpu, peaks = [time.monotonic()], [time.process_time()], []

    def progress(_: int) -> None:
        ends.append(time.monotonic())
        cpu.append(time.process_time())
        peaks.append(peak())

    run = train(
        fed, nets.mlp(SIZES), algorithms.named(algorithm), rounds=int(rounds), participation=ACTIVE / n, local_epochs=1,
        batch_size=5, lr=0.05, threads=1, memory_budget=memory, evaluate_every=int(rounds), keep_weights=[],
        out=Path(folder) / "run.zarr", progress=progress,
    )  # fmt: skip
    between = np.diff(ends)
    rows = Path(folder) / "run.zarr/journal/client_rows"
    found = {
        "clients": n,
        "before": between[0],
        "round": float(np.median(between[1:-1])),
        "cpu": float(np.median(np.diff(cpu)[1:-1])),
        "last": between[-1],  # with the evaluation of all clients
        "peak_of_rounds": peaks[-2],
        "peak": peak(),
        "rows_on_disk": sum(file.stat().st_blocks * 512 for file in rows.glob("*")),
        "state": (rows.parent / "state").stat().st_size,
        "bytes_up": float(run["metrics/bytes_up"][1]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
