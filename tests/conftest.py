"""Fixtures of several files."""

from __future__ import annotations

import numpy as np
import pytest
from layers import weights

import fedstat.labelled as fs
from fedstat.stats.moments import correlation, moments


@pytest.fixture
def r8() -> np.ndarray:
    return correlation(moments(fs.layer_matrix(weights())))
