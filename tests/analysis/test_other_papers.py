"""Studies of Factorized-FL, FedDecomp and FedCP: their grids, tables and figures, on small runs of the digits."""

from __future__ import annotations

import math

import _tables
import numpy as np
import pytest
import tables
from _tables import Reference, leakage_table, read_reference
from real_data import require_real_data
from scripts import ROOT, load

from fedstat import open_run
from fedstat._utils.settings import read_toml
from fedstat.attack.experiment import leakage
from fedstat.study import collect, experiment, run_table
from fedstat.study.grid import cells, name_of, of_study, run_all
from fedstat.study.run_settings import Settings

PAPERS = ("factorized_fl", "feddecomp", "fedcp")
FIGURES = {
    "feddecomp_fig5": "fig5", "feddecomp_fig6": "table3", "feddecomp_fig7": "table1", "fedcp_fig5": "fig5",
    "fedcp_fig6": "table2", "factorized_fl_fig6": "table1", "factorized_fl_fig7": "fig7",
}  # fmt: skip
SMALL = {
    "clients": 4, "max_samples": 40, "participation": 1.0, "net_options": "hidden=6", "local_epochs": 2, "rounds": 2,
}  # fmt: skip


@pytest.mark.parametrize("paper", PAPERS)
def test_every_script_has_its_study_in_the_papers_grid_at_every_scale(paper):
    file = ROOT / "simulations" / f"{paper}.toml"
    named = set(tables.TABLES[paper])
    named |= {study for figure, study in FIGURES.items() if figure.startswith(paper)}
    for scale in read_toml(file)["scale"]:
        whole = set(cells(file, scale=scale))
        assert all(set(cells(file, scale=scale, study=study)) <= whole for study in named)
    fixed = {option for one in whole if one.algorithm.startswith("factorized") for option in one.options}
    assert "tau=0.5" not in fixed or paper == "factorized_fl", "FedFac's τ is not Factorized-FL's"


@pytest.mark.parametrize("paper", PAPERS)
def test_published_variants_are_named_as_ours(paper):
    found = read_reference(ROOT / "analysis" / paper / "reference.toml")
    file = ROOT / "simulations" / f"{paper}.toml"
    for name in ("table1", "table2", "table3", "table4", "table5", "table8", "table10"):
        names = {m for values in found.tables.get(name, {}).values() for m in values if ", " in m}
        if not names:
            continue
        runs = cells(file, scale="paper", study=name)
        ours = {", ".join([one.algorithm, *one.options]) for one in runs}
        assert names <= ours, name


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """A paper's folder and grid in small, with its runs."""
    root = tmp_path_factory.mktemp("mini")
    for folder in ("simulations", "runs"):
        (root / folder).mkdir(parents=True)
    file = root / "simulations" / "feddecomp.toml"
    file.write_text(
        """
        clients = 4
        max_samples = 40
        participation = 1.0
        net_options = ["hidden=6"]
        local_epochs = 2
        rounds = 2
        seeds = [0, 1]
        probe = "drift"
        keep_weights = "none"
        [[dataset]]
        scenario = "CIFAR-10, α = 0.1"
        studies = ["table1", "table3", "fig5"]
        [[method]]
        algorithm = "local"
        studies = ["table1"]
        [[method]]
        algorithm = "fedavg"
        studies = ["table1"]
        [[method]]
        algorithm = "feddecomp"
        studies = ["table1", "table3"]
        [[method]]
        algorithm = "feddecomp"
        studies = ["table3"]
        alternating = false
        [[method]]
        algorithm = "feddecomp"
        studies = ["fig5"]
        sweep = { lora_epochs = [0, 1] }
        """
    )
    for _ in run_all(cells(file), root / "runs"):
        pass
    return root


