"""Neural-tangent-kernel theory of FedSplit (FedFac §3.3) on labeled data; ``python -m fedstat.ntk`` checks it."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.ntk.results import ConvergenceResult, ExtremeEigenvalues, GeneralizationResult
    from fedstat.ntk.samples import TheoryWarning, extreme_eigenvalues, kernel, violations
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

__getattr__, __dir__ = attach(
    __name__,
    {
        "ConvergenceResult": "fedstat.ntk.results",
        "ExtremeEigenvalues": "fedstat.ntk.results",
        "GeneralizationResult": "fedstat.ntk.results",
        "TheoryWarning": "fedstat.ntk.samples",
        "convergence": "fedstat.ntk.theorem1",
        "extreme_eigenvalues": "fedstat.ntk.samples",
        "generalization": "fedstat.ntk.theorem2",
        "kernel": "fedstat.ntk.samples",
        "violations": "fedstat.ntk.samples",
    },
)
