"""What a run leaves on disk: its layout, finished rounds, and the state from which it can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from fedstat.fl import engine, masks, nets
from fedstat.fl.algorithm import Split
from fedstat.fl.engine import Job, State
from fedstat.stats.factor import Fit
from fedstat.store import Group, Variable, Writer


class Buffer:
    """Finished rounds that are not on disk yet."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.first = 0
        self.rows: dict[str, list[Any]] = {}

    def add(self, job: Job, state: State, metrics: dict[str, Any]) -> None:
        """Take in the round that has just ended."""
        values = {f"metrics/{name}": value for name, value in metrics.items()}
        for layer in nets.layers(job.net):
            values[f"split/{layer}/shared"] = masks.shared_units(job.net, state.split.shared, layer).cpu().numpy()
            if (fit := state.split.fits.get(layer)) is not None:
                for name in ("communality", "n_factors", "n_iter", "converged"):
                    values[f"split/{layer}/{name}"] = torch.as_tensor(getattr(fit, name)).cpu().numpy()
        if not self.rows:
            self.first = state.round - 1
        for name, value in values.items():
            self.rows.setdefault(name, []).append(value)

    def flush(self) -> None:
        """Write what was taken in."""
        for name, rows in self.rows.items():
            self.writer.write(name, (slice(self.first, self.first + len(rows)),), np.stack(rows))
        self.rows = {}

    def weights(self, job: Job, state: State, checkpoint: int) -> None:
        """Write all clients' weights as checkpoint number ``checkpoint``."""
        for name, p in engine.personal(job, state).items():
            flat = p.flatten(2) if p.ndim > 2 else p
            self.writer.write(f"weights/{nets.layer_of(name)}/{_kind(name)}", (checkpoint,), flat.cpu().numpy())


def layout(job: Job, n_rounds: int, checkpoints_at: list[int]) -> dict[str, Group]:
    """Groups ``metrics``, ``split/<layer>`` and ``weights/<layer>`` of a run."""
    clients = ("client", np.arange(job.clients))
    rounds = ("round", np.arange(1, n_rounds + 1))
    checkpoints = ("checkpoint", np.array(checkpoints_at), {"long_name": "round after which weights were kept"})
    groups = {
        "metrics": Group(
            xr.Dataset(coords={"round": rounds, "client": clients}),
            {
                "accuracy": Variable(("round", "client"), "float32", attrs={"long_name": "test accuracy"}),
                "loss": Variable(("round", "client"), "float32", attrs={"long_name": "mean test loss"}),
                "seconds": Variable(("round",), "float64", attrs={"long_name": "wall time of the round", "units": "s"}),
            },
        )
    }
    for layer, units in nets.layers(job.net).items():
        unit = ("unit", np.arange(units))
        groups[f"split/{layer}"] = Group(
            xr.Dataset(coords={"round": rounds, "unit": unit}),
            {
                "shared": Variable(("round", "unit"), "bool", attrs={"long_name": "unit is shared"}),
                "communality": Variable(("round", "unit"), "float64", attrs={"long_name": "communality ν"}),
                "n_factors": Variable(("round",), "int64", attrs={"long_name": "number of factors, 0: no analysis"}),
                "n_iter": Variable(("round",), "int64", attrs={"long_name": "eigendecompositions"}),
                "converged": Variable(("round",), "bool"),
            },
        )
        groups[f"weights/{layer}"] = _weights(job, layer, {"checkpoint": checkpoints, "client": clients, "unit": unit})
    return groups


def _kind(name: str) -> str:
    """``"fc1.weight"`` to ``"weights"`` (one dimension is called ``weight``), ``"fc1.bias"`` to ``"bias"``."""
    kind = name.rpartition(".")[2]
    return "weights" if kind == "weight" else kind


def _weights(job: Job, layer: str, coords: dict[str, Any]) -> Group:
    shapes = {_kind(n): s for n, s in job.net.shapes.items() if nets.layer_of(n) == layer}
    wide = max(int(np.prod(s[1:])) for s in shapes.values())
    if wide > 1:
        coords = coords | {"weight": ("weight", np.arange(wide))}
    dims = ("checkpoint", "client", "unit", "weight")
    return Group(
        xr.Dataset(coords=coords),
        {
            name: Variable(dims if len(shape) > 1 else dims[:3], "float32", {"checkpoint": 1}, {"shape": list(shape)})
            for name, shape in shapes.items()
        },
    )


def save_state(path: Path, state: State) -> None:
    """Write the state beside the store, whole or not at all."""
    fits = {layer: [torch.as_tensor(part) for part in fit] for layer, fit in state.split.fits.items()}
    parts = [state.round, state.params, state.server, state.split.shared, fits, state.optimizer]
    draft = path.with_name(path.name + ".partial")
    torch.save(parts, draft)
    draft.replace(path)


def load_state(path: Path, job: Job) -> State:
    """Read what :func:`save_state` wrote."""
    number, params, server, shared, fits, optimizer = torch.load(path, map_location=job.device, weights_only=True)
    numpy = job.device.type == "cpu"
    back = {layer: Fit(*(part.numpy() if numpy else part for part in parts)) for layer, parts in fits.items()}
    return State(number, params, server, Split(shared, back), optimizer)
