"""Bootstrap over clients, permutation test, stability, number of factors: against refits and psych."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose
from scipy import stats

import fedstat
import fedstat.labelled as fs
from fedstat._utils.streams import generator
from fedstat.stats import factor, number_of_factors, resampling, split
from fedstat.stats.moments import Moments, correlation, moments

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "psych.json").read_text())
CASES = {c["name"]: c for c in GOLDEN["cases"]}


def weights(seed: int = 0, clients: int = 8, noise: float = 0.6) -> np.ndarray:
    """Units 0 to 5 follow two common patterns, units 6 to 9 are each client's own."""
    rng = np.random.default_rng(seed)
    loadings = np.array([[1, 0], [1, 0], [1, 0.2], [0, 1], [0, -1], [0.2, 1]])
    alike = loadings @ rng.normal(size=(2, 25)) + noise * rng.normal(size=(clients, 6, 25))
    return np.concatenate([alike, rng.normal(size=(clients, 4, 25))], axis=1)


def client_moments(w: np.ndarray) -> Moments:
    return moments(np.swapaxes(w, 1, 2))


def test_a_bootstrap_replicate_equals_a_refit_on_restacked_clients() -> None:
    w = weights()
    drawn = resampling.bootstrap(client_moments(w), replicates=20, seed=3, n_factors=2, tau=0.4)
    counts = generator(3, "bootstrap").multinomial(8, np.full(8, 1 / 8), size=20)
    assert (counts.max(1) > 1).all()
    for b in range(20):
        restacked = np.repeat(w, counts[b], axis=0)
        refit = factor.fit(correlation(moments(fs.layer_matrix(restacked))), n_factors=2)
        np.testing.assert_allclose(drawn.communality[b], refit.communality, atol=1e-9)
        np.testing.assert_array_equal(drawn.shared[b], split.shared(refit.communality, tau=0.4))


def alone(w: np.ndarray, **options: object) -> np.ndarray:
    """ν of one sample by the public verb, from its own start and with its own number of factors."""
    return np.asarray(fs.fa(fs.layer_matrix(w), **options).communality)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
@pytest.mark.parametrize("method", factor.METHODS)
def test_replicates_of_the_verbs_are_analyses_of_the_resamples_alone(method: factor.Method) -> None:
    """No warm start, no number of factors of the whole, no other cap: pa at this κ stops before its fixed point."""
    w, how = np.random.default_rng(0).normal(size=(9, 20, 12)), {"kappa": 0.75, "method": method}
    result = fs.bootstrap(w, n_boot=6, seed=3, **how)  # type: ignore[arg-type]
    assert method != "pa" or not result.converged.any()
    counts = generator(3, "bootstrap").multinomial(9, np.full(9, 1 / 9), size=6)
    assert_allclose(result.communality, [alone(np.repeat(w, c, axis=0), **how) for c in counts], atol=1e-7)
    rng = generator(3, "half-samples")
    halves = [half for _ in range(3) for half in rng.permutation(9)[:8].reshape(2, 4)]
    assert_allclose(result.half_samples, [alone(w[half], **how) for half in halves], atol=1e-7)
    shuffled = fs.permutation_test(w, n_permutations=6, seed=3, **how)  # type: ignore[arg-type]
    rng = generator(3, "permutation")
    for nu in shuffled.communality:
        assert_allclose(nu, alone(np.stack([own[rng.permutation(20)] for own in w]), **how), atol=1e-7)


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
def test_variants_of_stability_are_analyses_of_their_own() -> None:
    w = np.random.default_rng(0).normal(size=(9, 20, 12))
    table = fs.sensitivity(w, kappa=0.75, kappas=(0.5, 0.85), taus=(), n_starts=2, seed=1).tidy()
    start = generator(1, "stability").uniform(size=(2, 20))
    changes = {
        "minres": {"method": "minres"}, "pc": {"method": "pc"}, "leverage": {"method": "leverage"},
        "0.5": {"kappa": 0.5}, "0.85": {"kappa": 0.85}, "smc": {"init": "smc"}, "random 1": {"init": start[0]},
        "random 2": {"init": start[1]}, "1000": {"max_iter": 1000}, "1e-06": {"max_iter": 1000, "tol": 1e-6},
    }  # fmt: skip
    assert set(table["value"]) == set(changes)
    reference = split.shared(alone(w, kappa=0.75), tau=0.5)
    for row in table.itertuples():
        other = split.shared(alone(w, **({"kappa": 0.75} | changes[row.value])), tau=0.5)
        assert row.prop_unchanged == pytest.approx(float(split.prop_unchanged(reference, other))), row.value


