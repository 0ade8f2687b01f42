"""The verbs take weights in whatever form users hold them, say which layers they took, and find the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from layers import weights
from torch import nn
from verbs import VERBS

import fedstat
from fedstat.labelled import weight_files
from fedstat.labelled.layer_names import find_skipped_layers

W = weights().astype(np.float32)  # (client, unit, weight)
CONV = weights(seed=1, shape=(2, 3, 3)).astype(np.float32)
HEAD = np.random.default_rng(2).normal(size=(len(W), 3, 8)).astype(np.float32)
NAMES = np.array([f"client{c}" for c in range(len(W))], object)
STATES = {
    name: {
        "conv.weight": torch.asarray(c),
        "conv.bias": torch.zeros(8),
        "fc1.weight": torch.asarray(w),
        "head.weight": h,
    }
    for name, c, w, h in zip(NAMES, CONV, W, torch.asarray(HEAD), strict=True)
}
REFUSED = {  # what verbs say of objects that hold layers, which they do not take
    "layer_matrix": r"weights must be one array",
    "knn_entropy": r"x must be one array",
    "variance_components": r"weights must have a dim replicate, of several models of every client",
    "compare": r"compare takes a DataFrame with one row per method and block",
}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same weights in every form."""
    folder = tmp_path_factory.mktemp("clients")
    for name, state in STATES.items():
        torch.save(state, folder / f"{name}.pt")
    rounds = {"checkpoint": [1, 4], "client": NAMES}
    dims = ("checkpoint", "client", "unit", "weight")
    layers = {
        name: xr.Dataset({"w": xr.DataArray(np.stack([0 * w, w]), rounds, dims)})
        for name, w in {"conv": CONV.reshape(6, 8, -1), "fc1": W, "head": HEAD}.items()
    }
    run = xr.DataTree.from_dict({f"/weights/{name}": one for name, one in layers.items()})
    shapes = '{"conv.weight": [8, 18], "fc1.weight": [8, 30], "head.weight": [3, 8]}'
    run.attrs["config"] = f'{{"keep_weights": ["conv", "fc1", "head"], "shapes": {shapes}}}'
    run.to_zarr(store := folder / "run.zarr", consolidated=False, zarr_format=3)
    return {
        "run": run,
        "weights of a run": run["weights"],
        "path of a run": store,
        "read weights": fedstat.read_weights([folder / f"{name}.pt" for name in NAMES]),
        "files": [folder / f"{name}.pt" for name in NAMES],
        "names of files": [str(folder / f"{name}.pt") for name in NAMES],
        "folder": folder,
        "pattern": str(folder / "client?.pt"),
        "files by client": {name: folder / f"{name}.pt" for name in NAMES},
        "state_dicts by client": STATES,
        "list of state_dicts": list(STATES.values()),
        "array": W,
        "tensor": torch.asarray(W),
        "DataArray": xr.DataArray(W, dims=("client", "unit", "weight")),
        "list of arrays": list(W),
        "Dataset of a layer": run["weights/fc1"].to_dataset(),
        "node of a layer": run["weights/fc1"],
        "rounds of a layer": run["weights/fc1/w"],
    }


