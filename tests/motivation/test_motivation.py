"""The motivating study: python -m fedstat.motivation, on the digits; and on MNIST where its files are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import plain_loop
import pytest
import torch
import xarray as xr
from prints import require_golden
from real_data import require_real_data
from scipy import special, stats

import fedstat
from fedstat import data, motivation, plot, store
from fedstat._utils import streams
from fedstat.motivation import findings, statistics
from fedstat.motivation.__main__ import main
from fedstat.stats import entropy
from fedstat.store.journal import Journal

SMALL = {"clients": 20, "hidden": 12, "local_epochs": 2, "common_samples": 50, "replicates": 6, "seed": 3}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "m.zarr"
    motivation.study(**SMALL, out=path)
    return path


@pytest.fixture(scope="module")
def run(stored):
    return fedstat.open_run(stored).load()


def plain_client(case: str, client: int):
    """The same client trained by torch.nn and torch.optim, and its samples."""
    images = data.to_float(data.load("digits"))
    fed = {"iid": data.partition.iid, "one-class": data.partition.one_class}[case](images, clients=20, seed=3)
    mine = fed.client.values == client
    x, y = torch.from_numpy(fed.x.values[mine]).flatten(1), torch.from_numpy(fed.y.values[mine])
    net = plain_loop.module([64, 12, 10])
    start = fedstat.fl.nets.mlp([64, 12, 10]).init(streams.generator(3, "start"))
    net.load_state_dict(start)
    rng = streams.generator(3, "batches", 0, 0, client)
    plain_loop.train_client(net, x, y, lambda p: torch.optim.Adam(p, lr=1e-3), epochs=2, batch_size=16, rng=rng)
    return net, x, y


@pytest.mark.parametrize(("case", "client"), [("iid", 4), ("one-class", 17)])
def test_outputs_are_those_of_a_network_trained_alone(run, case, client):
    net, x, y = plain_client(case, client)
    with torch.no_grad():
        hidden = torch.relu(net.fc1(x)).mean(0)
        accuracy = (net(x).argmax(1) == y).double().mean()
    one = run["outputs"].to_dataset().sel(case=case, outputs="own", client=client)
    np.testing.assert_allclose(one["mean_output"], hidden, rtol=1e-4, atol=1e-6)
    assert one["accuracy"] == pytest.approx(float(accuracy))
    assert one["label"] == np.bincount(y).argmax()
    weights = run["weights/fc1"].to_dataset().sel(case=case, client=client)
    np.testing.assert_allclose(weights["w"], net.fc1.weight.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weights["b"], net.fc1.bias.detach(), rtol=1e-4, atol=1e-6)


def test_the_common_set_is_the_same_for_all_clients(run):
    rng = streams.generator(3, "motivation", "common")
    images = data.to_float(data.load("digits"))
    at = np.sort(rng.choice(np.arange(1797), 50, replace=False))
    x = images.x.values[at].reshape(50, 64).astype(np.float64)
    weights = run["weights/fc1"].to_dataset().sel(case="iid")
    hidden = np.maximum(np.einsum("sw,cuw->csu", x, weights["w"].values) + weights["b"].values[:, None], 0).mean(1)
    np.testing.assert_allclose(run["outputs/mean_output"].sel(case="iid", outputs="common"), hidden, atol=1e-5)


def test_both_cases_start_alike_and_one_class_clients_have_one_class(run):
    start = run["weights/fc1/start_w"].values
    moved = np.abs(run["weights/fc1/w"].values - start).max(axis=(-1, -2))
    assert ((moved > 0) & (moved < 0.2)).all()
    assert run["outputs/label"].sel(case="one-class").values.tolist() == np.repeat(np.arange(10), 2).tolist()
    accuracy = run["outputs/accuracy"].mean("client").sel(case="one-class")
    assert accuracy.sel(outputs="own") > 0.6  # of one class, which is soon learnt
    assert accuracy.sel(outputs="common") < 0.2


@pytest.mark.filterwarnings("ignore:.*have an exact copy:UserWarning")  # zeros of k clients or fewer
@pytest.mark.filterwarnings("ignore:samples lie in narrow groups:UserWarning")
def test_stored_entropies_are_those_of_the_stored_outputs(run):
    for case in ("iid", "one-class"):
        outputs = run["outputs/mean_output"].sel(case=case, outputs="own")
        found = fedstat.knn_entropy(outputs, ties="atoms")
        stored = run["dispersion"].to_dataset().sel(case=case, outputs="own")
        np.testing.assert_array_equal(stored["entropy"], found["entropy"])
        given = found.std_error.notnull()
        np.testing.assert_array_equal(stored["std_error"].where(given), found["std_error"])
        np.testing.assert_allclose(stored["n"], 20 * (1 - stored["atom_share"]))
        np.testing.assert_allclose(stored["spread"], outputs.std("client", ddof=1))


def test_communality_and_correlation_are_those_of_the_stored_weights(run):
    weights = run["weights/fc1/w"].sel(case="iid")
    updates = weights - run["weights/fc1/start_w"]
    for on, w in (("weights", weights), ("updates", updates)):
        for method in ("pc", "leverage"):
            nu = fedstat.split(w.transpose("client", "unit", "weight"), kappa=0.75, method=method).communality
            at = {"case": "iid", "on": on, "method": method}
            np.testing.assert_allclose(run["split/communality"].sel(at), nu, rtol=1e-6)
            h = run["dispersion/entropy"].sel(case="iid", outputs="own").values
            rho = stats.spearmanr(h, nu, nan_policy="omit").statistic
            assert run["relation/spearman"].sel({**at, "outputs": "own"}) == pytest.approx(rho)


def test_halves_are_halves_of_every_stratum():
    strata = np.repeat([0, 1, 2], [4, 4, 5])
    half = statistics.halves(strata, 200, seed=1)
    assert (half[:, :4].sum(1) == 2).all()
    assert set(half[:, 8:].sum(1)) == {2, 3}
    share = half.mean(0)
    assert (abs(share - 0.5) < 0.12).all()  # 200 draws: sd 0.035


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
@pytest.mark.parametrize("method", statistics.ESTIMATORS)
def test_half_samples_are_computed_as_the_estimate_was(method):
    """From their own start: pa stops far from its fixed point, and halves that start at the whole's vary too little."""
    rng = np.random.default_rng(2)
    outputs, weights = rng.normal(size=(16, 40)), rng.normal(size=(16, 40, 10))
    half = statistics.halves(np.zeros(16, int), 5, seed=1)
    found = statistics.relation(outputs[None], weights[None], half, kappa=0.75)
    j = statistics.ESTIMATORS.index(method)
    assert (method == "pa") == (not found["split/converged"][0, j])
    for b, chosen in enumerate(half):
        nu = fedstat.fa(fedstat.layer_matrix(weights[chosen]), kappa=0.75, method=method).communality
        h = fedstat.knn_entropy(outputs[chosen]).entropy
        alone = stats.spearmanr(h, nu).statistic
        assert found["relation/spearman_half"][0, 0, j, b] == pytest.approx(alone, abs=1e-9)


