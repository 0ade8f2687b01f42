"""Recovery over κ: equal to the definition, to independent implementations, and readable from the command line."""

import json
import re

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score
from statsmodels.multivariate.factor import Factor

import fedstat
from fedstat.plot.papers import accuracy, recovery_grid, stability
from fedstat.plot.papers import recovery as plot_recovery
from fedstat.sim import generate, recover
from fedstat.sim.model8 import Model8, replicate_seed
from fedstat.sim.recovery import correlation, tidy
from fedstat.sim.recovery.__main__ import main
from fedstat.sim.recovery.accuracy import report
from fedstat.stats import factor, split

mpl.use("Agg")

SIZE = {"clients": 12, "d": 15, "m": 24}
KAPPA = [0.1, 0.4, 0.6, 0.75, 0.9, 1.0]


@pytest.fixture(scope="module")
def result():
    return recover(p=[0.25, 0.5], alpha=[0.2, 0.4], kappa=KAPPA, replicates=3, seed=5, **SIZE)


def stacked(ds):
    """Return Z of FedFac §4.1 with its rows (client, weight) in one place."""
    return ds.w.transpose("client", "feature", "unit").values.reshape(-1, ds.sizes["unit"])


def expected_communality(method, r, g):
    if method == "pa":
        model = Factor(corr=r, n_factor=g, method="pa", smc=False)
        model.fit(maxiter=5000, tol=1e-12)
        return model.communality
    values, vectors = np.linalg.eigh(r)
    values, vectors = values[::-1], vectors[:, ::-1]
    if method == "pc":
        return (vectors[:, :g] ** 2 * values[:g]).sum(axis=1)
    return (vectors[:, : g - 1] ** 2).sum(axis=1)


@pytest.mark.parametrize("method", ["pa", "pc", "leverage"])
def test_auc_is_that_of_the_generated_weights_by_independent_software(method):
    tight = recover(
        p=0.5, alpha=0.4, kappa=[0.4, 0.6], methods=method, replicates=2, seed=6, max_iter=5000, tol=1e-10, **SIZE
    )
    assert bool(tight.converged.all())
    for replicate in (0, 1):
        ds = generate(p=0.5, alpha=0.4, seed=replicate_seed(6, replicate), n_train=100, n_test=0, **SIZE)
        r = np.corrcoef(stacked(ds), rowvar=False)
        share = np.cumsum(np.linalg.eigvalsh(r)[::-1]) / len(r)
        for kappa in (0.4, 0.6):
            g = 1 + int((share < kappa).sum())
            here = tight.isel(p=0, alpha=0, method=0, replicate=replicate).sel(kappa=kappa)
            assert int(here.n_factors) == g
            nu = expected_communality(method, r, g)
            assert float(here.auc) == pytest.approx(roc_auc_score(ds.unit_shared, nu))


def test_correlation_summed_over_clients_is_that_of_the_stacked_weights():
    ds = generate(p=0.5, alpha=0.4, seed=1, n_train=100, n_test=0, **SIZE)
    mine = correlation(Model8(p=0.5, alpha=0.4, seed=1, **SIZE))
    np.testing.assert_allclose(mine, np.corrcoef(stacked(ds), rowvar=False), rtol=0, atol=1e-12)


def test_communalities_that_differ_by_rounding_alone_are_ties():
    everything = recover(p=0.5, kappa=1.0, methods="pc", replicates=1, **SIZE)
    assert everything.auc.item() == 0.5
    assert everything.ari.item() == 0
    assert everything.n_factors.item() == SIZE["m"]


def test_every_kappa_equals_a_factor_analysis_of_its_own(result):
    model = Model8(p=0.25, alpha=0.2, seed=replicate_seed(5, 2), **SIZE)
    r, truth = correlation(model), model.unit_shared
    for kappa in KAPPA:
        for method in ("pa", "pc", "leverage"):
            fit = factor.fit(r, kappa=kappa, method=method)
            here = result.sel({"p": 0.25, "alpha": 0.2, "kappa": kappa, "method": method, "replicate": 2})
            assert float(here.auc) == pytest.approx(float(split.auc(fit.communality.round(12), truth)))
            assert int(here.n_factors) == int(fit.n_factors)
            assert bool(here.converged) == bool(fit.converged)
            assert int(here.n_iter) == int(fit.n_iter)
            assert float(here.heywood) == fit.heywood.mean()


