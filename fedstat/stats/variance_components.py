"""How much of the differences between clients is their own, how much sampling noise? Variance components.

Every client is trained R >= 2 times from one download on disjoint parts of its data (replicates). For client c,
replicate r and weight i of a unit

    w_cri = m_i + x_c' γ_i + b_ci + e_cri,    Var b_ci = σ_b² (the client's own),    Var e_cri = σ_cr² (noise),

with an optional covariate x_c of clients. NumPy arrays or torch tensors; sums in float64, a block of weights at a time.
The results of :func:`components`, one number per unit, are NumPy arrays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_torch_array, to_device
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat.stats import resampling
from fedstat.stats.icc import at_once, slices
from fedstat.stats.icc import fdr as adjusted

Array = Any
Floats = NDArray[np.float64]

# A client with leverage this near 1 is fitted by itself; a covariate that varies by less of its size is constant.
_ALONE, _CONSTANT = 1e-9, 1e-10


class Parts(NamedTuple):
    """Sums of squares of clients x replicates; ``+`` joins more weights of the same units, :meth:`pooled` the units.

    Attributes
    ----------
    between : array (client, unit)
        Σ_i (client's mean over replicates − its fit on (1, covariate))².
    within : array (client, unit)
        Σ_i Σ_r (w_cri − client's mean)² / (R − 1).
    design : array (client, p), NumPy
        Orthonormal basis of (1, covariate): p is 1, or 2 with a covariate.
    n_weights : int
        Weights per unit.
    n_replicates : int
        R.
    """

    between: Array
    within: Array
    design: Floats
    n_weights: int
    n_replicates: int

    @property
    def leverage(self) -> Floats:
        """Of each client in the fit, array (client,)."""
        return np.asarray((self.design**2).sum(axis=1))

    def __add__(self, other: Parts) -> Parts:  # type: ignore[override]
        a, b = (tuple(p.between.shape) for p in (self, other))
        if a != b or self.n_replicates != other.n_replicates or not np.array_equal(self.design, other.design):
            raise ValueError(
                "parts add if they have the same clients, units, replicates and covariate, but got (client, unit) "
                f"{a} with {self.n_replicates} replicates, and {b} with {other.n_replicates}. "
                "Parameters with other units add to a layer: a.pooled() + b.pooled()."
            )
        between, within = self.between + other.between, self.within + other.within
        return Parts(between, within, self.design, self.n_weights + other.n_weights, self.n_replicates)

    def pooled(self) -> Parts:
        """All units as one: the parts of a layer, with arrays (client, 1)."""
        xp = array_namespace(self.between)
        differ = xp.astype(xp.any(self.between > 0, axis=0), xp.float64)  # in others noise is not that of clients
        between, within = (xp.sum(a, axis=1, keepdims=True) for a in (self.between, self.within * differ))
        return Parts(between, within, self.design, self.n_weights * self.between.shape[1], self.n_replicates)


class Components(NamedTuple):
    """Estimates for every unit, arrays (unit,) on the host; NaN for a unit that is identical in all clients.

    Attributes
    ----------
    between : array
        σ_b², variance of a weight between clients beyond noise. Unbiased, hence sometimes negative.
    within : array
        σ_e², noise of one replicate: mean over clients, weighted by 1 − leverage (equal without a covariate).
    personal : array
        σ_b² / (σ_b² + σ_e²/R): share of the differences between clients, each trained on all its data, that is the
        client's own. Below 1; negative where σ_b² is.
    personal_replicate : array
        σ_b² / (σ_b² + σ_e²): the same for models trained on one replicate's data; minus infinity, without a meaning,
        where ``between`` is −σ_e² or less.
    conf_low, conf_high : array
        Interval of ``personal``.
    statistic, p_value : array
        One-sided t test of σ_b² = 0 against σ_b² > 0.
    std_error : array
        Of −log(1 − personal), of which the statistic is a multiple; NaN, as intervals and p value are, for a unit whose
        replicates differ in fewer than 5 clients, or not in all of 3 to 5.
    df : int
        Of the test: number of clients minus number of columns of the fit.
    level : float
        Confidence level of the intervals.
    df_interval : array or None
        Of intervals and of tests against a margin; None stands for ``df``.
    identical : bool array or None
        Units that all clients have alike, replicate by replicate; None where it is not known.
    """

    between: Floats
    within: Floats
    personal: Floats
    personal_replicate: Floats
    conf_low: Floats
    conf_high: Floats
    statistic: Floats
    p_value: Floats
    std_error: Floats
    df: int
    level: float
    df_interval: Floats | None = None
    identical: NDArray[np.bool_] | None = None


def parts(w: Array, covariate: Any = None) -> Parts:
    """Sums of squares between clients and within them.

    Parameters
    ----------
    w : array (client, replicate, unit, weight)
        Any real type; at least 2 replicates, and 2 clients more than the fit has columns.
    covariate : array (client,), optional
        What the differences between clients are adjusted for, such as the number of training samples: a client with
        more samples makes more steps from the common start, which is not knowledge of its own.

    Raises
    ------
    ValueError
        If there are too few clients or replicates, weights are NaN or infinite (named by client and unit), or the
        covariate is constant, not finite, of the wrong length, or sets one client apart from all others.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> own = rng.normal(size=(20, 1, 3, 50))
    >>> found = parts(own + rng.normal(size=(20, 2, 3, 50)))  # σ_b² = σ_e² = 1: 2 / 3
    >>> components(found.pooled()).personal.round(2)
    array([0.66])
    """
    w, basis = checked(w, covariate)
    n_clients, n_replicates, n_units, n_weights = w.shape
    xp, device = array_namespace(w), device_of(w)
    q = to_device(xp.asarray(basis), device)
    between, within = (xp.zeros((n_clients, n_units), dtype=xp.float64, device=device) for _ in range(2))
    for units, some in blocks(w):
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is named below
            b, v = _squares(xp.astype(w[:, :, units, some], xp.float64, copy=True), q)
        between[:, units] += b
        within[:, units] += v
    require_finite(between, within, w)
    return Parts(between, within, basis, n_weights, n_replicates)


def checked(w: Array, covariate: Any) -> tuple[Array, Floats]:
    """Weights (client, replicate, unit, weight) and the basis of the fit, or a ValueError."""
    w = w.detach() if is_torch_array(w) else np.asarray(w)
    if w.ndim != 4 or 0 in w.shape:
        raise ValueError(f"w must be (client, replicate, unit, weight), but got shape {tuple(w.shape)}")
    if w.shape[1] < 2:
        raise ValueError(
            f"noise shows only between replicates, at least 2 per client, but got {w.shape[1]}. "
            "Train every client on disjoint parts of its data, from the same download."
        )
    return w, design(w.shape[0], covariate)


def blocks(w: Array) -> Iterator[tuple[slice, slice]]:
    """Slices of units and of weights that temporaries of all clients fit."""
    c, r, d, n = w.shape
    fit = max(1, at_once(w) // (c * r))
    for units in slices(d, max(1, fit // n)):
        for some in slices(n, fit):
            yield units, some


def design(n_clients: int, covariate: Any = None) -> Floats:
    """Orthonormal basis (client, p) of (1, covariate)."""
    columns = [np.ones(n_clients)]
    if covariate is not None:
        x = covariate.detach().cpu().numpy() if is_torch_array(covariate) else covariate
        x = np.asarray(check.numbers("covariate", x), dtype=np.float64)
        if x.shape != (n_clients,):
            raise ValueError(f"covariate must hold one number per client, shape ({n_clients},), but got {x.shape}")
        if not np.isfinite(x).all():
            bad = np.flatnonzero(~np.isfinite(x)).tolist()
            raise ValueError(f"covariate must be finite, but got NaN or infinite values for client(s) {bad}")
        if np.ptp(x) <= _CONSTANT * np.abs(x).max():
            raise ValueError(f"covariate must differ between clients, but all have {x[0]:g}. Leave it out.")
        x = x / np.abs(x).max()
        columns.append(x - x.mean())
    if n_clients < (least := len(columns) + 2):
        raise ValueError(
            f"variance between clients{' with a covariate' if covariate is not None else ''} needs at least {least} "
            f"clients, but got {n_clients}"
        )
    q = np.stack([c / np.linalg.norm(c) for c in columns], axis=1)
    if (alone := (q**2).sum(axis=1) > 1 - _ALONE).any():
        raise ValueError(
            f"covariate sets client {int(np.flatnonzero(alone)[0])} apart from all others, which share one value: "
            "the fit passes through that client and leaves no residual. Leave out the client or the covariate."
        )
    return q


def components(p: Parts, *, level: float = 0.95, cluster: Any = None) -> Components:
    """Variance components by the method of moments, with intervals and tests in which clients are the sample.

    Parameters
    ----------
    p : Parts
        Of units, or of a layer (:meth:`Parts.pooled`).
    level : float in (0, 1)
        Confidence level of the two-sided intervals of ``personal``.
    cluster : int array (client,), optional
        Client number of each row of ``p``, where a client has rows for several rounds: these are left out together.

    Returns
    -------
    Components

    Raises
    ------
    ValueError
        If replicates are identical bit for bit in all clients while clients differ: there is no noise to compare with.

    Notes
    -----
    With clients' leverages h_c, n weights and R replicates,

        σ_b² = [Σ_c between_c − Σ_c (1 − h_c) within_c / R] / (n Σ_c (1 − h_c)),

    which is unbiased however unequal the noise of clients and replicates is [1]_. F is the ratio of the two sums,
    personal = 1 − 1/F. If noise falls as 1 / samples, as it does for half the data, personal is the reliability of a
    half, r, stepped up by Spearman and Brown [2]_, R r / (1 + (R − 1) r).

    Weights of a unit are not independent, so that their number gives no degrees of freedom. Intervals and test come
    from leaving out one client at a time (jackknife [3]_) on the scale of log F. The test has t of C − p degrees of
    freedom: where clients do not differ, log F is nearly normal. Where they do, few clients can carry the variance, and
    intervals have those of :func:`fedstat.stats.resampling.jackknife`. They are about *these* clients: their
    differences as they are, with new noise; those of a layer hold for new clients also
    (``simulations/inference/shares.py``).

    References
    ----------
    .. [1] Searle, Casella, McCulloch (1992). Variance Components. Wiley.
    .. [2] Spearman (1910), Brown (1910). British Journal of Psychology 3, 271-295 and 296-322.
    .. [3] Miller (1974). The jackknife: a review. Biometrika 61, 1-15.
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    between, within = (on_host(a) for a in (p.between, p.within))
    noise, h, r = within / p.n_replicates, p.leverage[:, None], p.n_replicates
    n_clients, k = p.design.shape
    df = n_clients - k
    require_noise(between, noise)
    ours, theirs = between / (1 - h), _spread(p.design) @ noise / (1 - h)  # what sums lose without the client
    if cluster is not None:
        rows = np.unique(cluster, return_inverse=True)[1]
        ours, theirs = (np.stack([x[rows == c].sum(axis=0) for c in range(rows.max() + 1)]) for x in (ours, theirs))
    n, free = len(ours), len(ours) - math.ceil(k * len(ours) / n_clients)
    b, v = between.sum(axis=0), ((1 - h) * noise).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.log(np.maximum(b - ours, 0)) - np.log(np.maximum(v - theirs, 0))
        std_error, df_interval = resampling.jackknife(left, free)
        identical = b == 0
        log_f = np.where(identical, np.nan, np.log(b / v))
        if cluster is None:
            std_error[(within > 0).sum(axis=0) < min(n, resampling.LEAST_CLIENTS)] = np.nan
        statistic = log_f / std_error
        half = scipy.special.stdtrit(df_interval, 0.5 + level / 2) * std_error
        personal, low, high = (-np.expm1(-x) for x in (log_f, log_f - half, log_f + half))
        sigma_b, sigma_e = (b - v) / (p.n_weights * df), r * v / (p.n_weights * df)
        replicate = np.where(sigma_b + sigma_e > 0, sigma_b / (sigma_b + sigma_e), -np.inf)
        replicate = np.where(np.isnan(personal), np.nan, replicate)
    p_value = scipy.special.stdtr(free, -statistic)
    return Components(
        sigma_b, sigma_e, personal, replicate, low, high, statistic, p_value, std_error, free, level, df_interval,
        identical,
    )  # fmt: skip


def outcomes(c: Components, *, margin: float = 0.5, fdr: float = 0.05) -> NDArray[np.str_]:
    """Test on which side of a margin the share of each unit is.

    Parameters
    ----------
    c : Components
        Of units.
    margin : float in (0, 1)
        Personal share from which on a unit is personal.
    fdr : float in (0, 1)
        Expected share, among the units that are called shared or personal, of those that are the other.

    Returns
    -------
    str array (unit,)
        "shared", "personal", "undecided", or "dead" for a unit that is the same in all models. A unit that is identical
        in all clients, but not in their replicates, is shared.

    Notes
    -----
    Two-sided t tests of personal = ``margin``, on the scale of the intervals and with their degrees of freedom; p
    values are adjusted by Benjamini and Hochberg, and the sign of t says which (Benjamini and Yekutieli 2005, JASA 100,
    71-81: the false discovery rate of such directions is controlled, too).
    """
    for name, value in (("margin", margin), ("fdr", fdr)):
        check.real(name, value, low=0, high=1, open_low=True, open_high=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = c.statistic * c.std_error  # below 0 too, where an estimate of the share is cut there
        at = np.where(np.isnan(scaled), -np.log1p(-c.personal), scaled)
        t = (at + math.log1p(-margin)) / c.std_error
    p_value = 2 * scipy.special.stdtr(c.df if c.df_interval is None else c.df_interval, -np.abs(t))
    decided = adjusted(p_value[:, None])[:, 0] <= fdr
    found = np.where(decided, np.where(t > 0, "personal", "shared"), "undecided")
    return np.where(np.isnan(c.personal), np.where(c.within > 0, "shared", "dead"), found)


def _squares(x: Array, q: Array) -> tuple[Array, Array]:
    """Sums over weights (client, unit) of a block (client, replicate, unit, weight), which is used up."""
    xp = array_namespace(x)
    c, r, d, n = x.shape
    first = xp.asarray(x[:, 0], copy=True)
    x -= first[:, None]  # equal replicates differ by exactly 0
    shift = xp.mean(x, axis=1)
    x -= shift[:, None]
    within = xp.sum(xp.vecdot(x, x), axis=1) / (r - 1)
    first -= xp.asarray(first[:1], copy=True)  # nor does what clients have in common cost digits
    first += shift - shift[:1]
    flat = xp.reshape(first, (c, d * n))
    flat -= q @ (xp.matrix_transpose(q) @ flat)
    rest = xp.reshape(flat, (c, d, n))
    return xp.vecdot(rest, rest), within


def _spread(q: Floats) -> Floats:
    """Squares (client, client) of what is left of one client's noise at another after the fit."""
    return np.asarray((np.eye(len(q)) - q @ q.T) ** 2)


def on_host(a: Array) -> Floats:
    """Array in float64 on the host."""
    return np.asarray(a.detach().cpu().numpy() if is_torch_array(a) else a, dtype=np.float64)


def require_finite(between: Array, within: Array, w: Array) -> None:
    """Raise BadWeightsError for the first unit whose sums (client, unit) are not finite."""
    bad = ~(np.isfinite(on_host(between)) & np.isfinite(on_host(within))).all(axis=0)
    if not bad.any():
        return
    unit = int(np.flatnonzero(bad)[0])
    xp = array_namespace(w)
    clients = [c for c in range(w.shape[0]) if not bool(xp.all(xp.isfinite(w[c, :, unit])))]
    raise BadWeightsError(unit, clients[0] if clients else None)


def require_noise(between: Floats, within: Floats) -> None:
    """Raise NoNoiseError for units (client, unit) whose replicates are equal though clients differ."""
    silent = (within == 0).all(axis=0) & (between > 0).any(axis=0)
    if silent.any():
        raise NoNoiseError(np.flatnonzero(silent))


class BadWeightsError(ValueError):
    """Weights of a unit and client that are not finite; no client: squares of finite weights overflow."""

    def __init__(self, unit: Any, client: Any) -> None:
        super().__init__(
            f"the weights of unit {unit} are so large that their squares overflow. Divide all weights by a constant."
            if client is None
            else f"the weights of client {client} hold NaN or infinite values, first in unit(s) {unit}. "
            "A diverged client is the usual cause: leave it out or lower its learning rate."
        )
        self.unit, self.client = unit, client


class NoNoiseError(ValueError):
    """Units whose replicates are identical bit for bit in all clients."""

    def __init__(self, units: NDArray[Any]) -> None:
        super().__init__(
            f"replicates are identical bit for bit in all clients in {len(units)} unit(s), first in unit {units[0]}: "
            "the noise is exactly 0, so that there is nothing to compare clients with. Replicates must be trained on "
            "different data; leave out units that were not trained."
        )
        self.units = units
