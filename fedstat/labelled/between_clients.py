"""Samples and clients compared: the verbs ``knn_entropy`` and ``client_clusters``."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import labels, less_mean, need_dims, numpy_of, precision
from fedstat.labelled.factor import EntropyOptions
from fedstat.results.between_clients import FIELDS, IN_NATS, ClientClustersResult, EntropyResult
from fedstat.stats import clustering, entropy
from fedstat.stats.split import adjusted_rand


def knn_entropy(
    x: Any,
    *,
    k: int = 3,
    level: float = 0.95,
    dim: str = "client",
    feature_dim: str | None = None,
    **options: Unpack[EntropyOptions],
) -> EntropyResult:
    """Kozachenko–Leonenko estimate of differential entropy over one dim, in nats (FedFac §1, Fig. 2).

    Parameters
    ----------
    x : DataArray, DataFrame, array or tensor (client, ...)
        Samples along ``dim``, the rows of a DataFrame; other dims are a batch. In an array or tensor the samples are on
        axis 0, or on the axis given by ``axis=...``, see :func:`fedstat.stats.entropy.knn_entropy`.
    k : int
        Number of the neighbour.
    level : float
        Confidence level of the intervals, which allow for the estimate's bias.
    dim : str
        Dim of the samples of a DataArray: the clients, for Fig. 2.
    feature_dim : str, optional
        Dim of the coordinates of one sample of a DataArray; None: every number is a sample of its own.
    **options
        Those of :class:`fedstat.labelled.factor.EntropyOptions`: ``ties``, ``resolution``, ``seed``, as in
        :func:`fedstat.stats.entropy.knn_entropy`.

    Returns
    -------
    EntropyResult
        Its fields are DataArrays, arrays or tensors, as ``x`` is: entropy, std_error, n, n_tied, conf_low, conf_high,
        clustered (...); atom_value (..., atom) or (..., atom, ``feature_dim``) and atom_mass (..., atom) of values that
        more than k samples share, if ``ties="atoms"``. ``result["entropy"]`` is ``result.entropy``;
        :meth:`~EntropyResult.to_dataset` holds all.

    Raises
    ------
    ValueError
        If a dim is not there, a value is not finite, there are no more than k samples, more than k samples are equal
        and ``ties`` does not provide for them, or a coordinate is a linear function of others.

    Warns
    -----
    UserWarning
        If samples have exact copies, k of them or fewer: the entropy is too low. If samples lie in narrow groups too
        small for k: the entropy is too high. No standard error and no interval are given there.

    Examples
    --------
    >>> import numpy as np
    >>> outputs = xr.DataArray(np.random.default_rng(0).normal(size=(100, 5)), dims=("client", "unit"))
    >>> knn_entropy(outputs).std_error.round(1).values
    array([0.1, 0.1, 0.1, 0.1, 0.1])
    >>> knn_entropy(outputs).tidy()[["estimate", "conf_low", "conf_high"]].round(2).iloc[0].tolist()
    [1.28, 0.99, 1.54]
    """
    x = _labels.labelled(x, (dim, feature_dim or "unit"))
    if not isinstance(x, xr.DataArray):
        if dim != "client" or feature_dim is not None:
            raise ValueError(
                f"dim and feature_dim name dims of a DataArray, but got {type(x).__name__}. Use axis and feature_axis."
            )
        found = entropy.knn_entropy(x, k=k, level=level, **options)
        return _with_warning(EntropyResult(*found, k=k, level=level))
    if taken := sorted({"axis", "feature_axis"} & set(options)):
        raise ValueError(f"a DataArray has dims, but got {taken[0]}. Use dim and feature_dim.")
    core = [dim] if feature_dim is None else [dim, feature_dim]
    need_dims(x, *core)
    check.numbers("x", x)
    axes: dict[str, Any] = {"axis": -1} if feature_dim is None else {"axis": -2, "feature_axis": -1}
    by_atom = ["atom"] if feature_dim is None else ["atom", feature_dim]

    axes |= options

    def estimate(values: Any) -> tuple[Any, ...]:
        found = entropy.knn_entropy(values, k=k, level=level, **axes)
        value = found.atom_value
        if value.ndim < found.atom_mass.ndim + len(by_atom) - 1:  # one coordinate is no axis to the array function
            value = value[..., None]
        return tuple(found._replace(atom_value=value))

    parts = xr.apply_ufunc(
        estimate, x, input_core_dims=[core], output_core_dims=[[], [], [], by_atom, ["atom"], *[[]] * 4],
        exclude_dims=set(core),
    )  # fmt: skip
    data = xr.Dataset(dict(zip(FIELDS, parts, strict=True)))
    if feature_dim is not None and feature_dim in x.coords:
        data = data.assign_coords({feature_dim: x[feature_dim]})
    for name in IN_NATS:
        data[name].attrs["units"] = "nats"
    return _with_warning(EntropyResult(**{name: data[name] for name in FIELDS}, k=k, level=level))


def _with_warning(result: EntropyResult) -> EntropyResult:
    """The result, after a warning if samples have exact copies or lie in narrow groups."""
    data = result.to_dataset()
    n, n_tied, clustered = (data[name].to_numpy().ravel() for name in ("n", "n_tied", "clustered"))
    if (n_tied > 0).any():
        most, some = n_tied.argmax(), (n_tied > 0).sum()
        of = f" in the series with most ties; {some} of {len(n)} series have some" if len(n) > 1 else ""
        check.warn(
            f"{n_tied[most]} of {n[most]} samples have an exact copy{of}. Copies shorten the distance to "
            f"neighbor {result.k}: the entropy is too low, and no interval is given. If values were rounded, use "
            "ties='jitter' with their resolution; if a value has a mass of its own, ties='atoms' and a smaller k; if "
            "samples came twice, drop the copies. A larger k lessens the error."
        )
    if clustered.any():
        of = f" in {clustered.sum()} of {len(n)} series" if len(n) > 1 else ""
        check.warn(
            f"samples lie in narrow groups{of}, and many groups are too small for neighbor {result.k}: the entropy is "
            "too high, and no interval is given. Use a smaller k or more samples, or take the entropy of each group."
        )
    return result


_SHARE = 0.5  # of the clients, left out in every draw
_SEVERAL = ("checkpoint", "round", "stage", "replicate", "other", "layer")


def client_clusters(
    vectors: Any,
    *,
    n_clusters: int,
    groups: Any = None,
    baseline: Literal["mean"] | None = None,
    n_permutations: int = 9999,
    n_subsamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> ClientClustersResult:
    """Clusters of clients by what they have learnt, and their agreement with known groups such as domains.

    Clients are clustered by average linkage on 1 − cosine similarity of their vectors, cut into a given number of
    clusters. With known groups there are two one-sided tests, in which the groups' labels are permuted over clients:
    of the adjusted Rand index of clusters and groups [1]_, and, with no need of clusters, of the mean similarity
    within groups minus that between them (as Mantel's test [2]_ of the similarities against "same group").

    Parameters
    ----------
    vectors : array, tensor, DataFrame or DataArray (client, ...)
        Any numbers of each client: a factor or weights from :func:`fedstat.fl.client_weights`, mean policies.
    n_clusters : int
    groups : array, Series, DataArray (client,) or mapping from client to group, optional
        Those with labels are matched by them.
    baseline : {"mean"}, optional
        What is taken off the vectors: "mean", the mean over clients. Vectors that hold what all clients share, or began
        alike, are all similar; what is left without their mean is the clients' own.
    n_permutations : int
        All arrangements of the labels are taken where there are at most so many, for exact p-values; otherwise so
        many are drawn, and the arrangement at hand is added [3]_.
    n_subsamples : int
        Random subsamples of half of the clients, for the interval and to see whether clusters recur.
    level : float in (0, 1)
        Confidence level of the interval.
    seed : int

    Returns
    -------
    ClientClustersResult
        :func:`fedstat.plot.client_similarity` draws it.

    Raises
    ------
    ValueError
        If there are more clusters than clients, or than directions of their vectors; a vector is zero, NaN or infinite
        (the clients are named); groups do not cover the clients, are all the same, or have one client each; vectors are
        a whole run; they have a dim such as ``checkpoint``, of which one should be selected; or all are parallel.

    Notes
    -----
    The interval of the adjusted Rand index is that of the delete-d jackknife over clients [4]_, with normal quantiles,
    cut at -1 and 1. It says how far the index depends on which clients took part, given the groups and the training:
    clients of one run share a server, so that it says nothing of other runs. Clients are *not* drawn with replacement:
    a client drawn twice has distance 0 to itself and the same group, which raises the index.
    The interval is cautious: in a simulation of 20 or 60 clients in 4 groups, with a true mean index of 0.45 to 0.79,
    95 % intervals held it in 98 to 100 % of 40 to 60 repetitions each, at mean widths of 0.64 to 0.95; drawn with
    replacement, clients had an index that was on average 0.02 to 0.08 above that of the sample.

    References
    ----------
    .. [1] Hubert, Arabie (1985). Comparing partitions. J. Classification 2, 193-218.
    .. [2] Mantel (1967). The detection of disease clustering and a generalized regression approach. Cancer Research 27.
    .. [3] Phipson, Smyth (2010). Permutation p-values should never be zero. Stat. Appl. Genet. Mol. Biol. 9 (1), 39.
    .. [4] Shao, Wu (1989). A general theory for jackknife variance estimation. Annals of Statistics 17, 1176-1197.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> domain = np.repeat(["a", "b", "c"], 4)
    >>> v = np.repeat(rng.normal(size=(3, 30)), 4, axis=0) + rng.normal(size=(12, 30))
    >>> client_clusters(v, n_clusters=3, groups=domain)
    3 clusters of 12 clients (sizes 4, 4, 4)
    Average linkage on 1 - cosine similarity, 30 values per client
    Mean ARI with clusters of random subsamples of 6 clients: 0.96 (200 draws)
    Known groups: 3 (sizes 4, 4, 4)
      ARI with the clusters: 1.00, 95% CI [0.75, 1.00] (delete-6 jackknife)
        p < 0.001 (one-sided, 9999 permutations of group membership)
      Mean similarity within minus between groups: 0.53, p < 0.001 (same test)
    """
    x, clients, eps = _matrix(vectors, check.choice("baseline", baseline, ("mean", None)))
    n = len(clients)
    if check.integer("n_clusters", n_clusters) > n:
        raise ValueError(f"n_clusters must be at most the number of clients, {n}, but got {n_clusters}")
    check.integer("n_permutations", n_permutations)
    check.integer("n_subsamples", n_subsamples)
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    known = None if groups is None else _groups(groups, clients)
    similarity = clustering.cosine(x, eps=eps)
    merges, order = clustering.tree(similarity)
    _require_directions(merges, n_clusters)
    cluster = clustering.cut(merges, n_clusters)
    of = None if known is None else clustering.codes(known)
    out = clustering.left_out(
        similarity, cluster, of, n_clusters=n_clusters, share=_SHARE, draws=n_subsamples, seed=seed
    )
    found = {} if of is None else _agreement(similarity, cluster, of, out, n_permutations, level, seed)
    recurs = float(out.recurs.mean())
    about = (x.shape[1], recurs, out.left_out, n_subsamples, known)
    return ClientClustersResult(
        similarity, clients, cluster + 1, merges, order, *about, level=level, baseline=baseline, **found
    )


def _agreement(
    similarity: Any, cluster: Any, groups: Any, out: clustering.Left, n_permutations: int, level: float, seed: int
) -> dict[str, Any]:
    """Fields of the result that need groups."""
    rand = float(adjusted_rand(cluster, groups))
    contrast = float(clustering.contrast(similarity, groups))
    under = clustering.permuted(similarity, cluster, groups, permutations=n_permutations, seed=seed)
    error = clustering.jackknife_error(out.rand, rand, n=len(groups), left=out.left_out)
    # An index that is equal in every draw has an unknown spread, not none.
    half = float(scipy.special.ndtri((1 + level) / 2)) * error if error > 0 else math.nan
    return {
        "adjusted_rand": rand,
        "std_error": error,
        "conf_low": float(np.maximum(-1.0, rand - half)),
        "conf_high": float(np.minimum(1.0, rand + half)),
        "p_value": clustering.p_value(rand, under.rand, exact=under.exact),
        "contrast": contrast,
        "contrast_p_value": clustering.p_value(contrast, under.contrast, exact=under.exact),
        "n_permutations": len(under.rand),
        "exact": under.exact,
    }


def _matrix(vectors: Any, baseline: str | None) -> tuple[NDArray[np.float64], NDArray[Any], float]:
    """Vectors (client, value), the clients' labels, and the relative rounding error of the numbers."""
    vectors = check.numbers("vectors", _labels.labelled(vectors, ("client", "value")))
    clients, eps = labels(vectors, "client", 0), precision(vectors)
    if isinstance(vectors, xr.DataArray):
        need_dims(vectors, "client")
        if several := [str(d) for d in vectors.dims if d in _SEVERAL]:
            raise ValueError(
                f"there must be one vector a client, but the dims are {vectors.dims}. Select one {several[0]}, as in "
                f".isel({several[0]}=-1)."
            )
        vectors = vectors.transpose("client", ...).to_numpy()
    x = numpy_of(vectors).astype(float)
    if x.ndim < 2 or 0 in x.shape or len(x) < 2:
        raise ValueError(f"vectors must be (client, ...) of at least 2 clients, but got shape {x.shape}")
    x = x.reshape(len(x), -1)
    if (bad := ~np.isfinite(x).all(1)).any():
        raise ValueError(
            f"the vectors of client(s) {few(clients[bad])} hold NaN or infinite values. Clients that were not active "
            'are NaN: leave them out, as .dropna("client") does; a diverged client needs a lower learning rate.'
        )
    if not (x - x[0]).any():
        raise ValueError(
            "vectors must differ between clients, but all clients hold the same: what is shared whole. Take what they "
            "trained, as fedstat.fl.client_weights(run, layer, stage='trained') does."
        )
    x = less_mean(x, eps) if baseline else x
    if (zero := ~x.any(1)).any():
        raise ValueError(
            f"the vectors of client(s) {few(clients[zero])} are zero, and have no cosine with any other. Leave these "
            "clients out: what they hold was not trained, or is shared entirely."
        )
    return x, clients, eps


def _require_directions(merges: NDArray[np.float64], n_clusters: int) -> None:
    """ValueError for more clusters than directions, the rest of which would be rounding noise."""
    directions = 1 + int((merges[:, 2] > 0).sum())
    if n_clusters > directions or directions == 1:
        raise ValueError(
            f"vectors of the {len(merges) + 1} clients have {directions} different direction(s), up to rounding, but "
            f"got n_clusters={n_clusters}. "
            + ("Parallel vectors have no clusters." if directions == 1 else f"Ask for {directions} clusters or fewer.")
        )


def _groups(groups: Any, clients: NDArray[Any]) -> NDArray[Any]:
    """Group of each client, in their order."""
    found = _labels.matched("groups", groups, {"client": clients})
    n = len(np.unique(found))
    if n == 1 or n == len(clients):
        raise ValueError(
            f"groups must be at least two, one of them of two clients or more, but got {n} groups of {len(clients)} "
            "clients: there is nothing to compare"
        )
    return found