def test_dims_are_labelled_and_settings_can_be_read_back(result):
    assert result.auc.dims == ("p", "alpha", "kappa", "method", "replicate")
    assert result.auc.shape == (2, 2, 6, 4, 3)
    assert result.n_factors.dims == ("p", "alpha", "kappa", "replicate")
    assert (result.n_iter.sel({"method": ["pc", "leverage"]}) == 1).all()
    config = json.loads(result.attrs["config"])
    assert config["kappa"] == KAPPA
    assert config["clients"] == 12


def test_a_part_of_the_grid_equals_the_part_of_the_whole(result):
    alone = recover(p=0.5, alpha=0.4, kappa=[0.75], methods=["pc"], replicates=1, seed=6, **SIZE)
    part = result.sel({"p": [0.5], "alpha": [0.4], "kappa": [0.75], "method": ["pc"]}).isel(replicate=[1])
    xr.testing.assert_allclose(alone.drop_vars("replicate"), part.drop_vars("replicate"), rtol=1e-12)


def test_split_by_hand_gives_the_adjusted_rand_index_of_an_inverted_split():
    # one factor, the personal neurons': exactly inverted; halves are then the same partition, thirds are not
    inverted = recover(p=[0.5, 0.25], kappa=0.05, methods="pa", replicates=1, clients=40, d=30, m=24)
    assert inverted.auc.values.ravel().tolist() == [0, 0]
    # p = 1/4: found and true do not meet; pairs of 24 in cells 0, 6, 6, 12
    both, rows, all_pairs = 15 + 15 + 66, 15 + 153, 276
    by_hand = (both - rows**2 / all_pairs) / (rows - rows**2 / all_pairs)
    assert inverted.ari.values.ravel() == pytest.approx([1, by_hand])


def test_tidy_gives_means_and_standard_errors_over_replicates(result):
    row = tidy(result).set_index(["p", "alpha", "kappa", "method"]).loc[(0.25, 0.4, 0.6, "pc")]
    draws = result.auc.sel({"p": 0.25, "alpha": 0.4, "kappa": 0.6, "method": "pc"}).values
    assert row["auc"] == pytest.approx(draws.mean())
    assert row["auc_se"] == pytest.approx(np.sqrt(((draws - draws.mean()) ** 2).sum() / 2 / 3))
    assert len(tidy(result)) == 2 * 2 * 6 * 4
    assert tidy(result.isel(replicate=[0]))["auc_se"].isna().all()


