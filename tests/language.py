"""Count what the language rules of CONTRIBUTING ask for, in the package: ``python tests/language.py``."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "fedstat"
QUESTION = re.compile(r"(What|Whether|How|Where|Who|Whose|Which|When|Why)\b")
POINTING = re.compile(r"\b([Tt]hose|[Tt]he same|of (its|their|one's) own)\b")
BARE = frozenset(
    """asked at each found given here kept known left made mine one others own said same seen some taken there way_out
    whole""".split()  # noqa: SIM905 read as a line of words
)
"""Participles, pronouns and adverbs that name no thing."""


class Counts(NamedTuple):
    """Counts in a tree of Python files.

    Attributes
    ----------
    summaries : int
        First lines of docstrings.
    questions : list of str
        Places whose summary opens with a question word.
    pointing : list of str
        Places whose summary says "those", "the same" or "of its own".
    bare : list of str
        Places that bind a name of ``BARE``.
    """

    summaries: int
    questions: list[str]
    pointing: list[str]
    bare: list[str]


def count(folder: Path = PACKAGE) -> Counts:
    """Count summaries and names in all files of a folder."""
    summaries, questions, pointing, bare = 0, [], [], []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            place = f"{path.relative_to(folder)}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                summary = text.partition("\n\n")[0].replace("\n", " ")
                summaries += 1
                questions += [f"{place} {summary}"] if QUESTION.match(summary) else []
                pointing += [f"{place} {summary}"] if POINTING.search(summary) else []
            bare += [f"{place} {name}" for name in _bound(node) if name in BARE]
    return Counts(summaries, questions, pointing, bare)


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a node of the syntax tree binds: variables and arguments."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def not_imperative(folder: Path = PACKAGE) -> int:
    """Number of functions and methods whose summary is not a command (ruff's D401)."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "D401", "--output-format", "concise"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    return done.stdout.count(" D401 ")


def main() -> None:
    """Print the counts; with the name of one, its places."""
    counts = count()
    if sys.argv[1:]:
        print(*getattr(counts, sys.argv[1]), sep="\n")
        return
    for title, places in (("open with a question word", counts.questions), ("say those, the same", counts.pointing)):
        share = len(places) / counts.summaries
        print(f"docstring summaries that {title}: {len(places)} of {counts.summaries} ({share:.1%})")
    print(f"functions and methods whose summary is not a command: {not_imperative()}")
    names = Counter(place.split()[-1] for place in counts.bare)
    print(f"names that name no thing: {len(counts.bare)}; {', '.join(f'{n} {k}' for n, k in names.most_common(12))}")


if __name__ == "__main__":
    main()
