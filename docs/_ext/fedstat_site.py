"""The site's own part of Sphinx: generated pages, docstrings completed and checked, references and pictures checked."""

from __future__ import annotations

import inspect
import os
import re
import socket
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import docstring_rules
import inference_pages
import method_pages
import public_names
import reference_pages
from docutils import nodes
from jupyter_cache import get_cache
from jupyter_client.connect import LocalPortCache
from PIL import Image
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.nodes import make_refnode
from sphinx.util.parallel import make_chunks

from fedstat import plot
from fedstat.fl.algorithms import ALGORITHMS

PLOT = re.compile(r"\b(?:plot|papers)\.(\w+)\(")
ROLE = re.compile(r"(?::\w+:)?`+(.+?)`+")
STAR = re.compile(r"``.*?``|(?<=, )\*(?=shape\b|,)")

log = logging.getLogger(__name__)


def generate(app: Sphinx) -> None:
    """Write the generated pages, and remove those whose name is gone; pages that did not change stay as they are."""
    sources = {"reference": reference_pages, "methods": method_pages, "inference": inference_pages}
    for folder, source in sources.items():
        root, made = Path(app.srcdir) / folder, set()
        for file, text in source.pages():
            page = root / file
            made.add(page)
            page.parent.mkdir(parents=True, exist_ok=True)
            if not page.exists() or page.read_text(encoding="utf-8") != text:
                page.write_text(text, encoding="utf-8")
        for page in set(root.rglob("*.rst")) - made:
            page.unlink()


def check(app: Sphinx) -> None:  # noqa: ARG001
    """Warn, which ends the build, of public names that are missing or whose docstrings lack something."""
    for package in public_names.forgotten():
        log.warning("%s is public, but the reference does not show it: see docs/_ext/public_names.py", package)
    for name in public_names.every_name():
        for problem in docstring_rules.problems(name):
            log.warning("%s %s", name.path, problem)


def spread(app: Sphinx, env: Any, names: list[str]) -> None:
    """Order pages to be read: processes take stretches of them, and each begins with one page that runs code."""
    pages = {name: Path(env.doc2path(name)) for name in names}
    runs = sorted((name for name in names if _runs(pages[name])), key=lambda name: -pages[name].stat().st_size)
    others = [name for name in names if name not in runs]
    length = len(make_chunks(names, app.parallel)[0]) if names else 0
    for i, name in enumerate(runs):
        others.insert(i * length, name)
    names[:] = others
    _ = get_cache(app.config.nb_execution_cache_path).db  # made here, as two processes that make it would collide


def free_port(cache: LocalPortCache, ip: str) -> int:
    """Return a free port for a kernel, from numbers of this process alone.

    A port is free until its kernel binds it, a second later. Another process would take it meanwhile.
    """
    for port in range(16384 + os.getpid() % 256 * 64, 32768):  # below those that the system gives to connections
        with socket.socket() as asked:
            if port not in cache.currently_used_ports and asked.connect_ex((ip, port)):
                cache.currently_used_ports.add(port)
                return port
    raise OSError("no port is free for a notebook's kernel")


def _runs(page: Path) -> bool:
    return page.suffix == ".ipynb" or "```{code-cell}" in page.read_text(encoding="utf-8")


def complete(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Add the notes of annotated arguments to a function's docstring; a star in a shape is no emphasis."""
    if what == "function":
        lines[:] = docstring_rules.completed(value, "\n".join(lines)).splitlines()
    lines[:] = [STAR.sub(lambda found: r"\*" if found[0] == "*" else found[0], line) for line in lines]


def internal(app: Sphinx, env: Any, node: Any, text: nodes.TextElement) -> nodes.Node | None:  # noqa: ARG001
    """A reference to a name without a page: plain code if there is such a name in fedstat; else an error."""
    if node["reftarget"].endswith("CONTRIBUTING"):  # shown by a page of the site
        return make_refnode(app.builder, node["refdoc"], "contributing", "", text)
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip("~.")
    loaded = [name for name in sys.modules if name.partition(".")[0] == "fedstat"]
    places = [*loaded, *(f"{module}.{node['py:class']}" for module in loaded if node.get("py:class"))]
    known = any(map(_exists, [target, *(f"{place}.{target}" for place in places)]))
    of_others = node.get("reftype") == "class" and "fedstat" not in target  # a type in a signature
    return text if known or of_others else None


@cache
def _exists(path: str) -> bool:
    """Whether a dotted path names a module or something inside one."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:n]))
        except (ImportError, ValueError):
            continue
        for part in parts[n:]:
            found = getattr(found, part, None) if not inspect.isclass(found) else _of_class(found, part)
        return found is not None
    return False


def _of_class(found: Any, part: str) -> Any:
    return getattr(found, part, getattr(found, "__annotations__", {}).get(part))


def link_algorithms(app: Sphinx, tree: nodes.document) -> None:
    """Link the names in the table of algorithms to their pages, which exist on the site alone."""
    if app.env.docname != "algorithms":
        return
    for row in tree.findall(nodes.row):
        for name in list(row[0].findall(nodes.literal)):
            if name.astext() in ALGORITHMS:
                target = f"/methods/{method_pages.page_of(name.astext())}"
                link = {"refdomain": "std", "reftype": "doc", "reftarget": target, "refdoc": "algorithms"}
                name.replace_self(addnodes.pending_xref("", name.deepcopy(), refexplicit=True, **link))


def pictures(app: Sphinx, tree: nodes.document) -> None:
    """Require a text for readers who do not see a picture; pictures that code draws get theirs here.

    They also get their width in pixels, so that Sphinx links each to its file: the way to read it on a phone.
    """
    for image in tree.findall(nodes.image):
        if "jupyter_execute" in image.get("uri", ""):
            image["alt"] = _shown(image)
            with Image.open(Path(app.srcdir) / image["uri"]) as picture:
                image["width"] = f"{picture.width}px"
        elif not image.get("alt"):
            log.warning("picture %s has no alt text", image.get("uri"), location=image)


def _shown(image: nodes.image) -> str:
    """Return the summaries of the plots in the picture's cell; without a plot of fedstat, the title of its section."""
    node: nodes.Element = image
    while node.parent and not isinstance(node, nodes.section):
        node = node.parent
        if "cell" in node.get("classes", ()):
            code = "\n".join(block.astext() for block in node.findall(nodes.literal_block))
            plots = vars(plot) | vars(plot.papers)
            names = [name for name in dict.fromkeys(PLOT.findall(code)) if name in plots]
            summaries = [ROLE.sub(r"\1", str(inspect.getdoc(plots[name])).split("\n")[0]) for name in names]
            draws = [summary.removeprefix("Draw ") for summary in summaries if summary.startswith("Draw ")]
            if draws:
                return " ".join(text[0].upper() + text[1:] for text in draws)
    return f"Picture: {node.next_node(nodes.title).astext()}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect all of this; kernels that run side by side get ports of their own."""
    LocalPortCache.find_available_port = free_port
    app.connect("builder-inited", generate)
    app.connect("builder-inited", check)
    app.connect("env-before-read-docs", spread)
    app.connect("autodoc-process-docstring", complete, priority=400)  # before numpydoc, at 500
    app.connect("missing-reference", internal)
    app.connect("doctree-read", pictures)
    app.connect("doctree-read", link_algorithms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
