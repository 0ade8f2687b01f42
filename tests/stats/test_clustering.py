"""Clusters of clients: against scipy, scikit-learn, R's hclust, and permutations enumerated by hand."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_similarity

from fedstat.stats import clustering
from fedstat.stats.split import adjusted_rand

RNG = np.random.default_rng(0)
X = np.repeat(RNG.normal(size=(3, 8)), 4, axis=0) + RNG.normal(size=(12, 8))
S = clustering.cosine(X)
GROUPS = np.repeat([0, 1, 2], 4)

R = """
x <- matrix(scan("stdin", quiet = TRUE), nrow = 12, byrow = TRUE)
s <- x / sqrt(rowSums(x^2)); s <- s %*% t(s)
h <- hclust(as.dist(1 - s), "average")
rand <- function(a, b) {
  n <- table(a, b); two <- function(k) sum(choose(k, 2))
  e <- two(rowSums(n)) * two(colSums(n)) / choose(sum(n), 2)
  (two(n) - e) / ((two(rowSums(n)) + two(colSums(n))) / 2 - e)
}
g <- rep(1:3, each = 4); pairs <- lower.tri(s); same <- outer(g, g, "==")
cat(sprintf('{"clusters": [%s], "heights": [%s], "rand": %.15g, "contrast": %.15g}',
  paste(sapply(2:5, function(k) sprintf("[%s]", paste(cutree(h, k), collapse = ","))), collapse = ","),
  paste(sprintf("%.15g", h$height), collapse = ","), rand(cutree(h, 4), g),
  mean(s[pairs & same]) - mean(s[pairs & !same])))
