"""Kernels and extreme eigenvalues against the expressions and solvers one would write first, in one process."""

import numpy as np
import pytest
import scipy.linalg

from fedstat.ntk import gram


def sphere(*shape):
    x = np.random.default_rng(0).normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def straightforward(x):
    norm = np.linalg.norm(x, axis=1)
    g = x @ x.T
    return g * (np.pi - np.arccos(np.clip(g / np.outer(norm, norm), -1, 1))) / (2 * np.pi)


def all_eigenvalues(h):
    values = scipy.linalg.eigvalsh(h)
    return values[0], values[-1]


def test_kernel_of_5000_samples(compare):
    x = sphere(5000, 100)
    kernels = compare("kernel of 5,000 samples", lambda: gram.kernel(x), lambda: straightforward(x), "NumPy", rounds=7)
    errors = [np.abs(np.diagonal(k) - 0.5).max() for k in kernels]
    print(f"error on the diagonal: fedstat {errors[0]:.1e}, NumPy {errors[1]:.1e}")


@pytest.mark.parametrize("certify", [False, True])
def test_extreme_eigenvalues_of_2000_samples(compare, certify):
    h = gram.kernel(sphere(2000, 100))
    e, (low, high) = compare(
        f"extreme eigenvalues of 2,000 samples, certify={certify}",
        lambda: gram.extreme_eigenvalues(h, certify=certify), lambda: all_eigenvalues(h), "scipy.linalg.eigvalsh",
        rounds=7,
    )  # fmt: skip
    print(f"bounds {e.error_minimum:.1e}, {e.error_maximum:.1e}")
    print(f"errors {abs(e.minimum - low):.1e}, {abs(e.maximum - high):.1e}")


def test_personal_eigenvalues_of_40_clients_of_100_samples(compare):
    blocks = gram.kernel(sphere(40, 100, 50))
    dense = scipy.linalg.block_diag(*blocks)
    e, (low, high) = compare(
        "extreme eigenvalues of 40 clients of 100 samples",
        lambda: gram.extreme_eigenvalues(blocks), lambda: all_eigenvalues(dense),
        "scipy.linalg.eigvalsh of the dense matrix", rounds=3,
    )  # fmt: skip
    print(f"errors {abs(e.minimum.min() - low):.1e}, {abs(e.maximum.max() - high):.1e}")
