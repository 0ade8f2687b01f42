"""Reports: what they say is what the runs hold, warnings come first, and nothing in a store is ever executed."""

from __future__ import annotations

import base64
import json
import re
import shlex
from xml.etree import ElementTree

import numpy as np
import pytest
import xarray as xr
from fl_stores import grid, write
from pages import Page

import fedstat
from fedstat import store
from fedstat.decompose import __main__ as decompose
from fedstat.fl import __main__ as fl
from fedstat.reporting import __main__ as cli
from fedstat.reporting import document, training
from fedstat.reporting.stored import Stored
from fedstat.sim import __main__ as sim
from fedstat.study import compare_runs, experiment, run_table
from fedstat.study.report import report as printed
from fedstat.study.run_settings import Settings

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{$ \x00 \ud800 {{ 7 * 7 }} \u202e'


def page(made):
    found = Page(made.html)
    assert not {"script", "iframe", "object", "link", "form", "svg"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on"), name
        assert name not in ("src", "href") or value.startswith("data:image/"), value
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in found.attributes
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "fedfac.zarr"
    settings = {"layers": ["conv1"], "kappa": 0.85, "tau": "0.5", "estimator": "pa"}
    return write(path, algorithm="fedfac-dynamic", weights=True, algorithm_settings=settings)


@pytest.fixture(scope="module")
def reported(run):
    return fedstat.report(run)


def test_a_run_is_reported_with_its_numbers(run, reported):
    tree, text = fedstat.open_run(run), page(reported).text
    row = run_table.row(tree)
    (part,) = reported.parts
    assert part.summary == printed(tree)
    assert f"{row['last10']:.3f} mean of rounds 15 to 24" in text
    assert re.search(r"conv1 4/8 \d+ 1\.000", text)
    own = run_table.clients(tree)["accuracy"].to_numpy()
    assert f"Over clients, rounds 15 to 24: mean {own.mean():.3f}, SD {own.std(ddof=1):.3f}," in text
    accuracy, n = tree["metrics/accuracy"].values[-1], tree["metrics/n_test"].values
    z = 1.959964
    for share, n_test in zip(accuracy, n, strict=True):  # Wilson's interval by the formula of 1927
        p = round(share * n_test) / n_test
        half = z * np.sqrt(p * (1 - p) / n_test + z**2 / (4 * n_test**2))
        low, high = ((p + z**2 / (2 * n_test) + end) / (1 + z**2 / n_test) for end in (-half, half))
        assert f"{share:.3f} [{low:.3f}, {high:.3f}]" in text
    assert (
        "FedFac dynamic (Wang et al., 2023) shares units of high communality ν in the layers Λ, anew in every round; "
        "each client keeps the other units of Λ. Λ: conv1. Communality comes from principal axis factor analysis "
        "(Harman, 1976) of the clients' stacked weights, with κ = 0.85, the proportion of the eigenvalue sum that the "
        "factors reach, and threshold τ = 0.5." in text
    )
    assert "@misc{wang2023," in text
    assert "@techreport{krizhevsky2009," in text  # the data set
    assert "liang2020" not in text


def test_one_run_claims_nothing_over_seeds(reported):
    text = page(reported).text
    assert "One seed" in [one.title for one in reported.cautions]
    assert "One seed: a single run, of seed 0, has no interval over seeds." in text
    assert "interval over seeds" not in text.replace("no interval over seeds", "")


def test_analyses_that_failed_come_first(tmp_path):
    tree = fedstat.open_run(write(tmp_path / "run.zarr", algorithm="fedfac-dynamic", weights=True)).load()
    nu = tree["split/conv1/communality"]
    nu[-3:, 2] = 1.2
    nu[-1, 5] = np.nan
    tree["metrics/loss"][20:, 3] = np.inf
    made = fedstat.report(tree)
    text = {one.title: one.text for one in made.cautions}
    assert text["Factor analysis not converged"].startswith("layer conv1: in 1 of 24 rounds")
    assert text["Heywood cases"].startswith("layer conv1: communalities above 1 in 3 of 24 rounds (up to 1 of 8 units)")
    assert text["Constant units"].startswith("layer conv1: 1 of 8 units")
    assert text["Diverged"] == "the test loss of 1 client is not finite, first in round 21"
    assert made.cautions[0].title == "Diverged"
    places = [made.html.index(text) for text in ("Heywood cases", "What was run", "What was found", "Learning curves")]
    assert places == sorted(places)


@pytest.mark.parametrize(("revision", "version"), [("abc", "revision abc"), ("", "digest 0123")])
def test_a_clean_run_has_no_warning_of_its_numbers_nor_of_an_installed_package(tmp_path, revision, version):
    tree = fedstat.open_run(write(tmp_path / "run.zarr", algorithm="fedavg", clients=40)).load()
    tree.attrs |= {"revision": revision, "code": "0123"}
    made = fedstat.report(tree)
    assert {one.title for one in made.cautions} == {"One seed"}
    assert f"{tree.attrs['source']}, {version}" in page(made).text
    assert "shares everything. Clients trained" in made.parts[0].methods, "nothing of splits"


FEDFAC = {
    "communality": ({"estimator": "minres"}, "shares units of high communality ν in", "from minimum residual factor"),
    "agreement": (
        {"estimator": "icc", "on": "updates"},
        "shares units on which clients agree in",
        "of the clients' upd",
    ),
    "test": (
        {"estimator": "icc", "tau": "test", "fdr": 0.1},
        "shares units without evidence of",
        "(false discovery rate 0.1)",
    ),
}


@pytest.mark.parametrize("rule", FEDFAC)
def test_methods_name_the_rule_by_which_the_run_split_its_units(tmp_path, rule):
    settings, shares, statistic = FEDFAC[rule]
    (part,) = fedstat.report(
        write(tmp_path / "run.zarr", algorithm="fedfac-static", weights=True, algorithm_settings=settings)
    ).parts
    assert shares in part.methods
    assert statistic in part.methods
    assert "or agreement" not in part.methods
    assert ("harman1976" in part.cites, "shrout1979" in part.cites) == (rule == "communality", rule == "agreement")


def test_runs_of_two_rules_have_both_and_seeds_that_only_one_method_has_are_not_common(tmp_path):
    rules = ({"estimator": "icc"}, {"estimator": "pa"})
    runs = [
        write(tmp_path / f"{i}.zarr", algorithm="fedfac-static", algorithm_settings=rule)
        for i, rule in enumerate(rules)
    ]
    runs.append(write(tmp_path / "fedavg.zarr", algorithm="fedavg", seed=1))
    (part,) = fedstat.report(runs).parts
    assert "shares units on which clients agree or, with other settings, units of high communality ν" in part.methods
    assert {"harman1976", "shrout1979"} <= {*part.cites}
    assert "2 seeds (0, 1), not all of them for each method." in part.methods
    assert [row[1:] for row in part.ran.rows] == [["FedAvg", "1", "1", "seed 1"], ["FedFac static", "2", "2", "seed 0"]]


def test_warnings_of_a_page_are_sentences(tmp_path):
    made = fedstat.report(write(tmp_path / "run.zarr", finish=False))
    listed = re.findall(r"<li( class=\"severe\")?><strong>[A-Z][a-z ]+:</strong> [^<]+\.</li>", made.html)
    assert len(listed) == len(made.cautions) > 1


def test_an_unfinished_run_is_reported_as_far_as_it_got(tmp_path):
    tree = fedstat.open_run(write(tmp_path / "run.zarr", finish=False)).load()
    for name in ("accuracy", "loss", "train_loss", "accuracy_before", "validation_accuracy", "seconds"):
        tree["metrics"][name][15:] = np.nan
    made = fedstat.report(tree)
    assert made.cautions[0].title == "Not finished"
    assert made.cautions[0].text.startswith("15 of 24 rounds are done")
    expected = run_table.row(tree.isel(round=slice(15), missing_dims="ignore"))["last10"]
    assert f"{expected:.3f} mean of rounds 6 to 15" in page(made).text


def test_nothing_done_is_said_and_not_raised(tmp_path):
    tree = fedstat.open_run(write(tmp_path / "run.zarr", finish=False)).load()
    for name in tree["metrics"].data_vars:
        if "round" in tree["metrics"][name].dims:
            tree["metrics"][name][:] = np.nan
    made = fedstat.report(tree)
    assert made.cautions[0].text.startswith("0 of 24 rounds are done")
    assert page(made).tags.count("img") == 0


def test_damage_is_named_and_the_rest_is_reported(tmp_path):
    path = write(tmp_path / "run.zarr", algorithm="fedfac-dynamic", weights=True)
    chunk = next(p for p in (path / "metrics/accuracy").rglob("*") if p.is_file() and p.name != "zarr.json")
    chunk.write_bytes(chunk.read_bytes()[:-7])
    made = fedstat.report(path)
    found = {one.title: one for one in made.cautions}
    assert found["Damaged files"].severe
    assert "metrics/accuracy" in found["Damaged files"].text
    assert "scores by client" in found["Not in this report"].text
    assert "shared units (dark) in each round" in page(made).text  # what is sound is there
    (path / "zarr.json").write_text("{")
    assert "zarr.json" in fedstat.report(path).cautions[0].text


def test_a_hostile_store_is_text(tmp_path):
    tree = fedstat.open_run(write(tmp_path / "run.zarr", algorithm="fedfac-dynamic", weights=True)).load()
    parts = tree.to_dict()
    layer = HOSTILE.replace("/", "⁄")
    groups = {name.replace("conv1", layer): data for name, data in parts.items()}
    of_text = HOSTILE.encode("utf-8", "replace").decode()  # no store holds half a pair of UTF-16
    names = np.array([f"{of_text} {i}" for i in range(6)], object)
    metrics = groups["/metrics"]
    groups["/metrics"] = metrics.assign_coords(client=("client", names))
    bad = xr.DataTree.from_dict(groups)
    config = json.loads(tree.attrs["config"])
    config |= dict.fromkeys(("scenario", "data", "net", HOSTILE), HOSTILE)
    config |= {"partition": f"{HOSTILE}:{HOSTILE}", "layers": [HOSTILE], "algorithm_settings": {HOSTILE: [HOSTILE]}}
    bad.attrs = {**tree.attrs, "title": HOSTILE, "source": HOSTILE, "revision": HOSTILE, "config": json.dumps(config),
                 "versions": json.dumps({HOSTILE: HOSTILE})}  # fmt: skip
    made = fedstat.report(bad)
    text = page(made).text
    assert "<script>alert(1)</script>" in text  # as text
    assert "{{ 7 * 7 }}" in text
    assert page(fedstat.report([bad, bad.copy()])).tags.count("img") > 1
    shown = made._repr_html_()
    assert re.search('<iframe [^>]*sandbox=""', shown)
    assert "box-sizing: border-box" in shown.partition("<iframe")[0], "the border is no wider than the cell"
    assert "<script" not in shown


def test_a_run_that_is_named_twice_is_refused(run, tmp_path):
    (tmp_path / "link.zarr").symlink_to(run)
    for again in (run, str(run), run.parent, tmp_path / "link.zarr"):
        with pytest.raises(ValueError, match="is named twice"):
            fedstat.report([run, again])
    tree = fedstat.open_run(run)
    with pytest.raises(ValueError, match="an opened run is named twice"):
        fedstat.report([tree, tree])


def test_names_in_figures_are_drawn_as_text():
    name = document.shown(HOSTILE)
    made = document.figure(lambda ax: ax.set(xlabel=name, ylabel="$x_{$", title=r"$\alpha$"), name)
    assert made.source.startswith("data:image/svg+xml;base64,")
    drawn = base64.b64decode(made.source.partition(",")[2])
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawn).iter()}  # noqa: S314 - our own
    assert not {"script", "foreignObject", "image"} & tags


