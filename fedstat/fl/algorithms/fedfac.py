"""FedFac: units are split by factor analysis of the clients' weights, or by agreement between clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, InitContext, Mask, SharedMask, Variant
from fedstat.fl.algorithms.fedsplit import Split
from fedstat.fl.nets import Net, Params
from fedstat.stats import factor, icc, variance_components
from fedstat.stats import split as splitting
from fedstat.stats.moments import Moments, correlation, moments

ANY_RULE = "units of high ν, or agreement,"
"""Shared units, whatever the settings; reports replace it by the rule of the run."""
STATIC = About("FedFac static", ("wang2023",), f"{ANY_RULE} in the layers Λ", "the other units of Λ")
DYNAMIC = STATIC._replace(title="FedFac dynamic", shared=f"{STATIC.shared}, anew in every round")

Threshold = splitting.Tau | Literal["mean", "test"]
_OF_FACTORS = check.EffectIf("estimator", lambda estimator: estimator != "icc")
_MAX_CHANGE = 0.05  # of the number of factors, relative: above it, last round's communalities are too far to start from
# Bounds of the entries of a layer's weights that are summed at a time. A block has 8 rows for each unit, so that adding
# matrices (unit, unit) takes less time than the products do.
_BLOCK = (200_000, 4_000_000)


@check.effective
def fedfac(
    layers: Split = None,
    *,
    dynamic: bool = True,
    kappa: Annotated[
        float, "κ, proportion of the eigenvalue sum that factors must reach, which sets their number", _OF_FACTORS
    ] = 0.85,
    tau: Annotated[
        Threshold | None,
        "τ, quantile of communality or ICC from which units are shared, inf, mean or, as --tau=-inf, -inf (default "
        "0.5); test with --estimator icc, static: units without evidence of differences between clients",
    ] = None,
    estimator: Annotated[
        splitting.Method | None,
        f"statistic that splits units: the communality by {', '.join(factor.METHODS)} (shared: explained by "
        "the other units), or icc (shared: clients agree) (default pa)",
    ] = None,
    on: Annotated[Literal["weights", "updates"], "object of the analysis: weights or updates"] = "weights",
    pretrain_epochs: Annotated[int | None, "epochs before the analysis"] = None,
    warm_start: Annotated[bool, "start each round's analysis from last round's", _OF_FACTORS] = True,
    variant: Variant = "paper",
    fdr: Annotated[
        float | None,
        "false discovery rate of tau=test (default 0.05)",
        check.EffectIf("tau", lambda tau: tau == "test"),
    ] = None,
) -> Algorithm:
    """Share units that the other units explain: FedFac, static (Algorithm 1) or dynamic (Algorithm 2).

    With ``estimator="icc"``, share units on which clients agree.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data", §4.
    Shared: the units of Λ with communality ν >= τ (or ICC2 >= τ), and all other layers. Personal: the other units of Λ.
    Download: shared entries, and the split if it has changed. Upload: shared entries (static), or all entries of the
    layers Λ and shared entries of the others (dynamic).

    Parameters
    ----------
    layers : sequence of str or int, str, or int, optional
        Λ, the layers to split, by name or number from 1; by default the last hidden layer.
    dynamic : bool
        True: analyze the selected clients' weights after every round's local training. False: every client first trains
        alone from the common initial parameters, and one analysis of the trained weights fixes the split.
    kappa, tau, estimator
        As in :func:`fedstat.stats.factor.fit`, whose ``method`` is ``estimator``, and
        :func:`fedstat.stats.split.shared`; ``tau="mean"`` shares units with ν >= mean ν. The default is the median
        (0.5) of ``"pa"``, and with ``variant="code"`` the mean of ``"leverage"``.

        ``estimator="icc"`` uses no factor analysis: τ then refers to ICC2 of at least 2 selected clients
        (:func:`fedstat.icc`), and ``kappa`` and ``warm_start`` have no effect. In dynamic FedFac, averaging makes
        shared units equal in all clients. Agreement on ``"weights"`` therefore tends to keep the first split, whereas
        agreement on ``"updates"`` is new in every round.

        ``tau="test"`` needs ``estimator="icc"`` and ``dynamic=False``: every client first trains twice, on each half of
        its samples. Units with evidence of reliability above 0.5 are personal
        (:meth:`fedstat.results.ComponentsResult.split`); their number is not fixed in advance.
    on : {"weights", "updates"}
        Object of dynamic FedFac's analysis: the trained weights, or their change in this round.
    pretrain_epochs : int, optional
        Local epochs before the static analysis; None: as many as in a round.
    warm_start : bool
        Start each round's principal-axis iteration from last round's communalities. This needs a number of factors
        equal up to 5%, and convergence without a Heywood case in the last round. The stopping rule is unchanged, and
        the fixed point nearly so. On model (8) most rounds take 1 to 4 steps; from principal components they take 8 to
        29.
    variant : {"paper", "code"}
        ``"code"`` does what the authors' published code does where it differs from the text: ``estimator`` is
        ``"leverage"`` with the split at its mean; of a split layer only incoming weights are shared, and biases and
        normalization are personal. The code's local running statistics are the network's ``statistics="local"``. Its
        loss is summed over a batch: for SGD this is a learning rate times the batch size, for Adam it has no effect.
        Its weight decay and pretrained start are not offered.
    fdr : float in (0, 1), optional
        False discovery rate of ``tau="test"``; 0.05 by default.

    Raises
    ------
    ValueError
        If an argument is out of range, or was changed and has no effect with ``estimator="icc"``.

    Notes
    -----
    In the first round of dynamic FedFac all clients start from common parameters, so the split before it has no effect.
    A unit that becomes shared gets the weighted mean of the selected clients' values; a unit that becomes personal
    keeps each client's values.
    """
    code = check.choice("variant", variant, ("paper", "code")) == "code"
    method = check.choice("estimator", estimator or ("leverage" if code else "pa"), splitting.METHODS)
    threshold: Threshold = ("mean" if code else 0.5) if tau is None else tau
    check.choice("on", on, ("weights", "updates"))
    check.real("kappa", kappa, low=0, open_low=True, high=1)
    by_agreement = method == "icc"
    _require_threshold(threshold, method, dynamic)
    rate = check.real("fdr", 0.05 if fdr is None else fdr, low=0, high=1, open_low=True, open_high=True)
    rule = _Rule(masks.given_layers(layers), method, kappa, threshold, rate, warm_start, code)
    settings = {
        "layers": rule.requested, "kappa": kappa, "tau": str(threshold), "estimator": method, "variant": variant,
    }  # fmt: skip
    if threshold == "test":
        settings["fdr"] = rate
    of_dynamic = {"on": on, "warm_start": warm_start}
    if by_agreement:
        del settings["kappa"], of_dynamic["warm_start"]
    if not dynamic:
        settings |= {"pretrain_epochs": pretrain_epochs}
        return Algorithm(
            "fedfac-static",
            lambda context: rule.static_mask(context, pretrain_epochs),
            moments=rule.moments,
            settings=settings,
            about=STATIC,
        )
    return Algorithm(
        "fedfac-dynamic",
        lambda context: SharedMask(rule.share_all(context.net, context.device)),
        lambda context: rule.split(
            context.net, context.moments, masks.device_of(context.mask.shared), context.mask.fits
        ),
        moments=rule.moments_of_updates if on == "updates" else rule.moments,
        settings=settings | of_dynamic,
        personal_params=lambda net: masks.of_layers(net, rule.layers(net)),
        upload_mask=lambda net, mask: rule.share_all(net, masks.device_of(mask.shared)),
        about=DYNAMIC,
    )


class _Rule(NamedTuple):
    """Rule by which the units of Λ are split.

    Attributes
    ----------
    requested : list of str or int, or None
        Λ; None is the last hidden layer.
    method : str
        Method of the communality, or "icc".
    kappa, threshold, fdr, warm_start
        As in :func:`fedfac`; ``threshold`` is τ.
    weights_only : bool
        True: biases and normalization of a split layer are personal, as in the published code.
    """

    requested: list[str | int] | None
    method: splitting.Method
    kappa: float
    threshold: Threshold
    fdr: float
    warm_start: bool
    weights_only: bool

    def layers(self, net: Net) -> list[str]:
        """Return the names of Λ; raise ValueError if a layer does not exist or has no weights."""
        layers = masks.resolve(net, self.requested)
        for layer in layers:
            if not masks.incoming(net, layer):
                raise ValueError(f"layer {layer!r} has no weights to analyze, only {masks.of_layers(net, [layer])}")
        return layers

    def share_all(self, net: Net, device: torch.device) -> Mask:
        """Share every unit that may be shared."""
        flags = {layer: np.ones(nets.layers(net)[layer], dtype=bool) for layer in self.layers(net)}
        return masks.units(net, flags, device, weights_only=self.weights_only)

    def static_mask(self, context: InitContext, epochs: int | None) -> SharedMask:
        """Return the mask of static FedFac, from clients that were trained alone."""
        layers = self.layers(context.net)  # raises before any training
        if self.threshold == "test":
            return _split_by_test(context, layers, epochs, self.fdr, weights_only=self.weights_only)
        return self.split(context.net, context.moments(epochs), context.device, {})

    def moments(self, net: Net, before: Callable[[], Params], after: Params) -> dict[str, Any]:  # noqa: ARG002
        """Return sums over clients of the trained weights, for every layer of Λ."""
        sums = _agreement_sums if self.method == "icc" else _layer_moments
        return {layer: sums([after[name] for name in masks.incoming(net, layer)]) for layer in self.layers(net)}

    def moments_of_updates(self, net: Net, before: Callable[[], Params], after: Params) -> dict[str, Any]:
        """Return sums over clients of the weights' change in this round, for every layer of Λ."""
        old = before()
        return self.moments(net, before, {name: p - old[name] for name, p in after.items()})

    def split(
        self, net: Net, moments: Mapping[str, Any], device: torch.device, before: Mapping[str, factor.Fit]
    ) -> SharedMask:
        """Split the layers of Λ by sums over clients; last round's analyses are possible warm starts."""
        fits, agreement = {}, {}
        for layer in self.layers(net):
            if self.method == "icc":
                agreement[layer] = icc.agreement(moments[layer])
            else:
                last_fit = before.get(layer) if self.warm_start else None
                fits[layer] = _analyze(correlation(moments[layer]), self.kappa, self.method, last_fit)
        statistic = agreement or {layer: fit.communality for layer, fit in fits.items()}
        flags = {layer: _flags(values, self.threshold) for layer, values in statistic.items()}
        return SharedMask(masks.units(net, flags, device, weights_only=self.weights_only), fits, agreement)


