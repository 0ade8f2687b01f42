"""Runs by name, by settings and by command."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from fl_runs import SMALL, command
from real_data import require_real_data

import fedstat
from fedstat import store
from fedstat.data import to_float
from fedstat.fl import algorithms, job, nets, train
from fedstat.study import experiment, report
from fedstat.study.run_settings import Settings


def test_a_run_by_name_is_the_run_that_its_parts_make(tmp_path):
    settings = SMALL.but(tau=0.5, kappa=0.75, validation_fraction=0.2)
    by_name = experiment.run(settings, out=tmp_path / "a.zarr")
    fed, new = experiment.federated(settings)
    assert new is None
    by_hand = train(
        fed, nets.mlp([64, 200, 10]), algorithms.fedfac(["fc1"], kappa=0.75, tau=0.5), rounds=3, participation=0.5,
        local_epochs=1, batch_size=10, optimizer="adam", lr=1e-3,
    )  # fmt: skip
    for name in ("accuracy", "loss", "validation_accuracy", "accuracy_before", "train_loss", "bytes_up", "bytes_down"):
        np.testing.assert_array_equal(by_name[f"metrics/{name}"], by_hand[f"metrics/{name}"])
    config = json.loads(by_name.attrs["config"])
    assert config["partition"] == "dirichlet:0.1"
    assert config["scenario"] == "digits, dirichlet:0.1"


@pytest.mark.parametrize(
    ("partition", "classes"), [("iid", 10), ("one-class", 1), ("pathological:2", 2), ("dirichlet-equal:1000", 10)]
)
def test_partitions_by_name(partition, classes):
    fed, _ = experiment.federated(Settings(partition=partition, clients=10, max_samples=100))
    held = [len(np.unique(fed.y[fed.client == c])) for c in range(10)]
    assert max(held) == min(held) == classes
    counts = np.bincount(fed.client)
    assert counts.max() <= 100
    mean = to_float(fed).x.values[fed.split.values == "train"].mean()
    assert abs(mean) < 1e-5, "images are standardised by the training samples"


def test_new_clients_are_none_of_those_that_train():
    fed, new = experiment.federated(replace(SMALL, unseen_fraction=0.25))
    assert len(np.unique(new.client)) == 2
    assert not set(new.client.values) & set(fed.client.values)


def test_the_published_split_of_roles_is_kept_and_validation_is_drawn_from_training():
    settings = Settings(
        data="shakespeare-leaf", partition="natural", max_samples=100, validation_fraction=0.1, net="lstm"
    )
    fed, _ = experiment.federated(settings, require_real_data())
    size = {name: np.bincount(fed.client[fed.split == name]) for name in ("train", "validation", "test")}
    assert size["train"].max() == 72
    assert size["validation"].max() == 8
    assert size["test"].max() == 20
    assert len(size["train"]) == 37
    all_rows, _ = experiment.federated(settings.but(validation_fraction=0.0), require_real_data())
    trained = all_rows.x.values[all_rows.split.values == "train"][:80]  # the first client's, in time
    drawn = fed.x.values[(fed.split.values == "validation") & (fed.client.values == 0)]
    places = [int(np.flatnonzero((trained == row).all(1))[0]) for row in drawn]
    assert min(places) < 40, "validation samples are not the last"
    assert experiment.network(settings, fed).shapes["embedding.weight"][1] == len(fed.y.attrs["names"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"algorithm": "random", "tau": "1.5"}, "tau"),
        ({"algorithm": "random", "tau": "nan"}, "tau"),
        ({"kappa": 0.9, "options": ("kappa=0.5",)}, "kappa is given twice"),
        ({"options": ("method=pa",)}, "fedfac-dynamic takes layers, kappa, .*, but got 'method'"),
        ({"clinets": 3}, r"^there is no setting 'clinets'\. Did you mean 'clients', '\w+' or '\w+'\?$"),
        ({"qqqq": 3}, r"^there is no setting 'qqqq'\. Did you mean '\w+', '\w+' or '\w+'\?$"),
        ({"kappa": (0.5, 0.7)}, "kappa must be one value"),
        ({"layers": ()}, "layers must hold at least one value"),
        ({"algorithm": "random", "tau": "mean"}, "tau must be a number to size a random split"),
        ({"algorithm": "random", "tau": 0.5, "shared_fraction": 0.5}, "shared_fraction has no effect with tau"),
        ({"algorithm": "fedem", "options": ("components=2", "components=3")}, "once, but got 'components' twice"),
        ({"algorithm": "fedsplit", "options": ("shared=fc1",)}, "shared must be a mapping"),
    ],
)
def test_wrong_settings_say_what_was_wrong_before_any_data_are_read(wrong, message):
    with pytest.raises(ValueError, match=message):
        SMALL.but(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": ("conv7",)}, "conv7"),
        ({"layers": ("9",)}, "9"),
        ({"data": "ag-news"}, "net 'mlp' takes images, but ag-news holds texts. Choose lstm"),
        ({"max_samples": 1, "min_samples": 1}, r"these are too small: client 0 \(of 1 sample\), client 1"),
    ],
)
def test_what_only_the_network_or_the_data_can_tell_is_told_too(wrong, message):
    with pytest.raises(ValueError, match=message):
        experiment.run(SMALL.but(**wrong))


def test_hidden_layers_of_the_mlp_by_name():
    fed, _ = experiment.federated(SMALL)
    for given, sizes in (("hidden=5", [5, 10]), ("hidden=7,5", [7, 5, 10])):
        assert [*nets.layers(experiment.network(replace(SMALL, net_options=(given,)), fed)).values()] == sizes


def test_settings_are_the_same_however_they_are_said():
    said = [
        Settings.of(layers=["fc1"], tau=0.5, kappa=1),
        Settings.of(kappa=1.0, tau="0.50", layers="fc1"),
        Settings(options=("tau=.5", "kappa=1", "layers=fc1")),
        Settings.of(options=("kappa=1",), layers=("fc1",), tau=0.25).but(tau=0.5),
    ]
    assert len(set(said)) == 1
    assert said[0].options == ("layers=fc1", "kappa=1.0", "tau=0.5")
    assert Settings.of(layers=[1, "fc2"], warm_start=False).given == {"layers": (1, "fc2"), "warm_start": False}
    assert said[0].but(tau=None).given == {"layers": "fc1", "kappa": 1.0}


def test_random_splits_share_what_the_threshold_would():
    assert SMALL.but(algorithm="random", tau=0.75).make_algorithm().settings["shared_fraction"] == 0.25


def test_evaluation_now_and_then_leaves_the_other_rounds_nan():
    run = experiment.run(replace(SMALL, rounds=5, evaluate_every=2))
    there = np.isfinite(run["metrics/accuracy"].values).all(1)
    np.testing.assert_array_equal(there, [False, True, False, True, True])
    assert np.isfinite(run["metrics/train_loss"].values).sum(1).tolist() == [4] * 5


@pytest.mark.parametrize("in_hardware", [True, False])
def test_bfloat16_trains_nearly_as_float32_does(in_hardware, monkeypatch):
    monkeypatch.setattr(job, "_has_bfloat16", lambda: in_hardware)
    settings = replace(SMALL, rounds=1, partition="iid")
    a = experiment.run(settings)["metrics/loss"][-1].mean()
    with nullcontext() if in_hardware else pytest.warns(UserWarning, match="no instructions for bfloat16"):
        b = experiment.run(replace(settings, precision="bfloat16"))["metrics/loss"][-1].mean()
    assert float(a) == pytest.approx(float(b), abs=0.05)
    assert float(a) != float(b)


def test_a_report_shows_what_was_analysed_and_names_what_tells_nothing():
    texts = [
        report.report(experiment.run(SMALL.but(rounds=1, **settings)))
        for settings in ({"kappa": 1.0}, {"tau": "inf"}, {"algorithm": "fedper", "ablation": 1}, {})
    ]
    told, personal, head, usual = texts
    assert "all communalities are equal" in told
    assert "communalities are equal" not in usual
    assert "  0/200" in personal
    assert "Split" not in head
    assert "Random values replaced no unit" in head
    assert "round 1\n" in usual


def test_the_command_trains_reports_and_resumes(tmp_path, capsys):
    out = tmp_path / "run.zarr"
    args = ("--clients", 8, "--participation", 0.5, "--rounds", 3, "--max-samples", 40, "--validation-fraction", 0.2,
            "--unseen-fraction", 0.25, "--ablation", 2, "--tau", 0.5, "--out", out)  # fmt: skip
    assert command(*args) == 0
    said = capsys.readouterr().out
    for text in ("3 rounds, 6 clients, seed 0", "MB uploaded", "fc1 ", "unseen clients: global", "personal, N(0, 1)"):
        assert text in said
    assert "50% of clients per round" in said
    assert command(*args, "--resume") == 0
    assert capsys.readouterr().out == said
    assert command("--out", out, "--resume") == 0, "the settings are those of the run"
    assert capsys.readouterr().out == said
    assert command("--out", out, "--resume", "--tau", 0.5, "--clients", 8) == 0
    with pytest.raises(SystemExit):
        command("--out", out, "--resume", "--tau", 0.75)
    assert "was started with other settings" in capsys.readouterr().err
    run = store.open_run(out)
    assert isinstance(run, xr.DataTree)
    assert run["unseen_clients/accuracy"].dims == ("rule", "client")


def test_the_layers_whose_weights_are_kept_are_all_none_or_those_named():
    assert Settings().keep_weights == Settings(keep_weights=()).keep_weights == ("all",)
    assert Settings().layers_kept is None
    assert Settings(keep_weights="none").layers_kept == ()
    assert Settings(keep_weights=["fc1"]).layers_kept == ("fc1",)
    for wrong in (["none", "fc1"], ["all", "fc1"], ["fc7"]):
        with pytest.raises(ValueError, match="keep_weights must be one of"):
            Settings(keep_weights=wrong)


def test_metrics_are_settings(tmp_path, capsys):
    settings = SMALL.but(metrics=["auc", "macro_f1"], store_predictions=True, partition="iid")
    assert settings.metrics == ("macro_f1", "auc")
    assert settings == SMALL.but(metrics=("macro_f1", "auc"), store_predictions=True, partition="iid")
    for wrong, message in (
        ({"metrics": ["f1_macro"]}, "Did you mean 'macro_f1'"),
        ({"metrics": 3}, "metrics must be"),
        ({"metrics": ["auc", "auc"]}, "none twice"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)
    done = experiment.run(settings, out=tmp_path / "a.zarr")
    assert Settings(**experiment.settings_of(tmp_path / "a.zarr")) == settings.but(scenario=settings.name)
    assert {"macro_f1", "auc"} < set(done["metrics"])
    assert done["predictions/prediction"].dtype == "int8"
    args = ("--clients", 8, "--rounds", 1, "--max-samples", 40, "--partition", "iid", "--algorithm", "fedavg",
            "--metrics", "class_accuracy", "balanced_accuracy", "auc", "--store-predictions", "--out",
            tmp_path / "b.zarr")  # fmt: skip
    assert command(*args) == 0
    said = " ".join(capsys.readouterr().out.split())
    run = store.open_run(tmp_path / "b.zarr")
    last, n_test = run["metrics"].to_dataset().isel(round=-1), run["clients/n_test"].to_numpy()
    balanced = np.average(last["balanced_accuracy"], weights=last["n_test"])
    by_class = np.nansum(last["class_accuracy"].to_numpy() * n_test, 0) / n_test.sum(0)
    n_defined = int(np.isfinite(last["auc"]).sum())
    low, high = by_class.argmin(), by_class.argmax()
    assert f"Other metrics, round 1: balanced accuracy {balanced:.3f}, AUC" in said
    assert f"({n_defined} of 8 clients; others lack a class)" in said
    assert f"accuracy by class {by_class[low]:.3f} ({low}) to {by_class[high]:.3f} (" in said
    assert f"balanced accuracy {balanced:.3f}" in fedstat.summary(run)["metrics"]
    with pytest.raises(SystemExit):
        command("--metrics", "f1_macro")
    assert "Did you mean 'macro_f1'" in capsys.readouterr().err


def test_a_run_is_resumed_and_read_with_its_own_settings(tmp_path):
    out = tmp_path / "run.zarr"
    settings = SMALL.but(clients=6, rounds=1, algorithm="fedavg", stratify=True)
    experiment.run(settings, out=out)
    before = store.config_of(out)
    assert Settings(**experiment.settings_of(out)) == settings.but(scenario=settings.name)
    assert command("--out", out, "--resume", "--rounds", 2) == 0
    assert store.config_of(out) == before | {"rounds": 2, "checkpoints": [2]}
    with pytest.raises(SystemExit):
        command("--out", out, "--resume", "--local-epochs", 5)
