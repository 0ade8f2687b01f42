"""Weights of any origin, split into shared and personal units; also ``python -m fedstat.decompose``."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.decompose.stored import to_dataset
    from fedstat.labelled.weight_files import read_weights

__all__ = ["read_weights", "to_dataset"]

__getattr__, __dir__ = attach(
    __name__, {"read_weights": "fedstat.labelled.weight_files", "to_dataset": "fedstat.decompose.stored"}
)
