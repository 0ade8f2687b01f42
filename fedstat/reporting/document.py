"""HTML documents: sections, tables, figures and references, from the bibliography ``references.bib``."""

from __future__ import annotations

import base64
import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jinja2
import matplotlib as mpl
import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.text import Text as PlotText
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstat import _cli
from fedstat._utils import guard
from fedstat._utils.guard import replace_file
from fedstat.results.base import Caution, wrapped
from fedstat.results.tables import count, ends
from fedstat.study.collect import about

SIZE = (5.2, 3.5)
"""Inches; at the width of a phone letters of 10 points stay readable."""

_LARGEST = 150_000  # characters of an SVG; beyond it, pixels
_INK, _BAND = "#1f4e79", "#c5d5e4"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")


def figure(draw: Callable[..., Any], caption: str, *, size: tuple[float, float] = SIZE) -> Figure:
    """Draw a figure of one panel by a function.

    Parameters
    ----------
    draw : callable (*, ax)
    caption : str
        What is shown, with the meaning of lines, bands and bars.
    size : (float, float)
        Inches.
    """
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        canvas = matplotlib.figure.Figure(figsize=size, layout="constrained")
        draw(ax=canvas.subplots())
        return image(canvas, caption)


def image(canvas: matplotlib.figure.Figure, caption: str, *, wide: bool = False) -> Figure:
    """Convert a figure to an image of the page: SVG, or PNG if the SVG is large."""
    with warnings.catch_warnings(), mpl.rc_context({"svg.hashsalt": "fedstat"}):
        warnings.simplefilter("ignore", UserWarning)  # names in scripts that the font lacks, or too long for the axes
        try:
            source = _svg(canvas)
        except ValueError:  # a name that reads as broken mathematics
            for text in canvas.findobj(PlotText):
                text.set_parse_math(False)
            source = _svg(canvas)
        if len(source) <= _LARGEST:
            return Figure(f"data:image/svg+xml;base64,{base64.b64encode(source.encode()).decode()}", caption, wide)
        drawn = io.BytesIO()
        canvas.savefig(drawn, format="png", dpi=150)
    plt.close(canvas)
    return Figure(f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}", caption, wide)


def _svg(canvas: matplotlib.figure.Figure) -> str:
    drawn = io.StringIO()
    canvas.savefig(drawn, format="svg", metadata={"Date": None, "Creator": "fedstat"})
    plt.close(canvas)
    return _CONTROL.sub("", drawn.getvalue()).encode("utf-8", "replace").decode()


def over_seeds(draw: Callable[..., Axes], curves: pd.DataFrame, ax: Axes) -> None:
    """Curves of several methods, as ``plot.score_curves`` draws them, with the legend below, where it hides none."""
    draw(curves, ax=ax)
    sns.move_legend(
        ax, "upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize="small", title=None
    )


def sorted_clients(
    scores: NDArray[Any], low: NDArray[Any], high: NDArray[Any], mean: float, label: str, ax: Axes
) -> None:
    """Draw the score of each client in ascending order, with its interval (none if NaN), and the mean."""
    order = np.argsort(scores, kind="stable")
    positions = np.arange(1, len(order) + 1)
    ax.vlines(positions, low[order], high[order], color=_BAND, linewidth=max(0.6, min(4.0, 160 / len(order))))
    ax.plot(positions, scores[order], "o", color=_INK, markersize=max(1.5, min(4.0, 160 / len(order))))
    ax.axhline(mean, color="0.5", linestyle="--", linewidth=1)
    ax.set(xlabel="clients, in ascending order", ylabel=label)
    if np.isfinite(low).all():
        ax.set_ylim(min(0.5, low.min()) - 0.03, 1.03)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def split_map(shared: NDArray[np.bool_], ax: Axes) -> None:
    """Draw the units (rows) that are shared (dark) in each round, the most often shared units on top."""
    order = np.argsort(-shared.mean(axis=0), kind="stable")
    ax.imshow(
        shared[:, order].T, aspect="auto", interpolation="nearest", cmap=ListedColormap(["#eef2f5", _INK]), vmin=0,
        vmax=1, extent=(0.5, len(shared) + 0.5, shared.shape[1] + 0.5, 0.5),
    )  # fmt: skip
    _rounds(ax, "units")


