"""Figures show the numbers of the result they are given."""

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from scipy import stats

from fedstat.ntk import convergence, descent, generalization
from fedstat.plot import fedfac as plot
from fedstat.plot._styles import style_of

mpl.use("Agg")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def first():
    data = descent.gaussian(clients=2, n=4, d=6, n_test=4)
    return convergence(data, widths=[8, 16], methods=["fedsplit", "fedavg", "dynamic"], rounds=6, replicates=2)


@pytest.fixture(scope="module")
def second():
    data = descent.gaussian(clients=2, n=8, d=6, n_test=8)
    return generalization(data, clients=[1, 2, 4], width=8, rounds=4, replicates=2)


def test_convergence_draws_mean_loss_and_bound_of_the_largest_width(first):
    ax = plot.convergence(first)
    curve, bound = (line.get_ydata() for line in ax.get_lines() if line.get_color() == style_of("fedsplit").colour)
    loss = first.data["loss"].sel({"method": "fedsplit", "width": 16}).values
    np.testing.assert_allclose(curve, (loss / loss[:, :1]).mean(0))
    np.testing.assert_allclose(bound, float(first.data["contraction"][0]) ** np.arange(7))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    explained = ["bound of Theorem 1", "range over replicates"]
    assert labels == ["FedAvg", "FedSplit", "FedFac dynamic", *explained]
    assert ax.get_yscale() == "log"


def test_freezing_draws_five_measures_by_width(first):
    ax = plot.freezing(first)
    assert len(ax.get_legend().get_texts()) == 5
    assert [t.get_text() for t in ax.get_xticklabels()] == ["8", "16"]
    glance = first.by_setting().query("method == 'fedsplit'")
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), glance["gap_shared"])
    assert {line.get_linestyle() for line in ax.get_lines()} == {"None"}, "two widths are not joined"


def test_generalization_draws_bound_and_observation(second):
    from matplotlib.figure import Figure

    given = Figure().subplots()
    ax = plot.generalization(second, ax=given)
    assert ax is given
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [1, 2, 4])
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), second.by_setting()["bound"])
    of_test = second.data["test"].transpose("setting", "replicate").values
    low = [stats.ttest_1samp(values, 0).confidence_interval(0.95)[0] for values in of_test]
    (bars,) = (drawn for drawn in ax.collections if isinstance(drawn, LineCollection))
    drawn = [segment[0, 1] for segment in bars.get_segments()]
    np.testing.assert_allclose(drawn, low)


def test_what_was_not_run_is_not_drawn(first, second):
    assert plot.convergence(first, width=8).get_lines()
    with pytest.raises(ValueError, match=r"width must be one of .*8.*16.*, but got 32"):
        plot.convergence(first, width=32)
    with pytest.raises(ValueError, match="x must be one of 'clients', 'n', but got 'samples'"):
        plot.generalization(second, x="samples")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theory_convergence", "theory_generalization"])
def test_figure_scripts_make_the_store_once_and_then_read_it(name, tmp_path):
    script = [sys.executable, "-W", "error", str(ROOT / "paper_figs" / f"{name}.py")]
    options = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "a.png")]
    subprocess.run([*script, *options], check=True, cwd=ROOT)
    stores = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()}
    assert len(stores) == 2
    assert (tmp_path / "a.png").stat().st_size > 10_000
    subprocess.run([*script, *options], check=True, cwd=ROOT)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()} == stores
