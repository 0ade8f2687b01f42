"""Formulas as MathML, which browsers draw: pages need no script from another server and show formulas offline."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

UNLIKE_TEX = re.compile(r"\\[dt]?frac\s*[^{\s]|[_^]\d\d")
"""Where docutils takes several digits and TeX one: ``\\frac12`` would become 12 over what follows."""

log = logging.getLogger(__name__)


def inline(writer: Any, node: nodes.math) -> None:
    """Write a formula within a sentence."""
    writer.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own, which scrolls where it is wider than the page."""
    writer.body.append(writer.starttag(node, "div", CLASS="formula", tabindex="0"))
    writer.body.append(_mathml(node, as_block=True) + "</div>\n")
    raise nodes.SkipNode


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    if UNLIKE_TEX.search(node.astext()):
        log.warning("formula %s: write braces around each argument", node.astext(), location=node)
    try:
        return str(tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        log.warning("formula %s: %s", node.astext(), error, location=node)
        return ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Offer the renderer: html_math_renderer = "mathml"."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
