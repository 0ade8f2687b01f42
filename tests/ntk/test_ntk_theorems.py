"""Theorems 1 and 2 on labelled data: closed forms, conclusions, bad input, stores."""

import functools
import warnings

import numpy as np
import pytest
import xarray as xr
from prints import require_golden

import fedstat.ntk
from fedstat.ntk import (
    ConvergenceResult,
    GeneralizationResult,
    TheoryWarning,
    convergence,
    descent,
    generalization,
    gram,
)


def sphere(seed, *shape):
    x = np.random.default_rng(seed).normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def signs(seed, *shape):
    return np.random.default_rng(seed).choice([-1.0, 1.0], size=shape)


def small(**arguments):
    defaults = {"widths": [32], "rounds": 15, "replicates": 2, "local_steps": 2}
    return convergence(sphere(0, 3, 4, 8), signs(1, 3, 4), **defaults | arguments)


kept = functools.cache(small)  # for tests that only read


def losing(rates):
    """Result of three replicates whose losses are multiplied by these rates, (method, replicate), every round."""
    data = kept(replicates=3).data.copy(deep=True)
    data["loss"][:] = np.array(rates)[:, None, :, None] ** np.arange(16)
    return ConvergenceResult(data)


INCONCLUSIVE = [[0.9, 0.8, 0.85], [0.95, 0.92, 0.94], [0.93, 0.96, 0.91]]  # fedsplit, fedavg, fedavg-matched


def test_contraction_is_theorem_1():
    steps = gram.Steps(lr=0.1, server_lr=2.0, local_steps=3, clients=4)
    assert (steps.rho1, steps.rho2) == pytest.approx((0.15, 0.3))
    assert gram.contraction(steps, lambda_s=0.2, lambda_p=0.4) == pytest.approx(1 - (0.15 * 0.2 + 0.3 * 0.4) / 2)
    assert gram.contraction(steps, lambda_s=0.2) == pytest.approx(1 - 0.15 * 0.2 / 2)
    mean = steps._replace(divisor=10.0)
    assert (mean.rho1, mean.rho2) == pytest.approx((0.015, 0.03))


def test_orthonormal_samples_follow_their_closed_form_at_infinite_width():
    """H^s = H^p = I/2: each round multiplies the residual by 1 − (1 + η_g/C)/2 · Σ_g η_l (1 − η_l)^g."""
    x = np.eye(12).reshape(3, 4, 12)
    result = convergence(x, signs(1, 3, 4), widths=[16], rounds=10, local_steps=3, lr=0.2, server_lr=0.7, replicates=2)
    a = result.data.attrs
    assert (a["lambda_s"], a["lambda_p"]) == pytest.approx((0.5, 0.5))
    factor = 1 - (1 + 0.7 / 3) / 2 * 0.2 * (1 + 0.8 + 0.64)
    limit = result.data["loss_limit"].sel({"method": "fedsplit"})
    np.testing.assert_allclose(limit / limit.isel(round=0), np.broadcast_to(factor ** (2 * np.arange(11)), limit.shape))
    assert result.data["contraction"].values[0] == pytest.approx(1 - (0.2 * 3 * (1 + 0.7 / 3)) * 0.5 / 2)


def test_training_approaches_its_infinite_width_limit_and_the_kernels_freeze():
    result = small(widths=[32, 2048], replicates=3)
    d = result.data.sel({"method": "fedsplit"})
    gap = np.abs(np.log(d["loss"] / d["loss_limit"])).isel(round=-1).mean("replicate").values
    assert gap[1] < gap[0] / 2
    for name in ("gap_shared", "gap_personal"):
        value = d[name].mean("replicate").values
        assert value[1] < value[0] / 4  # a mean of 64 times as many terms: 1/8 expected
    for name in ("drift_shared", "drift_personal", "flipped"):
        value = d[name].max("round").mean("replicate").values
        assert 0 < value[1] < value[0] / 2


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_bound_holds_in_every_replicate_under_both_reductions(reduction):
    result = small(widths=[256], rounds=30, replicates=3, reduction=reduction)
    glance = result.by_setting()
    assert glance["holds"].tolist() == [True] * 3
    assert (glance["max_loss_over_bound"] < 1).all()
    assert (glance["rounds_ratio"] > 1).all()
    assert "does NOT hold" not in result.summary()