@pytest.mark.parametrize("draw", [resampling.bootstrap, resampling.permutation])
def test_replicates_keep_their_digits_under_a_common_offset(draw) -> None:  # type: ignore[no-untyped-def]
    moved = weights() + 1e6
    near, far = (draw(client_moments(w), replicates=5, seed=1, n_factors=2) for w in (moved - 1e6, moved))
    np.testing.assert_allclose(far.communality, near.communality, atol=1e-9)


@pytest.mark.parametrize("draw", [resampling.bootstrap, resampling.permutation])
def test_replicates_do_not_depend_on_the_chunk_or_the_kind_of_array(draw) -> None:  # type: ignore[no-untyped-def]
    m = client_moments(weights())
    one = draw(m, replicates=7, seed=1, n_factors=2, chunk=1)
    for other in (
        draw(m, replicates=7, seed=1, n_factors=2, chunk=3),
        draw(Moments(*map(torch.asarray, m)), replicates=7, seed=1, n_factors=2, chunk=7),
    ):
        np.testing.assert_allclose(np.asarray(other.communality), one.communality, atol=1e-9)


def test_bootstrap_tells_certain_from_doubtful_units() -> None:
    result = fs.bootstrap(weights(), n_factors=2, tau=0.4, n_boot=100)
    assert (result.prop_shared[:6] > 0.95).all()
    assert (result.prop_shared[6:] < 0.05).all()
    table = result.tidy()
    assert ((table["conf_low"] <= table["estimate"] + 0.05) & (table["estimate"] <= table["conf_high"] + 0.05)).all()
    assert (table["std_error"] > 0).all()
    assert result.glance()["n_doubtful"][0] == 0
    own = np.random.default_rng(0).normal(size=(8, 10, 25))
    assert fs.bootstrap(own, n_factors=2, method="pc", tau=0.4, n_boot=100).glance()["n_doubtful"][0] >= 4


def test_bootstrap_standard_errors_are_those_of_repeated_sampling() -> None:
    pattern = weights(0, clients=1, noise=0)[0, :6]
    rng = np.random.default_rng(9)

    def sample() -> np.ndarray:
        return pattern + 0.8 * rng.normal(size=(40, 6, 25))

    refits = [factor.fit(correlation(moments(fs.layer_matrix(sample()))), n_factors=2) for _ in range(200)]
    truth = np.std([fit.communality for fit in refits], axis=0)
    estimates = [fs.bootstrap(sample(), n_factors=2, n_boot=60, seed=s).tidy()["std_error"] for s in range(12)]
    ratio, error = np.mean(estimates, axis=0) / truth, np.hypot(np.std(estimates, axis=0) / truth / 12**0.5, 1 / 20)
    assert (abs(ratio - 1) < 4 * error).all()


def test_expanded_percentiles_of_normal_replicates_are_students_interval() -> None:
    """Of replicates N(m, s √((n − 1)/n)), as a bootstrap of a mean has them, they are m ± t s."""
    n, s = 8, 2.0
    x = 3.0 + s * np.sqrt((n - 1) / n) * stats.norm.ppf((np.arange(99_999) + 1) / 100_000)
    ends = resampling.expanded_percentiles(x, n, level=0.95)
    assert_allclose(ends, 3.0 + stats.t.ppf([0.025, 0.975], n - 1) * s, atol=2e-3)


