"""Clustered-FL: FedAvg within clusters of clients; a cluster is split in two if its clients' updates diverge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import scipy

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.aggregate import cosines, shared_part, uniform
from fedstat.fl.algorithm import (
    About,
    Algorithm,
    AlgorithmState,
    DownloadContext,
    InitContext,
    Measure,
    RoundContext,
    Variant,
)
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "Clustered-FL",
    ("sattler2019",),
    "everything, within clusters of clients",
    "nothing",
    ("global", "ensemble"),
)

_CLUSTER, _NUMBER = "cluster", "number of clusters"
_WARM_UP = 20  # rounds in which the published code never splits


def clustered_fl(
    *,
    eps1: Annotated[float, "ε₁, norm of a cluster's mean update below which it may split"] = 0.4,
    eps2: Annotated[float, "ε₂, norm that some client's update must exceed for a split"] = 1.6,
    gamma: Annotated[float, "γ_max, smallest distance of the two parts: 0 to 1"] = 0.0,
    max_clusters: Annotated[int | None, "largest number of clusters (default: the number of clients)"] = None,
    variant: Variant = "paper",
) -> Algorithm:
    """Run FedAvg within clusters; split a cluster once its mean has converged, but its clients have not.

    Sattler, Müller and Samek (2019), "Clustered federated learning: Model-agnostic distributed multi-task optimization
    under privacy constraints", arXiv:1910.01991, Algorithms 1 to 3. A cluster may be split in two after a round if the
    norm of its mean update is below ε₁ and the largest norm of a client's update is above ε₂. Let α be the largest
    cosine similarity between updates of clients in different parts. The two parts minimize α (the optimal bipartition,
    by single linkage). The cluster is split if √((1 − α)/2) > γ_max. Both parts continue from the cluster's model; each
    has its own mean, weighted by n_k, and may be split again in later rounds.

    Shared (upload and download): all parameters, within a cluster. Personal: none. With one cluster this is FedAvg.

    Parameters
    ----------
    eps1, eps2 : float
        Defaults are the published code's; the paper gives no values for all problems. Norms grow with the network, the
        learning rate and the number of steps: choose by ``measures/mean_update`` and ``measures/update`` of a run.
    gamma : float
    max_clusters : int, optional
        An addition to the paper.
    variant : {"paper", "code"}
        "code": complete linkage; unweighted means of updates and of models; no split of two clients, and no split in
        the first 20 rounds.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, if ``max_clusters`` exceeds the number of clients.

    Notes
    -----
    In the paper and its code every round selects all clients. Here means are over the selected clients. If a cluster is
    split, its clients that were not selected stay in the part with more samples. Unseen clients get the model of
    cluster 0, which keeps the larger part in every split. After the first split an ``aggregator`` affects the global
    model alone.

    ``measures/cluster`` holds each client's cluster after the round. ``measures/mean_update`` holds the norm of the
    mean update of its cluster before the split, and ``measures/update`` the norm of the client's update.
    """
    check.real("eps1", eps1, low=0)
    check.real("eps2", eps2, low=0)
    check.real("gamma", gamma, low=0, high=1)
    if max_clusters is not None:
        check.integer("max_clusters", max_clusters)
    code = check.choice("variant", variant, ("paper", "code")) == "code"
    rule = _Rule(eps1, eps2, gamma, max_clusters, code)
    settings = {**rule._asdict(), "variant": variant}
    del settings["code"]

    def split(context: RoundContext) -> _Split:
        return context.once(rule.split)

    return Algorithm(
        "clustered-fl",
        settings=settings,
        personal_params=lambda net: list(net.unshared),
        weights=uniform if code else None,
        init_state=rule.init_state,
        update_state=lambda context: rule.update_state(context, split(context)),
        on_download=_on_download,
        measures={
            "cluster": Measure(lambda context: split(context).cluster, long_name="cluster after the round"),
            "mean_update": Measure(lambda context: split(context).mean, long_name="norm of the cluster's mean update"),
            "update": Measure(lambda context: split(context).norm, long_name="norm of the client's update"),
        },
        about=ABOUT,
    )


class _Split(NamedTuple):
    """Clusters after a round.

    Attributes
    ----------
    cluster : int64 Tensor (client,)
        Cluster of each selected client.
    parent : list of int
        For every cluster, the cluster whose model it continues.
    mean, norm : Tensor (client,)
        Norm of the mean update of a client's cluster before the split; norm of the client's update.
    """

    cluster: Tensor
    parent: list[int]
    mean: Tensor
    norm: Tensor


class _Rule(NamedTuple):
    """Rule by which clusters are split, and the update of their models."""

    eps1: float
    eps2: float
    gamma: float
    max_clusters: int | None
    code: bool

    def init_state(self, context: InitContext) -> AlgorithmState:
        n, device = len(context.sizes), context.device
        if self.max_clusters is not None and self.max_clusters > n:
            raise ValueError(
                f"max_clusters must be at most the number of clients, {n}, but got {self.max_clusters}. Leave it "
                "out for no limit."
            )
        slots = self.max_clusters or n
        # Filled once there are two clusters.
        models = {name: torch.zeros(1, *s, device=device).expand(slots, *s) for name, s in context.net.shapes.items()}
        number = {_NUMBER: torch.ones((), dtype=torch.int64, device=device)}
        return AlgorithmState({_CLUSTER: torch.zeros(n, dtype=torch.int64, device=device)}, models | number)

    def weights(self, context: RoundContext, members: Tensor) -> Tensor:
        """Return the weights (member,) of a cluster's selected clients, given by row; they sum to 1."""
        weights = torch.ones_like(context.weights[members]) if self.code else context.weights[members]
        return weights / weights.sum()

    def split(self, context: RoundContext) -> _Split:
        """Split every cluster that meets the conditions, at most once in a round."""
        before = context.before
        updates = {name: p - before[name] for name, p in shared_part(context, context.after).items()}
        norm = torch.stack([p.flatten(1).square().sum(1) for p in updates.values()]).sum(0).sqrt()
        cluster, mean = context.state.clients[_CLUSTER].clone(), torch.zeros_like(norm)
        parent = list(range(int(context.state.server[_NUMBER])))
        for k in parent.copy():
            members = torch.nonzero(context.state.clients[_CLUSTER] == k).squeeze(1)
            if not len(members):
                continue
            of_members, w = {name: p[members] for name, p in updates.items()}, self.weights(context, members)
            squares = [torch.mv(p.flatten(1).T, w).square().sum() for p in of_members.values()]
            mean[members] = torch.stack(squares).sum().sqrt()
            is_due = bool(mean[members[0]] < self.eps1) and bool(norm[members].max() > self.eps2)
            may_split = is_due and self.may_split(context, len(members), len(parent))
            second = self.second_part(of_members) if may_split else None
            if second is not None:
                less = float(context.weights[members[second]].sum()) <= float(context.weights[members[~second]].sum())
                cluster[members[second if less else ~second]] = len(parent)
                parent.append(k)
        return _Split(cluster, parent, mean, norm)

    def may_split(self, context: RoundContext, clients: int, clusters: int) -> bool:
        """Return True if a cluster of ``clients`` clients may be split, given the number of clusters."""
        maximum = len(context.state.server[next(iter(context.net.shapes))])
        return clusters < maximum and (clients > 2 and context.round >= _WARM_UP if self.code else clients > 1)

    def second_part(self, updates: Params) -> Tensor | None:
        """Return the second part of a cluster's clients as a bool (client,), or None if the parts are too close."""
        similarity = cosines(updates).cpu().numpy()
        distance = scipy.spatial.distance.squareform(np.clip(1 - similarity, 0, 2), checks=False)
        tree = scipy.cluster.hierarchy.linkage(distance, "complete" if self.code else "single")
        second = scipy.cluster.hierarchy.cut_tree(tree, 2)[:, 0] == 1  # the first client is in the first part
        across = similarity[np.ix_(second, ~second)].max()
        if np.sqrt((1 - across) / 2) <= self.gamma:
            return None
        return torch.from_numpy(second)

    def update_state(self, context: RoundContext, split: _Split) -> AlgorithmState:
        """Update the models of all clusters, once there are two, from the means of their selected clients."""
        if len(split.parent) == 1:
            return AlgorithmState({_CLUSTER: split.cluster}, context.state.server)
        is_first = int(context.state.server[_NUMBER]) == 1
        server = {name: p.clone() for name, p in context.state.server.items()}
        server[_NUMBER].fill_(len(split.parent))
        for k, parent in enumerate(split.parent):
            members = torch.nonzero(split.cluster == k).squeeze(1)
            w = self.weights(context, members)
            for name, p in shared_part(context, context.after, statistics=True).items():
                old = context.global_params[name] if is_first else context.state.server[name][parent]
                mean = torch.mv(p[members].flatten(1).T, w).view_as(old) if len(members) else old
                server[name][k] = torch.lerp(old, mean, context.server_lr)
        return AlgorithmState({_CLUSTER: split.cluster}, server)


def _on_download(context: DownloadContext) -> Params:
    """Return the models of the clients' clusters, or nothing while there is one cluster: the global model."""
    if int(context.state.server[_NUMBER]) == 1:
        return {}
    models, cluster = context.state.server, context.state.clients[_CLUSTER]
    return {
        name: torch.where(context.shared[name], models[name][cluster], p) for name, p in context.client_params.items()
    }
