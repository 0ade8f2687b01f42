"""fl.train: a run becomes a labelled store, and an interrupted one goes on as if nothing had happened."""

from __future__ import annotations

import errno
import weakref

import numpy as np
import pytest
import torch
import trainer
import xarray as xr
from algorithm_jobs import job
from small_runs import NET, SETTINGS, dense, same, stopped, three_splits

from fedstat import store
from fedstat.fl import algorithms, checkpoints, loop, nets, optim, train
from fedstat.fl.batches import rows_of
from fedstat.store import write


def ragged(data):
    """The same samples, sample-major and shuffled."""
    flat = data.stack(row=("client", "sample")).reset_index("row").drop_vars("sample").rename(row="sample")
    order = np.random.default_rng(1).permutation(flat.sizes["sample"])
    return flat.isel(sample=order).transpose("sample", ...)


ALGORITHMS = {
    "local": algorithms.local,
    "fedavg": algorithms.fedavg,
    "fedsplit": lambda: algorithms.fedsplit({"fc1": np.arange(10) < 4}),
    "fedfac-static": lambda: algorithms.fedfac(["fc1"], dynamic=False),
    "fedfac-dynamic": lambda: algorithms.fedfac(["fc1"]),
    "random": lambda: algorithms.random_split(["fc1"]),
    "random-redrawn": lambda: algorithms.random_split(["fc1"], redrawn=True),
}


FOUR = {"rounds": 4, "checkpoints": [2], **SETTINGS}


@pytest.fixture(scope="module")
def whole():
    """A run of four rounds that nothing interrupts."""
    return train(dense(), NET, algorithms.fedavg(), **FOUR)


def interrupted(out, algorithm=algorithms.fedavg, **options):
    """Two rounds of four."""
    with stopped(before=2, error=FloatingPointError):
        train(dense(), NET, algorithm(), out=out, **FOUR | options)


def resumed(out, algorithm=algorithms.fedavg, data=None, **options):
    return train(dense() if data is None else data, NET, algorithm(), out=out, resume=True, **FOUR | options)


def test_a_run_with_kept_optimizer_states_goes_on_bit_by_bit(tmp_path):
    """That every method goes on with "reset", test_algorithms shows."""
    method, options = ALGORITHMS["fedfac-dynamic"], {"optimizer": "adam", "lr": 0.01, "optimizer_state": "keep"}
    interrupted(tmp_path / "run.zarr", method, **options)
    rest = resumed(tmp_path / "run.zarr", method, **options)
    same(train(dense(), NET, method(), **FOUR | options), rest)
    assert "ended" in rest.attrs
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_rounds_before_an_interrupt_are_on_disk(whole, tmp_path):
    interrupted(tmp_path / "run.zarr")
    accuracy = xr.open_datatree(tmp_path / "run.zarr", engine="zarr", consolidated=False)["metrics/accuracy"]
    np.testing.assert_array_equal(accuracy[:2], whole["metrics/accuracy"][:2])
    assert np.isnan(accuracy[2:]).all()


def test_a_round_runs_beside_no_state_but_its_own(monkeypatch):
    before, step = [], loop.run_round

    def watched(job, state, cohort):
        assert all(state() is None for state in before)
        before.append(weakref.ref(state.client_params))
        return step(job, state, cohort)

    monkeypatch.setattr(loop, "run_round", watched)
    train(dense(), NET, algorithms.fedper(), rounds=3, **SETTINGS)
    assert len(before) == 3


@pytest.mark.parametrize("checkpoint", [2, 4])
def test_a_disk_that_is_full_while_weights_are_written_loses_none(checkpoint, whole, tmp_path, monkeypatch):
    regions = checkpoints._regions

    def full(job, state, *rest):
        if state.round == checkpoint:
            raise OSError(errno.ENOSPC, "No space left on device")
        return regions(job, state, *rest)

    monkeypatch.setattr(checkpoints, "_regions", full)
    with pytest.raises(OSError, match="No space left"):
        train(dense(), NET, algorithms.fedavg(), out=tmp_path / "run.zarr", **FOUR)
    monkeypatch.undo()
    rest = resumed(tmp_path / "run.zarr")
    same(whole, rest)
    assert np.isfinite(rest["weights/fc1/w"]).all()


