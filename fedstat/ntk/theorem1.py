"""Check of Theorem 1 of FedFac §3.3 against observed training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat._utils.loops import in_order, track
from fedstat.ntk import gram as stats
from fedstat.ntk.descent import METHODS, Method, Network, descent, diverged, factor_rule, network
from fedstat.ntk.results import ConvergenceResult
from fedstat.ntk.samples import Constants, Samples, TheoryWarning, by_sample, constants, gather
from fedstat.results.origin import recorded


@check.named_options()
@recorded
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
    progress: bool | None = None,
    executor: Executor | None = None,
) -> ConvergenceResult:
    """Train network (4) and compare ‖y − h(t)‖² with the bound of Theorem 1, round by round.

    Parameters
    ----------
    x, y, client
        As in :func:`fedstat.ntk.samples.gather`: a Dataset, arrays (client, sample, feature) and (client, sample), or
        arrays (sample, feature) and (sample,) with the client of every sample. Samples with split "test" are dropped.
    widths : sequence of int
        Values of m1 = m2. As the width grows, the kernels change less and the theorem applies.
    methods : sequence of {"fedsplit", "fedavg", "fedavg-matched", "dynamic"}
        See :func:`fedstat.ntk.descent.network`. Dynamic FedFac has no bound, and runs only at the smallest width.
    rounds, local_steps : int
        T and G.
    lr : float or {"stable", "theorem"}
        η_l. ``"stable"``: 1/(2 G λ_max(H^p)); every local step then contracts, and with η_g ≤ 2 every round.
        ``"theorem"``: (λ^s + λ^p)/(γ^s γ^p G N²), with constant 1. Both are times n under ``reduction="mean"``.
    server_lr : float
        η_g.
    reduction : {"sum", "mean"}
        Sum, as in the paper's updates, or mean of the gradient over the samples of a client. ``"mean"`` divides ρ1 and
        ρ2 by n, the number of samples of the largest client.
    replicates, seed : int
        Number of initializations of the network, and their seed; the samples do not change.
    normalize : bool
        Scale samples to unit length, so that ‖x‖ ≤ 1.
    kappa, tau : float
        Settings of the factor analysis of dynamic FedFac.
    device : str, optional
        None uses NumPy; "cpu", "cuda", … use torch on that device.
    progress : bool or None
        Show how many networks are trained; see :func:`fedstat.fl.train`.
    executor : Executor, optional
        Its workers train the networks, each on one BLAS thread; see :func:`fedstat.bootstrap`.

    Returns
    -------
    ConvergenceResult

    Raises
    ------
    ValueError
        If an argument is out of range, or shapes or labels of the samples do not match.

    Warns
    -----
    TheoryWarning
        If Assumption 1 fails, if λ_min is not resolved (it counts as 0: no bound), or if a run diverges (it is
        recorded up to that round).

    Notes
    -----
    ``loss_limit`` is the loss of an infinitely wide network (:func:`fedstat.ntk.gram.limit_map`). It divides the
    distance between bound and observation into the effects of finite width and of using only λ_min.

    Examples
    --------
    >>> x = np.eye(6).reshape(2, 3, 6)
    >>> result = convergence(x, np.ones((2, 3)), widths=[64], rounds=20, replicates=2)
    >>> result.by_setting().set_index("method")["holds"].to_dict()
    {'fedsplit': True, 'fedavg': True, 'fedavg-matched': True}
    """
    samples = gather(*_drop_test_samples(x, y), client, normalize=normalize)
    for method in check.distinct("methods", list(methods)):
        check.choice("methods", method, METHODS)
    widths = [check.integer("widths", w) for w in check.distinct("widths", list(widths))]
    for name, value in (("rounds", rounds), ("local_steps", local_steps), ("replicates", replicates)):
        check.integer(name, value)
    check.real("server_lr", server_lr, low=0, open_low=True)
    check.choice("reduction", reduction, ("sum", "mean"))
    kernels = constants(samples)
    divisor = float(max(samples.sizes)) if reduction == "mean" else 1.0
    local_lr = _choose_lr(lr, kernels, samples, local_steps) * (divisor if isinstance(lr, str) else 1.0)
    steps = stats.Steps(local_lr, float(server_lr), local_steps, len(samples.names), divisor)
    grid = [(m, w, k) for m in methods for w in widths for k in range(replicates)]
    runs = dict.fromkeys(grid, _empty_run(rounds))
    cells = [(m, w, k) for m, w, k in grid if m != "dynamic" or w == min(widths)]
    rule = {"kappa": kappa, "tau": tau}
    work = partial(_run_cell, samples, kernels, steps, rounds=rounds, seed=seed, rule=rule, device=device)
    completed = in_order(executor, work, cells)
    with track(completed, "network", progress, total=len(cells)) as tracked:
        runs |= dict(zip(cells, tracked, strict=True))
    data = _build_dataset(runs, list(methods), widths, replicates, rounds)
    _warn_if_diverged(data, steps, kernels)
    data = data.assign(
        contraction=("method", [_contraction(m, steps, kernels) for m in methods]),
        h_shared_norm=np.linalg.norm(kernels.h_shared),
        h_personal_norm=np.sqrt(sum(float((b**2).sum()) for b in kernels.h_personal)),
    )
    data.attrs = _attributes(samples, kernels, steps, rounds, reduction, lr, seed)
    return ConvergenceResult(data)


def _drop_test_samples(x: Any, y: Any) -> tuple[Any, Any]:
    """Drop the samples with split "test"."""
    if isinstance(x, (xr.Dataset, xr.DataArray)) and "split" in x.coords:
        keep = np.asarray(x["split"].values != "test")
        y = y if y is None else np.asarray(by_sample("y", y, x))[..., keep]
        x = x.isel(sample=keep)
    return x, y


def _choose_lr(lr: Any, kernels: Constants, samples: Samples, local_steps: int) -> float:
    if lr == "stable":
        return 1 / (2 * local_steps * kernels.personal.lambda_max)
    if lr == "theorem":
        s, p = kernels.shared, kernels.personal
        if not (s.positive and p.positive):
            raise ValueError(
                f"lr='theorem' needs positive λ^s and λ^p, but got {s.lambda_min:.3g} and {p.lambda_min:.3g}. "
                "Pass lr='stable' or a number."
            )
        return stats.theorem_lr(
            s.lambda_min, s.condition, p.lambda_min, p.condition, local_steps=local_steps, n=len(samples.y)
        )
    return check.real("lr", lr, low=0, open_low=True, hint="Or pass 'stable' or 'theorem'.")


def _contraction(method: Method, steps: stats.Steps, kernels: Constants) -> float:
    """Return the factor of the bound per round; NaN if the theorem gives none."""
    if method == "dynamic" or not kernels.positive:
        return float("nan")
    low_s, low_p = kernels.shared.lambda_min, kernels.personal.lambda_min
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


def _empty_run(rounds: int) -> _Run:
    missing = np.full(rounds + 1, np.nan)
    return _Run(missing, missing, missing, missing, missing, missing, np.nan, np.nan, -1)


def checkpoints(rounds: int) -> set[int]:
    """Return the rounds with Gram matrices: the first, the second to last, and a geometric grid between them."""
    return {0, rounds - 1} | {int(t) for t in np.geomspace(1, max(rounds - 1, 1), 8)}


def _run_cell(
    samples: Samples, kernels: Constants, steps: stats.Steps, cell: tuple[Method, int, int], *, seed: int,
    rule: dict[str, Any], **options: Any,
) -> _Run:  # fmt: skip
    """Draw the network of a method, width and replicate, and train it."""
    method, width, replicate = cell
    sizes = {"clients": len(samples.names), "features": samples.x.shape[1], "width": width}
    net = network(method, **sizes, seed=seed, replicate=replicate)
    update = factor_rule(**rule) if method == "dynamic" else None
    return _run(samples, kernels, net, steps, method=method, rule=update, **options)


@np.errstate(over="ignore", invalid="ignore")  # a run may diverge within a round
def _run(
    samples: Samples, kernels: Constants, net: Network, steps: stats.Steps, *, rounds: int, method: Method, rule: Any,
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
    gram_rounds, first, grams, diverged_at = checkpoints(rounds), None, None, -1
    for t, state in enumerate(descent(x, y, net, steps, rounds=rounds, rule=rule, divisors=divisors)):
        record["loss"][t] = float(xp.sum(state.residual**2))
        if first is None:
            first, shared = state.active, state.shared
            residual = np.asarray(_to_numpy(state.residual))[_to_numpy(present)[..., 0]]
        if diverged(record["loss"][t], record["loss"][0]):
            diverged_at = t
            break
        record["flipped"][t] = float(xp.count_nonzero((first != state.active) & present)) / n_active
        record["kept"][t] = float(xp.mean(xp.astype(state.shared == shared, xp.float64)))
        shared = state.shared
        if t in gram_rounds and method != "dynamic":
            h = _compute_grams(x, state.start, state.local, state.shared, split)
            if grams is None:
                grams = _compute_grams(x, state.start, state.start, state.shared, split)
            record["drift_shared"][t] = float(xp.linalg.vector_norm(h[0] - grams[0]))
            if split:
                record["drift_personal"][t] = float(xp.linalg.vector_norm(h[1] - grams[1]))
    record["loss_limit"] = _compute_limit(kernels, steps, residual, rounds, method, _to_numpy(divisors))
    gap = [np.nan, np.nan]
    if grams is not None:
        gap[0] = float(xp.linalg.vector_norm(grams[0] - stats.kernel(xp.reshape(x, (-1, x.shape[-1])))))
        if split:
            gap[1] = float(xp.linalg.vector_norm(grams[1] - stats.kernel(x)))
    return _Run(**record, gap_shared=gap[0], gap_personal=gap[1], diverged_at=diverged_at)


def _to_numpy(a: Any) -> np.ndarray:
    return a.cpu().numpy() if hasattr(a, "cpu") else a


def _compute_grams(x: Any, start: Any, local: Any, shared: Any, split: bool) -> tuple[Any, Any]:
    """Compute H^s over all clients and, for FedSplit, the blocks of H^p (Definition 2)."""
    h_shared = stats.shared_gram(x, start[0][shared], local[:, shared])
    return h_shared, stats.gram(x, start[:, ~shared], local[:, ~shared]) if split else None


def _compute_limit(
    kernels: Constants, steps: stats.Steps, residual: np.ndarray, rounds: int, method: Method, divisors: np.ndarray
) -> np.ndarray:
    """Compute ‖y − h(t)‖² of the infinitely wide network from the initial residual."""
    if method == "dynamic":
        return np.full(rounds + 1, np.nan)
    h_personal = kernels.h_personal if method == "fedsplit" else [np.zeros_like(b) for b in kernels.h_personal]
    h_shared = kernels.h_shared * (2 if method == "fedavg-matched" else 1)
    step = stats.limit_map(h_shared, h_personal, steps, divisors=divisors.tolist())
    loss = np.full(rounds + 1, np.nan)
    for t in range(rounds + 1):
        loss[t] = residual @ residual
        if diverged(loss[t], loss[0]):
            break
        residual = step @ residual
    return loss


def _build_dataset(
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


def _warn_if_diverged(data: xr.Dataset, steps: stats.Steps, kernels: Constants) -> None:
    cells = np.argwhere(data["diverged_at"].values >= 0)
    if len(cells):
        m, w, k = cells[0]
        stable = steps.divisor / (2 * steps.local_steps * kernels.personal.lambda_max)
        check.warn(
            f"gradient descent diverged in {len(cells)} run(s), first {data['method'].values[m]!s} of width "
            f"{data['width'].values[w]}, replicate {k}, in round {data['diverged_at'].values[m, w, k]}, with lr = "
            f"{steps.lr:.3g}, server_lr = {steps.server_lr:.3g}. It is stable with lr <= {stable:.3g} (lr='stable') "
            "and server_lr <= 1.",
            TheoryWarning,
        )


def _attributes(
    samples: Samples, kernels: Constants, steps: stats.Steps, rounds: int, reduction: str, lr: Any, seed: int
) -> dict[str, Any]:
    sizes = samples.sizes
    s, p = kernels.shared, kernels.personal
    return {
        "clients": len(sizes), "n": max(sizes), "n_min": min(sizes), "samples": len(samples.y),
        "features": samples.x.shape[1], "rounds": rounds, "local_steps": steps.local_steps, "lr": steps.lr,
        "lr_rule": lr if isinstance(lr, str) else "given", "server_lr": steps.server_lr, "reduction": reduction,
        "seed": seed, "rho1": steps.rho1, "rho2": steps.rho2,
        "lambda_s": s.lambda_min, "lambda_s_max": s.lambda_max, "lambda_s_error": s.error_min,
        "lambda_s_resolved": int(s.positive),
        "lambda_p": p.lambda_min, "lambda_p_max": p.lambda_max, "lambda_p_error": p.error_min,
        "lambda_p_resolved": int(p.positive),
        "samples_long": len(kernels.violations.long), "samples_zero": len(kernels.violations.zero),
        "samples_parallel": len(kernels.violations.parallel), "divisor": steps.divisor,
    }  # fmt: skip
