"""What must hold for any samples: invariances, order of eigenvalues, the limits of Theorem 2."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstat.ntk
from fedstat.ntk import gram

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def draw(seed, n, d):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    x *= rng.uniform(0.1, 1, size=(n, 1)) / np.linalg.norm(x, axis=1, keepdims=True)
    return rng, x


def smallest(x, client):
    return fedstat.ntk.extreme_eigenvalues(fedstat.ntk.kernel(x, client))


@settings(deadline=None, max_examples=20)
@given(SEEDS, COUNTS, st.integers(4, 12))
def test_personal_spectrum_lies_inside_the_shared_one(seed, sizes, d):
    """H^p is the block diagonal of H^s: by Cauchy's interlacing λ^p ≥ λ^s, and λ_max the other way."""
    _, x = draw(seed, sum(sizes), d)
    s, p = smallest(x, None), smallest(x, np.repeat(np.arange(len(sizes)), sizes))
    assert p.lambda_min >= s.lambda_min - s.resolution
    assert p.lambda_max <= s.lambda_max + s.resolution
    assert s.lambda_max <= len(sizes) * p.lambda_max + s.resolution


@settings(deadline=None, max_examples=20)
@given(SEEDS, COUNTS, st.integers(4, 12))
def test_rotation_and_relabelling_change_no_constant(seed, sizes, d):
    rng, x = draw(seed, sum(sizes), d)
    y = rng.choice([-1.0, 1.0], size=len(x))
    q, _ = np.linalg.qr(rng.normal(size=(d, d)))
    client = np.repeat(np.arange(len(sizes)), sizes)
    order, names = rng.permutation(len(x)), rng.permutation(len(sizes))
    moved, labels = (x @ q)[order], names[client][order]
    for before, after in ((None, None), (client, labels)):
        np.testing.assert_allclose(tuple(smallest(moved, after)), tuple(smallest(x, before)), rtol=1e-7, atol=1e-13)

    def complexity(x, y, client):
        by = np.argsort(client, kind="stable")
        h = gram.kernel(x[by])
        cuts = np.cumsum([0, *np.bincount(client)])
        return gram.complexity(h, [h[a:b, a:b] for a, b in itertools.pairwise(cuts)], y[by])

    assert complexity(moved, y[order], labels) == pytest.approx(complexity(x, y, client), rel=1e-6)


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.integers(1, 20), st.integers(1, 6))
def test_kernel_is_positive_semidefinite_and_scales_with_its_samples(seed, n, d):
    rng, x = draw(seed, n, d)
    h = gram.kernel(x)
    assert np.linalg.eigvalsh(h)[0] >= -1e-14
    scale = rng.uniform(0.5, 2, size=n)
    np.testing.assert_allclose(gram.kernel(scale[:, None] * x), h * np.outer(scale, scale), atol=1e-13)


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.integers(1, 8), st.integers(1, 12))
def test_theorem_2_says_nothing_about_signs_where_8c2_exceeds_n(seed, clients, n):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients * n, 6))
    x[:, 0] += rng.choice([0.0, 20.0])  # easy samples, all alike, as well as spread ones
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = np.ones(len(x)) if rng.random() < 0.5 else rng.choice([-1.0, 1.0], size=len(x))
    h = gram.kernel(x)
    blocks = [h[k : k + n, k : k + n] for k in range(0, clients * n, n)]
    least = 2 * clients * np.sqrt(2 / (1 + 1 / clients) / (clients * n))
    found = gram.complexity(h, blocks, y)
    assert found >= least * (1 - 1e-9)
    if clients > gram.largest_informative_clients(clients * n):
        assert found >= 1 - 1e-9


@settings(deadline=None, max_examples=15)
@given(SEEDS, COUNTS)
def test_infinite_width_losses_do_not_depend_on_the_order_of_clients(seed, sizes):
    rng, x = draw(seed, len(sizes) * 3, 8)
    steps = gram.Steps(0.3, 1.0, 3, len(sizes))
    residual = rng.normal(size=len(x))

    def losses(order):
        a = x.reshape(len(sizes), 3, 8)[order]
        r = residual.reshape(len(sizes), 3)[order].reshape(-1)
        step = gram.limit_map(gram.kernel(a.reshape(-1, 8)), list(gram.kernel(a)), steps)
        return [r @ r, (step @ r) @ (step @ r), np.sum((step @ step @ r) ** 2)]

    np.testing.assert_allclose(losses(rng.permutation(len(sizes))), losses(np.arange(len(sizes))), rtol=1e-10)
