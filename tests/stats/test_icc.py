"""Intraclass correlations of units over clients: psych's numbers, closed forms, edges."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from statsmodels.regression.mixed_linear_model import MixedLM

import fedstat.labelled as fs
from fedstat.labelled.agreement import icc_sums
from fedstat.labelled.layer import require_related
from fedstat.sim.model8 import Model8, truth
from fedstat.stats import icc as arrays
from fedstat.stats import split

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "icc.json").read_text())
CASES = {c["name"]: c for c in GOLDEN["cases"]}
COLUMNS = ("icc", "statistic", "df1", "df2", "p_value", "conf_low", "conf_high")


def weights(seed: int = 0, clients: int = 8, noise: float = 0.5) -> np.ndarray:
    """Units 0 to 2 are alike, units 3 and 4 are each client's own; clients have offsets."""
    rng = np.random.default_rng(seed)
    alike = rng.normal(size=(1, 3, 20)) + noise * rng.normal(size=(clients, 3, 20))
    own = rng.normal(size=(clients, 2, 20))
    return np.concatenate([alike, own], axis=1) + 0.3 * rng.normal(size=(clients, 5, 1))


@pytest.mark.parametrize("name", CASES)
def test_coefficients_tests_and_intervals_are_those_of_psych(name: str) -> None:
    case = CASES[name]
    found = fs.icc(np.array(case["x"])[:, None, :], level=case["level"], inference="F")
    table = found.tidy()
    assert table["type"].tolist() == case["type"]
    for column in COLUMNS:
        expected = np.array(case[column], dtype=float)
        np.testing.assert_allclose(table[column], expected, rtol=1e-10, atol=1e-10, err_msg=column)
    augmented = found.augment()[["ms_weights", "ms_clients", "ms_residual"]].to_numpy()[0]
    np.testing.assert_allclose(augmented, case["mean_squares"], rtol=1e-10, atol=1e-10)


def test_units_are_analysed_one_by_one_and_the_layer_as_one_unit() -> None:
    w = weights()
    together = fs.icc(w, inference="F")
    for j in range(5):
        alone = fs.icc(w[:, [j]], inference="F")
        for column in COLUMNS:
            np.testing.assert_allclose(
                together.tidy().query("unit == @j")[column], alone.tidy()[column], rtol=1e-12, atol=1e-15
            )
    whole = fs.icc(w.reshape(8, 1, -1), inference="F").tidy()
    for column in COLUMNS:
        np.testing.assert_allclose(together.layer[column], whole[column], rtol=1e-11, atol=1e-14)
    assert together.glance()["layer_icc"][0] == together.layer["icc"][1]


def test_two_clients_with_two_weights_by_hand() -> None:
    """Clients (0, 2) and (1, 5) have means 1 and 3, their weights .5 and 3.5: MSB = 9, MSJ = 4, MSE = 1."""
    found = fs.icc(np.array([[[0.0, 2.0]], [[1.0, 5.0]]]))
    assert found.augment()[["ms_weights", "ms_clients", "ms_residual"]].to_numpy()[0] == pytest.approx([9, 4, 1])
    msw = (4 + 1) / 2
    expected = [
        (9 - msw) / (9 + msw), (9 - 1) / (9 + 1 + 2 * (4 - 1) / 2), (9 - 1) / (9 + 1),
        (9 - msw) / 9, (9 - 1) / (9 + (4 - 1) / 2), (9 - 1) / 9,
    ]  # fmt: skip
    np.testing.assert_allclose(found.coefficients.icc[0], expected)


@pytest.mark.parametrize("clients", [2, 3, 10, 100])
@pytest.mark.parametrize("offset", [0.0, 0.1, 1e6])
def test_equal_clients_agree_exactly(clients: int, offset: float) -> None:
    one = offset + np.random.default_rng(0).normal(size=(1, 3, 20))
    found = fs.icc(np.repeat(one, clients, axis=0), inference="F")
    c = found.coefficients
    for values in (c.icc, c.conf_low, c.conf_high, found.layer_coefficients.icc, found.layer_coefficients.conf_low):
        np.testing.assert_array_equal(values, 1)
    np.testing.assert_array_equal(c.p_value, 0)
    assert np.isinf(c.statistic).all()


def test_coefficients_are_the_share_of_variance_that_was_put_in() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(1, 4, 20_000)) + np.sqrt([0, 0.25, 1, 4])[:, None] * rng.normal(size=(12, 4, 20_000))
    found = fs.icc(w)
    np.testing.assert_allclose(found.agreement, [1, 0.8, 0.5, 0.2], atol=0.01)
    own = fs.icc(rng.normal(size=(12, 4, 20_000)))
    np.testing.assert_allclose(own.agreement, 0, atol=0.005)


