"""From communalities to shared units: thresholds, recovery, stability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedstat.stats import split

NU = np.array([0.9, 0.1, 0.5, 0.7, 0.3])


@pytest.mark.parametrize(("tau", "n"), [(0.2, 4), (0.4, 3), (0.5, 2), (0.6, 2), (0.8, 1), (0.95, 0), (0.05, 5)])
def test_a_quantile_shares_that_share_of_distinct_communalities(tau: float, n: int) -> None:
    shared = split.shared(NU, tau=tau)
    assert shared.sum() == n
    assert set(NU[shared]) == set(np.sort(NU)[len(NU) - n :])


@pytest.mark.parametrize("d", [4, 100, 200])
@pytest.mark.parametrize("tau", [0.25, 0.5, 0.75, 0.9, 0.95])
def test_the_quantile_counts_as_numpy_does_on_large_layers(d: int, tau: float) -> None:
    nu = np.random.default_rng(d).uniform(size=d)
    assert split.shared(nu, tau=tau).sum() == round((1 - tau) * d)


def test_units_that_tie_with_the_threshold_are_all_shared() -> None:
    assert split.shared(np.array([0.5, 0.5, 0.5, 0.1]), tau=0.5).tolist() == [True, True, True, False]


def test_ties_are_ties_up_to_rounding() -> None:
    nu = 1 + np.array([3e-16, -4e-16, 0, 2e-15, -1e-15, 0])
    assert split.shared(nu, tau=0.5).all()
    assert split.shared(nu, tau=split.Absolute(1.0)).all()
    assert split.shared(np.array([0.5, 0.5 + 1e-9]), tau=0.5).tolist() == [False, True]


def test_limits_make_the_whole_layer_personal_or_shared_dead_units_included() -> None:
    nu = np.array([0.9, np.nan, 2.5])
    assert not split.shared(nu, tau=float("inf")).any()
    assert split.shared(nu, tau=float("-inf")).all()


@pytest.mark.parametrize("tau", [0.01, 0.5, 0.99, split.Absolute(-5.0), split.Absolute(0.0)])
def test_dead_units_are_never_shared_at_a_finite_threshold(tau: split.Tau) -> None:
    assert not split.shared(np.array([0.2, np.nan, 0.4, 0.6]), tau=tau)[1]


def test_dead_units_do_not_count_in_the_quantile() -> None:
    nu = np.array([np.nan, np.nan, 0.1, 0.2, 0.3, 0.4])
    assert split.shared(nu, tau=0.5).tolist() == [False, False, False, False, True, True]
    assert float(split.threshold(nu, 0.5)) == 0.3


def test_an_absolute_threshold_is_the_communality_itself_and_reaching_it_is_enough() -> None:
    assert split.shared(NU, tau=split.Absolute(0.5)).tolist() == [True, False, True, True, False]
    assert float(split.threshold(NU, split.Absolute(1.3))) == 1.3


@pytest.mark.parametrize("tau", [0, 1, 0.0, 1.0, -0.5, 50, float("nan"), None, "0.5"])
def test_a_tau_out_of_range_is_an_error_that_says_how_to_write_a_value(tau: object) -> None:
    with pytest.raises(ValueError, match=r"tau must be .*, but got .* write Absolute\(x\)"):
        split.shared(NU, tau=tau)  # type: ignore[arg-type]


def test_an_absolute_threshold_must_be_finite() -> None:
    with pytest.raises(ValueError, match="Absolute"):
        split.Absolute(float("inf"))


def test_batches_and_torch_split_as_single_rows_do() -> None:
    nu = np.random.default_rng(0).uniform(size=(3, 2, 7))
    nu[0, 1, 3] = np.nan
    for tau in (0.3, 0.5, split.Absolute(0.4), float("inf"), float("-inf")):
        batch = split.shared(nu, tau=tau)
        np.testing.assert_array_equal(split.shared(torch.asarray(nu), tau=tau).numpy(), batch)
        for i in np.ndindex(3, 2):
            np.testing.assert_array_equal(split.shared(nu[i], tau=tau), batch[i])


def test_auc_equals_scikit_learn_ties_included() -> None:
    rng = np.random.default_rng(0)
    nu = rng.integers(0, 8, size=(5, 40)) / 8
    truth = rng.uniform(size=40) < 0.4
    np.testing.assert_allclose(split.auc(nu, truth), [roc_auc_score(truth, row) for row in nu], atol=1e-12)
    np.testing.assert_allclose(split.auc(torch.asarray(nu), torch.asarray(truth)).numpy(), split.auc(nu, truth))


def test_auc_of_perfect_inverted_and_constant_communalities() -> None:
    truth = np.array([True, False, True, True, False])
    assert split.auc(NU, truth) == 1
    assert split.auc(-NU, truth) == 0
    assert split.auc(np.ones(5), truth) == 0.5


def test_a_dead_unit_ranks_last_in_the_auc() -> None:
    assert split.auc(np.array([0.1, np.nan]), np.array([True, False])) == 1
    assert split.auc(np.array([0.1, np.nan]), np.array([False, True])) == 0


@pytest.mark.parametrize("truth", [[True] * 5, [False] * 5])
def test_auc_needs_both_kinds_of_units(truth: list[bool]) -> None:
    with pytest.raises(ValueError, match="shared and personal units"):
        split.auc(NU, np.array(truth))


def test_same_state_counts_equal_labels() -> None:
    a = np.array([[True, False, True, True], [False] * 4])
    assert split.prop_unchanged(a, np.array([True, True, True, False])).tolist() == [0.5, 0.25]
