"""Agreement does not depend on the order or the unit of anything, and is exact on its own scale."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fedstat.labelled as fs
from fedstat.stats import icc as arrays

SEEDS = st.integers(0, 2**32 - 1)
SHORT = settings(max_examples=25, deadline=None)
SHORTER = settings(max_examples=10, deadline=None)  # where layers are permuted


def layer(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    clients, units, weights = rng.integers(2, 8), rng.integers(1, 6), rng.integers(2, 12)
    common = rng.normal(size=(units, weights)) * rng.uniform(0, 3)
    return common + rng.normal(size=(clients, units, 1)) + rng.normal(size=(clients, units, weights))


@SHORTER
@given(SEEDS)
def test_clients_and_weights_may_stand_in_any_order_and_units_move_with_theirs(seed: int) -> None:
    w, rng = layer(seed), np.random.default_rng(seed)
    order = rng.permutation(w.shape[1])
    moved = w[rng.permutation(len(w))][:, order][:, :, rng.permutation(w.shape[2])]
    always = ("icc", "statistic", "conf_low", "conf_high")
    # Permutations are cyclic shifts in the order of the units.
    names = {"F": (*always, "p_value"), "sign-flip": (*always, "p_value"), "permutation": always}
    for inference, fields in names.items():
        a, b = (fs.icc(x, inference=inference) for x in (w, moved))
        for x, y in ((a.coefficients, b.coefficients), (a.layer_coefficients, b.layer_coefficients)):
            for name in fields:
                before = getattr(x, name)
                np.testing.assert_allclose(
                    getattr(y, name), before[order] if before.ndim == 2 else before, rtol=1e-5, atol=1e-5
                )


@SHORT
@given(SEEDS, st.integers(-960, 1000))
def test_a_power_of_two_on_the_weights_changes_no_bit(seed: int, power: int) -> None:
    w = layer(seed)
    a, b = fs.icc(w), fs.icc(2.0**power * w)
    assert a.tidy().equals(b.tidy())
    assert a.layer.equals(b.layer)


@SHORT
@given(SEEDS, st.lists(st.integers(-960, 1000), min_size=6, max_size=6))
def test_units_may_each_have_a_scale_of_their_own(seed: int, powers: list[int]) -> None:
    w = layer(seed)
    by = 2.0 ** np.array(powers[: w.shape[1]], dtype=float)[:, None]
    np.testing.assert_array_equal(fs.icc(by * w).coefficients.icc, fs.icc(w).coefficients.icc)


@SHORT
@given(SEEDS, st.floats(-1e3, 1e3), st.floats(0.01, 100))
def test_agreement_is_that_of_a_common_offset_and_factor_less(seed: int, offset: float, factor: float) -> None:
    w = layer(seed)
    np.testing.assert_allclose(
        fs.icc(offset + factor * w).coefficients.icc[:, :3], fs.icc(w).coefficients.icc[:, :3], rtol=1e-7, atol=1e-8
    )


@SHORTER
@given(SEEDS)
@example(20996380)  # two weights per unit, of one sign in a client: nothing is left without the profile
def test_coefficients_keep_their_bounds_and_stand_in_their_intervals(seed: int) -> None:
    w = layer(seed)
    k, d = w.shape[:2]
    least = {"F": 2, "sign-flip": 5, "permutation": 2}
    for inference, clients in least.items():
        c = fs.icc(w, inference=inference).coefficients
        assert (c.icc <= 1).all()
        assert (c.icc[:, [0, 2]] >= -1 / (k - 1) - 1e-12).all()
        for t in (0, 2):
            assert ((c.conf_low[:, t] <= c.icc[:, t]) == (inference == "F" or k > 2)).all()
            assert ((c.icc[:, t] <= c.conf_high[:, t]) == (inference == "F" or k > 2)).all()
        tested = k >= clients and (inference != "permutation" or d > 1)
        if inference == "permutation" and d >= 3:  # units that equal the client's profile are not tested
            rows = w - w.mean(axis=2, keepdims=True)
            rows /= np.linalg.norm(rows, axis=2, keepdims=True)
            beyond = np.linalg.norm(rows - rows.mean(axis=1, keepdims=True), axis=2) > 1e-5
            tested = np.repeat((beyond.sum(axis=0) >= 2)[:, None], c.p_value.shape[1], axis=1)
        assert (((c.p_value >= 0) & (c.p_value <= 1)) == tested).all()


@SHORT
@given(SEEDS, st.data())
def test_sums_join_in_any_grouping_of_clients(seed: int, data: st.DataObject) -> None:
    w = layer(seed)
    cut = data.draw(st.integers(1, len(w) - 1))
    whole, joined = arrays.sums(w), arrays.sums(w[cut:]) + arrays.sums(w[:cut])
    for a, b in zip((*whole.units, *whole.layer), (*joined.units, *joined.layer), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-11)
