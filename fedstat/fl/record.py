"""What a run stores: layout, weights and their factors, and the state to resume from."""

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
from fedstat.stats.factor import Fit
from fedstat.store import Group

GROUP = "parameters"
STAGES = ("trained", "aggregated")
"""As local training left them, NaN for clients that were not active; and as a client predicts with them."""


def factors_layout(
    net: Net, layers: Sequence[str], rounds: Sequence[int], clients: int, at_once: int
) -> dict[str, Group]:
    """Groups ``parameters/<layer>``; none where the network is not composed, whose parameters are its weights.

    Parameters
    ----------
    net : Net
    layers : sequence of str
        Layers that are kept.
    rounds : sequence of int
        Checkpoints.
    clients, at_once : int
        Clients, and how many of them make a chunk.

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
        for name in _of(net, layer):
            sizes = _dims(net, name)
            coords |= sizes
            _require(name, variables)
            variables[factor_variable(name)] = ((*lead, *sizes), "float32", {"shape": list(net.shapes[name])})
        groups[f"{GROUP}/{layer}"] = store.group(coords, chunk, **variables)
    return groups


def factor_variable(name: str) -> str:
    """``"fc1.u"`` to ``"u"``, and ``"fc1.weight"`` to ``"w"``, as ``weight`` is a dim."""
    kind = name.rpartition(".")[2]
    return "w" if kind == "weight" else kind


def _of(net: Net, layer: str) -> list[str]:
    return [name for name in net.shapes if nets.layer_of(name) == layer]


def _dims(net: Net, name: str) -> dict[str, int]:
    """Dims of one client's values: (unit, weight) where they are those of the layer's weights, else their own."""
    layer, shape, kind = nets.layer_of(name), net.shapes[name], factor_variable(name)
    by_unit = name not in net.undivided
    dims = {"unit" if by_unit else f"{kind}_row": shape[0]}
    if len(shape) > 1:
        base, columns = nets.base_of(net), int(np.prod(shape[1:]))
        widest = max(int(np.prod(base.shapes[n][1:])) for n in _of(base, layer))
        dims["weight" if by_unit and columns == widest else f"{kind}_column"] = columns
    return dims


def _require(name: str, others: Collection[str]) -> None:
    """ValueError if a factor's variable would have the name of another, or of a dim."""
    if factor_variable(name) in {*others, "checkpoint", "stage", "client", "unit"}:
        raise ValueError(
            f"the factor {name!r} cannot be stored as {factor_variable(name)!r}, which names a dim or another factor "
            "of the layer. Give it another name in its Part."
        )


LAYOUT = 2
"""Version of the store of a run."""

_CHUNK = 4_000_000  # numbers of all clients over rounds that go to one file

# Names of a state's parts in files, which name the attributes of State as earlier versions did.
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
    """Groups ``metrics`` and ``split/<layer>`` of a run, or of many.

    Parameters
    ----------
    lead : mapping from dim to coordinate
        Dims that tell runs apart, {} for one run; coordinates as in :func:`fedstat.store.group`.
    n_rounds, n_clients : int
    units : mapping from layer to int
        Layers whose split is recorded, with their numbers of units.
    also : mapping from name to description
        More metrics (round, client).
    tested : bool
        Whether splits are by a test, which leaves units undecided.

    Notes
    -----
    ``split/<layer>/shared`` is True where all incoming weights of a unit are shared by all clients, which says nothing
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
    """Rounds after which clients' weights are stored, the layers, and whether uploads and factors are stored too."""

    rounds: list[int]
    layers: list[str]
    uploads: bool = False
    parameters: bool = False


def run_layout(job: Job, rounds: int, checkpoints: Checkpoints) -> dict[str, Group]:
    """Groups of the store of one run, except those of probes."""
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
        kept = (checkpoints.layers, checkpoints.rounds)
        groups |= factors_layout(job.net, *kept, job.clients, _clients_at_once(job))
    return groups


