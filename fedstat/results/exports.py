"""Printed tables of results, and their LaTeX and Markdown."""

from __future__ import annotations

import html
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import pd
from fedstat.results.tables import NONE, number, texts

_MARKDOWN = re.compile(r"([\\`*|\[\]$~])|(?<!\w)_|_(?!\w)")
_COMMANDS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "≤": "le", "≥": "ge", "±": "pm", "×": "times",
}  # fmt: skip
_LATEX = str.maketrans(
    {x: f"\\{x}" for x in "&%$#_{}"}
    | {x: f"${x}$" for x in "<>"}
    | {x: rf"$\{name}$" for x, name in _COMMANDS.items()}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"−": "$-$", NONE: "--"}
)
_MINUS = re.compile(r"(?<![\w.)\]$])-(?=[\d.])")
_NUMBER = re.compile(r"[<+-]? ?\d[\d.]*(e[+-]\d+)?|[+-]?inf|" + NONE)

Headings = Mapping[str, str | tuple[str, ...]]
"""Headings of a printed table, each with its column, the ends of an interval, or an estimate and the ends."""


def printed(table: pd.DataFrame, headings: Headings, digits: int = 3) -> pd.DataFrame:
    """Return the texts of a table as a print or a paper shows it; columns that the table lacks are left out.

    Intervals read "not estimated" where the column ``estimated`` is False.

    Examples
    --------
    >>> table = pd.DataFrame({"icc": [0.51, 0], "low": [0.4, -0.1], "high": [0.6, 1], "estimated": [True, False]})
    >>> print(printed(table, {"ICC2": "icc", "CI": ("low", "high")}, 2))
       ICC2             CI
    0  0.51   [0.40, 0.60]
    1  0.00  not estimated
    """
    sources = {heading: columns_of({heading: x}) for heading, x in headings.items()}
    shown = {
        heading: _intervals(table, names, digits) if len(names) > 1 else _values(table[names[0]], digits)
        for heading, names in sources.items()
        if {*names} <= {*table}
    }
    return pd.DataFrame(shown, dtype=object)


def columns_of(headings: Headings) -> list[str]:
    """Return the columns behind headings."""
    return [name for source in headings.values() for name in ([source] if isinstance(source, str) else source)]


def _values(values: pd.Series[Any], digits: int) -> list[str]:
    """Print numbers with fixed decimal places, other values by :func:`texts`."""
    if values.dtype.kind == "f" and not str(values.name).startswith("p_"):
        return [number(x, digits) for x in values]
    return texts(values.to_frame(), digits)[str(values.name)].tolist()


def _intervals(table: pd.DataFrame, names: list[str], digits: int) -> list[str]:
    """Print the ends of intervals, after an estimate if ``names`` has three columns."""
    is_estimated = table["estimated"] if "estimated" in table else np.ones(len(table), dtype=bool)
    shown = []
    for row, is_shown in zip(table[names].to_numpy(dtype=float), is_estimated, strict=True):
        *estimate, low, high = (number(x, digits) for x in row)
        ends = NONE if NONE in (low, high) else f"[{low}, {high}]" if is_shown else "not estimated"
        shown.append(" ".join([*estimate, ends]) if ends != NONE else (estimate or [NONE])[0])
    return shown


