"""Rows of idle clients that states share: the same runs to the bit, and nothing copied or held that need not be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithm_jobs import SIZES, assert_equal, dataset, job, make
from small_runs import same
from toy_methods import REMEMBERS

from fedstat.fl import algorithms, engine, nets, participation, rows, sums, train
from fedstat.fl.rows import Rows

RUN = {
    "rounds": 5, "participation": 0.5, "local_epochs": 2, "batch_size": 5, "lr": 0.05, "seed": 4, "threads": 2,
    "optimizer": "adam", "optimizer_state": "keep",
}  # fmt: skip
EQUAL = [16] * 6  # clients whose order by size is their own, so that rounds of all change all rows at once


@pytest.fixture(params=[pytest.param(0, id="shared"), pytest.param(float("inf"), id="copied")])
def each_way(request, monkeypatch):
    monkeypatch.setattr(rows, "_TENSOR", request.param)
    return Rows if request.param == 0 else dict


METHODS = [
    "fedper", "local", "fedfac-dynamic", "fedrep", "feddecomp", "factorized-fl-beta", "fedem", "fedcp", "fedphp",
    "fedcac", "fedamp", "clustered-fl",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_runs_that_share_rows_are_those_that_copy_them(name, monkeypatch):
    found = []
    for cost in (0, float("inf")):
        monkeypatch.setattr(rows, "_TENSOR", cost)
        found.append(train(dataset(EQUAL), nets.mlp(SIZES), make(name), **RUN | {"participation": (0.3, 1.0)}))
    same(*found)


@pytest.mark.usefixtures("each_way")
def test_a_run_that_shares_rows_goes_on_as_it_would_have(tmp_path):
    given = dataset(EQUAL), nets.mlp(SIZES), REMEMBERS
    whole = train(*given, **RUN)
    out = tmp_path / "run.zarr"
    train(*given, out=out, **RUN | {"rounds": 2})
    same(whole, train(*given, out=out, resume=True, **RUN))


def test_states_share_the_rows_of_idle_clients_and_hold_no_others(monkeypatch):
    monkeypatch.setattr(rows, "_TENSOR", 0)
    one = job(make("fedper"), participation=0.5)
    states = [engine.start(one)]
    for p in states[0].params.values():
        assert p.untyped_storage().nbytes() == p[0].nbytes, "all clients begin with one row"
    for number in range(8):
        states.append(engine.step(one, states[-1]))
        active = set(participation.active(one, number).tolist())
        for name, new in states[-1].params._of.items():
            old = states[-2].params._of[name] if number else states[0].params[name]
            for client, (row, before) in enumerate(zip(new, old, strict=True)):
                assert (row.data_ptr() == before.data_ptr()) == (client not in active)
                assert row.untyped_storage().nbytes() == row.nbytes
    assert isinstance(states[-1].params, Rows)


def test_a_round_of_all_clients_changes_all_rows_at_once(each_way):
    one = job(make("fedper"), sizes=EQUAL)
    every = engine.step(one, engine.start(one))
    assert type(every.params) is dict
    some = engine.step(job(make("fedper"), sizes=EQUAL, participation=0.5), every)
    assert isinstance(some.params, each_way)
    assert type(engine.step(one, some).params) is dict


def test_rows_of_no_client_have_their_shape():
    some = Rows({"w": torch.ones(3, 2, 4).unbind()})
    none = some.take("w", np.array([], int))
    assert none.shape == (0, 2, 4)
    assert_equal(dict(some.changed(np.array([], int), {"w": none})), dict(some))
    assert list(some) == ["w"]
    assert len(some) == 1


def test_small_rows_are_copied_and_large_ones_shared():
    def of(entries):
        return {name: torch.zeros(100, entries) for name in ("w", "b")}

    assert not rows.sharing_pays(of(10), np.arange(10))
    assert rows.sharing_pays(of(100_000), np.arange(10))
    assert not rows.sharing_pays(of(100_000), np.arange(100))


@pytest.mark.parametrize("on", ["weights", "updates"])
def test_a_split_from_sums_in_parts_is_the_same_with_any_number_of_threads(on, monkeypatch):
    def run(threads):
        method = algorithms.fedfac(kappa=0.7, on=on)
        return train(dataset(EQUAL), nets.mlp(SIZES), method, **RUN | {"threads": threads})

    whole = run(1)
    monkeypatch.setattr(sums, "_PART", 100)
    in_parts = run(1)
    for threads in (2, 3):
        same(in_parts, run(threads))
    layer = "split/fc1"
    np.testing.assert_allclose(in_parts[layer]["communality"], whole[layer]["communality"], atol=1e-9)
