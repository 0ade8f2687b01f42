"""Agreement with clients as the sample, against plain loops over pairs of units, sign patterns and left-out clients."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
import scipy
import torch

import fedstat.labelled as fs
from fedstat.stats import icc, icc_resampling, icc_tests


def layer(clients: int, units: int, shared: int, seed: int = 0, weights: int = 20) -> np.ndarray:
    """Clients agree on the first units; they have offsets."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(clients, units, weights)) + 0.3 * rng.normal(size=(clients, units, 1))
    w[:, :shared] += 1.5 * rng.normal(size=(shared, weights))
    return w


def over_clients(w: np.ndarray, test: icc_tests.Test = icc_tests.sign_flips) -> icc_resampling.OverClients:
    return icc_resampling.over_clients(lambda: [w], icc.sums(w), test)


def plain_rows(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centered rows, each client's layer of norm 1, and which of them vary."""
    x = w - w.mean(axis=2, keepdims=True)
    x[np.ptp(w, axis=2) == 0] = 0
    return x / np.linalg.norm(x, axis=(1, 2), keepdims=True), np.ptp(w, axis=2) > 0


def plain_products(w: np.ndarray, reference: list[int]) -> np.ndarray:
    """Products (unit, pair) less the common profile, by loops over pairs of different reference units."""
    x, varies = plain_rows(w)
    found = np.zeros((w.shape[1], len(w) * (len(w) - 1) // 2))
    for u, (n, (c, e)) in product(range(w.shape[1]), enumerate(combinations(range(len(w)), 2))):
        a, b = ([v for v in reference if v != u and varies[k, v]] for k in (c, e))
        different = [x[c, v] @ x[e, o] for v in a for o in b if v != o]
        if varies[c, u] and varies[e, u] and different:
            found[u, n] = x[c, u] @ x[e, u] - x[c, u] @ x[e, b].mean(axis=0) - x[e, u] @ x[c, a].mean(axis=0)
            found[u, n] += np.mean(different)
    return found


def plain_flips(products: np.ndarray, clients: int, tested: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Statistics of units, their p values and that of the layer, over all sign patterns."""
    r = products / np.linalg.norm(products, axis=1, keepdims=True)
    signs = np.array([(1, *rest) for rest in product((1, -1), repeat=clients - 1)])
    flips = np.array([[s[a] * s[b] for a, b in combinations(range(clients), 2)] for s in signs])
    t = flips @ r.T
    pool = t[1:, tested]
    p = np.array([(1 + (pool >= one - 1e-9).sum()) / (1 + pool.size) for one in t[0]])
    return t[0], np.where(tested, p, np.nan), (t.sum(axis=1) >= t[0].sum() - 1e-9).mean()


def uneven_layer() -> np.ndarray:
    """Six clients; a unit does not vary in one of them, another varies in four, one has an offset."""
    w = layer(6, 5, 1, seed=3, weights=9)
    w[2, 1], w[3, 0], w[4, 0] = 0.5, 2.0, 1.0
    w[:, 4] += 1
    return w


@pytest.mark.parametrize("w", [layer(6, 5, 0, seed=1), uneven_layer()], ids=["all vary", "uneven"])
def test_sign_flips_equal_plain_loops(w: np.ndarray) -> None:
    found = over_clients(w).test
    tested = plain_rows(w)[1].sum(axis=0) >= 5
    statistic, p_value, layer_p = plain_flips(plain_products(w, list(range(w.shape[1]))), len(w), tested)
    np.testing.assert_allclose(found.statistic, np.where(tested, statistic, np.nan), atol=1e-5)
    np.testing.assert_allclose(found.p_value, p_value)
    assert found.layer_p_value == layer_p
    assert found.layer_statistic == pytest.approx(statistic.sum(), abs=1e-5)
    assert found.n_patterns == 2 ** (len(w) - 1) - 1


def test_units_that_are_called_leave_the_common_profile() -> None:
    w = layer(8, 7, 3, seed=2)
    found = fs.icc(w)
    assert (found.p_adjusted[:3, 1] <= 0.05).all()
    assert (found.p_adjusted[3:, 1] > 0.05).all()
    _, p_value, _ = plain_flips(plain_products(w, [3, 4, 5, 6]), 8, np.ones(7, dtype=bool))
    np.testing.assert_allclose(found.coefficients.p_value[:, 1], p_value)


def test_the_common_profile_has_its_size_and_p_value() -> None:
    rng = np.random.default_rng(0)
    profile = rng.normal(size=20)
    with_it = over_clients(layer(8, 12, 0) + profile).test
    x, _ = plain_rows(layer(8, 12, 0) + profile)
    pairs = [(u, v) for u, v in product(range(12), repeat=2) if u != v]
    different = [x[c, u] @ x[e, v] for c, e in combinations(range(8), 2) for u, v in pairs]
    assert with_it.profile_proportion == pytest.approx(12 * np.mean(different), rel=1e-5)
    assert with_it.profile_p_value == 1 / 128
    assert over_clients(layer(8, 12, 0)).test.profile_p_value > 0.05


@pytest.mark.parametrize("clients", [6, 13])
def test_enumerated_patterns_need_no_seed(clients: int) -> None:
    a, b = (over_clients(layer(clients, 6, 2), partial(icc_tests.sign_flips, seed=seed)).test for seed in (0, 1))
    np.testing.assert_array_equal(a.p_value, b.p_value)
    assert (a.layer_p_value, a.profile_p_value) == (b.layer_p_value, b.profile_p_value)


def test_drawn_patterns_differ_by_their_monte_carlo_error() -> None:
    w = layer(20, 10, 0, seed=5) + 0.15 * np.random.default_rng(1).normal(size=(10, 20))
    found = [over_clients(w, partial(icc_tests.sign_flips, seed=seed)).test for seed in range(8)]
    layers = np.array([one.layer_p_value for one in found])
    units = np.array([one.p_value for one in found])
    assert len(set(layers)) > 1
    assert np.ptp(layers) < 6 * np.sqrt(layers.mean() * (1 - layers.mean()) / 9999)
    assert (np.ptp(units, axis=0) < 6 * np.sqrt(units.mean(axis=0) * (1 - units.mean(axis=0)) / 4000)).all()
    again = over_clients(w, partial(icc_tests.sign_flips, seed=3)).test
    np.testing.assert_array_equal(again.p_value, found[3].p_value)


@pytest.mark.parametrize("identical", [1, 2])
def test_identical_units_of_a_wide_layer_are_called(identical: int) -> None:
    w = np.random.default_rng(0).normal(size=(10, 512, 30))
    w[:, :identical] = w[:1, :identical]
    called = fs.icc(w).p_adjusted[:, 1] <= 0.05
    assert np.flatnonzero(called).tolist() == list(range(identical))


def test_more_than_128_clients_are_averaged_in_groups() -> None:
    w = layer(256, 6, 2, weights=8)
    found = over_clients(w).test
    x, _ = plain_rows(w)
    means = x.reshape(128, 2, 6, 8).mean(axis=1)
    r = plain_products_of(means)
    np.testing.assert_allclose(found.statistic, (r / np.linalg.norm(r, axis=1, keepdims=True)).sum(axis=1), rtol=1e-3)
    assert found.similarity.shape == (128, 128)
    assert "equal weights" not in repr(fs.icc(w))


def plain_products_of(x: np.ndarray) -> np.ndarray:
    """Products (unit, pair) of rows as they are, all of which vary, by one formula for all pairs."""
    d = x.shape[1]
    i, j = np.triu_indices(len(x), 1)
    found = []
    for u in range(d):
        rest = [v for v in range(d) if v != u]
        own, total = x[:, u], x[:, rest].sum(axis=1)
        same = sum(x[:, v] @ x[:, v].T for v in rest)
        cross = own @ total.T / (d - 1)
        found.append((own @ own.T - cross - cross.T + (total @ total.T - same) / ((d - 1) * (d - 2)))[i, j])
    return np.array(found)


@pytest.mark.parametrize("clients", [3, 8])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_intervals_are_the_jackknife_of_a_plain_loop(clients: int, offset: float) -> None:
    w = offset + layer(clients, 5, 2)
    found = fs.icc(w, level=0.9)
    left = [fs.icc(np.delete(w, c, axis=0), inference="F") for c in range(clients)]
    for whole, parts in (
        (found.coefficients, [x.coefficients for x in left]),
        (found.layer_coefficients, [x.layer_coefficients for x in left]),
    ):
        at = -np.log1p(-whole.icc[..., :3])
        others = np.stack([-np.log1p(-p.icc[..., :3]) for p in parts])
        v = (others - others.mean(axis=0)) ** 2
        df = np.clip(v.sum(axis=0) ** 2 / (v**2).sum(axis=0), 1, clients - 1)
        half = scipy.stats.t.ppf(0.95, df) * np.sqrt((clients - 1) * others.var(axis=0))
        expected = np.maximum(-np.expm1(half - at), -1 / (clients - 1))
        np.testing.assert_allclose(whole.conf_low[..., :3], np.minimum(expected, whole.icc[..., :3]), atol=1e-7)
        np.testing.assert_allclose(whole.conf_high[..., :3], -np.expm1(-half - at), rtol=1e-6, atol=1e-7)
        stepped = clients * whole.conf_high[..., 1] / (1 + (clients - 1) * whole.conf_high[..., 1])
        np.testing.assert_allclose(whole.conf_high[..., 4], stepped)
    np.testing.assert_allclose(found.influence.layer_icc, [x.layer_coefficients.icc[1] for x in left], atol=1e-9)
    deviations = np.square(w - w.mean(axis=2, keepdims=True) - (w - w.mean(axis=2, keepdims=True)).mean(axis=0))
    np.testing.assert_allclose(found.influence.share, deviations.sum(axis=(1, 2)) / deviations.sum(), rtol=1e-5)


@pytest.mark.parametrize(("clients", "units"), [(2, 20), (3, 5)])
def test_permutations_equal_all_that_there_are(clients: int, units: int) -> None:
    w = layer(clients, units, 0, seed=3)
    found = over_clients(w, icc_tests.permutations).test
    x = w - w.mean(axis=2, keepdims=True)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    x -= x.mean(axis=1, keepdims=True)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    shifted = [sum(np.roll(one, by, axis=0) for one, by in zip(x, (0, *rest), strict=True)) for rest in
               product(range(units), repeat=clients - 1)]  # fmt: skip
    null = (np.square(shifted).sum(axis=2) - clients) / (clients * (clients - 1))
    np.testing.assert_allclose(found.statistic, null[0], atol=1e-5)
    pool = null[1:]
    np.testing.assert_allclose(found.p_value, [(1 + (pool >= t - 1e-9).sum()) / (1 + pool.size) for t in null[0]])
    assert found.layer_p_value == (null.sum(axis=1) >= null[0].sum() - 1e-9).mean()
    assert found.n_patterns == units ** (clients - 1) - 1


def test_two_clients_decide_by_permutations_alone() -> None:
    w = np.random.default_rng(0).normal(size=(2, 20, 40))
    w[1] = w[0] + 0.1 * w[1]
    by_units = fs.icc(w, inference="permutation")
    assert by_units.n_one_direction == 20
    assert "H0: units are exchangeable within clients (assumes equal\n    covariances): p = 0.05" in repr(by_units)
    by_signs = fs.icc(w)
    assert by_signs.tidy()[["p_value", "conf_low", "conf_high"]].isna().all(axis=None)
    assert "no CI: the jackknife needs at least 3 clients\nUnits" in repr(by_signs)
    assert "no test: it needs at least 5 clients" in repr(by_signs)


@pytest.mark.parametrize(("clients", "least"), [(3, "0.250"), (4, "0.125"), (5, "0.062")])
def test_few_clients_allow_no_conclusion(clients: int, least: str) -> None:
    found = fs.icc(layer(clients, 8, 8))
    assert f"  {clients} clients: the smallest possible p of the layer is {least}: no conclusion\n" in repr(found)
    assert found.coefficients.p_value.shape == (8, 6)
    assert np.isnan(found.coefficients.p_value).all() == (clients < 5)


@pytest.mark.parametrize(("units", "number"), [(8, 8**4 - 1), (9, 445)])
def test_units_are_shifted_in_all_ways_where_these_are_at_most_4096(units: int, number: int) -> None:
    w = np.random.default_rng(0).normal(size=(5, units, 3))
    assert fs.icc(w, inference="permutation").glance()["n_permutations"][0] == number


@pytest.mark.parametrize("inference", ["sign-flip", "permutation"])
@pytest.mark.parametrize(("units", "shared"), [(8, 3), (30, 6), (30, 24), (20, 18), (80, 10)])
def test_shared_units_are_called_and_no_other(inference: str, units: int, shared: int) -> None:
    found = fs.icc(layer(12, units, shared), inference=inference)
    called = found.p_adjusted[:, 1] <= 0.05
    assert called[:shared].all()
    assert called[shared:].sum() <= 2
    assert found.glance()["layer_p_value"][0] <= 0.01


def test_a_common_profile_is_no_agreement_on_a_unit() -> None:
    common = 2 * np.random.default_rng(0).normal(size=20)
    own = fs.icc(layer(12, 30, 0) + common)
    assert own.agreement.min() > 0.5
    assert own.glance()["n_one_direction"][0] == 0
    assert own.glance()["profile_p_value"][0] < 0.001
    some = fs.icc(layer(12, 30, 6) + common)
    assert (np.flatnonzero(some.p_adjusted[:, 1] <= 0.05) < 6).sum() == 6


def test_constant_rows_neither_agree_nor_disturb() -> None:
    w = layer(7, 20, 4)
    w[2, 7] = 0.5  # one client's unit is constant
    w[:, 11] = 1.0  # a constant unit
    w[1:, 13] = 3.0  # a unit that varies in one client alone
    w[:3, 15] = 3.0  # a unit that varies in four clients
    found = fs.icc(w)
    table = found.tidy().query("type == 'ICC2'").set_index("unit")
    assert table.loc[[11, 13, 15], ["statistic", "p_value", "conf_low", "conf_high"]].isna().all(axis=None)
    assert table.drop([11, 13, 15]).notna().all(axis=None)
    assert (table["p_value"][:4] < 0.01).all()
    assert "  constant: 11" in repr(found)
    assert "1 constant, 2 not tested" in repr(found)


def test_units_that_vary_in_few_clients_make_no_other_unit_agree() -> None:
    """Dead units after a start is subtracted, pruned rows: their sums spread less, and are scaled to be compared."""
    called = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        w = np.zeros((10, 25, 30))
        w[:, :5] = rng.normal(size=(10, 5, 30))
        for unit in range(5, 25):
            w[rng.permutation(10)[:2], unit] = rng.normal(size=(2, 30))
        called.append(fs.icc(w).coefficients.p_value[:5, 1] <= 0.05)
    assert np.mean(called) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)


def test_units_that_are_copies_of_each_other_have_nothing_beyond_their_profile() -> None:
    one = np.random.default_rng(0).normal(size=(6, 1, 30))
    found = fs.icc(np.repeat(one, 12, axis=1))
    assert not (found.p_adjusted <= 0.05).any()


def test_one_unit_is_tested_without_a_profile() -> None:
    one = fs.icc(layer(7, 1, 1))
    x, _ = plain_rows(layer(7, 1, 1))
    products = np.array([[x[c, 0] @ x[e, 0] for c, e in combinations(range(7), 2)]])
    _, p_value, _ = plain_flips(products, 7, np.ones(1, dtype=bool))
    assert one.coefficients.p_value[0, 1] == p_value[0]
    assert "H0: deviations of clients are symmetric about 0:\n    p = 0.016" in repr(one)
    assert "profile" not in repr(one)


def test_one_client_that_differs_from_equal_ones_makes_an_interval_that_is_no_claim() -> None:
    w = np.repeat(np.random.default_rng(0).normal(size=(1, 2, 20)), 4, axis=0)
    equal = fs.icc(w).coefficients
    np.testing.assert_array_equal((equal.conf_low, equal.conf_high), 1)
    w[0] += 0.5 * np.random.default_rng(1).normal(size=(2, 20))
    apart = fs.icc(w).coefficients
    np.testing.assert_allclose(apart.conf_low[:, 1], -1 / 3)
    np.testing.assert_array_equal(apart.conf_high[:, 1], 1)


@pytest.mark.parametrize("inference", ["sign-flip", "permutation"])
@pytest.mark.parametrize("held", [1 << 28, 1])
def test_blocks_of_clients_units_and_tensors_give_the_same(
    inference: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = uneven_layer()[: 5 if inference == "permutation" else 6]  # 5⁴ permutations
    test = fs.agreement._TESTS[inference]
    whole, total = over_clients(w, test), icc.sums(w)
    monkeypatch.setattr(icc_resampling, "_MEMORY", held)
    monkeypatch.setattr(icc_resampling, "_READ", 1)
    tensors = torch.asarray(w)
    others = (
        icc_resampling.over_clients(lambda: [w[:2], w[2:3], w[3:]], total, test),
        icc_resampling.over_clients(lambda: [tensors[:4], tensors[4:]], icc.sums(tensors), test),
    )
    for found in others:
        for a, b in ((found.units, whole.units), (found.layer, whole.layer), (found.influence, whole.influence)):
            for x, y in zip(a, b, strict=True):
                if y is not None:
                    np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-6)


def test_weights_are_read_once_if_their_rows_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    w, calls = layer(6, 10, 4), []
    for memory in (w.size, w.size - 1):
        monkeypatch.setattr(icc_resampling, "_MEMORY", memory)
        icc_resampling.over_clients(lambda: [calls.append(memory) or w], icc.sums(w), fs.agreement._TESTS["sign-flip"])  # noqa: B023
    assert calls.count(w.size) == 1
    assert calls.count(w.size - 1) > 1


def test_a_start_is_subtracted_before_the_test() -> None:
    w, start = layer(8, 10, 0, seed=1), 5 * np.random.default_rng(9).normal(size=(10, 20))
    assert fs.icc(w + start).glance()["n_one_direction"][0] == 10
    moved = fs.icc(w + start, baseline=start)
    assert moved.glance()["n_one_direction"][0] == 0
    np.testing.assert_allclose(moved.coefficients.p_value, fs.icc(w).coefficients.p_value, atol=1e-3)


def test_units_that_equal_their_profile_have_no_permutation_test() -> None:
    size = np.random.default_rng(0).uniform(1, 2, (6, 8, 1))
    result = fs.icc(np.concatenate([size, -size], axis=2), inference="permutation")
    assert np.isnan(result.coefficients.p_value).all()
    assert np.isnan(result.layer_coefficients.p_value).all()
    assert "no test: in at least 2 clients, 2 units must vary beyond the common profile" in str(result)
    assert "Permutation test" not in str(result)
