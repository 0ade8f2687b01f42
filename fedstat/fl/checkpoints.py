"""Weights that a run stores at checkpoints: of clients before and after aggregation, and their last common values."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat import store
from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets, split_halves
from fedstat.fl.algorithm import SharedMask
from fedstat.fl.chunks import format_bytes, max_selected
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.nets import Net, Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.ranks import Relay
from fedstat.fl.state import Download, State
from fedstat.labelled.runs import GROUPS, STAGES, Stage
from fedstat.store import Group

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS = "parameters"
CONSTANTS = "constants"
"""Group of a run with buffers of the user's module that are equal for all clients."""
INITIAL = "initial_"
"""Prefix of the initial values in the groups ``common/<layer>``."""
_HELD = 2**28
"""Bytes of weights before aggregation that are held for :func:`fedstat.fl.finish` until the next round ends."""


class Checkpoints(NamedTuple):
    """Weights that a run stores.

    Attributes
    ----------
    rounds : list of int
        Rounds after which weights are stored.
    layers : list of str
    trained : bool
        True: also weights before aggregation, and the last common values.
    replicates : bool
        True: also weights of split-half training.
    parameters : bool
        True: also the factors of composed weights.
    """

    rounds: list[int]
    layers: list[str]
    trained: bool = False
    replicates: bool = False
    parameters: bool = False


class TrainedWeights(NamedTuple):
    """Parameters of the selected clients after local training, and the last common values before it.

    Attributes
    ----------
    clients : int array (client,)
        Rows of the clients in the job's data.
    params : Params (client, ...)
        Parameters after local training.
    common : Params (client or 1, ...)
        Last common values, see :func:`common_params`.
    mask : SharedMask
        The mask under which the clients downloaded.
    """

    clients: np.ndarray
    params: Params
    common: Params
    mask: SharedMask


def common_params(job: Job, state: State, clients: np.ndarray) -> Params:
    """Return the last common values of parameters (client or 1, ...) before the round that follows a state.

    The last common value of an entry is its value when a client last downloaded it while it was shared, or its initial
    value. For entries that are personal from the start, and where all clients take part in every round, these are the
    entries of the global model, which stop changing when they turn personal. Where masks change and clients miss
    rounds, the state holds a value for each client. Where downloads differ between clients, they have only their
    initial parameters in common.
    """
    if job.hooks.downloads_differ:
        return initial_params(job)
    params = {name: p.unsqueeze(0) for name, p in state.global_params.items()}
    if job.common_rows:
        params = {name: p.expand(len(clients), *p.shape[1:]) for name, p in params.items()}
    return job.hooks.common_params(params | state.common_values(clients))


def initial_params(job: Job) -> Params:
    """Return the initial parameters (1, ...), which all clients have in common."""
    drawn = job.net.init(streams.generator(job.seed, "start"))
    return {name: p.unsqueeze(0).to(job.device) for name, p in drawn.items()}


def need_common_rows(job: Job) -> bool:
    """Return True if last common values differ between clients: masks change, and clients miss rounds."""
    is_every_client_selected = job.participation in (1, (1, 1))
    return bool(job.algorithm.update_mask) and not job.hooks.downloads_differ and not is_every_client_selected


# --- layout


def layout(job: Job, stored: Checkpoints) -> dict[str, Group]:
    """Return the groups of a run's store that hold weights."""
    groups = _weights_layout(job, "weights", stored)
    if stored.trained:
        groups |= _weights_layout(job, "trained", stored)
        groups |= _weights_layout(job, "common", stored, by_client=job.common_rows, initial=True)
    if stored.replicates:
        groups |= _weights_layout(job, "replicates", stored, replicates=2)
    if stored.layers and job.net.fixed:
        groups[CONSTANTS] = _constants_layout(job.net)
    if stored.parameters:
        groups |= factors_layout(job.net, stored.layers, stored.rounds, job.clients, _clients_at_once(job))
    return groups


