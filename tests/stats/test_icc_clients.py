"""Agreement with clients as the sample, against plain leave-one-out and against every exchange that there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scipy
import torch

import fedstat.labelled as fs
from fedstat.stats import icc, icc_clients


def layer(clients: int, units: int, shared: int, seed: int = 0, weights: int = 20) -> np.ndarray:
    """Clients agree on the first units; they have offsets."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(clients, units, weights)) + 0.3 * rng.normal(size=(clients, units, 1))
    w[:, :shared] += 1.5 * rng.normal(size=(shared, weights))
    return w


def over_clients(w: np.ndarray, **options: int) -> icc_clients.OverClients:
    return icc_clients.over_clients(lambda: [w], icc.sums(w), **options)


@pytest.mark.parametrize("clients", [3, 8])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_intervals_are_the_jackknife_of_a_plain_loop(clients: int, offset: float) -> None:
    w = offset + layer(clients, 5, 2)
    found = fs.icc(w, level=0.9)
    left = [fs.icc(np.delete(w, c, axis=0), inference="F") for c in range(clients)]
    t = scipy.stats.t.ppf(0.95, clients - 1)
    for whole, parts in (
        (found.coefficients, [x.coefficients for x in left]),
        (found.layer_coefficients, [x.layer_coefficients for x in left]),
    ):
        at = -np.log1p(-whole.icc[..., :3])
        others = np.stack([-np.log1p(-p.icc[..., :3]) for p in parts])
        half = t * np.sqrt((clients - 1) * others.var(axis=0))
        expected = np.maximum(-np.expm1(half - at), -1 / (clients - 1))
        np.testing.assert_allclose(whole.conf_low[..., :3], np.minimum(expected, whole.icc[..., :3]), atol=1e-8)
        np.testing.assert_allclose(whole.conf_high[..., :3], -np.expm1(-half - at), atol=1e-8)
        stepped = clients * whole.conf_high[..., 1] / (1 + (clients - 1) * whole.conf_high[..., 1])
        np.testing.assert_allclose(whole.conf_high[..., 4], stepped)


def test_p_values_are_those_of_all_exchanges() -> None:
    """Three units in three clients: nine ways to shift them against each other."""
    w = layer(3, 3, 1, seed=3)
    found = over_clients(w, seed=1)
    x = w - w.mean(axis=2, keepdims=True)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    shifted = [sum(np.roll(one, by, axis=0) for one, by in zip(x, (0, *rest), strict=True)) for rest in
               product(range(3), repeat=2)]  # fmt: skip
    null = np.square(shifted).sum(axis=2)
    exact = (null[..., None] >= null[0] - 1e-9).mean(axis=(0, 1))
    error = np.sqrt(exact * (1 - exact) / found.n_exchanges) + 1e-12
    assert (np.abs(found.units.p_value[:, 0] - exact) < 4 * error + 1e-3).all()
    whole = (null.sum(axis=1) >= null[0].sum() - 1e-9).mean()
    assert abs(found.layer.p_value[0] - whole) < 4 * np.sqrt(whole / found.n_exchanges) + 1e-3
    pairs = [(x[a, u] * x[b, u]).sum() for u in range(3) for a, b in ((0, 1), (0, 2), (1, 2))]
    np.testing.assert_allclose(found.units.statistic[:, 0], np.reshape(pairs, (3, 3)).mean(axis=1), atol=1e-6)


def test_sizes_and_means_of_clients_and_units_change_no_p_value() -> None:
    w, rng = layer(6, 20, 4), np.random.default_rng(1)
    moved = 2.0 ** rng.integers(-4, 5, size=(6, 20, 1)) * w
    np.testing.assert_array_equal(over_clients(moved).units.p_value, over_clients(w).units.p_value)
    offsets = w + 8 * rng.normal(size=(6, 20, 1))
    np.testing.assert_allclose(over_clients(offsets).units.p_value, over_clients(w).units.p_value, atol=1e-3)


@pytest.mark.parametrize(("units", "shared"), [(8, 3), (30, 6), (30, 24), (20, 18), (80, 10)])
def test_shared_units_are_called_and_no_other(units: int, shared: int) -> None:
    found = fs.icc(layer(12, units, shared))
    called = found.p_fdr[:, 1] <= 0.05
    assert called[:shared].all()
    assert called[shared:].sum() <= 2
    assert found.glance()["layer_p_value"][0] <= 0.01


