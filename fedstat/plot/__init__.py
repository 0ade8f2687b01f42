"""Figures: pure functions (result, run or table, ax=None) -> Axes; ``papers`` has the figures of FedFac's studies."""

from fedstat.plot import papers
from fedstat.plot.client_plots import (
    client_lines,
    client_similarity,
    partition,
    profile,
    similarity_over_rounds,
    weights,
)
from fedstat.plot.factor import communality, loadings, scree, sensitivity, split_map
from fedstat.plot.fedfac import convergence, entropies, freezing, generalization
from fedstat.plot.forests import forest
from fedstat.plot.study import by_setting, critical_difference, method_courses, trade_off
from fedstat.plot.training import (
    client_boxplot,
    differences,
    leakage,
    leakage_grid,
    loss_curves,
    rounds,
    score_curves,
    shares,
)

__all__ = [
    "by_setting",
    "client_boxplot",
    "client_lines",
    "client_similarity",
    "communality",
    "convergence",
    "critical_difference",
    "differences",
    "entropies",
    "forest",
    "freezing",
    "generalization",
    "leakage",
    "leakage_grid",
    "loadings",
    "loss_curves",
    "method_courses",
    "papers",
    "partition",
    "profile",
    "rounds",
    "score_curves",
    "scree",
    "sensitivity",
    "shares",
    "similarity_over_rounds",
    "split_map",
    "trade_off",
    "weights",
]


def __dir__() -> list[str]:
    return __all__
