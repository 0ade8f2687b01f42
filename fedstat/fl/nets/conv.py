"""Convolutional networks: LeNet, CNN, ResNet, VGG.

Between layers the activations of k clients are one tensor (sample, client·channel, row, column), so that ReLU, pooling,
group and batch normalisation are torch's own functions for any k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl.nets import dense
from fedstat.fl.nets.base import Net, Params, is_statistic

if TYPE_CHECKING:
    from torch import Tensor


Norm = Literal["group", "batch"]
Way = Literal["auto", "loop", "grouped", "unfold"]
Run = Callable[[str, "Tensor"], "Tensor"]
EPS, MOMENTUM = 1e-5, 0.1
_MOST_GROUPED = 24


class Layer(NamedTuple):
    """A convolution, or a dense layer where ``kernel`` is 0.

    Attributes
    ----------
    inputs, outputs : int
        Channels, or features of a dense layer.
    kernel : int
        Rows and columns of the kernel.
    stride, padding : int
    norm : {"group", "batch"}, optional
        Normalisation of the outputs; ``shift`` then takes the place of the bias.
    """

    inputs: int
    outputs: int
    kernel: int = 0
    stride: int = 1
    padding: int = 0
    norm: Norm | None = None


def assemble(
    layers: Mapping[str, Layer],
    features: Callable[[Run, Tensor], Tensor],
    *,
    convolution: Way = "auto",
    statistics: Literal["shared", "local"] = "shared",
) -> Net:
    """Network of named layers.

    Parameters
    ----------
    layers : mapping from name to Layer
        The last is the output layer, a dense one.
    features : callable (run, h) -> Tensor
        The network up to the output layer: ``run(name, h)`` sends activations through a layer; ``features`` does what
        comes between layers. A convolution maps (sample, client·channel, row, column) to the same dims; a dense layer
        takes these or (client, sample, feature) and returns (client, sample, output).
    convolution : {"auto", "loop", "grouped", "unfold"}, default "auto"
        How clients' convolutions are computed: client by client, as one grouped convolution, or as one matrix product
        of unfolded inputs; for a single client the first two are the same. See :func:`choose`.
    statistics : {"shared", "local"}, default "shared"
        Whether running statistics of batch normalisation are averaged by the server or stay with their client.
    """
    check.choice("convolution", convolution, ("auto", "loop", "grouped", "unfold"))
    check.choice("statistics", statistics, ("shared", "local"))
    for layer in layers.values():
        check.choice("norm", layer.norm, (None, "group", "batch"))
    shapes = {f"{name}.{kind}": shape for name, layer in layers.items() for kind, shape in _shapes(layer).items()}
    widest = max((layer.outputs for layer in layers.values() if layer.kernel), default=0)
    buffers, made = tuple(filter(is_statistic, shapes)), _Assembled(layers, features, convolution, widest)
    return Net(
        shapes,
        partial(dense.draw_parameters, shapes),
        partial(made.run, made.whole),  # each client through all layers, so that only its activations are in the cache
        buffers=buffers,
        unshared=buffers if statistics == "local" else (),
        features=partial(made.run, made.body),
        head=partial(made.run, made.head),
        thin=dense.weights(name for name, layer in layers.items() if not layer.kernel),
    )


class _Assembled(NamedTuple):
    """What :func:`assemble` is given, and the most channels of a convolution."""

    layers: Mapping[str, Layer]
    features: Callable[[Run, Tensor], Tensor]
    convolution: Way
    widest: int

    def run(self, part: Callable[..., Tensor], params: Params, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Run a part of the network for all clients at once, or for one client after the other."""
        if self.way(x) != "loop":
            return part(params, x, live)
        return torch.cat([part(own, x[c : c + 1], _one(live, c)) for c, own in enumerate(_each(params))])

    def way(self, x: Tensor) -> Way:
        """How to convolve x; for a single client "grouped" is what the loop would do."""
        if len(x) == 1:
            return "unfold" if self.convolution == "unfold" else "grouped"
        return choose(self.widest, x.device) if self.convolution == "auto" else self.convolution

    def whole(self, params: Params, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The network."""
        return self.head(params, self.body(params, x, live))

    def body(self, params: Params, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The network up to its output layer."""
        k, unfold = len(x), self.way(x) == "unfold"
        real = None if live is None or bool(live.all()) else live

        def run(name: str, h: Tensor) -> Tensor:
            layer = self.layers[name]
            if not layer.kernel:
                return dense.linear_autograd(params, name, _rows(h, k))
            h = convolve(h, params[f"{name}.weight"], params.get(f"{name}.bias"), layer.stride, layer.padding, unfold)
            if layer.norm == "group":
                return group_norm(params, name, h)
            return batch_norm(params, name, h, live is not None, real) if layer.norm == "batch" else h

        return _rows(self.features(run, _fold(x.to(next(iter(params.values())).dtype))), k)

    def head(self, params: Params, h: Tensor, _: Tensor | None = None) -> Tensor:
        """The output layer."""
        return dense.linear_autograd(params, [*self.layers][-1], h)


def choose(channels: int, device: torch.device) -> Way:
    """Default way to compute convolutions of clients with at most that many channels each."""
    # Measured on one CPU thread, channels last, forward and backward of whole networks, 5 clients, batches of 10 to 50:
    # grouped took 0.42 to 0.66 of the loop's time at 16 channels (LeNet, narrow CNN and ResNet-8), 0.58 to 0.82 at 24,
    # 0.72 to 1.25 at 32 and 1.0 to 1.4 at 64; unfolding was always slower than both. On a GPU nothing was measured:
    # one kernel for all clients is used there because small ones leave it idle.
    return "loop" if device.type == "cpu" and channels > _MOST_GROUPED else "grouped"


def groups_of(channels: int) -> int:
    """Groups of group normalisation: 8, or the largest power of two below that divides the channels."""
    return math.gcd(channels, 8)


def convolve(
    h: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0, unfold: bool = False
) -> Tensor:
    """Convolve (sample, client·channel, row, column) with kernels (client, output, channel, row, column)."""
    k, outputs, inputs = weight.shape[:3]
    size = weight.shape[3:]
    flat = None if bias is None else bias.flatten()
    if k == 1 or not unfold:
        return functional.conv2d(h, weight.flatten(0, 1), flat, stride, padding, groups=k)
    n = len(h)
    rows, cols = ((s + 2 * padding - r) // stride + 1 for s, r in zip(h.shape[2:], size, strict=True))
    seen = functional.unfold(h, tuple(size), padding=padding, stride=stride)
    seen = seen.view(n, k, inputs * size.numel(), rows * cols).permute(1, 2, 0, 3).flatten(2)
    out = torch.bmm(weight.flatten(2), seen).view(k * outputs, n, rows, cols).transpose(0, 1)
    return out if flat is None else out + flat.view(-1, 1, 1)


def group_norm(params: Params, name: str, h: Tensor) -> Tensor:
    """Normalise the channels of h (sample, client·channel, row, column) in groups, each client's on their own."""
    scale, shift = params[f"{name}.scale"], params[f"{name}.shift"]
    k, channels = scale.shape
    return functional.group_norm(h, k * groups_of(channels), scale.flatten(), shift.flatten(), EPS)


def batch_norm(params: Params, name: str, h: Tensor, training: bool, real: Tensor | None) -> Tensor:
    """Normalise each channel of each client; in training, also update its running statistics in place.

    Parameters
    ----------
    h : Tensor (sample, client·channel, row, column)
    training : bool
        Whether the statistics are those of this batch (Ioffe & Szegedy 2015) or the running ones.
    real : bool Tensor (client, sample), optional
        Samples that are not padding; None: all.
    """
    scale, shift = params[f"{name}.scale"].flatten(), params[f"{name}.shift"].flatten()
    # .data: these are views of one tensor, and another client's update must not count as a change of this one.
    mean, var = (params[f"{name}.{kind}"].data for kind in ("running_mean", "running_var"))
    if real is None or not training:
        if training and h[:, 0].numel() == 1:  # torch refuses a single value, which has no unbiased variance
            real = torch.ones(len(mean), 1, dtype=torch.bool, device=h.device)
        else:
            return functional.batch_norm(h, mean.view(-1), var.view(-1), scale, shift, training, MOMENTUM, EPS)
    k, channels = mean.shape
    given, h = h.dtype, h.to(mean.dtype)  # bfloat16 would count samples and sum squares to three digits
    weight = real.T.to(h.dtype).repeat_interleave(channels, 1)[:, :, None, None]
    count = real.sum(1).mul(h.shape[2] * h.shape[3]).to(h.dtype).repeat_interleave(channels)
    centre = (h * weight).sum((0, 2, 3)) / count
    away = h - centre[:, None, None]
    spread = (away.square() * weight).sum((0, 2, 3)) / count
    with torch.no_grad():
        mean.lerp_(centre.detach().view(k, channels), MOMENTUM)
        var.lerp_((spread.detach() * count / (count - 1).clamp(min=1)).view(k, channels), MOMENTUM)
    return (away * (scale / (spread + EPS).sqrt())[:, None, None] + shift[:, None, None]).to(given)


def _shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Shapes of one client's parameters, by kind."""
    window = (layer.kernel, layer.kernel) if layer.kernel else ()
    found: dict[str, tuple[int, ...]] = {"weight": (layer.outputs, layer.inputs, *window)}
    kinds = {None: ("bias",), "group": ("scale", "shift"), "batch": ("scale", "shift", "running_mean", "running_var")}
    return found | dict.fromkeys(kinds[layer.norm], (layer.outputs,))


def _each(params: Params) -> list[Params]:
    """Every client's parameters, (1, ...)."""
    parts = {name: p.split(1) for name, p in params.items()}
    return [{name: p[c] for name, p in parts.items()} for c in range(len(next(iter(parts.values()))))]


def _rows(h: Tensor, k: int) -> Tensor:
    """Activations (sample, client·channel, row, column) of k clients as (client, sample, feature)."""
    return h.reshape(len(h), k, -1).transpose(0, 1) if h.ndim == 4 else h


def channels_last(x: Tensor) -> Tensor:
    """Images (sample, channel, row, column) with channels last in memory, which later layers inherit.

    Done by strides, as ``contiguous`` takes images of one channel to be in either order. Pooling then took a sixteenth
    and the first convolution an eighth of the time (28×28, 32 channels, batch of 50, one thread).
    """
    n, channels, rows, columns = x.shape
    return x.movedim(1, -1).flatten(1).view(n, rows, columns, channels).movedim(-1, 1)


def _fold(x: Tensor) -> Tensor:
    """Inputs (client, sample, channel, row, column) as (sample, client·channel, row, column)."""
    h = x[0] if len(x) == 1 else x.transpose(0, 1).flatten(1, 2)
    return h if h.is_cuda else channels_last(h)


def _one(live: Tensor | None, c: int) -> Tensor | None:
    return None if live is None else live[c : c + 1]


def lenet(sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = None, **options: Any) -> Net:
    """LeNet-style network for FEMNIST: 5×5 convolutions to 6 and 16 channels, dense layers of 120 and ``outputs``.

    Parameters
    ----------
    sample : sequence of int
        Shape of one sample, (channel, row, column), at least 16×16.
    outputs : int
        Classes; 1 for a binary classifier.
    width : float, default 1
        Multiplies channels and hidden units, rounded, at least 1.
    norm : {"group", "batch"}, optional
        Normalisation after each convolution.
    **options
        ``convolution`` and ``statistics`` of :func:`fedstat.fl.nets.conv.assemble`.

    Raises
    ------
    ValueError
        If the sample is not an image or too small, or an option is unknown.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> nets.layers(lenet((1, 28, 28), 62))
    {'conv1': 6, 'conv2': 16, 'fc1': 120, 'fc2': 62}
    """
    return _two_and_two(sample, outputs, (6, 16), 120, width, norm, options)


def cnn(sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = None, **options: Any) -> Net:
    """4-layer CNN of McMahan et al. (2017) and FedCP §5.1: 5×5 convolutions to 32 and 64 channels, 512 hidden units.

    As in FedCP, the convolutions are not padded (5×5 on 28×28 leaves 4×4×64 features). Arguments and errors are
    those of :func:`lenet`.

    Examples
    --------
    >>> cnn((1, 28, 28), 10).shapes["fc1.weight"]
    (512, 1024)
    """
    return _two_and_two(sample, outputs, (32, 64), 512, width, norm, options)


def resnet8(
    sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = "group", **options: Any
) -> Net:
    """ResNet of 7 convolutions for small images (He et al. 2016, §4.2, n = 1): 16, 32, 64 channels, one block each.

    Convolutions are numbered from the stem on, ``conv1`` to ``conv7``; the 1×1 convolution around the block that begins
    with conv4 is ``shortcut4``. Shortcuts come after all convolutions, so that conv l is layer l. Arguments and errors
    are those of :func:`lenet`, except that ``norm`` is "group" by default (the FedFac paper used batch normalisation)
    and images need at least 8×8.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> list(nets.layers(resnet8((3, 32, 32), 10)))[3:]
    ['conv4', 'conv5', 'conv6', 'conv7', 'shortcut4', 'shortcut6', 'fc1']
    """
    return _resnet(sample, outputs, ((16, 1), (32, 1), (64, 1)), width, norm, options)


def resnet10(
    sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = "group", **options: Any
) -> Net:
    """ResNet-10 for small images: 64, 128, 256, 512 channels, one block each.

    Arguments as in :func:`resnet8`.
    """
    return _resnet(sample, outputs, ((64, 1), (128, 1), (256, 1), (512, 1)), width, norm, options)


def resnet18(
    sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = "group", **options: Any
) -> Net:
    """ResNet-18 for small images: 3×3 stem, no pooling after it, two blocks each of 64, 128, 256, 512 channels.

    Arguments as in :func:`resnet8`.
    """
    return _resnet(sample, outputs, ((64, 2), (128, 2), (256, 2), (512, 2)), width, norm, options)


def vgg16(sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = None, **options: Any) -> Net:
    """VGG-16 for small images: 13 3×3 convolutions and 3 dense layers, the hidden ones of 512 units.

    Simonyan & Zisserman (2015), configuration D, with the smaller dense layers usual for 32×32 images. 2×2 max
    pooling, five times, rounds up, so that 28×28 images also fit. Arguments and errors are those of :func:`lenet`.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> list(nets.layers(vgg16((3, 32, 32), 100)))[14]
    'fc2'
    """
    inputs, rows, columns = image(sample, 8)
    hidden, layers = scaled(512, width), {}
    pooled = ("conv2", "conv4", "conv7", "conv10", "conv13")
    for i, wanted in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512), 1):
        layers[f"conv{i}"] = Layer(inputs, scaled(wanted, width), 3, 1, 1, norm)
        inputs = scaled(wanted, width)
    convs = list(layers)
    layers["fc1"] = Layer(inputs * -(-rows // 32) * -(-columns // 32), hidden)
    layers["fc2"] = Layer(hidden, hidden)
    layers["fc3"] = Layer(hidden, check.integer("outputs", outputs))

    def features(run: Run, h: Tensor) -> Tensor:
        for name in convs:
            h = run(name, h)
            h = torch.relu_(functional.max_pool2d(h, 2, ceil_mode=True) if name in pooled else h)
        return torch.relu(run("fc2", torch.relu(run("fc1", h))))

    return assemble(layers, features, **options)._replace(inputs=math.prod(sample))


def _two_and_two(
    sample: Sequence[int],
    outputs: int,
    channels: tuple[int, int],
    hidden: int,
    width: float,
    norm: Norm | None,
    options: dict[str, Any],
) -> Net:
    """Two 5×5 convolutions, each followed by 2×2 max pooling and ReLU, and two dense layers."""
    inputs, rows, columns = image(sample, 16)
    a, b = (scaled(c, width) for c in channels)
    left = b * after_two(rows) * after_two(columns)
    hidden = scaled(hidden, width)
    layers = {
        "conv1": Layer(inputs, a, 5, norm=norm),
        "conv2": Layer(a, b, 5, norm=norm),
        "fc1": Layer(left, hidden),
        "fc2": Layer(hidden, check.integer("outputs", outputs)),
    }

    def features(run: Run, h: Tensor) -> Tensor:
        # ReLU after pooling is the same function and a quarter of the work.
        for name in ("conv1", "conv2"):
            h = torch.relu_(functional.max_pool2d(run(name, h), 2))
        return torch.relu(run("fc1", h))

    return assemble(layers, features, **options)._replace(inputs=math.prod(sample))


def _resnet(
    sample: Sequence[int],
    outputs: int,
    stages: Sequence[tuple[int, int]],
    width: float,
    norm: Norm | None,
    options: dict[str, Any],
) -> Net:
    """Residual network of basic blocks; every stage but the first halves rows and columns."""
    inputs, _, _ = image(sample, 8)
    channels = scaled(stages[0][0], width)
    convs, shortcuts = {"conv1": Layer(inputs, channels, 3, 1, 1, norm)}, {}
    blocks: list[tuple[str, str]] = []
    for stage, (wanted, repeats) in enumerate(stages):
        for block in range(repeats):
            to, stride = scaled(wanted, width), 2 if stage and not block else 1
            first, second = len(convs) + 1, len(convs) + 2
            convs[f"conv{first}"] = Layer(channels, to, 3, stride, 1, norm)
            convs[f"conv{second}"] = Layer(to, to, 3, 1, 1, norm)
            if stride > 1 or channels != to:
                shortcuts[f"shortcut{first}"] = Layer(channels, to, 1, stride, 0, norm)
            blocks.append((f"conv{first}", f"conv{second}"))
            channels = to
    layers = convs | shortcuts | {"fc1": Layer(channels, check.integer("outputs", outputs))}

    def features(run: Run, h: Tensor) -> Tensor:
        h = torch.relu_(run("conv1", h))
        for first, second in blocks:
            past = f"shortcut{first[4:]}"
            h = torch.relu_(run(second, torch.relu_(run(first, h))) + (run(past, h) if past in layers else h))
        return h.mean((2, 3), keepdim=True)

    return assemble(layers, features, **options)._replace(inputs=math.prod(sample))


def after_two(size: int) -> int:
    """Rows left of ``size`` after two 5×5 convolutions with pooling."""
    return ((size - 4) // 2 - 4) // 2


def scaled(number: int, width: float) -> int:
    """Channels or units at a width: rounded, at least 1."""
    return max(1, round(number * check.real("width", width, low=0, open_low=True)))


def image(sample: Sequence[int], least: int) -> tuple[int, int, int]:
    """(channel, row, column) of one sample; ValueError unless it is an image of at least ``least`` rows and columns."""
    shape = tuple(int(s) for s in sample)
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < least:
        raise ValueError(
            f"sample must be the shape (channel, row, column) of one image of at least {least}×{least}, but got "
            f"{tuple(sample)}"
        )
    return shape[0], shape[1], shape[2]
