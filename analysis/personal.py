"""Does personalising pay, for whom, and is it known before? The questions of simulations/personal.md, by its rules.

python analysis/personal.py --runs runs/personal-cpu --out runs/tables/personal
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from _claims import claim, rank_correlation

from fedstat import _cli
from fedstat.results.tables import interval, number, p_value, plus_minus
from fedstat.stats import resampling
from fedstat.study import collect, leaderboard
from fedstat.study.leaderboard import Planned, planned
from fedstat.study.printed_tables import Table, require_writable

FILE = Path(__file__).resolve().parents[1] / "simulations" / "personal.toml"
MARGIN, FLOOR, HALF = 0.005, 0.003, 0.5
ROWS = {
    "fedavg": "FedAvg", "fedavg+": "FedAvg+", "fedavg+ epochs=0,1,2,3,5": "FedAvg+, early stopping",
    "fedavg+ rate=0.1,0.3,1": "FedAvg+, tuned rate", "fedavg-shrunken": "pooled B",
    "fedavg-shrunken held_out=halves": "B across halves", "fedavg-shrunken by=client": "B by client",
    "fedavg-shrunken by=layer": "B by layer", "fedper": "FedPer", "fedper+": "FedPer+",
    "fedfac-static, pa": "ν", "fedfac-static+, pa": "ν+", "fedfac-static, icc": "ICC", "fedfac-static+, icc": "ICC+",
    "random": "random", "random+": "random+",
}  # fmt: skip
"""Methods and prediction rules with the names that tables show, in their order."""

SPLIT = [("ICC", "random"), ("ICC+", "random+")]
SPLIT_BESIDE = [("ν", "random"), ("ν+", "random+"), ("ICC", "ν"), ("ICC+", "ν+")]
OTHERS = ("B across halves", "B by client", "B by layer", "FedAvg+, early stopping", "FedAvg+, tuned rate")
STEP_BESIDE = [(a, b) for b in ("FedAvg+", "pooled B") for a in OTHERS]
KEYS = (
    "pooled B: one for all, by active clients' validation samples; B across halves: by halves of training samples",
    "B by client: by each client's own validation samples; B by layer: from the probe",
    "ν, ICC: FedFac static, split by communality (principal axis) or by agreement (ICC2)",
    "random: a split of the same size; +: fine-tuned after the last round",
)


class Floor(NamedTuple):
    """Noise floor of a comparison, and a note on its origin."""

    value: float
    note: str


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/personal-cpu"), help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME-accuracy.csv, NAME-accuracy.md, ...")
    cli.add_argument("--config", type=Path, default=FILE, help="the grid's file (default: its own)")
    cli.add_argument(
        "--noise", type=Path, help="folder of some of the runs, computed with another --client-chunk: the noise floor"
    )
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    for name in ("accuracy", "answers", "profile") if args.out is not None else ():
        require_writable(Path(f"{args.out}-{name}"))
    runs = collect.collect(args.runs)
    plan = planned(collect.select(runs, ()), args.config)
    floor = noise_floor(runs, args.noise, len(plan.seeds))
    outcomes, shares, steps = leaderboard.gather(plan.grid, leaderboard.scores, leaderboard.shares, leaderboard.steps)
    data = named(outcomes, plan)
    tables = {"accuracy": accuracies(plan, data)}
    if len(plan.seeds) > 1:
        tables["answers"] = answers(plan, data, shares, floor)
    tables["profile"] = profile(plan, shares, steps)
    for name, table in tables.items() if args.out is not None else ():
        table.write(Path(f"{args.out}-{name}"))
    few = [] if len(plan.seeds) > 1 else ["questions not answered: too few seeds for any interval, means only"]
    print("\n\n\n".join([*(table.text() for table in tables.values()), *few]))


def named(data: pd.DataFrame, plan: Planned) -> pd.DataFrame:
    """Outcomes with the methods' names as shown, in the order of the file's settings and of ``ROWS``."""
    keys = [m + (f", {e}" if e else "") for m, e in zip(data["method"], data["estimator"], strict=True)]
    if unknown := set(keys) ^ set(ROWS):
        raise ValueError(f"the runs must hold the methods {list(ROWS)} and no others, but differ in {sorted(unknown)}")
    data = data.assign(method=[ROWS[key] for key in keys])
    places = [list(plan.scenarios), list(ROWS.values())]
    data["order"] = [
        (places[0].index(a), places[1].index(b)) for a, b in zip(data["scenario"], data["method"], strict=True)
    ]
    return data.sort_values(["order", "seed"], ignore_index=True).drop(columns=["order", "estimator"])


def noise_floor(runs: collect.Grid, again: Path | None, seeds: int) -> Floor:
    """The larger of 0.003 and twice the noise of one comparison over the root of the number of seeds."""
    if again is None:
        return Floor(
            FLOOR, f"noise floor: {FLOOR:g}, as set beforehand; the noise of computation itself was not measured"
        )
    found = leaderboard.repeated(runs, collect.collect(again))
    counts = found.groupby("method", sort=False)["difference"].agg(["std", "size"])
    if absent := {"fedavg", "fedavg+"} - set(counts.index):
        raise ValueError(f"{again} must hold FedAvg with FedAvg+ read out of it, but lacks {', '.join(sorted(absent))}")
    counts = counts.loc[["fedavg", "fedavg+"]]
    if counts["size"].min() < 2:
        raise ValueError(f"{again} must repeat at least 2 runs, but repeats {counts['size'].min()}")
    noise = float(counts["std"].max())
    floor = max(FLOOR, 2 * noise / math.sqrt(seeds))
    each = ", ".join(f"{ROWS[str(name)]} {sd:.4f}" for name, sd in counts["std"].items())
    return Floor(
        floor,
        f"noise floor: {floor:.4f}, the larger of {FLOOR:g} and 2 × {noise:.4f} / √{seeds}; standard deviation of the "
        f"difference between two computations of one run: {each} ({counts['size'].min()} runs)",
    )


def accuracies(plan: Planned, data: pd.DataFrame) -> Table:
    """Mean accuracies of all methods in all settings."""
    whole = (
        data.groupby(["method", "seed"], sort=False)["accuracy"].mean().reset_index().assign(scenario="all settings")
    )
    values = (
        pd.concat([data, whole]).groupby(["scenario", "method"], sort=False)["accuracy"].agg(["mean", "sem", "size"])
    )
    values = values.rename(columns={"sem": "std_error", "size": "seeds"}).reset_index()
    values["shown"] = [plus_minus(m, e, 3) for m, e in values[["mean", "std_error"]].to_numpy()]
    wide = values.pivot(index="method", columns="scenario", values="shown").loc[list(ROWS.values())]
    blocks: dict[str, list[str]] = {}
    for scenario in plan.scenarios:
        blocks.setdefault(scenario.partition(", ")[0], []).append(scenario)
    groups = {name: own for name, own in blocks.items() if len(own) > 1}
    groups["others"] = [own[0] for own in blocks.values() if len(own) == 1] + ["all settings"]
    shown = {
        name: wide[own].rename(columns={scenario: scenario.removeprefix(f"{name}, ") for scenario in own}).reset_index()
        for name, own in groups.items()
    }
    what = "accuracy of the clients' models after the last round, weighted by their test samples"
    said = (f"{what}; ±: standard error over seeds", *KEYS, *plan.notes, *collect.caption(plan.grid, 10_000))
    return Table("Test accuracy of what was run and read out", values.drop(columns="shown"), shown, said)


def answers(plan: Planned, data: pd.DataFrame, shares: pd.DataFrame, floor: Floor) -> Table:
    """The three questions: comparisons, and conclusions by the rules of the page."""
    split = judged(leaderboard.over_settings(data, SPLIT), "conf", floor)
    split_beside = judged(leaderboard.over_settings(data, SPLIT_BESIDE), "conf", floor)
    step = judged(leaderboard.over_settings(data, [("pooled B", "FedAvg+")]), "conf", floor)
    step_beside = judged(leaderboard.over_settings(data, STEP_BESIDE), "sim_conf", floor)
    by_layer = judged(leaderboard.over_settings(data, [("B by layer", "pooled B")]), "conf", floor)
    each = {
        pair: judged(leaderboard.by_setting(data, pair), "sim_conf", floor) for pair in (*SPLIT, ("pooled B", "FedAvg"))
    }
    gain = judged(leaderboard.by_setting(data, ("FedAvg+", "FedAvg")), "sim_conf", floor)
    predicted = predictions(shares, gain)
    conclusions = (
        *(f"1: {sentence(row)}" for row in split.to_dict("records")),
        *(f"2: {sentence(row)}" for row in step.to_dict("records")),
        f"2: {never_worse(each['pooled B', 'FedAvg'], floor)}",
        *(f"3: {line}" for line in predicts(predicted)),
        *(f"3: {sentence(row)}" for row in by_layer.to_dict("records")),
    )
    blocks = {
        "Answers": pd.DataFrame({"by the rules of simulations/personal.md": conclusions}),
        "1. Is a split by agreement better than a random one of its size? Over settings": lines(split),
        "1, secondary": lines(split_beside),
        "1, by setting (intervals hold together)": beside({f"{a} − {b}": each[a, b] for a, b in SPLIT}),
        "2. Is adaptive B better than FedAvg+, and never worse than FedAvg? Over settings": lines(step),
        "2, by setting (intervals hold together)": beside({"pooled B − FedAvg": each["pooled B", "FedAvg"]}),
        "2, secondary (intervals hold together)": lines(step_beside),
        "3. Does the profile of the probe predict which wins?": predicted_lines(predicted),
        "3, B by layer and pooled B, over settings": lines(by_layer),
    }
    parts = {
        "1": split, "1 secondary": split_beside, "2": step, "2 secondary": step_beside, "3": predicted,
        "3 by layer": by_layer, **{f"{a} − {b} by setting": found for (a, b), found in each.items()},
    }  # fmt: skip
    values = pd.concat([found.assign(question=name) for name, found in parts.items()], ignore_index=True)
    together = "of settings and of the secondary comparisons of 2 they hold together (Bonferroni)"
    rules = (
        floor.note,
        f"[95 %]: Student's intervals, seeds as the sample; {together}; over settings: their mean in a seed",
        "better (worse): the interval lies above (below) 0 and the difference exceeds the noise floor",
        f"the same: the interval lies within ±{MARGIN:g}",
        "below the noise floor: the interval leaves out 0, but for a difference that is too small to count",
        "questions, comparisons and rules were written down before the runs: simulations/personal.md",
    )
    last = (*KEYS, *plan.notes, *collect.caption(plan.grid, 10_000))
    return Table("Three questions, answered by the rules of simulations/personal.md", values, blocks, (*rules, *last))


def judged(found: pd.DataFrame, kind: str, floor: Floor) -> pd.DataFrame:
    """Comparisons with ``low`` and ``high``, the limits of a kind of interval, and their ``conclusion``."""
    found = found.assign(low=found[f"{kind}_low"], high=found[f"{kind}_high"])
    limits = found[["difference", "low", "high"]].to_numpy(dtype=float)
    return found.assign(conclusion=[claim(*row, floor=floor.value, margin=MARGIN) for row in limits])


def lines(found: pd.DataFrame) -> pd.DataFrame:
    limits = found[["difference", "low", "high"]].to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "first − second": found["comparison"],
            "difference [95 %]": [interval(*row) for row in limits],
            "the first is": found["conclusion"],
        }
    )


def beside(found: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Comparisons in every setting, side by side."""
    shown: dict[str, Any] = {"setting": next(iter(found.values()))["scenario"]}
    for name, rows in found.items():
        shown[f"{name} [95 %]"] = [interval(*row) for row in rows[["difference", "low", "high"]].to_numpy(dtype=float)]
        shown[f"{name.partition(' − ')[0]} is"] = rows["conclusion"]
    return pd.DataFrame(shown)


