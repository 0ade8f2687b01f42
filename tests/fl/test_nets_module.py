"""Users' modules as networks, against the modules themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stacked_nets import CLIENTS, SAMPLES, Block, Convolutions, gradients, images
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fedstat.fl import nets
from fedstat.fl.algorithms.fedem import mixture


def test_a_users_module_is_the_same_function_for_every_client():
    torch.manual_seed(0)
    module = Block()
    net = nets.from_module(module, (3, 9, 9), statistics="local")
    theirs = {
        "conv1.weight": "conv.weight", "conv1.scale": "bn.weight", "conv1.shift": "bn.bias",
        "conv1.running_mean": "bn.running_mean", "conv1.running_var": "bn.running_var",
        "conv2.weight": "body.0.weight", "conv2.bias": "body.0.bias", "conv2.scale": "body.1.weight",
        "conv2.shift": "body.1.bias", "fc1.weight": "head.weight", "fc1.bias": "head.bias",
    }  # fmt: skip
    assert list(net.shapes) == list(theirs)
    assert net.buffers == net.unshared == ("conv1.running_mean", "conv1.running_var")
    start = net.init(np.random.default_rng(0))
    for ours, name in theirs.items():
        assert torch.equal(start[ours], module.state_dict()[name])
    params = {n: torch.stack([p + 0.1 * c for c in range(CLIENTS)]) for n, p in start.items()}
    for n in params:
        params[n].requires_grad_(n not in net.buffers)
    before = {n: p.detach().clone() for n, p in params.items()}
    x, live = images(3, 9).float(), torch.arange(SAMPLES) < torch.tensor([4, 3, 2])[:, None]
    out = net.apply(params, x, live)
    grads = gradients(net, params, out, live[..., None])
    for c in range(CLIENTS):
        twin = Block()
        twin.load_state_dict({name: before[ours][c] for ours, name in theirs.items()}, strict=False)
        expected = twin(x[c][live[c]])
        torch.testing.assert_close(out[c][live[c]], expected)
        expected.sin().sum().backward()
        for n, grad in grads.items():
            torch.testing.assert_close(grad[c], twin.get_parameter(theirs[n]).grad, atol=1e-5, rtol=1e-4)
        for n in net.buffers:
            torch.testing.assert_close(params[n][c], twin.get_buffer(theirs[n]))
        torch.testing.assert_close(net.apply(params, x)[c], twin.eval()(x[c]))


class Own(nn.Conv2d):
    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, bias=self.bias, stride=self.stride)


@pytest.mark.parametrize("convolution", [nn.Conv2d, Own])
def test_no_module_has_the_convolution_whose_gradient_overruns_its_memory(convolution):
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), convolution(4, 8, 1, 2), nn.Flatten(), nn.Linear(128, 3))
    net = nets.from_module(module, (1, 9, 9))
    params = {n: torch.stack([p] * CLIENTS) for n, p in net.init(np.random.default_rng(0)).items()}
    x = images(1, 9).float()
    with Convolutions() as convolutions:
        out = net.apply(params, x)
    assert convolutions.seen == [((3, 3), 1, 0), ((1, 1), 1, 0)] * CLIENTS
    torch.testing.assert_close(out, torch.stack([module(client) for client in x]))


@pytest.mark.parametrize("first", [
    (nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)),
    (nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()),
])  # fmt: skip
def test_a_batch_of_one_sample_leaves_a_users_batch_norm_finite(first):
    net = nets.from_module(nn.Sequential(*first, nn.Linear(3, 2)), (1, 2, 2), start="random")
    params = {n: p.unsqueeze(0) for n, p in net.init(np.random.default_rng(0)).items()}
    out = net.apply(params, torch.ones(1, 1, 1, 2, 2), torch.ones(1, 1, dtype=torch.bool))
    # One value is its own mean: what is left is the shift, 0 at the start.
    torch.testing.assert_close(out, list(params.values())[-1][:, None])
    (variance,) = (p for n, p in params.items() if n.endswith("running_var"))
    torch.testing.assert_close(variance, torch.full((1, 3), 0.9))


def test_a_batch_of_one_image_updates_statistics_as_torch_does():
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    net = nets.from_module(module, (1, 3, 3))
    params = {n: p.unsqueeze(0) for n, p in net.init(np.random.default_rng(0)).items()}
    x = images(1, 3, 1)[:1].float()
    torch.testing.assert_close(net.apply(params, x, torch.ones(1, 1, dtype=torch.bool))[0], module(x[0]))
    torch.testing.assert_close(params["conv1.running_var"][0], module[1].running_var)


def test_a_users_module_starts_anew_only_if_asked_to():
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    module[1].requires_grad_(False)
    net = nets.from_module(module, (1, 2, 2), start="random")
    before = torch.get_rng_state()
    a, b, again = (net.init(np.random.default_rng(seed)) for seed in (0, 1, 0))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(a["fc2.weight"], b["fc2.weight"])
    assert torch.equal(a["fc2.weight"], again["fc2.weight"])
    assert torch.equal(a["fc1.weight"], module[1].weight)
    present = nets.from_module(module, (1, 2, 2))
    nn.init.zeros_(module[3].weight)
    assert present.init(np.random.default_rng(0))["fc2.weight"].abs().sum() > 0


def test_components_of_a_mixture_must_start_apart():
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"start and stay equal.*start='random'"):
        mixture(nets.from_module(module, (1, 2, 2)), 3).init(np.random.default_rng(0))
    start = mixture(nets.from_module(module, (1, 2, 2), start="random"), 3).init(np.random.default_rng(0))
    assert not torch.equal(start["component1_fc1.weight"], start["component2_fc1.weight"])


def test_an_embedding_has_its_dimensions_as_units():
    module = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(24, 3))
    net = nets.from_module(module, torch.zeros(6, dtype=torch.long))
    assert nets.layers(net) == {"embedding1": 4, "fc1": 3}
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 11, (1, 5, 6)))
    params = {n: p.unsqueeze(0) for n, p in net.init(np.random.default_rng(0)).items()}
    torch.testing.assert_close(net.apply(params, x)[0], module(x[0]))


def test_a_users_frozen_parameters_are_not_trained():
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    module[1].requires_grad_(False)
    assert nets.from_module(module, (1, 2, 2)).buffers == ("fc1.weight", "fc1.bias")


def linear(*parts):
    return nn.Sequential(nn.Flatten(), *parts, nn.Linear(4, 2))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x.flatten(1))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (linear(nn.BatchNorm1d(4, momentum=None)), "track_running_stats=True and a momentum"),
        (Unused(), "does not use idle"),
        (nn.Sequential(nn.Linear(2, 2)), "must return .sample, output."),
        (nn.Sequential(nn.Conv2d(3, 2, 1)), "does not take samples of shape .1, 2, 2.: "),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(2), nn.AvgPool1d(2),
                       nn.Flatten()), "returns 2 outputs and fc1 .1. has 4 units"),
        (nn.Flatten(), "no parameters to train"),
        (torch.relu, "must be a torch.nn.Module"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_stacked_are_refused_by_name(module, says):
    with pytest.raises(ValueError, match=says):
        nets.from_module(module, (1, 2, 2))


class Later(nn.Module):
    """A module that makes a layer, or a buffer, in its first forward pass."""

    def __init__(self, what):
        super().__init__()
        self.what, self.out = what, nn.Linear(5, 3)

    def forward(self, x):
        if self.what == "layer" and not hasattr(self, "first"):
            self.first = nn.Linear(x.shape[1], 5)
        if self.what == "buffer" and not hasattr(self, "shift"):
            self.register_buffer("shift", torch.randn(5))
        return self.out(self.first(x) if self.what == "layer" else x + self.shift)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"^0 \(LazyLinear\) has no weight before its first forward pass"),
        (
            lambda: nn.Sequential(nn.Linear(5, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 3)),
            r"^1 \(LazyBatchNorm1d\) has no",
        ),
        (
            lambda: nn.LazyLinear(3),
            r"^the module itself \(LazyLinear\) has no weight .*module\(torch\.zeros\(2, \.\.\.\)\)",
        ),
        (lambda: Later("layer"), r"the module makes first\.weight in its first forward pass, .* in __init__, or run"),
        (lambda: Later("buffer"), "the module makes shift in its first forward pass"),
    ],
)
def test_parameters_that_do_not_exist_yet_are_refused_until_the_module_has_run(module, says):
    later = module()
    with pytest.raises(ValueError, match=says):
        nets.from_module(later, (5,))
    with torch.no_grad():
        later.eval()(torch.zeros(2, 5))
    if isinstance(later, Later) and later.what == "buffer":
        return  # which no layer holds
    first, second = (nets.from_module(later, (5,)).init(np.random.default_rng(0)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def first_changed(change):
    module = small()
    change(module[0])
    return module


def first_undone(undo):
    def change(module):
        undo(module[0])
        return module

    return change


def scaled(part):
    part.scale = part.weight.abs().mean() * 2


UNDONE = {
    "tensor with a graph": (
        lambda: first_changed(scaled),
        r"^0 \(Linear\) computes scale from other tensors, .*module\.get_submodule\('0'\)\.scale\.detach\(\)",
        first_undone(lambda part: setattr(part, "scale", part.scale.detach())),
    ),
    "parallel": (
        lambda: nn.DataParallel(small()),
        r"^the module itself \(DataParallel\) wraps a module .*module\.module\.$",
        lambda module: module.module,
    ),
    "a parallel part": (
        lambda: nn.Sequential(nn.DataParallel(nn.Linear(5, 4)), nn.Linear(4, 3)),
        r"^0 \(DataParallel\) .*module\.0\.module\.$",
        lambda module: nn.Sequential(module[0].module, module[1]),
    ),
    "averaged": (
        lambda: AveragedModel(small()),
        r"^the module itself \(AveragedModel\) wraps",
        lambda module: module.module,
    ),
    "double": (lambda: small().double(), r"the module is torch\.float64, .*Pass module\.float\(\)", nn.Module.float),
    "half": (lambda: small().half(), r"the module is torch\.float16, .*Pass module\.float\(\)", nn.Module.float),
    "bfloat16": (lambda: small().bfloat16(), r"the module is torch\.bfloat16", nn.Module.float),
    "one layer double": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).double()),
        r"the module is torch\.float64",
        nn.Module.float,
    ),
    "no numbers": (
        lambda: small().to("meta"),
        r"the module holds no numbers \(device meta\)",
        lambda module: module.to_empty(device="cpu").apply(lambda part: [p.data.zero_() for p in part.parameters()]),
    ),
}


@pytest.mark.parametrize("name", UNDONE)
def test_modules_whose_parameters_are_not_their_own_say_what_to_pass_instead(name):
    make, says, undo = UNDONE[name]
    module = make()
    with pytest.raises(ValueError, match=says):
        nets.from_module(module, (5,))
    module = undo(module)
    net, x = nets.from_module(module, (5,)), torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(0))
    params = {n: p.unsqueeze(0) for n, p in net.init(np.random.default_rng(0)).items()}
    torch.testing.assert_close(net.apply(params, x)[0], module.eval()(x[0]))


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_a_sample_of_another_precision_says_what_to_pass_instead(kind):
    with pytest.raises(ValueError, match=rf"the sample is {kind}, but clients train float32. Pass sample.float\(\)"):
        nets.from_module(small(), torch.zeros(5, dtype=kind))
    assert nets.from_module(small().to(kind), torch.zeros(5, dtype=kind)).shapes["fc1.weight"] == (4, 5)
