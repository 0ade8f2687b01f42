"""Random streams: named, reproducible, kept apart."""

import json
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from scipy import stats

from fedstat._utils.streams import generator


def first(*args):
    return generator(*args).integers(2**63)


def test_equal_names_give_equal_streams_in_another_process():
    code = "from fedstat._utils.streams import generator; print(generator(5, 'x', 3, 'train').integers(2**63))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == first(5, "x", 3, "train")


def test_stream_is_numpys_philox_on_a_hash_of_the_name():
    entropy = int.from_bytes(sha256(json.dumps([5, "x", 3]).encode()).digest(), "little")
    expected = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).normal(size=4)
    np.testing.assert_array_equal(generator(5, "x", 3).normal(size=4), expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0,), (1,)),
        ((1,), (1, 0)),
        ((1, 0), (1, 0, 0)),
        ((2**32 + 1,), (1, 1)),
        ((0, 3), (0, "3")),
        ((0, "ab", "c"), (0, "a", "bc")),
        ((0, 1, 2), (0, 2, 1)),
        ((0, -1), (0, 1)),
        ((0, "é"), (0, "e")),
    ],
)
def test_different_names_give_different_streams(one, other):
    assert first(*one) != first(*other)


def test_numpy_integers_name_the_same_stream_as_python_ones():
    assert first(np.int64(3), "x", np.int32(2)) == first(3, "x", 2)


def test_first_draws_over_clients_and_rounds_look_independent():
    draws = np.array([[generator(0, "x", c, t).normal() for t in range(60)] for c in range(60)])
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-3
    for lagged in (draws[1:] * draws[:-1], draws[:, 1:] * draws[:, :-1]):
        assert abs(lagged.mean()) < 4 / np.sqrt(lagged.size)


@pytest.mark.parametrize("args", [(-1,), (1.5, "x"), (True,), (0, 1.0), (0, None), (0, True)])
def test_anything_but_integers_and_strings_is_refused(args):
    with pytest.raises(ValueError, match="but got"):
        generator(*args)