def test_what_all_units_have_in_common_is_no_agreement_on_a_unit() -> None:
    rng = np.random.default_rng(0)
    common = 2 * rng.normal(size=20)
    own = fs.icc(layer(12, 30, 0) + common)
    assert own.agreement.min() > 0.5
    assert own.glance()["n_agreeing"][0] == 0
    some = fs.icc(layer(12, 30, 6) + common)
    assert (np.flatnonzero(some.p_fdr[:, 1] <= 0.05) < 6).sum() == 6


def test_constant_rows_neither_agree_nor_disturb() -> None:
    w = layer(6, 20, 4)
    w[2, 7] = 0.5  # one client's unit is constant
    w[:, 11] = 1.0  # a dead unit
    w[1:, 13] = 3.0  # a unit that varies in one client alone
    found = fs.icc(w)
    p = found.coefficients.p_value[:, 1]
    assert np.isnan(p[[11, 13]]).all()
    assert np.isnan(found.tidy().query("unit == 13 and type == 'ICC2'")["correlation"]).all()
    assert np.isfinite(np.delete(p, [11, 13])).all()
    assert (p[:4] < 0.01).all()
    assert "dead: 11" in repr(found)
    assert "1 dead, 1 not tested" in repr(found)


def test_units_that_vary_in_few_clients_make_no_other_unit_agree() -> None:
    """Dead units after a start is subtracted, pruned rows: their sums spread less, and are scaled to be compared."""
    called = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        w = np.zeros((10, 25, 30))
        w[:, :5] = rng.normal(size=(10, 5, 30))
        for unit in range(5, 25):
            w[rng.permutation(10)[:2], unit] = rng.normal(size=(2, 30))
        called.append(fs.icc(w, seed=seed).coefficients.p_value[:5, 1] <= 0.05)
    assert np.mean(called) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)


def test_equal_units_agree_on_which_unit_is_which_in_no_layer() -> None:
    one = np.random.default_rng(0).normal(size=(5, 1, 30))
    for units in (12, 20):
        p = fs.icc(np.repeat(one, units, axis=1)).coefficients.p_value
        np.testing.assert_array_equal(p, 1)


def test_two_clients_have_no_interval_and_one_unit_no_test() -> None:
    two, one = fs.icc(layer(2, 5, 2)), fs.icc(layer(5, 1, 1))
    assert two.tidy()[["conf_low", "conf_high"]].isna().all(axis=None)
    assert "no interval: it leaves out a client, of at least 3" in repr(two)
    assert one.tidy()["p_value"].isna().all()
    assert one.tidy()["conf_low"].notna().all()
    assert "no test" in repr(one)


def test_one_client_that_differs_from_equal_ones_makes_an_interval_that_is_no_claim() -> None:
    w = np.repeat(np.random.default_rng(0).normal(size=(1, 2, 20)), 4, axis=0)
    equal = fs.icc(w).coefficients
    np.testing.assert_array_equal((equal.conf_low, equal.conf_high), 1)
    w[0] += 0.5 * np.random.default_rng(1).normal(size=(2, 20))
    apart = fs.icc(w).coefficients
    np.testing.assert_allclose(apart.conf_low[:, 1], -1 / 3)
    np.testing.assert_array_equal(apart.conf_high[:, 1], 1)


def test_blocks_of_clients_and_tensors_give_the_same() -> None:
    w = layer(9, 20, 4)
    whole, total = over_clients(w, seed=3), icc.sums(w)
    tensors = torch.asarray(w)
    others = (
        icc_clients.over_clients(lambda: [w[:2], w[2:3], w[3:]], total, seed=3),
        icc_clients.over_clients(lambda: [tensors[:5], tensors[5:]], icc.sums(tensors), seed=3),
    )
    for found in others:
        for a, b in ((found.units, whole.units), (found.layer, whole.layer)):
            for x, y in zip(a, b, strict=True):
                if y is not None:
                    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_a_start_is_subtracted_before_the_test() -> None:
    w, start = layer(8, 10, 0, seed=1), 5 * np.random.default_rng(9).normal(size=(10, 20))
    assert fs.icc(w + start).glance()["n_agreeing"][0] == 10
    moved = fs.icc(w + start, start=start)
    assert moved.glance()["n_agreeing"][0] == 0
    np.testing.assert_allclose(moved.coefficients.p_value, fs.icc(w).coefficients.p_value, atol=1e-3)


def test_draws_depend_on_the_seed_alone() -> None:
    w = layer(5, 12, 3)
    a, b, c = (fs.icc(w, seed=s).tidy() for s in (1, 1, 2))
    assert a.equals(b)
    assert not a["p_value"].equals(c["p_value"])
    assert a["conf_low"].equals(c["conf_low"])


def test_an_unknown_inference_is_refused() -> None:
    with pytest.raises(ValueError, match="inference must be"):
        fs.icc(layer(3, 3, 1), inference="f")
