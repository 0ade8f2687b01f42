"""Split by agreement between clients, and agreement beside a split by communality."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from layers import weights
from scipy import stats as scipy_stats

import fedstat
import fedstat.labelled as fs
from fedstat.decompose import to_dataset
from fedstat.decompose.__main__ import main
from fedstat.plot import factor as plot
from fedstat.results import Absolute, AgreementWarning, IccResult, SplitResult
from fedstat.sim.model8 import Model8, truth
from fedstat.stats.split import auc, contradicted


def half_identical(seed: int = 0, clients: int = 10, n: int = 30) -> np.ndarray:
    """Units 0 to 7 are the same in all clients and resemble no other; units 8 to 15 are each client's own."""
    rng = np.random.default_rng(seed)
    same = rng.normal(size=(1, 8, n)).repeat(clients, axis=0)
    return np.concatenate([same, rng.normal(size=(clients, 8, n))], axis=1)


@pytest.fixture(scope="module")
def model8() -> tuple[np.ndarray, np.ndarray]:
    model = Model8(clients=20, d=40, m=60)
    return np.stack([client.w for client in truth(model)]), model.unit_shared


# --- split by agreement


def test_units_that_clients_hold_in_common_are_shared_exactly() -> None:
    w = half_identical()
    for tau in (0.5, 0.3, Absolute(0.5), Absolute(1.0)):
        result = fs.split(w, method="icc", tau=tau)
        expected = np.arange(16) < 8
        if tau == 0.3:  # 11 units: the 8 and the three of the others that are most alike
            assert result.shared[:8].all()
            assert result.shared.sum() == 11
        else:
            np.testing.assert_array_equal(result.shared, expected)
    np.testing.assert_array_equal(result.icc, fs.icc(w).agreement)
    assert np.isnan(result.communality).all()


def test_units_that_tie_at_1_are_all_shared() -> None:
    """A quantile in the middle of equal units takes all of them, and rounding of float32 decides nothing."""
    w = half_identical().astype(np.float32)
    w[3, 2] = np.nextafter(w[3, 2], np.float32(9))  # one client's unit, by the last digit
    for tau in (0.75, 0.9):
        np.testing.assert_array_equal(fs.split(w, method="icc", tau=tau).shared, np.arange(16) < 8)


def test_model_8_is_recovered_without_error(model8: tuple[np.ndarray, np.ndarray]) -> None:
    w, truth = model8
    result = fs.split(w, method="icc", tau=1 - truth.mean())
    assert auc(result.statistic, truth) == 1
    np.testing.assert_array_equal(result.shared, truth)


def test_limits_and_dead_units() -> None:
    w = half_identical()
    w[:, 5] = 0.25  # the same everywhere and without variance: dead, not agreed on
    w[:, 9] = np.arange(10)[:, None]  # varies between clients alone: they disagree
    every = fs.split(w, method="icc", tau=-math.inf)
    assert every.shared.all()
    assert not fs.split(w, method="icc", tau=math.inf).shared.any()
    for tau in (0.01, 0.5, Absolute(-1e9)):
        result = fs.split(w, method="icc", tau=tau)
        assert result.group[5] == "constant"
        assert np.isnan(result.icc[5])
        assert result.icc[9] == 0
    assert "15 shared, 0 personal, 1 constant" in repr(result)


@pytest.mark.parametrize("given", [
    {"kappa": 0.7}, {"n_factors": 2}, {"rotation": "varimax"}, {"init": "smc"}, {"init": np.full(16, 0.5)},
    {"n_starts": 2}, {"seed": 1}, {"heywood": "bound"}, {"max_iter": 9}, {"tol": 1e-6},
], ids=str)  # fmt: skip
def test_options_of_factor_analysis_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} has no effect with method='icc'"):
        fs.split(half_identical(), method="icc", **given)


def test_defaults_of_factor_analysis_are_taken_and_unknown_options_are_not() -> None:
    fs.split(half_identical(), method="icc", kappa=0.85, n_factors=None, init="pc", max_iter=None, seed=0)
    with pytest.raises(TypeError, match="kapa"):
        fs.split(half_identical(), method="icc", kapa=0.85)
    with pytest.raises(ValueError, match=r"method must be one of .*'icc', but got 'icc2'.*Did you mean 'icc'"):
        fs.split(half_identical(), method="icc2")
    with pytest.raises(ValueError, match=r"tau must be a finite number in \(0, 1\)"):
        fs.split(half_identical(), method="icc", tau=1.5)


