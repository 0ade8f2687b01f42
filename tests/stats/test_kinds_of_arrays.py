"""What is no plain array of real numbers is refused by every verb; nothing of it is dropped without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import xarray as xr
from array_api_compat import array_namespace, is_torch_array
from layers import weights

import fedstat.labelled as fs
from fedstat import ntk
from fedstat.motivation import statistics
from fedstat.ntk import gram
from fedstat.stats import (
    eigenvalues,
    entropy,
    factor,
    icc,
    icc_resampling,
    moments,
    number_of_factors,
    reml,
    resampling,
    split,
    variance_components,
)

W = weights()
Z = fs.layer_matrix(W)
VERBS: dict[str, tuple[Any, np.ndarray]] = {
    "fa": (fs.fa, Z),
    "fa of correlations": (lambda r: fs.fa(r, corr=True), np.corrcoef(Z, rowvar=False)),
    "n_factors": (lambda z: fs.n_factors(z, draws=2), Z),
    "split": (fs.split, W),
    "update": (lambda w: fs.update(fs.split(W), w), W),
    "layer_matrix": (fs.layer_matrix, W),
    "bootstrap": (lambda w: fs.bootstrap(w, n_boot=2), W),
    "permutation_test": (lambda w: fs.permutation_test(w, n_permutations=2), W),
    "stability": (lambda w: fs.sensitivity(w, kappa=0.5, n_starts=0), W),
    "icc": (fs.icc, W),
    "icc start": (lambda s: fs.icc(W, baseline=s), W[0]),
    "variance_components": (fs.variance_components, np.stack([W, W[::-1]], axis=1)),
    "knn_entropy": (fs.knn_entropy, Z),
    "client_clusters": (lambda w: fs.client_clusters(w, n_clusters=2, n_subsamples=2), W),
    "effective_rank": (fs.effective_rank, W),
    "entropy.knn_entropy": (entropy.knn_entropy, Z),
    "peaks": (lambda x: statistics.peaks(x, 1), Z[:, 0]),
    "mixture": (lambda x: statistics.mixture(x, draws=1), Z[:, 0]),
    "init": (lambda h: fs.split(W, init=h), np.full(8, 0.5)),
    "augment": (lambda z: fs.fa(Z).augment(z), Z),
    "split of a list": (lambda w: fs.split([*w]), W),
    "variance_components of lists": (
        lambda w: fs.variance_components([[*client] for client in w]), np.stack([W, W[::-1]], axis=1)
    ),
    "state_dicts": (lambda w: fs.split({c: {"fc.weight": x} for c, x in enumerate(w)}, layer="fc"), W),
    "ntk.kernel": (ntk.kernel, W),
    "ntk.kernel of a list": (lambda w: ntk.kernel([*w]), W),
    "ntk.violations": (ntk.violations, W),
    "ntk.convergence": (lambda x: ntk.convergence(x, widths=[8], rounds=2, replicates=1), W),
    "ntk.convergence y": (lambda y: ntk.convergence(W, y, widths=[8], rounds=2, replicates=1), W[..., 0]),
    "ntk.extreme_eigenvalues": (ntk.extreme_eigenvalues, np.eye(3)),
}  # fmt: skip
LISTS = ("split of a list", "variance_components of lists")
REFUSE_DTYPES = [verb for verb in VERBS if not verb.startswith(("ntk", "state", "augment"))]
pytestmark = pytest.mark.filterwarnings(
    "ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.ntk.TheoryWarning"
)


@pytest.mark.parametrize("verb", VERBS)
def test_masked_values_are_refused_and_a_mask_of_nothing_is_none(verb: str) -> None:
    call, data = VERBS[verb]
    masked = np.ma.masked_array(data, mask=np.zeros(data.shape, bool))
    call(masked)
    masked.mask.flat[0] = True
    with pytest.raises(ValueError, match="but got a masked array with 1 masked values"):
        call(masked)


@pytest.mark.parametrize("dtype", [complex, object, bool, str])
@pytest.mark.parametrize("verb", REFUSE_DTYPES)
def test_other_dtypes_than_real_numbers_are_refused(verb: str, dtype: type) -> None:
    call, data = VERBS[verb]
    with pytest.raises(ValueError, match="must hold real numbers in a dense array, but got dtype"):
        call(data.astype(dtype))


@pytest.mark.parametrize(
    "verb", [v for v in REFUSE_DTYPES if v not in ("peaks", "mixture", "init") and "list" not in v]
)
@pytest.mark.parametrize("kind", [lambda t: t.to(torch.complex64), lambda t: t.bool(), lambda t: t.to_sparse()])
def test_tensors_of_other_kinds_are_refused(verb: str, kind: Any) -> None:
    call, data = VERBS[verb]
    with pytest.raises(ValueError, match=r"must hold real numbers in a dense array, but got torch\."):
        call(kind(torch.asarray(data)))


def test_sparse_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype object\. .*\.toarray\(\) of sparse"):
        fs.fa(scipy.sparse.csr_array(Z))


@pytest.mark.parametrize("dtype", [complex, bool, object])
@pytest.mark.parametrize("verb", [fs.split, fs.layer_matrix, fs.bootstrap, fs.icc, fs.knn_entropy])
def test_labelled_arrays_of_other_dtypes_are_refused(verb: Any, dtype: type) -> None:
    with pytest.raises(ValueError, match="must hold real numbers in a dense array, but got dtype"):
        verb(xr.DataArray(W.astype(dtype), dims=("client", "unit", "weight")))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint64"])
def test_real_numbers_of_any_precision_are_taken(dtype: str) -> None:
    w = np.round(10 * np.abs(W)).astype(dtype)
    expected = fs.split(w.astype(np.float64), n_factors=2).communality
    np.testing.assert_array_equal(fs.split(w, n_factors=2).communality, expected)


R = np.corrcoef(Z, rowvar=False)
NU = np.linspace(0.1, 0.9, 8)
UNIT = W[0] / (1.1 * np.linalg.norm(W[0], axis=1, keepdims=True))
HALVES = np.stack([W, W[::-1]], axis=1)


def of_clients(w: Any) -> moments.Moments:
    """Moments of each client, stacked."""
    each = [moments.moments(one.T) for one in w]
    xp = array_namespace(w)
    return moments.Moments(*(xp.stack([xp.asarray(x) for x in field]) for field in zip(*each, strict=True)))


# What gives arrays of the kind it takes, in float64.
KEPT: dict[str, tuple[Any, np.ndarray]] = {
    "moments.moments": (moments.moments, Z),
    "moments.scaled_moments": (moments.scaled_moments, Z),
    "moments.rescaled": (lambda z: moments.rescaled(*moments.scaled_moments(z)), Z),
    "moments.correlation": (lambda z: moments.correlation(moments.moments(z)), Z),
    "scale.power": (lambda z: moments.power(moments.exponent(moments.largest(z, 0))), Z),
    "eigen.leading": (lambda r: eigenvalues.leading(array_namespace(r), r, 2), R),
    "factor.fit": (lambda r: factor.fit(r, n_factors=2), R),
    "factor.fit, minres": (lambda r: factor.fit(r, n_factors=2, method="minres"), R),
    "factor.starts": (lambda r: factor.starts(r, 1, seed=0, n_factors=2)[0], R),
    "split.threshold": (lambda nu: split.threshold(nu, 0.5), NU),
    "split.shared": (lambda nu: split.shared(nu, tau=0.5), NU),
    "split.auc": (lambda nu: split.auc(nu, nu > 0.4), NU),
    "split.prop_unchanged": (lambda nu: split.prop_unchanged(nu > 0.4, nu > 0.6), NU),
    "split.ari": (lambda nu: split.adjusted_rand(nu > 0.4, nu > 0.6), NU),
    "bootstrap.bootstrap": (lambda w: resampling.bootstrap(of_clients(w), replicates=2, n_factors=2), W),
    "bootstrap.permutation": (lambda w: resampling.permutation(of_clients(w), replicates=2, n_factors=2), W),
    "split.ari of clusters": (lambda nu: split.adjusted_rand((nu > 0.4) + 1, (nu > 0.6) + 1), NU),
    "rank.effective_rank": (eigenvalues.effective_rank, W),
    "entropy.knn_entropy": (entropy.knn_entropy, Z),
    "icc.sums": (icc.sums, W),
    "icc.mean_squares": (lambda w: icc.mean_squares(icc.sums(w)), W),
    "icc.layer_mean_squares": (lambda w: icc.layer_mean_squares(icc.sums(w)), W),
    "kernel.kernel": (gram.kernel, UNIT),
    "kernel.gram": (lambda x: gram.gram(x, x, x), UNIT),
    "kernel.shared_gram": (lambda x: gram.shared_gram(x, x, x), UNIT),
    "extreme_eigenvalues": (eigenvalues.extreme_eigenvalues, R),
}  # fmt: skip
# What takes tensors, too, and gives NumPy arrays, as its module says.
ON_HOST: dict[str, tuple[Any, np.ndarray]] = {
    "icc.coefficients": (lambda w: icc.coefficients(icc.mean_squares(icc.sums(w))), W),
    "icc.agreement": (lambda w: icc.agreement(icc.sums(w)), W),
    "icc_bootstrap.bootstrap": (lambda w: icc_resampling.bootstrap(w, None, replicates=2, seed=0), W),
    "components.components": (lambda w: variance_components.components(variance_components.parts(w)), HALVES),
    "components_reml.gram": (reml.gram, HALVES),
    "components_reml.components": (lambda w: reml.components(reml.gram(w)), HALVES),
    "modes.peaks": (lambda x: statistics.peaks(x, 1), Z[:, 0]),
    "modes.mixture": (lambda x: statistics.mixture(x, draws=1), Z[:, 0]),
}
# What takes NumPy arrays alone, as its module says.
NUMPY: dict[str, tuple[Any, np.ndarray]] = {
    "indices.kmo": (number_of_factors.kmo, R),
    "indices.fit_indices": (lambda r: number_of_factors.fit_indices(r, r / 2, 2, 60), R),
    "nfactors.compare": (lambda r: number_of_factors.compare(r, 60, kappa=0.8, draws=2, quantile=0.9, seed=0), R),
    "nfactors.minimum_average_partial": (number_of_factors.minimum_average_partial, R),
}


def arrays(found: Any) -> Iterator[Any]:
    if is_torch_array(found) or isinstance(found, np.ndarray | np.generic):
        yield found
    elif isinstance(found, dict):
        yield from arrays(tuple(found.values()))
    elif isinstance(found, tuple | list):
        for part in found:
            yield from arrays(part)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [*KEPT, *ON_HOST, *NUMPY])
def test_statistics_give_the_kind_of_array_that_they_say(name: str, dtype: type) -> None:
    call, data = (KEPT | ON_HOST | NUMPY)[name]
    data = data.astype(dtype)
    plain = list(arrays(call(data)))
    assert all(isinstance(x, np.ndarray | np.generic) for x in plain)
    if name in NUMPY:
        return
    found = list(arrays(call(torch.asarray(data))))
    assert all(is_torch_array(x) == (name in KEPT) for x in found)
    floats = [x for x in found if "float" in str(x.dtype)]
    assert {str(x.dtype).removeprefix("torch.") for x in floats} <= {"float64"}
    if name in KEPT:
        for x, y in zip(floats, (x for x in plain if "float" in str(x.dtype)), strict=True):
            np.testing.assert_allclose(np.abs(x.numpy()), np.abs(y), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("module", [icc, icc_resampling, variance_components, reml, statistics, number_of_factors])
def test_modules_that_leave_the_kind_of_their_input_say_so(module: Any) -> None:
    assert "NumPy" in module.__doc__
