"""FedFac: the split is found by factor analysis of the clients' weights, or by whether clients agree on them."""

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

STATIC = About("FedFac static", ("wang2023",), "units of high ν, or agreement, in the layers Λ", "the other units of Λ")
DYNAMIC = STATIC._replace(title="FedFac dynamic", shared=f"{STATIC.shared}, anew in every round")

Limit = splitting.Tau | Literal["mean", "test"]
_KAPPA = 0.85
_SAME = 0.05  # change of the number of factors, relative, after which the last round's communalities are still near
# Entries of a layer's weights that are summed at a time: 8 rows for each unit, so that less is spent on matrices (unit,
# unit) than on products, within these bounds.
_BLOCK = (200_000, 4_000_000)


def fedfac(
    layers: Split = None,
    *,
    dynamic: bool = True,
    kappa: Annotated[float, "κ, share of the eigenvalues' sum that decides the number of factors"] = _KAPPA,
    tau: Annotated[
        Limit | None,
        "τ, quantile of communality or ICC from which units are shared, inf, mean or, as --tau=-inf, -inf (default "
        "0.5); test with --estimator icc, static: units on which clients are not shown to differ",
    ] = None,
    estimator: Annotated[
        splitting.Method | None,
        f"how units are judged: an estimator of the communality, {', '.join(factor.METHODS)} (shared: explained by "
        "the other units), or icc (shared: clients agree) (default pa)",
    ] = None,
    on: Annotated[Literal["weights", "updates"], "what is analysed: weights or updates"] = "weights",
    pretrain_epochs: Annotated[int | None, "epochs before the analysis"] = None,
    warm_start: Annotated[bool, "whether a round's analysis starts from the last one's"] = True,
    variant: Variant = "paper",
    fdr: Annotated[float | None, "false discovery rate of tau=test (default 0.05)"] = None,
) -> Algorithm:
    """FedFac, static (Algorithm 1) or dynamic (Algorithm 2): shared are units that the other units explain.

    With ``estimator="icc"`` shared are units on which clients agree instead.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data", §4.
    Shared: the units of Λ with communality ν >= τ (or ICC2 >= τ), and every other layer. Private: the other units of Λ.
    Down: what is shared, and the split where it changed. Up: the same entries, static; dynamic needs the layers of Λ
    whole.

    Parameters
    ----------
    layers : sequence of str or int, str, or int, optional
        Λ, the layers to split, by name or number from 1; by default the last hidden layer.
    dynamic : bool
        Analyse the active clients' weights after every round's local training. Otherwise every client first trains
        alone from the common start, and one analysis of those weights fixes the split.
    kappa, tau, estimator
        As in :func:`fedstat.stats.factor.fit`, whose ``method`` is the estimator, and
        :func:`fedstat.stats.split.shared`; ``tau="mean"`` shares units with ν >= mean ν. By default the median (0.5) of
        ``"pa"``, and with ``variant="code"`` the mean of ``"leverage"``. ``estimator="icc"`` makes no factor analysis:
        τ is then about ICC2 of the active clients
        (:func:`fedstat.icc`), at least 2, and ``kappa`` and ``warm_start`` have no effect. Of dynamic splits: averaging
        makes a shared unit alike in all clients, so that by agreement on ``"weights"`` the first split tends to stay;
        agreement on ``"updates"`` is asked anew in every round. ``tau="test"``, with ``estimator="icc"`` and not
        ``dynamic``: every client first trains twice, on either half of its samples, and personal are units whose
        personal share is shown to be above 1/2 (:meth:`fedstat.results.ComponentsResult.split`), however many.
    on : {"weights", "updates"}
        What dynamic FedFac analyses: the trained weights, or their change in this round.
    pretrain_epochs : int, optional
        Local epochs before the static analysis; None: as many as in a round.
    warm_start : bool
        Start each round's principal-axis iteration from the last round's communalities, provided that the number of
        factors is the same to 5 % and that analysis converged without a Heywood case. It stops by the same rule near
        the same fixed point, mostly in 1 to 4 steps where the principal-component start needs 8 to 29 on model (8).
    variant : {"paper", "code"}
        ``"code"`` does what the authors' published code does where the text says otherwise: the estimator
        ``"leverage"`` with the split at its mean, and only incoming weights of a split layer are shared, while its
        biases and normalisation parameters stay with the client. Of the rest, running statistics that stay with the
        client are the network's ``statistics="local"``, and the loss summed over a batch is a learning rate of SGD
        times the batch size (Adam does not see the difference); its weight decay and pretrained start are not offered.
    fdr : float in (0, 1), optional
        False discovery rate of ``tau="test"``; 0.05 by default.

    Raises
    ------
    ValueError
        If an argument is out of range, or was changed and has no effect with ``estimator="icc"``.

    Notes
    -----
    Dynamic FedFac's first round starts from one common start, so that the split before it makes no difference.
    A unit that turns shared adopts the weighted mean of the active clients' values; one that turns personal keeps
    each client's own.
    """
    code = check.choice("variant", variant, ("paper", "code")) == "code"
    judge = check.choice("estimator", estimator or ("leverage" if code else "pa"), splitting.METHODS)
    limit: Limit = ("mean" if code else 0.5) if tau is None else tau
    check.choice("on", on, ("weights", "updates"))
    check.real("kappa", kappa, low=0, open_low=True, high=1)
    by_agreement = judge == "icc"
    if by_agreement:
        why = "with estimator='icc', which makes no factor analysis"
        hint = ". Leave it out, or split by 'pa', 'minres', 'pc' or 'leverage'."
        check.require_default("kappa", kappa, _KAPPA, why, hint=hint)
        check.require_default("warm_start", warm_start or not dynamic, True, why, hint=hint)
    _require_limit(limit, judge, dynamic)
    if fdr is not None and limit != "test":
        raise check.NoEffectError("fdr", f"but with tau='test', but got fdr={fdr!r} and tau={tau!r}")
    rate = check.real("fdr", 0.05 if fdr is None else fdr, low=0, high=1, open_low=True, open_high=True)
    rule = _Rule(masks.given_layers(layers), judge, kappa, limit, rate, warm_start, code)
    settings = {"layers": rule.given, "kappa": kappa, "tau": str(limit), "estimator": judge, "variant": variant}
    if limit == "test":
        settings["fdr"] = rate
    of_dynamic = {"on": on, "warm_start": warm_start}
    if by_agreement:
        del settings["kappa"], of_dynamic["warm_start"]
    if not dynamic:
        settings |= {"pretrain_epochs": pretrain_epochs}
        return Algorithm(
            "fedfac-static",
            lambda context: rule.before_training(context, pretrain_epochs),
            moments=rule.moments,
            settings=settings,
            about=STATIC,
        )
    return Algorithm(
        "fedfac-dynamic",
        lambda context: SharedMask(rule.whole(context.net, context.device)),
        lambda context: rule.decide(
            context.net, context.moments, masks.device_of(context.mask.shared), context.mask.fits
        ),
        moments=rule.moments_of_updates if on == "updates" else rule.moments,
        settings=settings | of_dynamic,
        personal_params=lambda net: masks.of_layers(net, rule.layers(net)),
        upload_mask=lambda net, mask: rule.whole(net, masks.device_of(mask.shared)),
        about=DYNAMIC,
    )