def sentence(row: Mapping[Any, Any]) -> str:
    """Conclusion of a comparison in words."""
    first, _, second = str(row["comparison"]).partition(" − ")
    words = {
        "better": f"{first} is better than {second}",
        "worse": f"{first} is worse than {second}",
        "the same": f"{first} is the same as {second}, within ±{MARGIN:g}",
        "below the noise floor": f"{first} differs from {second} by less than the noise floor",
        "inconclusive": f"inconclusive between {first} and {second}",
    }
    return f"{words[row['conclusion']]} ({interval(row['difference'], row['low'], row['high'])})"


def never_worse(found: pd.DataFrame, floor: Floor) -> str:
    """Whether pooled B is never worse than FedAvg, and where it is worse."""
    worse = found.loc[found["high"] < 0]
    small = worse.loc[worse["difference"].abs() <= floor.value, "scenario"]
    parts = [f"worse in {'; '.join(worse['scenario'].drop(small.index))}"] if len(worse) > len(small) else []
    parts += [f"below 0, but by less than the noise floor, in {'; '.join(small)}"] if len(small) else []
    open_ = found.loc[~(found["low"] > -MARGIN), "scenario"]
    if not len(open_):
        parts.insert(0, f"never worse: in every setting the lower limit is above -{MARGIN:g}")
    elif not parts or len(open_) > len(worse):
        parts.append(f"not shown to be never worse: the lower limit is not above -{MARGIN:g} in {'; '.join(open_)}")
    return f"pooled B and FedAvg: {'; '.join(parts)}"


