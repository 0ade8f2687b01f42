"""Rows that are copies or weighted means of others are found, and no other rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedstat.stats.dependence import Dependence, dependence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 60))
MEANS = {
    "mean": np.full(8, 1 / 8),
    "weighted by samples": np.arange(1, 9) / 36,
    "of two": np.array([0.3, 0, 0, 0.7, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("scale", [1e-180, 1.0, 1e180])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_found_wherever_it_stands(name: str, place: int, dtype: str, scale: float) -> None:
    common = 20 * RNG.normal(size=60)  # the rows differ by a twentieth of their size
    x = (X + common).astype(dtype)
    mean = np.average(x, axis=0, weights=MEANS[name]).astype(dtype)
    rows = np.insert(x.astype(float), place, mean, axis=0) * scale
    assert dependence(rows) == Dependence([], [place])
    assert dependence(rows - common * scale) == Dependence([], [place]), "of changes"


KINDS: dict[str, tuple[np.ndarray, Dependence]] = {
    "none": (X, Dependence([], [])),
    "one row": (X[:1], Dependence([], [])),
    "zeros": (0 * X, Dependence([], [])),
    "all equal": (np.repeat(X[:1], 5, axis=0), Dependence([], [])),
    "copy": (np.concatenate([X, X[2:3]]), Dependence([(2, 8)], [])),
    "copy of the first": (np.concatenate([X[:1], X]), Dependence([(0, 1)], [])),
    "three copies": (X[[0, 0, 0, 1, 2]], Dependence([(0, 1), (0, 2), (1, 2)], [])),
    "copy and mean": (np.concatenate([X, X[:1], X.mean(0, keepdims=True)]), Dependence([(0, 8)], [9])),
    "two means": (np.concatenate([X, X.mean(0)[None], X[:3].mean(0)[None]]), Dependence([], [8, 9])),
    "mean of three": (np.stack([X[0], X[1], (X[0] + X[1]) / 2]), Dependence([], [2])),
    "deviations from the mean": (X - X.mean(0), Dependence([], [])),
    "a difference": (np.concatenate([X, (2 * X[0] - X[1])[None]]), Dependence([], [0])),  # 0 is the mean of 1 and 8
    "beyond the hull": (np.concatenate([X, (X[0] + X[1] - X[2])[None]]), Dependence([], [])),
    "more rows than numbers": (np.concatenate([X, X.mean(0)[None]])[:, :7], Dependence([], [])),
    "a plane": (RNG.normal(size=(12, 2)) @ RNG.normal(size=(2, 60)), Dependence([], [])),
    "small changes": (X[:1] + 1e-3 * X, Dependence([], [])),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_every_kind(name: str) -> None:
    x, expected = KINDS[name]
    assert dependence(x) == expected


def smooth(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows whose neighboring numbers are alike, so that few directions have most of the variance."""
    return np.apply_along_axis(np.convolve, 1, rng.normal(size=(n, 320)), np.hanning(41), "valid")


SOUND: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.normal(size=(n, 200)),
    "as many numbers as rows": lambda rng, n: rng.normal(size=(n, n)),
    "few numbers": lambda rng, n: rng.normal(size=(n, max(1, n // 2))),
    "a common start": lambda rng, n: rng.normal(size=200) + 0.01 * rng.normal(size=(n, 200)),
    "smooth": smooth,
    "of unlike sizes": lambda rng, n: (
        rng.normal(size=200) + np.exp(rng.normal(size=(n, 1))) * rng.normal(size=(n, 200))
    ),
    "pruned": lambda rng, n: rng.normal(size=(n, 200)) * (rng.random((n, 200)) < 0.1),
    "float32": lambda rng, n: (rng.normal(size=200) + 0.1 * rng.normal(size=(n, 200))).astype("f4").astype(float),
}


@pytest.mark.parametrize("n", [3, 5, 10, 30])
@pytest.mark.parametrize("name", SOUND)
def test_sound_rows_are_not_taken_for_means(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    found = [dependence(SOUND[name](rng, n)) for _ in range(100)]
    assert sum(bool(one.copies or one.means) for one in found) <= 1
