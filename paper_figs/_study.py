"""Figures of the studies in a paper's grid: runs -> figure, one script each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
import xarray as xr
from _stores import ROOT, RUNS, figure_path
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedstat
from fedstat import _cli
from fedstat.plot._figure import caption
from fedstat.plot._styles import style_of
from fedstat.study import collect
from fedstat.study.collect import Grid, ordered, title_of
from fedstat.study.grid import of_study

SIMULATIONS = ROOT / "simulations"


def figure(
    file: str, description: str, study: str, draw: Callable[[Grid], tuple[Figure, str]], argv: Sequence[str] | None
) -> int:
    """Exit status of a command that draws one study of a grid.

    Parameters
    ----------
    file : str
        The script, ``paper_figs/<paper>_figN.py``, of the grid ``simulations/<paper>.toml``.
    description : str
        Its first line is shown.
    study : str
    draw : callable (Grid) -> Figure, str
        The figure of a study's runs, and a note below it.
    argv : sequence of str, optional
    """
    name = Path(file).stem
    paper = name.rpartition("_")[0]
    cli = _cli.Parser(description=description.partition("\n")[0])
    cli.add_argument(
        "--runs", type=Path, default=RUNS / f"{paper}-quick", help=f"folder of stores (default runs/{paper}-quick)"
    )
    cli.add_argument("--out", type=Path, help=f"figure to write (default paper_figs/{name}-<scale>.png)")

    def work(args: argparse.Namespace) -> None:
        scale = args.runs.name.removeprefix(f"{paper}-")
        out = figure_path(args.out, f"{name}-{scale}")
        grid = of_study(collect.collect(args.runs), SIMULATIONS / f"{paper}.toml", study)
        drawn, note = draw(grid)
        caption(drawn, note, *collect.caption(grid, 10_000))
        _cli.save_figure(drawn, out, dpi=110)

    return _cli.run(cli, work, argv)


def of_runs(grid: Grid, read: Callable[[xr.DataTree], pd.DataFrame]) -> pd.DataFrame:
    """What is read of every run, with its scenario, method (by title) and seed, methods in the order of tables."""
    places = ordered(grid.table["method"])
    runs = grid.table.sort_values("method", key=lambda methods: methods.map(places.index), kind="stable")
    return pd.concat(
        [
            read(fedstat.open_run(run["path"])).assign(
                scenario=run["scenario"], method=title_of(run["method"]), seed=run["seed"]
            )
            for run in runs.to_dict("records")
        ],
        ignore_index=True,
    )


def method_lines(data: pd.DataFrame, names: Sequence[str], x: str, y: str, ax: Axes, *, legend: bool) -> None:
    """One line for each of the named methods, in the color and line style that each has in all figures."""
    colors = {name: style_of(name).colour for name in names}
    dashes = {name: style_of(name).dashes or "" for name in names}
    sns.lineplot(
        data, x=x, y=y, hue="method", style="method", palette=colors, hue_order=names, style_order=names,
        dashes=dashes, legend=legend, ax=ax,
    )  # fmt: skip


def legend_above(ax: Axes, **look: Any) -> None:
    """Legend above the axes, without a title."""
    if (legend := ax.get_legend()) is not None:
        handles, names = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
        legend.remove()
        ax.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small", **look)
