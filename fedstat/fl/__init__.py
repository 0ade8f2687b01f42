"""The trainer: all clients in one tensor program."""

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.study.experiment import Settings, run
from fedstat.fl.study.profile import profile
from fedstat.fl.study.tune import tune
from fedstat.fl.train import train

__all__ = ["Settings", "algorithms", "nets", "optim", "profile", "run", "train", "tune"]