def test_a_run_that_other_code_goes_on_with_names_both_and_a_finished_one_is_only_read(tmp_path, monkeypatch):
    out = tmp_path / "run.zarr"
    interrupted(out)
    first = store.code()
    monkeypatch.setattr(write, "code", lambda *_: "other")
    run = resumed(out).load()
    monkeypatch.setattr(loop, "run_round", None)
    again = resumed(out)
    same(run, again)
    assert run.attrs["code"] == again.attrs["code"] == f"{first}, other"


def test_float32_is_float32_for_convolutions_too_and_the_callers_choice_is_put_back(monkeypatch):
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    seen, step = [], loop.run_round

    def look(job, state, cohort):
        seen.append([one.allow_tf32 for one in backends])
        return step(job, state, cohort)

    monkeypatch.setattr(loop, "run_round", look)
    before = [one.allow_tf32 for one in backends]
    try:
        backends[0].allow_tf32 = backends[1].allow_tf32 = True
        train(dense(), NET, algorithms.fedavg(), rounds=1)
        assert seen == [[False, False]]
        assert [one.allow_tf32 for one in backends] == [True, True]
    finally:
        backends[0].allow_tf32, backends[1].allow_tf32 = before


def test_dense_and_sample_major_data_are_the_same_rows():
    data = dense()
    a, b = (rows_of(d, "train", torch.device("cpu")) for d in (data, ragged(data)))
    assert (a.start == b.start).all()
    for c in range(5):
        rows = slice(a.start[c], a.start[c + 1])
        dense_rows, shuffled = (sorted(map(tuple, torch.hstack([r.x[rows], r.y[rows, None]]).tolist())) for r in (a, b))
        assert dense_rows == shuffled


def test_weights_are_those_the_accuracies_were_measured_with():
    data = dense()
    run = train(data, NET, algorithms.fedfac(["fc1"]), rounds=3, checkpoints=[1], **SETTINGS)
    test = data.isel(sample=np.flatnonzero(data["split"] == "test"))
    for position, number in enumerate([1, 3]):
        w1, w2 = (run[f"weights/fc{i}"].to_dataset().isel(checkpoint=position) for i in (1, 2))
        hidden = np.maximum(np.einsum("csf,cuf->csu", test["x"], w1["w"]) + w1["b"].values[:, None], 0)
        out = np.einsum("csu,cou->cso", hidden, w2["w"]) + w2["b"].values[:, None]
        accuracy = ((out[..., 0] > 0) == (test["y"].values == 1)).mean(1)
        np.testing.assert_allclose(run["metrics/accuracy"].sel(round=number), accuracy, atol=1e-6)


def test_only_what_needs_test_samples_waits_for_an_evaluated_round():
    run = train(dense(), NET, algorithms.fedavg(), **SETTINGS | {"rounds": 4, "evaluate_every": 2})
    metrics = run["metrics"]
    assert (metrics["bytes_up"] > 0).all()
    assert np.isfinite(metrics["train_loss"]).any("client").all()
    assert np.isfinite(metrics["accuracy"]).all("client").values.tolist() == [False, True, False, True]


def test_shared_units_have_equal_weights_and_personal_ones_do_not():
    settings = SETTINGS | {"participation": 1.0}
    run = train(dense(), NET, algorithms.fedfac(["fc1"]), rounds=3, **settings)
    w = run["weights/fc1/w"].isel(checkpoint=-1)
    spread = (w.max("client") - w.min("client")).max("weight").values
    np.testing.assert_array_equal(spread == 0, run["split/fc1/shared"].isel(round=-1))


def test_the_analysis_behind_a_split_is_stored_with_it():
    split = train(dense(), NET, algorithms.fedfac(["fc1"]), rounds=2, **SETTINGS)["split/fc1"].isel(round=-1)
    shared, communality = split["shared"].values, split["communality"].values
    assert communality[shared].min() >= communality[~shared].max()
    assert 1 <= split["n_factors"] < 10
    assert split["n_iter"] >= 1


