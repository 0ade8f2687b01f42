"""Weights that Dask holds are summed chunk by chunk, and give the numbers of weights in memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import fedstat.labelled as fs
from fedstat.labelled import layer as layers

dask = pytest.importorskip("dask", reason="Dask is not installed: pip install -c constraints.txt -e '.[sweep]'")
da = pytest.importorskip("dask.array")

SHAPE = (24, 4, 50)
WEIGHTS = np.random.default_rng(0).normal(size=SHAPE).cumsum(axis=1)
ONE = WEIGHTS[0].nbytes


class Chunks:
    """Weights as a Dask array that counts how often each chunk is computed, and how many exist at once."""

    def __init__(self, *chunks: int | tuple[int, ...]) -> None:
        self.computed: Counter[tuple[int, ...]] = Counter()
        self.alive = self.most = 0
        cut = da.core.normalize_chunks(chunks, SHAPE)
        starts = [np.cumsum([0, *sizes]) for sizes in cut]

        def chunk(block_info: Any = None) -> np.ndarray:
            at = block_info[None]["chunk-location"]
            made = WEIGHTS[tuple(slice(s[i], s[i + 1]) for s, i in zip(starts, at, strict=True))].copy()
            self.computed[at] += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(made, self._ended)
            return made

        lazy = da.map_blocks(chunk, chunks=cut, dtype=float, meta=np.empty((0, 0, 0)))
        self.computed.clear()
        self.array = xr.DataArray(lazy, dims=("client", "unit", "weight"))

    def _ended(self) -> None:
        self.alive -= 1


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As many chunks as one thread computes."""
    with dask.config.set(scheduler="synchronous"):
        yield


VERBS: dict[str, Callable[[Any], Any]] = {
    "split": lambda w: fs.split(w, n_factors=2).tidy(),
    "split by agreement": lambda w: fs.split(w, method="icc").tidy(),
    "bootstrap": lambda w: fs.bootstrap(w, n_factors=2, n_boot=3).tidy(),
    "permutation_test": lambda w: fs.permutation_test(w, n_factors=2, n_permutations=3).tidy(),
    "fa": lambda w: fs.fa(fs.layer_matrix(w), n_factors=2).tidy(),
    "icc": lambda w: fs.icc(w).tidy(),
}


@pytest.mark.filterwarnings("ignore:clients agree less")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("chunks", [(2, -1, -1), ((5, 1, 3, 3, 2, 5, 5), -1, -1), (2, 2, 25)], ids=str)
def test_weights_that_dask_holds_are_summed_chunk_by_chunk(
    chunks: tuple[Any, ...], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_BLOCK", 5 * ONE)
    held = Chunks(*chunks)
    found = VERBS[verb](held.array)
    assert len(held.computed) == np.prod([len(sizes) for sizes in held.array.chunks])
    beside = held.array.data.numblocks[1] * held.array.data.numblocks[2]
    # Dask's own reshaping to a matrix cuts clients apart where their weights are in several chunks.
    # Clients are compared with all of them, so that agreement needs a second look.
    twice = (verb == "fa" and beside > 1) or verb in ("split by agreement", "icc")
    assert max(held.computed.values()) == (2 if twice else 1)
    assert held.most <= 3 * beside, "no more than a block of five clients, and what it is being put together from"
    assert held.array.chunks is not None
    assert type(held.array.data) is da.Array, "not loaded"
    in_memory = xr.DataArray(WEIGHTS, dims=held.array.dims)
    pd.testing.assert_frame_equal(found, VERBS[verb](in_memory), rtol=1e-7, atol=1e-8)


def test_chunks_of_all_clients_side_by_side_are_computed_anew_for_some_clients_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "_BLOCK", 5 * ONE)
    monkeypatch.setattr(layers, "_ROW", 10 * ONE)
    held = Chunks(-1, -1, 10)
    read = [len(block) for _, block in layers.read_layer(held.array).blocks()]
    assert read == [10, 10, 4]
    assert held.most < 5, "of five chunks that hold all clients"
    assert set(held.computed.values()) == {3}
    assert [len(block) for _, block in layers.read_layer(Chunks(-1, -1, -1).array).blocks()] == [24]


def test_a_diverged_client_of_weights_that_dask_holds_is_named() -> None:
    broken = WEIGHTS.copy()
    broken[7, 2, 3] = np.inf
    held = xr.DataArray(da.from_array(broken, chunks=(2, -1, -1)), dims=("client", "unit", "weight"))
    with pytest.raises(ValueError, match=r"weights of client 7 hold NaN or infinite values, first in unit\(s\) 2"):
        fs.split(held)
    with pytest.raises(ValueError, match=r"first in unit\(s\) 2"):
        fs.fa(fs.layer_matrix(held))
