"""Clusters of objects: cosine similarity, average linkage, comparison with known groups. NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils.streams import generator
from fedstat.stats.split import adjusted_rand

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_MAX_NUMBERS = 2**18  # largest number of values of permuted groups in a block, which fits the cache
# Smallest separation of groups: of 2 to 4 groups of at least 6 objects, and of other groups.
_SEPARATE, _SEPARATE_BY_CHANCE, _FEW_CLUSTERS, _FEW_OBJECTS = 5, 20, 4, 6
_EQUAL = 1e-6  # largest distance of objects that are equal up to rounding of float32


class Tree(NamedTuple):
    """Average linkage on 1 − similarity.

    Attributes
    ----------
    merges : array (object - 1, 4)
        Result of :func:`scipy.cluster.hierarchy.linkage`.
    order : int array (object,)
        Objects in the order of the tree's leaves.
    """

    merges: Floats
    order: Ints


class Permutations(NamedTuple):
    """Number of random permutations, and a function that is called with the size of each block that is done."""

    n: int
    tick: Callable[[int], object] = lambda _: None


class Permuted(NamedTuple):
    """Statistics of groups under permutations of the groups' labels over objects.

    Attributes
    ----------
    rand, contrast : array (permutation,)
        Adjusted Rand index with the clusters; mean similarity within groups minus between.
    exact : bool
        True if the permutations are all distinct arrangements of the labels, including the observed one; False if they
        are random draws with replacement.
    """

    rand: Floats
    contrast: Floats
    exact: bool


def cosine(x: Floats, *, eps: float = 0.0) -> Floats:
    """Return the cosine similarity (object, object) of the rows of ``x``, which must not be zero.

    It is exactly 1 or −1 for rows that are parallel up to rounding; ``eps`` is the relative rounding error of ``x``.
    """
    largest = np.abs(x).max(axis=1, keepdims=True, initial=0)
    unit = x / largest
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    similarity = unit @ unit.T
    similarity = (similarity + similarity.T) / 2
    rounding = max((4 * eps) ** 2, 4 * np.finfo(float).eps * math.sqrt(x.shape[1]))  # of the values; of their products
    similarity = np.where(np.abs(similarity) > 1 - rounding, np.sign(similarity), similarity)
    np.fill_diagonal(similarity, 1)
    return np.asarray(similarity)


def tree(similarity: Floats) -> Tree:
    """Cluster at least 2 objects by average linkage (UPGMA) on 1 − similarity."""
    merges = scipy.cluster.hierarchy.linkage(scipy.spatial.distance.squareform(1 - similarity, checks=False), "average")
    return Tree(merges, scipy.cluster.hierarchy.leaves_list(merges).astype(np.int64))


def cut(merges: Floats, n_clusters: int) -> Ints:
    """Cut a tree into exactly ``n_clusters`` clusters (object,), even if merges tie.

    Clusters are numbered from 0 in the order of their first object.

    Examples
    --------
    >>> cut(tree(cosine(np.array([[1, 0.1], [0, 1], [1, 0.2], [0.1, 1]]))).merges, 2)
    array([0, 1, 0, 1])
    """
    return codes(scipy.cluster.hierarchy.cut_tree(merges, n_clusters)[:, 0])


def separate_groups(similarity: Floats) -> Ints | None:
    """Return separate groups (object,) of at least two objects each, or None if no groups are separate.

    Objects are clustered by average linkage on 1 − similarity. Of all cuts into clusters of at least two objects, the
    result is the cut with the largest separation: mean similarity of pairs within clusters minus between, divided by
    the standard deviation of the similarities about these two means. It must be at least 5, or at least 20 for fewer
    than 6 objects or more than 4 clusters, which arise by chance more often.

    Notes
    -----
    Separation decides if jackknife intervals of ICC2 are too short, not the growth of merging distances. Two groups in
    equal numbers with similarity 0.33 within and 0 between merge at 1.5 times the distance, as clients with two of ten
    classes sometimes do; the layer's interval covers in 0.4 to 0.6 of simulations
    (``simulations/inference/agreement.py``).

    Examples
    --------
    >>> x = np.repeat(np.eye(2, 20), 3, axis=0) + 0.02 * np.random.default_rng(0).normal(size=(6, 20))
    >>> separate_groups(cosine(x)), separate_groups(cosine(x[:3]))
    (array([0, 0, 0, 1, 1, 1]), None)
    """
    if (n := len(similarity)) < 4:
        return None
    merges, s = tree(similarity).merges, similarity[np.triu_indices(n, 1)]
    s = s - s.mean()
    merge = np.searchsorted(merges[:, 2], scipy.cluster.hierarchy.cophenet(merges))  # that joins the pair's clusters
    first = int(np.flatnonzero((merges[:, :2] < n).any(axis=1))[-1])  # after which no cluster has one object
    n_clusters = np.arange(n - 1 - first, 1, -1)
    if not len(n_clusters):
        return None
    n_within, within = (np.cumsum(np.bincount(merge, weights, n - 1))[first:-1] for weights in (None, s))
    n_between, between = len(s) - n_within, -within  # s sums to 0
    squares = s @ s - within**2 / n_within - between**2 / n_between
    spread = np.sqrt(np.maximum(squares, 0) / max(1, len(s) - 2))
    separation = (within / n_within - between / n_between) / np.maximum(spread, _EQUAL)
    least = np.where((n >= _FEW_OBJECTS) & (n_clusters <= _FEW_CLUSTERS), _SEPARATE, _SEPARATE_BY_CHANCE)
    best = int(np.argmax(np.where(separation >= least, separation, 0)))
    return cut(merges, int(n_clusters[best])) if separation[best] >= least[best] else None


def equal_objects(similarity: Floats) -> Ints:
    """Return the pairs (pair, 2) of objects with similarity 1; no pairs if all objects are equal."""
    i, j = np.triu_indices(len(similarity), 1)
    equal = similarity[i, j] > 1 - _EQUAL
    return np.stack([i, j], axis=1)[equal & (not equal.all())]


def codes(labels: NDArray) -> Ints:
    """Encode labels as integers from 0, in the order of their first occurrence."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse])


