"""What does differential privacy cost in accuracy, and what does it leave of FedFac's split?

python analysis/privacy.py --runs runs/privacy-quick --out runs/tables/privacy
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _output import make

from fedstat import _cli, attack, open_run
from fedstat.results.tables import interval, number
from fedstat.stats import resampling
from fedstat.stats.split import adjusted_rand, prop_unchanged
from fedstat.study import collect, experiment
from fedstat.study.collect import Grid, ordered, title_of
from fedstat.study.printed_tables import Table, require_writable
from fedstat.study.run_settings import OF_AGGREGATOR
from fedstat.study.run_table import span

SEEDS = ["scenario", "method", "noise"]
MOST = 1e4
"""An ε above which it is not worth a number."""


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/privacy-quick"), help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME.csv, NAME.md, ...")
    cli.add_argument("--attack", action="store_true", help="also attack FedAvg's runs of the first seed, trained again")
    cli.add_argument("--clients", type=int, default=8, help="victims of --attack (default 8)")
    cli.add_argument("--images", type=int, default=2, help="images of each victim (default 2)")
    cli.add_argument("--data-dir", type=Path, help="folder with the data sets' files, for --attack")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    builds = {"": study} | ({"-attack": partial(attacks, args=args)} if args.attack else {})
    for suffix in builds if args.out is not None else ():
        require_writable(Path(f"{args.out}{suffix}"))
    grid = collect.collect(args.runs, differ=OF_AGGREGATOR)
    print(make({suffix: partial(build, grid) for suffix, build in builds.items()}, args.out))


def study(grid: Grid) -> Table:
    """Accuracy and recovery of the split by method and noise, beside the run of the same seed without privacy."""
    found = pd.concat([recovery(grid), read(grid)], axis=1)
    rows = []
    for (scenario, method, noise), own in found.groupby(SEEDS, sort=False):
        row: dict[str, Any] = {"scenario": scenario, "method": method, "noise": noise, "seeds": len(own)}
        row |= {"epsilon": own["epsilon"].mean(), "delta": own["delta"].iloc[0]}
        for name in ("accuracy", "cost", "rand", "same"):
            mean = resampling.mean(own[name].dropna())
            row |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}
        rows.append(row)
    values = pd.DataFrame(rows)
    places = ordered(values["method"])
    values = values.sort_values(
        SEEDS, key=lambda x: x.map(places.index) if x.name == "method" else x, ignore_index=True
    )
    blocks = {str(scenario): lines(own) for scenario, own in values.groupby("scenario", sort=False)}
    last = span(int(grid.table["rounds"].min()))
    rounds = "the last round" if last == 1 else f"the last {last} rounds"
    notes = (
        "σ: noise multiplier of updates and moments; the least stands for clipping alone",
        "ε: after the last round, FedFac's moments included; upper bound of the Rényi accountant",
        "accuracy: of the clients' models in the last evaluated round, weighted by their test samples",
        "[95 %]: Student's intervals, seeds as the sample; − not private: differences within seeds",
        f"adjusted Rand, same state: the split against that of its seed's run without privacy, mean over {rounds}",
        "of two splits by chance, of half of the units each, adjusted Rand 0 and same state one half are expected",
    )
    title = "Differential privacy of clients: accuracy, and what is left of the split"
    return Table(title, values, blocks, (*notes, *collect.caption(grid, 10_000)))


def read(grid: Grid) -> pd.DataFrame:
    """Of every run its accuracy, less that of the run of its seed without privacy, and what it has spent."""
    rows = []
    for path, accuracy in zip(grid.table["path"], grid.table["final"], strict=True):
        noted, metrics = experiment.settings_of(path), open_run(path)["metrics"].to_dataset()
        rows.append(
            {
                "noise": noted.get("noise_multiplier") or 0.0,
                "delta": noted.get("delta") or math.nan,
                "epsilon": float(metrics["epsilon"][-1]) if "epsilon" in metrics else math.nan,
                "accuracy": accuracy,
            }
        )
    found = pd.concat([grid.table[["scenario", "method", "seed"]], pd.DataFrame(rows)], axis=1)
    plain = found[found["noise"] == 0].set_index(["scenario", "method", "seed"])["accuracy"]
    keys = pd.MultiIndex.from_frame(found[["scenario", "method", "seed"]])
    found["cost"] = found["accuracy"] - plain.reindex(keys).to_numpy()
    return found


def recovery(grid: Grid) -> pd.DataFrame:
    """Agreement of every run's split with that of the run of its seed without privacy; NaN where nothing is split."""
    keys = list(grid.table[["scenario", "method", "seed"]].itertuples(index=False, name=None))
    private = [bool(experiment.settings_of(p).get("noise_multiplier")) for p in grid.table["path"]]
    splits = [split(path) for path in grid.table["path"]]
    plain = {key: own for key, own, hidden in zip(keys, splits, private, strict=True) if not hidden}
    rows = []
    for key, own in zip(keys, splits, strict=True):
        there = plain.get(key)
        rows.append({"rand": math.nan, "same": math.nan} if own is None or there is None else agreement(own, there))
    return pd.DataFrame(rows)


