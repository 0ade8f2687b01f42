"""Tables of time: seconds of a round relative to one method's, compared within seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedstat._utils.lazy import pd
from fedstat.results.tables import number, p_value
from fedstat.stats.compare import LEAST_PAIRS
from fedstat.study.collect import Grid, title_of
from fedstat.study.compare import TOGETHER, compared
from fedstat.study.reference import Reference
from fedstat.study.summary import Table


def timing(grid: Grid, paper: Reference, *, name: str, title: str, reference: str, said: Iterable[str] = ()) -> Table:
    """Seconds of a round relative to the reference method: geometric means of the ratios within seeds.

    Parameters are those of :func:`fedstat.study.accuracy.accuracy`.
    """
    values, notes = compared(grid.table.assign(log=np.log(grid.table["seconds"])), grid, "log", reference)
    values["ratio"], values["ratio_low"], values["ratio_high"] = (
        np.exp(values[column]) for column in ("difference", "sim_conf_low", "sim_conf_high")
    )
    values["seconds"] = np.exp(values["mean"])
    values["paper"] = [paper.of(name, r["label"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(label): pd.DataFrame(
            {
                "method": title_of(r["method"]),
                "seconds": number(r["seconds"], 3),
                "ratio [95 %]": "1" if r["method"] == reference else _ratio(r),
                "p": p_value(r["p_holm"]),
                "n": str(int(r["n"]) or ""),
                "paper": number(r["paper"]),
            }
            for r in rows.to_dict("records")
        )
        for label, rows in values.groupby("label")
    }
    meaning = (
        "seconds: median of a run's rounds, without evaluation; geometric mean over seeds", *said,
        f"ratio: to {title_of(reference)} of the same seed; {TOGETHER}",
        "runs that shared a busy machine make these ratios noisy",
    )  # fmt: skip
    return Table(title, values, blocks, (*meaning, *notes, *paper.notes(grid)))


def _ratio(r: Mapping[Any, Any]) -> str:
    if np.isfinite(r["ratio"]) and r["n"] < LEAST_PAIRS:
        return f"{number(r['ratio'], 3)} (too few seeds)"
    around = f" [{r['ratio_low']:.3f}, {r['ratio_high']:.3f}]" if np.isfinite(r["ratio_low"]) else ""
    return number(r["ratio"], 3) + around
