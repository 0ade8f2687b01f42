"""Check of Theorem 2 of FedFac §3.3 against the observed test loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal

import numpy as np

from fedstat._utils import check, labels
from fedstat._utils.lazy import xr
from fedstat._utils.loops import in_order, track
from fedstat.ntk import gram as stats
from fedstat.ntk.descent import descent, diverged, network, predict
from fedstat.ntk.results import GeneralizationResult
from fedstat.ntk.samples import Samples, TheoryWarning, by_sample, constants, extremes, gather
from fedstat.results.origin import recorded


@check.named_options()
@recorded
def generalization(
    x: Any,
    y: Any = None,
    client: Any = None,
    *,
    split: Any = None,
    clients: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    constant: float = 1.0,
    delta: float = 0.05,
    width: int = 1024,
    rounds: int = 500,
    local_steps: int = 5,
    lr: float | Literal["stable"] = "stable",
    server_lr: float = 1.0,
    init_scale: float = 0.1,
    replicates: int = 3,
    seed: int = 0,
    normalize: bool = False,
    progress: bool | None = None,
    executor: Executor | None = None,
) -> GeneralizationResult:
    """Compare the bound of Theorem 2 with the test loss of network (4), for several numbers of clients and samples.

    Parameters
    ----------
    x, y, client
        As in :func:`fedstat.ntk.samples.gather`.
    split : array, Series, DataArray (sample,) or mapping from sample, of str, optional
        "train" or "test" for every sample, along the sample axis of ``x``. Default: the coordinate ``split`` of ``x``.
    clients : sequence of int, optional
        Numbers of clients C among which the N training samples are divided. Neighboring clients are merged, or clients
        are split; test samples likewise. None: the clients of the data.
    samples : sequence of int, optional
        Numbers n of training samples per client, from the first on. None: all.
    constant, delta : float
        c and δ of the confidence term c √(log(N/(λδ))/(2N)); the paper gives its order only.
    width, rounds, local_steps, lr, server_lr, replicates, seed, normalize, progress, executor
        Settings of the observed network, as in :func:`fedstat.ntk.convergence`.
    init_scale : float
        α of Theorem 2: the initial weights are α·N(0, I).

    Returns
    -------
    GeneralizationResult
        The loss is ``min(|h − y|, 1)``, which is 1-Lipschitz in h and at most 1, as the theorem requires.

    Raises
    ------
    ValueError
        If there is no test sample, or there are more clients than training or test samples.

    Warns
    -----
    TheoryWarning
        - If Assumption 1 fails.
        - If λ^s, λ^p or the smallest eigenvalue of H^s + H^p is not resolved. It counts as 0, so there is no bound.
        - If training diverges. That run has no loss.

    Notes
    -----
    ``test_limit`` is the loss of the infinitely wide network trained to convergence: h(x) = k(x)ᵀ M⁻¹ y with
    M = (η_g/C) H^s + H^p. Parallel gradient descent follows M for every G, but the complexity term of the theorem uses
    H^s + H^p.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(2, 12, 6))
    >>> y = np.sign(x[..., 0])
    >>> split = ["train"] * 8 + ["test"] * 4
    >>> result = generalization(x, y, split=split, normalize=True, width=64, rounds=50, replicates=2)
    >>> bool(result.by_setting().vacuous[0])
    True
    """
    train, test = _split_samples(x, y, client, split, normalize)
    for name, value in (("width", width), ("rounds", rounds), ("local_steps", local_steps), ("replicates", replicates)):
        check.integer(name, value)
    check.real("init_scale", init_scale, low=0, open_low=True)
    for name, values in (("clients", clients), ("samples", samples)):
        if values:
            check.distinct(name, list(values))
    for number in clients or ():
        check.integer("clients", number, high=min(len(train.y), len(test.y)))
    settings, runs = [], []
    for c, n in itertools.product(clients or (None,), samples or (None,)):
        a, b = (train, test) if c is None else (train.recut(c), test.recut(c))
        if n is not None:
            rank = np.concatenate([np.arange(k) for k in a.sizes])
            a = a.take(rank < check.integer("samples", n, high=min(a.sizes)))
        settings.append(_describe_setting(a, b, constant, delta, server_lr))
        steps = stats.Steps(_choose_lr(lr, a, local_steps), server_lr, local_steps, len(a.names))
        runs += [(a, b, steps, replicate) for replicate in range(replicates)]
    work = partial(_observe, width=width, rounds=rounds, init_scale=init_scale, seed=seed)
    with track(in_order(executor, work, runs), "network", progress, total=len(runs)) as tracked:
        losses = list(tracked)
    _warn_if_diverged(runs, losses)
    for i, row in enumerate(settings):
        pairs = losses[i * replicates : (i + 1) * replicates]
        row["test"], row["train"] = (list(part) for part in zip(*pairs, strict=True))
    return GeneralizationResult(
        _build_dataset(settings).assign_attrs(
            delta=delta, constant=constant, width=width, rounds=rounds, local_steps=local_steps, server_lr=server_lr,
            init_scale=init_scale, seed=seed, labels="signs" if set(np.abs(train.y)) == {1.0} else "other",
        )
    )  # fmt: skip


def _split_samples(x: Any, y: Any, client: Any, split: Any, normalize: bool) -> tuple[Samples, Samples]:
    """Return training and test samples."""
    x = labels.labelled(x, ("sample", "feature"))
    labelled = isinstance(x, (xr.Dataset, xr.DataArray))
    if split is None and labelled and "split" in x.coords:
        split = x["split"].values
    split = np.asarray([] if split is None else by_sample("split", split, x, "sample"))
    array = x["x"] if isinstance(x, xr.Dataset) else x if labelled else np.asarray(x)
    n_samples = x.sizes["sample"] if labelled else array.shape[-2]
    if split.shape != (n_samples,) or not {"train", "test"} <= set(split.tolist()):
        raise ValueError(
            f"split must be 'train' or 'test' for each of the {n_samples} samples and contain both, "
            f"but got shape {split.shape} with {sorted(set(split.tolist()))}"
        )
    samples = gather(x, y, client, normalize=normalize)
    shape = (n_samples,) if array.ndim == 2 else (len(samples.y) // n_samples, n_samples)
    # gather() orders the split like the samples if it is passed as y.
    train, test = (
        samples.take(gather(array, np.broadcast_to(split == name, shape), client).y > 0) for name in ("train", "test")
    )
    if train.names != test.names:
        raise ValueError(f"every client must have training and test samples, but got {train.names} and {test.names}")
    return train, test


def _describe_setting(train: Samples, test: Samples, constant: float, delta: float, server_lr: float) -> dict[str, Any]:
    """Compute the bound and the losses of the infinitely wide network for one setting."""
    kernels = constants(train)
    sizes = train.sizes
    if min(sizes) != max(sizes):
        check.warn(
            f"Theorem 2 assumes clients of equal size, but got {min(sizes)} to {max(sizes)} samples; n is their mean. "
            "Pass samples= to use equal sizes.",
            TheoryWarning,
        )
    personal = _keep_diagonal_blocks(train, kernels.h_shared)
    low = extremes([kernels.h_shared + personal], "H^s + H^p").usable
    setting = {"clients": len(sizes), "n": len(train.y) / len(sizes), "lambda_min": low}
    setting |= {"zero": _mean_loss(np.zeros_like(test.y), test.y)}
    if low == 0 or not kernels.positive:
        return setting | dict.fromkeys(("complexity", "confidence", "bound", "test_limit", "train_limit"), math.nan)
    first = stats.complexity(kernels.h_shared, kernels.h_personal, train.y)
    second = stats.confidence(len(train.y), low, delta=delta, constant=constant)
    # Weight of H^s in the matrix that the descent follows; 1, as in the theorem, for C = 1 and η_g = 1.
    weight = server_lr / len(sizes)
    dual = np.linalg.solve(weight * kernels.h_shared + personal, train.y)
    x = np.concatenate([test.x, train.x])
    cross = stats.kernel(x)[: len(test.y), len(test.y) :]
    value = (weight + (test.client[:, None] == train.client)) * cross @ dual
    return setting | {
        "complexity": first, "confidence": second, "bound": first + second, "test_limit": _mean_loss(value, test.y),
        "train_limit": _mean_loss((weight * kernels.h_shared + personal) @ dual, train.y),
    }  # fmt: skip


def _keep_diagonal_blocks(samples: Samples, h: np.ndarray) -> np.ndarray:
    return np.where(samples.client[:, None] == samples.client, h, 0.0)


def _mean_loss(value: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.minimum(np.abs(value - y), 1)))


def _choose_lr(lr: Any, train: Samples, local_steps: int) -> float:
    return _stable_lr(train, local_steps) if lr == "stable" else check.real("lr", lr, low=0, open_low=True)


def _stable_lr(train: Samples, local_steps: int) -> float:
    """Return the learning rate at which every local step contracts: 1/(2 G λ_max(H^p))."""
    top = max(float(stats.extreme_eigenvalues(stats.kernel(b)).maximum) for b in train.blocks(train.x))
    return 1 / (2 * local_steps * top)


@np.errstate(over="ignore", invalid="ignore")  # a run may diverge within a round
def _observe(
    run: tuple[Samples, Samples, stats.Steps, int], *, width: int, rounds: int, init_scale: float, seed: int
) -> tuple[float, float]:
    """Train a network of finite width and return its test and training loss; NaN if training diverged."""
    train, test, steps, replicate = run
    x, y = train.stacked()
    sizes = {"clients": len(train.names), "features": x.shape[-1], "width": width}
    net = network("fedsplit", **sizes, seed=seed, replicate=replicate, scale=init_scale)
    first = None
    for state in descent(x, y, net, steps, rounds=rounds):
        train_loss = float(np.sum(state.residual**2))
        first = train_loss if first is None else first
        if diverged(train_loss, first):
            return math.nan, math.nan

    def loss(part: Samples) -> float:
        value = predict(part.stacked()[0], state.start, net.output)
        flat = np.concatenate([v[:size] for v, size in zip(value, part.sizes, strict=True)])
        return _mean_loss(flat, part.y)

    return loss(test), loss(train)


def _warn_if_diverged(runs: list[tuple[Samples, Samples, stats.Steps, int]], losses: list[tuple[float, float]]) -> None:
    failed = [run for run, (loss, _) in zip(runs, losses, strict=True) if math.isnan(loss)]
    if failed:
        train, _, steps, replicate = failed[0]
        check.warn(
            f"gradient descent diverged in {len(failed)} of {len(runs)} runs, first with {len(train.names)} clients, "
            f"replicate {replicate}, lr = {steps.lr:.3g}, server_lr = {steps.server_lr:.3g}; these runs have no loss. "
            f"It is stable with lr <= {_stable_lr(train, steps.local_steps):.3g} (lr='stable') and server_lr <= 1.",
            TheoryWarning,
        )


def _build_dataset(settings: list[dict[str, Any]]) -> xr.Dataset:
    variables = {
        name: (("setting", "replicate")[: np.ndim(settings[0][name]) + 1], [row[name] for row in settings])
        for name in settings[0]
    }
    return xr.Dataset(variables, coords={"setting": list(range(len(settings)))}).set_coords(["clients", "n"])
