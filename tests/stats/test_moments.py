"""Layers of thousands of units: BLAS on one thread, memory asked for beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import weights
from threadpoolctl import threadpool_info, threadpool_limits

import fedstat.labelled as fs
from fedstat._utils import memory
from fedstat.stats import moments as _moments
from fedstat.stats.moments import moments


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_symmetric_products_of_wide_layers_run_on_one_thread() -> None:
    """With several, OpenBLAS ends the process: z.T @ z of 15,500 units and 1,000 rows."""
    with threadpool_limits(2, user_api="blas"):
        with _moments.safe_blas(_moments._WIDE):
            assert blas_threads() == {2}
        with _moments.safe_blas(_moments._WIDE + 1):
            assert blas_threads() == {1}
        assert blas_threads() == {2}


def test_moments_and_correlations_take_that_care(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Rows(np.ndarray):
        def __matmul__(self, other: Any) -> Any:
            seen.extend(blas_threads())
            return np.asarray(self) @ np.asarray(other)

    monkeypatch.setattr(_moments, "_WIDE", 7)
    with threadpool_limits(2, user_api="blas"):
        moments(np.random.default_rng(0).normal(size=(9, 8)).view(Rows))
        assert set(seen) == {1}
        real, found = np.linalg.cholesky, []
        monkeypatch.setattr(np.linalg, "cholesky", lambda a: (found.extend(blas_threads()), real(a))[1])
        fs.fa(np.corrcoef(fs.layer_matrix(weights()), rowvar=False), corr=True, n_factors=2, n_obs=180).glance()
        assert set(found) == {1}


@pytest.mark.parametrize(
    ("call", "gib"),
    [
        (lambda w: fs.split(w, n_factors=2, method="pc"), "11.2"),
        (lambda w: fs.split(w), "17.9"),
        (lambda w: fs.fa(fs.layer_matrix(w), n_factors=2, method="minres"), "17.9"),
        (lambda w: fs.bootstrap(w, n_factors=2), "15.6"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_before_anything_is_done(
    call: Any, gib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = np.broadcast_to(np.float32(0), (2, 17_320, 1))
    monkeypatch.setattr(memory, "available", lambda: 2.0**30)
    with pytest.raises(ValueError, match=rf"17320 units.* need about {gib} GiB of memory, but 1\.0 GiB are available"):
        call(w)


def test_available_memory_is_some_and_small_layers_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.available() > 2**20
    monkeypatch.setattr(memory, "available", lambda: 0.0)
    assert fs.split(weights(), n_factors=2).shared.any()
