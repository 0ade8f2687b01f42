"""What the theorems need to know about the data: kernels, extreme eigenvalues, Assumption 1."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from fedstat._utils.lazy import xr
from fedstat.ntk import gram
from fedstat.ntk.results import ExtremeEigenvalues
from fedstat.ntk.samples import Samples, gather


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
        """True if λ^s and λ^p are known to be above 0, as the theorems ask, and no two samples are parallel."""
        singular = self.violations.parallel or self.violations.zero
        return self.shared.positive and self.personal.positive and not singular


def constants(samples: Samples) -> Constants:
    """Kernels, eigenvalues and Assumption 1 of the samples; warns where the theory does not apply."""
    found = gram.violations(samples.x)
    if found:
        warnings.warn(describe(found), TheoryWarning, stacklevel=3)
    h_shared = gram.kernel(samples.x)
    blocks = [gram.kernel(x) for x in samples.blocks(samples.x)]
    return Constants(h_shared, blocks, extremes([h_shared], "H^s"), extremes(blocks, "H^p"), found)


def describe(found: gram.Violations) -> str:
    """Say which samples break Assumption 1 and what to do."""
    parts = []
    if found.long:
        parts.append(
            f"{len(found.long)} sample(s) are longer than 1, first rows {found.long[:3]} (pass normalize=True)"
        )
    if found.zero:
        parts.append(f"{len(found.zero)} sample(s) are zero, first rows {found.zero[:3]} (drop them)")
    if found.parallel:
        parts.append(
            f"{len(found.parallel)} pair(s) of samples are parallel, first rows {found.parallel[:3]} (drop one of "
            "each; the kernel is singular)"
        )
    return "Assumption 1 does not hold: " + "; ".join(parts)


def extremes(blocks: list[np.ndarray], name: str) -> ExtremeEigenvalues:
    """Smallest and largest eigenvalue over diagonal blocks; blocks of one size are solved in one batch."""
    each = [
        gram.extreme_eigenvalues(np.stack([b for b in blocks if len(b) == size]), certify=True)
        for size in sorted({len(b) for b in blocks})
    ]
    low, high, error_low, error_high, resolution = (np.concatenate(column) for column in zip(*each, strict=True))
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
        warnings.warn(
            f"the smallest eigenvalue of {name} is {result.lambda_min:.3g}, below 0: it is no kernel, counts as 0 and "
            "gives no rate.",
            TheoryWarning,
            stacklevel=3,
        )
    elif not result.resolved:
        warnings.warn(
            f"the smallest eigenvalue of {name} is {result.lambda_min:.3g}, at or below what float64 resolves here "
            f"({result.resolution:.3g}): it counts as 0 and gives no rate. Are samples (nearly) parallel, or more of "
            "them than directions?",
            TheoryWarning,
            stacklevel=3,
        )
    return result


def violations(x: Any, client: Any = None, *, angle: float = 1e-7) -> gram.Violations:
    """Name the samples that break Assumption 1 of FedFac §3.3: ‖x‖ ≤ 1, no two parallel.

    Parameters
    ----------
    x : Dataset, DataArray or array (client, sample, feature) or (sample, feature)
        Rows are counted client by client.
    client : array (sample,), optional
    angle : float
        Radians up to which two directions count as one.

    Returns
    -------
    fedstat.ntk.gram.Violations
        False if there is none.

    Examples
    --------
    >>> import numpy as np
    >>> violations(np.array([[0.5, 0.0], [0.7, 0.0], [0.0, 1.0]])).parallel
    ((0, 1),)
    """
    return gram.violations(gather(x, client=client).x, angle=angle)


def kernel(x: Any, client: Any = None, *, normalize: bool = False) -> xr.DataArray:
    """Neural tangent kernels of infinite width (FedFac Definition 1).

    Parameters
    ----------
    x : Dataset, DataArray or array (client, sample, feature) or (sample, feature)
    client : array (sample,) or "client", optional
        None: H^s∞ of all samples. Labels, or ``"client"`` where ``x`` has that dim or coordinate: H^p∞.
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


def extreme_eigenvalues(h: Any) -> ExtremeEigenvalues:
    """λ_min and λ_max of a kernel, with bounds on their errors.

    The λ^s and λ^p of FedFac §3.3, Theorem 1.

    Parameters
    ----------
    h : DataArray or array (sample, sample), or (client, sample, sample) for the blocks of H^p
        As :func:`kernel` returns it. Rows and columns of NaN are absent samples.

    Returns
    -------
    ExtremeEigenvalues
        Unpacks to (λ_min, λ_max).

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
    values = np.asarray(h, dtype=np.float64)
    if values.ndim not in (2, 3) or values.shape[-1] != values.shape[-2] or values.size == 0:
        raise ValueError(
            f"h must be (sample, sample) or (client, sample, sample) and not empty, but got {values.shape}"
        )
    blocks = []
    for block in values if values.ndim == 3 else values[None]:
        present = ~np.isnan(np.diagonal(block))
        blocks.append(block[np.ix_(present, present)])
    return extremes(blocks, getattr(h, "attrs", {}).get("kernel", "h"))