def test_a_gap_is_that_of_the_eigenvalues_at_the_cut() -> None:
    w = weights()
    drawn = resampling.bootstrap(client_moments(w), replicates=4, seed=3, kappa=0.5)
    counts = generator(3, "bootstrap").multinomial(8, np.full(8, 1 / 8), size=4)
    for b in range(4):
        r = np.corrcoef(fs.layer_matrix(np.repeat(w, counts[b], axis=0)), rowvar=False)
        values, g = np.sort(np.linalg.eigvalsh(r))[::-1], drawn.n_factors[b]
        assert_allclose(drawn.gap[b], values[g - 1] - values[g], atol=1e-9)


@pytest.mark.parametrize("clients", [7, 8])
def test_intervals_need_8_clients(clients: int) -> None:
    table = fs.bootstrap(weights(clients=clients), n_factors=2, n_boot=20).tidy()
    assert table[["conf_low", "conf_high"]].isna().all(axis=None) == (clients < 8)


def test_groups_and_eigenvalues_that_are_hardly_apart_are_named() -> None:
    own = np.random.default_rng(0).normal(size=(10, 12, 30))
    assert "Caution: groups are" in repr(fs.bootstrap(own, kappa=0.5, method="pc", n_boot=99))
    rng = np.random.default_rng(2)
    profiles = rng.normal(size=(5, 400))  # independent, so that no two of them are the two factors
    alike = np.concatenate([profiles + 0.3 * rng.normal(size=(12, 5, 400)), rng.normal(size=(12, 5, 400))], axis=1)
    assert "SE apart: factors are not identified" in repr(fs.bootstrap(alike, n_factors=2, method="pc", n_boot=99))
    clear = repr(fs.bootstrap(weights(clients=12), n_factors=2, method="pc", n_boot=99))
    assert "Caution" not in clear


def test_a_dead_unit_stays_dead_in_every_replicate() -> None:
    w = weights()
    w[:, 2] = 0
    table = fs.bootstrap(w, n_factors=2, method="pc", n_boot=10).tidy()
    assert table["group"][2] == "constant"
    assert table.loc[2, ["estimate", "std_error", "conf_low"]].isna().all()
    assert table["prop_shared"][2] == 0


@pytest.mark.parametrize("verb", [fs.bootstrap, fs.jackknife, fs.permutation_test])
def test_resampling_needs_two_clients(verb) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="at least 2 clients"):
        verb(weights(clients=1), n_factors=2)


def test_the_permutation_test_finds_units_with_an_identity_and_only_those() -> None:
    found = fs.permutation_test(weights(), n_factors=2, method="pc", n_permutations=99)
    assert found.p_value == 0.02
    table = found.tidy()
    assert (table["p_value"][:6] < 0.05).all()
    assert (table["p_value"][6:] > 0.05).all()
    assert_allclose(table["p_adjusted"], stats.false_discovery_control(table["p_value"]))


def test_the_permutation_test_gives_no_verdict_that_its_shuffles_do_not_allow() -> None:
    few = fs.permutation_test(weights(), n_factors=2, method="pc", n_permutations=19)
    assert few.conclude() == "too few permutations for a conclusion at 5%"
    own = np.random.default_rng(0).normal(size=(8, 6, 30))
    found = fs.permutation_test(own, n_factors=1, n_permutations=99)
    assert "no evidence against H0" in repr(found)
    own[:, 0] = 0
    table = fs.permutation_test(own, n_factors=1, method="pc", n_permutations=39).tidy()
    assert table[["p_value", "p_adjusted"]].isna().all(axis=1).tolist() == [True] + [False] * 5
    assert (table["p_adjusted"][1:] >= table["p_value"][1:]).all()


def test_the_permutation_test_says_that_it_does_not_ask_about_agreement() -> None:
    rng = np.random.default_rng(0)
    agreeing = rng.normal(size=(8, 60)) + rng.normal(size=(12, 8, 60))
    found = fs.permutation_test(agreeing, n_factors=2, method="pc", n_permutations=99)
    assert found.p_value > 0.05
    assert fs.icc(agreeing).agreement.min() > 0.3
    assert "no evidence against H0, which does not show exchangeability (for agreement see" in found.conclude()