def _choice_layout(job: Job, rounds: int) -> dict[str, Group]:
    """Group ``choice``, if the run has one."""
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
    active, before, ids = outcome.cohort.local, checkpoints.uploads or checkpoints.parameters, job.train.ids

    def write(params: Params, clients: np.ndarray, group: str, stage: str) -> None:
        """Write weights and factors of clients of one chunk; no weights without a group."""
        weights = nets.whole(job.net, params) if group else {}
        for name, p in _flat(weights, checkpoints.layers):
            where = f"{group}/{nets.layer_of(name)}/{variable(name)}"
            _write_rows(writer, where, (position,), clients, p)
        factors = params if checkpoints.parameters and job.net.whole else {}
        for name, p in _flat(factors, checkpoints.layers):
            where = f"{GROUP}/{nets.layer_of(name)}/{factor_variable(name)}"
            _write_rows(writer, where, (position, STAGES.index(stage)), clients, p)

    for low in range(0, job.clients, few):
        clients = np.arange(low, min(low + few, job.clients))
        write(download.models(clients), ids[clients], "weights", "aggregated")
        trained, rows, _ = np.intersect1d(active, clients, return_indices=True)
        if before and len(trained):
            models = {name: p[rows] for name, p in outcome.trained.params.items()}
            write(models, ids[trained], "uploads" if checkpoints.uploads else "", "trained")


