"""Results that compare clients: entropies of samples, and clusters of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Caution, Result, extremes
from fedstat.results.tables import beside, coefficient, count, median_and_ends, p_equals
from fedstat.stats.entropy import largest_k

FIELDS = ("entropy", "std_error", "n", "atom_value", "atom_mass", "n_tied", "conf_low", "conf_high", "clustered")
IN_NATS = ("entropy", "std_error", "conf_low", "conf_high")


@dataclass(frozen=True, eq=False, repr=False)
class EntropyResult(Result):
    """Differential entropies in nats, as :func:`fedstat.knn_entropy` returns them.

    The fields are of the kind of the samples: DataArrays, arrays or tensors. ``result["entropy"]`` is
    ``result.entropy``, ``result["unit"]`` a coordinate, and ``np.asarray(result)`` holds these values.

    Attributes
    ----------
    entropy : (...,)
        Entropy of the continuous part; NaN where at most k samples are left beside the atoms (a dead neuron).
    std_error : (...,)
        Standard error, without the bias. NaN where no interval is given.
    n : (...,)
        Samples the estimate rests on: all of them, less those in atoms.
    atom_value : (..., atom) or (..., atom, feature)
        Values that more than k samples share, ascending, NaN past the last.
    atom_mass : (..., atom)
        Share of the samples at each of these values, 0 past the last.
    n_tied : (...,)
        Samples of the continuous part that have an exact copy, which makes the entropy too low.
    conf_low, conf_high : (...,)
        Interval that allows for the bias. NaN with tied or clustered samples, and with k above
        :func:`fedstat.stats.entropy.largest_k`.
    clustered : (...,)
        Whether samples lie in narrow groups too small for k, which makes the entropy too high.
    k : int
        Number of the neighbour.
    level : float
        Confidence level of the intervals.
    """

    entropy: Any
    std_error: Any
    n: Any
    atom_value: Any
    atom_mass: Any
    n_tied: Any
    conf_low: Any
    conf_high: Any
    clustered: Any
    k: int
    level: float
    _figure: ClassVar[str] = "entropies"

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in FIELDS else self.to_dataset()[name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(check.numpy_of(self.entropy), dtype=dtype, copy=True if copy is None else copy)

    def to_dataset(self) -> xr.Dataset:
        """All fields under their names; dims of arrays and tensors are axis_0, axis_1, ..., atom and feature."""
        if isinstance(self.entropy, xr.DataArray):
            return xr.Dataset({name: self[name] for name in FIELDS})
        values = {name: check.numpy_of(self[name]) for name in FIELDS}
        dims = [f"axis_{i}" for i in range(values["entropy"].ndim)]
        data = xr.Dataset({name: ([*dims, "atom", "feature"][: x.ndim], x) for name, x in values.items()})
        for name in IN_NATS:
            data[name].attrs["units"] = "nats"
        return data

    def tidy(self) -> pd.DataFrame:
        """One row per series: its labels, then the estimate and what belongs to it.

        estimate, std_error (without the bias), conf_low, conf_high (with an allowance for it), in nats; n, n_tied;
        clustered; n_atoms and atom_mass, the number and the mass of all its atoms.
        """
        data = self.to_dataset()
        mass = data["atom_mass"]
        names = ["entropy", "std_error", "conf_low", "conf_high", "n", "n_tied", "clustered"]
        kept = data[names].rename(entropy="estimate")
        kept = kept.assign(n_atoms=(mass > 0).sum("atom"), atom_mass=mass.sum("atom"))
        if not kept.sizes:
            return pd.DataFrame([{str(name): x.item() for name, x in kept.data_vars.items()}])
        return kept.to_dataframe().reset_index()

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy(), "estimate"

    def glance(self) -> pd.DataFrame:
        """One row: series, k, samples; entropy over series (median, least, most); those with atoms, ties, clusters.

        interval_width_median is in nats; n_undefined counts series without an entropy, n_without_interval those with an
        entropy and no interval.
        """
        table = self.tidy()
        median, least, most = median_and_ends(table["estimate"].to_numpy())
        row = {
            "n_series": len(table),
            "k": self.k,
            "n_min": int(table["n"].min()),
            "n_max": int(table["n"].max()),
            "entropy_median": median,
            "entropy_min": least,
            "entropy_max": most,
            "std_error_median": float(table["std_error"].median()),
            "level": self.level,
            "interval_width_median": float((table["conf_high"] - table["conf_low"]).median()),
            "n_with_atoms": int((table["n_atoms"] > 0).sum()),
            "n_with_ties": int((table["n_tied"] > 0).sum()),
            "n_clustered": int(table["clustered"].sum()),
            "n_undefined": int(table["estimate"].isna().sum()),
            "n_without_interval": int((table["estimate"].notna() & table["conf_low"].isna()).sum()),
        }
        return pd.DataFrame([row])

    def _lines(self) -> list[str]:
        table, x = self.tidy(), self.glance().to_dict("records")[0]
        size = f"{x['n_min']}" if x["n_min"] == x["n_max"] else f"{x['n_min']} to {x['n_max']}"
        middle, least, most = (coefficient(float(x[f"entropy_{end}"])) for end in ("median", "min", "max"))
        dims = [str(d) for d in self.to_dataset()["entropy"].dims]
        series = count(x["n_series"], "unit") if dims == ["unit"] else f"{x['n_series']} series"
        error = coefficient(float(x["std_error_median"]))
        lines = [
            f"Differential entropy (nats), nearest-neighbor estimate, k = {self.k}",
            f"{series}, {size} samples{' each' * (x['n_series'] > 1)}: median {middle}, range {least} to {most}"
            + f"; median SE {error}" * bool(np.isfinite(x["std_error_median"])),
        ]
        if np.isfinite(x["interval_width_median"]):
            width = coefficient(float(x["interval_width_median"]))
            lines.append(f"{100 * self.level:g}% CIs, widened for bias: median width {width}")
        if x["n_with_atoms"]:
            most_mass = float(table["atom_mass"].max())
            lines.append(
                f"{x['n_with_atoms']} with atoms (equal samples), up to {100 * most_mass:.0f}% of the samples; "
                f"{x['n_undefined']} undefined (too few other samples)"
            )
        lines += self._without_interval(table)
        if len(table) > 1:
            labels = table[dims].astype(str).agg(", ".join, axis=1)
            lines += extremes(table["estimate"].to_numpy(), labels.to_numpy())
        return lines

    def cautions(self) -> list[Caution]:
        """Return how many series have a biased entropy, and which way."""
        table, found = self.tidy(), []
        if tied := int((table["n_tied"] > 0).sum()):
            share = 100 * float((table["n_tied"] / table["n"]).max())
            text = f"{tied} with ties (up to {share:.0f}% of the samples): entropy too low, no CI"
            found.append(Caution("Ties", text))
        if clustered := int(table["clustered"].sum()):
            text = f"{clustered} with samples in narrow groups, too small for k = {self.k}: entropy too high, no CI"
            found.append(Caution("Samples in narrow groups", text))
        return found

    def _without_interval(self, table: pd.DataFrame) -> list[str]:
        """Why there are no intervals where the bias is unknown."""
        lines = []
        least = table.loc[table["estimate"].notna(), "n"].min()
        if self._dimension > 3:
            lines.append(f"No CIs: the bias is unknown in {self._dimension} dimensions (known up to 3)")
        elif np.isfinite(least) and self.k > (most := largest_k(int(least), self._dimension)):
            lines.append(f"No CI where the bias is unknown: k > {most} with {least:.0f} samples")
        return lines

    @property
    def _dimension(self) -> int:
        """Coordinates of one sample."""
        return int(self.atom_value.shape[-1]) if self.atom_value.ndim > self.atom_mass.ndim else 1


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
    left_out, n_subsamples : int
        How many clients were left out, and how often.
    groups : array (client,) or None
        Known groups; without them what follows is NaN.
    adjusted_rand, std_error, conf_low, conf_high, p_value : float
        Agreement of clusters and groups; error and interval by the delete-d jackknife; one-sided permutation test.
    contrast, contrast_p_value : float
        Mean similarity within groups minus between them, and the same test of it, which needs no clusters.
    n_permutations : int
        Behind both p-values.
    exact : bool
        Whether these are all arrangements of the groups' labels; else they are drawn, and the one at hand is added.
    level : float
        Confidence level of the interval.
    baseline : {"mean"} or None
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
    n_subsamples: int
    groups: NDArray[Any] | None = None
    adjusted_rand: float = np.nan
    std_error: float = np.nan
    conf_low: float = np.nan
    conf_high: float = np.nan
    p_value: float = np.nan
    contrast: float = np.nan
    contrast_p_value: float = np.nan
    n_permutations: int = 0
    exact: bool = False
    level: float = 0.95
    baseline: str | None = None
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
            "n_permutations", "exact", "recurs", "left_out", "level",
        )  # fmt: skip
        row = {"n_clients": len(self.clients), "n_clusters": int(self.cluster.max())}
        row["n_groups"] = 0 if self.groups is None else len(np.unique(self.groups))
        return pd.DataFrame([row | {name: getattr(self, name) for name in names}])

    def _lines(self) -> list[str]:
        n = len(self.clients)
        lines = [
            f"{count(int(self.cluster.max()), 'cluster')} of {count(n, 'client')} (sizes {_sizes(self.cluster)})",
            f"Average linkage on 1 - cosine similarity, {self.n_values} values per client",
            *["Vectors minus their mean over clients"] * bool(self.baseline),
            (
                f"Mean ARI with clusters of random subsamples of {n - self.left_out} clients: "
                f"{coefficient(self.recurs)} ({self.n_subsamples} draws)"
            ),
        ]
        if self.groups is None:
            return lines
        ari, contrast = coefficient(self.adjusted_rand), coefficient(self.contrast)
        certain = "no CI: the same in every subsample"
        if self.std_error != 0:
            ends = f"[{coefficient(self.conf_low)}, {coefficient(self.conf_high)}]"
            certain = f"{100 * self.level:g}% CI {ends} (delete-{self.left_out} jackknife)"
        which = f"all {self.n_permutations} arrangements" if self.exact else f"{self.n_permutations} permutations"
        return [
            *lines,
            f"Known groups: {len(np.unique(self.groups))} (sizes {_sizes(self.groups)})",
            f"  ARI with the clusters: {ari}, {certain}",
            f"    {p_equals(self.p_value)} (one-sided, {which} of group membership)",
            f"  Mean similarity within minus between groups: {contrast}, {p_equals(self.contrast_p_value)} (same test)",
        ]


def _sizes(group: NDArray[Any]) -> str:
    return ", ".join(map(str, np.unique(group, return_counts=True)[1]))
