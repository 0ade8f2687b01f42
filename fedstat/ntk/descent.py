"""Data and gradient descent of the checks of both theorems, all clients at once.

NumPy or torch (CPU or CUDA), float64. Static FedSplit, FedAvg and dynamic FedFac differ in the mask of shared units
and in nothing else.
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
    """Samples uniform on the unit sphere, labelled by the sign of a network of form (4) of width 50.

    As in model (8) of FedFac §4.3, half of the labelling network's units are common and half are each client's own;
    unlike there, all covariates have one distribution, so that Assumption 1 holds as it stands.

    Parameters
    ----------
    clients, n, d, n_test : int
        Clients, training samples of each, features, test samples of each.
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
    """Return scikit-learn's handwritten digits, scaled to unit length; the label is 1 for odd digits, −1 for even ones.

    Parameters
    ----------
    clients, n, n_test : int
        Clients, training and test samples of each.
    partition : {"one-class", "iid"}
        ``"one-class"``: client c holds digits c mod 10 only, hence one label. ``"iid"``: at random.
    seed : int

    Returns
    -------
    Dataset
        As :func:`gaussian`, with 64 features.

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
            f"{clients} clients x {need} images ({partition}) are more than there are among 1797 digits "
            f"(about 178 of each class), but got a client with {min(map(len, parts))}. Ask for fewer."
        )
    rows = np.stack(parts)
    x = images.data[rows]
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    y = np.where(images.target[rows] % 2 == 1, 1.0, -1.0)
    return _dataset(x, y, n, f"scikit-learn digits, {partition}, odd against even")


def read(
    path: str | Path, *, n: int | None = None, n_test: int | None = None, clients: int | None = None
) -> xr.Dataset:
    """Read a zarr store with x (client, sample, feature), y (client, sample) and, if there is one, split (sample).

    Labels 0 and 1 become −1 and 1, as squared loss against network (4), whose mean at the start is 0, asks for.

    Parameters
    ----------
    path : path of a zarr store
    n, n_test, clients : int, optional
        Number of training samples, test samples and clients to keep, the first ones.

    Raises
    ------
    ValueError
        If there is no such store, x or y is missing or has other dims, it is damaged or larger than the limit of what
        is read, or it holds no training samples.
    """
    if not str(path) or not guard.status(path):
        raise ValueError(f"data must be 'gaussian', 'digits' or an existing zarr store, but got {str(path)!r}")
    data = _opened(Path(path)).isel(client=slice(clients))
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


def _opened(path: Path) -> xr.Dataset:
    """Store whose x and y are numbers of the expected dims, and with all coordinates within the limit; not yet read."""
    from fedstat.store.files import open_root_group

    try:
        data = open_root_group(path)
    except guard.LimitError:
        raise
    except Exception as error:  # zarr and xarray raise many kinds on what is no store
        raise ValueError(f"{path} could not be read as a zarr store: {guard.reason(error)}") from error
    for name, dims in (("x", ("client", "sample", "feature")), ("y", ("client", "sample"))):
        found = data.data_vars.get(name)
        if found is None or set(found.dims) != set(dims):
            seen = "none" if found is None else found.dims
            raise ValueError(f"{path} must hold {name} of dims {dims}, but got {seen}")
        if found.dtype.kind not in "biuf":
            raise ValueError(f"{path} must hold numbers in {name}, but got {found.dtype}")
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
"""A run has diverged once its loss is this many times what it was before training."""

# Given the clients' weights (client, unit, feature) after local steps, which units are shared (unit,).
Rule = Callable[[Array], Array]


class Network(NamedTuple):
    """Network (4) of all clients: h_c(x) = Σ_r output_r · relu(w_{c,r}ᵀx).

    Attributes
    ----------
    weights : array (client, unit, feature)
        Personal units first. Shared ones are equal for all clients.
    output : array (unit,)
        a_r/√m1 for personal and a_r/√m2 for shared units, a_r = ±1 common to the clients.
    shared : bool array (unit,)
        Units that are averaged.
    """

    weights: Array
    output: Array
    shared: Array


class Round(NamedTuple):
    """What one communication round does.

    Attributes
    ----------
    residual : array (client, sample)
        y − h(t).
    active : bool array (client, sample, unit)
        Activation patterns at t.
    start, local : array (client, unit, feature)
        Weights at t, and at its last local step but one update: those of H(t, G−1).
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
    """Draw network (4) with m1 = m2 = ``width`` as Theorem 1 has it: w ~ N(0, scale²I), signs ±1 with equal chance.

    Parameters
    ----------
    method : {"fedsplit", "fedavg", "fedavg-matched", "dynamic"}
        ``"fedsplit"``: personal units drawn for each client, shared units once. ``"fedavg"``: 2·width shared units
        scaled by 1/√(2·width), the network of the paper's comparison, kernel H^s. ``"fedavg-matched"``: all units of
        network (4) shared with their scales kept, kernel 2H^s, whose trace equals that of H^s + H^p: what the split
        alone changes. ``"dynamic"``: as fedavg-matched at the start.
    clients, features, width, seed, replicate : int
    scale : float
        Standard deviation of the weights (α of Theorem 2).

    Returns
    -------
    Network
        NumPy arrays. The methods share draws: FedAvg's units are the first client's.
    """
    rng = generator(seed, "ntk", replicate, width, features)
    signs = rng.choice([-1.0, 1.0], size=2 * width)
    common = scale * rng.normal(size=(2 * width, features))
    weights = np.repeat(common[None], clients, axis=0)
    shared = np.ones(2 * width, dtype=bool)
    if method == "fedsplit":
        shared[:width] = False
        for c in range(1, clients):
            own = generator(seed, "ntk", replicate, width, features, "client", c)
            weights[c, :width] = scale * own.normal(size=(width, features))
    return Network(weights, signs / math.sqrt(2 * width if method == "fedavg" else width), shared)


