"""Figures of the studies in a paper's grid: runs -> figure, one script each."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedstat
from fedstat import _cli
from fedstat.study import collect, origin
from fedstat.study.accuracy import of_study
from fedstat.study.collect import Grid
from fedstat.study.show import ordered, title_of

_LETTERS = 16  # of a caption, in an inch
SIMULATIONS = Path(__file__).parents[1] / "simulations"


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
    folder = Path(f"runs/{paper}-quick")
    cli.add_argument("--runs", type=Path, default=folder, help=f"folder of the grid's stores (default {folder})")
    cli.add_argument("--out", type=Path, help=f"figure to write (default paper_figs/{name}-<scale>.png)")

    def work(args: argparse.Namespace) -> None:
        scale = args.runs.name.removeprefix(f"{paper}-")
        out = args.out or Path("paper_figs") / f"{name}-{scale}.png"
        _cli.require_figure("--out", out)
        grid = of_study(collect.collect(args.runs), SIMULATIONS / f"{paper}.toml", study)
        drawn, note = draw(grid)
        width = int(_LETTERS * drawn.get_figwidth())
        lines = [*textwrap.wrap(note, width), *origin.caption(grid, width)]
        drawn.supxlabel("\n".join(lines), fontsize="x-small", color="0.4")
        _cli.save_figure(drawn, out, dpi=110)

    return _cli.run(cli, work, argv)


def of_runs(grid: Grid, read: Callable[[xr.DataTree], pd.DataFrame]) -> pd.DataFrame:
    """What is read of every run, with its label, method (by title) and seed, methods in the order of tables."""
    places = ordered(grid.table["method"])
    runs = grid.table.sort_values("method", key=lambda methods: methods.map(places.index), kind="stable")
    return pd.concat(
        [
            read(fedstat.open_run(run["path"])).assign(
                label=run["label"], method=title_of(run["method"]), seed=run["seed"]
            )
            for run in runs.to_dict("records")
        ],
        ignore_index=True,
    )


def method_lines(data: pd.DataFrame, names: Sequence[str], x: str, y: str, ax: Axes, *, legend: bool) -> None:
    """One line for each of the named methods, in colours that are the same in all axes with the same names."""
    colours = dict(zip(names, sns.color_palette("husl", len(names)), strict=True))
    sns.lineplot(data, x=x, y=y, hue="method", style="method", palette=colours, style_order=names, legend=legend, ax=ax)


def legend_above(ax: Axes, **look: Any) -> None:
    """Legend above the axes, without a title."""
    if (legend := ax.get_legend()) is not None:
        handles, names = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
        legend.remove()
        ax.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small", **look)
