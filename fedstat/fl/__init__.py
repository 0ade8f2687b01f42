"""The trainer: all clients in one tensor program."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.fl import algorithms, nets, optim
    from fedstat.fl.ending import finish
    from fedstat.fl.stored import client_weights, profile, state_dict
    from fedstat.fl.training import train

__all__ = ["algorithms", "client_weights", "finish", "nets", "optim", "profile", "state_dict", "train"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "algorithms": "fedstat.fl.algorithms",
        "client_weights": "fedstat.fl.stored",
        "finish": "fedstat.fl.ending",
        "nets": "fedstat.fl.nets",
        "optim": "fedstat.fl.optim",
        "profile": "fedstat.fl.stored",
        "state_dict": "fedstat.fl.stored",
        "train": "fedstat.fl.training",
    },
)