def test_stability_varies_one_choice_at_a_time() -> None:
    result = fs.sensitivity(weights(), kappa=0.5, kappas=(0.5, 0.7), taus=(0.3,), n_starts=2)
    table = result.tidy()
    assert table["varied"].value_counts().to_dict() == {
        "method": 3, "init": 3, "max_iter": 1, "tol": 1, "kappa": 1, "tau": 1,
    }  # fmt: skip
    for _, row in table[table["varied"] == "kappa"].iterrows():
        other = fs.split(weights(), kappa=float(row["value"]), method="pc")
        assert row["n_factors"] == other.fit.n_factors
    assert ((table["ari"] <= 1) & (table["prop_unchanged"] <= 1)).all()
    assert list(result.glance()) == ["method", "kappa", "init", "max_iter", "tol", "tau"]
    more = table.set_index("varied").loc["max_iter"]
    assert result.reference.factors.converged
    assert more["converged"], "it stops where the reference stopped"
    assert more["prop_unchanged"] == 1


# --- number of factors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["parallel"], ids=lambda c: c["name"])
def test_parallel_analysis_equals_psych(case: dict) -> None:  # type: ignore[type-arg]
    r = np.array(CASES[case["name"]]["r"])
    numbers, curves = number_of_factors.compare(r, case["n_obs"], draws=400)
    assert numbers["parallel_pc"] == case["n_components"]
    assert numbers["parallel_fa"] == case["n_factors"]
    np.testing.assert_allclose(curves["reduced"], case["fa_values"], atol=1e-10)
    np.testing.assert_allclose(curves["noise_pc"], case["pc_95"], atol=GOLDEN["tolerance"]["parallel"])
    np.testing.assert_allclose(curves["noise_fa"], case["fa_95"], atol=GOLDEN["tolerance"]["parallel"])


@pytest.mark.parametrize("name", CASES)
def test_minimum_average_partial_equals_psych(name: str) -> None:
    ours, theirs = number_of_factors.minimum_average_partial(np.array(CASES[name]["r"])), CASES[name]["map"]
    n = min(len(theirs), len(ours) - 1)
    assert n >= 3
    np.testing.assert_allclose(ours[1 : n + 1], theirs[:n], atol=1e-8)


def test_wishart_noise_has_the_eigenvalues_of_noise_rows() -> None:
    rng = np.random.default_rng(0)
    d, n = 10, 50
    wishart = np.array([np.linalg.eigvalsh(number_of_factors.noise_correlation(rng, d, n)) for _ in range(2000)])
    rows = np.array([np.linalg.eigvalsh(np.corrcoef(rng.normal(size=(d, n)))) for _ in range(2000)])
    error = np.sqrt((wishart.var(0) + rows.var(0)) / 2000)
    assert (abs(wishart.mean(0) - rows.mean(0)) < 4 * error).all()
    assert np.linalg.matrix_rank(number_of_factors.noise_correlation(rng, 10, 6)) == 5


def test_every_rule_finds_the_factors_of_a_clear_structure() -> None:
    loadings = np.kron(np.eye(3), np.full((8, 1), 0.8))
    r = loadings @ loadings.T + 0.36 * np.eye(24)
    result = fs.n_factors(r, corr=True, n_obs=10**7, kappa=0.6)
    assert {result.numbers[k] for k in ("kaiser", "parallel_pc", "parallel_fa", "map", "scree")} == {3}
    table = result.tidy()
    assert table["n_factors"].tolist() == list(result.numbers.values())
    assert table.set_index("term").loc["kappa", "share"] >= 0.6
    assert "10000000 rows" in repr(result)


def test_independent_units_have_no_factors() -> None:
    numbers, _ = number_of_factors.compare(np.eye(12), 500)
    assert numbers["parallel_pc"] == numbers["parallel_fa"] == numbers["map"] == 0


