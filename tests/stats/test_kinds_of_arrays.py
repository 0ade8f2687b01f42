"""What is no plain array of real numbers is refused by every verb; nothing of it is dropped without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import xarray as xr
from layers import weights

import fedstat.labelled as fs
from fedstat.stats import entropy, modes

W = weights()
Z = fs.layer_matrix(W)
VERBS: dict[str, tuple[Any, np.ndarray]] = {
    "fa": (fs.fa, Z),
    "fa of correlations": (lambda r: fs.fa(r, corr=True), np.corrcoef(Z, rowvar=False)),
    "n_factors": (lambda z: fs.n_factors(z, draws=2), Z),
    "split": (fs.split, W),
    "update": (lambda w: fs.update(fs.split(W), w), W),
    "layer_matrix": (fs.layer_matrix, W),
    "bootstrap": (lambda w: fs.bootstrap(w, replicates=2), W),
    "permutation_test": (lambda w: fs.permutation_test(w, replicates=2), W),
    "stability": (lambda w: fs.stability(w, n_starts=0), W),
    "icc": (fs.icc, W),
    "icc start": (lambda s: fs.icc(W, start=s), W[0]),
    "variance_components": (fs.variance_components, np.stack([W, W[::-1]], axis=1)),
    "knn_entropy": (fs.knn_entropy, Z),
    "entropy.knn_entropy": (entropy.knn_entropy, Z),
    "peaks": (lambda x: modes.peaks(x, 1), Z[:, 0]),
    "mixture": (lambda x: modes.mixture(x, draws=1), Z[:, 0]),
    "start": (lambda h: fs.split(W, start=h), np.full(8, 0.5)),
}
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.ConvergenceWarning")


@pytest.mark.parametrize("verb", VERBS)
def test_masked_values_are_refused_and_a_mask_of_nothing_is_none(verb: str) -> None:
    call, data = VERBS[verb]
    masked = np.ma.masked_array(data, mask=np.zeros(data.shape, bool))
    call(masked)
    masked.mask.flat[0] = True
    with pytest.raises(ValueError, match="but got a masked array with 1 masked values"):
        call(masked)


@pytest.mark.parametrize("dtype", [complex, object, bool, str])
@pytest.mark.parametrize("verb", VERBS)
def test_other_dtypes_than_real_numbers_are_refused(verb: str, dtype: type) -> None:
    call, data = VERBS[verb]
    with pytest.raises(ValueError, match="must hold real numbers in a dense array, but got dtype"):
        call(data.astype(dtype))


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("peaks", "mixture", "start")])
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
