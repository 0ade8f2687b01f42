"""Stored runs read: clients' weights, state_dicts, and profiles of personal layers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import pd, torch, xr
from fedstat.fl import record
from fedstat.fl.nets import Params, Piece
from fedstat.fl.split_halves import covariate
from fedstat.labelled.layer_names import is_table
from fedstat.stats import variance_components

PIECES = "pieces"
"""Attribute of a run that says how the user's module names its tensors, see :class:`fedstat.fl.nets.Piece`."""


def client_weights(
    run: xr.DataTree,
    layer: str,
    parameter: str | None = None,
    *,
    stage: Literal["trained", "aggregated"] = "aggregated",
    checkpoint: int | None = None,
) -> xr.DataArray:
    """Every client's weights of a layer, or a factor of them, as the statistics take them.

    Parameters
    ----------
    run : DataTree
        Result of :func:`fedstat.fl.train` or :func:`fedstat.open_run`.
    layer : str
    parameter : str, optional
        A parameter of the layer by its own name, such as ``"bias"``, or of a run with ``probe="parameters"`` a factor:
        ``"u"``, ``"mu"``, ``"weight"`` (which of a composed layer is the factor of this name, as σ in W = σ + BA). By
        default W, the weights that a client predicts with.
    stage : {"trained", "aggregated"}
        "trained": as local training left them, before aggregation, of the clients that were active in that round
        alone; needs ``probe="parameters"``, or ``probe="uploads"`` for W. "aggregated": of all clients, as they
        predict.
    checkpoint : int, optional
        Round after which weights were kept; the last by default.

    Returns
    -------
    DataArray (client, unit, weight), (client, unit), or (client, ...) for factors whose rows are not units

    Raises
    ------
    ValueError
        If the run does not hold them; the message says with which ``probe`` it would, or what there is.

    Examples
    --------
    Factor analysis of what clients have trained, in place of an average that is equal in all of them:

    >>> import fedstat
    >>> from fedstat.fl import algorithms, nets
    >>> data = fedstat.sim.generate(clients=6, d=8, m=10, n_train=20, n_test=10)
    >>> run = fedstat.fl.train(data, nets.mlp([8, 10, 1]), algorithms.fedavg(), rounds=2, lr=0.5, probe="uploads")
    >>> trained = client_weights(run, "fc1", stage="trained")
    >>> fedstat.split(trained, kappa=0.7).factors.n_factors
    3
    >>> fedstat.fa(fedstat.layer_matrix(trained), kappa=0.7).n_factors
    3

    Where weights are composed, ``client_weights(run, "fc1", "weight", stage="trained")`` is σ_i of W = σ + BA, and
    ``client_weights(run, "fc1", "u")`` is u of W = u vᵀ + μ. Factorized-FL's has rows for a layer's inputs and as many
    columns as the rank: ``fedstat.fa`` takes ``u.isel(u_column=0).rename(u_row="unit")``, clients as rows.
    """
    check.choice("stage", stage, record.STAGES)
    found = _variable(run, layer, parameter, stage)
    rounds = found["checkpoint"].values.tolist()
    found = found.sel(checkpoint=rounds[-1] if checkpoint is None else check.choice("checkpoint", checkpoint, rounds))
    if stage == "aggregated":
        return found
    live = found.notnull().any([dim for dim in found.dims if dim != "client"])
    return found.isel(client=np.flatnonzero(live.to_numpy()))


def _variable(run: xr.DataTree, layer: str, parameter: str | None, stage: str) -> xr.DataArray:
    """The variable, with all its checkpoints."""
    check.choice("layer", layer, sorted(_weights(run)))
    composed = layer in run[record.GROUP].children if record.GROUP in run.children else False
    if parameter is not None and composed:
        found = run[f"{record.GROUP}/{layer}"].to_dataset().sel(stage=stage)
        name: str | None = record.factor_variable(parameter)
    else:
        group = "weights" if stage == "aggregated" else "uploads"
        if group not in run.children:
            raise ValueError(
                f"the run holds no {parameter or 'weights'} of {layer!r} before aggregation. Train it with "
                "probe='uploads', or with probe='parameters' for the factors of composed weights."
            )
        found = run[f"{group}/{layer}"].to_dataset()
        name = {None: "w", "weight": "w", "bias": "b"}.get(parameter, parameter)
    if name not in found.data_vars:
        own = {"w": "weight"} if composed else {"w": "weight", "b": "bias"}
        there = sorted(own.get(str(n), str(n)) for n in found.data_vars)
        hint = "" if composed else " Factors of composed weights are kept with probe='parameters'."
        raise ValueError(f"layer {layer!r} has the parameters {', '.join(there)}, but got {parameter!r}.{hint}")
    return found[str(name)]


