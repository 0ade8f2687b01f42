"""The spectrum of R on model (8): closed forms, plain NumPy, and what the figure says of it."""

import json

import matplotlib as mpl
import numpy as np
import pytest

from fedstat.plot.papers import kappa_window, spectrum_grid
from fedstat.plot.papers import spectrum as plot_spectrum
from fedstat.sim import generate, recover, spectrum
from fedstat.sim.recovery import accuracy as recovery
from fedstat.sim.recovery.__main__ import main

mpl.use("Agg")

SIZE = {"clients": 12, "d": 15, "m": 24}
BY_COMPONENT = ("eigenvalue", "cumulative_share", "shared_share")


@pytest.fixture(scope="module")
def result():
    return spectrum(p=[0.25, 0.5], alpha=0.4, kappa=[0.3, 0.5, 0.75, 0.9, 0.99], seed=5, **SIZE)


@pytest.fixture(autouse=True)
def close():
    yield
    mpl.pyplot.close("all")


def equal_correlations(n, rho):
    return np.full((n, n), rho) + (1 - rho) * np.eye(n)


def test_two_blocks_of_equal_correlations_have_the_closed_form(monkeypatch):
    # 6 personal neurons with correlation 1/2, 4 shared ones with 1/5: eigenvalues 1 + 5/2, 1 + 3/5, 4/5 (3), 1/2 (5)
    r = np.zeros((10, 10))
    r[:6, :6], r[6:, 6:] = equal_correlations(6, 0.5), equal_correlations(4, 0.2)
    monkeypatch.setattr(recovery, "correlation", lambda _: r)
    found = spectrum(p=0.4, alpha=0.4, kappa=[0.3, 0.5], method="pc", clients=2, d=4, m=10).squeeze()
    eigenvalues = [3.5, 1.6, *[0.8] * 3, *[0.5] * 5]
    np.testing.assert_allclose(found.eigenvalue, eigenvalues)
    np.testing.assert_allclose(found.cumulative_share, np.cumsum(eigenvalues) / 10)
    np.testing.assert_allclose(found.shared_share, [0, 1, 1, 1, 1, 0, 0, 0, 0, 0], atol=1e-12)
    assert found.n_factors.values.tolist() == [1, 2]
    # one factor explains 3.5/6 of each personal neuron and nothing of the others; the second 1.6/4 of each shared one
    np.testing.assert_allclose(found.communality.sel(kappa=0.3), [3.5 / 6] * 6 + [0] * 4, atol=1e-12)
    np.testing.assert_allclose(found.communality.sel(kappa=0.5), [3.5 / 6] * 6 + [0.4] * 4)
    assert found.auc.values.tolist() == [0, 0]


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_shares_are_those_of_a_singular_value_decomposition_of_the_stacked_weights(result, p):
    ds = generate(p=p, alpha=0.4, seed=5, n_test=0, **SIZE)
    z = ds.w.transpose("client", "feature", "unit").values.reshape(-1, SIZE["m"])
    z = (z - z.mean(axis=0)) / z.std(axis=0) / np.sqrt(len(z))
    _, singular, vt = np.linalg.svd(z, full_matrices=False)
    here = result.sel(p=p).squeeze()
    np.testing.assert_allclose(here.eigenvalue, singular**2, rtol=0, atol=1e-12)
    total, so_far = float((singular**2).sum()), 0.0
    for j, (s, v) in enumerate(zip(singular, vt, strict=True)):
        so_far += s**2
        loadings = s * v
        of_shared = sum(loadings[i] ** 2 for i in range(SIZE["m"]) if bool(ds.unit_shared[i]))
        assert float(here.cumulative_share[j]) == pytest.approx(so_far / total)
        assert float(here.shared_share[j]) == pytest.approx(of_shared / (loadings**2).sum(), abs=1e-9)


def test_every_kappa_is_that_of_recovery(result):
    for p in (0.25, 0.5):
        kappa = result.kappa.values.tolist()
        whole = recover(p=p, kappa=kappa, methods="pa", replicates=1, seed=5, **SIZE).squeeze()
        here = result.sel(p=p).squeeze()
        np.testing.assert_array_equal(here.auc, whole.auc)
        np.testing.assert_array_equal(here.n_factors, whole.n_factors)


def test_settings_can_be_read_back_and_kappa_is_sorted():
    found = spectrum(p=0.5, kappa=[0.9, 0.3], method="pc", means="shared", seed=2, **SIZE)
    assert found.kappa.values.tolist() == [0.3, 0.9]
    config = json.loads(found.attrs["config"])
    assert (config["means"], config["method"], config["kappa"]) == ("shared", "pc", [0.3, 0.9])
    assert found.communality.dims == ("p", "alpha", "kappa", "unit")
    assert all(found[name].dims == ("p", "alpha", "component") for name in BY_COMPONENT)
    assert found.unit_shared.values.sum() == 12


