"""Where the numbers of a table or figure come from: scale, seeds, commits, and what is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstat.study import rules
from fedstat.study.collect import Grid, labels
from fedstat.study.show import ordered, title_of


def origin(grid: Grid) -> list[str]:
    """Notes for a table or caption: scale, seeds, commits, and unfinished runs."""
    notes = []
    for label in labels(grid):
        seeds = sorted(grid.table.loc[grid.table["label"] == label, "seed"].unique().tolist())
        notes.append(f"{label}: {scale(_config(grid, label))}; seeds {', '.join(map(str, seeds))}")
    # A run that other code continued names both.
    made = grid.table.assign(**{name: grid.table[name].str.split(", ") for name in ("code", "revision")})
    made = made.explode("code")
    of_package = made.assign(code=made["code"].str.partition("+")[0]).groupby("label")["code"].nunique()
    of_method = made.groupby(["label", "method"])["code"].nunique().groupby("label").max()  # with user code
    versions = of_package.where(of_package >= of_method, of_method)
    if (versions > 1).any():
        mixed = "; ".join(f"{label} by {n}" for label, n in versions[versions > 1].items())
        notes.append(f"runs of one setting were made by several versions of the code: {mixed}")
    if few := rules.few(grid.table):
        notes.append(
            f"fewer than {rules.WINDOW} rounds: what averages the last {rules.WINDOW} is that of the last one, "
            f"and best10, last10 and optimism are left out: {few}"
        )
    commits = sorted({r for names in made["revision"] for r in names if r})
    notes.append(f"commit {', '.join(commits)}" if commits else "commit not known")
    if grid.unfinished:
        notes.append(f"not finished and left out: {', '.join(Path(p).name for p in grid.unfinished)}")
    return notes


def caption(grid: Grid, width: int = 150) -> list[str]:
    """Lines of :func:`origin` for under a figure, with settings of one scale in one line."""
    names: dict[str, list[str]] = {}
    for label in labels(grid):
        seeds = sorted(grid.table.loc[grid.table["label"] == label, "seed"].unique().tolist())
        what = scale({k: v for k, v in _config(grid, label).items() if k != "partition"})
        names.setdefault(f"{what}; seeds {', '.join(map(str, seeds))}", []).append(label)
    lines = [f"{' | '.join(own)}: {what}" for what, own in names.items()]
    return [part for line in (*lines, *origin(grid)[len(labels(grid)) :]) for part in textwrap.wrap(line, width)]


def _config(grid: Grid, label: str) -> dict[str, Any]:
    """Settings of a label's runs; of learning rates the most frequent, and the methods with others in brackets."""
    if "lr" not in grid.table:
        return dict(grid.configs[label])
    rates = grid.table[grid.table["label"] == label].groupby("lr")["method"].unique()
    config = {name: value for name, value in grid.configs[label].items() if name != "lr"}
    if rates.empty:
        return config
    first, *others = sorted(rates.index, key=lambda lr: -len(rates[lr]))
    other = "; ".join(f"{', '.join(map(title_of, ordered(rates[lr])))}: {lr:g}" for lr in others)
    return config | {"lr": f"{first:g} ({other})" if other else f"{first:g}"}


def scale(config: Mapping[str, Any]) -> str:
    """Size of a run in one line.

    Examples
    --------
    >>> scale({"clients": 20, "net": "lenet", "width": 0.5, "rounds": 30, "evaluate_every": 5, "local_epochs": 1})
    '20 clients, net lenet × 0.5, 30 rounds, evaluated every 5, local epochs 1'
    """
    width = f" × {config['width']:g}" if config.get("width") not in (None, 1) else ""
    norm = f" with {config['norm']} norm" if config.get("norm") else ""
    every = f", evaluated every {config['evaluate_every']}" if config.get("evaluate_every", 1) > 1 else ""
    parts = {
        "partition": "{}", "labels": "labels {}", "clients": "{} clients", "samples": "at most {} samples each",
        "net": "net {}" + width + norm, "rounds": "{} rounds" + every, "participation": "participation {}",
        "sampling": "sampling {}",
        "local_epochs": "local epochs {}", "batch_size": "batch {}", "optimizer": "{}", "lr": "lr {}",
    }  # fmt: skip
    return ", ".join(form.format(config[key]) for key, form in parts.items() if config.get(key) is not None)