def test_mean_reduction_with_n_times_the_step_is_sum_reduction():
    total, mean = small(lr=0.05), small(lr=0.05 * 4, reduction="mean")
    np.testing.assert_allclose(mean.data["loss"], total.data["loss"], rtol=1e-10)
    np.testing.assert_allclose(mean.data["contraction"], total.data["contraction"])


def test_a_bound_that_fails_is_reported_as_failed():
    result = kept()
    q = xr.full_like(result.data["contraction"], 0.01)
    wrong = ConvergenceResult(result.data.assign(contraction=q))
    assert wrong.by_setting()["holds"].tolist() == [False] * 3
    assert "fedsplit: the bound does NOT hold in 2 of 2 runs\n" in wrong.summary()
    assert wrong.glance()[["n_bounded", "n_held"]].to_numpy().tolist() == [[6, 0]]


def test_faster_is_the_paired_t_interval_of_log_rates():
    import scipy.stats

    result = small(replicates=5)
    log = np.log(result.rates().pivot(index="replicate", columns="method", values="rate"))
    expected = scipy.stats.ttest_rel(log["fedavg"], log["fedsplit"])
    row = result.faster().iloc[0]
    assert row["term"] == "fedsplit vs fedavg"
    assert (row["statistic"], row["p_value"]) == pytest.approx((expected.statistic, expected.pvalue))
    interval = expected.confidence_interval(0.95)
    assert (row["conf_low"], row["conf_high"]) == pytest.approx((interval.low, interval.high))
    assert row["speedup"] == pytest.approx(log["fedsplit"].mean() / log["fedavg"].mean())


def test_rate_stops_at_rounding_error():
    loss = 0.5 ** np.arange(301)
    loss[100:] = 1e-31 * (1 + np.sin(np.arange(201)))
    data = kept().data.isel(round=slice(0, 1)).squeeze("round", drop=True)
    base = xr.DataArray(loss, dims="round").expand_dims(method=data.method, width=data.width, replicate=data.replicate)
    faked = data.drop_vars(["loss", "loss_limit"]).assign(loss=base, loss_limit=base).assign_coords(round=range(301))
    rates = ConvergenceResult(faked).rates()
    np.testing.assert_allclose(rates["rate"], 0.5)
    np.testing.assert_allclose(rates["worst"], 0.5)


def test_divergence_is_said_at_its_round_and_the_run_kept():
    with pytest.warns(TheoryWarning, match=r"diverged in .* in round \d+, with lr = 30, .* stable with lr <= 0\.\d+"):
        result = small(lr=30.0)
    d = result.data
    assert (d["diverged_at"] > 0).all()
    for (m, w, k), t in np.ndenumerate(d["diverged_at"].values):
        loss = d["loss"].values[m, w, k]
        assert np.isfinite(loss[:t]).all()
        assert not loss[t] <= 1e4 * loss[0]
        assert np.isnan(loss[t + 1 :]).all()
    assert result.by_setting()["holds"].isna().all()  # a negative contraction is no bound
    assert "6 of 6 runs diverged" in result.summary()


def test_a_run_that_diverges_within_its_first_round_is_counted_and_nothing_is_said_without_it():
    data = kept(replicates=3).data.copy(deep=True)
    data["loss"][{"method": 0}] = 0.5 ** np.arange(16)
    second = {"method": 0, "width": 0, "replicate": 1}
    data["loss"][second], data["diverged_at"][second] = np.r_[1.0, np.full(15, np.nan)], 1
    found = ConvergenceResult(data.assign(contraction=data["contraction"] * 0 + 0.9))
    row, other = (found.by_setting().iloc[i] for i in (0, 1))
    assert (row["method"], row["replicates"], row["diverged"], row["holds"]) == ("fedsplit", 3, 1, False)
    assert np.isnan([row["rate"], row["std_error"], row["rounds_ratio"]]).all()
    assert (other["diverged"], other["holds"]) == (0, True)
    assert found.glance()[["n_runs", "n_bounded", "n_held", "n_diverged"]].to_numpy().tolist() == [[9, 9, 8, 1]]
    assert found.rates()["rate"].isna().tolist() == [False, True, *[False] * 7]
    faster = found.faster().iloc[0]
    assert (faster["n"], faster["missing"]) == (3, 1)
    assert faster[["estimate", "std_error", "conf_low", "p_value", "speedup"]].isna().all()
    text = found.summary()
    assert "fedsplit: the bound does NOT hold in 1 of 3 runs (1 diverged)" in text
    assert "1 of 9 runs diverged" in text
    assert "FedSplit vs FedAvg (paired t, 95% CI): no CI at 1 width\nWarning: 1 of 9 runs" in text
    assert "is worth" not in text


