"""Where the tests find the published data sets: ../shared/data beside the repository, which not every machine has."""

import os
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[3] / "shared" / "data"


def require_real_data() -> Path:
    """The folder; without it the test is skipped, and in CI (CI=true) it fails."""
    if not PLACE.is_dir():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no published data sets at {PLACE}")
    return PLACE