def test_a_row_tabulates_the_variants_of_its_study_beside_the_published_values(mini, capsys, monkeypatch):
    monkeypatch.setattr(_tables, "SIMULATIONS", mini / "simulations")
    out = mini / "table3"
    assert tables.main(["feddecomp", "table3", "--runs", str(mini / "runs"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("FedDecomp Table 3: personal and shared part trained in turn, or together.")
    lines = [line.split("  ")[0] for line in said.splitlines()]
    assert lines[3:6] == ["method", "FedDecomp", "FedDecomp, alternating=false"]
    for published in ("0.8547", "0.8545"):
        assert published in said
    assert "alternating" not in (mini / "table3.csv").read_text().splitlines()[1]


def test_figures_of_feddecomp_are_drawn_from_their_studies(mini):
    file, runs = mini / "simulations" / "feddecomp.toml", collect.collect(mini / "runs")
    drawn, _ = load("paper_figs/feddecomp_fig5.py").draw(of_study(runs, file, "fig5"))
    line = drawn.axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 1]
    swept = of_study(runs, file, "fig5").table
    at_one = swept.loc[swept["method"] == "feddecomp, lora_epochs=1", "final"].mean()
    assert line.get_ydata()[1] == pytest.approx(at_one)
    drawn, _ = load("paper_figs/feddecomp_fig6.py").draw(of_study(runs, file, "table3"))
    curves = [line.get_ydata() for line in drawn.axes[0].lines if len(line.get_xdata()) == 2]
    run = open_run(of_study(runs, file, "table3").table.query("method == 'feddecomp' and seed == 0")["path"].iloc[0])
    other = open_run(of_study(runs, file, "table3").table.query("method == 'feddecomp' and seed == 1")["path"].iloc[0])
    each = [np.sqrt((r["drift/distance"].values[0] ** 2).sum(1)).mean() for r in (run, other)]
    assert curves[0][0] == pytest.approx(np.mean(each), rel=1e-5)
    drawn, _ = load("paper_figs/feddecomp_fig7.py").draw(of_study(runs, file, "table1"))
    assert "lose" in drawn.axes[0].get_xticklabels()[0].get_text()


def test_figures_of_the_policy_and_of_what_is_sent(mini, tmp_path):
    runs = [one for one in cells(mini / "simulations" / "feddecomp.toml", study="table1") if one.seed == 0]
    paths = {one.algorithm: mini / "runs" / f"{name_of(one)}.zarr" for one in runs if one.algorithm != "feddecomp"}
    (run,) = run_all([runs[0].but(algorithm="fedcp")], tmp_path)
    paths["fedcp"] = run.path
    grid = collect.collect(paths.values())
    drawn, _ = load("paper_figs/fedcp_fig5.py").draw(collect.collect([paths["fedcp"]]))
    assert len(drawn.axes[0].lines) == 4 + 2  # clients, their mean, one half
    drawn, _ = load("paper_figs/fedcp_fig6.py").draw(grid)
    for ax, name in zip(drawn.axes, ("train_loss", "accuracy", "accuracy_before"), strict=True):
        expected = [
            run_table.curve(open_run(paths[method]), name)[name].tolist() for method in ("fedavg", "fedcp", "local")
        ]
        drawn_as = [list(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) == 2]
        assert all(curve in drawn_as for curve in expected), name
    drawn, _ = load("paper_figs/factorized_fl_fig6.py").draw(grid)
    rounds, sent = drawn.axes
    assert sum(len(line.get_xdata()) == 2 for line in rounds.lines) == 3
    one = open_run(paths["fedavg"])
    total = float((one["metrics/bytes_up"] + one["metrics/bytes_down"]).sum()) / 1e6
    assert any(math.isclose(line.get_xdata()[-1], total) for line in sent.lines if len(line.get_xdata()))


def test_similarities_are_drawn_by_domain(tmp_path):
    place = require_real_data()
    settings = Settings.of(
        algorithm="factorized-fl-alpha", data="cifar-100:test", partition="domains", class_labels="permuted",
        **SMALL | {"clients": 5},
    )  # fmt: skip
    for _ in run_all([settings], tmp_path, data_dir=place):
        pass
    drawn, note = load("paper_figs/factorized_fl_fig7.py").draw(collect.collect(tmp_path))
    similarity = open_run(next(tmp_path.glob("*.zarr")))["measures/similarity_u"].values
    shown = np.asarray(drawn.axes[0].images[0].get_array().filled(np.nan))
    np.testing.assert_allclose(shown[0, 1:], similarity[0, 0, 1:])
    (ax,) = (ax for ax in drawn.axes if ax.get_title() == "who averages whom")
    times = (open_run(next(tmp_path.glob("*.zarr")))["mixing/weight"].values > 0).sum(axis=0)
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array().filled(-1))[0, 1:], times[0, 1:])
    assert "Household Objects" in note


def test_both_parts_are_measured_from_the_start_that_others_trained(tmp_path):
    script = load("analysis/feddecomp/table6.py")
    settings = Settings.of(algorithm="fedavg", unseen_fraction=0.5, **SMALL | {"clients": 6})
    experiment.run(settings, out=tmp_path / "a.zarr")
    rows = script.moved(str(tmp_path / "a.zarr"))
    assert [row["epochs"] for row in rows] == [0, 1]
    assert rows[0]["tau"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["tau"] > 0.01
    assert rows[0]["sigma"] > rows[1]["sigma"] > 0
    start = script.weights(open_run(tmp_path / "a.zarr"))
    assert {name: p.shape for name, p in start.items()} == {
        "fc1.weight": (6, 64), "fc1.bias": (6,), "fc2.weight": (10, 6), "fc2.bias": (10,)
    }  # fmt: skip


def test_the_attack_is_a_table_beside_published_values(tmp_path):
    for name in ("fedavg", "feddecomp"):
        experiment.run(Settings.of(algorithm=name, optimizer="sgd", lr=0.1, **SMALL), out=tmp_path / f"{name}.zarr")
    result = leakage(sorted(tmp_path.glob("*.zarr")), images=1, iterations=20, labels="given")
    paper = Reference({"table7": {"CIFAR-10": {"fedavg": 13.91, "feddecomp": 11.34}}}, "someone")
    made = leakage_table(result, paper, name="table7", title="T")
    augmented = result.augment()
    assert made.values["paper"].tolist() == [13.91, 11.34]
    assert made.values["estimate"].tolist() == augmented["estimate"].tolist()
    (block,) = made.blocks.values()
    assert block["method"].tolist() == ["FedAvg", "FedDecomp"]
    assert "someone" in made.text()
