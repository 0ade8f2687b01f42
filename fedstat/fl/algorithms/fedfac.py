"""FedFac: the split is found by factor analysis of the clients' weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Literal

import numpy as np
import torch

from fedstat import _check
from fedstat.fl import masks
from fedstat.fl.algorithm import Algorithm, Split, Start, Uploads
from fedstat.fl.nets import Net, Params
from fedstat.stats import factor
from fedstat.stats import split as splitting

_BLOCK = 200_000  # entries of a layer's weights that are summed at a time


def fedfac(
    layers: str | Sequence[str],
    *,
    dynamic: bool = True,
    kappa: float = 0.85,
    tau: splitting.Tau = 0.5,
    method: factor.Method = "pa",
    on: Literal["weights", "updates"] = "weights",
    pretrain_epochs: int | None = None,
    warm_start: bool = True,
) -> Algorithm:
    """FedFac, static (Algorithm 1) or dynamic (Algorithm 2).

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data", §4.

    Parameters
    ----------
    layers : sequence of str, or str
        Λ, the layers to split; everything else is shared.
    dynamic : bool
        Analyse the active clients' weights after every round's local training. Otherwise every client first trains
        alone from the common start, and one analysis of those weights fixes the split.
    kappa, tau, method
        As in :func:`fedstat.stats.factor.fit` and :func:`fedstat.stats.split.shared`.
    on : {"weights", "updates"}
        What dynamic FedFac analyses: the trained weights, or their change in this round.
    pretrain_epochs : int, optional
        Local epochs before the static analysis; None: as many as in a round.
    warm_start : bool
        Start each round's principal-axis iteration from the last round's communalities, provided that the number of
        factors is the same and that analysis converged without a Heywood case. It stops by the same rule near the
        same fixed point, mostly in 1 to 4 steps where the principal-component start needs 8 to 29 on model (8).

    Notes
    -----
    Dynamic FedFac's first round starts from one common start, so that the split before it makes no difference.
    A unit that turns shared adopts the weighted mean of the active clients' values; one that turns personal keeps
    each client's own.
    """
    layers = masks.layer_names(layers)
    splitting.threshold(np.array([0.0, 1.0]), tau)  # raises if tau is out of range
    _check.choice("on", on, ("weights", "updates"))
    _check.real("kappa", kappa, low=0, open_low=True, high=1)
    _check.choice("method", method, factor.METHODS)

    def decide(net: Net, weights: Params, device: torch.device, before: Mapping[str, factor.Fit]) -> Split:
        fits = {}
        for layer in layers:
            r = _correlation(weights[f"{masks.require_layer(net, layer)}.weight"])
            fits[layer] = _analyse(r, kappa, method, before.get(layer) if warm_start else None)
        flags = {layer: splitting.shared(fit.communality, tau=tau) for layer, fit in fits.items()}
        return Split(masks.units(net, flags, device), fits)

    def static(start: Start) -> Split:
        return decide(start.net, start.pretrain(pretrain_epochs), start.device, {})

    def initial(start: Start) -> Split:
        for layer in layers:
            masks.require_layer(start.net, layer)
        return Split(masks.everything(start.net, start.device))

    def resplit(up: Uploads) -> Split:
        weights = up.after
        if on == "updates":
            before = up.before()
            weights = {name: p - before[name] for name, p in up.after.items()}
        return decide(up.net, weights, up.weights.device, up.split.fits)

    settings = {"layers": list(layers), "kappa": kappa, "tau": str(tau), "method": method}
    if not dynamic:
        return Algorithm("fedfac-static", static, settings=settings | {"pretrain_epochs": pretrain_epochs})
    return Algorithm("fedfac-dynamic", initial, resplit, settings=settings | {"on": on, "warm_start": warm_start})


def _analyse(r: factor.Array, kappa: float, method: factor.Method, before: factor.Fit | None) -> factor.Fit:
    """Factor analysis, warm-started where the last round's result is a sound start for this one."""
    if before is not None and method == "pa" and bool(before.converged) and not bool(before.heywood.any()):
        fit = factor.fit(r, kappa=kappa, method=method, start=before.communality)
        if int(fit.n_factors) == int(before.n_factors) and bool(fit.converged):
            return fit
    return factor.fit(r, kappa=kappa, method=method)


def _correlation(weight: torch.Tensor) -> factor.Array:
    """Correlation of a layer's units from stacked weights (client, unit, ...): NumPy on the CPU, torch on the GPU.

    The sums are taken over a few clients at a time, so that their float64 copy stays in the cache.
    """
    few = max(1, _BLOCK // weight[0].numel())
    z = [w.transpose(0, 1).flatten(1).mT for w in weight.flatten(2).split(few)]
    return factor.correlation(reduce(add, (factor.moments(b.numpy() if b.device.type == "cpu" else b) for b in z)))
