"""Factor analysis of a layer, reported in psych's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, labels
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Caution, Result, constant, extremes, wrapped
from fedstat.results.split import SplitResult
from fedstat.results.tables import coefficient, count, median_and_ends, number, p_equals
from fedstat.stats import number_of_factors
from fedstat.stats import split as _split

Rotation = Literal["varimax", "promax", "oblimin"]
"""Rotations of loadings, by the names that factor_analyzer gives them."""
ROTATIONS: tuple[Rotation, ...] = ("varimax", "promax", "oblimin")
Floats = NDArray[np.float64]
_ROUNDING = 1e-12  # of the longest row of loadings: a shorter one is rounding noise


class ConvergenceWarning(UserWarning):
    """An iteration stopped at its cap; the message says what to do next."""


@dataclass(frozen=True, eq=False, repr=False)
class FactorResult(Result):
    """Factor analysis of a layer's units, as :func:`fedstat.fa` returns it.

    Attributes
    ----------
    communality : array (unit,)
        ν: share of a unit's variance that the common factors explain; NaN for a dead unit (zero variance).
    loadings : array (unit, factor)
        Pattern coefficients, columns in descending order of their sum of squares; NaN rows for dead units.
    correlation : array (unit, unit)
        R; NaN rows and columns for dead units.
    n_factors, n_iter : int
        Number of factors G; number of eigendecompositions, the first of R itself, as R's psych counts.
    converged : bool
        Whether the estimator reached its tolerance before its cap.
    residual : float
        Largest change of a communality in the last step; the KKT residual of bounded estimators.
    heywood : bool array (unit,)
        Communality above 1, an improper solution, or held at 1 by a bound.
    units : array (unit,)
        Labels of the units.
    n_obs, n_clients : int or None
        Rows (client, weight) and clients behind R, where known.
    kappa : float or None
        Eigenvalue share that chose ``n_factors``; None if the number was given.
    method, rotation : str, str or None
        Estimator of ν; rotation of the loadings.
    phi : array (factor, factor) or None
        Correlations of obliquely rotated factors.
    options : dict
        Further arguments of the fit, reused by :func:`fedstat.update`.
    n_starts, n_minima : int
        Starts tried, and how many distinct solutions they ended in.
    agreement : array (unit,) or None
        ICC2 of each unit over clients (:func:`fedstat.icc`), beside ν; NaN where it is undefined: for a dead unit, one
        client, or one weight per unit. None where a matrix of rows or correlations was analysed, without clients.
    of_change : bool
        Whether a baseline was subtracted from the weights.
    center, scale : array (unit,) or None
        Mean and standard deviation of the rows that were analysed; None where only correlations were known.
    """

    communality: Floats
    loadings: Floats
    correlation: Floats
    n_factors: int
    n_iter: int
    converged: bool
    residual: float
    heywood: NDArray[np.bool_]
    units: NDArray[Any]
    n_obs: int | None
    n_clients: int | None
    kappa: float | None
    method: str
    options: dict[str, Any]
    rotation: str | None = None
    phi: Floats | None = None
    n_starts: int = 1
    n_minima: int = 1
    agreement: Floats | None = None
    of_change: bool = False
    center: Floats | None = None
    scale: Floats | None = None

    statistic_name: ClassVar[str] = "nu"
    _figure: ClassVar[str] = "scree"

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: the communality."""
        return self.communality

    @property
    def uniqueness(self) -> Floats:
        """Share of a unit's variance that is its own: 1 − ν, array (unit,)."""
        return 1 - self.communality

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Units with zero variance: no communality, never silently shared; bool array (unit,)."""
        return np.isnan(self.communality)

    @cached_property
    def eigenvalues(self) -> Floats:
        """Eigenvalues of R, descending, one 0 for each dead unit; array (unit,)."""
        live = np.linalg.eigvalsh(self._live)[::-1]
        return np.concatenate([live, np.zeros(int(self.dead.sum()))])

    @property
    def ss_loadings(self) -> Floats:
        """Variance each factor explains, in units of one standardised unit; array (factor,)."""
        pattern = self.loadings[~self.dead]
        phi = np.eye(self.n_factors) if self.phi is None else self.phi
        return np.asarray(np.diagonal(phi @ pattern.T @ pattern))

    @property
    def _live(self) -> Floats:
        return self.correlation[np.ix_(~self.dead, ~self.dead)]

    @property
    def _structure(self) -> Floats:
        pattern = self.loadings[~self.dead]
        return pattern if self.phi is None else pattern @ self.phi

    @cached_property
    def _indices(self) -> dict[str, float]:
        if self.method == "leverage":  # squared eigenvector rows: no factor model that could fit
            return number_of_factors.fit_indices(self._live, self._live * np.nan, self.n_factors, None)
        common = self._structure @ self.loadings[~self.dead].T
        return number_of_factors.fit_indices(self._live, common, self.n_factors, self.n_obs)

    def split(self, *, tau: _split.Tau = 0.5) -> SplitResult:
        """Shared units, those that the other units explain: ν >= τ (FedFac §4.1); see :func:`fedstat.split`."""
        return SplitResult(
            communality=self.communality,
            shared=_split.shared(self.communality, tau=tau),
            threshold=float(_split.threshold(self.communality, tau)),
            tau=tau,
            fit=self,
        )

    def rotate(self, rotation: Rotation) -> FactorResult:
        """Rotate the loadings with factor_analyzer; communalities stay as they are.

        Parameters
        ----------
        rotation : {"varimax", "promax", "oblimin"}
            Units without any loading stay so: Kaiser's weights, which give each unit length 1, are undefined for them.

        Raises
        ------
        ValueError
            If the loadings cannot be rotated so, as those of fewer dimensions than factors.
        """
        check.choice("rotation", rotation, ROTATIONS)
        length = np.where(self.dead, 0, np.linalg.norm(self.loadings, axis=1))
        loaded = length > _ROUNDING * length.max(initial=0)
        if self.n_factors == 1 or not loaded.any():
            return replace(self, rotation=rotation)
        from factor_analyzer import Rotator  # takes scikit-learn along, a second to import

        rotator = Rotator(method=rotation)
        try:
            pattern = rotator.fit_transform(self.loadings[loaded])
        except np.linalg.LinAlgError as error:
            rank = np.linalg.matrix_rank(self.loadings[loaded])
            raise ValueError(
                f"{rotation} cannot rotate loadings of {int(loaded.sum())} units on {self.n_factors} factors, whose "
                f"rank is {rank} ({error}). Lower n_factors or kappa, or use another rotation."
            ) from error
        phi = None if rotation == "varimax" else np.asarray(rotator.phi_)
        order = np.argsort(-np.sum(pattern**2, axis=0))
        loadings = np.where(self.dead[:, None], np.nan, np.zeros_like(self.loadings))
        loadings[loaded] = pattern[:, order]
        return replace(
            self, loadings=loadings, rotation=rotation, phi=None if phi is None else phi[np.ix_(order, order)]
        )

    def tidy(self) -> pd.DataFrame:
        """One row per unit: term, loadings, h2 (communality), icc if known, u2 (1 − h2), complexity, heywood, dead."""
        columns = {f"factor_{m + 1}": self.loadings[:, m] for m in range(self.n_factors)}
        return pd.DataFrame(
            {"term": self.units}
            | columns
            | {"h2": self.communality}
            | ({} if self.agreement is None else {"icc": self.agreement})
            | {
                "u2": self.uniqueness,
                "complexity": number_of_factors.complexity(self.loadings),
                "heywood": self.heywood,
                "dead": self.dead,
            }
        )

    by_unit = tidy

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        table = self.tidy()
        return table.drop(columns=[name for name in table if str(name).startswith("factor_")]), "h2"

    def glance(self) -> pd.DataFrame:
        """One row: sizes, how the fit ended, rank and smallest eigenvalue of R, fit indices, KMO, Bartlett's test."""
        values = self.eigenvalues[: len(self._live)]
        test = (np.nan, 0, np.nan) if self.n_obs is None else number_of_factors.bartlett(self._live, self.n_obs)
        row = {
            "d": len(self.units),
            "n_obs": self.n_obs,
            "n_clients": self.n_clients,
            "n_factors": self.n_factors,
            "kappa": self.kappa,
            "method": self.method,
            "rotation": self.rotation,
            "converged": self.converged,
            "n_iter": self.n_iter,
            "residual": self.residual,
            "n_heywood": int(self.heywood.sum()),
            "n_dead": int(self.dead.sum()),
            "n_starts": self.n_starts,
            "n_minima": self.n_minima,
            "rank": int(np.sum(values > 1e-10 * values[0])),
            "lambda_min": float(values[-1]),
            **self._indices,
            "kmo": number_of_factors.kmo(self._live)[0],
            "bartlett": test[0],
            "bartlett_p": test[2],
        }
        return pd.DataFrame([row])

    def augment(self, z: Any, *, reference: Any = None) -> pd.DataFrame:
        """Factor scores of rows by Thurstone's regression method, standardised rows times R⁻¹ times structure.

        Parameters
        ----------
        z : array, DataFrame or DataArray (row, unit)
            The rows that were analysed, or new ones; they are standardised by the mean and deviation of those that were
            analysed. What the units are like, and not the rows, is in :meth:`tidy`, and beside your own data in
            :meth:`SplitResult.augment`.
        reference : array, DataFrame or DataArray (row, unit), optional
            Rows by whose mean and deviation to standardise, where the result was made from correlations.

        Returns
        -------
        DataFrame (row)
            Columns factor_1, factor_2, ...; the index is that of the rows, such as (client, weight).

        Raises
        ------
        ValueError
            If the rows do not have the result's units, or neither the result nor ``reference`` says by what to
            standardise, or both do.
        """
        if (reference is None) == (self.center is None):
            known = "only correlations" if self.center is None else "the rows that were analysed"
            way_out = "Pass reference=, the rows behind them" if self.center is None else "Leave out reference"
            raise ValueError(f"rows are standardised as those that were analysed; the result knows {known}. {way_out}.")
        if self.center is not None and self.scale is not None:
            center, scale = self.center[~self.dead], self.scale[~self.dead]
        else:
            rows = self._of_live("reference", reference)
            center, scale = rows.mean(0), rows.std(0)
        weight = np.linalg.pinv(self._live, hermitian=True) @ self._structure
        scores = (self._of_live("z", z) - center) / scale @ weight
        return pd.DataFrame(scores, _rows_of(z), [f"factor_{m + 1}" for m in range(self.n_factors)])

    def _of_live(self, name: str, z: Any) -> Floats:
        """Rows as an array (row, unit), without dead units."""
        z = labels.labelled(z, ("row", "unit"))
        z = z.transpose(..., "unit") if isinstance(z, xr.DataArray) and "unit" in z.dims else z
        rows = np.asarray(z, dtype=float)
        if rows.ndim != 2 or rows.shape[1] != len(self.units):
            raise ValueError(f"{name} must have shape (row, {len(self.units)}), but got {rows.shape}")
        if isinstance(z, xr.DataArray) and "unit" in z.coords:
            rows = labels.by_label(name, rows, z["unit"].to_numpy(), self.units, "unit")
        return np.asarray(rows[:, ~self.dead])

    def summary(self, *, rows: int = 12, factors: int = 5) -> str:
        """Report in the words of R's psych: h2, u2, com, SS loadings, RMSR, χ², TLI, RMSEA, BIC.

        Parameters
        ----------
        rows, factors : int
            Number of units to print, by descending h2, and of factors.
        """
        return f"{self!r}\n\n{self._details(rows, factors)}"

    def _details(self, rows: int = 12, factors: int = 5) -> str:
        g = min(factors, self.n_factors)
        table = self.tidy().rename(columns={"complexity": "com"}).sort_values("h2", ascending=False)
        table = table[["term", *(f"factor_{m + 1}" for m in range(g)), "h2", "u2", "com"]].head(rows)
        ss = self.ss_loadings
        d = int((~self.dead).sum())
        variance = pd.DataFrame(
            [ss, ss / d, np.cumsum(ss) / d],
            index=["SS loadings", "Proportion Var", "Cumulative Var"],
            columns=[f"factor_{m + 1}" for m in range(self.n_factors)],
        ).iloc[:, :g]
        cut = "" if rows >= len(self.units) and g == self.n_factors else "(largest h2 and first factors only)"
        return "\n".join(
            [
                f"Loadings {cut}".rstrip(),
                table.to_string(index=False, float_format="%.2f"), "",
                variance.to_string(float_format="%.2f"), "",
                *map(wrapped, self._index_lines()),
            ]
        )  # fmt: skip

    def _index_lines(self) -> list[str]:
        x = self._indices
        rmsr = f"RMSR = {number(x['rmsr'], 3)} (df-corrected {number(x['rmsr_corrected'], 3)})"
        if x["df"] <= 0:
            return [f"{rmsr}; df <= 0: the model has as many parameters as R has correlations: no chi2, TLI, RMSEA"]
        if self.n_obs is None:
            return [f"{rmsr}; chi2, TLI, RMSEA and BIC need n_obs"]
        if np.isnan(x["chi2"]):
            return [f"{rmsr}; chi2, TLI, RMSEA and BIC are undefined: R or the model is singular"]
        return [
            f"{rmsr}; TLI = {number(x['tli'], 3)}; BIC = {number(x['bic'], 1)}",
            f"RMSEA = {number(x['rmsea'], 3)}, 90% CI [{number(x['rmsea_low'], 3)}, {number(x['rmsea_high'], 3)}]",
            (
                f"chi2({x['df']:.0f}) = {number(x['chi2'], 2)}, {p_equals(x['p_value'])}; "
                f"H0: {count(self.n_factors, 'factor')} fit exactly"
            ),
            "All but RMSR assume independent rows; weights of a unit are not independent",
        ]

    def _lines(self) -> list[str]:
        nu, n = self.communality, self.n_clients
        middle, least, most = median_and_ends(nu)
        size = count(len(self.units), "unit")
        if self.n_obs is not None:
            of_clients = f" ({count(n, 'client')} x {self.n_obs // n} weights)" if n and self.n_obs % n == 0 else ""
            size += f", {self.n_obs} rows{of_clients}"
        chosen = f"kappa = {self.kappa:g}" if self.kappa is not None else "given"
        end = "converged in" if self.converged else "NOT converged after"
        end += f" {count(self.n_iter, 'iteration')} (last change {self.residual:.1g})"
        if self.n_starts > 1:
            end += f"; {count(self.n_minima, 'solution')} from {self.n_starts} initial values"
        return [
            f"Factor analysis ({self.method}): {size}{', baseline subtracted' * self.of_change}",
            f"{count(self.n_factors, 'factor')} ({chosen})" + f"; {end}" * (self.method in ("pa", "minres")),
            (
                f"Communality: median {coefficient(middle)}, range {coefficient(least)} to {coefficient(most)}; "
                f"{count(int(self.heywood.sum()), 'Heywood case')}, {int(self.dead.sum())} constant"
            ),
            *extremes(nu, self.units),
            *constant(self.units, self.dead),
        ]

    def cautions(self) -> list[Caution]:
        """Return whether the iteration stopped early, and improper solutions; mostly nothing."""
        found = []
        if not self.converged:
            text = (
                f"communalities still moved by {self.residual:.2g} after {self.n_iter} steps: raise max_iter, or lower "
                "kappa"
            )
            found.append(Caution("Factor analysis not converged", text))
        if n := int(self.heywood.sum()):
            text = (
                f"{n} of {count(len(self.units), 'unit')} with a communality of 1 or more (Heywood cases): the factor "
                "model is improper there, and their order, so the split, depends on where the iteration stops"
            )
            found.append(Caution("Heywood cases", text))
        return found


def _rows_of(z: Any) -> pd.Index | None:
    """Labels of the rows of a matrix (row, unit), where it has any."""
    if isinstance(z, pd.DataFrame):
        return z.index
    rows = [d for d in z.dims if d != "unit"] if isinstance(z, xr.DataArray) else []
    return z.indexes.get(rows[0]) if len(rows) == 1 else None