def _weights_layout(
    job: Job,
    group: str,
    stored: Checkpoints,
    *,
    by_client: bool = True,
    replicates: int = 0,
    initial: bool = False,
) -> dict[str, Group]:
    """Return the groups ``<group>/<layer>`` of a run."""
    groups = {}
    for layer in stored.layers:
        shapes = {variable(n): s for n, s in nets.base_of(job.net).shapes.items() if nets.layer_of(n) == layer}
        wide = {name: int(np.prod(shape[1:])) for name, shape in shapes.items()}
        # An LSTM's bias has four numbers per unit, and so a separate dim.
        last = {name: "weight" if n == max(wide.values()) else f"{name}_weight" for name, n in wide.items()}
        n_units = nets.layers(job.net)[layer]
        units = {"unit": n_units}
        coords: dict[str, Any] = {
            "checkpoint": ("checkpoint", stored.rounds, {"long_name": "round after which weights were stored"})
        }
        coords |= {"client": job.clients} if by_client else {}
        coords |= {"replicate": replicates} if replicates else {}
        rows = {name: "unit" if shape[0] == n_units else f"{name}_row" for name, shape in shapes.items()}
        dims = {name: (rows[name], *([last[name]] if len(shape) > 1 else [])) for name, shape in shapes.items()}
        sizes = {last[name]: wide[name] for name, shape in shapes.items() if len(shape) > 1}
        sizes |= {row: shapes[name][0] for name, row in rows.items() if row != "unit"}
        arrays: dict[str, tuple[Any, ...]] = {
            name: ((*coords, *dims[name]), "float32", {"shape": list(shape)}) for name, shape in shapes.items()
        }
        if initial:
            arrays |= {
                f"{INITIAL}{name}": (dims[name], "float32", {"long_name": "initial value", "shape": list(shape)})
                for name, shape in shapes.items()
            }
            text = "clients downloaded the unit's weights in this round, all of them alike"
            arrays["downloaded"] = (("checkpoint", "unit"), "bool", text)
        chunk = {"checkpoint": 1} | ({"client": _clients_at_once(job)} if by_client else {})
        groups[f"{group}/{layer}"] = store.group(coords | units | sizes, chunk, **arrays)
    return groups


def _constants_layout(net: Net) -> Group:
    """Return the group of constant tensors of a user's module, which name their tensors."""
    arrays = {}
    for i, (name, tensor) in enumerate(net.fixed.items()):
        dims = tuple(f"constant{i}_{axis}" for axis in range(tensor.ndim))
        arrays[f"constant{i}"] = (dims, tensor.cpu().numpy(), {"tensor": name})
    return store.group({}, **arrays)


def factors_layout(
    net: Net, layers: Sequence[str], rounds: Sequence[int], clients: int, at_once: int
) -> dict[str, Group]:
    """Return groups ``parameters/<layer>``; none if the network is not composed: its parameters are its weights.

    Parameters
    ----------
    net : Net
    layers : sequence of str
        Layers that are stored.
    rounds : sequence of int
        Checkpoints.
    clients, at_once : int
        Number of clients, in all and in a chunk.

    Raises
    ------
    ValueError
        If a factor has the name of a dim, or of the composed weight in the store.
    """
    groups: dict[str, Group] = {}
    for layer in layers if net.whole is not None else ():
        coords: dict[str, Any] = {
            "checkpoint": ("checkpoint", rounds, {"long_name": "round after which parameters were stored"}),
            "stage": ("stage", [*STAGES], {"long_name": "before or after aggregation"}),
            "client": clients,
        }
        lead, chunk = tuple(coords), {"checkpoint": 1, "stage": 1, "client": at_once}
        variables: dict[str, tuple[Any, ...]] = {}
        for name in _layer_params(net, layer):
            sizes = _value_dims(net, name)
            coords |= sizes
            _require_name(name, variables)
            variables[factor_variable(name)] = ((*lead, *sizes), "float32", {"shape": list(net.shapes[name])})
        groups[f"{PARAMETERS}/{layer}"] = store.group(coords, chunk, **variables)
    return groups


