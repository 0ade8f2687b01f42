"""fedstat: statistics of personalized federated learning.

fedstat estimates which hidden units of a federated network are shared by all clients and which are personal.

    describe a layer   fa, n_factors, layer_matrix, effective_rank, knn_entropy
    split its units    split, split_map, update, Absolute
    uncertainty        bootstrap, jackknife, permutation_test, sensitivity
    clients            icc, variance_components, personal_from, client_clusters
    compare methods    compare
    files              load, open_run, settings, summary, read_weights, report

Packages: data (data sets, partitions), fl (training), study (grids of runs), results (classes of results), plot, sim,
motivation, ntk, attack, decompose.

>>> import fedstat
>>> data = fedstat.sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)
>>> run = fedstat.fl.train(data, fedstat.fl.nets.mlp([8, 10, 1]), fedstat.fl.algorithms.fedavg(), rounds=2)
>>> fedstat.split(run["weights/fc1/w"].isel(checkpoint=-1), kappa=0.7).shared.shape
(10,)
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from fedstat._utils import lazy, show_trees

if TYPE_CHECKING:
    from fedstat import attack as attack
    from fedstat import data as data
    from fedstat import decompose as decompose
    from fedstat import fl as fl
    from fedstat import motivation as motivation
    from fedstat import ntk as ntk
    from fedstat import plot as plot
    from fedstat import results as results
    from fedstat import sim as sim
    from fedstat import study as study
    from fedstat.decompose import read_weights as read_weights
    from fedstat.labelled import bootstrap as bootstrap
    from fedstat.labelled import client_clusters as client_clusters
    from fedstat.labelled import compare as compare
    from fedstat.labelled import effective_rank as effective_rank
    from fedstat.labelled import fa as fa
    from fedstat.labelled import icc as icc
    from fedstat.labelled import jackknife as jackknife
    from fedstat.labelled import knn_entropy as knn_entropy
    from fedstat.labelled import layer_matrix as layer_matrix
    from fedstat.labelled import n_factors as n_factors
    from fedstat.labelled import permutation_test as permutation_test
    from fedstat.labelled import sensitivity as sensitivity
    from fedstat.labelled import split as split
    from fedstat.labelled import split_map as split_map
    from fedstat.labelled import update as update
    from fedstat.labelled import variance_components as variance_components
    from fedstat.reporting import report as report
    from fedstat.results import personal_from as personal_from
    from fedstat.stats.split import Absolute as Absolute
    from fedstat.store import open_run as open_run
    from fedstat.store.results import load as load
    from fedstat.study.report import settings as settings
    from fedstat.study.report import summary as summary

__version__ = version("fedstat")

_VERBS = {
    "fedstat.labelled": (
        "fa", "n_factors", "layer_matrix", "effective_rank", "knn_entropy", "split", "split_map", "update", "bootstrap",
        "jackknife", "permutation_test", "sensitivity", "icc", "variance_components", "client_clusters", "compare",
    ),
    "fedstat.results": ("personal_from",),
    "fedstat.stats.split": ("Absolute",),
    "fedstat.store": ("open_run",),
    "fedstat.store.results": ("load",),
    "fedstat.study.report": ("settings", "summary"),
    "fedstat.decompose": ("read_weights",),
    "fedstat.reporting": ("report",),
}  # fmt: skip
_PACKAGES = ("attack", "data", "decompose", "fl", "motivation", "ntk", "plot", "results", "sim", "study")

# There is no __all__: with it, help(fedstat) would print the docstring of every function. Tab offers verbs and
# packages; Absolute, a value of tau, would stand before them, as capitals do.
__getattr__, __dir__ = lazy.attach(
    __name__,
    {name: module for module, names in _VERBS.items() for name in names}
    | {name: f"fedstat.{name}" for name in _PACKAGES},
    unlisted=("Absolute",),
)
show_trees(lambda tree: import_module("fedstat.study.report").tree_html(tree))