def test_the_prints_are_their_golden_files():
    first = losing(INCONCLUSIVE).data
    names = [f"{name}_{part}" for name in ("gap", "drift") for part in ("shared", "personal")]
    first = first.assign({name: first[f"h_{name.split('_')[1]}_norm"] * 0.1 + 0 * first[name] for name in names})
    first["flipped"] = 0 * first["flipped"] + 0.0625
    require_golden("ntk", ConvergenceResult(first).summary())
    data = descent.gaussian(clients=2, n=6, d=6, n_test=4)
    second = generalization(data, width=16, rounds=5, replicates=3).data
    test = xr.zeros_like(second["test"]) + np.array([0.5, 0.7, 0.9])
    second = second.assign(test=test, train=test / 2)
    require_golden("ntk-generalization", GeneralizationResult(second).summary())


def test_a_round_is_said_to_be_worth_more_only_where_the_difference_is_conclusive():
    conclusive = losing([[0.80, 0.81, 0.80], [0.90, 0.90, 0.91], [0.93, 0.96, 0.91]])
    speedup = conclusive.faster()["speedup"].iloc[0]
    text = " ".join(conclusive.summary().split())
    assert f"Where they differ, one round of FedSplit is worth {speedup:.3g} rounds of FedAvg" in text
    text = losing(INCONCLUSIVE).summary()
    assert "FedSplit vs FedAvg (paired t, 95% CI): inconclusive at 1 width" in text
    assert "is worth" not in text
    one = losing(INCONCLUSIVE).data
    two = ConvergenceResult(xr.concat([one, one.assign_coords(width=[64])], "width", data_vars="minimal"))
    assert "FedSplit vs FedAvg (paired t, unadjusted 95% CIs): inconclusive at 2 widths" in " ".join(
        two.summary().split()
    )


def test_a_round_is_worth_nothing_of_one_that_does_not_lower_the_loss():
    fedsplit, fedavg, matched = [0.9, 0.8, 0.85], [1.05, 1.02, 1.01], [1.02, 1.03, 1.01]
    result = losing([fedsplit, fedavg, matched])
    faster = result.faster()
    assert (faster["estimate"].iloc[0] > 0, faster["speedup"].isna().all()) == (True, True)
    assert result.summary().splitlines()[-3].endswith("95% CI): faster at 1 width")
    assert "95% CI): slower at 1 width" in losing([fedavg, fedsplit, fedsplit]).summary()


def test_runs_that_differ_from_fedavg_by_one_number_alone_have_no_interval():
    row = losing([[0.5], [0.7], [0.6]]).faster().iloc[0]
    assert row["estimate"] == pytest.approx(np.log(0.7 / 0.5))
    assert row[["std_error", "statistic", "p_value", "conf_low", "conf_high"]].isna().all()


def test_the_width_that_theorem_1_asks_for_has_its_logarithm():
    result = kept()
    a = result.data.attrs
    asked = a["samples"] ** 4 * np.log(a["samples"] / 0.05) / a["lambda_s"] ** 4
    assert gram.least_width(a["lambda_s"], n=a["samples"]) == pytest.approx(asked)
    assert f"the theorem asks for m2 >= {asked:.1e}" in " ".join(result.summary().split())


