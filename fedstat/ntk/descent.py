"""Data and gradient descent for the checks of both theorems, vectorized over clients.

Arrays are NumPy or torch (CPU or CUDA), float64. Static FedSplit, FedAvg and dynamic FedFac differ only in the mask of
shared units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from fedstat._utils import check, guard
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator
from fedstat.ntk.gram import Steps
from fedstat.stats import factor, split
from fedstat.stats.moments import correlation, moments


def gaussian(*, clients: int = 10, n: int = 20, d: int = 50, n_test: int = 50, seed: int = 0) -> xr.Dataset:
    """Draw samples uniformly on the unit sphere, with labels from the sign of a network of form (4) of width 50.

    As in model (8) of FedFac §4.3, half of the units of this network are shared and half are personal. Unlike model
    (8), all covariates have one distribution, so that Assumption 1 holds without further scaling.

    Parameters
    ----------
    clients, n, d, n_test : int
        Numbers of clients, training samples per client, features and test samples per client.
    seed : int

    Returns
    -------
    Dataset
        x (client, sample, feature), y (client, sample) in {−1, 1}; split (sample).

    Examples
    --------
    >>> gaussian(clients=2, n=3, d=4, n_test=1).x.shape
    (2, 4, 4)
    """
    clients, n, d = (check.integer(k, v) for k, v in (("clients", clients), ("n", n), ("d", d)))
    n_test = check.integer("n_test", n_test, low=0)
    x = generator(seed, "gaussian", "x").normal(size=(clients, n + n_test, d))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    truth = network("fedsplit", clients=clients, features=d, width=50, seed=seed, replicate=-1)
    y = np.where(predict(x, truth.weights, truth.output) >= 0, 1.0, -1.0)
    return _dataset(x, y, n, "unit sphere, labelled by a network of form (4)")


def digits(
    *,
    clients: int = 10,
    n: int = 20,
    n_test: int = 50,
    partition: Literal["one-class", "iid"] = "one-class",
    seed: int = 0,
) -> xr.Dataset:
    """Return scikit-learn's handwritten digits, scaled to unit length; y is 1 for odd and −1 for even digits.

    Parameters
    ----------
    clients, n, n_test : int
        Numbers of clients, training samples per client and test samples per client.
    partition : {"one-class", "iid"}
        ``"one-class"``: client c has only the digit c mod 10, and therefore one label. ``"iid"``: a random partition.
    seed : int

    Returns
    -------
    Dataset
        Variables and coordinate as in :func:`gaussian`, with 64 features.

    Raises
    ------
    ValueError
        If there are not enough images.

    Examples
    --------
    >>> data = digits(clients=2, n=3, n_test=1)
    >>> data.y.values[:, 0]
    array([-1.,  1.])
    """
    from sklearn.datasets import load_digits

    check.choice("partition", partition, ("one-class", "iid"))
    clients, n, n_test = (
        check.integer("clients", clients),
        check.integer("n", n),
        check.integer("n_test", n_test, low=0),
    )
    images = load_digits()
    order = generator(seed, "digits").permutation(len(images.target))
    label = images.target[order]
    need = n + n_test
    if partition == "iid":
        parts = [order[c * need : (c + 1) * need] for c in range(clients)]
    else:
        parts = [order[label == c % 10][c // 10 * need : (c // 10 + 1) * need] for c in range(clients)]
    if min(map(len, parts)) < need:
        raise ValueError(
            f"{clients} clients need {need} images each, but partition={partition!r} of 1797 digits (about 178 per "
            f"class) gives one client only {min(map(len, parts))}. Reduce clients, n or n_test."
        )
    rows = np.stack(parts)
    x = images.data[rows]
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    y = np.where(images.target[rows] % 2 == 1, 1.0, -1.0)
    return _dataset(x, y, n, f"scikit-learn digits, {partition}, odd against even")


def read(
    path: str | Path, *, n: int | None = None, n_test: int | None = None, clients: int | None = None
) -> xr.Dataset:
    """Read a zarr store with x (client, sample, feature), y (client, sample) and, optionally, split (sample).

    Labels 0 and 1 become −1 and 1, because network (4) has mean 0 at initialization and is trained by squared loss.

    Parameters
    ----------
    path : path of a zarr store
    n, n_test, clients : int, optional
        Numbers of training samples, test samples and clients to read, from the first on.

    Raises
    ------
    ValueError
        If there is no store at ``path``, x or y is missing or has other dims, the store is damaged or larger than the
        size limit, or it has no training samples.
    """
    if not str(path) or not guard.status(path):
        raise ValueError(f"data must be 'gaussian', 'digits' or an existing zarr store, but got {str(path)!r}")
    data = _open_store(Path(path)).isel(client=slice(clients))
    try:
        data = data.load()
    except guard.LimitError:
        raise
    except Exception as error:  # what damaged chunks make zarr raise is not documented
        raise ValueError(f"{path} is damaged: {guard.reason(error)}. Write it again.") from error
    split = data["split"].values if "split" in data.coords else np.repeat("train", data.sizes["sample"])
    rows = [np.flatnonzero(split == name)[:most] for name, most in (("train", n), ("test", n_test))]
    if not len(rows[0]):
        raise ValueError(f'{path} must hold samples of split "train", but got {np.unique(split)[:8].tolist()}')
    y = data["y"].isel(sample=np.concatenate(rows)).transpose("client", "sample").values.astype(float)
    x = data["x"].isel(sample=np.concatenate(rows)).transpose("client", "sample", "feature").values.astype(float)
    return _dataset(x, 2 * y - 1 if set(np.unique(y)) <= {0.0, 1.0} else y, len(rows[0]), str(Path(path).name))


def _open_store(path: Path) -> xr.Dataset:
    """Open a store without loading it; check dtypes and dims of x and y, and all sizes against the limit."""
    from fedstat.store.files import open_root_group

    try:
        data = open_root_group(path)
    except guard.LimitError:
        raise
    except Exception as error:  # zarr and xarray raise many kinds of error if a path is no store
        raise ValueError(f"{path} could not be read as a zarr store (format 3): {guard.reason(error)}") from error
    for name, dims in (("x", ("client", "sample", "feature")), ("y", ("client", "sample"))):
        variable = data.data_vars.get(name)
        if variable is None or set(variable.dims) != set(dims):
            actual = "none" if variable is None else variable.dims
            raise ValueError(f"{path} must hold {name} of dims {dims}, but got {actual}")
        if variable.dtype.kind not in "biuf":
            raise ValueError(f"{path} must hold numbers in {name}, but got {variable.dtype}")
    if "split" in data.coords and data["split"].dims != ("sample",):
        raise ValueError(f"{path} must hold split of dims ('sample',), but got {data['split'].dims}")
    data = data[["x", "y"]]
    for key, values in data.variables.items():
        for shape in (values.shape, values.encoding.get("chunks") or ()):
            guard.size(path, math.prod(shape) * values.dtype.itemsize, f"{key} of shape or chunks {shape}")
    return data


def _dataset(x: np.ndarray, y: np.ndarray, n: int, title: str) -> xr.Dataset:
    split = np.asarray(["train"] * n + ["test"] * (x.shape[1] - n), dtype=object)
    return xr.Dataset(
        {"x": (("client", "sample", "feature"), x), "y": (("client", "sample"), y)},
        coords={"split": ("sample", split)},
        attrs={"title": title},
    )


Array = Any
Method = Literal["fedsplit", "fedavg", "fedavg-matched", "dynamic"]
METHODS: tuple[Method, ...] = ("fedsplit", "fedavg", "fedavg-matched", "dynamic")
DIVERGED = 1e4
"""Ratio of the loss to the loss before training above which a run has diverged."""

# From weights (client, unit, feature) after local training to the shared mask (unit,).
Rule = Callable[[Array], Array]


class Network(NamedTuple):
    """Network (4) of all clients: h_c(x) = Σ_r output_r · relu(w_{c,r}ᵀx).

    Attributes
    ----------
    weights : array (client, unit, feature)
        Personal units stand first. Weights of shared units are equal for all clients.
    output : array (unit,)
        a_r/√m1 for personal and a_r/√m2 for shared units; a_r = ±1 is equal for all clients.
    shared : bool array (unit,)
        True where a unit is averaged over clients.
    """

    weights: Array
    output: Array
    shared: Array


class Round(NamedTuple):
    """State of the descent in one communication round.

    Attributes
    ----------
    residual : array (client, sample)
        y − h(t).
    active : bool array (client, sample, unit)
        Activation patterns at t.
    start, local : array (client, unit, feature)
        Weights at t, and before its last local update. They define H(t, G−1).
    shared : bool array (unit,)
    """

    residual: Array
    active: Array
    start: Array
    local: Array
    shared: Array


def network(
    method: Method, *, clients: int, features: int, width: int, seed: int, replicate: int = 0, scale: float = 1.0
) -> Network:
    """Draw network (4) with m1 = m2 = ``width`` as in Theorem 1: w ~ N(0, scale²I), signs ±1 with probability 1/2.

    Parameters
    ----------
    method : {"fedsplit", "fedavg", "fedavg-matched", "dynamic"}
        - ``"fedsplit"``: personal units are drawn for each client, shared units once.
        - ``"fedavg"``: 2·width shared units scaled by 1/√(2·width), the paper's comparison. Its kernel is H^s.
        - ``"fedavg-matched"``: all units of network (4) are shared, at unchanged scales. Its kernel 2H^s has the trace
          of H^s + H^p, so that comparing it with FedSplit isolates the effect of the split.
        - ``"dynamic"``: initialized as fedavg-matched.
    clients, features, width, seed, replicate : int
    scale : float
        Standard deviation of the weights (α of Theorem 2).

    Returns
    -------
    Network
        NumPy arrays. All methods use the same draws: FedAvg gets the units of the first client.
    """
    rng = generator(seed, "ntk", replicate, width, features)
    signs = rng.choice([-1.0, 1.0], size=2 * width)
    common = scale * rng.normal(size=(2 * width, features))
    weights = np.repeat(common[None], clients, axis=0)
    shared = np.ones(2 * width, dtype=bool)
    if method == "fedsplit":
        shared[:width] = False
        for c in range(1, clients):
            stream = generator(seed, "ntk", replicate, width, features, "client", c)
            weights[c, :width] = scale * stream.normal(size=(width, features))
    return Network(weights, signs / math.sqrt(2 * width if method == "fedavg" else width), shared)


def diverged(loss: float, first: float) -> bool:
    """Return True if the loss ‖y − h‖² is NaN, or above ``DIVERGED`` times the ``first`` loss."""
    return not loss <= DIVERGED * first


def predict(x: Array, weights: Array, output: Array) -> Array:
    """Evaluate network (4): x (client, sample, feature) to (client, sample)."""
    return _forward(array_namespace(x), x, weights, output)[0]


def descent(
    x: Array, y: Array, net: Network, steps: Steps, *, rounds: int, rule: Rule | None = None, divisors: Array = None
) -> Iterator[Round]:
    """Run parallel gradient descent and yield every round.

    Local: W_{c,g+1} = W_{c,g} − η_l ∂l_c. Global: W^s(t+1) = W^s(t) + η_g · mean over clients of ΔW_c^s;
    W_c^p(t+1) = W_c^p(t) + ΔW_c^p.

    Parameters
    ----------
    x, y : array (client, sample, feature), (client, sample)
    net : Network
    steps : Steps
    rounds : int
        T. Rounds 0 … T are yielded; round T has no local steps.
    rule : callable, optional
        Returns the shared mask after the local steps of each round (dynamic FedFac). A unit that becomes shared takes
        the mean over clients. A unit that becomes personal keeps the weights of each client.
    divisors : array (client,), optional
        Divisor of each client, if they differ.

    Yields
    ------
    Round
    """
    xp = array_namespace(x, y, net.weights)
    weights, output, shared = net
    rate = steps.lr / (steps.divisor if divisors is None else divisors[:, None, None])
    for t in range(rounds + 1):
        start = local = before = weights
        for g in range(steps.local_steps if t < rounds else 1):
            value, slope = _forward(xp, x, local, output)
            if g == 0:
                residual, active = y - value, slope != 0
            if t == rounds:
                break
            before = local
            local = local + rate * (xp.matrix_transpose(slope) @ ((y - value)[..., None] * x))
        yield Round(residual, active, start, before, shared)
        if t < rounds:
            new_shared = shared if rule is None else rule(local)
            weights = _aggregate(xp, start, local, shared, new_shared, steps.server_lr)
            shared = new_shared


def _forward(xp: Any, x: Array, weights: Array, output: Array) -> tuple[Array, Array]:
    """Compute network outputs (client, sample) and slopes in the input of each unit (client, sample, unit)."""
    z = x @ xp.matrix_transpose(weights)
    slope = xp.where(z >= 0, output, xp.zeros_like(output))
    return xp.vecdot(z, slope), slope


def _aggregate(xp: Any, start: Array, local: Array, shared: Array, new_shared: Array, server_lr: float) -> Array:
    mean = xp.mean(local, axis=0)
    server = xp.where(shared[:, None], start[0, ...] + server_lr * (mean - start[0, ...]), mean)
    return xp.where(new_shared[:, None], server, local)


def factor_rule(*, kappa: float, tau: float, method: factor.Method = "pa") -> Rule:
    """Return the rule of dynamic FedFac (Algorithm 2): factor analysis of the updated weights in every round.

    Parameters
    ----------
    kappa, tau, method
        As in :func:`fedstat.stats.factor.fit` and :func:`fedstat.stats.split.shared`.
    """

    def rule(local: Array) -> Array:
        xp = array_namespace(local)
        z = xp.reshape(xp.permute_dims(local, (0, 2, 1)), (-1, local.shape[1]))
        r = correlation(moments(z))
        return split.shared(factor.fit(r, kappa=kappa, method=method).communality, tau=tau)

    return rule
