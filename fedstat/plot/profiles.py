"""How personal each layer is, over rounds or over layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes

from fedstat import fl
from fedstat.plot._axes import given, literal
from fedstat.plot._inputs import refusal
from fedstat.results import ComponentsResult

_COLUMNS = ("layer", "round", "personal", "conf_low", "conf_high")
_LOWEST = -0.5


def profile(table: Any, *, ax: Axes | None = None) -> Axes:
    """Personal share of each layer with its interval.

    Parameters
    ----------
    table : DataFrame, run, or dict of layer to ComponentsResult
        What :func:`fedstat.fl.profile` returns, or the run itself: several rounds are drawn as lines over rounds,
        layers from the first (light) to the last (dark), one round as points over layers. Or what
        :func:`fedstat.variance_components` returns for each layer.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        Lines at 0 (all noise) and at 1/2, above which a client's own weights are nearer to its true ones than the mean
        over clients. Intervals that reach below -0.5 are cut off there.
    """
    if isinstance(table, xr.DataTree):
        table = fl.profile(table)
    elif isinstance(table, Mapping) and all(isinstance(one, ComponentsResult) for one in table.values()):
        table = pd.concat([one.layer.assign(layer=name, round=0) for name, one in table.items()])
    if not isinstance(table, pd.DataFrame):
        takes = "a run with probe='halves', the table of fedstat.fl.profile(run) or {layer: ComponentsResult}"
        raise refusal("profile", takes, table)
    if missing := [c for c in _COLUMNS if c not in table]:
        raise ValueError(f"the table must have columns {', '.join(_COLUMNS)}, but lacks {', '.join(missing)}")
    ax = given(ax)
    table = table.dropna(subset="personal")
    layers = list(dict.fromkeys(table["layer"]))
    colours = sns.color_palette("crest", len(layers))
    over_rounds = table["round"].nunique() > 1
    step = 0.0 if not over_rounds else 0.12 * table["round"].drop_duplicates().sort_values().diff().min()
    for i, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
        own = table[table["layer"] == layer]
        x = own["round"] + (i - (len(layers) - 1) / 2) * step if over_rounds else pd.Series(i, own.index)
        low, high = own["conf_low"].clip(lower=_LOWEST), own["conf_high"]
        ax.vlines(x, low, high, color=colour, linewidth=1.2, alpha=0.7)
        ax.plot(x, own["personal"], "o-", color=colour, markersize=4, linewidth=1.2, label=literal(layer))
    for y, style in ((0, "-"), (0.5, ":")):
        ax.axhline(y, color="0.4", linestyle=style, linewidth=0.9, zorder=0)
    ax.set_ylim(max(_LOWEST, min(-0.05, table["conf_low"].min() - 0.05)), 1.02)
    ax.set_ylabel("share of clients' differences\nthat is their own, beyond noise")
    if over_rounds:
        ax.set_xlabel("round")
        ax.set_xticks(rounds) if len(rounds := sorted(table["round"].unique())) <= 12 else None
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(len(layers), 6))
    else:
        ax.set_xticks(range(len(layers)), [literal(layer) for layer in layers])
        ax.set_xlabel("layer")
    sns.despine(ax=ax)
    return ax