@pytest.mark.slow
def test_half_samples_have_the_variance_of_the_statistic():
    """Across samples of 60 clients, the spread over halves is the spread of the rank correlation itself."""
    rng = np.random.default_rng(0)
    slope = rng.normal(size=40)
    rho, sd = [], []
    for _ in range(30):
        spread = np.exp(0.3 * slope) * rng.normal(size=(60, 40))
        weights = slope[:, None] * 0.4 * rng.normal(size=(60, 1, 3)) + rng.normal(size=(60, 40, 3))
        half = statistics.halves(np.zeros(60, dtype=int), 30, seed=len(rho))
        found = statistics.relation(spread[None], weights[None], half, kappa=0.3)
        rho.append(found["relation/spearman"][0, 0, 1])
        sd.append(found["relation/spearman_half"][0, 0, 1].std(ddof=1))
    assert 0.6 < np.sqrt(np.mean(np.square(sd))) / np.std(rho, ddof=1) < 1.6


def test_spearman_is_scipys():
    x, y = np.random.default_rng(0).integers(0, 9, (2, 30)).astype(float)
    x[3] = np.nan
    assert statistics.spearman(x, y) == pytest.approx(stats.spearmanr(x, y, nan_policy="omit").statistic)
    assert np.isnan(statistics.spearman(np.ones(30), y))


