"""Real-valued targets: training is gradient descent on pooled data, scores are scikit-learn's, in every kind of run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from children import together
from regression_data import RUN, SIZES, dataset, train_rank
from sklearn import metrics as sklearn_metrics
from small_runs import interrupt, near, same

import fedstat
from fedstat.fl import aggregate, algorithms, losses, nets, train
from fedstat.study import report

NAMED = {"squared": torch.nn.MSELoss, "absolute": torch.nn.L1Loss, "huber": torch.nn.HuberLoss}
REFUSED = {
    "fedem": "fedem needs classes",
    "fedrod": "fedrod needs classes",
    "pfedsd": "pfedsd needs classes",
}


def parts(data, client, subset):
    """Inputs and targets (sample, target) of one client."""
    one = data.isel(sample=np.flatnonzero((data["split"] == subset) & (data["client"] == client)))
    y = one["y"].to_numpy()
    return one["x"].to_numpy(), y if y.ndim > 1 else y[:, None]


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("name", NAMED)
def test_losses_are_those_of_pytorch(name, targets):
    loss, rng = losses.LOSSES[name], np.random.default_rng(0)
    out = torch.from_numpy(2 * rng.normal(size=(2, 7, targets))).requires_grad_()
    y, weight = torch.from_numpy(rng.normal(size=out.shape)), torch.from_numpy(rng.random((2, 7)))
    value = NAMED[name](reduction="none")(out, y).mean(-1)
    torch.testing.assert_close(loss.value(out.detach(), y), value.detach())
    (expected,) = torch.autograd.grad((value * weight).sum(), out)
    torch.testing.assert_close(loss.gradient(out.detach().clone(), y, weight), expected)
    assert loss.predict(out) is out


@pytest.mark.parametrize("targets", [1, 2])
def test_fedavg_with_full_batches_is_gradient_descent_on_the_pooled_data(targets):
    data = dataset(targets=targets)
    x, y = (np.concatenate(p) for p in zip(*(parts(data, c, "train") for c in range(4)), strict=True))
    net, lr = nets.mlp([5, targets]), 0.1
    run = train(
        data,
        net,
        algorithms.fedavg(),
        rounds=400,
        lr=lr,
        batch_size=None,
        local_epochs=1,
        checkpoints=[1],
        evaluate_every=400,
    )
    design = np.hstack([x, np.ones((len(x), 1))])
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    last = run["weights/fc1"].to_dataset().isel(checkpoint=-1, client=0)
    np.testing.assert_allclose(last["w"].to_numpy(), solution[:-1].T, atol=2e-5)
    np.testing.assert_allclose(last["b"].to_numpy(), solution[-1], atol=2e-5)
    first = run["weights/fc1"].to_dataset().isel(checkpoint=0, client=0)
    theta = np.vstack([first["w"].to_numpy().T, first["b"].to_numpy()[None]]).astype(float)
    for _ in range(9):
        theta -= lr * 2 / (len(x) * targets) * design.T @ (design @ theta - y)
    tenth = train(data, net, algorithms.fedavg(), rounds=10, lr=lr, batch_size=None, local_epochs=1)
    again = tenth["weights/fc1"].to_dataset().isel(checkpoint=-1, client=0)
    np.testing.assert_allclose(again["w"].to_numpy(), theta[:-1].T, atol=1e-5)
    np.testing.assert_allclose(again["b"].to_numpy(), theta[-1], atol=1e-5)


def predicted(run, client):
    """Predictions and targets (sample, target) of one client, as the run stores them."""
    one = run["predictions"].to_dataset()
    one = one.isel(sample=np.flatnonzero(one["client"] == client))
    values = one["prediction"].to_numpy(), one["y"].to_numpy()
    return [v if v.ndim > 1 else v[:, None] for v in values]


@pytest.mark.parametrize("targets", [1, 2])
def test_scores_are_those_of_scikit_learn(targets):
    data = dataset(targets=targets, n_test=300)  # more than a block of samples
    run = train(data, nets.mlp([5, 6, targets]), algorithms.fedper(), store_predictions=True, **RUN)
    last = run["metrics"].to_dataset().isel(round=-1)
    for c in range(4):
        guess, y = predicted(run, c)
        np.testing.assert_allclose(y, parts(data, c, "test")[1], rtol=1e-6)
        mse = sklearn_metrics.mean_squared_error(y, guess, multioutput="raw_values")
        np.testing.assert_allclose(last["rmse"][c], np.sqrt(mse).mean(), rtol=1e-5)
        np.testing.assert_allclose(last["loss"][c], mse.mean(), rtol=1e-5)
        np.testing.assert_allclose(last["mae"][c], sklearn_metrics.mean_absolute_error(y, guess), rtol=1e-5)
        np.testing.assert_allclose(last["r2"][c], sklearn_metrics.r2_score(y, guess), rtol=1e-5)
    clients = run["clients"].to_dataset()
    assert clients["n_train"].values.tolist() == SIZES
    of_first = parts(data, 0, "train")[1]
    np.testing.assert_allclose(clients["target_mean"][0], of_first.mean(0), rtol=1e-6)
    np.testing.assert_allclose(clients["target_sd"][0], of_first.std(0), rtol=1e-6)


def test_scores_of_standardized_targets_are_in_the_units_of_the_targets():
    data, mean, sd = dataset(targets=2), np.array([40.0, -3.0]), np.array([25.0, 0.2])
    scaled = data.assign(y=data["y"].assign_attrs(mean=mean.tolist(), sd=sd.tolist()))
    options = {"store_predictions": True, "unseen_clients": dataset(targets=2, seed=5)} | RUN
    plain, run = (train(d, nets.mlp([5, 6, 2]), algorithms.fedavg(), **options) for d in (data, scaled))
    np.testing.assert_allclose(run["metrics/loss"], plain["metrics/loss"])
    np.testing.assert_allclose(run["metrics/r2"], plain["metrics/r2"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        run["predictions/prediction"], plain["predictions/prediction"] * sd + mean, rtol=1e-5, atol=1e-5
    )
    for c in range(4):
        guess, y = predicted(run, c)
        rmse = np.sqrt(sklearn_metrics.mean_squared_error(y, guess, multioutput="raw_values")).mean()
        np.testing.assert_allclose(run["metrics/rmse"][-1, c], rmse, rtol=1e-4)
        np.testing.assert_allclose(run["metrics/mae"][-1, c], sklearn_metrics.mean_absolute_error(y, guess), rtol=1e-4)
        np.testing.assert_allclose(run["clients/target_mean"][c], plain["clients/target_mean"][c] * sd + mean)
    assert (run["unseen_clients/rmse"] > 5 * plain["unseen_clients/rmse"]).all()


@pytest.mark.parametrize(("n_test", "value"), [(12, 2.5), (5, 3.5), (6, 2.0), (10, 3.3), (1, 0.1)])
def test_targets_that_do_not_vary_have_no_r2(n_test, value):
    data = dataset(n_test=n_test)
    y = data["y"].where(~((data["client"] == 1) & (data["split"] == "test")), value)
    run = train(data.assign(y=y), nets.mlp([5, 4, 1]), algorithms.fedavg(), **RUN)
    is_constant = [n_test == 1, True, n_test == 1, n_test == 1]
    assert np.isnan(run["metrics/r2"].values).all(0).tolist() == is_constant
    if n_test == 1:
        return
    text = report.report(run)
    assert "R²" in text
    assert "(3 of 4 clients; others have constant targets)" in " ".join(text.split())


@pytest.mark.parametrize(
    "name", [*algorithms.ALGORITHMS, "fedavg+", "fedavg-shrunken", "fedavg-personal-head", "fedavg-low-rank"]
)
def test_every_algorithm_trains_or_is_refused_by_its_name(name):
    options = {"fedsplit": {"shared": {1: np.arange(6) % 2 == 0}}, "pfedme": {"lam": 1.0, "eta": 0.05}}.get(name, {})
    net = nets.mlp([5, 6, 1])
    if name.startswith("fedbn"):
        layers = [torch.nn.Linear(5, 6), torch.nn.LayerNorm(6), torch.nn.ReLU(), torch.nn.Linear(6, 1)]
        net = nets.from_module(torch.nn.Sequential(*layers), [5], start="random")
    algorithm, data = algorithms.named(name, **options), dataset(validation=name.startswith("fedfomo"))
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            train(data, net, algorithm, **RUN)
        return
    run = train(data, net, algorithm, **RUN | {"rounds": 6, "lr": 0.03})
    rmse = run["metrics/rmse"].mean("client").values
    assert np.isfinite(rmse).all()
    assert rmse[-1] < rmse[0], rmse


def test_a_loss_of_an_own_algorithm_keeps_the_task():
    example = Path(__file__).parents[2] / "docs/examples/ditto.py"
    algorithm = algorithms.named(f"{example}:ditto")
    run = train(dataset(), nets.mlp([5, 6, 1]), algorithm, **RUN | {"rounds": 6, "lr": 0.03})
    rmse = run["metrics/rmse"].mean("client").values
    assert rmse[-1] < rmse[0]


def test_predictions_of_targets_far_from_zero_keep_their_digits():
    data = dataset()
    y = data["y"].assign_attrs(mean=1.7e9, sd=2.0)
    run = train(data.assign(y=y), nets.mlp([5, 6, 1]), algorithms.fedavg(), store_predictions=True, **RUN)
    for c in range(4):
        guess, true = predicted(run, c)
        rmse = np.sqrt(((guess - true) ** 2).mean())
        np.testing.assert_allclose(run["metrics/rmse"][-1, c], rmse, rtol=1e-5)
        np.testing.assert_allclose(true, parts(data, c, "test")[1] * 2 + 1.7e9, atol=1e-6)


def test_targets_may_be_numbers_of_any_type():
    data = dataset()
    runs = [
        train(data.assign(y=data["y"].astype("float32").astype(kind)), nets.mlp([5, 6, 1]), algorithms.fedavg(), **RUN)
        for kind in ("float32", "float64", object)
    ]
    for run in runs[1:]:
        same(run, runs[0])


def test_prediction_rules_must_be_named():
    with pytest.raises(ValueError, match="prediction_rules must map names to functions"):
        train(dataset(), nets.mlp([5, 6, 1]), algorithms.fedavg(), prediction_rules=["fedavg+"], **RUN)


def test_soft_labels_are_refused():
    with pytest.raises(ValueError, match="fedphp transfer=kd needs classes, for its soft labels"):
        train(dataset(), nets.mlp([5, 6, 1]), algorithms.fedphp(transfer="kd"), **RUN)


def test_every_measurement_is_there_and_an_ensemble_averages_predictions():
    data, unseen = dataset(validation=True, targets=2), dataset([9, 14], seed=8, targets=2)
    rules = {"plus": algorithms.finetuned, "shrunken": algorithms.shrunken}
    algorithm = algorithms.fedsplit({1: np.arange(6) % 2 == 0})
    run = train(
        data, nets.mlp([5, 6, 2]), algorithm, unseen_clients=unseen, ablation=2, prediction_rules=rules,
        probe=["split-half", "drift"], store_predictions=True, **RUN,
    )  # fmt: skip
    assert {"rmse", "validation_rmse", "rmse_before", "mae", "r2"} <= set(run["metrics"].data_vars)
    assert "accuracy" not in run["metrics"]
    assert run["prediction_rules/rmse"].sizes == {"rule": 2, "client": 4}
    assert run["ablation/rmse"].sizes == {"part": 5, "draw": 2, "client": 4}
    assert (run["ablation/rmse"].sel(part="personal") > run["ablation/rmse"].sel(part="none")).mean() > 0.5
    tensors = [
        {n: torch.from_numpy(run[f"weights/{layer}/{v}"].isel(checkpoint=-1, client=c).to_numpy())
         for layer in ("fc1", "fc2") for n, v in ((f"{layer}.weight", "w"), (f"{layer}.bias", "b"))}
        for c in range(4)
    ]  # fmt: skip
    x, y = parts(unseen, 0, "test")
    outs = []
    for p in tensors:
        h = torch.relu(torch.from_numpy(x).float() @ p["fc1.weight"].T + p["fc1.bias"])
        outs.append((h @ p["fc2.weight"].T + p["fc2.bias"]).numpy())
    rmse = np.sqrt(((np.mean(outs, 0) - y) ** 2).mean(0)).mean()
    np.testing.assert_allclose(run["unseen_clients/rmse"].sel(rule="ensemble")[0], rmse, rtol=1e-5)


def test_a_run_resumes_to_equal_bits_with_clients_on_disk_too(tmp_path):
    def go(**options):
        return train(dataset(targets=2, validation=True), nets.mlp([5, 6, 2]), algorithms.ditto(), **RUN | options)

    expected = go(out=tmp_path / "whole.zarr")
    interrupt(lambda **options: go(out=tmp_path / "cut.zarr", **options), after=2)
    same(go(out=tmp_path / "cut.zarr", resume=True), expected)
    near(go(out=tmp_path / "disk.zarr", memory_budget="4GiB"), expected)
    near(go(out=tmp_path / "chunks.zarr", client_chunk=1, threads=2), expected)


def test_two_processes_equal_one(tmp_path):
    ended, printed = together(2, train_rank, str(tmp_path), folder=tmp_path)
    assert ended == [0, 0], printed
    near(
        fedstat.open_run(tmp_path / "run.zarr"),
        train(dataset(targets=2), nets.mlp([5, 6, 2]), algorithms.fedper(), **RUN),
    )


def test_a_private_run_trains_on_real_targets():
    private = aggregate.private(clip=0.5, noise_multiplier=0.01, delta=0.01)
    run = train(dataset(), nets.mlp([5, 6, 1]), algorithms.fedavg(), aggregator=private, **RUN | {"rounds": 8})
    rmse = run["metrics/rmse"].mean("client").values
    assert rmse[-1] < rmse[0]
    assert np.isfinite(run["metrics/epsilon"]).all()


def test_the_loss_is_chosen_by_name_and_stored():
    runs = {
        name: train(dataset(), nets.mlp([5, 6, 1]), algorithms.fedavg(), loss=name, **RUN) for name in (None, *NAMED)
    }
    same(runs[None], runs["squared"])
    assert len({float(run["weights/fc1/w"].sum()) for run in runs.values()}) == 3
    settings = fedstat.settings(runs["huber"])
    assert (settings["task"], settings["loss"]) == ("regression", "huber")
    assert "task" not in fedstat.settings(train(fedstat.sim.generate(clients=3, d=5, m=8, n_train=9, n_test=4),
                                                nets.mlp([5, 8, 1]), algorithms.fedavg(), rounds=1))  # fmt: skip


def counts(data):
    """Targets that are whole numbers, as floats."""
    return data.assign(y=np.round(np.abs(data["y"])))


WRONG = {
    "whole numbers": (lambda d: {"data": counts(d)}, "y holds whole numbers as float64, such as .* Set task="),
    "classes": (lambda d: {"data": d, "task": "classification"}, "must hold classes for task='classification'"),
    "unknown task": (lambda d: {"data": d, "task": "regresion"}, "Did you mean 'regression'"),
    "NaN": (lambda d: {"data": d.assign(y=d["y"].where(d["x"][:, 0] < 1.5))}, r"y must be finite .* at sample \d+"),
    "outputs": (lambda d: {"data": d, "net": nets.mlp([5, 6, 2])}, r"must have 1 output\(s\), one per real-valued"),
    "metrics of classes": (lambda d: {"data": d, "metrics": ["auc"]}, "metrics must be of regression, mae and r2"),
    "loss of classes": (lambda d: {"data": d, "loss": "cross-entropy"}, "loss for real-valued targets must be one of"),
    "texts": (lambda d: {"data": d.assign(y=d["y"].astype(str)), "task": "regression"}, "must hold real numbers for"),
    "dims": (lambda d: {"data": d.assign(y=d["y"].expand_dims(a=2, b=2))}, "y must hold one number for each sample"),
    "unseen clients": (lambda d: {"data": d, "unseen_clients": dataset([5, 5], targets=2)}, "unseen clients' samples"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_was_wrong_and_what_to_do(case):
    make, message = WRONG[case]
    arguments = {"net": nets.mlp([5, 6, 1]), "algorithm": algorithms.fedavg()} | make(dataset()) | RUN
    with pytest.raises(ValueError, match=message):
        train(**arguments)


def test_counts_train_once_the_task_is_set():
    data = counts(dataset())
    regression = train(data, nets.mlp([5, 6, 1]), algorithms.fedavg(), task="regression", **RUN)
    assert "rmse" in regression["metrics"]
    classes = train(data, nets.mlp([5, 6, 12]), algorithms.fedavg(), task="classification", **RUN)
    assert "accuracy" in classes["metrics"]
    whole = data.assign(y=data["y"].astype(int))
    same(train(whole, nets.mlp([5, 6, 1]), algorithms.fedavg(), task="regression", **RUN), regression)


def test_a_loss_of_regression_is_refused_for_classes():
    data = fedstat.sim.generate(clients=3, d=5, m=8, n_train=9, n_test=4)
    with pytest.raises(ValueError, match="loss for classes must be one of 'cross-entropy', but got 'huber'"):
        train(data, nets.mlp([5, 8, 1]), algorithms.fedavg(), rounds=1, loss="huber")