@pytest.mark.parametrize("name", ["config", "versions", "about"])
def test_attributes_that_are_no_json_are_no_error(tmp_path, name):
    tree = fedstat.open_run(write(tmp_path / "run.zarr")).load()
    tree.attrs[name] = "{"
    assert page(fedstat.report(tree)).text


def test_a_grid_is_compared_within_seeds(tmp_path):
    made = fedstat.report(grid(tmp_path / "runs", seeds=3, methods=("fedavg", "fedfac-dynamic")))
    rows = [run_table.row(fedstat.open_run(p)) for p in sorted((tmp_path / "runs").glob("*.zarr"))]
    here = {(r["method"], r["seed"]): r["last10"] for r in rows if r["scenario"] == "CIFAR-10, π = 0.1"}
    difference = np.mean([here["fedfac-dynamic", s] - here["fedavg", s] for s in range(3)])
    (part,) = made.parts
    assert part.summary == compare_runs(tmp_path / "runs").summary()
    text = page(made).text
    assert f"{difference:+.4f} [" in text
    assert [section.title for section in part.sections][:2] == ["CIFAR-10, π = 0.1", "CIFAR-10, π = 0.5"]
    assert "all scenarios (means within each seed)" in text
    assert "Few seeds" in [one.title for one in made.cautions]
    assert "Runs were repeated with 3 seeds (0, 1, 2), common to all methods." in text
    assert all(f"@{kind}" in text for kind in ("inproceedings{mcmahan2017", "misc{wang2023", "article{holm1979"))
    assert len(made.html) < 2e6


