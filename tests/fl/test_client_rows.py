"""Client rows: versions share the rows of idle clients, runs stay equal to the bit, and nothing is copied in vain."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import trainer
from algorithm_jobs import SIZES, assert_equal, assert_same_states, dataset, job, make, run
from small_runs import same
from toy_methods import REMEMBERS

from fedstat.fl import algorithms, chunks, nets, optim, train
from fedstat.fl.client_rows import SlotRows, StackedRows
from fedstat.fl.disk_rows import DiskRows

RUN = {
    "rounds": 3, "participation": 0.5, "local_epochs": 2, "batch_size": 5, "lr": 0.05, "seed": 4, "threads": 2,
    "optimizer": "adam", "optimizer_state": "keep",
}  # fmt: skip
QUICK = {"local_epochs": 1, "batch_size": None}
EQUAL = [16] * 6  # clients whose order by size is their own, so that rounds of all change all rows at once


METHODS = [
    "fedper", "local", "fedfac-dynamic", "fedrep", "feddecomp", "factorized-fl-beta", "fedem", "fedcp", "fedphp",
    "fedcac", "fedamp", "clustered-fl",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_rounds_that_share_rows_are_those_that_copy_the_rows_of_all_clients(name, monkeypatch):
    adam = {"optimizer": optim.adam(0.05), "optimizer_state": "keep"}
    one = job(make(name), sizes=EQUAL, participation=(0.3, 1.0), threads=2, **adam)
    shared = run(one, 5)
    monkeypatch.setattr(StackedRows, "updated", lambda old, clients, rows: StackedRows({
        name: p.index_copy(0, torch.from_numpy(clients), rows[name]) for name, p in old.params.items()
    }))  # fmt: skip
    copied = run(one, 5)
    assert {type(copied.optimizer), type(shared.optimizer)} == {StackedRows, SlotRows}
    assert_same_states(one, copied, shared)


def test_a_run_that_shares_rows_goes_on_as_it_would_have(tmp_path):
    given = dataset(EQUAL), nets.mlp(SIZES), REMEMBERS
    whole = train(*given, **RUN)
    out = tmp_path / "run.zarr"
    train(*given, out=out, **RUN | {"rounds": 2})
    same(whole, train(*given, out=out, resume=True, **RUN))


def test_states_share_the_rows_of_idle_clients_and_slots_are_used_again():
    one = job(make("fedper"), participation=0.5, **QUICK)
    state = trainer.step(one, trainer.start(one))
    slots, first = state.client_params.slots, trainer.active(one, 0)
    assert (np.delete(state.client_params.slot, first) == 0).all(), "clients that have not trained have one row"
    for number in range(1, 30):
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
    one = job(make("fedper"), participation=0.5, **QUICK)
    states, seen = [trainer.start(one)], []
    for _ in range(12):
        seen.append(states[-1].client_params.saved())
        states.append(trainer.step(one, states[-1]))
    assert states[1].client_params.slots.number > 2 * one.clients
    for state, expected in zip(states, seen, strict=False):
        assert_equal(state.client_params.saved(), expected)


def test_a_round_of_all_clients_changes_all_rows_at_once():
    one, few = (job(make("fedper"), sizes=EQUAL, participation=p) for p in (1.0, 0.5))
    every = trainer.step(one, trainer.start(one))
    assert isinstance(every.client_params, StackedRows)
    some = trainer.step(few, every)
    assert isinstance(some.client_params, SlotRows)
    again = trainer.step(one, trainer.step(few, every))
    assert_equal(trainer.step(one, some).client_params.saved(), again.client_params.saved())


def slots(params, _):
    return SlotRows.of(params, len(params["w"]))


def on_disk(params, folder):
    return DiskRows.create(folder / "rows.npy", params, torch.device("cpu"))


@pytest.mark.parametrize("make_rows", [lambda params, _: StackedRows(params), slots, on_disk])
@pytest.mark.parametrize("equal", [False, True])
def test_versions_of_rows_are_read_updated_and_stay_as_they_are(make_rows, equal, tmp_path):
    dense = {"w": torch.arange(12.0).view(3, 2, 2), "n": torch.arange(3)}
    if equal:
        dense = {name: p[1].expand_as(p) for name, p in dense.items()}
    expected, every, some = {n: p.clone() for n, p in dense.items()}, np.arange(3), np.array([2, 0])
    rows = make_rows(dense, tmp_path)
    for clients in (every, some, some[:0], every[1:]):
        for read in (rows.borrow, rows.read):
            assert_equal(dict(read(clients)), {name: p[clients] for name, p in expected.items()})
            assert all(p.is_contiguous() for p in rows.read(clients).values())
    new = rows.updated(some, {"w": -torch.ones(2, 2, 2), "n": torch.tensor([7, 8])})
    assert new.read(every)["n"].tolist() == [8, 1, 7]
    assert new.borrow(every[1:])["n"].tolist() == [1, 7]
    for p in rows.read(np.array([0, 1])).values():
        p.zero_()
    assert_equal(rows.read(every), expected)
    nobody = some[:0]
    assert_equal(rows.updated(nobody, rows.read(nobody)).read(every), expected)
    whole = rows.updated(every, new.read(every))
    assert_equal(whole.read(every), new.read(every))
    assert_equal(rows.read(every), expected)


def test_rows_in_memory_are_gathered_by_name_and_borrowed_as_views_where_they_are_consecutive():
    params = {"w": torch.arange(6.0), "n": torch.zeros(6)}
    in_slots = SlotRows.of(params, 6)
    for rows, stored in ((StackedRows(params), params), (in_slots, in_slots.slots.params)):
        assert rows.borrow(np.array([2, 3]))["w"].data_ptr() == stored["w"][2:].data_ptr()
        assert rows.borrow(np.array([3, 2]))["w"].tolist() == [3, 2]
        assert (list(rows.borrow(np.array([5]))), len(rows.borrow(np.array([5])))) == (["w", "n"], 2)


def test_an_update_of_all_rows_takes_the_tensors_without_a_copy():
    rows, new = SlotRows.of({"w": torch.zeros(3, 2)}, 3), {"w": torch.ones(3, 2)}
    for old in (rows, StackedRows(rows.saved())):
        assert old.updated(np.arange(3), new).saved()["w"] is new["w"]


@pytest.mark.parametrize("copy", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])  # noqa: S301
def test_rows_are_copied_and_pickled_without_their_other_versions(copy):
    rows = StackedRows({"w": torch.ones(1000).expand(50, -1)})
    found = copy(rows.updated(np.array([4]), {"w": torch.zeros(1, 1000)}))
    assert found.saved()["w"].sum(1).tolist() == [1000] * 4 + [0] + [1000] * 45
    assert len(pickle.dumps(found)) < 1.1 * 4 * 1000 * 50


@pytest.mark.parametrize("on", ["weights", "updates"])
def test_a_split_from_sums_in_parts_is_the_same_with_any_number_of_threads(on, monkeypatch):
    def after(threads):
        one = job(algorithms.fedfac(kappa=0.7, on=on), sizes=EQUAL, participation=0.5, threads=threads)
        return one, run(one)

    _, whole = after(1)
    monkeypatch.setattr(chunks, "_PART", 100)
    one, in_parts = after(1)
    for threads in (2, 3):
        other = after(threads)[1]
        assert_same_states(one, in_parts, other)
        np.testing.assert_array_equal(in_parts.mask.fits["fc1"].communality, other.mask.fits["fc1"].communality)
    by_parts, by_whole = (state.mask.fits["fc1"].communality for state in (in_parts, whole))
    np.testing.assert_allclose(by_parts, by_whole, atol=1e-9)
