"""Results beside the user's own data: the join is pandas' and xarray's, and what does not fit is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from layers import weights

import fedstat

UNITS = [f"u{j}" for j in range(8)]
W = xr.DataArray(weights(), dims=("client", "unit", "weight"), coords={"unit": UNITS})
SPLIT = fedstat.split(W, n_factors=2, method="pc")
ADDED = ["group", "communality", "icc", "margin"]


def test_without_data_there_is_a_row_per_unit() -> None:
    table = SPLIT.augment()
    assert list(table) == ["unit", *ADDED]
    np.testing.assert_array_equal(table["communality"], SPLIT.communality)
    np.testing.assert_array_equal(table["margin"], SPLIT.communality - SPLIT.threshold)
    assert list(fedstat.split(W, method="icc").augment()) == ["unit", "group", "icc", "margin"]


@pytest.mark.parametrize("where", ["unit", "term", "index"])
def test_a_table_keeps_its_rows_and_order_as_pandas_merges(where: str) -> None:
    mine = pd.DataFrame({"unit": ["u5", "u0", "u5", "u7"], "note": list("abcd")})
    expected = mine.merge(SPLIT.augment(), on="unit", how="left", validate="m:1")
    data = mine.set_index("unit") if where == "index" else mine.rename(columns={"unit": where})
    found = SPLIT.augment(data)
    pd.testing.assert_index_equal(found.index, data.index)
    pd.testing.assert_frame_equal(found.reset_index(drop=True)[["note", *ADDED]], expected[["note", *ADDED]])
    assert "group" not in data


def test_a_row_for_each_unit_needs_no_labels() -> None:
    found = SPLIT.augment(pd.DataFrame({"norm": range(8)}))
    assert found["group"].tolist() == SPLIT.group.tolist()
    positions = fedstat.split(W.values, n_factors=2, method="pc").augment(pd.DataFrame({"unit": UNITS[::-1]}))
    assert positions["communality"].tolist() == SPLIT.communality.tolist(), "labels that the result never saw"


def test_weights_become_a_dataset_with_the_units_in_their_own_order() -> None:
    data = W.isel(unit=slice(None, None, -1)).to_dataset(name="w").assign(b=("unit", np.arange(8.0)))
    found = SPLIT.augment(data)
    assert list(found) == ["w", "b", *ADDED]
    np.testing.assert_array_equal(found["communality"], SPLIT.communality[::-1])
    np.testing.assert_array_equal(found["communality"].sel(unit=UNITS), SPLIT.communality)
    xr.testing.assert_identical(found[["w", "b"]], data)
    for plain in (W.values, torch.from_numpy(W.values), W.rename("weights").drop_vars("unit")):
        again = SPLIT.augment(plain)
        np.testing.assert_array_equal(again["group"], SPLIT.group)
        np.testing.assert_array_equal(again["weights"], W)
    tree = xr.DataTree.from_dict({"/weights/fc1": data})
    xr.testing.assert_identical(SPLIT.augment(tree["weights/fc1"]), found)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"those of the result, 'u0', 'u1', 'u2' and 5 more, but got 'v1'"):
        SPLIT.augment(pd.DataFrame({"unit": ["u0", "v1"]}))
    with pytest.raises(ValueError, match="a row for each of the 8, but got 3 rows"):
        SPLIT.augment(pd.DataFrame({"note": list("abc")}))
    with pytest.raises(ValueError, match="must not have the names that are added, but has group"):
        SPLIT.augment(pd.DataFrame({"unit": ["u0"], "group": ["mine"]}))
    with pytest.raises(ValueError, match="must have the dim 'unit'"):
        SPLIT.augment(W.rename(unit="neuron"))
    with pytest.raises(TypeError, match=r"data must be a DataFrame with a column 'unit'.*but got dict"):
        SPLIT.augment({"u0": 1})


def test_the_other_results_of_units_and_clients_join_alike() -> None:
    mine = pd.DataFrame({"unit": ["u6", "u1"]})
    drawn = fedstat.bootstrap(W, n_factors=2, method="pc", n_boot=5)
    test = fedstat.permutation_test(W, n_factors=2, method="pc", n_permutations=5)
    alike = fedstat.icc(W)
    for result, column in ((drawn, "prop_shared"), (test, "p_value"), (alike, "var_clients")):
        whole = result.augment().set_index("unit")
        assert result.augment(mine)[column].tolist() == whole.loc[["u6", "u1"], column].tolist()
    clusters = fedstat.client_clusters(W, n_clusters=2, n_subsamples=2)
    found = clusters.augment(pd.DataFrame({"client": [3, 0], "hospital": ["x", "y"]}))
    assert found["cluster"].tolist() == clusters.cluster[[3, 0]].tolist()


def test_scores_keep_the_labels_of_their_rows() -> None:
    z = fedstat.layer_matrix(W)
    fit = fedstat.fa(z, n_factors=2, method="pc")
    scores = fit.augment(z)
    assert scores.index.names == ["client", "weight"]
    pd.testing.assert_frame_equal(scores.reset_index(drop=True), fit.augment(z.values))
    pd.testing.assert_frame_equal(fit.augment(z.transpose("unit", "row")), scores)
    frame = pd.DataFrame(z.values, index=[f"r{i}" for i in range(len(z))], columns=UNITS)
    assert fit.augment(frame).index.tolist() == frame.index.tolist()


def test_scores_of_new_rows_are_those_that_the_fitted_sample_gives() -> None:
    z = fedstat.layer_matrix(W).values * np.exp(np.arange(8)) + np.arange(8)
    fit = fedstat.fa(z, n_factors=2, method="pc")
    np.testing.assert_allclose((z - fit.center) / fit.scale, (z - z.mean(0)) / z.std(0), atol=1e-12)
    for rows in ([3], [5, 7, 2], slice(None, 40)):
        np.testing.assert_allclose(fit.augment(z[rows]), fit.augment(z).iloc[rows], atol=1e-12)
    new = z[:1] + 1
    by_hand = (new - z.mean(0)) / z.std(0) @ np.linalg.inv(np.corrcoef(z.T)) @ fit.loadings
    np.testing.assert_allclose(fit.augment(new), by_hand, atol=1e-10)


@pytest.mark.parametrize(
    "fit",
    [
        lambda w: fedstat.fa(w, n_factors=2),
        lambda w: fedstat.split(w, n_factors=2).factors,
        lambda w: fedstat.bootstrap(w, n_factors=2, n_boot=2).split.factors,
        lambda w: fedstat.update(fedstat.fa(w, n_factors=2), w),
        lambda w: fedstat.fa(torch.as_tensor(w), n_factors=2, rotation="oblimin"),
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e180])  # whose squares are beyond float64
def test_every_fit_of_weights_knows_by_what_it_standardised(fit: Callable[..., Any], size: float) -> None:
    w = size * (W.values + 3)
    w[:, 4] = 0.25 * size  # a dead unit
    z = fedstat.layer_matrix(w)
    found = fit(w)
    np.testing.assert_allclose(found.center, z.mean(0), rtol=1e-12)
    np.testing.assert_allclose(np.delete(found.scale / size, 4), np.delete((z / size).std(0), 4), rtol=1e-12)
    assert np.isfinite(found.augment(z[:1])).all(axis=None)


def test_a_fit_of_correlations_needs_the_rows_behind_them() -> None:
    z = fedstat.layer_matrix(W).values
    r = np.corrcoef(z.T)
    alone, whole = fedstat.fa(r, corr=True, n_factors=2), fedstat.fa(z, n_factors=2)
    with pytest.raises(ValueError, match=r"made from correlations, .* Pass reference="):
        alone.augment(z[:1])
    with pytest.raises(ValueError, match=r"must not be passed: .* Remove reference"):
        whole.augment(z[:1], reference=z)
    np.testing.assert_allclose(alone.augment(z[:1], reference=z), whole.augment(z[:1]), atol=1e-10)
