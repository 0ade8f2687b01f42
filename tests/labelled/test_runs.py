"""A run has one split, the one that it used; a new analysis says which weights it takes, and why units are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from verbs import VERBS

import fedstat
from fedstat.decompose.__main__ import main
from fedstat.fl import algorithms, client_weights
from fedstat.results import IccResult, StoredSplitResult

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
METHODS = {
    "fedfac": lambda: algorithms.fedfac(["fc1"], warm_start=False),
    "by agreement": lambda: algorithms.fedfac(["fc1"], estimator="icc"),
    "fedavg": algorithms.fedavg,
    "fedper": algorithms.fedper,
    "local": algorithms.local,
}


def train(name: str, **options: Any) -> xr.DataTree:
    data = fedstat.data.partition.pathological(fedstat.data.load("digits"), clients=8, classes_per_client=2)
    data = fedstat.data.partition.train_test(fedstat.data.to_float(data), test=0.2)
    net = fedstat.fl.nets.mlp([64, 12, 10])
    options = {"rounds": 3, "local_epochs": 2, "checkpoints": [2], "probe": "trained-weights", "threads": 1} | options
    return fedstat.fl.train(data, net, METHODS[name](), seed=6, **options)  # two units start dead


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of the run of FedFac."""
    return tmp_path_factory.mktemp("runs") / "run.zarr"


@pytest.fixture(scope="module")
def runs(path: Path) -> dict[str, xr.DataTree]:
    return {name: train(name, out=path if name == "fedfac" else None) for name in METHODS}


def identical(weights: xr.DataArray) -> np.ndarray:
    """Units that are equal in all clients, to the bit."""
    return (weights == weights.isel(client=0)).all(["client", "weight"]).values


