"""Rows of clients and samples on disk: the same run to the bit, nothing lost, and idle clients left alone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from dataclasses import replace

import killed_run
import numpy as np
import pytest
import torch
import trainer
import xarray as xr
from algorithm_jobs import SAMPLES, SIZES, assert_equal, assert_same_states, dataset, job, make, run
from children import together
from small_runs import NET, SETTINGS, dense, same
from toy_methods import REMEMBERS

from fedstat import data, store
from fedstat._utils import check
from fedstat.fl import algorithms, batches, client_rows, loop, nets, optim, train
from fedstat.fl import chunks as _memory
from fedstat.fl import cohort as participation
from fedstat.fl.disk_rows import DiskRows, SlotFile
from fedstat.study.leaderboard import state_bytes

RUN = {
    "rounds": 2, "participation": 0.5, "local_epochs": 2, "batch_size": 5, "lr": 0.05, "seed": 4, "threads": 1,
    "optimizer": "adam", "optimizer_state": "keep",
}  # fmt: skip


@pytest.fixture
def tight(monkeypatch):
    """A budget that leaves nothing, so that all that can be is on disk."""
    monkeypatch.setattr(_memory, "remaining_bytes", lambda *_: 0)
    monkeypatch.setattr(
        _memory, "samples_stay", lambda given, memory: memory is not None and batches.on_disk(given["x"])
    )


def fed():
    found = dataset(SAMPLES)
    return found.assign_coords(split=("sample", found["split"].to_numpy().astype(object)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same samples in a memory map, in a zarr store, and in one that Dask holds if it is installed."""
    folder = tmp_path_factory.mktemp("samples")
    data.save_folder(fed(), folder / "map")
    fed().to_zarr(folder / "zarr", zarr_format=3, consolidated=False)
    return {
        "memory": fed(),
        "map": data.open_folder(folder / "map"),
        "zarr": xr.open_zarr(folder / "zarr", chunks=None, consolidated=False),
        "by default": xr.open_zarr(folder / "zarr", consolidated=False),
    }


METHODS = {
    "fedper": "zarr", "fedfac-dynamic": "map", "fedrep": "by default", "feddecomp": "map", "factorized-fl-beta": "map",
    "fedem": "memory", "fedcp": "map", "fedphp": "map", "fedcac": "map", "fedamp": "zarr", "clustered-fl": "map",
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_rounds_on_disk_are_those_in_memory(name, sources, tmp_path):
    kind, adam = METHODS[name], {"optimizer": optim.adam(0.05), "optimizer_state": "keep"}
    one = job(make(name), participation=0.5, **adam)
    rows = batches.rows_of(sources[kind], "train", torch.device("cpu"), stored=kind != "memory")
    other = replace(one, train=rows, rows_folder=tmp_path / "rows", room=0)
    on_disk = run(other)
    assert isinstance(on_disk.optimizer, DiskRows)
    assert_same_states(one, run(one), on_disk)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("name", "kind", "options"), [("fedfac-dynamic", "map", {}), ("local", "zarr", {"participation": 1.0})]
)
def test_a_run_on_disk_is_the_run_in_memory(name, kind, options, sources):
    found = train(sources[kind], nets.mlp(SIZES), make(name), memory_budget="2GiB", **RUN | options)
    expected = train(fed(), nets.mlp(SIZES), make(name), **RUN | options)
    same(expected, found)
    assert found.attrs["config"] == expected.attrs["config"], "data have the same digest, and memory is no setting"


@pytest.mark.usefixtures("tight")
def test_what_a_method_remembers_of_clients_is_on_disk_too(tmp_path):
    out = tmp_path / "run.zarr"
    found = train(fed(), nets.mlp(SIZES), REMEMBERS, memory_budget="2GiB", out=out, **RUN)
    same(train(fed(), nets.mlp(SIZES), REMEMBERS, **RUN), found)
    rows = np.load(out / "journal/client_rows/algorithm_state.npy", mmap_mode="r")
    assert rows.dtype.names == tuple(nets.mlp(SIZES).shapes)
    assert sorted(p.name for p in (out / "journal/client_rows").iterdir()) == [
        "algorithm_state.npy",
        "client_params.npy",
        "optimizer.npy",
    ]
    in_rows = sum(file.stat().st_size for file in (out / "journal/client_rows").iterdir())
    assert state_bytes(out) > in_rows > 0, "the leaderboard counts rows on disk"


