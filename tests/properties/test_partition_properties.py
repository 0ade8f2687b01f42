"""What every partition promises, for any labels, number of clients and seed."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstat.data import partition


def labelled(y, n_test=0):
    split = np.array(["train"] * (len(y) - n_test) + ["test"] * n_test, dtype=object)
    return xr.Dataset(
        {"x": (("sample", "feature"), np.arange(len(y) * 2).reshape(-1, 2)), "y": ("sample", np.asarray(y))},
        coords={"split": ("sample", split), "user": ("sample", np.arange(len(y)) % 7)},
    )


@st.composite
def data_sets(draw):
    """Labels of 1 to 6 classes, at least 12 samples each, in any order."""
    sizes = draw(st.lists(st.integers(12, 60), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return labelled(rng.permutation(np.repeat(10 * np.arange(len(sizes)), sizes)))


PARTITIONS = {
    "iid": lambda d, seed: partition.iid(d, clients=9, seed=seed),
    "one_class": lambda d, seed: partition.one_class(d, clients=12, seed=seed),
    "pathological": lambda d, seed: partition.pathological(
        d, clients=12, classes_per_client=min(2, len(np.unique(d.y))), seed=seed
    ),
    "pathological, unequal": lambda d, seed: partition.pathological(
        d, clients=12, classes_per_client=1, sizes="unequal", seed=seed
    ),
    "dirichlet": lambda d, seed: partition.dirichlet(d, clients=5, concentration=1.0, seed=seed),
    "dirichlet, moved": lambda d, seed: partition.dirichlet(
        d, clients=6, concentration=0.05, min_samples=2, below="move", seed=seed
    ),
    "natural": lambda d, _: partition.natural(d),
}


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=15, deadline=None)
@given(data=data_sets(), seed=st.integers(0, 10_000))
def test_every_sample_is_used_once_no_client_is_empty_and_x_is_not_copied(name, data, seed):
    fed = PARTITIONS[name](data, seed)
    assert fed.sizes == data.sizes
    assert np.shares_memory(fed.x.values, data.x.values)
    np.testing.assert_array_equal(fed.y, data.y)
    np.testing.assert_array_equal(fed.split, data.split)
    clients = np.unique(fed.client)
    np.testing.assert_array_equal(clients, np.arange(len(clients)))
    assert np.bincount(fed.client).min() >= (2 if "moved" in name else 1)
    assert PARTITIONS[name](data, seed).identical(fed)
    assert "client" not in data.coords


@settings(max_examples=20, deadline=None)
@given(data=data_sets(), seed=st.integers(0, 10_000), clients=st.integers(1, 12))
def test_iid_sizes_differ_by_at_most_one(data, seed, clients):
    sizes = np.bincount(partition.iid(data, clients=clients, seed=seed).client, minlength=clients)
    assert np.ptp(sizes) <= 1


@settings(max_examples=20, deadline=None)
@given(data=data_sets(), seed=st.integers(0, 10_000), per=st.integers(1, 6), clients=st.integers(6, 12))
def test_pathological_clients_hold_exactly_s_classes_and_classes_equal_numbers_of_clients(data, seed, per, clients):
    classes, y = np.unique(data.y, return_inverse=True)
    per = min(per, len(classes))
    fed = partition.pathological(data, clients=clients, classes_per_client=per, seed=seed)
    counts = np.zeros((clients, len(classes)), dtype=int)
    np.add.at(counts, (fed.client.values, y), 1)
    assert ((counts > 0).sum(axis=1) == per).all()
    assert np.ptp((counts > 0).sum(axis=0)) <= 1
    held = np.where(counts > 0, counts, np.nan)
    assert (np.nanmax(held, axis=0) - np.nanmin(held, axis=0) <= 1).all()  # each class in equal parts


@settings(max_examples=20, deadline=None)
@given(
    data=data_sets(),
    seed=st.integers(0, 99),
    n_train=st.integers(1, 5),
    n_test=st.integers(0, 2),
    a=st.floats(0.01, 50),
)
@pytest.mark.filterwarnings("ignore:.*a class ran out")
def test_dirichlet_equal_gives_every_client_its_numbers_of_samples_used_at_most_once(data, seed, n_train, n_test, a):
    data = data.assign_coords(split=("sample", np.where(np.arange(data.sizes["sample"]) % 3, "train", "test")))
    n_train = min(n_train, int((data.split == "train").sum()) // 2)
    fed = partition.dirichlet_equal(data, clients=2, concentration=a, n_train=n_train, n_test=n_test, seed=seed)
    for split, n in (("train", n_train), ("test", n_test)):
        assert np.bincount(fed.client[fed.split == split], minlength=2).tolist() == [n, n]
    assert len(np.unique(fed.x[:, 0])) == fed.sizes["sample"] == 2 * (n_train + n_test)


@settings(max_examples=20, deadline=None)
@given(data=data_sets(), seed=st.integers(0, 99), test=st.floats(0.1, 0.5), validation=st.sampled_from([0.0, 0.3]))
def test_splits_within_clients_have_their_shares(data, seed, test, validation):
    fed = partition.iid(data, clients=1, seed=seed)
    fed = partition.train_test(fed, test=test, validation=validation, seed=seed)
    n = fed.sizes["sample"]
    found = {s: int((fed.split == s).sum()) for s in ("train", "validation", "test")}
    assert sum(found.values()) == n == data.sizes["sample"]
    assert abs(found["train"] - (1 - test - validation) * n) <= 1
    assert abs(found["validation"] - validation * n) <= 1
    assert abs(found["test"] - test * n) <= 2


@settings(max_examples=20, deadline=None)
@given(data=data_sets(), seed=st.integers(0, 99))
def test_permuted_labels_are_a_permutation_for_each_client(data, seed):
    fed = partition.iid(data, clients=4, seed=seed)
    permuted = partition.permute_labels(fed, seed=seed)
    np.testing.assert_array_equal(permuted.y_true, fed.y)
    for client in range(4):
        own = permuted.isel(sample=np.flatnonzero(permuted.client == client))
        pairs = set(zip(own.y_true.values.tolist(), own.y.values.tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    alone = partition.permute_labels(fed.isel(sample=np.flatnonzero(fed.client == 2)), seed=seed)
    if len(np.unique(alone.y_true)) == len(np.unique(fed.y)):  # the same classes: the same permutation
        np.testing.assert_array_equal(alone.y, permuted.y[fed.client == 2])


@settings(max_examples=20, deadline=None)
@given(data=data_sets(), seed=st.integers(0, 99), fraction=st.floats(0.05, 0.9))
def test_new_clients_are_whole_and_apart(data, seed, fraction):
    fed = partition.iid(data, clients=10, seed=seed)
    old, new = partition.hold_out(fed, fraction=fraction, seed=seed)
    assert not set(old.client.values) & set(new.client.values)
    assert old.sizes["sample"] + new.sizes["sample"] == fed.sizes["sample"]
    assert len(np.unique(new.client)) == max(1, round(10 * fraction))
