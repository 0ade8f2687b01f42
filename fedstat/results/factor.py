"""Result of a factor analysis of a layer's units, in the terms of R's psych."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, labels
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Caution, Result, count_constant, describe_constant, extremes, wrapped
from fedstat.results.exports import Headings
from fedstat.results.split import SplitResult
from fedstat.results.tables import coefficient, count, median_and_ends, number, p_equals
from fedstat.stats import number_of_factors
from fedstat.stats import split as _split

Rotation = Literal["varimax", "promax", "oblimin"]
"""Rotations of loadings, named as in factor_analyzer."""
ROTATIONS: tuple[Rotation, ...] = ("varimax", "promax", "oblimin")
Floats = NDArray[np.float64]
_ROUNDING = 1e-12  # relative to the longest row of loadings: a shorter row is rounding noise


class ConvergenceWarning(UserWarning):
    """Warning that an iteration stopped at its maximum; the message says what to do."""


@dataclass(frozen=True, eq=False, repr=False)
class FactorResult(Result):
    """Factor analysis of a layer's units, as :func:`fedstat.fa` returns it.

    Attributes
    ----------
    communality : array (unit,)
        Communality ν: proportion of a unit's variance that the factors explain. NaN for a constant unit.
    loadings : array (unit, factor)
        Pattern coefficients, columns in descending order of their sum of squares. NaN for a constant unit.
    correlation : array (unit, unit)
        R, the correlation matrix of the units. NaN rows and columns for constant units.
    n_factors : int
        Number of factors G.
    n_iter : int
        Number of eigendecompositions, the first of R itself, as R's psych counts iterations.
    converged : bool
        True if the method reached its tolerance within its maximum number of iterations.
    residual : float
        Largest change of a communality in the last iteration; the KKT residual of bounded methods.
    heywood : bool array (unit,)
        True for a Heywood case: a communality above 1, which is improper, or held at 1 by a bound.
    units : array (unit,)
        Names of the units.
    n_obs, n_clients : int or None
        Number of rows (client, weight) and number of clients behind R, if known.
    kappa : float or None
        κ, the proportion of the eigenvalue sum that set ``n_factors``. None if the user set the number.
    method, rotation : str, str or None
        Statistical procedure that estimates ν; rotation of the loadings.
    phi : array (factor, factor) or None
        Correlations of obliquely rotated factors.
    options : dict
        Further arguments of the fit, which :func:`fedstat.update` reuses.
    n_starts, n_minima : int
        Number of initial values tried, and number of distinct solutions that they led to.
    agreement : array (unit,) or None
        ICC2 of each unit over clients (:func:`fedstat.icc`). NaN where it is undefined: for a constant unit, for one
        client, or for one weight per unit. None for the analysis of a matrix of rows or correlations, without clients,
        and for units of a run that changed over unlike numbers of rounds.
    baseline_subtracted : bool
        True if a baseline was subtracted from the weights.
    center, scale : array (unit,) or None
        Mean and standard deviation of the analyzed rows. None for the analysis of a correlation matrix.
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
    baseline_subtracted: bool = False
    center: Floats | None = None
    scale: Floats | None = None

    statistic_name: ClassVar[str] = "nu"
    _figure: ClassVar[str] = "scree"
    _by: ClassVar[str | None] = "communality"
    _headings: ClassVar[Headings] = {
        "unit": "term", "communality": "communality", "ICC2": "icc", "uniqueness": "uniqueness",
        "complexity": "complexity",
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, 1)

    @property
    def statistic(self) -> Floats:
        """Statistic that a split of this result uses: the communality."""
        return self.communality

    @property
    def uniqueness(self) -> Floats:
        """Proportion of a unit's variance that the factors do not explain: 1 − ν; array (unit,)."""
        return 1 - self.communality

    @property
    def constant(self) -> NDArray[np.bool_]:
        """Constant units: their weights have variance 0, so that they have no communality; bool array (unit,)."""
        return np.isnan(self.communality)

    @property
    def untrained(self) -> NDArray[np.bool_]:
        """Constant units that no client changed since the baseline; bool array (unit,)."""
        if not self.baseline_subtracted or self.center is None or self.scale is None:
            return np.zeros(len(self.units), bool)
        return np.asarray(self.constant & (self.center == 0) & (self.scale == 0))

    @cached_property
    def eigenvalues(self) -> Floats:
        """Eigenvalues of R in descending order, with a 0 for each constant unit; array (unit,)."""
        eigenvalues = np.linalg.eigvalsh(self._varying)[::-1]
        return np.concatenate([eigenvalues, np.zeros(int(self.constant.sum()))])

    @property
    def ss_loadings(self) -> Floats:
        """Variance that each factor explains, as a multiple of the variance of a standardized unit; array (factor,)."""
        pattern = self.loadings[~self.constant]
        phi = np.eye(self.n_factors) if self.phi is None else self.phi
        return np.asarray(np.diagonal(phi @ pattern.T @ pattern))

    @cached_property
    def noise_communality(self) -> float:
        """Median communality of white noise with as many units and rows, analyzed alike; NaN if it is unknown.

        It is simulated, see :func:`fedstat.stats.number_of_factors.noise_communality`. Rows of one client are
        dependent, and act as fewer rows, so that noise of as many independent rows is a lower reference. For a test use
        :func:`fedstat.permutation_test`.
        """
        n_varying = int((~self.constant).sum())
        if self.n_obs is None or self.n_obs < 3 or n_varying < 2:
            return np.nan
        init, max_iter, tol = (self.options.get(name) for name in ("init", "max_iter", "tol"))
        fitting: dict[str, Any] = {"init": init} if isinstance(init, str) else {}
        fitting |= {"heywood": "bound"} if self.options.get("heywood") == "bound" else {}
        fitting |= {"n_factors": self.n_factors} if self.kappa is None else {"kappa": self.kappa}
        return number_of_factors.noise_communality(
            n_varying, self.n_obs, method=self.method, max_iter=max_iter, tol=tol, **fitting
        )

    @property
    def _varying(self) -> Floats:
        """R without constant units."""
        return self.correlation[np.ix_(~self.constant, ~self.constant)]

    @property
    def _structure(self) -> Floats:
        """Correlations of units and factors, without constant units; array (unit, factor)."""
        pattern = self.loadings[~self.constant]
        return pattern if self.phi is None else pattern @ self.phi

    @cached_property
    def _indices(self) -> dict[str, float]:
        """Fit indices by their names."""
        if self.method == "leverage":  # leverages define no factor model that could fit
            return number_of_factors.fit_indices(self._varying, self._varying * np.nan, self.n_factors, None)
        common = self._structure @ self.loadings[~self.constant].T
        return number_of_factors.fit_indices(self._varying, common, self.n_factors, self.n_obs)

    def split(self, *, tau: _split.Tau = 0.5) -> SplitResult:
        """Share the units whose communality reaches a threshold: ν >= τ (FedFac §4.1).

        Parameters
        ----------
        tau : float in (0, 1), inf, -inf or Absolute
            Threshold τ, as in :func:`fedstat.split`.

        Returns
        -------
        SplitResult
        """
        return SplitResult(
            communality=self.communality,
            shared=_split.shared(self.communality, tau=tau),
            threshold=float(_split.threshold(self.communality, tau)),
            tau=tau,
            fit=self,
        )

    def rotate(self, rotation: Rotation) -> FactorResult:
        """Rotate the loadings with factor_analyzer, which leaves communalities unchanged.

        Parameters
        ----------
        rotation : {"varimax", "promax", "oblimin"}
            Units with all loadings 0 are not rotated: Kaiser's weights, which give each unit length 1, are undefined
            for them.

        Returns
        -------
        FactorResult

        Raises
        ------
        ValueError
            If the rotation fails, as it does where the loadings have a lower rank than the number of factors.
        """
        check.choice("rotation", rotation, ROTATIONS)
        length = np.where(self.constant, 0, np.linalg.norm(self.loadings, axis=1))
        loaded = length > _ROUNDING * length.max(initial=0)
        if self.n_factors == 1 or not loaded.any():
            return replace(self, rotation=rotation)
        from factor_analyzer import Rotator  # imports scikit-learn, which takes a second

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
        loadings = np.where(self.constant[:, None], np.nan, np.zeros_like(self.loadings))
        loadings[loaded] = pattern[:, order]
        return replace(
            self, loadings=loadings, rotation=rotation, phi=None if phi is None else phi[np.ix_(order, order)]
        )

    def tidy(self) -> pd.DataFrame:
        """Return one row per unit.

        Returns
        -------
        DataFrame (unit)
            term (the unit); communality (ν); icc (agreement, if there are clients); uniqueness (1 − communality);
            complexity (Hofmann's number of factors that a unit loads on); heywood (True for a Heywood case); constant
            (True for a constant unit); factor_1, factor_2, ... (loadings).
        """
        columns = {f"factor_{m + 1}": self.loadings[:, m] for m in range(self.n_factors)}
        return pd.DataFrame(
            {"term": self.units, "communality": self.communality}
            | ({} if self.agreement is None else {"icc": self.agreement})
            | {
                "uniqueness": self.uniqueness,
                "complexity": number_of_factors.complexity(self.loadings),
                "heywood": self.heywood,
                "constant": self.constant,
            }
            | columns
        )

    by_unit = tidy

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the fit.

        Returns
        -------
        DataFrame (1,)
            n_units, n_obs (rows), n_clients, n_factors, kappa, method, rotation; converged, n_iter,
            residual; n_heywood (Heywood cases), n_constant (constant units), n_starts, n_minima; rank and lambda_min
            (smallest eigenvalue) of R; fit indices; kmo (Kaiser-Meyer-Olkin); bartlett and bartlett_p (Bartlett's
            test of sphericity; assumes independent rows).
        """
        values = self.eigenvalues[: len(self._varying)]
        test = (np.nan, 0, np.nan) if self.n_obs is None else number_of_factors.bartlett(self._varying, self.n_obs)
        row = {
            "n_units": len(self.units),
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
            "n_constant": int(self.constant.sum()),
            "n_starts": self.n_starts,
            "n_minima": self.n_minima,
            "rank": int(np.sum(values > 1e-10 * values[0])),
            "lambda_min": float(values[-1]),
            **self._indices,
            "kmo": number_of_factors.kmo(self._varying)[0],
            "bartlett": test[0],
            "bartlett_p": test[2],
        }
        return pd.DataFrame([row])

    def augment(self, z: Any, *, reference: Any = None) -> pd.DataFrame:
        """Compute factor scores of rows by Thurstone's regression method: standardized rows × R⁻¹ × structure.

        For statistics of units see :meth:`tidy`; :meth:`SplitResult.augment` adds them to a table of units.

        Parameters
        ----------
        z : array, DataFrame or DataArray (row, unit)
            The analyzed rows, or new rows. They are standardized by the mean and standard deviation of the analyzed
            rows.
        reference : array, DataFrame or DataArray (row, unit), optional
            Required if the result was made from correlations: rows whose mean and standard deviation are used instead.

        Returns
        -------
        DataFrame (row)
            Columns factor_1, factor_2, ..., with the index of the rows, such as (client, weight).

        Raises
        ------
        ValueError
            If the rows do not have the units of the result. If ``reference`` is missing for a result made from
            correlations, or passed for another result.
        """
        if reference is None and self.center is None:
            raise ValueError(
                "reference is required: the result was made from correlations, and has no mean and SD to standardize "
                "the rows. Pass reference=, the rows behind the correlations."
            )
        if reference is not None and self.center is not None:
            raise ValueError(
                "reference must not be passed: the result standardizes rows by the mean and SD of the analyzed rows. "
                "Remove reference."
            )
        if self.center is not None and self.scale is not None:
            center, scale = self.center[~self.constant], self.scale[~self.constant]
        else:
            rows = self._select_varying("reference", reference)
            center, scale = rows.mean(0), rows.std(0)
        weight = np.linalg.pinv(self._varying, hermitian=True) @ self._structure
        scores = (self._select_varying("z", z) - center) / scale @ weight
        return pd.DataFrame(scores, _get_row_labels(z), [f"factor_{m + 1}" for m in range(self.n_factors)])

    def _select_varying(self, name: str, z: Any) -> Floats:
        """Return rows as an array (row, unit), without constant units."""
        check.unmasked(name, z)
        z = labels.labelled(z, ("row", "unit"))
        z = z.transpose(..., "unit") if isinstance(z, xr.DataArray) and "unit" in z.dims else z
        rows = np.asarray(z, dtype=float)
        if rows.ndim != 2 or rows.shape[1] != len(self.units):
            raise ValueError(f"{name} must have shape (row, {len(self.units)}), but got {rows.shape}")
        if isinstance(z, xr.DataArray) and "unit" in z.coords:
            rows = labels.by_label(name, rows, z["unit"].to_numpy(), self.units, "unit")
        return np.asarray(rows[:, ~self.constant])

    def summary(self, *, rows: int = 12, factors: int = 5) -> str:
        """Return a report in the terms of R's psych: h2, u2, com, SS loadings, RMSR, χ², TLI, RMSEA, BIC.

        Parameters
        ----------
        rows : int
            Number of units to print, in descending order of communality.
        factors : int
            Number of factors to print.
        """
        return f"{self!r}\n\n{self._details(rows, factors)}"

    def _details(self, rows: int = 12, factors: int = 5) -> str:
        g = min(factors, self.n_factors)
        table = self.tidy().rename(columns={"communality": "h2", "uniqueness": "u2", "complexity": "com"})
        loadings = [f"factor_{m + 1}" for m in range(g)]
        table = table.sort_values("h2", ascending=False)[["term", *loadings, "h2", "u2", "com"]].head(rows)
        if table["term"].dtype.kind in "Oc":  # pandas would apply the format to numbers among mixed labels
            table["term"] = table["term"].map(str)
        ss = self.ss_loadings
        d = int((~self.constant).sum())
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
                *map(wrapped, self._format_indices()),
            ]
        )  # fmt: skip

    def _format_indices(self) -> list[str]:
        """Return the lines of fit indices, or the reason why they are undefined."""
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
        rule = f"kappa = {self.kappa:g}" if self.kappa is not None else "given"
        end = "converged in" if self.converged else "NOT converged after"
        end += f" {count(self.n_iter, 'iteration')} (last change {self.residual:.1g})"
        if self.n_starts > 1:
            end += f"; {count(self.n_minima, 'solution')} from {self.n_starts} initial values"
        return [
            f"Factor analysis ({self.method}): {size}{', baseline subtracted' * self.baseline_subtracted}",
            f"{count(self.n_factors, 'factor')} ({rule})" + f"; {end}" * (self.method in ("pa", "minres")),
            (
                f"Communality: median {coefficient(middle)}, range {coefficient(least)} to {coefficient(most)}; "
                f"{count(int(self.heywood.sum()), 'Heywood case')}, {count_constant(self.constant, self.untrained)}"
            ),
            *self._describe_noise(),
            *extremes(nu, self.units),
            *describe_constant(self.units, self.constant, self.untrained),
        ]

    def _describe_noise(self) -> list[str]:
        """Return the line on the communality of white noise, if it is known."""
        if np.isnan(noise := self.noise_communality):
            return []
        test = "; test: fedstat.permutation_test" if (self.n_clients or 0) > 1 else ""
        return [f"  White noise of this shape: median {coefficient(noise)}{test}"]

    def cautions(self) -> list[Caution]:
        """Return cautions on an iteration that did not converge, and on Heywood cases."""
        cautions = super().cautions()
        if not self.converged:
            text = (
                f"communalities still moved by {self.residual:.2g} after {self.n_iter} steps: raise max_iter, or lower "
                "kappa"
            )
            cautions.append(Caution("Factor analysis not converged", text))
        if n := int(self.heywood.sum()):
            text = (
                f"{n} of {count(len(self.units), 'unit')} with a communality of 1 or more (Heywood cases): the factor "
                "model is improper there, and their order, so the split, depends on where the iteration stops"
            )
            cautions.append(Caution("Heywood cases", text))
        return cautions


def _get_row_labels(z: Any) -> pd.Index | None:
    """Return the index of the rows of a matrix (row, unit), if it has one."""
    if isinstance(z, pd.DataFrame):
        return z.index
    rows = [d for d in z.dims if d != "unit"] if isinstance(z, xr.DataArray) else []
    return z.indexes.get(rows[0]) if len(rows) == 1 else None
