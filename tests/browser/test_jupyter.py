"""A user's notebook in JupyterLab and Chromium: bars, an interrupt, a restart, and tables in the light and dark theme.

``tests/support/jupyter_in_chromium.py`` says what it needs. With FEDSTAT_BROWSER=require a missing package is an error;
otherwise the tests are skipped. Bars are lines of text, also if ipywidgets is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest
from jupyter_in_chromium import FAULTS, KERNEL, LOOK, THEMES, Lab, Notebook, chromium

pytestmark = pytest.mark.slow

TRAIN = """run = fedstat.fl.train(
    data, nets.mlp([30, 24, 1]), algorithms.fedfac(["fc1"], kappa=0.5, tau=0.5), rounds={rounds}, lr=0.05,
    probe="trained-weights", about={{"folder": 150 * "x"}}, out="run.zarr"{options},
)"""
SETUP = """from matplotlib import pyplot as plt

import fedstat
from fedstat.fl import algorithms, nets

data = fedstat.sim.generate(clients=12, d=30, m=24, seed=1)"""
ANALYSIS = 'run, layer="fc1", stage="trained", kappa=0.5'
CELLS = {
    "setup": SETUP + '\nprint("fedstat", fedstat.__version__)',
    "train": TRAIN.format(rounds=5000, options=""),
    "resume": TRAIN.format(rounds=5000, options=", resume=True"),
    "finish": 'run = fedstat.fl.finish("run.zarr")\nn_rounds = run["metrics"].sizes["round"]\nprint(n_rounds)',
    "extend": TRAIN.format(rounds="n_rounds + 5", options=", resume=True, progress=True"),
    "opened": 'run = fedstat.open_run("run.zarr")\nrun',
    "settings": "fedstat.settings(run)",
    "summary": "fedstat.summary(run)",
    "stored": "fedstat.split(run)",
    "split": f"split = fedstat.split({ANALYSIS})\nsplit",
    "fa": f"fedstat.fa({ANALYSIS})",
    "bootstrap": f"fedstat.bootstrap({ANALYSIS}, n_boot=20, progress=True)",
    "jackknife": f"fedstat.jackknife({ANALYSIS}, progress=True)",
    "permutation": f"fedstat.permutation_test({ANALYSIS}, n_permutations=19, progress=True)",
    "clusters": """fedstat.client_clusters(
    run, layer="fc1", stage="trained", n_clusters=2, groups=6 * ["a", "b"], progress=True,
)""",
    "icc": 'agreement = fedstat.icc(run, stage="trained", layer="fc1")\nagreement',
    "save": 'split.save("split.zarr")\nagreement.save("agreement.json")',
    "load": SETUP + '\nsplit, agreement = fedstat.load("split.zarr"), fedstat.load("agreement.json")\nprint(split)',
    "forest": "fedstat.plot.forest(agreement)\nplt.show()",
    "weights": 'fedstat.plot.weights("run.zarr", layer="fc1")\nplt.show()',
    "curves": 'fedstat.plot.score_curves(["run.zarr"])\nplt.show()',
    "communality": "split.plot()\nplt.show()",
    "report": 'fedstat.report(fedstat.open_run("run.zarr"))',
    "help": "fedstat.split?",
    "scratch": "",
}
RESTART = "load"
"""Cell before which the kernel restarts."""
TABLES = (
    "opened", "settings", "summary", "stored", "split", "fa", "bootstrap", "jackknife", "permutation", "clusters", "icc"
)  # fmt: skip
PICTURES = ("forest", "weights", "curves", "communality")
BARS = {"bootstrap": "20/20", "jackknife": "12/12", "permutation": "19/19", "clusters": "924/924"}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    """Run all cells as a user does: interrupt two of them, and restart the kernel before the results are loaded."""
    cells = [
        {"cell_type": "code", "id": name, "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for name, source in CELLS.items()
    ]
    stored = {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}
    (lab.folder / "user.ipynb").write_text(json.dumps(stored))
    with chromium() as context:
        notebook = Notebook(lab, context, "user", [*CELLS])
        for name in CELLS:
            if name in ("train", "resume"):
                notebook.start(name)
                before = 0 if name == "train" else _rounds(notebook.texts["train"])
                notebook.bar(name, 5000, before + 3)
                notebook.click("Interrupt the kernel")
                notebook.wait(name)
                continue
            if name == RESTART:
                notebook.click("Restart the kernel")
                notebook.page.locator(".jp-Dialog button.jp-mod-accept").click()
                notebook.page.wait_for_timeout(1000)  # until then the kernel is still idle
                notebook.page.get_by_text("(ipykernel) | Idle").wait_for()
            if name != "scratch":
                notebook.run(name)
        yield notebook


def _rounds(output: str) -> int:
    return int(re.findall(r"(\d+)/\d+ rounds \[", output)[-1])


def test_a_bar_counts_rounds_and_an_interrupt_says_how_to_resume(notebook: Notebook) -> None:
    for name in ("train", "resume"):
        text = re.sub(r"\s", " ", notebook.texts[name])
        assert re.search(r"fac[\w-]*, seed 0: +\d+%\|.*\| +\d+/5000 rounds \[\d\d:\d\d<[\d:]+\]", text)
        assert "KeyboardInterrupt" in notebook.texts[name]
        assert "To resume, repeat the call with resume=True." in notebook.texts[name].replace("\n", " ")
        for bar in notebook.cell(name).locator("pre", has_text="/5000 rounds [").all():
            line = bar.evaluate("node => parseFloat(getComputedStyle(node).lineHeight)")
            assert bar.bounding_box()["height"] < 1.5 * line
    assert _rounds(notebook.texts["resume"]) > _rounds(notebook.texts["train"]) >= 3


def test_an_interrupted_run_is_finished_and_extended(notebook: Notebook) -> None:
    done = int(notebook.texts["finish"])
    assert done >= _rounds(notebook.texts["resume"])
    assert re.search(rf"100%\|█+\| {done + 5}/{done + 5} rounds \[", notebook.texts["extend"])
    assert f"{done + 5}, finished" in notebook.texts["summary"]


def test_analyses_show_their_bars_and_a_run_first_what_it_is(notebook: Notebook) -> None:
    assert {name for name, bar in BARS.items() if not re.search(rf"{bar} \w+ \[", notebook.texts[name])} == set()
    lines = notebook.texts["opened"].splitlines()
    assert lines[0] == notebook.texts["summary"].splitlines()[0]
    assert "FedFac dynamic, seed 0" in notebook.texts["opened"].partition("xarray.DataTree")[0]


def test_nothing_but_an_interrupt_is_red(notebook: Notebook) -> None:
    red = {name: [text for text in texts if "KeyboardInterrupt" not in text] for name, texts in notebook.red.items()}
    assert {name: texts for name, texts in red.items() if texts} == {}
    assert [name for name, text in notebook.texts.items() if "Traceback" in text] == ["train", "resume"]


def test_a_restarted_kernel_loads_and_draws_the_results(notebook: Notebook) -> None:
    assert notebook.texts["load"].strip() in notebook.texts["split"]
    for name in PICTURES:
        image = notebook.cell(name).locator("img")
        assert image.count() == 1
        assert image.evaluate("node => node.naturalWidth > 300 && node.clientWidth <= node.parentElement.clientWidth")
        assert notebook.texts[name].strip() == "", "no name of axes stands above a picture"


def test_tab_offers_options_and_a_question_mark_the_help(notebook: Notebook) -> None:
    from playwright import sync_api as playwright

    page = notebook.page
    notebook.cell("scratch").locator(".cm-content").click()
    page.keyboard.type("fedstat.split(split, ma")
    offered = page.locator(".jp-Completer:not(.lm-mod-hidden)")
    for _ in range(10):  # JupyterLab waits a second for the kernel's answer
        page.keyboard.press("Tab")
        with suppress(playwright.TimeoutError):
            offered.wait_for(timeout=2000)
            break
    offered.get_by_text("margin=").wait_for()
    offered.get_by_text("max_iter=").wait_for()
    notebook.shot("tab")
    page.keyboard.press("Escape")
    assert "Signature:" in notebook.texts["help"]
    assert "Parameters" in notebook.texts["help"]


@pytest.mark.parametrize("theme", THEMES)
def test_tables_scroll_in_their_box_and_stay_legible(notebook: Notebook, theme: str) -> None:
    faults = notebook.look(theme)
    assert faults.pop("boxes") >= 1, "no table was wide enough to show that it scrolls"
    assert faults == {kind: [] for kind in FAULTS}
    for name in TABLES:
        assert notebook.cell(name).locator("table").count()


@pytest.mark.parametrize("theme", THEMES)
def test_a_report_stands_in_its_frame(notebook: Notebook, theme: str) -> None:
    from playwright.sync_api import expect

    notebook.choose(theme)
    notebook.cell("report").scroll_into_view_if_needed()
    frame = notebook.cell("report").locator("iframe").content_frame
    frame.get_by_role("heading", name="What was run").wait_for()
    page = "rgb(20, 24, 29)" if theme == "JupyterLab Dark" else "rgb(255, 255, 255)"
    expect(frame.locator("body")).to_have_css("background-color", page)
    notebook.shot(f"{theme.split()[-1]}-report-frame")
    assert frame.locator("html").evaluate("node => node.scrollWidth <= node.clientWidth")
    assert frame.locator("body").evaluate_all(LOOK)["pale"] == []
