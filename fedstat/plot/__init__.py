"""Figures: pure functions (result or Dataset, ax=None) -> Axes."""

from fedstat.plot._figure import caption, one_legend, style_of
from fedstat.plot.client_plots import (
    client_lines,
    client_similarity,
    partition,
    profile,
    similarity_over_rounds,
    weights,
)
from fedstat.plot.factor import communality, loadings, rounds, scree, sensitivity, split_map
from fedstat.plot.fedfac import (
    convergence,
    entropies,
    fig1,
    fig2,
    freezing,
    generalization,
    heatmap,
    motivation_grid,
    motivation_origin,
    relation,
)
from fedstat.plot.forests import forest
from fedstat.plot.simulation import (
    accuracy,
    kappa_window,
    recovery,
    recovery_grid,
    spectrum,
    spectrum_grid,
    stability,
    study_dataset,
)
from fedstat.plot.study import (
    accuracy_grid,
    by_setting,
    critical_difference,
    method_courses,
    origin,
    stability_grid,
    study_grid,
    trade_off,
)
from fedstat.plot.training import (
    accuracy_curves,
    client_boxplot,
    differences,
    leakage,
    leakage_grid,
    loss_curves,
    shares,
)

__all__ = [
    "accuracy",
    "accuracy_curves",
    "accuracy_grid",
    "by_setting",
    "caption",
    "client_boxplot",
    "client_lines",
    "client_similarity",
    "communality",
    "convergence",
    "critical_difference",
    "differences",
    "entropies",
    "fig1",
    "fig2",
    "forest",
    "freezing",
    "generalization",
    "heatmap",
    "kappa_window",
    "leakage",
    "leakage_grid",
    "loadings",
    "loss_curves",
    "method_courses",
    "motivation_grid",
    "motivation_origin",
    "one_legend",
    "origin",
    "partition",
    "profile",
    "recovery",
    "recovery_grid",
    "relation",
    "rounds",
    "scree",
    "sensitivity",
    "shares",
    "similarity_over_rounds",
    "spectrum",
    "spectrum_grid",
    "split_map",
    "stability",
    "stability_grid",
    "study_dataset",
    "study_grid",
    "style_of",
    "trade_off",
    "weights",
]


def __dir__() -> list[str]:
    return __all__
