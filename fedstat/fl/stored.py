"""Reading of stored runs: clients' weights, state_dicts, reliability profiles of layers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from fedstat import store
from fedstat._utils import check
from fedstat._utils.lazy import pd, torch, xr
from fedstat.fl import checkpoints
from fedstat.fl.nets import Params, Piece
from fedstat.fl.split_halves import covariate
from fedstat.labelled.layer_names import is_table
from fedstat.labelled.runs import GROUPS, STAGES, Stage, drop_unselected, require_done, why_not_trained
from fedstat.stats import variance_components

PIECES = "pieces"
"""Attribute of a run with the names of tensors in the user's module, see :class:`fedstat.fl.nets.Piece`."""


@check.named_options()
def client_weights(
    run: xr.DataTree,
    layer: str,
    parameter: str | None = None,
    *,
    stage: Stage = "aggregated",
    checkpoint: int | None = None,
) -> xr.DataArray:
    """Return every client's weights of a layer, or a factor of them, as statistics take them.

    Parameters
    ----------
    run : DataTree
        Result of :func:`fedstat.fl.train` or :func:`fedstat.open_run`.
    layer : str
    parameter : str, optional
        Name of a parameter of the layer, such as ``"bias"``, or of a factor in a run with ``probe="parameters"``:
        ``"u"``, ``"mu"``, ``"weight"`` (the factor of this name in a composed layer, such as σ in W = σ + BA). By
        default W, the weights that a client predicts with.
    stage : {"trained", "aggregated"}
        "trained": after local training, before aggregation, only of the clients selected in that round. "aggregated":
        of all clients, as they predict.
    checkpoint : int, optional
        Round after which weights were stored; the last by default.

    Returns
    -------
    DataArray (client, unit, weight), (client, unit), or (client, ...) for factors whose rows are not units

    Raises
    ------
    ValueError
        If the run does not hold them; the message names the ``probe`` that stores them, or the stored parameters.

    Examples
    --------
    Factor analysis of trained weights, in place of the average, which is equal in all clients:

    >>> import fedstat
    >>> from fedstat.fl import algorithms, nets
    >>> data = fedstat.sim.generate(clients=6, d=8, m=10, n_train=20, n_test=10)
    >>> net, options = nets.mlp([8, 10, 1]), {"rounds": 2, "lr": 0.5}
    >>> run = fedstat.fl.train(data, net, algorithms.fedavg(), **options)
    >>> trained = client_weights(run, "fc1", stage="trained")
    >>> fedstat.split(trained, kappa=0.7).factors.n_factors
    3
    >>> fedstat.fa(fedstat.layer_matrix(trained), kappa=0.7).n_factors
    3

    If weights are composed, ``client_weights(run, "fc1", "weight", stage="trained")`` is σ_i of W = σ + BA, and
    ``client_weights(run, "fc1", "u")`` is u of W = u vᵀ + μ. Factorized-FL's u has rows for a layer's inputs, and its
    number of columns is the rank: ``fedstat.fa`` takes ``u.isel(u_column=0).rename(u_row="unit")``, clients as rows.
    """
    check.choice("stage", stage, STAGES)
    array = _find_variable(run, layer, parameter, stage)
    rounds = array["checkpoint"].values.tolist()
    array = array.sel(checkpoint=rounds[-1] if checkpoint is None else check.choice("checkpoint", checkpoint, rounds))
    require_done(run, array)
    return array if stage == "aggregated" else drop_unselected(array)


def _find_variable(run: xr.DataTree, layer: str, parameter: str | None, stage: Stage) -> xr.DataArray:
    """Return the variable, with all its checkpoints."""
    check.choice("layer", layer, sorted(_require_weights(run)))
    factors = run.children.get(checkpoints.PARAMETERS)
    composed = factors is not None and layer in factors.children
    if parameter is not None and composed:
        data = run[f"{checkpoints.PARAMETERS}/{layer}"].to_dataset().sel(stage=stage)
        name: str | None = checkpoints.factor_variable(parameter)
    else:
        group = GROUPS[stage]
        if group not in run.children:
            raise ValueError(
                f"the run holds no {parameter or 'weights'} of {layer!r} before aggregation. {why_not_trained(run)}"
            )
        data = run[f"{group}/{layer}"].to_dataset()
        name = {None: "w", "weight": "w", "bias": "b"}.get(parameter, parameter)
    if name not in data.data_vars:
        names = {"w": "weight"} if composed else {"w": "weight", "b": "bias"}
        parameters = sorted(names.get(str(n), str(n)) for n in data.data_vars)
        hint = "" if composed else " Factors of composed weights are stored with probe='parameters'."
        raise ValueError(f"layer {layer!r} has the parameters {', '.join(parameters)}, but got {parameter!r}.{hint}")
    return data[str(name)]


