"""Metrics of clients are scikit-learn's, in every kind of run; predictions are those the accuracy was measured with."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from algorithm_jobs import SAMPLES, dataset, job, make, net_of
from sklearn import metrics as sklearn_metrics
from small_runs import NET, SETTINGS, dense, interrupt, same, three_splits

import fedstat
from fedstat import fl, store
from fedstat.data import partition
from fedstat.fl import aggregate, algorithms, chunks, losses, nets, train
from fedstat.fl.job import Metrics
from fedstat.fl.metrics import METRICS, Tally

ALL = {"metrics": [*METRICS], "store_predictions": True}


def expected(y, predicted, probability):
    """The metrics of one client by scikit-learn."""
    labels = np.arange(probability.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that lack samples
        recall = sklearn_metrics.recall_score(y, predicted, labels=labels, average=None, zero_division=np.nan)
        binary = len(labels) == 2
        lacks = not np.isin(labels, y).all()
        auc = np.nan if lacks else sklearn_metrics.roc_auc_score(
            y, probability[:, 1] if binary else probability, multi_class="ovr", average="macro"
        )  # fmt: skip
        return {
            "class_accuracy": recall,
            "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(y, predicted),
            "macro_f1": sklearn_metrics.f1_score(y, predicted, average="macro", zero_division=0),
            "auc": auc,
        }


CASES = {
    "one output": (1, [40, 1, 300, 7], 2),
    "two outputs": (2, [40, 1, 300, 7], 2),
    "five classes": (5, [40, 1, 300, 7, 600], 5),
    "a class without samples": (5, [40, 200], 4),
    "one class": (5, [40, 200], 1),
    "ties": (3, [50, 9, 256, 257], 3),
}


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_scikit_learn(case):
    outputs, sizes, n_drawn = CASES[case]
    rng, most = np.random.default_rng(len(case)), max(sizes)
    classes = max(outputs, 2)
    loss = losses.for_outputs(outputs)
    small = job(algorithms.fedavg(), net=nets.mlp([6, 10, outputs]))
    small = replace(small, loss=loss, metrics=Metrics((*METRICS,), np.arange(classes)))
    out = torch.from_numpy(rng.normal(size=(len(sizes), most, outputs)).round(0 if case == "ties" else 9)).float()
    y = torch.from_numpy(rng.integers(n_drawn, size=(len(sizes), most)))
    real = torch.arange(most) < torch.tensor(sizes)[:, None]
    tally = Tally(small, np.arange(len(sizes)))
    for block in nets.sample_blocks(most):
        part = out[:, block]
        tally.add(part, y[:, block], real[:, block])
    values = tally.values()
    assert [*values] == [*METRICS]
    for client, n in enumerate(sizes):
        labels, predicted = y[client, :n].numpy(), loss.predict(out)[client, :n].numpy()
        probability = loss.probability(out.double())[client, :n].numpy()
        for name, value in expected(labels, predicted, probability).items():
            np.testing.assert_allclose(values[name][client], value, rtol=0, atol=1e-12, err_msg=f"{name}, {client}")
    lacking = [len(np.unique(y[c, :n])) < classes for c, n in enumerate(sizes)]
    np.testing.assert_array_equal(np.isnan(values["auc"]), lacking)
    assert not np.isnan(values["macro_f1"]).any()


def of_client(run, client):
    """Labels, and predictions, of a client's test samples."""
    group = run["predictions"].to_dataset()
    mine = group["client"].to_numpy() == client
    return group["y"].to_numpy()[mine], group["prediction"].to_numpy()[mine]


def assert_consistent(run):
    """Assert that predictions are of the last evaluation, and metrics those of the predictions."""
    last = run["metrics"].to_dataset().isel(round=-1)
    for client in range(last.sizes["client"]):
        y, predicted = of_client(run, client)
        assert len(y) == last["n_test"][client]
        np.testing.assert_allclose((y == predicted).mean(), last["accuracy"][client], rtol=1e-6)
        n_classes = len(last["class"])
        by_label = expected(y, predicted, np.full((len(y), n_classes), 1 / n_classes))
        for name in ("balanced_accuracy", "macro_f1"):
            np.testing.assert_allclose(last[name][client], by_label[name], rtol=1e-6)
        accuracies = by_label["class_accuracy"]
        if "label" in run["clients"]:
            label = run["clients/label"].to_numpy()[client]
            accuracies = np.where(label < 0, np.nan, accuracies[label])
        np.testing.assert_allclose(last["class_accuracy"][client], accuracies, rtol=1e-6)