def test_a_split_of_changes_comes_from_their_agreement() -> None:
    start = 5 * np.random.default_rng(1).normal(size=(16, 30))
    w = half_identical()
    by_change = fs.icc(w + start, baseline=start).split(tau=0.5)
    np.testing.assert_array_equal(by_change.shared, np.arange(16) < 8)
    with pytest.raises(ValueError, match=r"Use fedstat\.icc\(weights, baseline=\.\.\.\)"):
        fs.update(by_change, w)


def test_update_repeats_the_split_by_agreement() -> None:
    before = fs.split(half_identical(), method="icc", tau=0.75)
    later = half_identical(seed=5)[:, ::-1]
    after = fs.update(before, later)
    assert isinstance(after.fit, IccResult)
    assert after.tau == 0.75
    np.testing.assert_array_equal(after.shared, np.arange(16) >= 8)
    with pytest.raises(ValueError, match="16 units of the previous result, but got 15"):
        fs.update(before, later[:, :15])


def test_no_matrix_of_units_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """5000 units would need 200 MB for their correlations; none of the moments is summed at all."""
    monkeypatch.setattr(fs.sums, "scaled_moments", None)
    w = np.random.default_rng(0).normal(size=(3, 5000, 4))
    assert fs.split(w, method="icc").shared.sum() == 2500


# --- agreement beside a split by communality


def test_agreement_stands_beside_communality(model8: tuple[np.ndarray, np.ndarray]) -> None:
    w, _ = model8
    for method in ("pa", "minres", "pc", "leverage"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fs.split(w, method=method, n_factors=4)
        np.testing.assert_allclose(result.icc, fs.icc(w).agreement, rtol=1e-12, atol=1e-14)
        table = result.tidy()
        assert list(table).index("icc") == list(table).index("communality") + 1
        row, shared = result.glance().iloc[0], result.shared
        assert row["icc_shared"] == np.median(result.icc[shared])
        assert row["icc_personal"] == np.median(result.icc[~shared])
        shown = {group: f"{round(row[f'icc_{group}'], 2) + 0.0:.2f}" for group in ("shared", "personal")}
        assert f"(median ICC2): {shown['shared']} on shared, {shown['personal']} on personal units\n" in repr(result)
        np.testing.assert_array_equal(result.fit.split(tau=0.3).icc, result.icc)


def test_without_clients_there_is_no_agreement() -> None:
    result = fs.fa(fs.layer_matrix(weights()), n_factors=2).split(tau=0.5)
    assert result.icc is None
    assert "icc" not in result.tidy()
    assert "do clients agree" not in repr(result)
    assert not result.contradicted
    assert np.isnan(result.glance()["icc_shared"][0])


def test_weights_of_one_number_have_none_but_are_split() -> None:
    rng = np.random.default_rng(0)
    biases = rng.normal(size=(30, 1, 1)) + rng.normal(size=(30, 6, 1))
    assert np.isnan(fs.split(biases, n_factors=1).icc).all()


def test_every_verb_carries_it_in_its_split(model8: tuple[np.ndarray, np.ndarray]) -> None:
    w = model8[0][:5, :12]
    expected = fs.icc(w).agreement
    how: dict[str, Any] = {"n_factors": 2, "method": "pc"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        splits = [fs.bootstrap(w, n_boot=2, **how).split, fs.permutation_test(w, n_permutations=2, **how).split]
        splits += [fs.sensitivity(w, kappa=0.5, n_starts=0).reference, fs.update(splits[0], w)]
    for split in splits:
        np.testing.assert_allclose(split.icc, expected, rtol=1e-12)


# --- labels against agreement


def test_a_contradiction_is_said_on_model_8_at_small_kappa(model8: tuple[np.ndarray, np.ndarray]) -> None:
    w, truth = model8
    with pytest.warns(
        AgreementWarning, match=r"shared \(ICC2 0\.\d\d\) than on personal units \(1\.00\).*method='icc'"
    ):
        inverted = fs.split(w, kappa=0.3)
    assert inverted.contradicted
    assert auc(inverted.communality, truth) < 0.1
    assert "0.00 on shared, 1.00 on personal units" in repr(inverted)
    assert "Warning: clients agree less on shared than on personal units: shared means" in repr(inverted)
    assert [one.title for one in inverted.cautions() if one.severe] == ["Clients agree less on shared units"]
    with pytest.warns(AgreementWarning):
        fs.bootstrap(w, kappa=0.3, n_boot=2)
    with pytest.warns(AgreementWarning):
        fs.update(inverted, w)


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning")
def test_nothing_is_said_where_labels_and_agreement_go_together(model8: tuple[np.ndarray, np.ndarray]) -> None:
    w, truth = model8
    quiet = fs.split(w, kappa=0.75, max_iter=1000)
    assert auc(quiet.communality, truth) > 0.9
    assert not quiet.contradicted
    for tau in (math.inf, -math.inf):
        fs.split(w, kappa=0.3, tau=tau)  # one group alone
    fs.split(w, method="icc", tau=0.3)


def test_the_rule_is_that_of_mann_and_whitney_and_of_gross_contradictions() -> None:
    rng = np.random.default_rng(0)
    for shift, d in ((-0.3, 400), (-3.0, 400), (-0.09, 400), (-3.0, 6), (-1.5, 8), (0.0, 40), (3.0, 40)):
        labels = np.arange(d) % 2 == 0
        icc = rng.normal(size=d) * (0.03 if shift == -0.09 else 1) + shift * labels
        gross = np.mean([a > b for a in icc[labels] for b in icc[~labels]]) < 1 / 3
        gross &= np.median(icc[~labels]) - np.median(icc[labels]) >= 0.15
        chance = scipy_stats.mannwhitneyu(icc[labels], icc[~labels]).pvalue >= 0.01
        assert contradicted(labels, icc, 6) == (gross and not chance)
        assert not contradicted(labels, icc, 5)
    assert not contradicted(np.arange(400) % 2 == 0, np.ones(400), 6)
    few = np.array([True, True, False, False])
    assert not contradicted(few, np.array([0.0, 0.1, 0.8, 0.9]), 6)  # p = 1/3 at best
    assert not contradicted(few, np.full(4, np.nan), 6)


# --- reports, stores, figures, command


def test_reports_of_a_split_by_agreement() -> None:
    result = fs.split(half_identical(), method="icc")
    table = result.tidy()
    assert {"term", "icc", "conf_low", "conf_high", "group", "margin", "constant"} <= set(table)
    assert "communality" not in table
    np.testing.assert_allclose(table["margin"], result.icc - result.threshold)
    row = result.glance().iloc[0]
    assert row["n_shared"] + row["n_personal"] + row["n_constant"] == row["n_units"] == 16
    json.dumps(result.to_dict())
    assert result._repr_html_().count("<table") == 2, "the printed table, and all columns"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"c{i}.npz") for i in range(10)]
    for path, one in zip(paths, half_identical(), strict=True):
        np.savez(path, **{"fc1.weight": one})
    return paths


