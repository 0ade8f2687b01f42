"""Random streams named by their purpose, so that no draw depends on other draws."""

from __future__ import annotations

import json
from hashlib import sha256
from numbers import Integral

import numpy as np

from fedstat._utils import check


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """Return the stream of random numbers for one purpose, such as the batches of a client in a round.

    Equal arguments give equal streams on every machine; different arguments give statistically independent streams.
    The numbers drawn for client 7 in round 3 do not depend on how clients are chunked, ordered or sampled.

    Parameters
    ----------
    seed : int
        Seed of the run, >= 0.
    *key : int or str
        Name of the stream, by convention the purpose first: ``generator(seed, "batches", client, round)``.

    Returns
    -------
    numpy.random.Generator
        A Philox counter-based generator. Its SeedSequence is a hash of seed and key, which distinguishes keys that
        SeedSequence does not: ``(1,)`` and ``(1, 0)``, ``(2**32 + 1,)`` and ``(1, 1)``, ``3`` and ``"3"``.

    Raises
    ------
    ValueError
        If ``seed`` is not an integer >= 0, or a part of the key is neither an integer nor a string.

    Examples
    --------
    >>> generator(0, "batches", 7, 3).permutation(5)
    array([0, 2, 1, 3, 4])
    >>> generator(0, "batches", 7, 5).permutation(5)
    array([4, 3, 1, 0, 2])
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(_digest(seed, key))))


def seed_of(seed: int, *key: int | str) -> int:
    """Return the seed for one purpose that needs several streams, such as a replicate of a study.

    Consecutive seeds would not be independent: replicates 1 to 4 of seed 0 would equal replicates 0 to 3 of seed 1.

    Parameters
    ----------
    seed, *key
        As in :func:`generator`.

    Returns
    -------
    int
        Below 2⁵³, so that every file format stores it exactly.

    Examples
    --------
    >>> seed_of(0, "replicate", 1), seed_of(1, "replicate", 0)
    (3016279794025721, 2764293435453111)
    """
    return _digest(seed, key) % 2**53


def _digest(seed: int, key: tuple[int | str, ...]) -> int:
    words = [check.integer("seed", seed, low=0), *map(_word, key)]
    return int.from_bytes(sha256(json.dumps(words).encode()).digest(), "little")


def _word(part: int | str) -> int | str:
    if isinstance(part, str):
        return str(part)
    if isinstance(part, Integral) and not isinstance(part, bool):
        return int(part)
    raise ValueError(f"a stream is named by integers and strings, but got {part!r}")
