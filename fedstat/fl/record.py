"""What a run leaves on disk: its layout, finished rounds, and the state from which it can be resumed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
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
    """Finished rounds of one run that are not on disk yet.

    Parameters
    ----------
    writer : Writer
    layers : sequence of str
        Layers whose split is recorded.
    where : tuple of int
        Position of the run in a store of many runs, () in a store of its own.
    """

    def __init__(self, writer: Writer, layers: Sequence[str], where: tuple[int, ...] = ()) -> None:
        self._writer, self._layers, self._where = writer, layers, where
        self._first = 0
        self._rows: dict[str, list[Any]] = {}

    def add(self, job: Job, state: State, metrics: dict[str, Any]) -> None:
        """Take in the round that has just ended."""
        values = {f"metrics/{name}": value for name, value in metrics.items()}
        for layer in self._layers:
            values[f"split/{layer}/shared"] = masks.shared_units(job.net, state.split.shared, layer).cpu().numpy()
            if (fit := state.split.fits.get(layer)) is not None:
                for name in ("communality", "n_factors", "n_iter", "converged"):
                    values[f"split/{layer}/{name}"] = torch.as_tensor(getattr(fit, name)).cpu().numpy()
        if not self._rows:
            self._first = state.round - 1
        for name, value in values.items():
            self._rows.setdefault(name, []).append(value)

    def flush(self) -> None:
        """Write what was taken in."""
        for name, rows in self._rows.items():
            self._writer.write(name, (*self._where, slice(self._first, self._first + len(rows))), np.stack(rows))
        self._rows = {}


def layout(lead: Mapping[str, Any], n_rounds: int, n_clients: int, units: Mapping[str, int]) -> dict[str, Group]:
    """Groups ``metrics`` and ``split/<layer>`` of a run, or of many.

    Parameters
    ----------
    lead : mapping from dim to coordinate
        Dims that tell runs apart, {} for one run.
    n_rounds, n_clients : int
    units : mapping from layer to int
        Layers whose split is recorded, with their numbers of units.
    """
    coords = {**lead, "round": ("round", np.arange(1, n_rounds + 1))}
    clients, chunk = ("client", np.arange(n_clients)), dict.fromkeys(lead, 1)

    def variable(dims: tuple[str, ...], dtype: str, name: str, **attrs: str) -> Variable:
        return Variable((*lead, "round", *dims), dtype, chunk, {"long_name": name, **attrs})

    groups = {
        "metrics": Group(
            xr.Dataset(coords=coords | {"client": clients}),
            {
                "accuracy": variable(("client",), "float32", "test accuracy"),
                "loss": variable(("client",), "float32", "mean test loss"),
                "seconds": variable((), "float64", "wall time of the round", units="s"),
            },
        )
    }
    for layer, n in units.items():
        groups[f"split/{layer}"] = Group(
            xr.Dataset(coords=coords | {"unit": ("unit", np.arange(n))}),
            {
                "shared": variable(("unit",), "bool", "unit is shared"),
                "communality": variable(("unit",), "float64", "communality ν, NaN without factor analysis"),
                "n_factors": variable((), "int64", "number of factors, 0 without factor analysis"),
                "n_iter": variable((), "int64", "eigendecompositions"),
                "converged": variable((), "bool", "communalities stood still"),
            },
        )
    return groups


def write_weights(writer: Writer, job: Job, state: State, checkpoint: int) -> None:
    """Write all clients' weights as checkpoint number ``checkpoint``."""
    for name, p in engine.personal(job, state).items():
        flat = p.flatten(2) if p.ndim > 2 else p
        writer.write(f"weights/{nets.layer_of(name)}/{_variable(name)}", (checkpoint,), flat.cpu().numpy())


def weights_layout(job: Job, checkpoints: Sequence[int]) -> dict[str, Group]:
    """Groups ``weights/<layer>`` of a run."""
    groups = {}
    for layer, units in nets.layers(job.net).items():
        shapes = {_variable(n): s for n, s in job.net.shapes.items() if nets.layer_of(n) == layer}
        wide = max(int(np.prod(s[1:])) for s in shapes.values())
        coords = {
            "checkpoint": ("checkpoint", np.array(checkpoints), {"long_name": "round after which weights were kept"}),
            "client": ("client", np.arange(job.clients)),
            "unit": ("unit", np.arange(units)),
            "weight": ("weight", np.arange(wide)),
        }
        groups[f"weights/{layer}"] = Group(
            xr.Dataset(coords=coords),
            {
                name: Variable(
                    tuple(coords)[: len(shape[:2]) + 2], "float32", {"checkpoint": 1}, {"shape": list(shape)}
                )
                for name, shape in shapes.items()
            },
        )
    return groups


def _variable(name: str) -> str:
    """``"fc1.weight"`` to ``"w"`` and ``"fc1.bias"`` to ``"b"``: ``weight`` is a dim, ``weights`` a group."""
    kind = name.rpartition(".")[2]
    return {"weight": "w", "bias": "b"}.get(kind, kind)


def save_state(path: Path, state: State, run: str) -> None:
    """Write the state beside the store of ``run``, whole or not at all."""
    fits = {layer: [_tensor(part) for part in fit] for layer, fit in state.split.fits.items()}
    parts = [run, state.round, state.params, state.server, state.split.shared, fits, state.optimizer]
    draft = path.with_name(path.name + ".partial")
    torch.save(parts, draft)
    draft.replace(path)


def _tensor(part: Any) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else torch.from_numpy(np.array(part, order="C"))


def load_state(path: Path, job: Job, run: str) -> State | None:
    """Read what :func:`save_state` wrote; None if it is not there, not whole, or of another run."""
    try:
        parts = torch.load(path, map_location=job.device, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        return None
    if parts[0] != run:
        return None
    _, number, params, server, shared, fits, optimizer = parts
    numpy = job.device.type == "cpu"
    back = {layer: Fit(*(part.numpy() if numpy else part for part in parts)) for layer, parts in fits.items()}
    return State(number, params, server, Split(shared, back), optimizer)
