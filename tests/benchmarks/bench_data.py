"""Loading MNIST against reading its bytes, and partitions against the usual loop over classes, in one process."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from fedstat.data import load, partition

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"
NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no MNIST at {MNIST}")
@pytest.mark.parametrize("zipped", [True, False])
def test_load_mnist(compare, tmp_path, zipped):
    for name in NAMES:
        content = gzip.decompress((MNIST / f"{name}.gz").read_bytes())
        (tmp_path / name).write_bytes(gzip.compress(content, 6) if zipped else content)

    def bytes_alone():
        whole = [(tmp_path / name).read_bytes() for name in NAMES]
        return [np.frombuffer(gzip.decompress(b) if zipped else b, np.uint8) for b in whole]

    data, plain = compare(
        f"load MNIST, {'' if zipped else 'not '}compressed", lambda: load("mnist", tmp_path), bytes_alone,
        "np.frombuffer of the unzipped bytes", rounds=15,
    )  # fmt: skip
    np.testing.assert_array_equal(data.x[:60_000].values.ravel(), plain[0][16:])


def loop(y, clients, concentration):
    """The partition as it is usually written: proportions and np.split, class by class."""
    rng = np.random.default_rng(0)
    held = [[] for _ in range(clients)]
    for c in np.unique(y):
        here = rng.permutation(np.flatnonzero(y == c))
        cuts = (np.cumsum(rng.dirichlet(np.full(clients, concentration))) * len(here)).astype(int)[:-1]
        for mine, more in zip(held, np.split(here, cuts), strict=True):
            mine.extend(more.tolist())
    return held


@pytest.mark.parametrize("name", ["iid", "one_class", "pathological", "dirichlet", "dirichlet_equal"])
def test_partition_60000_samples_into_1000_clients(compare, name):
    y = np.random.default_rng(0).integers(0, 10, 60_000)
    split = np.full(len(y), "train", dtype=object)
    data = xr.Dataset({"x": ("sample", np.zeros(len(y))), "y": ("sample", y)}, coords={"split": ("sample", split)})
    options = {
        "pathological": {"classes_per_client": 2},
        "dirichlet": {"concentration": 0.1, "below": "move"},
        "dirichlet_equal": {"concentration": 1.0, "n_train": 50, "n_test": 0},
    }.get(name, {})
    ours = getattr(partition, name)
    fed, _ = compare(
        f"partition {name}, 60,000 samples into 1,000 clients",
        lambda: ours(data, clients=1000, **options), lambda: loop(y, 1000, 0.1), "a Dirichlet partition by loop",
        rounds=15,
    )  # fmt: skip
    assert len(np.unique(fed.client)) == 1000
