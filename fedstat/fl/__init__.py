"""The trainer: all clients in one tensor program."""

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.stored import client_weights, profile, state_dict
from fedstat.fl.training import train

__all__ = ["algorithms", "client_weights", "nets", "optim", "profile", "state_dict", "train"]
