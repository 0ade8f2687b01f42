"""The page of measured error rates, and the tables of ``docs/which-test.md``, from the table of simulations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from reference_pages import heading

RESULTS = Path(__file__).parents[2] / "analysis/inference/results/rates"
SAYS = {
    "level": "False positive rate of a test at 0.05: proportion of data sets in which it rejects a true null"
    " hypothesis. It errs above 0.06, by more than 2 Monte Carlo errors.",
    "coverage": "Coverage of an interval: proportion of data sets in which it holds the true value. It errs if coverage"
    " is more than 0.02 below the level, by more than 2 Monte Carlo errors.",
    "rate": "A proportion that no claim limits.",
}
QUESTIONS = {
    "agreement": {
        "icc, sign-flip tests": "sign-flip test",
        "icc, sign-flip tests beside shared units": "sign-flip test of personal units in layers with shared units",
        "icc, power of sign-flip tests at FDR .05": "sign-flip test: shared units detected at FDR 0.05",
        "icc of runs, sign-flip tests of changes less their mean": "sign-flip test, changes of a run",
        "icc, permutation tests": "permutation test",
        "icc, F tests of 0": "F test",
        "icc, intervals over clients": "95% CI of ICC, jackknife over clients",
        "icc of runs, intervals over clients": "95% CI of ICC, jackknife over clients, changes of a run",
        "icc, intervals by F and bootstrap": "95% CI of ICC, F and bootstrap",
    },
    "groups": {
        "icc with groups, tests of no agreement": "tests of agreement within and between groups",
        "icc with groups, intervals": "95% CI of agreement within and between groups",
        "icc with groups, power": "agreement of ICC2 0.4 within and 0.2 between groups: detected",
        "variance_components(groups=), tests of groups": "permutation test of groups",
        "variance_components(groups=), intervals": "95% CIs of variance components with groups",
        'split(tau="test", groups=), units called the other, of those called': "wrong units within groups",
    },
    "communality": {
        "permutation_test, units without an identity": "permutation test",
        "bootstrap, ν of samples of this size": "95% CI of the expected communality, bootstrap over clients",
        "fa, fit of a true model": "χ² test of the fit",
        "fa, interval of RMSEA": "90% CI of RMSEA",
    },
    "reliability": {
        "variance_components, tests of a share of 0": "test of reliability 0",
        "variance_components, intervals of the share": "95% CI of reliability",
        "variance_components, conclusion on the layer": "wrong conclusion on a layer (above or below 0.5)",
        'split(tau="test"), any unit called the other': "some wrong unit in a layer, synthetic data",
        'split(tau="test"), units called the other, of those called': "wrong units among shared and personal ones",
        'split(tau="test"), layers with some unit called the other': "some wrong unit in a layer, trained networks",
        'split(tau="test"), units decided': "units called shared or personal, not inconclusive",
        "fl.profile, test over a window of rounds": "test of a layer over a window of rounds",
        "shrunken, intervals of units": "95% CI, pooled units",
        "shrunken, units wrongly called shared, of those called": "pooled units: wrong among those called shared",
    },
    "sensitivity": {
        "bootstrap, labels of .9 to .97 of the replicates are right": "true group, selection frequency 0.90 to 0.97",
        "split, AgreementWarning": "warning that clients agree less on shared units, without such a difference",
    },
    "comparisons": {
        "compare, m methods with a reference": "``compare``: t and sign-flip tests, Holm's p, simultaneous CIs",
        "compare.mixed, effects of methods": "``compare.mixed``: mixed model",
        "Friedman's test": "Friedman's test",
        "Nemenyi's test, any pair": "Nemenyi's test, any pair",
        "client_clusters, tests of known groups": "``client_clusters``: permutation test of known groups",
        "Student's interval of a mean over replicates": "95% t interval of a mean over replicates",
    },
}
"""Claims of the table, and what each measures, by the question of ``docs/which-test.md``."""
LEAD = """
Each test and interval of fedstat was tried on data whose truth is known: in cases that its assumptions describe, and in
cases that violate them (few clients, correlated weights, unequal variances, ties). The tables show the proportion of
simulated data sets in which a test at 0.05 rejected a true null hypothesis, or a 95% interval covered, ± its Monte
Carlo error. *errs* marks a case in which the claim should not be relied on; *refused*, one without a number.
:doc:`../which-test` explains the tests.

Trained networks are multilayer perceptrons on MNIST. They are drawn from pools of 400 clients with all classes, one,
two or five classes, Dirichlet(0.1) or random labels, after 1 to 60 steps of SGD or Adam from common, two, or separate
initial parameters. The first table has the lowest and the highest proportion over cases whose assumptions hold (number
of cases in parentheses), and the number of cases that err, assumptions violated included.

The simulations are in ``simulations/inference``; seed {seed}. From a copy of the repository, with the folder of MNIST's
files::

   python -m simulations.inference --quick --data-dir FOLDER   # one case of each claim: a minute
   python -m simulations.inference --data-dir FOLDER   # all, hours: writes analysis/inference/results/rates
"""


def read() -> pd.DataFrame:
    """Return the table of simulations."""
    return pd.concat(pd.read_csv(file, keep_default_na=False) for file in sorted(RESULTS.glob("*.csv")))


def pages() -> Iterator[tuple[str, str]]:
    """File, relative to ``inference/``, and text: the page, and a table for each question."""
    table = read()
    claims = dict(iter(table.groupby("claim", sort=False)))
    parts = [_claim(name, rows) for name, rows in claims.items()]
    lead = LEAD.format(seed=", ".join(map(str, table["seed"].unique())))
    yield (
        "index.rst",
        "\n\n".join([heading("Measured error rates of tests and intervals"), lead, _summary(claims), *parts]),
    )
    for question, descriptions in QUESTIONS.items():
        yield f"{question}.inc", _question({text: claims[name] for name, text in descriptions.items()})


def _question(claims: dict[str, pd.DataFrame]) -> str:
    """Return a table of measured proportions: mean, lowest and highest over the cases of each claim.

    The Monte Carlo error of a mean is the mean error of its cases, an upper bound.
    """
    rows = [["test or interval", "measured", "assumptions", "cases", "mean", "lowest", "highest", "err"]]
    measured = {"level": "false positives", "coverage": "coverage", "rate": "proportion"}
    for description, table in claims.items():
        tried = table[(table["conclusion"] != "refused") & (table["mc_error"] != "")]
        for assumptions, cases in sorted(tried.groupby("assumptions"), reverse=True):
            values = cases[["observed", "mc_error"]].astype(float).sort_values("observed")
            shown = [values.mean(), values.iloc[0], values.iloc[-1]]
            numbers = [f"{one['observed']:.3f} ± {one['mc_error']:.3f}" for one in shown]
            state = {"hold": "hold", "fail": "violated"}[assumptions]
            errs = (cases["conclusion"] == "errs").sum()
            rows.append([description, measured[table["kind"].iloc[0]], state, len(cases), *numbers, errs])
    return _table([[str(cell) for cell in row] for row in rows])


def _summary(claims: dict[str, pd.DataFrame]) -> str:
    rows = [["claim", "synthetic data, assumptions hold", "trained networks, assumptions hold"]]
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
