"""Pictures of what leaks: PSNR by round, and original beside recovered images."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedstat.plot._axes import given, literal
from fedstat.plot._inputs import refusal
from fedstat.results.leakage import LeakageResult


def leakage(result: LeakageResult, *, labels: str | None = None, ax: Axes | None = None) -> Axes:
    """PSNR of recovered images by round, with intervals over clients, and the PSNR of the guess without gradients.

    Parameters
    ----------
    result : LeakageResult
    labels : {"given", "inferred"}, optional
        Whether the attacker knows the classes; the first in the result by default.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        One line per run; dashed, in its colour, the mean image of the class that the attacker knows or infers.
    """
    mode = _mode(result, labels, "leakage")
    ax = given(ax)
    table = result.tidy()
    runs = list(dict.fromkeys(table["run"]))
    rounds = np.unique(table["round"])
    step = np.diff(rounds).min() if len(rounds) > 1 else 1
    of_mode = table[table["labels"] == mode]
    guess = of_mode.groupby("round")["guess"].first()
    same = np.allclose(of_mode["guess"], of_mode["round"].map(guess))  # in all runs
    for i, run in enumerate(runs):
        x = table[(table["run"] == run) & (table["labels"] == mode)]
        at = x["round"] + 0.06 * step * (i - (len(runs) - 1) / 2)
        error = np.stack([x["estimate"] - x["conf_low"], x["conf_high"] - x["estimate"]])
        line = ax.errorbar(
            at, x["estimate"], error, marker="o", markersize=4, capsize=2, linewidth=1.2, label=literal(run)
        )[0]
        if not same:
            ax.plot(at, x["guess"], color=line.get_color(), linestyle="--", linewidth=1)
    ax.plot(
        rounds if same else [], guess if same else [], color="0.3", linestyle="--", linewidth=1,
        label="guess, no gradient",
    )  # fmt: skip
    ax.set_xticks(rounds)
    ax.set(xlabel="rounds done", ylabel="PSNR in dB", title=f"labels {mode}")
    ax.legend(frameon=False, fontsize="small")
    return ax


def leakage_grid(result: LeakageResult, *, labels: str | None = None) -> Figure:
    """For every run the original beside the recovered image of the best and the median case, and PSNR by round."""
    mode, runs = _mode(result, labels, "leakage_grid"), list(result.data["run"].values)
    figure = plt.figure(figsize=(11, max(4.0, 1.7 * len(runs) + 0.6)), layout="constrained")
    halves = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)
    left, right = halves[0]
    axes = left.subplots(len(runs), 4, squeeze=False)
    for row, run in zip(axes, runs, strict=True):
        part = result.data.sel(run=run, labels=mode).stack(case=("round", "client", "image"))
        order = np.argsort(part["psnr"].to_numpy(), kind="stable")
        for pair, name, at in ((row[:2], "best", order[-1]), (row[2:], "median", order[len(order) // 2])):
            case = part.isel(case=int(at))
            originals = result.data["original"].sel(client=case["client"].item()).isel(image=int(case["image"].item()))
            original = originals.sel(run=run) if "run" in originals.dims else originals
            _draw(pair[0], original.to_numpy(), f"{name}: original")
            recovered = case["recovered"].transpose("channel", "row", "column").to_numpy()
            _draw(pair[1], recovered, f"{float(case['psnr']):.1f} dB")
        row[0].set_ylabel(literal(run))
    leakage(result, labels=mode, ax=right.subplots())
    return figure


def _mode(result: LeakageResult, labels: str | None, figure: str) -> str:
    if not isinstance(result, LeakageResult):
        raise refusal(figure, "the result of fedstat.attack.leakage", result)
    known = [str(mode) for mode in result.data["labels"].values]
    if labels is not None and labels not in known:
        raise ValueError(f"labels must be one of {known}, but got {labels!r}")
    return labels or known[0]


def _draw(ax: Axes, image: np.ndarray, title: str) -> None:
    """An image (channel, row, column), in colours if it has three channels."""
    shown = np.moveaxis(image, 0, -1) if len(image) == 3 else image[0]
    ax.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(title, fontsize="small")
    ax.set(xticks=[], yticks=[])