def factor_variable(name: str) -> str:
    """Return ``"u"`` for ``"fc1.u"``, and ``"w"`` for ``"fc1.weight"``, as ``weight`` is a dim."""
    kind = name.rpartition(".")[2]
    return "w" if kind == "weight" else kind


def variable(name: str) -> str:
    """Return ``"w"`` for ``"fc1.weight"``, ``"b"`` for ``"fc1.bias"``: ``weight`` is a dim, ``weights`` a group."""
    kind = name.rpartition(".")[2]
    return {"weight": "w", "bias": "b"}.get(kind, kind)


def _array(name: str) -> str:
    """Return the array of a parameter in a group of the store: "fc1/w" for "fc1.weight"."""
    return f"{nets.layer_of(name)}/{variable(name)}"


def _layer_params(net: Net, layer: str) -> list[str]:
    return [name for name in net.shapes if nets.layer_of(name) == layer]


def _value_dims(net: Net, name: str) -> dict[str, int]:
    """Return the dims of one client's values: (unit, weight) if they equal the layer's, else separate names."""
    layer, shape, kind = nets.layer_of(name), net.shapes[name], factor_variable(name)
    by_unit = name not in net.undivided
    dims = {"unit" if by_unit else f"{kind}_row": shape[0]}
    if len(shape) > 1:
        base, columns = nets.base_of(net), int(np.prod(shape[1:]))
        widest = max(int(np.prod(base.shapes[n][1:])) for n in _layer_params(base, layer))
        dims["weight" if by_unit and columns == widest else f"{kind}_column"] = columns
    return dims


def _require_name(name: str, names: Collection[str]) -> None:
    """Raise ValueError if a factor's variable would have the name of another factor, or of a dim."""
    if factor_variable(name) in {*names, "checkpoint", "stage", "client", "unit"}:
        raise ValueError(
            f"the factor {name!r} cannot be stored as {factor_variable(name)!r}, which names a dim or another factor "
            "of the layer. Give it another name in its Part."
        )


def require_disk(job: Job, state: State, stored: Checkpoints, path: Path) -> None:
    """Raise ValueError if the weights that a new run will store do not fit on the disk.

    Equal rows of clients take next to nothing. What takes space are personal entries, and the weights of selected
    clients before aggregation.
    """
    if state.round:
        return
    sizes: dict[str, int] = {name: 4 * math.prod(_personal_shape(state, name)) for name in state.personal_units}
    clients = [min(job.clients, number * max_selected(job)) for number in stored.rounds]
    personal = sum(clients) * sum(size for name, size in sizes.items() if nets.layer_of(name) in stored.layers)
    shapes = nets.base_of(job.net).shapes.items() if stored.trained else ()
    model = 4 * sum(math.prod(shape) for name, shape in shapes if nets.layer_of(name) in stored.layers)
    trained = len(stored.rounds) * min(job.clients, max_selected(job)) * model
    rows = clients[-1] * sum(part.disk_bytes for part in state.rows)
    free = shutil.disk_usage(path).free
    if personal + trained + rows > free:
        raise ValueError(
            f"the run would write {format_bytes(personal + trained)} of clients' weights ({len(stored.rounds)} "
            f"checkpoint(s), up to {clients[-1]} clients) and {format_bytes(rows)} to resume from, but the disk of "
            f"{path} has {format_bytes(free)} free. Store fewer layers (keep_weights=[{stored.layers[-1]!r}], or "
            "keep_weights=[] for none) or fewer checkpoints, or choose another disk."
        )


def _personal_shape(state: State, name: str) -> tuple[int, ...]:
    units = state.personal_units[name]
    shape = tuple(state.global_params[name].shape)
    return shape if units is None else (len(units), *shape[1:])


# --- writing


