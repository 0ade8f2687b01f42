"""Which rounds count: the command lines' option, and the rules in words for this paper's tables."""

from __future__ import annotations

import argparse

import pandas as pd

from fedstat.study import rules


def add_rule(cli: argparse.ArgumentParser) -> None:
    """Add the option ``--rule``, for :func:`fedstat.study.rules.choose`, to a command that compares accuracies."""
    cli.add_argument(
        "--rule", choices=rules.RULES, help="rounds to judge by (default best10; final if a run has fewer than 10)"
    )


def words(rule: str, table: pd.DataFrame) -> str:
    """A rule in words, for the runs of a table; best10 is the paper's."""
    return rules.words(rule, table) + (" (as the paper's Table 2)" if rule == "best10" else "")
