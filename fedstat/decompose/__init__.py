"""Weights of any origin, split into shared and client-specific units; also ``python -m fedstat.decompose``."""

from fedstat.decompose.stored import read_split, to_dataset
from fedstat.labelled.weight_files import read_weights

__all__ = ["read_split", "read_weights", "to_dataset"]
