"""Entropy of samples, and clusters of clients: the verbs ``knn_entropy`` and ``client_clusters``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few, numpy_of
from fedstat._utils.lazy import xr
from fedstat._utils.loops import progress_bar
from fedstat.labelled.factor import EntropyOptions, show_options
from fedstat.labelled.groups import require_several
from fedstat.labelled.inputs import by_layer
from fedstat.labelled.layer import Layer, less_mean, need_dims, precision
from fedstat.labelled.runs import AUTO, Stage
from fedstat.results.between_clients import FIELDS, IN_NATS, ClientClustersResult, EntropyResult
from fedstat.results.origin import recorded
from fedstat.stats import clustering, entropy
from fedstat.stats.split import adjusted_rand


@show_options(EntropyOptions, entropy.knn_entropy)
@recorded
def knn_entropy(
    x: Any,
    *,
    k: int = 3,
    level: float = 0.95,
    dim: str = "client",
    feature_dim: str | None = None,
    **options: Unpack[EntropyOptions],
) -> EntropyResult:
    """Estimate differential entropy over one dim, in nats, from nearest neighbors (FedFac §1, Fig. 2).

    The estimate is Kozachenko and Leonenko's; :func:`fedstat.stats.entropy.knn_entropy` has formula and sources.

    Parameters
    ----------
    x : DataArray, DataFrame, array or tensor (client, ...)
        Samples along ``dim``, or the rows of a DataFrame; other dims are a batch. In an array or tensor the samples
        are on axis 0, or on ``axis``, see :func:`fedstat.stats.entropy.knn_entropy`.
    k : int
        Order of the nearest neighbor.
    level : float
        Confidence level of the intervals, which are widened for the estimate's bias.
    dim : str
        Dim of a DataArray that holds the samples: in Fig. 2, the clients.
    feature_dim : str, optional
        Dim of a DataArray that holds the coordinates of a sample; None: every number is a sample.
    ties, resolution, seed, axis, feature_axis
        As in :func:`fedstat.stats.entropy.knn_entropy`.

    Returns
    -------
    EntropyResult
        Its fields are DataArrays, arrays or tensors, like ``x``: entropy, std_error, n, n_tied, conf_low, conf_high,
        clustered (...). With ``ties="atoms"``, atom_value (..., atom) or (..., atom, ``feature_dim``) and atom_mass
        (..., atom) describe values that more than k samples share. ``result["entropy"]`` is ``result.entropy``;
        :meth:`~EntropyResult.to_dataset` holds all fields.

    Raises
    ------
    ValueError
        If a dim is missing, a value is not finite, or there are only k samples or fewer. If more than k samples are
        equal and ``ties`` is "error". If a coordinate is a linear function of others.

    Warns
    -----
    UserWarning
        If samples have up to k exact copies: the entropy is too low. If samples lie in narrow groups too small for k:
        the entropy is too high. The affected series get no standard error and no interval.

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
        fields = entropy.knn_entropy(x, k=k, level=level, **options)
        return _warn_if_biased(EntropyResult(*fields, k=k, level=level))
    if axis_options := sorted({"axis", "feature_axis"} & set(options)):
        raise ValueError(f"a DataArray has dims, but got {axis_options[0]}. Use dim and feature_dim.")
    core = [dim] if feature_dim is None else [dim, feature_dim]
    need_dims(x, *core)
    check.numbers("x", x)
    axes: dict[str, Any] = {"axis": -1} if feature_dim is None else {"axis": -2, "feature_axis": -1}
    by_atom = ["atom"] if feature_dim is None else ["atom", feature_dim]

    axes |= options

    def estimate(values: Any) -> tuple[Any, ...]:
        fields = entropy.knn_entropy(values, k=k, level=level, **axes)
        value = fields.atom_value
        if value.ndim < fields.atom_mass.ndim + len(by_atom) - 1:  # stats drops the axis of a single coordinate
            value = value[..., None]
        return tuple(fields._replace(atom_value=value))

    arrays = xr.apply_ufunc(
        estimate, x, input_core_dims=[core], output_core_dims=[[], [], [], by_atom, ["atom"], *[[]] * 4],
        exclude_dims=set(core),
    )  # fmt: skip
    data = xr.Dataset(dict(zip(FIELDS, arrays, strict=True)))
    if feature_dim is not None and feature_dim in x.coords:
        data = data.assign_coords({feature_dim: x[feature_dim]})
    for name in IN_NATS:
        data[name].attrs["units"] = "nats"
    return _warn_if_biased(EntropyResult(**{name: data[name] for name in FIELDS}, k=k, level=level))


