"""What the server learns of clients' weights for a split: clipped moments, with noise of the size that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from fedstat._utils import streams
from fedstat.fl import privacy
from fedstat.fl.privacy import Privacy, noised_moments
from fedstat.stats.moments import correlation, moments

QUIET = 1e-12
WEIGHTS = np.random.default_rng(0).normal(size=(5, 7, 4)) @ np.diag([1.0, 10, 0.1, 1]) + 0.3  # (client, row, unit)


def standard(z, scale):
    z = z / scale
    return z.mean(0), z.T @ z / len(z)


@pytest.mark.parametrize("clip", [0.5, 0.9, 5.0])
def test_moments_are_clipped_in_one_norm_across_layers(clip):
    server = {"a": WEIGHTS[0], "b": WEIGHTS[1][:, :2]}
    clients = [{"a": w, "b": 2 * w[:, :2]} for w in WEIGHTS]
    found = noised_moments(
        [{layer: moments(z) for layer, z in one.items()} for one in clients],
        {layer: moments(z) for layer, z in server.items()},
        Privacy(1.0, 1.0, 1e-5, clip, QUIET),
        5.0,
        lambda layer: streams.generator(0, layer),
    )

    def norm(parts):
        return np.sqrt(sum((mean**2).sum() + (second**2).sum() for mean, second in parts.values()))

    scale = {layer: np.sqrt((z**2).mean(0)) for layer, z in server.items()}
    limit = clip * norm({layer: standard(z, scale[layer]) for layer, z in server.items()})
    total = {layer: [0, 0] for layer in server}
    for one in clients:
        parts = {layer: standard(z, scale[layer]) for layer, z in one.items()}
        factor = min(1, limit / norm(parts))
        assert factor < 1 or clip > 1
        for layer, both in parts.items():
            total[layer] = [have + factor * more / 5 for have, more in zip(total[layer], both, strict=True)]
    for layer, (mean, second) in total.items():
        s = scale[layer]
        np.testing.assert_allclose(found[layer].mean, mean * s)
        cov = (second - np.outer(mean, mean)) * np.outer(s, s)
        np.testing.assert_allclose(found[layer].cross, 35 * cov, atol=1e-9)
        if clip == 5:
            exact = np.corrcoef(np.concatenate([one[layer] for one in clients]).T)
            np.testing.assert_allclose(correlation(found[layer]), exact, atol=1e-9)


def test_the_noise_on_moments_has_the_standard_deviation_that_was_asked_for():
    rows = np.random.default_rng(1).normal(size=(40, 6))
    server = moments(rows - rows.mean(0))
    square = server.cross.diagonal() / 40 + server.mean**2
    scale = np.sqrt(square)
    second = (server.cross / 40 + np.outer(server.mean, server.mean)) / np.outer(scale, scale)
    limit = np.sqrt((second**2).sum() + ((server.mean / scale) ** 2).sum())
    many = [{"a": server}] * 100  # so that nothing is floored
    drawn = [
        noised_moments(many, {"a": server}, Privacy(1, 1, 1e-5, 1.0, 0.2), 100.0, lambda _, s=s: streams.generator(s))
        for s in range(200)
    ]
    means = np.array([one["a"].mean / scale for one in drawn])
    seconds = np.array([one["a"].cross / 4000 / np.outer(scale, scale) for one in drawn])
    sd = 0.2 * limit / 100
    assert means.std() == pytest.approx(sd, rel=4 / np.sqrt(2 * means.size))
    cov = seconds - (second - np.outer(server.mean / scale, server.mean / scale))
    upper, own = cov[:, *np.triu_indices(6, 1)], cov[:, np.arange(6), np.arange(6)]
    # The Frobenius norm has the upper half twice.
    assert upper.std() == pytest.approx(sd / np.sqrt(2), rel=4 / np.sqrt(2 * upper.size))
    assert own.std() == pytest.approx(sd, rel=4 / np.sqrt(2 * own.size))


def test_what_the_noise_on_means_adds_to_variances_is_taken_off(monkeypatch):
    monkeypatch.setattr(privacy, "_nearest_covariance", lambda cov: cov)
    sd = 0.3
    rows = np.random.default_rng(1).normal(size=(40, 6))
    server = moments(rows - rows.mean(0))
    scale = np.sqrt(server.cross.diagonal() / 40)
    limit = np.linalg.norm(server.cross / 40 / np.outer(scale, scale))
    given = Privacy(1, 1, 1e-5, 1.0, sd * 100 / limit)
    drawn = [
        noised_moments([{"a": server}] * 100, {"a": server}, given, 100.0, lambda _, s=s: streams.generator(s))["a"]
        for s in range(300)
    ]
    variance = np.array([one.cross.diagonal() / 4000 / scale**2 for one in drawn])
    # That of the noise on a variance, and of the square of that on a mean.
    error = np.sqrt((sd**2 + 2 * sd**4) / variance.size)
    assert variance.mean() == pytest.approx(1, abs=4 * error)
    assert sd**2 > 8 * error, "else it could not be seen"


@pytest.mark.parametrize("sigma", [0.5, 50.0])
def test_noise_alone_still_makes_a_correlation(sigma):
    server = moments(np.random.default_rng(1).normal(size=(40, 6)))
    given = Privacy(1.0, 1.0, 1e-5, 1.0, sigma)
    r = correlation(noised_moments([], {"a": server}, given, 100.0, lambda _: streams.generator(3))["a"])
    np.testing.assert_allclose(r.diagonal(), 1)
    np.testing.assert_array_equal(r, r.T)
    assert np.linalg.eigvalsh(r).min() > -1e-9
    assert np.isfinite(r).all()
