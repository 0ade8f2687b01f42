"""Replicates computed by executors: the same numbers to the bit, whatever the executor and its number of workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from equality import require_equal
from joblib.externals import loky
from threadpoolctl import threadpool_info, threadpool_limits

import fedstat
from fedstat._utils import loops
from fedstat._utils.loops import in_order, one_blas_thread
from fedstat.labelled.layer import read_layer
from fedstat.labelled.sums import client_sums

RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(1, 6, 15)) + RNG.normal(size=(7, 6, 15))
X, Y = RNG.normal(size=(3, 6, 4)), np.sign(RNG.normal(size=(3, 6)))
TRAINING: dict[str, Any] = {"normalize": True, "rounds": 4, "local_steps": 2, "replicates": 2}

VERBS: dict[str, Callable[[Executor | None], Any]] = {
    "bootstrap": lambda e: fedstat.bootstrap(WEIGHTS, n_factors=2, n_boot=7, executor=e),
    "bootstrap of tensors": lambda e: fedstat.bootstrap(torch.from_numpy(WEIGHTS), n_boot=4, executor=e),
    "jackknife": lambda e: fedstat.jackknife(WEIGHTS, n_factors=2, executor=e),
    "permutation test": lambda e: fedstat.permutation_test(WEIGHTS, n_factors=2, n_permutations=7, executor=e),
    "theorem 1": lambda e: fedstat.ntk.convergence(
        X, Y, widths=[8, 16], methods=["fedsplit", "dynamic"], executor=e, **TRAINING
    ),
    "theorem 2": lambda e: fedstat.ntk.generalization(
        X, Y, split=["train"] * 4 + ["test"] * 2, samples=[2, 3], width=16, executor=e, **TRAINING
    ),
}


@contextmanager
def dask() -> Iterator[Executor]:
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install -e '.[sweep]'")
    with distributed.Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=":0") as client:
        yield client.get_executor()


EXECUTORS: dict[str, Callable[[], Any]] = {
    "a thread": lambda: ThreadPoolExecutor(1),
    "threads": lambda: ThreadPoolExecutor(3),
    "processes": lambda: ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")),
    "loky": lambda: loky.ProcessPoolExecutor(1),
    "dask": dask,
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Results without an executor."""
    return {name: verb(None) for name, verb in VERBS.items()}


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore:clients agree less", "ignore:.*long")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k == "loky" else ()) for k in EXECUTORS])
def test_replicates_are_the_same_to_the_bit_whatever_the_executor(kind: str, plain: dict[str, Any]) -> None:
    with EXECUTORS[kind]() as executor:
        for name, verb in VERBS.items():
            require_equal(plain[name], verb(executor))


def test_replicates_do_not_depend_on_the_callers_blas_threads() -> None:
    wide = RNG.normal(size=(3, 320, 330))  # wide enough that eigenvectors differ with the threads

    def found(threads: int, executor: Executor | None) -> np.ndarray:
        with threadpool_limits(threads, user_api="blas"):
            return fedstat.stats.resampling.bootstrap(moments, method="pc", replicates=2, executor=executor).communality

    moments = client_sums(read_layer(wide))[0]
    with ThreadPoolExecutor(2) as executor:
        alone = found(1, None)
        for threads in (1, 2):
            np.testing.assert_array_equal(found(threads, executor), alone)
            np.testing.assert_array_equal(found(threads, None), alone)


def blas_threads() -> list[int]:
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


def test_blas_gets_its_threads_back_from_the_last_that_wanted_one() -> None:
    before = blas_threads()
    with ThreadPoolExecutor(4) as pool, one_blas_thread():
        assert list(in_order(pool, lambda _: blas_threads(), range(20))) == [[1] * len(before)] * 20
        assert set(blas_threads()) == {1}
    assert blas_threads() == before


def test_no_more_than_a_bounded_number_of_replicates_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_AHEAD", 5)
    begun, ended, most = 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal begun, most
        for i in range(40):
            begun += 1
            most = max(most, begun - ended)
            yield i

    with ThreadPoolExecutor(2) as pool:
        for i, found in enumerate(in_order(pool, abs, items())):
            assert i == found
            ended += 1
    assert most <= 5


def test_what_has_not_begun_is_cancelled_where_a_replicate_fails() -> None:
    class Never(Executor):
        futures: list[Future[Any]]

        def __init__(self) -> None:
            self.futures = []

        def submit(self, *_: Any, **__: Any) -> Future[Any]:  # type: ignore[override]
            self.futures.append(Future())
            if len(self.futures) == 1:
                self.futures[0].set_exception(ValueError("first"))
            return self.futures[-1]

    never = Never()
    with pytest.raises(ValueError, match="first"):
        list(in_order(never, abs, range(3)))
    assert [future.cancelled() for future in never.futures] == [False, True, True]