"""


def test_similarity_and_tree_are_scikit_learns_and_scipys() -> None:
    np.testing.assert_allclose(S, cosine_similarity(X), atol=1e-15)
    made = clustering.tree(S)
    np.testing.assert_allclose(made.merges, linkage(pdist(X, "cosine"), "average"), atol=1e-14)
    for k in range(1, 13):
        found = clustering.cut(made.merges, k)
        assert len(np.unique(found)) == k
        theirs = fcluster(made.merges, k, "maxclust")
        if len(np.unique(theirs)) == k or k < 9:  # SciPy 1.14 gives fewer, as the word allows
            assert adjusted_rand_score(found, theirs) == 1
    ties = clustering.cut(clustering.tree(np.ones((5, 5))).merges, 3)
    assert len(np.unique(ties)) == 3


@pytest.mark.skipif(shutil.which("Rscript") is None, reason="needs R")
def test_clusters_agreement_and_contrast_are_those_of_r() -> None:
    text = "\n".join(" ".join(f"{v:.17g}" for v in row) for row in X)
    done = subprocess.run(["Rscript", "-e", R], input=text, capture_output=True, text=True, check=True)  # noqa: S607
    theirs, made = json.loads(done.stdout), clustering.tree(S)
    np.testing.assert_allclose(made.merges[:, 2], theirs["heights"], rtol=1e-12)
    for k, clusters in zip(range(2, 6), theirs["clusters"], strict=True):
        np.testing.assert_array_equal(clustering.cut(made.merges, k) + 1, clusters)
    np.testing.assert_allclose(adjusted_rand(clustering.cut(made.merges, 4), GROUPS), theirs["rand"], rtol=1e-12)
    np.testing.assert_allclose(clustering.contrast(S, GROUPS), theirs["contrast"], rtol=1e-12)


def test_adjusted_rand_of_any_number_of_groups_is_scikit_learns() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 5, (20, 30)), rng.integers(0, 3, (20, 30))
    found = adjusted_rand(a, b)
    assert found.tolist() == [adjusted_rand_score(*pair) for pair in zip(a, b, strict=True)]
    two = rng.integers(0, 2, (2, 30))
    assert adjusted_rand(*two) == adjusted_rand(*two.astype(bool))
    equal = np.array([[True] * 12, [True] * 12, [True] * 12]), np.array([[True] * 12, [False] * 12, two[0, :12] == 1])
    expected = [adjusted_rand_score(*pair) for pair in zip(*equal, strict=True)]
    assert adjusted_rand(*equal).tolist() == adjusted_rand(*map(torch.asarray, equal)).tolist() == expected


def test_an_exact_p_value_counts_all_arrangements() -> None:
    groups, s = np.array([0, 0, 1, 1, 2]), S[3:8, 3:8]
    clusters = clustering.cut(clustering.tree(s).merges, 3)
    under = clustering.permuted(s, clusters, groups, permutations=clustering.Permutations(100), seed=0)
    assert (under.exact, len(under.rand), clustering.arrangements(groups)) == (True, 30, 30)
    every = [groups[list(p)] for p in itertools.permutations(range(5))]  # each arrangement 4 times
    rands = np.array([adjusted_rand_score(clusters, g) for g in every])
    same = np.array([[(g[i] == g[j]) for i, j in itertools.combinations(range(5), 2)] for g in every])
    pairs = np.array([s[i, j] for i, j in itertools.combinations(range(5), 2)])
    contrasts = np.array([pairs[m].mean() - pairs[~m].mean() for m in same])
    for found, own, all_of in (
        (adjusted_rand_score(clusters, groups), under.rand, rands),
        (contrasts[0], under.contrast, contrasts),
    ):
        np.testing.assert_allclose(np.sort(np.repeat(own, 4)), np.sort(all_of), atol=1e-12)
        assert clustering.p_value(found, own, exact=True) == np.mean(all_of >= found - 1e-10)


def test_drawn_permutations_add_the_one_at_hand() -> None:
    assert clustering.p_value(2.0, np.array([0.0, 1, 2]), exact=False) == 0.5
    assert not clustering.permuted(S, GROUPS, GROUPS, permutations=clustering.Permutations(99), seed=0).exact


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    x = np.random.default_rng(4).normal(size=10)
    means = np.array([np.delete(x, pair).mean() for pair in itertools.combinations(range(10), 2)])
    np.testing.assert_allclose(
        clustering.jackknife_error(means, x.mean(), n=10, n_left_out=2), x.std(ddof=1) / np.sqrt(10), rtol=1e-12
    )


def _separation(s: np.ndarray, groups: np.ndarray) -> float:
    """Mean similarity within groups minus between, in standard deviations of the similarities about these means."""
    pairs = list(itertools.combinations(range(len(s)), 2))
    within = [s[i, j] for i, j in pairs if groups[i] == groups[j]]
    between = [s[i, j] for i, j in pairs if groups[i] != groups[j]]
    squares = sum((np.array(part) - np.mean(part)) @ (np.array(part) - np.mean(part)) for part in (within, between))
    return float((np.mean(within) - np.mean(between)) / np.sqrt(squares / (len(pairs) - 2)))


def _groups_by_loop(s: np.ndarray) -> np.ndarray | None:
    """As ``separate_groups``: all cuts of SciPy's tree, one after the other."""
    n, best = len(s), (0.0, None)
    merges = linkage(1 - s[np.triu_indices(n, 1)], "average")
    for k in range(2, n // 2 + 1):
        groups = fcluster(merges, k, "maxclust")
        if np.bincount(groups)[1:].min() > 1:
            least = 5 if n >= 6 and k <= 4 else 20
            best = (
                max(best, (found, groups), key=lambda one: one[0])
                if (found := _separation(s, groups)) >= least
                else best
            )
    return best[1]


@pytest.mark.parametrize("n", [4, 5, 6, 9, 20])
def test_separate_groups_are_those_of_a_plain_loop_over_cuts(n: int) -> None:
    rng, n_found = np.random.default_rng(n), 0
    for _ in range(40):
        groups, size = rng.integers(rng.integers(1, 7), size=n), rng.uniform(0, 3)
        s = clustering.cosine(rng.normal(size=(n, 900)) + size * rng.normal(size=(6, 900))[groups])
        found, theirs = clustering.separate_groups(s), _groups_by_loop(s)
        assert (found is None) == (theirs is None)
        if theirs is not None:
            n_found += 1
            assert adjusted_rand_score(found, theirs) == 1
    assert 5 <= n_found <= 38


def test_groups_whose_intervals_are_too_short_are_found_and_independent_clients_form_none() -> None:
    rng = np.random.default_rng(0)
    for n in (6, 10, 30):
        for _ in range(10):
            x, means = rng.normal(size=(n, 3000)), rng.normal(size=(2, 3000))[np.arange(n) % 2]
            assert clustering.separate_groups(clustering.cosine(x)) is None
            found = clustering.separate_groups(clustering.cosine(means / 2**0.5 + x))  # similarity 1/3 within
            np.testing.assert_array_equal(found, np.arange(n) % 2)
    assert clustering.separate_groups(np.eye(3)) is None
