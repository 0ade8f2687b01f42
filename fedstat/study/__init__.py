"""Many runs: by name, in grids, tuned, and in tables."""

from fedstat.study.compare import compare_runs
from fedstat.study.experiment import run
from fedstat.study.outcomes import FailedRunsError
from fedstat.study.run_settings import Settings
from fedstat.study.tuning import tune

__all__ = ["FailedRunsError", "Settings", "compare_runs", "run", "tune"]


def __dir__() -> list[str]:
    return __all__
