"""The shipped notebooks in JupyterLab and Chromium, side by side, each run from its first to its last cell.

``tests/support/jupyter_in_chromium.py`` says what they need. They run without outputs and without stored studies, as in
a fresh clone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_in_chromium import FAULTS, THEMES, Lab, Notebook, chromium

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = ("four_decompositions", "motivation", "theory", "decomposition")
"""Names of the notebooks, that which runs longest first."""
MINUTES = 5
TRAINS, RUNS = "four_decompositions", 32
"""The notebook that trains, and the number of its runs."""
PLAIN = re.compile(r"<Axes|<Figure|matplotlib|Traceback")


def read_notebook(name: str) -> dict[str, Any]:
    return dict(json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")))


def cells_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the code cells of a notebook by names: a number, and the first words of the source."""
    cells = enumerate(read_notebook(name)["cells"])
    return {cell_name(i, cell): cell for i, cell in cells if cell["cell_type"] == "code"}


def cell_name(i: int, cell: dict[str, Any]) -> str:
    return f"{i:02d}-{re.sub(r'[^a-z]+', '-', ''.join(cell['source']).lower())[:20]}"


def count_stored(cell: dict[str, Any], kind: str, text: str = "") -> int:
    """Return the number of stored outputs of a cell that are of a kind and hold a text."""
    outputs = [output.get("data", {}) for output in cell["outputs"]]
    return sum(kind in data and text in "".join(data[kind]) for data in outputs)


@pytest.fixture(scope="module")
def notebooks(lab: Lab) -> Iterator[dict[str, Notebook]]:
    """Run all notebooks side by side, and wait for the last cell of each."""
    notebooks = {}
    with chromium() as context:
        for name in NAMES:
            notebook = read_notebook(name)
            for cell in notebook["cells"]:
                cell |= {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
            (lab.folder / f"{name}.ipynb").write_text(json.dumps(notebook))
            names = [cell_name(i, cell) for i, cell in enumerate(notebook["cells"])]
            notebooks[name] = Notebook(lab, context, name, names)
            notebooks[name].start_all()
        notebooks[TRAINS].bar(train_cell(), RUNS, 1)
        for name, notebook in notebooks.items():
            for cell in reversed(cells_of(name)):  # the last cell first: all others have ended before it
                notebook.wait(cell, 60 * MINUTES)
        yield notebooks


def train_cell() -> str:
    (name,) = (name for name, cell in cells_of(TRAINS).items() if "def train" in "".join(cell["source"]))
    return name


def test_all_shipped_notebooks_are_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)


def test_training_shows_one_bar(notebooks: dict[str, Notebook]) -> None:
    lines = notebooks[TRAINS].texts[train_cell()].strip().splitlines()
    assert len(lines) == 1
    assert re.search(rf"100%\|█+\| {RUNS}/{RUNS} \[\d\d:\d\d<00:00", lines[0])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_red_and_no_object_is_named(notebooks: dict[str, Notebook], name: str) -> None:
    notebook = notebooks[name]
    assert {cell: red for cell, red in notebook.red.items() if red} == {}
    assert [cell for cell, text in notebook.texts.items() if PLAIN.search(text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_pictures_and_tables_are_those_that_are_stored(notebooks: dict[str, Notebook], name: str) -> None:
    n_outputs = 0
    for cell, stored in cells_of(name).items():
        output = notebooks[name].cell(cell).locator(".jp-OutputArea-output")
        pictures, tables = output.locator("img"), output.locator("table")
        assert pictures.count() == count_stored(stored, "image/png")
        assert bool(tables.count()) == bool(count_stored(stored, "text/html", "<table"))
        for picture in pictures.all():
            assert picture.evaluate(
                "node => node.naturalWidth > 300 && node.clientWidth <= node.parentElement.clientWidth"
            )
        n_outputs += pictures.count() + tables.count()
    assert n_outputs >= 2


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_whole_and_legible(notebooks: dict[str, Notebook], name: str, theme: str) -> None:
    faults = notebooks[name].look(theme)
    assert {kind: faults[kind] for kind in FAULTS} == {kind: [] for kind in FAULTS}
