"""FedEM: every client's model is its own mixture of components that all clients share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedstat import _check
from fedstat.fl import masks
from fedstat.fl.algorithm import Algorithm, Phase, Split
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Gradient, Net, Params

_MIXTURE = "mixture.weight"
_BLOCK = 256  # samples that are run forward at a time


def fedem(*, components: int = 3) -> Algorithm:
    """A mixture of shared components with personal weights, fitted by a federated EM algorithm.

    Marfoq, Neglia, Bellet, Kameni and Vidal (2021), "Federated multi-task learning under a mixture of distributions",
    NeurIPS, Algorithm 1. Once a round a client takes the E-step, responsibilities r_ik ∝ π_k p_k(y_i | x_i), sets
    π_k = mean of r_ik, and then trains every component on Σ_k r_ik loss_k with these r. It predicts with Σ_k π_k p_k.

    Shared, up and down: all components, parameters "component1_fc1.weight", ...; private: π, "mixture.weight".
    Components start from different draws and π from 1/K. FedFac §5.1 takes three; one is FedAvg.
    """
    _check.integer("components", components)
    return Algorithm(
        "fedem",
        lambda start: Split(masks.private_layers(start.net, ["mixture"], start.device)),
        phases=(Phase(trains=lambda name: name != _MIXTURE, weigh=_e_step),),
        settings={"components": components},
        wrap=lambda net: _mixture(net, components),
        loss=_mixture_loss,
    )


def _mixture(net: Net, components: int) -> Net:
    """Network with outputs (client, sample, component, output + 1): each component's own, and log π_k."""
    prefixes = [f"component{k}_" for k in range(1, components + 1)]

    def part(params: Params, prefix: str) -> Params:
        return {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}

    def all_of(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(prefix + name for prefix in prefixes for name in names)

    def join(params: Params, outputs: list[Tensor]) -> Tensor:
        z = torch.stack(outputs, 2)
        return torch.cat([z, params[_MIXTURE].log()[:, None, :, None].expand(*z.shape[:3], 1)], -1)

    def apply(params: Params, x: Tensor, *live: Tensor | None) -> Tensor:
        return join(params, [net.apply(part(params, prefix), x, *live) for prefix in prefixes])

    def accumulate(params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float) -> None:
        def forward(seen: list[Tensor]) -> Tensor:
            """Run the other components inside this one's forward pass: the loss needs the outputs of all at once."""
            if len(seen) == components:
                return gradient(join(params, seen))
            found: list[Tensor] = []

            def at_outputs(z: Tensor) -> Tensor:
                found.append(forward([*seen, z]))
                return found[0][:, :, len(seen), :-1].contiguous()

            prefix = prefixes[len(seen)]
            net.accumulate(part(params, prefix), x, at_outputs, part(into, prefix), beta, alpha)  # type: ignore[misc]
            return found[0]

        forward([])

    return Net(
        {_MIXTURE: (components,)} | {prefix + name: shape for prefix in prefixes for name, shape in net.shapes.items()},
        lambda rng: (
            {_MIXTURE: torch.full((components,), 1 / components)}
            | {prefix + name: p for prefix in prefixes for name, p in net.init(rng).items()}
        ),
        apply,
        accumulate if net.accumulate else None,
        all_of(net.buffers),
        all_of(net.unshared),
    )


def _log_joint(out: Tensor) -> Tensor:
    """Log π_k + log p_k(class): (client, sample, component, class)."""
    z = out[..., :-1]
    log_p = torch.cat([logsigmoid(-z), logsigmoid(z)], -1) if z.shape[-1] == 1 else torch.log_softmax(z, -1)
    return log_p + out[..., -1:]


def _of_class(joint: Tensor, y: Tensor) -> Tensor:
    return joint.gather(-1, y[..., None, None].expand(*joint.shape[:-1], 1)).squeeze(-1)


def _mixture_loss(inner: Loss) -> Loss:
    """−log Σ_k π_k p_k(y), and for training the derivative of Σ_k r_k loss_k."""

    def gradient(out: Tensor, y: Tensor, weight: Tensor, extra: Tensor) -> Tensor:
        total = torch.zeros_like(out)
        for k in range(out.shape[2]):
            total[:, :, k, :-1] = inner.gradient(out[:, :, k, :-1].clone(), y, weight * extra[..., k])
        return total

    return Loss(
        lambda out, y: -_of_class(_log_joint(out), y).logsumexp(-1),
        gradient,
        lambda out: _log_joint(out).logsumexp(2).argmax(-1),
    )


@torch.no_grad()
def _e_step(net: Net, params: Params, x: Tensor, y: Tensor, live: Tensor) -> Tensor:
    """Responsibilities (client, sample, component) of all training samples; π becomes their mean."""
    blocks = [slice(low, low + _BLOCK) for low in range(0, y.shape[1], _BLOCK)]
    parts = [_of_class(_log_joint(net.apply(params, x[:, at])), y[:, at]).softmax(-1) for at in blocks]
    r = torch.cat(parts, 1)
    real = live.to(r.dtype).unsqueeze(-1)
    params[_MIXTURE].copy_((r * real).sum(1) / real.sum(1))
    return r
