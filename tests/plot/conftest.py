"""Figures of a test are closed after it."""

from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")
