"""The verbs users call: arrays, torch tensors or xarray objects in, result objects out."""

from fedstat.labelled.coerce import layer_matrix
from fedstat.labelled.factor import fa, split, update

__all__ = ["fa", "layer_matrix", "split", "update"]
