"""Who is like whom: the result of clustering clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._later import pd, xr
from fedstat.results.base import Result, line
from fedstat.results.joined import beside
from fedstat.results.numbers import coefficient, interval, p_value

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class ClientClustersResult(Result):
    """Clusters of clients, and their agreement with known groups, as :func:`fedstat.client_clusters` returns it.

    Attributes
    ----------
    similarity : array (client, client)
        Cosine similarity of the clients' vectors.
    clients : array (client,)
        Labels.
    cluster : int array (client,)
        From 1, in the order of their first client.
    merges, order : array (client - 1, 4) and int array (client,)
        The tree, as :func:`scipy.cluster.hierarchy.linkage` returns it, and the positions of clients along its leaves.
    n_values : int
        Length of a client's vector.
    recurs : float
        Mean adjusted Rand index of these clusters with those found without some of the clients.
    left_out, resamples : int
        How many clients were left out, and how often.
    groups : array (client,) or None
        Known groups; without them what follows is NaN.
    adjusted_rand, std_error, conf_low, conf_high, p_value : float
        Agreement of clusters and groups; error and interval by the delete-d jackknife; one-sided permutation test.
    contrast, contrast_p_value : float
        Mean similarity within groups minus between them, and the same test of it, which needs no clusters.
    permutations : int
        Behind both p-values.
    exact : bool
        Whether these are all arrangements of the groups' labels; else they are drawn, and the one at hand is added.
    level : float
        Confidence level of the interval.
    minus : {"mean"} or None
        What was taken off the vectors.
    """

    similarity: Floats
    clients: NDArray[Any]
    cluster: NDArray[np.int64]
    merges: Floats
    order: NDArray[np.int64]
    n_values: int
    recurs: float
    left_out: int
    resamples: int
    groups: NDArray[Any] | None = None
    adjusted_rand: float = np.nan
    std_error: float = np.nan
    conf_low: float = np.nan
    conf_high: float = np.nan
    p_value: float = np.nan
    contrast: float = np.nan
    contrast_p_value: float = np.nan
    permutations: int = 0
    exact: bool = False
    level: float = 0.95
    minus: str | None = None
    _figure: ClassVar[str] = "client_similarity"

    def to_dataset(self) -> xr.Dataset:
        """``similarity`` (client, other), ``cluster`` and, where known, ``group`` (client,)."""
        clients = {"client": self.clients, "other": self.clients}
        data = {"similarity": (("client", "other"), self.similarity), "cluster": ("client", self.cluster)}
        if self.groups is not None:
            data["group"] = ("client", self.groups)
        return xr.Dataset(data, clients)

    def tidy(self) -> pd.DataFrame:
        """One row per client: term, cluster, group, mean similarity to its cluster's others and the nearest cluster."""
        same = self.cluster[:, None] == np.unique(self.cluster)
        sums = self.similarity @ same
        here, each = np.arange(len(self.cluster)), same.sum(0)
        own = self.cluster - 1
        with np.errstate(invalid="ignore"):
            within = (sums[here, own] - 1) / (each[own] - 1)
        others = np.where(same, -np.inf, sums / each)
        rows = {"term": self.clients, "cluster": self.cluster}
        rows |= {} if self.groups is None else {"group": self.groups}
        nearest = others.max(1) if same.shape[1] > 1 else np.full(len(own), np.nan)
        return pd.DataFrame(rows | {"within": within, "nearest": nearest})

    def augment(self, data: Any = None) -> Any:
        """Cluster of every client, and the other columns of :meth:`tidy`, beside what you know of the clients.

        Parameters
        ----------
        data : DataFrame, Dataset or DataArray, optional
            A DataFrame with a column ``client`` (or the clients as its index, or a row for each in their order); a
            Dataset or DataArray with the dim ``client``, such as ``run["clients"]``.

        Returns
        -------
        DataFrame (client) or Dataset
            Your columns or variables, then these; without data, client and these.
        """
        return beside(self.tidy().rename(columns={"term": "client"}), data, key="client")

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy().sort_values("cluster", kind="stable"), None

    def glance(self) -> pd.DataFrame:
        """One row: clients, clusters, how well they recur, agreement with the groups with its error, interval and p."""
        names = (
            "adjusted_rand", "std_error", "conf_low", "conf_high", "p_value", "contrast", "contrast_p_value",
            "permutations", "exact", "recurs", "left_out", "level",
        )  # fmt: skip
        row = {"n_clients": len(self.clients), "n_clusters": int(self.cluster.max())}
        row["n_groups"] = 0 if self.groups is None else len(np.unique(self.groups))
        return pd.DataFrame([row | {name: getattr(self, name) for name in names}])

    def __repr__(self) -> str:
        sizes = ", ".join(str(n) for n in np.bincount(self.cluster)[1:])
        head = f"{len(self.clients)} clients in {self.cluster.max()} clusters of {sizes}"
        again = f"mean adjusted Rand index {coefficient(self.recurs)} ({self.resamples} draws)"
        lines = [
            f"{head}: average linkage on 1 - cosine similarity of {self.n_values} values",
            *(["  what is compared: vectors less their mean over clients"] if self.minus else []),
            f"  found again without {self.left_out} clients: {again}",
        ]
        if self.groups is not None:
            _, counts = np.unique(self.groups, return_counts=True)
            equal = "draws" if self.std_error == 0 else ""
            rand = interval(self.adjusted_rand, self.conf_low, self.conf_high, 2, sign=False, equal=equal)
            how = f"all {self.permutations} arrangements" if self.exact else f"{self.permutations} random permutations"
            within, error = coefficient(self.contrast), f"delete-{self.left_out} jackknife"
            lines += [
                f"Known groups: {len(counts)} of {', '.join(map(str, counts))} clients",
                f"  adjusted Rand index of clusters and groups {rand}, p {p_value(self.p_value)}",
                f"  mean similarity within groups minus between {within}, p {p_value(self.contrast_p_value)}",
                f"  p: one-sided, {how} of the groups' labels; {100 * self.level:g} % interval: {error}",
            ]
            if equal:
                lines.append("  the same index in every draw: they cannot say how rare a difference is")
        return "\n".join(map(line, lines))