def test_offsets_of_clients_are_disagreement_for_icc1_and_icc2_alone() -> None:
    one = np.random.default_rng(0).normal(size=(1, 1, 50))
    found = fs.icc(one + np.arange(6.0)[:, None, None])
    assert found.of_type("ICC3")[0] == 1
    assert found.of_type("ICC2")[0] < 0.4
    assert found.of_type("ICC1")[0] < 0.4


def test_balanced_layouts_agree_with_restricted_maximum_likelihood() -> None:
    x = np.array(CASES["agree"]["x"])
    k, n = x.shape
    target = np.tile(np.arange(n), k)
    one_way = MixedLM(x.ravel(), np.ones((x.size, 1)), groups=target).fit(reml=True, method=["bfgs"], gtol=1e-10)
    between = float(one_way.cov_re[0, 0])
    found = fs.icc(x[:, None, :])
    np.testing.assert_allclose(found.of_type("ICC1")[0], between / (between + one_way.scale), rtol=1e-5)

    x = np.array(CASES["offsets of clients"]["x"])
    k, n = x.shape
    data = pd.DataFrame({"y": x.ravel(), "target": np.tile(np.arange(n), k), "client": np.repeat(np.arange(k), n)})
    components = {"target": "0 + C(target)", "client": "0 + C(client)"}
    two_way = MixedLM.from_formula("y ~ 1", data, groups=np.ones(len(data)), re_formula="0", vc_formula=components)
    fit = two_way.fit(reml=True, method=["bfgs", "powell"])
    of = dict(zip(fit.model.exog_vc.names, fit.vcomp, strict=True))
    row = fs.icc(x[:, None, :]).augment().iloc[0]
    for name, expected in (("weights", of["target"]), ("clients", of["client"]), ("residual", fit.scale)):
        np.testing.assert_allclose(row[f"var_{name}"], expected, rtol=1e-3)
    np.testing.assert_allclose(row["icc"], of["target"] / (of["target"] + of["client"] + fit.scale), rtol=1e-3)


def test_the_change_from_a_common_start_is_analysed() -> None:
    w, start = weights(), 100 * np.random.default_rng(5).normal(size=(5, 20))
    moved = fs.icc(start + w, baseline=start)
    np.testing.assert_allclose(moved.agreement, fs.icc(w).agreement, rtol=1e-10)
    assert fs.icc(start + w).agreement.min() > 0.99
    assert "minus the given baseline" in repr(moved)
    assert moved.glance()["baseline_subtracted"][0]


def test_a_labelled_start_is_matched_by_name() -> None:
    w = xr.DataArray(weights().reshape(8, 5, 4, 5), dims=("client", "unit", "in", "pixel"))
    start = w.isel(client=0).copy()
    expected = fs.icc(w.values, baseline=start.values)
    for given in (start, start.transpose("pixel", "unit", "in"), start.values):
        np.testing.assert_allclose(
            fs.icc(
                w.transpose("in", "client", "pixel", "unit").transpose(..., "in", "pixel"), baseline=given
            ).agreement,
            expected.agreement,
        )
    np.testing.assert_allclose(fs.icc(w.values, baseline=torch.asarray(start.values)).agreement, expected.agreement)
    np.testing.assert_allclose(fs.icc(torch.asarray(w.values), baseline=start.values).agreement, expected.agreement)


def test_a_start_that_does_not_fit_is_refused() -> None:
    w = xr.DataArray(weights(), dims=("client", "unit", "weight"), coords={"unit": list("abcde")})
    with pytest.raises(ValueError, match=r"baseline must have the shape of one client's weights, \(5, 20\), but got"):
        fs.icc(w.values, baseline=w.values)
    with pytest.raises(ValueError, match=r"baseline must have the shape .* but got \(20,\)"):
        fs.icc(w, baseline=np.zeros(20))
    with pytest.raises(ValueError, match=r"baseline must have the dims of one client's weights, .* but got .*client"):
        fs.icc(w, baseline=w)
    with pytest.raises(
        ValueError, match="baseline must have one value for each unit, but has none for 'e' and values for others, 'x'"
    ):
        fs.icc(w, baseline=w.isel(client=0).assign_coords(unit=list("abcdx")))
    start = w.isel(client=0).copy()
    start[{"unit": 2}] = np.nan
    with pytest.raises(ValueError, match=r"baseline holds NaN or infinite values, first in unit\(s\) c"):
        fs.icc(w, baseline=start)
    with pytest.raises(ValueError, match="baseline must hold real numbers"):
        fs.icc(w, baseline=np.zeros((5, 20), dtype=complex))


