"""Nearest-neighbour entropy against R's FNN, closed forms, and what its standard error promises."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import digamma, gammaln
from scipy.stats import special_ortho_group

from fedstat.stats import entropy
from fedstat.stats.entropy import knn_entropy

GOLDEN = Path(__file__).parents[1] / "golden"
FNN = json.loads((GOLDEN / "entropy_fnn.json").read_text())
CASES = [(case["name"], k) for case in FNN["cases"] for k in range(1, 6)]
NORMAL = 0.5 * np.log(2 * np.pi * np.e)
CONTINUOUS = {
    "normal": (lambda rng, size: rng.normal(1.0, 2.0, size), NORMAL + np.log(2.0)),
    "uniform": (lambda rng, size: rng.uniform(-1.0, 2.0, size), np.log(3.0)),
    "exponential": (lambda rng, size: rng.exponential(0.5, size), 1 + np.log(0.5)),
}


def fnn_case(name):
    case = next(c for c in FNN["cases"] if c["name"] == name)
    return np.array(case["x"]), case["entropy"]


@pytest.mark.parametrize(("name", "k"), CASES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_equals_r_fnn_to_1e_10(name, k, kind):
    x, expected = fnn_case(name)
    x = torch.tensor(x) if kind == "torch" else x
    if expected[k - 1] is None:  # FNN gives -Inf
        with pytest.raises(ValueError, match="equal samples"):
            knn_entropy(x, k=k, feature_axis=1)
    else:
        result = knn_entropy(x, k=k, feature_axis=1)
        assert type(result.estimate) is type(x)
        np.testing.assert_allclose(float(result), expected[k - 1], rtol=0, atol=1e-10)


def test_table_of_distances_used_on_other_devices_equals_the_kd_tree(monkeypatch):
    x, _ = fnn_case("uniform, 5 features")
    monkeypatch.setattr(entropy, "_BLOCK", 997)  # several blocks of rows
    tree = knn_entropy(x, feature_axis=1)
    monkeypatch.setattr(entropy, "_on_cpu", lambda _: False)
    for points in (x, torch.tensor(x)):
        table = knn_entropy(points, feature_axis=1)
        np.testing.assert_allclose(table.estimate, tree.estimate, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [8, 50, 5000])
def test_sorted_windows_find_the_kth_neighbour_across_blocks(k, n, monkeypatch):
    monkeypatch.setattr(entropy, "_CACHED", 40)
    x = np.random.default_rng(n).normal(size=(n, 3))
    found = np.sort(entropy.distances(np, np.sort(x.T, axis=1), (k,))[0], axis=1)
    [columns] = entropy.distances(np, np.ascontiguousarray(x.T)[:, :, None], (k,))  # by KD-tree
    np.testing.assert_array_equal(found, np.sort(columns, axis=1))


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize(("n", "tolerance"), [(100, 0.02), (3000, 0.004)])
def test_bias_against_closed_forms_is_small_and_vanishes(name, n, tolerance):
    draw, truth = CONTINUOUS[name]
    estimate = knn_entropy(draw(np.random.default_rng(1), (n, 1000)), k=3).estimate
    assert abs(estimate.mean() - truth) < tolerance + 3 * estimate.std() / 1000**0.5


@pytest.mark.parametrize(("d", "bias"), [(2, 0.025), (3, 0.045), (5, 0.16)])
def test_normal_vectors_have_the_known_entropy_up_to_the_known_bias(d, bias):
    rng = np.random.default_rng(d)
    truth = d * (NORMAL + np.log(2.0))
    estimate = knn_entropy(rng.normal(0.0, 2.0, (40, 1000, d)), axis=1, feature_axis=2).estimate
    assert abs(estimate.mean() - truth) < bias + 3 * estimate.std() / 40**0.5


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize(("n", "k"), [(100, 1), (100, 3), (1000, 5)])
def test_standard_error_covers_the_truth_as_often_as_it_says(name, n, k):
    draw, truth = CONTINUOUS[name]
    result = knn_entropy(draw(np.random.default_rng(n + k), (n, 4000)), k=k)
    for factor, nominal in ((1.96, 0.95), (1.0, 0.6827)):
        covered = np.mean(abs(result.estimate - truth) < factor * result.std_error)
        assert abs(covered - nominal) < 0.03  # 4 simulation errors and more; bias and n = 100 take the rest
    spread = result.estimate.std() / np.sqrt(np.mean(result.std_error**2))
    assert abs(spread - 1) < 0.1


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize(("n", "k"), [(20, 1), (20, 3), (50, 3), (100, 10), (1000, 3)])
def test_intervals_cover_the_truth(name, n, k):
    draw, truth = CONTINUOUS[name]
    found = knn_entropy(draw(np.random.default_rng(n + k), (n, 1000)), k=k, level=0.95)
    low, estimate, high = (x[~found.clustered] for x in (found.conf_low, found.estimate, found.conf_high))
    assert len(low) >= 0.97 * 1000
    assert np.mean((low <= truth) & (truth <= high)) >= 0.94
    assert np.all((low < estimate) & (estimate < high))


@pytest.mark.parametrize("d", [2, 3])
def test_intervals_of_vectors_cover_where_the_bias_is_as_large_as_the_error(d):
    x = np.random.default_rng(d).normal(size=(300, 400, d))
    found = knn_entropy(x, axis=1, feature_axis=2, level=0.95)
    truth = d * NORMAL
    assert np.mean((found.conf_low <= truth) & (truth <= found.conf_high)) >= 0.93
    assert np.mean(abs(found.estimate - truth) < 1.96 * found.std_error) < 0.93


@pytest.mark.parametrize(
    ("n", "k", "d"), [(50, 10, 1), (17, 3, 1), (400, 21, 1), (1000, 4, 2), (11, 3, 3), (500, 1, 4)]
)
def test_no_interval_where_the_bias_is_not_known(n, k, d):
    assert k > entropy.largest_k(n, d)
    found = knn_entropy(np.random.default_rng(0).normal(size=(n, d)), k=k, feature_axis=1, level=0.95)
    assert np.isfinite(found.estimate)
    assert np.isnan([found.conf_low, found.conf_high, found.std_error]).all(), "no error without an interval"
    assert np.isfinite(knn_entropy(np.random.default_rng(0).normal(size=(n, d)), k=k, feature_axis=1).std_error)


def test_intervals_are_wider_at_a_higher_level_and_absent_without_one():
    x = np.random.default_rng(0).normal(size=(60, 4))
    wide, narrow, none = (knn_entropy(x, level=level) for level in (0.99, 0.8, None))
    assert np.all(wide.conf_low < narrow.conf_low)
    assert np.all(narrow.conf_high < wide.conf_high)
    assert np.isnan(none.conf_low).all()
    assert not knn_entropy(np.arange(20.0)).clustered


@pytest.mark.parametrize("d", [2, 3, 5])
@pytest.mark.parametrize("sizes", [1.0, 1e4, 1e-9])
def test_vectors_have_the_entropy_of_mahalanobis_distances_by_brute_force(d, sizes):
    rng = np.random.default_rng(d)
    x = rng.normal(size=(80, d)) @ rng.normal(size=(d, d)) * np.geomspace(1, sizes, d)
    covariance = np.cov(x, rowvar=False)
    apart = (x[:, None] - x)[:, :, None]
    distance = np.sort(np.sqrt((apart @ np.linalg.inv(covariance) @ np.swapaxes(apart, 2, 3))[..., 0, 0]), axis=1)[:, 3]
    ball = d / 2 * np.log(np.pi) - gammaln(d / 2 + 1)
    expected = digamma(80) - digamma(3) + ball + d * np.log(distance).mean() + np.linalg.slogdet(covariance)[1] / 2
    assert float(knn_entropy(x, feature_axis=1)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("scales", [(1, 1e4), (1, 1e-8), (1, 1, 1e3)])
def test_units_of_coordinates_do_not_matter(scales):
    x = np.random.default_rng(0).normal(size=(20, 100, len(scales)))
    plain, scaled = (knn_entropy(values, axis=1, feature_axis=2, level=0.95) for values in (x, x * scales))
    for name in ("estimate", "conf_low", "conf_high"):
        np.testing.assert_allclose(getattr(scaled, name), getattr(plain, name) + np.log(scales).sum(), atol=1e-8)


def test_coordinates_that_follow_from_others_are_refused_by_series():
    x = np.random.default_rng(0).normal(size=(3, 50, 3))
    x[1, :, 2] = x[1, :, 0] - 2 * x[1, :, 1]
    with pytest.raises(ValueError, match=r"linear function of the others in 1 of 3 series, first in series 1"):
        knn_entropy(x, axis=1, feature_axis=2)
    with pytest.raises(ValueError, match="5 samples of 8 coordinates"):
        knn_entropy(np.random.default_rng(0).normal(size=(5, 8)), feature_axis=1)


@pytest.mark.parametrize(("groups", "n", "k"), [(8, 20, 3), (20, 50, 3), (20, 100, 10)])
def test_samples_in_narrow_groups_get_no_interval_and_no_error(groups, n, k):
    rng = np.random.default_rng(n)
    x = rng.integers(0, groups, (n, 100)) + 1e-3 * rng.normal(size=(n, 100))
    found = knn_entropy(x, k=k, level=0.95)
    assert found.clustered.mean() > 0.8
    np.testing.assert_array_equal(np.isnan(found.conf_low), found.clustered)
    np.testing.assert_array_equal(np.isnan(found.std_error), found.clustered)


@pytest.mark.parametrize("d", [1, 2])
def test_copies_that_leave_distances_positive_are_counted_and_get_no_interval(d):
    x = np.random.default_rng(0).normal(size=(3, 60, d))
    x[1, 7] = x[1, 30]  # a pair
    x[2, 30:] = x[2, :30]  # each value twice
    for ties in ("error", "atoms"):
        found = knn_entropy(x, axis=1, feature_axis=2, ties=ties, level=0.95)
        assert found.n_tied.tolist() == [0, 2, 60]
        assert np.isnan(found.conf_low).tolist() == [False, True, True]
        assert np.isnan(found.conf_high).tolist() == [False, True, True]
    assert found.estimate[2] < d * NORMAL - 0.2, "what the count is for"


def test_atoms_are_no_ties():
    x = np.random.default_rng(0).normal(size=(60, 2))
    x[:10, 0], x[20:22, 0] = 0.0, 7.0
    found = knn_entropy(x, ties="atoms", level=0.95)
    assert found.n_tied.tolist() == [2, 0]
    x[21, 0] = 8.0
    clean = knn_entropy(x, ties="atoms", level=0.95)
    alone = knn_entropy(x[10:, 0], level=0.95)
    assert clean.n_tied.tolist() == [0, 0]
    np.testing.assert_allclose([clean.conf_low[0], clean.conf_high[0]], [alone.conf_low, alone.conf_high], rtol=1e-12)


def test_jitter_moves_pairs_too():
    x = np.random.default_rng(0).normal(size=(4000, 200)).round(3)[:200]
    assert (knn_entropy(x, ties="atoms").n_tied > 0).mean() > 0.9
    found = knn_entropy(x, ties="jitter", resolution=0.001, level=0.95)
    assert found.n_tied.max() == 0
    assert np.mean((found.conf_low <= NORMAL) & (found.conf_high >= NORMAL)) > 0.9


def test_neighbour_variance_is_what_its_simulation_found():
    record = json.loads((GOLDEN / "entropy_neighbour_variance.json").read_text())
    table = [[entropy.neighbour_variance(k, d) for k in range(1, 11)] for d in range(1, 7)]
    np.testing.assert_allclose(table, record["chi"], rtol=0, atol=5.1e-4)
    assert entropy.neighbour_variance(20, 1) == entropy.neighbour_variance(10, 1) / 2
    assert entropy.neighbour_variance(3, 9) == entropy.neighbour_variance(3, 6)


def test_atoms_are_set_apart_with_their_masses():
    x = np.random.default_rng(0).exponential(size=(100, 4))
    x[:30, 1] = 0.0  # a neuron dead for 30 clients
    x[:, 2] = 0.0  # dead for all
    x[:20, 3], x[50:54, 3] = 0.0, 7.0  # two atoms
    result = knn_entropy(x, ties="atoms")
    assert result.n.tolist() == [100, 70, 0, 76]
    np.testing.assert_array_equal(result.atom_mass, [[0, 0], [0.3, 0], [1, 0], [0.2, 0.04]])
    np.testing.assert_array_equal(result.atom_value, [[np.nan, np.nan], [0, np.nan], [0, np.nan], [0, 7]])
    alone = knn_entropy(x[30:, 1])
    assert result.estimate[1] == pytest.approx(float(alone), rel=1e-12)
    assert result.std_error[1] == pytest.approx(float(alone.std_error), rel=1e-12)
    assert np.isnan([result.estimate[2], result.std_error[2]]).all()
    assert result.estimate[0] == pytest.approx(float(knn_entropy(x[:, 0])), rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [None, 2])
@pytest.mark.parametrize("ties", ["atoms", "jitter"])
def test_cuda_equals_numpy(features, ties):
    x = np.random.default_rng(0).normal(size=(300, 4, 2))
    x[:40, 1] = 0.0
    options = {"ties": ties, "feature_axis": features} | ({"resolution": 0.1} if ties == "jitter" else {})
    here, there = knn_entropy(x, **options), knn_entropy(torch.tensor(x, device="cuda"), **options)
    for ours, cuda in zip(here, there, strict=True):
        assert cuda.device.type == "cuda"
        np.testing.assert_allclose(cuda.cpu(), ours, rtol=0, atol=1e-12)


def test_torch_on_the_cpu_equals_numpy_with_every_way_of_ties():
    """Of series with atoms, of copies, of narrow groups, and of neither."""
    x = np.random.default_rng(0).normal(size=(60, 4, 2))
    x[:9, 1] = 0.0
    x[30:, 2] = x[:30, 2]
    x[:, 3, 0] = np.arange(60) % 12 + 1e-3 * x[:, 3, 0]
    for options in ({"ties": "atoms"}, {"ties": "jitter", "resolution": 0.1}):
        for feature_axis in (None, 2):
            here = knn_entropy(x, feature_axis=feature_axis, level=0.95, **options)
            there = knn_entropy(torch.tensor(x), feature_axis=feature_axis, level=0.95, **options)
            assert options["ties"] == "jitter" or here.n_tied.any()
            assert feature_axis == 2 or here.clustered.any()
            for ours, tensor in zip(here, there, strict=True):
                assert isinstance(tensor, torch.Tensor)
                np.testing.assert_allclose(tensor, ours, rtol=0, atol=1e-12)


def test_atoms_of_vectors_are_whole_vectors():
    x = np.random.default_rng(0).normal(size=(2, 60, 3))
    x[0, :10, 0] = 0.0  # one coordinate alone is no tie
    x[1, :15] = [1.0, 2.0, 3.0]
    result = knn_entropy(x, axis=1, feature_axis=2, ties="atoms")
    np.testing.assert_array_equal(result.atom_mass, [[0.0], [0.25]])
    np.testing.assert_array_equal(result.atom_value[1, 0], [1.0, 2.0, 3.0])
    assert result.estimate[1] == pytest.approx(float(knn_entropy(x[1, 15:], feature_axis=1)), rel=1e-12)


def test_without_ties_all_three_ways_agree():
    x = np.random.default_rng(0).normal(size=(50, 3))
    strict = knn_entropy(x)
    for ties in ("atoms", "jitter"):
        other = knn_entropy(x, ties=ties)
        np.testing.assert_array_equal(other.estimate, strict.estimate)
        assert other.atom_mass.shape == (3, 0)


def test_ties_are_an_error_that_names_the_series_and_the_ways_out():
    x = np.random.default_rng(0).normal(size=(50, 3))
    x[:4, 1] = 0.0
    with pytest.raises(ValueError, match=r"more than k = 3 .* \(4 tied in 1 of 3 series, first in series 1\).*atoms"):
        knn_entropy(x)
    assert np.isfinite(knn_entropy(x, k=4).estimate).all()


def test_jitter_undoes_rounding():
    x = np.random.default_rng(0).normal(size=(20_000, 2))
    rounded = np.stack([np.round(x[:, 0], 1), x[:, 1]], axis=1)
    result = knn_entropy(rounded, ties="jitter", resolution=0.1, seed=3)
    assert abs(result.estimate[0] - NORMAL) < 3 * result.std_error[0]
    assert result.estimate[1] == pytest.approx(
        float(knn_entropy(x[:, 1])), rel=1e-12
    )  # a series without ties is left as it is
    again = knn_entropy(rounded[np.random.default_rng(1).permutation(20_000)], ties="jitter", resolution=0.1, seed=3)
    np.testing.assert_allclose(again.estimate, result.estimate, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ties": "jitter"}, "needs resolution"),
        ({"ties": "jitter", "resolution": 0.0}, r"resolution must be a finite number in \(0"),
        ({"ties": "jitter", "resolution": 1e-300}, "resolution must exceed the rounding"),
        ({"ties": "atom"}, "Did you mean 'atoms'"),
        ({"k": 0}, "k must be an integer >= 1, but got 0"),
        ({"k": 12}, "needs at least 13 samples, but got 12 on axis 0"),
        ({"axis": 2}, "axis must be an integer from -2 to 1"),
        ({"feature_axis": 0}, "must differ"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    x = np.ones((12, 2))
    with pytest.raises(ValueError, match=message):
        knn_entropy(x, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_an_error(bad):
    with pytest.raises(ValueError, match="x must be finite"):
        knn_entropy(np.array([0.0, 1.0, bad, 2.0, 4.0]))


def test_float32_is_computed_in_float64_and_shapes_follow_the_axes():
    x = np.random.default_rng(0).normal(size=(5, 40, 2, 3)).astype(np.float32)
    result = knn_entropy(x, axis=1, feature_axis=-1)
    assert result.estimate.shape == result.std_error.shape == result.n.shape == (5, 2)
    assert result.estimate.dtype == np.float64
    alone = float(knn_entropy(x[4, :, 1].astype(float), feature_axis=1))
    assert result.estimate[4, 1] == pytest.approx(alone, rel=1e-12)
    np.testing.assert_array_equal(np.asarray(result), result.estimate)


def test_one_nearest_neighbour_of_a_grid_is_exact():
    x = np.arange(10.0) * 0.5  # every distance is 0.5
    assert float(knn_entropy(x, k=1)) == pytest.approx(digamma(10) - digamma(1) + np.log(2) + np.log(0.5), abs=1e-14)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), d=st.integers(1, 3), k=st.integers(1, 4), scale=st.floats(0.01, 100.0))
def test_moves_with_scale_and_not_with_shift_rotation_or_order(seed, d, k, scale):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(30, d))
    base = float(knn_entropy(x, k=k, feature_axis=1))
    turn = special_ortho_group.rvs(d, random_state=rng) if d > 1 else np.array([[-1.0]])
    moved = scale * (rng.permutation(x) @ turn) + rng.normal(size=d)
    assert float(knn_entropy(moved, k=k, feature_axis=1)) == pytest.approx(base + d * np.log(scale), abs=1e-7)