def test_rows_that_differ_before_the_first_round_are_written(tmp_path):
    one = replace(job(make("local")), rows_folder=tmp_path / "rows", room=0)
    rows = {"a": torch.arange(6.0), "b": torch.zeros(6, 2, dtype=torch.bool), "c": torch.randn(6, 3)}
    rows["c"][3:] = rows["c"][0]
    equal = {name: p[:1].expand(6, *p.shape[1:]) for name, p in rows.items()}
    found = client_rows.create(one, {"algorithm_state": rows, "client_params": equal, "optimizer": {}})
    some = np.array([4, 0, 5])
    for name, expected in (("algorithm_state", rows), ("client_params", equal)):
        assert_equal(found[name].read(some), {n: p[some] for n, p in expected.items()})
    assert [*found["algorithm_state"].slot] == [-1, 0, 1, 2, 3, 4]
    assert [*found["client_params"].slot] == [-1] * 6
    assert found["optimizer"].saved() == {}


def test_rows_stay_in_memory_if_two_versions_of_all_of_them_fit(tmp_path):
    one = job(make("local"))
    rows = {"client_params": {"a": torch.zeros(one.clients, 10)}, "algorithm_state": {"b": torch.zeros(one.clients, 3)}}
    two_versions = 2 * one.clients * (10 + 3) * 4
    for room, kind in ((two_versions, client_rows.StackedRows), (two_versions - 1, DiskRows)):
        created = client_rows.create(replace(one, rows_folder=tmp_path / str(room), room=room), rows)
        assert {type(part) for part in created.values()} == {kind}


def test_an_earlier_state_stays_as_it_is(tmp_path):
    one = replace(job(make("fedrep"), participation=0.5), rows_folder=tmp_path / "rows", room=0)
    start = trainer.start(one)
    assert isinstance(start.client_params, DiskRows)
    first = trainer.step(one, start)
    before = trainer.models(one, first)
    later = [first]
    for _ in range(4):
        later.append(trainer.step(one, later[-1]))
    again = trainer.step(one, start)
    assert_equal(before, trainer.models(one, first))
    assert_equal(before, trainer.models(one, again))
    assert_equal(trainer.models(one, start), trainer.models(*(lambda j: (j, trainer.start(j)))(job(make("fedrep")))))


def test_only_active_clients_are_read_and_written_and_slots_are_used_again(tmp_path, monkeypatch):
    one = job(make("fedper"), participation=0.5, local_epochs=1, batch_size=None)
    one = replace(one, rows_folder=tmp_path / "rows", room=0)
    touched = {"read": [], "write": []}
    for what in touched:
        own = getattr(SlotFile, what)

        def spy(slots, slot, parts, own=own, what=what):
            touched[what].append(slot)
            return own(slots, slot, parts)

        monkeypatch.setattr(SlotFile, what, spy)
    state = trainer.start(one)
    for name in touched:
        touched[name].clear()
    for number in range(30):
        active = trainer.active(one, number)
        had, old = set(state.client_params.slot[active]) - {-1}, state.client_params.slot.copy()
        state = trainer.step(one, state)
        assert set(touched["read"]) == had
        assert sorted(touched["write"]) == sorted(state.client_params.slot[active])
        idle = np.setdiff1d(np.arange(one.clients), active)
        np.testing.assert_array_equal(state.client_params.slot[idle], old[idle])
        for name in touched:
            touched[name].clear()
    assert state.client_params.file.number <= one.clients + len(active)


def go(out=None, **options):
    return train(dense(), NET, algorithms.fedrep(), out=out, **SETTINGS | {"rounds": 6, "threads": 1} | options)


@pytest.fixture(scope="module")
def whole():
    return go()


