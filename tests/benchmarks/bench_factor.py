"""Speed of factor analysis against named peers, one BLAS thread each: `pytest tests/benchmarks --benchmark-only -s`.

Every benchmark checks that both sides give the same answer; the ratio is printed, never judged.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from factor_analyzer import FactorAnalyzer
from real_data import require_real_data
from statsmodels.multivariate.factor import Factor
from threadpoolctl import threadpool_limits

import fedstat
from fedstat._utils.streams import generator
from fedstat.fl.__main__ import main as train
from fedstat.stats import factor, factor_solvers
from fedstat.stats.moments import correlation, moments

pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def ten_factors(d: int) -> np.ndarray:
    """Correlations of d units that follow ten factors, with as much noise as signal."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4 * d, 10)) @ rng.normal(size=(10, d)) + np.sqrt(10) * rng.normal(size=(4 * d, d))
    return correlation(moments(z))


@pytest.mark.parametrize("d", [200, 512, 1024, 2048])
def test_bench_principal_axis_against_statsmodels(compare: Any, d: int) -> None:
    r = ten_factors(d)
    ours, peer = compare(
        f"pa, 10 factors, d = {d}", lambda: factor.fit(r, n_factors=10, tol=1e-8),
        lambda: Factor(corr=r, n_factor=10, method="pa", smc=False).fit(maxiter=50, tol=1e-8), "statsmodels pa",
        rounds=1 if d > 1024 else 3,
    )  # fmt: skip
    np.testing.assert_allclose(ours.communality, peer.communality, atol=1e-7)


def test_bench_minres_against_factor_analyzer(compare: Any) -> None:
    r = ten_factors(200)
    peer = FactorAnalyzer(n_factors=10, method="minres", rotation=None)
    ours, loadings = compare(
        # FactorAnalyzer.fit fails in scikit-learn's input check since 1.8; what it calls next does not.
        "minres, 10 factors, d = 200", lambda: factor.fit(r, n_factors=10, method="minres"),
        lambda: peer._fit_factor_analysis(r), "factor_analyzer minres", rounds=1,
    )  # fmt: skip
    np.testing.assert_allclose(ours.communality, (loadings**2).sum(1), atol=1e-2)


@pytest.mark.parametrize("kappa", [0.75, 0.85])
@pytest.mark.parametrize("d", [200, 512])
@pytest.mark.parametrize("start", ["pc", "the last round's"])
def test_bench_steps_followed_against_a_decomposition_each(
    compare: Any, monkeypatch: pytest.MonkeyPatch, d: int, kappa: float, start: str
) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2 * d, d))
    r, options = correlation(moments(z)), {"kappa": kappa, "loadings": False}
    if start != "pc":
        before = factor.fit(correlation(moments(z + 0.1 * rng.normal(size=z.shape))), kappa=kappa, max_iter=200)
        options["init"] = before.communality

    def decomposed() -> factor.Fit:
        with monkeypatch.context() as patch:
            patch.setattr(factor_solvers, "pays", lambda *_: False)
            return factor.fit(r, **options)

    name = f"d = {d}, kappa {kappa}, start {start}"
    ours, plain = compare(name, lambda: factor.fit(r, **options), decomposed, "a decomposition each")
    assert int(ours.n_iter) == int(plain.n_iter)
    np.testing.assert_allclose(ours.communality, plain.communality, atol=1e-8)
    print(f"G = {int(ours.n_factors)}, {int(ours.n_iter)} steps")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """First layer (client, unit, weight) of 100 MLPs 784-512-10, trained on MNIST with a shared last layer; 161 MB."""
    path = str(tmp_path_factory.mktemp("trained") / "run.zarr")
    data = ["--data", "mnist", "--data-dir", str(require_real_data()), "--clients", "100"]
    data += ["--partition", "dirichlet:0.5"]
    net = ["--net", "mlp", "--net-options", "hidden=512", "--algorithm", "lg-fedavg", "--keep-weights", "fc1"]
    train([*data, *net, "--rounds", "5", "--local-epochs", "1", "--out", path, "--quiet"])
    layer = fedstat.open_run(path)["weights/fc1/w"].isel(checkpoint=-1)
    return layer.transpose("client", "unit", "weight").to_numpy()


def plain_fit(w: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Principal axis at kappa 0.85 with the clients stacked, and a decomposition by NumPy in each of up to 50 steps."""
    z = np.repeat(w, counts, axis=0).swapaxes(1, 2).reshape(-1, w.shape[1])
    r = np.corrcoef(z, rowvar=False)
    values = np.linalg.eigvalsh(r)[::-1]
    g, h, change = int(np.sum(np.cumsum(values) / values.sum() < 0.85)) + 1, np.ones(len(r)), np.inf
    for _ in range(50):
        if change <= 1e-3:
            break
        values, vectors = np.linalg.eigh(r - np.diag(1 - h))
        new = vectors[:, -g:] ** 2 @ np.maximum(values[-g:], 0)
        h, change = new, np.abs(new - h).max()
    return h


@pytest.mark.parametrize("kind", ["bootstrap", "jackknife"])
def test_bench_standard_errors_of_a_trained_layer_against_a_plain_loop(
    benchmark: Any, trained: np.ndarray, kind: str
) -> None:
    """Default method, all BLAS threads; the plain loop is timed for 2 refits and scaled to all."""
    with threadpool_limits(os.cpu_count()):
        verb = fedstat.bootstrap if kind == "bootstrap" else fedstat.jackknife
        result = benchmark.pedantic(lambda: verb(trained), rounds=1)
        counts = generator(0, "bootstrap").multinomial(100, np.full(100, 0.01), size=200)
        if kind == "jackknife":
            counts = (result.client_groups != np.arange(50)[:, None]).astype(int)
        began = perf_counter()
        plain = [plain_fit(trained, count) for count in counts[:2]]
        theirs = (perf_counter() - began) / 2 * len(counts)
    np.testing.assert_allclose(result.communality[:2], plain, rtol=0, atol=1e-8)
    ours = benchmark.stats.stats.min
    name = f"{kind}, 100 clients x 512 units x 784 weights"
    print(f"\n{name}: {ours:.4g} s, plain loop {theirs:.4g} s, ratio {theirs / ours:.3g}")
