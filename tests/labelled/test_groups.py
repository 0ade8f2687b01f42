"""Groups of clients in ``variance_components`` and ``split``: labels, claims, prints, plots, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from statsmodels.stats.multitest import multipletests

import fedstat
from fedstat import plot
from fedstat.stats import nested, reml
from fedstat.stats import variance_components as one_way

CLIENTS = [f"k{c}" for c in range(14)]
THREE = np.repeat(["north", "south", "west"], [5, 3, 6])
SIX = np.repeat(list("abcdef"), [2, 2, 3, 2, 2, 3])
THESE: Any = "these groups"


def weights(
    groups: np.ndarray = THREE, *, of_groups: float = 0.7, of_clients: tuple[float, ...] = (0, 0, 1, 2, 3, 3)
) -> Any:
    """6 units of 4 x 5 weights; unit c is constant."""
    rng = np.random.default_rng(0)
    names, codes = np.unique(groups, return_inverse=True)
    between = of_groups * rng.normal(size=(len(names), 1, 6, 4, 5))[codes]
    clients = rng.normal(size=(14, 1, 6, 4, 5)) * np.array(of_clients)[:, None, None]
    w = between + clients + rng.normal(size=(14, 2, 6, 4, 5))
    w[:, :, 2] = 0.5
    labels = {"client": CLIENTS, "unit": list("abcdef")}
    return xr.DataArray(w, dims=("client", "replicate", "unit", "row", "column"), coords=labels)


@pytest.mark.parametrize("method", ["moments", "reml"])
@pytest.mark.parametrize(("groups", "claim"), [(THREE, "these groups"), (SIX, "new groups")])
def test_units_and_layer_are_those_of_the_array_functions(groups: np.ndarray, claim: Any, method: Any) -> None:
    w = weights(groups)
    found = fedstat.variance_components(w, groups=groups, claim=claim, method=method, level=0.9, seed=3)
    sums, codes = reml.gram(w.values.reshape(14, 2, 6, 20)), np.unique(groups, return_inverse=True)[1]
    options: Any = {"claim": claim, "method": method, "level": 0.9, "seed": 3}
    units, layer = (nested.components(g, codes, **options) for g in (sums, sums.pooled()))
    ours = (found.components, found.group_components), (found.layer_components, found.layer_group_components)
    for theirs, mine in zip((units, layer), ours, strict=True):
        for a, b in zip(theirs, mine, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-6)
    tidy = found.tidy()
    assert found.groups.tolist() == sorted(set(groups))
    np.testing.assert_array_equal(tidy["groups_proportion"], found.group_components.proportion)
    tested = tidy["groups_p_value"].notna()
    expected = multipletests(tidy["groups_p_value"][tested], method="fdr_bh")[1]
    np.testing.assert_allclose(tidy["groups_p_adjusted"][tested], expected)
    assert tidy.loc[2, "reliability":"within"].isna().tolist() == [True] * 5 + [False] * 2
    row = found.glance().iloc[0]
    assert (row["n_groups"], row["claim"]) == (len(set(groups)), claim)
    assert row["layer_groups_proportion"] == found.layer["groups_proportion"][0]
    assert row["n_groups_differ"] == (tidy["groups_p_adjusted"] <= 0.1).sum()


def test_groups_are_matched_by_client_in_any_form() -> None:
    w = weights()
    expected = fedstat.variance_components(w, groups=THREE, claim=THESE).tidy()
    series = pd.Series(THREE, CLIENTS)[::-1]
    for groups in (series, series.to_dict(), xr.DataArray(series.to_numpy(), {"client": series.index.to_numpy()})):
        found = fedstat.variance_components(w, groups=groups, claim=THESE).tidy()
        pd.testing.assert_frame_equal(found, expected)
    order = np.random.default_rng(1).permutation(14)
    moved = fedstat.variance_components(w[order], groups=series, claim=THESE).tidy()
    columns = [name for name in expected if "groups_p" not in name]  # random permutations of other clients
    pd.testing.assert_frame_equal(moved[columns], expected[columns])


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (weights(), {"groups": THREE}, r"new groups needs at least 5 groups, but got 3 \(north, south, west\)"),
    (weights(), {"groups": CLIENTS, "claim": THESE}, r"at least 2 .* but got 14 group\(s\) of 14 clients"),
    (weights(), {"groups": ["x"] * 14, "claim": THESE}, r"at least 2, .* but got 1 group\(s\)"),
    (weights(), {"groups": [*THREE[:-1], "east"], "claim": THESE}, "at least 2 clients in each group, .* in east"),
    (weights(), {"groups": dict(zip(CLIENTS[1:], THREE[1:], strict=True)), "claim": THESE}, "groups .*k0"),
    (weights(), {"groups": [None, *THREE[1:]], "claim": THESE}, "groups .*k0"),
    (weights(), {"groups": THREE[1:], "claim": THESE}, "groups must have one value for each of the 14 clients"),
    (weights(), {"groups": THREE, "claim": "these"}, "claim must be .*these groups"),
    (weights(), {"claim": THESE}, "claim has no effect without groups, but got 'these groups'"),
    (weights(), {"seed": 1}, "seed has no effect without groups, but got 1"),
    (
        weights(),
        {"groups": THREE, "claim": THESE, "covariate": np.arange(14)},
        "covariate is not supported with groups",
    ),
    (weights(), {"groups": THREE, "claim": THESE, "method": "reml", "sizes": np.arange(1, 15)}, "sizes is not supp"),
    (weights().where(weights()["client"] != "k7"), {"groups": THREE, "claim": THESE}, "client k7 hold NaN"),
    (weights().isel(replicate=[0, 0]), {"groups": THREE, "claim": THESE}, "identical bit for bit in all clients"),
]


@pytest.mark.parametrize(("w", "how", "message"), BAD, ids=[m[:30] for *_, m in BAD])
def test_what_is_refused_is_named(w: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedstat.variance_components(w, **how)


def test_split_within_groups_makes_units_personal_that_differ_within_them() -> None:
    w = weights(of_groups=3.0, of_clients=(0, 0, 1, 3, 3, 3))
    found = fedstat.split(w, method="icc", tau="test", groups=THREE, claim=THESE)
    assert found.group.tolist() == ["shared", "shared", "constant", "personal", "personal", "personal"]
    apart = fedstat.split(w, method="icc", tau="test")
    assert apart.group.tolist()[:2] == ["personal", "personal"]
    text = " ".join(repr(found).split())
    assert "Rule: reliability of clients within groups tested against 0.5" in text
    with pytest.raises(ValueError, match="groups has no effect without method='icc' and tau='test'"):
        fedstat.split(w[:, 0], groups=THREE)


def test_print_says_what_was_estimated_and_what_it_holds_for() -> None:
    these = fedstat.variance_components(weights(), groups=THREE, claim=THESE)
    new = fedstat.variance_components(weights(SIX), groups=SIX)
    for found, n, claim in ((these, 3, "these 3 groups"), (new, 6, "new groups")):
        text = " ".join(repr(found).split())
        assert text.startswith("Reliability of client differences within groups: 6 units, 20 weights per unit")
        assert f"14 clients in {n} groups x 2 replicates" in text
        row = found.glance().iloc[0]
        ci = f"[{row['layer_groups_low']:.2f}, {row['layer_groups_high']:.2f}]"
        assert f"groups {row['layer_groups_proportion']:.2f} (95% CI {ci})" in text
        p = row["layer_groups_p_value"]
        assert p <= 0.05
        assert f"H0: the clients of all groups have one distribution: p = {p:.2g} (random permutations: 999);" in text
        assert f"{row['n_groups_differ']} of 5 units differ (FDR 0.05)" in text
        assert f"95% CIs for {claim} (unadjusted)" in text
        assert "the average over its group does" in text
        assert max(map(len, repr(found).splitlines())) <= 80
    assert "jackknife over clients of each group" in " ".join(repr(these).split())
    assert "(jackknife over groups)" in repr(new)
    assert not these.cautions()


def titles(found: Any) -> list[str]:
    return [caution.title for caution in found.cautions()]


def test_cautions_name_clusters_single_clients_and_tests_that_cannot_reject() -> None:
    w = weights()
    clusters = fedstat.client_clusters(w.mean("replicate"), n_clusters=2)
    sizes = np.bincount(clusters.cluster)[1:] if 0 not in clusters.cluster else np.bincount(clusters.cluster)
    assert min(sizes) > 1
    assert titles(fedstat.variance_components(w, groups=clusters, claim=THESE)) == ["Groups found in weights"]
    single = np.array([*SIX[:-1], "g"])
    assert titles(fedstat.variance_components(weights(single), groups=single)) == ["Groups of one client"]
    few = fedstat.variance_components(w[[0, 1, 5, 6]], groups=THREE[[0, 1, 5, 6]], claim=THESE)
    assert titles(few) == ["Few permutations of groups"]
    assert few.layer_group_components.least == pytest.approx(1 / 3)
    assert "cannot give p <= 0.05 with groups of 2, 2 clients, but 0.33 at best" in " ".join(repr(few).split())
    split = few.split()
    assert "Few permutations of groups" in titles(split)


def test_without_groups_nothing_changes() -> None:
    found = fedstat.variance_components(weights())
    assert found.groups is None
    assert not [name for name in (*found.tidy(), *found.glance(), *found.layer) if "group" in name]
    flat = weights().values.reshape(14, 2, 6, 20)
    np.testing.assert_allclose(found.reliability, one_way.components(one_way.parts(flat)).reliability)


@pytest.mark.parametrize("ending", ["zarr", "json"])
def test_a_stored_result_is_read_as_it_was(ending: str, tmp_path: Path) -> None:
    found = fedstat.variance_components(weights(SIX), groups=SIX)
    found.save(tmp_path / f"r.{ending}")
    read = fedstat.load(tmp_path / f"r.{ending}")
    assert repr(read) == repr(found)
    pd.testing.assert_frame_equal(read.tidy(), found.tidy())
    pd.testing.assert_frame_equal(read.glance(), found.glance())


def test_layers_have_their_components_and_bars() -> None:
    by_layer = {"fc1": weights(), "fc2": weights(of_groups=2)}
    results = {name: fedstat.variance_components(w, groups=THREE, claim=THESE) for name, w in by_layer.items()}
    layers = fedstat.results.LayerResults(results)
    ax = plot.profile(layers, parts=True, ax=plt.figure().add_subplot())
    names = ["groups", "clients within groups", "training noise"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == names
    assert [t.get_text() for t in ax.get_xticklabels()] == ["fc1", "fc2"]
    heights = np.array([[bar.get_height() for bar in bars] for bars in ax.containers])
    np.testing.assert_allclose(heights.sum(axis=0), 1)
    np.testing.assert_allclose(heights[0], [r.layer["groups_proportion"][0] for r in layers.values()])
    noise = [(1 - r.layer["groups_proportion"][0]) * (1 - r.layer["reliability"][0]) for r in layers.values()]
    np.testing.assert_allclose(heights[2], noise)
    plt.close("all")


def test_layers_of_a_run_have_groups_of_its_clients() -> None:
    data = fedstat.sim.generate(clients=6, d=5, m=7, n_train=40, n_test=4)
    run = fedstat.fl.train(
        data, fedstat.fl.nets.mlp([5, 7, 4, 1]), fedstat.fl.algorithms.fedavg(), rounds=1, probe="split-half"
    )
    found = fedstat.variance_components(run, groups=list("ababab"), claim=THESE)
    assert list(found) == ["fc1", "fc2"]
    assert found.tidy()["groups_proportion"].notna().any()
    assert found.glance()["n_groups"].tolist() == [2, 2]


def test_bars_of_units_without_groups_stand_by_reliability() -> None:
    found = fedstat.variance_components(weights())
    ax = plot.profile(found, parts=True, units=4, ax=plt.figure().add_subplot())
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["clients", "training noise"]
    order = found.tidy().sort_values("reliability", ascending=False)["unit"].tolist()
    assert [t.get_text() for t in ax.get_xticklabels()] == [*order[:2], *order[-2:]]
    with pytest.raises(TypeError, match=r"profile takes a ComponentsResult .* got SplitResult"):
        plot.profile(found.split(), parts=True)
    plt.close("all")
