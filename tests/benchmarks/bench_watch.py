"""What a callback and the logs add to a round."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fedstat.fl import watch
from fedstat.fl.logs import LOGS
from fedstat.study import Settings, run

ROUNDS = 200
SETTINGS = Settings.of(
    clients=20, rounds=ROUNDS, local_epochs=1, algorithm="fedavg", keep_weights=("none",), partition="iid"
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow with SQLAlchemy 2.1
@pytest.mark.parametrize("kind", ["callback", *LOGS])
def test_callbacks_and_logs(benchmark, kind: str, tmp_path: Path, monkeypatch):
    """Share of a round's wall time, within one run: 20 MLP clients on the digits."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    spent: list[float] = []

    def timed(name: str) -> None:
        inner = getattr(watch.Watch, name)

        def outer(*arguments):
            begun = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                spent.append(time.perf_counter() - begun)

        monkeypatch.setattr(watch.Watch, name, outer)

    timed("is_stopped" if kind == "callback" else "write_logs")
    how = {"on_round_end": lambda _: None} if kind == "callback" else {"log": kind}
    ticks: list[float] = []
    run(SETTINGS, out=tmp_path / "run.zarr", threads=1, progress=lambda _: ticks.append(time.perf_counter()), **how)
    rounds = [b - a for a, b in pairwise(ticks[1:])]
    share = sum(spent[1:]) / (sum(rounds) - sum(spent[1:]))
    benchmark.extra_info |= {"ratio": 1 + share}
    part, whole = (1000 * statistics.median(times) for times in (spent, rounds))
    print(f"\n{kind}: {part:.2f} ms of a round of {whole:.1f} ms, ratio {1 + share:.3f}")
    benchmark.pedantic(lambda: None, rounds=1)
