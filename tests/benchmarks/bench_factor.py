"""Speed of factor analysis against named peers, one BLAS thread each: `pytest tests/benchmarks --benchmark-only -s`.

Every benchmark checks that both sides give the same answer; the ratio is printed, never judged.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
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
from fedstat.stats import factor, factor_solvers, resampling
from fedstat.stats.moments import correlation, moments

pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def ten_factors(d: int) -> np.ndarray:
    """Correlations of d units that follow ten factors, with as much noise as signal."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4 * d, 10)) @ rng.normal(size=(10, d)) + np.sqrt(10) * rng.normal(size=(4 * d, d))
    return correlation(moments(z))


def seconds(run: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Shortest time of a peer, and its answer."""
    times, answer = [], None
    for _ in range(repeats):
        began = perf_counter()
        answer = run()
        times.append(perf_counter() - began)
    return min(times), answer


def say(name: str, ours: float, peer: str, theirs: float) -> None:
    print(f"\n{name}: {ours:.4f} s, {peer} {theirs:.4f} s, ratio {theirs / ours:.1f}")


@pytest.mark.parametrize("d", [200, 512, 1024, 2048])
def test_bench_principal_axis_against_statsmodels(benchmark: Any, d: int) -> None:
    r = ten_factors(d)
    ours = benchmark.pedantic(lambda: factor.fit(r, n_factors=10, tol=1e-8), rounds=5, warmup_rounds=1)
    peer = lambda: Factor(corr=r, n_factor=10, method="pa", smc=False).fit(maxiter=50, tol=1e-8)  # noqa: E731
    theirs, answer = seconds(peer, repeats=1 if d > 1024 else 3)
    np.testing.assert_allclose(ours.communality, answer.communality, atol=1e-7)
    say(f"pa, 10 factors, d = {d}", benchmark.stats.stats.min, "statsmodels pa", theirs)


def test_bench_minres_against_factor_analyzer(benchmark: Any) -> None:
    r = ten_factors(200)
    ours = benchmark.pedantic(lambda: factor.fit(r, n_factors=10, method="minres"), rounds=5, warmup_rounds=1)
    peer = FactorAnalyzer(n_factors=10, method="minres", rotation=None)
    # FactorAnalyzer.fit fails in scikit-learn's input check since 1.8; what it calls next does not.
    theirs, loadings = seconds(lambda: peer._fit_factor_analysis(r), repeats=1)
    np.testing.assert_allclose(ours.communality, (loadings**2).sum(1), atol=1e-2)
    say("minres, 10 factors, d = 200", benchmark.stats.stats.min, "factor_analyzer minres", theirs)


def golden() -> dict[str, dict[str, Any]]:
    cases = json.loads((Path(__file__).parents[1] / "golden" / "psych.json").read_text())["cases"]
    return {c["name"]: c for c in cases}


@pytest.mark.parametrize(
    ("name", "kappa"), [("harman24", 0.75), ("bfi", 0.75), ("thurstone", None), ("reise", None), ("harman24", None)]
)
def test_bench_eigensolves_of_minres_against_plain_principal_axis(
    benchmark: Any, name: str, kappa: float | None
) -> None:
    case = golden()[name]
    r, options = np.array(case["r"]), {"n_factors": case["n_factors"]} if kappa is None else {"kappa": kappa}
    ours = benchmark.pedantic(lambda: factor.fit(r, method="minres", tol=1e-8, **options), rounds=5, warmup_rounds=1)
    steps = 0
    point = factor.fit(r, max_iter=100_000, tol=1e-12, **options)
    h: Any = "pc"
    while steps == 0 or np.abs(h - point.communality).max() > 1e-6:  # plain steps to the common point
        steps += 1
        h = factor.fit(r, init=h, max_iter=1, tol=0, **options).communality
    np.testing.assert_allclose(ours.communality, point.communality, atol=1e-6)
    print(f"\n{name}, G = {int(ours.n_factors)}: minres {int(ours.n_iter)} eigensolves, plain {steps}, "
          f"ratio {steps / int(ours.n_iter):.1f}")  # fmt: skip


@pytest.mark.parametrize("method", ["pa", "minres"])
def test_bench_kappa_085_per_evaluation_against_one_eigendecomposition(benchmark: Any, method: factor.Method) -> None:
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, size=(1, 256, 100)) * np.ones((20, 1, 1))
    w = np.concatenate([w, rng.normal(size=(20, 256, 100)) + rng.normal(size=(20, 1, 100))], axis=1)
    r = correlation(moments(w.swapaxes(1, 2).reshape(-1, 512)))
    ours = benchmark.pedantic(
        lambda: factor.fit(r, kappa=0.85, method=method, max_iter=20, tol=1e-12), rounds=3, warmup_rounds=1
    )
    theirs, _ = seconds(lambda: np.linalg.eigh(r), repeats=5)
    each = benchmark.stats.stats.min / (int(ours.n_iter) + (method == "minres"))  # minres needs R's eigenvalues first
    print(f"\n{method}, kappa 0.85, d = 512, G = {int(ours.n_factors)}: {each:.4f} s an evaluation, "
          f"numpy eigh {theirs:.4f} s, ratio {each / theirs:.2f}")  # fmt: skip


@pytest.mark.parametrize("kappa", [0.75, 0.85])
@pytest.mark.parametrize("d", [200, 512])
@pytest.mark.parametrize("start", ["pc", "the last round's"])
def test_bench_steps_followed_against_a_decomposition_each(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, d: int, kappa: float, start: str
) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2 * d, d))
    r, options = correlation(moments(z)), {"kappa": kappa, "loadings": False}
    if start != "pc":
        before = factor.fit(correlation(moments(z + 0.1 * rng.normal(size=z.shape))), kappa=kappa, max_iter=200)
        options["init"] = before.communality
    ours = benchmark.pedantic(lambda: factor.fit(r, **options), rounds=5, warmup_rounds=1)
    monkeypatch.setattr(factor_solvers, "pays", lambda *_: False)
    theirs, plain = seconds(lambda: factor.fit(r, **options))
    assert int(ours.n_iter) == int(plain.n_iter)
    np.testing.assert_allclose(ours.communality, plain.communality, atol=1e-8)
    name = f"d = {d}, kappa {kappa}, G = {int(ours.n_factors)}, start {start}, {int(ours.n_iter)} steps"
    say(name, benchmark.stats.stats.min, "a decomposition each", theirs)


@pytest.mark.parametrize("options", [{"method": "pc"}, {"n_factors": 10}, {"kappa": 0.85}], ids=str)
def test_bench_bootstrap_against_refits_of_stacked_clients(benchmark: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)  # the first layer of 100 MLPs 784-200-10
    common = rng.normal(size=(200, 10)) @ rng.normal(size=(10, 784))
    w = common + 3 * rng.normal(size=(100, 200, 784))
    sums = moments(w.swapaxes(1, 2))
    shown = 20 if "kappa" in options else 200
    ours = benchmark.pedantic(
        lambda: resampling.bootstrap(sums, replicates=shown, seed=0, **options), rounds=1, warmup_rounds=0
    )
    counts = generator(0, "bootstrap").multinomial(100, np.full(100, 0.01), size=shown)

    def stacked(peer: Callable[[np.ndarray, int], Any], some: int) -> float:
        began = perf_counter()
        for b in range(some):
            z = np.repeat(w, counts[b], axis=0).swapaxes(1, 2).reshape(-1, 200)
            np.testing.assert_allclose(peer(z, b), ours.communality[b], atol=1e-6)
        return (perf_counter() - began) / some * shown

    def same(z: np.ndarray, _: int) -> Any:
        return factor.fit(correlation(moments(z)), **options).communality

    def statsmodels(z: np.ndarray, b: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Factor(endog=z, n_factor=int(ours.n_factors[b]), method="pa", smc=False).fit(maxiter=50, tol=1e-3)
        return ours.communality[b]  # stops by another rule; timed, not compared

    time = benchmark.stats.stats.min
    say(f"bootstrap {options}, {shown} replicates", time, "our fit, restacked", stacked(same, 5))
    if "method" not in options:
        say(f"bootstrap {options}, {shown} replicates", time, "statsmodels, restacked", stacked(statsmodels, 5))


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
    say(f"{kind}, 100 clients x 512 units x 784 weights", benchmark.stats.stats.min, "plain loop", theirs)