def _require_weights(run: xr.DataTree) -> Mapping[str, xr.DataTree]:
    """Return groups of weights by layer; ValueError if a run has no weights of the trainer."""
    groups = run["weights"].children if "weights" in run.children else {}
    if not groups or not all({"checkpoint", "client"} <= set(group.dims) for group in groups.values()):
        raise ValueError(
            "the run holds no weights (checkpoint, client) of fedstat.fl.train. Train it without keep_weights=[]."
        )
    return groups


@check.named_options()
def state_dict(run: xr.DataTree | str | Path, client: int | str | None = None, *, checkpoint: int = -1) -> Params:
    """Return a client's model, or the global model, as a state dict that torch loads and saves.

    Parameters
    ----------
    run : DataTree or path
        Result of :func:`fedstat.fl.train` or :func:`fedstat.open_run`, or path of its store.
    client : int or str, optional
        Label of the client whose model to return. By default the global model: parameters that are equal for all
        clients. Parameters in which clients differ are omitted.
    checkpoint : int
        Round after which weights were stored; -1 is the last.

    Returns
    -------
    dict from str to Tensor
        float32, in the order of the network's layers. Layers that were not stored (``keep_weights``) are missing.
        :func:`fedstat.fl.nets.started` and :func:`fedstat.read_weights` take the result.

        For a network that :func:`fedstat.fl.nets.from_module` made, names and shapes are the module's, so that
        ``module.load_state_dict(state_dict(run, 0))`` takes it. For networks in ``nets.NETS``, names are keys of
        ``Net.shapes`` and shapes are torch's: "conv1.weight" (output, input, row, column), "fc1.weight" (output,
        input), "fc1.bias". Embeddings have torch's shape, too: "embedding.weight" (token, dimension), the transpose of
        ``Net.shapes``. "conv1.scale" and "conv1.shift" are ``weight`` and ``bias`` of the normalization after
        ``conv1``, and "conv1.running_mean" and "conv1.running_var" its statistics.

    Raises
    ------
    ValueError
        If the run holds no weights, or none of this client or round; if no parameter is equal for all clients.

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
    groups = _require_weights(run)
    params: Params = {}
    for layer, group in groups.items():
        weights = group.to_dataset()
        rounds = weights["checkpoint"].values.tolist()
        position = rounds[-1] if checkpoint == -1 else check.choice("checkpoint", checkpoint, rounds)
        if client is not None:
            check.choice("client", client, weights["client"].values.tolist())
        for name, array in weights.data_vars.items():
            kind = {"w": "weight", "b": "bias"}.get(str(name), str(name))
            values = array.sel(checkpoint=position)
            require_done(run, values)
            value = values.isel(client=0) if client is None else values.sel(client=client)
            if client is not None or bool((values == value).all()):
                # zarr may return read-only memory
                params[f"{layer}.{kind}"] = torch.from_numpy(np.array(value)).reshape(array.attrs["shape"])
    if not params:
        first = next(iter(groups.values()))["client"].to_numpy().tolist()[0]
        raise ValueError(
            "no parameter is equal for all clients: there is no global model. Choose a client, such as "
            f"client={first!r}"
        )
    shapes = list(json.loads(run.attrs.get("config", "{}")).get("shapes", ()))
    order = sorted(params, key=lambda name: shapes.index(name) if name in shapes else len(shapes))
    params = {name: params[name] for name in order}
    params = _rename_as_module(params, pieces := json.loads(run.attrs.get(PIECES, "{}")))
    of_module = checkpoints.CONSTANTS in run.children and not pieces.keys().isdisjoint(params)
    constants = run[checkpoints.CONSTANTS].data_vars.values() if of_module else ()
    return params | {constant.attrs["tensor"]: torch.from_numpy(np.array(constant)) for constant in constants}


def _rename_as_module(params: Params, stored_pieces: dict[str, list[Any]]) -> Params:
    """Return parameters by the names of the user's module, if it has them; embeddings in torch's shape."""
    pieces = {name_in_module: Piece(*piece) for name_in_module, piece in stored_pieces.items()}
    module_params = {
        name_in_module: piece.of(params[piece.name]).clone() if piece.name else torch.tensor(0)
        for name_in_module, piece in pieces.items()
        if not piece.name or piece.name in params
    }
    names = {piece.name for piece in pieces.values()}
    rest = {name: p for name, p in params.items() if name not in names}
    return module_params | {name: p.mT.contiguous() if is_table(name, params) else p for name, p in rest.items()}


@check.named_options()
def profile(run: xr.DataTree, *, window: int | None = None, level: float = 0.95) -> pd.DataFrame:
    """Estimate the reliability of client differences by layer, from split-half training.

    Selected clients were trained on each half of their samples from one download. Differences between clients that both
    halves show are client effects, the rest noise (:func:`fedstat.stats.variance_components.components`). This holds
    only for shared entries, which all clients download alike. A layer without shared entries, such as FedPer's head, is
    NaN: both halves start from what the client learned in earlier rounds, including noise.

    Parameters
    ----------
    run : DataTree
        Result of ``fedstat.fl.train(..., probe="split-half")``.
    window : int, optional
        Pool the probed rounds among the last ``window`` rounds; by default each round is analyzed separately.
    level : float
        Level of the confidence intervals.

    Returns
    -------
    DataFrame
        A row for every layer, in the order of the network, and every probed round (one for all rounds of a
        ``window``). Columns: ``layer``, ``round`` (the last), ``clients``, ``between`` (σ_b²) and ``within`` (σ_e²,
        noise of a half) per weight of the layer, ``reliability`` (σ_b² / (σ_b² + σ_e²/2), of models trained on
        all samples), ``conf_low``, ``conf_high``, ``p_value`` (H0: noise only). A client probed in several rounds of a
        window counts once in intervals and p values.

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
    >>> run = fedstat.fl.train(data, net, fedstat.fl.algorithms.fedavg(), rounds=2, probe="split-half")
    >>> list(profile(run, window=1).layer)
    ['fc1', 'fc2']
    """
    if "probe" not in run.children:
        raise ValueError("the run has no group 'probe'. Train it with probe='split-half' (--probe split-half).")
    probe = run["probe"].to_dataset()
    probed = np.isfinite(probe["between"].transpose("round", "client", "layer").to_numpy()).any(axis=2)
    rounds = np.flatnonzero(np.any(probed, axis=1))
    if window is not None:
        rounds = rounds[rounds >= probe.sizes["round"] - check.integer("window", window)]
    if not len(rounds):
        raise ValueError(
            "no round of the window was probed. Only evaluated rounds are probed, and only if clients download common "
            "entries, as they do not in local training and with mixing servers."
        )
    groups = [rounds] if window is not None else [np.array([r]) for r in rounds]
    return pd.concat([_profile_rows(probe, group, probed, level) for group in groups], ignore_index=True)


def _profile_rows(probe: xr.Dataset, rounds: np.ndarray, probed: np.ndarray, level: float) -> pd.DataFrame:
    """Return rows of all layers, over some rounds together."""
    clients = [np.flatnonzero(probed[r]) for r in rounds]
    sizes = probe["n_train"].to_numpy()
    basis = scipy.linalg.block_diag(*(variance_components.design(len(c), covariate(sizes[c])) for c in clients))
    between, within = (
        np.concatenate([probe[name].values[r][c] for r, c in zip(rounds, clients, strict=True)])
        for name in ("between", "within")
    )
    cluster, rows = np.concatenate(clients), []
    for i, layer in enumerate(probe["layer"].values):
        parts = variance_components.SumsOfSquares(
            between[:, i : i + 1], within[:, i : i + 1], basis, int(probe["n_weights"][i]), 2
        )
        row = {"layer": layer, "round": int(probe["round"][rounds[-1]]), "clients": len(np.unique(cluster))}
        row |= dict.fromkeys(
            names := ("between", "within", "reliability", "conf_low", "conf_high", "p_value"), math.nan
        )
        if np.isfinite(parts.between).all():
            x = variance_components.components(parts, level=level, cluster=cluster)
            row |= {name: float(getattr(x, name)[0]) for name in names}
        rows.append(row)
    return pd.DataFrame(rows)


EQUAL_SAMPLES = "test_samples_in_training"
"""Attribute of a run: number of test samples that equal a training sample in x; absent if there are none."""
