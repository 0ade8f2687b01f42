"""Verbs on the weights of one layer or on what holds layers, as arrays that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedstat

# variance_components needs replicates, and knn_entropy takes arrays only.
VERBS: dict[str, Callable[..., Any]] = {
    "split": lambda w, **which: fedstat.split(w, n_factors=2, **which).communality,
    "split by icc": lambda w, **which: fedstat.split(w, method="icc", **which).icc,
    "fa": lambda w, **which: fedstat.fa(w, n_factors=2, **which).communality,
    "n_factors": lambda w, **which: list(fedstat.n_factors(w, draws=2, **which).numbers.values()),
    "bootstrap": lambda w, **which: fedstat.bootstrap(w, n_factors=2, n_boot=3, **which).communality,
    "jackknife": lambda w, **which: fedstat.jackknife(w, n_factors=2, **which).communality,
    "permutation_test": lambda w, **which: (
        fedstat.permutation_test(w, n_factors=2, n_permutations=3, **which).communality
    ),
    "sensitivity": lambda w, **which: fedstat.sensitivity(w, kappa=0.5, kappas=(0.6,), n_starts=1, **which).table[
        "ari"
    ],
    "icc": lambda w, **which: fedstat.icc(w, **which).agreement,
    "split_map": lambda w, **which: fedstat.split_map(w, kappas=(0.5, 0.75), methods=("pc", "icc"), **which).shared,
    "client_clusters": lambda w, **which: fedstat.client_clusters(w, n_clusters=2, n_subsamples=3, **which).similarity,
}
