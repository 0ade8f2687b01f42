"""Rows of idle clients that states share: the same runs to the bit, and nothing copied or held that need not be."""

from __future__ import annotations

import pickle

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


def share(monkeypatch, always):
    """Let states share all rows, or none."""
    monkeypatch.setattr(rows, "_LARGE", 0 if always else float("inf"))
    monkeypatch.setattr(rows, "_TENSOR", 0)


METHODS = [
    "fedper", "local", "fedfac-dynamic", "fedrep", "feddecomp", "factorized-fl-beta", "fedem", "fedcp", "fedphp",
    "fedcac", "fedamp", "clustered-fl",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_runs_that_share_rows_are_those_that_copy_them(name, monkeypatch):
    found = []
    for always in (True, False):
        share(monkeypatch, always)
        found.append(train(dataset(EQUAL), nets.mlp(SIZES), make(name), **RUN | {"participation": (0.3, 1.0)}))
    same(*found)


@pytest.mark.parametrize("always", [True, False])
def test_a_run_that_shares_rows_goes_on_as_it_would_have(always, tmp_path, monkeypatch):
    share(monkeypatch, always)
    given = dataset(EQUAL), nets.mlp(SIZES), REMEMBERS
    whole = train(*given, **RUN)
    out = tmp_path / "run.zarr"
    train(*given, out=out, **RUN | {"rounds": 2})
    same(whole, train(*given, out=out, resume=True, **RUN))


def require_alone(params):
    """No row holds more memory than its own."""
    for each in params._of.values():
        assert all(row.untyped_storage().nbytes() == row.nbytes for row in each)


def test_states_share_the_rows_of_idle_clients_and_hold_no_others(monkeypatch):
    share(monkeypatch, True)
    one = job(make("fedper"), participation=0.5)
    states = [engine.start(one)]
    for name, each in states[0].params._of.items():
        assert len({row.data_ptr() for row in each} | {states[0].server[name].data_ptr()}) == 2, "all have one row"
    for number in range(8):
        states.append(engine.step(one, states[-1]))
        active = set(participation.active(one, number).tolist())
        require_alone(states[-1].params)
        for name, new in states[-1].params._of.items():
            for client, (row, before) in enumerate(zip(new, states[-2].params._of[name], strict=True)):
                assert (row is before) == (client not in active)


def test_a_round_of_all_clients_changes_all_rows_at_once_and_the_next_copies_them_once(monkeypatch):
    share(monkeypatch, True)
    one, few = (job(make("fedper"), sizes=EQUAL, participation=p) for p in (1.0, 0.5))
    every = engine.step(one, engine.start(one))
    assert type(every.params) is dict
    some = engine.step(few, every)
    require_alone(some.params)
    assert_equal(dict(engine.step(one, some).params), dict(engine.step(one, engine.step(few, every)).params))


def test_what_is_small_is_together_and_what_is_large_apart():
    row = {"w": torch.zeros(100, 100), "b": torch.zeros(100)}
    for some in (Rows.equal(row, 50), Rows({name: p.expand(50, *p.shape) for name, p in row.items()})):
        new = some.changed(np.array([3, 7]), {name: torch.ones(2, *p.shape) for name, p in row.items()})
        assert isinstance(new._of["b"], torch.Tensor)
        assert isinstance(new._of["w"], list)
        for name, p in row.items():
            assert torch.equal(
                new[name].flatten(1).sum(1), (torch.arange(50)[:, None] == torch.tensor([3, 7])).sum(1) * p.numel()
            )
            assert new[name].shape == (50, *p.shape)
            assert not some[name].any()
    most = Rows({"w": torch.zeros(50, 100, 100)}).changed(np.arange(49), {"w": torch.ones(49, 100, 100)})
    assert isinstance(most._of["w"], torch.Tensor), "hardly anybody is idle"


def test_rows_of_no_client_have_their_shape():
    for some in (Rows({"w": [torch.ones(2, 4)] * 3}), Rows({"w": torch.ones(3, 2, 4)})):
        nobody = np.array([], int)
        assert some.take("w", nobody).shape == some.rows(nobody)["w"].shape == (0, 2, 4)
        assert_equal(dict(some.changed(nobody, some.rows(nobody))), dict(some))
        assert (list(some), len(some)) == (["w"], 1)


def test_rows_are_copied_before_they_are_changed_at_will():
    for some in (Rows({"w": [torch.ones(2)] * 3}), Rows({"w": torch.ones(3, 2)})):
        some.rows(np.array([0, 1]))["w"].zero_()
        assert some["w"].all()


def test_states_can_be_pickled_in_their_own_size(monkeypatch):
    share(monkeypatch, True)
    one, few = (job(make("local"), sizes=EQUAL, participation=p) for p in (1.0, 0.5))
    state = engine.step(few, engine.step(one, engine.start(one)))
    again = pickle.loads(pickle.dumps(state.params))  # noqa: S301
    assert_equal(dict(again), dict(state.params))
    held = sum(row.untyped_storage().nbytes() for each in again._of.values() for row in each)
    assert held == sum(p.nbytes for p in state.params.values())


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
