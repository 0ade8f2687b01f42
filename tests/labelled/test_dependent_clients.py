"""Clients that are no independent clients, such as the server's model, are named by every verb."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import fedstat
from fedstat.fl import algorithms, nets, train

W = np.random.default_rng(0).normal(size=(8, 12, 30))
POOL = np.concatenate([W, W.mean(axis=0, keepdims=True)])
SERVER = "client 8 is a weighted mean of other clients, as a server's model is, but CIs and tests assume independent"
FIT: dict[str, Any] = {"n_factors": 2, "method": "pc"}
VERBS: dict[str, Callable[[Any], Any]] = {
    "icc": fedstat.icc,
    "icc, F": lambda w: fedstat.icc(w, inference="F"),
    "icc, permutation": lambda w: fedstat.icc(w, inference="permutation"),
    "icc, then split": lambda w: fedstat.icc(w).split(),
    "split": lambda w: fedstat.split(w, **FIT),
    "split by icc": lambda w: fedstat.split(w, method="icc"),
    "fa": lambda w: fedstat.fa(w, **FIT),
    "fa, then split": lambda w: fedstat.fa(w, **FIT).split(),
    "n_factors": lambda w: fedstat.n_factors(w, kappa=0.5),
    "bootstrap": lambda w: fedstat.bootstrap(w, **FIT, n_boot=10),
    "jackknife": lambda w: fedstat.jackknife(w, **FIT),
    "permutation_test": lambda w: fedstat.permutation_test(w, **FIT, n_permutations=9),
    "sensitivity": lambda w: fedstat.sensitivity(w, kappas=(0.5,), n_starts=1),
    "split_map": lambda w: fedstat.split_map(w, kappas=(0.5,), methods=("pc",)),
    "client_clusters": lambda w: fedstat.client_clusters(w, n_clusters=2),
    "client_clusters of vectors": lambda w: fedstat.client_clusters(w.reshape(len(w), -1), n_clusters=2),
    "variance_components": lambda w: fedstat.variance_components(np.stack([w, w[:, ::-1]], axis=1)),
    "split by a test": lambda w: fedstat.split(np.stack([w, w[:, ::-1]], axis=1), method="icc", tau="test"),
}


def dependent(result: Any) -> list[str]:
    return [caution.text for caution in result.cautions() if caution.title == "Clients not independent"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_servers_model_among_clients(verb: str) -> None:
    assert dependent(VERBS[verb](W)) == []
    result = VERBS[verb](POOL)
    (text,) = dependent(result)
    assert text == f"{SERVER} clients; leave it out"
    assert SERVER.split(",")[0] in repr(result)


def test_the_servers_model_makes_clients_agree() -> None:
    rng = np.random.default_rng(0)
    rejected = {False: 0, True: 0}
    for _ in range(20):
        w = rng.normal(size=(8, 12, 30))
        for has_server in rejected:
            pool = np.concatenate([w, w.mean(0, keepdims=True)]) if has_server else w
            result = fedstat.icc(pool)
            rejected[has_server] += result.glance()["layer_p_value"][0] < 0.05
            assert bool(dependent(result)) == has_server
    assert rejected[False] <= 3
    assert rejected[True] >= 18


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "float32": lambda w: w.astype("f4"),
    "tensor": torch.from_numpy,
    "DataArray": lambda w: xr.DataArray(w.T, {"client": range(len(w))}, ("weight", "unit", "client")),
    "convolution": lambda w: w.reshape(*w.shape[:2], 5, 6),
    "list": list,
    "state_dicts": lambda w: {f"{c}": {"fc.weight": one} for c, one in enumerate(w)},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_server_is_named_in_weights_of_every_form(form: str) -> None:
    result = fedstat.icc(FORMS[form](POOL))
    (text,) = dependent(next(iter(result.values())) if form == "state_dicts" else result)
    assert text.startswith(SERVER)
    result = fedstat.icc(FORMS[form](W))
    assert dependent(next(iter(result.values())) if form == "state_dicts" else result) == []


def test_a_large_layer_is_examined_where_its_weights_vary() -> None:
    rng = np.random.default_rng(0)
    w = np.repeat(rng.normal(size=(1, 50, 200)), 8, axis=0)
    w[:, 3, 40:60] += rng.normal(size=(8, 20))  # all other weights are shared
    assert dependent(fedstat.icc(w)) == []
    assert dependent(fedstat.icc(np.concatenate([w, w.mean(0, keepdims=True)])))[0].startswith(SERVER)


def test_a_large_layer_that_is_equal_in_all_clients_has_no_dependent_clients() -> None:
    assert dependent(fedstat.icc(np.repeat(np.random.default_rng(0).normal(size=(1, 50, 200)), 8, axis=0))) == []


def test_copies_are_named_by_verbs_of_factors_too() -> None:
    pool = np.concatenate([W, W[:1]])
    text = "clients 0 and 8 have equal weights, but CIs and tests assume independent clients"
    for verb in (fedstat.icc, VERBS["icc, F"], VERBS["fa"], VERBS["bootstrap"]):
        assert dependent(verb(pool)) == [text]
    assert dependent(fedstat.fa(np.repeat(W[:1], 3, axis=0), **FIT)) == [], "averaged weights"


def test_a_client_that_is_the_baseline_is_named() -> None:
    start = np.random.default_rng(1).normal(size=(12, 30))
    w = np.concatenate([start + 0.1 * W, start[None]])
    text = "client 8 has the values of the baseline, as initial parameters have, but CIs and tests assume independent"
    assert dependent(fedstat.icc(w, baseline=start)) == [f"{text} clients"]
    assert dependent(fedstat.icc(w[:8], baseline=start)) == []


NO_CLIENTS = ["server", "global", "global_model", "model-avg", "averaged", "round3_global", "init", "initial_params",
              "ServerModel_server", "aggregated"]  # fmt: skip
CLIENTS = ["observer", "fedavg_3", "avgas", "globalia", "initech", "meaning", "client9", "k8"]


@pytest.mark.parametrize("name", [*NO_CLIENTS, *CLIENTS])
def test_a_file_that_is_no_clients_by_its_name_is_named(tmp_path: Path, name: str) -> None:
    states = [{"fc1.weight": w} for w in W[:4]]
    paths = [tmp_path / f"{stem}.npz" for stem in ("client0", "client1", "client2", name)]
    for path, state in zip(paths, states, strict=True):
        np.savez(path, **state)
    by_name = dict(zip(("client0", "client1", "client2", name), states, strict=True))
    for read in (lambda: fedstat.read_weights(paths), lambda: fedstat.icc(by_name)):
        if name in CLIENTS:
            read()
            continue
        with pytest.warns(UserWarning, match=f"{name}.*: by name no model of a client, but of a server, a mean or ini"):
            read()


def test_names_that_most_sources_have_say_nothing() -> None:
    fedstat.read_weights([{"fc1.weight": w} for w in W], clients=[f"global-{c}" for c in range(8)])


@pytest.mark.parametrize("suffix", [".zarr", ".json"])
def test_a_result_that_is_loaded_has_the_caution(tmp_path: Path, suffix: str) -> None:
    for result in (fedstat.icc(POOL), fedstat.fa(POOL, **FIT)):
        result.save(tmp_path / f"a{suffix}", overwrite=True)
        assert repr(fedstat.load(tmp_path / f"a{suffix}")) == repr(result)


@pytest.mark.parametrize("n", [3, 12])
def test_trained_clients_are_independent_and_their_mean_is_not(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(n, 24, 6)).astype("f4"), rng.integers(0, 3, (n, 24))
    data = xr.Dataset({"x": (("client", "sample", "feature"), x), "y": (("client", "sample"), y)})
    data = data.assign_coords(split=("sample", np.array(["train"] * 16 + ["test"] * 8, object)))
    run = train(data, nets.mlp([6, 8, 3]), algorithms.fedavg(), rounds=2, lr=0.2, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for baseline in ("auto", None):
            found = fedstat.icc(run, stage="trained", baseline=baseline, layer="*")
            assert [dependent(result) for result in found.values()] == [[]] * len(found)
    w = fedstat.fl.client_weights(run, "fc1", stage="trained").values
    pruned = np.where(np.abs(w) < np.median(np.abs(w)), 0, w)
    assert dependent(fedstat.icc(pruned)) == []
    assert dependent(fedstat.icc(w - w.mean(0))) == []
    sizes = rng.dirichlet(np.ones(n))
    server = np.average(w, axis=0, weights=sizes).astype("f4")[None]
    assert dependent(fedstat.icc(np.concatenate([w, server])))[0].startswith(f"client {n} is a weighted mean")


MEANS = np.random.default_rng(3).normal(size=(2, 12, 30))
GROUPED = MEANS[[0, 1, 0, 1, 0, 1, 0, 1]] + 0.5 * W
FALL = "clients fall into 2 groups (0, 2, 4, 6; 1, 3, 5, 7), but CIs and tests assume independent clients; pass groups"


@pytest.mark.parametrize("verb", ["icc", "bootstrap", "jackknife", "variance_components", "split by a test"])
def test_verbs_with_intervals_over_clients_name_groups_of_clients(verb: str, tmp_path: Path) -> None:
    result = VERBS[verb](GROUPED)
    (text,) = dependent(result)
    assert text == f"{FALL} that you know as groups="
    assert dependent(VERBS[verb](W)) == []
    result.save(tmp_path / "a.json")
    assert repr(fedstat.load(tmp_path / "a.json")) == repr(result)


def test_groups_are_looked_for_after_the_baseline_is_subtracted() -> None:
    start = 3 * np.random.default_rng(1).normal(size=(12, 30))
    w = start + 0.1 * GROUPED
    for verb in (fedstat.icc, lambda w, baseline: fedstat.jackknife(w, baseline=baseline, **FIT)):
        assert dependent(verb(w, baseline=start))[0].startswith(FALL)
        assert dependent(verb(start + 0.1 * W, baseline=start)) == []


def test_groups_that_a_user_passes_are_not_named() -> None:
    assert dependent(fedstat.jackknife(GROUPED, groups=[0, 1] * 4, claim="these groups", **FIT)) == []


def test_unlike_sizes_are_named_where_icc2_depends_on_them() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([5, 4, 1, 1, 1, 1, 1, 1, 1, 1])[:, None, None]
    w = sizes * rng.normal(size=(10, 12, 30))
    titles = {
        name: [caution.title for caution in fedstat.icc(x).cautions()]
        for name, x in {"noise": w, "common part": w + sizes * rng.normal(size=(1, 12, 30))}.items()
    }
    assert titles == {"noise": [], "common part": ["Clients of unlike size"]}
