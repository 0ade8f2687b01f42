"""The documentation site and a report in Chromium: each page in the light and dark theme, on a desktop and a phone.

It needs the site that `make docs` builds, Chromium, and the packages of the extra `browser`: `make test-browser`
installs what is missing. With FEDSTAT_BROWSER=require a missing one is an error; otherwise the tests are skipped.
FEDSTAT_SITE names another folder of the site.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jupyter_in_chromium import CHROMIUM, skip_without

import fedstat
from fedstat import study

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("FEDSTAT_SITE", ROOT / "docs" / "_build" / "html"))
OFFLINE = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
TABS = 2
DESKTOP, PHONE = 1280, 400
VIEWS = [("light", DESKTOP), ("light", PHONE), ("dark", PHONE), ("dark", DESKTOP)]
WRITTEN_BY_SPHINX = ["genindex", "py-modindex", "search"]
INSPECTED = [
    "index", "start", "tutorial", "gallery", "findings", "glossary", "algorithms", "contributing", "architecture",
    "background/statistics", "howto/index", "howto/leaderboard", "howto/own-method", "howto/theory", "notebooks/theory",
    "methods/fedfac-static", "inference/index", "reference/index", "reference/fedstat/index",
    "reference/fedstat/split", "reference/fedstat.results/SplitResult", *WRITTEN_BY_SPHINX,
]  # fmt: skip
"""Pages seen in all views and inspected by axe-core, at least one of every kind: for all 382 that takes ten minutes.
The others are seen in the light theme on a desktop and in the dark theme on a phone; themes differ in colors alone."""

# Faults of a page as it stands: what is wider than the window, text that its box cuts off, texts that overlap, pictures
# that did not load or have no text of their own. Texts are compared by the middle half of their lines.
LOOK = """async view => {
  await isInView(view);
  const root = document.documentElement;
  const faults = {wide: [], cut: [], overlap: [], pictures: []};
  const start = text => text.trim().replace(/\\s+/g, " ").slice(0, 50);
  const styles = new Map(), boxes = new Map(), lines = [];
  const style = node => styles.get(node) ?? styles.set(node, getComputedStyle(node)).get(node);
  const hides = overflow => overflow === "hidden" || overflow === "clip";
  if (root.scrollWidth > root.clientWidth) faults.wide.push(`page: ${root.scrollWidth}`);
  for (const node of document.body.querySelectorAll("*")) {
    const {overflowX, overflowY} = style(node);
    if (overflowX === "visible" && overflowY === "visible") continue;
    if (node.clientWidth < 2 || node.clientHeight < 2 || !node.innerText?.trim()) continue;  // for screen readers alone
    const isCut = hides(overflowX) && node.scrollWidth > node.clientWidth + 1
      || hides(overflowY) && node.scrollHeight > node.clientHeight + 1;
    if (isCut) faults.cut.push(start(node.innerText));
  }
  const box = node => {  // the part of the page in which a node can be seen
    if (node === document.body) return {left: -1e9, right: 1e9, top: -1e9, bottom: 1e9, layer: node};
    if (boxes.has(node)) return boxes.get(node);
    const {overflowX, overflowY, position} = style(node), seen = {...box(node.parentElement)};
    if (position === "fixed" || position === "sticky") seen.layer = node;
    if (overflowX !== "visible" || overflowY !== "visible") {
      const {left, right, top, bottom} = node.getBoundingClientRect();
      seen.left = Math.max(seen.left, left); seen.right = Math.min(seen.right, right);
      seen.top = Math.max(seen.top, top); seen.bottom = Math.min(seen.bottom, bottom);
    }
    boxes.set(node, seen);
    return seen;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let text; (text = texts.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const seen = box(node);
    range.selectNodeContents(text);
    for (const line of range.getClientRects()) {
      const left = Math.max(line.left, seen.left), right = Math.min(line.right, seen.right);
      const top = Math.max(line.top, seen.top), bottom = Math.min(line.bottom, seen.bottom);
      if (right - left < 2 || bottom - top < 2) continue;
      if (left < -1 || right > root.clientWidth + 1) faults.wide.push(start(text.data));
      const middle = {top: top + (bottom - top) / 4, bottom: bottom - (bottom - top) / 4};
      lines.push({left, right, ...middle, layer: seen.layer, text: start(text.data)});
    }
  }
  lines.sort((a, b) => a.top - b.top);
  lines.forEach((a, i) => {
    for (let j = i + 1; j < lines.length && lines[j].top < a.bottom - 1; j++) {
      const b = lines[j], width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - b.top;
      if (a.layer === b.layer && width > 2 && height > 1) faults.overlap.push(`${a.text} / ${b.text}`);
    }
  });
  for (const picture of document.images) {
    const text = picture.getAttribute("alt") ?? "";
    if (!picture.complete || !picture.naturalWidth) faults.pictures.push(`not loaded: ${picture.src}`);
    if (!text.trim() || /\\.(png|svg|jpg)$/.test(text)) faults.pictures.push(`no text: ${picture.src}`);
  }
  return faults;
}"""
# Ends when a page stands in a view; a page that does not reach it within ten seconds is an error.
IS_IN_VIEW = """async ([theme, width]) => {
  const isIn = () => innerWidth === width && matchMedia(`(prefers-color-scheme: ${theme})`).matches
    && (document.documentElement.dataset.theme ?? theme) === theme;
  for (const end = performance.now() + 10000; !isIn(); await new Promise(requestAnimationFrame))
    if (performance.now() > end) throw new Error(`the page is not ${theme} and ${width} pixels wide`);
}"""
LOOK = LOOK.replace("isInView", f"({IS_IN_VIEW})")
FAULTS = ("wide", "cut", "overlap", "pictures")
# Rows of a table are written alike: the first twenty are inspected. Of all 2,787 rows it takes a minute.
INSPECT = """async rules => {
  for (const row of document.querySelectorAll("tr:nth-child(n + 21)")) row.remove();
  document.getAnimations().filter(change => change instanceof CSSTransition).forEach(change => change.finish());
  const options = {resultTypes: ["violations"], preload: false, ...(rules && {runOnly: rules})};
  const {violations} = await axe.run(options);
  return violations.filter(({impact}) => ["serious", "critical"].includes(impact))
    .map(({id, nodes}) => [id, nodes.map(({html}) => html.slice(0, 120))]);
}"""


class Seen(NamedTuple):
    """All that was seen of the site, by page."""

    console: dict[str, list[str]]
    faults: dict[str, dict[str, list[str]]]
    violations: dict[str, list[Any]]


def _site_faults() -> list[str]:
    """Return why the built site cannot be used: it is absent, or older than a page of its source."""
    index = SITE / "searchindex.js"
    if not index.exists():
        return [f"the site in {SITE} (make docs)"]
    docs = ROOT / "docs"
    sources = [
        docs / "conf.py",
        *docs.glob("*.md"),
        *docs.glob("[!_]*/*.md"),
        *docs.glob("_static/site.*"),
        *docs.glob("notebooks/*.ipynb"),
    ]
    newer = [source for source in sources if source.stat().st_mtime > index.stat().st_mtime]
    return [f"a site newer than {newer[0].relative_to(ROOT)} (make docs)"] if newer else []


def pages_of(site: Path) -> list[str]:
    """Return the names of all pages, also of those that Sphinx writes; pages of earlier builds are none."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    return [*index["docnames"], *WRITTEN_BY_SPHINX]


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a tab loads all pages through few connections

    def end_headers(self) -> None:
        """Let the browser load styles and scripts that all pages have once."""
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def _visit(page: Any, address: str, name: str, views: Sequence[tuple[str, int]], seen: Seen) -> None:
    """Open a page in the first view, and look at it in all views."""
    for view in views:
        theme, width = view
        await page.emulate_media(color_scheme=theme)
        await page.set_viewport_size({"width": width, "height": 900})
        if view == views[0]:
            await page.goto(f"{address}/{name}.html")
        for kind, texts in (await page.evaluate(LOOK, view)).items():
            if texts:
                seen.faults[kind][f"{name}, {theme}, {width}"] = texts


async def _inspect(page: Any, name: str, axe: str, seen: Seen) -> None:
    """Let axe-core inspect a page in both themes; names, roles and structure are the same in both."""
    await page.evaluate(axe)
    for theme, rules in (("dark", None), ("light", ["color-contrast"])):
        await page.emulate_media(color_scheme=theme)
        await page.evaluate(IS_IN_VIEW, [theme, DESKTOP])
        seen.violations[f"{name}, {theme}"] = await page.evaluate(INSPECT, rules)


async def _visit_all(address: str, names: Sequence[str], inspected: Sequence[str]) -> Seen:
    from axe_playwright_python.base import AXE_SCRIPT
    from playwright.async_api import async_playwright

    seen = Seen({}, {kind: {} for kind in FAULTS}, {})
    # Long inspections first, so that tabs end together.
    queue = sorted(names, key=lambda name: name in inspected)

    async def tab(context: Any) -> None:
        page = await context.new_page()
        log: list[str] = []
        page.on("console", lambda message: log.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: log.append(str(error)))
        page.on("requestfailed", lambda request: log.append(f"failed: {request.url}"))
        page.on("response", lambda reply: log.append(f"{reply.status}: {reply.url}") if reply.status >= 400 else None)
        views = VIEWS[::2]
        while queue:
            name = queue.pop()
            if name in inspected:
                await _visit(page, address, name, VIEWS, seen)
                await _inspect(page, name, AXE_SCRIPT, seen)
            else:
                await _visit(page, address, name, views, seen)
                views = views[::-1]  # the next page begins in the view in which this one ended
            if log:
                seen.console[name] = [*log]
                log.clear()

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=OFFLINE)
        context = await browser.new_context()
        await asyncio.gather(*(tab(context) for _ in range(TABS)))
        await browser.close()
    return seen