class _Rule(NamedTuple):
    """How it is decided which units of Λ are shared.

    Attributes
    ----------
    given : list of str or int, or None
        Λ; None is the last hidden layer.
    judge : str
        Estimator of the communality, or "icc".
    kappa, limit, fdr, warm_start
        As of :func:`fedfac`.
    weights_only : bool
        Whether biases and normalisation of a split layer stay with the client, as in the published code.
    """

    given: list[str | int] | None
    judge: splitting.Method
    kappa: float
    limit: Limit
    fdr: float
    warm_start: bool
    weights_only: bool

    def layers(self, net: Net) -> list[str]:
        """Names of Λ; ValueError if one is not in the network or has no weights."""
        found = masks.resolve(net, self.given)
        for layer in found:
            if not masks.incoming(net, layer):
                raise ValueError(f"layer {layer!r} has no weights to analyse, only {masks.of_layers(net, [layer])}")
        return found

    def whole(self, net: Net, device: torch.device) -> Mask:
        """All units shared, of Λ what may be."""
        flags = {layer: np.ones(nets.layers(net)[layer], dtype=bool) for layer in self.layers(net)}
        return masks.units(net, flags, device, weights_only=self.weights_only)

    def before_training(self, context: InitContext, epochs: int | None) -> SharedMask:
        """Static: one decision, from clients that were trained alone."""
        layers = self.layers(context.net)  # raises before any training
        if self.limit == "test":
            return _tested(context, layers, epochs, self.fdr, weights_only=self.weights_only)
        return self.decide(context.net, context.moments(epochs), context.device, {})

    def moments(self, net: Net, before: Callable[[], Params], after: Params) -> dict[str, Any]:  # noqa: ARG002
        """Sums over clients of every layer of Λ, from their weights."""
        of = _agreement_sums if self.judge == "icc" else _layer_moments
        return {layer: of([after[name] for name in masks.incoming(net, layer)]) for layer in self.layers(net)}

    def moments_of_updates(self, net: Net, before: Callable[[], Params], after: Params) -> dict[str, Any]:
        """The same from the change of their weights in this round."""
        old = before()
        return self.moments(net, before, {name: p - old[name] for name, p in after.items()})

    def decide(
        self, net: Net, moments: Mapping[str, Any], device: torch.device, before: Mapping[str, factor.Fit]
    ) -> SharedMask:
        """Return the mask that sums over clients lead to, given the last round's analyses."""
        fits, alike = {}, {}
        for layer in self.layers(net):
            if self.judge == "icc":
                alike[layer] = icc.agreement(moments[layer])
            else:
                earlier = before.get(layer) if self.warm_start else None
                fits[layer] = _analyse(correlation(moments[layer]), self.kappa, self.judge, earlier)
        statistic = alike or {layer: fit.communality for layer, fit in fits.items()}
        flags = {layer: _flags(values, self.limit) for layer, values in statistic.items()}
        return SharedMask(masks.units(net, flags, device, weights_only=self.weights_only), fits, alike)


