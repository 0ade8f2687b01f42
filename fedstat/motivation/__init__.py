"""The motivating study of the FedFac paper (§1, Figs. 1 and 2): hidden neurons' outputs over clients."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.motivation.experiment import Settings, study
    from fedstat.motivation.findings import correlations, summary

__all__ = ["Settings", "correlations", "study", "summary"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "Settings": "fedstat.motivation.experiment",
        "correlations": "fedstat.motivation.findings",
        "study": "fedstat.motivation.experiment",
        "summary": "fedstat.motivation.findings",
    },
)
