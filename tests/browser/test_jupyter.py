"""A user's notebook in JupyterLab and Chromium: bars, an interrupt, a restart, and tables in the light and dark theme.

It needs JupyterLab, Playwright's Python package (without its browsers) and Chromium: `pip install jupyterlab
playwright` and `apt-get install chromium`. With FEDSTAT_BROWSER=require a missing one is an error; otherwise the tests
are skipped. Bars are lines of text, also if ipywidgets is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 1050
THEMES = ("JupyterLab Light", "JupyterLab Dark")
SECONDS = 60

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
    "curves": 'fedstat.plot.accuracy_curves(["run.zarr"])\nplt.show()',
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
BARS = {"bootstrap": "20/20 [", "jackknife": "12/12 [", "permutation": "19/19 [", "clusters": "924/924 ["}

# Lists of faults in outputs: text below the contrast of WCAG AA, outputs and tables that are wider than their place but
# do not scroll, prints whose lines break or are cut. Besides, the number of boxes in which a table scrolls.
LOOK = """outputs => {
  const light = ([r, g, b]) => {
    const f = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const rgb = color => color.match(/[\\d.]+/g).map(Number);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0.5) return color;
    }
    return [255, 255, 255];
  };
  const isWide = node => node.scrollWidth > node.clientWidth + 1;
  const faults = {pale: [], wide: [], cut: [], broken: [], boxes: 0};
  for (const output of outputs) {
    if (isWide(output)) faults.wide.push(output.innerText.slice(0, 60));
    for (const details of output.querySelectorAll("details")) details.open = true;
    for (const table of output.querySelectorAll("table")) {
      const box = table.parentElement;
      const scrolls = ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
      faults.boxes += scrolls && isWide(box);
      if (!scrolls && isWide(box)) faults.cut.push(table.innerText.slice(0, 60));
    }
    for (const pre of output.querySelectorAll("[style*=container-type] > pre")) {
      const style = getComputedStyle(pre);
      const isWhole = style.whiteSpace === "pre" && !isWide(pre);
      if (!isWhole || style.marginLeft !== "0px") faults.broken.push(pre.innerText.slice(0, 60));
    }
    if (isWide(output)) faults.wide.push("opened: " + output.innerText.slice(0, 60));
    for (const node of output.querySelectorAll("pre, td, th, p, h4, summary")) {
      if (!node.innerText.trim()) continue;
      const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
      if ((a + 0.05) / (b + 0.05) < 4.5) faults.pale.push(node.innerText.slice(0, 40));
    }
    for (const details of output.querySelectorAll("details")) details.open = false;
  }
  return faults;
}"""


def missing() -> str:
    """Return the names of what is not installed."""
    absent = [name for name in ("jupyterlab", "ipykernel", "playwright") if find_spec(name) is None]
    return ", ".join([*absent, *(() if CHROMIUM else ("chromium",))])


def settings_of(name: str, values: Mapping[str, Any], folder: Path) -> None:
    """Write settings of a plugin of JupyterLab."""
    plugin, _, part = name.partition(":")
    path = folder / plugin / f"{part}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start JupyterLab with the settings of a new user; the address of the notebook."""
    if absent := missing():
        message = f"not installed: {absent}"
        pytest.fail(message) if os.environ.get("FEDSTAT_BROWSER") == "require" else pytest.skip(message)
    home = tmp_path_factory.mktemp("home")
    (home / "work").mkdir()
    settings_of("@jupyterlab/notebook-extension:tracker", {"windowingMode": "none"}, home / "settings")
    settings_of("@jupyterlab/apputils-extension:notification", {"fetchNews": "false"}, home / "settings")
    cells = [
        {"cell_type": "code", "id": name, "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for name, source in CELLS.items()
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (home / "work" / "user.ipynb").write_text(json.dumps(notebook))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "XDG_", "IPYTHON"))}
    env |= {
        "HOME": str(home), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTER_RUNTIME_DIR": str(home / "run"),
        "MPLCONFIGDIR": mpl.get_cachedir(), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    options = ["--no-browser", "--allow-root", "--ServerApp.root_dir=work", "--LabApp.expose_app_in_browser=True"]
    with (home / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], cwd=home, env=env, stderr=log)
        try:
            yield _address(server, home)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)


