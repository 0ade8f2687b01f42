"""The motivating study of the FedFac paper (§1, Figs. 1 and 2): hidden neurons' outputs over clients."""

from fedstat.motivation.report import correlations, summary
from fedstat.motivation.study import Settings, study

__all__ = ["Settings", "correlations", "study", "summary"]
