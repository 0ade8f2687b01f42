"""All methods side by side: accuracy, costs and ranks over settings, every method with its tuned learning rate.

python analysis/leaderboard.py --runs runs/all-quick --out runs/tables-quick/leaderboard
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from _output import Table, require_writable
from _within_seeds import OVERALL, TOGETHER, add_overall, compare_settings, table_line

from fedstat import _cli
from fedstat.fl.losses import Score
from fedstat.results.tables import megabytes, number, p_value, plus_minus
from fedstat.stats.ranking import Friedman, critical_difference
from fedstat.study import collect, grid, leaderboard
from fedstat.study.collect import title_of
from fedstat.study.run_metrics import score_in

FILE = Path(__file__).resolve().parents[1] / "simulations" / "all.toml"
REFERENCES = ("fedavg+", "fedfac-dynamic")
ENOUGH = 0.95
JUDGED = (
    "{}: on test samples, mean over clients weighted by their samples, in the round that is best on validation "
    "samples; ±: standard error over seeds"
)


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/all-quick"), help="folder of the grid's stores")
    cli.add_argument("--config", type=Path, default=FILE, help="the grid's file (default: its own)")
    cli.add_argument("--scale", help="the runs' scale (default: the end of the folder's name)")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME-ranks.csv, NAME-ranks.md, ...")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    names = ("ranks", "settings", "pairs")
    for name in names if args.out is not None else ():
        require_writable(Path(f"{args.out}-{name}"))
    tuning = grid.tuning(args.config, scale=args.scale or args.runs.name.rpartition("-")[2])
    runs = collect.collect(args.runs, differ=("lr",))
    runs = leaderboard.chosen_rates(runs, tuning.seeds or sorted(set(runs.table["seed"])))
    found, courses = leaderboard.measure(runs)
    said = budget(tuning)
    made = ranks(runs, found, said), settings(runs, found, courses, said), pairs(runs, found, said)
    tables = dict(zip(names, made, strict=True))
    for name, table in tables.items() if args.out is not None else ():
        table.write(Path(f"{args.out}-{name}"))
    print("\n\n\n".join(table.text() for table in tables.values()))


def judged(score: Score) -> str:
    """What the scores are."""
    return JUDGED.format(score.title)


def where(runs: collect.Grid) -> list[str]:
    """Scale, seeds and commits; what averages ten rounds is not shown here."""
    return [note for note in collect.caption(runs, 10_000) if not note.startswith("fewer than")]


def budget(tuning: grid.Tuning) -> str:
    """How methods were tuned, in words."""
    rates = tuning.candidates["lr"]
    seeds = f"seed {', '.join(map(str, tuning.seeds))}" if tuning.seeds else "all seeds"
    return (
        f"every method has a learning rate of its own for each setting, the best of {len(rates)} "
        f"({', '.join(f'{rate:g}' for rate in rates)}) on validation samples of {seeds}; its other settings are those "
        "of its paper, and no other setting was tuned for any method"
    )


def ranks(runs: collect.Grid, found: pd.DataFrame, said: str) -> Table:
    """Mean ranks, best first, with scores by setting."""
    wide, test, absent = leaderboard.ranked(found)
    score = score_in(found)
    ranked = wide.rank(axis=1, ascending=score.is_error)
    mean = pd.Series(test.mean_ranks, wide.columns) if test else ranked.mean()
    values = wide.T.assign(mean_rank=mean).sort_values("mean_rank", kind="stable")
    shown = [
        {"method": title_of(str(name)), "mean rank": number(row["mean_rank"], 1)}
        | {str(scenario): number(row[scenario], 3) for scenario in wide.index}
        for name, row in values.iterrows()
    ]
    notes = [
        judged(score), f"mean rank: over {len(wide)} settings, by {score.title}, mean over seeds; 1 is best",
        *conclusion(test, wide), said,
    ]  # fmt: skip
    notes += [f"without a finished run in every setting, not ranked: {', '.join(map(title_of, absent))}"] * bool(absent)
    return Table(
        "Methods by their mean rank over settings", values.reset_index(), {"Best first": pd.DataFrame(shown)},
        (*notes, *where(runs)),
    )  # fmt: skip


def conclusion(test: Friedman | None, wide: pd.DataFrame) -> list[str]:
    """Friedman's test and Nemenyi's critical difference, and what they can and cannot say."""
    if test is None or math.isnan(test.statistic):
        return ["too few settings or methods for a test of ranks"]
    n, k = wide.shape
    apart = critical_difference(k, n)
    reach = float(test.mean_ranks.max() - test.mean_ranks.min())
    how = "all permutations" if test.exact else "random permutations"
    differ = f"all methods ranked alike has p {p_value(test.p_value)} by {how} of ranks within settings"
    pairs = (
        f"only methods {apart:.1f} or more mean ranks apart are shown to differ"
        if reach >= apart
        else f"no two methods are {apart:.1f} mean ranks apart, so no single pair is shown to differ"
    )
    what = "blocks are settings, for seeds of one setting are no further data sets"
    return [
        f"Friedman's test over {n} settings ({what}): {differ} (F {test.f:.2f})",
        f"Nemenyi, all pairs at 95 %: {pairs}",
        "settings of one data set are not independent of one another, so that the test knows less than it claims",
    ]


def settings(runs: collect.Grid, found: pd.DataFrame, courses: pd.DataFrame, said: str) -> Table:
    """What each method reaches in each setting, and what that costs."""
    targets, score = enough(found), score_in(found)
    reached = leaderboard.to_reach(courses, targets)
    by = found.groupby(["scenario", "method"], sort=False)
    values = by[[score.name, "worst", "unseen", "optimism", "seconds", "kept"]].mean()
    values["std_error"] = by[score.name].sem()
    values["lr"], values["unseen_rule"] = by["lr"].first(), by["unseen_rule"].first()
    values = values.reset_index().merge(reached, on=["scenario", "method"], how="left")
    blocks = {}
    for scenario, rows in values.groupby("scenario", sort=False):
        target = f"to {targets[str(scenario)]:.3f}" if math.isfinite(targets[str(scenario)]) else "to –"
        blocks[str(scenario)] = pd.DataFrame(line(row, target, score) for row in rows.to_dict("records"))
    new = "as the method's own paper has them predict: the first of its rules, unseen_rule in the CSV"
    share = 100 / ENOUGH if score.is_error else 100 * ENOUGH
    target = f"{share:.3g} % of {title_of(REFERENCES[0])}'s in this setting"
    side = "10 % above: {} that a tenth of the clients exceed" if score.is_error else (
        "10 % below: {} that a tenth of the clients stay below"
    )  # fmt: skip
    notes = (
        judged(score),
        f"{side.format(score.title)} in that round",
        f"new clients: {score.title} of clients that did not train, {new}",
        f"to X: sent and received by all clients until the mean {score.title} is X, {target}; k of n: seeds that do",
        "s/round: median, beside other processes, so that small differences mean nothing",
        "kept: what all clients and the server keep from round to round, as stored to resume the run",
        f"optimism: by how much the best test {score.title} of any round, as papers report it, is better",
        said,
    )
    return Table(f"{score.title[0].upper()}{score.title[1:]} and its price", values, blocks, (*notes, *where(runs)))


def enough(found: pd.DataFrame) -> dict[str, float]:
    """Score to be reached in each setting: a share of FedAvg+'s accuracy; its RMSE, divided by the share."""
    score = score_in(found)
    share = 1 / ENOUGH if score.is_error else ENOUGH
    mean = found[found["method"] == REFERENCES[0]].groupby("scenario")[score.name].mean()
    return {str(scenario): share * float(mean.get(scenario, math.nan)) for scenario in dict.fromkeys(found["scenario"])}


