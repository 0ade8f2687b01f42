"""Results that compare clients: entropies of samples, and clusters of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Caution, Result, extremes
from fedstat.results.exports import Headings
from fedstat.results.tables import coefficient, count, join_columns, median_and_ends, p_equals
from fedstat.stats.entropy import largest_k, least_group

FIELDS = ("entropy", "std_error", "n", "atom_value", "atom_mass", "n_tied", "conf_low", "conf_high", "clustered")
IN_NATS = ("entropy", "std_error", "conf_low", "conf_high")


@dataclass(frozen=True, eq=False, repr=False)
class EntropyResult(Result):
    """Differential entropies in nats, as :func:`fedstat.knn_entropy` returns them.

    The fields are DataArrays, arrays or tensors, as the samples are. ``result["entropy"]`` is ``result.entropy``,
    ``result["unit"]`` is a coordinate, and ``np.asarray(result)`` holds the entropies.

    Attributes
    ----------
    entropy : (...,)
        Entropy of the continuous part. NaN where at most k samples lie outside the atoms, as for a unit whose outputs
        are always 0.
    std_error : (...,)
        Standard error, which leaves out the bias. NaN for tied or clustered samples.
    n : (...,)
        Number of samples outside the atoms, from which the entropy is estimated.
    atom_value : (..., atom) or (..., atom, feature)
        Atoms: values that more than k samples have. In ascending order, padded with NaN.
    atom_mass : (..., atom)
        Proportion of the samples at each atom, padded with 0.
    n_tied : (...,)
        Number of tied samples: samples outside the atoms that have an exact copy. They make the entropy too low.
    conf_low, conf_high : (...,)
        Confidence interval that allows for the bias. NaN for tied or clustered samples, and for k above
        :func:`fedstat.stats.entropy.largest_k`.
    clustered : (...,)
        True if samples lie in narrow groups that are too small for k, which makes the entropy too high.
    k : int
        Rank of the nearest neighbor whose distance is used.
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
    _by: ClassVar[str | None] = "estimate"

    @property
    def _headings(self) -> Headings:  # type: ignore[override]
        columns: Headings = {str(dim): str(dim) for dim in self.to_dataset()["entropy"].dims}
        return {**columns, "entropy (nats)": "estimate", "CI": ("conf_low", "conf_high"), "samples": "n"}

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in FIELDS else self.to_dataset()[name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(check.numpy_of(self.entropy), dtype=dtype, copy=True if copy is None else copy)

    def to_dataset(self) -> xr.Dataset:
        """Return all fields under their names; dims of arrays and tensors are axis_0, axis_1, ..., atom and feature."""
        if isinstance(self.entropy, xr.DataArray):
            return xr.Dataset({name: self[name] for name in FIELDS})
        values = {name: check.numpy_of(self[name]) for name in FIELDS}
        dims = [f"axis_{i}" for i in range(values["entropy"].ndim)]
        data = xr.Dataset({name: ([*dims, "atom", "feature"][: x.ndim], x) for name, x in values.items()})
        for name in IN_NATS:
            data[name].attrs["units"] = "nats"
        return data

    def tidy(self) -> pd.DataFrame:
        """Return one row per series.

        Returns
        -------
        DataFrame (series)
            First the coordinates of the series. Then, in nats, estimate (the entropy), conf_low and conf_high (allow
            for the bias). Then n, as in the field; std_error in nats (leaves out the bias); n_tied and clustered, as
            in the fields; n_atoms, the number of atoms; atom_mass, the proportion of the samples in all atoms.
        """
        data = self.to_dataset()
        mass = data["atom_mass"]
        names = ["entropy", "conf_low", "conf_high", "n", "std_error", "n_tied", "clustered"]
        table = data[names].rename(entropy="estimate")
        table = table.assign(n_atoms=(mass > 0).sum("atom").variable, atom_mass=mass.sum("atom").variable)
        if not table.sizes:
            return pd.DataFrame([{str(name): x.item() for name, x in table.data_vars.items()}])
        frame = table.to_dataframe()
        frame = frame.drop(columns=[name for name in frame.index.names if name in frame])  # xarray 2025.7 repeats them
        frame = frame.reset_index()
        for dim in [dim for dim in map(str, table.dims) if dim not in frame]:  # an index of several levels
            frame.insert(0, dim, list(zip(*(frame[name] for name in table.indexes[dim].names), strict=True)))
        return frame

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes all series.

        Returns
        -------
        DataFrame (1,)
            n_series, k; n_min and n_max, the fewest and the most samples of a series; in nats, over series,
            entropy_median, entropy_min, entropy_max and std_error_median; level; interval_width_median in nats. Then
            counts of series: n_with_atoms, n_with_ties, n_clustered, n_undefined (no entropy), n_without_interval
            (an entropy, but no interval).
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
            "std_error_median": median_and_ends(table["std_error"].to_numpy())[0],
            "level": self.level,
            "interval_width_median": median_and_ends((table["conf_high"] - table["conf_low"]).to_numpy())[0],
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
            lines.append(
                f"{100 * self.level:g}% CIs, widened for bias: median width {width}; they assume no narrow groups of "
                f"fewer than {least_group(self.k)} samples"
            )
        if x["n_with_atoms"]:
            most_mass = float(table["atom_mass"].max())
            lines.append(
                f"{x['n_with_atoms']} with atoms (equal samples), up to {100 * most_mass:.0f}% of the samples; "
                f"{x['n_undefined']} undefined (too few other samples)"
            )
        lines += self._explain_missing_intervals(table)
        if len(table) > 1:
            labels = table[dims].astype(str).agg(", ".join, axis=1)
            lines += extremes(table["estimate"].to_numpy(), labels.to_numpy())
        return lines

    def _caption(self) -> list[str]:
        return [*self._lines()[:2], f"{self._ci}: allows for the bias of the estimate"]

    def cautions(self) -> list[Caution]:
        """Return cautions on series whose entropy is too low or too high."""
        table, cautions = self.tidy(), []
        if n_tied := int((table["n_tied"] > 0).sum()):
            percent = 100 * float((table["n_tied"] / table["n"]).max())
            text = f"{n_tied} with ties (up to {percent:.0f}% of the samples): entropy too low, no CI"
            cautions.append(Caution("Ties", text))
        if n_clustered := int(table["clustered"].sum()):
            text = f"{n_clustered} with samples in narrow groups, too small for k = {self.k}: entropy too high, no CI"
            cautions.append(Caution("Samples in narrow groups", text))
        return cautions

    def _explain_missing_intervals(self, table: pd.DataFrame) -> list[str]:
        """Return the line of the print that says why the bias, and with it the interval, is unknown."""
        lines = []
        least = table.loc[table["estimate"].notna(), "n"].min()
        if self._dimension > 3:
            lines.append(f"No CIs: the bias is unknown in {self._dimension} dimensions (known up to 3)")
        elif np.isfinite(least) and self.k > (most := largest_k(int(least), self._dimension)):
            lines.append(f"No CI where the bias is unknown: k > {most} with {least:.0f} samples")
        return lines

    @property
    def _dimension(self) -> int:
        """Number of coordinates of a sample."""
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
        Names of the clients.
    cluster : int array (client,)
        Number of each client's cluster. Clusters are numbered from 1 in the order of their first client.
    merges, order : array (client - 1, 4) and int array (client,)
        The tree, as :func:`scipy.cluster.hierarchy.linkage` returns it, and the positions of clients along its leaves.
    n_values : int
        Length of a client's vector.
    subsample_ari : float
        Mean adjusted Rand index of the clusters with the clusters of random subsamples of the clients.
    left_out, n_subsamples : int
        Number of clients that a subsample leaves out, and number of subsamples.
    groups : array (client,) or None
        Known groups. Without them the fields from ``ari`` to ``contrast_p_value`` are NaN.
    ari, std_error, conf_low, conf_high : float
        Adjusted Rand index of clusters and groups, with its standard error and confidence interval (delete-d
        jackknife over clients).
    p_value : float
        One-sided permutation test of the index. H0: group membership is exchangeable over clients.
    contrast, contrast_p_value : float
        Mean similarity within groups minus mean similarity between groups, and its one-sided permutation test. This
        test needs no clusters.
    n_permutations : int
        Number of permutations of group membership behind both p values.
    exact : bool
        True if these are all distinct arrangements of the groups over clients. Otherwise they are random, and the
        observed arrangement is added.
    level : float
        Confidence level of the interval.
    baseline : {"mean"} or None
        "mean" if the mean over clients was subtracted from the vectors.
    """

    similarity: Floats
    clients: NDArray[Any]
    cluster: NDArray[np.int64]
    merges: Floats
    order: NDArray[np.int64]
    n_values: int
    subsample_ari: float
    left_out: int
    n_subsamples: int
    groups: NDArray[Any] | None = None
    ari: float = np.nan
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
    _headings: ClassVar[Headings] = {
        "client": "term", "cluster": "cluster", "group": "group", "within": "within", "nearest": "nearest"
    }  # fmt: skip
    _captioned: ClassVar[tuple[int, ...]] = (0, 1)

    def to_dataset(self) -> xr.Dataset:
        """Return ``similarity`` (client, other), ``cluster`` (client,) and, for known groups, ``group`` (client,)."""
        clients = {"client": self.clients, "other": self.clients}
        data = {"similarity": (("client", "other"), self.similarity), "cluster": ("client", self.cluster)}
        if self.groups is not None:
            data["group"] = ("client", self.groups)
        return xr.Dataset(data, clients)

    def tidy(self) -> pd.DataFrame:
        """Return one row per client.

        Returns
        -------
        DataFrame (client)
            term (the client); cluster; group, if groups are known; within, the mean similarity to the other clients of
            its cluster (NaN if there are none); nearest, the mean similarity to the clients of the most similar other
            cluster (NaN if there is one cluster).
        """
        is_member = self.cluster[:, None] == np.unique(self.cluster)
        sums, sizes = self.similarity @ is_member, is_member.sum(0)
        column = self.cluster - 1
        with np.errstate(invalid="ignore"):
            within = (sums[np.arange(len(column)), column] - 1) / (sizes[column] - 1)
        to_other_clusters = np.where(is_member, -np.inf, sums / sizes)
        rows = {"term": self.clients, "cluster": self.cluster}
        rows |= {} if self.groups is None else {"group": self.groups}
        nearest = to_other_clusters.max(1) if is_member.shape[1] > 1 else np.full(len(column), np.nan)
        return pd.DataFrame(rows | {"within": within, "nearest": nearest})

    def augment(self, data: Any = None) -> Any:
        """Add the columns of :meth:`tidy` to data about the clients.

        Parameters
        ----------
        data : DataFrame, Dataset or DataArray, optional
            A DataFrame with a column ``client``, or with the clients as its index, or with one row per client in their
            order. Or a Dataset or DataArray with the dim ``client``, such as ``run["clients"]``.

        Returns
        -------
        DataFrame (client) or Dataset
            The columns or variables of ``data``, then cluster, group, within and nearest. Without data, client and
            these columns.
        """
        return join_columns(self.tidy().rename(columns={"term": "client"}), data, key="client")

    def _by_row(self) -> tuple[pd.DataFrame, str | None]:
        return self.tidy().sort_values("cluster", kind="stable"), None

    def glance(self) -> pd.DataFrame:
        """Return one row of sizes and fields.

        Returns
        -------
        DataFrame (1,)
            n_clients, n_clusters, n_groups (0 if groups are unknown); then the fields ari to
            contrast_p_value, n_permutations, exact, subsample_ari, left_out and level, as the class describes them.
        """
        names = (
            "ari", "std_error", "conf_low", "conf_high", "p_value", "contrast", "contrast_p_value",
            "n_permutations", "exact", "subsample_ari", "left_out", "level",
        )  # fmt: skip
        row = {"n_clients": len(self.clients), "n_clusters": int(self.cluster.max())}
        row["n_groups"] = 0 if self.groups is None else len(np.unique(self.groups))
        return pd.DataFrame([row | {name: getattr(self, name) for name in names}])

    def _lines(self) -> list[str]:
        n, sizes = len(self.clients), _format_sizes(self.cluster)
        lines = [
            f"{count(int(self.cluster.max()), 'cluster')} of {count(n, 'client')} (sizes {sizes})",
            f"Average linkage on 1 - cosine similarity, {count(self.n_values, 'value')} per client",
            *["Vectors minus their mean over clients"] * bool(self.baseline),
            (
                f"Mean ARI with clusters of random subsamples of {count(n - self.left_out, 'client')}: "
                f"{coefficient(self.subsample_ari)} ({self.n_subsamples} draws)"
            ),
        ]
        if self.groups is None:
            return lines
        ari, contrast = coefficient(self.ari), coefficient(self.contrast)
        interval = "no CI: equal in all subsamples"
        if self.std_error != 0:
            ends = f"[{coefficient(self.conf_low)}, {coefficient(self.conf_high)}]"
            interval = f"{100 * self.level:g}% CI {ends} (delete-{self.left_out} jackknife)"
        n_drawn = f"all {self.n_permutations} arrangements" if self.exact else count(self.n_permutations, "permutation")
        return [
            *lines,
            f"Known groups: {len(np.unique(self.groups))} (sizes {_format_sizes(self.groups)})",
            f"  ARI with the clusters: {ari}, {interval}",
            f"    {p_equals(self.p_value)} (one-sided, {n_drawn} of group membership)",
            f"  Mean similarity within minus between groups: {contrast}, {p_equals(self.contrast_p_value)} (same test)",
        ]


def _format_sizes(group: NDArray[Any]) -> str:
    """Return the sizes of groups, in the order of their names."""
    return ", ".join(map(str, np.unique(group, return_counts=True)[1]))
