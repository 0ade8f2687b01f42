"""Factorized-FL Table 1: test accuracy where clients number their classes in their own order, and what is sent."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from _tables import Asked, accuracy

from fedstat.results.tables import number
from fedstat.study.collect import Grid, ordered, title_of
from fedstat.study.grid import of_study
from fedstat.study.printed_tables import Table

FILE = Path(__file__).parents[2] / "simulations" / "factorized_fl.toml"
TITLE = "Factorized-FL Table 1"
FEDAVG = "fedavg-personal-head"


def compared(grid: Grid, asked: Asked) -> Table:
    """Accuracies, compared with Factorized-FL β."""
    return accuracy(
        of_study(grid, FILE, "table1"), asked.paper, name="table1", title=f"{TITLE}. Test accuracy",
        reference=asked.reference or "factorized-fl-beta", rule=asked.rule,
    )  # fmt: skip


def sent(grid: Grid, asked: Asked) -> Table:
    """Megabytes sent and received by all clients over all rounds."""
    grid = of_study(grid, FILE, "table1")
    table = grid.table
    total = table.assign(megabytes=(table["bytes_up"] + table["bytes_down"]) / 1e6)
    values = total.groupby(["scenario", "method"], sort=False)["megabytes"].agg(["mean", "min", "max"]).reset_index()
    places = values["method"].map(ordered(values["method"]).index)
    values = values.assign(place=places).sort_values(["scenario", "place"]).drop(columns="place")
    fedavg = values[values["method"] == FEDAVG].set_index("scenario")["mean"]
    published = asked.paper.tables.get("communication", {})
    theirs = [
        next((v for name, v in published.items() if scenario.startswith(name)), {}) for scenario in values["scenario"]
    ]
    values["relative"] = values["mean"] / values["scenario"].map(fedavg)
    values["paper"] = [
        of.get(m.split("-personal-head")[0], float("nan")) / of["fedavg"] if of else float("nan")
        for of, m in zip(theirs, values["method"], strict=True)
    ]
    blocks = {
        str(scenario): pd.DataFrame(
            {
                "method": title_of(r["method"]),
                "MB": number(r["mean"], 3),
                "of FedAvg's": number(r["relative"]),
                "paper": number(r["paper"]),
            }
            for r in rows.to_dict("records")
        )
        for scenario, rows in values.groupby("scenario", sort=False)
    }
    said = (
        "MB: sent and received by all clients over all rounds, mean over seeds; entries of 4 bytes",
        "of FedAvg's: relative to FedAvg with a personal head, which does not send the output layer",
        "paper: Gb relative to the paper's FedAvg, whose count holds the output layer",
    )
    return Table(f"{TITLE}. Communication", values, blocks, (*said, *asked.paper.notes(grid)))