def test_metrics_of_runs_are_columns_of_their_table(tmp_path):
    settings = Settings(clients=4, rounds=1, max_samples=40, partition="iid", metrics=("balanced_accuracy", "auc"))
    runs = [experiment.run(settings.but(algorithm=name), out=tmp_path / name) for name in ("fedavg", "fedper")]
    (section,) = [
        section for section in fedstat.report(list(tmp_path.iterdir())).parts[0].sections if "Clients" in section.title
    ]
    (table,) = section.blocks
    assert list(table.columns)[-2:] == ["balanced accuracy", "AUC"]
    assert {row[-2] for row in table.rows} == {f"{run_table.row(run)['balanced_accuracy']:.4f}" for run in runs}


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("one seed"), seeds=1, methods=("fedavg", "fedper"))


def test_a_grid_of_one_seed_claims_no_interval(one_seed):
    made = fedstat.report(one_seed)
    text = page(made).text
    assert "One seed: differences between methods of one seed have no interval, and may be chance." in text
    assert "(too few seeds)" in text
    assert not re.search(r"fedper .*[+-]0\.\d+ \[", made.parts[0].summary)


def test_runs_of_different_scale_are_not_compared(tmp_path):
    paths = [write(tmp_path / f"{n}.zarr", rounds=n) for n in (12, 24)]
    made = fedstat.report(paths)
    assert "Not compared" in [one.title for one in made.cautions]
    assert "they differ in rounds" in page(made).text