def test_all_estimators_recover_at_075_and_invert_in_opposite_regions_at_paper_size():
    estimators = ["pa", "pc", "leverage"]
    paper = recover(p=0.5, kappa=[0.3, 0.75, 0.95], methods=estimators, replicates=1).auc.squeeze()
    assert (paper.sel(kappa=0.75) > 0.95).all()
    assert (paper.sel({"kappa": 0.3, "method": ["pa", "pc"]}) < 0.1).all()
    assert paper.sel({"kappa": 0.95, "method": "leverage"}) < 0.1
    assert (paper.sel({"kappa": 0.95, "method": ["pa", "pc"]}) > 0.95).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"p": 0.0}, "p must give both shared and personal units"),
        ({"p": [0.5, 1.0]}, "p must give both shared and personal units"),
        ({"alpha": 2.0}, "alpha must be"),
        ({"kappa": [0.5, 0.0]}, "kappa must be"),
        ({"kappa": []}, "kappa must hold"),
        ({"kappa": [0.5, 0.5]}, "kappa must hold"),
        ({"methods": ["pca"]}, "methods must be .*Did you mean 'pc'"),
        ({"methods": []}, "methods must hold"),
        ({"replicates": 0}, "replicates must be"),
        ({"max_iter": 0}, "max_iter must be"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(wrong, message):
    with pytest.raises(ValueError, match=f"{message}") as error:
        recover(**{**SIZE, **wrong})
    assert "but got" in str(error.value)


ARGUMENTS = ["--clients=12", "--d=15", "--m=24", "--kappa", "0.2", "0.6", "0.9", "--replicates=2", "--p", "0.25", "0.5"]


def test_command_prints_tables_and_writes_store_and_figure_without_a_warning(tmp_path, capsys):
    store, figure = tmp_path / "r.zarr", tmp_path / "r.png"
    assert main([*ARGUMENTS, "--quiet", "--out", str(store), "--plot", str(figure)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines()[:-2])) <= 100
    saved = fedstat.open_run(store).to_dataset().load()
    xr.testing.assert_equal(saved, recover(p=[0.25, 0.5], kappa=[0.2, 0.6, 0.9], replicates=2, **SIZE))
    assert report(saved) in out
    assert figure.read_bytes().startswith(b"\x89PNG")


def made(auc, converged=True):
    """Result with given AUCs (kappa, method, replicate) for the report to describe."""
    auc = np.asarray(auc, float)[None, None]
    dims = ("p", "alpha", "kappa", "method", "replicate")
    same = {name: (dims, np.zeros_like(auc)) for name in ("ari", "heywood", "n_iter")}
    return xr.Dataset(
        {
            "auc": (dims, auc),
            "converged": (dims, np.full(auc.shape, converged)),
            "n_factors": (("kappa",), np.arange(1, 5)),
            **same,
        },
        coords={"p": [0.5], "alpha": [0.4], "kappa": [0.1, 0.2, 0.3, 0.4], "method": np.array(["pa", "pc"], object)},
        attrs={"config": json.dumps({"clients": 2, "d": 3, "m": 4, "max_iter": 9})},
    )  # fmt: skip


def test_report_names_where_estimators_invert_and_where_they_agree():
    text = report(
        made([[[0.0, 0.2], [0.6, 0.6]], [[0.4, 0.4], [0.42, 0.42]], [[0.5, 0.5], [0.9, 0.9]], [[1, 1], [1, 1]]])
    )
    assert re.search(r"^0\.10 +1\.0 +0\.100 \(0\.100\) +0\.600 \(0\.000\) *$", text, re.MULTILINE)
    assert "Order reversed: pa at kappa 0.1–0.2; pc at kappa 0.2." in text
    closest = "within 0.05 of each other: kappa 0.2 (AUC 0.400 to 0.420), kappa 0.4 (AUC 1.000)."
    assert closest in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "*" not in text


def test_report_marks_what_had_not_converged_and_gives_no_error_for_one_draw():
    text = report(made([[[0.9], [0.6]]] * 4, converged=False))
    assert "one draw, no SE" in " ".join(text.split())
    assert "0.900*" in text
    assert "0.900 (" not in text
    assert "Order reversed: none." in text
    assert "each other: at no kappa." in text
    assert "* not converged in 9 eigendecompositions" in text


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def test_figure_of_recovery_draws_the_means_in_one_panel_for_every_setting(result):
    figure = recovery_grid(result)
    assert [ax.get_title() for ax in figure.axes] == [
        rf"$p$ = {p}, $\alpha$ = {a}" for a in (0.2, 0.4) for p in (0.25, 0.5)
    ]
    of_nu = result.auc.sel({"method": ["pa", "pc", "leverage"]})
    means = of_nu.mean("replicate").transpose("alpha", "p", "method", "kappa").values.reshape(4, 3, -1)
    for ax, panel in zip(figure.axes, means, strict=True):
        drawn = [
            line.get_ydata()
            for line in ax.lines
            if len(line.get_xdata()) == len(KAPPA) and line.get_linestyle() != "None"
        ]
        np.testing.assert_allclose(drawn[:3], panel)
    mpl.pyplot.close(figure)


def test_figure_of_recovery_refuses_more_than_one_setting(result):
    with pytest.raises(ValueError, match=r"one p, but got p = \[0.25, 0.5\].*sel\(p=0.25\)"):
        plot_recovery(result)


METHODS = np.array(["fedavg", "true", "dynamic"], object)  # in the order of figures


def accuracies(p, alpha):
    shape = (len(p), len(alpha), 3, 4)
    values = np.random.default_rng(0).uniform(0.6, 0.9, shape)
    dims = ("p", "alpha", "method", "replicate")
    return xr.Dataset({"accuracy": (dims, values)}, coords={"p": p, "alpha": alpha, "method": METHODS})


@pytest.mark.parametrize(("p", "alpha", "symbol"), [([0.2, 0.5], [0.4], "$p$"), ([0.5], [0.2, 0.4, 0.8], r"$\alpha$")])
def test_figure_of_accuracy_draws_means_with_intervals_side_by_side(p, alpha, symbol):
    ds = accuracies(p, alpha)
    _, ax = mpl.pyplot.subplots()
    assert accuracy(ds, ax=ax) is ax
    assert ax.get_xlabel() == symbol
    means = ds.accuracy.mean("replicate").transpose("method", ...).values.reshape(3, -1)
    se = ds.accuracy.std("replicate", ddof=1).transpose("method", ...).values.reshape(3, -1) / 2
    half = student.ppf(0.975, 3) * se
    points = [line.get_xydata() for line in ax.lines if line.get_marker() != "None" and len(line.get_xdata())]
    np.testing.assert_allclose([xy[:, 1] for xy in points[:3]], means)
    assert len({x for xy in points[:3] for x in np.round(xy[:, 0], 9)}) == means.size
    bars = sorted(
        np.ptp(line.get_ydata()) for line in ax.lines if line.get_marker() == "None" and np.ptp(line.get_xdata()) == 0
    )
    assert np.isclose(np.array(bars)[:, None], 2 * half.ravel()).any(axis=0).all()
    mpl.pyplot.close(ax.figure)


def test_figure_of_accuracy_can_show_differences_within_replicates():
    ds = accuracies([0.2, 0.5], [0.4])
    _, ax = mpl.pyplot.subplots()
    accuracy(ds, relative_to="true", ax=ax)
    gaps = (ds.accuracy - ds.accuracy.isel(method=1)).mean("replicate").transpose("method", ...).values.reshape(3, -1)
    points = [line.get_ydata() for line in ax.lines if line.get_marker() != "None" and len(line.get_xdata())]
    np.testing.assert_allclose(points[:3], gaps)
    with pytest.raises(ValueError, match=r"relative_to must be one of .*Did you mean 'true'"):
        accuracy(ds, relative_to="truth", ax=ax)
    mpl.pyplot.close(ax.figure)


def test_figure_of_accuracy_has_one_axis_for_one_of_p_and_alpha():
    with pytest.raises(ValueError, match="this figure shows one p"):
        accuracy(accuracies([0.2, 0.5], [0.2, 0.4]))


def test_figure_of_stability_draws_the_mean_of_every_setting_over_rounds():
    values = np.random.default_rng(0).uniform(0.9, 1, (2, 1, 3, 6))
    dims = ("p", "alpha", "replicate", "round")
    ds = xr.Dataset(
        {"prop_unchanged": (dims, values)}, coords={"p": [0.2, 0.8], "alpha": [0.4], "round": np.arange(1, 7)}
    )
    _, ax = mpl.pyplot.subplots()
    assert stability(ds, ax=ax) is ax
    drawn = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 6]
    np.testing.assert_allclose(drawn, values.mean(axis=2)[:, 0])
    assert len(ax.collections) == 2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$p$ = 0.2", "$p$ = 0.8"]
    assert ax.get_title() == r"FedFac dynamic, $\alpha$ = 0.4"
    mpl.pyplot.close(ax.figure)
