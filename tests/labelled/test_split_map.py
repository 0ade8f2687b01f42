"""A map of splits holds the splits that one gets one by one."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from layers import weights
from sklearn.metrics import adjusted_rand_score

import fedstat

W = xr.DataArray(weights(), dims=("client", "unit", "weight"), coords={"unit": list("abcdefgh")})
KAPPAS = (0.5, 0.75, 0.95)


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
def test_every_row_is_the_split_of_its_analysis():
    w = W.copy()
    w[:, 3] = 0
    found = fedstat.split_map(w, kappas=KAPPAS, tau=0.3)
    assert len(found.shared) == 4 * 3 + 1
    for row, shared in zip(found.analyses.itertuples(), found.shared, strict=True):
        options = {} if row.method == "icc" else {"kappa": row.kappa}
        one = fedstat.split(w, method=row.method, tau=0.3, **options)
        assert shared.tolist() == one.shared.tolist()
        assert row.n_shared == one.shared.sum()
        assert row.method == "icc" or (row.n_factors, row.converged) == (one.factors.n_factors, one.factors.converged)
    assert found.units.tolist() == list("abcdefgh")
    assert found.conclusion[3] == "constant"


def test_the_summary_counts_what_the_table_holds():
    found = fedstat.split_map(W, kappas=KAPPAS, methods=("pc", "leverage", "icc"))
    x, p = found.glance().iloc[0], found.shared.mean(0)
    assert (x["n_shared"], x["n_personal"], x["n_depends"]) == (
        (p == 1).sum(),
        (p == 0).sum(),
        ((p > 0) & (p < 1)).sum(),
    )
    pairs = [adjusted_rand_score(a, b) for i, a in enumerate(found.shared) for b in found.shared[i + 1 :]]
    assert x["ari_median"] == pytest.approx(np.median(pairs))
    assert x["ari_min"] == pytest.approx(min(pairs))
    long = found.augment()
    assert long.shape == (7 * 8, 4)
    assert (long["group"] == "shared").sum() == found.shared.sum()
    assert repr(found).splitlines()[:2] == [
        "Split of 8 units under 7 specifications (tau = 0.5)",
        "  pc, leverage at kappa 0.5, 0.75, 0.95; icc",
    ]


def test_what_cannot_be_asked_is_said():
    with pytest.raises(ValueError, match="method must be one of"):
        fedstat.split_map(W, methods=("pa", "mle"))
    with pytest.warns(UserWarning, match="client"), pytest.raises(ValueError, match="at least 2 clients"):
        fedstat.split_map(W[:1])


def test_layers_are_mapped_one_by_one_and_less_their_start():
    how = {"kappas": (0.3, 0.5), "methods": ("pc", "icc")}
    found = fedstat.split_map([{"fc1.weight": w, "head.weight": w[:2, :8]} for w in W.values], **how)
    assert isinstance(found, fedstat.results.LayerResults)
    assert list(found.skipped_layers) == ["head"]
    np.testing.assert_array_equal(found["fc1"].shared, fedstat.split_map(W, **how).shared)
    start = np.random.default_rng(5).normal(size=W.shape[1:])
    moved = fedstat.split_map(W.values + start, baseline=start, **how).shared
    np.testing.assert_array_equal(moved, fedstat.split_map(W.values, **how).shared)