OFTEN = ("fedavg", "fedper", "fedem", "fedamp", "fedavg+", "fedcp", "factorized-fl-beta")


@pytest.mark.parametrize("name", OFTEN)
def test_a_run_with_metrics_is_the_run_without_and_predicts_what_it_was_scored_with(name):
    options = {"rounds": 2, "participation": 0.5, "batch_size": 5, "lr": 0.1, "seed": 4, "threads": 1}
    go = partial(train, dataset(SAMPLES, method=name), net_of(name), make(name), **options)
    plain, run = go(), go(**ALL)
    assert_consistent(run)
    assert {"predictions", *METRICS, "n_test"} == {
        *(set(run.children) - set(plain.children)), *(set(run["metrics"]) - set(plain["metrics"])),
        *(set(run["clients"].data_vars) - set(plain["clients"].data_vars)),
    }  # fmt: skip
    for node in plain.subtree:
        for array, values in node.data_vars.items():
            if array != "seconds":
                np.testing.assert_array_equal(values, run[f"{node.path}/{array}"], err_msg=array)
    assert run["metrics/auc"].dims == ("round", "client")
    assert run["metrics/class_accuracy"].dims == ("round", "client", "class")
    cut = go(client_chunk=1, **ALL)
    for metric in METRICS:
        np.testing.assert_allclose(cut[f"metrics/{metric}"], run[f"metrics/{metric}"], atol=1e-6)


def test_the_area_of_a_run_is_that_of_its_models():
    run = train(dense(), NET, algorithms.fedper(), rounds=2, metrics="auc", **SETTINGS)
    data = dense().isel(sample=slice(24, None))
    for client in range(5):
        params = fl.stored.state_dict(run, client)
        x = torch.from_numpy(data.x[client].to_numpy()).float()
        hidden = torch.relu(x @ params["fc1.weight"].T + params["fc1.bias"])
        score = (hidden @ params["fc2.weight"].T + params["fc2.bias"])[:, 0]
        y = data.y[client].to_numpy()
        area = sklearn_metrics.roc_auc_score(y, score) if 0 < y.mean() < 1 else np.nan
        np.testing.assert_allclose(run["metrics/auc"][-1, client], area, rtol=1e-6)


def test_clients_that_number_classes_differently_have_accuracies_by_class_and_predict_labels():
    data = partition.permute_labels(partition.iid(fedstat.data.load("digits"), clients=4))
    data = fedstat.data.to_float(partition.train_test(data, test=0.3))
    algorithm = algorithms.personal_head(algorithms.fedavg())
    run = train(data, nets.mlp([64, 10, 10]), algorithm, rounds=3, participation=0.5, lr=0.1, **ALL)
    assert_consistent(run)
    for client in range(4):
        y, predicted = of_client(run, client)
        label = run["clients/label"].to_numpy()[client]
        classes = np.argsort(label)
        by_class = sklearn_metrics.recall_score(classes[y], classes[predicted], average=None, labels=np.arange(10))
        np.testing.assert_allclose(run["metrics/class_accuracy"][-1, client], by_class, rtol=1e-6)
        np.testing.assert_array_equal(run["clients/n_test"][client], np.bincount(classes[y], minlength=10))
    dims = ("client", "sample")
    both = dense().assign_coords(y_true=(dims, np.where(np.arange(5)[:, None] % 2, 1 - dense().y, dense().y)))
    algorithm = algorithms.personal_head(algorithms.fedavg())
    with pytest.raises(ValueError, match="class_accuracy needs each sample's class"):
        train(both, NET, algorithm, rounds=1, metrics="class_accuracy")
    assert "auc" in train(both, NET, algorithm, rounds=1, metrics="auc")["metrics"]


@pytest.mark.parametrize(
    "rule",
    [
        {"epochs": 1},
        {"epochs": (0, 2), "held_out": "validation"},
        {"epochs": (0, 2), "by": "client", "held_out": "halves"},
    ],
)
def test_a_prediction_rule_has_the_metrics_of_a_run_of_its_algorithm(rule):
    wrap, options = partial(algorithms.finetuned, **rule), {"rounds": 2, "metrics": [*METRICS]} | SETTINGS
    ruled = train(three_splits(), NET, algorithms.fedavg(), prediction_rules={"rule": wrap}, **options)
    alone = train(three_splits(), NET, wrap(algorithms.fedavg()), store_predictions=True, **options)
    assert_consistent(alone)
    for name in METRICS:
        expected_values = alone[f"metrics/{name}"].isel(round=-1)
        np.testing.assert_array_equal(ruled[f"prediction_rules/{name}"].isel(rule=0), expected_values, err_msg=name)


