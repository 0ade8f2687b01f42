"""Result of gradient inversion: PSNR of recovered images, and of class-mean images, which need no gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstat._utils.lazy import pd, xr
from fedstat.results.base import TERMINAL, Caution, Result, caution_of_few, columns, wrapped
from fedstat.results.exports import Headings
from fedstat.results.tables import NONE, count, number
from fedstat.stats import resampling

FLOOR = float(np.finfo(np.float32).eps) ** 2
"""Least mean squared error: images that agree to float32 rounding have no more than 138.5 dB."""


def psnr(x: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
    """Return the peak signal-to-noise ratio of images on [0, 1] in dB: −10 log10 of the mean squared error.

    Parameters
    ----------
    x, target : array (..., channel, row, column)
        They broadcast against each other; the error is averaged over channels, rows and columns.

    Notes
    -----
    FedDecomp §4.6 divides the sum of squares by rows and columns only, which is :func:`without_channels` lower.

    Examples
    --------
    >>> float(psnr(np.full((3, 4, 4), 0.6), np.full((3, 4, 4), 0.5)).round(6))
    20.0
    """
    error = np.asarray(x, dtype=np.float64) - np.asarray(target, dtype=np.float64)
    return -10 * np.log10(np.maximum(np.square(error).mean((-3, -2, -1)), FLOOR))


def without_channels(channels: int) -> float:
    """Return the decibels by which PSNR falls if squared errors are summed over channels, not averaged.

    Examples
    --------
    >>> round(without_channels(3), 2), without_channels(1)
    (4.77, 0.0)
    """
    return 10 * math.log10(channels)


RECOVERED, PARTIAL, CLASS_ONLY, INCONCLUSIVE = "recovered", "partial", "class only", "inconclusive"
MARGIN = 0.5
"""Decibels that do not matter: images nearer by less than this leak no more than their class."""


@dataclass(frozen=True, eq=False, repr=False)
class LeakageResult(Result):
    """Gradient inversion, as :func:`fedstat.attack.leakage` returns it.

    PSNR is in dB, on images on [0, 1]; the squared error is the mean over pixels and channels. A PSNR has no meaning by
    itself: an attacker who knows or infers the class of an image needs no gradient to guess the class-mean image. A
    method leaks images if recovered images are nearer to the true ones than class-mean images are. It leaks more than
    the class if recovered images are nearer than images of that class recovered from other clients' gradients.

    Conclusions rest on the intervals of both differences, unadjusted for the number of runs, labels and rounds:

    - "recovered": both lie above 0;
    - "partial": only the second, from other clients' images, lies above 0;
    - "class only": the second lies below 0.5 dB;
    - "inconclusive": otherwise, or without intervals.

    A method may leak in some rounds only. The sample of a run's conclusions is its clients; other seeds may differ.
    For a method with runs of several seeds, :meth:`by_method` takes seeds as the sample. Intervals are Student's t;
    there is none where all values are equal.

    Attributes
    ----------
    data : Dataset
        ``psnr``; ``class_mean_psnr``, PSNR of the class-mean image: the mean over the class that the attacker knows or
        infers, without the image itself; ``other``, mean PSNR of images that the attacker assigns to that class,
        recovered from other clients' gradients, NaN without any; ``distance`` (of gradients, relative) and
        ``label_right``, all (run, round, labels, client, image); ``recovered`` (run, round, labels, client, image,
        channel, row, column) and ``original`` (run, client, image, ...); coordinates ``method`` and ``seed`` (run).
    level : float
        Confidence level.
    """

    data: xr.Dataset
    level: float = 0.95
    _figure: ClassVar[str] = "leakage"
    _headings: ClassVar[Headings] = {
        "run": "run", "labels": "labels", "conclusion": "conclusion", "PSNR": "estimate", "maximum": "maximum",
        "vs class mean [CI]": ("gain", "gain_low", "gain_high"),
        "vs other clients [CI]": ("above_other", "other_low", "other_high"),
    }  # fmt: skip

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.augment(), None

    def _caption(self) -> list[str]:
        n_clients = count(self.data.sizes["client"], "client")
        return [*self._lines()[:2], f"{self._ci}: t interval over {n_clients} of one run"]

    def to_dataset(self) -> xr.Dataset:
        """Return the data with units and descriptions of the variables."""
        texts = {
            "psnr": "PSNR of the recovered image",
            "other": "mean PSNR of images recovered from other clients' gradients for the same class",
            "class_mean_psnr": "PSNR of the class-mean image",
        }
        data = self.data.copy()
        for name, text in texts.items():
            data[name].attrs.update(long_name=text, units="dB")
        return data

    def tidy(self) -> pd.DataFrame:
        """Return one row per run, labels and round, with the columns of :meth:`augment` and ``round``."""
        rows = [
            {"run": str(run), "labels": str(mode), "round": int(number)} | self._row(run, mode, [number])
            for run in self.data["run"].values
            for mode in self.data["labels"].values
            for number in self.data["round"].values
        ]
        return pd.DataFrame(rows)

    def augment(self) -> pd.DataFrame:
        """Return one row per run and labels ("given" or "inferred"), over all rounds.

        conclusion; estimate (mean PSNR) and maximum; gain (over the class-mean image), gain_low, gain_high;
        above_other, other_low, other_high; n; std_error, conf_low, conf_high of the estimate; estimate_paper,
        maximum_paper (squared errors summed over channels, not averaged, as in FedDecomp §4.6); class_mean_psnr;
        other; share_better (proportion of images nearer than the class-mean image); label_accuracy. The sample of
        intervals is the clients; for ``above_other``, clients with an image of a class that other clients have, too.
        """
        rounds = list(self.data["round"].values)
        rows = [
            {"run": str(run), "labels": str(mode)} | self._row(run, mode, rounds)
            for run in self.data["run"].values
            for mode in self.data["labels"].values
        ]
        return pd.DataFrame(rows)

    def by_method(self) -> pd.DataFrame:
        """Return one row per labels and method with runs of several seeds; the sample is the seeds.

        method, labels; n (seeds); estimate, std_error, conf_low, conf_high; gain, gain_low, gain_high; above_other,
        other_low, other_high; conclusion. The table is empty if every method has one seed.
        """
        names = ["method", "labels", "n", "estimate", "std_error", "conf_low", "conf_high", "gain", "gain_low",
                   "gain_high", "above_other", "other_low", "other_high", "conclusion"]  # fmt: skip
        runs = self.augment()
        rows = []
        if {"method", "seed"} <= set(self.data.coords):
            of_run = self.data[["method", "seed"]].to_dataframe()
            runs = runs.assign(method=runs["run"].map(of_run["method"]), seed=runs["run"].map(of_run["seed"]))
            for (method, mode), table in runs.groupby(["method", "labels"], sort=False):
                if table["seed"].nunique() > 1:
                    per_seed = table.groupby("seed")[["estimate", "gain", "above_other"]].mean()
                    rows.append({"method": method, "labels": mode} | _summary(per_seed, self.level))
        return pd.DataFrame(rows, columns=names)

    def glance(self) -> pd.DataFrame:
        """Return one row: numbers of runs, rounds, clients and images; PSNR of class-mean images, leaking runs."""
        table = self.augment()
        row: dict[str, float] = {f"n_{dim}s": self.data.sizes[dim] for dim in ("run", "round", "client", "image")}
        row |= {
            "class_mean_psnr": float(self.data["class_mean_psnr"].mean()),
            "n_leaking": table.loc[table["conclusion"] == RECOVERED, "run"].nunique(),
            "level": self.level,
        }
        return pd.DataFrame([row])

    def _row(self, run: object, mode: object, rounds: list[int]) -> dict[str, object]:
        part = self.data[["psnr", "other", "class_mean_psnr", "label_right"]].sel(run=run, labels=mode, round=rounds)
        psnr, low = part["psnr"], without_channels(self.data.sizes["channel"])
        averaged = [dim for dim in ("round", "image") if dim in psnr.dims]
        estimate = resampling.mean(psnr.mean(averaged), level=self.level)
        gain = resampling.mean((psnr - part["class_mean_psnr"]).mean(averaged), level=self.level)
        above_other = (psnr - part["other"]).mean(averaged)
        above = resampling.mean(above_other.dropna("client"), level=self.level)
        maximum = float(psnr.max())
        return {
            "conclusion": _conclude(gain.low, above.low, above.high), "estimate": estimate.mean, "maximum": maximum,
            "gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high,
            "above_other": above.mean, "other_low": above.low, "other_high": above.high,
            "n": estimate.n, "std_error": estimate.std_error, "conf_low": estimate.low, "conf_high": estimate.high,
            "estimate_paper": estimate.mean - low, "maximum_paper": maximum - low,
            "class_mean_psnr": float(part["class_mean_psnr"].mean()), "other": float(part["other"].mean()),
            "share_better": float((psnr > part["class_mean_psnr"]).mean()),
            "label_accuracy": float(part["label_right"].mean()),
        }  # fmt: skip

    def _lines(self) -> list[str]:
        sizes, by_method = self.data.sizes, self.by_method()
        attacked = f"{count(sizes['client'], 'client')} x {count(sizes['image'], 'image')}"
        *first, last = map(str, self.data["round"].values)
        after = f"rounds {', '.join(first)} and {last}" if first else f"round {last}"
        mean, maximum = (
            number(float(x), 2) for x in (self.data["class_mean_psnr"].mean(), self.data["class_mean_psnr"].max())
        )
        seeds = "over seeds where a method has several" if len(by_method) else "other seeds may differ"
        over = f"{count(sizes['client'], 'client')} of one run"
        return [
            f"Gradient inversion (DLG): {attacked}, after {after}",
            f"PSNR in dB; class-mean image (no gradients): mean {mean}, maximum {maximum}",
            *self._table(),
            f"Unadjusted {100 * self.level:g}% t intervals over {over}; {seeds}.",
            *(f"{x.run}, labels {x.labels}: {x.conclusion}" for x in self.augment().itertuples()),
            *(f"{x.method}, labels {x.labels}, over {x.n} seeds: {x.conclusion}" for x in by_method.itertuples()),
            "recovered: both CIs above 0; partial: only the second;",
            f"class only: second CI below {MARGIN:g} dB; else inconclusive",
        ]

    def _table(self) -> list[str]:
        """Return the table of runs; if it is wider than the terminal, each run is named in a separate line."""
        heads = ("labels", " mean", "  max", "vs class mean", "vs other clients")
        cells = [
            (
                x["run"], x["labels"], f"{number(x['estimate'], 2):>5}", f"{number(x['maximum'], 2):>5}",
                _difference(x["gain"], x["gain_low"], x["gain_high"], x["n"]),
                _difference(x["above_other"], x["other_low"], x["other_high"], x["n"]),
            )
            for x in self.augment().to_dict("records")
        ]  # fmt: skip
        lines = columns([("run", *heads), *cells])
        if max(map(len, lines)) <= TERMINAL:
            return lines
        head, *rows = columns([heads, *(row[1:] for row in cells)])
        runs = [row[0] for row in cells]
        named = [([f"  {run}:"] if run != before else []) for before, run in zip([None, *runs], runs, strict=False)]
        return [head, *(text for name, row in zip(named, rows, strict=True) for text in (*name, row))]

    def cautions(self) -> list[Caution]:
        """Return a caution if intervals rest on few clients."""
        return caution_of_few(self.data.sizes["client"], "client")

    def summary(self) -> str:
        """Return the print, and the PSNR of every round."""
        low = without_channels(self.data.sizes["channel"])
        lines = [f"PSNR by round (as FedDecomp §4.6 defines it: {low:.2f} dB lower)"]
        for x in self.tidy().to_dict("records"):
            interval = f" [{x['conf_low']:.2f}, {x['conf_high']:.2f}]" if math.isfinite(x["conf_low"]) else ""
            inferred = f"; {100 * x['label_accuracy']:.0f}% of labels correct" if x["labels"] == "inferred" else ""
            lines += [
                f"  {x['run']}, labels {x['labels']}, round {x['round']}: {x['conclusion']}",
                f"    mean {number(x['estimate'], 2)}{interval}, maximum {number(x['maximum'], 2)}{inferred}",
            ]
        return "\n".join([repr(self), *map(wrapped, lines)])


def _difference(mean: float, low: float, high: float, n: int) -> str:
    if not math.isfinite(mean):
        return NONE
    equal = ", equal in all clients" if n > 1 else ""
    return f"{mean:+.2f}" + (f" [{low:.2f}, {high:.2f}]" if math.isfinite(low) else equal)


def _summary(per_seed: pd.DataFrame, level: float) -> dict[str, Any]:
    """Return means over seeds with intervals, and the conclusion."""
    names = ("estimate", "gain", "above_other")
    estimate, gain, above = (resampling.mean(per_seed[name], level=level) for name in names)
    return {
        "n": estimate.n, "estimate": estimate.mean, "std_error": estimate.std_error, "conf_low": estimate.low,
        "conf_high": estimate.high, "gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high,
        "above_other": above.mean, "other_low": above.low, "other_high": above.high,
        "conclusion": _conclude(gain.low, above.low, above.high),
    }  # fmt: skip


def _conclude(gain_low: float, other_low: float, other_high: float) -> str:
    if not (math.isfinite(gain_low) and math.isfinite(other_low)):
        return INCONCLUSIVE
    if other_low > 0:
        return RECOVERED if gain_low > 0 else PARTIAL
    return CLASS_ONLY if other_high < MARGIN else INCONCLUSIVE