def _address(server: subprocess.Popen[bytes], home: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        for path in (home / "run").glob("jpserver-*.json"):
            about = json.loads(path.read_text() or "{}")
            if about:
                return f"http://127.0.0.1:{about['port']}/lab/tree/user.ipynb?token={about['token']}"
        time.sleep(0.2)
    raise RuntimeError((home / "log").read_text()[-2000:])


class Notebook:
    """The notebook in the browser, used by mouse and keyboard; pictures of it are in the folder ``shots``."""

    def __init__(self, page: Any, shots: Path) -> None:
        self.page, self._shots = page, shots
        self.texts: dict[str, str] = {}
        self.red: dict[str, list[str]] = {}

    def cell(self, name: str) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth([*CELLS].index(name))

    def start(self, name: str) -> None:
        """Run a cell by Shift+Enter."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def wait(self, name: str) -> str:
        """Wait for the end of a cell, and return its output."""
        from playwright.sync_api import expect

        prompt = self.cell(name).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"), timeout=1000 * SECONDS)
        self.page.wait_for_timeout(300)  # the last output is drawn
        self.texts[name] = self.output(name)
        red = self.cell(name).locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
        self.red[name] = [text for text in red if "KeyboardInterrupt" not in text]
        self.shot(name)
        return self.texts[name]

    def run(self, name: str) -> str:
        self.start(name)
        return self.wait(name)

    def output(self, name: str) -> str:
        return "\n".join(self.cell(name).locator(".jp-OutputArea-output").all_inner_texts())

    def bar(self, name: str, at_least: int) -> int:
        """Wait until a bar counts some rounds; the count."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            count = re.search(r"(\d+)/5000 \[", self.output(name))
            if count and int(count[1]) >= at_least:
                self.shot(f"{name}-bar")
                return int(count[1])
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{name} shows no bar with {at_least} rounds, but {self.output(name)!r}")

    def click(self, title: str) -> None:
        """Press a button of the toolbar."""
        self.page.locator(f".jp-NotebookPanel-toolbar [title^='{title}']").first.click()

    def choose(self, theme: str) -> None:
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        self.page.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")
        self.page.wait_for_timeout(500)

    def shot(self, name: str) -> None:
        self.page.screenshot(path=self._shots / f"{len(self.texts):02d}-{name}.png")


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="null")  # JupyterLab's theme
        page.set_default_timeout(1000 * SECONDS)
        page.goto(address)
        page.locator(".jp-Notebook .jp-Cell").nth(len(CELLS) - 1).wait_for()
        page.get_by_text("(ipykernel) | Idle").wait_for()
        yield page
        browser.close()


@pytest.fixture(scope="module")
def notebook(page: Any, tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    """Run all cells as a user does: interrupt two of them, and restart the kernel before the results are loaded."""
    notebook = Notebook(page, tmp_path_factory.mktemp("shots"))
    for name in CELLS:
        if name in ("train", "resume"):
            notebook.start(name)
            before = 0 if name == "train" else _rounds(notebook.texts["train"])
            notebook.bar(name, before + 3)
            notebook.click("Interrupt the kernel")
            notebook.wait(name)
            continue
        if name == RESTART:
            notebook.click("Restart the kernel")
            page.locator(".jp-Dialog button.jp-mod-accept").click()
            page.wait_for_timeout(1000)
            page.get_by_text("(ipykernel) | Idle").wait_for()
        if name != "scratch":
            notebook.run(name)
    return notebook


def _rounds(output: str) -> int:
    return int(re.findall(r"(\d+)/\d+ \[", output)[-1])


def test_a_bar_counts_rounds_and_an_interrupt_says_how_to_resume(notebook: Notebook) -> None:
    for name in ("train", "resume"):
        text = re.sub(r"\s", " ", notebook.texts[name])
        assert re.search(r"fedfac[\w-]*, seed 0: +\d+%\|.*\| +\d+/5000 \[\d\d:\d\d<[\d:]+, +[\d.]+", text)
        assert "KeyboardInterrupt" in notebook.texts[name]
        assert "To resume, repeat the call with resume=True." in notebook.texts[name].replace("\n", " ")
        for bar in notebook.cell(name).locator("pre", has_text="/5000 [").all():
            line = bar.evaluate("node => parseFloat(getComputedStyle(node).lineHeight)")
            assert bar.bounding_box()["height"] < 1.5 * line
    assert _rounds(notebook.texts["resume"]) > _rounds(notebook.texts["train"]) >= 3


def test_an_interrupted_run_is_finished_and_extended(notebook: Notebook) -> None:
    done = int(notebook.texts["finish"])
    assert done >= _rounds(notebook.texts["resume"])
    assert re.search(rf"100%\|█+\| {done + 5}/{done + 5} \[", notebook.texts["extend"])
    assert f"{done + 5}, finished" in notebook.texts["summary"]


def test_analyses_show_their_bars_and_a_run_first_what_it_is(notebook: Notebook) -> None:
    assert {name for name, bar in BARS.items() if bar not in notebook.texts[name]} == set()
    lines = notebook.texts["opened"].splitlines()
    assert lines[0] == notebook.texts["summary"].splitlines()[0]
    assert "FedFac dynamic, seed 0" in notebook.texts["opened"].partition("xarray.DataTree")[0]


def test_nothing_but_an_interrupt_is_red(notebook: Notebook) -> None:
    assert {name: red for name, red in notebook.red.items() if red} == {}
    assert [name for name, text in notebook.texts.items() if "Traceback" in text] == ["train", "resume"]


def test_a_restarted_kernel_loads_and_draws_the_results(notebook: Notebook) -> None:
    assert notebook.texts["load"].strip() in notebook.texts["split"]
    for name in PICTURES:
        image = notebook.cell(name).locator("img")
        assert image.count() == 1
        assert image.evaluate("node => node.naturalWidth > 300 && node.clientWidth <= node.parentElement.clientWidth")
        assert notebook.texts[name].strip() == "", "no name of axes stands above a picture"


def test_tab_offers_options_and_a_question_mark_the_help(notebook: Notebook) -> None:
    page = notebook.page
    notebook.cell("scratch").locator(".cm-content").click()
    page.keyboard.type("fedstat.split(split, ma")
    offered = page.locator(".jp-Completer:not(.lm-mod-hidden)")
    end = time.monotonic() + SECONDS
    while offered.count() == 0 and time.monotonic() < end:  # JupyterLab waits a second for the kernel's answer
        page.keyboard.press("Tab")
        page.wait_for_timeout(2000)
    offered.get_by_text("margin=").wait_for()
    offered.get_by_text("max_iter=").wait_for()
    notebook.shot("tab")
    page.keyboard.press("Escape")
    assert "Signature:" in notebook.texts["help"]
    assert "Parameters" in notebook.texts["help"]


@pytest.mark.parametrize("theme", THEMES)
def test_tables_scroll_in_their_box_and_stay_legible(notebook: Notebook, theme: str) -> None:
    page = notebook.page
    notebook.choose(theme)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for name in CELLS:
        notebook.cell(name).scroll_into_view_if_needed()
        notebook.shot(f"{theme.split()[-1]}-{name}")
    look = page.locator(".jp-Notebook .jp-OutputArea-output").evaluate_all(LOOK)
    assert look.pop("boxes") >= 1, "no table was wide enough to show that it scrolls"
    assert look == {"pale": [], "wide": [], "cut": [], "broken": []}
    for name in TABLES:
        assert notebook.cell(name).locator("table").count()


@pytest.mark.parametrize("theme", THEMES)
def test_a_report_stands_in_its_frame(notebook: Notebook, theme: str) -> None:
    notebook.choose(theme)
    notebook.cell("report").scroll_into_view_if_needed()
    frame = notebook.cell("report").locator("iframe").content_frame
    frame.get_by_role("heading", name="What was run").wait_for()
    notebook.page.wait_for_timeout(1000)  # the frame is drawn after it has scrolled into view
    notebook.shot(f"{theme.split()[-1]}-report-frame")
    assert frame.locator("html").evaluate("node => node.scrollWidth <= node.clientWidth")
    assert frame.locator("body").evaluate_all(LOOK)["pale"] == []
    page = frame.locator("body").evaluate("node => getComputedStyle(node).backgroundColor")
    assert page == ("rgb(20, 24, 29)" if theme == "JupyterLab Dark" else "rgb(255, 255, 255)")