def test_texts_and_many_labels():
    rng = np.random.default_rng(0)
    data = xr.Dataset(
        {
            "x": (("client", "sample", "token"), rng.integers(1, 20, (3, 30, 6))),
            "y": (("client", "sample"), rng.integers(0, 200, (3, 30))),
        },
        coords={"split": ("sample", np.repeat(np.array(["train", "test"], object), [20, 10]))},
    )
    net = nets.fasttext((6,), 200, vocabulary=20)
    run = train(data, net, algorithms.fedavg(), rounds=1, **ALL)
    assert_consistent(run)
    assert run["predictions/prediction"].dtype == "int16"
    np.testing.assert_array_equal(run["predictions/y"], data.y.isel(sample=slice(20, None)).to_numpy().ravel())
    assert np.isnan(run["metrics/auc"]).all()


def test_interrupted_extended_and_finished_runs_have_the_metrics_of_uninterrupted_ones(tmp_path):
    go = partial(train, dense(), NET, algorithms.fedper(), evaluate_every=2, **ALL, **SETTINGS)
    interrupt(go, after=2, out=tmp_path / "a", rounds=3)
    unfinished = fedstat.open_run(tmp_path / "a")
    assert (unfinished["predictions/prediction"] == -1).all(), "no label"
    resumed = go(rounds=3, out=tmp_path / "a", resume=True)
    same(resumed, go(rounds=3))
    longer = go(rounds=4, out=tmp_path / "a", resume=True)
    assert np.isnan(longer["metrics/auc"].sel(round=3)).all()
    same(longer, go(rounds=4))
    assert not store.damage(tmp_path / "a", checksums=True)
    with pytest.raises(ValueError, match=r"other settings \(metrics: .* stored, \[\] now"):
        train(dense(), NET, algorithms.fedper(), rounds=4, out=tmp_path / "a", resume=True, evaluate_every=2,
              store_predictions=True, **SETTINGS)  # fmt: skip
    interrupt(go, after=2, out=tmp_path / "b", rounds=3)
    short = fl.finish(tmp_path / "b")
    assert "predictions" not in short.children
    for name in METRICS:
        np.testing.assert_array_equal(short[f"metrics/{name}"], longer[f"metrics/{name}"][:2])


def test_clients_on_disk_and_private_runs_have_them_too(tmp_path):
    options = {"rounds": 2, **SETTINGS, **ALL}
    in_memory = train(dense(), NET, algorithms.fedper(), **options)
    same(train(dense(), NET, algorithms.fedper(), memory_budget="64GiB", out=tmp_path / "a", **options), in_memory)
    private = aggregate.private(clip=1.0, noise_multiplier=1.0)
    options |= {"participation": 0.5, "sampling": "poisson"}
    assert_consistent(train(dense(), NET, algorithms.fedavg(), aggregator=private, **options))


def test_predictions_that_exceed_the_memory_budget_are_refused_before_training(monkeypatch):
    monkeypatch.setattr(chunks, "remaining_bytes", lambda *_: 100)
    with pytest.raises(ValueError, match=r"store_predictions holds .* of 5 clients, but memory_budget leaves"):
        train(dense(), NET, algorithms.fedper(), rounds=1, store_predictions=True, memory_budget="1GiB")


def test_a_metric_that_does_not_exist_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"metrics must be one of 'class_accuracy'.*Did you mean 'macro_f1'"):
        train(dense(), NET, algorithms.fedavg(), rounds=1, metrics=["auc", "f1_macro"])


@pytest.mark.gpu
def test_cuda_measures_what_the_cpu_does():
    on_cpu, on_gpu = (
        train(dense(clients=40), NET, algorithms.fedper(), rounds=2, device=device, **ALL, **SETTINGS)
        for device in ("cpu", "cuda")
    )
    for name in METRICS:
        np.testing.assert_allclose(on_gpu[f"metrics/{name}"], on_cpu[f"metrics/{name}"], atol=0.13)  # one of 8 samples
    assert (on_gpu["predictions/prediction"] == on_cpu["predictions/prediction"]).mean() > 0.98
