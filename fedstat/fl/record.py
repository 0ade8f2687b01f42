"""What a run leaves on disk: its layout, finished rounds, and the state from which it can be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from fedstat import store
from fedstat.fl import choice, halves, masks, nets
from fedstat.fl.algorithm import Sharing
from fedstat.fl.job import Job, State, personal
from fedstat.fl.masking import PARTS
from fedstat.fl.newcomers import RULES
from fedstat.stats.factor import Fit
from fedstat.store import Group, Variable, Writer

_EVALUATED = {
    f"metrics/{name}" for name in ("accuracy", "loss", "validation_accuracy", "validation_loss", "accuracy_before")
}


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
        self._rows: dict[str, list[tuple[int, Any]]] = {}

    def add(self, job: Job, state: State, metrics: dict[str, Any]) -> None:
        """Take in the round that has just ended."""
        values = {name if "/" in name else f"metrics/{name}": value for name, value in metrics.items()}
        for layer in self._layers:
            values[f"split/{layer}/shared"] = masks.shared_units(job.net, state.sharing.shared, layer).cpu().numpy()
            if (fit := state.sharing.fits.get(layer)) is not None:
                for name in ("communality", "n_factors", "n_iter", "converged"):
                    values[f"split/{layer}/{name}"] = torch.as_tensor(getattr(fit, name)).cpu().numpy()
            if (alike := state.sharing.icc.get(layer)) is not None:
                values[f"split/{layer}/icc"] = alike
        for name, value in values.items():
            self._rows.setdefault(name, []).append((state.round - 1, value))

    def flush(self) -> None:
        """Write what was taken in."""
        for name, rows in self._rows.items():
            for first, values in _stretches(rows):
                self._writer.write(name, (*self._where, slice(first, first + len(values))), np.stack(values))
        self._rows = {}


def _stretches(rows: list[tuple[int, Any]]) -> list[tuple[int, list[Any]]]:
    """Values of rounds that follow one another, with the first of these rounds."""
    found: list[tuple[int, list[Any]]] = []
    for number, value in rows:
        if found and found[-1][0] + len(found[-1][1]) == number:
            found[-1][1].append(value)
        else:
            found.append((number, [value]))
    return found


def layout(
    lead: Mapping[str, Any], n_rounds: int, n_clients: int, units: Mapping[str, int], also: Mapping[str, str] = {}
) -> dict[str, Group]:
    """Groups ``metrics`` and ``split/<layer>`` of a run, or of many.

    Parameters
    ----------
    lead : mapping from dim to coordinate
        Dims that tell runs apart, {} for one run.
    n_rounds, n_clients : int
    units : mapping from layer to int
        Layers whose split is recorded, with their numbers of units.
    also : mapping from name to description
        More metrics (round, client).

    Notes
    -----
    ``split/<layer>/shared`` is True where all incoming weights of a unit are shared by all clients, which says nothing
    of the single entries and clients of a finer mask.
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
            }
            | {name: variable(("client",), "float32", text) for name, text in also.items()},
        )
    }
    for layer, n in units.items():
        groups[f"split/{layer}"] = Group(
            xr.Dataset(coords=coords | {"unit": ("unit", np.arange(n))}),
            {
                "shared": variable(("unit",), "bool", "unit is shared"),
                "communality": variable(("unit",), "float64", "communality ν, NaN without factor analysis"),
                "icc": variable(("unit",), "float64", "agreement of clients ICC2, NaN where it decided nothing"),
                "n_factors": variable((), "int64", "number of factors, 0 without factor analysis"),
                "n_iter": variable((), "int64", "eigendecompositions"),
                "converged": variable((), "bool", "communalities stood still"),
            },
        )
    return groups


def run_layout(job: Job, rounds: int, checkpoints: Sequence[int], layers: Sequence[str]) -> dict[str, Group]:
    """Groups of the store of one run; weights are kept of the given layers."""
    also = {
        "accuracy_before": "test accuracy of an active client's model as it leaves local training",
        "train_loss": "mean training loss of an active client's batches",
    }
    if job.validation is not None:
        also |= {"validation_accuracy": "validation accuracy", "validation_loss": "mean validation loss"}
    groups = layout({}, rounds, job.clients, nets.layers(job.net), also)
    metrics = groups["metrics"]
    ways = {"up": "sent to the server, by all clients", "down": "sent to clients, to all of them"}
    sent = {
        f"bytes_{way}": Variable(("round",), "float64", attrs={"long_name": text, "units": "byte"})
        for way, text in ways.items()
    }
    of_clients = {f"n_{name}": ("client", rows.sizes) for name, rows in job.splits.items()}
    groups["metrics"] = Group(metrics.coords.assign_coords(of_clients), {**metrics.variables, **sent})
    groups |= _measures_layout(job, metrics.coords["round"])
    return groups | _weights_layout(job, checkpoints, layers)