def _rounds(ax: Axes, label: str) -> None:
    ax.set(xlabel="round", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


MARK = b'<meta name="generator" content="fedstat"'
"""Bytes by which a file is known as a report that fedstat made."""

# Browsers take the color scheme of a frame for what the page in it prefers. Themes of JupyterLab, VS Code, and Sphinx.
_DARK = """body[data-jp-theme-light="false"], body.vscode-dark, html[data-theme="dark"], body[data-theme="dark"]"""
_LIGHT = """body[data-jp-theme-light="true"], body.vscode-light, html[data-theme="light"], body[data-theme="light"]"""
_FRAME = f""".fedstat-report {{ color-scheme: light dark; box-sizing: border-box; width: 100%; height: 42rem;
  border: 1px solid var(--jp-border-color1, #8888); }}
:is({_DARK}) .fedstat-report {{ color-scheme: dark; }}
:is({_LIGHT}) .fedstat-report {{ color-scheme: light; }}"""

_MOST = 300  # characters of one cell or name: what is longer is a mistake or an attack
COMMAND, PARAGRAPH, PRINTED = 3000, 8000, 100_000
"""Characters of a command, of a methods paragraph, and of a print that are shown."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Printed:
    """Print of a command, in columns."""

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
        """Make the table of a data frame of texts."""
        return cls(caption, [str(c) for c in frame.columns], [[str(x) for x in row] for row in frame.to_numpy()])

    @classmethod
    def ends(cls, caption: str, frame: pd.DataFrame, by: str | None, most: int = 25) -> Table:
        """Make the table of a result, see :func:`fedstat.results.tables.ends`."""
        rows = [[shown(text) for text in row] for row in ends(frame, by=by, most=most)]
        order = f"; from high to low {by}" if by else ""
        return cls(f"{caption}{order}", [shown(c) for c in frame.columns], rows)

    @classmethod
    def pairs(cls, caption: str, values: Mapping[str, str]) -> Table:
        """Make a table of names and values, without a heading."""
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
class Part:
    """Report of one run, study, or grid of runs.

    Attributes
    ----------
    title : str
    ran : Table
        What was run.
    cautions : sequence of Caution
    summary : str
        What was found, as the result prints it.
    sections : sequence of Section
        Figures and tables.
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
    summary: str = ""
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
    created : str
        Time, ISO 8601.
    """

    title: str
    parts: Sequence[Part]
    created: str

    @property
    def cautions(self) -> list[Caution]:
        """Warnings of all parts, severe ones first."""
        cautions = (caution for part in self.parts for caution in part.cautions)
        return sorted(cautions, key=lambda caution: not caution.severe)

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
        with replace_file(path) as draft:
            draft.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed frame, in which no script runs, in the theme of the notebook."""
        page = html.escape(self.html)
        return f'<style>{_FRAME}</style><iframe class="fedstat-report" sandbox="" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        n_severe = sum(caution.severe for caution in self.cautions)
        lines = [f"Report: {self.title}", f"  {count(len(self.cautions), 'warning')} ({n_severe} severe)"]
        lines += [f"  {'! ' if caution.severe else ''}{caution.title}: {caution.text}" for caution in self.cautions]
        lines += [line for part in self.parts for line in part.summary.splitlines()]
        return "\n".join(map(wrapped, [*lines, "  .save(path) writes the page"]))


def require_ours(option: str, path: Path) -> None:
    """ValueError if a page could not be written to a path, or would replace what is no report of fedstat."""
    _cli.require_file(option, path)
    if not guard.status(path):
        return
    with guard.opened(path) as stream:
        ours = MARK in stream.read(2000)
    if not ours:
        raise ValueError(f"{option} {path} exists and is no report that fedstat made: choose another name")


def shown(value: Any, most: int = _MOST) -> str:
    """Format a value as text of limited length, without control characters."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def listed(items: Iterable[object], most: int = 6) -> str:
    """List the first items, and the number of further ones.

    Examples
    --------
    >>> listed([1, 2, 3], most=2)
    '1, 2 and 1 more'
    """
    texts = [shown(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fedstat.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


_ENTRY = re.compile(r"^@(?P<kind>\w+)\{(?P<key>\w+),$(?P<fields>.*?)^\}$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)
_ACRONYM = re.compile(r"\((?P<name>[^()]+)\)$")


class Reference(NamedTuple):
    """An entry of the bibliography.

    Attributes
    ----------
    kind : str
        Type of the BibTeX entry.
    fields : mapping from str to str
        BibTeX fields: ``author`` ("Family, Given and Family, Given"; a body in braces), ``title`` in braces, others.
    bibtex : str
        The entry for a ``.bib`` file.
    """

    kind: str
    fields: Mapping[str, str]
    bibtex: str

    @property
    def title(self) -> str:
        """Title without its braces."""
        return self.fields["title"].strip("{}")

    @property
    def families(self) -> list[str]:
        """Family names of the authors."""
        return [author.partition(",")[0].strip("{}") for author in self.fields["author"].split(" and ")]

    @property
    def authors(self) -> str:
        """Authors as in a sentence: two by name, more as "et al."."""
        names = self.families
        return " and ".join(names) if len(names) < 3 else f"{names[0]} et al."

    @property
    def cited(self) -> str:
        """Author and year, as in a sentence.

        Examples
        --------
        >>> REFERENCES["jeong2022"].cited, REFERENCES["li2020"].cited
        ('Jeong and Hwang (2022)', 'Li et al. (2020)')
        """
        year = self.fields.get("year")
        return f"{self.authors} ({year})" if year else self.authors

    @property
    def source(self) -> str:
        """Author, year and where to find it, as lists of methods show it.

        Examples
        --------
        >>> [REFERENCES[key].source for key in ("li2020", "wu2024")]
        ['Li et al. (2020), arXiv:1812.06127', 'Wu et al. (2024), ACM MM']
        """
        acronym = _ACRONYM.search(self.fields.get("booktitle", ""))
        place = f"arXiv:{self.fields['eprint']}" if "eprint" in self.fields else acronym["name"] if acronym else ""
        return ", ".join(filter(None, (self.cited, place or self.fields.get("journal"))))

    @property
    def text(self) -> str:
        """The entry in words, for a list of references."""
        author, fields = self.fields["author"], self.fields
        who = self.families[0] if author.startswith("{") else author.replace(" and ", "; ")
        when = f" ({fields['year']})" if "year" in fields else ""
        names = ("journal", "booktitle", "publisher", "howpublished", "institution", "volume")
        place = [fields[name] for name in names if name in fields]
        place += [fields["pages"].replace("--", "–")] if "pages" in fields else []
        place += [f"version {fields['version']}"] if "version" in fields else []
        place += [f"arXiv:{fields['eprint']}"] if "eprint" in fields else []
        return f"{who}{when}. {self.title}.{' ' if place else ''}{', '.join(place)}{'.' if place else ''}"


def _read() -> dict[str, Reference]:
    text = resources.files(__package__).joinpath("references.bib").read_text(encoding="utf-8")
    return {
        entry["key"]: Reference(entry["kind"], dict(_FIELD.findall(entry["fields"])), entry[0])
        for entry in _ENTRY.finditer(text)
    }


REFERENCES = _read()
"""All entries by their keys."""

_DATA: dict[str, tuple[str, ...]] = {
    "digits": ("pedregosa2011",),
    "mnist": ("lecun1998",),
    "fashion": ("xiao2017",),
    "emnist": ("cohen2017",),
    "cifar": ("krizhevsky2009",),
    "svhn": ("netzer2011",),
    "tiny-imagenet": ("le2015",),
    "femnist": ("caldas2018",),
    "shakespeare-leaf": ("caldas2018",),
    "shakespeare": ("caldas2018",),
    "ag-news": ("zhang2015",),
}


def of_method(name: str) -> tuple[str, ...]:
    """Keys of the entries for an algorithm, by its name in runs and grids; () for one that fedstat does not have.

    Examples
    --------
    >>> of_method("fedprox+"), of_method("fedavg-personal-head-shrunken"), of_method("mine")
    (('li2020', 'wang2019'), ('mcmahan2017', 'jeong2022', 'efron1973'), ())
    """
    return tuple(key for key in about(name).keys if key in REFERENCES)


def of_data(name: str) -> tuple[str, ...]:
    """Keys of the entries for a data set of ``fedstat.data.SOURCES``, () for others.

    Examples
    --------
    >>> of_data("cifar-100:test"), of_data("emnist-balanced"), of_data("my own")
    (('krizhevsky2009',), ('cohen2017',), ())
    """
    bases = [base for base in _DATA if name.partition(":")[0] == base or name.startswith(f"{base}-")]
    return _DATA[max(bases, key=len)] if bases else ()


def bibliography(keys: Iterable[str] | None = None) -> str:
    """BibTeX of some entries, each once, in the order of ``REFERENCES``; of all by default."""
    wanted = set(REFERENCES if keys is None else keys)
    return "\n\n".join(entry.bibtex for key, entry in REFERENCES.items() if key in wanted)
