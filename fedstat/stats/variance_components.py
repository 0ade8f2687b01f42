"""Variance components: between-client variance and training noise of weights, from replicates of clients.

Every client is trained R >= 2 times from one download on disjoint parts of its data (replicates). For client c,
replicate r and weight i of a unit

    w_cri = m_i + x_c' γ_i + b_ci + e_cri,    Var b_ci = σ_b² (between clients),    Var e_cri = σ_cr² (noise),

with an optional covariate x_c of clients. Weights are NumPy arrays or torch tensors; sums are computed in float64, a
block of weights at a time. The results of :func:`components`, one number per unit, are NumPy arrays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_torch_array, to_device
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat import stats
from fedstat._utils import check
from fedstat.stats import moments, resampling
from fedstat.stats.icc import at_once, slices
from fedstat.stats.icc import fdr as adjusted

Array = Any
Floats = NDArray[np.float64]

# Sums of squares of a unit between this number and its reciprocal are far from the limits of float64.
_ORDINARY = 1e200
# Largest numbers of clients and of units of a block from which the variation of noise is estimated.
_SAMPLED = 32
# Distance from leverage 1 at which the fit passes through a client; relative variation of a constant covariate.
_FULL_LEVERAGE, _CONSTANT = 1e-9, 1e-10


class SumsOfSquares(NamedTuple):
    """Sums of squares of clients x replicates; ``+`` joins weights of units, :meth:`pooled` joins units.

    Attributes
    ----------
    between : array (client, unit)
        Σ_i (client's mean over replicates − its fit on (1, covariate))².
    within : array (client, unit)
        Σ_i Σ_r (w_cri − client's mean)² / (R − 1).
    design : array (client, p), NumPy
        Orthonormal basis of (1, covariate): p is 1, or 2 with a covariate.
    n_weights : int
        Number of weights per unit.
    n_replicates : int
        Number of replicates R.
    """

    between: Array
    within: Array
    design: Floats
    n_weights: int
    n_replicates: int

    @property
    def leverage(self) -> Floats:
        """Leverage of each client in the fit, array (client,)."""
        return np.asarray((self.design**2).sum(axis=1))

    @property
    def squares(self) -> Floats:
        """Sum of all squares of each unit, array (unit,)."""
        return np.asarray(on_host(self.between + self.within).sum(axis=0))

    def rescaled(self, exponent: Floats) -> SumsOfSquares:
        """Return the sums of weights whose units are multiplied by 2 to the power of ``exponent`` (unit,)."""
        xp = array_namespace(self.between)
        scale = xp.asarray(4.0**exponent, device=device_of(self.between))
        return self._replace(between=self.between * scale, within=self.within * scale)

    def __add__(self, other: SumsOfSquares) -> SumsOfSquares:  # type: ignore[override]
        a, b = (tuple(p.between.shape) for p in (self, other))
        if a != b or self.n_replicates != other.n_replicates or not np.array_equal(self.design, other.design):
            raise ValueError(
                "sums to be added must have equal clients, units, replicates and covariate, but got (client, unit) "
                f"{a} with {self.n_replicates} replicates, and {b} with {other.n_replicates}. "
                "For parameters with other units, use a.pooled() + b.pooled()."
            )
        between, within = self.between + other.between, self.within + other.within
        return SumsOfSquares(between, within, self.design, self.n_weights + other.n_weights, self.n_replicates)

    def pooled(self) -> SumsOfSquares:
        """Pool all units: sums of squares of a layer, with arrays (client, 1)."""
        xp = array_namespace(self.between)
        # Units that are equal in all clients have other noise.
        differs = xp.astype(xp.any(self.between > 0, axis=0), xp.float64)
        between, within = (xp.sum(a, axis=1, keepdims=True) for a in (self.between, self.within * differs))
        return SumsOfSquares(between, within, self.design, self.n_weights * self.between.shape[1], self.n_replicates)


class Components(NamedTuple):
    """Estimates for every unit: arrays (unit,) on the host; NaN for a unit that is identical in all clients.

    Attributes
    ----------
    between : array
        σ_b², variance of a weight between clients beyond noise. It is unbiased, and therefore sometimes negative.
    within : array
        σ_e², noise of a replicate: mean over clients, weighted by 1 − leverage (equal weights without a covariate).
    reliability : array
        Reliability σ_b² / (σ_b² + σ_e²/R) of the differences between clients that are trained on all their data. It is
        below 1, and negative if σ_b² is.
    reliability_replicate : array
        Reliability σ_b² / (σ_b² + σ_e²) of clients trained on the data of one replicate; minus infinity, which has no
        meaning, if ``between`` is −σ_e² or less.
    conf_low, conf_high : array
        Interval of ``reliability``.
    statistic, p_value : array
        One-sided t test of H0: σ_b² = 0 against σ_b² > 0.
    std_error : array
        Standard error of −log(1 − reliability), the numerator of the statistic. It is NaN, with interval and p value,
        for a unit whose replicates differ in fewer than 5 clients; with 3 to 5 clients, unless they differ in all.
    df : int
        Degrees of freedom of the test: number of clients minus number of columns of the fit.
    level : float
        Confidence level of the intervals.
    df_interval : array or None
        Degrees of freedom of intervals and of tests against a margin; None stands for ``df``.
    identical : bool array or None
        True for units whose replicates are equal over clients; None if unknown.
    """

    between: Floats
    within: Floats
    reliability: Floats
    reliability_replicate: Floats
    conf_low: Floats
    conf_high: Floats
    statistic: Floats
    p_value: Floats
    std_error: Floats
    df: int
    level: float
    df_interval: Floats | None = None
    identical: NDArray[np.bool_] | None = None


def parts(w: Array, covariate: Any = None) -> SumsOfSquares:
    """Compute sums of squares between and within clients.

    Parameters
    ----------
    w : array (client, replicate, unit, weight)
        Any real type; at least 2 replicates, and at least 2 clients more than columns of the fit.
    covariate : array (client,), optional
        Covariate for which differences between clients are adjusted, such as the number of training samples: a client
        with more samples takes more steps from the initial parameters, which is not a property of its data.

    Raises
    ------
    ValueError
        If

        - there are too few clients or replicates,
        - weights are NaN or infinite (the message names client and unit), or
        - the covariate is constant, not finite, of the wrong length, or equal for all clients but one.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> clients = rng.normal(size=(20, 1, 3, 50))
    >>> sums = parts(clients + rng.normal(size=(20, 2, 3, 50)))  # σ_b² = σ_e² = 1: 2 / 3
    >>> components(sums.pooled()).reliability.round(2)
    array([0.66])
    """
    w, basis = checked(w, covariate)
    n_clients, n_replicates, n_units, n_weights = w.shape
    xp, device = array_namespace(w), device_of(w)
    q = to_device(xp.asarray(basis), device)
    between, within = (xp.zeros((n_clients, n_units), dtype=xp.float64, device=device) for _ in range(2))
    for units, weights in blocks(w):
        with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are named below
            b, v = _squares(xp.astype(w[:, :, units, weights], xp.float64, copy=True), q)
        between[:, units] += b
        within[:, units] += v
    require_finite(between, within, w)
    return SumsOfSquares(between, within, basis, n_weights, n_replicates)


def noise_ratios(w: Array, sizes: Any = None) -> Floats:
    """Return the mean square of the clients' noise, divided by that of equal noise, of some units.

    With d_c the difference of the first two replicates of client c, the ratio is the mean of ‖d_c‖⁴ over clients,
    divided by the mean of ‖d_c‖² ‖d_c'‖² + 2 ⟨d_c, d_c'⟩² over pairs of clients. Both have the same expectation if
    noise is normal with one covariance matrix in all clients, however dependent weights are. Otherwise the ratio
    estimates 1 + CV², where CV is the coefficient of variation over clients of the variance of noise.

    Parameters
    ----------
    w : array (client, replicate, unit, weight)
    sizes : array (client,) or (client, replicate), optional
        Training samples: noise is multiplied by their root.

    Returns
    -------
    array (sampled unit,)
        Of at most 32 units and 32 clients, evenly spaced. NaN for a unit without noise.
    """
    clients, units = (slice(None, None, math.ceil(n / _SAMPLED)) for n in (w.shape[0], w.shape[2]))
    xp = array_namespace(w)
    a, b = (xp.astype(w[clients, r, units], xp.float64) for r in (0, 1))
    d = on_host(a - b).swapaxes(0, 1)
    if sizes is not None:
        n = np.broadcast_to(np.asarray(sizes, float).reshape(w.shape[0], -1), w.shape[:2])[clients]
        d = d / np.sqrt((1 / n[:, :2]).sum(axis=1))[:, None]
    k = d.shape[1]
    with np.errstate(invalid="ignore"):
        d = d / np.abs(d).max(axis=(1, 2), keepdims=True)
        squares = np.square(d @ d.swapaxes(1, 2))
        fourth_powers = np.trace(squares, axis1=1, axis2=2)
        total = np.square(np.square(d).sum(axis=(1, 2)))
        return np.asarray(fourth_powers * (k - 1) / (total + 2 * squares.sum(axis=(1, 2)) - 3 * fourth_powers))


def noise_cv(ratios: Floats) -> float:
    """Return the coefficient of variation of clients' noise, median over units, from :func:`noise_ratios`."""
    ratios = ratios[np.isfinite(ratios)]
    return math.sqrt(max(0.0, float(np.median(ratios)) - 1)) if len(ratios) else math.nan


def at_any_scale(compute: Callable[[Array], Any], w: Array) -> tuple[Any, Floats]:
    """Compute sums of squares of weights of any size; divide units by powers of 2 if their squares leave float64.

    Parameters
    ----------
    compute : callable (w) -> SumsOfSquares or Gram
        Such as :func:`parts`. The sums depend only on differences between models.
    w : array (client, replicate, unit, weight)

    Returns
    -------
    sums : SumsOfSquares or Gram
    exponent : array (unit,)
        Exponents of the powers of 2; 0 if all sizes are ordinary.
    """
    exponent, unusual = np.zeros(w.shape[2]), np.arange(w.shape[2])
    try:
        sums = compute(w)
    except BadWeightsError as error:
        if error.client is not None:
            raise
    else:
        unusual = unusual[~((sums.squares > 1 / _ORDINARY) & (sums.squares < _ORDINARY))]
        is_double = str(w.dtype).removeprefix("torch.") == "float64"  # squares of other types do not leave float64
        if not is_double or not unusual.size:
            return sums, exponent
    xp = array_namespace(w)
    units = xp.asarray(unusual, device=device_of(w))
    x, e = _scaled(w[:, :, units])
    x, e_centered = _scaled(x - x[:1, :1])  # weights that all models have in common are no part of the sums
    if not bool(xp.any(x != 0)):  # no model differs
        return sums, exponent
    exponent[unusual] = on_host(e + e_centered)
    w = xp.asarray(w, copy=True)
    w[:, :, units] = x
    return compute(w), exponent


def _scaled(x: Array) -> tuple[Array, Array]:
    """Divide units of (client, replicate, unit, weight) by powers of 2; return their exponents, too."""
    e = moments.exponent(moments.largest(x, (0, 1, 3)))
    return x * moments.power(-e)[:, None], e


def checked(w: Array, covariate: Any) -> tuple[Array, Floats]:
    """Return weights (client, replicate, unit, weight) and the basis of the fit, or raise ValueError."""
    w = w.detach() if is_torch_array(w) else np.asarray(w)
    if w.ndim != 4 or 0 in w.shape:
        raise ValueError(f"w must be (client, replicate, unit, weight), but got shape {tuple(w.shape)}")
    if w.shape[1] < 2:
        raise ValueError(
            f"noise shows only between replicates, at least 2 per client, but got {w.shape[1]}. "
            "Train every client on disjoint parts of its data, from one download."
        )
    return w, design(w.shape[0], covariate)


def blocks(w: Array) -> Iterator[tuple[slice, slice]]:
    """Yield slices of units and of weights of which temporaries of all clients fit into a block."""
    c, r, d, n = w.shape
    n_numbers = max(1, at_once(w) // (c * r))
    for units in slices(d, max(1, n_numbers // n)):
        for weights in slices(n, n_numbers):
            yield units, weights


def design(n_clients: int, covariate: Any = None) -> Floats:
    """Return an orthonormal basis (client, p) of (1, covariate)."""
    columns = [np.ones(n_clients)]
    if covariate is not None:
        x = covariate.detach().cpu().numpy() if is_torch_array(covariate) else covariate
        x = np.asarray(check.numbers("covariate", x), dtype=np.float64)
        if x.shape != (n_clients,):
            raise ValueError(f"covariate must hold one number per client, shape ({n_clients},), but got {x.shape}")
        if not np.isfinite(x).all():
            clients = np.flatnonzero(~np.isfinite(x)).tolist()
            raise ValueError(f"covariate must be finite, but got NaN or infinite values for client(s) {clients}")
        if np.ptp(x) <= _CONSTANT * np.abs(x).max():
            raise ValueError(f"covariate must differ between clients, but all have {x[0]:g}. Leave it out.")
        x = x / np.abs(x).max()
        columns.append(x - x.mean())
    if n_clients < (minimum := len(columns) + 2):
        raise ValueError(
            f"variance between clients{' with a covariate' if covariate is not None else ''} needs at least {minimum} "
            f"clients, but got {n_clients}"
        )
    q = np.stack([c / np.linalg.norm(c) for c in columns], axis=1)
    if (apart := (q**2).sum(axis=1) > 1 - _FULL_LEVERAGE).any():
        raise ValueError(
            f"covariate sets client {int(np.flatnonzero(apart)[0])} apart from all others, which share one value: "
            "the fit passes through this client and leaves no residual. Leave out the client or the covariate."
        )
    return q


def components(p: SumsOfSquares, *, level: float = 0.95, cluster: Any = None) -> Components:
    """Estimate variance components by the method of moments, with intervals and tests over clients.

    Parameters
    ----------
    p : SumsOfSquares
        Sums of units, or of a layer (:meth:`SumsOfSquares.pooled`).
    level : float in (0, 1)
        Confidence level of the two-sided intervals of ``reliability``.
    cluster : int array (client,), optional
        Client number of each row of ``p``, if clients have rows for several rounds. The jackknife leaves out all rows
        of a client.

    Returns
    -------
    Components

    Raises
    ------
    ValueError
        If replicates are identical bit for bit in all clients while clients differ, so that noise is 0.

    Notes
    -----
    With clients' leverages h_c, n weights and R replicates,

        σ_b² = [Σ_c between_c − Σ_c (1 − h_c) within_c / R] / (n Σ_c (1 − h_c)),

    which is unbiased for any unequal noise of clients and replicates [1]_. F is the ratio of the two sums, and
    reliability = 1 − 1/F. If noise is proportional to 1 / samples, as it is for halves of the data, then reliability =
    R r / (1 + (R − 1) r). This is the reliability r of a replicate, stepped up by the Spearman-Brown formula [2]_.

    Weights of a unit are dependent, so that their number gives no degrees of freedom. Intervals and test come from the
    jackknife over clients [3]_ on the scale of log F. The test has C − p degrees of freedom: if clients do not differ,
    log F is nearly normal. If they differ, few clients can contribute most of the variance, and intervals have the
    degrees of freedom of :func:`fedstat.stats.resampling.jackknife`. Intervals of units refer to these clients, with
    fixed differences and new noise. Intervals of a layer hold for new clients, too
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
    # Contributions of each client to the sums.
    b_c, v_c = between / (1 - h), _squared_residual_maker(p.design) @ noise / (1 - h)
    if cluster is not None:
        rows = np.unique(cluster, return_inverse=True)[1]
        b_c, v_c = (np.stack([x[rows == c].sum(axis=0) for c in range(rows.max() + 1)]) for x in (b_c, v_c))
    n, df_test = len(b_c), len(b_c) - math.ceil(k * len(b_c) / n_clients)
    b, v = between.sum(axis=0), ((1 - h) * noise).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_f_without = np.log(np.maximum(b - b_c, 0)) - np.log(np.maximum(v - v_c, 0))
        std_error, df_interval = resampling.jackknife(log_f_without, df_test)
        identical = b == 0
        log_f = np.where(identical, np.nan, np.log(b / v))
        if cluster is None:
            std_error[(within > 0).sum(axis=0) < min(n, stats.LEAST_VARYING)] = np.nan
        statistic = log_f / std_error
        half = scipy.special.stdtrit(df_interval, 0.5 + level / 2) * std_error
        reliability, low, high = (-np.expm1(-x) for x in (log_f, log_f - half, log_f + half))
        sigma_b, sigma_e = (b - v) / (p.n_weights * df), r * v / (p.n_weights * df)
        replicate = np.where(sigma_b + sigma_e > 0, sigma_b / (sigma_b + sigma_e), -np.inf)
        replicate = np.where(np.isnan(reliability), np.nan, replicate)
    p_value = scipy.special.stdtr(df_test, -statistic)
    return Components(
        sigma_b, sigma_e, reliability, replicate, low, high, statistic, p_value, std_error, df_test, level, df_interval,
        identical,
    )  # fmt: skip


def classify_units(c: Components, *, margin: float = 0.5, fdr: float = 0.05) -> NDArray[np.str_]:
    """Classify units by a test of their reliability against a margin.

    Parameters
    ----------
    c : Components
        Estimates of units.
    margin : float in (0, 1)
        Smallest reliability of a personal unit.
    fdr : float in (0, 1)
        Expected proportion of wrong groups among units classified as shared or personal.

    Returns
    -------
    str array (unit,)
        "shared", "personal", "inconclusive", or "constant" for a unit that is identical in all models. A unit
        that is identical in all clients, but not in their replicates, is shared.

    Notes
    -----
    Two-sided t tests of H0: reliability = ``margin``, on the scale of the intervals and with their degrees of freedom.
    The p values are adjusted by Benjamini and Hochberg. The sign of t determines the group; the false discovery rate of
    such directions is controlled, too (Benjamini and Yekutieli 2005, JASA 100, 71-81).
    """
    for name, value in (("margin", margin), ("fdr", fdr)):
        check.real(name, value, low=0, high=1, open_low=True, open_high=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = c.statistic * c.std_error  # also below 0, where the estimate of the reliability is 0
        estimate = np.where(np.isnan(scaled), -np.log1p(-c.reliability), scaled)
        t = (estimate + math.log1p(-margin)) / c.std_error
    p_value = 2 * scipy.special.stdtr(c.df if c.df_interval is None else c.df_interval, -np.abs(t))
    is_significant = adjusted(p_value[:, None])[:, 0] <= fdr
    outcome = np.where(is_significant, np.where(t > 0, "personal", "shared"), "inconclusive")
    return np.where(np.isnan(c.reliability), np.where(c.within > 0, "shared", "constant"), outcome)


def _squares(x: Array, q: Array) -> tuple[Array, Array]:
    """Sum squares over the weights of a block (client, replicate, unit, weight) to (client, unit); overwrite ``x``."""
    xp = array_namespace(x)
    c, r, d, n = x.shape
    first = xp.asarray(x[:, 0], copy=True)
    x -= first[:, None]  # equal replicates differ by exactly 0
    shift = xp.mean(x, axis=1)
    x -= shift[:, None]
    within = xp.sum(xp.vecdot(x, x), axis=1) / (r - 1)
    first -= xp.asarray(first[:1], copy=True)  # centering on a client avoids cancellation
    first += shift - shift[:1]
    flat = xp.reshape(first, (c, d * n))
    flat -= q @ (xp.matrix_transpose(q) @ flat)
    residual = xp.reshape(flat, (c, d, n))
    return xp.vecdot(residual, residual), within


def _squared_residual_maker(q: Floats) -> Floats:
    """Return the squared residual maker (client, client): the weight of a client's noise in another's residual."""
    return np.asarray((np.eye(len(q)) - q @ q.T) ** 2)


def on_host(a: Array) -> Floats:
    """Return an array in float64 on the host."""
    return np.asarray(a.detach().cpu().numpy() if is_torch_array(a) else a, dtype=np.float64)


def require_finite(between: Array, within: Array, w: Array) -> None:
    """Raise BadWeightsError for the first unit whose sums (client, unit) are not finite."""
    not_finite = ~(np.isfinite(on_host(between)) & np.isfinite(on_host(within))).all(axis=0)
    if not not_finite.any():
        return
    unit = int(np.flatnonzero(not_finite)[0])
    xp = array_namespace(w)
    clients = [c for c in range(w.shape[0]) if not bool(xp.all(xp.isfinite(w[c, :, unit])))]
    raise BadWeightsError(unit, clients[0] if clients else None)


def require_noise(between: Floats, within: Floats) -> None:
    """Raise NoNoiseError for units (client, unit) whose replicates are equal though clients differ."""
    noiseless = (within == 0).all(axis=0) & (between > 0).any(axis=0)
    if noiseless.any():
        raise NoNoiseError(np.flatnonzero(noiseless))


class BadWeightsError(ValueError):
    """Error of weights that are not finite, or whose squares overflow if ``client`` is None."""

    def __init__(self, unit: Any, client: Any) -> None:
        super().__init__(
            f"the weights of unit {unit} are so large that their squares overflow. Divide all weights by a constant."
            if client is None
            else f"the weights of client {client} hold NaN or infinite values, first in unit(s) {unit}. "
            "A diverged client is the usual cause: leave it out or lower its learning rate."
        )
        self.unit, self.client = unit, client


class NoNoiseError(ValueError):
    """Error of units whose replicates are identical bit for bit in all clients."""

    def __init__(self, units: NDArray[Any]) -> None:
        super().__init__(
            f"replicates are identical bit for bit in all clients in {len(units)} unit(s), first in unit {units[0]}: "
            "the noise is exactly 0, so that the reliability is not defined. Train replicates on different data; leave "
            "out units that were not trained."
        )
        self.units = units
