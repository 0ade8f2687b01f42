"""Runs that nothing has disturbed, made once for all tests that compare with them."""

from __future__ import annotations

from functools import cache

import jobs
import pytest


@pytest.fixture(scope="session")
def sound_run(tmp_path_factory):
    """Store of a job by its name, and what it holds."""
    folder = tmp_path_factory.mktemp("sound")

    @cache
    def make(name):
        jobs.quietly(jobs.STREAMED[name], folder / name)
        return folder / name, jobs.values(folder / name)

    return make
