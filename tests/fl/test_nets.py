"""Image networks against plain torch.nn networks, one per client."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from algorithm_jobs import distance, job, models, run
from stacked_nets import CLIENTS, SAMPLES, Block, Convolutions, gradients, images
from torch import nn

from fedstat.fl import algorithms, evaluate, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import ComputeConfig
from fedstat.fl.nets import conv

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


PIXELS = [(1, 0), (2, 0), ((2,), (0,)), ((1, 3), [0, 0]), ([3, 2], "valid"), (1, "same"), (2, 1), (3, (0, 1))]


@pytest.mark.parametrize(("stride", "padding"), PIXELS)
@pytest.mark.parametrize("x", [torch.randn(2, 6, 7, 9), torch.randn(6, 7, 9)], ids=["batch", "image"])
def test_a_convolution_of_single_pixels_is_torchs(stride, padding, x):
    weight, bias = torch.randn(4, 3, 1, 1), torch.randn(4)
    ours = conv.conv2d(x, weight, bias, stride, padding, groups=2)
    torch.testing.assert_close(ours, nn.functional.conv2d(x, weight, bias, stride, padding, groups=2))


@pytest.mark.parametrize("name", TWINS)
def test_no_network_has_the_convolution_whose_gradient_overruns_its_memory(name):
    """A strided convolution of single pixels without padding, by oneDNN on processors without AVX-512."""
    net = nets.named(name, (1, 28, 28), 5, width=0.05)
    for clients in (1, CLIENTS):
        params = {n: p[:clients] for n, p in stacked(net).items()}
        with Convolutions() as convolutions:
            net.apply(params, images(1)[:clients])
        assert len(convolutions.seen) >= 2
        assert not [size for size, stride, padding in convolutions.seen if size == (1, 1) and stride > 1 > padding]


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


@pytest.mark.parametrize("real", [None, torch.arange(6) < torch.tensor([6, 3])[:, None]])
def test_batch_norm_of_bfloat16_has_float32_statistics(real):
    h = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0)).add(3).bfloat16()
    kinds = {"scale": torch.ones, "shift": torch.zeros, "running_mean": torch.zeros, "running_var": torch.ones}
    params, exact = ({f"a.{kind}": full(2, 2) for kind, full in kinds.items()} for _ in range(2))
    out = conv.batch_norm(params, "a", h, training=True, real=real)
    expected = conv.batch_norm(exact, "a", h.float(), training=True, real=real)
    assert torch.equal(out, expected.bfloat16())
    torch.testing.assert_close(params, exact)


def test_padded_batches_of_a_batch_normalised_network_train_in_bfloat16():
    net = nets.lenet((1, 16, 16), 3, norm="batch")
    x = images(1, 16, 12).float().flatten(0, 1)[:12]
    data = Rows(x, torch.arange(12) % 3, np.array([0, 9, 12]))
    exact, rounded = (
        job(algorithms.fedavg(), net=net, data=data, sizes=[9, 3], batch_size=6, precision=precision)
        for precision in ("float32", "bfloat16")
    )
    assert 0 < distance(models(exact, 1), models(rounded, 1)) < 0.05 * distance(models(exact, 1), models(exact, 0))


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
    assert nets.n_outputs(net) == 7
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
        assert ours.std() == pytest.approx(bound / np.sqrt(3), rel=4 * np.sqrt(0.2 / ours.numel()))


@pytest.mark.parametrize("make", [
    lambda: nets.lenet((3, 16, 16), 5, norm="batch", width=0.5),
    lambda: nets.lenet((3, 16, 16), 5, norm="batch", width=0.5, convolution="loop", statistics="local"),
    lambda: nets.from_module(Block(), (3, 16, 16)),
    lambda: nets.from_module(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, 5)), (3, 16, 16)),
])  # fmt: skip
def test_training_does_not_depend_on_how_clients_of_unequal_size_are_chunked(make):
    rng, sizes = np.random.default_rng(1), [13, 3, 12]
    x, start = torch.from_numpy(rng.normal(size=(28, 3, 16, 16))).float(), np.cumsum([0, *sizes])
    data = Rows(x, torch.from_numpy(rng.integers(0, 5, 28)), start)
    j = job(algorithms.fedavg(), net=make(), data=data, sizes=sizes, batch_size=4, optimizer=optim.sgd(0.05))
    one, other = (replace(j, test=data, compute=ComputeConfig(client_chunk=c, threads=t)) for c, t in ((1, 2), (3, 1)))
    loss = [evaluate.evaluate(each, run(each, 2))["loss"] for each in (one, other)]
    assert np.isfinite(loss[0]).all()
    np.testing.assert_allclose(loss[0], loss[1], rtol=2e-4)


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
