"""The page of what p values and intervals are worth, made from the table of simulations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from reference_pages import heading

TABLE = Path(__file__).parents[2] / "analysis/inference/results/inference.csv"
SAYS = {
    "level": "A test of .05: how often it rejects where its null hypothesis is true. Above .06 it errs."
    " Twice the Monte Carlo error is allowed for.",
    "coverage": "An interval: how often it holds what it is of. Short of its confidence by more than .02 it errs."
    " Twice the Monte Carlo error is allowed for.",
    "rate": "A share that nothing is claimed of.",
}
LEAD = """
Each p value and interval that fedstat gives was tried where the truth is known: in cases that its assumptions describe,
and in cases that break them (few clients, correlated weights, unequal spread, ties). Shown is the share of simulated
data sets in which a test of .05 rejected a true null hypothesis, or a 95 % interval covered, and its Monte Carlo error.
*errs* marks a case in which the claim should not be relied on; *refused*, one in which fedstat gives no number.

Trained networks are multilayer perceptrons on MNIST, drawn from pools of 400 clients with all classes, two or five
classes or random labels, after 1 to 60 steps of SGD from a common start, two starts or starts of their own. The first
table has the lowest and the highest value of the cases (their number in parentheses) in which assumptions hold, and how
many of all cases err.

The simulations are in ``simulations/inference``; seed {seed}. From a copy of the repository, with the folder of MNIST's
files::

   python -m simulations.inference --quick --data-dir FOLDER   # one case of each claim: a minute
   python -m simulations.inference --data-dir FOLDER   # all, hours: writes analysis/inference/results/inference.csv
"""


def pages() -> Iterator[tuple[str, str]]:
    """File, relative to ``inference/``, and text of the page."""
    table = pd.read_csv(TABLE, keep_default_na=False)
    claims = dict(iter(table.groupby("claim", sort=False)))
    parts = [_claim(name, rows) for name, rows in claims.items()]
    lead = LEAD.format(seed=", ".join(map(str, table["seed"].unique())))
    yield "index.rst", "\n\n".join([heading("What p values and intervals are worth"), lead, _summary(claims), *parts])


def _summary(claims: dict[str, pd.DataFrame]) -> str:
    rows = [["claim", "synthetic data", "trained networks"]]
    for name, table in claims.items():
        of = dict(iter(table.groupby("layers")))
        rows.append([f"`{name}`_", *(_range(of.get(layers)) for layers in ("synthetic", "trained"))])
    return _table(rows)


def _range(table: pd.DataFrame | None) -> str:
    """Lowest and highest value observed where assumptions hold, and how many cases err."""
    if table is None or table.empty:
        return "–"
    made = table[(table["assumptions"] == "hold") & (table["conclusion"] != "refused") & (table["mc_error"] != "")]
    observed = made["observed"].astype(float)
    text = f"{observed.min():.3f} to {observed.max():.3f} ({len(made)})" if len(made) else "–"
    errs = (table["conclusion"] == "errs").sum()
    return text + (f"; {errs} of {len(table)} err" if errs else "")


def _claim(name: str, table: pd.DataFrame) -> str:
    noted = {note: f"[{i}]" for i, note in enumerate(filter(None, table["note"].unique()), 1)}
    rows = [["case", "data", "assumptions", "observed", "conclusion"]]
    for row in table.to_dict("records"):
        case = ": ".join(filter(None, (row["case"], row["part"])))
        found = f"{float(row['observed']):.3f} ± {float(row['mc_error']):.3f}" if row["mc_error"] else "–"
        found += f" ({row['claimed']} of {row['replicates']})" if row["claimed"] < row["replicates"] else ""
        rows.append(
            [
                case,
                row["layers"],
                row["assumptions"],
                found,
                " ".join(filter(None, (row["conclusion"], noted.get(row["note"])))),
            ]
        )
    notes = "\n".join(f"{mark} {note}.\n" for note, mark in noted.items())
    return "\n\n".join([f"{name}\n{'-' * (len(name) + 2)}", SAYS[table["kind"].iloc[0]], _table(rows), notes])


def _table(rows: list[list[str]]) -> str:
    body = "\n".join("   * - " + "\n     - ".join(row) for row in rows)
    return f".. list-table::\n   :header-rows: 1\n\n{body}\n"
