"""Training with matrix products of bfloat16."""

from __future__ import annotations

import algorithm_jobs as jobs
import pytest
import torch

from fedstat.fl import algorithms, nets, optim
from fedstat.fl import job as job_module
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.fl.job import ComputeConfig, TrainConfig
from fedstat.fl.prepare import prepare

# A unit's communality may pass the median of the others by rounding; a mask may pass its threshold.
DECIDES = ("fedfac", "factorized-fl", "fedcac", "pfedgate", "clustered-fl")
# Differences of gradients, and products of factors that begin near 0, have fewer digits.
LOSES = {"per-fedavg-hf": 0.2, "feddecomp": 0.1}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_trains_as_in_float32_but_for_rounding(name):
    exact, rounded = (jobs.job(jobs.make(name), precision=precision) for precision in ("float32", "bfloat16"))
    start, a, b = (
        {**state.global_params, **{f"own {n}": p for n, p in state.client_params.saved().items()}}
        for state in (jobs.run(exact, 0), jobs.run(exact, 1), jobs.run(rounded, 1))
    )
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in (*a.values(), *b.values()))
    assert jobs.distance(a, b) > 0
    if not name.startswith(DECIDES):
        assert jobs.distance(a, b) < LOSES.get(name, 0.02) * jobs.distance(a, start)


@pytest.mark.parametrize("wrap", [None, algorithms.feddecomp(rank_linear=0.3).wrap])
@pytest.mark.parametrize("sizes", [[6, 10, 3], [6, 3]])
def test_gradients_written_by_hand_are_those_of_autograd(wrap, sizes):
    net = nets.mlp(sizes)
    net = wrap(net) if wrap else net
    generator = torch.Generator().manual_seed(0)
    params = {n: torch.randn(4, *shape, generator=generator).div_(3) for n, shape in net.shapes.items()}
    x = torch.randn(4, 9, 6, generator=generator)

    def found(accumulate, reduced, beta):
        into = {n: torch.ones_like(p) for n, p in params.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            accumulate({n: p.clone() for n, p in params.items()}, x, torch.Tensor.float, into, beta, -0.5)
        return into

    def by_autograd(*arguments):
        nets.accumulate_by_autograd(net.apply, *arguments)

    for beta in (0.0, 1.0):
        exact, hand, auto = (
            found(net.accumulate, False, beta),
            found(net.accumulate, True, beta),
            found(by_autograd, True, beta),
        )
        for n, p in exact.items():
            size = torch.linalg.vector_norm(p - beta)  # of the gradient: into was 1
            assert size > 0
            assert torch.linalg.vector_norm(hand[n] - p) < 0.03 * size
            assert torch.linalg.vector_norm(hand[n] - auto[n]) < 0.03 * size
            assert hand[n].dtype == torch.float32
        assert any(not torch.equal(hand[n], p) for n, p in exact.items())


def test_a_cpu_without_bfloat16_is_told_of(monkeypatch):
    training = TrainConfig(optimizer=optim.sgd(0.1))
    settings = jobs.dataset(jobs.SAMPLES), nets.mlp(jobs.SIZES), algorithms.fedavg(), training
    monkeypatch.setattr(job_module, "_has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="no instructions for bfloat16"):
        prepare(*settings, ComputeConfig(precision="bfloat16"))
    monkeypatch.setattr(job_module, "_has_bfloat16", lambda: True)
    prepare(*settings, ComputeConfig(precision="bfloat16"))  # warnings are errors


def test_what_the_cpu_can_do_is_asked_of_it(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for answers, expected in (((False, False), False), ((True, False), True), ((False, True), True)):
        for name, answer in zip(("_is_avx512_bf16_supported", "_is_amx_tile_supported"), answers, strict=True):
            monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer, raising=False)
        assert job_module._has_bfloat16() is expected
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert job_module._has_bfloat16()
