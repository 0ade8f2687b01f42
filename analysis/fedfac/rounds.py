"""Which rounds count: the option of the command lines, and the rules in the words of this paper's tables."""

from __future__ import annotations

import argparse

import pandas as pd

from fedstat.study import rules


def add_rule(cli: argparse.ArgumentParser) -> None:
    """Give a command that compares accuracies the option that :func:`fedstat.study.rules.choose` reads."""
    cli.add_argument(
        "--rule", choices=rules.RULES, help="rounds to judge by (default best10; final if a run has fewer than 10)"
    )


def words(rule: str, table: pd.DataFrame) -> str:
    """What a rule means for the runs of a table; best10 is the paper's."""
    return rules.words(rule, table) + (" (as the paper's Table 2)" if rule == "best10" else "")
