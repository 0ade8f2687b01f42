"""What a report says of the simulation study on model (8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedstat.plot import accuracy as draw_accuracy
from fedstat.plot import stability as draw_stability
from fedstat.plot import study_dataset
from fedstat.reporting import figures, origin, prose, training_cautions
from fedstat.reporting.document import COMMAND, Block, Caution, Part, Printed, Section, Table, Text, shown
from fedstat.reporting.parts import assemble, few_replicates
from fedstat.reporting.stored import Stored
from fedstat.results.numbers import number, plus_minus
from fedstat.sim import report as printing
from fedstat.sim.experiment import LAYER

_REFERENCE = "true"


def part(stored: Stored) -> Part:
    """Report of a study, as far as it got."""
    run = stored.tree
    sections: dict[str, Callable[[], Section | None]] = {}
    if run is not None:
        sections = {
            "accuracy by way to split": partial(_tables, run),
            "figures": partial(_figures, run),
            "what the command prints": lambda: Section("As the command prints it", [Printed(printing.report(run))]),
        }
    return assemble(
        stored, _ran(stored), sections, checks=lambda: _cautions(stored),
        brief=lambda: _findings(printing.summary(run)) if run is not None else (), methods=_methods(stored),
    )  # fmt: skip


def _ran(stored: Stored) -> Table:
    c = stored.config
    rows = {
        "command": origin.command_line("fedstat.sim", c),
        "clients": f"{c.get('clients')}, {c.get('n_train')} training and {c.get('n_test')} test samples each",
        "model": f"(8) of FedFac: {c.get('d')} covariates, {c.get('m')} hidden neurons",
        "shared shares": f"of the neurons p = {_listing(c.get('p'))}; of the covariates α = {_listing(c.get('alpha'))}",
        "ways to split": _listing(c.get("methods")),
        "rounds": str(c.get("rounds")),
        "local training": prose.local_training({**c, "optimizer": "sgd"}),
        "replicates": f"{c.get('replicates')}, seeds from {c.get('seed')} on",
    } | origin.made(stored)
    return Table.pairs("", {name: shown(value, COMMAND) for name, value in rows.items()})


def _listing(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def _cautions(stored: Stored) -> Iterator[Caution]:
    if (run := stored.tree) is None:
        return
    done, rounds = run["metrics/rounds_done"], run["metrics"].sizes["round"]
    missing = int((done < rounds).sum())
    if missing or not stored.finished:
        text = (
            f"{missing} of {done.size} runs (a way to split on one replicate) are not done, and are left out of means "
            "and intervals. --resume goes on"
        )
        yield Caution("Not finished", text, grave=True)
    yield from few_replicates(done.sizes["replicate"])
    split = run[f"split/{LAYER}"].to_dataset()
    if "communality" in split:
        nu = split["communality"].stack(analysis=[d for d in split["communality"].dims if d != "unit"])
        nu = nu.transpose("analysis", "unit")
        values = nu.to_numpy()
        there = np.isfinite(values).any(axis=1)
        if there.any():
            converged = split["converged"].stack(analysis=list(nu["analysis"].to_index().names)).to_numpy()
            yield from training_cautions.factors(LAYER, values[there], converged[there], "analyses")


def _findings(table: pd.DataFrame) -> list[str]:
    """For every setting, which ways differ from the true split."""
    said = []
    for (p, alpha), rows in table.groupby(["p", "alpha"], sort=False):
        where, others = f"p = {p:g}, α = {alpha:g}", rows[rows["method"] != _REFERENCE]
        known = others.dropna(subset="difference_low")
        alike = others[others["equal"]]
        if len(alike):
            names = ", ".join(f"{shown(r['method'])} ({r['difference']:+.4f})" for r in alike.to_dict("records"))
            said.append(f"{where}: equal difference from the true split in all replicates, so no interval: {names}.")
        if not len(known):
            said.append(f"{where}: no interval can be given for differences from the true split.")
            continue
        clear = known[(known["difference_low"] > 0) | (known["difference_high"] < 0)]
        told = "; ".join(_claim(row) for row in clear.to_dict("records")) or "none"
        rest = ", ".join(map(shown, known.loc[~known.index.isin(clear.index), "method"]))
        said.append(
            f"{where}: different from the true split, each by its own 95 % interval over "
            f"{int(known['replicates'].min())} "
            f"replicates: {told}." + (f" Not told apart from it: {rest}." if rest else "")
        )
        first = rows.iloc[0]
        if np.isfinite(first["auc"]):
            said.append(
                f"{where}: factor analysis of the true weights orders shared above personal neurons with AUC "
                f"{number(first['auc'], 3)}; adjusted Rand index with the true split {number(first['ari'], 3)}."
            )
    return said


def _claim(row: Any) -> str:
    return f"{shown(row['method'])} {printing.from_true(row)}"


def _tables(run: xr.DataTree) -> Section:
    blocks: list[Block] = []
    for (p, alpha), rows in printing.summary(run).groupby(["p", "alpha"], sort=False):
        lines = [
            [shown(r["method"]), plus_minus(r["accuracy"], r["std_error"]),
             "reference" if r["method"] == _REFERENCE else printing.from_true(r),
             number(r["stable"], 3), str(r["replicates"])]
            for r in rows.to_dict("records")
        ]  # fmt: skip
        columns = ["split", "accuracy ± se", "difference from true [95 %]", "stable", "replicates"]
        blocks.append(Table(f"p = {p:g}, α = {alpha:g}", columns, lines))
    meaning = (
        "Accuracy: clients' mean test accuracy after the last round; se: standard error over replicates. Differences "
        "are paired within replicates; each interval stands alone (Student's t), not adjusted for their number. "
        "Stable: share of neurons that keep their state from one round to the next, mean over the last "
        f"{printing.LAST} rounds."
    )
    return Section("Accuracy by way to split", [*blocks, Text(meaning)])


def _figures(run: xr.DataTree) -> Section | None:
    result = study_dataset(run)
    result = result.assign_coords(method=[shown(name) for name in result["method"].values])
    if not bool(np.isfinite(result["accuracy"]).any()):
        return None
    rows = [result] if result.sizes["p"] == 1 else [result.isel(alpha=[i]) for i in range(result.sizes["alpha"])]
    bars = "Points: means over replicates; bars: Student's 95 % intervals."
    blocks: list[Block] = []
    for one in rows:
        blocks.append(figures.figure(partial(draw_accuracy, one), f"Test accuracy. {bars}", size=(6, 4)))
        if _REFERENCE in one["method"].values:
            draw = partial(draw_accuracy, one, relative_to=_REFERENCE)
            caption = f"Difference from the true split within replicates. {bars}"
            blocks.append(figures.figure(draw, caption, size=(6, 4)))
        if "same_state" in one:
            caption = (
                "Share of neurons that keep their state, dynamic FedFac. Lines: means over replicates; bands: "
                "Student's 95 % intervals."
            )
            blocks.append(figures.figure(partial(draw_stability, one), caption, size=(6, 4)))
    return Section("Figures", blocks)


def _methods(stored: Stored) -> tuple[str, list[str]]:
    c = stored.config
    text = (
        f"Data were drawn from model (8) of {prose.cited('wang2023')}, for {c.get('clients')} clients with "
        f"{c.get('n_train')} training samples of {c.get('d')} covariates each, with {c.get('m')} hidden neurons of "
        f"which a share p is common to all clients (p = {_listing(c.get('p'))}; α = {_listing(c.get('alpha'))}). "
        f"Clients trained for {c.get('rounds')} rounds, each for {prose.local_training({**c, 'optimizer': 'sgd'})}. "
        f"Neurons were split in the ways {_listing(c.get('methods'))}; where by factor analysis "
        f"({prose.cited('harman1976')}), communalities were estimated by {prose.estimator(c.get('estimator'))} with κ "
        f"= {c.get('kappa')}. Each of the {c.get('replicates')} replicates draws data, start and batches anew, the "
        "same for all ways to split; differences are paired within replicates, with Student's t intervals. Recovery of "
        "the true split is given by the area under the ROC curve and the adjusted Rand index "
        f"({prose.cited('hubert1985')})."
    )
    return f"{text} {prose.software([stored])}", ["wang2023", "harman1976", "hubert1985"]
