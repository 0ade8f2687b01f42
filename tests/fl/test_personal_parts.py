"""What the statistics find in the own parts of the four methods that divide networks in different ways."""

from __future__ import annotations

import numpy as np
import pytest
from algorithm_jobs import SAMPLES, SIZES, dataset

import fedstat
from fedstat.fl import algorithms, client_weights, nets, train
from fedstat.stats.eigenvalues import effective_rank as of_matrices

METHODS = {
    "fedfac-dynamic": {"layers": ["fc1"], "kappa": 0.7},
    "factorized-fl-alpha": {},
    "factorized-fl-beta": {},
    "feddecomp": {"rank_linear": 0.5},
    "fedcp": {},
}
FACTORS = ("left", "right")


@pytest.fixture(scope="module")
def runs():
    """One run of each, with its factors."""
    return {
        name: train(
            dataset(SAMPLES), nets.mlp(SIZES), algorithms.named(name, **settings), rounds=2, local_epochs=2,
            batch_size=5, seed=4, checkpoints=[1], probe="parameters",
        )
        for name, settings in METHODS.items()
    }  # fmt: skip


def test_the_rank_of_what_feddecomp_keeps_is_that_of_ba_and_not_of_roundings(runs):
    run = runs["feddecomp"]
    found = fedstat.effective_rank(run, baseline="weight").rank["rank"]
    for layer in ("fc1", "fc2"):
        for at in (1, 2):
            left, right = (client_weights(run, layer, n, checkpoint=at).to_numpy().astype(float) for n in FACTORS)
            np.testing.assert_allclose(found.sel(layer=layer, checkpoint=at), of_matrices(left @ right), rtol=1e-4)
        most = left.shape[-1]
        assert most == max(1, min(client_weights(run, layer).shape[1:]) // 2)
        assert (found.sel(layer=layer) < most * (1 + 1e-4)).all()
    assert found.sel(layer="fc1").max() > 1.5


@pytest.mark.parametrize("name", ["factorized-fl-alpha", "factorized-fl-beta"])
def test_weights_less_mu_have_rank_one(runs, name):
    found = fedstat.effective_rank(runs[name], baseline="mu").rank["rank"]
    np.testing.assert_allclose(found, 1, atol=1e-3)


def test_only_the_own_units_of_fedfac_count(runs):
    run = runs["fedfac-dynamic"]
    own = ~run["split/fc1/shared"][-1].to_numpy()
    w = client_weights(run, "fc1").to_numpy().astype(float)[:, own]
    found = fedstat.effective_rank(run).rank["rank"].isel(checkpoint=-1)
    np.testing.assert_allclose(found.sel(layer="fc1"), of_matrices(w - w.mean(0)))
    assert np.isnan(found.sel(layer="fc2")).all()


def test_only_the_own_head_of_fedcp_has_a_rank_and_its_policy_is_a_vector(runs):
    run = runs["fedcp"]
    found = fedstat.effective_rank(run).rank["rank"].isel(checkpoint=-1)
    assert found["layer"].values[np.isfinite(found).all("client").to_numpy()].tolist() == ["fc2"]
    share = client_weights(run, "client", "share")
    assert share.dims == ("client", "unit")
    np.testing.assert_allclose(share.mean("unit"), run["measures/personalisation"][-1], rtol=1e-5)
    assert fedstat.client_clusters(share, n_clusters=2, baseline="mean", n_subsamples=5).n_values == share.sizes["unit"]


def test_factors_of_the_methods_are_clustered_and_analysed_as_they_come(runs):
    for name in ("factorized-fl-alpha", "factorized-fl-beta"):
        v = client_weights(runs[name], "fc1", "v", stage="trained")
        assert v.dims == ("client", "v_row", "v_column")
        own = fedstat.client_clusters(v, n_clusters=2, n_subsamples=5).similarity
        np.testing.assert_allclose(own, runs[name]["measures/similarity"][-1], atol=1e-6)
        u = client_weights(runs[name], "fc1", "u", stage="trained")
        assert fedstat.fa(u.isel(u_column=0).rename(u_row="unit"), n_factors=1, method="pc").communality.shape == (
            u.sizes["u_row"],
        )
    left = client_weights(runs["feddecomp"], "fc1", "left")
    assert left.dims == ("client", "unit", "left_column")
    assert fedstat.fa(fedstat.layer_matrix(left), n_factors=1, method="pc").communality.shape == (left.sizes["unit"],)
