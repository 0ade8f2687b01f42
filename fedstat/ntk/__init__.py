"""Neural-tangent-kernel theory of FedSplit (FedFac §3.3) on labelled data: ``python -m fedstat.ntk`` checks it."""

from fedstat.ntk.constants import TheoryWarning, extreme_eigenvalues, kernel, violations
from fedstat.ntk.results import ConvergenceResult, ExtremeEigenvalues, GeneralizationResult
from fedstat.ntk.theorem1 import convergence
from fedstat.ntk.theorem2 import generalization

__all__ = [
    "ConvergenceResult",
    "ExtremeEigenvalues",
    "GeneralizationResult",
    "TheoryWarning",
    "convergence",
    "extreme_eigenvalues",
    "generalization",
    "kernel",
    "violations",
]
