"""What the figures of the theorems share: their command line, and stores that are made where they are absent."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import xarray as xr
from _stores import RUNS, figure_path

from fedstat import _cli
from fedstat.ntk.__main__ import main as check


def run(
    description: str,
    name: str,
    scales: Collection[str],
    work: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """Save a figure of some scale, by default under its name in this folder."""
    parser = _cli.Parser(description=description.splitlines()[0])
    parser.add_argument("--scale", choices=scales, default="quick")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the stores")
    parser.add_argument("--out", type=Path, help="figure to write")

    def save(args: argparse.Namespace) -> None:
        args.out = figure_path(args.out, f"{name}-{args.scale}")
        work(args)

    return _cli.run(parser, save, argv)


def stored(path: Path, arguments: Sequence[str]) -> Path:
    """Path of a run, made first by ``python -m fedstat.ntk`` if absent."""
    if not path.exists() and (status := check([*arguments, "--out", str(path)])):
        raise SystemExit(status)
    return path


def origin(tree: xr.DataTree) -> str:
    """Size and origin of a check in one line."""
    made = json.loads(tree.attrs["config"])
    each = {"clients": "C", "n": "n", "widths": "width"}
    sizes = ", ".join(f"{name} = {', '.join(map(str, made[key]))}" for key, name in each.items())
    runs = f"{made['rounds']} rounds, {made['replicates']} replicates, seed {made['seed']}"
    return f"{sizes}; {runs}; {tree.attrs['source']} {tree.attrs['revision']}".strip()


def notes(origins: Mapping[str, str]) -> list[str]:
    """Origins of the panels, by title; panels of equal origin have one note, without a title if it holds for all."""
    titles: dict[str, list[str]] = {}
    for title, origin in origins.items():
        titles.setdefault(origin, []).append(title)
    return [*titles] if len(titles) == 1 else [f"{'; '.join(names)}: {origin}" for origin, names in titles.items()]
