"""effective_rank: of one layer and of a run, what is taken off, and intervals over clients."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import xarray as xr

import fedstat
from fedstat.stats.eigenvalues import effective_rank as of_matrices

RNG = np.random.default_rng(0)
SIGMA = RNG.normal(size=(6, 9)).astype(np.float32)
BA = {2: RNG.normal(size=(5, 6, 1)) @ RNG.normal(size=(5, 1, 9)), 4: RNG.normal(size=(5, 6, 2)) @ np.ones((5, 2, 9))}
DIMS = ("checkpoint", "client", "unit", "weight")


def run() -> xr.DataTree:
    """A store of a network W = σ + BA with one composed layer, kept after rounds 2 and 4."""
    coords = {"checkpoint": [2, 4]}
    w = xr.DataArray(np.stack([SIGMA + BA[2], SIGMA + BA[4]]), coords, DIMS)
    sigma = np.broadcast_to(SIGMA, (2, 2, 5, 6, 9)).copy()
    sigma[:, 0] = np.nan  # trained: nobody was active
    factors = xr.DataArray(sigma, coords | {"stage": ["trained", "aggregated"]}, ("checkpoint", "stage", *DIMS[1:]))
    groups = {"weights/fc1": xr.Dataset({"w": w}), "weights/fc2": xr.Dataset({"w": w[:, :, :2]})}
    return xr.DataTree.from_dict(groups | {"parameters/fc1": xr.Dataset({"w": factors})})


def test_without_the_shared_factor_the_rank_is_that_of_the_personal_one():
    found = fedstat.effective_rank(run(), baseline="weight")
    rank = found.rank["rank"]
    assert rank.dims == ("layer", "checkpoint", "client")
    assert rank["layer"].values.tolist() == ["fc1"]
    np.testing.assert_allclose(rank.sel(layer="fc1"), [of_matrices(BA[2]), of_matrices(BA[4])], rtol=1e-6)
    np.testing.assert_allclose(rank.sel(checkpoint=2), 1, rtol=1e-6)
    assert "fc1, round 2  1.00 (no CI: equal in all 5 clients); maximum 6" in repr(found)


def test_layers_stand_in_the_order_of_the_network():
    made = run()
    made["weights"].children = dict(reversed([*made["weights"].children.items()]))
    assert fedstat.effective_rank(made).rank["layer"].values.tolist() == ["fc2", "fc1"]


def test_intervals_are_students_over_clients():
    found = fedstat.effective_rank(run(), level=0.9)
    assert found.rank["largest"].values.tolist() == [6, 2]
    own = of_matrices(BA[2] - BA[2].mean(0))
    row = found.tidy().set_index(["term", "checkpoint"]).loc[("fc1", 2)]
    np.testing.assert_allclose(row["estimate"], own.mean(), rtol=1e-6)
    low, high = scipy.stats.t.interval(0.9, 4, own.mean(), scipy.stats.sem(own))
    np.testing.assert_allclose([row["conf_low"], row["conf_high"]], [low, high], rtol=1e-5)
    assert len(found.augment()) == 2 * 2 * 5
    alike = found.tidy().set_index(["term", "checkpoint"]).loc[("fc1", 4)]  # of rank 1 in all clients
    assert np.isnan(alike[["std_error", "conf_low", "conf_high"]].astype(float)).all()


def test_two_clients_are_enough():
    w = BA[2][:2]
    np.testing.assert_allclose(fedstat.effective_rank(w).rank["rank"].values[0], of_matrices(w - w.mean(0)), rtol=1e-6)


def test_units_that_are_shared_are_nothing_personal():
    w = np.float32(RNG.normal(size=(7, 6, 9)))
    w[:, 2:] = w[0, 2:]
    found = fedstat.effective_rank(w).rank["rank"].values[0]
    np.testing.assert_allclose(found, of_matrices((w - w.astype(float).mean(0))[:, :2]), rtol=1e-12)
    w[:] = w[0]
    alike = fedstat.effective_rank(w)
    assert np.isnan(alike.rank["rank"]).all()
    assert "7 undefined: weights equal the baseline" in repr(alike)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: fedstat.effective_rank(run(), baseline="mu"),
            "baseline='mu' needs a factor of this name, but no layer.*probe='para",
        ),
        (lambda: fedstat.effective_rank(BA[2], baseline="mu"), "baseline='mu' needs a run, but got weights"),
        (lambda: fedstat.effective_rank(BA[2][:1]), "at least 2 clients, but got 1"),
        (lambda: fedstat.effective_rank(BA[2][0]), r"must be \(client, unit, weight\.\.\.\) .* but got shape \(6, 9\)"),
        (
            lambda: fedstat.effective_rank(np.where(np.arange(5)[:, None, None] == 3, np.nan, BA[2])),
            r"weights of client\(s\) 3 in layer 'weights' hold NaN",
        ),
    ],
)
def test_what_has_no_rank_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