def _weights(run: xr.DataTree) -> Mapping[str, xr.DataTree]:
    """Groups of weights by layer; ValueError if a run has none of the trainer's."""
    groups = run["weights"].children if "weights" in run.children else {}
    if not groups or not all({"checkpoint", "client"} <= set(group.dims) for group in groups.values()):
        raise ValueError(
            "the run holds no weights (checkpoint, client) of fedstat.fl.train. Train it without keep_weights=[]."
        )
    return groups


def state_dict(run: xr.DataTree | str | Path, client: int | None = None, *, checkpoint: int = -1) -> Params:
    """A client's model, or the server's, as a state dict that torch loads and saves.

    Parameters
    ----------
    run : DataTree or path
        Result of :func:`fedstat.fl.train` or :func:`fedstat.open_run`, or where it is stored.
    client : int, optional
        The client whose model it is. By default the server's: the parameters that are the same for all clients; those
        in which clients differ are left out, as no single value would be anybody's.
    checkpoint : int
        Round after which weights were kept; -1 is the last.

    Returns
    -------
    dict from str to Tensor
        float32, in the order of the network's layers. Of a network that
        :func:`fedstat.fl.nets.from_module` made: the module's own names and shapes, so that
        ``module.load_state_dict(state_dict(run, 0))`` takes it. Of those in ``nets.NETS``: names as in ``Net.shapes``,
        such as "conv1.weight" (output, input, row, column), "fc1.weight" (output, input) and "fc1.bias", which are
        torch's. Embeddings are torch's too: "embedding.weight" (token, dimension), the transpose of ``Net.shapes``.
        "conv1.scale" and "conv1.shift" are ``weight`` and ``bias`` of the normalisation after ``conv1``, and
        "conv1.running_mean", "conv1.running_var" its statistics. :func:`fedstat.fl.nets.started` and
        :func:`fedstat.read_weights` take them. Layers
        that were not kept (``keep_weights``) are missing.

    Raises
    ------
    ValueError
        If the run holds no weights, or not of this client or round; if no parameter is the same for all clients.

    Examples
    --------
    >>> import fedstat
    >>> from fedstat.fl import algorithms, nets
    >>> data = fedstat.sim.generate(clients=6, d=8, m=10, n_train=20, n_test=10)
    >>> module = torch.nn.Sequential(torch.nn.Linear(8, 10), torch.nn.ReLU(), torch.nn.Linear(10, 1))
    >>> net = nets.from_module(module, (8,))
    >>> run = fedstat.fl.train(data, net, algorithms.fedper(), rounds=2, lr=0.5)
    >>> module.load_state_dict(state_dict(run, client=3))
    <All keys matched successfully>
    >>> list(state_dict(run))
    ['0.weight', '0.bias']
    """
    run = run if isinstance(run, xr.DataTree) else store.open_run(run)
    groups = _weights(run)
    found: Params = {}
    for layer, group in groups.items():
        weights = group.to_dataset()
        rounds = weights["checkpoint"].values.tolist()
        at = rounds[-1] if checkpoint == -1 else check.choice("checkpoint", checkpoint, rounds)
        if client is not None:
            check.choice("client", client, weights["client"].values.tolist())
        for name, array in weights.data_vars.items():
            kind = {"w": "weight", "b": "bias"}.get(str(name), str(name))
            values = array.sel(checkpoint=at)
            one = values.isel(client=0) if client is None else values.sel(client=client)
            if client is not None or bool((values == one).all()):
                # zarr may hand out memory that is not to be written to
                found[f"{layer}.{kind}"] = torch.from_numpy(np.array(one)).reshape(array.attrs["shape"])
    if not found:
        raise ValueError("no parameter is the same for all clients, so the server has no model. Name one: client=0")
    known = list(json.loads(run.attrs.get("config", "{}")).get("shapes", ()))
    order = sorted(found, key=lambda name: known.index(name) if name in known else len(known))
    found = {name: found[name] for name in order}
    return _as_module({name: found[name] for name in order}, json.loads(run.attrs.get(PIECES, "{}")))