def test_the_command_splits_by_agreement(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "split.zarr", tmp_path / "split.png"
    assert main([*files, "--method", "icc", "--out", str(out), "--plot", str(png)]) == 0
    assert "fc1: Split of 16 units by agreement: 8 shared, 8 personal" in capsys.readouterr().out
    assert png.stat().st_size > 5_000
    tree = fedstat.open_run(out)
    data = tree["split/fc1"]
    expected = fs.split(half_identical(), method="icc")
    np.testing.assert_array_equal(data["icc"], expected.icc)
    np.testing.assert_array_equal(data["shared"], np.arange(16) < 8)
    assert np.isnan(data["communality"]).all()
    assert data.attrs["method"] == "icc"
    assert "loadings" not in data
    for option, message in (("--kappa=0.5", "kappa has no effect"), ("--n-boot=5", r"fedstat.icc(weights, n_boot")):
        with pytest.raises(SystemExit):
            main([*files, "--method", "icc", option])
        assert message in capsys.readouterr().err


def test_a_store_of_a_split_by_communality_holds_agreement() -> None:
    split = fs.split(half_identical(), n_factors=2, method="pc")
    np.testing.assert_array_equal(to_dataset(split)["icc"], split.icc)
    assert "icc" not in to_dataset(fs.fa(fs.layer_matrix(half_identical()), n_factors=2, method="pc").split())


def test_figures_show_agreement_and_refuse_loadings() -> None:
    mpl.use("Agg")
    result: SplitResult = fs.split(half_identical(), method="icc", tau=Absolute(0.5))
    ax = plot.communality(result)
    assert "ICC2" in ax.get_xlabel()
    assert sum(p.get_height() for p in ax.patches) == 16
    assert ax.lines[0].get_xdata()[0] == 0.5
    with pytest.raises(ValueError, match="no factors, loadings or eigenvalues"):
        plot.loadings(result)
    plt.close("all")
