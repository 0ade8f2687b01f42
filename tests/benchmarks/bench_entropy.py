"""Nearest-neighbour entropy against a KD-tree for each neuron (what FNN and most Python tools do), in one process."""

from time import perf_counter

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
def test_entropy_of_neurons(benchmark, samples, neurons, goal):
    x = np.random.default_rng(0).normal(size=(samples, neurons))
    seconds, results = [], []

    def peer_first():
        start = perf_counter()
        results.append(by_kd_tree(x))
        seconds.append(perf_counter() - start)

    # A call of well under a millisecond is timed in the middle of others, not on caches that the peer has just filled.
    rounds, calls = (30, 20) if samples == 100 else (5, 1)
    found = benchmark.pedantic(
        lambda: [knn_entropy(x) for _ in range(calls)][-1], setup=peer_first, rounds=rounds, warmup_rounds=1
    )
    own, other = benchmark.stats.stats.median / calls, float(np.median(seconds))
    benchmark.extra_info["ratio"] = other / own
    print(
        f"\n{benchmark.name}: fedstat {own * 1e3:.2f} ms, scipy cKDTree {other * 1e3:.1f} ms, ratio {other / own:.1f}"
    )
    print(f"goal {goal}; largest difference {abs(found.estimate - results[-1]).max():.1e}")
