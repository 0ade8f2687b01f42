"""Weights of any origin, split into shared and client-specific units; also ``python -m fedstat.decompose``."""

from fedstat.decompose.read import read_weights
from fedstat.decompose.report import to_dataset

__all__ = ["read_weights", "to_dataset"]
