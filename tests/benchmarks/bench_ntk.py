"""Kernels and extreme eigenvalues against the expressions and solvers one would write first, in one process."""

from time import perf_counter

import numpy as np
import scipy.linalg

from fedstat.ntk import gram


def sphere(*shape):
    x = np.random.default_rng(0).normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def straightforward(x):
    norm = np.linalg.norm(x, axis=1)
    g = x @ x.T
    return g * (np.pi - np.arccos(np.clip(g / np.outer(norm, norm), -1, 1))) / (2 * np.pi)


def all_eigenvalues(h):
    values = scipy.linalg.eigvalsh(h)
    return values[0], values[-1]


def against(benchmark, name, ours, peer, rounds=7):
    """Time ours and the peer in turns and print the ratio of their medians; return both results."""
    seconds, results = [], []

    def peer_first():
        start = perf_counter()
        results.append(peer())
        seconds.append(perf_counter() - start)

    found = benchmark.pedantic(ours, setup=peer_first, rounds=rounds, warmup_rounds=1)
    own, other = benchmark.stats.stats.median, float(np.median(seconds))
    benchmark.extra_info["ratio"] = other / own
    print(f"\n{benchmark.name}: fedstat {own:.3f} s, {name} {other:.3f} s, ratio {other / own:.1f}")
    return found, results[-1]


def test_kernel_of_5000_samples(benchmark):
    x = sphere(5000, 100)
    h, plain = against(benchmark, "NumPy", lambda: gram.kernel(x), lambda: straightforward(x))
    errors = [np.abs(np.diagonal(k) - 0.5).max() for k in (h, plain)]
    print(f"error on the diagonal: fedstat {errors[0]:.1e}, NumPy {errors[1]:.1e}")


def test_extreme_eigenvalues_of_2000_samples(benchmark):
    h = gram.kernel(sphere(2000, 100))
    e, (low, high) = against(
        benchmark, "scipy.linalg.eigvalsh", lambda: gram.extreme_eigenvalues(h), lambda: all_eigenvalues(h)
    )
    print(f"bounds {e.error_minimum:.1e}, {e.error_maximum:.1e}")
    print(f"errors {abs(e.minimum - low):.1e}, {abs(e.maximum - high):.1e}")


def test_certified_eigenvalues_of_2000_samples(benchmark):
    h = gram.kernel(sphere(2000, 100))
    against(
        benchmark,
        "scipy.linalg.eigvalsh",
        lambda: gram.extreme_eigenvalues(h, certify=True),
        lambda: all_eigenvalues(h),
    )


def test_personal_eigenvalues_of_40_clients_of_100_samples(benchmark):
    blocks = gram.kernel(sphere(40, 100, 50))
    dense = scipy.linalg.block_diag(*blocks)
    e, (low, high) = against(
        benchmark,
        "scipy.linalg.eigvalsh of the dense matrix",
        lambda: gram.extreme_eigenvalues(blocks),
        lambda: all_eigenvalues(dense),
        rounds=3,
    )
    print(f"errors {abs(e.minimum.min() - low):.1e}, {abs(e.maximum.max() - high):.1e}")
