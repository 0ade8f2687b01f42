"""Make ntk.json: neural tangent kernels and their eigenvalues to 50 digits with mpmath.

Run from the repository root: python tests/golden/ntk_reference.py
"""

import json
from pathlib import Path

import mpmath
import numpy as np

SEED = 20
mpmath.mp.dps = 60


def kernel(x):
    n = len(x)
    h = mpmath.matrix(n, n)
    for i in range(n):
        for j in range(n):
            inner = mpmath.fdot(x[i], x[j])
            size = mpmath.sqrt(mpmath.fdot(x[i], x[i]) * mpmath.fdot(x[j], x[j]))
            angle = mpmath.mpf(0) if i == j else mpmath.acos(inner / size)
            h[i, j] = inner * (mpmath.pi - angle) / (2 * mpmath.pi)
    return h


def case(name, x, sizes, y):
    """x is exactly the float64 that the test reads back; everything after it is computed with 60 digits."""
    exact = [[mpmath.mpf(v) for v in row] for row in x.tolist()]
    h = kernel(exact)
    values = mpmath.eigsy(h, eigvals_only=True)
    blocks, total, start = [], h.copy(), 0
    for size in sizes:
        blocks.append(h[start : start + size, start : start + size])
        for i in range(start, start + size):
            for j in range(start, start + size):
                total[i, j] += h[i, j]
        start += size
    personal = [v for b in blocks for v in mpmath.eigsy(b, eigvals_only=True)]
    solved = mpmath.lu_solve(total, mpmath.matrix(y))
    quadratic = mpmath.fdot(y, solved)
    clients = len(sizes)

    def text(v):
        return mpmath.nstr(v, 50)

    return {
        "name": name,
        "x": x.tolist(),
        "sizes": sizes,
        "y": y,
        "h": [[text(h[i, j]) for j in range(len(y))] for i in range(len(y))],
        "lambda_s": [text(min(values)), text(max(values))],
        "lambda_p": [text(min(personal)), text(max(personal))],
        "complexity": text(2 * mpmath.sqrt(mpmath.mpf(clients) ** 2 / len(y) * quadratic)),
    }


def main():
    rng = np.random.default_rng(SEED)
    unit = rng.normal(size=(8, 5))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    near = unit.copy()
    near[1] = near[0] + 1e-6 * rng.normal(size=5)
    anti = unit.copy()
    anti[5] = -anti[2] * 0.7 + 1e-7 * rng.normal(size=5)
    y = rng.choice([-1.0, 1.0], size=8).tolist()
    cases = [
        case("unit sphere", unit, [4, 4], y),
        case("lengths below 1, clients of unequal size", unit * rng.uniform(0.1, 1, size=(8, 1)), [1, 5, 2], y),
        case("a pair at an angle of about 1e-6", near, [4, 4], y),
        case("an almost antiparallel pair", anti, [4, 4], y),
    ]
    out = {
        "method": "mpmath, 60 digits kept to 50",
        "seed": SEED,
        "versions": {"mpmath": mpmath.__version__, "numpy": np.__version__},
        "tolerance": {"h": 1e-15, "eigenvalues": "1e-15 + 1e-9 relative", "complexity": "1e-9 relative"},
        "cases": cases,
    }
    Path(__file__).with_name("ntk.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
