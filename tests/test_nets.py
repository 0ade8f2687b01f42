"""Image networks and users' modules against plain torch.nn networks, one per client."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

from fedstat import fl
from fedstat.fl import algorithms, nets
from fedstat.fl.algorithms.mixture import mixture
from fedstat.fl.nets import conv

CLIENTS, SAMPLES = 3, 4
WAYS = ("loop", "grouped", "unfold")


def normalisation(kind, channels):
    if kind is None:
        return nn.Identity()
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(min(8, channels & -channels), channels)


class Plain(nn.Module):
    """Convolutions, their normalisation and dense layers by the names of ours; subclasses say how they are joined."""

    def __init__(self, shapes, norm, stride=()):
        super().__init__()
        for name, shape in shapes.items():
            layer, kind = name.split(".")
            if kind != "weight":
                continue
            if len(shape) == 2:
                self.add_module(layer, nn.Linear(shape[1], shape[0]))
                continue
            padding = self.padding if shape[2] > 1 else 0
            step = 2 if layer in stride else 1
            self.add_module(layer, nn.Conv2d(shape[1], shape[0], shape[2], step, padding, bias=norm is None))
            self.add_module(f"{layer}_norm", normalisation(norm, shape[0]))

    def conv(self, name, h):
        return getattr(self, f"{name}_norm")(getattr(self, name)(h))

    def load(self, params):
        kinds = {"scale": "weight", "shift": "bias"}
        state = {}
        for name, p in params.items():
            layer, kind = name.split(".")
            theirs = f"{layer}.{kind}" if kind in ("weight", "bias") else f"{layer}_norm.{kinds.get(kind, kind)}"
            state[theirs] = p.detach().clone()
        missing = self.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys
        assert all(key.endswith("num_batches_tracked") for key in missing.missing_keys)
        return dict(zip(params, state, strict=True))


class PlainCnn(Plain):
    padding = 0

    def forward(self, h):
        for name in ("conv1", "conv2"):
            h = nn.functional.max_pool2d(self.conv(name, h).relu(), 2)
        return self.fc2(self.fc1(h.flatten(1)).relu())


class PlainVgg(Plain):
    padding = 1

    def forward(self, h):
        for i in range(1, 14):
            h = self.conv(f"conv{i}", h).relu()
            if i in (2, 4, 7, 10, 13):
                h = nn.functional.max_pool2d(h, 2, ceil_mode=True)
        return self.fc3(self.fc2(self.fc1(h.flatten(1)).relu()).relu())


class PlainResnet(Plain):
    padding = 1

    def forward(self, h):
        h = self.conv("conv1", h).relu()
        convs = sum(1 for name, _ in self.named_children() if name.startswith("conv") and "norm" not in name)
        for i in range(2, convs, 2):
            past = self.conv(f"shortcut{i}", h) if hasattr(self, f"shortcut{i}") else h
            h = (self.conv(f"conv{i + 1}", self.conv(f"conv{i}", h).relu()) + past).relu()
        return self.fc1(nn.functional.adaptive_avg_pool2d(h, 1).flatten(1))


def halving(stages, blocks):
    """Layers with stride 2: the first convolution of every stage but the first, and its shortcut."""
    first = [2 + 2 * blocks * s for s in range(1, stages)]
    return [f"{kind}{i}" for i in first for kind in ("conv", "shortcut")]


TWINS = {
    "lenet": PlainCnn,
    "cnn": PlainCnn,
    "vgg16": PlainVgg,
    "resnet8": partial(PlainResnet, stride=halving(3, 1)),
    "resnet10": partial(PlainResnet, stride=halving(4, 1)),
    "resnet18": partial(PlainResnet, stride=halving(4, 2)),
}
WIDTH = {"lenet": 1.0, "cnn": 0.25, "resnet8": 0.5}


def stacked(net, dtype=torch.float64):
    """Another start for every client."""
    starts = [net.init(np.random.default_rng(i)) for i in range(CLIENTS)]
    params = {name: torch.stack([s[name] for s in starts]).to(dtype) for name in net.shapes}
    for name, p in params.items():
        if name.endswith(("scale", "shift", "running_mean", "running_var")):
            p += torch.rand(p.shape, generator=torch.Generator().manual_seed(len(name)))
        p.requires_grad_(name not in net.buffers)
    return params


def images(channels, size=28, samples=SAMPLES):
    return torch.from_numpy(np.random.default_rng(7).normal(size=(CLIENTS, samples, channels, size, size)))


def gradients(net, params, out, weight=1.0):
    trained = [name for name in net.shapes if name not in net.buffers]
    return dict(
        zip(trained, torch.autograd.grad((out.sin() * weight).sum(), [params[n] for n in trained]), strict=True)
    )


@pytest.mark.parametrize("norm", [None, "group", "batch"])
@pytest.mark.parametrize("name", TWINS)
def test_a_network_is_its_torch_twin_for_every_client(name, norm):
    net = nets.named(name, (2, 28, 28), 5, width=WIDTH.get(name, 0.07), norm=norm)
    params, x = stacked(net), images(2)
    out = net.apply(params, x, torch.ones(CLIENTS, SAMPLES, dtype=torch.bool)) if net.buffers else net.apply(params, x)
    ours = gradients(net, params, out)
    for c in range(CLIENTS):
        twin = TWINS[name](net.shapes, norm).double()
        theirs = twin.load({n: p[c] for n, p in stacked(net).items()})
        expected = twin(x[c])
        torch.testing.assert_close(out[c], expected)
        expected.sin().sum().backward()
        for n, grad in ours.items():
            torch.testing.assert_close(grad[c], twin.get_parameter(theirs[n]).grad, msg=lambda m, n=n: f"{n}: {m}")
        for n in net.buffers:
            torch.testing.assert_close(params[n][c], twin.get_buffer(theirs[n]))


@pytest.mark.parametrize("norm", [None, "group", "batch"])
@pytest.mark.parametrize("name", ["cnn", "resnet8"])
def test_three_ways_to_convolve_agree(name, norm):
    found = []
    for way in WAYS:
        net = nets.named(name, (3, 28, 28), 4, width=0.25, norm=norm, convolution=way)
        params = stacked(net)
        live = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
        out = net.apply(params, images(3), live) if net.buffers else net.apply(params, images(3))
        found.append([*gradients(net, params, out, live[..., None]).values(), *(params[n] for n in net.buffers)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 2, 0), (5, 1, 0)])
@pytest.mark.parametrize("unfold", [False, True])
def test_a_stacked_convolution_is_one_convolution_per_client(kernel, stride, padding, unfold):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, 2, 3, 9, 11, generator=rng, dtype=torch.float64)
    weight = torch.randn(CLIENTS, 4, 3, kernel, kernel, generator=rng, dtype=torch.float64)
    bias = torch.randn(CLIENTS, 4, generator=rng, dtype=torch.float64)
    z = conv.convolve(x.transpose(0, 1).flatten(1, 2), weight, bias, stride, padding, unfold)
    z = z.view(2, CLIENTS, 4, *z.shape[2:])
    for c in range(CLIENTS):
        torch.testing.assert_close(z[:, c], nn.functional.conv2d(x[c], weight[c], bias[c], stride, padding))


@pytest.mark.parametrize("way", WAYS)
def test_batch_norm_keeps_torchs_running_statistics_and_leaves_padding_out(way):
    net = nets.cnn((1, 20, 20), 3, width=0.1, norm="batch", convolution=way)
    params = {name: p.detach() for name, p in stacked(net).items()}
    twins = [PlainCnn(net.shapes, "batch").double() for _ in range(CLIENTS)]
    for c, twin in enumerate(twins):
        twin.load({n: p[c] for n, p in params.items()})
    for step, sizes in enumerate([(6, 6, 6), (6, 4, 1), (5, 6, 2)]):
        x = images(1, 20, 6) + step
        live = torch.arange(6) < torch.tensor(sizes)[:, None]
        x[~live] = 1e3  # what stands in padding is of no account
        out = net.apply(params, x, live)
        for c, twin in enumerate(twins):
            torch.testing.assert_close(out[c, : sizes[c]], twin(x[c, : sizes[c]]))
    x = images(1, 20, 6)
    out = net.apply(params, x)
    for c, twin in enumerate(twins):
        torch.testing.assert_close(out[c], twin.eval()(x[c]))
        for n in net.buffers:
            layer, kind = n.split(".")
            torch.testing.assert_close(params[n][c], twin.get_buffer(f"{layer}_norm.{kind}"))


def test_one_value_in_a_batch_leaves_batch_norm_finite():
    params = {"a.scale": torch.ones(1, 2), "a.shift": torch.ones(1, 2)}
    params |= {"a.running_mean": torch.zeros(1, 2), "a.running_var": torch.ones(1, 2)}
    out = conv.batch_norm(params, "a", torch.full((1, 2, 1, 1), 3.0), training=True, real=None)
    assert torch.equal(out, torch.ones(1, 2, 1, 1))
    torch.testing.assert_close(params["a.running_mean"], torch.full((1, 2), 0.3))
    torch.testing.assert_close(params["a.running_var"], torch.full((1, 2), 0.9))


@pytest.mark.parametrize("statistics", ["shared", "local"])
def test_only_local_statistics_are_unshared(statistics):
    net = nets.cnn((1, 28, 28), 3, norm="batch", statistics=statistics)
    expected = {f"conv{i}.running_{kind}" for i in (1, 2) for kind in ("mean", "var")}
    assert set(net.buffers) == expected
    assert set(net.unshared) == (expected if statistics == "local" else set())


SAMPLE = {"lstm": (80,), "fasttext": (80,), "transformer": (80,)}


@pytest.mark.parametrize("norm", [None, "group", "batch"])
@pytest.mark.parametrize("name", [n for n in nets.NETS if n not in SAMPLE])
def test_names_have_one_dot_and_units_first(name, norm):
    options = {} if name == "mlp" else {"norm": norm}
    net = nets.named(name, (3, 32, 32), 7, width=0.25, **options)
    assert all(n.count(".") == 1 for n in net.shapes)
    start = net.init(np.random.default_rng(0))
    assert {n: tuple(p.shape) for n, p in start.items()} == dict(net.shapes)
    for n, shape in net.shapes.items():
        assert shape[0] == nets.layers(net)[nets.layer_of(n)]
    assert list(net.shapes.values())[-1][0] == 7
    assert set(net.buffers) <= set(net.shapes)
    again = net.init(np.random.default_rng(0))
    assert all(torch.equal(start[n], again[n]) for n in start)


def test_layers_stand_at_the_papers_indices():
    assert list(nets.layers(nets.vgg16((3, 32, 32), 100)))[15 - 1] == "fc2"
    assert len(nets.layers(nets.vgg16((3, 32, 32), 100))) == 16
    layers = list(nets.layers(nets.resnet18((3, 32, 32), 10)))
    assert [layers[i - 1] for i in (1, 5, 17)] == ["conv1", "conv5", "conv17"]
    assert layers[-4:] == ["shortcut6", "shortcut10", "shortcut14", "fc1"]


def test_known_sizes():
    def size(net):
        return sum(int(np.prod(s)) for n, s in net.shapes.items() if n not in net.buffers)

    assert size(nets.cnn((1, 28, 28), 10)) == 582_026  # FedCP's and PFLlib's FedAvgCNN
    assert size(nets.resnet18((3, 32, 32), 10, norm="batch")) == 11_173_962  # the usual ResNet-18 for CIFAR-10


def test_start_is_that_of_torch():
    net, twin = nets.cnn((1, 28, 28), 10), nn.Conv2d(32, 64, 5)
    start = net.init(np.random.default_rng(0))
    for ours, theirs in ((start["conv2.weight"], twin.weight), (start["conv2.bias"], twin.bias)):
        bound = 1 / np.sqrt(32 * 25)
        assert ours.abs().max() <= bound
        assert theirs.abs().max() <= bound + 1e-7
        assert ours.std() == pytest.approx(bound / np.sqrt(3), rel=0.25)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)  # registered before what it normalises
        self.conv = nn.Conv2d(3, 4, 3, 2, 1, bias=False)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, x):
        h = self.bn(self.conv(x)).relu()
        return self.head(self.pool(self.body(h) + h).flatten(1))


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


@pytest.mark.parametrize("first", [
    (nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)),
    (nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()),
])  # fmt: skip
def test_a_batch_of_one_sample_leaves_a_users_batch_norm_finite(first):
    net = nets.from_module(nn.Sequential(*first, nn.Linear(3, 2)), (1, 2, 2))
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
    with pytest.raises(ValueError, match=r"start alike.*start='random'"):
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


@pytest.mark.parametrize("make", [
    lambda: nets.lenet((3, 16, 16), 5, norm="batch", width=0.5),
    lambda: nets.lenet((3, 16, 16), 5, norm="batch", width=0.5, convolution="loop", statistics="local"),
    lambda: nets.from_module(Block(), (3, 16, 16)),
])  # fmt: skip
def test_training_does_not_depend_on_how_clients_of_unequal_size_are_chunked(make):
    rng, sizes = np.random.default_rng(1), np.array([13, 6, 9])
    client = np.repeat(np.arange(3), sizes + 4)
    split = np.concatenate([["train"] * n + ["test"] * 4 for n in sizes])
    data = xr.Dataset(
        {
            "x": (("sample", "channel", "row", "column"), rng.normal(size=(len(client), 3, 16, 16)).astype(np.float32)),
            "y": ("sample", rng.integers(0, 5, len(client))),
        },
        coords={"client": ("sample", client), "split": ("sample", split)},
    )
    net = make()
    runs = [
        fl.train(data, net, algorithms.fedavg(), rounds=2, batch_size=4, lr=0.05, client_chunk=c, threads=t)
        for c, t in ((1, 2), (3, 1))
    ]
    loss = [run["metrics/loss"].to_numpy() for run in runs]
    assert np.isfinite(loss[0]).all()
    np.testing.assert_allclose(loss[0], loss[1], rtol=2e-4)


def linear(*parts):
    return nn.Sequential(nn.Flatten(), *parts, nn.Linear(4, 2))


class Random(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.gain


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x.flatten(1))


def tied():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    return linear(a, b)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (linear(nn.Dropout()), "1 .Dropout. draws random numbers"),
        (linear(Random()), "two outputs for one input"),
        (nn.Sequential(nn.LSTM(2, 3)), "0 .LSTM. is recurrent"),
        (linear(Holder()), "1 .Holder. holds gain itself"),
        (linear(nn.BatchNorm1d(4, momentum=None)), "track_running_stats=True and a momentum"),
        (Unused(), "does not use idle"),
        (tied(), "2 .Linear. shares its weight with 1"),
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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nets.named("resnet19", (3, 32, 32), 10), "net must be one of .*Did you mean 'resnet1"),
        (lambda: nets.named("cnn", (3, 32, 32), 10, widht=2), "Did you mean 'width'"),
        (lambda: nets.named("cnn", (784,), 10), r"\(channel, row, column\) .* but got \(784,\)"),
        (lambda: nets.named("cnn", (1, 12, 12), 10), "at least 16×16"),
        (lambda: nets.named("cnn", (1, 28, 28), 0), "outputs must be an integer >= 1"),
        (lambda: nets.named("cnn", (1, 28, 28), 10, width=0), "width must be a finite number"),
        (lambda: nets.named("cnn", (1, 28, 28), 10, norm="layer"), "norm must be one of"),
        (lambda: nets.named("cnn", (1, 28, 28), 10, convolution="fft"), "convolution must be one of"),
        (lambda: nets.named("cnn", (1, 28, 28), 10, statistics="none"), "statistics must be one of"),
    ],
)
def test_mistakes_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
