"""The trainer: all clients in one tensor program."""

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.profiles import profile
from fedstat.fl.training import train

__all__ = ["algorithms", "nets", "optim", "profile", "train"]
