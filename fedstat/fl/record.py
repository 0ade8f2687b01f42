"""Store of a run: layout, weights and their factors, and the state to resume from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.lazy import torch, xr
from fedstat.fl import client_rows, disk_rows, evaluate, nets
from fedstat.fl.algorithm import Mask, SharedMask
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.nets import Net, Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.ranks import Relay
from fedstat.fl.state import AlgorithmRows, Download, State
from fedstat.labelled.runs import STAGES
from fedstat.stats.factor import Fit
from fedstat.store import Group

GROUP = "parameters"


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
            "checkpoint": ("checkpoint", rounds, {"long_name": "round after which parameters were kept"}),
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
        groups[f"{GROUP}/{layer}"] = store.group(coords, chunk, **variables)
    return groups


def factor_variable(name: str) -> str:
    """Return ``"u"`` for ``"fc1.u"``, and ``"w"`` for ``"fc1.weight"``, as ``weight`` is a dim."""
    kind = name.rpartition(".")[2]
    return "w" if kind == "weight" else kind


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


LAYOUT = 2
"""Version of the store of a run."""

_CHUNK = 4_000_000  # numbers (round, client) in one file

# Names of a state's parts in files, which are names of attributes of State in earlier versions.
_STORED = {
    "client_params": "params", "personal_units": "own", "global_params": "server", "mask": "sharing",
    "algorithm_state": "memory",
}  # fmt: skip
_EVALUATED = {
    f"metrics/{name}" for name in ("accuracy", "loss", "validation_accuracy", "validation_loss", "accuracy_before")
}


def layout(
    lead: Mapping[str, Any],
    n_rounds: int,
    n_clients: int,
    units: Mapping[str, int],
    also: Mapping[str, str] = {},
    *,
    tested: bool = False,
) -> dict[str, Group]:
    """Return groups ``metrics`` and ``split/<layer>`` of one run or several runs.

    Parameters
    ----------
    lead : mapping from dim to coordinate
        Dims that distinguish runs, {} for one run; coordinates as in :func:`fedstat.store.group`.
    n_rounds, n_clients : int
    units : mapping from layer to int
        Layers whose split is stored, with their numbers of units.
    also : mapping from name to description
        More metrics (round, client).
    tested : bool
        True if splits are by a test, which leaves units inconclusive.

    Notes
    -----
    ``split/<layer>/shared`` is True if all incoming weights of a unit are shared by all clients. This says nothing
    about single entries or clients of a finer mask.
    """
    coords = {**lead, "round": range(1, n_rounds + 1)}
    by_round, chunk = tuple(coords), dict.fromkeys(lead, 1)
    by_client, by_unit = (*by_round, "client"), (*by_round, "unit")
    few = {"round": max(1, _CHUNK // n_clients)} if n_rounds * n_clients > _CHUNK else {}
    of_clients = {"accuracy": "test accuracy", "loss": "mean test loss", **also}
    decided = {"decided": (by_unit, "bool", "unit is shown to be shared or personal")} if tested else {}
    groups = {
        "metrics": store.group(
            coords | {"client": n_clients},
            chunk,
            seconds=(by_round, "float64", {"long_name": "wall time of the round", "units": "s"}),
            **{name: (by_client, "float32", text, few) for name, text in of_clients.items()},
        )
    }
    for layer, n in units.items():
        groups[f"split/{layer}"] = store.group(
            coords | {"unit": n},
            chunk,
            shared=(by_unit, "bool", "unit is shared"),
            communality=(by_unit, "float64", "communality ν, NaN without factor analysis"),
            icc=(by_unit, "float64", "agreement of clients ICC2, NaN where it decided nothing"),
            n_factors=(by_round, "int64", "number of factors, 0 without factor analysis"),
            n_iter=(by_round, "int64", "eigendecompositions"),
            converged=(by_round, "bool", "communalities stood still"),
            **decided,
        )
    return groups


class Checkpoints(NamedTuple):
    """Rounds after which clients' weights are stored, the layers, and flags that add uploads and factors."""

    rounds: list[int]
    layers: list[str]
    uploads: bool = False
    parameters: bool = False


