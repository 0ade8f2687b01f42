"""Server and parties of a run of ``fedstat.fl``'s settings; a party deals itself the samples of its client.

Real parties hold data of their own: they replace ``own_data``, and share the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from flwr.app import Context

from fedstat.flower import Plan, client_app, server_app
from fedstat.flower.apps import partition_id
from fedstat.study.experiment import federated, network
from fedstat.study.run_settings import Settings

_NOT_SETTINGS = ("out", "secure", "headroom", "data_dir")
_SEVERAL = ("options", "net_options")
_UNMEASURED = ("metrics", "store_predictions", "probe", "prediction_rules", "ablation", "unseen_fraction")
"""Settings of measurements that parties do not send."""


def settings(context: Context) -> Settings:
    """The run's settings."""
    given: dict[str, Any] = {k: v for k, v in context.run_config.items() if k not in _NOT_SETTINGS}
    return Settings.of(**given | {name: tuple(str(given[name]).split()) for name in _SEVERAL})


def dealt(context: Context) -> xr.Dataset:
    """Samples of all clients, as every party of the simulation deals them."""
    return federated(settings(context), str(context.run_config["data_dir"]) or None)[0]


def plan(context: Context) -> Plan:
    """What all parties agree on."""
    run, config = settings(context), context.run_config
    for name in _UNMEASURED:
        if (value := getattr(run, name)) != getattr(Settings, name):
            raise ValueError(
                f"{name}={value!r} is not supported on separate clients, which send accuracy and loss alone. Remove "
                "it, or use fedstat.fl.train."
            )
    return Plan(
        net=network(run, dealt(context)),
        algorithm=run.make_algorithm(),
        training=run.training(),
        clients=run.clients,
        secure=bool(config["secure"]),
        headroom=float(config["headroom"]),
    )


def own_data(context: Context) -> xr.Dataset:
    """Samples of this party alone."""
    every = dealt(context)
    client = every["client"].to_numpy()
    return every.isel(sample=np.flatnonzero(client == np.unique(client)[partition_id(context)]))


client = client_app(plan, own_data)
server = server_app(plan, lambda c: settings(c).rounds, lambda c: str(c.run_config["out"]))
