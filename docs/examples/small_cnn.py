"""A small convolutional network for images of any size, as a module of torch."""

from torch import nn


def small_cnn(sample: tuple[int, ...], outputs: int, *, channels: int = 4) -> nn.Module:
    """Two convolutions, the mean over pixels, and an output layer; ``sample`` is (channel, row, column)."""
    return nn.Sequential(
        nn.Conv2d(sample[0], channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, outputs),
    )
