"""An algorithm with shared weights, and personal biases and normalization.

FedBN (Li et al. 2021, arXiv:2102.07623) does so with the parameters of batch normalization only.
"""

from __future__ import annotations

from typing import Annotated

import torch

import fedstat
from fedstat import fl, study
from fedstat.fl import algorithms, masks, nets
from fedstat.fl.algorithm import Algorithm, InitContext, SharedMask

NORMALIZATION = (".scale", ".shift", ".running_mean", ".running_var")


def own_biases(*, biases: Annotated[bool, "biases are personal, too"] = True) -> Algorithm:
    """FedAvg with personal biases and normalization."""
    own = (*NORMALIZATION, ".bias") if biases else NORMALIZATION

    def init_mask(context: InitContext) -> SharedMask:
        mask = masks.share_all(context.net, context.device)  # for every parameter: True where an entry is shared
        return SharedMask(
            {name: torch.zeros_like(shared) if name.endswith(own) else shared for name, shared in mask.items()}
        )

    return Algorithm("own-biases", init_mask, settings={"biases": biases})


def compared() -> fedstat.results.ComparisonResult:
    """Compare with FedAvg on scikit-learn's digits: ten clients with different classes, three seeds."""
    digits = fedstat.data.to_float(fedstat.data.load("digits"))
    clients = fedstat.data.partition.dirichlet(digits, clients=10, concentration=0.3, min_samples=20)
    data = fedstat.data.partition.train_test(clients, test=0.3)
    net = nets.mlp([64, 32, 10])
    methods = {"FedAvg": algorithms.fedavg(), "own biases": own_biases()}
    runs = {
        name: [fl.train(data, net, method, rounds=10, local_epochs=1, batch_size=16, seed=seed) for seed in range(3)]
        for name, method in methods.items()
    }
    return study.compare_runs(runs)


if __name__ == "__main__":
    print(compared())