def test_unfinished_runs_of_a_grid_are_left_out_and_named(one_seed, tmp_path):
    late = write(tmp_path / "late.zarr", algorithm="fedrep", finish=False)
    made = fedstat.report([*one_seed.iterdir(), late])
    assert made.cautions[0].title == "Not finished"
    assert "late" in made.cautions[0].text
    assert "FedRep" not in {str(cell) for part in made.parts for s in part.sections[:1] for b in s.blocks
                            for row in getattr(b, "rows", ()) for cell in row}  # fmt: skip


def test_the_command_of_a_run_is_read_back_as_its_settings():
    settings = Settings.of(data="digits", algorithm="fedprox", mu=0.3, lr=0.05, partition="dirichlet:0.1", seed=4)
    attrs = {"about": store.to_json(experiment.about(settings))}
    words = shlex.split(training.command(Stored("x", attrs, {}, None)))
    assert words[:3] == ["python", "-m", "fedstat.fl"]
    assert Settings().but(**fl.read_settings(fl.parser().parse_args(words[3:]))) == settings


def test_a_study_is_reported():
    options = {"p": (0.5,), "methods": ("true", "dynamic", "fedavg"), "clients": 4, "d": 8, "m": 10, "n_train": 20}
    run = fedstat.sim.study(**options, rounds=3, replicates=2, threads=1)
    made = fedstat.report(run)
    text = page(made).text
    table = fedstat.sim.summary(run).set_index("method")
    assert f"{table.loc['fedavg', 'difference']:+.3f} [{table.loc['fedavg', 'difference_low']:+.3f}" in text
    assert "Few replicates" in [one.title for one in made.cautions]
    command = re.search(r"python -m fedstat\.sim .*?--keep-weights \w+", text)[0]
    read = vars(sim.parser().parse_args(shlex.split(command)[3:]))
    config = json.loads(run.attrs["config"])
    assert {k: read[k] for k in config} == config


