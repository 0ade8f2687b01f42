"""Effective rank, against scipy's singular values and matrices of known spectrum."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.stats

from fedstat.stats.eigenvalues import effective_rank


def test_matrices_of_known_spectrum() -> None:
    rng = np.random.default_rng(0)
    left, right = (scipy.stats.ortho_group.rvs(7, random_state=rng) for _ in range(2))
    np.testing.assert_allclose(effective_rank(np.stack([np.eye(7), left])), 7)
    np.testing.assert_allclose(effective_rank(np.outer(rng.normal(size=4), rng.normal(size=9))), 1)
    values = np.array([4.0, 2, 1, 1, 0, 0, 0])
    made = left @ np.diag(values) @ right
    np.testing.assert_allclose(effective_rank(made), np.exp(scipy.stats.entropy(values)))
    np.testing.assert_allclose(effective_rank(1e300 * made), effective_rank(1e-300 * made))


def test_a_stack_is_scipys_singular_values_one_by_one() -> None:
    x = np.random.default_rng(1).normal(size=(3, 2, 6, 11)).astype(np.float32)
    found = effective_rank(x)
    for i in np.ndindex(3, 2):
        expected = np.exp(scipy.stats.entropy(scipy.linalg.svdvals(x[i].astype(float))))
        np.testing.assert_allclose(found[i], expected, rtol=1e-12)


def test_zero_has_none_and_what_is_not_finite_is_named() -> None:
    x = np.ones((3, 2, 2))
    x[1] = 0
    np.testing.assert_array_equal(np.isnan(effective_rank(x)), [False, True, False])
    x[2, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"the matrix at \[2\] holds NaN"):
        effective_rank(x)
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        effective_rank(x[:, 0, 0])
