"""Clustered-FL: FedAvg within clusters, which are split in two where clients' updates point apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import scipy

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.aggregate import uniform
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
from fedstat.fl.similarity import cosines, shared_part

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
_EARLY = 20  # rounds in which the published code never splits


def clustered_fl(
    *,
    eps1: Annotated[float, "ε₁, norm of a cluster's mean update below which it may split"] = 0.4,
    eps2: Annotated[float, "ε₂, norm that some client's update must exceed for a split"] = 1.6,
    gamma: Annotated[float, "γ_max, how far the two parts must be apart: 0 to 1"] = 0.0,
    max_clusters: Annotated[int | None, "most clusters; by default as many as clients"] = None,
    variant: Variant = "paper",
) -> Algorithm:
    """FedAvg, whose clients are split into clusters once their mean stands still while single clients still move.

    Sattler, Müller and Samek (2019), "Clustered federated learning: Model-agnostic distributed multi-task optimization
    under privacy constraints", arXiv:1910.01991, Algorithms 1 to 3. After a round a cluster's clients are split in two
    if the norm of their mean update is below ε₁ and the largest norm of their updates above ε₂. The two parts are those
    whose greatest cosine similarity of updates, α, between one's clients and the other's is smallest (the optimal
    bipartition, found by single linkage); they stay together unless √((1 − α)/2) > γ_max. Both parts go on from the
    cluster's model, each by its own mean, weighted by n_k, and may be split again in later rounds.

    Shared, up and down: everything, within a cluster. Private: nothing. As long as there is one cluster it is FedAvg.

    Parameters
    ----------
    eps1, eps2 : float
        Defaults are the published code's; the paper has no values for all problems. Norms grow with the network, the
        learning rate and the number of steps: choose by ``measures/mean_update`` and ``measures/update`` of a run.
    gamma : float
    max_clusters : int, optional
        Not in the paper.
    variant : {"paper", "code"}
        "code": complete linkage; means are not weighted, those of models neither; no split of two clients, nor in the
        first 20 rounds.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, if ``max_clusters`` exceeds the number of clients.

    Notes
    -----
    The paper and its code have all clients active in every round. Here clients that are not active when their cluster
    is split stay with the part that has more samples, and means are over active clients. New clients get the model of
    the cluster that remains of these parts. After the first split an ``aggregator`` only makes the server's copy.
    ``measures/cluster``, ``measures/mean_update`` and ``measures/update`` hold each client's cluster after the round,
    the norm of the mean update in its cluster before it, and that of the client's own.
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
        on_download=_receive,
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
    cluster : int64 Tensor (active,)
    parent : list of int
        For every cluster that there is now, the one whose model it goes on from.
    mean, norm : Tensor (active,)
        Norms of the mean update of a client's cluster before the round, and of the client's own update.
    """

    cluster: Tensor
    parent: list[int]
    mean: Tensor
    norm: Tensor


class _Rule(NamedTuple):
    """When clusters are split, and what becomes of their models."""

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
        # Not filled before there are two clusters.
        models = {name: torch.zeros(1, *s, device=device).expand(slots, *s) for name, s in context.net.shapes.items()}
        number = {_NUMBER: torch.ones((), dtype=torch.int64, device=device)}
        return AlgorithmState({_CLUSTER: torch.zeros(n, dtype=torch.int64, device=device)}, models | number)

    def weights(self, context: RoundContext, some: Tensor) -> Tensor:
        """Weights of some rows of clients, which sum to 1."""
        own = torch.ones_like(context.weights[some]) if self.code else context.weights[some]
        return own / own.sum()

    def split(self, context: RoundContext) -> _Split:
        """Split the clusters that are due, each at most once in a round."""
        before = context.before
        updates = {name: p - before[name] for name, p in shared_part(context, context.after).items()}
        norm = torch.stack([p.flatten(1).square().sum(1) for p in updates.values()]).sum(0).sqrt()
        cluster, mean = context.state.clients[_CLUSTER].clone(), torch.zeros_like(norm)
        parent = list(range(int(context.state.server[_NUMBER])))
        for k in parent.copy():
            some = torch.nonzero(context.state.clients[_CLUSTER] == k).squeeze(1)
            if not len(some):
                continue
            own, w = {name: p[some] for name, p in updates.items()}, self.weights(context, some)
            mean[some] = torch.stack([torch.mv(p.flatten(1).T, w).square().sum() for p in own.values()]).sum().sqrt()
            still, moving = bool(mean[some[0]] < self.eps1), bool(norm[some].max() > self.eps2)
            second = self.parts(own) if still and moving and self.may_split(context, len(some), len(parent)) else None
            if second is not None:
                less = float(context.weights[some[second]].sum()) <= float(context.weights[some[~second]].sum())
                cluster[some[second if less else ~second]] = len(parent)
                parent.append(k)
        return _Split(cluster, parent, mean, norm)

    def may_split(self, context: RoundContext, clients: int, clusters: int) -> bool:
        """Whether a cluster of so many clients may be split where there are so many clusters."""
        most = len(context.state.server[next(iter(context.net.shapes))])
        return clusters < most and (clients > 2 and context.round >= _EARLY if self.code else clients > 1)

    def parts(self, updates: Params) -> Tensor | None:
        """The second of the parts into which a cluster's clients (client,) fall; None if they are not far apart."""
        similarity = cosines(updates).cpu().numpy()
        distance = scipy.spatial.distance.squareform(np.clip(1 - similarity, 0, 2), checks=False)
        tree = scipy.cluster.hierarchy.linkage(distance, "complete" if self.code else "single")
        second = scipy.cluster.hierarchy.cut_tree(tree, 2)[:, 0] == 1  # the first client is in the first part
        across = similarity[np.ix_(second, ~second)].max()
        if np.sqrt((1 - across) / 2) <= self.gamma:
            return None
        return torch.from_numpy(second)

    def update_state(self, context: RoundContext, found: _Split) -> AlgorithmState:
        """Every cluster's model, the mean of its active clients', once there are two."""
        if len(found.parent) == 1:
            return AlgorithmState({_CLUSTER: found.cluster}, context.state.server)
        first = int(context.state.server[_NUMBER]) == 1
        server = {name: p.clone() for name, p in context.state.server.items()}
        server[_NUMBER].fill_(len(found.parent))
        for k, parent in enumerate(found.parent):
            some = torch.nonzero(found.cluster == k).squeeze(1)
            w = self.weights(context, some)
            for name, p in shared_part(context, context.after, statistics=True).items():
                was = context.global_params[name] if first else context.state.server[name][parent]
                mean = torch.mv(p[some].flatten(1).T, w).view_as(was) if len(some) else was
                server[name][k] = torch.lerp(was, mean, context.server_lr)
        return AlgorithmState({_CLUSTER: found.cluster}, server)


def _receive(context: DownloadContext) -> Params:
    """The model of the client's cluster; the server's copy as long as there is one cluster."""
    if int(context.state.server[_NUMBER]) == 1:
        return {}
    models, cluster = context.state.server, context.state.clients[_CLUSTER]
    return {
        name: torch.where(context.shared[name], models[name][cluster], own)
        for name, own in context.client_params.items()
    }
