"""Samples of clients as the theorems take them, and the constants of both theorems."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.lazy import xr
from fedstat.ntk import gram
from fedstat.ntk.results import ExtremeEigenvalues
from fedstat.results.origin import recorded


class Samples(NamedTuple):
    """Samples of all clients, ordered by client.

    Attributes
    ----------
    x : array (sample, feature)
    y : array (sample,)
    client : int array (sample,)
        Ascending, from 0.
    names : tuple
        Name of every client.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray
    names: tuple[Any, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of samples of every client."""
        return np.bincount(self.client, minlength=len(self.names)).tolist()

    def blocks(self, a: np.ndarray) -> list[np.ndarray]:
        """Split an array over samples into one array per client."""
        return np.split(a, np.cumsum(self.sizes)[:-1])

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Return x (client, sample, feature) and y (client, sample).

        Clients with fewer samples are padded with x = 0 and y = 0. Network (4) is 0 for x = 0, so the padding adds
        neither loss nor gradient.
        """
        shape = (len(self.names), max(self.sizes))
        x, y = np.zeros((*shape, self.x.shape[1])), np.zeros(shape)
        position = np.arange(len(self.y)) - np.repeat(np.cumsum([0, *self.sizes[:-1]]), self.sizes)
        x[self.client, position], y[self.client, position] = self.x, self.y
        return x, y

    def take(self, keep: np.ndarray) -> Samples:
        """Return the samples where ``keep`` is True; drop clients without any."""
        return gather(self.x[keep], self.y[keep], np.asarray(self.names)[self.client[keep]])

    def recut(self, clients: int) -> Samples:
        """Divide the samples among another number of clients: merge neighboring clients, or split them."""
        return self._replace(
            client=np.arange(len(self.y)) * clients // len(self.y), names=tuple(range(clients))
        )  # fmt: skip


def gather(x: Any, y: Any = None, client: Any = None, *, normalize: bool = False) -> Samples:
    """Read samples from arrays, DataArrays or a Dataset.

    Parameters
    ----------
    x : Dataset, DataArray, DataFrame or array
        A Dataset holds ``x`` and ``y``. Dims are (client, sample, feature) or (sample, feature). The second form takes
        the clients from the argument ``client``, or from a coordinate ``client`` along sample.
    y : array, Series, DataFrame or DataArray (client, sample) or (sample,), optional
        Targets, matched by label if they have labels. Default: ``y`` of the Dataset, else zeros.
    client : array, Series, DataArray (sample,) or mapping from sample, optional
        Client of every sample; None puts all samples into one client. If ``x`` has a client dim: names (client,).
    normalize : bool
        Scale every sample to unit length.

    Raises
    ------
    ValueError
        If shapes or labels do not match, there is no sample, a value is not a finite real number, a client is
        missing, or a sample is zero and ``normalize`` is True.
    """
    x = _labels.labelled(x, ("sample", "feature"))
    if isinstance(x, xr.Dataset):
        if "x" not in x:
            raise ValueError(f"a Dataset of samples must hold x, but got {list(map(str, x.variables))}")
        y = x["y"] if y is None and "y" in x else y
        x = x["x"]
    y, client = by_sample("y", y, x), by_sample("client", client, x, *("client",) if np.ndim(x) == 3 else ("sample",))
    names = None
    if isinstance(x, xr.DataArray):
        if client is None and "client" in x.coords:
            names = x["client"].values
            client = names if x["client"].dims == ("sample",) else None
        dims = ["client", "sample", "feature"] if x.ndim == 3 else ["sample", "feature"]
        if set(x.dims) != set(dims):
            raise ValueError(f"x must have dims {tuple(dims)}, but got {x.dims}. Rename or stack its dims.")
        x = x.transpose(*dims).values
    x = _read_real("x", x)
    if x.ndim not in (2, 3) or x.size == 0:
        raise ValueError(
            f"x must be (client, sample, feature) or (sample, feature) and not empty, but got shape {x.shape}"
        )
    y = np.zeros(x.shape[:-1]) if y is None else _read_real("y", y)
    if y.shape != x.shape[:-1]:
        raise ValueError(f"y must have one value per sample, shape {x.shape[:-1]}, but got {y.shape}")
    if x.ndim == 3:
        names = (
            np.arange(len(x))
            if client is None and names is None
            else _labels.complete("client", names if client is None else client, "client")
        )
        if names.shape != (len(x),):
            raise ValueError(f"client must have one label per client, shape ({len(x)},), but got {names.shape}")
        client = np.repeat(names, x.shape[1])
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1)
    client = np.zeros(len(x), dtype=int) if client is None else _labels.complete("client", client, "sample")
    if client.shape != (len(x),):
        raise ValueError(f"client must have one label per sample, shape ({len(x)},), but got {client.shape}")
    _require_finite("x", x)
    _require_finite("y", y)
    labels, code = np.unique(client, return_inverse=True)
    order = np.argsort(code, kind="stable")
    x = _scale_to_unit(x) if normalize else x
    return Samples(x[order], y[order], code[order], tuple(labels.tolist()))


