"""An argument that can change nothing is refused and named, not ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import R8, weights

import fedstat.labelled as fs
from fedstat.results import ConvergenceWarning
from fedstat.stats import factor, resampling
from fedstat.stats.moments import moments

OF_ITERATION: list[dict[str, Any]] = [
    {"max_iter": 7}, {"max_iter": 0}, {"tol": 1e-9}, {"tol": 0}, {"n_starts": 3}, {"init": "smc"},
    {"init": np.full(8, 0.5)}, {"heywood": "bound"}, {"heywood": "error"},
]  # fmt: skip
VERBS = {
    "fa": lambda **k: fs.fa(R8, corr=True, **k),
    "split": lambda **k: fs.split(weights(), **k),
    "bootstrap": lambda **k: fs.bootstrap(weights(), n_boot=2, **k),
    "permutation_test": lambda **k: fs.permutation_test(weights(), n_permutations=2, **k),
}


@pytest.mark.parametrize("given", OF_ITERATION, ids=str)
@pytest.mark.parametrize("method", ["pc", "leverage"])
@pytest.mark.parametrize("verb", ["fa", "split"])
def test_estimators_without_steps_refuse_arguments_of_the_iteration(verb: str, method: str, given: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} has no effect with method={method!r}"):
        VERBS[verb](method=method, **given)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_them_and_takes_their_defaults(verb: str) -> None:
    with pytest.raises(ValueError, match="max_iter has no effect with method='pc'"):
        VERBS[verb](method="pc", n_factors=2, max_iter=9)
    with pytest.raises(ValueError, match=r"kappa has no effect with a given n_factors, but got kappa=0\.7 and"):
        VERBS[verb](method="pc", n_factors=2, kappa=0.7)
    VERBS[verb](method="pc", n_factors=2, kappa=0.85, init="pc", max_iter=None, tol=None, heywood="allow")


def test_the_result_of_an_estimator_without_steps_can_be_updated() -> None:
    before = fs.fa(R8, corr=True, n_factors=2, method="pc").split(tau=0.5)
    np.testing.assert_allclose(fs.update(before, weights()).communality, before.communality, atol=1e-12)


@pytest.mark.parametrize("method", factor.METHODS)
def test_no_steps_are_not_the_default_number_of_steps(method: factor.Method) -> None:
    with pytest.raises(ValueError, match="max_iter must be an integer >= 1, but got 0"):
        factor.fit(R8, method=method, max_iter=0)
    each = moments(weights().swapaxes(1, 2))
    with pytest.raises(ValueError, match="chunk must be an integer >= 1, but got 0"):
        resampling.bootstrap(each, replicates=2, chunk=0, method=method)


def test_rows_are_counted_not_told() -> None:
    for verb in (fs.fa, fs.n_factors):
        with pytest.raises(ValueError, match="n_obs has no effect on raw rows, which are counted, but got 5"):
            verb(fs.layer_matrix(weights()), n_obs=5)


def test_other_verbs_refuse_what_they_would_ignore() -> None:
    with pytest.raises(ValueError, match="n_starts has no effect with method='pc'"):
        fs.sensitivity(weights(), method="pc", n_starts=3)
    with pytest.raises(ValueError, match="resolution has no effect with ties='atoms'"):
        fs.knn_entropy(weights()[:, 0], ties="atoms", resolution=0.1)


def test_the_warning_names_a_verb_that_takes_the_same_weights() -> None:
    with pytest.warns(ConvergenceWarning, match=r"check with fedstat\.sensitivity"):
        fs.split(weights(), n_factors=3, max_iter=3, tol=1e-12)
