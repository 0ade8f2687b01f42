"""Theorem 1 of FedFac §3.3 against the training it speaks of."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from tqdm import tqdm

from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat._utils.parallel import in_order
from fedstat.ntk import gram as stats
from fedstat.ntk.descent import METHODS, Method, Network, descent, diverged, factor_rule, network
from fedstat.ntk.results import ConvergenceResult
from fedstat.ntk.samples import Constants, Samples, TheoryWarning, by_sample, constants, gather


def convergence(
    x: Any,
    y: Any = None,
    client: Any = None,
    *,
    widths: Sequence[int] = (256, 1024),
    methods: Sequence[Method] = ("fedsplit", "fedavg", "fedavg-matched"),
    rounds: int = 200,
    local_steps: int = 5,
    lr: float | Literal["stable", "theorem"] = "stable",
    server_lr: float = 1.0,
    reduction: Literal["sum", "mean"] = "sum",
    replicates: int = 5,
    seed: int = 0,
    normalize: bool = False,
    kappa: float = 0.75,
    tau: float = 0.5,
    device: str | None = None,
    progress: bool = False,
    executor: Executor | None = None,
) -> ConvergenceResult:
    """Train network (4) and compare ‖y − h(t)‖² with the bound of Theorem 1, round by round.

    Parameters
    ----------
    x, y, client
        As in :func:`fedstat.ntk.samples.gather`: a Dataset, or arrays (client, sample, feature), (client, sample), or
        (sample, feature), (sample,) with the client of every sample. Samples with split "test" are left out.
    widths : sequence of int
        m1 = m2. As the width grows, the kernels stop changing and the theorem applies.
    methods : sequence of {"fedsplit", "fedavg", "fedavg-matched", "dynamic"}
        See :func:`fedstat.ntk.descent.network`. The paper has no theory for dynamic FedFac: it gets no bound. As its
        factor analysis costs eigendecompositions of 2·width units in every round, it runs at the smallest width only.
    rounds, local_steps : int
        T and G.
    lr : float or {"stable", "theorem"}
        η_l. ``"stable"``: 1/(2 G λ_max(H^p)), for which every local step and, with η_g ≤ 2, every round contracts.
        ``"theorem"``: the theorem's own order with constant 1, (λ^s + λ^p)/(γ^s γ^p G N²). Both are multiplied by n
        under ``reduction="mean"``.
    server_lr : float
        η_g.
    reduction : {"sum", "mean"}
        Whether a client's gradient sums or averages its samples. The paper's loss averages, its updates and ρ1, ρ2
        sum; with ``"mean"`` both ρ are divided by n (by the largest client's, if they differ).
    replicates, seed : int
        Initialisations of the network; the samples stay as they are.
    normalize : bool
        Scale samples to unit length, so that ‖x‖ ≤ 1 holds.
    kappa, tau : float
        Parameters of dynamic FedFac's factor analysis.
    device : str, optional
        None computes with NumPy; "cpu", "cuda", … with torch there.
    progress : bool
        Show a progress bar.
    executor : Executor, optional
        Any :class:`concurrent.futures.Executor`, whose workers train the networks, each on one BLAS thread: as in
        :func:`fedstat.bootstrap`.

    Returns
    -------
    ConvergenceResult

    Raises
    ------
    ValueError
        If an argument is out of range or the samples do not fit together.

    Warns
    -----
    TheoryWarning
        If Assumption 1 fails, λ_min is not resolved (it counts as 0, the theorem says nothing, and there is no bound),
        or a run diverges; that run is kept up to there.

    Notes
    -----
    ``loss_limit`` is what an infinitely wide network would do from the same start
    (:func:`fedstat.ntk.gram.limit_map`): it tells how much of the distance between bound and observation is due to
    the width, and how much to the theorem's keeping λ_min only.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.eye(6).reshape(2, 3, 6)
    >>> result = convergence(x, np.ones((2, 3)), widths=[64], rounds=20, replicates=2)
    >>> result.by_setting()[["method", "held"]]
               method  held
    0        fedsplit  True
    1          fedavg  True
    2  fedavg-matched  True
    """
    samples = gather(*_train(x, y), client, normalize=normalize)
    for method in methods:
        check.choice("methods", method, METHODS)
    widths = [check.integer("widths", w) for w in widths]
    for name, value in (("rounds", rounds), ("local_steps", local_steps), ("replicates", replicates)):
        check.integer(name, value)
    check.real("server_lr", server_lr, low=0, open_low=True)
    check.choice("reduction", reduction, ("sum", "mean"))
    known = constants(samples)
    divisor = float(max(samples.sizes)) if reduction == "mean" else 1.0
    local = _lr(lr, known, samples, local_steps) * (divisor if isinstance(lr, str) else 1.0)
    steps = stats.Steps(local, float(server_lr), local_steps, len(samples.names), divisor)
    grid = [(m, w, k) for m in methods for w in widths for k in range(replicates)]
    runs = dict.fromkeys(grid, _not_run(rounds))
    wanted = [(m, w, k) for m, w, k in grid if m != "dynamic" or w == min(widths)]
    work = partial(
        _one, samples, known, steps, rounds=rounds, seed=seed, rule={"kappa": kappa, "tau": tau}, device=device
    )
    found = in_order(executor, work, wanted)
    runs |= dict(zip(wanted, tqdm(found, total=len(wanted), disable=not progress), strict=True))
    data = _dataset(runs, list(methods), widths, replicates, rounds)
    _report_divergence(data, steps, known)
    data = data.assign(
        contraction=("method", [_contraction(m, steps, known) for m in methods]),
        h_shared_norm=np.linalg.norm(known.h_shared),
        h_personal_norm=np.sqrt(sum(float((b**2).sum()) for b in known.h_personal)),
    )
    data.attrs = _attributes(samples, known, steps, rounds, reduction, lr, seed)
    return ConvergenceResult(data)


def _train(x: Any, y: Any) -> tuple[Any, Any]:
    """Drop the samples of split "test"."""
    if isinstance(x, (xr.Dataset, xr.DataArray)) and "split" in x.coords:
        keep = np.asarray(x["split"].values != "test")
        y = y if y is None else np.asarray(by_sample("y", y, x))[..., keep]
        x = x.isel(sample=keep)
    return x, y


def _lr(lr: Any, known: Constants, samples: Samples, local_steps: int) -> float:
    if lr == "stable":
        return 1 / (2 * local_steps * known.personal.lambda_max)
    if lr == "theorem":
        s, p = known.shared, known.personal
        if not (s.positive and p.positive):
            raise ValueError(
                f"lr='theorem' needs positive λ^s and λ^p, but got {s.lambda_min:.3g} and {p.lambda_min:.3g}. "
                "Pass lr='stable' or a number."
            )
        return stats.theorem_lr(
            s.lambda_min, s.condition, p.lambda_min, p.condition, local_steps=local_steps, n=len(samples.y)
        )
    return check.real("lr", lr, low=0, open_low=True, hint="Or pass 'stable' or 'theorem'.")


def _contraction(method: Method, steps: stats.Steps, known: Constants) -> float:
    """Bound per round; NaN where the theorem says nothing."""
    if method == "dynamic" or not known.positive:
        return float("nan")
    low_s, low_p = known.shared.lambda_min, known.personal.lambda_min
    if method == "fedsplit":
        return stats.contraction(steps, lambda_s=low_s, lambda_p=low_p)
    return stats.contraction(steps, lambda_s=low_s * (2 if method == "fedavg-matched" else 1))


class _Run(NamedTuple):
    loss: np.ndarray
    loss_limit: np.ndarray
    flipped: np.ndarray
    kept: np.ndarray
    drift_shared: np.ndarray
    drift_personal: np.ndarray
    gap_shared: float
    gap_personal: float
    diverged_at: int


def _not_run(rounds: int) -> _Run:
    nothing = np.full(rounds + 1, np.nan)
    return _Run(nothing, nothing, nothing, nothing, nothing, nothing, np.nan, np.nan, -1)


def checkpoints(rounds: int) -> set[int]:
    """Rounds whose Gram matrices are formed: the first, the last but one, and a geometric grid between."""
    return {0, rounds - 1} | {int(t) for t in np.geomspace(1, max(rounds - 1, 1), 8)}


def _one(
    samples: Samples, known: Constants, steps: stats.Steps, at: tuple[Method, int, int], *, seed: int,
    rule: dict[str, Any], **how: Any,
) -> _Run:  # fmt: skip
    """Run of a method, width and replicate."""
    method, width, replicate = at
    sizes = {"clients": len(samples.names), "features": samples.x.shape[1], "width": width}
    net = network(method, **sizes, seed=seed, replicate=replicate)
    return _run(
        samples, known, net, steps, method=method, rule=factor_rule(**rule) if method == "dynamic" else None, **how
    )


@np.errstate(over="ignore", invalid="ignore")  # of runs that diverge within a round
def _run(
    samples: Samples, known: Constants, net: Network, steps: stats.Steps, *, rounds: int, method: Method, rule: Any,
    device: str | None,
) -> _Run:  # fmt: skip
    x: Any
    y: Any
    x, y = samples.stacked()
    n_active = sum(samples.sizes) * net.output.shape[0]
    present: Any = (np.arange(x.shape[1]) < np.asarray(samples.sizes)[:, None])[..., None]
    divisors: Any = np.asarray(samples.sizes, dtype=float) if steps.divisor != 1 else np.ones(len(samples.sizes))
    split = method == "fedsplit"
    if device is not None:
        import torch

        x, y, present, divisors = (torch.from_numpy(a).to(device) for a in (x, y, present, divisors))
        net = Network(*(torch.from_numpy(a).to(device) for a in net))
    xp = array_namespace(x)
    record = {k: np.full(rounds + 1, np.nan) for k in _Run._fields[:6]}
    wanted, first, grams, diverged_at = checkpoints(rounds), None, None, -1
    for t, now in enumerate(descent(x, y, net, steps, rounds=rounds, rule=rule, divisors=divisors)):
        record["loss"][t] = float(xp.sum(now.residual**2))
        if first is None:
            first, residual, shared = now.active, np.asarray(_host(now.residual))[_host(present)[..., 0]], now.shared
        if diverged(record["loss"][t], record["loss"][0]):
            diverged_at = t
            break
        record["flipped"][t] = float(xp.count_nonzero((first != now.active) & present)) / n_active
        record["kept"][t] = float(xp.mean(xp.astype(now.shared == shared, xp.float64)))
        shared = now.shared
        if t in wanted and method != "dynamic":
            h = _grams(x, now.start, now.local, now.shared, split)
            if grams is None:
                grams = _grams(x, now.start, now.start, now.shared, split)
            record["drift_shared"][t] = float(xp.linalg.vector_norm(h[0] - grams[0]))
            if split:
                record["drift_personal"][t] = float(xp.linalg.vector_norm(h[1] - grams[1]))
    record["loss_limit"] = _limit(known, steps, residual, rounds, method, _host(divisors))
    gap = [np.nan, np.nan]
    if grams is not None:
        gap[0] = float(xp.linalg.vector_norm(grams[0] - stats.kernel(xp.reshape(x, (-1, x.shape[-1])))))
        if split:
            gap[1] = float(xp.linalg.vector_norm(grams[1] - stats.kernel(x)))
    return _Run(**record, gap_shared=gap[0], gap_personal=gap[1], diverged_at=diverged_at)


def _host(a: Any) -> np.ndarray:
    return a.cpu().numpy() if hasattr(a, "cpu") else a


def _grams(x: Any, start: Any, local: Any, shared: Any, split: bool) -> tuple[Any, Any]:
    """H^s over all clients and, for FedSplit, the blocks of H^p (Definition 2)."""
    h_shared = stats.shared_gram(x, start[0][shared], local[:, shared])
    return h_shared, stats.gram(x, start[:, ~shared], local[:, ~shared]) if split else None


def _limit(
    known: Constants, steps: stats.Steps, residual: np.ndarray, rounds: int, method: Method, divisors: np.ndarray
) -> np.ndarray:
    """‖y − h(t)‖² of the infinitely wide network from the same residual."""
    if method == "dynamic":
        return np.full(rounds + 1, np.nan)
    h_personal = known.h_personal if method == "fedsplit" else [np.zeros_like(b) for b in known.h_personal]
    h_shared = known.h_shared * (2 if method == "fedavg-matched" else 1)
    step = stats.limit_map(h_shared, h_personal, steps, divisors=divisors.tolist())
    loss = np.full(rounds + 1, np.nan)
    for t in range(rounds + 1):
        loss[t] = residual @ residual
        if diverged(loss[t], loss[0]):
            break
        residual = step @ residual
    return loss


def _dataset(
    runs: dict[tuple[Method, int, int], _Run], methods: list[Method], widths: list[int], replicates: int, rounds: int
) -> xr.Dataset:
    dims = ("method", "width", "replicate")
    variables = {}
    for name in _Run._fields:
        values = [getattr(run, name) for run in runs.values()]
        shape = (len(methods), len(widths), replicates, *np.shape(values[0]))
        variables[name] = ((*dims, "round")[: len(shape)], np.reshape(np.asarray(values), shape))
    counts = {"replicate": np.arange(replicates), "round": np.arange(rounds + 1)}
    return xr.Dataset(variables, coords={"method": np.array(methods, dtype=object), "width": widths, **counts})


def _report_divergence(data: xr.Dataset, steps: stats.Steps, known: Constants) -> None:
    bad = np.argwhere(data["diverged_at"].values >= 0)
    if len(bad):
        m, w, k = bad[0]
        stable = steps.divisor / (2 * steps.local_steps * known.personal.lambda_max)
        check.warn(
            f"gradient descent diverged in {len(bad)} run(s), first {data['method'].values[m]!s} of width "
            f"{data['width'].values[w]}, replicate {k}, in round {data['diverged_at'].values[m, w, k]}, with lr = "
            f"{steps.lr:.3g}, server_lr = {steps.server_lr:.3g}. It is stable at lr <= {stable:.3g} (lr='stable') and "
            "server_lr <= 1.",
            TheoryWarning,
        )


def _attributes(
    samples: Samples, known: Constants, steps: stats.Steps, rounds: int, reduction: str, lr: Any, seed: int
) -> dict[str, Any]:
    sizes = samples.sizes
    s, p = known.shared, known.personal
    return {
        "clients": len(sizes), "n": max(sizes), "n_min": min(sizes), "samples": len(samples.y),
        "features": samples.x.shape[1], "rounds": rounds, "local_steps": steps.local_steps, "lr": steps.lr,
        "lr_rule": lr if isinstance(lr, str) else "given", "server_lr": steps.server_lr, "reduction": reduction,
        "seed": seed, "rho1": steps.rho1, "rho2": steps.rho2,
        "lambda_s": s.lambda_min, "lambda_s_max": s.lambda_max, "lambda_s_error": s.error_min,
        "lambda_s_resolved": int(s.positive),
        "lambda_p": p.lambda_min, "lambda_p_max": p.lambda_max, "lambda_p_error": p.error_min,
        "lambda_p_resolved": int(p.positive),
        "samples_long": len(known.violations.long), "samples_zero": len(known.violations.zero),
        "samples_parallel": len(known.violations.parallel), "divisor": steps.divisor,
    }  # fmt: skip
