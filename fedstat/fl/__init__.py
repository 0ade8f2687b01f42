"""The trainer: all clients in one tensor program."""

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.train import train

__all__ = ["algorithms", "nets", "optim", "train"]
