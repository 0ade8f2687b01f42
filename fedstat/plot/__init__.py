"""Figures: pure functions (result or Dataset, ax=None) -> Axes."""

from fedstat.plot.factor import communality, loadings, rounds, scree
from fedstat.plot.ntk import convergence, freezing, generalization
from fedstat.plot.sim import accuracy, origin, recovery, recovery_grid, stability, study_dataset, study_grid

__all__ = [
    "accuracy",
    "communality",
    "convergence",
    "freezing",
    "generalization",
    "loadings",
    "origin",
    "recovery",
    "recovery_grid",
    "rounds",
    "scree",
    "stability",
    "study_dataset",
    "study_grid",
]
