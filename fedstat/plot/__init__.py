"""Figures: pure functions (result or Dataset, ax=None) -> Axes."""

from fedstat.plot.sim import accuracy, recovery, recovery_grid, stability, study_grid

__all__ = ["accuracy", "recovery", "recovery_grid", "stability", "study_grid"]
