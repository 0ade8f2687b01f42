"""Random streams named by what they are for, so that no draw depends on which other draws are made."""

from __future__ import annotations

import json
from hashlib import sha256
from numbers import Integral

import numpy as np

from fedstat import _check


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """Stream of random numbers that belongs to one purpose, client and round.

    Equal arguments give equal streams on every machine, different arguments statistically independent ones: whatever is
    drawn for client 7 in round 3 is the same however the clients are chunked, ordered or sampled.

    Parameters
    ----------
    seed : int
        Seed of the whole run, >= 0.
    *key : int or str
        Name of the stream, by custom the purpose first: ``generator(seed, "batches", client, round)``.

    Returns
    -------
    numpy.random.Generator
        A Philox counter-based generator. Its SeedSequence is a hash of seed and key that keeps apart what
        SeedSequence itself would not: ``(1,)`` and ``(1, 0)``, ``(2**32 + 1,)`` and ``(1, 1)``, ``3`` and ``"3"``.

    Raises
    ------
    ValueError
        If ``seed`` is not an integer >= 0 or a part of the key is neither integer nor string.

    Examples
    --------
    >>> generator(0, "batches", 7, 3).permutation(5)
    array([0, 2, 1, 3, 4])
    >>> generator(0, "batches", 7, 5).permutation(5)
    array([4, 3, 1, 0, 2])
    """
    words = [_check.integer("seed", seed, low=0), *map(_word, key)]
    digest = sha256(json.dumps(words).encode()).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(int.from_bytes(digest, "little"))))


def _word(part: int | str) -> int | str:
    if isinstance(part, str):
        return str(part)
    if isinstance(part, Integral) and not isinstance(part, bool):
        return int(part)
    raise ValueError(f"a stream is named by integers and strings, but got {part!r}")
