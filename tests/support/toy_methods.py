"""Methods that need just one seam of the engine each."""

from __future__ import annotations

import torch
from plain_seams import LR

from fedstat.fl import aggregate, masks, optim
from fedstat.fl.algorithm import Algorithm, AlgorithmState, Measure, SharedMask

HALF = {"participation": 0.5, "client_chunk": 2, "optimizer": optim.sgd(LR)}


def toy(**parts):
    """FedAvg with what a seam adds."""
    return Algorithm("toy", lambda start: SharedMask(masks.share_all(start.net, start.device)), **parts)


def momentum(beta):
    """The server's momentum: state that lasts from round to round."""

    def apply(sent, state):
        new = {name: beta * state[name] + (p - sent.server[name]) for name, p in sent.values.items()}
        return sent._replace(values={name: sent.server[name] + p for name, p in new.items()}), state | new

    return aggregate.Aggregator(
        lambda server: {name: torch.zeros_like(p) for name, p in server.items()}, apply, f"momentum({beta})"
    )


def soft(threshold):
    def after(params, _, lr, __):
        for name, p in params.items():
            if name == "fc1.weight":
                p.copy_(p.sign() * (p.abs() - threshold * lr).clamp(min=0))

    return after


def moving_average(up):
    clients = {n: 0.5 * up.state.clients[n] + 0.5 * p for n, p in up.after.items()}
    return AlgorithmState(clients, {"rounds": up.state.server["rounds"] + 1})


def towards_memory(context):
    share = 1 / (1 + context.state.server["rounds"])
    return {n: share * context.global_params[n] + (1 - share) * p for n, p in context.state.clients.items()}


REMEMBERS = toy(
    init_state=lambda start: AlgorithmState(
        {n: torch.ones(len(start.sizes), *s) / 10 for n, s in start.net.shapes.items()}, {"rounds": torch.tensor(0.0)}
    ),
    update_state=moving_average,
    on_download=towards_memory,
)


MEASURES = {
    "norm": Measure(lambda up: torch.stack([p.flatten(1).norm(dim=1) for p in up.after.values()]).sum(0)),
    "far": Measure(lambda up: torch.cdist(up.after["fc2.bias"], up.after["fc2.bias"]), ("client", "other"), units="1"),
}


def by_loss(up):
    return torch.softmax(-5 * up.evaluate(up.after, up.clients), 1)
