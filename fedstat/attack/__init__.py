"""What methods leak: deep leakage from gradients on what clients really send; also ``python -m fedstat.attack``."""

from fedstat.attack.experiment import leakage, leakage_of
from fedstat.attack.matching import Observed, observe

__all__ = ["Observed", "leakage", "leakage_of", "observe"]