def diverged(loss: float, first: float) -> bool:
    """Whether descent has diverged by the time its loss, ‖y − h‖², went from ``first`` to ``loss``; NaN has."""
    return not loss <= DIVERGED * first


def predict(x: Array, weights: Array, output: Array) -> Array:
    """Evaluate network (4): x (client, sample, feature) to (client, sample)."""
    return _forward(array_namespace(x), x, weights, output)[0]


def descent(
    x: Array, y: Array, net: Network, steps: Steps, *, rounds: int, rule: Rule | None = None, divisors: Array = None
) -> Iterator[Round]:
    """Run the parallel gradient descent, round by round.

    Local: W_{c,g+1} = W_{c,g} − η_l ∂l_c. Global: W^s(t+1) = W^s(t) + η_g · mean over clients of ΔW_c^s;
    W_c^p(t+1) = W_c^p(t) + ΔW_c^p.

    Parameters
    ----------
    x, y : array (client, sample, feature), (client, sample)
    net : Network
    steps : Steps
    rounds : int
        T: rounds 0 … T are yielded, the last without its local steps.
    rule : callable, optional
        Decides after the local steps of every round which units are shared (dynamic FedFac). A unit that turns
        shared adopts the clients' mean; one that turns personal keeps each client's value.
    divisors : array (client,), optional
        Each client's own divisor, if they differ.

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
            now = shared if rule is None else rule(local)
            weights = _aggregate(xp, start, local, shared, now, steps.server_lr)
            shared = now


def _forward(xp: Any, x: Array, weights: Array, output: Array) -> tuple[Array, Array]:
    """Value (client, sample) of the network and its slope in every unit's input (client, sample, unit)."""
    z = x @ xp.matrix_transpose(weights)
    slope = xp.where(z >= 0, output, xp.zeros_like(output))
    return xp.vecdot(z, slope), slope


def _aggregate(xp: Any, start: Array, local: Array, was: Array, now: Array, server_lr: float) -> Array:
    mean = xp.mean(local, axis=0)
    server = xp.where(was[:, None], start[0, ...] + server_lr * (mean - start[0, ...]), mean)
    return xp.where(now[:, None], server, local)


def factor_rule(*, kappa: float, tau: float, method: factor.Method = "pa") -> Rule:
    """Dynamic FedFac (Algorithm 2): factor analysis of the clients' updated weights in every round.

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