def test_n_factors_leaves_dead_units_out_and_needs_n_for_a_correlation_matrix() -> None:
    z = np.random.default_rng(0).normal(size=(300, 6))
    z[:, 1] = 2
    assert len(fs.n_factors(z).curves["eigenvalues"]) == 5
    with pytest.raises(ValueError, match="n_obs must be given with a correlation matrix"):
        fs.n_factors(np.eye(4), corr=True)


def test_equal_clients_are_named_by_every_verb_over_clients(tmp_path: Path) -> None:
    """As in icc: 3 clients, each 4 times, are not 12 independent clients."""
    rng = np.random.default_rng(0)
    w, names = np.tile(rng.normal(size=(3, 6, 20)), (4, 1, 1)), [f"c{i}" for i in range(12)]
    copies = xr.DataArray(w, dims=("client", "unit", "weight"), coords={"client": names})
    pairs = "18 pairs of clients (c0 and c3, ...) have equal weights, but "
    replicates = xr.DataArray(
        np.tile(rng.normal(size=(3, 2, 6, 20)), (4, 1, 1, 1)),
        dims=("client", "replicate", "unit", "weight"), coords={"client": names},
    )  # fmt: skip
    results = {
        "bootstrap": fedstat.bootstrap(copies, n_factors=2, method="pc", n_boot=5),
        "jackknife": fedstat.jackknife(copies, n_factors=2, method="pc"),
        "permutation_test": fedstat.permutation_test(copies, n_factors=2, method="pc", n_permutations=5),
        "variance_components": fedstat.variance_components(replicates),
        "icc": fedstat.icc(copies),
    }
    for verb, result in results.items():
        texts = [caution.text for caution in result.cautions() if caution.title == "Clients not independent"]
        assert len(texts) == 1, verb
        assert texts[0].startswith(pairs), verb
        assert "18 pairs of clients" in repr(result), verb
    results["bootstrap"].save(tmp_path / "result.json")
    assert repr(fedstat.load(tmp_path / "result.json")) == repr(results["bootstrap"])


EQUAL = {
    "distinct": (weights(), None, ""),
    "one pair": (weights()[[0, 1, 2, 3, 4, 5, 2]], None, "clients 2 and 6 have equal weights"),
    "in float32": (weights().astype(np.float32)[[0, 1, 2, 3, 4, 0]], None, "clients 0 and 5 have equal weights"),
    "scaled copies": (np.concatenate([weights(), 2 * weights()[:1]]), None, ""),
    "in groups": (weights()[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], ""),
}


@pytest.mark.parametrize(("w", "groups", "text"), EQUAL.values(), ids=EQUAL)
def test_equal_clients_count_unless_they_are_left_out_together(
    w: np.ndarray, groups: list[int] | None, text: str
) -> None:
    result = fedstat.jackknife(w, n_factors=2, method="pc", groups=groups)
    texts = [caution.text for caution in result.cautions() if caution.title == "Clients not independent"]
    assert [t.partition(",")[0] for t in texts] == ([text] if text else [])


NOISE = {
    "few rows": (64, 20, {"kappa": 0.85}, 0.05),
    "many rows": (64, 1000, {"kappa": 0.85}, 0.1),
    "many rows at a low kappa": (64, 1000, {"kappa": 0.5}, 0.02),
    "more units than are simulated": (200, 300, {"kappa": 0.85}, 0.03),
    "more units than rows": (300, 60, {"kappa": 0.85}, 0.05),
    "pc": (40, 200, {"kappa": 0.75, "method": "pc"}, 0.02),
    "leverage": (40, 200, {"kappa": 0.75, "method": "leverage"}, 0.03),
    "minres, a single draw": (20, 60, {"kappa": 0.75, "method": "minres"}, 0.1),
    "a fixed number of factors": (30, 100, {"n_factors": 5}, 0.03),
    "until convergence": (30, 60, {"kappa": 0.75, "max_iter": 1000}, 0.05),
}


