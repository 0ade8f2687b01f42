"""Reports: what was run, what was found, how sure that is, and what to cite, on one page."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.reporting.document import Report
    from fedstat.reporting.several import report

__all__ = ["Report", "report"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "Report": "fedstat.reporting.document",
        "report": "fedstat.reporting.several",
    },
)