@pytest.fixture(scope="module")
def names() -> list[str]:
    skip_without(["axe_playwright_python", "playwright"], *_site_faults())
    return pages_of(SITE)


@pytest.fixture(scope="module")
def seen(names: list[str]) -> Seen:
    with served(SITE) as address:
        return asyncio.run(_visit_all(address, names, INSPECTED))


def test_all_pages_are_visited(names: list[str], seen: Seen) -> None:
    assert len(names) > 300
    assert set(INSPECTED) <= set(names)
    assert len(seen.violations) == 2 * len(INSPECTED)


def test_no_page_writes_an_error_to_the_console_or_lacks_a_file(seen: Seen) -> None:
    assert seen.console == {}


@pytest.mark.parametrize("kind", FAULTS)
def test_no_page_has_faults(seen: Seen, kind: str) -> None:
    assert seen.faults[kind] == {}


def test_axe_finds_no_serious_violation(seen: Seen) -> None:
    assert {page: violations for page, violations in seen.violations.items() if violations} == {}


FAULTY = """<!DOCTYPE html><html lang="en"><head><title>Faults</title><script>
const dark = matchMedia("(prefers-color-scheme: dark)");
(dark.onchange = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; })();
console.error("spoken");
</script></head><body><main><h1>Faults</h1>
<p style="width: 3000px">beyond the window</p>
<p style="width: 60px; overflow: hidden; white-space: nowrap">text that its box cuts off</p>
<p><span style="position: absolute">below</span>above</p>
<p style="color: #ccc; background: #fff">pale</p><img src="absent.png" alt="absent.png">
</main></body></html>"""