def split(path: str) -> np.ndarray | None:
    """Which units are shared in the last rounds (round, unit), of all analysed layers; None if nothing is split."""
    run = open_run(path)
    layers = [node["shared"].to_numpy() for node in run["split"].children.values()]
    whole = np.concatenate([one for one in layers if not one.all() and one.any()] or [np.ones((1, 1), bool)], axis=1)
    return None if whole.all() else whole[-span(len(whole)) :]


def agreement(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Of two splits, means over rounds."""
    return {"rand": float(np.mean(adjusted_rand(a, b))), "same": float(np.mean(prop_unchanged(a, b)))}


def lines(found: pd.DataFrame) -> pd.DataFrame:
    """Block of one setting."""
    rows = found.to_dict("records")

    def shown(row: Mapping[Any, Any], name: str, *, sign: bool = False) -> str:
        return interval(row[name], row[f"{name}_low"], row[f"{name}_high"], 3, sign=sign)

    def differs(row: Mapping[Any, Any], name: str, *, sign: bool = False) -> str:
        return shown(row, name, sign=sign) if row["noise"] else "–"

    return pd.DataFrame(
        {
            "method": [title_of(r["method"]) for r in rows],
            "σ": [number(r["noise"], 4).rstrip("0").rstrip(".") if r["noise"] else "not private" for r in rows],
            "ε": ["–" if not r["noise"] else "∞" if r["epsilon"] > MOST else f"{r['epsilon']:.1f}" for r in rows],
            "accuracy [95 %]": [shown(r, "accuracy") for r in rows],
            "− not private [95 %]": [differs(r, "cost", sign=True) for r in rows],
            "adjusted Rand [95 %]": [differs(r, "rand") for r in rows],
            "same state [95 %]": [differs(r, "same") for r in rows],
        }
    )


def attacks(grid: Grid, args: argparse.Namespace) -> Table:
    """Deep leakage from gradients on what FedAvg releases of one client, by noise; the first seed."""
    parts = []
    for scenario in collect.scenarios(grid):
        own = grid.table[(grid.table["scenario"] == scenario) & (grid.table["method"] == "fedavg")]
        paths = own.loc[own["seed"] == own["seed"].min(), "path"].tolist()
        noise = {p: experiment.settings_of(p).get("noise_multiplier") or 0.0 for p in paths}
        paths.sort(key=noise.__getitem__)
        result = attack.leakage(paths, rounds=[1], clients=args.clients, images=args.images, labels="given",
                                data_dir=args.data_dir)  # fmt: skip
        parts.append(result.augment().assign(scenario=scenario, noise=[noise[p] for p in paths]))
    values = pd.concat(parts, ignore_index=True)
    blocks = {
        str(scenario): pd.DataFrame(
            {
                "σ": [number(x, 4).rstrip("0").rstrip(".") if x else "not private" for x in rows["noise"]],
                "PSNR, dB [95 %]": [
                    interval(*limits, 2, sign=False)
                    for limits in zip(rows["estimate"], rows["conf_low"], rows["conf_high"], strict=True)
                ],
                "of the class's mean image": [number(x, 2) for x in rows["class_mean_psnr"]],
                "of other clients' images": [number(x, 2) for x in rows["other"]],
                "conclusion": rows["conclusion"],
            }
        )
        for scenario, rows in values.groupby("scenario", sort=False)
    }
    said = (
        f"images of {args.clients} clients, {args.images} each, labels given, one local step after round 1",
        "the attacker knows all that the other clients sent, and so has the victim's clipped update with the noise",
    )
    return Table("Deep leakage from FedAvg's releases, by noise", values, blocks, said)


if __name__ == "__main__":
    sys.exit(main())
