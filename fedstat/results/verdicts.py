"""Which weights are nearer to a client's true ones, its own or the mean over clients, and from which layer on."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedstat._later import pd

if TYPE_CHECKING:
    from fedstat.results.components import ComponentsResult

Verdict = Literal["own", "mean", "undecided", "no difference shown beyond noise", "undefined"]
COLUMNS = ("layer", "personal", "conf_low", "conf_high", "p_value")
"""Columns that :func:`personal_from` reads of a table of layers."""


def verdict(personal: float, conf_low: float, conf_high: float, p_value: float, *, level: float = 0.95) -> Verdict:
    """Which weights are nearer to a client's true ones, its own or the mean over clients, as a keyword.

    A client's own weights, trained on all its data, miss its true ones by the noise, σ_e²/R; the mean over clients
    misses them by σ_b² (1 − 1/C) + σ_e²/(R C). Own is nearer, in expected squared error, if and only if σ_b² > σ_e²/R,
    that is personal > 1/2. Better than either are own weights shrunk towards the mean by the factor ``personal`` [1]_
    [2]_.

    Returns
    -------
    str
        "no difference shown beyond noise" where the test at 1 − ``level`` does not reject, which does not say that
        there is none; else "own" if the interval lies above 1/2, "mean" if below it, "undecided" if it holds 1/2;
        "undefined" for weights that are the same in all models.

    References
    ----------
    .. [1] Robinson (1991). That BLUP is a good thing: the estimation of random effects. Statistical Science 6, 15-32.
    .. [2] Efron, Morris (1973). Stein's estimation rule and its competitors: an empirical Bayes approach. JASA 68.

    Examples
    --------
    >>> verdict(0.7, 0.6, 0.8, 1e-4), verdict(0.2, 0.1, 0.3, 1e-3), verdict(0.4, -0.9, 0.8, 0.2)
    ('own', 'mean', 'no difference shown beyond noise')
    """
    if np.isnan([personal, conf_low, conf_high, p_value]).any():
        return "undefined"
    if p_value > 1 - level:
        return "no difference shown beyond noise"
    if conf_low > 0.5:
        return "own"
    return "mean" if conf_high < 0.5 else "undecided"


def personal_from(results: pd.DataFrame | Mapping[str, ComponentsResult], *, level: float = 0.95) -> str:
    """From which layer on is a client's own model nearer to its true weights than the mean over clients is?

    Parameters
    ----------
    results : DataFrame, or mapping of layer to ComponentsResult
        One row per layer, in order of depth, with columns layer, personal, conf_low, conf_high and p_value.
    level : float in (0, 1)
        Confidence level of the intervals in a table; results carry their own.

    Returns
    -------
    str
        The first layer from which on all are "own" (:func:`verdict`), with shares and intervals; or, if there is none,
        the layer that prevents it.

    Raises
    ------
    ValueError
        If there is no layer, a column is missing, or results have different levels.

    Notes
    -----
    Layers are tested from the last backwards, in an order fixed in advance, up to the first that is not "own". The
    intervals therefore need no correction for the number of layers: the chance of naming too early a layer is at most
    the chance that a single interval lies too high (Westfall and Krishen 2001, J. Statistical Planning and Inference
    99, 25-40).

    Examples
    --------
    >>> layers = pd.DataFrame({"layer": ["conv1", "fc1", "fc2"], "personal": [0.1, 0.7, 0.8],
    ...                        "conf_low": [0.0, 0.6, 0.7], "conf_high": [0.2, 0.8, 0.9], "p_value": [0.04, 0, 0]})
    >>> print(personal_from(layers))
    A client's own weights beat the mean over clients from layer fc1 on: personal share fc1 0.70 [0.60, 0.80], fc2 0.80
    [0.70, 0.90]; before it, for conv1 0.10 [0.00, 0.20] the mean beats a client's own.
    Own beats the mean, in squared error of weights, where the share is above 1/2; where it is above 0, the best lies in
    between: the mean of the trained models, moved by that share towards a client's own.
    """
    if not isinstance(results, pd.DataFrame | Mapping):
        raise ValueError(
            "results must be a table with one row per layer, or a mapping such as {'fc1': result}, but got "
            f"{type(results).__name__}"
        )
    if not isinstance(results, pd.DataFrame):
        if len(levels := {r.level for r in results.values()}) > 1:
            raise ValueError(f"layers must have intervals of one level, but got {sorted(levels)}")
        level = next(iter(levels), level)
        rows = [r.layer.assign(layer=name) for name, r in results.items()]
        results = pd.concat(rows) if rows else pd.DataFrame(columns=list(COLUMNS))
    if missing := [c for c in COLUMNS if c not in results.columns]:
        raise ValueError(f"the table of layers must have columns {', '.join(COLUMNS)}, but lacks {', '.join(missing)}")
    if results.empty:
        raise ValueError("the table of layers must have at least one row, but is empty")
    names = [str(x) for x in results["layer"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"the table must have one row per layer, but has {names.count(twice[0])} for {twice[0]!r}. Select "
            "one round, or take several together: fedstat.fl.profile(run, window=10)."
        )
    values = results[list(COLUMNS[1:])].to_numpy(dtype=float)
    verdicts = [verdict(*row, level=level) for row in values]
    shares = [f"{name} {v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" for name, v in zip(names, values, strict=True)]
    first = len(names)
    while first and verdicts[first - 1] == "own":
        first -= 1
    why = (
        "Own beats the mean, in squared error of weights, where the share is above 1/2; where it is above 0, the best "
        "lies in between: the mean of the trained models, moved by that share towards a client's own."
    )
    says = {
        "mean": "for {} the mean beats a client's own", "undecided": "{} is undecided",
        "no difference shown beyond noise": "{} shows no difference beyond noise", "undefined": "{} is undefined",
    }  # fmt: skip
    against = says[verdicts[first - 1]].format(shares[first - 1]) if first else ""
    earlier = [share for share, v in zip(shares[:first], verdicts[:first], strict=True) if v == "own"]
    if earlier:
        against += f" ({', '.join(earlier)} is own, but comes before it)"
    if first == len(names):
        found = f"No layer is shown from which on a client's own weights beat the mean: the last, {against}."
    else:
        found = f"A client's own weights beat the mean over clients from layer {names[first]} on: personal share "
        found += ", ".join(shares[first:]) + (f"; before it, {against}." if first else ", in all layers.")
    return "\n".join(line for text in (found, why) for line in wrap(text, 120, break_long_words=False))