def poison(data, **changes):
    for name, value in changes.items():
        data[name] = data[name].astype(type(value))
        data[name][2, 3] = value
    return data


BAD = {
    "rounds": ({"rounds": 0}, "rounds must be an integer >= 1, but got 0"),
    "participation": ({"participation": 0}, r"participation must be a finite number in \(0, 1\], but got 0"),
    "participation 2": ({"participation": 1.5}, "participation must be"),
    "epochs": ({"local_epochs": 0}, "local_epochs must be"),
    "batch": ({"batch_size": -1}, "batch_size must be"),
    "optimizer": ({"optimizer": "sdg"}, "optimizer must be one of 'sgd', 'adam', but got 'sdg'. Did you mean 'sgd'"),
    "lr": ({"lr": -0.1}, "lr must be"),
    "server_lr": ({"server_lr": float("nan")}, "server_lr must be a finite number"),
    "seed": ({"seed": -1}, "seed must be"),
    "device": ({"device": "gpu"}, "device must be"),
    "chunk": ({"client_chunk": 0}, "client_chunk must be"),
    "evaluate_every": ({"evaluate_every": 0}, "evaluate_every must be"),
    "ablation": ({"ablation": -1}, "ablation must be"),
    "checkpoint 0": ({"checkpoints": [0]}, "checkpoints must be an integer from 1 to 2"),
    "checkpoints": ({"checkpoints": [9]}, "checkpoints must be an integer from 1 to 2"),
    "resume": ({"resume": True}, "resume needs the path"),
    "state": ({"optimizer_state": "forget"}, "optimizer_state must be one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        train(dense(), NET, algorithms.fedavg(), **({"rounds": 2} | changes))


def test_bad_data_are_named():
    data = dense()
    with pytest.raises(ValueError, match="variables x and y, but y is missing"):
        train(data.drop_vars("y"), NET, algorithms.fedavg(), rounds=1)
    with pytest.raises(ValueError, match="client 2 has NaN or infinite values in its train samples"):
        train(poison(dense(), x=np.nan), NET, algorithms.fedavg(), rounds=1)
    with pytest.raises(ValueError, match=r"y must lie in 0, \.\.\., 1 for 1 output"):
        train(poison(dense(), y=7), NET, algorithms.fedavg(), rounds=1)
    for split, says in (("validation", "the validation samples have"), ("unseen", "the unseen clients' samples have")):
        given = three_splits()
        bad = given.copy(deep=True)
        bad["y"][0, -1 if split == "unseen" else 24] = 7
        with pytest.raises(ValueError, match=says):
            train(
                bad if split == "validation" else given, NET, algorithms.fedavg(), rounds=1,
                unseen_clients=bad if split == "unseen" else None,
            )  # fmt: skip
    with pytest.raises(ValueError, match="at least 1 client, but got 0"):
        train(data.isel(client=[]), NET, algorithms.fedavg(), rounds=1)
    with pytest.raises(ValueError, match="every client needs test samples"):
        train(data.isel(sample=slice(0, 24)), NET, algorithms.fedavg(), rounds=1)
    lonely = ragged(data)
    lonely = lonely.isel(sample=np.flatnonzero((lonely["client"] != 3) | (lonely["split"] == "test")))
    with pytest.raises(ValueError, match=r"train samples, but client\(s\) \[3\] have none"):
        train(lonely, NET, algorithms.fedavg(), rounds=1)


def test_new_clients_of_another_width_are_named_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"unseen clients must have samples of shape \(6,\), .* but got \(5,\)"):
        train(dense(), NET, algorithms.fedavg(), rounds=1, unseen_clients=dense(d=5), out=tmp_path / "run.zarr")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALGORITHMS)
def test_cuda_agrees_with_cpu_to_rounding(name):
    cpu, cuda = (
        train(dense(), NET, ALGORITHMS[name](), rounds=3, device=device, **SETTINGS) for device in ("cpu", "cuda")
    )
    for layer in ("fc1", "fc2"):
        a, b = (run[f"weights/{layer}/w"] for run in (cpu, cuda))
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-3)


