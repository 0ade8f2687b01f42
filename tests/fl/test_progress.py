"""Progress without a terminal: a line now and then, on stderr."""

from __future__ import annotations

from types import SimpleNamespace

from small_runs import NET, SETTINGS, dense

from fedstat import fl
from fedstat._utils import parallel
from fedstat.fl import algorithms


def test_without_a_terminal_a_long_run_says_a_line_now_and_then(monkeypatch, capsys):
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=lambda: next(now)))
    lines = parallel.shown(10, "round", label="a run")
    lines.update(4)  # done earlier
    for _ in range(4):
        lines.update(1)
    assert capsys.readouterr().err.splitlines() == [
        "a run: 5 of 10 rounds, 40 s, about 3 min left",
        "a run: 7 of 10 rounds, 80 s, about 80 s left",
    ]


def test_a_run_counts_its_rounds_and_a_short_one_is_silent(monkeypatch, capsys):
    fl.train(dense(), NET, algorithms.fedavg(), **SETTINGS, rounds=2, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(parallel, "EVERY", 0.0)
    fl.train(dense(), NET, algorithms.fedavg(), **SETTINGS, rounds=2, progress=True)
    said = capsys.readouterr()
    assert "2 of 2 rounds" in said.err
    assert said.out == ""
    fl.train(dense(), NET, algorithms.fedavg(), **SETTINGS, rounds=2)
    assert capsys.readouterr().err == ""