def test_parallel_samples_are_named_and_give_no_rate():
    x, y = sphere(0, 3, 4, 8), signs(1, 3, 4)
    x[2, 1] = x[0, 3]
    with pytest.warns(TheoryWarning) as caught:
        result = convergence(x, y, widths=[16], rounds=5, replicates=1)
    text = " ".join(str(w.message) for w in caught)
    assert "1 pair(s) of samples are parallel, first rows ((3, 9),)" in text
    assert "smallest eigenvalue of H^s" in text
    assert result.data["contraction"].isnull().all()
    assert result.bound().isnull().all()
    assert result.by_setting()["holds"].tolist() == [None] * 3
    assert result.glance()[["lambda_s", "n_bounded", "n_held"]].to_numpy().tolist() == [[0, 0, 0]]
    assert "VIOLATED: 1 parallel" in result.summary()
    assert "fedsplit: no bound, because λ^s is not above 0" in result.summary()


@pytest.mark.parametrize("apart", [0, 1e-16, 1e-12, 1e-8])
@pytest.mark.parametrize("where", ["one client", "two clients"])
def test_of_repeated_and_nearly_repeated_samples_the_theorems_say_nothing(apart, where):
    x, y = sphere(0, 3, 12, 8), signs(1, 3, 12)
    first, second = ((0, 0), (0, 1)) if where == "one client" else ((0, 0), (1, 3))
    x[second] = x[first] + apart * x[2, 2]
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TheoryWarning)
        one = convergence(x[:, :4], y[:, :4], widths=[16], rounds=5, replicates=2)
        split = ["train"] * 8 + ["test"] * 4
        two = generalization(x, y, split=split, width=16, rounds=5, replicates=2)
    text = one.summary()
    assert "γ^s = -" not in text
    assert "γ^p = -" not in text
    assert one.by_setting()["holds"].isna().all()
    assert text.count("no bound, because λ^s is not above 0") == 3
    row = two.by_setting().iloc[0]
    assert np.isnan([row["complexity"], row["bound"], row["test_limit"]]).all()
    assert (row["holds"], row["vacuous"]) == (None, True)
    assert np.isfinite(row["test"])
    assert "Theorem 2: the bound holds in 0 of 1 setting\n" in two.summary()
    assert "No bound in 1 setting: λ^s is not above 0" in two.summary()


def test_long_samples_warn_and_normalize_mends_them():
    x, y = 3 * sphere(0, 2, 3, 8), signs(1, 2, 3)
    with pytest.warns(TheoryWarning, match=r"6 sample\(s\) are longer than 1.*normalize=True"):
        convergence(x, y, widths=[8], rounds=2, replicates=1)
    result = convergence(x, y, widths=[8], rounds=2, replicates=1, normalize=True)
    assert result.data.attrs["samples_long"] == 0


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 5, 4), (5, 1, 4)], ids=["one sample", "one client", "clients of one"])
def test_smallest_settings_work(shape):
    result = convergence(sphere(0, *shape), signs(1, *shape[:2]), widths=[32], rounds=5, replicates=1)
    a = result.data.attrs
    if shape[0] == 1:
        assert a["lambda_p"] == a["lambda_s"]
    if shape[1] == 1:
        assert a["lambda_p"] == pytest.approx(0.5)
    assert np.isnan(result.faster()["conf_low"]).all()
    assert result.by_setting()["holds"].all()


@pytest.mark.parametrize(("verb", "name", "values"), [
    ("convergence", "widths", [8, 8]), ("convergence", "widths", []), ("convergence", "methods", ["fedavg", "fedavg"]),
    ("generalization", "clients", [2, 2]), ("generalization", "samples", (2, 2)),
])  # fmt: skip
def test_settings_that_are_named_twice_are_refused_before_training(verb, name, values):
    data = fedstat.ntk.descent.gaussian(clients=2, n=3, d=4, n_test=4)
    with pytest.raises(ValueError, match=f"{name} must hold at least one value and none twice, but got"):
        getattr(fedstat.ntk, verb)(data, rounds=10**9, **{name: values})


