"""A run has one split, the one that it used; a new analysis says which weights it takes, and why units are equal."""

from __future__ import annotations

from dataclasses import replace
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


def changes(run: xr.DataTree, layer: str, stage: Any = "trained") -> xr.DataArray:
    """Weights at the last checkpoint, less the last common values."""
    weights = client_weights(run, layer, stage=stage)
    common = run[f"common/{layer}/w"].sel(checkpoint=weights["checkpoint"])
    return weights.astype(float) - (common.sel(client=weights["client"]) if "client" in common.dims else common)


def test_update_takes_the_weights_of_a_stage_and_the_baseline_of_the_previous_result(
    runs: dict[str, xr.DataTree],
) -> None:
    run = runs["fedfac"]
    before = fedstat.split(run, stage="trained", n_factors=2)
    after = fedstat.update(before, run)
    np.testing.assert_array_equal(
        after["fc1"].communality, fedstat.update(before["fc1"], changes(run, "fc1")).communality
    )
    raw = fedstat.split(run, stage="trained", n_factors=2, baseline=None)
    np.testing.assert_array_equal(
        fedstat.update(raw, run, stage="trained")["fc1"].communality,
        fedstat.update(raw["fc1"], client_weights(run, "fc1", stage="trained")).communality,
    )
    with pytest.raises(ValueError, match="averaged over clients"):
        fedstat.update(before, run["weights"])


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
        "Analyzed: weights before averaging, nothing subtracted\n"
        "Rule: by communality (method = pa, kappa = 0.85, tau = 0.5)\n"
    )
    assert "A new analysis takes an argument such as method='icc' or baseline=None" in text
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
        again = fedstat.split(run, layer="fc1", baseline=None, checkpoint=checkpoint)
        stored = fedstat.split(run, layer="fc1", round=checkpoint)
        np.testing.assert_array_equal(again.shared, stored.shared)
        np.testing.assert_allclose(again.communality, stored.communality, atol=1e-3)
        assert "Analyzed: weights before averaging, nothing subtracted" in repr(stored)
    by_agreement = fedstat.split(runs["by agreement"], layer="fc1", baseline=None, method="icc")
    np.testing.assert_array_equal(by_agreement.shared, fedstat.split(runs["by agreement"], layer="fc1").shared)
    averaged = fedstat.split(run, layer="fc1", stage="aggregated")
    assert (averaged.shared != fedstat.split(run, layer="fc1").shared).mean() > 0.3, (
        "averaged weights have another split"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_the_changes_before_averaging_or_what_it_is_told_to(
    runs: dict[str, xr.DataTree], verb: str
) -> None:
    run, take = runs["fedavg"], VERBS[verb]
    by_default = take(changes(run, "fc1"))
    np.testing.assert_allclose(take(run, layer="fc1"), by_default, atol=1e-12)
    for group in ("trained/fc1", "weights/fc1"):
        np.testing.assert_allclose(take(run[group], stage="trained"), by_default, atol=1e-12)
    trained = client_weights(run, "fc1", stage="trained")
    np.testing.assert_array_equal(take(run, layer="fc1", baseline=None), take(trained))
    initial = trained.astype(float) - run["common/fc1/initial_w"]
    np.testing.assert_allclose(take(run, layer="fc1", baseline="initial"), take(initial), atol=1e-12)
    np.testing.assert_array_equal(take(run, layer="fc1", baseline="download"), take(run, layer="fc1"))
    with pytest.raises(ValueError, match="12 of 12 units of fc1"):
        take(run["weights/fc1"])


@pytest.mark.parametrize("stage", ["aggregated", "trained"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_the_stage(runs: dict[str, xr.DataTree], verb: str, stage: Any) -> None:
    run = runs["fedfac"]
    expected = VERBS[verb](client_weights(run, "fc1", stage=stage))
    for form in (run, run["weights"]):
        np.testing.assert_array_equal(VERBS[verb](form, layer="fc1", stage=stage, baseline=None), expected)
    np.testing.assert_array_equal(VERBS[verb](run["weights/fc1"], stage=stage, baseline=None), expected)


def test_a_run_is_analyzed_where_an_argument_asks_for_it(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedfac"]
    assert isinstance(fedstat.split(run, layer="fc1"), StoredSplitResult)
    for option in ({"kappa": 0.5}, {"tau": 0.4}, {"method": "minres"}, {"n_factors": 3}, {"baseline": None}):
        assert not isinstance(fedstat.split(run, layer="fc1", **option), StoredSplitResult)
        with pytest.raises(ValueError, match="round has no effect on an analysis of weights, but got 2"):
            fedstat.split(run, round=2, **option)


def test_errors_say_why_there_are_no_weights_before_averaging(runs: dict[str, xr.DataTree]) -> None:
    bare = runs["fedavg"].filter(lambda node: not node.path.startswith(("/trained", "/common")))
    with pytest.raises(ValueError, match=r"12 of 12 units of fc1.*no weights before averaging.*keep_weights"):
        fedstat.icc(bare)
    with pytest.raises(ValueError, match=r"holds no weights at stage 'trained'.*keep_weights=\[\]"):
        fedstat.icc(bare, stage="trained")
    bare.attrs["command"] = "fedstat.flower"
    with pytest.raises(ValueError, match=r"In a federation with Flower they do not leave the clients"):
        fedstat.icc(bare)
    with pytest.raises(ValueError, match="the run holds no values of layer 'fc1' that clients had in common, but got"):
        fedstat.icc(bare, stage="aggregated", baseline="common")
    personal = runs["fedper"].filter(lambda node: not node.path.startswith("/trained"))
    with pytest.raises(ValueError, match=r"or select layers without shared units: layer=\['fc2'\]"):
        fedstat.icc(personal, layer="*")
    assert isinstance(fedstat.icc(personal, layer="fc2"), IccResult)


def test_what_cannot_have_a_stage_a_round_or_a_baseline_says_so(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedfac"]
    layer = run["weights/fc1"].to_dataset()
    for weights in (layer, layer["w"], layer["w"].values[-1]):
        with pytest.raises(ValueError, match="stage selects weights of a run, but got stage='trained' with a"):
            fedstat.icc(weights, stage="trained")
        with pytest.raises(ValueError, match=r"baseline='common' names values that a run of fedstat\.fl holds"):
            fedstat.icc(weights, baseline="common")
    np.testing.assert_array_equal(fedstat.icc(layer).agreement, fedstat.icc(layer["w"]).agreement)
    with pytest.raises(ValueError, match="stage must be one of 'trained', 'aggregated', but got 'sent'"):
        fedstat.fa(run, stage="sent")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stage must be 'trained' for weights before aggregation"):
        fedstat.fa(run["trained"], stage="aggregated")
    states = fedstat.read_weights([{"fc1.weight": w} for w in layer["w"].values[-1]])
    for stage in ("trained", "aggregated"):
        with pytest.raises(ValueError, match=f"the run holds no weights at stage '{stage}', only fc1"):
            fedstat.icc(states, stage=stage)
    for of_analysis in ({"weights": layer["w"]}, {"weights": run, "stage": "trained"}, {"weights": runs["local"]}):
        with pytest.raises(ValueError, match="round has no effect on an analysis of weights, but got 2"):
            fedstat.split(**of_analysis, round=2)  # type: ignore[arg-type]
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
    result = fedstat.icc(run, layer="fc1", stage=stage, baseline=None)
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
def test_the_command_takes_the_stage_and_the_baseline(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path), "--out", str(tmp_path / "changes.zarr")]) == 0
    assert "Weights before averaging, round 3, 8 clients, minus the last common value" in capsys.readouterr().out
    changed = fedstat.load(tmp_path / "changes.zarr")["fc1"]
    np.testing.assert_array_equal(changed.shared, fedstat.split(path, layer="fc1", stage="trained").shared)
    assert main([str(path), "--baseline", "none", "--out", str(tmp_path / "split.zarr")]) == 0
    stored = fedstat.split(path, layer="fc1")
    np.testing.assert_array_equal(fedstat.load(tmp_path / "split.zarr")["fc1"].shared, stored.shared)
    assert main([str(path), "--stage", "aggregated", "--method", "icc", "--out", str(tmp_path / "icc.zarr")]) == 0
    again = fedstat.load(tmp_path / "icc.zarr")["fc1"]
    assert "6 units are identical in all clients (averaged)" in repr(again)


def test_units_that_no_client_trained_are_named(runs: dict[str, xr.DataTree]) -> None:
    result = fedstat.icc(runs["fedavg"], layer="fc1")
    still = identical(changes(runs["fedavg"], "fc1"))
    assert still.sum() == 2
    np.testing.assert_array_equal(result.units[result.constant], np.flatnonzero(still))
    text = repr(result)
    assert "0 constant" not in text
    assert "2 not trained" in text
    assert "  not trained: 3, 6" in text
    assert "2 not trained" in repr(fedstat.fa(runs["fedavg"], layer="fc1", n_factors=2))


# Baselines of one's own.


def test_a_net_a_run_a_state_dict_and_a_path_are_baselines(runs: dict[str, xr.DataTree], tmp_path: Path) -> None:
    run, net = runs["fedavg"], fedstat.fl.nets.mlp([64, 12, 10])
    initial = run["common/fc1/initial_w"].values
    expected = fedstat.icc(client_weights(run, "fc1", stage="trained"), baseline=initial).agreement
    states = {"fc1.weight": initial, "fc2.weight": run["common/fc2/initial_w"].values}
    np.savez(tmp_path / "initial.npz", **states)
    for baseline in (net, states, tmp_path / "initial.npz", "initial"):
        found = fedstat.icc(run, layer="fc1", baseline=baseline)
        np.testing.assert_allclose(found.agreement, expected, atol=1e-12)
    text = " ".join(repr(fedstat.icc(run, layer="fc1", baseline=states)).split())
    assert "Weights before averaging, round 3, 8 clients, minus the given baseline" in text
    average = client_weights(run, "fc1", stage="aggregated").isel(client=0, drop=True).values
    other = fedstat.icc(client_weights(run, "fc1", stage="trained"), baseline=average).agreement
    np.testing.assert_allclose(fedstat.icc(run, layer="fc1", baseline=run).agreement, other, atol=1e-12)
    with pytest.raises(ValueError, match=r"the Net of baseline has no layer 'fc1'"):
        fedstat.icc(run, layer="fc1", baseline=fedstat.fl.nets.cnn((1, 28, 28), 10)._replace(init=lambda _: {}))
    with pytest.raises(ValueError, match="baseline is a Net, whose initial parameters depend on the seed of a run"):
        fedstat.icc(client_weights(run, "fc1", stage="trained"), baseline=net)


def test_the_download_of_personal_units_is_that_of_the_previous_round(runs: dict[str, xr.DataTree]) -> None:
    run = runs["local"]
    before = run["weights/fc1/w"].sel(checkpoint=2)
    change = run["trained/fc1/w"].sel(checkpoint=3).astype(float) - before
    found = fedstat.icc(run, layer="fc1", baseline="download")
    np.testing.assert_allclose(found.agreement, fedstat.icc(change).agreement, atol=1e-12)
    assert "minus the values that clients downloaded in this round (change over 1 round)" in " ".join(
        repr(found).split()
    )
    with pytest.raises(ValueError, match=r"which clients began round 2.*after round\(s\) 2, 3.*checkpoints=\[1\]"):
        fedstat.icc(run, layer="fc1", baseline="download", checkpoint=2)


def test_units_that_changed_over_unlike_numbers_of_rounds_have_separate_results(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedfac"]
    shared = run["split/fc1/shared"].sel(round=2).values
    assert shared.any()
    assert not shared.all()
    results = fedstat.icc(run, layer="fc1")
    assert list(results) == ["fc1, shared", "fc1, personal"]
    whole = changes(run, "fc1")
    for name, units in {"fc1, shared": shared, "fc1, personal": ~shared}.items():
        alone = fedstat.icc(whole.isel(unit=np.flatnonzero(units)))
        np.testing.assert_array_equal(results[name].units, np.flatnonzero(units))
        np.testing.assert_allclose(results[name].agreement, alone.agreement, atol=1e-12)
        np.testing.assert_allclose(results[name].layer["icc"], alone.layer["icc"], atol=1e-12)
    assert "change over 1 round)" in " ".join(repr(results["fc1, shared"]).split())
    history = run["split/fc1/shared"].values[:2, ~shared]
    longest, shortest = (3 - np.where(history.any(0), 1, 0)).max(), (3 - np.where(history.any(0), 1, 0)).min()
    span = f"{longest} rounds" if longest == shortest else f"{shortest} to {longest} rounds"
    assert f"change over {span})" in " ".join(repr(results["fc1, personal"]).split())
    by_factors = fedstat.split(run, layer="fc1", n_factors=2)
    assert by_factors.icc is None
    text = " ".join(repr(by_factors).split())
    assert f"(change over 1 round in shared units, over {span} in personal units)" in text
    assert "Agreement: not compared, since units changed over unlike numbers of rounds" in text
    assert not by_factors.contradicted


# Replicates of a run.


def test_replicates_are_the_halves_that_the_run_trained(runs: dict[str, xr.DataTree]) -> None:
    run = train("fedper", probe="split-half")
    w = run["replicates/fc1/w"].sel(checkpoint=3)
    assert w.dims == ("client", "replicate", "unit", "weight")
    found = fedstat.variance_components(run)
    assert list(found) == ["fc1"]
    np.testing.assert_array_equal(found["fc1"].reliability, fedstat.variance_components(w).reliability)
    assert "Weights of split-half training, round 3, 8 clients" in repr(found)
    by_test = fedstat.split(run, layer="fc1", method="icc", tau="test")
    np.testing.assert_array_equal(by_test.shared, fedstat.split(w, method="icc", tau="test").shared)
    with pytest.raises(ValueError, match="layer 'fc2' has no shared units in round 3"):
        fedstat.variance_components(run, layer="fc2")
    with pytest.raises(ValueError, match=r"holds no replicates.*Train it with probe='split-half'"):
        fedstat.variance_components(runs["fedavg"])
    unlike = train("local", probe="split-half")
    with pytest.raises(ValueError, match="layer 'fc1' has no shared units in round 3"):
        fedstat.variance_components(unlike)


def test_replicates_leave_out_personal_units() -> None:
    run = train("fedfac", probe="split-half")
    shared = run["common/fc1/downloaded"].sel(checkpoint=3).values
    assert 0 < shared.sum() < 12
    found = fedstat.variance_components(run, layer="fc1")
    np.testing.assert_array_equal(found.units, np.flatnonzero(shared))
    assert f"the {shared.sum()} units that clients share" in " ".join(repr(found).split())


def test_the_output_layer_of_clients_that_lack_classes_has_a_caution(runs: dict[str, xr.DataTree]) -> None:
    run = runs["fedavg"]
    hidden, output = run["trained"].children
    found = fedstat.icc(run, layer=output)
    assert found.skewed_classes
    assert not fedstat.icc(run, layer=hidden).skewed_classes
    complete = run.copy()
    samples = run["clients"].to_dataset()
    complete["clients"] = xr.DataTree(samples.assign(n_train=samples["n_train"] + 1))
    assert not fedstat.icc(complete, layer=output).skewed_classes
    for p_value in (0.01, 0.5):
        coefficients = (
            c._replace(p_value=np.full_like(c.icc, p_value)) for c in (found.coefficients, found.layer_coefficients)
        )
        result = replace(found, **dict(zip(("coefficients", "layer_coefficients"), coefficients, strict=True)))
        assert ("Units are classes" in [one.title for one in result.cautions()]) == (p_value == 0.01)
