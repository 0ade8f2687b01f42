"""What floating point does not resolve is not reported: every kind of number gives its own values, noise gives none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from factor_analyzer import Rotator
from factor_analyzer.factor_analyzer import calculate_bartlett_sphericity
from layers import weights

import fedstat
from fedstat import labelled, ntk
from fedstat.results.factor import ROTATIONS, Rotation
from fedstat.stats import number_of_factors

RNG = np.random.default_rng(0)
W = torch.asarray(weights())
TWICE = torch.stack([W, W + 0.5 * torch.asarray(RNG.normal(size=W.shape))], 1)
SIZES = torch.asarray([32.0, 64, 16, 96, 48, 72])
pytestmark = [
    pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::fedstat.results.AgreementWarning"),
    pytest.mark.filterwarnings("ignore:.*samples have an exact copy"),
]

VERBS: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "bootstrap": (lambda w: labelled.bootstrap(w, n_factors=2, n_boot=2).tidy()["estimate"], W),
    "client_clusters": (lambda w: labelled.client_clusters(w, n_clusters=2, n_subsamples=3).similarity, W),
    "client_clusters groups": (
        lambda g: labelled.client_clusters(W, n_clusters=2, n_subsamples=3, n_permutations=9, groups=g).ari,
        torch.asarray([0, 0, 1, 1, 1, 2]),
    ),
    "effective_rank": (lambda w: labelled.effective_rank(w).rank["rank"], W),
    "fa": (lambda w: labelled.fa(w, n_factors=2).communality, W),
    "fa init": (lambda h: labelled.fa(W, n_factors=2, init=h, max_iter=3).communality, torch.linspace(0.1, 0.9, 8)),
    "fa baseline": (lambda s: labelled.fa(W, n_factors=2, baseline=s).communality, W.mean(0)),
    "icc": (lambda w: labelled.icc(w).agreement, W),
    "icc start": (lambda s: labelled.icc(W, baseline=s).agreement, W.mean(0)),
    "icc start, arrays": (lambda s: labelled.icc(W.numpy(), baseline=s).agreement, W.mean(0)),
    "jackknife": (lambda w: labelled.jackknife(w, n_factors=2).tidy()["std_error"], W),
    "knn_entropy": (lambda z: np.asarray(labelled.knn_entropy(z, ties="atoms")), labelled.layer_matrix(W)),
    "layer_matrix": (lambda w: labelled.layer_matrix(w).float().numpy(), W),
    "n_factors": (lambda w: [*labelled.n_factors(w, draws=2).numbers.values()], W),
    "permutation_test": (lambda w: labelled.permutation_test(w, n_factors=2, n_permutations=2).communality, W),
    "split": (lambda w: labelled.split(w, n_factors=2).communality, W),
    "split_map": (lambda w: labelled.split_map(w, kappas=(0.5,), methods=("pc", "icc")).shared, W),
    "sensitivity": (lambda w: labelled.sensitivity(w, kappa=0.5, kappas=(0.6,), n_starts=0).table["ari"], W),
    "update": (lambda w: labelled.update(labelled.fa(W, n_factors=2), w).communality, W),
    "variance_components": (lambda w: labelled.variance_components(w).reliability, TWICE),
    "variance_components covariate": (lambda x: labelled.variance_components(TWICE, covariate=x).reliability, SIZES),
    "variance_components sizes": (
        lambda n: labelled.variance_components(TWICE, sizes=n, method="reml").reliability, SIZES
    ),
}  # fmt: skip


def test_every_verb_has_a_row() -> None:
    assert {name.split()[0] for name in VERBS} == {*labelled.__all__} - {"compare"}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_tensors_of_fewer_digits_are_read_as_the_numbers_that_they_hold(verb: str, kind: torch.dtype) -> None:
    call, values = VERBS[verb]
    held = values.to(kind)
    np.testing.assert_allclose(call(held), call(held.double()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_parallel_vectors_have_no_clusters(kind: type) -> None:
    v = np.outer([1, 2, 3, 4.125, 5, 0.75], RNG.integers(1, 9, 50)).astype(kind)
    v *= kind(1 / 3)
    for n in (1, 2):
        with pytest.raises(ValueError, match=rf"have 1 different direction.s., .* n_clusters={n}\. Parallel vectors"):
            fedstat.client_clusters(v, n_clusters=n, groups=[0, 0, 0, 1, 1, 1])
    other = v.copy()
    other[3:] = v[3:, ::-1]
    found = fedstat.client_clusters(other, n_clusters=2, groups=[0, 0, 0, 1, 1, 1], n_permutations=99, n_subsamples=5)
    assert found.ari == 1
    within = found.similarity[:3, :3]
    np.testing.assert_array_equal(within, 1)
    cosine = v[0].astype(float) @ v[0, ::-1].astype(float) / np.square(v[0].astype(float)).sum()
    np.testing.assert_allclose(found.similarity[0, 3], cosine, rtol=1e-3 if kind is np.float16 else 1e-6)
    with pytest.raises(ValueError, match=r"have 2 different direction.s., .*Use at most 2 clusters"):
        fedstat.client_clusters(other, n_clusters=3)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("copies", [3, 7])
def test_a_client_at_the_mean_has_nothing_of_its_own(kind: type, copies: int) -> None:
    x = RNG.normal(size=(copies, 5, 9)).astype(kind)
    x = np.concatenate([x, x.astype(float).mean(0, keepdims=True).astype(kind)])
    with pytest.raises(ValueError, match=rf"vectors of client\(s\) {copies} are zero, so their cosine"):
        fedstat.client_clusters(x, n_clusters=2, baseline="mean")
    rank = fedstat.effective_rank(x).rank["rank"].values[0]
    assert np.isnan(rank).tolist() == [*[False] * copies, True]
    away = x.astype(float) - x.astype(float).mean(0)
    for found, matrix in zip(rank, away[:-1], strict=False):
        values = np.linalg.svd(matrix, compute_uv=False)
        np.testing.assert_allclose(found, np.exp(scipy.stats.entropy(values)), rtol=1e-9)
    if kind is np.float64:
        for scale in (1e300, 1e-300):
            np.testing.assert_allclose(fedstat.effective_rank(scale * x).rank["rank"].values[0], rank, rtol=1e-9)
    same = np.repeat(x[:1], copies, axis=0)
    assert np.isnan(fedstat.effective_rank(same).rank["rank"]).all()


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("make", [np.asarray, torch.asarray, lambda r: xr.DataArray(r, dims=("row", "unit"))])
def test_correlations_of_few_digits_are_correlations(kind: type, make: Callable[[Any], Any]) -> None:
    """One unit in the last place of asymmetry is rounding; a thousand are not."""
    r = np.corrcoef(labelled.layer_matrix(weights()), rowvar=False).astype(kind)
    r[0, 1] = np.nextafter(r[1, 0], kind(2))
    r[2, 2] = np.nextafter(kind(1), kind(0))
    exact = (r.astype(float) + r.astype(float).T) / 2
    expected = labelled.fa(exact - np.diag(np.diagonal(exact) - 1), corr=True, n_factors=2).communality
    found = labelled.fa(make(r), corr=True, n_factors=2)
    np.testing.assert_allclose(found.communality, expected, atol=20 * float(np.finfo(kind).eps))
    np.testing.assert_array_equal(found.correlation, found.correlation.T)
    r[0, 1] += kind(1000 * np.finfo(kind).eps)
    with pytest.raises(ValueError, match="must be symmetric, but got"):
        labelled.fa(make(r), corr=True, n_factors=2)


LOADINGS = np.array([[0.9, 0.2], [0.8, 0.3], [0.1, 0.7], [0.2, 0.8], [0.5, 0.5]])


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("nothing", [0.0, 1e-17])
def test_a_unit_without_loadings_does_not_keep_others_from_being_rotated(rotation: Rotation, nothing: float) -> None:
    r = np.eye(6)
    r[:5, :5] = LOADINGS @ LOADINGS.T
    np.fill_diagonal(r, 1)
    fit = fedstat.fa(r, corr=True, n_factors=2, method="pc")
    fit.loadings[5] = [nothing, -nothing]
    fit.communality[5] = 2 * nothing**2
    found = fit.rotate(rotation)
    expected = Rotator(method=rotation).fit_transform(fit.loadings[:5])
    expected = expected[:, np.argsort(-np.square(expected).sum(0))]
    np.testing.assert_allclose(found.loadings, [*expected, [0, 0]], atol=1e-12)
    np.testing.assert_array_equal(found.communality, fit.communality)
    fit.loadings[:] = 0
    np.testing.assert_array_equal(fit.rotate(rotation).loadings, 0)


def test_what_cannot_be_rotated_is_said() -> None:
    fit = fedstat.fa(np.eye(4), corr=True, n_factors=2, method="pc")
    fit.loadings[:] = [[0.5, 0], [0.5, 0], [0.5, 0], [0.5, 0]]
    with pytest.raises(ValueError, match=r"promax cannot rotate loadings of 4 units on 2 factors, whose rank is 1 \("):
        fit.rotate("promax")


@pytest.mark.parametrize("rows", [12, 29, 30])
def test_white_noise_with_no_more_rows_than_units_has_no_test_of_sphericity(rows: int) -> None:
    for seed in range(5):
        z = np.random.default_rng(seed).normal(size=(rows, 30))
        glance = fedstat.fa(z, n_factors=2, method="pc").glance().iloc[0]
        assert np.isnan(glance[["bartlett", "bartlett_p", "chi2", "tli", "kmo"]].astype(float)).all()
    more = np.random.default_rng(9).normal(size=(200, 30))
    statistic, p = calculate_bartlett_sphericity(more)
    found = number_of_factors.bartlett(np.corrcoef(more, rowvar=False), 200)
    np.testing.assert_allclose((found[0], found[2]), (statistic, p), rtol=1e-8)
    assert p > 0.001


def test_a_negative_eigenvalue_is_no_rounding() -> None:
    with pytest.warns(ntk.TheoryWarning, match="h is not a kernel: its smallest eigenvalue is -1, below 0"):
        found = ntk.extreme_eigenvalues(np.diag([1.0, -1, 2]))
    assert tuple(found) == (-1, 2)
    assert found.resolved
    assert not found.positive
    assert (found.usable, found.condition) == (0, np.inf)
    assert "negative: no kernel" in repr(found)
    with pytest.warns(ntk.TheoryWarning, match="which float64 cannot tell from 0"):
        flat = ntk.extreme_eigenvalues(np.ones((3, 3)))
    assert not flat.resolved
    assert not flat.positive
