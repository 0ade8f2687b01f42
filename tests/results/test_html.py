"""Tables of results in notebooks: the columns that readers ask for first, the others behind a click."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from made_results import MADE, made

import fedstat
from fedstat.reporting.document import Part, Report, Section, Table
from fedstat.results import tables
from fedstat.results.base import Result

WIDTH = 1050  # pixels of a notebook's output
LETTER, PADDING = 7.5, 14  # of a cell in JupyterLab, in pixels


class Tables(HTMLParser):
    """Rows of all tables, each with the number of <details> around it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.depth, self.found = 0, list[tuple[int, list[list[str]]]]()
        self.cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self.depth += tag == "details"
        if tag == "table":
            self.found.append((self.depth, []))
        elif tag == "tr":
            self.found[-1][1].append([])
        elif tag in ("td", "th"):
            self.found[-1][1][-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "details"
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.found[-1][1][-1][-1] += data


def width(rows: list[list[str]]) -> float:
    """Width of a table whose cells do not wrap."""
    complete = [row for row in rows if len(row) == len(rows[0])]
    return sum(max(map(len, column)) * LETTER + PADDING for column in zip(*complete, strict=True))


@pytest.mark.parametrize("name", [n for n in MADE if type(made(n))._repr_html_ is Result._repr_html_])
def test_the_open_table_of_a_result_fits_a_notebook_and_no_column_is_lost(name: str) -> None:
    result = made(name)
    (depth, shown), *folded = Tables(result._repr_html_()).found
    assert depth == 0
    assert width(shown) <= WIDTH
    columns = list(map(str, result._by_row()[0].columns))
    assert [depth for depth, _ in folded] == [1] * (len(shown[0]) < len(columns))
    assert shown[0] == list(result._printed())
    assert not folded or folded[0][1][0] == columns


def test_a_comparison_opens_with_means_differences_and_p_values() -> None:
    data = pd.DataFrame({"method": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "accuracy": [5, 6, 7, 9, 5, 8.0]})
    (_, shown), (depth, everything) = Tables(fedstat.compare(data, reference="a")._repr_html_()).found
    assert shown[0] == ["method", "mean (SE)", "difference [95% CI]", "p (Holm)"]
    assert shown[2] == ["b", "7.667 (0.882)", "+2.000 [-0.484, +4.484]", "0.074"]
    assert depth == 1
    assert "sim_conf_low" in everything[0]


def test_a_print_keeps_its_lines_and_is_escaped() -> None:
    shown = tables.print_html("a < b")
    assert "a &lt; b</pre>" in shown
    assert "white-space: pre;" in shown
    assert made("IccResult")._repr_html_().startswith(shown.partition(">")[0])


def test_a_narrow_table_is_not_folded() -> None:
    table = pd.DataFrame({"unit": [1], "icc": [0.5]})
    assert "<details>" not in tables.folded_html(tables.texts(table), table)


def test_a_wide_table_of_a_report_folds_to_its_first_columns() -> None:
    names = [f"column {i}" for i in range(10)]
    sections = [Section("Wide", [Table("", names, [names]), Table("", names[:8], [names[:8]])])]
    ran = Table.pairs("What was run", {"data": "digits"})
    page = Report("Title", [Part("Title", ran, sections=sections)], "2026-01-01T00:00:00+00:00").html
    wide = [(depth, rows[0]) for depth, rows in Tables(page).found if "column 0" in rows[0]]
    assert wide == [(0, names[:8]), (1, names), (0, names[:8])]


def test_colors_of_notebooks_and_reports_follow_the_theme() -> None:
    page = made("ComparisonResult")._repr_html_()
    assert "var(--jp-content-font-color1, inherit)" in page
    assert not re.findall(r"(?:color|background):\s*#", page)
    css = (Path(fedstat.__file__).parent / "reporting/page.css").read_text()
    light, _, rest = css.partition("@media screen and (prefers-color-scheme: dark)")
    dark = rest[: rest.index("\n}")]
    names = set(re.findall(r"(--[\w-]+):", light))
    assert names
    assert names == set(re.findall(r"(--[\w-]+):", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", css)) == names
    assert "#" not in re.sub(r"figure img {[^}]*}", "", rest[len(dark) :])  # all other colors are names
    for theme in (dark, light):
        colours = dict(re.findall(r"(--[\w-]+): (#\w+);", theme))
        for ink, page_colour in (
            ("ink", "page"),
            ("quiet", "page"),
            ("ink", "care-page"),
            ("ink", "severe-page"),
            ("ink", "print-page"),
        ):
            assert contrast(colours[f"--{ink}"], colours[f"--{page_colour}"]) >= 4.5  # WCAG 2.2, AA


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors by WCAG 2.2."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
