"""A run on disk opens at any moment, knows where it comes from, and is never overwritten by accident."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr

from fedstat import store
from fedstat.store import Group, Variable, write

LAYOUT = {
    "metrics": Group(
        xr.Dataset(coords={"round": ("round", np.arange(1, 5)), "client": ("client", np.arange(3))}),
        {
            "accuracy": Variable(("round", "client"), "float32", {"round": 2}, {"long_name": "test accuracy"}),
            "shared": Variable(("round",), "bool"),
        },
    ),
    "split/fc1": Group(
        xr.Dataset(coords={"unit": ("unit", np.array(["a", "b"], object))}), {"nu": Variable(("unit",), "float64")}
    ),
}


def create(path, **config):
    return store.create(path, LAYOUT, store.provenance("A run", {"seed": 3, **config}, command="made up"))


def test_what_is_written_is_read_and_the_rest_is_missing(tmp_path):
    writer = create(tmp_path / "run.zarr")
    writer.write("metrics/accuracy", (slice(1, 3),), np.full((2, 3), 0.5))
    writer.write("metrics/shared", (1,), True)
    writer.commit()
    run = store.open_run(tmp_path / "run.zarr")
    expected = np.full((4, 3), np.nan)
    expected[1:3] = 0.5
    np.testing.assert_array_equal(run["metrics/accuracy"], expected)
    assert run["metrics/shared"].values.tolist() == [False, True, False, False]
    assert run["metrics/accuracy"].attrs["long_name"] == "test accuracy"
    assert run["split/fc1"]["unit"].values.tolist() == ["a", "b"]
    assert np.isnan(run["split/fc1/nu"]).all()


def test_provenance_names_settings_versions_and_time(tmp_path):
    create(tmp_path / "run.zarr", lr=0.1).finish()
    attrs = store.open_run(tmp_path / "run.zarr").attrs
    assert json.loads(attrs["config"]) == {"seed": 3, "lr": 0.1}
    assert json.loads(attrs["versions"]).keys() >= {"python", "torch", "numpy", "fedstat"}
    assert attrs["title"] == "A run"
    assert attrs["seed"] == 3
    assert attrs["started"] <= attrs["ended"]


def test_an_existing_path_is_not_touched(tmp_path):
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / "precious").write_text("data")
    with pytest.raises(FileExistsError, match="exists already"):
        create(tmp_path / "run.zarr")
    assert (tmp_path / "run.zarr" / "precious").read_text() == "data"


def test_an_interrupted_layout_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "_lay_out", fail)
    with pytest.raises(KeyboardInterrupt):
        create(tmp_path / "run.zarr")
    assert not list(tmp_path.iterdir())


def test_of_two_runs_started_at_once_one_is_refused_and_the_other_is_whole(tmp_path, monkeypatch):
    lay_out = write._lay_out

    def slow(*parts):
        lay_out(*parts)
        monkeypatch.undo()
        create(tmp_path / "run.zarr", lr=0.2).finish()  # the other process is faster

    monkeypatch.setattr(write, "_lay_out", slow)
    with pytest.raises(FileExistsError, match="by another process"):
        create(tmp_path / "run.zarr", lr=0.1)
    assert store.config_of(tmp_path / "run.zarr")["lr"] == 0.2
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_resuming_with_other_settings_names_them(tmp_path):
    with create(tmp_path / "run.zarr", lr=0.1):
        pass
    with store.resume(tmp_path / "run.zarr", {"seed": 3, "lr": 0.1}, command="made up") as writer:
        assert not writer.finished
    with pytest.raises(ValueError, match=r"other settings \(lr: 0.1 there, 0.2 now\)"):
        store.resume(tmp_path / "run.zarr", {"seed": 3, "lr": 0.2}, command="made up")


def test_no_run_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        store.open_run(tmp_path)


def test_a_damaged_run_is_named(tmp_path):
    create(tmp_path / "run.zarr").finish()
    (tmp_path / "run.zarr" / "metrics" / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.zarr is damaged: metrics/zarr.json has 1 bytes in place of \d+"):
        store.open_run(tmp_path / "run.zarr")
