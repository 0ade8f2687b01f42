"""A mixed model of methods and settings: fixed effects and their interaction, random intercepts of seeds."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat.labelled import comparison

if TYPE_CHECKING:
    import pandas as pd


class Mixed(NamedTuple):
    """A linear model with random intercepts.

    Attributes
    ----------
    table : DataFrame
        Fixed effects: ``term``, ``estimate``, ``std_error``, ``statistic``, ``df``, ``p_value``, ``conf_low``,
        ``conf_high``.
    group_variance, residual_variance : float
        In units of the value, squared.
    n, groups : int
    converged : bool
    singular : bool
        The group variance is estimated at its boundary, zero.
    note : str
        What to make of a fit that is singular or has not converged; "" where all is well.
    """

    table: pd.DataFrame
    group_variance: float
    residual_variance: float
    n: int
    groups: int
    converged: bool
    singular: bool
    note: str


def mixed(
    data: pd.DataFrame,
    *,
    reference: str | None = None,
    value: str = "accuracy",
    method: str = "method",
    heterogeneity: str = "heterogeneity",
    group: str = "seed",
    level: float = 0.95,
) -> Mixed:
    """Mixed model ``value ~ method * heterogeneity + (1 | group)``, by restricted maximum likelihood.

    Parameters
    ----------
    data : DataFrame
        One row per method, heterogeneity and group; rows whose value is NaN are left out.
    reference : str, optional
        Method that the others are compared with; the first one by default. Of a categorical heterogeneity the first
        level is the reference.
    value, method, heterogeneity, group : str
        Columns. A numeric heterogeneity enters as a number, any other as levels.
    level : float in (0, 1)

    Returns
    -------
    Mixed
        Tests and intervals take t with N − groups − (terms − 1) degrees of freedom, as R's nlme does for effects that
        vary within groups: normal quantiles are too short with a handful of seeds.

    Raises
    ------
    ValueError
        If there is one group only, a combination of method and heterogeneity has no value, no residual is left, or
        as :func:`fedstat.compare`.

    Notes
    -----
    Where the group variance is estimated as zero, REML is ordinary least squares; that fit is returned, and ``note``
    says so. One residual variance serves all methods: with one of three varying 20 times as much, tests at 0.05 reject
    true hypotheses in about 0.08.

    Examples
    --------
    >>> import pandas as pd
    >>> rng = np.random.default_rng(0)
    >>> rows = [(m, h, s, m == "b") for m in "ab" for h in ("iid", "skewed") for s in range(4)]
    >>> data = pd.DataFrame(rows, columns=["method", "heterogeneity", "seed", "accuracy"])
    >>> data["accuracy"] += rng.normal(scale=0.1, size=16)
    >>> mixed(data).table["term"].tolist()
    ['(intercept)', 'method[b]', 'heterogeneity[skewed]', 'method[b]:heterogeneity[skewed]']
    """
    import pandas as pd
    from statsmodels.regression.linear_model import OLS

    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    data = comparison.complete_rows(data, value, method, heterogeneity, group).dropna()
    groups = data[group].nunique()
    if groups < 2:
        raise ValueError(f"a random intercept needs at least 2 values of {group!r}, but got {groups}")
    design = _design(data, method, heterogeneity, reference)
    comparison.require_single_values(data, method, [heterogeneity, group])
    df = len(data) - groups - (design.shape[1] - 1)
    if df < 1:
        raise ValueError(
            f"{design.shape[1]} terms and {groups} groups leave no residual of {len(data)} values. "
            f"Add values of {group!r}."
        )
    y, x = data[value].to_numpy(dtype=np.float64), design.to_numpy()
    plain = OLS(y, x).fit()
    scale = math.sqrt(plain.scale)
    if scale <= 1e-12 * np.abs(y).max():
        raise ValueError(f"{value!r} does not vary within methods and levels, so there is no error to compare with")
    ratio, failed = 0.0, ""
    member = pd.get_dummies(data[group]).to_numpy(dtype=np.float64)
    singular, note = _at_boundary(plain, member), ""
    if singular:
        note = f"singular fit: the variance of {group!r} is estimated as 0, so this is ordinary least squares"
    else:
        ratio, failed = _ratio(y / scale, x, member.argmax(axis=1))
        if failed:
            note = f"the mixed model has not converged ({failed}): do not rely on its standard errors"
    fit = _generalised(y, x, member, ratio)
    variances = (ratio * float(fit.scale), float(fit.scale))
    estimate, error = fit.params, fit.bse
    table = pd.DataFrame({"term": list(design.columns), "estimate": estimate, "std_error": error})
    table["statistic"], table["df"] = table["estimate"] / table["std_error"], df
    table["p_value"] = 2 * scipy.stats.t.sf(table["statistic"].abs(), df)
    half = float(scipy.stats.t.ppf(0.5 + level / 2, df)) * table["std_error"]
    table["conf_low"], table["conf_high"] = table["estimate"] - half, table["estimate"] + half
    return Mixed(table, *variances, len(data), groups, not failed, singular, note)


def _at_boundary(plain: Any, member: NDArray[np.float64]) -> bool:
    """Whether the restricted likelihood falls as the group variance leaves 0: its score at 0 is not positive."""
    sums = member.T @ plain.resid
    free = np.trace(member.T @ member) - np.square(np.linalg.qr(plain.model.exog)[0].T @ member).sum()
    return bool(sums @ sums <= plain.scale * free)


def _ratio(y: NDArray[np.float64], x: NDArray[np.float64], groups: NDArray[np.int64]) -> tuple[float, str]:
    """Group variance over residual variance by REML, and what went wrong, if anything."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            fit = MixedLM(y, x, groups).fit(reml=True, method=["bfgs", "lbfgs", "powell"], gtol=1e-8)
        except (np.linalg.LinAlgError, ValueError) as error:
            return 0.0, f"{error}; least squares instead"
    reason = "" if fit.converged else "; ".join(dict.fromkeys(str(w.message) for w in said)) or "no reason given"
    return float(np.asarray(fit.cov_re).item() / fit.scale), reason


