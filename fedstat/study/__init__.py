"""Many runs: by name, in grids, tuned, and the tables that they end in."""

from fedstat.study.experiment import Settings, run
from fedstat.study.tuning import tune

__all__ = ["Settings", "run", "tune"]
