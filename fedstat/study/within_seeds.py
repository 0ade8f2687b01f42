"""Comparisons of methods within seeds as tables show them: by setting, over all settings, and what the columns mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstat._utils.lazy import pd
from fedstat.labelled import compare
from fedstat.results.ranks import difference
from fedstat.results.tables import p_value, plus_minus
from fedstat.study.collect import Grid, ordered, scenarios, title_of
from fedstat.study.compare import against

SE = "±: standard error over seeds"
TOGETHER = "[95 %]: for all rows of a block together (Bonferroni), each method's own variance; p by Holm; n pairs"
OVERALL = "all settings: differences are means over these settings within each seed, so that n is the number of seeds"


def difference_notes(grid: Grid, reference: str) -> list[str]:
    """Return notes on the meaning of differences, intervals and p values, and on few seeds."""
    n = int(grid.table.groupby("scenario")["seed"].nunique().max())
    return [
        f"difference: from {title_of(reference)}, within seeds; {TOGETHER}",
        "in the CSV: each method's paired t test and interval; p_holm and sim_conf_low, sim_conf_high for all methods",
        *([f"the exact sign-flip p (in the CSV) cannot fall below {2.0 ** (1 - n):g} with {n} seeds"] if n > 1 else []),
    ]


def compare_settings(table: pd.DataFrame, grid: Grid, value: str, reference: str) -> tuple[pd.DataFrame, list[str]]:
    """Compare methods with the reference within seeds, for every setting; return also notes on missing comparisons."""
    parts, notes = [], []
    for scenario in scenarios(grid):
        rows = table[table["scenario"] == scenario]
        rows = rows.assign(place=rows["method"].map({m: i for i, m in enumerate(_ordered(rows["method"]))}))
        if not len(rows):
            notes.append(f"{scenario}: nothing to show")
            continue
        comparison = against(rows.sort_values(["place", "seed"]), value, reference)
        parts.append(comparison.table.assign(scenario=scenario))
        notes += [f"{scenario}: {note}" for note in comparison.notes]
    values = pd.concat(parts, ignore_index=True)
    return values[["scenario", *values.columns.drop("scenario")]], notes


def add_overall(
    values: pd.DataFrame, notes: list[str], rows: pd.DataFrame, value: str, reference: str
) -> tuple[pd.DataFrame, list[str]]:
    """Add the comparison over all settings, if there are several: means over them within each seed."""
    if rows["scenario"].nunique() < 2 or reference not in set(rows["method"]):
        return values, notes
    place = rows["method"].map({m: i for i, m in enumerate(ordered(rows["method"]))})
    comparison = compare(
        rows.assign(place=place).sort_values(["place", "scenario", "seed"]), reference=reference, value=value,
        block=["scenario", "seed"], sample="seed",
    )  # fmt: skip
    over = comparison.table.assign(scenario="all settings", std_error_mean=np.nan)  # settings differ more than seeds do
    return pd.concat([values, over], ignore_index=True), [*notes, *(f"all settings: {n}" for n in comparison.notes)]


def _ordered(names: pd.Series) -> list[str]:
    """Return methods in the order of tables; each prediction rule for unseen clients follows its method."""
    first = ordered(name.split(", ")[0] for name in names)
    return sorted(dict.fromkeys(names), key=lambda n: (first.index(n.split(", ")[0]), n))


def table_line(row: Mapping[Any, Any], heading: str, reference: str) -> dict[str, str]:
    """Return the line of a table: name, mean ± standard error, difference from the reference, p."""
    return {
        "method": title_of(str(row["method"])),
        heading: plus_minus(row["mean"], row["std_error_mean"]),
        "difference [95 %]": "reference" if row["method"] == reference else difference(row),
        "p": p_value(row["p_holm"]),
        "n": str(int(row["n"]) or ""),
    }