FORMS = [
    "run", "weights of a run", "path of a run", "read weights", "files", "names of files", "folder", "pattern",
    "files by client", "state_dicts by client", "list of state_dicts",
]  # fmt: skip
ARRAYS = [
    "array",
    "tensor",
    "DataArray",
    "list of arrays",
    "Dataset of a layer",
    "node of a layer",
    "rounds of a layer",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_split_is_the_same_to_the_bit_in_whatever_form_the_weights_come(held: dict[str, Any], form: str) -> None:
    found = fedstat.split(held[form], n_factors=2)
    assert list(found) == ["conv", "fc1"]
    for layer, w in (("conv", CONV), ("fc1", W)):
        np.testing.assert_array_equal(found[layer].communality, fedstat.split(w, n_factors=2).communality)
        np.testing.assert_array_equal(found[layer].icc, fedstat.split(w, n_factors=2).icc)
    assert list(found.skipped_layers) == ["head"]
    text = repr(found)
    assert text.startswith("conv: Split of 8 units")
    assert "\nfc1: Split of 8 units" in text
    assert "\nSkipped: head (output layer" in text


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What verbs make of the array of layer fc1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {verb: np.asarray(call(W)) for verb, call in VERBS.items()}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("form", [*FORMS, *ARRAYS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_verb_takes_every_form(held: dict[str, Any], expected: dict[str, Any], form: str, verb: str) -> None:
    found = VERBS[verb](held[form], **({"layer": "fc1"} if form in FORMS else {}))
    np.testing.assert_allclose(np.asarray(found, expected[verb].dtype), expected[verb], rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", [*FORMS, *ARRAYS])
def test_ranks_and_updates_take_every_form(held: dict[str, Any], form: str) -> None:
    ranks = fedstat.effective_rank(held[form]).rank["rank"]
    last = ranks.isel(checkpoint=-1) if "checkpoint" in ranks.dims else ranks
    layer = last.sel(layer="fc1") if form in FORMS else last.isel(layer=0)
    np.testing.assert_allclose(layer, fedstat.effective_rank(W).rank["rank"][0], atol=1e-5)
    previous = fedstat.split(held[form], n_factors=2)
    updated = fedstat.update(previous, held[form])
    assert type(updated) is type(previous)
    layer = updated["fc1"] if form in FORMS else updated
    again = fedstat.update(fedstat.split(W, n_factors=2), W)
    np.testing.assert_allclose(layer.communality, again.communality, atol=1e-6)


@pytest.mark.parametrize("verb", REFUSED)
@pytest.mark.parametrize("form", FORMS)
def test_verbs_of_one_array_or_of_replicates_say_what_they_take(held: dict[str, Any], form: str, verb: str) -> None:
    options = {"reference": "a"} if verb == "compare" else {}
    with pytest.raises(TypeError if verb == "compare" else ValueError, match=REFUSED[verb]):
        getattr(fedstat, verb)(held[form], **options)


NO_WEIGHTS = {  # what users pass in place of weights, and the words for it
    "a result": (lambda: fedstat.bootstrap(W, n_factors=2, n_boot=3), "a BootstrapResult. Pass the weights behind it"),
    "results": (lambda: [fedstat.icc(W), fedstat.icc(W)], "a list of IccResult. Pass the weights behind it"),
    "results of layers": (lambda: fedstat.icc(STATES), "a LayerResults. Pass the weights behind it"),
    "nothing": (lambda: None, "None"),
    "a set": (lambda: {1, 2}, "a set"),
}
WITH_WEIGHTS = VERBS | {
    "layer_matrix": fedstat.layer_matrix,
    "effective_rank": fedstat.effective_rank,
    "knn_entropy": fedstat.knn_entropy,
    "variance_components": fedstat.variance_components,
    "update": lambda w: fedstat.update(fedstat.split(W, n_factors=2), w),
}


@pytest.mark.parametrize("verb", WITH_WEIGHTS)
@pytest.mark.parametrize("form", NO_WEIGHTS)
def test_objects_that_are_no_weights_are_named(form: str, verb: str) -> None:
    make, words = NO_WEIGHTS[form]
    with pytest.raises(ValueError, match=f"must be an array.* but got {words}"):
        WITH_WEIGHTS[verb](make())


def test_a_result_as_baseline_or_source_is_named_and_so_are_weights_as_the_previous_result() -> None:
    result = fedstat.icc(W)
    with pytest.raises(ValueError, match="baseline must be an array of numbers, but got an IccResult"):
        fedstat.icc(W, baseline=result)
    with pytest.raises(ValueError, match="sources must be a list, but got an IccResult"):
        fedstat.read_weights(result)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"run must be a path, .* but got an IccResult"):
        fedstat.report(result)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"previous must be a result .* but got an ndarray. Call update\(result, weights"
    ):
        fedstat.update(W, result)  # type: ignore[arg-type]


def test_one_update_of_several_layers_names_them(held: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"update takes the weights of one layer, .* with the layers conv, fc1\. Choose"
    ):
        fedstat.update(fedstat.split(W, n_factors=2), held["run"])


OF_KINDS: dict[str, Callable[[Any], Any]] = {
    "split": lambda w: fedstat.split(w, n_factors=2, method="pc").communality,
    "split by agreement": lambda w: fedstat.split(w, method="icc").icc,
    "fa of a matrix": lambda w: fedstat.fa(fedstat.layer_matrix(w), n_factors=2, method="pc").communality,
    "icc": lambda w: fedstat.icc(w, n_boot=5).replicates,
    "moments": lambda w: fedstat.variance_components(w, covariate=range(6)).components.conf_low,
    "reml": lambda w: fedstat.variance_components(w, covariate=range(6), method="reml").components.conf_low,
}


@pytest.mark.parametrize("verb", OF_KINDS)
def test_kinds_of_arrays_and_orders_of_dims_give_one_answer(verb: str) -> None:
    dims = ("client", "replicate", "unit") if verb in ("moments", "reml") else ("client", "unit")
    sizes = {"client": 6, "replicate": 2, "unit": 8}
    w = np.random.default_rng(0).normal(size=(*(sizes[dim] for dim in dims), 3, 4))
    expected = OF_KINDS[verb](w)
    labelled = xr.DataArray(w, dims=(*dims, "height", "width"))
    for other in (labelled, labelled.transpose("width", *dims[::-1], "height"), torch.tensor(w, requires_grad=True)):
        np.testing.assert_allclose(OF_KINDS[verb](other), expected, rtol=1e-6, atol=1e-9)


def test_a_factor_analysis_of_weights_is_that_of_their_matrix_and_knows_the_agreement() -> None:
    found = fedstat.fa(W, n_factors=2)
    np.testing.assert_allclose(found.communality, fedstat.fa(fedstat.layer_matrix(W), n_factors=2).communality)
    np.testing.assert_allclose(found.agreement, fedstat.icc(W).agreement)
    np.testing.assert_array_equal(found.communality, fedstat.split(W, n_factors=2).communality)


def test_layers_are_chosen_by_name_and_by_pattern(held: dict[str, Any]) -> None:
    for form in ("run", "files", "state_dicts by client"):
        assert list(fedstat.icc(held[form], layer="*")) == ["conv", "fc1", "head"]
        assert list(fedstat.icc(held[form], layer=["head", "c*"])) == ["head", "conv"]
        assert isinstance(fedstat.icc(held[form], layer="head"), fedstat.results.IccResult)
        with pytest.raises(ValueError, match=r"has no layer 'fc2', only conv, fc1, head\. Did you mean 'fc1'"):
            fedstat.icc(held[form], layer="fc2")
        with pytest.raises(ValueError, match=r"has no layer that matches 'lin\*', only conv, fc1, head"):
            fedstat.icc(held[form], layer="lin*")


def test_a_round_of_a_run_is_chosen_and_a_wrong_one_is_named(held: dict[str, Any]) -> None:
    changed = held["run"].copy()
    changed["weights/fc1"] = xr.DataTree(changed["weights/fc1"].to_dataset() + 0.0)
    changed["weights/fc1/w"][0] = W[::-1, ::-1]
    first = fedstat.icc(changed, layer="fc1", checkpoint=1)
    np.testing.assert_array_equal(first.agreement, fedstat.icc(W[::-1, ::-1]).agreement)
    with pytest.raises(ValueError, match="checkpoint must be one of 1, 4, but got 3"):
        fedstat.icc(changed, layer="fc1", checkpoint=3)
    with pytest.raises(ValueError, match="layer 'fc1' has no dim checkpoint, but got checkpoint=3"):
        fedstat.icc(held["files"], layer="fc1", checkpoint=3)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({"fc1": (9, 4)}, []),
        ({"conv1": (6, 1, 3, 3), "fc1": (9, 54), "fc2": (3, 9)}, ["fc2"]),
        ({"features.0": (6, 1, 3, 3), "classifier.0": (9, 54), "classifier.3": (3, 9)}, ["classifier.3"]),
        ({"classifier": (3, 9), "conv1": (6, 1, 3, 3), "fc1": (9, 54)}, ["classifier"]),  # names in order, not layers
        ({"embedding": (50, 8), "weight_ih_l0": (32, 8), "weight_hh_l0": (32, 8)}, ["embedding"]),
        ({"tok_emb": (50, 8), "transformer.wpe": (9, 8), "fc1": (7, 8), "lm_head": (50, 7)},
         ["tok_emb", "transformer.wpe", "lm_head"]),
        ({"embeddings.word_embeddings": (50, 8), "member": (9, 8), "out": (2, 9)},
         ["embeddings.word_embeddings", "out"]),
        ({"patch_embed.proj": (8, 3, 4, 4), "fc1": (9, 8), "head": (2, 9)}, ["head"]),
    ],
)  # fmt: skip
def test_units_that_are_not_hidden_units_are_left_out(shapes: dict[str, tuple[int, ...]], names: list[str]) -> None:
    assert list(find_skipped_layers(shapes)) == names