def test_summary_and_correlations(run):
    table = motivation.summary(run, draws=19)
    assert table[["case", "outputs"]].values.tolist() == [
        [c, o] for c in ("iid", "one-class") for o in ("own", "common")
    ]
    assert (table["neurons"] + table["dead"] == 12).all()
    assert table["p_one_peak"].between(0.05, 1).all()
    median = run["dispersion/entropy"].sel(case="iid", outputs="own").median()
    assert table["entropy"][0] == pytest.approx(float(median))
    related = motivation.correlations(run)
    assert len(related) == 2 * 2 * 2 * 3
    assert ((related["low"] <= related["spearman"]) & (related["spearman"] <= related["high"])).all()


def test_two_groups_of_neurons_are_found_as_two_peaks():
    rng = np.random.default_rng(0)
    sd = np.repeat([0.5, 5.0], 40)
    found = findings.peaks(3 + sd * rng.normal(size=(100, 80)), np.zeros(100, int), draws=39)
    truth = 0.5 * np.log(2 * np.pi * np.e * np.array([0.5, 5.0]) ** 2)
    assert found["p_one_peak"] < 0.05
    assert found["p_one_normal"] < 0.05
    assert len(found["modes"]) == 2
    assert (abs(np.array(found["modes"]) - truth) < 3 * np.array(found["modes_se"]) + 0.05).all()


@pytest.mark.parametrize("kind", ["independent", "common factor", "classes"])
def test_standard_errors_of_the_median_entropy_are_those_of_repeated_sampling(kind):
    """The jackknife's were 1.6 to 2 times as large."""
    scale = np.exp(0.3 * np.random.default_rng(3).normal(size=50))
    centre = 10 * np.random.default_rng(4).normal(size=(10, 50))
    classes = np.arange(100) % 10

    def draw(rng):
        z = rng.normal(size=(100, 50))
        if kind == "common factor":
            z = 0.7 * rng.normal(size=(100, 1)) + np.sqrt(0.51) * z
        return (scale * (z + centre[classes]), classes) if kind == "classes" else (scale * z, np.zeros(100, int))

    rng, medians, errors = np.random.default_rng(0), [], []
    for i in range(150):
        outputs, strata = draw(rng)
        h = statistics.dispersion(outputs)["entropy"]
        medians.append(np.median(h))
        if i < 30:  # errors vary less than medians
            drawn = statistics.with_errors(h, statistics.entropy_errors(outputs, strata))
            errors.append(np.std(np.median(drawn, axis=1), ddof=1))
    assert 0.85 < np.mean(errors) / np.std(medians, ddof=1) < 1.2  # Monte Carlo error of the ratio: 0.06


def test_standard_errors_of_peaks_are_those_of_repeated_sampling():
    sd = np.where(np.arange(40) < 25, 1.0, 5.0) * np.exp(0.2 * np.random.default_rng(3).normal(size=40))
    rng, found, se = np.random.default_rng(0), [], []
    for i in range(40):
        outputs = sd * rng.normal(size=(60, 40))
        h = statistics.dispersion(outputs)["entropy"]
        found.append(statistics.peaks(h, 2).position)
        if i < 15:  # errors vary less than positions
            drawn = statistics.with_errors(h, statistics.entropy_errors(outputs, np.zeros(60, int), draws=12))
            se.append(findings.position_errors(drawn, 2, 2))
    ratio = np.nanmean(se, axis=0) / np.std(found, axis=0, ddof=1)
    assert ((ratio > 0.7) & (ratio < 1.4)).all()  # Monte Carlo error of the ratio: 0.12


def test_peaks_have_no_standard_error_where_their_number_is_unsure():
    one, two = np.random.default_rng(0).normal(size=40), np.repeat([0.0, 9.0], 20) + np.linspace(0, 1, 40)
    assert np.isfinite(findings.position_errors(np.stack([two + 0.1 * i for i in range(5)]), 2, 2)).all()
    assert np.isnan(findings.position_errors(np.stack([one + 0.1 * i for i in range(5)]), 1, 2)).all()


def test_influences_are_those_of_leaving_clients_out():
    x = np.random.default_rng(0).normal(size=15)
    for k in (1, 3):
        logs, influence = statistics._log_distances(x, k)
        total = [statistics._log_distances(np.delete(x, i), k)[0].sum() for i in range(15)]
        np.testing.assert_allclose(influence - influence.mean(), np.mean(total) - total, atol=1e-12)
        h = entropy.knn_entropy(x, k=k)
        assert logs.mean() + special.digamma(15) - special.digamma(k) + np.log(2) == pytest.approx(float(h))


