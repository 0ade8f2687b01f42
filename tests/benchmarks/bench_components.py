"""Speed of variance components against one pass over the weights; one thread. The ratio is printed, never judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstat.stats import variance_components as vc


def one_pass(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and squares of what differs between models, over clients and replicates, in float64."""
    total, squares = np.zeros(w.shape[2:]), np.zeros(w.shape[2:])
    for client in w:
        for one in client:
            total += one
            squares += one.astype(np.float64) ** 2
    return total, squares


@pytest.mark.usefixtures("one_thread_an_operation")
def test_bench_components_against_one_pass_over_the_weights(compare: Any) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((20, 2, 512, 512), dtype=np.float32)
    w += rng.standard_normal((20, 1, 512, 512), dtype=np.float32)
    p, (total, squares) = vc.parts(w), one_pass(w)
    scatter = (squares - total**2 / 40).sum(axis=1)
    np.testing.assert_allclose(2 * p.between.sum(axis=0) + p.within.sum(axis=0), scatter, rtol=1e-6)
    compare("components, 20 clients x 2 x 512 units x 512 weights", lambda: vc.components(vc.parts(w)),
            lambda: one_pass(w), "NumPy sums and squares")  # fmt: skip