def test_a_split_is_reported(tmp_path):
    rng = np.random.default_rng(0)
    files = []
    for i in range(4):
        files.append(str(tmp_path / f"<b>client{i}.npz"))
        np.savez(files[-1], **{"fc1.weight": rng.normal(size=(30, 9))})
    out = tmp_path / "split.zarr"
    assert decompose.main([*files, "--n-factors", "3", "--n-boot", "20", "--out", str(out)]) == 0
    made = fedstat.report(out)
    text = page(made).text
    data = fedstat.open_run(out)["split/fc1"]
    split, drawn = (fedstat.load(out, kind=kind)["fc1"] for kind in ("split", "bootstrap"))
    assert made.parts[0].summary == f"fc1: {split!r}\nfc1: {drawn!r}"
    assert f"{int(data['shared'].sum())} shared, {int((~data['shared']).sum())} personal" in text
    p = data["prop_shared"].values
    assert f"{int(((p > 0.1) & (p < 0.9)).sum())} of 30 units change group often" in text
    rows = made.parts[0].sections[0].blocks[1].rows  # both ends of the split's table
    assert rows[0][:2] == [str(data["unit"].values[np.argmax(data["communality"].values)]), "shared"]
    assert len(rows) == 25
    assert rows[12] == ["… 6 more, in the order of communality …"]
    told = {one.title: one.text for one in made.cautions}
    for one in (*split.cautions(), *drawn.cautions()):
        assert told[one.title] == f"layer fc1: {one.text}"
    assert "Certainty not estimated" not in told
    assert "principal axis factor analysis (Harman, 1976)" in text
    command = re.search(r"python -m fedstat\.decompose .*?--seed \d+", text)[0]
    assert decompose.parser().parse_args(shlex.split(command)[3:]).files == files
    stopped = ["--n-factors", "3", "--max-iter", "2", "--n-boot", "20", "--out", str(out), "--overwrite"]
    assert decompose.main([*files, *stopped]) == 0
    cautions = {one.title: one.text for one in fedstat.report(out).cautions}
    assert cautions["Refits not converged"].startswith("layer fc1: 100% of the refits had not converged")
    assert decompose.main([*files, "--method", "icc", "--out", str(out), "--overwrite"]) == 0
    made = fedstat.report(out)
    assert "the intraclass correlation ICC2 (Shrout and Fleiss, 1979)" in page(made).text
    assert (
        "fedstat.icc(weights, n_boot=500)" in {one.title: one.text for one in made.cautions}["Certainty not estimated"]
    )


def test_the_command_writes_once_and_replaces_only_reports(tmp_path, capsys):
    run, out = write(tmp_path / "run.zarr", clients=4, rounds=12), tmp_path / "report.html"
    assert cli.main([str(run), "--out", str(out)]) == 0
    assert "Test accuracy of client models" in capsys.readouterr().out
    assert Page(out.read_text(encoding="utf-8")).tags
    for argv, words in (
        ([str(run), "--out", str(out)], "exists. Add --overwrite"),
        ([str(run), "--out", str(tmp_path / "x.pdf")], "must end in .html"),
        ([str(run), "--out", str(tmp_path / "no" / "x.html")], "existing folder"),
        ([str(tmp_path / "nothing"), "--out", str(tmp_path / "x.html")], "there is no run at"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(argv)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
    assert cli.main([str(run), "--out", str(out), "--overwrite"]) == 0
    out.write_text("my own page", encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main([str(run), "--out", str(out), "--overwrite"])
    with pytest.raises(ValueError, match="no report that fedstat made"):
        fedstat.report(run, out)
    assert out.read_text(encoding="utf-8") == "my own page"


def test_a_store_of_another_program_says_so(tmp_path):
    tree = xr.DataTree(xr.Dataset({"x": ("i", [1.0])}))
    store.save(tmp_path / "x.zarr", tree, store.provenance("mine", {"a": 1}, command="other"))
    assert "fedstat has no report for stores of other." in page(fedstat.report(tmp_path / "x.zarr")).text
    with pytest.raises(ValueError, match="at least one run"):
        fedstat.report([])
