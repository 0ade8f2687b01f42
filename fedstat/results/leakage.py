"""Result of gradient inversion: recovered images beside what needs no gradient, and their PSNR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Caution, Result, few, line
from fedstat.results.tables import interval, number
from fedstat.stats import resampling

FLOOR = float(np.finfo(np.float32).eps) ** 2
"""Least mean squared error: images that agree to float32 rounding have no more than 138.5 dB."""


def psnr(x: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
    """Peak signal-to-noise ratio of images on [0, 1] in dB: −10 log10 of the mean squared error over all pixels.

    Parameters
    ----------
    x, target : array (..., channel, row, column)
        They broadcast against each other.

    Notes
    -----
    FedDecomp §4.6 divides the sum of squares by rows and columns only, which is :func:`without_channels` lower.

    Examples
    --------
    >>> float(psnr(np.full((3, 4, 4), 0.6), np.full((3, 4, 4), 0.5)).round(6))
    20.0
    """
    away = np.asarray(x, dtype=np.float64) - np.asarray(target, dtype=np.float64)
    return -10 * np.log10(np.maximum(np.square(away).mean((-3, -2, -1)), FLOOR))


def without_channels(channels: int) -> float:
    """Decibels by which PSNR falls if channels are added up and not averaged.

    Examples
    --------
    >>> round(without_channels(3), 2), without_channels(1)
    (4.77, 0.0)
    """
    return 10 * math.log10(channels)


RECOVERED, TRACES, NOTHING, UNDECIDED = "recovered", "traces", "nothing", "undecided"
MARGIN = 0.5
"""Decibels that do not matter: by so little an image can be nearer than others' and nothing be said to leak."""