@pytest.mark.usefixtures("tight")
def test_a_killed_run_goes_on_from_the_last_committed_state(whole, tmp_path):
    out = tmp_path / "run.zarr"
    assert together(1, killed_run.with_rows_on_disk, out, folder=tmp_path)[0] == [-signal.SIGKILL]
    done = []
    same(whole, go(out, resume=True, memory_budget="1GiB", progress=done.append))
    assert done == [3, 1, 1, 1]
    assert not store.damage(out, checksums=True)


@pytest.mark.usefixtures("tight")
def test_a_failed_write_loses_nothing(whole, tmp_path, monkeypatch):
    out, write, left = tmp_path / "run.zarr", os.pwrite, [40]

    def full(file, content, at):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[: len(content) // 2 + 1], at)  # as the system may, too

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        go(out, memory_budget="1GiB")
    assert 0 < store.open_run(out)["metrics/seconds"].notnull().sum() < 6
    same(whole, go(out, resume=True, memory_budget="1GiB"))


@pytest.mark.usefixtures("tight")
def test_runs_are_made_longer_and_move_to_the_disk(tmp_path, whole):
    out = tmp_path / "run.zarr"
    go(out, rounds=2)
    go(out, rounds=3, resume=True, memory_budget="1GiB")
    assert (out / "journal/client_rows/client_params.npy").is_file()
    same(whole, go(out, resume=True))


@pytest.mark.usefixtures("tight")
def test_damaged_rows_are_found(tmp_path):
    out = tmp_path / "run.zarr"
    go(out, rounds=3, memory_budget="1GiB")
    file = out / "journal/client_rows/client_params.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    shutil.copytree(out, tmp_path / "cut.zarr")
    file.write_bytes(content)
    with pytest.raises(store.DamageError, match=r"client_params\.npy is damaged: wrong checksum for client \d"):
        go(out, resume=True, memory_budget="1GiB")
    (tmp_path / "cut.zarr/journal/client_rows/client_params.npy").unlink()
    with pytest.raises(store.DamageError, match=r"client_params\.npy is damaged: it is missing or truncated"):
        go(tmp_path / "cut.zarr", resume=True, memory_budget="1GiB")


@pytest.mark.parametrize("kind", ["map", "zarr", "by default"])
def test_stored_samples_are_those_in_memory(kind, sources, monkeypatch):
    cpu = torch.device("cpu")
    for subset in ("train", "test"):
        there = batches.rows_of(sources[kind], subset, cpu, stored=True)
        here = batches.rows_of(fed(), subset, cpu)
        assert isinstance(there.x, batches.Stored)
        assert torch.equal(there.x[:], here.x)
        rows = torch.tensor([[3, 0], [len(here.y) - 1, 3]])
        assert torch.equal(there.x[rows], here.x[rows])
        assert torch.equal(there.x[2], here.x[2])
        assert torch.equal(there.x[np.arange(0)], here.x[:0])
        assert batches.digest(there) == batches.digest(here)
        with monkeypatch.context() as patch:
            patch.setattr(batches, "_BLOCK", 1)  # less than a sample
            assert batches.digest(there) == batches.digest(here)
        own, clients = batches.load_clients(there, np.array([4, 1]))
        assert torch.equal(own.x, batches.part(here, np.array([4, 1])).x)
        assert own.ids[clients].tolist() == [4, 1]


def test_stored_samples_of_clients_as_a_dim(tmp_path):
    given, cpu = dense(), torch.device("cpu")
    np.save(tmp_path / "x.npy", given["x"].to_numpy())
    stored = given.assign(x=(given["x"].dims, np.load(tmp_path / "x.npy", mmap_mode="r")))
    for subset in ("train", "test"):
        there, here = (batches.rows_of(d, subset, cpu, stored=s) for d, s in ((stored, True), (given, False)))
        assert torch.equal(there.x[:], here.x)
        assert torch.equal(there.x.part(np.arange(7, 40))[3], here.x[10])


def test_reading_a_private_map_keeps_what_was_written_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_MAPPED", 0)
    np.save(tmp_path / "x.npy", np.zeros((4, 8, 6), np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    x[1, 2] = 5.0
    stored = dense(clients=4, n_train=6, n_test=2).assign(x=(("client", "sample", "feature"), x))
    rows = batches.rows_of(stored, "train", torch.device("cpu"), stored=True)
    rows.x[:]
    assert (rows.x[8] == 5).all()
    assert float(rows.x[:].sum()) == 30


@pytest.mark.usefixtures("tight")
def test_samples_that_are_not_finite_are_refused_before_training(tmp_path):
    given = dense()
    x = given["x"].to_numpy().copy()
    x[3, 20, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    stored = given.assign(x=(given["x"].dims, np.load(tmp_path / "x.npy", mmap_mode="r")))
    with pytest.raises(ValueError, match="x must be finite, but at client 3, sample 20 of the data"):
        train(stored, NET, algorithms.fedper(), rounds=1, memory_budget="1GiB")


def test_an_analysis_of_all_clients_is_made_in_blocks(monkeypatch):
    one = job(make("fedfac-static"))
    expected = trainer.start(one).mask
    monkeypatch.setattr(_memory, "blocks", lambda j: np.array_split(np.arange(j.clients), 3))
    found = trainer.start(one).mask
    assert_equal(expected.shared, found.shared)
    fits = (s.fits["fc1"].communality for s in (expected, found))
    np.testing.assert_allclose(*map(np.asarray, fits), rtol=1e-9)


def test_of_many_clients_the_active_ones_are_drawn_at_once(monkeypatch):
    one = job(make("local"), participation=0.5)
    monkeypatch.setattr(participation, "_INDIVIDUAL_DRAWS", 5)
    drawn = [trainer.active(one, number) for number in range(400)]
    assert all(len(np.unique(d)) == 3 and (np.diff(d) > 0).all() for d in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=6)  # binomial, 400 draws of 1/2: sd 10
    assert (abs(counts - 200) < 45).all()
    np.testing.assert_array_equal(drawn[7], trainer.active(one, 7))


@pytest.mark.parametrize("size", ["2 gigs", "GiB", "-1MB", "0", 0, 2.5, "1e9", "nan"])
def test_a_memory_that_is_no_size_is_refused(size):
    message = "memory_budget must be a size such as '2GiB', '500MB' or a number of bytes, but got"
    with pytest.raises(ValueError, match=message):
        train(dense(), NET, algorithms.fedper(), rounds=1, memory_budget=size)


def test_sizes_are_read():
    read = {"2GiB": 2**31, "500MB": 5 * 10**8, "500 mb": 5 * 10**8, "1.5k": 1500, "3": 3, "1TiB": 2**40, 7: 7, "8B": 8}
    assert {size: check.in_bytes("memory", size) for size in read} == read


def test_what_does_not_fit_is_refused_before_training(monkeypatch, tmp_path):
    def started(*_):
        raise AssertionError("training began")

    with pytest.raises(
        ValueError, match=r"memory_budget='1MB' is too small: .* a round of 3 selected .* \(participation\)"
    ):
        go(memory_budget="1MB")
    monkeypatch.setattr(_memory, "_held_bytes", lambda _: 0)
    with pytest.raises(ValueError, match=r"95\.4 MiB of it for the mixing matrix of all clients"):
        train(
            dense(clients=2500, n_train=2, n_test=1), NET, make("factorized-fl-alpha"), rounds=1, memory_budget="150MB",
            participation=0.01,
        )  # fmt: skip
    monkeypatch.setattr(loop, "run_round", started)
    monkeypatch.setattr(_memory, "remaining_bytes", lambda *_: 0)
    test = algorithms.fedfac(dynamic=False, estimator="icc", tau="test")
    with pytest.raises(ValueError, match="looks at models of all 5 clients before the first round"):
        train(dense(), NET, test, rounds=1, memory_budget="1GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 100))
    with pytest.raises(ValueError, match=r"would write .* of clients' weights \(1 checkpoint\(s\), up to 5 cl"):
        go(tmp_path / "run.zarr")
    assert not list(tmp_path.iterdir())