def contrast(similarity: Floats, groups: Ints) -> Floats:
    """Return the mean similarity of pairs of objects within groups minus between groups.

    Parameters
    ----------
    similarity : array (object, object)
    groups : int array (..., object)
        From 0.

    Returns
    -------
    array (...,)

    Examples
    --------
    >>> float(contrast(np.array([[1, 0.8, 0.1], [0.8, 1, 0.3], [0.1, 0.3, 1]]), np.array([0, 0, 1])).round(12))
    0.6
    """
    n, k = groups.shape[-1], int(groups.max()) + 1
    member = (groups[..., None, :] == np.arange(k)[:, None]).astype(float)
    sizes = member[(0,) * (groups.ndim - 1)].sum(-1)
    pairs_within, pairs = float((sizes * (sizes - 1)).sum()), n * (n - 1)
    total = similarity.sum() - np.trace(similarity)
    within = ((member @ similarity) * member).sum((-1, -2)) - np.trace(similarity)
    return np.asarray(within / pairs_within - (total - within) / (pairs - pairs_within))


def arrangements(groups: Ints) -> int:
    """Return the number of distinct assignments of the groups' labels to the objects."""
    sizes = np.bincount(groups)
    return math.factorial(len(groups)) // math.prod(math.factorial(int(n)) for n in sizes)


