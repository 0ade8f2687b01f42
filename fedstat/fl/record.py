"""Store of a run: its layout, and the state to resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils import guard
from fedstat._utils.lazy import torch, xr
from fedstat.fl import checkpoints, client_rows, disk_rows, evaluate, metrics, nets
from fedstat.fl.algorithm import Mask, SharedMask
from fedstat.fl.checkpoints import Checkpoints
from fedstat.fl.job import Job
from fedstat.fl.losses import SCORES, Score
from fedstat.fl.nets import Params
from fedstat.fl.ranks import Relay
from fedstat.fl.state import AlgorithmRows, State
from fedstat.stats.factor import Fit
from fedstat.store import Group

_CHUNK = 4_000_000  # numbers (round, client) in one file

_ROWS = ("client_params", "common_params", "optimizer")
"""Parts of a state's file with rows of clients, other than the algorithm's."""
_SCORES = [f"{of}{name}" for name in ("loss", *(score.name for score in SCORES.values())) for of in ("", "validation_")]
_BEFORE = [f"{score.name}_before" for score in SCORES.values()]
_EVALUATED = {f"metrics/{name}" for name in (*_SCORES, *_BEFORE, *metrics.METRICS, *metrics.ERRORS)}
AFTER_LAST_ROUND = ("unseen_clients", "ablation", "prediction_rules", "predictions")
"""Groups that are made after the last planned round."""


def layout(
    lead: Mapping[str, Any],
    n_rounds: int,
    n_clients: int,
    units: Mapping[str, int],
    also: Mapping[str, str] = {},
    *,
    tested: bool = False,
    score: Score = SCORES["classification"],
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
    score : Score
        Score of client models.

    Notes
    -----
    ``split/<layer>/shared`` is True if all incoming weights of a unit are shared by all clients. This says nothing
    about single entries or clients of a finer mask.
    """
    coords = {**lead, "round": range(1, n_rounds + 1)}
    by_round, chunk = tuple(coords), dict.fromkeys(lead, 1)
    by_client, by_unit = (*by_round, "client"), (*by_round, "unit")
    chunks = {"round": max(1, _CHUNK // n_clients)} if n_rounds * n_clients > _CHUNK else {}
    of_clients = {score.name: score.long_name, "loss": "mean test loss", **also}
    decided = {"decided": (by_unit, "bool", "unit is shown to be shared or personal")} if tested else {}
    groups = {
        "metrics": store.group(
            coords | {"client": n_clients},
            chunk,
            seconds=(by_round, "float64", {"long_name": "wall time of the round", "units": "s"}),
            **{name: (by_client, "float32", text, chunks) for name, text in of_clients.items()},
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


def run_layout(job: Job, rounds: int, stored: Checkpoints) -> dict[str, Group]:
    """Return the groups of the store of one run, except groups of probes."""
    score = job.score
    also = {
        f"{score.name}_before": f"{score.long_name} of a selected client's model as it leaves local training",
        "train_loss": "mean training loss of a selected client's batches",
    }
    if job.validation is not None:
        also |= {f"validation_{score.name}": f"validation {score.title}", "validation_loss": "mean validation loss"}
    tested = job.algorithm.settings.get("tau") == "test"
    groups = layout({}, rounds, job.clients, nets.layers(job.net), also, tested=tested, score=score)
    groups["metrics"] |= store.group(
        {f"n_{name}": ("client", rows.sizes) for name, rows in job.subsets.items()},
        bytes_up=("round", "float64", {"long_name": "sent to the server, by all clients", "units": "byte"}),
        bytes_down=("round", "float64", {"long_name": "sent to clients, to all of them", "units": "byte"}),
    )
    if job.aggregator.privacy:
        groups["metrics"] |= store.group({}, epsilon=("round", "float64", "ε of everything released so far"))
    groups["metrics"] |= _metrics_layout(job, rounds)
    groups |= _choice_layout(job, rounds)
    return groups | checkpoints.layout(job, stored)


def _metrics_layout(job: Job, rounds: int) -> Group:
    """Return the arrays of the job's metrics in group ``metrics``."""
    coords = {"round": range(1, rounds + 1), "client": job.clients, "class": job.metrics.classes}
    chunk = {"round": max(1, min(rounds, _CHUNK // (job.clients * max(1, len(job.metrics.classes)))))}
    return store.group(coords, **metrics.layout(job.metrics, ("round", "client"), chunk))


def _choice_layout(job: Job, rounds: int) -> dict[str, Group]:
    """Return group ``choice``, if the algorithm selects a fine-tuning."""
    if not (dims := evaluate.dims(job)):
        return {}
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    texts = {"step": "B of W + B (W' − W)", "finetuning": "which of the fine-tunings"}
    arrays = {name: (("round", *of), "float32", texts[name]) for name, of in dims.items()}
    return {"choice": store.group(coords, **arrays)}


def extend(path: Path, config: Mapping[str, Any], groups: Mapping[str, Group], attrs: Mapping[str, Any]) -> None:
    """Extend the store of a run if ``rounds`` is larger and the other settings are equal.

    The store becomes the store of an uninterrupted run with the new number of rounds. Values that the old last round
    has only as the last round are dropped:

    - its weights, unless it is in ``checkpoints``;
    - its evaluation, unless ``evaluate_every`` includes it;
    - the groups of :data:`AFTER_LAST_ROUND`, which are made after the new last round.

    The run continues from the last state, which a finished store holds: the global model, clients' personal
    parameters, and optimizer states that last.

    Raises
    ------
    ValueError
        If ``rounds`` is smaller, checkpoints among the rounds done differ, or there is no state to continue from.
    """
    store.require_available(path, attrs["command"], resume=True)
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
            f"{path} is finished and holds no state to continue from: the process was killed before it stored "
            f"one. Start a new run of {rounds} rounds at another path."
        )

    def keep_array(name: str, array: xr.DataArray) -> xr.DataArray | None:
        if name.partition("/")[0] in AFTER_LAST_ROUND:
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


_WEIGHTS = "weights"  # part of a state file


def load_last_weights(path: Path, number: int) -> dict[str, np.ndarray]:
    """Read the weights that an interrupted run saved with its state after a round; {} if there are none."""
    if not store.has_state(path):
        return {}
    parts = _load_part(store.state_file(path), map_location="cpu", mmap=True)
    return {name: p.numpy() for name, p in parts.get(_WEIGHTS, {}).items()} if parts["round"] == number else {}


def save_state(writer: Relay, job: Job, state: State, weights: Mapping[str, torch.Tensor] = {}) -> None:
    """Add the state to the writer's next commit, so that run and state belong to one round.

    Each of several processes saves the rows of its clients. ``weights`` are those of
    :meth:`fedstat.fl.checkpoints.WeightsWriter.last_weights`.
    """
    parts = state._asdict()
    parts |= {name: parts[name].saved() for name in _ROWS}
    parts |= {"algorithm_state": (state.algorithm_state.clients.saved(), dict(state.algorithm_state.server))}
    parts |= {"mask": _pack_mask(state.mask)}
    if weights:
        parts[_WEIGHTS] = dict(weights)
    if job.process_group.several:
        parts["of"] = job.process_group.number
    if job.process_group.rank:
        parts = {name: parts[name] for name in (*_ROWS, "algorithm_state")}
    with writer.write_state() as file:
        torch.save(parts, file)


def load_state(files: Sequence[Path], job: Job) -> State | None:
    """Read what :func:`save_state` wrote, of this process's clients; None if there is nothing."""
    if not files:
        return None
    parts = _read_parts(files, job)
    of_clients, of_server = parts["algorithm_state"]
    saved = {name: parts[name] for name in _ROWS} | {"algorithm_state": of_clients}
    parts |= client_rows.restore(job, saved, files[0].parent / disk_rows.FOLDER)
    parts |= {"algorithm_state": AlgorithmRows(parts["algorithm_state"], of_server)}
    parts |= {"mask": _read_mask(job, *parts["mask"])}
    return State(**{name: parts[name] for name in State._fields})


def _read_parts(files: Sequence[Path], job: Job) -> dict[str, Any]:
    """Read the parts of a state, with rows of this process's clients from the files of all that saved it."""
    parts = _load_part(files[0], map_location=job.device, mmap=job.rows_folder is not None)
    number = parts.pop("of", 1)
    if number > 1 or job.process_group.several:
        all_ranks = [parts, *(_load_part(file, map_location="cpu", mmap=True) for file in files[1:number])]
        for name in _ROWS:
            parts[name] = _gather_rows([rank[name] for rank in all_ranks], job)
        rows = _gather_rows([rank["algorithm_state"][0] for rank in all_ranks], job)
        parts["algorithm_state"] = rows, parts["algorithm_state"][1]
    return parts


def _pack_mask(mask: SharedMask) -> tuple[Any, ...]:
    """Return the parts of a mask as tensors."""
    fits = {layer: [_as_tensor(part) for part in fit] for layer, fit in mask.fits.items()}
    of_units = ({layer: _as_tensor(values) for layer, values in of.items()} for of in (mask.icc, mask.decided))
    return mask.shared, fits, *of_units


def _read_mask(
    job: Job, shared: Mask, fits: Mapping[str, Any], icc: Mapping[str, Any], decided: Mapping[str, Any]
) -> SharedMask:
    """Return the mask of the parts that :func:`_pack_mask` made."""
    numpy = job.device.type == "cpu"
    read = {layer: Fit(*(part.numpy() if numpy else part for part in fit)) for layer, fit in fits.items()}
    return SharedMask(shared, read, *({layer: p.cpu().numpy() for layer, p in of.items()} for of in (icc, decided)))


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