def _flat(params: Params, layers: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of some layers as arrays (client, ...) of at most three axes."""
    for name, p in params.items():
        if nets.layer_of(name) in layers:
            yield name, (p.flatten(2) if p.ndim > 2 else p).cpu().numpy()


def _write_rows(writer: Relay, name: str, where: tuple[int, ...], clients: np.ndarray, values: np.ndarray) -> None:
    """Write the rows of clients in ascending order, and NaN for those between them, at once: a chunk is one file."""
    first, rows = int(clients[0]), values
    if len(clients) <= int(clients[-1]) - first:
        rows = np.full((int(clients[-1]) + 1 - first, *values.shape[1:]), np.nan, np.float32)
        rows[clients - first] = values
    writer.write(name, (*where, slice(first, first + len(rows))), rows)


def _clients_at_once(job: Job) -> int:
    """Clients to write at a time, and in one chunk of a store: their models take about 16 MB."""
    return max(1, int(4e6 / sum(np.prod(s) for s in job.net.shapes.values())))


def _weights_layout(job: Job, group: str, checkpoints: Checkpoints) -> dict[str, Group]:
    """Groups ``<group>/<layer>`` of a run."""
    groups = {}
    for layer in checkpoints.layers:
        shapes = {variable(n): s for n, s in nets.base_of(job.net).shapes.items() if nets.layer_of(n) == layer}
        wide = {name: int(np.prod(shape[1:])) for name, shape in shapes.items()}
        # An LSTM's bias has four numbers per unit, and so a dim of its own.
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
    """``"fc1.weight"`` to ``"w"`` and ``"fc1.bias"`` to ``"b"``: ``weight`` is a dim, ``weights`` a group."""
    kind = name.rpartition(".")[2]
    return {"weight": "w", "bias": "b"}.get(kind, kind)


def extend(path: Path, config: Mapping[str, Any], groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    """Extend the store of a run if the settings ask for more rounds and are otherwise the same.

    The store becomes what an uninterrupted run of that many rounds would have begun. Whatever the old last round has
    only because it was the last is dropped: its weights, unless it is in ``checkpoints``; its evaluation, unless that
    is due anyway; and the groups ``new``, ``ablation`` and ``readouts``, which are made after the new last round. The
    run continues from the last state, which a finished store holds: the server's model, clients' own copies of what
    may be personal, and optimiser states that last.

    Raises
    ------
    ValueError
        If fewer rounds are asked for, checkpoints among the rounds done differ, or there is no state to continue from.
    """
    store.claim(path, attrs["command"], resume=True)
    if (there := store.attributes(path).get("layout", 1)) != LAYOUT:
        raise ValueError(
            f"{path} has the layout {there} of {store.attributes(path).get('source', 'another fedstat')}, and this "
            f"fedstat writes layout {LAYOUT}: it can be read, but not continued. Continue with the version that "
            "began it, or start a new run at another path."
        )
    growth = store.changed(path, config)
    if "rounds" not in growth or growth.keys() - {"rounds", "checkpoints"}:
        return
    before, rounds = growth["rounds"]
    if rounds < before:
        raise ValueError(f"{path} has {before} rounds: a run can be made longer, not shorter, but got rounds={rounds}")
    stored, wanted = ([n for n in numbers if n < before] for numbers in growth["checkpoints"])
    if stored != wanted:
        raise ValueError(
            f"{path} holds weights after rounds {stored} of the first {before - 1}, but got checkpoints {wanted} "
            "there. Add only later ones."
        )
    if "ended" in store.attributes(path) and not store.has_state(path):
        raise ValueError(
            f"{path} was finished by an older fedstat, which stored no state to continue from. Start a new run of "
            f"{rounds} rounds at another path."
        )

    def taken(name: str, array: xr.DataArray) -> xr.DataArray | None:
        if name.startswith(("new/", "ablation/", "readouts/")):
            return None
        if (name in _EVALUATED or name.startswith(("choice/", "probe/"))) and before % config["evaluate_every"]:
            return array.where(array["round"] != before)
        return array

    changing = {name: attrs[name] for name in ("title", "config", "about")}
    store.extend(path, groups, changing, growth, taken=taken)


def _rows(parts: Sequence[Params], job: Job) -> Params:
    """Rows of the job's clients, from those of all clients in several parts."""
    found = {}
    for name in parts[0]:
        ends = np.cumsum([0, *(len(part[name]) for part in parts)])
        numbers = [job.train.ids[(job.train.ids >= low) & (job.train.ids < high)] - low for low, high in pairwise(ends)]
        local_rows = [part[name][rows] for part, rows in zip(parts, numbers, strict=True)]
        found[name] = torch.cat([rows.to(job.device) for rows in local_rows])
    return found


def save_state(writer: Relay, job: Job, state: State) -> None:
    """Add the state to the writer's next commit, so that run and state are of the same round.

    Each of several processes saves the rows of its clients.
    """
    parts = {_STORED.get(name, name): part for name, part in state._asdict().items()}
    parts |= {name: parts[name].saved() for name in ("params", "optimizer")}
    parts |= {"memory": (state.algorithm_state.clients.saved(), dict(state.algorithm_state.server))}
    parts |= {"sharing": _saved_mask(state.mask)}
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
    parts = _loaded(files[0], map_location=job.device, mmap=job.rows_folder is not None)
    number = parts.pop("of", 1)
    if number > 1 or job.process_group.several:
        all_ranks = [parts, *(_loaded(file, map_location="cpu", mmap=True) for file in files[1:number])]
        for name in ("params", "optimizer"):
            parts[name] = _rows([rank[name] for rank in all_ranks], job)
        parts["memory"] = (_rows([rank["memory"][0] for rank in all_ranks], job), parts["memory"][1])
    return parts


def _saved_mask(mask: SharedMask) -> tuple[Any, ...]:
    """Return the parts of a mask as tensors."""
    fits = {layer: [_tensor(part) for part in fit] for layer, fit in mask.fits.items()}
    of_units = ({layer: _tensor(values) for layer, values in of.items()} for of in (mask.icc, mask.decided))
    return mask.shared, fits, *of_units


def _read_mask(job: Job, shared: Mask, fits: Mapping[str, Any], *of_units: Mapping[str, Any]) -> SharedMask:
    """Return the mask of the parts that :func:`_saved_mask` made.

    Earlier versions did not save the last ones, of units: the agreement of clients, and what a test decided.
    """
    numpy = job.device.type == "cpu"
    read = {layer: Fit(*(part.numpy() if numpy else part for part in fit)) for layer, fit in fits.items()}
    return SharedMask(shared, read, *({layer: p.cpu().numpy() for layer, p in of.items()} for of in of_units))


def _tensor(part: Any) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else torch.from_numpy(np.array(part, order="C"))


def _loaded(file: Path, **options: Any) -> dict[str, Any]:
    """Part of a state, a file that the journal has compared with its checksum."""
    try:
        return dict(torch.load(file, weights_only=True, **options))
    except Exception as error:  # what a malformed file makes torch raise is not documented
        raise store.DamageError(
            f"the state to resume from, {file}, cannot be read ({guard.reason(error)}). Remove the run and run again."
        ) from error