def test_a_start_that_clients_did_not_have_is_refused() -> None:
    rng = np.random.default_rng(0)
    at = np.arange(64)
    smooth = np.exp(-0.5 * ((at[:, None] - at) / 3) ** 2)
    for _ in range(8):
        w, other = rng.normal(size=(12, 32, 64)) @ smooth, rng.normal(size=(32, 64))
        for verb in (fs.icc, lambda w, baseline: fs.split(w, baseline=baseline, n_factors=1, method="pc")):
            with pytest.raises(
                ValueError, match=r"baseline must correlate with the weights, but r = .*; it would create agreement"
            ):
                verb(w, baseline=other)
            verb(w + 0.5 * smooth.sum(0).max() * other, baseline=other)
    constant = fs.icc(w, baseline=np.full((32, 64), 0.1))
    np.testing.assert_allclose(constant.agreement, fs.icc(w).agreement, rtol=1e-6)


@pytest.mark.parametrize(("weight", "start"), [(1.0, None), (np.nan, None), (None, 1.0)])
def test_a_correlation_that_is_undefined_refuses_no_start(weight: float | None, start: float | None) -> None:
    """Neither with a warning, which would be an error here."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 4, 5)) if weight is None else np.full((3, 4, 5), weight)
    assert require_related(rng.normal(size=(4, 5)) if start is None else np.full((4, 5), start), w) is None


def test_one_client_and_one_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 clients, but got 1"):
        fs.icc(weights(clients=1))
    with pytest.raises(ValueError, match="at least 2 weights in a unit, but got 1"):
        fs.icc(weights()[:, :, :1])
    with pytest.raises(ValueError, match="at least 3 of them, but got 2"):
        fs.icc(weights(clients=2), n_boot=10)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e5])
def test_a_dead_unit_is_nan_counted_and_named(value: float) -> None:
    w = weights()
    w[:, 2] = value
    named = xr.DataArray(w, dims=("client", "unit", "weight"), coords={"unit": list("abcde")})
    found = fs.icc(named, n_boot=10)
    assert found.constant.tolist() == [False, False, True, False, False]
    assert found.glance()["n_constant"][0] == found.glance()["n_undefined"][0] == 1
    assert "  constant: c" in repr(found)
    rows = found.tidy().query("unit == 'c'")
    assert set(rows["conclusion"]) == {"not tested"}
    assert not rows["estimated"].any()
    assert rows.drop(columns=["unit", "type", "conclusion", "estimated"]).isna().all(axis=None)
    assert found.tidy().query("unit != 'c' and not type.str.endswith('k')").notna().all(axis=None)
    rest = fs.icc(np.delete(w, 2, axis=1))
    np.testing.assert_array_equal(found.p_adjusted[[0, 1, 3, 4]], rest.p_adjusted)
    assert np.isfinite(found.layer["icc"]).all()


def test_units_that_vary_between_clients_alone_agree_on_nothing() -> None:
    w = weights()
    w[:, 1] = np.arange(8.0)[:, None]
    found = fs.icc(w)
    assert found.agreement[1] == 0
    assert found.of_type("ICC1")[1] == pytest.approx(-1 / 7)
    assert np.isnan(found.of_type("ICC3")[1])
    assert not found.constant.any()


def test_all_dead_layers_still_print() -> None:
    found = fs.icc(np.zeros((4, 3, 6)))
    assert found.constant.all()
    assert "3 constant" in repr(found)
    assert found.summary()
    assert np.isnan(found.layer["icc"]).all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_common_offset_costs_no_digits() -> None:
    w = np.round(weights() * 2**20) / 2**20
    near, far = fs.icc(w), fs.icc(w + 2.0**24)
    np.testing.assert_allclose(far.coefficients.icc, near.coefficients.icc, rtol=0, atol=1e-9)
    np.testing.assert_allclose(far.layer["icc"], near.layer["icc"], rtol=0, atol=1e-9)


def test_means_of_clients_that_disagree_beyond_chance_are_not_called_reliable() -> None:
    x = np.random.default_rng(0).normal(size=(3, 1, 15))
    x -= x.mean(axis=2, keepdims=True)
    found = fs.icc(x - x.mean(axis=0))
    np.testing.assert_allclose(found.of_type("ICC3"), -1 / 2)
    assert found.of_type("ICC2k")[0] == found.of_type("ICC3k")[0] == -np.inf  # psych's formula turns above 1 here
    json.dumps(found.to_dict(), allow_nan=False)


def test_offsets_of_clients_cost_the_consistency_no_digits() -> None:
    w = np.round(weights() * 2**20) / 2**20
    moved = w + 2.0**26 * np.arange(-4, 4)[:, None, None]
    np.testing.assert_allclose(fs.icc(moved).of_type("ICC3"), fs.icc(w).of_type("ICC3"), rtol=0, atol=1e-9)


@pytest.mark.parametrize("cached", [1, 20, 60, 1 << 20])
def test_sums_do_not_depend_on_blocks_or_on_who_is_summed_first(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights() + 10.0
    whole = arrays.sums(w)
    monkeypatch.setattr(arrays, "_CACHED", cached)
    for s in (arrays.sums(w), arrays.sums(w[:3]) + arrays.sums(w[3:4]) + arrays.sums(w[4:])):
        for found, expected in ((s.units, whole.units), (s.layer, whole.layer)):
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensors_give_the_numbers_of_arrays(dtype: torch.dtype) -> None:
    w = torch.asarray(weights()).to(dtype)
    a, b = fs.icc(w, n_boot=20), fs.icc(w.numpy(), n_boot=20)
    statistics = ["statistic"]  # from products in float32
    for x, y in ((a.tidy(), b.tidy()), (a.layer, b.layer)):
        pd.testing.assert_frame_equal(x.drop(columns=statistics), y.drop(columns=statistics), rtol=1e-7)
        np.testing.assert_allclose(x[statistics], y[statistics], rtol=1e-5, atol=1e-5)


def test_a_server_that_adds_up_the_sums_of_clients_gets_the_same_table() -> None:
    w = weights()
    total = arrays.sums(w[:1])
    for one in w[1:]:
        total = total + arrays.sums(one[None])
    found = icc_sums(total, np.arange(5))
    expected = fs.icc(w, inference="F")
    pd.testing.assert_frame_equal(found.tidy(), expected.tidy(), rtol=1e-10)
    pd.testing.assert_frame_equal(found.layer, expected.layer, rtol=1e-10)


def test_tables_have_the_columns_of_the_documentation() -> None:
    by_f = fs.icc(weights(), inference="F").tidy()
    assert set(COLUMNS) < set(by_f.columns)
    found = fs.icc(weights())
    table = found.tidy()
    first, rest = ["unit", "type", "conclusion", "icc"], ["conf_low", "conf_high", "p_adjusted", "estimated"]
    assert [*table.columns] == [*first, *rest, "statistic", "p_value"]
    drawn = fs.icc(weights(), n_boot=5).tidy()
    assert [*drawn] == [*first, "boot_low", "boot_high", *rest, "statistic", "p_value", "std_error"]
    assert len(table) == 5 * 6
    assert len(found.layer) == 6
    assert len(found.augment()) == 5


def test_p_values_are_adjusted_over_units_type_by_type() -> None:
    found = fs.icc(weights(noise=3.0))
    p = found.coefficients.p_value[:, 1]
    order = np.argsort(p)
    steps = np.minimum.accumulate((p[order] * 5 / np.arange(1, 6))[::-1])[::-1]
    np.testing.assert_allclose(found.p_adjusted[order, 1], np.minimum(steps, 1))
    assert found.glance()["n_one_direction"][0] == (found.p_adjusted[:, 1] <= 0.05).sum()


def test_equal_units_are_told_from_units_drawn_anew() -> None:
    rng = np.random.default_rng(0)
    alike = np.repeat(rng.normal(size=(1, 8, 40)), 10, axis=0)
    w = np.concatenate([alike, rng.normal(size=(10, 8, 40))], axis=1)
    same = np.arange(16) < 8
    assert split.auc(fs.icc(w).agreement, same) == 1
    np.testing.assert_array_equal(fs.icc(w).agreement[:8], 1)
    for kappa in (0.5, 0.75):
        assert split.auc(fs.split(w, kappa=kappa, method="pc").communality, same) < 1


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::fedstat.results.AgreementWarning")
def test_communality_of_nearly_all_variance_fails_on_model_8_where_agreement_does_not() -> None:
    model = Model8()
    w = np.stack([client.w for client in truth(model)])
    assert split.auc(fs.split(w, kappa=0.99).communality, model.unit_shared) < 0.9
    assert split.auc(fs.icc(w).agreement, model.unit_shared) == 1
