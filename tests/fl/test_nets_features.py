"""Networks cut into features and an output layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedstat.fl import nets

CLIENTS, SAMPLES = 3, 5
IMAGE, TEXT = (2, 16, 16), (7,)


def made(name, **options):
    if nets.takes_text(name):
        return nets.named(name, TEXT, 4, vocabulary=11, width=0.5, **options)
    return nets.named(name, IMAGE, 4, width=0.25, **options)


def inputs(net, name=""):
    rng = np.random.default_rng(0)
    params = {n: torch.stack([p, 0.9 * p, p + 0.1]) for n, p in net.init(rng).items()}
    if name in nets.NETS and nets.takes_text(name):
        return params, torch.from_numpy(rng.integers(0, 11, (CLIENTS, SAMPLES, *TEXT)))
    return params, torch.from_numpy(rng.normal(size=(CLIENTS, SAMPLES, *IMAGE))).float()


def requires_cut(net, params, x, *, bits=True):
    """The two halves give what the whole gives, and either reads its own parameters alone."""
    body = {n: p for n, p in params.items() if nets.layer_of(n) not in nets.head_layers(net)}
    h = net.features(body, x)
    assert h.shape == (len(x), x.shape[1], nets.n_features(net))
    out = net.head({n: p for n, p in params.items() if n not in body}, h)
    assert out.shape[2] == nets.n_outputs(net)
    whole = net.apply(params, x)
    assert torch.equal(out, whole) if bits else torch.allclose(out, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clients", [CLIENTS, 1])
@pytest.mark.parametrize("name", nets.NETS)
def test_a_network_is_its_head_of_its_features(name, clients):
    net = made(name)
    params, x = inputs(net, name)
    requires_cut(net, {n: p[:clients] for n, p in params.items()}, x[:clients])


@pytest.mark.parametrize("norm", [None, "group", "batch"])
@pytest.mark.parametrize("convolution", ["loop", "grouped", "unfold"])
def test_an_image_network_is_cut_however_it_is_computed(convolution, norm):
    for name in ("cnn", "resnet8"):
        net = made(name, convolution=convolution, norm=norm)
        requires_cut(net, *inputs(net))


def test_features_of_a_training_batch_are_normalised_over_its_samples():
    net = made("resnet8", norm="batch")
    params, x = inputs(net)
    again = {n: p.clone() for n, p in params.items()}
    live = torch.ones(CLIENTS, SAMPLES, dtype=torch.bool)
    whole = net.apply(params, x, live=live)
    assert torch.equal(net.head(again, net.features(again, x, live=live)), whole)
    assert all(torch.equal(params[n], again[n]) for n in net.buffers)


class Reads(nn.Module):
    """The output layer is read, not called alone."""

    def __init__(self, how):
        super().__init__()
        self.body, self.out, self.how = nn.Linear(512, 6), nn.Linear(6, 4), how

    def forward(self, x):
        h = self.body(x.flatten(1)).relu()
        if self.how == "scaled":
            return self.out(h) / self.out.in_features
        return self.out(h) + self.out(h) if self.how == "twice" else self.out(h)


def test_a_users_module_is_cut_where_its_last_layer_is_a_linear():
    head, body = (
        nn.Linear(4, 4),
        (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    modules = [nn.Sequential(*body, head), Reads("plain")]
    for module in modules:
        net = nets.from_module(module, IMAGE)
        requires_cut(net, *inputs(net), bits=False)  # some processors multiply another layout in another order


@pytest.mark.parametrize("module", [
    Reads("scaled"), Reads("twice"), nn.Sequential(nn.Flatten(), nn.Linear(512, 4), nn.Softmax(1)),
    nn.Sequential(nn.Conv2d(2, 4, 16), nn.Flatten()),
])  # fmt: skip
def test_a_module_without_a_last_linear_has_no_features(module):
    net = nets.from_module(module, IMAGE)
    assert net.features is None
    assert net.head is None
    with pytest.raises(ValueError, match=r"has no features\..* whose last layer is a torch.nn.Linear"):
        nets.n_features(net)
