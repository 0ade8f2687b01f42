"""Where figures are drawn that are given no axes."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from fedstat import icc, plot


def test_a_second_figure_does_not_fall_on_the_first():
    plt.close("all")
    agreement = icc(np.random.default_rng(0).normal(size=(5, 6, 20)))
    first = plot.forest(agreement)
    table = pd.DataFrame(
        {"layer": ["a", "b"], "round": [1, 1], "reliability": [0.1, 0.6], "conf_low": [0, 0.5], "conf_high": [0.2, 0.7]}
    )
    second = plot.profile(table)
    assert first.figure is not second.figure
    _, empty = plt.subplots()
    assert plot.profile(table) is not empty, "axes of somebody else are left alone, even empty ones"
    assert plot.profile(table, ax=first) is first
    plt.close("all")