def test_errors_of_entropies_do_not_ask_for_more_than_there_is():
    """Neurons that few clients leave, strata of one client, half of the clients in atoms."""
    rng = np.random.default_rng(0)
    outputs = np.maximum(rng.normal(size=(20, 6)), 0)
    outputs[4:, 0], outputs[:4, 0] = 0, 1 + np.arange(4)
    one = statistics.entropy_errors(outputs, np.arange(20), draws=50)
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, statistics.entropy_errors(outputs, np.zeros(20, int), draws=50))


def test_neurons_that_vary_together_err_together():
    x = np.random.default_rng(0).normal(size=(100, 20))
    x[:, 1] = 3 * x[:, 0]
    r = np.corrcoef(statistics.entropy_errors(x, np.zeros(100, int), draws=4000).T)
    assert r[0, 1] > 0.6
    assert abs(r[2:, 2:][~np.eye(18, dtype=bool)]).max() < 0.4


def test_dead_neurons_are_counted_not_averaged():
    outputs = np.random.default_rng(0).normal(size=(30, 10))
    outputs[:, :3] = 0
    row = findings.peaks(outputs, np.zeros(30, int), draws=9)
    assert (row["neurons"], row["dead"]) == (7, 3)
    assert np.isfinite(row["entropy"])
    nothing = findings.peaks(outputs[:, :3], np.zeros(30, int))
    assert nothing["dead"] == 3
    assert np.isnan(nothing["p_one_peak"])


def test_a_seed_repeats_and_chunks_do_not_matter(run):
    again = motivation.study(**SMALL, client_chunk=3, threads=1)
    np.testing.assert_allclose(again["outputs/mean_output"], run["outputs/mean_output"], rtol=1e-4, atol=1e-5)
    other = motivation.study(**{**SMALL, "seed": 4})
    assert not np.allclose(other["outputs/mean_output"], run["outputs/mean_output"], atol=1e-3)


def test_the_print_is_its_golden_file(run):
    rng, made = np.random.default_rng(0), run.copy(deep=True)
    for name in ("outputs/mean_output", "relation/spearman_half"):
        made[name][:] = np.tanh(rng.normal(size=made[name].shape) * (0.1 if "half" in name else 1))
    made["outputs/mean_output"][..., :2] = 0
    made["outputs/accuracy"][:] = 0.75
    made["relation/spearman"][:] = np.round(rng.uniform(-0.5, 0.9, made["relation/spearman"].shape), 2)
    made["split/converged"][:] = True
    made["split/converged"].loc[{"case": "iid", "method": "pa"}] = False
    require_golden("motivation", findings.report(made, draws=19))


