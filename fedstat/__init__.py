"""fedstat: statistics of personalised federated learning.

Which hidden units of a federated network carry knowledge that all clients share, and which are one client's own?

>>> import fedstat
>>> data = fedstat.sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)
>>> run = fedstat.fl.train(data, fedstat.fl.nets.mlp([8, 10, 1]), fedstat.fl.algorithms.fedavg(), rounds=2)
>>> fedstat.split(run["weights/fc1/w"].isel(checkpoint=-1), kappa=0.7).shared.shape
(10,)
"""

import sys

_module = sys.argv[:1] == ["-m"] and any("fedstat" in argument for argument in sys.orig_argv)  # python -m fedstat...
if _module or f"{sys.prefix}/bin/fedstat" in sys.orig_argv:  # or the console script: a command loads
    from fedstat import _interrupt

    _interrupt.leave_while_loading()

from functools import partial
from importlib import import_module
from importlib.metadata import version
from threading import RLock
from typing import TYPE_CHECKING, Any

from fedstat.labelled import (
    bootstrap,
    client_clusters,
    compare,
    effective_rank,
    fa,
    icc,
    knn_entropy,
    layer_matrix,
    n_factors,
    permutation_test,
    split,
    split_map,
    stability,
    update,
    variance_components,
)
from fedstat.results import (
    AgreementWarning,
    BootstrapResult,
    ByLayer,
    ClientClustersResult,
    ComparisonResult,
    ComponentsResult,
    ConvergenceWarning,
    EffectiveRankResult,
    EntropyResult,
    FactorResult,
    IccResult,
    LeakageResult,
    NFactorsResult,
    PermutationResult,
    SplitMapResult,
    SplitResult,
    StabilityResult,
    personal_from,
)
from fedstat.results.base import Result
from fedstat.stats.split import Absolute
from fedstat.store import open_run

if TYPE_CHECKING:
    from fedstat import attack, data, decompose, fl, motivation, ntk, plot, sim, study
    from fedstat.decompose import read_split, read_weights
    from fedstat.reporting import report

Result.figures = staticmethod(partial(import_module, "fedstat.plot"))  # results stand below plot
__version__ = version("fedstat")
__all__ = [
    "Absolute",
    "AgreementWarning",
    "BootstrapResult",
    "ByLayer",
    "ClientClustersResult",
    "ComparisonResult",
    "ComponentsResult",
    "ConvergenceWarning",
    "EffectiveRankResult",
    "EntropyResult",
    "FactorResult",
    "IccResult",
    "LeakageResult",
    "NFactorsResult",
    "PermutationResult",
    "SplitMapResult",
    "SplitResult",
    "StabilityResult",
    "attack",
    "bootstrap",
    "client_clusters",
    "compare",
    "data",
    "decompose",
    "effective_rank",
    "fa",
    "fl",
    "icc",
    "knn_entropy",
    "layer_matrix",
    "motivation",
    "n_factors",
    "ntk",
    "open_run",
    "permutation_test",
    "personal_from",
    "plot",
    "read_split",
    "read_weights",
    "report",
    "sim",
    "split",
    "split_map",
    "stability",
    "study",
    "update",
    "variance_components",
]

# Imported when first asked for: torch and seaborn take seconds, and the statistics need neither.
_LATER = ("attack", "data", "decompose", "fl", "motivation", "ntk", "plot", "sim", "study")
_FROM = {"read_split": "fedstat.decompose", "read_weights": "fedstat.decompose", "report": "fedstat.reporting"}


_LOCK = RLock()  # packages that import one another are imported by one thread at a time


def __getattr__(name: str) -> Any:
    with _LOCK:
        if name in _FROM:
            return getattr(import_module(_FROM[name]), name)
        if name in _LATER:
            return import_module(f"fedstat.{name}")
    raise AttributeError(f"module 'fedstat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
