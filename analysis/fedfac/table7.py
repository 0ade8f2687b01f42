"""FedFac Table 7: time of a round relative to FedAvg.

python analysis/fedfac/table7.py --runs runs/fedfac-quick --out runs/tables/table7
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedstat._table_command import Asked, command
from fedstat.results.numbers import number, p_value
from fedstat.stats import pooled
from fedstat.study.collect import Grid
from fedstat.study.compare import TOGETHER, compared
from fedstat.study.show import METHODS
from fedstat.study.table import Table


def time(grid: Grid, asked: Asked) -> Table:
    """Table 7: seconds per round relative to FedAvg: geometric means of the ratios within seeds."""
    reference = asked.reference or "fedavg"
    values, notes = compared(grid.table.assign(log=np.log(grid.table["seconds"])), grid, "log", reference)
    values["ratio"], values["ratio_low"], values["ratio_high"] = (
        np.exp(values[name]) for name in ("pooled_difference", "pooled_low", "pooled_high")
    )
    values["seconds"] = np.exp(values["mean"])
    values["paper"] = [asked.paper.of("table7", r["label"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(label): pd.DataFrame(
            {
                "method": METHODS.get(r["method"], r["method"]),
                "seconds": number(r["seconds"], 3),
                "ratio [95 %]": "1" if r["method"] == reference else ratio(r),
                "p": p_value(r["pooled_p"]),
                "paper": number(r["paper"]),
            }
            for r in rows.to_dict("records")
        )
        for label, rows in values.groupby("label")
    }
    name = METHODS.get(reference, reference)
    said = (
        "seconds: median of a run's rounds, without evaluation; geometric mean over seeds",
        "FedFac static trains and analyses once before round 1, which is not counted",
        f"ratio: to {name} of the same seed; {TOGETHER}",
        "runs that shared a busy machine make these ratios noisy",
    )
    return Table(f"Table 7. Time relative to {name}", values, blocks, (*said, *notes, *asked.paper.notes(grid)))


def ratio(r: Mapping[Any, Any]) -> str:
    if np.isfinite(r["ratio"]) and r["pooled_df"] < pooled.LEAST_DF:
        return f"{number(r['ratio'], 3)} (too few seeds)"
    around = f" [{r['ratio_low']:.3f}, {r['ratio_high']:.3f}]" if np.isfinite(r["ratio_low"]) else ""
    return number(r["ratio"], 3) + around


def main(argv: Sequence[str] | None = None) -> int:
    return command(__file__, __doc__, {"": time}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