@pytest.mark.usefixtures("names")
def test_each_fault_is_seen(tmp_path: Path) -> None:
    (tmp_path / "faulty.html").write_text(FAULTY)
    with served(tmp_path) as address:
        seen = asyncio.run(_visit_all(address, ["faulty"], ["faulty"]))
    assert "spoken" in seen.console["faulty"]
    assert any(text.startswith("404: ") for text in seen.console["faulty"])
    assert all(len(seen.faults[kind]) == len(VIEWS) for kind in FAULTS), seen.faults
    assert {rule for violations in seen.violations.values() for rule, _ in violations} >= {"color-contrast"}


@pytest.mark.usefixtures("names")
def test_a_report_has_no_faults(tmp_path: Path) -> None:
    settings = study.Settings.of(
        data="digits", clients=4, rounds=2, local_epochs=1, participation=1.0, optimizer="sgd", lr=0.1,
        validation_fraction=0.1, algorithm="fedfac-dynamic", probe=("split-half",),
    )  # fmt: skip
    fedstat.report(study.run(settings, out=tmp_path / "run.zarr"), out=tmp_path / "report.html")
    with served(tmp_path) as address:
        seen = asyncio.run(_visit_all(address, ["report"], ["report"]))
    assert seen.faults == {kind: {} for kind in FAULTS}
    assert {page: violations for page, violations in seen.violations.items() if violations} == {}