def _require_limit(limit: Limit, judge: str, dynamic: bool) -> None:
    """ValueError if there is no such τ, or it does not go with the rest."""
    if isinstance(limit, str) and limit not in ("mean", "test"):
        raise ValueError(f"tau must be a number, inf, -inf, mean or test, but got {limit!r}")
    if not isinstance(limit, str):
        splitting.threshold(np.array([0.0, 1.0]), limit)  # raises if tau is out of range
    if limit == "test" and (dynamic or judge != "icc"):
        raise ValueError(
            "tau='test' compares two models of every client, which are trained before the first round: it needs "
            f"estimator='icc' and dynamic=False, but got estimator={judge!r} and dynamic={dynamic}"
        )


def _tested(
    context: InitContext, layers: Sequence[str], epochs: int | None, fdr: float, *, weights_only: bool
) -> SharedMask:
    """Shared: units whose personal share, by models of the halves of clients' samples, is not shown to be above 1/2."""
    models, x = context.halves(epochs)
    flags, alike, decided = {}, {}, {}
    for layer in layers:
        w = torch.cat([models[name].flatten(3) for name in masks.incoming(context.net, layer)], dim=3)
        found = variance_components.components(variance_components.parts(w, x))
        outcome = variance_components.outcomes(found, fdr=fdr)
        flags[layer] = np.isin(outcome, ("shared", "undecided"))
        decided[layer] = np.isin(outcome, ("shared", "personal"))
        alike[layer] = icc.agreement(icc.sums(w.mean(1)))
    return SharedMask(masks.units(context.net, flags, context.device, weights_only=weights_only), {}, alike, decided)


def _flags(statistic: factor.Array, tau: Limit) -> factor.Array:
    """Which units are shared; dead ones (NaN) take no part in the mean."""
    if isinstance(tau, str):
        live = statistic[statistic == statistic]
        tau = splitting.Absolute(float(live.mean()))
    return splitting.shared(statistic, tau=tau)


def _agreement_sums(weights: Sequence[torch.Tensor]) -> icc.Sums:
    """Sums for the ICC2 of a layer's units, from its stacked weights (client, unit, ...)."""
    w = torch.cat([weight.flatten(2) for weight in weights], dim=2)
    return icc.sums(w.numpy() if w.device.type == "cpu" else w)


def _analyse(r: factor.Array, kappa: float, method: factor.Method, before: factor.Fit | None) -> factor.Fit:
    """Factor analysis, warm-started where the last round's result is a sound start for this one."""
    analysis = partial(factor.fit, r, kappa=kappa, method=method, loadings=False)
    if before is not None and method == "pa" and bool(before.converged) and not bool(before.heywood.any()):
        fit = analysis(start=before.communality)
        g, old = int(fit.n_factors), int(before.n_factors)
        if abs(g - old) <= _SAME * old and bool(fit.converged):
            return fit
    return analysis()


def _layer_moments(weights: Sequence[torch.Tensor]) -> Moments:
    """Moments of a layer's units from its stacked weights (client, unit, ...): NumPy on the CPU, torch on the GPU.

    The sums are taken over a few clients at a time, so that their float64 copy stays small.
    """
    z = []
    for weight in weights:
        block = min(max(8 * weight.shape[1] ** 2, _BLOCK[0]), _BLOCK[1])
        few = max(1, block // weight[0].numel())
        z += [w.transpose(0, 1).flatten(1).mT for w in weight.flatten(2).split(few)]
    return reduce(add, (moments(b.numpy() if b.device.type == "cpu" else b) for b in z))