def _warn_if_biased(result: EntropyResult) -> EntropyResult:
    """Warn if samples have exact copies or lie in narrow groups; return the result."""
    data = result.to_dataset()
    n, n_tied, clustered = (data[name].to_numpy().ravel() for name in ("n", "n_tied", "clustered"))
    if (n_tied > 0).any():
        most, n_series = n_tied.argmax(), (n_tied > 0).sum()
        place = f" in the series with most ties; {n_series} of {len(n)} series have ties" if len(n) > 1 else ""
        check.warn(
            f"{n_tied[most]} of {n[most]} samples have an exact copy{place}. Copies shorten the distance to "
            f"neighbor {result.k}: the entropy is too low, and has no interval. If values were rounded, use "
            "ties='jitter' with their resolution; if a value has positive probability, ties='atoms' and a smaller k; "
            "if samples were entered twice, drop the copies. A larger k reduces the error."
        )
    if clustered.any():
        place = f" in {clustered.sum()} of {len(n)} series" if len(n) > 1 else ""
        check.warn(
            f"samples lie in narrow groups{place}, and many groups are too small for neighbor {result.k}: the entropy "
            "is too high, and has no interval. Use a smaller k or more samples, or estimate each group separately."
        )
    return result


_FRACTION_OMITTED = 0.5  # of the clients, in every subsample
_EXTRA_DIMS = ("checkpoint", "round", "stage", "replicate", "other", "layer")


@by_layer(form=lambda **_: "vectors")
def client_clusters(
    vectors: Any,
    *,
    n_clusters: int,
    groups: Any = None,
    baseline: Any = AUTO,
    n_permutations: int = 9999,
    n_subsamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
    layer: str | Sequence[str] | None = None,
    checkpoint: int | None = None,
    stage: Stage | None = None,
    progress: bool | None = None,
) -> ClientClustersResult:
    """Cluster clients by their vectors, and compare the clusters with known groups such as domains.

    Clients are clustered by average linkage on 1 − cosine similarity of their vectors; the tree is cut into
    ``n_clusters`` clusters. With known groups there are two one-sided tests, which permute the groups' labels over
    clients: of the adjusted Rand index of clusters and groups [1]_, and, without clusters, of the mean similarity
    within groups minus the mean similarity between groups, as Mantel's test [2]_.

    Parameters
    ----------
    vectors : array, tensor, DataFrame or DataArray (client, ...), or an object that holds layers
        Any numbers of each client: mean policies, or a factor or weights from :func:`fedstat.fl.client_weights`. Or
        weights of several layers, as in :func:`fedstat.split`.
    n_clusters : int
        Number of clusters.
    groups : array, Series, DataArray (client,) or mapping from client to group, optional
        Known group of each client. Groups with client labels are matched by label, others by position.
    baseline : {"auto", "common", "download", "initial", "mean"}, array (...) or None
        Vector to subtract first: as in :func:`fedstat.split`, or "mean", the mean over clients, so that the
        client-specific part remains.
    n_permutations : int
        Maximum number of permutations. If the labels have at most this many arrangements, all are used, and p values
        are exact. Otherwise this many are drawn, and the observed arrangement is added [3]_.
    n_subsamples : int
        Random subsamples of half of the clients, for the interval [4]_ and the mean ARI with clusters of subsamples.
    level : float in (0, 1)
        Confidence level of the interval.
    seed : int
        Seed of subsamples and permutations.
    layer, checkpoint, stage
        Layers and round to analyze, if there are several: as in :func:`fedstat.split`.
    progress : bool or None
        Show how many layers, subsamples and permutations are done; see :func:`fedstat.fl.train`.

    Returns
    -------
    ClientClustersResult
        Clusters, similarities and tests; :func:`fedstat.plot.client_similarity` draws them. With several layers, a
        :class:`fedstat.results.LayerResults`.

    Raises
    ------
    ValueError
        If there are more clusters than clients, or than directions of their vectors, or all vectors are parallel. If a
        vector is zero, NaN or infinite (the clients are named). If groups do not cover the clients, are all equal, or
        have one client each. If vectors have a dim such as ``replicate``: select one entry.

    References
    ----------
    .. [1] Hubert, Arabie (1985). Comparing partitions. J. Classification 2, 193-218.
    .. [2] Mantel (1967). The detection of disease clustering and a generalized regression approach. Cancer Research 27.
    .. [3] Phipson, Smyth (2010). Permutation p-values should never be zero. Stat. Appl. Genet. Mol. Biol. 9 (1), 39.
    .. [4] Shao, Wu (1989). A general theory for jackknife variance estimation. Annals of Statistics 17, 1176-1197.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> v = np.repeat(rng.normal(size=(3, 30)), 4, axis=0) + rng.normal(size=(12, 30))
    >>> client_clusters(v, n_clusters=3, groups=np.repeat(["a", "b", "c"], 4)).ari
    1.0
    """
    x, clients = _matrix(vectors), vectors.clients
    n = len(clients)
    if check.integer("n_clusters", n_clusters) > n:
        raise ValueError(f"n_clusters must be at most the number of clients, {n}, but got {n_clusters}")
    check.integer("n_permutations", n_permutations)
    check.integer("n_subsamples", n_subsamples)
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    group_names = None if groups is None else _labels.matched("groups", groups, {"client": clients})
    if group_names is not None:
        require_several(len(np.unique(group_names)), n)
    similarity = clustering.cosine(x, eps=precision(vectors.data))
    merges, order = clustering.tree(similarity)
    _require_directions(merges, n_clusters)
    cluster = clustering.cut(merges, n_clusters)
    group = None if group_names is None else clustering.codes(group_names)
    options: dict[str, Any] = {"share": _FRACTION_OMITTED, "draws": n_subsamples, "seed": seed}
    with progress_bar(n_subsamples, "subsample", progress) as bar:
        subsamples = clustering.left_out(similarity, cluster, group, n_clusters=n_clusters, **options, tick=bar.update)
    tests = {}
    if group is not None:
        with progress_bar(min(n_permutations, clustering.arrangements(group)), "permutation", progress) as bar:
            permutations = clustering.Permutations(n_permutations, bar.update)
            tests = _agreement(similarity, cluster, group, subsamples, permutations, level, seed)
    subsample_ari = float(subsamples.subsample_ari.mean())
    about = (x.shape[1], subsample_ari, subsamples.left_out, n_subsamples, group_names)
    return ClientClustersResult(
        similarity,
        clients,
        cluster + 1,
        merges,
        order,
        *about,
        level=level,
        baseline=vectors.baseline if isinstance(vectors.baseline, str) else None,
        **tests,
    )


