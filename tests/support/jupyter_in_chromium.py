"""JupyterLab in Chromium: a server with the settings of a new user, and notebooks used by mouse and keyboard.

They need JupyterLab, Playwright's Python package (without its browsers) and Chromium: ``pip install jupyterlab
playwright`` and ``apt-get install chromium``. FEDSTAT_SHOTS names a folder for pictures of the notebooks; without it
none are taken.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 1050
THEMES = ("JupyterLab Light", "JupyterLab Dark")
SECONDS = 60
"""Longest wait for a cell, a page or a dialog."""
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

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
FAULTS = ("pale", "wide", "cut", "broken")
# Ends when what has been done so far is drawn: a frame for the change, a frame for what follows from it.
DRAWN = """async () => {
  for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
  for (const change of document.getAnimations()) if (change instanceof CSSTransition) change.finish();
}"""


def skip_without(packages: Sequence[str], *others: str) -> None:
    """Skip a test if a package, Chromium or something else is absent; with FEDSTAT_BROWSER=require this is an error."""
    absent = [name for name in packages if find_spec(name) is None]
    if absent := [*absent, *(() if CHROMIUM else ("chromium",)), *others]:
        message = f"absent: {', '.join(absent)}"
        pytest.fail(message) if os.environ.get("FEDSTAT_BROWSER") == "require" else pytest.skip(message)


class Lab(NamedTuple):
    """A server of JupyterLab: its address, its token, and the folder of its notebooks."""

    address: str
    token: str
    folder: Path


@contextmanager
def jupyter_lab(home: Path) -> Iterator[Lab]:
    """Start JupyterLab in an empty folder, with the settings of a new user."""
    (home / "work").mkdir()
    _write_settings("@jupyterlab/notebook-extension:tracker", {"windowingMode": "none"}, home / "settings")
    _write_settings("@jupyterlab/apputils-extension:notification", {"fetchNews": "false"}, home / "settings")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "XDG_", "IPYTHON"))}
    env |= {
        "HOME": str(home), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTER_RUNTIME_DIR": str(home / "run"),
        "MPLCONFIGDIR": mpl.get_cachedir(), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    options = [
        "--no-browser", "--allow-root", "--ServerApp.root_dir=work", "--LabApp.expose_app_in_browser=True",
        "--ServerApp.port=0",  # two servers that start at once would both choose JupyterLab's usual port
    ]  # fmt: skip
    with (home / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], cwd=home, env=env, stderr=log)
        try:
            yield _started(server, home)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)


def _write_settings(name: str, values: Mapping[str, Any], folder: Path) -> None:
    """Write settings of a plugin of JupyterLab."""
    plugin, _, part = name.partition(":")
    path = folder / plugin / f"{part}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _started(server: subprocess.Popen[bytes], home: Path) -> Lab:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        for path in (home / "run").glob("jpserver-*.json"):
            about = json.loads(path.read_text() or "{}")
            if about:
                return Lab(f"http://127.0.0.1:{about['port']}", about["token"], home / "work")
        time.sleep(0.2)
    raise RuntimeError((home / "log").read_text()[-2000:])


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium without a profile; its context has a window of the width of a notebook, and JupyterLab's theme."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme="null")
        context.set_default_timeout(1000 * SECONDS)
        yield context
        browser.close()


class Notebook:
    """A notebook of JupyterLab in a page of its own.

    Parameters
    ----------
    lab, context
        Server and browser, see :func:`jupyter_lab` and :func:`chromium`.
    name : str
        Name of the notebook, a file of the server without its suffix.
    cells : sequence of str
        Names of its cells.
    """

    def __init__(self, lab: Lab, context: Any, name: str, cells: Sequence[str]) -> None:
        self.name, self._cells = name, list(cells)
        self.texts: dict[str, str] = {}
        """Outputs of the cells that ended, as text."""
        self.red: dict[str, list[str]] = {}
        """Their red outputs: what Python writes to stderr."""
        self.page = context.new_page()
        # Notebooks that are open side by side have layouts of their own.
        self.page.goto(f"{lab.address}/lab/workspaces/{name}/tree/{name}.ipynb?token={lab.token}")
        self.page.locator(".jp-Notebook .jp-Cell").nth(len(self._cells) - 1).wait_for()
        self.page.get_by_text("(ipykernel) | Idle").wait_for()

    def cell(self, name: str) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(self._cells.index(name))

    def start(self, name: str) -> None:
        """Run a cell by Shift+Enter."""
        self.cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def start_all(self) -> None:
        """Run all cells, by the menu."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def wait(self, name: str, seconds: float = SECONDS) -> str:
        """Wait for the end of a cell, and return its output."""
        from playwright.sync_api import expect

        prompt = self.cell(name).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"), timeout=1000 * seconds)
        self.page.evaluate(DRAWN)
        self.texts[name] = self.output(name)
        self.red[name] = self.cell(name).locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
        self.shot(name)
        return self.texts[name]

    def run(self, name: str) -> str:
        self.start(name)
        return self.wait(name)

    def output(self, name: str) -> str:
        return "\n".join(self.cell(name).locator(".jp-OutputArea-output").all_inner_texts())

    def bar(self, name: str, total: int, at_least: int) -> int:
        """Wait until a bar counts some of its items; the count."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            count = re.search(rf"(\d+)/{total}(?: \w+)? \[", self.output(name))
            if count and int(count[1]) >= at_least:
                self.shot(f"{name}-bar")
                return int(count[1])
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{name} shows no bar with {at_least} of {total}, but {self.output(name)!r}")

    def click(self, title: str) -> None:
        """Press a button of the toolbar."""
        self.page.locator(f".jp-NotebookPanel-toolbar [title^='{title}']").first.click()

    def choose(self, theme: str) -> None:
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        self.page.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")
        self.page.evaluate(DRAWN)

    def look(self, theme: str) -> dict[str, Any]:
        """Return the faults of all outputs in a theme, see LOOK."""
        self.choose(theme)
        if os.environ.get("FEDSTAT_SHOTS"):
            for name in self._cells:
                self.cell(name).scroll_into_view_if_needed()
                self.shot(f"{theme.split()[-1]}-{name}")
        faults = self.page.locator(".jp-Notebook .jp-OutputArea-output").evaluate_all(LOOK)
        assert self.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        return dict(faults)

    def shot(self, name: str) -> None:
        """Take a picture of the window, if FEDSTAT_SHOTS names a folder."""
        if folder := os.environ.get("FEDSTAT_SHOTS"):
            self.page.screenshot(path=Path(folder) / self.name / f"{len(self.texts):02d}-{name}.png")