def permuted(
    similarity: Floats,
    clusters: Ints,
    groups: Ints,
    *,
    permutations: Permutations,
    seed: int,
) -> Permuted:
    """Compute both statistics of :class:`Permuted` under permutations of the groups' labels over objects.

    Parameters
    ----------
    similarity : array (object, object)
    clusters, groups : int array (object,)
        From 0.
    permutations : Permutations
        All distinct arrangements are enumerated if they are at most as many.
    seed : int
    """
    step = max(1, _MAX_NUMBERS // (len(groups) * (int(groups.max()) + 1)))
    blocks, exact = rearranged(groups, permutations.n, step, generator(seed, "permutations of groups"))
    rands, contrasts = [], []
    for block in blocks:
        rands.append(adjusted_rand(np.broadcast_to(clusters, block.shape), block))
        contrasts.append(contrast(similarity, block))
        permutations.tick(len(block))
    return Permuted(np.concatenate(rands), np.concatenate(contrasts), exact)


def rearranged(groups: Ints, n: int, step: int, rng: np.random.Generator) -> tuple[Iterator[Ints], bool]:
    """Return blocks (permutation, object) of permuted labels: all arrangements if there are at most ``n``, else draws.

    The second value is True if they are all arrangements; ``step`` is the largest number of permutations of a block.
    """
    exact = arrangements(groups) <= n
    return _enumerate(groups, step) if exact else _draw(groups, n, step, rng), exact


def p_value(observed: float, under: Floats, *, exact: bool) -> float:
    """Return the one-sided p value: the proportion of permutations with a statistic at least as large as ``observed``.

    The observed statistic is counted among random permutations (Phipson and Smyth 2010, Permutation p-values should
    never be zero, Statistical Applications in Genetics and Molecular Biology 9 (1), 39).
    """
    slack = 1e-10 * max(1.0, float(np.abs(under).max(initial=0)))
    as_large = int((under >= observed - slack).sum())
    return as_large / len(under) if exact else (as_large + 1) / (len(under) + 1)


def _draw(groups: Ints, n: int, step: int, rng: np.random.Generator) -> Iterator[Ints]:
    for low in range(0, n, step):
        yield rng.permuted(np.tile(groups, (min(step, n - low), 1)), axis=1)


def _enumerate(groups: Ints, step: int) -> Iterator[Ints]:
    rows: list[list[int]] = []
    for row in _enumerate_orders(sorted(groups.tolist())):
        rows.append(row)
        if len(rows) == step:
            yield np.array(rows)
            rows = []
    if rows:
        yield np.array(rows)


def _enumerate_orders(labels: list[int]) -> Iterator[list[int]]:
    """Yield all distinct orders of sorted labels, in lexicographic order."""
    a = list(labels)
    while True:
        yield list(a)
        i = len(a) - 2
        while i >= 0 and a[i] >= a[i + 1]:
            i -= 1
        if i < 0:
            return
        j = len(a) - 1
        while a[j] <= a[i]:
            j -= 1
        a[i], a[j] = a[j], a[i]
        a[i + 1 :] = reversed(a[i + 1 :])


class Left(NamedTuple):
    """Clusters of random subsamples of the objects.

    Attributes
    ----------
    rand : array (draw,)
        Adjusted Rand index of the subsample's clusters with its groups; NaN without groups.
    subsample_ari : array (draw,)
        Adjusted Rand index of the subsample's clusters with its clusters in the full sample.
    left_out : int
        Number of objects left out in every draw.
    """

    rand: Floats
    subsample_ari: Floats
    left_out: int


def left_out(
    similarity: Floats,
    clusters: Ints,
    groups: Ints | None,
    *,
    n_clusters: int,
    share: float,
    draws: int,
    seed: int,
    tick: Callable[[int], object] = lambda _: None,
) -> Left:
    """Cluster random subsamples, each without a fraction ``share`` of the objects (delete-d, without replacement).

    ``tick`` is called with 1 after each subsample.
    """
    n, rng = len(clusters), generator(seed, "objects left out")
    n_left_out = min(max(1, round(share * n)), n - max(2, n_clusters))
    rands, subsample_ari = np.full(draws, np.nan), np.full(draws, np.nan)
    for i in range(draws if n_left_out > 0 else 0):
        retained = np.sort(rng.permutation(n)[n_left_out:])
        new_clusters = cut(tree(similarity[np.ix_(retained, retained)]).merges, n_clusters)
        subsample_ari[i] = adjusted_rand(new_clusters, codes(clusters[retained]))
        if groups is not None:
            rands[i] = adjusted_rand(new_clusters, codes(groups[retained]))
        tick(1)
    return Left(rands, subsample_ari, max(n_left_out, 0))


def jackknife_error(values: Floats, estimate: float, *, n: int, n_left_out: int) -> float:
    """Return the delete-d jackknife SE, ((n − d) / d · mean (θ_s − θ)²)^½ (Shao and Wu 1989, Ann. Statist. 17)."""
    if not n_left_out or not len(values):
        return math.nan
    return math.sqrt((n - n_left_out) / n_left_out * float(np.mean((values - estimate) ** 2)))