def test_command_line_stores_prints_draws_and_resumes(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(findings.report.__kwdefaults__, "draws", 9)
    out, picture = tmp_path / "m.zarr", tmp_path / "m.png"
    assert main([*FLAGS, "--out", str(out), "--plot", str(picture), "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "Spearman correlation of entropy and communality" in said
    assert max(map(len, said.partition("Saved")[0].splitlines()[1:])) <= 80
    assert picture.stat().st_size > 10_000
    kept = fedstat.open_run(out)
    assert json.loads(kept.attrs["config"])["clients"] == 20
    xr.testing.assert_identical(kept["dispersion"].to_dataset().load(), run["dispersion"].to_dataset())
    assert main(["--out", str(out), "--resume", "--outputs", "common", "--quiet"]) == 0
    assert "a common evaluation set" in capsys.readouterr().out


def test_a_case_that_is_done_is_not_done_again(run, stored, tmp_path):
    out = shutil.copytree(stored, tmp_path / "m.zarr")
    with store.Writer(out, Journal(out)) as writer:
        writer.write("outputs/done", (1,), False)
        writer.write("dispersion/entropy", (1,), np.nan)
        writer.write("dispersion/entropy", (0, 0, 0), -99.0)
        writer._root.attrs.pop("ended")
        writer.commit()
    again = motivation.study(**SMALL, out=out, resume=True)["dispersion/entropy"]
    assert again.values[0, 0, 0] == -99
    np.testing.assert_array_equal(again[1], run["dispersion/entropy"][1])


def test_help_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "fedstat.motivation", "--help"], capture_output=True, text=True, check=True
    )
    assert "--data-dir" in done.stdout


def test_figures_show_what_is_stored(run):
    part = run["outputs"].to_dataset().sel(case="one-class", outputs="own")
    ax = plot.papers.heatmap(part["mean_output"], label=part["label"])
    order, _ = plot.fedfac.unit_order(part["mean_output"])
    np.testing.assert_array_equal(ax.images[0].get_array(), part["mean_output"].values.T[order])
    assert [t.get_text() for t in ax.get_xticklabels()] == [str(c) for c in range(10)]
    ax.figure.clear()
    ax = plot.entropies(run["dispersion"].to_dataset().sel(outputs="own"))
    assert ax.get_xlabel() == "entropy over clients (nats)"
    ax.figure.draw_without_rendering()
    legend, axes = ax.get_legend().get_window_extent(), ax.get_window_extent()
    assert legend.y0 >= axes.y1  # it hides neither histograms nor bars
    assert legend.width <= axes.width
    ax.figure.clear()
    ax = plot.papers.relation(run, case="iid", on="updates")
    rho = run["relation/spearman"].sel({"case": "iid", "outputs": "own", "on": "updates", "method": "pa"}).item()
    assert ax.get_title() == f"IID\npa: Spearman correlation {rho:+.2f}"
    ax.figure.clear()
    with pytest.raises(ValueError, match="case must be one of 'iid', 'one-class', but got 'idd'"):
        plot.papers.relation(run, case="idd")


def test_neurons_stand_by_cluster_and_mean():
    rng = np.random.default_rng(0)
    level = rng.permutation(np.r_[np.linspace(0, 0.5, 15), np.linspace(4, 5, 10)])
    order, n_first = plot.fedfac.unit_order(xr.DataArray(level + np.zeros((8, 1)), dims=("client", "unit")))
    assert (np.diff(level[order]) <= 0).all()
    assert n_first == 10


def test_labelled_entropy_is_the_array_functions():
    x = np.random.default_rng(0).normal(size=(3, 40, 2))
    x[0, :10] = 0
    labelled = xr.DataArray(x, dims=("unit", "client", "axis"), coords={"unit": [5, 6, 7], "axis": ["a", "b"]})
    flat = fedstat.knn_entropy(labelled, k=2, ties="atoms")
    found = entropy.knn_entropy(x, k=2, axis=1, ties="atoms")
    assert flat["entropy"].dims == ("unit", "axis")
    np.testing.assert_array_equal(flat["entropy"], found.estimate)
    np.testing.assert_array_equal(flat["atom_mass"], found.atom_mass)
    both = fedstat.knn_entropy(labelled, k=2, feature_dim="axis", ties="atoms")
    found = entropy.knn_entropy(x, k=2, axis=1, feature_axis=2, ties="atoms")
    np.testing.assert_array_equal(both["std_error"], found.std_error)
    assert both["atom_value"].dims == ("unit", "atom", "axis")
    assert both["unit"].values.tolist() == [5, 6, 7]
    np.testing.assert_array_equal(both["atom_value"], found.atom_value)
    one = fedstat.knn_entropy(labelled.isel(axis=[0]), k=2, feature_dim="axis", ties="atoms")
    np.testing.assert_array_equal(one["entropy"], flat["entropy"].isel(axis=0))


def test_labelled_entropy_names_what_is_wrong():
    labelled = xr.DataArray(np.zeros((5, 3)), dims=("client", "unit"))
    with pytest.raises(ValueError, match=r"dim\(s\) \['round'\]"):
        fedstat.knn_entropy(labelled, dim="round")
    with pytest.raises(ValueError, match="a DataArray has dims, but got axis"):
        fedstat.knn_entropy(labelled, axis=0)
    with pytest.raises(ValueError, match="name dims of a DataArray, but got ndarray"):
        fedstat.knn_entropy(labelled.values, dim="unit")


@pytest.mark.slow
def test_mnist_clients_of_one_class_differ_more_than_random_ones(tmp_path):
    place = require_real_data()
    run = motivation.study(data="mnist", data_dir=place, replicates=4, out=tmp_path / "m.zarr")
    assert run["weights/fc1/w"].shape == (2, 100, 200, 784)
    assert run["outputs/label"].sel(case="one-class").values.tolist() == np.repeat(np.arange(10), 10).tolist()
    table = motivation.summary(run, draws=199).set_index(["case", "outputs"]).xs("own", level="outputs")
    assert table.loc["iid", "p_one_peak"] > 0.05
    assert table.loc["one-class", "p_one_peak"] < 0.05
    assert table.loc["one-class", "spread"] > 3 * table.loc["iid", "spread"]
