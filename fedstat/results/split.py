"""The split of a layer's units into shared and client-specific ones, with what clients agree on beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fedstat._later import pd
from fedstat.results.base import Result, line, listing
from fedstat.results.joined import beside
from fedstat.results.numbers import coefficient
from fedstat.stats import split as _split

if TYPE_CHECKING:
    from fedstat.results.components import ComponentsResult
    from fedstat.results.factor import FactorResult
    from fedstat.results.icc import IccResult

Floats = NDArray[np.float64]


class AgreementWarning(UserWarning):
    """Clients agree less on the units that a split calls shared than on those it calls personal."""


@dataclass(frozen=True, eq=False, repr=False)
class SplitResult(Result):
    """Shared and client-specific units of a layer, as :func:`fedstat.split` returns it.

    A shared unit is one that the other units explain (communality ν at or above the threshold) where ``fit`` is a
    factor analysis; one on which clients agree (ICC2 at or above the threshold) where it is an :class:`IccResult`; and
    one whose personal share is shown to be below the threshold, or, by default, undecided, where it is a
    :class:`ComponentsResult`.

    Attributes
    ----------
    communality : array (unit,)
        ν; NaN for a dead unit, and throughout where the split is by agreement.
    shared : bool array (unit,)
        ζ: True for a unit that all clients share.
    threshold : float
        Value that :attr:`statistic` had to reach.
    tau : float, Absolute or "test"
        The threshold as it was asked for: a quantile, ±inf, a value, or a test.
    fit : FactorResult, IccResult or ComponentsResult
        Analysis that the split rests on.
    outcome : str array (unit,) or None
        Of a test: "shared" or "personal" where that is shown, else "undecided"; "dead".
    fdr : float or None
        False discovery rate of the test.
    """

    communality: Floats
    shared: NDArray[np.bool_]
    threshold: float
    tau: _split.Tau | Literal["test"]
    fit: FactorResult | IccResult | ComponentsResult
    outcome: NDArray[np.str_] | None = None
    fdr: float | None = None
    _figure: ClassVar[str] = "communality"

    @property
    def icc(self) -> Floats | None:
        """Do clients agree: ICC2 of each unit, array (unit,); None where the split was made without clients."""
        return self.fit.agreement

    @property
    def factors(self) -> FactorResult:
        """The factor analysis behind ν; ValueError where the split is by agreement."""
        if self.fit.statistic_name != "nu":
            raise ValueError(
                "the split is by agreement between clients (method='icc'), which has no factors, loadings or "
                "eigenvalues. Split by 'pa', 'minres', 'pc' or 'leverage' for these."
            )
        return cast("FactorResult", self.fit)

    @property
    def statistic(self) -> Floats:
        """Statistic that the threshold applies to: ν, ICC2 or the personal share, as ``fit`` has it; array (unit,)."""
        return self.fit.statistic

    @property
    def group(self) -> NDArray[np.str_]:
        """``"shared"``, ``"personal"`` or ``"dead"``, array (unit,); with tau = −inf dead units are shared too."""
        rest = np.where(self.fit.dead, "dead", "personal")
        return np.where(self.shared, "shared", rest)

    @property
    def margin(self) -> Floats:
        """How far each unit's :attr:`statistic` is from the threshold; array (unit,)."""
        return self.statistic - self.threshold

    @property
    def contradicted(self) -> bool:
        """Whether clients agree less on shared units than on personal ones, grossly and not by chance.

        See :func:`fedstat.stats.split.contradicted`.
        """
        if self.icc is None:
            return False
        known = self._labels != "undecided"
        return _split.contradicted(self.shared[known], self.icc[known], self.fit.n_clients or 0)

    @property
    def _labels(self) -> NDArray[np.str_]:
        """Labels that units have evidence for: outcomes of a test, else groups."""
        return self.group if self.outcome is None else self.outcome

    def tidy(self) -> pd.DataFrame:
        """One row per unit: the columns of the factor analysis, agreement or test, then group and margin.

        The column ``h2`` holds the communality, ``icc`` the agreement between clients, where there are any. Of a test
        ``outcome`` stands beside ``group``, the split that was applied.
        """
        table = self.fit.by_unit().assign(group=self.group)
        return (table if self.outcome is None else table.assign(outcome=self.outcome)).assign(margin=self.margin)

    def augment(self, data: Any = None) -> Any:
        """Group, statistics and margin of every unit, beside what you know of the units: broom's ``augment``.

        Parameters
        ----------
        data : DataFrame, Dataset, DataArray, array or tensor, optional
            A DataFrame with a column ``unit`` (or the units as its index, or a row for each in their order), which may
            name a unit in several rows; or the weights, such as the Dataset ``run["weights/fc1"]``.

        Returns
        -------
        DataFrame (unit) or Dataset
            Your columns, in your order, then group; h2 (communality ν) where there are factors; icc where there are
            clients; personal and outcome where the split is by a test; margin. Of weights a Dataset, in which these
            are variables over ``unit``. Without data, unit and these columns.

        Raises
        ------
        ValueError
            If ``data`` has other units than the split, or a column of one of these names.

        Examples
        --------
        >>> from fedstat import icc
        >>> rng = np.random.default_rng(0)
        >>> weights = rng.normal(size=(1, 3, 20)) + np.array([0.1, 0.2, 3])[:, None] * rng.normal(size=(8, 3, 20))
        >>> mine = pd.DataFrame({"unit": [2, 0], "note": ["edges", "stripes"]})
        >>> icc(weights).split(tau=0.5).augment(mine)[["unit", "note", "group"]]
           unit     note     group
        0     2    edges  personal
        1     0  stripes    shared
        """
        table = self.tidy()
        known = [name for name in ("outcome", "h2", "icc", "personal") if name in table]
        return beside(table[["term", "group", *known, "margin"]].rename(columns={"term": "unit"}), data)

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        order = {"nu": "h2", "ICC2": "icc", "personal share": "personal"}
        return self.augment(), order[self.fit.statistic_name]

    def glance(self) -> pd.DataFrame:
        """One row: tau, threshold, n_shared, n_personal, their median ICC2 (icc_shared, icc_personal), fit's row.

        Of a test also n_shown_shared, n_shown_personal and n_undecided.
        """
        row: dict[str, Any] = {"tau": str(self.tau), "threshold": self.threshold}
        row |= {f"n_{name}": int((self.group == name).sum()) for name in ("shared", "personal")}
        row |= {f"n_{name.replace(' ', '_')}": n for name, n in self._outcomes().items()}
        row |= {f"icc_{name}": self.median_icc(name) for name in ("shared", "personal")}
        return pd.concat([pd.DataFrame([row]), self.fit.glance()], axis=1)

    def summary(self) -> str:
        """Return the split, then the summary of the analysis behind it."""
        return f"{self!r}\n\n{self.fit.summary()}"

    def median_icc(self, group: str) -> float:
        """Median ICC2 over the units of a :attr:`group`, of a test over those of an outcome; NaN where none has any."""
        if self.icc is None:
            return np.nan
        known = self.icc[(self._labels == group) & ~np.isnan(self.icc)]
        return float(np.median(known)) if len(known) else np.nan

    def _outcomes(self) -> dict[str, int]:
        """How many units a test shows to be shared, to be personal, and leaves undecided; nothing of other splits."""
        if self.outcome is None:
            return {}
        names = {"shown shared": "shared", "shown personal": "personal", "undecided": "undecided"}
        return {says: int((self.outcome == name).sum()) for says, name in names.items()}

    def _rule(self) -> list[str]:
        if self.outcome is None:
            return [f"  tau {self.tau}: {self.fit.statistic_name} >= {self.threshold:.4g} is shared"]
        goes = set(self.group[self.outcome == "undecided"].tolist())
        shared = f"shared: personal share shown to be below {self.threshold:.4g}"
        lines = [f"  {shared}; personal: above it; false discovery rate {self.fdr:.2g}"]
        return [*lines, *(f"  undecided units are taken for {name}" for name in goes)]

    def __repr__(self) -> str:
        groups = self.group
        count = {name: int((groups == name).sum()) for name in ("shared", "personal", "dead")}
        count = (self._outcomes() or {"shared": count["shared"], "personal": count["personal"]}) | {
            "dead": count["dead"]
        }
        by_margin = np.argsort(np.where(np.isnan(self.margin), np.inf, np.abs(self.margin)))
        close = [f"{self.fit.units[j]} {self.margin[j]:+.3f}" for j in by_margin[:6] if not self.fit.dead[j]]
        head = f"Split of {len(groups)} units: " + ", ".join(f"{n} {name}" for name, n in count.items())
        lines = [head, *self._rule()]
        if np.isfinite(self.threshold):
            lines.append(listing("  nearest to the threshold:", close))
        median = {name: coefficient(self.median_icc(name)) for name in ("shared", "personal", "undecided")}
        if known := [f"{value} on {name} units" for name, value in median.items() if value != "-"]:
            end = "; LESS on the shared" if self.contradicted else ""
            lines.append(f"  do clients agree? median ICC2 {', '.join(known)}{end}")
        return "\n".join(map(line, [*lines, *repr(self.fit).splitlines()]))
