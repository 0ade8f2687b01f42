"""Convolutional networks: LeNet, CNN, ResNet, VGG.

Between layers the activations of k clients are one tensor (sample, client·channel, row, column). For any k, torch's
functions thus compute ReLU, pooling, group and batch normalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

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
        Normalization of the outputs; ``shift`` then replaces the bias.
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
    """Assemble a network from named layers.

    Parameters
    ----------
    layers : mapping from name to Layer
        The last layer is the output layer, a dense layer.
    features : callable (run, h) -> Tensor
        Computes the inputs of the output layer: ``run(name, h)`` sends activations through a layer, and ``features``
        adds the operations between layers. A convolution maps (sample, client·channel, row, column) to such a tensor. A
        dense layer takes such a tensor or (client, sample, feature), and returns (client, sample, output).
    convolution : {"auto", "loop", "grouped", "unfold"}, default "auto"
        Computation of the clients' convolutions: client by client ("loop"), as one grouped convolution, or as one
        matrix product of unfolded inputs. For a single client "loop" equals "grouped". "auto": see :func:`choose`.
    statistics : {"shared", "local"}, default "shared"
        Running statistics of batch normalization are averaged by the server, or stay with their client.
    """
    check.choice("convolution", convolution, ("auto", "loop", "grouped", "unfold"))
    check.choice("statistics", statistics, ("shared", "local"))
    for layer in layers.values():
        check.choice("norm", layer.norm, (None, "group", "batch"))
    shapes = {f"{name}.{kind}": shape for name, layer in layers.items() for kind, shape in _shapes(layer).items()}
    widest = max((layer.outputs for layer in layers.values() if layer.kernel), default=0)
    buffers, functions = tuple(filter(is_statistic, shapes)), _Assembled(layers, features, convolution, widest)
    return Net(
        shapes,
        partial(dense.draw_parameters, shapes),
        # A loop over clients runs all layers of a client, so that only its activations are in the cache.
        partial(functions.run, functions.outputs),
        buffers=buffers,
        unshared=buffers if statistics == "local" else (),
        features=partial(functions.run, functions.body),
        head=partial(functions.run, functions.head),
        thin=dense.weights(name for name, layer in layers.items() if not layer.kernel),
    )


class _Assembled(NamedTuple):
    """Arguments of :func:`assemble`, and the largest number of channels of a convolution."""

    layers: Mapping[str, Layer]
    features: Callable[[Run, Tensor], Tensor]
    convolution: Way
    widest: int

    def run(self, part: Callable[..., Tensor], params: Params, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Run a part of the network for all clients at once, or for one client after the other."""
        if self.choose_way(x) != "loop":
            return part(params, x, live)
        clients = enumerate(_split_clients(params))
        outputs = [part(p, x[c : c + 1], None if live is None else live[c : c + 1]) for c, p in clients]
        return torch.cat(outputs)

    def choose_way(self, x: Tensor) -> Way:
        """Choose the computation of convolutions of x; for a single client "grouped" equals "loop"."""
        if len(x) == 1:
            return "unfold" if self.convolution == "unfold" else "grouped"
        return choose(self.widest, x.device) if self.convolution == "auto" else self.convolution

    def outputs(self, params: Params, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Return the outputs of the network."""
        return self.head(params, self.body(params, x, live))

    def body(self, params: Params, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Return the inputs of the output layer."""
        k, unfold = len(x), self.choose_way(x) == "unfold"
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
        """Return the outputs of the output layer."""
        return dense.linear_autograd(params, [*self.layers][-1], h)


def choose(channels: int, device: torch.device) -> Way:
    """Return the default computation of convolutions with at most ``channels`` channels per client."""
    # Measured on one CPU thread, channels last, forward and backward of complete networks, 5 clients, batches of 10 to
    # 50: grouped took 0.42 to 0.66 of the loop's time at 16 channels (LeNet, narrow CNN and ResNet-8), 0.58 to 0.82 at
    # 24, 0.72 to 1.25 at 32 and 1.0 to 1.4 at 64; unfolding was always slower than both. A GPU was not measured: one
    # kernel for all clients is used there because small kernels leave it idle.
    return "loop" if device.type == "cpu" and channels > _MOST_GROUPED else "grouped"


def groups_of(channels: int) -> int:
    """Return the number of groups of group normalization: the largest of 8, 4, 2, 1 that divides the channels."""
    return math.gcd(channels, 8)


def convolve(
    h: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 0, unfold: bool = False
) -> Tensor:
    """Convolve (sample, client·channel, row, column) with kernels (client, output, channel, row, column)."""
    k, outputs, inputs = weight.shape[:3]
    size = weight.shape[3:]
    flat = None if bias is None else bias.flatten()
    if k == 1 or not unfold:
        return conv2d(h, weight.flatten(0, 1), flat, stride, padding, groups=k)
    n = len(h)
    rows, cols = ((s + 2 * padding - r) // stride + 1 for s, r in zip(h.shape[2:], size, strict=True))
    windows = functional.unfold(h, tuple(size), padding=padding, stride=stride)
    windows = windows.view(n, k, inputs * size.numel(), rows * cols).permute(1, 2, 0, 3).flatten(2)
    out = torch.bmm(weight.flatten(2), windows).view(k * outputs, n, rows, cols).transpose(0, 1)
    return out if flat is None else out + flat.view(-1, 1, 1)


def conv2d(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve as ``torch.conv2d``; for 1×1 kernels without padding, first take the rows and columns of the stride.

    On CPUs without AVX-512, the gradient of such a strided convolution of fewer than 8 channels, which are stored last,
    writes beyond its memory (oneDNN 3.12).
    """
    if weight.shape[2:].numel() == 1 and (padding == "valid" if isinstance(padding, str) else not np.any(padding)):
        rows, columns = np.broadcast_to(stride, 2).tolist()
        h, stride = h[..., ::rows, ::columns], 1
    return functional.conv2d(h, weight, bias, stride, padding, dilation, groups)


def group_norm(params: Params, name: str, h: Tensor) -> Tensor:
    """Normalize the channels of h (sample, client·channel, row, column) in groups, separately for each client."""
    scale, shift = params[f"{name}.scale"], params[f"{name}.shift"]
    k, channels = scale.shape
    return functional.group_norm(h, k * groups_of(channels), scale.flatten(), shift.flatten(), EPS)


def batch_norm(params: Params, name: str, h: Tensor, training: bool, real: Tensor | None) -> Tensor:
    """Normalize each channel of each client; in training, also update its running statistics in place.

    Parameters
    ----------
    h : Tensor (sample, client·channel, row, column)
    training : bool
        True: by statistics of this batch (Ioffe & Szegedy 2015); False: by running statistics.
    real : bool Tensor (client, sample), optional
        Samples that are not padding; None: all.
    """
    scale, shift = params[f"{name}.scale"].flatten(), params[f"{name}.shift"].flatten()
    # .data: the clients' statistics are views of one tensor, and a client's update must not change the version counts
    # of others.
    mean, var = (params[f"{name}.{kind}"].data for kind in ("running_mean", "running_var"))
    if real is None or not training:
        if training and h[:, 0].numel() == 1:  # torch refuses a single value, which has no unbiased variance
            real = torch.ones(len(mean), 1, dtype=torch.bool, device=h.device)
        else:
            return functional.batch_norm(h, mean.view(-1), var.view(-1), scale, shift, training, MOMENTUM, EPS)
    k, channels = mean.shape
    dtype, h = h.dtype, h.to(mean.dtype)  # bfloat16 would count samples and sum squares to three digits
    weight = real.T.to(h.dtype).repeat_interleave(channels, 1)[:, :, None, None]
    count = real.sum(1).mul(h.shape[2] * h.shape[3]).to(h.dtype).repeat_interleave(channels)
    center = (h * weight).sum((0, 2, 3)) / count
    deviation = h - center[:, None, None]
    spread = (deviation.square() * weight).sum((0, 2, 3)) / count
    with torch.no_grad():
        mean.lerp_(center.detach().view(k, channels), MOMENTUM)
        var.lerp_((spread.detach() * count / (count - 1).clamp(min=1)).view(k, channels), MOMENTUM)
    return (deviation * (scale / (spread + EPS).sqrt())[:, None, None] + shift[:, None, None]).to(dtype)


def _shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one client's parameters, by kind."""
    window = (layer.kernel, layer.kernel) if layer.kernel else ()
    weight: dict[str, tuple[int, ...]] = {"weight": (layer.outputs, layer.inputs, *window)}
    kinds = {None: ("bias",), "group": ("scale", "shift"), "batch": ("scale", "shift", "running_mean", "running_var")}
    return weight | dict.fromkeys(kinds[layer.norm], (layer.outputs,))


def _split_clients(params: Params) -> list[Params]:
    """Return every client's parameters (1, ...)."""
    parts = {name: p.split(1) for name, p in params.items()}
    return [{name: p[c] for name, p in parts.items()} for c in range(len(next(iter(parts.values()))))]


def _rows(h: Tensor, k: int) -> Tensor:
    """Reshape activations (sample, client·channel, row, column) of k clients to (client, sample, feature)."""
    return h.reshape(len(h), k, -1).transpose(0, 1) if h.ndim == 4 else h


def channels_last(x: Tensor) -> Tensor:
    """Store images (sample, channel, row, column) with channels last in memory, an order that later layers inherit.

    The strides are set explicitly, because ``contiguous`` accepts images of one channel in either order. Pooling then
    took a sixteenth and the first convolution an eighth of the time (28×28, 32 channels, batch of 50, one thread).
    """
    n, channels, rows, columns = x.shape
    return x.movedim(1, -1).flatten(1).view(n, rows, columns, channels).movedim(-1, 1)


def _fold(x: Tensor) -> Tensor:
    """Reshape inputs (client, sample, channel, row, column) to (sample, client·channel, row, column)."""
    h = x[0] if len(x) == 1 else x.transpose(0, 1).flatten(1, 2)
    return h if h.is_cuda else channels_last(h)


def lenet(sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = None, **options: Any) -> Net:
    """Build the LeNet-style network of FEMNIST: convolutions to 6 and 16 channels, dense layers of 120 and ``outputs``.

    The kernels are 5×5.

    Parameters
    ----------
    sample : sequence of int
        Shape of one sample, (channel, row, column), at least 16×16.
    outputs : int
        Number of classes; 1 for a binary classifier.
    width : float, default 1
        Multiplies channels and hidden units; the product is rounded and at least 1.
    norm : {"group", "batch"}, optional
        Normalization after each convolution.
    **options
        ``convolution`` and ``statistics`` of :func:`fedstat.fl.nets.conv.assemble`.

    Raises
    ------
    ValueError
        If the sample is not an image or is too small, or if an option is unknown.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> nets.layers(lenet((1, 28, 28), 62))
    {'conv1': 6, 'conv2': 16, 'fc1': 120, 'fc2': 62}
    """
    return _two_and_two(sample, outputs, (6, 16), 120, width, norm, options)


def cnn(sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = None, **options: Any) -> Net:
    """Build the 4-layer CNN of McMahan et al. (2017): 5×5 convolutions to 32 and 64 channels, 512 hidden units.

    As in FedCP §5.1, the convolutions are not padded: 28×28 images have 4×4×64 features. Arguments and errors are as in
    :func:`lenet`.

    Examples
    --------
    >>> cnn((1, 28, 28), 10).shapes["fc1.weight"]
    (512, 1024)
    """
    return _two_and_two(sample, outputs, (32, 64), 512, width, norm, options)


def resnet8(
    sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = "group", **options: Any
) -> Net:
    """Build a ResNet of 7 convolutions for small images: 16, 32 and 64 channels, one block each.

    He et al. (2016), §4.2, n = 1. Convolutions are numbered from the stem on, ``conv1`` to ``conv7``; the 1×1
    convolution around the block that starts with conv4 is ``shortcut4``. Shortcuts follow all convolutions, so that
    conv l is layer l. Arguments and errors are as in :func:`lenet`, except that ``norm`` is "group" by default (the
    FedFac paper used batch normalization) and images need at least 8×8 pixels.

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
    """Build ResNet-10 for small images: 64, 128, 256 and 512 channels, one block each.

    Arguments as in :func:`resnet8`.
    """
    return _resnet(sample, outputs, ((64, 1), (128, 1), (256, 1), (512, 1)), width, norm, options)


def resnet18(
    sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = "group", **options: Any
) -> Net:
    """Build ResNet-18 for small images: 3×3 stem without pooling, two blocks each of 64, 128, 256 and 512 channels.

    Arguments as in :func:`resnet8`.
    """
    return _resnet(sample, outputs, ((64, 2), (128, 2), (256, 2), (512, 2)), width, norm, options)


def vgg16(sample: Sequence[int], outputs: int, *, width: float = 1.0, norm: Norm | None = None, **options: Any) -> Net:
    """Build VGG-16 for small images: 13 3×3 convolutions, two hidden dense layers of 512 units, an output layer.

    Simonyan & Zisserman (2015), configuration D, with the smaller dense layers usual for 32×32 images. The five 2×2 max
    poolings round up, so that 28×28 images also fit. Arguments and errors are as in :func:`lenet`.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> list(nets.layers(vgg16((3, 32, 32), 100)))[14]
    'fc2'
    """
    inputs, rows, columns = image(sample, 8)
    hidden, layers = scaled(512, width), {}
    pooled = ("conv2", "conv4", "conv7", "conv10", "conv13")
    for i, channels in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512), 1):
        layers[f"conv{i}"] = Layer(inputs, scaled(channels, width), 3, 1, 1, norm)
        inputs = scaled(channels, width)
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
    """Build two 5×5 convolutions, each followed by 2×2 max pooling and ReLU, and two dense layers."""
    inputs, rows, columns = image(sample, 16)
    a, b = (scaled(c, width) for c in channels)
    n_features = b * after_two(rows) * after_two(columns)
    hidden = scaled(hidden, width)
    layers = {
        "conv1": Layer(inputs, a, 5, norm=norm),
        "conv2": Layer(a, b, 5, norm=norm),
        "fc1": Layer(n_features, hidden),
        "fc2": Layer(hidden, check.integer("outputs", outputs)),
    }

    def features(run: Run, h: Tensor) -> Tensor:
        # ReLU and max pooling commute; after pooling, ReLU has a quarter of the entries.
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
    """Build a residual network of basic blocks; every stage but the first halves rows and columns."""
    inputs, _, _ = image(sample, 8)
    channels = scaled(stages[0][0], width)
    convs, shortcuts = {"conv1": Layer(inputs, channels, 3, 1, 1, norm)}, {}
    blocks: list[tuple[str, str]] = []
    for stage, (stage_channels, n_blocks) in enumerate(stages):
        for block in range(n_blocks):
            new_channels, stride = scaled(stage_channels, width), 2 if stage and not block else 1
            first, second = len(convs) + 1, len(convs) + 2
            convs[f"conv{first}"] = Layer(channels, new_channels, 3, stride, 1, norm)
            convs[f"conv{second}"] = Layer(new_channels, new_channels, 3, 1, 1, norm)
            if stride > 1 or channels != new_channels:
                shortcuts[f"shortcut{first}"] = Layer(channels, new_channels, 1, stride, 0, norm)
            blocks.append((f"conv{first}", f"conv{second}"))
            channels = new_channels
    layers = convs | shortcuts | {"fc1": Layer(channels, check.integer("outputs", outputs))}

    def features(run: Run, h: Tensor) -> Tensor:
        h = torch.relu_(run("conv1", h))
        for first, second in blocks:
            shortcut = f"shortcut{first[4:]}"
            residual = run(second, torch.relu_(run(first, h)))
            h = torch.relu_(residual + (run(shortcut, h) if shortcut in layers else h))
        return h.mean((2, 3), keepdim=True)

    return assemble(layers, features, **options)._replace(inputs=math.prod(sample))


def after_two(size: int) -> int:
    """Return the rows of an image of ``size`` rows after two 5×5 convolutions with pooling."""
    return ((size - 4) // 2 - 4) // 2


def scaled(number: int, width: float) -> int:
    """Return the number of channels or units times ``width``, rounded and at least 1."""
    return max(1, round(number * check.real("width", width, low=0, open_low=True)))


def image(sample: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return (channel, row, column) of a sample; raise ValueError for images below ``least`` rows or columns."""
    shape = tuple(int(s) for s in sample)
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < least:
        raise ValueError(
            f"sample must be the shape (channel, row, column) of one image of at least {least}×{least}, but got "
            f"{tuple(sample)}"
        )
    return shape[0], shape[1], shape[2]
