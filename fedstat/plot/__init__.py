"""Figures: pure functions (result or Dataset, ax=None) -> Axes."""

from fedstat.plot.data import partition
from fedstat.plot.motivation import entropies, fig1, heatmap, motivation_grid, motivation_origin, relation
from fedstat.plot.sim import accuracy, origin, recovery, recovery_grid, stability, study_dataset, study_grid

__all__ = [
    "accuracy",
    "entropies",
    "fig1",
    "heatmap",
    "motivation_grid",
    "motivation_origin",
    "origin",
    "partition",
    "recovery",
    "recovery_grid",
    "relation",
    "stability",
    "study_dataset",
    "study_grid",
]