def test_clients_may_differ_in_a_layer_that_is_left_out() -> None:
    states = {name: {**state, "head.weight": torch.randn(2 + c, 8)} for c, (name, state) in enumerate(STATES.items())}
    assert list(fedstat.icc(states)) == ["conv", "fc1"]
    with pytest.raises(
        ValueError, match=r"layer 'head.weight' must have one shape .* \(2, 8\) in client0 and \(3, 8\) in c"
    ):
        fedstat.icc(states, layer="*")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_training_changed_is_judged_without_the_common_start(held: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    start = {"conv.weight": rng.normal(size=CONV.shape[1:]), "fc1.weight": rng.normal(size=W.shape[1:])}
    moved = {name: {key: 9 * torch.asarray(start[key]) + state[key] for key in start} for name, state in STATES.items()}
    common = {key: 9 * value for key, value in start.items()}
    np.savez(tmp_path / "start.npz", **common)
    stacked = np.stack([state["fc1.weight"] for state in moved.values()])
    expected = fedstat.split(stacked - common["fc1.weight"], n_factors=2)
    for baseline in (common, tmp_path / "start.npz", fedstat.read_weights([common]), common["fc1.weight"]):
        found = fedstat.split(moved, layer="fc1", baseline=baseline, n_factors=2)
        np.testing.assert_allclose(found.communality, expected.communality, atol=1e-12)
        np.testing.assert_allclose(found.icc, expected.icc, atol=1e-12)
        assert "baseline subtracted" in " ".join(repr(found).split())
    assert found.icc.mean() < fedstat.split(moved, layer="fc1", n_factors=2).icc.mean() - 0.2
    again = fedstat.split(torch.asarray(stacked), baseline=common["fc1.weight"], method="icc")
    np.testing.assert_allclose(again.icc, expected.icc, atol=1e-12)
    assert list(fedstat.icc(moved, baseline=common, layer="*")) == ["conv", "fc1"]
    with pytest.raises(ValueError, match="a baseline for each of the layers conv, fc1, but got one ndarray"):
        fedstat.split(moved, baseline=stacked[0], layer="*")
    with pytest.raises(ValueError, match=r"baseline must have the shape .*\(8, 30\), but got \(8, 29\)"):
        fedstat.split(stacked, baseline=stacked[0, :, 1:])
    with pytest.raises(
        ValueError, match="baseline must be common to all clients, but its layer 'fc1' differs between 6"
    ):
        fedstat.split(moved, baseline=held["run"], layer="fc1")


def test_warnings_and_errors_name_their_layer() -> None:
    one = {"only": STATES["client0"]}
    with pytest.warns(UserWarning, match=r"^conv: Agreement needs at least 2 clients, but got 1\. Pass more"):
        fedstat.split(one, n_factors=2, layer=["conv"])
    with pytest.raises(ValueError, match="layer 'conv': agreement between clients needs at least 2 clients"):
        fedstat.icc(one)
    with pytest.raises(ValueError, match=r"^agreement between clients needs at least 2 clients"):
        fedstat.icc(one, layer=["conv"])
    broken = {name: {**state, "fc1.weight": state["fc1.weight"] * np.nan} for name, state in STATES.items()}
    with pytest.raises(ValueError, match="layer 'fc1': the weights of client client0 hold NaN"):
        fedstat.split(broken, n_factors=2)


def test_wrong_inputs_say_what_was_seen_and_how_to_go_on(held: dict[str, Any], tmp_path: Path) -> None:
    folder = held["folder"]
    for given, error, message in (
        (
            folder / "clent0.pt",
            FileNotFoundError,
            r"there is no file .*clent0\.pt, and no folder or run .*Did you mean '.*client",
        ),
        (folder / "ran.zarr", FileNotFoundError, "there is no file .*Did you mean '.*run.zarr'"),
        (str(folder / "c*.npz"), FileNotFoundError, "no file matches the pattern"),
        (tmp_path, ValueError, r"holds no files of clients \(\.pt, "),
        ([folder / "run.zarr", folder / "client0.pt"], ValueError, "is a run, which holds all its clients, but got 2"),
        (STATES["client0"], ValueError, "a state_dict, a module or a file for each client, but got a Tensor"),
        (nn.Linear(2, 3), ValueError, r"got one Linear. Pass \{client: model\}"),
        (xr.DataTree.from_dict({"/metrics": xr.Dataset()}), ValueError, "must hold weights, but has metrics"),
        ({}, ValueError, "per client, but are empty"),
    ):
        with pytest.raises(error, match=message):
            fedstat.split(given)
    with pytest.raises(ValueError, match="layer selects from a run, files or state_dicts, but got layer='fc1'"):
        fedstat.split(W, layer="fc1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.zarr").mkdir()
    with pytest.raises(ValueError, match=r"It holds the runs a.zarr: pass one of them"):
        fedstat.split(tmp_path / "runs")


def test_results_by_layer_are_a_mapping_with_tables(held: dict[str, Any]) -> None:
    found = fedstat.split(held["files"], n_factors=2)
    table = found.tidy()
    assert table.columns[0] == "layer"
    assert table["layer"].tolist() == ["conv"] * 8 + ["fc1"] * 8
    np.testing.assert_array_equal(table["communality"][8:], found["fc1"].communality)
    assert found.glance()["layer"].tolist() == ["conv", "fc1"]
    assert set(found.to_dict()) == {"conv", "fc1"}
    assert "<h4>fc1</h4>" in found._repr_html_()
    assert "\nfc1: Split" in found.summary()
    with pytest.raises(KeyError, match=r"was skipped .output layer.*layer='head'"):
        found["head"]
    with pytest.raises(KeyError, match=r"There are conv, fc1. Did you mean 'fc1'"):
        found["fc"]
    with pytest.raises(AttributeError, match=r"choose a layer first, as in result\['conv'\]\.shared"):
        found.shared  # noqa: B018


@pytest.mark.parametrize(
    ("make", "gates", "keys"),
    [
        (lambda: nn.LSTM(5, 8, num_layers=2), 4, ("weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1")),
        (lambda: nn.GRU(5, 8, bidirectional=True), 3, ("weight_ih_l0", "weight_hh_l0_reverse")),
        (lambda: nn.LSTMCell(5, 8), 4, ("weight_ih", "weight_hh")),
        (lambda: nn.LSTM(5, 12, proj_size=4), 4, ("weight_ih_l0", "weight_hh_l0")),
        (lambda: nn.LSTM(5, 12, proj_size=9), 4, ("weight_ih_l0", "weight_hh_l0")),
    ],
)
def test_a_recurrent_unit_has_the_weights_of_its_gates(make: Any, gates: int, keys: tuple[str, ...]) -> None:
    modules = [make() for _ in range(3)]
    found = weight_files.read_weights([module.state_dict() for module in modules], layers=list(keys))
    for key in keys:
        w = found[key]["w"]
        assert w.dims == ("client", "unit", "gate", "weight")
        for c, module in enumerate(modules):
            rows = getattr(module, key).detach().numpy()
            hidden = module.hidden_size
            for unit in range(hidden):
                for gate in range(gates):  # torch: W_ii | W_if | W_ig | W_io, one below the other
                    np.testing.assert_array_equal(w[c, unit, gate], rows[gate * hidden + unit])
    result = fedstat.icc([module.state_dict() for module in modules], layer=keys[0])
    assert len(result.units) == modules[0].hidden_size


def test_layers_of_a_sequential_are_headed_by_class_and_shape() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 2))

    networks = [network() for _ in range(3)]
    for form in (networks, dict(enumerate(networks)), fedstat.read_weights(networks)):
        found = fedstat.split(form, method="icc")
        assert found.modules == {"0": "Conv2d 6×1×3×3", "3": "Linear 5×24"}
        assert repr(found).startswith("0 · Conv2d 6×1×3×3: Split of 6 units")
        assert "\n3 · Linear 5×24: Split of 5 units" in repr(found)
        assert "<h4>3 · Linear 5×24</h4>" in found._repr_html_()
        assert repr(fedstat.update(found, form)).startswith("0 · Conv2d")
    states = [net.state_dict() for net in networks]
    assert repr(fedstat.split(states, method="icc")).startswith("0: Split of 6 units")  # the class is not known
    inner = [nn.ModuleDict({"body": net}) for net in networks]
    assert repr(fedstat.split(inner, method="icc")).startswith("body.0 · Conv2d 6×1×3×3: Split")