def _measures_layout(job: Job, rounds: xr.DataArray) -> dict[str, Group]:
    """Groups ``choice`` and ``probe`` of a run that has them."""
    every = {
        "round": rounds,
        "client": ("client", np.arange(job.clients)),
        "layer": ("layer", np.array(list(nets.layers(job.net)), object)),
    }
    groups = {}
    if dims := choice.dims(job):
        texts = {"step": "B of W + B (W' − W)", "finetuning": "which of the fine-tunings"}
        variables = {
            name: Variable(("round", *of), "float32", attrs={"long_name": texts[name]}) for name, of in dims.items()
        }
        own = {dim: every[dim] for dim in {"round", *(dim for of in dims.values() for dim in of)}}
        groups["choice"] = Group(xr.Dataset(coords=own), variables)
    if job.probe:
        texts = {
            "between": "sum of squares of the means of two models, trained on halves, about their fit over clients",
            "within": "sum of squares between the two models",
        }
        whole = ("round", "client", "layer")
        variables = {name: Variable(whole, "float64", attrs={"long_name": text}) for name, text in texts.items()}
        counts = {"n_train": ("client", job.train.sizes), "n_weights": ("layer", halves.n_weights(job.net))}
        groups["probe"] = Group(xr.Dataset(coords=every | counts), variables)
    return groups


def readouts_layout(names: Sequence[str], job: Job) -> Group:
    """Group ``readouts``: scores of other models made of the last round's."""
    coords = {
        "readout": ("readout", np.array(names, object)),
        "client": ("client", np.arange(job.clients)),
        "layer": ("layer", np.array(list(nets.layers(job.net)), object)),
    }
    variables = {
        "accuracy": Variable(("readout", "client"), "float32", attrs={"long_name": "test accuracy"}),
        "loss": Variable(("readout", "client"), "float32", attrs={"long_name": "mean test loss"}),
        "step": Variable(("readout", "client", "layer"), "float32", attrs={"long_name": "B of W + B (W' − W)"}),
    }
    return Group(xr.Dataset(coords=coords), variables)


def new_layout(n_train: np.ndarray, n_test: np.ndarray) -> Group:
    """Group ``new``: accuracy of clients that did not train, by rule."""
    coords = xr.Dataset(
        {"n_train": ("client", n_train), "n_test": ("client", n_test)},
        {"rule": np.array(RULES, object), "client": np.arange(len(n_test))},
    )
    return Group(coords, {"accuracy": Variable(("rule", "client"), "float32", attrs={"long_name": "test accuracy"})})


def masking_layout(draws: int, n_clients: int) -> Group:
    """Group ``masking``: accuracy without a part of the split layers."""
    coords = {"part": np.array(PARTS, object), "draw": np.arange(draws), "client": np.arange(n_clients)}
    variable = Variable(("part", "draw", "client"), "float32", attrs={"long_name": "test accuracy"})
    return Group(xr.Dataset(coords=coords), {"accuracy": variable})


def write_weights(writer: Writer, job: Job, state: State, checkpoint: int, layers: Sequence[str]) -> None:
    """Write all clients' weights of some layers as checkpoint number ``checkpoint``."""
    few = _clients_at_once(job)
    for low in range(0, job.clients, few):
        clients = np.arange(low, min(low + few, job.clients))
        for name, p in nets.whole(job.net, personal(job, state, clients)).items():
            if nets.layer_of(name) in layers:
                flat = p.flatten(2) if p.ndim > 2 else p
                where = (checkpoint, slice(low, low + len(clients)))
                writer.write(f"weights/{nets.layer_of(name)}/{variable(name)}", where, flat.cpu().numpy())


def _clients_at_once(job: Job) -> int:
    """Clients whose models together take about 64 MB: what is written, and what one chunk of a store holds."""
    return max(1, int(16e6 / sum(np.prod(s) for s in job.net.shapes.values())))


