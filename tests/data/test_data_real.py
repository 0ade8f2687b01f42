"""The loaders on the published files themselves, against published checksums, counts and LEAF's own output."""

import csv
import gzip
import hashlib

import numpy as np
import pytest
from real_data import require_real_data

from fedstat.data import load, partition, to_float
from fedstat.data.leaf import extract_roles


@pytest.fixture(scope="module")
def place():
    return require_real_data()


def test_mnist_is_the_bytes_of_its_files(place):
    data = load("mnist", place)
    assert data.x.shape == (70_000, 1, 28, 28)
    assert data.x.dtype == np.uint8
    names = [f"mnist/{part}-images-idx3-ubyte.gz" for part in ("train", "t10k")]
    stored = b"".join(gzip.decompress((place / name).read_bytes())[16:] for name in names)
    assert data.x.values.tobytes() == stored
    train = data.y[data.split == "train"]
    assert np.bincount(train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert int((data.split == "test").sum()) == 10_000
    scaled = to_float(data.isel(sample=slice(100)), mean=0.1307, sd=0.3081).x
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, (data.x[:100] / 255 - 0.1307) / 0.3081, rtol=0, atol=1e-6)


def test_a_folder_of_one_set_will_do_and_the_environment_too(place, monkeypatch):
    test = load("mnist", place / "mnist", split="test")
    monkeypatch.setenv("FEDSTAT_DATA", str(place))
    assert test.identical(load("mnist", split="test"))


def test_cifar_10_has_the_checksums_of_the_official_binary_version(place):
    data = load("cifar-10", place, split="train")
    binary = np.column_stack([data.y.values.astype(np.uint8), data.x.values.reshape(50_000, 3072)])
    found = [hashlib.sha1(part.tobytes(), usedforsecurity=False).hexdigest()[:8] for part in np.split(binary, 5)]
    assert found == ["aadd24ac", "c0ba65cc", "1dd00a74", "aab85764", "26e2849e"]
    assert data.y.attrs["names"][8] == "ship"


def test_cifar_10_rows_missing_from_the_test_file_are_a_warning(place):
    with pytest.warns(UserWarning, match="CIFAR-10: the test subset has 9,980 rows, but 10,000 were published"):
        data = load("cifar-10", place, split="test")
    assert np.bincount(data.y).tolist() == [1000] * 7 + [999, 981, 1000]


def test_cifar_100_has_the_checksum_of_the_official_binary_version(place):
    data = load("cifar-100", place, split="test")
    labels = np.column_stack([data.coarse.values, data.y.values]).astype(np.uint8)
    binary = np.column_stack([labels, data.x.values.reshape(10_000, 3072)])
    assert (
        hashlib.sha1(binary.tobytes(), usedforsecurity=False).hexdigest() == "8fb6623e830365ff53cf14adec797474f5478006"
    )
    fed = partition.domains(data, clients_per_domain=4)
    assert fed.sizes["sample"] == 5000
    assert fed.y.max() == 9
    orchard = data.y.attrs["names"].index("apple")
    assert np.unique(fed.client[fed.y_true == orchard]).tolist() == [4, 5, 6, 7]  # Fruits & Foods


def test_a_missing_split_says_so(place):
    with pytest.raises(FileNotFoundError, match=r"CIFAR-100 needs train, not found in .*cifar-100-python.*toronto"):
        load("cifar-100", place)


def test_shakespeare_has_leafs_roles_and_samples(place):
    text = gzip.decompress((place / "shakespeare/t8.shakespeare.txt.gz").read_bytes()).decode()
    long = {role: said for role, said in extract_roles(text).items() if len(said) > 80}
    assert len(long) == 1130
    assert sum(len(said) - 80 for said in long.values()) == 4_226_206


@pytest.mark.slow  # 5 s: both texts whole
def test_shakespeare_cut_and_split_here_is_leafs_sample(place):
    leaf = partition.natural(load("shakespeare-leaf", place))
    text = load("shakespeare", place)
    sampled = set(leaf.client.attrs["names"])
    here = np.isin(np.array(text.user.attrs["names"], dtype=object)[text.user.values], list(sampled))
    fed = partition.natural(text.isel(sample=np.flatnonzero(here)))
    fed = partition.train_test(fed, test=0.2, in_order=True, gap=79)
    assert len(sampled) == 37
    assert fed.client.attrs["names"] == leaf.client.attrs["names"]
    for split, size in (("train", 144_545), ("test", 33_231)):
        ours, theirs = (d.isel(sample=np.flatnonzero(d.split == split)).sortby("client") for d in (fed, leaf))
        assert ours.sizes["sample"] == size
        np.testing.assert_array_equal(ours.client, theirs.client)
        np.testing.assert_array_equal(ours.x, theirs.x)
        np.testing.assert_array_equal(ours.y, theirs.y)


def test_ag_news_rows_are_those_of_the_file(place):
    data = load("ag-news", place, split="test")
    with (place / "ag_news_csv/test.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert data.y.values.tolist() == [int(row[0]) - 1 for row in rows]
    assert np.bincount(data.y).tolist() == [1900] * 4
    vocabulary = data.x.attrs["vocabulary"]
    first = [vocabulary[i] for i in data.x.values[0] if i]
    assert " ".join(first).startswith("fears for t n pension after talks unions representing workers")
    assert not (data.x == 1).any()  # the vocabulary is of these very rows
    with pytest.warns(UserWarning, match="581 rows, but 120,000"):
        train = load("ag-news", place, split="train")
    again = load("ag-news", place, split="test", vocabulary=train.x.attrs["vocabulary"][2:])
    assert (again.x == 1).any()
    assert again.x.attrs["vocabulary"] == train.x.attrs["vocabulary"]
