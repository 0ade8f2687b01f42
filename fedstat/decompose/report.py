"""A split as a labelled dataset, to be kept beside the run it belongs to."""

from __future__ import annotations

import json

import xarray as xr

from fedstat.results import BootstrapResult, SplitResult


def to_dataset(split: SplitResult, bootstrap: BootstrapResult | None = None) -> xr.Dataset:
    """Communalities, groups and loadings of a split over the dims unit and factor.

    Parameters
    ----------
    split : SplitResult
    bootstrap : BootstrapResult, optional
        Adds std_error, conf_low, conf_high and p_shared.

    Returns
    -------
    xarray.Dataset
        Attributes hold tau, kappa, method and the row of ``split.glance()`` as JSON.
    """
    data = xr.Dataset(
        {
            "communality": ("unit", split.communality, {"long_name": "communality nu"}),
            "shared": ("unit", split.shared),
            "group": ("unit", split.group.astype(object)),
            "margin": ("unit", split.margin),
            "heywood": ("unit", split.fit.heywood),
            "loadings": (("unit", "factor"), split.fit.loadings),
            "eigenvalues": ("component", split.fit.eigenvalues),
        },
        coords={"unit": split.fit.units},
        attrs={
            "tau": str(split.tau),
            "threshold": split.threshold,
            "method": split.fit.method,
            "glance": json.dumps(split.to_dict()["glance"]),
        },
    )
    if bootstrap is not None:
        table = bootstrap.tidy()
        for name in ("std_error", "conf_low", "conf_high", "p_shared"):
            data[name] = ("unit", table[name].to_numpy())
    return data
