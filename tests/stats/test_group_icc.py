"""Agreement within and between groups of clients, against sums over all pairs of clients."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import scipy
import torch
import xarray as xr
from numpy.testing import assert_allclose

import fedstat
from fedstat.results.group_icc import PAIRS

GROUPS = (np.array([0, 0, 1, 1, 1, 2, 2, 2, 2]), np.array([2, 0, 1, 1, 0, 2, 2, 3, 4, 4, 4, 3, 5]))


def sample(groups: np.ndarray, seed: int = 0, *, group: float = 1.0, common: float = 1.0) -> np.ndarray:
    """Weights (client, unit, weight) with a common profile, profiles of groups, and offsets of clients and units."""
    rng, k = np.random.default_rng(seed), len(groups)
    profiles = common * rng.normal(size=(1, 5, 7)) + group * rng.normal(size=(groups.max() + 1, 5, 7))[groups]
    return profiles + rng.normal(size=(k, 5, 7)) + rng.normal(size=(k, 1, 1)) + 3 * rng.normal(size=(1, 5, 1))


def by_pairs(x: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """One minus agreement within and between groups of one unit (client, weight), from all pairs; groups are equal."""
    n, mean = x.shape[1], x.mean(axis=1)
    x = x - mean[:, None]
    members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    squares = np.mean([np.mean([x[c] @ x[c] for c in group]) for group in members])
    within = [[(x[a] - x[b]) @ (x[a] - x[b]) / 2 for a, b in permutations(g, 2)] for g in members if len(g) > 1]
    pairs = [(a, b) for a, b in permutations(members, 2)]
    products = np.mean([np.mean([x[a] @ x[b] for a in one for b in other]) for one, other in pairs])
    gaps = np.mean([np.mean([(mean[a] - mean[b]) ** 2 / 2 for a in one for b in other]) for one, other in pairs])
    remainder = np.mean([*map(np.mean, within)])
    offsets = gaps - (squares - products) / (n - 1) / n
    total = squares / (n - 1) + offsets
    return (remainder / (n - 1) + offsets) / total, ((squares - products) / (n - 1) + offsets) / total


def expected(w: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """One minus agreement of the units and of the layer, (2, unit + 1)."""
    targets = [*w.swapaxes(0, 1), w.reshape(len(w), -1)]
    return np.transpose([by_pairs(x, groups) for x in targets])


@pytest.mark.parametrize("groups", GROUPS, ids=["3 groups", "6 groups, one of one client"])
@pytest.mark.parametrize("form", ["array", "tensor", "large"])
def test_estimates_and_jackknife_intervals_are_those_of_pairs_of_clients(groups: np.ndarray, form: str) -> None:
    w = sample(groups)
    claim = "new groups" if groups.max() > 4 else "these groups"
    given: Any = {"array": w, "tensor": torch.from_numpy(w), "large": 1e200 * w}[form]
    result = fedstat.icc(given, groups=groups, claim=claim)
    full = expected(w, groups)
    if claim == "new groups":
        keep = [groups != g for g in range(groups.max() + 1)]
        strata, most, center = np.zeros(len(keep), int), len(keep) - 1, None
    else:
        keep = [np.arange(len(groups)) != c for c in range(len(groups))]
        strata, most, center = groups, len(groups) - groups.max() - 1, -np.log(full)
    without = -np.log([expected(w[which], groups[which]) for which in keep])
    n = np.bincount(strata)[strata]
    v = ((n - 1) / n)[:, None, None] * (without - (without.mean(axis=0) if center is None else center)) ** 2
    df = np.clip(v.sum(axis=0) ** 2 / (v**2).sum(axis=0), 1, most)
    half = scipy.stats.t.ppf(0.975, df) * np.sqrt(v.sum(axis=0))
    for i, agreement in enumerate((result.agreement.within, result.agreement.between)):
        assert_allclose(agreement.icc, 1 - full[i], atol=1e-10)
        assert_allclose(agreement.conf_low, np.maximum(1 - full[i] * np.exp(half[i]), -1), atol=1e-9)
        assert_allclose(agreement.conf_high, 1 - full[i] * np.exp(-half[i]), atol=1e-9)
    assert_allclose(result.agreement.variances.sum(axis=0), 1)
    for row in result.by_group.itertuples():
        if row.n_clients > 2:
            alone = fedstat.icc(w[groups == row.group]).layer.iloc[1]
            assert_allclose(
                (row.icc, row.conf_low, row.conf_high), alone[["icc", "conf_low", "conf_high"]].astype(float), atol=1e-9
            )


def test_tests_are_sign_flips_of_clients_within_groups_and_of_whole_groups() -> None:
    """Of the layer: statistics of all sign patterns, without a profile that units have in common."""
    groups = np.repeat(np.arange(6), 2)
    w = sample(groups, group=0.0, common=0.0)[:, :2]
    w -= w.mean(axis=2, keepdims=True)
    result = fedstat.icc(w, groups=groups)
    x = w / np.sqrt(np.square(w).sum(axis=(1, 2), keepdims=True))
    rows = {"within": (x, groups), "between": (x.reshape(6, 2, 2, 7).mean(axis=1), None)}
    for name, (row, of_group) in rows.items():
        products = np.einsum("aui,bui->uab", row, row)
        a, b = np.triu_indices(len(row), 1)
        if of_group is not None:
            a, b = (i[of_group[a] == of_group[b]] for i in (a, b))
        r = products[:, a, b]
        r = (r / np.linalg.norm(r, axis=1, keepdims=True)).sum(axis=0)
        signs = 1 - 2 * (np.arange(2 ** (len(row) - 1))[:, None] >> np.arange(len(row)) & 1)
        statistics = (signs[:, a] * signs[:, b]) @ r
        agreement = getattr(result.agreement, name)
        assert_allclose(agreement.p_value[-1], (statistics >= statistics[0] - 1e-5).mean(), atol=1e-9)
        assert agreement.least_p == {"within": 2.0**-6, "between": 2.0**-5}[name]


def test_many_clients_are_averaged_within_groups() -> None:
    groups = np.repeat(np.arange(7), np.arange(20, 34, 2))
    result = fedstat.icc(sample(groups), groups=groups)
    assert result.glance()["within_p_value"].item() < 0.01
    null = fedstat.icc(sample(groups, group=0.0, common=0.0), groups=groups)
    assert null.glance()["within_p_value"].item() > 0.05


def test_blocks_of_clients_give_the_result_of_all_clients(tmp_path: Any) -> None:
    groups = GROUPS[1]
    w = xr.DataArray(sample(groups), dims=("client", "unit", "weight"), name="w")
    w.to_dataset().chunk(client=2).to_zarr(tmp_path / "w.zarr", consolidated=False)
    read = xr.open_zarr(tmp_path / "w.zarr", consolidated=False)["w"]
    lazy, whole = (fedstat.icc(x, groups=groups).tidy() for x in (read, w))
    assert_allclose(lazy[["icc", "conf_low", "p_value"]], whole[["icc", "conf_low", "p_value"]], atol=1e-9)


def test_equal_clients_and_constant_units() -> None:
    groups = GROUPS[0]
    w = np.repeat(sample(groups)[:1], len(groups), axis=0)
    w[:, 0] = 2.0
    result = fedstat.icc(w, groups=groups, claim="these groups")
    assert np.isnan(result.agreement.within.icc[0])
    assert (result.agreement.between.icc[1:] == 1).all()
    assert (result.agreement.between.conf_low[1:] == 1).all()
    assert not result.cautions()
    assert "1 constant" in repr(result)


def test_groups_change_the_answer_where_groups_agree_within_only() -> None:
    groups = np.repeat(np.arange(6), 4)
    w = sample(groups, group=2.0, common=0.0)
    w -= w.mean(axis=2, keepdims=True)
    layer = fedstat.icc(w, groups=groups).layer.set_index("pairs")
    assert layer.loc[PAIRS[0], "conf_low"] > 0.3
    assert layer.loc[PAIRS[1], "conf_low"] < 0 < layer.loc[PAIRS[1], "conf_high"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one group": ({"groups": [0] * 9}, "groups must be at least 2, .* got 1 group"),
    "groups that equal clients": ({"groups": range(9)}, "one must have at least 2 clients, but got 9 group"),
    "a client without a group": ({"groups": [*"aabbccdd", None]}, "groups must have a value for each client, .* for 8"),
    "NaN": ({"groups": [0.0, np.nan, *[1.0] * 7]}, "groups must have a value for each client, .* for 1"),
    "too few clients": ({"groups": [0, 1]}, "groups must have one value for each of the 9 clients"),
    "a client of another name": ({"groups": dict.fromkeys("abcdefghi", 0)}, "must have one value for each client"),
    "few groups": ({"groups": GROUPS[0]}, "new groups needs at least 5 groups, but got 3 .0, 1, 2.. Use claim='these"),
    "a group of one client": (
        {"groups": [0, *[1] * 8], "claim": "these groups"}, "at least 2 clients in each group, but there is 1 in 0"
    ),
    "another claim": ({"groups": GROUPS[0], "claim": "all"}, "claim must be one of 'these groups', 'new groups'"),
    "a claim alone": ({"claim": "new groups"}, "claim has no effect without groups"),
    "a bootstrap": ({"groups": GROUPS[0], "claim": "these groups", "n_boot": 9}, "n_boot has no effect with groups"),
    "F": ({"groups": GROUPS[0], "claim": "these groups", "inference": "F"}, "inference has no effect with groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_groups_are_refused_by_name(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        fedstat.icc(sample(GROUPS[0]), **options)


@pytest.mark.parametrize("verb", ["icc", "bootstrap", "jackknife", "permutation_test"])
def test_groups_that_are_clusters_of_weights_are_marked(verb: str) -> None:
    w = sample(GROUPS[1])
    clusters = fedstat.client_clusters(w, n_clusters=5)
    options = {"icc": {}, "bootstrap": {"n_boot": 3}, "permutation_test": {"n_permutations": 3}}.get(verb, {})
    options |= {} if verb == "icc" else {"n_factors": 2, "method": "pc"}
    titles = [caution.title for caution in getattr(fedstat, verb)(w, groups=clusters, **options).cautions()]
    assert "Groups found in weights" in titles