def line(row: Mapping[Any, Any], target: str, score: Score) -> dict[str, str]:
    """Line of a setting's table."""
    missed = "never" if not row["reached"] else f"{row['reached']} of {row['seeds']}"
    return {
        "method": title_of(str(row["method"])),
        score.title: plus_minus(row[score.name], row["std_error"], 3),
        "10 % above" if score.is_error else "10 % below": number(row["worst"], 3),
        "unseen clients": number(row["unseen"], 3),
        target: megabytes(row["bytes"]) if math.isfinite(row["bytes"]) else missed,
        "s/round": number(row["seconds"], 3),
        "kept": megabytes(row["kept"]),
        "optimism": number(row["optimism"], 3),
        "lr": f"{row['lr']:g}",
    }


def pairs(runs: collect.Grid, found: pd.DataFrame, said: str) -> Table:
    """Differences within seeds from each reference, over all settings and in how many of them."""
    blocks, parts, notes, score = {}, [], [], score_in(found)
    for reference in REFERENCES:
        if reference not in set(found["method"]):
            notes.append(f"{title_of(reference)} was not run, so nothing is compared with it")
            continue
        values, told = compare_settings(found, runs, score.name, reference)
        values, told = add_overall(values, told, found, score.name, reference)
        parts.append(values.assign(reference=reference))
        notes += [note for note in told if note not in notes]
        over = values["scenario"] == "all settings"
        each = values[~over] if over.any() else values
        clear = each.assign(above=each["sim_conf_low"] > 0, below=each["sim_conf_high"] < 0)
        counts = clear.groupby("method")[["above", "below"]].sum()
        shown = values[over] if over.any() else values
        blocks[f"Less {title_of(reference)}"] = pd.DataFrame(
            table_line(row, score.title, reference)
            | {"above in": str(counts["above"][row["method"]]), "below in": str(counts["below"][row["method"]])}
            for row in shown.to_dict("records")
        )
    n = found["scenario"].nunique()
    counted = f"above in, below in: of {n} settings, those whose interval for all methods together leaves out 0"
    meaning = (judged(score), TOGETHER, OVERALL, counted, said)
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return Table("Differences within seeds, for these settings", table, blocks,
                 (*meaning, *notes, *where(runs)))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