def predictions(shares: pd.DataFrame, gain: pd.DataFrame) -> pd.DataFrame:
    """Personal shares of the last hidden layer and the head, means over seeds, and the gain from fine-tuning."""
    from_top = shares.groupby(["scenario", "seed"])["place"].transform("max") - shares["place"]
    mean = {
        name: shares[from_top == k].groupby("scenario")["reliability"].mean()
        for name, k in (("hidden", 1), ("head", 0))
    }
    found = gain.assign(**{name: gain["scenario"].map(x) for name, x in mean.items()})
    found["differs"] = found["conclusion"].isin(["better", "worse"])
    for name in mean:
        found[f"{name}_right"] = (found[name] > HALF) == (found["difference"] > 0)
    return found


def predicted_lines(found: pd.DataFrame) -> pd.DataFrame:
    def told(row: Mapping[Any, Any], name: str) -> str:
        return "–" if not row["differs"] else "right" if row[f"{name}_right"] else "wrong"

    rows = found.to_dict("records")
    return pd.DataFrame(
        {
            "setting": found["scenario"],
            "FedAvg+ − FedAvg [95 %]": [interval(r["difference"], r["low"], r["high"]) for r in rows],
            "share of last hidden layer": [number(r["hidden"], 3) for r in rows],
            "prediction": [told(r, "hidden") for r in rows],
            "share of head": [number(r["head"], 3) for r in rows],
            "its prediction": [told(r, "head") for r in rows],
        }
    )


