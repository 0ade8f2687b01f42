"""What the motivating study says: entropies of the neurons, whether they have two peaks, and what communality knows."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.lazy import pd, xr
from fedstat.motivation import statistics
from fedstat.motivation.experiment import OUTPUTS
from fedstat.motivation.statistics import entropy_errors, with_errors
from fedstat.results.base import aligned
from fedstat.results.tables import NONE, interval

LEVEL, MOST_PEAKS, DRAWS, ERRORS = 0.05, 3, 199, 100


def summary(run: xr.DataTree, *, outputs: tuple[str, ...] = OUTPUTS, draws: int = DRAWS) -> pd.DataFrame:
    """One row per case and kind of output.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.motivation.study` returns.
    outputs : tuple of {"own", "common"}
        Kinds of output to be summarised.
    draws : int
        Bootstrap samples of both tests.

    Returns
    -------
    DataFrame
        ``accuracy``: mean over clients, on the samples whose outputs are shown. ``zero_share``: mean over neurons of
        the share of clients with output 0; ``spread``: median over neurons of the standard deviation over clients.
        ``neurons``, ``dead``: with entropy, and without (tied for all but k clients). ``entropy``, ``q05``, ``q95``:
        median and quantiles over neurons, nats; ``entropy_se``: standard error over clients of the median, see
        :func:`fedstat.motivation.statistics.entropy_errors`; ``std_error``: median standard error of one neuron's
        entropy. ``p_one_peak``: Silverman's test of one peak; ``p_one_normal``: one normal against a mixture of two,
        with ``bic_gain`` (of one less of two: positive for two). Both treat neurons as independent, which is not quite
        true of neurons with a common start. ``modes``, ``modes_se``: peaks of the density of entropies, as many as are
        not rejected at 5 % (at most 3), and their standard errors over clients, for that number of peaks.
    """
    rows = []
    for case in run["outputs"].to_dataset()["case"].to_numpy():
        for name in outputs:
            here = {"case": case, "outputs": name}
            seen, entropy = run["outputs"].to_dataset().sel(here), run["dispersion"].to_dataset().sel(here)
            if not bool(seen["done"]):
                continue
            k = json.loads(run.attrs["config"])["k"]
            row = {**here, "accuracy": float(seen["accuracy"].mean())}
            row |= {"zero_share": float(entropy["zero_share"].mean()), "spread": float(entropy["spread"].median())}
            strata = statistics.strata_of(str(case), seen["label"].values)
            row |= peaks(seen["mean_output"].values, strata, k=k, draws=draws)
            row["std_error"] = float(entropy["std_error"].median())
            rows.append(row)
    return pd.DataFrame(rows)


def peaks(outputs: NDArray, strata: NDArray[np.int64], *, k: int = 3, draws: int = DRAWS) -> dict[str, Any]:
    """Entropies of the neurons, their peaks and the tests, as columns of :func:`summary`.

    Parameters
    ----------
    outputs : array (client, unit)
    strata : int array (client,)
        Clients with one value are a stratum of given size.
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


def position_errors(drawn: NDArray[np.float64], n: int, found: int) -> NDArray[np.float64]:
    """Standard errors (peak,) of positions of peaks.

    Parameters
    ----------
    drawn : array (draw, unit)
        Entropies as other clients might give them.
    n : int
        Number of peaks that was not rejected.
    found : int
        Peaks at hand, usually ``n``. They have no standard error (NaN) where fewer than 9 in 10 draws have as many.
    """
    positions = [statistics.peaks(x, n).position for x in drawn]
    alike = np.array([p for p in positions if len(p) == found])
    return alike.std(axis=0, ddof=1) if len(alike) >= 0.9 * len(drawn) else np.full(found, math.nan)


def correlations(run: xr.DataTree) -> pd.DataFrame:
    """Rank correlation of entropy and communality over neurons, one row per case, outputs, on and estimator.

    Returns
    -------
    DataFrame
        ``spearman`` with ``low`` and ``high``, a 95 % interval over clients: ± 1.96 standard deviations of Fisher's z
        over the half-samples, each computed as the estimate was; ``n_factors`` and ``converged`` of the communality.
        Where ``"pa"`` has not converged, the estimate and its interval are of as many steps as were taken
        (:data:`fedstat.motivation.statistics.STEPS`), not of the solution.
    """
    found, fits = run["relation"].to_dataset(), run["split"].to_dataset()[["n_factors", "converged"]]
    low, high = statistics.interval(found["spearman"].to_numpy(), found["spearman_half"].to_numpy())
    ends = {"low": found["spearman"].copy(data=low), "high": found["spearman"].copy(data=high)}
    bounds = xr.Dataset({"spearman": found["spearman"], **ends})
    table = bounds.to_dataframe().reset_index()
    return table.merge(fits.to_dataframe().reset_index(), on=["case", "on", "estimator"]).dropna(subset="spearman")


def report(run: xr.DataTree, *, outputs: str = "own", draws: int = DRAWS) -> str:
    """Tables of :func:`summary` and :func:`correlations` as text that fits 100 columns."""
    config = json.loads(run.attrs["config"])
    table = summary(run, outputs=(outputs,), draws=draws)
    related = correlations(run).query("outputs == @outputs")
    over = {"own": "each client's own training samples", "common": "a common evaluation set"}[outputs]
    head = (
        f"{config['data']}: {config['clients']} clients, MLP with {config['hidden']} hidden units each; "
        f"{config['local_epochs']} epochs, "
        f"Adam {config['lr']:g},\nbatch {config['batch_size']}, seed {config['seed']}. "
        f"Outputs: mean activations over {over}."
    )
    rows = [
        {
            "case": r["case"],
            "accuracy": f"{r['accuracy']:.3f}",
            "zeros": f"{r['zero_share']:.3f}",
            "spread": f"{r['spread']:.3f}",
            "entropy ± se": f"{r['entropy']:+.2f} ± {r['entropy_se']:.2f}",
            "5 % to 95 %": f"{r['q05']:+.2f} to {r['q95']:+.2f}",
            "dead": str(r["dead"]),
            f"se({config['k']}-nn)": f"{r['std_error']:.3f}",
        }
        for r in table.to_dict("records")
    ]
    parts = [head, aligned(pd.DataFrame(rows))]
    parts.append("\n".join(map(_peaks_line, table.to_dict("records"))))
    at = f"κ = {config['kappa']:g}; pa: at most {statistics.STEPS} steps"
    lines = [
        f"Rank correlation of entropy and communality ({at}) over neurons,",
        "95 % intervals over clients (where the two are related they cover .88 to .93",
        "with 30 clients and .94 to .97 with 100 in simulations)",
    ]
    rows = [
        {"case": case, "of the": on} | {r["estimator"]: _interval(r) for r in block.to_dict("records")}
        for (case, on), block in related.groupby(["case", "on"], sort=False)
    ]
    lines.append(aligned(pd.DataFrame(rows).fillna(NONE)))
    if not related["converged"].all():
        lines.append(
            f"* pa at κ = {config['kappa']:g} has not converged in {statistics.STEPS} steps: the numbers are of what "
            f"{statistics.STEPS} steps from principal\n  components give, half-samples too. minres, or fewer factors "
            "(a lower --kappa), is well posed."
        )
    parts.append("\n".join(lines))
    parts.append(
        "entropy: median over neurons, nats, of the outputs over clients less ties; se: over clients.\n"
        "zeros: mean share of clients for which a neuron is dead; spread: median standard deviation over clients.\n"
        "peaks: both tests may take a long tail of entropies for a peak."
    )
    return "\n\n".join(parts)


def _peaks_line(row: Any) -> str:
    where = ", ".join(f"{m:+.2f} ± {s:.2f}" for m, s in zip(row["modes"], row["modes_se"], strict=True))
    said = "one peak not rejected" if row["p_one_peak"] >= LEVEL else "more than one peak"
    return (
        f"{row['case']}: {said} (Silverman p = {row['p_one_peak']:.3f}), at {where};\n"
        f"  one normal against two: p = {row['p_one_normal']:.3f}, BIC gain {row['bic_gain']:+.1f}"
    )


def _interval(row: Any) -> str:
    mark = " " if row["converged"] else "*"
    return interval(row["spearman"], row["low"], row["high"], 2) + mark
