"""Image networks of the papers: LeNet, the 4-layer CNN, ResNets and VGG-16 for images of about 32×32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl.nets.base import Net
from fedstat.fl.nets.conv import Layer, Norm, Run, assemble

if TYPE_CHECKING:
    from torch import Tensor


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
