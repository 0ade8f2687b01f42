"""Steps followed from an earlier decomposition are those of a decomposition each: as many, to 1e-8."""

from __future__ import annotations

import numpy as np
import pytest

from fedstat._utils.streams import generator
from fedstat.stats import eigenvalues, factor, factor_solvers, resampling
from fedstat.stats.moments import moments


def noise(d, seed=0):
    return np.random.default_rng(seed).normal(size=(2 * d, d))


def unlike(d, seed=0):
    """Units of which some are explained well and others not."""
    rng, k = np.random.default_rng(seed), d // 4
    return rng.normal(size=(2 * d, k)) @ (rng.normal(size=(k, d)) * rng.uniform(0, 2, d)) / np.sqrt(k) + noise(
        d, seed + 1
    )


def twins(d, seed=0):
    """Pairs of units of one correlation, so that eigenvalues are near each other."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(40 * d, d // 2))
    return np.repeat(z, 2, axis=1) + rng.normal(size=(40 * d, d))


def with_dead(d, seed=0):
    z = unlike(d, seed)
    z[:, [3, 40]] = 1.0
    return z


def correlations(z):
    with np.errstate(invalid="ignore"):
        return np.corrcoef(z, rowvar=False)


@pytest.fixture
def decomposed(monkeypatch):
    """The plain iteration, which decomposes in every step."""

    def fit(r, **options):
        with monkeypatch.context() as here:
            here.setattr(factor_solvers, "pays", lambda *_: False)
            return factor.fit(r, **options)

    return fit


@pytest.fixture
def followed(monkeypatch):
    """Numbers of steps that were followed, and of those that were not."""
    found = {True: 0, False: 0}
    plain = factor_solvers.Reference.communalities

    def counted(self, h):
        nu = plain(self, h)
        found[nu is not None] += 1
        return nu

    monkeypatch.setattr(factor_solvers.Reference, "communalities", counted)
    return found


KINDS = [noise, unlike, twins, with_dead]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        *[(data, {"kappa": kappa}) for data in KINDS for kappa in (0.75, 0.9)],
        (noise, {"kappa": 0.9, "heywood": "bound"}),
        (unlike, {"n_factors": 50, "tol": 1e-4, "max_iter": 400}),
        (twins, {"kappa": 0.8, "init": "smc"}),
        (with_dead, {"kappa": 0.8, "init": np.full(160, 0.6)}),
    ],
)
def test_steps_are_those_of_the_plain_iteration(data, options, decomposed, followed):
    r = correlations(data(160))
    found, plain = factor.fit(r, **options), decomposed(r, **options)
    assert followed[True] > 0
    assert int(found.n_iter) == int(plain.n_iter)
    assert bool(found.converged) == bool(plain.converged)
    np.testing.assert_allclose(found.communality, plain.communality, rtol=0, atol=1e-8)
    np.testing.assert_array_equal(found.heywood, plain.heywood)
    np.testing.assert_allclose(np.abs(found.loadings), np.abs(plain.loadings), rtol=0, atol=1e-5)


@pytest.mark.parametrize("data", KINDS)
def test_a_fit_without_loadings_has_the_same_communalities(data):
    r = correlations(data(160))
    found, without = (factor.fit(r, kappa=0.75, loadings=loadings) for loadings in (True, False))
    np.testing.assert_array_equal(without.communality, found.communality)
    np.testing.assert_array_equal(without.heywood, found.heywood)


@pytest.mark.parametrize("g", [40, 90, 110])
def test_one_step_is_the_diagonal_of_the_leading_part(g):
    """Near the reference, whichever side is followed, by the definition."""
    rng, r = np.random.default_rng(0), correlations(unlike(200))
    h = rng.uniform(0.5, 0.9, 200)
    reference = factor_solvers.Reference(h, *eigenvalues.full(np, eigenvalues.with_diagonal(np, r, h)), g)
    moved = h + 0.05 + rng.uniform(-1e-3, 1e-3, 200)
    values, vectors = np.linalg.eigh(eigenvalues.with_diagonal(np, r, moved))
    assert values[200 - g] > 0
    found = reference.communalities(moved)
    np.testing.assert_allclose(found, vectors[:, 200 - g :] ** 2 @ values[200 - g :], rtol=0, atol=1e-9)


@pytest.mark.parametrize("g", [60, 140])
def test_eigenvectors_that_cross_the_cut_are_followed(g):
    """The change mixes eigenvectors on both sides of the cut by more than 45 degrees."""
    rng, values = np.random.default_rng(4), np.linspace(2, 0.1, 200)
    values[g] = values[g - 1] - 1e-6
    vectors = np.linalg.qr(rng.normal(size=(200, 200)))[0]
    matrix, change = vectors @ np.diag(values) @ vectors.T, rng.uniform(-0.02, 0.02, 200)
    new_values, new_vectors = eigenvalues.full(np, matrix + np.diag(change))
    assert np.linalg.svd(vectors[:, :g].T @ new_vectors[:, :g], compute_uv=False).min() < np.sqrt(0.5)
    h = np.diagonal(matrix)
    followed = factor_solvers.Reference(h, values, vectors, g).communalities(h + change)
    np.testing.assert_allclose(followed, new_vectors[:, :g] ** 2 @ new_values[:g], rtol=0, atol=5e-9)


def test_digits_that_single_precision_cannot_give_are_not_asked_of_it(followed):
    found = factor.fit(correlations(unlike(160)), n_factors=40, tol=1e-10, max_iter=100)
    assert bool(found.converged)
    assert followed[True] == 0


def test_what_is_far_or_has_no_border_is_decomposed():
    r = correlations(unlike(200))
    h = np.full(200, 0.7)
    reference = factor_solvers.Reference(h, *eigenvalues.full(np, eigenvalues.with_diagonal(np, r, h)), 60)
    far = h.copy()
    far[0] += 0.1
    assert reference.communalities(far) is None
    least = np.linalg.eigvalsh(eigenvalues.with_diagonal(np, r, h))[200 - 60]
    assert reference.communalities(h - least - 1e-3) is None, "a negative eigenvalue does not count"
    any_subspace = factor_solvers.Reference(h, *eigenvalues.full(np, 0.7 * np.eye(200)), 60)
    assert any_subspace.communalities(h + np.random.default_rng(0).uniform(-1e-3, 1e-3, 200)) is None


def by_plain_loop(w, n_boot, kappa, *, steps=50, tol=1e-3):
    """Communalities of bootstrap samples: stack the clients, decompose in every step."""
    counts = generator(0, "bootstrap").multinomial(len(w), np.full(len(w), 1 / len(w)), size=n_boot)
    results = []
    for count in counts:
        r = correlations(np.repeat(w, count, axis=0).swapaxes(1, 2).reshape(-1, w.shape[1]))
        values = np.linalg.eigvalsh(r)[::-1]
        g = int(np.argmax(np.cumsum(values) / values.sum() >= kappa)) + 1
        h = np.ones(len(r))
        for _ in range(steps):
            values, vectors = np.linalg.eigh(r - np.diag(1 - h))
            before, h = h, vectors[:, -g:] ** 2 @ np.maximum(values[-g:], 0)
            if np.abs(h - before).max() <= tol:
                break
        results.append(h)
    return np.array(results)


@pytest.mark.parametrize("kappa", [0.6, 0.85])
def test_the_bootstrap_is_a_plain_loop_over_samples(kappa, followed):
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, size=(1, 160, 100)) + rng.normal(size=(8, 160, 100))
    result = resampling.bootstrap(moments(w.swapaxes(1, 2)), replicates=3, seed=0, kappa=kappa)
    assert followed[True] > followed[False] > 0
    np.testing.assert_allclose(result.communality, by_plain_loop(w, 3, kappa), rtol=0, atol=1e-8)


def test_the_series_of_the_inverse_is_the_solution_or_is_given_up():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 40)) * 0.005
    xx, s = (x.T @ x).astype(np.float32), rng.normal(size=(40, 40)).astype(np.float32) * 0.01
    np.testing.assert_allclose(
        factor_solvers._solve(xx, s), np.linalg.solve(np.eye(40) + xx, s.astype(float)), atol=2e-9
    )
    assert factor_solvers._solve(xx * 2000, s) is None
