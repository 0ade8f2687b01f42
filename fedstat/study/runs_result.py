"""Result of comparing runs: scenarios, costs, missing runs, and selected settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat._utils.lazy import pd
from fedstat.results import ComparisonResult
from fedstat.results.base import Caution, aligned, caution_of_few, wrapped
from fedstat.results.ranks import difference
from fedstat.results.tables import NONE, count, megabytes, number, plus_minus
from fedstat.study.run_metrics import is_error, title_of


@dataclass(frozen=True, eq=False, repr=False)
class RunsResult(ComparisonResult):
    """Runs compared within seeds, as :func:`fedstat.study.compare_runs` returns it.

    ``table`` and the other fields of :class:`fedstat.results.ComparisonResult` are over all scenarios: differences
    are means over scenarios within each seed, and ``n`` is the number of seeds that all scenarios have.

    Attributes
    ----------
    accuracy : str
        What is compared, in words.
    scenarios : mapping from str to ComparisonResult
        The comparison in each scenario, within seeds.
    costs : DataFrame
        One row per scenario and method, means over seeds: ``scenario``, ``method``, ``n`` (seeds); ``q10``, accuracy
        that a tenth of the clients stay below (error that a tenth exceed); ``bytes_up``, ``bytes_down``, sums over all
        rounds and clients;
        ``seconds``, median time of a round.
    measure : str
        Name of the measure that is compared; other measures replace accuracy in this description.
    missing : tuple of str
        Runs that are not compared, with the reason: failed, diverged or unfinished.
    outdated : tuple of str
        Runs that are compared although files of the user have changed since, with the names of these files.
    selected : tuple of str
        Sentences on tuned folders: the selected settings, and the number of candidates that are left out.
    left_out : tuple of str
        Sentences on other runs of tuned folders that are left out, or missing.
    """

    accuracy: str
    scenarios: Mapping[str, ComparisonResult]
    costs: pd.DataFrame
    measure: str = "accuracy"
    missing: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()
    selected: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        side = "exceed" if is_error(self.measure) else "stay below"
        head = (
            f"{self._title}, {self.accuracy}: mean ± standard error over seeds;",
            f"difference from {self.reference} within seeds [{100 * self.level:g} %, rows of a block together];",
            f"{self._worst}: {self._noun} that a tenth of the clients {side};",
            "sent: up and down, in all rounds",
            *self.selected,
        )
        parts = ["\n".join(map(wrapped, head)), *(self._block(name) for name in self.scenarios)]
        if len(self.scenarios) > 1 and self.table["difference"].notna().any():
            rows = [
                {
                    "": x["method"],
                    "difference": _difference(x, self.reference, self._digits),
                    "seeds": str(x["n"] or ""),
                }
                for x in map(self._divided, self.table.to_dict("records"))
            ]
            parts.append(f"all scenarios (means within each seed)\n{aligned(pd.DataFrame(rows))}")
        cautions = "\n".join(wrapped(str(caution)) for caution in self.cautions())
        return "\n\n".join(filter(None, [*parts, cautions]))

    @property
    def _title(self) -> str:
        title = title_of(self.measure)
        return title[0].upper() + title[1:] + self._divisor + " (smaller is better)" * is_error(self.measure)

    @property
    def _noun(self) -> str:
        return {"accuracy": "accuracy", "rmse": "RMSE"}.get(self.measure, "value")

    @property
    def _worst(self) -> str:
        return "10 % above" if is_error(self.measure) else "10 % below"

    @property
    def _column(self) -> str:
        if self.measure.partition("_")[0] in ("accuracy", "class"):
            return "accuracy"
        return title_of(self.measure).removeprefix("test ") + self._divisor

    def cautions(self) -> list[Caution]:
        """Return cautions on runs that are missing, on few seeds, and on runs of tuned folders that are left out."""
        cautions = [Caution("Missing runs", caution_of_missing(self.missing), severe=True)] if self.missing else []
        seeds = [int(comparison.table["n_values"].max()) for comparison in self.scenarios.values()]
        text = "differences between methods of one seed have no interval, and may be chance"
        few = [Caution("One seed", text)] if max(seeds) == 1 else caution_of_few(min(seeds), "seed")
        if self.outdated:
            n = count(len(self.outdated), "run")
            text = f"{n} made with another version of the files in brackets: {_few(self.outdated, 'outdated')}"
            cautions.append(Caution("Outdated runs", text))
        return [*cautions, *few, *(Caution("Left out", sentence) for sentence in self.left_out)]

    def _caption(self) -> list[str]:
        seeds = sorted({int(n) for comparison in self.scenarios.values() for n in comparison.table["n_values"]})
        n_seeds = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))
        return [
            f"{self._title}, {self.accuracy}: mean ± standard error over seeds (n = {n_seeds})",
            f"Difference from {self.reference} within seeds, [{self._ci}] simultaneous over methods",
        ]

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        blocks = [self._rows(name, digits) for name in self.scenarios]
        if len(blocks) > 1:
            for name, block in zip(self.scenarios, blocks, strict=True):
                block.insert(0, "scenario", name)
        return pd.concat(blocks, ignore_index=True).fillna(NONE).rename(columns={"": "method"})

    def _block(self, scenario: str) -> str:
        """Return the print of one scenario."""
        seeds = dict.fromkeys(self.scenarios[scenario].table["n_values"])
        head = "\nmethods lack seeds: each difference is over the seeds of both"
        head = head if len(seeds) > 1 else f" ({count(next(iter(seeds)), 'seed')})"
        return f"{scenario}{head}\n{aligned(self._rows(scenario))}"

    @property
    def _largest(self) -> float:
        """Largest mean of an error, which has units; 1 for other measures."""
        means = [float(np.nanmax(comparison.table["mean"].abs())) for comparison in self.scenarios.values()]
        return max(means) or 1.0 if is_error(self.measure) else 1.0

    @property
    def _power(self) -> int:
        """Power of ten by which the print divides errors: 0 for errors of ordinary size, else a multiple of 3."""
        return 0 if 0.01 <= self._largest < 10_000 else 3 * int(np.floor(np.log10(self._largest) / 3))

    @property
    def _divisor(self) -> str:
        return f" / 1e{self._power}" if self._power else ""

    @property
    def _digits(self) -> int:
        """Decimals of the print: four; of errors, such that the largest has four digits."""
        return int(4 if not is_error(self.measure) else 3 - np.floor(np.log10(self._largest)) + self._power)

    def _rows(self, scenario: str, digits: int | None = None) -> pd.DataFrame:
        """Return accuracies, differences and costs in one scenario, and numbers of seeds if they differ."""
        costs: dict[Any, Any] = self.costs[self.costs["scenario"] == scenario].set_index("method").to_dict("index")
        table, digits = self.scenarios[scenario].table, self._digits if digits is None else digits
        has_seeds, most = table["n_values"].nunique() > 1, table["n_values"].max()
        rows = [
            {
                "": x["method"],
                self._column: plus_minus(x["mean"], x["std_error_mean"], digits),
                "difference": _difference(x, self.reference, digits),
                self._worst: number(costs[x["method"]]["q10"] / 10.0**self._power, digits),
                "sent": megabytes(costs[x["method"]]["bytes_up"] + costs[x["method"]]["bytes_down"]),
                "s/round": number(costs[x["method"]]["seconds"], 3),
            }
            | ({"seeds": f"{x['n_values']} of {most}"} if has_seeds else {})
            for x in map(self._divided, table.to_dict("records"))
        ]
        return pd.DataFrame(rows)

    def _divided(self, row: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a row of a table with the values that have units divided by the power of ten of the print."""
        names = ("mean", "std_error_mean", "difference", "sim_conf_low", "sim_conf_high")
        return {**row, **{name: row[name] / 10.0**self._power for name in names if name in row}}

    def summary(self) -> str:
        """Return the comparison, notes on skipped runs, and the origin of the numbers."""
        notes = [wrapped(f"  {note}") for note in self.notes]
        return "\n".join([repr(self), "", *notes])


def caution_of_missing(missing: Sequence[str]) -> str:
    """Name runs that are not compared, at most five.

    Examples
    --------
    >>> caution_of_missing(["a, fedavg, seed 0: diverged"])
    '1 run is not compared: a, fedavg, seed 0: diverged'
    """
    return (
        f"{count(len(missing), 'run')} {'is' if len(missing) == 1 else 'are'} not compared: {_few(missing, 'missing')}"
    )


def _few(texts: Sequence[str], field: str) -> str:
    more = f"; and {len(texts) - _MOST_NAMED} more, listed in .{field}" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


_MOST_NAMED = 5


def _difference(row: Mapping[Any, Any], reference: str, digits: int) -> str:
    return "reference" if row["method"] == reference else difference(row, digits=digits)
