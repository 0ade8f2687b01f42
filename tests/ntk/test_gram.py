"""Kernels and Gram matrices against references that are not ours."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstat.ntk
from fedstat.ntk import gram

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ntk.json").read_text())
CASES = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["name"])


def sphere(seed, *shape):
    x = np.random.default_rng(seed).normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def clients_of(case):
    return np.repeat(np.arange(len(case["sizes"])), case["sizes"])


@CASES
def test_kernel_has_the_digits_of_the_50_digit_reference(case):
    h = gram.kernel(np.array(case["x"]))
    np.testing.assert_allclose(h, np.array(case["h"], dtype=float), rtol=0, atol=1e-15)
    np.testing.assert_array_equal(h, h.T)


@CASES
def test_extreme_eigenvalues_have_the_digits_of_the_50_digit_reference(case):
    x = np.array(case["x"])
    for h, key in ((fedstat.ntk.kernel(x), "lambda_s"), (fedstat.ntk.kernel(x, clients_of(case)), "lambda_p")):
        found = fedstat.ntk.extreme_eigenvalues(h)
        low, high = map(float, case[key])
        assert tuple(found) == pytest.approx((low, high), rel=1e-9, abs=1e-15)
        assert abs(found.lambda_min - low) <= found.error_min
        assert abs(found.lambda_max - high) <= found.error_max


@CASES
def test_complexity_has_the_digits_of_the_50_digit_reference(case):
    h = gram.kernel(np.array(case["x"]))
    cuts = np.cumsum([0, *case["sizes"]])
    blocks = [h[a:b, a:b] for a, b in itertools.pairwise(cuts)]
    assert gram.complexity(h, blocks, np.array(case["y"])) == pytest.approx(float(case["complexity"]), rel=1e-9)


def test_kernel_is_the_expectation_that_defines_it():
    x = sphere(0, 5, 3) * np.array([1.0, 0.3, 0.8, 1.0, 0.6])[:, None]
    n_draws = 200_000
    on = (np.random.default_rng(1).normal(size=(n_draws, 3)) @ x.T >= 0).astype(float)
    share = on.T @ on / n_draws
    error = np.abs(x @ x.T) * np.sqrt(share * (1 - share) / n_draws)
    assert np.all(np.abs(x @ x.T * share - gram.kernel(x)) <= 4.5 * error)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_tiles_assemble_to_the_plain_expression(n):
    x = sphere(2, n, 7) * np.random.default_rng(3).uniform(0.1, 1, size=(n, 1))
    norm = np.linalg.norm(x, axis=1)
    g = x @ x.T
    plain = g * (np.pi - np.arccos(np.clip(g / np.outer(norm, norm), -1, 1))) / (2 * np.pi)
    np.fill_diagonal(plain, norm**2 / 2)
    np.testing.assert_allclose(gram.kernel(x), plain, atol=1e-13)


def test_a_stack_of_clients_gives_the_diagonal_blocks():
    x = sphere(4, 3, 150, 6)
    whole = gram.kernel(x.reshape(-1, 6))
    for c, block in enumerate(gram.kernel(x)):
        own = slice(150 * c, 150 * (c + 1))
        np.testing.assert_allclose(block, whole[own, own], atol=1e-15)


def test_torch_and_numpy_agree():
    x = sphere(5, 200, 6)
    h = gram.kernel(torch.from_numpy(x))
    assert isinstance(h, torch.Tensor)
    np.testing.assert_allclose(h.numpy(), gram.kernel(x), atol=1e-14)


def test_float32_samples_get_a_float64_kernel():
    x = sphere(6, 10, 4).astype(np.float32)
    h = gram.kernel(x)
    assert h.dtype == np.float64
    np.testing.assert_array_equal(h, gram.kernel(x.astype(np.float64)))


@pytest.mark.parametrize("angle", [1e-3, 1e-6, 1e-9])
def test_smallest_eigenvalue_of_a_nearly_parallel_pair_keeps_its_digits(angle):
    """H = ½ [[1, c], [c, 1]] with c = cos θ (1 − θ/π): λ_min = (1 − c)/2 = θ/(2π) + θ²/4 + O(θ³)."""
    x = np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])
    low, _ = np.linalg.eigvalsh(gram.kernel(x))
    assert low == pytest.approx(angle / (2 * np.pi) + angle**2 / 4, rel=1e-6, abs=2e-16)


def test_antiparallel_samples_have_entry_zero_and_do_not_make_the_kernel_singular():
    x = sphere(7, 4, 3)
    x[3] = -x[0]
    h = gram.kernel(x)
    assert h[0, 3] == pytest.approx(0, abs=1e-16)
    assert np.linalg.eigvalsh(h)[0] > 1e-3


def gradients(x, w, output):
    """Gradient of h with respect to the weights, by autograd, one row per sample."""
    rows = []
    for xi in torch.from_numpy(x):
        leaf = torch.from_numpy(w).requires_grad_()
        (torch.relu(leaf @ xi) @ torch.from_numpy(output)).backward()
        rows.append(leaf.grad.reshape(-1).numpy())
    return np.stack(rows)


def test_gram_matrix_is_the_inner_product_of_gradients():
    rng = np.random.default_rng(8)
    x, m = sphere(9, 6, 4), 30
    w, local = rng.normal(size=(2, m, 4))
    output = rng.choice([-1.0, 1.0], size=m) / np.sqrt(m)
    start, now = gradients(x, w, output), gradients(x, local, output)
    np.testing.assert_allclose(gram.gram(x, w, local), start @ now.T, atol=1e-14)
    np.testing.assert_allclose(gram.gram(x, w, w), start @ start.T, atol=1e-14)


def test_shared_gram_takes_each_clients_columns_from_its_own_weights():
    rng = np.random.default_rng(10)
    x, m = sphere(11, 3, 4, 5), 40
    start, local = rng.normal(size=(m, 5)), rng.normal(size=(3, m, 5))
    whole = gram.shared_gram(x, start, local)
    rows = x.reshape(12, 5)
    for c in range(3):
        np.testing.assert_allclose(
            whole[:, 4 * c : 4 * c + 4], gram.gram(rows, start, local[c])[:, 4 * c : 4 * c + 4], atol=1e-14
        )


def test_gram_at_the_start_approaches_the_kernel_at_the_rate_of_a_mean():
    x = sphere(12, 10, 6)
    gaps = []
    rng = np.random.default_rng(13)
    for m in (400, 10_000):
        draws = [gram.gram(x, w, w) - gram.kernel(x) for w in rng.normal(size=(60, m, 6))]
        gaps.append(np.linalg.norm(draws))
    assert gaps[1] == pytest.approx(gaps[0] / 5, rel=0.1)


def test_violations_are_named():
    x = sphere(14, 300, 5)
    x[250], x[7], x[9] = 0.3 * x[3], 1.5 * x[7], 0
    x[11] = -x[3]
    found = gram.violations(x)
    assert found == gram.Violations(long=(7,), zero=(9,), parallel=((3, 250),))
    assert bool(found)
    assert not gram.violations(sphere(14, 300, 5))


def test_labelled_kernel_names_clients_and_marks_absent_samples():
    x, client = sphere(15, 5, 3), ["b", "a", "b", "b", "a"]
    whole, blocks = fedstat.ntk.kernel(x), fedstat.ntk.kernel(x, client)
    assert blocks.client.values.tolist() == ["a", "b"]
    np.testing.assert_array_equal(np.isnan(blocks.values[0]).sum(), 5)
    np.testing.assert_allclose(blocks.sel(client="b").values, whole.values[np.ix_([0, 2, 3], [0, 2, 3])], atol=1e-15)
