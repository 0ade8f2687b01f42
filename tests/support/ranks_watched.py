"""Processes that share a run whose callback, in rank 0, ends it or fails."""

from __future__ import annotations

import warnings
from pathlib import Path

from ranks_worker import process_group, settings
from small_runs import NET, dense

from fedstat.fl import train


def main(folder: str) -> None:
    """Print the rounds that the callback of this rank sees; only rank 0 has a callback in the last run."""
    options = settings("fedper", 5)
    algorithm = options.pop("algorithm")
    with process_group() as rank, warnings.catch_warnings():

        def stop(end):
            print(f"{end.path.stem} {end.round}", flush=True)
            return "stop" if end.round == 3 else None

        def fail(end):
            print(f"{end.path.stem} {end.round}", flush=True)
            raise LookupError("no such thing")

        out = Path(folder)
        data = dense()
        train(data, NET, algorithm, out=out / "stopped.zarr", evaluate_every=2, on_round_end=stop, log="csv", **options)
        try:
            train(data, NET, algorithm, out=out / "failed.zarr", on_round_end=fail, **options)
        except LookupError as error:
            print(error.__notes__[0].partition(".")[0], flush=True)
        callback = None if rank else stop
        train(data, NET, algorithm, out=out / "one.zarr", on_round_end=callback, **options)
