"""Split of a layer that a run made and stored while it trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd
from fedstat.results.base import Caution, Result, describe_constant
from fedstat.results.exports import Headings
from fedstat.results.tables import coefficient, count, join_columns

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class StoredSplitResult(Result):
    """Split of a layer that a run used in a round, as :func:`fedstat.split` reads it from the run.

    It holds what the run stored. Loadings, eigenvalues and the value of the threshold are not stored.

    Attributes
    ----------
    shared : bool array (unit,)
        True for a shared unit: all clients share all its incoming weights.
    communality : array (unit,)
        Communality ν; NaN without factor analysis and for constant units.
    icc : array (unit,)
        ICC2; NaN if agreement did not decide the split.
    units : array (unit,)
        Names of the units.
    layer : str
        Name of the layer.
    round : int
        Round whose aggregation used the split.
    algorithm : str
        Name of the algorithm.
    settings : dict
        Settings of the algorithm, such as kappa, tau and estimator.
    n_factors, n_iter : int
        Number of factors and of iterations; 0 without factor analysis.
    converged : bool
        True if the factor analysis converged.
    decided : bool array (unit,) or None
        For a split by a test: True for a unit that the test concludes to be shared or personal.
    """

    shared: NDArray[np.bool_]
    communality: Floats
    icc: Floats
    units: NDArray[Any]
    layer: str
    round: int
    algorithm: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    n_factors: int = 0
    n_iter: int = 0
    converged: bool = True
    decided: NDArray[np.bool_] | None = None
    _figure: ClassVar[str] = "communality"
    _captioned: ClassVar[tuple[int, ...]] = (0, 1, 2)

    @property
    def _headings(self) -> Headings:  # type: ignore[override]
        columns: Headings = {"unit": "term", "group": "group", "conclusion": "conclusion"}
        statistic: Headings = {"nu": {"communality": "communality"}, "ICC2": {"ICC2": "icc"}}.get(
            self.statistic_name or "", {}
        )
        return {**columns, **statistic}

    @property
    def statistic_name(self) -> str | None:
        """Statistic that decided the split: "nu", "ICC2", or None if the algorithm fixed the split."""
        if np.isfinite(self.communality).any():
            return "nu"
        return "ICC2" if np.isfinite(self.icc).any() else None

    @property
    def statistic(self) -> Floats:
        """Communality, or ICC2 if agreement decided; array (unit,)."""
        return self.icc if self.statistic_name == "ICC2" else self.communality

    @property
    def group(self) -> NDArray[np.str_]:
        """Group of each unit: "shared", "personal" or "constant" (without a statistic); array (unit,)."""
        is_constant = np.isnan(self.statistic) & (self.statistic_name is not None)
        return np.where(self.shared, "shared", np.where(is_constant, "constant", "personal"))

    @property
    def conclusion(self) -> NDArray[np.str_] | None:
        """Conclusion of the test of each unit: its group, or "inconclusive"; array (unit,). None without a test."""
        return None if self.decided is None else np.where(self.decided, self.group, "inconclusive")

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            term (the unit); group (shared, personal or constant); conclusion, for a split by a test; communality and
            icc (NaN if they did not decide the split).
        """
        conclusion = {} if self.conclusion is None else {"conclusion": self.conclusion}
        return pd.DataFrame(
            {"term": self.units, "group": self.group} | conclusion | {"communality": self.communality, "icc": self.icc}
        )

    def augment(self, data: Any = None) -> Any:
        """Add the group and the statistics of each unit to data about the units, as :meth:`SplitResult.augment` does.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            As in :meth:`SplitResult.augment`.

        Returns
        -------
        DataFrame (unit) or Dataset
            The rows and columns of ``data``, then the columns of :meth:`tidy`.
        """
        return join_columns(self.tidy().rename(columns={"term": "unit"}), data)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the split.

        Returns
        -------
        DataFrame (1,)
            algorithm, round; kappa, tau and method (None if the algorithm has no such setting); n_units, n_shared,
            n_personal, n_constant (units); n_factors, n_iter, converged of the factor analysis.
        """
        row: dict[str, Any] = {"algorithm": self.algorithm, "round": self.round}
        row |= {name: self.settings.get(key) for name, key in _SETTINGS.items()}
        row |= {"n_units": len(self.units)}
        row |= {f"n_{name}": int((self.group == name).sum()) for name in ("shared", "personal", "constant")}
        return pd.DataFrame([row | {"n_factors": self.n_factors, "n_iter": self.n_iter, "converged": self.converged}])

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        name = {"nu": "communality", "ICC2": "icc"}.get(self.statistic_name or "")
        return self.tidy(), name

    def _lines(self) -> list[str]:
        n = {name: int((self.group == name).sum()) for name in ("shared", "personal", "constant")}
        size = count(len(self.units), "unit")
        return [
            f"Split of {size}: {n['shared']} shared, {n['personal']} personal, {n['constant']} constant",
            f"Stored by the run: {self.algorithm}, round {self.round}, layer {self.layer}",
            *self._describe_rule(),
            *describe_constant(self.units, self.group == "constant"),
            "A new analysis takes an argument such as method='icc' or baseline=None",
        ]

    def _describe_rule(self) -> Iterator[str]:
        """Yield lines on the rule, the factor analysis and the values of the statistic by group."""
        if (name := self.statistic_name) is None:
            yield f"Rule: set by {self.algorithm}, which did not analyze the layer"
            return
        statistic = "communality" if name == "nu" else "agreement (ICC2)"
        if analyzed := _ANALYZED.get(self.settings.get("on", self.algorithm.partition("-")[2])):
            yield f"Analyzed: {analyzed}"
        values = {column: self.settings.get(setting) for column, setting in _SETTINGS.items()}
        listed = ", ".join(f"{column} = {value}" for column, value in values.items() if value is not None)
        yield f"Rule: by {statistic}" + (f" ({listed})" if listed else "")
        if name == "nu":
            ended = "converged" if self.converged else "did not converge"
            yield f"{count(self.n_factors, 'factor')}; {ended} in {count(self.n_iter, 'iteration')}"
        ranges = []
        for group in ("shared", "personal"):
            x = self.statistic[(self.group == group) & np.isfinite(self.statistic)]
            ranges += [f"{coefficient(x.min())} to {coefficient(x.max())} on {group}"] if len(x) else []
        yield f"{statistic.capitalize() if name == 'nu' else 'Agreement (ICC2)'}: {', '.join(ranges)} units"
        if self.decided is not None:
            yield f"{int((~self.decided).sum())} of {count(len(self.units), 'unit')} inconclusive"

    def cautions(self) -> list[Caution]:
        """Return a caution if the factor analysis did not converge, or gave communalities of 1 or more."""
        cautions = []
        if self.statistic_name == "nu":
            if not self.converged:
                text = "the factor analysis of this round did not converge"
                cautions.append(Caution("Factor analysis not converged", text))
            if n := int((self.communality >= 1).sum()):
                text = f"{n} of {count(len(self.units), 'unit')} with a communality of 1 or more (Heywood cases)"
                cautions.append(Caution("Heywood cases", text))
        return cautions


_ANALYZED = {
    "weights": "weights before averaging, nothing subtracted",
    "updates": "changes of the weights in the round",
    "static": "weights of all clients, each trained alone before round 1",
}
"""Weights that an algorithm analyzed, by its setting ``on``; static FedFac has none."""
_SETTINGS = {"method": "estimator", "kappa": "kappa", "tau": "tau"}
"""Columns of a table, and the algorithm's settings that they hold."""