def by_sample(name: str, values: Any, x: Any, *dims: str) -> Any:
    """Reorder labelled values to match the samples of ``x``, or other dims of ``x``; return unlabelled values as is."""
    if not _labels.has_labels(values):
        return values
    x = x["x"] if isinstance(x, xr.Dataset) else x
    axes = {"client": -3, "sample": -2}
    labels = {
        d: x[d].to_numpy() if isinstance(x, xr.DataArray) and d in x.dims else np.arange(np.shape(x)[axes[d]])
        for d in dims or (("client", "sample") if np.ndim(x) == 3 else ("sample",))
    }
    return _labels.matched(name, values, labels, gaps=True)


def _read_real(name: str, values: Any) -> np.ndarray:
    check.unmasked(name, values)
    a = np.asarray(values)
    if a.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, but got {a.dtype}. Convert it first.")
    return a.astype(np.float64, copy=False)


def _require_finite(name: str, a: np.ndarray) -> None:
    rows = np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(axis=1))
    if rows.size:
        raise ValueError(
            f"{name} must be finite, but got NaN or infinity in {rows.size} sample(s), first {rows[:3].tolist()}. "
            "Drop or impute them."
        )


def _scale_to_unit(x: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(x, axis=1)
    if (norm == 0).any():
        raise ValueError(
            f"a zero sample has no direction, but got x = 0 in row(s) {np.flatnonzero(norm == 0)[:3].tolist()}. "
            "Drop them, or pass normalize=False."
        )
    return x / norm[:, None]


class TheoryWarning(UserWarning):
    """A condition of the theory does not hold, or float64 cannot tell whether it does."""


class Constants(NamedTuple):
    """Kernels of a data set and their spectra.

    Attributes
    ----------
    h_shared : array (sample, sample)
        H^s∞, client-major.
    h_personal : list of C arrays (sample_c, sample_c)
        Diagonal blocks of H^p∞.
    shared, personal : ExtremeEigenvalues
        Extreme eigenvalues of H^s∞ and H^p∞.
    violations : fedstat.ntk.gram.Violations
    """

    h_shared: np.ndarray
    h_personal: list[np.ndarray]
    shared: ExtremeEigenvalues
    personal: ExtremeEigenvalues
    violations: gram.Violations

    @property
    def positive(self) -> bool:
        """True if λ^s and λ^p are positive beyond rounding, and no sample is zero or parallel to another."""
        singular = self.violations.parallel or self.violations.zero
        return self.shared.positive and self.personal.positive and not singular


def constants(samples: Samples) -> Constants:
    """Compute kernels and eigenvalues and check Assumption 1; warn if the theory does not apply."""
    broken = gram.violations(samples.x)
    if broken:
        check.warn(describe(broken), TheoryWarning)
    h_shared = gram.kernel(samples.x)
    blocks = [gram.kernel(x) for x in samples.blocks(samples.x)]
    return Constants(h_shared, blocks, extremes([h_shared], "H^s"), extremes(blocks, "H^p"), broken)


def describe(broken: gram.Violations) -> str:
    """Describe which samples break Assumption 1 and what to do."""
    parts = []
    if broken.long:
        parts.append(
            f"{len(broken.long)} sample(s) are longer than 1, first rows {broken.long[:3]} (pass normalize=True)"
        )
    if broken.zero:
        parts.append(f"{len(broken.zero)} sample(s) are zero, first rows {broken.zero[:3]} (drop them)")
    if broken.parallel:
        parts.append(
            f"{len(broken.parallel)} pair(s) of samples are parallel, first rows {broken.parallel[:3]} (drop one of "
            "each; the kernel is singular)"
        )
    return "Assumption 1 does not hold: " + "; ".join(parts)


def extremes(blocks: list[np.ndarray], name: str) -> ExtremeEigenvalues:
    """Compute the smallest and largest eigenvalue over diagonal blocks; solve blocks of equal size in one batch."""
    by_size = [
        gram.extreme_eigenvalues(np.stack([b for b in blocks if len(b) == size]), certify=True)
        for size in sorted({len(b) for b in blocks})
    ]
    low, high, error_low, error_high, resolution = (np.concatenate(column) for column in zip(*by_size, strict=True))
    i, j = int(np.argmin(low)), int(np.argmax(high))
    result = ExtremeEigenvalues(
        lambda_min=float(low[i]),
        lambda_max=float(high[j]),
        error_min=float(error_low[i]),
        error_max=float(error_high[j]),
        resolution=float(resolution.max()),
        blocks=len(blocks),
    )
    if result.resolved and not result.positive:
        check.warn(
            f"{name} is not a kernel: its smallest eigenvalue is {result.lambda_min:.3g}, below 0. It counts as 0 and "
            "gives no rate. Pass a positive semidefinite matrix.",
            TheoryWarning,
        )
    elif not result.resolved:
        check.warn(
            f"the smallest eigenvalue of {name} is {result.lambda_min:.3g}, which float64 cannot tell from 0 "
            f"(resolution {result.resolution:.3g}). It counts as 0 and gives no rate. Drop (nearly) parallel samples, "
            "which fedstat.ntk.violations(x) finds, or use fewer samples.",
            TheoryWarning,
        )
    return result


def violations(x: Any, client: Any = None, *, angle: float = 1e-7) -> gram.Violations:
    """Find the samples that break Assumption 1 of FedFac §3.3: ‖x‖ ≤ 1, no two parallel.

    Parameters
    ----------
    x : Dataset, DataArray or array (client, sample, feature) or (sample, feature)
        Rows are counted client by client.
    client : array (sample,), optional
    angle : float
        Angle in radians up to which two directions count as equal.

    Returns
    -------
    fedstat.ntk.gram.Violations
        False if there are none.

    Examples
    --------
    >>> import numpy as np
    >>> violations(np.array([[0.5, 0.0], [0.7, 0.0], [0.0, 1.0]])).parallel
    ((0, 1),)
    """
    return gram.violations(gather(x, client=client).x, angle=angle)


def kernel(x: Any, client: Any = None, *, normalize: bool = False) -> xr.DataArray:
    """Compute neural tangent kernels of infinite width (FedFac Definition 1).

    Parameters
    ----------
    x : Dataset, DataArray or array (client, sample, feature) or (sample, feature)
    client : array (sample,) or "client", optional
        None: H^s∞ of all samples. Clients, or ``"client"`` if ``x`` has a dim or coordinate client: H^p∞.
    normalize : bool
        Scale samples to unit length first.

    Returns
    -------
    DataArray
        H^s∞ with dims ``(sample, sample_)``, client-major, the client as a coordinate; or the blocks of H^p∞ with dims
        ``(client, sample, sample_)``, NaN past the end of a smaller client. Both float64.

    Raises
    ------
    ValueError
        If there is no sample, a value is not finite, or ``client`` does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.eye(4)
    >>> kernel(x).sizes["sample"], dict(kernel(x, [0, 0, 0, 1]).sizes)
    (4, {'client': 2, 'sample': 3, 'sample_': 3})
    """
    by_client = client is not None
    samples = gather(x, client=None if isinstance(client, str) else client, normalize=normalize)
    if not by_client:
        names = np.asarray(samples.names)[samples.client]
        h = gram.kernel(samples.x)
        return xr.DataArray(
            h, dims=("sample", "sample_"), coords={"client": ("sample", names)}, name="h", attrs={"kernel": "H^s"}
        )
    size = max(samples.sizes)
    h = np.full((len(samples.names), size, size), np.nan)
    for c, block in enumerate(samples.blocks(samples.x)):
        h[c, : len(block), : len(block)] = gram.kernel(block)
    return xr.DataArray(
        h,
        dims=("client", "sample", "sample_"),
        coords={"client": list(samples.names)},
        name="h",
        attrs={"kernel": "H^p"},
    )


@recorded
def extreme_eigenvalues(h: Any) -> ExtremeEigenvalues:
    """Compute λ_min and λ_max of a kernel, with bounds on their errors.

    For H^s∞ and H^p∞, λ_min is λ^s and λ^p of FedFac §3.3, Theorem 1.

    Parameters
    ----------
    h : DataArray or array (sample, sample), or (client, sample, sample) for the blocks of H^p
        Symmetric kernel, for example from :func:`kernel`. Rows and columns of NaN stand for missing samples.

    Returns
    -------
    ExtremeEigenvalues
        Unpacks to (λ_min, λ_max).

    Raises
    ------
    ValueError
        If ``h`` is not square, is not symmetric, is empty, or does not hold finite real numbers.

    Warns
    -----
    TheoryWarning
        If λ_min is negative, or float64 cannot tell it from 0.

    Examples
    --------
    >>> import numpy as np
    >>> low, high = extreme_eigenvalues(kernel(np.eye(3)))
    >>> low, high
    (0.5, 0.5)
    """
    values = _read_real("h", h)
    if values.ndim not in (2, 3) or values.shape[-1] != values.shape[-2] or values.size == 0:
        raise ValueError(
            f"h must be (sample, sample) or (client, sample, sample) and not empty, but got {values.shape}"
        )
    blocks = []
    for block in values if values.ndim == 3 else values[None]:
        present = ~np.isnan(np.diagonal(block))
        blocks.append(block[np.ix_(present, present)])
    return extremes(blocks, getattr(h, "attrs", {}).get("kernel", "h"))
