"""A method of one's own: weights are averaged, biases and normalisation stay with their client.

FedBN (Li et al. 2021, arXiv:2102.07623) does so with the parameters of batch normalisation alone.
"""

from __future__ import annotations

from typing import Annotated

import torch

import fedstat
from fedstat import fl, study
from fedstat.fl import algorithms, masks, nets
from fedstat.fl.algorithm import Algorithm, InitContext, SharedMask

NORMALISATION = (".scale", ".shift", ".running_mean", ".running_var")


def own_biases(*, biases: Annotated[bool, "keep the biases, too, not normalisation alone"] = True) -> Algorithm:
    """FedAvg whose clients keep their biases and normalisation."""
    own = (*NORMALISATION, ".bias") if biases else NORMALISATION

    def init_mask(context: InitContext) -> SharedMask:
        mask = masks.share_all(context.net, context.device)  # for every parameter: True where an entry is shared
        return SharedMask(
            {name: torch.zeros_like(shared) if name.endswith(own) else shared for name, shared in mask.items()}
        )

    return Algorithm("own-biases", init_mask, settings={"biases": biases})


def compared() -> fedstat.results.ComparisonResult:
    """Compare with FedAvg on scikit-learn's digits: ten clients with unequal classes, three seeds."""
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