def test_unequal_clients_use_the_largest_for_the_bound():
    x, y, client = sphere(0, 9, 6), signs(1, 9), [0, 0, 1, 1, 1, 1, 1, 2, 2]
    result = convergence(x, y, client, widths=[64], rounds=20, replicates=2, reduction="mean")
    a = result.data.attrs
    assert (a["n"], a["n_min"], a["divisor"]) == (5, 2, 5.0)
    assert result.by_setting()["holds"].all()


def test_theorem_step_is_its_formula():
    result = small(lr="theorem", rounds=3)
    a = result.data.attrs
    gammas = a["lambda_s_max"] / a["lambda_s"] * a["lambda_p_max"] / a["lambda_p"]
    assert a["lr"] == pytest.approx((a["lambda_s"] + a["lambda_p"]) / (gammas * 2 * 12**2))
    assert result.by_setting()["holds"].all()


def test_dynamic_has_no_bound_and_runs_at_the_smallest_width_only():
    result = small(widths=[16, 32], methods=["fedsplit", "dynamic"], rounds=6)
    glance = result.by_setting().set_index(["method", "width"])
    assert ("dynamic", 32) not in glance.index
    assert glance.loc[("dynamic", 16), "holds"] is None
    assert 0 < glance.loc[("dynamic", 16), "rate"] < 1
    assert "dynamic: no bound" in result.summary()
    assert (result.data["kept"].sel({"method": "dynamic", "width": 16}).isel(round=1) < 1).all()


