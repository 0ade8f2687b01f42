"""Data of model (8), in which the networks of clients have shared and personal hidden units (FedFac §4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check, streams
from fedstat._utils.lazy import xr
from fedstat.store import to_json

Means = Literal["independent", "shared"]
Floats = NDArray[np.float64]

SOURCE = "FedFac, §4.3.1, model (8): simulated federated data with shared and personal hidden neurons"

# Σ_ij = 0.5^|i−j| (FedFac §4.3.1). A client is one-class if the proportion of its rarer label is below _RARE.
_DECAY = 0.5
_RARE = 0.05


class OneClassWarning(UserWarning):
    """Warning that most clients of a generated data set have almost only one of the two labels."""


def replicate_seed(seed: int, replicate: int) -> int:
    """Return the seed of a replicate of a study.

    The first replicate has the seed of the study. The others have seeds derived from it, so that studies with different
    seeds have no replicate in common.

    Examples
    --------
    >>> replicate_seed(7, 0), replicate_seed(0, 1)
    (7, 3016279794025721)
    """
    return streams.seed_of(seed, "replicate", replicate) if replicate else seed


@dataclass(frozen=True)
class Model8:
    """Validated sizes and parameters of model (8).

    Parameters
    ----------
    clients, d, m : int
        Numbers of clients C, covariates d and hidden units m.
    p, alpha : float in [0, 1]
        Proportions of shared units, m2/m, and of shared covariates, d2/d. Counts are rounded to the nearest integer,
        halves to the nearest even integer.
    means : {"independent", "shared"}
        See :func:`generate`.
    seed : int

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    clients: int = 100
    d: int = 100
    m: int = 200
    p: float = 0.5
    alpha: float = 0.4
    means: Means = "independent"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "d", "m"):
            check.integer(name, getattr(self, name))
        for name in ("p", "alpha"):
            check.real(name, getattr(self, name), low=0, high=1)
        check.choice("means", self.means, get_args(Means))
        check.integer("seed", self.seed, low=0)

    @property
    def unit_shared(self) -> NDArray[np.bool_]:
        """True for shared units, bool array (unit,); personal units stand first, as in the paper."""
        return np.arange(self.m) >= self.m - round(self.p * self.m)

    @property
    def feature_shared(self) -> NDArray[np.bool_]:
        """True for shared covariates, bool array (feature,); personal covariates stand first, as in the paper."""
        return np.arange(self.d) >= self.d - round(self.alpha * self.d)


class Client(NamedTuple):
    """True parameters of a client: incoming weights (unit, feature), means (feature,) of covariates and of weights."""

    w: Floats
    x_mean: Floats
    w_mean: Floats


def truth(model: Model8) -> Iterator[Client]:
    """Yield the true incoming weights of each client, without data.

    Parameters
    ----------
    model : Model8

    Yields
    ------
    Client
        Rows of ``w`` where ``model.unit_shared`` are equal for all clients. The weights of client c do not depend on
        the number of clients, and equal those of :func:`generate` with equal settings.
    """
    shared = model.feature_shared
    n_shared = int(model.unit_shared.sum())
    d1, m1 = int((~shared).sum()), model.m - n_shared
    w_s = streams.generator(model.seed, "shared weights").uniform(-1, 1, (n_shared, model.d))
    w_s[:, ~shared] *= 0.1
    for c in range(model.clients):
        x_mean = np.zeros(model.d)
        x_mean[~shared] = streams.generator(model.seed, "covariate mean", c).standard_normal(d1)
        w_mean = x_mean
        if model.means == "independent":
            w_mean = np.zeros(model.d)
            w_mean[~shared] = streams.generator(model.seed, "weight mean", c).standard_normal(d1)
        stream = streams.generator(model.seed, "personal weights", c)
        w_p = np.empty((m1, model.d))
        w_p[:, ~shared] = w_mean[~shared] + stream.standard_normal((m1, d1))
        w_p[:, shared] = stream.uniform(-0.1, 0.1, (m1, model.d - d1))
        yield Client(np.concatenate([w_p, w_s]), x_mean, w_mean)