def _as_module(params: Params, noted: dict[str, list[Any]]) -> Params:
    """Parameters by the names of the user's module, as far as it has them; else by their own, embeddings as torch's."""
    pieces = {theirs: Piece(*one) for theirs, one in noted.items()}
    own = {
        theirs: one.of(params[one.name]).clone() if one.name else torch.tensor(0)
        for theirs, one in pieces.items()
        if not one.name or one.name in params
    }
    known = {one.name for one in pieces.values()}
    rest = {name: p for name, p in params.items() if name not in known}
    return own | {name: p.mT.contiguous() if is_table(name, params) else p for name, p in rest.items()}


def profile(run: xr.DataTree, *, window: int | None = None, level: float = 0.95) -> pd.DataFrame:
    """Share of the differences between clients that is their own and not noise, by layer.

    Active clients were trained on each half of their samples from one download; differences between clients that both
    halves show are their own (:func:`fedstat.stats.variance_components.components`). This holds only for entries that
    all clients download alike, the shared ones. A layer without any, such as FedPer's head, is NaN: both halves start
    from what the client learnt in earlier rounds, noise included.

    Parameters
    ----------
    run : DataTree
        Result of ``fedstat.fl.train(..., probe="halves")``.
    window : int, optional
        Pool the probed rounds among the last ``window`` rounds; by default each round is taken by itself.
    level : float
        Level of the intervals.

    Returns
    -------
    DataFrame
        A row for every layer, in the order of the network, and every probed round (one for all with a ``window``):
        ``layer``, ``round`` (the last), ``clients``, ``between`` (σ_b²) and ``within`` (σ_e², noise of a half), per
        weight of the layer, ``personal`` (σ_b² / (σ_b² + σ_e²/2), for models trained on all samples), ``conf_low``,
        ``conf_high``, ``p_value`` (null hypothesis: noise only). A client probed in several rounds of a window counts
        once in intervals and p values.

    Raises
    ------
    ValueError
        If the run was not probed.

    Examples
    --------
    >>> import fedstat
    >>> data = fedstat.data.partition.iid(fedstat.data.load("digits"), clients=10)
    >>> data = fedstat.data.partition.train_test(fedstat.data.to_float(data), test=0.2)
    >>> net = fedstat.fl.nets.mlp([64, 20, 10])
    >>> run = fedstat.fl.train(data, net, fedstat.fl.algorithms.fedavg(), rounds=2, probe="halves")
    >>> list(profile(run, window=1).layer)
    ['fc1', 'fc2']
    """
    if "probe" not in run.children:
        raise ValueError("the run has no group 'probe'. Train it with probe='halves' (--probe halves).")
    probe = run["probe"].to_dataset()
    seen = np.isfinite(probe["between"].transpose("round", "client", "layer").to_numpy()).any(axis=2)
    rounds = np.flatnonzero(np.any(seen, axis=1))
    if window is not None:
        rounds = rounds[rounds >= probe.sizes["round"] - check.integer("window", window)]
    if not len(rounds):
        raise ValueError(
            "no round of the window was probed. Rounds are probed where they are evaluated; where clients download "
            "nothing in common (local training, mixtures of their own) there is nothing to probe."
        )
    groups = [rounds] if window is not None else [np.array([r]) for r in rounds]
    return pd.concat([_rows(probe, group, seen, level) for group in groups], ignore_index=True)


def _rows(probe: xr.Dataset, rounds: np.ndarray, seen: np.ndarray, level: float) -> pd.DataFrame:
    """Rows of all layers, over some rounds together."""
    clients = [np.flatnonzero(seen[r]) for r in rounds]
    sizes = probe["n_train"].to_numpy()
    basis = scipy.linalg.block_diag(*(variance_components.design(len(c), covariate(sizes[c])) for c in clients))
    between, within = (
        np.concatenate([probe[name].values[r][c] for r, c in zip(rounds, clients, strict=True)])
        for name in ("between", "within")
    )
    who, found = np.concatenate(clients), []
    for i, layer in enumerate(probe["layer"].values):
        one = variance_components.Parts(
            between[:, i : i + 1], within[:, i : i + 1], basis, int(probe["n_weights"][i]), 2
        )
        row = {"layer": layer, "round": int(probe["round"][rounds[-1]]), "clients": len(np.unique(who))}
        row |= dict.fromkeys(names := ("between", "within", "personal", "conf_low", "conf_high", "p_value"), math.nan)
        if np.isfinite(one.between).all():
            x = variance_components.components(one, level=level, cluster=who)
            row |= {name: float(getattr(x, name)[0]) for name in names}
        found.append(row)
    return pd.DataFrame(found)