def _generalised(y: NDArray[np.float64], x: NDArray[np.float64], member: NDArray[np.float64], ratio: float) -> Any:
    """Generalised least squares at a ratio of variances: ordinary ones of partly centred groups."""
    from statsmodels.regression.linear_model import OLS

    part = member * (1 - 1 / np.sqrt(1 + ratio * member.sum(axis=0))) / member.sum(axis=0)
    return OLS(y - part @ (member.T @ y), x - part @ (member.T @ x)).fit()


def _design(data: pd.DataFrame, method: str, heterogeneity: str, reference: str | None) -> pd.DataFrame:
    """Columns of the fixed effects: levels against the first, products for the interaction."""
    methods = list(dict.fromkeys(data[method]))
    if reference is not None:
        methods.insert(0, methods.pop(methods.index(check.choice("reference", reference, methods))))
    import pandas as pd

    numeric = pd.api.types.is_numeric_dtype(data[heterogeneity])
    if not numeric:
        levels = list(dict.fromkeys(data[heterogeneity]))
        seen = set(zip(data[method], data[heterogeneity], strict=True))
        missing = [f"{m} in {h}" for h in levels for m in methods if (m, h) not in seen]
        if missing:
            raise ValueError(
                f"every method needs a value at every {heterogeneity!r}, but got none for {'; '.join(missing)}. "
                "Leave out those methods or levels."
            )
        effects = {f"heterogeneity[{h}]": (data[heterogeneity] == h).astype(float) for h in levels[1:]}
    else:
        effects = {"heterogeneity": data[heterogeneity].astype(float)}
    of_method = {f"method[{m}]": (data[method] == m).astype(float) for m in methods[1:]}
    columns = {"(intercept)": pd.Series(1.0, index=data.index)} | of_method | effects
    columns |= {f"{m}:{h}": x * z for m, x in of_method.items() for h, z in effects.items()}
    design = pd.DataFrame(columns)
    if np.linalg.matrix_rank(design.to_numpy()) < design.shape[1]:
        raise ValueError(
            f"the effects of {method!r} and {heterogeneity!r} cannot be told apart: "
            f"a method needs at least 2 values of a numeric {heterogeneity!r}"
        )
    return design