def test_the_window_at_paper_size_is_what_the_figure_says():
    found = spectrum(kappa=[0.3, 0.75, 0.99]).squeeze()
    share, shared = found.shared_share.values, found.unit_shared.values
    counted = np.diff(found.cumulative_share.values, prepend=0) >= 1e-3
    assert share[0] < 0.01
    assert (share[1:25] > 0.99).all()
    assert abs((share[counted] > 0.5).sum() - 40) <= 5
    # what is left of the shared neurons comes last, and is the variance of U(-0.1, 0.1) beside U(-1, 1)
    assert (share[145:] > 0.9).all()
    rest = (60 * 0.1**2) / (40 * 1.0**2 + 60 * 0.1**2)
    personal, of_shared = (found.communality.isel(unit=of).median("unit").values for of in (~shared, shared))
    np.testing.assert_allclose(personal[:2], 0.5, atol=0.02)
    np.testing.assert_allclose(of_shared[1:], 1 - rest, atol=0.005)
    assert of_shared[0] < 0.2
    assert personal[2] > of_shared[2]
    assert found.auc[0] < 0.05
    assert found.auc[1] > 0.95
    assert found.auc[2] < 0.6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"p": 1.0}, "p must give both shared and personal units"),
        ({"kappa": [0.5, 1.5]}, "kappa must be"),
        ({"kappa": []}, "kappa must hold"),
        ({"alpha": -1}, "alpha must be"),
        ({"method": "icc"}, "method must be one of"),
        ({"max_iter": 0}, "max_iter must be"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        spectrum(**{**SIZE, **wrong})
    assert "but got" in str(error.value)


def test_bars_are_eigenvectors_as_wide_as_their_share_and_those_left_of_a_cut_are_its_factors(result):
    one = result.isel(p=[1])
    _, ax = mpl.pyplot.subplots()
    assert plot_spectrum(one, cuts=[0.3, 0.75], ax=ax) is ax
    gamma, end = one.eigenvalue.values.ravel(), one.cumulative_share.values.ravel()
    bars = ax.patches
    assert len(bars) == (gamma > 0.1).sum()
    np.testing.assert_allclose([bar.get_x() + bar.get_width() for bar in bars], end[: len(bars)])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in bars], gamma[: len(bars)])
    texts = [text.get_text() for text in ax.texts]
    assert texts[-3:-1] == [str(sum(bar.get_x() < k - 1e-12 for bar in bars)) for k in (0.3, 0.75)]
    # light for personal, dark for shared
    brightness = [sum(bar.get_facecolor()[:3]) for bar in bars]
    share = one.shared_share.values.ravel()[: len(bars)]
    assert np.corrcoef(brightness, share)[0, 1] < -0.99
    with pytest.raises(ValueError, match=r"one p, but got p = \[0.25, 0.5\]"):
        plot_spectrum(result)


def test_window_draws_medians_ranges_and_where_the_split_is_found(result):
    one = result.isel(p=0, alpha=0)
    _, ax = mpl.pyplot.subplots()
    assert kappa_window(one, cuts=[0.3, 0.4, 0.75], ax=ax) is ax
    shared = one.unit_shared.values
    lines = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 5]
    np.testing.assert_allclose(lines, [np.median(one.communality.values[:, of], axis=1) for of in (~shared, shared)])
    aucs = {k: f"{float(one.auc.sel(kappa=k)):.2f}" for k in (0.3, 0.75)}
    assert [text.get_text() for text in ax.texts] == [aucs[0.3], "", aucs[0.75], "AUC"]  # none was computed at 0.4
    top = ax.collections[2].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose(top.max(), one.communality.values[:, shared].max())
    with pytest.raises(ValueError, match=r"one p, but got p = \[0.25, 0.5\]"):
        kappa_window(result)


def test_the_grid_has_a_column_for_every_setting_and_says_where_it_comes_from(result):
    figure = spectrum_grid(result)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == [
        rf"$p$ = {p}, $\alpha$ = 0.4" for p in (0.25, 0.5)
    ]
    assert len(figure.axes) == 4
    assert "C = 12, d = 15, m = 24, one draw, seed 5" in figure.get_supxlabel()


def test_command_draws_the_spectrum(tmp_path):
    size = [text for name, n in SIZE.items() for text in (f"--{name}", str(n))]
    arguments = [*size, "--p", "0.5", "--kappa", "0.6", "--replicates", "1", "--spectrum", str(tmp_path / "s.png")]
    assert main(arguments) == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
