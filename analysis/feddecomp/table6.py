"""FedDecomp Table 6: how far both parts move when the shared one starts from other clients' training.

The paper starts from ImageNet weights; here FedAvg has trained the start on half of the clients (the study's runs), and
the other half go on from it. The data are read from the folder FEDSTAT_DATA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _tables import Asked

from fedstat import fl
from fedstat.fl import algorithms, nets
from fedstat.results.tables import number, plus_minus
from fedstat.store import open_run
from fedstat.study import experiment, federation, run_table
from fedstat.study.collect import Grid
from fedstat.study.grid import of_study
from fedstat.study.printed_tables import Table
from fedstat.study.run_settings import Settings
from fedstat.study.within_seeds import SE

FILE = Path(__file__).parents[2] / "simulations" / "feddecomp.toml"
SAME = ("rounds", "local_epochs", "optimizer", "lr", "seed", "evaluate_every")
KINDS = {"w": "weight", "b": "bias"}


def build(grid: Grid, asked: Asked) -> Table:
    """Accuracy, ‖σ̄ − start‖ and the clients' mean ‖τ‖ after the last round, by E_lora."""
    grid = of_study(grid, FILE, "table6")
    runs = [row for path in grid.table["path"] for row in moved(path)]
    table = pd.DataFrame(runs)
    rule = run_table.choose(table, asked.rule)
    values = table.groupby(["scenario", "epochs"])[[rule, "sigma", "tau"]].agg(["mean", "sem"])
    values.columns = ["_".join(names) for names in values.columns]
    values = values.reset_index()
    paper = asked.paper.of("table6", "accuracy")
    blocks = {
        str(scenario): pd.DataFrame(
            {
                "E_lora": str(row["epochs"]),
                rule: plus_minus(row[f"{rule}_mean"], row[f"{rule}_sem"]),
                "Δσ": plus_minus(row["sigma_mean"], row["sigma_sem"], 2),
                "Δτ": plus_minus(row["tau_mean"], row["tau_sem"], 2),
                "paper": number(paper.get(str(row["epochs"]), np.nan)),
            }
            for row in part.to_dict("records")
        )
        for scenario, part in values.groupby("scenario")
    }
    said = (
        f"{rule}: {run_table.words(rule, table)}; {SE}",
        "Δσ: Euclidean distance of the shared weights from their start; Δτ: mean over clients of the norm of BA",
        "E_lora = 0 is FedAvg from that start; the rest of the local epochs train the shared part",
    )
    title = __doc__.partition("\n")[0]
    return Table(title, values, blocks, (*said, *asked.paper.notes(grid)))


def moved(path: str) -> list[dict[str, Any]]:
    """One row per E_lora, trained on the clients that the run at ``path`` has not seen."""
    settings = Settings(**experiment.settings_of(path))
    fed, others = experiment.federated(settings)
    if others is None:
        raise ValueError(f"{path} holds no clients out: the study needs unseen_fraction > 0")
    start = weights(open_run(path))
    net = nets.started(federation.network(settings, fed), start)
    rows = []
    for epochs in range(settings.local_epochs):
        method = algorithms.feddecomp(lora_epochs=epochs, global_epochs=settings.local_epochs - epochs)
        same = {name: getattr(settings, name) for name in SAME}
        run = fl.train(others, net, method, batch_size=settings.batch_size or None, probe="parameters", **same)
        own = run_table.row(run) | {"scenario": settings.name, "epochs": epochs}
        rows.append(own | dict(zip(("sigma", "tau"), distances(run, start), strict=True)))
    return rows


def distances(run: xr.DataTree, start: dict[str, np.ndarray]) -> tuple[float, float]:
    """‖σ̄ − start‖ and the mean over clients of ‖W_i − σ̄‖, over all weights."""
    sigma, tau = 0.0, 0.0
    for layer in run["parameters"].children:
        shared = fl.client_weights(run, str(layer), "weight").to_numpy().astype(float)
        whole = fl.client_weights(run, str(layer)).to_numpy().astype(float)
        sigma += np.square(shared[0].ravel() - start[f"{layer}.weight"].ravel()).sum()
        tau = tau + np.square((whole - shared).reshape(len(whole), -1)).sum(1)
    return float(np.sqrt(sigma)), float(np.sqrt(tau).mean())


def weights(run: xr.DataTree) -> dict[str, np.ndarray]:
    """The server's weights after the last round, which every client of FedAvg has."""
    last = {
        str(layer): node.to_dataset().isel(checkpoint=-1, client=0) for layer, node in run["weights"].children.items()
    }
    return {f"{layer}.{KINDS.get(str(n), n)}": x.to_numpy() for layer, own in last.items() for n, x in own.items()}
