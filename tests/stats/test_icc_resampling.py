"""Bootstrap of intraclass correlations over clients."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat.labelled as fs
from fedstat._utils.streams import generator
from fedstat.stats import icc, icc_resampling


def weights(seed: int = 0, clients: int = 8, units: int = 4, signal: float = 1.0, offset: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    common = signal * rng.normal(size=(1, units, 15))
    return common + offset * rng.normal(size=(clients, units, 1)) + rng.normal(size=(clients, units, 15))


def by_pairs(w: np.ndarray, drawn: np.ndarray) -> list[float]:
    """ICC1, ICC2 and ICC3 of one unit (client, weight) from all pairs of different clients among those drawn."""
    pairs = [(a, b) for i, a in enumerate(drawn) for b in drawn[:i] if a != b]
    n, k = w.shape[1], len(drawn)
    centred = w - w.mean(1, keepdims=True)
    common = np.mean([centred[a] @ centred[b] / (n - 1) for a, b in pairs])
    error = np.mean([np.sum((centred[a] - centred[b]) ** 2) / (n - 1) / 2 for a, b in pairs])
    msj = n * np.mean([(w[a].mean() - w[b].mean()) ** 2 / 2 for a, b in pairs])
    msb, msw = k * common + error, (msj + (n - 1) * error) / n
    clients = (msj - error) / n
    return [(msb - msw) / (msb + (k - 1) * msw), common / (common + clients + error), common / (common + error)]


def test_the_sample_itself_is_the_replicate_that_draws_every_client_once() -> None:
    w = weights() + 5.0
    pairs, _ = icc_resampling._pairs(*icc.block(w))
    found = icc_resampling._resample(pairs, np.ones((1, 8)), 15)
    np.testing.assert_allclose(found[0], fs.icc(w).coefficients.icc, rtol=1e-10)


@pytest.mark.parametrize("cached", [1, 200, 1 << 20])
def test_replicates_are_means_over_pairs_of_different_clients(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icc, "_CACHED", cached)
    w = weights()
    units, layer = icc_resampling.bootstrap(w, replicates=12, seed=3)
    counts = generator(3, "icc bootstrap").multinomial(8, np.full(8, 1 / 8), size=12)
    assert (counts.max(1) > 1).all()
    for b in range(12):
        drawn = np.repeat(np.arange(8), counts[b])
        for j in range(4):
            np.testing.assert_allclose(units[b, j, :3], by_pairs(w[:, j], drawn), rtol=1e-9)
        np.testing.assert_allclose(layer[b, :3], by_pairs(w.reshape(8, -1), drawn), rtol=1e-9)


def test_a_client_drawn_twice_does_not_count_as_agreement() -> None:
    w = weights(clients=10, units=60, signal=0.0, offset=0.0)
    units, _ = icc_resampling.bootstrap(w, replicates=100)
    assert abs(units[..., 1].mean()) < 0.01  # counting them would give about 1 / 10
    table = fs.icc(w, n_boot=200).tidy().query("type == 'ICC2'")
    assert ((table["boot_low"] <= 0) & (table["boot_high"] >= 0)).mean() > 0.8


def test_standard_errors_are_those_of_repeated_sampling_of_clients() -> None:
    rng = np.random.default_rng(2)
    common = rng.normal(size=(1, 1, 15))

    def sample() -> np.ndarray:
        """Clients differ in how much noise they have, so that they are what varies."""
        return common + rng.gamma(4.0, size=(100, 1, 1)) / 4 * rng.normal(size=(100, 1, 15))

    truth = np.std([fs.icc(sample(), inference="F").agreement[0] for _ in range(300)])
    found = [fs.icc(sample(), inference="F", n_boot=100, seed=s).tidy()["std_error"][1] for s in range(20)]
    error = np.hypot(np.std(found) / 20**0.5, truth / 600**0.5)
    assert abs(np.mean(found) - truth) < 4 * error


def test_the_bootstrap_is_reproducible_and_leaves_the_rest_alone() -> None:
    a, b = (fs.icc(weights(), n_boot=20, seed=4).tidy() for _ in range(2))
    assert a.equals(b)
    single = a[~a["type"].str.endswith("k")]
    assert (single["estimated"] == (single["boot_high"] - single["boot_low"] <= 4 / 7)).all()
    drawn = ["std_error", "boot_low", "boot_high", "estimated"]
    pd.testing.assert_frame_equal(a.drop(columns=drawn), fs.icc(weights(), seed=4).tidy().drop(columns="estimated"))
    assert not a["std_error"].equals(fs.icc(weights(), n_boot=20, seed=5).tidy()["std_error"])


def test_offsets_and_scales_cost_a_replicate_no_digits() -> None:
    w = np.round(weights() * 2**20) / 2**20
    near, far = (icc_resampling.bootstrap(x, replicates=10)[0] for x in (w, w + 2.0**26))
    np.testing.assert_allclose(far, near, atol=1e-9)
    by = 2.0 ** np.array([700.0, -700, 0, 1000])[:, None]
    np.testing.assert_array_equal(icc_resampling.bootstrap(by * w, replicates=10)[0], near)


def test_replicates_that_draw_one_client_alone_are_left_out() -> None:
    units, layer = icc_resampling.bootstrap(weights(clients=3), replicates=60, seed=0)
    alone = np.isnan(layer).all(axis=1)
    assert 0 < alone.sum() < 20
    np.testing.assert_array_equal(np.isnan(units).all(axis=(1, 2)), alone)
    table = fs.icc(weights(clients=3), n_boot=60).tidy()
    assert table[["std_error", "boot_low", "boot_high"]].notna().all(axis=None)


def test_equal_clients_agree_in_every_replicate() -> None:
    w = np.repeat(0.1 + weights(clients=1), 6, axis=0)
    units, layer = icc_resampling.bootstrap(w, replicates=20)
    np.testing.assert_array_equal(units, 1)
    np.testing.assert_array_equal(layer, 1)
