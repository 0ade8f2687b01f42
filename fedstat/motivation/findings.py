"""Findings of the motivating study: entropies of units, tests of their modes, and correlation with communality."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.check import few, named_options
from fedstat._utils.lazy import pd, xr
from fedstat.motivation import statistics
from fedstat.motivation.experiment import OUTPUTS
from fedstat.motivation.statistics import entropy_errors, with_errors
from fedstat.results.base import columns, wrapped
from fedstat.results.tables import count, interval, p_equals

LEVEL, MOST_PEAKS, DRAWS, ERRORS = 0.05, 3, 199, 100


def require_finished(run: xr.DataTree) -> xr.DataTree:
    """Return a study; raise ValueError that names the cases that are not done."""
    data = run["outputs"].to_dataset()
    if len(missing := data["case"].to_numpy()[~_is_done(run)]):
        raise ValueError(
            f"the study is not finished: it lacks the results of {few(missing)}. Continue it with resume=True "
            "(--resume)."
        )
    return run


def finished_cases(run: xr.DataTree) -> xr.DataTree:
    """Return the cases of a study that are done."""
    return run.isel(case=np.flatnonzero(_is_done(run)), missing_dims="ignore")


def _is_done(run: xr.DataTree) -> NDArray[np.bool_]:
    return run["outputs/done"].to_numpy().astype(bool)


@named_options()
def summary(run: xr.DataTree, *, outputs: tuple[str, ...] = OUTPUTS, draws: int = DRAWS) -> pd.DataFrame:
    """Summarize the outputs in one row per case and kind of output.

    Parameters
    ----------
    run : DataTree
        Result of :func:`fedstat.motivation.study`.
    outputs : tuple of {"own", "common"}
        Kinds of output to summarize.
    draws : int
        Bootstrap samples of both tests.

    Returns
    -------
    DataFrame
        ``accuracy``: mean over clients, on the samples that give the outputs. ``zero_share``: mean over units of the
        proportion of clients with output 0; ``spread``: median over units of the standard deviation over clients.
        ``neurons``, ``dead``: numbers of units with and without entropy (equal outputs in all but k clients).
        ``entropy``, ``q05``, ``q95``: median and quantiles over units, nats; ``entropy_se``: standard error over
        clients of the median, see :func:`fedstat.motivation.statistics.entropy_errors`; ``std_error``: median standard
        error of one unit's entropy. ``p_one_peak``: Silverman's test of one mode; ``p_one_normal``: one normal against
        a mixture of two, with ``bic_gain`` (BIC of one minus BIC of two: positive for two). Both tests assume
        independent units; common initial parameters violate this. ``modes``, ``modes_se``: modes of the density of
        entropies, the least number that is not rejected at 5% (at most 3), and their standard errors over clients.

    Raises
    ------
    ValueError
        If the study is not finished.
    """
    run, rows = require_finished(run), []
    for case in run["outputs"].to_dataset()["case"].to_numpy():
        for name in outputs:
            coords = {"case": case, "outputs": name}
            data, entropy = run["outputs"].to_dataset().sel(coords), run["dispersion"].to_dataset().sel(coords)
            k = json.loads(run.attrs["config"])["k"]
            row = {**coords, "accuracy": float(data["accuracy"].mean())}
            row |= {"zero_share": float(entropy["zero_share"].mean()), "spread": float(entropy["spread"].median())}
            strata = statistics.strata_of(str(case), data["label"].values)
            row |= peaks(data["mean_output"].values, strata, k=k, draws=draws)
            row["std_error"] = float(entropy["std_error"].median())
            rows.append(row)
    return pd.DataFrame(rows)


def peaks(outputs: NDArray, strata: NDArray[np.int64], *, k: int = 3, draws: int = DRAWS) -> dict[str, Any]:
    """Return entropies of the units, their modes and both tests, as columns of :func:`summary`.

    Parameters
    ----------
    outputs : array (client, unit)
    strata : int array (client,)
        Clients with equal values form a stratum of fixed size.
    k, draws : int
    """
    entropy = statistics.dispersion(outputs, k=k)["entropy"]
    live = np.isfinite(entropy)
    x = entropy[live]
    row = {"neurons": len(x), "dead": outputs.shape[1] - len(x)}
    names = ("entropy", "q05", "q95", "entropy_se", "p_one_peak", "p_one_normal", "bic_gain")
    if len(x) < 4 or np.ptp(x) == 0:
        return row | dict.fromkeys(names, math.nan) | {"modes": [], "modes_se": []}
    n = 0
    tests: list[statistics.Peaks] = []
    while n < MOST_PEAKS and (not tests or tests[-1].p_value < LEVEL):
        n += 1
        tests.append(statistics.peaks(x, n, draws=draws))
    mixture = statistics.mixture(x, draws=draws)
    drawn = with_errors(x, entropy_errors(outputs[:, live], strata, k=k, draws=ERRORS))
    q05, median, q95 = np.quantile(x, [0.05, 0.5, 0.95])
    return row | {
        "entropy": median,
        "q05": q05,
        "q95": q95,
        "entropy_se": float(np.median(drawn, axis=1).std(ddof=1)),
        "p_one_peak": tests[0].p_value,
        "p_one_normal": mixture.p_value,
        "bic_gain": float(mixture.bic[0] - mixture.bic[1]),
        "modes": tests[-1].position.tolist(),
        "modes_se": position_errors(drawn, n, len(tests[-1].position)).tolist(),
    }


def position_errors(drawn: NDArray[np.float64], n: int, n_modes: int) -> NDArray[np.float64]:
    """Return standard errors (mode,) of the positions of modes.

    Parameters
    ----------
    drawn : array (draw, unit)
        Entropies of resampled clients.
    n : int
        Number of modes that was not rejected.
    n_modes : int
        Number of modes, usually ``n``. Standard errors are NaN if fewer than 9 in 10 draws have this number.
    """
    positions = [statistics.peaks(x, n).position for x in drawn]
    equal_sized = np.array([p for p in positions if len(p) == n_modes])
    return equal_sized.std(axis=0, ddof=1) if len(equal_sized) >= 0.9 * len(drawn) else np.full(n_modes, math.nan)


def correlations(run: xr.DataTree) -> pd.DataFrame:
    """Return the rank correlation of entropy and communality over units, by case, outputs, on and method.

    Returns
    -------
    DataFrame
        ``spearman`` with ``low`` and ``high``, a 95% CI over clients: ± 1.96 standard deviations of Fisher's z over
        half-samples; ``n_factors`` and ``converged`` of the communality. If ``"pa"`` has not converged, the estimate
        and its interval are those after :data:`fedstat.motivation.statistics.STEPS` iterations, not of the solution.

    Raises
    ------
    ValueError
        If the study is not finished.
    """
    run = require_finished(run)
    relation, fits = run["relation"].to_dataset(), run["split"].to_dataset()[["n_factors", "converged"]]
    low, high = statistics.interval(relation["spearman"].to_numpy(), relation["spearman_half"].to_numpy())
    limits = {"low": relation["spearman"].copy(data=low), "high": relation["spearman"].copy(data=high)}
    bounds = xr.Dataset({"spearman": relation["spearman"], **limits})
    table = bounds.to_dataframe().reset_index()
    return table.merge(fits.to_dataframe().reset_index(), on=["case", "on", "method"]).dropna(subset="spearman")


def report(run: xr.DataTree, *, outputs: str = "own", draws: int = DRAWS) -> str:
    """Return the numbers of :func:`summary` and :func:`correlations` of finished cases, in at most 80 columns."""
    run = finished_cases(run)
    config = json.loads(run.attrs["config"])
    rows = summary(run, outputs=(outputs,), draws=draws).to_dict("records")
    table = correlations(run).query("outputs == @outputs")
    clients, epochs = count(config["clients"], "client"), count(config["local_epochs"], "epoch")
    samples = {"own": "each client's training samples", "common": "a common evaluation set"}[outputs]
    training = f"{epochs}, Adam {config['lr']:g}, batch {config['batch_size']}, seed {config['seed']}"
    coverage = "88% to 93% of simulations with 30 clients, and in 94% to 97% with 100"
    lines = [
        f"{config['data']}: {clients}, MLP with {count(config['hidden'], 'hidden unit')}; {training}",
        f"Outputs: mean activations over {samples}",
        f"Entropy (nats) of unit outputs over {clients}: median (SE), 5% to 95% quantile",
        *(text for row in rows for text in _describe_entropy(row)),
        "Spearman correlation of entropy and communality, unadjusted 95% CIs over clients",
    ]
    names = ["case", "on", "method"]
    cells = [(*(str(row[name]) for name in names), _correlation(row)) for row in table.to_dict("records")]
    lines += columns([("case", "of", "method", "rho [95% CI]"), *cells])
    if not table["converged"].all():
        lines.append(
            f"* pa did not converge in {statistics.STEPS} iterations: estimate and half-samples are those after "
            f"{statistics.STEPS} iterations from principal components. Use minres or a lower --kappa."
        )
    lines += [
        f"kappa = {config['kappa']:g}; pa: at most {statistics.STEPS} iterations",
        f"If entropy and communality are related, the CIs cover the correlation in {coverage}.",
        f"dead units: outputs equal in all but at most {count(config['k'], 'client')}; they have no entropy",
        "Both tests of modes may take a long tail of entropies for a mode.",
    ]
    return "\n".join(map(wrapped, lines))


def _describe_entropy(row: Mapping[Any, Any]) -> list[str]:
    """Return the lines on the entropies of a case: quantiles, and both tests of modes."""
    quantiles = f"{row['entropy']:.2f} ({row['entropy_se']:.2f}), {row['q05']:.2f} to {row['q95']:.2f}"
    dead = f"{count(row['dead'], 'dead unit')}; accuracy {row['accuracy']:.3f}"
    if not row["modes"]:
        return [f"  {row['case']}  {dead}", "    no test of modes: too few units have different entropies"]
    modes = ", ".join(f"{m:.2f} (SE {se:.2f})" for m, se in zip(row["modes"], row["modes_se"], strict=True))
    modes = f"{'mode' if len(row['modes']) == 1 else 'modes'} at {modes}"
    test = "no evidence of more than one mode" if row["p_one_peak"] >= LEVEL else "more than one mode"
    return [
        f"  {row['case']}  {quantiles}; {dead}",
        f"    {test} (Silverman, {p_equals(row['p_one_peak'])}); {modes}",
        f"    one normal vs two: {p_equals(row['p_one_normal'])}, BIC difference {row['bic_gain']:+.1f} (> 0: two)",
    ]


def _correlation(row: Mapping[Any, Any]) -> str:
    mark = "" if row["converged"] else " *"
    return interval(row["spearman"], row["low"], row["high"], 2, sign=False) + mark
