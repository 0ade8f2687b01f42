"""Tables that commands and analyses print, and write as CSV and Markdown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import _cli
from fedstat._utils.guard import replace_file
from fedstat._utils.lazy import pd
from fedstat.results import exports
from fedstat.results.base import TERMINAL, aligned


class Table(NamedTuple):
    """Table of runs.

    Attributes
    ----------
    title : str
    values : DataFrame
        All numbers, one row per line of the table.
    blocks : mapping from heading to DataFrame of str
        What the text and Markdown show.
    notes : tuple of str
        What the columns mean, what was not run, where the numbers come from.
    """

    title: str
    values: pd.DataFrame
    blocks: Mapping[str, pd.DataFrame]
    notes: tuple[str, ...]

    def text(self, width: float = math.inf) -> str:
        """Return the table as text for a terminal; columns beyond the width stand below, after the first column."""
        parts = [self.title]
        parts += [f"{heading}\n{_aligned(block, width)}" for heading, block in self.blocks.items()]
        notes = [textwrap.fill(note, TERMINAL, subsequent_indent="  ") for note in self.notes]
        return "\n\n".join([*parts, "\n".join(notes)])

    def write(self, name: Path) -> None:
        """Write all numbers to ``name.csv``, and the table to ``name.md``."""
        require_writable(name)
        name.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(Path(f"{name}.csv")) as csv, replace_file(Path(f"{name}.md")) as markdown:
            self.values.to_csv(csv, index=False, float_format="%.6g")
            markdown.write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """Return the table as Markdown."""
        parts = [f"## {self.title}"]
        parts += [f"### {heading}\n\n{exports.markdown(block.astype(str))}" for heading, block in self.blocks.items()]
        return "\n\n".join([*parts, "\n".join(f"- {note}" for note in self.notes)]) + "\n"


def _aligned(block: pd.DataFrame, width: float) -> str:
    """Align a block, in several parts if it is wider than ``width``."""
    names = list(block.columns)
    parts: list[list[Any]] = [names[:1]]
    for name in names[1:]:
        longer = [*parts[-1], name]
        is_wide = max(map(len, aligned(block[longer]).splitlines())) > width
        parts = [*parts, [names[0], name]] if is_wide and len(longer) > 2 else [*parts[:-1], longer]
    return "\n\n".join(aligned(block[part]) for part in parts)


def require_writable(name: Path, option: str = "--out") -> None:
    """Raise ValueError, before any work, if the table's files cannot be written; their folder need not exist."""
    for file in (Path(f"{name}.csv"), Path(f"{name}.md")):
        if not file.parent.exists():
            file = next(parent for parent in file.absolute().parents if parent.parent.exists())
        _cli.require_file(option, file)