def _require_threshold(threshold: Threshold, method: str, dynamic: bool) -> None:
    """Raise ValueError if τ is not valid or does not go with the other settings."""
    if isinstance(threshold, str) and threshold not in ("mean", "test"):
        raise ValueError(f"tau must be a number, inf, -inf, mean or test, but got {threshold!r}")
    if not isinstance(threshold, str):
        splitting.threshold(np.array([0.0, 1.0]), threshold)  # raises if tau is out of range
    if threshold == "test" and (dynamic or method != "icc"):
        raise ValueError(
            "tau='test' compares two models of every client, trained before the first round, and needs "
            f"estimator='icc' and dynamic=False, but got estimator={method!r} and dynamic={dynamic}"
        )


def _split_by_test(
    context: InitContext, layers: Sequence[str], epochs: int | None, fdr: float, *, weights_only: bool
) -> SharedMask:
    """Share units without evidence of reliability above 0.5, by split-half training."""
    models, x = context.halves(epochs)
    flags, agreement, decided = {}, {}, {}
    for layer in layers:
        w = torch.cat([models[name].flatten(3) for name in masks.incoming(context.net, layer)], dim=3)
        components = variance_components.components(variance_components.parts(w, x))
        outcome = variance_components.classify_units(components, fdr=fdr)
        flags[layer] = np.isin(outcome, ("shared", "inconclusive"))
        decided[layer] = np.isin(outcome, ("shared", "personal"))
        agreement[layer] = icc.agreement(icc.sums(w.mean(1)))
    mask = masks.units(context.net, flags, context.device, weights_only=weights_only)
    return SharedMask(mask, {}, agreement, decided)


