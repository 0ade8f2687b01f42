"""Every p value and interval of fedstat has a row in the table of simulations, and the table says how it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_results import MADE, made
from real_data import require_real_data

from fedstat.results.split import WRONG_SIDE, WRONG_WITHIN_GROUPS
from simulations.inference import __main__ as command
from simulations.inference import clusters, factor, nested, pools, shares, table
from simulations.inference.claims import CLAIMS
from simulations.inference.digests import digest

ROOT = Path(__file__).parents[2]
RESULTS = table.read(command.RESULTS)
# Tail probabilities, quantiles and tests: who calls one of these makes a p value or an interval.
CALLS = {
    "sf", "isf", "cdf", "ppf", "stdtr", "stdtrit", "fdtr", "fdtrc", "fdtri", "chdtr", "chdtrc", "chndtr", "ndtr",
    "ndtri", "percentile", "nanpercentile", "quantile", "nanquantile", "multipletests", "tconfint_mean", "ttest_mean",
    "conf_int", "proportion_confint", "permutation_test",
}  # fmt: skip
# What they are called for otherwise.
SPREAD = "describes the spread of clients, units or replicates; no claim about a population"
OTHERWISE = {
    "fedstat.decompose.__main__.decompose": "calls the verb fedstat.permutation_test",
    "analysis.fedfac.checks.certainty": "calls the verb fedstat.permutation_test",
    "notebooks.decomposition": "calls the verb fedstat.permutation_test",
    "fedstat.stats.number_of_factors.parallel_analysis": "quantile of noise: a rule, no p value",
    "fedstat.plot.fedfac._vmax": "limit of an axis",
} | dict.fromkeys(
    (
        "fedstat.data.targets.strata", "fedstat.plot.client_plots.client_lines",
        "fedstat.reporting.training._client_table",
        "fedstat.results.tables.median_and_ends", "fedstat.results.uncertainty.BootstrapResult.glance",
        "fedstat.study.leaderboard._measure_run", "fedstat.study.report._steps", "fedstat.study.run_table.row",
        "notebooks.four_decompositions",
    ),
    SPREAD,
)  # fmt: skip
# Columns whose names look like a p value's or an interval's.
PLAIN_COLUMNS = {
    "BootstrapResult.ari_low", "BootstrapResult.n_factors_low", "BootstrapResult.n_factors_high",
    "ConvergenceResult.lambda_p", "JackknifeResult.n_factors_low", "JackknifeResult.n_factors_high",
}  # fmt: skip


def producers(path: Path) -> Iterator[str]:
    """Functions of a file that call one of ``CALLS``, by their dotted names."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
            if isinstance(child, ast.Call):
                called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if called in CALLS:
                    yield inner
            yield from visit(child, inner)

    return visit(ast.parse(path.read_text(encoding="utf-8")), module)


def test_whoever_makes_a_p_value_or_an_interval_is_a_source_of_a_claim() -> None:
    folders = [ROOT / name for name in ("fedstat", "analysis", "paper_figs", "notebooks")]
    found = {name for folder in folders for path in folder.rglob("*.py") for name in producers(path)}
    sources = {source for claim in CLAIMS.values() for source in claim.sources}
    assert found - sources - set(OTHERWISE) == set(), "give them a claim in simulations/inference"
    assert set(OTHERWISE) - found == set(), "these are gone"


@pytest.mark.parametrize("name", MADE)
def test_columns_of_results_that_look_like_inference_belong_to_a_claim(name: str) -> None:
    result = made(name)
    tables = [result.tidy(), result.glance(), getattr(result, "layer", None)]
    columns = {f"{name}.{c}" for t in tables if isinstance(t, pd.DataFrame) for c in map(str, t.columns)}
    like = {c for c in columns if re.search(r"[._]p(_|$)|_low$|_high$|conf_", c)}
    claimed = {column for claim in CLAIMS.values() for column in claim.columns}
    assert like - claimed - PLAIN_COLUMNS == set()


