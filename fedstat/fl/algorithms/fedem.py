"""FedEM: every client's model is a mixture of shared components with personal weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples
from fedstat.fl.losses import Loss, require_classes
from fedstat.fl.nets import Gradient, Net, Params
from fedstat.fl.wrappers.pair import copies, join, part

if TYPE_CHECKING:
    from torch import Tensor


ABOUT = About(
    "FedEM",
    ("marfoq2021",),
    "several components",
    "the weights of their mixture",
    ("local_train",),
)


def fedem(*, components: Annotated[int, "components of the mixture"] = 3) -> Algorithm:
    """Fit a mixture of shared components with personal weights by a federated EM algorithm.

    Marfoq, Neglia, Bellet, Kameni and Vidal (2021), "Federated multi-task learning under a mixture of distributions",
    NeurIPS, Algorithm 1. Once a round a client computes the responsibilities r_ik ∝ π_k p_k(y_i | x_i) (E-step) and
    sets π_k to the mean of r_ik. It then trains every component on Σ_k r_ik loss_k with these r. It predicts with
    Σ_k π_k p_k.

    Shared (upload and download): all components. Personal: π. FedFac §5.1 uses three components; one component is
    FedAvg. See :func:`mixture`. The components need different initial parameters: convert a user's module with
    ``start="random"``.
    """
    check.integer("components", components)
    return Algorithm(
        "fedem",
        masks.keep_layers(lambda _: ["mixture"]),
        phases=(Phase(is_trainable=lambda name: name != WEIGHTS, sample_weights=_e_step),),
        settings={"components": components},
        wrap=lambda net: mixture(net, components),
        loss=lambda inner, _: mixture_loss(require_classes(inner, "fedem", "for its E-step")),
        about=ABOUT,
    )


def _e_step(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> Tensor:
    """Return the responsibilities (client, sample, component) of all training samples; set π to their mean."""
    with torch.no_grad():
        x, y = samples.x, samples.y
        blocks = nets.sample_blocks(y.shape[1])
        r = torch.cat([responsibilities(net.apply(params, x[:, block]), y[:, block]) for block in blocks], 1)
        real = samples.live.to(r.dtype).unsqueeze(-1)
        params[WEIGHTS].copy_((r * real).sum(1) / real.sum(1))
        return r


WEIGHTS = "mixture.weight"


def mixture(net: Net, components: int) -> Net:
    """Return a network of K components "component1_<...>", ... and their weights π, "mixture.weight".

    The outputs (client, sample, component, output + 1) hold each component's outputs, then log π_k. Components have
    different random initial parameters; π starts at 1/K.
    """
    functions = _Mixture(net, [f"component{k}_" for k in range(1, components + 1)])
    return copies(
        net,
        functions.prefixes,
        {WEIGHTS: (components,)},
        init=functions.init,
        apply=functions.apply,
        accumulate=functions.accumulate if net.accumulate else None,
        activations=components * net.activations if net.activations else None,
        noise=join([net.noise] * components, functions.prefixes),
        base=None if net.base is None else mixture(net.base, components),
    )


class _Mixture(NamedTuple):
    """The network of each component, and the prefixes of the components' parameters."""

    net: Net
    prefixes: Sequence[str]

    def init(self, rng: np.random.Generator) -> Params:
        """Draw one client's initial parameters; raise ValueError if components would start equal."""
        starts = [self.net.init(rng) for _ in self.prefixes]
        if len(starts) > 1 and all(torch.equal(p, starts[1][name]) for name, p in starts[0].items()):
            raise ValueError(
                "the components of a mixture would start and stay equal, because the network has fixed initial "
                "parameters. Convert the module with from_module(..., start='random')."
            )
        return {WEIGHTS: torch.full((len(starts),), 1 / len(starts))} | join(starts, self.prefixes)

    def apply(self, params: Params, x: Tensor, **arguments: Any) -> Tensor:
        """Return the outputs of all components, and log π."""
        outputs = [
            self.net.apply(part(params, prefix), x, **_of_component(arguments, prefix)) for prefix in self.prefixes
        ]
        return self.combine(params, outputs)

    def accumulate(
        self, params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **arguments: Any
    ) -> None:
        """Set into ← beta·into + alpha·∂loss, as ``Net.accumulate``.

        The loss needs all outputs at once. Every component therefore runs inside the forward pass of the previous one.
        """
        outputs: list[Tensor] = []
        derivatives: list[Tensor] = []  # of the loss at all outputs, appended by the last component

        def run(k: int) -> None:
            component, moving = (part(values, self.prefixes[k]) for values in (params, into))
            extra = _of_component(arguments, self.prefixes[k])
            self.net.accumulate(component, x, partial(derivative, k), moving, beta, alpha, **extra)  # type: ignore[misc]

        def derivative(k: int, z: Tensor) -> Tensor:
            outputs.append(z)
            if len(outputs) < len(self.prefixes):
                run(k + 1)
            else:
                derivatives.append(gradient(self.combine(params, outputs)))
            return derivatives[0][:, :, k, :-1].contiguous()

        run(0)

    def combine(self, params: Params, outputs: list[Tensor]) -> Tensor:
        """Return the mixture's outputs, from the components' outputs."""
        z = torch.stack(outputs, 2)
        return torch.cat([z, params[WEIGHTS].log()[:, None, :, None].expand(*z.shape[:3], 1)], -1)


def _of_component(arguments: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the arguments of ``apply`` for a component, with the noise of this component."""
    return arguments | {"noise": part(arguments["noise"], prefix)} if arguments.get("noise") else arguments


def mixture_loss(inner: Loss) -> Loss:
    """Return the loss −log Σ_k π_k p_k(y); its gradient is the derivative of Σ_k r_k loss_k with π fixed.

    The gradient's fourth argument r (client, sample, component) holds the responsibilities of an E-step. Without it, r
    follows from the current parameters, and the gradient is the derivative of the loss itself.
    """

    def gradient(out: Tensor, y: Tensor, weight: Tensor, r: Tensor | None = None) -> Tensor:
        total = torch.zeros_like(out)
        r = responsibilities(out, y) if r is None else r
        for k in range(out.shape[2]):
            total[:, :, k, :-1] = inner.gradient(out[:, :, k, :-1].clone(), y, weight * r[..., k])
        return total

    return inner._replace(
        value=lambda out, y: -of_class(log_joint(out), y).logsumexp(-1),
        gradient=gradient,
        predict=lambda out: log_joint(out).logsumexp(2).argmax(-1),
        probability=lambda out: log_joint(out).logsumexp(2).exp(),
    )


def log_joint(out: Tensor) -> Tensor:
    """Return log π_k + log p_k(class): (client, sample, component, class)."""
    z = out[..., :-1]
    log_p = (
        torch.cat([functional.logsigmoid(-z), functional.logsigmoid(z)], -1)
        if z.shape[-1] == 1
        else torch.log_softmax(z, -1)
    )
    return log_p + out[..., -1:]


def responsibilities(out: Tensor, y: Tensor) -> Tensor:
    """Return the components' posterior probabilities (client, sample, component), from outputs and classes y."""
    return of_class(log_joint(out), y).softmax(-1)


def of_class(joint: Tensor, y: Tensor) -> Tensor:
    """Select the entries (client, sample, component) of the classes y (client, sample)."""
    return joint.gather(-1, y[..., None, None].expand(*joint.shape[:-1], 1)).squeeze(-1)
