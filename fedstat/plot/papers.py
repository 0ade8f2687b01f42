"""Figures of FedFac's simulation study, ``fedstat.sim``, and of its motivating study, ``fedstat.motivation``."""

from fedstat.plot.fedfac import fig1, fig2, heatmap, motivation_grid, relation
from fedstat.plot.simulation import (
    accuracy,
    kappa_window,
    recovery,
    recovery_grid,
    spectrum,
    spectrum_grid,
    stability,
)
from fedstat.plot.study import accuracy_grid, stability_grid, study_grid

__all__ = [
    "accuracy",
    "accuracy_grid",
    "fig1",
    "fig2",
    "heatmap",
    "kappa_window",
    "motivation_grid",
    "recovery",
    "recovery_grid",
    "relation",
    "spectrum",
    "spectrum_grid",
    "stability",
    "stability_grid",
    "study_grid",
]


def __dir__() -> list[str]:
    return __all__
