"""Speed of agreement against one pass over the weights, and against NumPy unit by unit; one thread.

Every benchmark checks that both sides give the same answer; the ratio is printed, never judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedstat

CLIENTS, UNITS, WEIGHTS = 100, 2048, 2048
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """Layer of 1.6 GiB, float32."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((CLIENTS, UNITS, WEIGHTS), dtype=np.float32)
    w[:, ::2] += 3 * rng.standard_normal((UNITS // 2, WEIGHTS), dtype=np.float32)
    return w


def plain_pass(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return w.sum(axis=0), (w**2).sum(axis=0)


def streamed_pass(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without a second copy of the weights, in float64."""
    total, squares = np.zeros(w.shape[1:]), np.zeros(w.shape[1:])
    for one in w:
        total += one
        squares += one * one
    return total, squares


def by_numpy(w: np.ndarray) -> float:
    """ICC2 of one unit (client, weight), as it is written in textbooks."""
    k, n = w.shape
    grand = w.mean()
    msb = k * ((w.mean(0) - grand) ** 2).sum() / (n - 1)
    msj = n * ((w.mean(1) - grand) ** 2).sum() / (k - 1)
    mse = ((w - w.mean(0) - w.mean(1)[:, None] + grand) ** 2).sum() / ((n - 1) * (k - 1))
    return (msb - mse) / (msb + (k - 1) * mse + k * (msj - mse) / n)


@pytest.mark.parametrize("peer", [plain_pass, streamed_pass])
def test_bench_icc_against_one_pass_over_the_weights(compare: Any, weights: np.ndarray, peer: Callable) -> None:
    found = fedstat.icc(weights)
    total, squares = (x.astype(np.float64) for x in peer(weights))
    within = (squares - total**2 / CLIENTS).sum(axis=1)
    ms = found.mean_squares
    ours = ms.clients * (CLIENTS - 1) + ms.residual * (CLIENTS - 1) * (WEIGHTS - 1)
    np.testing.assert_allclose(ours, within, rtol=1e-4)
    name = f"icc, {CLIENTS} clients x {UNITS} units x {WEIGHTS} weights"
    compare(name, lambda: fedstat.icc(weights), lambda: peer(weights), f"NumPy {peer.__name__}", rounds=3)


def test_bench_icc_of_a_small_layer_against_numpy_unit_by_unit(compare: Any) -> None:
    w = np.random.default_rng(0).normal(size=(100, 200, 100))
    np.testing.assert_allclose(fedstat.icc(w).agreement, [by_numpy(w[:, j]) for j in range(200)], atol=1e-12)
    compare(
        "icc, 100 clients x 200 units x 100 weights", lambda: fedstat.icc(w),
        lambda: [by_numpy(w[:, j]) for j in range(200)], "NumPy unit by unit",
    )  # fmt: skip


def test_bench_bootstrap_against_repeated_analyses(compare: Any) -> None:
    w = np.random.default_rng(0).normal(size=(100, 200, 784))
    compare(
        "bootstrap of icc, 200 replicates", lambda: fedstat.icc(w, n_boot=200),
        lambda: [fedstat.icc(w) for _ in range(10)], "10 analyses", rounds=1,
    )  # fmt: skip


@pytest.mark.parametrize("claim", ["new groups", "these groups"])
def test_bench_icc_with_groups_against_icc(compare: Any, weights: np.ndarray, claim: str) -> None:
    """Goal: at least 0.5, that is, groups take at most twice the time."""
    w, groups = weights[:, :512, :512], np.arange(len(weights)) % 10
    options, name = {"groups": groups, "claim": claim}, f"icc with 10 groups, {claim}, {len(w)} clients x 512 x 512"
    compare(name, lambda: fedstat.icc(w, **options), lambda: fedstat.icc(w), "icc", rounds=3)
