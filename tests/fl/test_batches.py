"""Images of bytes with a mean and sd are standardised when they are used: the numbers are those of float32 images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from small_runs import same

from fedstat import store
from fedstat.data import to_float
from fedstat.fl import algorithms, batches, nets, train

MEAN, SD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
CPU = torch.device("cpu")


def photos():
    """Of four clients of unequal size, in no order."""
    rng = np.random.default_rng(0)
    client = rng.permutation(np.repeat([0, 1, 2, 3], [20, 60, 60, 40]))
    split = np.where(np.arange(180) % 4 == 0, "test", "train").astype(object)
    x = rng.integers(0, 256, size=(180, 3, 8, 8)).astype(np.uint8)
    images = (("sample", "channel", "row", "column"), x, {"mean": MEAN, "sd": SD})
    return xr.Dataset(
        {"x": images, "y": ("sample", np.arange(180) % 3)},
        coords={"client": ("sample", client), "split": ("sample", split)},
    )


def by_client():
    """As many samples of every client."""
    data = photos()
    x, y = data.x.values[:160].reshape(4, 40, 3, 8, 8), data.y.values[:160].reshape(4, 40)
    return xr.Dataset(
        {"x": (("client", *data.x.dims), x, data.x.attrs), "y": (("client", "sample"), y)},
        coords={"split": ("sample", data.split.values[:40])},
    )


def go(data, method=None, **options):
    how = {"rounds": 2, "batch_size": 7, "lr": 0.1, "seed": 3} | options
    return train(data, nets.mlp([192, 8, 3]), method or algorithms.fedper(), **how)


@pytest.mark.parametrize("arranged", [photos, by_client])
def test_bytes_stay_bytes_and_give_the_images_that_they_stand_for(arranged):
    data = arranged()
    found, images = (batches.rows_of(one, "train", CPU).x for one in (data, to_float(data)))
    assert found.values.dtype == torch.uint8
    assert images.dtype == torch.float32
    assert torch.equal(found[:], images)
    some = torch.tensor([3, 1, 3])
    assert torch.equal(found.index_select(0, some), images[some])
    assert torch.equal(found.part(some)[1:], images[[1, 3]])
    plain = (found.values.double() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(SD)[:, None, None]
    torch.testing.assert_close(images.double(), plain, rtol=1e-6, atol=1e-6)


MEASURED = {"probe": ["split-half"], "prediction_rules": {"fedavg+": algorithms.finetuned}}


@pytest.mark.parametrize(
    ("arranged", "method", "options"),
    [(photos, algorithms.fedavg, MEASURED), (photos, algorithms.fedcp, {}), (by_client, algorithms.fedcac, {})],
)
def test_a_run_on_bytes_is_the_run_on_images(arranged, method, options):
    data = arranged()
    same(go(to_float(data), method(), **options), go(data, method(), **options))


def test_either_continues_the_other_and_bytes_on_disk_too(tmp_path, monkeypatch):
    data, whole = photos(), go(to_float(photos()), rounds=3)
    go(data, out=tmp_path / "run.zarr")
    same(whole, go(to_float(data), rounds=3, out=tmp_path / "run.zarr", resume=True))
    data.to_zarr(tmp_path / "data.zarr", consolidated=False)
    monkeypatch.setattr("fedstat.fl.chunks.samples_stay", lambda *_: True)
    with xr.open_zarr(tmp_path / "data.zarr", consolidated=False) as on_disk:
        same(whole, go(on_disk, rounds=3, memory_budget="2GiB"))


def test_other_means_are_other_data(tmp_path):
    data = photos()
    go(data, rounds=1, out=tmp_path / "run.zarr")
    data.x.attrs["mean"] = [0.4, 0.5, 0.61]
    with pytest.raises(ValueError, match="data_digest"):
        go(data, out=tmp_path / "run.zarr", resume=True)
    assert store.attributes(tmp_path / "run.zarr")["ended"]


@pytest.mark.parametrize(("mean", "sd", "says"), [
    (MEAN, [0.2, 0.0, 0.4], r"sd must be > 0, but got \[0.2, 0.0, 0.4\]"),
    ([0.4, np.nan, 0.5], SD, "mean must be finite"),
    (MEAN[:2], SD[:2], r"must be one number, or 3 by channel, but got \[0.4, 0.5\]"),
])  # fmt: skip
def test_means_and_deviations_that_scale_nothing_are_named(mean, sd, says):
    data = photos()
    data.x.attrs.update(mean=mean, sd=sd)
    for use in (go, to_float):
        with pytest.raises(ValueError, match=says):
            use(data)


@pytest.mark.parametrize(("mean", "sd"), [(0.5, 0.3), ([0.5], [0.3]), (np.array([0.5]), np.float64(0.3))])
def test_gray_images_need_no_channel(mean, sd):
    data = photos()
    gray = data.assign(x=(("sample", "row", "column"), data.x.values[:, 0], {"mean": mean, "sd": sd}))
    found = batches.rows_of(gray, "train", CPU).x
    assert torch.equal(found[0], batches.rows_of(to_float(gray), "train", CPU).x[0])
    assert found[0].shape == (8, 8)
    if isinstance(mean, float):
        net = nets.mlp([64, 8, 3])
        same(*(train(one, net, algorithms.fedavg(), rounds=1, batch_size=7) for one in (to_float(gray), gray)))


def test_bytes_that_are_no_images_are_what_they_are():
    """Features of a table, whose mean and sd somebody noted."""
    data = by_client()
    x = data.x.values[:, :, 0, 0, :6]
    table = data.assign(x=(("client", "sample", "feature"), x, {"mean": 1.0, "sd": 2.0}))
    found = batches.rows_of(table, "train", CPU).x
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found[:3], x[0][data.split.values == "train"][:3])
