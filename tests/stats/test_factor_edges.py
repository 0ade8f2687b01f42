"""Factor analysis of what is no clean matrix of numbers: dead units, few rows, bad input, tensors, batches, labels."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from layers import R8, weights

import fedstat.labelled as fs
from fedstat.results import ConvergenceWarning
from fedstat.sim import generate
from fedstat.stats import factor, number_of_factors
from fedstat.stats.moments import correlation, moments


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_a_dead_unit_gets_nan_and_changes_no_other_unit(value: float) -> None:
    w = weights()
    with_dead = np.insert(w, 3, value, axis=1)
    a, b = fs.split(with_dead, n_factors=2, tau=0.5), fs.split(w, n_factors=2, tau=0.5)
    assert np.isnan(a.communality[3])
    assert np.flatnonzero(a.fit.constant).tolist() == [3]
    assert a.group[3] == "constant"
    assert not a.shared[3]
    np.testing.assert_allclose(np.delete(a.communality, 3), b.communality, atol=1e-12)
    np.testing.assert_array_equal(np.delete(a.shared, 3), b.shared)


def test_a_float32_constant_unit_is_dead() -> None:
    w = weights().astype(np.float32)
    w[:, 2] = np.float32(0.1)
    assert fs.split(w, n_factors=2).fit.constant.tolist() == [j == 2 for j in range(8)]


def test_all_units_dead_is_an_error() -> None:
    with pytest.raises(ValueError, match="every unit has zero variance"):
        fs.split(np.ones((3, 4, 5)))


def test_fewer_rows_than_units_gives_a_singular_matrix_and_finite_communalities() -> None:
    w = np.random.default_rng(0).normal(size=(2, 30, 6))
    result = fs.split(w, kappa=0.5, method="pa").fit
    assert np.linalg.matrix_rank(result.correlation) == 11
    assert np.isfinite(result.communality).all()
    assert (result.eigenvalues[11:] < 1e-10).all()


def test_one_client_is_split_with_a_word_and_one_row_is_not() -> None:
    alone = weights(clients=1)
    with pytest.warns(UserWarning, match="Agreement needs at least 2 clients, but got 1"):
        result = fs.split(alone, n_factors=2)
    assert result.fit.n_obs == 30
    assert np.isnan(result.icc).all()
    assert "do clients agree" not in repr(result)
    assert not result.contradicted
    for again in (lambda: fs.update(result, alone), lambda: fs.sensitivity(alone, kappa=0.5, n_starts=0)):
        with pytest.warns(UserWarning, match="Agreement needs at least 2 clients"):
            again()
    with pytest.raises(ValueError, match=r"at least 2 rows .* but got 1"):
        fs.fa(np.ones((1, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_weights_are_named_by_client_and_unit(bad: float) -> None:
    w = weights()
    w[4, 5, 0] = bad
    labelled = xr.DataArray(
        w, dims=("client", "unit", "weight"), coords={"client": list("abcdef"), "unit": [f"u{j}" for j in range(8)]}
    )
    for verb in (fs.split, fs.icc, lambda w: fs.icc(w, n_boot=5)):
        for kind in (w, w.astype(np.float32), torch.asarray(w)):
            with pytest.raises(ValueError, match=r"client 4 hold NaN or infinite values, first in unit\(s\) 5\."):
                verb(kind)
        with pytest.raises(ValueError, match=r"client e hold .* unit\(s\) u5\."):
            verb(labelled)
    with pytest.raises(ValueError, match=r"the weights hold .* unit\(s\) 5\."):
        fs.fa(fs.layer_matrix(w))
    with pytest.raises(ValueError, match=r"unit\(s\) \[5\]"):
        correlation(moments(fs.layer_matrix(w)))


def test_stopping_at_the_cap_is_a_field_and_a_warning() -> None:
    fit = factor.fit(R8, n_factors=3, max_iter=3, tol=1e-12)
    assert not fit.converged
    assert fit.n_iter == 3
    with pytest.warns(
        ConvergenceWarning,
        match=r"pa did not converge in 3 iterations \(last change .*\)\. Set max_iter=1000 or lower n_factors",
    ):
        result = fs.fa(R8, corr=True, n_factors=3, max_iter=3, tol=1e-12)
    assert not result.converged


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r[:5], r"must be square, but got shape \(5, 8\)"),
        (lambda r: r + np.triu(np.full_like(r, 0.01), 1), "must be symmetric, but got .* 0.01"),
        (lambda r: r * 2, "must have a diagonal of 1, but got 2 for unit 0"),
        (lambda r: r + np.diag([0, 0, 0.5, 0, 0, 0, 0, 0]), "must have a diagonal of 1, but got 1.5 for unit 2"),
        (lambda r: np.where(r == 1, 1, -0.9), "positive semi-definite, but its smallest eigenvalue is -5.3"),
        (lambda r: np.where((np.eye(8) == 0) & (r == r.max(where=np.eye(8) == 0, initial=0)), np.nan, r), "finite"),
    ],
)
def test_what_is_no_correlation_matrix_is_refused(spoil: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fs.fa(spoil(R8), corr=True)


MISSING = {
    "one unit, as R's cor": ([(2, None)], r"in unit\(s\) c\. The usual cause is a missing value"),
    "two units": ([(2, None), (5, None)], r"in unit\(s\) c, f\. "),
    "a pair": ([(1, 3)], r"in unit\(s\) b, d\. "),
}


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize(("missing", "message"), MISSING.values(), ids=MISSING)
def test_units_without_correlations_are_named(missing: list[Any], message: str, nullable: bool) -> None:
    r = np.array(R8)
    for i, j in missing:
        columns = np.arange(8) if j is None else np.array([j])
        r[i, columns[columns != i]] = r[columns[columns != i], i] = np.nan
    table = pd.DataFrame(r, list("abcdefgh"), list("abcdefgh"))
    table = table.convert_dtypes() if nullable else table
    for verb in (fs.fa, lambda t, **how: fs.n_factors(t, n_obs=100, **how)):
        with pytest.raises(ValueError, match=message):
            verb(table, corr=True)


def test_tables_of_nullable_numbers_are_taken() -> None:
    table = pd.DataFrame(R8, list("abcdefgh"), list("abcdefgh"))
    expected = fs.fa(table, corr=True, n_factors=2).communality
    np.testing.assert_array_equal(fs.fa(table.convert_dtypes(), corr=True, n_factors=2).communality, expected)
    with pytest.raises(ValueError, match="must hold real numbers"):
        fs.fa(pd.DataFrame({"a": [True, False, True], "b": [1.0, 2.0, 4.0]}).convert_dtypes())


def test_a_correlation_matrix_with_nan_rows_keeps_its_dead_units() -> None:
    w = np.insert(weights(), 3, 0.0, axis=1)
    z = fs.layer_matrix(w)
    r = correlation(moments(z))
    np.testing.assert_array_equal(fs.fa(r, corr=True, n_factors=2).communality, fs.fa(z, n_factors=2).communality)


def test_as_many_factors_as_units_is_said_to_tell_nothing() -> None:
    with pytest.warns(UserWarning, match="n_factors reaches the rank of R, 8: every communality is 1 by construction"):
        np.testing.assert_allclose(fs.fa(R8, corr=True, kappa=1.0).communality, 1)


@pytest.mark.parametrize(
    ("w", "kappa", "rank"),
    [
        (np.repeat(np.random.default_rng(0).normal(size=(7, 1, 15)), 8, axis=1), 0.7, 1),
        (np.random.default_rng(0).normal(size=(2, 30, 5)), 1.0, 9),
    ],
    ids=["identical units", "fewer rows than units"],
)
def test_as_many_factors_as_the_rank_is_said_to_tell_nothing(w: np.ndarray, kappa: float, rank: int) -> None:
    with pytest.warns(UserWarning, match=f"n_factors reaches the rank of R, {rank}: "):
        result = fs.split(w, kappa=kappa)
    np.testing.assert_allclose(result.communality, 1)
    assert result.shared.all()  # equal communalities tie: their rounding decides nothing


def test_memory_is_a_few_matrices_beyond_one_clients_block() -> None:
    d, weight, clients = 300, 500, 40
    w = np.random.default_rng(0).normal(size=(clients, d, weight)).astype(np.float32)
    tracemalloc.start()
    fs.split(w, n_factors=5, method="pc")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * (10 * d**2 + 2 * d * weight)
    assert peak < 8 * clients * d * weight / 3  # the stacked matrix in float64


# --- one code: numpy, torch, batches, labels -------------------------------------------------------------------------


@pytest.mark.parametrize("method", factor.METHODS)
def test_torch_equals_numpy(method: factor.Method) -> None:
    a, b = factor.fit(R8, n_factors=3, method=method), factor.fit(torch.asarray(R8), n_factors=3, method=method)
    assert isinstance(b.communality, torch.Tensor)
    np.testing.assert_allclose(b.communality.numpy(), a.communality, atol=1e-10)
    assert int(a.n_iter) == int(b.n_iter)


@pytest.mark.gpu
@pytest.mark.parametrize("method", factor.METHODS)
@pytest.mark.parametrize("n_factors", [None, 5])
def test_cuda_equals_numpy(method: factor.Method, n_factors: int | None) -> None:
    z = np.random.default_rng(0).normal(size=(500, 5)) @ np.random.default_rng(1).normal(size=(5, 120))
    z += 2 * np.random.default_rng(2).normal(size=z.shape)
    r = correlation(moments(z))
    b = factor.fit(torch.asarray(r, device="cuda"), kappa=0.5, n_factors=n_factors, method=method)
    assert b.communality.device.type == "cuda"
    a = factor.fit(r, kappa=0.5, n_factors=n_factors, method=method)
    np.testing.assert_allclose(b.communality.cpu().numpy(), a.communality, atol=1e-6)


@pytest.mark.parametrize("method", factor.METHODS)
def test_a_batch_equals_a_loop(method: factor.Method) -> None:
    z = np.stack([np.stack([fs.layer_matrix(weights(seed)) for seed in (i, i + 3)]) for i in range(3)])
    z[1, 0, :, 2] = 0
    r = correlation(moments(z))
    batch = factor.fit(r, kappa=0.6, method=method)
    assert batch.communality.shape == (3, 2, 8)
    assert np.ptp(batch.n_factors) > 0
    for i in np.ndindex(3, 2):
        require_alone(batch, i, factor.fit(r[i], kappa=0.6, method=method), atol=1e-10)


def require_alone(batch: factor.Fit, i: Any, alone: factor.Fit, atol: float) -> None:
    """A matrix of the batch has the fit that it has alone, but for signs of eigenvectors and columns of zeros."""
    for field in factor.Fit._fields:
        one, other = getattr(batch, field)[i], getattr(alone, field)
        if field == "loadings":
            assert not one[:, alone.n_factors :].any()
            one, other = np.abs(one[:, : alone.n_factors]), np.abs(other)
        np.testing.assert_allclose(one, other, atol=atol, err_msg=field)


def test_a_batch_has_the_leading_eigenpairs_that_its_largest_number_of_factors_needs() -> None:
    """Layers so wide that a part of the eigenpairs is computed, one of 2 factors and one of 10."""
    rng = np.random.default_rng(0)
    z = [rng.normal(size=(400, g)) @ rng.normal(size=(g, 110)) + 0.2 * rng.normal(size=(400, 110)) for g in (2, 14)]
    r = correlation(moments(np.stack(z)))
    batch = factor.fit(r, kappa=0.8)
    assert batch.n_factors[0] == 2
    assert batch.n_factors[1] >= 10
    for i in range(2):
        require_alone(batch, i, factor.fit(r[i], kappa=0.8), atol=1e-6)


@pytest.mark.parametrize("offset", [1e5, 1e7])
@pytest.mark.parametrize("kind", [np.asarray, torch.asarray])
def test_a_common_offset_costs_no_more_digits_than_it_takes_from_the_weights(kind: Any, offset: float) -> None:
    w = weights() + np.random.default_rng(5).normal(size=(6, 1, 1)) * 1e-3  # clients differ in their means, too
    moved = w + offset
    exact = fs.split(moved - offset, n_factors=2)  # the same rounded weights, free of the offset
    result = fs.split(kind(moved), n_factors=2)
    np.testing.assert_allclose(result.communality, exact.communality, atol=1e-9)
    assert not result.fit.constant.any()
    chunks = [moments(fs.layer_matrix(moved[i : i + 2])) for i in (0, 2, 4)]
    np.testing.assert_allclose(correlation(chunks[0] + chunks[1] + chunks[2]), exact.fit.correlation, atol=1e-10)


def test_a_layer_matrix_given_as_weights_is_sent_to_fa() -> None:
    labelled = xr.DataArray(weights(), dims=("client", "unit", "weight"))
    for z in (fs.layer_matrix(labelled), fs.layer_matrix(weights())):
        with pytest.raises(ValueError, match=r"but got .*fedstat\.fa\.$"):
            fs.split(z)
    with pytest.raises(ValueError, match=r"Rename with \.rename"):
        fs.split(labelled.rename(client="site"))


def test_wrong_shapes_say_what_was_seen() -> None:
    with pytest.raises(ValueError, match=r"\(client, unit, weight\.\.\.\) .* but got shape \(4, 5\)"):
        fs.layer_matrix(np.ones((4, 5)))
    with pytest.raises(ValueError, match=r"\(row, unit\), but got shape \(5,\)"):
        fs.fa(np.ones(5))
    with pytest.raises(ValueError, match=r"must have dim\(s\) \['client'\], but got \('k', 'unit', 'weight'\)"):
        fs.split(xr.DataArray(np.ones((2, 3, 4)), dims=("k", "unit", "weight")))
    with pytest.raises(ValueError, match=r"at least one of each, but got shape \(0, 3, 4\)"):
        fs.split(np.ones((0, 3, 4)))
    with pytest.raises(ValueError, match=r"at least one of each, but got .*'client': 0"):
        fs.split(xr.DataArray(np.ones((0, 3, 4)), dims=("client", "unit", "weight")))


def test_tidy_has_one_row_a_unit_with_its_label_and_group() -> None:
    w = xr.DataArray(weights(), dims=("client", "unit", "weight"), coords={"unit": [f"u{j}" for j in range(8)]})
    result = fs.split(w, n_factors=2, tau=0.25)
    table = result.tidy()
    assert table["term"].tolist() == [f"u{j}" for j in range(8)]
    np.testing.assert_allclose(table["communality"] + table["uniqueness"], 1)
    np.testing.assert_allclose((table[["factor_1", "factor_2"]] ** 2).sum(axis=1), table["communality"], atol=1e-12)
    assert (table["group"] == "shared").sum() == 6
    assert ((table["margin"] >= 0) == (table["group"] == "shared")).all()


def test_the_way_out_that_the_warning_names_first_leads_out() -> None:
    w = generate(clients=100, d=100, m=50, p=0.5, n_train=2, n_test=2)["w"]
    with pytest.warns(ConvergenceWarning, match="Set max_iter=1000 or lower kappa"):
        fs.split(w)
    assert fs.split(w, max_iter=1000).fit.converged


def test_a_model_that_fits_badly_has_an_interval_of_its_rmsea() -> None:
    """Rows ten times over: χ² of 10,000 with 100 rows was beyond the range that was searched."""
    rng = np.random.default_rng(0)
    z = np.repeat(rng.normal(size=(10, 12)), 10, axis=0) + 1e-6 * rng.normal(size=(100, 12))
    row = fs.fa(z, n_factors=2, method="minres").glance().iloc[0]
    assert 0 < row["rmsea_low"] < row["rmsea"] < row["rmsea_high"]


def test_a_scree_of_two_eigenvalues_has_no_bend() -> None:
    assert number_of_factors.elbow(np.array([1.5, 0.5])) == 1
    assert number_of_factors.elbow(np.array([2.5, 0.3, 0.2])) == 1
