"""Many runs: by name, in grids, tuned, and in tables."""

from fedstat.study.experiment import Settings, run
from fedstat.study.side_by_side import compare_runs
from fedstat.study.tuning import tune

__all__ = ["Settings", "compare_runs", "run", "tune"]