def test_update_takes_the_weights_of_a_stage(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedfac"]
    before = fedstat.split(run, stage="trained", n_factors=2)
    with pytest.raises(ValueError, match="averaged over clients"):
        fedstat.update(before, run)
    after = fedstat.update(before, run, stage="trained")
    np.testing.assert_array_equal(
        after["fc1"].communality, fedstat.update(before["fc1"], client_weights(run, "fc1", stage="trained")).communality
    )


def test_the_split_of_a_run_is_saved_with_its_origin(runs: dict[str, xr.DataTree], tmp_path: Path) -> None:
    stored = fedstat.split(runs["fedfac"], round=2)
    stored.save(tmp_path / "split.json")
    again = fedstat.load(tmp_path / "split.json")
    np.testing.assert_array_equal(again["fc1"].shared, stored["fc1"].shared)
    assert again["fc1"].origin["verb"] == "fedstat.split"
    assert again["fc1"].origin["arguments"]["round"] == 2
    assert again["fc1"].origin["arguments"]["weights"].startswith("DataTree fedfac")
    assert again["fc1"].origin["input"] is None


def test_a_run_returns_the_split_that_it_used(runs: dict[str, xr.DataTree], path: Path) -> None:
    run = runs["fedfac"]
    for form in (run, path, str(path), run["weights"], run.load()):
        by_layer = fedstat.split(form)
        assert (list(by_layer), list(by_layer.skipped_layers)) == (["fc1"], ["fc2"])
        np.testing.assert_array_equal(by_layer["fc1"].shared, run["split/fc1/shared"][-1])
    one = fedstat.split(run, layer="fc1", round=2)
    assert isinstance(one, StoredSplitResult)
    np.testing.assert_array_equal(one.shared, run["split/fc1/shared"].sel(round=2))
    np.testing.assert_array_equal(one.communality, run["split/fc1/communality"].sel(round=2))
    assert one.n_factors == run["split/fc1/n_factors"].sel(round=2)
    np.testing.assert_array_equal(fedstat.split(run["weights/fc1"]).shared, run["split/fc1/shared"][-1])
    shared = client_weights(run, "fc1").isel(unit=np.flatnonzero(fedstat.split(run, layer="fc1").shared))
    assert identical(shared).all(), "the run averaged the units of its last split"


def test_its_print_says_where_the_split_comes_from(runs: dict[str, xr.DataTree]) -> None:
    text = repr(fedstat.split(runs["fedfac"], layer="fc1"))
    assert text.startswith(
        "Split of 12 units: 6 shared, 6 personal, 0 constant\n"
        "Stored by the run: fedfac-dynamic, round 3, layer fc1\n"
        "Rule: by communality (method = pa, kappa = 0.85, tau = 0.5)\n"
    )
    assert "stage='trained'" in text
    by_agreement = fedstat.split(runs["by agreement"], layer="fc1")
    assert "Rule: by agreement (ICC2) (method = icc, tau = 0.5)\n" in repr(by_agreement)
    np.testing.assert_array_equal(by_agreement.statistic, runs["by agreement"]["split/fc1/icc"][-1])
    average = fedstat.split(runs["fedavg"], layer="fc1")
    assert average.shared.all()
    assert "Rule: set by fedavg, which did not analyze the layer\n" in repr(average)
    with pytest.raises(ValueError, match="must rest on communality or agreement, but fedavg set it"):
        average.plot()


def test_the_trained_weights_give_the_split_that_the_run_used(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedfac"]
    for checkpoint in (2, 3):
        again = fedstat.split(run, layer="fc1", stage="trained", checkpoint=checkpoint)
        stored = fedstat.split(run, layer="fc1", round=checkpoint)
        np.testing.assert_array_equal(again.shared, stored.shared)
        np.testing.assert_allclose(again.communality, stored.communality, atol=1e-3)
    by_agreement = fedstat.split(runs["by agreement"], layer="fc1", stage="trained", method="icc")
    np.testing.assert_array_equal(by_agreement.shared, fedstat.split(runs["by agreement"], layer="fc1").shared)
    averaged = fedstat.split(run, layer="fc1", stage="aggregated")
    assert (averaged.shared != fedstat.split(run, layer="fc1").shared).mean() > 0.3, (
        "averaged weights have another split"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_the_stage_and_refuses_averaged_weights_without_it(
    runs: dict[str, xr.DataTree], verb: str
) -> None:
    run = runs["fedfac"]
    for stage in ("aggregated", "trained"):
        expected = VERBS[verb](client_weights(run, "fc1", stage=stage))
        np.testing.assert_array_equal(VERBS[verb](run, layer="fc1", stage=stage), expected)
        np.testing.assert_array_equal(VERBS[verb](run["weights/fc1"], stage=stage), expected)
    np.testing.assert_array_equal(VERBS[verb](run["uploads/fc1"]), expected)
    message = r"has no effect on the split that the run stored" if verb.startswith("split") else "6 of 12 units of fc1"
    if verb == "split_map":
        message = "6 of 12 units of fc1"
    with pytest.raises(ValueError, match=message):
        VERBS[verb](run, layer="fc1")
    local = client_weights(runs["local"], "fc1")
    np.testing.assert_array_equal(VERBS[verb](runs["local"], layer="fc1"), VERBS[verb](local))


def test_errors_name_the_probe_the_stages_and_the_layers_that_need_none(runs: dict[str, xr.DataTree]) -> None:
    with pytest.raises(
        ValueError, match=r"12 of 12 units of fc1.*stage='trained' \(this run holds them\).*aggregated'"
    ):
        fedstat.icc(runs["fedavg"])
    with pytest.raises(ValueError, match=r"or select layers without shared units: layer=\['fc2'\]"):
        fedstat.icc(runs["fedper"], layer="*")
    assert isinstance(fedstat.icc(runs["fedper"], layer="fc2"), IccResult)
    bare = runs["fedavg"].filter(lambda node: not node.path.startswith("/uploads"))
    with pytest.raises(
        ValueError, match=r"stage='trained' \(train again with probe='trained-weights', which stores them\)"
    ):
        fedstat.icc(bare)
    with pytest.raises(ValueError, match=r"holds no weights at stage 'trained'.*probe='trained-weights'"):
        fedstat.icc(bare, stage="trained")


def test_what_cannot_have_a_stage_or_a_round_says_so(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedfac"]
    layer = run["weights/fc1"].to_dataset()
    for weights in (layer, layer["w"], layer["w"].values[-1]):
        with pytest.raises(ValueError, match="stage selects weights of a run, but got stage='trained' with a"):
            fedstat.icc(weights, stage="trained")
    np.testing.assert_array_equal(fedstat.icc(layer).agreement, fedstat.icc(layer["w"]).agreement)
    with pytest.raises(ValueError, match="stage must be one of 'trained', 'aggregated', but got 'sent'"):
        fedstat.fa(run, stage="sent")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stage must be 'trained' for weights before aggregation"):
        fedstat.fa(run["uploads"], stage="aggregated")
    states = fedstat.read_weights([{"fc1.weight": w} for w in layer["w"].values[-1]])
    for stage in ("trained", "aggregated"):
        with pytest.raises(ValueError, match=f"the run holds no weights at stage '{stage}', only fc1"):
            fedstat.icc(states, stage=stage)
    for of_analysis in ({"weights": layer["w"]}, {"weights": run, "stage": "trained"}, {"weights": runs["local"]}):
        with pytest.raises(ValueError, match="round has no effect on an analysis of weights, but got 2"):
            fedstat.split(**of_analysis, round=2)  # type: ignore[arg-type]
    for name, value in {"kappa": 0.5, "tau": 0.4, "checkpoint": 2, "n_factors": 3, "fdr": 0.05}.items():
        with pytest.raises(ValueError, match=f"{name} has no effect on the split that the run stored, but got {value}"):
            fedstat.split(run, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="round must be one of 1, 2, 3, but got 4"):
        fedstat.split(run, round=4)


def test_a_run_without_weights_has_its_split_and_an_unfinished_one_that_of_its_last_round() -> None:
    run = train("fedfac", keep_weights=[], probe=None, checkpoints=[])
    np.testing.assert_array_equal(fedstat.split(run)["fc1"].shared, run["split/fc1/shared"][-1])
    metrics = run["metrics"].to_dataset()
    metrics["seconds"] = metrics["seconds"].where(metrics["round"] < 3)
    run["metrics"] = xr.DataTree(metrics)
    assert fedstat.split(run)["fc1"].round == 2
    metrics["seconds"] = metrics["seconds"].where(metrics["round"] < 1)
    run["metrics"] = xr.DataTree(metrics)
    with pytest.raises(ValueError, match="must have a finished round"):
        fedstat.split(run)


def test_clients_that_were_not_selected_are_left_out_of_trained_weights() -> None:
    run = train("fedavg", participation=0.5)
    trained = fedstat.icc(run, layer="fc1", stage="trained")
    assert trained.n_clients == 4
    assert set(trained.clients) == set(client_weights(run, "fc1", stage="trained")["client"].values)  # type: ignore[arg-type]


# The reasons that a print states, and which units they are true of, among those equal to the bit: shared ones, others.
CONCLUSIONS = {
    ("fedfac", "aggregated"): {"averaged": True, "averaged, or never trained": False},
    ("fedavg", "aggregated"): {"averaged": True},
    ("local", "aggregated"): {"never averaged; training did not move clients apart": False},
} | {
    (name, "trained"): {"before averaging; local training did not move clients apart": None}
    for name in ("fedfac", "fedavg", "local")
}


@pytest.mark.parametrize(("name", "stage"), CONCLUSIONS)
def test_the_reason_why_units_are_identical_is_true_by_the_known_mask(
    runs: dict[str, xr.DataTree], name: str, stage: Any
) -> None:
    run = runs[name]
    result = fedstat.icc(run, layer="fc1", stage=stage)
    equal = identical(client_weights(run, "fc1", stage=stage))
    shared = run["split/fc1/shared"].values[-1]
    assert equal[shared].all() or stage == "trained"
    assert equal.any(), "pixels that are always 0 leave units where they started"
    text, n_named = " ".join(repr(result).split()), 0
    for reason, is_shared in CONCLUSIONS[name, stage].items():
        n = int((equal if is_shared is None else equal & (shared == is_shared)).sum())
        n_named += n
        named = f"{n} unit{'s are' if n > 1 else ' is'} identical in all clients ({reason}): ICC2 = 1"
        assert (named in text) == (n > 0)
    assert n_named == equal.sum()
    assert ("common initial parameters" in text) == (not equal.all())


def test_weights_of_unknown_origin_have_both_candidates_and_a_caution_where_data_bear_it() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(1, 6, 40))
    weights = start + rng.normal(size=(8, 6, 40)) * np.array([0, 0.1, 0.5, 0.7, 1, 1])[:, None]
    text = " ".join(repr(fedstat.icc(weights)).split())
    assert "1 unit is identical in all clients (averaged, or never trained): ICC2 = 1" in text
    assert "ICC2 of up to 0.99 on units that differ between clients may come from common initial parameters" in text
    assert "Caution" not in repr(fedstat.icc(weights[:, [0, 2, 3]])), "a unit equal in all clients, others moderately"
    assert "initial" not in repr(fedstat.icc(weights, baseline=start[0])).replace("minus the common initial", "")
    assert "initial" not in repr(fedstat.icc(weights[:, 2:])), "units that differ, and agree moderately"


def test_units_equal_to_stored_initial_parameters_were_never_trained() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 30))
    weights = start + rng.normal(size=(8, 4, 30)) * np.array([0, 0, 1, 1])[:, None]
    weights[:, 1] += 1  # equal in all clients, but moved
    dims = ("client", "unit", "weight")
    text = repr(fedstat.icc(xr.Dataset({"w": (dims, weights), "start_w": (dims[1:], start)})))
    text = " ".join(text.split())
    assert "1 unit is identical in all clients (never trained, equal to the initial parameters)" in text
    assert "1 unit is identical in all clients (averaged, or never trained)" in text
    assert "clients started from common initial parameters" in text


@pytest.mark.usefixtures("runs")
def test_the_command_takes_the_stage(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(path)])
    assert "6 of 12 units of fc1" in capsys.readouterr().err
    assert main([str(path), "--stage", "trained", "--out", str(tmp_path / "split.zarr")]) == 0
    stored = fedstat.split(path, layer="fc1")
    np.testing.assert_array_equal(fedstat.read_split(tmp_path / "split.zarr", "fc1").shared, stored.shared)
    assert main([str(path), "--stage", "aggregated", "--method", "icc", "--out", str(tmp_path / "icc.zarr")]) == 0
    again = fedstat.read_split(tmp_path / "icc.zarr", "fc1")
    assert "6 units are identical in all clients (averaged)" in repr(again)
