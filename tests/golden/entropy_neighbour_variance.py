"""Make entropy_neighbour_variance.json: χ(k, d) of fedstat.stats.entropy, by simulation that shares no code with it.

d = 1: long-run variance of log(2 ε_i) − E_i along a line of unit exponential spacings E_i (20 runs of 4·10⁶ points);
d > 1: n times the variance of the mean of d log ε_i over 10⁴ uniform samples of 1000 points on the torus.
Run: python tests/golden/entropy_neighbour_variance.py   (about 15 minutes)
"""

import json
from pathlib import Path

import numpy as np
import scipy
from scipy.spatial import cKDTree

K, D, POINTS, SAMPLES, RUNS, LENGTH = 10, 6, 1000, 10_000, 20, 4_000_000


def line(seed):
    spacing = np.random.default_rng(seed).exponential(size=LENGTH)
    x = np.cumsum(spacing)
    chi = []
    for k in range(1, K + 1):
        here, distance = x[k : LENGTH - k], np.inf
        for j in range(k + 1):
            reach = np.maximum(here - x[k - j : LENGTH - k - j], x[2 * k - j : LENGTH - j] - here)
            distance = np.minimum(distance, reach)
        score = np.log(2 * distance) - spacing[k : LENGTH - k]
        score -= score.mean()
        lags = sum(score[:-lag] @ score[lag:] for lag in range(1, 2 * k + 3))
        chi.append((score @ score + 2 * lags) / len(score))
    return chi


def torus(d):
    rng = np.random.default_rng(d)
    mean = np.empty((SAMPLES, K))
    for i in range(SAMPLES):
        x = rng.random((POINTS, d))
        distance, _ = cKDTree(x, boxsize=1.0).query(x, K + 1)
        mean[i] = d * np.log(distance[:, 1:]).mean(axis=0)
    return POINTS * mean.var(axis=0, ddof=1)


if __name__ == "__main__":
    runs = np.array([line(seed) for seed in range(RUNS)])
    chi = [runs.mean(axis=0), *map(torus, range(2, D + 1))]
    error = [runs.std(axis=0, ddof=1) / RUNS**0.5, *(c * (2 / SAMPLES) ** 0.5 for c in chi[1:])]
    record = {
        "what": "chi[d - 1][k - 1] and its standard error",
        "method": __doc__.split("\n\n")[1].split("\nRun")[0],
        "seeds": "default_rng(run) for d = 1, default_rng(d) otherwise",
        "versions": {"numpy": np.__version__, "scipy": scipy.__version__},
        "chi": np.round(chi, 5).tolist(),
        "std_error": np.round(error, 5).tolist(),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