def _flags(statistic: factor.Array, tau: Threshold) -> factor.Array:
    """Return True for shared units (unit,); the mean excludes constant units (NaN)."""
    if isinstance(tau, str):
        finite = statistic[statistic == statistic]
        tau = splitting.Absolute(float(finite.mean()))
    return splitting.shared(statistic, tau=tau)


def _agreement_sums(weights: Sequence[torch.Tensor]) -> icc.Sums:
    """Return the sums for the ICC2 of a layer's units, from its stacked weights (client, unit, ...)."""
    w = torch.cat([weight.flatten(2) for weight in weights], dim=2)
    return icc.sums(w.numpy() if w.device.type == "cpu" else w)


def _analyze(r: factor.Array, kappa: float, method: factor.Method, last_fit: factor.Fit | None) -> factor.Fit:
    """Fit the factor model, from last round's communalities if that fit was sound and has nearly as many factors."""
    analysis = partial(factor.fit, r, kappa=kappa, method=method, loadings=False)
    if last_fit is not None and method == "pa" and bool(last_fit.converged) and not bool(last_fit.heywood.any()):
        fit = analysis(init=last_fit.communality)
        g, last_g = int(fit.n_factors), int(last_fit.n_factors)
        if abs(g - last_g) <= _MAX_CHANGE * last_g and bool(fit.converged):
            return fit
    return analysis()


def _layer_moments(weights: Sequence[torch.Tensor]) -> Moments:
    """Return the moments of a layer's units from its stacked weights (client, unit, ...).

    NumPy computes them on the CPU, torch on the GPU. The sums run over blocks of clients, so that their float64 copy
    stays small.
    """
    blocks = []
    for weight in weights:
        entries = min(max(8 * weight.shape[1] ** 2, _BLOCK[0]), _BLOCK[1])
        clients = max(1, entries // weight[0].numel())
        blocks += [w.transpose(0, 1).flatten(1).mT for w in weight.flatten(2).split(clients)]
    return reduce(add, (moments(b.numpy() if b.device.type == "cpu" else b) for b in blocks))
