"""The verbs users call: arrays, tensors, xarray objects, runs, files or state_dicts in, result objects out."""

from fedstat.labelled.agreement import icc, variance_components
from fedstat.labelled.between_clients import client_clusters, knn_entropy
from fedstat.labelled.comparison import compare, effective_rank
from fedstat.labelled.factor import fa
from fedstat.labelled.splitting import split, split_map, update
from fedstat.labelled.sums import layer_matrix
from fedstat.labelled.uncertainty import bootstrap, jackknife, n_factors, permutation_test, sensitivity

__all__ = [
    "bootstrap",
    "client_clusters",
    "compare",
    "effective_rank",
    "fa",
    "icc",
    "jackknife",
    "knn_entropy",
    "layer_matrix",
    "n_factors",
    "permutation_test",
    "sensitivity",
    "split",
    "split_map",
    "update",
    "variance_components",
]


def __dir__() -> list[str]:
    return __all__