def test_the_table_has_a_row_for_every_part_of_every_case_and_no_other() -> None:
    expected = [(claim, case, p) for claim, case in table.cases(CLAIMS) for p in CLAIMS[claim].cases[case].parts]
    assert sorted(RESULTS[list(table.KEYS)].itertuples(index=False, name=None)) == sorted(expected)
    assert (RESULTS["mc_error"][RESULTS["claimed"] > 100].astype(float) < 0.036).all(), "of 200 draws at least"
    assert all(file.stat().st_size < 10**6 for file in command.RESULTS.iterdir())


def test_rows_were_made_by_the_code_of_today_at_clean_revisions() -> None:
    """Run ``python -m simulations.inference --stale --data-dir FOLDER`` after a commit."""
    every = set(table.cases(CLAIMS))
    assert sorted(every - table.current(RESULTS, CLAIMS)) == []


def test_what_errs_says_where_users_are_told() -> None:
    errs = RESULTS[RESULTS["conclusion"] == "errs"]
    assert len(errs), "the table would be no use if nothing ever failed"
    silent = errs[errs["note"] == ""]
    assert silent[list(table.KEYS)].to_numpy().tolist() == []


def test_cautions_are_given_where_intervals_of_6_clients_and_more_cover_less_than_85_percent() -> None:
    rows = RESULTS[RESULTS["part"].isin(["", "layer"]) & (RESULTS["conclusion"] != "refused")]
    names = ("icc, cautions where they are not", "icc, intervals where they are not, with or without a caution")
    caution, coverage = (rows[rows["claim"] == name].set_index("case")["observed"].astype(float) for name in names)
    short = [case for case in coverage[coverage < 0.85].index if not re.search(r" [345] clients", case)]
    assert len(short) > 15
    assert caution[short].min() >= 0.8
    sound = rows[rows["claim"] == "icc, cautions where clients are independent and alike"]["observed"].astype(float)
    assert sound.max() <= 0.05


def test_the_print_of_a_split_by_test_has_the_largest_rates_of_the_table() -> None:
    claims = (
        'split(tau="test"), units called the other, of those called',
        'split(tau="test"), layers with some unit called the other',
    )
    rows = RESULTS[RESULTS["layers"] == "trained"]
    largest = [rows.loc[rows["claim"] == claim, "observed"].astype(float).max() for claim in claims]
    np.testing.assert_allclose(WRONG_SIDE, largest, atol=0.0051)


def test_the_print_of_a_split_within_groups_has_upper_bounds_of_the_rates_of_the_table() -> None:
    claims = ("units called the other, of those called", "layers with some unit called the other; units decided")
    for claim, bound in zip(claims, WRONG_WITHIN_GROUPS, strict=True):
        is_of_claim = (RESULTS["claim"] == f'split(tau="test", groups=), {claim}') & (
            RESULTS["part"] != "units decided"
        )
        rates = RESULTS.loc[is_of_claim & (RESULTS["layers"] == "trained"), "observed"].astype(float)
        assert 0 < rates.max() <= bound


TRAINED = {claim: [name for name, case in CLAIMS[claim].cases.items() if case.trained] for claim in CLAIMS}


@pytest.fixture(scope="module")
def mnist() -> Iterator[None]:
    """Pools of fewer clients: no case that is tried here draws more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSTAT_DATA", str(require_real_data()))
        patch.setattr(pools, "CLIENTS", 120)
        patch.setattr(pools, "REPLICATED", 20)
        yield
    for pool in (pools._trained, pools.accuracies, shares._of_pool, nested._of_pool):
        pool.cache_clear()


@pytest.mark.usefixtures("mnist")
@pytest.mark.parametrize("claim", [claim for claim, names in TRAINED.items() if names])
def test_a_claim_can_be_tried_on_trained_networks(claim: str) -> None:
    case = CLAIMS[claim].cases[TRAINED[claim][0]]
    for one in table.tried(case, (claim, TRAINED[claim][0]), replicates=1, seed=0):
        assert 0 <= one.observed <= 1 or one.replicates == 0


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if len(TRAINED[claim]) < len(CLAIMS[claim].cases)])
def test_a_claim_can_be_tried(claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick form: the first case, one replicate; drawn again it is the same."""
    monkeypatch.setattr(clusters, "DRAWS", 20)
    monkeypatch.setattr(factor, "CLIENTS", 200)
    name, case = next((name, case) for name, case in CLAIMS[claim].cases.items() if not case.trained)
    found = table.tried(case, (claim, name), replicates=1, seed=0)
    assert len(found) == len(case.parts)
    assert all(0 <= one.observed <= 1 or one.replicates == 0 for one in found)
    np.testing.assert_equal(table.tried(case, (claim, name), replicates=1, seed=0), found)


