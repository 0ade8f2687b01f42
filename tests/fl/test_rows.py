"""Rows of idle clients that states share: the same runs to the bit, and nothing copied or held that need not be."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_equal, dataset, job, make
from small_runs import same
from toy_methods import REMEMBERS

from fedstat.fl import algorithms, kept, nets, sums, train
from fedstat.fl.rows import Rows

RUN = {
    "rounds": 5, "participation": 0.5, "local_epochs": 2, "batch_size": 5, "lr": 0.05, "seed": 4, "threads": 2,
    "optimizer": "adam", "optimizer_state": "keep",
}  # fmt: skip
EQUAL = [16] * 6  # clients whose order by size is their own, so that rounds of all change all rows at once


METHODS = [
    "fedper", "local", "fedfac-dynamic", "fedrep", "feddecomp", "factorized-fl-beta", "fedem", "fedcp", "fedphp",
    "fedcac", "fedamp", "clustered-fl",
]  # fmt: skip


@pytest.fixture
def copied(monkeypatch):
    """Every round copies the rows of all clients."""

    def run(*given, **options):
        with monkeypatch.context() as here:
            here.setattr(kept, "changed", lambda _, of, clients, rows: {
                name: p.index_copy(0, torch.from_numpy(clients), rows[name]) for name, p in of.items()
            })  # fmt: skip
            return train(*given, **options)

    return run


@pytest.mark.parametrize("name", METHODS)
def test_runs_that_share_rows_are_those_that_copy_them(name, copied):
    given = dataset(EQUAL), nets.mlp(SIZES), make(name)
    options = RUN | {"participation": (0.3, 1.0)}
    same(copied(*given, **options), train(*given, **options))


def test_a_run_that_shares_rows_goes_on_as_it_would_have(tmp_path):
    given = dataset(EQUAL), nets.mlp(SIZES), REMEMBERS
    whole = train(*given, **RUN)
    out = tmp_path / "run.zarr"
    train(*given, out=out, **RUN | {"rounds": 2})
    same(whole, train(*given, out=out, resume=True, **RUN))


def test_states_share_the_rows_of_idle_clients_and_slots_are_used_again():
    one = job(make("fedper"), participation=0.5)
    state = trainer.start(one)
    slots = state.client_params.slots
    assert (state.client_params.slot == 0).all(), "all have one row"
    for number in range(30):
        old = state.client_params.slot
        state = trainer.step(one, state)
        assert state.client_params.slots is slots
        active = trainer.active(one, number)
        idle = np.setdiff1d(np.arange(one.clients), active)
        np.testing.assert_array_equal(state.client_params.slot[idle], old[idle])
        assert not np.isin(state.client_params.slot[active], old).any()
        assert len(set(state.client_params.slot[active])) == len(active)
    assert state.client_params.slot.max() <= one.clients + len(active)
    assert slots.number == 2 * one.clients


def test_however_many_states_are_held_each_stays_as_it_was():
    one = job(make("fedper"), participation=0.5)
    states, seen = [trainer.start(one)], []
    for _ in range(12):
        seen.append(dict(states[-1].client_params))
        states.append(trainer.step(one, states[-1]))
    assert states[0].client_params.slots.number > 2 * one.clients
    for state, expected in zip(states, seen, strict=False):
        assert_equal(dict(state.client_params), expected)


def test_a_round_of_all_clients_changes_all_rows_at_once():
    one, few = (job(make("fedper"), sizes=EQUAL, participation=p) for p in (1.0, 0.5))
    every = trainer.step(one, trainer.start(one))
    assert type(every.client_params) is dict
    some = trainer.step(few, every)
    assert isinstance(some.client_params, Rows)
    assert_equal(
        dict(trainer.step(one, some).client_params), dict(trainer.step(one, trainer.step(few, every)).client_params)
    )


def test_rows_are_read_changed_and_copied():
    dense = {"w": torch.arange(12.0).view(3, 2, 2), "n": torch.arange(3)}
    rows, some = Rows.of(dense), np.array([2, 0])
    assert_equal(dict(rows), dense)
    assert_equal(rows.rows(some), {name: p[[2, 0]] for name, p in dense.items()})
    new = rows.changed(some, {"w": -torch.ones(2, 2, 2), "n": torch.tensor([7, 8])})
    assert new["n"].tolist() == [8, 1, 7]
    assert new.take("n", np.array([1])).tolist() == [1]
    assert_equal(dict(rows), dense)
    for p in (rows["w"], rows.rows(np.array([0, 1]))["w"]):
        p.zero_()
    assert_equal(dict(rows), dense)
    nobody = np.array([], int)
    assert rows.take("w", nobody).shape == rows.rows(nobody)["w"].shape == (0, 2, 2)
    assert_equal(dict(rows.changed(nobody, rows.rows(nobody))), dense)
    assert (list(rows), len(rows)) == (["w", "n"], 2)


@pytest.mark.parametrize("copy", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])  # noqa: S301
def test_rows_are_copied_and_pickled_without_their_other_versions(copy):
    rows = Rows.equal({"w": torch.ones(1000)}, 50)
    found = copy(rows.changed(np.array([4]), {"w": torch.zeros(1, 1000)}))
    assert found["w"].sum(1).tolist() == [1000] * 4 + [0] + [1000] * 45
    assert len(found.slots.versions) == 1
    assert len(pickle.dumps(found)) < 1.1 * 4 * 1000 * 50


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
