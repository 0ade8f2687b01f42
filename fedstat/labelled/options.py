"""Further arguments of the verbs: what editors and type checkers know of ``**options``."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from fedstat.labelled.factor import Heywood
from fedstat.results import Rotation
from fedstat.stats import entropy, factor, split


class _FitOptions(TypedDict, total=False):
    """Arguments of :func:`fedstat.fa` that every verb which repeats its analysis takes.

    Attributes
    ----------
    n_factors : int, optional
        A given number of factors instead of the κ rule.
    start : {"pc", "smc"} or array (unit,)
        Communalities to start from.
    max_iter : int, optional
        Cap on the eigendecompositions.
    tol : float, optional
        Stop when no communality changes by more than this.
    """

    n_factors: int | None
    start: factor.Start
    max_iter: int | None
    tol: float | None


class ReplicateOptions(_FitOptions, total=False):
    """Further arguments of :func:`fedstat.bootstrap` and :func:`fedstat.permutation_test`.

    Attributes
    ----------
    method : {"pa", "minres", "pc", "leverage"}
        Estimator of the communalities.
    heywood : {"allow", "bound"}
        Communalities above 1 are kept and flagged, or clipped to 1 in every step.
    """

    method: factor.Method
    heywood: Literal["allow", "bound"]


class SplitOptions(_FitOptions, total=False):
    """Further arguments of :func:`fedstat.split`.

    Attributes
    ----------
    method : {"pa", "minres", "pc", "leverage", "icc"}
        Estimator of the communalities, or agreement between clients.
    rotation : {"varimax", "promax", "oblimin"}, optional
        Rotation of the loadings.
    n_starts, seed : int
        Random starts, and their seed.
    heywood : {"allow", "bound", "error"}
        Communalities above 1 are kept and flagged, clipped to 1 in every step, or an error that names the units.
    fdr, margin : float in (0, 1)
        With ``tau="test"``: false discovery rate, and the personal share from which on a unit is personal.
    undecided : {"shared", "personal"}
        With ``tau="test"``: what becomes of units that are not shown to be either.
    covariate : array (client,)
        With ``tau="test"``: what clients are adjusted for, see :func:`fedstat.variance_components`.
    """

    method: split.Method
    rotation: Rotation | None
    n_starts: int
    seed: int
    heywood: Heywood
    fdr: float
    margin: float
    undecided: Literal["shared", "personal"]
    covariate: Any


class EntropyOptions(TypedDict, total=False):
    """Further arguments of :func:`fedstat.knn_entropy`.

    Attributes
    ----------
    ties : {"error", "atoms", "jitter"}
        What to do where more than k samples share one value.
    resolution : float, optional
        Step of the grid the values were rounded to; required by "jitter".
    seed : int
        Seed of the jitter.
    axis, feature_axis : int
        Axes of the samples and of their coordinates, in an array or tensor.
    """

    ties: entropy.Ties
    resolution: float | None
    seed: int
    axis: int
    feature_axis: int | None
