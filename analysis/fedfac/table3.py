"""FedFac Table 3: accuracy of clients that took no part in training."""

from __future__ import annotations

import pandas as pd
from _tables import Asked

from fedstat.results.tables import number
from fedstat.store import open_run
from fedstat.study import collect, run_table
from fedstat.study.collect import Grid
from fedstat.study.printed_tables import Table
from fedstat.study.within_seeds import SE, compare_settings, difference_notes, table_line


def unseen_clients(grid: Grid, asked: Asked) -> Table:
    """Table 3: accuracy of clients that took no part in training."""
    rows = []
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        if "unseen_clients" in tree.children:
            mean = run_table.unseen_clients(tree)
            ways = collect.about(run["method"]).unseen_clients
            for rule in (rule for rule in ways if rule in mean["rule"]):
                name = run["method"] if len(ways) == 1 else f"{run['method']}, {rule}"
                rows.append(
                    {
                        "scenario": run["scenario"],
                        "seed": run["seed"],
                        "method": name,
                        "unseen": float(mean.sel(rule=rule)),
                    }
                )
    if not rows:
        raise ValueError("no run held clients out, so nothing is known of new clients: run with unseen_fraction > 0")
    table, reference = pd.DataFrame(rows), asked.reference or "fedfac-dynamic, ensemble"
    values, notes = compare_settings(table, grid, "unseen", reference)
    values["paper"] = [asked.paper.of("table3", r["scenario"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(scenario): pd.DataFrame(
            table_line(r, "new clients", reference) | {"paper": number(r["paper"])} for r in part.to_dict("records")
        )
        for scenario, part in values.groupby("scenario")
    }
    said = (
        f"new clients: accuracy on their test samples, after the last round; {SE}", *difference_notes(grid, reference),
        *_ways(grid),
    )  # fmt: skip
    return Table("Table 3. Test accuracy of new clients", values, blocks, (*said, *notes, *asked.paper.notes(grid)))


def _ways(grid: Grid) -> list[str]:
    """How new clients predict, for the methods that have only one way."""
    found: dict[str, list[str]] = {}
    for method in collect.ordered(grid.table["method"]):
        row = collect.about(method)
        if len(row.unseen_clients) == 1:
            found.setdefault(row.unseen_clients[0], []).append(row.title)
    return [f"{', '.join(titles)}: {rule}" for rule, titles in found.items()]
