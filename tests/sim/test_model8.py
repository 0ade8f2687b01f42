"""Model (8): the draws have the stated distributions, the truth explains the data, and seeds mean what they say."""

import json

import numpy as np
import pytest
import xarray as xr
from scipy import stats
from threadpoolctl import threadpool_limits

from fedstat.sim import OneClassWarning, generate
from fedstat.sim.model8 import Model8, truth

SMALL = {"clients": 4, "d": 10, "m": 20, "n_train": 6, "n_test": 5}


@pytest.fixture(scope="module")
def data():
    return generate(clients=60, d=30, m=40, p=0.3, alpha=0.4, n_train=150, n_test=50, seed=3)


def parts(ds):
    return ds.feature_shared.values, ds.unit_shared.values


def within(x, mean, se, z=4.5):
    """Every estimate lies within z standard errors: chance of a false alarm below 1e-3 for up to 150 estimates."""
    assert np.abs((np.asarray(x) - mean) / se).max() < z


def test_covariates_have_the_mean_and_covariance_of_the_model(data):
    shared, _ = parts(data)
    n = data.x.sizes["client"] * data.x.sizes["sample"]
    centred = (data.x - data.x_mean).values.reshape(n, -1)
    within(centred.mean(axis=0), 0, 1 / np.sqrt(n))
    index = np.arange((~shared).sum())
    sigma = np.eye(len(shared))
    sigma[np.ix_(~shared, ~shared)] = 0.5 ** np.abs(index[:, None] - index)
    # Var(s_ij) = (σ_ii σ_jj + σ_ij²) / n for normal data
    within(centred.T @ centred / n, sigma, np.sqrt((1 + sigma**2) / n), z=5)
    for j in (0, 7, -1):
        assert stats.kstest(centred[:, j], "norm").pvalue > 1e-4
    assert (data.x_mean.values[:, shared] == 0).all()
    assert stats.kstest(data.x_mean.values[:, ~shared].ravel(), "norm").pvalue > 1e-4


def test_weights_have_the_distributions_of_the_model(data):
    f, u = parts(data)
    w = data.w.values
    personal = w[:, ~u]
    assert stats.kstest((personal - data.w_mean.values[:, None])[..., ~f].ravel(), "norm").pvalue > 1e-4
    assert stats.kstest(personal[..., f].ravel(), stats.uniform(-0.1, 0.2).cdf).pvalue > 1e-4
    assert stats.kstest(w[0][u][:, f].ravel(), stats.uniform(-1, 2).cdf).pvalue > 1e-4
    assert stats.kstest(w[0][u][:, ~f].ravel(), stats.uniform(-0.1, 0.2).cdf).pvalue > 1e-4
    assert stats.kstest(data.w_mean.values[:, ~f].ravel(), "norm").pvalue > 1e-4
    for block, bound in ((w[0][u][:, ~f], 0.1), (w[0][u][:, f], 1.0), (personal[..., f], 0.1)):
        assert 0.95 * bound < np.abs(block).max() <= bound
    with pytest.warns(OneClassWarning):  # one sample is of one class
        a = generate(clients=1, d=2, m=5000, n_train=1, n_test=0).a.values
    assert stats.kstest(a, "norm").pvalue > 1e-4


def test_personal_neurons_of_a_client_share_a_mean_and_shared_neurons_are_common(data):
    f, u = parts(data)
    assert (data.w.values[:, u] == data.w.values[:1, u]).all()
    pair = data.w.values[:, ~u][:, :2, ~f]
    correlation = np.corrcoef(pair[:, 0].ravel(), pair[:, 1].ravel())[0, 1]
    n = pair[:, 0].size
    assert abs(np.arctanh(correlation) - np.arctanh(0.5)) < 4.5 / np.sqrt(n - 3)


def test_means_are_drawn_apart_by_default_and_are_one_in_the_literal_model(data):
    f, _ = parts(data)
    a, b = data.x_mean.values[:, ~f].ravel(), data.w_mean.values[:, ~f].ravel()
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)
    literal = list(truth(Model8(clients=3, d=10, m=4, means="shared")))
    assert all((client.x_mean == client.w_mean).all() for client in literal)
    apart = list(truth(Model8(clients=3, d=10, m=4)))
    assert all((one.x_mean == other.x_mean).all() for one, other in zip(literal, apart, strict=True))


def test_truth_reproduces_h_by_equation_8(data):
    c, f = 5, data.feature_shared.values
    x, w = data.x.values[c], data.w.values[c]
    personal, shared = np.flatnonzero(~data.unit_shared.values), np.flatnonzero(data.unit_shared.values)
    h = np.zeros(len(x))
    for q in [*personal, *shared]:
        h += data.a.values[q] * np.maximum(0, x[:, ~f] @ w[q, ~f] + x[:, f] @ w[q, f])
    np.testing.assert_allclose(h, data.h.values[c], rtol=0, atol=1e-10)


