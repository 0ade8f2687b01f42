"""client_clusters: labels, tests and interval of the verb, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from sklearn.metrics import adjusted_rand_score

import fedstat

RNG = np.random.default_rng(0)
DOMAIN = np.repeat(["a", "b", "c"], 4)
V = xr.DataArray(
    np.repeat(RNG.normal(size=(3, 5, 4)), 4, axis=0) + 1.5 * RNG.normal(size=(12, 5, 4)),
    dims=("client", "unit", "weight"), coords={"client": np.arange(100, 112)},
)  # fmt: skip
QUICK = {"n_clusters": 3, "n_permutations": 99, "n_subsamples": 20}


def test_clusters_are_compared_with_the_groups():
    found = fedstat.client_clusters(V, groups=DOMAIN, **QUICK)
    assert found.ari == adjusted_rand_score(found.cluster, DOMAIN)
    assert 0 < found.ari < 1
    same = fedstat.client_clusters(V.transpose("unit", "client", "weight"), groups=DOMAIN, **QUICK)
    assert same.to_dict() == found.to_dict()
    np.testing.assert_array_equal(fedstat.client_clusters(torch.from_numpy(V.values), **QUICK).cluster, found.cluster)
    assert found.conf_low < found.ari <= found.conf_high <= 1
    assert (found.left_out, found.n_values) == (6, 20)
    data = found.to_dataset()
    assert data["similarity"].sel(client=103, other=103) == 1
    assert data["group"].values.tolist() == DOMAIN.tolist()


def test_without_the_mean_the_clients_own_is_left():
    common = np.float32(RNG.normal(size=(1, 5, 4)) * 100)
    hidden = V.astype("float32") + common
    found = fedstat.client_clusters(hidden, groups=DOMAIN, baseline="mean", **QUICK)
    x = hidden.values.astype(float).reshape(12, -1)
    x -= x.mean(0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(found.similarity, x @ x.T, atol=1e-12)
    assert fedstat.client_clusters(hidden, groups=DOMAIN, **QUICK).contrast < 1e-3 < found.contrast
    assert "Vectors minus their mean over clients" in repr(found)


@pytest.mark.parametrize("baseline", [None, "mean"])
def test_what_is_shared_whole_is_not_clustered(baseline):
    """Neither by rounding (in single precision the mean of equal numbers is another number) nor by clients' order."""
    equal = V.astype("float32") * 0 + np.float32(RNG.normal(size=(5, 4)))
    assert (equal - equal.mean("client")).any()
    with pytest.raises(ValueError, match=r"all clients are identical, as after averaging.*stage='trained'"):
        fedstat.client_clusters(equal, baseline=baseline, **QUICK)


def test_clients_of_a_run_are_clustered_by_layer():
    run = xr.DataTree.from_dict(
        {"weights/fc1": xr.Dataset({"w": V}), "weights/fc2": xr.Dataset({"w": V[:, ::-1] ** 3})}
    )
    found = fedstat.client_clusters(run, groups=DOMAIN, layer="*", **QUICK)
    assert list(found) == ["fc1", "fc2"]
    assert repr(found["fc2"]) == repr(fedstat.client_clusters(V[:, ::-1] ** 3, groups=DOMAIN, **QUICK))
    assert repr(fedstat.client_clusters(run, layer="fc1", **QUICK)) == repr(fedstat.client_clusters(V, **QUICK))


def test_what_it_prints_and_its_tables():
    found = fedstat.client_clusters(V, groups=DOMAIN, **QUICK)
    assert "no CI" not in repr(found)
    apart = np.repeat(np.eye(3), 8, axis=0) + 0.01 * RNG.normal(size=(24, 3))
    clear = fedstat.client_clusters(apart, groups=np.repeat([0, 1, 2], 8), **QUICK)
    assert clear.ari == 1
    assert np.isnan([clear.conf_low, clear.conf_high]).all()
    assert "ARI with the clusters: 1.00, no CI: equal in all subsamples" in repr(clear)
    few = fedstat.client_clusters(V[2:8], groups=DOMAIN[2:8], **QUICK)
    assert few.exact
    assert "all 15 arrangements" in repr(few)
    table = found.tidy()
    same = found.cluster == found.cluster[5]
    own = found.similarity[5][same & (np.arange(12) != 5)].mean()
    np.testing.assert_allclose(table["within"][5], own)
    others = [found.similarity[5][found.cluster == k].mean() for k in {1, 2, 3} - {found.cluster[5]}]
    np.testing.assert_allclose(table["nearest"][5], max(others))
    alone = fedstat.client_clusters(V, n_clusters=12, n_subsamples=5)
    assert alone.tidy()["within"].isna().all()
    assert "Known groups" not in repr(alone)
    assert np.isnan(alone.ari)


def changed(client, value):
    return V.where(V["client"] != client, value)


@pytest.mark.parametrize(
    ("vectors", "options", "says"),
    [
        (V, {"n_clusters": 13}, "n_clusters must be at most the number of clients, 12, but got 13"),
        (changed(105, 0.0), {}, r"vectors of client\(s\) 105 are zero, so their cosine"),
        (changed(107, np.nan), {}, r"vectors of client\(s\) 107 hold NaN.*not selected are NaN: drop them"),
        (V, {"groups": DOMAIN[:9]}, r"one value for each of the 12 clients, shape \(12,\), but got \(9,\)"),
        (V, {"groups": dict.fromkeys(range(100, 110), "a")}, "one value for each client, but has none for 110, 111"),
        (V, {"groups": [*[0.0, 1.0] * 5, 1.0, np.nan]}, "a value for each client, but it is missing for 111"),
        (V, {"groups": ["a"] * 12}, "at least 2, and one must have at least 2 clients, but got 1 group.s. of 12"),
        (V, {"groups": list(range(12))}, "but got 12 group.s. of 12 clients"),
        (V.expand_dims(replicate=2), {}, r"one vector per client, but .*Select one replicate, as in .isel\(rep"),
        (V.rename(client="k"), {}, r"must have dim\(s\) \['client'\]"),
        (V, {"baseline": "v"}, "baseline must be 'common', .* or a path that exists, but got 'v'"),
        (V[:1], {}, r"at least 2 clients, but got shape \(1, 5, 4\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_clustered_is_named(vectors, options, says):
    with pytest.raises(ValueError, match=says):
        fedstat.client_clusters(vectors, **{**QUICK, "n_clusters": 1, **options})
