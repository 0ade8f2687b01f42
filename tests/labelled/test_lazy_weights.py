"""Weights in a store are read chunk by chunk, each once, and give the numbers of weights in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from zarr.storage import MemoryStore

import fedstat.labelled as fs
from fedstat.labelled import layer as layers
from fedstat.labelled.layer import read_layer
from fedstat.labelled.sums import client_sums, sums

CLIENTS = 23


class Counting(MemoryStore):
    """Store that counts how often each chunk is read."""

    reads: ClassVar[Counter[str]] = Counter()  # of the class: zarr opens a copy of the store

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/c/" in key:
            self.reads[key] += 1
        return await super().get(key, *args, **kwargs)


def stored(chunk: dict[str, int]) -> tuple[xr.DataArray, Counter[str]]:
    """Weights at two checkpoints, lazily opened, and the reads of their chunks to come."""
    w = np.random.default_rng(0).normal(size=(2, CLIENTS, 4, 6)).cumsum(axis=2)
    data = xr.DataArray(w, dims=("checkpoint", "client", "unit", "weight"), name="w")
    store = Counting()
    sizes = tuple(chunk.get(str(d), n) for d, n in data.sizes.items())
    data.to_dataset().to_zarr(store, encoding={"w": {"chunks": sizes}}, consolidated=False)
    store.reads.clear()
    lazy = xr.open_zarr(store, chunks=None, consolidated=False)["w"].isel(checkpoint=-1)
    return lazy, store.reads


@pytest.mark.parametrize("block", [1, 5 * 4 * 6 * 8, 2**26])
@pytest.mark.parametrize(
    "chunk", [{}, {"client": 1}, {"client": 5}, {"client": 7, "unit": 3}, {"client": 2, "checkpoint": 1, "weight": 4}]
)
def test_each_chunk_is_read_once(chunk: dict[str, int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_BLOCK", block)
    lazy, reads = stored(chunk)
    m, _, _, n, _ = sums(read_layer(lazy))
    assert n == CLIENTS
    assert reads
    assert set(reads.values()) == {1}
    reads.clear()
    each, *_ = client_sums(read_layer(lazy))
    assert set(reads.values()) == {1}
    loaded = lazy.load()
    np.testing.assert_array_equal(m.cross, sums(read_layer(loaded))[0].cross)
    np.testing.assert_array_equal(each.cross, client_sums(read_layer(loaded))[0].cross)
    np.testing.assert_array_equal(m.cross, sums(read_layer(loaded.values))[0].cross)


def test_no_more_is_in_memory_than_a_block_of_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = 4 * 6 * 8
    for chunk, block, expected in ((1, 5 * one, 5), (3, 5 * one, 3), (3, 7 * one, 6), (7, 5 * one, 7), (1, 1, 1)):
        monkeypatch.setattr(layers, "_BLOCK", block)
        lazy, _ = stored({"client": chunk})
        assert next(layers.row_slices(lazy, "client")) == slice(0, expected)


VERBS: dict[str, Callable[[Any], Any]] = {
    "split": lambda w: fs.split(w, n_factors=2),
    "bootstrap": lambda w: fs.bootstrap(w, n_factors=2, n_boot=2),
    "permutation_test": lambda w: fs.permutation_test(w, n_factors=2, n_permutations=2),
    "sensitivity": lambda w: fs.sensitivity(w, kappa=0.5, n_starts=1),
    "layer_matrix": lambda w: fs.fa(fs.layer_matrix(w), n_factors=2),
    "knn_entropy": fs.knn_entropy,
    "icc": fs.icc,
    "icc bootstrap": lambda w: fs.icc(w, n_boot=2),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_reads_each_chunk_once(verb: str) -> None:
    lazy, reads = stored({"client": 5})
    VERBS[verb](lazy)
    assert reads
    assert set(reads.values()) == {1}


@pytest.mark.parametrize("block", [1, 5 * 4 * 6 * 8])
def test_agreement_of_stored_weights_is_that_of_weights_in_memory(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_BLOCK", block)
    lazy, reads = stored({"client": 5})
    start = np.ones((4, 6))
    found = fs.icc(lazy, baseline=start)
    assert sorted(reads.values()) == [2, 2, 2, 3, 3], (
        "clients are compared with all of them, the first with the baseline"
    )
    assert not lazy.variable._in_memory
    pd.testing.assert_frame_equal(found.tidy(), fs.icc(lazy.values, baseline=start).tidy(), rtol=1e-7, atol=1e-8)
    by_f, reads = stored({"client": 5})
    fs.icc(by_f, baseline=start, inference="F")
    assert sorted(reads.values()) == [1, 1, 1, 2, 2]
