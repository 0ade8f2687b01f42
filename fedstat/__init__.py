"""fedstat: statistics of personalised federated learning.

Which hidden units of a federated network carry knowledge that all clients share, and which are one client's own?

>>> import fedstat
>>> data = fedstat.sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)
>>> run = fedstat.fl.train(data, fedstat.fl.nets.mlp([8, 10, 1]), fedstat.fl.algorithms.fedavg(), rounds=2)
>>> fedstat.split(run["weights/fc1/w"].isel(checkpoint=-1), kappa=0.7).shared.shape
(10,)
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

from fedstat import data, fl, motivation, sim
from fedstat.labelled import fa, knn_entropy, layer_matrix, split
from fedstat.results import ConvergenceWarning, FactorResult, SplitResult
from fedstat.stats.split import Absolute
from fedstat.store import open_run

__version__ = version("fedstat")
__all__ = [
    "Absolute",
    "ConvergenceWarning",
    "FactorResult",
    "SplitResult",
    "data",
    "fa",
    "fl",
    "knn_entropy",
    "layer_matrix",
    "motivation",
    "open_run",
    "plot",
    "sim",
    "split",
]


def __getattr__(name: str) -> Any:
    if name == "plot":  # seaborn takes a second to import
        return import_module("fedstat.plot")
    raise AttributeError(f"module 'fedstat' has no attribute {name!r}")