def chosen(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Select columns of a table, in the order of ``columns``; ValueError names an unknown one."""
    names = [columns] if isinstance(columns, str) else list(columns)
    existing = [str(c) for c in table]
    return table[[check.choice("a column", name, existing) for name in names]]


def in_latex(text: str) -> str:
    r"""Escape text for LaTeX; minus signs of numbers and Greek letters become formulas.

    Examples
    --------
    >>> print(in_latex("50 % of a_1: [-0.05, κ < 1]"))
    50 \% of a\_1: [$-$0.05, $\kappa$ $<$ 1]
    """
    text = " ".join(text.split()).replace("<=", "≤").replace(">=", "≥")
    return _MINUS.sub("$-$", text.translate(_LATEX))


def latex(shown: pd.DataFrame, *, caption: str = "", label: str | None = None) -> str:
    r"""Format a table of texts as LaTeX with booktabs; the caption may hold LaTeX: only its %, & and # are escaped.

    Examples
    --------
    >>> table = pd.DataFrame({"term": ["a_1"], "h2": ["0.50"], "p_value": ["< 0.001"]})
    >>> print(latex(table, caption="95 % of $h^2$", label="tab:h2"))
    \begin{table}
    \caption{95 \% of $h^2$}
    \label{tab:h2}
    \centering
    \begin{tabular}{lrr}
    \toprule
    term & h2 & p\_value \\
    \midrule
    a\_1 & 0.50 & $<$ 0.001 \\
    \bottomrule
    \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    rows = [" & ".join(map(in_latex, row)) + r" \\" for row in (list(shown), *shown.to_numpy().tolist())]
    head, *body = [f"{{}}{row}" if row[:1] in ("[", "(", "*") else row for row in rows]  # options of \\ and of rules
    sides = "".join("r" if is_right else "l" for is_right in _on_right(shown))
    tabular = [
        rf"\begin{{tabular}}{{{sides}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if caption or label:
        escaped = re.sub(r"(?<!\\)([%&#])", r"\\\1", caption)
        names = [rf"\caption{{{escaped}}}"] * bool(caption) + [rf"\label{{{label}}}"] * bool(label)
        tabular = [r"\begin{table}", *names, r"\centering", *tabular, r"\end{table}"]
    return "\n".join([*tabular, ""])


def markdown(shown: pd.DataFrame, *, caption: str = "") -> str:
    r"""Format a table of texts as a pipe table for GitHub, MyST and pandoc, after a caption as pandoc reads it.

    Examples
    --------
    >>> print(markdown(pd.DataFrame({"term": ["a|b", "<b>"], "h2": ["0.50", "–"]}), caption="Units"))
    Table: Units
    <BLANKLINE>
    | term | h2 |
    |:---|---:|
    | a\|b | 0.50 |
    | &lt;b&gt; | – |
    """
    sides = ["---:" if is_right else ":---" for is_right in _on_right(shown)]
    lines = ["| " + " | ".join(map(_in_markdown, row)) + " |" for row in (list(shown), *shown.to_numpy().tolist())]
    title = [f"Table: {_in_markdown(caption)}", ""] * bool(caption)
    return "\n".join([*title, lines[0], "|" + "|".join(sides) + "|", *lines[1:]])


def _on_right(shown: pd.DataFrame) -> list[bool]:
    """Return True for columns of numbers, which stand on the right."""
    return [all(_NUMBER.fullmatch(text) for text in shown[name]) for name in shown]


def _in_markdown(text: str) -> str:
    """Escape text for Markdown: HTML as entities, other markup with backslashes."""
    flat = html.escape(" ".join(text.split()), quote=False)
    return _MARKDOWN.sub(lambda match: "\\" + match[0], flat)


class Tables(ABC):
    """Tables for papers: of a result, or of the results of several layers."""

    @abstractmethod
    def tidy(self) -> pd.DataFrame:
        """Return one row per term."""

    @abstractmethod
    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        """Return the table of a paper and of a notebook, as texts; ``digits`` are decimal places."""

    @abstractmethod
    def _caption(self) -> list[str]:
        """Return the sentences of a caption: sizes, then tests and intervals."""

    def _texts(self, columns: Sequence[str] | None, digits: int | None) -> pd.DataFrame:
        """Return the printed table, or columns of the tidy table, as texts."""
        if columns is None:
            return self._printed(digits)
        return texts(chosen(self.tidy(), columns), 3 if digits is None else digits)

    def to_latex(
        self,
        *,
        columns: Sequence[str] | None = None,
        digits: int | None = None,
        caption: str | None = None,
        label: str | None = None,
    ) -> str:
        r"""Return the printed table as LaTeX with the rules of booktabs, special characters escaped.

        Parameters
        ----------
        columns : sequence of str, optional
            Columns of :meth:`tidy` to show instead, in this order.
        digits : int, optional
            Decimal places; by default 3, or those of the print.
        caption : str, optional
            By default sizes, tests and intervals; "" for none. It may hold LaTeX such as ``$\nu$``; its %, & and # are
            escaped.
        label : str, optional
            Label of the table. Without caption and label, there is no table environment around the tabular.
        """
        caption = in_latex(self._describe()) if caption is None else caption
        return latex(self._texts(columns, digits), caption=caption, label=label)

    def to_markdown(
        self, *, columns: Sequence[str] | None = None, digits: int | None = None, caption: str | None = None
    ) -> str:
        """Return the printed table as a Markdown pipe table after its caption, special characters and HTML escaped.

        Parameters
        ----------
        columns : sequence of str, optional
            Columns of :meth:`tidy` to show instead, in this order.
        digits : int, optional
            Decimal places; by default 3, or those of the print.
        caption : str, optional
            By default sizes, tests and intervals; "" for none.
        """
        caption = self._describe() if caption is None else caption
        return markdown(self._texts(columns, digits), caption=caption)

    def _describe(self) -> str:
        return "".join(f"{sentence.strip().rstrip('.')}. " for sentence in self._caption()).rstrip()
