"""Time rounds of a base commit and of the working tree in turn: --base COMMIT [NAME ...].

Three processes, the base twice, run a round each, in changing order. Printed are medians of base / working tree, and of
base / base as a control: above 1 the working tree is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
ROUNDS = 24
KINDS = {  # algorithm, clients, samples each, shape of a sample, classes, rounds timed at once, settings
    "fedavg": ("fedavg", 100, 50, (100,), 2, 1, {"local_epochs": 5, "batch_size": 10}),
    "fedfac": ("fedfac-dynamic", 100, 50, (100,), 2, 1, {"local_epochs": 5, "batch_size": 10}),
    "cnn": ("fedper", 20, 32, (3, 32, 32), 10, 1, {"batch_size": 16}),
    "tiny": ("fedper", 20, 20, (20,), 2, 20, {"batch_size": 20}),
    "disk": ("fedper", 10_000, 10, (50,), 10, 1, {"batch_size": 10, "participation": 0.02, "room": 0}),
}


def work(kind: str) -> None:
    """Run rounds with the fedstat on the path, as many as each line of the input says, and print their seconds."""
    import torch

    from fedstat.fl import algorithms, losses, nets, optim
    from fedstat.fl.batches import Rows
    from fedstat.fl.job import Job

    torch.set_num_threads(1)
    name, clients, samples, shape, classes, _, settings = KINDS[kind]

    def rows(each: int, seed: int) -> Rows:
        rng = np.random.default_rng(seed)
        x = torch.from_numpy(rng.normal(size=(clients * each, *shape)).astype(np.float32))
        return Rows(x, torch.from_numpy(rng.integers(0, classes, clients * each)), np.arange(clients + 1) * each)

    images = len(shape) > 1
    net = nets.named("cnn", shape, classes, width=0.25) if images else nets.mlp([*shape, 2 * shape[0], classes])
    options: dict[str, Any] = {"optimizer": optim.sgd(0.05), "local_epochs": 1, "batch_size": None, **settings}
    if "threads" in Job.__dataclass_fields__:  # the field is now part of another, whose default is one thread
        options["threads"] = 1
    with tempfile.TemporaryDirectory() as folder:
        if "room" in options:  # the field had another name
            options["rows_folder" if "rows_folder" in Job.__dataclass_fields__ else "kept"] = Path(folder)
        job = Job(rows(samples, 0), rows(5, 1), net, algorithms.named(name), losses.for_outputs(classes), **options)
        loop = import_module("fedstat.fl.loop") if find_spec("fedstat.fl.loop") else None
        older = find_spec("fedstat.fl.start") or find_spec("fedstat.fl.engine")  # the base may have other modules
        start = (import_module(older.name) if older else loop).start
        if loop:
            step = lambda job, state: loop.observed_round(job, state, ())[0]  # noqa: E731
        else:
            step = import_module("fedstat.fl.engine").step
        state = step(job, step(job, start(job)))
        print("ready", flush=True)
        for line in sys.stdin:
            begun = time.perf_counter()
            for _ in range(int(line)):
                state = step(job, state)
            print(time.perf_counter() - begun, flush=True)


def ratios(kind: str, base: Path) -> tuple[float, float]:
    """Median ratios of seconds: base / working tree, base / base."""
    command, times = [sys.executable, __file__, "--work", kind], ([], [], [])
    workers = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}, cwd=path,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for path in (base, base, ROOT)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout.readline().strip() == "ready"
    for order in islice(cycle(permutations(range(3))), ROUNDS):
        for i in order:
            workers[i].stdin.write(f"{KINDS[kind][5]}\n")
            workers[i].stdin.flush()
            times[i].append(float(workers[i].stdout.readline()))
    for worker in workers:
        worker.kill()
    first, again, here = times
    return tuple(statistics.median(a / b for a, b in zip(first, of, strict=True)) for of in (here, again))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD", help="commit (default HEAD)")
    parser.add_argument("--work", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KINDS)} (default all)")
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    sys.path.insert(0, str(ROOT / "tests/frozen"))
    from compare_revisions import checked_out

    with tempfile.TemporaryDirectory() as folder, checked_out(given.base, Path(folder) / "base") as base:
        for kind in given.names or KINDS:
            new, control = ratios(kind, base)
            print(f"{kind}: base / working tree {new:.3f}, base / base {control:.3f}", flush=True)


if __name__ == "__main__":
    main()