def run_layout(job: Job, rounds: int, checkpoints: Checkpoints) -> dict[str, Group]:
    """Return the groups of the store of one run, except groups of probes."""
    also = {
        "accuracy_before": "test accuracy of an active client's model as it leaves local training",
        "train_loss": "mean training loss of an active client's batches",
    }
    if job.validation is not None:
        also |= {"validation_accuracy": "validation accuracy", "validation_loss": "mean validation loss"}
    tested = job.algorithm.settings.get("tau") == "test"
    groups = layout({}, rounds, job.clients, nets.layers(job.net), also, tested=tested)
    groups["metrics"] |= store.group(
        {f"n_{name}": ("client", rows.sizes) for name, rows in job.subsets.items()},
        bytes_up=("round", "float64", {"long_name": "sent to the server, by all clients", "units": "byte"}),
        bytes_down=("round", "float64", {"long_name": "sent to clients, to all of them", "units": "byte"}),
    )
    if job.aggregator.privacy:
        groups["metrics"] |= store.group({}, epsilon=("round", "float64", "ε of everything released so far"))
    groups |= _choice_layout(job, rounds)
    for group in ("weights", *(["uploads"] if checkpoints.uploads else [])):
        groups |= _weights_layout(job, group, checkpoints)
    if checkpoints.parameters:
        layers, rounds_stored = checkpoints.layers, checkpoints.rounds
        groups |= factors_layout(job.net, layers, rounds_stored, job.clients, _clients_at_once(job))
    return groups


def _choice_layout(job: Job, rounds: int) -> dict[str, Group]:
    """Return group ``choice``, if the algorithm selects a fine-tuning."""
    if not (dims := evaluate.dims(job)):
        return {}
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    texts = {"step": "B of W + B (W' − W)", "finetuning": "which of the fine-tunings"}
    arrays = {name: (("round", *of), "float32", texts[name]) for name, of in dims.items()}
    return {"choice": store.group(coords, **arrays)}


def checkpoint_writer(writer: Relay, checkpoints: Checkpoints) -> Observer:
    """Return the observer that writes clients' weights after rounds that are checkpoints."""

    def write(job: Job, outcome: Outcome) -> Values:
        if outcome.state.round in checkpoints.rounds:
            with writer.turns():
                _write_models(writer, job, outcome, checkpoints)
        return {}

    return Observer(on_round_end=write)


def _write_models(writer: Relay, job: Job, outcome: Outcome, checkpoints: Checkpoints) -> None:
    if not checkpoints.layers:
        return
    download = Download(job, outcome.state)
    position, few = checkpoints.rounds.index(outcome.state.round), _clients_at_once(job)
    selected, before, ids = outcome.cohort.local, checkpoints.uploads or checkpoints.parameters, job.train.ids

    def write(params: Params, clients: np.ndarray, group: str, stage: str) -> None:
        """Write weights and factors of clients of one chunk; no weights without a group."""
        weights = nets.whole(job.net, params) if group else {}
        for name, p in _yield_arrays(weights, checkpoints.layers):
            where = f"{group}/{nets.layer_of(name)}/{variable(name)}"
            _write_rows(writer, where, (position,), clients, p)
        factors = params if checkpoints.parameters and job.net.whole else {}
        for name, p in _yield_arrays(factors, checkpoints.layers):
            where = f"{GROUP}/{nets.layer_of(name)}/{factor_variable(name)}"
            _write_rows(writer, where, (position, STAGES.index(stage)), clients, p)

    for low in range(0, job.clients, few):
        clients = np.arange(low, min(low + few, job.clients))
        write(download.models(clients), ids[clients], "weights", "aggregated")
        trained, rows, _ = np.intersect1d(selected, clients, return_indices=True)
        if before and len(trained):
            models = {name: p[rows] for name, p in outcome.trained.params.items()}
            write(models, ids[trained], "uploads" if checkpoints.uploads else "", "trained")