def _agreement(
    similarity: Any,
    cluster: Any,
    groups: Any,
    subsamples: clustering.Left,
    permutations: clustering.Permutations,
    level: float,
    seed: int,
) -> dict[str, Any]:
    """Compute the fields of the result that need groups."""
    rand = float(adjusted_rand(cluster, groups))
    contrast = float(clustering.contrast(similarity, groups))
    permuted = clustering.permuted(similarity, cluster, groups, permutations=permutations, seed=seed)
    error = clustering.jackknife_error(subsamples.rand, rand, n=len(groups), n_left_out=subsamples.left_out)
    # If the index is equal in all subsamples, its error is unknown, not 0.
    half = float(scipy.special.ndtri((1 + level) / 2)) * error if error > 0 else math.nan
    return {
        "ari": rand,
        "std_error": error,
        "conf_low": float(np.maximum(-1.0, rand - half)),
        "conf_high": float(np.minimum(1.0, rand + half)),
        "p_value": clustering.p_value(rand, permuted.rand, exact=permuted.exact),
        "contrast": contrast,
        "contrast_p_value": clustering.p_value(contrast, permuted.contrast, exact=permuted.exact),
        "n_permutations": len(permuted.rand),
        "exact": permuted.exact,
    }


def _matrix(vectors: Layer) -> NDArray[np.float64]:
    """Return vectors minus the baseline, (client, value)."""
    clients, baseline = vectors.clients, vectors.baseline
    if extra := [d for d in getattr(vectors.data, "dims", ()) if d in _EXTRA_DIMS]:
        raise ValueError(
            f"there must be one vector per client, but the dims are {vectors.data.dims}. Select one {extra[0]}, as in "
            f".isel({extra[0]}=-1)."
        )
    x = numpy_of(vectors.weights).astype(float)
    if len(x) < 2:
        raise ValueError(f"vectors must be (client, ...) of at least 2 clients, but got shape {vectors.data.shape}")
    if (bad := ~np.isfinite(x).all(1)).any():
        raise ValueError(
            f"the vectors of client(s) {few(clients[bad])} hold NaN or infinite values. Clients that were not selected "
            'are NaN: drop them by .dropna("client"). A diverged client needs a lower learning rate.'
        )
    if not (x - x[0]).any():
        raise ValueError(
            "vectors of all clients are identical, as after averaging. Use fedstat.fl.client_weights(run, layer, "
            "stage='trained')."
        )
    if isinstance(baseline, str):
        x = less_mean(x, precision(vectors.data))
    elif baseline is not None:
        x = x - numpy_of(baseline)
    if (zero := ~x.any(1)).any():
        raise ValueError(
            f"the vectors of client(s) {few(clients[zero])} are zero, so their cosine similarity is undefined. Drop "
            "these clients: their values were not trained, or are shared by all clients."
        )
    return x


def _require_directions(merges: NDArray[np.float64], n_clusters: int) -> None:
    """Raise ValueError for more clusters than directions: further clusters would be rounding noise."""
    directions = 1 + int((merges[:, 2] > 0).sum())
    if n_clusters > directions or directions == 1:
        raise ValueError(
            f"vectors of the {len(merges) + 1} clients have {directions} different direction(s), up to rounding, but "
            f"got n_clusters={n_clusters}. "
            + ("Parallel vectors have no clusters." if directions == 1 else f"Use at most {directions} clusters.")
        )