def test_labels_are_the_sign_of_h_without_noise():
    data = generate(**SMALL, sigma=0)
    np.testing.assert_array_equal(data.y, data.h > 0)


def test_noise_turns_labels_as_often_as_a_normal_distribution_says(data):
    noisy = generate(clients=60, d=30, m=40, p=0.3, alpha=0.4, n_train=150, n_test=50, seed=3, sigma=10)
    xr.testing.assert_identical(noisy.h, data.h)
    chance = stats.norm.cdf(-np.abs(data.h.values) / 10)
    turned = (noisy.y != (data.h > 0)).values
    assert chance.mean() > 0.05
    assert abs(turned.sum() - chance.sum()) < 4 * np.sqrt((chance * (1 - chance)).sum())


def test_equal_seeds_draw_bit_equal_data_whatever_the_number_of_threads():
    here, again = (generate(clients=3, n_train=50, n_test=50) for _ in range(2))
    xr.testing.assert_identical(here, again)
    with threadpool_limits(2):
        xr.testing.assert_identical(generate(clients=3, n_train=50, n_test=50)[[*"xywa"]], here[[*"xywa"]])


def test_another_seed_draws_other_data():
    one, other = generate(**SMALL, seed=1), generate(**SMALL, seed=2)
    assert not any((one[v] == other[v]).any() for v in "xwah")


def test_a_client_does_not_depend_on_how_many_others_there_are():
    few, many = generate(**SMALL), generate(**{**SMALL, "clients": 9})
    xr.testing.assert_equal(few, many.isel(client=slice(4)))


def test_more_training_or_test_samples_leave_the_others_as_they_were():
    base, longer = generate(**SMALL), generate(**{**SMALL, "n_train": 11, "n_test": 8})
    for name, n in (("train", 6), ("test", 5)):
        mine, theirs = (ds.sel(sample=ds.split == name).isel(sample=slice(n)) for ds in (base, longer))
        # h to rounding: BLAS may add up a longer matrix in another order
        xr.testing.assert_equal(mine.drop_vars("h"), theirs.drop_vars("h"))
        xr.testing.assert_allclose(mine.h, theirs.h, rtol=1e-12)


def test_data_set_is_labelled_as_stated(data):
    assert dict(data.sizes) == {"client": 60, "sample": 200, "feature": 30, "unit": 40}
    assert data.x.dtype == data.w.dtype == np.float64
    assert data.y.dtype == np.int64
    assert data.split.values.tolist() == ["train"] * 150 + ["test"] * 50
    assert int(data.unit_shared.sum()) == 12
    assert int(data.feature_shared.sum()) == 12
    config = json.loads(data.attrs["config"])
    again = generate(**config)
    xr.testing.assert_identical(again, data)
    ones = data.y.values.mean(axis=1)
    assert data.attrs["majority_share"] == pytest.approx(np.maximum(ones, 1 - ones).mean())
    assert "model (8)" in data.attrs["source"]
    assert data.attrs["seed"] == 3


def test_data_set_survives_zarr(tmp_path, data):
    data.to_zarr(tmp_path / "data.zarr", consolidated=False)
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "data.zarr", engine="zarr", consolidated=False), data)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_majority_share_at_paper_size_is_moderate_with_independent_means(p):
    shares = [generate(p=p, n_train=100, n_test=0, seed=seed).attrs["majority_share"] for seed in range(3)]
    assert 0.65 < min(shares) <= max(shares) < 0.90


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_one_mean_for_weights_and_covariates_makes_clients_one_class_and_warns(p):
    with pytest.warns(OneClassWarning, match=r"^in \d+% of the clients .* Use means=\"independent\""):
        data = generate(p=p, n_train=100, n_test=0, means="shared")
    assert 0.90 < data.attrs["majority_share"] <= 1
    assert data.attrs["one_class_share"] > 0.5


@pytest.mark.parametrize(("p", "alpha", "units", "features"), [(0, 0, 0, 0), (1, 1, 20, 10), (0.125, 0.25, 2, 2)])
def test_empty_groups_are_models_and_halves_round_to_even(p, alpha, units, features):
    data = generate(**{**SMALL, "n_train": 40}, p=p, alpha=alpha)
    assert int(data.unit_shared.sum()) == units
    assert int(data.feature_shared.sum()) == features
    assert bool(np.isfinite(data.h).all())
    assert data.h.values.std() > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 0}, "clients must be"),
        ({"d": 2.5}, "d must be"),
        ({"m": -1}, "m must be"),
        ({"p": 1.2}, "p must be"),
        ({"alpha": float("nan")}, "alpha must be"),
        ({"n_train": 0}, "n_train must be"),
        ({"n_test": -1}, "n_test must be"),
        ({"sigma": -1.0}, "sigma must be"),
        ({"means": "same"}, "means must be"),
        ({"seed": -3}, "seed must be"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(wrong, message):
    with pytest.raises(ValueError, match=f"{message}.*but got"):
        generate(**{**SMALL, **wrong})