@check.named_options()
def generate(
    *,
    clients: int = 100,
    d: int = 100,
    m: int = 200,
    p: float = 0.5,
    alpha: float = 0.4,
    n_train: int = 100,
    n_test: int = 100,
    sigma: float = 1.0,
    means: Means = "independent",
    seed: int = 0,
) -> xr.Dataset:
    r"""Draw a data set of model (8) with its true parameters.

    .. math:: h^*_c(x) = \sum_q a_q \, \max(w_{cq}^\top x, 0), \qquad y = 1\{h^*_c(x) + \varepsilon > 0\},
              \qquad \varepsilon \sim N(0, \sigma^2)

    Personal covariates are N(μ_c, Σ) with Σ_ij = 0.5^|i−j|, shared covariates N(0, I). A personal unit has weights
    N(μ_c, I) on personal and U(−0.1, 0.1) on shared covariates. A shared unit has weights U(−0.1, 0.1) on personal and
    U(−1, 1) on shared covariates, equal for all clients, as is a ~ N(0, I).

    Parameters
    ----------
    clients, d, m : int
        Numbers of clients, covariates and hidden units. The paper has 100, 100 and 200.
    p : float in [0, 1]
        Proportion of shared units; there are round(p·m), halves to the nearest even number. 0 and 1 are allowed.
    alpha : float in [0, 1]
        Proportion of shared covariates; there are round(alpha·d). 0 and 1 are allowed.
    n_train, n_test : int
        Samples per client, ``n_test >= 0``. The paper gives no numbers. 100 training samples are far fewer than the d·m
        weights of a client, so that a client alone learns poorly and benefits from sharing.
    sigma : float
        Standard deviation of ε, >= 0. The paper gives no value. At its size, 1 changes about 0.5% of the labels.
    means : {"independent", "shared"}
        Means of covariates and weights. The paper writes one μ_c; with ``"shared"``, which follows this, wᵀx of every
        personal unit has mean ‖μ_c‖² ≈ d1, and most clients have labels of one class.
    seed : int
        Data of client c do not depend on ``clients``, its training data not on ``n_test``, x and h not on ``sigma``.

    Returns
    -------
    xarray.Dataset
        x (client, sample, feature); y (client, sample) in {0, 1}; h (client, sample), the noise-free h*_c(x);
        the true w (client, unit, feature), a (unit), x_mean and w_mean (client, feature). Coordinates ``split``
        (sample) "train" or "test", ``unit_shared`` (unit), ``feature_shared`` (feature). Attributes: ``config``
        (JSON), ``seed``, ``version``, ``title``, ``source``, ``majority_share`` (mean proportion of a client's more
        frequent label), ``one_class_share`` (proportion of clients whose rarer label is below 0.05).

    Raises
    ------
    ValueError
        If an argument is out of range.

    Warns
    -----
    OneClassWarning
        If more than half of the clients are one-class.

    References
    ----------
    FedFac, §4.3.1, equation (8).

    Examples
    --------
    >>> data = generate(clients=3, d=10, m=20, n_train=5, n_test=4, seed=1)
    >>> dict(data.sizes)
    {'client': 3, 'sample': 9, 'feature': 10, 'unit': 20}
    >>> data.x.sel(client=0, sample=data.split == "train").shape
    (5, 10)
    >>> int(data.unit_shared.sum()), int(data.feature_shared.sum())
    (10, 4)
    """
    model = Model8(clients=clients, d=d, m=m, p=p, alpha=alpha, means=means, seed=seed)
    n_train, n_test = check.integer("n_train", n_train), check.integer("n_test", n_test, low=0)
    sigma = check.real("sigma", sigma, low=0)
    config = {**asdict(model), "n_train": n_train, "n_test": n_test, "sigma": sigma}

    a = streams.generator(seed, "output weights").standard_normal(m)
    x = np.empty((clients, n_train + n_test, d))
    h, noise = np.empty(x.shape[:2]), np.empty(x.shape[:2])
    w, x_mean, w_mean = np.empty((clients, m, d)), np.empty((clients, d)), np.empty((clients, d))
    for c, client in enumerate(truth(model)):
        w[c], x_mean[c], w_mean[c] = client
        for part, rows in (("train", slice(n_train)), ("test", slice(n_train, None))):
            stream = streams.generator(seed, "samples", c, part)
            x[c, rows], noise[c, rows] = _draw(stream, len(h[c, rows]), client.x_mean, model.feature_shared)
        h[c] = np.maximum(x[c] @ client.w.T, 0) @ a
    y = (h + sigma * noise > 0).astype(np.int64)

    return xr.Dataset(
        {
            "x": (("client", "sample", "feature"), x),
            "y": (("client", "sample"), y),
            "h": (("client", "sample"), h),
            "w": (("client", "unit", "feature"), w),
            "a": ("unit", a),
            "x_mean": (("client", "feature"), x_mean),
            "w_mean": (("client", "feature"), w_mean),
        },
        coords={
            "client": np.arange(clients),
            "unit": np.arange(m),
            "feature": np.arange(d),
            # zarr stores strings of dtype object without a warning
            "split": ("sample", np.array(["train"] * n_train + ["test"] * n_test, dtype=object)),
            "unit_shared": ("unit", model.unit_shared),
            "feature_shared": ("feature", model.feature_shared),
        },
        attrs={
            "title": f"Model (8), p = {p:g}, alpha = {alpha:g}",
            "source": SOURCE,
            "config": to_json(config),
            "seed": seed,
            "version": package_version(),
            **_measure_majority(y, means),
        },
    )


def package_version() -> str:
    """Return the version of fedstat, or "unknown" if it is not installed."""
    try:
        return version("fedstat")
    except PackageNotFoundError:
        return "unknown"


def _draw(stream: np.random.Generator, n: int, mean: Floats, shared: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Draw covariates (sample, feature) and standard normal noise (sample,); the first rows do not depend on n."""
    z = stream.standard_normal((n, len(shared) + 1))
    x, noise = z[:, :-1], z[:, -1]
    if not shared.all():
        # Σ_ij = ρ^|i−j| is the covariance of a stationary AR(1) series along the personal covariates.
        step = x[:, ~shared]
        step[:, 1:] *= np.sqrt(1 - _DECAY**2)
        x[:, ~shared] = scipy.signal.lfilter([1.0], [1.0, -_DECAY], step, axis=-1)
    return x + mean, noise


def _measure_majority(y: NDArray[np.int64], means: str) -> dict[str, Any]:
    ones = y.mean(axis=1)
    majority = np.maximum(ones, 1 - ones)
    one_class = float(np.mean(majority > 1 - _RARE))
    if one_class > 0.5:
        hint = ' Use means="independent".' if means == "shared" else " Try another seed, p or alpha."
        check.warn(
            f"in {one_class:.0%} of the clients the rarer label has a proportion below {_RARE:.0%} (mean proportion of "
            f"the more frequent label {majority.mean():.3f}): accuracies will hardly differ between methods.{hint}",
            OneClassWarning,
        )
    return {"majority_share": float(majority.mean()), "one_class_share": one_class}
