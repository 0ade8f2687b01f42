"""Figures: pure functions (result or Dataset, ax=None) -> Axes."""

from fedstat.plot.ntk import convergence, freezing, generalization
from fedstat.plot.sim import accuracy, origin, recovery, recovery_grid, stability, study_dataset, study_grid

__all__ = [
    "accuracy",
    "convergence",
    "freezing",
    "generalization",
    "origin",
    "recovery",
    "recovery_grid",
    "stability",
    "study_dataset",
    "study_grid",
]
