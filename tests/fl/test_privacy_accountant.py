"""ε of private runs: against dp-accounting's events, the closed form of one Gaussian release, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from small_runs import NET, dense

from fedstat.fl import aggregate, algorithms, nets, private_training, train
from fedstat.fl.job import TrainConfig
from fedstat.fl.optim import sgd
from fedstat.fl.prepare import prepare

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "privacy.json").read_text(encoding="utf-8"))
PRIVATE = aggregate.private(1.0, 1.0)


def epsilon(releases, delta=GOLDEN["delta"]):
    """Of the runs of the golden file, by the job that has such releases."""
    (count, share, sigmas), *_ = [one for one in releases if one[1] < 1 or len(releases) == 1]
    static = next((one[2][0] for one in releases if len(releases) > 1 and one[1] == 1), None)
    private = aggregate.private(
        1.0, sigmas[0], delta=delta, noise_multiplier_moments=static or (sigmas[1] if len(sigmas) > 1 else 1.0)
    )
    asks = static is not None or len(sigmas) > 1
    algorithm = algorithms.fedfac(dynamic=static is None) if asks else algorithms.fedavg()
    return private_training.epsilon(
        SimpleNamespace(aggregator=private, algorithm=algorithm, participation=share), count
    )


@pytest.mark.parametrize("name", GOLDEN["runs"])
def test_epsilon_is_that_of_dp_accounting(name):
    """Its Rényi accountant has other orders, of which the best can differ; its other one bounds ε more closely."""
    pytest.importorskip("opacus")
    known = GOLDEN["runs"][name]
    found = epsilon(known["releases"])
    assert found == pytest.approx(known["rdp"], rel=2e-3)
    assert known["pld"] < found < 1.25 * known["pld"]


@pytest.mark.parametrize("sigma", [0.7, 3.0, 20.0])
def test_one_gaussian_release_is_within_its_closed_form(sigma):
    """Balle and Wang (2018), arXiv:1805.06530, Theorem 8: δ = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ)."""
    pytest.importorskip("opacus")
    exact = brentq(lambda e: norm.cdf(0.5 / sigma - e * sigma) - np.exp(e) * norm.cdf(-0.5 / sigma - e * sigma) - 1e-5,
                   1e-6, 50)  # fmt: skip
    found = epsilon([[1, 1.0, [sigma]]])
    assert exact < found < 1.12 * exact


def test_epsilon_grows_with_rounds_and_with_what_is_released():
    pytest.importorskip("opacus")
    one, ten = (epsilon([[rounds, 0.2, [2.0]]]) for rounds in (1, 10))
    assert 0 < one < ten < 10 * one
    assert ten < epsilon([[10, 0.2, [2.0, 2.0]]])
    assert epsilon([[10, 0.2, [2.0, 2.0]]]) == pytest.approx(epsilon([[10, 0.2, [2**0.5]]]))
    assert epsilon([[0, 0.2, [2.0]]]) == 0


def test_every_round_has_its_epsilon_and_the_settings_hold_what_it_depends_on():
    pytest.importorskip("opacus")
    options = {"rounds": 3, "participation": 0.5, "sampling": "poisson", "evaluate_every": 3, "batch_size": 8}
    done = train(dense(), NET, algorithms.fedavg(), aggregator=aggregate.private(0.5, 1.5, delta=1e-3), **options)
    wanted = [epsilon([[n, 0.5, [1.5]]], delta=1e-3) for n in (1, 2, 3)]
    np.testing.assert_allclose(done["metrics/epsilon"], wanted)
    config = json.loads(done.attrs["config"])
    assert config["sampling"] == "poisson"
    assert config["privacy"] == {
        "clip": 0.5, "noise_multiplier": 1.5, "delta": 1e-3, "clip_moments": 1.0, "noise_multiplier_moments": 1.5,
        "accountant": "RDP, Opacus",
    }  # fmt: skip


def test_a_run_that_is_not_private_notes_no_privacy():
    done = train(dense(), NET, algorithms.fedavg(), rounds=1)
    assert "privacy" not in json.loads(done.attrs["config"])
    assert "epsilon" not in done["metrics"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": 0.5}, r"needs Poisson sampling, .* sampling='fixed' takes 0.5 of them"),
        ({"participation": (0.2, 0.6), "sampling": "poisson"}, r"a fixed participation rate, but got \(0.2, 0.6\)"),
        ({"sampling": "bernoulli"}, "sampling must be one of 'fixed', 'poisson'"),
    ],
)
def test_sampling_that_the_accountant_does_not_cover(options, message, monkeypatch):
    monkeypatch.setattr(private_training, "_rdp", lambda: None)
    with pytest.raises(ValueError, match=message):
        train(dense(), NET, algorithms.fedavg(), rounds=1, aggregator=PRIVATE, **options)


@pytest.mark.parametrize(("delta", "is_taken"), [(0.201, False), (0.9, False), (0.2, True), (1e-5, True)])
def test_a_delta_above_one_over_the_clients_is_refused(delta, is_taken, monkeypatch):
    monkeypatch.setattr(private_training, "_rdp", lambda: None)
    training = TrainConfig(optimizer=sgd(0.1), aggregator=aggregate.private(0.5, 1.5, delta=delta))
    if is_taken:
        assert prepare(dense(5), NET, algorithms.fedavg(), training).aggregator.privacy.delta == delta
        return
    with pytest.raises(ValueError, match=rf"delta must be at most 1 / clients, 0\.2 for 5 clients, but got {delta:g}"):
        prepare(dense(5), NET, algorithms.fedavg(), training)


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'fedstat\[privacy\]'"):
        train(dense(), nets.mlp([6, 4, 1]), algorithms.fedavg(), rounds=1, aggregator=PRIVATE)