def _weights_layout(job: Job, checkpoints: Sequence[int], layers: Sequence[str]) -> dict[str, Group]:
    """Groups ``weights/<layer>`` of a run."""
    groups = {}
    for layer in layers:
        shapes = {variable(n): s for n, s in nets.base_of(job.net).shapes.items() if nets.layer_of(n) == layer}
        wide = {name: int(np.prod(shape[1:])) for name, shape in shapes.items()}
        # An LSTM's bias has four numbers a unit: a dim of its own beside that of the weights.
        last = {name: "weight" if n == max(wide.values()) else f"{name}_weight" for name, n in wide.items()}
        coords: dict[str, Any] = {
            "checkpoint": ("checkpoint", np.array(checkpoints), {"long_name": "round after which weights were kept"}),
            "client": ("client", np.arange(job.clients)),
            "unit": ("unit", np.arange(nets.layers(job.net)[layer])),
        }
        dims = {name: (*coords, *([last[name]] if len(shape) > 1 else [])) for name, shape in shapes.items()}
        sizes = {last[name]: wide[name] for name, shape in shapes.items() if len(shape) > 1}
        chunk = {"checkpoint": 1, "client": _clients_at_once(job)}
        groups[f"weights/{layer}"] = Group(
            xr.Dataset(coords=coords | {dim: np.arange(n) for dim, n in sizes.items()}),
            {name: Variable(dims[name], "float32", chunk, {"shape": list(shape)}) for name, shape in shapes.items()},
        )
    return groups


def variable(name: str) -> str:
    """``"fc1.weight"`` to ``"w"`` and ``"fc1.bias"`` to ``"b"``: ``weight`` is a dim, ``weights`` a group."""
    kind = name.rpartition(".")[2]
    return {"weight": "w", "bias": "b"}.get(kind, kind)


def extend(path: Path, config: Mapping[str, Any], groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    """Make the store of a run longer where the settings ask for more rounds than it has, and differ in nothing else.

    The store becomes the one that an uninterrupted run of so many rounds would have begun: what was kept or measured
    of the old last round for being the last is not taken over. These are its weights, unless ``checkpoints`` name it,
    its evaluation, unless that is due anyway, and the groups ``new``, ``masking`` and ``readouts``, made once more
    after the new last round. To go on from, a finished store keeps the last state: the server's model, clients' own
    copies of what may be personal, and optimiser states where they are kept.

    Raises
    ------
    ValueError
        If fewer rounds are asked for, other checkpoints among those that were due, or there is no state to go on from.
    """
    store.claim(path, attrs["command"], resume=True)
    growth = store.changed(path, config)
    if "rounds" not in growth or growth.keys() - {"rounds", "checkpoints"}:
        return
    before, rounds = growth["rounds"]
    if rounds < before:
        raise ValueError(f"{path} has {before} rounds: it can be made longer, not shorter, but got rounds={rounds}")
    kept, wanted = ([n for n in numbers if n < before] for numbers in growth["checkpoints"])
    if kept != wanted:
        raise ValueError(
            f"{path} keeps weights after rounds {kept} of the first {before - 1}, but got checkpoints {wanted} there. "
            "Add only later ones."
        )
    if "ended" in store.attributes(path) and not store.has_state(path):
        raise ValueError(
            f"{path} was finished by an older fedstat, which kept no state to go on from. Make a run of {rounds} "
            "rounds anew at another path."
        )

    def taken(name: str, array: xr.DataArray) -> xr.DataArray | None:
        if name.startswith(("new/", "masking/", "readouts/")):
            return None
        if (name in _EVALUATED or name.startswith(("choice/", "probe/"))) and before % config["evaluate_every"]:
            return array.where(array["round"] != before)
        return array

    changing = {name: attrs[name] for name in ("title", "config", "about")}
    store.extend(path, groups, changing, growth, taken=taken)


def save_state(writer: Writer, state: State) -> None:
    """Add the state to what the writer commits next: run and state belong together by round."""
    fits = {layer: [_tensor(part) for part in fit] for layer, fit in state.sharing.fits.items()}
    alike = {layer: torch.from_numpy(values) for layer, values in state.sharing.icc.items()}
    parts = [state.round, state.params, state.kept, state.server, state.sharing.shared, fits, state.optimizer, alike]
    with writer.write_state() as file:
        try:
            torch.save(parts, file)
        except RuntimeError as error:  # as torch says that the disk is full
            raise OSError(f"the state to resume from could not be written ({error})") from error


def _tensor(part: Any) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else torch.from_numpy(np.array(part, order="C"))


def load_state(writer: Writer, job: Job) -> State | None:
    """Read what :func:`save_state` wrote; None if nothing was saved or what was has been damaged since."""
    if writer.state is None or writer.damaged:
        return None
    number, params, kept, server, shared, fits, optimizer, *rest = torch.load(
        writer.state, map_location=job.device, weights_only=True
    )
    numpy = job.device.type == "cpu"
    back = {layer: Fit(*(part.numpy() if numpy else part for part in parts)) for layer, parts in fits.items()}
    alike = rest[0] if rest else {}  # runs begun before there was a split by agreement
    icc = {layer: values.cpu().numpy() for layer, values in alike.items()}
    return State(number, params, kept, server, Sharing(shared, back, icc), optimizer)