def test_a_seed_gives_the_same_run_and_another_seed_another():
    a, b, c = small(seed=3), small(seed=3), small(seed=4)
    xr.testing.assert_identical(a.data, b.data)
    assert not np.allclose(a.data["loss"], c.data["loss"])
    np.testing.assert_allclose(small(seed=3, device="cpu").data["loss"], a.data["loss"], rtol=1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["fedsplt"]}, "Did you mean 'fedsplit'"),
        ({"widths": [0]}, "widths must be an integer >= 1, but got 0"),
        ({"lr": -1.0}, r"lr must be a finite number.*but got -1\.0.*stable"),
        ({"reduction": "max"}, "reduction must be one of 'sum', 'mean'"),
        ({"rounds": 0}, "rounds must be"),
        ({"server_lr": 0}, "server_lr must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


@pytest.mark.parametrize(
    ("x", "y", "client", "message"),
    [
        (np.ones((4, 2)), np.ones(5), None, r"one value per sample, shape \(4,\), but got \(5,\)"),
        (np.ones((4, 2)), np.ones(4), [0, 1], r"one label per sample, shape \(4,\), but got \(2,\)"),
        (np.ones((3, 4, 2)), np.ones((3, 4)), [0, 1], r"one label per client, shape \(3,\), but got \(2,\)"),
        (np.r_[np.nan, np.ones(7)].reshape(4, 2), np.ones(4), None, r"x must be finite.*first \[0\]"),
        (np.ones((4, 2)), np.r_[np.ones(3), np.inf], None, r"y must be finite.*first \[3\]"),
        (np.ones(4), np.ones(4), None, r"but got shape \(4,\)"),
        (np.ones((0, 2)), np.ones(0), None, r"not empty"),
        (xr.DataArray(np.ones((2, 2)), dims=("row", "feature")), np.ones(2), None, r"x must have dims.*'row'"),
        (np.ones((4, 2)) + 1j, np.ones(4), None, r"x must hold real numbers, but got complex128"),
        (np.ones((4, 2)), np.array(["1"] * 4), None, r"y must hold real numbers, but got <U1"),
        (xr.Dataset({"a": ("sample", np.ones(2))}), None, None, r"must hold x, but got \['a'\]"),
    ],
)
def test_bad_samples_are_refused(x, y, client, message):
    with pytest.raises(ValueError, match=message):
        convergence(x, y, client)


def test_a_zero_sample_cannot_be_normalised():
    with pytest.raises(ValueError, match=r"x = 0 in row\(s\) \[1\]"):
        fedstat.ntk.kernel(np.array([[1.0, 0.0], [0.0, 0.0]]), normalize=True)


def test_dataset_dataarray_and_arrays_give_the_same_result():
    data = descent.gaussian(clients=2, n=4, d=6, n_test=3)
    train = data.isel(sample=slice(0, 4))
    arguments = {"widths": [8], "rounds": 3, "replicates": 1}
    whole = convergence(data, **arguments)
    for x in (train, train.transpose("feature", "sample", "client")):
        xr.testing.assert_identical(convergence(x, **arguments).data, whole.data)
    flat = train.x.values.reshape(8, 6), train.y.values.reshape(8), np.repeat([0, 1], 4)
    xr.testing.assert_identical(convergence(*flat, **arguments).data, whole.data)
    order = np.array([5, 0, 7, 2, 1, 6, 3, 4])  # samples of the clients interleaved
    mixed = convergence(flat[0][order], flat[1][order], flat[2][order], **arguments)
    np.testing.assert_allclose(mixed.data["loss"], whole.data["loss"], rtol=1e-10)


def test_the_tree_of_another_result_is_refused():
    with pytest.raises(ValueError, match="must hold a GeneralizationResult, but holds 'ConvergenceResult'"):
        GeneralizationResult.from_datatree(kept().to_datatree())


def test_tidy_has_one_row_per_run_and_round():
    result = kept()
    table = result.tidy()
    assert len(table) == 3 * 1 * 2 * 16
    np.testing.assert_allclose(table["bound"].to_numpy().reshape(3, 2, 16), result.bound().values[:, 0], rtol=1e-12)


def test_complexity_refuses_a_singular_kernel():
    h = np.ones((3, 3))
    with pytest.raises(ValueError, match=r"must be positive definite.*parallel"):
        gram.complexity(h - np.eye(3), [np.zeros((3, 3))], np.ones(3))


def test_confidence_is_its_formula():
    assert gram.confidence(50, 0.1, delta=0.05, constant=2.0) == pytest.approx(2 * np.sqrt(np.log(50 / 0.005) / 100))
    with pytest.raises(ValueError, match="needs λ_min"):
        gram.confidence(50, 0.0)


def test_generalization_recuts_clients_at_constant_n_and_grows_n():
    data = descent.gaussian(clients=4, n=6, d=5, n_test=6)
    common = {"width": 16, "rounds": 5, "replicates": 2}
    by_clients = generalization(data, clients=[1, 2, 8], **common).by_setting()
    assert by_clients["clients"].tolist() == [1, 2, 8]
    assert (by_clients["clients"] * by_clients["n"] == 24).all()
    assert by_clients["complexity"].is_monotonic_increasing
    by_n = generalization(data, samples=[2, 6], **common).by_setting()
    assert by_n["n"].tolist() == [2, 6]
    same = generalization(data, **common).by_setting()
    assert same["complexity"][0] == pytest.approx(by_n["complexity"][1])


def test_limit_predictor_is_where_the_descent_of_a_linear_model_ends(monkeypatch):
    """With H = XXᵀ network (4) is h_c(x) = (w^s + w_c^p)ᵀx, which can be trained to the end exactly."""
    monkeypatch.setattr(gram, "kernel", lambda x: x @ np.swapaxes(x, -1, -2))
    clients, n, d = 3, 3, 12
    x, y = sphere(6, clients, n + 9, d), signs(7, clients, n + 9)
    split = np.repeat(["train", "test"], [n, 9])
    result = generalization(x, y, split=split, server_lr=0.8, width=4, rounds=1, replicates=1)
    shared, personal = np.zeros(d), np.zeros((clients, d))
    for _ in range(3000):
        moves = []
        for c in range(clients):
            s, p = shared.copy(), personal[c].copy()
            for _ in range(2):
                step = 0.2 * x[c, :n].T @ (y[c, :n] - x[c, :n] @ (s + p))
                s, p = s + step, p + step
            moves.append(s - shared)
            personal[c] = p
        shared = shared + 0.8 * np.mean(moves, axis=0)
    values = np.einsum("cnd,cd->cn", x, shared + personal)
    np.testing.assert_allclose(values[:, :n], y[:, :n], atol=1e-9)
    expected = np.minimum(np.abs(values - y)[:, n:], 1).mean()
    assert float(result.data["test_limit"][0]) == pytest.approx(expected, abs=1e-9)
    assert float(result.data["train_limit"][0]) < 1e-9


def test_wide_networks_come_near_the_limit_predictor():
    data = descent.gaussian(clients=2, n=8, d=12, n_test=40)
    d = generalization(data, width=1500, rounds=150, init_scale=0.05, replicates=2).data
    assert float(d["train"].max()) < 1e-3
    assert d["test"].mean().item() == pytest.approx(float(d["test_limit"][0]), abs=0.04)


def test_networks_that_diverge_are_counted_and_leave_no_mean_and_no_verdict():
    x, y, split = sphere(0, 3, 12, 8), signs(1, 3, 12), ["train"] * 8 + ["test"] * 4
    with pytest.warns(TheoryWarning, match=r"diverged in \d of 6 runs, first with 3 clients.*stable with lr <= 0\.\d+"):
        result = generalization(x, y, split=split, width=16, rounds=20, replicates=6, lr=3.0)
    lost = int(result.data["test"].isnull().sum())
    assert 0 < lost < 6
    row = result.by_setting().iloc[0]
    assert (row["replicates"], row["diverged"], row["holds"]) == (6, lost, None)
    assert np.isnan([row["test"], row["std_error"], row["train"]]).all()
    assert result.glance()[["n_held", "n_runs", "n_diverged"]].to_numpy().tolist() == [[0, 6, lost]]
    for text in (result.summary(), repr(result)):
        assert f"{lost} of 6 networks diverged" in text
        assert "the bound holds in 0" in text


def test_a_network_above_its_bound_breaks_it_whatever_the_others_did():
    result = generalization(descent.gaussian(clients=2, n=6, d=6, n_test=4), width=16, rounds=5, replicates=3)
    test = xr.zeros_like(result.data["test"]) + np.array([0.5, np.nan, 0.9])
    held = [
        GeneralizationResult(
            result.data.assign(test=test, bound=xr.full_like(result.data["bound"], bound))
        ).by_setting()
        for bound in (0.8, 0.95, np.nan)
    ]
    assert [one["holds"][0] for one in held] == [False, None, None]
    assert [one["vacuous"][0] for one in held] == [False, False, True]


@pytest.mark.parametrize("lr", [30.0, 1e60])
def test_divergence_within_a_round_overflows_without_a_word_of_numpy(lr):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TheoryWarning)
        assert (small(lr=lr, local_steps=6, rounds=3).data["diverged_at"] == 1).all()


