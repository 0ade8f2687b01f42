"""The verb: kinds and orders of input, labels, lazy weights, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import fedstat
from fedstat.labelled import agreement
from fedstat.stats import reml
from fedstat.stats import variance_components as arrays

METHODS = ("moments", "reml")
SIZES = np.random.default_rng(3).integers(20, 200, 9)


def weights(seed: int = 0) -> xr.DataArray:
    """9 clients, 2 replicates, 6 units of 4 x 5 weights; unit c is dead, units e and f are clients' own."""
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(9, 1, 6, 4, 5)) * np.array([0, 0.3, 0, 1, 3, 3])[:, None, None]
    w = own + rng.normal(size=(9, 2, 6, 4, 5))
    w[:, :, 2] = 0.5
    labels = {"client": [f"k{c}" for c in range(9)], "unit": list("abcdef")}
    return xr.DataArray(w, dims=("client", "replicate", "unit", "row", "column"), coords=labels)


@pytest.mark.parametrize("method", METHODS)
def test_units_and_layer_are_those_of_the_array_functions(method: Any) -> None:
    w = weights()
    found = fedstat.variance_components(w, method=method, level=0.9)
    flat = w.values.reshape(9, 2, 6, 20)
    if method == "reml":
        units, layer = (reml.components(reml.gram(w), level=0.9) for w in (flat, flat.reshape(9, 2, 1, -1)))
    else:
        units, layer = (arrays.components(p, level=0.9) for p in (arrays.parts(flat), arrays.parts(flat).pooled()))
    for ours, theirs in ((found.components, units), (found.layer_components, layer)):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert found.units.tolist() == list("abcdef")
    assert (found.n_clients, found.n_replicates, found.n_weights, found.method) == (9, 2, 20, method)