def _yield_arrays(params: Params, layers: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield parameters of some layers as arrays (client, ...) of at most three axes."""
    for name, p in params.items():
        if nets.layer_of(name) in layers:
            yield name, (p.flatten(2) if p.ndim > 2 else p).cpu().numpy()


def _write_rows(writer: Relay, name: str, where: tuple[int, ...], clients: np.ndarray, values: np.ndarray) -> None:
    """Write rows of clients in ascending order, and NaN for clients between them, at once: a chunk is one file."""
    first, rows = int(clients[0]), values
    if len(clients) <= int(clients[-1]) - first:
        rows = np.full((int(clients[-1]) + 1 - first, *values.shape[1:]), np.nan, np.float32)
        rows[clients - first] = values
    writer.write(name, (*where, slice(first, first + len(rows))), rows)


def _clients_at_once(job: Job) -> int:
    """Return the number of clients to write at a time, one chunk of a store: their models take about 16 MB."""
    return max(1, int(4e6 / sum(np.prod(s) for s in job.net.shapes.values())))


def _weights_layout(job: Job, group: str, checkpoints: Checkpoints) -> dict[str, Group]:
    """Return the groups ``<group>/<layer>`` of a run."""
    groups = {}
    for layer in checkpoints.layers:
        shapes = {variable(n): s for n, s in nets.base_of(job.net).shapes.items() if nets.layer_of(n) == layer}
        wide = {name: int(np.prod(shape[1:])) for name, shape in shapes.items()}
        # An LSTM's bias has four numbers per unit, and so a separate dim.
        last = {name: "weight" if n == max(wide.values()) else f"{name}_weight" for name, n in wide.items()}
        coords: dict[str, Any] = {
            "checkpoint": ("checkpoint", checkpoints.rounds, {"long_name": "round after which weights were kept"}),
            "client": job.clients,
            "unit": nets.layers(job.net)[layer],
        }
        dims = {name: (*coords, *([last[name]] if len(shape) > 1 else [])) for name, shape in shapes.items()}
        sizes = {last[name]: wide[name] for name, shape in shapes.items() if len(shape) > 1}
        chunk = {"checkpoint": 1, "client": _clients_at_once(job)}
        arrays = {name: (dims[name], "float32", {"shape": list(shape)}) for name, shape in shapes.items()}
        groups[f"{group}/{layer}"] = store.group(coords | sizes, chunk, **arrays)
    return groups


def variable(name: str) -> str:
    """Return ``"w"`` for ``"fc1.weight"``, ``"b"`` for ``"fc1.bias"``: ``weight`` is a dim, ``weights`` a group."""
    kind = name.rpartition(".")[2]
    return {"weight": "w", "bias": "b"}.get(kind, kind)


def extend(path: Path, config: Mapping[str, Any], groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    """Extend the store of a run if ``rounds`` is larger and the other settings are equal.

    The store becomes the store of an uninterrupted run with the new number of rounds. Values that the old last round
    has only as the last round are dropped:

    - its weights, unless it is in ``checkpoints``;
    - its evaluation, unless ``evaluate_every`` includes it;
    - the groups ``new``, ``ablation`` and ``readouts``, which are made after the new last round.

    The run continues from the last state, which a finished store holds: the global model, clients' personal
    parameters, and optimizer states that last.

    Raises
    ------
    ValueError
        If ``rounds`` is smaller, checkpoints among the rounds done differ, or there is no state to continue from.
    """
    store.require_available(path, attrs["command"], resume=True)
    if (version := store.attributes(path).get("layout", 1)) != LAYOUT:
        raise ValueError(
            f"{path} has the layout {version} of {store.attributes(path).get('source', 'another fedstat')}, but this "
            f"fedstat writes layout {LAYOUT}: the run can be read, but not continued. Continue with the version that "
            "started it, or start a new run at another path."
        )
    growth = store.changed(path, config)
    if "rounds" not in growth or growth.keys() - {"rounds", "checkpoints"}:
        return
    before, rounds = growth["rounds"]
    if rounds < before:
        raise ValueError(
            f"rounds must be at least {before}, as stored in {path}, but got {rounds}. Runs can only be extended. "
            f"To end an unfinished run after its last finished round: fedstat.fl.finish({str(path)!r})."
        )
    stored, requested = ([n for n in numbers if n < before] for numbers in growth["checkpoints"])
    if stored != requested:
        raise ValueError(
            f"{path} holds weights after rounds {stored} of the first {before - 1}, but got checkpoints {requested}. "
            "Add only later checkpoints."
        )
    if "ended" in store.attributes(path) and not store.has_state(path):
        raise ValueError(
            f"{path} is finished and holds no state to continue from: an older fedstat stored none, or the process was "
            f"killed before it stored one. Start a new run of {rounds} rounds at another path."
        )

    def keep_array(name: str, array: xr.DataArray) -> xr.DataArray | None:
        if name.startswith(("new/", "ablation/", "readouts/")):
            return None
        if (name in _EVALUATED or name.startswith(("choice/", "probe/"))) and before % config["evaluate_every"]:
            return array.where(array["round"] != before)
        return array

    changing = {name: attrs[name] for name in ("title", "config", "about")}
    store.extend(path, groups, changing, growth, select=keep_array)


def _gather_rows(parts: Sequence[Params], job: Job) -> Params:
    """Return rows of the job's clients, from rows of all clients in several parts."""
    merged = {}
    for name in parts[0]:
        ends = np.cumsum([0, *(len(part[name]) for part in parts)])
        numbers = [job.train.ids[(job.train.ids >= low) & (job.train.ids < high)] - low for low, high in pairwise(ends)]
        local_rows = [part[name][rows] for part, rows in zip(parts, numbers, strict=True)]
        merged[name] = torch.cat([rows.to(job.device) for rows in local_rows])
    return merged


def last_weights(job: Job, state: State, layers: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the weights (client, unit, ...) of clients, by their names in the store; {} if rows are on disk.

    An interrupted run saves them with its state, for :func:`fedstat.fl.finish`.
    """
    if job.rows_folder is not None or not layers:
        return {}
    download, few, blocks = Download(job, state), _clients_at_once(job), []
    for low in range(0, job.clients, few):
        weights = nets.whole(job.net, download.models(np.arange(low, min(low + few, job.clients))))
        blocks.append(dict(_yield_arrays(weights, layers)))
    return {
        f"weights/{nets.layer_of(name)}/{variable(name)}": torch.from_numpy(np.concatenate([b[name] for b in blocks]))
        for name in blocks[0]
    }


def load_last_weights(path: Path, number: int) -> dict[str, np.ndarray]:
    """Read what :func:`last_weights` saved in the store at ``path`` after a round; {} if there is nothing."""
    if not store.has_state(path):
        return {}
    parts = _load_part(store.state_file(path), map_location="cpu", mmap=True)
    return {name: p.numpy() for name, p in parts.get(_WEIGHTS, {}).items()} if parts["round"] == number else {}


_WEIGHTS = "weights"  # part of a state file


def save_state(writer: Relay, job: Job, state: State, weights: Mapping[str, torch.Tensor] = {}) -> None:
    """Add the state to the writer's next commit, so that run and state belong to one round.

    Each of several processes saves the rows of its clients. ``weights`` are those of :func:`last_weights`.
    """
    parts = {_STORED.get(name, name): part for name, part in state._asdict().items()}
    parts |= {name: parts[name].saved() for name in ("params", "optimizer")}
    parts |= {"memory": (state.algorithm_state.clients.saved(), dict(state.algorithm_state.server))}
    parts |= {"sharing": _pack_mask(state.mask)}
    if weights:
        parts[_WEIGHTS] = dict(weights)
    if job.process_group.several:
        parts["of"] = job.process_group.number
    if job.process_group.rank:
        parts = {name: parts[name] for name in ("params", "optimizer", "memory")}
    with writer.write_state() as file:
        torch.save(parts, file)


def load_state(files: Sequence[Path], job: Job) -> State | None:
    """Read what :func:`save_state` wrote, of this process's clients; None if there is nothing."""
    if not files:
        return None
    parts = _read_parts(files, job)
    of_clients, of_server = parts["memory"]
    saved = {"params": parts["params"], "optimizer": parts["optimizer"], "memory": of_clients}
    parts |= client_rows.restore(job, saved, files[0].parent / disk_rows.FOLDER)
    parts |= {"memory": AlgorithmRows(parts["memory"], of_server)}
    parts |= {"sharing": _read_mask(job, *parts["sharing"])}
    return State(**{name: parts[_STORED.get(name, name)] for name in State._fields})


def _read_parts(files: Sequence[Path], job: Job) -> dict[str, Any]:
    """Read the parts of a state, with rows of this process's clients from the files of all that saved it."""
    parts = _load_part(files[0], map_location=job.device, mmap=job.rows_folder is not None)
    number = parts.pop("of", 1)
    if number > 1 or job.process_group.several:
        all_ranks = [parts, *(_load_part(file, map_location="cpu", mmap=True) for file in files[1:number])]
        for name in ("params", "optimizer"):
            parts[name] = _gather_rows([rank[name] for rank in all_ranks], job)
        parts["memory"] = (_gather_rows([rank["memory"][0] for rank in all_ranks], job), parts["memory"][1])
    return parts


def _pack_mask(mask: SharedMask) -> tuple[Any, ...]:
    """Return the parts of a mask as tensors."""
    fits = {layer: [_as_tensor(part) for part in fit] for layer, fit in mask.fits.items()}
    of_units = ({layer: _as_tensor(values) for layer, values in of.items()} for of in (mask.icc, mask.decided))
    return mask.shared, fits, *of_units


def _read_mask(job: Job, shared: Mask, fits: Mapping[str, Any], *of_units: Mapping[str, Any]) -> SharedMask:
    """Return the mask of the parts that :func:`_pack_mask` made.

    Earlier versions did not save the last ones, of units: the agreement of clients, and what a test decided.
    """
    numpy = job.device.type == "cpu"
    read = {layer: Fit(*(part.numpy() if numpy else part for part in fit)) for layer, fit in fits.items()}
    return SharedMask(shared, read, *({layer: p.cpu().numpy() for layer, p in of.items()} for of in of_units))


def _as_tensor(part: Any) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else torch.from_numpy(np.array(part, order="C"))


def _load_part(file: Path, **options: Any) -> dict[str, Any]:
    """Load a part of a state from a file whose checksum the journal has verified."""
    try:
        return dict(torch.load(file, weights_only=True, **options))
    except Exception as error:  # torch does not document its errors for malformed files
        raise store.DamageError(
            f"the state to resume from, {file}, cannot be read ({guard.reason(error)}). Delete the run and train again."
        ) from error
