"""Each notebook is its script; `make docs` runs them all, in a fresh clone without data or runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))


def cells(script):
    """Kind and source of every cell of a percent script."""
    text = script.read_text(encoding="utf-8").split("# ---\n", 2)[2]
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        lines = body.strip("\n").split("\n")
        if "[markdown]" in head:
            yield "markdown", "\n".join(re.sub("^# ?", "", line) for line in lines)
        else:
            yield "code", "\n".join(lines)


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script_and_begins_with_what_one_will_know(script):
    stored = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in stored] == list(cells(script))
    assert "**At the end you will know**" in "".join(stored[0]["source"])


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_name_of_axes_stands_above_a_picture(script):
    stored = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    results = [o for cell in stored for o in cell.get("outputs", ()) if o["output_type"] == "execute_result"]
    texts = ["".join(result["data"].get("text/plain", "")) for result in results]
    assert not [text for text in texts if re.search(r"<Axes|<Figure|matplotlib", text)]