def predicts(found: pd.DataFrame) -> list[str]:
    """How often a layer's share predicts the sign of the gain, and their rank correlation."""
    said, decided = [], found[found["differs"]]
    for name, words in (("hidden", "the last hidden layer"), ("head", "the head")):
        ranks = rank_correlation(found[name], found["difference"])
        right = f"{int(decided[f'{name}_right'].sum())} of {len(decided)} settings in which FedAvg+ differs from FedAvg"
        r = f"{ranks.r:+.2f}" if math.isfinite(ranks.r) else "–"
        said.append(
            f"the reliability of {words} is right in {right} (of {len(found)} in all); Spearman's r = {r}, "
            f"permutation p = {p_value(ranks.p_value)}"
        )
    return said


def profile(plan: Planned, shares: pd.DataFrame, steps: pd.DataFrame) -> Table:
    """Personal share by layer and setting (last ten rounds, first and last probed round), and B."""
    chosen = steps.pivot_table(index=["scenario", "layer"], columns="rule", values="step")
    rows = []
    ordered = shares.assign(at=shares["scenario"].map(plan.scenarios.index))
    for (_, _, scenario, layer), own in ordered.groupby(["at", "place", "scenario", "layer"]):
        share, change = resampling.mean(own["reliability"]), resampling.mean(own["last"] - own["first"])
        at = str(scenario), str(layer)
        pooled_b, own_b = (chosen[name].loc[at] for name in ("fedavg-shrunken", "fedavg-shrunken by=layer"))
        rows.append(
            {
                "scenario": scenario, "layer": layer, "seeds": share.n,
                "reliability": share.mean, "low": share.low, "high": share.high,
                "first_round": own["first_round"].iloc[0], "first": own["first"].mean(),
                "last_round": own["last_round"].iloc[0], "last": own["last"].mean(),
                "change": change.mean, "change_low": change.low, "change_high": change.high,
                "pooled_b": pooled_b, "b_by_layer": own_b,
            }
        )  # fmt: skip
    values = pd.DataFrame(rows)
    blocks = {str(scenario): profile_lines(own) for scenario, own in values.groupby("scenario", sort=False)}
    said = (
        "share: reliability, clients' differences beyond noise, mean over seeds with Student's interval",
        "last − first: share in the last probed round less that in the first, within seeds",
        "pooled B, B by layer: steps taken after the last round, means over clients and seeds",
        *plan.notes, *collect.caption(plan.grid, 10_000),
    )  # fmt: skip
    return Table("How personal each layer is, by FedAvg's probe", values, blocks, said)


def profile_lines(own: pd.DataFrame) -> pd.DataFrame:
    """Block of one setting."""
    rows = own.to_dict("records")
    first, last = rows[0]["first_round"], rows[0]["last_round"]
    return pd.DataFrame(
        {
            "layer": own["layer"],
            "share, last ten rounds [95 %]": [around(r["reliability"], r["low"], r["high"]) for r in rows],
            f"round {first}": [number(r["first"], 3) for r in rows],
            f"round {last}": [number(r["last"], 3) for r in rows],
            "last − first [95 %]": [interval(r["change"], r["change_low"], r["change_high"], 3) for r in rows],
            "pooled B": [number(r["pooled_b"], 2) for r in rows],
            "B by layer": [number(r["b_by_layer"], 2) for r in rows],
        }
    )


def around(mean: float, low: float, high: float) -> str:
    return interval(mean, low, high, 3, sign=False)


if __name__ == "__main__":
    sys.exit(main())
