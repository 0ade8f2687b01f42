"""The algorithms, one file each."""

from fedstat.fl.algorithms.fedavg import fedavg
from fedstat.fl.algorithms.fedfac import fedfac
from fedstat.fl.algorithms.fedsplit import fedsplit, random_split
from fedstat.fl.algorithms.local import local

__all__ = ["fedavg", "fedfac", "fedsplit", "local", "random_split"]