def test_a_damaged_state_means_starting_again_with_a_warning(whole, tmp_path):
    out = tmp_path / "run.zarr"
    interrupted(out)
    (out / "journal" / "state").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="journal/state has 7 bytes in place of .*computed again"):
        again = resumed(out)
    same(whole, again)


def test_resuming_with_other_data_or_another_optimizer_is_refused(tmp_path):
    out = tmp_path / "run.zarr"
    interrupted(out, optimizer=optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"other settings \(data_digest: "):
        resumed(out, data=dense(seed=1), optimizer=optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"other settings \(optimizer: 'sgd"):
        resumed(out, optimizer=optim.adam(0.1))


@pytest.mark.parametrize("y", [0.7, np.nan])
def test_targets_are_not_rounded(y):
    with pytest.raises(ValueError, match="must hold classes for task='classification', but has"):
        train(poison(dense(), y=y), NET, algorithms.fedavg(), rounds=1, task="classification")


@pytest.mark.parametrize("flags", [np.linspace(0, 1, 10), np.arange(10), np.ones((10, 1), bool)])
def test_a_split_must_be_one_bool_a_unit(flags):
    with pytest.raises(ValueError, match="must be one bool per unit, but got"):
        trainer.start(job(algorithms.fedsplit({"fc1": flags})))


def test_a_masked_split_is_refused():
    flags = np.ma.masked_array(np.ones(10, bool), mask=np.arange(10) == 3)
    with pytest.raises(ValueError, match="split of layer 'fc1' must hold a value everywhere, but got a masked array"):
        trainer.start(job(algorithms.fedsplit({"fc1": flags})))


def test_labelled_clients_and_integer_inputs_are_taken():
    data = ragged(dense())
    named = data.assign_coords(client=("sample", np.array(list("edcba"))[data["client"].values]))
    a, b = (train(d, NET, algorithms.local(), rounds=1)["metrics/accuracy"][0].values for d in (data, named))
    np.testing.assert_allclose(a, b[::-1], atol=1e-6)
    x = (dense()["x"] * 10).astype(np.uint8)
    same(*(train(dense().assign(x=x.astype(kind)), NET, algorithms.fedavg(), rounds=1) for kind in (np.uint8, "f4")))


def test_numpy_settings_are_taken():
    plain = {"rounds": 2, "seed": 1, "lr": 0.125, "checkpoints": [1]}
    settings = {"rounds": np.int64(2), "seed": np.int64(1), "lr": np.float32(0.125), "checkpoints": np.array([1])}
    same(*(train(dense(), NET, algorithms.fedavg(), **options) for options in (settings, plain)))


def test_wrong_input_size_says_what_the_network_wants():
    with pytest.raises(ValueError, match=r"does not take samples of shape \(6,\)"):
        train(dense(), nets.mlp([5, 8, 1]), algorithms.fedavg(), rounds=1)


def test_a_wrapped_network_is_the_one_that_is_trained():
    seen = []

    def by_autograd(net):
        seen.append(net)
        return net._replace(accumulate=None)

    plain, wrapped = (
        train(dense(), NET, a, rounds=2, lr=0.1, batch_size=4)["weights/fc1/w"].values
        for a in (algorithms.fedavg(), algorithms.fedavg()._replace(wrap=by_autograd))
    )
    assert seen == [NET]
    np.testing.assert_allclose(plain, wrapped, atol=1e-6)


def test_parameters_of_a_layer_may_have_as_many_numbers_a_unit_as_they_like():
    x = np.random.default_rng(0).integers(0, 5, (3, 12, 7))
    data = xr.Dataset(
        {"x": (("client", "sample", "character"), x), "y": (("client", "sample"), x[..., 0])},
        coords={"split": ("sample", ["train"] * 8 + ["test"] * 4)},
    )
    net = nets.lstm((7,), 5, vocabulary=5, hidden=6, fc=4)
    kept = train(data, net, algorithms.fedavg(), rounds=1, keep_weights=["lstm1"])["weights/lstm1"]
    assert kept["w"].sizes == {"checkpoint": 1, "client": 3, "unit": 6, "weight": 56}
    assert kept["b"].sizes == {"checkpoint": 1, "client": 3, "unit": 6, "b_weight": 4}
    assert np.isfinite(kept["w"]).all()