def test_bound_is_informative_where_n_is_large_and_labels_are_easy():
    rng = np.random.default_rng(5)
    x = np.array([1.0, 0, 0]) + 0.02 * rng.normal(size=(1, 240, 3))
    split = np.repeat(["train", "test"], [200, 40])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TheoryWarning)
        result = generalization(x, np.ones((1, 240)), split=split, normalize=True, width=64, rounds=20, replicates=1)
    row = result.by_setting().iloc[0]
    assert not row["vacuous"]
    assert row["holds"]
    assert "Theorem 2: the bound holds in 1 of 1 setting\n" in result.summary()


def test_generalization_needs_test_samples_of_every_client():
    x, y = sphere(0, 6, 4), signs(1, 6)
    with pytest.raises(ValueError, match="split must be 'train' or 'test'"):
        generalization(x, y, [0, 0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="every client must have training and test samples"):
        generalization(x, y, [0, 0, 0, 1, 1, 1], split=["train"] * 4 + ["test"] * 2)
    with pytest.raises(ValueError, match="clients must be an integer from 1 to 2"):
        generalization(x, y, split=["train"] * 4 + ["test"] * 2, clients=[3])


def test_digits_are_real_and_partitioned_as_asked():
    one = descent.digits(clients=10, n=5, n_test=2)
    assert (np.ptp(one.y.values, axis=1) == 0).all()
    assert one.y.values[:, 0].tolist() == [-1.0, 1.0] * 5
    iid = descent.digits(clients=10, n=40, n_test=2, partition="iid")
    assert (np.ptp(iid.y.values, axis=1) == 2).all()
    np.testing.assert_allclose(np.linalg.norm(iid.x, axis=-1), 1)
    with pytest.raises(ValueError, match="gives one client only 174"):
        descent.digits(clients=10, n=200)
