"""What a report is made of: texts, tables and figures in sections, and the page that they become."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import pandas as pd

from fedstat import _cli, _guard
from fedstat.reporting.references import REFERENCES, bibliography

MARK = b'<meta name="generator" content="fedstat"'
"""Bytes by which a file is known as a report that fedstat made."""

_MOST = 300  # characters of one cell or name: what is longer is a mistake or an attack
COMMAND, PARAGRAPH = 3000, 8000
"""Characters of a command, and of a methods paragraph, that are shown."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Printed:
    """What a command prints, in columns."""

    kind: ClassVar[str] = "printed"
    text: str


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names its rows."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, caption: str, frame: pd.DataFrame) -> Table:
        """The table of a data frame of texts."""
        return cls(caption, [str(c) for c in frame.columns], [[str(x) for x in row] for row in frame.to_numpy()])

    @classmethod
    def pairs(cls, caption: str, values: Mapping[str, str]) -> Table:
        """A table of names and values, without a heading."""
        return cls(caption, (), [[name, value] for name, value in values.items()])


@dataclass(frozen=True)
class Figure:
    """An image with what it shows."""

    kind: ClassVar[str] = "figure"
    source: str
    caption: str
    wide: bool = False


Block = Text | Printed | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Caution:
    """Something to know before the numbers are relied on.

    Attributes
    ----------
    title : str
        What it is, the same words for every run.
    text : str
        Where, and how much.
    grave : bool
        Whether numbers below are missing or wrong by it, not only less certain.
    """

    title: str
    text: str
    grave: bool = False


@dataclass(frozen=True)
class Part:
    """What is said of one run, study, or grid of runs.

    Attributes
    ----------
    title : str
    ran : Table
        What was run.
    cautions, findings : sequence
        Warnings, and statements with their numbers.
    sections : sequence of Section
        Results.
    methods : str
        Paragraph for a paper.
    cites : sequence of str
        Keys of ``REFERENCES`` that it names.
    details : sequence of Table
        All settings, versions.
    """

    title: str
    ran: Table
    cautions: Sequence[Caution] = ()
    findings: Sequence[str] = ()
    sections: Sequence[Section] = ()
    methods: str = ""
    cites: Sequence[str] = ()
    details: Sequence[Table] = field(default=())


@dataclass(frozen=True, repr=False)
class Report:
    """A report, as :func:`fedstat.report` returns it: shown in Jupyter, and one HTML file.

    Attributes
    ----------
    title : str
    parts : sequence of Part
        One for each run or study; the runs of a grid are one.
    made : str
        Time, ISO 8601.
    """

    title: str
    parts: Sequence[Part]
    made: str

    @property
    def cautions(self) -> list[Caution]:
        """Warnings of all parts, grave ones first."""
        return sorted((one for part in self.parts for one in part.cautions), key=lambda one: not one.grave)

    @cached_property
    def html(self) -> str:
        """The whole page: no script, nothing from elsewhere, all text escaped."""
        cites = ["fedstat", *(key for part in self.parts for key in part.cites)]
        entries = [entry for key, entry in REFERENCES.items() if key in cites]
        page = _environment().get_template("page.html").render(
            report=self, references=[entry.text for entry in entries], bibtex=bibliography(cites),
            version=REFERENCES["fedstat"].fields["version"],
        )  # fmt: skip
        return page.encode("utf-8", "replace").decode("utf-8")  # names in a store may hold lone surrogates

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all, and return its path; a report that is there is replaced.

        Raises
        ------
        ValueError
            If the file cannot be written there, or is not a report that fedstat made.
        """
        path = Path(path)
        require_ours("path", path)
        with _cli.whole(path) as draft:
            draft.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, in which nothing can run."""
        look = "width:100%;height:42rem;border:1px solid #ddd"
        return f'<iframe sandbox="" style="{look}" srcdoc="{html.escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        grave = sum(one.grave for one in self.cautions)
        lines = [f"Report: {self.title}", f"  {len(self.cautions)} warnings, {grave} of them grave"]
        lines += [f"  {'! ' if one.grave else ''}{one.title}: {one.text}" for one in self.cautions]
        lines += [f"  {text}" for part in self.parts for text in part.findings]
        shown = [line if len(line) <= 100 else f"{line[:96]} ..." for line in lines]
        return "\n".join([*shown, "  .save(path) writes the page"])


def require_ours(option: str, path: Path) -> None:
    """ValueError if a page could not be written to a path, or would replace what is no report of fedstat."""
    _cli.require_file(option, path)
    if not _guard.status(path):
        return
    with _guard.opened(path) as stream:
        ours = MARK in stream.read(2000)
    if not ours:
        raise ValueError(f"{option} {path} exists and is no report that fedstat made: choose another name")


def shown(value: Any, most: int = _MOST) -> str:
    """A value as text of bearable length, without control characters."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def listed(items: Iterable[object], most: int = 6) -> str:
    """The first few items, and how many more there are.

    Examples
    --------
    >>> listed([1, 2, 3], most=2)
    '1, 2 and 1 more'
    """
    found = [shown(item) for item in items]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fedstat.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