@pytest.mark.parametrize(("units", "rows", "how", "atol"), NOISE.values(), ids=NOISE)
def test_the_communality_of_noise_is_that_of_rows_drawn_in_full(
    units: int, rows: int, how: dict[str, object], atol: float
) -> None:
    rng = np.random.default_rng(5)
    n_draws = 1 if units > 100 else 4
    drawn = [correlation(moments(rng.normal(size=(rows, units)))) for _ in range(n_draws)]
    medians = [np.median(factor.fit(r, **how).communality) for r in drawn]  # type: ignore[arg-type]
    assert_allclose(number_of_factors.noise_communality(units, rows, **how), np.mean(medians), atol=atol)


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
def test_prints_have_the_communality_of_noise_of_their_shape() -> None:
    w = np.random.default_rng(1).normal(size=(8, 20, 30))
    w[:, 4] = 0
    split_ = fedstat.split(w)
    noise = number_of_factors.noise_communality(
        19, 240, method="pa", max_iter=None, tol=None, init="pc", kappa=0.85
    )  # units that vary
    assert split_.fit.noise_communality == noise
    line = f"  White noise of this shape: median {noise:.2f}"
    assert f"{line}; test: fedstat.permutation_test" in repr(split_).splitlines()
    assert abs(np.nanmedian(split_.communality) - noise) < 0.05  # the weights are white noise
    assert line in repr(fedstat.fa(fedstat.layer_matrix(w))).splitlines()  # without clients
    assert f"{line}; test" not in repr(fedstat.fa(fedstat.layer_matrix(w)))
    r = np.corrcoef(np.random.default_rng(0).normal(size=(240, 19)), rowvar=False)
    assert line in repr(fedstat.fa(r, corr=True, n_obs=240)).splitlines()


UNKNOWN = {
    "no number of rows": lambda: fedstat.fa(np.eye(5) * 0.7 + 0.3, corr=True, n_factors=1),
    "more units than are simulated, of a fixed number of factors": lambda: fedstat.fa(
        np.random.default_rng(0).normal(size=(400, 130)), n_factors=2, method="pc"
    ),
    "one varying unit": lambda: fedstat.fa(np.random.default_rng(0).normal(size=(9, 2)) * [1, 0], n_factors=1),
    "agreement": lambda: fedstat.split(weights(), method="icc"),
}


@pytest.mark.filterwarnings("ignore:n_factors reaches the rank")
@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_prints_say_nothing_of_noise_whose_communality_is_unknown(make) -> None:  # type: ignore[no-untyped-def]
    assert "White noise" not in repr(make())


def test_initial_values_and_bounds_of_the_fit_are_those_of_its_noise() -> None:
    z = np.random.default_rng(0).normal(size=(60, 12))
    bound = fedstat.fa(z, kappa=0.75, heywood="bound", init="smc", max_iter=1000)
    expected = {"method": "pa", "max_iter": 1000, "tol": None, "kappa": 0.75, "init": "smc", "heywood": "bound"}
    assert bound.noise_communality == number_of_factors.noise_communality(12, 60, **expected)
    given = fedstat.fa(z, kappa=0.75, init=np.full(12, 0.5), max_iter=1000)
    expected = {"method": "pa", "max_iter": 1000, "tol": None, "kappa": 0.75}
    assert given.noise_communality == number_of_factors.noise_communality(12, 60, **expected)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({}, "Random data: 95% quantile of 100 draws of 200 independent rows"),
        ({"draws": 7, "quantile": 0.5}, "Random data: 50% quantile of 7 draws of 200 independent rows"),
        ({"draws": 1, "quantile": 0.999}, "Random data: 99.9% quantile of 1 draw of 200 independent rows"),
    ],
)
def test_n_factors_prints_the_draws_and_the_quantile(how: dict[str, float], line: str) -> None:
    result = fs.n_factors(weights(), **how)  # type: ignore[arg-type]
    assert repr(result).splitlines()[-1] == line
    row = result.glance().iloc[0]
    assert (row["draws"], row["quantile"]) == (how.get("draws", 100), how.get("quantile", 0.95))