@pytest.mark.parametrize(
    ("options", "block"),
    [({"method": method}, 2 * weights().nbytes // 6) for method in METHODS]
    + [({"groups": np.repeat(["north", "south"], [4, 5]), "claim": "these groups"}, 2 * 9**2)],
)
def test_lazy_weights_are_read_unit_by_unit(
    options: dict[str, Any], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weights().drop_vars(["client", "unit"])
    w.rename("w").to_dataset().to_zarr(tmp_path / "w.zarr", consolidated=False)
    lazy = xr.open_zarr(tmp_path / "w.zarr", chunks=None, consolidated=False)["w"]
    expected = fedstat.variance_components(w, **options)
    monkeypatch.setattr(agreement, "_BLOCK", block)
    monkeypatch.setattr(fedstat.labelled.layer, "_BLOCK", block)  # not read at once
    for given in (lazy, w, w.values):
        found = fedstat.variance_components(given, **options)
        pd.testing.assert_frame_equal(found.tidy(), expected.tidy(), rtol=1e-5)
        pd.testing.assert_frame_equal(found.layer, expected.layer, rtol=1e-5)


def test_sizes_of_replicates_add_up_to_those_of_clients() -> None:
    w = weights()
    plain = fedstat.variance_components(w, covariate=SIZES, sizes=SIZES, method="reml")
    assert plain.adjusted
    halves = xr.DataArray(np.stack([SIZES, SIZES]) / 2, dims=("replicate", "client"))
    by_half = fedstat.variance_components(w, covariate=SIZES, sizes=halves, method="reml")
    pd.testing.assert_frame_equal(by_half.tidy(), plain.tidy())


def test_a_covariate_that_drives_the_weights_is_no_share_of_clients() -> None:
    w = weights()[:, :, :2]
    driven = w + 0.05 * xr.DataArray(SIZES, dims="client")
    assert fedstat.variance_components(driven).layer["reliability"][0] > 0.9
    found = fedstat.variance_components(driven, covariate=SIZES)
    pd.testing.assert_frame_equal(found.tidy(), fedstat.variance_components(w, covariate=SIZES).tidy(), rtol=1e-6)


def test_icc_points_to_the_verb_for_replicates() -> None:
    with pytest.raises(ValueError, match=r"weights have a dim replicate.*fedstat\.variance_components"):
        fedstat.icc(weights())
    assert fedstat.icc(weights().isel(replicate=0)).n_clients == 9


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (weights()[0], {}, r"must have dim\(s\) \['client'\]"),
    (weights()[:, 0], {}, "must have a dim replicate, of several models of every client"),
    (weights()[:1], {}, "at least 3 clients, but got 1"),
    (weights()[:, :1], {}, "at least 2 per client, but got 1"),
    (weights()[:, :, :0], {}, "at least one of each"),
    (weights().values[..., 0, 0], {}, r"Pass biases as one weight per unit: w\[\.\.\., None\]"),
    (weights(), {"method": "moment"}, "Did you mean 'moments'"),
    (weights(), {"sizes": SIZES}, "sizes has no effect with method='moments'"),
    (weights(), {"covariate": SIZES[1:]}, "covariate must have one value for each of the 9 clients"),
    (weights().where(weights()["unit"] != "e"), {}, "weights of client k0 hold NaN or infinite values, first .* e"),
    (weights().where((weights()["client"] != "k7") | (weights()["unit"] != "b")), {}, "client k7 .* b"),
    (weights().isel(replicate=[0, 0]), {}, r"identical bit for bit in all clients in 5 unit\(s\), first in unit a"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("w", "how", "message"), BAD, ids=[m[:25] for *_, m in BAD])
def test_what_is_refused_is_named(w: Any, how: dict[str, Any], message: str, method: Any) -> None:
    if "sizes" in how and method == "reml":
        return
    with pytest.raises(ValueError, match=message):
        fedstat.variance_components(w, **{"method": method} | how)


def test_copied_replicates_of_a_client_are_said() -> None:
    w = np.random.default_rng(0).normal(size=(6, 2, 3, 20))
    w[[1, 4], 1] = w[[1, 4], 0]
    with pytest.warns(
        UserWarning, match=r"Replicates of client\(s\) 1, 4 are identical, which biases reliability upwards"
    ):
        fedstat.variance_components(w)


def test_nested_lists_are_taken() -> None:
    w = np.random.default_rng(0).normal(size=(6, 2, 3, 20))
    want = fedstat.variance_components(w).reliability
    np.testing.assert_allclose(fedstat.variance_components([list(client) for client in w]).reliability, want)
    ragged = [list(client) for client in w]
    ragged[2][1] = ragged[2][1][:2]
    with pytest.raises(ValueError, match=r"shape \(3, 20\), but client 2 has 2, and replicate 1 has \(2, 20\)"):
        fedstat.variance_components(ragged)


@pytest.mark.parametrize("verb", ["split", "bootstrap", "layer_matrix"])
def test_verbs_of_one_model_a_client_refuse_replicates(verb: str) -> None:
    w = xr.DataArray(
        np.random.default_rng(0).normal(size=(6, 2, 3, 20)), dims=("client", "replicate", "unit", "weight")
    )
    with pytest.raises(ValueError, match="have a dim replicate"):
        getattr(fedstat, verb)(w)


@pytest.mark.parametrize("method", ["moments", "reml"])
def test_unequal_noise_of_clients_is_cautioned_unless_sizes_explain_it(method: Any) -> None:
    rng = np.random.default_rng(0)
    w, sizes = rng.normal(size=(12, 2, 16, 40)), np.resize([5, 50], 12)
    assert not fedstat.variance_components(w, method=method).cautions()
    found = fedstat.variance_components(w / np.sqrt(sizes)[:, None, None, None], method=method)
    assert [one.title for one in found.cautions()] == ["Unequal training noise"]
    assert f"(CV of its variance {found.glance()['noise_cv'][0]:.1f}, median over units)" in " ".join(
        repr(found).split()
    )
    if method == "reml":
        known = fedstat.variance_components(w / np.sqrt(sizes)[:, None, None, None], method=method, sizes=sizes)
        assert known.noise_cv < 0.4
        assert not known.cautions()
