"""The papers' partitions, on the digits and on labels made up; proportions in expectation, errors, the picture."""

import matplotlib
import numpy as np
import pytest
import xarray as xr
from scipy.stats import chi2, multinomial

from fedstat.data import load, partition

matplotlib.use("Agg")

DIGITS = load("digits")


def counts_of(fed, clients=None):
    counts = np.zeros((clients or int(fed.client.max()) + 1, int(fed.y.max()) + 1), dtype=int)
    np.add.at(counts, (fed.client.values, fed.y.values), 1)
    return counts


def labels(*sizes, test=0):
    y = np.repeat(np.arange(len(sizes)), sizes)
    split = np.where(np.arange(len(y)) % 10 < test, "test", "train").astype(object)
    return xr.Dataset({"x": ("sample", np.arange(len(y))), "y": ("sample", y)}, coords={"split": ("sample", split)})


def test_one_class_cuts_each_digit_into_ten_clients_in_order():
    counts = counts_of(partition.one_class(DIGITS, clients=100))
    np.testing.assert_array_equal(counts.argmax(axis=1), np.repeat(np.arange(10), 10))
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert set(counts.max(axis=1)) == {17, 18, 19}
    odd = counts_of(partition.one_class(DIGITS, clients=12))
    np.testing.assert_array_equal(odd.argmax(axis=1), [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_iid_classes_are_as_random_as_a_multinomial():
    # Pearson's statistic of class by client is chi-squared with (10 - 1)(20 - 1) degrees of freedom
    statistic = []
    for seed in range(60):
        counts = counts_of(partition.iid(DIGITS, clients=20, seed=seed))
        expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
        statistic.append(((counts - expected) ** 2 / expected).sum())
    assert chi2(60 * 171).ppf(0.001) < sum(statistic) < chi2(60 * 171).ppf(0.999)


@pytest.mark.parametrize("concentration", [0.1, 1.0, 100.0])
def test_dirichlet_proportions_have_the_mean_and_variance_of_the_distribution(concentration):
    data, clients = labels(2000, 1000, 500), 8
    shares = np.concatenate(
        [
            counts_of(partition.dirichlet(data, clients=clients, concentration=concentration, below="move", seed=s)).T
            / [[2000], [1000], [500]]
            for s in range(300)
        ]
    )
    variance = (1 / clients) * (1 - 1 / clients) / (clients * concentration + 1)
    error = np.sqrt(variance / len(shares))
    assert abs(shares.mean(axis=0) - 1 / clients).max() < 4.5 * error
    np.testing.assert_allclose(shares.var(axis=0).mean(), variance, rtol=0.1)


def test_dirichlet_redraws_until_no_client_is_small_or_says_it_cannot():
    fed = partition.dirichlet(DIGITS, clients=10, concentration=0.5, min_samples=60)
    assert counts_of(fed).sum(axis=1).min() >= 60
    assert fed.attrs["moved"] == 0
    with pytest.raises(ValueError, match=r"No draw of 1000 gave all 100 clients min_samples=17 .*below='move'"):
        partition.dirichlet(DIGITS, clients=100, concentration=0.1, min_samples=17)
    moved = partition.dirichlet(DIGITS, clients=100, concentration=0.1, min_samples=17, below="move")
    assert counts_of(moved).sum(axis=1).min() == 17
    assert moved.attrs["moved"] > 100


def test_dirichlet_equal_is_feddecomps_setting():
    data = labels(*[6000] * 10, test=2)
    fed = partition.dirichlet_equal(data, clients=40, concentration=1.0)
    train, test = (counts_of(fed.isel(sample=np.flatnonzero(fed.split == s)), 40) for s in ("train", "test"))
    assert set(train.sum(axis=1)) == {500}
    assert set(test.sum(axis=1)) == {100}
    assert abs(train / 5 - test).max() < 1  # the same distribution, as near as whole samples allow
    assert fed.attrs["moved"] == 0


def test_dirichlet_equal_has_proportions_right_in_expectation():
    data = labels(*[600] * 5)
    draws = [
        counts_of(partition.dirichlet_equal(data, clients=6, concentration=0.7, n_train=50, n_test=0, seed=s), 6) / 50
        for s in range(200)
    ]
    share = np.concatenate(draws)
    variance = 0.2 * 0.8 / (5 * 0.7 + 1)
    assert abs(share.mean(axis=0) - 0.2).max() < 4.5 * np.sqrt(variance / len(share))
    np.testing.assert_allclose(share.var(axis=0).mean(), variance, rtol=0.1)


def test_dirichlet_equal_warns_where_a_class_ran_out():
    data = labels(100, 10)
    with pytest.warns(UserWarning, match="samples were drawn from other classes because a class ran out"):
        fed = partition.dirichlet_equal(data, clients=11, concentration=50.0, n_train=10, n_test=0)
    assert fed.sizes["sample"] == 110
    assert 30 < fed.attrs["moved"] < 60
    with pytest.raises(ValueError, match="12 clients of 10 train samples need 120, but got 110"):
        partition.dirichlet_equal(data, clients=12, concentration=1.0, n_train=10, n_test=0)
    with pytest.raises(ValueError, match=r"100 test samples need 200, but got 0.*n_test=0"):
        partition.dirichlet_equal(data, clients=2, concentration=1.0, n_train=10)


def test_pathological_unequal_divides_in_different_parts():
    counts = counts_of(partition.pathological(DIGITS, clients=50, classes_per_client=2, sizes="unequal"))
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert counts.sum(axis=1).max() > 2 * counts.sum(axis=1).min()


def test_natural_keeps_names_and_drops_small_clients():
    data = labels(6, 4).assign_coords(role=("sample", [0, 2, 2, 1, 2, 2, 0, 2, 2, 1], {"names": ["A", "B", "C"]}))
    fed = partition.natural(data, by="role", min_samples=2)
    assert fed.client.attrs["names"] == ["A", "B", "C"]
    assert "left_out" not in fed.attrs
    with pytest.warns(
        UserWarning, match=r"^2 of 3 clients with fewer than 3 samples were left out, of 4 samples in all"
    ):
        fed = partition.natural(data, by="role", min_samples=3)
    assert fed.attrs["left_out"].endswith("4 samples in all: A, B")
    assert (fed.client.attrs["names"], fed.sizes["sample"], set(fed.client.values)) == (["C"], 6, {0})


def test_domains_divide_the_classes_and_number_the_labels_anew():
    fed = partition.domains(DIGITS, groups={"low": [0, 1, 2], "high": ["7", "9"]}, by="y", clients_per_domain=3)
    assert np.unique(fed.y_true).tolist() == [0, 1, 2, 7, 9]
    high = fed.client >= 3
    assert np.unique(fed.y_true[high]).tolist() == [7, 9]
    np.testing.assert_array_equal(fed.y[high], (fed.y_true[high] == 9).astype(int))
    assert fed.domain.attrs["names"] == ["low", "high"]
    np.testing.assert_array_equal(fed.domain, high)
    assert np.ptp(np.bincount(fed.client[high])[3:]) <= 1
    both = partition.permute_labels(fed)
    np.testing.assert_array_equal(both.y_true, fed.y_true)  # the label as it was at first


def test_time_split_leaves_a_gap_and_drops_short_clients():
    data = labels(20, 4).assign_coords(user=("sample", [0] * 20 + [1] * 4))
    says = "^1 of 2 clients with too few samples for every subset was left out, of 4 samples in all: 1.$"
    with pytest.warns(UserWarning, match=says):
        fed = partition.train_test(partition.natural(data), test=0.4, in_order=True, gap=3, short="drop")
    assert fed.x[fed.split == "train"].values.tolist() == list(range(12))
    assert fed.x[fed.split == "test"].values.tolist() == [15, 16, 17, 18, 19]
    with pytest.warns(UserWarning, match=says):
        three = partition.train_test(
            partition.natural(data), test=0.3, validation=0.3, in_order=True, gap=2, short="drop"
        )
    found = {s: three.x[three.split == s].values.tolist() for s in ("train", "validation", "test")}
    assert found == {"train": list(range(8)), "validation": [10, 11, 12, 13], "test": [16, 17, 18, 19]}


def test_deal_is_uniform_over_the_samples_of_a_class():
    y, counts = np.zeros(6, dtype=int), np.array([[1, 2]])
    rng = np.random.default_rng(0)
    held = np.array([partition.deal(y, counts, rng) for _ in range(6000)])
    for client, expected in ((0, 1 / 6), (1, 2 / 6), (-1, 3 / 6)):
        rate = (held == client).mean(axis=0)
        assert abs(rate - expected).max() < 4.5 * np.sqrt(expected * (1 - expected) / 6000)
    assert multinomial.pmf((held == 0).sum(axis=0), 6000, [1 / 6] * 6) > 0


def test_a_client_goes_without_a_class_only_when_no_sample_of_it_is_left():
    rng = np.random.default_rng(0)
    for _ in range(200):
        proportion, supply = rng.dirichlet(np.ones(4), size=5), rng.integers(0, 8, size=4)
        counts, moved = partition.draw_equal(proportion, n := int(supply.sum()) // 5, supply)
        ideal = partition.apportion(np.full(5, n), proportion)
        assert (counts.sum(axis=1) == n).all()
        assert ((counts >= ideal) | (counts.cumsum(axis=0) == supply)).all()
        assert moved == np.maximum(counts - ideal, 0).sum()
    # The last sample of another class of the client's comes before those of classes that it has no share of.
    assert partition.draw_equal(np.array([[0.6, 0.4, 0]]), 10, np.array([5, 5, 90]))[0].tolist() == [[5, 5, 0]]


def equal(**options):
    settings = {"clients": 9, "concentration": 1.0, "n_train": 5, "n_test": 0} | options
    return partition.dirichlet_equal(DIGITS, **settings)


@pytest.mark.parametrize("test", [0.1, 0.2, 1 / 3])
@pytest.mark.parametrize("validation", [0.0, 0.15])
def test_stratified_samples_have_the_class_proportions_of_the_client(test, validation):
    fed = partition.dirichlet(DIGITS, clients=12, concentration=0.5, min_samples=20)
    plain, found = (
        partition.train_test(fed, test=test, validation=validation, stratify=how, seed=3) for how in (False, True)
    )
    counts = {
        name: counts_of(found.isel(sample=np.flatnonzero(found.split == name)), 12)
        for name in np.unique(found.split).tolist()
    }
    for name in counts:
        sizes = [np.bincount(some.client[some.split == name], minlength=12).tolist() for some in (plain, found)]
        assert sizes[0] == sizes[1], "the numbers of samples do not depend on stratify"
    total, n = counts_of(found, 12), counts_of(found, 12).sum(1, keepdims=True)
    assert abs(counts["test"] - total * counts["test"].sum(1, keepdims=True) / n).max() < 1
    rest = total - counts["test"]
    if validation:
        n_validation = counts["validation"].sum(1, keepdims=True)
        assert abs(counts["validation"] - rest * n_validation / rest.sum(1, keepdims=True)).max() < 1


def test_stratified_samples_are_drawn_at_random():
    fed = partition.iid(labels(6, 3, 1), clients=1)
    often = np.mean(
        [partition.train_test(fed, test=0.3, stratify=True, seed=s).split.values == "test" for s in range(900)], axis=0
    )
    np.testing.assert_allclose(often, 0.3, atol=5 * np.sqrt(0.3 * 0.7 / 900))
    with pytest.raises(ValueError, match=r"these are too small: client 0 \(of 1 sample\), client 1"):
        partition.train_test(partition.iid(labels(1, 1), clients=2), test=0.5, stratify=True)


def test_samples_are_dealt_in_the_proportions_of_samples_that_clients_hold():
    rows = np.random.default_rng(0).permutation(1797)
    train, test = (DIGITS.isel(sample=np.sort(part)) for part in (rows[:1400], rows[1400:]))
    for fed in (
        partition.iid(train, clients=30),
        partition.dirichlet(train, clients=12, concentration=0.3),
        partition.one_class(train, clients=20),
        partition.pathological(train, clients=15, classes_per_client=2),
    ):
        found = partition.deal_like(test, fed, seed=1)
        clients = int(fed.client.max()) + 1
        held, got = counts_of(fed, clients), counts_of(found, clients)
        expected = got.sum(0) * held / held.sum(0)
        assert got.sum() == 397
        assert abs(got - expected).max() < 1
        assert abs(got.sum(1) - expected.sum(1)).max() <= 1
        assert not found.client.equals(partition.deal_like(test, fed, seed=2).client)
        assert found.client.equals(partition.deal_like(test, fed, seed=1).client)


ERRORS = [
    (lambda: partition.deal_like(DIGITS, DIGITS), r"must have a coordinate client .*partition\.iid"),
    (
        lambda: partition.deal_like(labels(0, 3), partition.iid(labels(3), clients=2)),
        "fed must hold classes of data, but has none",
    ),
    (
        lambda: partition.train_test(partition.iid(DIGITS, clients=9), in_order=True, stratify=True),
        "^stratify has no effect with in_order=True",
    ),
    (lambda: partition.iid(DIGITS, clients=0), "clients must be an integer from 1 to 1797, but got 0"),
    (lambda: partition.iid(DIGITS, clients=1798), "from 1 to 1797, but got 1798"),
    (lambda: partition.one_class(DIGITS, clients=9), "from 10 to 1797, but got 9"),
    (lambda: partition.one_class(labels(3, 50), clients=8), "class 0 has 3 samples, but needs one for each of 4"),
    (lambda: partition.pathological(DIGITS, clients=4, classes_per_client=2), "clients must be an integer >= 5"),
    (lambda: partition.pathological(DIGITS, clients=4, classes_per_client=11), "from 1 to 10, but got 11"),
    (lambda: partition.pathological(DIGITS, clients=9, classes_per_client=2, sizes="odd"), "sizes must be one of"),
    (lambda: partition.dirichlet(DIGITS, clients=9, concentration=0.0), r"concentration must be .* in \(0"),
    (lambda: partition.dirichlet(DIGITS, clients=900, concentration=1.0, min_samples=2), "at most the 1797 samples"),
    (lambda: partition.dirichlet(DIGITS, clients=9, concentration=1.0, below="drop"), "below must be one of"),
    (lambda: partition.natural(DIGITS), "by must be a coordinate of the samples, but got 'user'"),
    (lambda: partition.natural(DIGITS, by="split", min_samples=1798), "min_samples must be at most 1797"),
    (lambda: partition.domains(DIGITS), "by must be a variable of the samples, but got 'coarse'"),
    (lambda: partition.domains(DIGITS, groups={"a": [1, 77]}, by="y"), "'a': no sample has 77"),
    (lambda: partition.domains(labels(9, 0, 9), groups={"a": [0, 1]}, by="y"), "'a': no sample has 1"),
    (lambda: partition.domains(DIGITS, groups={"a": [1], "b": [1]}, by="y"), "'b': it shares values"),
    (lambda: partition.domains(labels(3), groups={"a": [0]}, by="y"), "at least 4 samples, one per client, but got 3"),
    (lambda: partition.train_test(DIGITS), r"must have a coordinate client .*partition\.iid"),
    (lambda: partition.train_test(partition.iid(DIGITS, clients=9), test=1.0), r"test must be .* in \[0, 1\)"),
    (lambda: partition.train_test(partition.iid(DIGITS, clients=9), test=0.5, validation=0.5), "validation must be"),
    (lambda: partition.train_test(partition.iid(DIGITS, clients=9), gap=1), "gap must be an integer from 0 to 0"),
    (
        lambda: partition.train_test(partition.iid(DIGITS, clients=1000)),
        r"these are too small: client \d+ \(of 1 sample\), .* and 200 more\..*min_samples",
    ),
    (lambda: partition.hold_out(partition.iid(DIGITS, clients=1)), "leave clients to train, but got 0.1 of 1"),
    (lambda: partition.hold_out(partition.iid(DIGITS, clients=9), fraction=0.0), r"fraction must be .* in \(0, 1\)"),
    (lambda: partition.one_class(DIGITS, clients=1798), "from 10 to 1797, but got 1798"),
    (
        lambda: partition.pathological(DIGITS, clients=4, classes_per_client=0),
        "^classes_per_client must be an integer from 1 to 10",
    ),
    (lambda: partition.dirichlet(DIGITS, clients=0, concentration=1.0), "^clients must be an integer >= 1"),
    (
        lambda: partition.dirichlet(DIGITS, clients=9, concentration=1.0, min_samples=0),
        "^min_samples must be an integer >= 1",
    ),
    (lambda: partition.natural(DIGITS, by="split", min_samples=0), "^min_samples must be an integer >= 1"),
    (lambda: partition.domains(DIGITS, clients_per_domain=0), "^clients_per_domain must be an integer >= 1"),
    (lambda: equal(clients=0), "^clients must be an integer >= 1"),
    (lambda: equal(n_train=0), "^n_train must be an integer >= 1"),
    (lambda: equal(n_test=-1), "^n_test must be an integer >= 0"),
    (lambda: equal(concentration=0.0), "^concentration must be a finite number"),
    (lambda: partition.train_test(partition.iid(DIGITS, clients=9), test=-0.1), "^test must be a finite number"),
    (
        lambda: partition.train_test(partition.iid(DIGITS, clients=9), validation=-0.1),
        "^validation must be a finite number",
    ),
    (
        lambda: partition.train_test(partition.iid(DIGITS, clients=9), gap=-1, in_order=True),
        "^gap must be an integer >= 0",
    ),
    (lambda: partition.hold_out(partition.iid(DIGITS, clients=9), fraction=1.0), "^fraction must be a finite number"),
    (lambda: partition.limit(partition.iid(DIGITS, clients=9), samples=0), "^samples must be an integer >= 1"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors_say_what_was_wrong_and_what_was_seen(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_seeds_differ():
    for call in (partition.iid, partition.one_class):
        assert not call(DIGITS, clients=20, seed=1).client.equals(call(DIGITS, clients=20, seed=2).client)


def test_picture_has_a_dot_for_each_class_of_each_client_with_area_by_number():
    from fedstat.plot import client_plots as picture

    fed = partition.dirichlet(DIGITS, clients=6, concentration=0.5)
    ax = picture.partition(fed)
    counts = counts_of(fed)
    dots = ax.collections[0]
    at = dots.get_offsets().data.astype(int)
    assert len(at) == (counts > 0).sum()
    drawn = counts[at[:, 1], at[:, 0]]
    assert np.corrcoef(drawn, dots.get_sizes())[0, 1] > 0.999
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("class", "client")
    split = partition.train_test(fed, test=0.2, short="drop")
    assert picture.partition(split, split="test", ax=ax) is ax
    with pytest.raises(ValueError, match=r"split must be one of .*'test', 'train'.*but got 'tset'"):
        picture.partition(split, split="tset")
    with pytest.raises(ValueError, match="Partition it first"):
        picture.partition(DIGITS)
    matplotlib.pyplot.close("all")


def test_clients_with_names_are_drawn_from_streams_of_their_names():
    digits = load("digits").isel(sample=slice(0, 90))
    fed = digits.assign_coords(client=("sample", np.repeat(["b", "a", "c"], 30)))
    limited = partition.limit(fed, samples=7, seed=1)
    alone = partition.limit(fed.isel(sample=fed["client"].values == "a"), samples=7, seed=1)
    np.testing.assert_array_equal(limited.x[limited["client"].values == "a"], alone.x)
    assert np.unique(limited["client"], return_counts=True)[1].tolist() == [7, 7, 7]
    table = partition.label_table(partition.permute_labels(fed, seed=1))
    assert table["client"].values.tolist() == ["a", "b", "c"]
    assert len({tuple(row) for row in table.values}) == 3
