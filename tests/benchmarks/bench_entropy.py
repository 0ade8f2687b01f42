"""Nearest-neighbour entropy against a KD-tree for each neuron (what FNN and most Python tools do), in one process."""

import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.special import digamma

from fedstat.stats.entropy import knn_entropy


def by_kd_tree(x, k=3):
    n, entropy = len(x), []
    for column in x.T:
        points = column[:, None]
        distance, _ = cKDTree(points).query(points, k + 1)
        entropy.append(digamma(n) - digamma(k) + np.log(2) + np.log(distance[:, k]).mean())
    return np.array(entropy)


@pytest.mark.parametrize(("samples", "neurons", "goal"), [(100, 200, 40), (10_000, 200, 10), (1_000_000, 1, 20)])
def test_entropy_of_neurons(compare, samples, neurons, goal):
    x = np.random.default_rng(0).normal(size=(samples, neurons))
    # A call of well under a millisecond is timed among others, not on caches that the peer has just filled.
    calls = range(20 if samples == 100 else 1)
    ours, peer = compare(
        f"entropy of {neurons} neurons, {samples} samples, {len(calls)} time(s)",
        lambda: [knn_entropy(x) for _ in calls], lambda: [by_kd_tree(x) for _ in calls], "scipy cKDTree",
    )  # fmt: skip
    print(f"goal {goal}; largest difference {abs(ours[0].estimate - peer[0]).max():.1e}")