class Region(NamedTuple):
    """Values of a checkpoint in an array of the store.

    Attributes
    ----------
    name : str
        Array, "group/layer/variable".
    lead : tuple of int
        Positions on the dims between checkpoint and client.
    clients : int array (client,) or None
        Ascending numbers of clients; None for values without clients.
    values : array (client, ...) or (...)
    """

    name: str
    lead: tuple[int, ...]
    clients: np.ndarray | None
    values: np.ndarray


class WeightsWriter:
    """Writer of the weights of a run: at its checkpoints and, of an interrupted run, of its last finished round.

    Parameters
    ----------
    writer : Relay
    stored : Checkpoints
    """

    def __init__(self, writer: Relay, stored: Checkpoints) -> None:
        self._writer, self._stored = writer, stored
        self._held: TrainedWeights | None = None

    @property
    def observer(self) -> Observer:
        """Observer that writes weights after rounds that are checkpoints."""
        return Observer(on_round_end=self._after_round if self._stored.layers else None)

    def write_initial(self, job: Job) -> None:
        """Write the initial parameters."""
        if self._stored.trained and self._writer.first:
            for name, p in _arrays(nets.whole(job.net, initial_params(job)), self._stored.layers):
                self._writer.write(f"common/{nets.layer_of(name)}/{INITIAL}{variable(name)}", (), p[0])

    def last_weights(self, job: Job, state: State) -> dict[str, Tensor]:
        """Return arrays of a checkpoint after the last finished round, by name; {} if client rows are on disk.

        A run that ends early saves them with its state, for :func:`fedstat.fl.finish`.
        """
        if job.rows_folder is not None or not self._stored.layers:
            return {}
        group, arrays = job.process_group, dict[str, np.ndarray]()
        held = self._held if all(group.each(self._held is not None)) else None
        regions = _regions(job, state, held, self._stored)
        for region in chain(*group.each(list(regions))) if group.several else regions:
            if region.clients is None:
                arrays[region.name] = region.values
            elif not region.lead:
                shape = (len(job.sizes), *region.values.shape[1:])
                array = arrays.setdefault(region.name, np.full(shape, np.nan, np.float32))
                array[region.clients] = region.values
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _after_round(self, job: Job, outcome: Outcome) -> Values:
        number, self._held = outcome.state.round, None
        if self._stored.trained or self._stored.parameters:
            trained = trained_weights(job, outcome)
            is_small = sum(p.nbytes for p in trained.params.values()) <= _HELD
            self._held = trained if is_small or number in self._stored.rounds else None
        if number in self._stored.rounds:
            halves = _halves(job, outcome, self._stored) if self._stored.replicates else []
            position, first = self._stored.rounds.index(number), self._writer.first
            with self._writer.turns():
                for region in (*_regions(job, outcome.state, self._held, self._stored), *(halves if first else ())):
                    if first or region.clients is not None:  # process 0 writes what all have alike
                        self._write(position, region)
        return {}

    def _write(self, position: int, region: Region) -> None:
        """Write a region, with NaN for the clients between its clients: a chunk is one file."""
        where, ids, values = (position, *region.lead), region.clients, region.values
        if ids is None:
            self._writer.write(region.name, where, values)
            return
        first = int(ids[0])
        if len(ids) <= int(ids[-1]) - first:
            values = np.full((int(ids[-1]) + 1 - first, *values.shape[1:]), np.nan, np.float32)
            values[ids - first] = region.values
        self._writer.write(region.name, (*where, slice(first, first + len(values))), values)


def trained_weights(job: Job, outcome: Outcome) -> TrainedWeights:
    """Return the parameters of a round's clients before aggregation, and what they had in common before the round."""
    clients = outcome.cohort.local
    return TrainedWeights(
        clients, outcome.trained.params, common_params(job, outcome.before, clients), outcome.before.mask
    )