@dataclass(frozen=True, eq=False, repr=False)
class LeakageResult(Result):
    """Deep leakage from gradients, as :func:`fedstat.attack.leakage` returns it.

    PSNR is in dB, on images on [0, 1], the squared error being the mean over pixels and channels. It says nothing by
    itself: an attacker who knows the class of an image, or infers it, has a PSNR without any gradient, by guessing the
    mean of the class's other training images. A method leaks images if recovered ones are nearer to the true ones than
    this guess; it leaks something *of* an image, more than its class, if they are nearer to it than images of the same
    class recovered from other clients' gradients are.

    Verdicts go by whole intervals: "recovered", both differences lie above 0; "traces", the second does; "nothing", the
    second lies below 0.5 dB, so that no more than the class is shown to leak; "undecided" otherwise. A method may leak
    in some rounds only. Those of a run take its clients as the sample, and say nothing of other seeds; where a method
    was run with several, :meth:`by_method` takes seeds as the sample. Intervals are Student's; there is none where all
    values are equal.

    Attributes
    ----------
    data : Dataset
        ``psnr``, ``guess`` (of the mean image of the class that the attacker knows or infers, without the image
        itself), ``other`` (mean PSNR of images that the attacker takes for the same class, recovered from other
        clients' gradients; NaN where there are none), ``distance`` (of gradients, relative), ``label_right`` (run,
        round, labels, client, image); ``recovered`` (run, round, labels, client, image, channel, row, column) and
        ``original`` (run, client, image, ...); coordinates ``method`` and ``seed`` (run). Stores of earlier versions
        have a ``guess`` (client, image) of the mean of all training images, and ``other`` of all classes.
    level : float
        Confidence level.
    """

    data: xr.Dataset
    level: float = 0.95
    _figure: ClassVar[str] = "leakage"

    def to_dataset(self) -> xr.Dataset:
        """All of it, with dims, units and descriptions."""
        texts = {
            "psnr": "PSNR of the recovered image",
            "other": f"mean PSNR of images recovered from other clients' gradients{self._class[0]}",
            "guess": f"PSNR of the mean training image{self._class[1]}",
        }
        found = self.data.copy()
        for name, text in texts.items():
            found[name].attrs.update(long_name=text, units="dB")
        return found

    @property
    def _class(self) -> tuple[str, str]:
        """What is said of others' images and of the guess, unless a store of an earlier version knows no classes."""
        return (" for the same class", " of the class") if "labels" in self.data["guess"].dims else ("", "")

    def tidy(self) -> pd.DataFrame:
        """One row per run, way to have the labels, and round: those of :meth:`augment`'s columns, and ``round``."""
        rows = [
            {"run": str(run), "labels": str(mode), "round": int(number)} | self._row(run, mode, [number])
            for run in self.data["run"].values
            for mode in self.data["labels"].values
            for number in self.data["round"].values
        ]
        return pd.DataFrame(rows)

    def augment(self) -> pd.DataFrame:
        """One row per run and way to have the labels, over all rounds.

        estimate (mean PSNR), std_error, conf_low, conf_high; maximum; estimate_paper, maximum_paper (squared errors of
        the channels added, not averaged, as in FedDecomp §4.6); guess; gain (over the guess), gain_low, gain_high;
        other; above_other, other_low, other_high; share_better (images nearer than the guess); label_accuracy; verdict.
        Intervals are over clients; of ``above_other``, over those with an image that has others of its class.
        """
        rounds = list(self.data["round"].values)
        rows = [
            {"run": str(run), "labels": str(mode)} | self._row(run, mode, rounds)
            for run in self.data["run"].values
            for mode in self.data["labels"].values
        ]
        return pd.DataFrame(rows)

    def by_method(self) -> pd.DataFrame:
        """One row per method with runs of several seeds and way to have the labels; seeds are the sample.

        method, labels; n (seeds); estimate, std_error, conf_low, conf_high; gain, gain_low, gain_high; above_other,
        other_low, other_high; verdict. Without rows where every method has one seed.
        """
        columns = ["method", "labels", "n", "estimate", "std_error", "conf_low", "conf_high", "gain", "gain_low",
                   "gain_high", "above_other", "other_low", "other_high", "verdict"]  # fmt: skip
        runs = self.augment()
        rows = []
        if {"method", "seed"} <= set(self.data.coords):
            of_run = self.data[["method", "seed"]].to_dataframe()
            runs = runs.assign(method=runs["run"].map(of_run["method"]), seed=runs["run"].map(of_run["seed"]))
            for (method, mode), own in runs.groupby(["method", "labels"], sort=False):
                if own["seed"].nunique() > 1:
                    per_seed = own.groupby("seed")[["estimate", "gain", "above_other"]].mean()
                    rows.append({"method": method, "labels": mode} | _summary(per_seed, self.level))
        return pd.DataFrame(rows, columns=columns)

    def glance(self) -> pd.DataFrame:
        """One row: numbers of runs, rounds, clients and images; runs that leak; level."""
        table = self.augment()
        row: dict[str, float] = {f"n_{dim}s": self.data.sizes[dim] for dim in ("run", "round", "client", "image")}
        row |= {
            "guess": float(self.data["guess"].mean()),
            "n_leaking": table.loc[table["verdict"] == RECOVERED, "run"].nunique(),
            "level": self.level,
        }
        return pd.DataFrame([row])

    def _row(self, run: object, mode: object, rounds: list[int]) -> dict[str, object]:
        part = self.data[["psnr", "other", "guess", "label_right"]].sel(run=run, labels=mode, round=rounds)
        found, low = part["psnr"], without_channels(self.data.sizes["channel"])
        over = [dim for dim in ("round", "image") if dim in found.dims]
        whole = resampling.mean(found.mean(over), level=self.level)
        gain = resampling.mean((found - part["guess"]).mean(over), level=self.level)
        of_clients = (found - part["other"]).mean(over)
        above = resampling.mean(of_clients.dropna("client"), level=self.level)
        maximum = float(found.max())
        row: dict[str, object] = {
            "n": whole.n, "estimate": whole.mean, "std_error": whole.std_error, "conf_low": whole.low,
            "conf_high": whole.high, "maximum": maximum, "estimate_paper": whole.mean - low,
            "maximum_paper": maximum - low, "guess": float(part["guess"].mean()),
            "gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high, "other": float(part["other"].mean()),
            "above_other": above.mean, "other_low": above.low, "other_high": above.high,
            "share_better": float((found > part["guess"]).mean()), "label_accuracy": float(part["label_right"].mean()),
        }  # fmt: skip
        return row | {"verdict": _verdict(gain.low, above.low, above.high)}

    def __repr__(self) -> str:
        sizes, table = self.data.sizes, self.augment()
        many = sizes["client"] * sizes["image"]
        shown = ", ".join(map(str, self.data["round"].values))
        guess, most = (number(float(x), 2) for x in (self.data["guess"].mean(), self.data["guess"].max()))
        head = f"Deep leakage from gradients: {sizes['client']} clients × {sizes['image']} images, rounds {shown}"
        same, of_class = self._class
        without = f"PSNR in dB; without any gradient, the mean training image{of_class} has {guess}, at most {most}"
        width = max(len("run"), *map(len, table["run"]))
        heads = f"{'over the guess':<25}  {'over others’ images':<25}  better"
        rows = [f"  {'run':<{width}}  labels      PSNR     max  {heads}"]
        for x in table.to_dict("records"):
            equal = "clients" if x["n"] > 1 else ""
            gain = interval(x["gain"], x["gain_low"], x["gain_high"], 2, equal=equal)
            above = interval(x["above_other"], x["other_low"], x["other_high"], 2, equal=equal)
            rows.append(
                f"  {x['run']:<{width}}  {x['labels']:<8}  "
                f"{number(x['estimate'], 2):>6}  {number(x['maximum'], 2):>6}  "
                f"{gain:<25}  {above:<25}  {100 * x['share_better']:4.0f} %"
            )
        by_method = self.by_method()
        feet = [f"  {x.run}, labels {x.labels}: {x.verdict}" for x in table.itertuples()]
        feet += [f"  {x.method}, labels {x.labels}, over {x.n} seeds: {x.verdict}" for x in by_method.itertuples()]
        share = f"better: share of the {many * sizes['round']} images that are nearer than the guess is"
        level = f"in brackets: {100 * self.level:g} % intervals, Student's, over clients' means"
        level += "" if len(by_method) else "; other seeds may differ"
        said = f"recovered: nearer than the guess and than others' images{same}; traces: only than the latter;"
        rest = f"nothing: not nearer than these by {MARGIN:g} dB; undecided: neither is shown"
        return "\n".join(map(line, [head, without, *rows, share, level, said, rest, *feet, *map(str, self.cautions())]))

    def cautions(self) -> list[Caution]:
        """Return on how few clients the intervals rest; mostly nothing."""
        return few(self.data.sizes["client"], "client")

    def summary(self) -> str:
        """Table of the runs, PSNR as the papers define it, and PSNR by round."""
        low = without_channels(self.data.sizes["channel"])
        rows = [
            f"  {x['run']}, labels {x['labels']}, round {x['round']}: {x['verdict']}, "
            f"{_estimate(x)}, at most {number(x['maximum'], 2)}; labels right {100 * x['label_accuracy']:.0f} %"
            for x in self.tidy().to_dict("records")
        ]
        head = f"PSNR by round (as FedDecomp §4.6 defines it, {low:.2f} dB lower with these images)"
        return "\n".join([repr(self), "", *map(line, [head, *rows])])


def _estimate(x: Mapping[Any, Any]) -> str:
    limits = x["estimate"], x["conf_low"], x["conf_high"]
    return interval(*limits, 2, sign=False, equal="clients" if x["n"] > 1 else "")


def _summary(per_seed: pd.DataFrame, level: float) -> dict[str, Any]:
    """Means over seeds of differences, and what they decide."""
    whole, gain, above = (resampling.mean(per_seed[name], level=level) for name in ("estimate", "gain", "above_other"))
    return {
        "n": whole.n, "estimate": whole.mean, "std_error": whole.std_error, "conf_low": whole.low,
        "conf_high": whole.high, "gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high,
        "above_other": above.mean, "other_low": above.low, "other_high": above.high,
        "verdict": _verdict(gain.low, above.low, above.high),
    }  # fmt: skip


def _verdict(gain_low: float, other_low: float, other_high: float) -> str:
    if not (math.isfinite(gain_low) and math.isfinite(other_low)):
        return "not decidable"
    if other_low > 0:
        return RECOVERED if gain_low > 0 else TRACES
    return NOTHING if other_high < MARGIN else UNDECIDED
