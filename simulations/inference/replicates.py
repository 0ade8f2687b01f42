"""Intervals over few replicates, seeds or clients: Student's, Wilson's, and those of recovered images."""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import xarray as xr
from statsmodels.stats.proportion import proportion_confint

import fedstat
from fedstat.results.leakage import psnr
from fedstat.stats import resampling
from simulations.inference.table import Case, Claim

Values = Literal["normal", "exponential", "t3", "four in five are 0"]


def values(kind: Values, n: int, rng: np.random.Generator) -> np.ndarray:
    """Independent values (n,) of mean 0, or of mean 1 if they are exponential."""
    if kind == "exponential":
        return rng.exponential(size=n)
    x = rng.standard_t(3, n) if kind == "t3" else rng.normal(size=n)
    return x * (rng.random(n) < 0.2) if kind == "four in five are 0" else x


def interval(kind: Values, n: int, rng: np.random.Generator) -> float:
    """Whether Student's interval covers the mean; NaN where all values are equal."""
    found, truth = resampling.mean(values(kind, n, rng)), float(kind == "exponential")
    return np.nan if found.equal else float(found.low <= truth <= found.high)


def proportion(p: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Whether Wilson's intervals of 200 clients' accuracies cover them."""
    low, high = proportion_confint(rng.binomial(n, p, 200), n, method="wilson")
    return np.asarray((low <= p) & (p <= high))


def leaked(clients: int, images: int, of_image: float, rng: np.random.Generator) -> fedstat.results.LeakageResult:
    """Images of two classes, recovered as their class's mean, noise and a part of the image that is its own.

    Parameters
    ----------
    clients, images : int
        Images of each client.
    of_image : float
        Share of an image's own part that is recovered; 0: the class alone.
    rng : Generator
    """
    shape, n = (clients, images, 1, 6, 6), clients * images
    label = np.arange(n).reshape(clients, images) % 2
    own, noise = 0.1 * rng.normal(size=(2, *shape))
    mean = rng.uniform(0.3, 0.7, size=(2, 1, 6, 6))[label]
    original, recovered = mean + own, mean + of_image * own + noise
    who = np.arange(clients)[:, None]
    data = {name: np.full((clients, images), np.nan) for name in ("psnr", "class_mean_psnr", "other")}
    for c, i in np.ndindex(clients, images):
        alike = label == label[c, i]
        rest = recovered[alike & (who != c)]
        self = np.arange(n).reshape(clients, images) == c * images + i
        data["psnr"][c, i] = psnr(recovered[c, i], original[c, i])
        data["class_mean_psnr"][c, i] = (
            psnr(original[alike & ~self].mean(0), original[c, i]) if (alike & ~self).any() else np.nan
        )
        data["other"][c, i] = psnr(rest, original[c, i]).mean() if len(rest) else np.nan
    dims = ("run", "round", "labels", "client", "image")
    each = {name: (dims, x[None, None, None]) for name, x in data.items()}
    pictures = {
        "recovered": ((*dims, "channel", "row", "column"), recovered[None, None, None]),
        "original": (("run", "client", "image", "channel", "row", "column"), original[None]),
        "label_right": (dims, np.ones((1, 1, 1, clients, images), bool)),
        "distance": (dims, np.zeros((1, 1, 1, clients, images))),
    }
    coords = {"run": ["a"], "labels": ["given"], "round": [1]}
    return fedstat.results.LeakageResult(xr.Dataset(each | pictures, coords))


def leakage(clients: int, images: int, rng: np.random.Generator) -> list[float]:
    """Of an attacker who has the class alone: whether the interval over others' images covers 0; what is concluded."""
    (row,) = leaked(clients, images, 0.0, rng).augment().to_dict("records")
    covers = row["other_low"] <= 0 <= row["other_high"]
    known = np.isfinite(row["other_low"])
    return [float(covers) if known else np.nan, float(row["conclusion"] not in ("recovered", "partial"))]


_DISCRETE = (
    "of Wilson's interval near 0 and 1 (Brown, Cai and DasGupta 2001, Statist. Sci. 16): right on average over p"
)
CLAIMS = {
    "Student's interval of a mean over replicates": Claim(
        "coverage",
        ("fedstat.stats.resampling.mean",),
        tuple(f"LeakageResult.{of}_{end}" for of in ("conf", "gain") for end in ("low", "high")),
        {
            f"{kind}, {n} replicates": Case(
                partial(interval, kind, n), kind == "normal", 4000,
                "few skewed values: docs/glossary.md says it" if kind == "exponential" else "",
            )
            for kind in ("normal", "exponential", "t3", "four in five are 0")
            for n in (2, 3, 5, 10)
        },
    ),
    "Wilson's interval of a client's accuracy": Claim(
        "coverage",
        ("fedstat.reporting.training._clients",),
        (),
        {f"accuracy {p}, {n} test samples": Case(partial(proportion, p, n), replicates=500, note=_DISCRETE)
         for p in (0.5, 0.9, 0.99) for n in (20, 100)},
    ),
    "attack.leakage, more than the class": Claim(
        "coverage",
        ("fedstat.stats.resampling.mean",),
        ("LeakageResult.other_low", "LeakageResult.other_high"),
        {
            f"{clients} clients × {images} images": Case(
                partial(leakage, clients, images), replicates=500,
                parts=("interval over others' images holds 0", "no claim of a leak"),
            )
            for clients in (4, 10)
            for images in (1, 5)
        },
    ),
}  # fmt: skip