def _regions(job: Job, state: State, trained: TrainedWeights | None, stored: Checkpoints) -> Iterator[Region]:
    """Yield the weights of a checkpoint: after aggregation and, if ``trained`` is given, before aggregation."""
    download, n_at_once, ids = Download(job, state), _clients_at_once(job), job.train.ids
    for low in range(0, job.clients, n_at_once):
        clients = np.arange(low, min(low + n_at_once, job.clients))
        yield from _of_stage(job, download.models(clients), ids[clients], "aggregated", stored)
        if trained is None:
            continue
        selected, rows, _ = np.intersect1d(trained.clients, clients, return_indices=True)
        if len(selected):
            models = {name: p[rows] for name, p in trained.params.items()}
            yield from _of_stage(job, models, ids[selected], "trained", stored)
            if stored.trained and job.common_rows:
                common = nets.whole(job.net, {name: p[rows] for name, p in trained.common.items()})
                for name, values in _arrays(common, stored.layers):
                    yield Region(f"common/{_array(name)}", (), ids[selected], values)
    if trained is not None and stored.trained:
        yield from _of_all_clients(job, trained, stored)


def _of_stage(job: Job, params: Params, clients: np.ndarray, stage: Stage, stored: Checkpoints) -> Iterator[Region]:
    """Yield weights of some clients at a stage, and their factors."""
    if stage == "aggregated" or stored.trained:
        for name, values in _arrays(nets.whole(job.net, params), stored.layers):
            yield Region(f"{GROUPS[stage]}/{_array(name)}", (), clients, values)
    if stored.parameters and job.net.whole:
        for name, values in _arrays(params, stored.layers):
            array = f"{PARAMETERS}/{nets.layer_of(name)}/{factor_variable(name)}"
            yield Region(array, (STAGES.index(stage),), clients, values)


def _of_all_clients(job: Job, trained: TrainedWeights, stored: Checkpoints) -> Iterator[Region]:
    """Yield the last common values, unless they differ between clients, and the units that all clients downloaded."""
    if not job.common_rows:
        for name, values in _arrays(nets.whole(job.net, trained.common), stored.layers):
            yield Region(f"common/{_array(name)}", (), None, values[0])
    for layer in stored.layers:
        yield Region(f"common/{layer}/downloaded", (), None, _downloaded(job, trained.mask, layer))


def _downloaded(job: Job, mask: SharedMask, layer: str) -> np.ndarray:
    """Return the units (unit,) whose weights all clients started alike from the server's values of the round."""
    n_units = nets.layers(job.net)[layer]
    if job.hooks.downloads_differ or job.algorithm.common_params:
        return np.full(n_units, not job.hooks.downloads_differ)
    names = [name for name in _layer_params(job.net, layer) if name not in job.net.buffers]
    if job.net.whole is not None and not all(bool(mask.shared[name].all()) for name in names):
        return np.zeros(n_units, bool)  # some factor of every weight may be personal
    return masks.shared_units(job.net, mask.shared, layer).cpu().numpy()


def _halves(job: Job, outcome: Outcome, stored: Checkpoints) -> list[Region]:
    """Train the clients of a round on each half of their samples; return the weights (client, replicate, ...)."""
    divisible = outcome.cohort.at_least(2)
    models, _ = split_halves.trained(job, Download(job, outcome.before), divisible, job.phases)
    weights = nets.whole(job.net, {name: p.flatten(0, 1) for name, p in models.items()})
    clients = np.sort(divisible.ids)
    return [
        Region(f"replicates/{_array(name)}", (), clients, values.reshape(len(clients), 2, *values.shape[1:]))
        for name, values in _arrays(weights, stored.layers)
    ]


def _arrays(params: Params, layers: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield parameters of some layers as arrays (client, ...) of at most three axes."""
    for name, p in params.items():
        if nets.layer_of(name) in layers:
            yield name, (p.flatten(2) if p.ndim > 2 else p).cpu().numpy()


def _clients_at_once(job: Job) -> int:
    """Return the number of clients to write at a time, one chunk of a store: their models take about 16 MB."""
    return max(1, int(4e6 / sum(np.prod(s) for s in job.net.shapes.values())))
