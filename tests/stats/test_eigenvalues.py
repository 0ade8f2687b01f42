"""Extreme eigenvalues against LAPACK's full spectrum, with the promised error."""

import numpy as np
import pytest
import scipy.linalg
import torch

import fedstat.ntk
from fedstat.ntk.gram import Extremes, extreme_eigenvalues, kernel
from fedstat.stats import eigenvalues as module

N = 180


def with_spectrum(values, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(values), len(values))))
    return (q * values) @ q.T


def samples(seed=1, features=40):
    x = np.random.default_rng(seed).normal(size=(N, features))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def nearly_parallel():
    x = samples()
    x[1] = x[0] + 1e-6
    return x


MATRICES = {
    "kernel": lambda: kernel(samples()),
    "kernel of a nearly parallel pair": lambda: kernel(nearly_parallel()),
    "kernel of parallel samples": lambda: kernel(np.vstack([samples()[:-1], 0.5 * samples()[:1]])),
    "kernel in few dimensions": lambda: kernel(samples(features=3)),
    "indefinite": lambda: with_spectrum(np.linspace(-1, 2, N)),
    "clustered ends": lambda: with_spectrum(np.r_[np.full(60, 1.0), np.full(60, 2.0), np.full(60, 3.0)]),
    "graded": lambda: with_spectrum(np.logspace(-9, 3, N)),
    "identity": lambda: np.eye(N),
    "zero": lambda: np.zeros((N, N)),
    "rank one": lambda: np.ones((N, N)),
    "negative definite": lambda: -kernel(samples()),
}
EVERY = pytest.mark.parametrize("name", MATRICES)


@EVERY
@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("direct_below", [1, 512], ids=["iterative", "direct"])
def test_true_extremes_lie_within_the_reported_error(name, certify, direct_below):
    h = MATRICES[name]()
    true = scipy.linalg.eigvalsh(h)
    found = extreme_eigenvalues(h, direct_below=direct_below, certify=certify)
    slack = 4 * found.resolution  # LAPACK's own error
    assert abs(found.minimum - true[0]) <= found.error_minimum + slack
    assert abs(found.maximum - true[-1]) <= found.error_maximum + slack
    assert found.minimum >= true[0] - slack
    assert found.maximum <= true[-1] + slack


@EVERY
def test_iterative_values_are_far_closer_than_the_residual(name):
    h = MATRICES[name]()
    true = scipy.linalg.eigvalsh(h)
    found = extreme_eigenvalues(h, direct_below=1)
    assert found.minimum == pytest.approx(true[0], rel=1e-5, abs=10 * float(found.resolution))
    assert found.maximum == pytest.approx(true[-1], rel=1e-5, abs=10 * float(found.resolution))


def test_proof_refuses_a_value_that_is_not_extreme():
    h = np.diag(np.arange(1.0, 11.0))
    zero = np.float64(0.0)
    good = Extremes(np.float64(1.0), np.float64(10.0), 1e-9 + zero, 1e-9 + zero, zero)
    assert module._is_certain(h, good)
    assert not module._is_certain(h, good._replace(minimum=np.float64(2.0)))
    assert not module._is_certain(h, good._replace(maximum=np.float64(9.0)))


def test_certified_values_survive_an_iteration_that_misses_the_ends(monkeypatch):
    h = with_spectrum(np.arange(1.0, 31.0))
    wrong = Extremes(*map(np.float64, (2.0, 29.0, 1e-9, 1e-9, 1e-12)))
    monkeypatch.setattr(module, "_solve_by_lanczos", lambda *_: wrong)
    assert extreme_eigenvalues(h, direct_below=1).minimum == 2.0
    found = extreme_eigenvalues(h, direct_below=1, certify=True)
    assert (found.minimum, found.maximum) == pytest.approx((1.0, 30.0))


@pytest.mark.parametrize("direct_below", [1, 512])
def test_batches_and_torch_agree_with_single_matrices(direct_below):
    h = np.stack([kernel(samples(seed)) for seed in (1, 2, 3)])
    batch = extreme_eigenvalues(h, direct_below=direct_below)
    tensor = extreme_eigenvalues(torch.from_numpy(h), direct_below=direct_below)
    assert all(isinstance(part, torch.Tensor) and part.dtype == torch.float64 for part in tensor)
    for k in range(3):
        one = scipy.linalg.eigvalsh(h[k])
        assert (batch.minimum[k], batch.maximum[k]) == pytest.approx((one[0], one[-1]), rel=1e-6)
        assert (float(tensor.minimum[k]), float(tensor.maximum[k])) == pytest.approx((one[0], one[-1]), rel=1e-6)


def test_the_matrix_is_left_as_it_was():
    h = kernel(samples())
    before = h.copy()
    extreme_eigenvalues(h, direct_below=1, certify=True)
    np.testing.assert_array_equal(h, before)


@pytest.mark.parametrize(
    ("h", "message"),
    [
        (np.ones((2, 3)), r"square and not empty.*got shape \(2, 3\)"),
        (np.ones((0, 0)), "square and not empty"),
        (np.full((2, 2), np.nan), "finite"),
        (np.full((3, 2, 2), np.inf), "finite"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), r"h must be symmetric, but got \|H - H'\| up to 2\. Pass a kernel"),
        (np.stack([np.eye(2), [[1.0, 1e-6], [0.0, 1.0]]]), "h must be symmetric, but got .* up to 1e-06"),
        (1e-200 * np.array([[1.0, 2.0], [0.0, 1.0]]), "h must be symmetric"),
        (np.triu(np.ones((600, 600))), "h must be symmetric"),
    ],
)
def test_bad_matrices_are_refused(h, message):
    with pytest.raises(ValueError, match=message):
        extreme_eigenvalues(h)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_kernels_are_symmetric_up_to_the_rounding_of_their_type(dtype):
    h = (8 * with_spectrum([1.0, 2.0, 3.0])).astype(dtype)
    h[0, 1] = np.nextafter(h[1, 0], h[1, 0] + 1) if dtype != np.int64 else h[1, 0]
    h = (h + h.T) // 2 if dtype == np.int64 else h
    expected = np.linalg.eigvalsh(h.astype(float))
    found = extreme_eigenvalues(h)
    np.testing.assert_allclose([found.minimum, found.maximum], expected[[0, -1]], rtol=1e-5)


@pytest.mark.parametrize(
    ("h", "message"),
    [
        (np.array([[1.0, 2.0], [0.0, 1.0]]), "h must be symmetric"),
        (np.ma.masked_array(np.eye(2), mask=np.eye(2) > 0), "masked array with 2 masked values"),
        (1j * np.eye(2), "h must hold real numbers, but got complex128"),
        (np.eye(2).astype(str), "h must hold real numbers"),
    ],
)
def test_the_verb_refuses_what_is_no_kernel(h, message):
    with pytest.raises(ValueError, match=message):
        fedstat.ntk.extreme_eigenvalues(h)


def test_an_unresolved_smallest_eigenvalue_warns_and_counts_as_zero():
    x = samples()
    x[1] = x[0]
    with pytest.warns(fedstat.ntk.TheoryWarning, match="which float64 cannot tell from 0"):
        found = fedstat.ntk.extreme_eigenvalues(fedstat.ntk.kernel(x))
    assert found.usable == 0
    assert found.condition == np.inf


def test_one_sample_has_half_its_squared_length():
    assert tuple(fedstat.ntk.extreme_eigenvalues(fedstat.ntk.kernel(np.array([[0.6, 0.0]])))) == pytest.approx(
        (0.18, 0.18)
    )
