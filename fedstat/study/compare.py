"""Comparing methods within seeds: means, paired differences with intervals, and lines of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstat._utils.lazy import pd
from fedstat.results.numbers import p_value, plus_minus
from fedstat.results.ranks import difference
from fedstat.stats import compare
from fedstat.study.collect import Grid, labels, ordered, title_of

SE = "±: standard error over seeds"
TOGETHER = "[95 %]: for all rows of a block together (Bonferroni), each method's own variance; p by Holm; n pairs"
OVERALL = "all settings: differences are means over these settings within each seed, so that n is the number of seeds"


def together(grid: Grid, reference: str) -> list[str]:
    """Notes on what differences, intervals and p-values mean, and how little few seeds can show."""
    n = int(grid.table.groupby("label")["seed"].nunique().max())
    return [
        f"difference: from {title_of(reference)}, within seeds; {TOGETHER}",
        "in the CSV: each method's paired t test and interval; p_holm and sim_conf_low, sim_conf_high for all methods",
        *([f"the exact sign-flip p (in the CSV) cannot fall below {2.0 ** (1 - n):g} with {n} seeds"] if n > 1 else []),
    ]


def against_zero(data: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """Mean of each name's values, over labels within seeds, against 0; adjusted over all names.

    Parameters
    ----------
    data : DataFrame
        Differences within seeds: ``label``, ``seed``, and columns of their names and values.
    name, value : str
        Those columns.

    Returns
    -------
    DataFrame
        One row per name: the name, ``n``, ``difference`` and the rest of :func:`fedstat.stats.compare.paired`.
    """
    zero = data[["label", "seed"]].drop_duplicates()
    zero[name], zero[value] = "zero", 0.0
    found = compare.paired(
        pd.concat([zero, data]), reference="zero", value=value, method=name, block=["label", "seed"], sample="seed"
    ).table.iloc[1:]
    return found.drop(columns=["mean", "std_error_mean", "n_values"]).rename(columns={"method": name})


def compared(table: pd.DataFrame, grid: Grid, value: str, reference: str) -> tuple[pd.DataFrame, list[str]]:
    """Comparison with the reference within seeds, for every setting, and notes on what could not be compared."""
    parts, notes = [], []
    for label in labels(grid):
        here = table[table["label"] == label]
        here = here.assign(place=here["method"].map({m: i for i, m in enumerate(_ordered(here["method"]))}))
        if not len(here):
            notes.append(f"{label}: nothing to show")
            continue
        found = against(here.sort_values(["place", "seed"]), value, reference)
        parts.append(found.table.assign(label=label))
        notes += [f"{label}: {note}" for note in found.notes]
    values = pd.concat(parts, ignore_index=True)
    return values[["label", *values.columns.drop("label")]], notes


def with_all_settings(
    values: pd.DataFrame, notes: list[str], rows: pd.DataFrame, value: str, reference: str
) -> tuple[pd.DataFrame, list[str]]:
    """Add the comparison over all settings, if there are several: means over them within each seed."""
    if rows["label"].nunique() < 2 or reference not in set(rows["method"]):
        return values, notes
    place = rows["method"].map({m: i for i, m in enumerate(ordered(rows["method"]))})
    found = compare.paired(
        rows.assign(place=place).sort_values(["place", "label", "seed"]), reference=reference, value=value,
        block=["label", "seed"], sample="seed",
    )  # fmt: skip
    over = found.table.assign(label="all settings", std_error_mean=np.nan)  # settings differ more than seeds do
    return pd.concat([values, over], ignore_index=True), [*notes, *(f"all settings: {n}" for n in found.notes)]


def against(rows: pd.DataFrame, value: str, reference: str, *, level: float = 0.95) -> compare.Comparison:
    """Comparison within seeds of one setting and its notes; without the reference, means alone."""
    if reference in set(rows["method"]):
        return compare.paired(rows, reference=reference, value=value, level=level)
    alone = compare.paired(rows, reference=str(rows["method"].iloc[0]), value=value, level=level)
    table = alone.table[["method", "n_values", "mean", "std_error_mean"]].reindex(columns=alone.table.columns)
    notes = (f"{reference} was not run, so nothing is compared with it",)
    return alone._replace(table=table.assign(n=0, n_pairs=0), reference=reference, notes=notes)


def _ordered(names: pd.Series) -> list[str]:
    """Methods in the order of tables; each way to treat new clients follows its method."""
    first = ordered(name.split(", ")[0] for name in names)
    return sorted(dict.fromkeys(names), key=lambda n: (first.index(n.split(", ")[0]), n))


def line(row: Mapping[Any, Any], heading: str, reference: str) -> dict[str, str]:
    """Line of a table: name, mean ± standard error, difference from the reference, p."""
    return {
        "method": title_of(str(row["method"])),
        heading: plus_minus(row["mean"], row["std_error_mean"]),
        "difference [95 %]": "reference" if row["method"] == reference else difference(row),
        "p": p_value(row["p_holm"]),
        "n": str(int(row["n"]) or ""),
    }
