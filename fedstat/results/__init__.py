"""Results that print themselves, turn into tables and never change."""

from fedstat.results.factor import ConvergenceWarning, FactorResult, Rotation, SplitResult
from fedstat.stats.split import Absolute, Tau

__all__ = ["Absolute", "ConvergenceWarning", "FactorResult", "Rotation", "SplitResult", "Tau"]