def test_outcomes_count_what_was_claimed() -> None:
    coin = table.Case(lambda rng: np.where(rng.random(50) < 0.5, np.nan, rng.random(50) < 0.3))
    (one,) = table.tried(coin, ("a", "b"), replicates=400, seed=1)
    assert abs(one.observed - 0.3) < 4 * one.error
    assert 0.6 < one.error / np.sqrt(0.3 * 0.7 / 25 / 400) < 1.4
    (never,) = table.tried(table.Case(lambda _: np.nan), ("a", "c"), replicates=5, seed=1)
    level = table.Claim("level", (), (), {})
    assert table.conclude(level, never, 5) == "refused"
    assert table.conclude(level, one, 400) == "errs"
    assert table.conclude(level._replace(kind="coverage", confidence=0.3), one, 400) == "holds"
    (all_,) = table.tried(table.Case(lambda _: [np.ones(3)], parts=("x",)), ("a", "d"), replicates=100, seed=1)
    assert all_.error > 0, "100 of 100 do not make a certainty"


def module(folder: Path, text: str) -> Path:
    (folder / "one.py").write_text(text)
    return folder


FUNCTION = '''
def value(x: int, by: float = 0.5) -> float:
    """Return it."""
    if x < 0:
        raise ValueError(f"x is {x}")
    return np.sum(x, axis=0) * by
'''


def test_digests_stay_under_renaming_and_documentation(tmp_path: Path) -> None:
    first = digest(["one.value"], module(tmp_path, FUNCTION))
    renamed = (
        FUNCTION.replace("value", "amount").replace("x", "weights").replace("Return it", "Say it").replace("by", "f")
    )
    assert digest(["one.amount"], module(tmp_path, renamed.replace("aweightsis", "axis"))) == first
    (tmp_path / "two.py").write_text("class Room:\n" + FUNCTION.replace("\n", "\n    "))
    assert digest(["two.Room.value"], tmp_path) == first


@pytest.mark.parametrize(
    ("old", "new"), [("0.5", "0.6"), ("axis=0", "axis=1"), ("np.sum", "np.max"), ("< 0", "<= 0"), ("* by", "/ by")]
)
def test_digests_change_with_what_is_computed(tmp_path: Path, old: str, new: str) -> None:
    first = digest(["one.value"], module(tmp_path, FUNCTION))
    assert digest(["one.value"], module(tmp_path, FUNCTION.replace(old, new))) != first


def test_a_claim_has_sources_that_exist() -> None:
    for name, claim in CLAIMS.items():
        assert claim.sources, name
        assert len(digest(claim.sources)) == 12
    with pytest.raises(LookupError, match=r"there is no function fedstat\.stats\.icc\.nothing"):
        digest(["fedstat.stats.icc.nothing"])


def test_a_table_is_added_to_and_keeps_the_order_of_the_claims() -> None:
    claims = {n: table.Claim("level", (), (), {c: table.Case(lambda _: 0.0) for c in "xy"}) for n in "ab"}
    names = table.cases(claims)
    found = table.empty()
    for name in (names[3], names[0], names[2], names[3]):
        (rows,) = table.rows(claims, [name], replicates=2)
        found = table.with_rows(found, rows, claims)
    assert found[["claim", "case"]].to_numpy().tolist() == [["a", "x"], ["b", "x"], ["b", "y"]]
